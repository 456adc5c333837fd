// SPDX-License-Identifier: Apache-2.0
// The page: its runs, its tabs, its keys. What is shown is in the address, so that it can be kept and sent.

import { CurvesTab, COLOURS, TimeTab } from "./charts.js";
import { $, get, h, store } from "./dom.js";
import { TrajectoriesTab } from "./trajectories.js";

const POLL_SECONDS = 2;
const ENDED = ["failed", "killed"]; // states of runs that did not end by themselves
const NAMES = { curves: "Curves", trajectories: "Trajectories", time: "Time", config: "Config" };
const KEYS = [["1 2 3 4", "curves, trajectories, time, config"], ["/", "find a metric or a text"], ["← →", "step before, next step"], ["↑ ↓  or  k j", "trajectory above, below"],
  ["[ ]", "within the group"], ["c", "colour tokens by the next column"], ["v", "tokens, turns, record"], ["t", "light or dark"], ["?", "these keys"]];

class ConfigTab {
  constructor(app) { this.app = app; }

  async show(main) {
    this.main = main;
    await this.refresh();
  }

  async refresh() {
    const { text } = await get("config", { run: this.app.run().id });
    this.main.replaceChildren(h("section", { class: "grow" }, h("pre", { class: "raw" }, text || "this run has no config.yaml")));
  }
}

class App {
  constructor() {
    this.runs = [];
    this.hidden = new Set(store.get("hidden", []));
    this.tabs = { curves: new CurvesTab(this), trajectories: new TrajectoriesTab(this), time: new TimeTab(this), config: new ConfigTab(this) };
    this.read();
  }

  read() {
    const found = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    for (const name of ["step", "line"]) if (name in found && found[name] !== "all") found[name] = Number(found[name]);
    this.at = { tab: "curves", ...found };
  }

  write(replace) {
    const kept = Object.entries(this.at).filter(([, value]) => value !== null && value !== undefined);
    history[replace ? "replaceState" : "pushState"](null, "", `#${new URLSearchParams(kept)}`);
  }

  shown() { return this.runs.filter((run) => !this.hidden.has(run.id)); }

  run() { return this.runs.find((run) => run.id === this.at.run) ?? this.runs[0]; }

  note(change) {
    Object.assign(this.at, change);
    this.write(true);
  }

  async go(change) {
    const tab = this.at.tab, run = this.at.run;
    Object.assign(this.at, change);
    this.write(false);
    await this.draw(tab !== this.at.tab || run !== this.at.run);
  }

  async draw(isNew, isPoll = false) {
    if (!this.runs.length) return; // the first poll draws
    this.drawRuns();
    const run = this.run();
    $("#ended").hidden = !ENDED.includes(run.state);
    $("#ended").textContent = [`${run.name}: ${run.state} after step ${run.step}`, run.error].filter(Boolean).join("\n");
    $("#tabs").replaceChildren(...Object.entries(NAMES).map(([key, name]) =>
      h("button", { role: "tab", "aria-selected": key === this.at.tab ? "true" : "false", onclick: () => this.go({ tab: key }) }, name)));
    const tab = this.tabs[this.at.tab] ?? this.tabs.curves;
    await (isNew ? tab.show($("#main")) : tab.refresh(isPoll));
  }

  drawRuns() {
    const toggle = (run) => (event) => {
      event.stopPropagation();
      this.hidden.has(run.id) ? this.hidden.delete(run.id) : this.hidden.add(run.id);
      store.set("hidden", [...this.hidden]);
      this.draw(false);
    };
    $("#runs").replaceChildren(...this.runs.map((run) => h("div", { class: "run", "aria-current": run.id === this.at.run ? "true" : "false", title: run.state ? `${run.name}: ${run.state}` : run.name, onclick: () => this.go({ run: run.id, line: null }) },
      h("input", { type: "checkbox", checked: !this.hidden.has(run.id), style: { accentColor: run.colour }, "aria-label": `curves of ${run.name}`, onclick: toggle(run) }),
      h("span", { class: "name" }, run.name), run.live && h("i", { class: "live", title: "this run goes on" }), ENDED.includes(run.state) && h("i", { class: "ended", title: run.error || run.state }, "✕"),
      h("span", { class: "dim num" }, run.total ? `${run.step}/${run.total}` : run.step))));
  }

  async poll() {
    const found = await get("runs");
    $("#folder").textContent = found.folder;
    found.runs.forEach((run, at) => (run.colour = COLOURS[at % COLOURS.length]));
    const before = JSON.stringify(this.runs);
    const isFirst = this.runs.length === 0;
    [this.runs, this.panels] = [found.runs, found.panels];
    if (this.run().id !== this.at.run) this.at.run = this.run().id;
    if (JSON.stringify(this.runs) !== before) await this.draw(isFirst, true);
    $("#state").textContent = this.runs.some((run) => run.live) ? "following" : "";
  }

  async follow() {
    try {
      await this.poll();
    } catch (error) {
      $("#state").textContent = error instanceof TypeError ? "the server is gone" : error.message;
    }
    setTimeout(() => this.follow(), POLL_SECONDS * 1000);
  }

  press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = ["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName) && event.target.type !== "checkbox";
    if (event.key === "Escape") { event.target.blur?.(); $("#keys").close(); return; }
    if (typing) return;
    const own = { "?": help, t: theme, "/": () => $("#search")?.focus() };
    Object.keys(NAMES).forEach((name, at) => (own[at + 1] = () => this.go({ tab: name })));
    const act = own[event.key] ?? this.tabs[this.at.tab]?.press?.(event.key);
    if (act) { event.preventDefault(); act(); }
  }
}

function help() {
  const dialog = $("#keys");
  dialog.replaceChildren(h("h3", {}, "Keys"), h("table", {}, KEYS.map(([key, text]) => h("tr", {}, h("td", {}, h("kbd", {}, key)), h("td", {}, text)))), h("form", { method: "dialog" }, h("button", {}, "close")));
  dialog.open ? dialog.close() : dialog.showModal();
}

function theme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  store.set("theme", (root.dataset.theme = isDark ? "light" : "dark"));
  app.draw(false);
}

if (store.get("theme", null)) document.documentElement.dataset.theme = store.get("theme", null);
const app = new App();
$("#help").addEventListener("click", help);
$("#theme").addEventListener("click", theme);
addEventListener("keydown", (event) => app.press(event));
addEventListener("popstate", () => { app.read(); app.at.run ??= app.runs[0]?.id; app.draw(true); });
let resized;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => app.draw(true), 200); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => app.draw(true));
app.follow();
