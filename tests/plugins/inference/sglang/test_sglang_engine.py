# SPDX-License-Identifier: Apache-2.0
"""The engine against a server that speaks SGLang's protocol: pauses, versions, aborts, errors, bad input."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.raising import raises

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "rollout"))
import fake_sglang as fake
from fake_engines import Start, events_of, request, starting

from whet.config.schema import TrainConfig
from whet.errors import ConfigError, DataError, EngineError, LostReplicaError, WeightSyncError
from whet.models.load import load_policy, load_tokenizer
from whet.plugins.inference.servers.environment import find_environment
from whet.plugins.inference.sglang import engine as engine_module
from whet.plugins.inference.sglang.engine import PACKAGE, SGLangEngine, body_of
from whet.rollout.protocol import Event, Failed, Finished, Partial, Request, SamplingParams, generate
from whet.trainers.build import begin

FAKE = str(Path(__file__).with_name("fake_sglang.py"))


@pytest.fixture
def start(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts engines whose server is the fake one."""
    fields = tmp_path / "sglang" / "srt" / "arg_groups" / "fields"
    fields.mkdir(parents=True)
    (fields / "model.py").write_text("class Model:\n    context_length: int = 1\n    model_path: str = ''\n")
    found = tmp_path / "sglang"
    with starting(SGLangEngine, engine_module, FAKE, found, model_folder, monkeypatch) as start:
        yield start


def weights(folder: Path, factor: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    return [(name, weight.detach() * factor) for name, weight in load_policy(folder).named_parameters()]


@pytest.mark.slow
def test_requests_and_completions(start: Start) -> None:
    made = [request(fake.QUICK, tokens, uid=str(tokens)) for tokens in range(1, 21)]
    for each, completion in zip(made, generate(start(), made), strict=True):
        tokens = each.params.max_new_tokens
        assert completion.token_ids == tuple(range(3, tokens + 3)) and completion.versions == ((0, tokens),)
        assert completion.log_probs == tuple(-1 / (place + 1) for place in range(tokens))


@pytest.mark.slow
def test_pause_and_new_weights(start: Start, model_folder: Path) -> None:
    engine = start()
    engine.submit(request(fake.SLOW, 60))
    engine.poll(0.3)
    engine.pause()
    [partial] = engine.poll(0.0)
    assert isinstance(partial, Partial) and 0 < len(partial.token_ids) < 60
    engine.submit(request(fake.QUICK, uid="late"))
    engine.load(weights(model_folder), version=3)
    assert engine.poll(0.2) == []
    engine.abort(["late"])
    [late] = engine.poll(0.0)
    assert isinstance(late, Finished) and late.completion.finish_reason == "abort"
    engine.resume()
    [done] = events_of(engine)
    before = len(partial.token_ids)
    assert isinstance(done, Finished) and done.completion.versions == ((0, before), (3, 60 - before))


HANDLINGS = ("recompute", "keep", "wait", "abort")


@pytest.mark.slow
@pytest.mark.parametrize("handling", HANDLINGS)
def test_what_running_requests_do_when_weights_change(start: Start, model_folder: Path, handling: str) -> None:
    """All tokens come once, with the versions that sampled them; requests that wait begin under the new weights."""
    engine = start(batch=4, on_new_weights=handling)
    for uid in range(5):
        engine.submit(request(fake.SLOW, 250, str(uid), streams=uid % 2 == 0))
    engine.submit(request(fake.QUICK, uid="waits"))
    events = list[Event]()

    def has_all(version: int) -> bool:
        found = [sampled.versions for _, sampled in list(engine._streams.values())]
        return len(found) == 5 and all(each and each[-1][0] == version for each in found)

    for version in range(3):
        if version:
            engine.load(weights(model_folder), version)
        while not has_all(version) and not (handling == "wait" and version):
            events += engine.poll(0.05)
    while engine.status().oldest is not None:
        events += engine.poll(1.0)
    found = {event.uid: event.completion for event in events if isinstance(event, Finished)}
    assert set(found) == {*"01234", "waits"}
    for uid in range(5):
        completion = found[str(uid)]
        parts = [each for each in events if isinstance(each, Partial) and each.uid == str(uid)]
        assert completion.token_ids == tuple(range(3, 253)) and completion.finish_reason == "length"
        assert completion.log_probs == tuple(-1 / (place + 1) for place in range(250))
        assert [version for version, _ in completion.versions] == ([0] if handling == "wait" else [0, 1, 2])
        assert sum((each.token_ids for each in parts), ()) == (completion.token_ids if uid % 2 == 0 else ())
        told = [version for each in parts for version, count in each.versions for _ in range(count)]
        assert not told or told == [version for version, count in completion.versions for _ in range(count)]
    assert found["waits"].versions[0][0] > 0


@pytest.mark.slow
def test_weights_through_a_folder(start: Start, model_folder: Path, tmp_path: Path) -> None:
    engine = start(weights_dir=str(tmp_path), restarts=0)
    engine.load(weights(model_folder), version=1)
    assert generate(engine, [request(fake.QUICK)])[0].versions == ((1, 5),)
    assert [each.name for each in tmp_path.iterdir()] == ["sglang"]


@pytest.mark.slow
def test_an_abort_ends_one_request(start: Start) -> None:
    """The server ends all whose names begin with the one given."""
    engine = start()
    for number in range(12):
        engine.submit(request(fake.SLOW, 30, uid=str(number)))
    engine.poll(0.3)
    engine.abort(["0"])
    [cut] = engine.poll(0.0)
    assert isinstance(cut, Finished) and 0 < len(cut.completion.token_ids) < 30
    engine.submit(request(fake.QUICK, 30, attempt=1, sampled_ids=cut.completion.token_ids))
    found = {event.uid: event.completion for event in events_of(engine, 12) if isinstance(event, Finished)}
    assert cut.completion.token_ids + found.pop("0").token_ids == tuple(range(3, 33))
    assert {each.finish_reason for each in found.values()} == {"length"} and len(found) == 11


@pytest.mark.slow
def test_a_stop_string_ends_a_response_that_the_server_would_go_on_with(start: Start, model_folder: Path) -> None:
    """With the token that completes it, also where an earlier attempt sampled its beginning; a stop token comes first,
    and the last token may complete one."""
    engine, tokenizer = start(), load_tokenizer(model_folder)
    first, last = (tokenizer.decode([place + 3]) for place in (8, 9))
    rows = [(100, (), False), (100, (), True), (100, (3, 4, 5, 6, 7, 8, 9, 10, 11), False), (10, (), False)]
    for row, (tokens, earlier, streams) in enumerate(rows):
        params = SamplingParams(tokens, stop=("never", first + last), stop_token_ids=(1,))
        kind = fake.SLOW if tokens == 100 else fake.QUICK
        engine.submit(Request(str(row), (kind, 4), params, key=1, sampled_ids=earlier, streams=streams))
    engine.submit(Request("token", (fake.SLOW, 4), SamplingParams(10, stop=(last,), stop_token_ids=(12,)), key=1))
    events = list[Event]()
    while engine.status().oldest is not None:
        events += engine.poll(1.0)
    found = {event.uid: event.completion for event in events if isinstance(event, Finished)}
    for row, (_, earlier, streams) in enumerate(rows):
        completion, known = found[str(row)], len(earlier)
        assert completion.token_ids == tuple(range(3, 13))[known:] and completion.versions == ((0, 10 - known),)
        assert completion.log_probs == tuple(-1 / (place + 1) for place in range(known, 10))
        assert (completion.finish_reason, completion.stop) == ("stop", first + last)
        parts = [each.token_ids for each in events if isinstance(each, Partial) and each.uid == str(row)]
        assert sum(parts, ()) == (completion.token_ids if streams else ())
    assert found["token"].token_ids == tuple(range(3, 13)) and found["token"].stop is None
    assert engine.call("GET", "/server_info")["internal_states"][0]["whet_sent"] == {}


@pytest.mark.slow
def test_weights_that_do_not_fit(start: Start, model_folder: Path) -> None:
    engine, whole = start(), weights(model_folder)
    for wrong, message in (
        (whole[:-1], f"weights: 1 of {len(whole)} "),
        ([*whole, ("extra", torch.ones(2))], r"extra: shape \[2\]"),
        (weights(model_folder, 0.0), "zeros"),
    ):
        with pytest.raises(WeightSyncError, match=message):
            engine.load(wrong, version=2)
        with raises(WeightSyncError, key=re.compile(r"^version \d+ "), change=re.compile("weights")):
            engine.poll(0.0)
    engine.load(whole, version=3)
    assert generate(engine, [request(fake.QUICK)])[0].versions == ((3, 5),)


def test_what_changes_a_choice_is_sent_where_anything_does() -> None:
    """The tokens of patches are no reason: the server never samples them."""

    def sent(**params: Any) -> Any:
        made = Request("1", (3, 4), SamplingParams(4, **params), key=1, sampled_ids=(5,))
        found = body_of(made, "name", 0, (), (7, 8))["sampling_params"]["custom_params"]
        return found and json.loads(found["whet"])

    plain = {"repetition": 1.0, "presence": 0.0, "frequency": 0.0, "allowed": None, "bad_words": [], "prompt": 2}
    assert sent() is None and sent(bad_words=((7,), (8,))) is None
    assert sent(bad_words=((7,), (7, 9), (5,))) == {**plain, "bad_words": [[7, 9], [5]]}
    assert sent(presence_penalty=0.5, bad_words=((8,),)) == {**plain, "presence": 0.5}
    assert sent(allowed_token_ids=(3, 4)) == {**plain, "allowed": [3, 4]}


@pytest.mark.slow
def test_failures(start: Start) -> None:
    engine = start()
    engine.submit(request(fake.REFUSED))
    [event] = events_of(engine)
    assert isinstance(event, Failed) and "400: " in event.failure.message
    tokens = SamplingParams(4, allowed_token_ids=(5, 10**6))
    with raises(EngineError, key="allowed_token_ids", found=10**6):
        engine.submit(Request("1", (3,), tokens, key=1))
    with raises(EngineError, key=re.compile("^SGLang server "), found=re.compile(" 0$")):
        generate(engine, [request(fake.ENDS)])


@pytest.mark.slow
def test_a_lost_server_is_started_again_with_the_newest_weights(start: Start, model_folder: Path) -> None:
    engine = start(restarts=1)
    engine.load(weights(model_folder), version=1)
    engine.submit(request(fake.SLOW, 500))
    engine.poll(0.3)
    engine.server.process.kill()
    with raises(LostReplicaError, key=re.compile("^SGLang server "), found=re.compile(" -9$")):
        events_of(engine)
    engine.load(weights(model_folder), version=2)
    engine.restart()
    engine.rejoin()
    assert generate(engine, [request(fake.QUICK)])[0].versions == ((2, 5),)


def test_options_are_checked_before_anything_starts(start: Start) -> None:
    for server, fields in (
        ({"context_len": 64}, {"found": re.compile(r" 0\.5\.23$"), "change": "did you mean 'context_length'?"}),
        ({"model_path": "other"}, {"expected": re.compile("SGLang$")}),
        ({"context_length": 100_000}, {"found": 100_000, "expected": re.compile("^1 to 512,")}),
    ):
        with raises(ConfigError, key=f"rollout.engine.options.server.{next(iter(server))}", **fields):
            start(server=server)
    change = re.compile("`make sglang`")
    with raises(ConfigError, key="no/python", expected=re.compile(r"SGLang 0\.5\.23$"), change=change):
        find_environment(PACKAGE, "no/python")
    with raises(ConfigError, key=sys.executable, found=re.compile(" sglang$"), expected=re.compile("^SGLang ")):
        find_environment(PACKAGE, sys.executable)


def test_sampling_is_checked_before_anything_starts(train_config: Callable[[dict[str, Any]], TrainConfig]) -> None:
    """SGLang supports parameters that vLLM lacks."""
    right = {"rollout.engine.name": "sglang", "rollout.stop": ["a"], "trainer.validation.temperature": 0.009}
    right |= {"rollout.presence_penalty": 0.5, "rollout.bad_words": ["no"], "rollout.allowed_token_ids": [3, 4]}
    with raises(DataError, found=0):
        begin(train_config(right))
    expected = re.compile(r"^0 .* 0\.01,")
    with raises(ConfigError, key="trainer.validation.temperature", found=0.009, expected=expected):
        begin(train_config({**right, "rollout.engine.name": "vllm"}))


def test_the_command_line() -> None:
    line = engine_module.command(
        "python", 80, {"skip_server_warmup": True, "trust_remote_code": False, "dtype": "float32"}
    )
    assert line[1:3] == ["-m", "whet_sglang"] and line[-3:] == ["--skip-server-warmup", "--dtype", "float32"]
