"""Errors of what is counted: events a second, and the share within the limits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from lengthwise.metrics import _compare_bootstrap as bootstrap
from lengthwise.metrics._compare_blocks import column_of
from lengthwise.metrics._compare_bootstrap import Bootstrap
from lengthwise.metrics._compare_result import MetricError
from lengthwise.metrics._compare_sides import Run
from lengthwise.metrics.slo import Slo
from lengthwise.schema.records import Status

Floats = npt.NDArray[np.float64]


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


def _rate_interval(ours: Floats, theirs: Floats, drawn: Bootstrap) -> tuple[float, float]:
    """By drawing spans; of paired runs the same ones, in which the same requests arrive."""
    rng = np.random.default_rng(drawn.seed)
    first = bootstrap.drawn(rng, bootstrap.SPANS, drawn.draws)
    second = first if drawn.paired else bootstrap.drawn(rng, bootstrap.SPANS, drawn.draws)
    a, b = ((w @ s / bootstrap.SPANS)[:, None] for w, s in ((first, ours), (second, theirs)))
    low, high = bootstrap.interval(a, b, drawn.level)
    return float(low[0]), float(high[0])


def _share(good_a: Floats, good_b: Floats, drawn: Bootstrap) -> MetricError:
    low, high = _UNKNOWN
    if min(len(good_a), len(good_b)) >= bootstrap.LEAST:
        low, high = (float(end[0]) for end in drawn.errors(column_of(good_a), column_of(good_b), np.zeros(0)))
    return MetricError("within_slo", "", float(good_a.mean()), float(good_b.mean()), low, high)
