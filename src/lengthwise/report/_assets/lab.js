"use strict";
// Gap closed against the tail, curves over loads and batch sizes, and a heat map of every number.
(() => {
  const lab = theme.data;
  const element = (id) => document.getElementById(id);
  const SHAPES = ["circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon", "triangle-down"];
  const SIGNS = ["●", "■", "◆", "▲", "✚", "★", "⬢", "▼"];
  const hidden = { policies: new Set(), predictors: new Set(), sides: new Set() };

  function make(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }
  const options = (id, texts, chosen) =>
    element(id).replaceChildren(...texts.map((text, i) => make("option", { value: i, selected: i === chosen ? "" : null }, text)));
  const at = (id) => +element(id).value;
  const metric = (name) => lab.metrics.find((one) => one.name === name);
  const named = (one) => (one.unit ? `${one.label}, ${one.unit}` : one.label);
  function number(value, digits = 3) {
    if (value === null) return "–";
    const places = value ? Math.min(9, Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value))))) : 0;
    return value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
  }
  const text = ([value, half], one) =>
    value === null ? "–" : `${number(value * one.factor)}${half ? ` ± ${number(half * one.factor, 2)}` : ""}${one.unit ? ` ${one.unit}` : ""}`;

  // Pareto front: shorter tail, more of the gap closed.
  function front(points) {
    const sorted = points.filter((p) => p.y !== null).sort((a, b) => a.x - b.x || b.y - a.y);
    let top = -Infinity;
    return sorted.filter((p) => p.y > top && ((top = p.y), true));
  }
  function frontier() {
    const [batch, load] = [at("batch"), at("load")], gap = metric("gap_closed"), tail = metric(lab.tails[at("tail")]);
    const points = lab.sides.map((side, i) => {
      const [y, halfY] = lab.values.gap_closed?.[i][batch][load] ?? [null, null], [x, halfX] = lab.values[tail.name][i][batch][load];
      const low = y !== null && y < -1; // drawn at -100 %; the hover text has the value
      return { side, x, low, real: y === null ? null : 100 * y, y: y === null ? null : low ? -100 : 100 * y, halfX, halfY: halfY === null || low ? null : 100 * halfY };
    }).filter(({ side }) => side.end || !(hidden.policies.has(side.policy) || hidden.predictors.has(side.predictor)));
    const line = front(points);
    const error = (values, faded) => ({ type: "data", array: values.map((v) => v ?? 0), thickness: 1.2, width: 3, color: theme.colour(faded ? "--line" : "--faint") });
    const hover = (p) => `<b>${theme.text(p.side.name)}</b><br>gap closed ${text([p.real, p.halfY], { factor: 1, unit: "%" })}<br>${tail.label} ${text([p.x, p.halfX], tail)}`;
    const traces = [
      { type: "scatter", mode: "lines", x: line.map((p) => p.x), y: line.map((p) => p.y), hoverinfo: "skip", line: { color: theme.colour("--faint"), width: 1.5, dash: "dot" } },
      ...points.filter((p) => p.y !== null).map((p) => ({
        type: "scatter", mode: "markers", x: [p.x], y: [p.y], error_x: error([p.halfX], true), error_y: error([p.halfY]), name: p.side.name,
        marker: { size: p.side.end ? 17 : 15, symbol: p.side.end ? "x" : SHAPES[p.side.predictor % SHAPES.length] + (p.low ? "-open" : ""), color: p.side.end ? theme.colour("--ink") : theme.series(p.side.policy), line: { color: theme.colour("--card"), width: 1.2 } },
        text: [hover(p)], hovertemplate: "%{text}<extra></extra>",
      })),
    ];
    const ends = points.filter((p) => p.side.end && p.y !== null).map((p) => ({
      x: p.x, y: p.y, text: p.side.policy === 0 ? "FCFS" : "oracle", showarrow: false, yshift: 17, font: { size: 12.5, color: theme.colour("--ink") },
    }));
    const nothing = points.some((p) => p.y !== null) ? [] : [{ x: 0.5, y: 0.5, xref: "paper", yref: "paper", showarrow: false, text: "no gap to close at this load: known lengths bring no significant gain", font: { size: 13, color: theme.colour("--soft") } }];
    theme.draw("frontier", traces, theme.layout({ title: "" }, {
      hovermode: "closest", annotations: [...ends, ...nothing], margin: { l: 56, r: 18, t: 20, b: 48 },
      xaxis: theme.axis({ title: theme.label(named(tail)) }), yaxis: theme.axis({ title: theme.label(named(gap ?? { label: "Gap closed", unit: "%" })), ticksuffix: " %" }),
    }));
  }
  function curves() {
    const one = lab.metrics[at("metric")], byLoad = at("across") === 0, fixed = at("fixed");
    const xs = byLoad ? lab.loads : lab.batches;
    const traces = lab.sides.map((side, i) => {
      const cells = xs.map((_, j) => (byLoad ? lab.values[one.name][i][fixed][j] : lab.values[one.name][i][j][fixed]));
      const floor = one.name === "gap_closed" ? -100 : -Infinity;
      const below = cells.map(([value]) => value !== null && value * one.factor < floor);
      const ys = cells.map(([value]) => (value === null ? null : Math.max(floor, value * one.factor)));
      const halves = cells.map(([, half], j) => (below[j] ? 0 : (half ?? 0) * one.factor));
      return {
        type: "scatter", mode: "lines+markers", x: xs, y: ys, name: side.name, visible: !hidden.sides.has(i),
        line: { color: side.end ? theme.colour("--ink") : theme.series(side.policy), width: 2, dash: side.end ? ["dash", "dot"][side.policy] : theme.dash(8 * side.predictor) },
        marker: { size: 9, symbol: below.map((low) => (side.end ? "x" : SHAPES[side.predictor % SHAPES.length] + (low ? "-open" : ""))) },
        error_y: { type: "data", array: halves, thickness: 1, width: 3, color: theme.colour("--faint") },
        text: cells.map((cell) => `<b>${theme.text(side.name)}</b><br>${one.label} ${text(cell, one)}`), hovertemplate: "%{text}<extra></extra>",
      };
    });
    theme.draw("curves", traces, theme.layout({ title: "" }, {
      hovermode: "closest", margin: { l: 56, r: 18, t: 20, b: 48 },
      xaxis: theme.axis({ title: theme.label(byLoad ? `load, ${lab.unit}` : "batch size"), tickvals: xs }),
      yaxis: theme.axis({ title: theme.label(named(one)), rangemode: "tozero" }),
    }));
  }
  function heat() {
    const one = lab.metrics[at("heat-metric")], all = lab.values[one.name];
    const columns = lab.batches.flatMap((_, b) => lab.loads.map((_, l) => [b, l]));
    const spans = lab.batches.map((batch) => make("th", { scope: "colgroup", colspan: lab.loads.length }, `batch ${batch}`));
    const heads = columns.map(([, l]) => make("th", { scope: "col" }, lab.loadTexts[l]));
    const range = columns.map(([b, l]) => {
      const values = all.map((side) => side[b][l][0]).filter((v) => v !== null);
      return [Math.min(...values), Math.max(...values)];
    });
    const rows = lab.sides.map((side, i) => make("tr", {}, make("th", { scope: "row" }, side.name), ...columns.map(([b, l], j) => {
      const cell = all[i][b][l], [low, high] = range[j];
      if (cell[0] === null) return make("td", { class: "none" }, "–");
      const gap = one.name === "gap_closed", bad = gap && cell[0] < 0;
      const share = gap ? Math.min(1, Math.abs(cell[0])) : high > low ? (cell[0] - low) / (high - low) : 0.5;
      const shade = one.better ? Math.round(4 + 46 * (one.better > 0 ? share : 1 - share)) : 0;
      return make("td", { class: bad ? "bad" : null, style: `--heat:${shade}%`, title: `${side.name}: ${text(cell, one)}` }, number(cell[0] * one.factor));
    })));
    element("heat").replaceChildren(make("thead", {}, make("tr", {}, make("td", {}), ...spans), make("tr", {}, make("td", {}, named(one)), ...heads)), make("tbody", {}, ...rows));
  }
  // A legend with entries that hide their curves.
  function legend(id, entries, draw) {
    element(id).replaceChildren(...entries.map(([key, name, mark]) => {
      const button = make("button", { type: "button", "aria-pressed": String(!hidden[id].has(key)) }, mark, name);
      button.addEventListener("click", () => {
        hidden[id].has(key) ? hidden[id].delete(key) : hidden[id].add(key);
        button.setAttribute("aria-pressed", String(!hidden[id].has(key)));
        draw();
      });
      return make("li", {}, button);
    }));
  }
  const swatch = (i) => make("i", { class: "swatch", style: `--c:var(--series-${i % 8})` });
  // A policy's colour, a predictor's dash and mark.
  const DASHES = ["none", "7 3", "2 3", "7 3 2 3"]; // as theme.dash
  const keyed = (s) => {
    const made = make("span", { class: "key", style: `--c:var(--series-${s.policy % 8})` }, SIGNS[s.predictor % SIGNS.length]);
    made.insertAdjacentHTML("afterbegin", `<svg width="24" height="8" aria-hidden="true"><path d="M0 4H24" stroke="currentColor" stroke-width="2" stroke-dasharray="${DASHES[s.predictor % 4]}"/></svg>`);
    return made;
  };
  const sign = (i) => make("span", { class: "mark" }, SIGNS[i % SIGNS.length]);
  function fixedOptions() {
    const byLoad = at("across") === 0;
    options("fixed", byLoad ? lab.batches.map((b) => `batch ${b}`) : lab.loadTexts, 0);
  }
  function open() {
    const own = lab.sides.filter((side) => !side.end);
    lab.tails = ["jct.p99/fcfs", "jct.p99/oracle", "slowdown.p99", "wait.max"].filter((name) => metric(name));
    options("load", lab.loadTexts, lab.loads.length - 1);
    options("batch", lab.batches.map(String), lab.batches.length - 1);
    options("tail", lab.tails.map((name) => metric(name).label), 0);
    options("metric", lab.metrics.map(named), 0);
    options("heat-metric", lab.metrics.map(named), 0);
    options("across", ["loads", "batch sizes"], lab.loads.length > 1 || lab.batches.length < 2 ? 0 : 1);
    fixedOptions();
    legend("policies", [...new Set(own.map((s) => s.policy))].map((i) => [i, lab.policies[i], swatch(i)]), frontier);
    legend("predictors", [...new Set(own.map((s) => s.predictor))].map((i) => [i, lab.predictors[i], sign(i)]), frontier);
    legend("sides", lab.sides.map((s, i) => [i, s.name, s.end ? make("span", { class: "mark" }, "✕") : keyed(s)]), curves);
    for (const id of ["load", "batch", "tail"]) element(id).addEventListener("change", frontier);
    for (const id of ["metric", "fixed"]) element(id).addEventListener("change", curves);
    element("across").addEventListener("change", () => { fixedOptions(); curves(); });
    element("heat-metric").addEventListener("change", heat);
  }
  const draw = () => { frontier(); curves(); heat(); };
  open();
  theme.start(draw);
})();
