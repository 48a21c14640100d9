"""Campaigns on a real engine, those that newer ones replaced as well: what each told, and how its machine was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from _fidelity_sections import percent

Rows = Sequence[Mapping[str, Any]]
METRICS = ("jct_p50", "jct_p95", "tpot_p50", "ttft_p50", "ttft_p95")
"""Of all campaigns; the newest have more."""
TOLD = ("_error", "calibration")
"""Ends of what a campaign's rows are called; others may be counted of its runs later."""
COLUMNS = (
    "rows made",
    "runs measured",
    "code changed last",
    "code frozen before",
    "load average",
    "GFLOP/s of a thread",
    "runs with doubts",
    "repeats (JCT P50)",
)
ABOUT = (
    "Every campaign so far; the last is that of all other figures here. Code: when what decides over these errors was last changed "
    "in the code that made these rows (calibration, engine, scheduler, costs, metrics, schema, and the circle itself; of rows "
    "without a hash of it calibration, engine and costs); frozen: whether that is the code by which the runs were measured, by "
    "its hash, or is older than they are where no hash was kept; dashes: not known. Load averages before a run hold what the engine "
    "left there; repeats: the furthest of a held-out load from its median; errors: medians over held-out loads. What was called 85 % of the "
    "capacity before 2026-11-23 17:30 was 81 to 127 % of it (by the output tokens offered, in the last of these campaigns): it was read off the "
    "requests that finished within a part of the static run: the short ones come first, and beside the last of them no prompt is computed any more. "
    "Where more comes than is served, errors of a few percent in a step become queues that are told by half. Arrivals are stretched to the rate "
    "since 17:53: by luck the 85 % of 17:37 were 74 %.\n"
)


def campaigns(rows: Rows, earlier: Rows, prefix: str, *, report: str = "") -> Iterator[str]:
    """A table of a circle's campaigns, a line each; nothing where none was replaced.

    ``told`` is the title of the section that says already what the columns are; "": none does.
    """
    before = by_campaign(earlier, prefix)
    if not before:
        return
    yield f"Every campaign so far, in columns as under *{report}*.\n" if report else ABOUT
    yield f"| {' | '.join((*COLUMNS, *map(_label, METRICS)))} |"
    yield f"|{'---|' * (len(COLUMNS) + len(METRICS))}"
    for named in (*before, *by_campaign(rows, prefix)):
        errors = [percent((named.get(f"{metric}_error") or {}).get("value")) for metric in METRICS]
        yield f"| {' | '.join((*state(named), *errors))} |"
    yield ""


def before(earlier: Rows, prefix: str) -> str:
    """One sentence on the last campaign that was replaced; nothing where none was."""
    replaced = by_campaign(earlier, prefix)
    if not replaced:
        return ""
    named = replaced[-1]
    told = ", ".join(
        f"{_label(metric)} {percent(named[f'{metric}_error'].get('value'))}"
        for metric in METRICS
        if f"{metric}_error" in named
    )
    _, _, _, _, load, *_ = state(named)
    return f" An earlier campaign (load average {load}) told other errors, kept below: {told}."


def by_campaign(rows: Rows, prefix: str) -> list[dict[str, Mapping[str, Any]]]:
    """The rows of a circle by when they were kept, in their order; of each campaign by their last name."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        circle, _, last = row["name"].rpartition(".")
        if f"{circle}." == prefix and last.endswith(TOLD):
            found.setdefault(row.get("retained", ""), {})[last] = row
    return list(found.values())


def state(named: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """When a campaign was measured, whether its code was frozen before, and how its machine was."""
    errors = [row for key, row in named.items() if key.endswith("_error")]
    details = (named.get("calibration") or {}).get("details") or {}
    machine, runs = details.get("machine") or {}, details.get("runs") or {}
    loads = [of["load_1m"] for of in runs.values() if isinstance(of, Mapping) and "load_1m" in of]
    if not loads and "load_1m" in machine:
        loads = [machine["load_1m"]]
    measured = {run for row in errors for run in (row.get("details") or {}).get("signed_by_run") or {}}
    told = [row.get("details") or {} for row in errors]
    return (
        _when(errors, "retained"),
        _when(told, "measured_at"),
        _when(told, "code_changed_at"),
        _frozen(told),
        _load(loads, machine.get("cores")),
        f"{machine['float32_gflops_one_thread']:.0f}" if "float32_gflops_one_thread" in machine else "-",
        f"{len(details.get('warnings') or {})} of {len(measured)}" if measured else "-",
        _disaggregated(named.get("jct_p50_error") or {}),
    )


def _when(report: Sequence[Mapping[str, Any]], key: str) -> str:
    """The latest of such times, to the minute; a dash where none is known."""
    return max((of[key][:16].replace("T", " ") for of in report if of.get(key)), default="-")


def _frozen(report: Sequence[Mapping[str, Any]]) -> str:
    """Whether the code is older than the runs; a dash where nobody kept when one of them was."""
    if not report or not all(of.get("measured_at") and of.get("code_changed_at") for of in report):
        return "-"
    return "yes" if all(of.get("frozen") is True for of in report) else "no"


def _load(loads: Sequence[float], cores: int | None) -> str:
    if not loads:
        return "-"
    ends = f"{min(loads):.2g} to {max(loads):.2g}" if len(loads) > 1 else f"{loads[0]:.2g} at its start"
    return f"{ends} on {cores} cores" if cores else ends


def _disaggregated(row: Mapping[str, Any]) -> str:
    loads = ((row.get("details") or {}).get("signed_by_load") or {}).values()
    return percent(max((of["repeats_spread"] for of in loads), default=None))


def _label(metric: str) -> str:
    return metric.replace("_", " ").upper()
