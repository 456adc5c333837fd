// SPDX-License-Identifier: Apache-2.0
// Curves of several runs, and the time of one run's steps.

import { colour, get, h, number, store, tick } from "./dom.js";

export const COLOURS = ["#3b82f6", "#f97316", "#10b981", "#a855f7", "#ef4444", "#14b8a6", "#eab308", "#ec4899"];
const HEIGHT = 190;
const STEPS = [1, 2, 5].flatMap((one) => [...Array(9).keys()].map((power) => one * 10 ** power)).sort((a, b) => a - b); // between ticks
const SMOOTH_FROM = 30; // points, as in whet/plugins/plots/figures.py: shorter curves are drawn as they are

// The mean of each value with its neighbours on either side, as many as the `share` of the curve.
export function smooth(values, share) {
  if (values.length < SMOOTH_FROM) return values;
  const reach = Math.max(1, Math.floor(values.length * share + 1e-9));
  return values.map((_, at) => {
    const near = values.slice(Math.max(0, at - reach), at + reach + 1);
    return near.reduce((sum, value) => sum + value, 0) / near.length;
  });
}

// Columns of uPlot: one x for all curves, null where a curve has no point.
export function aligned(curves) {
  const x = [...new Set(curves.flatMap(([steps]) => steps))].sort((a, b) => a - b);
  const place = new Map(x.map((step, at) => [step, at]));
  return [x, ...curves.map(([steps, values]) => {
    const column = new Array(x.length).fill(null);
    steps.forEach((step, at) => (column[place.get(step)] = values[at]));
    return column;
  })];
}

// The ends of the y axis. A constant is in the middle; uPlot would draw it on an axis from 0 to 100 or from 0 to its double.
export function limits(low, high, logarithmic) {
  if (low === null) return [null, null];
  if (low === high) return logarithmic ? [low / 2, low * 2] : [low - (Math.abs(low) / 10 || 1), low + (Math.abs(low) / 10 || 1)];
  return logarithmic ? uPlot.rangeLog(low, high, 10, false) : uPlot.rangeNum(low, high, 0.1, true);
}

function options(width, height, series, logarithmic, hook, extra = {}) {
  const axis = { stroke: colour("dim"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  return {
    width, height, series, legend: { show: false }, padding: [8, 12, 0, 0],
    cursor: { sync: { key: "steps" }, points: { size: 7 }, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: { distr: logarithmic ? 3 : 1, range: (_, low, high) => limits(low, high, logarithmic) } },
    axes: [{ ...axis, size: 26, incrs: STEPS }, { ...axis, size: 54, values: (_, ticks) => ticks.map(tick) }],
    hooks: { setCursor: [hook] }, ...extra,
  };
}

export class CurvesTab {
  constructor(app) {
    this.app = app;
    this.chosen = store.get("metrics", null);
    this.smoothing = store.get("smoothed share", 1 / 30);
    this.logarithmic = store.get("log", false);
    this.find = "";
    this.plots = [];
  }

  names() {
    return [...new Set(this.app.shown().flatMap((run) => run.metrics))].sort();
  }

  metrics() {
    const all = this.names(), names = new Set(all);
    const main = new Set(this.app.shown().flatMap((run) => run.main));
    const found = (this.chosen ?? this.app.panels.filter((name) => main.has(name))).filter((name) => names.has(name));
    return found.length || this.chosen?.length === 0 ? found : all.slice(0, 8);
  }

  show(main) {
    const slider = h("input", { type: "range", min: 0, max: 6, step: 0.5, value: this.smoothing * 30, "aria-label": "smoothing",
      oninput: (event) => { this.smoothing = event.target.value / 30; store.set("smoothed share", this.smoothing); this.draw(); } });
    const log = h("input", { type: "checkbox", checked: this.logarithmic,
      onchange: (event) => { this.logarithmic = event.target.checked; store.set("log", this.logarithmic); this.draw(); } });
    const search = h("input", { type: "search", id: "search", placeholder: "find a metric  ( / )", "aria-label": "find a metric",
      oninput: (event) => { this.find = event.target.value; this.drawNames(); } });
    this.list = h("div", { class: "metrics" });
    this.grid = h("div", { class: "grid" });
    const bar = h("div", { class: "bar" }, h("label", {}, "smoothing ", slider), h("label", {}, log, " log scale"),
      h("span", { class: "dim" }, "drag to zoom, double-click to zoom out, click a point for its trajectories"));
    main.replaceChildren(h("div", { class: "columns" },
      h("section", { class: "picker" }, search, this.list), h("section", { class: "grow" }, bar, this.grid)));
    this.drawNames();
    return this.refresh();
  }

  drawNames() {
    const chosen = new Set(this.metrics()), areas = new Map();
    for (const name of this.names().filter((each) => each.includes(this.find))) {
      const area = name.split("/")[0];
      areas.set(area, [...(areas.get(area) ?? []), name]);
    }
    const line = (name) => h("label", { title: name }, h("input", { type: "checkbox", checked: chosen.has(name), onchange: () => this.toggle(name) }),
      h("span", {}, name.split("/").slice(1).join("/") || name));
    this.list.replaceChildren(...[...areas].map(([area, names]) =>
      h("details", { open: this.find !== "" || names.some((name) => chosen.has(name)) }, h("summary", {}, area, h("small", {}, ` ${names.length}`)), names.map(line))));
  }

  toggle(name) {
    const chosen = this.metrics();
    this.chosen = chosen.includes(name) ? chosen.filter((each) => each !== name) : [...chosen, name];
    store.set("metrics", this.chosen);
    this.drawNames();
    this.refresh();
  }

  async refresh() {
    const runs = this.app.shown(), names = this.metrics();
    this.found = await Promise.all(runs.map(async (run) => [run, names.length ? await get("curves", { run: run.id, names: names.join() }) : {}]));
    this.draw();
  }

  // Draws new numbers into the charts that are there, which keeps what is zoomed; else draws the charts anew.
  draw() {
    if (!this.found || !this.grid?.isConnected) return;
    const names = this.metrics();
    const charts = JSON.stringify([names, this.found.map(([run, curves]) => [run.id, Object.keys(curves)]), this.smoothing > 0, this.logarithmic, colour("line")]);
    if (charts === this.charts && this.grid.firstChild) return this.plots.forEach((plot) => plot.update());
    this.charts = charts;
    for (const plot of this.plots) plot.destroy();
    const cards = names.map((name) => h("figure", { "data-metric": name }, h("figcaption", {}, h("b", {}, name), h("span", { class: "values" })), h("div", {})));
    this.grid.replaceChildren(...(cards.length ? cards : [h("p", { class: "empty" }, "no metric is chosen")]));
    this.plots = names.map((name, at) => this.plot(name, cards[at]));
  }

  lines(name) {
    return this.found.filter(([, curves]) => curves[name]).flatMap(([, curves]) => {
      const [steps, values] = curves[name];
      return this.smoothing > 0 ? [[steps, values], [steps, smooth(values, this.smoothing)]] : [[steps, values]];
    });
  }

  plot(name, card) {
    const found = this.found.filter(([, curves]) => curves[name]);
    const smoothed = this.smoothing > 0;
    const lines = this.lines(name);
    const series = found.flatMap(([run, curves]) => {
      const few = curves[name][0].length < 40;
      const line = { stroke: run.colour, width: 2, spanGaps: true, points: { show: few, size: 5, fill: run.colour } };
      return smoothed ? [{ ...line, stroke: `${run.colour}44`, width: 1, points: { show: false } }, line] : [line];
    });
    const values = card.querySelector(".values");
    const shown = (place) => {
      const each = found.map(([run], at) => {
        const column = data[(smoothed ? 2 * at + 1 : at) + 1];
        let last = place ?? column.length - 1;
        while (place === null && last > 0 && column[last] === null) last--;
        return h("span", { style: { color: run.colour } }, number(column[last]));
      });
      values.replaceChildren(place === null ? "" : h("span", { class: "dim" }, `step ${data[0][place]}`), ...each);
    };
    let data = aligned(lines);
    const everyPositive = lines.every(([, column]) => column.every((value) => value > 0));
    const plot = new uPlot(options(card.clientWidth - 20, HEIGHT, [{}, ...series], this.logarithmic && everyPositive,
      (each) => shown(each.cursor.idx ?? null)), data, card.lastElementChild);
    plot.over.addEventListener("click", () => this.open(plot, data, found));
    plot.update = () => {
      const { min, max } = plot.scales.x, isWhole = min === data[0][0] && max === data[0].at(-1);
      data = aligned(this.lines(name));
      plot.setData(data, isWhole);
      shown(null);
    };
    shown(null);
    return plot;
  }

  open(plot, data, found) {
    const place = plot.cursor.idx;
    if (place === null || place === undefined || !found.length) return;
    const heights = found.map((_, at) => data[(this.smoothing > 0 ? 2 * at + 1 : at) + 1][place]);
    const distance = (value) => (value === null ? Infinity : Math.abs(plot.valToPos(value, "y") - plot.cursor.top));
    const nearest = heights.reduce((best, value, at) => (distance(value) < distance(heights[best]) ? at : best), 0);
    const kind = plot.root.closest("figure").dataset.metric.startsWith("val/") ? "validation" : "step";
    this.app.go({ tab: "trajectories", run: found[nearest][0].id, kind, step: data[0][place], line: null });
  }
}

export class TimeTab {
  constructor(app) {
    this.app = app;
  }

  async show(main) {
    this.box = h("section", { class: "grow" });
    main.replaceChildren(this.box);
    await this.refresh();
  }

  async refresh() {
    const run = this.app.run();
    const { steps, sums, width } = await get("seconds", { run: run.id });
    const inside = Object.keys(sums).filter((name) => !["time/step", "time/rollout_idle", "time/validation"].includes(name));
    if (sums["time/step"]) sums["time/rest of the step"] = sums["time/step"].map((all, at) => Math.max(0, inside.reduce((rest, name) => rest - sums[name][at], all)));
    const sum = (name) => sums[name].reduce((total, value) => total + value, 0);
    const phases = Object.keys(sums).filter((name) => !["time/step", "time/rollout_idle"].includes(name)).sort((a, b) => sum(b) - sum(a));
    if (!phases.length) return this.box.replaceChildren(h("p", { class: "empty" }, "this run has written no times yet"));
    this.plot?.destroy();
    const total = phases.reduce((all, name) => all + sum(name), 0);
    const rows = phases.map((name, at) => h("tr", {},
      h("td", {}, h("i", { class: "swatch", style: { background: COLOURS[at % COLOURS.length] } }), name.slice(5)),
      h("td", { class: "num" }, `${number(sum(name))} s`), h("td", { class: "num" }, `${((100 * sum(name)) / total).toFixed(1)} %`),
      h("td", { class: "share" }, h("div", { style: { width: `${(100 * sum(name)) / total}%`, background: COLOURS[at % COLOURS.length] } }))));
    const box = h("div", { class: "card" });
    const now = h("span", { class: "values" });
    this.box.replaceChildren(h("h3", {}, `Seconds of ${width > 1 ? `every ${width} steps` : "each step"} of ${run.name}, by phase `, now), box,
      h("h3", {}, "In all"), h("table", { class: "times" }, h("tbody", {}, rows)));
    const data = [steps, ...phases.map((name) => sums[name])], stacked = [steps];
    let below = steps.map(() => 0);
    for (const column of data.slice(1)) stacked.push((below = below.map((value, at) => value + column[at])));
    // The highest is drawn first, and each next one over it.
    const order = phases.map((_, at) => phases.length - 1 - at);
    const series = order.map((at) => ({ stroke: COLOURS[at % COLOURS.length], fill: COLOURS[at % COLOURS.length], width: 1, points: { show: data[0].length < 2 } }));
    const hook = (plot) => {
      const place = plot.cursor.idx;
      now.replaceChildren(...(place == null ? [] : [h("span", { class: "dim" }, `step ${data[0][place]}`),
        ...phases.slice(0, 8).map((name, at) => h("span", { style: { color: COLOURS[at % COLOURS.length] } }, `${name.slice(5)} ${number(data[at + 1][place])}`))]));
    };
    this.plot = new uPlot(options(box.clientWidth - 20, 300, [{}, ...series], false, hook, { scales: { x: { time: false }, y: { range: (_, __, most) => [0, most * 1.05] } } }),
      [stacked[0], ...order.map((at) => stacked[at + 1])], box);
  }
}
