"""Small random worlds whose replicas either prefill or decode."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import strategies as st
from worlds import (
    PHASES,
    ROUTERS,
    STEADY_PHASES,
    cost_tables,
    deployments,
    in_flight,
    of_two_degrees,
    shared_seconds,
    speculation_worlds,
)

from lengthwise.policy import known
from lengthwise.schema.cost_tables import MERGED, PER_REQUEST
from lengthwise.schema.deployment import DecodeSide, Deployment, EngineLimits, KvPlan, KVTransfer, Parallelism
from lengthwise.schema.speculation import Drafter
from lengthwise.schema.workload import Workload

PREFILLS = (
    "prefill(prefill_batch=1)", "prefill(prefill_batch=4)",
    "prefill(prefill_batch=3, threshold=0.1, prompt_tokens=90)",
)  # fmt: skip
HANDOVERS = (
    KVTransfer(),
    KVTransfer(0.01),
    KVTransfer(0.0, 100.0, 1e5),
    KVTransfer(0.003, 1.0, 300.0, sharing="none"),
    KVTransfer(0.0, 100.0, 1e5, sharing="fair"),
    KVTransfer(0.003, 1.0, 3e3, sharing="fair", links_at_once=1.5),
    KVTransfer(1.0, 1.0, 1e3),
    KVTransfer(0.1, 10.0, 1e5, timeout_s=0.05),
    KVTransfer(0.0, 100.0, 1e5, layers=4),
    KVTransfer(0.003, 1.0, 300.0, sharing="none", layers=1),
    KVTransfer(0.003, 1.0, 3e3, sharing="fair", layers=3),
    KVTransfer(0.0, 0.0, 1e5, sharing="fair", layers=2),
    KVTransfer(0.1, 10.0, 1e5, timeout_s=0.02, kv_load_failure_policy="recompute"),
    KVTransfer(0.1, 10.0, 1e5, timeout_s=0.02, kv_load_failure_policy="recompute", layers=3),
)


@st.composite
def disaggregated(draw: st.DrawFn) -> Deployment:
    """A deployment whose prompts are handed over to replicas that only decode, both sides often short of memory."""
    prefill = draw(deployments())
    routers = [name for name in ROUTERS if name != "central"]
    axes = {"router": draw(st.sampled_from(routers))} if prefill.scheduler.router == "central" else {}
    if draw(st.integers(0, 3)) == 0:
        axes["batching"] = draw(st.sampled_from(PREFILLS))
    limits = dataclasses.replace(prefill.limits, max_in_flight=draw(st.none() | st.integers(1, 4)))
    scheduler = dataclasses.replace(prefill.scheduler, **axes)
    prefill = dataclasses.replace(prefill, scheduler=scheduler, limits=limits)
    decode = draw(decode_sides(prefill, routers))
    if draw(st.booleans()):
        prefill = dataclasses.replace(prefill, **draw(ranks(prefill, scheduler.batching)))
    if draw(st.booleans()):
        decode = dataclasses.replace(decode, **draw(ranks(decode, decode.batching)))
    return dataclasses.replace(prefill, decode=decode)


@st.composite
def speculating_sides(draw: st.DrawFn) -> tuple[Workload, Deployment]:
    """Requests whose decode replicas verify proposed tokens, with a drafter whose costs differ between the sides."""
    workload, prefill = draw(speculation_worlds())
    routers = [name for name in ROUTERS if name != "central"]
    if prefill.scheduler.router == "central":
        prefill = dataclasses.replace(prefill, scheduler=dataclasses.replace(prefill.scheduler, router="round_robin"))
    side, chosen = draw(decode_sides(prefill, routers)), prefill.speculation
    least = side.limits.max_num_seqs * (1 + chosen.num_speculative_tokens)
    tokens = least + draw(st.sampled_from([0, 1, 30, 500]))
    drafter = draw(st.sampled_from([chosen.drafter, Drafter(2.0, 0.5, cost_tables([3], scale=0.2))]))
    side = dataclasses.replace(
        side,
        parallel=dataclasses.replace(side.parallel, pp=1),
        limits=dataclasses.replace(side.limits, max_step_seqs=None, max_in_flight=None, max_num_batched_tokens=tokens),
        cost=cost_tables([4], side.cost.rule.kind, 0.5, additional=draw(st.booleans())),
        batching="unified",
        memory=draw(st.sampled_from(["paged", "paged_by_chunk"])),
        preemption_mode="recompute",
        speculation=dataclasses.replace(chosen, drafter=drafter),
    )
    if draw(st.booleans()):
        side = dataclasses.replace(side, **draw(ranks(side, "unified")) | {"limits": side.limits})
    if draw(st.booleans()):
        prefill = dataclasses.replace(prefill, **draw(ranks(prefill, "unified")) | {"limits": prefill.limits})
    return workload, dataclasses.replace(prefill, decode=side)


@st.composite
def ranks(draw: st.DrawFn, side: Deployment | DecodeSide, batching: str) -> dict[str, Any]:
    """What makes the replicas of a side have data-parallel ranks."""
    return {
        "parallel": dataclasses.replace(side.parallel, dp=draw(st.integers(2, 4))),
        "cost": dataclasses.replace(side.cost, shared_s=draw(shared_seconds()), other=None),
        "limits": dataclasses.replace(side.limits, max_in_flight=draw(in_flight(batching))),
    }


@st.composite
def decode_sides(draw: st.DrawFn, current: Deployment, routers: list[str]) -> DecodeSide:
    """Any decode side that fits the deployment."""
    pp, block_size = draw(st.sampled_from([1, 1, 2, 3])), current.kv.block_size
    least = -(-current.max_model_len // block_size)
    blocks = least + draw(st.sampled_from([1, 2, 8, 200])) * draw(st.sampled_from([1, 16 // block_size]))
    seqs = draw(st.integers(1, 12))
    limits = EngineLimits(
        max_num_seqs=seqs,
        max_step_seqs=draw(st.none() | st.integers(1, seqs)),
        block_size=block_size,
        watermark=draw(st.sampled_from([0.0, 0.01, 0.1])),
        max_in_flight=draw(st.none() | st.integers(1, 4)),
    )
    rule = draw(st.sampled_from([PER_REQUEST, MERGED]))
    tables = cost_tables([4] if pp == 1 else list(range(1, pp + 1)), rule, 0.5, additional=draw(st.booleans()))
    tables = dataclasses.replace(tables, masked_s=draw(st.sampled_from([0.0, 2e-7])))
    if draw(st.sampled_from([False, False, True])):
        tables = of_two_degrees(tables, draw(st.lists(st.sampled_from([0, 1]), min_size=pp, max_size=pp)))
    return DecodeSide(
        parallel=Parallelism(1, pp, draw(st.sampled_from([1, 1, 2, 3]))),
        limits=limits,
        cost=tables,
        kv=KvPlan(blocks, block_size, 0.0, 0.0, 0.0, 0.0, swap_s_per_block=1e-5),
        kv_transfer=draw(st.sampled_from(HANDOVERS)),
        max_local_prefill_length=draw(st.sampled_from([0, 0, 0, 12, 60])),
        max_prefill_queue_size=draw(st.sampled_from([None, None, None, 1, 3])),
        batching=draw(st.sampled_from(["unified", "unified", *sorted(known("batching")), *PHASES, *STEADY_PHASES])),
        memory=draw(st.sampled_from([m for m in sorted(known("memory")) if m != "paged_strict"])),
        preemption_mode=draw(st.sampled_from(["recompute", "swap"])),
        router=draw(st.sampled_from(routers)),
    )
