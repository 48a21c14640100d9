"""What length-aware order gains on real engines: the gateway before two CPU vLLMs, and what the simulator says.

Each run is a burst of recorded prompts (``_gateway_gain_load``) through the whole gateway, over HTTP. 1x is the rate
that two engines with full batches serve, as fitted to runs under FCFS; 3x and 5x are that many times as much. The
policies of a shuffle run one after the other, so that what the machine does meanwhile hits them alike. Intervals are
Student's t over shuffles.

    python benchmarks/_gateway_gain.py [--emulated] [--quick] [--out FILE]   the section alone; emulated: minutes less
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import _gateway_gain_engines as engines
import _gateway_gain_load as load
import _gateway_gain_sim as sim
import _gateway_gain_story as story
from _harness import machine, strict_json

from lengthwise.gateway.config import Engine, Forecasting, GatewayConfig, Listen, Order
from lengthwise.gateway.observe.replay import Service
from lengthwise.gateway.observe.trace import Trace, of_journal
from lengthwise.schema.workload import Workload

FCFS, OURS, ORACLE = "fcfs", "isrtf", "oracle"
_ISRTF = Order("isrtf", window_tokens=load.WINDOW, max_wait_s=math.inf)
POLICIES = {
    FCFS: Order("fcfs", max_wait_s=math.inf),
    OURS: _ISRTF,
    "isrtf, eager": replace(_ISRTF, takeover="worth(factor=1)"),
    "windowed": replace(_ISRTF, mode="windowed"),
    "tail-friendly": replace(_ISRTF, rank="hrrn"),
    ORACLE: Order("srtf", max_wait_s=math.inf),
}
"""Without a bound on waiting, as the oracle's. A cut must be worth a hundred times what it costs (the default), or as
much (eager); tail-friendly orders by wait over predicted length."""


@dataclass(frozen=True)
class Plan:
    """How much of it."""

    loads: tuple[float, ...] = (1.0, 3.0, 5.0)
    batches: tuple[int, ...] = (1, 2, 4)
    shuffles: int = 12
    requests: tuple[int, int] = (16, 16)
    """Of a burst: so many, and so many more for each place at an engine: places must change hands several times."""
    simulated: int = 40
    policies: tuple[str, ...] = tuple(POLICIES)

    def count(self, batch: int) -> int:
        """Requests of a burst."""
        return self.requests[0] + self.requests[1] * batch


FULL = Plan()
QUICK = Plan(loads=(3.0,), batches=(2,), shuffles=2)


@dataclass
class Cell:
    """One load at one batch size: JCT by policy, [shuffles][n].

    ``paced`` are those of ``live`` over the pace of their run: how long requests that were not cut were at engines,
    in units of what the fitted engines take. It leaves out what neighbours on the machine did to a run.
    """

    load: float
    batch: int
    live: dict[str, list[load.Floats]] = field(default_factory=dict)
    simulated: dict[str, list[load.Floats]] = field(default_factory=dict)
    paced: dict[str, list[load.Floats]] = field(default_factory=dict)
    traces: dict[str, list[Trace]] = field(default_factory=dict)
    cuts: dict[str, int] = field(default_factory=dict)


def figures(shared: Path, fast: bool, *, is_emulated: bool = False, urls: Sequence[str] = ()) -> dict[str, Any]:
    """Rows by name; raises FileNotFoundError where data or engines are absent.

    Args:
        shared: The folder of recorded data.
        quick: One cell, two shuffles.
        is_emulated: Emulated engines in place of vLLM.
        urls: Engines that run already, started as ``_gateway_gain_engines`` does.
    """
    plan = QUICK if fast else FULL
    load.shuffle(shared, 0, 1)  # the data are there
    cells: list[Cell] = []
    services: dict[int, Service] = {}
    with contextlib.ExitStack() as stack:
        if not (urls or is_emulated):
            urls = stack.enter_context(engines.real(max(plan.batches)))
        for batch in plan.batches:
            if is_emulated:
                urls = stack.enter_context(engines.emulated(batch))
            done, services[batch] = _looped(_batch(shared, plan, urls, batch))
            cells += done
    told = story.told(cells, OURS, FCFS, ORACLE)
    traffic = {"shrunk_by": load.SHRINK, "window_tokens": load.WINDOW, "max_tokens": load.MAX_TOKENS}
    about = {
        "engines": f"{engines.COUNT} {'emulated engines' if is_emulated else 'vLLM 0.32 on a CPU, one thread each'}",
        "plan": plan.__dict__,
        "traffic": traffic,
        "services": {batch: one.__dict__ for batch, one in services.items()},
        "machine": machine(),
    }
    return story.rows(told, about, "gateway.emulated" if is_emulated else "gateway.live")


def _looped(work: Coroutine[Any, Any, Any]) -> Any:
    """What it returns, on the event loop that ``lengthwise serve`` has."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def _batch(shared: Path, plan: Plan, urls: Sequence[str], batch: int) -> tuple[list[Cell], Service]:
    """All loads at one batch size; every engine is given so many requests at once."""
    first = load.shuffle(shared, 999, plan.count(batch))
    warm = load.at_rate(first, 1e6)
    await _run(urls, batch, FCFS, load.at_rate(load.shuffle(shared, 998, 8), 1e6))  # warms up
    _, trace, _ = await _run(urls, batch, FCFS, warm)
    service = sim.service_of([trace], batch, engines.COUNT)
    rate_rps = capacity_rps(service, first)
    _say(f"batch {batch}: {rate_rps:.2f} requests/s, {service}")
    cells = [Cell(times, batch) for times in plan.loads]
    for seed in range(plan.shuffles):
        made = load.shuffle(shared, seed, plan.count(batch))
        for cell in cells:
            for name in _turned(plan.policies, seed):
                served, trace, cuts = await _run(urls, batch, name, load.at_rate(made, cell.load * rate_rps))
                cell.live.setdefault(name, []).append(served.jct_s)
                cell.cuts[name] = cell.cuts.get(name, 0) + cuts
                cell.traces.setdefault(name, []).append(trace)
            means = {name: round(float(jct[-1].mean()), 3) for name, jct in cell.live.items()}
            _say(f"batch {batch}, {cell.load:g}x, shuffle {seed}: {means}")
    service = sim.service_of([one for cell in cells for one in cell.traces[FCFS]], batch, engines.COUNT)
    for cell in cells:
        for name, runs in cell.live.items():
            paces = [sim.pace(trace, service) for trace in cell.traces[name]]
            cell.paced[name] = [jct_s / pace for jct_s, pace in zip(runs, paces, strict=True)]
        for seed in range(max(plan.simulated, plan.shuffles)):
            made = load.at_rate(load.shuffle(shared, seed, plan.count(batch)), cell.load * rate_rps)
            for name in plan.policies:
                jct_s = sim.simulated(made, service, POLICIES[name], knows=name == ORACLE)
                cell.simulated.setdefault(name, []).append(jct_s)
    return cells, service


def capacity_rps(service: Service, made: Workload) -> float:
    """Requests a second of all engines with full batches."""
    max_num_seqs = service.max_num_seqs or 1
    token_s = (service.step_s + service.seq_s * max_num_seqs) / max_num_seqs
    request_s = token_s * made.output_tokens.mean() + service.prompt_s * made.prompt_tokens.mean()
    return service.engines / (request_s + service.front_s / max_num_seqs)


def _turned(names: tuple[str, ...], by: int) -> tuple[str, ...]:
    """Another policy begins in each shuffle."""
    by %= len(names)
    return names[by:] + names[:by]


async def _run(urls: Sequence[str], batch: int, name: str, made: Workload) -> tuple[load.Served, Trace, int]:
    """A gateway of its own for one burst."""
    from lengthwise.gateway.length_prediction import Forecaster, Oracle
    from lengthwise.gateway.serve import Gateway

    lengths = dict(zip(made.extra["prompt"], made.output_tokens.tolist(), strict=True))

    def forecaster(config: Forecasting, clock: Any, late: Any) -> Forecaster:
        if name == ORACLE:
            return Oracle(config, clock, length=lambda _, text: lengths[text or ""])
        return Forecaster(config, clock, late, predictor=load.predictor(), place="inline")

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
            served = await load.sent(gateway.port, made)
            cuts = gateway.driver.statistics().preemptions
            await gateway.drain()
        return served, of_journal(journal), cuts


_START = time.monotonic()


def _say(text: str) -> None:
    print(f"{time.monotonic() - _START:6.1f} s  {text}", file=sys.stderr, flush=True)


def main() -> int:
    """The section alone, its rows as JSON lines."""
    from _sections import SHARED

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--emulated", action="store_true", help="emulated engines in place of vLLM")
    parser.add_argument("--engine", action="append", default=[], help="a vLLM that runs already; repeatable")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    rows = figures(given.shared, given.fast, is_emulated=given.emulated, urls=given.engine)
    lines = "".join(strict_json({"name": name} | row) + "\n" for name, row in rows.items())
    if given.out is not None:
        given.out.write_text(lines)
    print(lines, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
