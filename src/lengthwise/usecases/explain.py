"""What fits and what a step costs, without simulating anything."""

from __future__ import annotations

from dataclasses import dataclass

from lengthwise import cost, policy
from lengthwise.config.variants import Variant, host
from lengthwise.cost import HostOverhead, OperatorTime
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.workload import Workload

BOUNDS = ("compute", "memory", "network", "latency")


@dataclass(frozen=True)
class Fit:
    """The largest batch of requests that all hold so many tokens.

    ``seqs`` is what a replica takes at once, ``by_memory`` what the KV cache alone would hold.
    ``reserved_tokens`` is what the memory policy sets aside for each beyond its tokens' own blocks,
    those included; 0 if a request takes no more blocks than its tokens fill.
    """

    context_tokens: int
    seqs: int
    by_memory: int
    reserved_tokens: int = 0


@dataclass(frozen=True)
class Step:
    """One step of a replica: its shape, and each operator's time.

    Attributes:
        name: What the step is, in a word or two.
        tokens: Tokens it computes.
        operators: In the order of the step; over all layers and stages.
        floor_s: What the data sheet's peaks would allow: the larger of all FLOPs at the peak and
            all bytes at the bandwidth, no launches, no communication.
    """

    name: str
    tokens: int
    operators: list[OperatorTime]
    floor_s: float

    @property
    def seconds(self) -> float:
        """The step's time by the roofline: all operators."""
        return sum(operator.seconds for operator in self.operators)

    @property
    def bound_shares(self) -> dict[str, float]:
        """Which resource binds: the share of the time in operators bound by each."""
        whole = self.seconds
        return {b: sum(o.seconds for o in self.operators if o.bound == b) / whole for b in BOUNDS}


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found.

    Attributes:
        deployment: What was looked at.
        context_tokens: What a request holds half-way through its output.
        fits: Largest batches, by the memory policy.
        steps: Steps of typical shapes.
        by_prediction: Whether the memory policy looks at predicted lengths, so that it may let in
            fewer or more than ``fits`` says.
    """

    deployment: Deployment
    context_tokens: int
    fits: list[Fit]
    steps: list[Step]
    by_prediction: bool = False


def explain(variant: Variant, seed: int = 0) -> Explanation:
    """What fits, and steps of typical shapes for the variant's own workload.

    The shapes: one sequence decoding; as many as fit half-way through their outputs; one prompt
    of mean length alone; and decodes sharing the step with as much of a prompt as the budget leaves.
    """
    variant.deployment.require_one_side("explain")
    deployed, requests = variant.deployment, variant.workload(seed)
    overhead = cost.host_overhead(host(variant.scenario.deployment)) or HostOverhead()
    context = _typical_context(deployed, requests)
    lengths = sorted({context, max(1, deployed.max_model_len // 2), deployed.max_model_len})
    return Explanation(
        deployed,
        context,
        [_fit(deployed, length) for length in lengths],
        _steps(deployed, requests, context, overhead),
        by_prediction=any(_memory(deployed).uses(name) for name in ("predicted_tokens", "peak_tokens")),
    )


def _memory(deployed: Deployment) -> policy.Policy:
    return policy.resolve("memory", deployed.scheduler.memory)


def _typical_context(deployed: Deployment, requests: Workload) -> int:
    mean = requests.prompt_tokens.mean() + requests.output_tokens.mean() / 2
    return max(1, min(round(float(mean)), deployed.max_model_len))


def _fit(deployed: Deployment, context_tokens: int) -> Fit:
    size = deployed.kv.block_size
    own, taken = -(-context_tokens // size), _blocks_at_admission(deployed, context_tokens)
    by_memory = deployed.kv.num_blocks // max(own, taken)
    reserved = taken * size if taken > own else 0
    return Fit(context_tokens, min(by_memory, deployed.limits.max_num_seqs), by_memory, reserved)


def _blocks_at_admission(deployed: Deployment, context_tokens: int) -> int:
    """What the memory policy takes for a request of so many tokens on an idle replica; -1: it waits.

    The request is asked for as its prompt, with nothing predicted beyond it.
    """
    total, limits = deployed.kv.num_blocks, deployed.limits
    given = {
        "context_tokens": context_tokens,
        "chunk_tokens": min(context_tokens, limits.max_num_batched_tokens),
        "predicted_tokens": 0.0,
        "max_model_len": deployed.max_model_len,
        "block_size": deployed.kv.block_size,
        "free_blocks": total,
        "total_blocks": total,
        "watermark_blocks": int(limits.watermark * total),
        "num_running": 0,
        "peak_tokens": context_tokens,
    }
    return int(policy.interpreted(_memory(deployed))(**given))


def _steps(deployed: Deployment, requests: Workload, context: int, overhead: HostOverhead) -> list[Step]:
    fitting = max(1, _fit(deployed, context).seqs)
    most = min(fitting, deployed.limits.max_step_seqs or fitting)
    budget = deployed.limits.max_num_batched_tokens
    prompt = max(1, min(round(float(requests.prompt_tokens.mean())), deployed.max_model_len))
    shapes = [("decode 1", 1, 0)]
    if most > 1:
        shapes.append((f"decode {most:,}", most, 0))
    shapes.append((f"prompt {prompt:,}", 0, prompt))
    if budget > most:
        chunk = min(budget - most, deployed.max_model_len)
        shapes.append((f"{most:,} + {chunk:,}", most, chunk))
    return [_step(deployed, shape, context, overhead) for shape in shapes]


def _step(deployed: Deployment, shape: tuple[str, int, int], context: int, overhead: HostOverhead) -> Step:
    """A step of a shape: (its name, sequences that decode, tokens of a prompt)."""
    name, decodes, chunk = shape
    operators = cost.operators(
        deployed.model,
        deployed.gpu,
        deployed.node,
        deployed.parallel,
        deployed.limits,
        decode_seqs=decodes,
        kv_tokens=decodes * context,
        prefill=[(chunk, 0)] if chunk else [],
        host=overhead,
    )
    return Step(name, decodes + chunk, operators, _floor_s(deployed, operators))


def _floor_s(deployed: Deployment, operators: list[OperatorTime]) -> float:
    local = [operator for operator in operators if operator.bound != "network"]
    peak = deployed.gpu.flops(deployed.limits.weight_dtype or deployed.model.dtype)
    flops, moved = sum(o.flops for o in local), sum(o.bytes for o in local)
    return max(flops / peak, moved / deployed.gpu.bandwidth_bytes_per_s)
