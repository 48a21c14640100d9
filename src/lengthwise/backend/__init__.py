"""Real engines: from a simulated deployment to what one must run."""

from lengthwise.backend.folder import write_launch
from lengthwise.backend.kubernetes import kubernetes_manifest
from lengthwise.backend.launch import Launch
from lengthwise.backend.load_test import load_test, write_trace
from lengthwise.backend.sglang import sglang_launch
from lengthwise.backend.vllm import vllm_launch

__all__ = [
    "Launch",
    "kubernetes_manifest",
    "load_test",
    "sglang_launch",
    "vllm_launch",
    "write_launch",
    "write_trace",
]
