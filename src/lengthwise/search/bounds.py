"""Computes upper bounds on the request rate of a deployment, which no schedule exceeds, in closed form.

The bounds follow from the cost tables and the mean request. Let W(T) be the shortest time in which a stage computes a
step of T tokens without attention, Wc its lower convex hull, m the tokens that the engine computes for a request, and a
the least attention time of these tokens. J steps that complete N requests take at least J Wc(m N / J) + N a (Jensen's
inequality). With x = N / J requests completed per step, the rate is at most x / (Wc(m x) + x a).

Several limits bound x. A step has at most ``max_step_seqs`` and ``max_num_seqs`` sequences, and a request takes part in
one step per output token. A step computes at most its token budget, if the batching policy splits prompts. A step reads
at most the KV tokens that fit in the cache, and more only where requests share blocks. If the quantile q of the time
between tokens is limited, a share q of the tokens comes from steps that are short enough. In addition, requests arrive
no faster than the front end admits them. With speculation, all proposed tokens count as accepted.

Unlike replicas behind one router are bounded together (``_mixed_ceiling``). Under disaggregation each side has its
part of a request's work, its own steps and its own limits, and the rate is at most the smaller bound of both. Where
transfers go one at a time or share links, a link of each side is also limited by their times. Short prompts that
decode replicas prefill are work of the decode side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lengthwise import engine, policy
from lengthwise.schema.cost_tables import MERGED, CostTables, Floats, Front, Ints, grid_axis
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.metric_names import metric_of, quantity, split
from lengthwise.schema.plan import Limit
from lengthwise.schema.records import REJECTIONS, Rejection
from lengthwise.schema.workload import Workload
from lengthwise.search.load import Load

SLACK = 1.02  # factor on bounds, because the requests of a run differ a little from the sample that gives the means

GRID_POINTS = 512
REJECTION_S = 1e-9
BUDGETED = ("chunked", "unified", "vidur_sarathi")
"""Batching policies whose steps have at most max(token budget, decoding sequences) tokens."""

WEIGHTS = np.linspace(0.0, 1.0, 9)  # of the kinds of work that bound unlike replicas
SLOPE_SPAN = 256  # number of last entries whose mean slope extrapolates a table, as in the engine


@dataclass(frozen=True)
class MeanWork:
    """The mean work of a request on a replica: all of it, or that of one side.

    ``tokens`` is the number of computed tokens (uncached prompt and output, less one). ``decodes`` is the number of
    decode steps; with speculation, each gives up to 1 + num_speculative_tokens tokens. A request takes part in at least
    ``steps`` steps. ``kv_reads`` is the number of cached tokens that its decode steps read, ``kv_own`` the number of
    tokens in its blocks, summed over its steps (on replicas that decode, its decode steps), without blocks that other
    requests may share. ``pairs`` is the number of (query, key) pairs in the attention of its prompt.
    """

    tokens: float
    decodes: float
    steps: float
    kv_reads: float
    kv_own: float
    pairs: float


@dataclass(frozen=True)
class Ceiling:
    """An upper bound on the rate of a deployment, and the times that follow from it.

    ``rate_rps`` is infinite if no request is admitted. ``min_step_s`` is the time of a step of one token through all
    stages. ``jct_s`` is approximately the JCT of a mean request at full load. ``impossible`` maps the metric of each
    limit that breaks at every rate to the reason. ``parts`` has the bound of each part of the deployment without
    preemptions: the replicas or, under disaggregation, each side and the KV transfer; the front end if it has one.
    ``rate_rps`` is the smallest, or above it if preemptions move tokens of the decode side to the prefill side. The
    parts of unlike replicas are the groups, each with the bound of mean requests.
    """

    rate_rps: float
    min_step_s: float
    jct_s: float
    impossible: dict[str, str]
    parts: dict[str, float] = field(default_factory=dict)


def ceiling(deployment: Deployment, requests: Workload, limits: Iterable[Limit] = ()) -> Ceiling:
    """Return an upper bound on the rate that the deployment sustains on such requests under these limits."""
    limits, decode = tuple(limits), deployment.decode
    if deployment.groups:
        return _mixed_ceiling(deployment, requests, limits)
    most = 1 + (deployment.speculation.num_speculative_tokens if deployment.speculation else 0)  # tokens of a step
    sides = [deployment] if decode is None else [replace(deployment, decode=None), deployment.decoding()]
    stages = [_Stages(side) for side in sides]
    output = np.minimum(requests.output_tokens, deployment.max_model_len - requests.prompt_tokens)
    is_admitted = _admitted(deployment, requests)
    prompt, output = requests.prompt_tokens[is_admitted], np.maximum(output[is_admitted], 1)
    computed = _computed_tokens(deployment, requests)[is_admitted]
    transfer_s: Floats = np.zeros(len(prompt))
    link_s = 0.0  # of a mean request, in which a replica's link has no capacity for others
    min_step_s, first_s = float(stages[-1].through_s[1]), stages[0].isolated_s(computed)
    is_remote = np.ones(len(prompt), bool)
    if decode is not None:  # With a limit on the prefill queue, the decode side may compute any prompt.
        link, is_remote = decode.kv_transfer, prompt > decode.max_local_prefill_length
        is_sent = is_remote & (output > 1) & (decode.max_prefill_queue_size is None)
        at_once_s = link.token_s * prompt
        transfer_s = np.where(is_sent, link.fixed_s + at_once_s / max(1, link.layers), 0.0)  # after the prefill
        busy_s = np.where(is_sent, at_once_s + (link.fixed_s if link.sharing != "fair" else 0.0), 0.0)
        link_s = float(busy_s.mean()) if is_admitted.any() else 0.0
        if decode.prefills:
            own_s = stages[1].isolated_s(prompt)
            either_s = first_s if decode.max_prefill_queue_size is None else np.minimum(first_s, own_s)
            first_s = np.where(is_remote, either_s, own_s)
    isolated = first_s, min_step_s
    impossible = _impossible(limits, isolated, (output, -(-(output - 1) // most)), transfer_s)
    if not is_admitted.any():
        return Ceiling(math.inf, min_step_s, 0.0, impossible)
    p, d, c = prompt.astype(np.float64), output.astype(np.float64) - 1, computed.astype(np.float64)
    decoded, read = float(d.mean()) / most, float((p * d + d * (d - 1) / 2).mean()) / most
    pairs, own = c * (p - c / 2), float((c * d + d * (d - 1) / 2).mean()) / most
    works = [MeanWork(float((c + d).mean()), decoded, decoded + 1, read, own, float(pairs.mean()))]
    if decode is not None:
        n, local = max(1, int(is_remote.sum())), p * ~is_remote
        prefilled, tokens = float(c[is_remote].sum()) / n, decoded + float(local.mean())
        works = [
            MeanWork(prefilled, 0.0, 1.0, 0.0, prefilled, float(pairs[is_remote].sum()) / n),
            MeanWork(tokens, decoded, decoded + float((local > 0).mean()), read, read, float((local**2 / 2).mean())),
        ]
    rates, jct_s = [], float(transfer_s.mean())
    for side, stages_of, work in zip(sides, stages, works, strict=True):
        rate, per_step = math.inf, 0.0
        if work.tokens:  # otherwise no request decodes
            rate, per_step = stages_of.rate(work, _completions_per_step(side, work, limits, stages_of.through_s))
            jct_s += (work.decodes if side is sides[-1] else 1.0) * per_step / rate * side.parallel.pp
        rates.append(rate * side.parallel.ranks)
    parts = {"replicas": rates[0]}
    if decode is not None:
        parts = _parts(deployment, rates, decoded, link_s, float(is_remote.mean()))
    if serial_s := deployment.cost.front.serial_s:
        parts["front end"] = 1 / serial_s  # all replicas have one
    slack = SLACK / float(is_admitted.mean())
    without_preemptions = {} if decode is None else {"decode side": rates[1]}
    shown = {name: rate * slack for name, rate in (parts | without_preemptions).items()}
    return Ceiling(min(parts.values()) * slack, min_step_s, jct_s, impossible, shown)


def _mixed_ceiling(deployment: Deployment, requests: Workload, limits: tuple[Limit, ...]) -> Ceiling:
    """Return the bound of several groups of replicas behind one router, which may send each group what suits it.

    A request has m tokens, takes part in s steps and holds k KV tokens summed over its steps. Of a group's replica, let
    a step of x tokens take at least W(x), with at most S sequences and K KV tokens in it. Whatever the router does, for
    any weights a, b and c, each replica then adds at most max_x (a x + b S + c K) / W(x) of weighted work per second,
    and the rate is at most the sum over all replicas divided by a E[m] + b E[s] + c E[k]. The least of several weights
    is taken (duality of the linear program that divides the work). Limits on quantiles of all requests or tokens may be
    broken on one group and met on another, so that none bounds the rate; a limit is impossible if each request and step
    would break it on the group that is fastest for it.
    """
    groups = deployment.replica_groups
    own = [ceiling(group, requests) for group in groups]
    is_admitted = _admitted(deployment, requests)
    output = np.minimum(requests.output_tokens, deployment.max_model_len - requests.prompt_tokens)
    prompt, output = requests.prompt_tokens[is_admitted], np.maximum(output[is_admitted], 1)
    computed = _computed_tokens(deployment, requests)[is_admitted]
    stages = [_Stages(group) for group in groups]
    isolated = np.min([one.isolated_s(computed) for one in stages], axis=0), min(one.min_step_s for one in own)
    impossible = _impossible(limits, isolated, (output, output - 1), np.zeros(len(prompt)))
    if not is_admitted.any():
        return Ceiling(math.inf, isolated[1], 0.0, impossible)
    c, d = computed.astype(np.float64), output.astype(np.float64) - 1
    means = [float(work.mean()) for work in (c + d, d + 1, c * d + d * (d - 1) / 2)]
    shares = [(a, b, 1 - a - b) for a in WEIGHTS for b in WEIGHTS if a + b <= 1]
    weights = np.array([[share / mean for share, mean in zip(one, means, strict=True)] for one in shares if means[2]])
    if not means[2]:  # no output has a second token
        weights = np.array([[a / means[0], (1 - a) / means[1], 0.0] for a in WEIGHTS])
    added = [_weighted_work(group, one, weights) for group, one in zip(groups, stages, strict=True)]
    rate_rps = np.sum(added, axis=0).min()
    parts = {
        f"group {number}, {group.parallel.replicas} x {group.gpu.name}": one.parts["replicas"]
        for number, (group, one) in enumerate(zip(groups, own, strict=True))
    }
    bound = float(rate_rps) * SLACK / float(is_admitted.mean())
    front = own[0].parts.get("front end", math.inf)
    return Ceiling(min(bound, front), isolated[1], max(one.jct_s for one in own), impossible, parts)


def _weighted_work(group: Deployment, stages: _Stages, weights: Floats) -> Floats:
    """Return by row of ``weights`` the most weighted tokens, sequences and KV tokens that a group adds per second."""
    limits, kv = group.limits, group.kv
    seqs = min(limits.max_step_seqs or math.inf, limits.max_num_seqs)
    full = kv.groups.full if kv.groups else 1
    kv_tokens = kv.num_blocks * kv.block_size / full if full else math.inf
    batching = policy.resolve("batching", group.scheduler.batching)
    budget = math.inf
    if batching.builtin and batching.name in BUDGETED:
        budget = max(limits.max_num_batched_tokens, seqs)
    slowest = int(np.argmax(stages.each_s[:, 1]))
    row, slope = stages.each_s[slowest], float(stages.slope_s[slowest])
    tokens, seconds = hull(row, slope, 2.0 * len(row) if math.isinf(budget) else budget)
    if tokens[-1] > budget:
        tokens, seconds = np.minimum(tokens, budget), np.interp(np.minimum(tokens, budget), tokens, seconds)
    work = weights[:, :1] * tokens + weights[:, 1:2] * seqs
    work += np.where(weights[:, 2:] > 0, weights[:, 2:] * kv_tokens, 0.0)
    most: Floats = np.max(work / seconds, axis=1)
    if math.isinf(budget) and slope > 0:  # steps of any length
        most = np.maximum(most, weights[:, 0] / slope)
    return most * group.parallel.ranks


def _parts(
    deployment: Deployment, rates: list[float], decoded: float, link_s: float, remote: float
) -> dict[str, float]:
    """Return the bounds of both sides and of the KV transfer.

    ``rates`` are those of the sides, if every request is prefilled once and has ``decoded`` tokens decoded; that of the
    prefill side counts requests that it prefills. ``link_s`` are the seconds of a mean request in which a link is full.
    A request that is preempted for recomputation gets a token by another prefill. With m preemptions a request, the
    rate r is limited by (f + m) r <= prefill rate and (decoded - m) r <= decoded x decode rate, of which the sum does
    not have m. The share ``remote`` of the requests may be prefilled on the prefill side; f, the share that certainly
    is, equals it without a limit on the prefill queue.
    """
    decode = deployment.decode
    assert decode is not None
    (prefill_rps, decode_rps), certain = rates, remote if decode.max_prefill_queue_size is None else 0.0
    if decode.preemption_mode == "recompute" and remote and decoded and decode_rps * certain < prefill_rps:
        decode_rps = (prefill_rps + decoded * decode_rps) / (certain + decoded)
    prefill_rps = prefill_rps / certain if certain else math.inf
    transfer_rps = math.inf
    link = decode.kv_transfer
    if math.isfinite(link.timeout_s):  # some requests may fail, or be recomputed, instead of a transfer and decodes
        decode_rps = decode_rps if link.kv_load_failure_policy == "recompute" else math.inf
    elif link.sharing != "none" and link_s:
        transfer_rps = min(deployment.parallel.ranks, decode.parallel.ranks, link.links_at_once) / link_s
    return {"prefill side": prefill_rps, "KV transfer": transfer_rps, "decode side": decode_rps}


def fits_any(deployment: Deployment, load: Load) -> bool:
    """Return whether the deployment admits at least one request of the load's sample; it may reject long prompts."""
    return bool(_admitted(deployment, load.sample()).any())


def _computed_tokens(deployment: Deployment, requests: Workload) -> npt.NDArray[np.int64]:
    """Return the prompt tokens [n] that are computed if everything that prompts share is found in the cache."""
    prompt, prefixes = requests.prompt_tokens, requests.prefixes
    if prefixes is None or not deployment.limits.enable_prefix_caching:
        return prompt
    blocks = np.minimum(np.diff(prefixes.start), prompt // prefixes.block_tokens)
    before = np.where(prefixes.turns >= 0, (prompt + requests.output_tokens)[prefixes.turns], 0)
    computed: npt.NDArray[np.int64] = np.maximum(prompt - np.maximum(blocks * prefixes.block_tokens, before), 1)
    return computed


def rejections(deployment: Deployment, requests: Workload) -> tuple[float, str]:
    """Return the share of the requests that are rejected, and a text with their number, reasons and remedies, or ""."""
    reasons = _rejections(deployment, requests)
    share = 1 - float(_with_parents(requests, reasons == Rejection.NONE).mean())
    by_trtllm = deployment.scheduler.trtllm is not None
    chunks = "set scheduler.trtllm.enable_chunked_prefill = true" if by_trtllm else 'set scheduler.batching = "unified"'
    remedies = {
        Rejection.PROMPT_REACHES_MAX_MODEL_LEN: f"raise engine.max_model_len ({deployment.max_model_len:,})",
        Rejection.PROMPT_ABOVE_TOKEN_BUDGET: (
            f"raise engine.max_num_batched_tokens ({deployment.limits.max_num_batched_tokens:,}) or {chunks}"
        ),
        Rejection.REFUSED_BY_MEMORY_POLICY: "add KV cache memory",
    }
    counts = {reason: int((reasons == reason).sum()) for reason in remedies}
    texts = (
        f"{count:,} of {len(requests):,} requests are rejected because {REJECTIONS[reason]}: {remedies[reason]}"
        for reason, count in counts.items()
        if count
    )
    return share, ", and ".join(texts)


def _admitted(deployment: Deployment, requests: Workload) -> npt.NDArray[np.bool_]:
    return _with_parents(requests, _rejections(deployment, requests) == Rejection.NONE)


def _rejections(deployment: Deployment, requests: Workload) -> npt.NDArray[np.int64]:
    """Return why each request is rejected, [n], apart from its parents."""
    if deployment.groups:  # Each group must admit it: the router may choose any replica.
        own = [_rejections(group, requests) for group in deployment.replica_groups]
        return np.asarray(np.max(own, axis=0))
    prompt, kv = requests.prompt_tokens, deployment.kv
    largest = min(deployment.limits.max_num_batched_tokens, kv.kv_tokens(deployment.max_model_len))
    fitting = largest * (1 - deployment.watermark)
    if deployment.decode is not None:  # which admits the prompt and the first token
        side = deployment.decoding()
        fitting = min(fitting, side.kv.kv_tokens(side.max_model_len) * (1 - side.watermark) - 1)
        if deployment.decode.prefills:
            fitting = min(fitting, side.limits.max_num_batched_tokens)
    if prompt.max() <= fitting:
        too_long = int(Rejection.PROMPT_REACHES_MAX_MODEL_LEN)
        return np.where(prompt < deployment.max_model_len, int(Rejection.NONE), too_long)
    # The rules of rejection depend on the scheduler, so the engine applies them.
    at_once = replace(requests.without_dependencies(), arrival_s=np.zeros(len(requests)), concurrency=None)
    without_front = replace(deployment, cost=replace(deployment.cost, front=Front()))
    records = engine.simulate(at_once, without_front, time_limit_s=REJECTION_S, max_log_steps=0)
    return np.asarray(records.requests.rejection, np.int64)


def _with_parents(requests: Workload, is_admitted: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return the mask [n] of admitted requests, in which a request needs all of its parents to be admitted."""
    after = requests.after
    if after is None or is_admitted.all():
        return is_admitted
    admitted, child = is_admitted.copy(), np.repeat(np.arange(len(requests)), np.diff(after.start))
    while (lost := admitted[child] & ~admitted[after.parent]).any():
        admitted[child[lost]] = False
    return admitted


def _completions_per_step(deployment: Deployment, work: MeanWork, limits: Iterable[Limit], through_s: Floats) -> float:
    kv, kv_tokens = deployment.kv, math.inf
    if full := kv.groups.full if kv.groups else 1:  # every token is in the blocks of these groups
        kv_tokens = kv.num_blocks * kv.block_size / full
    seqs = min(deployment.limits.max_step_seqs or math.inf, deployment.limits.max_num_seqs)
    caps = [kv_tokens / work.kv_own if work.kv_own else math.inf, seqs / work.steps]
    batching = policy.resolve("batching", deployment.scheduler.batching)
    if batching.builtin and batching.name in BUDGETED and not deployment.scheduler.engine_rules:
        caps.append(max(deployment.limits.max_num_batched_tokens, seqs) / work.tokens)
    for limit in limits if work.decodes else ():
        metric, statistic = split(limit.metric)
        bound_s = limit.bound * SLACK  # times between tokens have the resolution of histogram bins
        if metric == "tbt" and statistic != "mean" and (through_s[1:] <= bound_s).any():
            longest = int(np.flatnonzero(through_s <= bound_s)[-1])
            if longest < len(through_s) - 1:
                caps.append(longest / (float(statistic[1:]) / 100 * work.decodes))
    return min(caps)


class _Stages:
    """The shortest times of steps by their number of tokens, for each pipeline stage and for all in sequence."""

    def __init__(self, deployment: Deployment) -> None:
        self.cost = cost = deployment.cost
        self.layers = np.asarray(cost.stage_layers, dtype=np.float64)
        layer_s = cost.alone().layer_s + cost.comm_s  # ranks compute together at least the tokens of one rank
        each_s = self.layers[:, None] * layer_s[None, :]
        each_s[0] += cost.embedding_s + float(cost.host_s[1:].min())
        each_s[-1] += float(cost.head_s[1:].min())
        each_s[:-1] += cost.send_s
        span = min(SLOPE_SPAN, each_s.shape[1] - 1)
        self.slope_s: Floats = np.maximum((each_s[:, -1] - each_s[:, -1 - span]) / max(span, 1), 0.0)
        each_s[:, 0] = each_s[:, 1]
        self.each_s: Floats = np.minimum.accumulate(each_s[:, ::-1], axis=1)[:, ::-1]
        self.through_s: Floats = self.each_s.sum(axis=0)

    def rate(self, work: MeanWork, per_step: float) -> tuple[float, float]:
        """Return the slowest stage's bound on requests/s, and the completions per step (up to ``per_step``) at it."""
        attention_s = _prefill_pair_s(self.cost) * work.pairs + _decode_token_s(self.cost) * work.kv_reads
        rows = zip(self.layers, self.slope_s, self.each_s, strict=True)
        stages = {(float(n), float(slope), row.tobytes()): row for n, slope, row in rows}  # equal stages once
        return min(
            _stage_rate(row, slope, n * attention_s, work.tokens, per_step) for (n, slope, _), row in stages.items()
        )

    def isolated_s(self, prompt: Ints) -> Floats:
        """Return the shortest times [n] to compute prompts alone, each in one step or in chunks of any length."""
        last = len(self.through_s) - 1
        excess = np.maximum(prompt - last, 0)
        at_once_s = self.through_s[np.minimum(prompt, last)] + excess * self.slope_s.sum()
        token_s = np.minimum.accumulate(self.through_s[1:] / np.arange(1, last + 1))
        chunked_s = prompt * token_s[np.minimum(prompt, last) - 1]
        return np.asarray(np.maximum(np.minimum(at_once_s, chunked_s), self.through_s[1]))


def _stage_rate(
    step_s: Floats, slope_s: float, attention_s: float, tokens: float, per_step: float
) -> tuple[float, float]:
    """Return an upper bound of x / (Wc(tokens x) + x attention_s) for x up to ``per_step``, and its x."""
    hull_tokens, hull_s = hull(step_s, slope_s, per_step * tokens)
    x = np.geomspace(per_step * 1e-6, per_step, GRID_POINTS)
    seconds = np.interp(x * tokens, hull_tokens, hull_s) + x * attention_s
    rates = x[1:] / seconds[:-1]  # bounds within each cell: the largest x over the shortest time
    best = int(np.argmax(rates))
    return float(rates[best]), float(x[best + 1])


def hull(step_s: Floats, slope_s: float, max_tokens: float) -> tuple[Floats, Floats]:
    """Return the tokens and the seconds at the corners of a lower convex hull.

    The hull lies below ``step_s``, the nondecreasing seconds by tokens; beyond the last entry, these rise by
    ``slope_s`` per token.
    """
    ends = _piece_ends(len(step_s))
    last = max(max_tokens, 2.0 * len(step_s))
    x = np.append(ends.astype(np.float64), last)
    y = step_s[np.concatenate([[0], ends[:-1] + 1])]  # the first and smallest value of each piece, at its end
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
    """Return the last indices of pieces of 0 .. n - 1: single entries first, then pieces that grow by 1 %."""
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
    """Return the least seconds of one layer's decode attention per cached token that it reads."""
    table = np.asarray(cost.decode_s)
    if cost.rule.kind == MERGED:
        seqs = np.arange(table.shape[0], dtype=np.float64)[1:, None]
        read = seqs * np.arange(table.shape[1], dtype=np.float64)[None, 1:] * cost.rule.step_tokens
    else:
        read = grid_axis(2**40)[1 : table.shape[1]].astype(np.float64)[None, :]
    return _min_ratio(table[1:, 1:], read)


def _min_ratio(seconds: Floats, work: Floats) -> float:
    return float((seconds / work)[seconds > 0].min(initial=np.inf)) if (seconds > 0).any() else 0.0


def _impossible(
    limits: Iterable[Limit], isolated_s: tuple[Floats, float], outputs: tuple[Ints, Ints], transfer_s: Floats
) -> dict[str, str]:
    """Return the limits that no request alone meets.

    ``isolated_s`` are the least seconds of each prompt alone and of a decode step; ``outputs`` are tokens, and the
    fewest decode steps for them.
    """
    ttft_s, min_step_s = isolated_s
    output, steps = outputs
    decodes, decode_s = output > 1, transfer_s + steps * min_step_s
    isolated = {"ttft": ttft_s, "jct": ttft_s + decode_s, "tbt": np.full(int(decodes.sum()), min_step_s)}
    isolated |= {"tpot": decode_s[decodes] / (output[decodes] - 1)}
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
                f"{metric_of(limit.metric).label} is at least {quantity(limit.metric, float(min_s), 3)} without other "
                f"requests; the limit is {quantity(limit.metric, limit.bound)}"
            )
    return found
