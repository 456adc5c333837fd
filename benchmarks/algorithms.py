# SPDX-License-Identifier: Apache-2.0
"""The algorithms' own speed and memory, against verl's functions of the same name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.competitor import Entry, take_turns
from benchmarks.record import Record, speed_up
from benchmarks.setting import Setting

TITLE = "The mathematics"
NOTE = """\
Functions of whet and of verl on the same batch in the same environment, each in a process of its own. whet's
estimators run as the loop calls them (`estimate`: columns checked, advantages of every token) and, "alone", as
`Bound` runs them, with one number a row if the function returns one. Losses: forward, diagnostics
as numbers, token-mean or the loss's own aggregation, backward. Memory is what the process needed beyond its inputs.
"""
ROUNDS = 3
ESTIMATORS = {"grpo": ("grpo", "grpo_vectorized"), "rloo": ("rloo", "rloo_vectorized"), "gae": ("gae",)}
LOSSES = ("vanilla", "gspo", "cispo", "sapo", "geo_mean", "gpg", "dro", "dppo_tv", "dppo_kl", "kl_cov", "clip_cov")


def run(setting: Setting) -> dict[str, Any]:
    """Every function in turn with its peers; nothing where verl is not there."""
    if setting.verl_python is None:
        return {}
    scale = setting.scale
    found: dict[str, Any] = {}
    for name, theirs in ESTIMATORS.items():
        shape = scale.gae_shape if name == "gae" else scale.estimator_shape
        entries = {
            f"verl {peer}": setting.beside_verl("verl_functions", kind="estimator", name=peer, shape=shape)
            for peer in theirs
        }
        for form in ("estimate", "alone"):
            entries[f"whet {form}"] = setting.beside_verl("whet_functions", kind=form, name=name, shape=shape)
        found[name] = {"shape": shape, "records": _records(setting, entries)}
    for name in LOSSES if scale.is_thorough else LOSSES[:2]:
        entries = {
            who: setting.beside_verl(f"{who}_functions", kind="loss", name=name, shape=scale.loss_shape)
            for who in ("verl", "whet")
        }
        found[name] = {"shape": scale.loss_shape, "records": _records(setting, entries)}
    return found


def _records(setting: Setting, entries: Mapping[str, Entry]) -> dict[str, Any]:
    rounds, warm_up = (ROUNDS, 1) if setting.scale.is_thorough else (1, 1)
    records = take_turns(entries, rounds=rounds, warm_up=warm_up, scratch=setting.scratch)
    return {name: asdict(record) for name, record in records.items()}


def report(results: Mapping[str, Any]) -> list[str]:
    """A table of the estimators and one of the losses."""
    section = {
        name: {who: Record(**record) for who, record in found["records"].items()}
        for name, found in results["algorithms"].items()
    }
    lines = [
        "| estimator, rows x tokens | verl | whet, as the loop calls it | | alone | |",
        "|---|---|---|---|---|---|",
    ]
    for name, theirs in ESTIMATORS.items():
        if name not in section:
            return ["verl was not there."]
        records = section[name]
        for peer in theirs:
            verl, whole, alone = records[f"verl {peer}"], records["whet estimate"], records["whet alone"]
            rows, positions = results["algorithms"][name]["shape"]
            lines.append(
                f"| {name}, {rows:,} x {positions:,} | {peer} {verl.seconds:.3f} s | {whole.seconds:.3f} s "
                f"| {speed_up(verl, whole)} | {alone.seconds:.3f} s | {speed_up(verl, alone)} |"
            )
    lines += ["", "| loss | verl | whet | | verl | whet |", "|---|---|---|---|---|---|"]
    for name in LOSSES:
        if name in section:
            verl, whet = section[name]["verl"], section[name]["whet"]
            lines.append(
                f"| {name} | {verl.seconds:.2f} s | {whet.seconds:.2f} s | {speed_up(verl, whet)} "
                f"| {_extra(verl)} | {_extra(whet)} |"
            )
    return lines


def _extra(record: Record) -> str:
    return f"{(record.peak_bytes - record.ready['loaded_bytes']) / 2**30:.2f} GiB"
