"""What a replica yields when its queue never runs dry: played out by the engine with drawn lengths.

All requests are there at once. The first that are served are left out, until who runs is as mixed as it stays, and
so are the last, beside which the queue runs dry. Throughput is what is begun in between, with an interval from ten
consecutive parts of it (batch means). Latency counts from when a request is first put into a step to its last
token, as it does for schedules, for the output asked for: read off a line through the latencies of the outputs
nearest to it, since only few are of exactly that length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from lengthwise.cost.memory import HOST_LINK_BYTES_PER_S
from lengthwise.engine import disaggregate, simulate
from lengthwise.schedule.controls import Controls, Layout, Stage, Strategy, rra_layout
from lengthwise.schedule.estimation import Estimates, Estimator, Reason, batches_held, layout_of
from lengthwise.schedule.lengths import TaskLengths
from lengthwise.schedule.stage_costs import Setting, layer_cache_bytes, stage_bytes
from lengthwise.schema.cost_tables import Front
from lengthwise.schema.deployment import Deployment, EngineLimits, Handover, KvPlan, Parallelism, Scheduler
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Records
from lengthwise.schema.workload import Workload
from lengthwise.statistics import t_half_width

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SPANS = 10
"""Parts of a run that its interval comes from."""
NEAREST, MIN_COUNT = 4, 20
"""Latencies are read off so many times the share of outputs that is longer than the quantile, and so many at least."""
_WARM = 3
"""Times that every seat has changed hands before anything is counted."""
_MIN_COUNT, _PER_SEAT, _TURNS = 8, 32, 2


@dataclass(frozen=True)
class Question:
    """What is asked of every configuration.

    Attributes:
        task: Lengths.
        output_tokens: The output whose latency is asked for.
        level: Share of such outputs that is done within the high latency.
        requests: How many are counted, about.
        seed: Of the lengths.
    """

    task: TaskLengths
    output_tokens: int
    level: float
    requests: int
    seed: int


@dataclass(frozen=True)
class Simulated:
    """What came out, of one replica.

    Attributes:
        throughput_rps: Requests a second.
        low_rps: Lower end of its 95 % interval.
        high_rps: Upper end.
        latency_s: Of the output asked for, mean.
        latency_high_s: Within which the same share of such outputs is done; of whole batches: of all outputs as
            long as the longest of the task.
        first_s: From the first step to the first token, mean.
        token_s: Between tokens, mean.
        residents: Sequences, mean.
        held_blocks: Of cache, mean.
    """

    throughput_rps: float
    low_rps: float
    high_rps: float
    latency_s: float
    latency_high_s: float
    first_s: float
    token_s: float
    residents: float
    held_blocks: float


def counted_requests(requests: int, batch: int) -> int:
    """How many requests are counted: ``requests``, fewer where few are served at a time, twice each seat at least."""
    return max(requests // _MIN_COUNT, min(requests, _PER_SEAT * batch), _TURNS * batch)


def play(deployment: Deployment, question: Question, concurrency: int | None = None) -> Simulated:
    """Requests come and go one by one; ``concurrency``: so many are there at a time, and the next when one ends."""
    max_num_seqs, asked = concurrency or deployment.limits.max_num_seqs, question.output_tokens
    counted = counted_requests(question.requests, max_num_seqs)
    warm = _WARM * max_num_seqs
    after = math.ceil(max_num_seqs * asked / question.task.mean_output_tokens)
    prompts, outputs = _drawn(question, warm + counted + after)
    records = _records(deployment, prompts, outputs, concurrency)
    started_s = records.requests.scheduled_s
    in_order = np.argsort(started_s, kind="stable")
    inside = in_order[warm : warm + counted]
    rate = _rate(started_s[in_order], warm, counted)
    elapsed_s = (records.requests.finished_s - started_s)[inside]
    latency_s = latency_at(outputs[inside], elapsed_s, asked, question.level)
    return Simulated(*rate, *latency_s, *_of_tokens(records, inside, deployment))


def play_whole(deployment: Deployment, question: Question) -> Simulated:
    """Batches that nobody leaves: each request stays until the longest of its batch is done."""
    batch, asked = deployment.limits.max_num_seqs, question.output_tokens
    batches = max(SPANS, -(-counted_requests(question.requests, batch) // batch))
    prompts, outputs = _drawn(question, (batches + 2) * batch)
    longest = np.repeat(outputs.reshape(-1, batch).max(axis=1), batch)
    records = _records(deployment, prompts, longest)
    started_s, lasted_s = _batches_s(records, batch)
    inside = np.arange(batch, (batches + 1) * batch)
    rate, low, high = (batch * rps for rps in _rate(started_s, 1, batches))
    latency_s, _ = latency_at(outputs[inside], np.repeat(lasted_s, batch)[inside], asked, question.level)
    padded = _records(deployment, prompts, np.full(len(prompts), question.task.max_output_tokens))
    high_s = float(np.quantile(_batches_s(padded, batch)[1][1:-1], question.level))
    return Simulated(rate, low, high, latency_s, max(high_s, latency_s), *_of_tokens(records, inside, deployment))


def latency_at(output_tokens: Ints, elapsed_s: Floats, requested: int, level: float) -> tuple[float, float]:
    """(mean, within which a share ``level`` is done) of requests with ``requested`` output tokens, seconds.

    Outputs near it are taken to scatter alike, and normally, around a line.
    """
    beyond = (output_tokens - requested).astype(np.float64)
    few = min(len(beyond), max(MIN_COUNT, math.ceil(NEAREST * (1 - level) * len(beyond))))
    near = np.abs(beyond) <= np.partition(np.abs(beyond), few - 1)[few - 1]
    beyond, own_s = beyond[near], elapsed_s[near]
    centred = beyond - beyond.mean()
    spread = float(centred @ centred)
    slope = float(centred @ own_s) / spread if spread > 0 else 0.0
    mean_s = float(own_s.mean() - slope * beyond.mean())
    off_s = own_s - mean_s - slope * beyond
    return mean_s, mean_s + NormalDist().inv_cdf(level) * float(off_s.std())


def _drawn(question: Question, n: int) -> tuple[Ints, Ints]:
    """Prompts and outputs, each one of n equal shares of its distribution, in random order."""
    rng, task = np.random.default_rng(question.seed), question.task
    return _column(task.prompt_pmf, n, rng), _column(task.output_pmf, n, rng)


def _column(pmf: Floats, n: int, rng: np.random.Generator) -> Ints:
    levels = (rng.permutation(n) + rng.random(n)) / n
    found = np.searchsorted(np.cumsum(pmf), levels, side="right")
    return np.minimum(found, len(pmf) - 1).astype(np.int64)


def _records(deployment: Deployment, prompts: Ints, outputs: Ints, concurrency: int | None = None) -> Records:
    arrival_s = np.zeros(len(prompts))
    return simulate(Workload(arrival_s, prompts, outputs, concurrency=concurrency), deployment, keep_steps=0)


def _rate(started_s: Floats, first: int, counted: int) -> tuple[float, float, float]:
    """(a second, ends of its interval) of what begins in this order, from number ``first`` on."""
    marks = first + np.arange(SPANS + 1) * counted // SPANS
    each_s = np.diff(started_s[marks]) / np.diff(marks)
    mean_s = float(started_s[first + counted] - started_s[first]) / counted
    half_s = float(t_half_width(each_s, 0.95))
    return 1 / mean_s, 1 / (mean_s + half_s), 1 / (mean_s - half_s) if mean_s > half_s else math.inf


def _batches_s(records: Records, batch: int) -> tuple[Floats, Floats]:
    """When each batch begins, and how long it lasts."""
    started_s = records.requests.scheduled_s.reshape(-1, batch).min(axis=1)
    return started_s, records.requests.finished_s.reshape(-1, batch).max(axis=1) - started_s


def _of_tokens(records: Records, inside: Ints, of: Deployment) -> tuple[float, float, float, float]:
    """(seconds to the first token, between tokens, residents while these begin, blocks held).

    Where a side only decodes, residents and blocks are of one of its replicas.
    """
    got, totals = records.requests, records.totals
    started_s, first_s, last_s = got.scheduled_s, got.first_token_s, got.finished_s
    from_s, to_s = started_s[inside[0]], started_s[inside[-1]]
    there_s = started_s if of.decode is None else first_s
    shared_s = np.maximum(np.minimum(last_s, to_s) - np.maximum(there_s, from_s), 0.0)
    first = of.parallel.replicas if of.decode else 0
    replicas = len(totals.busy_s) - first
    gaps = max(int((got.output_tokens[inside] - 1).sum()), 1)
    return (
        float((first_s - started_s)[inside].mean()),
        float((last_s - first_s)[inside].sum()) / gaps,
        float(shared_s.sum() / (to_s - from_s)) / replicas,
        float(totals.kv_block_s[first:].sum() / totals.busy_s[first:].sum()),
    )


BLOCK_TOKENS = 16
ENDLESS_BLOCKS = 10**7
"""Blocks where memory was counted before: none is ever short."""


@dataclass(frozen=True)
class Replica:
    """``pp`` stages of ``tp`` GPUs each, ``replicas`` times over."""

    tp: int
    pp: int
    replicas: int
    layout: Layout


def replicas_of(setting: Setting) -> tuple[Replica, ...]:
    """All ways to cut a cluster into equal replicas of equal stages that use every GPU, large degrees first."""
    gpus, node = setting.cluster.gpus, setting.cluster.node.gpus
    found = []
    for tp in sorted(setting.tables, reverse=True):
        if tp > node or gpus % tp:
            continue
        for pp in (stages for stages in range(1, gpus // tp + 1) if gpus // tp % stages == 0):
            layout = _uniform(setting.model.layers, tp, pp)
            if layout.stages:
                found.append(Replica(tp, pp, gpus // tp // pp, layout))
    return tuple(found)


def cache_tokens(setting: Setting, layout: Layout, step_tokens: float, step_seqs: float) -> int:
    """Tokens whose cache fits beside the weights and what a step's activations take; 0: none does."""
    left, last = math.inf, len(layout.stages) - 1
    shares = setting.sizes(layout.stages)
    for place, stage in enumerate(layout.stages):
        share = shares[stage.tp]
        weights = share.weight_bytes(stage.layers, stage.role, first=place == 0, last=place == last)
        activations = step_tokens * share.token_bytes + step_seqs * share.seq_bytes
        left = min(left, (setting.available_bytes - weights - activations) / (stage.layers * share.kv_layer_bytes))
    return max(0, math.floor(left))


def memory_share(setting: Setting, layout: Layout, held_tokens: float, step_tokens: float, step_seqs: float) -> float:
    """What the fullest GPU needs over what it has."""
    columns = (np.array([float(value)]) for value in (held_tokens, step_tokens, step_seqs))
    kv, tokens, seqs = columns
    needed, _ = stage_bytes(setting.sizes(layout.stages), layout.stages, kv, None, tokens, seqs)
    return float(needed[0] / setting.available_bytes)


def deployed(setting: Setting, of: Replica, batch: int, budget: int, scheduler: Scheduler, blocks: int) -> Deployment:
    """One of the replicas: ``batch`` sequences resident, an even part of them in each stage's step.

    Its tables are the estimator's of that degree, without what stands before the engine: the queue is full anyway.
    """
    cluster, limits = setting.cluster, _limits(of, batch, budget)
    layers = np.array([stage.layers for stage in of.layout.stages], dtype=np.int64)
    return Deployment(
        model=setting.model,
        gpu=cluster.gpu,
        node=cluster.node,
        parallel=Parallelism(of.tp, of.pp),
        limits=limits,
        scheduler=scheduler,
        cost=replace(setting.tables[of.tp], stage_layers=layers, front=Front()),
        kv=KvPlan(blocks, BLOCK_TOKENS, 0.0, 0.0, _block_bytes(setting, of.layout), setting.available_bytes),
        max_model_len=longest_tokens(setting),
    )


def longest_tokens(setting: Setting) -> int:
    """Tokens of the longest request of the task."""
    return setting.task.max_prompt_tokens + setting.task.max_output_tokens


def longest_blocks(setting: Setting) -> int:
    """Blocks that its cache takes."""
    return -(-longest_tokens(setting) // BLOCK_TOKENS)


def step_seqs(of: Replica, batch: int) -> int:
    """Sequences of one step: as many batches are in flight as there are stages."""
    return -(-batch // of.pp)


def _limits(of: Replica, batch: int, budget: int) -> EngineLimits:
    return EngineLimits(
        max_num_seqs=batch,
        max_num_batched_tokens=max(budget, 1),
        block_size=BLOCK_TOKENS,
        max_step_seqs=step_seqs(of, batch),
    )


def _block_bytes(setting: Setting, layout: Layout) -> float:
    """What a block takes on the GPU that holds most layers of it."""
    shares = setting.sizes(layout.stages)
    each = (stage.layers * shares[stage.tp].kv_layer_bytes for stage in layout.stages)
    return BLOCK_TOKENS * max(each)


def _uniform(layers: int, tp: int, pp: int) -> Layout:
    try:
        return rra_layout(layers, tp * pp, tp, pp if tp > 1 else 0)
    except InputError:  # more stages than layers
        return Layout(())


MOST_SEQS = 2**14
"""Sequences on a side whose number nothing else bounds."""


def deployment_of(estimator: Estimator, controls: Controls, *, threshold: float | None = None) -> Deployment:
    """The schedule on the estimator's cluster, as it is estimated: for a queue that never runs dry.

    RRA is one replica in phases; its memory was counted, and none is ever short. WAA is two: one that encodes, with
    room for as many batches as are counted on (``waa.batches_held``), and one with seats for the decode batch.

    Args:
        estimator: Of the task on its cluster.
        controls: The schedule.
        threshold: Of dynamic adjustment; None: none.

    Raises:
        InputError: The schedule cannot be, or is WAA of an encoder-decoder, whose decoding GPUs the engine gives no
            prompts to project.
    """
    expected = estimator.estimate([controls])
    if not expected.feasible[0]:
        reason = Reason(int(expected.reason[0])).name.lower()
        raise InputError(f"a schedule must fit its cluster to be played; this one does not: {reason}")
    of = _phases if controls.strategy is Strategy.RRA else _sides
    return of(estimator.setting, controls, expected, threshold)


def in_system(estimator: Estimator, controls: Controls) -> int | None:
    """Requests that are let in at a time, one when one ends; None: any number, phases admit by themselves (RRA).

    WAA's encoding would run ahead of its decoding as far as memory goes, and whoever was encoded would wait for a
    seat. So as many are let in as have seats or are on their way through encoding and handover, and two batches more.
    """
    if controls.strategy is Strategy.RRA:
        return None
    expected, setting = estimator.estimate([controls]), estimator.setting
    entry_s = float(expected.latency_s[0] - setting.iterations * expected.decode_s[0])
    under_way = math.ceil(controls.encode_batch * entry_s / float(expected.cycle_s[0]))
    return _max_num_seqs(setting, controls) + under_way + 2 * controls.encode_batch


def _phases(setting: Setting, controls: Controls, expected: Estimates, threshold: float | None) -> Deployment:
    given: dict[str, float] = {
        "encode_batch": controls.encode_batch,
        "decode_steps": controls.decode_steps,
        "micro_batches": controls.micro_batches or 0,
    }
    if threshold is not None:
        given |= _adjusted(setting, controls, threshold)
        given["decode_batch"] = round(float(expected.decode_batch[0]))
    layout = rra_layout(setting.model.layers, setting.cluster.gpus, controls.tp, controls.tp_groups)
    return _side(setting, layout.stages, EngineLimits(max_num_seqs=MOST_SEQS, watermark=0.0), _report("rra", given))


def _sides(setting: Setting, controls: Controls, expected: Estimates, threshold: float | None) -> Deployment:
    if setting.model.encoder_layers:
        raise InputError(
            "WAA of an encoder-decoder cannot be played: its decoding GPUs project prompts, which the engine's do not; "
            f"{setting.model.name} is one"
        )
    layout = layout_of(setting, int(expected.encode_gpus[0]), controls.tp, controls.tp_groups)
    given: dict[str, float] = {"encode_batch": controls.encode_batch}
    given |= {} if threshold is None else _adjusted(setting, controls, threshold)
    held = batches_held(setting.model, len(layout.encode))
    limits = EngineLimits(max_num_seqs=MOST_SEQS, watermark=0.0, max_in_flight=held - 1)
    here = _side(setting, layout.encode, limits, _report("encode", given), _room_blocks(setting, controls, held))
    max_num_seqs = _max_num_seqs(setting, controls)
    parts = int(expected.micro_batches[0])
    there = _side(
        setting, layout.decode, EngineLimits(max_num_seqs=max_num_seqs, watermark=0.0, max_in_flight=parts), "even"
    )
    sizes = setting.sizes(layout.stages)
    both_ways = sum(layer_cache_bytes(sizes, stages) for stages in (layout.encode, layout.decode))
    return disaggregate(here, there, Handover(0.0, both_ways, HOST_LINK_BYTES_PER_S))


def _max_num_seqs(setting: Setting, controls: Controls) -> int:
    return max(round(controls.encode_batch * (setting.task.mean_output_tokens - 1)), 1)


def _side(
    setting: Setting, stages: tuple[Stage, ...], limits: EngineLimits, batching: str, blocks: int = ENDLESS_BLOCKS
) -> Deployment:
    """A replica of groups and single GPUs, a stage each, on the tables of the estimate."""
    cluster, degree = setting.cluster, max(stage.tp for stage in stages)
    single = np.array([int(stage.tp != degree) for stage in stages])
    cost = replace(setting.tables[degree], stage_layers=np.array([stage.layers for stage in stages]))
    if single.any():
        cost = replace(cost, other=setting.tables[1], stage_other=single)
    return Deployment(
        setting.model,
        cluster.gpu,
        cluster.node,
        Parallelism(degree, len(stages), single_stages=int(single.sum())),
        limits,
        Scheduler(batching=batching),
        cost,
        KvPlan(blocks, BLOCK_TOKENS, 0.0, 0.0, 0.0, 0.0),
        longest_tokens(setting),
    )


def _room_blocks(setting: Setting, controls: Controls, batches: int) -> int:
    """Blocks of so many encoded batches at the level, half of a request's last one empty; of the longest at least."""
    seqs = float(batches * controls.encode_batch)
    tokens = float(setting.prompt_tokens_high(np.array([seqs]))[0]) + seqs * BLOCK_TOKENS / 2
    return max(math.ceil(tokens / BLOCK_TOKENS), longest_blocks(setting))


def _adjusted(setting: Setting, controls: Controls, threshold: float) -> dict[str, float]:
    mean = controls.encode_batch * setting.task.mean_prompt_tokens
    return {"threshold": threshold, "prompt_tokens": round(mean)}


def _report(name: str, given: dict[str, float]) -> str:
    return f"{name}({', '.join(f'{key}={value}' for key, value in given.items())})"
