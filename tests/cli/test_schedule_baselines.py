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


def asked(cli, *words):
    ended = cli("schedule", *words, "--json", "-")
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


def test_systems_are_asked_for_by_name_or_in_the_file(cli, brief):
    told = asked(cli, brief, "--baselines", "ORCA, fastertransformer")
    assert [one["system"] for one in told["others"]] == ["orca", "fastertransformer"]
    assert all(one["best"]["latency_high_s"] <= 1 for one in told["others"])
    same = asked(cli, brief, "--set", 'schedule.baselines=["orca", "fastertransformer"]')
    assert same["others"] == told["others"]


def test_configurations_are_told_as_they_are_played(brief, monkeypatch, cli):
    told = []

    @contextmanager
    def shown(*, quiet):
        yield lambda *at: None if quiet else told.append(at)

    monkeypatch.setattr(progress, "simulating", shown)
    assert asked(cli, brief)["others"] == []
    assert told == [], "nothing is played"
    (one,) = asked(cli, brief, "--baselines", "fastertransformer")["others"]
    assert told == [(number, 0) for number in range(1, one["configurations"] + 1)]


@pytest.mark.slow
def test_all_of_them_stand_in_a_table(cli, brief):
    ended = cli("schedule", brief, "--baselines", "all")
    assert ended.code == 0, ended.err
    assert "Other systems on the same GPUs:" in ended.out
    assert all(name in ended.out for name in SYSTEM_NAMES.values())


def test_without_being_asked_none_is_played(cli, brief):
    assert asked(cli, brief)["others"] == []


def test_an_unknown_system_is_told_with_the_nearest(cli, brief):
    ended = cli("schedule", brief, "--baselines", "sarathy")
    assert ended.code == 2
    assert "Did you mean: sarathi" in ended.err
