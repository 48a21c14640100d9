"""The command line as a user sees it: exit code, standard output, standard error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from lengthwise.cli import main, progress


class Finished(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def short_work(monkeypatch):
    """A busy machine makes no work long: lines of progress come only in the test of them."""
    monkeypatch.setattr(progress, "LINE_S", 1e9)
    monkeypatch.setattr(progress, "LONGEST_LINE_S", 1e9)


@pytest.fixture
def cli(capsys) -> Iterator[Callable[..., Finished]]:
    """Runs a command line in this process. What a command that fails leaves running ends within the test."""
    before = set(threading.enumerate())

    def run(*arguments: object) -> Finished:
        code = main([str(argument) for argument in arguments])
        caught = capsys.readouterr()
        return Finished(code, caught.out, caught.err)

    yield run
    for thread in threading.enumerate():
        if thread not in before and (thread.name == "plan" or "work_off" in thread.name):
            thread.join(60)


@pytest.fixture
def scenario_file(tmp_path):
    """A small scenario with two variants."""
    path = tmp_path / "small.toml"
    path.write_text(
        """
description = "Two schedulers"
[workload]
isl = { kind = "uniform", low = 20, high = 200 }
osl = 20
num_requests = 40
request_rate = 20
[deployment]
model = "llama-3-8b"
gpu = "H100"
[slo]
ttft = "1s"
[[variants]]
name = "one"
[[variants]]
name = "Two, too"
scheduler.policy = "orca"
"""
    )
    return path
