"""A deployment as an SGLang command; flags are those of SGLang 0.5.23.

Sources: ``sglang/srt/arg_groups`` of https://github.com/sgl-project/sglang.
"""

from __future__ import annotations

from lengthwise.backend.launch import (
    ARRIVAL,
    ORDERED_BY_PRIORITY,
    PLAIN,
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
from lengthwise.schema.specs import dtype_name

ONLINE = {"fp8": "fp8"}
_KV_DTYPES = {"bfloat16": "bfloat16", "fp8": "fp8_e4m3", "fp4": "nvfp4"}
_BATCHINGS = {
    "mixed": "Whole prompts joined the decodes; SGLang runs whole prompts in steps of their own, decodes waiting.",
    "vidur_vllm": "Steps of prompts counted as padded; SGLang does not pad.",
    "static": "A batch ran until all of it had finished; SGLang lets requests join and leave at every step, and "
    "will do better.",
}


def sglang_launch(
    deployment: Deployment,
    *,
    model: str | None = None,
    served_name: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str = "cuda",
    replica: int = 0,
) -> Launch:
    """The command that serves one replica with SGLang as nearly as simulated as stock SGLang can.

    Args:
        deployment: What was simulated.
        model: A Hugging Face id or a folder; None takes what the catalog knows, or ``$MODEL``.
        served_name: The name that requests ask for; None takes the model's in the catalog.
        host: Address to listen at.
        port: Port of this replica.
        device: "cuda" or "cpu".
        replica: Which replica; it says which GPUs of its node are seen.

    Raises:
        UnknownNameError: There is no such device.
        InputError: There is no such replica.
    """
    deployment.require_one_side("a launch command")
    weights = checkpoint(deployment, model, ONLINE)
    environment = environment_of(deployment, device, replica)
    pairs = {
        "--model-path": weights.model,
        "--served-model-name": served_name or deployment.model.name,
        "--host": host,
        "--port": port,
        "--device": device,
        "--tp-size": deployment.parallel.tp,
        "--pp-size": deployment.parallel.pp,
        "--nnodes": None if fits_node(deployment) else _nodes(deployment),
        "--dtype": weights.dtype,
        "--quantization": weights.quantization,
        "--kv-cache-dtype": _kv_dtype(deployment),
        **_limits(deployment),
        **_scheduling(deployment),
    }
    notes = weights.notes + _notes(deployment) + shared_notes(deployment)
    return Launch(("python3", "-m", "sglang.launch_server", *flags(pairs)), environment, notes)


def _nodes(d: Deployment) -> int:
    return -(-d.parallel.tp * d.parallel.pp // d.node.gpus)


def _kv_dtype(d: Deployment) -> str | None:
    if d.limits.kv_dtype is None:
        return None
    wanted = dtype_name(d.limits.kv_dtype)
    same = wanted == dtype_name(d.limits.weight_dtype or d.model.dtype)
    return None if same and wanted in PLAIN else _KV_DTYPES.get(wanted)


def _limits(d: Deployment) -> dict[str, object]:
    """SGLang counts the memory of weights and cache, not the peak that vLLM's utilization bounds."""
    held = d.kv.weight_bytes + d.kv.num_blocks * d.kv.kv_bytes_per_block
    return {
        "--context-length": d.max_model_len,
        "--max-running-requests": resident_bound(d),
        "--page-size": d.limits.block_size,
        "--mem-fraction-static": f"{min(held / d.gpu.memory_bytes, 1.0):.3f}",
        "--max-total-tokens": kv_tokens(d) if is_overridden(d) else None,
        "--disable-radix-cache": True,
    }


def _scheduling(d: Deployment) -> dict[str, object]:
    rank = policy_name(d.scheduler.rank)
    by_priority = rank in ORDERED_BY_PRIORITY
    return {
        "--chunked-prefill-size": _chunk_tokens(d) if cuts_prompts(d) else -1,
        "--enable-mixed-chunk": cuts_prompts(d),
        "--max-prefill-tokens": step_tokens(d),
        "--schedule-policy": "fcfs",
        "--enable-priority-scheduling": by_priority,
        "--schedule-low-priority-values-first": by_priority,
        "--retraction-policy": "priority" if by_priority else None,
    }


def _chunk_tokens(d: Deployment) -> int:
    """The step's token budget, cut to whole pages as SGLang asks."""
    page = d.limits.block_size
    return max(page, d.limits.max_num_batched_tokens // page * page)


def _notes(d: Deployment) -> tuple[str, ...]:
    made = (_rank(d), _batching(d), _kv(d), _spread(d))
    return (
        *(note for note in made if note),
        (
            f"Requests were admitted by memory policy {policy_name(d.scheduler.memory)} with a watermark of "
            f"{d.limits.watermark:g}; SGLang admits by its running estimate of the output still to come "
            "(--schedule-conservativeness)."
        ),
        (
            f"When memory ran out, {policy_name(d.scheduler.victim)} said who leaves; SGLang retracts by priority, if "
            "requests have one, else those with the shortest output so far."
        ),
        (
            "--mem-fraction-static is the simulated share of weights and KV cache; SGLang's own need beside it may "
            "ask for less."
        ),
    )


def _rank(d: Deployment) -> str | None:
    name = policy_name(d.scheduler.rank)
    if name in ARRIVAL:
        return None
    if name in ORDERED_BY_PRIORITY:
        return (
            f"{ORDERED_BY_PRIORITY[name]} SGLang also lets a waiting request evict running ones whose priority "
            "is worse by 10 or more."
        )
    return f"Requests went by {name}; SGLang takes them as they come, or by a `priority` that they carry."


def _batching(d: Deployment) -> str | None:
    name = policy_name(d.scheduler.batching)
    if cuts_prompts(d) or name == "prefill_first":
        return None
    return _BATCHINGS.get(name, f"Steps were formed by {name}; SGLang runs whole prompts in steps of their own.")


def _kv(d: Deployment) -> str | None:
    if d.limits.kv_dtype is None:
        return None
    wanted = dtype_name(d.limits.kv_dtype)
    if wanted in _KV_DTYPES or wanted == dtype_name(d.limits.weight_dtype or d.model.dtype):
        return None
    return f"SGLang has no KV cache of {wanted}; it takes the weights' dtype."


def _spread(d: Deployment) -> str | None:
    if fits_node(d):
        return None
    return "Add --node-rank (0, 1, ...) and --dist-init-addr on each node."
