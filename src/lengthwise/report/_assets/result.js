"use strict";
// Latency distributions, panels over time and shares of time, for every variant.
(() => {
  const { names, figures } = theme.data;
  const { text, colour, series, dash, axis, layout } = theme;
  let tail = false; // show the share of slower requests on a logarithmic scale instead
  const curve = (data, line, trace) => ({
    type: "scatter", mode: "lines", name: text(names[data.variant]), x: data.x, y: data.y,
    line: { color: series(data.variant), width: 2, dash: dash(data.variant), ...line }, ...trace,
  });

  function cdf(figure) {
    const y = tail ? figure.y.map((share) => 1 - share || null) : figure.y;
    const traces = figure.curves.map((data) => curve(data, {}, { y, hovertemplate: `%{x:.4~g} ${figure.unit}` }));
    const shapes = figure.limits.map((limit) => ({
      type: "line", x0: limit, x1: limit, y0: 0, y1: 1, yref: "paper",
      line: { color: colour("--limit"), width: 1.5, dash: "dash" },
    }));
    const values = figure.curves.flatMap((c) => c.x).concat(figure.limits), most = Math.max(...values);
    const annotations = figure.limits.map((limit) => ({
      x: figure.log ? Math.log10(limit) : limit, y: 1, yref: "paper", text: `SLO ${+limit.toPrecision(4)} ${figure.unit}`, showarrow: false,
      xanchor: limit > 0.7 * most ? "right" : "center", yanchor: "bottom", font: { color: colour("--limit"), size: 12 },
    }));
    const yaxis = axis({ type: "log", range: [-4, 0.03], tickvals: [1, 0.1, 0.01, 0.001, 1e-4],
                         ticktext: ["100%", "10%", "1%", "0.1%", "0.01%"], hoverformat: ".3~%" });
    return [traces, theme.cdfLayout(figure, values, { shapes, annotations, ...(tail && { yaxis }) })];
  }

  function time(figure) {
    const traces = figure.curves.map((data) => curve(data, { width: 1.6 }, { hovertemplate: `%{y:${figure.format || ".4~g"}}` }));
    return [traces, theme.timeLayout(figure)];
  }

  function shares(figure) {
    const ys = figure.names.map((_, i) => i);
    const narrow = document.getElementById(figure.id).clientWidth < 560;
    const short = (name) => (name.length > 22 ? `${name.slice(0, 21)}…` : name);
    const traces = figure.parts.map((part) => ({
      type: "bar", orientation: "h", name: part.label, x: part.x, y: ys,
      marker: { color: colour(`--part-${part.part}`), line: { color: colour("--card"), width: 1 } },
      text: part.x.map((x) => (x >= (narrow ? 0.14 : 0.06) ? `${Math.round(100 * x)} %` : "")),
      textposition: "inside", insidetextanchor: "middle", textangle: 0,
      hovertemplate: `${part.label}: %{x:.1%}<extra></extra>`,
    }));
    const annotations = figure.names.map((name, i) => ({
      x: 0, y: i, yshift: 24, xref: "x", text: text(short(name)), showarrow: false, xanchor: "left", yanchor: "middle",
      font: { color: colour("--soft"), size: 13 },
    }));
    return [traces, layout(figure, {
      barmode: "stack", bargap: 0.55, hovermode: "closest", height: 44 + 62 * ys.length, title: undefined,
      annotations, margin: { l: 18, r: 24, t: 12, b: 30 },
      xaxis: axis({ range: [0, 1], tickvals: [0, 0.25, 0.5, 0.75, 1], tickformat: ".0%", showgrid: false }),
      yaxis: axis({ visible: false, range: [ys.length - 0.55, -0.75] }),
    })];
  }

  const kinds = { cdf, time, shares };
  const draw = () => figures.forEach((figure) => theme.draw(figure.id, ...kinds[figure.kind](figure)));
  const button = document.getElementById("tail");
  button?.addEventListener("click", () => {
    tail = !tail;
    button.setAttribute("aria-pressed", tail);
    draw();
  });
  if (button) button.hidden = false;
  theme.start(draw);
})();
