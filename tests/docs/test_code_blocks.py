# SPDX-License-Identifier: Apache-2.0
"""Every block of every page is run, checked, or says why not (tests/docs/pages.py)."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import pytest

from tests.docs.pages import LANGUAGES, PIECES, ROOT, Reader, blocks
from whet import registry
from whet.trainers.run_dir import BOUND, FREE

PAGES = sorted((ROOT / "docs").rglob("*.md"))
TRANSLATED = [page for page in PAGES if page.parent.name == "zh"]
FOLLOWED = [ROOT / "README.md", *(page for page in PAGES if page not in TRANSLATED)]
ONLY_SHOWN = {
    "train_on_aws.sh",
    "train_on_gcp.sh",
    "train.sbatch",
    "data.schema.json",
}  # for a cloud, a scheduler, an editor
LONG = {  # many commands
    *(
        "adding-a-model.md",
        "distill.md",
        "preference.md",
        "checkpoints.md",
        "config.md",
        "data.md",
        "environments.md",
        "how-one-step-works.md",
        "migrating.md",
        "planning.md",
        "plotting.md",
        "quickstart.md",
    ),
    *("rewards.md", "troubleshooting.md"),
}
SLOW = [page for page in FOLLOWED if any(block.kind == "slow" for block in blocks(page))]


def shown(page: Path) -> str:
    return str(page.relative_to(ROOT)).removeprefix("docs/")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in which a page is followed; its imports and registrations are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    for kind in registry.KINDS:
        monkeypatch.setattr(kind, "_live", dict(kind._live))
    yield tmp_path
    own = [
        name
        for name, module in sys.modules.items()
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path))
    ]
    for name in own:
        del sys.modules[name]


def follow(page: Path, folder: Path, *, slow: bool) -> None:
    reader, found = Reader(folder, slow=slow), blocks(page)
    for block, after in zip_longest(found, found[1:]):
        reader.read(block)
        if block.language == "bash" and reader.printed is not None:
            reader.check_exit(block, after)


@pytest.mark.shipped
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page.name in LONG)) for page in FOLLOWED], ids=shown
)
def test_the_blocks_of_a_page(page: Path, folder: Path) -> None:
    follow(page, folder, slow=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", SLOW, ids=shown)
def test_the_blocks_that_take_long(page: Path, folder: Path) -> None:
    follow(page, folder, slow=True)


@pytest.mark.parametrize("page", [*FOLLOWED, *TRANSLATED], ids=shown)
def test_a_file_that_a_page_shows_is_used_on_it(page: Path) -> None:
    found = blocks(page)
    for number, block in enumerate(found):
        if block.title and block.language != "text" and not block.title.startswith(PIECES):
            used = any(block.title.partition(".")[0] in after.code for after in found[number + 1 :])
            assert used or block.title in ONLY_SHOWN, f"{block.place}: {block.title} is not used below"


@pytest.mark.parametrize("page", [*FOLLOWED, *TRANSLATED], ids=shown)
def test_what_is_not_run_says_why(page: Path) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, block.place
        assert block.kind in ("", "recipe") or len(block.reason.split()) >= 3, f"{block.place}: say why"


def test_the_walk_through_the_loop_shows_all_of_it() -> None:
    """docs/how-one-step-works.md has the file from its first function to its last; a change there is made here too."""
    loop = "whet/trainers/rl.py"
    pieces = [block.code for block in blocks(ROOT / "docs" / "how-one-step-works.md") if block.title == loop]
    file = (ROOT / loop).read_text()
    wanted = file[file.index("def fit(") :].splitlines()
    said = [line for piece in pieces for line in piece.splitlines()]
    assert [line for line in said if line] == [line for line in wanted if line]


def test_what_may_change_on_resume_is_what_the_code_lets_change() -> None:
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    section = page.partition("## What may change on resume")[2].partition("Any other difference")[0]
    said = {each.removesuffix("*") for each in re.findall(r"`([\w.*]+)`", section)}
    assert said == {*FREE, *BOUND}


@pytest.mark.parametrize("page", ["index.md", "zh/index.md"])
def test_the_first_page_counts_estimators_and_losses_right(page: str) -> None:
    kinds = (registry.ADV_ESTIMATORS, registry.POLICY_LOSSES)
    counted = [str(sum(entry.alias_of is None for entry in kind)) for kind in kinds]
    said = re.findall(r"(\d+)\s+(?:advantage|policy|种)", (ROOT / "docs" / page).read_text())
    assert said == counted
