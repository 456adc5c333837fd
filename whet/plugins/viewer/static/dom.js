// SPDX-License-Identifier: Apache-2.0
// Elements, requests and numbers. Text is only ever set as text: what models write is no markup.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  return fill(element, children);
}

export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const $ = (selector) => document.querySelector(selector);

export async function get(name, query = {}) {
  const known = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
  const response = await fetch(`/api/${name}?${new URLSearchParams(known)}`);
  if (!response.ok) throw new Error(`${name}: ${response.status} ${await response.text()}`);
  return response.json();
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return String(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : 3);
}

export const tick = (value) => (value === null ? "" : Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6 || value === 0 ? String(+value.toPrecision(6)) : value.toExponential());

export function select(value, options, change, attributes = {}) {
  const shown = options.map(([key, text]) => h("option", { value: key, selected: String(key) === String(value) }, text));
  return h("select", { ...attributes, onchange: (event) => change(event.target.value) }, shown);
}

export const store = {
  get: (name, other) => JSON.parse(localStorage.getItem(`whet.${name}`) ?? "null") ?? other,
  set: (name, value) => localStorage.setItem(`whet.${name}`, JSON.stringify(value)),
};

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// A list of which only the rows in sight are elements; `load(first, last)` may fetch what they show.
export class VirtualList {
  constructor(height, row, load) {
    [this.height, this.row, this.load, this.total] = [height, row, load, 0];
    this.inner = h("div", { class: "inner" });
    this.element = h("div", { class: "list", tabindex: 0, role: "listbox" }, this.inner);
    this.element.addEventListener("scroll", () => requestAnimationFrame(() => this.draw()));
  }

  draw() {
    const first = Math.max(0, Math.floor(this.element.scrollTop / this.height) - 5);
    const last = Math.min(this.total, first + Math.ceil((this.element.clientHeight || 600) / this.height) + 10);
    this.inner.style.height = `${this.total * this.height}px`;
    this.load(first, last);
    const rows = [];
    for (let place = first; place < last; place++) {
      const element = this.row(place);
      element.style.top = `${place * this.height}px`;
      rows.push(element);
    }
    this.inner.replaceChildren(...rows);
  }

  show(place) {
    const { scrollTop, clientHeight } = this.element;
    if (place * this.height < scrollTop) this.element.scrollTop = place * this.height;
    if ((place + 1) * this.height > scrollTop + clientHeight) this.element.scrollTop = (place + 1) * this.height - clientHeight;
    this.draw();
  }
}
