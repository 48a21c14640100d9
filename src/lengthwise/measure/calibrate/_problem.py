"""How far a candidate's simulations lie from what was measured, as residuals in log seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lengthwise import engine
from lengthwise.measure.calibrate import _step_parts
from lengthwise.measure.calibrate._parameters import Knob, apply
from lengthwise.measure.calibrate._runs import Run, simulated
from lengthwise.measure.calibrate.answer import METRICS
from lengthwise.measure.calibrate.iterations import Iterations
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Records, Status

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
LEVELS = (0.1, 0.25, 0.5, 0.75, 0.9)
BLOCKS = 12
"""Requests that follow each other wait for the same queue: they are independent by blocks of time at most."""
STEPS_SAME = 10


@dataclass(frozen=True)
class Rows:
    """[m] what each residual is of, the same for every candidate.

    Attributes:
        group: Which scale it is divided by: an index into METRICS, or 3 for logged steps.
        block: Which block of time it is of; quantiles, which are of a whole run, are of block -1.
        weight: How much it counts: a run is worth BLOCKS observations of each metric, however many requests.
    """

    group: Ints
    block: Ints
    weight: Floats


class Problem:
    """The distance between runs and their simulations, over the parameters' values.

    Answers are kept by their values: the search asks for some points again.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        deployment: Deployment,
        knobs: Sequence[Knob],
        log: Iterations | None,
        seed: int,
    ) -> None:
        self.runs, self.knobs, self.simulations = runs, tuple(knobs), 0
        self._deployment, self._seed, self._log = deployment, seed, log
        self._parts = None if log is None else _step_parts.step_parts(log, deployment)
        self._known: dict[bytes, Floats] = {}
        self._kept = [self._scored(run) for run in runs]
        self.rows = self._rows()

    def values(self, z: Floats) -> dict[str, float]:
        """The parameters' values at ``z`` prior standard deviations from their centres."""
        return {knob.name: knob.value(float(at)) for knob, at in zip(self.knobs, z, strict=True)}

    def simulate(self, run: Run, values: Mapping[str, float], *, keep_steps: int = 0) -> Records:
        """A run's requests with the tables of these values."""
        self.simulations += 1
        candidate = replace(self._deployment, cost=apply(self._deployment.cost, values))
        return engine.simulate(run.workload, candidate, seed=self._seed, keep_steps=keep_steps)

    def residuals(self, z: Floats) -> Floats:
        """[m] log(simulated / measured): requests, quantiles, then logged steps."""
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

    def _scored(self, run: Run) -> dict[str, Ints]:
        """By metric, the requests that are fitted to."""
        return {m: np.flatnonzero(run.fit & (run.seconds[m] > 0)) for m in METRICS}

    def _residuals(self, values: Mapping[str, float]) -> Floats:
        parts = []
        for run, kept in zip(self.runs, self._kept, strict=True):
            told = simulated(self.simulate(run, values), values.get("client", 0.0))
            for metric in METRICS:
                rows = kept[metric]
                ours, theirs = np.log(np.maximum(told[metric][rows], 1e-9)), np.log(run.seconds[metric][rows])
                parts.append(ours - theirs)
                if len(rows):
                    parts.append(np.quantile(ours, LEVELS) - np.quantile(theirs, LEVELS))
        if self._parts is not None and self._log is not None:
            parts.append(np.log(_step_parts.seconds_of(self._parts, values) / self._log.seconds))
        return np.concatenate(parts)

    def _rows(self) -> Rows:
        group: list[Ints] = []
        block: list[Ints] = []
        weight: list[Floats] = []
        whole: list[Ints] = []
        for r, run in enumerate(self.runs):
            place = (np.cumsum(run.fit) - 1) * BLOCKS // max(1, int(run.fit.sum())) + r * BLOCKS
            for g, metric in enumerate(METRICS):
                rows = self._kept[r][metric]
                some = len(LEVELS) if len(rows) else 0
                group.append(np.full(len(rows) + some, g))
                block.append(np.concatenate([place[rows], np.full(some, -1)]))
                share = np.sqrt(max(1.0, len(rows) / (2 * len(LEVELS))))
                weight.append(np.concatenate([np.ones(len(rows)), np.full(some, share)]))
                whole.append(np.full(len(rows) + some, r))
        if self._log is not None:
            m = len(self._log)
            group.append(np.full(m, len(METRICS)))
            block.append(len(self.runs) * BLOCKS + np.arange(m) * BLOCKS // m)
            weight.append(np.sqrt(np.minimum(self._log.steps, STEPS_SAME).astype(np.float64)))
            whole.append(np.full(m, len(self.runs)))
        weights, of = np.concatenate(weight), np.concatenate(whole)
        sums = np.bincount(of, weights**2)
        worth = np.minimum(1.0, len(METRICS) * BLOCKS / np.maximum(sums, 1e-12))
        return Rows(np.concatenate(group), np.concatenate(block), weights * np.sqrt(worth)[of])
