"""With prefix caching a preempted request computes again only what others have taken of its blocks."""

from dataclasses import replace

import numpy as np
import pytest

from lengthwise.engine import deploy, simulate
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.workload import Workload


@pytest.fixture(scope="module")
def short_memory():
    """A deployment whose cache is far too small for its eight slots."""
    limits = EngineLimits(max_num_seqs=8, max_num_batched_tokens=128, max_model_len=512, watermark=0.0)
    return deploy("llama-3.1-8b", "H100", limits=limits, num_blocks=60)


def requests(n=40, seed=0):
    rng = np.random.default_rng(seed)
    return Workload(np.sort(rng.uniform(0, 0.5, n)), rng.integers(50, 200, n), rng.integers(20, 200, n))


def caching(deployment):
    return replace(deployment, limits=replace(deployment.limits, enable_prefix_caching=True))


@pytest.mark.parametrize("seed", range(4))
def test_both_engines_agree_on_what_is_found_again(short_memory, seed):
    on = caching(short_memory)
    a, b = (simulate(requests(seed=seed), on, engine=engine) for engine in ("kernel", "reference"))
    assert a.requests.preemptions.sum() > 5
    assert np.array_equal(a.requests.finished_s, b.requests.finished_s)
    assert np.array_equal(a.requests.first_token_s, b.requests.first_token_s)


def test_less_is_computed_again_and_nothing_without_need(short_memory):
    computed = {}
    for name, deployment in (("off", short_memory), ("on", caching(short_memory))):
        done = simulate(requests(), deployment)
        computed[name] = int(done.steps.prefill_tokens.sum())
        assert (done.requests.output_tokens == requests().output_tokens).all()
    assert requests().prompt_tokens.sum() < computed["on"] < computed["off"]


def test_without_preemptions_nothing_changes(short_memory):
    roomy = replace(short_memory, kv=replace(short_memory.kv, num_blocks=1000))
    off, on = simulate(requests(), roomy), simulate(requests(), caching(roomy))
    assert np.array_equal(off.requests.finished_s, on.requests.finished_s)
