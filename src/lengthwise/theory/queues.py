"""Mean sojourn times of an M/G/1 queue under several orders of service.

Requests arrive as a Poisson process and have independent sizes. FCFS uses no sizes, SJF and SRPT the true sizes. SPJF
and SPRPT (Mitzenmacher 2019, "Scheduling with predictions and the price of misprediction") use predicted sizes.

A replica that serves ``slots`` requests at a time is modelled as one server that is ``slots`` times as fast as a slot.
The wait at this server is multiplied by Erlang's C over the load (Lee and Longton 1959: exact for FCFS with exponential
times); the service time is that in a slot. The model leaves out that larger batches slow down steps, that prefills
delay decodes, that memory may hold fewer than ``slots`` requests, and that preempted requests are recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.theory.service import Floats, SampledTimes, ServiceTimes, check_count

MAX_CELLS = 4096  # cells that represent a distribution
MAX_PAIRS = 3000  # pairs of size and prediction; the work grows with their square
SIGMAS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)  # standard deviations of ln(predicted / true)
ORDERS = {"fcfs": "FCFS", "sjf": "SJF, known sizes", "srpt": "SRPT, known sizes"}
ORDERS |= {"spjf": "SJF, predicted", "sprpt": "SRPT, predicted"}


@dataclass(frozen=True)
class Sojourn:
    """Expected times of a request in the system and in waiting, and the expected slowdown, in the steady state."""

    mean_s: float  # time from arrival to completion
    wait_s: float  # ``mean_s`` without the service time: all waiting, interruptions included
    slowdown: float  # mean over the distribution's cells of (time from arrival to completion) / (service time)


def load_of(times: ServiceTimes, rate_rps: float, slots: int = 1) -> float:
    """Return the share of time that a slot is busy, rate x mean / slots. Raises InputError unless it is below 1."""
    check_count("slots", slots)
    load = rate_rps * times.mean_s / slots
    if not (math.isfinite(load) and 0 < load < 1):
        found = f"it is {load:g}. {slots / times.mean_s:g} requests a second would be 1"
        raise InputError(f"the load (arrival rate x mean service time / slots) must lie between 0 and 1; {found}")
    return load


def fcfs(times: ServiceTimes, rate_rps: float, slots: int = 1) -> Sojourn:
    """Return the sojourn under first come, first served: wait = rate E[S^2] / (2 (1 - load)) (Pollaczek, Khinchine)."""
    load = load_of(times, rate_rps, slots)
    wait = rate_rps * times.second_moment / slots**2 / (2 * (1 - load))
    sizes, shares = times.cells(MAX_CELLS)
    return _sojourn(sizes, shares, np.full(len(sizes), wait), load, slots)


def processor_sharing(times: ServiceTimes, rate_rps: float) -> Sojourn:
    """Return the sojourn if all requests share one server equally: E[S] / (1 - load) for any distribution.

    This models a batch without a limit, whose step time is proportional to its number of requests.
    """
    slowdown = 1 / (1 - load_of(times, rate_rps))
    return Sojourn(times.mean_s * slowdown, times.mean_s * (slowdown - 1), slowdown)


def sjf(times: ServiceTimes, rate_rps: float, slots: int = 1) -> Sojourn:
    """Return the sojourn under nonpreemptive shortest job first (Phipps 1956). Equal sizes run in order of arrival."""
    # wait(x) = rate E[S^2] / 2 / ((1 - load of < x)(1 - load of <= x))
    load = load_of(times, rate_rps, slots)
    sizes, shares = times.cells(MAX_CELLS)
    below, up_to = _loads(sizes / slots, shares, rate_rps)
    wait = rate_rps * times.second_moment / slots**2 / 2 / ((1 - below) * (1 - up_to))
    return _sojourn(sizes, shares, wait, load, slots)


def srpt(times: ServiceTimes, rate_rps: float, slots: int = 1) -> Sojourn:
    """Return the sojourn under shortest remaining time first, preemptive, for known sizes (Schrage, Miller 1966)."""
    # No schedule of ``slots`` slots has a mean sojourn below that of one slot of ``slots`` times the speed.
    load = load_of(times, rate_rps, slots)
    sizes, shares = times.cells(MAX_CELLS)
    fast = sizes / slots
    below, up_to = _loads(fast, shares, rate_rps)
    squares = np.cumsum(fast**2 * shares) + fast**2 * (1 - np.cumsum(shares))
    wait = rate_rps * squares / 2 / ((1 - below) * (1 - up_to))
    interrupted = np.cumsum(np.diff(fast, prepend=0.0) / (1 - below)) - fast
    return _sojourn(sizes, shares, wait + interrupted, load, slots)


def spjf(sizes_s: npt.ArrayLike, predicted_s: npt.ArrayLike, rate_rps: float, slots: int = 1) -> Sojourn:
    """Return the sojourn under nonpreemptive shortest predicted job first. All given pairs are equally likely."""
    # wait(y) = rate E[S^2] / 2 / ((1 - load predicted < y)(1 - load predicted <= y)), by the predictions' order alone.
    sizes, predicted = _checked_pairs(sizes_s, predicted_s)
    load = load_of(SampledTimes(sizes), rate_rps, slots)
    below, up_to, _ = _predicted_loads(sizes / slots, predicted, rate_rps)
    wait = rate_rps * np.mean((sizes / slots) ** 2) / 2 / ((1 - below) * (1 - up_to))
    return _sojourn(sizes, np.full(len(sizes), 1 / len(sizes)), wait, load, slots)


def sprpt(sizes_s: npt.ArrayLike, predicted_s: npt.ArrayLike, rate_rps: float, slots: int = 1) -> Sojourn:
    """Return the sojourn under preemptive shortest predicted remaining time first. Given pairs are equally likely."""
    # A request with prediction y and attained service a has a predicted remainder of max(y - a, 0); once it exceeds
    # its prediction, it is not interrupted any more (Mitzenmacher 2019). From many pairs evenly spaced ones are taken.
    sizes, predicted = _checked_pairs(sizes_s, predicted_s)
    if len(sizes) > MAX_PAIRS:
        by_prediction = np.lexsort((sizes, predicted))
        rows = by_prediction[np.linspace(0, len(sizes) - 1, MAX_PAIRS).astype(np.int64)]
        sizes, predicted = sizes[rows] * (sizes.mean() / sizes[rows].mean()), predicted[rows]
    load = load_of(SampledTimes(sizes), rate_rps, slots)
    fast, fast_predicted = sizes / slots, predicted / slots
    below, up_to, order = _predicted_loads(fast, fast_predicted, rate_rps)
    squares = np.frombuffer(_squares_ahead(fast.tobytes(), fast_predicted.tobytes()))
    wait = rate_rps * squares / 2 / ((1 - below) * (1 - up_to))
    # The time from first to last service is the integral of 1 / (1 - load with predictions below the remainder).
    ends = np.concatenate(([0.0], fast_predicted[order]))
    load_below = np.concatenate(([0.0], np.cumsum(fast[order])[:-1])) * rate_rps / len(fast)
    cumulative = np.concatenate(([0.0], np.cumsum(np.diff(ends) / (1 - load_below))))
    remainder = np.maximum(fast_predicted - fast, 0.0)
    start, end = (np.interp(at, ends, cumulative) for at in (fast_predicted, remainder))
    residence = start - end + np.maximum(fast - fast_predicted, 0.0)
    return _sojourn(sizes, np.full(len(sizes), 1 / len(sizes)), wait + residence - fast, load, slots)


def with_error(
    times: ServiceTimes, sigma: float, rng: np.random.Generator, count: int = MAX_PAIRS
) -> tuple[Floats, Floats]:
    """Return ``count`` true sizes and their predictions: size x exp(sigma Z), with Z standard normal."""
    # Sizes are the means of cells, as often as their shares; errors are quantiles of the normal in random order.
    if not (math.isfinite(sigma) and sigma >= 0):
        raise InputError(f"the error sigma must be a number of at least 0; it is {sigma:g}")
    from scipy.special import ndtri

    sizes, shares = times.cells(count)
    cell = np.searchsorted(np.cumsum(shares) - 1e-12, (np.arange(count) + 0.5) / count)
    true = sizes[np.minimum(cell, len(sizes) - 1)]
    true = true * (times.mean_s / true.mean())
    noise = rng.permutation(ndtri((np.arange(count) + 0.5) / count))
    return true, true * np.exp(sigma * noise)


def share_retained(fcfs: Sojourn, predicted: Sojourn, oracle: Sojourn) -> float:
    """Return (FCFS - predicted) / (FCFS - oracle) of mean times, or NaN if the oracle gains nothing over FCFS."""
    gap = fcfs.mean_s - oracle.mean_s
    return (fcfs.mean_s - predicted.mean_s) / gap if gap > 1e-12 * fcfs.mean_s else math.nan


def erlang_c(load: float, slots: int) -> float:
    """Return the probability that an arrival finds all ``slots`` busy in an M/M/slots queue. ``load`` is below 1."""
    check_count("slots", slots)
    blocked, demand = 1.0, load * slots
    for busy in range(1, slots + 1):
        blocked = demand * blocked / (busy + demand * blocked)
    return blocked / (1 - load * (1 - blocked))


def _sojourn(sizes: Floats, shares: Floats, delay_s: Floats, load: float, slots: int) -> Sojourn:
    """Return the sojourn with ``slots``, from the delays at one server that is ``slots`` times as fast as a slot."""
    delay = delay_s * erlang_c(load, slots) / load
    wait, mean = float(delay @ shares), float(sizes @ shares)
    return Sojourn(mean + wait, wait, float((1 + delay / sizes) @ shares))


def _loads(sizes: Floats, shares: Floats, rate_rps: float) -> tuple[Floats, Floats]:
    """Return for ascending, distinct sizes the load of all smaller sizes, and the load of smaller and equal sizes."""
    up_to = rate_rps * np.cumsum(sizes * shares)
    return np.concatenate(([0.0], up_to[:-1])), up_to


def _predicted_loads(sizes: Floats, predicted: Floats, rate_rps: float) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    """Return by request the loads of smaller and of smaller or equal predictions, and the sorting order."""
    order = np.argsort(predicted, kind="stable")
    sums = np.concatenate(([0.0], np.cumsum(sizes[order]))) * rate_rps / len(sizes)
    ranked = predicted[order]
    below, up_to = (sums[np.searchsorted(ranked, predicted, side=side)] for side in ("left", "right"))
    return below, up_to, order


@lru_cache(maxsize=64)
def _squares_ahead(sizes_bytes: bytes, predicted_bytes: bytes) -> bytes:
    """Return the mean squared work ahead of prediction y: x^2 if prediction t <= y, and max(x - t + y, 0)^2 if not."""
    # Arrays are passed as bytes, so that the slow part is cached: it is the same at every load.
    sizes, predicted = np.frombuffer(sizes_bytes), np.frombuffer(predicted_bytes)
    ahead = np.empty(len(sizes))
    for start in range(0, len(sizes), 256):
        y = predicted[start : start + 256, None]
        left = np.minimum(sizes, np.maximum(sizes - predicted + y, 0.0))
        ahead[start : start + 256] = np.mean(np.where(predicted <= y, sizes, left) ** 2, axis=1)
    return ahead.tobytes()


def _checked_pairs(sizes_s: npt.ArrayLike, predicted_s: npt.ArrayLike) -> tuple[Floats, Floats]:
    sizes, predicted = np.asarray(sizes_s, float), np.asarray(predicted_s, float)
    if sizes.ndim != 1 or sizes.shape != predicted.shape or len(sizes) == 0:
        raise InputError(f"sizes and predictions must be columns of one length; {sizes.shape}, {predicted.shape}")
    if not (np.isfinite(sizes).all() and (sizes > 0).all()):
        raise InputError("true sizes must be finite and above 0")
    if not (np.isfinite(predicted).all() and (predicted >= 0).all()):
        raise InputError("predicted sizes must be finite and at least 0; look for NaN or negative predictions")
    return sizes, predicted


@dataclass(frozen=True, eq=False)
class QueueStudy:
    """Mean sojourn times by load and order of service."""

    slots: int  # requests that a replica serves at a time
    mean_s: float
    loads: Floats  # [m] shares of time that a slot is busy
    orders: Mapping[str, Sequence[Sojourn]]  # sojourn of each order of service at each load
    sigmas: Floats  # [s] errors of the predictor (standard deviation of ln(predicted / true))
    retained: Mapping[float, Floats]  # by load: [s] share of the gap from FCFS to SRPT that SPRPT retains
    retained_nonpreemptive: Mapping[float, Floats]  # by load: [s] share of the gap from FCFS to SRPT that SPJF retains
    metadata: Sequence[str] = field(default_factory=tuple)  # description of the question, for headings


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
    """Compare orders of service, by known and by predicted sizes, at each load.

    Args:
        sigma: Error of the predictor (``with_error``).
        sigmas: Errors for which the share of the gap that predictions retain is computed.
        pairs: (true, predicted) sizes of a real predictor, which replace the error ``sigma``.
    """
    check_count("slots", slots)
    sampled = with_error(times, sigma, np.random.default_rng(seed)) if pairs is None else pairs
    by_sigma = [with_error(times, float(s), np.random.default_rng(seed)) for s in dict.fromkeys(map(float, sigmas))]
    rates = {float(load): load * slots / times.mean_s for load in loads}
    exact: dict[str, Callable[..., Sojourn]] = {"fcfs": fcfs, "sjf": sjf, "srpt": srpt}
    orders = {name: [order(times, rate, slots) for rate in rates.values()] for name, order in exact.items()}
    predicted = {"spjf": spjf, "sprpt": sprpt}
    orders |= {name: [order(*sampled, rate, slots) for rate in rates.values()] for name, order in predicted.items()}
    preemptive, nonpreemptive = (
        {
            load: np.array([share_retained(baseline, order(*pair, rate, slots), best) for pair in by_sigma])
            for (load, rate), baseline, best in zip(rates.items(), orders["fcfs"], orders["srpt"], strict=True)
        }
        for order in (sprpt, spjf)
    )
    loads_of, errors = np.array(list(rates)), np.array(sigmas, float)
    return QueueStudy(slots, times.mean_s, loads_of, orders, errors, preemptive, nonpreemptive, tuple(metadata))
