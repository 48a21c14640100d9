"""``lengthwise app plan`` and the group that it is in: what is printed and written, and what cannot be planned."""

from __future__ import annotations

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from apps_world import write_app

from lengthwise.apps.plan import METHODS
from lengthwise.cli.app_plan import show
from lengthwise.config.app_file import read_plan
from lengthwise.report.apps_text import AppFacts, duration_text
from lengthwise.schema.estimate import Estimate

QUICK = ("--draws", 1, "--true-draws", 3)


def words(text):
    return " ".join(text.split())


def test_a_plan_reports_stages_makespan_methods_and_what_ifs(cli, tmp_path):
    finished = cli("app", "plan", write_app(tmp_path), *QUICK)
    assert finished.code == 0, finished.err
    assert re.match(r"judged: [\d.]+( ± [\d.]+)? s \([\d.]+.[\d.]+\) on 2 GPUs, \d stages?\n", finished.out)
    assert re.search(r"^ +1 +0 s +[\d.]+ s +writer +\d", finished.out, re.MULTILINE)
    assert {line.split()[0] for line in finished.out.splitlines() if line} >= {"lengthwise", *METHODS}
    message = words(finished.out)
    assert "one more pair of GPUs (with fast links)" in message
    assert "one more GPU" in message
    assert "a disk twice as fast" in message
    assert "GPU time without work:" in message
    assert "e-" not in re.sub(r"[a-z]+e-[a-z]+", "", message), "no power of ten"
    long = [line for line in finished.out.splitlines() if len(line.rstrip()) > 80]
    assert {line.split()[0] for line in long} <= {"note:", "start:", "rehearse:"}


def test_an_assumption_is_noted_once(cli, tmp_path):
    path = write_app(tmp_path)
    finished = cli("app", "plan", path, *QUICK, "--no-what-if", "--set", "models.judge.lengths=12")
    notes = [line for line in finished.out.splitlines() if line.startswith("note: ")]
    assert len(notes) == len(set(notes)) == 1
    assert "switch times are assumed" in notes[0]
    assert finished.err == ""
    text = path.read_text("utf-8").replace('lengths = { kind = "uniform", low = 4, high = 20 }\n', "")
    path.write_text(text, "utf-8")
    finished = cli("app", "plan", path, *QUICK, "--no-what-if")
    assert finished.out.count("lengths of writer, judge are unknown") == 1
    assert finished.out.count("switch times are assumed") == 1
    assert finished.err == ""


@pytest.mark.slow
def test_json_and_report_are_written_and_the_same_again_but_for_the_clock(cli, tmp_path):
    path = write_app(tmp_path)
    finished = cli("app", "plan", path, *QUICK, "--json", tmp_path / "plan.json", "--report", tmp_path / "plan.html")
    assert finished.code == 0
    assert finished.err == f"wrote {tmp_path / 'plan.json'}\nwrote {tmp_path / 'plan.html'}\n"
    start = shlex.split(finished.out.splitlines()[-2].removeprefix("start: lengthwise "))
    assert start == ["app", "run", str(path), "--out", "run", "--plan", str(tmp_path / "plan.json")]
    plan = read_plan(tmp_path / "plan.json")
    assert plan.models == ("writer", "judge")
    assert {one.name for one in plan.what_ifs} == {
        "island_plus_2", "gpus_plus_1", "disk_twice_as_fast"}  # fmt: skip
    page = (tmp_path / "plan.html").read_text("utf-8")
    assert "2 x A100-80GB, fast links between all" in page
    assert "16 tasks at most" in page
    printed = cli("app", "plan", path, *QUICK, "--json", "-")
    reported = json.loads(printed.out)
    assert reported["format"] == "lengthwise application plan 1"
    for key in ("planned", "makespans_s", "stages", "spans", "notes"):
        assert reported[key] == json.loads((tmp_path / "plan.json").read_text("utf-8"))[key], key
    assert cli("app", "plan", path, *QUICK, "-q").out == ""


def test_a_method_and_a_quantile_can_be_requested(cli, tmp_path):
    path = write_app(tmp_path)
    finished = cli("app", "plan", path, *QUICK, "--no-what-if", "--method", "max", "--quantile", 0.9, "--json", "-")
    assert json.loads(finished.out)["method"] == "max"


def test_with_two_kinds_of_gpus_each_model_of_a_stage_names_its_own(cli, tmp_path):
    nodes = ("--node", "1xA100-80GB", "--node", "1xH100")
    page = tmp_path / "plan.html"
    finished = cli("app", "plan", write_app(tmp_path), *QUICK, "--no-what-if", *nodes, "--report", page)
    assert finished.code == 0, finished.err
    plain = cli("app", "plan", write_app(tmp_path), *QUICK, "--no-what-if", "--json", tmp_path / "plan.json")
    rows = [line for line in finished.out.splitlines() if re.search(r" (writer|judge) +\d", line)]
    assert len(rows) >= 2
    assert all(re.search(r" \d (A100-80GB|H100)\b", row) for row in rows), finished.out
    assert "node 1, GPU 0 (H100)" in page.read_text("utf-8")
    assert re.search(r"<td[^>]*>1 (A100-80GB|H100)</td>", page.read_text("utf-8"))
    assert "A100" not in plain.out, "of one kind there is nothing to tell"


@pytest.mark.parametrize(
    ("arguments", "report"),
    [
        (("--node", "8xA100"), "A100-40GB, A100-80GB, A100-80GB-PCIe"),
        (("--node", "8xA10"), "Did you mean: A40"),
        (("--node", "9xA100-80GB"), "has at most 8 GPUs"),
        (("--method", "samulm"), "Did you mean: samullm"),
        (("--set", "calls.draft.model=writter"), "Did you mean: writer"),
        (("--set", "models.judge.model=llama-3.1-405b"), "must fit the GPUs"),
        (("--quantile", "2"), "quantile must be above 0 and below 1"),
        (("--profile", "nowhere"), "nowhere"),
    ],
)
def test_what_cannot_be_planned_is_one_error_alone(cli, tmp_path, arguments, report):
    finished = cli("app", "plan", write_app(tmp_path), *QUICK, *arguments)
    assert (finished.code, finished.out) == (2, "")
    assert finished.err.startswith("error: ")
    assert report in finished.err
    assert finished.err.count("error: ") == 1
    assert "note" not in finished.err


def test_without_gpus_the_error_shows_how_to_name_them(cli, tmp_path):
    finished = cli("app", "plan", write_app(tmp_path, cluster=""), *QUICK)
    assert finished.code == 2
    assert finished.err.startswith("error: a plan needs GPUs: --node 8xA100-80GB")
    finished = cli("app", "plan", write_app(tmp_path), "--set", "calls.verdict.model=llama-2-13b", *QUICK)
    assert 'Or give a table [models."llama-2-13b"].' in finished.err


def test_an_unwritable_report_is_an_error_before_anything_is_planned(cli, tmp_path):
    finished = cli("app", "plan", write_app(tmp_path), "--report", tmp_path / "no" / "plan.html")
    assert finished.code == 2
    assert "does not exist" in finished.err
    finished = cli("app", "plan", tmp_path / "judged.toml", "--json", tmp_path / "judged.toml")
    assert "it is also an input" in finished.err


@pytest.mark.parametrize("arguments", [("app",), ("app", "--help"), ("app", "-h")])
def test_the_group_lists_its_commands(cli, arguments):
    finished = cli(*arguments)
    for name in ("plan", "profile", "run", "status", "cancel"):
        assert re.search(rf"^  {name} +\w", finished.out + finished.err, re.MULTILINE), name


def test_a_mistyped_command_is_reported_with_the_nearest(cli):
    finished = cli("app", "pln")
    assert finished.code == 2
    assert "Did you mean 'plan'?" in finished.err


def test_stages_that_end_at_another_time_than_the_mean_are_explained(cli, tmp_path, capsys):
    cli("app", "plan", write_app(tmp_path), *QUICK, "--no-what-if", "--json", tmp_path / "plan.json")
    plan = read_plan(tmp_path / "plan.json")
    end_s = plan.stages[-1].end_s
    for factor in (1.0, 2.0):
        show(replace(plan, makespan=Estimate(factor * end_s)), AppFacts("judged", (), ("A100", "A100")))
        explained = (
            f"The stages are those of one sample, which ends after {duration_text(end_s)}." in capsys.readouterr().out
        )
        assert explained is (factor != 1.0)
