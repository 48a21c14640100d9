"""Parts of every campaign: devices, settings, requests, engines measured in turns, simulations, errors and rows."""

import contextlib
import itertools
import math
import statistics
import time
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import _harness
import numpy as np
from _intervals import Interval, exact_interval, of_repeats, of_run, sides

from lengthwise import Deployment, EngineLimits, Status, Workload, catalog, deploy, simulate
from lengthwise.cost.model_error import perturbed_deployments
from lengthwise.measure.calibration import Calibration, Iterations, calibrate
from lengthwise.metrics.columns import request_column
from lengthwise.schema.cost_tables import CostTables, PartError
from lengthwise.schema.errors import UnknownNameError
from lengthwise.schema.records import Records, RunResult, shape_facts
from lengthwise.schema.specs import GpuSpec

LOADS = {"static": None, "half": 0.5, "high": 0.85}
"""All at once, or Poisson arrivals at a share of the measured capacity."""
LEARNT = ("static", "half")  # loads that a calibration is fitted to
METRICS = {
    "jct_p50": ("jct_s", 0.5, 0.10), "jct_p95": ("jct_s", 0.95, 0.10), "ttft_p50": ("ttft_s", 0.5, 0.10),
    "ttft_p95": ("ttft_s", 0.95, 0.10), "tpot_p50": ("tpot_s", 0.5, 0.05),
    "normalized_latency_p50": ("normalized_latency_s", 0.5, 0.09),
}  # fmt: skip
"""Name: column, quantile, aim. Latency per output token is Vidur's own column, and the aim its error in it."""
HOLDOUT = 0.3  # share of the requests that a calibration holds out where no run is
BLOCK, WARM_UP = 32, 32
GENERATIONS = 8
"""Capacity run: requests by max_num_seqs. In simulation, 3 give a fifth more than a long run has, 8 a twentieth."""
_LENGTH_DRAWS = 10_000
_ARRIVALS_SHARE = 0.7
"""Of the time for a run, the part in which its requests arrive; in the rest the last of them finish."""


@dataclass(frozen=True)
class Setting:
    name: str
    seqs: int
    step_tokens: int

    def deployment(
        self, config: str, gpu: GpuSpec, max_model_len: int, blocks: int, dtype: str = "float32"
    ) -> Deployment:
        sizes = {"max_num_seqs": self.seqs, "max_num_batched_tokens": self.step_tokens, "block_size": BLOCK}
        kinds = {"weight_dtype": dtype, "kv_dtype": dtype, "max_model_len": max_model_len}
        return deploy(config, gpu, limits=EngineLimits(**sizes, **kinds, watermark=0.0), num_blocks=blocks)


@dataclass(frozen=True)
class Run:
    setting: str
    load: str
    repeat: int
    measured: RunResult

    @property
    def name(self) -> str:
        return f"{self.setting}-{self.load}-{self.repeat}"

    @property
    def of_load(self) -> str:
        return f"{self.setting}-{self.load}"


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths of prompts and outputs: median, sigma, least and most."""

    prompt: tuple[float, float, int, int] = (64, 0.7, 8, 500)
    output: tuple[float, float, int, int] = (24, 0.6, 4, 120)

    def workload(self, n: int, seed: int, rate_rps: float | None, name: str = "") -> Workload:
        """Return ``n`` requests, all at once without a rate, else as a Poisson process."""
        rng = np.random.default_rng(seed)
        prompt, output = (
            np.clip(rng.lognormal(np.log(median), sigma, n), least, most).astype(np.int64)
            for median, sigma, least, most in (self.prompt, self.output)
        )
        arrival_s = np.zeros(n) if rate_rps is None else np.cumsum(rng.exponential(1.0, n)) / rate_rps
        return Workload(arrival_s - arrival_s[0], prompt, output, name=name)

    def arriving(
        self, tokens_s: float, seconds: float, seed: int, name: str, *, least: int = 80, most: int = 600
    ) -> Workload:
        """Return Poisson arrivals of ``tokens_s`` output tokens per second, to which gaps are stretched."""
        mean_tokens = self.workload(_LENGTH_DRAWS, 0, None).output_tokens.mean()
        n = min(most, max(least, round(tokens_s / mean_tokens * seconds)))
        made = self.workload(n, seed, 1.0, name)
        span_s = made.output_tokens.mean() * (n - 1) / tokens_s
        return replace(made, arrival_s=made.arrival_s * (span_s / made.arrival_s[-1]))


def capacity_tokens_s(measured: RunResult) -> float:
    """Return output tokens per second while requests wait: from the first that finishes to the last that starts.

    Requests must arrive at once, many times max_num_seqs of them; raises ValueError if none waited. A window of
    finished requests contains the short ones, which gave up to 44 % more.
    """
    r, tokens = measured.records.requests, measured.tokens
    assert tokens is not None, "the engine records token times"
    low_s, high_s = float(np.nanmin(r.finished_s)), float(np.nanmax(r.first_token_s))
    if high_s <= low_s:
        raise ValueError("all requests started before one finished: there must be more than max_num_seqs")
    within = (tokens.at_s > low_s) & (tokens.at_s <= high_s)
    return float(tokens.tokens[within].sum() / (high_s - low_s))


@dataclass
class Turn:
    """One setting's engine and the requests of each load, the same at every repeat.

    ``static_s`` is about the duration of the load of all requests at once, ``seconds`` that of arrivals under the
    others, of at least ``least`` requests; ``named`` receives each finished run, ``left_s`` is the time left.
    """

    setting: Setting
    bench: Callable[[Workload], RunResult]
    named: Callable[[Run], None]
    lengths: Lengths
    static_s: float
    seconds: float
    least: int = 80
    left_s: Callable[[], float] = lambda: math.inf
    workloads: dict[str, Workload] = field(default_factory=dict)
    duration_s: dict[str, float] = field(default_factory=dict)
    capacity_tokens_s: float = 0.0

    def warm(self) -> None:
        """Warm up, size the static load by a second short run, and measure the capacity."""
        for _ in range(2):  # the first is the engine's own warm-up
            first = self.bench(self.lengths.workload(WARM_UP, 0, None, "warm-up"))
        rate_rps = WARM_UP / float(np.nanmax(first.records.requests.finished_s))
        n = min(500, max(60, round(rate_rps * min(self.static_s, self.left_s() / 6))))
        self.workloads["static"] = self.lengths.workload(n, 1, None, "static")
        full = self.bench(self.lengths.workload(GENERATIONS * self.setting.seqs, 2, None, "capacity"))
        self.capacity_tokens_s = capacity_tokens_s(full)

    def run(self, load: str, repeat: int) -> Run:
        """Measure the load once; raise TimeoutError: the run would not end within the time left."""
        name, at = f"{self.setting.name}-{load}-{repeat}", list(LOADS).index(load)
        if load not in self.workloads:  # Poisson loads are shares of the capacity; first runs share the time
            window_s = min(self.seconds, _ARRIVALS_SHARE * self.left_s() / (len(LOADS) - at))
            tokens_s = LOADS[load] * self.capacity_tokens_s
            self.workloads[load] = self.lengths.arriving(tokens_s, window_s, 10 + at, load, least=self.least)
        need_s = self.duration_s.get(load, float(self.workloads[load].arrival_s[-1]))
        if need_s > self.left_s():
            raise TimeoutError(f"{name} omitted: {need_s:.0f} s are needed, {self.left_s():.0f} s are left")
        started_s = time.monotonic()
        measured = self.bench(self.workloads[load])
        self.duration_s[load] = time.monotonic() - started_s
        known = {**measured.metadata, "capacity_tokens_s": round(self.capacity_tokens_s, 1)}
        run = Run(self.setting.name, load, repeat, replace(measured, metadata=known))
        self.named(run)
        return run


def in_turns(turns: Sequence[Turn], repeats: int, report: Callable[[str], None]) -> None:
    """Measure every load of every setting in turns, so that a change of the machine's speed affects all of them."""
    for turn in turns:
        turn.warm()
    for repeat, load, turn in itertools.product(range(repeats), LOADS, turns):
        try:
            run = turn.run(load, repeat)
        except TimeoutError as error:
            report(str(error))
            continue
        found = ", ".join(f"{name} {1000 * s:.1f} ms" for name, s in quantiles(run.measured.records).items())
        report(f"{run.name}: {len(run.measured.workload)} requests, {found}")


def quantiles(records: Records) -> dict[str, float]:
    done = records.requests.status == Status.FINISHED
    found = {}
    for name, (column, q, _) in METRICS.items():
        value_s = float(np.nanquantile(request_column(records.requests, column)[done], q))
        found[name] = max(value_s, 1e-6)  # a starved client reads a complete answer at once: no time between its tokens
    return found


def simulated(deployment: Deployment, run: Run) -> Records:
    """Simulate the run's requests on the deployment, with their measured lengths."""
    workload, r = run.measured.workload, run.measured.records.requests
    arrival_s = np.zeros(len(workload)) if workload.concurrency else r.arrival_s - np.nanmin(r.arrival_s)
    lengths = {"prompt_tokens": r.prompt_tokens, "output_tokens": np.maximum(1, r.output_tokens)}
    return simulate(replace(workload, arrival_s=arrival_s, **lengths), deployment)


def errors(deployment: Deployment, tables: CostTables, runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    priced = replace(deployment, cost=tables)
    found = {}
    for run in runs:
        predicted, real = quantiles(simulated(priced, run)), quantiles(run.measured.records)
        found[run.name] = {metric: predicted[metric] / real[metric] - 1 for metric in METRICS}
    return found


def calibrated(
    learnt: Sequence[Run], held_out: Sequence[Run], deployment: Deployment, iterations: Iterations | None = None
) -> Calibration:
    """Calibrate to some runs and score on others, or without any on last requests; warnings do not stop it."""

    def named(run: Run) -> RunResult:
        return replace(run.measured, records=replace(run.measured.records, name=run.name))

    holdout = list(map(named, held_out)) or HOLDOUT
    return calibrate([*map(named, learnt)], deployment, holdout=holdout, iterations=iterations, allow=("warnings",))


def spread(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Return by load and metric the largest distance of a repeat from the median of its load: the floor of errors."""
    found: dict[str, dict[str, float]] = {}
    for load, some in _harness.grouped(runs, attrgetter("of_load")).items():
        repeats_s = np.array([list(quantiles(run.measured.records).values()) for run in some])
        off = np.abs(repeats_s / np.median(repeats_s, axis=0) - 1).max(axis=0)
        found[load] = dict(zip(METRICS, off.tolist(), strict=True))
    return found


def iterations_of(folder: Path, run: str) -> Path:
    return folder / f"{run}.iterations.log"


def _device(name: str, flops: dict[str, float], memory_bytes: float, bandwidth: float, source: str) -> GpuSpec:
    price = {"price_per_hour_usd": 0.1, "price_source": "none: a local device"}
    return GpuSpec(name, flops, memory_bytes, bandwidth, tdp_w=10.0, idle_w=1.0, source=source, **price)


def this_thread() -> GpuSpec:
    """Return one thread of this processor as a device: peaks that NumPy reaches."""
    code = (
        "import json, timeit, numpy as np\n"
        "a = np.ones((1024, 1024), np.float32); b = np.ones(2**26, np.float32); c = np.empty_like(b)\n"
        "best = lambda f: min(timeit.repeat(f, number=1, repeat=7))\n"
        "print(json.dumps([2 * 1024**3 / best(lambda: a @ a), 2 * b.nbytes / best(lambda: np.copyto(c, b))]))"
    )
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    flops, bandwidth = _harness.fresh_process(code, **one)
    source = "measured with NumPy: a product of 1024 x 1024, a copy of 256 MiB"
    return replace(_device(_harness.machine()["cpu"], {"float32": flops}, 16 * 2**30, bandwidth, source), is_cpu=True)


def device_of(device: str, dtype: str) -> GpuSpec:
    """Return one thread of this processor, or the GPU: the catalog's, else one of the peaks that torch reaches."""
    if device == "cpu":
        return this_thread()
    import torch

    name = torch.cuda.get_device_name()
    with contextlib.suppress(UnknownNameError):
        return catalog.gpu(name)
    a = torch.ones(8192, 8192, dtype=getattr(torch, dtype), device=device)
    b = torch.ones(2**29, dtype=torch.float32, device=device)
    c = torch.empty_like(b)

    def best_s(work: Callable[[], Any]) -> float:
        return min(timeit.repeat(lambda: (work(), torch.cuda.synchronize()), number=1, repeat=7))

    memory_bytes = torch.cuda.get_device_properties(0).total_memory
    flops, bandwidth = {dtype: 2 * 8192**3 / best_s(lambda: a @ a)}, 2 * b.nbytes / best_s(lambda: c.copy_(b))
    source = "measured with torch: a product of 8192 x 8192, a copy of 2 GiB"
    return _device(name, flops, memory_bytes, bandwidth, source)


def machine_of(gpu: GpuSpec, dtype: str) -> dict[str, Any]:
    """Return the metadata of the machine and the peaks of the device."""
    peaks = {f"{dtype}_gflops": gpu.peak_flops.get(dtype, math.nan), "copy_gb_per_s": gpu.bandwidth_bytes_per_s}
    return {**_harness.machine(), "device": gpu.name} | {name: round(peak / 1e9, 1) for name, peak in peaks.items()}


def facts_of(deployment: Deployment) -> dict[str, Any]:
    """Return metadata of the measured deployment for records, as ``lengthwise bench`` with a scenario records them."""
    model, parallel, limits = deployment.model, deployment.parallel, deployment.limits
    metadata = {"model": model.name, "model_shape": shape_facts(model), "gpu": deployment.gpu.name}
    metadata |= {name: getattr(parallel, name) for name in ("gpus", "tp", "pp", "replicas")}
    metadata |= {name: getattr(limits, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
    return metadata | {"max_model_len": deployment.max_model_len, "weight_dtype": limits.weight_dtype or model.dtype}


COUNTED = tuple(name for name in METRICS if name != "normalized_latency_p50")
"""Latency per token follows from JCT and TPOT: counted as well it would make chance look smaller than it is."""
LEVEL, DRAWS = 0.95, 64


def rows(
    prefix: str,
    of_tables: Mapping[str, Mapping[str, Mapping[str, float]]],
    runs: Sequence[Run],
    held_out: Sequence[Run],
    answers: Mapping[str, Records],
) -> dict[str, dict[str, Any]]:
    """Return a row per metric: the median over held-out loads of the absolute error, against medians of repeats.

    ``of_tables``: errors by "calibrated", "profile", "roofline", then by run, then by metric; ``answers``: records of
    the calibrated simulation by run, for the interval.
    """
    floor, found = spread(runs), {}
    for metric, (column, q, target) in METRICS.items():
        each = {kind: {run: of[metric] for run, of in by_run.items()} for kind, by_run in of_tables.items()}
        loads = {kind: by_load(of, held_out, metric) for kind, of in each.items()}
        value = statistics.median(map(abs, loads["calibrated"].values()))
        draws: dict[str, list[Any]] = {}
        for seed, run in enumerate(held_out):
            both = (finished_seconds(of, column) for of in (run.measured.records, answers[run.name]))
            draws.setdefault(run.of_load, []).append(of_run(*both, q, seed))
        ends = of_repeats(draws, value)
        details: dict[str, Any] = {
            "median_of": {kind: round(statistics.median(map(abs, of.values())), 4) for kind, of in loads.items()},
            "of_single_runs": round(statistics.median(abs(each["calibrated"][r.name]) for r in held_out), 4),
            "signed_by_load": {
                load: {kind: round(of[load], 4) for kind, of in loads.items()}
                | {"repeats_spread": round(floor[load][metric], 4)}
                for load in loads["calibrated"]
            },
            "signed_by_run": {
                run.name: {kind: round(of[run.name], 4) for kind, of in each.items()}
                | {"measured_s": round(quantiles(run.measured.records)[metric], 5)}
                for run in runs
            },
        }
        row = {"value": round(value, 4), "unit": "relative", "target": target, "better": "lower", "details": details}
        found[f"{prefix}.{metric}_error"] = row | {"ci": ends and [round(end, 4) for end in ends]}
    return found


def by_load(errors: Mapping[str, float], held_out: Sequence[Run], metric: str) -> dict[str, float]:
    """Return the error of each load: medians of its repeats, simulated against measured."""
    found = {}
    for load, runs in _harness.grouped(held_out, attrgetter("of_load")).items():
        real = {run.name: quantiles(run.measured.records)[metric] for run in runs}
        predicted = statistics.median((1 + errors[name]) * measured for name, measured in real.items())
        found[load] = predicted / statistics.median(real.values()) - 1
    return found


def finished_seconds(records: Records, column: str) -> Any:
    """Return [n] seconds of a metric; NaN of requests that did not finish."""
    seconds = np.maximum(request_column(records.requests, column), 1e-6)
    return np.where(records.requests.status == Status.FINISHED, seconds, np.nan)


def calibration_row(
    found: Calibration, duration_s: float, learnt: Sequence[Run], runs: Sequence[Run], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the row of the calibration: its duration, parameters and scores, and the warnings of runs."""
    details = {"learnt_of": [run.name for run in learnt], "client_s": found.client_s, "notes": list(found.notes)}
    details["requests"] = sum(len(run.measured.workload) for run in learnt)
    details |= {name: list(map(asdict, getattr(found, name))) for name in ("parameters", "scores")}
    details["warnings"] = {run.name: list(run.measured.warnings) for run in runs if run.measured.warnings}
    return {"value": round(duration_s, 2), "unit": "s", "details": {**details, **about}}


Intervals = Mapping[str, Mapping[str, Interval]]  # by run or load, then by metric


def coverage_row(
    priced: Mapping[str, Deployment], blind: Sequence[PartError], held_out: Sequence[Run]
) -> dict[str, Any]:
    """Return the share of held-out medians within their 95 % intervals, with its own exact interval.

    The model's own error (draws of ``blind``) and sampling (blocks drawn again) combine in logs as if independent.
    """
    unseen = {}
    for name, d in priced.items():
        evidence = replace(d.cost.evidence, errors=tuple(blind))
        unseen[name] = replace(d, cost=replace(d.cost, evidence=evidence))
    loads = medians({run.name: intervals_of(unseen[run.setting], run, DRAWS, LEVEL) for run in held_out})
    found = counted(loads)
    details = found | {"of_loads": len(loads), "level": LEVEL, "draws": DRAWS}
    ratios = {load: [one.high_s / one.low_s for one in of.values()] for load, of in loads.items()}
    details["ends_apart"] = {load: round(statistics.median(of), 2) for load, of in ratios.items()}
    details["each"] = {load: {name: one.rounded() for name, one in of.items()} for load, of in loads.items()}
    ci = [round(end, 4) for end in exact_interval(found["satisfied"], found["n"])]
    value = round(found["satisfied"] / found["n"], 4)
    return {"value": value, "unit": "share", "target": LEVEL, "better": "higher", "ci": ci, "details": details}


def medians(intervals: Intervals) -> dict[str, dict[str, Interval]]:
    """Return for each load the medians over its repeats: of measured and predicted numbers and of both ends."""

    def middle(metric: str, names: Sequence[str]) -> Interval:
        return Interval(*map(statistics.median, zip(*(intervals[name][metric] for name in names), strict=True)))

    repeats = _harness.grouped(intervals, lambda name: name.rpartition("-")[0])
    return {load: {metric: middle(metric, names) for metric in COUNTED} for load, names in repeats.items()}


def counted(intervals: Intervals) -> dict[str, int]:
    return sides([one for of in intervals.values() for one in of.values()])


def intervals_of(
    deployment: Deployment, run: Run, draws: int, level: float, *, sampling: bool = True
) -> dict[str, Interval]:
    """Return by metric the prediction of a run, with intervals by the tables' errors and by other requests."""
    records = simulated(deployment, run)
    predicted, measured = quantiles(records), quantiles(run.measured.records)
    off = [quantiles(simulated(one, run)) for one in perturbed_deployments(deployment, draws)] or [predicted]

    def reach(values: Any, center: float) -> tuple[float, float]:
        low, high = np.quantile(values, [0.5 - level / 2, 0.5 + level / 2], method="hazen")
        return max(0.0, math.log(center / low)), max(0.0, math.log(high / center))

    found = {}
    for metric in COUNTED:
        reaches = [reach([of[metric] for of in off], predicted[metric])]
        if sampling:
            column, q, _ = METRICS[metric]
            known = finished_seconds(records, column)
            reaches.append(reach(of_run(known, known, q, seed=0)[1], predicted[metric]))
        low, high = (math.hypot(*side) for side in zip(*reaches, strict=True))
        ends = predicted[metric] * math.exp(-low), predicted[metric] * math.exp(high)
        found[metric] = Interval(measured[metric], predicted[metric], *ends)
    return found
