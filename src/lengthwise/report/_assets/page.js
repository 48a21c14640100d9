"use strict";
// Figures are data; how they look follows the page's colours, and the scheme when it changes.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const names = [...document.querySelectorAll(".decisions h3 span")].map((span) => span.textContent);
  let tail = false; // latency curves show the share that was slower, on a logarithmic scale
  const { config, text, colour, series, dash, axis, label, layout } = look;
  const curve = (figure, data, extra) => ({
    type: "scatter", mode: "lines", name: text(names[data.variant]), x: data.x, y: data.y,
    line: { color: series(data.variant), width: 2, dash: dash(data.variant), ...extra.line }, ...extra.trace,
  });

  function cdf(figure) {
    const traces = figure.curves.map((data) => curve(figure, data, {
      trace: { hovertemplate: `%{x:.4~g} ${figure.unit}`, ...(tail && { y: data.y.map((y) => 1 - y || null) }) },
    }));
    const shapes = figure.limits.map((limit) => ({
      type: "line", x0: limit, x1: limit, y0: 0, y1: 1, yref: "paper",
      line: { color: colour("--limit"), width: 1.5, dash: "dash" },
    }));
    const annotations = figure.limits.map((limit) => ({
      x: figure.log ? Math.log10(limit) : limit, y: 1, yref: "paper", text: `SLO ${+limit.toPrecision(4)} ${figure.unit}`, showarrow: false,
      xanchor: "center", yanchor: "bottom", font: { color: colour("--limit"), size: 12 },
    }));
    const x = { title: label({ s: "seconds", ms: "milliseconds" }[figure.unit]), type: figure.log ? "log" : "linear", hoverformat: ".4~g" };
    if (figure.log) Object.assign(x, look.logTicks(figure.curves.flatMap((c) => c.x).concat(figure.limits)));
    else x.rangemode = "tozero";
    return [traces, layout(figure, {
      hovermode: "y unified", shapes, annotations, xaxis: axis(x),
      yaxis: axis(tail ? { type: "log", range: [-4, 0.03], tickvals: [1, 0.1, 0.01, 0.001, 1e-4],
                           ticktext: ["100%", "10%", "1%", "0.1%", "0.01%"], hoverformat: ".3~%" }
                       : { range: [0, 1.01], tickvals: [0, 0.25, 0.5, 0.75, 0.9, 1], tickformat: ".0%", hoverformat: ".2~%" }),
    })];
  }

  function time(figure) {
    const traces = figure.curves.map((data) => curve(figure, data, {
      line: { width: 1.6 }, trace: { hovertemplate: `%{y:${figure.format || ".4~g"}}` },
    }));
    return [traces, layout(figure, {
      hovermode: "x unified",
      title: { ...layout(figure, {}).title, text: `<b>${figure.title}</b>  <span style="color:${colour("--soft")}">${figure.unit}</span>` },
      xaxis: axis({ title: label("seconds"), rangemode: "tozero", hoverformat: ".4~g", showgrid: false }),
      yaxis: axis({ rangemode: "tozero", tickformat: figure.format || "~s" }),
    })];
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
    const names = figure.names.map((name, i) => ({
      x: 0, y: i, yshift: 24, xref: "x", text: text(short(name)), showarrow: false, xanchor: "left", yanchor: "middle",
      font: { color: colour("--soft"), size: 13 },
    }));
    return [traces, layout(figure, {
      barmode: "stack", bargap: 0.55, hovermode: "closest", height: 44 + 62 * ys.length, title: undefined,
      annotations: names, margin: { l: 18, r: 24, t: 12, b: 30 },
      xaxis: axis({ range: [0, 1], tickvals: [0, 0.25, 0.5, 0.75, 1], tickformat: ".0%", showgrid: false }),
      yaxis: axis({ visible: false, range: [ys.length - 0.55, -0.75] }),
    })];
  }

  const kinds = { cdf, time, shares };
  function draw() {
    for (const figure of figures) {
      const [traces, look] = kinds[figure.kind](figure);
      Plotly.react(figure.id, traces, look, config);
    }
  }
  for (const figure of figures.filter((f) => f.kind === "shares")) {
    const parts = new Set(figure.parts.map((part) => part.part));
    for (const item of document.querySelectorAll("[data-part]")) item.hidden = !parts.has(item.dataset.part);
  }
  const button = document.getElementById("tail");
  button?.addEventListener("click", () => {
    tail = !tail;
    button.setAttribute("aria-pressed", tail);
    draw();
  });
  if (button) button.hidden = false;
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
