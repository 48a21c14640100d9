"""Other systems, played out with a full queue: accounting, memory, order, and static batches as estimated."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from curve_columns import curve, static_batches
from stage_visits import decode_visit_s, prefill_visit_s

from lengthwise import policy
from lengthwise.engine import simulate
from lengthwise.schedule import SYSTEMS, Cluster, Estimator, TaskLengths
from lengthwise.schedule.baselines import SYSTEMS_BY_NAME, scheduler_of
from lengthwise.schedule.simulation import SimulationSpec, latency_at, replica_deployment, replicas_of, simulate_replica
from lengthwise.schema.deployment import Scheduler
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.workload import Workload

STREAMING = [
    name for name in SYSTEMS if not SYSTEMS_BY_NAME[name].is_static and not SYSTEMS_BY_NAME[name].is_disaggregated
]
TOGETHER = [name for name in SYSTEMS if not SYSTEMS_BY_NAME[name].is_disaggregated]


@pytest.fixture(scope="module")
def translations():
    return TaskLengths.from_preset("exegpt-t")


@pytest.fixture(scope="module")
def curves(opt_estimator):
    """Every system on OPT-13B, four A40s, summaries, at a few batches."""
    return {name: curve(opt_estimator, name, requests=200, batch_sizes=[4, 64, 256]) for name in SYSTEMS}


def rows(of, **desired):
    keep = np.ones(len(of.rows), dtype=bool)
    for name, value in desired.items():
        keep &= getattr(of, name) == value
    return np.flatnonzero(keep)


@pytest.mark.parametrize("degrees", [[1], [1, 2], [1, 2, 4]], ids=["4 stages", "2 stages", "1 stage"])
def test_static_batches_take_what_was_estimated(opt, four_a40, opt_tables, degrees):
    tables = {tp: opt_tables[tp] for tp in degrees}
    estimator = Estimator(TaskLengths.fixed(200, 60), four_a40, opt, tables)
    expected = static_batches(estimator)
    got = curve(estimator, "fastertransformer", requests=100, batch_sizes=[4, 32, 96])
    for at in rows(got, tp=max(degrees), pp=4 // max(degrees)):
        index = np.flatnonzero(expected.batch == got.batch[at])[0]
        assert got.latency_high_s[at] == pytest.approx(expected.latency_s[index], rel=0.02)
        assert got.latency_s[at] == pytest.approx(expected.latency_s[index], rel=0.02)
        assert got.throughput_rps[at] == pytest.approx(got.batch[at] / expected.latency_s[index], rel=0.02)
        assert got.memory_share[at] == pytest.approx(expected.memory_share[index], rel=1e-9)


def test_drawn_static_batches_end_with_their_own_longest(opt_estimator):
    expected = static_batches(opt_estimator)
    got = curve(opt_estimator, "fastertransformer", requests=400, batch_sizes=[16, 64])
    for at in rows(got, tp=4):
        folder = np.flatnonzero(expected.batch == got.batch[at])[0]
        padded_s = expected.latency_s[folder]
        assert 0.97 * padded_s < got.latency_high_s[at] < 1.1 * padded_s
        assert padded_s * 0.6 < got.batch[at] / got.throughput_rps[at] < padded_s * 1.01


def test_complete_batches_of_one_stage_equal_static_batching(opt_estimator):
    setting, rng = opt_estimator.setting, np.random.default_rng(5)
    of = next(one for one in replicas_of(setting) if (one.tp, one.pp) == (4, 1))
    work = Workload(np.zeros(90), rng.integers(1, 400, 90), rng.integers(1, 60, 90))
    own = replica_deployment(setting, of, 15, 0, scheduler_of(SYSTEMS_BY_NAME["fastertransformer"], 1), 10**6)
    static = dataclasses.replace(own, scheduler=Scheduler(batching="static", memory="paged"))
    computed, other = (simulate(work, one).requests for one in (own, static))
    np.testing.assert_array_equal(computed.finished_s, other.finished_s)
    np.testing.assert_array_equal(computed.scheduled_s, other.scheduled_s)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_prompts_go_in_parts_and_decodes_in_as_many_as_stages(opt_estimator, parts):
    setting = opt_estimator.setting
    of = next(one for one in replicas_of(setting) if (one.tp, one.pp) == (2, 2))
    work = Workload(np.zeros(96), np.full(96, 100), np.full(96, 9))
    made = replica_deployment(setting, of, 32, 0, scheduler_of(SYSTEMS_BY_NAME["deepspeed-inference"], parts), 10**6)
    steps = simulate(work, made).steps
    assert set(steps.prefill_seqs[steps.prefill_seqs > 0]) == {32 // parts}
    assert set(steps.decode_seqs[steps.decode_seqs > 0]) == {16}
    assert not (steps.prefill_seqs * steps.decode_seqs).any()


@pytest.mark.parametrize("system", TOGETHER)
def test_one_request_at_a_time_takes_its_prompt_and_its_tokens(opt, four_a40, opt_tables, system):
    task = TaskLengths.fixed(120, 20)
    got = curve(Estimator(task, four_a40, opt, opt_tables), system, requests=100, batch_sizes=[1])
    tables, ends = opt_tables[4], {"first": True, "last": True}
    prompt_s = prefill_visit_s(tables, task, 1, opt.layers, **ends)
    tokens_s = decode_visit_s(tables, task, 1, 120 + np.arange(1, 20), opt.layers, **ends)
    for at in rows(got, tp=4, pp=1):
        assert got.latency_s[at] == pytest.approx(prompt_s + tokens_s.sum(), rel=0.01)
        assert got.throughput_rps[at] * got.latency_s[at] == pytest.approx(1, rel=1e-6)
        assert got.prefill_s[at] == pytest.approx(prompt_s, rel=0.01)
        assert got.residents[at] == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("system", STREAMING)
def test_replicas_add_up(opt, four_a40, opt_tables, opt_estimator, system, summaries):
    alone = Estimator(summaries, Cluster(four_a40.gpu, four_a40.node, 1), opt, {1: opt_tables[1]})
    one = curve(alone, system, requests=200, batch_sizes=[8])
    four = curve(opt_estimator, system, requests=200, batch_sizes=[8])
    at = rows(four, tp=1, pp=1)
    np.testing.assert_allclose(four.throughput_rps[at], 4 * one.throughput_rps)
    np.testing.assert_array_equal(four.latency_high_s[at], one.latency_high_s)


def test_latency_is_that_of_requests_with_the_requested_output(opt_estimator):
    """Against a plain mean over exactly those, in a run that has enough of them."""
    setting, level = opt_estimator.setting, 0.99
    of = next(one for one in replicas_of(setting) if (one.tp, one.pp) == (4, 1))
    made = replica_deployment(setting, of, 48, 2048, policy.scheduler("vllm_v1"), 4000)
    rng, n, requested = np.random.default_rng(2), 60_000, setting.task.output_quantile(level)
    pmfs = (setting.task.prompt_pmf, setting.task.output_pmf)
    prompts, outputs = (rng.choice(len(pmf), n, p=pmf) for pmf in pmfs)
    requests = simulate(Workload(np.zeros(n), prompts, outputs), made).requests
    exact = (np.arange(n) > 1000) & (np.arange(n) < n - 1000) & (outputs == requested)
    exact_s = (requests.finished_s - requests.scheduled_s)[exact]
    rate_rps = (n - 2000) / (requests.scheduled_s[n - 1000] - requests.scheduled_s[1000])
    got = simulate_replica(made, SimulationSpec(setting.task, requested, level, 2000, seed=7))
    assert exact.sum() > 40
    assert got.latency_s == pytest.approx(exact_s.mean(), rel=0.03)
    assert 0.95 <= (exact_s <= got.latency_high_s).mean() <= 1
    assert got.throughput_rps == pytest.approx(rate_rps, rel=0.02)
    assert got.low_rps < got.throughput_rps < got.high_rps
    assert got.residents == pytest.approx(48, rel=0.02)


def test_a_line_through_long_outputs_is_read_at_the_requested_one():
    output = np.arange(1, 1001)
    elapsed_s = 3.0 + 0.5 * output + np.where(output % 2 == 0, 0.25, -0.25)
    mean_s, high_s = latency_at(output, elapsed_s, 990, 0.99)
    assert mean_s == pytest.approx(3 + 0.5 * 990, abs=0.02)
    assert high_s - mean_s == pytest.approx(2.326 * 0.25, abs=0.02)
    assert latency_at(np.full(50, 7), np.full(50, 2.5), 7, 0.99) == (2.5, 2.5)


@pytest.mark.parametrize("system", SYSTEMS)
def test_memory_suffices_for_what_is_reported_to_fit(curves, system):
    of = curves[system]
    assert of.fits.any()
    assert (of.memory_share[of.fits] <= 1).all()
    assert (of.residents[of.fits] <= of.batch[of.fits] * (1 + 1e-9)).all()
    assert (of.throughput_rps[~of.fits] == 0).all()
    assert np.isinf(of.latency_high_s[~of.fits]).all()


@pytest.mark.parametrize("system", ["fastertransformer", "deepspeed-inference", "orca"])
def test_a_system_that_reserves_for_the_longest_runs_no_unlimited_batch(opt_estimator, system):
    of = curve(opt_estimator, system, requests=100, batch_sizes=[4, 100_000])
    assert of.fits[of.batch == 4].all()
    assert not of.fits[of.batch == 100_000].any()


@pytest.mark.parametrize("system", SYSTEMS)
def test_latencies_and_bounds_are_in_order(curves, system):
    of = curves[system]
    assert (of.latency_high_s[of.fits] >= of.latency_s[of.fits]).all()
    bounds_s = np.geomspace(0.1, 300, 40)
    for worst_case in (True, False):
        found = [of.best(float(bound_s), worst_case=worst_case) for bound_s in bounds_s]
        rates = [row.throughput_rps if row else 0.0 for row in found]
        assert rates == sorted(rates)
        assert rates[0] == 0
        latencies_s = [(row.latency_high_s if worst_case else row.latency_s) if row else 0.0 for row in found]
        assert (np.array(latencies_s) <= bounds_s).all()
        assert of.best(np.inf, worst_case=worst_case).throughput_rps == of.throughput_rps.max()


def test_a_front_has_no_row_that_another_beats(curves):
    of = curves["vllm-v1"]
    front = of.front()
    latencies_s, rates = (
        [point.constrained_latency_s for point in front],
        [point.row.throughput_rps for point in front],
    )
    assert latencies_s == sorted(latencies_s)
    assert rates == sorted(rates)
    assert all(of.best(point.constrained_latency_s).words == point.row.words for point in front)


def test_where_memory_binds_pages_serve_more_than_reservations(opt, four_a40, opt_tables, translations):
    estimator = Estimator(translations, four_a40, opt, opt_tables)
    sizes = [64, 128, 256, 384]
    curves = {name: curve(estimator, name, requests=200, batch_sizes=sizes) for name in ("orca", "vllm-v1")}
    best = {name: of.best(np.inf) for name, of in curves.items()}
    assert best["vllm-v1"].throughput_rps > best["orca"].throughput_rps
    residents = {name: row.decode_batch * row.replicas for name, row in best.items()}
    assert residents["vllm-v1"] > residents["orca"]


def test_finer_batches_are_tried_near_the_best(opt_estimator):
    of = curve(opt_estimator, "orca", requests=100)
    coarse = curve(opt_estimator, "orca", requests=100, batch_sizes=[2**i for i in range(10)])
    for bound_s in (2.0, 3.0, 5.0, 8.0):
        assert of.best(bound_s).throughput_rps >= coarse.best(bound_s).throughput_rps
    assert any(size & (size - 1) for size in of.batch.tolist())


def test_a_seed_gives_the_same_rows_and_another_one_others(opt_estimator):
    made = [curve(opt_estimator, "vllm", requests=100, seed=seed, batch_sizes=[16]) for seed in (3, 3, 4)]
    assert repr((made[0].rows, made[0].intervals_rps)) == repr((made[1].rows, made[1].intervals_rps))
    assert (made[0].latency_s != made[2].latency_s).all()


@pytest.mark.parametrize("system", SYSTEMS)
def test_rows_are_described_in_words(curves, system):
    of = curves[system]
    row = of.best(np.inf)
    assert row.strategy == system
    assert f"batch {row.prefill_batch}" in row.words
    assert ("steps of" in row.words) == (row.chunk_tokens > 0)
    decoding = row.tp * row.stages * row.replicas
    assert (decoding if row.prefill_cut is None else decoding + row.prefill_gpus) == 4


def test_invalid_input_is_reported(opt_estimator):
    with pytest.raises(UnknownNameError, match="system"):
        curve(opt_estimator, "tgi")
    with pytest.raises(InputError, match="requests must be at least 100"):
        curve(opt_estimator, "orca", requests=10)
    for sizes in ([], [0, 4]):
        with pytest.raises(InputError, match="batch_sizes"):
            curve(opt_estimator, "orca", batch_sizes=sizes)
    with pytest.raises(InputError, match="bound must be above 0"):
        curve(opt_estimator, "orca", requests=100, batch_sizes=[1]).best(0.0)
