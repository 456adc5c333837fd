# SPDX-License-Identifier: Apache-2.0
"""Cases of the tests of vLLM, verl and mlx-lm for tool calls: a text, and the calls that the peer expects.

`source` has repository, file and commit of a case, `test` the name of the test. mlx-lm's parser takes the text between
the tags, which the cases have again. Where whet reads another call on purpose, `whet` says why: a malformed call is an
error that the model reads, so that a policy learns the format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from whet.plugins.agents.tools.parsers import parse, parts_of

LINES = (Path(__file__).parent / "peer_cases.jsonl").read_text(encoding="utf-8").splitlines()
CASES: list[dict[str, Any]] = [json.loads(line) for line in LINES]
IDS = [f"{case['source'].split()[0].split('/')[1]} {case['parser']} {case['test']}" for case in CASES]
pytestmark = pytest.mark.slow  # a part of its own


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_calls_are_those_of_the_peer(case: dict[str, Any]) -> None:
    parsed = parse(case["parser"], case["text"], case.get("schemas", {}))
    valid = [[call.name, dict(call.arguments)] for call in parsed.calls if call.error is None]
    if "whet" in case:
        assert len(valid) < len(parsed.calls) and all(call in case["calls"] for call in valid)
    else:
        assert len(valid) == len(parsed.calls) and valid == case["calls"]
    if "content" in case:
        assert parsed.content == case["content"]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_no_beginning_of_the_text_has_another_valid_call(case: dict[str, Any]) -> None:
    """As a server reads it while it is sampled: a valid call in a beginning is a call of the whole."""
    schemas, text = case.get("schemas", {}), case["text"]
    whole = [[call.name, dict(call.arguments)] for call in parse(case["parser"], text, schemas).calls if not call.error]
    for end in range(len(text)):
        parts = parts_of(case["parser"], text[:end], schemas, is_whole=False)
        found = [[part.name, dict(part.arguments)] for part in parts if not isinstance(part, str) and not part.error]
        assert found == whole[: len(found)]


def test_every_case_names_its_source_and_each_peer_is_there() -> None:
    assert all(len(case["source"].split(" @ ")[1]) == 40 for case in CASES)
    assert {case["source"].split("/")[0] for case in CASES} == {"vllm-project", "volcengine", "ml-explore"}
    assert {case["parser"] for case in CASES} == {"hermes", "llama3_json", "qwen3_coder", "gpt-oss"}
