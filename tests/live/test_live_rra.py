"""RRA inside a real vLLM: batches and iterations exact, the same answers as the stock scheduler's.

The model runs in one process, all requests are there when it begins; the scheduler classes are driven without a
model, too, for asynchronous scheduling. A served engine shows what clients make of it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from plugin_engines import ROOT, Job, burst, metric, vllm

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BATCH, STEPS, REQUESTS = 4, 7, 40
SLOTS = 32
"""Of the served engine."""
RRA = "lengthwise.gateway.plugin.RraScheduler"


def requested(seed: int = 0, longest: int = 60) -> dict[str, list]:
    """Prompts, of which many begin alike, and lengths."""
    rng = np.random.default_rng(seed)
    alike = rng.integers(5, 800, 64).tolist()
    prompts = [
        (alike if k % 2 else [])[: int(rng.integers(32, 65))] + rng.integers(5, 800, int(rng.integers(4, 50))).tolist()
        for k in range(REQUESTS)
    ]
    return {"prompts": prompts, "lengths": rng.integers(1, longest, REQUESTS).tolist()}


def offline(python, model, work, **more):
    import _vllm

    engine = {"max_num_seqs": 32, "max_num_batched_tokens": 2048} | more.pop("engine", {})
    words = [python, str(Path(__file__).parent / "rra_offline.py"), str(model)]
    env = {
        **_vllm.QUIET,
        "PYTHONPATH": str(ROOT / "src"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(model.parent / "cache"),
    }
    ran = subprocess.run(
        [*words, json.dumps(work | {"engine": engine} | more)],
        env=env, capture_output=True, text=True, timeout=380, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1]) | {"message": ran.stdout + ran.stderr}


def rra(engine=None, **settings):
    schedule = {"prefill_batch": BATCH, "decode_steps": STEPS} | settings
    return {"scheduler_cls": RRA, "additional_config": {"lengthwise": schedule}} | (engine or {})


@pytest.fixture(scope="module")
def stock(engine_python, tiny):
    return offline(engine_python, tiny, requested())


def test_every_phase_has_its_batch_and_its_iterations_and_greedy_output_is_the_same(engine_python, tiny, stock):
    work = requested()
    found = offline(engine_python, tiny, work, engine=rra())
    assert found["outputs"] == stock["outputs"]
    assert [len(one) for one in found["outputs"]] == work["lengths"]
    assert len({tuple(one) for one in found["outputs"]}) > REQUESTS / 2
    phases = found["phases"]
    assert len(phases) == REQUESTS / BATCH
    assert [one["admitted"] for one in phases] == [BATCH] * len(phases)
    assert [one["decode_steps"] for one in phases[:-1]] == [STEPS] * (len(phases) - 1)
    # What the workers were given, phase by phase: one step of prompts alone, then decodes alone.
    kinds = ["e" if prompts else "d" for prompts, _ in found["steps"]]
    assert "".join(kinds[: -phases[-1]["decode_steps"]]) == ("e" + "d" * STEPS) * (len(phases) - 1) + "e"
    assert not any(prompts and decodes for prompts, decodes in found["steps"])
    assert sum(one["decode_seqs"] for one in phases) == sum(work["lengths"]) - REQUESTS
    assert found["cached"] > 0, "prompts that begin alike were found in the cache"
    assert any(prompts and decodes for prompts, decodes in stock["steps"]), "the stock scheduler mixes"


def test_with_few_slots_little_memory_and_chunked_prompts_the_output_is_the_same(engine_python, tiny, stock):
    tight = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 17}
    found = offline(engine_python, tiny, requested(), engine=rra(tight))
    assert found["outputs"] == stock["outputs"]
    assert found["preemptions"] > 0
    assert not any(prompts and decodes for prompts, decodes in found["steps"])
    assert max(decodes for _, decodes in found["steps"]) <= 6
    phases = found["phases"]
    assert all(one["admitted"] <= BATCH and one["decode_steps"] <= STEPS for one in phases[:-1])
    assert max(one["prefill_steps"] for one in phases) > 1


def test_batches_are_resized_to_even_work(engine_python, tiny, stock):
    work = requested()
    mean = round(BATCH * float(np.mean([len(one) for one in work["prompts"]])))
    schedule = {"threshold": 0.1, "prompt_tokens": mean, "decode_batch": 16}
    found = offline(engine_python, tiny, work, engine=rra(**schedule))
    assert found["outputs"] == stock["outputs"]
    assert len({one["admitted"] for one in found["phases"]}) > 1
    lengths = iter(len(one) for one in work["prompts"])
    sums = [sum(next(lengths) for _ in range(one["admitted"])) for one in found["phases"]]
    fixed = [len(one) for one in work["prompts"]]
    even = [sum(fixed[k : k + BATCH]) for k in range(0, REQUESTS, BATCH)]
    assert np.std(sums[:-1]) < np.std(even)


@pytest.mark.parametrize("where", ["version", "schedule"])
def test_an_unusable_schedule_leaves_the_engine_its_own(engine_python, tiny, stock, where):
    work = requested()
    if where == "version":
        found = offline(engine_python, tiny, work, engine=rra(), version="0.99.1")
        assert "this is vLLM 0.99.1" in found["message"]
    else:
        found = offline(engine_python, tiny, work, engine=rra(prefill_batch=0))
        assert "prefill_batch must be a whole number" in found["message"]
    assert found["phases"] is None
    assert found["outputs"] == stock["outputs"]
    assert found["steps"] == stock["steps"]


@pytest.fixture(scope="module")
def worlds(tiny, engine_python):
    import _vllm

    words = [engine_python, str(Path(__file__).parent / "scheduled_rra.py"), str(tiny)]
    env = {**_vllm.QUIET, "PYTHONPATH": f"{ROOT / 'src'}:{Path(__file__).parent}"}
    ran = subprocess.run(words, env=env, capture_output=True, text=True, timeout=380, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["plain fcfs", "plain priority", "async fcfs", "async priority"])
def test_with_vllms_own_scheduler_classes_every_token_comes_once(worlds, kind):
    roomy, tight = worlds[f"{kind} roomy"], worlds[f"{kind} tight"]
    for world in (roomy, tight):
        assert world["satisfied"]
        assert (world["wrong"], world["unfinished"]) == ([], [])
        assert world["expected"] > 30
        assert world["free_blocks"] == 23  # all but vLLM's own null block
        assert world["mixed"] == 0
    assert tight["preemptions"] > 0
    assert all(admitted <= 2 for admitted, _, _ in tight["phases"])
    # Four slots, outputs up to 12: slots bind now and then, iterations are exact all the same.
    assert {steps for _, steps, _ in roomy["phases"][:-1]} == {5}
    assert sum(admitted for admitted, _, _ in roomy["phases"]) == 40 + roomy["preemptions"]


def test_a_served_engine_keeps_the_schedule_whichever_requests_come_and_go(engine_python, tiny, tmp_path):
    import aiohttp

    record = tmp_path / "phases.jsonl"
    schedule = json.dumps({"lengthwise": {"prefill_batch": 3, "decode_steps": 5, "record": str(record)}})
    words = ("--max-num-seqs", str(SLOTS), "--scheduler-cls", RRA, "--additional-config", schedule)

    async def gone(url: str) -> None:
        async with aiohttp.ClientSession() as session:
            asking = [
                asyncio.ensure_future(session.post(f"{url}/v1/completions", json=Job(f"gone{k}", 900).body()))
                for k in range(12)
            ]
            await asyncio.sleep(1.0)
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    with vllm(engine_python, tiny, tmp_path / "rra.log", *words) as engine:
        assert "lengthwise restricts this engine to rra(prefill_batch=3" in (tmp_path / "rra.log").read_text()
        asyncio.run(gone(engine.url))
        end_s = time.monotonic() + 20
        states = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        while sum(metric(engine.url, name) for name in states) and time.monotonic() < end_s:
            time.sleep(0.1)
        assert [metric(engine.url, name) for name in states] == [0, 0]
        before = len(record.read_text().splitlines())
        head = tuple(Job(f"head{k}", 300) for k in range(SLOTS))
        found = burst(engine.url, [Job(f"m{k}", 5 + k % 23) for k in range(60)], head=head)
        assert len(found.finished) == SLOTS + 60
        assert "holding to phases failed" not in (tmp_path / "rra.log").read_text()
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert [row["number"] for row in rows] == list(range(1, len(rows) + 1))
    after = rows[before:]
    admitted = np.cumsum([row["admitted"] for row in after])
    assert admitted[-1] == SLOTS + 60
    # While many wait, every phase is exact: until the head leaves, all have come, and then until fewer than three wait.
    full = [row for row, so_far in zip(after, admitted, strict=True) if row["admitted"] == 3 and so_far > SLOTS + 3]
    assert len(full) >= 17
    assert {row["decode_steps"] for row in full[:-1]} == {5}
