"""Result of a calibration: cost tables, parameters with intervals, and errors on held-out requests."""

from __future__ import annotations

from dataclasses import dataclass

from lengthwise.schema.cost_tables import CostTables

METRICS = ("ttft", "tpot", "jct")
MIN_MEAN_ERROR = 0.1  # runs and tables disagree where the 95 % interval of a mean's error lies beyond this share
FAR, FAR_OFF = 3.0, 0.3
"""Tables whose kernels moved by more than FAR and whose means are still off by more than FAR_OFF likely belong to
another model or device than the runs. Correct tables may move as far (CPU rooflines do, by 4 to 6), and may miss as
much where they lack a cost (dense masks), but seldom both."""

FAR_HOST, MAX_HOST_SHARE = 30.0, 0.5
"""A host that takes more than FAR_HOST times its typical seconds, and more than MAX_HOST_SHARE of the time of steps (or
leaves means far off), likely absorbs what the kernels of wrong tables lack, so that they fit well all the same. The
host of a slow CPU takes up to 0.4 of steps whose kernels run on it as well."""
DEFAULT_HOST_S = {"host_step": 100e-6, "host_sequence": 1e-6}  # of a typical engine, where the tables hold none

MIN_INCREASE = 0.005  # errors that grow by less than half a percentage point do not deserve a warning


@dataclass(frozen=True)
class Parameter:
    """One fitted parameter."""

    name: str  # a key of ``parameters.LABELS``; "masked" only if requested, found, or in the given tables
    label: str
    unit: str  # "x" (a factor on the given tables) or "s"
    value: float  # ``prior`` if not determined, or if changing it helps no more than noise does
    low: float  # 95 % interval; that of the prior where not determined
    high: float
    prior: float  # value in the given tables
    determined: bool  # whether the runs determine it
    effect: float  # rms change of log predictions per prior deviation, after the others compensate
    bare: tuple[float, float] | None = None  # interval before it was widened to contain ``value``; None: not recorded


@dataclass(frozen=True)
class Score:
    """Error of one statistic of one metric on held-out requests: (simulated - measured) / measured."""

    run: str
    metric: str  # "ttft", "tpot" or "jct"
    statistic: str  # "mean", "p50", "p90", "p95", "p99", or "each": the mean absolute error of single requests
    measured: float  # seconds; NaN for "each"
    before: float  # error of the given tables
    after: float  # error of the calibrated tables
    low: float  # 95 % interval of ``after`` over blocks of time
    high: float


@dataclass(frozen=True)
class Change:
    """Mean absolute relative error of the time of a held-out request, before and after calibration."""

    metric: str
    before: float
    after: float
    low: float  # 95 % interval of ``after`` - ``before``
    high: float

    @property
    def is_worse(self) -> bool:
        """Whether the error grew significantly and by more than MIN_INCREASE."""
        return self.low > 0 and self.after - self.before > MIN_INCREASE


@dataclass(frozen=True)
class Load:
    """Measured and simulated numbers of "running" or of "waiting" requests (``name``) during a run."""

    run: str
    name: str
    at_s: tuple[float, ...]  # middles of time bins
    measured: tuple[float, ...]  # means in the bins
    simulated: tuple[float, ...]  # with the calibrated tables
    before: float  # mean absolute difference divided by the measured mean, with the given tables
    after: float  # with the calibrated tables


@dataclass(frozen=True)
class Curve:
    """Measured and simulated quantiles of a metric over a run's held-out requests, in seconds."""

    run: str
    metric: str
    levels: tuple[float, ...]  # from 0 to 1
    measured: tuple[float, ...]
    before: tuple[float, ...]  # simulated with the given tables
    after: tuple[float, ...]  # simulated with the calibrated tables


@dataclass(frozen=True)
class Calibration:
    """Calibrated cost tables, their fitted parameters, and their errors on held-out requests."""

    tables: CostTables  # their ``errors`` and ``reach`` come from this calibration
    parameters: tuple[Parameter, ...]
    scores: tuple[Score, ...]  # on held-out requests
    client_s: float  # outside the engine (HTTP, tokenization, network); equals ``front.request_s`` of the tables
    log_sd: float  # of log(measured / simulated) of held-out requests' mean times between tokens
    split: str  # sentence on what was fitted and what was held out
    fitted: int  # number of requests
    held_out: int  # number of requests
    simulations: int  # number of simulations run
    changes: tuple[Change, ...] = ()  # of errors on held-out requests, by metric
    loads: tuple[Load, ...] = ()  # running and waiting requests over time, where the runs recorded the engine's
    notes: tuple[str, ...] = ()
    curves: tuple[Curve, ...] = ()  # by run and metric
    host_share: float = 0.0  # share of the host in the time of all simulated steps
    origin: tuple[str, ...] = ()  # the ``notes`` on whether the runs belong to the deployment at all

    @property
    def determined(self) -> tuple[Parameter, ...]:
        """The parameters that the runs determine."""
        return tuple(p for p in self.parameters if p.determined)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on metrics for which the given tables were better on held-out requests."""
        return tuple(
            f"WORSE than the tables given: {c.metric.upper()} of single held-out requests is off by {c.after:.1%}, "
            f"before by {c.before:.1%} (the difference is {c.low:+.1%} to {c.high:+.1%})"
            for c in self.changes
            if c.is_worse
        )

    @property
    def has_changed(self) -> bool:
        """Whether any parameter changed."""
        return any(p.value != p.prior for p in self.parameters)

    @property
    def is_improvement(self) -> bool:
        """Whether no metric of held-out requests became significantly worse, or one became significantly better."""
        return not self.warnings or any(c.high < 0 for c in self.changes)

    @property
    def disagreement(self) -> str:
        """Text with the metrics whose held-out mean is significantly off by more than MIN_MEAN_ERROR, or ""."""
        return self._significant_errors(0.0)

    def _significant_errors(self, more_than: float) -> str:
        means = [s for s in self.scores if s.statistic == "mean" and abs(s.after) > more_than]
        significant = [s for s in means if s.low > MIN_MEAN_ERROR or s.high < -MIN_MEAN_ERROR]
        return ", ".join(f"{s.metric.upper()} by {s.after:+.0%} on {s.run}" for s in significant)

    @property
    def warning(self) -> str:
        """Reason why runs and tables may belong to different models or devices, or "" if there is none."""
        far = [p for p in self.determined if p.unit == "x" and not p.prior / FAR <= p.value <= p.prior * FAR]
        kernels = [f"{p.label} to {p.value / p.prior:.3g} times what the tables say" for p in far]
        default_s = {p.name: max(p.prior, DEFAULT_HOST_S[p.name]) for p in self.determined if p.name in DEFAULT_HOST_S}
        host = [
            f"{p.label} to {p.value / default_s[p.name]:,.0f} times what is usual"
            for p in self.determined
            if p.name in default_s and (p.low if p.bare is None else p.bare[0]) > FAR_HOST * default_s[p.name]
        ]
        off = self._significant_errors(FAR_OFF)
        if off and (kernels or host):
            return f"moved {', '.join(kernels + host)}, and held-out means are still off: {off}"
        if host and self.host_share > MAX_HOST_SHARE:
            return f"moved {', '.join(host)}, {self.host_share:.0%} of the time of steps, which kernels should take"
        return ""

    def __getitem__(self, name: str) -> Parameter:
        return next(p for p in self.parameters if p.name == name)
