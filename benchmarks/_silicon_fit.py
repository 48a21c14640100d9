"""The roofline's constants from end-to-end points: a penalised least squares of logs about the shipped ones.

Each constant is a factor on the shipped one; how far it may go says ``SPREADS`` (the standard deviation of a normal
prior of its log: kernel tables speak through it). A prediction is the engine's with the shipped constants times the
change of a closed form, so that a fit costs seconds; the final figures come from the engine itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from _silicon_loop import Loop, front_s, loop_of
from _silicon_rows import Point
from _silicon_steps import Host, RankOperators, step_s

from lengthwise.cost.operator_work import CURVES, Curves

BACKENDS = ("vllm", "sglang", "trtllm")
KERNELS = ("narrow", "wide", "grouped")
KERNEL_SPREAD, OWN_SPREAD, COMMON_SPREAD = 0.03, 0.3, 1.0
SPREADS: dict[str, float] = {
    **{
        f"{kernel}.{what}": KERNEL_SPREAD
        for kernel in KERNELS
        for what in ("efficiency", "memory_efficiency", "latency_s")
    },
    "narrow.pad_m": 2 * KERNEL_SPREAD,
    "stream.latency_s": 2 * KERNEL_SPREAD,
    "prefill.efficiency": KERNEL_SPREAD,
    "prefill.latency_s": 2 * KERNEL_SPREAD,
    "decode.memory_efficiency": KERNEL_SPREAD,
    "decode.latency_s": 2 * KERNEL_SPREAD,
    "routing": COMMON_SPREAD,
    "launch": COMMON_SPREAD,
    "queue": COMMON_SPREAD,
    **dict.fromkeys(("step", "sequence", "request", "experts_request"), COMMON_SPREAD),
    **{
        f"{name}.{backend}": OWN_SPREAD
        for name in ("step", "sequence", "request", "experts_request")
        for backend in BACKENDS
    },
    **{f"speed.{backend}": KERNEL_SPREAD for backend in BACKENDS[1:]},
}
NAMES = tuple(SPREADS)
FIRST = {
    "step": 300e-6,
    "sequence": 6e-6,
    "routing": 0.05,
    "launch": 100e-6,
    "request": 15e-3,
    "experts_request": 40e-3,
    "queue": 3e-3,
}
"""What factors of the host's constants are about, in seconds; of ``1 - routing_power``."""

FRONT = ("request", "experts_request", "queue")
HUBER, ROUNDS = 0.08, 12
TTFT_WEIGHT = 0.5

Floats = np.ndarray[Any, np.dtype[np.float64]]


def curves_of(theta: Floats, backend: str) -> Curves:
    """The kernels of a backend: shipped constants times their factors."""
    of = dict(zip(NAMES, np.exp(theta), strict=True))
    speed = of.get(f"speed.{backend}", 1.0)
    curves: Curves = CURVES
    for name, factor in of.items():
        kind, _, field = name.partition(".")
        if hasattr(CURVES, kind):
            part = getattr(curves, kind)
            curves = replace(curves, **{kind: replace(part, **{field: getattr(part, field) * factor})})
    return replace(_faster(curves, speed), routing_power=1 - FIRST["routing"] * of["routing"])


def _faster(curves: Curves, speed: float) -> Curves:
    """All kernels so many times as fast."""
    out = {}
    for kind, part in vars(curves).items():
        if kind == "routing_power":
            continue
        values = {
            field: value * speed if "efficiency" in field else value / speed
            for field, value in vars(part).items()
            if "efficiency" in field or field.endswith("_s")
        }
        out[kind] = replace(part, **values)
    return Curves(**out)


def host_of(theta: Floats, point: Point) -> Host:
    """The host of a point's engine."""
    of = dict(zip(NAMES, np.exp(theta), strict=True))
    experts = 0.0 if point.model.startswith("llama") else 1.0

    def value(name: str) -> float:
        return FIRST[name] * of[name] * of.get(f"{name}.{point.backend}", 1.0)

    return Host(
        step_s=value("step"),
        sequence_s=value("sequence"),
        request_s=value("request") + experts * value("experts_request"),
        queue_s=value("queue"),
        launch_s=value("launch") if launches_prompts(point) else 0.0,
    )


def launches_prompts(point: Point) -> bool:
    """Whether steps with prompts run without CUDA graphs: all but vLLM's own default.

    vLLM served Llama on B200 with ``cudagraph_mode: FULL_DECODE_ONLY``.
    """
    return point.backend != "vllm" or (point.gpu == "B200" and point.model == "llama-3.1-70b")


@dataclass(frozen=True)
class Closed:
    """(points' TTFT, TPOT) by closed forms of a steady closed loop, in seconds."""

    ttft_s: Floats
    tpot_s: Floats


def closed_forms(points: Sequence[Point], theta: Floats) -> Closed:
    """A token's time is a decode step and its share of others' prompts; a first token's is a step with its prompt."""
    ttft, tpot = np.zeros(len(points)), np.zeros(len(points))
    groups: dict[Any, list[int]] = {}
    for i, point in enumerate(points):
        groups.setdefault(point.group, []).append(i)
    for members in groups.values():
        here = [points[i] for i in members]
        ttft[members], tpot[members] = _group(here, theta)
    return Closed(ttft, tpot)


def _group(points: list[Point], theta: Floats) -> tuple[Floats, Floats]:
    ops, host = RankOperators(points[0], curves_of(theta, points[0].backend)), host_of(theta, points[0])
    loops: list[Loop] = [loop_of(point) for point in points]
    clients = np.array([float(loop.clients) for loop in loops])
    prompt = np.array([loop.mean_prompt for loop in loops])
    output = np.array([loop.mean_output for loop in loops])
    kv = clients * (prompt + output / 2)
    decode = step_s(ops, host, seqs=clients, kv=kv)
    if loops[0].mixed:
        prefill = step_s(ops, host, seqs=clients - 1, kv=kv, chunk=prompt, prompts=np.ones(len(points)))
        added = prefill - decode
    else:
        added = prefill = step_s(
            ops, host, seqs=np.zeros(len(points)), kv=0 * kv, chunk=prompt, prompts=np.ones(len(points))
        )
    tpot = decode + (clients - 1) / output * added
    return prefill, tpot


def fronts(points: Sequence[Point], theta: Floats) -> tuple[Floats, Floats]:
    """([n] what the host adds before a first token in seconds, [n, factors] its slopes).

    Models with experts wait longer, mostly where many are sent at once, which a serial front would explain, too. But as
    one it would bind far below what these deployments serve, so that they tell nothing of ``queue``, and their own
    wait is a delay.
    """
    of = dict(zip(NAMES, np.exp(theta), strict=True))
    experts = np.array([not point.model.startswith("llama") for point in points], dtype=float)
    behind = np.array([front_s(point, Host(queue_s=1.0)) for point in points])
    share = {"request": np.ones(len(points)), "experts_request": experts, "queue": behind}
    backends = np.array([point.backend for point in points])
    slopes = np.zeros((len(points), len(NAMES)))
    for name in FRONT:
        own = [of.get(f"{name}.{backend}", 1.0) for backend in backends]
        added = share[name] * FIRST[name] * of[name] * np.array(own)
        slopes[:, NAMES.index(name)] = added * (1 - experts) if name == "queue" else added
        for backend in BACKENDS:
            if f"{name}.{backend}" in NAMES:
                slopes[:, NAMES.index(f"{name}.{backend}")] = added * (backends == backend)
    whole = [NAMES.index(name) for name in FRONT]
    return slopes[:, whole].sum(axis=1), slopes


@dataclass(frozen=True)
class Problem:
    """Points, the engine's answers at ``theta`` = 0 without what is added to a first token, and slopes there."""

    points: list[Point]
    ttft_s: Floats
    tpot_s: Floats
    ttft_slope: Floats
    tpot_slope: Floats

    def predicted(self, theta: Floats) -> tuple[Floats, Floats]:
        """(log TTFT, log TPOT) to first order."""
        steps_s = self.ttft_s * np.exp(self.ttft_slope @ theta)
        return np.log(steps_s + fronts(self.points, theta)[0]), np.log(self.tpot_s) + self.tpot_slope @ theta


def problem(points: list[Point], ttft_s: Floats, tpot_s: Floats) -> Problem:
    """The points with slopes of both closed forms by every factor."""
    zero, step = np.zeros(len(NAMES)), 0.1
    base = closed_forms(points, zero)
    slopes = []
    for i, name in enumerate(NAMES):
        if name.startswith(FRONT):
            slopes.append((np.zeros(len(points)), np.zeros(len(points))))
            continue
        moved = closed_forms(points, zero + step * (np.arange(len(NAMES)) == i))
        slopes.append((np.log(moved.ttft_s / base.ttft_s) / step, np.log(moved.tpot_s / base.tpot_s) / step))
    first, later = (np.stack(columns, axis=1) for columns in zip(*slopes, strict=True))
    return Problem(points, ttft_s, tpot_s, first, later)


def fit(problem: Problem, train: Floats) -> Floats:
    """The factors' logs from the points where ``train`` holds; every deployment counts by the root of its points."""
    points = [point for point, chosen in zip(problem.points, train, strict=True) if chosen]
    part = Problem(
        points, *(getattr(problem, name)[train] for name in ("ttft_s", "tpot_s", "ttft_slope", "tpot_slope"))
    )
    weight = _weights(points)
    measured = np.log([[point.ttft_s for point in points], [point.tpot_s for point in points]])
    spread = np.array(list(SPREADS.values()))
    theta = np.zeros(len(NAMES))
    for _ in range(ROUNDS):
        first, later = part.predicted(theta)
        slope_first = _ttft_slope(part, theta)
        rows = np.concatenate([slope_first, part.tpot_slope])
        miss = np.concatenate([measured[0] - first, measured[1] - later])
        w = np.concatenate([TTFT_WEIGHT * weight, weight])
        w = w * np.minimum(1.0, HUBER / np.maximum(np.abs(miss), 1e-9))
        scale = HUBER**2
        normal = rows.T @ (rows * (w / scale)[:, None]) + np.diag(spread**-2)
        right = rows.T @ (w / scale * miss) - theta / spread**2
        theta = theta + np.clip(np.linalg.solve(normal, right), -0.5, 0.5)
    return theta


def _ttft_slope(part: Problem, theta: Floats) -> Floats:
    """Slopes of log TTFT: of the steps, and of what is added before them."""
    steps_s = part.ttft_s * np.exp(part.ttft_slope @ theta)
    added, slopes = fronts(part.points, theta)
    return (part.ttft_slope * steps_s[:, None] + slopes) / (steps_s + added)[:, None]


def _weights(points: list[Point]) -> Floats:
    counts: dict[Any, int] = {}
    for point in points:
        counts[point.pair, point.backend] = counts.get((point.pair, point.backend), 0) + 1
    return np.array([counts[point.pair, point.backend] ** -0.5 for point in points])
