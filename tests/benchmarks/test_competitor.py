# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.competitor import Entry, take_turns
from benchmarks.floors import Shape

SHAPE = asdict(Shape(1, 16, 48, 4, 2, 4, 32))


@pytest.mark.slow
def test_turns_are_counted_and_measured(tmp_path: Path) -> None:
    settings = {"shape": SHAPE, "rows": [16], "gemm_size": 64, "copy_bytes": 2**16}
    entry = Entry(Path(sys.executable), "machine", settings)
    record = take_turns({"machine": entry}, rounds=2, warm_up=1, scratch=tmp_path)["machine"]
    assert len(record.warm_up) == 1 and len(record.rounds) == 2
    assert record.ready["versions"].keys() == {"torch", "transformers"}
    for turn in record.rounds:
        assert turn["peak_bytes"] >= record.ready["loaded_bytes"] > 50 * 2**20
        assert turn["seconds"] > 5 * turn["product_seconds"]["16"] > 0
        # 2 * 64^3 operations at the rate found take less than the whole turn did.
        assert 2 * 64**3 / turn["bfloat16_flops"] < turn["seconds"]


@pytest.mark.slow
def test_one_that_fails_shows_why(tmp_path: Path) -> None:
    entry = Entry(Path(sys.executable), "machine", {"rows": [16]})
    with pytest.raises(RuntimeError, match=r"(?s)A ended in the middle.*KeyError: 'gemm_size'"):
        take_turns({"A": entry}, rounds=1, warm_up=0, scratch=tmp_path)
