"""What docs/apps.md says of the runner and of live engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from _apps_studies import NOT_YET, Rows
from _gateway_numbers import number

LIVE = (("apps.estimate_error_live", "of a sample"), ("apps.estimate_error_live_known", "known"))
OLD_BOUND = 3.0
"""Load above which runs were not counted, in rows that do not hold it."""
NOTHING_S = 1e-6
"""Known lengths leave no chance but for rounding."""


def drained(named: Rows) -> str:
    """A million tasks planned and drained, and the largest the process was."""
    row, peak = named.get("apps.drain_1e6_s"), named.get("apps.drain_1e6_peak_mib")
    if row is None or peak is None:
        return f"A million tasks through the simulated launcher: {NOT_YET}.\n"
    of = row["details"]
    return (
        f"{of['tasks']:,} tasks were planned in {number(of['planned_s'])} s and drained through the simulated launcher in "
        f"{number(of['run_s'])} s ({number(1000 * of['run_s'] / of['tasks'])} ms each); the process was at most "
        f"{number(peak['value'])} MiB large, its ledger {number(of['ledger_mib'])} MiB. The run took "
        f"{number(of['virtual_s'])} s of virtual time; the plan had said {number(of['virtual_planned_s'])} s.\n"
    )


def live(named: Rows) -> str:
    """Makespans estimated and measured, a line a layout."""
    if not any(name in named for name, _ in LIVE):
        return f"{NOT_YET.capitalize()}.\n"
    lines = [
        "| lengths | cores | plan: models by stage | estimated, s | measured, s | off |",
        "|---|---|---|---|---|---|",
    ]
    for name, words in LIVE:
        cases = ((named.get(name) or {}).get("details") or {}).get("cases") or ()
        lines.extend(f"| {words} | {case['cores']} | {' | '.join(_row(case))} |" for case in cases)
        lines.extend(
            f"| {words}, the machine busy | {case['cores']} | not counted | {number(case['estimate_s'])} | "
            f"{', '.join(number(s) for s, _ in case['busy'])} | {', '.join(f'{e:+.1%}' for _, e in case['busy'])} |"
            for case in cases
            if case.get("busy")
        )
    return _bound(named) + "\n".join(lines) + "\n" + _all_counted(named) + _left_out(named)


def _bound(named: Rows) -> str:
    """Which runs are not counted, and since when that was fixed: rows that hold the bound were measured under it."""
    cases = [case for name, _ in LIVE for case in ((named.get(name) or {}).get("details") or {}).get("cases") or ()]
    before = {case["busy_above"] for case in cases if "busy_above" in case}
    bound = ", ".join(number(one) for one in sorted(before or {OLD_BOUND}))
    if len(before) == 1 and all("busy_above" in case for case in cases):
        told = "that was fixed before they were measured"
    else:
        told = "that was set when they had been seen"
    some = "" if any(case.get("busy") for case in cases) else "; there was none"
    return (
        f"Runs at whose end the machine's load was above {bound} had other work beside them: they are told and not "
        f"counted, by a bound {told}{some}.\n\n"
    )


def _all_counted(named: Rows) -> str:
    """Mean errors with the runs on a busy machine, where there were such."""
    told = []
    for name, words in LIVE:
        cases = ((named.get(name) or {}).get("details") or {}).get("cases") or ()
        busy = [error for case in cases for _, error in case.get("busy") or ()]
        each = [abs(error) for case in cases for error in case["errors"]] + [abs(error) for error in busy]
        if busy:
            told.append(f"{sum(each) / len(each):.1%} ({words})")
    return f"\nWith all of them counted, the mean error is {', '.join(told)}.\n" if told else ""


def _left_out(named: Rows) -> str:
    """How long engines take to end, as the profile measured it, where estimates were made without."""
    cases = ((named.get(LIVE[0][0]) or {}).get("details") or {}).get("cases") or ()
    switches = [one for each in (cases[0].get("starts_s") or {}).values() for one in each] if cases else []
    stops_s = [seconds for one in switches for seconds in one.get("stop_s") or ()]
    if not stops_s or cases[0].get("holds_stops"):
        return ""
    return (
        f"\nEstimates leave out that an engine ends ({number(sum(stops_s) / len(stops_s))} s each in the profile) before the "
        "next starts in its place: they are rather short. The profile starts engines one at a time; where two start at "
        "once on two busy cores, both take longer.\n"
    )


def _row(case: Mapping[str, Any]) -> tuple[str, str, str, str]:
    plan = "; ".join(" + ".join(stage) for stage in case["plan"])
    half = case.get("estimate_half_width_s")
    estimate = number(case["estimate_s"]) + (f" ± {number(half)}" if half and half > NOTHING_S else "")
    measured = ", ".join(map(number, case["measured_s"]))
    return plan, estimate, measured, ", ".join(f"{error:+.1%}" for error in case["errors"])
