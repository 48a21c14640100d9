"""The rules of SGLang's radix tree that differ from vLLM's, seen in the records of small runs; and wrong settings."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

from lengthwise.engine import simulate
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism, Scheduler
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import After, SharedPrefixes, Workload

sys.path.insert(0, str(Path(__file__).parents[1] / "laws"))
from worlds import GPU, MODEL, NODE, cost_tables

PROMPT, OUTPUT = 8, 4


def deployment(blocks, page_size=1, rule="sglang", policy="lru", **limits):
    settings = EngineLimits(
        max_num_seqs=4, max_num_batched_tokens=64, block_size=page_size, watermark=0.0, enable_prefix_caching=True,
        prefix_cache=rule, radix_eviction_policy=policy, **limits,
    )  # fmt: skip
    return Deployment(
        MODEL, GPU, NODE, Parallelism(1, 1, 1), settings, Scheduler(batching="unified", memory="paged_by_chunk"),
        cost_tables([1]), KvPlan(blocks, page_size, 0.0, 0.0, 0.0, 0.0), max_model_len=min(blocks * page_size, 60),
    )  # fmt: skip


def one_by_one(ids, priority=None):
    """Prompts of ``PROMPT`` tokens, each the content of its number, that are sent one after the end of another."""
    n = len(ids)
    after = After(np.maximum(np.arange(n + 1) - 1, 0), np.arange(n - 1), np.full(n, 1.0))
    prefixes = SharedPrefixes(PROMPT, np.arange(n + 1), np.array(ids), np.full(n, -1))
    columns = np.zeros(n), np.full(n, PROMPT), np.full(n, OUTPUT)
    return Workload(*columns, after=after, prefixes=prefixes, priority=priority)


def found(workload, deployed):
    return simulate(workload, deployed, engine="reference").requests.cached_tokens.tolist()


def test_all_but_the_last_token_is_found_in_pages():
    assert found(one_by_one([0, 0]), deployment(100)) == [0, PROMPT - 1]
    assert found(one_by_one([0, 0]), deployment(100, page_size=4)) == [0, 4]


def test_the_least_recently_used_segments_are_evicted_outputs_before_their_prompts():
    # After two requests the pool of 25 tokens has 2 x 8 tokens of prompts and 2 x 3 of outputs. The third request needs
    # 11 and evicts the first one's. The fourth finds the second one's.
    assert found(one_by_one([0, 1, 2, 1, 0]), deployment(25)) == [0, 0, 0, 7, 0]


def test_the_eviction_policy_chooses_what_remains():
    ids = [0, 0, 1, 2, 0, 1]
    assert found(one_by_one(ids), deployment(25)) == [0, 7, 0, 0, 0, 0]
    assert found(one_by_one(ids), deployment(25, policy="lfu"))[4] == 7
    priority = np.array([0, 0, 5, 5, 0, 5])  # The smallest is the most important.
    assert found(one_by_one(ids, priority), deployment(25, policy="priority"))[4] == 7


def test_pages_that_two_requests_computed_are_in_the_pool_once():
    prefixes = SharedPrefixes(PROMPT, np.arange(3), np.zeros(2, np.int64), np.full(2, -1))
    both = Workload(np.zeros(2), np.full(2, PROMPT), np.full(2, OUTPUT), prefixes=prefixes)
    of_vllm, of_sglang = (
        simulate(both, deployment(100, rule=rule), engine="reference").steps.kv_blocks for rule in ("vllm", "sglang")
    )
    assert of_vllm[0] == PROMPT + 1  # Blocks can be found when the step that computes them is formed,
    assert of_sglang[0] == 2 * PROMPT  # and pages when it has ended.
    assert of_sglang[1] == PROMPT + 2


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"prefix_cache": "sglan"}, "there is no prefix_cache named 'sglan'. Did you mean: sglang?"),
        (
            {"prefix_cache": "sglang", "radix_eviction_policy": "lrru"},
            "there is no radix_eviction_policy named 'lrru'. Did you mean:",
        ),
        ({"radix_eviction_policy": "lfu"}, "needs SGLang's radix tree; prefix_cache is 'vllm'"),
    ],
)
def test_wrong_settings_are_reported(change, expected):
    with pytest.raises(InputError, match=expected.replace("?", r"\?")):
        EngineLimits(enable_prefix_caching=True, **change)


def test_wrong_workloads_are_reported():
    with pytest.raises(InputError, match='radix_eviction_policy = "priority" needs priorities'):
        found(one_by_one([0, 1]), deployment(60, policy="priority"))
    with pytest.raises(InputError, match="must divide the 8 tokens of a shared block"):
        found(one_by_one([0, 1]), dataclasses.replace(deployment(60, page_size=3)))
