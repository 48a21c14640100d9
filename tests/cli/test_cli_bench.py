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
    ended = cli("bench", server.url, *LOAD, "--request-rate", 60, "--slo", "ttft=5s")
    assert ended.code == 0, ended.err
    for words in (
        "TTFT p50",
        "JCT p99",
        "Goodput",
        "vllm 1.2.3, model toy",
        "ignore_eos",
        "client: requests were sent",
    ):
        assert words in ended.out
    assert "Nothing is known" not in ended.out


def test_records_report_and_json_say_the_same(cli, server, tmp_path):
    records, page, out = tmp_path / "r.parquet", tmp_path / "r.html", tmp_path / "r.json"
    ended = cli(
        "bench", server.url, *LOAD, "--concurrency", 4, "--seed", 5, "--scrape",
        "--records", records, "--report", page, "--json", out,
    )  # fmt: skip
    assert ended.code == 0, ended.err
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
    ended = cli(
        "bench", server.url, scenario_file, "--set", "workload.request_rate=100", "--records", tmp_path / "r.parquet"
    )
    assert ended.code == 0, ended.err
    assert "Within SLO" in ended.out
    run = measure.read_records(tmp_path / "r.parquet")
    same = variants.build(config.load(scenario_file, ["workload.request_rate=100"]))[0].workload(0)
    assert (run.workload.prompt_tokens == same.prompt_tokens).all()
    assert (run.workload.arrival_s == same.arrival_s).all()


@pytest.mark.slow
def test_prompts_are_new_each_run_unless_the_salt_of_one_is_given(cli, server, tmp_path):
    def sent(name, *words):
        path = tmp_path / f"{name}.parquet"
        ended = cli("bench", server.url, *LOAD, "--concurrency", 1, *words, "--records", path)
        assert ended.code == 0, ended.err
        salt = measure.read_records(path).metadata["arguments"]["salt"]
        return salt, [tuple(one.body["prompt"]) for one in server.log[-30:]]

    salt, first = sent("first")
    _, second = sent("second")
    assert not set(first) & set(second)
    assert sent("third", "--salt", salt) == (salt, first)


def test_a_trace_and_a_preset_are_told_apart(cli, server, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,2\n0.1,6,3\n", "utf-8")
    records = tmp_path / "r.parquet"
    assert cli("bench", server.url, "--workload", trace, "--records", records).code == 0
    assert measure.read_records(records).workload.prompt_tokens.tolist() == [5, 6]
    ended = cli("bench", server.url, "--workload", "chat-1n", "--request-rate", 5)
    assert ended.code == 2
    assert "chat-1m" in ended.err


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
    ended = cli("bench", *arguments)
    assert ended.code == 2
    assert words in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("more", "todo"),
    [
        ((), "check the server's stream, which contains no token, and its log"),
        (("--no-exact",), "request exact lengths (without --no-exact)"),
    ],
)
def test_answers_without_a_token_ask_for_exact_lengths_only_where_they_were_not(cli, more, todo):
    with ScriptedServer(Script(faults=dict.fromkeys(range(7, 100), "no choices"))) as server:
        ended = cli("bench", server.url, *LOAD, "--concurrency", 2, "--warmup", 0, *more)
    assert ended.code == 2
    assert re.search(r"no request finished: empty answer: \d+\. To do: " + re.escape(todo), ended.err)


def test_a_run_in_which_nothing_finished_is_an_error_with_its_reason(cli, tmp_path):
    with ScriptedServer(Script(faults=dict.fromkeys(range(7, 100), "http 503"))) as server:
        ended = cli("bench", server.url, *LOAD, "--concurrency", 2, "--warmup", 0, "--records", tmp_path / "r.parquet")
    assert ended.code == 2
    kept = measure.read_records(tmp_path / "r.parquet")
    failed = kept.errors["http 503"]
    assert failed >= 10
    assert re.search(rf"^http 503 +{failed} +as scripted *$", ended.out, re.MULTILINE)
    assert re.search(rf"cut off at the end of the run, or never due +{30 - failed}", ended.out)
    assert f'no request finished: http 503: {failed} ("as scripted"). To do: lower the load' in ended.err
    assert f"The results so far are in {tmp_path / 'r.parquet'}, marked as partial" in ended.err
    assert any("a partial run" in doubt for doubt in kept.warnings)


def test_a_server_that_dies_has_an_exit_code_of_its_own_and_leaves_what_there_is(cli, tmp_path):
    records = tmp_path / "r.parquet"
    with ScriptedServer(Script(faults={14: "dies"})) as server:
        ended = cli(
            "bench", server.url, *LOAD, "--concurrency", 2, "--warmup", 0, "--records", records
        )  # fmt: skip
    assert ended.code == 3, ended.err
    assert f"since the server failed; {records} is marked as partial" in ended.err
    assert any("a partial run" in doubt for doubt in measure.read_records(records).warnings)


def test_a_server_that_dies_near_the_end_ends_it_so_too(cli, tmp_path):
    """Too few requests are left for the run to be given up; they were refused all the same."""
    records = tmp_path / "r.parquet"
    with ScriptedServer(Script(faults={31: "dies"})) as server:
        ended = cli("bench", server.url, *LOAD, "--concurrency", 2, "--warmup", 0, "--records", records)
    assert ended.code == 3, ended.err
    assert f"the last requests were refused; {records} has their failures" in ended.err
    kept = measure.read_records(records)
    assert 0 < kept.errors["refused"] < 10
    assert (kept.records.requests.status == Status.FINISHED).sum() > 15


def test_a_request_that_fails_alone_does_not_end_a_run_so(cli):
    with ScriptedServer(Script(faults={20: "http 503"})) as server:
        ended = cli("bench", server.url, *LOAD, "--concurrency", 2, "--warmup", 0)
    assert ended.code == 0, ended.err


def test_a_time_limit_that_was_asked_for_is_no_failure(cli):
    with ScriptedServer(Script(first_s=0.01)) as server:
        ended = cli("bench", server.url, *LOAD, "--request-rate", 4, "--warmup", 0, "--time-limit", 2)
    assert ended.code == 0, ended.err


def test_a_load_without_a_rate_is_told_by_its_options(cli):
    ended = cli("bench", "http://localhost:1", *LOAD)
    assert ended.code == 2
    assert "give --request-rate (open loop), --concurrency (closed loop), or a SCENARIO" in ended.err


def test_what_the_server_says_is_shown_once_with_how_often(cli, tmp_path):
    """Messages that differ in numbers alone are one; a long one by its first 200 characters."""
    with ScriptedServer(Script(faults={19: "http 400", 22: "http 400", 24: "http 500"})) as server:
        server.says = lambda number: f"request req-{number} has too many tokens: " + "x" * 300
        ended = cli("bench", server.url, *LOAD, "--concurrency", 1, "--warmup", 0, "--json", tmp_path / "r.json")
    assert ended.code == 0, ended.err
    (line,) = [line for line in ended.out.splitlines() if line.startswith("http 400")]
    count, _, words = line.removeprefix("http 400").strip().partition(" ")
    assert count == "2"
    assert words.strip().startswith("request req-19 has too many tokens: xxx")
    assert len(words.strip()) == 200
    told = json.loads((tmp_path / "r.json").read_text("utf-8"))["results"][0]["engine"]["Failures"]
    assert told.startswith('http 400: 2 ("request req-19')


def test_records_that_are_there_are_not_replaced_unasked(cli, server, tmp_path):
    records = tmp_path / "r.parquet"
    records.write_text("hours of measurement")
    words = ("bench", server.url, *LOAD, "--concurrency", 4, "--records", records, "--quiet")
    ended = cli(*words)
    assert ended.code == 2
    assert "give --force to replace it" in ended.err
    assert records.read_text() == "hours of measurement"
    assert server.log == []
    assert cli(*words, "--force").code == 0
    assert len(measure.read_records(records).workload) == 30


def test_records_keep_the_deployment_that_the_scenario_describes(cli, server, scenario_file, tmp_path):
    fast = ("--set", "workload.request_rate=100", "--set", "deployment.tp=2", "--quiet")
    ended = cli("bench", server.url, scenario_file, *fast, "--records", tmp_path / "r.parquet")
    assert ended.code == 0, ended.err
    kept = measure.read_records(tmp_path / "r.parquet").metadata
    assert kept["model"] == "toy"
    told = kept["deployment"]
    assert (told["model"], told["tp"], told["replicas"], told["max_num_seqs"]) == ("llama-3-8b", 2, 1, 256)
    assert told["model_shape"] == shape_facts(catalog.model("llama-3-8b"))
    assert told["gpu"] == catalog.gpu("H100").name
    assert "policy" not in told  # variants differ in it
    one = ("--variant", "Two, too", "--records", tmp_path / "two.parquet")
    assert cli("bench", server.url, scenario_file, *fast, *one).code == 0
    assert measure.read_records(tmp_path / "two.parquet").metadata["deployment"]["policy"] == "orca"


def test_a_model_that_nobody_knows_is_told_and_the_run_goes_on(cli, server, scenario_file, tmp_path):
    ended = cli(
        "bench", server.url, scenario_file, "--set", "workload.request_rate=100", "--set",
        "deployment.model=nobodys", "--records", tmp_path / "r.parquet",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert "records will not contain the scenario's deployment" in ended.err
    assert "deployment" not in measure.read_records(tmp_path / "r.parquet").metadata


def test_the_key_goes_to_the_server_and_into_no_file(cli, server, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    records, out = tmp_path / "r.parquet", tmp_path / "r.json"
    cli("bench", server.url, *LOAD, "--concurrency", 4, "--records", records, "--json", out)
    assert server.log[-1].headers["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in out.read_text("utf-8") + repr(measure.read_records(records).metadata)


@pytest.mark.slow
def test_ctrl_c_writes_what_there_is_and_ends_in_130(server, tmp_path):
    records = tmp_path / "r.parquet"
    command = [sys.executable, "-m", "lengthwise.cli", "bench", server.url, "--isl", "9", "--osl", "2"]
    command += ["--request-rate", "20", "--num-requests", "5000", "--records", str(records)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while len(server.log) < 40:
            assert process.poll() is None, process.stderr.read()
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert any("an interruption" in doubt for doubt in measure.read_records(records).warnings)


def test_a_measured_run_and_its_simulation_are_of_one_model_and_the_clients_seconds_are_told(
    cli, server, scenario_file, tmp_path
):
    """The server calls the model "toy"; the scenario says what it is."""
    one = ("--set", "variants=null", "--set", "workload.request_rate=100")
    ran, simulated = tmp_path / "run.parquet", tmp_path / "simulated.parquet"
    assert cli("bench", server.url, scenario_file, *one, "--records", ran, "--quiet").code == 0
    assert cli("simulate", scenario_file, *one, "--records", simulated, "--quiet").code == 0
    ended = cli("compare", simulated, ran, "--json", "-")
    told = json.loads(ended.out)
    assert not [doubt for doubt in told["warnings"] if "model" in doubt or "deployments" in doubt]
    assert (told["a"]["name"], told["b"]["name"]) == ("simulated.parquet", "run.parquet")
    assert told["a"]["client"] is None
    assert 0 <= told["b"]["client"]["p50_s"] <= told["b"]["client"]["max_s"]
    assert told["errors"]["tbt.p95"]["low"] is not None
