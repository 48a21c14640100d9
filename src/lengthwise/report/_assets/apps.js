"use strict";
// Gantt charts of the plan and of the run: one row per GPU, one bar per model.
(() => {
  const { data } = theme;
  const { text, colour, series, axis, label, layout } = theme;
  const PATTERNS = ["", ".", "x", "+"];
  const lines = (words) => words.split("\n").map(text).join("<br>");

  // Bars of one look share a trace: a running model, a loading model, or a reason for idling.
  function traces(chart) {
    const groups = new Map();
    for (const bar of chart.bars) {
      const key = bar[4] === "run" || bar[4] === "load" ? `${bar[4]} ${bar[3]}` : bar[4];
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(bar);
    }
    return [...groups.values()].map((bars) => trace(chart, bars));
  }

  function trace(chart, bars) {
    const [, , , model, what] = bars[0];
    return {
      type: "bar", orientation: "h", marker: marker(model, what),
      y: bars.map((b) => text(chart.rows[b[0]])), base: bars.map((b) => b[1]), x: bars.map((b) => b[2] - b[1]),
      text: bars.map((b) => text(b[5])), textposition: "inside", insidetextanchor: "middle", textangle: 0,
      insidetextfont: { color: colour("--card"), size: 11 }, constraintext: "inside",
      customdata: bars.map((b) => lines(b[6])), hovertemplate: "%{customdata}<extra></extra>",
    };
  }

  function marker(model, what) {
    const line = { color: colour("--card"), width: 0.75 };
    const own = model < 0 ? colour("--faint") : series(model);
    if (what === "load") return { color: own, line, pattern: { shape: "/", fillmode: "replace", size: 5, solidity: 0.4 } };
    if (what !== "run") return { color: colour(`--idle-${what}`), line };
    const shape = PATTERNS[Math.floor(Math.max(model, 0) / 8) % PATTERNS.length];
    return { color: own, line, pattern: { shape, fillmode: "overlay", fgcolor: colour("--card"), size: 6, solidity: 0.25 } };
  }

  function draw() {
    for (const chart of data.charts) {
      const box = document.getElementById(chart.id);
      box.style.height = `${Math.max(200, 100 + 28 * chart.rows.length)}px`;
      const shapes = chart.marks.map((x) => ({
        type: "line", yref: "paper", y0: 0, y1: 1, x0: x, x1: x, line: { color: colour("--ink"), width: 1, dash: "dot" },
      }));
      theme.draw(chart.id, traces(chart), layout({ title: "" }, {
        barmode: "overlay", bargap: 0.18, hovermode: "closest", shapes, margin: { l: 52, r: 16, t: 14, b: 44 },
        uniformtext: { minsize: 10, mode: "hide" },
        xaxis: { ...axis({ title: label(data.unit) }), range: [0, data.end * 1.01] },
        yaxis: { ...axis({}), categoryorder: "array", categoryarray: chart.rows.map(text).reverse(), range: [-0.6, chart.rows.length - 0.4] },
      }));
    }
  }

  theme.start(draw);
})();
