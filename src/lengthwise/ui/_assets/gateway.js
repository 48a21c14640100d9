// The state of a gateway is polled while the page is visible; a replay of a journal is a job.
const form = $("settings"), LIVE_MS = 2000, RETRY_MS = 5000;
let running = null, answered = null, paused = false, timer = 0, polled = 0;

// The running gateway
async function poll() {
  clearTimeout(timer);
  const turn = ++polled, address = $("gateway").value;
  let next = LIVE_MS;
  try {
    const found = await ask("answers/gateway/state", { gateway: address, complete: true });
    if (turn !== polled) return;
    $("live-error").hidden = true;
    drawLive(found);
  } catch (error) {
    if (turn !== polled) return;
    if (error.name !== "AbortError") {
      $("live-error").textContent = error.message;
      $("live-error").hidden = false;
      $("live-found").hidden = true;
      $("live-status").textContent = "";
      next = RETRY_MS;
    }
  } finally {
    document.body.dataset.polls = Number(document.body.dataset.polls || 0) + 1;
  }
  if (!paused && !document.hidden) timer = setTimeout(poll, next);
}

function drawLive(found) {
  $("live-found").hidden = false;
  $("live-status").textContent = found.status;
  $("admin").href = `${found.address}/`;
  cards($("live-cards"), found.cards);
  $("over").replaceChildren(
    over("Requests", found.samples, [["waiting", 1], ["in engines", 2]]), over("Output, tokens per second", found.samples, [["", 3]]),
  );
  const two = (text, small) => element("span", {}, text, element("small", { textContent: small }));
  table($("engines"), ["engine", "condition", "requests / limit", "KV cache", "in its own queue", "tokens/s", "share of requests"], found.engines.map(
    ([name, condition, ...rest]) => [two(name, rest[5]), two(condition, rest[6]), ...rest.slice(0, 5)],
  ));
  table($("times"), ["requests of", "requests", "mean JCT", "JCT p50", "JCT p90", "JCT p99", "mean TTFT", "TTFT p99", "mean queueing", "queueing p99"], found.times);
  table($("policies"), ["policy", "requests", "mean JCT", "JCT p99", "change of the mean", "change of p99"], found.policies);
  $("errors-box").hidden = !found.errors.length;
  table($("errors"), ["last", "error", "model", "tenant", "engine", "times"], found.errors);
}

// Lines over the last minutes: rows of [seconds from now, ...]
function over(label, rows, lines) {
  const W = 320, H = 150, L = 40, R = 8, T = 8, B = 22;
  const picture = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img" });
  const last = rows[rows.length - 1] || [0, 0, 0, 0], names = lines.map(([name, at]) => `${name} ${three(last[at])}`.trim());
  picture.setAttribute("aria-label", `${label} over the last minutes; now ${names.join(", ")}`);
  const start = Math.min(-60, ...rows.map((row) => row[0])), top = Math.max(1, ...rows.flatMap((row) => lines.map(([, at]) => row[at])));
  const x = (s) => L + ((W - L - R) * (s - start)) / -start, y = (v) => H - B - ((H - T - B) * v) / top;
  for (const tick of [0, top / 2, top]) {
    picture.append(svg("line", { class: "axis", x1: L, x2: W - R, y1: y(tick), y2: y(tick) }), svg("text", { x: L - 5, y: y(tick) + 4, "text-anchor": "end" }, three(tick)));
  }
  picture.append(svg("text", { x: L, y: H - 6 }, `${three(-start / 60)} min ago`), svg("text", { x: W - R, y: H - 6, "text-anchor": "end" }, "now"));
  lines.forEach(([, at], i) => picture.append(svg("polyline", { class: `line series-${i}`, points: rows.map((row) => `${x(row[0]).toFixed(1)},${y(row[at]).toFixed(1)}`).join(" ") })));
  const keys = lines.length > 1 ? lines.map(([name], i) => element("li", {}, element("i", { className: `series-${i} swatched` }), name)) : [];
  return element("figure", {}, element("figcaption", { textContent: label }), picture, ...(keys.length ? [element("ul", { className: "key" }, ...keys)] : []));
}

// The replay
let journal = null; // the uploaded file, and its identity
async function replay() {
  running?.abort();
  const mine = (running = new AbortController()), fields = values(form);
  link(fields);
  showError(null);
  $("running").hidden = $("stop").hidden = false;
  $("empty").hidden = true;
  $("step").textContent = "Starting";
  $("bar").removeAttribute("value");
  try {
    const [file] = $("journal").files;
    if (file && journal?.file !== file) journal = { file, id: (await upload(file)).file };
    answered = await job("gateway", "replay", { ...fields, journal: file ? journal.id : null }, (step, done, of) => {
      $("step").textContent = of ? `${step}: ${done} of ${of}` : step;
      if (of) { $("bar").max = of; $("bar").value = done; }
    }, mine.signal);
    draw(answered.found);
  } catch (error) {
    if (error.name !== "AbortError") {
      journal = null; // the server may have dropped it for newer files
      showError(error);
    }
  } finally {
    if (running === mine) $("running").hidden = $("stop").hidden = true;
    document.body.dataset.answers = Number(document.body.dataset.answers || 0) + 1;
  }
}

function draw(found) {
  $("found").hidden = false;
  $("best").textContent = found.best;
  $("about").textContent = found.about;
  cards($("cards"), found.cards);
  table($("table"), found.heads, found.rows);
  $("table").parentNode.hidden = !found.rows.length;
  $("notes-box").hidden = !found.notes.length;
  $("notes").replaceChildren(...found.notes.map((one) => element("li", { textContent: one })));
  $("settings-box").hidden = $("save-settings").hidden = !found.scenario;
  same(found);
}

function compared() {
  $("routers").hidden = $("compare").value !== "routers";
  $("orders").hidden = !$("routers").hidden;
}

async function start() {
  const choices = await (await send("choices/gateway")).json();
  options($("gateway"), choices.gateways);
  $("none").hidden = choices.gateways.length > 0;
  $("gateways").hidden = $("live").hidden = !choices.gateways.length;
  $("routers").append(...choices.routers.map((one) => element("label", {}, element("input", { type: "checkbox", name: "routers", value: one, "data-list": "" }), one === "all" ? " all that the journal allows" : ` ${one}`)));
  fill(form, { ...choices.defaults, ...linked(choices.defaults) });
  compared();
  for (const name of ["input", "change"]) form.addEventListener(name, compared);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    replay();
    reveal();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("json").addEventListener("click", () => download(answered.id, "gateway", "json").catch(showError));
  $("gateway").addEventListener("change", poll);
  $("pause").addEventListener("click", () => {
    paused = !paused;
    $("pause").textContent = paused ? "Continue" : "Pause";
    if (paused) clearTimeout(timer);
    else poll();
  });
  document.addEventListener("visibilitychange", () => choices.gateways.length && !paused && !document.hidden && poll());
  if (choices.gateways.length) poll();
  document.body.dataset.ready = 1;
}

start();
