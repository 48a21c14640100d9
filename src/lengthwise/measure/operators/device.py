"""Chooses the device and dtype to measure on, and reads properties of the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lengthwise import catalog
from lengthwise.measure.operators.points import NoRoomError
from lengthwise.schema.errors import InputError, MissingExtraError, UnknownNameError
from lengthwise.schema.specs import ModelSpec, dtype_name

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("bfloat16", "float16", "float32")
MIN_FREE_GB = 2


@dataclass(frozen=True)
class Device:
    """Device to measure on ("cpu" or "cuda"), the dtype, and the number of CPU threads."""

    kind: str
    dtype: str
    threads: int


def torch_module() -> Any:
    """Return torch. Raises MissingExtraError if it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError("measuring operators", "torch") from error
    return torch


def device_kind(device: str = "auto") -> str:
    """Return "cpu" or "cuda" for a requested device. Raises the same errors as ``measure_operators``."""
    return _kind(torch_module(), device)


def choose_device(torch: Any, model: ModelSpec, device: str, dtype: str, threads: int | None) -> Device:
    """Return the device, dtype and threads to use. "auto" selects a GPU if there is one, and the usual dtype."""
    kind = _kind(torch, device)
    if threads is not None and threads < 1:
        raise InputError(f"threads must be at least 1; it is {threads}")
    if threads is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        threads = max(1, cores or 1)
    with gpu_errors(kind):
        return Device(kind, _dtype(torch, model, kind, dtype), threads)


@contextmanager
def gpu_errors(kind: str) -> Iterator[None]:
    """Within the block, raise errors of the first use of a GPU as InputErrors that state remedies."""
    try:
        yield
    except (RuntimeError, NoRoomError) as error:
        if kind != "cuda":
            raise
        first = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise InputError(
            f"the GPU cannot be used: {first}. It must have {MIN_FREE_GB} GB free and let this process in: "
            "nvidia-smi shows its processes and compute mode. End other processes, choose another GPU with "
            "CUDA_VISIBLE_DEVICES, or measure with --device cpu"
        ) from error


def _kind(torch: Any, device: str) -> str:
    if device not in DEVICES:
        raise UnknownNameError("device", device, DEVICES)
    available = torch.cuda.is_available()
    kind = {"auto": "cuda" if available else "cpu"}.get(device, device)
    if kind == "cuda" and not available:
        cuda = torch.version.cuda
        unseen = f"(CUDA {cuda}) sees no GPU: look at nvidia-smi and the driver"
        reason = "was built without CUDA: install a build with it" if cuda is None else unseen
        found = f"torch {torch.__version__} {reason}, or measure with --device cpu"
        raise InputError(f"device cuda needs an NVIDIA GPU and its driver; {found}")
    return kind


def emulates_bfloat16() -> bool:
    """Return whether this CPU is known to lack instructions for bfloat16."""
    flags = _text("/proc/cpuinfo")
    return "flags" in flags and "avx512_bf16" not in flags and "amx_bf16" not in flags


def _dtype(torch: Any, model: ModelSpec, kind: str, requested: str) -> str:
    def has_bfloat16() -> bool:
        return bool(torch.cuda.get_device_capability(0)[0] >= 8)

    if requested == "auto":
        if kind == "cpu":
            return "float32"
        requested = model.dtype if model.dtype in DTYPES[:2] else "bfloat16"
        if requested == "bfloat16" and not has_bfloat16():
            requested = "float16"
    dtype = dtype_name(requested)
    if dtype not in DTYPES:
        raise InputError(
            f"dtype must be one of {', '.join(DTYPES)}, which torch multiplies on all devices; it is {dtype}"
        )
    if kind == "cuda" and dtype == "bfloat16" and not has_bfloat16():
        raise InputError(f"{torch.cuda.get_device_name(0)} has no bfloat16; measure with --dtype float16 or float32")
    return dtype


_GPU_QUERY = {"driver": "driver_version", "largest_clock": "clocks.max.sm", "clock": "clocks.sm"}
_GPU_QUERY |= {"power_limit": "power.limit", "memory": "memory.total"}


def machine_properties(torch: Any, device: Device) -> dict[str, Any]:
    """Return processor, threads and versions as plain JSON values, and the GPU's properties if one is used."""
    found: dict[str, Any] = {
        "processor": processor(),
        "cores": os.cpu_count() or 1,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "threads": device.threads,
    }
    if governor := _text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"):
        found["governor"] = governor
    if device.kind == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": str(properties.name),
            "gpus": torch.cuda.device_count(),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "gpu_memory_bytes": int(properties.total_memory),
            "cuda": str(torch.version.cuda),
        }
        command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_QUERY.values())}", "--format=csv,noheader", "-i", "0"]
        try:
            line = subprocess.run(  # noqa: S603 - fixed arguments
                command, capture_output=True, text=True, timeout=10, check=True
            ).stdout
        except (OSError, subprocess.SubprocessError):
            return found
        found |= dict(zip(_GPU_QUERY, (word.strip() for word in line.split(",")), strict=False))
    return found


def device_name(torch: Any, device: Device) -> str:
    """Return the device's name in a profile: the processor's name, or the GPU's name by the catalog or torch."""
    if device.kind != "cuda":
        return processor()
    name = str(torch.cuda.get_device_name(0))
    try:
        return catalog.gpu(name).name
    except UnknownNameError:
        return name


def processor() -> str:
    """Return the processor's name."""
    for line in _text("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown processor"


def cpu_load() -> float:
    """Return the load average of the last minute per core, or 0 if it is unknown."""
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
