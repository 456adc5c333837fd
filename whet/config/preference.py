# SPDX-License-Identifier: Apache-2.0
"""The configs of `whet preference` and `whet train-reward`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveInt

from whet.config.schema import ExamplesConfig, ExamplesDataConfig, TrainerConfig
from whet.config.section import Choice, Section, SectionPlace, Values, key
from whet.errors import ConfigError
from whet.registry import PREFERENCE_LOSSES, Entry


class ResponsesDataConfig(ExamplesDataConfig):
    """Examples with several responses per prompt, as texts or messages; without a prompt, as whole conversations."""

    chosen_key: str = key("chosen", "field with the better response, or with a whole conversation that ends in it")
    rejected_key: str = key("rejected", "field with the worse response, or with a whole conversation that ends in it")
    overlong: Literal["drop", "error"] = key("drop", "drop rows with a response over max_length, or error")

    builder: ClassVar[str] = "whet.data.preferences:build_comparisons"


class PreferenceDataConfig(ResponsesDataConfig):
    """The rows of `whet train-reward`: pairs, or responses with labelled steps."""

    margin_key: str = key("margin", "field with the least difference of the two scores; rows without it have 0")


class ComparisonDataConfig(ResponsesDataConfig):
    """Rows of `whet preference`: pairs, responses with a label, or lists with scores (read as pair: best and worst)."""

    list_size: PositiveInt = key(
        4, "most responses of a list, for a loss of lists; a longer list keeps best, worst and evenly spaced others"
    )


class ReferenceConfig(Section):
    """The reference model. Some losses read its log-probs; for other losses there is no reference."""

    mode: Literal["frozen", "cached", "none"] = key(
        "frozen",
        "frozen: a second model, or the same with its adapter off; cached: one pass over all rows before the first "
        "step, kept in a file; none: all log-probs 0",
    )
    model_path: str | None = key(None, "model of the reference; unset: model.path, the policy at its start")
    file: str | None = key(None, "file of cached log-probs; unset: reference.safetensors in the run's folder")
    update_steps: PositiveInt | None = key(None, "steps after which the reference becomes the policy; unset: never")


class PreferenceConfig(ExamplesConfig):
    """The config of `whet preference`."""

    data: ComparisonDataConfig = ComparisonDataConfig()
    loss: Annotated[str, Choice(PREFERENCE_LOSSES, "loss_options")] = key("dpo", "registered preference loss")
    loss_options: Values = key({}, "options of the loss")
    reference: ReferenceConfig = ReferenceConfig()
    trainer: TrainerConfig = TrainerConfig(experiment_name="preference")

    command: ClassVar[str] = "preference"

    @property
    def entry(self) -> Entry:
        """The registry's entry of the loss."""
        return PREFERENCE_LOSSES[self.loss]

    @property
    def of(self) -> str:
        """The kind of comparison that the loss reads: pair, label or list."""
        return str(self.entry.marks.get("of", "pair"))

    @property
    def reads_reference(self) -> bool:
        """Tells whether log-probs of a reference are needed: the loss reads them, and `reference.mode` is not none."""
        return "ref_log_probs" in self.entry.columns and self.reference.mode != "none"

    @property
    def reads_mismatched(self) -> bool:
        """Tells whether log-probs of responses to other prompts are needed, for the loss's `reference_point`."""
        return self.reads_reference and "reference_point" in self.entry.columns

    @property
    def rows_an_example(self) -> int:
        """The number of batch rows that an example (a comparison) has."""
        return self.data.list_size if self.of == "list" else 2

    def problems(self, at: SectionPlace) -> Iterator[ConfigError]:
        if self.of not in ("pair", "label", "list"):
            expected, change = "pair, label or list", "register it with of=..."
            yield ConfigError(f"loss {self.loss!r}: of", self.of, expected, change)
        if "ref_log_probs" not in self.entry.columns:
            for name in ("mode", "model_path", "file", "update_steps"):
                if (value := self.reference[name]) not in (None, "frozen", "none"):
                    expected = f"unset: loss={self.loss} reads no reference"
                    yield ConfigError(f"reference.{name}", value, expected, "unset it, or choose another loss")
            return
        if self.reference.update_steps is None:
            return
        if self.reference.mode != "frozen":
            expected = "frozen, with reference.update_steps"
            yield ConfigError("reference.mode", self.reference.mode, expected, "unset one of both")
        if self.model.lora.rank is not None:
            expected = "unset with an adapter: the reference is the model without the adapter"
            yield ConfigError("reference.update_steps", self.reference.update_steps, expected, "unset one of both")


def frozen_models(config: PreferenceConfig) -> dict[str, str]:
    """Returns the paths of the models that a run only reads, by role. A reference that is the base of an adapter has no
    memory of its own."""
    reference, own = config.reference, config.reference.model_path
    is_beside = own is not None or (reference.mode != "cached" and config.model.lora.rank is None)
    return {"ref": str(own or config.model.path)} if config.reads_reference and is_beside else {}


class RewardTrainingConfig(ExamplesConfig):
    """The config of `whet train-reward`."""

    data: PreferenceDataConfig = PreferenceDataConfig()
    trainer: TrainerConfig = TrainerConfig(experiment_name="reward")
    center_coef: NonNegativeFloat = key(
        0.0, "weight of the squared sum of a pair's scores in the loss, which keeps scores near 0; 0: none"
    )

    command: ClassVar[str] = "train-reward"

    @property
    def rows_an_example(self) -> int:
        return 2

    def problems(self, at: SectionPlace) -> Iterator[ConfigError]:
        if self.model.lora.path is not None:
            found = f"{self.model.lora.path} is an adapter of a language model"
            change = "export the merged model first (`whet export`), and name it as model.path"
            yield ConfigError("model.lora.path", found, "a whole model for `whet train-reward`", change)
