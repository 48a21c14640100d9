"""The KV cache: scheduling as vLLM with a prefix cache, hit rates of recorded traffic, speed, routers, and live TTFT.

``steps``, ``radix`` and ``live`` need ``make engine``; ``hit_rates``, ``mooncake``, ``lengths`` and
``router_gain.trace`` the recorded trace.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _harness import ROOT, cpu_seconds, fresh_process, machine, summary
from _sections import Sections

from lengthwise import Deployment, EngineLimits, Status, Workload, config, deploy, policy, simulate
from lengthwise.measure.calibration import read_iterations
from lengthwise.measure.load import LoadSettings
from lengthwise.measure.prefix_cache import cached_tokens
from lengthwise.predict import Ecdf, InSession, attach
from lengthwise.predict.in_session import samples_of
from lengthwise.schema.deployment import KVOffloading
from lengthwise.schema.workload import SharedPrefixes
from lengthwise.statistics import t_half_width
from lengthwise.usecases import variants
from lengthwise.usecases.kv import reuse
from lengthwise.workload import find_sessions, read

sys.path.append(str(ROOT / "tests" / "live"))  # which compares with vLLM's scheduler and SGLang's radix tree
STEPS, WORLDS, REPLICAS, BEFORE = 100_000, 200, (1, 4, 16), "f72e731c"
LRU_SHARES = {500: 0.042, 1000: 0.045, 2000: 0.055, 5000: 0.119}
LRU_SHARES |= {10_000: 0.215, 20_000: 0.294, 50_000: 0.356, 10**9: 0.366}
"""Share of block references that a serial LRU simulation of the conversation trace finds, by blocks of 512 tokens."""
OWN_ROUTER, SEEDS = "uncached_load", range(1000, 1008)
"""Our router, and seeds with which no router was chosen."""
SYNTHETIC = {"agents": ("agents.toml", 0.9), "chat": ("multi-turn.toml", 4.4)}
"""Scenario, and sessions per second on four replicas: 0.8 of the rate from which the queue grows without end."""
TRACE_SCALES, WARM_UP, PARTS = {4: 1.0, 16: 0.25}, 0.4, 24
"""Stretch of the trace's times by replicas, share of a run that does not count, parts of the time that counts."""
LENGTHS = {"off": (8.0, None), "on": (7.2, None), "memory": (5.5, KVOffloading(2000))}
"""Stretch of the trace's times by cache, for waits about alike, and the CPU memory behind the cache."""
PROMPTS, PROMPT_BLOCKS, LIVE_S, SHARED_LOAD = 8, 8, 30.0, 0.5
"""Of the live study: system prompts and their blocks, seconds of arrivals, load as a share of the capacity."""
PREFIX_LENGTHS, PREFIX_SHARE = (250, 0.6, 32, 800), 0.8
"""Of the load with cached context that it is calibrated to: prompts (log-normal), and the share that all share."""


def steps(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return how many steps of vLLM's own scheduler, stepped without a model, equal the engine's in random worlds."""
    import _vllm
    from test_live_prefix_steps import random_world, recorded, vllm_steps

    lines, worlds, preempted, hits = 0, 0, 0, 0
    while lines < (1 if quick else STEPS):
        made = [random_world(seed) for seed in range(worlds, worlds + WORLDS)]
        for world, expected in zip(made, vllm_steps(made, _vllm.require()), strict=True):
            assert recorded(world)[0] == expected, world
            preempted += sum(len(line[3]) for line in expected)
            hits += sum(tokens > 0 for line in expected for _, tokens in line[4])
            lines += len(expected)
        worlds += WORLDS
    return {"kv.vllm_steps_equal": {"value": lines, "worlds": worlds, "preemptions": preempted, "hits": hits}}


def radix(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return after how many random operations SGLang's own radix tree equals the simulator's."""
    import _vllm
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
        rows[f"kv.mooncake_requests_per_s.{replicas}"] = summary(rates) | {"tokens_found": found, "machine": machine()}
    return rows


def router_gain(shared: Path, quick: bool, name: str) -> dict[str, Any]:
    """Return mean TTFT and JCT of our router (chosen on the trace too) over the best other's, with paired intervals."""
    routers, rows = sorted(policy.known("router")), {}
    if name == "trace":
        trace = conversation(shared)
        trace = replace(trace, predicted_tokens=np.full(len(trace), trace.output_tokens.mean()))
        limits = EngineLimits(max_num_batched_tokens=8192, enable_prefix_caching=True)
        for replicas, scale in TRACE_SCALES.items():
            made = deploy("llama-3.1-8b", "H100", replicas=replicas, limits=limits)
            sent = replace(trace, arrival_s=trace.arrival_s * scale)
            sums = {one: latency_sums(sent, made, one, 0, PARTS) for one in routers}
            rows |= gains(f"router_gain.trace.{replicas}", sums)
        return rows
    file, rate = SYNTHETIC[name]
    settings = [f"workload.session_rate={rate}", f"workload.num_requests={2000 if quick else 12_000}"]
    settings += ["workload.predicted=mean", "deployment.replicas=4"]
    variant = variants.build(config.load(ROOT / "examples" / file, settings))[0]
    drawn = {seed: variant.workload(seed) for seed in SEEDS[: 3 if quick else None]}
    runs = {
        one: [latency_sums(sent, variant.deployment, one, *of, 1) for *of, sent in drawn.items()] for one in routers
    }
    return gains(f"router_gain.{name}", {one: np.concatenate(of) for one, of in runs.items()})


def latency_sums(workload: Workload, made: Deployment, router: str, seed: int, parts: int) -> Any:
    """Return [parts, 3] sums of TTFT and JCT, and the number of the requests that are sent in each part of the time."""
    routed = replace(made, scheduler=replace(made.scheduler, router=router))
    r = simulate(workload, routed, seed=seed, max_log_steps=0).requests
    assert (r.status == Status.FINISHED).all()
    edges = np.linspace(WARM_UP, 1.0, parts + 1) * workload.arrival_s[-1]
    columns = (r.first_token_s - r.arrival_s, r.finished_s - r.arrival_s, np.ones(len(workload)))
    return np.stack([np.histogram(r.arrival_s, edges, weights=column)[0] for column in columns], axis=1)


def gains(name: str, sums: Mapping[str, Any], own: str = OWN_ROUTER) -> dict[str, Any]:
    """Return a row for each metric: the ratio to the best other router; details have that to each of them."""
    rows = {}
    for at, metric in enumerate(("ttft", "jct")):
        means = {one: of[:, at].sum() / of[:, 2].sum() for one, of in sums.items()}
        off = {one: (of[:, at] / means[one] - of[:, 2]) / of[:, 2].mean() for one, of in sums.items()}
        ratios = {one: means[own] / mean for one, mean in means.items() if one != own}
        halves = {one: float(ratio * t_half_width(off[own] - off[one], 0.95)) for one, ratio in ratios.items()}
        best = max(ratios, key=lambda one: ratios[one])
        row = {"value": ratios[best], "ci": (ratios[best] - halves[best], ratios[best] + halves[best]), "best": best}
        row |= {"mean_s": means, "half_widths": halves, "pairs": len(off[own])}
        rows[f"kv.{name}.{metric}"] = row | {"better": "lower", "unit": "ratio"}
    return rows


def lengths(shared: Path, _quick: bool) -> dict[str, Any]:
    """Return TTFT and JCT under sjf over those of FCFS, by cache and predictor, on requests that it has not seen."""
    trace, rows = find_sessions(conversation(shared)), {}
    early = np.flatnonzero(trace.arrival_s < WARM_UP * trace.arrival_s[-1])
    known = replace(trace, predicted_tokens=trace.output_tokens * 1.0)
    learned = attach(trace, InSession(Ecdf()).fit(samples_of(trace).take(early)), update_predictions=False)
    orders = {"fcfs": (known, "vllm_v1"), "known": (known, "sjf"), "sessions": (learned, "sjf")}
    for cache, (scale, memory) in LENGTHS.items():
        limits = EngineLimits(max_num_batched_tokens=8192, enable_prefix_caching=cache != "off", kv_offloading=memory)
        made, sums = deploy("llama-3.1-8b", "A100-80GB", limits=limits), {}
        for order, (workload, name) in orders.items():
            sent, ordered = replace(workload, arrival_s=trace.arrival_s * scale), policy.scheduler(name)
            sums[order] = latency_sums(sent, replace(made, scheduler=ordered), "round_robin", 0, PARTS)
        for own in ("known", "sessions"):
            rows |= gains(f"lengths.{cache}.{own}", {one: sums[one] for one in ("fcfs", own)}, own)
    return rows


def live(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return the error of mean and median TTFT of a real vLLM with shared prompts, calibrated with another load."""
    # ``unshared``: error without that load; ``repeats``: largest distance of a measured TTFT from the repeats' median.
    import _circle
    import _vllm
    from _live import WIDE

    repeats, runs, learnt = range(1 if quick else 3), [], []
    with tempfile.TemporaryDirectory() as folder:
        work, model = Path(folder), _vllm.make_model(Path(folder) / "small", "small")
        d = WIDE.deployment(str(model / "config.json"), _circle.this_thread(), 1024, 512)
        d = replace(d, limits=replace(d.limits, enable_prefix_caching=True))
        with _vllm.served(d, model, log := work / "vllm.log") as engine:
            where = (engine.url, model.name, log, engine.process.pid, work)
            watched = _vllm.Watched(*where, deployment=_circle.facts_of(d))
            turn = _circle.Turn(WIDE, watched.bench, lambda run: watched.named(run.name), _circle.Lengths(), 12.0, 20.0)
            turn.warm()
            half = SHARED_LOAD * turn.capacity_tokens_s
            prefix = _circle.Lengths(prompt=PREFIX_LENGTHS).arriving(half, 20.0, 20, "prefix")
            prefix = LoadSettings(shared_prefix=PREFIX_SHARE).applied_to(prefix)
            for repeat in repeats:
                learnt += [turn.run(load, repeat) for load in _circle.LEARNT]
                for load, requests in (("prefix", prefix), ("shared", shared_prompts(half, 10))):
                    run = _circle.Run("wide", load, repeat, watched.bench(requests))
                    (learnt if load == "prefix" else runs).append(run)
        iterations = read_iterations(_circle.iterations_of(work, "wide-half-0"))
        found = {"signed": _circle.calibrated(learnt, [], d, iterations)}
        found["unshared"] = _circle.calibrated([run for run in learnt if run.load != "prefix"], [], d, iterations)
    measured = [_circle.finished_seconds(run.measured.records, "ttft_s") for run in runs]
    counted, stats = [cached_tokens(run.measured.metadata) for run in runs], {"mean": np.nanmean, "p50": np.nanmedian}
    errors: dict[str, dict[str, list[float]]] = {stat: {} for stat in stats}
    about: dict[str, Any] = {"load_1m": [run.measured.metadata["load_1m"] for run in runs]}
    about["measured_share"] = [of["found_tokens"] / of["looked_up_tokens"] for of in counted if of]
    for name, calibration in found.items():
        records = [_circle.simulated(replace(d, cost=calibration.tables), run) for run in runs]
        simulated = [_circle.finished_seconds(of, "ttft_s") for of in records]
        for stat, value in stats.items():
            errors[stat][name] = [float(value(a) / value(b) - 1) for a, b in zip(simulated, measured, strict=True)]
        cached = [of.requests.cached_tokens.sum() / of.requests.prompt_tokens.sum() for of in records]
        about[f"{name}_share"] = list(map(float, cached))
        about[f"{name}_parameters"] = {p.name: (p.value, p.low, p.high, p.determined) for p in calibration.parameters}
    rows = {}
    for stat, value in stats.items():
        sizes, each_s = list(map(abs, errors[stat]["signed"])), [float(value(of)) for of in measured]
        row = {"value": abs(statistics.median(errors[stat]["signed"])), "ci": (min(sizes), max(sizes))} | errors[stat]
        row |= {"measured_s": each_s, "repeats": max(abs(s / statistics.median(each_s) - 1) for s in each_s)}
        rows[f"kv.live_ttft_error.{stat}"] = row | about | {"machine": machine()}
    return rows


def shared_prompts(tokens_s: float, seed: int) -> Workload:
    """Return Poisson arrivals of ``tokens_s`` output tokens per second: popular system prompts, and own tokens."""
    from _circle import BLOCK, Lengths

    rng = np.random.default_rng(seed)
    made = Lengths(prompt=(48, 0.7, 8, 240)).arriving(tokens_s, LIVE_S, seed, "shared")
    which = np.minimum(rng.zipf(1.5, len(made)), PROMPTS) - 1
    ids = (which[:, None] * PROMPT_BLOCKS + np.arange(PROMPT_BLOCKS)).ravel()
    prefixes = SharedPrefixes(BLOCK, np.arange(len(made) + 1) * PROMPT_BLOCKS, ids)
    return replace(made, prompt_tokens=made.prompt_tokens + PROMPT_BLOCKS * BLOCK, prefixes=prefixes)


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
    """Return the speed without the cache over that of the commit before it, and with the cache over without."""
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
    details = {"on": on, "seconds": seconds, "before": BEFORE, "machine": machine()}
    return {"kv.off_speed_ratio": summary(ratios) | details}


SECTIONS = Sections("kv", __doc__)

if __name__ == "__main__":
    SECTIONS.main()
