// The pictures: uPlot draws axes, lines and stairs; the bars of who was there are drawn into one of its plots.
"use strict";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const COLOURS = ["--line", "--line2", "--line3", "--line4"];
const charts = new Set();
const SIDE = 74; // width of the left axis; the same in pictures with one time axis
const AROUND = [null, 32, null, null]; // on the right half of the last time's label
const view = {log: false, smoothing: 0}; // of the curves: a logarithmic axis, and the weight of the values before

function smoothed(values, weight) { // an exponential mean, without bias at the beginning
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

function redrawn() {
  for (const chart of charts) if (chart instanceof Lines) chart.anew();
}
const tip = document.getElementById("tip");

function short(value) {
  if (value === null || value === undefined) return "unknown";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(3);
  return String(Number(value.toPrecision(5)));
}

function clock(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString([], {hour12: false});
}

function since(seconds) { // hours, minutes and seconds
  const parts = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60, Math.floor(seconds) % 60];
  if (!parts[0]) parts.shift();
  return parts.map((part, i) => (i ? String(part).padStart(2, "0") : part)).join(":");
}

function moments(ticks) {
  const long = ticks.length > 1 && ticks[ticks.length - 1] - ticks[0] > 86400;
  const date = {month: "short", day: "numeric"};
  return ticks.map((tick) => (long ? new Date(tick * 1000).toLocaleDateString([], date) + " " : "") + clock(tick));
}

function showTip(text, left, top) {
  tip.textContent = text;
  tip.hidden = !text;
  tip.style.left = Math.min(left + 12, innerWidth - tip.offsetWidth - 8) + "px";
  tip.style.top = Math.min(top + 14, innerHeight - tip.offsetHeight - 8) + "px";
}

class Chart {
  // `parent` is on the page. A picture that is not in sight waits until it is.
  constructor(parent, height) {
    this.parent = parent;
    this.height = height;
    this.plot = null;
    this.due = false;
    this.seen = true;
    charts.add(this);
    new ResizeObserver(() => this.plot && this.plot.setSize(this.size())).observe(parent);
    new IntersectionObserver(([entry]) => {
      this.seen = entry.isIntersecting;
      if (this.seen && this.due) this.draw();
    }).observe(parent);
  }

  size() { return {width: Math.max(this.parent.clientWidth, 100), height: this.height}; }

  axes(x, y) {
    const axis = {stroke: () => css("--dim"), grid: {stroke: () => css("--grid"), width: 1}, ticks: {show: false}};
    return [{...axis, size: 28, ...x}, {...axis, size: 62, ...y}];
  }

  make(options, data) {
    const cursor = {drag: {x: true, y: false}, points: {show: false}};
    this.plot = new uPlot({...this.size(), legend: {show: false}, cursor, ...options}, data, this.parent);
    const over = this.plot.over;
    over.addEventListener("mousemove", (event) => showTip(this.told(event) || "", event.clientX, event.clientY));
    over.addEventListener("mouseleave", () => showTip("", 0, 0));
  }

  changed() {
    this.due = true;
    if (this.seen) this.draw();
  }

  times(ticks) { // of runs that are compared, the time since each began
    return several ? ticks.map((tick) => since(tick - this.from)) : moments(ticks);
  }
}

class Lines extends Chart {
  // One number by step; of several runs a line each.
  constructor(parent, names) {
    super(parent, 190);
    this.names = names;
    this.lines = names.map(() => ({x: [], y: []}));
    this.marks = [];
    this.changes = []; // of each run, [step, what happened]
  }

  set(run, patch) {
    const {x, y} = this.lines[run];
    x.length = y.length = patch.at;
    for (let i = 0; i < patch.x.length; i++) { x.push(patch.x[i]); y.push(patch.y[i]); }
    this.changed();
  }

  spread() {
    const all = this.lines.flatMap((line) => line.y).filter((value) => value !== null);
    return all.reduce((most, value) => Math.max(most, value), 0) / all.reduce((least, value) => Math.min(least, value), Infinity);
  }

  anew() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
    this.changed();
  }

  draw() {
    this.due = false;
    const log = view.log && this.lines.every((line) => line.y.every((value) => value === null || value > 0));
    const each = this.lines.map((line) => [line.x, smoothed(line.y, view.smoothing)]);
    if (view.smoothing) each.push(...this.lines.map((line) => [line.x, line.y])); // as it is, pale
    const data = each.length === 1 ? each[0] : uPlot.join(each);
    if (this.plot && log === this.isLog) return this.plot.setData(data);
    if (this.plot) this.plot.destroy();
    this.isLog = log;
    const series = each.map((_, i) => ({
      label: this.names[i % this.names.length], stroke: () => css(COLOURS[(i % this.names.length) % COLOURS.length]),
      width: i < this.names.length ? 1.5 : 0.4, spanGaps: this.names.length > 1, points: {show: false},
    }));
    const ticks = (_, values) => values.map((value) => (value === null || value === undefined ? "" : short(value)));
    this.make({
      scales: {x: {time: false}, y: log ? {distr: 3} : {}}, axes: this.axes({}, {values: ticks}), series: [{}, ...series],
      hooks: {draw: [(plot) => this.drawChanges(plot), (plot) => this.drawMarks(plot)]},
    }, data);
  }

  drawChanges(plot) { // where workers came and went
    plot.ctx.save();
    plot.ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
    plot.ctx.lineWidth = devicePixelRatio;
    this.changes.forEach((steps, run) => {
      plot.ctx.strokeStyle = css(this.names.length > 1 ? COLOURS[run % COLOURS.length] : "--dim");
      for (const [step] of steps) {
        const at = plot.valToPos(step, "x", true);
        if (at < plot.bbox.left || at > plot.bbox.left + plot.bbox.width) continue;
        plot.ctx.beginPath();
        plot.ctx.moveTo(at, plot.bbox.top);
        plot.ctx.lineTo(at, plot.bbox.top + plot.bbox.height);
        plot.ctx.stroke();
      }
    });
    plot.ctx.restore();
  }

  drawMarks(plot) {
    plot.ctx.fillStyle = css("--lost");
    for (const [step] of this.marks) {
      plot.ctx.fillRect(plot.valToPos(step, "x", true) - 1, plot.bbox.top, 2 * devicePixelRatio, plot.bbox.height);
    }
  }

  told(event) {
    const index = this.plot.cursor.idx;
    if (index === null || index === undefined) return "";
    const values = this.names.map((name, i) => {
      const value = this.plot.data[i + 1][index];
      return value === null || value === undefined ? "" : (this.names.length > 1 ? name + " " : "") + short(value);
    }).filter(Boolean);
    const at = this.plot.posToVal(event.offsetX, "x");
    const near = this.marks.find(([step]) => Math.abs(this.plot.valToPos(step, "x") - event.offsetX) < 4);
    if (near) return "step " + near[0] + ": the loss is " + near[1];
    const change = this.changes.flat().find(([step]) => Math.abs(this.plot.valToPos(step, "x") - event.offsetX) < 3);
    if (change) return change[1];
    return "step " + (this.plot.data[0][index] ?? Math.round(at)) + ": " + (values.join(", ") || "not a number");
  }
}

class Stairs extends Chart {
  // How many workers were in the view, by time.
  constructor(parent) { super(parent, 110); this.x = []; this.y = []; this.from = 0; }

  add(points, from, now) {
    this.from = from;
    if (this.open) { this.x.pop(); this.y.pop(); }
    for (const [time, size] of points) { this.x.push(time); this.y.push(size); }
    this.open = this.x.length > 0;
    if (this.open) { this.x.push(Math.max(now, this.x[this.x.length - 1])); this.y.push(this.y[this.y.length - 1]); }
    this.changed();
  }

  draw() {
    this.due = false;
    const data = this.x[0] > this.from ? [[this.from, ...this.x], [0, ...this.y]] : [this.x, this.y];
    if (this.plot) return this.plot.setData(data);
    const whole = (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? String(tick) : ""));
    this.make({
      scales: {y: {range: (_, least, most) => [0, Math.max(1, most || 1) * 1.08]}},
      padding: AROUND,
      axes: this.axes({values: (_, ticks) => this.times(ticks), space: 90}, {values: whole, size: SIDE}),
      series: [{}, {stroke: () => css("--in"), fill: () => css("--coming"), width: 1.5, paths: uPlot.paths.stepped({align: 1}),
                    points: {show: false}}],
    }, data);
  }

  told() {
    const index = this.plot.cursor.idx;
    return index === null || index === undefined ? "" : this.times([this.plot.data[0][index]]) + ": " + this.plot.data[1][index] + " workers";
  }
}

class Timeline extends Chart {
  // Who was there, from when to when: a bar for each worker.
  constructor(parent) { super(parent, 100); this.stays = []; this.now = 0; this.from = 0; }

  rowHeight() { return Math.max(this.height - 44, 20) / Math.max(this.stays.length, 1); }

  set(stays, from, now) {
    this.stays = stays;
    this.from = from;
    this.now = now;
    const height = Math.min(Math.max(44 + 20 * stays.length, 90), 460);
    if (height !== this.height) {
      this.height = height;
      if (this.plot) this.plot.setSize(this.size());
    }
    this.changed();
  }

  draw() {
    this.due = false;
    const data = [[this.from, Math.max(this.now, this.from + 1)], [0, this.stays.length]];
    if (this.plot) return this.plot.setData(data);
    const names = (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) && this.stays[tick] ? this.stays[tick].worker : ""));
    const rows = () => {
      const every = Math.max(1, Math.ceil(this.stays.length / Math.max(1, Math.floor((this.height - 44) / 15))));
      return Array.from({length: Math.ceil(this.stays.length / every)}, (_, i) => i * every);
    };
    this.make({
      scales: {y: {range: () => [-0.5, Math.max(this.stays.length, 1) - 0.5], dir: -1}},
      padding: AROUND,
      axes: this.axes({values: (_, ticks) => this.times(ticks), space: 90}, {values: names, splits: rows, size: SIDE, grid: {show: false}}),
      series: [{}, {show: false}],
      hooks: {draw: [(plot) => this.bars(plot)]},
    }, data);
  }

  bars(plot) {
    const {ctx, bbox} = plot;
    const height = Math.max(1, Math.min(14, this.rowHeight() * 0.72)) * devicePixelRatio;
    const colour = {coming: css("--coming"), in: css("--in"), going: css("--going"), lost: css("--lost"), left: css("--dim")};
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    this.stays.forEach((stay, row) => {
      const end = stay.gone ?? this.now;
      const y = plot.valToPos(row, "y", true) - height / 2;
      const bar = (from, to, fill) => {
        if (from === null || to <= from) return;
        const left = plot.valToPos(from, "x", true);
        ctx.fillStyle = fill;
        ctx.fillRect(left, y, Math.max(plot.valToPos(to, "x", true) - left, 1), height);
      };
      bar(stay.came, stay.entered ?? end, colour.coming);
      bar(stay.entered, stay.notice ?? end, colour.in);
      bar(stay.notice, end, colour.going);
      if (stay.gone !== null && stay.how !== "end") {
        ctx.fillStyle = stay.how === "left" ? colour.left : colour.lost;
        ctx.fillRect(plot.valToPos(end, "x", true) - 2 * devicePixelRatio, y - 1, 4 * devicePixelRatio, height + 2);
      }
    });
    ctx.restore();
  }

  told(event) {
    const stay = this.stays[Math.round(this.plot.posToVal(event.offsetY, "y"))];
    const at = this.plot.posToVal(event.offsetX, "x");
    if (!stay || at < stay.came || at > (stay.gone ?? this.now)) return "";
    return life(stay);
  }
}

const HOW = {left: "left", lost: "lost", failed: "did not get in", end: "until the end"};

function life(stay) {
  const parts = [stay.worker + (stay.host ? " on " + stay.host : ""), "came " + clock(stay.came)];
  if (stay.entered !== null) parts.push("in the view from " + clock(stay.entered) + " (" + stay.cause + ")");
  if (stay.notice !== null) parts.push("had notice at " + clock(stay.notice));
  if (stay.gone !== null) parts.push(HOW[stay.how] + " " + clock(stay.gone) + (stay.why ? ": " + stay.why : ""));
  return parts.join("; ");
}

addEventListener("beforeprint", () => { // what is not in sight as well
  for (const chart of charts) if (chart.due) chart.draw();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of charts) if (chart.plot) chart.plot.redraw(false, true);
});
