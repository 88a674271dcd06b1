// The totals of each model, in a cluster that serves several.

import { count, el, percent, rate } from "./dom.js";

const COLUMNS = ["model", "workers ready", "running", "waiting", "blocks used", "hit rate", "tokens out", "rate"];
const table = document.getElementById("models-table");

function row(model, workers) {
  const own = workers.filter((worker) => worker.model === model);
  const pools = own.map((worker) => worker.pool).filter(Boolean);
  const sum = (key) => pools.reduce((total, pool) => total + pool[key], 0);
  const rates = pools.map((pool) => pool.per_minute?.generated_tokens).filter(Number.isFinite);
  const cells = [
    model,
    `${count(own.filter((worker) => worker.state === "ready").length)} of ${count(own.length)}`,
    count(sum("running")),
    count(sum("waiting")),
    percent(sum("used"), sum("total")),
    percent(sum("cached_tokens"), sum("prompt_tokens")),
    count(sum("generated_tokens")),
    rates.length ? rate(rates.reduce((total, one) => total + one, 0)) : "-",
  ];
  return el("tr", { "data-model": model }, ...cells.map((text, index) => el("td", { "data-column": COLUMNS[index] }, text)));
}

export function showModels(picture) {
  const models = picture.info?.models ?? [];
  document.getElementById("models").hidden = models.length < 2;
  const head = el("tr", {}, ...COLUMNS.map((name) => el("th", { scope: "col" }, name)));
  table.replaceChildren(el("thead", {}, head), el("tbody", {}, ...models.map((model) => row(model, picture.workers))));
}
