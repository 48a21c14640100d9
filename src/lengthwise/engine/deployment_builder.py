"""Builds deployments from catalog names and limits: plans memory and computes cost tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lengthwise import catalog, policy
from lengthwise import cost as costs
from lengthwise.cost.memory import HOST_LINK_BYTES_PER_S
from lengthwise.engine.setup import group_obstacles, resolve_policies
from lengthwise.schema.cost_tables import CostTables, FitError, Front
from lengthwise.schema.deployment import (
    DecodeSide,
    Deployment,
    EngineLimits,
    KvPlan,
    KVTransfer,
    Parallelism,
    Scheduler,
)
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.specs import GpuSpec, LinkSpec, ModelSpec, NodeSpec
from lengthwise.schema.speculation import Drafter, Speculation

EAGLE3_VOCABULARY = 32_000  # draft_vocab_size of the EAGLE-3 heads of Llama 3 (yuhuili/EAGLE3-LLaMA3.1-Instruct-8B)
COST_SOURCES = ("roofline", "profile:FILE", "vidur:DIR", "vidur_forest:DIR", "vidur_forest_grid:DIR", "tables:FILE")
_ESTIMATORS = {"vidur": "monotone", "vidur_forest": "random_forest", "vidur_forest_grid": "random_forest_grid"}


def deploy(
    model: str | ModelSpec,
    gpu: str | GpuSpec,
    *,
    node: str | NodeSpec | None = None,
    tp: int = 1,
    pp: int = 1,
    replicas: int = 1,
    dp: int = 1,
    ep: int = 1,
    redundant_experts: int | None = None,
    all2all_backend: str = "allgather_reducescatter",
    limits: EngineLimits = EngineLimits(),
    scheduler: str | Scheduler = "vllm_v1",
    cost: str | CostTables = "roofline",
    host: str | costs.HostOverhead = "default",
    memory_planner: str = "lengthwise",
    num_blocks: int | None = None,
    speculation: Speculation | None = None,
) -> Deployment:
    """Return a deployment with planned memory and computed cost tables.

    Args:
        model: Catalog name, Hugging Face ``config.json``, or spec.
        gpu: Catalog name, TOML file of one GPU, or spec.
        node: Machine of the GPUs. None takes a common machine for this GPU.
        tp: Tensor-parallel degree.
        pp: Pipeline stages.
        replicas: Independent replicas behind a router.
        dp: Data-parallel ranks of a replica, each with ``tp`` GPUs, requests and a KV cache of its own.
        ep: Number of GPUs, or of groups of GPUs, that divide the experts of a layer. It divides ``tp`` x ``dp``.
        redundant_experts: Copies of a layer's experts beyond the first of each, which EPLB places; None: no EPLB.
        all2all_backend: How the ranks exchange tokens: one of ``schema.deployment.ALL2ALL_BACKENDS``.
        limits: Limits of the engine.
        scheduler: Name of a scheduler, or a ``Scheduler``.
        cost: "roofline", "profile:FILE.parquet" (measured operators; "profile:FILE.parquet#physics" names the
            estimator), "vidur:DIR" (monotone fit of Vidur's profiles), "vidur_forest:DIR" (Vidur's random forest),
            "vidur_forest_grid:DIR" (its parameters by grid search), "tables:FILE" (an npz file), or ``CostTables``.
        host: Host overhead of a step and delay of a request in front of the engine, which replace those of ``cost``:
            those fitted to "vllm", "sglang" or "trtllm" (``cost.ENGINE_HOSTS``), or seconds. "default" retains
            those of ``cost``. Tables from a file that contain a host overhead (calibrated tables) accept "default"
            only.
        memory_planner: "lengthwise" or "vidur".
        num_blocks: Usable KV blocks of a replica. None takes the blocks that the memory planner finds.
        speculation: Speculative decoding. The method gives the seconds and memory of its drafter: one layer of the
            model for EAGLE and MTP, all layers of a draft model.

    Raises:
        InputError: A name is unknown, a size is wrong, the model does not fit, or a profile lacks operators that the
            deployment needs. The message has the cause and what to do.
        PolicyError: The scheduler has a policy of another axis, or wrong parameters of a policy.
    """
    for name, value in (("tp", tp), ("pp", pp), ("replicas", replicas), ("dp", dp), ("ep", ep)):
        if not isinstance(value, int) or value < 1:
            raise InputError(f"{name} must be a whole number of at least 1; it is {value!r}")
    parallel = Parallelism(
        tp, pp, replicas, dp=dp, ep=ep, redundant_experts=redundant_experts, all2all_backend=all2all_backend
    )
    scheduler = policy.scheduler(scheduler) if isinstance(scheduler, str) else scheduler
    resolve_policies(scheduler)
    costs.host_overhead(host)  # Reject a wrong host before the tables are computed, which takes longer.
    model = catalog.model(model) if isinstance(model, str) else model
    gpu = catalog.gpu(gpu) if isinstance(gpu, str) else gpu
    if node is None:
        node = catalog.default_node(gpu, parallel.gpus_per_replica)
    node = catalog.node(node) if isinstance(node, str) else node
    catalog.require_node_of(gpu, node)
    obstacles = group_obstacles(limits, scheduler, parallel.pp, speculates=speculation is not None)
    hybrid = 0 if obstacles else 1 + scheduler.async_scheduling
    max_len = costs.largest_model_len(model, gpu, parallel, limits, memory_planner, num_blocks, hybrid=hybrid)
    if limits.max_model_len is not None:
        if limits.max_model_len > max_len:
            raise InputError(
                f"max_model_len must be at most {max_len} tokens, which {model.name} supports and the KV cache of a "
                f"replica holds; it is {limits.max_model_len}. Lower it, or give the replica more memory or GPUs"
            )
        max_len = limits.max_model_len
    kv = costs.plan_memory(model, gpu, parallel, limits, max_len, memory_planner, num_blocks, hybrid=hybrid)
    if speculation is not None:
        target = (gpu, node, parallel, limits)
        speculation, kv = _with_drafter(speculation, kv, model, target, cost, max_len, is_given=num_blocks is not None)
        kv_tokens = kv.num_blocks * kv.block_size
        if limits.max_model_len is not None and kv_tokens < max_len:
            raise InputError(
                f"max_model_len must be at most {kv_tokens} tokens, which the KV cache of a replica holds besides the "
                f"drafter; it is {max_len}. Lower it, or give the replica more memory or GPUs"
            )
        max_len = min(max_len, kv_tokens)
    tables = _tables(cost, model, gpu, node, parallel, limits, max_len)
    if (parallel.dp > 1) != (tables.shared_s is not None):
        raise InputError(
            f"cost tables must be of the deployment's data-parallel ranks, dp {parallel.dp}: theirs have "
            f"{'no' if tables.shared_s is None else 'a'} part that several ranks compute together (shared_s). Take "
            'cost "roofline", or tables that were made for this dp'
        )
    proposed = speculation.num_speculative_tokens if speculation else 0
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
        scheduler=scheduler,
        cost=costs.with_host(tables, host, model, parallel, limits, proposed),
        kv=kv,
        max_model_len=max_len,
        speculation=speculation,
        name=f"{model.name} on {parallel.gpus} x {gpu.name}",
    )


def _with_drafter(
    chosen: Speculation,
    kv: KvPlan,
    model: ModelSpec,
    target: tuple[GpuSpec, NodeSpec, Parallelism, EngineLimits],
    cost: str | CostTables,
    max_model_len: int,
    *,
    is_given: bool,
) -> tuple[Speculation, KvPlan]:
    """Return the settings with the drafter's costs, and the memory less the drafter's, unless its size ``is_given``."""
    gpu, node, parallel, limits = target
    if chosen.method == "ngram":
        return chosen, kv
    if chosen.method != "draft_model":
        shard = costs.shard_of(model, parallel, limits)
        # EAGLE-3 heads have a vocabulary of their own (arXiv:2503.01840); others use the head of the model.
        share = min(1.0, EAGLE3_VOCABULARY / model.vocab) if chosen.method == "eagle3" else 1.0
        weights = shard.layer_weight_bytes(model.layers - 1) / parallel.tp
        block_bytes = shard.kv_bytes * kv.block_size
        drafter = Drafter(1.0, share)
    else:
        draft = catalog.model(chosen.draft_model)
        if draft.vocab != model.vocab:
            raise InputError(
                f"a draft model must have the vocabulary of {model.name}, {model.vocab} tokens; {draft.name} has "
                f"{draft.vocab}. Take one of the same family"
            )
        own_limits = replace(limits, weight_dtype=None)
        # Each data-parallel rank has a draft model of its own.
        parallel = replace(parallel, replicas=1) if parallel.dp == 1 else Parallelism(parallel.tp, parallel.pp)
        shard = costs.shard_of(draft, parallel, own_limits)
        source = cost if isinstance(cost, str) and cost.partition(":")[0] in ("roofline", "profile") else "roofline"
        tables = _tables(source, draft, gpu, node, parallel, own_limits, min(max_model_len, draft.max_model_len))
        weights = float(shard.stage_weight_bytes()[0])
        block_bytes = shard.kv_bytes * draft.caching_layers * kv.block_size
        drafter = Drafter(float(tables.stage_layers.sum()), 1.0, tables)
    if chosen.drafter != Drafter():
        drafter = chosen.drafter
    return replace(chosen, drafter=drafter), kv if is_given else costs.with_drafter(kv, weights, block_bytes)


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
    if kind not in ("roofline", "tables") and (parallel.dp > 1 or parallel.ep > 1):
        raise InputError(
            f"cost {source!r} has times of experts that tp divides; dp is {parallel.dp} and ep is {parallel.ep}. Take "
            'cost "roofline" for data and expert parallelism'
        )
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


def disaggregate(prefill: Deployment, decode: Deployment, kv_transfer: KVTransfer | None = None) -> Deployment:
    """Return a disaggregated deployment: replicas of ``prefill`` prefill requests, replicas of ``decode`` decode them.

    The smaller ``max_model_len`` applies to both sides. The decode side uses batching, memory, preemption mode and
    router of its scheduler. Rank, victim, waits, bins, timeouts and front end are those of the prefill side.

    Args:
        prefill: Prefill side. Its router chooses where a request is prefilled.
        decode: Decode side. Its router chooses where a request is decoded.
        kv_transfer: Transfer of the KV cache. None uses the links of two replicas (``kv_transfer_between``).

    Raises:
        InputError: The sides differ in model or block size, or one of them already has a decode side.
    """
    if prefill.model != decode.model:
        raise InputError(f"both sides must have one model; they have {prefill.model.name} and {decode.model.name}")
    prefill.require_one_side("the prefill side")
    decode.require_one_side("the decode side")
    if any(side.kv.groups for side in (prefill, decode)):
        raise InputError(
            f"the layers of {prefill.model.name} form several KV cache groups, whose transfer is not modelled yet; "
            "give both sides a Scheduler with hybrid_kv_cache=False"
        )
    if prefill.kv.block_size != decode.kv.block_size:
        raise InputError(
            f"block_size must be the same on both sides; it is {prefill.kv.block_size} and {decode.kv.block_size}"
        )
    gpus = sum(side.parallel.gpus // side.parallel.replicas for side in (prefill, decode))
    side = DecodeSide(
        parallel=decode.parallel,
        limits=decode.limits,
        cost=decode.cost,
        kv=decode.kv,
        kv_transfer=kv_transfer or kv_transfer_between(prefill, decode, gpus),
        batching=decode.scheduler.batching,
        memory=decode.scheduler.memory,
        preemption_mode=decode.scheduler.preemption_mode,
        router=decode.scheduler.router,
        gpu=decode.gpu,
        node=decode.node,
        speculation=decode.speculation,
    )
    return replace(prefill, max_model_len=min(prefill.max_model_len, decode.max_model_len), decode=side)


def mix(groups: Sequence[Deployment]) -> Deployment:
    """Return a deployment of several groups of replicas behind the router of the first one.

    The smallest ``max_model_len`` applies to all. Groups may differ in GPU, node, parallelism, number of replicas,
    memory, limits of a step and costs.

    Raises:
        InputError: The groups differ in model, scheduler, block size or front end, or have parts that several groups
            are not modelled with.
    """
    shortest = min(group.max_model_len for group in groups)
    first, *others = [replace(group, max_model_len=shortest) for group in groups]
    mixed = replace(first, groups=tuple(others))
    mixed.require_like_groups()
    return mixed


def kv_transfer_over(
    link: LinkSpec | None, prefill: Deployment, decode: Deployment, decode_link: LinkSpec | None = None
) -> KVTransfer:
    """Return a KV transfer in which every GPU sends its share of the KV cache over a link of its own.

    ``link`` connects the GPUs of both sides. If ``decode_link`` is given, ``link`` is that of the prefill side and
    ``decode_link`` that of the decode side, and the side that needs more time decides. If ``link`` is None, GPUs write
    to host memory, and the receivers read from it.
    """
    sent, received = (side.kv.kv_bytes_per_block / side.kv.block_size for side in (prefill, decode))
    if link is None:
        return KVTransfer(0.0, sent + received, HOST_LINK_BYTES_PER_S, link="host memory")
    ends = ((sent, link), (received, decode_link or link))
    moved, slowest = max(ends, key=lambda end: end[0] / end[1].bandwidth_bytes_per_s)
    latency_s = max(end.latency_s for _, end in ends)
    return KVTransfer(latency_s, moved, slowest.bandwidth_bytes_per_s, link=slowest.name)


def kv_transfer_between(prefill: Deployment, decode: Deployment, gpus: int) -> KVTransfer:
    """Return the KV transfer between sides with ``gpus`` GPUs, within one node or over the network.

    ``kv_transfer_over`` computes it. Sides that differ in GPU or node share no node, so each uses its own network.
    """
    if (prefill.gpu, prefill.node) == (decode.gpu, decode.node):
        return kv_transfer_over(prefill.node.link_for(gpus), prefill, decode)
    return kv_transfer_over(prefill.node.network, prefill, decode, decode.node.network)
