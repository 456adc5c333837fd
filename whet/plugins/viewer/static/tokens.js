// SPDX-License-Identifier: Apache-2.0
// A trajectory's tokens, coloured by one of their columns.

import { $, h, number, select, store } from "./dom.js";

const MARKS = ["uid", "tokens", "response_mask", "loss_mask", "turn_ids", "policy_version", "agent"];
const NAMES = { rollout_log_probs: "log-prob (sampler)", old_log_probs: "log-prob (trainer)", gap: "gap (trainer − sampler)",
  advantages: "advantage", entropy: "entropy", who: "writer", policy_version: "policy version" };
const FIRST = ["rollout_log_probs", "old_log_probs", "gap", "advantages", "entropy"];
const CATEGORIES = ["who", "policy_version"];
const HUES = ["cat0", "cat1", "cat2", "cat3", "cat4"];
const AT_ONCE = 3000; // tokens that are drawn in a frame

// The columns of a row of tokens, with the ones that follow from others.
export function columnsOf(row, record) {
  const length = row.tokens.length;
  const columns = Object.fromEntries(Object.entries(row).filter(([name, values]) => !MARKS.includes(name) && Array.isArray(values) && values.length === length));
  if (row.old_log_probs && row.rollout_log_probs) columns.gap = row.old_log_probs.map((value, at) => value - row.rollout_log_probs[at]);
  columns.who = writers(row, record);
  if (row.policy_version) columns.policy_version = row.policy_version.map((value, at) => (columns.who[at] === "policy" ? value : null));
  return columns;
}

// Who wrote each token: the policy, or the role of the message that was read before the next turn.
export function writers(row, record) {
  const turns = row.turn_ids ?? row.response_mask.map((value) => (value ? 0 : -1));
  const player = nameOf(row, record);
  const steps = (record.steps ?? []).filter((step) => !player || step.player === player);
  const found = new Array(turns.length);
  for (let at = turns.length - 1, next = null; at >= 0; at--) {
    if (turns[at] >= 0) [found[at], next] = ["policy", turns[at]];
    else found[at] = steps[next]?.observation?.at(-1)?.role === "tool" ? "tool" : "environment";
  }
  return found;
}

// The player whose turns a row holds; "" in an episode of one conversation.
const nameOf = (row, record) => row.uid.slice(record.uid.length + 1);

// The largest size of a column, its 2 % most extreme values left out; they have the full colour.
export function scale(values) {
  const sizes = values.filter((value) => typeof value === "number").map(Math.abs).sort((a, b) => a - b);
  return sizes[Math.min(sizes.length - 1, Math.floor(sizes.length * 0.98))] || 0;
}

export class TokenView {
  constructor(changed) {
    this.column = store.get("column", "rollout_log_probs");
    this.changed = changed;
  }

  names(rows, record) {
    const all = new Set(rows.flatMap((row) => Object.keys(columnsOf(row, record))));
    const known = [...FIRST, ...CATEGORIES].filter((name) => all.has(name));
    return [...known, ...[...all].filter((name) => !known.includes(name)).sort()];
  }

  cycle() {
    const names = this.known ?? [];
    if (names.length) this.choose(names[(names.indexOf(this.shown) + 1) % names.length]);
  }

  choose(name) {
    store.set("column", (this.column = name));
    this.changed();
  }

  element(rows, record) {
    this.known = this.names(rows, record);
    const name = (this.shown = this.known.includes(this.column) ? this.column : this.known[0]);
    const columns = rows.map((row) => columnsOf(row, record));
    const values = columns.flatMap((each) => each[name] ?? []);
    const isCategory = CATEGORIES.includes(name);
    const categories = isCategory ? [...new Set(values.filter((value) => value !== null))].sort() : [];
    const most = isCategory ? 0 : scale(values);
    const chooser = select(name, this.known.map((each) => [each, NAMES[each] ?? each]), (value) => this.choose(value), { "aria-label": "colour by", id: "column" });
    return h("div", { class: "tokenview" },
      h("div", { class: "bar" }, h("label", {}, "colour by ", chooser), legend(categories, most, values),
        h("span", { class: "dim read" }, "read, not written"), columns.some((_, at) => rows[at].loss_mask) && h("span", { class: "dim untrained" }, "not trained on")),
      rows.map((row, at) => {
        const box = h("div", { class: "tokens", "data-row": at });
        this.fill(box, row, columns[at], name, categories, most);
        this.hover(box, row, columns[at]);
        return [rows.length > 1 && h("h4", {}, [`row ${at + 1} of ${rows.length}`, nameOf(row, record), row.agent].filter(Boolean).join(" · ")), box];
      }));
  }

  fill(box, row, columns, name, categories, most) {
    const values = columns[name] ?? [];
    const draw = (start) => {
      const spans = [];
      let at = start;
      for (; at < row.tokens.length && spans.length < AT_ONCE; at++) {
        const first = at;
        while (/^<.+>$/.test(row.tokens[at]) && columns.who[at] !== "policy" && row.tokens[at + 1] === row.tokens[first] && columns.who[at + 1] !== "policy") at++;
        const text = row.tokens[first].replaceAll("\n", "⏎\n") + (at > first ? ` ×${at - first + 1}` : "");
        const span = h("span", { "data-at": first }, text);
        const read = columns.who[first] !== "policy";
        if (read) span.classList.add("read");
        if (!read && row.loss_mask && !row.loss_mask[first]) span.classList.add("untrained");
        if (categories.length && values[first] !== null) span.classList.add(HUES[categories.indexOf(values[first]) % HUES.length]);
        if (!categories.length && !read && most > 0) {
          span.classList.add(values[first] < 0 ? "below" : "above");
          span.style.setProperty("--strength", `${Math.round(70 * Math.min(1, Math.abs(values[first]) / most))}%`);
        }
        spans.push(span);
      }
      box.append(...spans);
      if (at < row.tokens.length) requestAnimationFrame(() => draw(at));
    };
    draw(0);
  }

  hover(box, row, columns) {
    const tip = $("#tip");
    box.addEventListener("mousemove", (event) => {
      const at = event.target.dataset?.at;
      tip.hidden = at === undefined;
      if (tip.hidden) return;
      const lines = Object.entries(columns).map(([name, values]) => h("tr", {}, h("td", {}, NAMES[name] ?? name), h("td", { class: "num" }, typeof values[at] === "number" ? number(values[at]) : values[at] ?? "–")));
      const marks = row.turn_ids?.[at] >= 0 ? ` · turn ${row.turn_ids[at] + 1}` : "";
      tip.replaceChildren(h("b", {}, JSON.stringify(row.tokens[at])), h("span", { class: "dim" }, ` token ${+at + 1} of ${row.tokens.length}${marks}`), h("table", {}, lines));
      tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
      tip.style.top = `${Math.min(event.clientY + 18, innerHeight - tip.offsetHeight - 8)}px`;
    });
    box.addEventListener("mouseleave", () => (tip.hidden = true));
  }
}

function legend(categories, most, values) {
  if (categories.length) return h("span", { class: "legend" }, categories.map((each, at) => h("span", { class: HUES[at % HUES.length] }, ` ${each} `)));
  const has = (sign) => values.some((value) => value * sign > 0);
  return h("span", { class: "legend" }, has(-1) && [h("span", { class: "num" }, number(-most)), h("i", { class: "ramp below" })],
    h("span", { class: "num" }, "0"), has(1) && [h("i", { class: "ramp above" }), h("span", { class: "num" }, number(most))]);
}
