# SPDX-License-Identifier: Apache-2.0
"""The picture of docs/architecture.md: the parts of whet in their layers, and the imports between them."""

from __future__ import annotations

import ast
import html
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "whet"
PAGE = PACKAGE.parent / "docs" / "architecture.md"
WIDTH, ROW, BOX, GAP = 1200, 120, 44, 14  # pixels


def layers(text: str) -> list[list[str]]:
    """The parts of each layer, the lowest first, as the page `text` lists them."""
    [block] = re.findall(r"```text\n(6 .*?)```", text, re.DOTALL)
    return [line.split()[1:] for line in reversed(block.strip().splitlines())]


def limit(what: str, text: str) -> int:
    """The value of a limit in the table of the page `text`."""
    [number] = re.findall(rf"^\| {re.escape(what)} \| ([\d,]+) \|$", text, re.MULTILINE)
    return int(number.replace(",", ""))


def imports(package: Path = PACKAGE) -> dict[str, tuple[int, set[str]]]:
    """Lines of each part of the package, and the parts that it imports."""
    found: dict[str, tuple[int, set[str]]] = {}
    for file in sorted(package.rglob("*.py")):
        part, text = Path(file.relative_to(package).parts[0]).stem, file.read_text(encoding="utf-8")
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.module]
        modules = [str(node.module).split(".") for node in nodes]
        targets = {module[1] for module in modules if module[0] == "whet" and len(module) > 1}
        targets |= {alias.name for node in nodes if node.module == "whet" for alias in node.names}
        lines, before = found.get(part, (0, set()))
        found[part] = lines + text.count("\n"), before | targets
    return {part: (lines, (targets & found.keys()) - {part}) for part, (lines, targets) in found.items()}


def picture(text: str) -> str:
    """The picture as SVG."""
    found = imports()
    rows = [[part for part in layer if part in found] for layer in layers(text)]
    places = {part: place for number, row in enumerate(rows) for part, place in _places(row, found, len(rows) - number)}
    level = {part: number for number, row in enumerate(rows) for part in row}
    shapes = []
    for part in places:
        for target in sorted(found[part][1]):
            shapes.append(_line(places[part], places[target], is_sideways=level[part] == level[target]))
    for part, (x, y, width) in places.items():
        lines, targets = found[part]
        title = f"{part}: {lines:,} lines; imports {', '.join(sorted(targets)) or 'nothing'}"
        name = f'<text x="{x + width / 2:.0f}" y="{y + BOX / 2 + 4:.0f}">{html.escape(part)}</text>'
        rectangle = f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{BOX}" rx="5"/>'
        shapes.append(f"<g><title>{html.escape(title)}</title>{rectangle}{name}</g>")
    height = ROW * len(rows) + GAP
    style = (
        "rect{fill:#eceff1;stroke:#546e7a}text{font:13px sans-serif;text-anchor:middle;fill:#263238}"
        "path{fill:none;stroke:#90a4ae;stroke-opacity:.45}path.side{stroke:#ff7043;stroke-opacity:.9}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">'
    return "\n".join([head, f"<style>{style}</style>", *shapes, "</svg>\n"])


def _places(row: list[str], found: dict[str, tuple[int, set[str]]], level: int) -> list[tuple[str, tuple[float, ...]]]:
    """Left edge, top and width of each part of a layer: as wide as its name needs, the rest shared out by lines."""
    needed = [9.0 * len(part) + 16 for part in row]
    left = WIDTH - 2 * GAP - GAP * (len(row) - 1) - sum(needed)
    total, x, places = sum(found[part][0] for part in row), float(GAP), []
    for part, least in zip(row, needed, strict=True):
        width = least + left * found[part][0] / total
        places.append((part, (x, (level - 1) * ROW + GAP, width)))
        x += width + GAP
    return places


def _line(start: tuple[float, ...], end: tuple[float, ...], *, is_sideways: bool) -> str:
    x, y, width = start
    to_x, to_y, to_width = end
    x, to_x = x + width / 2, to_x + to_width / 2
    if is_sideways:
        low = y + BOX + 12 + abs(to_x - x) / 30
        return (
            f'<path class="side" d="M{x:.0f} {y + BOX}C{x:.0f} {low:.0f} {to_x:.0f} {low:.0f} {to_x:.0f} {y + BOX}"/>'
        )
    middle = (y + BOX + to_y) / 2
    return f'<path d="M{x:.0f} {y + BOX}C{x:.0f} {middle:.0f} {to_x:.0f} {middle:.0f} {to_x:.0f} {to_y:.0f}"/>'
