"""How far a candidate's simulations lie from what was measured, as residuals in log seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lengthwise import engine
from lengthwise.measure.calibrate._evidence import Evidence
from lengthwise.measure.calibrate._parameters import Knob, apply
from lengthwise.measure.calibrate._runs import BLOCKS, Run, seconds_of
from lengthwise.measure.calibrate.answer import METRICS
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Records, Status

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9)
FAMILIES = 3
TRIM = 0.2


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
        self,
        runs: Sequence[Run],
        deployment: Deployment,
        knobs: Sequence[Knob],
        steps: Evidence | None,
        seed: int,
    ) -> None:
        self.runs, self.knobs, self.simulations = runs, tuple(knobs), 0
        self._deployment, self._seed, self._steps = deployment, seed, steps
        self._known: dict[bytes, Floats] = {}
        self._kept = [_scored(run) for run in runs]
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
        for run, kept in zip(self.runs, self._kept, strict=True):
            told = seconds_of(self.simulate(run, values).requests)
            for metric in METRICS:
                parts += _of_metric(told[metric], run.seconds[metric], kept[metric])
        if self._steps is not None:
            parts.append(self._steps.residuals(values))
        return np.concatenate(parts)

    def _rows(self) -> Rows:
        group, block, weight = [], [], []
        for r, kept in enumerate(self._kept):
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
    off = int(TRIM * apart.shape[1])
    means = apart[:, off : apart.shape[1] - off].mean(axis=1) if apart.size else np.zeros(0)
    levels = [np.quantile(logs[scored.rows], LEVELS) for logs in (ours, theirs)]
    return [means, levels[0] - levels[1]]
