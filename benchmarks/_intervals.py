"""95 % intervals of errors against measured runs, from the records themselves or from what rows keep of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Repeat = tuple[Floats, Floats]
"""[draws] seconds of one run, measured and simulated: one of each where only these are kept."""
Ends = tuple[float, float]

DRAWS, OF_A_RUN, BLOCKS = 4000, 400, 12
"""Draws of repeats, draws within a run, and into how many blocks of neighbouring requests a run is cut."""
LEAST_REPEATS = 2
"""One run does not tell how far another would lie from it."""


def of_run(measured_s: Floats, simulated_s: Floats, q: float, seed: int) -> Repeat:
    """[draws] quantiles of a run's requests, whole blocks of neighbours drawn anew, the same of both sides.

    Requests that follow each other wait for each other: alone they would count as more than they are.

    Args:
        measured_s: [n] in the order of arrival; NaN where a request tells nothing.
        simulated_s: [n] of the same requests.
        q: Which quantile.
        seed: Of the draws.
    """
    rng = np.random.default_rng(seed)
    blocks = np.array_split(np.arange(len(measured_s)), min(BLOCKS, len(measured_s)))
    drawn = [np.concatenate([blocks[k] for k in rng.integers(len(blocks), size=len(blocks))]) for _ in range(OF_A_RUN)]
    told = np.array([[_quantile(of[rows], q) for of in (measured_s, simulated_s)] for rows in drawn])
    whole = told[np.isfinite(told).all(axis=1)]
    return whole[:, 0], whole[:, 1]


def of_repeats(loads: Mapping[str, Sequence[Repeat]], value: float, seed: int = 0) -> Ends | None:
    """The interval of the median over loads of their absolute errors; None where a load was measured once.

    Repeats of a load are drawn anew, and of each of them one of its own draws; a load's error is that of the medians.
    Of few repeats such an interval is rough, and rather too narrow.
    """
    if not loads or min(map(len, loads.values())) < LEAST_REPEATS:
        return None
    rng = np.random.default_rng(seed)
    errors = np.array([_errors(repeats, rng) for repeats in loads.values()])
    low, high = np.quantile(np.median(np.abs(errors), axis=0), [0.025, 0.975])
    return min(float(low), value), max(float(high), value)


def of_kept(row: Mapping[str, Any]) -> Ends | None:
    """The interval of a row whose records are gone, from its runs; None where it does not keep enough."""
    details = row.get("details") or {}
    if row["name"].startswith("fidelity.calibrated."):
        return of_scores(details.get("runs") or {})
    loads = details.get("signed_by_load") or {}
    found: dict[str, list[Repeat]] = {}
    for name, of in (details.get("signed_by_run") or {}).items():
        load, measured_s = name.rpartition("-")[0], of.get("measured_s")
        if load in loads and measured_s:
            both = np.array([measured_s]), np.array([(1 + of["calibrated"]) * measured_s])
            found.setdefault(load, []).append(both)
    return of_repeats(found, row["value"]) if found.keys() == loads.keys() else None


def of_scores(runs: Mapping[str, Mapping[str, Sequence[float]]]) -> Ends | None:
    """The interval of a mean of absolute errors, each (before, after, low, high), as if all were off together.

    Statistics of one run are of the same requests: taken as independent they would even out what they share.
    """
    ends = [of[2:] for scores in runs.values() for of in scores.values()]
    if not ends or any(len(of) != 2 for of in ends):
        return None
    least = [0.0 if low <= 0 <= high else min(abs(low), abs(high)) for low, high in ends]
    most = [max(abs(low), abs(high)) for low, high in ends]
    return float(np.mean(least)), float(np.mean(most))


def _errors(repeats: Sequence[Repeat], rng: np.random.Generator) -> Floats:
    """[DRAWS] errors of a load."""
    which = rng.integers(len(repeats), size=(DRAWS, len(repeats)))
    at = rng.random(which.shape)
    told = np.empty((2, *which.shape))
    for k, repeat in enumerate(repeats):
        own = which == k
        rows = (at[own] * len(repeat[0])).astype(np.int64)
        told[:, own] = repeat[0][rows], repeat[1][rows]
    measured_s, simulated_s = np.median(told, axis=2)
    return np.asarray(simulated_s / measured_s - 1)


def _quantile(seconds: Floats, q: float) -> float:
    known = seconds[np.isfinite(seconds)]
    return float(np.quantile(known, q)) if len(known) else float("nan")
