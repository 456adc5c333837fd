# SPDX-License-Identifier: Apache-2.0
"""A page as text: the visible strings in the order of the document, its elements numbered.

    Instruction:
    Find me ...
    [0 field: words] lamp
    [1 button] Search

Kinds are link, button, field, choice (a list), radio, checkbox; the chosen ones have a `*`. Frames are not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Returns {text: lines, elements: the numbered elements, names: their kinds and names}; changes nothing in the page.
READ = """() => {
  const SKIPPED = new Set(['SCRIPT', 'STYLE', 'NOSCRIPT', 'TEMPLATE', 'HEAD', 'IFRAME', 'SVG']);
  const NUMBERED = 'a[href],button,input:not([type=hidden]),select,textarea,summary,[onclick],[contenteditable=true],' +
    ['button', 'link', 'radio', 'checkbox', 'tab', 'menuitem', 'option'].map(each => `[role=${each}]`).join(',');
  const found = {lines: [], elements: [], names: []};
  const tidy = text => (text || '').replace(/\\s+/g, ' ').trim();
  const labelled = each => tidy(each.getAttribute('aria-label') || (each.labels && each.labels[0] &&
    each.labels[0].innerText) || each.getAttribute('placeholder') || each.getAttribute('title') || each.name);
  const kindOf = each => {
    const role = each.getAttribute('role'), type = (each.type || '').toLowerCase();
    if (role === 'radio' || role === 'checkbox') return role;
    if (each.tagName === 'A' || role === 'link') return 'link';
    if (each.tagName === 'SELECT') return 'choice';
    if (each.tagName === 'TEXTAREA' || each.isContentEditable) return 'field';
    if (each.tagName !== 'INPUT') return 'button';
    if (type === 'radio' || type === 'checkbox') return type;
    return ['button', 'submit', 'reset', 'image', 'file'].includes(type) ? 'button' : 'field';
  };
  const number = each => {
    const kind = kindOf(each), isInput = ['INPUT', 'SELECT', 'TEXTAREA'].includes(each.tagName);
    const isValue = kind === 'field' || kind === 'choice';
    const own = isInput ? '' : tidy(each.innerText);
    const image = each.querySelector('img'), face = isInput && kind === 'button' ? each.value : '';
    const name = isValue ? labelled(each) : own || tidy(face) || labelled(each) || tidy(image && image.alt);
    const chosen = each.checked === true || each.getAttribute('aria-checked') === 'true' ? '*' : '';
    let value = name + chosen, head = kind;
    if (isValue) {
      head = name ? `${kind}: ${name}` : kind;
      value = kind === 'choice' ? [...each.options].map(o => tidy(o.text) + (o.selected ? '*' : '')).join(' | ')
        : tidy(each.value === undefined ? each.innerText : each.type === 'password' ? '' : each.value);
    }
    found.lines.push(`[${found.elements.length} ${head}] ${value}`.trim());
    found.elements.push(each);
    found.names.push([kind, name.toLowerCase()]);
  };
  const walk = node => {
    if (node.nodeType === Node.TEXT_NODE) {
      const text = tidy(node.textContent);
      if (text) found.lines.push(text);
    } else if (node.nodeType === Node.ELEMENT_NODE && !SKIPPED.has(node.tagName.toUpperCase())) {
      const isBoxless = getComputedStyle(node).display === 'contents';
      if (!isBoxless && !node.checkVisibility({visibilityProperty: true, opacityProperty: true})) return;
      if (node.matches(NUMBERED)) number(node);
      else for (const child of (node.shadowRoot || node).childNodes) walk(child);
    }
  };
  if (document.body) walk(document.body);
  return found;
}"""
# Whether an element can be used: it is there and enabled, nothing covers it, and it has the choice, if one is given.
CAN_USE = """(each, choice) => {
  if (!each.isConnected || each.matches(':disabled,[aria-disabled=true],[readonly]')) return false;
  if (choice !== null && ![...each.options].some(option => option.label === choice && !option.disabled)) return false;
  each.scrollIntoView({behavior: 'instant', block: 'center', inline: 'center'});
  const box = each.getClientRects()[0];
  const at = box && each.getRootNode().elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
  return Boolean(at) && (each.contains(at) || at.contains(each) && at.tagName === 'LABEL');
}"""
TELL = "found => ({lines: found.lines, names: found.names})"


@dataclass(frozen=True)
class Seen:
    """A page that was read: its text, the kind and the name of each numbered element, and a handle of them."""

    text: str
    names: tuple[tuple[str, str], ...]
    handle: Any  # playwright's JSHandle

    def number_of(self, name: str) -> int | None:
        """The number of the first element with a name, in any case."""
        wanted = name.lower()
        return next((number for number, (_, own) in enumerate(self.names) if own == wanted), None)

    async def element(self, number: int) -> Any:
        """A numbered element."""
        found = await self.handle.evaluate_handle("(found, number) => found.elements[number]", number)
        return found.as_element()

    def first_field(self) -> int | None:
        """The number of the first field."""
        return next((number for number, (kind, _) in enumerate(self.names) if kind == "field"), None)


async def read_page(page: Any, max_characters: int) -> Seen:
    """Reads a page of playwright; a longer text is cut, with a note."""
    handle = await page.evaluate_handle(READ)
    found = await handle.evaluate(TELL)
    text = "\n".join(found["lines"])
    if len(text) > max_characters:
        text = f"{text[:max_characters]}\n({len(text) - max_characters} more characters)"
    return Seen(text, tuple((kind, name) for kind, name in found["names"]), handle)
