"""Schedulers of real engines: steps that differ from the engine's own scheduler, and simulated requests per second.

``sglang`` needs ``make engine``, or a folder with SGLang's sources in LENGTHWISE_SGLANG; ``trtllm`` a clone of
TensorRT-LLM in LENGTHWISE_TRTLLM.
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _harness import ROOT, cpu_seconds, machine, summary
from _sections import Sections
from simulate import LIMITS, LOAD, chat, check

from lengthwise import deploy, policy, simulate

STEPS, WORLDS, SCHEDULERS = 100_000, 200, ("vllm_v1", "sglang", "trtllm")
RATE_RPS = 4.5 * LOAD


def sglang(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return how many steps differ from those of SGLang's own functions in the same random worlds."""
    sys.path.append(str(ROOT / "tests" / "live"))
    from test_live_sglang_steps import SGLANG, compared

    if not SGLANG.exists():
        raise FileNotFoundError(f"no {SGLANG}: make engine")
    counts, different, worlds = {}, 0, 0
    while counts.get("steps", 0) < (1 if quick else STEPS):
        found, steps = compared(range(worlds, worlds + WORLDS), sys.executable)
        counts = {kind: counts.get(kind, 0) + count for kind, count in found.items()}
        different, worlds = different + len(steps), worlds + WORLDS
    return {"engines.sglang_steps_different": {"value": different, "worlds": worlds, **counts}}


def trtllm(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return how many steps differ from those of TensorRT-LLM's own classes in the same random worlds."""
    sys.path.append(str(ROOT / "tests" / "live"))
    from test_live_trtllm_steps import SOURCES, compared, trtllm_steps, world

    if not SOURCES.exists():
        raise FileNotFoundError(f"no {SOURCES}: clone TensorRT-LLM, or set LENGTHWISE_TRTLLM")
    worlds = [world(seed) for seed in range(3 if quick else WORLDS)]
    counts, different = compared(worlds, trtllm_steps(worlds))
    return {"engines.trtllm_steps_different": {"value": len(different), "worlds": len(worlds), **counts}}


def speed(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return simulated requests per CPU second by scheduler, where clients limit outputs to twice their lengths."""
    workload, rows = chat(100_000 if quick else 1_000_000, RATE_RPS), {}
    workload = replace(workload, max_tokens=np.minimum(2 * workload.output_tokens, 4096 - workload.prompt_tokens))
    for name in SCHEDULERS:
        chosen = policy.scheduler(name)
        if chosen.trtllm:
            chosen = replace(chosen, trtllm=replace(chosen.trtllm, enable_chunked_prefill=True))
        made = deploy("llama-2-70b", "A100-80GB", tp=4, limits=LIMITS, scheduler=chosen)
        run = partial(simulate, workload, made, max_log_steps=0)
        check(run(), workload)
        rates = [len(workload) / cpu_s for cpu_s in cpu_seconds(run, 3 if quick else 5)]
        rows[f"engines.requests_per_s.{name}"] = summary(rates) | {"machine": machine()}
    return rows


TARGETS = {f"engines.requests_per_s.{name}": (300_000, "higher", "1/s") for name in SCHEDULERS}
TARGETS |= {f"engines.{name}_steps_different": (0, "lower", "steps") for name in ("sglang", "trtllm")}
SECTIONS = Sections("engines", __doc__, {name: f"engines:{name}" for name in ("sglang", "trtllm", "speed")}, TARGETS)

if __name__ == "__main__":
    SECTIONS.main()
