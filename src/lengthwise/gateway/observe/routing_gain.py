"""Estimate the gain of a router on recorded traffic against one central queue, with confidence intervals.

The simulator serves the recorded requests, with their sessions and shared prefixes, on engines that are fitted to the
observations (``replay``) and cache prefixes. Each router runs once. Intervals come from a block bootstrap of the pairs
(a request's time under the router, its time under the central queue): blocks of consecutive requests are drawn.
On 20 samples of 1,000 requests, at simulated engines, 39 of the 40 intervals of mean TTFT and JCT contained the ratio
of all samples together, and the estimates differed from their sample's true ratio by 0.02 to 0.03.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lengthwise import engine
from lengthwise.gateway.observe.ordering_gain import (
    BLOCKS,
    LEVEL,
    MAX_REQUESTS,
    MIN_REQUESTS,
    NEEDS_STREAMS,
    Change,
    duration,
    format_change,
)
from lengthwise.gateway.observe.replay import Service, deployment_of, fit
from lengthwise.gateway.observe.trace import Trace, is_measurable, pools_of
from lengthwise.policy import resolve
from lengthwise.policy.contracts import PREFIX_ARGUMENTS
from lengthwise.schema.deployment import Scheduler
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Status
from lengthwise.schema.workload import SharedPrefixes, Workload
from lengthwise.statistics import Floats, Ints, bootstrap_half_width, circular_blocks
from lengthwise.workload.session_rows import RECORDED_TOKENS, Recorded, recorded_calls, workload_of

CENTRAL = "central"
ROUTERS = (
    "least_outstanding",
    "session_affinity",
    "cache_aware",
    "prefix_approximate",
    "uncached_work",
    "uncached_load",
)
"""Routers that are compared by default, and under the name "all"."""
DRAWS = 400


@dataclass(frozen=True)
class RouterGain:
    """Times under one router, each as (mean, 99 % quantile), and their changes against the central queue."""

    name: str
    ttft_s: tuple[float, float]
    jct_s: tuple[float, float]
    ttft: tuple[Change, ...] = ()  # of mean and 99 % quantile; () for the central queue itself
    jct: tuple[Change, ...] = ()
    cached_share: float = math.nan  # share of the prompt tokens that a replica had cached


@dataclass(frozen=True)
class RoutingGain:
    """The estimated gain of routers on recorded traffic. The first of ``routers`` is the central queue."""

    description: str  # the best router, or the reason if there is no estimate
    requests: int  # number of requests that the estimate uses
    span_s: float  # from the first arrival to the last
    observed_ttft_s: tuple[float, float] = (math.nan, math.nan)  # mean and 99 % quantile of streamed responses
    observed_jct_s: tuple[float, float] = (math.nan, math.nan)
    routers: tuple[RouterGain, ...] = ()
    services: tuple[Service, ...] = ()
    assumptions: tuple[str, ...] = ()  # assumptions and limits of the estimate, one sentence each
    level: float = LEVEL  # confidence of each interval


def routing_gain(
    trace: Trace,
    routers: Sequence[str] | None = None,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    max_requests: int = MAX_REQUESTS,
) -> RoutingGain:
    """Estimate the gain of routers on the last ``max_requests`` requests of a trace.

    ``routers`` are names. None, or the name "all", stands for those of ROUTERS whose sessions or prefixes the trace
    has. Raises InputError if no router has a given name, or if a named router needs sessions or prefixes and the trace
    has none.
    """
    trace = trace.take(np.arange(max(0, len(trace) - max_requests), len(trace)))
    common = [name for name in ROUTERS if not _fault(name, trace)]
    given = ("all",) if routers is None else routers
    names = list(dict.fromkeys(one for name in given for one in (common if name == "all" else [name])))
    for name in names:
        if fault := _fault(name, trace):
            raise InputError(fault)
    if len(trace) < MIN_REQUESTS:
        text = f"{len(trace)} requests got a response so far; at least {MIN_REQUESTS} are needed."
        return RoutingGain(text, len(trace), trace.span_s)
    pools = [part for part in pools_of(trace) if is_measurable(part)]
    if not pools:
        return RoutingGain(NEEDS_STREAMS, len(trace), trace.span_s)
    cached = [_cached_tokens(part) for part in pools]
    services = [
        fit(replace(part, prompt_tokens=np.maximum(part.prompt_tokens - hits, 1)))
        for part, hits in zip(pools, cached, strict=True)
    ]
    if max(service.engines for service in services) < 2:
        return RoutingGain("Each request had one engine only: every router chooses it.", len(trace), trace.span_s)
    workloads = [recorded_workload(part) for part in pools]
    sizes = [_kv_tokens(part) for part in pools]
    runs = {
        name: _runs(workloads, services, sizes, name, seed) for name in [CENTRAL, *(n for n in names if n != CENTRAL)]
    }
    served = np.all([np.isfinite(run[:2]).all(axis=0) for run in runs.values()], axis=0)
    runs = {name: run[:, served] for name, run in runs.items()}
    if (n := int(served.sum())) == 0:
        return RoutingGain("No request finishes under every router.", len(trace), trace.span_s)
    length = min(n, max(50, n // BLOCKS))
    starts = np.random.default_rng(seed).integers(0, n, (draws, -(-n // length)))
    samples = circular_blocks(starts, length, n)
    found = [_gain(name, run, runs[CENTRAL], samples) for name, run in runs.items()]
    ttft_s = np.concatenate([part.first_token_s - part.arrival_s for part in pools])
    jct_s = np.concatenate([part.jct_s for part in pools])
    return RoutingGain(
        _best(found),
        len(jct_s),
        trace.span_s,
        observed_ttft_s=_times(ttft_s[np.isfinite(ttft_s)]),
        observed_jct_s=_times(jct_s),
        routers=tuple(found),
        services=tuple(services),
        assumptions=_assumptions(trace, sizes, found[0], float(jct_s.mean())),
    )


def recorded_workload(trace: Trace) -> Workload:
    """Return the requests as a workload, with their sessions and the prefixes that prompts share (possibly none)."""
    times = (trace.arrival_s.tolist(), trace.finished_s.tolist())
    lengths = (trace.prompt_tokens.tolist(), trace.output_tokens.tolist())
    requests = [
        Recorded(arrival_s, finished_s, prompt, output, context.session, context.prefix)
        for arrival_s, finished_s, prompt, output, context in zip(*times, *lengths, trace.contexts, strict=True)
    ]
    workload = workload_of(None, recorded_calls(requests), name="observed", extra={"predicted": trace.predicted_tokens})
    nothing = SharedPrefixes(RECORDED_TOKENS, np.zeros(len(trace) + 1, np.int64), np.zeros(0, np.int64))
    predicted = workload.extra["predicted"]
    return replace(workload, predicted_tokens=predicted, prefixes=workload.prefixes or nothing)


def _fault(name: str, trace: Trace) -> str:
    """Return the reason for which a router cannot be compared on a trace, or ""."""
    policy = resolve("router", name)
    has_sessions = any(context.session for context in trace.contexts)
    if policy.uses("previous_replica") and not has_sessions:
        return (
            f"router {name!r} follows sessions, and the journal has none: clients name theirs in X-Session-Id, "
            "prompt_cache_key or user. Choose another router"
        )
    if policy.uses(*PREFIX_ARGUMENTS) and not (has_sessions or any(context.prefix for context in trace.contexts)):
        return (
            f"router {name!r} chooses by prefixes that prompts share, and the journal has none: gateways record those "
            'of prompts from 256 characters on, unless dispatch.prefixes = "none" (or the gateway is older). Choose '
            "another router, or record the traffic again"
        )
    return ""


def _cached_tokens(trace: Trace) -> Floats:
    """Return the cached prompt tokens ([n]): as reported, or else of prefixes that the worker had received before."""
    known: dict[int, set[int]] = {}
    cached = _reported_tokens(trace)
    for row in np.argsort(trace.dispatched_s, kind="stable").tolist():
        seen, prefix = known.setdefault(int(trace.worker[row]), set()), trace.contexts[row].prefix
        if math.isnan(cached[row]):
            cached[row] = max((tokens for tokens, key in prefix if key in seen), default=0)
        seen.update(key for _, key in prefix)
    return np.minimum(cached, trace.prompt_tokens)


def _reported_tokens(trace: Trace) -> Floats:
    return np.array([context.cached_tokens for context in trace.contexts], np.float64)


def _kv_tokens(trace: Trace) -> int | None:
    """Return the median size of the KV caches of engines that report it."""
    sizes = [context.kv_tokens for context in trace.contexts if context.kv_tokens]
    return int(np.median(sizes)) if sizes else None


def _runs(workloads: list[Workload], services: list[Service], sizes: list[int | None], name: str, seed: int) -> Floats:
    """Return TTFT, JCT, cached tokens and prompt tokens (rows, [4, n]) of all requests under a router."""
    columns = []
    scheduler = Scheduler(router=name, memory="paged_by_chunk")
    for workload, service, size in zip(workloads, services, sizes, strict=True):
        deployment = deployment_of(workload, service, scheduler, caches_prefixes=True, kv_tokens=size)
        r = engine.simulate(workload, deployment, max_log_steps=0, seed=seed).requests
        end_s = np.where(r.status == Status.FINISHED, r.finished_s, np.nan)
        columns.append([r.first_token_s - r.arrival_s, end_s - r.arrival_s, r.cached_tokens, workload.prompt_tokens])
    return np.concatenate([np.array(rows, np.float64) for rows in columns], axis=1)


def _times(values: Floats) -> tuple[float, float]:
    return (float(values.mean()), float(np.quantile(values, 0.99))) if len(values) else (math.nan, math.nan)


def _gain(name: str, run: Floats, central: Floats, samples: Ints) -> RouterGain:
    ttft, jct = _times(run[0]), _times(run[1])
    share = float(run[2].sum() / run[3].sum())
    if name == CENTRAL:
        return RouterGain(name, ttft, jct, cached_share=share)
    changes = [_changes(times_s, base_s, samples) for times_s, base_s in zip(run[:2], central[:2], strict=True)]
    return RouterGain(name, ttft, jct, changes[0], changes[1], share)


def _changes(times_s: Floats, base_s: Floats, samples: Ints) -> tuple[Change, ...]:
    drawn, drawn_base = times_s[samples], base_s[samples]
    mean = _change(float(times_s.mean() / base_s.mean()), drawn.mean(axis=1) / drawn_base.mean(axis=1))
    p99 = [np.quantile(values, 0.99, axis=-1) for values in (times_s, base_s, drawn, drawn_base)]
    return mean, _change(float(p99[0] / p99[1]), p99[2] / p99[3])


def _change(ratio: float, drawn: Floats) -> Change:
    half = float(bootstrap_half_width(np.log(drawn), BLOCKS, LEVEL))
    low, high = np.expm1(math.log(ratio) + np.array([-half, half])).tolist()
    return Change(ratio - 1, low, high)


def _best(found: list[RouterGain]) -> str:
    if len(found) < 2:
        return "No other router was named."
    best = min(found[1:], key=lambda one: one.jct_s[0])
    mean, p99 = best.jct
    text = f"{best.name} changes the mean JCT of one central queue by {format_change(mean)}"
    if mean.value >= 0:
        return f"No router is better than one central queue: {text}."
    if mean.high >= 0:
        return f"Not significant yet: {text}. Record longer."
    return f"{text}, its 99th percentile by {format_change(p99)}."


def _assumptions(trace: Trace, sizes: list[int | None], central: RouterGain, observed_jct_s: float) -> tuple[str, ...]:
    reported = float(np.isfinite(_reported_tokens(trace)).mean())
    error = 100 * (central.jct_s[0] / observed_jct_s - 1)
    others = "" if reported == 1 else "; for the others, beginnings that the engine got before count as cached"
    cost = f"the mean JCT of the central queue is {error:+.0f} % of the observed one, which had the recorded routes"
    size = (
        "Engines did not report the size of their KV caches: simulated ones evict nothing, so a router that follows "
        "prefixes gains at most this."
    )
    if None not in sizes:
        size = f"Engines have KV caches of {', '.join(f'{one:,}' for one in sizes)} tokens, and evict as vLLM does."
    choice = "a gateway that holds the queue chooses when an engine has a free slot, among such engines only"
    return (
        f"What a step costs is fitted, not measured: {cost}.",
        f"Engines reported cached tokens for {100 * reported:.0f} % of the requests{others}.",
        size,
        f"Simulated routers choose when a request arrives: {choice}.",
        "The best router is chosen on the traffic that also gives its interval, so it may be the best by chance.",
    )


def routing_text(gain: RoutingGain) -> str:
    """Return the gain as lines of text."""
    lines = [gain.description, "", f"{gain.requests} requests over {duration(gain.span_s)}"]
    if not gain.routers:
        return "\n".join(lines)
    lines += [
        f"{one.engines} engine(s), {1e3 * one.prompt_s:.3g} ms per uncached prompt token" for one in gain.services
    ]
    for label, times, changes in (("TTFT", "ttft_s", "ttft"), ("JCT", "jct_s", "jct")):
        lines += ["", f"{'':26}{'mean ' + label:>12}  {'change':<26}{'P99 ' + label:>12}  {'change':<26}cached"]
        observed = gain.observed_ttft_s if label == "TTFT" else gain.observed_jct_s
        lines.append(f"{'observed':26}{observed[0]:>10.3f} s  {'':26}{observed[1]:>10.3f} s")
        for one in gain.routers:
            mean, p99 = [format_change(change) for change in getattr(one, changes)] or ["", ""]
            seconds = getattr(one, times)
            shown = f"{one.name:26}{seconds[0]:>10.3f} s  {mean:<26}{seconds[1]:>10.3f} s  {p99:<26}"
            lines.append(f"{shown}{100 * one.cached_share:.0f} %")
    lines += ["", "Assumptions:", *(f"- {text}" for text in gain.assumptions), ""]
    return "\n".join([*lines, f"Intervals: {100 * gain.level:g} % each, by a paired block bootstrap of this traffic."])
