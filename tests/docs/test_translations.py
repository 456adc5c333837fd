# SPDX-License-Identifier: Apache-2.0
"""Translations were compared with their sources after the last change, and have the same blocks, outline and links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.generate import translated
from tests.docs.pages import ROOT, blocks

TRANSLATED = sorted((ROOT / "docs" / "zh").glob("*.md"))
SOURCE = """# Title
## One
text
```bash
# One more comment
```
### Inner
text
## Two
"""


@pytest.mark.parametrize("page", TRANSLATED, ids=lambda page: page.stem)
def test_a_translation_was_compared_with_its_present_source(page: Path) -> None:
    assert translated.first_line(page)["digest"] == translated.digest(translated.source(page)), (
        f"docs/{page.name} has changed since docs/zh/{page.name} was translated: read `git log -p docs/{page.name}`, "
        f"bring docs/zh/{page.name} up to date, then run `python -m docs.generate.translated {page.stem}`"
    )


@pytest.mark.parametrize("page", TRANSLATED, ids=lambda page: page.stem)
def test_a_translation_has_the_blocks_of_its_source(page: Path) -> None:
    own, others = (
        [(b.language, b.title, b.kind, b.code) for b in blocks(page, text)] for text in (None, translated.source(page))
    )
    assert own == others


@pytest.mark.parametrize("page", TRANSLATED, ids=lambda page: page.stem)
def test_a_translation_has_the_outline_of_its_source(page: Path) -> None:
    own, others = (outline(text) for text in (page.read_text(), translated.source(page)))
    assert own == others


@pytest.mark.parametrize("page", TRANSLATED, ids=lambda page: page.stem)
def test_a_translation_links_to_the_pages_of_its_source_in_chinese_where_there_are_any(page: Path) -> None:
    own, others = (set(links(text)) for text in (page.read_text(), translated.source(page)))
    assert {link.removeprefix("../").replace(f"{page.name}#", "#") for link in own} - {page.name} == others
    chinese = {each.name for each in TRANSLATED}
    assert not [link for link in own if link.removeprefix("../") in chinese - {page.name} and link.startswith("../")]


def test_a_section_is_left_out_with_its_subsections() -> None:
    assert translated.without(SOURCE, ["One"]) == "# Title\n## Two\n"
    assert translated.without(SOURCE, ["Inner"]) == SOURCE.replace("### Inner\ntext\n", "")
    with pytest.raises(ValueError, match="no section is called One more comment"):
        translated.without(SOURCE, ["One more comment"])


def test_only_what_is_translated_changes_the_digest_and_only_a_command_renews_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translated, "DOCS", tmp_path)
    page = tmp_path / "zh" / "page.md"
    page.parent.mkdir()
    page.write_text("<!-- source 000000000000, without: One -->\n# 标题\n", encoding="utf-8")
    (tmp_path / "page.md").write_text(SOURCE, encoding="utf-8")
    translated.main(["page"])
    # printf '# Title\n## Two\n' | sha256sum
    assert page.read_text(encoding="utf-8") == "<!-- source 44f44bef9cc8, without: One -->\n# 标题\n"
    (tmp_path / "page.md").write_text(SOURCE.replace("comment", "remark"), encoding="utf-8")
    assert translated.first_line(page)["digest"] == translated.digest(translated.source(page))
    (tmp_path / "page.md").write_text(SOURCE.replace("Two", "2"), encoding="utf-8")
    assert translated.first_line(page)["digest"] != translated.digest(translated.source(page))


def outline(text: str) -> list[int]:
    """The levels of the headings, in order."""
    return [len(marks) for marks in re.findall(r"^(#+) ", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M)]


def links(text: str) -> list[str]:
    """The targets of links and images outside of blocks."""
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
