# SPDX-License-Identifier: Apache-2.0
"""Reward managers in the interfaces of verl and EasyR1, and functions for them, as their users bring along."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from whet.plugins.migration.protocol import DataProto


def score(data_source, solution_str, ground_truth, extra_info=None):
    """verl's form: a dict whose other numbers are reported."""
    right = solution_str.strip() == str(ground_truth)
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str.strip()}


def score_all(data_sources, solution_strs, ground_truths, extra_infos, **options):
    """verl's form for all responses."""
    rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    return [score(*row)["score"] * options.get("scale", 1.0) for row in rows]


class VerlForm:
    """The shared part of verl's managers."""

    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", **kwargs) -> None:
        self.tokenizer, self.num_examine = tokenizer, num_examine
        self.compute_score, self.reward_fn_key, self.kwargs = compute_score, reward_fn_key, kwargs
        assert callable(compute_score) and num_examine == 0


class OneByOne(VerlForm):
    """In the form of verl's naive manager."""

    def __call__(self, data: DataProto, return_dict: bool = False):
        if "rm_scores" in data.batch.keys():  # noqa: SIM118  (users write it)
            return data.batch["rm_scores"]
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extra = defaultdict(list)
        for row in range(len(data)):
            item = data[row]
            prompt_length = item.batch["prompts"].shape[-1]
            num_prompt = int(item.batch["attention_mask"][:prompt_length].sum())
            num_response = int(item.batch["attention_mask"][prompt_length:].sum())
            self.tokenizer.decode(item.batch["prompts"][-num_prompt:], skip_special_tokens=True)
            ids = item.batch["responses"][:num_response]
            extra_info = item.non_tensor_batch.get("extra_info", {})
            extra_info["num_turns"] = item.non_tensor_batch.get("__num_turns__", None)
            found = self.compute_score(
                data_source=item.non_tensor_batch[self.reward_fn_key],
                solution_str=self.tokenizer.decode(ids, skip_special_tokens=True),
                ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
                extra_info=extra_info,
            )
            value = found["score"] if isinstance(found, dict) else found
            for name, each in found.items() if isinstance(found, dict) else ():
                extra[name].append(each)
            rewards[row, num_response - 1] = value
        return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards


class HandsOn(OneByOne):
    """A class whose constructor passes on its arguments."""

    def __init__(self, *args, bonus=0.0, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.bonus = bonus


class AllAtOnce(VerlForm):
    """In the form of verl's batch manager: further arguments are options of the function."""

    def verify(self, data):
        prompt_length = data.batch["prompts"].shape[-1]
        lengths = data.batch["attention_mask"][:, prompt_length:].sum(dim=-1)
        ids = data.batch["responses"]
        texts = [self.tokenizer.decode(ids[i][: lengths[i]], skip_special_tokens=True) for i in range(len(data))]
        return self.compute_score(
            data_sources=data.non_tensor_batch[self.reward_fn_key],
            solution_strs=texts,
            ground_truths=[item.non_tensor_batch["reward_model"].get("ground_truth") for item in data],
            extra_infos=data.non_tensor_batch.get("extra_info", [None] * len(data)),
            **self.kwargs,
        )

    def __call__(self, data, return_dict=False):
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        prompt_length = data.batch["prompts"].shape[-1]
        lengths = data.batch["attention_mask"][:, prompt_length:].sum(dim=-1)
        for row, value in enumerate(self.verify(data)):
            rewards[row, lengths[row].item() - 1] = value
        data.batch["acc"] = rewards.sum(1)
        return {"reward_tensor": rewards, "reward_extra_info": {}} if return_dict else rewards


class InProcesses(VerlForm):
    """In the form of verl's prime manager: processes of its own, and positional arguments."""

    def verify(self, data):
        texts = self.tokenizer.batch_decode(data.batch["responses"], skip_special_tokens=True)
        truths = [item.non_tensor_batch["reward_model"]["ground_truth"] for item in data]
        sources = data.non_tensor_batch[self.reward_fn_key]

        async def gather() -> list[Any]:
            loop = asyncio.get_running_loop()
            with ProcessPoolExecutor(max_workers=1) as executor:
                calls = [partial(self.compute_score, *row) for row in zip(sources, texts, truths, strict=True)]
                return await asyncio.gather(*(loop.run_in_executor(executor, call) for call in calls))

        scores = [each["score"] if isinstance(each, dict) else float(each) for each in asyncio.run(gather())]
        data.batch["acc"] = torch.tensor(scores, dtype=torch.float32)
        return scores

    def __call__(self, data: DataProto, return_dict: bool = False):
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        lengths = data.batch["attention_mask"][:, data.batch["prompts"].shape[-1] :].sum(-1)
        for row, value in enumerate(self.verify(data)):
            rewards[row, lengths[row].item() - 1] = value
        return {"reward_tensor": rewards} if return_dict else rewards


class Overlong(OneByOne):
    """In the form of verl's dapo manager: a penalty for length, configured by attributes."""

    def __init__(
        self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", max_resp_len=None,
        overlong_buffer_cfg=None,
    ) -> None:  # fmt: skip
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.buffer, self.longest = overlong_buffer_cfg, max_resp_len
        assert self.longest >= self.buffer.len

    def __call__(self, data: DataProto, return_dict: bool = False):
        found = super().__call__(data, return_dict=True)
        lengths = data.batch["attention_mask"][:, data.batch["prompts"].shape[-1] :].sum(-1)
        for row, length in enumerate(lengths.tolist()):
            exceed = length - (self.longest - self.buffer.len)
            penalty = min(-exceed / self.buffer.len * self.buffer.penalty_factor, 0)
            found["reward_tensor"][row, length - 1] += penalty
            if self.buffer.get("log"):
                found["reward_extra_info"]["overlong_reward"].append(penalty)
                found["reward_extra_info"]["overlong"].append(penalty < 0)
        return found if return_dict else found["reward_tensor"]


class OneRow:
    """In the form of verl's newer managers: one row a call, in the event loop that it was made in."""

    def __init__(self, config, tokenizer, compute_score, reward_router_address=None) -> None:
        self.loop = asyncio.get_event_loop()
        self.config, self.tokenizer, self.compute_score = config, tokenizer, compute_score
        self.slots = asyncio.Semaphore(config.reward_model.get("max_concurrent", 1))

    async def run_single(self, data: DataProto) -> dict:
        assert len(data) == 1
        item = data[0]
        ids = item.batch["responses"]
        ids = ids[: item.batch["attention_mask"][-ids.shape[-1] :].sum()]
        async with self.slots:
            text = await self.loop.run_in_executor(None, lambda: self.tokenizer.decode(ids, skip_special_tokens=True))
            found = self.compute_score(
                data_source=item.non_tensor_batch["data_source"],
                solution_str=text,
                ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
                extra_info=item.non_tensor_batch.get("extra_info", {}),
            )
        extra = dict(found) if isinstance(found, dict) else {"acc": found}
        return {"reward_score": extra.get("score", found), "reward_extra_info": extra}


@dataclass
class Configured:
    """In the form of EasyR1's manager: everything is in the config."""

    config: Any
    tokenizer: Any

    def __post_init__(self) -> None:
        spec = importlib.util.spec_from_file_location("their_function", self.config.reward_function)
        module = importlib.util.module_from_spec(spec)
        sys.modules["their_function"] = module
        spec.loader.exec_module(module)
        self.function = partial(getattr(module, self.config.reward_function_name), **self.config.reward_function_kwargs)

    def compute_reward(self, data: DataProto):
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        metrics = defaultdict(list)
        lengths = torch.sum(data.batch["response_mask"], dim=-1)
        for row in range(len(data)):
            length = int(lengths[row].item())
            ids = data.batch["responses"][row][:length]
            text = self.tokenizer.decode(ids, skip_special_tokens=self.config.skip_special_tokens)
            found = self.function(text, data.non_tensor_batch["ground_truth"][row])
            rewards[row, length - 1] = found["overall"]
            for name, value in found.items():
                metrics[name].append(value)
        return rewards, metrics


def overall(predict: str, ground_truth: str, format_weight: float = 0.1) -> dict[str, float]:
    """EasyR1's form of a function."""
    right = float(predict.strip() == str(ground_truth))
    return {"overall": (1 - format_weight) * right + format_weight, "format": 1.0, "accuracy": right}


def compute_reward(data: DataProto, *, scale: float = 1.0):
    """A function of a batch that returns the scores, and more numbers of each row."""
    right = torch.tensor([float(text == truth) for text, truth in zip(data.responses, data.ground_truth, strict=True)])
    return scale * right, {"length": data.batch["response_mask"].sum(1).tolist()}


class Nothing:
    """A class that scores nothing."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer


class Picky(OneByOne):
    """A manager that needs more than verl gives it."""

    def __init__(self, tokenizer, num_examine, compute_score, bonus) -> None:
        super().__init__(tokenizer, num_examine, compute_score)
        self.bonus = 1 / bonus
