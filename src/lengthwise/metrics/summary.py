"""Summary of a run: counts, rates, latencies, goodput, hardware."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.catalog import active_parameters, embedding_parameters, kv_bytes_per_token, parameters, weight_bytes
from lengthwise.metrics.columns import request_column
from lengthwise.metrics.distribution import (
    BATCHES,
    MIN_VALUES,
    Distribution,
    column_distribution,
    gap_distribution,
    ratio_estimate,
)
from lengthwise.metrics.prefix_cache import PrefixCacheStatistics, prefix_cache_statistics
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import UNKNOWN, Estimate
from lengthwise.schema.records import Records, Rejection, ReplicaTotals, RequestRecords, Status
from lengthwise.schema.specs import GpuSpec, ModelSpec
from lengthwise.schema.workload import Workload
from lengthwise.statistics import Floats, Ints, batch_half_width

TIME_USES = {
    "prefill_attention": "prefill_attention_s",
    "decode_attention": "decode_attention_s",
    "linear": "layer_s",
    "communication": "comm_s",
    "embedding": "embedding_s",
    "head": "head_s",
    "send": "send_s",
    "swap": "swap_s",
    "host": "host_s",
}
"""Uses of a stage's time and their columns of ReplicaTotals; the rest is "drafter" (of speculation) and "idle"."""

MFU_AT_FULL_POWER, POWER_EXPONENT = 0.45, 0.7
POWER_SHARE_AT_FULL_BANDWIDTH = 0.4


@dataclass(frozen=True)
class Cost:
    """Price of the complete deployment per million delivered tokens: of prompts, of outputs, of both together."""

    usd_per_million_prompt_tokens: Estimate
    usd_per_million_output_tokens: Estimate
    usd_per_million_tokens: Estimate


@dataclass(frozen=True)
class Hardware:
    """Use of the deployment's hardware over the complete run, including warm-up and idle time."""

    busy_share: Estimate  # share of time with a step in flight, mean over replicas
    replica_busy_share: tuple[Estimate, ...]  # share of time with a step in flight, by replica (rank, with dp)
    batch_seqs: Estimate  # sequences in a step, weighted by the step's time
    mfu: Estimate  # model FLOPs a second over the GPUs' peak (:func:`model_flops`)
    mbu: Estimate  # bytes a second that must move, over the GPUs' bandwidth (:func:`moved_bytes`)
    kv_utilization: Estimate  # KV blocks in use over all KV blocks
    power_w: Estimate  # estimated mean draw of all GPUs (:func:`gpu_power_w`), without hosts and cooling
    energy_j_per_output_token: Estimate  # GPU energy over delivered output tokens
    cost: Cost  # price of the deployment per million tokens
    time_shares: dict[str, Estimate]  # of the stages, by use (keys of TIME_USES, "drafter", "idle"); sum 1
    tokens_per_step: Estimate = UNKNOWN  # of a decoding sequence in a step, with speculation


def hardware_of(records: Records, deployment: Deployment) -> Hardware:
    """Return the use of the deployment's hardware in one run, without intervals."""
    totals, span_s = records.totals, records.end_s
    unknown = np.full(len(totals.busy_s), math.nan)
    busy = np.minimum(totals.busy_s / span_s, 1.0) if span_s > 0 else unknown
    flops = peak_flops = moved = peak_bytes = power_w = 0.0
    for own, group in by_group(records, deployment):
        dtype, started = group.limits.weight_dtype or group.model.dtype, own.requests.output_tokens > 0
        decodes = float((own.requests.output_tokens - 1).sum(where=started))
        used = model_flops(own.totals, group.model)
        read = moved_bytes(own.totals, group, num_prompts=int(started.sum()), num_decodes=decodes)
        counts = [(side.parallel.gpus, side.gpu) for side in group.sides]
        group_flops = sum(count * gpu.flops(dtype) for count, gpu in counts) * span_s
        group_bytes = sum(count * gpu.bandwidth_bytes_per_s for count, gpu in counts) * span_s
        share = float(np.minimum(own.totals.busy_s / span_s, 1.0).mean()) if span_s > 0 else math.nan
        mfu, mbu = _ratio(used, group_flops), _ratio(read, group_bytes)
        power_w += sum(count * gpu_power_w(gpu, share, mfu, mbu) for count, gpu in counts)
        flops, peak_flops = flops + used, peak_flops + group_flops
        moved, peak_bytes = moved + read, peak_bytes + group_bytes
    finished = records.requests.status == Status.FINISHED
    prompt = float(records.requests.prompt_tokens.sum(where=finished))
    output = float(records.requests.output_tokens.sum(where=finished))
    usd = deployment.price_per_hour_usd * span_s / 3600
    sides = deployment.sides
    kv_blocks = sum(side.kv.num_blocks * side.parallel.ranks for side in sides)
    stage_s = sum(side.parallel.pp * side.parallel.ranks for side in sides) * span_s
    used_s = {name: float(getattr(totals, column).sum()) for name, column in TIME_USES.items()}
    used_s["drafter"] = float(records.speculation.draft_s.sum()) if records.speculation else 0.0
    # Only rounding can make it negative: ``end_s`` includes the steps in flight at a time limit.
    used_s["idle"] = max(0.0, stage_s - sum(used_s.values()))
    return Hardware(
        busy_share=Estimate(float(busy.mean())),
        replica_busy_share=tuple(Estimate(float(b)) for b in busy),
        batch_seqs=Estimate(_ratio(records.series.seqs_s.sum(), records.series.step_s.sum())),
        mfu=Estimate(_ratio(flops, peak_flops)),
        mbu=Estimate(_ratio(moved, peak_bytes)),
        kv_utilization=Estimate(_ratio(totals.kv_block_s.sum(), kv_blocks * span_s)),
        power_w=Estimate(power_w),
        energy_j_per_output_token=Estimate(_ratio(power_w * span_s, output)),
        cost=Cost(*(Estimate(_ratio(1e6 * usd, tokens)) for tokens in (prompt, output, prompt + output))),
        time_shares={name: Estimate(_ratio(seconds, sum(used_s.values()))) for name, seconds in used_s.items()},
        tokens_per_step=Estimate(records.speculation.tokens_per_step if records.speculation else math.nan),
    )


def by_group(records: Records, deployment: Deployment) -> list[tuple[Records, Deployment]]:
    """Return the records and the deployment of each group of replicas; requests belong to their last replica's group.

    Times between tokens and the time series are not recorded by group: they remain those of all groups.
    """
    if not deployment.groups:
        return [(records, deployment)]
    found, first = [], 0
    for group in deployment.replica_groups:
        own = slice(first, first + group.parallel.ranks)
        first = own.stop
        rows = (records.requests.replica >= own.start) & (records.requests.replica < own.stop)
        changes = {"requests": _sliced(records.requests, rows), "totals": _sliced(records.totals, own)}
        if (steps := records.steps) is not None:
            changes["steps"] = _sliced(steps, (steps.replica >= own.start) & (steps.replica < own.stop))
        found.append((replace(records, **changes), group))
    return found


def _sliced(columns: Any, rows: Any) -> Any:
    names = [one.name for one in dataclasses.fields(columns) if isinstance(getattr(columns, one.name), np.ndarray)]
    return replace(columns, **{name: getattr(columns, name)[rows] for name in names})


def model_flops(totals: ReplicaTotals, model: ModelSpec) -> float:
    """Return the FLOPs that the computed tokens need: 2 for each weight and token, and the FLOPs of attention.

    The count follows PaLM (Chowdhery et al., 2022, appendix B) for a forward pass. Only weights that multiply a token
    count: of the experts those that the token visits, and the embedding table only if it is also the head. A (query,
    key) pair costs 2 FLOPs for each dimension of key and value, head and layer; pairs outside a sliding window count
    too.
    """
    attention = model.attention
    lookup = 0 if model.tied_embeddings else embedding_parameters(model)
    key_dim = attention.head_dim + (attention.rope_head_dim if attention.is_mla else 0)
    dims = key_dim + (attention.v_head_dim or attention.head_dim)
    pair_flops = 2 * attention.heads * dims * model.caching_layers
    weight_flops = 2.0 * (active_parameters(model) - lookup)
    return weight_flops * float(totals.tokens.sum()) + pair_flops * float(totals.attention_pairs.sum())


def moved_bytes(
    totals: ReplicaTotals, deployment: Deployment, *, num_prompts: int = 0, num_decodes: float = math.inf
) -> float:
    """Return the bytes that steps must read: all weights once per step, and the KV cache that decodes read.

    Activations and writes to the cache are left out, as is usual for MBU. A step of T evenly routed tokens reads a
    share 1 - (1 - visited / all)^T of the experts. The ``num_decodes`` decode tokens are spread evenly over all steps.
    The other tokens are prompt tokens, in ``num_prompts`` steps, or in more if the token budget requires more. A step
    with a prompt reads many more experts than the others, so a mean over all steps would overstate the reads. All
    data-parallel ranks of a replica read the experts once in a step, and each of them reads the other weights.
    """
    if deployment.decode is not None:
        (prefill, decode), ranks = deployment.sides, deployment.parallel.ranks
        own = moved_bytes(_sliced(totals, slice(ranks)), prefill, num_prompts=num_prompts, num_decodes=0.0)
        return own + moved_bytes(_sliced(totals, slice(ranks, None)), decode)
    model, limits, dp = deployment.model, deployment.limits, deployment.parallel.dp
    steps, tokens = float(totals.steps.sum()) / dp, float(totals.tokens.sum())
    unread = in_experts = 0.0  # shares of all weights: in experts that no token of a step visits, in all experts
    if model.ffn.experts > model.ffn.experts_per_token:
        visited = model.ffn.experts_per_token / model.ffn.experts
        in_experts = (1 - active_parameters(model) / parameters(model)) / (1 - visited)
        decodes, steps_or_one = min(num_decodes, tokens), max(steps, 1.0)
        budget = dp * limits.max_num_batched_tokens
        with_prompt = min(steps_or_one, max(num_prompts, (tokens - decodes) / budget, 1.0))
        decode_unread = (1 - visited) ** (decodes / steps_or_one)
        prompt_unread = decode_unread * (1 - visited) ** ((tokens - decodes) / with_prompt)
        share = with_prompt / steps_or_one
        unread = float(in_experts * (share * prompt_unread + (1 - share) * decode_unread))
    weights = steps * weight_bytes(model, limits.weight_dtype) * (1 - unread + (dp - 1) * (1 - in_experts))
    return weights + float(totals.kv_read_tokens.sum()) * kv_bytes_per_token(model, limits.kv_dtype)


def gpu_power_w(gpu: GpuSpec, busy_share: float, mfu: float, mbu: float) -> float:
    """Return the estimated mean power of one GPU in watts. Errors of tens of percent are to be expected.

    ``busy_share`` is the share of time with a step in flight; ``mfu`` and ``mbu`` include idle time. A GPU without a
    step in flight draws idle_w. With a step it draws idle_w + (tdp_w - idle_w) * min(1, max((MFU / 0.45)^0.7, 0.4
    MBU)). The first term was fitted on A100 (Oezcan et al., "Quantifying the energy consumption and carbon emissions of
    LLM inference via simulations", 2025). The second follows from an H100 that decodes one sequence, with all bandwidth
    and no compute: it draws about 300 of 700 W in the ML.ENERGY benchmark v3.
    """
    if not busy_share > 0:
        return gpu.idle_w
    compute = (mfu / busy_share / MFU_AT_FULL_POWER) ** POWER_EXPONENT
    activity: float = min(1.0, max(compute, POWER_SHARE_AT_FULL_BANDWIDTH * mbu / busy_share))
    return gpu.idle_w + (gpu.tdp_w - gpu.idle_w) * activity * busy_share


def _ratio(part: float, total: float) -> float:
    return float(part) / float(total) if total > 0 else math.nan


Bools = npt.NDArray[np.bool_]

_LIMITS = ("ttft_s", "tpot_s", "jct_s")


@dataclass(frozen=True)
class Slo:
    """Limits in seconds that a request must meet to count as good. None means no limit.

    A request without a second token has no TPOT and meets that limit. Times between tokens (TBT) are pooled over
    requests, so a limit on them does not apply to single requests: compare ``Summary.tbt_s`` with it instead.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    jct_s: float | None = None

    def __post_init__(self) -> None:
        for name, limit in self.limits.items():
            if not limit > 0:
                raise InputError(f"an SLO must be a positive number of seconds; {name} is {limit}")

    @property
    def limits(self) -> dict[str, float]:
        """Return the limits that are not None, by name."""
        return {name: getattr(self, name) for name in _LIMITS if getattr(self, name) is not None}

    def met(self, requests: RequestRecords) -> dict[str, Bools]:
        """Return by limit an array [n]: whether each request finished within it. The key "all" covers all limits."""
        finished = requests.status == Status.FINISHED
        good = {"all": finished.copy()}
        for name, limit in self.limits.items():
            value = request_column(requests, name)
            with np.errstate(invalid="ignore"):
                within = value <= limit
            if name == "tpot_s":
                within |= requests.output_tokens == 1
            good[name] = within & finished
            good["all"] &= within
        return good


@dataclass(frozen=True)
class Counts:
    """Numbers of requests, summed over seeds. The finished, rejected, timed out and unfinished add up to ``arrivals``.

    Requests that had not arrived at the end of the run do not count. The last three fields are reasons of rejection:
    the prompt reaches ``max_model_len``, the prompt exceeds the token budget of a step that must not split it, or the
    memory policy does not admit the request even on an idle replica (watermark). Children of a parent that was rejected
    or timed out count in ``rejected``, without a reason.
    """

    arrivals: int
    finished: int
    rejected: int
    timed_out: int
    unfinished: int
    preemptions: int
    rejected_too_long: int = 0
    rejected_over_token_budget: int = 0
    rejected_over_kv_memory: int = 0


@dataclass(frozen=True)
class Rates:
    """Finished requests, their prompt tokens and their output tokens per second."""

    requests_per_s: Estimate
    prompt_tokens_per_s: Estimate
    output_tokens_per_s: Estimate
    steady_share: Estimate  # share of the window during which as many sessions start as end, or NaN


@dataclass(frozen=True)
class Goodput:
    """How many requests finished within every limit of ``slo``: as a share of the arrivals, and per second."""

    slo: Slo
    share: Estimate  # of the arrivals
    requests_per_s: Estimate
    met: dict[str, Estimate]  # share for each single limit


@dataclass(frozen=True)
class Intervals:
    """How the intervals of a summary were computed."""

    source: str  # "batch means" within one run, "seeds" over several, "difference" of two
    level: float  # confidence level of every interval
    model_level: float = math.nan  # of ``model_low`` and ``model_high``; NaN where there are none


@dataclass(frozen=True)
class Summary:
    """Statistics of one run, or of several seeds of it.

    Latencies are over requests that have them: JCT, TPOT and normalized latency over finished requests, TTFT over
    requests with a first token, queueing delay over scheduled requests. Other requests appear in ``counts`` and
    ``goodput``.
    """

    name: str  # name of the records
    seeds: tuple[int, ...]  # seeds of the runs
    intervals: Intervals
    window_s: Estimate  # seconds from the first counted arrival to the end of the run
    counts: Counts  # requests by outcome, warm-up left out
    rates: Rates  # throughput in the window
    ttft_s: Distribution  # arrival until first token
    tpot_s: Distribution  # mean time between the tokens of one request
    tbt_s: Distribution  # time between tokens (ITL), pooled over all tokens of the run, warm-up included
    jct_s: Distribution  # arrival until last token
    queueing_delay_s: Distribution  # arrival until first scheduled
    normalized_latency_s: Distribution  # JCT per output token
    goodput: Goodput | None  # None without an SLO
    hardware: Hardware | None  # None without a deployment; over the complete run, warm-up included
    prefix_cache: PrefixCacheStatistics | None = None  # None where no prompts share a prefix

    @property
    def is_steady(self) -> bool:
        """Return whether the load is steady for at least STEADY_SHARE of the window. It always is without sessions."""
        return not self.rates.steady_share.value < STEADY_SHARE


STEADY_SHARE = 0.8
CountedRows = slice | Ints  # requests that count: consecutive rows, or row numbers


def summarize(
    records: Records,
    deployment: Deployment | None = None,
    *,
    workload: Workload | None = None,
    slo: Slo | None = None,
    warmup_s: float = 0.0,
    warmup_requests: int = 0,
    level: float = 0.95,
) -> Summary:
    """Return the statistics of one run, with confidence intervals if one run allows them.

    Intervals come from 10 batches of consecutive requests (in order of arrival; for rates, from equal spans of time).
    They assume that the run is stationary after the warm-up, and that a batch is much longer than the queue's
    correlation time; remaining correlation between neighbouring batches widens them. On an M/M/1 queue at load 0.8, 95
    % intervals contain the true value in 93 % (mean, p90) and 86 % (p99) of runs of 20,000 requests, in 89 % (mean) and
    82 % (p90) of runs of 2,000; at higher loads in fewer. They are NaN below 400 values, for minima and maxima, for
    quantiles above which a batch expects fewer than 5 values, for quantiles of TBT, and for the hardware. Several seeds
    and :func:`combine` have none of these limits.

    Without a deployment there is no hardware. The records' ``workload`` is needed for the statistics of the prefix
    cache, which only a workload with shared prefixes has. Requests that arrived before ``warmup_s``, and the first
    ``warmup_requests``, count only in rates, TBT and hardware. Raises InputError if no request is left, or the level is
    not between 0 and 1.
    """
    if not 0 < level < 1:
        raise InputError(f"the confidence level must be between 0 and 1; it is {level}")
    rows = counted_rows(records, warmup_s, warmup_requests)
    r = select_rows(records.requests, rows)
    latencies: dict[str, Any] = {name: column_distribution(request_column(r, name), level) for name in _LATENCIES}
    start_s = max(warmup_s, float(r.arrival_s[0]))
    span_s = float(records.end_s) - start_s
    return Summary(
        name=records.name,
        seeds=(records.seed,),
        intervals=Intervals("batch means", level),
        window_s=Estimate(span_s),
        counts=bucket_counts(r),
        rates=_rates(records, workload, start_s, level),
        tbt_s=gap_distribution(records.gaps, _mean_gap_half_width(r, level)),
        **latencies,
        goodput=None if slo is None else _goodput(r, slo, (start_s, records.end_s), level),
        hardware=None if deployment is None else hardware_of(records, deployment),
        prefix_cache=None if workload is None else _prefix_cache(r, rows, workload, deployment, level),
    )


SENT_SHARE = 0.95  # share of their requests that the first sessions have time to send before the load counts as steady


def steady_period(records: Records, workload: Workload) -> tuple[float, float] | None:
    """Return (start, end) in seconds of the period in which the number of running sessions is about constant.

    The number rises while the first sessions send SENT_SHARE of their requests, and falls after the last session has
    started. Without sessions that start over time, return None.
    """
    if workload.after is None or workload.concurrency is not None:
        return None
    starts_s = workload.session_starts_s
    since_s = records.requests.arrival_s - workload.arrival_s
    sent = np.isfinite(since_s)
    if not sent.any() or not starts_s.max() > starts_s.min():
        return None
    return float(starts_s.min() + np.quantile(since_s[sent], SENT_SHARE)), float(starts_s.max())


def _prefix_cache(
    r: RequestRecords, rows: CountedRows, workload: Workload, deployment: Deployment | None, level: float
) -> PrefixCacheStatistics | None:
    if workload.prefixes is None or r.cached_tokens is None:
        return None
    turn = workload.extra.get("turn")
    has_sessions = workload.after is not None and turn is not None
    return prefix_cache_statistics(r, deployment, np.asarray(turn)[rows] if has_sessions else None, level)


_LATENCIES = ("ttft_s", "tpot_s", "jct_s", "queueing_delay_s", "normalized_latency_s")


def counted_rows(records: Records, warmup_s: float, warmup_requests: int) -> CountedRows:
    """Return the rows of the requests that count, in order of arrival. Rows in order are a slice (no copies)."""
    arrival_s = records.requests.arrival_s
    arrived = ~np.isnan(arrival_s)
    first = arrival_s[: int(arrived.sum())]
    # Rows are out of order where children are sent when their parents finish.
    in_order = arrived[: len(first)].all() and not (first[1:] < first[:-1]).any()
    order = None if in_order else np.argsort(arrival_s, kind="stable")
    sorted_s = arrival_s if order is None else arrival_s[order]
    stop = int(np.searchsorted(sorted_s, records.end_s, side="right"))
    start = max(int(np.searchsorted(sorted_s[:stop], warmup_s)), warmup_requests)
    if start >= stop:
        raise InputError(
            f"the warm-up must leave requests to count; of {stop} that arrived it takes all "
            f"(warmup_s {warmup_s:g}, warmup_requests {warmup_requests}): shorten it or run longer"
        )
    return slice(start, stop) if order is None else order[start:stop]


def common_rows(a: CountedRows, b: CountedRows) -> CountedRows:
    """Return the rows of requests that count in both runs."""
    if isinstance(a, slice) and isinstance(b, slice):
        return slice(max(a.start, b.start), max(a.start, b.start, min(a.stop, b.stop)))
    rows_a, rows_b = (np.arange(w.start, w.stop) if isinstance(w, slice) else w for w in (a, b))
    return np.intersect1d(rows_a, rows_b)


def select_rows(r: RequestRecords, rows: CountedRows) -> RequestRecords:
    """Return the given rows of the records. A slice gives views."""

    def selected(column: Any) -> Any:
        return None if column is None else column[rows]

    return RequestRecords(**{f.name: selected(getattr(r, f.name)) for f in dataclasses.fields(r)})


def bucket_counts(r: RequestRecords) -> Counts:
    """Return the number of requests by status and by reason of rejection."""
    by_status = np.bincount(r.status, minlength=len(Status))
    by_reason = np.bincount(r.rejection, minlength=len(Rejection))
    counts = Counts(
        arrivals=len(r.status),
        finished=int(by_status[Status.FINISHED]),
        rejected=int(by_status[Status.REJECTED]),
        timed_out=int(by_status[Status.TIMED_OUT]),
        unfinished=int(by_status[Status.UNFINISHED]),
        preemptions=int(r.preemptions.sum(dtype=np.int64)),
        rejected_too_long=int(by_reason[Rejection.PROMPT_REACHES_MAX_MODEL_LEN]),
        rejected_over_token_budget=int(by_reason[Rejection.PROMPT_ABOVE_TOKEN_BUDGET]),
        rejected_over_kv_memory=int(by_reason[Rejection.REFUSED_BY_MEMORY_POLICY]),
    )
    buckets = counts.finished + counts.rejected + counts.timed_out + counts.unfinished
    assert buckets == counts.arrivals, f"{buckets} requests are counted by status, {counts.arrivals} arrived"
    return counts


def _rates(records: Records, workload: Workload | None, start_s: float, level: float) -> Rates:
    r, window = records.requests, (start_s, float(records.end_s))
    steady = None if workload is None else steady_period(records, workload)
    steady_s = math.nan if steady is None else max(0.0, min(steady[1], window[1]) - max(steady[0], start_s))
    inside = r.finished_s >= start_s
    finished_s = r.finished_s[inside]
    return Rates(
        requests_per_s=_rate(finished_s, None, window, level),
        prompt_tokens_per_s=_rate(finished_s, r.prompt_tokens[inside], window, level),
        output_tokens_per_s=_rate(finished_s, r.output_tokens[inside], window, level),
        steady_share=Estimate(steady_s / (window[1] - start_s) if window[1] > start_s else math.nan),
    )


def _rate(at_s: Floats, weights: npt.NDArray[Any] | None, window: tuple[float, float], level: float) -> Estimate:
    span_s = window[1] - window[0]
    if span_s <= 0:
        return Estimate(math.nan)
    edges = np.linspace(*window, BATCHES + 1)
    batches = np.histogram(at_s, edges, weights=weights)[0][:, None] * BATCHES / span_s
    mean = batches.mean(axis=0)
    half = batch_half_width(batches, mean, level) if len(at_s) >= MIN_VALUES else [math.nan]
    return Estimate(float(mean[0]), float(half[0]))


def _goodput(r: RequestRecords, slo: Slo, window: tuple[float, float], level: float) -> Goodput:
    met = slo.met(r)
    good = met.pop("all")
    shares = {name: _share(within, level) for name, within in met.items()}
    return Goodput(slo, _share(good, level), _rate(r.finished_s[good], None, window, level), shares)


def _share(good: Bools, level: float) -> Estimate:
    return Estimate(1.0) if good.all() else ratio_estimate(good.astype(np.int64), np.ones(len(good), np.int64), level)


def _mean_gap_half_width(r: RequestRecords, level: float) -> float:
    has_gaps = (r.status == Status.FINISHED) & (r.output_tokens > 1)
    elapsed_s = (r.finished_s - r.first_token_s)[has_gaps]
    return ratio_estimate(elapsed_s, r.output_tokens[has_gaps] - 1, level).half_width
