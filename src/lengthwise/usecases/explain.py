"""Explanation of a deployment without simulation (what fits in memory, what a step costs), and of one request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lengthwise import cost, engine, policy
from lengthwise.cost import HostOverhead, OperatorTime, model_error
from lengthwise.policy.contracts import BATCHING_ARGUMENTS
from lengthwise.report.json_file import deployment_facts, plain
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Status
from lengthwise.schema.workload import Workload
from lengthwise.search import ceiling
from lengthwise.usecases.variants import Variant, engine_note

BOUNDS = ("compute", "memory", "network", "latency")
REQUEST_TIMES = ("arrival_s", "scheduled_s", "first_token_s", "finished_s")


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch of requests with ``context_tokens`` tokens each."""

    context_tokens: int
    seqs: int  # requests that a replica admits at once
    by_memory: int  # requests that fit in the KV cache, without the limit of sequences
    # Tokens that the memory policy reserves for each request if they need more blocks than its own tokens, else 0.
    reserved_tokens: int = 0


@dataclass(frozen=True)
class Step:
    """One step of a replica: its shape and the time of each operator."""

    name: str  # the shape in a word or two
    tokens: int  # tokens it computes
    operators: list[OperatorTime]
    # The larger of all FLOPs at peak compute and all bytes at peak bandwidth, without launches and communication.
    floor_s: float
    hides_host: bool = False

    @property
    def counted(self) -> list[OperatorTime]:
        """Return the operators that determine the step's time: if it hides the host, the host or all others."""
        host_s = sum(operator.seconds for operator in self.operators if operator.name == "host")
        is_host = host_s > sum(operator.seconds for operator in self.operators) - host_s
        return [one for one in self.operators if not self.hides_host or (one.name == "host") == is_host]

    @property
    def seconds(self) -> float:
        """Return the step's time by the roofline model, the sum over its counted operators."""
        return sum(operator.seconds for operator in self.counted)

    @property
    def bound_shares(self) -> dict[str, float]:
        """Return for each resource the share of the step's time that operators limited by this resource take."""
        total = self.seconds
        return {b: sum(o.seconds for o in self.counted if o.bound == b) / total for b in BOUNDS}


@dataclass(frozen=True)
class CacheTier:
    """Where KV blocks of prefixes are cached: in a replica's GPUs, in its CPU memory, or in storage."""

    name: str
    gb: float  # of all GPUs of a replica, 1e9 bytes; infinite: no limit
    tokens: float  # full blocks only


@dataclass(frozen=True)
class Explanation:
    """Batches that fit, steps of typical shapes, and caches of a deployment."""

    deployment: Deployment
    context_tokens: int  # tokens of a mean request half-way through its output
    fits: list[LargestBatch]  # largest batches, by the memory policy
    steps: list[Step]  # steps of typical shapes
    # Whether the memory policy reads predicted lengths, so that it may admit other numbers of requests than ``fits``.
    by_prediction: bool = False
    tiers: tuple[CacheTier, ...] = ()  # empty without a prefix cache
    shares_prefixes: bool = False  # whether prompts of the workload may begin alike
    sides: Sides | None = None  # of separate decode replicas; the other fields are then those of the prefill side

    @property
    def notes(self) -> tuple[str, ...]:
        """Return sentences about what limits the reliability of the deployment's costs."""
        return model_error.deployment_notes(self.deployment)


@dataclass(frozen=True)
class Sides:
    """What limits a deployment with separate prefill and decode replicas."""

    decode: Explanation  # the decode side
    transfer_s: float  # mean time of a KV transfer on an idle link; layerwise: of all layers, also during the prefill
    # bound on the rate by each part without preemptions: both sides, KV transfer, and front end if any
    rates_rps: dict[str, float]
    decodes_per_prefill: float  # decode replicas for each prefill replica with which both sides have the same bound

    @property
    def binds(self) -> str:
        """Return the part with the smallest bound."""
        return min(self.rates_rps, key=lambda name: self.rates_rps[name])


def explanation_json(name: str, found: Explanation) -> dict[str, Any]:
    """Return an explanation as values for JSON, with the time of each step in seconds."""
    steps = [
        {"name": step.name, "tokens": step.tokens, "s": step.seconds, "floor_s": step.floor_s}
        | {"bound_shares": step.bound_shares, "operators": step.operators}
        for step in found.steps
    ]
    fields: dict[str, Any] = {
        "name": name,
        "deployment": deployment_facts(found.deployment),
        "context_tokens": found.context_tokens,
        "largest_batches": found.fits,
        "steps": steps,
        "prefix_cache": found.tiers,
        "notes": found.notes,
    }
    if found.sides is not None:
        sides = {
            name: getattr(found.sides, name) for name in ("transfer_s", "rates_rps", "decodes_per_prefill", "binds")
        }
        fields["sides"] = {**sides, "decode": explanation_json("decode", found.sides.decode)}
    made: dict[str, Any] = plain(fields)
    return made


def by_group(variants: Sequence[Variant]) -> Iterator[Variant]:
    """Yield each variant; of one with several groups of replicas, a variant for each group, named after it."""
    for one in variants:
        groups = one.deployment.replica_groups
        for number, group in enumerate(groups):
            name = one.name if len(groups) == 1 else f"{one.name}, group {number}"
            yield replace(one, name=name, deployment=group)


def explain(variant: Variant, seed: int = 0) -> Explanation:
    """Return the batches that fit, and steps of typical shapes, for the variant's own workload.

    There are up to four shapes: one decoding sequence, as many decoding sequences as fit when half of their outputs is
    done, one prompt of mean length, and, where steps mix them, decodes together with as many prompt tokens as the token
    budget leaves: of one prompt, or with ``long_prefill_token_threshold`` of several. Separate prefill replicas have
    prompts only, decode replicas decodes only.
    """
    deployed, requests = variant.deployment, variant.workload(seed)
    deployed.require_no_speculation("explain")
    with engine_note(variant.scenario):
        deployed.require_known_rules(requests)
    if deployed.decode is None:
        return _explained(variant, deployed, requests)
    top, decodes = ceiling(deployed, requests).parts, deployed.decode.parallel.replicas
    link, decoded = deployed.decode.kv_transfer, requests.output_tokens > 1
    token_s = link.token_s / min(1.0, link.links_at_once)
    decoded &= requests.prompt_tokens > deployed.decode.max_local_prefill_length
    found = Sides(
        decode=_explained(variant, deployed.decoding(), requests, prefills=deployed.decode.prefills),
        transfer_s=float(np.mean((link.fixed_s + token_s * requests.prompt_tokens)[decoded])) if decoded.any() else 0.0,
        rates_rps=top,
        decodes_per_prefill=top["prefill side"] * decodes / (deployed.parallel.replicas * top["decode side"]),
    )
    prefill = _explained(variant, replace(deployed, decode=None), requests, decodes=False)
    return replace(prefill, deployment=deployed, sides=found)


def _explained(
    variant: Variant, deployed: Deployment, requests: Workload, *, prefills: bool = True, decodes: bool = True
) -> Explanation:
    """Return the explanation of replicas that prefill, decode, or do both."""
    limits, longest = deployed.limits, deployed.max_model_len
    memory = policy.resolve("memory", deployed.scheduler.memory)
    mean_prompt = float(requests.prompt_tokens.mean())
    context = max(1, min(round(mean_prompt + decodes * float(requests.output_tokens.mean()) / 2), longest))
    reserved = 0
    if deployed.scheduler.reserves_max_tokens and requests.max_tokens is not None:
        reserved = round(float(np.minimum(requests.prompt_tokens + requests.max_tokens, longest).mean()))
    fits = [_fit(deployed, memory, tokens, reserved) for tokens in sorted({context, max(1, longest // 2), longest})]

    seqs = max(1, _fit(deployed, memory, context, reserved).seqs)
    seqs = min(seqs, limits.max_step_seqs or seqs)
    prompt = max(1, min(round(mean_prompt), longest))
    shapes = [("decode 1", 1, 0)] if decodes else []
    if seqs > 1 and decodes:
        shapes.append((f"decode {seqs:,}", seqs, 0))
    if prefills:
        shapes.append((f"prompt {prompt:,}", 0, prompt))
    if prefills and decodes and limits.max_num_batched_tokens > seqs and _mixes(deployed):
        chunk = min(limits.max_num_batched_tokens - seqs, longest)
        shapes.append((f"{seqs:,} + {chunk:,}", seqs, chunk))
    overhead = cost.host_overhead(variant.scenario.deployment.host_overhead) or HostOverhead()
    steps = [_step(deployed, name, count, chunk, context, overhead) for name, count, chunk in shapes]
    by_prediction = deployed.scheduler.reserve or memory.uses("predicted_tokens", "peak_tokens")
    return Explanation(deployed, context, fits, steps, by_prediction, _tiers(deployed), requests.prefixes is not None)


def _mixes(deployed: Deployment) -> bool:
    """Return whether a step can have decodes and prompts."""
    scheduler, limits = deployed.scheduler, deployed.limits
    if scheduler.engine_rules:
        return scheduler.sglang is None or scheduler.sglang.enable_mixed_chunk
    form = policy.interpreted(policy.resolve("batching", scheduler.batching))
    sizes = {"token_budget": limits.max_num_batched_tokens, "max_num_seqs": limits.max_num_seqs}
    return not form(**(dict.fromkeys(BATCHING_ARGUMENTS, 1) | sizes))[2] & policy.DECODES_WAIT


def _tiers(deployed: Deployment) -> tuple[CacheTier, ...]:
    if not deployed.limits.enable_prefix_caching:
        return ()
    offloading, size, gb = deployed.limits.kv_offloading, deployed.kv.block_size, deployed.offloaded_block_bytes / 1e9
    kv_tokens = deployed.kv.kv_tokens(deployed.max_model_len)
    tiers = [CacheTier("KV cache of the GPUs", deployed.kv.num_blocks * gb, kv_tokens)]
    if offloading is not None and deployed.offload_blocks:
        tiers.append(CacheTier("CPU memory", offloading.size_gb, deployed.offload_blocks * size))
        if offloading.storage is not None and deployed.storage_blocks:
            name = "storage of all replicas" if offloading.storage.shared else "storage"
            tiers.append(CacheTier(name, offloading.storage.size_gb, deployed.storage_blocks * size))
    return tuple(tiers)


def _fit(deployed: Deployment, memory: policy.Policy, context_tokens: int, reserved_tokens: int) -> LargestBatch:
    """Return the largest batch that fits, where each request takes ``reserved_tokens`` or more.

    The memory policy sees prompts of ``context_tokens`` tokens, without outputs.
    """
    size, total, limits = deployed.kv.block_size, deployed.kv.num_blocks, deployed.limits
    arguments = {
        "context_tokens": context_tokens,
        "chunk_tokens": min(context_tokens, limits.max_num_batched_tokens),
        "predicted_tokens": 0.0,
        "max_model_len": deployed.max_model_len,
        "block_size": size,
        "free_blocks": total,
        "total_blocks": total,
        "watermark_blocks": int(deployed.watermark * total),
        "num_running": 0,
        "peak_tokens": context_tokens,
    }
    if (groups := deployed.kv.groups) is not None:
        first = groups.required(context_tokens, deployed.max_model_len)
        by_memory = 1 + (total - first) // groups.blocks(context_tokens, context_tokens - 1)
        return LargestBatch(context_tokens, min(by_memory, limits.max_num_seqs), by_memory, 0)
    own = -(-context_tokens // size)
    taken = max(int(policy.interpreted(memory)(**arguments)), -(-reserved_tokens // size))
    by_memory = total // max(own, taken)
    return LargestBatch(
        context_tokens, min(by_memory, limits.max_num_seqs), by_memory, taken * size if taken > own else 0
    )


def _step(
    deployed: Deployment, name: str, decodes: int, chunk: int, context_tokens: int, overhead: HostOverhead
) -> Step:
    where = (deployed.model, deployed.gpu, deployed.node, deployed.parallel, deployed.limits)
    most, cached = deployed.scheduler.long_prefill_token_threshold if decodes else 0, decodes * context_tokens
    prefill = [(min(most or chunk, chunk - start), 0) for start in range(0, chunk, most or max(1, chunk))]
    operators = cost.operators(*where, decode_seqs=decodes, kv_tokens=cached, prefill=prefill, host=overhead)
    local = [operator for operator in operators if operator.bound != "network"]
    compute_s = sum(o.flops for o in local) / deployed.gpu.flops(deployed.limits.weight_dtype or deployed.model.dtype)
    memory_s = sum(o.bytes for o in local) / deployed.gpu.bandwidth_bytes_per_s
    tokens = deployed.parallel.dp * (decodes + chunk)
    return Step(name, tokens, operators, max(compute_s, memory_s), deployed.scheduler.hide_host)


@dataclass(frozen=True)
class CacheUse:
    """Tokens that a request need not compute: cached ones, and loaded ones after them.

    Computing them would cost ``saved_s``: the time of the prompt alone on an idle replica, less the time of the other
    tokens. All of its loads together take ``load_s``. Of the loaded tokens, ``storage_tokens`` were read from storage
    before, while the request waited in the queue.
    """

    cached_tokens: int
    loaded_tokens: int
    storage_tokens: int
    load_s: float
    saved_s: float


@dataclass(frozen=True)
class RequestExplanation:
    """Times, cache hits and replicas of one simulated request. NaN and -1 stand for events that did not happen."""

    number: int
    status: Status
    session: int | None  # number of the request's session; ``turn`` is its place there, from 0; None without sessions
    turn: int | None
    # Requests that must finish before. The request was sent ``delay_s`` after the last of them finished.
    parents: tuple[int, ...]
    delay_s: float
    previous_turn: int  # request that the prompt continues, or else the request before it in its session, or -1
    prompt_tokens: int
    # tokens at the prompt's start that another prompt may share: the previous turn, or shared blocks
    shared_tokens: int
    cache: CacheUse  # tokens found in the replica's cache and in CPU memory at the first admission
    replica: int  # replica that last admitted the request; ``previous_replica`` is that of the previous turn
    previous_replica: int
    times_s: dict[str, float]  # arrival_s, scheduled_s, first_token_s, finished_s
    output_tokens: int


def explain_request(variant: Variant, number: int, seed: int = 0) -> RequestExplanation:
    """Return times, cache hits and replicas of the request ``number`` (from 0) in a simulation with this seed.

    Raises InputError if the workload has no such request.
    """
    workload, deployed = variant.workload(seed), variant.deployment
    if not 0 <= number < len(workload):
        raise InputError(f"a request must have a number from 0 to {len(workload) - 1}; it is {number}")
    settings = variant.scenario.run
    simulated = engine.simulate(
        workload, deployed, seed=seed, time_limit_s=settings.time_limit_s, strict=settings.strict, max_log_steps=0
    )
    r, after, prefixes = simulated.requests, workload.after, workload.prefixes
    parents = () if after is None else tuple(after.parent[after.start[number] : after.start[number + 1]].tolist())
    continued = -1 if prefixes is None else int(prefixes.turns[number])
    previous = int(workload.previous_turn[number])
    assert r.cached_tokens is not None
    assert r.loaded_tokens is not None
    assert r.load_s is not None
    assert r.storage_tokens is not None
    columns = (r.prompt_tokens, r.cached_tokens, r.loaded_tokens, r.storage_tokens)
    prompt, cached, loaded, read = (int(tokens[number]) for tokens in columns)
    shared = 0
    if continued >= 0:
        shared = int((workload.prompt_tokens + workload.output_tokens)[continued])
    elif prefixes is not None:
        shared = min(int(np.diff(prefixes.start)[number]) * prefixes.block_tokens, prompt)
    ends = np.cumsum([group.parallel.ranks for group in deployed.replica_groups[:-1]])
    group = deployed.replica_groups[int(np.searchsorted(ends, int(r.replica[number]), side="right"))]
    step_tokens = group.limits.max_num_batched_tokens
    full_s, rest_s = cost.prompt_seconds(
        group.cost, np.array([prompt, prompt]), np.array([0, cached + loaded]), step_tokens
    ).tolist()
    has_session = after is not None and {"session", "turn"} <= set(workload.extra)
    return RequestExplanation(
        number=number,
        status=Status(int(r.status[number])),
        session=int(workload.extra["session"][number]) if has_session else None,
        turn=int(workload.extra["turn"][number]) if has_session else None,
        parents=parents,
        delay_s=0.0 if after is None or after.delay_s is None else float(after.delay_s[number]),
        previous_turn=previous,
        prompt_tokens=prompt,
        shared_tokens=shared,
        cache=CacheUse(cached, loaded, read, float(r.load_s[number]), full_s - rest_s),
        replica=int(r.replica[number]),
        previous_replica=-1 if previous < 0 else int(r.replica[previous]),
        times_s={name: float(getattr(r, name)[number]) for name in REQUEST_TIMES},
        output_tokens=int(r.output_tokens[number]),
    )
