"""Schedulers of real engines: steps that differ from their own, simulated requests per second, memory by lengths.

``vllm`` and ``sglang`` need ``make engine``, or SGLang's sources in LENGTHWISE_SGLANG; ``trtllm`` needs a clone of
TensorRT-LLM in LENGTHWISE_TRTLLM.
"""

import importlib
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import _vllm
import numpy as np
from _harness import ROOT, cpu_seconds, machine, summary
from _sections import Sections
from simulate import LIMITS, LOAD, chat, check

from lengthwise import deploy, policy, simulate
from lengthwise.schema.deployment import Scheduler, TrtllmSettings

sys.path.append(str(ROOT / "tests" / "live"))  # which holds what runs the engines
STEPS, WORLDS, ENGINES, RATE_RPS = 100_000, 200, ("vllm", "sglang", "trtllm"), 4.5 * LOAD
SCHEDULERS = {name: policy.scheduler(name) for name in ("vllm_v1", "sglang")}
SCHEDULERS["vllm_v1_async"] = replace(SCHEDULERS["vllm_v1"], async_scheduling=True)
SCHEDULERS["trtllm"] = Scheduler(trtllm=TrtllmSettings(enable_chunked_prefill=True))


def steps(_shared: Path, quick: bool, engine: str) -> dict[str, Any]:
    """Return how many steps differ from those of the engine's own functions in the same random worlds."""
    test, counts, different, worlds = importlib.import_module(f"test_live_{engine}_steps"), Counter[str](), 0, 0
    if not test.SOURCES.exists():
        raise FileNotFoundError(f"no {test.SOURCES}: set LENGTHWISE_{engine.upper()}")
    least, new = (1, 3) if quick else (STEPS, WORLDS)
    while counts["steps"] < least:
        found, wrong = test.compared(range(worlds, worlds + new), sys.executable)
        counts, different, worlds = counts + found, different + len(wrong), worlds + new
    return {f"engines.{engine}_steps_different": {"value": different, "worlds": worlds, **counts}}


def live(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return a real vLLM's tokens/s in little memory reserved by the class of requests, over those by its own rule."""
    gains, runs = importlib.import_module("plugin_engines").in_little_memory(_vllm.require(), 1 if quick else 5)
    return {"engines.live_gain": summary(gains) | {"runs": runs}}


def speed(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return simulated requests per CPU second by scheduler, where clients limit outputs to twice their lengths."""
    workload, rows = chat(100_000 if quick else 1_000_000, RATE_RPS), {}
    workload = replace(workload, max_tokens=np.minimum(2 * workload.output_tokens, 4096 - workload.prompt_tokens))
    for name, scheduler in SCHEDULERS.items():
        made = deploy("llama-2-70b", "A100-80GB", tp=4, limits=LIMITS, scheduler=scheduler)
        run = partial(simulate, workload, made, max_log_steps=0)
        check(run(), workload)
        rates = [len(workload) / cpu_s for cpu_s in cpu_seconds(run, 3 if quick else 5)]
        rows[f"engines.requests_per_s.{name}"] = summary(rates) | {"machine": machine()}
    return rows


MODULES = {name: f"engines:steps:{name}" for name in ENGINES} | {"live": "engines:live", "speed": "engines:speed"}
SECTIONS = Sections("engines", __doc__, MODULES)

if __name__ == "__main__":
    SECTIONS.main()
