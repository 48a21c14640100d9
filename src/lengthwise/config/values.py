"""Types of single values: durations and counts."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from lengthwise import workload
from lengthwise.schema.errors import InputError

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*(us|ms|s|min|h)")


def seconds(value: Any) -> Any:
    """Seconds of "200ms", "2s", "1.5min" or "1h"; any other value comes back as it is.

    Raises:
        ValueError: A text that is no duration.
    """
    if not isinstance(value, str):
        return value
    found = _DURATION.fullmatch(value.strip().lower())
    try:
        if found:
            return float(found[1]) * _UNITS_S[found[2]]
    except ValueError:
        pass
    raise ValueError('must be seconds (2.5) or a text with a unit ("200ms", "2s", "5min", "1h")')


def _number(value: float) -> float:
    if math.isnan(value):
        raise ValueError("must be a number")
    return value


Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
NotNan = Annotated[float, BeforeValidator(lambda v: _number(v) if isinstance(v, float) else v)]
Seconds = Annotated[NotNan, BeforeValidator(seconds), Field(gt=0)]
"""Above 0; inf is allowed and means no limit."""
Wait = Annotated[NotNan, BeforeValidator(seconds), Field(ge=0)]
"""Seconds from 0."""
Share = Annotated[NotNan, Field(gt=0, le=1)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A table of a scenario file: no key is ignored, no value is bent into another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=True)


_Floor = Annotated[NotNan, Field(ge=0)]


class _Length(Section):
    """A table whose keys are the arguments of the distribution of the same name in ``workload``."""

    def build(self) -> workload.Marginal:
        """The distribution; raises InputError where its numbers do not make one."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _buildable(self) -> Self:
        try:
            self.build()
        except InputError as error:
            raise ValueError(str(error)) from error
        return self


class FixedLength(_Length):
    """Always ``tokens``; a bare number means the same."""

    kind: Literal["fixed"] = "fixed"
    tokens: int

    def build(self) -> workload.Marginal:
        """The distribution."""
        return workload.Fixed(self.tokens)


class UniformLength(_Length):
    """Every length from ``low`` to ``high`` alike."""

    kind: Literal["uniform"] = "uniform"
    low: int
    high: int

    def build(self) -> workload.Marginal:
        """The distribution."""
        return workload.Uniform(self.low, self.high)


class ZipfLength(_Length):
    """Short ones often, long ones rarely: the k-th length from ``low`` on with weight k**-theta."""

    kind: Literal["zipf"] = "zipf"
    low: int
    high: int
    theta: float = 0.6

    def build(self) -> workload.Marginal:
        """The distribution."""
        return workload.Zipf(self.low, self.high, self.theta)


class LogNormalLength(_Length):
    """By ``median`` with ``sigma`` or ``p90``, or by ``mean`` with ``cv`` or ``sd``."""

    kind: Literal["lognormal"] = "lognormal"
    median: float | None = None
    sigma: float | None = None
    p90: float | None = None
    mean: float | None = None
    cv: float | None = None
    sd: float | None = None

    def build(self) -> workload.Marginal:
        """The distribution."""
        ways = {
            ("median", "sigma"): workload.LogNormal,
            ("median", "p90"): workload.LogNormal.from_median_p90,
            ("mean", "cv"): workload.LogNormal.from_mean_cv,
            ("mean", "sd"): workload.LogNormal.from_mean_sd,
        }
        given = self.model_fields_set - {"kind"}
        for keys, make in ways.items():
            if given == set(keys):
                return make(*(getattr(self, key) for key in keys))
        raise InputError(
            "a lognormal takes median and sigma, median and p90, mean and cv, or mean and sd; "
            f"given were: {', '.join(sorted(given)) or 'none of them'}"
        )


class TruncatedNormalLength(_Length):
    """A normal of ``mean`` and ``sd`` (before the cut), drawn again until within ``low`` .. ``high``."""

    kind: Literal["truncated_normal"] = "truncated_normal"
    mean: float
    sd: float
    low: _Floor = 1.0
    high: NotNan = float("inf")

    def build(self) -> workload.Marginal:
        """The distribution."""
        return workload.TruncatedNormal(self.mean, self.sd, self.low, self.high)


class SkewNormalLength(_Length):
    """A skew normal by its moments, within ``low`` .. ``high``."""

    kind: Literal["skew_normal"] = "skew_normal"
    mean: float
    sd: float
    skewness: float = 0.0
    low: _Floor = 1.0
    high: NotNan = float("inf")

    def build(self) -> workload.Marginal:
        """The distribution."""
        return workload.SkewNormal(self.mean, self.sd, self.skewness, self.low, self.high)


class QuantilesLength(_Length):
    """A table of ``tokens`` at ``levels`` 0 .. 1; or ``mean``, ``median``, ``p90`` and ``high``."""

    kind: Literal["quantiles"] = "quantiles"
    levels: list[float] | None = None
    tokens: list[float] | None = None
    mean: float | None = None
    median: float | None = None
    p90: float | None = None
    low: _Floor = 1.0
    high: float | None = None

    def build(self) -> workload.Marginal:
        """The distribution."""
        given = self.model_fields_set - {"kind", "low"}
        if self.levels is not None and self.tokens is not None and given == {"levels", "tokens"}:
            return workload.Quantiles(self.levels, self.tokens)
        statistics = (self.mean, self.median, self.p90, self.high)
        if None in statistics or given != {"mean", "median", "p90", "high"}:
            raise InputError("quantiles take levels and tokens, or mean, median, p90 and high (and low)")
        mean, median, p90, high = (value for value in statistics if value is not None)
        return workload.Quantiles.from_mean_median_p90(mean, median, p90, low=self.low, high=high)


class EmpiricalLength(_Length):
    """The lengths that were seen, each as often as its weight says."""

    kind: Literal["empirical"] = "empirical"
    tokens: list[float]
    weights: list[float] | None = None

    def build(self) -> workload.Marginal:
        """The distribution."""
        return workload.Empirical(self.tokens, self.weights)


Length = Annotated[
    FixedLength
    | UniformLength
    | ZipfLength
    | LogNormalLength
    | TruncatedNormalLength
    | SkewNormalLength
    | QuantilesLength
    | EmpiricalLength,
    Field(discriminator="kind"),
]
LENGTHS: dict[str, type[Section]] = {
    "fixed": FixedLength,
    "uniform": UniformLength,
    "zipf": ZipfLength,
    "lognormal": LogNormalLength,
    "truncated_normal": TruncatedNormalLength,
    "skew_normal": SkewNormalLength,
    "quantiles": QuantilesLength,
    "empirical": EmpiricalLength,
}


_Cv = Annotated[NotNan, Field(gt=0)]


class _Arrivals(Section):
    """A process; its rate is ``workload.request_rate``, so that a sweep over rates names one key."""

    needs_rate: ClassVar[bool] = True

    def build(self, rate_rps: float) -> workload.Arrivals:
        """The process at this rate; raises InputError where the numbers do not make one."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _buildable(self) -> Self:
        try:
            self.build(1.0)
        except InputError as error:
            raise ValueError(str(error)) from error
        return self


class PoissonArrivals(_Arrivals):
    """Exponential gaps; what a bare ``request_rate`` means."""

    kind: Literal["poisson"] = "poisson"

    def build(self, rate_rps: float) -> workload.Arrivals:
        """The process at this rate."""
        return workload.Poisson(rate_rps)


class ConstantArrivals(_Arrivals):
    """Equal gaps."""

    kind: Literal["constant"] = "constant"

    def build(self, rate_rps: float) -> workload.Arrivals:
        """The process at this rate."""
        return workload.Constant(rate_rps)


class GammaArrivals(_Arrivals):
    """Gamma gaps with this coefficient of variation: above 1 bursty, below 1 regular."""

    kind: Literal["gamma"] = "gamma"
    cv: _Cv

    def build(self, rate_rps: float) -> workload.Arrivals:
        """The process at this rate."""
        return workload.Gamma(rate_rps, self.cv)


class WeibullArrivals(_Arrivals):
    """Weibull gaps with this coefficient of variation."""

    kind: Literal["weibull"] = "weibull"
    cv: _Cv

    def build(self, rate_rps: float) -> workload.Arrivals:
        """The process at this rate."""
        return workload.Weibull(rate_rps, self.cv)


class ElisArrivals(_Arrivals):
    """Gamma gaps of shape 0.73, as ELIS measured them."""

    kind: Literal["elis"] = "elis"

    def build(self, rate_rps: float) -> workload.Arrivals:
        """The process at this rate."""
        return workload.elis_gamma(rate_rps)


class AllAtOnce(_Arrivals):
    """Every request is there at time 0."""

    needs_rate: ClassVar[bool] = False
    kind: Literal["all_at_once"] = "all_at_once"

    def build(self, rate_rps: float) -> workload.Arrivals:  # noqa: ARG002 - the contract
        """The process."""
        return workload.AllAtOnce()


class RateProfile(_Arrivals):
    """Poisson arrivals at ``rates_rps[i]`` from ``times_s[i]`` on."""

    needs_rate: ClassVar[bool] = False
    kind: Literal["rate_profile"] = "rate_profile"
    times_s: list[float]
    rates_rps: list[float]
    linear: bool = False
    period_s: float | None = None

    def build(self, rate_rps: float) -> workload.Arrivals:  # noqa: ARG002 - the contract
        """The process."""
        return workload.RateProfile(self.times_s, self.rates_rps, self.linear, self.period_s)


Arrivals = Annotated[
    PoissonArrivals | ConstantArrivals | GammaArrivals | WeibullArrivals | ElisArrivals | AllAtOnce | RateProfile,
    Field(discriminator="kind"),
]
ARRIVALS: dict[str, type[Section]] = {
    "poisson": PoissonArrivals,
    "constant": ConstantArrivals,
    "gamma": GammaArrivals,
    "weibull": WeibullArrivals,
    "elis": ElisArrivals,
    "all_at_once": AllAtOnce,
    "rate_profile": RateProfile,
}
