"use strict";
// How every figure looks: the page's colours, read anew at each drawing, and plotly's settings.
const look = (() => {
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

  return { config, text, colour, series, dash, axis, label, layout, logTicks };
})();
