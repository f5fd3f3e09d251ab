// What all charts share: the data, the visible time range, colours and numbers.
const DATA = JSON.parse(document.getElementById("data").textContent);
const FONT = "system-ui, sans-serif";
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

class View {
  constructor(span) {
    this.span = span > 0 ? span : 1;
    this.from = 0;
    this.to = this.span;
    this.listeners = [];
  }
  set(from, to) {
    const length = Math.min(Math.max(to - from, this.span * 1e-5), this.span);
    this.from = Math.min(Math.max(from, 0), this.span - length);
    this.to = this.from + length;
    this.listeners.forEach((listener) => listener());
  }
  zoom(factor, at = (this.from + this.to) / 2) {
    this.set(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }
  pan(share) {
    const by = (this.to - this.from) * share;
    this.set(this.from + by, this.to + by);
  }
  reveal(start, end) {
    const length = this.to - this.from;
    if (start < this.from || end > this.to) this.set((start + end - length) / 2, (start + end + length) / 2);
  }
  get all() {
    return this.to - this.from >= this.span * 0.999999;
  }
}
const view = new View(DATA.span_s);
const paired = Object.keys(DATA.ends).length > 1;

// Runs are aligned by the first minibatch on show: later on, what a run is ahead or behind would hide all else.
const alignment = { on: paired, shift: 0, firsts: {} };
function firstForwards(rows) {
  for (const row of rows) {
    if (row.lane !== "compute") continue;
    const firsts = (alignment.firsts[row.source] ||= []);
    row.start.forEach((start, i) => {
      if (row.stage[i] !== 0 || DATA.kinds[row.kind[i]].letter !== "F") return;
      firsts[row.minibatch[i]] = Math.min(start, firsts[row.minibatch[i]] ?? Infinity);
    });
  }
}
function align() {
  const { simulated = [], measured = [] } = alignment.firsts;
  let shift = 0;
  simulated.some((start, number) => {
    if (measured[number] === undefined) return false;
    shift = start - measured[number];
    return start >= view.from;
  });
  alignment.shift = alignment.on ? shift : 0;
}
const shiftOf = (source) => (source === "measured" ? alignment.shift : 0);

const unitOf = (size) => (size >= 1 ? ["s", 1] : size >= 1e-3 ? ["ms", 1e3] : size >= 1e-6 ? ["µs", 1e6] : ["ns", 1e9]);
function seconds(value) {
  if (value === 0) return "0";
  const [unit, scale] = unitOf(Math.abs(value));
  return `${Number((value * scale).toPrecision(Math.abs(value * scale) >= 100 ? 5 : 4))} ${unit}`;
}
// A tick's label: all ticks of an axis have one unit, and as many digits as its step needs.
function label(time, step, last) {
  const [unit, scale] = unitOf(last);
  const digits = Math.max(0, -Math.floor(Math.log10(step * scale) + 1e-9));
  return time === 0 ? "0" : `${(time * scale).toFixed(Math.min(digits, 9))} ${unit}`;
}
function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let power = 0;
  while (power < 4 && value >= 999.5 * 1000 ** power) power += 1;
  return `${Number((value / 1000 ** power).toPrecision(3))} ${units[power]}`;
}
// Round steps (1, 2 or 5 times a power of ten), as many as fit with labels of width `each`.
function ticks(from, to, width, each) {
  const least = ((to - from) * each) / Math.max(width, each);
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((n) => n * power).find((candidate) => candidate >= least);
  const found = [];
  for (let n = Math.ceil(from / step); n * step <= to; n += 1) found.push(n * step);
  return { step, found };
}
// A canvas as wide as its box, sharp on any screen, and repainted when the view or the size changes.
class Canvas {
  constructor(box, height, draw) {
    this.box = box;
    this.canvas = box.querySelector("canvas");
    this.height = height;
    this.draw = draw;
    this.pending = false;
    new ResizeObserver(() => this.paint()).observe(box);
    view.listeners.push(() => this.later());
  }
  get width() {
    return printing ? 700 : this.box.clientWidth; // a page is narrower than a screen
  }
  get gutter() {
    return this.width < 560 ? 54 : 84;
  }
  x(time) {
    return this.gutter + ((time - view.from) / (view.to - view.from)) * (this.width - this.gutter);
  }
  time(x) {
    return view.from + ((x - this.gutter) / (this.width - this.gutter)) * (view.to - view.from);
  }
  later() {
    if (this.pending) return;
    this.pending = true;
    requestAnimationFrame(() => {
      this.pending = false;
      this.paint();
    });
  }
  paint() {
    if (this.width === 0) return;
    const scale = Math.max(window.devicePixelRatio || 1, printing ? 2 : 1);
    this.canvas.width = Math.round(this.width * scale);
    this.canvas.height = Math.round(this.height * scale);
    this.canvas.style.height = printing ? "auto" : `${this.height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.textBaseline = "middle";
    pen.fillStyle = colour("--bg");
    pen.fillRect(0, 0, this.width, this.height);
    this.draw(pen, this);
  }
  // The time axis along the top, its lines down to the bottom.
  axis(pen, height) {
    const { step, found } = ticks(view.from, view.to, this.width - this.gutter, 76);
    pen.font = `12px ${FONT}`;
    pen.textAlign = "center";
    for (const time of found) {
      const x = this.x(time);
      pen.fillStyle = colour("--line");
      pen.fillRect(Math.round(x), height, 1, this.height - height);
      pen.fillStyle = colour("--muted");
      const text = label(time, step, view.to);
      const half = pen.measureText(text).width / 2;
      if (x - half >= this.gutter - 4 && x + half <= this.width) pen.fillText(text, x, height / 2);
    }
  }
}
let printing = false;
