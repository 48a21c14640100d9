"""Measured deployments of vLLM, SGLang and TensorRT-LLM on H100, H200 and B200, and Argonne's static batches.

Every point is predicted by the engine in a closed loop. ``shipped`` and ``shipped_tables`` are what a user gets:
``deploy`` with the roofline, or with imported kernels and ``fit_profile``, and a host by name. The others show what the
method can do, with parts of this benchmark. ``roofline_unseen``: the host's constants and small factors on the kernels'
are fitted on points of other models and other GPUs only. The form of that fit, its first values and its spreads were
chosen with all points in view, and the shipped kernel curves beneath them were fitted to kernels measured on these
GPUs. Headlines are of points whose client is recorded (InferenceMAX); sweeps of unknown clients are predicted from the
fit on those, and stand in the details.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import _silicon_argonne
import numpy as np
from _intervals import by, described, summary
from _silicon_fit import NAMES, SPREADS, Floats, fit, host_of, problem
from _silicon_fit import curves_of as curves
from _silicon_model import TABLES, VERSION, RankOperators, simulated, tabled
from _silicon_rows import Point, loop_of, means, read

from lengthwise import catalog
from lengthwise.cost import HostOverhead
from lengthwise.cost.estimators import fit_profile
from lengthwise.cost.profiles import import_aiconfigurator
from lengthwise.engine import deploy, simulate
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.deployment import Deployment, EngineLimits, Parallelism
from lengthwise.schema.errors import InputError
from lengthwise.schema.profile import Profile

Thetas = dict[tuple[str, str], Floats]
"""Logs of the fitted factors by pair of model and GPU."""
EVERY, FEW_FITS = 12, 3
FITTED = (
    "host and front (waits before the engine) fitted on other models and GPUs, waits by an engine's settings added, "
    "which `simulate` has no term for; kernel curves beneath fitted to kernels of these GPUs"
)
SHIPPED = "deploy and simulate alone, no waits by settings; host and front (cost.ENGINE_HOSTS) fitted to these points"
NO_SETTING = "attention data parallelism, or experts not cut by tensor parallelism: no setting ships"
NO_ROOM = "does not fit by the memory planner that ships"


def figures(shared: Path, quick: bool) -> dict[str, Any]:
    """Return the rows ``fidelity.silicon`` and ``fidelity.argonne``."""
    points, left = read(shared)
    points = points[:: EVERY if quick else 1]
    thetas = unseen_factors(points)
    known = [point for point in points if point.pair in thetas]
    about = {"left_out": left, "spreads": SPREADS, "assumes": FITTED}
    found = _figures("fidelity.silicon.roofline_unseen", *_engine(known, thetas.__getitem__), about)
    about = {"kernels": "AIConfigurator's of vLLM 0.24; all-reduce, streams and sampler by the roofline"}
    by_tables = _engine(_with_tables(known), thetas.__getitem__, shared)
    found |= _figures("fidelity.silicon.tables", *by_tables, about | {"assumes": FITTED})
    return found | shipped(shared, known, quick=quick) | _silicon_argonne.figures(shared, quick)


def unseen_factors(points: Sequence[Point]) -> Thetas:
    """Return by pair the factors fitted to recorded clients of other models and other GPUs."""
    fitting, said = _engine(points, lambda _: np.zeros(len(NAMES)), front=False)
    base = problem(fitting, *said.T)
    known = np.array([point.inferencemax for point in fitting])

    def others(pair: tuple[str, str]) -> Floats:
        return known & np.array([point.model != pair[0] and point.gpu != pair[1] for point in fitting])

    return {pair: fit(base, others(pair)) for pair in sorted({point.pair for point in fitting})}


def unseen_host(thetas: Thetas, point: Point) -> HostOverhead:
    """Return the host that points of neither this model nor this GPU have shaped."""
    host = host_of(thetas[point.pair], point)
    return HostOverhead(host.step_s, host.sequence_s, host.request_s, host.queue_s)


def _engine(
    points: Iterable[Point],
    theta_of: Callable[[tuple[str, str]], Floats],
    shared: Path | None = None,
    *,
    front: bool = True,
) -> tuple[list[Point], Floats]:
    """Return (points, [n, 2] TTFT and TPOT), by tables where ``shared`` is given; without points that do not fit."""
    found, said = [], []
    for point in points:
        theta = theta_of(point.pair)
        ops, host = RankOperators(point, curves(theta, point.backend)), host_of(theta, point)
        try:
            ops = tabled(shared, point, ops) if shared else ops
            said.append(simulated(point, ops, host if front else replace(host, request_s=0.0, queue_s=0.0)))
            found.append(point)
        except (InputError, ValueError):
            continue
    return found, np.array(said).reshape(-1, 2)


def _with_tables(points: Iterable[Point]) -> list[Point]:
    """Return those whose kernels were measured: Llama-3.1-70B in vLLM."""
    return [p for p in points if p.backend == "vllm" and p.inferencemax and p.model == "llama-3.1-70b"]


def _figures(name: str, points: Sequence[Point], said: Floats, about: dict[str, Any]) -> dict[str, Any]:
    """Return a row for TTFT and one for TPOT: the median error of recorded clients, and errors by what they are of."""
    out = {}
    known = np.array([point.inferencemax for point in points])
    for at, part in enumerate(("ttft", "tpot")):
        error = said[:, at] / np.array([getattr(point, f"{part}_s") for point in points]) - 1
        row = summary(error[known], [p.pair for p in points if p.inferencemax]) | about
        row |= {"unit": "relative", "better": "lower"}
        row["all_agg_points"] = described(error)
        row["by_backend"] = by([p.backend + ("" if p.inferencemax else " (sweep)") for p in points], error)
        row["by_pair"] = by([" on ".join(p.pair) + ("" if p.inferencemax else " (sweep)") for p in points], error)
        out[f"{name}.{part}_median_ape"] = row
    return out


def shipped(shared: Path, points: Sequence[Point], *, quick: bool) -> dict[str, Any]:
    """Return figures of ``deploy`` and the engine alone: by the roofline, and by profiles of imported kernels."""
    able = [point for point in points if is_expressible(point)]
    groups: dict[Any, list[Point]] = {}
    for point in _with_tables(able):
        groups.setdefault(point.group, []).append(point)
    groups = dict(list(groups.items())[: FEW_FITS if quick else None])
    tables = {key: _fitted_tables(group, shared) for key, group in groups.items()}
    out, costs = {}, {"shipped": [(p, "roofline") for p in able]}
    costs["shipped_tables"] = [(p, tables[key]) for key, group in groups.items() for p in group]
    for name, priced in costs.items():
        found, said = [], []
        for point, cost in priced:
            with contextlib.suppress(InputError):  # it does not fit by the memory planner that ships
                deployment = deployed(point, cost, point.backend)
                said.append(means(simulate(loop_of(point).workload(), deployment, keep_steps=0)))
                found.append(point)
        left = {NO_SETTING: len(points) - len(able), NO_ROOM: len(priced) - len(found)}
        about = {"assumes": SHIPPED, "left_out": left}
        out |= _figures(f"fidelity.silicon.{name}", found, np.array(said).reshape(-1, 2), about)
    return out


def is_expressible(point: Point) -> bool:
    """Return whether ``deploy`` has settings for how the point's model was cut."""
    cut_by_tp = point.model.startswith("llama") or (point.ep == 1 and point.moe_tp == point.tp)
    return point.dp == 1 and cut_by_tp


def deployed(point: Point, cost: str | CostTables, host: str | HostOverhead) -> Deployment:
    """Return the point's deployment as a user would request it.

    Raises:
        InputError: It does not fit these GPUs.
    """
    loop = loop_of(point)
    return deploy(
        point.model,
        point.gpu,
        tp=point.tp,
        limits=_limits(point, loop.clients, loop.longest, loop.budget),
        scheduler="vllm_v1" if loop.mixed else "vllm_v0",
        cost=cost,
        host=host,
    )


def _limits(point: Point, seqs: int, longest: int, budget: int = 8192) -> EngineLimits:
    tokens, kinds = max(budget, seqs), {"weight_dtype": point.dtype, "kv_dtype": point.kv_dtype}
    return EngineLimits(seqs, tokens, max_model_len=longest, **kinds)


@cache
def _profile(shared: Path, gpu: str, backend: str) -> Profile:
    return import_aiconfigurator(shared / TABLES, f"{gpu.lower()}_sxm", backend, VERSION)


def _fitted_tables(group: Sequence[Point], shared: Path) -> CostTables:
    """Return tables of points that share every operator, wide enough for all of them."""
    one, loops = group[0], [loop_of(point) for point in group]
    longest = max(loop.longest for loop in loops)
    limits = _limits(one, max(loop.clients for loop in loops), longest)
    model, gpu = catalog.model(one.model), catalog.gpu(one.gpu)
    node, profile = catalog.default_node(gpu, one.tp), _profile(shared, one.gpu, one.backend)
    return fit_profile(profile, model, gpu, node, Parallelism(one.tp), limits, longest)[0]
