"""Estimates against schedules played out request by request, with drawn lengths, on the same tables."""

from __future__ import annotations

import numpy as np
import pytest
from stage_visits import decode_visit_s, prefill_visit_s

from lengthwise.schedule import Controls, Strategy, TaskLengths
from lengthwise.schedule.controls import rra_layout, waa_layout
from lengthwise.schedule.stage_costs import kv_transfer_s, stage_memory

ENDS = {"first": True, "last": True}
ITERATIONS = 62
"""Of the 99th percentile of outputs, 63 tokens, less the one of the prefill."""


def drawn(pmf, shape, seed):
    return np.random.default_rng(seed).choice(len(pmf), size=shape, p=pmf)


def prefills_s(tables, prompts, layers=40, first=True, last=True):
    """Seconds of prefill each row of prompts: matrix products by their sum, attention one by one."""
    tokens, batch = prompts.sum(axis=1), prompts.shape[1]
    each = np.array(
        [float(prefill_visit_s(tables, TaskLengths.fixed(p, 1), 1, 1)) for p in range(1, prompts.max() + 1)]
    )
    lone = np.arange(1, prompts.max() + 1)
    attention = each - (tables.layer_s + tables.comm_s + tables.send_s)[lone]
    ends = first * (tables.embedding_s[tokens] + tables.host_s[batch])
    ends = ends + (tables.head_s[batch] if last else tables.send_s[tokens])
    return layers * ((tables.layer_s + tables.comm_s)[tokens] + attention[prompts - 1].sum(axis=1)) + ends


def played_phases(task, new, steps, phases, seed):
    """([phases, new] prompts, [phases, N_D] sequences, tokens that they have cached)."""
    needs = drawn(task.output_pmf, (phases, new), seed) - 1
    prompts = drawn(task.prompt_pmf, (phases, new), seed + 1)
    seqs, tokens = np.zeros((phases, steps)), np.zeros((phases, steps))
    for ago in range(-(-task.max_output_tokens // steps)):
        for u in range(steps):
            age = ago * steps + u + 1
            alive = np.roll(needs, ago, axis=0) >= age
            seqs[:, u] += alive.sum(axis=1)
            tokens[:, u] += (alive * (np.roll(prompts, ago, axis=0) + age)).sum(axis=1)
    return prompts, seqs, tokens


@pytest.mark.parametrize(("new", "steps"), [(52, 13), (20, 5), (12, 40)])
def test_rra_on_one_stage_comes_out_as_played(opt_estimator, opt_tables, summaries, new, steps):
    got = opt_estimator.estimate([Controls(Strategy.RRA, new, steps, tp=4, tp_groups=1)])
    prompts, seqs, tokens = played_phases(summaries, new, steps, 3000, seed=7)
    prefill_s = prefills_s(opt_tables[4], prompts)
    decode_s = decode_visit_s(opt_tables[4], summaries, seqs, tokens, 40, **ENDS)
    rounds_s = prefill_s + decode_s.sum(axis=1)
    assert got.cycle_s[0] == pytest.approx(rounds_s.mean(), rel=0.01)
    phases, last = -(-ITERATIONS // steps), (ITERATIONS - 1) % steps + 1
    started = np.concatenate([[0.0], np.cumsum(rounds_s)])
    end_s = started[phases - 1 : -1] + prefill_s[phases - 1 :] + decode_s[phases - 1 :, :last].sum(axis=1)
    latency_s = end_s - started[: len(end_s)]
    assert got.latency_s[0] == pytest.approx(latency_s.mean(), rel=0.01)
    assert got.latency_high_s[0] == pytest.approx(np.quantile(latency_s, 0.99), rel=0.05)
    assert got.latency_high_s[0] >= np.quantile(latency_s, 0.99) * 0.99


def played_pipeline(prefill_s, decode_s, finish_iteration):
    """(starts of prefills, ends of iteration ``finish``), [rounds, micro-batches], of a pipeline stage by stage.

    ``prefill_s`` [micro-batches, rounds, stages], ``decode_s`` [micro-batches, rounds, N_D, stages].
    """
    parts, rounds, stages = prefill_s.shape
    free, ready = [0.0] * stages, [0.0] * parts
    started_s, finished_s = np.zeros((rounds, parts)), np.zeros((rounds, parts))
    for turn in range(rounds):
        for column in range(decode_s.shape[2] + 1):
            for job in range(parts):
                seconds = decode_s[job, turn, column - 1] if column else prefill_s[job, turn]
                if column == 0:
                    started_s[turn, job] = max(ready[job], free[0])
                for stage, taken in enumerate(seconds.tolist()):
                    free[stage] = ready[job] = max(ready[job], free[stage]) + taken
                if column == finish_iteration:
                    finished_s[turn, job] = ready[job]
    return started_s, finished_s


@pytest.mark.slow
@pytest.mark.parametrize(("new", "steps", "groups"), [(52, 13, 0), (20, 30, 0), (51, 13, 1)])
def test_rra_on_a_pipeline_comes_out_as_played(opt_estimator, opt_tables, summaries, new, steps, groups):
    """Micro-batches' prefills differ, and each waits for the longest before it: more than the mean ones would take."""
    stages = rra_layout(40, 4, 2, groups).stages
    parts, rounds, last = len(stages), 200, len(stages) - 1
    prefill_s, decode_s = np.zeros((parts, rounds, parts)), np.zeros((parts, rounds, steps, parts))
    for job in range(parts):
        prompts, seqs, tokens = played_phases(summaries, new // parts, steps, rounds, seed=100 + 10 * job)
        for place, stage in enumerate(stages):
            of = (opt_tables[stage.tp], stage.layers, place == 0, place == last)
            prefill_s[job, :, place] = prefills_s(of[0], prompts, *of[1:])
            decode_s[job, :, :, place] = decode_visit_s(
                of[0], summaries, seqs, tokens, stage.layers, first=of[2], last=of[3]
            )
    phases, finish_iteration = -(-ITERATIONS // steps), (ITERATIONS - 1) % steps + 1
    started_s, finished_s = played_pipeline(prefill_s, decode_s, finish_iteration)
    round_s = (started_s[-1, 0] - started_s[20, 0]) / (rounds - 21)
    latency_s = (finished_s[phases - 1 :] - started_s[: rounds - phases + 1])[20:]
    got = opt_estimator.estimate([Controls(Strategy.RRA, new, steps, tp=2, tp_groups=groups)])
    assert got.cycle_s[0] == pytest.approx(round_s, rel=0.03)
    assert got.latency_s[0] == pytest.approx(latency_s.mean(axis=0).max(), rel=0.03)
    assert got.latency_high_s[0] == pytest.approx(np.quantile(latency_s, 0.99), rel=0.06)


def played_waa(prefill_s, task, decode, hold_s, batches, new, seed):
    """(requests a second, latencies) of decoding at its own pace, a new batch joining once it is there."""
    needs = drawn(task.output_pmf, (batches, new), seed) - 1
    prompts = drawn(task.prompt_pmf, (batches, new), seed + 1)
    ready_s = np.cumsum(prefill_s) + hold_s
    now, joined, ages, left, context, origin = ready_s[0], 0, *(np.zeros(0, np.int64) for _ in range(4))
    latencies = []
    while joined < batches:
        while joined < batches and ready_s[joined] <= now:
            ages = np.append(ages, np.zeros(new, np.int64))
            left, context = np.append(left, needs[joined]), np.append(context, prompts[joined] + 1)
            origin = np.append(origin, np.full(new, joined))
            joined += 1
        keep = left > 0
        ages, left, context, origin = ages[keep], left[keep], context[keep], origin[keep]
        if not len(left):
            now = ready_s[joined] if joined < batches else now
            continue
        now += decode(len(left), int(context.sum()))
        ages, left, context = ages + 1, left - 1, context + 1
        done = ages == ITERATIONS
        latencies += [now - (ready_s[i] - hold_s - prefill_s[i]) for i in set(origin[done].tolist())]
    return batches * new / (ready_s[-1] - ready_s[0]), np.array(latencies)


def test_waa_on_two_stages_comes_out_as_played(opt_estimator, opt, four_a40, opt_tables, summaries):
    new, tables = 4, opt_tables[2]
    got = opt_estimator.estimate([Controls(Strategy.WAA_C, new, tp=2, tp_groups=2)])
    prefill_s = prefills_s(tables, drawn(summaries.prompt_pmf, (600, new), 12))
    layout = waa_layout(40, 4, 2, 2, 2)
    one_way_s = kv_transfer_s(opt, {2: stage_memory(opt, four_a40, 2)}, layout.decode, summaries.mean_prompt_tokens)
    table = {}

    def decode(seqs, tokens):
        near = (seqs, tokens // 64)
        if near not in table:
            table[near] = float(decode_visit_s(tables, summaries, seqs, tokens, 40, **ENDS))
        return table[near]

    rate, latencies = played_waa(prefill_s, summaries, decode, 2 * new * one_way_s, 600, new, 11)
    assert got.throughput_rps[0] == pytest.approx(rate, rel=0.02)
    assert len(latencies) > 20
    assert got.latency_s[0] == pytest.approx(latencies.mean(), rel=0.03)
    assert latencies.max() <= got.latency_high_s[0] * 1.03
