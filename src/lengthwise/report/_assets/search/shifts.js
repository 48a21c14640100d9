"use strict";
// The best objective by the bound of one limit: steps, coloured by the best configuration.
(() => {
  const { element, known, make } = study;
  if (!element("shifts")) return;

  // Configurations in the order in which they become the best as limits loosen.
  function winners() {
    return [...new Set(Object.values(study.plan.shifts).flat().filter((s) => known(s[1])).map((s) => s[2]))];
  }
  function figure(name, id, order) {
    const { objective, limits, choices, shifts } = study.plan, metric = study.metric(name), limit = limits.find((one) => one.metric === name);
    const steps = shifts[name].filter((s) => known(s[0])), xs = steps.map((s) => s[0] * metric.factor), ys = steps.map((s) => (known(s[1]) ? s[1] : null));
    const colours = steps.map((s) => theme.series(Math.max(0, order.indexOf(s[2]))));
    const text = steps.map((s) => `<b>${theme.text(choices[s[2]]?.name ?? "")}</b><br>${theme.text(metric.label)} ${limit ? study.sign(limit) : ""} ${study.amount(name, s[0])}<br>${study.number(s[1], 4)} ${theme.text(objective.unit)}`);
    const requested = limit ? [limit.bound * metric.factor] : [], log = study.wide(xs);
    const line = { color: theme.colour("--limit"), width: 1.5, dash: "dash" };
    const failing = steps.filter((s) => !known(s[1])).map((s) => s[0] * metric.factor);
    const trace = (extra) => ({ type: "scatter", x: xs, y: ys, ...extra });
    theme.draw(id, [
      trace({ mode: "lines", hoverinfo: "skip", line: { color: theme.colour("--faint"), width: 1.5, shape: limit?.atLeast ? "vh" : "hv" } }),
      trace({ mode: "markers", text, hovertemplate: "%{text}<extra></extra>", marker: { size: 10, color: colours, line: { color: theme.colour("--card"), width: 1.5 } } }),
      { type: "scatter", mode: "markers", x: failing, y: failing.map(() => 0), yaxis: "y", hovertemplate: "no simulated load meets the limits<extra></extra>",
        marker: { symbol: "x-thin", size: 9, line: { color: theme.colour("--limit"), width: 2 } }, cliponaxis: false },
    ], theme.layout({ title: theme.text(metric.label) }, {
      hovermode: "closest", shapes: requested.map((x) => ({ type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line })),
      annotations: requested.map((x) => ({ x: log ? Math.log10(x) : x, y: 1, yref: "paper", text: "requested", showarrow: false, yanchor: "bottom", font: { color: theme.colour("--limit"), size: 12 } })),
      xaxis: theme.axis({ title: theme.label(`bound, ${metric.unit}`), ...(log ? { type: "log", ...theme.logTicks([...xs, ...requested]) } : { rangemode: "tozero" }) }),
      yaxis: theme.axis({ title: theme.label(objective.unit), rangemode: "tozero" }),
    }));
  }
  function draw() {
    const names = Object.keys(study.plan.shifts), order = winners();
    element("shifts").querySelectorAll(".plot").forEach((plot) => Plotly.purge(plot));
    element("shifts").replaceChildren(...names.map((_, i) => make("figure", {}, make("div", { class: "plot", id: `shift-${i}` }))));
    names.forEach((name, i) => figure(name, `shift-${i}`, order));
    const items = order.map((choice, i) => make("li", {}, make("i", { class: "swatch", style: `--c:var(--series-${i % 8})` }), study.plan.choices[choice]?.name ?? ""));
    element("winners").replaceChildren(...items);
  }
  study.parts.push({ draw });
})();
