"""Parts of every campaign: devices, settings, requests, engines measured in turns, simulated runs and their errors."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import _harness
import numpy as np

from lengthwise import Deployment, EngineLimits, Status, Workload, catalog, deploy, simulate
from lengthwise.measure import write_records
from lengthwise.measure.calibration import Calibration, Iterations, calibrate
from lengthwise.metrics.columns import request_column
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.errors import UnknownNameError
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
BLOCK, WARM_UP = 32, 32
GENERATIONS = 8
"""Requests of the capacity run per seat: in simulation 3 give a fifth more than a long run has, 8 a twentieth."""
_LENGTH_DRAWS = 10_000
_ARRIVALS_SHARE = 0.7
"""Of the time for a run, the part in which its requests arrive; in the rest the last of them finish."""


@dataclass(frozen=True)
class Setting:
    """An engine's limits under a name."""

    name: str
    seqs: int
    step_tokens: int

    def deployment(
        self, config: str, gpu: GpuSpec, max_model_len: int, blocks: int, dtype: str = "float32"
    ) -> Deployment:
        """Return a model on one device with the roofline's costs."""
        sizes = {"max_num_seqs": self.seqs, "max_num_batched_tokens": self.step_tokens, "block_size": BLOCK}
        kinds = {"weight_dtype": dtype, "kv_dtype": dtype, "max_model_len": max_model_len}
        limits = EngineLimits(**sizes, **kinds, watermark=0.0)
        return deploy(config, gpu, limits=limits, num_blocks=blocks)


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


@dataclass
class Turn:
    """One setting's engine and the requests of each load, the same at every repeat.

    Attributes:
        bench: Sends requests to the engine.
        named: Receives each run that has just ended.
        static_s: Approximate duration of the load of all requests at once.
        seconds: Duration of arrivals under the other loads.
        least: Requests of a load even where ``seconds`` would have fewer arrive.
        left_s: Time left for measuring.
    """

    setting: Setting
    bench: Callable[[Workload], Measured]
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
            raise TimeoutError(f"{name} left out: {need_s:.0f} s are needed, {self.left_s():.0f} s are left")
        started_s = time.monotonic()
        measured = self.bench(self.workloads[load])
        self.duration_s[load] = time.monotonic() - started_s
        known = {**measured.metadata, "capacity_tokens_s": round(self.capacity_tokens_s, 1)}
        run = Run(self.setting.name, load, repeat, replace(measured, metadata=known))
        self.named(run)
        return run


def in_turns(turns: Sequence[Turn], repeats: int, say: Callable[[str], None]) -> None:
    """Measure every load of every setting ``repeats`` times: repeats outermost, settings innermost.

    A machine that changes its speed changes it for all of them alike.
    """
    for turn in turns:
        turn.warm()
    for repeat, load, turn in itertools.product(range(repeats), LOADS, turns):
        try:
            run = turn.run(load, repeat)
        except TimeoutError as error:
            say(str(error))
            continue
        found = ", ".join(f"{name} {1000 * s:.1f} ms" for name, s in quantiles(run.measured.records).items())
        say(f"{run.name}: {len(run.measured.workload)} requests, {found}")


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


def write_simulated(folder: Path, deployment: Deployment, run: Run) -> Records:
    """Simulate a run and write its records beside the measured ones."""
    records = simulated(deployment, run)
    of = Measured(records, run.measured.workload, SIMULATED, {"of": run.name})
    write_records(of, folder / f"{run.name}.simulated.parquet")
    return records


def errors(deployment: Deployment, tables: CostTables, runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Return (simulated - measured) / measured of each metric, by run."""
    priced = replace(deployment, cost=tables)
    found = {}
    for run in runs:
        ours, real = quantiles(simulated(priced, run)), quantiles(run.measured.records)
        found[run.name] = {metric: ours[metric] / real[metric] - 1 for metric in METRICS}
    return found


def calibrated(
    learnt: Sequence[Run], held_out: Sequence[Run], deployment: Deployment, iterations: Iterations | None = None
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


def iterations_of(folder: Path, run: str) -> Path:
    """Return the path of the engine's log of a run."""
    return folder / f"{run}.iterations.log"


def _device(name: str, flops: dict[str, float], memory_bytes: float, bandwidth: float, source: str) -> GpuSpec:
    """Return a device without a data sheet."""
    price = {"price_per_hour_usd": 0.1, "price_source": "none: a local device"}
    return GpuSpec(name, flops, memory_bytes, bandwidth, tdp_w=10.0, idle_w=1.0, source=source, **price)


def this_thread() -> GpuSpec:
    """Return one thread of this processor as a device: peaks that NumPy reaches."""
    code = (
        "import json, time, numpy as np\n"
        "a = np.ones((1024, 1024), np.float32); b = np.ones(2**26, np.float32); c = np.empty_like(b)\n"
        "def best(f):\n"
        "    out = []\n"
        "    for _ in range(7):\n"
        "        s = time.perf_counter(); f(); out.append(time.perf_counter() - s)\n"
        "    return min(out)\n"
        "print(json.dumps([2 * 1024**3 / best(lambda: a @ a), 2 * b.nbytes / best(lambda: np.copyto(c, b))]))"
    )
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    flops, bandwidth = _harness.fresh_process(code, **one)
    source = "measured with NumPy: a product of 1024 x 1024, a copy of 256 MiB"
    return _device(_harness.machine()["cpu"], {"float32": flops}, 16 * 2**30, bandwidth, source)


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
        seconds = []
        for _ in range(7):
            start = time.perf_counter()
            work()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    memory_bytes = torch.cuda.get_device_properties(0).total_memory
    flops, bandwidth = {dtype: 2 * 8192**3 / best_s(lambda: a @ a)}, 2 * b.nbytes / best_s(lambda: c.copy_(b))
    source = "measured with torch: a product of 8192 x 8192, a copy of 2 GiB"
    return _device(name, flops, memory_bytes, bandwidth, source)


def machine_of(gpu: GpuSpec, dtype: str) -> dict[str, Any]:
    """Return the facts of the machine and the peaks of the device."""
    peaks = {f"{dtype}_gflops": gpu.peak_flops.get(dtype, math.nan), "copy_gb_per_s": gpu.bandwidth_bytes_per_s}
    return {**_harness.machine(), "device": gpu.name} | {name: round(peak / 1e9, 1) for name, peak in peaks.items()}


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
