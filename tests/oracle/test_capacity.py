"""Constant lengths and saturated servers: times and throughput in closed form."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from servers import check_mean, deployment, run, step_costs

from lengthwise.engine import simulate
from lengthwise.policy import scheduler
from lengthwise.schema.deployment import Scheduler
from lengthwise.schema.workload import Workload

FLOOR_S, TOKEN_S, KV_S = 0.02, 1e-4, 1e-7


def same(n, prompt, output, concurrency=None):
    return Workload(np.zeros(n), np.full(n, prompt), np.full(n, output), concurrency=concurrency)


def together_s(batch, prompt, output):
    """A batch prefills in one step and decodes in output - 1 more, over a growing cache."""
    prefill_s = FLOOR_S + TOKEN_S * batch * prompt
    context = np.arange(prompt + 1, prompt + output)
    return prefill_s + np.sum(FLOOR_S + TOKEN_S * batch + KV_S * batch * context)


@pytest.mark.parametrize("name", ["faster_transformer", "orca", "vllm_v0", "sarathi", "vllm_v1", "lightllm"])
@pytest.mark.parametrize(("batch", "prompt", "output"), [(1, 7, 5), (8, 100, 33), (32, 1, 64)])
def test_a_full_batch_in_a_closed_loop(name, batch, prompt, output):
    """All come, run and go together: n requests take n / batch periods."""
    rounds = 6
    workload = same(rounds * batch, prompt, output, batch)
    workload = dataclasses.replace(workload, predicted_tokens=workload.output_tokens)
    server = deployment(
        step_costs(FLOOR_S, TOKEN_S, kv_token_s=KV_S), scheduler(name),
        max_num_seqs=batch, max_model_len=4096, num_blocks=4 * batch + 4,
    )  # fmt: skip
    records = run(workload, server)
    assert records.end_s == pytest.approx(rounds * together_s(batch, prompt, output), rel=1e-9)
    assert records.totals.steps[0] == rounds * output


@pytest.mark.parametrize("blocks_for", [1, 3, 7])
def test_reserved_memory_bounds_the_batch(blocks_for):
    """Memory for B longest sequences runs B at a time, however many more could be resident."""
    n, prompt, output, max_len = 21, 10, 6, 64
    server = deployment(
        step_costs(FLOOR_S, TOKEN_S), scheduler("orca"), max_num_seqs=64,
        block_size=16, max_model_len=max_len, num_blocks=blocks_for * max_len // 16,
    )  # fmt: skip
    records = run(same(n, prompt, output), server)
    step_s = FLOOR_S + TOKEN_S * blocks_for * np.array([prompt] + [1] * (output - 1))
    assert records.end_s == pytest.approx(n / blocks_for * step_s.sum(), rel=1e-9)
    assert records.steps.kv_blocks.max() == blocks_for * max_len // 16


@pytest.mark.parametrize("budget", [16, 50, 64, 1000])
def test_a_prompt_in_chunks(budget):
    """ceil(prompt / budget) steps until the first token, then one token a step."""
    prompt, output = 200, 9
    server = deployment(step_costs(FLOOR_S, TOKEN_S), max_num_seqs=4, max_num_batched_tokens=budget)
    r = run(same(1, prompt, output), server).requests
    chunks = -(-prompt // budget)
    first_s = chunks * FLOOR_S + TOKEN_S * prompt
    assert r.first_token_s[0] == pytest.approx(first_s, rel=1e-9)
    assert r.finished_s[0] - r.first_token_s[0] == pytest.approx((output - 1) * (FLOOR_S + TOKEN_S), rel=1e-9)


def test_static_batches_wait_for_their_longest():
    """Batches of B one after another; each takes as many steps as its longest output."""
    batch, n, longest, step_s = 8, 8 * 60, 50, 0.01
    server = deployment(step_costs(step_s, 0.0), scheduler("faster_transformer"), max_num_seqs=batch,
                        max_model_len=1024, num_blocks=batch)  # fmt: skip

    def batch_s(rng):
        outputs = rng.integers(1, longest + 1, n)
        records = run(Workload(np.zeros(n), np.full(n, 3), outputs), server)
        steps = outputs.reshape(-1, batch).max(axis=1).sum()
        assert records.end_s == pytest.approx(steps * step_s, rel=1e-9)
        return records.end_s / (n / batch)

    share = np.arange(longest) / longest
    check_mean(batch_s, step_s * (longest - np.sum(share[1:] ** batch)))


def test_continuous_batches_do_not():
    """With slots refilled at once, n requests take between sum / B and sum / B + longest steps."""
    batch, n, step_s = 8, 400, 0.01
    outputs = np.random.default_rng(2).integers(1, 50, n)
    server = deployment(step_costs(step_s, 0.0), Scheduler(batching="mixed"), max_num_seqs=batch)
    steps = run(Workload(np.zeros(n), np.full(n, 3), outputs), server).end_s / step_s
    assert outputs.sum() / batch - 1e-6 <= steps <= outputs.sum() / batch + outputs.max()


@pytest.mark.parametrize("stages", [(1, 1), (2, 1, 3), (4, 1, 1, 1)])
def test_micro_batches_in_a_pipeline(stages):
    """K micro-batches of one sequence: a token every max(sum of stages, K x slowest stage)."""
    layer_s, pp = 0.01, len(stages)
    for flying in range(1, pp + 1):
        server = deployment(step_costs(layer_s, 0.0, stages=stages), max_num_seqs=pp, max_step_seqs=1)
        records = simulate(same(flying, 4, 200), server)
        cycle_s = layer_s * max(sum(stages), flying * max(stages))
        for replica_phase in range(flying):
            ends_s = records.steps.end_s[replica_phase::flying]
            np.testing.assert_allclose(np.diff(ends_s)[20:], cycle_s, rtol=1e-9)
        assert records.gaps.gap_s[-1] <= cycle_s * (1 + 1e-9) + 1e-12
        assert records.requests.finished_s[0] >= 200 * layer_s * sum(stages) * (1 - 1e-9)


@pytest.mark.parametrize("stages", [(1, 1), (2, 1, 3), (1, 1, 1, 1)])
def test_a_full_pipeline_runs_at_its_slowest_stage(stages):
    """Prompts of one step each: the n-th leaves after all stages once and n - 1 slowest ones."""
    layer_s, n = 0.01, 50
    server = deployment(step_costs(layer_s, 0.0, stages=stages), max_num_seqs=len(stages), max_step_seqs=1)
    r = run(same(n, 4, 1), server).requests
    expected = layer_s * (sum(stages) + np.arange(n) * max(stages))
    np.testing.assert_allclose(r.finished_s, expected, rtol=1e-9)


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_replicas_add_up(replicas):
    """Equal requests in turn on R replicas take as long as a share of them on one."""
    cost = step_costs(FLOOR_S, TOKEN_S, kv_token_s=KV_S)
    n = 24 * replicas
    for router in ("round_robin", "least_outstanding", "least_tokens", "central"):
        many = run(
            dataclasses.replace(same(n, 20, 12), predicted_tokens=np.full(n, 12)),
            deployment(cost, Scheduler(router=router), max_num_seqs=6, replicas=replicas),
        )
        one = run(same(24, 20, 12), deployment(cost, max_num_seqs=6))
        assert many.end_s == one.end_s
        np.testing.assert_array_equal(many.totals.tokens, one.totals.tokens[0])


def test_swapping_costs_its_blocks_both_ways():
    """Two sequences of up to 5 blocks outgrow 6; the later one goes out with its 3 and comes in again."""
    server = deployment(
        step_costs(0.01, 0.0), Scheduler(preemption_mode="swap", memory="paged"),
        max_num_seqs=2, block_size=4, num_blocks=6, max_model_len=24,
    )  # fmt: skip
    server = dataclasses.replace(server, kv=dataclasses.replace(server.kv, swap_s_per_block=0.5))
    records = simulate(same(2, 8, 12), server)
    r = records.requests
    assert r.preemptions.tolist() == [0, 1]
    moved = records.totals.swap_s[0] / 0.5
    assert 2 * 3 <= round(moved, 9) <= 2 * 3 + 1, "what went out came in, with a block for the next token"
    assert records.end_s == pytest.approx(0.01 * records.totals.steps[0] + 0.5 * moved, rel=1e-9)
    assert records.totals.tokens[0] == 2 * (8 + 12 - 1), "nothing is computed twice"
