# SPDX-License-Identifier: Apache-2.0
"""The command `whet algorithms certify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from whet.cli.algorithms import console, entries_of, legend, number, print_pairs, verdict
from whet.cli.tables import table
from whet.errors import RegistryError
from whet.registry import register_command

if TYPE_CHECKING:
    from whet.plugins.proofs.certify import Certified


@register_command("algorithms certify")
def certify(
    name: Annotated[
        str | None,
        typer.Argument(help="a function or recipe, or path/file.py:function; unset: all, which takes minutes"),
    ] = None,
) -> None:
    """Compute the exact expected gradient of algorithms, and compare it with the gradient of the objective."""
    from whet.tracking.console import long_phase

    output = console()
    with long_phase("certificates"):
        found = certify_all(name)
    output.print(table(("", "", *legend()), found, left=(0, 1, 2)))
    if name is not None:
        print_pairs(output, [(kind, verdict(kind, each, cells)) for kind, each, *cells in found])
    print_pairs(output, list(legend().items()))
    output.print("How it is computed: docs/algorithms.md", style="dim")


def certify_all(name: str | None = None) -> list[list[str]]:
    """Computes all certificates, or only the ones of `name`. Returns rows of text: kind, name, numbers.  Raises:
    RegistryError."""
    from whet.config.compose import shipped_recipes
    from whet.phases import counting
    from whet.plugins.proofs.certify import rows, rows_of

    if name is None or name in shipped_recipes():
        found = [row for row in rows() if name in (None, row.name)]
    else:
        found = [row for entry in entries_of(name) for row in rows_of(entry)]
    if not found:
        expected = "a function with a part in the gradient, by its own name, or a recipe whose algorithm no other has"
        raise RegistryError(str(name), "no certificate of its own", expected, "name another, not an alias")
    return [[row.kind, row.name, *cells(row)] for row in counting(found)]


def cells(row: Certified) -> list[str]:
    """Returns the certificates of one row as text, in the order of `legend`."""
    from whet.plugins.proofs.certify import certificates

    own, stale = certificates(row)
    return [
        "yes" if row.is_exact else "",
        number(own.relative_error),
        f"{own.cosine:.3f}",
        f"{own.norm_ratio:.2f}",
        f"{own.variance:.1f}",
        "" if stale is None else number(stale.relative_error),
        "" if stale is None else f"{stale.cosine:.3f}",
        "" if stale is None or stale.kl_error is None else number(stale.kl_error),
    ]
