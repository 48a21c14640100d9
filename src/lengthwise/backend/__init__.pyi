from .kubernetes import kubernetes_manifest
from .launch import Launch
from .launch_folder import (
    PLAN,
    PORT,
    ScheduledEngines,
    entries,
    load_test,
    require_new,
    scheduled_scripts,
    write_launch,
    write_texts,
    write_trace,
)
from .sglang import sglang_launch
from .vllm import phased_launch, split_launches, vllm_launch

__all__ = [
    "PLAN",
    "PORT",
    "Launch",
    "ScheduledEngines",
    "entries",
    "kubernetes_manifest",
    "load_test",
    "phased_launch",
    "require_new",
    "scheduled_scripts",
    "sglang_launch",
    "split_launches",
    "vllm_launch",
    "write_launch",
    "write_texts",
    "write_trace",
]
