"""What ``lengthwise serve --demo`` takes."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--demo", "--mode", "fcfs"], "--mode: does not go with --demo, which takes only --engine-python, --port"),
        (["--demo", "--check"], "--check: does not go with --demo"),
        (["--demo", "--log-json"], "--log-json: does not go with --demo"),
        (["--demo", "--log-level", "info"], "--log-level: does not go with --demo"),
        (["--demo", "--log-requests"], "--log-requests: does not go with --demo"),
        (["--demo", "--quiet"], "--quiet: does not go with --demo"),
        (["--demo", "gateway.toml"], "CONFIG: does not go with --demo"),
        (["--demo", "--report", "day.jsonl"], "--report: does not go with --demo"),
        (["--demo", "--hash-key"], "does not go with"),
        (["--demo", "--admin-port", "none"], "admin pages"),
        (["--engine-python", "python"], "goes with --demo"),
    ],
)
def test_what_does_not_go_with_the_demo_is_refused(given, message, cli):
    finished = cli("serve", *given)
    assert finished.code == 2
    assert message in finished.err


def test_a_missing_interpreter_exits_with_2(tmp_path, cli):
    finished = cli("serve", "--demo", "--engine-python", tmp_path / "none")
    assert finished.code == 2
    assert "must exist" in finished.err
