# SPDX-License-Identifier: Apache-2.0
"""`python -m docs.generate.translated PAGE ...` marks translations as current, after a person has compared them.

A page of docs/zh begins with the digest of its source, less the sections that it leaves out:
    <!-- source DIGEST, without: HEADING; HEADING -->
tests/docs/test_translations.py fails where the source has another digest. `python -m docs.generate` leaves
these digests alone: only a reader can tell that a translation is current."""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1]
FIRST_LINE = re.compile(r"<!-- source (?P<digest>[0-9a-f]{12})(?:, without: (?P<left_out>.+))? -->\n")
HEADING = re.compile(r"(?P<marks>#+) (?P<text>.+)")


def first_line(page: Path) -> re.Match[str]:
    """The digest of a translation's source, and the headings that it leaves out.

    Raises: ValueError where the page begins otherwise."""
    found = FIRST_LINE.match(page.read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{page} begins without its source; expected <!-- source {'0' * 12} --> as the first line")
    return found


def source(page: Path) -> str:
    """The page that `page` translates, without the sections that it leaves out."""
    left_out = first_line(page)["left_out"]
    return without((page.parents[1] / page.name).read_text(encoding="utf-8"), left_out.split("; ") if left_out else [])


def digest(text: str) -> str:
    """12 hex digits of SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def without(text: str, headings: list[str]) -> str:
    """`text` less the sections with these headings; a section ends at the next heading of its level or above.

    Raises: ValueError for a heading that is not in the text."""
    kept, missing, level, is_fenced = list[str](), set(headings), 0, False
    for line in text.splitlines(keepends=True):
        is_fenced ^= line.startswith("```")
        found = None if is_fenced else HEADING.match(line)
        if found is not None and (level == 0 or len(found["marks"]) <= level):
            level = len(found["marks"]) if found["text"] in headings else 0
            missing.discard(found["text"])
        if level == 0:
            kept.append(line)
    if missing:
        raise ValueError(f"no section is called {', '.join(sorted(missing))}; correct the translation's first line")
    return "".join(kept)


def main(names: list[str]) -> None:
    """Writes the present digest into the first line of these pages of docs/zh."""
    for name in names:
        page = DOCS / "zh" / f"{name}.md"
        found, text = first_line(page), page.read_text(encoding="utf-8")
        start, end = found.span("digest")
        page.write_text(text[:start] + digest(source(page)) + text[end:], encoding="utf-8")
        print(f"wrote {page}")


if __name__ == "__main__":
    main(sys.argv[1:])
