"""lengthwise schedule run --adapt as a user sees it: other requests than planned for, before an emulated engine."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lengthwise.testing.engine_server import EngineServer, EngineSpec, Limits, LinearSteps, in_thread

TEXT = """
name = "small"
[workload]
prompt = { kind = "uniform", low = 100, high = 500 }
output = { kind = "uniform", low = 2, high = 16 }
request_rate = 1
num_requests = 250
[deployment]
model = "opt-13b"
gpu = "A40"
node = "pcie4-4"
tp = 2
[engine]
gpu_memory_utilization = 0.4
[schedule]
latency_bound = "4s"
strategies = ["rra"]
"""


@pytest.fixture
def requested(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(TEXT)
    return path


@pytest.fixture
def url():
    spec = EngineSpec("m", limits=Limits(128, 1 << 16, num_blocks=1 << 16), steps=LinearSteps(0.01, 0.0, 0.0))
    with in_thread(EngineServer(spec)) as up:
        yield up.servers[0].url


def trace(path, *parts):
    """Requests in order; of each part (how many, shortest, longest output)."""
    rng, rows = np.random.default_rng(1), []
    for count, low, high in parts:
        pairs = zip(rng.integers(100, 501, count), rng.integers(low, high + 1, count), strict=True)
        rows += [f"{prompt},{output}" for prompt, output in pairs]
    lines = (f"{at / 20},{row}\n" for at, row in enumerate(rows))
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(lines))
    return path


@pytest.mark.slow
def test_longer_requests_change_the_schedule_and_are_reported(cli, requested, url, tmp_path):
    live = trace(tmp_path / "live.csv", (250, 2, 16), (450, 20, 34))
    finished = cli(
        "schedule", "run", requested, "--engine", url, "--adapt", "--workload", live, "--out", tmp_path / "run",
        "--admin-port", 0,
    )  # fmt: skip
    assert finished.code == 0, finished.err
    flat = " ".join(finished.out.split())
    assert "admin page at http://127.0.0.1:" in flat
    assert "outputs changed, from about request 2" in flat
    assert "Changed to RRA, B_E =" in flat
    assert "Lengths of 700 requests were monitored. Below is the outcome of RRA, B_E =" in flat
    assert "outputs changed" in finished.err, "the gateway's log tells it when it happens"
    reported = json.loads((tmp_path / "run" / "outcome.json").read_text())
    first, *again = reported["news"]
    assert not first["failed"]
    assert first["adaptation"]["sides"] in (["outputs"], ["prompts", "outputs"])
    assert reported["followed"]["observed"] == 700
    assert reported["followed"]["changed"] >= 1
    last = (again or [first])[-1]["phases"]
    assert reported["phases"] == last
    seen = {one["name"]: one for one in reported["outcome"]["seen"]}
    assert seen["prefill batch, B_E"]["planned"] == last["prefill_batch"]
    requests = [json.loads(line) for line in (tmp_path / "run" / "requests.jsonl").read_text().splitlines()]
    assert {one["outcome"] for one in requests} == {"finished"}
    assert len(requests) == 700


@pytest.mark.slow
def test_requests_as_planned_change_nothing(cli, requested, url):
    reported = json.loads(cli("schedule", "run", requested, "--engine", url, "--adapt", "--json", "-", "-q").out)
    assert reported["news"] == []
    assert (reported["followed"]["observed"], reported["followed"]["changed"]) == (250, 0)
    assert reported["followed"]["false_positive_rate"] == 0.01


@pytest.mark.parametrize(
    ("words", "states"),
    [
        (["--false-positive-rate", "0.1"], "goes with --adapt"),
        (["--storage", "ssd"], "goes with --adapt"),
        (["--adapt", "--false-positive-rate", "2"], "false_positive_rate must be above 0 and below 1"),
        (["--adapt", "--storage", "tape"], 'storage must be "dram" or "ssd"'),
        (["--adapt", "--horizon", "soon"], "--horizon must be seconds"),
        (["--workload", "nothing-such"], "there is no file nothing-such"),
    ],
)
def test_invalid_input_exits_with_2_and_names_the_requirement(cli, requested, words, states):
    finished = cli("schedule", "run", requested, "--engine", "http://127.0.0.1:9", *words)
    assert finished.code == 2, (finished.out, finished.err)
    assert states in " ".join(finished.err.split())
