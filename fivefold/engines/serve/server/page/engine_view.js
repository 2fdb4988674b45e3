// The live view of the engine, asked for every second while the page is seen.

import { Chart } from "./chart.js";
import { engine } from "./stream.js";

const EVERY = 1000;
const status = document.getElementById("status"), facts = document.getElementById("facts");
const counts = document.getElementById("counts"), place = document.getElementById("charts");
const charts = {
  speed: new Chart(place, "Tokens per second"),
  requests: new Chart(place, "Sequences", { keys: ["running", "waiting"] }),
  memory: new Chart(place, "Cache for keys and values", { top: 1, keys: ["in use", "kept for reuse"] }),
  hits: new Chart(place, "Prompt tokens found in cache", { top: 1 }),
};

export let model = null;

export async function watch() {
  for (;;) {
    if (!document.hidden) await look();
    await new Promise((done) => setTimeout(done, EVERY));
  }
}

async function look() {
  try {
    draw(await engine());
  } catch (error) {
    tell("bad", error.message.replace(/\.$/, "").toLowerCase());
    for (const chart of Object.values(charts)) chart.push(null, "–");
  }
}

function draw(state) {
  model = state.model;
  if (state.ready) tell("good", "ready");
  else tell("bad", state.draining ? "stopping" : "the engine is down");
  describe(state);
  const { blocks, blocks_owned: owned, blocks_cached: cached } = state;
  const share = (part) => (blocks ? part / blocks : 0);
  charts.speed.push([state.tokens_per_second], round(state.tokens_per_second));
  charts.requests.push([state.running, state.waiting], `${state.running} + ${state.waiting}`);
  charts.memory.push([share(owned), share(cached)], percent(share(owned)));
  charts.hits.push([state.hit_rate], percent(state.hit_rate),
    `${whole(state.tokens_hit)} of ${whole(state.tokens_asked)}`);
  list({
    "Requests so far": state.requests_total,
    "Tokens of cache": blocks * state.block_size,
    "Engine steps": state.steps,
    "Put back for want of memory": state.preemptions,
    "Engine restarts": state.restarts,
  });
}

function describe(state) {
  const name = document.createElement("b");
  name.textContent = state.model;
  const size = state.parameters ? `${short(state.parameters)} parameters` : "";
  const more = [size, state.dtype, state.device, `context ${whole(state.context)}`];
  facts.replaceChildren(name, ` · ${more.filter(Boolean).join(" · ")}`);
  document.title = `${state.model} · fivefold`;
}

function list(entries) {
  counts.replaceChildren(...Object.entries(entries).flatMap(([what, number]) => {
    const term = document.createElement("dt"), value = document.createElement("dd");
    term.textContent = what;
    value.textContent = whole(number);
    return [term, value];
  }));
}

function tell(kind, text) {
  if (status.textContent !== text) status.textContent = text;  // it is read out when it changes
  status.className = kind;
}

const whole = (number) => number.toLocaleString("en");
const percent = (share) => `${(100 * share).toFixed(0)}%`;
const round = (number) => number.toLocaleString("en", { maximumFractionDigits: number < 10 ? 1 : 0 });
const short = (number) => number.toLocaleString("en", { notation: "compact", maximumFractionDigits: 1 });
