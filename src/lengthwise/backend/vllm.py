"""``vllm serve`` commands of deployments; flags are those of vLLM 0.32 and 0.33.

Sources: ``vllm/engine/arg_utils.py`` and ``vllm/config`` of https://github.com/vllm-project/vllm.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lengthwise import catalog
from lengthwise.backend import launch
from lengthwise.backend.launch import Launch
from lengthwise.schema.deployment import NULL_BLOCKS, Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.specs import GB, GIB, dtype_name

ONLINE = {"fp8": "fp8_per_tensor", "int8": "int8_per_channel_weight_only"}
BLOCK_MULTIPLE = {"cuda": 16, "cpu": 32}  # factor of the block sizes of vLLM's attention kernels, tokens
_KV_DTYPES = {
    "float16": "float16",
    "bfloat16": "bfloat16",
    "fp8": "fp8",
    "int8": "int8_per_token_head",
    "int4": "int4_per_token_head",
    "fp4": "nvfp4",
}
_BATCHINGS = {
    "prefill_first": "Prompts ran in separate steps, during which decodes waited; vLLM runs whole prompts together "
    "with the decodes.",
    "vidur_vllm": "Prompts ran in separate, padded steps, during which decodes waited; vLLM runs whole prompts "
    "together with the decodes, without padding.",
    "mixed": "Whole prompts joined the decodes without a token budget; vLLM has one.",
    "static": "A batch ran until all of its requests had finished; in vLLM requests join and leave at every "
    "step, which is faster.",
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
    """Return the command that serves one replica with stock vLLM, as close to the simulation as possible.

    ``model`` is a Hugging Face id or a folder, by default the catalog's or ``$MODEL``. ``served_name`` is its name in
    requests, by default the catalog's. With ``device`` "cpu", the command can be tried without a GPU, but its speed
    cannot. ``replica`` selects the GPUs of its node. Raises InputError for another device or replica.
    """
    deployment.require_one_side("a launch command")
    parallel = deployment.parallel
    if parallel.ep not in (1, parallel.tp * parallel.dp):
        raise InputError(
            f"vLLM has experts on single GPUs or parts of each on all: ep must be 1 or tp x dp, "
            f"{parallel.tp * parallel.dp}; it is {parallel.ep}. Change it, or take another engine"
        )
    d, weights = deployment, launch.checkpoint(deployment, model, ONLINE)
    offloading = d.limits.kv_offloading
    environment, block = launch.environment_of(deployment, device, replica), _block_size(d, device)
    # A block of states has more tokens than vLLM's --block-size; vLLM makes it larger itself.
    num_gpu_blocks = d.kv.num_blocks * d.kv.block_size // max(block, d.kv.block_size) + NULL_BLOCKS
    if device == "cpu":
        cache_gib = math.ceil(d.kv.num_blocks * d.kv.kv_bytes_per_block / GIB)
        environment = {"VLLM_CPU_KVCACHE_SPACE": str(max(1, cache_gib))}
    pairs = {
        "--served-model-name": served_name or deployment.model.name,
        "--host": host,
        "--port": port,
        "--tensor-parallel-size": parallel.tp,
        "--pipeline-parallel-size": parallel.pp,
        "--data-parallel-size": parallel.dp if parallel.dp > 1 else None,
        "--enable-expert-parallel": parallel.ep > 1,
        "--all2all-backend": parallel.all2all_backend if parallel.dp > 1 else None,
        "--enable-eplb": parallel.redundant_experts is not None,
        "--eplb-config": json.dumps({"num_redundant_experts": parallel.redundant_experts})
        if parallel.redundant_experts
        else None,
        "--nnodes": None if launch.fits_node(d) else math.ceil(launch.replica_gpus(d) / d.node.host_gpus),
        "--dtype": weights.dtype if device == "cuda" else "float32",  # 16 bits are emulated on most CPUs
        "--quantization": weights.quantization if device == "cuda" else None,
        "--kv-cache-dtype": launch.kv_dtype_flag(d, _KV_DTYPES) if device == "cuda" else None,
        "--max-model-len": d.max_model_len,
        "--max-num-seqs": min(launch.max_resident_seqs(d), launch.step_tokens(d)),
        "--max-num-batched-tokens": launch.step_tokens(d),
        "--block-size": block,
        "--gpu-memory-utilization": f"{d.limits.gpu_memory_utilization:g}" if device == "cuda" else None,
        "--num-gpu-blocks-override": num_gpu_blocks if launch.sets_kv_blocks(d) else None,
        # vLLM cannot merge states with other layers into one group.
        "--disable-hybrid-kv-cache-manager": not d.scheduler.hybrid_kv_cache and d.model.attention.linear is None,
        "--watermark": f"{d.watermark:g}",
        "--enforce-eager": device == "cpu",
        "--enable-prefix-caching": d.limits.enable_prefix_caching,
        "--no-enable-prefix-caching": not d.limits.enable_prefix_caching,
        "--kv-offloading-size": f"{offloading.size_gb * GB / GIB:g}" if offloading and offloading.size_gb else None,
        "--kv-transfer-config": _connector_config(d),
        "--speculative-config": _speculative_config(d),
        "--scheduling-policy": "priority" if _by_priority(d) else "fcfs",
        "--no-enable-chunked-prefill": not launch.splits_prompts(d),
        "--async-scheduling": d.scheduler.async_scheduling,
        "--long-prefill-token-threshold": d.scheduler.long_prefill_token_threshold or None,
    }
    shared = launch.shared_notes(deployment, caps_chunks=True, ranks=RANKS)
    notes = (*weights.notes, *_notes(deployment, device), *shared)
    return Launch(("vllm", "serve", weights.model, *launch.flags(pairs)), environment, notes)


def _by_priority(d: Deployment) -> bool:
    return launch.policy_name(d.scheduler.rank) in launch.ORDERED_BY_PRIORITY


def _block_size(d: Deployment, device: str) -> int:
    multiple = BLOCK_MULTIPLE[device]
    return -(-d.limits.block_size // multiple) * multiple


def _notes(d: Deployment, device: str) -> Iterator[str]:
    rank, by_priority = launch.policy_name(d.scheduler.rank), _by_priority(d)
    if by_priority:
        yield f"{launch.ORDERED_BY_PRIORITY[rank]} vLLM then also preempts by priority, the largest first."
    elif rank not in launch.ARRIVAL:
        yield f"Requests were ordered by {rank}; vLLM takes them in order of arrival, or of their `priority`."
    victim = launch.policy_name(d.scheduler.victim)
    if victim != ("lowest_priority" if by_priority else "latest_admitted"):
        preempts = (
            "the largest priority, the latest arrival among equals" if by_priority else "the request admitted last"
        )
        yield f"When memory ran out, {victim} chose the victim; vLLM preempts {preempts}."
    yield from _batching_notes(d)
    if not d.scheduler.async_scheduling:
        yield "Steps were simulated one after the other; vLLM schedules the next one meanwhile (--async-scheduling)."
    if launch.max_resident_seqs(d) > launch.step_tokens(d):
        yield f"vLLM takes no more sequences than a step has tokens: --max-num-seqs is {launch.step_tokens(d)}."
    if (block := _block_size(d, device)) != d.limits.block_size:
        yield (
            f"Blocks of {d.limits.block_size} tokens were simulated; vLLM's attention takes multiples of "
            f"{BLOCK_MULTIPLE[device]}: --block-size is {block}."
        )
    yield from _offloading_notes(d)
    yield from _speculation_notes(d)
    if d.limits.kv_dtype is not None and dtype_name(d.limits.kv_dtype) not in _KV_DTYPES:
        yield f"vLLM has no KV cache of {d.limits.kv_dtype}; it takes the weights' dtype."
    if device != "cuda":
        yield "On a CPU the engine shows whether the command is valid, not how fast it serves: float32, no graphs."


def _batching_notes(d: Deployment) -> Iterator[str]:
    if d.scheduler.sglang is not None:
        yield "Requests were scheduled by SGLang's rules, which admit by max_tokens; vLLM's are those of vllm_v1."
    if d.scheduler.trtllm is not None:
        yield "Requests were scheduled by TensorRT-LLM's rules; vLLM's are those of vllm_v1."
        if not launch.chunks_prompts(d):
            yield (
                "Prompts were not split. Without chunked prefill vLLM's step needs a budget of max_model_len; with it, "
                f"the budget stays at the simulated {d.limits.max_num_batched_tokens} tokens, and vLLM splits a "
                "prompt that the rest of a step cannot hold."
            )
    if not (launch.chunks_prompts(d) or d.scheduler.engine_rules):
        batching = launch.policy_name(d.scheduler.batching)
        other = f"Steps were formed by {batching}; vLLM runs whole prompts together with the decodes."
        yield _BATCHINGS.get(batching, other)


def _offloading_notes(d: Deployment) -> Iterator[str]:
    offloading = d.limits.kv_offloading
    if offloading and offloading.size_gb and offloading.load != "always":
        yield "vLLM loads all that CPU memory has of a prompt, also where computing it would be faster."
    if _stores_outputs(d):
        yield "vLLM stores the blocks of an output as they fill, not when its request ends."
    if not d.storage_blocks:
        return
    assert offloading
    assert offloading.storage
    where = "one file system on all replicas' machines" if offloading.storage.shared else "on a disk of the machine"
    yield f"vLLM keeps blocks of the KV cache as files in {STORAGE_FOLDER}, which must be {where} and writable."
    if offloading.storage.size_gb < math.inf:
        yield (
            f"vLLM never deletes these files. Delete the least recently used ones yourself to stay within "
            f"{offloading.storage.size_gb:g} GB."
        )


def _speculation_notes(d: Deployment) -> Iterator[str]:
    if d.speculation is not None and d.speculation.method in ("eagle", "eagle3"):
        yield f"Put the {d.speculation.method} head of {d.model.name} in place of {DRAFTER} in --speculative-config."


def _stores_outputs(d: Deployment) -> bool:
    offloading = d.limits.kv_offloading
    return bool(offloading and offloading.size_gb and offloading.outputs)


def _connector_config(d: Deployment) -> str | None:
    extra: dict[str, Any] = {}
    if d.storage_blocks:
        tier = {"type": "fs", "root_dir": STORAGE_FOLDER}
        extra = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [tier]}
    if _stores_outputs(d):
        extra["offload_prompt_only"] = False
    return json.dumps({"kv_connector_extra_config": extra}) if extra else None


def _speculative_config(d: Deployment) -> str | None:
    chosen = d.speculation
    if chosen is None:
        return None
    config: dict[str, Any] = {"method": chosen.method, "num_speculative_tokens": chosen.num_speculative_tokens}
    if chosen.method in ("eagle", "eagle3"):
        config["model"] = DRAFTER
    elif chosen.method == "draft_model":
        config["model"] = launch.published_checkpoint(catalog.model(chosen.draft_model))[0]
    if chosen.per_batch_size:
        config["num_speculative_tokens_per_batch_size"] = chosen.per_batch_size
    return json.dumps(config)


DRAFTER = "DRAFTER"
RANKS = "--node-rank (0, 1, ...) and --master-addr on each, and --headless on all but the first"
STORAGE_FOLDER = "/mnt/kv-cache"
SCHEDULER_CLASS = "lengthwise.gateway.plugin.RraScheduler"
CONNECTOR = "NixlConnector"
PHASES_NOTE = (
    "A class of lengthwise keeps the schedule inside vLLM, where it must be importable: `pip install --no-deps "
    "lengthwise` in vLLM's environment. At the start vLLM's log states that the schedule is in force, or why it is "
    "not; phases.jsonl gets a line for every phase."
)
SPLIT_NOTES = (
    (
        "vLLM's disaggregation needs NIXL (pip install nixl) and GPUs that reach each other by NVLink, PCIe or RDMA. "
        "The cache goes from GPU to GPU; through host memory, as planned, takes kv_buffer_device cpu and is slower."
    ),
    (
        "vLLM forms its own batches: the prefill engine takes at most B_E prompts at a time and waits for no more, "
        "and the decode engine admits requests when their caches arrive."
    ),
)


_DISAGGREGATED_NOTES = (
    (
        "The first token was simulated as sent when the prefill ends. The router streams the answer of the decode "
        "engine, which computes the last token of the prompt again: TTFT has the KV transfer and a decode step in it."
    ),
    (
        "Without memory for a decode, a request was simulated to return to a prefill replica; a decode engine of vLLM "
        "prefills it itself, which delays the decodes there."
    ),
)


def disaggregated_notes(d: Deployment) -> tuple[str, ...]:
    """Return the notes on a deployment's separate sides, served with vLLM."""
    reach = "GPUs that reach each other by NVLink, PCIe or RDMA"
    if not launch.shares_node(d):
        reach = "a network between the nodes of both sides, best with RDMA"
    return (f"vLLM's disaggregation needs NIXL (pip install nixl), and {reach}.", *_DISAGGREGATED_NOTES)


def phased_launch(deployment: Deployment, settings: Mapping[str, Any], *, device: str = "cuda") -> Launch:
    """Return the command of a vLLM with a scheduler plugin that alternates prefill and decode phases.

    The deployment must have one pipeline stage. With several, vLLM runs several batches at once, in its own order. The
    settings are the table of ``--additional-config``: prefill_batch, decode_steps and others.
    """
    config = json.dumps({"lengthwise": dict(settings)})
    more = ("--scheduler-cls", SCHEDULER_CLASS, "--additional-config", config)
    return _extended(vllm_launch(deployment, device=device), more, (PHASES_NOTE,))


def split_launches(
    prefill: Deployment, decode: Deployment, *, notes: tuple[str, ...] = SPLIT_NOTES, **options: Any
) -> tuple[Launch, Launch]:
    """Return the command of a prefill engine, and the command of a decode engine that receives its KV cache.

    ``options`` are those of ``vllm_launch``.
    """
    first, second = (
        _extended(
            vllm_launch(deployment, **options),
            ("--kv-transfer-config", json.dumps({"kv_connector": CONNECTOR, "kv_role": role})),
            notes,
        )
        for deployment, role in ((prefill, "kv_producer"), (decode, "kv_consumer"))
    )
    return first, second


def _extended(plain: Launch, more: tuple[str, ...], notes: tuple[str, ...]) -> Launch:
    return replace(plain, command=(*plain.command, *more), notes=(*notes, *plain.notes))
