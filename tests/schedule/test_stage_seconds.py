"""What a visit of a stage takes: as the engine reads the same tables, and expected over prompts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from stage_visits import decode_visit_s, prefill_visit_s

from lengthwise import catalog
from lengthwise.cost import roofline
from lengthwise.engine.step_time import CostReader
from lengthwise.schedule import Cluster, Estimator, TaskLengths, cluster_tables
from lengthwise.schedule.stage_costs import projected_share
from lengthwise.schema.cost_tables import MERGED, AttentionRule
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.errors import InputError

FIRST, LAST = [True, False, False], [False, False, True]


@pytest.fixture(scope="module")
def three_stages(opt, four_a40):
    limits = EngineLimits(max_num_seqs=64, max_num_batched_tokens=4096)
    return roofline(opt, four_a40.gpu, four_a40.node, Parallelism(pp=3), limits, 2048)


def merged(tables):
    chunk = np.arange(3000.0)[:, None] ** 2 * 1e-12 + np.arange(4) * 1e-6
    decode = np.arange(65.0)[:, None] * 1e-6 * (1 + np.arange(40))
    return replace(tables, rule=AttentionRule(MERGED, 64, 1.1), prefill_s=chunk, decode_s=decode)


KINDS = {
    "per request": lambda t: t,
    "merged": merged,
    "masked": lambda t: replace(t, masked_s=1e-9),
    "merged and masked": lambda t: replace(merged(t), masked_s=1e-9),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("seqs", "kv_tokens"), [(1, 7), (13, 4711), (64, 64 * 700), (900, 2**20)])
def test_decode_times_match_the_engine(three_stages, kind, seqs, kv_tokens):
    tables = KINDS[kind](three_stages)
    kv_tokens -= kv_tokens % seqs if kind.startswith("merged") else 0
    got = decode_visit_s(
        tables, TaskLengths.fixed(10, 10), seqs, kv_tokens, tables.stage_layers, first=FIRST, last=LAST
    )
    step = CostReader(tables).step(seqs, kv_tokens - kv_tokens % seqs if kind.startswith("merged") else kv_tokens, [])
    np.testing.assert_allclose(got, step.stages_s, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("seqs", "prompt"), [(1, 1), (3, 300), (40, 511)])
def test_times_of_equal_prompts_match_the_engine(three_stages, kind, seqs, prompt):
    tables = KINDS[kind](three_stages)
    task = TaskLengths.fixed(prompt, 10)
    got = prefill_visit_s(tables, task, seqs, tables.stage_layers, first=FIRST, last=LAST)
    np.testing.assert_allclose(got, CostReader(tables).step(0, 0, [(prompt, 0)] * seqs).stages_s, rtol=1e-12)


def test_attention_of_prompts_is_its_mean_and_not_that_of_a_mean_prompt(three_stages, summaries):
    attention = replace(
        three_stages,
        **{
            name: 0.0 * getattr(three_stages, name)
            for name in ("layer_s", "comm_s", "embedding_s", "send_s", "head_s", "host_s")
        },
    )
    each = [float(prefill_visit_s(attention, TaskLengths.fixed(p, 1), 1, 40)) for p in range(1, 513)]
    expected = float(summaries.prompt_pmf[1:] @ each)
    got = float(prefill_visit_s(attention, summaries, 7, 40))
    assert got == pytest.approx(7 * expected, rel=1e-12)
    assert got > 1.02 * float(prefill_visit_s(attention, TaskLengths.fixed(256, 1), 7, 40))


def test_fractional_expected_amounts_take_a_time_in_between(three_stages, summaries):
    low, middle, high = decode_visit_s(three_stages, summaries, [20, 20.5, 21], [6000, 6150, 6300], 10)
    assert low < middle < high


def test_no_sequences_take_no_time(three_stages, summaries):
    assert float(decode_visit_s(three_stages, summaries, 0, 0, 10, first=True, last=True)) == 0.0


def test_a_group_of_gpus_is_faster_but_not_as_many_times(opt_tables, summaries):
    one, two, four = (float(prefill_visit_s(opt_tables[tp], summaries, 50, 40)) for tp in (1, 2, 4))
    assert one > two > one / 2
    assert two > four > two / 2


def test_neighbours_on_other_nodes_send_over_the_network(opt):
    nodes = catalog.node("pcie4-8")
    near, far = (cluster_tables(opt, Cluster(catalog.gpu("A40"), nodes, n), [1])[1] for n in (8, 16))
    assert far.send_s[4096] > near.send_s[4096]


def test_only_encoder_decoders_project_elsewhere():
    assert projected_share(catalog.model("opt-13b")) == 0.0
    t5 = catalog.model("t5-11b")
    cross, encoder = 2 * 1024 * 16384, 4 * 1024 * 16384 + 2 * 1024 * 65536
    assert projected_share(t5) == pytest.approx(cross / (encoder + cross), rel=1e-4)


def test_a_degree_without_tables_is_refused(opt, four_a40, opt_tables, summaries):
    with pytest.raises(InputError, match=r"degree 8; there are those of \[1, 2, 4\]"):
        Estimator(summaries, four_a40, opt, opt_tables).setting.packed(8)
