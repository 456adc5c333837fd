# SPDX-License-Identifier: Apache-2.0
"""Files with the imports of verl and EasyR1 load as they are, without verl; nothing of it is left afterwards."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from whet.cli.app import app
from whet.errors import RegistryError, RewardError
from whet.models.load import load_tokenizer
from whet.plugins.migration.managers import OFFERED, stand_ins
from whet.registry import KL_FORMS
from whet.rewards.pool import RewardPool
from whet.types import RewardItem, RewardResult

NAIVE = """
from collections import defaultdict
from typing import Any

import torch

from verl import DataProto
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager import register
from verl.workers.reward_manager.abstract import AbstractRewardManager


@register("mine")
class MyRewardManager(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source") -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        reward_from_rm_scores = self._extract_reward_from_rm_scores(data, return_dict)
        if reward_from_rm_scores is not None:
            return reward_from_rm_scores
        reward_tensor = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        reward_extra_info = defaultdict(list)
        for i in range(len(data)):
            data_item = data[i]
            prompt_length = data_item.batch["prompts"].shape[-1]
            valid = data_item.batch["attention_mask"][prompt_length:].sum()
            response_str = self.tokenizer.decode(data_item.batch["responses"][:valid], skip_special_tokens=True)
            score = default_compute_score(
                data_source=data_item.non_tensor_batch[self.reward_fn_key],
                solution_str=response_str,
                ground_truth=data_item.non_tensor_batch["reward_model"]["ground_truth"],
                extra_info=data_item.non_tensor_batch.get("extra_info", {}),
            )
            reward_extra_info["doubled"].append(2 * score)
            reward_tensor[i, valid - 1] = score
        if return_dict:
            return {"reward_tensor": reward_tensor, "reward_extra_info": reward_extra_info}
        return reward_tensor
"""
LOOP = """
import inspect

from verl import DataProto
from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.utils.reward_score import default_compute_score


@register("mine")
class MyRewardManager(RewardManagerBase):
    made = 0

    @classmethod
    def init_class(cls, config, tokenizer):
        if cls._class_initialized:
            return
        super().init_class(config, tokenizer)
        cls.made += 1

    def __init__(self, config, tokenizer, compute_score, reward_router_address=None, reward_model_tokenizer=None):
        super().__init__(config, tokenizer, compute_score)
        assert reward_router_address is None and not inspect.iscoroutinefunction(self.compute_score)
        self.compute_score = compute_score or default_compute_score

    async def run_single(self, data: DataProto) -> dict:
        data_item = data[-1:][0]
        ids = data_item.batch["responses"]
        valid = data_item.batch["attention_mask"][-ids.shape[-1] :].sum()
        decode = lambda: self.tokenizer.decode(ids[:valid], skip_special_tokens=True)
        text = await self.loop.run_in_executor(None, decode)
        score = self.compute_score(
            data_source=data_item.non_tensor_batch["data_source"],
            solution_str=text,
            ground_truth=data_item.non_tensor_batch["reward_model"]["ground_truth"],
            extra_info=data_item.non_tensor_batch.get("extra_info", {}),
        )
        return {"reward_score": score, "reward_extra_info": {"made": self.made, "bonus": self.config.bonus}}
"""
FUNCTION = """
from verl.utils.reward_score import default_compute_score


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if data_source == "always":
        return {"score": 1.0, "acc": 1.0}
    return default_compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs)
"""
EASYR1 = """
from collections import defaultdict

import torch
from transformers import PreTrainedTokenizer

from verl import DataProto
from verl.workers.reward import FunctionRewardManager
from verl.workers.reward.config import RewardConfig


class MyManager(FunctionRewardManager):
    def __init__(self, config: RewardConfig, tokenizer: PreTrainedTokenizer):
        super().__init__(config, tokenizer)

    def compute_reward(self, data: DataProto):
        reward_tensor = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        reward_metrics = defaultdict(list)
        response_length = torch.sum(data.batch["response_mask"], dim=-1)
        for i in range(len(data)):
            length = int(response_length[i].item())
            text = self.tokenizer.decode(data.batch["responses"][i][:length], skip_special_tokens=True)
            score = self.reward_fn({"response": text, "ground_truth": data.non_tensor_batch["ground_truth"][i]})
            reward_tensor[i, length - 1] = score["overall"]
            for key, value in score.items():
                reward_metrics[key].append(value)
        return reward_tensor, reward_metrics
"""
OVERALL = """
def one(reward_input, weight):
    return {"overall": weight * (reward_input["response"] == reward_input["ground_truth"]), "format": 1.0}
"""


@pytest.fixture(autouse=True)
def without_verl() -> None:
    assert not [name for name in sys.modules if name.partition(".")[0] == "verl"]


def scores(file: Path, name: str, model: Path, num_workers: int = 0, **kwargs: Any) -> list[RewardResult]:
    tokenizer = load_tokenizer(model)
    items = [
        RewardItem("math", text, "5", {}, "2+3=", (1,), tuple(tokenizer.encode(text, add_special_tokens=False)))
        for text in ("5", "12")
    ]
    options: dict[str, Any] = {"timeout_seconds": 60.0, "correct_threshold": 1.0, "kwargs": kwargs}
    with RewardPool(f"{file}:{name}", num_workers=num_workers, tokenizer=(str(model), False), **options) as pool:
        found = pool.score(items)
    assert not [name for name in sys.modules if name.partition(".")[0] == "verl"]
    results = [each for each in found if isinstance(each, RewardResult)]
    assert len(results) == len(items), found
    return results


@pytest.mark.slow
def test_a_manager_with_verls_imports(tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "naive.py").write_text(NAIVE.replace("default_compute_score(\n", "self.compute_score(\n"))
    exact = scores(tmp_path / "naive.py", "MyRewardManager", model_folder, 1, compute_score="exact_match")
    assert [(each.reward, each.parts["doubled"]) for each in exact] == [(1.0, 2.0), (0.0, 0.0)]
    (tmp_path / "default.py").write_text(NAIVE)
    default = scores(tmp_path / "default.py", "MyRewardManager", model_folder)
    assert [each.reward for each in default] == [1.0, -1.0]  # of math_dapo, which `data_source=math` names


def test_a_manager_of_verls_reward_loop(tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    given: dict[str, Any] = {"compute_score": "exact_match", "config": {"bonus": 3}}
    found = scores(tmp_path / "loop.py", "MyRewardManager", model_folder, **given)
    assert [(each.reward, dict(each.parts)) for each in found] == [
        (1.0, {"made": 1.0, "bonus": 3.0}), (0.0, {"made": 1.0, "bonus": 3.0})
    ]  # fmt: skip


@pytest.mark.slow
def test_a_function_with_verls_imports(tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "own.py").write_text(FUNCTION)
    with RewardPool(
        f"{tmp_path}/own.py:compute_score", num_workers=1, timeout_seconds=60.0, correct_threshold=1.0
    ) as p:
        found = p.score([RewardItem(*row) for row in (("openai/gsm8k", "#### 5", "5"), ("always", "", ""))])
    assert [each.reward for each in found if isinstance(each, RewardResult)] == [1.0, 1.0]
    shown = CliRunner().invoke(app, ["rewards", "show", f"{tmp_path}/own.py:compute_score"])
    assert shown.exit_code == 0, shown.output


def test_a_manager_with_easyr1s_imports(tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "theirs.py").write_text(EASYR1)
    (tmp_path / "overall.py").write_text(OVERALL)
    config = {
        "reward_function": f"{tmp_path}/overall.py",
        "reward_function_name": "one",
        "reward_function_kwargs": {"weight": 0.5},
    }
    found = scores(tmp_path / "theirs.py", "MyManager", model_folder, config=config)
    assert [(each.reward, dict(each.parts)) for each in found] == [
        (0.5, {"overall": 0.5, "format": 1.0}), (0.0, {"overall": 0.0, "format": 1.0})
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "module"),
    [
        ("from verl import Nothing", "verl.Nothing"),
        ("import verl.trainer.ppo.core_algos", "verl.trainer"),
        ("from verl.utils.reward_score import gsm8k", "verl.utils.reward_score.gsm8k"),
        ("from verl.workers import rollout", "verl.workers.rollout"),
    ],
)
def test_other_imports_of_verl_say_what_to_write(line: str, module: str, tmp_path: Path) -> None:
    (tmp_path / "more.py").write_text(f"from verl import DataProto\n{line}\ndef f(solution_str): return 1.0\n")
    said = rf"more\.py: imports {module}\b.*`from whet\.plugins\.migration\.protocol import"
    for num_workers, kind in ((0, RegistryError), (1, RewardError)):
        with pytest.raises(kind, match=said):
            RewardPool(f"{tmp_path}/more.py:f", num_workers=num_workers, timeout_seconds=60.0, correct_threshold=1.0)


def test_only_reward_files_see_them(tmp_path: Path) -> None:
    (tmp_path / "kl.py").write_text("from verl import DataProto\ndef f(log_probs, ref_log_probs): ...\n")
    with pytest.raises(RegistryError, match=r"imports verl\b"):
        KL_FORMS[f"{tmp_path}/kl.py:f"]


def test_an_installed_verl_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text("DataProto = 'theirs'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with stand_ins():
        import verl  # type: ignore[import-not-found]

        assert verl.DataProto == "theirs"
        with pytest.raises(ModuleNotFoundError):
            import verl.workers.reward_manager
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]


def test_every_name_can_be_imported() -> None:
    with stand_ins():
        for whole in OFFERED:
            module, _, name = whole.rpartition(".")
            space: dict[str, Any] = {}
            exec(f"import {module}\nfound = {whole}\nfrom {module} import {name}", space)
            assert space[name] is space["found"] is not None
