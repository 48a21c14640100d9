"""Whether model intervals hold what was measured: 16 draws of the cost model's own errors, as ``simulate`` has them.

An interval runs from the 5th to the 95th percentile and should hold 9 of 10 measured values. Silicon points (those that
``deploy`` can express, of recorded clients) are told by ``deploy`` and ``simulate`` with the host and front of other
models and GPUs ("unseen", the headline), with the engine's by name, which these points shaped ("engine"), and with the
default, which has no front ("default"). Recorded runs are told by kernels of the same GPU, and by the roofline.
Nothing of a point goes into its own interval, but the standard deviations were published with fits of kernels on
these GPUs. How much slower a front may be was fitted to the TTFT of one half of the pairs of model and GPU
(_front_spread.py): the headline of TTFT is of the other half, that of TPOT of all. That it leans to the slow side was
chosen after all points had been seen. Points of a pair are sweeps of loads and settings over one model on one GPU:
intervals of a coverage draw whole pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import _front_spread
import _recorded
import _silicon
import _silicon_rows
import numpy as np
from _clusters import LEAST_GROUPS, share_interval
from _silicon_fit import host_of
from _silicon_loop import loop_of, means, workload
from _silicon_rows import Point
from _silicon_shipped import deployed, is_expressible

from lengthwise.cost import HostOverhead
from lengthwise.cost.model_error import LEVEL, perturbed
from lengthwise.cost.roofline_tables import FRONT_SLOW_LOG_SD
from lengthwise.engine import deploy, simulate
from lengthwise.schema.cost_tables import Front
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import Workload

QUICK, SEED, EVERY = 12, 5, 40
HOSTS = ("unseen", "engine", "default")
METRICS = ("ttft", "tpot")
FITTED, HELD_OUT = "fitted half", "other half"
WAITS, NO_WAITS = "told to wait by the engine's settings", "no such wait"
_Z90 = 1.645
_MUCH, _LITTLE = 0.5, 0.2


@dataclass(frozen=True)
class Bracket:
    """One measured number and what was said of it.

    Attributes:
        truth: Which ground truth: "silicon", "recorded".
        told: By which costs or host.
        metric: "ttft", "tpot" or "latency".
        of: Further words by which it is counted: model, gpu, backend.
        front: The front's share of the number said.
    """

    truth: str
    report: str
    metric: str
    of: dict[str, str]
    measured: float
    message: float
    low: float
    high: float
    front: float = 0.0

    @property
    def pair(self) -> tuple[str, str]:
        """Model and GPU: numbers of one pair share what its costs are off by."""
        return self.of["model"], self.of["gpu"]

    @property
    def is_satisfied(self) -> bool:
        """Whether the measured value lies within."""
        return self.low <= self.measured <= self.high

    @property
    def miss(self) -> float:
        """log(measured / said)."""
        return math.log(self.measured / self.message)

    @property
    def log_sd(self) -> float:
        """Of the interval, were it that of a log-normal law."""
        return math.log(self.high / self.low) / (2 * _Z90)


def figures(shared: Path, fast: bool) -> dict[str, Any]:
    """The rows ``fidelity.brackets``: coverage of TTFT and TPOT, all held-out ground truths in the details."""
    points = _silicon_rows.read(shared)[0]
    unseen = _unseen(points)
    able = [point for point in points if is_expressible(point) and point.inferencemax and point.pair in unseen]
    fitted = _front_spread.fitted_pairs(able)
    found = [*silicon(able, unseen, fitted, fast=fast), *recorded(shared)]
    rows = {f"fidelity.brackets.{metric}_coverage": _row(found, metric) for metric in METRICS}
    half = [point for point in able if point.pair in fitted][:: EVERY if fast else 1]
    again = _front_spread.spread(half, lambda point: unseen[point.pair](point))
    about = {"shipped": FRONT_SLOW_LOG_SD, "fit_result": again, "points": len(half)}
    rows["fidelity.brackets.ttft_coverage"]["details"]["front_slow_log_sd"] = about
    return rows


def silicon(
    capabilities: Sequence[Point],
    unseen: dict[tuple[str, str], Callable[[Point], HostOverhead]],
    fit_result: Collection[tuple[str, str]],
    *,
    fast: bool,
) -> list[Bracket]:
    """Intervals of the points, each host by turns; a quick look takes a seeded few."""
    chosen = np.random.default_rng(SEED).permutation(len(capabilities))[: QUICK if fast else None]
    found = [bracket for i in sorted(chosen) for host in HOSTS for bracket in of_point(capabilities[i], host, unseen)]
    for one in found:
        one.of["half"] = FITTED if (one.of["model"], one.of["gpu"]) in fit_result else HELD_OUT
    return found


def _unseen(points: list[Point]) -> dict[tuple[str, str], Callable[[Point], HostOverhead]]:
    """By pair of model and GPU, the host that points of neither have shaped."""
    thetas = _silicon.roofline(points, {})[1]

    def host(theta: Any) -> Callable[[Point], HostOverhead]:
        def of(point: Point) -> HostOverhead:
            told = host_of(theta, point)
            return HostOverhead(told.step_s, told.sequence_s, told.request_s, told.queue_s)

        return of

    return {pair: host(theta) for pair, theta in thetas.items()}


def of_point(
    point: Point, report: str, unseen: dict[tuple[str, str], Callable[[Point], HostOverhead]]
) -> list[Bracket]:
    """TTFT and TPOT of a point with one host; nothing where it does not fit."""
    host: Any = {"engine": point.backend, "default": "default"}.get(report) or unseen[point.pair](point)
    try:
        deployment = deployed(point, "roofline", host)
    except InputError:
        return []
    requests = workload(loop_of(point))

    def run(one: Deployment) -> list[float]:
        return list(means(simulate(requests, one, keep_steps=0)))

    said, low, high = interval(run, deployment)
    bare = run(replace(deployment, cost=replace(deployment.cost, front=Front())))
    of = {"model": point.model, "gpu": point.gpu, "backend": point.backend, "id": str(point.id)}
    of["waits"] = WAITS if loop_of(point).wait_steps else NO_WAITS
    return [
        Bracket("silicon", report, metric, of, getattr(point, f"{metric}_s"), said[i], low[i], high[i], front)
        for i, metric in enumerate(METRICS)
        for front in [max(0.0, 1 - bare[i] / said[i])]
    ]


def recorded(shared: Path) -> list[Bracket]:
    """Means, medians and P95 of the recorded runs, told by profiles of the GPU and by the roofline."""
    return [
        bracket for run in _recorded.RUNS for told in ("profile", "roofline") for bracket in _of_run(shared, run, told)
    ]


def _of_run(shared: Path, run: _recorded.Run, report: str) -> Iterable[Bracket]:
    asked = _recorded.read_requests(shared / _recorded.ROOT / "measured_runs" / run.folder)
    deployment = _recorded.deployment(shared, run)
    if report == "roofline":
        parallel = {"node": deployment.node, "tp": run.tp, "limits": deployment.limits}
        blocks = deployment.kv.num_blocks
        deployment = deploy(run.model, run.gpu, **parallel, cost="roofline", num_blocks=blocks)
    requests = Workload(asked.arrival_s, asked.prompt, asked.output)

    def run_of(one: Deployment) -> list[float]:
        done = simulate(requests, one, keep_steps=0).requests
        seconds = _recorded.latencies(done.arrival_s, done.first_token_s, done.finished_s, asked.output)
        return _statistics(seconds)

    measured = _statistics(_recorded.latencies(asked.arrival_s, asked.first_s, asked.last_s, asked.output))
    said, low, high = interval(run_of, deployment)
    for i, (metric, statistic) in enumerate((m, s) for m in _recorded.LATENCIES for s in _STATISTICS):
        of = {"model": run.model, "gpu": run.gpu, "statistic": statistic, "id": run.name}
        yield Bracket("recorded", report, metric, of, measured[i], said[i], low[i], high[i])


_STATISTICS = ("Mean", "Median", "P95")


def _statistics(seconds: dict[str, Any]) -> list[float]:
    at = [_recorded.STATS.index(name) for name in _STATISTICS]
    return [float(value) for name in _recorded.LATENCIES for value in _recorded.statistics(seconds[name])[at]]


def interval(
    run: Callable[[Deployment], list[float]], deployment: Deployment
) -> tuple[list[float], list[float], list[float]]:
    """(said, low, high) of each number, as ``metrics.with_model_error`` makes them."""
    said = np.array(run(deployment))
    runs = np.array([run(replace(deployment, cost=cost)) for cost in perturbed(deployment.cost)])
    low, high = np.quantile(runs, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2], axis=0, method="hazen")
    return said.tolist(), np.minimum(low, said).tolist(), np.maximum(high, said).tolist()


def told_of(found: Sequence[Bracket]) -> dict[str, Any]:
    """Coverage with its interval over pairs, on which side values fell out, and which log_sd would have been right."""
    pairs: dict[tuple[str, str], list[bool]] = {}
    for one in found:
        pairs.setdefault(one.pair, []).append(one.is_satisfied)
    ci = share_interval(pairs, SEED) if len(pairs) >= LEAST_GROUPS else None
    hits, n = sum(one.is_satisfied for one in found), len(found)
    misses, own = np.array([one.miss for one in found]), np.array([one.log_sd for one in found])
    return {
        "n": n,
        "pairs": len(pairs),
        "coverage": round(hits / n, 3),
        "ci": None if ci is None else [round(x, 3) for x in ci],
        "below": sum(one.measured < one.low for one in found),
        "above": sum(one.measured > one.high for one in found),
        "bias": round(float(np.median(misses)), 3),
        "log_sd_seen": round(float(np.quantile(np.abs(misses), LEVEL) / _Z90), 3),
        "log_sd_told": round(float(np.median(own)), 3),
    }


def _row(found: Sequence[Bracket], metric: str) -> dict[str, Any]:
    head = [b for b in found if b.truth == "silicon" and b.report == "unseen" and b.metric == metric]
    of_all = [b for b in found if b.metric == metric]
    tested = [b for b in head if metric != "ttft" or b.of["half"] == HELD_OUT]
    details: dict[str, Any] = {"expected": LEVEL, "report": told_of(tested), "of_all": told_of(head)}
    details["by_truth"] = _by(of_all, lambda b: f"{b.truth}, {b.report}")
    details["by_pair"] = _by(head, lambda b: f"{b.of['model']} on {b.of['gpu']}")
    for key in ("half", "gpu", "model", "backend", "waits"):
        details[f"by_{key}"] = _by(head, lambda b, key=key: b.of[key])
    plain = [b for b in head if b.of["waits"] == NO_WAITS]
    details["by_engine_and_gpu"] = _by(plain, lambda b: f"{b.of['backend']} on {b.of['gpu']}")
    details["by_front"] = _by(head, _front)
    details["columns"] = ["told by", "point", "measured_s", "said_s", "low_s", "high_s"]
    details["rows"] = [
        [b.report, b.of["id"], *(float(f"{x:.4g}") for x in (b.measured, b.message, b.low, b.high))]
        for b in of_all
        if b.report in ("unseen", "profile", "roofline")
    ]
    about = {"unit": "share", "target": LEVEL, "better": "higher", "ci": details["report"]["ci"]}
    return {"value": details["report"]["coverage"], "details": details} | about


def _front(bracket: Bracket) -> str:
    """How much of the number said is the front: what tells its log_sd from that of the kernels."""
    if bracket.front > _MUCH:
        return f"front above {_MUCH:.0%}"
    return f"front below {_LITTLE:.0%}" if bracket.front < _LITTLE else "between"


def _by(found: Sequence[Bracket], key: Callable[[Bracket], str]) -> dict[str, Any]:
    groups: dict[str, list[Bracket]] = {}
    for one in found:
        groups.setdefault(key(one), []).append(one)
    return {name: told_of(groups[name]) for name in sorted(groups)}
