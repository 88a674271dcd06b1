// The page's loop: fetches one picture per second and draws it into cards that keep their place.

import { startAsking } from "./ask.js";
import { Charts } from "./charts.js";
import { Details } from "./details.js";
import { ask, bytes, count, el, percent, rate, setText } from "./dom.js";
import { PoolMap } from "./map.js";
import { showModels } from "./models.js";
import { showPrefixes } from "./prefixes.js";
import { Pulls } from "./pulls.js";
import { showRequests } from "./requests.js";

const TICK_MS = 1000;
const STALE_SECONDS = 3;
const COUNTERS = ["evictions", "preemptions", "pulled_blocks", "lent_blocks", "generated_tokens"];
const RARE = ["pulled_blocks", "lent_blocks"];
const DAY_MS = 86_400_000;
const AWAY = new Set(["dead", "stopped", "starting", "downloading", "connecting", "refused"]);

const RATE_TIP = "The rate is for the last minute";
const TIPS = {
  running: "Sequences in the engine's running batch",
  waiting: "Sequences without blocks: not admitted yet, or preempted",
  hit_rate: "Share of prompt tokens that were found cached, since the worker's start",
  evictions: `Cached blocks that were evicted because no block was free. ${RATE_TIP}`,
  preemptions: `Sequences that lost their blocks because no block was free. ${RATE_TIP}`,
  pulled_blocks: `Blocks that came from other workers instead of being computed. ${RATE_TIP}`,
  lent_blocks: `Blocks that were sent to other workers. ${RATE_TIP}`,
  generated_tokens: `Tokens generated since the worker's start. ${RATE_TIP}`,
};

const byId = (id) => document.getElementById(id);
const cards = new Map();
let paused = false;
let lastPicture = 0;

const chosen = () => byId("cluster").value || new URLSearchParams(location.search).get("cluster") || "";
const parameters = () => ({ cluster: chosen() });

function mark(worker, blocks) {
  for (const [name, card] of cards) card.map.mark(name === worker ? blocks : []);
}

const details = new Details(parameters, mark);
const pulls = new Pulls(cards);
const charts = new Charts(byId("charts"));
const prefixes = () => showPrefixes(parameters(), (worker, which) => details.block(worker, which));

// Cards

function makeCard(name) {
  const fields = {};
  const field = (key, tag = "span") => (fields[key] = el(tag, { "data-field": key }));
  const figure = (key, label) => el("div", { title: TIPS[key] }, el("dt", {}, label), field(key, "dd"));
  const counter = (key, label) => el("div", { title: TIPS[key] }, el("dt", {}, label),
    el("dd", {}, field(key), Object.assign(field(`${key}_rate`), { className: "rate" })));
  const counted = (key, chip, label) => el("span", {}, el("i", { className: `chip ${chip}` }), field(key), ` ${label}`);
  const map = new PoolMap(name, (first, number) => details.blocks(name, first, number));
  const hostFill = el("div");
  const host = el("div", {}, el("p", { className: "quiet" }, field("host")), el("div", { className: "hostbar" }, hostFill));
  const number = el("input", { type: "number", min: "0", className: "goto", ariaLabel: `block number on ${name}`, placeholder: "block" });
  const go = (event) => {
    event.preventDefault();
    if (number.value !== "") details.blocks(name, Number(number.value), 1);
  };
  const form = el("form", { className: "row" },
    el("button", { type: "button", "data-action": "sequences", onclick: () => details.sequences(name) }, "Sequences"),
    el("span", { className: "spring" }), number, el("button", { type: "submit" }, "Show block"));
  form.addEventListener("submit", go);
  const pool = el("div", { hidden: true },
    map.element,
    el("div", { className: "counts" }, counted("used", "used", "used"), counted("cached", "cached", "cached"),
      counted("free", "free", "free"), el("span", { className: "quiet" }, "of ", field("total"), " ", field("size"))),
    host,
    el("dl", { className: "figures" }, figure("running", "running"), figure("waiting", "waiting"), figure("hit_rate", "hit rate"),
      counter("evictions", "evictions"), counter("preemptions", "preempted"),
      counter("pulled_blocks", "blocks pulled"), counter("lent_blocks", "blocks lent"), counter("generated_tokens", "tokens out")),
    form);
  pool.className = "content";
  const element = el("article", { className: "card", "data-worker": name, ariaLabel: `Worker ${name}` },
    el("div", { className: "row" }, el("h2", {}, name), Object.assign(field("model"), { className: "model" }), field("state"), el("span", { className: "spring" }),
      el("span", { className: "quiet" }, field("device"))),
    el("p", { className: "quiet" }, field("node"), field("address"), " · incarnation ", field("incarnation", "code"), field("starts")),
    Object.assign(field("ranks", "p"), { className: "quiet" }), field("reason", "p"), pool);
  return { element, fields, map, pool, host, hostFill };
}

function since(worker) {
  if (!AWAY.has(worker.state) || !worker.since) return "";
  const time = new Date(1000 * worker.since);
  const told = Date.now() - time < DAY_MS ? time.toLocaleTimeString() : time.toLocaleString();
  return `${worker.state} since ${told}${worker.since_is_exact ? "" : " or before"}`;
}

function showCard(card, worker, isOneOfSeveral) {
  const { fields } = card;
  setText(fields.model, isOneOfSeveral ? worker.model : "");
  fields.model.hidden = !fields.model.textContent;
  setText(fields.state, worker.state);
  fields.state.className = `state ${worker.state}`;
  const silence = worker.pool || AWAY.has(worker.state) ? "" : "it does not report its pool in time";
  if (worker.pool ?? worker.last_pool) showPool(card, worker.pool ?? worker.last_pool);
  const past = worker.pool || card.pool.hidden ? "" : "the numbers below are its last ones";
  setText(fields.reason, [since(worker), worker.reason || silence, past].filter(Boolean).join("; "));
  fields.reason.hidden = !fields.reason.textContent;
  setText(fields.device, [worker.role, worker.device].filter(Boolean).join(" · "));
  setText(fields.node, worker.node ? `node ${worker.node} · ` : "");
  setText(fields.ranks, worker.ranks.map((rank, number) => `rank ${number}: pid ${rank.pid}${rank.node ? ` on ${rank.node}` : ""}`).join(" · "));
  fields.ranks.hidden = !worker.ranks.length;
  setText(fields.address, worker.address || "no address yet");
  setText(fields.incarnation, worker.incarnation || "-");
  setText(fields.starts, worker.starts > 1 ? ` · started ${worker.starts} times` : "");
  card.element.classList.toggle("away", !worker.pool);
  for (const key of COUNTERS) setText(fields[`${key}_rate`], rate(worker.pool?.per_minute?.[key]));
}

function showPool(card, pool) {
  const { fields } = card;
  card.pool.hidden = false;
  for (const key of ["used", "cached", "free", "total", "running", "waiting", ...COUNTERS]) setText(fields[key], count(pool[key]));
  for (const key of RARE) fields[key].closest("div").hidden = !pool[key];
  const cell = pool.scale > 1 ? `; a cell is ${pool.scale} blocks` : "";
  setText(fields.size, `blocks of ${pool.block_size} tokens (${bytes(pool.total * pool.bytes_per_block)})${cell}`);
  setText(fields.hit_rate, percent(pool.cached_tokens, pool.prompt_tokens));
  card.host.hidden = !pool.host_total;
  setText(fields.host, `host memory: ${count(pool.host_cached)} of ${count(pool.host_total)} blocks hold evicted prefixes`);
  card.hostFill.style.width = `${pool.host_total ? (100 * pool.host_cached) / pool.host_total : 0}%`;
  card.map.show(pool);
}

function showCards(workers, models = []) {
  const names = new Set(workers.map((worker) => worker.name));
  for (const [name, card] of cards)
    if (!names.has(name)) {
      card.element.remove();
      cards.delete(name);
    }
  for (const worker of workers) {
    if (!cards.has(worker.name)) {
      cards.set(worker.name, makeCard(worker.name));
      byId("workers").append(cards.get(worker.name).element);
    }
    showCard(cards.get(worker.name), worker, models.length > 1);
  }
}

// Above the cards

function showTiles(picture) {
  const pools = picture.workers.map((worker) => worker.pool).filter(Boolean);
  const sum = (key) => pools.reduce((total, pool) => total + pool[key], 0);
  const info = picture.info;
  const ready = picture.workers.filter((worker) => worker.state === "ready").length;
  const tiles = [
    ["workers_ready", "workers ready", `${count(ready)} of ${count(picture.workers.length)}`, "Workers that take requests, of all that should run"],
    ["running", "sequences running", count(sum("running")), "Sequences in the running batches of all workers"],
    ["waiting", "sequences waiting", count(sum("waiting")), "Sequences that wait for blocks, on all workers"],
    ["requests", "requests run + wait", info ? `${count(info.requests_running)} + ${count(info.requests_waiting)}` : "-", "Requests of the router that answered"],
    ["usage", "of all blocks used", percent(sum("used"), sum("total")), "Share of the blocks of all pools that running sequences use"],
    ["hits", "prefix hit rate", percent(sum("cached_tokens"), sum("prompt_tokens")), "Share of prompt tokens that were found cached, since the workers' start"],
    ["index", "prefix index", info ? info.index : "-", "exact: it knows what workers cache. degraded: it is behind. absent: placement uses load alone"],
    ["migrations", "migrations", info ? count(info.migrations) : "-", `Requests that lost their worker and moved to another, of the router that answered. ${RATE_TIP}`],
  ];
  for (const [key, label, value, title] of tiles) {
    let tile = byId("tiles").querySelector(`[data-tile="${key}"]`);
    if (!tile) {
      tile = el("div", { className: "tile", "data-tile": key, title }, el("b"), el("span", {}, label), el("span", { className: "rate" }));
      byId("tiles").append(tile);
    }
    setText(tile.querySelector("b"), value);
    setText(tile.querySelector(".rate"), rate(picture.per_minute?.[key]));
  }
}

function showHead(state) {
  const select = byId("cluster");
  if ([...select.options].map((option) => option.value).join() !== state.clusters.join()) {
    const before = chosen();
    select.replaceChildren(...state.clusters.map((name) => el("option", { value: name }, name)));
    if (state.clusters.includes(before)) select.value = before;
  }
  const picture = state.picture;
  const info = picture?.info;
  const routers = picture?.routers.map((router) => (router.phase === "serving" ? router.address : `${router.name} is ${router.phase}`)) ?? [];
  setText(byId("facts"), picture ? `${info?.models.join(", ") ?? picture.model}${info ? ` · policy ${info.policy}` : ""} · routers ${[...new Set(routers)].join(", ") || "none"}` : "");
}

function complain(...sentences) {
  const told = sentences.filter(Boolean).join(" · ");
  setText(byId("trouble"), told);
  byId("trouble").hidden = !told;
}

function showPulse(age) {
  const stale = age > STALE_SECONDS;
  byId("pulse").classList.toggle("stale", stale || paused);
  setText(byId("pulse"), paused ? "paused" : stale ? `last picture ${Math.round(age)} s ago` : "live");
}

// The loop

async function look() {
  try {
    const state = await ask("state", parameters());
    showHead(state);
    const picture = state.picture;
    const none = picture ? "" : "No Blockyard cluster runs on this Ray. `blockyard up` starts one.";
    complain(state.trouble, picture?.trouble, none);
    if (picture) {
      showTiles(picture);
      charts.show(picture.history);
      showModels(picture);
      showCards(picture.workers, picture.info?.models);
      pulls.show(parameters());
      lastPicture = performance.now() - 1000 * Math.min(picture.age_seconds, 3600);
    } else {
      showCards([]);
      pulls.clear();
    }
    await Promise.all([details.refresh(), picture && showRequests(parameters()), picture && prefixes()]);
  } catch (error) {
    complain(error.message);
  }
}

async function tick() {
  const began = performance.now();
  if (!paused && !document.hidden) await look();
  showPulse((performance.now() - lastPicture) / 1000);
  setTimeout(tick, Math.max(100, TICK_MS - (performance.now() - began)));
}

byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", String(paused));
  setText(byId("pause"), paused ? "Resume" : "Pause");
  showPulse(0);
});
byId("requests").addEventListener("toggle", () => showRequests(parameters()));
byId("pulls").addEventListener("toggle", () => pulls.show(parameters()));
byId("prefixes").addEventListener("toggle", prefixes);
byId("cluster").addEventListener("change", () => {
  details.close();
  showCards([]);
  pulls.clear();
  look();
});
startAsking(parameters, (worker, blocks) => {
  mark(worker, blocks);
  document.querySelector(`[data-worker="${CSS.escape(worker)}"]`)?.scrollIntoView({ block: "nearest" });
});
tick();
