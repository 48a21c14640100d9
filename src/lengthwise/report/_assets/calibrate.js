"use strict";
// Three curves for each metric: measured, simulated before and simulated after calibration.
(() => {
  const { series } = theme;

  function draw() {
    for (const figure of theme.data) {
      const traces = figure.curves.map((x, i) => ({
        type: "scatter", mode: "lines", name: figure.names[i], x, y: figure.y,
        line: { color: series(i), width: i ? 1.8 : 2.6, dash: ["solid", "dot", "dash"][i] },
        hovertemplate: `%{x:.4~g} ${figure.unit}`,
      }));
      theme.draw(figure.id, traces, theme.cdfLayout(figure, figure.curves.flat()));
    }
  }
  theme.start(draw);
})();
