"""``lengthwise doctor`` and ``lengthwise examples``: what a new user runs first."""

from __future__ import annotations

import json
import tomllib
from importlib import metadata
from pathlib import Path

from lengthwise.cli import doctor, examples
from lengthwise.config.files import examples_folder

ROOT = Path(__file__).parents[2]


def test_doctor_finds_no_problem_here_and_names_every_required_package(cli):
    finished = cli("doctor")
    assert (finished.code, finished.err) == (0, "")
    for requirement in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        name = requirement.partition(">")[0]
        assert f"{name} " in finished.out
        assert metadata.version(name) in finished.out


def test_doctor_prints_json(cli):
    found = json.loads(cli("doctor", "--json").out)
    assert found["problems"] == []
    assert found["lengthwise"]["version"] == metadata.version("lengthwise")
    assert found["optional parts"]["report"] == "yes"


def test_doctor_reports_missing_packages_and_an_unwritable_cache(cli, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LENGTHWISE_CACHE_DIR", str(tmp_path / "file"))
    requires = ["numpy>=2.0", "no-such-package>=1", 'no-such-extra>=1; extra == "report"']
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: requires)
    finished = cli("doctor")
    assert finished.code == 1
    assert "problem: no-such-package is not installed" in finished.err
    assert "set LENGTHWISE_CACHE_DIR" in finished.err
    assert "pip install 'lengthwise[report]' (lacks no-such-extra)" in finished.out


def test_every_example_is_listed_with_a_command_and_a_purpose(cli):
    assert cli("examples").code == 0
    listed = examples.listed(examples_folder())
    assert all(about.endswith((".", "?", ".)")) for _, _, about in listed)
    commands = {name: command for name, command, _ in listed}
    scenarios = {
        path.relative_to(ROOT / "examples").as_posix()
        for path in (ROOT / "examples").rglob("*.toml")
        if not {"gpus", "models"} & set(path.parts)
    }
    assert scenarios - set(commands) <= {"apps/core.toml"}
    assert commands["buy-70b.toml"] == "search"
    assert commands["apps/ensemble.toml"] == "app plan"
    assert commands["gateway.toml"] == "serve --check"
    assert commands["schedule-70b-5s.toml"] == "schedule"


def test_without_the_examples_the_start_and_the_error_say_how_to_get_them(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copy = "lengthwise examples --copy examples"
    assert copy in cli().out
    for command in (("simulate", "examples/chat-70b.toml"), ("app", "plan", "examples/apps/ensemble.toml")):
        assert copy in cli(*command).err
    assert copy not in cli("simulate", "examples/none.toml").err
    assert cli("examples", "--copy", "examples").code == 0
    assert copy not in cli().out


def test_examples_are_copied_into_a_new_folder_and_run_there(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli("examples", "--copy", "mine").code == 0
    copied = {path.relative_to("mine") for path in Path("mine").rglob("*") if path.is_file()}
    assert Path("chat-70b.toml") in copied
    assert Path("apps/questions.jsonl") in copied
    assert not [path for path in copied if path.suffix == ".pyc"]
    assert cli("explain", "mine/chat-70b.toml").code == 0
    again = cli("examples", "--copy", "mine")
    assert again.code == 2
    assert "name a new folder" in again.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"]
