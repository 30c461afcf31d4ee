// Heat maps of the FSDP groups over the steps.

const COOL = [[46, 33, 92], [43, 92, 163], [31, 150, 150], [116, 196, 96], [250, 221, 66]];
const WARM = [[250, 205, 120], [240, 120, 50], [175, 20, 40]];

function shade(share, stops) {
  const at = Math.min(1, Math.max(0, share)) * (stops.length - 1);
  const i = Math.min(stops.length - 2, Math.floor(at));
  return stops[i].map((low, channel) => Math.round(low + (stops[i + 1][channel] - low) * (at - i)));
}

function paint(columns, rows, colour) {
  const canvas = element("canvas");
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  for (let row = 0; row < rows; row += 1) {
    for (let column = 0; column < columns; column += 1) {
      const rgb = colour(row, column);
      if (rgb) image.data.set([...rgb, 255], 4 * (row * columns + column));
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

class Maps {
  constructor(box, plot) {
    this.box = box;
    this.plot = plot;
  }

  draw() {
    const maps = this.plot.maps.filter((map) => !hidden.has(map.run));
    const counts = this.plot.unit === "count";
    const values = maps.flatMap((map) => map.values.flat()).filter((v) => v !== null && (!counts || v > 0));
    const least = values.reduce((a, b) => Math.min(a, b), Infinity);
    const most = values.reduce((a, b) => Math.max(a, b), -Infinity);
    const isLog = least > 0 && most > 30 * least;
    const of = isLog ? Math.log : (v) => v;
    const stops = counts ? WARM : COOL;
    const share = (value) => (most > least ? (of(value) - of(least)) / (of(most) - of(least)) : 0.5);
    this.box.replaceChildren();
    if (!values.length) {
      this.box.append(element("p", "", "All runs of this plot are switched off."));
      return;
    }
    const scale = element("div", "scale");
    const bar = paint(100, 1, (_, column) => shade(column / 99, stops));
    scale.append(tick(least, this.plot.unit), bar, tick(most, this.plot.unit), isLog ? "(logarithmic)" : "");
    if (counts) scale.append("; grey: none");
    this.sheet = element("div", "sheet");
    this.box.append(scale, this.sheet);
    // All places are there before the first is drawn: the number of maps decides how wide one is.
    const placed = maps.map((map) => [map, this.place(map)]);
    for (const [map, heat] of placed) {
      const colour = (row, column) => {
        const value = map.values[row][column];
        return value === null || (counts && value === 0) ? null : shade(share(value), stops);
      };
      this.map(map, heat, paint(map.from.length, map.groups.length, colour));
    }
  }

  place(map) {
    const title = element("h4");
    title.append(swatch(map.run), data.runs[map.run].name);
    const heat = element("div", "heat");
    const one = element("div");
    one.append(title, heat);
    this.sheet.append(one);
    return heat;
  }

  map(map, heat, canvas) {
    const rows = map.groups.length, columns = map.from.length;
    const width = Math.max(260, heat.clientWidth);
    const row = Math.min(16, Math.max(4, 360 / rows));
    const letters = Math.floor((width * 0.35) / 6.8);
    const labels = map.groups.map((name) => (name.length > letters ? `…${name.slice(1 - letters)}` : name));
    const left = 10 + 6.8 * Math.max(...labels.map((label) => label.length));
    const height = rows * row + 32;
    heat.style.aspectRatio = `${width} / ${height}`;
    const svg = node("svg", { viewBox: `0 0 ${width} ${height}` });
    const every = Math.ceil(12 / row);
    labels.forEach((label, i) => {
      if (i % every) return;
      const text = node("text", { x: left - 6, y: (i + 0.5) * row + 4, "text-anchor": "end" }, label);
      text.append(node("title", {}, map.groups[i]));
      svg.append(text);
    });
    const apart = Math.max(1, Math.ceil(columns / ((width - left) / 70)));
    for (let column = 0; column < columns; column += apart) {
      const x = left + ((column + 0.5) / columns) * (width - left - 12);
      svg.append(node("text", { x, y: rows * row + 15, "text-anchor": "middle" }, String(map.from[column])));
    }
    svg.append(node("text", { x: width - 12, y: height - 3, "text-anchor": "end" }, "step"));
    canvas.style.left = `${(100 * left) / width}%`;
    canvas.style.top = "0";
    canvas.style.width = `${(100 * (width - left - 12)) / width}%`;
    canvas.style.height = `${(100 * rows * row) / height}%`;
    const tip = element("div", "tip");
    tip.hidden = true;
    heat.append(svg, canvas, tip);
    const read = (event) => {
      const box = canvas.getBoundingClientRect();
      const column = Math.min(columns - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * columns)));
      const line = Math.min(rows - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * rows)));
      const value = map.values[line][column];
      const several = map.to[column] !== map.from[column];
      const steps = several ? `steps ${map.from[column]} to ${map.to[column]}, largest` : `step ${map.from[column]}`;
      const text = value === null ? "no value" : format(value, this.plot.unit);
      tip.replaceChildren(element("strong", "", map.groups[line]), element("div", "", `${steps}: ${text}`));
      const offset = left + ((column + 0.5) / columns) * (width - left - 12);
      place(tip, offset / width, heat);
      tip.style.top = `${Math.min((line + 1) * row + 6, height - 20)}px`;
    };
    canvas.addEventListener("pointermove", read);
    canvas.addEventListener("pointerdown", read);
    canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  }
}
