"""What profiles of applications measure: engines that come and go, lengths of a sample, and the book of both."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from app_profile_world import GPU, ROWS, app, launcher, space, switch_times

from lengthwise.apps.launch import EngineConfig, LocalLauncher
from lengthwise.schema.app import ModelPlan
from lengthwise.schema.errors import EngineError, InputError
from lengthwise.statistics import mean_estimate
from lengthwise.usecases.app_profile_folder import (
    PROFILE,
    AppProfile,
    LengthRow,
    SwitchRow,
    read_profile,
    write_profile,
)
from lengthwise.usecases.app_profile_measurement import (
    packed_stages,
    read_lengths,
    run_sample,
    sampled_rows,
    switch_seconds,
    uncensored,
    write_outputs,
)


class Scripted:
    """A launcher whose every act takes as long as its script specifies, on a clock of its own."""

    def __init__(self, start=7.0, sleep=0.5, wake=2.0, stop=1.5):
        self.now_s, self.takes, self.up = (100.0, {"start": start, "sleep": sleep, "wake": wake, "stop": stop}, 0)

    def act(self, what):
        self.now_s += self.takes[what]

    async def start(self, plan, gpus):
        self.act("start")
        self.up += 1
        return object()

    async def sleep(self, engine):
        if self.takes["sleep"] is None:
            return False
        self.act("sleep")
        return True

    async def wake(self, engine):
        if self.takes["wake"] is None:
            raise EngineError("it sleeps on")
        self.act("wake")

    async def stop(self, engine):
        self.up -= 1
        self.act("stop")


def test_every_act_is_timed_as_often_as_it_was_done():
    one, done = Scripted(), []
    plan = ModelPlan(0, GPU)
    found = switch_seconds(one, plan, (0,), times=3, now_s=lambda: one.now_s, report=done.append)
    assert found == {"start_s": (7.0,) * 3, "stop_s": (1.5,) * 3, "sleep_s": (0.5,) * 3, "wake_s": (2.0,) * 3}
    assert done == [1, 2, 3]
    awake = switch_seconds(Scripted(sleep=None), plan, (0,), times=2, now_s=itertools.count().__next__)
    assert awake["sleep_s"] == awake["wake_s"] == ()
    assert len(awake["start_s"]) == 2


def test_an_engine_that_does_not_wake_is_an_error_and_is_stopped():
    one = Scripted(wake=None)
    with pytest.raises(EngineError, match="it sleeps on"):
        switch_seconds(one, ModelPlan(0, GPU), (0,), times=3, now_s=lambda: one.now_s)
    assert one.up == 0


def test_real_processes_are_started_put_to_sleep_woken_and_stopped(tmp_path):
    clock = itertools.count().__next__
    own = launcher(tmp_path)
    found = switch_seconds(own, ModelPlan(0, GPU), (0,), times=2, now_s=clock)
    assert {name: len(values) for name, values in found.items()} == dict.fromkeys(found, 2)
    assert not own.running
    assert len(list((tmp_path / "logs").iterdir())) == 2
    num_running = switch_seconds(launcher(tmp_path, sleeps=False), ModelPlan(1, GPU), (0,), times=1, now_s=clock)
    assert num_running["wake_s"] == ()


def test_an_engine_that_does_not_start_reports_the_reason(tmp_path):
    broken = "python3 -c 'import sys; sys.exit(\"no such weights\")' {port}"
    own = LocalLauncher([EngineConfig("writer", command=broken)], tmp_path / "logs")
    with pytest.raises(EngineError, match="no such weights"):
        switch_seconds(own, ModelPlan(0, GPU), (0,), times=1, now_s=itertools.count().__next__)


def test_a_sample_runs_once_and_returns_the_same_when_resumed(tmp_path):
    found = []
    for _ in range(2):
        finished, message = run_sample(app(), ROWS, space(), launcher(tmp_path), tmp_path / "sample")
        assert finished.exit_code == 0
        found.append(message)
    assert found[0] == found[1]
    assert finished.resumed
    assert not finished.engines, "nothing was left to ask"
    for name, call in (("writer", "draft"), ("judge", "decision")):
        assert [(one.call, one.row) for one in found[0][name]] == [(call, row) for row in range(len(ROWS))]
        assert all(1 <= one.output_tokens <= 24 for one in found[0][name])
        assert all(one.finish_reason == "stop" or one.output_tokens == 24 for one in found[0][name])


def test_models_are_packed_as_they_have_room():
    from lengthwise.apps.expand import expand

    tasks = expand(app(), ROWS).tasks
    assert packed_stages(space(gpus=1), tasks) == ((ModelPlan(0, GPU),), (ModelPlan(1, GPU),))
    assert packed_stages(space(gpus=2), tasks) == ((ModelPlan(0, GPU), ModelPlan(1, GPU)),)


@given(st.integers(1, 400), st.integers(1, 60), st.integers(0, 9))
def test_a_sample_of_rows_has_each_at_most_once_in_order(count, most, seed):
    rows = sampled_rows(count, most, seed)
    assert len(rows) == min(count, most)
    assert (np.diff(rows) > 0).all()
    assert 0 <= rows[0] <= rows[-1] < count
    assert (rows == sampled_rows(count, most, seed)).all()


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 60))
def test_under_one_limit_the_estimate_is_what_was_seen(lengths, limit):
    complete = np.array(lengths)
    tokens, cut = np.minimum(complete, limit), complete >= limit
    found = uncensored(tokens, cut)
    seen, counts = np.unique(tokens, return_counts=True)
    assert list(found.tokens) == seen.tolist()
    assert np.allclose(found.weights, counts / len(tokens))


@given(st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=40))
def test_the_estimate_is_a_distribution_never_shorter_than_what_was_seen(outputs):
    tokens, cut = (np.array(column) for column in zip(*outputs, strict=True))
    found = uncensored(tokens, cut)
    weights = np.asarray(found.weights)
    assert np.isclose(weights.sum(), 1.0)
    for at in np.unique(tokens):
        assert weights[np.asarray(found.tokens) <= at].sum() <= np.mean(tokens <= at) + 1e-9


def test_lengths_behind_different_limits_are_found_again():
    """Half of the calls stop at 40 tokens, half at 400: cut ones tell that outputs are longer, not how long."""
    rng = np.random.default_rng(0)
    complete = rng.geometric(1 / 80, 40_000)
    limit = np.where(rng.random(len(complete)) < 0.5, 40, 400)
    tokens, cut = np.minimum(complete, limit), complete > limit
    found = uncensored(tokens, cut)
    drawn = found.quantile((np.arange(40_000) + 0.5) / 40_000)
    assert drawn.mean() == pytest.approx(np.minimum(complete, 400).mean(), rel=0.02)
    assert tokens.mean() < 0.75 * drawn.mean()


def test_lengths_are_read_as_they_were_written_and_bad_files_are_named(tmp_path):
    _, message = run_sample(app(), ROWS, space(), launcher(tmp_path), tmp_path / "sample")
    path = tmp_path / "lengths.csv"
    write_outputs(path, message["writer"])
    assert path.read_text().splitlines()[0] == "call,row,prompt_tokens,output_tokens,finish_reason"
    assert np.average(read_lengths(path).tokens, weights=read_lengths(path).weights) == pytest.approx(
        np.mean([one.output_tokens for one in message["writer"]])
    )
    path.write_text("call,tokens\nx,3\n")
    with pytest.raises(InputError, match=r"lengths\.csv must be a CSV with the columns call, row, prompt_tokens"):
        read_lengths(path)
    write_outputs(path, [])
    with pytest.raises(InputError, match="must hold at least one output"):
        read_lengths(path)


def test_a_book_is_read_as_it_was_written_a_row_each(tmp_path):
    row = SwitchRow("writer", GPU, 1, 1, "aa", (7.0, 9.0), (1.0, 1.0), (0.5,), (2.0,))
    wide = replace(row, tp=2, sleep_s=(), wake_s=())
    length = LengthRow("writer", "bb", 6, 12, 3, 20.5, 2.5)
    book = AppProfile().with_row(row).with_row(wide).with_row(length)
    book = book.with_row(replace(row, start_s=(8.0, 10.0)))
    write_profile(tmp_path, book)
    assert read_profile(tmp_path) == book
    assert len(book.switches) == 2
    assert switch_times(tmp_path) == {
        ("writer", GPU, 1, 1, "start"): 9.0,
        ("writer", GPU, 1, 1, "wake"): 2.0,
        ("writer", GPU, 1, 1, "stop"): 1.0,
        ("writer", GPU, 1, 1, "sleep"): 0.5,
        ("writer", GPU, 2, 1, "start"): 8.0,
        ("writer", GPU, 2, 1, "stop"): 1.0,
    }
    assert read_profile(tmp_path / "nowhere") == AppProfile()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 1, "switches": [{"x": 1}]}'])
def test_a_folder_that_holds_something_else_is_named(tmp_path, text):
    (tmp_path / PROFILE).write_text(text)
    with pytest.raises(InputError, match="is not the profile of an application"):
        read_profile(tmp_path)
    (tmp_path / PROFILE).write_text(json.dumps({"version": 9}))
    with pytest.raises(InputError, match="must be of version 1; it is of 9"):
        read_profile(tmp_path)


def test_a_mean_has_the_interval_of_students_t():
    found = mean_estimate([7.0, 9.0, 8.0])
    assert found.value == 8.0
    assert found.half_width == pytest.approx(4.302653 * 1.0 / np.sqrt(3), rel=1e-5)
    assert not mean_estimate([7.0]).has_interval
    assert np.isnan(mean_estimate([]).value)
