// All plots are drawn, and drawn again when runs are switched on or off or the width changes.

const plots = new Map(data.plots.map((plot) => [plot.key, plot]));
const drawn = [...document.querySelectorAll("[data-plot]")].map((box) => {
  const plot = plots.get(box.dataset.plot);
  return box.className === "curves" ? new Curves(box, plot) : new Maps(box, plot);
});
const drawAll = () => drawn.forEach((plot) => plot.draw());
for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => {
    const run = Number(button.dataset.run);
    if (!hidden.delete(run)) hidden.add(run);
    button.setAttribute("aria-pressed", !hidden.has(run));
    drawAll();
  });
}
drawAll();
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth !== width) {
    width = window.innerWidth;
    drawAll();
  }
});
