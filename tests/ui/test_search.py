"""The Search page: the job, its files, and what its server refuses."""

from __future__ import annotations

import io
import json
import shlex
import zipfile

import pytest

from lengthwise import catalog
from lengthwise.cli import main
from lengthwise.config import loads
from lengthwise.schema.errors import InputError
from lengthwise.ui import search
from lengthwise.ui.work import JOB, CancelledTaskError, Pool, Task

FIELDS = {"model": "llama-3.1-8b", "gpus": ["H100"], "tp": ["1"], "rate": 10.0, "num_requests": 100, "seeds": 2}


def job(values, function=search.run):
    return Task(Pool(threads=1).session(None), "", JOB, lambda task: function(values, task))


def bursts():
    """A trace in which two requests arrive at once, every 0.4 s."""
    rows = [f"{0.4 * (at // 2):g},{50 + at % 300},{20 + at % 60}" for at in range(900)]
    return "\n".join(["arrived_at,num_prefill_tokens,num_decode_tokens", *rows]).encode()


@pytest.mark.slow
@pytest.mark.parametrize("replayed", [False, True])
def test_the_command_gives_the_answer_of_the_page_and_the_files_are_of_the_chosen_one(
    replayed, tmp_path, capsys, monkeypatch
):
    task, fields = job(FIELDS), FIELDS
    if replayed:
        (tmp_path / "calls.csv").write_bytes(bursts())
        monkeypatch.chdir(tmp_path)
        fields = {**FIELDS, "trace_file": task.session.store("calls.csv", bursts()), "replay": True}
        fields["weights"] = "fp8"
        fields["prices"] = {"H100": 1.5, "L40S": 0.5}
    outcome = search.run(fields, task)
    found = outcome.answer
    for name, text in found["gpu_files"].items():
        (tmp_path / name).write_text(text)
    prices = {choice["price"] / choice["gpus"] for choice in found["columns"]["choices"]}
    assert prices == {1.5 if replayed else catalog.gpu("H100").price_per_hour_usd}
    assert "toml" not in json.dumps(found["columns"])
    json.dumps(found, allow_nan=False)
    assert task.progress[1] == task.progress[2] > 0
    words = shlex.split(found["command"])
    words = words[1 : words.index("--report")]
    assert main([*words, "--quiet", "--json", str(tmp_path / "found.json")]) == 0
    capsys.readouterr()
    (by_command,) = json.loads((tmp_path / "found.json").read_text())["plans"]
    assert by_command["metadata"]["rate"].endswith(", replayed") == replayed
    best = found["columns"]["choices"][found["columns"]["best"]]
    assert best["name"] == by_command["choices"][0]["name"]
    assert best["objective"][0] == pytest.approx(by_command["choices"][0]["objective"]["value"])
    assert loads(found["scenario"]).search is not None

    files = {name: make(outcome, {"choice": best["name"]}) for name, make in search.PAGE.downloads.items()}
    assert (
        loads(files["scenario"].content.decode()).deployment.tp == by_command["choices"][0]["settings"]["deployment.tp"]
    )
    assert best["name"] in files["report"].content.decode()
    chosen = loads(files["scenario"].content.decode())
    assert chosen.workload.is_replay == loads(found["scenario"]).workload.is_replay == replayed
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
        ({"weights": "fp9"}, "no dtype named"),
        ({"tp": ["3"]}, "no tp named"),
        ({"ttft.p90": "2s, x = 1"}, "ttft.p90 must be"),
        ({"num_requests": 1e9}, "num_requests must be"),
        ({"prices": {"H100": -1}}, "the price of H100 must be"),
        ({"prices": {"../x": 1}}, "no GPU named"),
        ({"workload": "a.csv"}, "no workload named"),
    ],
)
def test_wrong_fields_are_refused_with_one_message(fields, message):
    with pytest.raises(InputError, match=message.replace(".", r"\.")):
        search.run(fields, job(fields))
