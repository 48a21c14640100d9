"""Laws 11 to 14: same input same bytes, no look at the future, no look at the true lengths."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from digest import bytes_of, fixed_runs
from hypothesis import assume, given
from hypothesis import strategies as st
from observers import LAW, longest_output, run, uses
from worlds import deployments, workloads

from lengthwise.policy import PREDICTION_ARGUMENTS, known
from lengthwise.policy.contracts import ARGUMENTS
from lengthwise.schema.records import Status

LATE = st.sampled_from([0.01, 0.03, 0.1, 0.4, 1.0])


@LAW
@given(workloads(), deployments(), st.integers(0, 3))
def test_same_input_same_bytes(workload, deployment, seed):
    before = bytes_of(workload)
    first = bytes_of(run(workload, deployment, seed=seed))
    assert bytes_of(run(workload, deployment, seed=seed)) == first
    assert bytes_of(workload) == before, "a run leaves its workload as it was"


def test_same_bytes_in_another_process():
    env = os.environ | {"PYTHONHASHSEED": "12345"}
    program = [sys.executable, str(Path(__file__).with_name("digest.py"))]
    result = subprocess.run(program, env=env, capture_output=True, text=True, check=True, timeout=300)
    assert result.stdout.strip() == hashlib.sha256(fixed_runs()).hexdigest()


@LAW
@given(workloads(), deployments(), LATE)
def test_a_time_limit_cuts_and_changes_nothing_before(workload, deployment, limit_s):
    complete, cut = run(workload, deployment), run(workload, deployment, time_limit_s=limit_s)
    w, c = complete.requests, cut.requests
    for column in ("scheduled_s", "first_token_s", "finished_s"):
        full, short = getattr(w, column), getattr(c, column)
        np.testing.assert_array_equal(short, np.where(full <= limit_s, full, np.nan))
    seen = complete.steps.start_s <= limit_s
    for field in dataclasses.fields(complete.steps):
        column = field.name
        np.testing.assert_array_equal(getattr(cut.steps, column), getattr(complete.steps, column)[seen])


@LAW
@given(workloads(), deployments(), LATE, st.integers(0, 2**32 - 1))
def test_no_decision_depends_on_an_output_still_to_come(workload, deployment, limit_s, seed):
    """Requests that are still running at a time may have any longer output: until then all is the same."""
    workload = dataclasses.replace(workload, prefixes=None)  # the prompt of a later turn contains the output
    before = run(workload, deployment, time_limit_s=limit_s)
    produced, longest = before.requests.output_tokens, longest_output(workload, deployment)
    running = before.requests.status == Status.UNFINISHED
    assume(running.any())
    other = produced + np.random.default_rng(seed).integers(1, 300, len(workload))
    assert (longest[running] > produced[running]).all()
    secret = np.where(running, other, workload.output_tokens)
    changed = dataclasses.replace(workload, output_tokens=secret)
    after = run(changed, deployment, time_limit_s=limit_s)
    assert bytes_of(after) == bytes_of(before)


@pytest.mark.parametrize("axis", sorted(ARGUMENTS))
def test_no_policy_is_given_the_true_output(axis):
    assert not [name for name in ARGUMENTS[axis] if "output" in name]
    for policy in known(axis).values():
        assert set(policy.arguments) <= set(ARGUMENTS[axis])
        assert inspect.getclosurevars(policy.function).nonlocals == {}


@pytest.mark.slow
@LAW
@given(workloads(), deployments(), st.integers(0, 2**32 - 1))
def test_unused_predictions_change_nothing(workload, deployment, seed):
    assume(not any(uses(deployment, argument) for argument in (*PREDICTION_ARGUMENTS, "service_tokens", "tokens")))
    predicted = np.random.default_rng(seed).uniform(0, 500, len(workload))
    other = dataclasses.replace(workload, predicted_tokens=predicted, predictions=None)
    without = dataclasses.replace(workload, predicted_tokens=None, predictions=None)
    result = [bytes_of(run(w, deployment)) for w in (workload, other, without)]
    assert result[0] == result[1] == result[2]


@LAW
@given(workloads(), deployments(), LATE, st.integers(0, 50))
def test_keeping_a_log_changes_nothing(workload, deployment, limit_s, max_log_steps):
    logged = run(workload, deployment, time_limit_s=limit_s)
    brief = run(workload, deployment, time_limit_s=limit_s, max_log_steps=max_log_steps)
    if brief.steps is None:
        gaps = dataclasses.replace(logged.gaps, gap_s=None, count=None)
        logged = dataclasses.replace(logged, steps=None, gaps=gaps)
    else:
        assert len(brief.steps.start_s) <= max_log_steps
    assert bytes_of(brief) == bytes_of(logged)
