"""lengthwise schedule --baselines: other systems beside the choice."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest

from lengthwise.cli import progress
from lengthwise.schema.schedule import SYSTEM_NAMES


@pytest.fixture
def brief(tmp_path):
    """Few tokens, so that all systems are played out in no time."""
    path = tmp_path / "brief.toml"
    path.write_text(
        """
[workload]
prompt = { kind = "uniform", low = 20, high = 90 }
output = { kind = "uniform", low = 1, high = 6 }
request_rate = 1
[deployment]
model = "opt-13b"
gpu = "A40"
node = "pcie4-4"
[engine]
gpu_memory_utilization = 0.62
[schedule]
latency_bound = "1s"
"""
    )
    return path


def requested(cli, *words):
    finished = cli("schedule", *words, "--json", "-")
    assert finished.code == 0, finished.err
    return json.loads(finished.out)


@pytest.mark.slow
def test_systems_are_requested_by_name_or_in_the_file(cli, brief):
    reported = requested(cli, brief, "--baselines", "ORCA, fastertransformer")
    assert [one["system"] for one in reported["others"]] == ["orca", "fastertransformer"]
    assert all(one["best"]["latency_high_s"] <= 1 for one in reported["others"])
    same = requested(cli, brief, "--set", 'schedule.baselines=["orca", "fastertransformer"]')
    assert same["others"] == reported["others"]


@pytest.mark.slow
def test_configurations_are_reported_as_they_are_simulated(brief, monkeypatch, cli):
    reported = []

    @contextmanager
    def shown(*, quiet):
        yield lambda *at: None if quiet else reported.append(at)

    monkeypatch.setattr(progress, "simulating", shown)
    assert requested(cli, brief)["others"] == []
    assert reported == [], "nothing is played"
    (one,) = requested(cli, brief, "--baselines", "fastertransformer")["others"]
    assert reported == [(number, 0) for number in range(1, one["configurations"] + 1)]


@pytest.mark.slow
def test_all_of_them_stand_in_a_table(cli, brief):
    finished = cli("schedule", brief, "--baselines", "all")
    assert finished.code == 0, finished.err
    assert "Other systems on the same GPUs:" in finished.out
    assert all(name in finished.out for name in SYSTEM_NAMES.values())


def test_no_system_is_simulated_unless_requested(cli, brief):
    assert requested(cli, brief)["others"] == []


def test_an_unknown_system_is_reported_with_the_nearest(cli, brief):
    finished = cli("schedule", brief, "--baselines", "sarathy")
    assert finished.code == 2
    assert "Did you mean: sarathi" in finished.err
