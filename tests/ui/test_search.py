"""The Search page: the job, its files, and what its server refuses."""

from __future__ import annotations

import io
import json
import shlex
import zipfile

import pytest

from lengthwise.cli import main
from lengthwise.config import loads
from lengthwise.schema.errors import InputError
from lengthwise.ui import search
from lengthwise.ui.work import JOB, CancelledTaskError, Pool, Task

FIELDS = {"model": "llama-3.1-8b", "gpus": ["H100"], "tp": ["1"], "rate": 10.0, "num_requests": 100, "seeds": 2}


def job(values, function=search.run):
    return Task(Pool(threads=1).session(None), "", JOB, lambda task: function(values, task))


@pytest.mark.slow
def test_the_command_gives_the_answer_of_the_page_and_the_files_are_of_the_chosen_one(tmp_path, capsys):
    task = job(FIELDS)
    outcome = search.run(FIELDS, task)
    found = outcome.answer
    json.dumps(found, allow_nan=False)
    assert task.progress[1] == task.progress[2] > 0
    words = shlex.split(found["command"])
    words = words[1 : words.index("--report")]
    assert main([*words, "--quiet", "--json", str(tmp_path / "found.json")]) == 0
    capsys.readouterr()
    (by_command,) = json.loads((tmp_path / "found.json").read_text())["plans"]
    best = found["columns"]["choices"][found["columns"]["best"]]
    assert best["name"] == by_command["choices"][0]["name"]
    assert best["objective"][0] == pytest.approx(by_command["choices"][0]["objective"]["value"])
    assert loads(found["scenario"]).search is not None

    files = {name: make(outcome, {"choice": best["name"]}) for name, make in search.PAGE.downloads.items()}
    assert (
        loads(files["scenario"].content.decode()).deployment.tp == by_command["choices"][0]["settings"]["deployment.tp"]
    )
    assert best["name"] in files["report"].content.decode()
    names = zipfile.ZipFile(io.BytesIO(files["launch"].content)).namelist()
    assert any(name.endswith("scenario.toml") for name in names)
    assert all(name.startswith("launch/") for name in names)
    with pytest.raises(InputError, match="no ranked configuration"):
        search.PAGE.downloads["launch"](outcome, {"choice": "../etc"})


def test_a_cancelled_search_ends_at_its_next_evaluation():
    task = job(FIELDS)

    def cancelled_at_first(step, done, of):
        task.is_cancelled = True
        Task.report(task, step, done, of)

    task.report = cancelled_at_first
    with pytest.raises(CancelledTaskError):
        search.run(FIELDS, task)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gpus": ["/etc/passwd"]}, "no GPU named"),
        ({"gpus": []}, "gpus must be"),
        ({"tp": ["3"]}, "no tp named"),
        ({"ttft.p90": "2s, x = 1"}, "ttft.p90 must be"),
        ({"num_requests": 1e9}, "num_requests must be"),
        ({"workload": "a.csv"}, "no workload named"),
    ],
)
def test_wrong_fields_are_refused_with_one_message(fields, message):
    with pytest.raises(InputError, match=message.replace(".", r"\.")):
        search.run(fields, job(fields))
