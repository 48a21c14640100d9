"""``lengthwise calibrate``: from a run of an engine to tables that ``simulate`` takes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lengthwise import cost, engine, measure, scenario
from lengthwise.measure.calibrate._parameters import apply
from lengthwise.schema.measured import Measured

SCENARIO = """
[workload]
isl = { kind = "uniform", low = 100, high = 900 }
osl = { kind = "uniform", low = 20, high = 120 }
num_requests = 100
request_rate = 8
[deployment]
model = "llama-3-8b"
gpu = "H100"
[engine]
max_num_seqs = 64
max_model_len = 4096
"""


@pytest.fixture
def files(tmp_path):
    """A scenario and the run of an engine that is slower than its roofline by three tenths."""
    path = tmp_path / "mine.toml"
    path.write_text(SCENARIO, "utf-8")
    (variant,) = scenario.build(scenario.load(path))
    slower = replace(variant.deployment, cost=apply(variant.deployment.cost, {"work": 1.3}))
    workload = variant.workload(0)
    run = Measured(engine.simulate(workload, slower), workload, "bench")
    measure.write_records(run, tmp_path / "run.parquet")
    measure.write_records(replace(run, source="simulate"), tmp_path / "simulated.parquet")
    other = variant.workload(1)
    as_given = Measured(engine.simulate(other, variant.deployment), other, "bench")
    measure.write_records(as_given, tmp_path / "as_given.parquet")
    return path, tmp_path / "run.parquet", tmp_path / "cost.npz"


def test_tables_are_written_that_simulate_takes(cli, files, tmp_path):
    path, run, out = files
    page, numbers = tmp_path / "page.md", tmp_path / "numbers.json"
    ended = cli("calibrate", path, run, "--out", out, "--fit", "work", "--json", numbers, "--report", page)
    assert ended.code == 0, ended.err
    for words in ("held-out", "TTFT", "projections", "beyond that the tables extrapolate"):
        assert words in ended.out
        assert words in page.read_text("utf-8")
    assert f"--cost tables:{out}" in ended.err
    found = json.loads(numbers.read_text("utf-8"))
    (work,) = [p for p in found["parameters"] if p["name"] == "work"]
    assert work["low"] <= 1.3 <= work["high"]
    assert cost.load(out).source == found["tables"]["source"]
    assert cli("simulate", path, "--cost", f"tables:{out}", "--quiet") == (0, "", "")


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--fit", "wrok"], "work"),
        (["--set", "engine.max_model_len=512"], "max_model_len"),
        (["--iterations", "none.log"], "log to read"),
        (["--holdout", "none.parquet"], "none.parquet"),
    ],
)
def test_what_cannot_be_used_is_told_in_one_sentence(cli, files, more, told):
    path, run, out = files
    ended = cli("calibrate", path, run, "--out", out, *more)
    assert ended.code == 2
    assert told in ended.err
    assert "Traceback" not in ended.err
    assert not out.exists()


def test_a_simulated_run_is_refused(cli, files, tmp_path):
    path, _, out = files
    ended = cli("calibrate", path, tmp_path / "simulated.parquet", "--out", out)
    assert ended.code == 2
    assert "--force" in ended.err


@pytest.mark.slow
def test_tables_that_are_worse_than_those_given_are_not_written_unasked(cli, files, tmp_path):
    """The run that is held out was of the tables given: whatever is fitted to the other one is worse."""
    path, run, out = files
    words = (
        "calibrate",
        path,
        run,
        "--holdout",
        tmp_path / "as_given.parquet",
        "--fit",
        "work",
        "--out",
        out,
    )
    ended = cli(*words)
    assert ended.code == 2
    assert "--force" in ended.err
    assert ended.out.startswith("WORSE than the tables given: TTFT")
    assert not out.exists()
    forced = cli(*words, "--force")
    assert forced.code == 0
    assert forced.out.startswith("WORSE than the tables given: TTFT")
    assert out.exists()


def test_a_run_is_not_held_out_from_itself(cli, files):
    path, run, out = files
    ended = cli("calibrate", path, run, "--holdout", run, "--out", out, "--force")
    assert ended.code == 2
    assert "given once" in ended.err
    assert not out.exists()
