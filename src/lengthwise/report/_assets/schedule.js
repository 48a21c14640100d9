"use strict";
// Each strategy's frontier as steps, and the steady state as a Gantt chart.
(() => {
  const { data } = theme;
  const { text, colour, series, axis, label, layout } = theme;
  const legend = () => ({ orientation: "h", x: 0, xanchor: "left", y: -0.2, yanchor: "top",
                          font: { color: colour("--soft"), size: 12 }, bgcolor: "rgba(0,0,0,0)" });

  function curve(one) {
    return {
      type: "scatter", mode: "lines+markers", name: text(one.name), x: one.x, y: one.y, text: one.words.map(text),
      line: { color: series(one.series), width: 2, shape: "hv", dash: one.dash }, marker: { color: series(one.series), size: 5 },
      hovertemplate: "%{text}<br>%{y:.4~g} requests/s at %{x:.3~g} s<extra></extra>",
    };
  }

  // Band of throughput under cost errors: the upper edge is filled down to the lower one.
  function band(one) {
    if (one.band.length !== one.x.length) return [];
    const edge = (end, fill) => ({
      type: "scatter", mode: "lines", x: one.x, y: one.band.map((ends) => ends[end]), hoverinfo: "skip", showlegend: false,
      line: { color: series(one.series), width: 0, shape: "hv" }, ...fill,
    });
    return [edge(0, {}), edge(1, { fill: "tonexty", fillcolor: `${series(one.series)}22` })];
  }

  function spot(one, name, shade, symbol) {
    return {
      type: "scatter", mode: "markers", name, x: [one.x], y: [one.y], text: [text(one.words)],
      marker: { color: shade, size: 12, symbol, line: { color: colour("--card"), width: 1.5 } },
      hovertemplate: "%{text}<br>%{y:.4~g} requests/s at %{x:.3~g} s<extra></extra>",
    };
  }

  function front() {
    const all = data.curves.concat(data.others);
    const traces = all.flatMap(band).concat(all.map(curve));
    if (data.static) traces.push(spot(data.static, "static batching", series(4), "x"));
    traces.push(spot(data.chosen, "chosen", colour("--ink"), "star"));
    const xs = traces.flatMap((t) => t.x).concat(data.bound === null ? [] : [data.bound]);
    const shapes = data.bound === null ? [] : [{
      type: "line", yref: "paper", y0: 0, y1: 1, x0: data.bound, x1: data.bound,
      line: { color: colour("--limit"), width: 1.5, dash: "dash" },
    }];
    const latency = data.worst ? "worst-case latency, s, log scale" : "expected latency, s, log scale";
    theme.draw("front", traces, layout({ title: "Throughput by latency bound" }, {
      shapes, showlegend: true, legend: legend(), hovermode: "closest",
      xaxis: { ...axis({ title: label(latency) }), type: "log", ...theme.logTicks(xs) },
      yaxis: { ...axis({ title: label("requests/s") }), rangemode: "tozero" },
    }));
  }

  function bars(prefills) {
    const own = data.bars.filter((b) => b[3] === prefills);
    return {
      type: "bar", orientation: "h", name: prefills ? "prefill" : "decode",
      y: own.map((b) => text(data.stages[b[0]])), base: own.map((b) => b[1]), x: own.map((b) => b[2] - b[1]),
      marker: { color: own.map((b) => series(b[4])), opacity: prefills ? 1 : 0.4, line: { color: colour("--card"), width: 0.5 } },
      customdata: own.map((b) => [b[4] + 1, b[1], b[2]]),
      hovertemplate: `${prefills ? "prefill" : "decode"}, micro-batch %{customdata[0]}<br>`
        + "%{customdata[1]:.4~g} s to %{customdata[2]:.4~g} s<extra></extra>",
    };
  }

  function timeline() {
    const height = Math.max(220, 110 + 26 * data.stages.length);
    document.getElementById("timeline").style.height = `${height}px`;
    theme.draw("timeline", [bars(1), bars(0)], layout({ title: "Steady state" }, {
      barmode: "overlay", showlegend: false, bargap: 0.25, hovermode: "closest",
      xaxis: axis({ title: label("seconds") }),
      yaxis: { ...axis({}), categoryorder: "array", categoryarray: data.stages.map(text).reverse() },
    }));
  }

  theme.start(() => { front(); timeline(); });
})();
