"""What length-aware scheduling is worth: policies and predictors over loads and batch sizes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lengthwise.schema.estimate import UNKNOWN, Estimate

FCFS, ORACLE = "fcfs", "oracle"
"""The two ends of the gap: first come first served, and the shortest first with lengths known."""

ONE_SEED, NOT_COMPARED = "one seed", "not compared"
"""Reasons of a verdict that is neither yes nor no."""


class LoadUnit(StrEnum):
    """What a load is a multiple of."""

    CAPACITY = "capacity"
    """The rate at which first come first served stays busy, measured at each batch size."""
    ALONE = "isolated"
    """Batch size / mean time of a request that is alone (ELIS, section 6.2)."""
    RPS = "rps"
    """Requests a second, as given."""

    def text(self, load: float) -> str:
        """A load as people read it: "90 % of capacity", "3x the average rate", "2.5 requests/s"."""
        if self is LoadUnit.CAPACITY:
            return f"{100 * load:g} % of capacity"
        return f"{load:g}x the average rate" if self is LoadUnit.ALONE else f"{load:g} requests/s"


@dataclass(frozen=True)
class Cell:
    """One policy with one predictor under one load and batch size, over all seeds.

    ``values`` maps metrics to estimates. Of the runs themselves: "jct.mean", "jct.p50", "jct.p99",
    "ttft.mean", "wait.mean", "wait.max" (time in queues in all, after evictions, too) in seconds,
    "slowdown.mean", "slowdown.p99" (JCT over the JCT of the same request alone), "requests_per_s",
    "preemptions_per_request", "recomputed_tokens_per_request", "waiting_share" (of the JCT),
    "found_full" (share of requests that find every seat taken) and "served" (share of requests).
    Against the same requests under others, paired by seed: "gap_closed" (share of the gap in mean JCT
    between FCFS and the oracle), "jct.mean/fcfs", "jct.p50/fcfs", "jct.p99/fcfs", "jct.mean/oracle",
    "jct.p50/oracle", "jct.p99/oracle".

    Attributes:
        predictor: Whose predictions it read; "" where it reads none.
        load: In the table's unit.
        rate_rps: The same in requests a second.
    """

    policy: str
    predictor: str
    batch: int
    load: float
    rate_rps: float
    values: dict[str, Estimate]

    def __getitem__(self, metric: str) -> Estimate:
        """A metric's estimate; unknown where it was not measured."""
        return self.values.get(metric, UNKNOWN)

    @property
    def name(self) -> str:
        """Policy and predictor."""
        return f"{self.policy} ({self.predictor})" if self.predictor else self.policy


@dataclass(frozen=True)
class Verdict:
    """Whether length-aware scheduling is worth it at one load and batch size.

    ``reason`` is short and the same for all that end alike: "worth it", "no queue", "lengths alike",
    "no gain", "the tail pays", "one seed" (it seems so, but there is no interval) or "not compared" (other
    requests were served). ``best`` names the cell that was judged; "" where there was none.
    """

    batch: int
    load: float
    is_improvement: bool
    reason: str
    best: str
    description: str

    @property
    def head(self) -> str:
        """The answer in two or three words."""
        if self.is_improvement:
            return "Worth it"
        return {ONE_SEED: "Not sure", NOT_COMPARED: "Cannot be compared"}.get(self.reason, "Not worth it")


@dataclass(frozen=True)
class LabTable:
    """The laboratory's answer.

    Attributes:
        cells: Every policy, predictor, load and batch size; FCFS and the oracle among them.
    """

    name: str
    metadata: dict[str, str]
    unit: LoadUnit
    cells: tuple[Cell, ...]
    decisions: tuple[Verdict, ...]
    answer: tuple[str, ...]
    seeds: int
    requests: int
    level: float = 0.95

    @property
    def batches(self) -> list[int]:
        """The batch sizes."""
        return list(dict.fromkeys(cell.batch for cell in self.cells))

    @property
    def loads(self) -> list[float]:
        """The loads."""
        return list(dict.fromkeys(cell.load for cell in self.cells))

    def at(self, batch: int, load: float) -> list[Cell]:
        """The cells of one batch size and load."""
        return [cell for cell in self.cells if (cell.batch, cell.load) == (batch, load)]
