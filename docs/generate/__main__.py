# SPDX-License-Identifier: Apache-2.0
"""`python -m docs.generate [PAGE ...]` writes the pages that are made from code, all of them where none is named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from docs.generate import algorithms, bad_input, columns, config, gpu, layers, migrating, models
from whet.cli.algorithms import shipped
from whet.plugins.proofs.command import certify_all

DOCS = Path(__file__).parents[1]
PAGES: dict[str, Callable[[str], str]] = {  # from the page's present text to the new one
    "../whet/algorithms/certificates.csv": lambda _: algorithms.file(certify_all()),
    "algorithms": lambda _: algorithms.page([[*key, *numbers] for key, numbers in shipped().items()]),
    "bad_input": bad_input.page,
    "columns": columns.page,
    "config": config.page,
    "migrating": migrating.page,
    "models": models.page,
    "gpu": gpu.page,
    **{name: gpu.stated(name) for name in gpu.STATED},
    "layers.svg": lambda _: layers.picture(layers.PAGE.read_text(encoding="utf-8")),
}


def main(names: list[str]) -> None:
    """Writes the pages of these names."""
    for name in names or PAGES:
        file = DOCS / (name if "." in name else f"{name.replace('_', '-')}.md")
        file.write_text(PAGES[name](file.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"wrote {file}")


if __name__ == "__main__":
    main(sys.argv[1:])
