// Line charts of the last 15 minutes, in plain SVG: axes with units, gaps where nothing was measured, a tooltip.

import { count, el, setText } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 130;
const LEFT = 52;
const RIGHT = 8;
const TOP = 10;
const BOTTOM = 34;
const NEAR_PX = 30;
const NAMESPACE = "http://www.w3.org/2000/svg";
const RATE = { unit: "tokens/s", show: (value) => count(Math.round(value * 10) / 10) };
const TIME = { unit: "ms", show: (value) => count(Number((1000 * value).toPrecision(3))) };
const CHARTS = [
  { key: "tokens", title: "Tokens generated", ...RATE, lines: [["tokens_per_second", "all workers"]] },
  { key: "first_token", title: "Time to first token", ...TIME, lines: [["first_token_p50", "p50"], ["first_token_p99", "p99"]] },
  { key: "inter_token", title: "Time between tokens", ...TIME, lines: [["inter_token_p50", "p50"], ["inter_token_p99", "p99"]] },
  { key: "hit_rate", title: "Prefix hit rate", unit: "%", show: (value) => count(Math.round(1000 * value) / 10), top: 1, lines: [["hit_rate", "of prompt tokens"]] },
  { key: "waiting", title: "Queue length", unit: "requests", show: count, lines: [["waiting", "waiting"]] },
];

function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// Rounds up to the next of 1, 2, 5, 10 ..., so that the top of an axis is a round number.
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999999);
}

const ago = (seconds) => (seconds < 90 ? `${Math.round(seconds)} s ago` : `${Math.round(seconds / 60)} min ago`);

export class Charts {
  constructor(parent) {
    this.charts = CHARTS.map((chart) => this.make(chart));
    parent.replaceChildren(...this.charts.map(({ element }) => element));
  }

  make(chart) {
    const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
    const tip = el("p", { className: "pointed" });
    const names = chart.lines.map(([, name], index) => el("span", {}, el("i", { className: `chip line-${index}` }), name));
    const made = { ...chart, drawing, tip, pointedAt: null };
    drawing.addEventListener("pointermove", (event) => {
      const box = drawing.getBoundingClientRect();
      made.pointedAt = ((event.clientX - box.left) * WIDTH) / box.width;
      this.point(made);
    });
    drawing.addEventListener("pointerleave", () => {
      made.pointedAt = null;
      this.point(made);
    });
    made.element = el("figure", { className: "panel chart", "data-chart": chart.key },
      el("figcaption", {}, el("b", {}, chart.title), el("span", { className: "quiet" }, chart.unit), ...names), drawing, tip);
    return made;
  }

  show(history) {
    this.history = history;
    for (const chart of this.charts) {
      this.draw(chart, history);
      this.point(chart);
    }
  }

  draw(chart, history) {
    const values = chart.lines.flatMap(([key]) => history[key]).filter((value) => value !== null);
    const top = chart.top ?? ceiling(values.reduce((most, value) => Math.max(most, value), 0));
    const x = (age) => WIDTH - RIGHT - (age / history.window_seconds) * (WIDTH - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - TOP - BOTTOM);
    chart.x = x;
    const minutes = history.window_seconds / 60;
    const axes = [
      ...[0, 0.5, 1].flatMap((share) => [
        svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(top * share), y2: y(top * share) }),
        svg("text", { x: LEFT - 5, y: y(top * share) + 3, "text-anchor": "end" }, chart.show(top * share)),
      ]),
      ...[[minutes, "start"], [minutes / 2, "middle"], [0, "end"]].map(([age, anchor]) =>
        svg("text", { x: x(age * 60), y: HEIGHT - BOTTOM + 13, "text-anchor": anchor }, age ? `-${age}` : "now")),
      svg("text", { x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, "minutes"),
      svg("text", { transform: `translate(10 ${(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)`, "text-anchor": "middle" }, chart.unit),
    ];
    const lines = chart.lines.map(([key], index) => svg("path", { class: `line-${index}`, d: this.path(history, key, x, y) }));
    chart.drawing.replaceChildren(...axes, ...lines);
    const last = values.length ? chart.lines.map(([key, name]) => `${name} ${this.text(chart, history[key].at(-1))}`).join(", ") : "nothing yet";
    chart.drawing.setAttribute("aria-label", `${chart.title}, the last ${minutes} minutes: ${last}`);
  }

  path(history, key, x, y) {
    let isDrawn = false;
    return history[key].map((value, index) => {
      const here = value === null ? "" : `${x(history.age_seconds[index]).toFixed(1)} ${y(value).toFixed(1)}`;
      // A single point between two gaps becomes a dot: a line to itself.
      const step = value === null ? "" : isDrawn ? `L${here}` : `M${here}L${here}`;
      isDrawn = value !== null;
      return step;
    }).join("");
  }

  text(chart, value) {
    return value === null || value === undefined ? "-" : `${chart.show(value)} ${chart.unit}`;
  }

  point(chart) {
    const { history } = this;
    if (chart.pointedAt === null || !history?.age_seconds.length) return setText(chart.tip, "");
    const off = history.age_seconds.map((age) => Math.abs(chart.x(age) - chart.pointedAt));
    const index = off.indexOf(Math.min(...off));
    if (off[index] > NEAR_PX) return setText(chart.tip, "nothing was measured then");
    const told = chart.lines.map(([key, name]) => `${name} ${this.text(chart, history[key][index])}`);
    return setText(chart.tip, `${ago(history.age_seconds[index])}: ${told.join(", ")}`);
  }
}
