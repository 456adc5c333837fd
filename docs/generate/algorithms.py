# SPDX-License-Identifier: Apache-2.0
"""Writes docs/algorithms.md from the registered functions."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from whet.cli.algorithms import chosen_by, facts, legend, notation, summary
from whet.registry import KINDS, Registry

HEAD = """\
# Algorithms

Written by `make pages` from the functions themselves; `whet algorithms show NAME` prints one of them.

Parameters before `*` in a function's signature are columns of the batch, those after it are its options. How to add
your own is in `examples/extending/`.
"""
CERTIFICATES = """\
## Certificates

`whet algorithms certify` computes these certificates, `whet algorithms certify NAME` those of one, and
`whet algorithms show NAME` prints them with a verdict. A policy with three tokens and at most three tokens a response
has 15 responses, so the expected gradient of any algorithm is a finite sum over all groups of two, in float64. So is
the gradient of the objective, E[R] - beta KL(pi || ref) over whole responses. Each row changes one part; all others are
`rloo`, `reinforce` and sums over sequences. A recipe is computed with all of its parts, except those that three tokens
cannot show (adaptive entropy coefficient, length stages), and with an untrained critic and teacher; a length penalty is
part of its reward. The step uses the parts of the training loop. Weights are computed with a rollout policy whose
logits differ from the trainer's by 0.3.

The data of a preference loss are all pairs of these 15 responses (all labelled responses; for lists, all orders of
three of five responses): the reference samples the responses, and Bradley and Terry order them by their scores. The
gradient of the objective of `whet preference`, expected over these comparisons, is compared with the gradient of the
expected loss, which is computed from values of the loss alone, by finite differences. `kto` and `bco` read a fixed
shift.

{legend}

A bias is not an error by itself: many algorithms accept it for lower variance, shorter responses or stability.
"""


def page(certified: Sequence[Sequence[str]]) -> str:
    """The whole page."""
    meanings = "\n".join(f"- {title}: {meaning}." for title, meaning in legend().items())
    explained = CERTIFICATES.format(legend=meanings)
    return "\n".join([HEAD, *(part for kind in KINDS for part in _section(kind)), explained, table(certified)])


def file(certified: Sequence[Sequence[str]]) -> str:
    """The certificates as whet ships them."""
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows([["kind", "name", *legend()], *certified])
    return written.getvalue()


def table(certified: Sequence[Sequence[str]]) -> str:
    """The certificates as a Markdown table."""
    lines = [("", "", *legend()), ["---"] * (2 + len(legend())), *certified]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _section(kind: Registry) -> list[str]:
    plural = kind.kind + ("es" if kind.kind.endswith("s") else "s")
    lines = [f"## {plural[0].upper()}{plural[1:]}", "", f"Chosen by `{chosen_by()[kind.kind][0]}`.", ""]
    lines += [f"In formulas: {notation(kind.kind)}.", ""] if notation(kind.kind) else []
    for entry in (each for each in kind if each.target.startswith("whet.")):
        lines += [f"### `{entry.name}`", ""]
        if entry.alias_of is not None:
            lines += [f"{summary(entry)}.", ""]
            continue
        lines += [
            *_block(entry.doc),
            *(f"- {title}: {text if title == 'elsewhere' else f'`{text}`'}" for title, text in facts(entry)[1:]),
            "",
        ]
    return lines


def _block(doc: str) -> list[str]:
    return ["```text", *doc.splitlines(), "```", ""]
