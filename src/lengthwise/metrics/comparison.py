"""Comparison of two runs, simulated or measured: relative errors with intervals, and distances of distributions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from lengthwise import catalog
from lengthwise.metrics.bootstrap import MIN_REQUESTS, SPANS, Bootstrap, Sample, sample_of
from lengthwise.metrics.columns import clock_warning, request_column
from lengthwise.metrics.distribution import distances, gap_counts, relative_errors, weighted_quantiles
from lengthwise.metrics.summary import CountedRows, Counts, Slo, bucket_counts, common_rows, counted_rows, select_rows
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.metric_names import LATENCIES, QUANTILES
from lengthwise.schema.records import Records, RequestRecords, RunResult, Status, TokenTimes, shape_facts
from lengthwise.schema.workload import Workload
from lengthwise.statistics import Floats, Ints

_Q = np.array(list(QUANTILES.values()))
_UNKNOWN = (math.nan, math.nan)

_MAX_RELATIVE_SHIFT, _MAX_SHIFT_S = 1e-3, 5e-3  # arrivals count as equal up to this share of the run or these seconds
MAX_GAPS = 20_000_000  # more would not fit in memory: no interval for the time between tokens
_GAP_TOLERANCE, _GAP_QUANTILES = 0.02, np.array([0.5, 0.9, 0.99])

MIN_TAIL_REQUESTS = 100  # with fewer requests, few of them determine the tails (P95, P99)
MIN_DIFFERENCE = 0.01  # smaller relative differences between the workloads of two runs give no warning
MAX_RATIO = 100.0  # if the interval of a / b ends above this multiple of a / b, the reference b is nearly 0
NEGLIGIBLE_SHARE = 1e-3  # a quantile below this share of the mean is no reference (gaps in a chunk of tokens are 0)
_DEPLOYMENT_KEYS = ("tp", "pp", "dp", "ep", "replicas", "max_num_seqs", "max_num_batched_tokens")


@dataclass(frozen=True)
class ClientSeconds:
    """The client's own delay, from when a request was due until it was sent. TTFT and JCT include this delay."""

    mean_s: float
    p50_s: float
    max_s: float


@dataclass(frozen=True)
class Side:
    """One of the two compared runs."""

    name: str  # name of its records, or its source
    source: str  # as in RunResult
    counts: Counts  # requests by outcome, warm-up left out
    span_s: float  # seconds from the first counted arrival to the last event
    client: ClientSeconds | None = None  # None where the client's delays are unknown


@dataclass(frozen=True)
class MetricError:
    """Error of ``a`` (the prediction) against ``b`` (the reference) in one statistic of one metric."""

    # "ttft", "tpot", "tbt", "jct", "queueing_delay", "normalized_latency" (in seconds), "requests_per_s",
    # "output_tokens_per_s", "goodput" (good requests a second), "within_slo" or "hit_rate" (share of the prompts'
    # tokens that the prefix cache had)
    metric: str
    stat: str  # "mean", "p50", "p90", "p95" or "p99"; "" for rates and the share
    a: float  # the prediction
    b: float  # the reference
    low: float = math.nan  # lower end of the interval of ``error``; NaN where unknown
    high: float = math.nan  # upper end

    @property
    def key(self) -> str:
        """Return metric and statistic as one name, such as "ttft.p95", or only the metric: "requests_per_s"."""
        return f"{self.metric}.{self.stat}" if self.stat else self.metric

    @property
    def error(self) -> float:
        """Return (a - b) / b, or NaN where b is 0."""
        return (self.a - self.b) / self.b if self.b else math.nan

    @property
    def has_interval(self) -> bool:
        """Return whether the interval is known."""
        return not math.isnan(self.low)

    @property
    def least(self) -> float:
        """Return the smallest absolute error in the interval or, without an interval, the absolute error."""
        return max(0.0, self.low, -self.high) if self.has_interval else abs(self.error)


@dataclass(frozen=True)
class MetricDistance:
    """Distances between a metric's distributions in the two runs."""

    metric: str  # as in MetricError
    count_a: int  # number of values of a
    count_b: int  # number of values of b
    kolmogorov_smirnov: float  # largest difference of the shares that are at most x, over all x: 0 to 1
    wasserstein: float  # mean distance of equal quantiles, over the mean of b
    mape: float = math.nan  # mean of |a - b| / b over paired requests; NaN without pairs
    median_ape: float = math.nan  # median of the same


@dataclass(frozen=True)
class Comparison:
    """Errors of run ``a`` (the prediction) against run ``b`` (the reference)."""

    a: Side  # the prediction
    b: Side  # the reference
    paired: bool  # whether both are of the same requests, compared one by one
    errors: tuple[MetricError, ...]  # by metric and statistic
    distances: tuple[MetricDistance, ...]  # by metric, for metrics with a value for each request (or token)
    warnings: tuple[str, ...]  # limits of the comparison, one sentence each
    level: float  # confidence level of the intervals
    draws: int  # number of bootstrap draws
    warmup_s: float  # requests that arrived earlier are left out
    slo: Slo | None = None  # limits for goodput, or None

    def __getitem__(self, key: str) -> MetricError:
        """Return the error of a key such as "ttft.p95" or "requests_per_s". Raises UnknownNameError for other keys."""
        by_key = {error.key: error for error in self.errors}
        if key not in by_key:
            raise UnknownNameError("number in this comparison", key, by_key)
        return by_key[key]


@dataclass(frozen=True)
class Run:
    """A measured or simulated run, and which of its requests count."""

    measured: RunResult
    rows: CountedRows

    @property
    def records(self) -> Records:
        """Return the records of the complete run."""
        return self.measured.records

    @cached_property
    def requests(self) -> RequestRecords:
        """Return the requests that count."""
        return select_rows(self.records.requests, self.rows)

    @property
    def start_s(self) -> float:
        """Return when the first of the requests that count arrived, in seconds."""
        return float(self.requests.arrival_s.min())

    def column(self, metric: str) -> Floats:
        """Return [rows] a metric of the requests that count, in seconds. NaN stands for events that never happened."""
        return np.asarray(request_column(self.requests, f"{metric}_s"))

    def side(self, fallback: str) -> Side:
        """Return the run's description. The name is ``fallback`` if the records have none."""
        client_s = self.measured.client_s
        known = np.zeros(0) if client_s is None else client_s[self.rows][np.isfinite(client_s[self.rows])]
        client = ClientSeconds(float(known.mean()), float(np.median(known)), float(known.max())) if len(known) else None
        span_s = self.records.end_s - self.start_s
        return Side(self.records.name or fallback, self.measured.source, bucket_counts(self.requests), span_s, client)


def compare(
    a: RunResult,
    b: RunResult,
    *,
    paired: bool | Literal["auto"] = "auto",
    warmup_s: float = 0.0,
    slo: Slo | None = None,
    level: float = 0.95,
    draws: int = 1000,
    seed: int = 0,
) -> Comparison:
    """Return the relative errors of ``a`` (the prediction) against ``b`` (the reference) in all metrics and quantiles.

    Intervals come from a bootstrap over blocks of consecutive requests (for rates: over spans of time). They cover the
    randomness of the requests, not differences between machines or days. Runs of the same requests at the same times
    are compared request by request, which makes the intervals much narrower. There is no interval below 20 requests,
    for an error relative to a value near 0, if a run drifts throughout (a warning names it), and for the time between
    tokens if a run records neither token times nor steps.

    Args:
        paired: Whether both runs have the same requests. "auto" decides by whether lengths and arrivals are equal.
        warmup_s: Requests that arrived earlier are left out, except for the time between tokens: distances include
            these requests, and so do errors without an interval.
        slo: Limits for goodput.
        level: Confidence level of the intervals.
        draws: Number of bootstrap draws.

    Raises:
        InputError: An argument is invalid, such as ``paired`` for runs of different sizes, or no request is left.
    """
    if not 0 < level < 1 or draws < 1:
        raise InputError(f"level must be between 0 and 1 and draws at least 1; they are {level} and {draws}")
    if paired not in (True, False, "auto"):
        raise InputError(f'paired must be true, false or "auto"; it is {paired!r}')
    if paired is True and len(a.workload) != len(b.workload):
        raise InputError(
            f"runs that are compared request by request must have as many; they have {len(a.workload)} and "
            f'{len(b.workload)}: leave paired at "auto"'
        )
    if paired == "auto":
        paired = _same_lengths(a.workload, b.workload) and _same_times(a.workload, b.workload)
    rows = [counted_rows(side.records, warmup_s, 0) for side in (a, b)]
    if paired:
        both = common_rows(*rows)
        if not len(select_rows(a.records.requests, both).arrival_s):
            raise InputError(
                f"both runs must have requests in common after the warm-up; with warmup_s {warmup_s:g} they have none"
            )
        rows = [both, both]
    run_a, run_b = Run(a, rows[0]), Run(b, rows[1])
    bootstrap = Bootstrap(paired, draws, seed, level)
    estimated = [
        *_latency_errors(run_a, run_b, bootstrap),
        *_rate_errors(run_a, run_b, slo, bootstrap),
        *_hit_rate_errors(run_a, run_b, bootstrap, counted=not warmup_s),
    ]
    errors, negligible = _without_negligible(estimated)
    return Comparison(
        a=run_a.side("A"),
        b=run_b.side("B"),
        paired=paired,
        errors=errors,
        distances=tuple(_distances(run_a, run_b, paired=paired)),
        warnings=(*_run_warnings(run_a, run_b, paired=paired), *_drift_warnings(estimated, run_a, run_b), *negligible),
        level=level,
        draws=draws,
        warmup_s=warmup_s,
        slo=slo,
    )


def _latency_errors(a: Run, b: Run, bootstrap: Bootstrap) -> Iterator[MetricError]:
    for metric in LATENCIES:
        if metric == "tbt":
            yield from _tbt_errors(a, b, bootstrap)
            continue
        samples = [sample_of(run.column(metric)) for run in (a, b)]
        counts = [len(sample.values) for sample in samples]
        if all(counts):
            low = high = np.full(1 + len(_Q), np.nan)
            if min(counts) >= MIN_REQUESTS:
                low, high = bootstrap.error_interval(samples[0], samples[1], _Q)
            points = [np.array([sample.values.mean(), *np.quantile(sample.values, _Q)]) for sample in samples]
            yield from _metric_errors(metric, points, low, high)


def _tbt_errors(a: Run, b: Run, bootstrap: Bootstrap) -> Iterator[MetricError]:
    """Yield the errors of the times between tokens. Intervals need the request of each gap (``request_gaps``)."""
    pooled = [run.records.gaps for run in (a, b)]
    if not all(gaps.total for gaps in pooled):
        return
    points = [np.array([gaps.sum_s / gaps.total, *weighted_quantiles(*gap_counts(gaps), _Q)]) for gaps in pooled]
    low = high = np.full(1 + len(_Q), np.nan)
    gaps_a, gaps_b = request_gaps(a), request_gaps(b)
    if gaps_a is not None and gaps_b is not None:
        if any(run.start_s > np.nanmin(run.records.requests.arrival_s) for run in (a, b)):  # there is a warm-up
            points = [np.array([gap_s.mean(), *np.quantile(gap_s, _Q)]) for gap_s, _ in (gaps_a, gaps_b)]
        if min(len(np.unique(row)) for _, row in (gaps_a, gaps_b)) >= MIN_REQUESTS:
            samples = [Sample(*gaps, len(run.requests.arrival_s)) for gaps, run in ((gaps_a, a), (gaps_b, b))]
            low, high = bootstrap.error_interval(samples[0], samples[1], _Q)
    yield from _metric_errors("tbt", points, low, high)


def _metric_errors(metric: str, points: list[Floats], low: Floats, high: Floats) -> Iterator[MetricError]:
    for i, stat in enumerate(("mean", *QUANTILES)):
        yield MetricError(metric, stat, float(points[0][i]), float(points[1][i]), float(low[i]), float(high[i]))


def _rate_errors(a: Run, b: Run, slo: Slo | None, bootstrap: Bootstrap) -> Iterator[MetricError]:
    events = min(int(np.isfinite(run.requests.finished_s).sum()) for run in (a, b))
    for metric in ("requests_per_s", "output_tokens_per_s", *(("goodput",) if slo else ())):
        rate_a, rate_b = (_span_rates(run, metric, slo) for run in (a, b))
        low, high = bootstrap.rate_interval(rate_a, rate_b) if events >= MIN_REQUESTS else _UNKNOWN
        yield MetricError(metric, "", float(rate_a.mean()), float(rate_b.mean()), low, high)
    if slo is not None:
        good_a, good_b = (slo.met(run.requests)["all"].astype(np.float64) for run in (a, b))
        low, high = _UNKNOWN
        if min(len(good_a), len(good_b)) >= MIN_REQUESTS:
            ends = bootstrap.error_interval(sample_of(good_a), sample_of(good_b), np.zeros(0))
            low, high = (float(end[0]) for end in ends)
        yield MetricError("within_slo", "", float(good_a.mean()), float(good_b.mean()), low, high)


def _hit_rate_errors(a: Run, b: Run, bootstrap: Bootstrap, *, counted: bool) -> Iterator[MetricError]:
    """Yield the error of the share of prompt tokens that were cached, unless both runs cached none.

    A run without cached tokens for each request has the server's counts, which cover warm-up, too: they are used only
    if ``counted``.
    """
    shares, samples = zip(*(_hit_rate(run, counted=counted) for run in (a, b)), strict=True)
    if not all(map(math.isfinite, shares)) or not any(shares):
        return
    low, high = _UNKNOWN
    if all(sample is not None and len(sample.values) >= MIN_REQUESTS for sample in samples):
        low, high = (float(end[0]) for end in bootstrap.error_interval(samples[0], samples[1], np.zeros(0)))
    yield MetricError("hit_rate", "", shares[0], shares[1], low, high)


def _hit_rate(run: Run, *, counted: bool) -> tuple[float, Sample | None]:
    """Return a run's share of cached prompt tokens, NaN if unknown, and a sample that has this ratio as its mean."""
    r = run.requests
    if r.cached_tokens is None:
        found = run.measured.metadata.get("prefix_cache") if counted else None
        known = isinstance(found, Mapping) and found.get("looked_up_tokens", 0) > 0
        return (found["found_tokens"] / found["looked_up_tokens"] if known and found else math.nan), None
    admitted = np.isfinite(r.scheduled_s)
    if not admitted.any():
        return math.nan, None
    prompt, cached = r.prompt_tokens[admitted], r.cached_tokens[admitted]
    share = float(cached.sum() / prompt.sum())
    influence = np.full(len(admitted), np.nan)
    influence[admitted] = share + (cached - share * prompt) / prompt.mean()
    return share, sample_of(influence)


def _span_rates(run: Run, metric: str, slo: Slo | None) -> Floats:
    r = run.requests
    counted = slo.met(r)["all"] if metric == "goodput" and slo else r.status == Status.FINISHED
    tokens = r.output_tokens[counted] if metric == "output_tokens_per_s" else None
    edges = np.linspace(run.start_s, max(run.records.end_s, run.start_s), SPANS + 1)
    events = np.histogram(r.finished_s[counted], edges, weights=tokens)[0]
    return np.asarray(events * SPANS / max(run.records.end_s - run.start_s, 1e-12))


def _distances(a: Run, b: Run, *, paired: bool) -> Iterator[MetricDistance]:
    for metric in LATENCIES:
        mape = median = math.nan
        if metric == "tbt":
            sides = [gap_counts(run.records.gaps) for run in (a, b)]
        else:
            columns = [run.column(metric) for run in (a, b)]
            sides = [np.unique(column[np.isfinite(column)], return_counts=True) for column in columns]
            if paired:
                mape, median = relative_errors(*columns)
        counts = [int(count.sum()) for _, count in sides]
        if all(counts):
            yield MetricDistance(metric, counts[0], counts[1], *distances(sides[0], sides[1]), mape, median)


Gaps = tuple[Floats, Ints]  # [gaps] seconds, and the row of the request that each belongs to


def request_gaps(run: Run) -> Gaps | None:
    """Return the gaps between tokens of the requests that count, with each gap's row of requests, or None if unknown.

    Rows start from 0. A measured run records when each token came. In a simulated run tokens are assigned to the ends
    of the replica's steps between the request's first and last token: one to each step if there are as many steps as
    tokens, and otherwise to evenly spaced steps (stages of a pipeline take turns). The result is None unless all gaps
    together agree with the recorded gaps in number and, within 2 %, in quantiles.
    """
    records, tokens = run.records, run.measured.tokens
    if not 0 < records.gaps.total <= MAX_GAPS:
        return None
    gaps = _step_gaps(records) if tokens is None else _chunk_gaps(tokens)
    if gaps is None or len(gaps[0]) != records.gaps.total:
        return None
    recorded = weighted_quantiles(*gap_counts(records.gaps), _GAP_QUANTILES)
    if not np.allclose(np.quantile(gaps[0], _GAP_QUANTILES), recorded, rtol=_GAP_TOLERANCE, atol=1e-6):
        return None
    row_of = np.full(len(records.requests.arrival_s), -1)
    row_of[run.rows] = np.arange(len(row_of[run.rows]))
    row = row_of[gaps[1]]
    return gaps[0][row >= 0], row[row >= 0]


def _chunk_gaps(tokens: TokenTimes) -> Gaps:
    row = np.repeat(np.arange(len(tokens.start) - 1), np.diff(tokens.start))
    inside = row[1:] == row[:-1]
    same_chunk = np.repeat(row, np.maximum(tokens.tokens - 1, 0))
    gaps = np.concatenate([np.diff(tokens.at_s)[inside], np.zeros(len(same_chunk))])
    return gaps, np.concatenate([row[1:][inside], same_chunk])


def _step_gaps(records: Records) -> Gaps | None:
    r, steps = records.requests, records.steps
    if steps is None:
        return None
    multiple = np.flatnonzero((r.output_tokens > 1) & np.isfinite(r.first_token_s))
    parts = []
    for replica in np.unique(r.replica[multiple]):
        ends_s = np.sort(steps.end_s[(steps.replica == replica) & (steps.decode_seqs > 0)])
        own = multiple[r.replica[multiple] == replica]
        gaps = _gaps_between(ends_s, r.first_token_s[own], r.finished_s[own], r.output_tokens[own] - 1)
        if gaps is None:
            return None
        parts.append((gaps, np.repeat(own, r.output_tokens[own] - 1)))
    if not parts:
        return None
    return np.concatenate([gaps for gaps, _ in parts]), np.concatenate([row for _, row in parts])


def _gaps_between(ends_s: Floats, first_s: Floats, last_s: Floats, count: Ints) -> Floats | None:
    """Return ``count`` gaps of each request, concatenated, from the ends of steps, or None if steps are too few."""
    start = np.searchsorted(ends_s, first_s, side="right")
    stop = np.searchsorted(ends_s, last_s, side="right")
    # An unfinished request received a token at every step.
    steps = np.where(np.isfinite(last_s), stop - start, count)
    if (steps < count).any() or (start + steps > len(ends_s)).any():
        return None
    nth = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count) + 1
    steps_of, count_of = np.repeat(steps, count), np.repeat(count, count)
    at_s = ends_s[np.repeat(start, count) + (nth * steps_of + count_of - 1) // count_of - 1]
    before_s = np.concatenate([[0.0], at_s[:-1]])
    before_s[nth == 1] = first_s
    return np.asarray(at_s - before_s)


def _same_lengths(a: Workload, b: Workload) -> bool:
    return (
        len(a) == len(b)
        and a.concurrency == b.concurrency
        and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("prompt_tokens", "output_tokens"))
    )


def _same_relation(a: Any, b: Any) -> bool:
    """Return whether two records of columns, such as shared prefixes, are equal; None equals only None."""
    if a is None or b is None:
        return a is b
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))


def _same_times(a: Workload, b: Workload) -> bool:
    at_a, at_b = (w.arrival_s - w.arrival_s[0] for w in (a, b))
    tolerance_s = max(_MAX_RELATIVE_SHIFT * float(max(at_a[-1], at_b[-1])), _MAX_SHIFT_S)
    return bool(np.abs(at_a - at_b).max() <= tolerance_s)


def _run_warnings(a: Run, b: Run, *, paired: bool) -> tuple[str, ...]:
    warnings = [
        *_origin_warnings(a.measured, b.measured),
        *_workload_warnings(a.measured.workload, b.measured.workload),
    ]
    if paired:
        finished = (a.requests.status == Status.FINISHED) & (b.requests.status == Status.FINISHED)
        differs = a.requests.output_tokens[finished] != b.requests.output_tokens[finished]
        if finished.any() and differs.mean() > MIN_DIFFERENCE:
            warnings.append(
                f"{100 * differs.mean():.0f} % of outputs differ in length between A and B: JCT compares unequal work."
            )
    for name, run in (("A", a), ("B", b)):
        status = run.requests.status
        if unfinished := int((status == Status.UNFINISHED).sum()):
            warnings.append(
                f"{name} is a partial run: {unfinished:,} of {len(status):,} requests were not finished at its end."
            )
        if failed := sum(run.measured.errors.values()):
            frequent = max(run.measured.errors, key=lambda key: run.measured.errors[key])
            warnings.append(f"{name}: {failed:,} requests failed, most of: {frequent}.")
        if clocks := clock_warning(run.requests, run.records.end_s):
            warnings.append(f"{name}: {clocks}.")
        warnings += [f"{name}: {warning}" for warning in run.measured.warnings]
    requests = min(len(run.requests.arrival_s) for run in (a, b))
    if requests < MIN_TAIL_REQUESTS:
        warnings.append(f"There are {requests} requests: tails (P95, P99) rest on a handful of them.")
    return tuple(dict.fromkeys(warnings))


def _workload_warnings(a: Workload, b: Workload) -> Iterator[str]:
    for name, verb, what in (("after", "wait for", "other requests"), ("prefixes", "share", "prefixes")):
        sides = [getattr(w, name) for w in (a, b)]
        if sum(side is None for side in sides) == 1:
            only, other = ("A", "B") if sides[1] is None else ("B", "A")
            yield f"Requests {verb} {what} in {only} and not in {other}: they are not the same work."
        elif not _same_relation(*sides) and _same_lengths(a, b):
            yield f"Requests {verb} different {what} in A and B: they are not the same work."
    if _same_lengths(a, b):
        if not _same_times(a, b):
            yield "The same requests arrive at different times in A and B: queues differ by the load, too."
        return
    for name, label in (("prompt_tokens", "prompts"), ("output_tokens", "requested outputs")):
        mean_a, mean_b = (float(getattr(w, name).mean()) for w in (a, b))
        if abs(mean_a - mean_b) > MIN_DIFFERENCE * mean_b:
            yield f"The workloads differ: {label} have {mean_a:,.0f} tokens on average in A and {mean_b:,.0f} in B."
    if len(a) != len(b):
        yield f"They are of different requests: {len(a):,} in A and {len(b):,} in B."
    elif a.concurrency != b.concurrency:
        yield "The workloads differ: one is a closed loop, or one of another concurrency."
    else:
        yield "They are of different requests: lengths differ one by one."


def _origin_warnings(a: RunResult, b: RunResult) -> Iterator[str]:
    """Yield differences of models, GPUs, engines and deployments. Models are compared by shape, because names vary."""
    deployments = [_deployment(run) for run in (a, b)]
    names, shapes = [_model_name(run) for run in (a, b)], [_model_shape(run) for run in (a, b)]
    if shapes[0] is not None and shapes[1] is not None:
        if differing := _differing(shapes[0], shapes[1], shapes[0]):
            yield f"They are of different models: {names[0]} and {names[1]} ({', '.join(differing)})."
    elif all(names) and names[0] != names[1]:
        unknown = " and ".join(
            f"{letter} records only the name {name}"
            for letter, name, shape in zip("AB", names, shapes, strict=True)
            if shape is None
        )
        yield (
            f"They may be of different models, {names[0]} and {names[1]}: {unknown}, under which it was served. "
            "`lengthwise bench URL SCENARIO.toml --records FILE` records the model's shape, which settles it."
        )
    engines = [str(run.metadata.get("engine") or "") for run in (a, b)]
    for kind, values in (("GPUs", [_gpu_name(run) for run in (a, b)]), ("engines", engines)):
        if all(values) and values[0] != values[1]:
            yield f"They are of different {kind}: {values[0]} and {values[1]}."
    if differing := _differing(deployments[0], deployments[1], _DEPLOYMENT_KEYS):
        yield f"Their deployments differ: {', '.join(differing)}."


def _differing(a: Mapping[str, Any], b: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    return [f"{key} {a[key]} and {b[key]}" for key in keys if key in a and key in b and a[key] != b[key]]


def _deployment(run: RunResult) -> Mapping[str, Any]:
    deployment = run.metadata.get("deployment")
    return deployment if isinstance(deployment, Mapping) else {}


def _gpu_name(run: RunResult) -> str:
    name = str(_deployment(run).get("gpu") or run.metadata.get("gpu") or "")
    known = catalog.find_gpu(name) if name else None
    return name if known is None else known.name


def _model_name(run: RunResult) -> str:
    return str(_deployment(run).get("model") or run.metadata.get("model") or "")


def _model_shape(run: RunResult) -> Mapping[str, Any] | None:
    shape = _deployment(run).get("model_shape")
    if isinstance(shape, Mapping):
        return shape
    name = _model_name(run)
    known = catalog.served_model(name) if name else None
    return None if known is None else shape_facts(known)


def _without_negligible(errors: Sequence[MetricError]) -> tuple[tuple[MetricError, ...], tuple[str, ...]]:
    """Return all errors, without intervals where the reference is nearly 0, and a warning that names these errors."""
    means = {error.metric: error.b for error in errors if error.stat == "mean"}

    def is_negligible(error: MetricError) -> bool:
        is_wide = not math.isfinite(error.high) or 1 + error.high > MAX_RATIO * (1 + error.error)
        return error.has_interval and (is_wide or error.b < NEGLIGIBLE_SHARE * means.get(error.metric, 0.0))

    negligible = {error.key for error in errors if is_negligible(error)}
    if not negligible:
        return tuple(errors), ()
    names = ", ".join(f"{error.metric.upper()} {error.stat}".strip() for error in errors if error.key in negligible)
    return (
        tuple(replace(error, low=math.nan, high=math.nan) if error.key in negligible else error for error in errors),
        (f"{names} of B can be nearly 0: relative errors can then take any value, so they have no interval.",),
    )


def _drift_warnings(errors: Sequence[MetricError], a: Run, b: Run) -> Iterator[str]:
    without = [error.metric for error in errors if error.stat == "mean" and not error.has_interval]
    drifting = [
        metric.upper()
        for metric in without
        if metric in ("ttft", "tpot", "jct")
        and min(np.isfinite(run.column(metric)).sum() for run in (a, b)) >= MIN_REQUESTS
    ]
    if drifting:
        yield (
            f"{', '.join(drifting)} drift through the run, which has too few independent blocks for intervals: "
            "measure longer, or several times."
        )
