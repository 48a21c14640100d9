"""Devices that no data sheet describes, by what they reach."""

from __future__ import annotations

import time
from typing import Any

from _harness import fresh_process
from _harness import machine as metadata

from lengthwise import catalog
from lengthwise.schema.errors import UnknownNameError
from lengthwise.schema.specs import GpuSpec


def this_thread() -> GpuSpec:
    """One thread of this processor as a device: peaks that NumPy reaches, no data sheet."""
    code = (
        "import json, time, numpy as np\n"
        "a = np.ones((1024, 1024), np.float32); b = np.ones(2**26, np.float32); c = np.empty_like(b)\n"
        "def best(f):\n"
        "    out = []\n"
        "    for _ in range(7):\n"
        "        s = time.perf_counter(); f(); out.append(time.perf_counter() - s)\n"
        "    return min(out)\n"
        "print(json.dumps([2 * 1024**3 / best(lambda: a @ a), 2 * b.nbytes / best(lambda: np.copyto(c, b))]))"
    )
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    flops, bandwidth = fresh_process(code, **one)["out"]
    return GpuSpec(
        name=processor(),
        peak_flops={"float32": flops},
        memory_bytes=16 * 2**30,
        bandwidth_bytes_per_s=bandwidth,
        tdp_w=10.0,
        idle_w=1.0,
        price_per_hour_usd=0.1,
        price_source="none: a thread of a machine that is there",
        source="measured with NumPy: a product of 1024 x 1024, a copy of 256 MiB",
    )


def processor() -> str:
    """What a profile of this machine calls its device."""
    return str(metadata()["cpu"])


def machine(gpu: GpuSpec) -> dict[str, Any]:
    return {
        **metadata(),
        "float32_gflops_one_thread": round(gpu.peak_flops["float32"] / 1e9, 1),
        "copy_gb_per_s_one_thread": round(gpu.bandwidth_bytes_per_s / 1e9, 1),
    }


def device_of(device: str, dtype: str) -> GpuSpec:
    """The catalog's GPU of this name, else one of the peaks that torch reaches."""
    import torch

    name = processor() if device == "cpu" else torch.cuda.get_device_name()
    try:
        return catalog.gpu(name)
    except UnknownNameError:
        return measured_spec(name, device, dtype)


def measured_spec(name: str, device: str, dtype: str) -> GpuSpec:
    """A device of which no data sheet is at hand: a product and a copy, the best of several."""
    import torch

    cuda = device != "cpu"
    if not cuda:
        torch.set_num_threads(1)
    n, items = (8192, 2**29) if cuda else (1024, 2**26)
    a = torch.ones(n, n, dtype=getattr(torch, dtype), device=device)
    b = torch.ones(items, dtype=torch.float32, device=device)
    c = torch.empty_like(b)

    def best(work: Any) -> float:
        seconds = []
        for _ in range(7):
            start = time.perf_counter()
            work()
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    memory = torch.cuda.get_device_properties(0).total_memory if cuda else 16 * 2**30
    return GpuSpec(
        name=name,
        peak_flops={dtype: 2 * n**3 / best(lambda: a @ a)},
        memory_bytes=memory,
        bandwidth_bytes_per_s=8 * items / best(lambda: c.copy_(b)),
        tdp_w=1.0,
        idle_w=0.0,
        price_per_hour_usd=0.1,
        price_source="none: a device that is there",
        source=f"measured with torch: a product of {n} x {n}, a copy of {4 * items} bytes",
    )
