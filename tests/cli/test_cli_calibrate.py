"""``lengthwise calibrate``: from a run of an engine to tables that ``simulate`` takes."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from lengthwise import catalog, config, cost, engine, measure
from lengthwise.measure.calibration.parameters import apply
from lengthwise.schema.records import RunResult, shape_facts
from lengthwise.usecases import variants

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
    (variant,) = variants.build(config.load(path))
    slower = replace(variant.deployment, cost=apply(variant.deployment.cost, {"work": 1.3}))
    workload = variant.workload(0)
    run = RunResult(engine.simulate(workload, slower), workload, "bench")
    measure.write_records(run, tmp_path / "run.parquet")
    measure.write_records(replace(run, source="simulate"), tmp_path / "simulated.parquet")
    other = variant.workload(1)
    as_given = RunResult(engine.simulate(other, variant.deployment), other, "bench")
    measure.write_records(as_given, tmp_path / "as_given.parquet")
    return path, tmp_path / "run.parquet", tmp_path / "cost.npz"


def test_tables_are_written_that_simulate_takes(cli, files, tmp_path):
    path, run, out = files
    page, numbers = tmp_path / "page.md", tmp_path / "numbers.json"
    finished = cli("calibrate", path, run, "--out", out, "--fit", "work", "--json", numbers, "--report", page)
    assert finished.code == 0, finished.err
    for words in ("held-out", "TTFT", "projections", "beyond that the tables extrapolate"):
        assert words in finished.out
        assert words in page.read_text("utf-8")
    assert f"--cost tables:{out}" in finished.err
    found = json.loads(numbers.read_text("utf-8"))
    assert (found["format"], found["version"]) == ("lengthwise.calibration", 1)
    (work,) = [p for p in found["parameters"] if p["name"] == "work"]
    assert work["low"] <= 1.3 <= work["high"]
    assert cost.load(out).evidence.source == found["tables"]["source"]
    assert cli("simulate", path, "--cost", f"tables:{out}", "--quiet") == (0, "", "")


def test_where_runs_come_from_stands_before_all_numbers(cli, files, tmp_path):
    path, run, out = files
    for page in (tmp_path / "page.md", None):
        finished = cli("calibrate", path, run, "--out", out, "--fit", "work", *(("--report", page) if page else ()))
        text = page.read_text("utf-8") if page else finished.out
        message = " ".join(text.split())
        assert message.count("the origin of these runs is unknown") == 1
        assert message.index("the origin of these runs is unknown") < message.index("held-out requests")


def test_tables_go_to_a_file_of_that_name(cli, files, tmp_path):
    path, run, _ = files
    finished = cli("calibrate", path, run, "--out", tmp_path / "c.txt")
    assert finished.code == 2
    assert f"Give {tmp_path / 'c.npz'}" in finished.err


def test_unfittable_counters_are_reported_unless_not_requested(cli, files, tmp_path):
    path, run, out = files
    retained = measure.read_records(run)
    records = retained.records
    at_s = np.arange(0.0, records.end_s, 1.0)
    reported = replace(
        retained, metadata={"metrics": {"at_s": at_s.tolist(), "vllm:num_requests_running": [1] * len(at_s)}}
    )
    measure.write_records(reported, tmp_path / "scraped.parquet")
    words = ("calibrate", path, tmp_path / "scraped.parquet", "--out", out, "--fit", "work")
    unread = "were not fitted: they lack vllm:iteration_tokens_total_count"
    assert unread in " ".join(cli(*words).out.split())
    assert "counters" not in cli(*words, "--scrape", "no").out


def test_a_page_shows_what_changed_without_fetching_anything(cli, files, tmp_path):
    path, run, out = files
    page = tmp_path / "page.html"
    finished = cli("calibrate", path, run, "--out", out, "--fit", "work", "--report", page)
    assert finished.code == 0, finished.err
    text = page.read_text("utf-8")
    assert text.index('<dl class="numbers">') < text.index("<figure")
    for words in ("default-src 'none'", "held out", "projections", "beyond that the tables extrapolate"):
        assert words in text
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', text, re.DOTALL)[1])
    assert [figure["id"].split("-")[-1] for figure in figures] == ["ttft", "tpot", "jct"]
    measured, before, after = (np.array(line) for line in figures[1]["curves"])
    assert np.abs(after / measured - 1).mean() < np.abs(before / measured - 1).mean() / 3


def test_one_variant_of_several_is_calibrated_by_name(cli, files):
    path, run, out = files
    path.write_text(
        SCENARIO + '[[variants]]\nname = "small"\n[variants.engine]\nmax_model_len = 512\n'
        '[[variants]]\nname = "as it ran"\n',
        "utf-8",
    )
    words = ("calibrate", path, run, "--out", out, "--fit", "work")
    for more, reported in (
        ((), "small, as it ran). Name the measured one"),
        (("--variant", "large"), "has no variant 'large'"),
        (("--variant", "small"), "max_model_len"),
    ):
        finished = cli(*words, *more)
        assert (finished.code, out.exists()) == (2, False)
        assert reported in finished.err
    assert cli(*words, "--variant", "as it ran", "--quiet").code == 0


@pytest.mark.parametrize(
    ("more", "report"),
    [
        (["--fit", "wrok"], "work"),
        (["--set", "engine.max_model_len=512"], "max_model_len"),
        (["--iterations", "none.log"], "log to read"),
        (["--scrape", "yes"], "scrape must be one of auto, no"),
        (["--holdout", "none.parquet"], "none.parquet"),
    ],
)
def test_unusable_input_is_reported_in_one_sentence(cli, files, more, report):
    path, run, out = files
    finished = cli("calibrate", path, run, "--out", out, *more)
    assert finished.code == 2
    assert report in finished.err
    assert "Traceback" not in finished.err
    assert not out.exists()


def test_a_simulated_run_is_refused(cli, files, tmp_path):
    path, _, out = files
    finished = cli("calibrate", path, tmp_path / "simulated.parquet", "--out", out)
    assert finished.code == 2
    assert "--force" in finished.err


@pytest.mark.slow
def test_tables_that_are_worse_than_those_given_are_not_written_unasked(cli, files, tmp_path):
    """The run that is held out was of the tables given: whatever is fitted to the other one is worse."""
    path, run, out = files
    words = ("calibrate", path, run, "--holdout", tmp_path / "as_given.parquet", "--fit", "work", "--out", out)
    finished = cli(*words)
    assert finished.code == 2
    assert "--force" in finished.err
    assert finished.out.startswith("WORSE than the tables given: TTFT")
    assert "WORSE" not in finished.err
    assert "(see above)" in finished.err
    assert not out.exists()
    assert "WORSE than the tables given: TTFT" in cli(*words, "--quiet").err
    forced = cli(*words, "--force")
    assert forced.code == 0
    assert forced.out.startswith("WORSE than the tables given: TTFT")
    assert out.exists()


def test_a_run_is_not_held_out_from_itself(cli, files):
    path, run, out = files
    finished = cli("calibrate", path, run, "--holdout", run, "--out", out, "--force")
    assert finished.code == 2
    assert "given once" in finished.err
    assert not out.exists()


def test_doubtful_runs_are_reported_all_at_once_and_by_their_files(cli, files, tmp_path):
    path, run, out = files
    good = measure.read_records(run)
    late, cut = tmp_path / "late.parquet", tmp_path / "cut.parquet"
    measure.write_records(replace(good, warnings=("the client was late",)), late)
    other = measure.read_records(tmp_path / "as_given.parquet")
    measure.write_records(replace(other, errors={"http 503": 7}), cut)
    finished = cli("calibrate", path, run, late, "--holdout", cut, "--out", out)
    assert finished.code == 2
    assert "2 of 3 have warnings" in finished.err
    assert "\n  late.parquet: the client was late" in finished.err
    assert "\n  cut.parquet: 7 requests failed of http 503" in finished.err


def test_runs_of_a_deployment_are_known_by_its_shape_whatever_the_server_calls_the_model(cli, files, tmp_path):
    path, run, out = files
    good, own = measure.read_records(run), shape_facts(catalog.model("llama-3-8b"))
    renamed, other = tmp_path / "renamed.parquet", tmp_path / "other.parquet"
    behind = {"model": "whatever", "model_shape": own, "gpu": "H100", "tp": 1}
    measure.write_records(replace(good, metadata={"model": "gpt2", "deployment": behind}), renamed)
    changed = behind | {"model_shape": own | {"layers": 16}}
    measure.write_records(replace(good, metadata={"model": "model", "deployment": changed}), other)
    finished = cli("calibrate", path, other, "--out", out)
    assert finished.code == 2
    assert "it is of the model whatever, and the deployment's is llama-3-8b: layers 16 for 32" in finished.err
    twice = cli("calibrate", path, renamed, "--holdout", renamed, "--out", out)
    assert (
        "given once, to be fitted or held out; renamed.parquet 1 and renamed.parquet 2 are the same" in twice.err
    )  # and no warning about the model
