"""WAA: cycle, decode batch and handover, in closed forms where lengths do not vary."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from stage_visits import decode_visit_s, estimate, prefill_visit_s

from lengthwise import catalog
from lengthwise.cost.memory import HOST_LINK_BYTES_PER_S
from lengthwise.schedule import Assumptions, Cluster, Controls, Estimator, Strategy, TaskLengths, cluster_tables
from lengthwise.schedule.controls import rra_layout, waa_layout
from lengthwise.schedule.stage_costs import available_bytes, stage_memory
from lengthwise.schema.errors import InputError

C, M = Strategy.WAA_C, Strategy.WAA_M
FIXED = TaskLengths.fixed(256, 33)


def scaled(tables, factor):
    names = ("layer_s", "comm_s", "embedding_s", "send_s", "head_s", "host_s", "prefill_s", "decode_s")
    return {tp: replace(t, **{n: factor * getattr(t, n) for n in names}) for tp, t in tables.items()}


def test_where_prefill_binds_decoding_runs_at_its_own_pace(opt, four_a40, opt_tables):
    got = estimate([Controls(C, 4, tp=2, tp_groups=2)], FIXED, four_a40, opt, opt_tables)
    prefill_s = float(prefill_visit_s(opt_tables[2], FIXED, 4, 40, first=True, last=True))
    assert got.cycle_s[0] == pytest.approx(prefill_s)
    assert got.throughput_rps[0] == pytest.approx(4 / prefill_s)
    batch = got.decode_batch[0]
    pace_s = float(decode_visit_s(opt_tables[2], FIXED, batch, batch * (256 + 16.5), 40, first=True, last=True))
    assert got.decode_s[0] == pytest.approx(pace_s)
    assert batch == pytest.approx(got.throughput_rps[0] * 32 * pace_s, rel=1e-6)
    each_s = 2 * 256 * 40 * 2 * 2 * 20 * 128 / HOST_LINK_BYTES_PER_S
    in_the_mean, the_last = (2.5 * each_s + 32.5 * pace_s), (4 * each_s + 33 * pace_s)
    assert got.latency_s[0] == pytest.approx(prefill_s + in_the_mean)
    assert got.latency_high_s[0] == pytest.approx(prefill_s + the_last)


def test_in_lockstep_a_decode_waits_for_each_prefill(opt, four_a40, opt_tables):
    got = estimate([Controls(C, 4, tp=2, tp_groups=2)], FIXED, four_a40, opt, opt_tables, Assumptions(lockstep=True))
    assert got.decode_batch[0] == pytest.approx(4 * 32)
    assert got.latency_s[0] > 33 * got.cycle_s[0]


def test_where_decoding_binds_both_ways_are_one(four_a40, opt, opt_tables):
    task = TaskLengths.fixed(4, 300)
    both = [
        estimate([Controls(C, 2, tp=2, tp_groups=2)], task, four_a40, opt, opt_tables, Assumptions(lockstep=lockstep))
        for lockstep in (False, True)
    ]
    assert both[0].decode_batch[0] == pytest.approx(2 * 299)
    assert both[0].cycle_s[0] == both[0].decode_s[0] == both[1].cycle_s[0]
    assert both[0].latency_s[0] == both[1].latency_s[0]


def test_a_kv_transfer_binds_when_nothing_else_does(opt, four_a40, opt_tables):
    fast = scaled(opt_tables, 1e-6)
    got = estimate([Controls(C, 4, tp=2, tp_groups=2)], FIXED, four_a40, opt, fast)
    one_way_s = 4 * 256 * 40 * 2 * 2 * 20 * 128 / HOST_LINK_BYTES_PER_S
    assert got.cycle_s[0] == pytest.approx(one_way_s, rel=1e-6)


def test_an_output_of_one_token_is_not_handed_over(opt, four_a40, opt_tables):
    got = estimate([Controls(C, 4, tp=2, tp_groups=2)], TaskLengths.fixed(256, 1), four_a40, opt, opt_tables)
    assert got.latency_s[0] == pytest.approx(got.prefill_s[0])


def test_a_prefill_pipeline_holds_two_batches_a_stage_and_one_that_leaves(opt, opt_tables):
    """One is computed, one waits; every stage has room for the prompts of all of them."""
    batch, cluster = 40, Cluster(catalog.gpu("A40"), catalog.node("pcie4-8"), 8)
    got = estimate([Controls(C, batch)], TaskLengths.fixed(600, 2), cluster, opt, opt_tables)
    layout, share = waa_layout(40, 8, int(got.prefill_gpus[0])), stage_memory(opt, cluster, 1)
    stages = len(layout.prefill)
    assert stages == 7
    needed = [
        share.weight_bytes(stage.layers, "prefill", first=place == 0, last=place == stages - 1)
        + (2 * stages + 1) * batch * 600 * stage.layers * share.kv_layer_bytes
        + batch * (600 * share.token_bytes + share.seq_bytes)
        for place, stage in enumerate(layout.prefill)
    ]
    assert got.memory_share[0] * available_bytes(opt, cluster) == pytest.approx(max(needed))


def test_behind_a_longer_batch_one_waits_at_every_stage(opt, opt_tables):
    """Prompts of two lengths, one to a batch: where prefill never idles all go at the pace of a long one."""
    cluster, half = Cluster(catalog.gpu("A40"), catalog.node("pcie4-8"), 8), np.zeros(513)
    half[[256, 512]] = 0.5
    task = TaskLengths(half, TaskLengths.fixed(1, 1).output_pmf)
    one, long = (estimate([Controls(C, 1)], of, cluster, opt, opt_tables) for of in (task, TaskLengths.fixed(512, 1)))
    stages = one.prefill_gpus[0]
    assert one.prefill_gpus[0] == long.prefill_gpus[0] > 1
    own_s, long_s = (got.latency_s[0] - got.prefill_s[0] / stages for got in (one, long))
    assert one.prefill_s[0] < 0.8 * long.prefill_s[0]
    assert own_s == pytest.approx(long_s, rel=0.03)


def test_micro_batches_up_to_the_stages_make_an_iteration_shorter(opt, opt_tables):
    cluster = Cluster(catalog.gpu("A40"), catalog.node("pcie4-8"), 8)
    got = estimate(
        [Controls(M, 8, micro_batches=m) for m in (1, 2, 3)],
        FIXED,
        cluster,
        opt,
        opt_tables,
        Assumptions(lockstep=True),
    )
    assert (np.diff(got.decode_s) < 0).all()
    assert got.micro_batches.tolist() == [1, 2, 3]


def test_micro_batches_are_no_more_than_sequences(opt, four_a40, opt_tables):
    got = estimate([Controls(C, 1, micro_batches=50)], TaskLengths.fixed(8, 4), four_a40, opt, opt_tables)
    assert got.micro_batches.tolist() == [3]


def test_a_decoder_only_model_is_stored_twice_and_an_encoder_decoder_once(opt, four_a40):
    def kv_bytes(model, layout):
        cluster = replace(four_a40, gpus=8)
        total = 0.0
        for side in {layout.prefill, layout.decode}:
            for place, stage in enumerate(side):
                share = stage_memory(model, cluster, stage.tp)
                ends = {"first": place == 0, "last": place == len(side) - 1}
                total += stage.tp * share.weight_bytes(stage.layers, stage.role, **ends)
        return total

    t5 = catalog.model("t5-11b")
    assert kv_bytes(opt, waa_layout(40, 8, 3)) == pytest.approx(2 * kv_bytes(opt, rra_layout(40, 8)), rel=1e-12)
    assert kv_bytes(opt, rra_layout(40, 8)) == pytest.approx(
        catalog.weight_bytes(opt) + 2 * opt.vocab * opt.hidden, rel=1e-3
    )
    assert kv_bytes(t5, waa_layout(24, 8, 3)) == pytest.approx(kv_bytes(t5, rra_layout(24, 8)), rel=0.01)
    assert kv_bytes(t5, waa_layout(24, 8, 3, 2, 3)) == pytest.approx(kv_bytes(t5, rra_layout(24, 8)), rel=0.01)


def test_waa_m_leaves_more_room_than_waa_c(opt_estimator):
    got = opt_estimator.estimate([Controls(C, 10), Controls(M, 10)])
    assert got.memory_share[1] < got.memory_share[0]
    assert got.prefill_gpus[0] > got.prefill_gpus[1]


def test_t5_hands_over_little_and_its_decoders_project_the_prompts():
    t5 = catalog.model("t5-11b")
    cluster = Cluster(catalog.gpu("A40"), catalog.node("pcie4-8"), 8)
    task, tables = TaskLengths.from_preset("exegpt-s"), cluster_tables(t5, cluster, [1, 2])
    got = Estimator(task, cluster, t5, tables).estimate(
        [Controls(s, 8, tp=2, tp_groups=g) for s in (C, M) for g in (0, 2, 4)] + [Controls(Strategy.RRA, 8, 4)]
    )
    assert got.feasible.all()
    assert (got.throughput_rps > 0).all()
    whole_s = float(prefill_visit_s(tables[1], task, 8, 24))
    assert got.prefill_s[0] < 0.95 * whole_s
    with pytest.raises(InputError, match=r"within the context of t5-11b \(1024 tokens\)"):
        Estimator(TaskLengths.from_preset("exegpt-c2"), cluster, t5, tables)


def test_one_gpu_is_refused(opt, four_a40, opt_tables, summaries):
    with pytest.raises(InputError, match="at least 2 GPUs"):
        estimate([Controls(C, 4)], summaries, replace(four_a40, gpus=1), opt, opt_tables)
