# SPDX-License-Identifier: Apache-2.0
"""docs/benchmarks.md is the page of the kept numbers; `python -m benchmarks --page` writes it."""

from __future__ import annotations

import json

from benchmarks.__main__ import PAGE, RESULTS
from benchmarks.page import page


def test_the_page_is_made_from_the_kept_numbers() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(json.loads(RESULTS.read_text(encoding="utf-8")))
