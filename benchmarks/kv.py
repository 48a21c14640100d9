"""The KV cache: scheduling as vLLM with a prefix cache, hit rates of recorded traffic, and speed.

``steps`` and ``radix`` need ``make engine``; ``hit_rates`` and ``mooncake`` need the recorded conversation trace.
"""

import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from _harness import ROOT, cpu_seconds, fresh_process, machine
from _sections import Sections

from lengthwise import EngineLimits, Workload, deploy, policy, simulate
from lengthwise.usecases.kv import reuse
from lengthwise.workload import read

STEPS, WORLDS, REPLICAS, BEFORE = 100_000, 200, (1, 4, 16), "bde323ec"
LRU_SHARES = {500: 0.042, 1000: 0.045, 2000: 0.055, 5000: 0.119}
LRU_SHARES |= {10_000: 0.215, 20_000: 0.294, 50_000: 0.356, 10**9: 0.366}
"""Share of block references that a serial LRU simulation of the conversation trace finds, by blocks of 512 tokens."""


def steps(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return how many steps of vLLM's own scheduler, stepped without a model, equal the engine's in random worlds."""
    import _vllm

    sys.path.append(str(ROOT / "tests" / "live"))
    from test_live_prefix_steps import random_world, recorded, vllm_steps

    lines, worlds, preempted, hits = 0, 0, 0, 0
    while lines < (1 if quick else STEPS):
        made = [random_world(seed) for seed in range(worlds, worlds + WORLDS)]
        for world, expected in zip(made, vllm_steps(made, _vllm.require()), strict=True):
            assert recorded(world) == expected, world
            preempted += sum(len(line[3]) for line in expected)
            hits += sum(tokens > 0 for line in expected for _, tokens in line[4])
            lines += len(expected)
        worlds += WORLDS
    return {"kv.vllm_steps_equal": {"value": lines, "worlds": worlds, "preemptions": preempted, "hits": hits}}


def radix(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return after how many random operations SGLang's own radix tree equals the simulator's."""
    import _vllm

    sys.path.append(str(ROOT / "tests" / "live"))
    from test_live_radix_steps import compared_at_least

    return {"kv.radix_steps_equal": compared_at_least(1 if quick else STEPS, _vllm.require())}


def conversation(shared: Path) -> Workload:
    if not (path := shared / "data" / "traces" / "mooncake_conversation_trace.jsonl.gz").exists():
        raise FileNotFoundError(f"no {path}")
    return read(path)


def hit_rates(shared: Path, _quick: bool) -> dict[str, Any]:
    """Return the largest error of the hit rates of one pass, against a cache simulated at each size."""
    found = reuse(trace := conversation(shared), 512, prompts_only=True)
    shares = {blocks: float(found.hits(blocks).sum() / found.references.sum()) for blocks in LRU_SHARES}
    cpu_s = statistics.median(cpu_seconds(lambda: reuse(trace, 512, prompts_only=True), 3))
    worst = max(abs(shares[blocks] - share) for blocks, share in LRU_SHARES.items())
    return {"kv.hit_rate_error_max": {"value": worst, "shares": shares, "cpu_s_of_a_pass": cpu_s}}


def mooncake(shared: Path, quick: bool) -> dict[str, Any]:
    """Return the simulated requests of the conversation trace per CPU second, with the prefix cache, by replicas."""
    trace, rows = conversation(shared), {}
    limits = EngineLimits(max_num_batched_tokens=8192, enable_prefix_caching=True)
    routed = replace(policy.scheduler("vllm_v1"), router="cache_aware")
    for replicas in REPLICAS:
        made = deploy("llama-3.1-8b", "H100", replicas=replicas, limits=limits, scheduler=routed)
        run = partial(simulate, trace, made, max_log_steps=0)
        done = run().requests
        assert (done.output_tokens == trace.output_tokens).all()
        found = float(done.cached_tokens.sum() / trace.prompt_tokens.sum())
        assert 0 < found <= 0.374, found  # what an unlimited cache finds
        rates = [len(trace) / cpu_s for cpu_s in cpu_seconds(run, 2 if quick else 5)]
        row = {"value": statistics.median(rates), "ci": (min(rates), max(rates)), "tokens_found": found}
        rows[f"kv.mooncake_requests_per_s.{replicas}"] = row | {"machine": machine()}
    return rows


SPEED = """
import json, sys
from dataclasses import replace
sys.path.insert(0, {folder!r})
from simulate import LIMITS, chat, check, cpu_seconds, deploy, simulate
made = deploy("llama-2-70b", "A100-80GB", tp=4, limits=replace(LIMITS, enable_prefix_caching={on}))
check(simulate(workload := chat({requests}, 4.5), made, max_log_steps=0), workload)
print(json.dumps(min(cpu_seconds(lambda: simulate(workload, made, max_log_steps=0), 5))))
"""


def off(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return the speed without the cache over that of the commit before KV blocks had contents, in processes by turns.

    ``on`` is the speed with the cache over that without it. The requests share no prefixes.
    """
    with tempfile.TemporaryDirectory() as before:
        archive = subprocess.run(["git", "archive", BEFORE, "src"], cwd=ROOT, stdout=subprocess.PIPE, check=False)
        if archive.returncode:
            raise FileNotFoundError(f"no commit {BEFORE}")
        subprocess.run(["tar", "-x", "-C", before], input=archive.stdout, check=True)
        cases = ((before, False), (ROOT, False), (ROOT, True))
        code = partial(SPEED.format, folder=str(ROOT / "benchmarks"), requests=20_000 if quick else 200_000)
        turn = range(3 if quick else 7)
        seconds = [[fresh_process(code(on=on), PYTHONPATH=f"{root}/src") for root, on in cases] for _ in turn]
    ratios, on = [then / now for then, now, _ in seconds], statistics.median(now / on for _, now, on in seconds)
    row = {"value": statistics.median(ratios), "ci": (min(ratios), max(ratios)), "on": on, "seconds": seconds}
    return {"kv.off_speed_ratio": row | {"before": BEFORE, "machine": machine()}}


MODULES = {name: f"kv:{name}" for name in ("steps", "radix", "hit_rates", "mooncake", "off")}
TARGETS: dict[str, tuple[float, str, str]] = {  # name: (target, better, unit)
    "kv.vllm_steps_equal": (STEPS, "higher", "steps"),
    "kv.radix_steps_equal": (STEPS, "higher", "steps"),
    "kv.hit_rate_error_max": (0.001, "lower", "share"),
    "kv.off_speed_ratio": (0.98, "higher", "speed"),
    **{f"kv.mooncake_requests_per_s.{replicas}": (12_031 / 2, "higher", "1/s") for replicas in REPLICAS},
}
SECTIONS = Sections("kv", __doc__, MODULES, TARGETS)

if __name__ == "__main__":
    SECTIONS.main()
