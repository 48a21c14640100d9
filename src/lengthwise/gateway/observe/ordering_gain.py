"""What length-aware order would have gained on the traffic that passed, with an interval.

The engines are fitted to what was seen (``service``), and the simulator serves the recorded requests under first
come, first served and under the length-aware orders, by the very ranks and takeovers that the gateway would use
(``replay``; whether a cut pays for itself the gateway alone asks besides).

Intervals come from a block bootstrap (Künsch 1989): stretches of consecutive requests are drawn
with replacement, with their gaps, so that bursts stay bursts; all orders serve the same draws. The draws' scatter
(of the logarithm of the ratio, on a scale that evens it out) is laid around the recorded traffic's own value, with
Student's factor for as many stretches as make a draw. Lengths with a heavy tail show less of it in a short record
than there is: on such an M/G/1 queue of 1,500 requests intervals of 97.5 % held the truth of theory in 90 % of the
runs, and all others promised less than the truth.
"""

from __future__ import annotations

import math
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
    Replayed,
    Service,
    fit,
    replay,
    resampled,
    workload_of,
)
from lengthwise.gateway.observe.trace import MIN_SEEN, Floats, Trace, of_journal, pools_of, tells
from lengthwise.schema.workload import Workload
from lengthwise.statistics import circular_blocks, t_quantile

SWITCH_ON = "switch on"
NOBODY_WAITS = "no gain to be had: nobody waits"
MATCHING = "no gain to be had: lengths are alike"
NO_GAIN = "no gain to be had"
TAIL_PAYS = "the tail pays more than the mean gains"
UNSURE = "not sure yet"
UNLIKE = "not known: the engines do not behave as fitted"
OUT_OF_ORDER = "not known: requests did not go first come, first served"
CAME_WHOLE = "not known: answers come whole"
TOO_LITTLE = "not enough traffic"


@dataclass(frozen=True)
class Change:
    """A relative change against FCFS (-0.2: a fifth less), with its interval."""

    value: float
    low: float
    high: float


NO_CHANGE = Change(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class OrderGain:
    """What an order would have done on these requests.

    Attributes:
        name: "srtf" (order of those who wait), "isrtf" (and cuts), "oracle" (true lengths, no cuts).
        mean: Change of the mean JCT.
        p99: Change of the 99th percentile of JCT.
        mean_jct_s: Mean JCT.
        p99_jct_s: Its 99th percentile.
    """

    name: str
    mean: Change
    p99: Change
    mean_jct_s: float
    p99_jct_s: float


@dataclass(frozen=True)
class OrderTimes:
    """What an order would have given these requests: seconds as mean, median, 90 % and 99 %.

    Attributes:
        name: "fcfs", or an order's.
        jct_s: Arrival to end.
        queue_s: Waiting in all.
    """

    name: str
    jct_s: tuple[float, ...]
    queue_s: tuple[float, ...]


@dataclass(frozen=True)
class Gain:
    """What length-aware order would have gained.

    Attributes:
        decision: One of this module's.
        description: Why.
        requests: That were looked at; those of engines that tell nothing are not among them.
        span_s: From the first arrival to the last.
        waited_share: Of all JCT, before a seat was free, as it was.
        observed_jct_s: Mean JCT as it was.
        fcfs_jct_s: Mean JCT of the simulated first come, first served.
        fcfs_p99_jct_s: Its 99th percentile.
        in_order: Whether requests really went first come, first served, so that the last three can be compared.
        orders: One each.
        cuts: Change of the mean JCT from srtf to isrtf, with its interval: what cuts add.
        times: One each, FCFS first.
        services: The engines as they were fitted, a pool each.
        level: Of the intervals: both orders' hold together with 95 %.
    """

    decision: str
    description: str
    requests: int
    span_s: float
    waited_share: float = math.nan
    observed_jct_s: float = math.nan
    fcfs_jct_s: float = math.nan
    fcfs_p99_jct_s: float = math.nan
    in_order: bool = False
    orders: tuple[OrderGain, ...] = ()
    cuts: Change = NO_CHANGE
    times: tuple[OrderTimes, ...] = ()
    services: tuple[Service, ...] = field(default=())
    level: float = 0.975

    @property
    def model_error(self) -> float:
        """Simulated FCFS over what was seen, less 1; NaN where requests did not go in order, or took no time."""
        return self.fcfs_jct_s / self.observed_jct_s - 1 if self.in_order and self.observed_jct_s > 0 else math.nan

    def order(self, name: str) -> OrderGain:
        """The gain of an order by name."""
        return next(one for one in self.orders if one.name == name)


def as_json(gain: Gain) -> dict[str, Any]:
    """Plain values; what is not known is None."""
    told: dict[str, Any] = _plain(asdict(gain))
    return told | {"model_error": _plain(gain.model_error)}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


MIN_GAIN = 0.01
"""A smaller gain in mean JCT is not worth the trouble, however sure it is."""
MOST_ERROR = 0.35
"""Beyond it the simulated FCFS is not what was seen, and says nothing."""


def judged(found: Gain) -> Gain:
    """The finding with its verdict and the sentence that gives the reason."""
    decision, description = _evaluate(found)
    return replace(found, decision=decision, description=description)


def _evaluate(found: Gain) -> tuple[str, str]:
    oracle = found.order(ORACLE)
    if found.waited_share < MIN_WAITED_SHARE and -oracle.mean.value < MIN_GAIN:
        return NOBODY_WAITS, (
            f"Of all time from arrival to end {_percent(found.waited_share)} is waiting: every request finds a free "
            "seat, and no order shortens a queue that is not there."
        )
    if not found.in_order:
        return OUT_OF_ORDER, (
            "Simulated first come, first served cannot be held against what was seen, since others went first. Look "
            "back at traffic of mode observe or fcfs."
        )
    if not abs(found.model_error) <= MOST_ERROR:
        return UNLIKE, (
            f"Simulated first come, first served, the mean JCT is {found.fcfs_jct_s:.3g} s; seen were "
            f"{found.observed_jct_s:.3g} s. Something else than a full batch limits the engines, or they changed."
        )
    return _comparison([found.order(SRTF), found.order(ISRTF)], oracle, found.cuts)


def _comparison(candidates: list[OrderGain], oracle: OrderGain, cuts: Change) -> tuple[str, str]:
    sure = [one for one in candidates if one.mean.high < 0 and -one.mean.value >= MIN_GAIN]
    bearable = [one for one in sure if not one.p99.value > -one.mean.value]
    if bearable:
        best = _named_one(bearable, cuts)
        over = _improvement(cuts) if best.name == ISRTF and len(bearable) > 1 else ""
        return SWITCH_ON, f"{_named(best)} {_changes(best)}{over}{_retained(best, oracle)}."
    if sure:
        best = _named_one(sure, cuts)
        return (TAIL_PAYS, f"{_named(best)} {_changes(best)}; a lower max_wait_s trades the one for the other.")
    best = min(candidates, key=lambda one: one.mean.value)
    if -oracle.mean.value < MIN_GAIN:
        return MATCHING, f"Even with lengths known beforehand, shortest first {_changes(oracle)}."
    if best.mean.value <= -MIN_GAIN and not best.mean.high < 0:
        return UNSURE, f"{_named(best)} {_changes(best)}: the interval holds 0. Observe longer."
    return NO_GAIN, (
        f"{_named(best)} {_changes(best)}; with lengths known beforehand shortest first {_changes(oracle)}."
    )


def _named_one(those: list[OrderGain], cuts: Change) -> OrderGain:
    """The last of them, isrtf, where it surely beats srtf or stands alone; else srtf, which cuts nobody."""
    return those[-1] if cuts.high < 0 and -cuts.value >= MIN_GAIN else those[0]


def _improvement(cuts: Change) -> str:
    return f", against mode = srtf mean JCT by {_signed(cuts.value)} ({_signed(cuts.low)} to {_signed(cuts.high)})"


def _named(one: OrderGain) -> str:
    return {SRTF: "mode = srtf", ISRTF: "mode = isrtf"}[one.name]


def _changes(one: OrderGain) -> str:
    mean = one.mean
    return (
        f"changes mean JCT by {_signed(mean.value)} ({_signed(mean.low)} to {_signed(mean.high)}) "
        f"and its 99th percentile by {_signed(one.p99.value)}"
    )


def _retained(best: OrderGain, oracle: OrderGain) -> str:
    if not oracle.mean.value < -MIN_GAIN:
        return ""
    return f"; that is {_percent(best.mean.value / oracle.mean.value)} of what known lengths would bring"


def _signed(share: float) -> str:
    return "unknown" if math.isnan(share) else f"{100 * share:+.1f} %"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if abs(share) >= 0.1 or share == 0 else f"{100 * share:.1f} %"


MIN_REQUESTS = 200
DRAWS = 100
LEVEL = 0.975
MAX_REQUESTS = 5000
BLOCKS = 12
"""So many stretches make a draw, unless that would make them shorter than 50 requests."""
MIN_RELEVANT = 0.01
"""Of a mean JCT: whoever goes first by less has overtaken nobody."""
STATISTICS = ("mean", "p99")
CUTS = (ISRTF, SRTF)
"""The key of the mean with cuts over that without."""
EVEN = 0.05
"""Logarithms of ratios well above it scatter in proportion to their square, well below all alike."""
MOST_EVEN = 0.98


def gain(
    trace: Trace,
    order: Order = Order(),  # noqa: B008 - frozen
    *,
    draws: int = DRAWS,
    level: float = LEVEL,
    seed: int = 0,
    most: int = MAX_REQUESTS,
) -> Gain:
    """What the orders of ``ORDERS`` would have done on a trace.

    Args:
        trace: What passed; its last ``most`` requests count.
        order: The settings that would be used (takeover, windows, bound on waiting).
        draws: Resamples behind the intervals.
        level: Of the intervals.
        seed: Of the resamples.
        most: Requests that are looked at.
    """
    if len(trace) > most:
        trace = trace.take(np.arange(len(trace) - most, len(trace)))
    if len(trace) < MIN_REQUESTS:
        return Gain(TOO_LITTLE, _too_few(len(trace)), len(trace), trace.span_s)
    telling = [part for part in pools_of(trace) if tells(part)]
    if not telling:
        return Gain(CAME_WHOLE, _INTEGERS, len(trace), trace.span_s)
    pools = [_Pool.of(part, order) for part in telling]
    true = _ratios([pool.replayed(order) for pool in pools])
    rng = np.random.default_rng(seed)
    drawn = [_ratios([pool.drawn(rng, order) for pool in pools]) for _ in range(draws)]
    runs = _merged([pool.replayed(order) for pool in pools])
    fcfs = runs[FCFS].jct_s
    found = Gain(
        "",
        "",
        sum(len(part) for part in telling),
        trace.span_s,
        waited_share=_waited_share(pools),
        observed_jct_s=float(np.concatenate([part.jct_s for part in telling]).mean()),
        fcfs_jct_s=float(fcfs.mean()),
        fcfs_p99_jct_s=float(np.quantile(fcfs, 0.99)),
        in_order=all(_in_order(part) for part in telling),
        orders=tuple(_order_gain(name, runs[name].jct_s, true, drawn, level) for name in ORDERS[1:]),
        cuts=_change(true[CUTS], [draw[CUTS] for draw in drawn], level),
        times=tuple(OrderTimes(name, _times(runs[name].jct_s), _times(runs[name].queued_for_s)) for name in ORDERS),
        services=tuple(pool.service for pool in pools),
        level=level,
    )
    return judged(found)


@dataclass
class _Pool:
    """Engines that serve the same, their requests, and what is known of both."""

    workload: Workload
    service: Service
    gaps_s: Floats
    runs: dict[str, Replayed] | None = None

    @classmethod
    def of(cls, trace: Trace, order: Order) -> _Pool:
        arrivals = trace.arrival_s
        gaps = np.diff(arrivals, prepend=arrivals[0])
        gaps[0] = gaps[1:].mean() if len(gaps) > 1 else 0.0
        return cls(workload_of(trace, order.window_tokens), fit(trace), gaps)

    def replayed(self, order: Order) -> dict[str, Replayed]:
        """The requests as they came, under every order."""
        if self.runs is None:
            self.runs = {name: replay(self.workload, self.service, name, order) for name in ORDERS}
        return self.runs

    def drawn(self, rng: np.random.Generator, order: Order) -> dict[str, Replayed]:
        """A draw of stretches of them, under every order."""
        n = len(self.workload)
        length = min(n, max(50, n // BLOCKS))
        starts = rng.integers(0, n, -(-n // length))
        other = resampled(self.workload, self.gaps_s, circular_blocks(starts, length, n))
        return {name: replay(other, self.service, name, order) for name in ORDERS}


Ratios = dict[tuple[str, str], float]


def _merged(pools: list[dict[str, Replayed]]) -> dict[str, Replayed]:
    """By order all pools' requests that are served under every order."""
    jct = {name: np.concatenate([pool[name].jct_s for pool in pools]) for name in ORDERS}
    waited = {name: np.concatenate([pool[name].queued_for_s for pool in pools]) for name in ORDERS}
    served = np.all([np.isfinite(one) for one in jct.values()], axis=0)
    return {name: Replayed(jct[name][served], waited[name][served]) for name in ORDERS}


def _times(values: Floats) -> tuple[float, ...]:
    """Mean, median, 90 % and 99 %."""
    return float(values.mean()), *map(float, np.quantile(values, (0.5, 0.9, 0.99)))


def _ratios(pools: list[dict[str, Replayed]]) -> Ratios:
    """Statistics over those of FCFS."""
    runs = {name: run.jct_s for name, run in _merged(pools).items()}
    told = {}
    for name in ORDERS[1:]:
        told[name, "mean"] = float(runs[name].mean() / runs[FCFS].mean())
        told[name, "p99"] = float(np.quantile(runs[name], 0.99) / np.quantile(runs[FCFS], 0.99))
    told[CUTS] = float(runs[ISRTF].mean() / runs[SRTF].mean())
    return told


def _order_gain(name: str, jct_s: Floats, true: Ratios, drawn: list[Ratios], level: float) -> OrderGain:
    mean, p99 = (_change(true[name, s], [draw[name, s] for draw in drawn], level) for s in STATISTICS)
    return OrderGain(name, mean, p99, float(jct_s.mean()), float(np.quantile(jct_s, 0.99)))


def _change(ratio: float, drawn: list[float], level: float) -> Change:
    """The interval of a ratio, less 1."""
    if len(drawn) < 2:
        return Change(ratio - 1, math.nan, math.nan)
    even = _balanced(np.log(drawn))
    half = t_quantile(level, BLOCKS - 1) * float(even.std(ddof=1))
    center = float(_balanced(np.log([ratio]))[0])
    low, high = (_ratio(center + side * half) - 1 for side in (-1, 1))
    return Change(ratio - 1, low, high)


def _balanced(logs: Floats) -> Floats:
    """On a scale on which large gains scatter as small ones do: the scatter of a gain grows with its square."""
    return logs / (np.abs(logs) + EVEN)


def _ratio(uniform: float) -> float:
    share = min(abs(uniform), MOST_EVEN)
    return math.exp(math.copysign(EVEN * share / (1 - share), uniform))


def _waited_share(pools: list[_Pool]) -> float:
    shares, sizes = [pool.service.waited_share for pool in pools], [len(pool.workload) for pool in pools]
    return float(np.average(shares, weights=sizes))


def _in_order(trace: Trace) -> bool:
    """Whether hardly anybody was sent to an engine before somebody who had come earlier and asked for the same.

    Earlier by so little that nobody's time from arrival to end tells it does not count.
    """
    overtaken, little_s = 0, MIN_RELEVANT * float(trace.jct_s.mean())
    for model in np.unique(trace.model):
        sent = trace.dispatched_s[trace.model == model]
        overtaken += int((sent < np.maximum.accumulate(sent) - little_s).sum())
    return overtaken <= 0.02 * len(trace)


_INTEGERS = (
    "Of an answer that comes whole nobody sees when its engine began it, and so neither steps nor seats. At least "
    f"{MIN_SEEN} answers of some tokens must be streamed (stream: true); the others may come as they like."
)


def _too_few(n: int) -> str:
    return f"{n} requests got an answer so far; at least {MIN_REQUESTS} are needed. A day tells more than an hour."


_NAMES = {
    "srtf": "srtf (shortest predicted first)",
    "isrtf": "isrtf (and cuts, re-predicted)",
    "oracle": "lengths known, no cuts",
}


def report(path: Path | str, order: Order = Order(), *, draws: int = DRAWS, seed: int = 0) -> Gain:  # noqa: B008
    """What length-aware order would have gained on a journal's traffic.

    Raises:
        InputError: It is no journal, or cannot be read.
    """
    return gain(of_journal(path), order, draws=draws, seed=seed)


def text_report(found: Gain) -> str:
    """The finding as lines of text."""
    lines = [f"Verdict: {found.decision}", found.description, ""]
    lines.append(f"{found.requests} requests over {_duration(found.span_s)}")
    if not found.orders:
        return "\n".join(lines)
    lines.append(f"{100 * found.waited_share:.1f} % of all time from arrival to end was waiting for a seat")
    for service in found.services:
        max_num_seqs = "not met" if service.max_num_seqs is None else f"{service.max_num_seqs} at a time"
        step = f"{1e3 * service.step_s:.3g} ms + {1e3 * service.seq_s:.3g} ms a sequence"
        prompt = f"{1e3 * service.prompt_s:.3g} ms a prompt token"
        lines.append(
            f"{service.engines} engine(s): a step {step} + {prompt} (off by {100 * service.error:.0f} % in the "
            f"median); limit {max_num_seqs}"
        )
    lines += ["", f"{'':34}{'mean JCT':>10}  {'change':<30}{'P99 JCT':>10}  change"]
    lines.append(f"{'as it was':34}{found.observed_jct_s:>8.3f} s")
    lines.append(f"{'fcfs (simulated)':34}{found.fcfs_jct_s:>8.3f} s  {'':<30}{found.fcfs_p99_jct_s:>8.3f} s")
    for one in found.orders:
        lines.append(
            f"{_NAMES[one.name]:34}{one.mean_jct_s:>8.3f} s  {_format_change(one.mean):<30}{one.p99_jct_s:>8.3f} s  "
            f"{_format_change(one.p99)}"
        )
    lines.append(f"{'isrtf against srtf':34}{'':>10}  {_format_change(found.cuts)}")
    lines += ["", f"Intervals: {100 * found.level:g} % each, by drawing stretches of this traffic anew."]
    return "\n".join(lines)


def _format_change(change: Change) -> str:
    return f"{100 * change.value:+.1f} % ({100 * change.low:+.1f} to {100 * change.high:+.1f})"


def _duration(span_s: float) -> str:
    for unit, seconds in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if span_s >= 2 * seconds:
            return f"{span_s / seconds:.1f} {unit}"
    return f"{span_s:.0f} seconds"
