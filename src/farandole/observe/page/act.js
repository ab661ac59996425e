// What only a live page has: ticks as they come, what a person does to the run, and a worker's log.
"use strict";

let act = null; // what the question is about

function ask(question, verb, doing, wanted, isEnd = false) {
  act = doing;
  $("ask").returnValue = ""; // Escape leaves what the question before was answered
  $("question").textContent = question;
  $("yes").textContent = verb;
  $("yes").classList.toggle("end", isEnd);
  $("asked").hidden = wanted === undefined;
  if (wanted !== undefined) $("wanted").value = wanted;
  $("ask").showModal();
  (wanted === undefined ? $("no") : $("wanted")).focus();
}

$("ask").addEventListener("close", async () => {
  if ($("ask").returnValue !== "yes" || !act) return;
  const doing = act.do === "scale" ? {...act, wanted: Number($("wanted").value)} : act;
  const answer = await fetch("act", {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(doing)});
  say(answer.ok ? "" : await answer.text());
});

function say(words) {
  $("broken").textContent = words;
  $("broken").hidden = !words;
}

function actionsFor(id) {
  const cell = make("td", undefined, "row");
  const release = make("button", "Release ...");
  release.addEventListener("click", () => ask("Release " + id + "? It leaves after the step in hand, and another one comes " +
    "if as many are still wanted.", "Release", {do: "release", name: id}));
  const log = make("button", "Log");
  log.addEventListener("click", () => showLog(id));
  cell.append(release, log);
  return cell;
}

function actionsForHost(name, count) {
  const cell = make("td", undefined, "row");
  const release = make("button", "Release host ...");
  release.addEventListener("click", () => ask("Release " + name + "? Its workers, " + count + " of them, leave after the step in " +
    "hand.", "Release", {do: "release", name}));
  cell.append(release);
  return cell;
}

async function showLog(id) {
  const answer = await fetch("log?" + new URLSearchParams({worker: id}));
  $("log-name").textContent = "The end of " + id + "'s log";
  $("log-text").textContent = await answer.text();
  $("log").showModal();
  $("log-text").scrollTop = $("log-text").scrollHeight;
}

$("scale").addEventListener("click", () => ask("How many workers are wanted?", "Scale", {do: "scale"}, runs[0].head.wanted ?? 1));
$("stop").addEventListener("click", () => ask("Stop " + runs[0].name + "? All workers leave after the same step, and the state is " +
  "saved.", "Stop", {do: "stop"}, undefined, true));

// What the page has taken, in ms, for whoever asks (benchmarks/dashboard.py): the first picture until it was on the screen,
// and each tick after it.
const took = {first: null, ticks: []};

function measured(began) {
  const now = performance.now();
  if (took.first !== null) took.ticks.push(now - began);
  else requestAnimationFrame(() => setTimeout(() => {
    took.first = performance.now() - began;
    document.body.dataset.drawn = "yes";
  }));
  if (took.ticks.length > 1000) took.ticks.shift();
  document.body.dataset.ticks = took.ticks.length;
}

let latest = 0;
const ticks = new EventSource("ticks");
ticks.addEventListener("run", (event) => {
  if (runs.length) return location.reload(); // the connection was broken: from the beginning
  runs.push(new Run(0, JSON.parse(event.data)));
});
ticks.addEventListener("about", (event) => runs[0].facts(JSON.parse(event.data)));
ticks.addEventListener("reading", (event) => { $("word").textContent = "reading what has been: " + event.data; });
ticks.addEventListener("tick", (event) => {
  const began = performance.now();
  const tick = JSON.parse(event.data);
  apply(0, tick);
  $("actions").hidden = !runs[0].head.live;
  latest = tick.now;
  say("");
  measured(began);
});
ticks.onerror = () => say("No answer from the dashboard's process" +
  (latest ? "; this is how it was at " + clock(latest) : "") + ". Is `farandole dashboard` still on?");
