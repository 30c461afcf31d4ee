// Curves over the steps, with values to read and alerts marked.

const HEIGHT = 230;
// Null in these means a number that was not finite, in others that there was nothing to measure.
const BREAKS_ARE_FAULTS = new Set(["loss", "validation", "grad_norm"]);
const FROM_ZERO = new Set(["bytes", "seconds", "count"]);

class Curves {
  constructor(box, plot) {
    this.plot = plot;
    this.box = box;
    this.whole = false;
    this.log = false;
    this.tools = element("div", "tools");
    this.wholeButton = this.button("whole range", () => { this.whole = !this.whole; });
    this.logButton = this.button("log scale", () => { this.log = !this.log; });
    this.area = element("div", "area");
    this.area.tabIndex = 0;
    this.area.setAttribute("role", "img");
    this.area.setAttribute("aria-label", `${box.closest("figure").querySelector("h3").textContent}; arrow keys read values`);
    this.tip = element("div", "tip");
    this.tip.hidden = true;
    this.tip.setAttribute("aria-live", "polite");
    box.closest("figure").prepend(this.tools);
    box.append(this.area);
    this.area.addEventListener("pointermove", (event) => this.point(event));
    this.area.addEventListener("pointerdown", (event) => this.point(event));
    this.area.addEventListener("pointerleave", () => this.leave());
    this.area.addEventListener("blur", () => this.leave());
    this.area.addEventListener("keydown", (event) => this.key(event));
  }

  button(label, change) {
    const made = element("button", "", label);
    made.type = "button";
    made.addEventListener("click", () => { change(); this.draw(); });
    this.tools.append(made);
    return made;
  }

  draw() {
    this.width = Math.max(260, this.area.clientWidth);
    this.area.style.aspectRatio = `${this.width} / ${HEIGHT}`;
    this.curves = this.plot.curves.filter((curve) => !hidden.has(curve.run));
    this.svg = node("svg", { viewBox: `0 0 ${this.width} ${HEIGHT}` });
    this.tip.hidden = true;
    this.area.replaceChildren(this.svg, this.tip);
    this.range();
    if (!this.curves.length) {
      this.svg.append(node("text", { x: 12, y: 24 }, "All runs of this plot are switched off."));
      return;
    }
    this.frame();
    this.marks();
    const order = { raw: 0, points: 1, line: 2 };
    for (const curve of [...this.curves].sort((a, b) => order[a.kind] - order[b.kind])) this.curve(curve);
    this.overlay = node("g");
    this.svg.append(this.overlay);
  }

  // The first tenth of the steps is often so steep that the rest would be flat: it may leave the picture.
  range() {
    const xs = this.curves.flatMap((curve) => [curve.x[0], curve.x[curve.x.length - 1]]);
    this.first = Math.min(...xs);
    this.last = Math.max(...xs);
    const limits = (from, positive) => {
      let low = Infinity, high = -Infinity;
      for (const { x, y } of this.curves) {
        for (let i = 0; i < x.length; i += 1) {
          if (y[i] === null || x[i] < from || (positive && y[i] <= 0)) continue;
          low = Math.min(low, y[i]);
          high = Math.max(high, y[i]);
        }
      }
      return [low, high];
    };
    const lowest = limits(-Infinity, false)[0];
    const positive = lowest > 0 && lowest < Infinity;
    const isLog = this.log && positive;
    const all = limits(-Infinity, isLog);
    const later = limits(this.first + 0.1 * (this.last - this.first), isLog);
    const many = this.curves.some(({ x }) => x.length >= 20);
    const crops = many && later[1] >= later[0] && later[1] - later[0] < (all[1] - all[0]) / 1.5;
    let [low, high] = crops && !this.whole ? later : all;
    if (!(high >= low)) [low, high] = [0, 1];
    if (FROM_ZERO.has(this.plot.unit) && !isLog) low = Math.min(low, 0);
    this.isLog = isLog;
    if (isLog) {
      const margin = Math.max((high / low) ** 0.05, 1.001);
      this.low = Math.max(low / margin, Number.MIN_VALUE);
      this.high = Math.min(high * margin, Number.MAX_VALUE);
    } else {
      const margin = 0.05 * (high - low) || 0.05 * Math.abs(high) || 1;
      this.low = FROM_ZERO.has(this.plot.unit) && low === 0 ? 0 : low - margin;
      this.high = high + margin;
    }
    this.wholeButton.hidden = !crops;
    this.wholeButton.setAttribute("aria-pressed", this.whole);
    this.logButton.hidden = !positive;
    this.logButton.setAttribute("aria-pressed", this.log);
  }

  x(step) {
    const span = this.last - this.first || 1;
    const offset = this.last === this.first ? 0.5 : (step - this.first) / span;
    return this.left + offset * (this.width - this.left - 12);
  }

  y(value) {
    const of = this.isLog ? Math.log : (v) => v;
    const bottom = HEIGHT - 30;
    return bottom - ((of(value) - of(this.low)) / (of(this.high) - of(this.low))) * (bottom - 8);
  }

  frame() {
    const marks = this.isLog ? logTicks(this.low, this.high) : ticks(this.low, this.high, 5);
    const labels = marks.map((value) => tick(value, this.plot.unit));
    this.left = 14 + 6.6 * Math.max(...labels.map((label) => label.length));
    marks.forEach((value, i) => {
      const y = this.y(value);
      const zero = value === 0 && this.plot.unit === "difference";
      this.svg.append(node("line", { class: zero ? "zero" : "grid", x1: this.left, x2: this.width - 12, y1: y, y2: y }));
      this.svg.append(node("text", { x: this.left - 6, y: y + 4, "text-anchor": "end" }, labels[i]));
    });
    const steps = this.last > this.first ? ticks(this.first, this.last, this.width / 62) : [this.first];
    for (const step of steps.filter(Number.isInteger)) {
      const x = this.x(step), anchor = x > this.width - 28 ? "end" : "middle";
      this.svg.append(node("text", { x: anchor === "end" ? this.width - 2 : x, y: HEIGHT - 14, "text-anchor": anchor }, String(step)));
    }
    this.svg.append(node("text", { x: this.width - 12, y: HEIGHT - 2, "text-anchor": "end" }, "step"));
    const clip = node("clipPath", { id: `clip-${this.plot.key}` });
    clip.append(node("rect", { x: this.left - 4, y: 2, width: this.width - this.left - 4, height: HEIGHT - 31 }));
    this.svg.append(clip);
  }

  marks() {
    for (const alert of this.alerts()) {
      const x = this.x(alert.step), y = HEIGHT - 30, colour = data.runs[alert.run].colour;
      const mark = node("g", { class: "alert-mark" });
      mark.append(node("title", {}, `step ${alert.step}, ${data.runs[alert.run].name}: ${alert.text}`));
      mark.append(node("line", { class: `alert c${colour}`, x1: x, x2: x, y1: 6, y2: y }));
      mark.append(node("path", { class: `f${colour}`, d: `M${x - 4.5} ${y + 4}h9l-4.5 -8z` }));
      this.svg.append(mark);
    }
  }

  alerts() {
    const shown = new Set(this.curves.map((curve) => curve.run));
    return data.alerts.filter((a) => shown.has(a.run) && a.step >= this.first && a.step <= this.last);
  }

  curve({ run, kind, x, y }) {
    const { colour, dash } = data.runs[run];
    const group = node("g", { "clip-path": `url(#clip-${this.plot.key})` });
    let path = "", down = false, alone = false;
    const faults = [], dots = [];
    for (let i = 0; i < x.length; i += 1) {
      if (y[i] === null || (this.isLog && y[i] <= 0)) {
        if (y[i] === null && kind !== "line" && BREAKS_ARE_FAULTS.has(this.plot.key)) faults.push(this.x(x[i]));
        down = false;
        continue;
      }
      const at = [this.x(x[i]).toFixed(1), this.y(y[i]).toFixed(1)];
      path += `${down ? "L" : "M"}${at[0]} ${at[1]}`;
      alone = !down && (i + 1 === x.length || y[i + 1] === null);
      if ((kind === "points" && x.length <= 120) || (kind !== "points" && alone)) dots.push(at);
      down = true;
    }
    group.append(node("path", { class: `${kind} c${colour} d${dash}`, d: path }));
    for (const [cx, cy] of dots) group.append(node("circle", { class: `f${colour}`, cx, cy, r: 2.6 }));
    for (const at of faults) {
      const cross = node("path", { class: `broken c${colour}`, d: `M${at - 4} 8l8 8m0 -8l-8 8` });
      cross.append(node("title", {}, `${data.runs[run].name}: not a finite number`));
      group.append(cross);
    }
    this.svg.append(group);
  }

  point(event) {
    if (!this.curves.length) return;
    const box = this.area.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * this.width;
    this.read(this.first + ((x - this.left) / (this.width - this.left - 12)) * (this.last - this.first));
  }

  key(event) {
    const stride = Math.max(1, Math.round((this.last - this.first) / 50));
    const move = { ArrowLeft: -stride, ArrowRight: stride }[event.key];
    if (event.key === "Escape") this.leave();
    if (move === undefined || !this.curves.length) return;
    event.preventDefault();
    this.read((this.step ?? this.first - stride) + move);
  }

  leave() {
    this.tip.hidden = true;
    this.step = undefined;
    if (this.overlay) this.overlay.replaceChildren();
  }

  // Shows what each run has at the step nearest to the one given; nothing of runs that have ended before.
  read(wanted) {
    const step = Math.min(this.last, Math.max(this.first, wanted));
    const slack = 0.02 * (this.last - this.first);
    this.step = Math.round(step);
    this.overlay.replaceChildren();
    const found = [];
    for (const curve of this.curves) {
      if (step > curve.x[curve.x.length - 1] + slack || step < curve.x[0] - slack) continue;
      const i = closest(curve.x, step);
      found.push({ run: curve.run, kind: curve.kind, x: curve.x[i], y: curve.y[i] });
    }
    if (!found.length) {
      this.tip.hidden = true;
      return;
    }
    const nearest = found.reduce((a, b) => (Math.abs(b.x - step) < Math.abs(a.x - step) ? b : a)).x;
    const lines = [...new Set(found.map(({ run }) => run))].map((run) => {
      const line = element("div");
      line.append(swatch(run), `${data.runs[run].name}: `);
      const values = found.filter((point) => point.run === run);
      line.append(values.map((point) => this.text(point, values, nearest)).join(", "));
      return line;
    });
    for (const { run, x, y } of found) {
      if (y === null || y < this.low || y > this.high) continue;
      const dot = { class: `f${data.runs[run].colour}`, cx: this.x(x), cy: this.y(y), r: 3.2 };
      this.overlay.append(node("circle", dot));
    }
    const at = this.x(nearest);
    this.overlay.prepend(node("line", { class: "cursor", x1: at, x2: at, y1: 6, y2: HEIGHT - 30 }));
    this.tip.replaceChildren(element("strong", "", `step ${nearest}`), ...lines);
    const reach = (this.last - this.first) / this.width * 6;
    for (const alert of this.alerts().filter((a) => Math.abs(a.step - nearest) <= reach).slice(0, 3)) {
      this.tip.append(element("div", "", `▲ step ${alert.step}, ${data.runs[alert.run].name}: ${alert.text}`));
    }
    place(this.tip, at / this.width, this.area);
  }

  text({ kind, x, y }, values, nearest) {
    const value = format(y, this.plot.unit);
    if (kind === "line" && values.length > 1) return `smoothed ${value}`;
    const label = kind === "points" && values.length > 1 ? "validation " : "";
    return `${label}${value}${x === nearest ? "" : ` (step ${x})`}`;
  }
}
