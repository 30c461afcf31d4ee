// Draws the figures; the buttons switch runs off and on in all of them.
const figures = JSON.parse(document.getElementById("data").textContent);
const plots = [...document.querySelectorAll("[data-figure]")];
// A finger that moves over a plot scrolls the page.
const dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";
for (const plot of plots) {
  const { data, layout } = figures[plot.dataset.figure];
  Plotly.newPlot(plot, data, { ...layout, dragmode }, { responsive: true, displayModeBar: false });
}
for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => {
    const visible = button.getAttribute("aria-pressed") === "false";
    button.setAttribute("aria-pressed", visible);
    for (const plot of plots) {
      const traces = plot.data.flatMap((trace, i) => (trace.meta === Number(button.dataset.run) ? [i] : []));
      Plotly.restyle(plot, { visible }, traces);
    }
  });
}
