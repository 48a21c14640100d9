"""Errors on held-out requests, before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lengthwise.measure.calibrate._runs import Run
from lengthwise.measure.calibrate.answer import METRICS, Change, Curve, Score

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
LEVELS = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
LEAST = {"p99": 100, "p95": 20}
DRAWS = 200
LEAST_LOG_SD = 0.005
CURVE = np.round(np.linspace(0, 1, 101), 2)


def scores(run: Run, before: Mapping[str, Floats], after: Mapping[str, Floats], seed: int) -> list[Score]:
    """A run's scores on its held-out requests; intervals by drawing blocks of consecutive ones again."""
    rng = np.random.default_rng(seed)
    told: list[Score] = []
    for metric in METRICS:
        rows = np.flatnonzero(run.held & (run.seconds[metric] > 0))
        if len(rows):
            columns = run.seconds[metric][rows], before[metric][rows], after[metric][rows]
            told += _of_metric(run.name, metric, columns, _draws(len(rows), rng))
    return told


def curves(
    runs: Sequence[Run], before: Sequence[Mapping[str, Floats]], after: Sequence[Mapping[str, Floats]]
) -> tuple[Curve, ...]:
    """How each metric is distributed over each run's held-out requests; requests that all three have."""
    told = []
    for run, old, new in zip(runs, before, after, strict=True):
        for metric in METRICS:
            sides = np.stack([side[metric][run.held] for side in (run.seconds, old, new)])
            sides = sides[:, np.isfinite(sides).all(axis=0)]
            if sides.shape[1]:
                at = np.quantile(sides, CURVE, axis=1, method="inverted_cdf").T.tolist()
                told.append(Curve(run.name, metric, tuple(CURVE.tolist()), *(tuple(line) for line in at)))
    return tuple(told)


def _of_metric(run: str, metric: str, columns: tuple[Floats, ...], draws: Ints) -> list[Score]:
    theirs, old, new = columns
    found = []
    for name in ("mean", *LEVELS, "each"):
        if len(theirs) < LEAST.get(name, 0):
            continue
        drawn = _errors(name, theirs[draws], new[draws])
        low, high = np.quantile(drawn, (0.025, 0.975))
        found.append(
            Score(
                run=run,
                metric=metric,
                statistic=name,
                measured=float("nan") if name == "each" else float(_statistic(name, theirs[None])[0]),
                before=float(_errors(name, theirs[None], old[None])[0]),
                after=float(_errors(name, theirs[None], new[None])[0]),
                low=float(low),
                high=float(high),
            )
        )
    return found


def _errors(name: str, theirs: Floats, ours: Floats) -> Floats:
    """[draws] relative errors of a statistic over the last axis."""
    if name == "each":
        return np.asarray(np.abs(ours / theirs - 1).mean(axis=-1))
    return np.asarray(_statistic(name, ours) / _statistic(name, theirs) - 1)


def _statistic(name: str, seconds: Floats) -> Floats:
    if name == "mean":
        return np.asarray(seconds.mean(axis=-1))
    return np.asarray(np.quantile(seconds, LEVELS[name], axis=-1))


def _draws(n: int, rng: np.random.Generator) -> Ints:
    """[draws, n] rows in blocks of consecutive requests, which a queue makes alike."""
    length = max(1, round(n**0.5))
    starts = rng.integers(0, n, size=(DRAWS, -(-n // length)))
    rows = (starts[:, :, None] + np.arange(length)) % n
    return np.asarray(rows.reshape(DRAWS, -1)[:, :n])


def changes(
    runs: Sequence[Run],
    before: Sequence[Mapping[str, Floats]],
    after: Sequence[Mapping[str, Floats]],
    seed: int,
) -> tuple[Change, ...]:
    """By metric, what the calibration changed of single held-out requests' errors, drawn in pairs by blocks."""
    rng = np.random.default_rng(seed)
    told = []
    for metric in METRICS:
        old, new, drawn = [], [], []
        for run, a, b in zip(runs, before, after, strict=True):
            rows = np.flatnonzero(run.held & (run.seconds[metric] > 0))
            if len(rows):
                own = [np.abs(x[metric][rows] / run.seconds[metric][rows] - 1) for x in (a, b)]
                old.append(own[0])
                new.append(own[1])
                drawn.append((own[1] - own[0])[_draws(len(rows), rng)])
        if drawn:
            low, high = np.quantile(np.concatenate(drawn, axis=1).mean(axis=1), (0.025, 0.975))
            first, last = (float(np.concatenate(each).mean()) for each in (old, new))
            told.append(Change(metric, first, last, float(low), float(high)))
    return tuple(told)


def log_sd(
    runs: Sequence[Run], after: Sequence[Mapping[str, Floats]], metrics: Sequence[str] = ("tpot", "jct")
) -> float:
    """Spread of log(measured / simulated) of held-out seconds about zero, outliers cut.

    Of times between tokens; of whole latencies where too few requests have tokens enough.
    """
    for metric in metrics:
        logs = [
            np.log(run.seconds[metric][rows] / told[metric][rows])
            for run, told in zip(runs, after, strict=True)
            for rows in (np.flatnonzero(run.held & (run.seconds[metric] > 0)),)
        ]
        pooled = np.concatenate(logs)
        if len(pooled) >= 10:
            break
    most = 3 * max(LEAST_LOG_SD, 1.4826 * float(np.median(np.abs(pooled))))
    return max(LEAST_LOG_SD, float(np.sqrt(np.mean(np.clip(pooled, -most, most) ** 2))))
