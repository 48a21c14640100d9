"use strict";
// What the page's parts share: the study's numbers, the plan that is shown, the limits as they were moved.
const study = (() => {
  const { plans } = JSON.parse(document.getElementById("figures").textContent);
  const FIRST = 3; // a point is [rate, cost, held, metric, metric, ...]
  const parts = []; // {draw, limits}: called when the plan or the colours, and when a limit changes
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

  // A point that held what was asked holds looser limits too. One that did not must owe it to a limit
  // that was loosened: it may have been refused for a queue that grows, which its means do not tell.
  function holds(point) {
    const keeps = (limit, i) => {
      const v = value(point, limit.metric);
      return v === null || v === undefined || (limit.atLeast ? v >= bounds[i] : v <= bounds[i]);
    };
    const gain = (limit, i) => (limit.atLeast ? limit.bound - bounds[i] : bounds[i] - limit.bound);
    if (point[2]) return plan.limits.every((limit, i) => gain(limit, i) >= 0 || keeps(limit, i));
    const owed = (limit, i) => {
      const v = value(point, limit.metric);
      return gain(limit, i) > 0 && known(v) && (limit.atLeast ? v <= 1.05 * limit.bound : v >= 0.95 * limit.bound);
    };
    return plan.limits.every(keeps) && plan.limits.some(owed);
  }
  const asked = () => plan.limits.every((limit, i) => bounds[i] === limit.bound);

  // What a choice is worth at one of its points; null where only its operating point tells.
  function worth(choice, at) {
    const point = choice.points[at], asked = at === choice.at;
    if (asked && known(choice.objective[0])) return choice.objective[0];
    if (plan.live === "rate") return (3600 * point[0]) / choice.price;
    return asked ? ({ price: choice.price, gpus: choice.gpus }[plan.live] ?? null) : null;
  }
  function best() {
    if (asked()) return plan.best < 0 ? null : { choice: plan.best, at: plan.choices[plan.best].at, value: plan.choices[plan.best].objective[0] };
    let found = null;
    plan.choices.forEach((choice, i) => (choice.points ?? []).forEach((point, at) => {
      const now = holds(point) ? worth(choice, at) : null;
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
  const wide = (values) => {
    const positive = values.filter((v) => known(v) && v > 0);
    return positive.length > 1 && Math.max(...positive) > 20 * Math.min(...positive);
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
  const tried = () => plan.choices.map((choice, i) => [i, choice]).filter(([, choice]) => choice.points);

  element("plan").addEventListener("change", (event) => show(+event.target.value));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("DOMContentLoaded", () => show(0));
  return {
    get plan() { return plan; }, get bounds() { return bounds; },
    parts, element, known, number, estimate, metric, value, amount, sign, holds, asked, best, setBound, wide, options, make, tried,
  };
})();
