"""Builds a deployment from catalog names and limits: plans its memory and computes its cost tables."""

from __future__ import annotations

from dataclasses import replace

from lengthwise import catalog, policy
from lengthwise import cost as costs
from lengthwise.cost.memory import HOST_LINK_BYTES_PER_S
from lengthwise.schema.cost_tables import CostTables, FitError, Front
from lengthwise.schema.deployment import DecodeSide, Deployment, EngineLimits, KVTransfer, Parallelism, Scheduler
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
    """Return a deployment with its memory planned and its cost tables computed.

    Args:
        model: Catalog name, Hugging Face ``config.json``, or spec.
        gpu: Catalog name, TOML file of one GPU, or spec.
        node: Machine that holds the GPUs; None: a common one for the GPU.
        tp: Tensor-parallel degree.
        pp: Pipeline stages.
        replicas: Independent replicas behind a router.
        limits: Limits of the engine.
        scheduler: Name of a scheduler, or a ``Scheduler``.
        cost: "roofline", "profile:FILE.parquet" (measured operators; "profile:FILE.parquet#physics" names the
            estimator), "vidur:DIR" (monotone fit of Vidur's profiles), "vidur_forest:DIR" (Vidur's random forest),
            "tables:FILE" (an npz), or tables.
        host: Host overhead of a step, and delay of a request in front of the engine: "vllm", "sglang" or "trtllm"
            (``cost.ENGINE_HOSTS``), or seconds, instead of those of ``cost``; "default" keeps those of ``cost``. Tables
            from a file that contain a host overhead (calibrated ones) accept "default" only.
        memory_planner: "lengthwise" or "vidur".
        num_blocks: Usable KV blocks of a replica; None: as planned.

    Raises:
        InputError: A name is unknown, a size is wrong, the model does not fit, or a profile lacks operators that the
            deployment needs; the message says which and what to do.
    """
    for name, value in (("tp", tp), ("pp", pp), ("replicas", replicas)):
        if not isinstance(value, int) or value < 1:
            raise InputError(f"{name} must be a whole number of at least 1; it is {value!r}")
    parallel = Parallelism(tp, pp, replicas)
    costs.host_overhead(host)  # Reject a wrong one before the tables are computed, which takes longer.
    model = catalog.model(model) if isinstance(model, str) else model
    gpu = catalog.gpu(gpu) if isinstance(gpu, str) else gpu
    if node is None:
        node = catalog.default_node(gpu, tp * pp)
    node = catalog.node(node) if isinstance(node, str) else node
    max_len = costs.largest_model_len(model, gpu, parallel, limits, memory_planner, num_blocks)
    if limits.max_model_len is not None:
        if limits.max_model_len > max_len:
            raise InputError(
                f"max_model_len must be at most {max_len} tokens, which {model.name} supports and the KV cache of a "
                f"replica holds; it is {limits.max_model_len}. Lower it, or give the replica more memory or GPUs"
            )
        max_len = limits.max_model_len
    kv = costs.plan_memory(model, gpu, parallel, limits, max_len, memory_planner, num_blocks)
    tables = _tables(cost, model, gpu, node, parallel, limits, max_len)
    is_file = isinstance(cost, str) and cost.startswith("tables:")
    if is_file and host != "default" and (tables.host_s.any() or tables.front != Front()):
        raise InputError(
            f'host must be "default" with cost {cost!r}, whose tables have a host overhead of their own; it is '
            f"{host!r}. Remove host, or use another cost source"
        )
    return Deployment(
        model=model,
        gpu=gpu,
        node=node,
        parallel=parallel,
        limits=limits,
        scheduler=_scheduler(scheduler),
        cost=costs.with_host(tables, host, experts=model.ffn.experts > 0),
        kv=kv,
        max_model_len=max_len,
        name=f"{model.name} on {parallel.gpus} x {gpu.name}",
    )


def _scheduler(scheduler: str | Scheduler) -> Scheduler:
    """Return a scheduler whose names and objects are checked."""
    scheduler = policy.scheduler(scheduler) if isinstance(scheduler, str) else scheduler
    for axis in ("rank", "victim", "batching", "memory", "router", "preemption"):
        policy.resolve(axis, getattr(scheduler, axis))
    if scheduler.binning is not None:
        policy.resolve("binning", scheduler.binning)
    if scheduler.preemption_mode not in policy.PREEMPTION_MODES:
        raise UnknownNameError("preemption mode", scheduler.preemption_mode, policy.PREEMPTION_MODES)
    return scheduler


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
    kind, _, path = source.partition(":")
    if kind == "roofline" and not path:
        return costs.roofline(model, gpu, node, parallel, limits, max_model_len)
    if kind == "profile" and path:
        from lengthwise.cost.estimators import profile_tables

        return profile_tables(path, model, gpu, node, parallel, limits, max_model_len)[0]
    if kind == "tables" and path:
        return costs.from_tables(path, model, parallel.pp)
    if kind in _ESTIMATORS and path:
        tables, report = costs.vidur_profile(
            path, model, gpu.name, parallel, limits, max_model_len, node=node, estimator=_ESTIMATORS[kind]
        )
        fit = tuple(FitError(o.name, o.median_error, o.p95_error) for o in report.operators)
        return replace(tables, evidence=replace(tables.evidence, fit=fit))
    raise UnknownNameError("cost source", source, COST_SOURCES)


def disaggregate(local: Deployment, remote: Deployment, kv_transfer: KVTransfer | None = None) -> Deployment:
    """Return a deployment whose prompts are prefilled by the replicas of ``local`` and decoded by those of ``remote``.

    Requests are limited by the shorter ``max_model_len``. Of the scheduler of ``remote`` only batching, memory,
    preemption mode and router apply; rank, waits and bins are those of ``local``.

    Args:
        local: Prefill side; its router chooses where to prefill, and its waits, clients and front end apply to both.
        remote: Decode side.
        kv_transfer: Transfer of the KV cache; None: over the links between two replicas (``kv_transfer_over``).

    Raises:
        InputError: The sides differ in model, GPU or block size, or one of them has a decode side already.
    """
    for name in ("model", "gpu"):
        first, second = getattr(local, name), getattr(remote, name)
        if first != second:
            raise InputError(f"both sides must have one {name}; they have {first.name} and {second.name}")
    local.require_one_side("the prefill side")
    remote.require_one_side("the decode side")
    if local.kv.block_size != remote.kv.block_size:
        raise InputError(
            f"block_size must be the same on both sides; it is {local.kv.block_size} and {remote.kv.block_size}"
        )
    gpus = sum(side.parallel.gpus // side.parallel.replicas for side in (local, remote))
    side = DecodeSide(
        parallel=remote.parallel,
        limits=remote.limits,
        cost=remote.cost,
        kv=remote.kv,
        kv_transfer=kv_transfer or kv_transfer_over(local.node.link_for(gpus), local, remote),
        batching=remote.scheduler.batching,
        memory=remote.scheduler.memory,
        preemption_mode=remote.scheduler.preemption_mode,
        router=remote.scheduler.router,
    )
    return replace(local, max_model_len=min(local.max_model_len, remote.max_model_len), decode=side)


def kv_transfer_over(link: LinkSpec | None, local: Deployment, remote: Deployment) -> KVTransfer:
    """Return the cost of a KV transfer in which every GPU sends its share of the cache over a link of its own.

    ``link`` connects the GPUs of both sides; None: each GPU writes to host memory, from which the receiver reads.
    """
    sent, received = (side.kv.kv_bytes_per_block / side.kv.block_size for side in (local, remote))
    if link is None:
        return KVTransfer(0.0, sent + received, HOST_LINK_BYTES_PER_S)
    return KVTransfer(link.latency_s, max(sent, received), link.bandwidth_bytes_per_s)
