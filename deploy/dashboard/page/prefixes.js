// The tree of cached prefixes over all workers. It is fetched only while it is unfolded.

import { ask, count, counted, el, seconds, setText } from "./dom.js";

const COLUMNS = ["prefix", "blocks", "after it", "workers", "sequences now", "newest block"];
const byId = (id) => document.getElementById(id);
let asking = false;
let shown = "";

function row(run, open) {
  const [worker] = run.workers;
  const name = el("button", { type: "button", className: "link mono", "data-key": run.name, title: `the first block of this run on ${worker}`,
    onclick: () => open(worker, { name: run.name }) }, run.name.slice(0, 8));
  const prefix = el("span", {}, run.level ? "└ " : "", name);
  prefix.style.paddingLeft = `${16 * Math.min(run.level, 12)}px`;
  const from = run.first_block ? ` from block ${count(run.first_block)} on` : "";
  const cells = [prefix, `${count(run.blocks)}${from}`, count(run.blocks_below), run.workers.join(", "), count(run.sequences),
    `${seconds(run.age_seconds)} ago`];
  return el("tr", { "data-prefix": run.name, "data-level": run.level },
    ...cells.map((cell, column) => el("td", { "data-column": COLUMNS[column] }, cell)));
}

// Draws only a changed answer, so that no click and no focus is lost between two answers.
function show(runs, open) {
  const key = JSON.stringify(runs);
  if (key === shown) return;
  shown = key;
  const rows = byId("prefixes-table");
  const focused = rows.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  const head = el("tr", {}, ...COLUMNS.map((name) => el("th", { scope: "col" }, name)));
  rows.replaceChildren(el("thead", {}, head), el("tbody", {}, ...runs.map((run) => row(run, open))));
  if (focused) rows.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

export async function showPrefixes(parameters, open) {
  if (!byId("prefixes").open || asking) return;
  asking = true;
  let told;
  try {
    const answer = await ask("prefixes", parameters);
    const { blocks, prefixes, hidden, silent } = answer;
    const more = hidden ? `${count(hidden)} colder branches are not shown` : "";
    told = [`${counted(blocks, "named block")}, ${counted(prefixes, "root")}`, more, silent.length && `no answer from ${silent.join(", ")}`]
      .filter(Boolean).join(" · ");
    show(answer.runs, open);
  } catch (error) {
    told = error.message;
  }
  asking = false;
  setText(byId("prefixes-told"), told);
}
