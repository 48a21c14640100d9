"""Statistics of a run's prefix cache: hit rate, saved prefill time, and TTFT by turn of the session."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.cost import prompt_seconds
from lengthwise.metrics.distribution import ratio_estimate
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.records import RequestRecords
from lengthwise.statistics import Floats, Ints

TURNS = {"1": 1, "2": 2, "3": 3, "4": 4, "5-8": 5, "9-16": 9, "17+": 17}
"""Turns of a session that are reported together, by the first of them. The first request of a session is turn 1."""


@dataclass(frozen=True)
class TurnStatistics:
    """Mean TTFT and hit rate of the requests at some turns of their sessions; NaN where no request has them."""

    share: Estimate  # of these requests in all requests with a first token
    ttft_s: Estimate
    hit_rate: Estimate


@dataclass(frozen=True)
class PrefixCacheStatistics:
    """Statistics of the prefix cache over the admitted requests; NaN if the cache is off."""

    hit_rate: Estimate  # share of the requests' prompt tokens that were in the cache at their first admission
    loaded_share: Estimate  # share of the prompt tokens that were loaded from CPU memory then; NaN without offloading
    # Share of the prompt tokens that were read from storage before they were loaded; part of ``loaded_share``. NaN
    # without storage.
    storage_share: Estimate
    load_s: Estimate  # mean seconds that a request's loads took, over the requests that loaded tokens
    # seconds that the cached and loaded tokens would have cost: for each request the time of its complete prompt alone
    # on an idle replica, less the time of its remaining tokens
    saved_prefill_s: Estimate
    saved_share: Estimate  # ``saved_prefill_s`` over the time of all complete prompts, each alone on an idle replica
    # by turn of the session, with the keys of ``TURNS``; empty without sessions of several requests
    turns: dict[str, TurnStatistics]


def prefix_cache_statistics(
    r: RequestRecords, deployment: Deployment | None, turn: Ints | None, level: float
) -> PrefixCacheStatistics:
    """Return the statistics of requests with known ``cached_tokens``. Without a deployment the time is unknown.

    ``turn`` [n] numbers the requests of each session from 0; None means that there are no sessions.
    """
    assert r.cached_tokens is not None
    by_turn = {} if turn is None else _by_turn(r, turn, level)
    unknown = Estimate(math.nan)
    if deployment is not None and not deployment.limits.enable_prefix_caching:
        off = {name: replace(at, hit_rate=unknown) for name, at in by_turn.items()}
        return PrefixCacheStatistics(unknown, unknown, unknown, unknown, unknown, unknown, off)
    admitted = np.isfinite(r.scheduled_s)
    prompt, cached = r.prompt_tokens[admitted], r.cached_tokens[admitted]
    saved, loads = (unknown, unknown), (unknown, unknown, unknown)
    found = cached
    if deployment is not None and deployment.offload_blocks:
        assert r.loaded_tokens is not None
        assert r.load_s is not None
        found = cached + r.loaded_tokens[admitted]
        load_s = r.load_s[r.load_s > 0]
        assert r.storage_tokens is not None
        read = ratio_estimate(r.storage_tokens[admitted], prompt, level) if deployment.storage_blocks else unknown
        mean_load_s = ratio_estimate(load_s, np.ones(len(load_s)), level)
        loads = ratio_estimate(r.loaded_tokens[admitted], prompt, level), read, mean_load_s
    if deployment is not None:
        ends = np.cumsum([group.parallel.ranks for group in deployment.replica_groups[:-1]])
        group_of = np.searchsorted(ends, r.replica[admitted], side="right")
        full_s, saved_s = np.zeros(len(prompt)), np.zeros(len(prompt))
        for number, group in enumerate(deployment.replica_groups):
            own, step_tokens = group_of == number, group.limits.max_num_batched_tokens
            full_s[own] = prompt_seconds(group.cost, prompt[own], np.zeros_like(prompt[own]), step_tokens)
            saved_s[own] = full_s[own] - prompt_seconds(group.cost, prompt[own], found[own], step_tokens)
        saved = Estimate(float(saved_s.sum())), ratio_estimate(saved_s, full_s, level)
    return PrefixCacheStatistics(ratio_estimate(cached, prompt, level), *loads, *saved, by_turn)


def _by_turn(r: RequestRecords, turn: Ints, level: float) -> dict[str, TurnStatistics]:
    answered = np.isfinite(r.first_token_s)
    group = np.searchsorted(list(TURNS.values()), turn + 1, side="right") - 1
    assert r.cached_tokens is not None
    found = {}
    for number, name in enumerate(TURNS):
        rows = answered & (group == number)
        share = rows.sum() / answered.sum() if answered.any() else math.nan
        ttft_s = (r.first_token_s - r.arrival_s)[rows]
        found[name] = TurnStatistics(
            Estimate(float(share)),
            ratio_estimate(ttft_s, np.ones(len(ttft_s)), level),
            ratio_estimate(r.cached_tokens[rows], r.prompt_tokens[rows], level),
        )
    return found


def hit_rate_over_time(r: RequestRecords, edges_s: npt.NDArray[Any]) -> Floats:
    """Return [edges - 1] the hit rate of requests first scheduled between neighbouring ``edges_s``; NaN for none."""
    assert r.cached_tokens is not None
    admitted = np.isfinite(r.scheduled_s)
    found, looked_up = (
        np.histogram(r.scheduled_s[admitted], edges_s, weights=tokens[admitted])[0]
        for tokens in (r.cached_tokens, r.prompt_tokens)
    )
    return np.asarray(np.divide(found, looked_up, out=np.full(len(found), np.nan), where=looked_up > 0))
