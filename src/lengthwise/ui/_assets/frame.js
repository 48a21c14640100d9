"use strict";
// What all pages share: requests, jobs, controls, cards, charts, tables, files.
const $ = (id) => document.getElementById(id);
const TAB = Math.random().toString(36).slice(2); // the newest answer of a tab replaces its older ones
const POLL_MS = 250;

function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, x] of Object.entries(properties)) key.includes("-") ? made.setAttribute(key, x) : (made[key] = x);
  made.append(...children);
  return made;
}

function svg(name, attributes, content = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, x] of Object.entries(attributes)) made.setAttribute(key, x);
  made.textContent = content;
  return made;
}

// Requests. An Error has the text of the server.
async function send(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { "x-tab": TAB, ...options.headers } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The planner does not answer. Is `lengthwise ui` still running?");
  }
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({}));
  const failure = new Error(error || `The server answered with the status ${response.status}.`);
  if (response.status === 409) failure.name = "AbortError";
  throw failure;
}

const post = (path, fields, signal) =>
  send(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(fields), signal });
const ask = async (path, fields, signal) => (await post(path, fields, signal)).json();

// Runs a job to its end: job("search", "run", fields, (step, done, of) => ..., signal) -> { id, found }.
async function job(page, name, fields, advance, signal) {
  const { job: id } = await ask(`jobs/${page}/${name}`, fields); // without the signal: a job that starts can be cancelled
  const cancel = () => fetch(`jobs/${id}`, { method: "DELETE", keepalive: true });
  if (signal?.aborted) cancel();
  signal?.addEventListener("abort", cancel);
  addEventListener("pagehide", cancel);
  try {
    for (;;) {
      const response = await send(`jobs/${id}`, { signal });
      const found = await response.json();
      if (response.status !== 202) return { id, found };
      advance(found.step, found.done, found.of);
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  } finally {
    signal?.removeEventListener("abort", cancel);
    removeEventListener("pagehide", cancel);
  }
}

async function upload(file) {
  const headers = { "content-type": "application/octet-stream" };
  return (await send(`files?name=${encodeURIComponent(file.name)}`, { method: "POST", headers, body: file })).json();
}

// Uses the file of an input. After an error the shown answer is one without it.
async function uploaded(input, use) {
  if (!input.files.length) return;
  showError(null);
  earlier("");
  try {
    await use(await upload(input.files[0]));
  } catch (error) {
    showError(error);
    earlier("Below: the answer without this file.");
  }
  input.value = "";
}

// Appends a link to a file that the command reads.
const fileLink = (place, name, href) => place.append(` The command reads ${name}: `, element("a", { href, download: name, textContent: "save it" }), ".");

function save(name, content, type = "text/plain") {
  const link = element("a", { href: URL.createObjectURL(new Blob([content], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

async function download(id, page, name, fields = {}) {
  const response = await post(`jobs/${id}/${page}/${name}`, fields);
  const file = /filename="([^"]*)"/.exec(response.headers.get("content-disposition"))[1];
  save(file, await response.blob(), response.headers.get("content-type"));
}

// The error is scrolled into view; it gets the focus, unless a control is being moved.
function showError(error, moving = false) {
  $("error").hidden = !error;
  $("error").textContent = error ? error.message : "";
  if (!error) return;
  $("error").tabIndex = -1;
  $("error").scrollIntoView({ block: "nearest" });
  if (!moving) $("error").focus({ preventScroll: true });
}

// Dims the answer as one of earlier settings, and says so; "" ends it.
function earlier(text) {
  const note = $("earlier") ?? element("p", { id: "earlier", role: "status" });
  if (!note.parentNode) $("error").after(note);
  note.hidden = !text;
  note.textContent = text;
  $("answer").classList.toggle("outdated", Boolean(text));
}

// Pages with a job: after a move the shown answer is one of earlier settings.
let answeredFields = "", trace = {}; // the fields of an uploaded trace
function moved() {
  const fields = { ...values($("settings")), ...trace };
  remember(fields);
  earlier(answeredFields && answeredFields !== JSON.stringify(fields) ? `Below: the answer of earlier settings. Press ${$("go").textContent} for one of these.` : "");
}
function answeredBy(fields) {
  answeredFields = JSON.stringify(fields);
  moved();
}

// Calls react(control) after each move: once, where a browser sends input and change for a select.
function onMove(form, react) {
  let seen = null;
  form.addEventListener("input", ({ target }) => {
    seen = target.tagName === "SELECT" ? `${target.id} ${target.value}` : null;
    react(target);
  });
  form.addEventListener("change", ({ target }) => {
    if (target.tagName === "SELECT" && seen !== `${target.id} ${target.value}`) react(target);
    seen = null;
  });
}

// Controls. data-scale: log or two (powers); data-unit: ms; data-round: whole numbers.
const scales = {
  log: { read: (x) => 10 ** x, write: Math.log10 },
  two: { read: (x) => 2 ** x, write: Math.log2 },
  plain: { read: (x) => x, write: (x) => x },
};
const scale = (input) => scales[input.dataset.scale || "plain"];
const significant = (x) => Number(x.toPrecision(2));
const milliseconds = (time) => parseFloat(time) * (time.endsWith("ms") ? 1 : 1000);

function value(input) {
  if (input.type === "number") return Number(input.value);
  if (input.type === "checkbox") return input.checked;
  if (input.type !== "range") return input.value;
  if (input.dataset.at === input.value) return Number(input.dataset.exact);
  const x = scale(input).read(Number(input.value));
  return input.dataset.round || input.dataset.scale === "two" ? Math.round(x) : significant(x);
}

// Moves a range to x; its value is x, which may be between the steps of the range, until the next move.
function set(input, x) {
  input.value = scale(input).write(x);
  Object.assign(input.dataset, { exact: x, at: input.value });
}

function text(input) {
  const x = value(input);
  if (input.dataset.unit !== "ms") return x.toLocaleString("en");
  return x >= 1000 ? `${significant(x / 1000)} s` : `${x} ms`;
}

// The values of all named controls; several checkboxes of one name are a list, inputs with data-key a table of changed values.
function values(form) {
  const made = {};
  for (const input of form.elements) {
    if (!input.name || input.type === "file") continue;
    if (input.dataset.list !== undefined) {
      made[input.name] ??= [];
      if (input.checked) made[input.name].push(input.value);
    } else if (input.dataset.key) {
      made[input.name] ??= {};
      if (input.value && input.value !== input.defaultValue) made[input.name][input.dataset.key] = value(input);
    } else if (input.dataset.own === input.value) made[input.name] = null; // as the file says
    else made[input.name] = input.dataset.unit === "ms" ? `${value(input)}ms` : value(input);
  }
  return made;
}

function fill(form, fields) {
  for (const input of form.elements) {
    const x = fields[input.name];
    if (x === undefined || (x === null && input.type === "range")) continue;
    if (input.dataset.list !== undefined) input.checked = x.includes(input.value);
    else if (input.dataset.key) input.value = x[input.dataset.key] ?? input.defaultValue;
    else if (input.type === "checkbox") input.checked = x;
    else if (input.type === "range") set(input, input.dataset.unit === "ms" ? milliseconds(x) : x);
    else input.value = x ?? "";
  }
  label(form);
}

function label(form) {
  for (const input of form.querySelectorAll("input[type=range]")) {
    const shown = form.querySelector(`output[for="${input.id}"]`);
    if (shown) shown.value = text(input);
    input.setAttribute("aria-valuetext", text(input));
  }
}

const options = (select, names) => select.append(...names.map((one) => element("option", { value: one, textContent: one })));

// A link to this page restores its fields; without one the tab remembers the last ones of the page.
const FIELDS = `lengthwise.fields ${location.pathname}`;
function linked(defaults = null) {
  try {
    const given = JSON.parse(decodeURIComponent(location.hash.slice(1)) || sessionStorage.getItem(FIELDS) || "{}");
    const alike = (a, b) => Array.isArray(a) === Array.isArray(b) && (typeof a === typeof b || a === null || b === null);
    return defaults ? Object.fromEntries(Object.entries(given).filter(([name, x]) => !(name in defaults) || alike(x, defaults[name]))) : given;
  } catch {
    return {}; // A damaged link shows the defaults.
  }
}
function remember(fields) {
  try {
    sessionStorage.setItem(FIELDS, JSON.stringify(fields));
  } catch {} // A browser may store nothing.
}
function link(fields) {
  history.replaceState(null, "", `#${encodeURIComponent(JSON.stringify(fields))}`);
  remember(fields);
}

// Texts of numbers
const three = (x) => Number(x.toPrecision(3)).toLocaleString("en");
const duration = (seconds) => (seconds < 0.9995 ? `${three(1000 * seconds)} ms` : `${three(seconds)} s`);
const shown = (x, unit) => (x === null ? "\u2013" : unit === "s" ? duration(x) : three(x));

// Cards: [{ label, value, unit, interval, model }]
function cards(place, list) {
  place.replaceChildren(...list.map((card) => {
    const more = [card.interval, card.model].filter(Boolean).join(" ");
    const dd = element("dd", {}, `${card.value} `, element("span", { textContent: card.unit || "" }), element("small", { textContent: more }));
    return element("div", {}, element("dt", { textContent: card.label }), dd);
  }));
}

// A table of texts: the first column has the row's head.
function table(place, heads, rows) {
  const head = element("tr", {}, ...heads.map((one) => element("th", { textContent: one, scope: "col" })));
  place.replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows.map(([first, ...cells]) => element(
    "tr", {}, element("th", { scope: "row" }, first), ...cells.map((one) => element("td", {}, one)),
  ))));
}

// Line charts: both axes logarithmic, each line with the band of its intervals.
// { label, unit, xLabel, limit, chosen, lines: [{ name, x, values, half_widths }] }
const WIDTH = 320, HEIGHT = 190, LEFT = 52, RIGHT = 10, TOP = 8, BOTTOM = 26;

function lineChart(chart) {
  const lines = chart.lines.map((line) => ({
    ...line, points: line.x.map((x, i) => [x, line.values[i], line.half_widths[i] || 0]).filter(([, y]) => y > 0),
  }));
  const all = lines.flatMap((line) => line.points);
  const caption = element("figcaption", { textContent: `${chart.label}, ${chart.unit === "s" ? "time" : chart.unit}, over ${chart.xLabel}` });
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  if (!all.length) {
    picture.setAttribute("aria-label", `${chart.label}: no request finished`);
    return element("figure", {}, caption, picture);
  }
  const nearest = (points) => points.reduce((best, one) => (Math.abs(one[0] - chart.chosen) < Math.abs(best[0] - chart.chosen) ? one : best));
  const ends = all.flatMap(([, y, half]) => [Math.max(y - half, y / 10), y + half]).concat(chart.limit ? [chart.limit] : []);
  const xs = all.map(([x]) => x);
  const x = axis(Math.min(...xs), Math.max(...xs), LEFT, WIDTH - RIGHT);
  const y = axis(Math.min(...ends), Math.max(...ends), HEIGHT - BOTTOM, TOP);
  for (const tick of y.ticks) {
    picture.append(svg("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y.of(tick), y2: y.of(tick) }));
    picture.append(svg("text", { x: LEFT - 6, y: y.of(tick) + 4, "text-anchor": "end" }, shown(tick, chart.unit)));
  }
  for (const tick of x.ticks) picture.append(svg("text", { x: x.of(tick), y: HEIGHT - 8, "text-anchor": "middle" }, three(tick)));
  if (chart.chosen) picture.append(svg("line", { class: "chosen", x1: x.of(chart.chosen), x2: x.of(chart.chosen), y1: TOP, y2: HEIGHT - BOTTOM }));
  if (chart.limit) picture.append(svg("line", { class: "limit", x1: LEFT, x2: WIDTH - RIGHT, y1: y.of(chart.limit), y2: y.of(chart.limit) }));
  const said = [];
  lines.forEach((line, i) => {
    if (!line.points.length) return;
    const path = (of) => line.points.map((one) => `${x.of(one[0]).toFixed(1)},${y.of(of(one)).toFixed(1)}`);
    const upper = path(([, v, half]) => v + half), lower = path(([, v, half]) => Math.max(v - half, v / 10));
    picture.append(svg("polygon", { class: `band series-${i}`, points: [...upper, ...lower.reverse()].join(" ") }));
    picture.append(svg("polyline", { class: `line series-${i}`, points: path((one) => one[1]).join(" ") }));
    if (!chart.chosen) return;
    const at = nearest(line.points);
    picture.append(svg("circle", { class: `point series-${i}`, cx: x.of(at[0]), cy: y.of(at[1]), r: 4 }));
    said.push(`${line.name ? `${line.name}: ` : ""}${shown(at[1], chart.unit)} at ${three(at[0])} ${chart.xLabel}`);
  });
  picture.setAttribute("aria-label", `${chart.label}: ${said.join(", ") || chart.xLabel}`);
  return element("figure", {}, caption, picture);
}

// A logarithmic axis: a function from a value to its place, and round ticks.
function axis(low, high, from, to) {
  if (high < low * 1.5) [low, high] = [low / 1.3, high * 1.3];
  const span = Math.log(high / low), decades = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++) decades.push(10 ** power, 2 * 10 ** power, 5 * 10 ** power);
  let ticks = decades.filter((tick) => tick >= low && tick <= high);
  if (ticks.length > 6) ticks = ticks.filter((tick) => Math.abs(Math.log10(tick) - Math.round(Math.log10(tick))) < 1e-6);
  if (ticks.length < 2) ticks = [low, high];
  return { of: (x) => from + ((to - from) * Math.log(x / low)) / span, at: (place) => low * Math.exp(((place - from) / (to - from)) * span), ticks };
}

// The command and the scenario that give the same answer
function same(found) {
  $("command").textContent = found.command;
  $("scenario").textContent = found.scenario;
  $("gpu-files").replaceChildren();
  for (const [name, text] of Object.entries(found.gpu_files ?? {})) fileLink($("gpu-files"), name, `data:text/plain,${encodeURIComponent(text)}`);
}

// Stored answers, in this browser alone: the Studies page lists them.
const STUDIES = "lengthwise.studies", MAX_STUDIES = 100, MAX_STORED = 2e6, MAX_TEXT = 28000, MAX_CARDS = 60; // characters
function stored() {
  try {
    const all = JSON.parse(localStorage.getItem(STUDIES) || "[]");
    return Array.isArray(all) ? all : [];
  } catch {
    return []; // Another program of this address wrote it, or the browser stores nothing.
  }
}

function store(all) {
  const content = JSON.stringify(all);
  if (all.length > MAX_STUDIES || content.length > MAX_STORED) throw new Error(`A browser stores ${MAX_STUDIES} answers and ${MAX_STORED / 1e6} MB at most; export the old ones on the Studies page, then delete them.`);
  try {
    localStorage.setItem(STUDIES, content);
  } catch {
    throw new Error("This browser does not store the answer: its storage is full or switched off.");
  }
}

function keep() {
  if (!$("command").textContent) throw new Error("There is no answer yet.");
  const page = document.querySelector(".pages a[aria-current]").textContent, part = (node) => node?.textContent.trim() ?? "";
  const shown = [...document.querySelectorAll("#cards > div")].slice(0, MAX_CARDS).map((card) => ({
    label: part(card.querySelector("dt")), value: part(card.querySelector("dd").firstChild),
    unit: part(card.querySelector("dd span")), interval: part(card.querySelector("dd small")),
  }));
  if ($("scenario").textContent.length > MAX_TEXT) throw new Error(`The scenario has more than ${MAX_TEXT} characters; save it as a file instead.`);
  const about = part($("best")) || part($("deployment")) || new Date().toLocaleString();
  const all = stored(), first = `${page}: ${about}`.slice(0, 110), names = new Set(all.map((one) => one?.name));
  let name = first;
  for (let count = 2; names.has(name); count++) name = `${first} (${count})`;
  store([...all, {
    id: TAB + Date.now().toString(36), page, name, time: Date.now(), fields: linked(),
    command: $("command").textContent, scenario: $("scenario").textContent, cards: shown,
  }]);
}

document.addEventListener("click", async ({ target }) => {
  const { dataset } = target;
  if (dataset?.keep !== undefined) {
    const before = target.textContent;
    try {
      keep();
      showError(null);
      target.textContent = "Kept on the Studies page";
      setTimeout(() => (target.textContent = before), 1500);
    } catch (error) {
      showError(error);
    }
  }
  if (dataset?.save) save(dataset.name, $(dataset.save).textContent);
  if (!dataset?.copy) return;
  const content = $(dataset.copy), before = target.textContent;
  try {
    await navigator.clipboard.writeText(content.textContent);
    target.textContent = "Copied";
  } catch { // only secure addresses have a clipboard
    getSelection().selectAllChildren(content);
    target.textContent = "Selected: press Ctrl+C";
  }
  setTimeout(() => (target.textContent = before), 1500);
});

// On a narrow screen the answer is below the form.
const reveal = () => matchMedia("(max-width: 820px)").matches && $("answer").scrollIntoView();
