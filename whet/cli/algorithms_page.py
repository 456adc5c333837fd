# SPDX-License-Identifier: Apache-2.0
"""docs/algorithms.md, written from what is registered: `whet algorithms page`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal, get_origin

import yaml

from whet.options import bounds_of, words
from whet.registry import KINDS, REQUIRED, WRAPPERS, Entry, Registry

if TYPE_CHECKING:
    from whet.trainers.certify import Certificate, Row

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
    "reward": ("reward.function", "reward.kwargs"),
    "environment": ("environment.name", "environment.options"),
    "sampler": ("data.sampler", "data.sampler_options"),
}
# By kind and name: whether it has to be exact, and its certificates on its own samples and on stale ones.
Certified = Mapping[tuple[str, str], tuple[bool, "Certificate", "Certificate"]]
LEGEND = {  # the columns of a certificate
    "exact": "yes: on its own samples the error has to be below 1e-8, and a test holds it to that",
    "error": "|g - t| / |t|, g the expected gradient and t that of the objective, E[R] - beta KL(pi || ref)",
    "cosine": "of the angle between g and t: 1 where g has t's direction and any length",
    "length": "|g| / |t|",
    "variance": "of the gradient of one group of two, in units of |t|^2",
    "stale error": "the error on samples of a policy whose logits are 0.3 (standard deviation) away",
    "stale cosine": "the cosine on such samples",
    "stale KL": "of a KL as a loss: the error of its own gradient on such samples, against that of each token's KL "
    "with the states of the samples held fixed",
}
TITLES = tuple(LEGEND)

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
is `rloo`, `reinforce` and sums over sequences; a recipe is looked at as it is, but for what three tokens cannot show
(an entropy weight that adapts, lengths that grow), with a critic and a teacher that know nothing. What it takes from
long answers is part of its reward. The step is that of the training loop, made of the same parts. Weights are looked at
with a sampler that is 0.3 away from the trainer.

{legend}

Bias is no fault by itself: variance, length or safety was bought with it.
"""


def page(certified: Certified) -> str:
    """The whole page."""
    legend = "\n".join(f"- {title}: {meaning}." for title, meaning in LEGEND.items())
    explained = CERTIFICATES.format(legend=legend)
    return "\n".join([HEAD, *(part for kind in KINDS for part in _section(kind)), explained, table(certified)])


def table(certified: Certified) -> str:
    """The certificates as a Markdown table."""
    lines = [("", "", *TITLES), ["---"] * (2 + len(TITLES)), *cells_of(certified)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cells_of(certified: Certified) -> list[list[str]]:
    """The table's rows as text."""
    return [[kind, name, *cells(*found)] for (kind, name), found in certified.items()]


def cells(is_exact: bool, own: Certificate, stale: Certificate) -> list[str]:
    """One row as text, under `TITLES`."""
    return [
        "yes" if is_exact else "",
        number(own.relative_error),
        f"{own.cosine:.3f}",
        f"{own.norm_ratio:.2f}",
        f"{own.variance:.1f}",
        number(stale.relative_error),
        f"{stale.cosine:.3f}",
        "" if stale.kl_error is None else number(stale.kl_error),
    ]


def number(error: float) -> str:
    """An error of rounding is shown as such: its digits mean nothing."""
    return "< 1e-12" if error < 1e-12 else f"{error:.2f}"


def certify_all(show: Callable[[Iterable[Row]], Iterable[Row]] = iter) -> Certified:
    """Every certificate; `show` may look at the rows as they come."""
    from whet.trainers.certify import certificates, rows

    return {(row.kind, row.name): (row.is_exact, *certificates(row)) for row in show(rows())}


def certificate(entry: Entry) -> list[tuple[str, str]]:
    """What `whet algorithms show` says of a function's expected gradient."""
    from whet.trainers.certify import certificates, rows_of

    found = []
    for row in rows_of(entry):
        shown = zip(TITLES, cells(row.is_exact, *certificates(row)), strict=True)
        title = "certificate" if row.kind == entry.kind else f"certificate, {row.kind}"
        found.append((title, ", ".join(f"{name} {cell}" for name, cell in shown if cell)))
    return found


def facts(entry: Entry) -> list[tuple[str, str]]:
    """What there is to know of a function but its definition."""
    key, options_key = CHOSEN_BY[entry.kind]
    reads = entry.columns if entry.kind != WRAPPERS.kind else ()
    found = [("choose", f"{key}={entry.name}"), ("columns", ", ".join(reads)), ("code", entry.target)]
    found += [("alias of", entry.alias_of)] if entry.alias_of else []
    found += [(MARKS[mark], str(value)) for mark, value in entry.marks.items() if mark in MARKS]
    if options_key is not None:
        for name, value in entry.options.items():
            takes = entry.takes.get(name)
            is_limited = get_origin(takes) is Literal or any(bounds_of(takes))
            found.append((f"{options_key}.{name}", default(value) + (f" ({words(takes)})" if is_limited else "")))
    found.append(("elsewhere", elsewhere(entry)))
    return [(title, text) for title, text in found if text]


def elsewhere(entry: Entry) -> str:
    """What other frameworks mean by the name, or call what it is; nothing of what is not the mathematics'."""
    if entry.kind == WRAPPERS.kind:
        return f"wrap_method={entry.name} of a fork of verl, without its faults (`whet algorithms show cpo`)"
    known = _texts()["elsewhere"].get(entry.kind, {})
    return known.get(entry.name) or known.get(entry.alias_of or "", "")


def notation(kind: str) -> str:
    """The symbols in which formulas of a kind are written; nothing of a kind without formulas."""
    return _texts()["notation"].get(kind, "")


@cache
def _texts() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(
        resources.files("whet.algorithms").joinpath("names.yaml").read_text(encoding="utf-8")
    )
    return found


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
