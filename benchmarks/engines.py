"""Schedulers of real engines: steps that differ from the engine's own scheduler, and simulated requests per second.

``sglang`` needs ``make engine``, or a folder with SGLang's sources in LENGTHWISE_SGLANG.
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

STEPS, WORLDS, SCHEDULERS = 100_000, 200, ("vllm_v1", "sglang")
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


def speed(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return simulated requests per CPU second by scheduler, where clients limit outputs to twice their lengths."""
    workload, rows = chat(100_000 if quick else 1_000_000, RATE_RPS), {}
    workload = replace(workload, max_tokens=np.minimum(2 * workload.output_tokens, 4096 - workload.prompt_tokens))
    for name in SCHEDULERS:
        made = deploy("llama-2-70b", "A100-80GB", tp=4, limits=LIMITS, scheduler=policy.scheduler(name))
        run = partial(simulate, workload, made, max_log_steps=0)
        check(run(), workload)
        rates = [len(workload) / cpu_s for cpu_s in cpu_seconds(run, 3 if quick else 5)]
        rows[f"engines.requests_per_s.{name}"] = summary(rates) | {"machine": machine()}
    return rows


TARGETS = {f"engines.requests_per_s.{name}": (300_000, "higher", "1/s") for name in SCHEDULERS}
TARGETS |= {"engines.sglang_steps_different": (0, "lower", "steps")}
SECTIONS = Sections("engines", __doc__, {"sglang": "engines:sglang", "speed": "engines:speed"}, TARGETS)

if __name__ == "__main__":
    SECTIONS.main()
