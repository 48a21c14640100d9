"""What a replica yields when its queue never runs dry: played out by the engine with drawn lengths.

All requests are there at once. The first that are served are left out, until who runs is as mixed as it stays, and
so are the last, beside which the queue runs dry. Throughput is what is begun in between, with an interval from ten
consecutive parts of it (batch means). Latency counts from when a request is first put into a step to its last
token, as it does for schedules, for the output asked for: read off a line through the latencies of the outputs
nearest to it, since only few are of exactly that length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from lengthwise.engine import simulate
from lengthwise.metrics import t_quantile
from lengthwise.schedule.lengths import TaskLengths
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.records import Records
from lengthwise.schema.workload import Workload

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SPANS = 10
"""Parts of a run that its interval comes from."""
NEAREST, FEWEST = 4, 20
"""Latencies are read off so many times the share of outputs that is longer than the quantile, and so many at least."""
_WARM = 3
"""Times that every seat has changed hands before anything is counted."""
_FEW, _PER_SEAT, _TURNS = 8, 32, 2


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
class Played:
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
    return max(requests // _FEW, min(requests, _PER_SEAT * batch), _TURNS * batch)


def play(deployment: Deployment, question: Question, concurrency: int | None = None) -> Played:
    """Requests come and go one by one; ``concurrency``: so many are there at a time, and the next when one ends."""
    seats, asked = concurrency or deployment.limits.max_num_seqs, question.output_tokens
    counted = counted_requests(question.requests, seats)
    warm = _WARM * seats
    after = math.ceil(seats * asked / question.task.mean_output_tokens)
    prompts, outputs = _drawn(question, warm + counted + after)
    records = _records(deployment, prompts, outputs, concurrency)
    begun_s = records.requests.scheduled_s
    in_order = np.argsort(begun_s, kind="stable")
    inside = in_order[warm : warm + counted]
    rate = _rate(begun_s[in_order], warm, counted)
    spent_s = (records.requests.finished_s - begun_s)[inside]
    latency_s = latency_at(outputs[inside], spent_s, asked, question.level)
    return Played(*rate, *latency_s, *_of_tokens(records, inside, deployment))


def play_whole(deployment: Deployment, question: Question) -> Played:
    """Batches that nobody leaves: each request stays until the longest of its batch is done."""
    batch, asked = deployment.limits.max_num_seqs, question.output_tokens
    batches = max(SPANS, -(-counted_requests(question.requests, batch) // batch))
    prompts, outputs = _drawn(question, (batches + 2) * batch)
    longest = np.repeat(outputs.reshape(-1, batch).max(axis=1), batch)
    records = _records(deployment, prompts, longest)
    begun_s, lasted_s = _batches_s(records, batch)
    inside = np.arange(batch, (batches + 1) * batch)
    rate, low, high = (batch * rps for rps in _rate(begun_s, 1, batches))
    latency_s, _ = latency_at(outputs[inside], np.repeat(lasted_s, batch)[inside], asked, question.level)
    padded = _records(deployment, prompts, np.full(len(prompts), question.task.max_output_tokens))
    high_s = float(np.quantile(_batches_s(padded, batch)[1][1:-1], question.level))
    return Played(
        rate, low, high, latency_s, max(high_s, latency_s), *_of_tokens(records, inside, deployment)
    )


def latency_at(output_tokens: Ints, spent_s: Floats, asked: int, level: float) -> tuple[float, float]:
    """(mean, within which a share ``level`` is done) of requests with ``asked`` output tokens, seconds.

    Outputs near it are taken to scatter alike, and normally, around a line.
    """
    beyond = (output_tokens - asked).astype(np.float64)
    few = min(len(beyond), max(FEWEST, math.ceil(NEAREST * (1 - level) * len(beyond))))
    near = np.abs(beyond) <= np.partition(np.abs(beyond), few - 1)[few - 1]
    beyond, own_s = beyond[near], spent_s[near]
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


def _rate(begun_s: Floats, first: int, counted: int) -> tuple[float, float, float]:
    """(a second, ends of its interval) of what begins in this order, from number ``first`` on."""
    marks = first + np.arange(SPANS + 1) * counted // SPANS
    each_s = np.diff(begun_s[marks]) / np.diff(marks)
    mean_s = float(begun_s[first + counted] - begun_s[first]) / counted
    half_s = t_quantile(0.95, SPANS - 1) * float(each_s.std(ddof=1)) / math.sqrt(SPANS)
    return 1 / mean_s, 1 / (mean_s + half_s), 1 / (mean_s - half_s) if mean_s > half_s else math.inf


def _batches_s(records: Records, batch: int) -> tuple[Floats, Floats]:
    """When each batch begins, and how long it lasts."""
    begun_s = records.requests.scheduled_s.reshape(-1, batch).min(axis=1)
    return begun_s, records.requests.finished_s.reshape(-1, batch).max(axis=1) - begun_s


def _of_tokens(records: Records, inside: Ints, of: Deployment) -> tuple[float, float, float, float]:
    """(seconds to the first token, between tokens, residents while these begin, blocks held).

    Where a side only decodes, residents and blocks are of one of its replicas.
    """
    got, totals = records.requests, records.totals
    begun_s, first_s, last_s = got.scheduled_s, got.first_token_s, got.finished_s
    from_s, to_s = begun_s[inside[0]], begun_s[inside[-1]]
    there_s = begun_s if of.decode is None else first_s
    shared_s = np.maximum(np.minimum(last_s, to_s) - np.maximum(there_s, from_s), 0.0)
    first = of.parallel.replicas if of.decode else 0
    replicas = len(totals.busy_s) - first
    gaps = max(int((got.output_tokens[inside] - 1).sum()), 1)
    return (
        float((first_s - begun_s)[inside].mean()),
        float((last_s - first_s)[inside].sum()) / gaps,
        float(shared_s.sum() / (to_s - from_s)) / replicas,
        float(totals.kv_block_s[first:].sum() / totals.busy_s[first:].sum()),
    )


__all__ = ["Played", "Question", "counted_requests", "latency_at", "play", "play_whole"]
