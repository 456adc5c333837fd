# SPDX-License-Identifier: Apache-2.0
"""The site builds: every page is in the navigation, every link and anchor leads somewhere, nothing comes from afar."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT


@pytest.mark.slow
def test_the_site_builds_and_fetches_nothing_from_elsewhere(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    pages = sorted(tmp_path.rglob("*.html"))
    written = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    assert {page.relative_to(tmp_path) for page in pages} == {*written, Path("404.html")}
    fetched = [
        (page.name, tag)
        for page in pages
        for tag in re.findall(r"<(?:script|link|img|iframe)[^>]*>", page.read_text())
        if re.search(r"(?:src|href)=\"?(?:https?:)?//", tag) and "canonical" not in tag
    ]
    assert not fetched
