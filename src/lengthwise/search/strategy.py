"""How a search chooses what to evaluate next: a wave is asked for, its results are told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

C = TypeVar("C")


class Strategy(Protocol[C]):
    """What to evaluate next, for candidates of one kind.

    A strategy draws nothing from outside and does not know who evaluates: the same results bring the same
    waves, whatever the number of workers and the order in which they came.
    """

    def ask(self) -> list[C]:
        """The candidates to evaluate now, none of them twice; empty: the search is at its end."""
        ...

    def tell(self, results: Sequence[tuple[C, float | None]]) -> None:
        """What came of candidates that were asked for: a score, the more the better, or None: infeasible."""
        ...
