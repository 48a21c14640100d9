"use strict";
// Three lines a metric: measured, before, after. How they look follows the page's colours, and the scheme.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const { config, series, axis, label, layout } = look;

  function cdf(figure) {
    const traces = figure.curves.map((x, i) => ({
      type: "scatter", mode: "lines", name: figure.names[i], x, y: figure.y,
      line: { color: series(i), width: i ? 1.8 : 2.6, dash: ["solid", "dot", "dash"][i] },
      hovertemplate: `%{x:.4~g} ${figure.unit}`,
    }));
    const x = { title: label({ s: "seconds", ms: "milliseconds" }[figure.unit]), type: figure.log ? "log" : "linear", hoverformat: ".4~g" };
    if (figure.log) Object.assign(x, look.logTicks(figure.curves.flat()));
    else x.rangemode = "tozero";
    return [traces, layout(figure, {
      hovermode: "y unified", xaxis: axis(x),
      yaxis: axis({ range: [0, 1.01], tickvals: [0, 0.25, 0.5, 0.75, 0.9, 1], tickformat: ".0%", hoverformat: ".2~%" }),
    })];
  }

  function draw() {
    for (const figure of figures) {
      const [traces, drawn] = cdf(figure);
      Plotly.react(figure.id, traces, drawn, config);
    }
  }
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
