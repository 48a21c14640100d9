"""The formulas of Multi-Bin Batching: throughput, capacity, bins for a target, latency, the exponential case.

Requests arrive as a Poisson process and wait in the bin of their (predicted) service time. A bin that
holds ``batch`` requests sends them off together; a batch takes as long as its longest member; batches are
served in the order in which they filled up. Continuous batching, prefill and memory are not in the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import UNKNOWN, Estimate
from lengthwise.statistics import mean_estimate
from lengthwise.theory import service
from lengthwise.theory.batch_server import Served, serve
from lengthwise.theory.service import (
    ExponentialTimes,
    Floats,
    SampledTimes,
    ServiceTimes,
    UniformTimes,
    bin_of,
    checked_count,
    checked_counts,
    checked_cuts,
    exponential_steps,
)


def neighbours(bins: int, below: float, above: float | None = None) -> Floats:
    """[k, k] the error model of Section 6.2: one bin too low or too high, never farther.

    Args:
        bins: Their number.
        below: Probability that bin i > 0 is taken for bin i - 1.
        above: Probability that bin i < k - 1 is taken for bin i + 1; the same as ``below`` by default.
    """
    checked_counts(1, bins)
    above = below if above is None else above
    if not (below >= 0 and above >= 0 and below + above <= 1):
        raise InputError(
            f"the probabilities of a bin too low and too high must be at least 0 and together at most 1; "
            f"they are {below:g} and {above:g}"
        )
    matrix = np.diag(np.full(bins - 1, below), -1) + np.diag(np.full(bins - 1, above), 1)
    return np.asarray(matrix + np.diag(1 - matrix.sum(axis=1)))


def of_accuracy(bins: int, accuracy: float, within_one: float = 1.0) -> Floats:
    """[k, k] a matrix with this mean accuracy, whose errors fall on neighbours first.

    ``within_one`` is the share of predictions in the true bin or beside it. What lies farther falls
    evenly on the other bins.

    Raises:
        InputError: There is no such matrix.
    """
    checked_counts(1, bins)
    if not 0 <= accuracy <= within_one <= 1:
        raise InputError(f"need 0 <= accuracy <= within one bin <= 1; they are {accuracy:g} and {within_one:g}")
    if bins == 1:
        return np.ones((1, 1))
    far = 1 - within_one
    distance = np.abs(np.subtract.outer(np.arange(bins), np.arange(bins)))
    beyond = (distance > 1).astype(float)
    spread = far * beyond * bins / max(beyond.sum(), 1)
    left = 1 - spread.sum(axis=1)
    near = (within_one - accuracy) * bins / (2 * (bins - 1)) * (distance == 1)
    own = left - near.sum(axis=1)
    if (own < -1e-12).any() or (left < -1e-12).any() or (far > 0 and beyond.sum() == 0):
        raise InputError(
            f"no matrix of {bins} bins with errors on neighbours has accuracy {accuracy:g} and "
            f"{within_one:g} within one bin; raise the accuracy or lower the other"
        )
    return np.asarray(spread + near + np.diag(np.maximum(own, 0.0)))


def of_predictions(true_bin: npt.ArrayLike, predicted_bin: npt.ArrayLike, bins: int) -> Floats:
    """[k, k] what predictions did: shares by true bin; a bin that never came stays itself."""
    checked_counts(1, bins)
    true, predicted = np.asarray(true_bin, np.int64), np.asarray(predicted_bin, np.int64)
    if true.shape != predicted.shape or true.ndim != 1:
        raise InputError(f"true and predicted bins must be two columns of one length; {true.shape}, {predicted.shape}")
    for name, column in (("true", true), ("predicted", predicted)):
        if len(column) and not (column.min() >= 0 and column.max() < bins):
            raise InputError(f"{name} bins must lie within 0 to {bins - 1}; found {column.min()} to {column.max()}")
    counts = np.zeros((bins, bins))
    np.add.at(counts, (true, predicted), 1.0)
    totals = counts.sum(axis=1, keepdims=True)
    return np.where(totals > 0, counts / np.maximum(totals, 1), np.eye(bins))


def confuse(true_bin: npt.ArrayLike, confusion: npt.ArrayLike, levels: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """[n] the bin that each request is put into.

    Args:
        true_bin: [n] where it belongs.
        confusion: [k, k] rows of probabilities.
        levels: [n] draws within 0 to 1: the randomness, given so that runs can share it.
    """
    matrix = checked_confusion(confusion, len(np.atleast_2d(np.asarray(confusion))))
    true, drawn = np.asarray(true_bin, np.int64), np.asarray(levels, float)
    put = np.empty(len(true), np.int64)
    for row, chances in enumerate(matrix):
        (members,) = np.nonzero(true == row)
        put[members] = np.searchsorted(np.cumsum(chances)[:-1], drawn[members], side="right")
    return put


def checked_confusion(confusion: npt.ArrayLike, bins: int) -> Floats:
    """The matrix as an array; raises InputError where it is not one of ``bins`` rows of probabilities."""
    matrix = np.asarray(confusion, float)
    if matrix.shape != (bins, bins):
        raise InputError(f"a confusion matrix of {bins} bins has shape ({bins}, {bins}); this has {matrix.shape}")
    if not ((matrix >= 0).all() and np.allclose(matrix.sum(axis=1), 1, atol=1e-9)):
        raise InputError("each row of a confusion matrix must hold probabilities that add up to 1")
    return matrix


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
    times: ServiceTimes, cuts_s: npt.ArrayLike, batch: int, confusion: npt.ArrayLike | None = None, *, servers: int = 1
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
    times: ServiceTimes, cuts_s: npt.ArrayLike, batch: int, rate_rps: float, confusion: npt.ArrayLike | None = None
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
    times: ServiceTimes, batch: int, target_rps: float, rule: Callable[[int], npt.ArrayLike], *, most: int = 1 << 14
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


LEVEL = 0.95
"""Confidence of the intervals."""


def runs(
    times: ServiceTimes,
    cuts_s: npt.ArrayLike,
    batch: int,
    *,
    rate_rps: float = math.inf,
    servers: int | None = 1,
    requests: int = 20_000,
    seeds: Iterable[int] = range(5),
    confusion: npt.ArrayLike | None = None,
    max_wait_s: float = math.inf,
) -> list[Served]:
    """A run a seed: Poisson arrivals (all at once for an infinite rate), sizes, and bins right or confused.

    The same seed draws the same requests whatever the bins, rates and confusions are.
    """
    if requests < 1 or math.isnan(rate_rps) or rate_rps <= 0:
        raise InputError(f"a run needs at least one request and a rate above 0; they are {requests} and {rate_rps:g}")
    cuts = checked_cuts(cuts_s)
    made = []
    for seed in seeds:
        gaps, sizes, guesses = np.random.default_rng(seed).spawn(3)
        service_s = np.asarray(times.quantile(sizes.random(requests)))
        arrival_s = np.cumsum(gaps.standard_exponential(requests)) / rate_rps
        bins = bin_of(service_s, cuts)
        if confusion is not None:
            bins = confuse(bins, confusion, guesses.random(requests))
        given = {"batch": batch, "num_bins": len(cuts) + 1, "servers": servers, "max_wait_s": max_wait_s}
        made.append(serve(arrival_s, service_s, bins, **given))  # type: ignore[arg-type]
    return made


def simulated_throughput(served: Sequence[Served]) -> Estimate:
    """Requests a second, first arrival to last end, over the runs."""
    return mean_estimate([run.throughput_rps for run in served], LEVEL)


def simulated_latency(served: Sequence[Served]) -> Estimate:
    """Mean seconds from arrival to end, over the runs."""
    return mean_estimate([run.latency_s for run in served], LEVEL)


RULES = ("optimal", "equal", "learned")
"""``optimal`` is what the paper proves for its two distributions, and learned boundaries for any other."""

MAX_BINS = 1024
"""Beyond so many a bin takes longer to fill than anybody would wait, and tables grow with their square."""

ERRORS = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
"""Probabilities of a neighbouring bin: the range of Figure 8."""


@dataclass(frozen=True, eq=False)
class Bins:
    """What so many bins come to.

    Attributes:
        bins: How many.
        cuts_s: [k - 1] their boundaries, service times.
        batch_s: Expected service time of a batch.
        throughput_rps: Requests a second of one server that always has a batch.
        simulated_rps: The same, simulated.
        latency_s: Expected latency at the study's rate with infinitely many servers; NaN without a rate.
        simulated_latency_s: The same, simulated.
        accuracy: The share of requests that are put into their own bin.
    """

    bins: int
    cuts_s: Floats
    batch_s: float
    throughput_rps: float
    simulated_rps: Estimate = UNKNOWN
    latency_s: float = math.nan
    simulated_latency_s: Estimate = UNKNOWN
    accuracy: float = 1.0


@dataclass(frozen=True, eq=False)
class MultiBinStudy:
    """Throughput and latency by number of bins.

    Attributes:
        batch: Requests in a batch.
        rule: How boundaries were chosen.
        capacity_rps: What infinitely many bins would reach.
        one_bin_rps: What a single bin reaches.
        rows: By number of bins.
        rate_rps: Arrivals, for latencies; NaN where none were asked for.
        target_rps: What was to be reached; NaN where nothing was.
        bins_needed: The fewest bins that reach it; None where none of those tried do.
        saturation: Arrival rates, and for each row's bins the throughput of one server there (Figure 3).
        robustness: Chances of a neighbouring bin, and for each row's bins the throughput (Figure 8).
        metadata: What was asked, for people.
    """

    batch: int
    rule: str
    capacity_rps: float
    one_bin_rps: float
    rows: Sequence[Bins]
    rate_rps: float = math.nan
    target_rps: float = math.nan
    bins_needed: int | None = None
    saturation: tuple[Floats, Mapping[int, Sequence[Estimate]]] | None = None
    robustness: tuple[Floats, Mapping[int, Floats]] | None = None
    metadata: Sequence[str] = field(default_factory=tuple)

    def overloads(self, row: Bins) -> bool:
        """Whether one server with a row's bins cannot keep up with the arrivals, so that its queue grows for ever."""
        return math.isfinite(self.rate_rps) and self.rate_rps >= row.throughput_rps


def cuts_of(times: ServiceTimes, batch: int, bins: int, rule: str) -> Floats:
    """[k - 1] boundaries by the name of a rule."""
    if rule not in RULES:
        raise InputError(f"boundaries must be one of {', '.join(RULES)}; they are {rule!r}")
    if rule == "equal":
        return service.equal_mass(times, bins)
    if rule == "optimal" and isinstance(times, UniformTimes):
        return service.uniform_optimal(times, bins)
    if rule == "optimal" and isinstance(times, ExponentialTimes):
        return service.exponential_recursion(times, batch, bins)
    return service.learned(times, batch, bins)


def token_boundaries(tokens: npt.ArrayLike, batch: int, bins: int, rule: str = "learned") -> list[float]:
    """Boundaries in tokens for an engine's bins, from lengths that were seen; at most k - 1, each another.

    They lie half a token above the last length of their bin, so that it does not matter on which side a
    boundary itself belongs. Ties of the lengths can leave fewer bins than were asked for.
    """
    lengths = np.asarray(tokens, float)
    if lengths.size and (lengths != np.rint(lengths)).any():
        raise InputError("tokens must be whole numbers; round predicted lengths first")
    times = SampledTimes(lengths)
    cuts = np.unique(np.floor(cuts_of(times, batch, bins, rule)))
    return [float(cut) + 0.5 for cut in cuts if cut < float(times.quantile(1.0))]


def multibin_study(
    times: ServiceTimes,
    batch: int,
    bins: Sequence[int],
    *,
    rule: str = "optimal",
    rate_rps: float = math.nan,
    target_share: float = math.nan,
    error: float = 0.0,
    accuracy: Mapping[int, float] | None = None,
    requests: int = 20_000,
    seeds: int = 5,
    curves: bool = True,
    metadata: Sequence[str] = (),
) -> MultiBinStudy:
    """Theory and simulation side by side.

    Args:
        times: Service times, of any distribution.
        batch: Requests in a batch.
        bins: Numbers of bins.
        rule: One of ``RULES``.
        rate_rps: Arrivals a second, for latencies.
        target_share: The share of the capacity to reach, below 1.
        error: Chance of each neighbouring bin (Section 6.2).
        accuracy: For some numbers of bins the share of right predictions; errors fall on neighbours.
        requests: Requests a simulated run; 0 simulates nothing.
        seeds: Simulated runs.
        curves: Whether to work out saturation and robustness, too.
        metadata: Passed on.
    """
    given = dict(accuracy or {})
    _check(batch, bins, given, target_share)
    if not math.isnan(rate_rps) and not (math.isfinite(rate_rps) and rate_rps > 0):
        raise InputError(f"the arrival rate must be a number above 0 requests a second; it is {rate_rps:g}")
    cut = {k: cuts_of(times, batch, k, rule) for k in dict.fromkeys(bins)}
    wrong = {k: of_accuracy(k, given[k]) if k in given else neighbours(k, error) for k in cut}
    rows = [_row(times, batch, cut[k], wrong[k], rate_rps, requests, seeds) for k in cut]
    capacity = capacity_rps(times, batch)
    target = target_share * capacity
    needed = None
    if not math.isnan(target_share):
        needed = bins_for(times, batch, target, lambda k: cuts_of(times, batch, k, rule), most=MAX_BINS)
    return MultiBinStudy(
        batch,
        rule,
        capacity,
        throughput_rps(times, [], batch),
        rows,
        rate_rps,
        target,
        needed,
        _saturation(times, batch, cut, wrong, capacity, requests) if curves and requests else None,
        _robustness(times, batch, cut) if curves else None,
        tuple(metadata),
    )


def _check(batch: int, bins: Sequence[int], accuracy: Mapping[int, float], target_share: float) -> None:
    service.checked_count("batch", batch)
    for count in bins:
        service.checked_count("bins", count)
        if count > MAX_BINS:
            raise InputError(f"bins must be at most {MAX_BINS:,}; they are {count:,}; ask for fewer")
    if stray := [k for k in accuracy if k not in bins]:
        raise InputError(
            f"an accuracy belongs to a number of bins that is asked for ({', '.join(map(str, bins))}); one was "
            f"given for {stray[0]} bins"
        )
    if not math.isnan(target_share) and not 0 < target_share < 1:
        raise InputError(f"the target must be a share below 1 of the capacity, and above 0; it is {target_share:g}")


def _row(
    times: ServiceTimes, batch: int, cuts_s: Floats, wrong: Floats, rate_rps: float, requests: int, seeds: int
) -> Bins:
    timed = not math.isnan(rate_rps)
    shared = {"requests": requests, "seeds": range(seeds), "confusion": wrong}
    idle, busy = UNKNOWN, UNKNOWN
    if requests:
        busy = simulated_throughput(runs(times, cuts_s, batch, **shared))  # type: ignore[arg-type]
    if requests and timed:
        calm = runs(times, cuts_s, batch, rate_rps=rate_rps, servers=None, **shared)  # type: ignore[arg-type]
        idle = simulated_latency(calm)
    return Bins(
        len(cuts_s) + 1,
        cuts_s,
        expected_batch_s(times, cuts_s, batch, wrong),
        throughput_rps(times, cuts_s, batch, wrong),
        busy,
        latency_s(times, cuts_s, batch, rate_rps, wrong) if timed else math.nan,
        idle,
        float(times.masses(cuts_s) @ np.diag(wrong)),
    )


def _saturation(
    times: ServiceTimes,
    batch: int,
    cut: Mapping[int, Floats],
    wrong: Mapping[int, Floats],
    capacity: float,
    requests: int,
) -> tuple[Floats, dict[int, list[Estimate]]]:
    rates = np.linspace(0.1, 1.3, 13) * capacity
    found = {
        k: [
            simulated_throughput(
                runs(times, cuts_s, batch, rate_rps=rate, requests=requests, seeds=(0, 1), confusion=wrong[k])
            )
            for rate in rates
        ]
        for k, cuts_s in cut.items()
    }
    return rates, found


def _robustness(times: ServiceTimes, batch: int, cut: Mapping[int, Floats]) -> tuple[Floats, dict[int, Floats]]:
    found = {k: np.array([throughput_rps(times, c, batch, neighbours(k, p)) for p in ERRORS]) for k, c in cut.items()}
    return np.array(ERRORS), found
