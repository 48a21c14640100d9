"""How far the aims are reached, in words and one table: the first thing that docs/fidelity.md says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from _fidelity_campaigns import before
from _fidelity_overview import LLMSERVINGSIM, NO_INTERVAL, decision, held_singles
from _fidelity_sections import between, percent
from _fidelity_silicon import limits

Rows = Sequence[Mapping[str, Any]]


def standing(rows: Rows, earlier: Rows = ()) -> str:
    """How far the aim is reached to be below the best of others, where both were measured on the same runs."""
    lines = []
    for part, column in (("ttft", "TTFT"), ("tpot", "TPOT"), ("latency", "latency")):
        row = next((row for row in rows if row["name"] == f"fidelity.recorded.{part}_mape"), None)
        theirs = ((row or {}).get("details") or {}).get("llmservingsim_mape")
        if row is not None and row.get("value") is not None and theirs:
            told = "reached" if row["value"] < theirs else f"missed by a factor of {row['value'] / theirs:.2g}"
            lines.append(f"| {column} | {percent(theirs)} | {percent(row['value'])} | {told} |")
    if not lines:
        return "\n".join(_limits(rows, earlier))
    reached = all("| reached |" in line for line in lines)
    head = (
        f'**The aim "below the best of others in each column" is {"" if reached else "not "}reached.** The best is '
        f"{LLMSERVINGSIM} on three recorded GPU runs, the only ones that both simulate:\n"
    )
    table = ["| column | LLMServingSim | lengthwise | |", "|---|---|---|---|", *lines, ""]
    return "\n".join([head, *table, *_limits(rows, earlier)])


def _limits(rows: Rows, earlier: Rows) -> Iterator[str]:
    """Where it is not to be trusted, in words."""
    live, other = (
        {
            row["name"].rsplit(".", 1)[1]: row
            for row in rows
            if row["name"].startswith(prefix) and row["name"].endswith("_error") and row.get("value") is not None
        }
        for prefix in ("fidelity.live.", "fidelity.live_transformers.")
    )
    if live:
        singles = [error for row in live.values() for error in held_singles(row.get("details") or {})]
        decisions = [decision(row) for row in live.values() if row.get("target") is not None]
        yield (
            f"- **Calibrated to vLLM on a CPU**{_load(rows)}, it is {between([row['value'] for row in live.values()])} off at loads "
            f"and settings that it has not seen (medians; single runs {between(singles)}): of {len(decisions)} aims "
            f"{decisions.count('met')} met by every load, {sum('median' in of for of in decisions)} by the median alone, "
            f"{decisions.count('borderline')} borderline, {decisions.count(NO_INTERVAL)} without an interval, "
            f"{decisions.count('missed')} missed.{_signs(live)}"
            f"{_looked_at(live)}{before(earlier, 'fidelity.live.')}"
        )
    if other:
        singles = [error for row in other.values() for error in held_singles(row.get("details") or {})]
        middle = [(row.get("details") or {}).get("median_of", {}) for row in other.values()]
        plain_better = sum(of["roofline"] < of["calibrated"] for of in middle if of)
        nearer = f", and in {plain_better} of {len(other)} metrics the plain roofline is nearer" if plain_better else ""
        yield (
            "- **Calibrated to another engine**, transformers' continuous batching, it is "
            f"{between([row['value'] for row in other.values()])} off at a load that it has not seen (medians; single runs {between(singles)}){nearer}.{_signs(other)}"
            f"{_looked_at(other)}{before(earlier, 'fidelity.live_transformers.')}"
        )
    if not any(row["name"].startswith("fidelity.gpu.") for row in rows):
        yield "- **No GPU of our own has been measured**: figures for GPUs are of runs that others recorded."
    yield from limits(rows)
    yield ""
    yield from _by_load([*live.items(), *other.items()])


def _load(rows: Rows) -> str:
    """How busy the machine was before its runs, as it was kept with them."""
    details = next((row.get("details") or {} for row in rows if row["name"] == "fidelity.live.calibration"), {})
    loads = [
        of["load_1m"] for of in (details.get("runs") or {}).values() if isinstance(of, Mapping) and "load_1m" in of
    ]
    cores = (details.get("machine") or {}).get("cores")
    return f" (load average {min(loads):.2g} to {max(loads):.2g} on {cores} cores)" if loads and cores else ""


def _signs(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """On which side medians lie at 85 % of capacity; nothing without such loads."""
    loads = [((row.get("details") or {}).get("signed_by_load") or {}).items() for row in rows.values()]
    signed = [of["calibrated"] for load in loads for name, of in load if name.endswith("-high")]
    short = sum(error < 0 for error in signed)
    if not signed:
        return ""
    share = f"all {len(signed)}" if short == len(signed) else f"{short} of {len(signed)}"
    ends = f"{100 * min(signed):+.3g} to {100 * max(signed):+.3g} %"
    return f" At 85 % of capacity {share} medians are told too short ({ends})."


def _looked_at(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """That the runs were there before the code was done, unless all rows keep that they were not."""
    details = [row.get("details") or {} for row in rows.values()]
    if all(of.get("frozen") is True for of in details):
        return " The code that decides over these errors is the one by which these runs were measured, or older."
    masks = any(
        of.get("without_masks", of["calibrated"]) != of["calibrated"]
        for one in details
        for of in (one.get("signed_by_load") or {}).values()
    )
    form = ", what looks for dense masks among it" if masks else ""
    return (
        f" Code was changed after these runs, their 85 % load among them, had been measured{form}{_times(details)}: this is "
        "no blind test."
    )


def _times(details: Sequence[Mapping[str, Any]]) -> str:
    """When the runs were measured and when the code was changed last, where both are known."""
    ends = [
        max((of[key][:16].replace("T", " ") for of in details if of.get(key)), default="")
        for key in ("measured_at", "code_changed_at")
    ]
    return f" (runs {ends[0]}, code {ends[1]} UTC)" if all(ends) else ""


def _by_load(rows: Sequence[tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
    """A table of signed errors by load that was held out; nothing without any."""
    cells: dict[str, dict[str, float]] = {}
    for key, row in rows:
        for load, of in ((row.get("details") or {}).get("signed_by_load") or {}).items():
            cells.setdefault(load, {})[key.removesuffix("_error")] = of["calibrated"]
    if not cells:
        return
    metrics = list(dict.fromkeys(metric for of in cells.values() for metric in of))
    yield "Signed errors by load that was held out (a minus: told too short):\n"
    yield f"| load | {' | '.join(metric.replace('_', ' ').upper() for metric in metrics)} |"
    yield f"|---|{'---|' * len(metrics)}"
    for load, of in cells.items():
        told = (f"{100 * of[metric]:+.3g} %" if metric in of else "-" for metric in metrics)
        yield f"| {load} | {' | '.join(told)} |"
    yield ""
