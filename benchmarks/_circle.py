"""What every circle of measuring, calibrating and simulating shares: requests, errors, rows."""

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
from lengthwise.measure.calibration.measured_runs import harmless_lateness
from lengthwise.metrics.columns import request_column
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.records import SIMULATED, Measured, Records, shape_facts
from lengthwise.schema.specs import GpuSpec

LOADS = {"static": None, "half": 0.5, "high": 0.85}
"""All at once, or Poisson arrivals at a share of the measured capacity."""
LEARNT = ("static", "half")
"""Loads that a calibration may see."""
_MANY = 10_000
_SPAN = 0.7
"""Of the time for a run, the part in which its requests arrive; in the rest the last of them are answered."""
METRICS = {
    "jct_p50": ("jct_s", 0.5, 0.10),
    "jct_p95": ("jct_s", 0.95, 0.10),
    "ttft_p50": ("ttft_s", 0.5, 0.10),
    "ttft_p95": ("ttft_s", 0.95, 0.10),
    "tpot_p50": ("tpot_s", 0.5, 0.05),
    "normalized_latency_p50": ("normalized_latency_s", 0.5, 0.09),
}
"""Name: column, quantile, the error aimed at. Latency a token of output: Vidur's own column, and its error in it."""
SHARE = 0.3
"""Of the requests, what a calibration holds out where no run is."""
HEADLINES = ("jct_p50", "jct_p95", "ttft_p50", "tpot_p50")


@dataclass(frozen=True)
class Setting:
    """An engine's limits under a name."""

    name: str
    seqs: int
    step_tokens: int

    def limits(self, max_model_len: int, block_size: int) -> EngineLimits:
        return EngineLimits(
            max_num_seqs=self.seqs,
            max_num_batched_tokens=self.step_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            watermark=0.0,
            weight_dtype=None,
        )


@dataclass(frozen=True)
class Run:
    """One measured run: which requests, under what, how often before."""

    setting: str
    load: str
    repeat: int
    measured: Measured

    @property
    def name(self) -> str:
        return f"{self.setting}-{self.load}-{self.repeat}"


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths: median, sigma, least and most, of prompts and of outputs."""

    prompt: tuple[float, float, int, int] = (64, 0.7, 8, 500)
    output: tuple[float, float, int, int] = (24, 0.6, 4, 120)

    def workload(self, n: int, seed: int, rate_rps: float | None, name: str = "") -> Workload:
        """``n`` requests, all at once without a rate, else as a Poisson process."""
        rng = np.random.default_rng(seed)
        prompt, output = (self._draw(rng, n, *of) for of in (self.prompt, self.output))
        gaps = rng.exponential(1.0, n)
        arrival_s = np.zeros(n) if rate_rps is None else np.cumsum(gaps) / rate_rps
        return Workload(arrival_s - arrival_s[0], prompt, output, name=name)

    def arriving(
        self, tokens_s: float, seconds: float, seed: int, name: str, *, least: int = 80, most: int = 600
    ) -> Workload:
        """Poisson arrivals of so many output tokens a second for about ``seconds``: these very requests' tokens.

        The mean of a hundred gaps is easily 10 % off: they are stretched to the rate.
        """
        usual = self.workload(_MANY, 0, None).output_tokens.mean()
        n = min(most, max(least, round(tokens_s / usual * seconds)))
        made = self.workload(n, seed, 1.0, name)
        span_s = made.output_tokens.mean() * (n - 1) / tokens_s
        return replace(made, arrival_s=made.arrival_s * (span_s / made.arrival_s[-1]))

    @staticmethod
    def _draw(rng: Any, n: int, median: float, sigma: float, least: int, most: int) -> Any:
        return np.clip(rng.lognormal(np.log(median), sigma, n), least, most).astype(np.int64)


def capacity_tokens_s(measured: Measured) -> float:
    """Output tokens a second while somebody waits: from the first request that finishes to the last that begins.

    Of requests that came all at once, many times as many as there are seats. A window that is cut by requests that
    finished has the short ones, and seats that nobody takes any more: it told up to 44 % more.

    Raises:
        ValueError: Nobody waited.
    """
    r, tokens = measured.records.requests, measured.tokens
    assert tokens is not None, "the engine tells when tokens came"
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
    retained: Callable[[Run], None],
    say: Callable[[str], None],
    least: int = 80,
    left_s: Callable[[], float] = lambda: math.inf,
) -> list[Run]:
    """Every load so many times, in turns, so that a machine that slows down slows all of them.

    A load has ``least`` requests even where ``seconds`` would have fewer arrive. ``left_s`` tells the time that is
    left: first runs share it, and a run that would not end in time is left out, which is said.
    """
    runs: list[Run] = []
    duration_s: dict[str, float] = {}
    workloads = {"static": lengths.workload(static_n, 1, None, "static")}
    for repeat in range(repeats):
        for k, (load, share) in enumerate(LOADS.items()):
            if share is not None and load not in workloads:
                window_s = min(seconds, _SPAN * left_s() / (len(LOADS) - k))
                workloads[load] = _arriving(runs[0], lengths, share, window_s, 10 + k, load, least)
            need_s = duration_s.get(load, float(workloads[load].arrival_s[-1]))
            if need_s > left_s():
                say(f"{setting.name}-{load}-{repeat} left out: {need_s:.0f} s are needed, {left_s():.0f} s are left")
                continue
            started = time.monotonic()
            run = Run(setting.name, load, repeat, bench(workloads[load]))
            duration_s[load] = time.monotonic() - started
            runs.append(run)
            retained(run)
            told = ", ".join(f"{m} {1000 * s:.1f} ms" for m, s in quantiles(run.measured.records).items())
            say(f"{run.name}: {len(run.measured.workload)} requests, {told}")
    return runs


def _arriving(full: Run, lengths: Lengths, share: float, window_s: float, seed: int, load: str, least: int) -> Workload:
    """Requests of about ``window_s`` at a share of the capacity that a full run showed."""
    tokens_s = share * capacity_tokens_s(full.measured)
    return lengths.arriving(tokens_s, window_s, seed, load, least=least)


def quantiles(records: Records) -> dict[str, float]:
    """Seconds by metric of the requests that finished."""
    done = records.requests.status == Status.FINISHED
    out = {}
    for name, (column, q, _) in METRICS.items():
        values = request_column(records.requests, column)[done]
        told = float(np.nanquantile(values, q))
        out[name] = max(told, 1e-6)  # a starved client reads a whole answer at once: no time between its tokens
    return out


def simulated(deployment: Deployment, run: Run) -> Records:
    """The same requests on the deployment, with the lengths they really had."""
    asked, r = run.measured.workload, run.measured.records.requests
    arrival_s = np.zeros(len(asked)) if asked.concurrency else r.arrival_s - np.nanmin(r.arrival_s)
    return simulate(
        replace(
            asked, arrival_s=arrival_s, prompt_tokens=r.prompt_tokens, output_tokens=np.maximum(1, r.output_tokens)
        ),
        deployment,
    )


def as_simulated(records: Records, run: Run) -> Measured:
    """Simulated records beside the measured ones, for a file."""
    return Measured(records, run.measured.workload, SIMULATED, {"of": run.name})


def errors(deployment: Deployment, tables: CostTables, runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """(simulated - measured) / measured of each metric, by run."""
    priced = replace(deployment, cost=tables)
    out = {}
    for run in runs:
        told, real = quantiles(simulated(priced, run)), quantiles(run.measured.records)
        out[run.name] = {metric: told[metric] / real[metric] - 1 for metric in METRICS}
    return out


def calibrated(
    learnt: Sequence[Run],
    satisfied: Sequence[Run],
    deployment: Deployment,
    iterations: Iterations | None = None,
    masks: str = "auto",
) -> Calibration:
    """A calibration to some runs, scored on others or, without any, on last requests; doubts are told, not obeyed."""
    return calibrate(
        [_named(run) for run in learnt],
        deployment,
        holdout=[_named(run) for run in satisfied] or SHARE,
        iterations=iterations,
        allow=("warnings",),
        masks=masks,
    )


def _named(run: Run) -> Measured:
    """The run's records under its own name, by which scores and notes call it."""
    return replace(run.measured, records=replace(run.measured.records, name=run.name))


def spread(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """By load and metric: how far a repeat lies from the median of its like, the largest; the floor of any error."""
    out: dict[str, dict[str, float]] = {}
    for load in sorted({(run.setting, run.load) for run in runs}):
        told = [quantiles(r.measured.records) for r in runs if (r.setting, r.load) == load]
        out["-".join(load)] = {
            metric: max(abs(t[metric] / statistics.median(o[metric] for o in told) - 1) for t in told)
            for metric in METRICS
        }
    return out


def passed(runs: Sequence[Run]) -> list[str]:
    """The doubted runs that a calibration takes unasked: of an idle client that was late by next to nothing."""
    return [
        run.name
        for run in runs
        if run.measured.warnings and set(run.measured.warnings) <= set(harmless_lateness(run.measured))
    ]


def facts_of(deployment: Deployment) -> dict[str, Any]:
    """What records keep of the deployment that was measured, as those of ``lengthwise bench`` with a scenario do."""
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
    """A model on one device, priced by the roofline until somebody knows better."""
    return deploy(config, gpu, limits=limits, num_blocks=blocks, scheduler=scheduler)
