"""lengthwise schedule run as a user sees it: a schedule kept before an emulated engine, over real HTTP."""

from __future__ import annotations

import json
import statistics

import pytest

from lengthwise import config, measure
from lengthwise.schema.schedule import ScheduleRow
from lengthwise.testing.engine_server import EngineServer, EngineSpec, Limits, LinearSteps, in_thread
from lengthwise.usecases import schedule, schedule_plan, schedule_run


def row_of(strategy="rra", prefill_batch=3, decode_steps=5, decode_batch=9.0, **more):
    numbers = {"throughput_rps": 12.0, "latency_s": 0.8, "latency_high_s": 0.9, "cycle_s": 0.2, "prefill_s": 0.05}
    return ScheduleRow(
        strategy, prefill_batch, decode_steps, 1, 1, 0, 1, decode_s=0.03, decode_batch=decode_batch,
        memory_share=0.5, **(numbers | more),
    )  # fmt: skip


@pytest.fixture
def requested(tmp_path):
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
        reported = {
            "format": "lengthwise.schedule",
            "version": 1,
            "chosen": chosen,
            "bound_s": 5.0,
            "quantile_tokens": 16,
        }
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(reported))
        return path

    return made


@pytest.fixture
def url():
    spec = EngineSpec("m", limits=Limits(32, 4096), steps=LinearSteps(0.03, 0.0, 0.0))
    with in_thread(EngineServer(spec)) as up:
        yield up.servers[0].url


@pytest.mark.slow
def test_a_schedule_is_followed_and_the_results_are_shown_next_to_it(cli, requested, plan, url, tmp_path):
    out = tmp_path / "run"
    finished = cli("schedule", "run", requested, "--engine", url, "--schedule", plan(), "--out", out)
    assert finished.code == 0, finished.err
    assert "Serving RRA, B_E = 3, N_D = 5" in finished.out
    assert "The bound of 5 s held" in finished.out
    reported = json.loads((out / "outcome.json").read_text())
    seen = {one["name"]: one for one in reported["outcome"]["seen"]}
    batch, steps = seen["prefill batch, B_E"], seen["decode iterations, N_D"]
    assert (batch["planned"], steps["planned"]) == (3, 5)
    assert batch["value"] == pytest.approx(3, abs=0.2)
    assert steps["value"] >= 5 - 1e-9 or reported["outcome"]["completed"].get("idle")
    assert reported["outcome"]["satisfied"] is True
    assert isinstance(reported["warnings"], list)
    assert reported["phases"]["max_requests"] <= 32
    phases = [json.loads(line) for line in (out / "phases.jsonl").read_text().splitlines()]
    assert {one["worker"] for one in phases} == {"engine 1"}
    complete = [one["decode_steps"] for one in phases if one["cause"] == "steps"]
    assert statistics.median_low(complete) == 5
    assert min(complete) == 5
    requests = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    assert len(requests) == 60
    assert {one["outcome"] for one in requests} == {"finished"}
    records = measure.read_records(out / "records.parquet")
    assert len(records.records.requests.status) == 60


@pytest.mark.slow
def test_a_scenario_without_a_plan_is_planned(requested):
    loaded = config.load(requested, ['schedule.strategies=["rra"]'])
    made = schedule_plan.planned_run(loaded)
    assert made.row == schedule.plan_schedule(loaded).chosen
    assert (made.bound.limit_s, made.bound.tokens, made.source) == (5.0, 16, str(requested))
    assert 0.99 <= made.share <= 1.0


def test_a_choice_that_engines_as_they_are_cannot_keep_is_exit_2(cli, requested):
    finished = cli("schedule", "run", requested, "--engine", "http://127.0.0.1:9", "--strategy", "waa-c")
    assert finished.code == 2
    assert "WAA-C" in finished.err
    assert "--deploy DIR" in finished.err


@pytest.mark.slow
def test_the_parent_command_still_works(cli, requested):
    finished = cli("schedule", requested, "--strategy", "rra")
    assert finished.code == 0, finished.err
    assert "RRA" in finished.out
    assert cli("schedule", "run", "--help").out.startswith("Usage: lengthwise schedule run")
    assert cli("schedule", "--help").out.startswith("Usage: lengthwise schedule [OPTIONS] {SCENARIO}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "static"}, "a schedule of phases (rra), or a split one (waa) can be run"),
        ({"decode_steps": 17}, "the longest output (16 tokens)"),
        ({"prefill_batch": "x"}, "must hold a complete schedule"),
        ({"prefill_batch": 40, "decode_batch": 60.0}, "with B_E = 40 requests at once; the engine"),
        ({"prefill_batch": 20, "decode_steps": 2, "decode_batch": 75.0}, "with B_D = 75 requests at once"),
    ],
)
def test_an_unrunnable_schedule_is_reported_in_one_message(cli, requested, plan, url, changes, message):
    finished = cli("schedule", "run", requested, "--engine", url, "--schedule", plan(**changes))
    assert finished.code == 2
    assert message in finished.err.replace("\n", " ")
    assert "Traceback" not in finished.err


@pytest.mark.parametrize(
    ("words", "states"),
    [
        (["--latency-bound", "3s"], "excludes --latency-bound"),
        (["--strategy", "rra"], "excludes --strategy"),
        (["--set", "schedule.bound_for=p95"], "excludes --set schedule.bound_for"),
    ],
)
def test_a_plan_that_was_made_takes_no_other_bound_or_strategy(cli, requested, plan, words, states):
    finished = cli("schedule", "run", requested, "--engine", "http://127.0.0.1:9", "--schedule", plan(), *words)
    assert finished.code == 2
    assert states in " ".join(finished.err.split())


@pytest.mark.slow
def test_the_python_api_agrees_and_too_few_phases_are_warned_about(requested, plan, url):
    scenario = config.load(requested, ["workload.num_requests=6"])
    played = schedule_run.run_schedule(scenario, [url], schedule_plan.planned_run(scenario, plan()))
    assert {row.outcome for row in played.rows} == {"finished"}
    assert (len(played.rows), played.engines) == (6, 1)
    found_warnings = schedule_run.warnings(played)
    assert any("numbers without an interval: too few phases count" in one for one in found_warnings)


@pytest.mark.slow
def test_a_lack_of_requests_is_reported_as_a_warning(cli, requested, plan, url):
    """One at a time: every phase goes on until the next request has come."""
    finished = cli(
        "schedule", "run", requested, "--engine", url, "--requests", 30, "--request-rate", 3,
        "--schedule", plan(prefill_batch=1, decode_batch=2.0, decode_steps=2),
    )  # fmt: skip
    assert finished.code == 0, finished.err
    assert "too few requests arrived" in finished.out.replace("\n", " ")


def test_an_unreachable_engine_exits_with_2(cli, requested, plan):
    finished = cli("schedule", "run", requested, "--engine", "http://127.0.0.1:9", "--schedule", plan())
    assert finished.code == 2
    assert "127.0.0.1:9" in finished.err


@pytest.mark.parametrize("text", ["", "[]", '{"format": "other"}', '{"format": "lengthwise.schedule"}'])
def test_a_file_that_is_no_schedule_is_exit_2(cli, requested, tmp_path, text):
    path = tmp_path / "no.json"
    path.write_text(text)
    finished = cli("schedule", "run", requested, "--engine", "http://127.0.0.1:9", "--schedule", path)
    assert finished.code == 2
    assert "no.json must" in finished.err


def test_the_file_that_schedule_writes_is_read(cli, requested, tmp_path):
    path = tmp_path / "plan.json"
    assert cli("schedule", requested, "--strategy", "rra", "--json", path, "-q").code == 0
    chosen = json.loads(path.read_text())["chosen"]
    made = schedule_plan.planned_run(config.load(requested), path)
    assert (made.phases.prefill_batch, made.phases.decode_steps) == (chosen["prefill_batch"], chosen["decode_steps"])
    assert made.phases.decode_batch == pytest.approx(max(1.0, chosen["decode_batch"]), rel=1e-6)
    assert made.row.throughput_rps == chosen["throughput_rps"]
