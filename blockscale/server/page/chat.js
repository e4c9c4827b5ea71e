// The page's own part: what is typed, shown and counted. All text is set as text, never as HTML.

import { ServerError, ask, getInfo } from "./stream.js";

const $ = (id) => document.getElementById(id);
const POLL_MS = 2000;
const POLL_WHILE_WRITING_MS = 1000;
const NEAR_END_PX = 60; // scrolled further up than this, the reader is left where they read

let info = null; // what the server says of itself, once it did
let turns = []; // of the conversation, as the API takes them
let writing = null; // AbortController of the answer that is being written
let counted = null; // { tokens, at } of the last look at the server

const number = (x, digits = 0) =>
  x.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const seconds = (ms) => `${number(ms / 1000, ms < 10000 ? 2 : 1)} s`;
const speed = (tokens, ms) => (ms > 0 ? `${number((1000 * tokens) / ms, 1)} tokens/s` : "–");

function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

// --- what the model is, and how the server is doing

function size(bytes) {
  const power = Math.min(Math.floor(Math.log10(Math.max(bytes, 1)) / 3), 4);
  return `${number(bytes / 1000 ** power, power ? 2 : 0)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
}

function fact(name, value) {
  const row = element("div");
  row.append(element("dt", name), element("dd", value));
  return row;
}

function showModel() {
  const { model, facts, context, has_chat: hasChat } = info;
  $("model").textContent = model;
  document.title = `${model} – blockscale`;
  $("system").disabled = !hasChat;
  const rows = [fact("Context", `${number(context)} tokens`)];
  let summary = "";
  if (facts) {
    const share = (n) => `${number((100 * n) / facts.num_parameters, 1)} %`;
    const bits = (x) => (x === null ? "–" : `${number(x, 2)} bits`);
    const formats = facts.formats.map((f) => f.format.toUpperCase()).join(" + ");
    summary = `${formats}, ${bits(facts.bits_per_parameter)} a parameter, ${facts.kv_format.toUpperCase()} cache, on ${facts.device}`;
    rows.unshift(
      fact("Architecture", facts.architecture),
      fact("Parameters", number(facts.num_parameters)),
      fact("Stored", size(facts.bytes)),
      fact("Bits per parameter", bits(facts.bits_per_parameter)),
      ...facts.formats.map((f) =>
        fact(f.format.toUpperCase(), `${share(f.num_parameters)} of the parameters, ${bits(f.bits_per_parameter)} each`),
      ),
      fact("KV cache", facts.kv_format.toUpperCase()),
      fact("Device", facts.device),
    );
    const kernels = facts.kernels.map((k) => {
      const row = element("tr");
      const rows = k.max_rows === null ? `from ${k.min_rows} rows` : `up to ${k.max_rows} rows`;
      const isSplit = k.min_rows > 1 || k.max_rows !== null;
      row.append(element("td", k.op), element("td", isSplit ? `${k.kernel}, ${rows}` : k.kernel), element("td", k.mode));
      row.title = k.reason;
      return row;
    });
    $("kernels").tBodies[0].replaceChildren(...kernels);
    $("kernels").hidden = kernels.length === 0;
  }
  if (!hasChat) summary += `${summary ? ". " : ""}It has no chat template: it goes on from your text.`;
  $("summary").textContent = summary;
  $("facts").replaceChildren(...rows);
}

function showNow(now, at) {
  const state = info.is_draining ? "shutting down" : info.is_alive ? "busy" : "the engine is not running";
  $("running").textContent = now ? number(now.running) : state;
  $("waiting").textContent = now ? number(now.waiting) : "–";
  $("cache").textContent = now ? `${number((100 * now.pages_held) / Math.max(now.pages, 1), 1)} %` : "–";
  if (!now) return;
  if (counted) $("server-speed").textContent = speed(now.output_tokens - counted.tokens, at - counted.at);
  counted = { tokens: now.output_tokens, at };
}

async function look() {
  const found = await getInfo($("key").value);
  const lasting = (i) => JSON.stringify({ ...i, now: null });
  const isNew = lasting(found) !== lasting(info);
  info = found;
  if (isNew) showModel();
  showNow(found.now, performance.now());
}

async function poll() {
  if (!document.hidden) {
    try {
      await look();
    } catch (error) {
      counted = null;
      $("running").textContent = error instanceof ServerError ? error.message : "–";
      for (const id of ["waiting", "cache", "server-speed"]) $(id).textContent = "–";
      if (info === null) $("summary").textContent = error.message;
    }
  }
  setTimeout(poll, writing ? POLL_WHILE_WRITING_MS : POLL_MS);
}

// --- the conversation

function addTurn(role, text) {
  const turn = element("article", "", role);
  const shown = element("div", text, "text");
  turn.append(element("h2", role === "user" ? "You" : "Model"), shown);
  $("log").append(turn);
  return { turn, shown };
}

function addThoughts(turn) {
  const thoughts = element("details", "", "thoughts");
  const shown = element("div", "", "text");
  thoughts.append(element("summary", "Thoughts"), shown);
  turn.insertBefore(thoughts, turn.lastChild);
  return shown;
}

function following(change) {
  const log = $("log");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PX;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function request(text) {
  const limit = $("max-tokens").value === "" ? null : Number($("max-tokens").value);
  const body = { model: info.model, temperature: Number($("temperature").value) };
  if (!info.has_chat) return ["v1/completions", { ...body, prompt: text, max_tokens: limit ?? Math.min(256, Math.ceil(info.context / 2)) }];
  const system = $("system").value.trim() ? [{ role: "system", content: $("system").value }] : [];
  const messages = [...system, ...turns, { role: "user", content: text }];
  return ["v1/chat/completions", { ...body, messages, max_completion_tokens: limit }];
}

// Writes one answer into the log as it comes. Fills `answer` with its text, so that what came before an error is kept.
async function write(text, answer, signal) {
  const [path, body] = request(text);
  const began = performance.now();
  let first = null;
  let last = null;
  let thoughts = null;
  let tokens = 0;
  let reason = null;
  for await (const chunk of ask(path, body, $("key").value, signal)) {
    tokens = chunk.usage?.completion_tokens ?? tokens;
    const choice = chunk.choices[0];
    if (!choice) continue;
    reason = choice.finish_reason ?? reason;
    const piece = info.has_chat ? (choice.delta.content ?? "") : choice.text;
    const thought = (info.has_chat && choice.delta.reasoning_content) || "";
    if (!piece && !thought) continue;
    last = performance.now();
    if (first === null) {
      first = last;
      $("first-token").textContent = seconds(first - began);
      $("state").textContent = "Writing …";
      answer.isBegun = true;
    }
    following(() => {
      if (thought) {
        thoughts ??= addThoughts(answer.turn);
        thoughts.append(thought);
      }
      answer.text += piece;
      answer.shown.append(piece);
    });
  }
  // the first token's time is the prompt's
  if (tokens > 1 && last > first) $("answer-speed").textContent = speed(tokens - 1, last - first);
  const cut = reason === "length" ? "Cut at the limit of tokens" : "Done";
  return `${cut}: ${number(tokens)} ${tokens === 1 ? "token" : "tokens"} in ${seconds(performance.now() - began)}.`;
}

// Buttons of no use now are not disabled, which would take the focus from them.
function setWriting(controller) {
  writing = controller;
  const isWriting = controller !== null;
  for (const id of ["send", "clear"]) $(id).setAttribute("aria-disabled", isWriting);
  $("stop").setAttribute("aria-disabled", !isWriting);
  $("log").setAttribute("aria-busy", isWriting); // read out when it is whole, not word by word
}

function areSettingsRight() {
  if ($("settings").checkValidity()) return true;
  $("settings-panel").open = true; // a field in a closed panel cannot say what is wrong with it
  $("settings").reportValidity();
  return false;
}

async function send() {
  const text = $("prompt").value;
  if (writing || !text.trim() || !areSettingsRight()) return;
  const controller = new AbortController();
  setWriting(controller);
  $("error").textContent = "";
  for (const id of ["first-token", "answer-speed"]) $(id).textContent = "–";
  $("state").textContent = "Waiting for the first token …";
  $("prompt").value = "";
  let answer = null;
  let end = "";
  let isWhole = false;
  try {
    if (info === null) await look();
    const asked = addTurn("user", text).turn;
    answer = { asked, text: "", isBegun: false, ...addTurn("assistant", "") };
    $("log").scrollTop = $("log").scrollHeight;
    end = await write(text, answer, controller.signal);
    isWhole = true;
  } catch (error) {
    end = controller.signal.aborted ? "Stopped." : "";
    if (!end) showError(error);
  } finally {
    keep(text, answer, isWhole);
    $("state").textContent = end;
    setWriting(null);
  }
}

// What was answered becomes part of the conversation; a message without an answer goes back to where it was typed.
function keep(text, answer, isWhole) {
  if (isWhole || answer?.isBegun) {
    turns.push({ role: "user", content: text }, { role: "assistant", content: answer.text });
    if (!isWhole) answer.turn.append(element("p", "This answer is not whole.", "note"));
    return;
  }
  answer?.asked.remove();
  answer?.turn.remove();
  if (!$("prompt").value) $("prompt").value = text;
}

function showError(error) {
  $("error").textContent = error instanceof ServerError ? error.message : `The page failed: ${error.message}`;
  if (error.status === 401) {
    $("settings-panel").open = true;
    $("key").focus();
  }
}

function clear() {
  if (writing) return;
  turns = [];
  $("log").replaceChildren();
  $("error").textContent = $("state").textContent = "";
  $("prompt").focus();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("prompt").addEventListener("keydown", (event) => {
  // an Enter that ends the composing of a character sends nothing
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing) writing?.abort();
});
$("stop").addEventListener("click", () => writing?.abort());
$("clear").addEventListener("click", clear);
$("key").addEventListener("change", () => look().catch(showError));

if (matchMedia("(min-width: 60rem)").matches) {
  for (const panel of document.querySelectorAll("aside > details")) panel.open = true;
}
poll();
