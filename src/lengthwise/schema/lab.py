"""Results of the lab: the gain of length-aware scheduling by policy, predictor, load and batch size."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from lengthwise.schema.estimate import UNKNOWN, Estimate

FCFS, ORACLE = "fcfs", "oracle"
"""The two ends of the gap: first come first served, and shortest first with known lengths."""

ONE_SEED, UNDECIDED, NOT_COMPARED = "one seed", "undecided", "not compared"  # reasons of an undecided verdict


class LoadUnit(StrEnum):
    """The unit of a load."""

    CAPACITY = "capacity"  # a share of the rate at which FCFS saturates, which is measured at each batch size
    ALONE = "isolated"  # a multiple of the batch size divided by the mean JCT of isolated requests (ELIS, section 6.2)
    RPS = "rps"  # requests per second

    def text(self, load: float) -> str:
        """Return a load with its unit, such as "90 % of capacity", "3x the average rate" or "2.5 requests/s"."""
        if self is LoadUnit.CAPACITY:
            return f"{100 * load:g} % of capacity"
        return f"{load:g}x the average rate" if self is LoadUnit.ALONE else f"{load:g} requests/s"


@dataclass(frozen=True)
class Cell:
    """One policy with one predictor under one load and batch size, over all seeds.

    ``values`` maps metrics to estimates. Metrics of the runs are "jct.mean", "jct.p50", "jct.p99", "ttft.mean",
    "wait.mean", "wait.max" (total time in queues, also after preemptions) in seconds, "slowdown.mean", "slowdown.p99"
    (JCT relative to the same request in isolation), "requests_per_s", "preemptions_per_request",
    "recomputed_tokens_per_request", "waiting_share" (of the JCT), "found_full" (share of requests that arrive when all
    sequences are in use), "served" (share of requests), and "hit_rate" and "loaded_share" (shares of the prompt tokens
    that the prefix cache finds and that CPU memory behind it supplies, where these exist). Metrics paired by seed with
    the same requests under other policies are "gap_closed" (share of the gap in mean JCT between FCFS and the oracle),
    and "jct.mean/fcfs", "jct.p50/fcfs", "jct.p99/fcfs" and the same with "/oracle": ratios to that policy's JCT.
    """

    policy: str
    predictor: str  # "" if the policy reads no predictions
    batch: int
    load: float  # in the table's unit
    rate_rps: float  # the load in requests per second
    values: dict[str, Estimate]

    def __getitem__(self, metric: str) -> Estimate:
        """Return the estimate of a metric, or UNKNOWN if it was not measured."""
        return self.values.get(metric, UNKNOWN)

    @property
    def name(self) -> str:
        """Return the policy and the predictor as a label."""
        return f"{self.policy} ({self.predictor})" if self.predictor else self.policy


@dataclass(frozen=True)
class Verdict:
    """The answer to whether length-aware scheduling is worth it at one load and batch size."""

    batch: int
    load: float
    is_improvement: bool
    # "worth it", "no queue", "lengths alike", "no gain", "the tail pays", "one seed" (a gain without an interval),
    # "undecided" (the interval contains both no gain and a large gain, or the run is too short for a queue) or "not
    # compared" (the policies did not serve the same requests).
    reason: str
    best: str  # ``Cell.name`` of the policy that the verdict is about; "": none
    description: str  # the reason in one or two sentences

    @property
    def head(self) -> str:
        """Return the verdict in a few words: "Worth it", "Not worth it", "Not sure" or "Cannot be compared"."""
        if self.is_improvement:
            return "Worth it"
        unsure = {ONE_SEED: "Not sure", UNDECIDED: "Not sure", NOT_COMPARED: "Cannot be compared"}
        return unsure.get(self.reason, "Not worth it")


@dataclass(frozen=True)
class LabTable:
    """All results of a lab. ``cells`` has every combination of policy, predictor, load and batch size."""

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
        """Return the batch sizes."""
        return list(dict.fromkeys(cell.batch for cell in self.cells))

    @property
    def loads(self) -> list[float]:
        """Return the loads."""
        return list(dict.fromkeys(cell.load for cell in self.cells))

    def at(self, batch: int, load: float) -> list[Cell]:
        """Return the cells of one batch size and load."""
        return [cell for cell in self.cells if (cell.batch, cell.load) == (batch, load)]
