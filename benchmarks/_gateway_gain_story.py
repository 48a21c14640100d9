"""From JCTs to the figures of the gain: shares of the gap, tails, and whether the simulator had said so."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Runs = Mapping[str, Sequence[Floats]]
LEVEL = 0.95
WITHIN, NOT_WITHIN, TOO_NOISY = "within", "not within", "too noisy to tell"
TELLING = {"gap_closed": 0.2, "p99_over_oracle": 0.1, "mean_over_fcfs": 0.1}
"""By metric, how wide the interval of a difference may be to either side and still tell: of the gap, and of ratios."""
SAME = {"gap_closed": 0.05, "p99_over_oracle": 0.02, "mean_over_fcfs": 0.02}
"""By metric, a difference that is none to anyone: where its whole interval is below, a result was foretold."""


class Cell(Protocol):
    """One load at one batch size."""

    load: float
    batch: int
    live: dict[str, list[Floats]]
    paced: dict[str, list[Floats]]
    simulated: dict[str, list[Floats]]
    cuts: dict[str, int]


def told(cells: Sequence[Cell], own: str, fcfs: str, oracle: str) -> dict[str, Any]:
    """All of it by policy: over all cells together, and each cell."""
    names = list(cells[0].live)
    kinds = {"as they ran": [c.live for c in cells], "at one pace": [c.paced for c in cells]}
    simulated = [c.simulated for c in cells]
    judged = {
        kind: {n: _evaluated(runs, simulated, n, fcfs, oracle) for n in names if n not in (fcfs, oracle)}
        for kind, runs in kinds.items()
    }
    everything = judged["as they ran"]
    return {
        "own": everything[own],
        "paced": judged["at one pace"],
        "policies": everything,
        "cells": [_of_cell(c, fcfs, oracle) for c in cells],
    }


def rows(found: dict[str, Any], description: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Figures as the sections keep them, with their names' beginning."""
    ours = found["own"]
    shown = {"policies": found["policies"], "paced": found["paced"], "cells": found["cells"], **description}
    return {
        f"{prefix}.gap_closed": ours["gap_closed"] | {"ci": ours["gap_closed"].get("ci"), **shown},
        f"{prefix}.p99_over_oracle": dict(ours["p99_over_oracle"]),
        f"{prefix}.simulated_within": foretold(found["policies"]),
        f"{prefix}.simulated_in_interval": in_intervals(found["policies"]),
    }


def foretold(policies: dict[str, Any]) -> dict[str, Any]:
    """The share of the results that the simulator had foretold, and how many it had, had not, or nobody can tell."""
    counts = Counter(of[metric]["report"] for of in policies.values() for metric in TELLING)
    return {
        "value": counts[WITHIN] / counts.total(),
        "unit": "of the results",
        **{one: counts[one] for one in (WITHIN, NOT_WITHIN, TOO_NOISY)},
        "telling_half_widths": TELLING,
        "same": SAME,
    }


def in_intervals(policies: dict[str, Any]) -> dict[str, Any]:
    """The share of the results in whose own interval, over shuffles, the simulator's prediction lies."""
    results = {f"{name}, {metric}": of[metric] for name, of in policies.items() for metric in TELLING}
    out = [name for name, of in results.items() if not of["ci"][0] <= of["simulated"] <= of["ci"][1]]
    return {"value": 1 - len(out) / len(results), "unit": "of the results", "of": len(results), "outside": out}


def decision(off_by: float, half_width: float, stats: float, same: float = 0.0) -> str:
    """Whether a result is as foretold, by the interval of the difference.

    Within: 0 is in it, and it is narrow enough to say so, or all of it is below what is ``same`` to anyone.
    """
    if abs(off_by) + half_width <= same:
        return WITHIN
    if abs(off_by) > half_width:
        return NOT_WITHIN
    return WITHIN if half_width <= stats else TOO_NOISY


def gaps(cells: Sequence[Runs], shuffle: int, name: str, fcfs: str, oracle: str) -> tuple[float, float]:
    """FCFS less policy and FCFS less oracle, of mean JCT, summed over cells in units of their FCFS."""
    ours = theirs = 0.0
    for runs in cells:
        first = float(runs[fcfs][shuffle].mean())
        ours += 1 - float(runs[name][shuffle].mean()) / first
        theirs += 1 - float(runs[oracle][shuffle].mean()) / first
    return ours, theirs


def ratio(cells: Sequence[Runs], shuffle: int, name: str, to: str, q: float | None) -> float:
    """Geometric mean over cells of a policy's mean JCT (``q`` None) or quantile over another's."""

    def of(values: Floats) -> float:
        return float(values.mean() if q is None else np.quantile(values, q))

    return math.exp(np.mean([math.log(of(r[name][shuffle]) / of(r[to][shuffle])) for r in cells]))


def _evaluated(live: Sequence[Runs], simulated: Sequence[Runs], name: str, fcfs: str, oracle: str) -> dict[str, Any]:
    metrics = {
        "gap_closed": lambda cells, s: gaps(cells, s, name, fcfs, oracle),
        "p99_over_oracle": lambda cells, s: (ratio(cells, s, name, oracle, 0.99), 1.0),
        "mean_over_fcfs": lambda cells, s: (ratio(cells, s, name, fcfs, None), 1.0),
    }
    shuffles, drawn = len(live[0][name]), len(simulated[0][name])
    found = {}
    for metric, of in metrics.items():
        measured = Shares([of(live, s) for s in range(shuffles)])
        said = Shares([of(simulated, s) for s in range(drawn)])
        same = Shares([of(simulated, s) for s in range(shuffles)])
        half = measured.half_width(1 / shuffles)
        found[metric] = {"value": measured.value, "ci": (measured.value - half, measured.value + half)}
        half = said.half_width(1 / shuffles + 1 / drawn)
        found[metric] |= {
            "simulated": said.value,
            "simulated_ci": (said.value - half, said.value + half),
            **_additional(measured, same, metric),
        }
    return found


def _additional(measured: Shares, same: Shares, metric: str) -> dict[str, Any]:
    """What the simulator said of the very shuffles that were measured, and how far it is off."""
    off_by, half_width = measured.value - same.value, measured.half_width_beside(same)
    scale = 1 if metric == "gap_closed" else same.value
    return {
        "simulated_same_shuffles": same.value,
        "off_by": off_by,
        "off_by_half_width": half_width,
        "report": decision(off_by, half_width, TELLING[metric] * scale, SAME[metric] * scale),
    }


class Shares:
    """A ratio of means over shuffles, and how far it scatters (the delta method).

    Args:
        pairs: Numerator and denominator of each shuffle.
    """

    def __init__(self, pairs: Sequence[tuple[float, float]]) -> None:
        self._over, self._under = np.array(pairs).T
        self.value = float(self._over.mean() / self._under.mean())

    def half_width(self, share: float) -> float:
        """Of the interval, Student's t; ``share``: 1/n of this mean, and of another that it is to foretell."""
        return _half_width(self._left, share)

    def half_width_beside(self, other: Shares) -> float:
        """Of the interval of the difference to another's, shuffle by shuffle: what machines do is in it."""
        return _half_width(self._left - other._left, 1 / len(self._over))

    @property
    def _left(self) -> Floats:
        return np.asarray((self._over - self.value * self._under) / abs(float(self._under.mean())))


def _half_width(left: Floats, share: float) -> float:
    from scipy import stats

    n = len(left)
    if n < 2:
        return math.inf
    return float(stats.t.ppf((1 + LEVEL) / 2, n - 1) * np.std(left, ddof=1)) * math.sqrt(share)


def _of_cell(cell: Cell, fcfs: str, oracle: str) -> dict[str, Any]:
    """Means and tails of one cell in seconds, measured and simulated."""
    by_policy = {}
    for name, runs in cell.live.items():
        same = cell.simulated[name][: len(runs)]
        by_policy[name] = {
            "mean_s": _rounded(np.concatenate(runs).mean()),
            "p99_s": _rounded(np.quantile(np.concatenate(runs), 0.99)),
            "simulated_mean_s": _rounded(np.concatenate(same).mean()),
            "simulated_p99_s": _rounded(np.quantile(np.concatenate(same), 0.99)),
            "gap_closed": _rounded(_mean_gap(cell.live, name, fcfs, oracle)),
            "cuts": cell.cuts[name],
            "requests": sum(map(len, runs)),
        }
    return {"load": cell.load, "batch": cell.batch, "policies": by_policy}


def _mean_gap(runs: Runs, name: str, fcfs: str, oracle: str) -> float:
    means = {one: float(np.concatenate(runs[one]).mean()) for one in (name, fcfs, oracle)}
    gap = means[fcfs] - means[oracle]
    return (means[fcfs] - means[name]) / gap if gap > 0 else math.nan


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
