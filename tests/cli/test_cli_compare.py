"""``lengthwise compare`` as a user meets it."""

from __future__ import annotations

import gzip
import json

import pytest


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """Files of records of two schedulers on the same requests."""
    from lengthwise.cli import main

    folder = tmp_path_factory.mktemp("records")
    scenario = folder / "two.toml"
    scenario.write_text(
        """
[workload]
isl = { kind = "uniform", low = 20, high = 200 }
osl = 20
num_requests = 120
request_rate = 20
[deployment]
model = "llama-3-8b"
gpu = "H100"
[run]
model_draws = 0
[[variants]]
name = "one"
[[variants]]
name = "two"
scheduler.policy = "orca"
engine.max_num_seqs = 2
"""
    )
    assert main(["simulate", str(scenario), "--records", str(folder / "r.parquet"), "--quiet"]) == 0
    return folder / "r-one.parquet", folder / "r-two.parquet"


def test_a_file_against_itself_has_no_error(cli, records) -> None:
    finished = cli("compare", records[0], records[0], "--fail-above", "jct.p95=0", "--fail-above", "ttft.p50=0%")
    assert finished.code == 0
    assert "No warnings." in finished.out
    assert "+0.0 %" in finished.out
    assert finished.err == ""


def test_everything_is_written_and_reported(cli, records, tmp_path) -> None:
    finished = cli("compare", *records, "--slo", "ttft=200ms", "--json", tmp_path / "c.json",
                "--report", tmp_path / "c.html")  # fmt: skip
    assert finished.code == 0
    reported = json.loads((tmp_path / "c.json").read_text())
    assert reported["slo"] == {"ttft_s": 0.2}
    assert reported["errors"]["ttft.mean"]["error"] < 0
    assert (tmp_path / "c.html").stat().st_size > 100_000
    assert "wrote" in finished.err
    printed = cli("compare", *records, "--json", "-")
    assert json.loads(printed.out)["errors"]["ttft.mean"] == reported["errors"]["ttft.mean"]


def test_an_error_above_its_bound_ends_with_one(cli, records) -> None:
    finished = cli("compare", *records, "--fail-above", "ttft.p95=0.05", "--fail-above", "ttft.mean=99", "--quiet")
    assert finished.code == 1
    assert finished.out == ""
    assert finished.err.startswith("above its bound: ttft.p95 is -")
    assert "ttft.mean" not in finished.err


def test_an_error_that_may_be_within_its_bound_by_chance_does_not_fail(cli, records) -> None:
    reported = json.loads(cli("compare", *records, "--json", "-").out)["errors"]["tpot.mean"]
    low, high = reported["low"], reported["high"]
    near, far = sorted(map(abs, (low, high)))
    assert near < abs(reported["error"]) < far
    between = (near + abs(reported["error"])) / 2
    assert cli("compare", *records, "--fail-above", f"tpot.mean={between}").code == 0
    assert cli("compare", *records, "--fail-above", f"tpot.mean={0.99 * near}").code == 1


def test_an_error_without_an_interval_counts_as_it_stands(cli, records) -> None:
    error = json.loads(cli("compare", *records, "--json", "-", "--warmup", 5.5).out)["errors"]["jct.p50"]
    assert error["low"] is None
    bound = abs(error["error"])
    few = ("compare", *records, "--warmup", 5.5, "--quiet", "--fail-above")
    assert cli(*few, f"jct.p50={1.01 * bound}").code == 0
    assert cli(*few, f"jct.p50={0.99 * bound}").code == 1


def test_runs_are_called_by_their_files_and_the_time_between_tokens_has_intervals(cli, records) -> None:
    reported = json.loads(cli("compare", *records, "--json", "-").out)
    assert (reported["a"]["name"], reported["b"]["name"]) == ("r-one.parquet", "r-two.parquet")
    assert "Their deployments differ: max_num_seqs 256 and 2." in reported["warnings"]
    for stat in ("mean", "p95"):
        tbt = reported["errors"][f"tbt.{stat}"]
        assert tbt["low"] <= tbt["error"] <= tbt["high"]


def test_pairs_and_warm_up_are_options(cli, records) -> None:
    reported = json.loads(cli("compare", *records, "--unpaired", "--warmup", 2, "--json", "-").out)
    assert reported["paired"] is False
    assert reported["warmup_s"] == 2
    assert reported["a"]["counts"]["arrivals"] < 120


def test_a_long_limit_without_unit_gets_a_note(cli, records) -> None:
    note = '--slo ttft = 500 is 500 s; write "500ms" if you mean milliseconds\n'
    assert cli("compare", *records, "--slo", "ttft=500").err == note
    assert cli("compare", *records, "--slo", "ttft=500", "--quiet").err == ""
    assert cli("compare", *records, "--slo", "ttft=500s").err == ""


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--fail-above", "jct.p96=0.1"], "there is no number in this comparison named 'jct.p96'. Did you mean"),
        (["--fail-above", "jct.p95"], "--fail-above must be like ttft.p95=0.10; it is 'jct.p95'"),
        (["--slo", "tbt=2s"], "--slo must be like ttft=2s, tpot=100ms or jct=1min; it is 'tbt=2s'"),
        (["--slo", "ttft=fast"], "--slo must be like"),
        (["--slo", "ttft=-1s"], "--slo must have a time above 0; it is 'ttft=-1s'"),
        (["--warmup", "1000"], "the warm-up must leave requests to count"),
    ],
)
def test_invalid_options_are_reported_in_one_line(cli, records, more, message) -> None:
    finished = cli("compare", *records, *more)
    assert finished.code == 2
    assert message in finished.err
    assert finished.out == ""


def test_files_without_records_are_reported(cli, records, tmp_path) -> None:
    missing = cli("compare", records[0], tmp_path / "no.parquet")
    assert (missing.code, missing.out) == (2, "")
    assert "no.parquet" in missing.err
    (tmp_path / "bad.parquet").write_text("nothing")
    assert cli("compare", tmp_path / "bad.parquet", records[0]).code == 2
    over = cli("compare", *records, "--json", records[1])
    assert over.code == 2
    assert "choose another name" in over.err


def test_results_of_other_programs_are_read_as_they_are(cli, records, tmp_path) -> None:
    n = 60
    body = {
        "backend": "vllm", "model_id": "m", "num_prompts": n, "request_rate": 10.0, "max_concurrency": None,
        "duration": 10.0, "completed": n, "total_input_tokens": 50 * n,
        "request_throughput": 6.0, "input_lens": [50] * n, "output_lens": [3] * n,
        "ttfts": [0.1 + 0.001 * i for i in range(n)], "itls": [[0.02, 0.02]] * n,
        "start_times": [0.1 * i for i in range(n)], "errors": [""] * n, "generated_texts": [""] * n,
    }  # fmt: skip
    plain, packed = tmp_path / "vllm.json", tmp_path / "vllm.json.gz"
    plain.write_text(json.dumps(body))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for file in (plain, packed):
        finished = cli("compare", records[0], file, "--json", "-")
        assert finished.code == 0
        assert "when they were sent" in " ".join(json.loads(finished.out)["warnings"])
    plain.write_text('{"foreign": 1}')
    finished = cli("compare", records[0], plain)
    assert finished.code == 2
    assert "must be of a known format" in finished.err
    assert "cut off, damaged" not in finished.err
