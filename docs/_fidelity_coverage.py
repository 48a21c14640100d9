"""How often intervals hold the truth: each share with how many values it is of, and by pair of model and GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from _fidelity_overview import figure, number

Rows = Sequence[Mapping[str, Any]]


def coverage(rows: Rows) -> Iterator[str]:
    """Each row's figure, then a table of all pairs."""
    for row in rows:
        if row.get("value") is not None:
            yield f"- `{row['name']}`: {figure(row)}{_counted(row)}"
    yield ""
    metrics = {
        row["name"].rpartition(".")[2].removesuffix("_coverage").upper(): row["details"]["by_pair"]
        for row in rows
        if (row.get("details") or {}).get("by_pair")
    }
    if metrics:
        yield f"| held by intervals of | {' | '.join(metrics)} |"
        yield f"|---|{'---|' * len(metrics)}"
        for pair in dict.fromkeys(pair for by_pair in metrics.values() for pair in by_pair):
            yield f"| {pair} | {' | '.join(_share(by_pair.get(pair)) for by_pair in metrics.values())} |"
        yield ""


def held_within(row: Mapping[str, Any]) -> Iterator[str]:
    """How many of a circle's held-out medians lie within their intervals, which do not, and how wide these are."""
    details = row["details"]
    loads = ", ".join(f"{load} {_hits(of)}" for load, of in details["by_load"].items())
    yield (
        f"**{details['satisfied']} of {details['n']} held-out medians lie within the 95 % interval of a simulation with the "
        f"calibrated tables** ({figure(row)}; an exact interval of the share, as if metrics of a load were independent, which "
        f"they are not){_sides(details)}. By load: {loads}. Of single runs {_hits(details['single_runs'])} lie within"
        f"{_sides(details['single_runs'])}.{_seen(details)}\n"
    )
    yield _wide(details)
    yield (
        "They hold the model's own error and sampling (other requests of the same kind); the error of the "
        "tables is as a calibration tells it that has not seen the held-out runs. Without sampling "
        f"{_hits(details['model_alone'])} lie within; with the errors that the tables store, to which held-out runs of their "
        f"setting add, {_hits(details['errors_as_stored'])}; in the brackets that `simulate` prints (of the model alone, "
        f"{number(details['as_simulate_shows']['level'], 'share')}), {_hits(details['as_simulate_shows'])}.\n"
    )


def _seen(details: Mapping[str, Any]) -> str:
    """That the intervals are no blind test either, unless their code is known to be older than the runs."""
    if details.get("frozen") is True:
        return ""
    return " The form of these intervals was settled after these runs had been seen."


def _wide(details: Mapping[str, Any]) -> str:
    """How wide the intervals are, and what that costs beside ones that are as wide as they need be."""
    apart = ", ".join(f"{times:.2g}" for times in details["ends_apart"].values())
    told = f"**These intervals are wide**: by load their upper ends are {apart} times the lower ones (medians over metrics)"
    widths = details.get("widths")
    if not widths:
        return f"{told}.\n"
    told += (
        f"; that of {_name(widths['widest'])} reaches from {widths['widest_from']:.2g} to {widths['widest_to']:.3g} times what "
        "was measured. That all are held does not tell whether they are calibrated: wider ones hold more."
    )
    if widths["score_over_error"] is None:
        return f"{told}\n"
    return (
        f"{told} Their interval score (Gneiting and Raftery, 2007; in logs, the smaller the better) is "
        f"{widths['score_over_error']:.3g} times the mean error of the medians themselves; of intervals just as wide as "
        f"normal errors need it would be {widths['sharp_score_over_error']:.2g} times.\n"
    )


def _name(of: str) -> str:
    """A metric at a load, as the page calls it."""
    metric, _, load = of.partition(" of ")
    return f"{metric.replace('_', ' ').upper()} of {load}"


def _sides(of: Mapping[str, Any]) -> str:
    """On which side those missed that do not lie within; nothing where none did."""
    if of["below"] + of["above"] == 0:
        return ""
    return f"; {of['below']} were faster than all of it, {of['above']} slower"


def _hits(of: Mapping[str, Any]) -> str:
    return f"{of['satisfied']} of {of['n']}"


def _counted(row: Mapping[str, Any]) -> str:
    """How a calibration's parameters were counted: those not told apart, or as an older count did."""
    details = row.get("details") or {}
    if row["name"] != "calibrate_coverage":
        return ""
    if "missing" not in details:
        return " (an older count: seeds of one run among them, intervals widened to hold what was not moved)"
    untold = details["missing"]
    by_name = ", ".join(f"{name} {of['satisfied']} of {of['n']}" for name, of in details["by_parameter"].items())
    return f" ({by_name}; of what was not told, {untold['satisfied']} of {untold['n']}).{_widths(details)}"


def _widths(details: Mapping[str, Any]) -> str:
    """How wide the intervals of what was told are, beside how far off the values are."""
    each = "; ".join(
        f"{name} {of['times']:.3g}" + (f" ({number(of['off'], 'relative')} off)" if of.get("off") is not None else "")
        for name, of in (details.get("widths") or {}).items()
    )
    return f" Upper ends over lower ones, and how far off the values are, medians: {each}." if each else ""


def _share(of: Mapping[str, Any] | None) -> str:
    return "-" if of is None else f"{number(of['coverage'], 'share')} of {of['n']:,}"
