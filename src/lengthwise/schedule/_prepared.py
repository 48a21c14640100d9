"""What all schedules of one task on one cluster share: tables, sizes, and shares of phases, each made once."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from lengthwise.schedule._reading import DegreeTables
from lengthwise.schedule._resizing import UNCHANGED, Resized, resized
from lengthwise.schedule.controls import Assumptions, Cluster
from lengthwise.schedule.layout import Stage
from lengthwise.schedule.lengths import TaskLengths
from lengthwise.schedule.memory import Shares, shares_of, usable_bytes
from lengthwise.schedule.rra import PhaseShares, phase_shares
from lengthwise.schedule.stage_seconds import DegreesTables, degree_tables
from lengthwise.schema.model import ModelSpec

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Setting:
    """A task on a cluster, and what was worked out for it so far."""

    task: TaskLengths
    cluster: Cluster
    model: ModelSpec
    tables: DegreesTables
    assumptions: Assumptions
    _packed: dict[int, DegreeTables] = field(default_factory=dict)
    _sizes: dict[int, Shares] = field(default_factory=dict)
    _phases: dict[int, PhaseShares] = field(default_factory=dict)
    _usable: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.task.require_within(self.model)

    @cached_property
    def z(self) -> float:
        """Standard deviations from the mean to the level."""
        return NormalDist().inv_cdf(self.assumptions.level)

    @cached_property
    def resized(self) -> Resized:
        """What dynamic adjustment makes of encodings."""
        threshold = self.assumptions.threshold
        return UNCHANGED if threshold is None else resized(self.task, threshold, self.assumptions.level)

    @cached_property
    def bound_tokens(self) -> int:
        """The output whose latency is asked for: the level's quantile, or of fixed length."""
        fixed = self.assumptions.output_tokens
        return self.task.output_quantile(self.assumptions.level) if fixed is None else fixed

    @cached_property
    def iterations(self) -> int:
        """Decode iterations of such a request."""
        return max(self.bound_tokens - self.assumptions.from_encode, 0)

    @property
    def usable_bytes(self) -> float:
        """Of a GPU."""
        if not self._usable:
            self._usable.append(usable_bytes(self.model, self.cluster))
        return self._usable[0]

    def packed(self, tp: int) -> DegreeTables:
        """The tables of a degree."""
        if tp not in self._packed:
            self._packed.update(degree_tables(self.tables, self.task, [tp]))
        return self._packed[tp]

    def sizes(self, stages: tuple[Stage, ...]) -> dict[int, Shares]:
        """What a GPU holds at each of the stages' degrees."""
        for tp in {stage.tp for stage in stages} - set(self._sizes):
            self._sizes[tp] = shares_of(self.model, self.cluster, tp)
        return self._sizes

    def phase(self, steps: int, *, renewal: bool = False) -> PhaseShares:
        """Shares of phases of so many steps; ``renewal`` whatever the assumptions say (WAA)."""
        key = -steps if renewal else steps
        if key not in self._phases:
            paper = self.assumptions.paper_completions and not renewal
            self._phases[key] = phase_shares(self.task, steps, self.assumptions.from_encode, paper=paper)
        return self._phases[key]

    def prompt_tokens_high(self, seqs: Floats) -> Floats:
        """[n] prompt tokens of ``seqs`` requests at the level."""
        spread = self.z * np.sqrt(seqs * self.task.prompt_variance)
        return np.asarray(
            np.minimum(seqs * self.task.mean_prompt_tokens + spread, seqs * self.task.max_prompt_tokens)
        )


def grouped(stages: tuple[Stage, ...]) -> tuple[Floats, Floats]:
    """(groups, count) as the compiled loops take them: neighbours of one kind together."""
    rows: list[list[float]] = []
    for place, stage in enumerate(stages):
        row = [1.0, stage.layers, stage.tp == 1, place == 0, place == len(stages) - 1]
        if rows and rows[-1][1:] == row[1:]:
            rows[-1][0] += 1
        else:
            rows.append(row)
    groups = np.array(rows, dtype=np.float64)
    return groups, np.ascontiguousarray(groups[:, 0])


@lru_cache(maxsize=64)
def deviations(most: int) -> Floats:
    """[most + 1, most] in row n: the smallest, ... largest of n standard normals, expected (Blom, 1958)."""
    scores = np.zeros((most + 1, most))
    for n in range(2, most + 1):
        scores[n, :n] = [NormalDist().inv_cdf((i + 0.625) / (n + 0.25)) for i in range(n)]
    return scores


__all__ = ["Setting", "deviations", "grouped"]
