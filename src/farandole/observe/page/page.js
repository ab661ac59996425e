// A run, or several, on a page: `apply` takes a tick and changes what it says is new. All text is set as text.
"use strict";

const $ = (id) => document.getElementById(id);
const TITLES = {
  "step/loss": "Loss", "step/samples_per_second": "Throughput of each step, samples/s", "step/learning_rate": "Learning rate",
  "step/learning_rate_factor": "Factor of the learning rate", "step/samples": "Global batch, samples",
  "step/seconds": "A step's time, s", "step/workers": "Workers in a step",
};
const ORDER = Object.keys(TITLES);
// No picture of a value while its greatest over its least is no more than this: an epoch has a short last batch.
const EVEN = {"step/learning_rate_factor": 1.25, "step/samples": 1.25, "step/workers": 1.25, "step/learning_rate": 1};
const COLOUR_OF = { // of a class of time; green is training in all pictures, and red is what was lost
  compute: "--in", start: "--coming", exchange: "--line4", data: "--line2", pause: "--going", again: "--again", lost: "--lost",
  save: "--save", spare: "--spare", end: "--dim",
};
const GOOD = new Set(["training", "finished"]);
const BAD = new Set(["failed", "cut off", "stalled", "no answer"]);
const SHOWN = 300; // events
const ROWS = 50; // new ones at a time, so that the pictures are there first
const runs = [];
const pictures = {};
const changes = []; // of each run, the steps at which workers came and went, and what happened

function make(tag, text, cls) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (cls) element.className = cls;
  return element;
}

function panel(parent, title, note) {
  const section = make("section", undefined, "panel");
  const heading = make("h2", title);
  if (note) heading.append(" ", make("small", note));
  section.append(heading);
  parent.append(section);
  return section;
}

function chartIn(parent, title, note, name) {
  const section = panel(parent, title, note);
  section.dataset.picture = name;
  const place = make("div", undefined, "chart");
  section.append(place);
  return [section, place];
}

function duration(seconds) {
  if (seconds < 60) return seconds.toFixed(0) + " s";
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return minutes + " min";
  if (minutes < 1440) return Math.floor(minutes / 60) + " h " + (minutes % 60) + " min";
  return Math.floor(minutes / 1440) + " d " + (Math.floor(minutes / 60) % 24) + " h";
}

const percent = (part) => (100 * part).toFixed(1) + " %";
const money = (dollars) => "$" + (dollars >= 100 ? dollars.toFixed(0) : dollars.toPrecision(3));

class Run {
  constructor(number, name) {
    this.number = number;
    this.name = name;
    this.about = [];
    this.head = null;
    this.stays = [];
    this.rows = {};
    this.unmade = {};
    this.waiting = {};
    const title = several ? name : "";
    const spans = chartIn($("spans"), "Worker timeline" + (several ? ": " + title : ""),
                          "each worker: pale while it starts, green while it trains, yellow while it leaves; a red end: lost, a grey one: left", "spans-" + number);
    spans[0].classList.add("wide");
    spans[0].hidden = true; // in a single process no worker comes or goes
    spans[0].classList.add("above");
    this.timeline = new Timeline(spans[1]);
    this.list = make("details");
    this.list.append(make("summary", "the same in words"), this.lives = make("ol"));
    spans[0].append(this.list);
    this.list.addEventListener("toggle", () => this.words());
    const stairs = chartIn($("spans"), "Workers over time" + (several ? ": " + title : ""), "", "workers-" + number);
    stairs[0].classList.add("wide");
    stairs[0].hidden = true;
    this.stairs = new Stairs(stairs[1]);
    this.place = make("div");
    $("runs").append(this.place);
    if (several) this.place.append(make("h2", name));
    const grid = make("div", undefined, "pair lower");
    this.place.append(grid);
    this.bill = panel(grid, "Where the workers' time went");
    this.pauses = panel(grid, "What each change cost", "beyond the median step");
    this.pauses.hidden = true;
    this.pauses.append(this.pauseTable = this.table(["change", "at step", "ms"], [2, 3]));
    this.pauseTable.classList.add("stack");
    this.staff = panel(this.place, "Workers");
    this.staff.classList.add("wide");
    this.staff.classList.add("lower");
    this.staff.hidden = true;
    this.staff.append(this.staffTable = this.table(["worker", "host", "state", "speed", "shards", "waits for data", ""], [4, 5, 6]));
    this.staff.append(this.hostTable = this.table(["host", "workers", ""], [2]));
    this.hostTable.hidden = true;
    for (const table of [this.staffTable, this.hostTable]) table.classList.add("stack");
    this.happened = panel(this.place, "What happened");
    this.happened.classList.add("wide");
    this.happened.classList.add("lower");
    this.happened.append(this.events = this.table(["time", "event"], []));
    this.events.classList.add("events");
    this.events.tabIndex = 0;
  }

  table(titles, numbers) {
    const scroll = make("div", undefined, "scroll");
    const table = make("table");
    const row = make("tr");
    titles.forEach((title, i) => row.append(make("th", title, numbers.includes(i + 1) ? "number" : "")));
    scroll.titles = titles;
    table.append(make("thead"), make("tbody"));
    table.tHead.append(row);
    scroll.append(table);
    return scroll;
  }

  facts(about) {
    this.about = about;
    this.ran ??= panel(this.place, "What it runs on");
    this.ran.classList.add("lower");
    const table = make("table", undefined, "facts");
    for (const [name, value] of this.about) {
      const row = make("tr");
      row.append(make("th", name), make("td", value));
      table.append(row);
    }
    this.ran.replaceChildren(this.ran.firstChild, table);
  }

  apply(tick) {
    if (tick.head) this.head = tick.head;
    for (const [number, stay] of Object.entries(tick.stays)) this.stays[number] = stay;
    const now = this.head.live ? tick.now : (this.head.ended ?? tick.now);
    if (this.stays.length) {
      this.timeline.parent.parentElement.hidden = false;
      this.timeline.set(this.stays, this.head.began, now);
    }
    if (Object.keys(tick.stays).length) this.words();
    if (tick.sizes.length || this.stairs.open) {
      this.stairs.parent.parentElement.hidden = false;
      this.stairs.add(tick.sizes, this.head.began, now);
    }
    for (const [name, patch] of Object.entries(tick.series)) {
      const picture = line(name);
      picture.set(this.number, patch);
      const section = picture.parent.parentElement;
      if (section.hidden && picture.spread() > EVEN[name]) section.hidden = false;
    }
    if (tick.unfinite && pictures["step/loss"]) {
      pictures["step/loss"].marks = tick.unfinite;
      pictures["step/loss"].changed();
    }
    if (tick.bill) this.account(tick.bill);
    if (tick.pauses) this.paused(tick.pauses);
    this.rowsChanged(tick.workers);
    this.said(tick.events);
  }

  words() {
    if (this.list.open) this.lives.replaceChildren(...this.stays.slice(-SHOWN).map((stay) => make("li", life(stay))));
  }

  account(bill) {
    this.paid = bill;
    this.waiting = bill.waiting;
    const total = bill.classes.reduce((sum, each) => sum + each.seconds, 0) || 1;
    const share = make("div", undefined, "share");
    const table = make("table");
    const none = [];
    bill.classes.forEach((each) => {
      if (Math.round(each.seconds) === 0) return none.push(each.name);
      const colour = "var(" + (COLOUR_OF[each.name] ?? "--dim") + ")";
      const part = make("div");
      part.style.width = (100 * each.seconds) / total + "%";
      part.style.background = colour;
      part.title = each.name + " " + percent(each.seconds / total);
      share.append(part);
      const row = make("tr");
      const name = make("td", each.name);
      const swatch = make("span", undefined, "swatch");
      swatch.style.background = colour;
      name.prepend(swatch);
      row.append(name, make("td", percent(each.seconds / total), "number"), make("td", duration(each.seconds), "number"),
                 make("td", each.meaning, "dim"));
      table.append(row);
    });
    const heading = this.bill.firstChild;
    const words = make("p");
    words.textContent = bill.classes.length ? cost(bill) : "Nothing is known of it yet.";
    if (none.length) words.prepend(make("span", "None: " + none.join(", ") + ". ", "dim"));
    this.bill.replaceChildren(heading, share, table, words);
  }

  paused(pauses) {
    this.pauses.hidden = pauses.length === 0;
    const rows = pauses.slice(-SHOWN).reverse().map((pause) => {
      const row = make("tr");
      row.append(make("td", pause.words, "sentence"), make("td", pause.step, "number"),
                 make("td", pause.pause_ms.toFixed(0), "number"));
      return row;
    });
    rows.forEach((row) => titled(row, this.pauseTable.titles));
    this.pauseTable.querySelector("tbody").replaceChildren(...rows);
    changes[this.number] = pauses.slice(-SHOWN).map((pause) => [pause.step, pause.words]);
    for (const picture of Object.values(pictures)) picture.changed();
  }

  rowsChanged(workers) {
    const body = this.staffTable.querySelector("tbody");
    let moved = false;
    let room = ROWS;
    this.unmade = {...this.unmade, ...workers};
    for (const [id, told] of Object.entries(this.unmade)) {
      if (told !== null && !this.rows[id] && room-- <= 0) continue;
      delete this.unmade[id];
      if (told === null) {
        if (this.rows[id]) this.rows[id].remove();
        delete this.rows[id];
        moved = true;
        continue;
      }
      let row = this.rows[id];
      if (!row) {
        row = this.rows[id] = make("tr");
        row.append(...["", "", "", "number", "number", "number"].map((cls) => make("td", "", cls)), actionsFor(id));
        titled(row, this.staffTable.titles);
        body.append(row);
        moved = true;
      }
      const [state, host, speed, shards, of] = told;
      const waits = this.waiting[id];
      const texts = [id, host, state, speed === null ? "" : speed.toFixed(2), of ? shards + " of " + of : "",
                     waits === undefined ? "" : percent(waits)];
      for (let i = 0; i < texts.length; i++) {
        if (row.cells[i].textContent !== texts[i]) row.cells[i].textContent = texts[i];
      }
    }
    this.staff.hidden = body.rows.length === 0;
    if (moved) this.hosts();
    if (Object.keys(this.unmade).length) setTimeout(() => this.rowsChanged({}));
  }

  hosts() {
    // Where there are several, each can be let go as a whole.
    const counts = {};
    for (const row of Object.values(this.rows)) {
      const host = row.cells[1].textContent;
      counts[host] = (counts[host] ?? 0) + 1;
    }
    const names = Object.keys(counts);
    this.hostTable.hidden = names.length < 2;
    if (names.length < 2) return;
    this.hostTable.querySelector("tbody").replaceChildren(...names.sort().map((name) => {
      const row = make("tr");
      row.append(make("td", name), make("td", counts[name], "number"), actionsForHost(name, counts[name]));
      return titled(row, this.hostTable.titles);
    }));
  }

  said(events) {
    const body = this.events.querySelector("tbody");
    for (const [, time, kind, words] of events) {
      const row = make("tr", undefined, /lost|failed|wrong|differ|stalled|damaged|unfed|not /.test(kind) ? "bad" : "");
      row.append(make("td", clock(time)), make("td", words));
      body.prepend(row);
    }
    while (!frozen && body.rows.length > SHOWN) body.lastChild.remove();
  }
}

function titled(row, titles) { // where there is no room for columns, each cell has its title beside it
  for (let i = 0; i < row.cells.length; i++) row.cells[i].dataset.title = titles[i];
  return row;
}

function priced(bill) { // prices are known of some host
  return Boolean(bill && (bill.dollars !== null || bill.date || bill.at_least));
}

function rate(samples) { // as in `gauges.rate_words`
  if (samples === null || samples === undefined) return "unknown";
  return samples >= 100 ? String(Math.round(samples)) : short(Number(samples.toPrecision(3)));
}

function cost(bill) {
  const parts = ["Goodput " + (bill.goodput === null ? "unknown" : percent(bill.goodput)) + ".",
                 rate(bill.worker_hours) + " worker-hours" + (!priced(bill) ? "" : bill.dollars === null ? ", dollars unknown"
                   + (bill.at_least ? " (at least " + money(bill.at_least) + ")" : "") : ", " + money(bill.dollars)) + "."];
  if (bill.static_hours !== null) {
    parts.push("For comparison: " + bill.most + " workers, the most that it had, from its beginning to its end would have been " +
               rate(bill.static_hours) + " worker-hours" + (bill.static_dollars === null ? "" : ", " + money(bill.static_dollars)) + ".");
  }
  return parts.join(" ");
}

function line(name) {
  if (!pictures[name]) {
    const [section, place] = chartIn($("lines"), TITLES[name] ?? name, "by step", name);
    section.style.order = ORDER.includes(name) ? ORDER.indexOf(name) * 2 : 1; // what the script logs comes after the loss
    pictures[name] = new Lines(place, runs.map((run) => run.name));
    section.hidden = name in EVEN;
    pictures[name].changes = changes;
    $("tools").hidden = false;
  }
  return pictures[name];
}

function card(title, big, small) {
  const element = make("div", undefined, "card");
  element.append(make("div", title, "title"), make("div", big, "big"));
  if (small) element.append(make("div", small, "small dim"));
  return element;
}

function glance(run, now) {
  const {head, paid} = run;
  const chip = $("state");
  $("name").textContent = head.run;
  document.title = head.state + " " + head.run;
  chip.textContent = head.state;
  chip.className = "chip " + (GOOD.has(head.state) ? "good" : BAD.has(head.state) ? "bad" : "odd");
  $("word").textContent = head.word;
  const most = paid && paid.most ? "at most " + paid.most : "";
  const workers = head.live ? head.size + (head.wanted === null ? "" : " of " + head.wanted) : paid && paid.most ? paid.most : "unknown";
  const done = head.total ? head.step / head.total : null;
  const progress = card("Steps", head.step === null ? "none yet" : head.step + (head.total ? " of " + head.total : ""),
                        [done === null ? "" : percent(done), head.epoch === null ? "" : "epoch " + head.epoch].filter(Boolean).join(", "));
  if (done !== null) {
    const bar = make("progress");
    bar.value = done;
    bar.setAttribute("aria-label", "steps taken");
    progress.append(bar);
  }
  const gone = head.last_gone;
  const ago = gone && head.live ? duration(Math.max(0, now - gone.time)) + " ago" : gone ? "at " + clock(gone.time) : "";
  const last = gone ? card("Who left last", gone.worker + " " + (gone.how === "lost" ? "was lost" : "left"),
                           ago + ": " + gone.why) : card("Who left last", "nobody", "");
  const goodput = !paid || paid.goodput === null ? "" : "goodput " + percent(paid.goodput);
  const hours = !paid || paid.worker_hours === null ? "" : rate(paid.worker_hours) + " worker-hours";
  const ran = head.began === null ? null : (head.live ? now : head.ended) - head.began;
  const learning = head.learning_rate === null ? "" : ", learning rate " + short(head.learning_rate) +
    (head.factor === null || head.factor === 1 ? "" : " x " + short(head.factor));
  $("cards").replaceChildren(
    progress,
    head.live ? card("Time left", head.left_s === null ? "unknown" : duration(head.left_s), ran === null ? "" : "running for " + duration(ran))
              : card("Time", ran === null ? "unknown" : duration(ran), head.ended === null ? "" : "ended at " + clock(head.ended)),
    card("Loss", short(head.loss), (head.batch === null ? "" : "batch " + head.batch) + learning),
    card("Throughput, samples/s", head.samples_per_s === null ? "unknown" : rate(head.samples_per_s), "newest 50 steps"),
    card("Workers", workers, head.live ? ["now, of those wanted", most].filter(Boolean).join("; ") : "the most at a time"),
    last,
    priced(paid) ? card("Cost", paid.dollars === null ? "unknown" : money(paid.dollars), [goodput, hours].filter(Boolean).join(", "))
                 : card("Goodput", goodput ? percent(paid.goodput) : "unknown", hours),
  );
  for (const [hosts, figures] of head.slow_links) $("cards").append(card("Slow link", hosts, figures));
  if (head.bits) $("cards").append(card("Bits", head.bits, ""));
  $("foot").textContent = head.fingerprint ? "fingerprint " + head.fingerprint : "";
}

function compare() {
  const rows = [
    ["state", (r) => r.head.state], ["why", (r) => r.head.word],
    ["steps", (r) => short(r.head.step)], ["loss at the end", (r) => short(r.head.loss)],
    ["time", (r) => (r.head.began === null ? "unknown" : duration(r.head.ended - r.head.began))],
    ["most workers", (r) => r.paid.most], ["worker-hours", (r) => short(r.paid.worker_hours)],
    ["goodput", (r) => (r.paid.goodput === null ? "unknown" : percent(r.paid.goodput))],
    ["dollars", (r) => (r.paid.dollars === null ? "unknown" : money(r.paid.dollars))],
    ["losses of workers", (r) => r.stays.filter((stay) => stay.how === "lost").length],
    ["fingerprint", (r) => r.head.fingerprint || "unknown"],
    ["same bits", (r) => (r === runs[0] || !r.head.fingerprint || !runs[0].head.fingerprint ? ""
      : r.head.fingerprint === runs[0].head.fingerprint ? "yes" : "NO")],
    ...Object.keys(Object.assign({}, ...runs.map((run) => Object.fromEntries(run.about)))).map(
      (name) => [name, (r) => Object.fromEntries(r.about)[name] ?? ""]),
  ];
  const table = $("compared").querySelector("table");
  const titles = make("tr");
  titles.append(make("th", ""), ...runs.map((run, i) => {
    const title = make("th", run.name);
    title.style.color = "var(" + COLOURS[i % COLOURS.length] + ")";
    return title;
  }));
  table.replaceChildren(titles, ...rows.map(([name, value]) => {
    const row = make("tr");
    row.append(make("th", name), ...runs.map((run) => make("td", value(run))));
    return titled(row, ["", ...runs.map((run) => run.name)]);
  }));
  $("key").replaceChildren(...runs.map((run, i) => {
    const entry = make("span", run.name);
    const swatch = make("span", undefined, "swatch");
    swatch.style.background = "var(" + COLOURS[i % COLOURS.length] + ")";
    entry.prepend(swatch);
    return entry;
  }));
  $("compared").hidden = false;
}

function apply(number, tick) {
  runs[number].apply(tick);
  if (number === 0) glance(runs[0], tick.now);
}

const content = $("content") ? JSON.parse($("content").textContent) : null;
const frozen = content !== null;
const several = frozen && content.length > 1;
$("log-scale").addEventListener("change", (event) => { view.log = event.target.checked; redrawn(); });
$("smoothing").addEventListener("input", (event) => { view.smoothing = event.target.value / 10; redrawn(); });
if (frozen) {
  content.forEach((each, i) => runs.push(new Run(i, each.tick.head.run)));
  content.forEach((each, i) => runs[i].facts(each.about));
  content.forEach((each, i) => apply(i, each.tick));
  if (several) compare();
  const only = decodeURIComponent(location.hash).match(/^#only=(.*)$/);
  if (only) {
    document.body.classList.add("only");
    for (const section of document.querySelectorAll("[data-picture]")) {
      const shown = section.dataset.picture === only[1];
      section.classList.add(shown ? "shown" : "hidden");
      if (shown) section.closest("main > *").classList.add("shown");
    }
  }
}
