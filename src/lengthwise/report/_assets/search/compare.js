"use strict";
// Two configurations: numbers, settings, load curves.
(() => {
  const { element, known, make } = study;
  const chosen = () => ["first", "second"].map((id) => study.plan.choices[+element(id).value]);

  const exact = (value) => make("td", {}, value.toLocaleString("en", { minimumFractionDigits: Number.isInteger(value) ? 0 : 2, maximumFractionDigits: 2 }));
  function cell(value, half, factor = 1) {
    if (half === 0 && known(value)) return exact(value * factor);
    const [text, width] = study.estimate(known(value) ? value * factor : null, known(half) ? half * factor : null);
    return make("td", {}, text, ...(width ? [" ", make("span", { class: "half" }, `± ${width}`)] : []));
  }
  // In percent of the first; coloured only where both intervals are known and do not overlap.
  function gap([a, ha], [b, hb], better) {
    if (!known(a) || !known(b) || a === 0) return make("td", {}, "–");
    const change = 100 * (b / a - 1), sure = known(ha) && known(hb) && Math.abs(b - a) > ha + hb;
    const verdict = sure && better && change ? (change * better > 0 ? "better" : "worse") : "";
    const text = Math.abs(change) < 0.05 ? "0" : `${change > 0 ? "+" : "−"}${study.number(Math.abs(change), 2)}`;
    return make("td", { class: verdict }, `${text} %`);
  }
  const group = (title) => make("tr", { class: "group" }, make("th", { scope: "rowgroup" }, title), make("td", {}), make("td", {}), make("td", {}));
  const head = (label, unit) => make("th", { scope: "row" }, label, ...(unit ? [" ", make("span", { class: "unit" }, unit)] : []));
  function line(label, unit, first, second, better, factor = 1) {
    return make("tr", {}, head(label, unit), cell(...first, factor), cell(...second, factor), gap(first, second, better));
  }
  function texts(label, first, second) {
    const other = first !== second;
    return make("tr", { class: other ? "differs" : "" }, head(label), make("td", {}, first), make("td", {}, second), make("td", { class: "muted" }, other ? "differs" : "same"));
  }

  function rows(a, b) {
    const { objective, axes, metrics } = study.plan, none = [null, null], better = objective.higher ? 1 : -1;
    const at = (choice, i) => (choice.at >= 0 ? [choice.points[choice.at][3 + i], choice.halves[i]] : none);
    const setting = (choice, i) => axes[i].values[choice.settings[i]] ?? "–";
    const rate = (choice) => (choice.at >= 0 ? [choice.points[choice.at][0], null] : none);
    return [
      group("Answer"), texts("Status", a.status, b.status), line(objective.label, objective.unit, a.objective, b.objective, better),
      line("Price", "$/h", [a.price, 0], [b.price, 0], -1), line("GPUs", "", [a.gpus, 0], [b.gpus, 0], -1),
      ...(known(a.capacity[0] ?? b.capacity[0]) ? [line("Capacity", "req/s", a.capacity, b.capacity, 1)] : []), texts("Bound by", a.binds || "–", b.binds || "–"),
      group("Settings"), ...axes.map((axis, i) => texts(axis.label, setting(a, i), setting(b, i))),
      group("At the operating point"), line("Rate", "req/s", rate(a), rate(b), 0),
      ...metrics.map((m, i) => line(m.label, m.unit, at(a, i), at(b, i), m.better, m.factor)),
    ];
  }
  function table() {
    const [a, b] = chosen();
    if (!a || !b) return element("compared").replaceChildren();
    const swatch = (i) => make("i", { class: "swatch", style: `--c:var(--series-${i})` });
    const heads = [a, b].map((choice, i) => make("th", { scope: "col" }, swatch(i), choice.name));
    const top = make("tr", {}, make("td", {}), ...heads, make("th", { scope: "col" }, "change"));
    element("compared").replaceChildren(make("thead", {}, top), make("tbody", {}, ...rows(a, b)));
  }

  function curve() {
    const name = element("curve").value, metric = study.metric(name);
    const traces = chosen().map((choice, i) => {
      const points = (choice?.points ?? []).filter((p) => known(p[0]) && known(study.value(p, name)));
      return {
        type: "scatter", mode: "lines+markers", name: theme.text(choice?.name ?? ""), x: points.map((p) => p[0]), y: points.map((p) => study.value(p, name) * metric.factor),
        line: { color: theme.series(i), width: 2 }, marker: { size: points.map((p) => (p === choice.points[choice.at] ? 12 : 6)), line: { color: theme.colour("--card"), width: 1 } },
        hovertemplate: `${theme.text(choice?.name ?? "")}<br>%{x:.4~g} requests/s<br>${theme.text(metric.label)} %{y:.4~g} ${metric.unit}<extra></extra>`,
      };
    });
    const bounds = study.plan.limits.filter((limit) => limit.metric === name).map((limit) => limit.bound * metric.factor);
    const ys = [...traces.flatMap((trace) => trace.y), ...bounds];
    const up = study.wide(ys) ? { type: "log", ...theme.logTicks(ys) } : { rangemode: "tozero" };
    const line = { color: theme.colour("--limit"), width: 1.5, dash: "dash" };
    theme.draw("curves", traces, theme.layout({ title: "" }, {
      title: undefined, hovermode: "closest", margin: { l: 52, r: 16, t: 20, b: 44 },
      shapes: bounds.map((y) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: y, y1: y, line })),
      xaxis: theme.axis({ title: theme.label("requests/s"), rangemode: "tozero" }), yaxis: theme.axis({ title: theme.label(`${metric.label} ${metric.unit}`), ...up }),
    }));
  }
  function draw() { table(); curve(); }
  function open() {
    const simulated = study.simulated(), names = simulated.map(([i, choice]) => [i, `${choice.rank} ${choice.name}`.trim()]);
    study.options(element("first"), names, simulated[0]?.[0] ?? "");
    study.options(element("second"), names, simulated[1]?.[0] ?? simulated[0]?.[0] ?? "");
    const limited = study.plan.limits[0]?.metric ?? study.plan.metrics[0]?.name ?? "";
    study.options(element("curve"), study.plan.metrics.map((m) => [m.name, m.label]), limited);
  }
  for (const id of ["first", "second"]) element(id).addEventListener("change", draw);
  element("curve").addEventListener("change", curve);
  study.parts.push({ open, draw });
})();
