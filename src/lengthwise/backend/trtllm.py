"""TensorRT-LLM commands of deployments, and the file of options that they read.

Source of flags and options: ``tensorrt_llm/commands/serve.py`` and ``llmapi/llm_args.py`` of
https://github.com/NVIDIA/TensorRT-LLM (1.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lengthwise.backend import launch
from lengthwise.backend.launch import Launch
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError

OPTIONS = "trtllm.yaml"
_KV_DTYPES = {"fp8": "fp8", "fp4": "nvfp4"}
_MIN_BLOCK_TOKENS = 8
_DEFAULT_FRACTION = 0.9  # of ``free_gpu_memory_fraction``


def trtllm_launch(
    deployment: Deployment,
    *,
    model: str | None = None,
    served_name: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str = "cuda",
    replica: int = 0,
) -> Launch:
    """Return the command that serves one replica with TensorRT-LLM. The arguments are as in ``vllm_launch``.

    The command reads ``trtllm_options`` from the file OPTIONS in the working directory.
    """
    deployment.require_one_side("a launch command")
    deployment.require_no_speculation("a launch command of this engine")
    parallel = deployment.parallel
    if parallel.dp > 1 and parallel.tp > 1:
        raise InputError(
            f"TensorRT-LLM's data-parallel attention has ranks of one GPU; tp is {parallel.tp} and dp is "
            f"{parallel.dp}. Set tp = 1 with dp = {parallel.tp * parallel.dp}, or take another engine"
        )
    d, weights = deployment, launch.checkpoint(deployment, model, {})
    pairs = {
        "--served_model_name": served_name or d.model.name,
        "--host": host,
        "--port": port,
        "--backend": "pytorch",
        "--tp_size": parallel.tp * parallel.dp,  # TensorRT-LLM counts the GPUs of all ranks
        "--pp_size": parallel.pp,
        "--max_batch_size": launch.max_resident_seqs(d),
        "--max_num_tokens": d.limits.max_num_batched_tokens,
        "--max_seq_len": d.max_model_len,
        "--config": OPTIONS,
    }
    notes = (*weights.notes, *_notes(d), *launch.shared_notes(d, keeps_budget=True))
    return Launch(
        ("trtllm-serve", "serve", weights.model, *launch.flags(pairs)), launch.environment_of(d, device, replica), notes
    )


def trtllm_options(deployment: Deployment, model: str | None = None) -> str:
    """Return the YAML of the settings that the command of ``trtllm_launch`` does not set by flags."""
    import yaml

    d, own = deployment, deployment.scheduler.trtllm
    kv_bytes = d.kv.num_blocks * d.kv.kv_bytes_per_block
    share = kv_bytes / (d.gpu.memory_bytes - d.kv.weight_bytes)
    cache: dict[str, Any] = {
        "enable_block_reuse": d.limits.enable_prefix_caching,
        "tokens_per_block": d.limits.block_size,
    }
    is_capped = launch.sets_kv_blocks(d)
    if fraction := launch.memory_fraction(share, is_capped=is_capped, default=_DEFAULT_FRACTION):
        cache["free_gpu_memory_fraction"] = round(fraction, 3)
    if is_capped:
        cache["max_tokens"] = launch.kv_tokens(d)
    if dtype := launch.kv_dtype_flag(d, _KV_DTYPES):
        cache["dtype"] = dtype
    options: dict[str, Any] = {"kv_cache_config": cache, "enable_chunked_prefill": launch.chunks_prompts(d)}
    if d.parallel.dp > 1 or d.parallel.ep > 1:
        options["enable_attention_dp"] = d.parallel.dp > 1
        options["moe_expert_parallel_size"] = d.parallel.ep
        options["moe_tensor_parallel_size"] = d.parallel.gpus_per_expert
    if dtype := launch.checkpoint(d, model, {}).dtype:
        options["dtype"] = dtype
    if own is not None:
        scheduler = {"capacity_scheduler_policy": own.capacity_scheduler_policy}
        if own.enable_chunked_prefill:
            scheduler["context_chunking_policy"] = own.context_chunking_policy
        options["scheduler_config"] = scheduler
    return launch.comment("Read by trtllm-serve --config.") + "\n" + yaml.safe_dump(options, sort_keys=False)


def _notes(d: Deployment) -> Iterator[str]:
    if d.parallel.dp > 1:
        yield f"Simulated ranks exchange tokens by {d.parallel.all2all_backend}; TensorRT-LLM chooses its own method."
    if d.parallel.redundant_experts is not None:
        yield "EPLB placed the experts; the command leaves TensorRT-LLM's moe_config.load_balancer off."
    if d.scheduler.trtllm is None:
        yield "Requests were scheduled by other rules than TensorRT-LLM's, which are those of scheduler trtllm."
    rank = launch.policy_name(d.scheduler.rank)
    if rank not in launch.ARRIVAL:
        yield f"Requests were ordered by {rank}; TensorRT-LLM takes them in order of arrival."
    yield "Steps were simulated one after the other; TensorRT-LLM prepares the next one meanwhile (overlap scheduler)."
    size = d.limits.block_size
    if size < _MIN_BLOCK_TOKENS or size & (size - 1):
        yield (
            f"Blocks of {size} tokens were simulated; TensorRT-LLM takes powers of two from {_MIN_BLOCK_TOKENS} on: "
            f"set tokens_per_block in {OPTIONS}, and engine.block_size to the same."
        )
    if not launch.fits_node(d):
        yield "Run the command under trtllm-llmapi-launch and MPI, with a process for each GPU of all nodes."
    share = f"free_gpu_memory_fraction in {OPTIONS} is the simulated share of the memory beside the weights"
    yield launch.memory_note(d, "TensorRT-LLM", cap=f"max_tokens in {OPTIONS}", share=share)
