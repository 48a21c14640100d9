"use strict";
// Formulas as curves, simulations as marks.
(() => {
  const { text, colour, series, axis, label, layout } = theme;

  function trace(curve, figure, named) {
    const marks = curve.mode === "markers";
    return {
      type: "scatter", mode: curve.mode, name: text(curve.name), x: curve.x, y: curve.y,
      legendgroup: text(curve.name), showlegend: !curve.silent && named,
      line: { color: series(curve.series), width: 2, dash: curve.dash || "solid" },
      marker: { color: series(curve.series), size: 7, line: { color: colour("--card"), width: 1 } },
      error_y: marks ? { type: "data", symmetric: false, array: curve.up.map((h) => h || 0), arrayminus: curve.down.map((h) => h || 0),
                         thickness: 1.2, width: 3, color: series(curve.series) } : undefined,
      hovertemplate: `%{y:${figure.y.format || ".4~g"}}${marks && named ? " simulated" : ""}`,
    };
  }

  function scale(given, values) {
    const made = axis({ title: label(given.label) });
    if (given.format) made.tickformat = given.format;
    if (given.log) Object.assign(made, { type: "log" }, theme.logTicks(values));
    if (given.ticks) Object.assign(made, { tickvals: given.ticks, ticktext: given.ticks.map(String) });
    return made;
  }

  function draw() {
    for (const figure of theme.data) {
      document.getElementById(figure.id).style.height = figure.curves.length > 4 ? "420px" : "360px";
      const xs = figure.curves.flatMap((c) => c.x), ys = figure.curves.flatMap((c) => c.y).filter((y) => y !== null);
      const named = figure.curves.length > 1;
      const shapes = figure.levels.map((level) => ({
        type: "line", xref: "paper", x0: 0, x1: 1, y0: level.y, y1: level.y,
        line: { color: colour("--limit"), width: 1.5, dash: "dash" },
      }));
      const annotations = figure.levels.map((level, at) => ({
        xref: "paper", x: at ? 0.02 : 1, xanchor: at ? "left" : "right", y: level.y, yanchor: at ? "top" : "bottom", text: text(level.text), showarrow: false,
        font: { color: colour("--limit"), size: 12 },
      }));
      (figure.marks || []).forEach((mark, at) => {  // along the line, each in a row of its own, so that close ones stay legible
        shapes.push({ type: "line", yref: "paper", y0: 0, y1: 1, x0: mark.x, x1: mark.x,
                      line: { color: colour("--limit"), width: 1.5, dash: "dash" } });
        annotations.push({ yref: "paper", y: 0.27 * (at % 3), yanchor: "bottom", x: figure.x.log ? Math.log10(mark.x) : mark.x,
                           xanchor: "right", xshift: -1, textangle: -90, bgcolor: colour("--card"), borderpad: 0,
                           text: text(mark.text), showarrow: false, font: { color: colour("--limit"), size: 12 } });
      });
      const x = scale(figure.x, xs);
      const y = { ...scale(figure.y, ys), ...(!figure.y.log && { rangemode: "tozero" }) };
      if (!figure.y.log && figure.levels.length) y.range = [0, 1.12 * Math.max(...ys, ...figure.levels.map((l) => l.y))];
      theme.draw(figure.id, figure.curves.map((curve) => trace(curve, figure, named)), layout(figure, {
        hovermode: "x unified", shapes, annotations, xaxis: x, yaxis: y, showlegend: named,
        legend: { orientation: "h", x: 0, xanchor: "left", y: -0.2, yanchor: "top",
                  font: { color: colour("--soft"), size: 12 }, bgcolor: "rgba(0,0,0,0)" },
        margin: { l: 56, r: 16, t: 48, b: 44 },
      }));
    }
  }

  theme.start(draw);
})();
