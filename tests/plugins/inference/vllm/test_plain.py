# SPDX-License-Identifier: Apache-2.0
"""The plain mode, against a server that answers like vLLM 0.26, and its refusals."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.raising import check_fields, raises

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "rollout"))
import fake_server as fake
from fake_engines import CPU, Start, events_of, request, starting

from whet.config.schema import ModelConfig, TrainConfig
from whet.errors import ConfigError, EngineError, WeightSyncError
from whet.keyed import key
from whet.plugins.inference.servers import engine as servers_engine
from whet.plugins.inference.servers.environment import Interpreter, find_environment
from whet.plugins.inference.vllm import engine as engine_module
from whet.plugins.inference.vllm.engine import PACKAGE, VLLMEngine, completion_of
from whet.plugins.inference.vllm.plain import generated
from whet.registry import ROLLOUT_ENGINES
from whet.rollout.build import check_engine, check_sampling
from whet.rollout.protocol import Event, Finished, Partial, SamplingParams, generate
from whet.types import Media

pytestmark = pytest.mark.slow

FAKE = str(Path(__file__).with_name("fake_server.py"))
OLD = (sys.executable, FAKE, "old")
PROTOCOL = "entrypoints/scale_out/token_in_token_out/protocol.py"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder that looks like vLLM 0.26's, as far as it is read."""
    files = {
        "__init__.py": "raise AssertionError('imported')",
        "engine/arg_utils.py": "class EngineArgs:\n    max_model_len: int = 1\n",
        "entrypoints/openai/cli_args.py": "tokens_only: bool = False\n",
        PROTOCOL: "finish_reason: str\n",
    }
    for name, text in files.items():
        (tmp_path / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "vllm" / name).write_text(text)
    return tmp_path / "vllm"


@pytest.fixture
def start(model_folder: Path, package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts engines of vLLM 0.26, whose server is the fake one."""
    monkeypatch.setattr(servers_engine, "fitting", lambda weights, *_: weights)
    with starting(VLLMEngine, engine_module, FAKE, package, model_folder, monkeypatch, "0.26.0") as start:
        yield lambda *args, **options: start(*(args or (OLD,)), **options)


def load(engine: VLLMEngine, version: int) -> None:
    engine.load([("a", torch.ones(2))], version)


# -- requests


def test_requests_and_completions(start: Start) -> None:
    engine = start(batch=4)
    made = [request(fake.QUICK, tokens, uid=str(tokens), streams=tokens % 2 == 0) for tokens in range(1, 9)]
    for each, completion in zip(made, generate(engine, made), strict=True):
        tokens = each.params.max_new_tokens
        assert completion.token_ids == tuple(range(3, tokens + 3)) and completion.versions == ((0, tokens),)
        assert completion.log_probs == tuple(-1 / (place + 1) for place in range(tokens))
    for body in engine.call("GET", "/bodies"):
        params = body["sampling_params"]
        assert params["extra_args"] is None and params["seed"] is None  # on a CPU a long prompt would fail with one
        assert params["logprobs"] == 0 and body["cache_salt"] == "version 0" and body["features"] is None


def test_a_seed_is_the_requests_own_and_another_one_behind_its_tokens(start: Start) -> None:
    """With the same one the rest of a response would be drawn with the numbers of its beginning."""
    engine = start()
    engine.has_seeds = True
    made = [request(fake.SLOW, 40), replace(request(fake.QUICK, 4, uid="1"), key=2)]
    for each in made:
        engine.submit(each)
    engine.poll(0.2)
    load(engine, 1)
    while engine.status().oldest is not None:
        engine.poll(1.0)
    bodies = engine.call("GET", "/bodies")
    sampled = [len(body["token_ids"]) - 2 for body in bodies]
    assert sampled[:2] == [0, 0] and len(sampled) == 3 and 0 < sampled[2] < 40
    seeds = [body["sampling_params"]["seed"] for body in bodies]
    assert sorted(seeds[:2]) == sorted([key(1, "vllm", 0), key(2, "vllm", 0)])
    assert seeds[2] == key(1, "vllm", sampled[2]) and len({*seeds}) == 3


def test_what_older_versions_do_not_tell() -> None:
    """A stop string, the ids of the likeliest tokens as numbers, and the reason of a stream that was aborted."""
    made = replace(request(fake.QUICK), params=SamplingParams(5, stop=("ab",), stop_token_ids=(9,), num_likeliest=1))
    top = [{"token": "token_id:4", "logprob": -1.0}, {"token": "token_id:6", "logprob": -0.5}]
    content = [{"token": "token_id:4", "logprob": -1.0, "top_logprobs": top}]
    choice = {"token_ids": [4], "logprobs": {"content": content}, "finish_reason": "stop"}
    found = completion_of({"choices": [choice]}, made, 3)
    assert (found.finish_reason, found.stop, found.versions, found.likeliest) == (
        "stop",
        "ab",
        ((3, 1),),
        (((6, -0.5),),),
    )
    by_token = completion_of({"choices": [{**choice, "token_ids": [9]}]}, made, 3)
    assert (by_token.finish_reason, by_token.stop) == ("stop", None)
    told = completion_of({"choices": [{**choice, "stop_reason": None, "finish_reason": "length"}]}, made, 3)
    assert (told.finish_reason, told.stop) == ("length", None)
    cut = completion_of({"choices": [{"token_ids": [], "logprobs": {"content": []}}]}, made, 3)
    assert (cut.finish_reason, cut.token_ids, cut.versions) == ("abort", (), ())


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("handling", ["recompute", "wait", "abort"])
def test_what_running_requests_do_when_weights_change(start: Start, handling: str, streams: bool) -> None:
    """All tokens come once, each of the version that sampled it, though the server does not tell versions."""
    engine, tokens = start(batch=4, on_new_weights=handling), 100
    made = [request(fake.SLOW, tokens, str(uid), streams=streams, sampled_ids=(3, 4)) for uid in range(5)]
    for each in [*made, request(fake.QUICK, uid="waits")]:
        engine.submit(each)
    events, until = list[Event](), time.monotonic() + 60
    for version in (1, 2):
        sampled = generated(engine.call("GET", "/metrics"))
        while handling != "wait" and generated(engine.call("GET", "/metrics")) < sampled + 20:
            events += engine.poll(0.05)
            assert time.monotonic() < until
        if handling == "wait":
            events += engine.poll(0.3)
        load(engine, version)
    while engine.status().oldest is not None:
        events += engine.poll(1.0)
    found = {event.uid: event.completion for event in events if isinstance(event, Finished)}
    assert set(found) == {*"01234", "waits"}
    for uid in "01234":
        completion, parts = found[uid], [each for each in events if isinstance(each, Partial) and each.uid == uid]
        assert completion.token_ids == tuple(range(5, tokens + 3)) and completion.finish_reason == "length"
        assert completion.log_probs == tuple(-1 / place for place in range(3, tokens + 1))
        assert [version for version, _ in completion.versions] == ([0] if handling == "wait" else [0, 1, 2])
        assert sum(count for _, count in completion.versions) == tokens - 2
        assert sum((each.token_ids for each in parts), ()) == (completion.token_ids if streams else ())
        each_version = [version for version, count in completion.versions for _ in range(count)]
        assert [each.versions for each in parts] == [((each_version[each.offset - 2], 1),) for each in parts]
    assert ("/abort_requests" in engine.call("GET", "/calls")) == (handling != "wait")


def test_a_pause_gives_what_there_is(start: Start) -> None:
    """Also over new weights, an abort and a request that comes in it."""
    engine = start()
    for uid in "01":
        engine.submit(request(fake.SLOW, 40, uid))
    engine.poll(0.2)
    engine.pause()
    partial = engine.poll(0.0)
    assert len(partial) == 2 and all(isinstance(each, Partial) and each.offset == 0 for each in partial)
    assert all(each.token_ids == tuple(range(3, 3 + len(each.token_ids))) and each.token_ids for each in partial)
    engine.submit(request(fake.QUICK, uid="comes"))
    load(engine, 1)
    engine.abort(["1"])
    [cut] = engine.poll(0.3)
    assert cut.uid == "1" and cut.completion.finish_reason == "abort"
    assert cut.completion.token_ids == next(each.token_ids for each in partial if each.uid == "1")
    engine.resume()
    done = {each.uid: each.completion for each in events_of(engine, 2)}
    before = next(len(each.token_ids) for each in partial if each.uid == "0")
    assert done["0"].versions == ((0, before), (1, 40 - before)) and done["0"].token_ids == tuple(range(3, 43))
    assert done["comes"].versions == ((1, 5),)
    assert engine.call("GET", "/calls")[-2:] != [] and "/whet/requests" not in engine.call("GET", "/calls")


def test_an_update_that_broke_off_is_forgotten(start: Start) -> None:
    engine = start()
    engine.submit(request(fake.SLOW, 20))
    engine.poll(0.2)
    with pytest.raises(WeightSyncError, match="no such weight"):
        engine.load([("refused", torch.ones(4))], version=3)
    with raises(WeightSyncError, key=re.compile("^version 3 ")):
        engine.poll(0.0)
    load(engine, 4)
    [done] = events_of(engine)
    assert done.completion.token_ids == tuple(range(3, 23)) and [each for each, _ in done.completion.versions] == [0, 4]


def test_a_server_whose_requests_get_no_tokens_is_heard_of(start: Start) -> None:
    engine = start(answer_seconds=1.0)
    engine.submit(request(fake.SLOW, 100))
    assert engine.poll(1.5) == []  # its tokens are counted
    engine.abort(["0"])
    engine.poll(0.0)
    engine.submit(request(fake.STUCK))
    with raises(EngineError, key=re.compile("^vLLM server "), found=re.compile(" 1 .* 1 s$")):
        engine.poll(10.0)


def test_tokens_are_counted_over_the_servers_engines() -> None:
    text = '# TYPE x\nvllm:generation_tokens_total{engine="0"} 12.0\nvllm:generation_tokens_total{engine="1"} 1e+02\n'
    assert generated(text + "vllm:generation_tokens_created 1.7e9\nvllm:prompt_tokens_total 5.0\n") == 112


# -- versions, the command line, and what is refused


@pytest.mark.parametrize(
    ("version", "other"),
    [
        ("0.26.0", "0.26.0"),
        ("0.31.2", "0.31.2"),
        ("0.32.1", None),
        ("0.33.0+cu130", "0.33.0+cu130"),
        ("0.100.0", "0.100.0"),
    ],
)
def test_versions_that_run(package: Path, monkeypatch: pytest.MonkeyPatch, version: str, other: str | None) -> None:
    found = version_found(package, monkeypatch, version)
    assert found.other == other and found.version == (other or "0.32")


@pytest.mark.parametrize("version", ["0.25.1", "0.9.2", "1.0.0"])
def test_versions_that_do_not_run(package: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    found, expected = re.compile(f" {version}$"), re.compile(r"^0\.32, .* 0\.26 ")
    with raises(ConfigError, key=sys.executable, found=found, expected=expected, change=re.compile("`make vllm`")):
        version_found(package, monkeypatch, version)


def version_found(package: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> Interpreter:
    info = package.with_name(f"vllm-{version}.dist-info")
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    find_environment.cache_clear()
    try:
        return find_environment(PACKAGE, sys.executable)
    finally:
        find_environment.cache_clear()


@pytest.mark.parametrize("is_new", [False, True])
def test_the_command_line(package: Path, is_new: bool) -> None:
    if is_new:
        (package / "entrypoints/openai/cli_args.py").write_text("enable_scale_out: bool = False\n")
        (package / "entrypoints/launchers/api_server").mkdir(parents=True)
        (package / "entrypoints/launchers/api_server/entry.py").touch()
    found = Interpreter("python", package, PACKAGE, "0.26.0")
    line = engine_module.command("python", 80, {"logprobs_mode": "processed_logprobs"}, plain=found)
    entry = "vllm.entrypoints.launchers.api_server.entry" if is_new else "vllm.entrypoints.openai.api_server"
    assert line[2] == entry and ("--enable-scale-out" in line) == is_new and "--middleware" not in line
    assert line[-2:] == ["--logprobs-mode", "processed_logprobs"]
    variables = engine_module.environment(1, CPU, 1, is_plain=True)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in variables and variables["VLLM_SERVER_DEV_MODE"] == "1"


def test_the_servers_arguments(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that needs the insides is asked for."""
    given = dict[str, Any]()
    plain_launch = VLLMEngine.launch

    def launch(engine: VLLMEngine, command: Any, arguments: Any, *args: Any, **more: Any) -> None:
        given.update(arguments)
        plain_launch(engine, command, arguments, *args, **more)

    monkeypatch.setattr(VLLMEngine, "launch", launch)
    start()
    assert (
        given["logprobs_mode"] == "processed_logprobs"
        and given["worker_extension_cls"] == "whet_transfer.PlainExtension"
    )
    assert given["weight_transfer_config"] == {"backend": "whet_plain"}


def test_options_that_need_the_insides(start: Start) -> None:
    for name, value, expected in (
        ("on_new_weights", "keep", r"^recompute, .* 0\.26\.0 "),
        ("adapter", True, "^false, "),
    ):
        key, change = f"rollout.engine.options.{name}", re.compile("`make vllm`")
        with raises(ConfigError, key=key, found=value, expected=re.compile(expected), change=change):
            start(**{name: value})


def test_images_are_refused(start: Start) -> None:
    engine = start()
    with raises(EngineError, key="request 0", found=re.compile("images"), change=re.compile(" native, .*`make vllm`")):
        engine.submit(replace(request(fake.QUICK), media=(Media("image", "d1", None),)))


def test_a_request_that_is_too_long_names_the_option_of_the_server(start: Start) -> None:
    engine = start()
    change = "raise rollout.engine.options.server.max_model_len or lower data.max_response_length"
    with pytest.raises(EngineError) as refused:
        engine.submit(request(fake.QUICK, 10**6))
    check_fields(refused.value, "request 0", found=re.compile("^may need 1000"), change=change)
    assert refused.value.option == "server.max_model_len"


def test_sampling_that_would_give_other_log_probs(start: Start) -> None:
    engine, quick = start(), request(fake.QUICK)
    refused: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1}, {"repetition_penalty": 1.2}]
    refused += [{"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"bad_words": ((5,),)}]
    for params in [*refused, {"allowed_token_ids": (5, 6)}]:
        [(name, value)] = params.items()
        with raises(EngineError, key=f"{name} of request {quick.uid}", found=value):
            engine.submit(replace(quick, params=SamplingParams(5, **params)))
    for params, found, expected in (
        ({"stop": ("a", "b")}, "2", r"0\.26\.0"),
        ({"temperature": 0.001}, "0.001", r"0\.01"),
    ):
        [name] = params
        with raises(
            EngineError, f"{name} of request {quick.uid}", found=re.compile(found), expected=re.compile(expected)
        ):
            engine.submit(replace(quick, params=SamplingParams(5, **params)))
    assert generate(engine, [replace(request(fake.QUICK), params=SamplingParams(5, temperature=0.7, stop=("a",)))])


def test_a_version_that_tells_the_stop_string_takes_several(start: Start, package: Path) -> None:
    (package / PROTOCOL).write_text("stop_reason: int | str | None = None\n")
    assert generate(start(), [replace(request(fake.QUICK), params=SamplingParams(5, stop=("a", "b")))])


def test_a_config_is_refused_before_anything_starts(
    train_config: Callable[..., TrainConfig],
    package: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A run logs once the features that it lacks; the pinned version with plain=true does too."""
    found = [Interpreter("python", package, PACKAGE, "0.33.0")]
    monkeypatch.setattr(servers_engine, "find_environment", lambda *_: found[0])
    config = train_config({"rollout.engine.name": "vllm", "rollout.top_p": 0.9})
    with raises(ConfigError, key="rollout.top_p", found=0.9, change=re.compile("`make vllm`")):
        check_sampling(config.rollout, {"rollout": config.rollout})
    check_engine(config)
    said = [each.getMessage() for each in caplog.records if "plain mode" in each.getMessage()]
    assert len(said) == 1 and "vLLM 0.33.0" in said[0] and "on_new_weights=keep" in said[0]
    for options, count in (({}, 0), ({"plain": True}, 1)):
        caplog.clear()
        found[:] = [Interpreter("python", package, PACKAGE)]
        config = train_config({"rollout.engine.name": "vllm", "rollout.engine.options": options, "rollout.top_p": 1.0})
        check_sampling(config.rollout, {"rollout": config.rollout})
        check_engine(config)
        assert sum("plain mode" in each.getMessage() for each in caplog.records) == count


def test_without_an_environment_a_run_can_still_be_planned() -> None:
    options = ROLLOUT_ENGINES["vllm"].resolve_options({"python": "no/python", "plain": True}, "rollout.engine.options")
    assert VLLMEngine.refused(SamplingParams(4), options) is None
    with raises(ConfigError, key="no/python"):
        VLLMEngine.check_ahead(ModelConfig(), 8, options)
