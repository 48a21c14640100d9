"""What no schedule can beat: limits of a deployment in closed form, before anything is simulated.

All from the cost tables and the mean of the requests. With W(T) the shortest time in which a stage
computes a step of T tokens (attention apart), Wc its lower convex hull, m the tokens that a request makes
the engine compute and a the least attention time that they cost, J steps that complete N requests take at
least J Wc(m N / J) + N a (Jensen's inequality). With x = N / J requests completed a step, the rate is at
most x / (Wc(m x) + x a). And x is bounded: a step has at most ``max_step_seqs`` sequences, of which a request
is one for each of its output tokens; it computes no more tokens than its budget where it cuts prompts to that;
it reads at most the KV tokens that the cache holds; and where a quantile q of the time between tokens is limited,
a share q of the tokens comes from steps short enough. Nor do requests come faster than their front lets them in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lengthwise import engine, policy
from lengthwise.schema.cost_tables import MERGED, CostTables, Floats, Front, grid_axis
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.plan import Limit
from lengthwise.schema.records import Status
from lengthwise.schema.workload import Workload
from lengthwise.search.load import Load

FloatArray = npt.NDArray[np.float64]


def hull(step_s: FloatArray, slope_s: float, max_tokens: float) -> tuple[FloatArray, FloatArray]:
    """A convex function below seconds (which do not fall) over tokens: the hull of few points below them.

    Beyond the last second they rise by ``slope_s`` a token.
    """
    ends = _ends(len(step_s))
    far = max(max_tokens, 2.0 * len(step_s))
    tokens = np.append(ends.astype(np.float64), far)
    seconds = step_s[np.concatenate([[0], ends[:-1] + 1])]  # the least of each piece, at its end
    seconds = np.append(seconds, step_s[-1] + slope_s * (far - ends[-1]))
    kept: list[int] = []
    for i in range(len(tokens)):
        while len(kept) > 1 and _above(tokens, seconds, kept[-2], kept[-1], i):
            kept.pop()
        kept.append(i)
    return tokens[kept], seconds[kept]


@lru_cache(maxsize=8)
def _ends(n: int) -> npt.NDArray[np.int64]:
    """Last indices of pieces of 0..n-1: single ones at first, then pieces of 1 %."""
    far = np.geomspace(64, max(n - 1, 65), 420).astype(np.int64)
    ends = np.unique(np.concatenate([np.arange(min(n, 65)), far]))
    return np.unique(np.minimum(ends, n - 1))


def _above(x: FloatArray, y: FloatArray, a: int, b: int, c: int) -> bool:
    """Whether point b lies on or above the line from a to c."""
    return bool((y[b] - y[a]) * (x[c] - x[a]) >= (y[c] - y[a]) * (x[b] - x[a]))


SLACK = 1.02
"""The requests of a run differ a little from the sample whose means are used."""

_GRID = 512

_AT_ONCE_S = 1e-9

_BUDGETED = ("chunked", "unified", "vidur_sarathi")
"""Batching whose steps have no more tokens than the budget, or than they decode sequences."""

_SLOPE_SPAN = 256
"""Entries whose mean slope continues a table, as where the engine reads it."""


@dataclass(frozen=True)
class Needs:
    """What a mean request asks for.

    Attributes:
        tokens: Tokens computed: prompt and output less one.
        decodes: Output tokens that come from decode steps.
        kv_reads: Cached tokens read over all of them.
        pairs: (query, key) pairs of the prompt.
    """

    tokens: float
    decodes: float
    kv_reads: float
    pairs: float


@dataclass(frozen=True)
class Ceiling:
    """The largest rate that a deployment could sustain, and steps of its fastest kind.

    Attributes:
        rate_rps: No schedule of it serves more requests a second.
        shortest_step_s: A step of one token, through all stages.
        jct_s: About the time that a mean request spends at full load.
        impossible: Why limits cannot hold at any rate, by metric; empty if they may.
    """

    rate_rps: float
    shortest_step_s: float
    jct_s: float
    impossible: dict[str, str]


def ceiling(deployment: Deployment, requests: Workload, limits: Iterable[Limit] = ()) -> Ceiling:
    """What no schedule of the deployment can beat on such requests under these limits."""
    deployment.require_one_side("a bound on the rate (capacity, search)")
    limits = tuple(limits)
    stages = _Stages(deployment)
    output = np.minimum(requests.output_tokens, deployment.max_model_len - requests.prompt_tokens)
    fits = _fits(deployment, requests)
    prompt, output = requests.prompt_tokens[fits], np.maximum(output[fits], 1)
    through_s = stages.through_s
    impossible = _impossible(limits, stages, prompt, output)
    if not fits.any():
        return Ceiling(math.inf, float(through_s[1]), 0.0, impossible)
    needs = _needs(prompt, output)
    most = _most_per_step(deployment, needs, limits, through_s)
    rate, per_step = stages.rate(needs, most)
    jct_s = needs.decodes * per_step / rate * deployment.parallel.pp
    queue_s = deployment.cost.front.queue_s
    before = 1 / queue_s if queue_s else math.inf  # one front stands before all replicas
    whole = min(rate * deployment.parallel.replicas, before) * SLACK / float(fits.mean())
    return Ceiling(whole, float(through_s[1]), jct_s, impossible)


def fits_any(deployment: Deployment, load: Load) -> bool:
    """Whether any request of a load is not refused."""
    return bool(_fits(deployment, load.sample()).any())


def _fits(deployment: Deployment, requests: Workload) -> npt.NDArray[np.bool_]:
    """[n] which requests are not refused; those that are cost nothing."""
    prompt, kv = requests.prompt_tokens, deployment.kv
    held = min(deployment.limits.max_num_batched_tokens, kv.num_blocks * kv.block_size)
    if prompt.max() <= held * (1 - deployment.limits.watermark):
        return prompt < deployment.max_model_len
    at_once = replace(requests, arrival_s=np.zeros(len(requests)), concurrency=None)
    no_front = replace(deployment, cost=replace(deployment.cost, front=Front()))
    seen = engine.simulate(at_once, no_front, time_limit_s=_AT_ONCE_S, keep_steps=0)
    return np.asarray(seen.requests.status != Status.REJECTED)


def _needs(prompt: npt.NDArray[np.int64], output: npt.NDArray[np.int64]) -> Needs:
    p, d = prompt.astype(np.float64), output.astype(np.float64) - 1
    return Needs(
        tokens=float((p + d).mean()),
        decodes=float(d.mean()),
        kv_reads=float((p * d + d * (d - 1) / 2).mean()),
        pairs=float((p * p / 2).mean()),
    )


def _most_per_step(deployment: Deployment, needs: Needs, limits: Iterable[Limit], through_s: Floats) -> float:
    """Requests that complete in a step on average, at most."""
    held = deployment.kv.num_blocks * deployment.kv.block_size
    caps = [math.inf, held / needs.kv_reads if needs.kv_reads else math.inf]
    seqs = min(deployment.limits.max_step_seqs or math.inf, deployment.limits.max_num_seqs)
    caps.append(seqs / (needs.decodes + 1))
    batching = policy.resolve("batching", deployment.scheduler.batching)
    if batching.builtin and batching.name in _BUDGETED:
        caps.append(max(deployment.limits.max_num_batched_tokens, seqs) / needs.tokens)
    if needs.decodes:
        for limit in limits:
            metric, _, statistic = limit.metric.partition(".")
            bound_s = limit.bound * SLACK  # times between tokens are told to a bin's width
            if metric == "tbt" and statistic != "mean" and (through_s[1:] <= bound_s).any():
                longest = int(np.flatnonzero(through_s <= bound_s)[-1])
                if longest < len(through_s) - 1:
                    caps.append(longest / (float(statistic[1:]) / 100 * needs.decodes))
    return min(caps)


class _Stages:
    """The least time of steps by tokens: of each stage, and through all of them."""

    def __init__(self, deployment: Deployment) -> None:
        self.cost = cost = deployment.cost
        layers = np.asarray(cost.stage_layers, dtype=np.float64)
        each_s = layers[:, None] * (cost.layer_s + cost.comm_s)[None, :]
        each_s[0] += cost.first_s + _least(cost.host_s)
        each_s[-1] += _least(cost.head_s)
        each_s[:-1] += cost.send_s
        self.slope_s: Floats = np.maximum(_slopes(each_s), 0.0)
        each_s[:, 0] = each_s[:, 1]
        self.each_s: Floats = np.minimum.accumulate(each_s[:, ::-1], axis=1)[:, ::-1]
        self.through_s: Floats = self.each_s.sum(axis=0)
        self.layers = layers

    def rate(self, needs: Needs, most_per_step: float) -> tuple[float, float]:
        """Requests a second of the slowest stage at best, and requests completed in a step then."""
        attention_s = _prefill_pair_s(self.cost) * needs.pairs + _decode_token_s(self.cost) * needs.kv_reads
        rows = zip(self.layers, self.slope_s, self.each_s, strict=True)
        stages = {(float(n), float(slope), row.tobytes()): row for n, slope, row in rows}
        return min(
            _stage_rate(row, slope, n * attention_s, needs.tokens, most_per_step)
            for (n, slope, _), row in stages.items()
        )

    def isolated_s(self, prompt: npt.NDArray[np.int64]) -> Floats:
        """[n] the least time in which prompts are computed, in chunks of any length one after the other."""
        last = len(self.through_s) - 1
        beyond = np.maximum(prompt - last, 0)
        whole_s = self.through_s[np.minimum(prompt, last)] + beyond * self.slope_s.sum()
        token_s = np.minimum.accumulate(self.through_s[1:] / np.arange(1, last + 1))
        chunked_s = prompt * token_s[np.minimum(prompt, last) - 1]
        least: Floats = np.maximum(np.minimum(whole_s, chunked_s), self.through_s[1])
        return least


def _slopes(each_s: Floats) -> Floats:
    """[stages] seconds a token beyond the last entry."""
    span = min(_SLOPE_SPAN, each_s.shape[1] - 1)
    slopes: Floats = (each_s[:, -1] - each_s[:, -1 - span]) / max(span, 1)
    return slopes


def _stage_rate(step_s: Floats, slope_s: float, attention_s: float, tokens: float, most: float) -> tuple[float, float]:
    """The largest x / (Wc(tokens x) + x attention) over x up to ``most``, from above, and its x."""
    hull_tokens, hull_s = hull(step_s, slope_s, most * tokens)
    x = np.geomspace(most * 1e-6, most, _GRID)
    seconds = np.interp(x * tokens, hull_tokens, hull_s) + x * attention_s
    rates = x[1:] / seconds[:-1]  # from above within a cell: more requests in less time
    best = int(np.argmax(rates))
    return float(rates[best]), float(x[best + 1])


def _least(by_seqs: Floats) -> float:
    return float(by_seqs[1:].min())


def _prefill_pair_s(cost: CostTables) -> float:
    """Least seconds of one layer's prefill attention for a (query, key) pair."""
    table = np.asarray(cost.prefill_s)
    if cost.rule.kind == MERGED:
        chunk = np.arange(table.shape[0], dtype=np.float64)
        context = np.arange(table.shape[1], dtype=np.float64) * cost.rule.step_tokens
    else:
        chunk = grid_axis(2**40)[: table.shape[0]].astype(np.float64)
        context = grid_axis(2**40)[: table.shape[1]].astype(np.float64)
    pairs = chunk[1:, None] * (context[None, :] + chunk[1:, None] / 2)
    known = table[1:]
    return float((known / pairs)[known > 0].min(initial=np.inf)) if (known > 0).any() else 0.0


def _decode_token_s(cost: CostTables) -> float:
    """Least seconds of one layer's decode attention for a cached token that is read."""
    table = np.asarray(cost.decode_s)
    if cost.rule.kind == MERGED:
        seqs = np.arange(table.shape[0], dtype=np.float64)[1:, None]
        read = seqs * np.arange(table.shape[1], dtype=np.float64)[None, 1:] * cost.rule.step_tokens
    else:
        read = grid_axis(2**40)[1 : table.shape[1]].astype(np.float64)[None, :]
    known = table[1:, 1:]
    return float((known / read)[known > 0].min(initial=np.inf)) if (known > 0).any() else 0.0


def _impossible(
    limits: Iterable[Limit], stages: _Stages, prompt: npt.NDArray[np.int64], output: npt.NDArray[np.int64]
) -> dict[str, str]:
    """Limits that even an idle deployment breaks."""
    shortest, ttft_s = float(stages.through_s[1]), stages.isolated_s(prompt)
    alone = {"ttft": ttft_s, "jct": ttft_s + (output - 1) * shortest}
    alone |= {name: np.full(int((output > 1).sum()), shortest) for name in ("tbt", "tpot")}
    found: dict[str, str] = {}
    for limit in limits:
        metric, _, statistic = limit.metric.partition(".")
        values = alone.get(metric, np.zeros(0))
        if len(values) == 0:
            continue
        least = (
            values.mean() if statistic == "mean" else np.quantile(values, float(statistic[1:]) / 100, method="lower")
        )
        if least > limit.bound * SLACK:
            found[limit.metric] = (
                f"{limit.metric} is at least {least:.3g} s on an idle deployment, and may be {limit.bound:g} s"
            )
    return found
