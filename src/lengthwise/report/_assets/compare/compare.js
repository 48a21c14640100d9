"use strict";
// Figures are data; how they look follows the page's colours, and the scheme when it changes.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const { config, colour, series, axis, label, layout } = look;
  const names = ["A", "B"];
  const line = (i, width) => ({ color: series(i), width, dash: i ? "dash" : "solid" });

  function errors(figure) {
    const y = figure.y, ends = (sign, end) => y.map((v, i) => (v === null || figure[end][i] === null ? 0 : sign * (figure[end][i] - v)));
    const trace = {
      type: "scatter", mode: "markers", x: figure.x, y, marker: { color: series(0), size: 9 },
      error_y: { type: "data", symmetric: false, array: ends(1, "high"), arrayminus: ends(-1, "low"),
                 color: colour("--faint"), thickness: 1.5, width: 5 },
      hovertemplate: "%{x}: %{y:+.1%}<extra></extra>",
    };
    const all = y.concat(figure.low, figure.high).filter((v) => v !== null);
    const most = Math.max(0.05, ...all.map(Math.abs));
    const zero = { type: "line", xref: "paper", x0: 0, x1: 1, y0: 0, y1: 0, line: { color: colour("--soft"), width: 1 } };
    return [[trace], layout(figure, {
      hovermode: "closest", shapes: [zero],
      xaxis: axis({ showgrid: false, type: "category" }),
      yaxis: axis({ range: [Math.min(-0.2 * most, 1.12 * Math.min(0, ...all)), Math.max(0.2 * most, 1.12 * Math.max(0, ...all))], tickformat: ".1~%", nticks: 7 }),
    })];
  }

  function cdf(figure) {
    const traces = figure.curves.map((x, i) => ({
      type: "scatter", mode: "lines", name: names[i], x, y: figure.y, line: line(i, 2),
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

  function time(figure) {
    const traces = figure.curves.map((y, i) => ({
      type: "scatter", mode: "lines", name: names[i], x: figure.x, y, line: line(i, 1.6), hovertemplate: "%{y:.4~g}",
    }));
    return [traces, layout(figure, {
      hovermode: "x unified",
      title: { ...layout(figure, {}).title, text: `<b>${figure.title}</b>  <span style="color:${colour("--soft")}">${figure.unit}</span>` },
      xaxis: axis({ title: label("seconds"), rangemode: "tozero", hoverformat: ".4~g", showgrid: false }),
      yaxis: axis({ rangemode: "tozero", tickformat: "~s" }),
    })];
  }

  const kinds = { errors, cdf, time };
  function draw() {
    for (const figure of figures) {
      const [traces, look] = kinds[figure.kind](figure);
      Plotly.react(figure.id, traces, look, config);
    }
  }
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
