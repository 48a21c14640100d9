"""Which device and dtype to measure: what was asked for, if this machine has it."""

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
LEAST_FREE_GB = 2


@dataclass(frozen=True)
class Device:
    """What is measured on: "cpu" or "cuda", the numbers' dtype, and the threads of a CPU."""

    kind: str
    dtype: str
    threads: int


def torch_module() -> Any:
    """The module.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingExtraError("measuring operators", "torch") from error
    return torch


def device_kind(device: str = "auto") -> str:
    """Which of "cpu" and "cuda" is meant; raises as ``measure_operators`` does."""
    return _kind(torch_module(), device)


def choose(torch: Any, model: ModelSpec, device: str, dtype: str, threads: int | None) -> Device:
    """The device and the dtype that were asked for; "auto": a GPU where there is one, and its usual dtype.

    Raises:
        UnknownNameError: There is no such device or dtype.
        InputError: This machine has no such device, or the device not the dtype.
    """
    kind = _kind(torch, device)
    if threads is not None and threads < 1:
        raise InputError(f"threads must be at least 1; it is {threads}")
    with opened(kind):
        return Device(kind, _dtype(torch, model, kind, dtype), threads or default_threads())


@contextmanager
def opened(kind: str) -> Iterator[None]:
    """What is done within is the first that a GPU is asked for: its refusal is told with what to do.

    Raises:
        InputError: The GPU is full, busy, or lent to another process alone.
    """
    try:
        yield
    except (RuntimeError, NoRoomError) as error:
        if kind != "cuda":
            raise
        first = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise InputError(
            f"the GPU cannot be used: {first}. It must have {LEAST_FREE_GB} GB free and let this process in: "
            "nvidia-smi shows who uses it and its compute mode. End that, choose another with "
            "CUDA_VISIBLE_DEVICES, or measure with --device cpu"
        ) from error


def _kind(torch: Any, device: str) -> str:
    if device not in DEVICES:
        raise UnknownNameError("device", device, DEVICES)
    kind = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        _require_cuda(torch)
    return kind


def default_threads() -> int:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


def emulates_bfloat16() -> bool:
    """Whether this CPU has no instructions for bfloat16, as far as Linux on x86 tells."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "flags" in text and "avx512_bf16" not in text and "amx_bf16" not in text


def _require_cuda(torch: Any) -> None:
    if torch.cuda.is_available():
        return
    if torch.version.cuda is None:
        why = f"torch {torch.__version__} was built without CUDA: install a build with it"
    else:
        why = f"torch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU: look at nvidia-smi and the driver"
    raise InputError(f"device cuda needs an NVIDIA GPU and its driver; {why}, or measure with --device cpu")


def _dtype(torch: Any, model: ModelSpec, kind: str, requested: str) -> str:
    if requested == "auto":
        if kind == "cpu":
            return "float32"
        requested = model.dtype if model.dtype in DTYPES[:2] else "bfloat16"
        if requested == "bfloat16" and not _has_bfloat16(torch):
            requested = "float16"
    dtype = dtype_name(requested)
    if dtype not in DTYPES:
        raise InputError(f"dtype must be of {', '.join(DTYPES)}, what torch multiplies everywhere; it is {dtype}")
    if kind == "cuda" and dtype == "bfloat16" and not _has_bfloat16(torch):
        raise InputError(f"{torch.cuda.get_device_name(0)} has no bfloat16; measure with --dtype float16 or float32")
    return dtype


def _has_bfloat16(torch: Any) -> bool:
    return bool(torch.cuda.get_device_capability(0)[0] >= 8)


_ASK_GPU = "driver_version,clocks.max.sm,clocks.sm,power.limit,memory.total"
_REQUEST_TIMEOUT_S = 10


def machine_facts(torch: Any, device: Device) -> dict[str, Any]:
    """JSON-able facts: processor, cores, governor, threads, versions; of a GPU its name, driver, clocks, power."""
    told: dict[str, Any] = {
        "processor": processor(),
        "cores": os.cpu_count() or 1,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "threads": device.threads,
    }
    if governor := _text("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"):
        told["governor"] = governor
    if device.kind == "cuda":
        told |= _gpu(torch)
    return told


def device_name(torch: Any, device: Device) -> str:
    """What a profile calls the device: the GPU's name in the catalog or its own, or the processor's."""
    if device.kind != "cuda":
        return processor()
    name = str(torch.cuda.get_device_name(0))
    try:
        return catalog.gpu(name).name
    except UnknownNameError:
        return name


def processor() -> str:
    """The processor's name."""
    for line in _text("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown processor"


def cpu_load() -> float:
    """Processes that wanted to run in the last minute, by core; 0 where the system does not tell."""
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 0.0


def _gpu(torch: Any) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    told: dict[str, Any] = {
        "gpu": str(properties.name),
        "gpus": torch.cuda.device_count(),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "gpu_memory_bytes": int(properties.total_memory),
        "cuda": str(torch.version.cuda),
    }
    try:
        asked = ["nvidia-smi", f"--query-gpu={_ASK_GPU}", "--format=csv,noheader", "-i", "0"]
        line = subprocess.run(asked, capture_output=True, text=True, timeout=_REQUEST_TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return told
    named = ("driver", "largest_clock", "clock", "power_limit", "memory")
    return told | dict(zip(named, (word.strip() for word in line.split(",")), strict=False))


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
