# SPDX-License-Identifier: Apache-2.0
"""The table of docs/gpu.md, and the sentence about GPUs that other pages have, from benchmarks/gpu.jsonl.

A line of the file is a part that was measured on one card: `part`, `card`, `commit`, `torch`, and its figures.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
FILE = DOCS.parent / "benchmarks" / "gpu.jsonl"
# Pages with the sentence, from docs/.
STATED = (
    "../README.md",
    "index.md",
    "migrating.md",
    "serving.md",
    "tuning.md",
    "fits.md",
    "planning.md",
    "install.md",
    "zh/index.md",
    "zh/install.md",
)
TABLE = re.compile(r"(<!-- figures -->\n).*?(<!-- end of figures -->)", re.DOTALL)
SENTENCE = re.compile(r"(<!-- gpu -->).*?(<!-- end of gpu -->)", re.DOTALL)
WORDS = {
    "en": (
        "With 0.5B (random weights) one {card} samples {rate:,} tokens/s and trains at {share:.0f} % of its peak "
        "FLOP/s ([measured]({page})); nothing was run on several GPUs."
    ),
    "zh": (
        "在一块 {card} 上，0.5B 模型（随机权重）的采样速度为 {rate:,} token/s，训练达到其峰值 FLOP/s 的 {share:.0f} %"  # noqa: RUF001
        "（[测量结果]({page})，英文）；多块 GPU 上还没有运行过。"  # noqa: RUF001
    ),
}


@dataclass(frozen=True)
class Figure:
    """A row of the table: a figure of a part, its name, the aim, and its form."""

    part: str
    name: str
    title: str
    aim: str = ""
    form: str = "{:,.0f}"


PERCENT, TIMES, SECONDS = "{:.1f} %", "{:.2f}", "{:.0f} s"
FIGURES = (
    Figure("sample:0.5b", "tokens_per_second", "512 requests, 0.5B, tokens/s", "80,000"),
    Figure("sample:0.5b", "busy", "share of that turn in which the device is busy", "95 %", "{:.0f} %"),
    Figure("vllm:0.5b", "tokens_per_second", "the same requests by vLLM, tokens/s"),
    Figure("sample:1.5b", "tokens_per_second", "512 requests, 1.5B, tokens/s", "1.3 times vLLM"),
    Figure("vllm:1.5b", "tokens_per_second", "the same requests by vLLM, tokens/s"),
    Figure("sample:7b", "tokens_per_second", "256 requests, 7B, tokens/s", "vLLM's"),
    Figure("vllm:7b", "tokens_per_second", "the same requests by vLLM, tokens/s"),
    Figure("update:0.5b", "mfu", "update, 0.5B, MFU", "35 %", PERCENT),
    Figure("update:1.5b", "mfu", "update, 1.5B, MFU", "46 %", PERCENT),
    Figure("update:7b:checkpoints:narrow", "mfu", "update, 7B, bfloat16 weights, checkpoints, MFU", "40 %", PERCENT),
    Figure(
        "update:0.5b:checkpoints", "times_without", "gradient checkpointing, times the seconds without", "1.3", TIMES
    ),
    Figure("log_probs:0.5b", "mfu", "log-probs, 0.5B, MFU", "35 %", PERCENT),
    Figure(
        "invariant:0.5b",
        "sample_times_plain",
        "sampling with `batch_invariant`, times the seconds without",
        "2",
        TIMES,
    ),
    Figure("invariant:0.5b", "update_times_plain", "an update with it, times the seconds without", "2", TIMES),
    Figure(
        "invariant:0.5b",
        "gap_millionths",
        "largest gap between log-probs of sampling and training with it, in millionths",
        "0",
        TIMES,
    ),
    Figure("invariant:0.5b", "plain_gap_millionths", "the same without it", "", TIMES),
    Figure("step:0.5b", "times_trl", "a GRPO step, 0.5B, times TRL's rate", "2", TIMES),
    Figure("step:1.5b", "times_trl", "a GRPO step, 1.5B, times TRL's rate", "2", TIMES),
    Figure("update:0.5b", "first_seconds", "first update, nearly all of it compiling", "", SECONDS),
    Figure("sample:0.5b", "first_seconds", "first turn of sampling", "", SECONDS),
    Figure(
        "start:cold", "seconds", "`whet train` to the end of its first step, 0.5B, nothing compiled", "90 s", SECONDS
    ),
    Figure("start:warm", "seconds", "the same with all compiled", "35 s", SECONDS),
    Figure("quickstart", "seconds", "`whet quickstart`", "", SECONDS),
)


def records(file: Path = FILE) -> list[dict[str, Any]]:
    """All parts that were measured."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


def merged(before: Sequence[Mapping[str, Any]], new: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The records with a newer one, which takes the place of the same part on the same card."""
    place = (new["part"], new["card"])
    return [*(dict(each) for each in before if (each["part"], each["card"]) != place), dict(new)]


def card_name(card: str) -> str:
    """H100 for `NVIDIA H100 80GB HBM3`; a name of one word is its own."""
    words = card.split()
    return words[1] if words[0] == "NVIDIA" and len(words) > 1 else card


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """A row a figure, a column a card; where and when each card's were measured stands below."""
    cards = list(dict.fromkeys(each["card"] for each in found))
    by_place = {(each["part"], each["card"]): each for each in found}
    lines = [f"| work | {' | '.join(map(card_name, cards))} | aim |", "|---|" + "--:|" * (len(cards) + 1)]
    for figure in FIGURES:
        values = [by_place.get((figure.part, card), {}).get(figure.name) for card in cards]
        scale = 100 if figure.form.endswith("%") else 1
        cells = ["not measured" if value is None else figure.form.format(scale * value) for value in values]
        lines.append(f"| {figure.title} | {' | '.join(cells)} | {figure.aim} |")
    lines.append("")
    for card in cards:
        places = dict.fromkeys((each["commit"], each["torch"]) for each in found if each["card"] == card)
        lines.append(f"- {card}: " + "; ".join(f"commit {commit}, torch {torch}" for commit, torch in places))
    return "\n".join(lines)


def sentence(found: Sequence[Mapping[str, Any]], name: str) -> str:
    """The sentence for the page of this name, about the first of the cards, by name, that has both figures."""
    rates = {each["card"]: each["tokens_per_second"] for each in found if each["part"] == "sample:0.5b"}
    shares = {each["card"]: 100 * each["mfu"] for each in found if each["part"] == "update:0.5b"}
    card = min(rates.keys() & shares.keys())
    page = {"..": "docs/gpu.md", "zh": "../gpu.md"}.get(name.partition("/")[0], "gpu.md")
    words = WORDS["zh" if name.startswith("zh/") else "en"]
    return words.format(rate=int(round(rates[card], -3)), share=shares[card], card=card_name(card), page=page)


def page(written: str, found: Sequence[Mapping[str, Any]] | None = None) -> str:
    """docs/gpu.md with the table of these records, by default of the records in the file."""
    shown = table(records() if found is None else found)
    return TABLE.sub(lambda match: f"{match[1]}\n{shown}\n\n{match[2]}", written)


def stated(name: str) -> Callable[[str], str]:
    """A page of STATED with the sentence of today."""
    return lambda written: SENTENCE.sub(lambda found: found[1] + sentence(records(), name) + found[2], written)
