"use strict";
// What another bound of one limit would give: steps, coloured by who is best.
(() => {
  const { element, known, make } = study;
  if (!element("shifts")) return;

  // In the order in which they are first the best, as the limits are loosened.
  function winners() {
    return [...new Set(Object.values(study.plan.shifts).flat().filter((s) => known(s[1])).map((s) => s[2]))];
  }
  function figure(name, id, order) {
    const { objective, limits, choices, shifts } = study.plan, told = study.metric(name), limit = limits.find((one) => one.metric === name);
    const steps = shifts[name].filter((s) => known(s[0])), xs = steps.map((s) => s[0] * told.factor), ys = steps.map((s) => (known(s[1]) ? s[1] : null));
    const colours = steps.map((s) => look.series(Math.max(0, order.indexOf(s[2]))));
    const text = steps.map((s) => `<b>${look.text(choices[s[2]]?.name ?? "")}</b><br>${look.text(told.label)} ${limit ? study.sign(limit) : ""} ${study.amount(name, s[0])}<br>${study.number(s[1], 4)} ${look.text(objective.unit)}`);
    const asked = limit ? [limit.bound * told.factor] : [], log = study.wide(xs);
    const line = { color: look.colour("--limit"), width: 1.5, dash: "dash" };
    const failing = steps.filter((s) => !known(s[1])).map((s) => s[0] * told.factor);
    const trace = (extra) => ({ type: "scatter", x: xs, y: ys, ...extra });
    Plotly.react(id, [
      trace({ mode: "lines", hoverinfo: "skip", line: { color: look.colour("--faint"), width: 1.5, shape: limit?.atLeast ? "vh" : "hv" } }),
      trace({ mode: "markers", text, hovertemplate: "%{text}<extra></extra>", marker: { size: 10, color: colours, line: { color: look.colour("--card"), width: 1.5 } } }),
      { type: "scatter", mode: "markers", x: failing, y: failing.map(() => 0), yaxis: "y", hovertemplate: "nothing that was simulated holds<extra></extra>",
        marker: { symbol: "x-thin", size: 9, line: { color: look.colour("--limit"), width: 2 } }, cliponaxis: false },
    ], look.layout({ title: look.text(told.label) }, {
      hovermode: "closest", shapes: asked.map((x) => ({ type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line })),
      annotations: asked.map((x) => ({ x: log ? Math.log10(x) : x, y: 1, yref: "paper", text: "asked", showarrow: false, yanchor: "bottom", font: { color: look.colour("--limit"), size: 12 } })),
      xaxis: look.axis({ title: look.label(`bound, ${told.unit}`), ...(log ? { type: "log", ...poll.logTicks([...xs, ...requested]) } : { rangemode: "tozero" }) }),
      yaxis: look.axis({ title: look.label(objective.unit), rangemode: "tozero" }),
    }), look.config);
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
