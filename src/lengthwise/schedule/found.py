"""What a search for a schedule comes to."""

from __future__ import annotations

from dataclasses import dataclass

from lengthwise.schedule.variables import Place


@dataclass(frozen=True)
class Reached:
    """A point, by the variables' values, and what it yields."""

    point: Place
    latency_s: float
    throughput_rps: float


@dataclass(frozen=True)
class Block:
    """All points from one corner to another, and what became of them.

    Attributes:
        lowest: The corner of the least latency and throughput.
        highest: The corner of the greatest.
        fate: "split"; "too slow": none of them meets the bound; "no better": none is better than what was
            found; "done": both corners are all there is.
    """

    lowest: Place
    highest: Place
    fate: str


@dataclass(frozen=True)
class Found:
    """The point of the highest throughput found that meets the bound, and how sure that is.

    Attributes:
        best: The point; of equal throughput the least latency, then the least effect, first variable first.
            None: nothing evaluated meets the bound.
        fastest: The point of the least latency that was evaluated, whether it meets the bound or not; its
            latency is infinite where none of them can run.
        evaluated: Points evaluated, each once.
        of: Points there are.
        calls: Calls of the performance function.
        gap: The best of all points has at most (1 + gap) times the throughput of ``best``, if the tolerances
            hold. Infinite where nothing is known.
        trace: The first blocks, as many as were asked for.
    """

    best: Reached | None
    fastest: Reached
    evaluated: int
    of: int
    calls: int
    gap: float
    trace: tuple[Block, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether nothing is better than ``best``, or nothing meets the bound, if the tolerances hold."""
        return self.gap == 0.0

    @property
    def share(self) -> float:
        """The share of the points that was evaluated."""
        return self.evaluated / self.of


__all__ = ["Block", "Found", "Reached"]
