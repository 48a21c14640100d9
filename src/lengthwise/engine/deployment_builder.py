"""From names and knobs to a Deployment with nothing left to look up."""

from __future__ import annotations

from dataclasses import replace

from lengthwise import catalog, policy
from lengthwise import cost as costs
from lengthwise.cost.memory import HOST_LINK_BYTES_PER_S
from lengthwise.schema.cost_tables import CostTables, FitError, Front
from lengthwise.schema.deployment import DecodeSide, Deployment, EngineLimits, Handover, Parallelism, Scheduler
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.specs import GpuSpec, LinkSpec, ModelSpec, NodeSpec

COST_SOURCES = ("roofline", "profile:FILE", "vidur:DIR", "vidur_forest:DIR", "tables:FILE")
_ESTIMATORS = {"vidur": "monotone", "vidur_forest": "random_forest"}


def deploy(
    model: str | ModelSpec,
    gpu: str | GpuSpec,
    *,
    node: str | NodeSpec | None = None,
    tp: int = 1,
    pp: int = 1,
    replicas: int = 1,
    limits: EngineLimits = EngineLimits(),
    scheduler: str | Scheduler = "vllm_v1",
    cost: str | CostTables = "roofline",
    host: str | costs.HostOverhead = "default",
    memory_planner: str = "lengthwise",
    num_blocks: int | None = None,
) -> Deployment:
    """A deployment from catalog names (or specs), its memory planned and its cost tables built.

    Args:
        model: A catalog name, a Hugging Face ``config.json``, or a spec.
        gpu: A catalog name, a TOML file of one GPU, or a spec.
        node: What joins the GPUs; None takes a usual machine for the GPU.
        tp: Tensor-parallel degree.
        pp: Pipeline stages.
        replicas: Independent replicas behind a router.
        limits: The engine's knobs.
        scheduler: A named scheduler or a point on its axes.
        cost: "roofline", "profile:FILE.parquet" (measured operators; "profile:FILE.parquet#physics" names the
            estimator), "vidur:DIR" (monotone fit of Vidur's profiles), "vidur_forest:DIR" (its
            own random forest), "tables:FILE" (an npz), or tables.
        host: What the engine's host adds to a step, and what a request waits before the engine: "vllm", "sglang"
            or "trtllm" (``cost.ENGINE_HOSTS``), or seconds, in place of what ``cost`` says of it; "default" keeps
            that. A file of tables that has a host (a calibrated one) takes no other.
        memory_planner: "lengthwise" or "vidur".
        num_blocks: KV blocks a replica; None plans them.

    Raises:
        InputError: A name is unknown, a size is wrong, the model does not fit, or a profile lacks
            what the deployment needs; the message says which and what to do.
    """
    parallel = _parallel(tp, pp, replicas)
    costs.host_overhead(host)  # a wrong one is told before the rest is made
    model = catalog.model(model) if isinstance(model, str) else model
    gpu = catalog.gpu(gpu) if isinstance(gpu, str) else gpu
    node = _node(node, gpu, tp * pp)
    max_len = _max_model_len(model, gpu, parallel, limits, memory_planner, num_blocks)
    kv = costs.plan_memory(model, gpu, parallel, limits, max_len, memory_planner, num_blocks)
    return Deployment(
        model=model,
        gpu=gpu,
        node=node,
        parallel=parallel,
        limits=limits,
        scheduler=_scheduler(scheduler),
        cost=_with_host(_tables(cost, model, gpu, node, parallel, limits, max_len), host, cost, model),
        kv=kv,
        max_model_len=max_len,
        name=f"{model.name} on {parallel.gpus} x {gpu.name}",
    )


def _parallel(tp: int, pp: int, replicas: int) -> Parallelism:
    for name, value in (("tp", tp), ("pp", pp), ("replicas", replicas)):
        if not isinstance(value, int) or value < 1:
            raise InputError(f"{name} must be a whole number of at least 1; it is {value!r}")
    return Parallelism(tp, pp, replicas)


def _node(node: str | NodeSpec | None, gpu: GpuSpec, gpus: int) -> NodeSpec:
    if node is None:
        return catalog.default_node(gpu, gpus)
    return catalog.node(node) if isinstance(node, str) else node


def _scheduler(scheduler: str | Scheduler) -> Scheduler:
    """The scheduler, its names and objects checked."""
    scheduler = policy.scheduler(scheduler) if isinstance(scheduler, str) else scheduler
    for axis in ("rank", "leave", "batching", "memory", "router", "takeover"):
        policy.resolve(axis, getattr(scheduler, axis))
    if scheduler.binning is not None:
        policy.resolve("binning", scheduler.binning)
    if scheduler.preempt not in policy.PREEMPTIONS:
        raise UnknownNameError("preemption", scheduler.preempt, policy.PREEMPTIONS)
    return scheduler


def _max_model_len(
    model: ModelSpec, gpu: GpuSpec, parallel: Parallelism, limits: EngineLimits, planner: str, num_blocks: int | None
) -> int:
    """What was asked for, checked against the cache; else the longest that model and cache take."""
    room = costs.largest_model_len(model, gpu, parallel, limits, planner, num_blocks)
    if limits.max_model_len is None:
        return room
    if limits.max_model_len > room:
        raise InputError(
            f"max_model_len must be at most {room} tokens, what {model.name} takes and the KV cache of a replica "
            f"holds; it is {limits.max_model_len}. Lower it, or give the replica more memory or GPUs"
        )
    return limits.max_model_len


def _with_host(
    tables: CostTables, host: str | costs.HostOverhead, source: str | CostTables, model: ModelSpec
) -> CostTables:
    """The tables with that host; a calibration is not undone in silence."""
    is_file = isinstance(source, str) and source.startswith("tables:")
    if is_file and host != "default" and (tables.host_s.any() or tables.front != Front()):
        raise InputError(
            f'host must be "default" with cost {source!r}, whose tables have a host of their own; it is {host!r}. '
            "Take host out, or take another cost source"
        )
    return costs.with_host(tables, host, experts=model.ffn.experts > 0)


def _tables(
    source: str | CostTables,
    model: ModelSpec,
    gpu: GpuSpec,
    node: NodeSpec,
    parallel: Parallelism,
    limits: EngineLimits,
    max_model_len: int,
) -> CostTables:
    if isinstance(source, CostTables):
        return source
    kind, _, place = source.partition(":")
    if kind == "roofline" and not place:
        return costs.roofline(model, gpu, node, parallel, limits, max_model_len)
    if kind == "profile" and place:
        from lengthwise.cost.estimators import profile_tables

        return profile_tables(place, model, gpu, node, parallel, limits, max_model_len)[0]
    if kind == "tables" and place:
        return costs.from_tables(place, model, parallel.pp)
    if kind in _ESTIMATORS and place:
        estimator = _ESTIMATORS[kind]
        tables, report = costs.vidur_profile(
            place, model, gpu.name, parallel, limits, max_model_len, node=node, estimator=estimator
        )
        fit = tuple(FitError(o.name, o.median_error, o.p95_error) for o in report.operators)
        return replace(tables, fit=fit)
    raise UnknownNameError("cost source", source, COST_SOURCES)


def disaggregate(local: Deployment, remote: Deployment, kv_transfer: Handover | None = None) -> Deployment:
    """A deployment whose prompts are prefilled by the replicas of ``local`` and decoded by those of ``remote``.

    Requests are bounded by the shorter ``max_model_len``. Of the scheduler of ``remote`` batching, memory, preemption
    and router count; its rank, waits and bins are those of ``local``.

    Args:
        local: What prefills; its routers, waits, clients and front are those of the whole.
        remote: What decodes.
        kv_transfer: How the KV cache gets there; None: over the links that join a replica of each (``handover_over``).

    Raises:
        InputError: The sides are of two models, GPUs or block sizes, or one of them has a decode side already.
    """
    for name in ("model", "gpu"):
        mine, others = getattr(local, name), getattr(remote, name)
        if mine != others:
            raise InputError(f"both sides must have one {name}; they have {mine.name} and {others.name}")
    local.require_one_side("the side that prefills")
    remote.require_one_side("the side that decodes")
    if local.kv.block_size != remote.kv.block_size:
        raise InputError(
            f"block_size must be the same on both sides; it is {local.kv.block_size} and {remote.kv.block_size}"
        )
    side = DecodeSide(
        parallel=remote.parallel,
        limits=remote.limits,
        cost=remote.cost,
        kv=remote.kv,
        kv_transfer=kv_transfer
        or handover_over(local.node.link_for(_replica_gpus(local) + _replica_gpus(remote)), local, remote),
        batching=remote.scheduler.batching,
        memory=remote.scheduler.memory,
        preempt=remote.scheduler.preempt,
        router=remote.scheduler.router,
    )
    return replace(local, max_model_len=min(local.max_model_len, remote.max_model_len), decode=side)


def handover_over(link: LinkSpec | None, local: Deployment, remote: Deployment) -> Handover:
    """What it takes to hand a request over: every GPU sends its share of the cache over a link of its own.

    Args:
        link: What joins the GPUs of both sides; None: each GPU writes to, then reads from, host memory.
        local: What prefills.
        remote: What decodes.
    """
    out, into = (side.kv.kv_bytes_per_block / side.kv.block_size for side in (local, remote))
    if link is None:
        return Handover(0.0, out + into, HOST_LINK_BYTES_PER_S)
    return Handover(link.latency_s, max(out, into), link.bandwidth_bytes_per_s)


def _replica_gpus(deployment: Deployment) -> int:
    return deployment.parallel.gpus // deployment.parallel.replicas
