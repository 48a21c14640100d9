"use strict";
// The best objective over any two axes, as a table that is readable without colours.
(() => {
  const { element, known, make } = study;
  if (!element("heat")) return;
  const axis = (id) => +element(id).value;

  function best(inside) {
    const worth = (choice) => (known(choice.objective[0]) ? choice.objective[0] : null);
    const better = (a, b) => (study.plan.objective.higher ? worth(a) > worth(b) : worth(a) < worth(b));
    return inside.filter((choice) => worth(choice) !== null).reduce((top, choice) => (top && !better(choice, top) ? top : choice), null);
  }
  // Reasons for an empty cell, with counts.
  function reasons(inside, excluded) {
    const texts = excluded.map(([, , reason, count]) => {
      const [region, example] = study.plan.reasons[reason];
      return `${count} × ${region}${example && example !== region ? ` (${example})` : ""}`;
    });
    if (inside.length) texts.push(`${inside.length} × a limit is broken at every simulated load`);
    return texts.join("; ") || "not tried";
  }
  function cells() {
    const [across, down] = [axis("across"), axis("down")], { axes, choices } = study.plan;
    const swapped = across > down, excluded = study.plan.excluded[swapped ? `${down},${across}` : `${across},${down}`] ?? [];
    return axes[down].values.map((_, row) => axes[across].values.map((_, column) => {
      const inside = choices.filter((choice) => choice.settings[across] === column && choice.settings[down] === row);
      return { inside, top: best(inside), out: excluded.filter(([a, b]) => (swapped ? a === row && b === column : a === column && b === row)) };
    }));
  }
  function draw() {
    const { axes, objective } = study.plan, across = axes[axis("across")], down = axes[axis("down")];
    if (!across || !down) return element("heat").replaceChildren();
    const grid = cells(), values = grid.flat().flatMap(({ top }) => (top ? [top.objective[0]] : []));
    const low = Math.min(...values), high = Math.max(...values);
    const heat = (v) => (high > low ? (objective.higher ? v - low : high - v) / (high - low) : 1);
    const heads = make("tr", {}, make("td", {}, `${down.label} \\ ${across.label}`), ...across.values.map((text) => make("th", { scope: "col" }, text)));
    const body = grid.map((row, i) => make("tr", {}, make("th", { scope: "row" }, down.values[i]), ...row.map((one, j) => cell(one, heat, [down.values[i], across.values[j]]))));
    element("heat").replaceChildren(make("thead", {}, heads), make("tbody", {}, ...body));
    element("cell").textContent = `${objective.label}, ${objective.unit}. Point at a cell or move to it by keyboard for details.`;
  }
  function cell({ inside, top, out }, heat, place) {
    const detail = top ? `${top.name}: ${study.number(top.objective[0], 4)} ${study.plan.objective.unit}` : `no result: ${reasons(inside, out)}`;
    const text = top ? study.number(top.objective[0], 4) : "–";
    const style = top ? `--heat:${Math.round(6 + 50 * heat(top.objective[0]))}%` : null;
    const made = make("td", { tabindex: 0, title: detail, style, class: top ? (heat(top.objective[0]) === 1 ? "leads" : "") : "none" }, text);
    const explain = () => { element("cell").textContent = `${place.join(", ")}: ${detail}`; };
    for (const event of ["focus", "pointerenter", "click"]) made.addEventListener(event, explain);
    return made;
  }
  function open() {
    const axes = study.plan.axes.map((a, i) => [i, a.label, a.values.length]);
    const [x, y] = [...axes].sort((a, b) => (b[2] > 1) - (a[2] > 1) || a[0] - b[0]);
    study.options(element("across"), axes, (y ?? x)?.[0]);
    study.options(element("down"), axes, x?.[0]);
  }
  // Choosing one axis twice swaps the two.
  let before = {};
  const remember = () => { before = { across: element("across").value, down: element("down").value }; };
  for (const [id, other] of [["across", "down"], ["down", "across"]])
    element(id).addEventListener("change", () => {
      if (element(id).value === element(other).value) element(other).value = before[id];
      remember();
      draw();
    });
  study.parts.push({ open: () => { open(); remember(); }, draw });
})();
