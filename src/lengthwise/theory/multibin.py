"""Multi-Bin Batching (Guldogan et al., 2024): throughput, capacity, bins needed for a target, latency, simulations.

Requests arrive as a Poisson process and wait in the bin of their (predicted) service time. A bin with ``batch``
requests becomes a batch, which takes as long as its longest member. Batches are served in the order in which they
filled up. The model leaves out continuous batching, prefill and memory.
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
from lengthwise.theory.service import ExponentialTimes, Floats, ServiceTimes, UniformTimes, check_counts

LEVEL = 0.95  # confidence level of the intervals
RULES = ("optimal", "equal", "learned")  # "optimal": the paper's for uniform and exponential times, otherwise learned
MAX_BINS = 1024  # with more bins, a bin takes too long to fill, and tables grow with the square of their number
ERRORS = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)  # probabilities of each neighbouring bin: the range of Figure 8


def neighbours(bins: int, below: float, above: float | None = None) -> Floats:
    """Return the confusion matrix [true bin, predicted bin] with these probabilities of one bin too low or too high."""
    check_counts(1, bins)
    above = below if above is None else above
    if not (below >= 0 and above >= 0 and below + above <= 1):
        raise InputError(
            f"the probabilities of a bin too low and too high must be at least 0 and together at most 1; "
            f"they are {below:g} and {above:g}"
        )
    matrix = np.diag(np.full(bins - 1, below), -1) + np.diag(np.full(bins - 1, above), 1)
    return np.asarray(matrix + np.diag(1 - matrix.sum(axis=1)))


def confusion_of_accuracy(bins: int, accuracy: float, within_one: float = 1.0) -> Floats:
    """Return a confusion matrix [k, k] with this mean accuracy, and this share of predictions at most one bin off."""
    # Raises InputError if there is no such matrix. All other predictions are spread evenly.
    check_counts(1, bins)
    if not 0 <= accuracy <= within_one <= 1:
        raise InputError(f"need 0 <= accuracy <= within one bin <= 1; they are {accuracy:g} and {within_one:g}")
    if bins == 1:
        return np.ones((1, 1))
    far = 1 - within_one
    distance = np.abs(np.subtract.outer(np.arange(bins), np.arange(bins)))
    is_far = (distance > 1).astype(float)
    spread = far * is_far * bins / max(is_far.sum(), 1)
    left = 1 - spread.sum(axis=1)
    near = (within_one - accuracy) * bins / (2 * (bins - 1)) * (distance == 1)
    correct = left - near.sum(axis=1)
    if (correct < -1e-12).any() or (left < -1e-12).any() or (far > 0 and is_far.sum() == 0):
        raise InputError(
            f"no matrix of {bins} bins with errors on neighbours has accuracy {accuracy:g} and "
            f"{within_one:g} within one bin; raise the accuracy or lower the other"
        )
    return np.asarray(spread + near + np.diag(np.maximum(correct, 0.0)))


def confusion_of_predictions(true_bin: npt.ArrayLike, predicted_bin: npt.ArrayLike, bins: int) -> Floats:
    """Return the observed confusion matrix [k, k]. A bin without requests counts as predicted correctly."""
    check_counts(1, bins)
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
    """Return [n] predicted bins of requests with true bins ``true_bin``, by the confusion matrix [k, k].

    ``levels`` [n] are uniform random numbers, one for each request.
    """
    matrix = _checked_confusion(confusion, len(np.atleast_2d(np.asarray(confusion))))
    true, drawn = np.asarray(true_bin, np.int64), np.asarray(levels, float)
    predicted = np.empty(len(true), np.int64)
    for row, probabilities in enumerate(matrix):
        (members,) = np.nonzero(true == row)
        predicted[members] = np.searchsorted(np.cumsum(probabilities)[:-1], drawn[members], side="right")
    return predicted


def _checked_confusion(confusion: npt.ArrayLike, bins: int) -> Floats:
    matrix = np.asarray(confusion, float)
    if matrix.shape != (bins, bins):
        raise InputError(f"a confusion matrix of {bins} bins has shape ({bins}, {bins}); this has {matrix.shape}")
    if not ((matrix >= 0).all() and np.allclose(matrix.sum(axis=1), 1, atol=1e-9)):
        raise InputError("each row of a confusion matrix must be probabilities that add up to 1")
    return matrix


def _joint_shares(times: ServiceTimes, cuts_s: npt.ArrayLike, confusion: npt.ArrayLike | None) -> Floats:
    """Return [true bin, predicted bin] shares of all requests."""
    masses = times.masses(service.check_cuts(cuts_s))
    matrix = np.eye(len(masses)) if confusion is None else _checked_confusion(confusion, len(masses))
    return np.asarray(masses[:, None] * matrix)


def expected_batch_s(
    times: ServiceTimes, cuts_s: npt.ArrayLike, batch: int, confusion: npt.ArrayLike | None = None
) -> float:
    """Return the expected service time of a batch, E[T_k]: the sum of P(bin) E[longest of a batch] (equation 2)."""
    # With ``confusion`` ([true, predicted], rows of probabilities) a batch has members of several true bins: their
    # distribution is the mixture F, and E[max] the integral of 1 - F^batch, computed without simulation.
    check_counts(batch)
    joint = _joint_shares(times, cuts_s, confusion)
    shares = [(j, share) for j, share in enumerate(joint.sum(axis=0)) if share > 0]
    return float(sum(share * times.expected_max_s(cuts_s, joint[:, j] / share, batch) for j, share in shares))


def throughput_rps(
    times: ServiceTimes, cuts_s: npt.ArrayLike, batch: int, confusion: npt.ArrayLike | None = None, *, servers: int = 1
) -> float:
    """Return the requests per second of servers that always have a batch: servers x B / E[T_k] (Proposition 4.1)."""
    service.check_count("servers", servers)
    return servers * batch / expected_batch_s(times, cuts_s, batch, confusion)


def capacity_rps(times: ServiceTimes, batch: int, *, servers: int = 1) -> float:
    """Return the throughput with infinitely many bins: servers x B / mean service time (c_max, Remark 4.3)."""
    check_counts(batch)
    service.check_count("servers", servers)
    return servers * batch / times.mean_s


def latency_s(
    times: ServiceTimes, cuts_s: npt.ArrayLike, batch: int, rate_rps: float, confusion: npt.ArrayLike | None = None
) -> float:
    """Return the expected time from arrival to the end of the batch, with infinitely many servers (Lemma 5.1)."""
    # E = k (B - 1) / (2 lambda) + E[T_k], where k is the number of used bins; with finitely many servers a lower bound.
    if not (math.isfinite(rate_rps) and rate_rps > 0):
        raise InputError(f"the arrival rate must be a number above 0 requests a second; it is {rate_rps:g}")
    used = np.count_nonzero(_joint_shares(times, cuts_s, confusion).sum(axis=0) > 0)
    return float(used * (batch - 1) / (2 * rate_rps) + expected_batch_s(times, cuts_s, batch, confusion))


def uniform_batch_s(times: UniformTimes, batch: int, bins: int) -> float:
    """Return E[T_k] with the best boundaries: mean + (high - low) / (2 k) x (B - 1) / (B + 1) (Theorem 4.2)."""
    check_counts(batch, bins)
    return times.mean_s + (times.high_s - times.low_s) / (2 * bins) * (batch - 1) / (batch + 1)


def uniform_throughput_rps(times: UniformTimes, batch: int, bins: int) -> float:
    """Return Thr_k = B / E[T_k] (Theorem 4.2). The throughput grows with the number of bins."""
    return batch / uniform_batch_s(times, batch, bins)


def uniform_bins_for(times: UniformTimes, batch: int, target_rps: float) -> int:
    """Return the smallest number of bins with a throughput of ``target_rps`` (Theorem 4.3: c_max - epsilon)."""
    _check_target(times, batch, target_rps)
    if batch == 1:
        return 1
    spread = (times.high_s - times.low_s) * (batch - 1) / (2 * (batch + 1))
    return max(1, math.ceil(spread / (batch / target_rps - times.mean_s) * (1 - 1e-12)))


def bins_for(
    times: ServiceTimes, batch: int, target_rps: float, rule: Callable[[int], npt.ArrayLike], *, most: int = 1 << 14
) -> int | None:
    """Return the smallest number of bins that reaches ``target_rps``, or None if more than ``most`` are needed.

    ``rule`` returns the boundaries for a number of bins.
    """
    _check_target(times, batch, target_rps)

    def is_enough(bins: int) -> bool:
        return throughput_rps(times, rule(bins), batch) >= target_rps * (1 - 1e-12)

    high = 1
    while not is_enough(high):
        high *= 2
        if high > most:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _check_target(times: ServiceTimes, batch: int, target_rps: float) -> None:
    capacity = capacity_rps(times, batch)
    if not (math.isfinite(target_rps) and target_rps > 0) or (target_rps >= capacity and batch > 1):
        raise InputError(
            f"a target must lie above 0 and below the capacity of {capacity:g} requests a second, which "
            f"infinitely many bins reach; it is {target_rps:g}"
        )


def exponential_bound_s(times: ExponentialTimes, cuts_s: npt.ArrayLike, batch: int) -> float:
    """Return an upper bound of E[T_k]: sum_{i<k} P(bin i) l_i + P(bin k) (l_{k-1} + H_B / rate) (equation 27)."""
    check_counts(batch)
    cuts = service.check_cuts(cuts_s)
    masses = times.masses(cuts)
    start = cuts[-1] if len(cuts) else 0.0
    return float(masses[:-1] @ cuts + masses[-1] * (start + _harmonic(batch) / times.rate_per_s))


def exponential_least_bound_s(times: ExponentialTimes, batch: int, bins: int) -> float:
    """Return the bound of equation 27 at the boundaries that minimize it: (1 + x_1) / rate (Corollary A.1.1)."""
    # Its choice of x_{k-1} makes the innermost bracket of x_1 + e^-x_1 (.. (x_{k-1} + e^-x_{k-1} H_B)) x_{k-1} + 1, and
    # so on outwards. Throughput is at least B rate / (1 + x_1), and x_1 goes to 0 as the number of bins grows.
    steps = service.exponential_steps(batch, bins)
    first = steps[0] if len(steps) else _harmonic(batch) - 1
    return float(1 + first) / times.rate_per_s


def _harmonic(n: int) -> float:
    return float(np.sum(1 / np.arange(1, n + 1)))


def gain(times: ServiceTimes, cuts_s: npt.ArrayLike, batch: int, confusion: Floats | None = None) -> float:
    """Return (throughput with these bins) / (throughput with a single bin) - 1."""
    return expected_batch_s(times, [], batch) / expected_batch_s(times, cuts_s, batch, confusion) - 1


def cuts_of(times: ServiceTimes, batch: int, bins: int, rule: str) -> Floats:
    """Return [k - 1] the boundaries that the named rule chooses (``RULES``)."""
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
    """Return up to ``bins`` - 1 boundaries for lengths ``tokens`` [n], each half a token above its bin's longest."""
    lengths = np.asarray(tokens, float)
    if lengths.size and (lengths != np.rint(lengths)).any():
        raise InputError("tokens must be whole numbers; round predicted lengths first")
    times = service.SampledTimes(lengths)
    cuts = np.unique(np.floor(cuts_of(times, batch, bins, rule)))
    return [float(cut) + 0.5 for cut in cuts if cut < float(times.quantile(1.0))]


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
) -> list[Served]:
    """Simulate one run for each seed, with Poisson arrivals at ``rate_rps`` or, if it is infinite, all at once.

    Each request is in its true bin or, with ``confusion``, in a bin drawn from the matrix's row of its true bin.
    """
    # The same seed draws the same requests for all bins, rates and confusions.
    if requests < 1 or math.isnan(rate_rps) or rate_rps <= 0:
        raise InputError(f"a run needs at least one request and a rate above 0; they are {requests} and {rate_rps:g}")
    cuts = service.check_cuts(cuts_s)
    served = []
    for seed in seeds:
        gaps, sizes, predictions = np.random.default_rng(seed).spawn(3)
        service_s = np.asarray(times.quantile(sizes.random(requests)))
        arrival_s = np.cumsum(gaps.standard_exponential(requests)) / rate_rps
        bins = service.bin_of(service_s, cuts)
        if confusion is not None:
            bins = confuse(bins, confusion, predictions.random(requests))
        served.append(serve(arrival_s, service_s, bins, batch=batch, num_bins=len(cuts) + 1, servers=servers))
    return served


@dataclass(frozen=True, eq=False)
class Bins:
    """Results for one number of bins."""

    bins: int
    cuts_s: Floats  # [k - 1] their boundaries in service time
    batch_s: float  # expected service time of a batch
    throughput_rps: float  # requests a second of one server that always has a batch
    simulated_rps: Estimate = UNKNOWN
    latency_s: float = math.nan  # expected latency at the study's rate with infinitely many servers; NaN without a rate
    simulated_latency_s: Estimate = UNKNOWN
    accuracy: float = 1.0  # share of requests in their true bin


@dataclass(frozen=True, eq=False)
class MultiBinStudy:
    """Throughput and latency for several numbers of bins."""

    batch: int  # requests in a batch
    rule: str
    capacity_rps: float  # limit of infinitely many bins
    one_bin_rps: float  # throughput of a single bin
    rows: Sequence[Bins]  # by number of bins
    rate_rps: float = math.nan  # arrival rate for latencies, or NaN
    target_rps: float = math.nan  # throughput to reach, or NaN
    bins_needed: int | None = None  # smallest number of bins that reaches the target; None: no number up to MAX_BINS
    # Arrival rates, and by number of bins the throughput of one server there (Figure 3).
    saturation: tuple[Floats, Mapping[int, Sequence[Estimate]]] | None = None
    # Probabilities of a neighbouring bin, and by number of bins the throughput (Figure 8).
    robustness: tuple[Floats, Mapping[int, Floats]] | None = None
    metadata: Sequence[str] = field(default_factory=tuple)  # description of the question, for headings

    def overloads(self, row: Bins) -> bool:
        """Return whether requests arrive faster than one server serves them with the row's bins."""
        return math.isfinite(self.rate_rps) and self.rate_rps >= row.throughput_rps


def multibin_study(  # noqa: C901 - one branch for each optional part of the study
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
    """Compute theory and simulation for several numbers of bins.

    Args:
        rate_rps: Arrivals per second, for latencies; NaN leaves latencies out.
        target_share: Share of the capacity to reach, below 1; NaN: no target.
        error: Probability of each neighbouring bin (Section 6.2).
        accuracy: Share of correct predictions, by number of bins. All errors are one bin off.
        requests: Requests of a simulated run. 0 means no simulation.
        curves: Whether to compute saturation and robustness.
    """
    accuracies = dict(accuracy or {})
    has_target, has_rate = not math.isnan(target_share), not math.isnan(rate_rps)
    service.check_count("batch", batch)
    for count in bins:
        service.check_count("bins", count)
        if count > MAX_BINS:
            raise InputError(f"bins must be at most {MAX_BINS:,}; they are {count:,}; request fewer")
    if extra := [k for k in accuracies if k not in bins]:
        raise InputError(
            f"an accuracy must belong to a requested number of bins ({', '.join(map(str, bins))}); one was "
            f"given for {extra[0]} bins"
        )
    if has_target and not 0 < target_share < 1:
        raise InputError(f"the target must be a share below 1 of the capacity, and above 0; it is {target_share:g}")
    if has_rate and not (math.isfinite(rate_rps) and rate_rps > 0):
        raise InputError(f"the arrival rate must be a number above 0 requests a second; it is {rate_rps:g}")
    cuts = {k: cuts_of(times, batch, k, rule) for k in dict.fromkeys(bins)}
    confusions = {k: confusion_of_accuracy(k, accuracies[k]) if k in accuracies else neighbours(k, error) for k in cuts}
    capacity = capacity_rps(times, batch)

    def simulated_rps(k: int, rate: float, seeds: Iterable[int]) -> Estimate:
        simulated = runs(times, cuts[k], batch, rate_rps=rate, requests=requests, seeds=seeds, confusion=confusions[k])
        return mean_estimate([run.throughput_rps for run in simulated], LEVEL)

    rows = []
    for k, confusion in confusions.items():
        latency, simulated_latency = math.nan, UNKNOWN
        if has_rate:
            latency = latency_s(times, cuts[k], batch, rate_rps, confusion)
        if has_rate and requests:
            unlimited = runs(
                times, cuts[k], batch,
                rate_rps=rate_rps, servers=None, requests=requests, seeds=range(seeds), confusion=confusion,
            )  # fmt: skip
            simulated_latency = mean_estimate([run.latency_s for run in unlimited], LEVEL)
        batch_s = expected_batch_s(times, cuts[k], batch, confusion)
        served_rps = throughput_rps(times, cuts[k], batch, confusion)
        simulated = simulated_rps(k, math.inf, range(seeds)) if requests else UNKNOWN
        right = float(times.masses(cuts[k]) @ np.diag(confusion))
        rows.append(Bins(k, cuts[k], batch_s, served_rps, simulated, latency, simulated_latency, right))
    needed = saturation = robustness = None
    if has_target:
        needed = bins_for(
            times, batch, target_share * capacity, lambda k: cuts_of(times, batch, k, rule), most=MAX_BINS
        )
    if curves and requests:
        rates = np.linspace(0.1, 1.3, 13) * capacity
        saturation = rates, {k: [simulated_rps(k, rate, (0, 1)) for rate in rates] for k in cuts}
    if curves:
        by_error = {
            k: np.array([throughput_rps(times, c, batch, neighbours(k, p)) for p in ERRORS]) for k, c in cuts.items()
        }
        robustness = np.array(ERRORS), by_error
    return MultiBinStudy(
        batch=batch,
        rule=rule,
        capacity_rps=capacity,
        one_bin_rps=throughput_rps(times, [], batch),
        rows=rows,
        rate_rps=rate_rps,
        target_rps=target_share * capacity,
        bins_needed=needed,
        saturation=saturation,
        robustness=robustness,
        metadata=tuple(metadata),
    )
