// The plan runs as a job. Runs of `lengthwise ui --run DIR` are read again every two seconds.
const form = $("settings"), RUNS_MS = 2000, ROW = 26, HEAD = 26;
let running = null, planned = null, files = {}, choices = null;

async function plan() {
  running?.abort();
  const mine = (running = new AbortController());
  const settings = values(form);
  link(settings);
  showError(null);
  $("running").hidden = $("stop").hidden = false;
  try {
    const fields = { ...settings, app_file: null, rows_file: null };
    if (fields.app === choices.apps.at(-1)) {
      const [app, rows] = [$("app_upload"), $("rows_upload")].map((one) => one.files[0]);
      if (app) fields.app_file = await identity(app);
      if (rows) fields.rows_file = await identity(rows);
    }
    planned = await job("applications", "plan", fields, (step) => ($("step").textContent = step), mine.signal);
    draw(planned.found);
    answeredBy(settings);
  } catch (error) {
    if (error.name !== "AbortError") showError(error);
  } finally {
    if (running === mine) $("running").hidden = $("stop").hidden = true;
    document.body.dataset.answers = Number(document.body.dataset.answers || 0) + 1;
  }
}

// The server's name of a file; a file that did not change is not sent again.
async function identity(file) {
  const key = `${file.name} ${file.size} ${file.lastModified}`;
  files[key] ??= (await upload(file)).file;
  return files[key];
}

function draw(found) {
  $("found").hidden = false;
  $("name").textContent = found.name;
  $("facts").textContent = found.facts.join(" \u00b7 ");
  cards($("cards"), found.cards);
  gantt(found.chart);
  graph(found.graph);
  for (const name of ["stages", "methods", "what_ifs"]) table($(name), found.tables[name].heads, found.tables[name].rows);
  $("what-ifs-box").hidden = !found.tables.what_ifs.rows.length;
  $("notes-box").hidden = !found.notes.length;
  $("notes").replaceChildren(...found.notes.map((note) => element("li", { textContent: note })));
  same(found);
}

// A bar is [row, start, end, model (-1: none), what, label, hover text]; times in the chart's unit.
function gantt({ unit, end, models, charts: [{ rows, bars, marks }] }) {
  const width = 860, left = 62, right = 12, height = HEAD + ROW * rows.length + 4;
  const x = (time) => left + ((width - left - right) * time) / end;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", class: "gantt", "aria-label": `Plan over ${three(end)} ${unit} on ${rows.length} GPUs; the table of stages has its times` });
  const hatch = svg("pattern", { id: "hatch", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  hatch.append(svg("rect", { width: 2, height: 6 }));
  picture.append(hatch);
  for (const tick of linear(end)) {
    picture.append(svg("line", { class: "axis", x1: x(tick), x2: x(tick), y1: HEAD - 4, y2: height - 4 }));
    picture.append(svg("text", { x: x(tick), y: HEAD - 9, "text-anchor": tick ? "middle" : "start" }, tick ? three(tick) : `0 ${unit}`));
  }
  rows.forEach((name, row) => picture.append(svg("text", { x: left - 6, y: HEAD + ROW * row + 17, "text-anchor": "end" }, name)));
  for (const [row, from, to, model, what, label, hover] of bars) {
    const known = what === "run" || what === "load";
    const bar = svg("rect", { class: known ? `${what} series-${model % 10}` : "idle", x: x(from), y: HEAD + ROW * row + 2, width: Math.max(0.5, x(to) - x(from)), height: ROW - 4 });
    bar.append(svg("title", {}, hover));
    picture.append(bar);
    if (what === "load") {
      const hatched = bar.cloneNode(true);
      hatched.setAttribute("class", "hatched");
      picture.append(hatched);
    }
    if (label && x(to) - x(from) > 30) picture.append(svg("text", { class: "inside", x: (x(from) + x(to)) / 2, y: HEAD + ROW * row + 17, "text-anchor": "middle" }, label));
  }
  for (const mark of marks) picture.append(svg("line", { class: "mark", x1: x(mark), x2: x(mark), y1: HEAD - 4, y2: height - 4 }));
  $("gantt").replaceChildren(picture);
  const entry = (text, kind) => element("li", {}, element("i", { className: kind }), text);
  $("key").replaceChildren(...models.map((name, k) => entry(name, `run series-${k % 10}`)), entry("loading (of any model)", "load"), entry("idle", "idle"), ...(marks.length ? [entry("end of a stage", "stage")] : []));
}

// About six round ticks from 0 on
function linear(end) {
  const raw = end / 6, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= raw);
  return Array.from({ length: Math.floor(end / step) + 1 }, (_, k) => k * step);
}

function graph({ nodes, edges }) {
  const wide = 190, tall = 62, gap = 110, space = 18;
  const columns = Map.groupBy(nodes, (node) => node.column), deepest = Math.max(...[...columns.values()].map((one) => one.length));
  const width = columns.size * (wide + gap) - gap + 8, height = deepest * (tall + space) + 26, place = {};
  for (const [column, members] of columns) members.forEach((node, k) => {
    place[node.call] = { x: 4 + column * (wide + gap), y: 22 + ((height - 22) / members.length) * (k + 0.5) - tall / 2 };
  });
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, role: "img", class: "graph", "aria-label": edges.map((e) => `${e.outputs} outputs of ${e.from} to ${e.to}`).join(", ") || `${nodes.length} calls that wait for no other` });
  const head = svg("marker", { id: "head", viewBox: "0 0 8 8", refX: 8, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" });
  head.append(svg("path", { d: "M0 0L8 4L0 8z" }));
  picture.append(head);
  for (const { from, to, outputs, back } of edges) {
    const a = place[from], b = place[to];
    const [x1, y1, x2, y2] = back ? [a.x + wide * 0.7, a.y, b.x + wide * 0.3, b.y] : [a.x + wide, a.y + tall / 2, b.x, b.y + tall / 2];
    const bend = back ? `C${x1} ${y1 - 26} ${x2} ${y2 - 26}` : `C${x1 + gap / 2} ${y1} ${x2 - gap / 2} ${y2}`;
    picture.append(svg("path", { class: "edge", d: `M${x1} ${y1}${bend} ${x2} ${y2}`, "marker-end": "url(#head)" }));
    picture.append(svg("text", { x: (x1 + x2) / 2, y: (y1 + y2) / 2 - (back ? 12 : 6), "text-anchor": "middle" }, three(outputs)));
  }
  for (const node of nodes) {
    const { x, y } = place[node.call], [first] = node.models;
    picture.append(svg("rect", { class: "node", x, y, width: wide, height: tall, rx: 8 }));
    const clip = (text) => (text.length > 26 ? `${text.slice(0, 25)}\u2026` : text);
    [node.call, `${node.tasks.toLocaleString("en")} tasks at most`, node.models.length > 1 ? `${node.models.length} models` : first].forEach((text, k) => {
      picture.append(svg("text", { class: k ? "" : "name", x: x + 10, y: y + 19 + 17 * k }, clip(text)));
    });
    picture.lastChild.append(svg("title", {}, node.models.join(", ")));
  }
  $("graph").replaceChildren(picture);
}

async function progress() {
  try {
    const { runs } = await ask("answers/applications/progress", {});
    $("runs").replaceChildren(...runs.map((run) => {
      const title = element("p", {}, element("strong", { textContent: run.folder }), ` ${run.error || state(run)}`);
      if (run.error) return title;
      const body = element("table", {});
      table(body, ["model", "completed", "tasks"], run.models);
      const bar = element("progress", { max: run.total || 1, value: run.finished, "aria-label": `Finished tasks of ${run.folder}` });
      return element("div", {}, title, bar, body);
    }));
  } catch (error) {
    if (error.name !== "AbortError") showError(error);
  }
  setTimeout(progress, RUNS_MS);
}

function state({ finished, total, runs_now, cancelled }) {
  const now = cancelled ? "cancelled" : runs_now ? "runs now" : finished === total ? "finished" : "not running";
  return `${finished.toLocaleString("en")} of ${total.toLocaleString("en")} tasks finished, ${now}`;
}

function own() {
  $("own").hidden = $("app").value !== choices.apps.at(-1);
  if ($("rows").dataset.own === $("rows").value) ownRows();
}

// Shows the number of rows that the file itself gives; the field is null then.
function ownRows() {
  const number = choices.rows[$("app").value];
  if (number) set($("rows"), number);
  $("rows").dataset.own = $("rows").value;
  label(form);
  if (!number) form.querySelector("output[for=rows]").value = "as the file says";
}

form.addEventListener("submit", (event) => { event.preventDefault(); plan(); });
onMove(form, () => { label(form); own(); moved(); });
form.addEventListener("reset", () => setTimeout(() => { fill(form, choices.defaults); ownRows(); own(); moved(); }));
$("stop").addEventListener("click", () => running?.abort());
document.querySelector("[data-save=scenario]").hidden = true; // alone, the file lacks its inputs
for (const name of ["report", "plan", "files"]) $(name).addEventListener("click", () => download(planned.id, "applications", name).catch(showError));

(async () => {
  try {
    choices = await (await send("choices/applications")).json();
    options($("app"), choices.apps);
    options($("method"), choices.methods);
    const given = { ...choices.defaults, ...linked(choices.defaults) };
    fill(form, given);
    if (given.rows === null) ownRows();
    own();
    $("runs-box").hidden = !choices.runs.length;
    if (choices.runs.length) progress();
    document.body.dataset.ready = 1;
  } catch (error) {
    showError(error);
  }
})();
