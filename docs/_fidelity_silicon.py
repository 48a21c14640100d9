"""What headlines of measured deployments are not of: all points that can be predicted, and those that get no figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from _fidelity_overview import NONE, number

Rows = Sequence[Mapping[str, Any]]
MADE = "fidelity.silicon."
UNSEEN = f"{MADE}roofline_unseen."
PARTS = (("TTFT", "ttft"), ("TPOT", "tpot"))
WAYS = (("the roofline, fitted on other models and GPUs", "roofline_unseen"), ("`deploy` and `simulate`", "shipped"))
"""What predicted points of both kinds; tables are there for points of recorded clients alone."""


def all_points(rows: Rows) -> Iterator[str]:
    """Lines of the first table: the same ways over all aggregated points, where these are more than the headline's."""
    for way, name in WAYS:
        told = {column: _details(rows, f"{MADE}{name}.{part}").get("all_agg_points") for column, part in PARTS}
        counted = next((of["points"] for of in told.values() if of), 0)
        if counted > _details(rows, f"{MADE}{name}.ttft").get("points", counted):
            cells = [NONE if of is None else f"median {_report(of)}" for of in told.values()]
            where = (
                f"all {counted:,} aggregated points of that sample (AIConfigurator's), sweeps of unknown clients too"
            )
            yield f"| **lengthwise** | the same: {way} | {where} | {' | '.join(cells)} | {NONE} |"


def beside(row: Mapping[str, Any]) -> str:
    """Behind a verdict: the median over all aggregated points and whether it meets the aim; nothing of other figures."""
    details = row.get("details") or {}
    every = details.get("all_agg_points") or {}
    if not row["name"].startswith(MADE) or every.get("points", 0) <= details.get("points", 0):
        return ""
    met = "within the aim" if every["p50"] <= row["target"] else "missed"
    return f"; over all {every['points']:,} aggregated points {number(every['p50'], 'relative')}: {met}"


def limits(rows: Rows) -> Iterator[str]:
    """One line of where it stands: of how many points the headlines are, what all are off by, what has no figure."""
    both = {column: _details(rows, f"{UNSEEN}{part}") for column, part in PARTS}
    first = both["TTFT"]
    if not all(of.get("all_agg_points") and of.get("sweeps", {}).get("points") for of in both.values()):
        return
    left = first.get("left_out") or {}
    whole = first["all_agg_points"]["points"] + sum(left.values())
    every, sweeps = (
        ", ".join(f"{column} {_report(of[key])}" for column, of in both.items()) for key in ("all_agg_points", "sweeps")
    )
    most = max(left.items(), key=lambda one: one[1], default=None)
    none = f", {most[1]:,} of them for {most[0]}" if most else ""
    yield (
        f"- **Of {whole:,} deployments that others measured on GPUs**, headlines are of the {first['points']:,} whose client is "
        f"recorded. Over all {first['all_agg_points']['points']:,} aggregated points medians are {every}; over the "
        f"{first['sweeps']['points']:,} sweeps of unknown clients alone {sweeps}. {sum(left.values()):,} get no figure{none}."
    )


def left_out(rows: Rows) -> Iterator[str]:
    """A table of the points that get no figure, by reason, and what is known of some of them."""
    details = _details(rows, f"{UNSEEN}ttft")
    left = {why: n for why, n in (details.get("left_out") or {}).items() if n}
    if not left:
        return
    whole = sum(left.values()) + (details.get("all_agg_points") or details)["points"]
    yield f"Of {whole:,} points of the sample {sum(left.values()):,} get no figure, each for the first reason that holds:\n"
    yield "| why | points |"
    yield "|---|---|"
    yield from (f"| {why} | {n:,} |" for why, n in sorted(left.items(), key=lambda one: -one[1]))
    yield ""
    workers = _details(rows, f"{UNSEEN}tpot").get("decode_workers") or {}
    if workers.get("points"):
        yield (
            f"Where prefill and decode have workers of their own, TPOT alone was tried, of {workers['points']} decode workers "
            f"of at most a node: median {_report(workers)}.\n"
        )


def _details(rows: Rows, name: str) -> Mapping[str, Any]:
    row = next((row for row in rows if row["name"] == f"{name}_median_ape"), {})
    return row.get("details") or {}


def _report(of: Mapping[str, Any]) -> str:
    return f"{number(of['p50'], 'relative')} (P90 {number(of['p90'], 'relative')})"
