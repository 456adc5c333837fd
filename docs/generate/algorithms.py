# SPDX-License-Identifier: Apache-2.0
"""docs/algorithms.md, written from what is registered."""

from __future__ import annotations

from collections.abc import Sequence

from whet.cli.algorithms import LEGEND, TITLES, chosen_by, facts, notation, summary
from whet.registry import KINDS, Registry

HEAD = """\
# Algorithms

Written by `make pages` from the functions themselves; `whet algorithms show NAME` prints one of them.

Parameters before `*` in a function's signature are columns of the batch, those after it are its options. How to add
your own is in `examples/algorithms/`.
"""
CERTIFICATES = """\
## Certificates

`whet algorithms certify` computes them. A policy of three tokens and answers of up to three of them has 15 answers, so
that the expected gradient of any algorithm is a finite sum over all groups of two, in float64, and so is the gradient
of what it is said to maximise, E[R] - beta KL(pi || ref) over whole answers. One thing is changed at a time, all else
is `rloo`, `reinforce` and sums over sequences; a recipe is looked at as it is, but for what three tokens cannot show
(an entropy weight that adapts, lengths that grow), with a critic and a teacher that know nothing. What it takes from
long answers is part of its reward. The step is that of the training loop, made of the same parts. Weights are looked at
with a sampler that is 0.3 away from the trainer.

{legend}

Bias is no fault by itself: variance, length or safety was bought with it.
"""


def page(certified: Sequence[Sequence[str]]) -> str:
    """The whole page."""
    legend = "\n".join(f"- {title}: {meaning}." for title, meaning in LEGEND.items())
    explained = CERTIFICATES.format(legend=legend)
    return "\n".join([HEAD, *(part for kind in KINDS for part in _section(kind)), explained, table(certified)])


def table(certified: Sequence[Sequence[str]]) -> str:
    """The certificates as a Markdown table."""
    lines = [("", "", *TITLES), ["---"] * (2 + len(TITLES)), *certified]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _section(kind: Registry) -> list[str]:
    lines = [f"## {kind.kind[0].upper()}{kind.kind[1:]}s", "", f"Chosen by `{chosen_by()[kind.kind][0]}`.", ""]
    lines += [f"In formulas: {notation(kind.kind)}.", ""] if notation(kind.kind) else []
    for entry in kind:
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
