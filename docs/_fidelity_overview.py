"""The first table of docs/fidelity.md: a row for each ground truth, the same columns for what others state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Rows = Sequence[Mapping[str, Any]]
COLUMNS = ("predicted by", "measured", "TTFT", "TPOT", "latency (JCT)")
NONE = "-"
NO_INTERVAL = "no interval"
"""The verdict on a figure that meets its aim where nothing says how far chance moves it."""
P50_P95 = (("P50", "{}ttft_p50_error"), ("P95", "{}ttft_p95_error"))
CIRCLE = {
    "ttft": P50_P95,
    "tpot": (("P50", "{}tpot_p50_error"),),
    "latency": (
        ("P50", "{}jct_p50_error"),
        ("P95", "{}jct_p95_error"),
        ("a token, P50", "{}normalized_latency_p50_error"),
    ),
}
"""By column: what a cell calls a figure, and the figure's name."""
MAPE = {part: (("", f"{{}}{part}_mape"),) for part in ("ttft", "tpot", "latency")}
MEDIAN = {part: (("median", f"{{}}{part}_median_ape"),) for part in ("ttft", "tpot", "latency")}


@dataclass(frozen=True)
class Truth:
    """A ground truth of ours.

    Attributes:
        by: What predicted.
        measured: What was measured.
        prefix: With which its figures' names begin.
        figures: By column: labels and names.
    """

    by: str
    measured: str
    prefix: str
    figures: Mapping[str, tuple[tuple[str, str], ...]]


TRUTHS = (
    Truth(
        "profile and calibration on other loads",
        "vLLM on a CPU: 85 % of capacity, and another setting",
        "fidelity.live.",
        CIRCLE,
    ),
    Truth(
        "profile and calibration on other loads",
        "transformers on a CPU: 85 % of capacity",
        "fidelity.live_transformers.",
        CIRCLE,
    ),
    Truth(
        "profiled kernels, nothing fitted to the runs",
        "three recorded vLLM runs on RTX 4090 and RTX PRO 6000",
        "fidelity.recorded.",
        MAPE,
    ),
    Truth(
        "roofline, calibrated on half of each run",
        "the other half of the same three runs",
        "fidelity.calibrated.",
        MAPE,
    ),
    Truth(
        "roofline, fitted on other models and GPUs",
        "deployments on H100, H200, B200 (AIConfigurator's sample)",
        "fidelity.silicon.roofline_unseen.",
        MEDIAN,
    ),
    Truth("imported kernel tables", "those of them that have tables", "fidelity.silicon.tables.", MEDIAN),
    Truth(
        "`deploy` and `simulate` with a host by name, which was fitted to these points",
        "those of them that `deploy` has settings for",
        "fidelity.silicon.shipped.",
        MEDIAN,
    ),
    Truth("roofline, hosts from other GPUs", "Argonne's static batches, NVIDIA", "fidelity.argonne.nvidia.", MEDIAN),
    Truth("roofline, hosts from NVIDIA GPUs", "Argonne's static batches, AMD MI300X", "fidelity.argonne.amd.", MEDIAN),
)
GPU = Truth("profile and calibration on other loads", "transformers on {}", "fidelity.gpu.{}.", CIRCLE)

LLMSERVINGSIM = "[LLMServingSim 2](https://github.com/casys-kaist/LLMServingSim)"
OTHERS = (
    (
        "[Vidur](https://arxiv.org/abs/2405.05465), MLSys '24",
        "its own traces on A100, static and dynamic",
        NONE,
        NONE,
        "P95 of execution time within 3.33 %; normalised latency within 9 % at 85 % of capacity (12.65 % worst)",
    ),
    (
        f"{LLMSERVINGSIM}, as stated",
        "its vLLM runs on profiled GPUs",
        "+1.3 to -13.6 %",
        "within 1.7 %",
        "within 2.2 %",
    ),
    (
        "[Frontier](https://arxiv.org/abs/2605.21312)",
        "16 H800",
        NONE,
        NONE,
        "2.6 % with prefill apart, 6.4 % in one pool",
    ),
    (
        "[BLIS](https://github.com/inference-sim/inference-sim)",
        "vLLM on H100",
        "median 17.6 % (P99 29 %)",
        "median 7.1 % (ITL)",
        "median 6.7 %",
    ),
    ("SamuLLM, VLDB", "whole offline runs", NONE, NONE, "17 % with known lengths, 26 % without (whole runs)"),
    (
        "[AIConfigurator](https://github.com/ai-dynamo/aiconfigurator/issues/1205), reported by a user",
        "vLLM on A100 SXM",
        "45 %",
        NONE,
        NONE,
    ),
)


def overview(rows: Rows, more: Sequence[str] = ()) -> str:
    """The table; what was not measured yet is told by a dash. ``more``: lines that follow ours."""
    lines = [f"| | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    for truth in (*TRUTHS, *_gpus(rows)):
        cells = [cell(rows, truth, part) for part in ("ttft", "tpot", "latency")]
        lines.append(f"| **lengthwise** | {truth.by} | {truth.measured} | {' | '.join(cells)} |")
    lines += more
    lines.append(f"| {' | '.join(_theirs(rows))} |")
    lines += [f"| {name} | itself | {' | '.join(cells)} |" for name, *cells in OTHERS]
    return "\n".join(lines) + "\n"


def _gpus(rows: Rows) -> Iterator[Truth]:
    """One a campaign that the results hold."""
    start = GPU.prefix.split("{", maxsplit=1)[0]
    names = [row["name"].removeprefix(start).split(".")[0] for row in rows if row["name"].startswith(start)]
    for name in dict.fromkeys(names) or ("",):
        where = f"a GPU ({name}): 85 % of capacity" if name else "a GPU: 85 % of capacity"
        yield Truth(GPU.by, GPU.measured.format(where), GPU.prefix.format(name), CIRCLE)


def cell(rows: Rows, truth: Truth, part: str) -> str:
    """The figures of a column with what is known of their chance; a dash without any."""
    named = {row["name"]: row for row in rows}
    told = []
    for label, name in truth.figures[part]:
        row = named.get(name.format(truth.prefix))
        if row is not None and row.get("value") is not None:
            told.append(f"{label} {figure(row)}".strip())
    return "; ".join(told) or NONE


def _theirs(rows: Rows) -> list[str]:
    """LLMServingSim's own errors on the three recorded runs, which our figures keep beside ours."""
    named = {row["name"]: row for row in rows}
    cells = []
    for part in ("ttft", "tpot", "latency"):
        details = named.get(f"fidelity.recorded.{part}_mape", {}).get("details") or {}
        error = details.get("llmservingsim_mape")
        cells.append(NONE if error is None else number(error, "relative"))
    measured = "the same three recorded runs, from its own summary files"
    return [f"{LLMSERVINGSIM}, measured", "itself", measured, *cells]


def figure(row: Mapping[str, Any]) -> str:
    """A figure with what it is of, and its 95 % interval in brackets, or its ranges, each called by what it is over."""
    details = row.get("details") or {}
    text = number(row["value"], row["unit"]) + _counted(row["unit"], details)
    ends = row.get("ci") or details.get("interval")
    if ends:
        return f"{text} [{_ends(ends, row['unit'])}]"
    singles = held_singles(details)
    if singles:
        over = f"single runs {_ends((min(singles), max(singles)), row['unit'])}"
        if len(details["signed_by_load"]) > 1:
            over = f"loads {_ends(details['range'], row['unit'])}; {over}"
        return f"{text} ({over})"
    if details.get("range"):
        runs = details.get("held_out")
        over = f" over {len(runs)} runs" if runs else ""
        return f"{text}, range [{_ends(details['range'], row['unit'])}]{over}"
    return text


def _counted(unit: str, details: Mapping[str, Any]) -> str:
    """Of how many values a share is, and in how many groups they hang together."""
    of = details.get("report") if isinstance(details.get("report"), Mapping) else details
    if unit != "share" or not of or "n" not in of:
        return ""
    groups = (
        (key, word) for key, word in (("pairs", "pairs"), ("of_runs", "runs"), ("of_loads", "loads")) if key in of
    )
    return f" of {of['n']:,}" + "".join(f" in {of[key]} {word if of[key] != 1 else word[:-1]}" for key, word in groups)


def held_singles(details: Mapping[str, Any]) -> list[float]:
    """Absolute errors of the single runs of the loads that were held out, of a circle's details."""
    loads = details.get("signed_by_load") or {}
    runs = details.get("signed_by_run") or {}
    return [abs(of["calibrated"]) for name, of in runs.items() if name.rpartition("-")[0] in loads]


def decision(row: Mapping[str, Any]) -> str:
    """Whether a figure's aim is met: by every load that was held out, else by the median alone.

    Borderline where single runs, or an end of its interval, say otherwise; without an interval that is said alone. A share
    that intervals hold is no better the larger it is: its own interval holds the aim, or does not.
    """
    if row["unit"] == "share" and row["name"].endswith("_coverage"):
        return _of_coverage(row)
    details, lower, target = row.get("details") or {}, row["better"] == "lower", row["target"]

    def meets(value: float) -> bool:
        return bool(value <= target if lower else value >= target)

    if not meets(row["value"]):
        return "missed"
    loads = [meets(abs(of["calibrated"])) for of in (details.get("signed_by_load") or {}).values()]
    if not all(loads):
        return f"met by the median, {sum(loads)} of {len(loads)} loads"
    ends = row.get("ci") or details.get("interval")
    if not ends:
        return NO_INTERVAL
    singles = details.get("of_single_runs")
    return "met" if all(map(meets, ends)) and (singles is None or meets(singles)) else "borderline"


def _of_coverage(row: Mapping[str, Any]) -> str:
    """Whether what intervals hold can be as much as they claim, by the interval of the count."""
    ends, target = row.get("ci"), row["target"]
    if not ends:
        return NO_INTERVAL
    if ends[0] <= target <= ends[1]:
        return "consistent"
    return "missed, too narrow" if ends[1] < target else "missed, too wide"


def number(of: float, unit: str) -> str:
    """A share in percent; anything else with its unit."""
    if unit not in ("relative", "share"):
        return f"{of:.3g} {unit}".strip()
    return f"{100 * of:.3g} %" if abs(of) < 10 else f"{100 * of:,.0f} %"


def _ends(ends: Sequence[float], unit: str) -> str:
    return " to ".join(number(end, unit).removesuffix(" %") for end in ends)
