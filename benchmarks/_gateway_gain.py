"""The gain of length-aware order: the gateway in front of two engines, and the prediction of its virtual twin.

Each run is a burst of recorded prompts through the complete gateway, over HTTP. 1x is the rate that two engines with
full batches serve, as fitted to runs under FCFS. The policies of a shuffle run in turns, so that other load affects
them alike. Intervals are Student's t over shuffles. Emulated engines run in virtual time: computing takes none.
Prompts are AlpacaEval's (non-commercial: for evaluation only, never for training), lengths those of Vicuna 13B's
outputs, divided by SHRINK, which only engines receive; the gateway sees an equal ``max_tokens`` for all.
"""

import asyncio
import contextlib
import hashlib
import itertools
import json
import math
import os
import socket
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from _harness import machine, posted
from gateway import ALL_CORES, envoy_command, running

from lengthwise import Workload, predict, workload
from lengthwise.apps.launch.simulated import VirtualLoop, run_virtually
from lengthwise.backend.process import free_port
from lengthwise.engine.continuous_batching import Limits
from lengthwise.gateway.config import Engine, Envoy, GatewayConfig, Key, Listen, Order, PredictionConfig
from lengthwise.gateway.observe.fairness import Fairness
from lengthwise.gateway.observe.fairness import fairness as observe_fairness
from lengthwise.gateway.observe.replay import Service, VirtualGateway, Withheld, matched
from lengthwise.gateway.observe.trace import Trace, of_journal
from lengthwise.gateway.serve import Gateway
from lengthwise.predict import LengthDistribution, Prompts
from lengthwise.statistics import t_half_width
from lengthwise.testing.engine_server import EngineServer, EngineSpec, LinearSteps, in_thread

Floats = npt.NDArray[np.float64]
Burst = tuple[Floats, Trace, int]
Runs = Mapping[str, Sequence[Floats]]
"""JCT by policy, [shuffles][n]."""
ENGINES = 2
MODEL, OUTPUTS = "tiny", "vicuna-13b-v1.3"
SHRINK, MAX_TOKENS = 10, 512
WINDOW = 50 // SHRINK  # ELIS's 50 tokens, divided as the lengths are
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Model and scheduler in one process: two processes wait for each other in busy loops, too much for two cores."""
FCFS, ISRTF, ORACLE = "fcfs", "isrtf", "oracle"
STEPS = LinearSteps(0.01, 0.001, 0.0001)  # of emulated engines: about a tiny model on one core
_ISRTF_ORDER = Order("isrtf", window_tokens=WINDOW, max_wait_s=math.inf)
POLICIES = {
    FCFS: Order("fcfs", max_wait_s=math.inf),
    ISRTF: _ISRTF_ORDER,
    "isrtf, eager": replace(_ISRTF_ORDER, preemption="worth(factor=1)"),
    "windowed": replace(_ISRTF_ORDER, mode="windowed"),
    "tail-friendly": replace(_ISRTF_ORDER, rank="hrrn"),
    ORACLE: Order("srtf", max_wait_s=math.inf),
}
"""Without a limit of waiting, like the oracle. A preemption must gain a hundred times its cost (the default), or its
cost (eager); tail-friendly orders by wait over predicted length."""
CONCLUSIVE = {"gap_closed": 0.2, "p99_over_oracle": 0.1, "mean_over_fcfs": 0.1}
"""Largest half-width of the interval of a difference that still decides: of the gap, and relative for ratios."""
NEGLIGIBLE = {"gap_closed": 0.05, "p99_over_oracle": 0.02, "mean_over_fcfs": 0.02}
"""Differences that matter to no user: where the complete interval is below, the prediction is right."""


class Plan(NamedTuple):
    loads: tuple[float, ...] = (1.0, 3.0, 5.0)
    batches: tuple[int, ...] = (1, 2, 4)
    shuffles: int = 12
    simulated: int = 40


FULL, QUICK = Plan(), Plan(loads=(3.0,), batches=(2,), shuffles=2, simulated=4)


@dataclass
class Cell:
    """One load at one batch size."""

    load: float
    batch: int
    measured: dict[str, list[Floats]] = field(default_factory=lambda: defaultdict(list))
    simulated: dict[str, list[Floats]] = field(default_factory=lambda: defaultdict(list))
    fcfs_traces: list[Trace] = field(default_factory=list)
    preemptions: Counter[str] = field(default_factory=Counter)


def figures(shared: Path, quick: bool, kind: str) -> dict[str, Any]:
    """Return the rows of "live" engines in real time, or of "emulated" ones in virtual time."""
    import uvloop

    plan = QUICK if quick else FULL
    shuffle(shared, 0, 1)  # fails early without data
    if kind == "emulated":
        with ProcessPoolExecutor() as pool:  # the longest first
            runs = [pool.submit(_emulated, shared, plan, batch) for batch in reversed(plan.batches)]
            cells = [cell for run in reversed(runs) for cell in run.result()]
    else:
        with _real_engines(max(plan.batches)) as urls, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            cells = [c for batch in plan.batches for c in runner.run(_measure_batch(shared, plan, urls, batch))]
    measured, simulated = [cell.measured for cell in cells], [cell.simulated for cell in cells]
    policies = {name: _evaluate(measured, simulated, name) for name in POLICIES if name not in (FCFS, ORACLE)}
    own, results = policies[ISRTF], [result for of in policies.values() for result in of.values()]
    verdicts = Counter(result["verdict"] for result in results)
    inside = sum(result["ci"][0] <= result["simulated"] <= result["ci"][1] for result in results)
    details = {"policies": policies, "cells": list(map(_summary_of, cells)), "machine": machine()}
    return {
        f"gateway.{kind}.gap_closed": own["gap_closed"] | details,
        f"gateway.{kind}.p99_over_oracle": own["p99_over_oracle"],
        f"gateway.{kind}.simulated_within": {"value": verdicts["within"] / verdicts.total(), **verdicts},
        f"gateway.{kind}.simulated_in_interval": inside / len(results),
    }


def behind_envoy(shared: Path, quick: bool) -> dict[str, Any]:
    """Return the share of the gap that the order closes behind a real Envoy, with emulated engines in real time."""
    shuffles, count, runs = (2, 16, defaultdict(list)) if quick else (12, 48, defaultdict[str, list[Floats]](list))
    engines = [EngineServer(EngineSpec(MODEL, limits=Limits(max_num_seqs=2), steps=STEPS)) for _ in range(ENGINES)]
    with in_thread(*engines):
        for seed, name in itertools.product(range(shuffles), (FCFS, ISRTF, ORACLE)):
            made = shuffle(shared, seed, count, 36.0)  # three times the rate that the engines serve
            runs[name].append(asyncio.run(_run([one.url for one in engines], 2, name, made, envoy=True))[0])
    return {"gateway.envoy.gap_closed": _evaluate([runs], [runs], ISRTF)["gap_closed"] | {"machine": machine()}}


# Traffic
class Shrunk:
    """Predicts SHRINK times shorter lengths than the default predictor, once per request."""

    predicts_once = True
    default = cached_property(lambda _: predict.default())

    def fit(self, samples: Any) -> Any:
        raise NotImplementedError

    def predict(self, prompts: Prompts, tokens_so_far: Any = 0) -> LengthDistribution:  # noqa: ARG002
        return LengthDistribution.of(np.maximum(1.0, self.default.predict(prompts).tokens / SHRINK))


PREDICTOR = Shrunk()


def shuffle(shared: Path, seed: int, count: int, rate_rps: float = 1e6) -> Workload:
    """Return ``count`` of the recorded prompts in random order at a rate, with predictions."""
    import _elis

    texts = _elis.texts(shared, OUTPUTS)
    rng = np.random.default_rng([seed, 0x6A1])
    texts = texts.take(rng.permutation(len(texts))[:count])
    tokens = np.clip(np.rint(texts.output_tokens / SHRINK).astype(np.int64), 1, MAX_TOKENS)
    extra = {"prompt": np.array(texts.prompts.text, object), "model": np.array([MODEL] * count, object)}
    gaps_s = workload.Gamma(1.0, 0.73**-0.5).sample(count, rng)  # as in ELIS
    made = Workload(gaps_s, np.maximum(1, texts.prompts.prompt_tokens), tokens, extra=extra, name="gain")
    made = replace(made, arrival_s=(made.arrival_s - made.arrival_s[0]) / rate_rps)
    return predict.attach(made, PREDICTOR, window_tokens=WINDOW)


async def _send(url: str, made: Workload) -> tuple[Floats, Withheld]:
    """Send requests in an open loop, check their lengths, and return [n] JCT from due to last byte."""
    fixed = {"model": MODEL, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
    fixed |= {"stream_options": {"include_usage": True}, "cache_salt": uuid.uuid4().hex}  # no run finds prompts cached
    tokens = made.output_tokens.tolist()
    bodies = [
        fixed | {"prompt": prompt, "vllm_xargs": {"output_tokens": n, "max_tokens": MAX_TOKENS}}
        for prompt, n in zip(made.extra["prompt"], tokens, strict=True)
    ]
    found = await posted(url, bodies, made.arrival_s.tolist(), clock=_clock())
    pairs = []  # whether text is withheld, of each token and the one after it
    for n, (*_, content) in zip(tokens, found, strict=True):
        events = [json.loads(one[6:]) for one in content.split(b"\n\n") if one.startswith(b"data: {")]
        usage = next(event["usage"] for event in reversed(events) if event.get("usage"))
        assert usage["completion_tokens"] == n, (usage, n)
        is_withheld = [not event["choices"][0]["text"] for event in events if event["choices"]][:-1]
        pairs += list(pairwise(is_withheld))
    shares = np.mean([one for one, _ in pairs]), np.mean([after for one, after in pairs if one] or [0.0])
    return np.array([end_s - due_s for due_s, _, end_s, _ in found]), Withheld(*map(float, shares))


def _clock() -> Any:
    loop = asyncio.get_running_loop()
    return loop.time if isinstance(loop, VirtualLoop) else time.monotonic


# Engines
@contextlib.contextmanager
def _real_engines(batch: int) -> Iterator[list[str]]:
    """Start vLLMs on one thread each, in parallel; raise FileNotFoundError where none is installed."""
    import _vllm

    from lengthwise.backend.process import local_engine, reserved_port
    from lengthwise.gateway.demo import engine_side

    python = _vllm.require()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = _vllm.make_model(Path(folder) / MODEL, "tiny")

        def start(number: int) -> str:
            place, port = Path(folder) / f"engine-{number}", stack.enter_context(reserved_port())
            place.mkdir()
            words = f"""-m vllm.entrypoints.openai.api_server --model {model} --served-model-name {MODEL}
                --host 127.0.0.1 --port {port} --dtype float32 --max-model-len 1536 --max-num-seqs {batch}
                --max-num-batched-tokens 2048 --generation-config vllm --distributed-executor-backend {ONE_PROCESS}
                --middleware forced_length.ForcedLength --enforce-eager --disable-uvicorn-access-log"""
            paths = [str(Path(engine_side.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
            env = _vllm.QUIET | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CACHE_ROOT": str(place / "cache")}
            env["PYTHONPATH"] = os.pathsep.join(paths)
            one = local_engine([python, *words.split()], port=port, env=env, log_path=place / "log", ready_s=600.0)
            return stack.enter_context(one).url

        with ThreadPoolExecutor(ENGINES) as pool:
            urls = list(pool.map(start, range(ENGINES)))
        yield urls


def _emulated(shared: Path, plan: Plan, batch: int) -> list[Cell]:
    """Measure and simulate all loads at one batch size in virtual time."""

    async def measured() -> list[Cell]:
        spec = EngineSpec(MODEL, limits=Limits(max_num_seqs=batch), steps=STEPS)
        async with contextlib.AsyncExitStack() as stack:
            urls = [(await stack.enter_async_context(EngineServer(spec))).url for _ in range(ENGINES)]
            return await _measure_batch(shared, plan, urls, batch)

    return run_virtually(measured())


# Measurement
async def _measure_batch(shared: Path, plan: Plan, urls: Sequence[str], batch: int) -> list[Cell]:
    """Measure and simulate all loads at one batch size."""
    count = 16 + 16 * batch  # enough requests per slot for slots to change hands
    first = shuffle(shared, 999, count)
    await _run(urls, batch, FCFS, shuffle(shared, 998, 8))  # warms up
    _, trace, _ = await _run(urls, batch, FCFS, first)
    _, withheld = await _send(urls[0], first)
    service = _fit([trace], batch)
    # Traces count prompts as the engine does, the recording counts another model's tokens.
    per_token = trace.prompt_tokens.sum() / first.prompt_tokens.sum()
    request_s = (service.step_s + service.seq_s * batch) / batch * first.output_tokens.mean()
    request_s += service.prompt_s * trace.prompt_tokens.mean() + service.front_s / batch
    rate_rps = ENGINES / request_s
    cells = [Cell(load, batch) for load in plan.loads]
    for seed in range(plan.shuffles):
        for cell in cells:
            made = shuffle(shared, seed, count, cell.load * rate_rps)
            turn = seed % len(POLICIES)  # another policy starts in each shuffle
            for name in (*list(POLICIES)[turn:], *list(POLICIES)[:turn]):
                jct_s, trace, preemptions = await _run(urls, batch, name, made)
                cell.measured[name].append(jct_s)
                cell.preemptions[name] += preemptions
                if name == FCFS:
                    cell.fcfs_traces.append(trace)

    def simulated(cell: Cell, seed: int) -> Workload:
        made = shuffle(shared, seed, count, cell.load * rate_rps)
        return replace(made, prompt_tokens=np.maximum(1, np.rint(per_token * made.prompt_tokens)).astype(np.int64))

    traces = [trace for cell in cells for trace in cell.fcfs_traces]
    at_engine_s = float(np.concatenate([trace.finished_s - trace.dispatched_s for trace in traces]).mean())
    measured = [simulated(cell, seed) for cell in cells for seed in range(plan.shuffles)]
    service = matched(_fit(traces, batch), measured, at_engine_s)
    for cell in cells:
        for seed in range(max(plan.simulated, plan.shuffles)):
            made = simulated(cell, seed)
            known = replace(made, predicted_tokens=made.output_tokens.astype(float), predictions=None)
            for name, order in POLICIES.items():
                twin = VirtualGateway(known if name == ORACLE else made, service, order, withheld, seed)
                cell.simulated[name].append(twin.run().jct_s)
    return cells


async def _run(urls: Sequence[str], batch: int, name: str, made: Workload, *, envoy: bool = False) -> Burst:
    """Send one burst through a gateway of its own; return JCT, the gateway's trace and the number of preemptions."""
    from lengthwise.gateway.length_prediction import LengthPredictor, Oracle

    lengths = dict(zip(made.extra["prompt"], made.output_tokens.tolist(), strict=True))

    def length_predictor(config: PredictionConfig, clock: Any, late: Any) -> LengthPredictor:
        if name == ORACLE:
            return Oracle(config, clock, length=lambda _, text: lengths[text or ""])
        return LengthPredictor(config, clock, late, predictor=PREDICTOR, place="inline")

    with tempfile.TemporaryDirectory() as folder:
        journal = str(Path(folder) / "journal.jsonl")
        config = GatewayConfig(
            engines=tuple(Engine(url, concurrency=batch, generation_defaults="none") for url in urls),
            order=POLICIES[name],
            prediction=PredictionConfig(learn=False),
            listen=Listen(port=0, admin_port=None, journal=journal),
            envoy=(carrier := Envoy(free_port() if envoy else None, port=free_port())),
        )
        async with Gateway(config, make_predictor=length_predictor, clock=_clock()) as gateway:
            assert await gateway.fleet.wait_checked(30.0)
            with running(envoy_command([*urls], carrier), {*ALL_CORES}) if envoy else contextlib.nullcontext():
                while envoy and socket.socket().connect_ex(("127.0.0.1", carrier.port)):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                jct_s, _ = await _send(f"http://127.0.0.1:{carrier.port if envoy else gateway.port}", made)
            preemptions = gateway.driver.statistics().preemptions
            await gateway.drain()
        return jct_s, of_journal(journal), preemptions


# Fairness
DEMANDS = {"many": 0.6, "long": 0.2, "few": 0.2}  # shares of all requests by tenant; outputs of "long" are 4 x as long


def fair(_: Path, quick: bool) -> dict[str, Any]:
    """Return the largest gap of service between backlogged tenants over VTC's bound, in virtual time."""
    rng, count = np.random.default_rng(0), 120 if quick else 480
    tenants = rng.choice(list(DEMANDS), count, p=list(DEMANDS.values()))
    tokens = np.clip(rng.lognormal(3.5, 0.8, count) * np.where(tenants == "long", 4, 1), 2, 800).astype(int)
    due_s = np.sort(rng.uniform(0.0, count / 40, count))  # about five times what the engines serve

    async def served(fairness: str) -> Fairness:
        spec = EngineSpec(MODEL, limits=Limits(max_num_seqs=4), steps=STEPS)
        async with contextlib.AsyncExitStack() as stack:
            urls = [(await stack.enter_async_context(EngineServer(spec))).url for _ in range(ENGINES)]
            journal = str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "journal.jsonl")
            config = GatewayConfig(
                tuple(Engine(url, concurrency=4, generation_defaults="none") for url in urls),
                order=replace(POLICIES[ISRTF], fairness=fairness),
                keys=tuple(Key(name, hashlib.sha256(name.encode()).hexdigest()) for name in DEMANDS),
                listen=Listen(port=0, admin_port=None, journal=journal),
            )
            async with Gateway(config, clock=_clock()) as gateway:
                assert await gateway.fleet.wait_checked(30.0)
                fixed, posts = {"model": MODEL, "stream": True, "max_tokens": MAX_TOKENS}, []
                for name in DEMANDS:
                    forced = ({"output_tokens": n, "max_tokens": MAX_TOKENS} for n in tokens[tenants == name].tolist())
                    bodies = [fixed | {"prompt": f"{name} {at}", "vllm_xargs": one} for at, one in enumerate(forced)]
                    times_s, url = due_s[tenants == name].tolist(), f"http://127.0.0.1:{gateway.port}"
                    posts.append(posted(url, bodies, times_s, key=name, clock=_clock()))
                await asyncio.gather(*posts)
                await gateway.drain()
            return observe_fairness(of_journal(journal), config.order)

    vtc, none = run_virtually(served("vtc")), run_virtually(served("none"))
    details = {"without": none.gap_over_bound, "backlogged_s": vtc.backlogged_s, "bound": vtc.bound, "jain": vtc.jain}
    details |= {"price": vtc.mean_jct_s / none.mean_jct_s, "price_simulated": none.price, "machine": machine()}
    return {"gateway.fair.max_service_gap_over_bound": details | {"value": vtc.gap_over_bound}}


# Simulation
def _fit(traces: Sequence[Trace], batch: int) -> Service:
    """Fit engines to times at an engine under FCFS: least squares of relative errors, with the total time preserved.

        at the engine = front_s + step_s tokens + seq_s tokens x (mean number of running sequences) + prompt_s prompt

    Tokens may reach the gateway in bursts, so only dispatch and end of a request are used. Relative errors weigh short
    requests as much as long ones, but such a fit is too low, hence the scaling.
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


# Evaluation
def _evaluate(measured: Sequence[Runs], simulated: Sequence[Runs], name: str) -> dict[str, Any]:
    """Return each metric of a policy over all cells, its interval, the simulated value, and how well both agree."""

    def metrics(cells: Sequence[Runs]) -> dict[str, tuple[Floats, Any]]:
        """Return each metric as numerator and denominator by shuffle; ratios are geometric means over cells."""
        names = (FCFS, name, ORACLE)
        mean = {of: np.array([[jct_s.mean() for jct_s in runs[of]] for runs in cells]) for of in names}
        p99 = {of: np.array([[np.quantile(jct_s, 0.99) for jct_s in runs[of]] for runs in cells]) for of in names}
        saved, possible = (1 - mean[of] / mean[FCFS] for of in (name, ORACLE))
        return {
            "gap_closed": (saved.sum(axis=0), possible.sum(axis=0)),
            "p99_over_oracle": (np.exp(np.log(p99[name] / p99[ORACLE]).mean(axis=0)), 1.0),
            "mean_over_fcfs": (np.exp(np.log(mean[name] / mean[FCFS]).mean(axis=0)), 1.0),
        }

    shuffles, drawn = len(measured[0][name]), len(simulated[0][name])
    found, of_simulated = {}, metrics(simulated)
    for metric, ratio in metrics(measured).items():
        value, deviations = _mean_ratio(*ratio)
        expected, spread = _mean_ratio(*of_simulated[metric])
        same, same_deviations = _mean_ratio(*(np.broadcast_to(part, drawn)[:shuffles] for part in of_simulated[metric]))
        # The interval of the simulated value is for the mean of another sample of as many shuffles.
        half, expected_half = _half_width(deviations), _half_width(spread) * math.sqrt(1 + drawn / shuffles)
        off_by, off_half = value - same, _half_width(deviations - same_deviations)
        scale, verdict = 1.0 if metric == "gap_closed" else same, "within"
        if abs(off_by) + off_half > NEGLIGIBLE[metric] * scale:
            if abs(off_by) > off_half:
                verdict = "not within"
            elif off_half > CONCLUSIVE[metric] * scale:
                verdict = "too noisy to tell"
        of_simulation = {"simulated": expected, "simulated_ci": (expected - expected_half, expected + expected_half)}
        found[metric] = {"value": value, "ci": (value - half, value + half), "verdict": verdict} | of_simulation
    return found


def _mean_ratio(over: Floats, under: Any) -> tuple[float, Floats]:
    """Return a ratio of means over shuffles, and its [n] deviations by the delta method."""
    value = float(np.mean(over) / np.mean(under))
    return value, (over - value * under) / abs(float(np.mean(under)))


def _half_width(deviations: Floats) -> float:
    return float(t_half_width(deviations, 0.95)) if len(deviations) > 1 else math.inf


def _summary_of(cell: Cell) -> dict[str, Any]:
    """Return means and tails of one cell in seconds."""
    by_policy: dict[str, dict[str, float]] = {}
    for name, runs in cell.measured.items():
        jct_s = np.concatenate(runs)
        by_policy[name] = {"preemptions": cell.preemptions[name], "requests": len(jct_s)}
        by_policy[name] |= {"mean_s": jct_s.mean(), "p99_s": np.quantile(jct_s, 0.99)}
    return {"load": cell.load, "batch": cell.batch, "policies": by_policy}
