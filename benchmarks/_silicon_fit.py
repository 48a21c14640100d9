"""The roofline's constants from end-to-end points: a penalised least squares of logs about the shipped ones.

Each constant is a factor on the shipped one; ``SPREADS`` limits how far it moves (the standard deviation of a normal
prior of its log, through which kernel tables count). A prediction is the engine's with the shipped constants times
the change of a closed form, so that a fit costs seconds; the final figures come from the engine itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from _silicon_model import Host, RankOperators
from _silicon_rows import Point, loop_of

from lengthwise.cost.operator_work import CURVES, Curves

BACKENDS = ("vllm", "sglang", "trtllm")
KERNEL_SPREAD, OWN_SPREAD, COMMON_SPREAD = 0.03, 0.3, 1.0
HOST = ("step", "sequence", "request", "experts_request")
SPREADS: dict[str, float] = {
    **{
        f"{kernel}.{constant}": KERNEL_SPREAD
        for kernel in ("narrow", "wide", "grouped")
        for constant in ("efficiency", "memory_efficiency", "latency_s")
    },
    **dict.fromkeys(("prefill.efficiency", "decode.memory_efficiency"), KERNEL_SPREAD),
    **dict.fromkeys(
        ("narrow.pad_m", "stream.latency_s", "prefill.latency_s", "decode.latency_s"), 2 * KERNEL_SPREAD
    ),
    **dict.fromkeys(("routing", "launch", "queue", *HOST), COMMON_SPREAD),
    **{f"{name}.{backend}": OWN_SPREAD for name in HOST for backend in BACKENDS},
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
"""Values that the factors of the host's constants multiply, in seconds; of ``1 - routing_power`` for routing."""
FRONT = ("request", "experts_request", "queue")
HUBER, ROUNDS, TTFT_WEIGHT = 0.08, 12, 0.5

Floats = np.ndarray[Any, np.dtype[np.float64]]


def curves_of(theta: Floats, backend: str) -> Curves:
    """Return the kernels of a backend: shipped constants times their factors, all of them ``speed`` times as fast."""
    of = dict(zip(NAMES, np.exp(theta), strict=True))
    speed = of.get(f"speed.{backend}", 1.0)
    made = {}
    for kind, part in vars(CURVES).items():
        if kind == "routing_power":
            continue
        values = {field: value * of.get(f"{kind}.{field}", 1.0) for field, value in vars(part).items()}
        for field in values:
            if "efficiency" in field:
                values[field] *= speed
            elif field.endswith("_s"):
                values[field] /= speed
        made[kind] = replace(part, **values)
    return Curves(**made, routing_power=1 - FIRST["routing"] * of["routing"])


def host_of(theta: Floats, point: Point) -> Host:
    """Return the host of a point's engine; all but vLLM's own default run steps with prompts without CUDA graphs."""
    of = dict(zip(NAMES, np.exp(theta), strict=True))

    def value(name: str) -> float:
        return float(FIRST[name] * of[name] * of.get(f"{name}.{point.backend}", 1.0))

    # vLLM served Llama on B200 with cudagraph_mode FULL_DECODE_ONLY
    launches = point.backend != "vllm" or point.pair == ("llama-3.1-70b", "B200")
    experts_s = 0.0 if point.model.startswith("llama") else value("experts_request")
    launch_s = value("launch") if launches else 0.0
    return Host(value("step"), value("sequence"), value("request") + experts_s, value("queue"), launch_s)


def closed_forms(points: Sequence[Point], theta: Floats) -> Floats:
    """Return [2, n] TTFT and TPOT in seconds by closed forms of a steady closed loop.

    A token takes a decode step and its share of others' prompts, a first token a step with its prompt.
    """
    found = np.zeros((2, len(points)))
    groups: dict[Any, list[int]] = {}
    for i, point in enumerate(points):
        groups.setdefault(point.group, []).append(i)
    for members in groups.values():
        one, loops = points[members[0]], [loop_of(points[i]) for i in members]
        ops, host = RankOperators(one, curves_of(theta, one.backend)), host_of(theta, one)
        clients = np.array([float(loop.clients) for loop in loops])
        prompt, output = (np.array([sum(getattr(loop, of)) / 2 for loop in loops]) for of in ("prompt", "output"))
        kv, ones = clients * (prompt + output / 2), np.ones(len(loops))
        decode = ops.step_s(host, seqs=clients, kv=kv)
        if loops[0].mixed:
            prefill = ops.step_s(host, seqs=clients - 1, kv=kv, chunk=prompt, prompts=ones)
            added = prefill - decode
        else:
            added = prefill = ops.step_s(host, seqs=0 * clients, kv=0 * kv, chunk=prompt, prompts=ones)
        found[:, members] = prefill, decode + (clients - 1) / output * added
    return found


def fronts(points: Sequence[Point], theta: Floats) -> tuple[Floats, Floats]:
    """Return ([n] seconds that the host adds before a first token, [n, factors] their slopes).

    Models with experts wait longer, mostly where many requests are sent at once. A serial front would explain that,
    but it would bind far below what these deployments serve: they do not determine ``queue``, and their wait is a
    delay.
    """
    of = dict(zip(NAMES, np.exp(theta), strict=True))
    experts = np.array([not point.model.startswith("llama") for point in points], dtype=float)
    behind = np.array([Host(queue_s=1.0).front_s(point) for point in points])
    share = {"request": np.ones(len(points)), "experts_request": experts, "queue": behind * (1 - experts)}
    backends = np.array([point.backend for point in points])
    slopes, total = np.zeros((len(points), len(NAMES))), np.zeros(len(points))
    for name in FRONT:
        own = np.array([of.get(f"{name}.{backend}", 1.0) for backend in backends])
        added = share[name] * FIRST[name] * of[name] * own
        total += added
        slopes[:, NAMES.index(name)] = added
        for backend in BACKENDS:
            if f"{name}.{backend}" in NAMES:
                slopes[:, NAMES.index(f"{name}.{backend}")] = added * (backends == backend)
    return total, slopes


@dataclass(frozen=True)
class Problem:
    """Points, the engine's [2, n] TTFT and TPOT at ``theta`` = 0 without a front, and their slopes [2, n, factors]."""

    points: Sequence[Point]
    seconds: Floats
    slope: Floats


def problem(points: Sequence[Point], ttft_s: Floats, tpot_s: Floats) -> Problem:
    """Return the points with slopes of both closed forms by every factor."""
    zero, step = np.zeros(len(NAMES)), 0.1
    base, slope = closed_forms(points, zero), np.zeros((2, len(points), len(NAMES)))
    for i, name in enumerate(NAMES):
        if not name.startswith(FRONT):
            moved = closed_forms(points, zero + step * (np.arange(len(NAMES)) == i))
            slope[:, :, i] = np.log(moved / base) / step
    return Problem(points, np.stack([ttft_s, tpot_s]), slope)


def fit(whole: Problem, train: Floats) -> Floats:
    """Return the factors' logs from the points where ``train`` holds; a deployment counts by the root of its points."""
    points = [point for point, chosen in zip(whole.points, train, strict=True) if chosen]
    seconds, slope = whole.seconds[:, train], whole.slope[:, train]
    counts = Counter((point.pair, point.backend) for point in points)
    weight = np.array([counts[point.pair, point.backend] ** -0.5 for point in points])
    weight = np.concatenate([TTFT_WEIGHT * weight, weight])
    measured = np.log([[point.ttft_s for point in points], [point.tpot_s for point in points]])
    spread = np.array(list(SPREADS.values()))
    theta = np.zeros(len(NAMES))
    for _ in range(ROUNDS):
        steps_s = seconds * np.exp(slope @ theta)
        added, front_slope = fronts(points, theta)
        first_slope = (slope[0] * steps_s[0][:, None] + front_slope) / (steps_s[0] + added)[:, None]
        rows = np.concatenate([first_slope, slope[1]])
        miss = np.concatenate(measured - np.log([steps_s[0] + added, steps_s[1]]))
        w = weight * np.minimum(1.0, HUBER / np.maximum(np.abs(miss), 1e-9)) / HUBER**2
        normal = rows.T @ (rows * w[:, None]) + np.diag(spread**-2)
        theta = theta + np.clip(np.linalg.solve(normal, rows.T @ (w * miss) - theta / spread**2), -0.5, 0.5)
    return theta
