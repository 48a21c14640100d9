"""What a calibration found: tables, parameters with intervals, and errors on what it did not look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lengthwise.schema.cost_tables import CostTables

METRICS = ("ttft", "tpot", "jct")
SURELY_OFF = 0.1
"""Where the whole interval of a mean's error lies beyond this, runs and tables disagree."""

FAR, FAR_OFF = 3.0, 0.3
"""Tables whose kernels were moved by more than this factor, and that still leave means of held-out requests off by more
than this share, are likely of another model or device than the runs. Right ones may be moved as far (rooflines of CPUs
are, by 4 to 6), and may miss as much where they lack a cost (dense masks), seldom both."""

FAR_HOST, MOST_OF_STEPS = 30.0, 0.5
"""A host that surely takes more than so many times what is usual, and most of the time of steps (or leaves means far
off), is likely of another model or device than the runs: its seconds take up what the kernels of wrong tables lack, and
may then fit well. Hosts of a slow CPU take up to 0.4 of steps whose kernels are on it as well."""
USUAL_HOST_S = {"host_step": 100e-6, "host_sequence": 1e-6}
"""Of an engine's host; the search starts there where tables hold none."""

WORSE = 0.005
"""Errors that grow by less than half a percentage point are not worth a warning."""


@dataclass(frozen=True)
class Parameter:
    """One number that was looked for.

    Attributes:
        name: "work", "prefill", "decode", "comm", "masked", "host_step", "host_sequence", "client", "log_step";
            "masked" only where it was asked for, found, or in the tables before.
        label: What it is, in words.
        unit: "x" (a factor on the tables that were given) or "s".
        value: What the tables now hold; ``prior`` where the runs could not tell, and where moving it made
            them agree no better than noise does.
        low: Lower end of the 95 % interval.
        high: Upper end; where nothing was told, both are what was believed before.
        prior: What the tables said before.
        report: Whether the runs could tell it.
        effect: By how much of their size predictions move when it moves by its prior standard deviation
            and all others follow as well as they can.
        bare: The interval as the runs tell it, before it was widened to hold a ``value`` that was left where it was;
            None: not kept.
    """

    name: str
    label: str
    unit: str
    value: float
    low: float
    high: float
    prior: float
    report: bool
    effect: float
    bare: tuple[float, float] | None = None


@dataclass(frozen=True)
class Score:
    """One statistic of one metric on held-out requests; errors are (simulated - measured) / measured.

    Attributes:
        run: Which run, by name.
        metric: "ttft", "tpot" or "jct".
        statistic: "mean", "p50", "p90", "p95", "p99", or "each": the mean absolute error of single requests.
        measured: The engine's number in seconds (NaN for "each").
        before: The error with the tables that were given.
        after: The error with the calibrated ones.
        low: Lower end of the 95 % interval of ``after``, over requests in blocks of time.
        high: Its upper end.
    """

    run: str
    metric: str
    statistic: str
    measured: float
    before: float
    after: float
    low: float
    high: float


@dataclass(frozen=True)
class Change:
    """What a calibration changed on held-out requests: mean absolute relative errors of single ones.

    ``low`` and ``high`` are the 95 % interval of after - before, request by request.
    """

    metric: str
    before: float
    after: float
    low: float
    high: float

    @property
    def is_worse(self) -> bool:
        """Whether the errors have grown for certain, and by enough to matter."""
        return self.low > 0 and self.after - self.before > WORSE

    @property
    def is_better(self) -> bool:
        """Whether the errors have shrunk for certain."""
        return self.high < 0


@dataclass(frozen=True)
class Load:
    """A counter that an engine told over time against the simulated one; means in time bins.

    ``at_s`` are the middles of the bins; ``before`` and ``after`` hold mean absolute differences over the
    measured mean.
    """

    run: str
    name: str
    at_s: tuple[float, ...]
    measured: tuple[float, ...]
    simulated: tuple[float, ...]
    before: float
    after: float


@dataclass(frozen=True)
class Curve:
    """How a metric is distributed over a run's held-out requests: seconds at each of ``levels``.

    ``before`` is simulated with the tables given, ``after`` with the calibrated ones.
    """

    run: str
    metric: str
    levels: tuple[float, ...]
    measured: tuple[float, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]


@dataclass(frozen=True)
class Calibration:
    """Cost tables that agree with measured runs, and how far.

    Attributes:
        tables: To simulate with; ``errors`` and ``reach`` are of this calibration.
        parameters: What was looked for.
        scores: Errors on held-out requests.
        client_s: Seconds that clients see outside the engine (HTTP, tokenising, network): the ``front.request_s``
            of the tables, so that simulations with them hold it. 0 where neither the runs nor the tables told any.
        log_sd: Standard deviation of log(measured / simulated) of held-out requests' mean times between tokens.
        split: What was fitted and what was held out, in words.
        fit_result: Requests that were fitted to.
        held_out: Requests that were held out.
        simulations: How many simulations it took.
        changes: By metric, what it changed on held-out requests.
        loads: Running and waiting requests over time, where the engine's were kept.
        notes: What a reader must know.
        curves: By run and metric, how held-out requests are distributed.
        origin: Those of ``notes`` on whether the runs are of the deployment at all.
        host_share: Of the time of all simulated steps, what the host takes by the calibrated tables.
    """

    tables: CostTables
    parameters: tuple[Parameter, ...]
    scores: tuple[Score, ...]
    client_s: float
    log_sd: float
    split: str
    fit_result: int
    held_out: int
    simulations: int
    changes: tuple[Change, ...] = ()
    loads: tuple[Load, ...] = ()
    notes: tuple[str, ...] = field(default=())
    curves: tuple[Curve, ...] = ()
    host_share: float = 0.0
    origin: tuple[str, ...] = ()

    @property
    def report(self) -> tuple[Parameter, ...]:
        """The parameters that the runs could tell."""
        return tuple(p for p in self.parameters if p.report)

    @property
    def not_told(self) -> tuple[Parameter, ...]:
        """The parameters that stay where they were, since the runs say nothing of them."""
        return tuple(p for p in self.parameters if not p.report)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What must be read before all else: where the tables given were better on held-out requests."""
        return tuple(
            f"WORSE than the tables given: {c.metric.upper()} of single held-out requests is off by {c.after:.1%}, "
            f"before by {c.before:.1%} (the difference is {c.low:+.1%} to {c.high:+.1%})"
            for c in self.changes
            if c.is_worse
        )

    @property
    def changed(self) -> bool:
        """Whether any parameter is not where it was."""
        return any(p.value != p.prior for p in self.parameters)

    @property
    def disagreement(self) -> str:
        """Where means of held-out requests are surely off by a tenth and more; empty if they are not."""
        return _entries(self._surely_off)

    @property
    def _surely_off(self) -> list[Score]:
        return [s for s in self.scores if s.statistic == "mean" and (s.low > SURELY_OFF or s.high < -SURELY_OFF)]

    @property
    def warning(self) -> str:
        """Why runs and tables may be of different things; else empty.

        Kernels or a host were moved far and means are far off still, or a host was that takes most of the steps.
        """
        far, host = self._far_kernels, self._far_host
        off = [s for s in self._surely_off if abs(s.after) > FAR_OFF]
        if off and (far or host):
            return f"moved {', '.join(far + host)}, and held-out means are still off: {_entries(off)}"
        if host and self.host_share > MOST_OF_STEPS:
            return f"moved {', '.join(host)}, {self.host_share:.0%} of the time of steps, which kernels should take"
        return ""

    @property
    def _far_kernels(self) -> list[str]:
        far = [p for p in self.report if p.unit == "x" and not p.prior / FAR <= p.value <= p.prior * FAR]
        return [f"{p.label} to {p.value / p.prior:.3g} times what the tables say" for p in far]

    @property
    def _far_host(self) -> list[str]:
        """A host that took up what tables lack: far from what is usual for certain."""
        far = [p for p in self.report if p.name in USUAL_HOST_S and _least(p) > FAR_HOST * _usual_host(p)]
        return [f"{p.label} to {p.value / _usual_host(p):,.0f} times what is usual" for p in far]

    @property
    def helps(self) -> bool:
        """Whether nothing has become worse on held-out requests, or at least something better."""
        return not self.warnings or any(c.is_better for c in self.changes)

    def __getitem__(self, name: str) -> Parameter:
        return next(p for p in self.parameters if p.name == name)


def _least(p: Parameter) -> float:
    """The lower end of its interval, as the runs tell it."""
    return p.low if p.bare is None else p.bare[0]


def _usual_host(p: Parameter) -> float:
    return max(p.prior, USUAL_HOST_S[p.name])


def _entries(means: Sequence[Score]) -> str:
    return ", ".join(f"{s.metric.upper()} by {s.after:+.0%} on {s.run}" for s in means)
