"""``lengthwise app plan`` and the group that it is in: what is printed and written, and what cannot be planned."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
from apps_world import write_app

from lengthwise.apps.plan import METHODS
from lengthwise.config.app_file import read_plan

QUICK = ("--draws", 1, "--true-draws", 3)


def words(text):
    return " ".join(text.split())


def test_a_plan_tells_stages_makespan_methods_and_what_else_would_bring(cli, tmp_path):
    ended = cli("app", "plan", write_app(tmp_path), *QUICK)
    assert ended.code == 0, ended.err
    assert re.match(r"judged: [\d.]+( ± [\d.]+)? s on 2 GPUs, \d stages?\n", ended.out)
    assert re.search(r"^ +1 +0 s +[\d.]+ s +writer +\d", ended.out, re.MULTILINE)
    assert {line.split()[0] for line in ended.out.splitlines() if line} >= {"lengthwise", *METHODS}
    said = words(ended.out)
    assert "one more pair of GPUs (with fast links)" in said
    assert "one more GPU" in said
    assert "a disk twice as fast" in said
    assert "GPU time without work:" in said
    assert "e-" not in re.sub(r"[a-z]+e-[a-z]+", "", said), "no power of ten"
    assert not [line for line in ended.out.splitlines() if "note" not in line and len(line.rstrip()) > 80]


def test_what_is_assumed_is_told_once(cli, tmp_path):
    path = write_app(tmp_path)
    ended = cli("app", "plan", path, *QUICK, "--no-what-if", "--set", "models.judge.lengths=12")
    notes = [line for line in ended.out.splitlines() if line.startswith("note: ")]
    assert len(notes) == len(set(notes)) == 1
    assert "switch times are assumed" in notes[0]
    assert ended.err == ""
    text = path.read_text("utf-8").replace('lengths = { kind = "uniform", low = 4, high = 20 }\n', "")
    path.write_text(text, "utf-8")
    ended = cli("app", "plan", path, *QUICK, "--no-what-if")
    assert ended.out.count("lengths of writer, judge are unknown") == 1
    assert ended.out.count("switch times are assumed") == 1
    assert ended.err == ""


def test_json_and_report_are_written_and_the_same_again_but_for_the_clock(cli, tmp_path):
    path = write_app(tmp_path)
    ended = cli("app", "plan", path, *QUICK, "--json", tmp_path / "plan.json", "--report", tmp_path / "plan.html")
    assert ended.code == 0
    assert ended.err == f"wrote {tmp_path / 'plan.json'}\nwrote {tmp_path / 'plan.html'}\n"
    plan = read_plan(tmp_path / "plan.json")
    assert plan.models == ("writer", "judge")
    assert {one.name for one in plan.what_ifs} == {
        "island_plus_2", "gpus_plus_1", "disk_twice_as_fast"}  # fmt: skip
    page = (tmp_path / "plan.html").read_text("utf-8")
    assert "2 x A100-80GB, fast links between all" in page
    assert "16 tasks at most" in page
    printed = cli("app", "plan", path, *QUICK, "--json", "-")
    told = json.loads(printed.out)
    assert told["format"] == "lengthwise application plan 1"
    for key in ("planned", "makespans_s", "stages", "spans", "notes"):
        assert told[key] == json.loads((tmp_path / "plan.json").read_text("utf-8"))[key], key
    assert cli("app", "plan", path, *QUICK, "-q").out == ""


def test_a_method_and_a_quantile_can_be_asked_for(cli, tmp_path):
    path = write_app(tmp_path)
    ended = cli("app", "plan", path, *QUICK, "--no-what-if", "--method", "max", "--quantile", 0.9, "--json", "-")
    assert json.loads(ended.out)["method"] == "max"


def test_of_two_kinds_of_gpus_each_model_of_a_stage_is_told_which_it_has(cli, tmp_path):
    nodes = ("--node", "1xA100-80GB", "--node", "1xH100")
    page = tmp_path / "plan.html"
    ended = cli("app", "plan", write_app(tmp_path), *QUICK, "--no-what-if", *nodes, "--report", page)
    assert ended.code == 0, ended.err
    plain = cli("app", "plan", write_app(tmp_path), *QUICK, "--no-what-if", "--json", tmp_path / "plan.json")
    rows = [line for line in ended.out.splitlines() if re.search(r" (writer|judge) +\d", line)]
    assert len(rows) >= 2
    assert all(re.search(r" \d (A100-80GB|H100)\b", row) for row in rows), ended.out
    assert "node 1, GPU 0 (H100)" in page.read_text("utf-8")
    assert re.search(r"<td[^>]*>1 (A100-80GB|H100)</td>", page.read_text("utf-8"))
    assert "A100" not in plain.out, "of one kind there is nothing to tell"


@pytest.mark.parametrize(
    ("arguments", "report"),
    [
        (("--node", "8xA100"), "8xA100-40GB, 8xA100-80GB, 8xA100-80GB-PCIe"),
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
    ended = cli("app", "plan", write_app(tmp_path), *QUICK, *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: ")
    assert report in ended.err
    assert ended.err.count("error: ") == 1
    assert "note" not in ended.err


def test_without_gpus_it_is_told_how_to_name_them(cli, tmp_path):
    ended = cli("app", "plan", write_app(tmp_path, cluster=""), *QUICK)
    assert ended.code == 2
    assert ended.err.startswith("error: a plan needs GPUs: --node 8xA100-80GB")


def test_a_report_that_cannot_be_written_is_told_before_anything_is_planned(cli, tmp_path):
    ended = cli("app", "plan", write_app(tmp_path), "--report", tmp_path / "no" / "plan.html")
    assert ended.code == 2
    assert "does not exist" in ended.err
    ended = cli("app", "plan", tmp_path / "judged.toml", "--json", tmp_path / "judged.toml")
    assert "it is also an input" in ended.err


@pytest.mark.parametrize("arguments", [("app",), ("app", "--help"), ("app", "-h")])
def test_the_group_lists_its_commands(cli, arguments):
    ended = cli(*arguments)
    for name in ("plan", "profile", "run", "status", "cancel"):
        assert re.search(rf"^  {name} +\w", ended.out + ended.err, re.MULTILINE), name


def test_a_slip_of_the_command_is_told_the_nearest(cli):
    ended = cli("app", "pln")
    assert ended.code == 2
    assert "Did you mean 'plan'?" in ended.err
