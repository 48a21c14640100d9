"""Parts of every campaign that measures, calibrates and simulates: settings, requests, runs and their errors."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lengthwise import Deployment, EngineLimits, Status, Workload, deploy, simulate
from lengthwise.measure.calibration import Calibration, Iterations, calibrate
from lengthwise.metrics.columns import request_column
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.records import SIMULATED, Measured, Records, shape_facts
from lengthwise.schema.specs import GpuSpec

LOADS = {"static": None, "half": 0.5, "high": 0.85}
"""All at once, or Poisson arrivals at a share of the measured capacity."""
LEARNT = ("static", "half")
"""Loads that a calibration is fitted to."""
METRICS = {
    "jct_p50": ("jct_s", 0.5, 0.10),
    "jct_p95": ("jct_s", 0.95, 0.10),
    "ttft_p50": ("ttft_s", 0.5, 0.10),
    "ttft_p95": ("ttft_s", 0.95, 0.10),
    "tpot_p50": ("tpot_s", 0.5, 0.05),
    "normalized_latency_p50": ("normalized_latency_s", 0.5, 0.09),
}
"""Name: column, quantile, aim. Latency per output token is Vidur's own column, and the aim its error in it."""
HOLDOUT = 0.3
"""Share of the requests that a calibration holds out where no run is."""
_LENGTH_DRAWS = 10_000
_ARRIVALS_SHARE = 0.7
"""Of the time for a run, the part in which its requests arrive; in the rest the last of them finish."""


@dataclass(frozen=True)
class Setting:
    """An engine's limits under a name."""

    name: str
    seqs: int
    step_tokens: int

    def limits(self, max_model_len: int, block_size: int) -> EngineLimits:
        """Return the limits of the deployment."""
        sizes = {"max_num_seqs": self.seqs, "max_num_batched_tokens": self.step_tokens, "block_size": block_size}
        return EngineLimits(**sizes, max_model_len=max_model_len, watermark=0.0, weight_dtype=None)


@dataclass(frozen=True)
class Run:
    """One measured run of a load under a setting."""

    setting: str
    load: str
    repeat: int
    measured: Measured

    @property
    def name(self) -> str:
        """Return SETTING-LOAD-REPEAT."""
        return f"{self.setting}-{self.load}-{self.repeat}"


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
        gaps = rng.exponential(1.0, n)
        arrival_s = np.zeros(n) if rate_rps is None else np.cumsum(gaps) / rate_rps
        return Workload(arrival_s - arrival_s[0], prompt, output, name=name)

    def arriving(
        self, tokens_s: float, seconds: float, seed: int, name: str, *, least: int = 80, most: int = 600
    ) -> Workload:
        """Return Poisson arrivals of ``tokens_s`` output tokens per second for about ``seconds``.

        The mean of a hundred gaps is easily 10 % off: gaps are stretched to the rate of these very requests.
        """
        mean_tokens = self.workload(_LENGTH_DRAWS, 0, None).output_tokens.mean()
        n = min(most, max(least, round(tokens_s / mean_tokens * seconds)))
        made = self.workload(n, seed, 1.0, name)
        span_s = made.output_tokens.mean() * (n - 1) / tokens_s
        return replace(made, arrival_s=made.arrival_s * (span_s / made.arrival_s[-1]))


def capacity_tokens_s(measured: Measured) -> float:
    """Return output tokens per second while requests wait: from the first that finishes to the last that starts.

    Needs requests that came all at once, many times as many as there are seats. A window up to the last finished
    request contains idle seats, and one of finished requests has the short ones: it gave up to 44 % more.

    Raises:
        ValueError: No request waited.
    """
    r, tokens = measured.records.requests, measured.tokens
    assert tokens is not None, "the engine records token times"
    low_s, high_s = float(np.nanmin(r.finished_s)), float(np.nanmax(r.first_token_s))
    if high_s <= low_s:
        raise ValueError("all requests had begun before one had finished: there must be more than seats")
    within = (tokens.at_s > low_s) & (tokens.at_s <= high_s)
    return float(tokens.tokens[within].sum() / (high_s - low_s))


def measure_loads(
    bench: Callable[[Workload], Measured],
    setting: Setting,
    lengths: Lengths,
    *,
    static_n: int,
    seconds: float,
    repeats: int,
    on_run: Callable[[Run], None],
    say: Callable[[str], None],
    least: int = 80,
    left_s: Callable[[], float] = lambda: math.inf,
) -> list[Run]:
    """Measure every load ``repeats`` times in turns, so that a machine that slows down slows all of them.

    A load has ``least`` requests even where ``seconds`` would have fewer arrive. First runs share the time that
    ``left_s`` returns; a run that would not end in time is skipped, with a message.
    """
    runs: list[Run] = []
    duration_s: dict[str, float] = {}
    workloads = {"static": lengths.workload(static_n, 1, None, "static")}
    for repeat in range(repeats):
        for k, (load, share) in enumerate(LOADS.items()):
            if share is not None and load not in workloads:
                window_s = min(seconds, _ARRIVALS_SHARE * left_s() / (len(LOADS) - k))
                tokens_s = share * capacity_tokens_s(runs[0].measured)
                workloads[load] = lengths.arriving(tokens_s, window_s, 10 + k, load, least=least)
            need_s = duration_s.get(load, float(workloads[load].arrival_s[-1]))
            if need_s > left_s():
                say(f"{setting.name}-{load}-{repeat} left out: {need_s:.0f} s are needed, {left_s():.0f} s are left")
                continue
            started = time.monotonic()
            run = Run(setting.name, load, repeat, bench(workloads[load]))
            duration_s[load] = time.monotonic() - started
            runs.append(run)
            on_run(run)
            say(outcome(run))
    return runs


def outcome(run: Run) -> str:
    """Return a line about a run: requests and quantiles."""
    found = ", ".join(f"{name} {1000 * value_s:.1f} ms" for name, value_s in quantiles(run.measured.records).items())
    return f"{run.name}: {len(run.measured.workload)} requests, {found}"


def quantiles(records: Records) -> dict[str, float]:
    """Return seconds by metric of the requests that finished."""
    done = records.requests.status == Status.FINISHED
    found = {}
    for name, (column, q, _) in METRICS.items():
        value_s = float(np.nanquantile(request_column(records.requests, column)[done], q))
        found[name] = max(value_s, 1e-6)  # a starved client reads a complete answer at once: no time between its tokens
    return found


def simulated(deployment: Deployment, run: Run) -> Records:
    """Simulate the run's requests on the deployment, with the lengths they really had."""
    workload, r = run.measured.workload, run.measured.records.requests
    arrival_s = np.zeros(len(workload)) if workload.concurrency else r.arrival_s - np.nanmin(r.arrival_s)
    lengths = {"prompt_tokens": r.prompt_tokens, "output_tokens": np.maximum(1, r.output_tokens)}
    return simulate(replace(workload, arrival_s=arrival_s, **lengths), deployment)


def as_simulated(records: Records, run: Run) -> Measured:
    """Return simulated records of a run for a file."""
    return Measured(records, run.measured.workload, SIMULATED, {"of": run.name})


def errors(deployment: Deployment, tables: CostTables, runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Return (simulated - measured) / measured of each metric, by run."""
    priced = replace(deployment, cost=tables)
    found = {}
    for run in runs:
        ours, real = quantiles(simulated(priced, run)), quantiles(run.measured.records)
        found[run.name] = {metric: ours[metric] / real[metric] - 1 for metric in METRICS}
    return found


def calibrated(
    learnt: Sequence[Run],
    held_out: Sequence[Run],
    deployment: Deployment,
    iterations: Iterations | None = None,
    masks: str = "auto",
) -> Calibration:
    """Calibrate to some runs and score on others, or without any on last requests; warnings do not stop it."""

    def named(run: Run) -> Measured:
        return replace(run.measured, records=replace(run.measured.records, name=run.name))

    return calibrate(
        list(map(named, learnt)),
        deployment,
        holdout=list(map(named, held_out)) or HOLDOUT,
        iterations=iterations,
        allow=("warnings",),
        masks=masks,
    )


def spread(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Return by load and metric the largest distance of a repeat from the median of its load: the floor of errors."""
    found: dict[str, dict[str, float]] = {}
    for load in sorted({(run.setting, run.load) for run in runs}):
        repeats = [quantiles(r.measured.records) for r in runs if (r.setting, r.load) == load]
        found["-".join(load)] = {
            metric: max(abs(one[metric] / statistics.median(o[metric] for o in repeats) - 1) for one in repeats)
            for metric in METRICS
        }
    return found


def facts_of(deployment: Deployment) -> dict[str, Any]:
    """Return the facts of the measured deployment for records, as ``lengthwise bench`` with a scenario records them."""
    parallel, limits = deployment.parallel, deployment.limits
    return {
        "model": deployment.model.name,
        "model_shape": shape_facts(deployment.model),
        "gpu": deployment.gpu.name,
        "gpus": parallel.tp * parallel.pp * parallel.replicas,
        "tp": parallel.tp,
        "pp": parallel.pp,
        "replicas": parallel.replicas,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_model_len": deployment.max_model_len,
        "weight_dtype": limits.weight_dtype or deployment.model.dtype,
    }


def deployment_of(
    config: str, gpu: GpuSpec, limits: EngineLimits, blocks: int, scheduler: Any = "vllm_v1"
) -> Deployment:
    """Return a model on one device with the roofline's costs."""
    return deploy(config, gpu, limits=limits, num_blocks=blocks, scheduler=scheduler)
