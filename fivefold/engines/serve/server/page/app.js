// The page: a chat with the model, beside what its engine is busy with.

import { Conversation } from "./conversation.js";
import { model, watch } from "./engine_view.js";
import { chat } from "./stream.js";

const get = (id) => document.getElementById(id);
const text = get("text"), conversation = new Conversation(get("messages"));
let running = null;

function body() {
  const found = { model, messages: conversation.messages(get("system").value.trim()) };
  const temperature = get("temperature").valueAsNumber, most = get("most").valueAsNumber;
  if (!Number.isNaN(temperature)) found.temperature = temperature;
  if (!Number.isNaN(most)) found.max_tokens = most;
  return found;
}

async function send() {
  const question = text.value.trim();
  if (!question || running) return;
  if (model === null) return;  // the engine view says why
  text.value = "";
  fit();
  conversation.say("user", question);
  const asked = body(), turn = conversation.say("assistant");
  running = new AbortController();
  busy(true);
  turn.wait(true);
  try {
    turn.about(await answer(turn, asked, running.signal));
  } catch (error) {
    if (error.name === "AbortError") {
      turn.about("stopped");
    } else {
      turn.about(error.message, "error");
      conversation.forget(turn);
      text.value ||= question;
      fit();
    }
  }
  if (!turn.content) conversation.forget(turn);
  turn.wait(false);
  running = null;
  busy(false);
}

// Fill the turn with the answer; a line about it.
async function answer(turn, asked, signal) {
  const start = performance.now();
  let first = null, usage = null, reason = null;
  for await (const event of chat(asked, get("key").value, signal)) {
    usage = event.usage ?? usage;
    for (const { delta, finish_reason } of event.choices) {
      const said = delta.content ?? "", thought = delta.reasoning_content ?? "";
      if (said || thought) first ??= performance.now();
      turn.add(said, thought);
      reason = finish_reason ?? reason;
    }
  }
  return summary(usage, first === null ? null : first - start, performance.now() - start, reason);
}

function summary(usage, first, total, reason) {
  const about = [`${usage.completion_tokens} tokens`];
  if (first !== null && usage.completion_tokens > 1 && total > first) {
    about.push(`${(1000 * (usage.completion_tokens - 1) / (total - first)).toFixed(1)} tokens/s`);
  }
  if (first !== null) about.push(`first after ${(first / 1000).toFixed(2)} s`);
  if (reason === "length") about.push("ended by the limit on tokens");
  return about.join(" · ");
}

function busy(on) {
  get("send").hidden = on;
  get("stop").hidden = !on;
  if (matchMedia("(hover: hover)").matches) text.focus();  // a touch screen's keyboard stays away
}

function fit() {
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());
get("composer").addEventListener("submit", send);
get("stop").addEventListener("click", () => running?.abort());
get("clear").addEventListener("click", () => { running?.abort(); conversation.clear(); text.focus(); });
text.addEventListener("input", fit);
text.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.view;
    for (const each of document.querySelectorAll("nav button")) {
      each.setAttribute("aria-pressed", each === button);
    }
  });
}
watch();
