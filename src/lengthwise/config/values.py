"""Types of single values: durations, counts, length distributions and arrival processes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from lengthwise import workload
from lengthwise.schema.errors import InputError

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*(us|ms|s|min|h)")


def seconds(value: Any) -> Any:
    """Return the seconds of "200ms", "2s", "1.5min" or "1h"; other values than texts stay; raise ValueError."""
    if not isinstance(value, str):
        return value
    if found := _DURATION.fullmatch(value.strip().lower()):
        with suppress(ValueError):
            return float(found[1]) * _UNITS_S[found[2]]
    raise ValueError('must be seconds (2.5) or a text with a unit ("200ms", "2s", "5min", "1h")')


def _number(value: Any) -> Any:
    if isinstance(value, float) and math.isnan(value):
        raise ValueError("must be a number")
    return value


Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
NotNan = Annotated[float, BeforeValidator(_number)]
Seconds = Annotated[NotNan, BeforeValidator(seconds), Field(gt=0)]
"""Above 0; inf is allowed and means no limit."""
Wait = Annotated[NotNan, BeforeValidator(seconds), Field(ge=0)]
"""Seconds from 0."""
Share = Annotated[NotNan, Field(gt=0, le=1)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A table of a file: an unknown key is an error, and no value is converted into another type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=True, defer_build=True)


@contextmanager
def input_error_as_value_error() -> Iterator[None]:
    """Raise an InputError as a ValueError, which pydantic reports under the key that it validates."""
    try:
        yield
    except InputError as error:
        raise ValueError(str(error)) from error


_Floor = Annotated[NotNan, Field(ge=0)]


class _Length(Section):
    """A table whose keys are the arguments of a distribution of ``workload``."""

    distribution: ClassVar[Callable[..., workload.Marginal]]

    def build(self) -> workload.Marginal:
        """Return the distribution; raise InputError for parameters outside its domain."""
        return type(self).distribution(**self.model_dump(exclude={"kind"}))

    @model_validator(mode="after")
    def _check_build(self) -> Self:
        with input_error_as_value_error():
            self.build()
        return self


class FixedLength(_Length):
    """Always ``tokens``; a bare number means the same."""

    distribution = workload.Fixed
    kind: Literal["fixed"] = "fixed"
    tokens: int


class UniformLength(_Length):
    """Uniform over the integers from ``low`` to ``high``."""

    distribution = workload.Uniform
    kind: Literal["uniform"] = "uniform"
    low: int
    high: int


class ZipfLength(_Length):
    """Zipf: the k-th length from ``low`` on has weight k**-theta, so short lengths are frequent."""

    distribution = workload.Zipf
    kind: Literal["zipf"] = "zipf"
    low: int
    high: int
    theta: float = 0.6


class LogNormalLength(_Length):
    """Log-normal, by ``median`` with ``sigma`` or ``p90``, or by ``mean`` with ``cv`` or ``sd``."""

    kind: Literal["lognormal"] = "lognormal"
    median: float | None = None
    sigma: float | None = None
    p90: float | None = None
    mean: float | None = None
    cv: float | None = None
    sd: float | None = None

    def build(self) -> workload.Marginal:
        """Return the distribution; raise InputError unless the keys are one of the four pairs."""
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
        found = ", ".join(sorted(given)) or "none of them"
        pairs = "median and sigma, median and p90, mean and cv, or mean and sd"
        raise InputError(f"a lognormal takes {pairs}; given were: {found}")


class TruncatedNormalLength(_Length):
    """Normal of ``mean`` and ``sd`` (before truncation), truncated to ``low`` .. ``high``."""

    distribution = workload.TruncatedNormal
    kind: Literal["truncated_normal"] = "truncated_normal"
    mean: float
    sd: float
    low: _Floor = 1.0
    high: NotNan = float("inf")


class SkewNormalLength(_Length):
    """Skew normal by its moments, within ``low`` .. ``high``."""

    distribution = workload.SkewNormal
    kind: Literal["skew_normal"] = "skew_normal"
    mean: float
    sd: float
    skewness: float = 0.0
    low: _Floor = 1.0
    high: NotNan = float("inf")


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
        """Return the distribution; raise InputError unless the keys are one of the two sets."""
        given = self.model_fields_set - {"kind", "low"}
        if self.levels is not None and self.tokens is not None and given == {"levels", "tokens"}:
            return workload.Quantiles(self.levels, self.tokens)
        statistics = [value for value in (self.mean, self.median, self.p90, self.high) if value is not None]
        if len(statistics) < 4 or given != {"mean", "median", "p90", "high"}:
            raise InputError("quantiles take levels and tokens, or mean, median, p90 and high (and low)")
        mean, median, p90, high = statistics
        return workload.Quantiles.from_mean_median_p90(mean, median, p90, low=self.low, high=high)


class EmpiricalLength(_Length):
    """The observed lengths ``tokens``, with their ``weights``."""

    distribution = workload.Empirical
    kind: Literal["empirical"] = "empirical"
    tokens: list[float]
    weights: list[float] | None = None


Length = Annotated[
    FixedLength | UniformLength | ZipfLength | LogNormalLength | TruncatedNormalLength | SkewNormalLength
    | QuantilesLength | EmpiricalLength,
    Field(discriminator="kind"),
]  # fmt: skip


def _by_kind(union: Any) -> dict[str, type[Section]]:
    return {one.model_fields["kind"].default: one for one in get_args(get_args(union)[0])}


LENGTHS = _by_kind(Length)
_Cv = Annotated[NotNan, Field(gt=0)]


class _Arrivals(Section):
    """A process; its rate is ``workload.request_rate``, so that a sweep over rates names one key."""

    needs_rate: ClassVar[bool] = True
    process: ClassVar[Callable[..., workload.Arrivals]]

    def build(self, rate_rps: float) -> workload.Arrivals:
        """Return the process at this rate; raise InputError for parameters outside its domain."""
        rate = {"rate_rps": rate_rps} if self.needs_rate else {}
        return type(self).process(**rate, **self.model_dump(exclude={"kind"}))

    @model_validator(mode="after")
    def _check_build(self) -> Self:
        with input_error_as_value_error():
            self.build(1.0)
        return self


class PoissonArrivals(_Arrivals):
    """Exponential gaps; what a bare ``request_rate`` means."""

    process = workload.Poisson
    kind: Literal["poisson"] = "poisson"


class ConstantArrivals(_Arrivals):
    """Equal gaps."""

    process = workload.Constant
    kind: Literal["constant"] = "constant"


class GammaArrivals(_Arrivals):
    """Gamma gaps with this coefficient of variation: above 1 bursty, below 1 regular."""

    process = workload.Gamma
    kind: Literal["gamma"] = "gamma"
    cv: _Cv


class WeibullArrivals(_Arrivals):
    """Weibull gaps with this coefficient of variation."""

    process = workload.Weibull
    kind: Literal["weibull"] = "weibull"
    cv: _Cv


class ElisArrivals(_Arrivals):
    """Gamma gaps of shape 0.73, as ELIS measured them."""

    process = workload.elis_gamma
    kind: Literal["elis"] = "elis"


class AllAtOnce(_Arrivals):
    """All requests arrive at time 0."""

    process = workload.AllAtOnce
    needs_rate: ClassVar[bool] = False
    kind: Literal["all_at_once"] = "all_at_once"


class RateProfile(_Arrivals):
    """Poisson arrivals at ``rates_rps[i]`` from ``times_s[i]`` on."""

    process = workload.RateProfile
    needs_rate: ClassVar[bool] = False
    kind: Literal["rate_profile"] = "rate_profile"
    times_s: list[float]
    rates_rps: list[float]
    linear: bool = False
    period_s: float | None = None


Arrivals = Annotated[
    PoissonArrivals | ConstantArrivals | GammaArrivals | WeibullArrivals | ElisArrivals | AllAtOnce | RateProfile,
    Field(discriminator="kind"),
]
ARRIVALS = _by_kind(Arrivals)
