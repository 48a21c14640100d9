// The schedulers run as a job; the minute is drawn here from the times of its requests.
const form = $("settings"), STEPPED = matchMedia("(prefers-reduced-motion: reduce)");
let running = null, found = null, playing = 0, lanes = [];

async function simulate() {
  running?.abort();
  const mine = (running = new AbortController());
  const fields = values(form);
  link(fields);
  showError(null);
  $("running").hidden = $("stop").hidden = false;
  try {
    const answered = await job("schedulers", "run", fields, (step, done, of) => {
      $("step").textContent = of ? `${step}: ${done} of ${of}` : step;
      if (of) { $("bar").max = of; $("bar").value = done; }
    }, mine.signal);
    found = answered.found;
    draw();
    answeredBy(fields);
  } catch (error) {
    if (error.name !== "AbortError") showError(error);
  } finally {
    if (running === mine) $("running").hidden = $("stop").hidden = true;
    document.body.dataset.answers = Number(document.body.dataset.answers || 0) + 1;
  }
}

function draw() {
  const all = found.schedulers, [first] = all;
  $("found").hidden = false;
  $("best").textContent = found.verdict;
  cards($("cards"), all.map((one) => {
    const { percent, half_width } = one.against_first.mean;
    if (one === first || percent === null) return { label: one.name, value: one.values[0].value, unit: found.metrics[0], interval: one.values[0].interval };
    return { label: one.name, value: `${percent > 0 ? "+" : percent < 0 ? "\u2212" : ""}${three(Math.abs(percent))} %`, interval: half_width === null ? "" : `\u00b1 ${three(half_width)} %` };
  }));
  const line = (head, cell) => [head, ...all.map(cell)];
  table($("table"), ["number", ...all.map((one) => one.name)], [
    ...["mean", "p99"].map((name) => line(`JCT ${name} against ${first.name}`, (one) => (one === first ? "\u2013" : one.against_first[name].text))),
    ...found.metrics.map((name, i) => line(name, ({ values: cells }) => element("span", {}, cells[i].value, element("small", { textContent: cells[i].interval })))),
    line("preemptions, first seed", (one) => three(one.preemptions)),
  ]);
  const notes = [...new Set(all.flatMap((one) => one.notes))];
  $("notes-box").hidden = !notes.length;
  $("notes").replaceChildren(...notes.map((note) => element("li", { textContent: note })));
  lanes = all.map((one) => {
    const canvas = element("canvas", { role: "img" }), text = element("span", {});
    const waiting = waits(one);
    return { one, canvas, text, waiting, figure: element("figure", {}, element("figcaption", {}, element("strong", { textContent: one.name }), text), canvas) };
  });
  $("lanes").replaceChildren(...lanes.map((lane) => lane.figure));
  $("time").max = found.minute_s;
  pause();
  seek(0);
  same(found);
}

// The number of waiting requests, at each tenth of a second
function waits({ events_s: [scheduled] }) {
  const count = new Array(Math.ceil(found.minute_s * 10) + 2).fill(0);
  found.arrival_s.forEach((from, i) => {
    const to = scheduled[i] ?? Infinity;
    for (let k = Math.max(0, Math.ceil(from * 10)); k < count.length && k / 10 < to; k++) count[k] += 1;
  });
  return count;
}

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function paint(lane, t) {
  const { canvas, one, waiting } = lane, [scheduled, started, finished] = one.events_s;
  const width = canvas.clientWidth, height = canvas.clientHeight, sharp = devicePixelRatio || 1;
  canvas.width = width * sharp;
  canvas.height = height * sharp;
  const pen = canvas.getContext("2d");
  pen.scale(sharp, sharp);
  const [waitInk, runInk, track, ink, soft] = ["--series-1", "--series-0", "--track", "--ink", "--soft"].map(colour);
  const longest = Math.log(Math.max(...found.output_tokens) + 1), BAR = 84, tall = (i) => 6 + (BAR - 6) * (Math.log(found.output_tokens[i] + 1) / longest);
  const queue = [], slots = [];
  let done = 0;
  found.arrival_s.forEach((from, i) => {
    if (from > t) return;
    if (scheduled[i] === null || scheduled[i] > t) queue.push(i);
    else if (finished[i] === null || finished[i] > t) slots.push(i);
    else if (finished[i] > 0) done += 1;
  });
  const half = width / 2 - 6, narrow = (count) => Math.max(1.5, Math.min(12, half / Math.max(1, count) - 1));
  let each = narrow(queue.length);
  pen.fillStyle = waitInk;
  queue.forEach((i, k) => pen.fillRect(half - (k + 1) * (each + 1), BAR - tall(i), each, tall(i)));
  each = narrow(Math.max(slots.length, Math.min(found.slots, 64)));
  slots.forEach((i, k) => {
    const x = half + 12 + k * (each + 1), high = tall(i), from = started[i] ?? t;
    const share = t <= from ? 0 : Math.min(1, (t - from) / Math.max(1e-6, (finished[i] ?? t) - from));
    pen.fillStyle = track;
    pen.fillRect(x, BAR - high, each, high);
    pen.fillStyle = runInk;
    pen.fillRect(x, BAR - Math.max(2, high * share), each, Math.max(2, high * share));
  });
  pen.strokeStyle = soft;
  pen.beginPath();
  pen.moveTo(0, BAR + 0.5);
  pen.lineTo(width, BAR + 0.5);
  pen.moveTo(half + 3.5, 0);
  pen.lineTo(half + 3.5, BAR);
  pen.stroke();
  // The waiting requests over the minute, on one scale for all schedulers
  const top = BAR + 10, low = height - 2, most = Math.max(1, ...lanes.map((other) => Math.max(...other.waiting)));
  pen.fillStyle = waitInk;
  pen.globalAlpha = 0.35;
  pen.beginPath();
  pen.moveTo(0, low);
  waiting.forEach((count, k) => pen.lineTo((k / (waiting.length - 1)) * width, low - ((low - top) * count) / most));
  pen.lineTo(width, low);
  pen.fill();
  pen.globalAlpha = 1;
  pen.strokeStyle = ink;
  pen.beginPath();
  pen.moveTo((t / found.minute_s) * width, top);
  pen.lineTo((t / found.minute_s) * width, low);
  pen.stroke();
  const text = `${queue.length} waiting, ${slots.length} in slots, ${done} finished`;
  lane.text.textContent = text;
  canvas.setAttribute("aria-label", `${one.name} at ${t.toFixed(1)} s: ${text}`);
}

function seek(t) {
  $("time").value = t;
  document.querySelector("output[for=time]").value = `${t.toFixed(1)} s`;
  $("time").setAttribute("aria-valuetext", `${t.toFixed(1)} seconds`);
  for (const lane of lanes) paint(lane, t);
}

function pause() {
  cancelAnimationFrame(playing);
  clearInterval(playing);
  playing = 0;
  $("play").textContent = "Play";
}

function play() {
  if (playing) return pause();
  $("play").textContent = "Pause";
  let t = Number($("time").value) >= found.minute_s - 0.05 ? 0 : Number($("time").value), before = performance.now();
  const forward = (by) => {
    t = Math.min(found.minute_s, t + by);
    seek(t);
    if (t >= found.minute_s) pause();
  };
  if (STEPPED.matches) { // a step a second, without motion between
    playing = setInterval(() => forward(Number($("speed").value)), 1000);
    return;
  }
  const frame = (now) => {
    const by = ((now - before) / 1000) * Number($("speed").value);
    before = now;
    playing = requestAnimationFrame(frame);
    forward(by);
  };
  playing = requestAnimationFrame(frame);
}

async function start() {
  const choices = await (await send("choices/schedulers")).json();
  for (const [name, names] of [["model", choices.models], ["gpu", choices.gpus], ["workload", choices.workloads]]) options(form.elements[name], names);
  $("schedulers").append(...Object.entries(choices.schedulers).map(([name, about]) => element("label", { title: about }, element("input", { type: "checkbox", name: "schedulers", value: name, "data-list": "" }), ` ${name}`)));
  fill(form, { ...choices.defaults, ...linked(choices.defaults) });
  onMove(form, () => {
    label(form);
    moved();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    simulate();
    reveal();
  });
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    fill(form, choices.defaults);
    moved();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("play").addEventListener("click", play);
  $("time").addEventListener("input", () => {
    pause();
    seek(Number($("time").value));
  });
  addEventListener("resize", () => found && seek(Number($("time").value)));
  simulate();
}

start();
