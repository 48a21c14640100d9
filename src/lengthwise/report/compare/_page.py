"""The page's HTML, section by section. Everything that users named is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lengthwise.metrics import STATS, Comparison, MetricError
from lengthwise.report._document import document, header, section
from lengthwise.report._marks import scrolling, swatch
from lengthwise.report.compare._words import (
    LONG,
    NAMES,
    client_text,
    counts_text,
    distance_cells,
    distance_heads,
    error_text,
    how_paired,
    interval_text,
    is_sure,
    scale_of,
    value_text,
)

STAT_HEADS = ("mean", *STATS)
CELL_NOTE = "Below each error its interval in percent, then A : B."
ERRORS_NOTE = "Relative error of A against B at each statistic; bars are its interval, where one is known."
CDF_NOTE = "Share of requests (for TBT, of tokens) that were at least this fast, one over the other."
TIME_NOTE = "Requests that arrived and had not ended, and arrivals, warm-up included."
DISTANCE_NOTE = (
    "Moved by: the mean distance of equal quantiles, over the mean of B (Wasserstein). Largest gap: between the "
    "curves below (Kolmogorov-Smirnov)."
)
PAIRED_NOTE = " APE: |A - B| / B of each request, one by one."
NOTES = """<dl class="notes">
<dt>A, B</dt><dd>B is taken for the truth; an error of +10 % says that A has 10 % more</dd>
<dt>Interval</dt><dd>how far the error moves with the requests that happened to come: blocks of consecutive requests
are drawn again and again. It does not say how far another run of the same engine would lie off</dd>
<dt>Colour</dt><dd>the interval does not hold 0: there is an error beyond chance</dd>
<dt>TTFT, TPOT, TBT, JCT</dt><dd>arrival until first token; time between tokens of one request, its mean; between any
two tokens; arrival until last token</dd>
</dl>"""


def page(
    comparison: Comparison,
    *,
    sections: dict[str, list[str]],
    styles: str,
    scripts: Sequence[str],
    data: str,
) -> str:
    """The whole document; ``sections`` names the figures of each, ``data`` is their JSON."""
    heading = f"{comparison.a.name} against {comparison.b.name}"
    note = DISTANCE_NOTE + (PAIRED_NOTE if comparison.paired else "")
    body = [
        header(heading, _facts(comparison)),
        _doubts(comparison),
        section("How far A is off B", _errors(comparison), f"{how_paired(comparison)}. {CELL_NOTE}"),
        section("Error by quantile", _plots(sections["errors"]), ERRORS_NOTE),
        section("Distributions", _legend(comparison) + _plots(sections["cdf"]), CDF_NOTE),
        section("How far apart", _distances(comparison), note),
        section("Over time", _legend(comparison) + _plots(sections["time"]), TIME_NOTE),
        section("What was compared", _sides(comparison)),
        section("How to read it", NOTES),
    ]
    return document(heading, "".join(body), styles=styles, scripts=scripts, data=data)


def _facts(comparison: Comparison) -> list[str]:
    facts = [
        f"A: {comparison.a.source}",
        f"B: {comparison.b.source}, taken for the truth",
        "same requests" if comparison.paired else "different requests",
        f"{comparison.a.counts.arrived:,} and {comparison.b.counts.arrived:,} requests",
    ]
    if comparison.warmup_s:
        facts.append(f"the first {comparison.warmup_s:g} s left out")
    return facts


def _doubts(comparison: Comparison) -> str:
    if not comparison.doubts:
        return ""
    items = "".join(f"<li>{escape(doubt)}</li>" for doubt in comparison.doubts)
    return section("Doubts", f'<ul class="notice">{items}</ul>')


def _errors(comparison: Comparison) -> str:
    latencies = [metric for metric in LONG if any(e.metric == metric for e in comparison.errors)]
    heads = "".join(f'<th scope="col">{stat}</th>' for stat in STAT_HEADS)
    lines = [_line(comparison, metric) for metric in latencies]
    whole = f"<thead><tr><td></td>{heads}</tr></thead><tbody>{''.join(lines)}</tbody>"
    rates = [e for e in comparison.errors if not e.stat]
    rows = "".join(f'<tr><th scope="row">{NAMES[e.metric]}</th>{_cell(comparison, e)}</tr>' for e in rates)
    return scrolling("Errors of latencies", whole, "errors") + scrolling(
        "Errors of rates", f"<tbody>{rows}</tbody>", "errors"
    )


def _line(comparison: Comparison, metric: str) -> str:
    cells = "".join(_cell(comparison, comparison[f"{metric}.{stat}"]) for stat in STAT_HEADS)
    unit = f'<span class="unit">{scale_of(comparison, metric)[1]}</span>'
    return f'<tr><th scope="row">{NAMES[metric]} {unit}</th>{cells}</tr>'


def _cell(comparison: Comparison, one: MetricError) -> str:
    scale, _ = scale_of(comparison, one.metric)
    sure = ' class="worse"' if is_sure(one) else ""
    between = f'<span class="half">{interval_text(one)}</span>' if one.has_interval else ""
    values = f"{value_text(one.a * scale)} : {value_text(one.b * scale)}"
    return f'<td{sure}><b>{error_text(one)}</b>{between}<span class="both">{values}</span></td>'


def _distances(comparison: Comparison) -> str:
    rows = ""
    for one in comparison.distances:
        told = "".join(f"<td>{cell}</td>" for cell in distance_cells(comparison, one))
        rows += f'<tr><th scope="row">{NAMES[one.metric]}</th>{told}</tr>'
    shown = "".join(f'<th scope="col">{head}</th>' for head in distance_heads(comparison))
    return scrolling("Distances", f"<thead><tr><td></td>{shown}</tr></thead><tbody>{rows}</tbody>")


def _plots(ids: Sequence[str]) -> str:
    boxes = "".join(f'<figure><div class="plot" id="{figure_id}"></div></figure>' for figure_id in ids)
    return f'<div class="grid">{boxes}</div>'


def _legend(comparison: Comparison) -> str:
    names = ((0, f"A: {comparison.a.name}"), (1, f"B: {comparison.b.name}"))
    return f'<ul class="legend">{"".join(f"<li>{swatch(i)}{escape(name)}</li>" for i, name in names)}</ul>'


def _sides(comparison: Comparison) -> str:
    items = []
    for i, (letter, run) in enumerate((("A", comparison.a), ("B", comparison.b))):
        told = client_text(run)
        own = f" {told[0].upper()}{told[1:]}." if told else ""
        items.append(
            f"<li><h3>{swatch(i)}<span>{letter}: {escape(run.name)}</span></h3>"
            f"<p>{escape(run.source)}</p>"
            f'<p class="muted">{counts_text(run.counts)}, over {run.span_s:,.1f} s.{own}</p></li>'
        )
    return f'<ul class="verdicts">{"".join(items)}</ul>'
