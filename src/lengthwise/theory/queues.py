"""What an order of service is worth at a load: mean sojourn times of an M/G/1 queue, by what is known of sizes.

Requests arrive as a Poisson process and take independent times. FCFS knows nothing; SJF and SRPT know every
size; SPJF and SPRPT (Mitzenmacher 2019, "Scheduling with predictions and the price of misprediction") order
by predicted sizes, right or wrong.

A replica that serves ``slots`` requests at a time is not one server. It is told here as one server of
``slots`` times the speed, whose waits are scaled by Erlang's C over the load (Lee and Longton 1959: exact for
FCFS of exponential times), plus the request's own service at the speed of its slot. Left out: a step takes
longer with more sequences in the batch, prefills delay decodes, memory may hold fewer than ``slots``, and
what is preempted must be computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.theory import service
from lengthwise.theory.service import Floats, SampledTimes, ServiceTimes, checked_count

CELLS = 4096
"""A distribution is told by so many cells at most."""
PAIRS = 3000
"""So many pairs of size and prediction at most: the work grows with their square."""


@dataclass(frozen=True)
class Sojourn:
    """Expected values in the steady state.

    Attributes:
        mean_s: Time from arrival to the end.
        wait_s: The same less the service time: all waiting, interruptions included.
        slowdown: Time from arrival to the end over the service time, a mean over requests.
    """

    mean_s: float
    wait_s: float
    slowdown: float
    """Of FCFS it is infinite where sizes come near 0; of a continuous distribution it is then told by cells."""


def load_of(times: ServiceTimes, rate_rps: float, slots: int = 1) -> float:
    """The share of the time that a slot is busy, rate x mean / slots.

    Raises:
        InputError: It is 1 or more: the queue would grow without end.
    """
    checked_count("slots", slots)
    load = rate_rps * times.mean_s / slots
    if not (math.isfinite(load) and 0 < load < 1):
        raise InputError(
            f"the load (arrival rate x mean service time / slots) must lie between 0 and 1; it is {load:g}. "
            f"{slots / times.mean_s:g} requests a second would be 1"
        )
    return load


def fcfs(times: ServiceTimes, rate_rps: float, slots: int = 1) -> Sojourn:
    """First come, first served: wait = rate E[S^2] / (2 (1 - load)) (Pollaczek and Khinchine)."""
    load = load_of(times, rate_rps, slots)
    wait = rate_rps * times.second_moment / slots**2 / (2 * (1 - load))
    sizes, shares = times.cells(CELLS)
    return _sojourn(sizes, shares, np.full(len(sizes), wait), load, slots)


def processor_sharing(times: ServiceTimes, rate_rps: float) -> Sojourn:
    """One server shared by all that are there: E[S] / (1 - load), whatever the distribution.

    What a batch that never fills up comes to, where a step's time grows in proportion to the batch.
    """
    slowdown = 1 / (1 - load_of(times, rate_rps))
    return Sojourn(times.mean_s * slowdown, times.mean_s * (slowdown - 1), slowdown)


def sjf(times: ServiceTimes, rate_rps: float, slots: int = 1) -> Sojourn:
    """Shortest job first, not preempted: wait(x) = rate E[S^2] / 2 / ((1 - load of < x)(1 - load of <= x)).

    Phipps 1956; among equals first come, first served.
    """
    load = load_of(times, rate_rps, slots)
    sizes, shares = times.cells(CELLS)
    below, upto = _loads(sizes / slots, shares, rate_rps)
    wait = rate_rps * times.second_moment / slots**2 / 2 / ((1 - below) * (1 - upto))
    return _sojourn(sizes, shares, wait, load, slots)


def srpt(times: ServiceTimes, rate_rps: float, slots: int = 1) -> Sojourn:
    """Shortest remaining time first, preemptive: what perfect knowledge gives (Schrage and Miller 1966).

    With one slot nothing is better in the mean. No schedule of ``slots`` slots has a mean sojourn below
    that of one slot of ``slots`` times the speed, ``srpt`` of the times divided by ``slots``.
    """
    load = load_of(times, rate_rps, slots)
    sizes, shares = times.cells(CELLS)
    fast = sizes / slots
    below, upto = _loads(fast, shares, rate_rps)
    squares = np.cumsum(fast**2 * shares) + fast**2 * (1 - np.cumsum(shares))
    wait = rate_rps * squares / 2 / ((1 - below) * (1 - upto))
    gaps = np.diff(fast, prepend=0.0)
    interrupted = np.cumsum(gaps / (1 - below)) - fast
    return _sojourn(sizes, shares, wait + interrupted, load, slots)


def spjf(sizes_s: npt.ArrayLike, predicted_s: npt.ArrayLike, rate_rps: float, slots: int = 1) -> Sojourn:
    """Shortest predicted job first, not preempted, from pairs (true size, predicted size), each as likely.

    wait(y) = rate E[S^2] / 2 / ((1 - load predicted < y)(1 - load predicted <= y)): only the order of the
    predictions matters, not their scale.
    """
    sizes, predicted = _pairs(sizes_s, predicted_s)
    load = _load_of_sizes(sizes, rate_rps, slots)
    below, upto, _ = _predicted_loads(sizes / slots, predicted, rate_rps)
    wait = rate_rps * np.mean((sizes / slots) ** 2) / 2 / ((1 - below) * (1 - upto))
    return _sojourn(sizes, np.full(len(sizes), 1 / len(sizes)), wait, load, slots)


def sprpt(sizes_s: npt.ArrayLike, predicted_s: npt.ArrayLike, rate_rps: float, slots: int = 1) -> Sojourn:
    """Shortest predicted remaining time first, preemptive, from pairs (true size, predicted size).

    A request predicted y that was served for a has max(y - a, 0) predicted to come; one that outlives its
    prediction is not interrupted any more (Mitzenmacher 2019, Theorem for SPRPT). Predictions are in
    the unit of the sizes. More than ``PAIRS`` pairs are thinned to evenly spaced ones by prediction.
    """
    sizes, predicted = _sampled(*_pairs(sizes_s, predicted_s))
    load = _load_of_sizes(sizes, rate_rps, slots)
    fast, aim = sizes / slots, predicted / slots
    below, upto, order = _predicted_loads(fast, aim, rate_rps)
    wait = rate_rps * _squares_ahead(fast, aim) / 2 / ((1 - below) * (1 - upto))
    served = _residence(fast, aim, order, rate_rps)
    return _sojourn(sizes, np.full(len(sizes), 1 / len(sizes)), wait + served - fast, load, slots)


def with_error(
    times: ServiceTimes, sigma: float, rng: np.random.Generator, count: int = PAIRS
) -> tuple[Floats, Floats]:
    """``count`` pairs (true size, predicted size) whose logarithms differ by a normal error.

    The prediction is size x exp(sigma Z): right in the median; sigma 0 is perfect, 0.5 typically off by
    half, and with a large sigma the order says nothing. Sizes are the cells' means, in their proportions,
    and the errors are spread evenly over the normal's quantiles, in a random order.
    """
    if not (math.isfinite(sigma) and sigma >= 0):
        raise InputError(f"the error sigma must be a number of at least 0; it is {sigma:g}")
    from scipy.special import ndtri

    sizes, shares = times.cells(count)
    picked = np.searchsorted(np.cumsum(shares) - 1e-12, (np.arange(count) + 0.5) / count)
    true = sizes[np.minimum(picked, len(sizes) - 1)]
    true = true * (times.mean_s / true.mean())
    noise = rng.permutation(ndtri((np.arange(count) + 0.5) / count))
    return true, true * np.exp(sigma * noise)


def share_kept(blind: Sojourn, predicted: Sojourn, oracle: Sojourn) -> float:
    """The share of the gap in mean sojourn time from ``blind`` to ``oracle`` that predictions close."""
    gap = blind.mean_s - oracle.mean_s
    return (blind.mean_s - predicted.mean_s) / gap if gap > 1e-12 * blind.mean_s else math.nan


def erlang_c(load: float, slots: int) -> float:
    """The chance that an arrival finds all ``slots`` busy, in an M/M/slots queue."""
    checked_count("slots", slots)
    blocked = 1.0
    for busy in range(1, slots + 1):
        offered = load * slots
        blocked = offered * blocked / (busy + offered * blocked)
    return blocked / (1 - load * (1 - blocked))


def _sojourn(sizes: Floats, shares: Floats, delay_s: Floats, load: float, slots: int) -> Sojourn:
    """Delays of the fast single server as those of slots, and the slot's own service time."""
    delay = delay_s * erlang_c(load, slots) / load
    wait, mean = float(delay @ shares), float(sizes @ shares)
    return Sojourn(mean + wait, wait, float((1 + delay / sizes) @ shares))


def _loads(sizes: Floats, shares: Floats, rate_rps: float) -> tuple[Floats, Floats]:
    """The loads of what is smaller than each of the sorted, distinct sizes, and of what is at most as large."""
    upto = rate_rps * np.cumsum(sizes * shares)
    return np.concatenate(([0.0], upto[:-1])), upto


def _predicted_loads(sizes: Floats, predicted: Floats, rate_rps: float) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    """For each pair the load predicted smaller and predicted at most as large; and their order."""
    order = np.argsort(predicted, kind="stable")
    sums = np.concatenate(([0.0], np.cumsum(sizes[order]))) * rate_rps / len(sizes)
    ranked = predicted[order]
    below = sums[np.searchsorted(ranked, predicted, side="left")]
    return below, sums[np.searchsorted(ranked, predicted, side="right")], order


def _squares_ahead(sizes: Floats, predicted: Floats) -> Floats:
    """Mean squares of the work found ahead of each prediction y: x^2 if predicted t <= y, else (x - t + y)+^2."""
    return np.frombuffer(_squares_of(sizes.tobytes(), predicted.tobytes()))


@lru_cache(maxsize=64)
def _squares_of(sizes_bytes: bytes, predicted_bytes: bytes) -> bytes:
    """The slow part, the same at every load."""
    sizes, predicted = np.frombuffer(sizes_bytes), np.frombuffer(predicted_bytes)
    ahead = np.empty(len(sizes))
    for start in range(0, len(sizes), 256):
        y = predicted[start : start + 256, None]
        left = np.minimum(sizes, np.maximum(sizes - predicted + y, 0.0))
        ahead[start : start + 256] = np.mean(np.where(predicted <= y, sizes, left) ** 2, axis=1)
    return ahead.tobytes()


def _residence(sizes: Floats, predicted: Floats, order: npt.NDArray[np.int64], rate_rps: float) -> Floats:
    """From first to last service: the integral of 1 / (1 - load predicted below what is left)."""
    ends = np.concatenate(([0.0], predicted[order]))
    load_below = np.concatenate(([0.0], np.cumsum(sizes[order])[:-1])) * rate_rps / len(sizes)
    reached = np.concatenate(([0.0], np.cumsum(np.diff(ends) / (1 - load_below))))
    start, end = (np.interp(at, ends, reached) for at in (predicted, np.maximum(predicted - sizes, 0.0)))
    return np.asarray(start - end + np.maximum(sizes - predicted, 0.0))


def _sampled(sizes: Floats, predicted: Floats) -> tuple[Floats, Floats]:
    if len(sizes) <= PAIRS:
        return sizes, predicted
    order = np.lexsort((sizes, predicted))
    rows = order[np.linspace(0, len(order) - 1, PAIRS).astype(np.int64)]
    return sizes[rows] * (sizes.mean() / sizes[rows].mean()), predicted[rows]


def _pairs(sizes_s: npt.ArrayLike, predicted_s: npt.ArrayLike) -> tuple[Floats, Floats]:
    sizes, predicted = np.asarray(sizes_s, float), np.asarray(predicted_s, float)
    if sizes.ndim != 1 or sizes.shape != predicted.shape or len(sizes) == 0:
        raise InputError(f"sizes and predictions must be columns of one length; {sizes.shape}, {predicted.shape}")
    if not (np.isfinite(sizes).all() and (sizes > 0).all()):
        raise InputError("true sizes must be finite and above 0")
    if not (np.isfinite(predicted).all() and (predicted >= 0).all()):
        raise InputError("predicted sizes must be finite and at least 0; look for NaN or negative predictions")
    return sizes, predicted


def _load_of_sizes(sizes: Floats, rate_rps: float, slots: int) -> float:
    return load_of(SampledTimes(sizes), rate_rps, slots)


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
        retained: For each load [s] the share of the gap from FCFS to SRPT that SPRPT keeps at that error.
        kept_unpreempted: The same for SPJF.
        metadata: What was asked, for people.
    """

    slots: int
    mean_s: float
    loads: Floats
    orders: Mapping[str, Sequence[Sojourn]]
    sigmas: Floats
    retained: Mapping[float, Floats]
    kept_unpreempted: Mapping[float, Floats]
    metadata: Sequence[str] = field(default_factory=tuple)


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
    metadata: Sequence[str] = (),
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
        metadata: Passed on.
    """
    service.checked_count("slots", slots)
    own = with_error(times, sigma, np.random.default_rng(seed)) if pairs is None else pairs
    noisy = {float(s): with_error(times, float(s), np.random.default_rng(seed)) for s in sigmas}
    kept, unpreempted = dict[float, Floats](), dict[float, Floats]()
    rates = {float(load): load * slots / times.mean_s for load in loads}
    ways: dict[str, Callable[[float], Sojourn]] = {
        "fcfs": lambda rate: fcfs(times, rate, slots),
        "sjf": lambda rate: sjf(times, rate, slots),
        "srpt": lambda rate: srpt(times, rate, slots),
        "spjf": lambda rate: spjf(*own, rate, slots),
        "sprpt": lambda rate: sprpt(*own, rate, slots),
    }
    orders = {name: [way(rate) for rate in rates.values()] for name, way in ways.items()}
    for i, (load, rate) in enumerate(rates.items()):
        blind, best = orders["fcfs"][i], orders["srpt"][i]
        preempted = [sprpt(*pair, rate, slots) for pair in noisy.values()]
        kept[load] = np.array([share_kept(blind, one, best) for one in preempted])
        waiting = [spjf(*pair, rate, slots) for pair in noisy.values()]
        unpreempted[load] = np.array([share_kept(blind, one, best) for one in waiting])
    return QueueStudy(
        slots, times.mean_s, np.array(list(rates)), orders, np.array(sigmas, float), kept, unpreempted, tuple(metadata)
    )
