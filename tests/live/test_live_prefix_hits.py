"""A real vLLM finds the cached tokens of each request that the simulator finds, in a pool that is too small."""

from __future__ import annotations

import json
import urllib.request

import numpy as np
import pytest
from plugin_engines import metrics, vllm

from lengthwise import simulate
from lengthwise.engine import deploy
from lengthwise.policy import scheduler
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.workload import After, SharedPrefixes, Workload

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SIZE, BLOCKS, SYSTEM_BLOCKS = 32, 36, 2
MAX_MODEL_LEN = 768
SESSIONS, REQUESTS = 6, 70


def chats(rng):
    """Return the new tokens, output, previous turn and system prompt of each request of interleaved chats."""
    last, length, rows = [-1] * SESSIONS, [0] * SESSIONS, []
    for i in range(REQUESTS):
        one = int(rng.integers(SESSIONS))
        new, output = int(rng.integers(1, 60)), int(rng.integers(1, 40))
        if length[one] + new + output > MAX_MODEL_LEN - 1:
            last[one], length[one] = -1, 0
        group = int(rng.integers(2)) if last[one] < 0 else -1
        length[one] += new + output + (SYSTEM_BLOCKS * SIZE if group >= 0 else 0)
        rows.append((new, output, last[one], group))
        last[one] = i
    return rows


def simulated(rows):
    """Return the cached tokens of each request in the simulator; each request waits for the one before it."""
    prompt = []
    for new, _, previous, _ in rows:
        before = prompt[previous] + rows[previous][1] if previous >= 0 else SYSTEM_BLOCKS * SIZE
        prompt.append(before + new)
    n = len(rows)
    parents = [sorted({i - 1, previous} - {-1}) for i, (_, _, previous, _) in enumerate(rows)]
    ids = [range(group * SYSTEM_BLOCKS, (group + 1) * SYSTEM_BLOCKS) if group >= 0 else () for *_, group in rows]
    workload = Workload(
        np.zeros(n),
        np.array(prompt),
        np.array([output for _, output, _, _ in rows]),
        after=After(np.cumsum([0, *map(len, parents)]), np.concatenate(parents).astype(np.int64)),
        prefixes=SharedPrefixes(
            SIZE,
            np.cumsum([0, *map(len, ids)]),
            np.concatenate([np.array(one, np.int64) for one in ids]),
            np.array([previous for _, _, previous, _ in rows]),
        ),
    )
    limits = EngineLimits(block_size=SIZE, max_model_len=MAX_MODEL_LEN, watermark=0.0, enable_prefix_caching=True)
    made = deploy("llama-3.1-8b", "H100", limits=limits, num_blocks=BLOCKS, scheduler=scheduler("vllm_v1"))
    return workload, simulate(workload, made).requests.cached_tokens


def completion(url, prompt, tokens):
    """Return the ids of the output, and how many prompt tokens the engine found in its cache."""
    body = {"model": "m", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.load(response)
    details = answer["usage"]["prompt_tokens_details"] or {}
    return answer["choices"][0]["token_ids"], details.get("cached_tokens") or 0


def test_each_request_finds_the_simulated_tokens(engine_python, tiny, tmp_path):
    rng = np.random.default_rng(5)
    rows = chats(rng)
    workload, expected = simulated(rows)
    system = [[int(k) for k in rng.integers(10, 200, SYSTEM_BLOCKS * SIZE)] for _ in range(2)]
    words = (
        "--num-gpu-blocks-override",
        str(BLOCKS + 1),
        "--block-size",
        str(SIZE),
        "--max-model-len",
        str(MAX_MODEL_LEN),
        "--enable-prompt-tokens-details",
    )
    complete, found = [], []
    with vllm(engine_python, tiny, tmp_path / "log", *words) as engine:
        for new, output, previous, group in rows:
            prompt = [*(complete[previous] if previous >= 0 else system[group])]
            prompt += [int(k) for k in rng.integers(10, 200, new)]
            ids, cached = completion(engine.url, prompt, output)
            assert len(ids) == output
            complete.append(prompt + ids)
            found.append(cached)
        hits, queries = metrics(engine.url, ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"))
    assert found == expected.tolist()
    assert (hits, queries) == (expected.sum(), workload.prompt_tokens.sum())
    assert 0.2 * queries < hits < 0.8 * queries  # some are found, and some were evicted
