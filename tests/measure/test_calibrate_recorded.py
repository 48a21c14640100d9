"""A recorded run of vLLM on a GPU: half of it calibrates the plain roofline for the other half."""

from __future__ import annotations

import pytest

from lengthwise import engine, measure
from lengthwise.schema.deployment import EngineLimits


@pytest.mark.slow
def test_the_roofline_comes_close_to_a_recorded_run(shared):
    path = shared("data/profiles/llmservingsim/measured_runs/RTXPRO6000/Llama-3.1-8B/vllm/requests.jsonl.gz")
    limits = EngineLimits(max_num_seqs=128, max_num_batched_tokens=2048, max_model_len=8192)
    deployment = engine.deploy("llama-3.1-8b", "RTX-PRO-6000", limits=limits)
    found = measure.calibrate([measure.read_external_results(path)], deployment, holdout=0.5, allow=["warnings"])
    each = {s.metric: s for s in found.scores if s.statistic == "each"}
    for metric, most in (("ttft", 0.03), ("tpot", 0.02), ("jct", 0.02)):
        assert each[metric].after < most < each[metric].before
    assert found["work"].determined
