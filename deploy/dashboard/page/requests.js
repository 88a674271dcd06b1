// The requests of all routers, oldest first. They are fetched only while the table is unfolded.

import { ask, count, counted, el, seconds, setText } from "./dom.js";

const COLUMNS = ["id", "tenant", "worker", "state", "prompt tokens", "cached tokens", "pulled", "generated", "age"];
const byId = (id) => document.getElementById(id);

function row(request) {
  const cached = request.cached_tokens === null ? "-" : count(request.cached_tokens);
  const pulled = request.pulled_from ? `${counted(request.pulled_blocks, "block")} from ${request.pulled_from}` : "-";
  const cells = [request.id, request.tenant || "-", request.worker || "-", request.state, count(request.prompt_tokens), cached, pulled,
    count(request.generated_tokens), seconds(request.age_seconds)];
  return el("tr", { "data-request": request.id, title: `held by router ${request.router}` },
    ...cells.map((text, index) => el("td", { "data-column": COLUMNS[index], className: index ? "" : "mono" }, text)));
}

export async function showRequests(parameters) {
  if (!byId("requests").open) return;
  let told;
  try {
    const { requests, total, silent } = await ask("requests", parameters);
    const shown = total > requests.length ? `the oldest ${count(requests.length)} of ${count(total)}` : count(total);
    told = [`${shown} on all routers`, silent.length && `no answer from ${silent.join(", ")}`].filter(Boolean).join(" · ");
    const head = el("tr", {}, ...COLUMNS.map((name) => el("th", { scope: "col" }, name)));
    byId("requests-table").replaceChildren(el("thead", {}, head), el("tbody", {}, ...requests.map(row)));
  } catch (error) {
    told = error.message;
  }
  setText(byId("requests-told"), told);
}
