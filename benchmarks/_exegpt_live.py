"""RRA on a real engine: expected schedules and those that a CPU vLLM with our scheduler class executed.

    python benchmarks/_exegpt_live.py --out FOLDER [--quick]

A vLLM of a small random-weight model on one thread is profiled and calibrated (as in ``_live``). From these tables
the estimator chooses schedules for a task of known lengths. The same requests go to engines with these schedules, to a
gateway in front of the stock scheduler, and to the stock scheduler at the same concurrency; some requests always wait.
Repeats take turns; ranges are over repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import tempfile
import time
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
from _harness import strict_json
from _turns import Turn, in_turns

from lengthwise import Deployment, Workload, simulate
from lengthwise.gateway.protocols import Listener
from lengthwise.measure import write_records
from lengthwise.measure.calibration import read_iterations
from lengthwise.schedule import Cluster, Controls, Estimator, Strategy, TaskLengths
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.deployment import Scheduler

Floats = npt.NDArray[np.float64]
SETTING = Setting("rra", 64, 4096)
SPARE_SEQS = 1.3
"""Maximum sequences over the mean decode batch, so that none has to wait for a slot."""
BOUNDS = {"fast": 1.4, "middle": 2.2, "most": math.inf}
"""Latency of the longest output over the shortest that any schedule has."""
LENGTHS = Lengths(prompt=(64, 0.7, 8, 400), output=(32, 0.5, 8, 96))
LONGEST = LENGTHS.output[3]
GRAIN = 8
"""Outputs are multiples of it, so that the 99th percentile, LONGEST, is a length that many requests have."""
BLOCK = 50


@dataclass(frozen=True)
class Plan:
    """Sizes of the measurement; a window has at least ``min_requests``."""

    live: _live.Plan
    repeats: int = 3
    window_s: float = 20.0
    min_requests: int = 400
    names: tuple[str, ...] = tuple(BOUNDS)


FULL = Plan(replace(_live.FULL, settings=(SETTING,), repeats=2))
QUICK = Plan(replace(_live.QUICK, settings=(SETTING,), profile_s=90.0), 1, 6.0, 100, ("fast", "most"))


@dataclass(frozen=True)
class Expected:
    """A schedule and its estimates."""

    name: str
    controls: Controls
    throughput_rps: float
    latency_s: float
    latency_high_s: float
    decode_batch: float
    cycle_s: float
    encode_s: float
    decode_s: float

    @property
    def ramp(self) -> int:
        """Phases until the decode batch is full."""
        return -(-LONGEST // self.controls.decode_steps) + 1

    @property
    def concurrency(self) -> int:
        """Requests in a decode batch, rounded."""
        return max(1, round(self.decode_batch))

    def requests(self, plan: Plan) -> int:
        """Requests of a run: the window has its planned length between filling and draining the batch."""
        batch = self.controls.encode_batch
        phases = max(10, math.ceil(plan.window_s / self.cycle_s), math.ceil(plan.min_requests / batch))
        return min(4000, batch * (2 * self.ramp + phases + 4))


def figures(shared: Path, quick: bool, out: Path | None = None) -> dict[str, Any]:  # noqa: ARG001 - nothing recorded
    """Calibrate on the stock engine, then run the chosen schedules; raise FileNotFoundError without an engine."""
    _vllm.require()
    plan = QUICK if quick else FULL
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        place = Path(out) if out else Path(folder) / "out"
        place.mkdir(parents=True, exist_ok=True)
        circle = _live.Circle(place.resolve(), Path(folder), plan.live)
        d = circle.deployment(SETTING)
        stock, group = stack.enter_context(_engine(circle, d, "stock"))
        tables, notes = _calibrated(circle, d, stock, group)
        chosen = [one for one in choose(d, tables) if one.name in plan.names]
        engines = {one.name: stack.enter_context(_engine(circle, d, one.name, one.controls))[0] for one in chosen}
        circle.say(f"{len(engines)} engines have schedules")
        runs: dict[str, dict[str, list[dict[str, float]]]] = {}
        for repeat, one in itertools.product(range(plan.repeats), chosen):
            for kind, measured in _run_once(circle, plan, one, engines[one.name], stock, repeat).items():
                runs.setdefault(one.name, {}).setdefault(kind, []).append(measured)
        simulated = {one.name: _simulated(d, tables, one, one.requests(plan)) for one in chosen}
        rows = _rows(chosen, runs, simulated, notes | {"machine": circle.machine})
        (place / "rows.json").write_text("".join(strict_json({"name": n} | row) + "\n" for n, row in rows.items()))
        return rows


def workload(n: int, seed: int) -> Workload:
    """Return requests that all arrive at once.

    Outputs are drawn from every fiftieth of their distribution in turn, in random order: one in fifty is longest.
    """
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
    task = TaskLengths.from_workload(workload(1 << 16, 0))
    estimator = Estimator(task, Cluster(d.gpu, d.node, 1), d.model, {1: tables})
    max_batch = min(32, int(2 * SETTING.step_tokens / task.max_prompt_tokens))
    grid = [
        Controls(Strategy.RRA, batch, steps)
        for batch, steps in itertools.product(range(1, max_batch + 1), range(1, task.max_output_tokens, 2))
    ]
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
def _engine(
    circle: _live.Circle, d: Deployment, name: str, controls: Controls | None = None
) -> Iterator[tuple[str, int]]:
    """Start a vLLM with a schedule, or with its own scheduler; yield its URL and process group."""
    words: tuple[str, ...] = ("--distributed-executor-backend", ONE_PROCESS)
    if controls is not None:
        schedule = {"encode_batch": controls.encode_batch, "decode_steps": controls.decode_steps}
        schedule |= {"record": str(circle.work / f"{name}.phases.jsonl")}
        words += ("--scheduler-cls", "lengthwise.gateway.plugin.RraScheduler")
        words += ("--additional-config", json.dumps({"lengthwise": schedule}))
    log = circle.work / f"vllm-{name}.log"
    with _vllm.served(d, circle.model, log, *words) as engine:
        if controls is not None and "holds this engine to" not in log.read_text():
            raise RuntimeError(f"the engine does not use the schedule: {log.read_text()[-2000:]}")
        circle.say(f"vLLM {name} ready after {engine.ready_after_s:.0f} s")
        yield engine.url, engine.process.pid


def _calibrated(circle: _live.Circle, d: Deployment, url: str, group: int) -> tuple[CostTables, dict[str, Any]]:
    """Return the machine's profile, calibrated on the static and the half load, and what became of it.

    An engine whose model runs in the scheduler's own process logs wrong step times, so counters are saved, too.
    """
    notes: dict[str, Any] = {}
    where = (url, circle.model.name, circle.work / "vllm-stock.log", group, notes, circle.out)
    watched = _vllm.Watched(*where, scrape=True, deployment=_circle.facts_of(d))
    turn = Turn(SETTING, watched.bench, watched.named, LENGTHS, circle.plan.static_s, circle.plan.seconds)
    runs = list(in_turns([turn], circle.plan.repeats))
    for run in runs:
        write_records(run.measured, circle.out / f"{run.name}.measured.parquet")
    fitted = [run for run in runs if run.load in _circle.LEARNT]
    left_out = [run for run in runs if run.load not in _circle.LEARNT]
    path = _vllm.iterations_of(circle.out, next(run.name for run in fitted if run.load == "half"))
    profile = circle.tables(d)
    steps = read_iterations(path) if path.exists() else None
    found = _circle.calibrated(fitted, left_out, replace(d, cost=profile), steps)
    circle.say(f"calibrated on {len(fitted)} runs: {'; '.join(found.notes)}")
    return found.tables, {
        "held_out_errors": _circle.errors(d, found.tables, left_out),
        "held_out_errors_of_profile": _circle.errors(d, profile, left_out),
        "calibration": [asdict(one) for one in found.parameters],
        "calibration_notes": list(found.notes),
        "runs": notes,
    }


def _run_once(
    circle: _live.Circle, plan: Plan, one: Expected, scheduled: str, stock: str, repeat: int
) -> dict[str, dict[str, float]]:
    """Run a schedule inside the engine, by a gateway, and the stock scheduler at the same concurrency."""
    made, model = workload(one.requests(plan), 100 + repeat), circle.model.name
    waiting = 2 * one.concurrency + 4 * one.controls.encode_batch  # a prefill's worth of requests always waits
    record = circle.work / f"{one.name}.phases.jsonl"
    before = len(record.read_text().splitlines()) if record.exists() else 0
    load = asyncio.run(_send(scheduled, model, made, f"r{repeat}x", waiting))
    phases = [json.loads(line) for line in record.read_text().splitlines()[before:]]
    found = {
        "rra": _of_engine(phases, load, made, one),
        "gateway": asyncio.run(_through_gateway(stock, model, made, f"g{repeat}x", one, waiting)),
        "stock": _of_stock(asyncio.run(_send(stock, model, made, f"s{repeat}x", one.concurrency)), made),
    }
    shown = {kind: f"{of['throughput_rps']:.2f}/s {of['latency_s']:.3f} s" for kind, of in found.items()}
    circle.say(f"{one.name} {repeat}: expected {one.throughput_rps:.2f}/s {one.latency_s:.3f} s; {shown}")
    return found


@dataclass(frozen=True)
class Load:
    """[n] when requests were sent and finished, on the machine's monotonic clock; their names at the engine."""

    sent_s: Floats
    finished_s: Floats
    names: tuple[str, ...]


async def _send(url: str, model: str, made: Workload, tag: str, concurrency: int, *, stream: bool = False) -> Load:
    """Send requests in a closed loop; raise AssertionError where an answer does not have its length."""
    import aiohttp

    rng = np.random.default_rng([len(made), sum(tag.encode())])
    slots = asyncio.Semaphore(concurrency)
    names = tuple(f"{tag}{k}" for k in range(len(made)))
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:

        async def request(name: str, prompt: list[int], tokens: int) -> tuple[float, float]:
            body = {"model": model, "prompt": prompt, "max_tokens": tokens, "request_id": name}
            body |= {"ignore_eos": True, "temperature": 0, "stream": stream}
            body |= {"stream_options": {"include_usage": True}} if stream else {}
            async with slots:
                sent_s = time.monotonic()
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    content = await response.read()
                finished_s = time.monotonic()
            assert response.status == 200, content[:500]
            assert f'"completion_tokens":{tokens}' in content.decode(), (tokens, content[-500:])
            return sent_s, finished_s

        prompts = [rng.integers(10, 8000, n).tolist() for n in made.prompt_tokens.tolist()]
        rows = zip(names, prompts, made.output_tokens.tolist(), strict=True)
        times = np.array(await asyncio.gather(*(request(*row) for row in rows)))
    return Load(times[:, 0], times[:, 1], names)


def _window(batches: Sequence[int], one: Expected) -> slice:
    """Return the phases with a full decode batch and waiting requests; the first ones may be smaller."""
    full = [k for k, batch in enumerate(batches) if batch == one.controls.encode_batch]
    window = slice(full[0] + one.ramp, full[-1])
    assert window.stop - window.start > 5 + one.ramp, f"only {window} of {len(batches)} phases are full"
    return window


def _of_engine(phases: Sequence[dict[str, Any]], load: Load, made: Workload, one: Expected) -> dict[str, float]:
    """Return what an engine with a schedule did, from its log of phases."""
    controls = one.controls
    window = phases[_window([phase["admitted"] for phase in phases], one)]
    started_s = np.array([phase["started_s"] for phase in window])

    def exact(phase: dict[str, Any], following: dict[str, Any]) -> bool:
        """Check B_E and N_D; a phase may be shorter if no request is left, so that the next has new ones alone."""
        none_left = following["decode_batch"] <= following["admitted"]
        steps, wanted = phase["decode_steps"], controls.decode_steps
        return phase["admitted"] == controls.encode_batch and (steps == wanted or (steps < wanted and none_left))

    number = {name: k for k, name in enumerate(load.names)}
    latencies_s = []
    for phase in window[: -one.ramp]:  # requests of later phases finish after the window
        for name in phase["requests"]:
            k = number[name.removeprefix("cmpl-").split("-")[0]]
            if made.output_tokens[k] == LONGEST:
                latencies_s.append(load.finished_s[k] - phase["started_s"])
    assert latencies_s, "no request of the longest output is in the window"
    return {
        "throughput_rps": sum(phase["admitted"] for phase in window[:-1]) / float(started_s[-1] - started_s[0]),
        "latency_s": fmean(latencies_s),
        "decode_batch": fmean(phase["decode_batch"] for phase in window),
        "cycle_s": float(np.diff(started_s).mean()),
        "encode_s": fmean(phase["encode_s"] for phase in window),
        "decode_s": fmean(phase["decode_s"] / phase["decode_steps"] for phase in window),
        "exact_phases": fmean(itertools.starmap(exact, itertools.pairwise(window))),
        "phases": len(window),
    }


def _of_stock(load: Load, made: Workload) -> dict[str, float]:
    """Return throughput and latency of the stock scheduler, which runs all requests as soon as they are sent."""
    finished_s = np.sort(load.finished_s)
    low, high = len(finished_s) // 5, (4 * len(finished_s)) // 5
    middle = (load.finished_s > finished_s[low]) & (load.finished_s <= finished_s[high])
    long = middle & (made.output_tokens == LONGEST)
    assert long.any(), "no request of the longest output is in the window"
    return {
        "throughput_rps": float((high - low) / (finished_s[high] - finished_s[low])),
        "latency_s": float((load.finished_s - load.sent_s)[long].mean()),
    }


class Monitor(Listener):
    """Records a gateway's phases, and when each request was at the engine."""

    def __init__(self) -> None:
        self.phases: list[Any] = []
        self.at_engine: list[tuple[float, float, int]] = []
        self._sent: dict[int, float] = {}

    def dispatched(self, request: Any, worker: str, now_s: float) -> None:  # noqa: ARG002
        self._sent[id(request)] = now_s

    def finished(self, request: Any, outcome: Any, now_s: float, detail: str = "") -> None:  # noqa: ARG002
        self.at_engine.append((self._sent.pop(id(request)), now_s, request.generated_tokens))

    def phase(self, phase: Any) -> None:
        self.phases.append(phase)


async def _through_gateway(
    url: str, model: str, made: Workload, tag: str, one: Expected, concurrency: int
) -> dict[str, float]:
    """Send the requests through a gateway in mode rra; return what ``_of_engine`` does, as the gateway saw it."""
    from lengthwise.gateway.config import Dispatch, Engine, Forecasting, GatewayConfig, Listen, Order, Phases
    from lengthwise.gateway.serve import Gateway

    config = GatewayConfig(
        engines=(Engine(url, in_flight=SETTING.seqs, generation_defaults="none"),),
        order=Order("rra", max_wait_s=math.inf),
        dispatch=Dispatch(phases=Phases(one.controls.encode_batch, one.controls.decode_steps)),
        prediction=Forecasting(predictor="none"),
        listen=Listen(port=0, admin_port=None),
    )
    monitor = Monitor()
    async with Gateway(config) as gateway:
        assert await gateway.fleet.stable(60.0)
        gateway.driver.listeners.add(monitor)
        await _send(f"http://127.0.0.1:{gateway.port}", model, made, tag, concurrency, stream=True)
        await gateway.drain()
    window = monitor.phases[_window([phase.encode_batch for phase in monitor.phases], one)]
    started_s, last_s = [phase.started_s for phase in window], window[-one.ramp].started_s
    latencies_s = [
        to_s - from_s
        for from_s, to_s, tokens in monitor.at_engine
        if started_s[0] <= from_s < last_s and tokens == LONGEST
    ]
    assert latencies_s, "no request of the longest output is in the window"
    return {
        "throughput_rps": sum(phase.encode_batch for phase in window[:-1]) / (started_s[-1] - started_s[0]),
        "latency_s": fmean(latencies_s),
        "decode_batch": fmean(phase.decode_batch for phase in window),
        "cycle_s": float(np.diff(started_s).mean()),
        "decode_steps": fmean(phase.decode_steps for phase in window),
        "phases": len(window),
    }


def _simulated(d: Deployment, tables: CostTables, one: Expected, n: int) -> dict[str, float]:
    """Simulate the schedule with the event engine and the same requests."""
    batching = f"rra(encode_batch={one.controls.encode_batch}, decode_steps={one.controls.decode_steps})"
    made = workload(n, 100)
    r = simulate(made, replace(d, cost=tables, scheduler=Scheduler(batching=batching))).requests
    window = np.unique(r.scheduled_s)[one.ramp : -1]
    inside = (r.scheduled_s >= window[0]) & (r.scheduled_s < window[-1])
    long = inside & (made.output_tokens == LONGEST) & (r.scheduled_s < window[-one.ramp])
    return {
        "throughput_rps": float(inside.sum() / (window[-1] - window[0])),
        "latency_s": float((r.finished_s - r.scheduled_s)[long].mean()),
    }


def _rows(
    chosen: Sequence[Expected],
    runs: dict[str, dict[str, list[dict[str, float]]]],
    simulated: dict[str, dict[str, float]],
    notes: dict[str, Any],
) -> dict[str, Any]:
    """Return the worst schedule's error of the mean over repeats, exactness, the gain, and all that was measured."""

    def spread(some: Sequence[dict[str, float]]) -> dict[str, Any]:
        columns = {name: [run[name] for run in some] for name in some[0]}
        return {name: {"mean": fmean(each), "range": [min(each), max(each)]} for name, each in columns.items()}

    by_name = {
        one.name: {
            "expected": asdict(one),
            "measured": spread(runs[one.name]["rra"]),
            "measured_by_gateway": spread(runs[one.name]["gateway"]),
            "stock_at_equal_concurrency": spread(runs[one.name]["stock"]),
            "simulated": simulated[one.name],
        }
        for one in chosen
    }
    found: dict[str, Any] = {}
    for column, target in {"throughput_rps": 0.05, "latency_s": 0.1, "decode_batch": 0.05}.items():
        signed = {one.name: getattr(one, column) / by_name[one.name]["measured"][column]["mean"] - 1 for one in chosen}
        found[f"exegpt.live.{column.removesuffix('_rps').removesuffix('_s')}_error"] = {
            "value": max(map(abs, signed.values())),
            "unit": "relative",
            "target": target,
            "better": "lower",
            "details": {"signed": signed},
        }
    exact = min(by_name[one.name]["measured"]["exact_phases"]["range"][0] for one in chosen)
    gains = {
        name: fmean(a["throughput_rps"] / b["throughput_rps"] for a, b in zip(of["rra"], of["stock"], strict=True))
        for name, of in runs.items()
    }
    repeats = len(runs[chosen[0].name]["rra"])
    return found | {
        "exegpt.live.exact_phases": {"value": exact, "unit": "share", "target": 1.0, "better": "higher"},
        "exegpt.live.over_stock": {"value": max(gains.values()), "unit": "times", "details": gains},
        "exegpt.live.schedules": {
            "value": len(chosen),
            "unit": "schedules",
            "details": {"by_name": by_name, "repeats": repeats} | notes,
        },
    }


def main() -> None:
    """Measure this section alone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for records and rows")
    parser.add_argument("--quick", action="store_true", help="a smaller model, shorter runs, once each")
    args = parser.parse_args()
    for name, row in figures(args.out, args.quick, args.out).items():
        print(f"{name:34} {row['value']:10.4g} {row['unit']}")


if __name__ == "__main__":
    main()
