# SPDX-License-Identifier: Apache-2.0
"""The model "whet" of lm-eval (EleutherAI's Language Model Evaluation Harness), which runs on whet's engines.

    whet lm-eval --model_args path=DIR --tasks gsm8k
    lm_eval.simple_evaluate(model=WhetLM(path="DIR"), tasks=["gsm8k"])

The native rollout engine samples texts; log-likelihoods are computed as in training. It runs in one process, and
chooses batch sizes itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from whet import devices
from whet.checkpoints.export import model_folder
from whet.config.schema import Dtype, ModelConfig, RolloutConfig
from whet.data.chat import SANITIZE, render_chat
from whet.errors import ConfigError, DataError, describe, pip_install
from whet.kernels.log_probs import vocab_log_probs
from whet.keyed import key
from whet.models.load import cast_weights, load_policy, load_tokenizer, num_positions, stop_token_ids, torch_dtype
from whet.models.outputs import ForwardSettings, hidden_states
from whet.models.packing import layout
from whet.models.positions import position_ids
from whet.models.supported import support_of
from whet.phases import counted
from whet.planning.dtypes import choose
from whet.rollout.build import chosen_engine, rollout_engine
from whet.rollout.protocol import Request, SamplingParams, SharesModule, generate
from whet.tracking.console import long_phase
from whet.types import Message

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise ConfigError("lm-eval", str(error), "the package lm-eval", f"run {pip_install('lm-eval')}") from error

MAX_NEW_TOKENS = 256  # lm-eval's default for tasks without a limit
BATCH_TOKENS = 4096  # of a forward pass for log-likelihoods
CHUNK_TOKENS = 512  # with logits in memory at once
Scored = tuple[Any, list[int], list[int]]  # the request as text, context, continuation


@register_model("whet")
class WhetLM(TemplateLM):
    """Implements lm-eval's LM interface. `path` is a model, checkpoint or run, like model.path of `whet eval`."""

    def __init__(
        self, path: str, *, dtype: Dtype = "auto", max_batch_size: int = 256, seed: int = 0, **harness: object
    ) -> None:
        """Loads the model. `harness` has arguments that lm-eval passes to every model (batch_size, device); ignored."""
        super().__init__()
        if unknown := harness.keys() - {"batch_size", "device"}:
            raise ConfigError("model_args", ", ".join(sorted(unknown)), "path, dtype, max_batch_size, seed")
        self.seed, named = seed, choose(dtype, "dtype")
        with long_phase("loading the model"), model_folder(path) as folder:
            self.tokenizer = load_tokenizer(folder)
            self.policy = load_policy(folder)
            cast_weights(self.policy, torch_dtype(named))
            self.policy.to(devices.here())  # type: ignore[arg-type]
            self.stop_ids = stop_token_ids(folder, self.tokenizer, {})
            rollout = chosen_engine(RolloutConfig(max_batch_size=max_batch_size or 256), ModelConfig(path=folder))
        model = ModelConfig(path=path)
        self.engine = rollout_engine(rollout, torch_dtype(named), lambda: self.tokenizer, devices.here(), model)
        assert isinstance(self.engine, SharesModule)  # the engine of a config's defaults
        self.engine.attach(self.policy, version=0)
        self.max_length = num_positions(self.policy.config)

    @property
    def eot_token_id(self) -> int:
        """The id of the end token. The token also precedes a text without context, if there is no begin token."""
        assert isinstance(self.tokenizer.eos_token_id, int)
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The id of the token that precedes a text without context."""
        begin = self.tokenizer.bos_token_id
        return begin if isinstance(begin, int) else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name, for lm-eval's caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Renders the messages as one text, with the tokenizer's chat template."""
        return render_chat(
            self.tokenizer,
            [Message.from_dict(message) for message in chat_history],
            add_generation_prompt=add_generation_prompt,
            # The harness itself encodes the text.
            chat_template_kwargs={SANITIZE: False, "continue_final_message": not add_generation_prompt},
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: object) -> list[int]:
        """Encodes a text, with the tokenizer's special tokens unless the text begins with them."""
        begin = self.tokenizer.bos_token
        special = not (begin and string.startswith(begin)) if add_special_tokens is None else add_special_tokens
        return list(self.tokenizer.encode(string, add_special_tokens=special))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Samples a text for each request, cut before its first stop string. The default is greedy decoding."""
        prepared = [self._request(number, *instance.args) for number, instance in enumerate(requests)]
        with long_phase("sampling"):
            completions = generate(self.engine, [request for request, _ in prepared])
        texts = []
        for instance, (_, until), completion in zip(requests, prepared, completions, strict=True):
            text = self.tokenizer.decode(list(completion.token_ids), skip_special_tokens=True)
            text = postprocess_generated_text(text, until, None)
            self.cache_hook.add_partial("generate_until", instance.args, text)
            texts.append(text)
        return texts

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Computes the log-likelihood of each text; a long text is split into windows of the model's length."""
        windows: list[Scored] = []
        owners: list[int] = []
        for number, instance in enumerate(requests):
            ids = self.tok_encode(instance.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (log_prob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += log_prob
        for instance, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", instance.args, total)
        return totals

    def _loglikelihood_tokens(self, requests: Sequence[Scored], **kwargs: object) -> list[tuple[float, bool]]:
        """Computes the log-likelihood of each continuation, and whether greedy decoding would produce it."""
        results: dict[int, tuple[float, bool]] = {}
        with long_phase("log-likelihoods"):
            for batch in self._batches(requests):
                results |= zip(batch, self._score([requests[number] for number in batch]), strict=True)
                counted(len(results), len(requests))
        for number, (text, _, _) in enumerate(requests):
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, results[number])
        return [results[number] for number in range(len(requests))]

    def _batches(self, requests: Sequence[Scored]) -> Iterator[list[int]]:
        """Yields batches of requests of similar length, each with up to BATCH_TOKENS tokens."""
        batch: list[int] = []
        for number in sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2])):
            longest = sum(map(len, requests[(batch or [number])[0]][1:]))
            if batch and (len(batch) + 1) * longest > BATCH_TOKENS:
                yield batch
                batch = []
            batch.append(number)
        if batch:
            yield batch

    @torch.no_grad()
    def _score(self, requests: Sequence[Scored]) -> list[tuple[float, bool]]:
        # Left-truncated, like lm-eval's own models. The last token predicts nothing, so it may be beyond max_length.
        rows = [(context + continuation)[-(self.max_length + 1) :] for _, context, continuation in requests]
        sizes = [min(len(request[2]), len(row) - 1) for request, row in zip(requests, rows, strict=True)]
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        real = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        scored = torch.tensor([[0] * (width - 1 - size) + [1] * size for size in sizes])
        positions = position_ids(real).clamp(max=self.max_length - 1)
        batch = {"input_ids": ids, "attention_mask": real, "position_ids": positions, "response_mask": scored}
        where = layout(batch, ends=False).to(self.policy.device)
        settings = ForwardSettings(packing=support_of(self.policy).is_own)
        hidden = hidden_states(self.policy, where, settings)[where.states]
        head = self.policy.get_output_embeddings()
        chosen = []
        for part, target in zip(hidden.split(CHUNK_TOKENS), where.targets.split(CHUNK_TOKENS), strict=True):
            log_probs = vocab_log_probs(part, head.weight, head.bias)
            chosen.append(torch.stack([log_probs.gather(1, target[:, None])[:, 0], log_probs.argmax(1) == target], 1))
        columns = where.to_columns(torch.cat(chosen)).cpu()  # [B, R, 2]
        return [
            (float(row[:, 0].sum()), int(row[:, 1].sum()) == size) for row, size in zip(columns, sizes, strict=True)
        ]

    def _request(self, number: int, context: str, options: Mapping[str, Any]) -> tuple[Request, list[str]]:
        """Makes an engine request for lm-eval's request.  Returns the request and its stop strings."""
        settings = normalize_gen_kwargs(dict(options), MAX_NEW_TOKENS)
        new = settings["max_gen_toks"]
        if new >= self.max_length:
            expected = f"less than the model's {self.max_length} positions, which leaves room for a prompt"
            raise ConfigError("max_gen_toks", new, expected, "lower it with --gen_kwargs max_gen_toks=N")
        until = [text for text in settings.get("until", []) if text]
        params = SamplingParams(
            max_new_tokens=new,
            temperature=float(settings.get("temperature", 1.0)) if settings["do_sample"] else 0.0,
            top_p=float(settings.get("top_p", 1.0)),
            top_k=int(settings.get("top_k", 0)),
            stop_token_ids=self.stop_ids,
            stop=tuple(until),
        )
        ids = tuple(self.tok_encode(context)[-(self.max_length - new) :])
        return Request(str(number), ids, params, key(self.seed, "lm-eval", number)), until


def main(arguments: Sequence[str]) -> None:
    """Runs lm-eval's command line with the model "whet".  Raises: DataError if a task's data cannot be downloaded."""
    from huggingface_hub.errors import LocalEntryNotFoundError
    from lm_eval.__main__ import cli_evaluate

    sys.argv = ["whet lm-eval", "run", "--model", "whet", *arguments]
    try:
        cli_evaluate()
    except (ConnectionError, TimeoutError, LocalEntryNotFoundError) as error:
        asked = list(arguments)
        tasks = f"--tasks {asked[asked.index('--tasks') + 1]}" if "--tasks" in asked[:-1] else "the tasks"
        raise DataError(
            f"data of {tasks}",
            f"lm-eval cannot fetch it ({describe(error)})",
            "the hub, or data kept below HF_HOME",
            "run the command once where there is a network, copy HF_HOME and set HF_HUB_OFFLINE=1; or name a task of "
            "your own over local files (dataset_path: json) with --include_path FOLDER",
        ) from error
