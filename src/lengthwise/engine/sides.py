"""Two deployments become one whose prompts are computed on the one and decoded on the other."""

from __future__ import annotations

from dataclasses import replace

from lengthwise.cost.memory import HOST_LINK_BYTES_PER_S
from lengthwise.schema.deployment import DecodeSide, Deployment, Handover
from lengthwise.schema.errors import InputError
from lengthwise.schema.hardware import LinkSpec


def disaggregate(here: Deployment, there: Deployment, handover: Handover | None = None) -> Deployment:
    """A deployment whose prompts are prefilled by the replicas of ``here`` and decoded by those of ``there``.

    Requests are bounded by the shorter ``max_model_len``. Of the scheduler of ``there`` batching, memory, preemption
    and router count; its rank, waits and bins are those of ``here``.

    Args:
        here: What prefills; its routers, waits, clients and front are those of the whole.
        there: What decodes.
        handover: How the KV cache gets there; None: over the links that join a replica of each (``handover_over``).

    Raises:
        InputError: The sides are of two models, GPUs or block sizes, or one of them has a decode side already.
    """
    for name in ("model", "gpu"):
        mine, others = getattr(here, name), getattr(there, name)
        if mine != others:
            raise InputError(f"both sides must have one {name}; they have {mine.name} and {others.name}")
    here.require_one_side("the side that prefills")
    there.require_one_side("the side that decodes")
    if here.kv.block_size != there.kv.block_size:
        raise InputError(
            f"block_size must be the same on both sides; it is {here.kv.block_size} and {there.kv.block_size}"
        )
    side = DecodeSide(
        parallel=there.parallel,
        limits=there.limits,
        cost=there.cost,
        kv=there.kv,
        handover=handover
        or handover_over(here.node.link_for(_replica_gpus(here) + _replica_gpus(there)), here, there),
        batching=there.scheduler.batching,
        memory=there.scheduler.memory,
        preempt=there.scheduler.preempt,
        router=there.scheduler.router,
    )
    return replace(here, max_model_len=min(here.max_model_len, there.max_model_len), decode=side)


def handover_over(link: LinkSpec | None, here: Deployment, there: Deployment) -> Handover:
    """What it takes to hand a request over: every GPU sends its share of the cache over a link of its own.

    Args:
        link: What joins the GPUs of both sides; None: each GPU writes to, then reads from, host memory.
        here: What prefills.
        there: What decodes.
    """
    out, into = (side.kv.kv_bytes_per_block / side.kv.block_size for side in (here, there))
    if link is None:
        return Handover(0.0, out + into, HOST_LINK_BYTES_PER_S)
    return Handover(link.latency_s, max(out, into), link.bandwidth_bytes_per_s)


def _replica_gpus(deployment: Deployment) -> int:
    return deployment.parallel.gpus // deployment.parallel.replicas


__all__ = ["disaggregate", "handover_over"]
