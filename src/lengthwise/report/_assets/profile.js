"use strict";
// Times by operator, the roofline, and maps of the measured points.
(() => {
  const { data } = theme;
  const { text, colour, series, dash, axis, label, layout } = theme;
  const all = (curves, key) => curves.flatMap((c) => c[key]).filter((v) => v > 0);

  // A logarithmic axis with one tick per decade, or 1, 2, 5 on short axes.
  const log = (title, values, more) => axis({ title: label(title), type: "log", ...ticks(values), ...more });
  function ticks(values) {
    const low = Math.min(...values), high = Math.max(...values);
    const decades = Math.log10(high / low);
    const steps = decades > 2.5 ? [1] : decades > 1.2 ? [1, 3] : [1, 2, 5];
    const by = decades > 7 ? 2 : 1;
    const tickvals = [];
    for (let d = Math.floor(Math.log10(low)); d <= Math.ceil(Math.log10(high)); d++)
      if (d % by === 0) for (const s of steps) tickvals.push(s * 10 ** d);
    return { tickvals, ticktext: tickvals.map(short), range: [Math.log10(low) - 0.08, Math.log10(high) + 0.08] };
  }
  const short = (v) => v >= 1e15 ? `${v / 1e15} P` : v >= 1e12 ? `${v / 1e12} T` : v >= 1e9 ? `${v / 1e9} G`
    : v >= 1e6 ? `${v / 1e6} M` : v >= 1e4 ? `${v / 1e3} k` : v.toLocaleString("en", { maximumSignificantDigits: 3 });
  const time = (s) => s < 1e-3 ? `${+(s * 1e6).toPrecision(3)} us` : s < 1 ? `${+(s * 1e3).toPrecision(3)} ms` : `${+s.toPrecision(3)} s`;

  function lines(figure) {
    const curves = figure.curves.map((c, i) => ({
      type: "scatter", mode: c.x.length > 40 ? "lines" : "lines+markers", name: text(c.name), x: c.x, y: c.y,
      marker: { size: 4, color: series(i) }, line: { color: series(i), width: 1.8, dash: dash(i) },
      customdata: c.y.map((s) => s === null ? "" : time(s)),
      hovertemplate: `%{x:,} ${text(figure.x)}: %{customdata}<extra>${text(c.name)}</extra>`,
    }));
    const y = log("", all(figure.curves, "y"));
    y.ticktext = y.tickvals.map(time);
    return [curves, layout(figure, { hovermode: "closest", xaxis: log(figure.x, all(figure.curves, "x"), { showgrid: false }), yaxis: y })];
  }

  function roofline(figure) {
    const xs = all(figure.curves, "x"), ys = all(figure.curves, "y");
    const ends = [Math.min(...xs), Math.max(...xs)], top = Math.max(...figure.peaks);
    const roofs = figure.peaks.map((peak) => {
      const ridge = peak / figure.bandwidth;
      const x = [ends[0], Math.max(ends[0], Math.min(ridge, ends[1])), Math.max(ends[1], ridge)];
      return { type: "scatter", mode: "lines", x, y: x.map((v) => Math.min(peak, v * figure.bandwidth)), hoverinfo: "skip",
               line: { color: colour("--faint"), width: 1.5, dash: "dot" } };
    });
    const points = figure.curves.map((c, i) => ({
      type: "scatter", mode: "markers", name: text(c.name), x: c.x, y: c.y, marker: { size: 4.5, color: series(i), opacity: 0.6 },
      hovertemplate: `%{x:.3~g} FLOPs per byte: %{y:.3~s}FLOP/s<extra>${text(c.name)}</extra>`,
    }));
    return [[...roofs, ...points], layout(figure, {
      hovermode: "closest", xaxis: log("FLOPs per byte", [...ends, ...figure.peaks.map((p) => p / figure.bandwidth)]),
      yaxis: log("FLOP/s", [...ys, top]),
    })];
  }

  // Zero has no logarithm; it is drawn below one.
  const shown = (v) => v > 0 ? v : 0.4;
  function map(figure) {
    const { x, y } = figure.points;
    const values = (points, i) => [...points.map(shown), ...figure.gaps.flatMap((g) => [shown(g[i]), shown(g[i + 1])])];
    const shapes = figure.gaps.map((g) => ({
      type: "rect", x0: shown(g[0]), x1: shown(g[1]), y0: shown(g[2]), y1: shown(g[3]), layer: "below",
      line: { width: 0 }, fillcolor: colour("--limit"), opacity: 0.16,
    }));
    const points = { type: "scatter", mode: "markers", x: x.map(shown), y: y.map(shown), customdata: y,
                     marker: { size: 4, color: series(0), opacity: 0.7 },
                     hovertemplate: `%{x:,} ${text(figure.x)}, %{customdata:,} ${text(figure.y)}<extra></extra>` };
    const vertical = log(figure.y, values(y, 2));
    if (y.some((v) => v === 0)) {
      vertical.tickvals = [0.4, ...vertical.tickvals.filter((v) => v >= 1)];
      vertical.ticktext = vertical.tickvals.map((v) => v < 1 ? "0" : short(v));
    }
    return [[points], layout(figure, { hovermode: "closest", shapes, xaxis: log(figure.x, values(x, 0)), yaxis: vertical })];
  }

  const kinds = { lines, roofline, map };
  function draw() {
    for (const figure of Object.values(data).flat()) theme.draw(figure.id, ...kinds[figure.kind](figure));
  }
  theme.start(draw);
})();
