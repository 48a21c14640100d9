"""A question as people ask it: what an order of service is worth at each load."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lengthwise.theory import boundaries, queues
from lengthwise.theory.queues import Sojourn
from lengthwise.theory.service import Floats, ServiceTimes

SIGMAS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
"""Errors of a predictor: standard deviations of ln(predicted / true)."""


@dataclass(frozen=True, eq=False)
class QueueStudy:
    """Mean sojourn times by load and by what is known.

    Attributes:
        slots: Requests that a replica serves at a time.
        mean_s: Mean service time.
        loads: [m] shares of the time that a slot is busy.
        orders: For each order of service its sojourn at each load.
        sigmas: [s] errors of the predictor (standard deviation of ln(predicted / true)).
        kept: For each load [s] the share of the gap from FCFS to SRPT that SPRPT keeps at that error.
        kept_unpreempted: The same for SPJF.
        facts: What was asked, for people.
    """

    slots: int
    mean_s: float
    loads: Floats
    orders: Mapping[str, Sequence[Sojourn]]
    sigmas: Floats
    kept: Mapping[float, Floats]
    kept_unpreempted: Mapping[float, Floats]
    facts: Sequence[str] = field(default_factory=tuple)


ORDERS: dict[str, str] = {
    "fcfs": "FCFS",
    "sjf": "SJF, known sizes",
    "srpt": "SRPT, known sizes",
    "spjf": "SJF, predicted",
    "sprpt": "SRPT, predicted",
}


def queue_study(
    times: ServiceTimes,
    loads: Sequence[float],
    *,
    sigma: float = 0.5,
    slots: int = 1,
    sigmas: Sequence[float] = SIGMAS,
    pairs: tuple[Floats, Floats] | None = None,
    seed: int = 0,
    facts: Sequence[str] = (),
) -> QueueStudy:
    """What knowing sizes, or guessing them with an error, is worth at each load.

    Args:
        times: Service times in a slot.
        loads: Shares of the time that a slot is busy, each between 0 and 1.
        sigma: Error of the predictor; see ``queues.with_error``.
        slots: Requests served at a time; see ``queues`` for what is left out.
        sigmas: Errors of the curve of what is kept.
        pairs: (true, predicted) sizes of a real predictor, instead of ``sigma``.
        seed: Of the errors' order.
        facts: Passed on.
    """
    boundaries.checked_count("slots", slots)
    own = queues.with_error(times, sigma, np.random.default_rng(seed)) if pairs is None else pairs
    noisy = {float(s): queues.with_error(times, float(s), np.random.default_rng(seed)) for s in sigmas}
    kept, unpreempted = dict[float, Floats](), dict[float, Floats]()
    rates = {float(load): load * slots / times.mean_s for load in loads}
    ways: dict[str, Callable[[float], Sojourn]] = {
        "fcfs": lambda rate: queues.fcfs(times, rate, slots),
        "sjf": lambda rate: queues.sjf(times, rate, slots),
        "srpt": lambda rate: queues.srpt(times, rate, slots),
        "spjf": lambda rate: queues.spjf(*own, rate, slots),
        "sprpt": lambda rate: queues.sprpt(*own, rate, slots),
    }
    orders = {name: [way(rate) for rate in rates.values()] for name, way in ways.items()}
    for i, (load, rate) in enumerate(rates.items()):
        blind, best = orders["fcfs"][i], orders["srpt"][i]
        preempted = [queues.sprpt(*pair, rate, slots) for pair in noisy.values()]
        kept[load] = np.array([queues.share_kept(blind, one, best) for one in preempted])
        waiting = [queues.spjf(*pair, rate, slots) for pair in noisy.values()]
        unpreempted[load] = np.array([queues.share_kept(blind, one, best) for one in waiting])
    return QueueStudy(
        slots,
        times.mean_s,
        np.array(list(rates)),
        orders,
        np.array(sigmas, float),
        kept,
        unpreempted,
        tuple(facts),
    )
