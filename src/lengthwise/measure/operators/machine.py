"""What a profile must tell of the machine that it was measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from lengthwise import catalog
from lengthwise.measure.operators.device import Device
from lengthwise.schema.errors import UnknownNameError

_ASK_GPU = "driver_version,clocks.max.sm,clocks.sm,power.limit,memory.total"
_ASK_S = 10


def facts(torch: Any, device: Device) -> dict[str, Any]:
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


def load() -> float:
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
        line = subprocess.run(asked, capture_output=True, text=True, timeout=_ASK_S, check=True).stdout  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return told
    named = ("driver", "largest_clock", "clock", "power_limit", "memory")
    return told | dict(zip(named, (word.strip() for word in line.split(",")), strict=False))


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
