"""A deployment as a ``vllm serve`` command; flags are those of vLLM 0.32 and 0.33.

Sources: ``vllm/engine/arg_utils.py`` and ``vllm/config`` of https://github.com/vllm-project/vllm.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lengthwise.backend.launch import (
    ARRIVAL,
    ORDERED_BY_PRIORITY,
    PLAIN,
    Checkpoint,
    Launch,
    checkpoint,
    cuts_prompts,
    environment_of,
    fits_node,
    flags,
    is_overridden,
    kv_tokens,
    policy_name,
    resident_bound,
    shared_notes,
    step_tokens,
)
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.specs import GIB, dtype_name

ONLINE = {"fp8": "fp8_per_tensor", "int8": "int8_per_channel_weight_only"}
BLOCK_MULTIPLE = {"cuda": 16, "cpu": 32}
"""Tokens that the block sizes of vLLM's attention kernels are multiples of."""

_KV_DTYPES = {
    "float16": "float16",
    "bfloat16": "bfloat16",
    "fp8": "fp8",
    "int8": "int8_per_token_head",
    "int4": "int4_per_token_head",
    "fp4": "nvfp4",
}
_BATCHINGS = {
    "prefill_first": "Prompts ran alone in steps of their own, decodes waiting; vLLM runs whole prompts together "
    "with the decodes.",
    "vidur_vllm": "Prompts ran alone in padded steps, decodes waiting; vLLM runs whole prompts together with the "
    "decodes, without padding.",
    "mixed": "Whole prompts joined the decodes without a token budget; vLLM keeps one.",
    "static": "A batch ran until all of it had finished; vLLM lets requests join and leave at every step, and "
    "will do better.",
}


def vllm_launch(
    deployment: Deployment,
    *,
    model: str | None = None,
    served_name: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str = "cuda",
    replica: int = 0,
) -> Launch:
    """The command that serves one replica with vLLM as nearly as simulated as stock vLLM can.

    Args:
        deployment: What was simulated.
        model: A Hugging Face id or a folder; None takes what the catalog knows, or ``$MODEL``.
        served_name: The name that requests ask for; None takes the model's in the catalog.
        host: Address to listen at.
        port: Port of this replica.
        device: "cuda", or "cpu" to try the command without a GPU (not its speed).
        replica: Which replica; it says which GPUs of its node are seen.

    Raises:
        UnknownNameError: There is no such device.
        InputError: There is no such replica.
    """
    deployment.require_one_side("a launch command")
    weights = checkpoint(deployment, model, ONLINE)
    environment = environment_of(deployment, device, replica)
    if device == "cpu":
        held = math.ceil(deployment.kv.num_blocks * deployment.kv.kv_bytes_per_block / GIB)
        environment = {"VLLM_CPU_KVCACHE_SPACE": str(max(1, held))}
    pairs = {
        "--served-model-name": served_name or deployment.model.name,
        "--host": host,
        "--port": port,
        **_cut(deployment),
        **_formats(deployment, weights, device),
        **_limits(deployment, device),
        **_scheduling(deployment),
    }
    notes = weights.notes + _notes(deployment, device) + shared_notes(deployment)
    return Launch(("vllm", "serve", weights.model, *flags(pairs)), environment, notes)


def _cut(d: Deployment) -> dict[str, object]:
    """Degrees; a replica of more than one node also tells of how many, each node its rank."""
    nodes = None if fits_node(d) else math.ceil(d.parallel.tp * d.parallel.pp / d.node.gpus)
    return {"--tensor-parallel-size": d.parallel.tp, "--pipeline-parallel-size": d.parallel.pp, "--nnodes": nodes}


def _formats(d: Deployment, weights: Checkpoint, device: str) -> dict[str, object]:
    return {
        "--dtype": weights.dtype if device == "cuda" else "float32",  # 16 bits are emulated on most CPUs
        "--quantization": weights.quantization if device == "cuda" else None,
        "--kv-cache-dtype": _kv_dtype(d) if device == "cuda" else None,
    }


def _kv_dtype(d: Deployment) -> str | None:
    if d.limits.kv_dtype is None:
        return None
    wanted = dtype_name(d.limits.kv_dtype)
    same = wanted == dtype_name(d.limits.weight_dtype or d.model.dtype)
    return None if same and wanted in PLAIN else _KV_DTYPES.get(wanted)


def _limits(d: Deployment, device: str) -> dict[str, object]:
    block = _block_size(d, device)
    return {
        "--max-model-len": d.max_model_len,
        "--max-num-seqs": min(resident_bound(d), step_tokens(d)),
        "--max-num-batched-tokens": step_tokens(d),
        "--block-size": block,
        "--gpu-memory-utilization": f"{d.limits.gpu_memory_utilization:g}" if device == "cuda" else None,
        "--num-gpu-blocks-override": kv_tokens(d) // block if is_overridden(d) else None,
        "--watermark": f"{d.limits.watermark:g}",
        "--enforce-eager": device == "cpu",
        "--no-enable-prefix-caching": True,
    }


def _block_size(d: Deployment, device: str) -> int:
    multiple = BLOCK_MULTIPLE[device]
    return -(-d.limits.block_size // multiple) * multiple


def _scheduling(d: Deployment) -> dict[str, object]:
    by_priority = policy_name(d.scheduler.rank) in ORDERED_BY_PRIORITY
    return {
        "--scheduling-policy": "priority" if by_priority else "fcfs",
        "--no-enable-chunked-prefill": not cuts_prompts(d),
    }


def _notes(d: Deployment, device: str) -> tuple[str, ...]:
    made = (_rank(d), _leave(d), _batching(d), _sequences(d), _blocks(d, device), _kv(d), _spread(d), _cpu(device))
    return tuple(note for note in made if note)


def _rank(d: Deployment) -> str | None:
    name = policy_name(d.scheduler.rank)
    if name in ARRIVAL:
        return None
    if name in ORDERED_BY_PRIORITY:
        return f"{ORDERED_BY_PRIORITY[name]} vLLM then also evicts by it, the largest first."
    return f"Requests went by {name}; vLLM takes them as they come, or by a `priority` that they carry."


def _leave(d: Deployment) -> str | None:
    name, by_priority = policy_name(d.scheduler.victim), policy_name(d.scheduler.rank) in ORDERED_BY_PRIORITY
    if name == ("lowest_priority" if by_priority else "latest_admitted"):
        return None
    does = "the largest priority, the latest arrival among equals" if by_priority else "who was admitted last"
    return f"When memory ran out, {name} said who leaves; vLLM evicts {does}."


def _batching(d: Deployment) -> str | None:
    name = policy_name(d.scheduler.batching)
    if cuts_prompts(d):
        return None
    return _BATCHINGS.get(name, f"Steps were formed by {name}; vLLM runs whole prompts together with the decodes.")


def _sequences(d: Deployment) -> str | None:
    if resident_bound(d) <= step_tokens(d):
        return None
    return f"vLLM takes no more sequences than a step has tokens: --max-num-seqs is {step_tokens(d)}."


def _blocks(d: Deployment, device: str) -> str | None:
    block = _block_size(d, device)
    if block == d.limits.block_size:
        return None
    return (
        f"Blocks of {d.limits.block_size} tokens were simulated; vLLM's attention takes multiples of "
        f"{BLOCK_MULTIPLE[device]}: --block-size is {block}."
    )


def _kv(d: Deployment) -> str | None:
    if d.limits.kv_dtype is None or dtype_name(d.limits.kv_dtype) in _KV_DTYPES:
        return None
    return f"vLLM has no KV cache of {d.limits.kv_dtype}; it takes the weights' dtype."


def _spread(d: Deployment) -> str | None:
    if fits_node(d):
        return None
    return "Add --node-rank (0, 1, ...) and --master-addr on each node, and --headless on all but the first."


def _cpu(device: str) -> str | None:
    if device == "cuda":
        return None
    return "On a CPU the command shows that the engine takes it, not how fast it serves: float32, no graphs."


SCHEDULER_CLASS = "lengthwise.gateway.plugin.RraScheduler"
CONNECTOR = "NixlConnector"
PHASES_NOTE = (
    "The schedule is kept inside vLLM by a class of lengthwise, which must be importable there: `pip install --no-deps "
    "lengthwise` in vLLM's environment. Its log says at the start that it holds this engine to the schedule, or why "
    "not; phases.jsonl gets a line for every phase."
)
SPLIT_NOTES = (
    (
        "vLLM's disaggregation needs NIXL (pip install nixl) and GPUs that reach each other by NVLink, PCIe or RDMA. "
        "The cache goes from GPU to GPU; through host memory, as planned, takes kv_buffer_device cpu and is slower."
    ),
    (
        "It forms its own batches: the encoding engine takes at most B_E prompts at a time and starts with what is "
        "there, the decoding engine lets requests in as their caches come."
    ),
)


def phased_launch(deployment: Deployment, settings: Mapping[str, Any], *, device: str = "cuda") -> Launch:
    """The command of a vLLM whose own scheduler keeps phases.

    Args:
        deployment: One stage: with several, vLLM has several batches under way and keeps its own order.
        settings: The table of ``--additional-config``: prefill_batch, decode_steps and the rest.
        device: "cuda" or "cpu".
    """
    plain = vllm_launch(deployment, device=device)
    told = json.dumps({"lengthwise": dict(settings)})
    more = ("--scheduler-cls", SCHEDULER_CLASS, "--additional-config", told)
    return replace(plain, command=(*plain.command, *more), notes=(PHASES_NOTE, *plain.notes))


def split_launches(encode: Deployment, decode: Deployment, *, device: str = "cuda") -> tuple[Launch, Launch]:
    """The commands of an engine that encodes and of one that decodes what the first hands over."""
    return _side(encode, "kv_producer", device), _side(decode, "kv_consumer", device)


def _side(deployment: Deployment, role: str, device: str) -> Launch:
    plain = vllm_launch(deployment, device=device)
    told = json.dumps({"kv_connector": CONNECTOR, "kv_role": role})
    command = (*plain.command, "--kv-transfer-config", told)
    return replace(plain, command=command, notes=(*SPLIT_NOTES, *plain.notes))
