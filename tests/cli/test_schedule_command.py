"""lengthwise schedule as a user sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "schedule-opt-13b.toml"


@pytest.fixture
def short(tmp_path):
    """Short outputs: a box that is looked through in no time."""
    path = tmp_path / "short.toml"
    path.write_text(
        """
[workload]
prompt = { kind = "uniform", low = 200, high = 900 }
output = { kind = "uniform", low = 1, high = 9 }
request_rate = 1
[deployment]
model = "opt-13b"
gpu = "A40"
node = "pcie4-4"
tp = 2
[engine]
gpu_memory_utilization = 0.7
[schedule]
latency_bound = "3s"
"""
    )
    return path


@pytest.mark.slow
def test_the_example_is_answered(cli, tmp_path):
    page, out = tmp_path / "page.html", tmp_path / "out.json"
    finished = cli("schedule", EXAMPLE, "--report", page, "--json", out)
    assert finished.code == 0, finished.err
    assert "Within 3 s for outputs of 63 tokens" in finished.out
    for words in ("Static batching with batches of", "Best by bound:", "mean +15 %", "RRA", "WAA-C", "not"):
        assert words in finished.out
    reported = json.loads(out.read_text())
    assert reported["chosen"]["latency_high_s"] <= 3
    assert reported["evaluated"] < 0.01 * reported["points"]
    assert "OPT-13B summarises" in page.read_text("utf-8")
    assert "wrote" in finished.err


def requested(cli, *words):
    finished = cli("schedule", *words, "--json", "-")
    assert finished.code == 0, finished.err
    return json.loads(finished.out)


@pytest.mark.slow
def test_options_are_equivalent_to_the_file(cli, short):
    reported = requested(
        cli, short, "--latency-bound", "2500ms", "--bound-for", "p95", "--strategy", "RRA", "--gpus", 4
    )
    assert (reported["bound_s"], reported["level"]) == (2.5, 0.95)
    assert {side["strategy"] for side in reported["sides"]} == {"rra"}
    assert {side["tp"] for side in reported["sides"]} == {1, 2, 4}
    assert reported["metadata"]["GPUs"] == "4 x A40"
    assert reported == requested(
        cli, short, "--set", "schedule.latency_bound=2.5", "--set", 'schedule.bound_for="p95"',
        "--set", 'schedule.strategies=["rra"]', "--set", "schedule.gpus=4",
    ) | {"seconds": reported["seconds"]}  # fmt: skip


@pytest.mark.slow
def test_exhaustive_finds_nothing_better_than_the_gap(cli, short):
    found, looked = requested(cli, short), requested(cli, short, "--exhaustive")
    assert looked["gap"] == 0
    assert found["chosen"]["throughput_rps"] * (1 + found["gap"]) >= looked["chosen"]["throughput_rps"] * (1 - 1e-9)
    assert found["evaluated"] < looked["evaluated"]


@pytest.mark.slow
def test_an_expected_latency_lets_more_in(cli, short):
    worst, mean = (
        requested(cli, short, "--latency-bound", 1),
        requested(cli, short, "--latency-bound", 1, "--expected"),
    )
    assert (worst["worst_case"], mean["worst_case"]) == (True, False)
    assert mean["chosen"]["throughput_rps"] >= worst["chosen"]["throughput_rps"]
    assert mean["chosen"]["latency_s"] <= 1


@pytest.mark.slow
def test_rates_of_loading_may_be_given(cli, short):
    usual = requested(cli, short)["redeploy"]
    reported = requested(cli, short, "--set", "schedule.dram_gb_s=9.8", "--set", "schedule.ssd_gb_s=14.6")["redeploy"]
    assert reported["dram_s"] == pytest.approx(usual["dram_s"] / 2)
    assert reported["ssd_s"] == pytest.approx(usual["ssd_s"] / 2)
    assert reported["source"] == "rates as given"


def test_no_bound_is_infinite(cli, short):
    reported = requested(cli, short, "--latency-bound", "inf")
    assert reported["bound_s"] is None
    assert reported["metadata"]["bound"] == "no latency bound"


def test_quiet_prints_nothing(cli, short):
    finished = cli("schedule", short, "--quiet")
    assert (finished.code, finished.out, finished.err) == (0, "", "")


@pytest.mark.parametrize(
    ("words", "states"),
    [
        (["--latency-bound", "0.01"], "the least latency is"),
        (["--latency-bound", "soon"], "must be seconds"),
        (["--latency-bound", "0"], "--latency-bound: must be above 0; it is 0"),
        (["--strategy", "rr"], "--strategy: there is no strategy named 'rr'. Did you mean: rra?\n"),
        (["--bound-for", "99"], "p99"),
        (["--bound-for", "p20"], "p50"),
        (["--strategy", "rra,wac-c"], "Did you mean: waa-c"),
        (["--gpus", "1", "--strategy", "waa-c"], "at least 2 GPUs"),
        (["--set", "schedule.latency_bond=3"], "did you mean schedule.latency_bound?"),
        (["--set", "deployment.model=opt-13c"], "opt-13b"),
        (["--set", "deployment.model=gpt-3-175b"], "need 175 GB on the fullest GPU, of 32.8 GB available (A40)"),
        (["--threshold", "0"], "must be above 0"),
        (["--set", "workload.prompt.high=4000"], "must be within the context of opt-13b (2048 tokens)"),
        (["--set", "engine.max_model_len=908"], "(900 + 9 tokens) must be within engine.max_model_len, 908"),
        (["--bound-for", "10 tokens"], "it is 10 tokens, and the longest output has 9"),
        (["--cost", "tables:none.npz"], "tables of one tensor-parallel degree"),
        (["--set", "deployment.weight_dtype=fp8"], "remove weight_dtype and kv_dtype"),
        (["--report", "/nowhere/page.html"], "does not exist"),
    ],
)
def test_bad_input_ends_with_2_and_one_sentence(cli, short, words, states):
    finished = cli("schedule", short, *words)
    assert finished.code == 2, (finished.out, finished.err)
    assert states in finished.err


def test_variants_are_not_compared(cli, short):
    short.write_text(short.read_text() + '[[variants]]\nname = "a"\n[[variants]]\nname = "b"\n')
    finished = cli("schedule", short)
    assert finished.code == 2
    assert "remove the [[variants]]" in finished.err


def test_a_replayed_trace_is_counted(cli, tmp_path):
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{i},{200 + 7 * (i % 40)},{1 + i % 12}\n" for i in range(200))
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    path = tmp_path / "trace.toml"
    path.write_text(
        '[workload]\ntrace = "trace.csv"\n[deployment]\nmodel = "opt-13b"\ngpu = "A40"\ntp = 2\n'
        '[schedule]\nlatency_bound = "2s"\nstrategies = ["rra"]\n'
    )
    reported = requested(cli, path)
    assert reported["quantile_tokens"] == 12
    assert (
        "outputs 6 tokens" in reported["metadata"]["lengths"] or "outputs 7 tokens" in reported["metadata"]["lengths"]
    )


def test_a_rate_above_the_throughput_and_the_planning_time_are_reported(cli, short):
    fast = ("--strategy", "RRA", "--set", "run.model_draws=0", "--set", "workload.request_rate=100000")
    finished = cli("schedule", short, *fast)
    assert finished.code == 0, finished.err
    assert "The workload sends 100000 requests/s, the schedule serves" in finished.out
    assert "replicas of it are needed, or the queue grows." in finished.out
    assert "Planned in" in finished.out
    assert "the search took" in finished.out
