"""Measured deployments of vLLM, SGLang and TensorRT-LLM on H100, H200 and B200, and Argonne's static batches.

Every point is predicted by the engine in a closed loop. ``shipped`` and ``shipped_tables`` are what a user gets:
``deploy`` with the roofline, or with imported kernels and ``fit_profile``, and a host by name (_silicon_shipped.py).
The others ask what the method can do, with parts of this benchmark. ``roofline_unseen``: the host's constants and
small factors on the kernels' are fitted on points of other models and other GPUs only ("strict": neither the model nor
the GPU was seen). Whoever chose the form of that fit, its first guesses and its spreads had seen all points, and the
shipped kernel curves beneath them were fitted to kernels measured on these GPUs. Headlines are of points whose client
is recorded (InferenceMAX); sweeps of unknown clients are predicted from the fit on those, and stand in the details.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import _silicon_argonne
import _silicon_rows
import _silicon_shipped
import numpy as np
from _silicon_fit import NAMES, SPREADS, Floats, Problem, curves_of, fit, host_of, problem
from _silicon_loop import loop_of, simulated
from _silicon_rows import Point
from _silicon_steps import RankOperators, step_s
from _silicon_tables import tabled

from lengthwise.cost import HostOverhead
from lengthwise.schema.errors import InputError

FITTED = (
    "host and front (waits before the engine) fitted on other models and GPUs, waits by an engine's settings told, "
    "which `simulate` has no term for; kernel curves beneath fitted to kernels of these GPUs"
)
SHIPPED = (
    "deploy and simulate alone, no waits by settings; the engine's host and its front (cost.ENGINE_HOSTS) were fitted "
    "to these points, the default host, which has no front, to none of them, the unseen host and front to none of "
    "this model or GPU"
)
DRAWS, SEED, EVERY, FEW_FITS = 500, 0, 12, 3
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95)
SPLITS: dict[str, Callable[[Point, tuple[str, str]], bool]] = {
    "pair": lambda point, pair: point.pair != pair,
    "model": lambda point, pair: point.model != pair[0],
    "gpu": lambda point, pair: point.gpu != pair[1],
    "strict": lambda point, pair: point.model != pair[0] and point.gpu != pair[1],
}


def figures(shared: Path, fast: bool) -> dict[str, Any]:
    """The rows ``fidelity.silicon`` and ``fidelity.argonne``."""
    points, left = _silicon_rows.read(shared)
    points = points[:: EVERY if fast else 1]
    told, thetas = roofline(points, left)
    told["fidelity.silicon.roofline_unseen.tpot_median_ape"]["decode_workers"] = decoding(shared, thetas)
    told |= from_tables(shared, points, thetas)
    told |= shipped(shared, points, thetas, fast=fast)
    return told | argonne(shared, fast=fast)


def roofline(points: list[Point], left: dict[str, int]) -> tuple[dict[str, Any], dict[Any, Floats]]:
    """(figures of the roofline on unseen pairs, the fold's factors by pair)."""
    zero = np.zeros(len(NAMES))
    first, later, points = _engine(points, lambda _: zero, front=False)
    base = problem(points, first, later)
    known = np.array([point.inferencemax for point in points])
    pairs = sorted({point.pair for point in points})
    thetas = {pair: fit(base, known & _mask(points, "strict", pair)) for pair in pairs}
    ttft, tpot, kept = _engine(points, lambda point: thetas[point.pair], front=True)
    splits = {name: _first_order(base, known, name) for name in SPLITS}
    details: dict[str, Any] = {"left_out": left, "first_order_by_split": splits}
    whole = np.exp(fit(base, known))
    details["factors_on_all"] = dict(zip(NAMES, (round(float(x), 3) for x in whole), strict=True))
    details["spreads"] = SPREADS
    details["assumes"] = FITTED
    return _figures("fidelity.silicon.roofline_unseen", kept, ttft, tpot, details), thetas


def decoding(shared: Path, thetas: dict[Any, Floats]) -> dict[str, Any]:
    """Errors of the time per token of decode workers (prefill elsewhere): one decode step at the mean context."""
    errors = []
    for point in _silicon_rows.decode_workers(shared):
        if point.pair in thetas:
            theta, loop = thetas[point.pair], loop_of(point)
            ops, host = RankOperators(point, curves_of(theta, point.backend)), host_of(theta, point)
            kv = loop.clients * (loop.mean_prompt + loop.mean_output / 2)
            said = step_s(ops, host, seqs=float(loop.clients), kv=kv)
            errors.append(float(said) / point.tpot_s - 1)
    return _described(np.array(errors))


def from_tables(shared: Path, points: list[Point], thetas: dict[Any, Floats]) -> dict[str, Any]:
    """Figures from the imported kernels of vLLM, with hosts that were fitted on other models and GPUs."""
    pairs = [(p, _predict(p, thetas[p.pair], shared)) for p in _tabled(points)]
    kept = [(p, both) for p, both in pairs if both]
    said = np.array([both for _, both in kept]).reshape(-1, 2)
    points_kept = [p for p, _ in kept]
    about = {"kernels": "AIConfigurator's of vLLM 0.24; all-reduce, streams and sampler by the roofline"}
    about["assumes"] = FITTED
    return _figures("fidelity.silicon.tables", points_kept, said[:, 0], said[:, 1], about)


def shipped(shared: Path, points: list[Point], thetas: dict[Any, Floats], *, fast: bool) -> dict[str, Any]:
    """Figures of ``deploy`` and the engine alone: by the roofline, and by profiles of imported kernels."""

    def unseen(point: Point) -> HostOverhead:
        host = host_of(thetas[point.pair], point)
        return HostOverhead(host.step_s, host.sequence_s, host.request_s, host.queue_s)

    kept, left = _silicon_shipped.by_roofline([p for p in points if p.pair in thetas], unseen)
    told = _by_host("fidelity.silicon.shipped", kept, {"assumes": SHIPPED, "left_out": left})
    fitted, fits = _silicon_shipped.by_profiles(_tabled(points), unseen, shared, FEW_FITS if fast else None)
    about = {"assumes": SHIPPED, "kernels": "import_aiconfigurator of vLLM 0.24, fit_profile", "fits": fits}
    return told | _by_host("fidelity.silicon.shipped_tables", fitted, about)


def _by_host(
    name: str, retained: list[tuple[Point, _silicon_shipped.Message]], description: dict[str, Any]
) -> dict[str, Any]:
    """Figures with the engine's host; with the default one, and one of other models and GPUs, in the details."""
    points = [point for point, _ in retained]
    said = {host: np.array([s[host] for _, s in retained]).reshape(-1, 2) for host in _silicon_shipped.HOSTS}
    out = _figures(name, points, *said["engine"].T, description)
    known = np.array([point.inferencemax for point in points])
    for at, part in enumerate(("ttft", "tpot")):
        measured = np.array([getattr(point, f"{part}_s") for point in points])
        row = out[f"{name}.{part}_median_ape"]
        row |= {"unit": "relative", "better": "lower"}
        row["by_host"] = {host: _described((both[:, at] / measured - 1)[known]) for host, both in said.items()}
    return out


def argonne(shared: Path, *, fast: bool) -> dict[str, Any]:
    """Figures of static batches by vendor; kernels as shipped, hosts from other GPUs."""
    batches, said_s, left = _silicon_argonne.predicted(shared, fast=fast)
    logs = np.log(said_s) - np.log([batch.measured_s for batch in batches])
    clusters = [(batch.model, batch.gpu) for batch in batches]
    nvidia = np.array([batch.gpu != "MI300X" for batch in batches])
    out = {}
    vendors = np.where(nvidia, "nvidia", "amd")
    for name, error in (("latency", np.expm1(logs)), ("throughput", np.expm1(-logs))):
        told = _summary(error, clusters) | {"left_out": left}
        told["by_gpu"] = _by([f"{batch.engine} on {batch.gpu}" for batch in batches], error)
        told["by_model"] = _by([batch.model for batch in batches], error)
        out |= _by_vendor(name, error, vendors, clusters, told)
    return out | _first_tokens(shared, batches)


def _first_tokens(shared: Path, batches: list[Any]) -> dict[str, Any]:
    """Figures of TTFT and ITL of the static batches of 1,024 tokens."""
    found, left = _silicon_argonne.first_tokens(shared, batches)
    out: dict[str, Any] = {}
    for metric in ("ttft", "itl"):
        own = [one for one in found if one.metric == metric]
        error = np.array([one.said_s / one.measured_s - 1 for one in own])
        vendors = np.array(["amd" if one.batch.gpu == _silicon_argonne.ROCM else "nvidia" for one in own])
        clusters = [(one.batch.model, one.batch.gpu) for one in own]
        told: dict[str, Any] = {"left_out": left}
        told["by_gpu"] = _by([f"{one.batch.engine} on {one.batch.gpu}" for one in own], error)
        told["rows"] = [
            [one.batch.engine, one.batch.gpu, one.batch.model, round(one.measured_s, 5), round(one.said_s, 5)]
            for one in own
        ]
        out |= _by_vendor(metric, error, vendors, clusters, told)
    return out


def _by_vendor(
    name: str, error: Floats, vendors: Any, clusters: list[tuple[str, str]], report: dict[str, Any]
) -> dict[str, Any]:
    """A figure a vendor, since one median of both says nothing of either; all details stand by NVIDIA's."""
    out: dict[str, Any] = {}
    for vendor in ("nvidia", "amd"):
        mine = vendors == vendor
        if mine.any():
            own = [cluster for cluster, is_mine in zip(clusters, mine, strict=True) if is_mine]
            about = {"unit": "relative", "better": "lower"}
            out[f"fidelity.argonne.{vendor}.{name}_median_ape"] = _summary(error[mine], own) | about
    first = f"fidelity.argonne.nvidia.{name}_median_ape"
    if first in out:
        out[first] |= {key: value for key, value in report.items() if key not in out[first]}
    return out


def _engine(
    points: Sequence[Point], theta_of: Callable[[Point], Floats], *, front: bool
) -> tuple[Floats, Floats, list[Point]]:
    """(TTFT, TPOT, points) by the engine; what does not fit its GPUs is left out."""
    said = [(point, _predict(point, theta_of(point), front=front)) for point in points]
    kept = [(point, both) for point, both in said if both]
    columns = np.array([both for _, both in kept]).reshape(-1, 2)
    return columns[:, 0], columns[:, 1], [point for point, _ in kept]


def _predict(
    point: Point, theta: Floats, shared: Path | None = None, *, front: bool = True
) -> tuple[float, float] | None:
    """(TTFT, TPOT) of a point; from tables where ``shared`` is given."""
    host = host_of(theta, point)
    host = host if front else replace(host, request_s=0.0, queue_s=0.0)
    ops = RankOperators(point, curves_of(theta, point.backend))
    try:
        return simulated(point, tabled(shared, point, ops) if shared else ops, host)
    except (InputError, ValueError):
        return None


def _tabled(points: Sequence[Point]) -> list[Point]:
    """Those whose kernels were measured: Llama-3.1-70B in vLLM."""
    return [p for p in points if p.backend == "vllm" and p.inferencemax and p.model == "llama-3.1-70b"]


def _mask(points: Sequence[Point], split: str, pair: tuple[str, str]) -> Floats:
    return np.array([SPLITS[split](point, pair) for point in points])


def _first_order(base: Problem, known: Floats, split: str) -> dict[str, float]:
    """Median errors by slopes alone, each pair from a fit without it."""
    ttft, tpot = [], []
    for pair in sorted({p.pair for p, k in zip(base.points, known, strict=True) if k}):
        test = known & ~_mask(base.points, "pair", pair)
        first, later = base.predicted(fit(base, known & _mask(base.points, split, pair)))
        chosen = [p for p, t in zip(base.points, test, strict=True) if t]
        ttft.append(np.abs(np.exp(first[test]) / [p.ttft_s for p in chosen] - 1))
        tpot.append(np.abs(np.exp(later[test]) / [p.tpot_s for p in chosen] - 1))
    return {
        name: round(float(np.median(np.concatenate(errors))), 4) for name, errors in (("ttft", ttft), ("tpot", tpot))
    }


def _figures(name: str, points: list[Point], ttft: Floats, tpot: Floats, details: dict[str, Any]) -> dict[str, Any]:
    out = {}
    known = np.array([point.inferencemax for point in points])
    for part, said in (("ttft", ttft), ("tpot", tpot)):
        error = said / np.array([getattr(point, f"{part}_s") for point in points]) - 1
        told = _summary(error[known], [p.pair for p in points if p.inferencemax]) | details
        told["all_agg_points"] = _described(error)
        told["sweeps"] = _described(error[~known])
        for key in ("model", "gpu", "backend", "dtype", "pair"):
            told[f"by_{key}"] = _by([_key(p, key) for p in points], error)
        out[f"{name}.{part}_median_ape"] = told
    return out


def _key(point: Point, key: str) -> str:
    kind = "" if point.inferencemax else " (sweep)"
    value = getattr(point, key)
    return (" on ".join(value) if key == "pair" else value) + kind


def _by(keys: Sequence[str], error: Floats) -> dict[str, dict[str, float]]:
    names = np.array(keys)
    return {name: _described(error[names == name]) for name in sorted(set(keys))}


def _described(error: Floats) -> dict[str, Any]:
    if not len(error):
        return {"points": 0}
    size = np.abs(error)
    at = {f"p{round(100 * q)}": round(float(np.quantile(size, q)), 4) for q in QUANTILES}
    bias = round(float(np.median(error)), 4)
    return {"points": len(error), "mape": round(float(size.mean()), 4), "bias": bias, **at}


def _summary(error: Floats, clusters: Sequence[Any]) -> dict[str, Any]:
    """The median of absolute errors with an interval over whole model-GPU pairs, drawn again with their points."""
    size, rng = np.abs(error), np.random.default_rng(SEED)
    names = sorted(set(clusters))
    groups = [size[[c == name for c in clusters]] for name in names]
    drawn = [
        np.median(np.concatenate([groups[i] for i in rng.integers(len(groups), size=len(groups))]))
        for _ in range(DRAWS)
    ]
    low, high = (round(float(q), 4) for q in np.quantile(drawn, [0.025, 0.975]))
    return {"value": round(float(np.median(size)), 4), "interval": [low, high], **_described(error)}
