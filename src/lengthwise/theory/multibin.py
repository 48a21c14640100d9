"""The formulas of Multi-Bin Batching: throughput, capacity, bins for a target, latency, the exponential case.

Requests arrive as a Poisson process and wait in the bin of their (predicted) service time. A bin that
holds ``batch`` requests sends them off together; a batch takes as long as its longest member; batches are
served in the order in which they filled up. Continuous batching, prefill and memory are not in the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.theory.boundaries import checked_count, checked_counts, exponential_steps
from lengthwise.theory.confusion import checked_confusion
from lengthwise.theory.service import ExponentialTimes, Floats, ServiceTimes, UniformTimes, checked_cuts


def expected_batch_s(
    times: ServiceTimes, cuts_s: npt.ArrayLike, batch: int, confusion: npt.ArrayLike | None = None
) -> float:
    """Expected service time of a batch, E[T_k] = sum over bins of P(bin) E[max of a batch in it] (equation 2).

    With ``confusion`` ([true bin, predicted bin], rows of probabilities) a batch's members come from
    several true bins. The distribution of a member is then the mixture F, and its batch's E[max] the
    integral of 1 - F^batch: exact, nothing is simulated.
    """
    checked_counts(batch)
    masses = times.masses(checked_cuts(cuts_s))
    matrix = np.eye(len(masses)) if confusion is None else checked_confusion(confusion, len(masses))
    joint = masses[:, None] * matrix
    arriving = joint.sum(axis=0)
    return float(
        sum(
            share * times.expected_max_s(cuts_s, joint[:, j] / share, batch)
            for j, share in enumerate(arriving)
            if share > 0
        )
    )


def throughput_rps(
    times: ServiceTimes,
    cuts_s: npt.ArrayLike,
    batch: int,
    confusion: npt.ArrayLike | None = None,
    *,
    servers: int = 1,
) -> float:
    """Requests a second that ``servers`` serve when there is always a batch: B / E[T_k] (Proposition 4.1)."""
    checked_count("servers", servers)
    return servers * batch / expected_batch_s(times, cuts_s, batch, confusion)


def capacity_rps(times: ServiceTimes, batch: int, *, servers: int = 1) -> float:
    """The limit of infinitely many bins, c_max = B / mean service time (Remark 4.3)."""
    checked_counts(batch)
    checked_count("servers", servers)
    return servers * batch / times.mean_s


def latency_s(
    times: ServiceTimes,
    cuts_s: npt.ArrayLike,
    batch: int,
    rate_rps: float,
    confusion: npt.ArrayLike | None = None,
) -> float:
    """Expected time from arrival to the end of the batch, with infinitely many servers (Lemma 5.1).

    E = k (B - 1) / (2 lambda) + E[T_k]. It holds for any boundaries: a bin of mass p fills in
    (B - 1) / (2 lambda p) on average, and a share p of the requests waits for it, so only the number k
    of bins that requests come to remains. With finite servers it is a lower bound, close at low load.
    """
    if not (math.isfinite(rate_rps) and rate_rps > 0):
        raise InputError(f"the arrival rate must be a number above 0 requests a second; it is {rate_rps:g}")
    masses = times.masses(checked_cuts(cuts_s))
    matrix = np.eye(len(masses)) if confusion is None else checked_confusion(confusion, len(masses))
    used = np.count_nonzero(masses @ matrix > 0)
    filling = used * (batch - 1) / (2 * rate_rps)
    return float(filling + expected_batch_s(times, cuts_s, batch, confusion))


def uniform_batch_s(times: UniformTimes, batch: int, bins: int) -> float:
    """E[T_k] = mean + (high - low) / (2 k) x (B - 1) / (B + 1), with the best boundaries (Theorem 4.2)."""
    checked_counts(batch, bins)
    return times.mean_s + (times.high_s - times.low_s) / (2 * bins) * (batch - 1) / (batch + 1)


def uniform_throughput_rps(times: UniformTimes, batch: int, bins: int) -> float:
    """Thr_k = B / E[T_k] (Theorem 4.2); it grows with the number of bins."""
    return batch / uniform_batch_s(times, batch, bins)


def uniform_bins_for(times: UniformTimes, batch: int, target_rps: float) -> int:
    """The fewest bins whose throughput reaches ``target_rps`` (Theorem 4.3; its c_max - epsilon)."""
    checked_target(times, batch, target_rps)
    if batch == 1:
        return 1
    spread = (times.high_s - times.low_s) * (batch - 1) / (2 * (batch + 1))
    needed = spread / (batch / target_rps - times.mean_s)
    return max(1, math.ceil(needed * (1 - 1e-12)))


def bins_for(
    times: ServiceTimes,
    batch: int,
    target_rps: float,
    rule: Callable[[int], npt.ArrayLike],
    *,
    most: int = 1 << 14,
) -> int | None:
    """The fewest bins of a rule whose throughput reaches ``target_rps``; None where not even ``most`` do.

    Args:
        times: Any distribution.
        batch: Requests in a batch.
        target_rps: Below the capacity.
        rule: The cuts of so many bins, such as ``lambda k: equal_mass(times, k)``. Throughput should
            grow with the number of bins: it is doubled until it is enough, then halved.
        most: Where to give up.
    """
    checked_target(times, batch, target_rps)

    def reaches(bins: int) -> bool:
        return throughput_rps(times, rule(bins), batch) >= target_rps * (1 - 1e-12)

    high = 1
    while not reaches(high):
        high *= 2
        if high > most:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return high


def checked_target(times: ServiceTimes, batch: int, target_rps: float) -> None:
    """Raises InputError where no number of bins reaches a target."""
    capacity = capacity_rps(times, batch)
    if not (math.isfinite(target_rps) and target_rps > 0) or (target_rps >= capacity and batch > 1):
        raise InputError(
            f"a target must lie above 0 and below the capacity of {capacity:g} requests a second, which "
            f"infinitely many bins reach; it is {target_rps:g}"
        )


def exponential_bound_s(times: ExponentialTimes, cuts_s: npt.ArrayLike, batch: int) -> float:
    """Upper bound of E[T_k]: every bin but the last counts as its upper end (equation 27).

    sum_{i<k} P(bin i) l_i + P(bin k) (l_{k-1} + H_B / rate).
    """
    checked_counts(batch)
    cuts = checked_cuts(cuts_s)
    masses = times.masses(cuts)
    start = cuts[-1] if len(cuts) else 0.0
    last = start + _harmonic(batch) / times.rate_per_s
    return float(masses[:-1] @ cuts + masses[-1] * last)


def exponential_least_bound_s(times: ExponentialTimes, batch: int, bins: int) -> float:
    """That bound at the boundaries of the recursion: (1 + x_1) / rate (Corollary A.1.1, derived anew).

    The bound is x_1 + e^-x_1 (x_2 + e^-x_2 (.. (x_{k-1} + e^-x_{k-1} H_B))), over the rate. The choice of
    x_{k-1} makes the innermost bracket x_{k-1} + 1, and so on outwards. Throughput is therefore at
    least B rate / (1 + x_1), and x_1 goes to 0 as bins grow.
    """
    steps = exponential_steps(batch, bins)
    first = steps[0] if len(steps) else _harmonic(batch) - 1
    return float(1 + first) / times.rate_per_s


def gain(times: ServiceTimes, cuts_s: npt.ArrayLike, batch: int, confusion: Floats | None = None) -> float:
    """Throughput over that of one bin, less 1."""
    one = expected_batch_s(times, [], batch)
    return one / expected_batch_s(times, cuts_s, batch, confusion) - 1


def _harmonic(n: int) -> float:
    return float(np.sum(1 / np.arange(1, n + 1)))
