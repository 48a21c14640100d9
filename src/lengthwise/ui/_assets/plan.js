"use strict";
// Every input asks the server at once for an answer with one seed, and after a pause for one with intervals.
const PAUSE_MS = 350, OWN_LENGTHS = "own lengths";
const $ = (id) => document.getElementById(id);
const form = $("settings");
let choices, running = null, pause = 0, moved = 0;

const scales = {
  log: { read: (x) => 10 ** x, write: Math.log10 },
  two: { read: (x) => 2 ** x, write: Math.log2 },
  plain: { read: (x) => x, write: (x) => x },
};
const scale = (input) => scales[input.dataset.scale || "plain"];
const significant = (x) => Number(x.toPrecision(2));

function value(input) {
  if (input.type !== "range") return input.value;
  const x = scale(input).read(Number(input.value));
  return input.dataset.round || input.dataset.scale === "two" ? Math.round(x) : significant(x);
}

function text(input) {
  const x = value(input);
  if (input.dataset.unit !== "ms") return x.toLocaleString("en");
  return x >= 1000 ? `${significant(x / 1000)} s` : `${x} ms`;
}

function settings() {
  const made = {};
  for (const input of form.elements) {
    if (!input.name) continue;
    made[input.name] = input.dataset.unit === "ms" ? `${value(input)}ms` : value(input);
  }
  made.tp = made.tp ? Number(made.tp) : null;
  if (made.workload === OWN_LENGTHS) made.workload = `${value($("prompt"))}/${value($("output"))}`;
  return made;
}

function show(fields) {
  for (const [name, x] of Object.entries(fields)) {
    const input = form.elements[name];
    if (!input) continue;
    if (name === "workload" && /^\d+\/\d+$/.test(x)) {
      const [prompt, output] = x.split("/").map(Number);
      input.value = OWN_LENGTHS;
      $("prompt").value = Math.log10(prompt);
      $("output").value = Math.log10(output);
    } else if (input.dataset.unit === "ms") input.value = Math.log10(milliseconds(x));
    else if (input.type === "range") input.value = scale(input).write(x);
    else input.value = x ?? "";
  }
  label();
}

const milliseconds = (time) => parseFloat(time) * (time.endsWith("ms") ? 1 : 1000);

function label() {
  $("lengths").hidden = form.elements.workload.value !== OWN_LENGTHS;
  for (const input of form.querySelectorAll("input[type=range]")) {
    form.querySelector(`output[for=${input.id}]`).value = text(input);
    input.setAttribute("aria-valuetext", text(input));
  }
}

async function ask(complete) {
  running?.abort();
  const mine = (running = new AbortController());
  $("answer").setAttribute("aria-busy", "true");
  try {
    const fields = settings();
    const response = await fetch("api/plan", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ ...fields, complete }),
      signal: mine.signal,
    });
    const found = await response.json();
    if (mine.signal.aborted) return;
    $("error").hidden = response.ok;
    if (response.ok) draw(found, fields);
    else {
      $("error").textContent = found.error;
      $("status").textContent = "";
    }
    history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(fields))}`);
    requestAnimationFrame(() => setTimeout(() => mine.signal.aborted || painted(complete, response.ok)));
  } catch (error) {
    if (error.name === "AbortError") return;
    $("error").hidden = false;
    $("error").textContent = "The planner does not answer. Is `lengthwise ui` still running?";
  } finally {
    if (running === mine) $("answer").removeAttribute("aria-busy");
  }
}

function painted(complete, ok) {
  const took = Math.round(performance.now() - moved);
  if (!complete) {
    document.body.dataset.firstMs = took;
    if (ok) pause = setTimeout(() => ask(true), PAUSE_MS);
  }
  document.body.dataset.answers = Number(document.body.dataset.answers || 0) + 1;
  if (ok) $("status").textContent = complete ? `Complete, with intervals, after ${took} ms.` : `One seed, after ${took} ms; intervals follow.`;
}

function changed() {
  moved = performance.now();
  label();
  clearTimeout(pause);
  ask(false);
}

function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  Object.assign(made, properties);
  made.append(...children);
  return made;
}

function draw(found, fields) {
  $("deployment").textContent = found.deployment;
  $("cards").replaceChildren(...found.cards.map((card) => {
    const more = [card.interval, card.model].filter(Boolean).join(" ");
    const dd = element("dd", {}, `${card.value} `, element("span", { textContent: card.unit }), element("small", { textContent: more }));
    return element("div", {}, element("dt", { textContent: card.label }), dd);
  }));
  $("bottleneck").textContent = `${found.bottleneck.description} ${found.bottleneck.warning}`.trim();
  const total = found.shares.reduce((sum, one) => sum + one.mean_s, 0) || 1;
  const parts = found.shares.map((one) => `${one.part} ${duration(one.mean_s)} (${Math.round((100 * one.mean_s) / total)} %)`);
  $("shares").replaceChildren(...found.shares.map((one) => {
    const made = element("span", { className: one.part });
    made.style.flex = `${one.mean_s / total} 0 0`;
    return made;
  }));
  $("key").replaceChildren(...found.shares.map((one, i) => element("li", {}, element("i", { className: one.part }), parts[i])));
  const limits = { ttft: milliseconds(fields.ttft) / 1000, tpot: milliseconds(fields.tpot) / 1000 };
  $("charts").replaceChildren(...Object.entries(found.charts).map(([key, chart]) => figure(chart, limits[key], fields.rate)));
  table(found.charts);
  $("notes-box").hidden = !found.notes.length;
  $("notes").replaceChildren(...found.notes.map((note) => element("li", { textContent: note })));
  $("command").textContent = found.command;
  $("scenario").textContent = found.scenario;
}

function duration(seconds) {
  return seconds < 0.9995 ? `${three(1000 * seconds)} ms` : `${three(seconds)} s`;
}

const three = (x) => Number(x.toPrecision(3)).toLocaleString("en");
const shown = (x, unit) => (x === null ? "\u2013" : unit === "s" ? duration(x) : three(x));

function table(charts) {
  const all = Object.values(charts);
  const heads = ["requests/s", ...all.map((chart) => chart.label)].map((head) => element("th", { textContent: head, scope: "col" }));
  $("table").tHead.replaceChildren(element("tr", {}, ...heads));
  $("table").tBodies[0].replaceChildren(...all[0].rates.map((rate, i) => element(
    "tr", {}, element("th", { textContent: three(rate), scope: "row" }),
    ...all.map((chart) => {
      const half = chart.half_widths[i];
      return element("td", { textContent: shown(chart.values[i], chart.unit) + (half ? ` \u00b1 ${shown(half, chart.unit)}` : "") });
    }),
  )));
}

// Charts: both axes logarithmic, one line with the band of its intervals.
const WIDTH = 320, HEIGHT = 190, LEFT = 52, RIGHT = 10, TOP = 8, BOTTOM = 26;

function svg(name, attributes, content = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, x] of Object.entries(attributes)) made.setAttribute(key, x);
  made.textContent = content;
  return made;
}

function figure(chart, limit, chosen) {
  const points = chart.rates.map((rate, i) => [rate, chart.values[i], chart.half_widths[i] || 0]).filter(([, x]) => x > 0);
  const caption = element("figcaption", { textContent: `${chart.label}, ${chart.unit === "s" ? "time" : chart.unit}, over requests/s` });
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  const at = points.reduce((best, one) => (Math.abs(one[0] - chosen) < Math.abs(best[0] - chosen) ? one : best), points[0]);
  picture.setAttribute("aria-label", at ? `${chart.label} is ${shown(at[1], chart.unit)} at ${three(at[0])} requests/s` : "no request finished");
  if (!points.length) return element("figure", {}, caption, picture);
  const ends = points.flatMap(([, x, half]) => [Math.max(x - half, x / 10), x + half]).concat(limit ? [limit] : []);
  const x = axis(points[0][0], points.at(-1)[0], LEFT, WIDTH - RIGHT);
  const y = axis(Math.min(...ends), Math.max(...ends), HEIGHT - BOTTOM, TOP);
  for (const tick of y.ticks) {
    picture.append(svg("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y.of(tick), y2: y.of(tick) }));
    picture.append(svg("text", { x: LEFT - 6, y: y.of(tick) + 4, "text-anchor": "end" }, shown(tick, chart.unit)));
  }
  for (const tick of x.ticks) picture.append(svg("text", { x: x.of(tick), y: HEIGHT - 8, "text-anchor": "middle" }, three(tick)));
  picture.append(svg("line", { class: "chosen", x1: x.of(chosen), x2: x.of(chosen), y1: TOP, y2: HEIGHT - BOTTOM }));
  if (limit) picture.append(svg("line", { class: "limit", x1: LEFT, x2: WIDTH - RIGHT, y1: y.of(limit), y2: y.of(limit) }));
  const path = (of) => points.map((one) => `${x.of(one[0]).toFixed(1)},${y.of(of(one)).toFixed(1)}`);
  const upper = path(([, value, half]) => value + half), lower = path(([, value, half]) => Math.max(value - half, value / 10));
  picture.append(svg("polygon", { class: "band", points: [...upper, ...lower.reverse()].join(" ") }));
  picture.append(svg("polyline", { class: "line", points: path((one) => one[1]).join(" ") }));
  picture.append(svg("circle", { class: "point", cx: x.of(at[0]), cy: y.of(at[1]), r: 4 }));
  return element("figure", {}, caption, picture);
}

function axis(low, high, from, to) {
  if (high < low * 1.5) [low, high] = [low / 1.3, high * 1.3];
  const span = Math.log(high / low), decades = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++) decades.push(10 ** power, 2 * 10 ** power, 5 * 10 ** power);
  let ticks = decades.filter((tick) => tick >= low && tick <= high);
  if (ticks.length > 6) ticks = ticks.filter((tick) => Math.abs(Math.log10(tick) - Math.round(Math.log10(tick))) < 1e-6);
  if (ticks.length < 2) ticks = [low, high];
  return { of: (x) => from + ((to - from) * Math.log(x / low)) / span, ticks };
}

async function copy(button) {
  const content = $(button.dataset.copy).textContent;
  await navigator.clipboard.writeText(content);
  const before = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = before), 1200);
}

async function start() {
  choices = await (await fetch("api/choices")).json();
  const lists = { model: choices.models, gpu: choices.gpus, workload: [...choices.workloads, OWN_LENGTHS], policy: choices.policies };
  for (const [name, names] of Object.entries(lists)) form.elements[name].append(...names.map((one) => element("option", { value: one, textContent: one })));
  $("prompt").value = 3;
  $("output").value = 2.3;
  let given = {};
  try {
    given = JSON.parse(decodeURIComponent(location.hash.slice(1)) || "{}");
  } catch {
    // A damaged link shows the defaults.
  }
  show({ ...choices.defaults, ...given });
  form.addEventListener("input", changed);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    show(choices.defaults);
    changed();
  });
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(button));
  changed();
}

start();
