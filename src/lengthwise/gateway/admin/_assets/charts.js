"use strict";
// Small charts in plain SVG; their colours come from the style sheet, so they follow the colour scheme.
const charts = (() => {
  const NS = "http://www.w3.org/2000/svg";
  const node = (name, attributes = {}, text = "") => {
    const made = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    return made;
  };
  const short = (v) => {
    if (v === null || v === undefined) return "–";
    const a = Math.abs(v);
    if (a >= 1e6) return `${+(v / 1e6).toPrecision(3)}M`;
    if (a >= 1e4) return `${+(v / 1e3).toPrecision(3)}k`;
    return `${+v.toPrecision(3)}`;
  };
  // Returns about `about` axis steps of 1, 2 or 5 times a power of ten that cover 0 to `top`, in integers.
  function ticks(top, about) {
    const smallest = Math.max(1, top / about);
    const power = 10 ** Math.floor(Math.log10(smallest));
    const step = [1, 2, 5, 10].map((m) => m * power).find((v) => v >= smallest);
    const steps = Math.max(1, Math.ceil(top / step));
    return { top: step * steps, steps };
  }

  function frame(svg, left = 44, bottom = 24) {
    const box = svg.getBoundingClientRect();
    const w = Math.max(box.width, 120), h = Math.max(box.height, 80);
    svg.setAttribute("viewBox", `0 0 ${w} ${h}`);
    svg.replaceChildren();
    return { svg, x0: left, x1: w - 8, y0: h - bottom, y1: 12, add: (...nodes) => svg.append(...nodes) };
  }
  function yAxis(f, top, steps, format = short) {
    for (let i = 0; i <= steps; i++) {
      const y = f.y0 + ((f.y1 - f.y0) * i) / steps;
      f.add(node("line", { class: "grid-line", x1: f.x0, x2: f.x1, y1: y, y2: y }));
      f.add(node("text", { x: f.x0 - 8, y: y + 4, "text-anchor": "end" }, format((top * i) / steps)));
    }
  }

  // rows of [seconds ago (negative), value, ...]; one line per column.
  function lines(svg, rows, columns, spanS) {
    const f = frame(svg);
    const { top, steps } = ticks(Math.max(1, ...rows.flatMap((row) => columns.map(([c]) => row[c] || 0))), 4);
    yAxis(f, top, steps);
    const x = (s) => f.x1 + ((f.x1 - f.x0) * s) / spanS;
    const y = (v) => f.y0 + ((f.y1 - f.y0) * v) / top;
    const minutes = spanS / 60;
    for (let m = 0; m < minutes; m += 2) {
      if (m % 4 && f.x1 < 420) continue;
      const label = m ? `${m} min ago` : "now";
      f.add(node("text", { x: x(-60 * m), y: f.y0 + 18, "text-anchor": m ? "middle" : "end" }, label));
    }
    const shown = rows.filter((row) => row[0] >= -spanS);
    if (!shown.length) return;
    for (const [c, look] of columns) {
      const path = shown.map((row, i) => `${i ? "L" : "M"}${x(row[0]).toFixed(1)},${y(row[c] || 0).toFixed(1)}`).join("");
      const ends = `L${x(shown[shown.length - 1][0]).toFixed(1)},${f.y0}L${x(shown[0][0]).toFixed(1)},${f.y0}Z`;
      f.add(node("path", { class: `area ${look}`, d: path + ends }), node("path", { class: `line ${look}`, d: path }));
    }
  }

  // Waiting requests in dispatch order: bars of their predicted remaining tokens.
  function bars(svg, values, late, classes) {
    const f = frame(svg);
    const { top, steps } = ticks(Math.max(1, ...values), 2);
    yAxis(f, top, steps);
    const step = Math.min(26, (f.x1 - f.x0) / Math.max(values.length, 1));
    values.forEach((value, i) => {
      const h = Math.max(1.5, ((f.y0 - f.y1) * value) / top);
      const bar = node("rect", { class: late[i] ? "bar late" : "bar", x: f.x0 + i * step + 1, width: Math.max(1, step - 2), y: f.y0 - h, height: h, rx: 1.5 });
      f.add(bar);
      if (i && classes[i] !== classes[i - 1]) {
        const at = f.x0 + i * step;
        f.add(node("line", { class: "guide", x1: at, x2: at, y1: f.y1, y2: f.y0 }));
        f.add(node("text", { x: at + 2, y: f.y0 + 18 }, `class ${classes[i]}`));
      }
    });
    f.add(node("text", { x: f.x0, y: f.y0 + 18 }, "first"));
  }

  // Points on logarithmic axes of one range, with the diagonal.
  function scatter(svg, points) {
    const f = frame(svg, 50, 40);
    const top = Math.max(100, ...points.flat());
    const high = Math.log10(top) * 1.02;
    const at = (v) => Math.log10(Math.max(v, 1)) / high;
    const x = (v) => f.x0 + (f.x1 - f.x0) * at(v), y = (v) => f.y0 + (f.y1 - f.y0) * at(v);
    for (let v = 1; v <= top; v *= 10) {
      f.add(node("line", { class: "grid-line", x1: f.x0, x2: f.x1, y1: y(v), y2: y(v) }));
      f.add(node("line", { class: "grid-line", y1: f.y0, y2: f.y1, x1: x(v), x2: x(v) }));
      f.add(node("text", { x: f.x0 - 8, y: y(v) + 4, "text-anchor": "end" }, short(v)));
      f.add(node("text", { x: x(v), y: f.y0 + 17, "text-anchor": "middle" }, short(v)));
    }
    f.add(node("text", { x: (f.x0 + f.x1) / 2, y: f.y0 + 35, "text-anchor": "middle" }, "predicted"));
    f.add(node("text", { x: f.x0 + 6, y: f.y1 + 4 }, "actual"));
    f.add(node("path", { class: "guide", d: `M${x(1)},${y(1)}L${x(top)},${y(top)}` }));
    for (const [predicted, actual] of points) {
      f.add(node("circle", { class: "dot", cx: x(predicted).toFixed(1), cy: y(actual).toFixed(1), r: 2.6 }));
    }
  }

  function calibration(svg, points) {
    const f = frame(svg, 50, 40);
    const x = (v) => f.x0 + (f.x1 - f.x0) * v, y = (v) => f.y0 + (f.y1 - f.y0) * v;
    for (let i = 0; i <= 4; i++) {
      const v = i / 4, text = `${25 * i} %`;
      f.add(node("line", { class: "grid-line", x1: f.x0, x2: f.x1, y1: y(v), y2: y(v) }));
      f.add(node("text", { x: f.x0 - 8, y: y(v) + 4, "text-anchor": "end" }, text));
      f.add(node("text", { x: x(v), y: f.y0 + 17, "text-anchor": i === 4 ? "end" : "middle" }, text));
    }
    f.add(node("text", { x: (f.x0 + f.x1) / 2, y: f.y0 + 35, "text-anchor": "middle" }, "predicted quantile"));
    f.add(node("path", { class: "guide", d: `M${x(0)},${y(0)}L${x(1)},${y(1)}` }));
    if (!points.length) return;
    f.add(node("path", { class: "line s2", d: points.map(([a, b], i) => `${i ? "L" : "M"}${x(a)},${y(b)}`).join("") }));
    for (const [a, b] of points) f.add(node("circle", { class: "mark", cx: x(a), cy: y(b), r: 3.5 }));
  }

  return { lines, bars, scatter, calibration, short };
})();
