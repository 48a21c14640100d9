"""Modules of vLLM's names whose classes are a world's own."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from lengthwise.gateway.plugin.vllm_adapter import TESTED


def schedulers(world: type) -> tuple[type, type]:
    """vLLM's scheduler without asynchronous scheduling and with it, of a world's class."""
    stock = type("Scheduler", (world,), {"__doc__": "vLLM's, without asynchronous scheduling."})
    return stock, type("AsyncScheduler", (stock,), {"__doc__": "With it."})


def in_place(
    monkeypatch: pytest.MonkeyPatch, request: type, stock: type, asynchronous: type, **others: type
) -> dict[str, Any]:
    """The modules by name, put where imports find them; ``others``: modules of schedulers with one class each."""
    homes = {
        "vllm": {"__version__": TESTED[0]},
        "vllm.v1.request": {"Request": request},
        "vllm.v1.core.sched.scheduler": {"Scheduler": stock},
        "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": asynchronous},
    }
    homes |= {f"vllm.v1.core.sched.{name}": {one.__name__: one} for name, one in others.items()}
    found = {}
    for name, names in homes.items():
        found[name] = module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    return found
