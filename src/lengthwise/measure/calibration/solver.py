"""Fits a calibration's parameters by linear models of how simulated times depend on the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lengthwise import engine
from lengthwise.measure.calibration.measured_runs import BLOCKS, Mask, Run, seconds_of
from lengthwise.measure.calibration.parameters import Prior, apply
from lengthwise.measure.calibration.result import METRICS
from lengthwise.measure.calibration.step_evidence import Evidence
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Floats, Ints, Records, RequestRecords, Status

QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
FAMILIES = 3  # kinds of residuals of the same requests: by time, by length, quantiles
TRIM_FRACTION = 0.2  # of a group's errors, left out at either end


class Problem:
    """The runs to fit, and the residuals of their simulations as a function of the parameters.

    A residual is log(simulated / measured) for a group of requests, a quantile, or a step. A point ``z`` [p] has the
    values of the parameters, in prior standard deviations from their centers.
    """

    def __init__(
        self, runs: Sequence[Run], deployment: Deployment, priors: Sequence[Prior], steps: Evidence | None, seed: int
    ) -> None:
        self.runs, self.priors, self.simulations = runs, tuple(priors), 0
        self._deployment, self._seed, self._steps = deployment, seed, steps
        self._cache: dict[bytes, Floats] = {}  # by the parameters: the search evaluates some points repeatedly
        # By run and metric the fitted requests, and [groups, k] equal groups of them: blocks of time, then requests of
        # similar prompts (similar outputs for times between tokens). Single requests are not compared, because
        # microseconds decide which step a request joins.
        self._measured: list[dict[str, MeasuredTimes]] = []
        group, block, weight = [], [], []
        for r, run in enumerate(runs):
            self._measured.append({})
            for g, metric in enumerate(METRICS):
                rows = np.flatnonzero(run.fit & (run.seconds[metric] > 0))
                lengths = run.workload.prompt_tokens if metric != "tpot" else run.workload.output_tokens
                by_length = rows[np.argsort(lengths[rows], kind="stable")]
                groups = np.vstack([_equal_groups(rows), _equal_groups(by_length)])
                self._measured[-1][metric] = MeasuredTimes(run.seconds[metric], rows, groups)
                count, times = len(groups) + len(QUANTILES) * (len(rows) > 0), len(groups) // 2
                group.append(np.full(count, g))
                block.append(np.concatenate([r * BLOCKS + np.arange(times), np.full(count - times, -1)]))
                # A run counts as BLOCKS observations of each metric, however many requests it has.
                weight.append(np.full(count, np.sqrt(BLOCKS / max(1, count))))
        if steps is not None:
            group.append(np.full(len(steps.seconds), len(METRICS)))
            block.append(steps.block)
            weight.append(steps.weight)
        # [m] index of a residual's scale (in METRICS, or 3 for steps), and its block of time, or -1 for a complete run.
        self.group, self.block, self.weight = np.concatenate(group), np.concatenate(block), np.concatenate(weight)

    def with_priors(self, priors: Sequence[Prior]) -> Problem:
        """Return a problem with the same runs and other parameters, which continues to count ``simulations``."""
        other = Problem(self.runs, self._deployment, priors, self._steps, self._seed)
        other.simulations = self.simulations
        return other

    def values(self, z: Floats) -> dict[str, float]:
        """Return the values of the parameters at ``z`` prior standard deviations from their centers."""
        return {prior.name: prior.value(float(at)) for prior, at in zip(self.priors, z, strict=True)}

    def simulate(self, run: Run, values: Mapping[str, float], *, max_log_steps: int = 0) -> Records:
        """Simulate a run's requests with cost tables of these parameter values."""
        self.simulations += 1
        candidate = replace(self._deployment, cost=apply(self._deployment.cost, values))
        return engine.simulate(run.workload, candidate, seed=self._seed, max_log_steps=max_log_steps)

    def residuals(self, z: Floats) -> Floats:
        """Return the residuals at ``z`` ([m]), first of groups of requests and of quantiles, then of steps."""
        key = np.ascontiguousarray(z).tobytes()
        if key not in self._cache:
            values, parts = self.values(z), list[Floats]()
            for run, measured in zip(self.runs, self._measured, strict=True):
                seconds = seconds_of(self.simulate(run, values).requests)
                for metric in METRICS:
                    parts += measured[metric].residuals(seconds[metric])
            if self._steps is not None:
                parts.append(self._steps.residuals(values))
            self._cache[key] = np.concatenate(parts)
        return self._cache[key]

    def weights(self, scale: Floats) -> Floats:
        """Return the weights of the residuals ([m]). ``scale`` has the typical size of each kind of residual."""
        return np.asarray(self.weight / scale[self.group])

    def simulate_given(self) -> list[RequestRecords]:
        """Simulate each run with the given tables. Raises InputError if requests that the engine finished do not."""
        found = []
        for run in self.runs:
            found.append(self.simulate(run, self.values(np.zeros(len(self.priors)))).requests)
            status = found[-1].status
            refused = np.flatnonzero((status != Status.FINISHED) & np.isfinite(run.seconds["jct"]))
            if len(refused):
                i = int(refused[0])
                outcome = Status(int(status[i])).name.lower().replace("_", " ")
                raise InputError(
                    f"{run.name} must have run on this deployment; {len(refused)} requests that the engine finished "
                    f"are {outcome} when they are simulated, the first with {run.workload.prompt_tokens[i]} prompt "
                    "tokens. Give the engine's own settings in the scenario"
                )
        return found


def _equal_groups(rows: Ints) -> Ints:
    """Return the rows in groups of k neighbors ([groups, k]). A few rows are left out, so that sizes are equal."""
    size = len(rows) // BLOCKS
    at = np.linspace(0, max(0, len(rows) - 1), BLOCKS * size).round().astype(np.int64)
    return np.asarray(rows[at].reshape(BLOCKS if size else 0, size))


class MeasuredTimes:
    """A metric's measured times: of requests ``rows`` [r], and of ``groups`` [groups, k] of them, for residuals."""

    def __init__(self, measured_s: Floats, rows: Ints, groups: Ints) -> None:
        self.rows, self.groups, self._log = rows, groups, np.log(np.maximum(measured_s, 1e-9))
        place = np.array(QUANTILES) * max(0, len(rows) - 1)
        self._below, self._share = place.astype(np.int64), place % 1
        self._quantiles = self._quantiles_of(self._log) if len(rows) else place

    def _quantiles_of(self, log: Floats) -> Floats:
        ordered = np.sort(log[self.rows])  # for a few quantiles much faster than numpy.quantile
        below, above = ordered[self._below], ordered[np.minimum(self._below + 1, len(ordered) - 1)]
        return np.asarray(below + self._share * (above - below))

    def residuals(self, simulated_s: Floats) -> list[Floats]:
        """Return two arrays of log errors: trimmed means of groups of requests, and errors of quantiles."""
        if not len(self.rows):
            return []
        simulated = np.log(np.maximum(simulated_s, 1e-9))
        error = np.sort((simulated - self._log)[self.groups], axis=1)
        trim = int(TRIM_FRACTION * error.shape[1])
        means = error[:, trim : error.shape[1] - trim].mean(axis=1) if error.size else np.zeros(0)
        return [means, self._quantiles_of(simulated) - self._quantiles]


HUBER = 1.5  # weighted residuals above this count linearly
REACH_Z = 6.0  # limit of ``z``
POINTS_PER_PARAMETER = 8
SECONDS_WIDER = 6.0  # extent of a linear model in log(seconds), as a multiple of that in log(factor)
STEPS = 30  # maximum number of reweighted least squares


@dataclass(frozen=True)
class LinearModel:
    """Linear model of the residuals at ``z`` near ``center`` [p]: ``intercept + slopes @ (z - center)``."""

    center: Floats
    intercept: Floats  # [m]
    slopes: Floats  # [m, p], 0 for parameters that are not free
    radius: Floats  # [p] extent of the fitted points
    free: Mask  # [p]

    def residuals(self, z: Floats) -> Floats:
        """Return the residuals that the model predicts ([m])."""
        return np.asarray(self.intercept + self.slopes @ (z - self.center))


def radius_of(problem: Problem, log_radius: float, known: LinearModel | None = None) -> Floats:
    """Return how far from its center a linear model extends in the direction of each parameter ([p]).

    The logarithm of a factor changes by ``log_radius``, and the logarithm of seconds by 6 times as much. With a
    ``known`` model, parameters that barely move the residuals get an extent that does move them.
    """
    seconds = np.array([prior.unit == "s" for prior in problem.priors])
    sd = np.array([prior.log_sd for prior in problem.priors])
    smallest = log_radius * np.where(seconds, SECONDS_WIDER, 1.0) / sd
    if known is None:
        return np.asarray(smallest)
    moves = np.maximum(1e-9, np.sqrt(np.mean(known.slopes**2, axis=0)))
    return np.asarray(np.maximum(smallest, np.minimum(np.where(seconds, 0.5, 1.0), log_radius / moves)))


def linear_model(problem: Problem, center: Floats, free: Mask, radius: Floats, seed: int) -> LinearModel:
    """Fit a linear model to the residuals of simulations at random points within ``radius`` [p] of a center."""
    draws = 2 * latin_hypercube(POINTS_PER_PARAMETER * (int(free.sum()) + 1), int(free.sum()), seed) - 1
    points = np.repeat(center[None], len(draws), axis=0)
    points[:, free] += draws * radius[free]
    residuals = np.array([problem.residuals(point) for point in np.clip(points, -REACH_Z, REACH_Z)])
    line = np.linalg.lstsq(np.column_stack([np.ones(len(draws)), draws]), residuals, rcond=None)[0]
    slopes = np.zeros((residuals.shape[1], len(center)))
    slopes[:, free] = line[1:].T / radius[free]
    return LinearModel(center, line[0], slopes, radius, free)


def latin_hypercube(count: int, dimensions: int, seed: int) -> Floats:
    """Return the points of a Latin hypercube sample of [0, 1), as an array of shape [count, dimensions]."""
    rng = np.random.default_rng(seed)
    parts = np.column_stack([rng.permutation(count) for _ in range(dimensions)])
    return np.asarray((parts + rng.random((count, dimensions))) / count)


def minimize(model: LinearModel, weight: Floats) -> tuple[Floats, float]:
    """Return the point with the smallest loss within two radii of a model's center, by reweighted least squares."""
    low = np.maximum(-REACH_Z, model.center - 2 * model.radius)[model.free]
    high = np.minimum(REACH_Z, model.center + 2 * model.radius)[model.free]
    slopes = model.slopes[:, model.free] * weight[:, None]
    z = model.center.copy()
    for _ in range(STEPS):
        residuals = model.residuals(z) * weight
        robust = np.minimum(1.0, HUBER / np.maximum(np.abs(residuals), 1e-12))
        hessian = (slopes * robust[:, None]).T @ slopes + np.eye(slopes.shape[1])
        gradient = (slopes * robust[:, None]).T @ residuals + z[model.free]
        new = np.clip(z[model.free] - np.linalg.solve(hessian, gradient), low, high)
        converged = np.abs(new - z[model.free]).max(initial=0.0) < 1e-6
        z[model.free] = new
        if converged:
            break
    return z, loss(model.residuals(z) * weight, z)


def loss(residuals: Floats, z: Floats) -> float:
    """Return Huber's loss of weighted residuals plus the squares of ``z``, which stand for the prior."""
    size = np.abs(residuals)
    data = np.where(size <= HUBER, size**2, 2 * HUBER * size - HUBER**2)
    return float(data.sum() + (z**2).sum())


FLOOR = 0.02  # no engine repeats itself more closely than this; closer agreement is not evidence
NARROW = (0.08, 0.05, 0.05)  # extents, in the log of a factor, within which residuals are linear
MIN_EFFECT = 0.01  # parameters with a smaller effect are undetermined, unless removing them costs two deviations


def scale_at(problem: Problem, z: Floats) -> Floats:
    """Return the typical size of each kind of residual at ``z``: a robust standard deviation about zero."""
    residuals = np.abs(problem.residuals(z))
    groups = [residuals[problem.group == g] for g in range(len(METRICS) + 1)]
    return np.array([max(FLOOR, 1.4826 * float(np.median(own))) if len(own) else FLOOR for own in groups])


def deviations(problem: Problem, z: Floats, model: LinearModel, scale: Floats) -> tuple[Floats, Floats]:
    """Return the standard deviations of the parameters at ``z`` ([p]), and factors that raise the variances ([p]).

    The variances are raised because residuals within a block of time are correlated.
    """
    sd, noise = np.ones(len(z)), np.ones(len(z))
    group, block, weight = problem.group, problem.block, problem.weights(scale)
    slopes = model.slopes[:, model.free] * weight[:, None]
    residuals = model.residuals(z) * weight
    robust = np.minimum(1.0, HUBER / np.maximum(np.abs(residuals), 1e-12))
    prior = np.eye(slopes.shape[1])
    covariance = np.linalg.inv((slopes * robust[:, None]).T @ slopes + prior)
    gradient = slopes * (robust * residuals)[:, None]
    gradient[group < len(METRICS)] *= FAMILIES  # groups by length and quantiles move with their requests
    timed = block >= 0

    def sums(key: Ints) -> Floats:
        return np.array([gradient[(key == k) & timed].sum(axis=0) for k in np.unique(key[timed])])

    # A simulation is no more exact than 1 %, which would shift all requests of a metric together.
    shared = np.array([(slopes * (weight * MIN_EFFECT)[:, None])[group == g].sum(axis=0) for g in np.unique(group)])
    known = shared.T @ shared + prior
    blocks, by_run = sums(block), sums(block // BLOCKS)
    by_run = (by_run - by_run.mean(axis=0)) * np.sqrt(len(by_run) / max(1, len(by_run) - 1))
    spreads = (blocks.T @ blocks, by_run.T @ by_run)  # a machine drifts from run to run as well
    between = np.max([np.diag(covariance @ (own + known) @ covariance) for own in spreads], axis=0)
    variance = np.diag(covariance) + between  # of the curvature, and of correlation within blocks
    sd[model.free], noise[model.free] = np.sqrt(variance), variance / np.diag(covariance)
    return sd, noise


FIRST_SCALE = (0.2, 0.1, 0.15, 0.15)
SPREAD_Z, STARTS = 2.0, 3
LIFTED_Z = 1.2  # seconds near zero have no effect in log, so that a search leaves them only from a raised start
WIDE = (0.3, 0.2, 0.12)  # extents of the first models, in the log of a factor, before NARROW
SIGNIFICANT_LOSS, RETAINED_FRACTION = 4.0, 0.95  # two deviations; share of rows that determine an effect
CERTAIN_DEVIATIONS = 4.0  # a parameter this many deviations from neutral has certainly changed, without a trial
NUISANCE = "log_step"  # parameter of the log's clock, not of the tables: it may change freely


@dataclass(frozen=True)
class Solution:
    """Result of the fit. All fields are arrays with one value per parameter ([p])."""

    z: Floats  # [p] values in prior standard deviations from their centers; exactly 0 where neutral
    best: Floats  # [p] with all determined parameters free: the center of ``sd`` where ``z`` is neutral
    sd: Floats  # [p] standard deviations of ``best``; 1 where undetermined
    determined: Mask  # [p] parameters that the runs determine
    effect: Floats  # [p] change of predictions (rms, in log) with each parameter's prior deviation
    share: Floats  # [p] d log(time between tokens) / d log(parameter), averaged


def solve(problem: Problem, free: Sequence[str], seed: int, start: Floats | None = None) -> Solution:
    """Find the most probable values, which minimize Huber's loss of scaled residuals plus the prior's squares.

    Parameters outside ``free`` stay neutral (unchanged). Parameters that do not affect predictions return to neutral
    one by one, unless that worsens the agreement. Determined parameters also return if their change is no better than
    noise.
    """
    names = [prior.name for prior in problem.priors]
    determined = requested = np.array([name in free for name in names])
    z, scale = _search(problem, determined, seed, start)
    z, cost, model = refine(problem, z, determined, scale, seed)
    effect, retained = np.zeros(len(names)), np.zeros(len(names), dtype=np.bool_)
    while True:
        now = _effects(model.slopes, determined)
        effect[determined] = now[determined]
        weak = np.flatnonzero(determined & ~retained & (now < MIN_EFFECT))
        if not len(weak):
            break
        weakest = weak[np.argmin(now[weak])]
        others, neutral = determined.copy(), z.copy()
        others[weakest], neutral[weakest] = False, 0.0
        if not others.any():
            return Solution(neutral, neutral, np.ones(len(z)), others, effect, 0 * z)
        trial = refine(problem, neutral, others, scale, seed)
        if trial[1] > cost + SIGNIFICANT_LOSS:
            retained[weakest] = True
        else:
            determined, (z, cost, model) = others, trial
    sd, noise = deviations(problem, z, model, scale)
    if not (determined == requested).all():
        # If runs do not separate two parts of a step, one can replace the other: the determined parameters are as
        # uncertain as they are when the undetermined ones are free.
        radius = np.where(determined, radius_of(problem, NARROW[-1], model), 1.0)
        complete = linear_model(problem, z, requested, radius, seed)
        sd[determined] = np.maximum(sd, deviations(problem, z, complete, scale)[0])[determined]
    moved = _revert_noise(problem, (z, cost, model), scale, noise, seed)
    tpot, log_sd = problem.group == METRICS.index("tpot"), np.array([prior.log_sd for prior in problem.priors])
    share = model.slopes[tpot].mean(axis=0) / log_sd if tpot.any() else 0 * log_sd
    return Solution(moved, z, sd, determined, effect, np.asarray(share))


def _revert_noise(
    problem: Problem, at: tuple[Floats, float, LinearModel], scale: Floats, noise: Floats, seed: int
) -> Floats:
    # Chance improves the loss by SIGNIFICANT_LOSS if residuals are independent, else by ``noise`` times as much. The
    # first trial has all parameters neutral, further ones add the least certain; each refits the others.
    z, cost, model = at
    moving, retained = model.free.copy(), np.array([prior.name == NUISANCE for prior in problem.priors])
    weight = problem.weights(scale)
    if loss(problem.residuals(np.zeros(len(z))) * weight, 0 * z) <= cost + SIGNIFICANT_LOSS * noise[moving].max():
        return 0 * z
    while True:
        # In prior deviations from neutral; from 0, which has no logarithm, by a factor of e.
        distance = [abs(at) if p.neutral == p.center else 1 / p.log_sd for p, at in zip(problem.priors, z, strict=True)]
        certainty = np.array(distance) / deviations(problem, z, model, scale)[0]
        candidates = np.flatnonzero(moving & ~retained & (certainty < CERTAIN_DEVIATIONS))
        if not len(candidates):
            return z
        least = candidates[np.argmin(certainty[candidates])]
        others, neutral = moving.copy(), z.copy()
        others[least], neutral[least] = False, 0.0
        if not others.any():
            return z
        trial = refine(problem, neutral, others, scale, seed)
        if trial[1] > cost + SIGNIFICANT_LOSS * noise[least]:
            retained[least] = True
        else:
            moving, (z, cost, model) = others, trial


def _search(problem: Problem, free: Mask, seed: int, start: Floats | None) -> tuple[Floats, Floats]:
    draws = latin_hypercube(POINTS_PER_PARAMETER * (int(free.sum()) + 1), int(free.sum()), seed)
    points = np.zeros((len(draws) + 1, len(free)))
    points[1:, free] = (2 * draws - 1) * SPREAD_Z
    weight = problem.weights(np.array(FIRST_SCALE))
    order = np.argsort([loss(problem.residuals(z) * weight, z) for z in points], kind="stable")
    ends = [descend(problem, points[i], free, WIDE, weight, seed) for i in order[:STARTS]]
    best = np.array(min(ends)[1])
    low = [k for k in np.flatnonzero(free) if problem.priors[k].unit == "s" and best[k] < LIFTED_Z / 2]
    starts = [np.where(np.arange(len(best)) == k, LIFTED_Z, best) for k in low] + ([] if start is None else [start])
    ends += [descend(problem, z, free, WIDE[1:], weight, seed) for z in starts]
    best = np.array(min(ends)[1])
    return best, scale_at(problem, best)


def descend(
    problem: Problem, z: Floats, free: Mask, radii: Sequence[float], weight: Floats, seed: int
) -> tuple[float, tuple[float, ...]]:
    """Minimize linear models of decreasing radius, each about the last minimum. Return the loss and the last point."""
    cost = 0.0
    for radius in radii:
        z, cost = minimize(linear_model(problem, z, free, radius_of(problem, radius), seed), weight)
    return cost, tuple(z.tolist())


def refine(problem: Problem, z: Floats, free: Mask, scale: Floats, seed: int) -> tuple[Floats, float, LinearModel]:
    """Minimize models of NARROW radii in turn. Return the final point, its loss and the last model."""
    model: LinearModel | None = None
    for turn, radius in enumerate(NARROW):
        model = linear_model(problem, z, free, radius_of(problem, radius, model), seed + turn)
        z, cost = minimize(model, problem.weights(scale))
    assert model is not None  # NARROW is not empty
    return z, cost, model


def _effects(slopes: Floats, free: Mask) -> Floats:
    """Return how much residuals change (rms) per prior deviation of a parameter if the others compensate ([p])."""
    # The rows that change most, which may be chance of single requests, are left out.
    out, rows = np.zeros(slopes.shape[1]), len(slopes)
    for k in np.flatnonzero(free):
        others = [j for j in np.flatnonzero(free) if j != k]
        a = np.vstack([slopes[:, others], MIN_EFFECT * np.sqrt(rows) * np.eye(len(others))])
        b = np.concatenate([slopes[:, k], np.zeros(len(others))])
        follow = np.linalg.lstsq(a, b, rcond=None)[0] if others else np.zeros(0)
        rest = slopes[:, k] - slopes[:, others] @ follow
        out[k] = float(np.sqrt(np.mean(np.sort(rest**2)[: max(1, round(RETAINED_FRACTION * rows))])))
    return out
