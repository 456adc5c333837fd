# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks`: measures, keeps the numbers in benchmarks/results.json, writes docs/benchmarks.md."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import games, recipes, same_bits, same_speed, three_domains, trl_environment, verl_environment, view
from benchmarks.competitor import ROOT
from benchmarks.machine import OthersClock, provenance
from benchmarks.page import BENCHMARKS, page
from benchmarks.setting import FULL, QUICK, Scale, Setting
from benchmarks.workload import make_workload

log = logging.getLogger("benchmarks")
RESULTS = ROOT / "benchmarks" / "results.json"
PAGE = ROOT / "docs" / "benchmarks.md"
TRL = {"grpo_step", "images", "quickstart_race", "preference"}  # those in which it takes part
COMPARISONS = {"same_bits": same_bits.main, "same_speed": same_speed.main}


def main(words: Sequence[str] | None = None) -> None:
    """Runs the benchmarks that the command line names, or the comparison of two commits."""
    words = sys.argv[1:] if words is None else words
    if words and words[0] in COMPARISONS:
        sys.exit(COMPARISONS[words[0]](words[1:]))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=f"Two commits against each other: python -m benchmarks {' or '.join(COMPARISONS)} --help",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(BENCHMARKS)}; none: all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that all works; writes no file")
    parser.add_argument("--page", action="store_true", help="measures nothing, writes the page from the kept numbers")
    chosen = parser.parse_args(words)
    unknown = [name for name in chosen.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    if chosen.quick:
        results: dict[str, Any] = {}
        measure(
            results, ["machine", *chosen.names] if chosen.names else list(BENCHMARKS), QUICK, trl_environment.find()
        )
        print(page(results))
        return
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not chosen.page:
        names = chosen.names or list(BENCHMARKS)
        names = names if "machine" in names or "machine" in results else ["machine", *names]
        needs_trl = not TRL.isdisjoint(names)
        measure(results, names, FULL, trl_environment.find_or_make() if needs_trl else trl_environment.find())
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(results), encoding="utf-8")
    if "recipes" in results:
        recipes.draw(results, PAGE.parent / "recipes.png")
    if results.get("three_domains"):
        three_domains.draw(results, PAGE.parent / "three_domains.png")
    if results.get("games"):
        games.draw(results, PAGE.parent / "games.png")
    if "view" in (chosen.names or BENCHMARKS) and not chosen.page:
        sys.exit(late(results))


def late(results: Mapping[str, Any]) -> str | None:
    """The error of an exceeded bound of benchmarks/view.py."""
    names = view.over_bound(results) if "view" in results else []
    return f"view: answers took more than {view.BOUND_SECONDS:.0f} s: {', '.join(names)}" if names else None


def measure(results: dict[str, Any], names: Sequence[str], scale: Scale, trl_python: Path | None) -> None:
    """Puts the numbers of each benchmark into `results`, and at full size into the file, as soon as they are there."""
    if trl_python is None:
        log.warning("TRL takes no part: .venv-trl is not there (`make bench` makes it), nor is WHET_TRL_VENV set")
    verl_python = verl_environment.find()
    if verl_python is None:
        log.warning("verl takes no part: .venv-peers is not there (`make peers` makes it), nor is WHET_PEERS_VENV set")
    with tempfile.TemporaryDirectory(prefix="whet-bench-") as folder:
        scratch = Path(folder)
        workload = make_workload(
            scratch, size=scale.size, num_layers=scale.num_layers, vocab_size=512, prompts=scale.prompts
        )
        setting = Setting(scale, workload, scratch, trl_python, verl_python)
        for name in names:
            log.info("%s", BENCHMARKS[name].TITLE)
            origin, others = provenance(), OthersClock()
            results[name] = BENCHMARKS[name].run(setting)
            results.setdefault("provenance", {})[name] = {**origin, "others": others.share()}
            if scale is FULL:
                RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
