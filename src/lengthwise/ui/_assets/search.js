// The search runs as a job; its answer is filtered here while limits move.
const form = $("settings"), FACTORS = { ms: 1e3, s: 1 };
let running = null, answered = null, plan = null, metric = "", bounds = {}, chosen = null;

async function search() {
  running?.abort();
  const mine = (running = new AbortController());
  const fields = { ...values(form), ...trace };
  link({ ...fields, ...NO_TRACE });
  showError(null);
  $("running").hidden = $("stop").hidden = false;
  $("empty").hidden = true;
  $("bar").removeAttribute("value");
  try {
    answered = await job("search", "run", fields, (step, done, of) => {
      $("step").textContent = of ? `${step}: ${done} of ${of} evaluations` : step;
      if (of) { $("bar").max = of; $("bar").value = done; }
    }, mine.signal);
    draw();
    answeredBy(fields);
  } catch (error) {
    if (error.name === "AbortError") $("status").textContent = "Cancelled.";
    else showError(error);
  } finally {
    if (running === mine) $("running").hidden = $("stop").hidden = true;
    document.body.dataset.answers = Number(document.body.dataset.answers || 0) + 1;
  }
}

function draw() {
  const { found } = answered, { answer } = found;
  plan = found.columns;
  $("found").hidden = false;
  $("status").textContent = answer.effort;
  $("best").textContent = answer.name ? `${answer.name} is the cheapest within the limits. ${answer.tied}` : answer.no_answer;
  const objective = { label: answer.objective, value: answer.value, unit: answer.unit, interval: answer.half };
  const numbers = Object.entries(answer.key_values || {}).filter(([, text]) => text.length < 40);
  cards($("cards"), answer.name ? [objective, ...numbers.map(([label, text]) => ({ label, value: text }))] : []);
  const misses = (answer.misses || []).map(([name, text]) => `${name}: ${text}`);
  const bound = (answer.key_values || {})["Bound by"];
  const texts = [...(bound ? [`The limit that stops a higher rate: ${bound}.`] : []), ...(answer.name ? answer.reasons : []), ...misses];
  $("reasons").replaceChildren(...texts.map((one) => element("li", { textContent: one })));
  const groups = found.groups.map(([name, count, , example]) => [name, count, example]);
  $("others-box").hidden = !groups.length;
  table($("others"), ["reason", "configurations", "example"], groups);
  const timed = plan.metrics.filter((one) => one.unit in FACTORS && plan.frontiers[one.name]);
  if (!timed.some((one) => one.name === metric)) metric = timed[0]?.name || "";
  bounds = Object.fromEntries(plan.limits.filter((one) => !one.atLeast).map((one) => [one.metric, one.bound]));
  $("metrics").replaceChildren(...timed.map((one) => {
    const button = element("button", { type: "button", textContent: one.label, "aria-pressed": one.name === metric });
    button.addEventListener("click", () => {
      metric = one.name;
      for (const other of $("metrics").children) other.setAttribute("aria-pressed", other === button);
      chart();
    });
    return button;
  }));
  boundSliders();
  const names = plan.choices.flatMap((choice, i) => (choice.points ? [element("option", { value: i, textContent: `${choice.rank} ${choice.name}` })] : []));
  for (const [at, id] of [[0, "first"], [1, "second"]]) {
    $(id).replaceChildren(...names.map((one) => one.cloneNode(true)));
    $(id).selectedIndex = Math.min(at, names.length - 1);
  }
  compare();
  ranking();
  filter();
  same(found);
}

// Limits that move
const at = (name) => plan.metrics.findIndex((one) => one.name === name);
const reading = (point, name) => point[3 + at(name)]; // seconds
const known = (x) => x !== null && x !== undefined && Math.abs(x) < 1e299;

function boundSliders() {
  $("bounds").replaceChildren(...Object.keys(bounds).filter((name) => at(name) >= 0 && plan.metrics[at(name)].unit in FACTORS).map((name) => {
    const input = element("input", { type: "range", min: -2, max: 2, step: 0.01, id: `bound-${name}`, value: Math.log10(bounds[name]) });
    const shownBound = element("output", { value: duration(bounds[name]) });
    input.setAttribute("aria-valuetext", duration(bounds[name]));
    input.addEventListener("input", () => setBound(name, 10 ** Number(input.value)));
    return element("label", {}, `${plan.metrics[at(name)].label} at most `, shownBound, input);
  }));
}

function setBound(name, bound) {
  bounds[name] = bound;
  const input = $(`bound-${name}`);
  input.value = Math.log10(bound);
  input.setAttribute("aria-valuetext", duration(bound));
  input.previousElementSibling.value = duration(bound);
  filter();
}

const meets = (point) => Object.entries(bounds).every(([name, bound]) => !known(reading(point, name)) || reading(point, name) <= bound);

function filter() {
  const left = plan.choices.flatMap((choice) => {
    const inside = (choice.points || []).filter((point) => known(point[1]) && meets(point));
    return inside.length ? [{ choice, point: inside.reduce((a, b) => (b[1] < a[1] ? b : a)) }] : [];
  }).sort((a, b) => a.point[1] - b.point[1]);
  const best = left[0];
  const simulated = plan.choices.filter((choice) => choice.points).length;
  $("within").textContent = best
    ? `Within these limits: ${left.length} of ${simulated} configurations; the cheapest simulated load is ${best.choice.name} at ${three(best.point[0])} requests/s, $ ${three(best.point[1])} per 1,000 requests. Search again with these limits to size the replicas for them.`
    : "No simulated load meets these limits.";
  chart();
}

// The chart: latency across, $ per 1,000 requests up.
const W = 640, H = 320, L = 64, R = 16, T = 12, B = 40;

function chart() {
  const marks = plan.choices.flatMap((choice, i) => (choice.points || []).map((point, k) => ({ choice, i, point, isAt: k === choice.at, x: reading(point, metric), y: point[1] })))
    .filter((mark) => known(mark.x) && known(mark.y) && mark.x > 0 && mark.y > 0);
  const front = (plan.frontiers[metric] || []).filter(([x, y]) => known(x) && known(y)).sort((a, b) => a[0] - b[0]);
  if (!marks.length) return $("chart").replaceChildren();
  const bound = bounds[metric], near = [...front.map(([x]) => x), ...marks.filter((m) => m.isAt).map((m) => m.x), ...(bound ? [bound] : [])];
  const highX = 2 * Math.max(...near), highY = 2 * Math.max(...front.map(([, y]) => y), ...marks.filter((m) => m.isAt).map((m) => m.y));
  const inside = marks.filter((m) => m.x <= highX && m.y <= highY);
  const x = axis(Math.min(...inside.map((m) => m.x), bound || Infinity) / 1.2, highX, L, W - R), y = axis(Math.min(...inside.map((m) => m.y)) / 1.2, highY, H - B, T);
  const label = plan.metrics[at(metric)].label;
  const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "group", "aria-label": `$ per 1,000 requests over ${label}` });
  for (const tick of y.ticks) {
    picture.append(svg("line", { class: "axis", x1: L, x2: W - R, y1: y.of(tick), y2: y.of(tick) }), svg("text", { x: L - 6, y: y.of(tick) + 4, "text-anchor": "end" }, `$ ${three(tick)}`));
  }
  for (const tick of x.ticks) picture.append(svg("text", { x: x.of(tick), y: H - B + 16, "text-anchor": "middle" }, duration(tick)));
  picture.append(svg("text", { x: (L + W - R) / 2, y: H - 6, "text-anchor": "middle" }, label));
  const steps = front.map(([fx, fy], k) => `${k ? `H${x.of(fx).toFixed(1)}V` : `M${x.of(fx).toFixed(1)},`}${y.of(fy).toFixed(1)}`).join("");
  if (steps) picture.append(svg("path", { class: "front", d: steps }));
  const axisOf = plan.axes.findIndex((one) => one.key === "deployment.gpu"), colour = (choice) => (axisOf < 0 ? 0 : Math.max(0, choice.settings[axisOf])) % 8;
  for (const mark of inside) {
    const text = `${mark.choice.name}: ${label} ${duration(mark.x)}, $ ${three(mark.y)} per 1,000 requests at ${three(mark.point[0])} requests/s`;
    const dot = svg("circle", { class: `dot series-${colour(mark.choice)}${meets(mark.point) ? "" : " off"}${mark.i === chosen ? " picked" : ""}`, cx: x.of(mark.x), cy: y.of(mark.y), r: mark.isAt ? 8 : 3.5 });
    if (mark.isAt) for (const [key, of] of Object.entries({ tabindex: 0, role: "button", "aria-label": text })) dot.setAttribute(key, of);
    dot.append(svg("title", {}, text));
    const pick = () => {
      $("first").value = mark.i;
      compare();
    };
    dot.addEventListener("click", pick);
    dot.addEventListener("keydown", (event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), pick()));
    picture.append(dot);
  }
  if (bound) {
    const line = svg("g", { class: "handle" });
    line.append(svg("line", { class: "limit", x1: x.of(bound), x2: x.of(bound), y1: T, y2: H - B }), svg("rect", { x: x.of(bound) - 9, y: T, width: 18, height: H - B - T, fill: "transparent" }));
    line.addEventListener("pointerdown", (event) => {
      event.preventDefault();
      const from = picture.getBoundingClientRect();
      const move = ({ clientX }) => {
        const place = Math.min(W - R, Math.max(L, ((clientX - from.left) / from.width) * W));
        setBound(metric, x.at(place));
      };
      const stop = () => {
        removeEventListener("pointermove", move);
        removeEventListener("pointerup", stop);
      };
      addEventListener("pointermove", move);
      addEventListener("pointerup", stop);
    });
    picture.append(line);
  }
  const figure = element("figure", {}, picture);
  $("chart").replaceChildren(figure);
  const used = axisOf < 0 ? [] : [...new Set(inside.map((m) => m.choice.settings[axisOf]))].sort();
  $("colours").replaceChildren(...used.map((i) => element("li", {}, element("i", { className: `series-${i % 8} swatched` }), plan.axes[axisOf].values[i])));
}

// Two configurations, and the ranking
const estimate = ([x, half, span], factor = 1) => (known(x) ? `${three(x * factor)}${half ? ` \u00b1 ${three(half * factor)}` : ""}${known(span?.[0]) ? ` (${span.map((end) => (known(end) ? three(end * factor) : "\u221e")).join("\u2013")})` : ""}` : "\u2013");
const here = (choice, i) => (choice.at >= 0 ? [choice.points[choice.at][3 + i], choice.halves[i], choice.spans[i]] : [null, null]);

function compare() {
  const [a, b] = ["first", "second"].map((id) => plan.choices[Number($(id).value)]);
  chosen = Number($("first").value);
  if (!a || !b) return;
  const change = ([x, hx], [y, hy]) => {
    if (!known(x) || !known(y) || !x) return "";
    const percent = 100 * (y / x - 1);
    return Math.abs(percent) < 0.5 ? "same" : `${percent > 0 ? "+" : "\u2212"}${three(Math.abs(percent))} %${known(hx) && known(hy) && Math.abs(y - x) <= hx + hy ? " (within the intervals)" : ""}`;
  };
  const line = (label, x, y, factor) => [label, estimate(x, factor), estimate(y, factor), change(x, y)];
  const rows = [
    line(`${plan.objective.label}, ${plan.objective.unit}`, a.objective, b.objective), line("price, $/h", [a.price, 0], [b.price, 0]), line("GPUs", [a.gpus, 0], [b.gpus, 0]),
    ["stops at", a.binds || "\u2013", b.binds || "\u2013", ""],
    ...plan.axes.map((one, i) => [one.label, one.values[a.settings[i]] ?? "\u2013", one.values[b.settings[i]] ?? "\u2013", ""]),
    ...plan.metrics.filter((one) => /^(ttft|tpot|tbt|jct)\.(p50|p90|p99)$|_per_s$/.test(one.name)).map((one) => {
      const i = at(one.name);
      return line(`${one.label}${one.unit ? `, ${one.unit}` : ""}`, here(a, i), here(b, i), one.factor);
    }),
  ];
  table($("compared"), ["number", a.name, b.name, "second against first"], rows);
  if ($("chart").firstChild) chart();
}

function ranking() {
  const best = plan.choices[plan.best], limits = plan.limits.filter((one) => at(one.metric) >= 0);
  const rows = plan.choices.filter((choice) => choice.points).map((choice) => {
    const dear = best && known(choice.objective[0]) && choice !== best ? (plan.objective.higher ? best.objective[0] / choice.objective[0] : choice.objective[0] / best.objective[0]) : 1;
    const reason = choice === best ? "the best" : choice.rank.startsWith("=") ? "tied with the best" : dear > 1 ? `${three(dear)} times the ${plan.objective.label.toLowerCase()}` : choice.status;
    return [
      choice.name, choice.rank, String(choice.gpus), three(choice.price), reason,
      ...limits.map((one) => estimate(here(choice, at(one.metric)), plan.metrics[at(one.metric)].factor)),
      choice.binds || "\u2013",
    ];
  });
  table($("ranking"), ["configuration", "rank", "GPUs", "$/h", "result", ...limits.map((one) => `${plan.metrics[at(one.metric)].label}, ${plan.metrics[at(one.metric)].unit}`), "stops at"], rows);
}

async function start() {
  const choices = await (await send("choices/search")).json();
  options(form.elements.model, choices.models);
  options(form.elements.workload, choices.workloads);
  const check = (name, one, label) => element("label", {}, element("input", { type: "checkbox", name, value: one, "data-list": "" }), ` ${label}`);
  const given = { ...choices.defaults, ...linked(choices.defaults) };
  const gpus = Object.entries(choices.gpus).sort(([a], [b]) => given.gpus.includes(b) - given.gpus.includes(a)); // the chosen ones first
  $("gpus").append(...gpus.map(([name, price]) => {
    const at = { type: "number", name: "prices", min: 0, step: "any", "data-key": name, "aria-label": `Price of ${name}, $ an hour` };
    return element("div", {}, check("gpus", name, name), element("input", { ...at, defaultValue: price?.toFixed(2) ?? "" }));
  }));
  $("tp").append(...["1", "2", "4", "8", "16"].map((one) => check("tp", one, one)));
  fill(form, given);
  attachTrace(moved);
  onMove(form, () => {
    label(form);
    moved();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    search();
    reveal();
  });
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    useTrace(NO_TRACE);
    fill(form, choices.defaults);
    moved();
  });
  $("stop").addEventListener("click", () => running?.abort());
  for (const id of ["first", "second"]) $(id).addEventListener("change", compare);
  for (const button of document.querySelectorAll("[data-file]")) {
    button.addEventListener("click", async () => {
      const fields = ["scenario", "launch"].includes(button.dataset.file) ? { choice: plan.choices[chosen].name } : {};
      try {
        button.disabled = true;
        await download(answered.id, "search", button.dataset.file, fields);
        showError(null);
      } catch (error) {
        showError(error);
      } finally {
        button.disabled = false;
      }
    });
  }
  document.body.dataset.ready = 1;
}

start();
