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
    ended = cli("serve", *given)
    assert ended.code == 2
    assert message in ended.err


def test_an_interpreter_that_is_not_there_ends_with_2(tmp_path, cli):
    ended = cli("serve", "--demo", "--engine-python", tmp_path / "none")
    assert ended.code == 2
    assert "must exist" in ended.err
