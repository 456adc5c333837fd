# SPDX-License-Identifier: Apache-2.0
"""docs/algorithms.md, written from what is registered: `whet algorithms page`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from whet.registry import KINDS, REQUIRED, Entry, Registry

if TYPE_CHECKING:
    from whet.algorithms.certify import Certificate, Row

CHOSEN_BY = {  # where a kind of function is chosen, and where its options are given
    "advantage estimator": ("algorithm.adv_estimator", "algorithm.adv_options"),
    "CPO wrapper": ("algorithm.adv_options.wrap_method", None),
    "policy loss": ("algorithm.policy_loss", "algorithm.loss_options"),
    "value loss": ("critic.value_loss", "critic.loss_options"),
    "aggregation": ("algorithm.loss_agg_mode", None),
    "KL form": ("algorithm.kl.form", None),
    "token weight": ("algorithm.correction.weight", "algorithm.correction.weight_options"),
    "rejection": ("algorithm.correction.rejection", "algorithm.correction.rejection_options"),
    "filter": ("algorithm.filter.name", "algorithm.filter.options"),
    "reward shaping": ("algorithm.overlong", None),
    "reward": ("reward.function", "reward.kwargs"),
    "environment": ("environment.name", "environment.options"),
}
Certified = Mapping[tuple[str, str], tuple["Certificate", "Certificate"]]  # by kind and name

HEAD = """\
# Algorithms

Written by `whet algorithms page` from the functions themselves; `whet algorithms show NAME` prints one of them.

Parameters before `*` in a function's signature are columns of the batch, those after it are its options. How to add
your own is in `examples/algorithms/`.
"""
CERTIFICATES = """\
## Certificates

`whet algorithms certify` computes them. A policy of three tokens and answers of up to three of them has 15 answers, so
that the expected gradient of any algorithm is a finite sum over all groups of two, in float64, and so is the gradient
of what it is said to maximise, E[R] - beta KL(pi || ref) over whole answers. One thing is changed at a time, all else
is `rloo`, `reinforce` and sums over sequences.

- error: |g - t| / |t| of the expected gradient g against the objective's t; length: |g| / |t|. Where g has the right
  direction and another length, as with any fixed scale, the cosine is 1.
- variance: that of one group's gradient, in units of |t|^2.
- stale: samples of a policy whose logits are 0.3 (standard deviation) away. Weights are looked at with a sampler that
  is 0.3 away from the trainer.
- exact: what has to have an error below 1e-8 on its own samples; a test holds it to that.

Bias is no fault by itself: variance, length or safety was bought with it.
"""


def page(certified: Certified) -> str:
    """The whole page."""
    return "\n".join([HEAD, *(part for kind in KINDS for part in _section(kind)), CERTIFICATES, table(certified)])


def table(certified: Certified) -> str:
    """The certificates as a Markdown table."""
    lines = [
        "| | | exact | error | cosine | length | variance | stale: error | cosine |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in cells_of(certified))]) + "\n"


def cells_of(certified: Certified) -> list[list[str]]:
    """The table's rows as text."""
    from whet.algorithms.certify import rows

    return [cells(row, *certified[row.kind, row.name]) for row in rows()]


def cells(row: Row, own: Certificate, stale: Certificate) -> list[str]:
    """One row as text."""
    return [
        row.kind,
        row.name,
        "yes" if row.claims_unbiased else "",
        number(own.relative_error),
        f"{own.cosine:.3f}",
        f"{own.norm_ratio:.2f}",
        f"{own.variance:.1f}",
        number(stale.relative_error),
        f"{stale.cosine:.3f}",
    ]


def number(error: float) -> str:
    """An error of rounding is shown as such: its digits mean nothing."""
    return "< 1e-12" if error < 1e-12 else f"{error:.2f}"


def certify_all(show: Callable[[Iterable[Row]], Iterable[Row]] = iter) -> Certified:
    """Every certificate; `show` may look at the rows as they come."""
    from whet.algorithms.certify import certificates, rows

    return {(row.kind, row.name): certificates(row) for row in show(rows())}


def certificate(entry: Entry) -> list[tuple[str, str]]:
    """What `whet algorithms show` says of a function's expected gradient."""
    from whet.algorithms.certify import certificates, rows

    titles = ("exact", "error", "cosine", "length", "variance", "stale error", "stale cosine")
    return [
        (f"certificate, {row.kind}" if row.kind != entry.kind else "certificate", ", ".join(shown))
        for row in rows()
        if row.name == entry.name and entry.kind.split()[-1] in (row.kind.split()[-1], *row.kind.split()[:1])
        for shown in [[f"{t} {c}" for t, c in zip(titles, cells(row, *certificates(row))[2:], strict=True) if c]]
    ]


def facts(entry: Entry) -> list[tuple[str, str]]:
    """What there is to know of a function but its docstring."""
    key, options_key = CHOSEN_BY[entry.kind]
    found = [("choose", f"{key}={entry.name}"), ("columns", ", ".join(entry.columns)), ("code", entry.target)]
    found += [("alias of", entry.alias_of)] if entry.alias_of else []
    found += [(MARKS[mark], str(value)) for mark, value in entry.marks.items() if mark in MARKS]
    if options_key is not None:
        found += [(f"{options_key}.{name}", default(value)) for name, value in entry.options.items()]
    return [(title, text) for title, text in found if text]


MARKS = {"aggregation": "fixes aggregation", "corrects": "corrects"}


def default(value: object) -> str:
    """An option's default as a person writes it."""
    return "required" if value is REQUIRED else str(value)


def summary(entry: Entry) -> str:
    """The first line of the docstring; of an alias what it changes."""
    if entry.alias_of is None:
        return entry.summary
    original = next(kind for kind in KINDS if kind.kind == entry.kind)[entry.alias_of]
    presets = {name: value for name, value in entry.options.items() if original.options[name] != value}
    listed = ", ".join(f"{name}={default(value)}" for name, value in presets.items())
    return f"{entry.alias_of}{f' with {listed}' if presets else ''}"


def _section(kind: Registry) -> list[str]:
    lines = [f"## {kind.kind[0].upper()}{kind.kind[1:]}s", "", f"Chosen by `{CHOSEN_BY[kind.kind][0]}`.", ""]
    for entry in kind:
        lines += [f"### `{entry.name}`", ""]
        if entry.alias_of is not None:
            lines += [f"{summary(entry)}.", ""]
            continue
        lines += [
            *_block(entry.doc),
            *(f"- {title}: `{text}`" for title, text in facts(entry) if title != "choose"),
            "",
        ]
    return lines


def _block(doc: str) -> list[str]:
    return ["```text", *doc.splitlines(), "```", ""]
