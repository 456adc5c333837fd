# SPDX-License-Identifier: Apache-2.0
"""Every line of docs/bad-input.md is provoked, and the message agrees with the page.

`python -m docs.generate bad_input` writes these messages into the page."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from whet_environments.devices.controllers import AdbController
from whet_environments.frozen_lake import FrozenLake
from whet_environments.sokoban import Sokoban
from whet_environments.webshop.environment import WebShop

from docs.generate.bad_input import COLLECT, fits, messages, with_messages
from tests.data.seeing import encoded, picture, seeing
from whet.config import load_config
from whet.config.checks import check_context, problems
from whet.config.preference import PreferenceDataConfig, RewardTrainingConfig
from whet.config.schema import DataConfig, EnvironmentConfig, TrainConfig
from whet.data.chat import encode_continuation
from whet.data.load import Loaded, load_items
from whet.data.loader import PromptLoader
from whet.data.samplers import make_loader
from whet.domains import Domains
from whet.environments.protocol import Answer, Observation, Task
from whet.errors import EnvError, WhetError
from whet.models.load import load_policy, load_tokenizer, reward_config
from whet.planning import machine
from whet.planning.dtypes import with_dtypes
from whet.planning.machine import FreeMemory
from whet.plugins.agents.shipped import Gymnasium
from whet.plugins.agents.tools.toolbox import toolbox_of
from whet.plugins.inference.servers.environment import Interpreter
from whet.plugins.inference.vllm.engine import PACKAGE
from whet.plugins.planner import fit
from whet.plugins.planner.fit import check_fits
from whet.plugins.scores.judge.rubrics import Rubric
from whet.programs.protocol import open_sandbox
from whet.registry import ENVIRONMENTS
from whet.rewards.pool import RewardPool
from whet.roles.workers import check_reward_model
from whet.rollout.build import check_engine, open_environments
from whet.rollout.episode import Episode, EpisodeLimits, Rules, Stage
from whet.rollout.protocol import Completion, SamplingParams
from whet.rollout.reports import FailureWatch
from whet.trainers.build import setup
from whet.trainers.run_dir import open_run_dir
from whet.types import Failure, Group, Message, Prompt, RewardItem, Trajectory, Turn

sys.path.insert(0, str(Path(__file__).parent / "rewards"))
from judge_server import Reply, judging

PAGE = (Path(__file__).parents[1] / "docs" / "bad-input.md").read_text(encoding="utf-8")
MESSAGES = messages(PAGE)
ROWS = "data.train_files, rows"
OWN = """
def broken():
    raise ValueError("no rows today")
def number():
    return 7
def outside(prompts):
    return [0, 99]
"""


def wrong(situation: str, found: object) -> None:
    """Compares a message with the page, or collects it for the page."""
    assert situation in MESSAGES
    if COLLECT in os.environ:
        with Path(os.environ[COLLECT]).open("a", encoding="utf-8") as file:
            file.write(json.dumps([situation, str(found)]) + "\n")
        return
    assert fits(MESSAGES[situation], str(found)), f"{found}\nwrite it with `python -m docs.generate bad_input`"


@pytest.fixture(scope="module")
def tokenizer(qwen25_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(qwen25_folder)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder without network, with a model's config and a file that is fine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "kept")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    Path("model").mkdir()
    Path("model", "config.json").write_text("{}")
    Path("fine.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    Path("own.py").write_text(OWN)
    return tmp_path


def refused(**sections: dict[str, Any]) -> WhetError:
    """The messages of the checks of a config."""
    values: dict[str, Any] = {
        "model": {"path": "model"},
        "data": {"train_files": ["fine.jsonl"]},
        "reward": {"function": "gsm8k"},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    [found] = problems(TrainConfig.model_validate(values))
    return found


@pytest.mark.parametrize(
    ("situation", "sections"),
    [
        ("missing file", {"data": {"train_files": ["gone.jsonl"]}}),
        ("missing folder, or a typing error in a hub name", {"data": {"train_files": ["nothing"]}}),
        ("wrong number of weights", {"data": {"train_files": ["fine.jsonl"] * 2, "weights": [1.0]}}),
        ("n = 1 with a group estimator", {"rollout": {"n": 1}}),
        (
            "n = 1 with a group filter",
            {"rollout": {"n": 1}, "algorithm": {"adv_estimator": "gae", "filter": {"name": "dapo"}}},
        ),
        ("greedy sampling with n > 1", {"rollout": {"temperature": 0}}),
        ("batch sizes that do not divide", {"actor": {"mini_batch_size": 6}}),
        ("micro-batch smaller than a row", {"actor": {"max_tokens_per_micro_batch": 100}}),
        ("sampling that is in effect greedy, with n > 1", {"rollout": {"top_p": 1e-9}}),
        ("more processes than rows", {"actor": {"mini_batch_size": 8}, "cluster": {"processes": 99}}),
    ],
)
def test_what_the_config_checks_refuse(situation: str, sections: dict[str, Any]) -> None:
    wrong(situation, refused(**sections))


@pytest.mark.parametrize(
    ("situation", "sections"),
    [
        ("keys without a reward model", {"reward_model": {"weight": 2.0}}),
        (
            "reward model and ReMax",
            {"reward_model": {"model_path": "scores"}, "algorithm": {"adv_estimator": "remax"}},
        ),
        (
            "reward model and group filter alone",
            {
                "reward_model": {"model_path": "scores"},
                "reward": {"function": None},
                "algorithm": {"filter": {"name": "dapo"}},
            },
        ),
    ],
)
def test_what_does_not_go_with_a_reward_model(situation: str, sections: dict[str, Any]) -> None:
    wrong(situation, refused(**sections))


def test_models_that_are_no_reward_models(qwen25_folder: Path) -> None:
    shutil.copytree(qwen25_folder, "lm")
    with pytest.raises(WhetError) as raised:
        reward_config("lm")
    wrong("reward model without a head", str(raised.value))
    config = json.loads(Path("lm", "config.json").read_text())
    labels = {str(number): f"LABEL_{number}" for number in range(3)}
    config |= {"architectures": ["Qwen2ForSequenceClassification"], "id2label": labels}
    shutil.copytree("lm", "three")
    Path("three", "config.json").write_text(json.dumps(config))
    with pytest.raises(WhetError) as raised:
        reward_config("three")
    wrong("reward model of several labels", str(raised.value))
    tokenizer = load_tokenizer("lm")
    fewer = tokenizer.train_new_from_iterator(["another text"], 260)
    fewer.chat_template = None
    fewer.save_pretrained("fewer")
    Path("fewer", "config.json").write_text(json.dumps({**config, "id2label": {"0": "score"}}))
    policy = copy.deepcopy(tokenizer)
    run = TrainConfig.model_validate({"model": {"path": "lm"}, "reward_model": {"model_path": "fewer"}})
    with pytest.raises(WhetError) as raised:
        check_reward_model(run, policy)
    wrong("reward model of another vocabulary, no template", str(raised.value))


@pytest.mark.parametrize(
    ("situation", "row"),
    [
        ("pair without its rejected response", {"prompt": "a", "chosen": "b"}),
        (
            "pair whose response is not last",
            {"prompt": "a", "chosen": [{"role": "user", "content": "b"}], "rejected": "c"},
        ),
        ("margin that is no number", {"prompt": "a", "chosen": "b", "rejected": "c", "margin": "big"}),
        ("pairs that are all equal", {"prompt": "a", "chosen": "b", "rejected": "b"}),
    ],
)
def test_what_is_wrong_with_a_pair(situation: str, row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(WhetError) as raised:
        load_items(PreferenceDataConfig(), tokenizer, rows=[row])
    wrong(situation, str(raised.value))


@pytest.mark.parametrize(
    ("situation", "environment"),
    [
        ("unknown tool", {"tools": ["calculater"]}),
        ("entry of another form", {"tools": [{"pyton": "f"}]}),
        ("unknown format of calls", {"tools": ["calculator"], "tool_parser": "herms"}),
        ("deadline of a tool above that of a step", {"tools": ["calculator"], "tool_limits": {"seconds": 90}}),
    ],
)
def test_tools_that_the_config_checks_refuse(situation: str, environment: dict[str, Any]) -> None:
    wrong(situation, refused(environment=environment))


OWN_TOOLS = '''
def add(a: int) -> int:
    """Adds."""

def untyped(a) -> int:
    """Adds."""

def many(*values: int) -> int:
    """Adds."""

def silent(a: int) -> int:
    return a
'''


@pytest.mark.parametrize(
    ("situation", "tools"),
    [
        ("tool parameter without a type", ["tools.py:untyped"]),
        ("tool with *args", ["tools.py:many"]),
        ("tool without a docstring", ["tools.py:silent"]),
        ("two tools of one name", ["tools.py:add", "tools.py:add"]),
        ("MCP command that does not start", [{"mcp": {"command": ["no-such-program"]}}]),
    ],
)
def test_tools_that_cannot_be_used(situation: str, tools: list[Any]) -> None:
    if situation.startswith("MCP"):
        pytest.importorskip("mcp", reason="MCP is not installed: pip install -e '.[mcp]'")
    Path("tools.py").write_text(OWN_TOOLS)
    with pytest.raises(WhetError) as raised:
        toolbox_of(EnvironmentConfig(tools=tools))
    wrong(situation, str(raised.value))


def test_a_template_that_shows_no_tools() -> None:
    tools = toolbox_of(EnvironmentConfig(tools=["calculator"]))
    with pytest.raises(WhetError) as raised:
        tools.with_parser("{{ messages[0].content }}")
    wrong("chat template without tools", str(raised.value))


def test_a_parser_that_raises(tokenizer: PreTrainedTokenizerBase) -> None:
    tools = toolbox_of(EnvironmentConfig(tools=["calculator"], tool_parser="own.py:broken"))
    with pytest.raises(WhetError) as raised:
        tools.calls(tokenizer, [1], 0)
    wrong("parser of calls that raises", str(raised.value))


def test_an_adapter_is_no_reward_model() -> None:
    Path("lora").mkdir()
    Path("lora/adapter_config.json").write_text("{}")
    values = {"model": {"path": "model", "lora": {"path": "lora"}}, "data": {"train_files": ["fine.jsonl"]}}
    [found] = problems(RewardTrainingConfig.model_validate(values))
    wrong("reward model from an adapter", found)


def test_a_file_of_another_format() -> None:
    Path("rows.csv").write_text("a,b\n")
    wrong("file of an unknown format", refused(data={"train_files": ["rows.csv"]}))


APART = {"placement": {"train": {"processes": 1, "roles": ["actor"]}, "sample": {"processes": 1, "roles": ["rollout"]}}}


@pytest.mark.parametrize(
    ("situation", "sections"),
    [
        ("staleness without a correction", {"rollout": {"max_staleness": 1}, "cluster": APART}),
        (
            "staleness without ranks for the rollout",
            {"rollout": {"max_staleness": 1}, "algorithm": {"correction": {"weight": "importance"}}},
        ),
        (
            "unknown option of a rollout engine",
            {"rollout": {"engine": {"name": "vllm", "options": {"kv_cache_byte": 1}}}},
        ),
    ],
)
def test_staleness_and_options_of_engines(situation: str, sections: dict[str, dict[str, Any]]) -> None:
    wrong(situation, refused(**sections))


@pytest.mark.parametrize(
    ("situation", "server"),
    [
        ("unknown argument of a server", {"max_modl_len": 4096}),
        (
            "lengths over those of the server (vLLM's `max_model_len`, SGLang's `context_length`)",
            {"max_model_len": 512},
        ),
    ],
)
def test_arguments_of_a_server(situation: str, server: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    Path("vllm", "engine").mkdir(parents=True)
    Path("vllm", "engine", "arg_utils.py").write_text("class EngineArgs:\n    max_model_len: int\n    seed: int\n")
    found = Interpreter("python", Path("vllm").resolve(), PACKAGE)
    monkeypatch.setattr("whet.plugins.inference.servers.engine.find_environment", lambda *_: found)
    options = {"engine": {"name": "vllm", "options": {"server": server}}}
    with pytest.raises(WhetError) as raised:
        check_engine(TrainConfig.model_validate({"rollout": options}))
    wrong(situation, str(raised.value))


def test_lengths_over_the_models() -> None:
    with pytest.raises(WhetError) as raised:
        check_context(TrainConfig(), 600)
    wrong("lengths over the model's", str(raised.value))


P, Q = {"prompt": "a", "answer": "1", "level": 3}, {"prompt": "b", "answer": "2", "level": 4}


@pytest.mark.parametrize(
    ("situation", "rows", "keys"),
    [
        ("line that is no JSON", ["{}", "{"], {}),
        ("line that is nested too deeply", ["{}", "[" * 9**5], {}),
        ("text that is not valid Unicode", [P, '{"prompt": "a\\ud800", "answer": "1"}'], {}),
        ("prompt that is neither text nor messages", [P, {**Q, "prompt": 5}], {}),
        ("invalid message", [P, {**Q, "prompt": [{"role": 5, "content": "a"}]}], {}),
        ("media for a model of text", [P, {**Q, "images": ["a.png"]}], {}),
        ("empty prompt", [P, {**Q, "prompt": ""}], {}),
        ("prompt of millions of characters", [P, {**Q, "prompt": "1" * 4_000_001}], {}),
        ("template that would run code", [P], {"format_prompt": "{{ content.__class__.__mro__ }}"}),
        ("template that needs too much memory", [P], {"format_prompt": "{{ content * 10 ** 10 }}"}),
        (
            "missing field",
            [{"question": "a", "answer": "1"}, {"quesion": "b", "answer": "2"}],
            {"prompt_key": "question"},
        ),
        (
            "empty field",
            [{"question": "a", "answer": "1"}, {"question": None, "answer": "2"}],
            {"prompt_key": "question"},
        ),
        ("filter by an unknown field", [P, Q], {"filter": {"levle": 9}}),
        ("filter that leaves nothing", [P, Q], {"filter": {"level": 9}}),
        ("row without ground truth", [P, {"prompt": "b"}], {}),
        (
            "row without the field of data.answer_key",
            [{"prompt": "a", "solution": "1"}, {"prompt": "b"}],
            {"answer_key": "solution"},
        ),
        ("rows that all lack a ground truth", [{"prompt": "a"}, {"prompt": "b"}], {}),
        ("prompt longer than the limit", [P, {**Q, "prompt": "1" * 40}], {"max_prompt_length": 8}),
        (
            "prompt longer than the limit, refused",
            [P, {**Q, "prompt": "1" * 40}],
            {"max_prompt_length": 8, "overlong_prompts": "error"},
        ),
        (
            "all prompts longer than the limit",
            [{**P, "prompt": "1" * 5}, {**Q, "prompt": "1" * 40}],
            {"max_prompt_length": 1},
        ),
        ("model without chat template", [P], {"apply_chat_template": True}),
    ],
)
def test_what_is_wrong_with_rows(
    situation: str,
    rows: list[Any],
    keys: dict[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    caplog: pytest.LogCaptureFixture,
) -> None:
    Path("rows.jsonl").write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    base = copy.deepcopy(tokenizer)
    base.chat_template = None
    data = DataConfig.model_validate({"train_files": ["rows.jsonl"], "apply_chat_template": False, **keys})
    try:
        load_items(data, base, where=data.filter)
        wrong(situation, "\n".join(record.getMessage() for record in caplog.records))
    except WhetError as error:
        wrong(situation, str(error))


@pytest.mark.parametrize(
    ("situation", "images", "tags"),
    [
        ("a tag without its image, or an image without its tag", ["fine.png"], 2),
        ("an image that is truncated or none at all", ["a.png"], 1),
        ("a video that is truncated", ["a.mp4"], 1),
        ("a decompression bomb", ["b.png"], 1),
        ("an animation as an image", ["a.gif"], 1),
        ("a URL", ["https://example.com/a.png"], 1),
    ],
)
def test_what_is_wrong_with_images(
    situation: str, images: list[str], tags: int, tokenizer: PreTrainedTokenizerBase
) -> None:
    whole = encoded(picture(), "PNG")
    Path("fine.png").write_bytes(whole)
    Path("a.png").write_bytes(whole[:-20])
    if images == ["b.png"]:
        Path("b.png").write_bytes(encoded(Image.new("1", (9000, 9000))))
    frames = [picture(colour=(40 * number, 0, 0)) for number in range(6)]
    Path("a.gif").write_bytes(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    if images == ["a.mp4"]:
        Path("a.mp4").write_bytes(
            b"\0\0\0\x10ftypisom" + bytes(4) + (29481 - 16).to_bytes(4, "big") + b"mdat" + bytes(14716)
        )
    kind = "video" if images == ["a.mp4"] else "image"
    rows = [{"prompt": "<image>", "images": ["fine.png"]}, {"prompt": f"<{kind}>" * tags, f"{kind}s": images}]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(WhetError) as raised:
        load_items(DataConfig(train_files=["rows.jsonl"]), seeing(copy.deepcopy(tokenizer)))
    wrong(situation, str(raised.value))


@pytest.mark.parametrize(
    ("situation", "file"),
    [
        ("empty data set", "empty.jsonl"),
        ("no network", "owner/name"),
        ("unknown split", "set@dev"),
        ("data set function that raises", "own.py:broken"),
        ("data set function that returns no rows", "own.py:number"),
    ],
)
def test_what_is_wrong_with_a_source(situation: str, file: str, tokenizer: PreTrainedTokenizerBase) -> None:
    Path("empty.jsonl").write_text("\n")
    Path("set").mkdir()
    Path("set", "train.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(WhetError) as raised:
        load_items(DataConfig(train_files=[file]), tokenizer)
    wrong(situation, str(raised.value))


def prompts(count: int) -> tuple[Prompt, ...]:
    return tuple(Prompt(f"0:{i}", i, (), (i,), "s", None) for i in range(count))


def test_what_is_wrong_with_an_order() -> None:
    with pytest.raises(WhetError) as raised:
        make_loader(DataConfig(sampler="own.py:outside"), Loaded(prompts(2), ()), seed=0, total_draws=2)
    wrong("sampler that leaves the data", str(raised.value))
    with pytest.raises(WhetError) as raised:
        PromptLoader(prompts(1)).load_state({"epoch": 0, "index": 1})
    wrong("data that changed before a resume", str(raised.value))


def outcomes(function: Callable[..., Any] | str, count: int = 4, **settings: Any) -> list[Any]:
    settings = {"num_workers": 0, "timeout_seconds": 5.0, **settings}
    with RewardPool(function, correct_threshold=1.0, **settings) as pool:
        return pool.score([RewardItem("s", "text", "1", response_ids=(1, 2)) for _ in range(count)])


def raising(solution_str: str) -> float:
    raise ValueError("no number in it")


@pytest.mark.parametrize(
    ("situation", "function"),
    [
        ("reward that raises", raising),
        ("reward that returns None", lambda solution_str: None),
        ("reward that returns NaN", lambda solution_str: float("nan")),
        ("reward that returns text", lambda solution_str: "1.0"),
        ("dict without a reward", lambda solution_str: {"points": 1.0}),
        ("wrong number of rewards", lambda solution_strs: [1.0, 0.0]),
        ("one number for a batch", lambda solution_strs: 1.0),
    ],
)
def test_what_a_reward_may_not_return_fails_the_answer(situation: str, function: Callable[..., Any]) -> None:
    for outcome in outcomes(function):
        assert isinstance(outcome, Failure) and outcome.source == "reward"
        wrong(situation, outcome.message)


@pytest.mark.parametrize(
    ("situation", "function", "truth"),
    [
        ("`data_source` unknown to `auto`", "auto", "1"),
        ("unknown instruction of `ifeval`", "ifeval", {"instruction_id_list": ["startend:quote"], "kwargs": [{}]}),
        ("instruction without its argument", "ifeval", {"instruction_id_list": ["keywords:existence"], "kwargs": [{}]}),
    ],
)
def test_a_row_that_a_shipped_reward_cannot_score(situation: str, function: str, truth: Any) -> None:
    with RewardPool(function, num_workers=0, timeout_seconds=5.0, correct_threshold=1.0, kwargs={}) as pool:
        [outcome] = pool.score([RewardItem("openai/gsm9k", "text", truth)])
    assert isinstance(outcome, Failure)
    wrong(situation, outcome.message)


def test_a_reward_that_hangs_fails_in_time() -> None:
    start = time.monotonic()
    [outcome] = outcomes(lambda solution_str: time.sleep(60), 1, num_workers=1, timeout_seconds=0.3)
    assert isinstance(outcome, Failure) and time.monotonic() - start < 20
    wrong("reward that hangs", outcome.message)


@pytest.mark.slow
def test_a_reward_that_fails_in_its_process() -> None:
    async def waits(solution_str: str) -> None:
        await asyncio.sleep(60)

    def grows(solution_str: str) -> None:
        kept = []
        while True:
            kept.append(bytearray(b"x") * 2**22)
            time.sleep(0.005)

    nowhere = {"endpoint": "http://127.0.0.1:9/v1", "model": "m", "retries": 0}
    for situation, [outcome] in {
        "async reward that hangs": outcomes(waits, 1, num_workers=1, timeout_seconds=0.3),
        "reward that grows without bound": outcomes(grows, 1, num_workers=1, timeout_seconds=60.0, memory_limit_mb=150),
        "judge that is not there": outcomes("llm_judge", 1, num_workers=1, timeout_seconds=60.0, kwargs=nowhere),
    }.items():
        assert isinstance(outcome, Failure)
        wrong(situation, outcome.message)


@pytest.mark.slow
def test_a_judge_that_refuses_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with judging([Reply(status=401)]) as judge:
        kwargs = {"endpoint": judge.address, "model": "m"}
        [outcome] = outcomes("llm_judge", 1, num_workers=1, timeout_seconds=30.0, kwargs=kwargs)
    assert isinstance(outcome, Failure)
    wrong("judge that refuses the key", outcome.message)


def test_a_rubric_without_its_parsers_field() -> None:
    with pytest.raises(WhetError) as raised:
        Rubric("mine", "Is it right? {{ response }}", "yes_no")
    wrong("rubric without its parser's field", str(raised.value))


def test_what_is_wrong_with_domains() -> None:
    domains = Domains({"words": ["words"]})
    [prompt] = prompts(1)
    with pytest.raises(WhetError) as raised:
        domains.assign([replace(prompt, extra_info={"domain": "word"})])
    wrong("row of an unknown domain", str(raised.value))
    with pytest.raises(WhetError) as raised:
        domains.check_used([replace(prompt, domain="sums")])
    wrong("domain without rows", str(raised.value))


def test_what_is_wrong_with_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(truth: Any, **options: Any) -> str:
        with RewardPool(
            "code",
            num_workers=0,
            timeout_seconds=5.0,
            correct_threshold=1.0,
            kwargs={"sandbox": "unisolated"} | options,
        ) as pool:
            [outcome] = pool.score([RewardItem("s", "```rust\nfn main() {}\n```", truth)])
        assert isinstance(outcome, Failure)
        return outcome.message

    rust = {"rust": {"file": "a.rs", "run": ["rustc-gone", "a.rs"]}}
    wrong("tests that are no JSON", said('{"inputs": '))
    wrong("tests without a field", said({"input": ["1"]}))
    wrong("language without a toolchain", said({"inputs": ["1"], "outputs": ["1"]}, languages=rust))
    open_sandbox.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(WhetError) as raised:
        said("assert f() == 1", sandbox="bubblewrap")
    wrong("no bubblewrap", str(raised.value))


def test_what_is_wrong_with_a_manager() -> None:
    class Odd:
        pass

    Odd.__qualname__ = "Odd"
    for situation, function, settings in (
        ("function that the manager does not call", raising, {"manager": "batch"}),
        ("manager class without a score method", Odd, {}),
        ("limits without reward processes", "gsm8k", {"seconds_between_calls": 1.0}),
    ):
        with pytest.raises(WhetError) as raised:
            outcomes(function, **settings)
        wrong(situation, str(raised.value))


def test_reward_processes_that_die_in_a_row() -> None:
    def dies(solution_str: str) -> None:
        os._exit(3)

    with pytest.raises(WhetError) as raised:
        outcomes(dies, 30, num_workers=1)
    wrong("processes that die in a row", str(raised.value))


def test_a_reward_of_no_known_form() -> None:
    def odd(x):  # type: ignore[no-untyped-def]
        return x

    odd.__qualname__ = "odd"
    with pytest.raises(WhetError) as raised:
        outcomes(odd)
    wrong("function of unknown form", str(raised.value))


def test_a_run_in_which_every_answer_fails() -> None:
    prompt = prompts(1)[0]
    answers = [Trajectory(f"0:0:{i}", prompt, (), i, failure=each) for i, each in enumerate(outcomes(raising))]
    with pytest.raises(WhetError) as raised:
        FailureWatch().record([Group(prompt, tuple(answers))])
    wrong("every trajectory fails", str(raised.value))


@pytest.mark.parametrize(
    ("situation", "override"),
    [
        ("unknown key", "data.batch_size=4"),
        ("wrong type", "rollout.n=many"),
        ("wrong choice", "model.dtype=float16"),
        ("required key that is not set", "model.path=null"),
        ("unknown registered name", "algorithm.adv_estimator=grop"),
        ("missing model folder", "model.path=./no_such_model"),
        ("folder without a config", "model.path=weights"),
    ],
)
def test_what_is_wrong_with_a_key(situation: str, override: str) -> None:
    Path("weights").mkdir()
    fine = ["model.path=model", "data.train_files=fine.jsonl", "reward.function=gsm8k"]
    with pytest.raises(WhetError) as raised:
        load_config(TrainConfig, None, [*fine, override])
    wrong(situation, str(raised.value))


def test_what_is_wrong_with_a_recipe() -> None:
    for situation, text in (("recipe that is not there", None), ("recipe that expands without end", "extra: &a [*a]")):
        if text is not None:
            Path("mine.yaml").write_text(text)
        with pytest.raises(WhetError) as raised:
            load_config(TrainConfig, "mine.yaml")
        wrong(situation, str(raised.value))


def spoiled(model: Path, name: str, *removed: str) -> Path:
    """A copy of a model folder without some of its files, in the working folder."""
    shutil.copytree(model, name, ignore=shutil.ignore_patterns(*removed))
    return Path(name)


def test_what_is_wrong_with_a_folder_of_weights(qwen25_folder: Path) -> None:
    half = spoiled(qwen25_folder, "half", "model.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (half / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    shutil.copy(qwen25_folder / "model.safetensors", half / "model-00001-of-00002.safetensors")
    os.truncate(spoiled(qwen25_folder, "cut") / "model.safetensors", 1000)
    bare = spoiled(qwen25_folder, "bare", "*.safetensors")
    for file in bare.iterdir():
        if file.name != "config.json":
            file.unlink()
    pickled = spoiled(qwen25_folder, "pickled", "*.safetensors")
    (pickled / "pytorch_model.bin").touch()
    other = spoiled(qwen25_folder, "other")
    config = json.loads((other / "config.json").read_text())
    config["num_hidden_layers"] += 1
    config.pop("layer_types", None)
    (other / "config.json").write_text(json.dumps(config))
    own, absurd = (spoiled(qwen25_folder, name) / "config.json" for name in ("own", "absurd"))
    own.write_text(json.dumps(config | {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}))
    absurd.write_text(json.dumps(config | {"num_hidden_layers": 10**6}))
    weights = load_file(qwen25_folder / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, spoiled(qwen25_folder, "nan") / "model.safetensors", {"format": "pt"})
    for situation, name in (
        ("model with custom code", "own"),
        ("config with absurd values", "absurd"),
        ("weights with NaN", "nan"),
        ("model folder half downloaded", "half"),
        ("weights cut short", "cut"),
        ("folder without weights", "bare"),
        ("unsafe pickle file", "pickled"),
        ("weights of another config", "other"),
    ):
        with pytest.raises(WhetError) as raised:
            load_policy(name)
        wrong(situation, str(raised.value))


def test_what_is_wrong_with_a_tokenizer(qwen25_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, missing in (("endless", "eos_token"), ("padless", "pad_token")):
        settings = spoiled(qwen25_folder, name) / "tokenizer_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {missing: None}))
    with pytest.raises(WhetError) as raised:
        load_tokenizer("endless")
    wrong("tokenizer without an end token", str(raised.value))
    with caplog.at_level("INFO", "whet"):
        load_tokenizer("padless")
    wrong("tokenizer without a padding token", "\n".join(record.getMessage() for record in caplog.records))
    config = spoiled(qwen25_folder, "small") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 100}))
    with pytest.raises(WhetError) as raised:
        load_tokenizer(qwen25_folder, "small")
    wrong("vocabulary mismatch", str(raised.value))


def test_what_is_wrong_with_the_folder_of_a_run() -> None:
    def opened(rows: str = "sha256 before", **trainer: Any) -> str:
        optim = {"lr": trainer.pop("lr", 1e-6)}
        values = {"actor": {"optim": optim}, "trainer": {"run_dir": "mine", **trainer}}
        with pytest.raises(WhetError) as raised:
            open_run_dir(Path("mine"), TrainConfig.model_validate(values), {ROWS: rows}).close()
        return str(raised.value)

    Path("mine").write_text("")
    wrong("path that cannot be a folder", opened())
    Path("mine").unlink()
    config = TrainConfig.model_validate({"actor": {"optim": {"lr": 1e-6}}, "trainer": {"run_dir": "mine"}})
    with closing(open_run_dir(Path("mine"), config, {ROWS: "sha256 before"})):
        wrong("two runs in one folder", opened())
    wrong("path that is not a checkpoint", opened(resume="nowhere"))
    checkpoint = Path("mine", "checkpoints", "global_step_2")
    checkpoint.mkdir(parents=True)
    wrong("fresh start in a used folder", opened(resume="never"))
    wrong("no checkpoint is whole", opened())
    shutil.rmtree(checkpoint)
    wrong("folder of another config", opened(lr=1e-4))
    wrong("other data than before", opened("sha256 now"))
    Path("mine", "inputs.json").write_text(json.dumps({"command": "sft"}))
    wrong("folder of another command", opened())
    Path("mine", "rollouts").symlink_to(Path.cwd())
    wrong("link in a run's folder", opened())


@pytest.mark.slow
def test_what_is_wrong_with_the_machine(qwen25_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_dtypes(TrainConfig.model_validate({"model": {"path": str(qwen25_folder)}}))
    for situation, name, left in (
        ("not enough memory", (fit, "free_memory"), FreeMemory(4 * 2**20, "the machine's memory")),
        ("not enough disk", (machine, "free_disk"), 2**20),
    ):
        with monkeypatch.context() as patched, pytest.raises(WhetError) as raised:
            patched.setattr(*name, lambda *_, left=left: left)
            check_fits(setup(config), Path("mine"), setup)
        wrong(situation, str(raised.value))


@pytest.mark.parametrize(
    ("situation", "environment"),
    [
        ("unknown environment", {"name": "calculater"}),
        ("unknown option of an environment", {"name": "calculator", "options": {"roel": "user"}}),
    ],
)
def test_environments_that_the_config_checks_refuse(
    situation: str, environment: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ENVIRONMENTS, "_live", {})  # as in a process of its own: other tests import games
    wrong(situation, refused(environment=environment))


REFUSED = {
    "options that an environment refuses": ("whet_environments.sokoban:Sokoban", {"boxes": 20}),
    "unknown environment of gymnasium": ("gymnasium", {"env_id": "NoSuch-v0"}),
    "arguments that gymnasium's environment refuses": (
        "gymnasium",
        {"env_id": "FrozenLake-v1", "kwargs": {"map_siz": 4}},
    ),
    "no Chromium": ("whet_environments.browser.environment:Browser", {"chromium": "/nowhere"}),
}


@pytest.mark.parametrize("situation", REFUSED)
def test_environments_that_refuse_their_options(situation: str) -> None:
    name, options = REFUSED[situation]
    pytest.importorskip({"gymnasium": "gymnasium", "no Chromium": "playwright"}.get(name, "json"))
    with ExitStack() as undo, pytest.raises(EnvError) as raised:
        open_environments(EnvironmentConfig(name=name, options=options), undo)
    wrong(situation, str(raised.value))


def test_no_adb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path.cwd()))
    with pytest.raises(WhetError) as raised:
        AdbController()
    wrong("no adb", str(raised.value))


def test_what_a_model_reads_of_an_action_that_is_not_in_the_game() -> None:
    pytest.importorskip("gymnasium", reason="gymnasium is not installed: pip install gymnasium")
    prompt = Prompt("0:0", 0, (), (1,), "", None)
    lake = {"env_id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"]}
    for situation, game in (
        ("action that is not in Sokoban or FrozenLake", Sokoban()),
        ("action that is not in Sokoban or FrozenLake", FrozenLake()),
        ("action that an environment of gymnasium does not have", Gymnasium(**lake)),
        ("action that a page of the web shop does not have", WebShop(num_products=20)),
    ):
        game.reset(prompt, 0)
        wrong(situation, str(game.step(Answer("fly")).messages[0].content))


def test_what_ends_an_episode(qwen25_folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    @dataclass
    class Plain:
        """A codec in which a character is a token."""

        def opening(self, messages: Any, media: Any) -> list[int]:
            return [1] * sum(len(str(message.content)) for message in messages)

        def continuation(self, before: Any, new: Any, turn: Any, media: Any) -> list[int]:
            return self.opening(new, media)

        def decode(self, token_ids: Any) -> str:
            return "x"

        def calls(self, token_ids: Any, turn: int) -> list[Any]:
            return []

    stage = Stage(Plain(), EpisodeLimits(fails_at=frozenset({"overflow"})))  # type: ignore[arg-type]
    rules = Rules({"": stage, "worker": stage}, SamplingParams(max_new_tokens=20), 0, 1)

    def ended(observation: Observation) -> str:
        episode = Episode(Prompt("0:0", 0, (), (1,), "", None), 0, rules)
        episode.start()
        episode.on_observation(Observation(done=False))
        episode.on_completion(Completion((5,), (-1.0,), "stop", ((0, 1),)))
        return str(episode.on_observation(observation)[-1].trajectory.failure)  # type: ignore[union-attr]

    wrong("observation longer than the context", ended(Observation(False, (Message("user", "long" * 9),))))
    short = replace(rules, stages={"": replace(stage, limits=replace(stage.limits, max_context_tokens=10))})
    episode = Episode(Prompt("0:0", 0, (Message("user", "?"),), (1,), "", None), 0, short)
    opened = episode.on_observation(Observation(False, (Message("user", "long" * 9),)))
    wrong("conversation that begins too long", str(opened[-1].trajectory.failure))  # type: ignore[union-attr]
    wrong("task for an unknown sub-agent", ended(Observation(False, tasks=(Task("searcher", ()),))))
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% for message in messages[-2:] %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    )
    turn = Turn((1,), (2,), (-1.0,), "stop", ((0, 1),))
    asked, told = (Message("user", "1"), Message("user", "2")), (Message("tool", "3"),)
    with pytest.raises(WhetError) as raised:
        encode_continuation(tokenizer, asked, told, turn=turn)
    wrong("template that rewrites earlier turns", str(raised.value))


def test_an_environment_that_fails_most_of_its_episodes() -> None:
    prompt = Prompt("0:0", 0, (), (1,), "", None)
    failure = Failure("environment", "it broke")
    ends = (failure, failure, None)
    answers = [Trajectory(f"0:0:{at}", prompt, (), at, failure=each) for at, each in enumerate(ends)]
    with pytest.raises(WhetError) as raised:
        FailureWatch().record([Group(prompt, tuple(answers))])
    wrong("environment that fails most of its episodes", str(raised.value))


def test_every_line_of_the_page_has_a_message() -> None:
    assert len(MESSAGES) == len(re.findall(r"^\| .* \| `.*\|$", PAGE, re.MULTILINE)) > 30


def test_a_message_that_fits_stays_and_another_is_written_anew() -> None:
    page = "| odd | `a ... of 3` | mend it |\n| even | `old` | as it says |\n| left | `kept` | wait |\n"
    said = {"odd": "a pair\nof 3 or 4", "even": "no `f` in /tmp/x/y: 12.5 MB; one of a, b, c, d, e, f, g, h; try g|h"}
    made = with_messages(page, said)
    assert messages(made) == {
        "odd": "a ... of 3",
        "even": "no 'f' in ...: ... MB; one of a, b, ...; try g/h",
        "left": "kept",
    }
    assert all(fits(messages(made)[situation], said[situation]) for situation in said)
    assert with_messages(made, said) == made and "| mend it |" in made


def test_every_situation_is_named_here() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    assert not [situation for situation in MESSAGES if f'"{situation}"' not in here]
