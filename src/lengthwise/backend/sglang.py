"""SGLang commands of deployments; flags are those of SGLang 0.5.23.

Sources: ``sglang/srt/arg_groups`` of https://github.com/sgl-project/sglang.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lengthwise.backend import launch
from lengthwise.backend.launch import Launch
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.specs import dtype_name

ONLINE = {"fp8": "fp8"}
_KV_DTYPES = {"bfloat16": "bfloat16", "fp8": "fp8_e4m3", "fp4": "nvfp4"}
_DEEPEP_MODES = {"deepep_high_throughput": "normal", "deepep_low_latency": "low_latency"}
DP_CONSERVATIVENESS = 0.3  # with data-parallel attention, SGLang multiplies schedule_conservativeness by it
_EVICTION_FLAGS = ("lru", "lfu", "slru", "priority")
_BATCHINGS = {
    "mixed": "Whole prompts joined the decodes; SGLang runs whole prompts in separate steps, and decodes wait.",
    "vidur_vllm": "Steps of prompts counted as padded; SGLang does not pad.",
    "static": "A batch ran until all of its requests had finished; in SGLang requests join and leave at every "
    "step, which is faster.",
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
    """Return the command that serves one replica with stock SGLang. The arguments are as in ``vllm_launch``."""
    deployment.require_one_side("a launch command")
    deployment.require_no_speculation("a launch command of this engine")
    d, weights, page = deployment, launch.checkpoint(deployment, model, ONLINE), deployment.limits.block_size
    eviction = d.limits.radix_eviction_policy if _has_radix_cache(d) else None
    own = d.scheduler.sglang
    is_chunked, parallel = launch.chunks_prompts(d), d.parallel
    # With data-parallel attention, SGLang's tp counts the GPUs of all ranks, and it divides these limits by the ranks.
    scale = DP_CONSERVATIVENESS if parallel.dp > 1 else 1.0
    by_priority = launch.policy_name(d.scheduler.rank) in launch.ORDERED_BY_PRIORITY
    chunk_tokens = max(page, d.limits.max_num_batched_tokens // page * page)  # SGLang needs complete pages
    # SGLang counts the memory of weights and cache, not the peak as vLLM does.
    static_bytes = d.kv.weight_bytes + d.kv.num_blocks * d.kv.kv_bytes_per_block
    is_capped = launch.sets_kv_blocks(d)
    fraction = launch.memory_fraction(static_bytes / d.gpu.memory_bytes, is_capped=is_capped)
    pairs = {
        "--model-path": weights.model,
        "--served-model-name": served_name or d.model.name,
        "--host": host,
        "--port": port,
        "--device": device,
        "--tp-size": parallel.tp * parallel.dp,
        "--pp-size": parallel.pp,
        "--dp-size": parallel.dp if parallel.dp > 1 else None,
        "--enable-dp-attention": parallel.dp > 1,
        "--ep-size": parallel.ep if parallel.ep > 1 else None,
        "--moe-a2a-backend": "deepep" if (deepep := _DEEPEP_MODES.get(parallel.all2all_backend)) else None,
        "--deepep-mode": deepep,
        "--enable-eplb": parallel.redundant_experts is not None,
        "--ep-num-redundant-experts": parallel.redundant_experts or None,
        "--nnodes": None if launch.fits_node(d) else -(-launch.replica_gpus(d) // d.node.host_gpus),
        "--dtype": weights.dtype,
        "--quantization": weights.quantization,
        "--kv-cache-dtype": launch.kv_dtype_flag(d, _KV_DTYPES),
        "--context-length": d.max_model_len,
        "--max-running-requests": parallel.dp * launch.max_resident_seqs(d),
        "--page-size": page,
        "--mem-fraction-static": f"{fraction:.3f}",
        "--max-total-tokens": launch.kv_tokens(d) if is_capped else None,
        "--disable-radix-cache": not d.limits.enable_prefix_caching,
        "--radix-eviction-policy": eviction if eviction in _EVICTION_FLAGS else None,
        "--chunked-prefill-size": parallel.dp * chunk_tokens if is_chunked else -1,
        "--enable-mixed-chunk": own.enable_mixed_chunk if own else is_chunked,
        "--max-prefill-tokens": own.max_prefill_tokens if own else launch.step_tokens(d),
        "--schedule-conservativeness": f"{own.schedule_conservativeness / scale:.6g}" if own else None,
        "--schedule-policy": own.schedule_policy if own else "fcfs",
        "--enable-priority-scheduling": by_priority,
        "--schedule-low-priority-values-first": by_priority,
        "--retraction-policy": "priority" if by_priority else None,
    }
    notes = (*weights.notes, *_notes(d), *launch.shared_notes(d, ranks=RANKS))
    command = ("python3", "-m", "sglang.launch_server", *launch.flags(pairs))
    return Launch(command, launch.environment_of(d, device, replica), notes)


RANKS = "--node-rank (0, 1, ...) and --dist-init-addr on each"
BOOTSTRAP_PORT = 8998  # where decode engines find a prefill engine
_DISAGGREGATED_NOTES = (
    (
        "Disaggregation was simulated as vLLM has it. SGLang needs NIXL for this command (pip install nixl); its own "
        "default is --disaggregation-transfer-backend mooncake."
    ),
    (
        "Without memory for a decode, a request was simulated to return to a prefill replica; SGLang retracts it and "
        "resumes it on its decode engine."
    ),
)


def sglang_split_launches(prefill: Deployment, decode: Deployment, **options: Any) -> tuple[Launch, Launch]:
    """Return the command of a prefill engine, and the command of a decode engine that receives its KV cache.

    ``options`` are those of ``sglang_launch``.
    """
    transfer = ("--disaggregation-transfer-backend", "nixl", "--disaggregation-bootstrap-port", str(BOOTSTRAP_PORT))
    first, second = (
        replace(
            plain := sglang_launch(deployment, **options),
            # No step of a side has both prompts and decodes.
            command=(
                *(w for w in plain.command if w != "--enable-mixed-chunk"),
                "--disaggregation-mode",
                mode,
                *transfer,
            ),
            notes=(*_DISAGGREGATED_NOTES, *plain.notes),
        )
        for deployment, mode in ((prefill, "prefill"), (decode, "decode"))
    )
    return first, second


def _has_radix_cache(d: Deployment) -> bool:
    return d.limits.enable_prefix_caching and d.limits.prefix_cache == "sglang"


def _notes(d: Deployment) -> Iterator[str]:
    rank = launch.policy_name(d.scheduler.rank)
    if rank in launch.ORDERED_BY_PRIORITY:
        yield (
            f"{launch.ORDERED_BY_PRIORITY[rank]} In SGLang a waiting request also preempts running ones whose "
            "priority is worse by 10 or more."
        )
    elif rank not in launch.ARRIVAL:
        yield f"Requests were ordered by {rank}; SGLang takes them in order of arrival, or of their `priority`."
    batching = launch.policy_name(d.scheduler.batching)
    if not (launch.chunks_prompts(d) or batching == "prefill_first" or d.scheduler.engine_rules):
        other = f"Steps were formed by {batching}; SGLang runs whole prompts in separate steps."
        yield _BATCHINGS.get(batching, other)
    if d.limits.kv_dtype is not None:
        dtype = dtype_name(d.limits.kv_dtype)
        if dtype not in _KV_DTYPES and dtype != dtype_name(d.limits.weight_dtype or d.model.dtype):
            yield f"SGLang has no KV cache of {dtype}; it takes the weights' dtype."
    yield from _memory_notes(d)
    if d.limits.kv_offloading and d.limits.kv_offloading.size_gb:
        yield "CPU memory behind the prefix cache was simulated as vLLM uses it; the command leaves SGLang's off."
    eviction = d.limits.radix_eviction_policy
    if _has_radix_cache(d) and eviction not in _EVICTION_FLAGS:
        yield (
            f"The cache evicted by {eviction}; --radix-eviction-policy takes {', '.join(_EVICTION_FLAGS)}, and the "
            "command leaves SGLang's default, lru."
        )
    elif _has_radix_cache(d) and eviction == "priority":
        yield (
            "The cache evicted the least important requests' prefixes first; SGLang evicts those of the smallest "
            "`priority`, even if --schedule-low-priority-values-first calls these the most important."
        )
    share = "--mem-fraction-static is the simulated share of weights and KV cache"
    yield launch.memory_note(d, "SGLang", cap="--max-total-tokens", share=share)


def _memory_notes(d: Deployment) -> Iterator[str]:
    if d.scheduler.sglang is not None and d.scheduler.async_scheduling:
        return
    if d.scheduler.sglang is not None:
        yield "Steps were simulated one after the other; SGLang prepares the next one meanwhile (overlap schedule)."
        return
    if d.scheduler.trtllm is not None:
        yield "Requests were scheduled by TensorRT-LLM's rules; SGLang's are those of scheduler sglang."
        return
    yield (
        f"Requests were admitted by memory policy {launch.policy_name(d.scheduler.memory)} with a watermark of "
        f"{d.watermark:g}; SGLang admits by its estimate of the remaining output "
        "(--schedule-conservativeness)."
    )
    yield (
        f"When memory ran out, {launch.policy_name(d.scheduler.victim)} chose the victim; SGLang retracts by priority, "
        "if requests have one, else those with the shortest output so far."
    )
