"""The short form of every benchmark that needs neither a GPU, an engine nor the network runs to its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("LENGTHWISE_SHARED", ROOT.parent / "shared"))
FIDELITY = SHARED / "data" / "traces"


WITHOUT_DATA = (
    "apps --only greedy",
    "cost",
    "engines --only speed",
    "exegpt --only choices",
    "gateway --only rerank",
    "kv --only router_gain.agents",
    "lengths --only elis.sentences",
    "lengths --only multibin.theory",
    "search",
    "simulate",
    "start",
    "ui",
)
RECORDED = (
    "deployments --only brackets",
    "fidelity --only recorded",
    "gateway --only gain_emulated",
    "lengths --only elis",
    "lengths --only multibin.gsm8k,multibin.predictor",
    "lengths --only predict",
)


def test_every_benchmark_has_a_short_form_in_these_tests() -> None:
    """A campaign on a GPU has none; ``tests/measure/test_gpu_campaign.py`` runs its parts."""
    benchmarks = {path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")} - {"gpu_campaign"}
    assert benchmarks == {words.split()[0] for words in WITHOUT_DATA + RECORDED}


@pytest.mark.slow  # two minutes of CPU time together
@pytest.mark.parametrize("words", WITHOUT_DATA)
def test_the_short_form_of_a_benchmark_runs(words: str, tmp_path: Path) -> None:
    name, *options = words.split()
    environment = os.environ | {"LENGTHWISE_SHARED": str(tmp_path)}  # without recorded data, whose sections are skipped
    command = [sys.executable, ROOT / "benchmarks" / f"{name}.py", "--quick", "--json", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert rows
    assert all(row["name"] and "skipped" not in (row.get("details") or {}) for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("words", RECORDED)
def test_a_benchmark_of_recorded_data_runs_or_reports_what_it_lacks(words: str, tmp_path: Path) -> None:
    if not FIDELITY.is_dir():
        pytest.skip(f"no recorded data in {SHARED}")
    name, *options = words.split()
    command = [sys.executable, ROOT / "benchmarks" / f"{name}.py", "--quick", "--json", *options, "--shared", SHARED]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [json.loads(line) for line in done.stdout.splitlines()]
