# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from whet.planning.units import count, duration, plural, size


def test_sizes_as_a_person_reads_them() -> None:
    assert [size(count) for count in (0, 999, 1000, 2048, 150 * 2**20, 1000 * 2**20, 3 * 2**40)] == [
        *("0 B", "999 B", "1.0 KiB", "2.0 KiB", "150 MiB", "1.0 GiB", "3.0 TiB"),
    ]


def test_numbers_as_a_person_reads_them() -> None:
    assert [count(n) for n in (7, 1_500, 3_300_000, 7_615_616_512)] == ["7", "1.5 k", "3.3 M", "7.62 B"]
    assert [plural(1, "process", "processes"), plural(2_000, "step")] == ["1 process", "2,000 steps"]
    shown = ["40 ms", "1.2 s", "12.0 s", "3.5 min", "20.0 h", "5.2 days"]
    assert [duration(seconds) for seconds in (0.04, 1.2, 12, 210, 72_000, 450_000)] == shown
