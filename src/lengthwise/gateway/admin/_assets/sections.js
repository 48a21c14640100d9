// The page's sections, each drawn from its part of the state. Names from requests and engines are inserted as text only.
const sections = (() => {
  const $ = (id) => document.getElementById(id);
  const make = (name, kind = "", text = "") => {
    const made = document.createElement(name);
    if (kind) made.className = kind;
    if (text !== "") made.textContent = text;
    return made;
  };
  const put = (node, ...children) => { node.append(...children); return node; };
  const seconds = (s) => {
    if (s === null || s === undefined) return "–";
    if (s >= 7200) return `${+(s / 3600).toPrecision(3)} h`;
    if (s >= 180) return `${+(s / 60).toPrecision(3)} min`;
    if (s === 0) return "0 s";
    if (s >= 1) return `${+s.toPrecision(3)} s`;
    return `${+(1000 * s).toPrecision(2)} ms`;
  };
  const percent = (v, digits = 0) => (v === null || v === undefined ? "–" : `${(100 * v).toFixed(digits)} %`);
  const signed = (v) => (v === null || v === undefined ? "–" : `${v > 0 ? "+" : v < 0 ? "−" : ""}${Math.abs(100 * v).toFixed(1)} %`);
  const many = (n, one, more = `${one}s`) => `${charts.short(n)} ${n === 1 ? one : more}`;

  const ORDERS = ["srtf", "isrtf", "windowed", "bins"];
  function headline(s) {
    const up = s.workers.filter((w) => w.up).length;
    const q = s.queue, orders = ORDERS.includes(s.mode);
    $("headline").textContent = !up ? "No engine is up"
      : q.waiting ? `${many(q.waiting, "request")} wait${q.waiting === 1 ? "s" : ""}`
      : q.running ? "No request waits" : "Idle";
    $("headline").className = up ? "" : "bad";
    $("subline").textContent = !up ? "Requests wait for an engine; the gateway rejects those that wait too long."
      : s.mode === "observe" ? "The gateway forwards requests in arrival order and estimates below what another order would have gained."
      : q.waiting ? (orders ? "Requests with shorter predicted outputs are scheduled first." : "Requests are dispatched in arrival order, or in the order of the engines.")
      : "Each request is dispatched at once; the order has no effect while the queue is empty.";
    const facts = [`mode ${s.mode}`, `${up} of ${many(s.workers.length, "engine")} up`, `running ${seconds(s.up_s)}`];
    if (s.max_wait_s !== null) facts.push(`waiting bound ${seconds(s.max_wait_s)}`);
    $("facts").replaceChildren(...facts.map((text) => make("li", "", text)));
  }

  function tiles(s) {
    const q = s.queue, last = s.samples.rows[s.samples.rows.length - 1];
    const up = s.workers.some((w) => w.up);
    const c = s.change, known = c && c.is_known && c.value !== null;
    const interval = known && c.low !== null ? `${signed(c.low)} to ${signed(c.high)}; ` : "";
    const hint = !c ? "estimated from 200 requests on" : !known ? "the engines do not behave as fitted"
      : `${interval}simulated on ${many(c.requests, "request")}`;
    const look = !known || !c.in_use || c.low === null ? "" : c.high < 0 ? "good" : c.low > 0 ? "bad" : "";
    const rows = [
      ["Waiting", charts.short(q.waiting), q.waiting ? `longest ${seconds(q.oldest_wait_s)}` : "queue empty"],
      ["At engines", charts.short(q.running), "requests"],
      ["Estimated wait", up ? seconds(q.predicted_wait_s) : "–", up ? "of a new request" : "no engine is up"],
      ["Backlog", up ? seconds(q.backlog_s) : "–", many(q.backlog_tokens, "token")],
      ["Output", last ? charts.short(last[3]) : "–", "tokens per second"],
      [c && !c.in_use ? `JCT against FCFS if ${c.order}` : "JCT against FCFS", known ? signed(c.value) : "–", hint, look],
    ];
    $("tiles").replaceChildren(...rows.map(([name, value, hint, look = ""]) =>
      put(make("li"), make("p", "name", name), make("p", `value ${look}`, value), make("p", "hint", hint))));
  }

  function over(s) {
    const rows = s.samples.rows;
    charts.lines($("requests"), rows, [[2, "s0"], [1, "s1"]], 600);
    charts.lines($("tokens"), rows, [[3, "s2"]], 600);
  }

  function next(s) {
    const order = s.queue.order, none = !order.length;
    $("next-none").hidden = !none;
    $("next").toggleAttribute("hidden", none);
    $("next-note").textContent = none ? "" :
      `The first ${order.length} of ${s.queue.waiting} waiting requests in dispatch order; height: predicted remaining tokens. ` +
      `Orange: waited at least ${seconds(s.max_wait_s)}, dispatched before all others.`;
    if (!none) charts.bars($("next"), order.map((one) => one.left), 
      order.map((one) => s.max_wait_s !== null && one.queued_for_s >= s.max_wait_s), order.map((one) => one.priority));
  }

  function gauge(name, value, share, look = "") {
    const fill = make("span", `fill ${look}`);
    fill.style.width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
    return put(make("div", "gauge"), make("span", "name", name), make("span", "value", value), put(make("div", "track"), fill));
  }
  function engines(s) {
    const sent = s.workers.map((w) => w.dispatched).filter((d) => d && d.requests);
    const sum = (key) => sent.reduce((total, d) => total + d[key], 0);
    const total = sum("requests");
    const q = s.shared_queue;
    $("shared-queue").textContent = !q ? "" : !q.shared ? "The queue is local: no gateway leads now."
      : `One queue for ${many(q.gateways, "gateway")}; ` +
        (q.leads ? "this gateway leads." : `gateway ${q.leader} leads.`);
    $("router").textContent = `Router ${s.router}` + (!total ? "." :
      `: ${many(total, "request")} sent since the start; ${percent(sum("cached_tokens") / sum("prompt_tokens"))} of their prompt tokens probably cached at the engine.`);
    const cards = s.workers.map((w) => {
      const state = w.up ? (w.breaker === "half-open" ? "probing" : "up") : w.breaker === "open" ? "circuit open" : "down";
      const card = put(make("li"), put(make("div", "head"), make("h3", "", w.name), make("span", `badge ${w.up ? "" : "down"}`, state)));
      card.append(make("p", "model", [w.kind, ...w.models].filter(Boolean).join(" · ") || "unknown"));
      if (w.cause) card.append(make("p", "cause", w.cause));
      card.append(gauge("in flight / limit", `${w.in_flight} / ${w.limit ?? "–"}`, w.limit ? w.in_flight / w.limit : 0));
      if (w.kv_used !== null) card.append(gauge("KV cache", percent(w.kv_used), w.kv_used, w.kv_used > 0.9 ? "high" : "kv"));
      const facts = [];
      if (w.running !== null) facts.push(`runs ${charts.short(w.running)}`);
      if (w.waiting !== null) facts.push(`${charts.short(w.waiting)} in its own queue`);
      if (w.tokens_per_s !== null) facts.push(`${charts.short(w.tokens_per_s)} tokens/s`);
      facts.push(`backlog ${many(Math.round(w.backlog_tokens), "token")}`);
      card.append(make("p", "model", facts.join(" · ")));
      const d = w.dispatched;
      if (d && d.requests) {
        card.append(make("p", "model sent", `${percent(d.requests / total)} of requests (${charts.short(d.requests)}) · ${percent(d.cached_tokens / d.prompt_tokens)} of prompt tokens probably cached`));
      }
      return card;
    });
    $("engines").replaceChildren(...(cards.length ? cards : [make("li", "muted", "No engine has been discovered.")]));
  }

  function schedule(s) {
    const now = s.schedule;
    $("schedule-section").hidden = !now;
    if (!now) return;
    const p = now.phases, f = now.follows;
    const facts = [`B_E = ${p.prefill_batch}`, `N_D = ${p.decode_steps}`];
    if (p.decode_batch !== null) facts.push(`decode batch ${charts.short(p.decode_batch)} on average`);
    if (p.max_requests !== null) facts.push(`at most ${p.max_requests} in flight per engine`);
    if (p.threshold !== null) facts.push(`batches resized within ${percent(p.threshold)} of ${charts.short(p.mean_prompt_tokens)} prompt tokens per request`);
    $("schedule-now").textContent = facts.join(" · ");
    $("schedule-follows").textContent = !f ? "The schedule is fixed: it does not follow the output lengths."
      : !f.up ? `The schedule no longer follows the output lengths: ${f.error}.`
      : f.alarm === null ? "Drift detection of output lengths has not started."
      : `${many(f.observed, "request")} observed: evidence of drift ${charts.short(f.evidence)}; an alarm needs ${charts.short(f.alarm)}. ` +
        `Schedule changed ${many(f.changed, "time")}, retained ${many(f.unchanged, "time")}, replanning failed ${many(f.failed, "time")}.` +
        (f.last.length ? ` Latest event, ${seconds(f.last_ago_s)} ago:` : "");
    $("schedule-events").replaceChildren(...(f ? f.last : []).map((text) => make("li", "muted", text)));
  }

  function lengths(s) {
    const l = s.lengths;
    $("lengths-note").textContent = !l.count ? "No request has finished within the last ten minutes." :
      `${many(l.count, "request")} of the last ten minutes: ${percent(l.within_2x)} predicted within a factor of 2, ` +
      `median ratio ${charts.short(l.bias)}; ${percent(l.concordance)} of request pairs predicted in the right order (50 % is chance).`;
    $("lengths").hidden = !l.count;
    if (!l.count) return;
    charts.scatter($("scatter"), l.points);
    charts.calibration($("calibration"), l.calibration);
  }

  function table(id, heads, rows) {
    const words = ["model", "engine"];
    const head = put(make("thead"), put(make("tr"), ...heads.map((text) => make("th", words.includes(text) ? "left" : "", text))));
    $(id).replaceChildren(head, put(make("tbody"), ...rows));
  }
  const quantiles = (values) => {
    const cell = make("td", "", values[0] === null ? "–" : values.map((v) => charts.short(v)).join(" / "));
    return cell;
  };
  function times(s) {
    table("times", ["", "requests", "JCT", "first token", "queue"], s.times.map((group) =>
      put(make("tr"), make("th", "", group.name), make("td", "", charts.short(group.count)),
        quantiles(group.jct), quantiles(group.ttft), quantiles(group.queue))));
    $("times-box").hidden = !s.times.length;
    $("times-none").hidden = Boolean(s.times.length);
  }

  const NAMES = { fcfs: "first come, first served", srtf: "shortest predicted remainder first", isrtf: "the same, with preemption", oracle: "known lengths, without preemption" };
  const KINDS = { served: "as served", simulated: "simulated on this traffic" };
  const unit = (s) => (s >= 7200 ? [3600, "h"] : s >= 180 ? [60, "min"] : s >= 1 ? [1, "s"] : [0.001, "ms"]);
  // A value over its interval, both in the unit of the value.
  function estimate([value, low, high], [size, name], show) {
    const cell = make("td", "", `${show(value / size)} ${name}`);
    if (low !== null && high !== null) cell.append(make("span", "ends", `${show(low / size)} to ${show(high / size)}`));
    return cell;
  }
  const time = (one) => estimate(one, unit(one[2] ?? one[0]), (v) => `${v >= 99.5 ? Math.round(v) : +v.toPrecision(2)}`);
  const change = (one) => (one ? estimate(one, [0.01, "%"], (v) => `${v > 0 ? "+" : v < 0 ? "−" : ""}${Math.abs(v).toFixed(Math.abs(v) < 9.95 ? 1 : 0)}`) : make("td", "", "–"));
  function policies(s) {
    const rows = s.policies, served = rows.find((row) => row.kind === "served");
    $("policies-section").hidden = !rows.length;
    $("policies-note").textContent = (served ? `The last ${many(served.count, "request")} as served in mode ${served.name}; below, all orders simulated on engines fitted to the traffic. ` : "") +
      "Below each number: its interval. JCT: from arrival to the last token. Queue: time in the gateway's queue; time in an engine's queue counts in the JCT only.";
    const groups = [["", 1], ["JCT", 4], ["queue", 4], ["change against FCFS", 2]].map(([text, span]) => {
      const cell = make("th", "group", text);
      cell.colSpan = span;
      return cell;
    });
    const quarter = ["mean", "50 %", "90 %", "99 %"];
    table("policies", ["", ...quarter, ...quarter, "mean", "99 %"], rows.map((row) => {
      const about = row.kind === "simulated" ? [NAMES[row.name], `${KINDS.simulated}, ${many(row.count, "request")}`].filter(Boolean).join("; ") : KINDS[row.kind];
      const name = put(make("th"), make("span", "", row.name), make("span", "ends", about));
      return put(make("tr", row.kind), name, ...[...row.jct, ...row.queue].map(time), change(row.mean_change), change(row.p99_change));
    }));
    $("policies").tHead.prepend(put(make("tr"), ...groups));
  }

  function observed(s) {
    const o = s.observed;
    $("observed-section").hidden = !o && s.mode !== "observe";
    $("verdict").textContent = o ? o.decision : "Estimating";
    $("verdict").className = `verdict ${o && o.decision === "switch on" ? "good" : ""}`;
    $("verdict-reason").textContent = o ? o.description : "The gateway evaluates recent traffic every few minutes.";
  }

  function errors(s) {
    const outcomes = Object.entries(s.counts.outcomes).map(([name, n]) => `${charts.short(n)} ${name.replace("_", " ")}`);
    if (s.counts.preemptions) outcomes.push(many(s.counts.preemptions, "preemption"));
    if (s.counts.failovers) outcomes.push(many(s.counts.failovers, "failover"));
    $("counts").textContent = outcomes.length ? `Since the start: ${outcomes.join(", ")}.` : "No request has finished since the start.";
    $("errors-box").hidden = !s.troubles.length;
    table("errors", ["error", "times", "last", "model", "engine"], s.troubles.map((one) =>
      put(make("tr"), make("th", "", one.what), make("td", "", charts.short(one.count)), make("td", "", one.ago_s < 1 ? "now" : `${seconds(one.ago_s)} ago`),
        make("td", "wide", one.model), make("td", "wide", one.worker))));
  }

  function prediction(s) {
    const rows = Object.entries(s.length_prediction).filter(([, v]) => v !== null && v !== "" && (typeof v !== "object" || Object.keys(v).length));
    const plain = (v) => (typeof v === "number" ? charts.short(v) : v === null ? "–" : typeof v === "object" ? listed(v) : String(v));
    const listed = (v) => Object.entries(v).map(([k, x]) => `${k.replaceAll("_", " ")} ${x && typeof x === "object" ? `(${listed(x)})` : plain(x)}`).join(", ");
    const deep = (v) => typeof v === "object" && Object.values(v).some((x) => x && typeof x === "object");
    $("prediction").replaceChildren(...rows.map(([name, value]) =>
      put(make("div", deep(value) ? "wide" : ""), make("dt", "", name.replaceAll("_", " ")), make("dd", "", plain(value)))));
  }

  return { all: [headline, tiles, over, next, schedule, engines, lengths, policies, times, observed, errors, prediction] };
})();
