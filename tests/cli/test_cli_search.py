"""lengthwise capacity and lengthwise search as a user sees them."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from lengthwise.cli import progress

SCENARIO = """
name = "small"
description = "Which GPU?"
[workload]
isl = { kind = "uniform", low = 20, high = 200 }
osl = 20
request_rate = 1
[deployment]
model = "llama-3-8b"
[engine]
max_model_len = 1024
[search]
max_gpus = 2
seeds = 3
precision = 0.1
top = 2
sensitivity = false
[search.limits]
ttft.p90 = "500ms"
[search.space]
gpu = ["H100", "L40S"]
max_num_seqs = [4, 32]
"""


QUICK = ("--set", "search.precision=0.3", "--set", "search.seeds=1", "--set", "run.model_draws=0")


@pytest.fixture
def question(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO)
    return path


def test_capacity_prints_a_rate_and_its_interval(cli, question, tmp_path):
    out = tmp_path / "out.json"
    finished = cli("capacity", question, "--json", out)
    assert finished.code == 0, finished.err
    assert "TTFT p90 ≤ 500 ms" in finished.out
    reported = json.loads(out.read_text())["capacities"][0]
    assert reported["requests_per_s"]["half_width"] < 0.1 * reported["requests_per_s"]["value"]
    assert f"{reported['requests_per_s']['value']:.4g}" in finished.out
    assert (
        reported["requests_per_s"]["model_low"]
        < reported["requests_per_s"]["value"]
        < reported["requests_per_s"]["model_high"]
    )
    assert reported["at"]["metrics"]["ttft.p90"]["model_high"] != reported["at"]["metrics"]["ttft.p90"]["value"]
    assert "(model)" in finished.out
    at = reported["at"]["requests_per_s"]
    assert "simulated/s" in finished.out
    assert f"{at:.4g}" in finished.out
    assert at <= reported["requests_per_s"]["value"] - 0.999 * reported["requests_per_s"]["half_width"]
    assert ("TTFT p90" if reported["binds"] == "ttft.p90" else "queue growth") in finished.out.splitlines()[1]
    assert "90 % interval of the cost model's error" in finished.out
    off = json.loads(cli("capacity", question, "--json", "-", "--set", "run.model_draws=0").out)["capacities"][0]
    assert "model_low" not in off["requests_per_s"]


def test_capacity_of_one_variant(cli, question, tmp_path):
    path = tmp_path / "two.toml"
    names = "".join(f'[[variants]]\nname = "{name}"\nengine.max_num_seqs = {n}\n' for name, n in (("a", 8), ("b", 9)))
    path.write_text(f"{question.read_text()}\n{names}")
    (found,) = json.loads(cli("capacity", path, "--variant", "b", "--json", "-").out)["capacities"]
    assert found["name"] == "b"
    refused = cli("capacity", path, "--variant", "c")
    assert refused.code == 2
    assert "has no variant 'c'; it has a, b" in refused.err.replace("\n", " ")


def test_capacity_takes_limits_on_the_command_line(cli, question):
    loose = cli("capacity", question, "--json", "-", "--limit", "ttft.p90=5s")
    tight = cli("capacity", question, "--json", "-", "--limit", "ttft.p90=100ms")
    rates = [json.loads(e.out)["capacities"][0]["requests_per_s"]["value"] for e in (loose, tight)]
    assert rates[0] > rates[1] > 0
    impossible = cli("capacity", question, "--limit", "ttft.p90=1us")
    assert "No rate meets the limits: TTFT p90 is at least" in impossible.out


def test_search_prints_the_winner_and_writes_the_requested_files(cli, question, tmp_path):
    page, reported, folder = tmp_path / "plan.html", tmp_path / "plan.json", tmp_path / "launch"
    finished = cli("search", question, "--report", page, "--json", reported, "--deploy", folder, "--deploy-top", 2)
    assert finished.code == 0, finished.err
    plan = json.loads(reported.read_text())["plans"][0]
    names = {choice["key"]: choice["name"] for choice in plan["choices"]}
    assert f"Best: {names[plan['best']]}" in finished.out
    assert 100_000 < page.stat().st_size < 1_500_000
    launches = sorted(path.name for path in folder.iterdir())
    assert len(launches) == 2
    assert {"vllm.sh", "sglang.sh", "kubernetes.yaml", "load-test.sh", "scenario.toml", "README.md"} <= {
        path.name for path in (folder / launches[0]).iterdir()
    }
    assert cli("simulate", folder / launches[0] / "scenario.toml", "--seeds", 1).code == 0


def test_a_winner_that_speculates_has_the_script_of_vllm(cli, question, tmp_path):
    drafter = "deployment.speculation={ method = 'ngram', num_speculative_tokens = 2, acceptance = 0.9 }"
    words = ("--set", drafter, "--set", "search.space.gpu=['H100']", "--set", "search.space.max_num_seqs=[32]")
    finished = cli("search", question, *QUICK, *words, "--deploy", tmp_path / "launch")
    assert finished.code == 0, finished.err
    (made,) = (tmp_path / "launch").iterdir()
    assert "--speculative-config" in (made / "vllm.sh").read_text()
    assert not (made / "sglang.sh").exists()
    assert "SGLang: a launch command of this engine does not model speculative" in (made / "README.md").read_text()


def test_folders_of_an_earlier_search_are_replaced_only_with_force(cli, question, tmp_path):
    folder = tmp_path / "launch"
    both = ("search", question, *QUICK, "--deploy", folder, "--deploy-top", 2)
    assert cli(*both).code == 0
    first = sorted(path.name for path in folder.iterdir())
    assert len(first) == 2
    (folder / "notes.txt").write_text("mine")
    (folder / "2-mine").mkdir()
    (folder / "2-mine" / "README.md").write_text("mine")
    refused = cli(*both)
    assert refused.code == 2
    assert f"launch folders of an earlier search ({', '.join(first)})" in refused.err.replace("\n", " ")
    assert cli("search", question, *QUICK, "--deploy", folder, "--force").code == 0  # only the best
    assert sorted(path.name for path in folder.iterdir()) == sorted([first[0], "2-mine", "notes.txt"])
    measured = folder / first[0] / "measured.json"
    measured.write_text("{}")
    refused = cli("search", question, *QUICK, "--deploy", folder, "--force")
    assert refused.code == 2
    assert "also has measured.json" in refused.err.replace("\n", " ")
    assert measured.exists()
    assert (folder / first[0] / "trace.jsonl").exists()
    assert (folder / "2-mine" / "README.md").read_text() == "mine"


def test_long_work_prints_lines_without_a_terminal_and_short_work_none(monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_S", 10.0)
    monkeypatch.setattr(progress, "LONGEST_LINE_S", 600.0)
    now_s = [0.0]
    advance = progress.lines(lambda: now_s[0])
    for done in range(101):
        now_s[0] = 0.5 * done
        advance("short runs:", done, 100)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"{10 * i} s: short runs: {20 * i} of 100 ({20 * i} %)".replace(" %", "%") for i in range(1, 6)]
    now_s[0] = 36_000.0  # an hour of work gets fewer lines
    advance("exact ranking:", 7, 0)
    now_s[0] += 599.0
    advance("exact ranking:", 8, 0)
    assert capsys.readouterr().err == "36,000 s: exact ranking: 7\n"


def test_a_search_prints_its_steps_in_a_log_and_nothing_if_quiet(cli, question, monkeypatch):
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    monkeypatch.setattr(progress, "LINE_SHARE", 0.0)
    finished = cli("search", question, *QUICK)
    assert re.search(r"^\d+ s: bounds: \d of 4 \(\d+%\)$", finished.err, re.MULTILINE)
    assert "exact ranking: " in finished.err
    simulated = cli("simulate", question)
    assert re.search(r"^\d+ s: simulating (\d+) of \1 \(100%\)$", simulated.err, re.MULTILINE)
    assert cli("search", question, *QUICK, "--quiet").err == ""


def test_nothing_holds_is_an_answer(cli, question, tmp_path):
    finished = cli("search", question, "--set", "search.limits.ttft.p90=0.001", "--deploy", tmp_path / "launch")
    assert finished.code == 0
    assert not (tmp_path / "launch").exists()
    assert "No tried configuration meets the limits" in finished.out
    assert "without other requests; the limit is 1 ms" in finished.out


@pytest.mark.slow
def test_a_second_run_repeats_nothing(cli, question, tmp_path):
    first = cli("search", question, "--resume", tmp_path / "retained", "--json", "-")
    again = cli("search", question, "--resume", tmp_path / "retained", "--json", "-")
    one, two = (json.loads(e.out)["plans"][0] for e in (first, again))
    assert one["effort"]["reused"] == 0
    with sqlite3.connect(tmp_path / "retained" / "evaluations.sqlite") as file:
        assert two["effort"]["reused"] == file.execute("select count(*) from evaluations").fetchone()[0]
    assert {k: v for k, v in one.items() if k != "effort"} == {k: v for k, v in two.items() if k != "effort"}


@pytest.mark.slow
def test_another_question_is_not_answered_from_the_store(cli, question, tmp_path):
    cli("search", question, "--resume", tmp_path / "retained")
    other = cli("search", question, "--resume", tmp_path / "retained", "--json", "-", "--set", "workload.osl=30")
    assert json.loads(other.out)["plans"][0]["effort"]["reused"] == 0


@pytest.mark.slow
def test_killed_and_resumed_it_loses_only_what_was_running(question, tmp_path):
    """kill -9 in the midst of a larger search; the second run answers as one that was never killed."""
    retained = tmp_path / "retained"
    line = [sys.executable, "-m", "lengthwise.cli", "search", str(question), "--json", "-", "--set"]
    line.append("search.space.max_num_batched_tokens=[256,512,1024,2048]")
    with subprocess.Popen(
        [*line, "--resume", str(retained)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as run:
        while _retained(retained) < 20 and run.poll() is None:
            time.sleep(0.02)
        os.kill(run.pid, signal.SIGKILL)
    done = _retained(retained)
    assert done >= 20
    resumed = subprocess.run([*line, "--resume", str(retained)], capture_output=True, check=True)
    complete = subprocess.run(line, capture_output=True, check=True)
    one, two = (json.loads(e.stdout)["plans"][0] for e in (resumed, complete))
    assert one["effort"]["reused"] >= done
    assert {k: v for k, v in one.items() if k != "effort"} == {k: v for k, v in two.items() if k != "effort"}


def _retained(folder):
    file = folder / "evaluations.sqlite"
    if not file.exists():
        return 0
    try:
        with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as connection:
            return connection.execute("select count(*) from evaluations").fetchone()[0]
    except sqlite3.OperationalError:  # not yet made
        return 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--deploy", "small.toml"], "it is a file"),
        (["--report", "nowhere/plan.html"], "does not exist"),
        (["--json", "small.toml"], "also an input"),
        (["--set", "search.objective=cheapest"], "must be"),
        (["--set", "search.objective=fewest_gpus", "--set", "workload.arrivals=all_at_once"], "needs a rate"),
        (["--ray", "127.0.0.1:1"], "no Ray cluster"),
    ],
)
def test_invalid_options_are_reported_before_anything_runs(cli, question, options, words, monkeypatch):
    monkeypatch.chdir(question.parent)
    finished = cli("search", question, *options)
    assert finished.code == 2
    assert words in finished.err
    assert sorted(path.name for path in question.parent.iterdir()) == ["small.toml"]


@pytest.mark.slow
def test_ray_gives_the_same_plan(cli, question):
    """A real cluster on this machine."""
    local = cli("search", question, "--json", "-")
    distributed = cli("search", question, "--json", "-", "--ray", "local", "--jobs", 2)
    assert distributed.code == 0, distributed.err
    one, two = (json.loads(e.out[e.out.index("{") :])["plans"][0] for e in (local, distributed))
    assert {k: v for k, v in one.items() if k != "effort"} == {k: v for k, v in two.items() if k != "effort"}
