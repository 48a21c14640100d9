"""The configurations of a system on a cluster, each played out once, and which of them are near the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from lengthwise.schedule._replica import Replica
from lengthwise.schedule._saturated import Played

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

    played: Played | None
    memory_share: float = math.nan

    @property
    def columns(self) -> dict[str, float]:
        """The columns of a curve that are not the configuration's."""
        played = self.played or _NOTHING
        return {
            "throughput_rps": played.throughput_rps,
            "throughput_low_rps": played.low_rps,
            "throughput_high_rps": played.high_rps,
            "latency_s": played.latency_s,
            "latency_high_s": played.latency_high_s,
            "fits": self.played is not None,
            "first_s": played.first_s,
            "token_s": played.token_s,
            "residents": played.residents,
            "memory_share": self.memory_share,
        }


_NOTHING = Played(0.0, 0.0, 0.0, math.inf, math.inf, math.nan, math.nan, 0.0, 0.0)


def times(played: Played, replicas: int) -> Played:
    """What so many replicas yield, each of which is the same."""
    rates = {name: getattr(played, name) * replicas for name in ("throughput_rps", "low_rps", "high_rps")}
    return replace(played, **rates)


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
    """What was tried of a system so far; ``told`` of each when it was played out."""

    def __init__(self, player: Player, told: Callable[[], None] = lambda: None) -> None:
        self._player, self._told = player, told
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

    def go(self, line: Line, batches: Sequence[int], *, whole: bool = False) -> None:
        """Tries batches from small to large, as long as throughput rises; ``whole``: all of them."""
        best_rps, waited = 0.0, 0
        for batch in batches or [1]:
            got_rps = max(self._tried(at) for at in self._player.each(line, batch))
            waited = 0 if got_rps > best_rps * _FLAT else waited + 1
            best_rps = max(best_rps, got_rps)
            if waited >= _PATIENCE and not whole:
                return

    def near(self, share: float) -> list[Configuration]:
        """Configurations that have at least 1 - ``share`` of the best throughput at their latency."""
        some = [(at, row.played) for at, row in self._rows.items() if row.played]
        some.sort(key=lambda one: one[1].latency_high_s)
        found, best_rps = [], 0.0
        for at, played in some:
            best_rps = max(best_rps, played.throughput_rps)
            if played.throughput_rps >= best_rps * (1 - share):
                found.append(at)
        return found

    def _tried(self, at: Configuration) -> float:
        if at not in self._rows:
            self._rows[at] = self._player.play(at)
            self._told()
        played = self._rows[at].played
        return played.throughput_rps if played else 0.0


__all__ = ["LARGEST_BATCH", "Configuration", "Configurations", "Line", "Player", "Row", "times"]
