"""Upper bounds on the rate of a deployment, in closed form: no schedule exceeds them, and nothing is simulated.

They follow from the cost tables and the mean request. Let W(T) be the shortest time in which a stage computes a step
of T tokens without attention, Wc its lower convex hull, m the tokens that a request makes the engine compute, and a
the least attention time that they cost. J steps that complete N requests take at least J Wc(m N / J) + N a (Jensen's
inequality). With x = N / J requests completed per step, the rate is at most x / (Wc(m x) + x a).

x is bounded, too: a step has at most ``max_step_seqs`` sequences, and a request takes part in one step per output
token; a step computes no more tokens than its budget, where the batching splits prompts to fit it; it reads at most
the KV tokens that fit in the cache; and where a quantile q of the time between tokens is limited, a share q of the
tokens comes from steps that are short enough. Requests also arrive no faster than the front admits them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lengthwise import engine, policy
from lengthwise.schema.cost_tables import MERGED, CostTables, Floats, Front, Ints, grid_axis
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.metric_names import split
from lengthwise.schema.plan import Limit
from lengthwise.schema.records import Status
from lengthwise.schema.workload import Workload
from lengthwise.search.load import Load

SLACK = 1.02
"""Factor on bounds: the requests of a run differ a little from the sample whose means are used."""

GRID_POINTS = 512
REJECTION_S = 1e-9
BUDGETED = ("chunked", "unified", "vidur_sarathi")
"""Batching whose steps have no more tokens than the budget, or than they decode sequences."""

SLOPE_SPAN = 256
"""Entries whose mean slope extrapolates a table, as the engine does."""


@dataclass(frozen=True)
class Needs:
    """Work of a mean request.

    ``tokens`` are those computed (prompt and output, less one), ``decodes`` output tokens from decode steps,
    ``kv_reads`` cached tokens read over all of these steps, ``pairs`` (query, key) pairs of the prompt.
    """

    tokens: float
    decodes: float
    kv_reads: float
    pairs: float


@dataclass(frozen=True)
class Ceiling:
    """The largest rate that a deployment could sustain, and times at that rate.

    ``min_step_s`` is that of a step of one token, through all stages; ``jct_s`` approximately that of a mean request at
    full load. ``impossible`` has reasons, by metric, why limits cannot hold at any rate.
    """

    rate_rps: float
    min_step_s: float
    jct_s: float
    impossible: dict[str, str]


def ceiling(deployment: Deployment, requests: Workload, limits: Iterable[Limit] = ()) -> Ceiling:
    """Return the bound of all schedules of the deployment on such requests under these limits."""
    deployment.require_one_side("a bound on the rate (capacity, search)")
    limits = tuple(limits)
    stages = _Stages(deployment)
    output = np.minimum(requests.output_tokens, deployment.max_model_len - requests.prompt_tokens)
    is_admitted = _admitted(deployment, requests)
    prompt, output = requests.prompt_tokens[is_admitted], np.maximum(output[is_admitted], 1)
    impossible = _impossible(limits, stages, prompt, output)
    min_step_s = float(stages.through_s[1])
    if not is_admitted.any():
        return Ceiling(math.inf, min_step_s, 0.0, impossible)
    p, d = prompt.astype(np.float64), output.astype(np.float64) - 1
    needs = Needs(
        tokens=float((p + d).mean()),
        decodes=float(d.mean()),
        kv_reads=float((p * d + d * (d - 1) / 2).mean()),
        pairs=float((p * p / 2).mean()),
    )
    rate, per_step = stages.rate(needs, _completions_per_step(deployment, needs, limits, stages.through_s))
    jct_s = needs.decodes * per_step / rate * deployment.parallel.pp
    serial_s = deployment.cost.front.serial_s
    front_rps = 1 / serial_s if serial_s else math.inf  # all replicas share one front
    total = min(rate * deployment.parallel.replicas, front_rps) * SLACK / float(is_admitted.mean())
    return Ceiling(total, min_step_s, jct_s, impossible)


def fits_any(deployment: Deployment, load: Load) -> bool:
    """Return whether the deployment admits any request of a load."""
    return bool(_admitted(deployment, load.sample()).any())


def _admitted(deployment: Deployment, requests: Workload) -> npt.NDArray[np.bool_]:
    """Return [n] which requests are not rejected; rejected ones cost nothing."""
    prompt, kv = requests.prompt_tokens, deployment.kv
    largest = min(deployment.limits.max_num_batched_tokens, kv.num_blocks * kv.block_size)
    if prompt.max() <= largest * (1 - deployment.watermark):
        return prompt < deployment.max_model_len
    # The rules of rejection depend on the scheduler: let the engine apply them.
    at_once = replace(requests, arrival_s=np.zeros(len(requests)), concurrency=None)
    without_front = replace(deployment, cost=replace(deployment.cost, front=Front()))
    records = engine.simulate(at_once, without_front, time_limit_s=REJECTION_S, max_log_steps=0)
    return np.asarray(records.requests.status != Status.REJECTED)


def _completions_per_step(deployment: Deployment, needs: Needs, limits: Iterable[Limit], through_s: Floats) -> float:
    """Return the largest mean number of requests that complete in a step."""
    kv_tokens = deployment.kv.num_blocks * deployment.kv.block_size
    seqs = min(deployment.limits.max_step_seqs or math.inf, deployment.limits.max_num_seqs)
    caps = [kv_tokens / needs.kv_reads if needs.kv_reads else math.inf, seqs / (needs.decodes + 1)]
    batching = policy.resolve("batching", deployment.scheduler.batching)
    if batching.builtin and batching.name in BUDGETED:
        caps.append(max(deployment.limits.max_num_batched_tokens, seqs) / needs.tokens)
    for limit in limits if needs.decodes else ():
        metric, statistic = split(limit.metric)
        bound_s = limit.bound * SLACK  # times between tokens have the resolution of histogram bins
        if metric == "tbt" and statistic != "mean" and (through_s[1:] <= bound_s).any():
            longest = int(np.flatnonzero(through_s <= bound_s)[-1])
            if longest < len(through_s) - 1:
                caps.append(longest / (float(statistic[1:]) / 100 * needs.decodes))
    return min(caps)


class _Stages:
    """Least times of steps by their tokens: of each pipeline stage, and through all stages."""

    def __init__(self, deployment: Deployment) -> None:
        self.cost = cost = deployment.cost
        self.layers = np.asarray(cost.stage_layers, dtype=np.float64)
        each_s = self.layers[:, None] * (cost.layer_s + cost.comm_s)[None, :]
        each_s[0] += cost.first_s + float(cost.host_s[1:].min())
        each_s[-1] += float(cost.head_s[1:].min())
        each_s[:-1] += cost.send_s
        span = min(SLOPE_SPAN, each_s.shape[1] - 1)
        self.slope_s: Floats = np.maximum((each_s[:, -1] - each_s[:, -1 - span]) / max(span, 1), 0.0)
        each_s[:, 0] = each_s[:, 1]
        self.each_s: Floats = np.minimum.accumulate(each_s[:, ::-1], axis=1)[:, ::-1]
        self.through_s: Floats = self.each_s.sum(axis=0)

    def rate(self, needs: Needs, per_step: float) -> tuple[float, float]:
        """Return the bound on requests per second of the slowest stage, and requests completed per step there."""
        attention_s = _prefill_pair_s(self.cost) * needs.pairs + _decode_token_s(self.cost) * needs.kv_reads
        rows = zip(self.layers, self.slope_s, self.each_s, strict=True)
        stages = {(float(n), float(slope), row.tobytes()): row for n, slope, row in rows}  # equal stages once
        return min(
            _stage_rate(row, slope, n * attention_s, needs.tokens, per_step) for (n, slope, _), row in stages.items()
        )

    def isolated_s(self, prompt: Ints) -> Floats:
        """Return [n] the least time in which prompts are computed, in chunks of any length one after the other."""
        last = len(self.through_s) - 1
        excess = np.maximum(prompt - last, 0)
        at_once_s = self.through_s[np.minimum(prompt, last)] + excess * self.slope_s.sum()
        token_s = np.minimum.accumulate(self.through_s[1:] / np.arange(1, last + 1))
        chunked_s = prompt * token_s[np.minimum(prompt, last) - 1]
        return np.asarray(np.maximum(np.minimum(at_once_s, chunked_s), self.through_s[1]))


def _stage_rate(
    step_s: Floats, slope_s: float, attention_s: float, tokens: float, per_step: float
) -> tuple[float, float]:
    """Return the largest x / (Wc(tokens x) + x attention) over x up to ``per_step``, from above, and its x."""
    hull_tokens, hull_s = hull(step_s, slope_s, per_step * tokens)
    x = np.geomspace(per_step * 1e-6, per_step, GRID_POINTS)
    seconds = np.interp(x * tokens, hull_tokens, hull_s) + x * attention_s
    rates = x[1:] / seconds[:-1]  # from above within a cell: more requests in less time
    best = int(np.argmax(rates))
    return float(rates[best]), float(x[best + 1])


def hull(step_s: Floats, slope_s: float, max_tokens: float) -> tuple[Floats, Floats]:
    """Return points of a convex function below ``step_s`` (nondecreasing seconds by tokens): a lower convex hull.

    Beyond the last entry, the seconds rise by ``slope_s`` per token.
    """
    ends = _piece_ends(len(step_s))
    last = max(max_tokens, 2.0 * len(step_s))
    x = np.append(ends.astype(np.float64), last)
    y = step_s[np.concatenate([[0], ends[:-1] + 1])]  # the least of each piece, at its end
    y = np.append(y, step_s[-1] + slope_s * (last - ends[-1]))
    corners: list[int] = []
    for c in range(len(x)):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (y[b] - y[a]) * (x[c] - x[a]) < (y[c] - y[a]) * (x[b] - x[a]):
                break
            corners.pop()  # b lies on or above the line from a to c
        corners.append(c)
    return x[corners], y[corners]


@lru_cache(maxsize=8)
def _piece_ends(n: int) -> Ints:
    """Return the last indices of pieces of 0..n-1: single entries first, then pieces of 1 %."""
    large = np.geomspace(64, max(n - 1, 65), 420).astype(np.int64)
    ends = np.unique(np.concatenate([np.arange(min(n, 65)), large]))
    return np.unique(np.minimum(ends, n - 1))


def _prefill_pair_s(cost: CostTables) -> float:
    """Return the least seconds of one layer's prefill attention per (query, key) pair."""
    table = np.asarray(cost.prefill_s)
    if cost.rule.kind == MERGED:
        chunk = np.arange(table.shape[0], dtype=np.float64)
        context = np.arange(table.shape[1], dtype=np.float64) * cost.rule.step_tokens
    else:
        chunk, context = (grid_axis(2**40)[:size].astype(np.float64) for size in table.shape[:2])
    pairs = chunk[1:, None] * (context[None, :] + chunk[1:, None] / 2)
    return _min_ratio(table[1:], pairs)


def _decode_token_s(cost: CostTables) -> float:
    """Return the least seconds of one layer's decode attention per cached token read."""
    table = np.asarray(cost.decode_s)
    if cost.rule.kind == MERGED:
        seqs = np.arange(table.shape[0], dtype=np.float64)[1:, None]
        read = seqs * np.arange(table.shape[1], dtype=np.float64)[None, 1:] * cost.rule.step_tokens
    else:
        read = grid_axis(2**40)[1 : table.shape[1]].astype(np.float64)[None, :]
    return _min_ratio(table[1:, 1:], read)


def _min_ratio(seconds: Floats, work: Floats) -> float:
    return float((seconds / work)[seconds > 0].min(initial=np.inf)) if (seconds > 0).any() else 0.0


def _impossible(limits: Iterable[Limit], stages: _Stages, prompt: Ints, output: Ints) -> dict[str, str]:
    """Return, by metric, the limits that even an idle deployment breaks, with the evidence."""
    min_step_s, ttft_s = float(stages.through_s[1]), stages.isolated_s(prompt)
    isolated = {"ttft": ttft_s, "jct": ttft_s + (output - 1) * min_step_s}
    isolated |= {name: np.full(int((output > 1).sum()), min_step_s) for name in ("tbt", "tpot")}
    found: dict[str, str] = {}
    for limit in limits:
        metric, statistic = split(limit.metric)
        values = isolated.get(metric, np.zeros(0))
        if len(values) == 0:
            continue
        level = 0.0 if statistic == "mean" else float(statistic[1:]) / 100
        min_s = values.mean() if statistic == "mean" else np.quantile(values, level, method="lower")
        if min_s > limit.bound * SLACK:
            found[limit.metric] = (
                f"{limit.metric} is at least {min_s:.3g} s on an idle deployment; the limit is {limit.bound:g} s"
            )
    return found
