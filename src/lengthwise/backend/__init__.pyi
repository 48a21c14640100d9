from .kubernetes import kubernetes_manifest
from .launch import Launch
from .launch_folder import (
    PLAN,
    PORT,
    ScheduledEngines,
    listed,
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
    "kubernetes_manifest",
    "listed",
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
