// Draws the figures; switches runs off and on in all of them; reads values aloud by the arrow keys.
const figures = JSON.parse(document.getElementById("data").textContent);
const plots = [...document.querySelectorAll("[data-figure]")];
const config = { responsive: true, displayModeBar: false };
// A finger that moves over a plot scrolls the page.
const dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";

for (const plot of plots) {
  const { data, layout } = figures[plot.dataset.figure];
  Plotly.newPlot(plot, data, { ...layout, dragmode }, config);
  let at = -1;
  const leave = () => { at = -1; Plotly.Fx.unhover(plot); };
  plot.addEventListener("blur", leave);
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") leave();
    if (!move || !plot._fullLayout.yaxis2) return;
    event.preventDefault();
    const shown = plot.data.filter((trace) => trace.visible !== false);
    const steps = [...new Set(shown.flatMap((trace) => trace.x))].sort((a, b) => a - b);
    const stride = Math.ceil(steps.length / 50);
    at = Math.max(0, Math.min(steps.length - 1, at < 0 ? 0 : at + move * stride));
    Plotly.Fx.hover(plot, { xval: steps[at] }, ["xy"]);
    // Plotly draws what it reads at most every 50 ms.
    setTimeout(() => {
      const texts = [...plot.querySelectorAll(".hoverlayer text")];
      document.getElementById("read").textContent = texts.map((text) => text.textContent).join("; ");
    }, 60);
  });
}

for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => {
    const visible = button.getAttribute("aria-pressed") === "false";
    button.setAttribute("aria-pressed", visible);
    for (const plot of plots) {
      const traces = plot.data.flatMap((trace, i) => (trace.meta === Number(button.dataset.run) ? [i] : []));
      if (!traces.length) continue;
      plot.hidden = !visible && plot.data.every((trace, i) => traces.includes(i) || trace.visible === false);
      Plotly.restyle(plot, { visible }, traces);
      if (!plot.hidden) Plotly.Plots.resize(plot);
    }
    for (const off of document.querySelectorAll(".off")) {
      off.hidden = off.parentElement.querySelector("[data-figure]:not([hidden])") !== null;
    }
  });
}

// On paper plots are as wide as their column.
addEventListener("beforeprint", () => {
  for (const svg of document.querySelectorAll(".main-svg")) {
    svg.setAttribute("viewBox", `0 0 ${svg.getAttribute("width")} ${svg.getAttribute("height")}`);
  }
});
