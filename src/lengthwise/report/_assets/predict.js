"use strict";
// Calibration, predicted against true lengths, scores by tokens so far, and bins.
(() => {
  const { data } = theme;
  const { text, colour, series, dash, axis, label, layout } = theme;
  const name = (i) => text(data.names[i]);
  const line = (i, d, extra) => ({
    type: "scatter", mode: "lines+markers", name: name(i), x: d.x, y: d.y, marker: { size: 5 },
    line: { color: series(i), width: 2, dash: dash(i) }, ...extra,
  });

  function calibration() {
    const diagonal = { type: "scatter", mode: "lines", x: [0, 1], y: [0, 1], hoverinfo: "skip",
                     line: { color: colour("--faint"), width: 1, dash: "dot" } };
    const curves = data.calibration.map((d, i) => line(i, d, { hovertemplate: "%{y:.1%} below" }));
    return [[diagonal, ...curves], layout({ title: "Calibration" }, {
      hovermode: "x unified",
      xaxis: axis({ title: label("quantile"), range: [-0.03, 1.03], tickvals: [0.2, 0.4, 0.6, 0.8, 1], tickformat: ".0%" }),
      yaxis: axis({ title: label("share below it"), range: [-0.03, 1.03], tickvals: [0, 0.2, 0.4, 0.6, 0.8, 1], tickformat: ".0%" }),
    })];
  }

  function pairs() {
    const d = data.pairs;
    const all = [...d.predicted, ...d.actual].filter((v) => v > 0);
    const ends = [Math.min(...all), Math.max(...all)];
    const hover = d.predicted.map((p, i) =>
      `${text(d.model[i])}<br>predicted ${Math.round(p)} (${Math.round(d.low[i])} to ${Math.round(d.high[i])})<br>true ${d.actual[i]}`);
    const points = { type: "scatter", mode: "markers", x: d.predicted, y: d.actual, text: hover, hovertemplate: "%{text}<extra></extra>",
                     marker: { size: 5, color: series(0), opacity: 0.35 } };
    const diagonal = { type: "scatter", mode: "lines", x: ends, y: ends, hoverinfo: "skip",
                    line: { color: colour("--faint"), width: 1, dash: "dot" } };
    return [[diagonal, points], layout({ title: `Requests of ${name(0)}` }, {
      hovermode: "closest",
      xaxis: axis({ title: label("predicted median, tokens"), type: "log", ...theme.logTicks(all) }),
      yaxis: axis({ title: label("true length, tokens"), type: "log", ...theme.logTicks(all) }),
    })];
  }

  function windows(key, title, y) {
    const curves = data[key].map((d, i) => line(i, d, {
      error_y: d.half.length ? { type: "data", array: d.half, color: series(i), thickness: 1, width: 2 } : undefined,
      hovertemplate: "%{y:.3~g}",
    }));
    return [curves, layout({ title }, {
      hovermode: "x unified",
      xaxis: axis({ title: label("tokens so far"), rangemode: "tozero", showgrid: false }),
      yaxis: axis(y),
    })];
  }

  function bins() {
    const ks = ["2 bins", "4 bins", "8 bins"];
    const bars = data.bins.flatMap((d, i) => [
      { type: "bar", name: `${name(i)}: exact`, x: ks, y: d.exact, offsetgroup: i, marker: { color: series(i) },
        hovertemplate: "exact %{y:.1%}<extra></extra>" },
      { type: "bar", name: `${name(i)}: within one`, x: ks, y: d.near.map((v, k) => v - d.exact[k]), base: d.exact,
        offsetgroup: i, marker: { color: series(i), opacity: 0.3 }, customdata: d.near,
        hovertemplate: "within one %{customdata:.1%}<extra></extra>" },
    ]);
    return [bars, layout({ title: "Exact bin, and within one" }, {
      barmode: "group", bargap: 0.4, xaxis: axis({ showgrid: false }), yaxis: axis({ range: [0, 1.01], tickformat: ".0%" }),
    })];
  }

  const drawn = {
    calibration, pairs, bins,
    mae: () => windows("mae", "Mean absolute error, tokens", { rangemode: "tozero" }),
    tau: () => windows("tau", "Kendall's tau, running requests", { range: [Math.min(0, ...data.tau.flatMap((d) => d.y.map((v) => v ?? 0))) - 0.05, 1] }),
    r2: () => windows("r2", "R2, all requests", { range: [Math.min(0, ...data.r2.flatMap((d) => d.y.map((v) => v ?? 0))) - 0.02, 1] }),
  };
  function draw() {
    for (const [id, figure] of Object.entries(drawn))
      if (document.getElementById(id)) theme.draw(id, ...figure());
  }
  theme.start(draw);
})();
