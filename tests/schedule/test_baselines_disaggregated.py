"""Prefill and decode on replicas of their own: balance, what binds, and how it is described."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from curve_columns import curve
from stage_visits import decode_visit_s, prefill_visit_s

from lengthwise import catalog
from lengthwise.engine import simulate
from lengthwise.schedule import Cluster, Estimator, TaskLengths
from lengthwise.schedule.baselines import SYSTEMS_BY_NAME, Configuration, DisaggregatedSystem
from lengthwise.schedule.simulation import SimulationSpec
from lengthwise.schedule.stage_costs import stage_memory
from lengthwise.schema.workload import Workload

SYSTEM = "vllm-v1-disaggregated"


@pytest.fixture(scope="module")
def eight(opt):
    return Cluster(catalog.gpu("A40"), catalog.node("pcie4-8"), 8)


def disaggregated(estimator, requests=200):
    setting = estimator.setting
    spec = SimulationSpec(setting.task, setting.bound_tokens, 0.99, requests, 0)
    return DisaggregatedSystem(setting, SYSTEMS_BY_NAME[SYSTEM], spec)


def test_every_gpu_prefills_or_decodes(opt_estimator):
    of = curve(opt_estimator, SYSTEM, requests=100, batch_sizes=[16])
    prefilling = of.prefill_tp * of.prefill_pp * of.prefill_replicas
    np.testing.assert_array_equal(prefilling + of.tp * of.pp * of.replicas, 4)
    np.testing.assert_array_equal(of.prefill_tp * of.prefill_pp, of.tp * of.pp)
    assert (np.minimum(of.prefill_replicas, of.replicas) >= 1).all()


def test_one_request_at_a_time_is_prefilled_sent_and_decoded(opt, four_a40, opt_tables):
    task = TaskLengths.fixed(120, 20)
    of = curve(Estimator(task, four_a40, opt, opt_tables), SYSTEM, requests=100, batch_sizes=[1])
    tables, ends = opt_tables[2], {"first": True, "last": True}
    prompt_s = prefill_visit_s(tables, task, 1, opt.layers, **ends)
    tokens_s = decode_visit_s(tables, task, 1, 120 + np.arange(1, 20), opt.layers, **ends).sum()
    link, share = four_a40.node.link_for(4), stage_memory(opt, four_a40, 2)
    sent_s = link.latency_s + 120 * opt.layers * share.kv_layer_bytes / link.bandwidth_bytes_per_s
    alone = np.flatnonzero((of.tp == 2) & (of.prefill_tp == 2))
    assert len(alone)
    for at in alone:
        assert of.latency_s[at] == pytest.approx(prompt_s + sent_s + tokens_s, rel=0.01)
        assert of.throughput_rps[at] * of.latency_s[at] == pytest.approx(1, rel=1e-6)
        assert of.residents[at] < 1


def test_every_prefilled_request_finds_a_slot(opt, eight, opt_tables, summaries):
    """With more slots no request ends at another time, and no step exceeds the slots."""
    system = disaggregated(Estimator(summaries, eight, opt, {1: opt_tables[1]}))
    sweep = next(sweeps[0] for sweeps in system.sweeps() if sweeps[0].replica.replicas == 8)
    at = Configuration(sweep, 16, 3)
    complete = system.deployment(at, 3, 5)
    alike = replace(complete.decode, limits=replace(complete.decode.limits, max_num_seqs=80, max_step_seqs=80))
    rng, n = np.random.default_rng(3), 2000
    prompts, outputs = (rng.choice(len(p), n, p=p) for p in (summaries.prompt_pmf, summaries.output_pmf))
    work = Workload(np.zeros(n), prompts, outputs, concurrency=80)
    got, free = (simulate(work, one) for one in (complete, replace(complete, decode=alike)))
    np.testing.assert_array_equal(got.requests.finished_s, free.requests.finished_s)
    assert got.steps.decode_seqs.max() == 16


def test_both_sides_of_an_even_balance_hold_the_best(opt, eight, opt_tables, summaries):
    estimator = Estimator(summaries, eight, opt, {1: opt_tables[1]})
    system = disaggregated(estimator)
    sweep = next(sweeps[0] for sweeps in system.sweeps() if sweeps[0].replica.replicas == 8)
    rps = [system.simulate(Configuration(sweep, 24, number)).simulated.throughput_rps for number in range(1, 8)]
    tried = [at.prefill_replicas for at in system.configurations(sweep, 24)]
    assert tried == sorted(set(tried))
    assert len(tried) <= 2
    assert max(rps[number - 1] for number in tried) >= 0.97 * max(rps)
    assert min(rps) < 0.8 * max(rps), "the balance matters"


def test_no_side_exceeds_what_it_can_do_alone(opt_estimator):
    system = disaggregated(opt_estimator)
    for sweep, *_ in system.sweeps():
        at = system.configurations(sweep, 64)[-1]
        got = system.simulate(at)
        if got.simulated is None:
            continue
        prefill_rps = system.prefill_rps(sweep.prefill, sweep.budget) * at.prefill_replicas
        assert got.simulated.throughput_rps <= 1.03 * prefill_rps
        assert got.memory_share <= 1


def test_one_replica_is_nothing_to_part(opt, four_a40, opt_tables, summaries):
    alone = Cluster(four_a40.gpu, four_a40.node, 1)
    of = curve(Estimator(summaries, alone, opt, {1: opt_tables[1]}), SYSTEM, requests=100)
    assert of.rows == ()
    assert of.best(math.inf) is None
    assert of.front() == ()


def test_the_description_names_both_splits(opt_estimator):
    row = curve(opt_estimator, SYSTEM, requests=100, batch_sizes=[16]).best(math.inf)
    assert "prompts on" in row.words
    assert "decodes on" in row.words
    assert row.prefill_gpus == math.prod(row.prefill_cut)
