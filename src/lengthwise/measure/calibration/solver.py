"""How far a candidate's simulations lie from what was measured, as residuals in log seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lengthwise import engine
from lengthwise.measure.calibration.measured_runs import BLOCKS, Run, seconds_of
from lengthwise.measure.calibration.parameters import Knob, apply
from lengthwise.measure.calibration.result import METRICS
from lengthwise.measure.calibration.step_evidence import Evidence
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Records, Status

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9)
FAMILIES = 3
TRIM_FRACTION = 0.2


@dataclass(frozen=True)
class Rows:
    """[m] what each residual is of, the same for every candidate.

    Attributes:
        group: Which scale it is divided by: an index into METRICS, or 3 for steps.
        block: Which block of time it is of; -1 for groups by length and quantiles, which are of a whole run.
        weight: How much it counts: a run is worth BLOCKS observations of each metric, however many requests.
    """

    group: Ints
    block: Ints
    weight: Floats


@dataclass(frozen=True)
class _Scored:
    """The requests of one metric that are fitted to: all, and in groups by time and by length ([groups, k])."""

    rows: Ints
    groups: Ints


class Problem:
    """The distance between runs and their simulations, over the parameters' values.

    Answers are kept by their values: the search asks for some points again.
    """

    def __init__(
        self, runs: Sequence[Run], deployment: Deployment, knobs: Sequence[Knob], steps: Evidence | None, seed: int
    ) -> None:
        self.runs, self.knobs, self.simulations = runs, tuple(knobs), 0
        self._deployment, self._seed, self._steps = deployment, seed, steps
        self._known: dict[bytes, Floats] = {}
        self._retained = [_scored(run) for run in runs]
        self.rows = self._rows()

    def with_knobs(self, knobs: Sequence[Knob]) -> Problem:
        """The same runs over other parameters; it goes on counting simulations."""
        other = Problem(self.runs, self._deployment, knobs, self._steps, self._seed)
        other.simulations = self.simulations
        return other

    def values(self, z: Floats) -> dict[str, float]:
        """The parameters' values at ``z`` prior standard deviations from their centres."""
        return {knob.name: knob.value(float(at)) for knob, at in zip(self.knobs, z, strict=True)}

    def simulate(self, run: Run, values: Mapping[str, float], *, keep_steps: int = 0) -> Records:
        """A run's requests with the tables of these values."""
        self.simulations += 1
        candidate = replace(self._deployment, cost=apply(self._deployment.cost, values))
        return engine.simulate(run.workload, candidate, seed=self._seed, keep_steps=keep_steps)

    def residuals(self, z: Floats) -> Floats:
        """[m] log(simulated / measured): groups of requests, quantiles, then steps."""
        key = np.ascontiguousarray(z).tobytes()
        if key not in self._known:
            self._known[key] = self._residuals(self.values(z))
        return self._known[key]

    def check_simulated(self) -> None:
        """Raises InputError where the deployment, simulated, cannot serve what the engine served."""
        for run in self.runs:
            told = self.simulate(run, self.values(np.zeros(len(self.knobs)))).requests.status
            refused = np.flatnonzero((told != Status.FINISHED) & np.isfinite(run.seconds["jct"]))
            if len(refused):
                i = int(refused[0])
                ended = Status(int(told[i])).name.lower().replace("_", " ")
                raise InputError(
                    f"{run.name} must have run on this deployment; {len(refused)} requests that the engine finished "
                    f"are {ended} when they are simulated, the first with {run.workload.prompt_tokens[i]} prompt "
                    "tokens. Give the engine's own settings in the scenario"
                )

    def _residuals(self, values: Mapping[str, float]) -> Floats:
        parts = []
        for run, kept in zip(self.runs, self._retained, strict=True):
            told = seconds_of(self.simulate(run, values).requests)
            for metric in METRICS:
                parts += _of_metric(told[metric], run.seconds[metric], kept[metric])
        if self._steps is not None:
            parts.append(self._steps.residuals(values))
        return np.concatenate(parts)

    def _rows(self) -> Rows:
        group, block, weight = [], [], []
        for r, kept in enumerate(self._retained):
            for g, metric in enumerate(METRICS):
                count = len(kept[metric].groups) + len(LEVELS) * (len(kept[metric].rows) > 0)
                times = len(kept[metric].groups) // 2
                group.append(np.full(count, g))
                block.append(np.concatenate([r * BLOCKS + np.arange(times), np.full(count - times, -1)]))
                weight.append(np.full(count, np.sqrt(BLOCKS / max(1, count))))
        if self._steps is not None:
            group.append(np.full(len(self._steps.seconds), len(METRICS)))
            block.append(self._steps.block)
            weight.append(self._steps.weight)
        return Rows(np.concatenate(group), np.concatenate(block), np.concatenate(weight))


def _scored(run: Run) -> dict[str, _Scored]:
    """By metric, whom a run is fitted to: in blocks of time, and of like prompts (outputs for times between tokens).

    Single requests are not compared: which step one catches turns on microseconds.
    """
    found = {}
    for metric in METRICS:
        rows = np.flatnonzero(run.fit & (run.seconds[metric] > 0))
        lengths = run.workload.prompt_tokens if metric != "tpot" else run.workload.output_tokens
        by_length = rows[np.argsort(lengths[rows], kind="stable")]
        found[metric] = _Scored(rows, np.vstack([_cut(rows), _cut(by_length)]))
    return found


def _cut(rows: Ints) -> Ints:
    """[groups, k] equal groups of neighbours, without a few at even places where they do not come out even."""
    size = len(rows) // BLOCKS
    at = np.linspace(0, max(0, len(rows) - 1), BLOCKS * size).round().astype(np.int64)
    return np.asarray(rows[at].reshape(BLOCKS if size else 0, size))


def _of_metric(ours_s: Floats, theirs_s: Floats, scored: _Scored) -> list[Floats]:
    """Trimmed means of the log error by group, and of the logs' quantiles."""
    if not len(scored.rows):
        return []
    ours, theirs = (np.log(np.maximum(seconds, 1e-9)) for seconds in (ours_s, theirs_s))
    apart = np.sort((ours - theirs)[scored.groups], axis=1)
    off = int(TRIM_FRACTION * apart.shape[1])
    means = apart[:, off : apart.shape[1] - off].mean(axis=1) if apart.size else np.zeros(0)
    levels = [np.quantile(logs[scored.rows], LEVELS) for logs in (ours, theirs)]
    return [means, levels[0] - levels[1]]


Mask = npt.NDArray[np.bool_]
HUBER = 1.5
REACH_Z = 6.0
POINTS_A_PARAMETER = 8
SECONDS_WIDER = 6.0
STEPS = 30


@dataclass(frozen=True)
class Cloud:
    """A linear model of residuals about ``center``: ``at + slopes @ (z - centre)``.

    ``slopes`` [m, p] are 0 for parameters that did not move; ``radius`` [p] is how far the points lay.
    """

    center: Floats
    at: Floats
    slopes: Floats
    radius: Floats
    free: Mask

    def residuals(self, z: Floats) -> Floats:
        """[m] what the line says."""
        return np.asarray(self.at + self.slopes @ (z - self.center))


def radius_of(problem: Problem, log_radius: float, known: Cloud | None = None) -> Floats:
    """[p] how far a cloud goes: ``log_radius`` in the log of a factor, six times as far for seconds.

    Farther for parameters that a line is known of and that move little: as far as makes such a difference.
    """
    seconds = np.array([knob.unit == "s" for knob in problem.knobs])
    sd = np.array([knob.log_sd for knob in problem.knobs])
    least = log_radius * np.where(seconds, SECONDS_WIDER, 1.0) / sd
    if known is None:
        return np.asarray(least)
    moves = np.maximum(1e-9, np.sqrt(np.mean(known.slopes**2, axis=0)))
    return np.asarray(np.maximum(least, np.minimum(np.where(seconds, 0.5, 1.0), log_radius / moves)))


def cloud(problem: Problem, center: Floats, free: Mask, radius: Floats, seed: int) -> Cloud:
    """The line through simulations of points drawn about a centre, up to ``radius`` [p] from it."""
    p = int(free.sum())
    count = points_for(free)
    draws = 2 * spread(count, p, seed) - 1
    points = np.repeat(center[None], count, axis=0)
    points[:, free] += draws * radius[free]
    told = np.array([problem.residuals(point) for point in np.clip(points, -REACH_Z, REACH_Z)])
    line = np.linalg.lstsq(np.column_stack([np.ones(count), draws]), told, rcond=None)[0]
    slopes = np.zeros((told.shape[1], len(center)))
    slopes[:, free] = line[1:].T / radius[free]
    return Cloud(center, line[0], slopes, radius, free)


def points_for(free: Mask) -> int:
    """How many simulations a line over so many parameters takes."""
    return POINTS_A_PARAMETER * (int(free.sum()) + 1)


def spread(count: int, dimensions: int, seed: int) -> Floats:
    """[count, dimensions] points of a Latin hypercube: in each dimension one in each of ``count`` equal parts."""
    rng = np.random.default_rng(seed)
    parts = np.column_stack([rng.permutation(count) for _ in range(dimensions)])
    return np.asarray((parts + rng.random((count, dimensions))) / count)


def settle(found: Cloud, weight: Floats) -> tuple[Floats, float]:
    """Where Huber's loss of the line and the prior's square are least within two radii, and how much that is."""
    low = np.maximum(-REACH_Z, found.center - 2 * found.radius)[found.free]
    high = np.minimum(REACH_Z, found.center + 2 * found.radius)[found.free]
    slopes = found.slopes[:, found.free] * weight[:, None]
    z = found.center.copy()
    for _ in range(STEPS):
        residuals = found.residuals(z) * weight
        robust = np.minimum(1.0, HUBER / np.maximum(np.abs(residuals), 1e-12))
        bend = (slopes * robust[:, None]).T @ slopes + np.eye(slopes.shape[1])
        pull = (slopes * robust[:, None]).T @ residuals + z[found.free]
        moved = np.clip(z[found.free] - np.linalg.solve(bend, pull), low, high)
        done = np.abs(moved - z[found.free]).max(initial=0.0) < 1e-6
        z[found.free] = moved
        if done:
            break
    return z, loss(found.residuals(z) * weight, z)


def loss(residuals: Floats, z: Floats) -> float:
    """Huber's loss of residuals in their own spread, and the prior's square; smaller is better."""
    size = np.abs(residuals)
    data = np.where(size <= HUBER, size**2, 2 * HUBER * size - HUBER**2)
    return float(data.sum() + (z**2).sum())


FLOOR = 0.02
"""No engine repeats itself closer than this; agreement beyond it tells nothing."""
NARROW = (0.08, 0.05, 0.05)
"""Radii of clouds, in the log of a factor, within which a line is straight."""
EFFECT_TOLD = 0.01
"""A parameter that moves predictions by less than 1 % is not told, unless leaving it out costs two deviations."""


def scale_at(problem: Problem, z: Floats) -> Floats:
    """[groups] robust spread of residuals about zero."""
    residuals, rows = problem.residuals(z), problem.rows
    out = np.full(len(METRICS) + 1, FLOOR)
    for g in range(len(out)):
        own = np.abs(residuals[rows.group == g])
        out[g] = max(FLOOR, 1.4826 * float(np.median(own))) if len(own) else FLOOR
    return out


def weights(problem: Problem, scale: Floats) -> Floats:
    return np.asarray(problem.rows.weight / scale[problem.rows.group])


def deviations(problem: Problem, z: Floats, found: Cloud, scale: Floats) -> tuple[Floats, Floats]:
    """[p] standard deviations of the values told: curvature's and that between blocks of time.

    And how many times as large their squares are as the curvature's alone: the noise that likeness brings.
    """
    out, noise = np.ones(len(z)), np.ones(len(z))
    rows, weight = problem.rows, weights(problem, scale)
    slopes = found.slopes[:, found.free] * weight[:, None]
    residuals = found.residuals(z) * weight
    robust = np.minimum(1.0, HUBER / np.maximum(np.abs(residuals), 1e-12))
    prior = np.eye(slopes.shape[1])
    bend = np.linalg.inv((slopes * robust[:, None]).T @ slopes + prior)
    pull = slopes * (robust * residuals)[:, None]
    pull[rows.group < len(METRICS)] *= FAMILIES  # groups by length and quantiles move with their requests
    blocks = _sums(pull, rows.block, rows.block)
    shared = np.array(
        [(slopes * (weight * EFFECT_TOLD)[:, None])[rows.group == g].sum(axis=0) for g in np.unique(rows.group)]
    )  # what 1 % that all requests' seconds of a metric are off by would pull: a simulation is no closer
    known = shared.T @ shared + prior
    by_run = _sums(pull, rows.block // BLOCKS, rows.block)
    by_run = (by_run - by_run.mean(axis=0)) * np.sqrt(len(by_run) / max(1, len(by_run) - 1))
    spreads = (blocks.T @ blocks, by_run.T @ by_run)  # a machine drifts from run to run as well
    between = np.max([np.diag(bend @ (own + known) @ bend) for own in spreads], axis=0)
    variance = np.diag(bend) + between
    out[found.free], noise[found.free] = np.sqrt(variance), variance / np.diag(bend)
    return out, noise


def with_untold(problem: Problem, z: Floats, found: Cloud, requested: Mask, scale: Floats, seed: int) -> Floats:
    """[p] standard deviations of what was told if what was asked for and not told is not where it was left.

    Two parts of a step that runs do not tell apart stand in for each other: what one may be by what is believed of
    it, the other may be less or more.
    """
    if (found.free == requested).all():
        return np.zeros(len(z))
    radius = np.where(found.free, radius_of(problem, NARROW[-1], found), 1.0)
    return deviations(problem, z, cloud(problem, z, requested, radius, seed), scale)[0]


def _sums(pull: Floats, key: npt.NDArray[np.int64], block: npt.NDArray[np.int64]) -> Floats:
    """[keys, p] what the rows of blocks of time pull, by key."""
    return np.array([pull[(key == k) & (block >= 0)].sum(axis=0) for k in np.unique(key[block >= 0])])


FIRST_SCALE = (0.2, 0.1, 0.15, 0.15)
SPREAD_Z, STARTS = 2.0, 3
LIFTED_Z = 1.2
"""Seconds that are next to nothing move nothing in the log: who went down there by mistake must be lifted to return."""
WIDE = (0.3, 0.2, 0.12)
"""Radii of the clouds, in the log of a factor: from where a start may lie to NARROW, where a line is straight."""
COST_TOLD, RETAINED_FRACTION = 4.0, 0.95
"""Two deviations' worth of the loss; the share of rows that an effect is told over."""
SURE = 4.0
"""So many deviations from neutral nobody tries whether a parameter moved: it did."""

NUISANCE = "log_step"
"""Of the log's clock, not of the tables: nobody asks whether it moved."""


@dataclass(frozen=True)
class Solution:
    """Where the search ended.

    Attributes:
        z: [p] values in prior standard deviations from their centres; exactly 0 where neutral.
        best: [p] the same with all free that were told, about which ``sd`` is where ``z`` is neutral.
        sd: [p] standard deviations of ``best``; 1 where nothing was told.
        report: [p] which parameters the runs could tell.
        effect: [p] by how much predictions move (rms, in log) with each parameter's prior deviation.
        share: [p] by how much times between tokens grow (mean, in log) with the log of each parameter.
    """

    z: Floats
    best: Floats
    sd: Floats
    report: Mask
    effect: Floats
    share: Floats


def solve(problem: Problem, free: Sequence[str], seed: int, start: Floats | None = None) -> Solution:
    """The most probable values: Huber's loss on residuals in units of their own spread, and the prior.

    Parameters outside ``free`` stay neutral. One that moves nothing is put back to neutral, one after the
    other, unless that makes the agreement worse; so is one that could be told, but whose move improves the
    agreement by no more than noise would. ``start``: a place known to be good, searched from beside those drawn.
    """
    names = [knob.name for knob in problem.knobs]
    told = asked = np.array([name in free for name in names])
    z, scale = _search(problem, told, seed, start)
    z, cost, found = narrow(problem, z, told, scale, seed)
    effect, kept = np.zeros(len(names)), np.zeros(len(names), dtype=np.bool_)
    while True:
        now = _effects(found.slopes, told)
        effect[told] = now[told]
        weak = np.flatnonzero(told & ~kept & (now < EFFECT_TOLD))
        if not len(weak):
            break
        least = weak[np.argmin(now[weak])]
        fewer, back = told.copy(), z.copy()
        fewer[least], back[least] = False, 0.0
        if not fewer.any():
            return Solution(back, back, np.ones(len(z)), fewer, effect, 0 * z)
        trial = narrow(problem, back, fewer, scale, seed)
        if trial[1] > cost + COST_TOLD:
            kept[least] = True
        else:
            told, (z, cost, found) = fewer, trial
    sd, noise = deviations(problem, z, found, scale)
    sd[told] = np.maximum(sd, with_untold(problem, z, found, asked, scale, seed))[told]
    moved = _changed(problem, (z, cost, found), scale, noise, seed)
    return Solution(moved, z, sd, told, effect, _shares(problem, found))


def _changed(problem: Problem, at: tuple[Floats, float, Cloud], scale: Floats, noise: Floats, seed: int) -> Floats:
    """[p] the values with all back at neutral whose move improves the agreement by no more than noise does.

    Two deviations' worth of the loss (COST_TOLD) is what chance brings about if residuals are independent, and
    ``noise`` times as much where they are alike within blocks of time. First all at once are tried, then one after
    the other, the least sure first; each trial finds the others anew.
    """
    z, cost, found = at
    moving, kept = found.free.copy(), np.array([knob.name == NUISANCE for knob in problem.knobs])
    weight = weights(problem, scale)
    if loss(problem.residuals(np.zeros(len(z))) * weight, 0 * z) <= cost + COST_TOLD * noise[moving].max():
        return 0 * z
    while True:
        sure = _sureness(problem, z, found, scale)
        open_ = np.flatnonzero(moving & ~kept & (sure < SURE))
        if not len(open_):
            return z
        least = open_[np.argmin(sure[open_])]
        fewer, back = moving.copy(), z.copy()
        fewer[least], back[least] = False, 0.0
        if not fewer.any():
            return z
        trial = narrow(problem, back, fewer, scale, seed)
        if trial[1] > cost + COST_TOLD * noise[least]:
            kept[least] = True
        else:
            moving, (z, cost, found) = fewer, trial


def _shares(problem: Problem, found: Cloud) -> Floats:
    """[p] mean slopes of times between tokens, a unit of log."""
    own = problem.rows.group == METRICS.index("tpot")
    log_sd = np.array([knob.log_sd for knob in problem.knobs])
    return np.asarray(found.slopes[own].mean(axis=0) / log_sd if own.any() else 0 * log_sd)


def _sureness(problem: Problem, z: Floats, found: Cloud, scale: Floats) -> Floats:
    """[p] how many standard deviations each value lies from neutral."""
    sd, _ = deviations(problem, z, found, scale)
    away = [knob.from_neutral(float(at)) for knob, at in zip(problem.knobs, z, strict=True)]
    return np.array(away) / sd


def _search(problem: Problem, free: Mask, seed: int, start: Floats | None) -> tuple[Floats, Floats]:
    """From draws over what is believed, downhill by wide clouds from the best of them; and the spread there."""
    scale = np.array(FIRST_SCALE)
    draws = spread(points_for(free), int(free.sum()), seed)
    points = np.zeros((len(draws) + 1, len(free)))
    points[1:, free] = (2 * draws - 1) * SPREAD_Z
    weight = weights(problem, scale)
    order = np.argsort([loss(problem.residuals(z) * weight, z) for z in points], kind="stable")
    ends = [downhill(problem, points[i], free, WIDE, weight, seed) for i in order[:STARTS]]
    lifted = _lifted(problem, np.array(min(ends)[1]), free)
    known = [] if start is None else [start]
    ends += [downhill(problem, z, free, WIDE[1:], weight, seed) for z in [*lifted, *known]]
    best = np.array(min(ends)[1])
    return best, scale_at(problem, best)


def downhill(
    problem: Problem, z: Floats, free: Mask, radii: Sequence[float], weight: Floats, seed: int
) -> tuple[float, tuple[float, ...]]:
    """The loss where clouds of these radii lead, and the place."""
    cost = 0.0
    for radius in radii:
        z, cost = settle(cloud(problem, z, free, radius_of(problem, radius), seed), weight)
    return cost, tuple(z.tolist())


def _lifted(problem: Problem, z: Floats, free: Mask) -> list[Floats]:
    """``z`` with one of the free seconds each raised to where it is felt, where it is not there already."""
    seconds = [k for k in np.flatnonzero(free) if problem.knobs[k].unit == "s" and z[k] < LIFTED_Z / 2]
    starts = [z.copy() for _ in seconds]
    for start, k in zip(starts, seconds, strict=True):
        start[k] = LIFTED_Z
    return starts


def narrow(problem: Problem, z: Floats, free: Mask, scale: Floats, seed: int) -> tuple[Floats, float, Cloud]:
    """Downhill by narrowing clouds; the last one, its best point, and the loss there."""
    found: Cloud | None = None
    for turn, radius in enumerate(NARROW):
        found = cloud(problem, z, free, radius_of(problem, radius, found), seed + turn)
        z, cost = settle(found, weights(problem, scale))
    assert found is not None  # there are turns
    return z, cost, found


def _effects(slopes: Floats, free: Mask) -> Floats:
    """[p] root mean square by which residuals move with one parameter's deviation, the others following.

    The others follow within their own prior deviations, for agreement to within EFFECT_TOLD; the rows that move
    most, which may be single requests' luck, are left out.
    """
    out = np.zeros(slopes.shape[1])
    rows = len(slopes)
    for k in np.flatnonzero(free):
        others = [j for j in np.flatnonzero(free) if j != k]
        a = np.vstack([slopes[:, others], EFFECT_TOLD * np.sqrt(rows) * np.eye(len(others))])
        b = np.concatenate([slopes[:, k], np.zeros(len(others))])
        follow = np.linalg.lstsq(a, b, rcond=None)[0] if others else np.zeros(0)
        rest = slopes[:, k] - slopes[:, others] @ follow
        out[k] = float(np.sqrt(np.mean(np.sort(rest**2)[: max(1, round(RETAINED_FRACTION * rows))])))
    return out
