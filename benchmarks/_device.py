"""Devices without a data sheet, by the peaks that they reach."""

from __future__ import annotations

import time
from typing import Any

import _harness
from _harness import fresh_process

from lengthwise import catalog
from lengthwise.schema.errors import UnknownNameError
from lengthwise.schema.specs import GpuSpec


def this_thread() -> GpuSpec:
    """Return one thread of this processor as a device: peaks that NumPy reaches."""
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
    source = "measured with NumPy: a product of 1024 x 1024, a copy of 256 MiB"
    return _spec(_processor(), {"float32": flops}, 16 * 2**30, bandwidth, source)


def _spec(name: str, flops: dict[str, float], memory: float, bandwidth: float, source: str) -> GpuSpec:
    price = {"price_per_hour_usd": 0.1, "price_source": "none: a local device"}
    return GpuSpec(name, flops, memory, bandwidth, tdp_w=10.0, idle_w=1.0, source=source, **price)


def _processor() -> str:
    """Return the name of the device in profiles of this machine."""
    return str(_harness.machine()["cpu"])


def machine(gpu: GpuSpec) -> dict[str, Any]:
    """Return the facts of the machine and the peaks of one thread."""
    return {
        **_harness.machine(),
        "float32_gflops_one_thread": round(gpu.peak_flops["float32"] / 1e9, 1),
        "copy_gb_per_s_one_thread": round(gpu.bandwidth_bytes_per_s / 1e9, 1),
    }


def device_of(device: str, dtype: str) -> GpuSpec:
    """Return the catalog's GPU of this name, else one of the peaks of a product and a copy in torch."""
    import torch

    cuda = device != "cpu"
    name = torch.cuda.get_device_name() if cuda else _processor()
    try:
        return catalog.gpu(name)
    except UnknownNameError:
        pass
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
    source = f"measured with torch: a product of {n} x {n}, a copy of {4 * items} bytes"
    flops = {dtype: 2 * n**3 / best(lambda: a @ a)}
    return _spec(name, flops, memory, 8 * items / best(lambda: c.copy_(b)), source)
