"use strict";

const $ = (id) => document.getElementById(id);
let messages = [];
let key = sessionStorage.getItem("key") || "";
let running = null;

function headers() {
  const out = { "Content-Type": "application/json" };
  if (key) out.Authorization = "Bearer " + key;
  return out;
}

function say(text, isError = false) {
  $("status").textContent = text;
  $("status").className = isError ? "error" : "";
}

function add(tag, parent, className, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  parent.append(element);
  return element;
}

async function failure(response) {
  if (response.status === 401) $("keyrow").hidden = false;
  try {
    return (await response.json()).error.message;
  } catch {
    return "HTTP " + response.status;
  }
}

let loads = 0;

async function loadModels() {
  const mine = ++loads;
  try {
    const response = await fetch("v1/models", { headers: headers() });
    // What an earlier key was answered must not undo what a later one was.
    if (mine !== loads) return;
    if (!response.ok) throw new Error(await failure(response));
    const models = (await response.json()).data;
    $("model").replaceChildren(...models.map((model) => new Option(model.id, model.id)));
    $("keyrow").hidden = true;
    say("");
  } catch (error) {
    if (mine === loads) say(error.message, true);
  }
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection ended before the answer did");
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: ?/, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

/** One answer on the page: reasoning folded above the content, the rate below. */
class Answer {
  constructor() {
    this.content = "";
    this.tokens = 0;
    this.article = add("article", $("log"), "assistant");
  }

  take(delta) {
    const log = $("log");
    const follow = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    if (delta.reasoning_content) {
      if (!this.reasoning) {
        const details = add("details", this.article, "reasoning");
        this.summary = add("summary", details, "", "Thinking…");
        this.reasoning = add("p", details, "");
      }
      this.reasoning.append(delta.reasoning_content);
    }
    if (delta.content) {
      if (this.summary) this.summary.textContent = "Thoughts";
      this.text ||= add("p", this.article, "text");
      this.text.append(delta.content);
      this.content += delta.content;
    }
    if (delta.content || delta.reasoning_content) {
      this.first ||= performance.now();
      this.last = performance.now();
      this.tokens += 1;
    }
    if (follow) log.scrollTop = log.scrollHeight;
  }

  end(note, usage) {
    if (this.summary) this.summary.textContent = "Thoughts";
    const tokens = usage ? usage.completion_tokens : this.tokens;
    const seconds = (this.last - this.first) / 1000;
    const rate = tokens > 1 && seconds > 0 ? `, ${((tokens - 1) / seconds).toFixed(1)} tok/s` : "";
    add("p", this.article, "rate", `${tokens} tokens${rate}${note ? ", " + note : ""}`);
  }
}

async function answer() {
  running = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  say("");
  const talk = messages;
  const shown = new Answer();
  let usage = null;
  let note = "";
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: headers(),
      signal: running.signal,
      body: JSON.stringify({
        model: $("model").value || undefined,
        messages: talk,
        stream: true,
        stream_options: { include_usage: true },
        ...($("think").checked ? {} : { enable_thinking: false }),
      }),
    });
    if (!response.ok) throw new Error(await failure(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) usage = event.usage;
      for (const choice of event.choices) {
        shown.take(choice.delta);
        if (choice.finish_reason === "length") note = "cut off";
      }
    }
  } catch (error) {
    note = error.name === "AbortError" ? "stopped" : "failed";
    if (note === "failed") say(error.message, true);
  }
  shown.end(note, usage);
  if (shown.content) talk.push({ role: "assistant", content: shown.content });
  else talk.pop();
  running = null;
  $("send").hidden = false;
  $("stop").hidden = true;
  $("text").focus();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running) return;
  $("text").value = "";
  messages.push({ role: "user", content: text });
  add("p", add("article", $("log"), "user"), "text", text);
  $("log").scrollTop = $("log").scrollHeight;
  answer();
});
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running && running.abort());
$("clear").addEventListener("click", () => {
  if (running) running.abort();
  messages = [];
  $("log").replaceChildren();
});
$("usekey").addEventListener("click", () => {
  key = $("key").value;
  sessionStorage.setItem("key", key);
  loadModels();
});
loadModels();
