"""A run before it starts: everything resolved, checked and laid out."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.engine._checks import check, check_sides, empty_plan, policies_of
from lengthwise.engine._layout import GAP_BINS, replica_t, result_t
from lengthwise.engine._lists import Followers, Rows
from lengthwise.engine._setup import Setup
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.prediction import Predictions
from lengthwise.schema.records import Status
from lengthwise.schema.workload import After, Workload

Array = npt.NDArray[Any]


def prepare(
    workload: Workload, deployment: Deployment, *, seed: int, limit_s: float, compiled: bool
) -> Setup:
    """Everything resolved and checked; raises InputError or PolicyError before any time passes."""
    here = _side(workload, deployment, seed=seed, limit_s=limit_s, compiled=compiled)
    if deployment.decode is None:
        return here
    check_sides(deployment)
    there = _side(workload, deployment.decoding(), seed=(seed, 1), limit_s=limit_s, compiled=compiled)
    replicas = here.replicas + there.replicas
    handover = deployment.decode.handover
    there = replace(there, first=here.replicas, all_replicas=replicas, handover=handover)
    return replace(here, all_replicas=replicas, there=there)


def _side(
    workload: Workload,
    deployment: Deployment,
    *,
    seed: int | tuple[int, int],
    limit_s: float,
    compiled: bool,
) -> Setup:
    from lengthwise import policy as room

    policies = policies_of(deployment)
    check(workload, deployment, policies)
    make = room.compiled if compiled else room.interpreted
    functions: dict[str, Any] = {f.name: make(getattr(policies, f.name)) for f in fields(policies)}
    n, replicas = len(workload), deployment.parallel.replicas
    limit = deployment.max_model_len - workload.prompt_tokens
    draws = np.zeros((n, 2))
    if policies.router.uses("draw_a") or policies.router.uses("draw_b"):
        draws = np.random.default_rng(seed).random((n, 2))
    rows = np.zeros(replicas, dtype=replica_t)
    rows["bin_s"] = 2.0**-6
    return Setup(
        deployment,
        policies,
        **functions,
        arrival_s=_arrivals(workload),
        prompt=_column(workload.prompt_tokens),
        output=np.minimum(workload.output_tokens, np.maximum(limit, 1)),
        predicted=_or_zeros(workload.predicted_tokens, n, np.float64),
        rows=_rows(workload.predictions),
        priority=_or_zeros(workload.priority, n, np.int64),
        tenant=_or_zeros(workload.tenant, n, np.int64),
        draws=draws,
        results=_blank_results(n),
        replica_rows=rows,
        histogram=np.zeros(GAP_BINS, dtype=np.int64),
        empty_plan=empty_plan(policies.batching, deployment),
        limit_s=limit_s,
        concurrency=workload.concurrency or 0,
        followers=_followers(workload.after),
        all_replicas=replicas,
    )


def _rows(made: Predictions | None) -> Rows:
    if made is None:
        return Rows(0, np.zeros(1, np.int64), np.zeros(1), np.zeros(1))
    return Rows(
        made.window_tokens, _column(made.start), _column(made.total_tokens), _column(made.index_tokens)
    )


def _followers(after: After | None) -> Followers | None:
    """The other way round: for each request those that come after it, by number."""
    if after is None or len(after.parent) == 0:
        return None
    left = np.diff(after.start)
    child = np.repeat(np.arange(len(after)), left)
    order = np.argsort(after.parent, kind="stable")
    start = np.searchsorted(after.parent[order], np.arange(len(after) + 1))
    return Followers(start.astype(np.int64), child[order], left)


def _arrivals(workload: Workload) -> Array:
    """Arrivals; in a closed loop those after the first are set when they are let in."""
    arrival_s = np.array(workload.arrival_s)
    if workload.concurrency:
        arrival_s[workload.concurrency :] = np.nan
    return arrival_s


def _column(values: Array) -> Array:
    return np.require(values, requirements=["C", "A", "W"])


def _or_zeros(values: Array | None, n: int, dtype: type) -> Array:
    return np.zeros(n, dtype) if values is None else _column(values)


def _blank_results(n: int) -> Array:
    results = np.zeros(n, dtype=result_t)
    for field in ("scheduled_s", "first_token_s", "finished_s"):
        results[field] = np.nan
    results["status"] = Status.UNFINISHED
    results["replica"] = -1
    return results
