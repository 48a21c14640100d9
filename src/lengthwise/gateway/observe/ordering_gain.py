"""Estimate what length-aware ordering gains on recorded traffic, with confidence intervals.

The simulator serves the recorded requests on engines that are fitted to the observations (``replay``). Intervals come
from a block bootstrap (Künsch 1989): blocks of consecutive requests are drawn with the gaps between them, which
preserves bursts, and all orders serve the same draws. An interval surrounds the value of the recorded traffic. Its
half-width is the standard deviation of the draws' log ratios, variance-stabilized, times Student's t for the number of
blocks. A short record lacks a part of a heavy tail: on an M/G/1 queue of 1,500 requests with heavy-tailed lengths,
97.5 % intervals cover the theoretical gain in 90 % of runs, and lie below it in the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.gateway.config import Order
from lengthwise.gateway.observe.replay import (
    FCFS,
    ISRTF,
    MIN_WAITED_SHARE,
    ORACLE,
    ORDERS,
    SRTF,
    WINDOWED,
    Replayed,
    Service,
    VirtualGateway,
    fit,
    matched,
    replay,
    resampled,
    workload_of,
)
from lengthwise.gateway.observe.trace import MIN_STREAMED, Trace, is_measurable, of_journal, pools_of
from lengthwise.schema.workload import Workload
from lengthwise.statistics import Floats, bootstrap_half_width, circular_blocks

SWITCH_ON = "switch on"
NO_QUEUE = "no gain possible: no request waits"
EQUAL_LENGTHS = "no gain possible: lengths are alike"
NO_GAIN = "no gain found"
TAIL_LOSES = "the tail loses more than the mean gains"
NOT_SIGNIFICANT = "not significant yet"
BAD_FIT = "unknown: the engines do not behave as fitted"
OUT_OF_ORDER = "unknown: requests were not served first come, first served"
NOT_STREAMED = "unknown: responses are not streamed"
TOO_FEW = "not enough traffic"


@dataclass(frozen=True)
class Change:
    """A change relative to FCFS, with its confidence interval. A value of -0.2 means 20 % less."""

    value: float
    low: float
    high: float


NO_CHANGE = Change(math.nan, math.nan, math.nan)
LEVEL = 0.975


@dataclass(frozen=True)
class OrderGain:
    """JCT under one order, and its changes relative to FCFS."""

    # "srtf", "isrtf" (with preemption) or "oracle" (true lengths); if it is the mode in use, also "windowed"
    name: str
    mean: Change  # of the mean JCT
    p99: Change  # of the 99 % quantile
    mean_jct_s: float
    p99_jct_s: float
    fcfs_s: tuple[float, float] | None = None  # mean and P99 JCT of its own FCFS; None: those of the gain


@dataclass(frozen=True)
class OrderTimes:
    """JCT and total queueing time under an order or FCFS, each as (mean, median, 90 % and 99 % quantile)."""

    name: str
    jct_s: tuple[float, ...]
    queue_s: tuple[float, ...]


@dataclass(frozen=True)
class Gain:
    """The estimated gain of length-aware ordering."""

    decision: str  # one of this module's constants; ``description`` gives the reason
    description: str
    requests: int  # number of requests that the estimate uses, without pools that are not measurable
    span_s: float  # from the first arrival to the last
    waited_share: float = math.nan  # share of the observed total JCT in which requests waited for a slot
    observed_jct_s: float = math.nan  # observed mean; ``fcfs_jct_s`` is the mean under simulated FCFS
    fcfs_jct_s: float = math.nan
    fcfs_p99_jct_s: float = math.nan
    in_order: bool = False  # whether requests were served in FCFS order, so that both means are comparable
    orders: tuple[OrderGain, ...] = ()
    preemption_effect: Change = NO_CHANGE  # change of the mean JCT from srtf to isrtf
    times: tuple[OrderTimes, ...] = ()  # FCFS first
    services: tuple[Service, ...] = field(default=())  # fitted engines, one per pool
    level: float = LEVEL  # confidence of each interval; the intervals of srtf and isrtf hold together with 95 %

    @property
    def model_error(self) -> float:
        """JCT of simulated FCFS divided by the observed JCT, minus 1, or NaN if the two are not comparable."""
        return self.fcfs_jct_s / self.observed_jct_s - 1 if self.in_order and self.observed_jct_s > 0 else math.nan

    def order(self, name: str) -> OrderGain:
        """Return the gain of an order by name."""
        return next(order for order in self.orders if order.name == name)


def as_json(gain: Gain) -> dict[str, Any]:
    """Return the gain as plain values for JSON, with None instead of NaN."""
    values: dict[str, Any] = _plain(asdict(gain) | {"model_error": gain.model_error})
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(v) for name, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


MIN_GAIN = 0.01  # a smaller gain in mean JCT does not justify a change, even if it is significant
MAX_ERROR = 0.35  # largest model error for which simulations are valid


def decide(gain: Gain) -> tuple[str, str]:  # noqa: PLR0911 - one return per decision
    """Return the decision that the estimated gain suggests, and the reason for it."""
    oracle, srtf, isrtf = gain.order(ORACLE), gain.order(SRTF), gain.order(ISRTF)
    preemption_effect = gain.preemption_effect
    if gain.waited_share < MIN_WAITED_SHARE and -oracle.mean.value < MIN_GAIN:
        return NO_QUEUE, (
            f"Waiting is {_percent(gain.waited_share)} of all time from arrival to finish: every request finds a free "
            "slot, and no order shortens an empty queue."
        )
    if not gain.in_order:
        return OUT_OF_ORDER, (
            "Simulated first come, first served is not comparable with the observations, which had another order. "
            "Use traffic of mode observe or fcfs."
        )
    if not abs(gain.model_error) <= MAX_ERROR:
        return BAD_FIT, (
            f"The mean JCT is {gain.fcfs_jct_s:.3g} s in simulated first come, first served, but "
            f"{gain.observed_jct_s:.3g} s in the observations. Something other than a full batch limits the engines, "
            "or they changed."
        )
    preemption_pays = preemption_effect.high < 0 and -preemption_effect.value >= MIN_GAIN
    significant = [order for order in (srtf, isrtf) if order.mean.high < 0 and -order.mean.value >= MIN_GAIN]
    acceptable = [order for order in significant if not order.p99.value > -order.mean.value]
    if significant:
        candidates = acceptable or significant
        best = candidates[-1] if preemption_pays else candidates[0]
        if not acceptable:
            return TAIL_LOSES, f"mode = {best.name} {_changes(best)}; a lower max_wait_s reduces both changes."
        text = f"mode = {best.name} {_changes(best)}"
        if best.name == ISRTF and len(acceptable) > 1:
            text += f", against mode = srtf mean JCT by {_interval(preemption_effect)}"
        if oracle.mean.value < -MIN_GAIN:
            text += f"; that is {_percent(best.mean.value / oracle.mean.value)} of the gain with known lengths"
        return SWITCH_ON, f"{text}."
    best = min((srtf, isrtf), key=lambda order: order.mean.value)
    if -oracle.mean.value < MIN_GAIN:
        return EQUAL_LENGTHS, f"Even with known lengths, shortest first {_changes(oracle)}."
    if best.mean.value <= -MIN_GAIN:
        return NOT_SIGNIFICANT, f"mode = {best.name} {_changes(best)}: the interval contains 0. Observe longer."
    return NO_GAIN, f"mode = {best.name} {_changes(best)}; with known lengths shortest first {_changes(oracle)}."


def _changes(order: OrderGain) -> str:
    return f"changes mean JCT by {_interval(order.mean)} and its 99th percentile by {_interval(order.p99)}"


def _interval(change: Change) -> str:
    return f"{format_share(change.value)} ({format_share(change.low)} to {format_share(change.high)})"


def format_share(share: float) -> str:
    """Return a change in percent, with its sign."""
    return "unknown" if math.isnan(share) else f"{100 * share:+.1f} %"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if abs(share) >= 0.1 or share == 0 else f"{100 * share:.1f} %"


MIN_REQUESTS = 200
DRAWS = 100
ORDER = Order()
MAX_REQUESTS = 5000
BLOCKS = 12  # blocks of a draw, or fewer so that a block has at least 50 requests
_MIN_RELEVANT = 0.01  # share of the mean JCT by which a dispatch must be too early to count as out of order
_PREEMPTION_EFFECT = (ISRTF, SRTF)
_LINEAR_LOG = 0.05  # the scatter of log ratios grows with their square far above this value, and is constant far below
_MAX_STABILIZED = 0.98
_VIRTUAL_TOKENS = 60_000  # output tokens of the last requests that a VirtualGateway serves, at about 50,000 a second


def gain(
    trace: Trace,
    order: Order = ORDER,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Gain:
    """Estimate the gain of every order in ORDERS on the last MAX_REQUESTS requests of a trace.

    The confidence intervals come from ``draws`` bootstrap samples, which follow from ``seed``; ``progress`` gets the
    number of finished ones, and ``draws``.
    """
    trace = trace.take(np.arange(max(0, len(trace) - MAX_REQUESTS), len(trace)))
    if len(trace) < MIN_REQUESTS:
        text = f"{len(trace)} requests got a response so far; at least {MIN_REQUESTS} are needed."
        return Gain(TOO_FEW, text, len(trace), trace.span_s)
    parts = [part for part in pools_of(trace) if is_measurable(part)]
    if not parts:
        return Gain(NOT_STREAMED, NEEDS_STREAMS, len(trace), trace.span_s)
    pools = [_Pool.of(part, order) for part in parts]
    replayed = [{name: replay(pool.workload, pool.service, name, order) for name in ORDERS} for pool in pools]
    ratios = _ratios(replayed)
    rng = np.random.default_rng(seed)
    drawn = []
    for at in range(draws):
        progress(at, draws)
        drawn.append(_ratios([pool.draw(rng, order) for pool in pools]))

    def change(*key: str) -> Change:
        return _change(ratios[key], [draw[key] for draw in drawn])

    runs = _merged(replayed)
    jct_times_s = {name: _times(run.jct_s) for name, run in runs.items()}
    waited = np.average([pool.service.waited_share for pool in pools], weights=[len(part) for part in parts])
    orders = [
        OrderGain(name, change(name, "mean"), change(name, "p99"), jct_times_s[name][0], jct_times_s[name][-1])
        for name in ORDERS[1:]
    ]
    undecided = Gain(
        "",
        "",
        sum(len(part) for part in parts),
        trace.span_s,
        waited_share=float(waited),
        observed_jct_s=float(np.concatenate([part.jct_s for part in parts]).mean()),
        fcfs_jct_s=jct_times_s[FCFS][0],
        fcfs_p99_jct_s=jct_times_s[FCFS][-1],
        in_order=all(_in_order(part) for part in parts),
        orders=tuple(orders),
        preemption_effect=change(*_PREEMPTION_EFFECT),
        times=tuple(OrderTimes(name, jct_times_s[name], _times(runs[name].queued_for_s)) for name in ORDERS),
        services=tuple(pool.service for pool in pools),
    )
    decision, description = decide(undecided)
    decided = replace(undecided, decision=decision, description=description)
    return _with_windowed(decided, pools, order, draws, rng) if order.mode == WINDOWED else decided


@dataclass
class _Pool:
    workload: Workload
    service: Service
    gaps_s: Floats
    jct_s: Floats  # as observed
    at_engine_s: float  # mean time from dispatch to finish; 0 if requests were preempted or moved

    @classmethod
    def of(cls, trace: Trace, order: Order) -> _Pool:
        gaps_s = np.diff(trace.arrival_s, prepend=trace.arrival_s[0])
        gaps_s[0] = gaps_s[1:].mean() if len(gaps_s) > 1 else 0.0
        at_engine_s = float((trace.finished_s - trace.dispatched_s).mean()) if trace.is_uninterrupted.all() else 0.0
        return cls(workload_of(trace, order.window_tokens), fit(trace), gaps_s, trace.jct_s, at_engine_s)

    def draw(self, rng: np.random.Generator, order: Order) -> dict[str, Replayed]:
        n = len(self.workload)
        length = min(n, max(50, n // BLOCKS))
        starts = rng.integers(0, n, -(-n // length))
        sample = resampled(self.workload, self.gaps_s, circular_blocks(starts, length, n))
        return {name: replay(sample, self.service, name, order) for name in ORDERS}


def _with_windowed(gain: Gain, pools: list[_Pool], order: Order, draws: int, rng: np.random.Generator) -> Gain:
    """Add the changes by mode windowed, or, if the engines do not behave as fitted, the reason why there are none.

    Traffic in FCFS order is compared with simulated FCFS, other traffic with the simulated mode, which it ran in.
    """
    row, observed_s = _windowed(pools, order, draws, rng)
    name, error = (FCFS, gain.model_error) if gain.in_order else (WINDOWED, row.mean_jct_s / observed_s - 1)
    if not abs(error) <= MAX_ERROR:
        text = f" Mode windowed has no estimate: the mean JCT of simulated {name} is off by {format_share(error)}."
        return replace(gain, description=gain.description + text)
    speed = "slower" if row.mean.low > 0 else "faster" if row.mean.high < 0 else ""
    text = f" Mode windowed, which is in use, is {speed} than fcfs: it {_changes(row)}." if speed else ""
    return replace(gain, orders=(*gain.orders, row), description=gain.description + text)


def _windowed(pools: list[_Pool], order: Order, draws: int, rng: np.random.Generator) -> tuple[OrderGain, float]:
    """Return the changes by mode windowed against FCFS, and the observed mean JCT of the requests served.

    A ``VirtualGateway``, which prices preemptions, serves the last requests of each pool in both modes. Intervals come
    from blocks of requests of these two runs.
    """
    runs, observed_s = [], []
    for pool in pools:
        tokens = np.cumsum(pool.workload.output_tokens[::-1])
        last = max(1, int(np.searchsorted(tokens, _VIRTUAL_TOKENS, "right")))
        rows = np.arange(max(0, len(pool.workload) - last), len(pool.workload))
        workload = resampled(pool.workload, pool.gaps_s, rows)
        service = matched(pool.service, [workload], pool.at_engine_s) if pool.at_engine_s else pool.service
        modes = (Order(FCFS, max_wait_s=order.max_wait_s), order)
        observed_s.append(pool.jct_s[rows])
        runs.append([VirtualGateway(workload, service, mode).run().jct_s for mode in modes])
    fcfs_s, windowed_s = (np.concatenate(columns) for columns in zip(*runs, strict=True))
    n = len(fcfs_s)

    def change(statistic: Callable[[Floats], float]) -> Change:
        length = min(n, max(50, n // BLOCKS))
        blocks = [circular_blocks(rng.integers(0, n, -(-n // length)), length, n) for _ in range(draws)]
        drawn = [statistic(windowed_s[rows]) / statistic(fcfs_s[rows]) for rows in blocks]
        return _change(statistic(windowed_s) / statistic(fcfs_s), drawn)

    changes = change(_mean), change(_p99)
    row = OrderGain(WINDOWED, *changes, _mean(windowed_s), _p99(windowed_s), (_mean(fcfs_s), _p99(fcfs_s)))
    return row, _mean(np.concatenate(observed_s))


def _mean(values: Floats) -> float:
    return float(values.mean())


def _p99(values: Floats) -> float:
    return float(np.quantile(values, 0.99))


def _merged(pools: list[dict[str, Replayed]]) -> dict[str, Replayed]:
    """Return, for each order, the times of those requests of all pools that are served under every order."""
    jct_s = {name: np.concatenate([pool[name].jct_s for pool in pools]) for name in ORDERS}
    queue_s = {name: np.concatenate([pool[name].queued_for_s for pool in pools]) for name in ORDERS}
    served = np.all([np.isfinite(values) for values in jct_s.values()], axis=0)
    return {name: Replayed(jct_s[name][served], queue_s[name][served]) for name in ORDERS}


def _times(values: Floats) -> tuple[float, ...]:
    return float(values.mean()), *map(float, np.quantile(values, (0.5, 0.9, 0.99)))


def _ratios(pools: list[dict[str, Replayed]]) -> dict[tuple[str, ...], float]:
    runs = {name: run.jct_s for name, run in _merged(pools).items()}
    ratios: dict[tuple[str, ...], float] = {}
    for name in ORDERS[1:]:
        ratios[name, "mean"] = float(runs[name].mean() / runs[FCFS].mean())
        ratios[name, "p99"] = float(np.quantile(runs[name], 0.99) / np.quantile(runs[FCFS], 0.99))
    ratios[_PREEMPTION_EFFECT] = float(runs[ISRTF].mean() / runs[SRTF].mean())
    return ratios


def _change(ratio: float, drawn: list[float]) -> Change:
    if len(drawn) < 2:
        return Change(ratio - 1, math.nan, math.nan)
    half = float(bootstrap_half_width(_stabilized(np.log(drawn)), BLOCKS, LEVEL))
    center = float(_stabilized(np.log([ratio]))[0])
    ends = np.array([center - half, center + half])
    share = np.minimum(np.abs(ends), _MAX_STABILIZED)  # the inverse of _stabilized follows
    low, high = np.expm1(np.copysign(_LINEAR_LOG * share / (1 - share), ends)).tolist()
    return Change(ratio - 1, low, high)


def _stabilized(logs: Floats) -> Floats:
    """Transform log ratios, whose variance grows with the gain, so that the variance becomes constant."""
    return logs / (np.abs(logs) + _LINEAR_LOG)


def _in_order(trace: Trace) -> bool:
    num_overtaken = int((~trace.is_uninterrupted).sum())
    tolerance_s = _MIN_RELEVANT * float(trace.jct_s.mean())
    for model in np.unique(trace.model):
        dispatched_s = trace.dispatched_s[trace.model == model]
        num_overtaken += int((dispatched_s < np.maximum.accumulate(dispatched_s) - tolerance_s).sum())
    return num_overtaken <= 0.02 * len(trace)


NEEDS_STREAMS = (
    "A buffered response does not show when its engine started it, so step times and slots are unknown. At least "
    f"{MIN_STREAMED} responses of some tokens must be streamed (stream: true); the others may be buffered."
)
_LABELS = {
    "srtf": "srtf (shortest predicted first)",
    "isrtf": "isrtf (with preemption)",
    "oracle": "lengths known, no preemption",
    "windowed": "windowed (of the last requests)",
}


def report(
    path: Path | str,
    order: Order = ORDER,
    *,
    draws: int = DRAWS,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Gain:
    """Estimate the gain on the traffic of a journal. Raises InputError if the file is no readable journal."""
    return gain(of_journal(path), order, draws=draws, progress=progress)


def times_table(gain: Gain) -> list[tuple[str, float | None, Change | None, float | None, Change | None]]:
    """Return rows (label, mean JCT, its change, P99 JCT, its change), or [] if there is no estimate."""
    if not gain.orders:
        return []
    rows: list[tuple[str, float | None, Change | None, float | None, Change | None]] = [
        ("observed", gain.observed_jct_s, None, None, None),
        ("fcfs (simulated)", gain.fcfs_jct_s, None, gain.fcfs_p99_jct_s, None),
    ]
    for order in gain.orders:
        if order.fcfs_s is not None:
            rows.append(("fcfs (of the last requests)", order.fcfs_s[0], None, order.fcfs_s[1], None))
        rows.append((_LABELS[order.name], order.mean_jct_s, order.mean, order.p99_jct_s, order.p99))
    return [*rows, ("isrtf against srtf", None, gain.preemption_effect, None, None)]


def service_lines(gain: Gain) -> list[str]:
    """Return a line for each pool of fitted engines: the time of a step, and the concurrency limit."""
    lines = []
    for service in gain.services:
        limit = "not reached" if service.max_num_seqs is None else f"{service.max_num_seqs} sequences"
        step = f"{1e3 * service.step_s:.3g} ms + {1e3 * service.seq_s:.3g} ms per sequence"
        prompt = f"{1e3 * service.prompt_s:.3g} ms per prompt token"
        lines.append(
            f"{service.engines} engine(s): a step takes {step} + {prompt} (median error {100 * service.error:.0f} %); "
            f"concurrency limit: {limit}"
        )
    return lines


def text_report(gain: Gain) -> str:
    """Return the gain as lines of text."""
    span = duration(gain.span_s)
    lines = [f"Verdict: {gain.decision}", gain.description, "", f"{gain.requests} requests over {span}"]
    if not gain.orders:
        return "\n".join(lines)
    lines.append(f"{100 * gain.waited_share:.1f} % of all time from arrival to finish was waiting for a slot")
    lines += [*service_lines(gain), "", f"{'':34}{'mean JCT':>10}  {'change':<30}{'P99 JCT':>10}  change"]
    for label, mean_s, mean, p99_s, p99 in times_table(gain):
        seconds = ["" if value is None else f"{value:.3f} s" for value in (mean_s, p99_s)]
        changes = ["" if change is None else format_change(change) for change in (mean, p99)]
        lines.append(f"{label:34}{seconds[0]:>10}  {changes[0]:<30}{seconds[1]:>10}  {changes[1]}".rstrip())
    return "\n".join([*lines, "", f"Intervals: {100 * gain.level:g} % each, by a block bootstrap of this traffic."])


def format_change(change: Change) -> str:
    """Return a change and its interval as percentages."""
    return f"{100 * change.value:+.1f} % ({100 * change.low:+.1f} to {100 * change.high:+.1f})"


def duration(span_s: float) -> str:
    """Return a time span as text, in the largest unit of which it contains at least two."""
    for unit, seconds in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if span_s >= 2 * seconds:
            return f"{span_s / seconds:.1f} {unit}"
    return f"{span_s:.0f} seconds"
