// SPDX-License-Identifier: Apache-2.0
// The list of trajectories, and the one that is chosen: its tokens, turns and images.

import { fill, get, h, number, select, store, VirtualList } from "./dom.js";
import { TokenView } from "./tokens.js";

const PAGE = 100, ROW = 62;
const KINDS = { step: "training", validation: "validation", dropped: "filtered out" };
const SHOW = { all: "all", right: "right", wrong: "wrong", failed: "failed", truncated: "cut off" };
const SORT = { file: "in order", best: "best first", worst: "worst first", longest: "longest first", turns: "most turns first", unlikely: "least likely first" };

export class TrajectoriesTab {
  constructor(app) {
    this.app = app;
    this.pages = new Map();
    this.view = store.get("view", "tokens");
    this.tokens = new TokenView(() => this.drawDetail());
    this.list = new VirtualList(ROW, (place) => this.row(place), (first, last) => this.load(first, last));
    this.place = 0;
  }

  show(main) {
    this.bar = h("div", { class: "bar" });
    this.count = h("div", { class: "count dim", role: "status" });
    this.detail = h("section", { class: "detail" });
    main.replaceChildren(h("div", { class: "columns trajectories" }, h("section", { class: "left" }, this.bar, this.count, this.list.element), this.detail));
    this.key = null;
    return this.refresh();
  }

  steps() {
    return this.app.run().files[this.app.at.kind ?? "step"] ?? [];
  }

  // Draws the bar anew, and the list where what it shows is another one; `at.line` chooses a trajectory.
  async refresh(isPoll) {
    const at = this.app.at, run = this.app.run();
    const kinds = Object.keys(KINDS).filter((kind) => run.files[kind].length);
    if (!kinds.length) return this.detail.replaceChildren(h("p", { class: "empty" }, "This run has written no trajectories yet: trainer.log_rollouts sets how often it does."));
    at.kind = kinds.includes(at.kind) ? at.kind : kinds[0];
    const steps = this.steps();
    if (at.step === undefined || at.step === null) at.step = steps.at(-1);
    else if (at.step !== "all" && !steps.includes(at.step)) at.step = nearest(steps, at.step);
    if (!isPoll || !this.bar.contains(document.activeElement)) this.drawBar(kinds, steps);
    const key = JSON.stringify([run.id, at.kind, at.step, at.show, at.sort, at.text]);
    if (key !== this.key || at.step === "all") {
      const isNew = key !== this.key;
      this.key = key;
      if (isNew) { this.pages.clear(); this.list.element.scrollTop = 0; this.place = 0; }
      await this.fetchPage(0);
      if (!isNew) return;
      if (at.step !== "all" && at.line !== null && at.line !== undefined) await this.find(at.line);
      await this.choose(this.place, false);
    }
  }

  drawBar(kinds, steps) {
    const at = this.app.at, go = (change) => this.app.go({ ...change, line: null });
    const options = [["all", "all steps"], ...steps.map((step) => [step, `step ${step}`])];
    this.bar.replaceChildren(
      select(at.kind, kinds.map((kind) => [kind, KINDS[kind]]), (kind) => go({ kind }), { "aria-label": "kind", id: "kind" }),
      h("span", { class: "stepper" }, h("button", { title: "step before (←)", onclick: () => this.move(-1) }, "‹"),
        select(at.step, options, (value) => go({ step: value === "all" ? "all" : +value }), { "aria-label": "step", id: "step" }),
        h("button", { title: "next step (→)", onclick: () => this.move(1) }, "›")),
      select(at.show ?? "all", Object.entries(SHOW), (show) => go({ show }), { "aria-label": "show", id: "show" }),
      select(at.sort ?? "file", Object.entries(SORT), (sort) => go({ sort }), { "aria-label": "order", id: "sort" }),
      h("input", { type: "search", id: "search", placeholder: "find text  ( / )", value: at.text ?? "", "aria-label": "find text",
        onchange: (event) => go({ text: event.target.value || null }) }));
  }

  async fetchPage(page) {
    const { at } = this.app, key = this.key;
    this.pages.set(page, this.pages.get(page) ?? null);
    const found = await get("trajectories", { run: at.run, kind: at.kind, step: at.step === "all" ? "" : at.step, show: at.show, sort: at.sort, text: at.text, offset: page * PAGE, limit: PAGE });
    if (key !== this.key) return;
    if (found.total !== this.list.total) this.pages.clear();
    this.pages.set(page, found.rows);
    this.list.total = found.total;
    const reading = found.read < found.files ? ` · reading ${found.read} of ${found.files} files` : "";
    this.count.textContent = `${found.total.toLocaleString("en")} ${found.total === 1 ? "trajectory" : "trajectories"}${reading}`;
    this.list.draw();
    if (reading) setTimeout(() => key === this.key && this.fetchPage(page), 50);
  }

  load(first, last) {
    for (let page = Math.floor(first / PAGE); page * PAGE < last; page++) if (!this.pages.has(page)) this.fetchPage(page);
  }

  at(place) {
    return this.pages.get(Math.floor(place / PAGE))?.[place % PAGE];
  }

  // Goes to a line of the step: its place in the file, or where the list has another order, in the first thousands.
  async find(line) {
    const likely = Math.floor(line / PAGE), first = [...Array(20).keys()].filter((page) => page * PAGE < this.list.total);
    for (const page of [likely, ...first]) {
      if (!this.pages.get(page)) await this.fetchPage(page);
      const place = this.pages.get(page)?.findIndex((row) => row.line === line) ?? -1;
      if (place >= 0) return void (this.place = page * PAGE + place);
    }
  }

  row(place) {
    const row = this.at(place);
    if (!row) return h("div", { class: "row" }, h("span", { class: "dim" }, "…"));
    const element = h("div", { class: "row", role: "option", "aria-selected": place === this.place ? "true" : "false", onclick: () => this.choose(place) },
      badge(row), h("div", { class: "texts" },
        h("div", {}, h("span", { class: "prompt" }, row.has_media ? "▣ " : "", flat(row.prompt))),
        h("div", { class: row.failed ? "bad" : "" }, flat(row.response) || h("span", { class: "dim" }, "nothing"))),
      h("div", { class: "facts dim" }, this.app.at.step === "all" && h("div", {}, `step ${row.step}`), h("div", {}, `${row.tokens} tok`), row.turns > 1 && h("div", {}, `${row.turns} turns`), row.agents.length > 0 && h("div", { class: "agents", title: row.agents.join(", ") }, row.agents.join(", "))));
    const before = place > 0 ? this.at(place - 1) : null;
    if (before && before.group !== row.group && (this.app.at.sort ?? "file") === "file") element.classList.add("first");
    return element;
  }

  async choose(place, remember = true) {
    this.place = Math.max(0, Math.min(place, this.list.total - 1));
    if (!this.at(this.place) && this.list.total) await this.fetchPage(Math.floor(this.place / PAGE));
    this.list.show(this.place);
    const row = this.at(this.place);
    if (!row) return this.detail.replaceChildren(h("p", { class: "empty" }, "No trajectory is like that."));
    if (remember && this.app.at.step !== "all") this.app.note({ line: row.line });
    await this.open(row.kind, row.step, row.line);
  }

  async open(kind, step, line) {
    const wanted = (this.wanted = `${this.app.at.run} ${kind} ${step} ${line}`);
    const asked = { run: this.app.at.run, kind, step, line }, other = this.others().find((run) => run.id === this.app.at.beside)?.id;
    const [found, beside] = await Promise.all([get("trajectory", asked), other !== undefined && get("beside", { ...asked, other })]);
    if (this.wanted !== wanted) return;
    this.opened = { kind, step, line, ...found, other, beside };
    this.detail.scrollTop = 0;
    this.drawDetail();
  }

  others() {
    return this.app.runs.filter((run) => run.id !== this.app.at.run && run.files[this.app.at.kind ?? "step"].length);
  }

  // The trajectory of another run with the same prompt and step.
  besideView(view) {
    const { beside, other } = this.opened;
    if (!beside) return h("p", { class: "empty" }, `${other} has no trajectory of this prompt in this step.`);
    return [h("div", { class: "title" }, badge({ ...beside.record, failed: Boolean(beside.record.failure) }), h("h3", {}, beside.record.uid), h("span", { class: "dim" }, other)),
      facts(beside.record), this.media(beside.record.media ?? [], other), this.body(beside, view, other)];
  }

  body({ record, tokens }, view, run) {
    if (view === "raw") return h("pre", { class: "raw" }, JSON.stringify(record, null, 1));
    return view === "tokens" && tokens.length ? [prompt(record), this.tokens.element(tokens, record)] : this.turns(record, run);
  }

  drawDetail() {
    if (!this.opened) return;
    const { record, group, step, kind, line, tokens, other } = this.opened;
    const views = { tokens: tokens.length ? "Tokens" : null, turns: "Turns", raw: "Record" };
    const view = views[this.view] ? this.view : "turns";
    const choose = (name) => { store.set("view", (this.view = name)); this.drawDetail(); };
    const tabs = Object.entries(views).filter(([, name]) => name).map(([key, name]) =>
      h("button", { role: "tab", "aria-selected": key === view ? "true" : "false", onclick: () => choose(key) }, name));
    const members = group.map((each, at) => h("button", { class: `chip ${tone(each)}`, title: `trajectory ${at + 1} of the group`, "aria-current": each.line === line ? "true" : "false",
      onclick: () => this.member(each.line) }, each.failed ? "✕" : number(each.reward)));
    const setBeside = (run) => { this.app.note({ beside: run || null }); this.open(kind, step, line); };
    const chooser = this.others().length > 0 && select(other ?? "", [["", "no other run"], ...this.others().map((run) => [run.id, run.name])], setBeside, { "aria-label": "beside", id: "beside" });
    const body = this.body(this.opened, view, this.app.at.run);
    fill(this.detail,
      h("div", { class: "title" }, badge({ ...record, failed: record.failure !== null && record.failure !== undefined }), h("h3", {}, record.uid), h("span", { class: "dim" }, `${KINDS[kind]}, step ${step}`), chooser),
      group.length > 1 && h("div", { class: "group" }, h("span", { class: "dim" }, `group of ${group.length}`), members),
      facts(record), record.dropped_by && h("p", { class: "note" }, `Filtered out by ${record.dropped_by}.`),
      record.failure && h("pre", { class: "failure" }, `${record.failure.source}: ${record.failure.message}`),
      this.media(record.media ?? [], this.app.at.run), h("div", { class: "views", role: "tablist" }, tabs, !tokens.length && h("span", { class: "dim" }, this.withoutTokens(kind, step))),
      other === undefined ? body : h("div", { class: "pair" }, h("div", {}, body), h("div", {}, this.besideView(view))));
  }

  // Why there are no tokens to show.
  withoutTokens(kind, step) {
    const steps = this.app.run().files.tokens;
    if (kind !== "step") return "tokens are kept of trained trajectories alone";
    if (!steps.length) return "no tokens: train with trainer.log_tokens=1 to see each one's log-prob and advantage";
    return steps.includes(step) ? "no tokens of this trajectory" : `no tokens of this step; of others, such as ${nearest(steps, step)}`;
  }

  turns(record, run) {
    if (!record.steps?.length) return [prompt(record), block("policy", "response", record.response)];
    const pictures = (record.media ?? []).slice();
    const count = record.steps.flatMap((step) => step.observation ?? []).flatMap((message) => (Array.isArray(message.content) ? message.content : [])).filter((part) => part.type !== "text").length;
    pictures.splice(0, pictures.length - count);
    const read = (messages) => (messages ?? []).map((message) => block(message.role === "tool" ? "tool" : "environment", [message.role, message.name].filter(Boolean).join(" "), content(message.content, (part) => this.media(pictures.splice(0, 1), run))));
    return [prompt(record), record.steps.map((step, at) => [
      read(step.observation),
      block("policy", [`turn ${at + 1}`, step.agent, step.player].filter(Boolean).join(" · "), step.action, step.reward ? `reward ${number(step.reward)}` : ""),
      read(step.end)])];
  }

  media(all, run) {
    const source = (name) => `/media/${encodeURIComponent(encodeURIComponent(run).replaceAll(".", "%2E"))}/${name}`;
    const missing = (event) => event.target.replaceWith(h("span", { class: "missing" }, "not in the run's media/"));
    const image = (name) => h("img", { src: source(name), loading: "lazy", alt: "image that the model read", onerror: missing });
    const shown = all.map((each) => {
      if (Array.isArray(each.source)) return each.source.map((path) => image(String(path).split("/").pop().split(".")[0]));
      return each.kind === "video" ? h("video", { src: source(each.digest), controls: true, onerror: missing }) : image(each.digest);
    });
    return all.length > 0 && h("div", { class: "media" }, shown);
  }

  async member(line) {
    const { kind, step } = this.opened;
    for (const [page, rows] of this.pages) {
      const place = rows?.findIndex((row) => row.line === line && row.step === step) ?? -1;
      if (place >= 0) return this.choose(page * PAGE + place);
    }
    await this.open(kind, step, line);
  }

  move(by) {
    const steps = this.steps(), at = steps.indexOf(this.app.at.step);
    const next = at < 0 ? steps.at(by < 0 ? -1 : 0) : steps[at + by];
    if (next !== undefined) this.app.go({ step: next, line: null });
  }

  press(key) {
    const { group, line } = this.opened ?? { group: [] };
    const among = group.findIndex((each) => each.line === line);
    const keys = {
      ArrowLeft: () => this.move(-1), ArrowRight: () => this.move(1),
      ArrowDown: () => this.choose(this.place + 1), ArrowUp: () => this.choose(this.place - 1), j: () => this.choose(this.place + 1), k: () => this.choose(this.place - 1),
      PageDown: () => this.choose(this.place + 10), PageUp: () => this.choose(this.place - 10),
      "]": () => group[among + 1] && this.member(group[among + 1].line), "[": () => group[among - 1] && this.member(group[among - 1].line),
      c: () => this.tokens.cycle(), v: () => this.cycleView(),
    };
    return keys[key];
  }

  cycleView() {
    const views = ["tokens", "turns", "raw"];
    store.set("view", (this.view = views[(views.indexOf(this.view) + 1) % views.length]));
    this.drawDetail();
  }
}

const nearest = (steps, step) => steps.reduce((best, each) => (Math.abs(each - step) < Math.abs(best - step) ? each : best), steps[0]);
const flat = (text) => text.replaceAll(/(<\|[^|>]*\|>)\1+/g, "$1…").replaceAll("\n", " ⏎ ");
const tone = (row) => (row.failed ? "failed" : (row.accuracy ?? row.reward ?? 0) > 0 ? "right" : "wrong");
const badge = (row) => h("span", { class: `badge ${tone(row)}` }, row.failed ? "✕" : number(row.reward));
const prompt = (record) => block("prompt", "prompt", collapsed(record.prompt ?? ""));
const collapsed = (text) => text.replaceAll(/(<\|[^|>]*\|>)\1+/g, (all, one) => `${one}×${all.length / one.length} `);

function block(who, title, text, note = "") {
  return h("article", { class: `block ${who}` }, h("header", {}, title, note && h("span", { class: "dim" }, ` ${note}`)), h("div", { class: "text" }, text ?? ""));
}

function content(parts, picture) {
  if (!Array.isArray(parts)) return String(parts ?? "");
  return parts.map((part) => (part.type === "text" ? part.text : picture(part)));
}

function facts(record) {
  const known = { answer: record.ground_truth, extracted: record.extracted, accuracy: record.accuracy, tokens: record.tokens, turns: record.turns > 1 ? record.turns : null, agents: agents(record),
    ended: record.limit ?? record.finish_reason, "mean log-prob": record.mean_log_prob, "policy version": (record.policy_versions && versions(record.policy_versions)) ?? record.policy_version, data: record.data_source };
  const shown = { ...known, ...record.parts };
  const text = (value) => (typeof value === "number" ? number(value) : typeof value === "object" ? JSON.stringify(value) : String(value));
  return h("dl", {}, Object.entries(shown).filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, text(value)))));
}

// The names of sub-agents and players that took turns; null where there is one conversation alone.
function agents(record) {
  const names = new Set((record.steps ?? []).flatMap((step) => [step.agent, step.player]).filter(Boolean));
  return names.size ? [...names].join(", ") : null;
}

const versions = (turns) => [...new Set(turns.flat().map(([version]) => version))].join(", ");
