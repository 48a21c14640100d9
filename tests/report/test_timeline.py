from __future__ import annotations

import collections
import dataclasses
import itertools
import json

import numpy as np
import pytest

from lengthwise.report import write_timeline
from lengthwise.schema.errors import InputError, OutputError
from lengthwise.schema.records import Status


@pytest.fixture(scope="module")
def records(toy):
    """Steps also overlap in pairs, as the micro-batches of two pipeline stages do."""
    made = toy.records(120)
    steps = made.steps
    longer = dataclasses.replace(steps, end_s=np.append(steps.end_s[1:], steps.end_s[-1] + 0.01))
    return dataclasses.replace(made, steps=longer)


@pytest.fixture(scope="module")
def events(records, tmp_path_factory):
    path = tmp_path_factory.mktemp("timeline") / "run.json"
    write_timeline(path, records)
    return json.loads(path.read_text())["traceEvents"]


def test_steps_never_overlap_on_a_track_and_none_is_lost(records, events) -> None:
    tracks = collections.defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            tracks[e["pid"], e["tid"]].append(e)
    assert len(tracks) == 2
    for steps in tracks.values():
        for a, b in itertools.pairwise(steps):
            assert a["ts"] + a["dur"] <= b["ts"] + 1e-6
    made = [e for steps in tracks.values() for e in steps]
    assert len(made) == len(records.steps.start_s)
    assert sum(e["args"]["prefill_tokens"] for e in made) == records.steps.prefill_tokens.sum()
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert named == set(tracks)


def test_request_spans_nest_in_order(records, events) -> None:
    spans = collections.defaultdict(list)
    for e in events:
        if e["ph"] in {"b", "e"}:
            spans[e["id"]].append(e)
    rejected = int((records.requests.status == Status.REJECTED).sum())
    assert len(spans) == len(records.requests.arrival_s) - rejected
    for i, marks in spans.items():
        times = [e["ts"] for e in marks]
        assert times == sorted(times)
        stack = []
        for e in marks:
            if e["ph"] == "b":
                stack.append(e["name"])
            else:
                assert stack.pop() == e["name"]
        assert not stack
        assert marks[0]["name"] == marks[-1]["name"] == f"request {i}"


def test_phases_are_those_of_the_records(records, events) -> None:
    r = records.requests
    i = int(np.flatnonzero((r.status == Status.FINISHED) & (r.output_tokens > 3))[5])
    marks = [e for e in events if e["ph"] in {"b", "e"} and e["id"] == i]
    starts = {e["name"]: e["ts"] for e in marks if e["ph"] == "b"}
    assert starts[f"request {i}"] == pytest.approx(r.arrival_s[i] * 1e6, abs=1e-3)
    assert starts["prefill"] == pytest.approx(r.scheduled_s[i] * 1e6, abs=1e-3)
    assert starts["decode"] == pytest.approx(r.first_token_s[i] * 1e6, abs=1e-3)
    assert marks[-1]["ts"] == pytest.approx(r.finished_s[i] * 1e6, abs=1e-3)
    assert next(e for e in marks)["args"]["output_tokens"] == r.output_tokens[i]


def test_counters_follow_the_steps_and_end_at_nothing(records, events) -> None:
    counters = collections.defaultdict(list)
    for e in events:
        if e["ph"] == "C":
            counters[e["name"]].append(e)
    assert [e["args"]["in_use"] for e in counters["kv_blocks"]] == records.steps.kv_blocks.tolist()
    assert [e["args"]["requests"] for e in counters["waiting"]] == records.steps.waiting.tolist()
    assert counters["batch"][-1]["args"] == {"decode": 0, "prefill": 0}
    times = [e["ts"] for e in counters["batch"]]
    assert times == sorted(times)


def test_rejected_requests_are_instants_next_to_the_replicas(records, events) -> None:
    instants = [e for e in events if e["ph"] == "n"]
    assert [e["args"]["status"] for e in instants] == ["rejected"]
    assert instants[0]["pid"] == 1


def test_a_gap_between_steps_empties_the_batch(toy, tmp_path) -> None:
    records = toy.records(30, rate=0.5, odd=False)
    write_timeline(tmp_path / "a.json", records)
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    empty = sum(e["name"] == "batch" and e["args"] == {"decode": 0, "prefill": 0} for e in events)
    gaps = (records.steps.start_s[1:] > records.steps.end_s[:-1]).sum()
    assert gaps > 3
    assert empty == gaps + 1


def test_missing_steps_or_folders_are_reported(records, tmp_path) -> None:
    with pytest.raises(InputError, match="needs every step"):
        write_timeline(tmp_path / "a.json", dataclasses.replace(records, steps=None))
    with pytest.raises(OutputError, match="does not exist"):
        write_timeline(tmp_path / "no" / "a.json", records)
    assert list(tmp_path.iterdir()) == []
