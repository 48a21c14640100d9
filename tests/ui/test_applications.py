"""The Applications page: the plan of its command, the graph of the calls, and the files that it refuses."""

from __future__ import annotations

import io
import json
import shlex
import zipfile
from pathlib import Path

import pytest

from lengthwise.cli import main, mcp
from lengthwise.config.files import examples_folder
from lengthwise.schema.errors import InputError
from lengthwise.ui import api, applications
from lengthwise.ui.work import JOB, Pool, Task

FOLDER = examples_folder()
FIELDS = {"app": "apps/critique-tiny.toml", "rows": 4, "nodes": "2xA100-80GB", "draws": 1, "true_draws": 2}
FIELDS |= {"what_if": False}
OWN = """
[inputs]
file = "mine.jsonl"
[calls.answer]
model = "llama-3.1-8b"
prompt = "/etc/passwd says {{ question }}"
[models."llama-3.1-8b"]
lengths = 20
"""


def job():
    return Task(Pool(threads=1).session(None), "", JOB, lambda _: None)


@pytest.mark.slow
def test_the_command_gives_the_plan_of_the_page_with_its_graph(tmp_path, capsys):
    outcome = applications.run(FOLDER, FIELDS, job())
    found = outcome.answer
    json.dumps(found, allow_nan=False)
    words = shlex.split(found["command"])[1:]
    words[2] = str(FOLDER / FIELDS["app"])
    assert main([*words, "--quiet", "--json", str(tmp_path / "plan.json")]) == 0
    capsys.readouterr()
    by_command = json.loads((tmp_path / "plan.json").read_text())
    made = applications.page(FOLDER).downloads
    of_page = json.loads(made["plan"](outcome, {}).content)
    assert of_page["stages"] == by_command["stages"]
    assert of_page["makespans_s"] == pytest.approx(by_command["makespans_s"])
    assert b"<html" in made["report"](outcome, {}).content
    with zipfile.ZipFile(io.BytesIO(made["files"](outcome, {}).content)) as archive:
        assert {"critique-tiny.toml", "questions-tiny.jsonl"} <= set(archive.namelist())
    assert applications.choices(FOLDER, [])["rows"][FIELDS["app"]] == 6
    edges = {(one["from"], one["to"]): one["back"] for one in found["graph"]["edges"]}
    assert edges[("draft", "critique")] is False
    assert edges[("critique", "draft")] is True  # the next round of the loop
    columns = {one["call"]: one["column"] for one in found["graph"]["nodes"]}
    assert columns["draft"] < columns["critique"]


@pytest.mark.slow
def test_an_uploaded_application_is_planned_with_its_uploaded_rows():
    task = job()
    app_file = task.session.store("mine.toml", OWN.encode())
    rows = task.session.store("../rows.jsonl", b'{"question": "why?"}\n{"question": "how?"}\n')
    fields = FIELDS | {"app": applications.OWN, "app_file": app_file, "rows_file": rows, "rows": None}
    found = applications.run(FOLDER, fields, task).answer
    assert found["graph"]["nodes"][0]["tasks"] == 2
    assert "--node 2xA100-80GB" in found["command"]


@pytest.mark.slow
def test_the_json_api_plans_the_text_of_an_application(tmp_path):
    rows = [{"question": "why: ../x?"}, {"question": "how?"}]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "mine.toml").write_text(OWN)
    plan = applications.planner(FOLDER)
    found = api.call(plan, {"application": OWN, "nodes": ["2xA100-80GB"], "rows": rows})
    expected = mcp.plan(str(tmp_path / "mine.toml"), ["2xA100-80GB"])
    assert found["stages"] == expected["stages"]
    assert found["makespans_s"] == pytest.approx(expected["makespans_s"])
    wrongs = {"choose the file with its rows": {"application": OWN}, "nodes must be": {"nodes": ["x/../y"]}}
    wrongs["no application named"] = {"application": "apps/critique-tinny.toml"}
    for message, wrong in wrongs.items():
        with pytest.raises(InputError, match=message):
            api.call(plan, {"application": FIELDS["app"], "nodes": ["2xA100-80GB"]} | wrong)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "", "inputs.file = 'mine.jsonl' does; choose the file with its rows"),
        ('file = "mine.jsonl"', 'openai_batch = "/etc/passwd"', "inputs.openai_batch"),
        ("lengths = 20", 'lengths = { file = "private", column = "n" }', "lengths.file"),
        ("lengths = 20", 'model = "../secret/config.json"', "llama-3.1-8b.model"),
        ("lengths = 20", 'cost = "vidur:secret"', "llama-3.1-8b.cost"),
    ],
)
def test_an_uploaded_application_that_names_a_file_is_refused(old, new, message):
    task = job()
    app_file = task.session.store("mine.toml", OWN.replace(old, new).encode())
    rows = task.session.store("rows.jsonl", b'{"question": "why?"}\n') if "lengths" in old else None
    with pytest.raises(InputError, match=message.replace(".", r"\.")):
        applications.run(FOLDER, FIELDS | {"app": applications.OWN, "app_file": app_file, "rows_file": rows}, task)


@pytest.mark.parametrize("table", ['[models."own"]\nlengths = 20', '[models.answer]\nmodel = "own"\nlengths = 20'])
def test_an_uploaded_application_names_no_folder_of_a_model(table, tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    task = job()
    rows = task.session.store("rows.jsonl", b'{"question": "why?"}\n')
    text = OWN[: OWN.index("[models")].replace('"llama-3.1-8b"', '"own"' if '"own"]' in table else '"answer"')
    app_file = task.session.store("mine.toml", (text + table).encode())
    with pytest.raises(InputError, match="may name no file"):
        applications.run(FOLDER, FIELDS | {"app": applications.OWN, "app_file": app_file, "rows_file": rows}, task)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"app": "../secret.toml"}, "no application named"),
        ({"nodes": "8x/etc/gpu.toml"}, "nodes must be"),
        ({"rows": -1}, "rows must be"),
        ({"what_if": "yes"}, "what_if must be"),
        ({"method": "best"}, "no planning method named"),
    ],
)
def test_wrong_fields_are_refused_with_one_message(fields, message):
    with pytest.raises(InputError, match=message):
        applications.run(FOLDER, FIELDS | fields, job())


@pytest.mark.slow
def test_the_progress_of_a_run_is_that_of_its_folder(tmp_path, capsys):
    out = tmp_path / "run"
    command = ["app", "run", str(FOLDER / FIELDS["app"]), "--node", "2xA100-80GB", "--launcher", "simulated"]
    assert main([*command, "--out", str(out), "--quiet"]) == 0
    capsys.readouterr()
    page = applications.page(FOLDER, [out, Path("nowhere")])
    done, missing = page.answers["progress"]({}, job())["runs"]
    assert done["finished"] == done["total"] > 0
    assert not done["runs_now"]
    assert "must be the folder of a run" in missing["error"]
