"""Real engines: from a simulated deployment to what one must run."""

from lengthwise.backend.folder import write_launch
from lengthwise.backend.kubernetes import kubernetes_manifest
from lengthwise.backend.launch import Launch
from lengthwise.backend.load_test import load_test, write_trace
from lengthwise.backend.schedule_folder import (
    PLAN,
    PORT,
    ScheduledEngines,
    listed,
    require_new,
    scheduled_scripts,
    write_texts,
)
from lengthwise.backend.scheduled import phased_launch, split_launches
from lengthwise.backend.sglang import sglang_launch
from lengthwise.backend.vllm import vllm_launch

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
