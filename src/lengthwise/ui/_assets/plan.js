// Every input requests at once an answer with one seed, and after a pause one with intervals.
const PAUSE_MS = 350, OWN_LENGTHS = "own lengths";
const form = $("settings");
let choices, running = null, pause = 0, movedAt = 0, modelFile = null;

function settings() {
  const made = values(form);
  made.tp = made.tp ? Number(made.tp) : null;
  if (made.workload === OWN_LENGTHS) made.workload = `${value($("prompt"))}/${value($("output"))}`;
  return { ...made, model_file: modelFile, ...trace };
}

function show(fields) {
  const own = /^(\d+)\/(\d+)$/.exec(fields.workload);
  if (own) {
    $("prompt").value = Math.log10(own[1]);
    $("output").value = Math.log10(own[2]);
  }
  fill(form, { ...fields, workload: own ? OWN_LENGTHS : fields.workload });
  follow();
}

// What depends on other controls
function follow() {
  const traced = Boolean(trace.trace_file);
  $("lengths").hidden = form.elements.workload.value !== OWN_LENGTHS || traced;
  form.elements.model.disabled = form.elements.weights.disabled = Boolean(modelFile);
  $("model-clear").hidden = !modelFile;
  $("sessions").hidden = traced;
  $("thinks").hidden = value($("turns")) === 1;
}

async function answer(complete) {
  running?.abort();
  const mine = (running = new AbortController());
  $("answer").setAttribute("aria-busy", "true");
  const fields = settings();
  link({ ...fields, model_file: null, ...NO_TRACE }); // files belong to this browser
  let failure = null;
  try {
    const found = await ask("answers/plan/answer", { ...fields, complete }, mine.signal);
    if (mine.signal.aborted) return;
    draw(found, fields);
  } catch (error) {
    if (error.name === "AbortError") return;
    failure = error;
    $("status").textContent = "";
  } finally {
    if (running === mine) $("answer").removeAttribute("aria-busy");
  }
  showError(failure, true);
  earlier(failure ? "Below: the answer of earlier settings." : "");
  requestAnimationFrame(() => setTimeout(() => mine.signal.aborted || painted(complete, !failure)));
}

function painted(complete, ok) {
  const took = Math.round(performance.now() - movedAt);
  if (!complete) {
    document.body.dataset.firstMs = took;
    if (ok) pause = setTimeout(() => answer(true), PAUSE_MS);
  }
  document.body.dataset.answers = Number(document.body.dataset.answers || 0) + 1;
  if (ok) $("status").textContent = complete ? `Complete, with intervals, after ${took} ms.` : `One seed, after ${took} ms; intervals follow.`;
}

function changed() {
  movedAt = performance.now();
  label(form);
  follow();
  clearTimeout(pause);
  answer(false);
}

function draw(found, fields) {
  $("deployment").textContent = found.deployment;
  cards($("cards"), found.cards);
  $("bottleneck").textContent = `${found.bottleneck.description} ${found.bottleneck.warning}`.trim();
  const total = found.shares.reduce((sum, one) => sum + one.mean_s, 0) || 1;
  const parts = found.shares.map((one) => `${one.part} ${duration(one.mean_s)} (${Math.round((100 * one.mean_s) / total)} %)`);
  $("parts").replaceChildren(...found.shares.map((one) => {
    const made = element("span", { className: one.part });
    made.style.flex = `${one.mean_s / total} 0 0`;
    return made;
  }));
  $("key").replaceChildren(...found.shares.map((one, i) => element("li", {}, element("i", { className: one.part }), parts[i])));
  const limits = { ttft: milliseconds(fields.ttft) / 1000, tpot: milliseconds(fields.tpot) / 1000 };
  const charts = Object.entries(found.charts);
  $("charts").replaceChildren(...charts.map(([key, one]) => lineChart({
    ...one, xLabel: "requests/s", limit: limits[key], chosen: fields.rate, lines: [{ ...one, x: one.rates }],
  })));
  const rows = charts[0][1].rates.map((rate, i) => [three(rate), ...charts.map(([, one]) => {
    const half = one.half_widths[i];
    return shown(one.values[i], one.unit) + (half ? ` \u00b1 ${shown(half, one.unit)}` : "");
  })]);
  table($("table"), ["requests/s", ...charts.map(([, one]) => one.label)], rows);
  $("notes-box").hidden = !found.notes.length;
  $("notes").replaceChildren(...found.notes.map((note) => element("li", { textContent: note })));
  same(found);
}

async function start() {
  choices = await (await send("choices/plan")).json();
  const lists = { model: choices.models, gpu: Object.keys(choices.gpus), workload: [...choices.workloads, OWN_LENGTHS], policy: choices.policies };
  for (const [name, names] of Object.entries(lists)) options(form.elements[name], names);
  $("prompt").value = 3;
  $("output").value = 2.3;
  show({ ...choices.defaults, ...linked(choices.defaults) });
  attachTrace(changed);
  $("model-upload").addEventListener("change", () => uploaded($("model-upload"), ({ file }) => {
    modelFile = file;
    changed();
  }));
  $("model-clear").addEventListener("click", () => {
    modelFile = null;
    changed();
  });
  onMove(form, ({ name, id }) => (name || id === "prompt" || id === "output") && changed());
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    modelFile = null;
    useTrace(NO_TRACE);
    show(choices.defaults);
    changed();
  });
  changed();
}

start();
