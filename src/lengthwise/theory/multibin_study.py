"""A question as people ask it: what so many bins are worth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import UNKNOWN, Estimate
from lengthwise.theory import boundaries, multibin, simulated
from lengthwise.theory.confusion import neighbours, of_accuracy
from lengthwise.theory.sampled import SampledTimes
from lengthwise.theory.service import ExponentialTimes, Floats, ServiceTimes, UniformTimes

RULES = ("optimal", "equal", "learned")
"""``optimal`` is what the paper proves for its two distributions, and learned boundaries for any other."""

MOST_BINS = 1024
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
        facts: What was asked, for people.
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
    facts: Sequence[str] = field(default_factory=tuple)

    def overloads(self, row: Bins) -> bool:
        """Whether one server with a row's bins cannot keep up with the arrivals, so that its queue grows for ever."""
        return math.isfinite(self.rate_rps) and self.rate_rps >= row.throughput_rps


def cuts_of(times: ServiceTimes, batch: int, bins: int, rule: str) -> Floats:
    """[k - 1] boundaries by the name of a rule."""
    if rule not in RULES:
        raise InputError(f"boundaries must be one of {', '.join(RULES)}; they are {rule!r}")
    if rule == "equal":
        return boundaries.equal_mass(times, bins)
    if rule == "optimal" and isinstance(times, UniformTimes):
        return boundaries.uniform_optimal(times, bins)
    if rule == "optimal" and isinstance(times, ExponentialTimes):
        return boundaries.exponential_recursion(times, batch, bins)
    return boundaries.learned(times, batch, bins)


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
    facts: Sequence[str] = (),
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
        facts: Passed on.
    """
    given = dict(accuracy or {})
    _check(batch, bins, given, target_share)
    if not math.isnan(rate_rps) and not (math.isfinite(rate_rps) and rate_rps > 0):
        raise InputError(f"the arrival rate must be a number above 0 requests a second; it is {rate_rps:g}")
    cut = {k: cuts_of(times, batch, k, rule) for k in dict.fromkeys(bins)}
    wrong = {k: of_accuracy(k, given[k]) if k in given else neighbours(k, error) for k in cut}
    rows = [_row(times, batch, cut[k], wrong[k], rate_rps, requests, seeds) for k in cut]
    capacity = multibin.capacity_rps(times, batch)
    target = target_share * capacity
    needed = None
    if not math.isnan(target_share):
        needed = multibin.bins_for(
            times, batch, target, lambda k: cuts_of(times, batch, k, rule), most=MOST_BINS
        )
    return MultiBinStudy(
        batch,
        rule,
        capacity,
        multibin.throughput_rps(times, [], batch),
        rows,
        rate_rps,
        target,
        needed,
        _saturation(times, batch, cut, wrong, capacity, requests) if curves and requests else None,
        _robustness(times, batch, cut) if curves else None,
        tuple(facts),
    )


def _check(batch: int, bins: Sequence[int], accuracy: Mapping[int, float], target_share: float) -> None:
    boundaries.checked_count("batch", batch)
    for count in bins:
        boundaries.checked_count("bins", count)
        if count > MOST_BINS:
            raise InputError(f"bins must be at most {MOST_BINS:,}; they are {count:,}; ask for fewer")
    if stray := [k for k in accuracy if k not in bins]:
        raise InputError(
            f"an accuracy belongs to a number of bins that is asked for ({', '.join(map(str, bins))}); one was "
            f"given for {stray[0]} bins"
        )
    if not math.isnan(target_share) and not 0 < target_share < 1:
        raise InputError(
            f"the target must be a share below 1 of the capacity, and above 0; it is {target_share:g}"
        )


def _row(
    times: ServiceTimes,
    batch: int,
    cuts_s: Floats,
    wrong: Floats,
    rate_rps: float,
    requests: int,
    seeds: int,
) -> Bins:
    timed = not math.isnan(rate_rps)
    shared = {"requests": requests, "seeds": range(seeds), "confusion": wrong}
    idle, busy = UNKNOWN, UNKNOWN
    if requests:
        busy = simulated.throughput(simulated.runs(times, cuts_s, batch, **shared))  # type: ignore[arg-type]
    if requests and timed:
        calm = simulated.runs(times, cuts_s, batch, rate_rps=rate_rps, servers=None, **shared)  # type: ignore[arg-type]
        idle = simulated.latency(calm)
    return Bins(
        len(cuts_s) + 1,
        cuts_s,
        multibin.expected_batch_s(times, cuts_s, batch, wrong),
        multibin.throughput_rps(times, cuts_s, batch, wrong),
        busy,
        multibin.latency_s(times, cuts_s, batch, rate_rps, wrong) if timed else math.nan,
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
            simulated.throughput(
                simulated.runs(
                    times, cuts_s, batch, rate_rps=rate, requests=requests, seeds=(0, 1), confusion=wrong[k]
                )
            )
            for rate in rates
        ]
        for k, cuts_s in cut.items()
    }
    return rates, found


def _robustness(
    times: ServiceTimes, batch: int, cut: Mapping[int, Floats]
) -> tuple[Floats, dict[int, Floats]]:
    found = {
        k: np.array([multibin.throughput_rps(times, c, batch, neighbours(k, p)) for p in ERRORS])
        for k, c in cut.items()
    }
    return np.array(ERRORS), found
