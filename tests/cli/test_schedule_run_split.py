"""lengthwise schedule run of a plan that splits prefill and decode, before an emulated router."""

from __future__ import annotations

import dataclasses
import json

import pytest

from lengthwise.schema.schedule import ScheduleRow
from lengthwise.testing.engine_server import EngineServer, EngineSpec, Limits, LinearSteps, in_thread

SPLIT = ScheduleRow(
    "waa-c", 2, 1, 1, 1, 0, 1, throughput_rps=12.0, latency_s=0.8, latency_high_s=0.9, cycle_s=0.2, prefill_s=0.05,
    decode_s=0.03, decode_batch=6.0, memory_share=0.5,
)  # fmt: skip
SCENARIO = """
[workload]
prompt = { kind = "uniform", low = 5, high = 40 }
output = { kind = "uniform", low = 2, high = 16 }
request_rate = 1
num_requests = 80
[deployment]
model = "opt-13b"
gpu = "A40"
node = "pcie4-4"
tp = 2
"""


@pytest.fixture
def files(tmp_path):
    """A scenario and a plan for it, as far as it is read."""
    requested, plan = tmp_path / "short.toml", tmp_path / "plan.json"
    requested.write_text(SCENARIO)
    reported = {"format": "lengthwise.schedule", "version": 1, "chosen": dataclasses.asdict(SPLIT)}
    plan.write_text(json.dumps(reported | {"bound_s": 60.0, "quantile_tokens": 16}))
    return requested, plan


@pytest.fixture
def router():
    """An engine that does both, as a client sees a router before two."""
    with in_thread(EngineServer(EngineSpec("m", limits=Limits(64, 4096), steps=LinearSteps(0.01, 0, 0)))) as up:
        yield up.servers[0].url


@pytest.mark.slow
def test_concurrency_stays_within_the_plan_and_the_results_are_shown_next_to_it(cli, files, router, tmp_path):
    requested, plan = files
    out = tmp_path / "run"
    finished = cli("schedule", "run", requested, "--engine", router, "--schedule", plan, "--out", out)
    assert finished.code == 0, finished.err
    assert "Serving WAA-C, B_E = 2, B_m = 1, 1 GPU prefills on one router" in finished.out
    assert "at most 10 concurrent requests per router" in finished.out
    assert "The bound of 60 s held" in finished.out
    reported = json.loads((out / "outcome.json").read_text())
    assert reported["phases"] is None
    seen = {one["name"]: one for one in reported["outcome"]["seen"]}
    assert seen["throughput"]["planned"] == 12.0
    assert 0 < seen["requests in flight"]["value"] <= 10 + 1e-6
    requests = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    assert [one["outcome"] for one in requests] == ["finished"] * 80
    at_once = [
        sum(one["dispatched_s"] <= at["dispatched_s"] < one["finished_s"] for one in requests) for at in requests
    ]
    assert max(at_once) == 10, "the cap is reached, and kept"


@pytest.mark.slow
def test_too_few_requests_leave_the_bound_untested_and_a_sufficient_number_is_named(cli, files, router):
    requested, plan = files
    finished = cli("schedule", "run", requested, "--engine", router, "--schedule", plan, "--requests", 6)
    assert finished.code == 0, finished.err
    message = " ".join(finished.out.split())
    assert "was not tested" in message
    assert "play more (--requests 1000)" in message


@pytest.mark.parametrize(
    ("words", "states"),
    [
        (["--threshold", "0.1"], "forms its batches itself"),
        (["--adapt"], "only a schedule of phases (rra) can follow lengths"),
    ],
)
def test_what_only_phases_can_is_refused(cli, files, words, states):
    requested, plan = files
    finished = cli("schedule", "run", requested, "--engine", "http://127.0.0.1:9", "--schedule", plan, *words)
    assert finished.code == 2
    assert states in " ".join(finished.err.split())


def test_a_split_that_was_only_chosen_needs_the_engines_that_deploy_writes(cli, files):
    finished = cli("schedule", "run", files[0], "--engine", "http://127.0.0.1:9", "--strategy", "waa-c")
    assert finished.code == 2
    assert "--schedule DIR/PLAN.json" in " ".join(finished.err.split())
