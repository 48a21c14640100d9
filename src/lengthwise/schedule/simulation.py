"""Simulations of replicas with a full queue and random lengths, and conversion of schedules to simulated deployments.

All requests arrive at once. The results exclude the first requests, until the mix of running requests is stationary,
and the last ones, while the queue empties. Throughput is the rate at which the other requests start; its interval comes
from ten consecutive parts (batch means). A request's latency is from its first step to its last token, as in the
estimates. A regression line through the outputs of similar length gives the latency at a given length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from lengthwise.cost.memory import HOST_LINK_BYTES_PER_S
from lengthwise.engine import disaggregate, simulate
from lengthwise.schedule.controls import Controls, Layout, Stage, Strategy, rra_layout, waa_layout
from lengthwise.schedule.estimation import Estimator, Reason, resident_batches
from lengthwise.schedule.lengths import TaskLengths
from lengthwise.schedule.stage_costs import Setting, cache_bytes_per_token, stage_bytes, stage_kinds
from lengthwise.schema.cost_tables import Front, OtherDegree
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, KVTransfer, Parallelism, Scheduler
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Records
from lengthwise.schema.workload import Floats, Ints, Workload
from lengthwise.statistics import t_half_width

SPANS = 10  # consecutive parts of a run whose means give the confidence interval
NEAREST, MIN_NEAREST = 4, 20
"""The regression uses the nearest ``NEAREST * (1 - level)`` of the requests, at least ``MIN_NEAREST``."""
BLOCK_TOKENS = 16
UNLIMITED_BLOCKS = 10**7
"""KV blocks of a deployment that never runs out of memory, because its memory needs are checked elsewhere."""
UNLIMITED_SEQS = 2**14
_WARM_UP_TURNS = 3  # requests that start before the measurement, per slot
_MIN_SHARE, _PER_SEQ, _MIN_TURNS = 8, 32, 2


@dataclass(frozen=True)
class SimulationSpec:
    """Lengths and size of a simulation, and the outputs whose latency it reports.

    It reports the mean and the quantile ``level`` of the latency of outputs of ``output_tokens`` tokens. It measures
    ``requests`` requests or, if few run at a time, 32 times the batch, but at least an eighth and twice the batch.
    """

    task: TaskLengths
    output_tokens: int
    level: float
    requests: int
    seed: int


@dataclass(frozen=True)
class Simulated:
    """Results of the simulation of a replica, or of several equal replicas.

    ``low_rps`` and ``high_rps`` are the ends of the 95 % interval of the throughput. ``latency_s`` is the mean at the
    requested output length, and ``latency_high_s`` the level's quantile (for batches that run to completion, if all
    outputs have maximum length). ``prefill_s`` is the mean time from the first step to the first token, ``token_s`` the
    mean time between tokens. ``residents`` are the mean running sequences, ``used_blocks`` the mean KV blocks in use.
    """

    throughput_rps: float
    low_rps: float
    high_rps: float
    latency_s: float
    latency_high_s: float
    prefill_s: float
    token_s: float
    residents: float
    used_blocks: float

    def times(self, replicas: int) -> Simulated:
        """Return the results of ``replicas`` equal replicas together."""
        rates = {name: getattr(self, name) * replicas for name in ("throughput_rps", "low_rps", "high_rps")}
        return replace(self, **rates)


def _measured_requests(requests: int, batch: int) -> int:
    return max(requests // _MIN_SHARE, min(requests, _PER_SEQ * batch), _MIN_TURNS * batch)


def simulate_replica(deployment: Deployment, spec: SimulationSpec, concurrency: int | None = None) -> Simulated:
    """Simulate continuous batching. If ``concurrency`` is given, this many requests are in the system at any time."""
    slots = concurrency or deployment.limits.max_num_seqs
    measured, warm_up = _measured_requests(spec.requests, slots), _WARM_UP_TURNS * slots
    after = math.ceil(slots * spec.output_tokens / spec.task.mean_output_tokens)
    prompts, outputs = _sample_lengths(spec, warm_up + measured + after)
    records = _simulate(deployment, prompts, outputs, concurrency)
    started_s = records.requests.scheduled_s
    in_order = np.argsort(started_s, kind="stable")
    inside = in_order[warm_up : warm_up + measured]
    rate = _rate(started_s[in_order], warm_up, measured)
    elapsed_s = (records.requests.finished_s - started_s)[inside]
    latency_s = latency_at(outputs[inside], elapsed_s, spec.output_tokens, spec.level)
    return Simulated(*rate, *latency_s, *_token_statistics(records, inside, deployment))


def simulate_to_completion(deployment: Deployment, spec: SimulationSpec) -> Simulated:
    """Simulate batches that run to completion: each request stays until the longest of its batch is complete."""
    batch = deployment.limits.max_num_seqs
    batches = max(SPANS, -(-_measured_requests(spec.requests, batch) // batch))
    prompts, outputs = _sample_lengths(spec, (batches + 2) * batch)

    def batch_times_s(records: Records) -> tuple[Floats, Floats]:
        started_s = records.requests.scheduled_s.reshape(-1, batch).min(axis=1)
        return started_s, records.requests.finished_s.reshape(-1, batch).max(axis=1) - started_s

    records = _simulate(deployment, prompts, np.repeat(outputs.reshape(-1, batch).max(axis=1), batch))
    started_s, elapsed_s = batch_times_s(records)
    inside = np.arange(batch, (batches + 1) * batch)
    rate, low, high = (batch * rps for rps in _rate(started_s, 1, batches))
    latency_s, _ = latency_at(outputs[inside], np.repeat(elapsed_s, batch)[inside], spec.output_tokens, spec.level)
    padded = _simulate(deployment, prompts, np.full(len(prompts), spec.task.max_output_tokens))
    high_s = float(np.quantile(batch_times_s(padded)[1][1:-1], spec.level))
    statistics = _token_statistics(records, inside, deployment)
    return Simulated(rate, low, high, latency_s, max(high_s, latency_s), *statistics)


def latency_at(output_tokens: Ints, elapsed_s: Floats, requested: int, level: float) -> tuple[float, float]:
    """Return the mean and the ``level`` quantile of the latency of outputs of ``requested`` tokens, in seconds.

    ``output_tokens`` and ``elapsed_s`` [n] are the simulated outputs and their latencies. Latencies of outputs of
    similar length are assumed to be normally distributed around a regression line.
    """
    distance = (output_tokens - requested).astype(np.float64)
    count = min(len(distance), max(MIN_NEAREST, math.ceil(NEAREST * (1 - level) * len(distance))))
    near = np.abs(distance) <= np.partition(np.abs(distance), count - 1)[count - 1]
    distance, near_s = distance[near], elapsed_s[near]
    centred = distance - distance.mean()
    spread = float(centred @ centred)
    slope = float(centred @ near_s) / spread if spread > 0 else 0.0
    mean_s = float(near_s.mean() - slope * distance.mean())
    residual_s = near_s - mean_s - slope * distance
    return mean_s, mean_s + NormalDist().inv_cdf(level) * float(residual_s.std())


def _sample_lengths(spec: SimulationSpec, n: int) -> tuple[Ints, Ints]:
    rng = np.random.default_rng(spec.seed)

    def sample(pmf: Floats) -> Ints:
        levels = (rng.permutation(n) + rng.random(n)) / n
        found = np.searchsorted(np.cumsum(pmf), levels, side="right")
        return np.minimum(found, len(pmf) - 1).astype(np.int64)

    return sample(spec.task.prompt_pmf), sample(spec.task.output_pmf)


def _simulate(deployment: Deployment, prompts: Ints, outputs: Ints, concurrency: int | None = None) -> Records:
    workload = Workload(np.zeros(len(prompts)), prompts, outputs, concurrency=concurrency)
    return simulate(workload, deployment, max_log_steps=0)


def _rate(started_s: Floats, first: int, measured: int) -> tuple[float, float, float]:
    """Return starts per second, with the ends of the interval, over ``measured`` requests from index ``first`` on."""
    marks = first + np.arange(SPANS + 1) * measured // SPANS
    each_s = np.diff(started_s[marks]) / np.diff(marks)
    mean_s = float(started_s[first + measured] - started_s[first]) / measured
    half_s = float(t_half_width(each_s, 0.95))
    return 1 / mean_s, 1 / (mean_s + half_s), 1 / (mean_s - half_s) if mean_s > half_s else math.inf


def _token_statistics(records: Records, inside: Ints, deployment: Deployment) -> tuple[float, float, float, float]:
    """Return the means of four quantities: first-token time, time between tokens, running sequences, blocks in use.

    ``inside`` are the measured requests in order of start. Under disaggregation sequences and blocks are counted on a
    decoding replica.
    """
    got, totals = records.requests, records.totals
    started_s, first_token_s, last_s = got.scheduled_s, got.first_token_s, got.finished_s
    from_s, to_s = started_s[inside[0]], started_s[inside[-1]]
    resident_from_s = started_s if deployment.decode is None else first_token_s
    overlap_s = np.maximum(np.minimum(last_s, to_s) - np.maximum(resident_from_s, from_s), 0.0)
    first = deployment.parallel.replicas if deployment.decode else 0
    replicas = len(totals.busy_s) - first
    gaps = max(int((got.output_tokens[inside] - 1).sum()), 1)
    return (
        float((first_token_s - started_s)[inside].mean()),
        float((last_s - first_token_s)[inside].sum()) / gaps,
        float(overlap_s.sum() / (to_s - from_s)) / replicas,
        float(totals.kv_block_s[first:].sum() / totals.busy_s[first:].sum()),
    )


@dataclass(frozen=True)
class Replica:
    """A way to divide a cluster: ``replicas`` equal pipelines, each with ``pp`` stages of ``tp`` GPUs."""

    tp: int
    pp: int
    replicas: int
    layout: Layout


def replicas_of(setting: Setting) -> tuple[Replica, ...]:
    """Return all divisions of all GPUs into equal replicas of equal stages, large tensor-parallel degrees first."""
    gpus, node = setting.cluster.gpus, setting.cluster.node.gpus
    found = []
    for tp in sorted(setting.tables, reverse=True):
        if tp > node or gpus % tp:
            continue
        for pp in (stages for stages in range(1, gpus // tp + 1) if gpus // tp % stages == 0):
            try:
                layout = rra_layout(setting.model.layers, tp * pp, tp, pp if tp > 1 else 0)
            except InputError:  # More stages than layers.
                continue
            found.append(Replica(tp, pp, gpus // tp // pp, layout))
    return tuple(found)


def cache_tokens(setting: Setting, layout: Layout, step_tokens: float, step_seqs: float) -> int:
    """Return the tokens of KV cache that fit next to the weights and the activations of a step, or 0 if none fit."""
    free, memory = math.inf, setting.memory(layout.stages)
    for stage, first, last in stage_kinds(layout.stages):
        needs = memory[stage.tp]
        weights = needs.weight_bytes(stage.layers, stage.role, first=first, last=last)
        activations = step_tokens * needs.token_bytes + step_seqs * needs.seq_bytes
        free = min(free, (setting.available_bytes - weights - activations) / (stage.layers * needs.kv_layer_bytes))
    return max(0, math.floor(free))


def memory_share(setting: Setting, layout: Layout, cached_tokens: float, step_tokens: float, step_seqs: float) -> float:
    """Return the memory needs of the fullest GPU divided by its usable memory."""
    kv, tokens, seqs = (np.array([float(value)]) for value in (cached_tokens, step_tokens, step_seqs))
    needed, _ = stage_bytes(setting.memory(layout.stages), layout.stages, kv, None, tokens, seqs)
    return float(needed[0] / setting.available_bytes)


def max_request_blocks(setting: Setting) -> int:
    """Return the cache blocks of the task's longest possible request."""
    return -(-setting.task.max_request_tokens // BLOCK_TOKENS)


def step_seqs(replica: Replica, batch: int) -> int:
    """Return the sequences of one step if the batch is divided evenly into one step per pipeline stage."""
    return -(-batch // replica.pp)


def replica_deployment(
    setting: Setting, replica: Replica, batch: int, budget: int, scheduler: Scheduler, blocks: int
) -> Deployment:
    """Return a deployment of one replica that runs at most ``batch`` sequences, divided evenly among the stages' steps.

    ``budget`` is a step's largest number of tokens, ``blocks`` the number of KV blocks. Cost tables are those of
    ``setting`` without the front end, because the queue is always full.
    """
    cluster, layout = setting.cluster, replica.layout
    layers = np.array([stage.layers for stage in layout.stages], dtype=np.int64)
    block_bytes = BLOCK_TOKENS * cache_bytes_per_token(setting.memory(layout.stages), layout.stages)
    limits = EngineLimits(
        max_num_seqs=batch,
        max_num_batched_tokens=max(budget, 1),
        block_size=BLOCK_TOKENS,
        max_step_seqs=step_seqs(replica, batch),
    )
    return Deployment(
        model=setting.model,
        gpu=cluster.gpu,
        node=cluster.node,
        parallel=Parallelism(replica.tp, replica.pp),
        limits=limits,
        scheduler=scheduler,
        cost=replace(setting.tables[replica.tp], stage_layers=layers, front=Front()),
        kv=KvPlan(blocks, BLOCK_TOKENS, 0.0, 0.0, block_bytes, setting.available_bytes),
        max_model_len=setting.task.max_request_tokens,
    )


def deployment_of(estimator: Estimator, controls: Controls, *, threshold: float | None = None) -> Deployment:
    """Return a deployment that runs a schedule on the estimator's cluster with a full queue.

    RRA is one replica that alternates between prefill and decode phases. Its memory is unlimited here, because the
    estimate has checked the memory. WAA is disaggregated: one replica prefills, with room for ``resident_batches``, and
    one decodes, with slots for the decode batch. ``threshold`` is the threshold of dynamic adjustment, or None. Raises
    InputError if the schedule is infeasible, or is WAA of an encoder-decoder, which the engine does not model.
    """
    expected, setting = estimator.estimate([controls]), estimator.setting
    if not expected.feasible[0]:
        reason = Reason(int(expected.reason[0])).name.lower()
        raise InputError(f"a schedule must fit its cluster to be simulated; this one does not: {reason}")
    adjustment: dict[str, float] = {}
    if threshold is not None:
        mean_tokens = controls.prefill_batch * setting.task.mean_prompt_tokens
        adjustment = {"threshold": threshold, "prompt_tokens": round(mean_tokens)}
    layers, gpus = setting.model.layers, setting.cluster.gpus
    limits = EngineLimits(max_num_seqs=UNLIMITED_SEQS, watermark=0.0)
    if controls.strategy is Strategy.RRA:
        if adjustment:
            adjustment["decode_batch"] = round(float(expected.decode_batch[0]))
        phases = {"decode_steps": controls.decode_steps, "micro_batches": controls.micro_batches or 0, **adjustment}
        layout = rra_layout(layers, gpus, controls.tp, controls.tp_groups)
        batching = _policy("rra", prefill_batch=controls.prefill_batch, **phases)
        return _pipeline_deployment(setting, layout.stages, limits, batching)
    if setting.model.encoder_layers:
        raise InputError(
            "WAA of an encoder-decoder cannot be simulated, because the engine does not model that its decode GPUs "
            f"project prompts; {setting.model.name} is an encoder-decoder"
        )
    layout = waa_layout(layers, gpus, int(expected.prefill_gpus[0]), controls.tp, controls.tp_groups)
    batches = resident_batches(setting.model, len(layout.prefill))
    # The blocks hold the prefilled batches at the level (last blocks half empty on average) or the longest request.
    seqs = float(batches * controls.prefill_batch)
    tokens = float(setting.prompt_tokens_high(np.array([seqs]))[0]) + seqs * BLOCK_TOKENS / 2
    blocks = max(math.ceil(tokens / BLOCK_TOKENS), max_request_blocks(setting))
    batching = _policy("prefill", prefill_batch=controls.prefill_batch, **adjustment)
    prefill_limits = replace(limits, max_in_flight=batches - 1)
    prefill = _pipeline_deployment(setting, layout.prefill, prefill_limits, batching, blocks)
    decode_limits = replace(
        limits, max_num_seqs=_decode_slots(setting, controls), max_in_flight=int(expected.micro_batches[0])
    )
    decode = _pipeline_deployment(setting, layout.decode, decode_limits, "even")
    memory = setting.memory(layout.stages)
    token_bytes = sum(cache_bytes_per_token(memory, stages) for stages in (layout.prefill, layout.decode))
    return disaggregate(prefill, decode, KVTransfer(0.0, token_bytes, HOST_LINK_BYTES_PER_S))


def concurrency_limit(estimator: Estimator, controls: Controls) -> int | None:
    """Return the largest number of requests in the system, or None under RRA, whose phases limit the admission.

    Without a limit WAA prefills as many requests as memory allows, and prefilled requests wait for a decode slot. The
    limit is the number of decode slots, plus the requests in prefill and transfer, plus two prefill batches.
    """
    if controls.strategy is Strategy.RRA:
        return None
    expected, setting = estimator.estimate([controls]), estimator.setting
    entry_s = float(expected.latency_s[0] - setting.iterations * expected.decode_s[0])
    entering = math.ceil(controls.prefill_batch * entry_s / float(expected.cycle_s[0]))
    return _decode_slots(setting, controls) + entering + 2 * controls.prefill_batch


def _decode_slots(setting: Setting, controls: Controls) -> int:
    return max(round(controls.prefill_batch * (setting.task.mean_output_tokens - 1)), 1)


def _pipeline_deployment(
    setting: Setting, stages: tuple[Stage, ...], limits: EngineLimits, batching: str, blocks: int = UNLIMITED_BLOCKS
) -> Deployment:
    cluster, degree = setting.cluster, max(stage.tp for stage in stages)
    single = np.array([int(stage.tp != degree) for stage in stages])
    cost = replace(setting.tables[degree], stage_layers=np.array([stage.layers for stage in stages]))
    if single.any():
        cost = replace(cost, other=OtherDegree(setting.tables[1], single))
    parallel = Parallelism(degree, len(stages), single_stages=int(single.sum()))
    kv = KvPlan(blocks, BLOCK_TOKENS, 0.0, 0.0, 0.0, 0.0)
    return Deployment(
        setting.model, cluster.gpu, cluster.node, parallel, limits, Scheduler(batching=batching), cost, kv,
        setting.task.max_request_tokens,
    )  # fmt: skip


def _policy(name: str, **parameters: float) -> str:
    return f"{name}({', '.join(f'{key}={value}' for key, value in parameters.items())})"
