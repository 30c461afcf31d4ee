// The data of the page, and small pieces that all plots are made of.

const data = JSON.parse(document.getElementById("data").textContent);
const hidden = new Set();
const SVG = "http://www.w3.org/2000/svg";

function node(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

function swatch(run) {
  const { colour, dash } = data.runs[run];
  const made = node("svg", { class: "swatch", viewBox: "0 0 26 10", "aria-hidden": "true" });
  made.append(node("line", { class: `c${colour} d${dash}`, x1: 0, y1: 5, x2: 26, y2: 5 }));
  return made;
}

function closest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle;
  }
  return step - steps[low] <= steps[high] - step ? low : high;
}

function place(tip, share, area) {
  tip.hidden = false;
  const room = area.clientWidth - tip.offsetWidth;
  const left = share * area.clientWidth + (share > 0.5 ? -tip.offsetWidth - 12 : 12);
  tip.style.left = `${Math.max(0, Math.min(room, left))}px`;
  tip.style.top = "8px";
}
