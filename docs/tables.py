"""Print the tables of docs/*.md as Markdown, from the rows in benchmarks/results.

``make tables`` runs cog over the pages: a comment ``[[[cog import tables; tables.NAME() ]]]`` holds the call, and cog
writes the output below it. Prose around the tables is written by hand.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
DASH = "-"
PARTS = {"fidelity": ("deployments",)}  # further files of results on a page
SHARES = ("relative", "share", "gain", "gain at least")  # units shown in percent
Row = Mapping[str, Any]


# Rows and cells


@cache
def rows(name: str) -> dict[str, Row]:
    """Return the rows of benchmarks/results/NAME.json by figure name; of a name the row measured last."""
    found: dict[str, Row] = {}
    texts = [(RESULTS / f"{one}.json").read_text("utf-8") for one in (name, *PARTS.get(name, ()))]
    for row in map(json.loads, "".join(texts).splitlines()):
        before = found.get(row["name"])
        if before is None or _measured_at(before) <= _measured_at(row):
            found[row["name"]] = row
    return found


def _measured_at(row: Row) -> str:
    return (row.get("details") or {}).get("measured_at") or ""


def details(file: str, name: str) -> Row:
    """Return the details of a row; {} where it was not measured."""
    return rows(file).get(name, {}).get("details") or {}


def under(file: str, prefix: str) -> dict[str, Row]:
    """Return details of all rows with a prefix, by the rest of their names."""
    return {
        name.removeprefix(prefix): {"value": row["value"]} | (row.get("details") or {})
        for name, row in rows(file).items()
        if name.startswith(prefix)
    }


def table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> None:
    """Print a Markdown table; raise ValueError if a line has more or fewer cells than the head."""
    print(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for line in lines:
        if len(line) != len(head):
            raise ValueError(f"a line must have {len(head)} cells like the head; got {len(line)}: {line}")
        print(f"| {' | '.join(map(str, line))} |")
    print()


def number(value: float | None, unit: str = "") -> str:
    """Return three digits, or an integer from a thousand on, with the unit; shares in percent."""
    if value is None:
        return DASH
    if unit in SHARES:
        return f"{number(100 * value)} %"
    return f"{value:,.0f} {unit}".strip() if abs(value) >= 1000 else f"{value:.3g} {unit}".strip()


def percent(share: float | None) -> str:
    """Return a share in percent; a dash for None."""
    return number(share, "relative")


def span(ends: Sequence[float] | None, unit: str = "") -> str:
    """Return "low to high"."""
    if not ends:
        return DASH
    low, high = (number(end, unit) for end in (min(ends), max(ends)))
    return f"{low.removesuffix(' %') if high.endswith(' %') else low} to {high}"


def with_interval(row: Row | None, unit: str = "") -> str:
    """Return a value with its interval in brackets; a dash where the row is missing."""
    if row is None or row.get("value") is None:
        return DASH
    ends = row.get("ci") or (row.get("details") or {}).get("interval")
    return number(row["value"], unit) + (f" [{span(ends, unit if unit in SHARES else '')}]" if ends else "")


def verdict(row: Row, target: float, *, more: bool) -> str:
    """Return whether a figure meets its aim: met with its complete interval, borderline with the value alone, or missed.

    The share of an interval that covers the truth is compared by its own interval: it holds the aim or does not.
    """
    ends = row.get("ci") or (row.get("details") or {}).get("interval")
    if row["name"].endswith("_coverage"):
        if not ends:
            return "no interval"
        return "consistent" if ends[0] <= target <= ends[1] else "**missed**"

    def meets(value: float) -> bool:
        return value >= target if more else value <= target

    loads = [abs(load["calibrated"]) for load in ((row.get("details") or {}).get("signed_by_load") or {}).values()]
    if not meets(row["value"]):
        return "**missed**"
    if not all(map(meets, loads)):
        return f"met by the median, {sum(map(meets, loads))} of {len(loads)} loads"
    if not ends:
        return "met, no interval"
    return "met" if all(map(meets, ends)) else "borderline"


def aims(file: str, about: Mapping[str, str], *, exact: str = "") -> None:
    """Print figures with their aims; ``about`` describes each figure by its name.

    Figures whose names contain ``exact`` keep four decimals: a gain of 0.9997 is not one of 1.
    """
    lines = []
    for name, text in about.items():
        row = rows(file).get(name)
        if row is None or row.get("value") is None:
            lines.append((f"`{name}`", text, "not measured", DASH, DASH))
            continue
        unit, target, more = row.get("unit") or "", row.get("target"), row.get("better") == "higher"
        if exact and exact in name:
            measured = f"{row['value']:.4f}" + ("" if not row.get("ci") else " [{:.4f} to {:.4f}]".format(*row["ci"]))
        else:
            measured = with_interval(row, unit)
        aim = DASH if target is None else f"{'at least' if more else 'at most'} {number(target, unit)}"
        lines.append((f"`{name}`", text, measured, aim, DASH if target is None else verdict(row, target, more=more)))
    table(["figure", "meaning", "measured", "aim", "verdict"], lines)


def machines(file: str) -> None:
    """Print the machines that measured a file's rows."""
    found = {
        f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}"
        for row in rows(file).values()
        if (machine := (row.get("details") or {}).get("machine"))
    }
    print(f"\nMeasured on {'; '.join(sorted(found))}.\n")


def study_rows(prefix: str) -> None:
    """Print a row of results for each simulated choice of a search, whose --json is on standard input."""
    for one in json.load(sys.stdin)["plans"][0]["choices"]:
        if one["at"] is not None:
            of, at = one["objective"], one["at"]["values"]
            more = {key: one[key] for key in ("settings", "status", "binds")}
            more |= {key: at[key]["value"] for key in ("ttft.p90", "tpot.p90")}
            more |= {"model": [of.get("model_low"), of.get("model_high")], "half_width": of.get("half_width")}
            print(json.dumps({"name": f"{prefix}.{one['name']}", "value": of["value"], "unit": "", "details": more}))


# docs/fidelity.md

CALIBRATED = {
    "TTFT": ("ttft_p50", "ttft_p95"),
    "TPOT": ("tpot_p50",),
    "latency": ("jct_p50", "jct_p95", "normalized_latency_p50"),
}
"""Figures of a campaign on a real engine, by the column of the overview."""
TRUTHS = (  # predicted by, measured on, prefix, suffix of the figures
    ("profile, calibrated on other loads", "vLLM on a CPU, loads and a setting left out", "live.", "error"),
    ("profile, calibrated on other loads", "transformers on a CPU, a load left out", "live_transformers.", "error"),
    ("profiled kernels, nothing fitted to the runs", "three recorded vLLM runs, RTX 4090 and RTX PRO 6000", "recorded.", "mape"),
    ("roofline, calibrated on half of each run", "the other half of the same three runs", "calibrated.", "mape"),
    ("roofline, fitted on other families of models", "deployments on H100, H200, B200, GB200, GB300", "silicon.family_out.", "median_ape"),
    ("roofline, fitted on other GPUs", "the same deployments", "silicon.gpu_out.", "median_ape"),
    ("imported kernel tables", "those of them that have tables", "silicon.tables.", "median_ape"),
    ("`deploy` and `simulate`, host fitted to these points", "those of them that `deploy` covers", "silicon.shipped.", "median_ape"),
    ("roofline, hosts fitted on other GPUs", "Argonne's static batches, NVIDIA", "argonne.nvidia.", "median_ape"),
    ("roofline, hosts fitted on NVIDIA GPUs", "Argonne's static batches, AMD MI300X", "argonne.amd.", "median_ape"),
)  # fmt: skip


def fidelity_overview() -> None:
    """Print the errors of lengthwise on each ground truth."""
    lines = []
    for predicted, measured, prefix, suffix in TRUTHS:
        cells = []
        for column, metrics in CALIBRATED.items():
            names = metrics if suffix == "error" else (column.lower(),)
            found = [(name, rows("fidelity").get(f"fidelity.{prefix}{name}_{suffix}")) for name in names]
            labels = {name: f"{_label(name)} " if suffix == "error" else "" for name in names}
            cells.append("; ".join(labels[name] + with_interval(row, "relative") for name, row in found if row) or DASH)
        lines.append((predicted, measured, *cells))
    table(["predicted by", "measured on", "TTFT", "TPOT", "latency"], lines)


def _label(metric: str) -> str:
    return metric.replace("normalized_latency", "PER TOKEN").replace("_", " ").upper().replace("PER TOKEN", "per token")


def _of_engine(engine: str, title: str) -> dict[str, str]:
    names = {f"fidelity.{engine}.{name}_error": _label(name) for group in CALIBRATED.values() for name in group}
    first, *others, last = names
    labels = {first: f"{title}: {names[first]}"} | {name: names[name] for name in others}
    intervals = {f"fidelity.{engine}.interval_coverage": "its medians within their 95 % intervals"}
    return labels | {last: f"latency {names[last]}"} | intervals


FIDELITY_FIGURES = {
    **_of_engine("live", "vLLM on a CPU, left-out loads"),
    **_of_engine("live_transformers", "transformers on a CPU, left-out load"),
    "fidelity.recorded.ttft_mape": "three recorded runs: TTFT (aim: LLMServingSim's error)",
    "fidelity.recorded.tpot_mape": "TPOT",
    "fidelity.recorded.latency_mape": "latency",
    "fidelity.silicon.family_out.ttft_median_ape": "measured deployments, family left out: TTFT",
    "fidelity.silicon.family_out.tpot_median_ape": "TPOT",
    "fidelity.silicon.gpu_out.ttft_median_ape": "measured deployments, GPU left out: TTFT",
    "fidelity.silicon.gpu_out.tpot_median_ape": "TPOT",
    "fidelity.silicon.tables.ttft_median_ape": "measured deployments, kernel tables: TTFT",
    "fidelity.silicon.tables.tpot_median_ape": "TPOT",
    "fidelity.argonne.nvidia.ttft_median_ape": "Argonne's batches on NVIDIA: TTFT",
    "fidelity.argonne.nvidia.itl_median_ape": "inter-token latency",
    "fidelity.argonne.amd.ttft_median_ape": "Argonne's batches on AMD: TTFT",
    "fidelity.argonne.amd.itl_median_ape": "inter-token latency",
    "fidelity.brackets.ttft_coverage": "TTFT within the 90 % intervals of `simulate`",
    "fidelity.brackets.tpot_coverage": "TPOT within the 90 % intervals of `simulate`",
    "calibrate_coverage": "planted parameters within the 95 % intervals of `calibrate`",
    "calibrate_300_s": "slowest calibration on 300 requests",
    "profile.cv_median_error": "profile of this CPU, unseen points: median error",
    "profile.import_h200_s": "import of the H200 kernel tables",
}
DEPLOYMENTS_FIGURES = {
    "deploy.silicon_scored": "measured deployments with a prediction, 144 of them at an assumed acceptance",
    "deploy.tpot_median_ape_left_out": "their TPOT, family or GPU left out, the worse of both",
    "deploy.ttft_median_ape_left_out": "TTFT, the worse of both",
    "deploy.ttft_bracket_coverage": "TTFT within the 90 % intervals of `simulate`",
    "deploy.eplb_equal": "places of experts that differ from those of vLLM's EPLB",
    "deploy.hybrid_blocks_equal": "steps with other blocks than vLLM's, models with several KV cache groups",
    "deploy.pd_search_s": "search for xPyD of DeepSeek-V3 on 64 H200, CPU",
    "deploy.requests_per_s": "simulated requests, eight data-parallel ranks in lock-step, CPU of one core",
    "spec.speedup_error": "speed-up of EAGLE on an H100",
}


def fidelity_aiconfigurator() -> None:
    """Print the errors of AIConfigurator's answers beside ours on the same measured deployments, by class."""
    kinds = [(part, fit) for part in ("ttft", "tpot", "throughput") for fit in ("ours_on_these", "aiconfigurator")]
    of = [details("deployments", f"fidelity.silicon.{fit}.{part}_median_ape")["by_class"] for part, fit in kinds]
    shown = [{name: f"{percent(one['p50'])} ({percent(one['bias'])})" for name, one in by.items()} for by in of]
    cells = ((name, one["points"], *(by[name] for by in shown)) for name, one in of[0].items())
    table(["class", "points", *(f"{part}, {who}" for part in ("TTFT", "TPOT", "throughput") for who in ("ours, family left out", "AIConfigurator"))], cells)  # fmt: skip


def fidelity_by_load() -> None:
    """Print signed errors of the loads left out of calibration, by metric."""
    metrics = [name for group in CALIBRATED.values() for name in group]
    lines: dict[str, list[str]] = {}
    for engine in ("live", "live_transformers"):
        for metric in metrics:
            for load, error in details("fidelity", f"fidelity.{engine}.{metric}_error")["signed_by_load"].items():
                lines.setdefault(load, []).append(f"{100 * error['calibrated']:+.3g} %")
    table(["load", *map(_label, metrics)], ([load, *cells] for load, cells in lines.items()))


def fidelity_campaign(engine: str) -> None:
    """Print errors of a campaign on a real engine over loads and over single runs, with uncalibrated ones."""
    lines = []
    for metric in (name for group in CALIBRATED.values() for name in group):
        row = rows("fidelity")[f"fidelity.{engine}.{metric}_error"]
        of, loads = row["details"], row["details"]["signed_by_load"]
        runs = of["signed_by_run"].items()
        single = [abs(run["calibrated"]) for name, run in runs if name.rpartition("-")[0] in loads]
        each = span([abs(load["calibrated"]) for load in loads.values()], "relative")
        runs = f"{percent(of['of_single_runs'])} ({span(single, 'relative')})"
        spread = max(load["repeats_spread"] for load in loads.values())
        others = (spread, of["median_of"].get("profile"), of["median_of"].get("roofline"))
        lines.append((_label(metric), percent(row["value"]), each, runs, *map(percent, others)))
    head = ["metric", "median over loads", "range over loads", "median (range) over single runs"]
    table([*head, "furthest repeat from its median", "profile alone", "roofline alone"], lines)


def fidelity_campaigns(engine: str) -> None:
    """Print all campaigns on a real engine, also those that newer ones replaced."""
    metrics = ("ttft_p50", "ttft_p95", "tpot_p50", "jct_p50", "jct_p95")
    found: dict[str, dict[str, Row]] = {}
    for file in ("fidelity-earlier", "fidelity"):
        for row in map(json.loads, (RESULTS / f"{file}.json").read_text("utf-8").splitlines()):
            prefix, _, last = row["name"].rpartition(".")
            if prefix == f"fidelity.{engine}" and last.endswith(("_error", "calibration")):
                found.setdefault(row.get("saved_at", ""), {})[last] = row
    lines = []
    for made, named in found.items():
        of = (named.get("calibration") or {}).get("details") or {}
        errors = [(row.get("details") or {}) for name, row in named.items() if name.endswith("_error")]
        known = all("frozen" in error and error.get("measured_at") for error in errors)
        frozen = ("yes" if all(error["frozen"] for error in errors) else "no") if known else DASH
        measured = {run for error in errors for run in error.get("signed_by_run") or {}}
        cells = [percent((named.get(f"{metric}_error") or {}).get("value")) for metric in metrics]
        warned = f"{len(of.get('warnings') or {})} of {len(measured)}"
        lines.append((made[:16].replace("T", " "), frozen, warned, *cells))
    table(["rows made", "code frozen before the runs", "runs with warnings", *map(_label, metrics)], lines)


def fidelity_recorded() -> None:
    """Print errors on the recorded GPU runs and those of LLMServingSim, over all and by run."""
    lines = []
    for part in ("TTFT", "TPOT", "latency"):
        row = rows("fidelity")[f"fidelity.recorded.{part.lower()}_mape"]
        of = row["details"]
        each = (f"{percent(run['mape'])} / {percent(run['llmservingsim_mape'])}" for run in of["runs"].values())
        lines.append((part, with_interval(row, "relative"), percent(of["llmservingsim_mape"]), *each))
    names = details("fidelity", "fidelity.recorded.ttft_mape")["runs"]
    table(["metric", "lengthwise", "LLMServingSim 2", *(f"{name}: ours / theirs" for name in names)], lines)


def fidelity_calibrated() -> None:
    """Print errors of the roofline on the second half of each recorded run, before and after calibration on the first."""
    titles = ("TTFT", "TPOT", "latency")
    found = [(title, rows("fidelity")[f"fidelity.calibrated.{title.lower()}_mape"]) for title in titles]
    head = ["metric", "roofline alone", "calibrated"]
    table(head, ((title, percent(row["details"]["before"]), percent(row["value"])) for title, row in found))


def fidelity_calibration_times() -> None:
    """Print the time of calibrations on about 300 requests."""
    head = ["runs", "requests", "input beside requests", "masked attention", "simulations", "CPU s", "wall s"]
    lines = []
    for name, of in details("fidelity", "calibrate_300_s")["cases"].items():
        times = map(number, (of["cpu_s"], of["wall_s"]))
        lines.append((name, of["requests"], of["beside_them"], of["masks"], f"{of['simulations']:,}", *times))
    table(head, lines)


def fidelity_counters() -> None:
    """Print errors of planted parameters by the input that calibration fits."""
    inputs = {"requests": "requests", "counters": "requests and counters", "log": "requests and a log of every step"}
    lines = []
    for planted in ("host_step", "work"):
        of = details("fidelity", f"fidelity.counters.{planted}_error")
        for kind, fit in of["kinds"].items():
            error = f"{percent(fit['error'])} [{span((fit['low'], fit['high']), 'relative')}]"
            satisfied = f"{fit['satisfied']} of {of['of_runs']}"
            lines.append((planted, inputs[kind], error, f"{fit['width']:.2g}", satisfied))
    table(["planted", "fitted to", "mean error", "mean width of the interval", "intervals with the truth"], lines)


def fidelity_points() -> None:
    """Print medians over thousands of measured deployments."""
    head = ["figure", "points", "median error", "95 % interval", "P90", "bias"]
    lines = []
    for name, row in rows("fidelity").items():
        if name.startswith(("fidelity.silicon.", "fidelity.argonne.")):
            of, title = row["details"], f"`{name.removeprefix('fidelity.')}`"
            interval = span(row.get("ci") or of.get("interval"), "relative")
            rest = map(percent, (of.get("p90"), of.get("bias")))
            lines.append((title, f"{of['points']:,}", percent(row["value"]), interval, *rest))
    table(head, lines)


def fidelity_left_out() -> None:
    """Print how many points of the sample get no prediction, by the first reason that holds."""
    reasons = details("fidelity", "fidelity.silicon.family_out.ttft_median_ape")["left_out"]
    found = sorted(((reason, count) for reason, count in reasons.items() if count), key=lambda one: -one[1])
    table(["reason", "points"], ((reason, f"{count:,}") for reason, count in found))


def fidelity_errors(fit: str, key: str, title: str) -> None:
    """Print median (bias) and P90 of the errors of measured deployments, left out of ``fit``, by what they are of."""
    names = ("ttft", "tpot", "throughput")
    parts = [details("fidelity", f"fidelity.silicon.{fit}.{name}_median_ape")[f"by_{key}"] for name in names]
    lines = [
        (of, parts[0][of]["points"], *(f"{percent(p[of]['p50'])} ({percent(p[of]['bias'])}), {percent(p[of]['p90'])}" for p in parts))
        for of in sorted(parts[0], key=lambda words: [(len(word), word) if word.isdigit() else (0, word) for word in words.split()])
    ]  # fmt: skip
    table([title, "points", *(f"{name}: median (bias), P90" for name in ("TTFT", "TPOT", "throughput"))], lines)


def fidelity_coverage(kind: str = "brackets") -> None:
    """Print the share of measured values within intervals of ``simulate``, and their widths, by model and GPU."""
    of = [details("fidelity", f"fidelity.{kind}.{part}_coverage")["by_pair"] for part in ("ttft", "tpot")]
    widths = [{pair: number(math.exp(2 * 1.645 * one["log_sd_told"])) for pair, one in by.items()} for by in of]
    shares = [{pair: f"{percent(one['coverage'])} of {one['n']}" for pair, one in by.items()} for by in of]
    lines = [(pair, *(part[pair] for both in zip(shares, widths, strict=True) for part in both)) for pair in of[0]]
    table(["model and GPU", "TTFT", "median upper end over lower", "TPOT", "median upper end over lower"], lines)


# docs/exegpt.md

MODELS = {
    "t5-11b-a40": "T5 11B, 8 x A40",
    "opt-13b-a40": "OPT 13B, 4 x A40",
    "gpt-3-39b-a40": "GPT-3 39B, 16 x A40",
    "gpt-3-101b-a100": "GPT-3 101B, 16 x A100",
    "gpt-3-175b-a40": "GPT-3 175B, 32 x A40",
    "gpt-3-175b-a100": "GPT-3 175B, 16 x A100",
    "gpt-3-341b-a40": "GPT-3 341B, 48 x A40",
}
TASKS = {"s": "S", "t": "T", "g": "G", "c1": "C1", "c2": "C2"}
BOUNDS = ("10 %", "30 %", "70 %", "none")
STRATEGIES = {"rra": "RRA", "waa-c": "WAA-C", "waa-m": "WAA-M"}
SYSTEMS = {
    "fastertransformer": "FasterTransformer",
    "deepspeed-inference": "DeepSpeed-Inference",
    "orca": "Orca",
    "vllm": "vLLM v0",
    "sarathi": "Sarathi",
    "vllm-v1": "vLLM v1",
    "vllm-v1-disaggregated": "vLLM v1, disaggregated",
}
EXEGPT_FIGURES = {
    "exegpt.gain_small_mid": "throughput over FasterTransformer, small and mid-sized models",
    "exegpt.gain_large": "the same, large models",
    "exegpt.gain_large_rra": "the same, RRA alone as in the paper",
    "exegpt.gain_all": "throughput over FasterTransformer, all models",
    "exegpt.gain_real": "the same, recorded lengths",
    "exegpt.gain_over_vllm_v1": "throughput over vLLM v1 with chunked prefill and its best replicas (no figure in the paper)",
    "exegpt.latency_gain": "FasterTransformer's latency without a bound over the choice's under the 10 % bound, GPT-3 39B, task S",
    "exegpt.search_s_max": "slowest search over all strategies and degrees, CPU of one core",
    "exegpt.points_share_max": "largest share of all schedules that a search estimates",
    "exegpt.regret_max": "largest throughput lost against an exhaustive search",
    "exegpt.nonmonotone_share": "points that break monotonicity by more than 5 %, variables of Table 5",
    "exegpt.nonmonotone_micro_batches": "points at which more micro-batches raise latency, at most as many as decode stages",
    "exegpt.drift_without_bound.waa": "throughput that a fixed WAA schedule loses without a bound, mean output -30 to +30 %",
    "exegpt.drift_without_bound.rra": "the same, RRA",
    "exegpt.correlated_error_max": "error of estimates where prompts and outputs correlate, in random order",
    "exegpt.estimator_error_p95": "estimate against the event engine, P95 over random schedules",
    "exegpt.live.throughput_error": "estimated throughput against a real engine, worst of three RRA schedules",
    "exegpt.live.latency_error": "the same, latency of the longest outputs",
    "exegpt.live.decode_batch_error": "the same, decode batch",
    "exegpt.live.exact_phases": "phases of that engine with exactly B_E and N_D, worst repeat",
    "exegpt.live.over_stock": "throughput over the engine's own scheduler at equal concurrency, best of three",
}


def _gain(cell: Row) -> str:
    if cell["won"] and not cell["gain"]:
        return f"{STRATEGIES[cell['won']]} alone"
    return f"{number(cell['gain'])} {STRATEGIES[cell['won']]}" if cell["won"] else "no schedule meets it"


def exegpt_gains() -> None:
    """Print mean gains over FasterTransformer by set of models."""
    sets = (
        ("small_mid", "T5, OPT, 39B, 101B; S, T, C1", 2.0),
        ("large", "101B, 175B twice, 341B; G, C1, C2", DASH),
        ("large_rra", "the same, RRA alone, as in the paper", 3.2),
        ("large_literal_rra", "the same, RRA alone, counted as in the paper's simulator", 3.2),
        ("large_literal", "the same, best of both, counted so", DASH),
        ("all", "both", 2.9),
    )
    lines = []
    for name, title, paper in sets:
        of = details("exegpt", f"exegpt.gain_{name}")
        by_bound = [number(of["by_bound"][bound]) for bound in BOUNDS]
        ends = (number(of["geometric_mean"]), span((of["min"], of["max"])))
        longest = number(of["if_batches_ran_to_the_longest_output"])
        lines.append((title, number(rows("exegpt")[f"exegpt.gain_{name}"]["value"]), paper, *by_bound, *ends, longest))
    head = ["models; tasks", "mean gain", "paper", *(f"bound {bound}" for bound in BOUNDS), "geometric mean", "range"]
    table([*head, "if every batch ran to the longest output of the task"], lines)


def exegpt_overview() -> None:
    """Print the gain of each model and task under each bound, with the strategy chosen."""
    found = under("exegpt", "exegpt.figure.")
    lines = [
        (title, letter, *map(_gain, cells))
        for model, title in MODELS.items()
        for task, letter in TASKS.items()
        if (cells := (found.get(f"{model}.{task}") or {}).get("cells"))
    ]
    table(["model", "task", *(f"bound {bound}" for bound in BOUNDS)], lines)


def exegpt_enforced() -> None:
    """Print how many of the chosen schedules have one stage a side."""
    found: dict[str, list[bool]] = {"all": [], "rra": [], "waa": []}
    for name, of in under("exegpt", "exegpt.figure.").items():
        gpus = int(MODELS[name.rpartition(".")[0]].split()[-3])
        for words in (cell["strategies"][cell["won"]]["words"] for cell in of["cells"] if cell["won"]):
            found["all"].append(words.startswith("RRA"))
            found["rra"].append(words.startswith("RRA") and words.endswith(f" 1 x TP {gpus}"))
            found["waa"].append(words.endswith(f"B_m = 1, {gpus // 2} GPUs prefill, 2 x TP {gpus // 2}"))
    rra, waa = sum(found["rra"]), sum(found["waa"])
    several = f"{sum(found['all']) - rra} of the others are of RRA on several stages."
    print(f"\n{rra + waa} of the {len(found['all'])} have one stage a side, {rra} of RRA and {waa} of WAA. {several}\n")


def exegpt_records(*names: str) -> None:
    """Print the records of studies, a column per key."""
    records = [record for name in names for record in details("exegpt", f"exegpt.{name}")["records"]]
    lines = []
    for record in records:
        found = [MODELS.get(cell) if key == "model" else cell for key, cell in record.items()]
        lines.append([c if isinstance(c, str) else span(c) if isinstance(c, list) else number(c) for c in found])
    table(list(records[0]), lines)


def exegpt_winners() -> None:
    """Print by task how often RRA and WAA win where both meet the bound."""
    paper = {"s": "WAA", "t": "RRA", "g": "RRA", "c1": "WAA (small), RRA (large)", "c2": "RRA"}
    found, lines = under("exegpt", "exegpt.figure."), []

    def waa_rps(cell: Row) -> float:
        return max((run["rps"] for name in ("waa-c", "waa-m") if (run := cell["strategies"][name])), default=0.0)

    for task, letter in TASKS.items():
        cells = {name.rpartition(".")[0]: of["cells"] for name, of in found.items() if name.endswith(f".{task}")}
        pairs = [
            (cell["strategies"]["rra"]["rps"], waa_rps(cell))
            for some in cells.values()
            for cell in some
            if cell["strategies"]["rra"] and waa_rps(cell)
        ]
        ahead = sum(rra > waa for rra, waa in pairs)
        no_waa = ", ".join(MODELS[model] for model, some in cells.items() if not any(map(waa_rps, some)))
        ratio = statistics.mean(rra / waa for rra, waa in pairs)
        lines.append((letter, paper[task], len(pairs), ahead, len(pairs) - ahead, number(ratio), no_waa or DASH))
    head = ["task", "paper", "bounds both meet", "RRA wins", "WAA wins", "mean of RRA over WAA"]
    table([*head, "memory does not hold WAA"], lines)


def exegpt_systems() -> None:
    """Print mean gains over every other system."""
    lines = []
    for name, title in SYSTEMS.items():
        figure = f"exegpt.gain_over_{name.replace('-', '_')}"
        of = details("exegpt", figure)
        bounds = [number(of["by_bound"][bound]) for bound in BOUNDS]
        tail = (f"{of['ahead']} of {of['both_meet']}", number(of["in_replicas"]), number(of["as_cut_for_ft"]))
        lines.append((title, with_interval(rows("exegpt")[figure]), *bounds, *tail))
    head = ["system", "mean gain", *(f"bound {bound}" for bound in BOUNDS), "ahead in", "schedules in replicas, too"]
    table([*head, "both on one replica as wide as a node"], lines)


def exegpt_table6() -> None:
    """Print the paper's choices of Table 6 and those of lengthwise."""

    def pair(schedule: Row | None) -> str:
        return f"{number(schedule['latency_s'])}, {number(schedule['rps'])}" if schedule else "memory does not hold it"

    lines, found = [], under("exegpt", "exegpt.table6.")
    for bound in ("3.1s", "5.9s", "11.5s", "none"):
        of = found[bound]
        paper, choice = of["paper"], of["choice"]
        estimates = [pair(of[f"paper_schedule{way}"]) for way in ("", "_as_they_count", "_in_lockstep")]
        worst = f"{pair(choice)} ({number(choice['constrained_latency_s'])})"
        lines.append((bound.removesuffix("s"), paper["words"], pair(paper), *estimates, choice["words"], worst))
    head = ["bound, s", "the paper's schedule", "its latency s, requests/s", "our estimate of it"]
    counted = ("counted as in the paper", "and WAA in lockstep", "our schedule", "latency s, requests/s (worst-case s)")
    table([*head, *counted], lines)


def exegpt_recorded_lengths() -> None:
    """Print gains on recorded lengths."""
    lines = []
    for name, of in under("exegpt", "exegpt.real.").items():
        model, _, source = name.rpartition(".")
        lengths = of["lengths"]
        tokens = f"{number(lengths['prompt_mean'])} / {number(lengths['output_mean'])} ± {number(lengths['output_sd'])}"
        cells = [_gain(cell) + ("" if cell["is_satisfied"] else " (breaks the bound)") for cell in of["cells"]]
        lines.append((MODELS[model], source, f"{lengths['requests']:,}", tokens, *cells))
    table(["model", "lengths of", "requests", "prompt / output tokens", *(f"bound {bound}" for bound in BOUNDS)], lines)


def exegpt_drift() -> None:
    """Print the effect of a drift of output lengths on a schedule that stays."""
    margin = lambda share: "no margin is enough" if share is None else percent(share) if share else "none needed"  # noqa: E731
    lines = []
    for name, of in under("exegpt", "exegpt.drift.").items():
        for move in of["moves"]:
            change = f"{move['change']:+g}" if move["changed"] == "skewness" else f"{100 * move['change']:+g} %"
            cells = [number(move[key]) for key in ("fixed_schedule_rps", "replanned_rps", "latency")]
            tail = (margin(move["margin"]), number(move["fixed_latency"]), margin(move["fixed_margin"]))
            lines.append((name.upper(), move["changed"], change, *cells, *tail))
    head = ["strategy", "drift of", "by", "throughput, same schedule", "throughput, new schedule"]
    table([*head, "P99 latency (a)", "margin (a)", "latency of the old P99 length (b)", "margin (b)"], lines)


def exegpt_monotonicity() -> None:
    """Print the share of points that break monotonicity by latency and by throughput; Table 5 of the paper in brackets."""
    columns = [("rra", name) for name in ("B_E", "N_D", "TP")]
    columns += [("waa", name) for name in ("B_E", "B_E, one split", "TP", "B_m", "B_m, at most the decode stages")]
    of, lines = details("exegpt", "exegpt.nonmonotone_share"), []
    for paper in of["paper"]:
        cells = []
        for strategy, variable in columns:
            some = [
                row
                for row in of["rows"]
                if (row["task"], row["tolerance"], row["variable"]) == (paper["task"], paper["tolerance"], variable)
                and row["strategy"].startswith(strategy)
            ]
            points = sum(row["points"] for row in some) / 100
            shares = [sum(row[kind] * row["points"] for row in some) / points for kind in ("latency", "throughput")]
            cell, printed = "{:.1f}, {:.1f}".format(*shares), paper.get(f"{strategy} {variable}")
            cells.append(cell + (f" ({printed[0]:g}, {printed[1]:g})" if printed else ""))
        lines.append((TASKS[paper["task"]], f"{100 * paper['tolerance']:g} %", *cells))
    table(["task", "tolerance", *(f"{strategy.upper()} {variable}" for strategy, variable in columns)], lines)


def exegpt_variance() -> None:
    """Print stage times and half of the width that holds 99 % of them, with and without dynamic adjustment."""

    def ranged(part: Row) -> str:
        return f"{number(part['mean_s'])} s ± {percent(part['range'])} [{span(part['ci'], 'relative')}]"

    lines = []
    for of in under("exegpt", "exegpt.variance.").values():
        if "prefill" in of:
            decode = of["decode"]
            threshold = "none" if of["threshold"] is None else percent(of["threshold"])
            tail = (percent(decode.get("range_at_its_place")), number(of["rps"]), number(of["latency_p99_s"]))
            lines.append((of["schedule"], threshold, ranged(of["prefill"]), ranged(decode), *tail))
    head = ["schedule", "adjustment threshold", "prefill", "decode iteration", "at one place of a phase"]
    table([*head, "requests/s", "P99 latency, s"], lines)


def exegpt_search() -> None:
    """Print search time and share of schedules estimated, by model."""
    choices, lines = details("exegpt", "exegpt.search_s_max")["choices"], []
    for model, title in MODELS.items():
        some = [choice for choice in choices if choice["model"] == model]
        if some:
            seconds = [choice["search_s"] for choice in some]
            points = [choice["points"] for choice in some]
            share = max(choice["points_share"] for choice in some)
            times = map(number, (statistics.median(seconds), max(seconds)))
            lines.append((title, len(some), *times, f"{min(points):,} to {max(points):,}", percent(share)))
    table(["model", "searches", "median, s", "slowest, s", "schedules", "estimated, at most"], lines)


def exegpt_regret() -> None:
    """Print the throughput lost against an exhaustive search."""
    lines = []
    for name, of in details("exegpt", "exegpt.regret_max")["questions"].items():
        counts = (of.get("chosen") or {}).items()
        chosen = ", ".join(f"{STRATEGIES[strategy]} {count}" for strategy, count in counts if count)
        strategies = ", ".join(STRATEGIES[strategy] for strategy in of.get("strategies") or ())
        tail = (f"{of['points']:,}", number(of.get("exhaustive_minutes")), percent(of["regret_max"]))
        lines.append((name, strategies or DASH, of["bounds"], chosen or DASH, *tail))
    head = ["model, task", "strategies", "bounds", "chosen", "schedules", "exhaustive search, min", "lost, at most"]
    table(head, lines)


def exegpt_live() -> None:
    """Print each RRA schedule as estimated, simulated and executed by a real engine."""
    names = ("throughput_rps", "latency_s", "decode_batch", "cycle_s")

    def seen(part: Row, key: str) -> str:
        if key not in part:
            return DASH
        mean, low, high = (number(value) for value in (part[key]["mean"], *part[key]["range"]))
        return mean if low == mean == high else f"{mean} ({low} to {high})"

    lines = []
    for name, of in details("exegpt", "exegpt.live.schedules")["by_name"].items():
        controls = of["expected"]["controls"]
        title = f"{name}: B_E = {controls['prefill_batch']}, N_D = {controls['decode_steps']}"
        lines.append((title, "estimate", *(number(of["expected"][key]) for key in names)))
        lines.append(("", "event engine", *(number(of["simulated"].get(key)) for key in names)))
        lines.append(("", "vLLM with our scheduler class", *(seen(of["measured"], key) for key in names)))
        lines.append(("", "gateway in front of vLLM", *(seen(of["measured_by_gateway"], key) for key in names)))
        stock = of["stock_at_equal_concurrency"]
        lines.append(("", "vLLM's scheduler, equal concurrency", *(seen(stock, key) for key in names)))
    table(["schedule", "from", "requests/s", "longest outputs, s", "decode batch", "cycle, s"], lines)


# docs/apps.md

APPS_FIGURES = {
    **{
        f"apps.{study}.{own}_over_{other}_{end}est": f"{study}: {end}est gain {of}over the {other}-heuristic"
        for study in ("ensembling", "routing", "chain", "mixed")
        for own, of in (("speedup", ""), ("samullm", "of Algorithm 1 "))
        for other, end in itertools.product(("max", "min"), ("low", "high"))
    },
    "apps.mixed.sequential_over_joint_lengthwise": "chain summary, then ensembling, over both together: median of five sizes",
    "apps.one_model_1000_speedup": "one model of 6B on eight GPUs over one, 1,000 requests, loading included",
    "apps.one_model_10000_speedup": "the same, 10,000 requests",
    "apps.better_over_greedy": "gain over Algorithm 1, geometric mean of all cases",
    "apps.better_over_greedy_lowest": "the smallest of them",
    "apps.gap_to_exact": "makespan above the best staged plan, mean",
    "apps.search_s": "search: 10 models, 8 GPUs, 10,000 requests",
    "apps.search_mixed_s": "search: mixed application, 500 documents",
    "apps.estimate_error_live": "makespan estimated against measured, sampled lengths",
    "apps.estimate_error_live_known": "the same, known lengths",
    "apps.runner_overhead_ms": "the runner's own time per task, of 10,000",
    "apps.drain_1e6_peak_mib": "peak memory to plan and drain 1,000,000 tasks",
}
BUSY = ", busy machine, not counted"
OTHERS = {"max": "max-heuristic", "min": "min-heuristic", "samullm": "Algorithm 1"}


def apps_study(study: str) -> None:
    """Print gains end to end of a study, then its cases."""
    lines = []
    plan, of_paper = "`app plan`", "Algorithm 1"
    pairs = [(of_paper, "samullm", other) for other in ("max", "min")] + [(plan, "speedup", other) for other in OTHERS]
    for own, name, other in pairs:
        found = [rows("apps").get(f"apps.{study}.{name}_over_{other}_{end}") for end in ("lowest", "highest")]
        paper = span([row["details"]["paper"] for row in found if row]) if own == of_paper else DASH
        lines.append((own, OTHERS[other], *(with_interval(row) for row in found), paper))
    table(["gain of", "over", "lowest", "highest", "the paper"], lines)
    times = (f"{name}, s" for name in (plan, "no overlap", "search", of_paper, OTHERS["max"], OTHERS["min"]))
    cases = []
    for case in details("apps", f"apps.{study}.cases")["cases"]:
        methods = case["methods"]
        wanted = (methods[name] for name in ("lengthwise", "samullm", "max", "min"))
        own, *others = (number(one["makespan_s"] + one["lead_s"]) for one in wanted)
        search = methods["lengthwise"]["search_s"]
        both = (number(methods["lengthwise"]["makespan_s"] + search), number(search))
        cases.append((case["case"], number(case["tasks"]), own, *both, *others, f"{case['estimate_error']:+.1%}"))
    table(["case", "tasks", *times, "error of the estimate"], cases)


def apps_ablation() -> None:
    """Print the effect of preemption and of known or different lengths."""
    wanted = {
        "no_preemption_over_ours": "Algorithm 1 without preemption, over `app plan`",
        "no_preemption_of_greedy": "Algorithm 1: without over with preemption",
        "no_preemption_of_min": "min-heuristic: without over with preemption",
        "known_over_unknown": "planned with unknown over planned with known lengths",
        "other_set_error": "worst error if outputs are 0.7 to 1.3 times as long as planned",
    }
    lines = []
    for name, title in wanted.items():
        found = [rows("apps").get(f"apps.{name}_{limit}") for limit in (256, 512)]
        paper = next((row["details"].get("paper") for row in found if row), DASH)
        lines.append((title, *(with_interval(row) for row in found), paper))
    table(["ratio", "limit 256", "limit 512", "the paper"], lines)


def apps_optima() -> None:
    """Print distances of plans to exact optima."""
    wanted = {
        "apps.gap_to_exact": "`app plan`, to the best staged plan",
        "apps.gap_to_exact_greedy": "Algorithm 1, to the best staged plan",
        "apps.gap_to_unpreempted_routing": "`app plan`, to the best plan without preemption: routing",
        "apps.gap_to_unpreempted_ensembling": "`app plan`, to the best plan without preemption: ensembling, 1,000 requests",
    }
    lines = []
    for name, title in wanted.items():
        of = details("apps", name)
        proof = "proved"
        if not of.get("proved", True):
            proof = f"not proved: at least {of['bound_s']:.3g} s, best found {of['optimum_s']:.3g} s"
        lines.append((title, with_interval(rows("apps").get(name), "relative"), proof))
    table(["distance of", "mean [range]", "optimum"], lines)


def apps_live() -> None:
    """Print makespans estimated and measured on real engines."""
    lines = []
    for name, lengths in (("apps.estimate_error_live", "sampled"), ("apps.estimate_error_live_known", "known")):
        for case in details("apps", name)["cases"]:
            plan = "; ".join(" + ".join(stage) for stage in case["plan"])
            half = case.get("estimate_half_width_s") or 0.0
            estimate = number(case["estimate_s"]) + (f" ± {number(half)}" if half > 1e-6 else "")
            counted = list(zip(case["measured_s"], case["errors"], strict=True))
            for title, shown, runs in ((lengths, plan, counted), (f"{lengths}{BUSY}", "the same", case.get("busy"))):
                if runs:
                    measured = ", ".join(number(seconds) for seconds, _ in runs)
                    errors = ", ".join(f"{error:+.1%}" for _, error in runs)
                    lines.append((title, case["cores"], shown, estimate, measured, errors))
    table(["lengths", "cores", "plan: models by stage", "estimated, s", "measured, s", "error"], lines)


# docs/gateway.md

GATEWAY_FIGURES = {
    "gateway.added_p50_ms": "latency added to one request, median",
    "gateway.rps": "requests per second without streaming, one core",
    "gateway.cpu_us_per_token": "CPU per streamed token, paced streams",
    "gateway.cpu_us_per_token_back_to_back": "the same, tokens back to back",
    "gateway.picker_decision_us": "CPU of a request's passage through the picker, without gRPC",
    "gateway.envoy.rps": "requests per second behind Envoy, the picker on one core",
    "gateway.envoy.gap_closed": "share of the gap in mean JCT closed behind Envoy, emulated engines in real time",
    "gateway.rss_growth_mib": "memory growth over 100,000 requests",
    "gateway.live.gap_closed": "share of the gap in mean JCT between FCFS and known lengths, real engines",
    "gateway.live.p99_over_oracle": "P99 over that of known lengths",
    "gateway.live.simulated_in_interval": "share of results whose interval holds the simulated value",
    "gateway.live.simulated_within": "the same shuffle by shuffle, which is stricter",
    "gateway.emulated.gap_closed": "share of the gap closed, emulated engines",
    "gateway.emulated.p99_over_oracle": "P99 over that of known lengths",
    "gateway.emulated.simulated_in_interval": "share of results whose interval holds the simulated value",
    "gateway.emulated.simulated_within": "the same shuffle by shuffle, which is stricter",
    "gateway.scale_50_over_10": "peak rate of 50 engines over that of 10",
    "gateway.fair.max_service_gap_over_bound": "largest gap of service between backlogged tenants, over VTC's bound",
    "gateway.rerank_10k_ms": "10,000 waiting requests reordered",
    "gateway.shared_queue_jct_ratio": "mean JCT of 4 gateways with a shared queue over that of one, at load 0.9 or 0.97",
    "gateway.endurance.lost": "requests lost, doubled or wrong, and leaks, in an hour with a fault every minute",
    "gateway.endurance.rss_mib_per_hour": "growth of memory in such a run",
}


def gateway_overhead() -> None:
    """Print latency and CPU of the gateway and of other gateways."""
    others = {
        "gateway": "**lengthwise**",
        "gateway.envoy": "lengthwise as picker",
        "peer.envoy": "Envoy without a picker",
        "peer.vllm_router": "vllm-router (Rust)",
        "peer.smg": "smg (Rust)",
        "peer.sglang_router": "sglang-router (Rust)",
        "peer.litellm": "LiteLLM",
    }
    columns = {
        "added_p50_ms": "added p50, ms",
        "ttft_p50_ms": "TTFT p50, ms",
        "rps": "requests/s",
        "cpu_us_per_request": "CPU per request, us",
        "cpu_us_per_token": "CPU per token, paced, us",
        "cpu_us_per_token_back_to_back": "back to back, us",
        "machine_pace": "reference loop, us",
        "machine_pace_io": "reference I/O, us",
    }
    lines = []
    for prefix, title in others.items():
        found = [rows("gateway").get(f"{prefix}.{column}") for column in columns]
        date = max((row or {}).get("saved_at") or "" for row in found)[:10]
        lines.append((title, *(number(row["value"]) if row else DASH for row in found), date))
    table(["gateway", *columns.values(), "measured"], lines)


def gateway_policies(engines: str) -> None:
    """Print the gain of each policy in front of ``engines`` ("live" or "emulated"), measured and simulated."""

    def simulated(part: Row) -> str:
        if part.get("simulated") is None:
            return DASH
        text = number(part["simulated"]) + (f" [{span(part['simulated_ci'])}]" if part.get("simulated_ci") else "")
        return text + (f", {part['verdict']}" if part.get("verdict") else "")

    of, lines = details("gateway", f"gateway.{engines}.gap_closed"), []
    for policy, results in of["policies"].items():
        cells = []
        for metric in ("gap_closed", "p99_over_oracle", "mean_over_fcfs"):
            cells += [with_interval(results[metric]), simulated(results[metric])]
        some = [cell["policies"][policy] for cell in of["cells"] if policy in cell["policies"]]
        requests = sum(one.get("requests", 0) for one in some)
        preempted = number(sum(one.get("preemptions", 0) for one in some) / requests) if requests else DASH
        lines.append((policy, *cells, preempted))
    head = [part for of in ("gap closed", "P99 over the oracle's", "mean JCT over FCFS") for part in (of, "simulated")]
    table(["policy", *head, "preemptions per request"], lines)


def gateway_cells() -> None:
    """Print mean and P99 JCT of each policy, by load and batch, with real engines."""
    cells = details("gateway", "gateway.live.gap_closed")["cells"]
    names = list(cells[0]["policies"])
    lines = []
    for cell in cells:
        shown = [cell["policies"][name] for name in names]
        noise = "no gap" if cell["policies"]["oracle"]["mean_s"] >= cell["policies"]["fcfs"]["mean_s"] else ""
        pairs = [f"{number(one['mean_s'])}, {number(one['p99_s'])}" for one in shown]
        lines.append((f"{number(cell['load'])}x", cell["batch"], *pairs, noise))
    table(["load", "batch", *(f"{name}: mean, P99 s" for name in names), ""], lines)


def gateway_faults() -> None:
    """Print what became of requests in each fault of the endurance run."""
    lines = []
    for one in details("gateway", "gateway.endurance.lost")["faults"]:
        states = [one[name].items() for name in ("at_engines", "waiting", "new")]
        cells = [", ".join(f"{count:,} {outcome}" for outcome, count in state) or DASH for state in states]
        seconds = [f"{number(one['held_s'])} s", " s, at most ".join(map(number, one["recovered_s"])) + " s"]
        lines.append((one["fault"], one["times"], *cells, *seconds))
    head = ["fault", "times", "requests at engines", "waiting requests", "new requests", "lasts", "disturbs until"]
    table(head, lines)


def gateway_scale() -> None:
    """Print the peak rate of the gateway by the number of engines."""
    peaks = [(count, rows("gateway")[f"gateway.peak_rps_{count}"]["value"]) for count in (10, 50)]
    table(["engines", "peak rate, requests/s"], ((count, number(rate)) for count, rate in peaks))


# docs/lengths.md

MULTIBIN_ERRORS = {
    "throughput": "throughput of one busy server against Theorem 4.2",
    "latency": "latency with infinitely many servers at 10 requests a second against Lemma 5.1",
    "uniform_saturation": "throughput by request rate, 0.05 to 1.5 of the limit (Figure 3), bins 1 to 32, batch 8",
    "robustness": "throughput under wrong bins (Figure 8) against the exact mixture, bins 2 to 32",
}
ELIS_BOUNDS = {"within 5 % of the oracle's P99": "p99_over_oracle", "within 15 % of FCFS' P99": "p99_over_fcfs"}
RATES = {"uniform": "uniform, 1 server", "exponential": "exponential, 1 server", "gsm8k": "GSM8K, 8 servers"}
SCORES = {
    "tau": "Kendall's tau, pooled",
    "tau_within": "tau within a model",
    "log_r2": "R2 of log tokens",
    "r2": "R2 of the mean",
    "mae": "mean absolute error, tokens",
    "pinball": "pinball loss, tokens",
    "coverage90": "inside the 90 % interval",
}
MEMBERS = {"lexical": "`Lexical`", "encoder": "`Encoder`", "both": "both"}


def whole_percent(share: float) -> str:
    """Return a share in whole percent."""
    return f"{100 * share:.0f} %"


def multibin_errors() -> None:
    """Print the largest errors of simulations against theory."""
    errors = {name: rows("lengths")[f"multibin.{name}_error_max"]["value"] for name in MULTIBIN_ERRORS}
    lines = ((title, f"{100 * errors[name]:.2f} %") for name, title in MULTIBIN_ERRORS.items())
    table(["figure", "largest error over all combinations"], lines)


def multibin_robustness() -> None:
    """Print gains over one bin where neighbouring bins are taken by mistake."""
    limit = details("lengths", "multibin.uniform_saturation_error_max")["curves"]
    curves = details("lengths", "multibin.robustness_error_max")["curves"]
    head = ["bins", "known", *(f"p = {one['p']:g}" for one in next(iter(curves.values())))]
    known = {k: whole_percent(limit[k]["limit_rps"] / limit["1"]["limit_rps"] - 1) for k in curves}
    table(head, ((k, known[k], *(whole_percent(one["gain"]) for one in curve)) for k, curve in curves.items()))


def multibin_rates() -> None:
    """Print the limit of throughput and mean latencies by number of bins."""
    lines = []
    for name, title in RATES.items():
        for k, of in details("lengths", f"multibin.{name}_saturation_error_max")["curves"].items():
            cells = (f"{of[column]:.3g}" for column in ("limit_rps", "least_s", "busy_s"))
            lines.append((title if k == "1" else "", k, *cells))
    table(["times", "bins", "limit, requests/s", "least latency, s", "latency at 0.95 of one bin's limit, s"], lines)


def multibin_outputs() -> None:
    """Print gains over one bin for recorded outputs."""
    bins, lines = ("2", "4", "8", "32"), []
    for model, of in details("lengths", "multibin.gain_32_bins")["by_model"].items():
        pairs = (f"{100 * of['gain'][k]['equal_mass']:.0f} / {whole_percent(of['gain'][k]['learned'])}" for k in bins)
        lines.append((model, *pairs, whole_percent(of["infinitely_many_bins"])))
    table(["outputs of", *(f"{k} bins" for k in bins), "infinitely many"], lines)


def multibin_predictor() -> None:
    """Print gains with known and with wrongly predicted bins."""
    titles = {"gsm8k": "GSM8K, Phi-3.5-mini", "lmsys": "LMSYS chats cut at 512 tokens, Vicuna-13B"}
    lines = []
    for name, title in titles.items():
        of = details("lengths", "multibin.kept_by_bert_4_bins")[name]
        for k in ("2", "4", "8"):
            gains = (whole_percent(of[k][column]) for column in ("known", "neighbours first", "spread evenly"))
            lines.append((title if k == "2" else "", k, *gains))
    table(["lengths, equal masses", "bins", "known", "errors into neighboring bins", "errors into any bin"], lines)


def elis_predictors() -> None:
    """Print the share of the gap that each predictor closes."""
    unbounded, lines = ("no preemption", "preemption", "ELIS ISRTF"), []
    for name, of in details("lengths", "elis.by_predictor").items():
        every = {one["policy"]: one for one in details("lengths", "elis.frontier")[name]}
        bounded = (f"{of[one]['gap_closed']:.2f} ({of[one][tail]:.2f})" for one, tail in ELIS_BOUNDS.items())
        lines.append((name, *bounded, *(f"{every[one]['gap_closed']:.2f}" for one in unbounded)))
    heads = ("no preemption, no bound", "preemption, no bound", "ELIS' ISRTF")
    table(["predictor", *(f"gap closed {one}" for one in ELIS_BOUNDS), *heads], lines)


def elis_policies() -> None:
    """Print the gap that each policy closes, and its tail."""
    lines, frontier = [], details("lengths", "elis.frontier")
    for of, by_default in zip(frontier["ensemble"], frontier["default"], strict=True):
        shown = (of["gap_closed"], of["p99_over_fcfs"], of["p99_over_oracle"], by_default["gap_closed"])
        lines.append((of["policy"], *(f"{value:.2f}" for value in shown)))
    table(["policy", "gap closed, ensemble", "P99 / FCFS'", "P99 / oracle's", "gap closed, default"], lines)


def elis_table6() -> None:
    """Print the batch sizes at which preemption begins, as in Table 6 of the paper."""
    lines = []
    for model, of in details("lengths", "elis.preemption_batch")["by_model"].items():
        batches = (f"{of[key] or 'above 250'} ({of[f'{key}_tokens_mean']:.0f})" for key in ("batch", "batch_scaled"))
        lines.append((model, whole_percent(of["memory"]), f"{of['kv_tokens']:,}", of["paper"], *batches))
    head = ["model", "memory", "KV cache, tokens", "batch, paper", "batch, here (tokens of a request)"]
    table([*head, "batch, lengths scaled to Table 4"], lines)


def elis_table5() -> None:
    """Print mean JCT as in Table 5 of the paper."""
    found = {}
    for name, of in details("lengths", "elis.table5").items():
        model, load = name.split()
        found.setdefault(model, {})[load] = " / ".join(f"{of[key]:.3g}" for key in ("FCFS", "ISRTF", "own", "SJF"))
    table(["", "1x", "3x", "5x"], ((model, *of.values()) for model, of in found.items()))


def predict_scores(name: str) -> None:
    """Print the scores of predictors in distribution ("in_distribution") or on other prompts ("apart")."""
    of, lines = details("lengths", f"predict.{name}"), []
    for score, title in SCORES.items():
        cells = []
        for member in MEMBERS:
            value, half = of[member][score]["value"], of[member][score].get("half_width")
            digits = 1 if score in ("mae", "pinball") else 3
            cells.append(f"{value:.{digits}f}" + (f" ± {half:.{digits}f}" if half else ""))
        lines.append((title, *cells))
    table(["score", *MEMBERS.values()], lines)


def predict_windows() -> None:
    """Print scores of both predictors as tokens arrive."""
    windows = details("lengths", "predict.r2_by_window")["windows"]
    digits = {"mae_all": 0, "mae_running": 0, "r2_all": 2, "r2_running": 2, "tau_running": 2, "coverage90": 2}
    lines = []
    for one, other in zip(windows["encoder"], windows["lexical"], strict=True):
        if one["tokens"] % 100 == 0 or one["tokens"] < 200:
            cells = (f"{one[key]:.{n}f} / {other[key]:.{n}f}" for key, n in digits.items())
            lines.append((one["tokens"], f"{one['running']:,}", *cells))
    heads = ("error of the total, tokens, all requests", "error, those running", "R2, all requests")
    table(["tokens so far", "running", *heads, "R2, those running", "tau, those running", "inside 90 %"], lines)


def predict_conditioning() -> None:
    """Print scores of the lexical predictor as tokens arrive, and those of its first prediction conditioned on them."""
    lines = [
        (w["tokens"], f"{w['running']:,}", *(f"{w[key]:.0f}" for key in ("mae_all", "mae_all_conditioned", "mae_running")),
         *(f"{w[key]:.2f}" for key in ("r2_all", "r2_running", "tau_running", "coverage90")))
        for w in details("lengths", "predict.lexical_r2_by_window")["windows"]
    ]  # fmt: skip
    errors = ("error of the total, tokens, all requests", "by survival alone", "error, those running")
    rest = ("R2, all requests", "R2, those running", "tau, those running", "inside 90 %")
    table(["tokens so far", "running", *errors, *rest], lines)


def predict_mathematics() -> None:
    """Print order and coverage of the shipped predictor by set, and the share found to be mathematics."""
    lines = []
    for name, of in details("lengths", "predict.mathematics")["by_set"].items():
        shares = (whole_percent(of[key]) for key in ("coverage90", "detected"))
        lines.append((name, of["prompts"], f"{of['tau_within']:.2f}", *shares))
    table(["prompts of", "number", "tau within a model", "inside 90 %", "counted as mathematics"], lines)


def rerank_speeds() -> None:
    """Print simulation speeds relative to FCFS."""
    found = {}
    for name in ("lengths.rerank_relative_speed", "lengths.rerank_overload_relative_speed"):
        for key, of in details("lengths", name)["by_scheduler"].items():
            scheduler, load = key.split(", ")
            found.setdefault(load, {})[scheduler] = f"{of['relative_speed']:.2f}"
    schedulers = list(next(iter(found.values())))
    heads = (name.title() if name == "gittins" else name.upper() for name in schedulers)
    table(["load", *heads], ((load, *(of[s] for s in schedulers)) for load, of in found.items()))


def papers(name: str) -> None:
    """Print the parts of a paper: where they are implemented, the paper's number, ours, and the verdict."""
    latest = sorted(path.stem for path in RESULTS.glob("*.json") if not path.stem.endswith("-earlier"))
    figures = {figure: row for file in latest for figure, row in rows(file).items()}
    lines = []
    for part in tomllib.loads((Path(__file__).parent / "papers.toml").read_text("utf-8"))["row"]:
        places = ", ".join(f"[{Path(path).name}](../{path})" for path in part["where"])
        command = f"`{part['command']}`" if "command" in part else ""
        measured = number(row["value"], row["unit"]) if (row := figures.get(part.get("figure"))) else ""
        value = f"{measured} {part.get('ours', '')}".strip()
        cells = (part["item"], part["what"], places, command, part["stated"], value, part["verdict"])
        lines += [[cell or DASH for cell in cells]] * (part["paper"] == name)
    table(("part", "", "implemented in", "command", "paper", "ours", "verdict"), lines)
