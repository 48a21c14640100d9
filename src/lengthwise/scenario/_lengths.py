"""Length distributions as files write them: ``prompt = { kind = "uniform", low = 64, high = 512 }``."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from lengthwise import workload
from lengthwise.scenario._values import NotNan, Section
from lengthwise.schema.errors import InputError

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
