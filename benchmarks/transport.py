# SPDX-License-Identifier: Apache-2.0
"""A batch to two Ray actors and back, against verl's DataProto over Ray and against plain copies of its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.competitor import take_turns
from benchmarks.record import Record, speed_up
from benchmarks.setting import Setting

TITLE = "A batch over Ray"
NOTE = """\
A DataProto split over two actors, which hand their rows back, and put together again, each library in its own way: whet
balances the rows by their tokens, copies them once into Ray's object store, reads them there, and puts the results into
the caller's order; verl cuts the batch in two. `bytes alone` writes the same bytes into shared memory and copies them
out, there and back, in one process: the least that any transport between two processes needs. All have warmed up: the
first write to new memory costs several times as much, and a run sends batches of the same size again and again.
`controller` is a call of eight workers that return one column of zeros at once: whet's own time in the calling process.
"""
OPPONENTS = {"verl": "verl", "bytes alone": "memory"}  # and their modules
CONTROLLER = "controller"
WARM_UP = 6  # until all of an object store has been written to once


def run(setting: Setting) -> dict[str, Any]:
    """All in verl's environment, with its Ray; nothing where it is not there. Two by two: verl needs ten times the
    memory of the batch."""
    if setting.verl_python is None:
        return {}
    rows, positions = setting.scale.transport_shape
    rounds, warm_up = (setting.scale.rounds, WARM_UP) if setting.scale.is_thorough else (1, 1)
    found: dict[str, Any] = {"rows": rows, "positions": positions, "controller_shape": setting.scale.estimator_shape}
    for against, module in OPPONENTS.items():
        entries = {
            name: setting.beside_verl(f"{each}_transport", rows=rows, positions=positions)
            for name, each in ((against, module), ("whet", "whet"))
        }
        records = take_turns(entries, rounds=rounds, warm_up=warm_up, scratch=setting.scratch)
        found[against] = {name: asdict(record) for name, record in records.items()}
    entry = setting.beside_verl("whet_controller", shape=setting.scale.estimator_shape)
    records = take_turns({CONTROLLER: entry}, rounds=1 + rounds // 2, warm_up=1, scratch=setting.scratch)
    return {**found, CONTROLLER: asdict(records[CONTROLLER])}


def report(results: Mapping[str, Any]) -> list[str]:
    """A table."""
    section = results["transport"]
    if not section:
        return ["verl was not there."]
    pairs = {name: {who: Record(**record) for who, record in section[name].items()} for name in OPPONENTS}
    size = pairs["verl"]["verl"].ready["batch_bytes"]
    lines = [
        f"| {section['rows']:,} rows, {size / 2**30:.2f} GiB | seconds | whet | |",
        "|---|---|---|---|",
    ]
    for name, records in pairs.items():
        other, whet = records[name], records["whet"]
        lines.append(f"| {name} | {other.seconds:.2f} | {whet.seconds:.2f} | {speed_up(other, whet)} |")
    rows, positions = section["controller_shape"]
    seconds = Record(**section[CONTROLLER]).seconds
    return [*lines, "", f"whet's controller: {seconds:.2f} s a call with {rows:,} rows of {positions:,} tokens."]
