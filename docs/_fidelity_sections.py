"""What each section of the page shows of its rows: narrow tables in percent, and what limits the trust in them."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from _fidelity_calibrating import counters, times
from _fidelity_coverage import coverage, held_within
from _fidelity_overview import figure, held_singles, number
from _fidelity_silicon import left_out

Rows = Sequence[Mapping[str, Any]]
_LATE = re.compile(r"the worst ([\d.]+) ms; median TTFT ([\d.]+) ms")
_PAIR = re.compile(r"another request costs ([\d.]+) times")


def circle(rows: Rows) -> Iterator[str]:
    """The errors of a circle: medians over loads, and over single runs, each with the range that is its own."""
    named = {row["name"].rsplit(".", 1)[1]: row for row in rows}
    errors = {key: row for key, row in named.items() if key.endswith("_error")}
    if errors:
        yield (
            "| metric | median over loads | range over loads | median over single runs | range over single runs | "
            "repeats lie apart, at most | profile alone | plain roofline |"
        )
        yield "|---|---|---|---|---|---|---|---|"
        yield from (_of_metric(key, row) for key, row in errors.items())
        yield ""
        yield _floor(errors)
        yield from _without_masks(errors)
        yield (
            "A load's error compares the simulated with the median of its repeats; a single run's compares each repeat with "
            "its own simulation. The last two columns are medians over the same loads, without calibration.\n"
        )
    within = named.get("interval_coverage")
    if within is not None and within.get("details"):
        yield from held_within(within)
    calibration = named.get("calibration")
    if calibration is not None:
        yield from _pairs(calibration.get("details") or {})
        yield from _warnings(calibration.get("details") or {})


def _of_metric(key: str, row: Mapping[str, Any]) -> str:
    details = row.get("details") or {}
    loads, singles = details.get("signed_by_load") or {}, held_singles(details)
    errors = [abs(of["calibrated"]) for of in loads.values()]
    apart = [of["repeats_spread"] for of in loads.values()]
    median = details.get("median_of") or {}
    cells = [
        percent(row["value"]),
        between(errors),
        percent(details.get("of_single_runs")),
        between(singles),
        percent(max(apart, default=None)),
        percent(median.get("profile")),
        percent(median.get("roofline")),
    ]
    metric, _, quantile = key.removesuffix("_error").rpartition("_")
    return f"| {metric.upper().replace('_', ' ')} {quantile.upper()} | {' | '.join(cells)} |"


def _without_masks(errors: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What the same calibration is off by without dense masks, where it was made."""
    loads = [((row.get("details") or {}).get("signed_by_load") or {}).values() for row in errors.values()]
    both = [(of["without_masks"], of["calibrated"]) for load in loads for of in load if "without_masks" in of]
    told = [bare for bare, _ in both]
    if any(bare != of for bare, of in both):
        yield (
            "The same runs, calibrated without the term for dense masks: signed errors of "
            f"{100 * min(told):+.3g} to {100 * max(told):+.3g} % over these metrics and loads.\n"
        )


def _pairs(details: Mapping[str, Any]) -> Iterator[str]:
    """What a masked pair was found to cost, as the calibration noted it."""
    found = [_PAIR.search(note) for note in details.get("notes") or ()]
    yield from (f"A masked pair was found to cost {one[1]} times a prompt's own.\n" for one in found if one)


def _floor(errors: Mapping[str, Mapping[str, Any]]) -> str:
    """How far repeats lie apart of the loads that were held out, in the medians."""
    told = []
    for metric in ("ttft", "jct"):
        loads = ((errors.get(f"{metric}_p50_error") or {}).get("details") or {}).get("signed_by_load") or {}
        if loads:
            furthest = max(of["repeats_spread"] for of in loads.values())
            told.append(f"{metric.upper()} P50 {percent(furthest)}")
    return f"A repeat lies at most so far from the median of its load: {', '.join(told)}.\n" if told else ""


def _warnings(details: Mapping[str, Any]) -> Iterator[str]:
    """Which runs the calibration would refuse, and how busy the machine was."""
    runs = {name: of for name, of in (details.get("runs") or {}).items() if isinstance(of, Mapping)}
    warnings = details.get("warnings") or {}
    if warnings:
        learnt = set(details.get("learnt_of") or ())
        of_learnt = len(learnt & set(warnings))
        yield (
            f"**{len(warnings)} of {len(runs)} runs carry doubts** ({of_learnt} of {len(learnt)} learnt from, "
            f"{len(warnings) - of_learnt} of {len(runs) - len(learnt)} held out): {_by_load(warnings, runs)}. The client sent more than 1 % of their requests late.{_burst(warnings)} "
            f"{_refused(warnings, details.get('passed'))} The benchmark takes them all (as `--allow-doubts` does), since on "
            "this machine there would be too few others.\n"
        )
    busy = [of["engine_cpu_s"] / of["span_s"] for of in runs.values() if of.get("engine_cpu_s")]
    if busy:
        cores = (details.get("machine") or {}).get("cores")
        yield (
            f"**The engine's processes took {statistics.median(busy):.1f} s of processor time a second** (median over "
            f"the runs; {min(busy):.2g} to {max(busy):.2g}), and the machine has {cores} cores: the client shares them with "
            "the engine, and held back it sends and reads late. The engine computes on one thread; what keeps the second "
            "core busy is not known (processor time was taken of all its processes together). What of these errors is that "
            "contention's is not known either; a machine with cores to spare has not been measured.\n"
        )


def _refused(warnings: Mapping[str, Any], passed: Sequence[str] | None) -> str:
    """What ``calibrate`` does with the doubted runs: whether it takes some is known of campaigns that say so."""
    rule = (
        "a client that had less than 40 % of a core, did not often wake late, and whose lateness moves neither the mean nor "
        "the 95th percentile of TTFT by 2 % or more"
    )
    if passed is None:
        return f"`calibrate` takes of such runs only those of {rule}; which these are was not kept."
    if not passed:
        return f"`calibrate` refuses all of them: it takes only runs of {rule}."
    return (
        f"`calibrate` refuses {len(warnings) - len(passed)} of them and takes {len(passed)} unasked: those of {rule}."
    )


def _by_load(warnings: Mapping[str, Any], runs: Mapping[str, Any]) -> str:
    """How many repeats of each load are doubted."""
    repeats = Counter(name.rpartition("-")[0] for name in runs)
    doubted = Counter(name.rpartition("-")[0] for name in warnings)
    return ", ".join(f"{load} ({n} of {repeats[load]})" for load, n in sorted(doubted.items()))


def _burst(warnings: Mapping[str, Sequence[str]]) -> str:
    """How late the static runs' client was, which has all requests to send at one moment; nothing of other runs."""
    found = (_LATE.search(doubt) for name, told in warnings.items() if "-static-" in name for doubt in told)
    late = [(float(one[1]), float(one[2])) for one in found if one]
    if not late:
        return ""
    worst_ms, ttft_ms = max(ms for ms, _ in late), min(ms for _, ms in late)
    return (
        " All requests of a static run are due at one moment, and the last of them cannot but leave later: by up to "
        f"{worst_ms:.0f} ms, where the median first token takes {ttft_ms / 1000:.1f} s and more."
    )


def recorded(rows: Rows) -> Iterator[str]:
    """Ours beside LLMServingSim's, by run and over all."""
    yield "| | lengthwise | 95 % interval | LLMServingSim | by run: lengthwise / LLMServingSim |"
    yield "|---|---|---|---|---|"
    for row in rows:
        details = row.get("details") or {}
        runs = (details.get("runs") or {}).items()
        each = "; ".join(f"{name} {percent(of['mape'])} / {percent(of['llmservingsim_mape'])}" for name, of in runs)
        theirs = percent(details.get("llmservingsim_mape"))
        yield f"| {_part(row)} | {percent(row['value'])} | {_interval(row)} | {theirs} | {each} |"
    yield ""


def calibrated(rows: Rows) -> Iterator[str]:
    """Before and after."""
    rows = [row for row in rows if row["name"].startswith("fidelity.")]
    yield "| | roofline as it is | calibrated |"
    yield "|---|---|---|"
    for row in rows:
        yield f"| {_part(row)} | {percent((row.get('details') or {}).get('before'))} | {percent(row['value'])} |"
    yield ""


def points(rows: Rows) -> Iterator[str]:
    """Medians of many points."""
    yield "| figure | points | median error | 95 % interval | P90 | bias |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        details = row.get("details") or {}
        cells = [f"{details.get('points', 0):,}", percent(row["value"]), _interval(row)]
        cells += [percent(details.get("p90")), percent(details.get("bias"))]
        yield f"| `{row['name'].removeprefix('fidelity.')}` | {' | '.join(cells)} |"
    yield ""
    yield from left_out(rows)


def profiles(rows: Rows) -> Iterator[str]:
    """Each row's figure; of errors on unseen points also the budget, and the P95 of the operators' own."""
    for row in rows:
        if row.get("value") is not None:
            details = row.get("details") or {}
            worst = [of["p95 error"] for of in (details.get("operators") or {}).values()]
            told = f" within a budget of {details['budget_s']:.0f} s" if "budget_s" in details else ""
            told += (
                f"; P95 by operator: median {percent(statistics.median(worst))}, up to {percent(max(worst))}"
                if worst
                else ""
            )
            yield f"- `{row['name']}`: {figure(row)}{told}"
    yield ""


def plain(rows: Rows) -> Iterator[str]:
    """Each row's figure."""
    for row in rows:
        if row.get("value") is not None:
            yield f"- `{row['name']}`: {figure(row)}"
    yield ""


SHOWN = {
    "fidelity.live.": circle,
    "fidelity.live_transformers.": circle,
    "fidelity.recorded.": recorded,
    "fidelity.calibrated.": calibrated,
    "fidelity.silicon.": points,
    "fidelity.gpu.": plain,
    "calibrate_coverage": coverage,
    "calibrate_300_s": times,
    "fidelity.counters.": counters,
    "profile.": profiles,
}
"""By a section's first prefix; all others are plain."""


def percent(of: float | None) -> str:
    """A share in percent; a dash where there is none."""
    return "-" if of is None else number(of, "relative")


def between(errors: Sequence[float]) -> str:
    """The smallest to the largest in percent."""
    return f"{number(min(errors), 'relative').removesuffix(' %')} to {percent(max(errors))}" if errors else "-"


def _interval(row: Mapping[str, Any]) -> str:
    ends = row.get("ci") or (row.get("details") or {}).get("interval")
    return between(ends) if ends else "-"


def _part(row: Mapping[str, Any]) -> str:
    return {"ttft": "TTFT", "tpot": "TPOT"}.get(part := row["name"].rsplit(".", 1)[1].removesuffix("_mape"), part)
