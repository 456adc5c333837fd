# SPDX-License-Identifier: Apache-2.0
"""Samplers take turns with one engine; checkpoints in a folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.raising import raises
from whet.errors import StorageError
from whet.guard import RefusedError
from whet.plugins.serving.tinker.samplers import SampleRequest, Samplers
from whet.plugins.serving.tinker.store import ModelKind, Saved, Store
from whet.rollout.protocol import Completion, Event, Failed, Finished, SamplingParams


class Engine:
    """Samples one token a poll for each request, and records its calls."""

    def __init__(self) -> None:
        self.log, self.running = list[str](), list[Any]()

    def attach(self, module: Any, version: int, *, is_own: bool = False) -> None:
        assert not self.running
        self.log.append(f"<{module}>")

    def submit(self, request: Any) -> bool:
        self.log.append(request.uid)
        self.running.append(request)
        return True

    def poll(self, timeout_seconds: float) -> list[Event]:
        done, self.running = self.running[:1], self.running[1:]
        return [Finished(each.uid, each.attempt, Completion((1,), (0.0,), "stop", ())) for each in done]

    def abort(self, uids: Any) -> None:
        self.running = [each for each in self.running if each.uid not in uids]


def module(owner: str, path: str | None) -> Any:
    if path == "gone":
        raise RefusedError(404, "gone")
    return path or "base"


def request(uid: str, path: str | None, attempt: int = 0) -> SampleRequest:
    return SampleRequest(uid, (1,), SamplingParams(1), 0, attempt, source=("me", path))


def test_the_weights_that_wait_longest_are_next() -> None:
    engine = Engine()
    samplers = Samplers(engine, module)  # type: ignore[arg-type]
    for uid, path in (("a1", "a"), ("b1", "b"), ("a2", "a")):
        samplers.submit(request(uid, path))
    events = [event.uid for event in samplers.poll(0.0)]
    samplers.submit(request("a3", "a"))  # behind b, or a would never end
    for _ in range(9):
        events += [event.uid for event in samplers.poll(0.0)]
    assert engine.log == ["<a>", "a1", "a2", "<b>", "b1", "<a>", "a3"] and events == ["a1", "a2", "b1", "a3"]
    samplers.submit(request("a4", "a"))
    samplers.poll(0.0)
    assert engine.log[-1] == "a4"  # the same weights, without attaching them


def test_a_request_counts_once_and_a_later_attempt_replaces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    samplers = Samplers(engine, module)  # type: ignore[arg-type]
    for uid, path, attempt in (("x", "a", 0), ("x", "a", 0), ("y", "a", 0), ("z", "b", 1), ("z", "c", 2)):
        assert samplers.submit(request(uid, path, attempt))
    assert (samplers.status().waiting, samplers.status().oldest) == (3, "x")
    assert [(each.uid, each.attempt) for each in samplers.poll(0.0)] == [("x", 0)]
    assert samplers.submit(request("y", "a", 1)) and samplers.submit(request("z", "b", 1))  # y runs; z is at attempt 2
    monkeypatch.setattr("whet.rollout.ledger.MAX_UNFINISHED", 2)
    assert not samplers.submit(request("w", "a")) and samplers.submit(request("y", "a", 1))
    events = [(each.uid, each.attempt) for _ in range(4) for each in samplers.poll(0.0)]
    assert engine.log == ["<a>", "x", "y", "<c>", "z", "<a>", "y"] and events == [("z", 2), ("y", 1)]
    assert samplers.status().running == samplers.status().waiting == 0


def test_events_of_an_attempt_that_was_replaced_are_dropped() -> None:
    engine = Engine()
    engine.abort = lambda uids: None  # type: ignore[method-assign]  # its result is on its way
    samplers = Samplers(engine, module)  # type: ignore[arg-type]
    samplers.submit(request("x", None))
    samplers.submit(request("y", None))
    samplers.poll(0.0)
    samplers.submit(request("y", None, 1))
    engine.submit(request("y", None))
    events = [(each.uid, each.attempt) for _ in range(4) for each in samplers.poll(0.0)]
    assert events == [("y", 1)]


def test_requests_whose_weights_are_gone_fail_alone() -> None:
    samplers = Samplers(Engine(), module)  # type: ignore[arg-type]
    for uid, path in (("x", "gone"), ("y", None), ("z", "c")):
        samplers.submit(request(uid, path))
    samplers.abort(["z"])
    events = [event for _ in range(4) for event in samplers.poll(0.0)]
    assert [(type(each), each.uid) for each in events] == [(Finished, "z"), (Failed, "x"), (Finished, "y")]
    assert samplers.status().running == samplers.status().waiting == 0


def test_paths_names_and_owners(tmp_path: Path) -> None:
    store, kind = Store(tmp_path), ModelKind("m", 4)
    path = "tinker://s:train:0/weights/one"
    with store.writing(path, Saved("me", kind, 1.0, None, {"a": "b"}), overwrite=False):
        assert not [*store.listed("me")]  # it is not complete
    place, saved = store.find("me", path)
    assert (
        place == tmp_path / "s:train:0" / "weights" / "one" and saved.kind == kind and saved.user_metadata == {"a": "b"}
    )
    assert [each[0] for each in store.listed("me")] == [path] == [each[0] for each in store.listed("me", "s:train:0")]
    assert not [*store.listed("you")] and not [*store.listed("me", "*")]
    for bad in (
        "tinker://a/weights/../x",
        "tinker://../weights/x",
        "tinker://a/other/x",
        "/etc/x",
        "tinker://a/weights/",
    ):
        with pytest.raises(RefusedError):
            store.place(bad)
    with pytest.raises(RefusedError), store.writing(path, saved, overwrite=False):
        raise AssertionError
    for owner, name in (("you", path), ("me", path.replace("one", "two"))):
        with pytest.raises(RefusedError):
            store.remove(owner, name)
    with store.writing(path, Saved("me", kind, 1.0, 2.0), overwrite=True):
        pass
    with pytest.raises(RefusedError):  # it has expired
        store.find("me", path)
    assert not place.exists() and saved.time <= time.time()
    (tmp_path / "s:train:0" / "weights" / "two").mkdir()
    for damaged in ("[]", '{"owner": "me", "later": 1}'):
        (tmp_path / "s:train:0" / "weights" / "two" / "meta.json").write_text(damaged)
        assert not [*store.listed("me")]


def write(store: Store, name: str, content: str, **fields: Any) -> Path:
    path = f"tinker://s:train:0/sampler_weights/{name}"
    with store.writing(path, Saved("me", ModelKind("m", 4), 1.0, **fields), overwrite=True) as place:
        (place / "weights").write_text(content)
    return store.find("me", path)[0]


def test_a_checkpoint_stays_until_the_one_that_replaces_it_is_complete(tmp_path: Path) -> None:
    store = Store(tmp_path)
    place = write(store, "one", "old")
    path, saved = "tinker://s:train:0/sampler_weights/one", Saved("me", ModelKind("m", 4), 2.0)
    with pytest.raises(OSError), store.writing(path, saved, overwrite=True) as partial:  # a full disk
        (partial / "weights").write_text("half")
        assert (place / "weights").read_text() == "old"
        raise OSError(28, "full")
    assert [each.name for each in place.parent.iterdir()] == ["one"] and (place / "weights").read_text() == "old"
    write(store, "one", "new")
    assert [each.name for each in place.parent.iterdir()] == ["one"] and (place / "weights").read_text() == "new"


def test_a_server_clears_up_after_servers_that_have_ended(tmp_path: Path) -> None:
    """Snapshots and parts are removed, a replaced checkpoint returns, names that begin with _ stay; another server that
    runs keeps its snapshots."""
    store = Store(tmp_path / "ck")
    with store.opened(), Store(tmp_path / "ck").opened():
        named, snapshot = write(store, "_best", "x"), write(store, "snapshot", "x", is_snapshot=True)
        with Store(tmp_path / "ck").opened():
            assert snapshot.exists()
    replaced = write(store, "replaced", "old")
    replaced.rename(replaced.with_name(".replaced.former"))
    (replaced.with_name(".half.partial")).mkdir()
    with store.opened():
        assert {each.name for each in named.parent.iterdir()} == {"_best", "replaced"}
        assert (replaced / "weights").read_text() == "old"
    (tmp_path / "file").touch()
    with raises(StorageError), Store(tmp_path / "file").opened():
        raise AssertionError


@pytest.mark.parametrize("error", [OSError(5, "broken"), RuntimeError("can't allocate memory"), KeyError("x")])
def test_weights_that_cannot_be_read_fail_their_own_requests(error: Exception) -> None:
    def broken(owner: str, path: str | None) -> Any:
        if path == "broken":
            raise error
        return module(owner, path)

    samplers = Samplers(Engine(), broken)  # type: ignore[arg-type]
    for uid, path in (("x", "broken"), ("y", None)):
        samplers.submit(request(uid, path))
    events = [event for _ in range(4) for event in samplers.poll(0.0)]
    assert [(type(each), each.uid) for each in events] == [(Failed, "x"), (Finished, "y")]
