"""The configurations of a system on a cluster, each played out once, and which of them are near the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lengthwise.schedule.simulation import Replica, Simulated
from lengthwise.schema.errors import InputError
from lengthwise.schema.schedule import FrontPoint, ScheduleRow

LARGEST_BATCH = 4096
"""Sequences on a replica that are tried at most."""
_FLAT, _PATIENCE = 1.005, 2


@dataclass(frozen=True)
class Line:
    """Configurations that differ in the batch alone: a cut of the cluster, a budget, micro-batches of prompts.

    ``prefill``: how those of the replicas are cut that only prefill; None: all of them do both.
    """

    replica: Replica
    budget: int
    parts: int
    prefill: Replica | None = None


@dataclass(frozen=True)
class Configuration:
    """A line, a batch, and how many of the replicas only prefill."""

    line: Line
    batch: int
    prefills: int = 0


@dataclass(frozen=True)
class Row:
    """What a configuration yields on all replicas; ``played`` None: memory does not hold it."""

    simulated: Simulated | None
    memory_share: float = math.nan

    @property
    def columns(self) -> dict[str, float]:
        """The columns of a curve that are not the configuration's."""
        played = self.simulated or _EMPTY
        return {
            "throughput_rps": played.throughput_rps,
            "throughput_low_rps": played.low_rps,
            "throughput_high_rps": played.high_rps,
            "latency_s": played.latency_s,
            "latency_high_s": played.latency_high_s,
            "fits": self.simulated is not None,
            "first_s": played.first_s,
            "token_s": played.token_s,
            "residents": played.residents,
            "memory_share": self.memory_share,
        }


_EMPTY = Simulated(0.0, 0.0, 0.0, math.inf, math.inf, math.nan, math.nan, 0.0, 0.0)


def times(simulated: Simulated, replicas: int) -> Simulated:
    """What so many replicas yield, each of which is the same."""
    rates = {name: getattr(simulated, name) * replicas for name in ("throughput_rps", "low_rps", "high_rps")}
    return replace(simulated, **rates)


class Player(Protocol):
    """How one kind of system is played out."""

    def cuts(self) -> Sequence[Sequence[Line]]:
        """By cut of the cluster its lines, those that are looked at first in front."""

    @property
    def first(self) -> int:
        """How many lines of a cut are looked at first."""

    def most(self, line: Line) -> int:
        """The largest batch worth a try; 0: memory holds none."""

    def each(self, line: Line, batch: int) -> Sequence[Configuration]:
        """The configurations of a batch, one or more."""

    def play(self, at: Configuration) -> Row:
        """What one yields."""


class Configurations:
    """What was tried of a system so far; ``report`` of each when it was played out."""

    def __init__(self, player: Player, report: Callable[[], None] = lambda: None) -> None:
        self._player, self._report = player, report
        self._cuts = player.cuts()
        self._rows: dict[Configuration, Row] = {}

    @property
    def rows(self) -> list[tuple[Configuration, Row]]:
        """All that were tried."""
        return list(self._rows.items())

    def lines(self, *, every: bool) -> list[Line]:
        """All lines, or those of every cut that are looked at first."""
        return [line for cut in self._cuts for line in cut[: None if every else self._player.first]]

    def siblings(self, of: Line) -> list[Line]:
        """The other lines of the same cut."""
        return [line for cut in self._cuts if of in cut for line in cut if line != of]

    def most(self, line: Line) -> int:
        """The largest batch worth a try; 0: memory holds none."""
        return self._player.most(line)

    def go(self, line: Line, batches: Sequence[int], *, complete: bool = False) -> None:
        """Tries batches from small to large, as long as throughput rises; ``complete``: all of them."""
        best_rps, waited = 0.0, 0
        for batch in batches or [1]:
            got_rps = max(self._attempted(at) for at in self._player.each(line, batch))
            waited = 0 if got_rps > best_rps * _FLAT else waited + 1
            best_rps = max(best_rps, got_rps)
            if waited >= _PATIENCE and not complete:
                return

    def near(self, share: float) -> list[Configuration]:
        """Configurations that have at least 1 - ``share`` of the best throughput at their latency."""
        some = [(at, row.simulated) for at, row in self._rows.items() if row.simulated]
        some.sort(key=lambda one: one[1].latency_high_s)
        found, best_rps = [], 0.0
        for at, played in some:
            best_rps = max(best_rps, played.throughput_rps)
            if played.throughput_rps >= best_rps * (1 - share):
                found.append(at)
        return found

    def _attempted(self, at: Configuration) -> float:
        if at not in self._rows:
            self._rows[at] = self._player.play(at)
            self._report()
        played = self._rows[at].simulated
        return played.throughput_rps if played else 0.0


Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Curve:
    """A system's configurations, a row each. What does not fit has no throughput and infinite latency.

    Attributes:
        system: Whose.
        tp: Tensor-parallel degree.
        pp: Pipeline stages of a replica.
        replicas: Of it.
        batch: Sequences resident on a replica at most.
        chunk: Tokens of a step at most; 0: no limit.
        throughput_rps: Requests that complete a second, on all replicas.
        throughput_low_rps: Lower end of its 95 % interval.
        throughput_high_rps: Upper end.
        latency_s: From when a request is first put into a step to its last token, for an output of the level's
            quantile, mean.
        latency_high_s: Within which the same share of these outputs is done. Where nobody leaves a batch: for
            outputs as long as the task's longest.
        fits: Whether memory holds it.
        parts: Micro-batches of prompts.
        first_s: To the first token, mean.
        token_s: Between tokens, mean.
        residents: Sequences on a replica, mean.
        memory_share: What the fullest GPU needs over what it has, mean.
        prefill_tp: Of replicas that only prefill, where there are some; the columns above are then of those that only
            decode.
        prefill_pp: Likewise.
        prefill_replicas: Likewise.
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
        """How many there are."""
        return len(self.batch)

    def best(self, bound_s: float, *, worst_case: bool = True) -> ScheduleRow | None:
        """The configuration of the highest throughput that meets a bound; None: none does.

        Args:
            bound_s: Latency; infinite: any.
            worst_case: Whether it is held against ``latency_high_s``, else against ``latency_s``.

        Raises:
            InputError: The bound is not above 0.
        """
        at = self.best_at(bound_s, worst_case=worst_case)
        return None if at is None else self.row(at)

    def best_at(self, bound_s: float, *, worst_case: bool = True) -> int | None:
        """Where the best configuration stands; None: none meets the bound."""
        if not bound_s > 0:
            raise InputError(f"a latency bound must be above 0 seconds; it is {bound_s}")
        good = np.flatnonzero(self.fits & (self._held_s(worst_case=worst_case) <= bound_s))
        return int(good[np.argmax(self.throughput_rps[good])]) if len(good) else None

    def front(self, *, worst_case: bool = True) -> tuple[FrontPoint, ...]:
        """The configurations that none beats in both throughput and latency, from the least latency on."""
        held_s = self._held_s(worst_case=worst_case)
        found, best_rps = [], 0.0
        for at in np.lexsort((-self.throughput_rps, held_s)).tolist():
            if self.fits[at] and self.throughput_rps[at] > best_rps:
                best_rps = float(self.throughput_rps[at])
                found.append(FrontPoint(float(held_s[at]), self.row(at)))
        return tuple(found)

    def row(self, at: int) -> ScheduleRow:
        """One of them as a schedule."""
        tp, pp, replicas = int(self.tp[at]), int(self.pp[at]), int(self.replicas[at])
        prefill = int(self.prefill_tp[at]), int(self.prefill_pp[at]), int(self.prefill_replicas[at])
        return ScheduleRow(
            strategy=self.system,
            encode_batch=int(self.batch[at]),
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

    def _held_s(self, *, worst_case: bool) -> Floats:
        return self.latency_high_s if worst_case else self.latency_s


def curve_of(system: str, rows: Sequence[tuple[Configuration, Row]]) -> Curve:
    """The rows as columns."""
    told = [_cells(at, row) for at, row in rows]
    columns: dict[str, Any] = {
        name: np.array([cells[name] for cells in told], dtype=_INTEGERS.get(name, np.float64)) for name in _NAMES
    }
    return Curve(system, **columns)


def _cells(at: Configuration, row: Row) -> dict[str, float]:
    of, apart = at.line.replica, at.line.prefill
    return row.columns | {
        "tp": of.tp,
        "pp": of.pp,
        "replicas": of.replicas - at.prefills,
        "batch": at.batch,
        "chunk": at.line.budget,
        "parts": at.line.parts,
        "prefill_tp": apart.tp if apart else 0,
        "prefill_pp": apart.pp if apart else 0,
        "prefill_replicas": at.prefills,
    }


_NAMES = tuple(field.name for field in fields(Curve) if field.name != "system")
_PREFILL = ("prefill_tp", "prefill_pp", "prefill_replicas")
_INTEGERS: dict[str, Any] = dict.fromkeys(("tp", "pp", "replicas", "batch", "chunk", "parts", *_PREFILL), np.int64)
_INTEGERS["fits"] = np.bool_
