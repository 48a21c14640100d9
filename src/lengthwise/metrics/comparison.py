"""Two runs, simulated or measured, and how far one is off the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lengthwise import catalog
from lengthwise.metrics import statistics as bootstrap
from lengthwise.metrics.columns import clock_doubt, request_column
from lengthwise.metrics.statistics import Bootstrap, Column, absolute_errors, column_of, distances, weighted_quantiles
from lengthwise.metrics.summary import Counts, Slo, Window, common, counts_of, rows_of, window_of
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.records import Measured, Records, RequestRecords, Status, TokenGaps, TokenTimes, shape_facts
from lengthwise.schema.workload import Workload


@dataclass(frozen=True)
class ClientSeconds:
    """What of each TTFT and JCT is the client's own: from when a request was due until it was sent.

    Attributes:
        mean_s: As much of the mean TTFT and of the mean JCT.
        p50_s: Median.
        max_s: Largest.
    """

    mean_s: float
    p50_s: float
    max_s: float


@dataclass(frozen=True)
class Side:
    """One of the two runs.

    Attributes:
        name: Of its records, or its source.
        source: Where it comes from, as in Measured.
        counts: Its requests by bucket, warm-up left out.
        span_s: Seconds from the end of the warm-up to its last event.
        client: The client's own seconds; None where there was none, or it did not say.
    """

    name: str
    source: str
    counts: Counts
    span_s: float
    client: ClientSeconds | None = None


@dataclass(frozen=True)
class MetricError:
    """How far ``a`` is off ``b`` in one number.

    Attributes:
        metric: "ttft", "tpot", "tbt", "jct", "queueing_delay", "normalized_latency" (in seconds),
            "requests_per_s", "output_tokens_per_s", "goodput" (good requests a second) or "within_slo".
        stat: "mean", "p50", "p90", "p95" or "p99"; "" for rates and the share.
        a: The prediction.
        b: The truth.
        low: Lower end of the interval of ``error``; NaN where it is not known.
        high: Upper end.
    """

    metric: str
    stat: str
    a: float
    b: float
    low: float = math.nan
    high: float = math.nan

    @property
    def key(self) -> str:
        """Metric and statistic in one: ttft.p95, or requests_per_s."""
        return f"{self.metric}.{self.stat}" if self.stat else self.metric

    @property
    def error(self) -> float:
        """(a - b) / b; NaN where b is 0."""
        return (self.a - self.b) / self.b if self.b else math.nan

    @property
    def has_interval(self) -> bool:
        """Whether the interval is known."""
        return not math.isnan(self.low)

    @property
    def least(self) -> float:
        """The smallest error either way that its interval allows; without one the error itself."""
        if not self.has_interval:
            return abs(self.error)
        return max(0.0, self.low, -self.high)


@dataclass(frozen=True)
class MetricDistance:
    """How far two whole distributions lie apart.

    Attributes:
        metric: As in MetricError.
        count_a: Values of a.
        count_b: Values of b.
        kolmogorov_smirnov: Largest difference of the shares that are at most x, over all x: 0 to 1.
        wasserstein: Mean distance of equal quantiles, over the mean of b.
        mape: Mean of |a - b| / b over requests, paired; NaN without pairs.
        median_ape: Its median.
    """

    metric: str
    count_a: int
    count_b: int
    kolmogorov_smirnov: float
    wasserstein: float
    mape: float = math.nan
    median_ape: float = math.nan


@dataclass(frozen=True)
class Comparison:
    """How far run ``a`` is off run ``b``, which is taken for the truth.

    Attributes:
        a: The prediction.
        b: The truth.
        paired: Whether both are of the same requests, compared one by one.
        errors: By metric and statistic.
        distances: By metric, for those with a value a request (or token).
        warnings: What limits the trust, a sentence each.
        level: Confidence level of the intervals.
        draws: Of the bootstrap.
        warmup_s: Requests that arrived before are left out.
        slo: Limits for goodput, or None.
    """

    a: Side
    b: Side
    paired: bool
    errors: tuple[MetricError, ...]
    distances: tuple[MetricDistance, ...]
    warnings: tuple[str, ...]
    level: float
    draws: int
    warmup_s: float
    slo: Slo | None = None

    def __getitem__(self, key: str) -> MetricError:
        """The error of "ttft.p95" or "requests_per_s"; raises UnknownNameError where it is not told."""
        found = {one.key: one for one in self.errors}
        if key not in found:
            raise UnknownNameError("number in this comparison", key, found)
        return found[key]


Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_SAME_SHARE, _SAME_S = 1e-3, 5e-3
"""Arrivals are the same within a thousandth of the run, or 5 ms."""


@dataclass(frozen=True)
class Run:
    """One side: its records, and the requests that count."""

    measured: Measured
    rows: Window

    @property
    def records(self) -> Records:
        """All that was left behind."""
        return self.measured.records

    @property
    def requests(self) -> RequestRecords:
        """The requests that count."""
        return rows_of(self.records.requests, self.rows)

    @property
    def places(self) -> Ints:
        """[all requests] the row of each among those that count; -1 where it does not."""
        places = np.full(len(self.records.requests.arrival_s), -1)
        places[self.rows] = np.arange(len(places[self.rows]))
        return places

    @property
    def warmed_up(self) -> bool:
        """Whether requests were left out that came before those that count."""
        return bool(self.start_s > np.nanmin(self.records.requests.arrival_s))

    @property
    def start_s(self) -> float:
        """When the first of them arrived."""
        return float(self.requests.arrival_s.min())

    def column(self, metric: str) -> Floats:
        """[rows] seconds; NaN where something never came."""
        values: Floats = request_column(self.requests, f"{metric}_s")
        return values

    def side(self, fallback: str) -> Side:
        """Its facts."""
        name = self.records.name or fallback
        span_s = self.records.end_s - self.start_s
        return Side(name, self.measured.source, counts_of(self.requests), span_s, self._client())

    def _client(self) -> ClientSeconds | None:
        told = self.measured.client_s
        known = np.zeros(0) if told is None else told[self.rows][np.isfinite(told[self.rows])]
        if not len(known):
            return None
        return ClientSeconds(float(known.mean()), float(np.median(known)), float(known.max()))


def runs_of(a: Measured, b: Measured, paired: bool, warmup_s: float) -> tuple[Run, Run]:
    """Both runs without their warm-up; paired ones have the same rows."""
    windows = [window_of(side.records, warmup_s, 0) for side in (a, b)]
    if paired:
        both = common(*windows)
        if not len(rows_of(a.records.requests, both).arrival_s):
            raise InputError(
                f"both runs must have requests in common after the warm-up; with warmup_s {warmup_s:g} they have none"
            )
        windows = [both, both]
    return Run(a, windows[0]), Run(b, windows[1])


def are_same(a: Workload, b: Workload) -> bool:
    """Whether both are of the same requests at the same times."""
    return are_same_lengths(a, b) and are_same_times(a, b)


def are_same_lengths(a: Workload, b: Workload) -> bool:
    """Whether prompts and outputs, request by request, are as long in both."""
    alike = len(a) == len(b) and a.concurrency == b.concurrency
    return alike and all(
        np.array_equal(getattr(a, name), getattr(b, name)) for name in ("prompt_tokens", "output_tokens")
    )


def are_same_times(a: Workload, b: Workload) -> bool:
    """Whether requests arrive at the same times, from the first one on."""
    ours, theirs = (w.arrival_s - w.arrival_s[0] for w in (a, b))
    span_s = float(max(ours[-1], theirs[-1]))
    return bool(np.abs(ours - theirs).max() <= max(_SAME_SHARE * span_s, _SAME_S))


def gaps_as_columns(gaps: TokenGaps) -> tuple[Floats, Ints]:
    """Times between tokens, ascending, and how often each was seen."""
    if gaps.gap_s is not None and gaps.count is not None:
        values, count = gaps.gap_s, gaps.count
    else:
        middle = (gaps.edges_s[:-1] + gaps.edges_s[1:]) / 2
        values, count = np.minimum(middle, gaps.max_s), gaps.histogram
    used = count > 0
    return values[used], count[used]


Gaps = tuple[Floats, Ints]
"""[gaps] seconds, and the row of the request that each is of."""

MOST = 20_000_000
"""More gaps than these are not held at once."""

_NEAR, _LEVELS = 0.02, np.array([0.5, 0.9, 0.99])


def gaps_of(run: Run) -> Gaps | None:
    """The gaps of the requests that count, with rows from 0.

    A measured run tells when each token came. A simulated one tells its steps: a token of a request comes at the
    end of a step of its replica between its first and last token, of each where they are as many as tokens, else
    of evenly spread ones (stages of a pipeline take turns). That is believed where all gaps together are those that
    the run counted: as many, with quantiles within 2 %. None where nothing is told, or it is not believed.
    """
    records, tokens = run.records, run.measured.tokens
    if not 0 < records.gaps.total <= MOST:
        return None
    found = _of_steps(records) if tokens is None else _of_pieces(tokens)
    if found is None or not _agree(found[0], records):
        return None
    place = run.places[found[1]]
    return found[0][place >= 0], place[place >= 0]


def _of_pieces(tokens: TokenTimes) -> Gaps:
    """Gaps between pieces; tokens that came together are 0 apart."""
    row = np.repeat(np.arange(len(tokens.start) - 1), np.diff(tokens.start))
    inside = row[1:] == row[:-1]
    together = np.repeat(row, np.maximum(tokens.tokens - 1, 0))
    gaps = np.concatenate([np.diff(tokens.at_s)[inside], np.zeros(len(together))])
    return gaps, np.concatenate([row[1:][inside], together])


def _of_steps(records: Records) -> Gaps | None:
    r, steps = records.requests, records.steps
    if steps is None:
        return None
    several = np.flatnonzero((r.output_tokens > 1) & np.isfinite(r.first_token_s))
    found = []
    for replica in np.unique(r.replica[several]):
        ends = np.sort(steps.end_s[(steps.replica == replica) & (steps.decode_seqs > 0)])
        own = several[r.replica[several] == replica]
        gaps = _between(ends, r.first_token_s[own], r.finished_s[own], r.output_tokens[own] - 1)
        if gaps is None:
            return None
        found.append((gaps, np.repeat(own, r.output_tokens[own] - 1)))
    if not found:
        return None
    return np.concatenate([gap for gap, _ in found]), np.concatenate([row for _, row in found])


def _between(ends: Floats, first_s: Floats, last_s: Floats, after: Ints) -> Floats | None:
    """Gaps of requests one after another, each of ``after`` tokens; None where steps are too few for them."""
    begin = np.searchsorted(ends, first_s, side="right")
    past = np.searchsorted(ends, last_s, side="right")
    steps = np.where(np.isfinite(last_s), past - begin, after)  # who is not finished had a token at each
    if (steps < after).any() or (begin + steps > len(ends)).any():
        return None
    nth = np.arange(int(after.sum())) - np.repeat(np.cumsum(after) - after, after) + 1
    each, of = np.repeat(steps, after), np.repeat(after, after)
    at_s = ends[np.repeat(begin, after) + (nth * each + of - 1) // of - 1]
    before_s = np.concatenate([[0.0], at_s[:-1]])
    before_s[nth == 1] = first_s
    gaps: Floats = at_s - before_s
    return gaps


def _agree(gaps: Floats, records: Records) -> bool:
    """Whether they are those that the run counted."""
    if len(gaps) != records.gaps.total:
        return False
    counted = weighted_quantiles(*gaps_as_columns(records.gaps), _LEVELS)
    return bool(np.allclose(np.quantile(gaps, _LEVELS), counted, rtol=_NEAR, atol=1e-6))


_SETTINGS = ("tp", "pp", "replicas", "max_num_seqs", "max_num_batched_tokens")
_SETTLE = "`lengthwise bench URL SCENARIO.toml --records FILE` keeps the model's shape with the records, and settles it"


def origin_warnings(a: Measured, b: Measured) -> Iterator[str]:
    """Models are held against each other by shape, whatever they are called; the rest by what both tell."""
    yield from _models(a, b)
    ours, theirs = _gpu(a), _gpu(b)
    if ours and theirs and ours != theirs:
        yield f"They are of different GPUs: {ours} and {theirs}."
    engines = [str(run.metadata.get("engine") or "") for run in (a, b)]
    if all(engines) and engines[0] != engines[1]:
        yield f"They are of different engines: {engines[0]} and {engines[1]}."
    apart = [
        f"{name} {_waiting_after(a)[name]} and {_waiting_after(b)[name]}"
        for name in _SETTINGS
        if name in _waiting_after(a)
        and name in _waiting_after(b)
        and _waiting_after(a)[name] != _waiting_after(b)[name]
    ]
    if apart:
        yield f"Their deployments differ: {', '.join(apart)}."


def _models(a: Measured, b: Measured) -> Iterator[str]:
    names, shapes = [_model(run) for run in (a, b)], [_shape(run) for run in (a, b)]
    if shapes[0] is not None and shapes[1] is not None:
        apart = [
            f"{key} {shapes[0][key]} and {shapes[1][key]}"
            for key in shapes[0]
            if key in shapes[1] and shapes[0][key] != shapes[1][key]
        ]
        if apart:
            yield f"They are of different models: {names[0]} and {names[1]} ({', '.join(apart)})."
    elif all(names) and names[0] != names[1]:
        unknown = " and ".join(
            f"{letter} tells only the name {name}"
            for letter, name, shape in zip("AB", names, shapes, strict=True)
            if shape is None
        )
        yield (
            f"They may be of different models, {names[0]} and {names[1]}: {unknown}, under which it was served. "
            f"{_SETTLE}."
        )


def _waiting_after(run: Measured) -> Mapping[str, Any]:
    told = run.metadata.get("deployment")
    return told if isinstance(told, Mapping) else {}


def _model(run: Measured) -> str:
    return str(_waiting_after(run).get("model") or run.metadata.get("model") or "")


def _shape(run: Measured) -> Mapping[str, Any] | None:
    """As the records keep it; else of the model that the catalog knows by that name."""
    told = _waiting_after(run).get("model_shape")
    if isinstance(told, Mapping):
        return told
    known = catalog.served_model(_model(run)) if _model(run) else None
    return None if known is None else shape_facts(known)


def _gpu(run: Measured) -> str:
    """By the catalog's name, where it has one."""
    name = str(_waiting_after(run).get("gpu") or run.metadata.get("gpu") or "")
    known = catalog.find_gpu(name) if name else None
    return name if known is None else known.name


MIN_COUNT = 100
"""With fewer requests a tail is a handful of them."""

IMPROVEMENT = 0.01


def doubts_of(a: Run, b: Run, *, paired: bool) -> tuple[str, ...]:
    """Each doubt once, the gravest first: what does not belong together, what is missing, what was measured."""
    found = [*_merged(a, b), *_served_lengths(a, b, paired=paired)]
    for name, run in (("A", a), ("B", b)):
        found += [*_partial(name, run)]
        doubt = clock_doubt(run.requests, run.records.end_s)
        found += [f"{name}: {doubt}."] if doubt else []
        found += [f"{name}: {doubt}" for doubt in run.measured.warnings]
    fewest = min(len(run.requests.arrival_s) for run in (a, b))
    if fewest < MIN_COUNT:
        found.append(f"There are {fewest} requests: tails (P95, P99) rest on a handful of them.")
    return tuple(dict.fromkeys(found))


def _merged(a: Run, b: Run) -> Iterator[str]:
    ours, theirs = a.measured.workload, b.measured.workload
    yield from origin_warnings(a.measured, b.measured)
    if are_same_lengths(ours, theirs):
        if not are_same_times(ours, theirs):
            yield "The same requests arrive at different times in A and B: queues differ by the load, too."
        return
    for name, what in (("prompt_tokens", "prompts"), ("output_tokens", "outputs asked for")):
        mean_a, mean_b = (float(getattr(w, name).mean()) for w in (ours, theirs))
        if abs(mean_a - mean_b) > IMPROVEMENT * mean_b:
            yield (
                f"They do not belong together: {what} have {mean_a:,.0f} tokens on average in A and {mean_b:,.0f} in B."
            )
    if len(ours) != len(theirs):
        yield f"They are of different requests: {len(ours):,} in A and {len(theirs):,} in B."
    elif ours.concurrency != theirs.concurrency:
        yield "They do not belong together: one is a closed loop, or one of another concurrency."
    else:
        yield "They are of different requests: lengths differ one by one."


def _served_lengths(a: Run, b: Run, *, paired: bool) -> Iterator[str]:
    """Outputs that ended earlier or later than in the other run."""
    if paired:
        done = (a.requests.status == Status.FINISHED) & (b.requests.status == Status.FINISHED)
        other = a.requests.output_tokens[done] != b.requests.output_tokens[done]
        if done.any() and other.mean() > IMPROVEMENT:
            yield f"{100 * other.mean():.0f} % of outputs are not as long in A as in B: JCT compares unlike work."


def _partial(name: str, run: Run) -> Iterator[str]:
    status = run.requests.status
    unfinished = int((status == Status.UNFINISHED).sum())
    if unfinished:
        yield f"{name} is a partial run: {unfinished:,} of {len(status):,} requests were not finished at its end."
    errors = sum(run.measured.errors.values())
    if errors:
        worst = max(run.measured.errors, key=lambda key: run.measured.errors[key])
        yield f"{name}: {errors:,} requests failed, most of: {worst}."


MAX_DISTANCE = 100.0
"""So many times the ratio of the runs, an interval's upper end comes of a truth that is nearly 0 in some draws."""
EMPTY = 1e-3
"""A quantile below this share of its run's mean is next to nothing, as the gaps of tokens that came in one piece."""


def without_nonsense(errors: Sequence[MetricError]) -> tuple[tuple[MetricError, ...], tuple[str, ...]]:
    """The errors, without an interval where they are relative to next to nothing; a doubt that names them."""
    means = {one.metric: one.b for one in errors if one.stat == "mean"}
    vague = {one.key for one in errors if one.has_interval and _vague(one, means.get(one.metric, 0.0))}
    kept = tuple(replace(one, low=math.nan, high=math.nan) if one.key in vague else one for one in errors)
    if not vague:
        return kept, ()
    names = ", ".join(f"{one.metric.upper()} {one.stat}".strip() for one in errors if one.key in vague)
    told = f"{names} of B can be next to nothing: errors relative to that can be anything, so no interval is told."
    return kept, (told,)


def _vague(one: MetricError, mean_b: float) -> bool:
    ratio = 1 + one.error
    return not math.isfinite(one.high) or 1 + one.high > MAX_DISTANCE * ratio or one.b < EMPTY * mean_b


def rates(a: Run, b: Run, slo: Slo | None, drawn: Bootstrap) -> Iterator[MetricError]:
    """Finished requests, their tokens and good requests a second, in each run's window; then the good share."""
    for metric in ("requests_per_s", "output_tokens_per_s", *(("goodput",) if slo else ())):
        ours, theirs = (_spans(run, metric, slo) for run in (a, b))
        events = min(int(np.isfinite(run.requests.finished_s).sum()) for run in (a, b))
        low, high = _rate_interval(ours, theirs, drawn) if events >= bootstrap.LEAST else _UNKNOWN
        yield MetricError(metric, "", float(ours.mean()), float(theirs.mean()), low, high)
    if slo is not None:
        good_a, good_b = (slo.met(run.requests)["all"].astype(np.float64) for run in (a, b))
        yield _share(good_a, good_b, drawn)


_UNKNOWN = (math.nan, math.nan)


def _spans(run: Run, metric: str, slo: Slo | None) -> Floats:
    """[spans] events a second in equal spans of the window."""
    r = run.requests
    counted = slo.met(r)["all"] if metric == "goodput" and slo else r.status == Status.FINISHED
    tokens = r.output_tokens[counted] if metric == "output_tokens_per_s" else None
    edges = np.linspace(run.start_s, max(run.records.end_s, run.start_s), bootstrap.SPANS + 1)
    made = np.histogram(r.finished_s[counted], edges, weights=tokens)[0]
    found: Floats = made * bootstrap.SPANS / max(run.records.end_s - run.start_s, 1e-12)
    return found


def _rate_interval(own: Floats, other: Floats, drawn: Bootstrap) -> tuple[float, float]:
    """By drawing spans; of paired runs the same ones, in which the same requests arrive."""
    rng = np.random.default_rng(drawn.seed)
    first = bootstrap.drawn(rng, bootstrap.SPANS, drawn.draws)
    second = first if drawn.paired else bootstrap.drawn(rng, bootstrap.SPANS, drawn.draws)
    a, b = ((w @ s / bootstrap.SPANS)[:, None] for w, s in ((first, own), (second, other)))
    low, high = bootstrap.interval(a, b, drawn.level)
    return float(low[0]), float(high[0])


def _share(good_a: Floats, good_b: Floats, drawn: Bootstrap) -> MetricError:
    low, high = _UNKNOWN
    if min(len(good_a), len(good_b)) >= bootstrap.LEAST:
        low, high = (float(end[0]) for end in drawn.errors(column_of(good_a), column_of(good_b), np.zeros(0)))
    return MetricError("within_slo", "", float(good_a.mean()), float(good_b.mean()), low, high)


LATENCIES = ("ttft", "tpot", "tbt", "jct", "queueing_delay", "normalized_latency")
STATS = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_Q = np.array(list(STATS.values()))


def compare(
    a: Measured,
    b: Measured,
    *,
    paired: bool | Literal["auto"] = "auto",
    warmup_s: float = 0.0,
    slo: Slo | None = None,
    level: float = 0.95,
    draws: int = 1000,
    seed: int = 0,
) -> Comparison:
    """How far ``a`` (the prediction) is off ``b`` (the truth) in every metric and quantile.

    Intervals come from a bootstrap over blocks of consecutive requests (for rates: over spans of time), longer ones
    where neighbours are alike over long spans, and wider where few blocks are left. They say how far the error moves
    with the requests that happened to come, not how far another machine or day would lie off. Runs of the same requests
    at the same times are compared request by request, which makes them much narrower. There is none below 20 requests,
    for an error over 0 or next to nothing, where a run drifts all along (doubts say so), and for the time between
    tokens of a run that keeps neither when tokens came nor its steps.

    Args:
        a: The prediction.
        b: The truth.
        paired: Whether both are of the same requests; "auto": where lengths and arrivals are equal.
        warmup_s: Requests that arrived before are left out (but for distances of the time between tokens, and for
            its errors where no interval is known).
        slo: Limits for goodput.
        level: Confidence level.
        draws: Of the bootstrap.
        seed: Of the bootstrap: equal inputs give equal bytes.

    Raises:
        InputError: Pairs are asked for and the runs are not of as many requests, the warm-up leaves nothing,
            or ``level`` or ``draws`` cannot be.
    """
    _check(a, b, paired, level, draws)
    pairs = are_same(a.workload, b.workload) if paired == "auto" else paired
    ours, theirs = runs_of(a, b, pairs, warmup_s)
    drawn = Bootstrap(pairs, draws, seed, level)
    drawn_errors = [*_latencies(ours, theirs, drawn), *rates(ours, theirs, slo, drawn)]
    errors, vague = without_nonsense(drawn_errors)
    return Comparison(
        a=ours.side("A"),
        b=theirs.side("B"),
        paired=pairs,
        errors=errors,
        distances=tuple(_distances(ours, theirs, paired=pairs)),
        warnings=(*doubts_of(ours, theirs, paired=pairs), *_too_alike(drawn_errors, ours, theirs), *vague),
        level=level,
        draws=draws,
        warmup_s=warmup_s,
        slo=slo,
    )


def _check(a: Measured, b: Measured, paired: bool | str, level: float, draws: int) -> None:
    if not 0 < level < 1 or draws < 1:
        raise InputError(f"level must be between 0 and 1 and draws at least 1; they are {level} and {draws}")
    if paired not in (True, False, "auto"):
        raise InputError(f'paired must be true, false or "auto"; it is {paired!r}')
    if paired is True and len(a.workload) != len(b.workload):
        raise InputError(
            f"runs that are compared request by request must have as many; they have {len(a.workload)} and "
            f'{len(b.workload)}: leave paired at "auto"'
        )


def _latencies(a: Run, b: Run, drawn: Bootstrap) -> Iterator[MetricError]:
    for metric in LATENCIES:
        if metric == "tbt":
            yield from _tbt(a, b, drawn)
            continue
        ours, theirs = column_of(a.column(metric)), column_of(b.column(metric))
        counts = len(ours.values), len(theirs.values)
        if not all(counts):
            continue
        low = high = np.full(1 + len(_Q), np.nan)
        if min(counts) >= bootstrap.LEAST:
            low, high = drawn.errors(ours, theirs, _Q)
        points = [np.array([v.mean(), *np.quantile(v, _Q)]) for v in (ours.values, theirs.values)]
        yield from _errors(metric, points, low, high)


def _too_alike(errors: Sequence[MetricError], a: Run, b: Run) -> Iterator[str]:
    """That intervals are not told of runs long enough to have some, if their stretches are not independent."""
    enough = [
        metric
        for metric in ("ttft", "tpot", "jct")
        if min(np.isfinite(run.column(metric)).sum() for run in (a, b)) >= bootstrap.LEAST
    ]
    untold = [one.metric.upper() for one in errors if one.stat == "mean" and not one.has_interval]
    if told := [name for name in untold if name.lower() in enough]:
        yield (
            f"{', '.join(told)} drift through the run, which holds too few independent stretches to tell intervals: "
            "measure longer, or several times."
        )


def _errors(metric: str, points: list[Floats], low: Floats, high: Floats) -> Iterator[MetricError]:
    for i, stat in enumerate(("mean", *STATS)):
        yield MetricError(metric, stat, float(points[0][i]), float(points[1][i]), float(low[i]), float(high[i]))


def _tbt(a: Run, b: Run, drawn: Bootstrap) -> Iterator[MetricError]:
    """Of pooled gaps; with an interval where both runs tell whose they are. Only then a warm-up is left out."""
    pooled = [run.records.gaps for run in (a, b)]
    if not all(one.total for one in pooled):
        return
    points = [np.array([one.sum_s / one.total, *weighted_quantiles(*gaps_as_columns(one), _Q)]) for one in pooled]
    low = high = np.full(1 + len(_Q), np.nan)
    known = [gaps_of(run) for run in (a, b)]
    if known[0] is not None and known[1] is not None:
        whose = [len(np.unique(row)) for _, row in (known[0], known[1])]
        if a.warmed_up or b.warmed_up:
            points = [np.array([gap.mean(), *np.quantile(gap, _Q)]) for gap, _ in (known[0], known[1])]
        if min(whose) >= bootstrap.LEAST:
            low, high = drawn.errors(_gaps(known[0], a), _gaps(known[1], b), _Q)
    yield from _errors("tbt", points, low, high)


def _gaps(gaps: Gaps, run: Run) -> Column:
    """Requests are drawn as for the other metrics, each with all its gaps."""
    return Column(*gaps, len(run.requests.arrival_s))


def _distances(a: Run, b: Run, *, paired: bool) -> Iterator[MetricDistance]:
    for metric in LATENCIES:
        if metric == "tbt":
            sides = [gaps_as_columns(run.records.gaps) for run in (a, b)]
            counts = [run.records.gaps.total for run in (a, b)]
            mape = median = float("nan")
        else:
            columns = [run.column(metric) for run in (a, b)]
            sides = [np.unique(v[np.isfinite(v)], return_counts=True) for v in columns]
            counts = [int(count.sum()) for _, count in sides]
            mape, median = absolute_errors(*columns) if paired else (float("nan"), float("nan"))
        if all(counts):
            yield MetricDistance(metric, counts[0], counts[1], *distances(sides[0], sides[1]), mape, median)
