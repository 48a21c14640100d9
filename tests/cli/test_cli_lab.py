"""``lengthwise lab`` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SMALL = """
workload = { prompt = 50, output = { kind = "lognormal", mean = 40, cv = 1.0 }, request_rate = 1, num_requests = 60 }
deployment = { model = "opt-125m", gpu = "A100-80GB", num_blocks = 4096 }
engine = { max_num_seqs = 2, max_model_len = 1024 }
[lab]
policies = ["sjf"]
predictors = ["oracle", { kind = "lognormal_error", sigma = 0.5, name = "fair" }]
loads = [0.1, 3.0]
seeds = 3
"""
EXAMPLE = Path(__file__).parents[2] / "examples" / "lab-chat.toml"


@pytest.fixture
def small(tmp_path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return str(path)


def test_the_table_and_the_verdicts(cli, small) -> None:
    out = cli("lab", small)
    assert out.code == 0, out.err
    assert "10 % of capacity" in out.out
    assert "Worth it: sjf (fair) cuts mean JCT" in out.out
    assert "Not worth it at 10 % of capacity (batch 2)" in out.out


def test_json_to_standard_output_alone(cli, small) -> None:
    out = cli("lab", small, "--json", "-", "--set", "lab.loads=[3.0]", "--seeds", "2")
    reported = json.loads(out.out)
    assert (reported["format"], reported["seeds"]) == ("lengthwise.lab", 2)
    assert {cell["policy"] for cell in reported["cells"]} == {"fcfs", "oracle", "sjf"}


def test_files_are_written_completely_and_reported(cli, small, tmp_path) -> None:
    html, file = tmp_path / "lab.html", tmp_path / "lab.json"
    out = cli("lab", small, "--report", str(html), "--json", str(file), "--jobs", "1", "--set", "lab.loads=[3.0]")
    assert out.code == 0, out.err
    assert f"wrote {file}" in out.err
    assert "<!doctype html>" in html.read_text("utf-8")[:20]
    again = cli("lab", small, "--json", str(tmp_path / "two.json"), "--jobs", "2", "--set", "lab.loads=[3.0]", "-q")
    assert (again.out, again.err) == ("", "")
    assert (tmp_path / "two.json").read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "states"),
    [
        (("--set", "lab.loads=[-1.0]"), "lab.loads.0: must be above 0"),
        (("--set", "lab.policies=['nonsense']"), "nonsense"),
        (("--report", "absent/x.html"), "create it first"),
    ],
)
def test_bad_input_ends_with_two(cli, small, arguments, states) -> None:
    out = cli("lab", small, *arguments)
    assert out.code == 2
    assert states in out.err
    assert out.out == ""


def test_the_example_loads() -> None:
    from lengthwise import config

    requested = config.load(EXAMPLE)
    assert requested.lab is not None
    assert [p.title for p in requested.lab.policies] == ["SJF", "SJF, bounded", "ISRTF"]


def test_short_options_need_no_file(cli, tmp_path) -> None:
    trace = tmp_path / "trace.csv"
    rows = (f"{i / 9},40,{900 if i % 5 == 0 else 20}" for i in range(400))
    trace.write_text("\n".join(["timestamp,prompt_tokens,completion_tokens", *rows]))
    few = ("--set", "engine.max_num_seqs=2", "--set", "engine.max_model_len=1024", "--seeds", "2")
    out = cli("lab", "--model", "opt-125m", "--gpu", "A100-80GB", "--workload", str(trace), "--rate", "9", *few)
    assert out.code == 0, out.err
    assert "9 requests/s, batch 2" in out.out
    assert all(name in out.out for name in ("FCFS", "isrtf", "sigma 0.5", "sigma 1"))
    missing = cli("lab", "--model", "opt-125m")
    assert (missing.code, "--gpu" in missing.err) == (2, True)
