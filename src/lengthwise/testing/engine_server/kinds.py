"""What each kind of engine tells of itself: metrics, versions, slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lengthwise.testing.engine_server.server import EngineServer

Facts = Callable[["EngineServer"], Any]
VERSION = "0.33.0+emulated"


def metrics(server: EngineServer) -> str:
    """Prometheus text under the kind's own names; "" where it has none."""
    batch = server.clocked.batch
    values = {
        "running": batch.running,
        "waiting": batch.queued,
        "kv": batch.kv_used,
        "preemptions": batch.preemptions,
        "tokens": batch.tokens,
    }
    lines = []
    for name, key, kind in _METRICS.get(server.spec.kind, ()):
        labels = f'{{engine="0",model_name="{server.spec.model}"}}' if server.spec.kind != "llama.cpp" else ""
        lines += [f"# HELP {name} Emulated.", f"# TYPE {name} {kind}", f"{name}{labels} {float(values[key])}"]
    if server.spec.kind == "vllm":
        lines += [
            "# HELP vllm:cache_config_info Emulated.",
            "# TYPE vllm:cache_config_info gauge",
            _cache(server),
        ]
    return "\n".join([*lines, ""]) if lines else ""


def _cache(server: EngineServer) -> str:
    limits = server.spec.limits
    told = f'block_size="{limits.block_size}",engine="0",num_gpu_blocks="{limits.num_blocks}"'
    return f"vllm:cache_config_info{{{told}}} 1.0"


_METRICS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "vllm": (
        ("vllm:num_requests_running", "running", "gauge"),
        ("vllm:num_requests_waiting", "waiting", "gauge"),
        ("vllm:kv_cache_usage_perc", "kv", "gauge"),
        ("vllm:num_preemptions_total", "preemptions", "counter"),
        ("vllm:generation_tokens_total", "tokens", "counter"),
    ),
    "sglang": (
        ("sglang:num_running_reqs", "running", "gauge"),
        ("sglang:num_queue_reqs", "waiting", "gauge"),
        ("sglang:token_usage", "kv", "gauge"),
        ("sglang:num_retracted_reqs", "preemptions", "gauge"),
        ("sglang:generation_tokens_total", "tokens", "counter"),
    ),
    "llama.cpp": (
        ("llamacpp:requests_processing", "running", "gauge"),
        ("llamacpp:requests_deferred", "waiting", "gauge"),
        ("llamacpp:kv_cache_usage_ratio", "kv", "gauge"),
        ("llamacpp:tokens_predicted_total", "tokens", "counter"),
    ),
}


def _slots(server: EngineServer) -> list[dict[str, Any]]:
    busy = server.clocked.batch.running
    slots, length = server.spec.limits.max_num_seqs, server.spec.max_model_len
    return [{"id": i, "n_ctx": length, "is_processing": i < busy} for i in range(slots)]


def _props(server: EngineServer) -> dict[str, Any]:
    return {
        "build_info": f"b{VERSION}",
        "total_slots": server.spec.limits.max_num_seqs,
        "default_generation_settings": {"n_ctx": server.spec.max_model_len},
        "model_path": server.spec.model,
    }


def _server_info(server: EngineServer) -> dict[str, Any]:
    limits = server.spec.limits
    return {
        "version": VERSION,
        "served_model_name": server.spec.model,
        "max_running_requests": limits.max_num_seqs,
        "max_total_num_tokens": limits.num_blocks * limits.block_size,
        "enable_priority_scheduling": limits.by_priority,
        "schedule_low_priority_values_first": False,
    }


FACTS: dict[str, dict[str, Facts]] = {
    "vllm": {"/version": lambda _: {"version": VERSION}},
    "sglang": {
        "/server_info": _server_info,
        "/get_server_info": _server_info,
        "/get_model_info": lambda server: {"model_path": server.spec.model, "is_generation": True},
    },
    "llama.cpp": {"/slots": _slots, "/props": _props},
    "openai": {},
}
"""Routes that only tell something, by kind."""
OWNERS = {"vllm": "vllm", "sglang": "sglang", "llama.cpp": "llamacpp", "openai": "openai"}
TOKENIZES = {"vllm": "prompt", "sglang": "prompt", "llama.cpp": "content"}
"""The field of ``/tokenize`` that holds the text."""
ABORTS = {"vllm": "/inference/v1/abort_requests", "sglang": "/abort_request"}
