# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.raising import raises
from whet import devices
from whet.config import TrainConfig
from whet.devices import HOST, MemoryUse, room_for_tensors
from whet.errors import ConfigError, EngineError
from whet.models.load import load_policy
from whet.registry import ROLLOUT_ENGINES
from whet.rollout import requirements
from whet.rollout.build import check_engine, check_media, check_sampling
from whet.rollout.native import engine as native
from whet.rollout.native.engine import NativeEngine
from whet.rollout.requirements import CacheRoom, requirement
from whet.types import Media, Prompt

GIB = 2**30
TOKEN_BYTES = 2 * 2 * 2 * 32 * 4  # of `model_folder`: keys and values, layers, heads, their size, bytes
ROWS, LONGEST, VOCABULARY = 256, 512, 64


def test_a_cache_takes_what_is_left_beside_the_most_that_others_have() -> None:
    """Of 80 GiB 1 is the libraries', and a byte of tensors takes 1.1: 71.8 GiB of tensors, 51.8 beside 20."""
    left = 79 * GIB / 1.1
    assert room_for_tensors(80 * GIB) == left and devices.needed_for_tensors(int(left)) == pytest.approx(80 * GIB)
    room = CacheRoom(beside=20 * GIB)
    assert room.bytes(80 * GIB) == int(left) - 20 * GIB
    assert room.bytes(80 * GIB, allocated=19 * GIB) == int(left) - 20 * GIB  # the rest will be allocated
    assert room.bytes(80 * GIB, allocated=23 * GIB) == int(left) - 23 * GIB  # more than was planned
    assert CacheRoom(20 * GIB, most=7 * GIB).bytes(80 * GIB) == 7 * GIB  # no sequence would fill more
    assert room.bytes(22 * GIB) == CacheRoom(most=5).bytes(80 * GIB) == GIB  # as on a host


def made_in(use: MemoryUse | None, folder: Path, room: CacheRoom | None, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of the cache that an engine makes where its device has this memory."""
    monkeypatch.setattr(native, "memory", lambda device: use)
    monkeypatch.setattr(requirements, "KV_CACHE_BYTES", 2**20)
    engine = NativeEngine(cache_room=room)
    module = load_policy(folder)
    assert module.config.vocab_size == VOCABULARY and module.config.max_position_embeddings == LONGEST
    engine.attach(module, 0)
    engine._require_cache()
    return engine.cache_bytes


def test_an_engine_makes_it_from_what_is_free_and_its_process_holds(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = 16 * TOKEN_BYTES
    use = MemoryUse(free=GIB, total=80 * GIB, held=2**28, allocated=2**26)
    room = CacheRoom(beside=2**27)  # 0.25 GiB beside the libraries, / 1.1, less 0.125
    left = 2**28 / 1.1 - 2**27
    assert made_in(use, model_folder, room, monkeypatch) == left // block * block
    # Without a plan: all but what it has, and 24 bytes a logit of every row; no more than its rows can fill.
    left = 2**28 / 1.1 - 2**26 - ROWS * VOCABULARY * 24
    whole = ROWS * LONGEST * TOKEN_BYTES
    assert left > whole
    assert made_in(use, model_folder, None, monkeypatch) == whole
    use = use._replace(held=2**27)
    left = 2**27 / 1.1 - 2**26 - ROWS * VOCABULARY * 24
    assert made_in(use, model_folder, None, monkeypatch) == left // block * block < whole
    assert made_in(use, model_folder, CacheRoom(most=3 * 2**20), monkeypatch) == 3 * 2**20
    assert made_in(use, model_folder, CacheRoom(beside=10 * GIB), monkeypatch) == 2**20  # full: the least


def test_where_memory_is_not_known_it_is_a_gibibyte(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = NativeEngine()
    engine.attach(load_policy(model_folder), 0)
    engine._require_cache()
    assert engine.cache_bytes == GIB  # a whole number of blocks of 16 KiB
    assert devices.memory(HOST) is None

    def unknown(device: object) -> None:
        raise RuntimeError("Allocator for mps is not a DeviceAllocator.")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", unknown)
    assert devices.memory(torch.device("mps", 0)) is None


RECORDED = f"{Path(__file__).parents[2]}/examples/extending/rollout_engine.py:Recorded"
OWN = """
from whet import register_rollout
from whet.errors import ConfigError, EngineError


def checked(model, longest, options):
    if longest > options["size"]:
        raise ConfigError("size", options["size"], f"at least {longest}", "raise it")


def refused(sampling, options):
    return ConfigError("top_p", sampling.top_p, "1", "unset it") if sampling.top_p < 1 else None


def media_checked(encoders, media, whose):
    raise EngineError(whose, "has images", "text", "use another engine")


@register_rollout("own", checked_by=checked, refuses=refused, media_checked_by=media_checked)
class Own:
    def __init__(self, dtype, *, size: int = 8):
        self.size = size


class Derived(Own):
    pass


class Other:
    def __init__(self, dtype):
        pass
"""


def test_the_functions_of_an_engine_are_named_by_its_registration_or_by_its_base() -> None:
    assert requirement(ROLLOUT_ENGINES["native"], "planned_by") == NativeEngine.planned_bytes
    derived = [requirement(ROLLOUT_ENGINES[RECORDED], mark) for mark in ("planned_by", "media_checked_by")]
    assert [each.__func__ for each in derived] == [
        NativeEngine.planned_bytes.__func__,
        NativeEngine.check_media.__func__,
    ]  # type: ignore[union-attr,attr-defined]
    assert requirement(ROLLOUT_ENGINES[RECORDED], "checked_by") is None is requirement(ROLLOUT_ENGINES["hf"], "refuses")


def test_a_derived_engine_may_override_them(tmp_path: Path) -> None:
    own = "from whet.rollout.native.engine import NativeEngine\n\n\nclass Mine(NativeEngine):\n"
    own += "    @classmethod\n    def planned_bytes(cls, decoding, options):\n        return cls.__name__\n"
    (tmp_path / "mine.py").write_text(own)
    planned = requirement(ROLLOUT_ENGINES[f"{tmp_path}/mine.py:Mine"], "planned_by")
    assert planned is not None and planned(None, {}) == "Mine"


@pytest.mark.parametrize("name", ["Own", "Derived"])
def test_an_engine_of_ones_own_is_asked_before_it_is_built(
    name: str, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ROLLOUT_ENGINES, "_live", {**ROLLOUT_ENGINES._live})
    (tmp_path / "own.py").write_text(OWN)

    def config(name: str, **rollout: object) -> TrainConfig:
        engine = {"name": f"{tmp_path}/own.py:{name}", "options": {"size": 600} if name != "Other" else {}}
        data = {"max_prompt_length": 300, "max_response_length": 301}
        return TrainConfig.model_validate({"rollout": {"engine": engine, **rollout}, "data": data})

    with raises(ConfigError, "size", found=600, expected="at least 601"):
        check_engine(config(name))
    chosen, other = config(name, top_p=0.5).rollout, config("Other", top_p=0.5).rollout
    with raises(ConfigError, "trainer.validation.top_p", found=0.5):
        check_sampling(chosen, {"trainer.validation": chosen})
    prompts = [Prompt("a", 3, (), (1,), "", None, media=(Media("image", "digest", b""),))]
    with raises(EngineError, "row 3", found=re.compile("images")):
        check_media(chosen, tokenizer, prompts)
    check_engine(config("Other"))
    check_sampling(other, {"rollout": other})
    check_media(other, tokenizer, prompts)
