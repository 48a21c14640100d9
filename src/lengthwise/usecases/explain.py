"""Explain a deployment without simulating: what fits, and what a step costs."""

from __future__ import annotations

from dataclasses import dataclass

from lengthwise import cost, policy
from lengthwise.cost import HostOverhead, OperatorTime, model_error
from lengthwise.schema.deployment import Deployment
from lengthwise.usecases.variants import Variant

BOUNDS = ("compute", "memory", "network", "latency")


@dataclass(frozen=True)
class Fit:
    """The largest batch of requests that all have ``context_tokens``."""

    context_tokens: int
    seqs: int  # what a replica takes at once
    by_memory: int  # what the KV cache alone would hold
    # What the memory policy reserves for each request if that exceeds the blocks of its tokens, else 0.
    reserved_tokens: int = 0


@dataclass(frozen=True)
class Step:
    """One step of a replica: its shape, and each operator's time."""

    name: str  # the shape in a word or two
    tokens: int  # tokens it computes
    operators: list[OperatorTime]
    # Seconds at the peaks of the data sheet: the larger of all FLOPs at the peak and all bytes at the
    # bandwidth, no launches, no communication.
    floor_s: float

    @property
    def seconds(self) -> float:
        """Return the step's time by the roofline: all operators."""
        return sum(operator.seconds for operator in self.operators)

    @property
    def bound_shares(self) -> dict[str, float]:
        """Return by resource the share of the time in operators that it bounds."""
        total = self.seconds
        return {b: sum(o.seconds for o in self.operators if o.bound == b) / total for b in BOUNDS}


@dataclass(frozen=True)
class Explanation:
    """The result of :func:`explain`."""

    deployment: Deployment
    context_tokens: int  # what a request has half-way through its output
    fits: list[Fit]  # largest batches, by the memory policy
    steps: list[Step]  # steps of typical shapes
    # Whether the memory policy reads predicted lengths, so that it may admit fewer or more requests than
    # ``fits`` has.
    by_prediction: bool = False

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what limits the trust in the deployment's costs, a sentence each."""
        return model_error.deployment_notes(self.deployment)


def explain(variant: Variant, seed: int = 0) -> Explanation:
    """Return what fits, and steps of typical shapes for the variant's own workload.

    The shapes: one sequence decoding; as many as fit half-way through their outputs; one prompt of mean length alone;
    and decodes sharing the step with as much of a prompt as the budget leaves.
    """
    variant.deployment.require_one_side("explain")
    deployed, requests = variant.deployment, variant.workload(seed)
    limits, longest = deployed.limits, deployed.max_model_len
    memory = policy.resolve("memory", deployed.scheduler.memory)
    mean_prompt = float(requests.prompt_tokens.mean())
    context = max(1, min(round(mean_prompt + float(requests.output_tokens.mean()) / 2), longest))
    fits = [_fit(deployed, memory, tokens) for tokens in sorted({context, max(1, longest // 2), longest})]

    seqs = max(1, _fit(deployed, memory, context).seqs)
    seqs = min(seqs, limits.max_step_seqs or seqs)
    prompt = max(1, min(round(mean_prompt), longest))
    shapes = [("decode 1", 1, 0)]
    if seqs > 1:
        shapes.append((f"decode {seqs:,}", seqs, 0))
    shapes.append((f"prompt {prompt:,}", 0, prompt))
    if limits.max_num_batched_tokens > seqs:
        chunk = min(limits.max_num_batched_tokens - seqs, longest)
        shapes.append((f"{seqs:,} + {chunk:,}", seqs, chunk))
    overhead = cost.host_overhead(variant.scenario.deployment.host_overhead) or HostOverhead()
    steps = [_step(deployed, name, decodes, chunk, context, overhead) for name, decodes, chunk in shapes]
    by_prediction = any(memory.uses(name) for name in ("predicted_tokens", "peak_tokens"))
    return Explanation(deployed, context, fits, steps, by_prediction)


def _fit(deployed: Deployment, memory: policy.Policy, context_tokens: int) -> Fit:
    """Return the largest batch, by the blocks that the policy takes for one request on an idle replica.

    The request is given to the policy as a prompt of these tokens, with no predicted output.
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
    own, taken = -(-context_tokens // size), int(policy.interpreted(memory)(**arguments))
    by_memory = total // max(own, taken)
    return Fit(context_tokens, min(by_memory, limits.max_num_seqs), by_memory, taken * size if taken > own else 0)


def _step(
    deployed: Deployment, name: str, decodes: int, chunk: int, context_tokens: int, overhead: HostOverhead
) -> Step:
    where = (deployed.model, deployed.gpu, deployed.node, deployed.parallel, deployed.limits)
    prefill, cached = [(chunk, 0)] if chunk else [], decodes * context_tokens
    operators = cost.operators(*where, decode_seqs=decodes, kv_tokens=cached, prefill=prefill, host=overhead)
    local = [operator for operator in operators if operator.bound != "network"]
    compute_s = sum(o.flops for o in local) / deployed.gpu.flops(deployed.limits.weight_dtype or deployed.model.dtype)
    memory_s = sum(o.bytes for o in local) / deployed.gpu.bandwidth_bytes_per_s
    return Step(name, decodes + chunk, operators, max(compute_s, memory_s))
