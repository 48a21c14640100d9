"use strict";
// State shared by the parts of the page: the study, the plan on display and the moved limits.
const study = (() => {
  const { plans } = theme.data;
  const FIRST = 3; // a point is [rate, cost, satisfied, metric, metric, ...]
  const parts = []; // {open, draw, limits}: called for a new plan, for new colours, and for a moved limit
  let plan = plans[0];
  let bounds = plan.limits.map((limit) => limit.bound);

  const element = (id) => document.getElementById(id);
  const known = (value) => value !== null && value !== undefined && Math.abs(value) < 1e299;
  const decimals = (value, digits) => (value ? Math.min(9, Math.max(0, digits - 1 - Math.floor(Math.log10(Math.abs(value))))) : 0);
  const fixed = (value, places) => value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
  const number = (value, digits = 3) => (known(value) ? fixed(value, decimals(value, digits)) : "–");
  function estimate(value, half) {
    if (!known(value) || !known(half) || !(half > 0)) return [number(value), ""];
    const places = Math.max(decimals(half, 1), Math.min(decimals(half, 2), decimals(value, 4)));
    return [fixed(value, places), fixed(half, places)];
  }
  const index = (name) => plan.metrics.findIndex((metric) => metric.name === name);
  const metric = (name) => plan.metrics[index(name)] ?? { name, label: name, factor: 1, unit: "", better: 0 };
  const value = (point, name) => point[FIRST + index(name)];
  const amount = (name, v) => (v > 1e299 ? "never" : `${number(known(v) ? v * metric(name).factor : null)} ${metric(name).unit}`.trim());
  const sign = (limit) => (limit.atLeast ? "≥" : "≤");

  // A point that meets the requested limits also meets looser ones. A point that breaks them qualifies only if a
  // loosened limit explains the failure: it may have been rejected for a growing queue, which its means do not show.
  function meetsLimits(point) {
    const meets = (limit, i) => {
      const v = value(point, limit.metric);
      return v === null || v === undefined || (limit.atLeast ? v >= bounds[i] : v <= bounds[i]);
    };
    const gain = (limit, i) => (limit.atLeast ? limit.bound - bounds[i] : bounds[i] - limit.bound);
    if (point[2]) return plan.limits.every((limit, i) => gain(limit, i) >= 0 || meets(limit, i));
    const explains = (limit, i) => {
      const v = value(point, limit.metric);
      return gain(limit, i) > 0 && known(v) && (limit.atLeast ? v <= 1.05 * limit.bound : v >= 0.95 * limit.bound);
    };
    return plan.limits.every(meets) && plan.limits.some(explains);
  }
  const isRequested = () => plan.limits.every((limit, i) => bounds[i] === limit.bound);

  // The objective at one of a choice's simulated loads; null where it is only known at the operating point.
  function objectiveAt(choice, at) {
    const operating = at === choice.at;
    if (plan.live === "rate") return (3600 * choice.points[at][0]) / choice.price;
    if (operating && known(choice.objective[0])) return choice.objective[0];
    return operating ? ({ price: choice.price, gpus: choice.gpus }[plan.live] ?? null) : null;
  }
  function best() {
    if (isRequested()) return plan.best < 0 ? null : { choice: plan.best, at: plan.choices[plan.best].at, value: plan.choices[plan.best].objective[0] };
    let found = null;
    plan.choices.forEach((choice, i) => (choice.points ?? []).forEach((point, at) => {
      const now = meetsLimits(point) ? objectiveAt(choice, at) : null;
      if (!known(now)) return;
      if (!found || (plan.objective.higher ? now > found.value : now < found.value)) found = { choice: i, at, value: now };
    }));
    return found;
  }

  const draw = () => parts.forEach((part) => part.draw());
  function show(number) {
    plan = plans[number];
    bounds = plan.limits.map((limit) => limit.bound);
    document.querySelectorAll("[data-plan]").forEach((box) => { box.hidden = +box.dataset.plan !== number; });
    parts.forEach((part) => part.open?.());
    draw();
  }
  function setBound(i, bound) {
    bounds[i] = bound;
    parts.forEach((part) => part.limits?.());
  }
  const wide = (values, factor = 20) => {
    const positive = values.filter((v) => known(v) && v > 0);
    return positive.length > 1 && Math.max(...positive) > factor * Math.min(...positive);
  };
  function options(select, texts, chosen) {
    select.replaceChildren(...texts.map(([v, text]) => new Option(text, v)));
    select.value = chosen;
  }
  function make(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, v] of Object.entries(attributes)) if (v !== null) made.setAttribute(name, v);
    made.append(...children);
    return made;
  }
  const simulated = () => plan.choices.map((choice, i) => [i, choice]).filter(([, choice]) => choice.points);

  element("plan").addEventListener("change", (event) => show(+event.target.value));
  // The first drawing comes after all parts of the page have registered.
  let opened = false;
  theme.start(() => { opened ? draw() : show(0); opened = true; });
  return {
    get plan() { return plan; }, get bounds() { return bounds; },
    parts, element, known, number, estimate, metric, value, amount, sign, meetsLimits, isRequested, objectiveAt, best, setBound, wide, options, make, simulated,
  };
})();
