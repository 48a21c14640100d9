"""lengthwise schedule watch as a user sees it, and the input that it gets."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lengthwise import config, engine, measure
from lengthwise.schedule import TaskLengths
from lengthwise.schedule.length_drift import shift_moment
from lengthwise.schema.records import SIMULATED, RunResult
from lengthwise.usecases import schedule_adaptation, variants

SUMMARIES = TaskLengths.from_preset("exegpt-s")
LONGER = shift_moment(SUMMARIES.output_pmf, "mean", 0.3, 1500)
TEXT = """
name = "summaries"
[workload]
preset = "exegpt-s"
request_rate = 10
num_requests = 300
[deployment]
model = "opt-13b"
gpu = "A40"
node = "pcie4-4"
tp = 4
[schedule]
latency_bound = "6s"
strategies = ["rra"]
"""


@pytest.fixture
def requested(tmp_path):
    path = tmp_path / "summaries.toml"
    path.write_text(TEXT)
    return path


def trace(path, parts, rate=20.0):
    """Requests whose outputs come from one distribution after the other."""
    rng, rows = np.random.default_rng(1), []
    for count, pmf in parts:
        prompts = rng.choice(len(SUMMARIES.prompt_pmf), count, p=SUMMARIES.prompt_pmf)
        outputs = rng.choice(len(pmf), count, p=pmf)
        rows += list(zip(prompts.tolist(), outputs.tolist(), strict=True))
    lines = (f"{i / rate},{prompt},{output}\n" for i, (prompt, output) in enumerate(rows))
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(lines))
    return path


@pytest.mark.slow
def test_a_trace_that_moves_is_followed(cli, requested, tmp_path):
    live = trace(tmp_path / "live.csv", [(400, SUMMARIES.output_pmf), (1200, LONGER)])
    finished = cli("schedule", "watch", requested, "--workload", live, "--json", tmp_path / "out.json")
    assert finished.code == 0, finished.err
    for words in (
        "Planned for prompts 256", "at most 1 %", "outputs changed, from about request 4", "exceeded by",
        "requests take longer", "Changed to RRA", "tighter", "planned again, with 1,000 requests",
        "With the first schedule unchanged, about",
    ):  # fmt: skip
        assert words in finished.out
    reported = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert (reported["format"], reported["version"], reported["requests"]) == ("lengthwise.schedule_watch", 1, 1600)
    assert reported["answer"] == [line for line in finished.out.splitlines() if line]
    first, again = reported["adaptations"]
    assert (first["first"], again["first"]) == (True, False)
    assert first["change"]["retained_latency_s"] > 6 >= first["change"]["new_latency_s"]
    assert reported["deployed"] != reported["planned"]
    assert 0 < reported["late"] < 1200


def test_lengths_that_stay_change_nothing(cli, requested, tmp_path):
    live = trace(tmp_path / "live.csv", [(1000, SUMMARIES.output_pmf)])
    finished = cli("schedule", "watch", requested, "--workload", live, "--json", tmp_path / "out.json")
    assert finished.code == 0, finished.err
    assert "No significant change of lengths" in finished.out
    reported = json.loads((tmp_path / "out.json").read_text("utf-8"))
    assert (reported["adaptations"], reported["late"]) == ([], 0)
    assert reported["deployed"] == reported["planned"]


def test_a_requested_margin_and_rate_are_applied(cli, requested, tmp_path):
    live = trace(tmp_path / "live.csv", [(600, LONGER)])
    words = ("--margin", "0.2", "--false-positive-rate", "0.001", "--least-requests", 250, "--storage", "ssd")
    reported = json.loads(cli("schedule", "watch", requested, "--workload", live, *words, "--json", "-").out)
    (one,) = reported["adaptations"]
    assert (reported["false_positive_rate"], one["requests"], one["change"]["margin"]) == (0.001, 250, 0.2)
    assert one["change"]["new_latency_s"] <= 0.8 * 6


@pytest.fixture(scope="module")
def ran():
    """A simulated run, whose requests end in another order than they arrive."""
    (variant,) = variants.build(config.loads(TEXT))
    workload = variant.workload(0)
    return RunResult(engine.simulate(workload, variant.deployment), workload, SIMULATED)


def test_a_run_is_reported_in_arrival_order_once_all_earlier_requests_finish(ran):
    live = schedule_adaptation.ObservedRequests.of_records(ran)
    requests = ran.records.requests
    assert len(live) == 300
    assert live.output_tokens.tolist() == requests.output_tokens.tolist()
    assert live.at_s.tolist() == np.maximum.accumulate(requests.finished_s).tolist()
    assert live.at_s.tolist() != requests.finished_s.tolist()


def test_a_file_of_records_is_replayed(cli, requested, tmp_path, ran):
    measure.write_records(ran, tmp_path / "run.parquet")
    finished = cli("schedule", "watch", requested, "--records", tmp_path / "run.parquet")
    assert finished.code == 0, finished.err
    assert "Watched 300 requests" in finished.out


@pytest.mark.parametrize(
    ("words", "states"),
    [
        ([], "either --records FILE or --workload"),
        (["--workload", "exegpt-s", "--records", "run.parquet"], "either --records FILE or --workload"),
        (["--workload", "nothing-such"], "there is no file nothing-such"),
        (["--records", "none.parquet"], "none.parquet"),
        (["--workload", "exegpt-s", "--false-positive-rate", "0"], "false_positive_rate must be above 0"),
        (["--workload", "exegpt-s", "--horizon", "soon"], "--horizon must be seconds"),
        (["--workload", "exegpt-s", "--horizon", "0"], "horizon_s must be above 0"),
        (["--workload", "exegpt-s", "--storage", "tape"], "storage must be"),
        (["--workload", "exegpt-s", "--margin", "1"], "margin must be"),
        (["--workload", "exegpt-s", "--set", "schedule.latency_bound=0.01"], "the least latency is"),
    ],
)
def test_bad_input_ends_with_2_and_one_sentence(cli, requested, words, states):
    finished = cli("schedule", "watch", requested, *words)
    assert finished.code == 2, (finished.out, finished.err)
    assert states in finished.err


def test_an_adapter_of_a_scenario_follows_requests_from_python():
    adapter = schedule_adaptation.adapter_of(config.loads(TEXT))
    row = adapter.deployed
    assert (row.strategy, adapter.bound_s) == ("rra", 6.0)
    rng = np.random.default_rng(0)
    answers = [
        adapter.observe(200, int(tokens), float(at)) for at, tokens in enumerate(rng.choice(len(LONGER), 200, p=LONGER))
    ]
    assert sum(answer is not None for answer in answers) == 1
