"""Estimates of WAA against the event engine: drawn lengths, a saturated queue, the same tables."""

from __future__ import annotations

import numpy as np
import pytest
from simulated_schedules import in_window, independent

from lengthwise import catalog
from lengthwise.engine import simulate
from lengthwise.schedule import Cluster, Controls, Estimator, Strategy, TaskLengths, cluster_tables
from lengthwise.schedule.estimation import resident_batches
from lengthwise.schedule.simulation import concurrency_limit, deployment_of
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import Workload

REQUESTS = 60_000
LEVEL = 0.99
BLOCK = 16
C, M = Strategy.WAA_C, Strategy.WAA_M


def played(estimator, controls, seed, requests=REQUESTS):
    """(requests a second, mean latency of those whose output is the quantile), both ends of the run left out."""
    task = estimator.setting.task
    output, duration_s, rate_rps = in_window(estimator, controls, independent(task, requests, seed))
    long = np.abs(output - task.output_quantile(LEVEL)) <= 2
    assert long.sum() > 10
    return rate_rps, duration_s[long].mean()


def compared(estimator, controls, seed):
    """(rate, latency) of the engine over the estimate's."""
    expected = estimator.estimate([controls])
    assert expected.feasible[0], "memory holds it"
    rate_rps, latency_s = played(estimator, controls, seed)
    return rate_rps / expected.throughput_rps[0], latency_s / expected.latency_s[0]


def agree(estimator, controls, seed, within=0.05):
    rate, latency = compared(estimator, controls, seed)
    assert rate == pytest.approx(1.0, abs=within), controls
    assert latency == pytest.approx(1.0, abs=within), controls


LAYOUTS = ((C, 2, 2, None), (M, 1, 0, None), (M, 1, 0, 2), (M, 2, 1, 2))
"""(strategy, tp, groups, micro-batches) on four GPUs."""


@pytest.mark.parametrize(("strategy", "tp", "groups", "micro_batches"), LAYOUTS)
def test_a_schedule_yields_what_was_expected(opt_estimator, strategy, tp, groups, micro_batches):
    controls = Controls(strategy, 10, tp=tp, tp_groups=groups, micro_batches=micro_batches)
    agree(opt_estimator, controls, 3)


@pytest.fixture(scope="module")
def sixteen():
    """GPT-3 39B on 16 A40, task S."""
    model, cluster = catalog.model("gpt-3-39b"), Cluster(catalog.gpu("A40"), catalog.node("pcie4-8"), 16)
    tables = cluster_tables(model, cluster, [1, 4])
    return Estimator(TaskLengths.from_preset("exegpt-s"), cluster, model, tables)


@pytest.mark.parametrize(("batch", "groups"), [(2, 1), (3, 1), (14, 4)])
def test_on_sixteen_gpus_too(sixteen, batch, groups):
    """Also where eleven stages prefill few prompts at a time, many a batch twice as long as others."""
    controls = Controls(C, batch, tp=4, tp_groups=groups)
    stages = len(deployment_of(sixteen, controls).cost.stage_layers)
    assert stages == (11 if groups == 1 else 3)
    agree(sixteen, controls, 5)


def test_room_to_prefill_is_what_was_counted_on(sixteen):
    """Two batches a stage and one that leaves, at the level: as many tokens as are estimated."""
    controls, setting = Controls(C, 14, tp=4, tp_groups=4), sixteen.setting
    complete = deployment_of(sixteen, controls)
    assert [resident_batches(setting.model, stages) for stages in (1, 2, 12)] == [2, 5, 25]
    resident = resident_batches(setting.model, len(complete.cost.stage_layers))
    assert complete.limits.max_in_flight == resident - 1
    counted = setting.prompt_tokens_high(np.array([resident * 14.0]))[0]
    half_a_block_each = resident * 14 * BLOCK / 2
    assert complete.kv.num_blocks * BLOCK == pytest.approx(counted + half_a_block_each, abs=BLOCK)
    rng, task = np.random.default_rng(2), setting.task
    prompt, output = (rng.choice(len(pmf), 20_000, p=pmf) for pmf in (task.prompt_pmf, task.output_pmf))
    steps = simulate(
        Workload(np.zeros(20_000), prompt, output, concurrency=concurrency_limit(sixteen, controls)),
        complete,
        max_log_steps=10**6,
    ).steps
    in_use = steps.kv_blocks[steps.replica == 0] / complete.kv.num_blocks
    assert 0.7 < np.quantile(in_use, 0.95) <= 1.0, "they are held, and there is no need of more"


def test_what_cannot_be_played_is_refused(opt, opt_tables, summaries, four_a40):
    t5, cluster = catalog.model("t5-11b"), Cluster(catalog.gpu("A40"), catalog.node("pcie4-8"), 8)
    encoder_decoder = Estimator(summaries, cluster, t5, cluster_tables(t5, cluster, [1]))
    with pytest.raises(InputError, match="encoder-decoder cannot be simulated"):
        deployment_of(encoder_decoder, Controls(C, 4))
    with pytest.raises(InputError, match="does not: cache"):
        deployment_of(Estimator(summaries, four_a40, opt, opt_tables), Controls(C, 5000))


@pytest.mark.parametrize(("batch", "paper_rps"), [(4, 22.41), (10, 23.76)])
def test_table_6_of_the_paper_played(opt_estimator, batch, paper_rps):
    """Requests a second as ExeGPT measured; its latencies, 3.01 and 4.11 s, are longer (decision 0016)."""
    controls = Controls(C, batch, tp=2, tp_groups=2)
    expected = opt_estimator.estimate([controls])
    rate_rps, latency_s = played(opt_estimator, controls, 3)
    assert rate_rps == pytest.approx(paper_rps, rel=0.05)
    assert latency_s == pytest.approx(expected.latency_s[0], rel=0.05)


def drawn(estimator, count, seed):
    """Feasible schedules at random, each layout in turn, in which prefill binds."""
    rng = np.random.default_rng(seed)
    while count:
        strategy, tp, groups = ((C, 2, 2), (M, 1, 0), (M, 2, 1), (C, 1, 0))[count % 4]
        micro_batches = int(rng.integers(1, 4))
        batch = int(rng.integers(2, 30))
        controls = Controls(strategy, batch, tp=tp, tp_groups=groups, micro_batches=micro_batches)
        got = estimator.estimate([controls])
        count -= 1
        if got.feasible[0] and got.decode_s[0] < 0.9 * got.cycle_s[0]:
            yield controls


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "least"), [("exegpt-s", 15), ("exegpt-t", 5)])
def test_random_schedules_yield_what_was_expected(opt, four_a40, opt_tables, preset, least):
    estimator, agreed = Estimator(TaskLengths.from_preset(preset), four_a40, opt, opt_tables), 0
    for seed, controls in enumerate(drawn(estimator, 40, seed=11)):
        agree(estimator, controls, seed)
        agreed += 1
    assert agreed >= least, "on long outputs decoding binds mostly"


@pytest.mark.slow
@pytest.mark.parametrize(("controls", "preset"), [(Controls(M, 2), "exegpt-s"), (Controls(C, 3), "exegpt-g")])
def test_where_decoding_binds_its_batch_is_full_and_prefill_waits(opt, four_a40, opt_tables, controls, preset):
    """Prefilled requests do not wait: no more are admitted than have slots or are on their way."""
    estimator = Estimator(TaskLengths.from_preset(preset), four_a40, opt, opt_tables)
    expected = estimator.estimate([controls])
    assert expected.decode_s[0] == expected.cycle_s[0]
    agree(estimator, controls, 1)


def test_a_threshold_makes_prefills_even(opt_estimator):
    controls, task = Controls(C, 10, tp=2, tp_groups=2), opt_estimator.setting.task
    mean = round(10 * task.mean_prompt_tokens)
    rng = np.random.default_rng(5)
    workload = Workload(
        np.zeros(4000), *(rng.choice(len(pmf), 4000, p=pmf) for pmf in (task.prompt_pmf, task.output_pmf))
    )
    off = []
    for threshold in (None, 0.1):
        steps = simulate(workload, deployment_of(opt_estimator, controls, threshold=threshold)).steps
        tokens = steps.prefill_tokens[(steps.replica == 0) & (steps.prefill_seqs > 1)][:-1]
        off.append(np.mean(np.abs(tokens / mean - 1) > 0.11))
    assert off == [pytest.approx(0.7, abs=0.2), pytest.approx(0.0, abs=0.1)]
