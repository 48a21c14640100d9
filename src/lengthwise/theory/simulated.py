"""The batch server run on drawn requests, beside the formulas: means over seeds, with intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import Estimate
from lengthwise.theory.batch_server import Served, serve
from lengthwise.theory.confusion import confuse
from lengthwise.theory.service import ServiceTimes, bin_of, checked_cuts

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
        raise InputError(
            f"a run needs at least one request and a rate above 0; they are {requests} and {rate_rps:g}"
        )
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


def throughput(served: Sequence[Served]) -> Estimate:
    """Requests a second, first arrival to last end, over the runs."""
    return estimate([run.throughput_rps for run in served])


def latency(served: Sequence[Served]) -> Estimate:
    """Mean seconds from arrival to end, over the runs."""
    return estimate([run.latency_s for run in served])


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of independent runs and the half-width of its t interval; one run has none."""
    from scipy.special import stdtrit

    n = len(values)
    if n < 2:
        return Estimate(float(values[0])) if n else Estimate(math.nan)
    half = float(stdtrit(n - 1, (1 + LEVEL) / 2)) * float(np.std(values, ddof=1)) / math.sqrt(n)
    return Estimate(float(np.mean(values)), half)
