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
out, there and back, in one process: what any transport between two processes needs. All have warmed up: memory that is
written to for the first time costs several times as much, and a run sends batches of a size again and again.
`controller` is a call of eight workers that return one column of zeros at once: whet's own time in the calling process.
"""
CONTROLLER = "controller"
WARM_UP = 6  # until all of an object store has been written to once


def run(setting: Setting) -> dict[str, Any]:
    """All in verl's environment, with its Ray; nothing where it is not there."""
    if setting.verl_python is None:
        return {}
    rows, positions = setting.scale.transport_shape
    entries = {
        name: setting.beside_verl(f"{module}_transport", rows=rows, positions=positions)
        for name, module in (("verl", "verl"), ("whet", "whet"), ("bytes alone", "memory"))
    }
    rounds, warm_up = (setting.scale.rounds, WARM_UP) if setting.scale.is_thorough else (1, 1)
    records = take_turns(entries, rounds=rounds, warm_up=warm_up, scratch=setting.scratch)
    shape = setting.scale.estimator_shape
    entry = setting.beside_verl("whet_controller", shape=shape)
    records |= take_turns({CONTROLLER: entry}, rounds=1 + rounds // 2, warm_up=1, scratch=setting.scratch)
    found = {name: asdict(record) for name, record in records.items()}
    return {"rows": rows, "positions": positions, "controller_shape": shape, "records": found}


def report(results: Mapping[str, Any]) -> list[str]:
    """A table."""
    section = results["transport"]
    if not section:
        return ["verl was not there."]
    records = {name: Record(**record) for name, record in section["records"].items()}
    verl, whet, alone = (records[name] for name in ("verl", "whet", "bytes alone"))
    size = verl.ready["batch_bytes"]
    rows, positions = section["controller_shape"]
    lines = [
        f"| {section['rows']:,} rows, {size / 2**30:.2f} GiB | seconds | against verl | of the bytes alone |",
        "|---|---|---|---|",
        f"| verl | {verl.seconds:.2f} | | {verl.seconds / alone.seconds:.1f}x |",
        f"| whet | {whet.seconds:.2f} | {speed_up(verl, whet)} | {whet.seconds / alone.seconds:.1f}x |",
        f"| bytes alone | {alone.seconds:.2f} | | |",
        "",
        f"whet's controller: {records[CONTROLLER].seconds:.2f} s a call with {rows:,} rows of {positions:,} tokens.",
    ]
    return lines
