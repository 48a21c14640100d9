"""Configurations of a baseline system on a cluster, each simulated once, and the throughput-latency curve of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lengthwise.schedule.simulation import Replica, Simulated
from lengthwise.schema.errors import InputError
from lengthwise.schema.schedule import FrontPoint, ScheduleRow
from lengthwise.schema.workload import Floats, Ints

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

    first_sweeps: int
    """Number of sweeps of a division that are tried first."""

    def sweeps(self) -> Sequence[Sequence[Sweep]]:
        """Return by division of the cluster its sweeps, those to try first in front."""

    def max_batch(self, sweep: Sweep) -> int:
        """Return the largest batch worth trying; 0: none fits in memory."""

    def configurations(self, sweep: Sweep, batch: int) -> Sequence[Configuration]:
        """Return the configurations of a batch, at least one."""

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
    """Configurations of a system, one row each; those that do not fit have no throughput and infinite latency.

    Attributes:
        system: Name of the system.
        tp: Tensor-parallel degree.
        pp: Pipeline stages of a replica.
        replicas: Number of replicas.
        batch: Maximum sequences per replica.
        chunk: Maximum tokens per step; 0: no limit.
        throughput_rps: Requests completed per second, on all replicas.
        throughput_low_rps: Lower end of its 95 % interval.
        throughput_high_rps: Upper end.
        latency_s: Mean latency, from a request's first step to its last token, of outputs of the level's quantile.
        latency_high_s: Latency within which the level's share of these outputs is done; of batches that run to
            completion: for outputs of the task's maximum length.
        fits: Whether the configuration fits in memory.
        parts: Micro-batches of prompts.
        first_s: Time to the first token, mean.
        token_s: Time between tokens, mean.
        residents: Sequences on a replica, mean.
        memory_share: Memory needs of the fullest GPU over its usable memory, mean.
        prefill_tp: Degree of replicas that only prefill, or 0; the columns above then describe those that decode.
        prefill_pp: Pipeline stages of a replica that only prefills.
        prefill_replicas: Number of replicas that only prefill.
    """

    system: str
    tp: Ints
    pp: Ints
    replicas: Ints
    batch: Ints
    chunk: Ints
    throughput_rps: Floats
    throughput_low_rps: Floats
    throughput_high_rps: Floats
    latency_s: Floats
    latency_high_s: Floats
    fits: npt.NDArray[np.bool_]
    parts: Ints
    first_s: Floats
    token_s: Floats
    residents: Floats
    memory_share: Floats
    prefill_tp: Ints
    prefill_pp: Ints
    prefill_replicas: Ints

    @property
    def configurations(self) -> int:
        """Return the number of configurations."""
        return len(self.batch)

    def best(self, bound_s: float, *, worst_case: bool = True) -> ScheduleRow | None:
        """Return the configuration of the highest throughput that meets a bound; None: none does.

        The bound applies to ``latency_high_s`` if ``worst_case``, else to ``latency_s``.

        Raises:
            InputError: The bound is not above 0.
        """
        at = self.best_at(bound_s, worst_case=worst_case)
        return None if at is None else self.row(at)

    def best_at(self, bound_s: float, *, worst_case: bool = True) -> int | None:
        """Return the index of the best configuration; None: none meets the bound."""
        if not bound_s > 0:
            raise InputError(f"a latency bound must be above 0 seconds; it is {bound_s}")
        latency_s = self.latency_high_s if worst_case else self.latency_s
        good = np.flatnonzero(self.fits & (latency_s <= bound_s))
        return int(good[np.argmax(self.throughput_rps[good])]) if len(good) else None

    def front(self, *, worst_case: bool = True) -> tuple[FrontPoint, ...]:
        """Return the configurations that no other beats in both throughput and latency, by latency."""
        latency_s = self.latency_high_s if worst_case else self.latency_s
        found, best_rps = [], 0.0
        for at in np.lexsort((-self.throughput_rps, latency_s)).tolist():
            if self.fits[at] and self.throughput_rps[at] > best_rps:
                best_rps = float(self.throughput_rps[at])
                found.append(FrontPoint(float(latency_s[at]), self.row(at)))
        return tuple(found)

    def row(self, at: int) -> ScheduleRow:
        """Return one configuration as a schedule."""
        tp, pp, replicas = int(self.tp[at]), int(self.pp[at]), int(self.replicas[at])
        prefill = int(self.prefill_tp[at]), int(self.prefill_pp[at]), int(self.prefill_replicas[at])
        return ScheduleRow(
            strategy=self.system,
            prefill_batch=int(self.batch[at]),
            decode_steps=0,
            micro_batches=int(self.parts[at]),
            tp=tp,
            tp_groups=pp if tp > 1 else 0,
            encode_gpus=math.prod(prefill) or tp * pp * replicas,
            throughput_rps=float(self.throughput_rps[at]),
            latency_s=float(self.latency_s[at]),
            latency_high_s=float(self.latency_high_s[at]),
            cycle_s=math.nan,
            encode_s=float(self.first_s[at]),
            decode_s=float(self.token_s[at]),
            decode_batch=float(self.residents[at]),
            memory_share=float(self.memory_share[at]),
            stages=pp,
            replicas=replicas,
            chunk_tokens=int(self.chunk[at]),
            prefill_cut=prefill if all(prefill) else None,
        )


_INFEASIBLE = Simulated(0.0, 0.0, 0.0, math.inf, math.inf, math.nan, math.nan, 0.0, 0.0)


def curve_of(system: str, outcomes: dict[Configuration, Outcome]) -> Curve:
    """Return configurations and their results as columns."""
    sweeps = [(one, one.sweep, one.sweep.prefill) for one in outcomes]
    results = [outcome.simulated or _INFEASIBLE for outcome in outcomes.values()]

    def ints(values: Any) -> Ints:
        return np.array(list(values), dtype=np.int64)

    def floats(name: str) -> Floats:
        return np.array([getattr(result, name) for result in results], dtype=np.float64)

    return Curve(
        system=system,
        tp=ints(sweep.replica.tp for _, sweep, _ in sweeps),
        pp=ints(sweep.replica.pp for _, sweep, _ in sweeps),
        replicas=ints(sweep.replica.replicas - one.prefills for one, sweep, _ in sweeps),
        batch=ints(one.batch for one in outcomes),
        chunk=ints(sweep.budget for _, sweep, _ in sweeps),
        throughput_rps=floats("throughput_rps"),
        throughput_low_rps=floats("low_rps"),
        throughput_high_rps=floats("high_rps"),
        latency_s=floats("latency_s"),
        latency_high_s=floats("latency_high_s"),
        fits=np.array([outcome.simulated is not None for outcome in outcomes.values()], dtype=np.bool_),
        parts=ints(sweep.parts for _, sweep, _ in sweeps),
        first_s=floats("first_s"),
        token_s=floats("token_s"),
        residents=floats("residents"),
        memory_share=np.array([outcome.memory_share for outcome in outcomes.values()], dtype=np.float64),
        prefill_tp=ints(prefill.tp if prefill else 0 for _, _, prefill in sweeps),
        prefill_pp=ints(prefill.pp if prefill else 0 for _, _, prefill in sweeps),
        prefill_replicas=ints(one.prefills for one in outcomes),
    )
