"""Prefill and decode split between two real vLLMs: caches are handed over, and a plan of WAA is played before them.

vLLM's own example connector hands them over through a folder. It saves a prompt's cache where all of it is computed in
one step, loads whole blocks, up to the last one, and does not find a prompt that is whole blocks and one token.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from handing import prefill_of, routed

from lengthwise.cli import main
from lengthwise.schema.schedule import ScheduleRow

pytestmark = [pytest.mark.engine, pytest.mark.slow]

MATCHING = 1e-3
"""Log-probabilities that differ by rounding alone are nearer."""
BLOCK, LENGTHS = 32, (40, 66, 200, 500)
PLAN = ScheduleRow(
    "waa-c", 2, 1, 1, 1, 0, 1, throughput_rps=10.0, latency_s=1.0, latency_high_s=1.0, cycle_s=0.1, prefill_s=0.1,
    decode_s=0.03, decode_batch=6.0, memory_share=0.5,
)  # fmt: skip
UNDER_WAY = 10
SCENARIO = """
[workload]
prompt = { kind = "uniform", low = 66, high = 160 }
output = { kind = "uniform", low = 2, high = 24 }
num_requests = 60
request_rate = 1
[deployment]
model = "opt-13b"
gpu = "A40"
node = "pcie4-4"
"""


class Pair(NamedTuple):
    prefill: str
    decode: str
    caches: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory, engine_python, tiny):
    """Both engines; neither finds a prompt in a cache of its own."""
    import _vllm

    from lengthwise.backend.process import local_engine, reserved_port
    from lengthwise.gateway.demo.engines import ONE_PROCESS

    folder = tmp_path_factory.mktemp("waa")
    caches = folder / "caches"
    reported = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    reported["kv_connector_extra_config"] = {"shared_storage_path": str(caches)}
    env = {**_vllm.QUIET, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CACHE_ROOT": str(tiny.parent / "cache")}
    urls = []
    with ExitStack() as stack:
        for side in ("prefill", "decode"):
            port = stack.enter_context(reserved_port())
            command = [engine_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny)]
            command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port)]
            command += ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager"]
            command += ["--max-num-seqs", "16", "--max-num-batched-tokens", "8192"]
            command += ["--block-size", str(BLOCK), "--no-enable-prefix-caching"]
            command += ["--distributed-executor-backend", ONE_PROCESS, "--kv-transfer-config", json.dumps(reported)]
            engine = local_engine(command, port=port, env=env, log_path=folder / side, ready_s=600.0)
            urls.append(stack.enter_context(engine).url)
        yield Pair(*urls, caches)


def posted(url, body):
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        reported = json.load(answer)["choices"][0]
    return reported["token_ids"], np.array(reported["logprobs"]["token_logprobs"])


def handed_over(url):
    """Tokens whose caches an engine had from the other one."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reported:
        lines = reported.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:external_prefix_cache_hits_total"))


def requested(length, seed):
    """Sampled, as what this model likes best is always the same token, whatever it read."""
    prompt = random.Random(seed).choices(range(5, 8000), k=length)
    return {
        "model": "m", "prompt": prompt, "max_tokens": 24, "ignore_eos": True, "temperature": 1.0,
        "seed": seed, "logprobs": 1, "return_token_ids": True,
    }  # fmt: skip


def test_what_one_engine_prefilled_another_decodes_as_the_first_alone_would(pair):
    for length in LENGTHS:
        body = requested(length, length)
        alone, likely = posted(pair.prefill, body)
        shutil.rmtree(pair.caches)
        first, _ = posted(pair.prefill, prefill_of(body))
        before = handed_over(pair.decode)
        tokens, as_likely = posted(pair.decode, body)
        assert tokens == alone
        assert as_likely == pytest.approx(likely, abs=MATCHING)
        assert first == alone[:1]
        assert len(set(alone)) > len(alone) / 2, "or it would say nothing that they are alike"
        assert handed_over(pair.decode) - before == (length - 2) // BLOCK * BLOCK
    assert handed_over(pair.prefill) == 0, "that one computed all itself, so it is one to compare with"


def test_it_is_that_cache_which_is_decoded(pair):
    """Who is handed a spoilt cache finds other tokens likely, so it did not compute the prompt again."""
    body = requested(500, 1)
    alone, likely = posted(pair.prefill, body)
    for path in pair.caches.rglob("*.safetensors"):
        raw = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(raw[:8], "little")
        numbers = np.frombuffer(bytes(raw[start:]), np.float32)
        path.write_bytes(bytes(raw[:start]) + np.roll(numbers, 8 * BLOCK).astype(np.float32).tobytes())
    tokens, other = posted(pair.decode, body)
    assert tokens != alone or np.abs(other - likely).max() > 10 * MATCHING


def test_a_plan_of_waa_is_played_before_their_router(pair, tmp_path, capsys):
    scenario, plan, out = tmp_path / "short.toml", tmp_path / "plan.json", tmp_path / "run"
    scenario.write_text(SCENARIO)
    reported = {"format": "lengthwise.schedule", "version": 1, "chosen": dataclasses.asdict(PLAN)}
    plan.write_text(json.dumps(reported | {"bound_s": 60.0, "quantile_tokens": 24}))
    before = handed_over(pair.decode)
    with routed(pair.prefill, pair.decode) as url:
        words = ["schedule", "run", str(scenario), "--engine", url, "--schedule", str(plan), "--out", str(out)]
        assert main(words) == 0, capsys.readouterr().err
    assert "The bound of 60 s held" in capsys.readouterr().out
    rows = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    assert [row["outcome"] for row in rows] == ["finished"] * 60
    assert handed_over(pair.decode) - before >= 60 * 2 * BLOCK, "prompts of more than two blocks"
    present = [sum(row["dispatched_s"] <= at["dispatched_s"] < row["finished_s"] for row in rows) for at in rows]
    assert max(present) == UNDER_WAY
    outcome = json.loads((out / "outcome.json").read_text())["outcome"]
    seen = {one["name"]: one["value"] for one in outcome["seen"]}
    assert seen["throughput"] > 0
    assert seen["requests in flight"] <= UNDER_WAY
