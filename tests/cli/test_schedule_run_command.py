"""lengthwise schedule run as a user sees it: a schedule kept before an emulated engine, over real HTTP."""

from __future__ import annotations

import json
import math
import statistics

import numpy as np
import pytest

from lengthwise import measure, scenario
from lengthwise.cli._schedule_run_page import doubts
from lengthwise.gateway.decisions import Phase
from lengthwise.gateway.phasing import Phases
from lengthwise.gateway.telemetry import Row
from lengthwise.scenario import PlannedRun, phases_of, schedule_outcome
from lengthwise.scenario.schedule_outcomes import mean
from lengthwise.schedule import TaskLengths
from lengthwise.schema.errors import InputError
from lengthwise.schema.schedule import ScheduleRow
from lengthwise.testing.engine_server import EngineServer, EngineSpec, Limits, LinearSteps, in_thread


def row_of(strategy="rra", encode_batch=3, decode_steps=5, decode_batch=9.0, **more):
    numbers = {
        "throughput_rps": 12.0,
        "latency_s": 0.8,
        "latency_high_s": 0.9,
        "cycle_s": 0.2,
        "encode_s": 0.05,
    }
    return ScheduleRow(
        strategy, encode_batch, decode_steps, 1, 1, 0, 1, decode_s=0.03, decode_batch=decode_batch,
        memory_share=0.5, **(numbers | more),
    )  # fmt: skip


@pytest.fixture
def asked(tmp_path):
    path = tmp_path / "short.toml"
    path.write_text(
        """
[workload]
prompt = { kind = "uniform", low = 5, high = 40 }
output = { kind = "uniform", low = 2, high = 16 }
request_rate = 1
num_requests = 60
[deployment]
model = "opt-13b"
gpu = "A40"
node = "pcie4-4"
tp = 2
[schedule]
latency_bound = "5s"
"""
    )
    return path


@pytest.fixture
def plan(tmp_path):
    """A file as ``lengthwise schedule --json`` writes it, as far as it is read."""

    def made(**changes):
        import dataclasses

        chosen = dataclasses.asdict(row_of()) | changes
        told = {
            "format": "lengthwise.schedule",
            "version": 1,
            "chosen": chosen,
            "bound_s": 5.0,
            "quantile_tokens": 16,
        }
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(told))
        return path

    return made


@pytest.fixture
def url():
    spec = EngineSpec("m", limits=Limits(32, 4096), steps=LinearSteps(0.03, 0.0, 0.0))
    with in_thread(EngineServer(spec)) as up:
        yield up.servers[0].url


@pytest.mark.slow
def test_a_schedule_is_kept_and_what_came_stands_beside_it(cli, asked, plan, url, tmp_path):
    out = tmp_path / "run"
    ended = cli("schedule", "run", asked, "--engine", url, "--schedule", plan(), "--out", out)
    assert ended.code == 0, ended.err
    assert "Keeping RRA, B_E = 3, N_D = 5" in ended.out
    assert "The bound of 5 s held" in ended.out
    told = json.loads((out / "outcome.json").read_text())
    seen = {one["name"]: one for one in told["outcome"]["seen"]}
    batch, steps = seen["encode batch, B_E"], seen["decode iterations, N_D"]
    assert (batch["planned"], steps["planned"]) == (3, 5)
    assert batch["value"] == pytest.approx(3, abs=0.2)
    assert steps["value"] >= 5 - 1e-9 or told["outcome"]["ended"].get("idle")
    assert told["outcome"]["held"] is True
    assert isinstance(told["doubts"], list)
    assert told["phases"]["most_in_flight"] <= 32
    phases = [json.loads(line) for line in (out / "phases.jsonl").read_text().splitlines()]
    assert {one["worker"] for one in phases} == {"engine 1"}
    whole = [one["decode_steps"] for one in phases if one["why"] == "steps"]
    assert statistics.median_low(whole) == 5
    assert min(whole) == 5
    requests = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    assert len(requests) == 60
    assert {one["outcome"] for one in requests} == {"finished"}
    records = measure.read_records(out / "records.parquet")
    assert len(records.records.requests.status) == 60


@pytest.mark.slow
def test_a_scenario_without_a_plan_is_planned(asked):
    loaded = scenario.load(asked, ['schedule.strategies=["rra"]'])
    made = scenario.planned_run(loaded)
    assert made.row == scenario.plan_schedule(loaded).chosen
    assert (made.bound_s, made.bound_tokens, made.source) == (5.0, 16, str(asked))
    assert 0.99 <= made.share <= 1.0


def test_a_choice_that_engines_as_they_are_cannot_keep_is_exit_2(cli, asked):
    ended = cli("schedule", "run", asked, "--engine", "http://127.0.0.1:9", "--strategy", "waa-c")
    assert ended.code == 2
    assert "WAA-C" in ended.err
    assert "--deploy DIR" in ended.err


@pytest.mark.slow
def test_the_command_beside_it_goes_on_working(cli, asked):
    ended = cli("schedule", asked, "--strategy", "rra")
    assert ended.code == 0, ended.err
    assert "RRA" in ended.out
    assert cli("schedule", "run", "--help").out.startswith("Usage: lengthwise schedule run")
    assert cli("schedule", "--help").out.startswith("Usage: lengthwise schedule [OPTIONS] {SCENARIO}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"strategy": "waa-c"}, "--deploy DIR"),
        ({"strategy": "static"}, "a schedule of phases (rra) can be run"),
        ({"decode_steps": 17}, "the longest output (16 tokens)"),
        ({"encode_batch": "x"}, "must hold a whole schedule"),
        ({"encode_batch": 40, "decode_batch": 60.0}, "with B_E = 40 requests at once; the engine"),
        ({"encode_batch": 20, "decode_steps": 2, "decode_batch": 75.0}, "with B_D = 75 requests at once"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_message(cli, asked, plan, url, changes, said):
    ended = cli("schedule", "run", asked, "--engine", url, "--schedule", plan(**changes))
    assert ended.code == 2
    assert said in ended.err.replace("\n", " ")
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--latency-bound", "3s"], "excludes --latency-bound"),
        (["--strategy", "rra"], "excludes --strategy"),
        (["--set", "schedule.bound_for=p95"], "excludes --set schedule.bound_for"),
    ],
)
def test_a_plan_that_was_made_takes_no_other_bound_or_strategy(cli, asked, plan, words, says):
    ended = cli("schedule", "run", asked, "--engine", "http://127.0.0.1:9", "--schedule", plan(), *words)
    assert ended.code == 2
    assert says in " ".join(ended.err.split())


@pytest.mark.slow
def test_the_same_from_python_and_too_few_phases_are_a_doubt(asked, plan, url):
    here = scenario.load(asked, ["workload.num_requests=6"])
    played = scenario.run_schedule(here, [url], scenario.planned_run(here, plan()))
    assert {row.outcome for row in played.rows} == {"finished"}
    assert (len(played.rows), played.engines) == (6, 1)
    assert any(
        "where there is no interval, too few phases count" in one for one in doubts(played.planned, played)
    )


@pytest.mark.slow
def test_a_lack_of_requests_is_told_as_a_doubt(cli, asked, plan, url):
    """One at a time: every phase goes on until the next request has come."""
    ended = cli(
        "schedule", "run", asked, "--engine", url, "--schedule", plan(encode_batch=1, decode_batch=2.0, decode_steps=2),
        "--requests", 30, "--request-rate", 3,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert "requests were lacking" in ended.out.replace("\n", " ")


def test_an_engine_that_is_not_there_is_exit_2(cli, asked, plan):
    ended = cli("schedule", "run", asked, "--engine", "http://127.0.0.1:9", "--schedule", plan())
    assert ended.code == 2
    assert "127.0.0.1:9" in ended.err


@pytest.mark.parametrize("text", ["", "[]", '{"format": "other"}', '{"format": "lengthwise.schedule"}'])
def test_a_file_that_is_no_schedule_is_exit_2(cli, asked, tmp_path, text):
    path = tmp_path / "no.json"
    path.write_text(text)
    ended = cli("schedule", "run", asked, "--engine", "http://127.0.0.1:9", "--schedule", path)
    assert ended.code == 2
    assert "no.json must" in ended.err


def test_the_file_that_schedule_writes_is_read(cli, asked, tmp_path):
    path = tmp_path / "plan.json"
    assert cli("schedule", asked, "--strategy", "rra", "--json", path, "-q").code == 0
    chosen = json.loads(path.read_text())["chosen"]
    made = scenario.planned_run(scenario.load(asked), path)
    assert (made.phases.encode_batch, made.phases.decode_steps) == (
        chosen["encode_batch"],
        chosen["decode_steps"],
    )
    assert made.phases.decode_batch == pytest.approx(max(1.0, chosen["decode_batch"]), rel=1e-6)
    assert made.row.throughput_rps == chosen["throughput_rps"]


# -- numbers --------------------------------------------------------------------------------------


def test_an_engine_may_have_what_all_but_one_phase_in_a_hundred_hold():
    """Drawn phases against the bound that the gateway is told."""
    task = TaskLengths.from_samples([10], np.arange(2, 41))
    phases = phases_of(row_of(encode_batch=10, decode_steps=6), task)
    rng = np.random.default_rng(0)
    there, batches = np.zeros(0, int), []
    for _ in range(4000):
        there = np.concatenate([there, rng.integers(1, 40, 10)])  # decode iterations that are still to come
        batches.append(len(there))
        there = there[there > 6] - 6
    assert phases.most_in_flight is not None
    above = np.mean(np.array(batches[50:]) > phases.most_in_flight - 10)
    assert 0.0 < above < 0.025
    assert phases.decode_batch == pytest.approx(np.mean(batches[50:]), rel=0.02)


def finished(number, arrival_s, served_s):
    nan = math.nan
    return Row(
        number, "m", "t", 0, arrival_s, 5, 9, 9.0, "told", nan, (), 9, 0.0, arrival_s, nan, arrival_s + served_s,
        served_s, "w", 0, 0, 0, "finished",
    )  # fmt: skip


def outcome_of(bound_s, served, level=0.9, engines=1):
    planned = PlannedRun(row_of(), Phases(3, 5), bound_s, 9, level, "here")
    phases = [
        Phase(f"w{k % engines}", "steps", k * 0.5, k * 0.5 + 0.5 * engines, 3, 30, 9, 5, 6)
        for k in range(200)
    ]
    rows = [finished(n, n * 100.0 / len(served), served_s) for n, served_s in enumerate(served)]
    return schedule_outcome(planned, phases, rows, engines)


def test_throughput_is_that_of_full_batches():
    seen = {one.name: one for one in outcome_of(5.0, [1.0] * 200).seen}
    assert seen["throughput"].value == pytest.approx(6.0)
    assert seen["throughput"].high - seen["throughput"].low < 1e-6
    both = {one.name: one for one in outcome_of(5.0, [1.0] * 200, engines=2).seen}
    assert both["throughput"].value == pytest.approx(6.0)
    assert both["throughput"].planned == pytest.approx(24.0)


def test_whether_a_bound_held_is_said_with_how_sure_that_is():
    served = [0.1 + 0.01 * n for n in np.random.default_rng(1).permutation(200)]
    well, close, broken = (outcome_of(bound_s, served) for bound_s in (5.0, 1.95, 0.5))
    assert (well.held, well.sure) == (True, True)
    assert (close.held, close.sure) == (True, False)
    assert (broken.held, broken.sure) == (False, True)
    assert outcome_of(1.0, []).held is None


def test_the_interval_of_a_quantile_holds_it_as_often_as_it_says():
    rng, inside = np.random.default_rng(2), 0
    for _ in range(300):
        latency = outcome_of(math.inf, rng.exponential(1.0, 200).tolist()).seen[-1]
        inside += latency.low <= math.log(10) <= latency.high
    assert 0.92 <= inside / 300 <= 1.0


def test_the_interval_of_a_mean_holds_it_as_often_as_it_says():
    rng, inside = np.random.default_rng(3), 0
    for _ in range(400):
        _, low, high = mean(rng.normal(7.0, 2.0, 30))
        inside += low <= 7.0 <= high
    assert 0.92 <= inside / 400 <= 0.99


def test_two_phases_have_a_mean_and_no_interval():
    value, low, high = mean(np.array([1.0, 3.0]))
    assert value == 2.0
    assert math.isnan(low)
    assert math.isnan(high)


def test_phases_that_no_schedule_can_have_are_refused():
    with pytest.raises(InputError, match="longest output"):
        phases_of(row_of(decode_steps=99), TaskLengths.fixed(10, 20))
