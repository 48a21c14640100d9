"use strict";
// Errors by statistic, and the distributions and time courses of both runs.
(() => {
  const { colour, series, axis, layout } = theme;
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
    const largest = Math.max(0.05, ...all.map(Math.abs));
    const zero = { type: "line", xref: "paper", x0: 0, x1: 1, y0: 0, y1: 0, line: { color: colour("--soft"), width: 1 } };
    const range = [Math.min(-0.2 * largest, 1.12 * Math.min(0, ...all)), Math.max(0.2 * largest, 1.12 * Math.max(0, ...all))];
    return [[trace], layout(figure, {
      hovermode: "closest", shapes: [zero], xaxis: axis({ showgrid: false, type: "category" }), yaxis: axis({ range, tickformat: ".1~%", nticks: 7 }),
    })];
  }

  function cdf(figure) {
    const traces = figure.curves.map((x, i) => ({
      type: "scatter", mode: "lines", name: names[i], x, y: figure.y, line: line(i, 2), hovertemplate: `%{x:.4~g} ${figure.unit}`,
    }));
    return [traces, theme.cdfLayout(figure, figure.curves.flat())];
  }

  function time(figure) {
    const traces = figure.curves.map((y, i) => ({
      type: "scatter", mode: "lines", name: names[i], x: figure.x, y, line: line(i, 1.6), hovertemplate: "%{y:.4~g}",
    }));
    return [traces, theme.timeLayout(figure)];
  }

  const kinds = { errors, cdf, time };
  theme.start(() => theme.data.forEach((figure) => theme.draw(figure.id, ...kinds[figure.kind](figure))));
})();
