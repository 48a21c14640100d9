"""One page that explains a comparison: self-contained, for screens of any width and paper."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.metrics import difference
from lengthwise.report.binding import binding_of, bound_by
from lengthwise.report.curves import CDFS, levels, over_time, quantile_curve
from lengthwise.report.formatting import UNKNOWN
from lengthwise.report.headline import METRICS, MIN_SHARE, NEITHER, Cell, Row, latency_unit, paired, rows
from lengthwise.report.html_document import (
    SERIES,
    asset,
    document,
    header,
    interval,
    plotly_js,
    scrolling,
    section,
    swatch,
    variant_heads,
)
from lengthwise.report.json_file import deployment_facts
from lengthwise.report.result import Result, check_results, hardware, promises, title, workload
from lengthwise.report.summary_table import counts_note, intervals_note, model_note, notes_of
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.files import write_whole

HEADLINE = ("ttft_s.p99", "tbt_s.p99", "jct_s.p50", "rates.goodput", "rates.output", "cost.output")
TITLES = {
    "ttft_s.p99": "TTFT, 99th percentile",
    "tbt_s.p99": "Time between tokens, 99th percentile",
    "jct_s.p50": "JCT, median",
    "rates.goodput": "Goodput",
    "rates.output": "Output tokens",
    "cost.output": "Cost a million output tokens",
}


def cards(results: Sequence[Result]) -> str:
    """The cards' HTML."""
    shown = {row.metric.key: row for row in rows(results)}
    if "rates.goodput" not in shown and "rates.requests" in shown:
        shown = {**shown, "rates.goodput": shown["rates.requests"]}
    made = [_card(key, shown[key], results) for key in HEADLINE if key in shown]
    return f'<div class="cards">{"".join(made)}</div>'


def _card(key: str, row: Row, results: Sequence[Result]) -> str:
    title = "Requests" if row.metric.key == "rates.requests" else TITLES[key]
    hint = {1: "higher is better", -1: "lower is better", 0: ""}[row.metric.better]
    top = max(_top(c.estimate) for c in row.cells)
    lines = "".join(_bar_row(i, r.name, c, top) for i, (r, c) in enumerate(zip(results, row.cells, strict=True)))
    unit = {"/s": "a second", "%": "%", "$": "$"}.get(row.unit, row.unit)
    return (
        f'<article class="card"><h3>{escape(title)} <span class="unit">{unit}</span></h3>'
        f'<p class="hint">{hint}</p><ul>{lines}</ul></article>'
    )


def _bar_row(index: int, name: str, cell: Cell, top: float) -> str:
    shown = cell.estimate
    value = shown.value
    whisker = _span("whisker", shown.low, shown.high, top) if shown.has_interval else ""
    if shown.has_model_interval:
        whisker = _span("model-span", shown.model_low, shown.model_high, top) + whisker
    leads = " leads" if cell.leads else ""
    return (
        f'<li class="bar{leads}" style="--c:var(--series-{index % SERIES})">'
        f'<span class="name">{escape(name)}</span>'
        f'<span class="value">{cell.text}{interval(cell)}</span>'
        f'<span class="track"><i class="fill" style="width:{_share(value, top):.2f}%"></i>{whisker}</span>'
        "</li>"
    )


def _span(kind: str, low: float, high: float, top: float) -> str:
    left = _share(low, top)
    return f'<i class="{kind}" style="left:{left:.2f}%;width:{_share(high, top) - left:.2f}%"></i>'


def _top(estimate: Estimate) -> float:
    """The largest number that a bar must show."""
    ends = (estimate.value, estimate.high, estimate.model_high)
    return max(_finite(end) for end in ends)


def _share(value: float, top: float) -> float:
    return 100 * min(1.0, max(0.0, _finite(value) / top)) if top > 0 else 0.0


def _finite(value: float, otherwise: float = 0.0) -> float:
    return value if math.isfinite(value) else otherwise


Figure = dict[str, Any]

POINTS_IN_ALL = 4000
"""A figure's points over all variants; with many variants each curve gets fewer."""

PANELS = {
    "batch": ("Batch size", "sequences in a step", ""),
    "waiting": ("Queue", "requests waiting", ""),
    "kv": ("KV cache", "share of blocks held", ".0%"),
    "output": ("Output", "tokens a second", ""),
}

PARTS = {
    "linear": "Linear layers",
    "prefill_attention": "Prefill attention",
    "decode_attention": "Decode attention",
    "head": "Head and sampling",
    "embedding": "Embedding",
    "communication": "Communication",
    "send": "Stage to stage",
    "swap": "KV swap",
    "host": "Host",
    "idle": "Idle",
}
"""Where the time went, in the order of the bars."""


def figures(results: Sequence[Result]) -> dict[str, list[Figure]]:
    """Figures by section of the page: "latency", "time" and "shares"."""
    points = max(40, min(300, POINTS_IN_ALL // len(results)))
    bins = min(150, points)
    return {
        "latency": [f for name in CDFS if (f := _cdf(results, name, points))["curves"]],
        "time": _panels(results, bins),
        "shares": _time_shares_figure(results),
    }


def _cdf(results: Sequence[Result], name: str, points: int) -> Figure:
    at = levels(points)
    curves = [(i, quantile_curve(r, name, at)) for i, r in enumerate(results)]
    drawn = [(i, c) for i, c in curves if c is not None]
    shown_s = np.concatenate([c for _, c in drawn]) if drawn else np.ones(1)
    scale, unit = latency_unit(name, results)
    return {
        "id": f"cdf-{name.removesuffix('_s')}",
        "kind": "cdf",
        "title": CDFS[name],
        "unit": unit,
        "log": _wide(shown_s),
        "curves": [{"variant": i, "x": _short(c * scale), "y": _short(at)} for i, c in drawn],
        "limits": _limits(results, name, scale),
    }


def _wide(values: Any) -> bool:
    """Whether values span so much that only a logarithmic axis shows them all."""
    positive = values[values > 0]
    return len(positive) > 0 and float(positive.max()) > 20 * float(np.quantile(positive, 0.05))


def _limits(results: Sequence[Result], name: str, scale: float) -> list[float]:
    """SLO limits on this latency, each once."""
    goodputs = [r.summary.goodput for r in results]
    limits = {g.slo.limits[name] for g in goodputs if g is not None and name in g.slo.limits}
    return sorted(limit * scale for limit in limits)


def _panels(results: Sequence[Result], points: int) -> list[Figure]:
    columns = [over_time(r, points) for r in results]
    return [
        {
            "id": f"time-{key}",
            "kind": "time",
            "title": title,
            "unit": unit,
            "format": fmt,
            "curves": [{"variant": i, "x": _short(c["time_s"]), "y": _short(c[key])} for i, c in enumerate(columns)],
        }
        for key, (title, unit, fmt) in PANELS.items()
        if any(np.isfinite(c[key]).any() for c in columns)
    ]


def _time_shares_figure(results: Sequence[Result]) -> list[Figure]:
    told = [r for r in results if r.summary.hardware is not None]
    if not told:
        return []
    shares = [r.summary.hardware.time_shares for r in told if r.summary.hardware is not None]
    parts = [
        {"part": part, "label": label, "x": _short([s[part].value for s in shares])}
        for part, label in PARTS.items()
        if any(s[part].value > 0 for s in shares)
    ]
    return [{"id": "shares", "kind": "shares", "title": "", "names": [r.name for r in told], "parts": parts}]


def _short(values: Any) -> list[float | None]:
    """Numbers with five digits; what is not finite becomes null, a gap in the curve."""
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in np.asarray(values, float).tolist()]


METADATA = {
    "model": "Model",
    "gpu": "GPU",
    "gpus": "GPUs",
    "tp": "Tensor parallel",
    "pp": "Pipeline stages",
    "replicas": "Replicas",
    "rank": "Rank",
    "leave": "Leaves first",
    "batching": "Batching",
    "memory": "Memory",
    "preempt": "Preemption by",
    "router": "Router",
    "takeover": "Takeover",
    "binning": "Bins",
    "max_wait_s": "Longest wait, s",
    "batch_wait_s": "Longest wait in a bin, s",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_model_len": "max_model_len",
    "kv_blocks": "KV blocks",
    "block_size_tokens": "Block size",
    "price_per_hour_usd": "$ an hour",
    "cost_source": "Cost model",
}


def what_ran(results: Sequence[Result]) -> str:
    """HTML: what all variants have in common, what differs side by side, and the scenarios."""
    metadata = [{} if r.deployment is None else deployment_facts(r.deployment) for r in results]
    common: list[tuple[str, list[Any]]] = []
    differing: list[tuple[str, list[Any]]] = []
    labels = {name: name for r in results for name in r.engine} | (METADATA if any(metadata) else {})
    for key, label in labels.items():
        values = [(f or r.engine).get(key, UNKNOWN) for f, r in zip(metadata, results, strict=True)]
        (common if len(set(values)) == 1 else differing).append((label, values))
    return _common(common) + _differing(differing, results) + _scenarios(results)


def _common(metadata: Sequence[tuple[str, list[Any]]]) -> str:
    items = "".join(f"<div><dt>{label}</dt><dd>{_fact(values[0])}</dd></div>" for label, values in metadata)
    return f'<dl class="common">{items}</dl>'


def _differing(metadata: Sequence[tuple[str, list[Any]]], results: Sequence[Result]) -> str:
    if not metadata:
        return ""
    lines = "".join(
        f'<tr><th scope="row">{label}</th>{"".join(f"<td>{_fact(v)}</td>" for v in values)}</tr>'
        for label, values in metadata
    )
    return scrolling("What differs", f"{variant_heads(results)}<tbody>{lines}</tbody>", "ran")


def _fact(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else escape(str(value)) or UNKNOWN


def _scenarios(results: Sequence[Result]) -> str:
    return "".join(
        f"<details><summary>{swatch(i)}Scenario of {escape(r.name)}</summary>"
        f'<pre tabindex="0">{escape(r.scenario_text)}</pre></details>'
        for i, r in enumerate(results)
        if r.scenario_text
    )


LATENCY_NOTE = (
    "Share of requests (for TBT, of tokens) that were at least this fast, in the first seed's run; "
    "the slow tail is the share that was slower, on a logarithmic scale."
)
TIME_NOTE = "Means over steps, in the first seed's run."
HIGHLIGHT_NOTE = "Highlighted: better than every other variant by 0.5 % or more, beyond the intervals."
TAIL_BUTTON = '<button id="tail" type="button" aria-pressed="false" hidden>Show the slow tail</button>'

MIN_COUNT = 3
"""So many workloads or SLOs are spelt out in the header."""

MINUS = "\N{MINUS SIGN}"

NOTES = """<dl class="notes">
<dt>TTFT</dt><dd>arrival until first token</dd>
<dt>TPOT</dt><dd>time from first to last token over output tokens less one, a request each</dd>
<dt>TBT</dt><dd>time between two tokens (also ITL), tokens of all requests pooled, warm-up included</dd>
<dt>JCT</dt><dd>arrival until last token (also end-to-end latency);
<em>latency/token</em> is JCT over output tokens</dd>
<dt>Queueing</dt><dd>arrival until first put into a step</dd>
<dt>MFU, MBU</dt><dd>FLOPs that the model needs, and bytes of weights and KV cache that steps must read,
over the hardware's peak, idle time included</dd>
<dt>Cost</dt><dd>price of all GPUs over the delivered tokens of that kind; each kind carries all of it</dd>
<dt>± and brackets</dt><dd>± says how far the number moves with the requests that happen to come; brackets, how
far with the cost model, were its parts off by as much as they were where they were measured</dd>
<dt>Energy</dt><dd>estimated from MFU and MBU between the GPUs' idle and full power;
hosts and cooling left out</dd>
</dl>"""


def page(
    results: Sequence[Result], *, sections: dict[str, list[str]], styles: str, scripts: Sequence[str], data: str
) -> str:
    """The whole document; ``sections`` names the figures of each, ``data`` is their JSON."""
    heading = title(results)
    body = [
        header(heading, _metadata(results, heading)),
        section("At a glance", _notices(results) + cards(results), _intervals(results)),
        _decisions(results),
        _figures("Latency", LATENCY_NOTE, results, sections["latency"], TAIL_BUTTON),
        _figures("Over time", TIME_NOTE, results, sections["time"]),
        _time_shares_legend(sections["shares"]),
        section("All numbers", _table(results), HIGHLIGHT_NOTE),
        _comparison(results),
        section("What ran", what_ran(results)),
        section("How to read it", NOTES),
    ]
    return document(heading, "".join(body), styles=styles, scripts=scripts, data=data)


def _metadata(results: Sequence[Result], heading: str) -> list[str]:
    """What was asked, fact by fact: hardware, workload, promises, and how often it was run."""
    seeds = len(results[0].summary.seeds)
    arrivals = sorted(r.summary.counts.arrivals // len(r.summary.seeds) for r in results)
    few, many = f"{arrivals[0]:,}", f"{arrivals[-1]:,}"
    metadata = [
        hardware(results),
        _matching([workload(r) for r in results], "workloads"),
        _matching([promises(r) for r in results], "SLOs"),
        f"{len(results)} variants" if len(results) > 1 else results[0].name,
        f"{seeds} seeds each" if seeds > 1 else "one run each" if len(results) > 1 else "one run",
        f"{many} requests a run" if few == many else f"{few} to {many} requests a run",
    ]
    return [fact for fact in metadata if fact and fact != heading]


def _matching(texts: Sequence[str], what: str) -> str:
    """The different texts of the variants, or how many there are where they are many."""
    different = list(dict.fromkeys(text for text in texts if text))
    return " / ".join(different) if len(different) <= MIN_COUNT else f"{len(different)} {what}"


def _intervals(results: Sequence[Result]) -> str:
    """What the intervals mean; the shade behind a bar is the cost model's."""
    model = model_note(results)
    return f"{intervals_note(results)}. {f'{model}; shaded on the bars.' if model else ''}".strip()


def _notices(results: Sequence[Result]) -> str:
    """What limits the trust in the numbers, before them."""
    items = "".join(
        f"<li>{f'<b>{escape(who)}:</b> ' if who else ''}{escape(note)}</li>" for who, note in notes_of(results)
    )
    return f'<ul class="notice">{items}</ul>' if items else ""


def _decisions(results: Sequence[Result]) -> str:
    items = []
    for i, result in enumerate(results):
        binds = binding_of(result)
        warning = f'<p class="unserved">{escape(binds.warning)}</p>' if binds.warning else ""
        items.append(
            f"<li><h3>{swatch(i)}<span>{escape(result.name)}</span></h3>"
            f"{warning}"
            f'<p class="binds">{bound_by(binds).capitalize()} <b>{escape(binds.resource)}</b></p>'
            f"<p>{escape(binds.description)}</p>"
            f'<p class="muted">{counts_note(result.summary.counts)}.</p></li>'
        )
    return f'<section><h2>What binds</h2><ul class="verdicts">{"".join(items)}</ul></section>\n'


def _legend(results: Sequence[Result]) -> str:
    if len(results) == 1:
        return ""
    items = "".join(f"<li>{swatch(i)}{escape(r.name)}</li>" for i, r in enumerate(results))
    return f'<ul class="legend">{items}</ul>'


def _figures(title: str, note: str, results: Sequence[Result], ids: Sequence[str], more: str = "") -> str:
    if not ids:
        return ""
    boxes = "".join(f'<figure><div class="plot" id="{figure_id}"></div></figure>' for figure_id in ids)
    return section(title, f'{_legend(results)}{more}<div class="grid">{boxes}</div>', note)


def _time_shares_legend(ids: Sequence[str]) -> str:
    if not ids:
        return ""
    items = "".join(
        f'<li data-part="{p}"><i class="swatch" style="--c:var(--part-{p})"></i>{t}</li>' for p, t in PARTS.items()
    )
    body = f'<ul class="legend">{items}</ul><figure><div class="plot" id="{ids[0]}"></div></figure>'
    return section("Where the time went", body, "Shares of the time of all GPUs (pipeline stages), idle time included.")


def _table(results: Sequence[Result]) -> str:
    lines, group = [], ""
    for row in rows(results):
        if row.metric.group != group:
            group = row.metric.group
            lines.append(f'<tr class="group"><th scope="rowgroup">{group}</th>{"<td></td>" * len(results)}</tr>')
        lines.append(_table_row(row))
    return scrolling("All numbers", f"{variant_heads(results)}<tbody>{''.join(lines)}</tbody>")


def _comparison(results: Sequence[Result]) -> str:
    """Paired differences from the first variant, where the same seeds allow them."""
    if not paired(results):
        return ""
    first, *others = results
    gaps = [difference(r.summaries, first.summaries, relative=True) for r in others]
    lines = []
    for metric in METRICS:
        cells = [_gap_cell(metric.read(gap), metric.better) for gap in gaps]
        if metric.headline and metric.better != NEITHER and any(cells):
            lines.append(f'<tr><th scope="row">{escape(metric.label)}</th>{"".join(cells)}</tr>')
    note = (
        "Differences in percent, pair by pair: the same requests came to both. Coloured where the interval "
        "leaves no doubt which one is better."
    )
    body = scrolling("Differences", f"{variant_heads(results, skip=1)}<tbody>{''.join(lines)}</tbody>")
    return section(f"Compared with {escape(first.name)}", body, note)


def _gap_cell(gap: Estimate | None, better: int) -> str:
    if gap is None or not math.isfinite(gap.value):
        return f"<td>{UNKNOWN}</td>" if gap is not None else ""
    decimals = 1 if gap.half_width < 0.1 else 0
    sure = abs(gap.value) > max(gap.half_width, MIN_SHARE)
    decision = ("better" if gap.value * better > 0 else "worse") if sure else ""
    text = f"{100 * gap.value:+z,.{decimals}f}".replace("-", MINUS)
    half = f"{100 * gap.half_width:,.{decimals}f}"
    return f'<td class="{decision}">{text} % <span class="half">± {half}</span></td>'


def _table_row(row: Row) -> str:
    cells = "".join(f"<td{' class=leads' if cell.leads else ''}>{cell.text}{interval(cell)}</td>" for cell in row.cells)
    unit = f'<span class="unit">{row.unit}</span>'
    return f'<tr><th scope="row">{escape(row.metric.label)} {unit}</th>{cells}</tr>'


def write_html(path: Path | str, results: list[Result]) -> None:
    """A self-contained page of all variants: numbers, latencies, what happened over time, what binds.

    Nothing is fetched when it is opened (a content security policy sees to that), and the same
    results give the same bytes.

    Raises:
        InputError: There is no result, or two share a name.
        MissingExtraError: plotly is not installed.
        OutputError: The file cannot be written.
    """
    check_results(results)
    plotly = plotly_js()
    drawn = figures(results)
    data = json.dumps([f for section in drawn.values() for f in section], separators=(",", ":"), allow_nan=False)
    text = page(
        results,
        sections={name: [f["id"] for f in section] for name, section in drawn.items()},
        styles=asset("page.css"),
        scripts=[plotly, asset("look.js"), asset("page.js")],
        data=data,
    )
    write_whole(path, text.encode())
