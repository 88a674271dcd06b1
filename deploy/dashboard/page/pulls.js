// Pulls between workers: an arrow from card to card while one runs and shortly after, and a table of the last ones.

import { ask, bytes, count, counted, decimal, el, seconds, setText } from "./dom.js";

const FLOW_SECONDS = 3;
const SHOWN_SECONDS = 12;
const PALEST = 0.3;
const LABEL_AT = 0.65; // of the way, so that the labels of both directions lie apart
const SVG = "http://www.w3.org/2000/svg";
const COLUMNS = ["to", "from", "end", "blocks", "bytes", "took", "expected", "saved", "ended"];
const byId = (id) => document.getElementById(id);

const ms = (value) => `${value < 10 ? decimal(value) : count(Math.round(value))} ms`;
const total = (pulls, key) => pulls.reduce((sum, pull) => sum + pull[key], 0);

function svg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// What an arrow says: `pulls` have one source and one destination.
export function label(pulls) {
  const running = pulls.filter((pull) => !pull.end);
  if (running.length)
    return `${running.length > 1 ? `${count(running.length)} pulls of ` : ""}${bytes(total(running, "planned_bytes"))} under way`;
  const whole = pulls.filter((pull) => pull.end === "whole");
  const failed = pulls.filter((pull) => pull.end !== "whole");
  if (!whole.length && failed.length === 1) return `${failed[0].end}: ${counted(failed[0].blocks, "block")} arrived`;
  if (!whole.length) return `${count(failed.length)} pulls, none whole`;
  const told = whole.length === 1
    ? `${bytes(whole[0].bytes)} in ${ms(whole[0].elapsed_ms)}, saves about ${ms(whole[0].saved_ms)}`
    : `${count(whole.length)} pulls, ${bytes(total(whole, "bytes"))}, save about ${ms(total(whole, "saved_ms"))}`;
  return failed.length ? `${told}; ${count(failed.length)} not whole` : told;
}

export class Pulls {
  // `cards` are the workers' cards by name, each with its `map`.
  constructor(cards) {
    this.cards = cards;
    this.arrows = new Map();
    this.pulls = [];
    this.asking = null;
    new ResizeObserver(() => this.draw()).observe(byId("yard"));
  }

  async show(parameters) {
    if (this.asking) return;
    const asking = (this.asking = {});
    let told;
    let pulls = [];
    try {
      let silent;
      ({ pulls, silent } = await ask("pulls", parameters));
      const number = pulls.length ? counted(pulls.length, "pull") : "none";
      told = [`${number} now and in the last 30 s, of each router the last 32`, silent.length && `no answer from ${silent.join(", ")}`].filter(Boolean).join(" · ");
    } catch (error) {
      told = error.message;
    }
    if (this.asking !== asking) return;
    this.asking = null;
    this.pulls = pulls;
    this.draw();
    if (!byId("pulls").open) return;
    setText(byId("pulls-told"), told);
    const head = el("tr", {}, ...COLUMNS.map((name) => el("th", { scope: "col" }, name)));
    byId("pulls-table").replaceChildren(el("thead", {}, head), el("tbody", {}, ...this.pulls.map(row)));
  }

  // For another cluster: an answer that is still to come is not used.
  clear() {
    this.asking = null;
    this.pulls = [];
    this.draw();
  }

  draw() {
    const pairs = new Map();
    for (const pull of this.pulls) {
      if (pull.end && pull.ended_seconds > SHOWN_SECONDS) continue;
      if (!this.cards.has(pull.source) || !this.cards.has(pull.worker) || pull.source === pull.worker) continue;
      const key = `${pull.source} to ${pull.worker}`;
      if (!pairs.has(key)) pairs.set(key, []);
      pairs.get(key).push(pull);
    }
    for (const [key, arrow] of this.arrows)
      if (!pairs.has(key)) {
        arrow.group.remove();
        arrow.label.remove();
        this.arrows.delete(key);
      }
    for (const [key, pulls] of pairs) this.drawArrow(key, pulls);
  }

  arrow(key) {
    if (!this.arrows.has(key)) {
      const group = svg("g", { class: "arrow", "data-pull": key });
      group.append(svg("path", { class: "halo" }), svg("path", { class: "line" }), svg("path", { class: "head" }));
      const label = el("p", { className: "pull", "data-pull": key, ariaHidden: "true" });
      byId("arrows").append(group);
      byId("yard").append(label);
      this.arrows.set(key, { group, label });
    }
    return this.arrows.get(key);
  }

  drawArrow(key, pulls) {
    const { group, label: told } = this.arrow(key);
    const age = Math.min(...pulls.map((pull) => (pull.end ? pull.ended_seconds : 0)));
    const failed = pulls.every((pull) => pull.end && pull.end !== "whole");
    for (const part of [group, told]) {
      part.classList.toggle("flows", age < FLOW_SECONDS);
      part.classList.toggle("failed", failed);
    }
    group.style.opacity = 1 - (1 - PALEST) * Math.max(0, (age - FLOW_SECONDS) / (SHOWN_SECONDS - FLOW_SECONDS));
    setText(told, label(pulls));
    this.place(group, told, pulls[0]);
  }

  // A bow from the middle of one map to the middle of the other. Both directions bow to their own side.
  place(group, told, { source, worker }) {
    const yard = byId("yard").getBoundingClientRect();
    const middle = (name) => {
      const box = this.cards.get(name).map.element.getBoundingClientRect();
      return { x: box.x + box.width / 2 - yard.x, y: box.y + box.height / 2 - yard.y };
    };
    const [from, to] = [middle(source), middle(worker)];
    const bow = { x: (from.x + to.x) / 2 - (to.y - from.y) / 5, y: (from.y + to.y) / 2 + (to.x - from.x) / 5 };
    const angle = Math.atan2(to.y - bow.y, to.x - bow.x);
    const tip = (turn) => `${(to.x - 16 * Math.cos(angle + turn)).toFixed(1)} ${(to.y - 16 * Math.sin(angle + turn)).toFixed(1)}`;
    const [halo, line, head] = group.children;
    for (const path of [halo, line]) path.setAttribute("d", `M${from.x} ${from.y}Q${bow.x} ${bow.y} ${to.x} ${to.y}`);
    head.setAttribute("d", `M${to.x} ${to.y}L${tip(0.45)}L${tip(-0.45)}Z`);
    const [first, second, third] = [(1 - LABEL_AT) ** 2, 2 * LABEL_AT * (1 - LABEL_AT), LABEL_AT ** 2];
    const along = (axis) => first * from[axis] + second * bow[axis] + third * to[axis];
    const half = told.offsetWidth / 2;
    told.style.left = `${Math.max(half, Math.min(yard.width - half, along("x")))}px`;
    told.style.top = `${along("y")}px`;
  }
}

function row(pull) {
  const isWhole = pull.end === "whole";
  const cells = [pull.worker, pull.source, pull.end || "runs", pull.end ? count(pull.blocks) : "-", bytes(pull.end ? pull.bytes : pull.planned_bytes),
    pull.end ? ms(pull.elapsed_ms) : `${ms(pull.elapsed_ms)} so far`, ms(pull.planned_ms), isWhole ? `about ${ms(pull.saved_ms)}` : "-",
    pull.end ? `${seconds(pull.ended_seconds)} ago` : "-"];
  return el("tr", { "data-number": `${pull.router} ${pull.number}`, title: `a request of router ${pull.router}` },
    ...cells.map((text, index) => el("td", { "data-column": COLUMNS[index] }, text)));
}
