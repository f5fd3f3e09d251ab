// The timeline: a row per worker, lane and source. An event is an index into its row's columns.
const DENSE = DATA.workers.length > 16;
const ROW = DENSE ? { compute: 12, send: 3, receive: 3, "all-reduce": 3 } : { compute: 22, send: 9, receive: 9, "all-reduce": 9 };
const TOP = 24;
const GAP = DENSE ? 5 : 8;

// The data has steps between starts in ticks, and one value for a column that has no other.
function expanded(row) {
  let at = 0;
  const start = row.step.map((step) => (at += step) * DATA.tick_s);
  const column = (given) => (Array.isArray(given) ? given : new Array(start.length).fill(given));
  const columns = Object.fromEntries(["kind", "stage", "minibatch", "microbatch", "peer"].map((name) => [name, column(row[name])]));
  return { ...row, ...columns, start, end: row.length.map((length, i) => start[i] + length * DATA.tick_s) };
}
function place(workers) {
  let y = TOP;
  const rows = [];
  for (const worker of workers) {
    worker.y = y;
    for (const row of worker.rows) {
      rows.push({ ...expanded(row), worker, y, height: ROW[row.lane] });
      y += ROW[row.lane] + 1;
    }
    worker.bottom = y;
    y += GAP;
  }
  return { rows, height: y };
}
// The first event that ends after a time. Within a row, events that start later end later, so bisection finds it.
function firstAfter(row, time) {
  let low = 0;
  let high = row.end.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (row.end[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}
function nameOf(row, i) {
  const kind = DATA.kinds[row.kind[i]];
  const once = kind.once || DATA.microbatches === 1;
  const chunk = "'".repeat(Math.floor(row.stage[i] / DATA.pipeline_length));
  return `${kind.letter}${row.minibatch[i]}${once ? "" : `.${row.microbatch[i]}`}${chunk}`;
}
// The lengths of an event's microbatch, where they vary.
const LENGTHS = Object.fromEntries(
  Object.entries(DATA.lengths).map(([source, { rows }]) => [source, new Map(rows.map(([a, b, ...found]) => [`${a}.${b}`, found]))])
);
function lengthsOf(row, i) {
  if (!LENGTHS[row.source] || DATA.kinds[row.kind[i]].once) return "";
  const found = LENGTHS[row.source].get(`${row.minibatch[i]}.${row.microbatch[i]}`);
  return found ? `, ${found.map((length, each) => `${DATA.lengths[row.source].names[each]} ${length}`).join(", ")}` : "";
}
function describe(row, i) {
  const kind = DATA.kinds[row.kind[i]];
  const of = kind.once ? `round ${row.minibatch[i]}` : `minibatch ${row.minibatch[i]}`;
  const micro = kind.once || DATA.microbatches === 1 ? "" : `, microbatch ${row.microbatch[i]}`;
  const peer = row.peer[i] < 0 ? "" : ` ${row.lane === "send" ? "to" : "from"} worker ${row.peer[i]}`;
  const length = seconds(row.end[i] - row.start[i]);
  return [
    `${nameOf(row, i)}: ${kind.text} of ${of}${micro}${lengthsOf(row, i)}${peer}`,
    `stage ${row.stage[i]} on worker ${row.worker.rank}, ${row.source}`,
    `${seconds(row.start[i])} to ${seconds(row.end[i])}, ${length}`,
  ];
}

class Timeline {
  constructor(box, output) {
    this.box = box;
    this.output = output;
    this.tip = box.querySelector(".tip");
    this.chosen = null;
    const { rows, height } = place(DATA.workers);
    this.rows = rows;
    firstForwards(rows);
    this.canvas = new Canvas(box, height, (pen, canvas) => this.draw(pen, canvas));
    view.listeners.push(() => this.tell());
    this.listen();
    this.tell();
  }
  tell() {
    this.box.dataset.from = view.from;
    this.box.dataset.to = view.to;
    this.box.dataset.shift = alignment.shift;
  }
  draw(pen, canvas) {
    const right = canvas.width - canvas.gutter;
    if (DATA.steady) {
      pen.fillStyle = colour("--steady");
      const from = Math.max(canvas.x(DATA.steady[0]), canvas.gutter);
      const to = Math.min(canvas.x(DATA.steady[1]), canvas.width);
      if (to > from) pen.fillRect(from, TOP, to - from, canvas.height - TOP);
    }
    canvas.axis(pen, TOP);
    pen.save();
    pen.beginPath();
    pen.rect(canvas.gutter, 0, right, canvas.height);
    pen.clip();
    for (const row of this.rows) this.drawRow(pen, canvas, row);
    this.drawChosen(pen, canvas);
    pen.restore();
    this.drawNames(pen, canvas);
  }
  drawRow(pen, canvas, row) {
    let painted = -1; // events that share a pixel are painted once
    pen.font = `12px ${FONT}`;
    pen.textAlign = "center";
    const shift = shiftOf(row.source);
    for (let i = firstAfter(row, view.from - shift); i < row.start.length && row.start[i] + shift < view.to; i += 1) {
      const x = canvas.x(row.start[i] + shift);
      const width = canvas.x(row.end[i] + shift) - x;
      if (width < 0.6 && Math.floor(x) === painted) continue;
      painted = Math.floor(x);
      pen.fillStyle = DATA.kinds[row.kind[i]].colour;
      pen.fillRect(x, row.y, Math.max(width - (width > 3 ? 1 : 0), 0.8), row.height);
      if (row.height < 15 || width < 18) continue;
      const name = nameOf(row, i);
      const left = Math.max(x, canvas.gutter);
      const right = Math.min(x + width, canvas.width);
      if (pen.measureText(name).width > right - left - 4) continue;
      pen.fillStyle = DATA.kinds[row.kind[i]].ink;
      pen.fillText(name, (left + right) / 2, row.y + row.height / 2 + 1);
    }
  }
  drawChosen(pen, canvas) {
    if (!this.chosen) return;
    const { row, i } = this.chosen;
    pen.strokeStyle = colour("--fg");
    pen.lineWidth = 2;
    const x = canvas.x(row.start[i] + shiftOf(row.source));
    pen.strokeRect(x, row.y, Math.max(canvas.x(row.end[i] + shiftOf(row.source)) - x, 2), row.height);
  }
  drawNames(pen, canvas) {
    const narrow = canvas.gutter < 60;
    pen.textAlign = "left";
    for (const worker of DATA.workers) {
      pen.fillStyle = colour("--fg");
      pen.font = `600 12px ${FONT}`;
      pen.fillText(narrow ? `w${worker.rank}` : `worker ${worker.rank}`, 6, worker.y + 11);
      if (worker.bottom - worker.y < 30) continue;
      pen.fillStyle = colour("--muted");
      pen.font = `11px ${FONT}`;
      pen.fillText(narrow ? `s${worker.stages}` : `stage ${worker.stages}`, 6, worker.y + 25);
    }
    if (!paired) return;
    for (const row of this.rows) {
      pen.fillStyle = colour(row.source === "measured" ? "--measured" : "--memory");
      pen.fillRect(0, row.y, 3, row.height + 1);
      if (row.lane !== "compute" || DENSE) continue;
      pen.fillStyle = colour("--muted");
      pen.font = `11px ${FONT}`;
      const name = narrow ? row.source.slice(0, 3) : row.source;
      pen.fillText(name, 6, row.source === "measured" ? row.y + row.height / 2 : row.y + 38);
    }
  }
  find(x, y) {
    const row = this.rows.find((candidate) => y >= candidate.y - 1 && y < candidate.y + candidate.height + 1);
    if (!row || x < this.canvas.gutter) return null;
    const slack = (2 * (view.to - view.from)) / this.canvas.width;
    const time = this.canvas.time(x) - shiftOf(row.source);
    const i = firstAfter(row, time - slack);
    return i < row.start.length && row.start[i] <= time + slack ? { row, i } : null;
  }
  choose(found, at) {
    this.chosen = found;
    this.box.dataset.event = found ? nameOf(found.row, found.i) : "";
    this.tip.hidden = !found || !at;
    if (found) {
      const lines = describe(found.row, found.i);
      this.output.textContent = lines.join("; ");
      if (at) {
        this.tip.textContent = lines.join("\n");
        const left = Math.min(at.x + 14, this.canvas.width - this.tip.offsetWidth - 4);
        const below = at.y + 18 + this.tip.offsetHeight < this.canvas.height;
        this.tip.style.left = `${Math.max(left, 4)}px`;
        this.tip.style.top = `${Math.max(below ? at.y + 18 : at.y - this.tip.offsetHeight - 10, 2)}px`;
      }
    }
    this.canvas.later();
  }
  step(by) {
    if (!this.chosen) return this.start();
    const { row, i } = this.chosen;
    const next = Math.min(Math.max(i + by, 0), row.start.length - 1);
    this.reveal(row, next);
  }
  reveal(row, i) {
    const shift = shiftOf(row.source);
    view.reveal(row.start[i] + shift, row.end[i] + shift);
    this.choose({ row, i });
  }
  start() {
    const row = this.rows.find((candidate) => candidate.start.length > 0);
    if (row) this.choose({ row, i: Math.min(firstAfter(row, view.from - shiftOf(row.source)), row.start.length - 1) });
  }
  change(by) {
    if (!this.chosen) return this.start();
    const { row, i } = this.chosen;
    const filled = this.rows.filter((candidate) => candidate.start.length > 0);
    const next = filled[Math.min(Math.max(filled.indexOf(row) + by, 0), filled.length - 1)];
    const time = row.start[i] + shiftOf(row.source) - shiftOf(next.source);
    this.reveal(next, Math.min(firstAfter(next, time), next.start.length - 1));
  }
  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const does = {
      "+": () => view.zoom(0.5),
      "=": () => view.zoom(0.5),
      "-": () => view.zoom(2),
      Home: () => view.set(0, view.span),
      Escape: () => this.choose(null),
      ArrowLeft: () => (event.shiftKey ? view.pan(-0.25) : this.step(-1)),
      ArrowRight: () => (event.shiftKey ? view.pan(0.25) : this.step(1)),
      ArrowUp: () => this.change(-1),
      ArrowDown: () => this.change(1),
    }[event.key];
    if (!does) return;
    event.preventDefault();
    does();
  }
  listen() {
    const pointers = new Map();
    const at = (event) => {
      const edge = this.box.getBoundingClientRect();
      return { x: event.clientX - edge.left, y: event.clientY - edge.top };
    };
    const spread = () => {
      const [one, other] = [...pointers.values()];
      return { middle: (one.x + other.x) / 2, gap: Math.max(Math.abs(one.x - other.x), 10) };
    };
    this.box.addEventListener("keydown", (event) => this.key(event));
    this.box.addEventListener("pointerdown", (event) => {
      pointers.set(event.pointerId, at(event));
      this.box.setPointerCapture(event.pointerId);
      if (event.pointerType !== "mouse") this.choose(this.find(at(event).x, at(event).y), at(event));
    });
    this.box.addEventListener("pointermove", (event) => {
      const now = at(event);
      const before = pointers.get(event.pointerId);
      if (!before) return this.choose(this.find(now.x, now.y), now);
      const pinched = pointers.size === 2 ? spread() : null;
      pointers.set(event.pointerId, now);
      if (pinched) view.zoom(pinched.gap / spread().gap, this.canvas.time(spread().middle));
      else view.pan((before.x - now.x) / (this.canvas.width - this.canvas.gutter));
    });
    for (const end of ["pointerup", "pointercancel"]) {
      this.box.addEventListener(end, (event) => pointers.delete(event.pointerId));
    }
    this.box.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") this.choose(null);
    });
    this.box.addEventListener(
      "wheel",
      (event) => {
        const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
        if (!sideways && event.deltaY > 0 && view.all) return; // zoomed out fully: let the page scroll
        event.preventDefault();
        if (sideways) view.pan(event.deltaX / this.canvas.width);
        else view.zoom(Math.exp(Math.sign(event.deltaY) * Math.min(Math.abs(event.deltaY), 120) * 0.003), this.canvas.time(at(event).x));
      },
      { passive: false },
    );
  }
}
