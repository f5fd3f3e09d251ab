// Memory over time, a strip per worker, on the timeline's axis.
const STRIP = DENSE ? 30 : 62;

class Memory {
  constructor(box) {
    const held = DATA.memory.flatMap((strip) => strip.curves.flatMap((curve) => curve.held_bytes));
    const limits = DATA.memory.map((strip) => strip.limit_bytes).filter((limit) => limit !== null);
    this.peak = Math.max(...held, 1);
    // A limit far above the curves would press them flat, so it is not drawn.
    const limit = Math.max(...limits, 0);
    this.top = 1.08 * (limit > 0 && limit < 4 * this.peak ? Math.max(limit, this.peak) : this.peak);
    this.canvas = new Canvas(box, TOP + DATA.memory.length * (STRIP + GAP), (pen, canvas) => this.draw(pen, canvas));
  }
  draw(pen, canvas) {
    canvas.axis(pen, TOP);
    DATA.memory.forEach((strip, number) => this.drawStrip(pen, canvas, strip, TOP + number * (STRIP + GAP)));
  }
  drawStrip(pen, canvas, strip, top) {
    const y = (value) => top + STRIP * (1 - value / this.top);
    const narrow = canvas.gutter < 60;
    pen.fillStyle = colour("--line");
    pen.fillRect(0, top + STRIP, canvas.width, 1);
    pen.textAlign = "left";
    pen.fillStyle = colour("--fg");
    pen.font = `600 12px ${FONT}`;
    pen.fillText(narrow ? `w${strip.rank}` : `worker ${strip.rank}`, 6, top + 12);
    pen.fillStyle = colour("--muted");
    pen.font = `11px ${FONT}`;
    const peak = Math.max(...strip.curves.flatMap((curve) => curve.held_bytes));
    pen.fillText(bytes(peak), 6, top + 27);
    if (!narrow && !DENSE) pen.fillText("at most", 6, top + 41);
    pen.save();
    pen.beginPath();
    pen.rect(canvas.gutter, top, canvas.width - canvas.gutter, STRIP);
    pen.clip();
    for (const curve of strip.curves) this.drawCurve(pen, canvas, curve, y, top + STRIP);
    if (strip.limit_bytes !== null && strip.limit_bytes <= this.top) {
      pen.strokeStyle = colour("--limit");
      pen.setLineDash([6, 4]);
      pen.lineWidth = 1.5;
      pen.strokeRect(canvas.gutter - 2, y(strip.limit_bytes), canvas.width, 0);
      pen.setLineDash([]);
    }
    pen.restore();
  }
  drawCurve(pen, canvas, curve, y, bottom) {
    const measured = curve.source === "measured";
    pen.strokeStyle = colour(measured ? "--measured" : "--memory");
    pen.fillStyle = pen.strokeStyle;
    pen.lineWidth = 1.5;
    pen.beginPath();
    let last = null;
    const shift = shiftOf(curve.source);
    let first = canvas.gutter;
    let end = canvas.gutter; // a run's curve ends with the run
    for (let i = 0; i < curve.time_s.length; i += 1) {
      const since = curve.time_s[i] + shift;
      const until = shift + (i + 1 < curve.time_s.length ? curve.time_s[i + 1] : DATA.ends[curve.source]);
      if (until < view.from || since > view.to) continue;
      const x = canvas.x(Math.max(since, view.from));
      if (last === null) first = x;
      if (last === null) pen.moveTo(x, y(curve.held_bytes[i]));
      else pen.lineTo(x, last);
      last = y(curve.held_bytes[i]);
      pen.lineTo(x, last);
      end = canvas.x(Math.min(until, view.to));
      pen.lineTo(end, last);
    }
    pen.stroke();
    if (last === null || measured) return;
    pen.lineTo(end, bottom);
    pen.lineTo(first, bottom);
    pen.globalAlpha = 0.14;
    pen.fill();
    pen.globalAlpha = 1;
  }
}
