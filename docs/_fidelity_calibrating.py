"""What calibrations take, and what a server's counters add to them: tables by case and by what was fitted to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from _fidelity_overview import number

Rows = Sequence[Mapping[str, Any]]
FITTED = {"requests": "requests alone", "counters": "and counters", "log": "and a log of every step"}


def times(rows: Rows) -> Iterator[str]:
    """Seconds of each case; what older rows of another count told, as one line."""
    details = next((row.get("details") or {} for row in rows), {})
    cases = details.get("cases")
    if not cases:
        yield "An older count, of half of the 300 requests of one run: the cheapest case, without counters or masks.\n"
        return
    yield "| runs | requests | beside them | dense masks | simulations | s of processor time | s by the clock |"
    yield "|---|---|---|---|---|---|---|"
    for name, of in cases.items():
        cells = [f"{of['requests']} of {of['runs']} runs", of["beside_them"], of["masks"], f"{of['simulations']:,}"]
        clock = f"{of['wall_s']:.3g}" if "wall_s" in of else "-"
        yield f"| {name} | {' | '.join(cells)} | {of['cpu_s']:.3g} | {clock} |"
    machine = details.get("machine") or {}
    busy = f" (load average {machine['load_1m']:.2g} on {machine['cores']} cores after them)" if machine else ""
    counted = "by the clock" if details.get("counted") == "wall_s" else "of processor time"
    yield (
        f"\nThe figure is the slowest of these in seconds {counted}. Each was timed once, beside other work{busy}; a "
        "calibration computes on one core.\n"
    )


def counters(rows: Rows) -> Iterator[str]:
    """Errors and widths by what was fitted to, then whether any difference is larger than its interval."""
    yield "| planted | fitted to | error, mean [95 %] | interval's width, mean | held |"
    yield "|---|---|---|---|---|"
    for row in rows:
        details = row["details"]
        for kind, of in details["kinds"].items():
            ends = f"[{number(of['low'], 'relative').removesuffix(' %')} to {number(of['high'], 'relative')}]"
            told = f"{number(of['error'], 'relative')} {ends} | {of['width']:.2g} | {of['satisfied']} of {details['of_runs']}"
            yield f"| {parameter(row)} | {FITTED[kind]} | {told} |"
    yield ""
    yield f"{_ranked(rows)}\n"


def parameter(row: Mapping[str, Any]) -> str:
    """What was planted: the name of a row without what all of them share."""
    return str(row["name"].rpartition(".")[2].removesuffix("_error").replace("_", " "))


def _ranked(rows: Rows) -> str:
    """Which differences, run by run, their 95 % intervals tell from nothing."""
    sure = [
        f"{parameter(row)}, {pair} {_signed(of)}"
        for row in rows
        for pair, of in row["details"]["differences"].items()
        if of["ranks"]
    ]
    if not sure:
        return "No difference of errors is larger than its own 95 % interval (run by run): nothing here ranks one above another."
    return f"Of differences of errors, run by run, only these are larger than their 95 % intervals: {'; '.join(sure)}."


def _signed(of: Mapping[str, float]) -> str:
    mean, low, high = (f"{100 * of[key]:+.2g}" for key in ("mean", "low", "high"))
    return f"{mean} % [{low} to {high}]"
