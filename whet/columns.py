# SPDX-License-Identifier: Apache-2.0
"""The table of columns: the named arrays of a batch, with their shapes, meanings, providers, and when they are added.

B rows, P prompt tokens, R response tokens, L = P + R, V tokens of the vocabulary, K parts of the reward. Columns
[B, R] are 0 on tokens that were not sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

When = Literal["rollout", "score", "shaping", "unscored", "scored", "update"]
Reader = Literal["estimator", "correction", "actor", "critic"]  # in the order of a step


@dataclass(frozen=True)
class Column:
    """A named array of the batch. Columns that a batch has only if a function reads them come from a provider."""

    name: str
    shape: str
    when: When
    meaning: str
    roles: tuple[str, ...] = ()  # roles whose models the provider needs
    output: str | None = None  # output of the first role's forward pass; None: a registered function is the provider
    reads: tuple[str, ...] = ()  # columns that the provider reads, besides those of every batch
    phase: str = "columns"  # its time is logged as time/<phase>
    given_to: tuple[Reader, ...] = ()  # functions to which the loop passes the column itself
    section: str | None = None  # section of the config whose keys configure the provider

    @property
    def has_provider(self) -> bool:
        """Tells whether the column comes from a provider."""
        return self.when in ("unscored", "scored")

    @property
    def is_in_every_batch(self) -> bool:
        """Tells whether every function may read the column."""
        return self.when in ("rollout", "score", "shaping") and "object" not in self.shape


def _of_model(
    name: str, role: str, output: str, meaning: str, shape: str = "B, R", given_to: tuple[Reader, ...] = ()
) -> Column:
    phase = "values" if role == "critic" else "log_probs"
    section = None if role == "actor" else role
    return Column(name, shape, "unscored", meaning, (role,), output, phase=phase, given_to=given_to, section=section)


LOSSES: tuple[Reader, ...] = ("actor", "critic")
TABLE = (
    Column("prompts", "B, P", "rollout", "token ids of the prompt, padded on the left"),
    Column("responses", "B, R", "rollout", "token ids after the prompt, padded on the right"),
    Column("input_ids", "B, L", "rollout", "prompt and response"),
    Column("attention_mask", "B, L", "rollout", "1 on tokens, 0 on padding"),
    Column("position_ids", "B, L", "rollout", "positions, padding not counted; [B, 3, L] for multimodal rotary ones"),
    Column("media", "B objects", "rollout", "images and videos of the prompt, in order; where some row has any"),
    Column("response_media", "B objects", "rollout", "images and videos that were read after the prompt, in order"),
    Column("turn_ids", "B, R", "rollout", "turn that sampled a token, -1 on text that was not sampled"),
    Column("policy_version", "B, R", "rollout", "version of the weights that sampled a token"),
    Column("rollout_log_probs", "B, R", "rollout", "log pi of the rollout engine, before top-p, top-k and penalties"),
    Column("uid", "B", "rollout", "number of the group: rows of one prompt have the same"),
    Column("trajectory_uid", "B", "rollout", "number of the trajectory"),
    Column("truncated", "B", "rollout", "whether the length limit cut the trajectory off"),
    Column("uid_name", "B objects", "rollout", "name of the group"),
    Column("trajectory_uid_name", "B objects", "rollout", "name of the trajectory"),
    Column("data_source", "B objects", "rollout", "data source of the prompt"),
    Column("domain", "B objects", "rollout", "domain of the prompt, empty without reward.domains"),
    Column("agent", "B objects", "rollout", "sub-agent that wrote the row, empty for the main one"),
    Column("error", "B objects", "score", "failure of the trajectory, None without one"),
    Column("response_mask", "B, R", "score", "1 on tokens that the policy sampled, 0 in rows that failed"),
    Column("token_level_scores", "B, R", "score", "score of a token"),
    Column("accuracy", "B", "score", "1 for a correct response, 0 for a wrong one"),
    Column("reward_parts", "B, K", "score", "parts of the reward"),
    Column("token_level_rewards", "B, R", "shaping", "scores after shaping and the KL in the reward"),
    _of_model("old_log_probs", "actor", "log_probs", "log pi of the policy before the update", given_to=("actor",)),
    _of_model("entropy", "actor", "entropy", "entropy of the policy before the update", given_to=("actor",)),
    _of_model("sum_pi_squared", "actor", "sum_pi_squared", "sum_v pi_v^2 before the update", given_to=("actor",)),
    _of_model("ref_log_probs", "ref", "log_probs", "log pi of the reference"),
    _of_model("old_vocab_log_probs", "actor", "vocab_log_probs", "log pi of every token, before the update", "B, R, V"),
    _of_model("ref_vocab_log_probs", "ref", "vocab_log_probs", "log pi of every token, of the reference", "B, R, V"),
    _of_model("values", "critic", "values", "value of the state in which a token was chosen", given_to=("critic",)),
    Column(
        name="rm_scores",
        shape="B",
        when="unscored",
        meaning="score of the reward model at the last token; 0 in all but the last row of a trajectory",
        roles=("reward_model",),
        output="scores",
        phase="reward_model",
    ),
    Column(
        name="process_rewards",
        shape="B, R",
        when="unscored",
        meaning="log pi of the critic (a language model here) minus that of the reference",
        roles=("critic",),
        reads=("ref_log_probs",),
        phase="values",
        section="critic",
    ),
    Column(
        name="teacher_log_probs",
        shape="B, R",
        when="scored",
        meaning="log pi of the teacher, or of the policy with a hint in its prompt",
        roles=("actor",),
        phase="log_probs",
        section="teacher",
    ),
    Column(
        "judge_scores",
        "B",
        "scored",
        "score of the policy as a judge, in a trajectory's last row",
        phase="reward_model",
    ),
    Column("reward_baselines", "B", "scored", "score of the greedy response, 0 if that failed", phase="baselines"),
    Column("draws", "B, R", "scored", "uniform random number in [0, 1), equal for equal responses"),
    Column("state_hash", "B, R", "scored", "hash of the state in which a token's turn was sampled"),
    Column("advantages", "B, R", "update", "advantage of a token", given_to=("correction", *LOSSES)),
    Column("returns", "B, R", "update", "return, the target of a critic", given_to=("estimator", *LOSSES)),
    Column("log_probs", "B, R", "update", "log pi of the model in its update", given_to=LOSSES),
    Column("vocab_log_probs", "B, R, V", "update", "log pi of every token of the vocabulary", given_to=("actor",)),
    Column("old_values", "B, R", "update", "`values` before the update", given_to=("critic",)),
    Column("loss_mask", "B, R", "update", "1 on tokens that are trained on: sampled, and not rejected"),
    Column("token_weights", "B, R", "update", "weight of a token in the loss"),
)
COLUMNS: dict[str, Column] = {column.name: column for column in TABLE}  # providers of users add more
POLICY_OUTPUTS, VALUE_OUTPUTS, SCORE_OUTPUTS = (
    frozenset(column.output for column in TABLE if column.output and column.roles[0] in roles)
    for roles in (("actor", "ref"), ("critic",), ("reward_model",))
)
# The column of the scores of `reward_model`, by the key that says where they come from.
SCORED_BY = {"model_path": "rm_scores", "rubric": "judge_scores"}
ROW_COLUMNS = frozenset(column.name for column in TABLE if column.shape == "B, K")  # no padding, even where K is R
