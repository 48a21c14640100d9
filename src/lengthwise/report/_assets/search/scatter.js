"use strict";
// Cost against latency, with limits that the reader can move.
(() => {
  const { element, known, number, make } = study;
  const SYMBOLS = ["circle", "diamond", "square", "triangle-up"]; // repeated colours get another symbol
  const plot = element("scatter"), UIDS = ["loads", "operating"];
  const REACH = 2; // the axes end at this multiple of the largest value of the Pareto front, of a limit and of a chosen configuration
  let metric = "", marks = [[], []], outside = [], waiting = false, handles = [];

  // Metrics with a figure: those of the frontiers and of latency limits.
  function metrics() {
    const limited = study.plan.limits.map((limit) => limit.metric).filter((name) => /^m?s$/.test(study.metric(name).unit));
    return [...new Set([...limited.filter((name) => name in study.plan.frontiers), ...Object.keys(study.plan.frontiers), ...limited])];
  }
  function tabs() {
    const names = metrics();
    if (!names.includes(metric)) metric = names[0] ?? "";
    element("metrics").replaceChildren(...names.map((name) => {
      const button = make("button", { type: "button", "aria-pressed": name === metric }, study.metric(name).label);
      button.addEventListener("click", () => { metric = name; tabs(); draw(); });
      return button;
    }));
  }

  function collect() {
    marks = [[], []]; // loads, operating points
    for (const [i, choice] of study.simulated()) choice.points.forEach((point, at) => {
      const x = study.value(point, metric), y = point[1];
      if (known(x) && known(y) && x > 0) marks[at === choice.at ? 1 : 0].push({ i, at, choice, point, x: x * study.metric(metric).factor, y });
    });
  }
  function hover({ choice, point, at }) {
    const lines = [`<b>${theme.text(choice.name)}</b>`, `${number(point[0])} requests/s${at === choice.at ? ", operating point" : ""}`, `$ ${number(point[1])} per 1,000 requests`];
    const shown = new Set([metric, ...study.plan.limits.map((limit) => limit.metric)]);
    for (const name of shown) lines.push(`${theme.text(study.metric(name).label)} ${study.amount(name, study.value(point, name))}`);
    return lines.join("<br>");
  }
  const single = () => element("colour").value === "one";
  function shade({ i, choice }) {
    if (single()) return i === +element("one").value ? "--series-0" : "--faint";
    const setting = choice.settings[+element("colour").value];
    return setting === undefined || setting < 0 ? "--faint" : `--series-${setting % 8}`;
  }
  function symbol({ choice }) {
    const setting = single() ? 0 : choice.settings[+element("colour").value];
    return SYMBOLS[Math.floor(Math.max(0, setting ?? 0) / 8) % 4];
  }
  // A CSS class, because a redraw of all marks is too slow while a limit is dragged.
  function dim() {
    marks.forEach((group, k) => plot.querySelectorAll(`.trace${UIDS[k]} path.point`).forEach((path) => {
      path.classList.toggle("off", !study.meetsLimits(group[path.__data__.i].point));
    }));
  }
  const chosen = () => (single() ? marks.flat().filter((m) => m.i === +element("one").value).sort((a, b) => a.point[0] - b.point[0]) : []);
  // A few overloaded or expensive configurations would otherwise press the good ones into a corner.
  function visible(all) {
    const trades = (study.plan.frontiers[metric] ?? []).filter((t) => known(t[0])), factor = study.metric(metric).factor;
    const bounds = study.plan.limits.filter((limit) => limit.metric === metric).flatMap((limit) => [limit.bound * 0.9 * factor, limit.bound * 1.12 * factor]);
    const near = (values, needed) => [...(trades.length ? values.filter((v) => v <= REACH * Math.max(...needed)) : values), ...needed];
    const xs = near(all.map((m) => m.x), [...bounds, ...trades.map((t) => t[0] * factor), ...chosen().map((m) => m.x)]);
    const ys = near(all.map((m) => m.y), [...trades.map((t) => t[1]), ...chosen().map((m) => m.y)]);
    outside = all.filter((m) => m.x > Math.max(...xs) || m.y > Math.max(...ys));
    return [xs, ys];
  }
  function traces() {
    const factor = study.metric(metric).factor, seen = {}, colour = (name) => (seen[name] ??= theme.colour(name));
    const trades = study.plan.frontiers[metric] ?? [];
    const ordered = [...trades].filter((t) => known(t[0])).sort((a, b) => a[0] - b[0]);
    const end = (t, k, sign) => (known(t[k]) ? Math.max(0, sign * (t[k] - t[0])) * factor : 0);
    const group = (k, size, line) => ({
      type: "scatter", mode: "markers", uid: UIDS[k], x: marks[k].map((m) => m.x), y: marks[k].map((m) => m.y), text: marks[k].map(hover),
      hovertemplate: "%{text}<extra></extra>", marker: { size, color: marks[k].map((mark) => colour(shade(mark))), symbol: marks[k].map(symbol), opacity: 0.9, line },
    });
    const one = chosen();
    return [
      { type: "scatter", mode: "lines", x: ordered.map((t) => t[0] * factor), y: ordered.map((t) => t[1]), hoverinfo: "skip",
        line: { color: theme.colour("--ink"), width: 1.4, shape: "hv" }, opacity: 0.55,
        error_x: { type: "data", symmetric: false, array: ordered.map((t) => end(t, 5, 1)), arrayminus: ordered.map((t) => end(t, 4, -1)), thickness: 1, width: 3 } },
      { type: "scatter", mode: "lines", x: one.map((m) => m.x), y: one.map((m) => m.y), hoverinfo: "skip", line: { color: theme.colour("--series-0"), width: 2 } },
      group(0, 6, { width: 0 }),
      group(1, 12, { width: 1.5, color: theme.colour("--card") }),
    ];
  }
  function draw() {
    collect();
    const current = study.metric(metric), [xs, ys] = visible(marks.flat());
    const unit = { s: "seconds", ms: "milliseconds" }[current.unit] ?? current.unit;
    const along = study.wide(xs) ? { type: "log", ...theme.logTicks(xs) } : { range: span(xs) };
    const up = study.wide(ys, 4) ? { type: "log", ...theme.logTicks(ys) } : { range: span(ys) };
    theme.draw(plot, traces(), theme.layout({ title: "" }, {
      title: undefined, hovermode: "closest", margin: { l: 58, r: 18, t: 34, b: 48 }, hoverdistance: 12,
      xaxis: theme.axis({ title: theme.label(`${current.label}, ${unit}`), fixedrange: true, ...along }),
      yaxis: theme.axis({ title: theme.label("$ per 1,000 requests"), fixedrange: true, ...up }),
    })).then(lines);
    legend();
    panel();
  }
  const span = (xs) => [0, 1.04 * Math.max(...xs, 0)];

  function legend() {
    const axis = study.plan.axes[+element("colour").value], used = new Set(marks.flat().map((m) => m.choice.settings[+element("colour").value]));
    const items = axis && !single() ? axis.values.map((name, i) => [i, name]).filter(([i]) => used.has(i)) : [];
    const swatch = (style, i = 0) => make("i", { class: `swatch ${SYMBOLS[Math.floor(i / 8) % 4]}`, style });
    const head = items.length ? [make("li", {}, `${axis.label}:`)] : [];
    element("colours").replaceChildren(...head, ...items.map(([i, name]) => make("li", {}, swatch(`--c:var(--series-${i % 8})`, i), name)),
      make("li", {}, swatch("--c:var(--faint);opacity:.35"), "breaks a limit"), make("li", {}, make("i", { class: "ring" }), "best now"), ...beyond());
    element("one-label").hidden = !single();
  }

  function beyond() {
    const { unit } = study.metric(metric), top = (key) => number(Math.max(...outside.map((m) => m[key])));
    const many = outside.length > 1 ? "marks lie" : "mark lies";
    return outside.length ? [make("li", { class: "outside" }, `${outside.length} ${many} outside, up to ${top("x")} ${unit} and $ ${top("y")}`)] : [];
  }

  // One draggable line per limit on this metric; the inputs next to the figure do the same by keyboard.
  function lines() {
    plot.querySelectorAll(".slo").forEach((line) => line.remove());
    plot.querySelector(".ring")?.remove();
    plot.append(make("i", { class: "ring" }));
    handles = study.plan.limits.map((limit, i) => (limit.metric === metric ? handle(i) : null));
    place();
    circle();
    dim();
  }
  function handle(i) {
    const line = make("div", { class: "slo", "data-limit": i, "aria-hidden": "true" }, make("span", {}));
    line.addEventListener("pointerdown", (event) => { line.setPointerCapture(event.pointerId); event.preventDefault(); });
    line.addEventListener("pointermove", (event) => { if (line.hasPointerCapture(event.pointerId)) move(i, event.clientX); });
    plot.append(line);
    return line;
  }
  function move(i, clientX) {
    const axis = plot._fullLayout.xaxis, pixel = clientX - plot.getBoundingClientRect().left - axis._offset;
    const x = axis.p2d(Math.min(axis._length - 1, Math.max(1, pixel)));
    study.setBound(i, +(x / study.metric(metric).factor).toPrecision(3));
  }
  function place() {
    const { xaxis, yaxis } = plot._fullLayout;
    handles.forEach((line, i) => {
      if (!line) return;
      const limit = study.plan.limits[i], inside = xaxis.d2p(study.bounds[i] * study.metric(metric).factor);
      const at = Math.min(xaxis._length, Math.max(0, Number.isFinite(inside) ? inside : 0));
      Object.assign(line.style, { left: `${xaxis._offset + at}px`, top: `${yaxis._offset}px`, height: `${yaxis._length}px` });
      line.classList.toggle("leftward", at > xaxis._length * 0.6);
      line.firstChild.textContent = `${study.sign(limit)} ${study.amount(metric, study.bounds[i])}`;
    });
  }

  function circle() {
    const best = study.best(), choice = best && study.plan.choices[best.choice], point = choice?.points?.[best.at];
    const x = point && study.value(point, metric), { xaxis, yaxis } = plot._fullLayout, ring = plot.querySelector(".ring");
    const inside = (axis, v) => axis.d2p(v) >= 0 && axis.d2p(v) <= axis._length;
    ring.hidden = !known(x) || !inside(xaxis, x * study.metric(metric).factor) || !inside(yaxis, point[1]);
    if (!ring.hidden) Object.assign(ring.style, {
      left: `${xaxis._offset + xaxis.d2p(x * study.metric(metric).factor)}px`, top: `${yaxis._offset + yaxis.d2p(point[1])}px`,
    });
  }

  function panel() {
    element("limits").replaceChildren(...study.plan.limits.map(row));
    inputs();
    now();
  }
  // Sliders are logarithmic and cover the simulated values and the requested bound.
  function ends(limit) {
    const vs = study.simulated().flatMap(([, choice]) => choice.points.map((point) => study.value(point, limit.metric))).filter((v) => known(v) && v > 0);
    return [0.9 * Math.min(...vs, limit.bound), 1.1 * Math.max(...vs, limit.bound)];
  }
  function row(limit, i) {
    const { label, factor, unit } = study.metric(limit.metric), [low, high] = ends(limit), id = `limit-${i}`;
    const field = make("input", { type: "number", id, step: "any", min: 0, inputmode: "decimal" });
    const slider = make("input", { type: "range", min: 0, max: 200, step: 1, "aria-label": `${label}, slider` });
    field.addEventListener("input", () => { if (field.value !== "" && +field.value >= 0) study.setBound(i, +field.value / factor); });
    slider.addEventListener("input", () => study.setBound(i, +(low * (high / low) ** (slider.value / 200)).toPrecision(3)));
    slider.toFraction = (bound) => (bound > 0 ? Math.round((200 * Math.log(bound / low)) / Math.log(high / low)) : 0);
    return make("div", { class: "limit" }, make("label", { for: id }, `${label} ${study.sign(limit)}`), make("span", {}, field, ` ${unit}`), slider);
  }
  function inputs() {
    element("limits").querySelectorAll(".limit").forEach((box, i) => {
      const [field, slider] = box.querySelectorAll("input"), bound = study.bounds[i];
      if (document.activeElement !== field) field.value = +(bound * study.metric(study.plan.limits[i].metric).factor).toPrecision(4);
      if (document.activeElement !== slider) slider.value = slider.toFraction(bound);
      slider.setAttribute("aria-valuetext", study.amount(study.plan.limits[i].metric, bound));
    });
    element("reset").disabled = study.isRequested();
  }
  function now() {
    const best = study.best(), { objective, choices } = study.plan, answer = choices[study.plan.best];
    if (!best) return element("now").replaceChildren(make("p", { class: "worse" }, "No simulated load meets these limits."));
    const choice = choices[best.choice], point = choice.points?.[best.at];
    const rows = [make("p", { class: "winner" }, choice.name), make("p", {}, make("b", {}, number(best.value, 4)), ` ${objective.unit}`)];
    rows.push(answer ? difference(best.value, study.objectiveAt(answer, answer.at)) : make("p", { class: "muted" }, "No configuration meets the requested limits."));
    const rate = point && point[0] < 1e299 ? `${number(point[0])} requests/s` : "", capacity = study.isRequested() && known(choice.capacity[0]);
    const load = capacity ? `, at the capacity of ${study.estimate(...choice.capacity).filter(Boolean).join(" ± ")} requests/s. Metrics are of ${rate}, the lower end of its interval` : rate && `, at ${rate}`;
    rows.push(make("p", { class: "muted" }, `${choice.gpus.toLocaleString("en")} GPUs, $ ${number(choice.price)} per hour${load}.`));
    element("now").replaceChildren(...rows);
  }
  function difference(value, from) {
    if (study.isRequested()) return make("p", { class: "muted" }, "The requested limits.");
    const change = 100 * (value / from - 1), good = study.plan.objective.higher === change > 0;
    if (Math.abs(change) < 0.05) return make("p", { class: "muted" }, "As good as the answer.");
    return make("p", { class: good ? "better" : "worse" }, `${change > 0 ? "+" : "−"}${number(Math.abs(change), 2)} % from the answer`);
  }

  function moved() {
    place();
    inputs();
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      dim();
      circle();
      now();
    });
  }
  function open() {
    tabs();
    const many = study.plan.axes.map((axis, i) => [i, axis.label, axis.values.length]).filter(([, , count]) => count > 1);
    study.options(element("colour"), [...many, ["one", "one configuration"]], many[0]?.[0] ?? "one");
    study.options(element("one"), study.simulated().map(([i, choice]) => [i, choice.name]), study.simulated()[0]?.[0] ?? "");
  }
  const pick = (event) => {
    const mark = marks[event.points[0].curveNumber - 2]?.[event.points[0].pointNumber];
    if (!mark) return;
    element("one").value = mark.i;
    element("colour").value = "one";
    draw();
  };
  element("reset").addEventListener("click", () => study.plan.limits.forEach((limit, i) => study.setBound(i, limit.bound)));
  for (const id of ["colour", "one"]) element(id).addEventListener("change", draw);
  study.parts.push({ open, draw: () => { draw(); plot.removeAllListeners?.("plotly_click"); plot.on?.("plotly_click", pick); }, limits: moved });
  addEventListener("resize", () => setTimeout(() => { place(); circle(); }, 200));
})();
