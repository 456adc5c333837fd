# SPDX-License-Identifier: Apache-2.0
"""docs/benchmarks.md from the results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from benchmarks import (
    algorithms,
    asynchronous,
    beside,
    cold_start,
    engines,
    episodes,
    exactness,
    games,
    grpo_step,
    images,
    machine,
    math_answers,
    packing,
    pictures,
    preference,
    quickstart,
    quickstart_race,
    race,
    recipes,
    reward_load,
    rollout,
    sandbox,
    scaling,
    three_domains,
    tinker_clients,
    transport,
    tuning,
    turn_credit,
    view,
)
from benchmarks.setting import Setting


class Benchmark(Protocol):
    """A section of the page: a module that measures it and shows it."""

    TITLE: str
    NOTE: str

    def run(self, setting: Setting) -> dict[str, Any]:
        """The numbers, as JSON has them."""
        ...

    def report(self, results: Mapping[str, Any]) -> list[str]:
        """Lines of Markdown, from the numbers of all sections."""
        ...


# In the order of the page. Floors need `machine`.
BENCHMARKS: dict[str, Benchmark] = {
    "machine": machine,
    "rollout": rollout,
    "grpo_step": grpo_step,
    "images": images,
    "quickstart": quickstart,
    "beside": beside,
    "quickstart_race": quickstart_race,
    "preference": preference,
    "recipes": recipes,
    "algorithms": algorithms,
    "transport": transport,
    "packing": packing,
    "tuning": tuning,
    "exactness": exactness,
    "scaling": scaling,
    "asynchronous": asynchronous,
    "race": race,
    "engines": engines,
    "episodes": episodes,
    "cold_start": cold_start,
    "sandbox": sandbox,
    "reward_load": reward_load,
    "tinker_clients": tinker_clients,
    "three_domains": three_domains,
    "games": games,
    "turn_credit": turn_credit,
    "pictures": pictures,
    "math_answers": math_answers,
    "view": view,
}

HEAD = """\
# Benchmarks

Written by `make bench` from benchmarks/results.json. Competitors run in processes of their own that take turns on one
machine (A B C A B C ...), on all cores, after a warm-up. Times are medians; a ratio is the median over rounds of the
ratio within a round, with its range. The extra time of the first turn (compiling, caches) is shown separately.
Memory is the peak of the whole process. The model is {model}.
"""


def page(results: Mapping[str, Any]) -> str:
    """The page for all sections that there are results of."""
    shape = results["machine"]["shape"]
    model = (
        f"a random Qwen3 of {shape['num_hidden_layers']} layers, hidden {shape['hidden_size']}, intermediate "
        f"{shape['intermediate_size']}, {shape['num_attention_heads']} heads of {shape['head_dim']}, "
        f"{shape['num_key_value_heads']} KV heads, vocabulary {shape['vocab_size']}"
    )
    parts = [HEAD.format(model=model)]
    for name, benchmark in BENCHMARKS.items():
        if name in results:
            body = "\n".join(benchmark.report(results)).rstrip()
            parts.append(f"## {benchmark.TITLE}\n\n{benchmark.NOTE}\n{body}\n\n{_provenance(results, name)}\n")
    return "\n".join(parts)


def _provenance(results: Mapping[str, Any], name: str) -> str:
    of = results["provenance"][name]
    commit = f"{of['commit']}{' with changes' if of['has_changes'] else ''}" if of["commit"] else "no commit"
    facts = [of["date"], f"commit {commit}"]
    facts += [f"{of['cores']} cores of {of['cpu']}", f"{of['memory_bytes'] / 2**30:.0f} GiB", of["system"]]
    facts += [f"Python {of['python']}", _versions(of["versions"])]
    trl = next((versions for versions in versions_in(results[name]) if "trl" in versions), None)
    if trl is not None:
        facts.append(f"TRL's environment: {_versions(trl)}")
    facts.append(f"others kept the cores busy for {of['others']:.0%} of the time")
    return f"<sub>{'; '.join(facts)}</sub>"


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def versions_in(section: Any) -> list[dict[str, str]]:
    """The package versions that each competitor of a section reported."""
    if not isinstance(section, Mapping):
        return []
    own = [section["ready"]["versions"]] if "ready" in section else []
    return own + [versions for value in section.values() for versions in versions_in(value)]
