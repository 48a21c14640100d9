"""Runs seen from outside (records) and from inside (the reference at every step, the kernel's last state)."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
from hypothesis import HealthCheck, reject, settings

from lengthwise.engine import simulate
from lengthwise.engine.kernel_runner import State, arguments_of, kernel_of
from lengthwise.engine.reference import Reference
from lengthwise.engine.setup import prepare
from lengthwise.policy import resolve
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import PolicyError
from lengthwise.schema.records import Records, Rejection
from lengthwise.schema.workload import Workload

EXAMPLES = int(os.environ.get("LENGTHWISE_EXAMPLES", "40"))
LAW = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
INFINITY = float("inf")


def may_get_stuck(deployment: Deployment) -> bool:
    """Vidur's own rules can leave a replica idle beside work, or lock a request out for good.

    Its watermark is held even on an empty replica; a step that preempted everything has no second try.
    """
    s = deployment.scheduler
    return s.memory == "paged_strict" or s.batching in ("vidur_vllm", "vidur_sarathi")


def restarts_as_decode(deployment: Deployment) -> bool:
    """Vidur's Sarathi counts prompt tokens of a restarted request as produced, and books their gaps."""
    return "vidur_sarathi" in (deployment.scheduler.batching, deployment.decode and deployment.decode.batching)


def run(workload: Workload, deployment: Deployment, **options: Any) -> Records:
    """The records; an example in which Vidur's watermark locks a request out is passed over."""
    try:
        return simulate(workload, deployment, **options)
    except PolicyError:
        if not may_get_stuck(deployment):
            raise
        reject()


def longest_output(workload: Workload, deployment: Deployment) -> Any:
    """What each request produces if nothing ends it early."""
    room = deployment.max_model_len - workload.prompt_tokens
    return np.minimum(workload.output_tokens, np.maximum(room, 1))


def never_fits(workload: Workload, deployment: Deployment) -> Any:
    """Which requests the built-in policies can never serve, determined without the engine."""
    limits, kv, s = deployment.limits, deployment.kv, deployment.scheduler
    hopeless = workload.prompt_tokens >= deployment.max_model_len
    if s.batching in ("prefill_first", "vidur_vllm"):
        hopeless |= workload.prompt_tokens > limits.max_num_batched_tokens
    if s.memory == "paged_strict":
        need = -(-workload.prompt_tokens // kv.block_size)
        hopeless |= kv.num_blocks - need < int(limits.watermark * kv.num_blocks)
    return hopeless


def entries(deployment: Deployment, records: Records) -> Any:
    """When each request that was sent has passed the front, computed one after the other in the order of being sent.

    NaN: it was never sent, or came after one that did not finish.
    """
    r = records.requests
    front, free_s, out = deployment.cost.front, 0.0, np.full(len(r.status), np.nan)
    sent = ~np.isnan(r.arrival_s) & (r.rejection != Rejection.PARENT_NOT_FINISHED)
    for i in np.lexsort((np.arange(len(sent)), r.arrival_s)):
        if sent[i]:
            free_s = max(float(r.arrival_s[i]), free_s) + front.serial_s
            out[i] = free_s + front.request_s
    return out


def last_state(workload: Workload, deployment: Deployment) -> State:
    """The compiled kernel's own state when everything is over."""
    setup = prepare(workload, deployment, seed=0, limit_s=math.inf, compiled=True)
    arguments = arguments_of(setup, 0)
    if kernel_of(arguments)(*arguments) != 0:
        reject()
    state: State = arguments[0]
    return state


def blocks_of(cached: Any) -> list[Any]:
    """The blocks that a request shares with others in the prefix cache, by vLLM's or by SGLang's rules."""
    if not hasattr(cached, "last"):
        return list(cached)
    pages = [page for node in cached.last.path() for page in node.pages]
    assert len(pages) == len(cached)
    return pages


class Watched(Reference):
    """The reference, its innards checked whenever a step is sent off."""

    def _next_event(self) -> float:
        now = super()._next_event()
        assert now >= self.now_s, "the clock never goes back"
        return now

    def _launch(self, rep: Any, step: Any) -> None:
        s = rep.s
        stepping = [*step.decodes, *(q for q, _ in step.prompts)]
        residents = [*rep.running, *stepping, *step.paused]
        assert rep.pool.free >= 0
        moving = [q.transfer for to in self.decode_replicas for q in (*to.queue.waiting, *to.incoming) if q.transfer]
        moving += [receiver.left for receiver in self.receivers.values() if receiver.left]
        moving = [transfer for transfer in moving if transfer.source is rep and transfer.blocks]
        leaving = sum(transfer.blocks for transfer in moving)
        leaving += sum(receiver.blocks for receiver in self.receivers.values() if receiver.replica is rep)
        cached = [block for q in (*residents, *moving) for block in blocks_of(q.cached)]
        shared = len(cached) - len(set(cached))
        assert sum(q.blocks for q in residents) - shared + leaving + rep.pool.free == s.params.total_blocks
        assert all(q.blocks == 0 for q in rep.queue.waiting)
        assert not (self.decode_replicas and step.decodes and rep in self.prefill_replicas)
        recomputes = rep.s.kv_transfer.kv_load_failure_policy == "recompute"
        prefills = self.s.deployment.decode is not None and self.s.deployment.decode.prefills
        assert not (step.prompts and rep in self.decode_replicas) or recomputes or prefills
        assert len({id(q) for q in residents}) == len(residents) <= s.params.max_num_seqs
        assert all(q.decoding for q in step.paused)
        assert not (step.paused and step.decodes)
        for q in step.decodes:
            assert q.decoding
            assert q.blocks >= s.blocks_for(q.context)
        for q, chunk in step.prompts:
            assert not q.decoding
            assert 0 < chunk <= q.context - q.prefilled
            assert q.blocks >= s.blocks_for(q.prefilled + chunk)
        super()._launch(rep, step)


def watch(workload: Workload, deployment: Deployment) -> Reference:
    """A reference that ran to its end under watch."""
    watched = Watched(prepare(workload, deployment, seed=0, limit_s=math.inf, compiled=False))
    try:
        watched.run()
    except PolicyError:
        if not may_get_stuck(deployment):
            raise
        reject()
    return watched


def busy_intervals(records: Records, replica: int) -> list[tuple[float, float]]:
    """When at least one step of the replica was in flight; intervals that touch are one."""
    steps = records.steps
    assert steps is not None
    own = steps.replica == replica
    merged: list[tuple[float, float]] = []
    for start_s, end_s in zip(steps.start_s[own], steps.end_s[own], strict=True):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((start_s, end_s))
    return merged


def covered(intervals: list[tuple[float, float]], from_s: float, to_s: float) -> bool:
    """Whether one of the intervals holds all of [from_s, to_s]; no time needs no cover."""
    return from_s == to_s or any(a <= from_s and to_s <= b for a, b in intervals)


def uses(deployment: Deployment, argument: str) -> bool:
    """Whether any policy of the deployment looks at this argument."""
    s = deployment.scheduler
    axes = ("rank", "victim", "batching", "memory", "router", "preemption")
    binning = resolve("binning", s.binning or "one")
    return any(resolve(axis, getattr(s, axis)).uses(argument) for axis in axes) or binning.uses(argument)
