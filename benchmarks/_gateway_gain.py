"""The gain of length-aware order: the gateway in front of two engines, and the simulator's prediction.

Each run is a burst of recorded prompts through the complete gateway, over HTTP. 1x is the rate that two engines with
full batches serve, as fitted to runs under FCFS; 3x and 5x are that many times as much. The policies of a shuffle run
one after the other, so that other load on the machine affects them alike. Intervals are Student's t over shuffles.

Prompts are AlpacaEval's (non-commercial: for evaluation only, never for training), lengths those of Vicuna 13B's
recorded outputs, divided by SHRINK so that a small engine serves a burst in seconds. The predictor is the default one;
it has seen none of these prompts, nor this model. Engines receive each length in ``vllm_xargs.output_tokens``, which
the emulated engine knows and the demo's middleware (``engine_side.forced_length``) passes to vLLM; the gateway sees
only ``max_tokens``, which is equal for all.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from _gateway_processes import first_json, running
from _harness import machine

from lengthwise import engine, predict, workload
from lengthwise.gateway.config import Engine, Forecasting, GatewayConfig, Listen, Order
from lengthwise.gateway.observe import replay
from lengthwise.gateway.observe.replay import Service
from lengthwise.gateway.observe.trace import Trace, of_journal
from lengthwise.predict import LengthDistribution, Prompts
from lengthwise.schema.deployment import Scheduler
from lengthwise.schema.records import RequestRecords, Status
from lengthwise.schema.workload import Workload
from lengthwise.statistics import t_half_width

Floats = npt.NDArray[np.float64]
Runs = Mapping[str, Sequence[Floats]]
"""JCT by policy, [shuffles][n]."""
ENGINES = 2
MODEL, OUTPUTS = "tiny", "vicuna-13b-v1.3"
SHAPE = 0.73
"""Of the Gamma gaps (ELIS)."""
SHRINK, MAX_TOKENS = 10, 512
WINDOW = 50 // SHRINK
"""ELIS's 50 tokens, divided as the lengths are."""
STEP_S, SEQ_S, PROMPT_S = 0.010, 0.001, 0.0001
"""Of emulated engines: about those of a tiny model on one core."""
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Model and scheduler in one process: two processes wait for each other in busy loops, too much for two cores."""
FCFS, OURS, ORACLE = "fcfs", "isrtf", "oracle"
_ISRTF = Order("isrtf", window_tokens=WINDOW, max_wait_s=math.inf)
POLICIES = {
    FCFS: Order("fcfs", max_wait_s=math.inf),
    OURS: _ISRTF,
    "isrtf, eager": replace(_ISRTF, takeover="worth(factor=1)"),
    "windowed": replace(_ISRTF, mode="windowed"),
    "tail-friendly": replace(_ISRTF, rank="hrrn"),
    ORACLE: Order("srtf", max_wait_s=math.inf),
}
"""Without a limit of waiting, like the oracle. A preemption must gain a hundred times its cost (the default), or its
cost (eager); tail-friendly orders by wait over predicted length."""
METRICS = ("gap_closed", "p99_over_oracle", "mean_over_fcfs")
CONCLUSIVE = {"gap_closed": 0.2, "p99_over_oracle": 0.1, "mean_over_fcfs": 0.1}
"""Largest half-width of the interval of a difference that still decides: of the gap, and relative for ratios."""
NEGLIGIBLE = {"gap_closed": 0.05, "p99_over_oracle": 0.02, "mean_over_fcfs": 0.02}
"""Differences that matter to no user: where the complete interval is below, the prediction is right."""


@dataclass(frozen=True)
class Plan:
    """Sizes; a burst has ``requests[0]`` requests and ``requests[1]`` more per slot, so that slots change hands."""

    loads: tuple[float, ...] = (1.0, 3.0, 5.0)
    batches: tuple[int, ...] = (1, 2, 4)
    shuffles: int = 12
    requests: tuple[int, int] = (16, 16)
    simulated: int = 40

    def count(self, batch: int) -> int:
        """Return the requests of a burst."""
        return self.requests[0] + self.requests[1] * batch


FULL, QUICK = Plan(), Plan(loads=(3.0,), batches=(2,), shuffles=2)


@dataclass
class Cell:
    """One load at one batch size."""

    load: float
    batch: int
    measured: dict[str, list[Floats]] = field(default_factory=dict)
    simulated: dict[str, list[Floats]] = field(default_factory=dict)
    fcfs_traces: list[Trace] = field(default_factory=list)
    preemptions: Counter[str] = field(default_factory=Counter)


def figures(shared: Path, quick: bool) -> dict[str, Any]:
    """Return the rows of real engines; raise FileNotFoundError without data or engines."""
    return _figures(shared, QUICK if quick else FULL, "live", f"{ENGINES} vLLMs on a CPU, one thread each")


def emulated(shared: Path, quick: bool) -> dict[str, Any]:
    """Return the rows of emulated engines, which take no core from the gateway."""
    return _figures(shared, QUICK if quick else FULL, "emulated", f"{ENGINES} emulated engines")


def _figures(shared: Path, plan: Plan, kind: str, description: str) -> dict[str, Any]:
    import uvloop

    shuffle(shared, 0, 1)  # fails early without data
    cells: list[Cell] = []
    services: dict[int, Service] = {}
    with contextlib.ExitStack() as stack, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        urls = stack.enter_context(_real_engines(max(plan.batches))) if kind == "live" else []
        for batch in plan.batches:
            urls = stack.enter_context(_emulated_engines(batch)) if kind == "emulated" else urls
            done, services[batch] = runner.run(_measure_batch(shared, plan, urls, batch))
            cells += done
    measured, simulated = [cell.measured for cell in cells], [cell.simulated for cell in cells]
    policies = {name: _evaluate(measured, simulated, name) for name in POLICIES if name not in (FCFS, ORACLE)}
    own, verdicts = policies[OURS], Counter(of[metric]["verdict"] for of in policies.values() for metric in METRICS)
    results = {f"{name}, {metric}": of[metric] for name, of in policies.items() for metric in METRICS}
    outside = [name for name, of in results.items() if not of["ci"][0] <= of["simulated"] <= of["ci"][1]]
    return {
        f"gateway.{kind}.gap_closed": own["gap_closed"] | {
            "policies": policies,
            "cells": [_summary_of(cell) for cell in cells],
            "engines": description,
            "plan": asdict(plan),
            "services": {batch: asdict(service) for batch, service in services.items()},
            "machine": machine(),
        },
        f"gateway.{kind}.p99_over_oracle": own["p99_over_oracle"],
        f"gateway.{kind}.simulated_within": {"value": verdicts["within"] / verdicts.total(), **verdicts},
        f"gateway.{kind}.simulated_in_interval": {"value": 1 - len(outside) / len(results), "outside": outside},
    }  # fmt: skip


# Traffic


class Shrunk:
    """Predicts SHRINK times shorter lengths than the default predictor, once per request."""

    predicts_once = True

    def __init__(self) -> None:
        self._inner = predict.default()

    def fit(self, samples: Any) -> Any:
        raise NotImplementedError

    def predict(self, prompts: Prompts, tokens_so_far: Any = 0) -> LengthDistribution:  # noqa: ARG002
        """Return distributions of total lengths."""
        return LengthDistribution.of(np.maximum(1.0, self._inner.predict(prompts).tokens / SHRINK))


@lru_cache(maxsize=1)
def _predictor() -> Shrunk:
    return Shrunk()


def shuffle(shared: Path, seed: int, count: int) -> Workload:
    """Return ``count`` of the recorded prompts in random order, one per second on average, with predictions."""
    import _elis

    texts = _elis.texts(shared, OUTPUTS)
    rng = np.random.default_rng([seed, 0x6A1])
    order = [texts[i] for i in rng.permutation(len(texts))[:count]]
    tokens = np.array([max(1, round(one.output_tokens / SHRINK)) for one in order], np.int64)
    made = Workload(
        workload.Gamma(1.0, SHAPE**-0.5).sample(count, rng),
        np.array([max(1, one.prompt_tokens) for one in order], np.int64),
        np.minimum(tokens, MAX_TOKENS),
        extra={"prompt": np.array([one.prompt for one in order], object), "model": np.array([MODEL] * count, object)},
        name="gain",
    )
    return predict.attach(made, _predictor(), window_tokens=WINDOW)


def _at_rate(made: Workload, rate_rps: float) -> Workload:
    return replace(made, arrival_s=(made.arrival_s - made.arrival_s[0]) / rate_rps)


async def _send(port: int, made: Workload) -> Floats:
    """Send requests in an open loop; return [n] JCT from due to last byte, and check the recorded lengths."""
    import aiohttp

    loop, salt = asyncio.get_running_loop(), uuid.uuid4().hex  # no run finds prompts of another in a cache
    started_s = loop.time() + 0.05
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def request(due_s: float, prompt: str, tokens: int) -> float:
            body = {
                "model": MODEL,
                "prompt": prompt,
                "max_tokens": MAX_TOKENS,
                "temperature": 0,
                "stream": True,
                "cache_salt": salt,
                "stream_options": {"include_usage": True},
                "vllm_xargs": {"output_tokens": tokens, "max_tokens": MAX_TOKENS},
            }
            await asyncio.sleep(started_s + due_s - loop.time())
            async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as response:
                content = await response.read()
            jct_s = loop.time() - started_s - due_s
            assert response.status == 200, content[:500]
            events = [json.loads(one[6:]) for one in content.split(b"\n\n") if one.startswith(b"data: {")]
            usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
            assert usage["completion_tokens"] == tokens, (usage, tokens)
            return jct_s

        rows = zip(made.arrival_s.tolist(), made.extra["prompt"], made.output_tokens.tolist(), strict=True)
        return np.array(await asyncio.gather(*(request(*row) for row in rows)))


# Engines


@contextlib.contextmanager
def _real_engines(batch: int) -> Iterator[list[str]]:
    """Start vLLMs on one thread each, in parallel; raise FileNotFoundError where none is installed."""
    from concurrent.futures import ThreadPoolExecutor

    import _vllm

    from lengthwise.backend.process import free_port, local_engine
    from lengthwise.gateway.demo import engine_side

    python = _vllm.require()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = _vllm.make_model(Path(folder) / MODEL, "tiny")

        def start(number: int) -> str:
            place, port = Path(folder) / f"engine-{number}", free_port()
            place.mkdir()
            flags = {
                "model": str(model),
                "served-model-name": MODEL,
                "host": "127.0.0.1",
                "port": str(port),
                "dtype": "float32",
                "max-model-len": "1536",
                "max-num-seqs": str(batch),
                "max-num-batched-tokens": "2048",
                "generation-config": "vllm",
                "middleware": "forced_length.ForcedLength",
                "distributed-executor-backend": ONE_PROCESS,
            }
            words = [word for name, value in flags.items() for word in (f"--{name}", value)]
            command = [python, "-m", "vllm.entrypoints.openai.api_server", *words]
            command += ["--enforce-eager", "--disable-uvicorn-access-log"]
            paths = [str(Path(engine_side.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
            env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CACHE_ROOT": str(place / "cache")}
            env |= _vllm.QUIET | {"PYTHONPATH": os.pathsep.join(paths)}
            one = local_engine(command, port=port, env=env, log_path=place / "log", ready_s=600.0)
            url = one.__enter__().url
            stack.push(one)
            return url

        with ThreadPoolExecutor(ENGINES) as pool:
            urls = list(pool.map(start, range(ENGINES)))
        yield urls


@contextlib.contextmanager
def _emulated_engines(batch: int) -> Iterator[list[str]]:
    """Start emulated engines in a process of their own."""
    steps = {"fixed-s": STEP_S, "decode-s": SEQ_S, "prompt-token-s": PROMPT_S, "max-num-seqs": batch}
    words = [word for name, value in steps.items() for word in (f"--{name}", f"{value:g}")]
    command = [sys.executable, "-m", "lengthwise.testing.engine_server", "--count", str(ENGINES), "--model", MODEL]
    with running([*command, *words], os.sched_getaffinity(0)) as (process, log):
        yield first_json(process, log)["urls"]


# Measurement


async def _measure_batch(shared: Path, plan: Plan, urls: Sequence[str], batch: int) -> tuple[list[Cell], Service]:
    """Measure and simulate all loads at one batch size."""
    first, start_s = shuffle(shared, 999, plan.count(batch)), time.monotonic()
    await _run(urls, batch, FCFS, _at_rate(shuffle(shared, 998, 8), 1e6))  # warms up
    _, trace, _ = await _run(urls, batch, FCFS, _at_rate(first, 1e6))
    service = _fit([trace], batch)
    request_s = (service.step_s + service.seq_s * batch) / batch * first.output_tokens.mean()
    request_s += service.prompt_s * first.prompt_tokens.mean() + service.front_s / batch
    rate_rps = ENGINES / request_s
    cells = [Cell(load, batch) for load in plan.loads]
    for seed in range(plan.shuffles):
        made = shuffle(shared, seed, plan.count(batch))
        for cell in cells:
            turn = seed % len(POLICIES)  # another policy starts in each shuffle
            for name in (*list(POLICIES)[turn:], *list(POLICIES)[:turn]):
                jct_s, trace, preemptions = await _run(urls, batch, name, _at_rate(made, cell.load * rate_rps))
                cell.measured.setdefault(name, []).append(jct_s)
                cell.preemptions[name] += preemptions
                if name == FCFS:
                    cell.fcfs_traces.append(trace)
        print(f"{time.monotonic() - start_s:6.1f} s  batch {batch}, shuffle {seed}", file=sys.stderr, flush=True)
    service = _fit([trace for cell in cells for trace in cell.fcfs_traces], batch)
    for cell in cells:
        for seed in range(max(plan.simulated, plan.shuffles)):
            made = _at_rate(shuffle(shared, seed, plan.count(batch)), cell.load * rate_rps)
            for name in POLICIES:
                cell.simulated.setdefault(name, []).append(_simulate(made, service, name))
    return cells, service


async def _run(urls: Sequence[str], batch: int, name: str, made: Workload) -> tuple[Floats, Trace, int]:
    """Send one burst through a gateway of its own; return JCT, the gateway's trace and the number of preemptions."""
    from lengthwise.gateway.length_prediction import Forecaster, Oracle
    from lengthwise.gateway.serve import Gateway

    lengths = dict(zip(made.extra["prompt"], made.output_tokens.tolist(), strict=True))

    def forecaster(config: Forecasting, clock: Any, late: Any) -> Forecaster:
        if name == ORACLE:
            return Oracle(config, clock, length=lambda _, text: lengths[text or ""])
        return Forecaster(config, clock, late, predictor=_predictor(), place="inline")

    with tempfile.TemporaryDirectory() as folder:
        journal = str(Path(folder) / "journal.jsonl")
        config = GatewayConfig(
            engines=tuple(Engine(url, in_flight=batch, generation_defaults="none") for url in urls),
            order=POLICIES[name],
            prediction=Forecasting(learn=False),
            listen=Listen(port=0, admin_port=None, journal=journal),
        )
        async with Gateway(config, make_forecaster=forecaster) as gateway:
            assert await gateway.fleet.stable(30.0)
            jct_s = await _send(gateway.port, made)
            preemptions = gateway.driver.statistics().preemptions
            await gateway.drain()
        return jct_s, of_journal(journal), preemptions


# Simulation


def _fit(traces: Sequence[Trace], batch: int) -> Service:
    """Fit engines to times at an engine under FCFS: least squares of relative errors, with the total time preserved.

        at the engine = front_s + step_s tokens + seq_s tokens x (mean number of running sequences) + prompt_s prompt

    Where cores are scarce, tokens reach the gateway in bursts, so only dispatch and end of a request are used. Relative
    errors weigh short requests as much as long ones, but such a fit is too low, hence the scaling.
    """
    from scipy.optimize import nnls

    def rows_of(trace: Trace) -> Floats:
        """[n, 4] one, tokens, tokens x sequences at its engine (itself included), prompt."""
        from_s = np.maximum(trace.dispatched_s, trace.dispatched_s[:, None])
        to_s = np.minimum(trace.finished_s, trace.finished_s[:, None])
        together_s = np.maximum(to_s - from_s, 0) * (np.asarray(trace.worker)[:, None] == trace.worker)
        running = together_s.sum(axis=1) / (trace.finished_s - trace.dispatched_s)
        tokens = trace.output_tokens
        return np.stack([np.ones(len(trace)), tokens, tokens * running, trace.prompt_tokens], axis=1)

    rows = np.concatenate([rows_of(trace) for trace in traces])
    seconds = np.concatenate([trace.finished_s - trace.dispatched_s for trace in traces])
    scaled = rows / seconds[:, None]
    size = scaled.max(axis=0)
    found = nnls(scaled / size, np.ones(len(seconds)))[0] / size
    found *= seconds.sum() / (rows @ found).sum()
    front_s, step_s, seq_s, prompt_s = found.tolist()
    error = float(np.median(np.abs(rows @ found / seconds - 1)))
    return Service(max(step_s, 1e-6), seq_s, prompt_s, front_s, batch, ENGINES, math.nan, error)


def _simulate(made: Workload, service: Service, name: str) -> Floats:
    """Return [n] simulated JCT; preemptions follow the policy alone, without the gateway's learned costs."""
    order = POLICIES[name]
    if name == ORACLE:
        made = replace(made, predicted_tokens=made.output_tokens.astype(float), predictions=None)
    mode = order.mode if order.mode in (FCFS, OURS) else replay.ORACLE
    scheduler = replay.scheduler(mode, order)
    if order.mode == "windowed":
        scheduler = replace(scheduler, batching="windowed", memory="paged", takeover="by_rank")
    elif order.rank:
        scheduler = replace(scheduler, rank=order.rank)

    def requests(service: Service, scheduler: Scheduler) -> RequestRecords:
        r = engine.simulate(made, replay.deployment_of(made, service, scheduler), keep_steps=0).requests
        assert (r.status == Status.FINISHED).all()
        return r

    if order.mode != "windowed":
        r = requests(service, scheduler)
        return np.asarray(r.finished_s - r.arrival_s)
    # A preempted request is sent again, prompt and half of its output on average. The gateway preempts at the end of a
    # window only while requests wait: a fixed point, as more expensive windows make longer queues.
    context = float(made.prompt_tokens.mean() + made.output_tokens.mean() / 2)
    resend_s = (service.front_s + service.prompt_s * context) / order.window_tokens
    share = 1.0
    for _ in range(4):
        r = requests(replace(service, step_s=service.step_s + share * resend_s), scheduler)
        share = _share_with_a_queue(r.arrival_s, r.finished_s, (service.max_num_seqs or 1) * ENGINES)
    return np.asarray(r.finished_s - r.arrival_s)


def _share_with_a_queue(arrival_s: Floats, finished_s: Floats, max_num_seqs: int) -> float:
    """Return the share of all slots' busy time during which requests wait."""
    times_s = np.concatenate([arrival_s, finished_s])
    order = np.argsort(times_s, kind="stable")
    present = np.cumsum(np.repeat([1, -1], [len(arrival_s), len(finished_s)])[order])[:-1]
    busy_s = np.diff(times_s[order]) * np.minimum(present, max_num_seqs)
    return float(busy_s[present > max_num_seqs].sum() / busy_s.sum())


# Evaluation


def _evaluate(measured: Sequence[Runs], simulated: Sequence[Runs], name: str) -> dict[str, Any]:
    """Return each metric of a policy over all cells, its interval, the simulated value, and how well both agree."""

    def gap_closed(cells: Sequence[Runs], shuffle: int) -> tuple[float, float]:
        """FCFS minus policy, and FCFS minus oracle, of mean JCT relative to FCFS, summed over cells."""
        means = [{of: float(runs[of][shuffle].mean()) for of in (FCFS, name, ORACLE)} for runs in cells]
        return sum(1 - of[name] / of[FCFS] for of in means), sum(1 - of[ORACLE] / of[FCFS] for of in means)

    def ratio(to: str, statistic: Callable[[Floats], Any]) -> Callable[[Sequence[Runs], int], tuple[float, float]]:
        """Geometric mean over cells of a statistic of a policy over that of another."""
        return lambda cells, shuffle: (
            math.exp(np.mean([math.log(statistic(r[name][shuffle]) / statistic(r[to][shuffle])) for r in cells])),
            1.0,
        )

    functions = {
        "gap_closed": gap_closed,
        "p99_over_oracle": ratio(ORACLE, lambda values: np.quantile(values, 0.99)),
        "mean_over_fcfs": ratio(FCFS, np.mean),
    }
    shuffles, drawn = len(measured[0][name]), len(simulated[0][name])
    found = {}
    for metric, of in functions.items():
        real = MeanRatio([of(measured, shuffle) for shuffle in range(shuffles)])
        same = MeanRatio([of(simulated, shuffle) for shuffle in range(shuffles)])
        predicted = MeanRatio([of(simulated, shuffle) for shuffle in range(drawn)])
        half = real.half_width
        # The interval for the mean of another sample of as many shuffles.
        predicted_half = predicted.half_width * math.sqrt(1 + drawn / shuffles)
        off_by, off_half = real.value - same.value, _half_width(real.deviations - same.deviations)
        scale = 1.0 if metric == "gap_closed" else same.value
        found[metric] = {
            "value": real.value,
            "ci": (real.value - half, real.value + half),
            "simulated": predicted.value,
            "simulated_ci": (predicted.value - predicted_half, predicted.value + predicted_half),
            "off_by": off_by,
            "off_by_half_width": off_half,
            "verdict": _verdict(off_by, off_half, CONCLUSIVE[metric] * scale, NEGLIGIBLE[metric] * scale),
        }
    return found


def _verdict(off_by: float, half_width: float, conclusive: float, negligible: float) -> str:
    """Judge a prediction by the interval of its difference shuffle by shuffle."""
    if abs(off_by) + half_width <= negligible:
        return "within"
    if abs(off_by) > half_width:
        return "not within"
    return "within" if half_width <= conclusive else "too noisy to tell"


class MeanRatio:
    """A ratio of means over shuffles, from [n] (numerator, denominator), with its deviations by the delta method."""

    def __init__(self, pairs: Sequence[tuple[float, float]]) -> None:
        over, under = np.array(pairs).T
        self.value = float(over.mean() / under.mean())
        self.deviations = (over - self.value * under) / abs(float(under.mean()))
        self.half_width = _half_width(self.deviations)


def _half_width(deviations: Floats) -> float:
    return float(t_half_width(deviations, 0.95)) if len(deviations) > 1 else math.inf


def _summary_of(cell: Cell) -> dict[str, Any]:
    """Return means and tails of one cell in seconds."""
    by_policy = {}
    for name, runs in cell.measured.items():
        jct_s, simulated_s = np.concatenate(runs), np.concatenate(cell.simulated[name][: len(runs)])
        by_policy[name] = {
            "mean_s": float(jct_s.mean()),
            "p99_s": float(np.quantile(jct_s, 0.99)),
            "simulated_mean_s": float(simulated_s.mean()),
            "simulated_p99_s": float(np.quantile(simulated_s, 0.99)),
            "preemptions": cell.preemptions[name],
            "requests": len(jct_s),
        }
    return {"load": cell.load, "batch": cell.batch, "policies": by_policy}
