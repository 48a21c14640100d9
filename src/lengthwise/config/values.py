"""Defines types of values in files: durations, counts, length distributions and arrival processes."""

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
    """Return the seconds of a text such as "200ms" or "1h"; raises ValueError. Other values do not change."""
    if not isinstance(value, str):
        return value
    if found := _DURATION.fullmatch(value.strip().lower()):
        with suppress(ValueError):
            return float(found[1]) * _UNITS_S[found[2]]
    if _DURATION.fullmatch(value.strip().lower().removeprefix("-")):
        raise ValueError(f"must not be negative; it is {value!r}")
    raise ValueError(f'must be seconds (2.5) or a text with a unit ("200ms", "2s", "5min", "1h"); it is {value!r}')


def _number(value: Any) -> Any:
    if isinstance(value, float) and math.isnan(value):
        raise ValueError("must be a number")
    return value


Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
NotNan = Annotated[float, BeforeValidator(_number)]
Seconds = Annotated[NotNan, BeforeValidator(seconds), Field(gt=0)]  # above 0; inf is allowed and means no limit
Wait = Annotated[NotNan, BeforeValidator(seconds), Field(ge=0)]  # seconds, at least 0
Share = Annotated[NotNan, Field(gt=0, le=1)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A table of a file: unknown keys are errors, and values are not converted to other types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=True, defer_build=True)


@contextmanager
def input_error_as_value_error() -> Iterator[None]:
    """Raise an InputError of the block as a ValueError, which pydantic reports with the key of the value."""
    try:
        yield
    except InputError as error:
        raise ValueError(str(error)) from error


_Floor = Annotated[NotNan, Field(ge=0)]


class _Length(Section):
    distribution: ClassVar[Callable[..., workload.Marginal]]

    def build(self) -> workload.Marginal:
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
    """Zipf: the k-th length, counted from ``low``, has weight k**-theta, so that short lengths are frequent."""

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
        """Return the distribution. Raises InputError unless the keys are one of the four pairs."""
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
    """Normal with ``mean`` and ``sd`` (of the normal before truncation), truncated to ``low`` .. ``high``."""

    distribution = workload.TruncatedNormal
    kind: Literal["truncated_normal"] = "truncated_normal"
    mean: float
    sd: float
    low: _Floor = 1.0
    high: NotNan = float("inf")


class SkewNormalLength(_Length):
    """Skew normal, given by its moments and restricted to ``low`` .. ``high``."""

    distribution = workload.SkewNormal
    kind: Literal["skew_normal"] = "skew_normal"
    mean: float
    sd: float
    skewness: float = 0.0
    low: _Floor = 1.0
    high: NotNan = float("inf")


class QuantilesLength(_Length):
    """Quantiles: ``tokens`` at ``levels`` from 0 to 1; or ``mean``, ``median``, ``p90`` and ``high``."""

    kind: Literal["quantiles"] = "quantiles"
    levels: list[float] | None = None
    tokens: list[float] | None = None
    mean: float | None = None
    median: float | None = None
    p90: float | None = None
    low: _Floor = 1.0
    high: float | None = None

    def build(self) -> workload.Marginal:
        """Return the distribution. Raises InputError unless the keys are one of the two sets."""
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


_Distribution = (
    FixedLength | UniformLength | ZipfLength | LogNormalLength | TruncatedNormalLength | SkewNormalLength
    | QuantilesLength | EmpiricalLength
)  # fmt: skip
Length = Annotated[_Distribution, Field(discriminator="kind")]


class NoLimit(Section):
    """No client limits its output."""

    kind: Literal["none"] = "none"

    def build(self) -> None:
        """Return None."""


class MultipleLimit(Section):
    """``times`` the output of the request, rounded up."""

    kind: Literal["multiple"] = "multiple"
    times: Annotated[NotNan, Field(ge=1, le=1e6)]

    def build(self) -> float:
        """Return the factor."""
        return self.times


MaxTokens = Annotated[_Distribution | NoLimit | MultipleLimit, Field(discriminator="kind")]


def _delay_table(value: Any) -> Any:
    return value if isinstance(value, dict) else {"median": value}


class DelayTable(Section):
    """A lognormal delay by its median and ``sigma``; a bare duration is constant."""

    median: Wait
    sigma: Annotated[NotNan, Field(ge=0, le=10)] = 0.0

    def build(self) -> workload.Delay:
        """Return the delay."""
        return workload.Delay(self.median, self.sigma)


DelayTime = Annotated[DelayTable, BeforeValidator(_delay_table)]


def _by_kind(union: Any) -> dict[str, type[Section]]:
    return {one.model_fields["kind"].default: one for one in get_args(get_args(union)[0])}


LENGTHS = _by_kind(Length)
LIMITS = _by_kind(MaxTokens)
_Cv = Annotated[NotNan, Field(gt=0)]


class _Arrivals(Section):
    """Base of the arrival processes of [workload.arrivals]: ``process`` is the class that a table describes.

    The rate is ``workload.request_rate`` or ``session_rate`` and no key of the table, so that a sweep changes one key.
    """

    needs_rate: ClassVar[bool] = True
    process: ClassVar[Callable[..., workload.Arrivals]]

    def build(self, rate_rps: float) -> workload.Arrivals:
        rate = {"rate_rps": rate_rps} if self.needs_rate else {}
        return type(self).process(**rate, **self.model_dump(exclude={"kind"}))

    @model_validator(mode="after")
    def _check_build(self) -> Self:
        with input_error_as_value_error():
            self.build(1.0)
        return self


class PoissonArrivals(_Arrivals):
    """Exponential gaps between arrivals; the default if only ``request_rate`` is given."""

    process = workload.Poisson
    kind: Literal["poisson"] = "poisson"


class ConstantArrivals(_Arrivals):
    """Equal gaps between arrivals."""

    process = workload.Constant
    kind: Literal["constant"] = "constant"


class GammaArrivals(_Arrivals):
    """Gamma gaps with coefficient of variation ``cv``: above 1 bursty, below 1 regular."""

    process = workload.Gamma
    kind: Literal["gamma"] = "gamma"
    cv: _Cv


class WeibullArrivals(_Arrivals):
    """Weibull gaps with coefficient of variation ``cv``."""

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
    """Poisson arrivals whose rate is ``rates_rps[i]`` from the time ``times_s[i]``."""

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
