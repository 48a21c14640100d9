"""A file of records is a trace, too: the requests that were asked for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lengthwise import ClosedLoop, Poisson, deploy, preset, simulate
from lengthwise.measure import write_records
from lengthwise.schema.records import RunResult
from lengthwise.workload import read

DEPLOYMENT = deploy("opt-125m", "A100-80GB")


@pytest.mark.parametrize("arrivals", [Poisson(2.0), ClosedLoop(4)], ids=["open", "closed"])
def test_the_requests_of_a_run_are_read_as_requested(tmp_path, arrivals):
    requested = preset("chat-1m").generate(40, arrivals, seed=3)
    records = simulate(requested, DEPLOYMENT, time_limit_s=3.0)  # not all end: fewer tokens came than were asked for
    assert (records.requests.output_tokens < requested.output_tokens).any()
    write_records(RunResult(records, replace(requested, name="requested"), "simulate"), tmp_path / "run.parquet")
    again = read(tmp_path / "run.parquet")
    for column in ("arrival_s", "prompt_tokens", "output_tokens"):
        np.testing.assert_array_equal(getattr(again, column), getattr(requested, column))
    assert (again.concurrency, again.name) == (requested.concurrency, "requested")
