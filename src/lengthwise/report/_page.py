"""The page's HTML, section by section. Everything that users named is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from lengthwise.metrics import Estimate, difference
from lengthwise.report._asked import hardware, promises, title, workload
from lengthwise.report._cards import cards
from lengthwise.report._document import document, header, section
from lengthwise.report._figures import PARTS
from lengthwise.report._marks import interval, scrolling, swatch, variant_heads
from lengthwise.report._metrics import METRICS, NEITHER
from lengthwise.report._numbers import UNKNOWN
from lengthwise.report._ran import what_ran
from lengthwise.report._rows import WORTH_SHARE, Row, paired, rows
from lengthwise.report.binding import binding_of, bound_by
from lengthwise.report.result import Result
from lengthwise.report.table import counts_note, intervals_note, model_note, notes_of

LATENCY_NOTE = (
    "Share of requests (for TBT, of tokens) that were at least this fast, in the first seed's run; "
    "the slow tail is the share that was slower, on a logarithmic scale."
)
TIME_NOTE = "Means over steps, in the first seed's run."
HIGHLIGHT_NOTE = "Highlighted: better than every other variant by 0.5 % or more, beyond the intervals."
TAIL_BUTTON = '<button id="tail" type="button" aria-pressed="false" hidden>Show the slow tail</button>'

FEW = 3
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
    results: Sequence[Result],
    *,
    sections: dict[str, list[str]],
    styles: str,
    scripts: Sequence[str],
    data: str,
) -> str:
    """The whole document; ``sections`` names the figures of each, ``data`` is their JSON."""
    heading = title(results)
    body = [
        header(heading, _facts(results, heading)),
        section("At a glance", _notices(results) + cards(results), _intervals(results)),
        _verdicts(results),
        _figures("Latency", LATENCY_NOTE, results, sections["latency"], TAIL_BUTTON),
        _figures("Over time", TIME_NOTE, results, sections["time"]),
        _shares(sections["shares"]),
        section("All numbers", _table(results), HIGHLIGHT_NOTE),
        _compared(results),
        section("What ran", what_ran(results)),
        section("How to read it", NOTES),
    ]
    return document(heading, "".join(body), styles=styles, scripts=scripts, data=data)


def _facts(results: Sequence[Result], heading: str) -> list[str]:
    """What was asked, fact by fact: hardware, workload, promises, and how often it was run."""
    seeds = len(results[0].summary.seeds)
    arrived = sorted(r.summary.counts.arrived // len(r.summary.seeds) for r in results)
    few, many = f"{arrived[0]:,}", f"{arrived[-1]:,}"
    facts = [
        hardware(results),
        _alike([workload(r) for r in results], "workloads"),
        _alike([promises(r) for r in results], "SLOs"),
        f"{len(results)} variants" if len(results) > 1 else results[0].name,
        f"{seeds} seeds each" if seeds > 1 else "one run each" if len(results) > 1 else "one run",
        f"{many} requests a run" if few == many else f"{few} to {many} requests a run",
    ]
    return [fact for fact in facts if fact and fact != heading]


def _alike(texts: Sequence[str], what: str) -> str:
    """The different texts of the variants, or how many there are where they are many."""
    different = list(dict.fromkeys(text for text in texts if text))
    return " / ".join(different) if len(different) <= FEW else f"{len(different)} {what}"


def _intervals(results: Sequence[Result]) -> str:
    """What the intervals mean; the shade behind a bar is the cost model's."""
    model = model_note(results)
    return f"{intervals_note(results)}. {f'{model}; shaded on the bars.' if model else ''}".strip()


def _notices(results: Sequence[Result]) -> str:
    """What limits the trust in the numbers, before them."""
    items = "".join(
        f"<li>{f'<b>{escape(who)}:</b> ' if who else ''}{escape(note)}</li>"
        for who, note in notes_of(results)
    )
    return f'<ul class="notice">{items}</ul>' if items else ""


def _verdicts(results: Sequence[Result]) -> str:
    items = []
    for i, result in enumerate(results):
        binds = binding_of(result)
        warning = f'<p class="unserved">{escape(binds.warning)}</p>' if binds.warning else ""
        items.append(
            f"<li><h3>{swatch(i)}<span>{escape(result.name)}</span></h3>"
            f"{warning}"
            f'<p class="binds">{bound_by(binds).capitalize()} <b>{escape(binds.resource)}</b></p>'
            f"<p>{escape(binds.sentence)}</p>"
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


def _shares(ids: Sequence[str]) -> str:
    if not ids:
        return ""
    items = "".join(
        f'<li data-part="{p}"><i class="swatch" style="--c:var(--part-{p})"></i>{t}</li>'
        for p, t in PARTS.items()
    )
    body = f'<ul class="legend">{items}</ul><figure><div class="plot" id="{ids[0]}"></div></figure>'
    return section(
        "Where the time went", body, "Shares of the time of all GPUs (pipeline stages), idle time included."
    )


def _table(results: Sequence[Result]) -> str:
    lines, group = [], ""
    for row in rows(results):
        if row.metric.group != group:
            group = row.metric.group
            lines.append(
                f'<tr class="group"><th scope="rowgroup">{group}</th>{"<td></td>" * len(results)}</tr>'
            )
        lines.append(_line(row))
    return scrolling("All numbers", f"{variant_heads(results)}<tbody>{''.join(lines)}</tbody>")


def _compared(results: Sequence[Result]) -> str:
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
    sure = abs(gap.value) > max(gap.half_width, WORTH_SHARE)
    verdict = ("better" if gap.value * better > 0 else "worse") if sure else ""
    text = f"{100 * gap.value:+z,.{decimals}f}".replace("-", MINUS)
    half = f"{100 * gap.half_width:,.{decimals}f}"
    return f'<td class="{verdict}">{text} % <span class="half">± {half}</span></td>'


def _line(row: Row) -> str:
    cells = "".join(
        f"<td{' class=leads' if cell.leads else ''}>{cell.text}{interval(cell)}</td>" for cell in row.cells
    )
    unit = f'<span class="unit">{row.unit}</span>'
    return f'<tr><th scope="row">{escape(row.metric.label)} {unit}</th>{cells}</tr>'
