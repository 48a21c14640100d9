"""Configurations of a baseline system on a cluster, each simulated once, and the throughput-latency curve of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lengthwise.schedule.simulation import Replica, Simulated
from lengthwise.schema.errors import InputError
from lengthwise.schema.schedule import FrontPoint, ScheduleRow

MAX_BATCH = 4096
"""Largest number of sequences per replica."""
_MIN_RISE, _PATIENCE = 1.005, 2


@dataclass(frozen=True)
class Sweep:
    """Configurations that differ only in the batch: a division of the cluster, a token budget, prompt micro-batches.

    ``prefill`` divides the replicas that only prefill; None: all replicas do both.
    """

    replica: Replica
    budget: int
    parts: int
    prefill: Replica | None = None


@dataclass(frozen=True)
class Configuration:
    """A sweep, a batch, and the number of replicas that only prefill."""

    sweep: Sweep
    batch: int
    prefills: int = 0


@dataclass(frozen=True)
class Outcome:
    """Results of a configuration on all replicas; ``simulated`` None: it does not fit in memory."""

    simulated: Simulated | None
    memory_share: float = math.nan


class SystemSimulator(Protocol):
    """Simulates one kind of system."""

    first_sweeps: int = 1
    """Number of sweeps of a division that are tried first."""

    def sweeps(self) -> Sequence[Sequence[Sweep]]:
        """Return by division of the cluster its sweeps, those to try first in front."""

    def max_batch(self, sweep: Sweep) -> int:
        """Return the largest batch worth trying; 0: none fits in memory."""

    def configurations(self, sweep: Sweep, batch: int) -> Sequence[Configuration]:
        """Return the configurations of a batch, at least one."""
        return [Configuration(sweep, batch)]

    def simulate(self, configuration: Configuration) -> Outcome:
        """Return the results of a configuration."""


class ConfigurationSearch:
    """Simulates configurations of a system, each once, and calls ``report`` after each."""

    def __init__(self, system: SystemSimulator, report: Callable[[], None] = lambda: None) -> None:
        self.system, self._report = system, report
        self._divisions = system.sweeps()
        self.outcomes: dict[Configuration, Outcome] = {}

    def sweeps(self, *, first: bool) -> list[Sweep]:
        """Return all sweeps, or only those of every division to try first."""
        most = self.system.first_sweeps if first else None
        return [sweep for division in self._divisions for sweep in division[:most]]

    def siblings(self, of: Sweep) -> list[Sweep]:
        """Return the other sweeps of the same division."""
        return [sweep for division in self._divisions if of in division for sweep in division if sweep != of]

    def run(self, sweep: Sweep, batches: Sequence[int], *, complete: bool = False) -> None:
        """Try batches from small to large while throughput rises; ``complete``: all of them."""
        best_rps, since_rise = 0.0, 0
        for batch in batches or [1]:
            rps = max(self._throughput_rps(one) for one in self.system.configurations(sweep, batch))
            since_rise = 0 if rps > best_rps * _MIN_RISE else since_rise + 1
            best_rps = max(best_rps, rps)
            if since_rise >= _PATIENCE and not complete:
                return

    def near_best(self, share: float) -> list[Configuration]:
        """Return configurations with at least 1 - ``share`` of the best throughput at their latency."""
        feasible = [(one, outcome.simulated) for one, outcome in self.outcomes.items() if outcome.simulated]
        feasible.sort(key=lambda pair: pair[1].latency_high_s)
        found, best_rps = [], 0.0
        for configuration, simulated in feasible:
            best_rps = max(best_rps, simulated.throughput_rps)
            if simulated.throughput_rps >= best_rps * (1 - share):
                found.append(configuration)
        return found

    def _throughput_rps(self, configuration: Configuration) -> float:
        if configuration not in self.outcomes:
            self.outcomes[configuration] = self.system.simulate(configuration)
            self._report()
        simulated = self.outcomes[configuration].simulated
        return simulated.throughput_rps if simulated else 0.0


@dataclass(frozen=True, eq=False)
class Curve:
    """Configurations of a system as schedules; those that do not fit have no throughput and infinite latency.

    ``latency_s`` of a row is the mean from a request's first step to its last token, of outputs of the level's
    quantile. ``latency_high_s`` is the latency within which the level's share of these outputs is done; of batches that
    run to completion: for outputs of the task's maximum length. ``encode_s`` is the mean time to the first token,
    ``decode_s`` that between tokens; ``decode_batch`` and ``memory_share`` are means.

    Attributes:
        rows: A schedule per configuration.
        intervals_rps: The 95 % interval of the throughput of each.
    """

    rows: tuple[ScheduleRow, ...]
    intervals_rps: tuple[tuple[float, float], ...]

    def best(self, bound_s: float, *, worst_case: bool = True) -> ScheduleRow | None:
        """Return the configuration of the highest throughput that meets a bound; None: none does.

        The bound applies to ``latency_high_s`` if ``worst_case``, else to ``latency_s``.

        Raises:
            InputError: The bound is not above 0.
        """
        at = self.best_at(bound_s, worst_case=worst_case)
        return None if at is None else self.rows[at]

    def best_at(self, bound_s: float, *, worst_case: bool = True) -> int | None:
        """Return the index of the best configuration; None: none meets the bound."""
        if not bound_s > 0:
            raise InputError(f"a latency bound must be above 0 seconds; it is {bound_s}")
        latency_s = self._latency_s(worst_case=worst_case)
        good = [at for at, seconds in enumerate(latency_s) if math.isfinite(seconds) and seconds <= bound_s]
        return max(good, key=lambda at: self.rows[at].throughput_rps, default=None)

    def front(self, *, worst_case: bool = True) -> tuple[FrontPoint, ...]:
        """Return the configurations that no other beats in both throughput and latency, by latency."""
        found, best_rps = [], 0.0
        pairs = zip(self._latency_s(worst_case=worst_case), self.rows, strict=True)
        for seconds, row in sorted(pairs, key=lambda pair: (pair[0], -pair[1].throughput_rps)):
            if row.throughput_rps > best_rps:
                best_rps = row.throughput_rps
                found.append(FrontPoint(seconds, row))
        return tuple(found)

    def _latency_s(self, *, worst_case: bool) -> list[float]:
        return [row.latency_high_s if worst_case else row.latency_s for row in self.rows]


_INFEASIBLE = Simulated(0.0, 0.0, 0.0, math.inf, math.inf, math.nan, math.nan, 0.0, 0.0)


def curve_of(system: str, outcomes: dict[Configuration, Outcome]) -> Curve:
    """Return configurations and their results as schedules."""
    rows, intervals_rps = [], []
    for one, outcome in outcomes.items():
        got, of, prefill = outcome.simulated or _INFEASIBLE, one.sweep.replica, one.sweep.prefill
        cut = (prefill.tp, prefill.pp, one.prefills) if prefill else None
        replicas = of.replicas - one.prefills
        row = ScheduleRow(
            strategy=system,
            prefill_batch=one.batch,
            decode_steps=0,
            micro_batches=one.sweep.parts,
            tp=of.tp,
            tp_groups=of.pp if of.tp > 1 else 0,
            encode_gpus=math.prod(cut) if cut else of.tp * of.pp * replicas,
            throughput_rps=got.throughput_rps,
            latency_s=got.latency_s,
            latency_high_s=got.latency_high_s,
            cycle_s=math.nan,
            encode_s=got.first_s,
            decode_s=got.token_s,
            decode_batch=got.residents,
            memory_share=outcome.memory_share,
            stages=of.pp,
            replicas=replicas,
            chunk_tokens=one.sweep.budget,
            prefill_cut=cut,
        )
        rows.append(row)
        intervals_rps.append((got.low_rps, got.high_rps))
    return Curve(tuple(rows), tuple(intervals_rps))
