"""The engine with Multi-Bin Batching against the batch server of theory: the same batches, started at the same time.

Where every step takes as long, a request's service time is its tokens times the step, and a batch takes as
long as its longest member.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from lengthwise import EngineLimits, Scheduler, Workload, deploy, simulate, theory

STEP_S = 0.01
BATCH = 4


@pytest.fixture(scope="module")
def deployment():
    """One server whose steps all take 10 ms."""
    made = deploy("llama-3.2-1b", "H100", limits=EngineLimits(max_num_seqs=BATCH, max_num_batched_tokens=8192))
    names = ("layer_s", "comm_s", "embedding_s", "send_s", "head_s", "prefill_s", "decode_s")
    nothing = {name: np.zeros_like(getattr(made.cost, name)) for name in names}
    return replace(made, cost=replace(made.cost, **nothing, host_s=np.full_like(made.cost.host_s, STEP_S)))


@pytest.mark.parametrize("edges", [[], [20.5], [10.5, 20.5, 30.5]], ids=len)
@pytest.mark.parametrize("batch_wait_s", [math.inf, 3.0], ids=["full", "partial"])
@pytest.mark.parametrize("rate_rps", [4.0, 40.0])
def test_batches_start_when_theory_predicts(deployment, edges, batch_wait_s, rate_rps):
    rng = np.random.default_rng(7)
    tokens, arrival_s = rng.integers(1, 41, 240), np.cumsum(rng.exponential(1 / rate_rps, 240))
    guess = np.clip(tokens + rng.integers(-8, 9, 240), 1, None)  # wrong bins, in both
    own = Scheduler(
        rank="completed_batches",
        batching="static_bins",
        memory="paged",
        binning=f"bins(boundaries={edges})",
        batch_wait_s=batch_wait_s,
    )
    work = Workload(arrival_s=arrival_s, prompt_tokens=np.full(240, 16), output_tokens=tokens, predicted_tokens=guess)
    ran = simulate(work, replace(deployment, scheduler=own)).requests
    served = theory.serve(
        arrival_s,
        STEP_S * tokens,
        theory.bin_of(guess, edges),
        batch=BATCH,
        num_bins=len(edges) + 1,
        max_wait_s=batch_wait_s,
    )
    done = served.served  # the engine sends off at the end what theory leaves in the bins
    assert done.mean() > 0.9
    np.testing.assert_allclose(ran.scheduled_s[done], served.start_s[done], rtol=0, atol=1e-9)
    np.testing.assert_allclose(ran.finished_s[done], served.start_s[done] + STEP_S * tokens[done], atol=1e-9)
