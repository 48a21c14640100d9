"""RRA on a real engine: expected schedules and those that a CPU vLLM with our scheduler class executed.

A vLLM of a small random-weight model is profiled and calibrated (as in ``_live``), and the estimator chooses schedules.
The same requests go to engines with these schedules, to a gateway in front of the stock scheduler, and to the stock
scheduler at the same concurrency, in turns; ranges are over repeats.
"""

import asyncio
import contextlib
import itertools
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

import _circle
import _live
import _vllm
import numpy as np
import numpy.typing as npt
from _circle import Lengths, Setting
from _gateway_gain import ONE_PROCESS
from _harness import json_lines, posted
from _live import Circle

from lengthwise import Deployment, Scheduler, Workload, simulate
from lengthwise.gateway.protocols import Listener
from lengthwise.schedule import Cluster, Controls, Estimator, Strategy, TaskLengths
from lengthwise.schema.cost_tables import CostTables

Floats = npt.NDArray[np.float64]
Numbers = dict[str, float]
Runs, Rows = dict[str, dict[str, list[Numbers]]], dict[str, Any]
SETTING = Setting("rra", 64, 4096)
SPARE_SEQS = 1.3  # maximum sequences over the mean decode batch, so that none has to wait for a slot
BOUNDS = {"fast": 1.4, "middle": 2.2, "most": math.inf}
"""Latency of the longest output over the shortest that any schedule has."""
LENGTHS = Lengths(prompt=(64, 0.7, 8, 400), output=(32, 0.5, 8, 96))
LONGEST = LENGTHS.output[3]
GRAIN = 8  # outputs are multiples of it, so that the 99th percentile, LONGEST, is a length that many requests have
BLOCK = 50


@dataclass(frozen=True)
class Plan:
    """Sizes of the measurement; a window has at least ``min_requests``."""

    live: _live.Plan
    repeats: int = 3
    window_s: float = 20.0
    min_requests: int = 400
    names: tuple[str, ...] = tuple(BOUNDS)


FULL = Plan(replace(_live.FULL, settings=(SETTING,), repeats=2, lengths=LENGTHS))
QUICK = Plan(replace(_live.QUICK, settings=(SETTING,), profile_s=90.0, lengths=LENGTHS), 1, 6.0, 100, ("fast", "most"))


@dataclass(frozen=True)
class Expected:
    """A schedule and its estimates."""

    name: str
    controls: Controls
    throughput_rps: float
    latency_s: float
    decode_batch: float
    cycle_s: float

    @property
    def ramp(self) -> int:
        """Phases until the decode batch is full."""
        return -(-LONGEST // self.controls.decode_steps) + 1

    def requests(self, plan: Plan) -> int:
        """Requests of a run: the window has its planned length between filling and draining the batch."""
        batch = self.controls.prefill_batch
        phases = max(10, math.ceil(plan.window_s / self.cycle_s), math.ceil(plan.min_requests / batch))
        return min(4000, batch * (2 * self.ramp + phases + 4))


def figures(_: Path, quick: bool) -> dict[str, Any]:
    """Calibrate on the stock engine, then run the chosen schedules; raise FileNotFoundError without an engine."""
    _vllm.require()
    plan = QUICK if quick else FULL
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = _vllm.make_model(Path(folder) / plan.live.size, plan.live.size)
        circle = Circle(Path(folder) / "out", Path(folder), plan.live, json.loads((model / "config.json").read_text()))
        d = circle.deployment(SETTING)
        stock, group = stack.enter_context(_engine(circle, d, "stock"))
        tables, notes = _calibrated(circle, d, stock, group)
        chosen = [one for one in choose(d, tables) if one.name in plan.names]
        engines = {one.name: stack.enter_context(_engine(circle, d, one.name, one.controls))[0] for one in chosen}
        runs: Runs = {}
        for repeat, one in itertools.product(range(plan.repeats), chosen):
            for kind, measured in _run_once(circle, plan, one, engines[one.name], stock, repeat).items():
                runs.setdefault(one.name, {}).setdefault(kind, []).append(measured)
        simulated = {one.name: _simulated(d, tables, one, one.requests(plan)) for one in chosen}
    return _rows(chosen, runs, simulated, notes | {"machine": circle.machine})


def workload(n: int, seed: int) -> Workload:
    """Return requests that all arrive at once."""
    # Outputs are drawn from every fiftieth of their distribution in turn, in random order: one in fifty is longest.
    made = LENGTHS.workload(n, seed, None, "rra")
    median, sigma, shortest, longest = LENGTHS.output
    rng = np.random.default_rng([seed, n])
    strata = np.concatenate([rng.permutation(BLOCK) for _ in range(-(-n // BLOCK))])[:n]
    normal = NormalDist(math.log(median), sigma)
    levels = np.clip((strata + rng.random(n)) / BLOCK, 1e-9, 1 - 1e-9)
    output = np.clip(np.exp([normal.inv_cdf(level) for level in levels.tolist()]), shortest, longest)
    return replace(made, output_tokens=(-(-output // GRAIN) * GRAIN).astype(np.int64))


def choose(d: Deployment, tables: CostTables) -> list[Expected]:
    """Return for each bound the schedule of the highest throughput whose decode batch fits; each once."""
    requests = workload(1 << 16, 0)
    task = TaskLengths.from_samples(requests.prompt_tokens, requests.output_tokens)
    estimator = Estimator(task, Cluster(d.gpu, d.node, 1), d.model, {1: tables})
    max_batch = min(32, int(2 * SETTING.step_tokens / task.max_prompt_tokens))
    sizes = itertools.product(range(1, max_batch + 1), range(1, task.max_output_tokens, 2))
    grid = [Controls(Strategy.RRA, batch, steps) for batch, steps in sizes]
    got = estimator.estimate(grid)
    fits = got.feasible & (got.decode_batch * SPARE_SEQS <= SETTING.seqs) & (got.decode_batch >= 2)
    min_s = float(got.latency_s[fits].min())
    columns = [name for name in Expected.__dataclass_fields__ if name not in ("name", "controls")]
    found: dict[Controls, Expected] = {}
    for name, times in BOUNDS.items():
        good = np.flatnonzero(fits & (got.latency_s <= times * min_s))
        row = int(good[np.argmax(got.throughput_rps[good])])
        numbers = {column: float(getattr(got, column)[row]) for column in columns}
        found.setdefault(grid[row], Expected(name, grid[row], **numbers))
    return list(found.values())


@contextlib.contextmanager
def _engine(circle: Circle, d: Deployment, name: str, controls: Controls | None = None) -> Iterator[tuple[str, int]]:
    """Start a vLLM with a schedule, or with its own scheduler; yield its URL and process group."""
    words: tuple[str, ...] = ("--distributed-executor-backend", ONE_PROCESS)
    if controls is not None:
        schedule = {"prefill_batch": controls.prefill_batch, "decode_steps": controls.decode_steps}
        schedule |= {"record": str(circle.work / f"{name}.phases.jsonl")}
        words += ("--scheduler-cls", "lengthwise.gateway.plugin.RraScheduler")
        words += ("--additional-config", json.dumps({"lengthwise": schedule}))
    log = circle.work / f"vllm-{name}.log"
    with _vllm.served(d, circle.model, log, *words) as engine:
        if controls is not None and "restricts this engine to" not in log.read_text():
            raise RuntimeError(f"the engine does not use the schedule: {log.read_text()[-2000:]}")
        circle.report(f"vLLM {name} ready after {engine.ready_after_s:.0f} s")
        yield engine.url, engine.process.pid


def _calibrated(circle: Circle, d: Deployment, url: str, group: int) -> tuple[CostTables, dict[str, Any]]:
    """Return the machine's profile, calibrated on the static and the half load, and what became of it."""
    # An engine whose model runs in the scheduler's own process logs wrong step times, so counters are saved, too.
    where = (url, circle.model.name, circle.work / "vllm-stock.log", group, circle.out)
    watched = _vllm.Watched(*where, scrape=True, deployment=_circle.facts_of(d))
    _circle.in_turns([circle.turn(SETTING, watched.bench, watched.named)], circle.plan.repeats, circle.report)
    split = circle.split(circle.runs, SETTING)
    found = split.calibrated()
    circle.report(f"calibrated on {len(split.learnt)} runs: {'; '.join(found.notes)}")
    return found.tables, {"calibration": [asdict(one) for one in found.parameters]}


def _run_once(circle: Circle, plan: Plan, one: Expected, scheduled: str, stock: str, repeat: int) -> dict[str, Numbers]:
    """Run a schedule inside the engine, by a gateway, and the stock scheduler at the same concurrency."""
    made, model = workload(one.requests(plan), 100 + repeat), circle.model.name
    concurrency = max(1, round(one.decode_batch))
    waiting = 2 * concurrency + 4 * one.controls.prefill_batch  # a prefill's worth of requests always waits
    record, longest = circle.work / f"{one.name}.phases.jsonl", made.output_tokens == LONGEST
    before = len(json_lines(record)) if record.exists() else 0
    _, finished_s = asyncio.run(_send(scheduled, model, made, f"r{repeat}x", waiting))
    phases, served = json_lines(record)[before:], []
    for phase in phases:
        for name in phase["requests"]:
            k = int(name.removeprefix("cmpl-").split("-")[0].removeprefix(f"r{repeat}x"))
            served += [(phase["started_s"], finished_s[k])] if longest[k] else []
    found = {"rra": _of_phases(phases, one, served)}
    found["gateway"] = _of_phases(*asyncio.run(_through_gateway(stock, model, made, f"g{repeat}x", one, waiting)))
    # The stock scheduler runs all requests as soon as they are sent; its window is the middle of the finished ones.
    sent_s, finished_s = asyncio.run(_send(stock, model, made, f"s{repeat}x", concurrency))
    from_s, to_s = np.sort(finished_s)[[len(made) // 5, 4 * len(made) // 5]]
    inside = (finished_s > from_s) & (finished_s <= to_s)
    latency_s = float((finished_s - sent_s)[inside & longest].mean())
    found["stock"] = {"throughput_rps": float(inside.sum() / (to_s - from_s)), "latency_s": latency_s}
    return found


async def _send(
    url: str, model: str, made: Workload, tag: str, concurrency: int, *, stream: bool = False
) -> tuple[Floats, Floats]:
    """Send requests in a closed loop; return [n] monotonic times of sending and finishing, and check the lengths."""
    rng = np.random.default_rng([len(made), sum(tag.encode())])
    fixed = {"model": model, "ignore_eos": True, "temperature": 0, "stream": stream}
    fixed |= {"stream_options": {"include_usage": True}} if stream else {}
    prompts = (rng.integers(10, 8000, n).tolist() for n in made.prompt_tokens.tolist())
    rows = enumerate(zip(prompts, made.output_tokens.tolist(), strict=True))
    bodies = [fixed | {"prompt": prompt, "max_tokens": n, "request_id": f"{tag}{k}"} for k, (prompt, n) in rows]
    found = await posted(url, bodies, concurrency=concurrency)
    for body, (*_, content) in zip(bodies, found, strict=True):
        assert f'"completion_tokens":{body["max_tokens"]}' in content.decode().replace(" ", ""), content[-500:]
    return np.array([one[1] for one in found]), np.array([one[2] for one in found])


def _of_phases(phases: Sequence[dict[str, Any]], one: Expected, longest: Sequence[tuple[float, float]]) -> Numbers:
    """Return what phases with a full decode batch and waiting requests did; the first ones may be smaller."""
    # ``longest``: admission and end of the requests with the longest output.
    batch, steps = one.controls.prefill_batch, one.controls.decode_steps
    full = [k for k, phase in enumerate(phases) if phase["admitted"] == batch]
    window = phases[full[0] + one.ramp : full[-1]]
    assert len(window) > 5 + one.ramp, f"only {len(window)} of {len(phases)} phases are full"
    started_s = [phase["started_s"] for phase in window]
    # Requests of the last phases finish after the window.
    latencies_s = [to_s - from_s for from_s, to_s in longest if started_s[0] <= from_s < started_s[-one.ramp]]
    assert latencies_s, "no request of the longest output is in the window"

    def exact(phase: dict[str, Any], following: dict[str, Any]) -> bool:
        """Check B_E and N_D; a phase may be shorter if no request is left, so that the next has new ones alone."""
        shorter = phase["decode_steps"] < steps and following["decode_batch"] <= following["admitted"]
        return phase["admitted"] == batch and (phase["decode_steps"] == steps or shorter)

    found = {
        "throughput_rps": sum(phase["admitted"] for phase in window[:-1]) / (started_s[-1] - started_s[0]),
        "latency_s": fmean(latencies_s),
        "decode_batch": fmean(phase["decode_batch"] for phase in window),
        "cycle_s": (started_s[-1] - started_s[0]) / (len(window) - 1),
    }
    if "prefill_s" in window[0]:  # only the engine's own log has its rhythm
        found["exact_phases"] = fmean(itertools.starmap(exact, itertools.pairwise(window)))
    return found


class Monitor(Listener):
    """Records a gateway's phases, and when each request with the longest output was at the engine."""

    def __init__(self) -> None:
        self.phases: list[dict[str, Any]] = []
        self.longest: list[tuple[float, float]] = []
        self._sent: dict[int, float] = {}

    def dispatched(self, request: Any, worker: str, now_s: float) -> None:  # noqa: ARG002
        self._sent[id(request)] = now_s

    def on_end(self, request: Any, outcome: Any, now_s: float, detail: str = "") -> None:  # noqa: ARG002
        ends = self._sent.pop(id(request)), now_s
        self.longest += [ends] if request.generated_tokens == LONGEST else []

    def phase(self, phase: Any) -> None:
        self.phases.append({**asdict(phase), "admitted": phase.prefill_batch})


async def _through_gateway(
    url: str, model: str, made: Workload, tag: str, one: Expected, concurrency: int
) -> tuple[list[dict[str, Any]], Expected, list[tuple[float, float]]]:
    """Send the requests through a gateway in mode rra; return the arguments of ``_of_phases``."""
    from lengthwise.gateway.config import Dispatch, Engine, GatewayConfig, Listen, Order, Phases, PredictionConfig
    from lengthwise.gateway.serve import Gateway

    config = GatewayConfig(
        engines=(Engine(url, concurrency=SETTING.seqs, generation_defaults="none"),),
        order=Order("rra", max_wait_s=math.inf),
        dispatch=Dispatch(phases=Phases(one.controls.prefill_batch, one.controls.decode_steps)),
        prediction=PredictionConfig(predictor="none"),
        listen=Listen(port=0, admin_port=None),
    )
    monitor = Monitor()
    async with Gateway(config) as gateway:
        assert await gateway.fleet.wait_checked(60.0)
        gateway.driver.listeners.add(monitor)
        await _send(f"http://127.0.0.1:{gateway.port}", model, made, tag, concurrency, stream=True)
        await gateway.drain()
    return monitor.phases, one, monitor.longest


def _simulated(d: Deployment, tables: CostTables, one: Expected, n: int) -> dict[str, float]:
    """Simulate the schedule with the event engine and the same requests."""
    batching = f"rra(prefill_batch={one.controls.prefill_batch}, decode_steps={one.controls.decode_steps})"
    made = workload(n, 100)
    r = simulate(made, replace(d, cost=tables, scheduler=Scheduler(batching=batching))).requests
    window = np.unique(r.scheduled_s)[one.ramp : -1]
    inside = (r.scheduled_s >= window[0]) & (r.scheduled_s < window[-1])
    long = inside & (made.output_tokens == LONGEST) & (r.scheduled_s < window[-one.ramp])
    rps, latency_s = inside.sum() / (window[-1] - window[0]), (r.finished_s - r.scheduled_s)[long].mean()
    return {"throughput_rps": float(rps), "latency_s": float(latency_s)}


def _rows(chosen: Sequence[Expected], runs: Runs, simulated: dict[str, Numbers], notes: dict[str, Any]) -> Rows:
    """Return the worst schedule's error of the mean over repeats, exactness, the gain, and all that was measured."""

    def spread(some: Sequence[dict[str, float]]) -> dict[str, Any]:
        columns = {name: [run[name] for run in some] for name in some[0]}
        return {name: {"mean": fmean(each), "range": [min(each), max(each)]} for name, each in columns.items()}

    kinds = {"measured": "rra", "measured_by_gateway": "gateway", "stock_at_equal_concurrency": "stock"}
    by_name = {
        one.name: {"expected": asdict(one), "simulated": simulated[one.name]}
        | {key: spread(runs[one.name][kind]) for key, kind in kinds.items()}
        for one in chosen
    }
    found: dict[str, Any] = {}
    for column, target in {"throughput_rps": 0.05, "latency_s": 0.1, "decode_batch": 0.05}.items():
        signed = {one.name: getattr(one, column) / by_name[one.name]["measured"][column]["mean"] - 1 for one in chosen}
        row = {"value": max(map(abs, signed.values())), "unit": "relative", "target": target, "better": "lower"}
        found[f"exegpt.live.{column.removesuffix('_rps').removesuffix('_s')}_error"] = row | {"signed": signed}
    exact = min(by_name[one.name]["measured"]["exact_phases"]["range"][0] for one in chosen)
    pairs = {name: zip(of["rra"], of["stock"], strict=True) for name, of in runs.items()}
    gains = {name: fmean(a["throughput_rps"] / b["throughput_rps"] for a, b in of) for name, of in pairs.items()}
    return found | {
        "exegpt.live.exact_phases": {"value": exact, "unit": "share", "target": 1.0, "better": "higher"},
        "exegpt.live.over_stock": {"value": max(gains.values()), "unit": "times", "gains": gains},
        "exegpt.live.schedules": {"value": len(chosen), "unit": "schedules", "by_name": by_name} | notes,
    }
