"""What a comparison of two runs says."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lengthwise.metrics.slo import Slo
from lengthwise.metrics.summary import Counts
from lengthwise.schema.errors import UnknownNameError


@dataclass(frozen=True)
class ClientSeconds:
    """What of each TTFT and JCT is the client's own: from when a request was due until it was sent.

    Attributes:
        mean_s: As much of the mean TTFT and of the mean JCT.
        p50_s: Median.
        max_s: Largest.
    """

    mean_s: float
    p50_s: float
    max_s: float


@dataclass(frozen=True)
class Side:
    """One of the two runs.

    Attributes:
        name: Of its records, or its source.
        source: Where it comes from, as in Measured.
        counts: Its requests by bucket, warm-up left out.
        span_s: Seconds from the end of the warm-up to its last event.
        client: The client's own seconds; None where there was none, or it did not say.
    """

    name: str
    source: str
    counts: Counts
    span_s: float
    client: ClientSeconds | None = None


@dataclass(frozen=True)
class MetricError:
    """How far ``a`` is off ``b`` in one number.

    Attributes:
        metric: "ttft", "tpot", "tbt", "jct", "queueing_delay", "normalized_latency" (in seconds),
            "requests_per_s", "output_tokens_per_s", "goodput" (good requests a second) or "within_slo".
        stat: "mean", "p50", "p90", "p95" or "p99"; "" for rates and the share.
        a: The prediction.
        b: The truth.
        low: Lower end of the interval of ``error``; NaN where it is not known.
        high: Upper end.
    """

    metric: str
    stat: str
    a: float
    b: float
    low: float = math.nan
    high: float = math.nan

    @property
    def key(self) -> str:
        """Metric and statistic in one: ttft.p95, or requests_per_s."""
        return f"{self.metric}.{self.stat}" if self.stat else self.metric

    @property
    def error(self) -> float:
        """(a - b) / b; NaN where b is 0."""
        return (self.a - self.b) / self.b if self.b else math.nan

    @property
    def has_interval(self) -> bool:
        """Whether the interval is known."""
        return not math.isnan(self.low)

    @property
    def least(self) -> float:
        """The smallest error either way that its interval allows; without one the error itself."""
        if not self.has_interval:
            return abs(self.error)
        return max(0.0, self.low, -self.high)


@dataclass(frozen=True)
class MetricDistance:
    """How far two whole distributions lie apart.

    Attributes:
        metric: As in MetricError.
        count_a: Values of a.
        count_b: Values of b.
        kolmogorov_smirnov: Largest difference of the shares that are at most x, over all x: 0 to 1.
        wasserstein: Mean distance of equal quantiles, over the mean of b.
        mape: Mean of |a - b| / b over requests, paired; NaN without pairs.
        median_ape: Its median.
    """

    metric: str
    count_a: int
    count_b: int
    kolmogorov_smirnov: float
    wasserstein: float
    mape: float = math.nan
    median_ape: float = math.nan


@dataclass(frozen=True)
class Comparison:
    """How far run ``a`` is off run ``b``, which is taken for the truth.

    Attributes:
        a: The prediction.
        b: The truth.
        paired: Whether both are of the same requests, compared one by one.
        errors: By metric and statistic.
        distances: By metric, for those with a value a request (or token).
        doubts: What limits the trust, a sentence each.
        level: Confidence level of the intervals.
        draws: Of the bootstrap.
        warmup_s: Requests that arrived before are left out.
        slo: Limits for goodput, or None.
    """

    a: Side
    b: Side
    paired: bool
    errors: tuple[MetricError, ...]
    distances: tuple[MetricDistance, ...]
    doubts: tuple[str, ...]
    level: float
    draws: int
    warmup_s: float
    slo: Slo | None = None

    def __getitem__(self, key: str) -> MetricError:
        """The error of "ttft.p95" or "requests_per_s"; raises UnknownNameError where it is not told."""
        found = {one.key: one for one in self.errors}
        if key not in found:
            raise UnknownNameError("number in this comparison", key, found)
        return found[key]
