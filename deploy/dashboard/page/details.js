// The panel beside the map: one block, several blocks, a worker's sequences, or one sequence. Refreshed each second.

import { ask, count, counted, el, seconds, setText } from "./dom.js";

const MOST_BUTTONS = 400;

export class Details {
  // `mark(worker, blocks)` marks blocks on that worker's map and clears all other marks. A view returns a key, its
  // children and what to mark. Its result is used only while the view is open.
  constructor(parameters, mark) {
    this.parameters = parameters;
    this.mark = mark;
    this.panel = document.getElementById("details");
    this.title = document.getElementById("details-title");
    this.body = document.getElementById("details-body");
    this.view = null;
    document.getElementById("close").addEventListener("click", () => this.close());
    this.panel.addEventListener("keydown", (event) => event.key === "Escape" && this.close());
  }

  close() {
    this.panel.hidden = true;
    this.view = null;
    this.mark("", []);
    this.opener?.focus?.();
  }

  open(title, view) {
    if (this.panel.hidden) this.opener = document.activeElement;
    this.view = view;
    this.shown = "";
    setText(this.title, title);
    this.body.replaceChildren(el("p", { className: "quiet" }, "asking the worker ..."));
    this.panel.hidden = false;
    this.title.focus();
    return this.refresh();
  }

  async refresh() {
    const view = this.view;
    if (!view || this.asking === view) return;
    this.asking = view;
    let children;
    let key;
    let marked;
    try {
      [key, children, marked] = await view();
    } catch (error) {
      [key, children] = [error.message, [el("p", { className: "trouble" }, error.message)]];
    }
    if (this.asking === view) this.asking = null;
    if (this.view !== view) return;
    if (marked) this.mark(marked.worker, marked.blocks);
    if (key !== this.shown) this.replace(key, children);
  }

  // Keeps the focus on the same element if it is in the panel.
  replace(key, children) {
    this.shown = key;
    const focused = this.body.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    this.body.replaceChildren(...children);
    if (focused) this.body.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  async answer(path, worker, more) {
    const answer = await ask(path, { ...this.parameters(), worker, ...more });
    return [JSON.stringify(answer), answer];
  }

  blocks(worker, first, number) {
    if (number === 1) return this.block(worker, { first });
    this.mark(worker, Array.from({ length: number }, (_, index) => first + index));
    return this.open(`${worker}: blocks ${first} to ${first + number - 1}`, async () => {
      const [key, { blocks }] = await this.answer("blocks", worker, { first, count: Math.min(number, 512) });
      return [key, [this.blockTable(worker, blocks)]];
    });
  }

  block(worker, which) {
    const title = "first" in which ? `${worker}: block ${which.first}` : `${worker}: block of a name`;
    return this.open(title, async () => {
      const [key, { blocks }] = await this.answer("blocks", worker, which);
      const marked = { worker, blocks: blocks.map((block) => block.id) };
      if (!blocks.length) return [key, [el("p", {}, "The pool no longer has this block.")], marked];
      return [key, blocks.length > 1 ? [this.blockTable(worker, blocks)] : this.oneBlock(worker, blocks[0]), marked];
    });
  }

  oneBlock(worker, block) {
    const requests = block.request_ids.map((id) => el("li", { className: "mono" }, id || "(ends in this step)"));
    const parent = block.parent
      ? el("button", { className: "link mono", "data-key": "parent", onclick: () => this.block(worker, { name: block.parent }) }, block.parent)
      : block.name ? "none: the first block of its prefix" : "-";
    return [
      facts([
        ["block", "id", block.id],
        ["state", "state", block.state],
        ["held by", "references", count(block.references)],
        ["name", "name", el("code", {}, block.name || (block.state === "free" ? "-" : "unnamed: not full yet"))],
        ["parent", "parent", parent],
        ["age", "age", block.age_seconds === null ? "-" : seconds(block.age_seconds)],
      ]),
      requests.length ? el("h3", {}, "Requests that hold it") : null,
      requests.length ? el("ul", {}, ...requests) : null,
      el("button", { "data-key": "sequences", onclick: () => this.sequences(worker) }, `Sequences on ${worker}`),
    ].filter(Boolean);
  }

  blockTable(worker, blocks) {
    const rows = blocks.map((block) =>
      el("tr", {},
        el("td", {}, el("button", { className: "link", "data-key": `block-${block.id}`, onclick: () => this.block(worker, { first: block.id }) }, String(block.id))),
        el("td", {}, block.state),
        el("td", {}, count(block.references)),
        el("td", {}, el("code", {}, block.name.slice(0, 8))),
        el("td", {}, block.age_seconds === null ? "-" : seconds(block.age_seconds))));
    return table(["block", "state", "held by", "name", "age"], rows);
  }

  sequences(worker) {
    this.mark("", []);
    return this.open(`${worker}: sequences`, async () => {
      const [key, { sequences }] = await this.answer("sequences", worker);
      if (!sequences.length) return [key, [el("p", {}, "No sequence runs or waits here.")]];
      const rows = sequences.slice(0, MOST_BUTTONS).map((sequence) =>
        el("tr", {},
          el("td", {}, el("button", { className: "link mono", "data-key": `sequence-${sequence.id}`, onclick: () => this.sequence(worker, sequence.id) },
            `${sequence.request_id || "?"}${sequence.index ? ` #${sequence.index}` : ""}`)),
          el("td", {}, sequence.state),
          el("td", {}, count(sequence.prompt_tokens)),
          el("td", {}, count(sequence.generated_tokens)),
          el("td", {}, count(sequence.num_blocks))));
      const left = sequences.length - rows.length;
      return [key, [table(["request", "state", "prompt", "generated", "blocks"], rows), left > 0 ? el("p", { className: "quiet" }, `and ${count(left)} more`) : ""]];
    });
  }

  sequence(worker, id) {
    return this.open(`${worker}: sequence`, async () => {
      const [key, { sequence }] = await this.answer("sequence", worker, { id });
      if (!sequence) {
        const back = el("button", { "data-key": "back", onclick: () => this.sequences(worker) }, "Other sequences");
        return [key, [el("p", {}, "This sequence has ended."), back], { worker: "", blocks: [] }];
      }
      const chips = sequence.block_table.slice(0, MOST_BUTTONS).map((block, index) =>
        el("button", { "data-key": `table-${index}`, ariaLabel: `block ${block}`, onclick: () => this.block(worker, { first: block }) }, String(block)));
      const left = sequence.num_blocks - chips.length;
      return [key, [
        facts([
          ["request", "request_id", el("code", {}, sequence.request_id || "-")],
          ["output", "index", sequence.index],
          ["state", "state", sequence.state],
          ["prompt", "prompt_tokens", `${counted(sequence.prompt_tokens, "token")}, ${count(sequence.cached_tokens)} found cached`],
          ["generated", "generated_tokens", counted(sequence.generated_tokens, "token")],
          ["computed", "computed_tokens", counted(sequence.computed_tokens, "token")],
          ["preempted", "preemptions", counted(sequence.preemptions, "time")],
          ["priority", "priority", sequence.priority],
        ]),
        el("h3", {}, `Block table: ${counted(sequence.num_blocks, "block")}, marked on the map`),
        el("div", { className: "blocks" }, ...chips),
        left > 0 ? el("p", { className: "quiet" }, `and ${count(left)} more`) : "",
        el("p", {}, el("button", { "data-key": "back", onclick: () => this.sequences(worker) }, "Other sequences")),
      ], { worker, blocks: sequence.block_table }];
    });
  }
}

function facts(rows) {
  return el("dl", {}, ...rows.flatMap(([label, field, value]) => [el("dt", {}, label), el("dd", { "data-field": field }, typeof value === "number" ? String(value) : value)]));
}

export function table(headings, rows) {
  const head = el("tr", {}, ...headings.map((heading) => el("th", { scope: "col" }, heading)));
  return el("div", { className: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows)));
}
