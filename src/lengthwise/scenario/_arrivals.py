"""Arrival processes as files write them: ``arrivals = { kind = "gamma", cv = 1.5 }`` at ``request_rate``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from lengthwise import workload
from lengthwise.scenario._values import NotNan, Section
from lengthwise.schema.errors import InputError

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
    PoissonArrivals
    | ConstantArrivals
    | GammaArrivals
    | WeibullArrivals
    | ElisArrivals
    | AllAtOnce
    | RateProfile,
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
