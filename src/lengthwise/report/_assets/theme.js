"use strict";
// Shared by all pages: the page's data, the drawing library, and how every figure looks.
// Colours are CSS variables and are read at each drawing, so that figures follow the colour scheme.
const theme = (() => {
  const data = JSON.parse(document.getElementById("figures").textContent);
  const config = { responsive: true, displaylogo: false, displayModeBar: false };
  const text = (s) => s.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const series = (variant) => colour(`--series-${variant % 8}`);
  const dash = (variant) => ["solid", "dash", "dot", "dashdot"][Math.floor(variant / 8) % 4];

  const axis = (extra) => ({
    gridcolor: colour("--line"), linecolor: colour("--line"), zeroline: false, automargin: true,
    tickfont: { color: colour("--soft"), size: 12 }, fixedrange: false, ...extra,
  });
  const label = (text) => ({ text, font: { color: colour("--soft"), size: 12 }, standoff: 8 });
  const layout = (figure, extra) => ({
    title: { text: `<b>${figure.title}</b>`, x: 0, xref: "container", xanchor: "left", y: 0.985, yanchor: "top",
             pad: { l: 12, t: 6 }, font: { size: 14, color: colour("--ink") } },
    font: { family: getComputedStyle(document.body).fontFamily, color: colour("--ink") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, dragmode: false,
    margin: { l: 52, r: 16, t: 48, b: 44 },
    hoverlabel: { bgcolor: colour("--card"), bordercolor: colour("--line"), font: { color: colour("--ink") } },
    ...extra,
  });

  // 1, 2, 5 in every decade that is shown, fewer where decades are many.
  function logTicks(values) {
    const xs = values.filter((x) => x > 0);
    const low = Math.min(...xs), high = Math.max(...xs);
    const decades = Math.log10(high / low);
    const steps = decades > 4 ? [1] : decades > 2.2 ? [1, 3] : [1, 2, 5];
    const tickvals = [];
    for (let d = Math.floor(Math.log10(low)); d <= Math.ceil(Math.log10(high)); d++)
      for (const s of steps) tickvals.push(s * 10 ** d);
    const ticktext = tickvals.map((v) => v.toLocaleString("en", { maximumSignificantDigits: 3 }));
    return { tickvals, ticktext, range: [Math.log10(low) - 0.04, Math.log10(high) + 0.04] };
  }

  const axisTitle = (unit) => label({ s: "seconds", ms: "milliseconds" }[unit] ?? unit);
  // A cumulative distribution; "extra" overrides parts of the layout.
  function cdfLayout(figure, values, extra) {
    const x = { title: axisTitle(figure.unit), type: figure.log ? "log" : "linear", hoverformat: ".4~g" };
    Object.assign(x, figure.log ? logTicks(values) : { rangemode: "tozero" });
    return layout(figure, {
      hovermode: "y unified", xaxis: axis(x),
      yaxis: axis({ range: [0, 1.01], tickvals: [0, 0.25, 0.5, 0.75, 0.9, 1], tickformat: ".0%", hoverformat: ".2~%" }),
      ...extra,
    });
  }
  function timeLayout(figure) {
    const title = { ...layout(figure, {}).title, text: `<b>${figure.title}</b>  <span style="color:${colour("--soft")}">${figure.unit}</span>` };
    return layout(figure, {
      hovermode: "x unified", title,
      xaxis: axis({ title: label("seconds"), rangemode: "tozero", hoverformat: ".4~g", showgrid: false }),
      yaxis: axis({ rangemode: "tozero", tickformat: figure.format || ",~r" }),
    });
  }

  // The library is embedded compressed, for a small page; an inline script needs no network.
  async function loadPlotly() {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  }
  const draw = (id, traces, shape) => Plotly.react(id, traces, shape, config);
  // Draws all figures once the library is ready, and again when the colour scheme changes.
  async function start(drawAll) {
    try {
      await loadPlotly();
    } catch {
      for (const plot of document.querySelectorAll(".plot")) plot.textContent = "This browser is too old to draw the figure.";
      return;
    }
    if (document.readyState === "loading") await new Promise((ready) => addEventListener("DOMContentLoaded", ready));
    drawAll();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  }

  return { data, text, colour, series, dash, axis, label, axisTitle, layout, cdfLayout, timeLayout, logTicks, draw, start };
})();
