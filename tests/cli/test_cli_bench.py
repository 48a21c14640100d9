"""``lengthwise bench`` against a server on loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "measure"))

from scripted_server import Script, ScriptedServer

from lengthwise import Status, catalog, config, measure
from lengthwise.schema.records import shape_facts
from lengthwise.usecases import variants


@pytest.fixture
def server():
    with ScriptedServer(Script(first_s=0.01, gap_s=0.002)) as running:
        yield running


LOAD = ("--isl", 40, "--osl", 8, "--num-requests", 30)


def test_the_table_of_simulate_is_printed_with_the_engine_and_the_client(cli, server):
    finished = cli("bench", server.url, *LOAD, "--request-rate", 60, "--slo", "ttft=5s")
    assert finished.code == 0, finished.err
    for words in (
        "TTFT p50",
        "JCT p99",
        "Goodput",
        "vllm 1.2.3, model toy",
        "ignore_eos",
        "client: requests were sent",
    ):
        assert words in finished.out
    assert "Nothing is known" not in finished.out


def test_records_report_and_json_agree(cli, server, tmp_path):
    records, page, out = tmp_path / "r.parquet", tmp_path / "r.html", tmp_path / "r.json"
    finished = cli(
        "bench", server.url, *LOAD, "--concurrency", 4, "--seed", 5, "--scrape",
        "--records", records, "--report", page, "--json", out,
    )  # fmt: skip
    assert finished.code == 0, finished.err
    run = measure.read_records(records)
    assert not run.is_simulated
    assert run.workload.concurrency == 4
    assert run.metadata["arguments"]["seed"] == 5
    assert "metrics" in run.metadata
    result = json.loads(out.read_text("utf-8"))["results"][0]
    assert result["deployment"] is None
    assert result["engine"]["Engine"] == "vllm 1.2.3"
    assert result["summary"]["counts"]["finished"] == 30
    assert result["notes"] == list(run.warnings)
    text = page.read_text("utf-8")
    assert "toy on vllm 1.2.3" in text
    assert "KV blocks" not in text
    assert "time-kv" not in text


def test_a_scenario_gives_workload_and_limits_and_the_requests_of_simulate(cli, server, scenario_file, tmp_path):
    finished = cli(
        "bench", server.url, scenario_file, "--set", "workload.request_rate=100", "--records", tmp_path / "r.parquet"
    )
    assert finished.code == 0, finished.err
    assert "Within SLO" in finished.out
    run = measure.read_records(tmp_path / "r.parquet")
    same = variants.build(config.load(scenario_file, ["workload.request_rate=100"]))[0].workload(0)
    assert (run.workload.prompt_tokens == same.prompt_tokens).all()
    assert (run.workload.arrival_s == same.arrival_s).all()


@pytest.mark.slow
def test_prompts_are_new_each_run_unless_the_salt_of_one_is_given(cli, server, tmp_path):
    def sent(name, *words):
        path = tmp_path / f"{name}.parquet"
        finished = cli("bench", server.url, *LOAD, "--concurrency", 1, *words, "--records", path)
        assert finished.code == 0, finished.err
        salt = measure.read_records(path).metadata["arguments"]["salt"]
        return salt, [tuple(one.body["prompt"]) for one in server.log[-30:]]

    salt, first = sent("first")
    _, second = sent("second")
    assert not set(first) & set(second)
    assert sent("third", "--salt", salt) == (salt, first)


def test_a_trace_and_a_preset_are_distinguished(cli, server, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,2\n0.1,6,3\n", "utf-8")
    records = tmp_path / "r.parquet"
    assert cli("bench", server.url, "--workload", trace, "--records", records).code == 0
    assert measure.read_records(records).workload.prompt_tokens.tolist() == [5, 6]
    finished = cli("bench", server.url, "--workload", "chat-1n", "--request-rate", 5)
    assert finished.code == 2
    assert "chat-1m" in finished.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["http://127.0.0.1:1", *LOAD, "--concurrency", 1], "no server listens at http://127.0.0.1:1; is it up?"),
        (
            ["http://127.0.0.1:1", *LOAD, "--concurrency", 1, "--time-limit", 0],
            "--time-limit must be above 0 seconds; it is 0",
        ),
        (
            ["http://127.0.0.1:1", *LOAD, "--concurrency", 1, "--variant", "one"],
            "variant 'one' must be one of a scenario's",
        ),
        (["localhost:8000", *LOAD, "--concurrency", 1], "must begin with http"),
        (["http://127.0.0.1:1", "--isl", 5], "workload"),
        (["http://127.0.0.1:1", *LOAD], "--request-rate"),
        (["http://127.0.0.1:1", *LOAD, "--concurrency", 1, "--request-rate", 1], "excludes --concurrency"),
        (["http://127.0.0.1:1", *LOAD, "--concurrency", 1, "--slo", "ttff=1s"], "ttft"),
        (["http://127.0.0.1:1", "none.toml"], "none.toml"),
        (["http://127.0.0.1:1", *LOAD, "--concurrency", 1, "--records", "no/where.parquet"], "does not exist"),
    ],
)
def test_bad_input_ends_in_two_and_one_message(cli, arguments, words):
    finished = cli("bench", *arguments)
    assert finished.code == 2
    assert words in finished.err
    assert "Traceback" not in finished.err


@pytest.mark.parametrize(
    ("more", "todo"),
    [
        ((), "check the server's stream, which contains no token, and its log"),
        (("--no-exact",), "request exact lengths (without --no-exact)"),
    ],
)
def test_answers_without_tokens_suggest_exact_lengths_only_where_not_yet_requested(cli, more, todo):
    with ScriptedServer(Script(faults=dict.fromkeys(range(7, 100), "no choices"))) as server:
        finished = cli("bench", server.url, *LOAD, "--concurrency", 2, "--warmup", 0, *more)
    assert finished.code == 2
    assert re.search(r"no request finished: empty answer: \d+\. To do: " + re.escape(todo), finished.err)


def test_a_run_in_which_nothing_finished_is_an_error_with_its_reason(cli, tmp_path):
    with ScriptedServer(Script(faults=dict.fromkeys(range(7, 100), "http 503"))) as server:
        finished = cli(
            "bench", server.url, *LOAD, "--concurrency", 2, "--warmup", 0, "--records", tmp_path / "r.parquet"
        )
    assert finished.code == 2
    retained = measure.read_records(tmp_path / "r.parquet")
    failed = retained.errors["http 503"]
    assert failed >= 10
    assert re.search(rf"^http 503 +{failed} +as scripted *$", finished.out, re.MULTILINE)
    assert re.search(rf"cut off at the end of the run, or never due +{30 - failed}", finished.out)
    assert f'no request finished: http 503: {failed} ("as scripted"). To do: lower the load' in finished.err
    assert f"The results so far are in {tmp_path / 'r.parquet'}, marked as partial" in finished.err
    assert any("a partial run" in warning for warning in retained.warnings)


def test_a_server_that_dies_has_its_own_exit_code_and_partial_records_remain(cli, tmp_path):
    records = tmp_path / "r.parquet"
    with ScriptedServer(Script(faults={14: "dies"})) as server:
        finished = cli(
            "bench", server.url, *LOAD, "--concurrency", 2, "--warmup", 0, "--records", records
        )  # fmt: skip
    assert finished.code == 3, finished.err
    assert f"since the server failed; {records} is marked as partial" in finished.err
    assert any("a partial run" in warning for warning in measure.read_records(records).warnings)


def test_a_server_that_dies_near_the_end_ends_it_so_too(cli, tmp_path):
    """Too few requests are left for the run to be given up; they were refused all the same."""
    records = tmp_path / "r.parquet"
    with ScriptedServer(Script(faults={31: "dies"})) as server:
        finished = cli("bench", server.url, *LOAD, "--concurrency", 2, "--warmup", 0, "--records", records)
    assert finished.code == 3, finished.err
    assert f"the last requests were refused; {records} has their failures" in finished.err
    retained = measure.read_records(records)
    assert 0 < retained.errors["refused"] < 10
    assert (retained.records.requests.status == Status.FINISHED).sum() > 15


def test_a_request_that_fails_alone_does_not_end_a_run_so(cli):
    with ScriptedServer(Script(faults={20: "http 503"})) as server:
        finished = cli("bench", server.url, *LOAD, "--concurrency", 2, "--warmup", 0)
    assert finished.code == 0, finished.err


def test_a_requested_time_limit_is_no_failure(cli):
    with ScriptedServer(Script(first_s=0.01)) as server:
        finished = cli("bench", server.url, *LOAD, "--request-rate", 4, "--warmup", 0, "--time-limit", 2)
    assert finished.code == 0, finished.err


def test_a_load_without_a_rate_is_reported_with_its_options(cli):
    finished = cli("bench", "http://localhost:1", *LOAD)
    assert finished.code == 2
    assert "give --request-rate (open loop), --concurrency (closed loop), or a SCENARIO" in finished.err


def test_a_message_of_the_server_is_shown_once_with_its_count(cli, tmp_path, monkeypatch):
    """Messages that differ in numbers alone are one; a long one by its first 200 characters."""
    monkeypatch.setenv("COLUMNS", "300")
    with ScriptedServer(Script(faults={19: "http 400", 22: "http 400", 24: "http 500"})) as server:
        server.states = lambda number: f"request req-{number} has too many tokens: " + "x" * 300
        finished = cli("bench", server.url, *LOAD, "--concurrency", 1, "--warmup", 0, "--json", tmp_path / "r.json")
    assert finished.code == 0, finished.err
    (line,) = [line for line in finished.out.splitlines() if line.startswith("http 400")]
    count, _, words = line.removeprefix("http 400").strip().partition(" ")
    assert count == "2"
    assert words.strip().startswith("request req-19 has too many tokens: xxx")
    assert len(words.strip()) == 200
    reported = json.loads((tmp_path / "r.json").read_text("utf-8"))["results"][0]["engine"]["Failures"]
    assert reported.startswith('http 400: 2 ("request req-19')


def test_existing_records_are_not_replaced_unless_forced(cli, server, tmp_path):
    records = tmp_path / "r.parquet"
    records.write_text("hours of measurement")
    words = ("bench", server.url, *LOAD, "--concurrency", 4, "--records", records, "--quiet")
    finished = cli(*words)
    assert finished.code == 2
    assert "give --force to replace it" in finished.err
    assert records.read_text() == "hours of measurement"
    assert server.log == []
    assert cli(*words, "--force").code == 0
    assert len(measure.read_records(records).workload) == 30


def test_records_keep_the_deployment_that_the_scenario_describes(cli, server, scenario_file, tmp_path):
    fast = ("--set", "workload.request_rate=100", "--set", "deployment.tp=2", "--quiet")
    finished = cli("bench", server.url, scenario_file, *fast, "--records", tmp_path / "r.parquet")
    assert finished.code == 0, finished.err
    retained = measure.read_records(tmp_path / "r.parquet").metadata
    assert retained["model"] == "toy"
    reported = retained["deployment"]
    assert (reported["model"], reported["tp"], reported["replicas"], reported["max_num_seqs"]) == (
        "llama-3-8b",
        2,
        1,
        256,
    )
    assert reported["model_shape"] == shape_facts(catalog.model("llama-3-8b"))
    assert reported["gpu"] == catalog.gpu("H100").name
    assert "policy" not in reported  # variants differ in it
    one = ("--variant", "Two, too", "--records", tmp_path / "two.parquet")
    assert cli("bench", server.url, scenario_file, *fast, *one).code == 0
    assert measure.read_records(tmp_path / "two.parquet").metadata["deployment"]["policy"] == "orca"


def test_an_unknown_model_is_reported_and_the_run_continues(cli, server, scenario_file, tmp_path):
    finished = cli(
        "bench", server.url, scenario_file, "--set", "workload.request_rate=100", "--set",
        "deployment.model=nobodys", "--records", tmp_path / "r.parquet",
    )  # fmt: skip
    assert finished.code == 0, finished.err
    assert "records will not contain the scenario's deployment" in finished.err
    assert "deployment" not in measure.read_records(tmp_path / "r.parquet").metadata


def test_the_key_goes_to_the_server_and_into_no_file(cli, server, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    records, out = tmp_path / "r.parquet", tmp_path / "r.json"
    cli("bench", server.url, *LOAD, "--concurrency", 4, "--records", records, "--json", out)
    assert server.log[-1].headers["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in out.read_text("utf-8") + repr(measure.read_records(records).metadata)


@pytest.mark.slow
def test_ctrl_c_writes_partial_records_and_exits_with_130(server, tmp_path):
    records = tmp_path / "r.parquet"
    command = [sys.executable, "-m", "lengthwise.cli", "bench", server.url, "--isl", "9", "--osl", "2"]
    command += ["--request-rate", "20", "--num-requests", "5000", "--records", str(records)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while len(server.log) < 40:
            assert process.poll() is None, process.stderr.read()
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert any("an interruption" in warning for warning in measure.read_records(records).warnings)


def test_a_measured_run_and_its_simulation_are_of_one_model_and_client_seconds_are_reported(
    cli, server, scenario_file, tmp_path
):
    """The server calls the model "toy"; the scenario states which model it is."""
    one = ("--set", "variants=null", "--set", "workload.request_rate=100")
    ran, simulated = tmp_path / "run.parquet", tmp_path / "simulated.parquet"
    assert cli("bench", server.url, scenario_file, *one, "--records", ran, "--quiet").code == 0
    assert cli("simulate", scenario_file, *one, "--records", simulated, "--quiet").code == 0
    finished = cli("compare", simulated, ran, "--json", "-")
    reported = json.loads(finished.out)
    assert not [warning for warning in reported["warnings"] if "model" in warning or "deployments" in warning]
    assert (reported["a"]["name"], reported["b"]["name"]) == ("simulated.parquet", "run.parquet")
    assert reported["a"]["client"] is None
    assert 0 <= reported["b"]["client"]["p50_s"] <= reported["b"]["client"]["max_s"]
    assert reported["errors"]["tbt.p95"]["b"] >= 0  # no interval where the server's tokens come at once
    assert reported["errors"]["requests_per_s"]["low"] is not None
