"""The page's HTML, section by section. Everything that files named is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from lengthwise.cost.profiles import OperatorView, ProfileView
from lengthwise.report._document import header, section
from lengthwise.report._marks import scrolling, swatch
from lengthwise.report._numbers import percent
from lengthwise.report.profile._words import axes_text, shard_text, share_text, time_text

OPERATORS_NOTE = (
    "More than 100 % of the roofline is what a cache gives to data that the data sheet has in memory."
)
TOKENS_NOTE = "Seconds of one layer (of a step for embedding, head and sampler) over the tokens of a step."
ATTENTION_NOTE = (
    "A line for each of a few contexts or batches; of kernels of no model, the shape measured most."
)
KERNELS_NOTE = "A line for each of a few shapes or groups of GPUs."
ROOFLINE_NOTE = (
    "What a row multiplies over the bytes it must move, and how fast it does so. The lines are the data sheet's "
    "bandwidth and peak; above them, data came from a cache."
)
MAPS_NOTE = "Points are measured; where it is shaded a step of the model can lie and nothing is near."
GAPS_NOTE = "Where a step of up to 8,192 tokens or 256 sequences can lie and no point is near: there one extrapolates."
NOTES = """<dl class="notes">
<dt>Time</dt><dd>of one call on one GPU, the median of its repeats</dd>
<dt>Spread</dt><dd>the distance between the quartiles of the repeats over their median; the operator's median</dd>
<dt>Of the roofline</dt><dd>the data sheet's least time over the measured one: the median row and the best row</dd>
<dt>Kernel</dt><dd>a kernel of no model, which its shape describes; TP n: an operator of a model cut over n
GPUs</dd></dl>"""

_HEADS = ("", "", "sizes", "points", "time", "spread", "of the roofline", "best")


def body(heading: str, view: ProfileView, drawn: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """Everything below the document's head."""
    parts = [
        header(heading, _facts(view)),
        section("Operators", _table(view), OPERATORS_NOTE),
        _figures("Seconds over tokens", drawn["tokens"], TOKENS_NOTE),
        _figures("Attention", drawn["attention"], ATTENTION_NOTE),
        _figures("Kernels", drawn["kernels"], KERNELS_NOTE),
        _figures("Roofline", drawn["roofline"], ROOFLINE_NOTE),
        _figures("Where attention was measured", drawn["maps"], MAPS_NOTE),
        section("Gaps", _gaps(view.operators), GAPS_NOTE) if any(o.gaps for o in view.operators) else "",
        section("Notes", _notes(view)) if view.profile.facts.notes else "",
        section("How to read it", NOTES),
    ]
    return "".join(parts)


def _facts(view: ProfileView) -> list[str]:
    facts = view.profile.facts
    told = [facts.gpu, facts.model or "kernels of no model", facts.engine, f"from {facts.source}"]
    told += [f"measured {facts.measured}"] if facts.measured else []
    told += [f"licence {facts.licence}"] if facts.licence else []
    told += [f"{key.replace('_', ' ')}: {value}" for key, value in facts.machine.items() if _short(value)]
    return [*filter(None, told), f"{len(view.profile):,} points"]


def _short(value: Any) -> bool:
    return isinstance(value, str | int | float) and 0 < len(str(value)) <= 40


def _table(view: ProfileView) -> str:
    heads = "".join(f'<th scope="col">{text}</th>' if text else "<td></td>" for text in _HEADS)
    lines = "".join(_line(one) for one in view.operators)
    return scrolling("Operators", f"<thead><tr>{heads}</tr></thead><tbody>{lines}</tbody>", "operators")


def _line(one: OperatorView) -> str:
    shard = shard_text(one) + (f" <span class=half>{escape(one.dtype)}</span>" if one.dtype else "")
    low, high = one.seconds
    cells = [
        f'<span class="sizes">{escape(axes_text(one))}</span>',
        f"{len(one.rows):,}",
        f"{time_text(low)} to {time_text(high)}",
        percent(one.spread),
        share_text(one.median.roofline if one.median else None),
        share_text(one.best.roofline if one.best else None),
    ]
    return (
        f'<tr><th scope="row">{escape(one.operator)}</th><td>{shard}</td>'
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + "</tr>"
    )


def _figures(title: str, drawn: Sequence[dict[str, Any]], note: str) -> str:
    if not drawn:
        return ""
    return section(title, f'<div class="grid">{"".join(_figure(one) for one in drawn)}</div>', note)


def _figure(one: dict[str, Any]) -> str:
    items = "".join(
        f"<li>{swatch(i)}{escape(curve['name'])}</li>" for i, curve in enumerate(one.get("curves", ()))
    )
    legend = f'<ul class="legend">{items}</ul>' if items else ""
    said = f'<p class="hint">{escape(one["said"])}</p>' if one.get("said") else ""
    return f'<figure><div class="plot" id="{escape(one["id"])}"></div>{said}{legend}</figure>'


def _gaps(operators: Sequence[OperatorView]) -> str:
    """Gaps that several operators and shards share stand once."""
    by_gap: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for one in operators:
        if one.gaps:
            here = by_gap.setdefault(tuple(map(str, one.gaps)), {})
            here.setdefault(one.operator, []).append(shard_text(one))
    lines = "".join(_gap_line(texts, who) for texts, who in by_gap.items())
    heads = '<thead><tr><th scope="col">nothing measured at</th><th scope="col">operators</th></tr></thead>'
    return scrolling("Gaps", f"{heads}<tbody>{lines}</tbody>", "gaps")


def _gap_line(texts: Sequence[str], who: Mapping[str, Sequence[str]]) -> str:
    where = "<br>".join(map(escape, texts))
    names = "; ".join(f"{name} ({', '.join(shards)})" for name, shards in who.items())
    return f'<tr><td>{where}</td><td class="who">{escape(names)}</td></tr>'


def _notes(view: ProfileView) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in view.profile.facts.notes)
    return f'<ul class="said">{items}</ul>'
