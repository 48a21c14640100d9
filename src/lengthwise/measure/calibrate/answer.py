"""What a calibration found: tables, parameters with intervals, and errors on what it did not look at."""

from __future__ import annotations

from dataclasses import dataclass, field

from lengthwise.schema.cost_tables import CostTables

METRICS = ("ttft", "tpot", "jct")


@dataclass(frozen=True)
class Parameter:
    """One number that was looked for.

    Attributes:
        name: "work", "prefill", "decode", "comm", "host_step", "host_sequence", "client", "log_step".
        label: What it is, in words.
        unit: "x" (a factor on the tables that were given) or "s".
        value: What the tables now hold; ``prior`` where the runs could not tell.
        low: Lower end of the 95 % interval.
        high: Upper end; where nothing was told, both are what was believed before.
        prior: What the tables said before.
        told: Whether the runs could tell it.
        effect: By how much of their size predictions move when it moves by its prior standard deviation
            and all others follow as well as they can.
    """

    name: str
    label: str
    unit: str
    value: float
    low: float
    high: float
    prior: float
    told: bool
    effect: float


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
class Calibration:
    """Cost tables that agree with measured runs, and how far.

    Attributes:
        tables: To simulate with; ``errors`` and ``reach`` are of this calibration.
        parameters: What was looked for.
        scores: Errors on held-out requests.
        client_s: Seconds that clients see outside the engine (HTTP, tokenising, network), which no cost
            table holds: add them to TTFT and JCT. 0 where the runs could not tell.
        log_sd: Standard deviation of log(measured / simulated) of held-out times between tokens.
        split: What was fitted and what was held out, in words.
        fitted: Requests that were fitted to.
        held_out: Requests that were held out.
        simulations: How many simulations it took.
        loads: Running and waiting requests over time, where the engine's were kept.
        notes: What a reader must know.
    """

    tables: CostTables
    parameters: tuple[Parameter, ...]
    scores: tuple[Score, ...]
    client_s: float
    log_sd: float
    split: str
    fitted: int
    held_out: int
    simulations: int
    loads: tuple[Load, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def told(self) -> tuple[Parameter, ...]:
        """The parameters that the runs could tell."""
        return tuple(p for p in self.parameters if p.told)

    @property
    def not_told(self) -> tuple[Parameter, ...]:
        """The parameters that stay where they were, since the runs say nothing of them."""
        return tuple(p for p in self.parameters if not p.told)

    def __getitem__(self, name: str) -> Parameter:
        return next(p for p in self.parameters if p.name == name)
