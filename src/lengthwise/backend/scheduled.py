"""Engines that keep a schedule: vLLM in phases (RRA), and vLLM with encoding and decoding split between engines (WAA).

Options are those of vLLM 0.32: ``vllm/config/kv_transfer.py``, and what its NIXL connector takes in
``vllm/distributed/kv_transfer/kv_connector/v1/nixl`` of https://github.com/vllm-project/vllm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lengthwise.backend.launch import Launch
from lengthwise.backend.vllm import vllm_launch
from lengthwise.schema.deployment import Deployment

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
        settings: The table of ``--additional-config``: encode_batch, decode_steps and the rest.
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
