"""The HTML page of simulated or measured variants side by side."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.metrics import difference
from lengthwise.report import summary_table
from lengthwise.report.binding import bottleneck_of, bound_by
from lengthwise.report.curves import Figure, json_numbers, levels, needs_log_axis, over_time, quantile_curve
from lengthwise.report.formatting import MINUS, PLUS_MINUS, UNKNOWN, capitalized
from lengthwise.report.html_page import TableCell, write_page
from lengthwise.report.json_file import deployment_facts
from lengthwise.report.result import (
    Result,
    check_results,
    hardware,
    scenario_of,
    sessions,
    shows_prefix_cache,
    slo_text,
    title,
    workload,
)  # fmt: skip
from lengthwise.report.summary_table import METRICS, MIN_SHARE, Row
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.metric_names import LATENCIES, NEITHER

CARDS = {
    "ttft_s.p99": "TTFT, 99th percentile",
    "tbt_s.p99": "Time between tokens, 99th percentile",
    "jct_s.p50": "JCT, median",
    "rates.goodput": "Goodput",
    "rates.output": "Output tokens",
    "cost.output": "Cost per million output tokens",
}
PANELS = {
    "batch": ("Batch size", "sequences per step", ""),
    "waiting": ("Queue", "requests waiting", ""),
    "kv": ("KV cache", "share of blocks in use", ".0%"),
    "cached": ("Prefix cache", "share of prompt tokens cached", ".0%"),
    "output": ("Output", "tokens/s", ""),
}
EXCHANGE = " and exchange of tokens (dp)"
PARTS = {  # parts of the time, in the order of the bars
    "linear": "Linear layers",
    "prefill_attention": "Prefill attention",
    "decode_attention": "Decode attention",
    "head": "Head and sampling",
    "embedding": "Embedding",
    "communication": "Communication",
    "send": "Between stages",
    "swap": "KV swap",
    "host": "Host",
    "drafter": "Drafter",
    "idle": "Idle",
}
METADATA = {  # labels of what ran
    "model": "Model",
    "gpu": "GPU",
    "gpus": "GPUs",
    "tp": "Tensor parallel",
    "pp": "Pipeline stages",
    "dp": "Data parallel",
    "ep": "Expert parallel",
    "replicas": "Replicas",
    "rank": "Rank",
    "victim": "Victim policy",
    "batching": "Batching",
    "memory": "Memory",
    "max_recompute_share": "Recomputation per idle memory",
    "max_preemptions_per_request": "Preemptions per request, at most",
    "preemption_mode": "Preemption by",
    "router": "Router",
    "preemption": "Preemption policy",
    "binning": "Bins",
    "max_wait_s": "Longest wait, s",
    "batch_wait_s": "Longest wait in a bin, s",
    **{name: name for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len")},
    "kv_blocks": "KV blocks",
    "block_size_tokens": "Block size",
    "price_per_hour_usd": "$ per hour",
    "cost_source": "Cost model",
}
SHOWN_LATENCIES = ("ttft", "tbt", "tpot", "jct")
LISTED = 3  # different workloads or SLOs that the header spells out
TOTAL_POINTS = 2400
"""Points of a figure over all variants: curves of many variants get fewer points each, which bounds the page's size."""


def write_html(path: Path | str, results: list[Result]) -> None:
    """Write a self-contained HTML page with all variants side by side.

    Raises:
        InputError: There is no result, or two variants have the same name.
        MissingExtraError: jinja2 is not installed.
        OutputError: The file cannot be written.
    """
    check_results(results)
    drawn = figures(results)
    shared, differing = _what_ran(results)
    intervals, model = f"{capitalized(summary_table.intervals_note(results))}.", summary_table.model_note(results)
    verdicts = []
    for r in results:
        bottleneck, counts = bottleneck_of(r), summary_table.counts_note(r.summary.counts)
        by = bound_by(bottleneck).capitalize()
        verdicts.append({"name": r.name, "binding": bottleneck, "by": by, "counts": counts})
    write_page(
        path,
        "result",
        data={"names": [r.name for r in results], "figures": [f for group in drawn.values() for f in group]},
        heading=title(results),
        metadata=_header(results),
        results=results,
        notes=summary_table.notes_of(results),
        intervals=f"{intervals} {model}; shaded on the bars." if model else intervals,
        cards=_cards(results),
        verdicts=verdicts,
        ids={name: [figure["id"] for figure in group] for name, group in drawn.items()},
        parts=[(part["part"], part["label"]) for figure in drawn["shares"] for part in figure["parts"]],
        rows=summary_table.rows(results),
        turns=_turns(results),
        differences=_differences(results),
        shared=shared,
        differing=differing,
    )


def _header(results: Sequence[Result]) -> list[str]:
    def distinct(texts: Iterable[str], noun: str) -> str:
        different = list(dict.fromkeys(filter(None, texts)))
        return " / ".join(different) if len(different) <= LISTED else f"{len(different)} {noun}"

    seeds = len(results[0].summary.seeds)
    arrivals = sorted(r.summary.counts.arrivals // len(r.summary.seeds) for r in results)
    few, many = f"{arrivals[0]:,}", f"{arrivals[-1]:,}"
    texts = [
        hardware(results),
        distinct(map(workload, results), "workloads"),
        distinct(map(sessions, results), "kinds of sessions"),
        distinct(map(slo_text, results), "SLOs"),
        f"{len(results)} variants" if len(results) > 1 else results[0].name,
        f"{seeds} seeds each" if seeds > 1 else "one run each" if len(results) > 1 else "one run",
        f"{many} requests per run" if few == many else f"{few} to {many} requests per run",
    ]
    return [text for text in texts if text and text != title(results)]


def _cards(results: Sequence[Result]) -> list[dict[str, Any]]:
    shown = {row.metric.key: row for row in summary_table.rows(results)}
    titles = dict(CARDS)
    if "rates.goodput" not in shown:
        titles = {("rates.requests" if k == "rates.goodput" else k): v for k, v in CARDS.items()}
        titles["rates.requests"] = "Requests"
    return [
        {
            "title": label,
            "unit": {"/s": "per second"}.get(shown[key].unit, shown[key].unit),
            "hint": {1: "higher is better", -1: "lower is better", 0: ""}[shown[key].metric.better],
            "bars": _bars(shown[key], results),
        }
        for key, label in titles.items()
        if key in shown
    ]


def _turns(results: Sequence[Result]) -> list[list[str | TableCell]]:
    """Return a row for each turn of a session: its name, and TTFT and hit rate of each variant."""
    texts = summary_table.turn_texts(results)
    return [
        [name, *(TableCell(ttft, "" if hit == UNKNOWN else f"{hit} % cached") for ttft, hit in row)]
        for (name, _, _), row in zip(summary_table.turn_rows(results), texts, strict=True)
    ]


def _bars(row: Row, results: Sequence[Result]) -> list[dict[str, Any]]:
    def percent_of_largest(value: float) -> float:
        return 100 * min(1.0, max(0.0, value / largest)) if largest > 0 and math.isfinite(value) else 0.0

    def extent(css: str, low: float, high: float) -> tuple[str, float, float]:
        return css, percent_of_largest(low), percent_of_largest(high) - percent_of_largest(low)

    estimates = [cell.estimate for cell in row.cells]
    ends = (end for e in estimates for end in (e.value, e.high, e.model_high))
    largest = max((end for end in ends if math.isfinite(end)), default=0.0)
    bars = []
    for result, cell in zip(results, row.cells, strict=True):
        e = cell.estimate
        spans = [extent("model-span", e.model_low, e.model_high)] if e.has_model_interval else []
        spans += [extent("whisker", e.low, e.high)] if e.has_interval else []
        bars.append({"name": result.name, "cell": cell, "width": percent_of_largest(e.value), "spans": spans})
    return bars


def _differences(results: Sequence[Result]) -> list[list[str | TableCell]]:
    """Return a row for each metric with differences from the first variant, paired by seed, or [] if seeds differ."""
    if not summary_table.paired(results):
        return []
    first, *others = results
    gaps = [difference(r.summaries, first.summaries, relative=True) for r in others]
    made: list[list[str | TableCell]] = []
    for metric in METRICS:
        estimates = [metric.read(gap) for gap in gaps]
        is_known = any(e is not None and math.isfinite(e.value) for e in estimates)
        if metric.headline and metric.better != NEITHER and is_known:
            made.append([metric.label, *(_difference(e, metric.better) for e in estimates if e is not None)])
    return made


def _difference(gap: Estimate, better: int) -> str | TableCell:
    if not math.isfinite(gap.value):
        return UNKNOWN
    decimals = 1 if gap.half_width < 0.1 else 0
    is_significant = abs(gap.value) > max(gap.half_width, MIN_SHARE)
    css = ("better" if gap.value * better > 0 else "worse") if is_significant else ""
    text = f"{100 * gap.value:+z,.{decimals}f}".replace("-", MINUS)
    return TableCell(f"{text} %", f"{PLUS_MINUS} {100 * gap.half_width:,.{decimals}f}", css=css)


def _what_ran(results: Sequence[Result]) -> tuple[list[tuple[str, str]], list[list[str]]]:
    properties = [{} if r.deployment is None else deployment_facts(r.deployment) for r in results]
    labels = {name: name for r in results for name in r.engine} | (METADATA if any(properties) else {})
    rows = {
        label: [_value_text((p or r.engine).get(key, UNKNOWN)) for p, r in zip(properties, results, strict=True)]
        for key, label in labels.items()
    }
    shared = [(label, values[0]) for label, values in rows.items() if len(set(values)) == 1]
    settings = [_settings(scenario_of(r)) for r in results]
    others = [key for key in dict.fromkeys(chain(*settings)) if key.rpartition(".")[2] not in METADATA]
    rows |= {key: [_value_text(one.get(key, UNKNOWN)) for one in settings] for key in others}
    return shared, [[label, *values] for label, values in rows.items() if len(set(values)) > 1]


def _settings(table: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return the values of a scenario by dotted key, such as "engine.kv_offloading.size_gb"."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= _settings(value, f"{section}{key}.")
        elif section:  # values at the top level are names and descriptions, no settings
            found[f"{section}{key}"] = value
    return found


def _value_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, int):
        return f"{value:,}"
    return "none" if value is None else str(value) or UNKNOWN


def figures(results: Sequence[Result]) -> dict[str, list[Figure]]:
    """Return the figures of each section of the page: "latency", "time" and "shares"."""
    points = max(40, min(300, TOTAL_POINTS // len(results)))
    at = levels(points)
    columns = [over_time(r, min(150, points)) for r in results]
    by_rank = summary_table.has_ranks(results)
    time_panels = [
        {
            "id": f"time-{key}",
            "kind": "time",
            "title": label,
            "unit": f"{unit} of a rank (dp)" if by_rank and key == "batch" else unit,
            "format": number_format,
            "curves": [
                {"variant": i, "x": json_numbers(c["time_s"]), "y": json_numbers(c[key])} for i, c in enumerate(columns)
            ],
        }
        for key, (label, unit, number_format) in PANELS.items()
        if any(np.isfinite(c[key]).any() for c in columns) and (key != "cached" or shows_prefix_cache(results))
    ]
    shares = {r.name: r.summary.hardware.time_shares for r in results if r.summary.hardware is not None}
    parts = [
        {
            "part": part,
            "label": label + EXCHANGE * (by_rank and part == "linear"),
            "x": json_numbers(s[part].value for s in shares.values()),
        }
        for part, label in PARTS.items()
        if any(s[part].value > 0 for s in shares.values())
    ]
    return {
        "latency": [f for name in SHOWN_LATENCIES if (f := _cdf(results, name, at))["curves"]],
        "time": time_panels,
        "shares": [{"id": "shares", "kind": "shares", "title": "", "names": list(shares), "parts": parts}]
        * bool(shares),
    }


def _cdf(results: Sequence[Result], name: str, at: np.ndarray) -> Figure:
    key = f"{name}_s"
    scale, unit = summary_table.latency_unit(key, results)
    curves = {i: curve for i, r in enumerate(results) if (curve := quantile_curve(r.records, name, at)) is not None}
    goodputs = (r.summary.goodput for r in results)
    limits = {g.slo.limits[key] for g in goodputs if g is not None and key in g.slo.limits}
    return {
        "id": f"cdf-{name}",
        "kind": "cdf",
        "title": LATENCIES[name].title,
        "unit": unit,
        "log": bool(curves) and needs_log_axis(np.concatenate(list(curves.values()))),
        "y": json_numbers(at),
        "curves": [{"variant": i, "x": json_numbers(curve * scale)} for i, curve in curves.items()],
        "limits": sorted(limit * scale for limit in limits),
    }
