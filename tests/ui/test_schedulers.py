"""The Schedulers page: the numbers of its scenario file, and the minute that it plays."""

from __future__ import annotations

import json

import pytest

from lengthwise.cli import main
from lengthwise.schema.errors import InputError
from lengthwise.ui import schedulers
from lengthwise.ui.work import JOB, Pool, Task

FIELDS = {
    "schedulers": list(schedulers.SCHEDULERS),
    "workload": "200/60",
    "rate": 12.0,
    "num_requests": 120,
    "seeds": 2,
}


def run(fields):
    task = Task(Pool(threads=1).session(None), "", JOB, lambda _: None)
    return schedulers.run(fields, task).answer


@pytest.mark.slow
def test_the_scenario_gives_the_numbers_of_the_page_and_no_request_runs_before_it_arrives(tmp_path, capsys):
    found = run(FIELDS)
    json.dumps(found, allow_nan=False)
    (tmp_path / "scenario.toml").write_text(found["scenario"])
    assert main(["simulate", str(tmp_path / "scenario.toml"), "--quiet", "--json", str(tmp_path / "found.json")]) == 0
    capsys.readouterr()
    by_command = json.loads((tmp_path / "found.json").read_text())["results"]
    assert [one["name"] for one in by_command] == [one["name"] for one in found["schedulers"]] == FIELDS["schedulers"]
    means = [one["summary"]["jct_s"]["mean"]["value"] for one in by_command]
    for one, mean in zip(found["schedulers"], means, strict=True):
        assert one["against_first"]["mean"]["percent"] == pytest.approx(100 * (mean / means[0] - 1), abs=1e-6)
        times = zip(found["arrival_s"], *one["events_s"], strict=True)
        assert all(list(row) == sorted(row) for row in times if None not in row)
    assert len(found["output_tokens"]) == len(found["arrival_s"]) > 0


def test_the_verdict_says_whether_a_queue_exists_and_what_the_tail_loses():
    few = {"schedulers": ["FCFS", "SJF"], "workload": "200/60", "num_requests": 300, "sigma": 0, "seeds": 3}
    assert "hardly any request waits" in run(few | {"rate": 0.2})["verdict"]
    queue = run(few | {"workload": "chat-1m", "rate": 6.0, "max_num_seqs": 8})
    mean, p99 = (queue["schedulers"][1]["against_first"][name]["percent"] for name in ("mean", "p99"))
    assert mean < 0
    assert queue["verdict"].startswith("Worth it" if p99 <= -mean else "Not worth it: SJF changes")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedulers": ["./evil.py:rank"]}, "no scheduler named"),
        ({"schedulers": ["SJF", "SJF"]}, "schedulers must be"),
        ({"sigma": "0.6\nkind = 1"}, "sigma must be"),
        ({"num_requests": 1e9}, "num_requests must be"),
    ],
)
def test_wrong_fields_are_refused_with_one_message(fields, message):
    with pytest.raises(InputError, match=message.replace(".", r"\.")):
        run(fields)
