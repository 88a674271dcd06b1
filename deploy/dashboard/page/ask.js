// Questions about a prompt: which workers cache it, and where it would run. The prompt is in headers, never in a URL.

import { ask, count, counted, decimal, el, percent } from "./dom.js";
import { table } from "./details.js";

const HEADER_CHARS = 7000;
const MOST_HEADERS = 24;
const TERMS = [
  ["queue", "queue_ms"], ["prefill", "prefill_ms"], ["from host", "host_load_ms"], ["pull", "pull_ms"], ["decode", "decode_ms"],
  ["memory", "memory_ms"], ["adapter", "adapter_ms"], ["interference", "interference_ms"], ["total ms", "total_ms"], ["cost", "cost"],
];

export function startAsking(parameters, mark) {
  const form = document.getElementById("ask");
  const answer = document.getElementById("answer");
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const question = event.submitter?.value ?? "prefix";
    answer.replaceChildren(el("p", { className: "quiet" }, "asking ..."));
    try {
      const found = await ask(question, parameters(), headers(form));
      answer.replaceChildren(...(question === "prefix" ? prefix(found, mark) : placement(found)));
    } catch (error) {
      answer.replaceChildren(el("p", { className: "trouble" }, error.message));
    }
  });
}

// Throws an Error whose message is a sentence for the operator.
function headers(form) {
  const text = form.querySelector("#prompt").value;
  const question = { public: form.querySelector("#public").checked };
  if (form.elements.kind.value === "prompt") question.prompt = text;
  else question.token_ids = text.split(/[\s,]+/).filter(Boolean).map(tokenId);
  let packed = "";
  for (const byte of new TextEncoder().encode(JSON.stringify(question))) packed += String.fromCharCode(byte);
  const encoded = btoa(packed);
  const parts = encoded.match(new RegExp(`.{1,${HEADER_CHARS}}`, "g"));
  if (parts.length > MOST_HEADERS)
    throw new Error(`the prompt is too long for this page (about ${Math.floor((HEADER_CHARS * MOST_HEADERS * 3) / 4000)} kB at most)`);
  return Object.fromEntries(parts.map((part, number) => [`x-blockyard-question-${number}`, part]));
}

function tokenId(text) {
  if (!/^\d{1,9}$/.test(text)) throw new Error(`'${text.slice(0, 20)}' is not a token id`);
  return Number(text);
}

function prefix(found, mark) {
  const head = el("p", { "data-field": "prefix" }, `${counted(found.prompt_tokens, "token")}, ${counted(found.prompt_blocks, "full block")}. ` +
    (found.index_available ? "" : "The prefix index does not answer."));
  if (!found.holders.length) return [head, el("p", {}, "No worker has cached its beginning.")];
  const rows = found.holders.map((holder) =>
    el("tr", { "data-holder": holder.worker },
      el("td", {}, holder.worker),
      el("td", { "data-field": "blocks" }, count(holder.blocks)),
      el("td", {}, count(holder.host_blocks)),
      el("td", {}, percent(holder.blocks + holder.host_blocks, found.prompt_blocks)),
      el("td", {}, holder.block_ids?.length
        ? el("button", { type: "button", onclick: () => mark(holder.worker, holder.block_ids) }, "Mark on its map") : "")));
  return [head, table(["worker", "blocks on the GPU", "then in host memory", "of the prompt", ""], rows)];
}

// Some policies draw at random. Among costs that differ by less than the estimates' error the least may lose.
const DRAWN = {
  two_choices: "the policy compares only two workers, drawn at random.",
  dynamo: "the policy draws at random, and cheaper workers are likelier.",
};

function reason({ candidates, chosen, policy, split }) {
  if (split?.is_chosen) return `Then ${split.second} would continue.`;
  const least = candidates.reduce((best, other) => (other.cost < best.cost ? other : best));
  const difference = candidates.find(({ worker_id }) => worker_id === chosen).cost - least.cost;
  return difference > 0
    ? `${least.worker_id} costs ${decimal(difference)} less, ` +
      (DRAWN[policy] ? `but ${DRAWN[policy]}` : "which is too close to tell: the session's last worker wins, or else a hash of the prefix decides.")
    : "It costs least.";
}

// The ways to pull a part of the prompt, and why each is taken or not.
function options({ candidates }) {
  const rows = candidates.flatMap((candidate) => candidate.pull_options.map((option) => {
    const priced = (text) => (option.is_priced ? text : "-");
    return el("tr", { className: option.is_chosen ? "chosen" : "", "data-option": `${option.source} to ${candidate.worker_id}` },
      el("td", {}, candidate.worker_id),
      el("td", {}, option.source),
      el("td", {}, priced(count(option.tokens))),
      el("td", {}, priced(decimal(option.time_ms))),
      el("td", {}, priced(decimal(option.saved_ms))),
      el("td", {}, option.verdict));
  }));
  if (!rows.length) return [];
  return [el("h3", {}, "What each could pull from another worker"), table(["to", "from", "tokens", "takes ms", "saves ms", "verdict"], rows)];
}

// The cheapest way to begin the request on one worker and to continue it on another.
function splitOf({ split }) {
  if (!split) return [];
  const parts = [
    [split.first, `computes ${counted(split.computed_tokens, "token")}`, split.first_ms],
    [split.second, `fetches ${counted(split.pulled_tokens, "token")} and continues`, split.second_ms],
    ["both", split.is_chosen ? "chosen" : "not chosen", split.first_ms + split.second_ms],
  ];
  if (split.local_ms) parts.push(["one worker", "serves the whole request", split.local_ms]);
  const rows = parts.map((cells) => el("tr", {}, ...cells.slice(0, 2).map((text) => el("td", {}, text)), el("td", {}, decimal(cells[2]))));
  const shown = table(["worker", "part", "total ms"], rows);
  shown.dataset.field = "split";
  return [el("h3", {}, "Begun on one worker, continued on another"), shown];
}

function placement(found) {
  const cached = (candidate) => `${count(candidate.cached_tokens)} + ${count(candidate.host_cached_tokens)}`;
  const rows = found.candidates.map((candidate) => {
    const chosen = candidate.worker_id === found.chosen;
    return el("tr", { className: chosen ? "chosen" : "", "data-candidate": candidate.worker_id },
      el("td", {}, candidate.worker_id + (chosen ? " (chosen)" : "")),
      el("td", {}, cached(candidate)),
      el("td", { "data-field": "pulled" }, candidate.pulled_from ? `${count(candidate.pulled_tokens)} from ${candidate.pulled_from}` : "-"),
      el("td", {}, count(candidate.uncached_tokens)),
      ...TERMS.map(([, name]) => el("td", { "data-term": name }, decimal(candidate[name]))));
  });
  const head = el("p", { "data-field": "chosen" }, `Policy ${found.policy}: ` + (found.chosen
    ? `it would run on ${found.chosen}. ${reason(found)}` : "no worker can take it now."));
  return [head, table(["worker", "cached + host tokens", "pulled tokens", "to compute", ...TERMS.map(([label]) => label)], rows), ...options(found), ...splitOf(found)];
}
