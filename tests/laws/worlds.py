"""Small random worlds for the laws: workloads, deployments, policies."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st

from lengthwise.policy import known, named, resolve, scheduler
from lengthwise.policy.contracts import PREFIX_ARGUMENTS
from lengthwise.schema.cost_tables import MERGED, PER_REQUEST, AttentionRule, CostTables, Front, OtherDegree, grid_axis
from lengthwise.schema.deployment import (
    CAPACITY_POLICIES,
    CHUNKING_POLICIES,
    PREFIX_POLICIES,
    RADIX_EVICTION_POLICIES,
    SCHEDULE_POLICIES,
    Deployment,
    EngineLimits,
    KvGroups,
    KvPlan,
    Parallelism,
    Scheduler,
    SglangSettings,
    TrtllmSettings,
)
from lengthwise.schema.specs import AttentionSpec, FfnSpec, GpuSpec, LinkSpec, ModelSpec, NodeSpec
from lengthwise.schema.speculation import Drafter, Speculation
from lengthwise.schema.workload import UNCAPPED, After, Predictions, SharedPrefixes, Workload

MODEL = ModelSpec("tiny", 4, 64, 1000, AttentionSpec(4, 4, 16), FfnSpec(128), 4096)
INFINITY = float("inf")
FAMILIES = ("aged(weight=30)", "aged_gittins(weight=5)", "mlfq(quantum=4, levels=3)")
PHASES = (
    "rra(prefill_batch=1, decode_steps=1)", "rra(prefill_batch=3, decode_steps=2)",
    "rra(prefill_batch=5, decode_steps=7, micro_batches=2)", "rra(prefill_batch=40, decode_steps=30, micro_batches=1)",
)  # fmt: skip
STEADY_PHASES = (
    "rra(prefill_batch=4, decode_steps=3, threshold=0.1, prompt_tokens=160, decode_batch=9)",
    "rra(prefill_batch=7, decode_steps=1, micro_batches=2, threshold=0, prompt_tokens=30, decode_batch=3)",
)  # fmt: skip
MASKED_S = (0.0, 0.0, 3e-9, 2e-7)
FRONTS = (Front(), Front(), Front(0.01), Front(0.0, 0.003), Front(0.02, 0.01), Front(1e-3, 0.2))
LINK = LinkSpec("link", 1e9, 1e-6, "made up")
GPU = GpuSpec("gpu", {"bfloat16": 1e12}, 1e9, 1e11, 100.0, 10.0, 1.0, "made up", "made up")
NODE = NodeSpec("node", 8, LINK, 8, LINK, LINK, "made up")

ROUTERS = sorted(name for name, router in known("router").items() if not router.uses(*PREFIX_ARGUMENTS))
"""Those that any workload may have; test_prefix_cache.py has the others."""
PREFIX_ROUTERS = ("prefix_precise", "prefix_approximate")


def cost_tables(
    stage_layers: list[int], rule: int = PER_REQUEST, scale: float = 1.0, *, additional: bool = False
) -> CostTables:
    """Plausible tables: a floor, a slope, an uneven bump, so that sums in another order show."""
    t, b = np.arange(129) / 128, np.arange(33) / 32
    bump = 1e-5 * np.sin(np.arange(129))
    if rule == MERGED:
        chunk, context = np.arange(513), np.arange(40)
        prefill = 1e-8 * chunk[:, None] * (chunk[:, None] / 2 + 64 * context[None, :])
        decode = 1e-6 * np.arange(33)[:, None] * (1 + context[None, :] / 7)
    else:
        chunk, context = grid_axis(512), grid_axis(1024)
        prefill = 1e-8 * chunk[:, None] * (chunk[:, None] / 2 + context[None, :])
        decode = 1e-6 * grid_axis(32)[:, None] + 3e-9 * grid_axis(4096)[None, :]
    factor = 1.0 + np.linspace(0.0, 0.5, decode.size).reshape(decode.shape)
    return CostTables(
        layer_s=scale * (1e-3 + 2e-3 * t + bump),
        comm_s=scale * (1e-4 + 1e-4 * t),
        embedding_s=scale * 1e-5 * t,
        send_s=scale * (1e-5 + 1e-5 * t),
        head_s=scale * (1e-4 + 1e-4 * b),
        host_s=scale * (2e-4 + 1e-4 * b),
        prefill_s=scale * prefill,
        decode_s=scale * decode,
        stage_layers=np.array(stage_layers),
        rule=AttentionRule(rule, 64, 1.1 if rule == MERGED else 1.0),
        beside_prompts=factor if additional and rule == PER_REQUEST else None,
    )


def of_two_degrees(tables: CostTables, marks: list[int]) -> CostTables:
    """The tables, and others that are slower for the stages that are marked."""
    slower = cost_tables([1], tables.rule.kind, 1.7, additional=tables.beside_prompts is None)
    slower = dataclasses.replace(slower, masked_s=tables.masked_s / 3)
    return dataclasses.replace(tables, other=OtherDegree(slower, np.array(marks)))


@st.composite
def workloads(draw: st.DrawFn, max_requests: int = 40) -> Workload:
    """Few short requests, often at equal times; closed loops too."""
    n = draw(st.integers(1, max_requests))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    spread_s = draw(st.sampled_from([0.0, 0.02, 0.3, 3.0]))
    arrival_s = np.sort(np.round(rng.uniform(0, 1, n) * spread_s, draw(st.sampled_from([2, 9]))))
    concurrency = draw(st.none() | st.integers(1, 8))
    output = rng.integers(1, draw(st.sampled_from([2, 20, 200])), n)
    error = draw(st.sampled_from([0.0, 0.7]))
    again = _predictions(rng, output, error, draw(st.sampled_from([1, 3, 20]))) if draw(st.booleans()) else None
    prompt = rng.integers(1, draw(st.sampled_from([4, 80, 400])), n)
    after = None if concurrency else draw(afters(n, rng))
    prefixes = draw(st.none() | shared_prefixes(prompt, output, after, rng))
    return Workload(
        np.zeros(n) if concurrency else arrival_s,
        prompt,
        output,
        predicted_tokens=None if again else np.round(output * rng.lognormal(0, error, n), 1),
        priority=rng.integers(0, 3, n),
        tenant=rng.integers(0, draw(st.sampled_from([1, 3])), n),
        predictions=again,
        concurrency=concurrency,
        after=after,
        prefixes=prefixes,
    )


@st.composite
def shared_prefixes(
    draw: st.DrawFn, prompt: np.ndarray, output: np.ndarray, after: After | None, rng: np.random.Generator
) -> SharedPrefixes:
    """Prompts that begin with blocks of few contents, or with the turn before, for which ``prompt`` grows in place."""
    n, block_tokens = len(prompt), draw(st.sampled_from([1, 4, 16, 32]))
    turns = np.full(n, -1)
    for i in range(n if after and draw(st.booleans()) else 0):
        parents = after.parent[after.start[i] : after.start[i + 1]]
        if len(parents) and rng.random() < 0.8:
            turns[i] = rng.choice(parents)
            prompt[i] += prompt[turns[i]] + output[turns[i]]
    shared = np.where(turns < 0, rng.integers(0, -(-prompt // block_tokens) + 1), 0)
    ids = rng.integers(0, draw(st.sampled_from([1, 2, 5])), shared.sum())
    return SharedPrefixes(block_tokens, np.concatenate([[0], np.cumsum(shared)]), ids, turns)


@st.composite
def afters(draw: st.DrawFn, n: int, rng: np.random.Generator) -> After | None:
    """Which request comes after which: none, chains, or any of those before."""
    kind = draw(st.sampled_from(["nobody", "nobody", "chains", "any"]))
    if kind == "nobody":
        return None
    chains, share = int(rng.integers(1, n + 1)), rng.choice([0.05, 0.3])
    parents = [
        [i - chains] if kind == "chains" and i >= chains else
        np.flatnonzero(rng.random(i) < share).tolist() if kind == "any" else []
        for i in range(n)
    ]  # fmt: skip
    start = np.concatenate([[0], np.cumsum([len(some) for some in parents])])
    delay_s = np.round(rng.exponential(draw(st.sampled_from([0.0, 0.1])), n), 2)
    return After(start, np.array([p for some in parents for p in some], np.int64), delay_s)


def _predictions(rng: np.random.Generator, output: np.ndarray, error: float, window: int) -> Predictions:
    """Lengths predicted again at every window, rightly or wrongly."""
    rows = -(-output // window)
    start = np.concatenate([[0], np.cumsum(rows)])
    so_far = (np.arange(start[-1]) - np.repeat(start[:-1], rows)) * window
    total = np.maximum(np.round(np.repeat(output, rows) * rng.lognormal(0, error, start[-1]), 1), so_far)
    return Predictions(window, start, total, np.round(rng.uniform(1, 50, start[-1]), 1))


@st.composite
def schedulers(draw: st.DrawFn) -> Scheduler:
    """Any point on the axes."""
    ranks = [*sorted(known("rank")), *FAMILIES]
    beyond = {
        "preemption": draw(
            st.sampled_from(["never", "never", "by_rank", "is_improvement", "worth(factor=0.1, max_preemptions=2)"])
        ),
        "binning": draw(st.sampled_from([None, None, None, "one", "bins(boundaries=[5.0, 50.0])"])),
        "max_wait_s": draw(st.sampled_from([INFINITY, INFINITY, 0.05, 0.5])),
        "batch_wait_s": draw(st.sampled_from([INFINITY, 0.0, 0.1])),
        "preemption_interval_steps": draw(st.sampled_from([1, 4, 50])),
    }
    if draw(st.booleans()):
        name = draw(st.sampled_from(sorted(name for name, one in named().items() if not one.engine_rules)))
        chosen = scheduler(name)
        return Scheduler(
            chosen.rank,
            chosen.victim,
            chosen.batching,
            chosen.memory,
            draw(st.sampled_from(["recompute", "swap"])),
            draw(st.sampled_from(ROUTERS)),
            **(beyond if chosen.preemption == "never" else beyond | {"preemption": chosen.preemption}),
        )
    return Scheduler(
        rank=draw(st.sampled_from(ranks)),
        victim=draw(st.sampled_from(ranks)),
        batching=draw(st.sampled_from([*sorted(known("batching")), *PHASES, *STEADY_PHASES])),
        memory=draw(st.sampled_from([m for m in sorted(known("memory")) if m != "paged_strict"])),
        preemption_mode=draw(st.sampled_from(["recompute", "swap"])),
        router=draw(st.sampled_from(ROUTERS)),
        **beyond,
    )


@st.composite
def prefix_caches(draw: st.DrawFn) -> dict[str, str]:
    """Whose rules a prefix cache has: vLLM's, or SGLang's with any eviction policy."""
    if draw(st.booleans()):
        return {"prefix_cache": "vllm"}
    return {"prefix_cache": "sglang", "radix_eviction_policy": draw(st.sampled_from(RADIX_EVICTION_POLICIES))}


@st.composite
def deployments(draw: st.DrawFn) -> Deployment:
    """Replicas whose memory is often short, at times behind a front."""
    pp = draw(st.sampled_from([1, 1, 2, 3]))
    block_size = draw(st.sampled_from([1, 4, 16]))
    max_len = draw(st.sampled_from([64, 300, 700]))
    least = -(-max_len // block_size)
    blocks = least + draw(st.sampled_from([1, 2, 8, 200])) * draw(st.sampled_from([1, 16 // block_size]))
    seqs = draw(st.integers(1, 12))
    limits = EngineLimits(
        max_num_seqs=seqs,
        max_num_batched_tokens=draw(st.sampled_from([16, 64, 512])),
        max_step_seqs=draw(st.none() | st.integers(1, seqs)),
        block_size=block_size,
        watermark=draw(st.sampled_from([0.0, 0.01, 0.1])),
        timeout_s=draw(st.sampled_from([float("inf"), float("inf"), 0.2])),
        enable_prefix_caching=draw(st.booleans()),
        **draw(prefix_caches()),
    )
    tables = dataclasses.replace(
        cost_tables(
            [2] * pp if draw(st.booleans()) else list(range(1, pp + 1)),
            draw(st.sampled_from([PER_REQUEST, MERGED])),
            additional=draw(st.booleans()),
        ),
        front=draw(st.sampled_from(FRONTS)),
        masked_s=draw(st.sampled_from(MASKED_S)),
    )
    if draw(st.sampled_from([False, False, True])):
        tables = of_two_degrees(tables, draw(st.lists(st.sampled_from([0, 1]), min_size=pp, max_size=pp)))
    return Deployment(
        MODEL,
        GPU,
        NODE,
        Parallelism(1, pp, draw(st.sampled_from([1, 1, 2, 4]))),
        limits,
        draw(schedulers()),
        tables,
        KvPlan(blocks, block_size, 0.0, 0.0, 0.0, 0.0, swap_s_per_block=1e-5),
        max_model_len=max_len,
    )


@st.composite
def sglang_worlds(draw: st.DrawFn) -> tuple[Workload, Deployment]:
    """Requests with limits on replicas that SGLang's rules schedule, with any settings, order, cache and router."""
    chunked, cached = draw(st.booleans()), draw(st.booleans())
    orders = [one for one in SCHEDULE_POLICIES if cached or one not in PREFIX_POLICIES]
    order = draw(st.sampled_from(["fcfs", *orders]))
    settings = SglangSettings(
        draw(st.sampled_from([0.0, 0.1, 1.0, 1.6])), draw(st.sampled_from([16, 64, 16384])), chunked,
        chunked and draw(st.booleans()), order,
    )  # fmt: skip
    reserve = draw(reserves())
    own = {} if order == "fcfs" else {"rank": "queue_order", "max_wait_s": INFINITY}
    workload, deployment = draw(engine_worlds("queue_order", own, sglang=settings, **reserve))
    eviction = draw(st.sampled_from(["lru", "lru", *RADIX_EVICTION_POLICIES]))
    limits = dataclasses.replace(
        deployment.limits, enable_prefix_caching=cached, prefix_cache="sglang", radix_eviction_policy=eviction
    )
    return workload, dataclasses.replace(deployment, limits=limits)


@st.composite
def overlapping_worlds(draw: st.DrawFn) -> tuple[Workload, Deployment]:
    """Requests that SGLang's rules schedule with overlap of steps, often with few blocks."""
    workload, other = draw(sglang_worlds())
    made = dataclasses.replace(other.scheduler, reserve=False, async_scheduling=True, hide_host=draw(st.booleans()))
    host = draw(st.sampled_from([0.0, 1.0, 20.0]))  # 20: longer than a step takes on the GPU
    cost = dataclasses.replace(other.cost, host_s=host * other.cost.host_s)
    least = -(-other.max_model_len // other.kv.block_size) + draw(st.sampled_from([0, 1, 4]))
    kv = dataclasses.replace(other.kv, num_blocks=draw(st.sampled_from([other.kv.num_blocks, least, least])))
    limits = dataclasses.replace(other.limits, timeout_s=INFINITY, max_in_flight=None)
    return workload, dataclasses.replace(other, scheduler=made, cost=cost, kv=kv, limits=limits)


@st.composite
def trtllm_worlds(draw: st.DrawFn) -> tuple[Workload, Deployment]:
    """Requests on replicas that TensorRT-LLM's rules schedule, with any settings, rank and router."""
    policy, chunked = draw(st.sampled_from(CAPACITY_POLICIES)), draw(st.booleans())
    chunking = draw(st.sampled_from(CHUNKING_POLICIES)) if chunked else CHUNKING_POLICIES[0]
    reserve = draw(reserves()) if policy == "MAX_UTILIZATION" else {}
    workload, deployment = draw(engine_worlds("fcfs", trtllm=TrtllmSettings(policy, chunked, chunking), **reserve))
    if policy == "MAX_UTILIZATION" and draw(st.booleans()):
        workload = dataclasses.replace(workload, max_tokens=None, ignore_eos=None)
    limits = deployment.limits
    tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs, deployment.kv.block_size)
    return workload, dataclasses.replace(deployment, limits=dataclasses.replace(limits, max_num_batched_tokens=tokens))


@st.composite
def reserves(draw: st.DrawFn) -> dict[str, Any]:
    """Whether memory is reserved by predicted length."""
    share = draw(st.sampled_from([0.0, 0.01, 0.2, 30.0, float("inf")]))
    budget = draw(st.sampled_from([float("inf"), 0.0, 0.3]))
    return {"reserve": draw(st.booleans()), "max_recompute_share": share, "max_preemptions_per_request": budget}


@st.composite
def vllm_worlds(draw: st.DrawFn) -> tuple[Workload, Deployment]:
    """Requests with limits, on replicas that reserve memory by predicted length and form steps as vLLM v1 does."""
    workload, other = draw(workloads()), draw(deployments())
    axes = {"batching": "unified", "memory": "paged_by_chunk", **draw(reserves())}
    workload = draw(limited(workload, other.max_model_len))
    if draw(st.booleans()):
        workload = dataclasses.replace(workload, max_tokens=None, ignore_eos=None)
    return workload, dataclasses.replace(other, scheduler=dataclasses.replace(other.scheduler, **axes))


@st.composite
def threshold_worlds(draw: st.DrawFn) -> tuple[Workload, Deployment]:
    """Requests on replicas of any vLLM worlds, on which several prompts are computed in small chunks side by side."""
    workload, other = draw(st.one_of(async_worlds(), priority_worlds(), vllm_worlds()))
    limits = dataclasses.replace(
        other.limits, max_step_seqs=None, prefix_cache="vllm", radix_eviction_policy="lru", max_num_batched_tokens=draw(
            st.integers(other.limits.max_num_seqs, 64))
    )  # fmt: skip
    made = dataclasses.replace(
        other.scheduler,
        victim=other.scheduler.victim if other.scheduler.victim == "priority" else "latest_admitted",
        preemption_mode="recompute",
        long_prefill_token_threshold=draw(st.integers(1, 30)),
    )
    parallel = dataclasses.replace(other.parallel, pp=1)
    tables = dataclasses.replace(
        cost_tables([2], other.cost.rule.kind), front=other.cost.front, host_s=other.cost.host_s
    )
    return workload, dataclasses.replace(other, limits=limits, scheduler=made, parallel=parallel, cost=tables)


@st.composite
def limited(draw: st.DrawFn, workload: Workload, max_model_len: int) -> Workload:
    """The requests with limits of their clients, which some outputs reach exactly."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    prompt, output, n = workload.prompt_tokens, workload.output_tokens, len(workload)
    limit = np.ceil(output * rng.uniform(1, draw(st.sampled_from([1.0, 1.5, 8.0])), n)).astype(np.int64)
    limit[rng.random(n) < 0.1] = UNCAPPED
    limit[prompt + limit > max_model_len] = UNCAPPED
    exact = (rng.random(n) < draw(st.sampled_from([0.0, 0.0, 0.6]))) & (limit < UNCAPPED)
    return dataclasses.replace(workload, max_tokens=np.where(exact, output, limit), ignore_eos=exact)


@st.composite
def engine_worlds(
    draw: st.DrawFn, own_rank: str, given: dict[str, Any] | None = None, **settings: Any
) -> tuple[Workload, Deployment]:
    """Requests with limits on replicas that an engine's own rules schedule, with any router, and rank if not given."""
    workload, other = draw(workloads()), draw(deployments())
    workload = draw(limited(workload, other.max_model_len))
    limits = dataclasses.replace(other.limits, max_step_seqs=None, enable_prefix_caching=False, watermark=None)
    ranks = [*sorted(known("rank")), *[own_rank] * 8]
    axes = {"rank": draw(st.sampled_from(ranks)), "max_wait_s": draw(st.sampled_from([INFINITY, INFINITY, 0.05, 0.5]))}
    made = Scheduler(router=draw(st.sampled_from(ROUTERS)), **{**axes, **(given or {}), **settings})
    parallel = dataclasses.replace(other.parallel, pp=1)
    tables = dataclasses.replace(cost_tables([2]), front=other.cost.front, masked_s=other.cost.masked_s)
    deployment = dataclasses.replace(other, limits=limits, scheduler=made, parallel=parallel, cost=tables)
    return workload, deployment


@st.composite
def kv_groups(draw: st.DrawFn, block_size: int, in_flight_tokens: int, states: st.SearchStrategy[int]) -> KvGroups:
    local = draw(st.sampled_from([0, 1, 1, 3]))
    window, is_chunked = draw(st.sampled_from([1, 2, 5, 16, 33, 100])), draw(st.booleans())
    full = draw(st.integers(0 if local else 1, 2))
    return KvGroups(block_size, full, local, window, is_chunked, draw(states), in_flight_tokens)


@st.composite
def hybrid_worlds(draw: st.DrawFn, *, caches: bool = True) -> tuple[Workload, Deployment]:
    """Requests on replicas with little memory, whose layers form several KV cache groups, some with prefix caches."""
    victims = sorted(set(known("rank")) - {"priority"})
    victim = draw(st.sampled_from(["latest_admitted", *victims]))
    workload, other = draw(engine_worlds("fcfs_preempted_first", memory="paged_by_chunk", victim=victim))
    groups = draw(kv_groups(other.kv.block_size, other.limits.max_num_batched_tokens, st.sampled_from([0, 0, 2])))
    caches, states = caches and draw(st.booleans()), groups.states
    if caches and states:
        tokens = other.limits.max_num_batched_tokens
        groups = KvGroups(other.kv.block_size, max(1, groups.full), states, 2, in_flight_tokens=tokens, aligned=True)
    blocks = groups.longest(other.max_model_len) + draw(st.sampled_from([0, 1, 2, 8, 200]))
    limits = dataclasses.replace(
        other.limits, enable_prefix_caching=caches, prefix_cache="vllm", radix_eviction_policy="lru",
        kv_offloading=None, max_step_seqs=None if groups.aligned else other.limits.max_step_seqs,
    )  # fmt: skip
    made = other.scheduler
    if limits.enable_prefix_caching and workload.prefixes is not None and draw(st.booleans()):
        made = dataclasses.replace(made, router=draw(st.sampled_from(PREFIX_ROUTERS)))
    other = dataclasses.replace(other, limits=limits, scheduler=made)
    return workload, dataclasses.replace(other, kv=dataclasses.replace(other.kv, num_blocks=blocks, groups=groups))


@st.composite
def speculations(draw: st.DrawFn) -> Speculation:
    """Any acceptance, and a drafter with costs of its own, those of a layer, or none."""
    k = draw(st.integers(1, 6))
    rates = draw(st.sampled_from([0.0, 0.5, 1.0, None]))
    acceptance = tuple(draw(st.lists(st.floats(0, 1), min_size=k, max_size=k + 1))) if rates is None else rates
    effect = draw(st.sampled_from([0.0, 0.0, 0.1, 0.9]))
    drafter = draw(st.sampled_from([Drafter(), Drafter(1.0, 1.0), Drafter(3.0, 0.25, cost_tables([3], scale=0.3))]))
    return Speculation(
        draw(st.sampled_from(["ngram", "eagle", "mtp"])),
        k,
        acceptance,
        draft_rate=draw(st.sampled_from([1.0, 0.4])),
        request_effect=effect,
        length_correlation=draw(st.sampled_from([0.0, 0.7, -1.0])) if effect else 0.0,
        burstiness=draw(st.sampled_from([0.0, 0.6, 1.0])),
        per_batch_size=draw(st.sampled_from([(), ((1, 2, k), (4, 9, 0)), ((1, 1, 0), (2, 2, 1))])),
        pass_s=draw(st.sampled_from([0.0, 1e-3])),
        drafter=drafter,
    )


@st.composite
def speculation_worlds(draw: st.DrawFn) -> tuple[Workload, Deployment]:
    """Requests on replicas with little memory, whose decodes verify proposed tokens."""
    workload, other = draw(workloads()), draw(deployments())
    chosen = draw(speculations())
    seqs = other.limits.max_num_seqs
    limits = dataclasses.replace(
        other.limits, max_step_seqs=None, prefix_cache="vllm", radix_eviction_policy="lru", kv_offloading=None,
        max_num_batched_tokens=seqs * (1 + chosen.num_speculative_tokens) + draw(st.sampled_from([0, 1, 30, 500])),
    )  # fmt: skip
    made = dataclasses.replace(
        other.scheduler, victim="latest_admitted", batching="unified",
        memory=draw(st.sampled_from(["paged_by_chunk", "paged_by_chunk", "paged"])),
        preemption_mode="recompute", preemption="never",
    )  # fmt: skip
    tables = dataclasses.replace(
        cost_tables([2], other.cost.rule.kind, additional=other.cost.beside_prompts is not None), front=other.cost.front
    )
    kv, least = other.kv, -(-other.max_model_len // other.kv.block_size)
    blocks = draw(st.sampled_from([kv.num_blocks, least, least + 1, least + 4]))
    return workload, dataclasses.replace(
        other, limits=limits, scheduler=made, cost=tables, parallel=dataclasses.replace(other.parallel, pp=1),
        kv=dataclasses.replace(kv, num_blocks=blocks), speculation=chosen,
    )  # fmt: skip


@st.composite
def priority_worlds(draw: st.DrawFn) -> tuple[Workload, Deployment]:
    """Requests on replicas without memory to spare, which vLLM's rules of priority schedule."""
    workload, other = draw(workloads()), draw(deployments())
    limits = dataclasses.replace(other.limits, max_step_seqs=None)
    by_priority = Scheduler(
        draw(st.sampled_from(["priority", "fcfs_preempted_first"])), "priority", memory="paged_by_chunk",
        preemption_mode=draw(st.sampled_from(["recompute", "swap"])), router=draw(st.sampled_from(ROUTERS)),
    )  # fmt: skip
    blocks = -(-other.max_model_len // other.kv.block_size) + draw(st.sampled_from([0, 1, 4]))
    kv = dataclasses.replace(other.kv, num_blocks=blocks)
    return workload, dataclasses.replace(other, limits=limits, scheduler=by_priority, kv=kv)


@st.composite
def async_worlds(draw: st.DrawFn, *, grouped: bool = False) -> tuple[Workload, Deployment]:
    """Requests that end by EOS or by their limits, on replicas that form each step before its predecessor ends."""
    workload, other = draw(workloads()), draw(deployments())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, share = len(workload), draw(st.sampled_from([0.0, 0.5, 1.0]))
    limit = workload.output_tokens + rng.integers(1, 40, n) * (rng.random(n) < share)
    limit[(workload.prompt_tokens + limit > other.max_model_len) | (rng.random(n) < 0.1)] = UNCAPPED
    ranks = sorted(known("rank"))
    made = Scheduler(
        draw(st.sampled_from([*ranks, *["fcfs_preempted_first"] * 8])),
        draw(st.sampled_from([*[name for name in ranks if name != "priority"], *["latest_admitted"] * 8])),
        memory=draw(st.sampled_from([name for name, one in known("memory").items() if not one.uses("peak_tokens")])),
        router=draw(st.sampled_from(ROUTERS)),
        binning=draw(st.sampled_from([None, None, "bins(boundaries=[5.0, 50.0])"])),
        max_wait_s=draw(st.sampled_from([INFINITY, INFINITY, 0.05, 0.5])),
        batch_wait_s=draw(st.sampled_from([0.0, 0.1])),
        async_scheduling=True,
        hide_host=draw(st.booleans()),
    )
    limits = dataclasses.replace(
        other.limits, max_step_seqs=None, timeout_s=INFINITY, prefix_cache="vllm", radix_eviction_policy="lru"
    )
    host = draw(st.sampled_from([0.0, 1.0, 20.0]))  # 20: longer than a step takes on the GPU
    tables = cost_tables([2], other.cost.rule.kind)
    tables = dataclasses.replace(
        tables, front=other.cost.front, masked_s=other.cost.masked_s, host_s=host * tables.host_s
    )
    parallel = dataclasses.replace(other.parallel, pp=1)
    least = -(-other.max_model_len // other.kv.block_size) + draw(st.sampled_from([0, 1, 4]))
    blocks = draw(st.sampled_from([other.kv.num_blocks, least, least]))
    kv = dataclasses.replace(other.kv, num_blocks=blocks)
    if grouped and draw(st.booleans()):
        states = st.just(0) if limits.enable_prefix_caching else st.sampled_from([0, 0, 2])
        groups = draw(kv_groups(kv.block_size, 2 * limits.max_num_batched_tokens, states))
        blocks = groups.longest(other.max_model_len) + draw(st.sampled_from([0, 1, 2, 8, 200]))
        kv = dataclasses.replace(kv, num_blocks=blocks, groups=groups)
        made = dataclasses.replace(made, memory="paged_by_chunk")
    deployment = dataclasses.replace(other, limits=limits, scheduler=made, parallel=parallel, cost=tables, kv=kv)
    return dataclasses.replace(workload, max_tokens=limit if draw(st.booleans()) else None), deployment


@st.composite
def rank_worlds(draw: st.DrawFn) -> tuple[Workload, Deployment]:
    """Requests on one or two replicas of data-parallel ranks, scheduled by any rules, some in pipelines."""
    kinds = {
        "plain": st.tuples(workloads(), deployments()),
        "rules": st.one_of(vllm_worlds(), priority_worlds(), hybrid_worlds(), sglang_worlds(), trtllm_worlds()),
        "ahead": st.one_of(async_worlds(grouped=True), threshold_worlds()),
        "speculation": speculation_worlds(),
    }
    workload, other = draw(kinds[draw(st.sampled_from(sorted(kinds)))])
    router = other.scheduler.router
    made = dataclasses.replace(other.scheduler, router="vllm_internal" if router == "central" else router)
    is_plain = not (made.engine_rules or made.async_scheduling or made.long_prefill_token_threshold)
    has_stages = is_plain and other.speculation is None and other.kv.groups is None
    layers = draw(st.lists(st.integers(1, 3), min_size=3, max_size=3))
    stages = layers[: draw(st.integers(1, 3)) if has_stages else 1]
    tables = cost_tables(stages, other.cost.rule.kind, additional=draw(st.booleans()))
    tables = dataclasses.replace(
        tables, front=other.cost.front, masked_s=other.cost.masked_s, shared_s=draw(shared_seconds()),
        host_s=other.cost.host_s,
    )  # fmt: skip
    limits = other.limits
    if has_stages:
        limits = dataclasses.replace(limits, max_in_flight=draw(in_flight(made.batching)))
    parallel = Parallelism(1, len(stages), draw(st.integers(1, 2)), dp=draw(st.integers(1, 4)))
    return workload, dataclasses.replace(other, limits=limits, scheduler=made, parallel=parallel, cost=tables)


def in_flight(batching: str) -> st.SearchStrategy[int | None]:
    """Steps in flight of data-parallel ranks: one where the batching policy counts rounds."""
    return st.just(1) if resolve("batching", batching).uses("phase_rounds") else st.none() | st.integers(1, 4)


@st.composite
def shared_seconds(draw: st.DrawFn) -> np.ndarray | None:
    """Seconds of a layer that ranks compute together, by tokens: none, or uneven ones in a short or a long table."""
    rows = draw(st.sampled_from([0, 0, 2, 60, 129, 600]))
    return 2e-3 + 1e-5 * np.arange(rows) + 1e-5 * np.sin(np.arange(rows)) if rows else None
