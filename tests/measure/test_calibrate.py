"""Calibration against planted truth: what was changed in an engine is found again, and nothing else is claimed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lengthwise import cost, engine
from lengthwise.measure.calibrate import calibrate
from lengthwise.measure.calibrate._parameters import apply, knobs
from lengthwise.measure.calibrate._part_errors import part_errors
from lengthwise.measure.calibrate._split import split_of
from lengthwise.measure.calibrate.answer import Parameter
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.measured import Measured
from lengthwise.schema.records import Status
from lengthwise.schema.workload import Workload

LIMITS = EngineLimits(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=8192)
TRUTH = {"work": 1.3, "host_step": 2e-3}
FEW = ("work", "host_step")
NOISE = 0.02


@pytest.fixture(scope="module")
def deployment():
    return engine.deploy("llama-3-8b", "H100", limits=LIMITS)


def requests(rate=6.0, n=120, seed=0, prompt=(200, 3000), output=(50, 400)):
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(1 / rate, n))
    return Workload(
        arrival_s - arrival_s[0],
        rng.integers(*prompt, n),
        rng.integers(*output, n),
        name=f"{rate} a second",
    )


def measured(workload, deployment, truth=TRUTH, client_s=0.0, noise=NOISE, seed=0):
    """What an engine with these parameters would have been measured to do, by a clock of its own."""
    rng = np.random.default_rng(seed + 100)
    records = engine.simulate(workload, replace(deployment, cost=apply(deployment.cost, truth)))
    r = records.requests
    ttft = (r.first_token_s - r.arrival_s + client_s) * np.exp(noise * rng.standard_normal(len(workload)))
    rest = (r.finished_s - r.first_token_s) * np.exp(noise * rng.standard_normal(len(workload)))
    shift = 1000.0
    told = replace(
        r,
        arrival_s=r.arrival_s + shift,
        scheduled_s=np.full(len(workload), np.nan),
        first_token_s=r.arrival_s + shift + ttft,
        finished_s=r.arrival_s + shift + ttft + rest,
    )
    return Measured(replace(records, requests=told, steps=None, name=workload.name), workload, "bench")


@pytest.fixture(scope="module")
def run(deployment):
    return measured(requests(), deployment)


@pytest.fixture(scope="module")
def found(run, deployment):
    return calibrate([run], deployment, fit=FEW)


def errors(calibration, metric, statistic):
    return [s for s in calibration.scores if (s.metric, s.statistic) == (metric, statistic)]


@pytest.mark.parametrize("name", TRUTH)
def test_planted_parameters_lie_within_their_intervals(found, name):
    parameter = found[name]
    assert parameter.told
    assert parameter.low <= TRUTH[name] <= parameter.high
    assert parameter.high / parameter.low < (6 if name == "host_step" else 1.3)


def test_held_out_errors_fall_to_the_noise(found):
    for metric in ("ttft", "tpot", "jct"):
        (score,) = errors(found, metric, "each")
        assert score.before > 0.1
        assert score.after < (4 if metric == "ttft" else 2) * NOISE
        (middle,) = errors(found, metric, "p50")
        assert middle.low <= middle.after <= middle.high
        assert abs(middle.after) < 2 * NOISE
    assert found.log_sd < 2 * NOISE


@pytest.mark.slow
def test_a_delay_outside_the_engine_is_told_apart_and_not_put_into_the_tables(deployment):
    calibration = calibrate([measured(requests(2.0), deployment, {"work": 1.2}, client_s=0.05)], deployment)
    assert calibration["client"].told
    assert calibration["client"].low <= 0.05 <= calibration["client"].high
    assert calibration.client_s == calibration["client"].value
    assert any("outside the engine" in note for note in calibration.notes)
    assert calibration["host_step"].value < 0.001


def test_one_gpu_has_no_communication_and_two_have(deployment):
    two = engine.deploy("llama-3-8b", "H100", tp=2, limits=LIMITS)
    for deployed, has in ((deployment, False), (two, True)):
        names = {knob.name for knob in knobs(deployed, logged=False)}
        assert ("comm" in names) is has


@pytest.mark.slow
def test_all_parameters_at_once_agree_with_what_was_planted(deployment):
    """Those told contain the truth or come close; the others stay; held-out requests are met."""
    truth = {"work": 1.3, "prefill": 1.0, "decode": 1.0, "host_step": 2e-3, "host_sequence": 4.4e-6}
    run = measured(requests(n=240), deployment, truth)
    calibration = calibrate([run], deployment)
    assert calibration["work"].low <= 1.3 <= calibration["work"].high
    for parameter in calibration.not_told:
        assert parameter.value == parameter.prior
    for metric in ("tpot", "jct"):
        assert errors(calibration, metric, "each")[0].after < 2 * NOISE


@pytest.mark.slow
def test_short_contexts_do_not_tell_of_attention(deployment):
    """Such runs name what they cannot tell and leave it where it was, however far off it is."""
    workload = requests(12.0, prompt=(16, 64), output=(20, 60))
    calibration = calibrate([measured(workload, deployment, {"work": 1.4, "prefill": 3.0})], deployment)
    prefill = calibration["prefill"]
    assert not prefill.told
    assert prefill.value == prefill.prior == 1.0
    assert calibration["work"].low <= 1.4 <= calibration["work"].high
    assert any(prefill.label in note for note in calibration.notes)
    assert {e.part for e in calibration.tables.errors} >= {"step", "prefill"}


def test_what_is_held_out_is_never_looked_at(run, found, deployment):
    """Times of held-out requests change no parameter and no table, to the bit; errors tell of them."""
    r = run.records.requests
    late = np.arange(len(r.arrival_s)) >= len(r.arrival_s) - found.held_out
    stretched = np.where(late, 3.0, 1.0)
    moved = replace(
        r,
        first_token_s=r.arrival_s + stretched * (r.first_token_s - r.arrival_s),
        finished_s=r.arrival_s + stretched * (r.finished_s - r.arrival_s),
    )
    other = calibrate([replace(run, records=replace(run.records, requests=moved))], deployment, fit=FEW)
    assert other.parameters == found.parameters
    for name in ("layer_s", "decode_s", "prefill_s", "host_s", "head_s"):
        np.testing.assert_array_equal(getattr(other.tables, name), getattr(found.tables, name))
    assert other.tables.reach == found.tables.reach
    assert errors(other, "jct", "mean")[0].after < -0.5


def test_equal_inputs_give_equal_answers(run, found, deployment, tmp_path):
    again = calibrate([run], deployment, fit=FEW)
    assert again.parameters == found.parameters
    for name, one in (("a.npz", found), ("b.npz", again)):
        cost.save(one.tables, tmp_path / name)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_a_saved_calibration_changes_what_is_simulated(run, found, deployment, tmp_path):
    cost.save(found.tables, tmp_path / "cost.npz")
    loaded = engine.deploy("llama-3-8b", "H100", limits=LIMITS, cost=f"tables:{tmp_path / 'cost.npz'}")
    jct = [
        np.median(r.finished_s - r.arrival_s)
        for r in (engine.simulate(run.workload, d).requests for d in (deployment, loaded))
    ]
    theirs = np.median(run.records.requests.finished_s - run.records.requests.arrival_s)
    assert abs(jct[1] / theirs - 1) < 0.03 < abs(jct[0] / theirs - 1)


def test_tables_know_how_far_the_runs_reached_and_how_far_they_are_off(run, found):
    reach = found.tables.reach
    w = run.workload
    assert reach.tokens == 2048
    assert 1 < reach.seqs <= 64
    assert reach.context <= (w.prompt_tokens + w.output_tokens).max()
    assert reach.kv_tokens >= reach.context - 400
    errors = {e.part: e.log_sd for e in found.tables.errors}
    assert 0.005 <= errors["step"] <= found.log_sd
    work = found["work"]
    assert errors["layer"] == pytest.approx(np.log(work.high / work.low) / 3.92)
    assert errors["host"] > 0.02  # what its interval leaves open, told or not
    assert "calibrated" in found.tables.source


@pytest.mark.slow
def test_of_several_loads_a_middle_one_is_held_out_whole(deployment):
    runs = [
        measured(requests(rate, 90, seed), deployment, seed=seed) for seed, rate in enumerate((8.0, 1.0, 4.0))
    ]
    calibration = calibrate(runs, deployment, fit=FEW)
    assert {s.run for s in calibration.scores} == {"4.0 a second"}
    assert (calibration.fitted, calibration.held_out) == (180, 90)
    for name, value in TRUTH.items():
        assert calibration[name].low <= value <= calibration[name].high


def test_runs_may_be_held_out_by_name(run, deployment):
    other = measured(requests(3.0, 100, seed=5), deployment, seed=5)
    calibration = calibrate([run], deployment, holdout=[other], fit=["work"])
    assert {s.run for s in calibration.scores} == {"3.0 a second"}
    assert calibration.fitted == len(run.workload)
    assert errors(calibration, "tpot", "each")[0].after < errors(calibration, "tpot", "each")[0].before


def test_parameters_that_are_not_asked_for_stay(run, deployment):
    calibration = calibrate([run], deployment, fit=["work"])
    assert [p.name for p in calibration.told] == ["work"]
    assert calibration["decode"].value == 1.0
    with pytest.raises(UnknownNameError):
        calibrate([run], deployment, fit=["wrok"])
    with pytest.raises(InputError, match="no parameter 'comm'"):
        calibrate([run], deployment, fit=["comm"])


@pytest.mark.slow
def test_a_closed_loop_is_simulated_as_one(deployment):
    workload = replace(requests(n=200), arrival_s=np.zeros(200), concurrency=16)
    calibration = calibrate([measured(workload, deployment)], deployment, fit=FEW)
    assert calibration["work"].low <= TRUTH["work"] <= calibration["work"].high
    assert errors(calibration, "tpot", "each")[0].after < 2 * NOISE


def test_the_engines_own_counters_are_compared(run, deployment):
    records = engine.simulate(run.workload, replace(deployment, cost=apply(deployment.cost, TRUTH)))
    at_s = np.arange(0.5, records.end_s, 0.5)
    r = records.requests
    running = [int(((r.scheduled_s <= t) & (t < r.finished_s)).sum()) for t in at_s]
    facts = {"metrics": {"at_s": (at_s + 1000).tolist(), "vllm:num_requests_running": running}}
    (load,) = calibrate([replace(run, facts=facts)], deployment, fit=FEW).loads
    assert load.name == "running"
    assert load.after < 0.1 < load.before


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, NOISE])
def test_tables_that_are_right_stay_as_they_were(deployment, noise):
    """No client is invented, no host moved, where the tables given are what ran."""
    calibration = calibrate([measured(requests(n=100), deployment, {}, noise=noise)], deployment)
    assert calibration.client_s == calibration["client"].value == 0.0
    for name in ("host_step", "host_sequence", "prefill"):
        assert calibration[name].value == calibration[name].prior
    assert not calibration.warnings
    for change in calibration.changes:
        assert change.after < change.before + 0.005
    if not noise:
        assert all(p.value == p.prior for p in calibration.parameters)
        assert any("nothing was moved" in note for note in calibration.notes)
        for score in calibration.scores:
            assert score.after == pytest.approx(score.before, abs=1e-6)


def test_a_move_is_told_to_be_worse_where_held_out_requests_say_so(run, deployment):
    """Held-out times are those of the tables given, the fitted ones are not: an honest score must notice."""
    workload = requests(n=100, seed=3)
    right = measured(workload, deployment, {}, seed=3)
    calibration = calibrate([run], deployment, holdout=[right], fit=["work"])
    assert calibration["work"].value > 1.2
    assert not calibration.helps
    assert calibration.warnings[0].startswith("WORSE than the tables given: TTFT")
    (change,) = [c for c in calibration.changes if c.metric == "tpot"]
    assert 0 < change.low < change.after - change.before < change.high
    assert calibrate([run], deployment, fit=["work"]).helps


def test_errors_of_parts_are_those_of_intervals_and_steps_have_the_rest(deployment):
    def parameter(name, low, high, *, told=True, unit="x"):
        return Parameter(name, name, unit, 1.0, low, high, 1.0, told, 0.1)

    found = [
        parameter("work", 1 / 1.04, 1.04),
        parameter("decode", 0.5, 2.0, told=False),
        parameter("host_step", 1e-3, 2e-3, unit="s"),
        parameter("client", 0.0, 1e-3, unit="s"),
    ]
    told = part_errors(deployment.cost, found, {"work": 0.8}, 0.03, 0.05)
    sd = {e.part: e.log_sd for e in told}
    assert sd["layer"] == pytest.approx(np.log(1.04) / 1.96)
    assert sd["decode"] == pytest.approx(np.log(2) / 1.96)
    assert sd["prefill"] == pytest.approx(0.04)  # times to the first token are off by more
    assert sd["host"] == pytest.approx(np.hypot(np.log(2) / 3.92, 0.04))
    assert sd["step"] == pytest.approx(np.sqrt(0.03**2 - (0.8 * sd["layer"]) ** 2))
    assert "client" not in sd


@pytest.mark.slow
def test_several_loads_of_long_contexts_tell_decode_attention_apart(deployment):
    truth = {"decode": 1.5, "work": 1.1}
    runs = [
        measured(requests(rate, 80, k, prompt=prompt, output=(100, 400)), deployment, truth, seed=k)
        for k, (rate, prompt) in enumerate([(0.5, (100, 1000)), (3.0, (100, 1500)), (4.0, (3000, 7500))])
    ]
    calibration = calibrate(runs, deployment, holdout=0.3, fit=["work", "prefill", "decode"])
    for name, value in truth.items():
        assert calibration[name].told
        assert calibration[name].low <= value <= calibration[name].high
    assert calibration["decode"].value > 1.2


@pytest.mark.slow
def test_a_machine_that_drifts_from_run_to_run_widens_intervals(deployment):
    """Repeats that lie 15 % about the tables given move nothing; equally many that agree do."""
    workload, held = requests(n=60), measured(requests(3.0, 60, seed=5), deployment, {}, seed=5)

    def fitted(*works):
        runs = [measured(workload, deployment, {"work": w}, seed=k) for k, w in enumerate(works)]
        return calibrate(runs, deployment, holdout=[held], fit=["work"])["work"]

    drifted, steady = fitted(0.85, 1.24, 1.17), fitted(1.08, 1.08, 1.08)
    assert drifted.value == drifted.prior == 1.0
    assert drifted.low < 0.95
    assert drifted.high > 1.2
    assert 1.0 < steady.low <= 1.08 <= steady.high < 1.16


def test_repeats_of_a_load_are_held_out_together(deployment):
    runs = [
        measured(requests(rate, 60, seed=int(rate)), deployment, seed=repeat)
        for repeat in range(2)
        for rate in (8.0, 1.0, 4.0)
    ]
    split = split_of(runs, deployment, 0.3, ())
    assert [run.held.all() for run in split.runs] == [False, False, True] * 2
    assert not any(run.held.any() for run in split.fitted)
    two = split_of([runs[0], runs[1], runs[3]], deployment, 0.3, ())
    assert "the last ones" in two.words
    np.testing.assert_array_equal(two.runs[0].held, two.runs[2].held)


def test_a_repeat_that_is_held_out_is_told_to_be_one(run, deployment):
    again, other = (
        measured(run.workload, deployment, seed=9),
        measured(requests(3.0, 100, seed=5), deployment),
    )
    (note,) = split_of([run], deployment, [again, other], ()).notes
    assert "is a repeat of a run that was fitted" in note
    assert "tells noise, not a new load" in note


class TestRefusals:
    def test_a_run_given_twice(self, run, deployment):
        for runs, holdout in (([run], [run]), ([run, run, run], 0.3)):
            with pytest.raises(InputError, match="each run must be given once"):
                calibrate(runs, deployment, holdout=holdout)

    @pytest.mark.parametrize(
        ("facts", "told"),
        [
            ({"model": "meta-llama/Meta-Llama-3-70B"}, "model meta-llama/Meta-Llama-3-70B"),
            ({"model": "/models/qwen2.5-7b"}, "model /models/qwen2.5-7b"),
            ({"deployment": {"model": "llama-3-8b", "gpu": "A100", "tp": 1}}, "GPU A100"),
            ({"deployment": {"gpu": "H100", "tp": 4}}, "tp 4"),
        ],
    )
    def test_records_of_another_model_or_gpu(self, run, deployment, facts, told):
        with pytest.raises(InputError, match=f"{told}.*--allow-doubts"):
            split_of([replace(run, facts=facts)], deployment, 0.3, ())
        assert split_of([replace(run, facts=facts)], deployment, 0.3, ["doubts"]).fitted

    @pytest.mark.parametrize("served", ["tiny", "/models/mine", "meta-llama/Meta-Llama-3-8B-Instruct"])
    def test_a_served_name_that_tells_nothing_is_no_doubt(self, run, deployment, served):
        assert split_of([replace(run, facts={"model": served})], deployment, 0.3, ()).fitted

    def test_simulated_runs(self, run, deployment):
        with pytest.raises(InputError, match="it was simulated"):
            calibrate([replace(run, source="simulate")], deployment)
        assert calibrate(
            [replace(run, source="simulate")], deployment, allow=["simulated"], fit=["work"]
        ).fitted

    def test_doubts(self, run, deployment):
        with pytest.raises(InputError, match="the client was late"):
            calibrate([replace(run, doubts=("the client was late",))], deployment)
        with pytest.raises(InputError, match="3 requests failed of timeout"):
            calibrate([replace(run, errors={"timeout": 3})], deployment)
        assert calibrate([replace(run, doubts=("late",))], deployment, allow=["doubts"], fit=["work"]).fitted

    def test_what_may_be_allowed_is_named(self, run, deployment):
        with pytest.raises(InputError, match="allow takes doubts, simulated"):
            calibrate([run], deployment, allow=["all"])

    def test_too_few_requests(self, deployment):
        with pytest.raises(InputError, match="50 finished requests or more to fit to; there are 42"):
            calibrate([measured(requests(n=60), deployment)], deployment)
        with pytest.raises(InputError, match="10 finished requests or more to report on; 4 are held out"):
            calibrate([measured(requests(n=80), deployment)], deployment, holdout=0.05)

    def test_nothing_to_hold_out(self, run, deployment):
        for holdout in (0.0, 1.0, []):
            with pytest.raises(InputError, match="something to hold out"):
                calibrate([run], deployment, holdout=holdout)

    def test_a_deployment_that_takes_less(self, run):
        short = engine.deploy("llama-3-8b", "H100", limits=replace(LIMITS, max_model_len=2048))
        with pytest.raises(InputError, match=r"takes 2048 tokens a request \(max_model_len\)"):
            calibrate([run], short)

    def test_more_running_than_the_deployment_lets(self, run):
        few = engine.deploy("llama-3-8b", "H100", limits=replace(LIMITS, max_num_seqs=4))
        with pytest.raises(InputError, match="at most 4 requests run at a time"):
            calibrate([run], few)

    def test_records_of_another_workload(self, run, deployment):
        other = replace(run.workload, prompt_tokens=run.workload.prompt_tokens[::-1])
        with pytest.raises(InputError, match="do not belong together"):
            calibrate([replace(run, workload=other)], deployment)

    def test_a_run_of_which_nothing_came(self, run, deployment):
        r = replace(run.records.requests, status=np.full(len(run.workload), Status.REJECTED, np.int8))
        with pytest.raises(InputError, match="requests that an engine worked on"):
            calibrate([replace(run, records=replace(run.records, requests=r))], deployment)
