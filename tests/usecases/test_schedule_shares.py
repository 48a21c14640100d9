"""Of how many requests a run asks whether they met the bound."""

from __future__ import annotations

import json

import pytest

from lengthwise import config
from lengthwise.schedule import TaskLengths
from lengthwise.schema.errors import InputError
from lengthwise.usecases import schedule_plan
from lengthwise.usecases.schedule_plan import share_of
from lengthwise.usecases.schedule_run import quantile, within_bound

EVEN = TaskLengths.from_samples([8] * 10, range(1, 11))
"""Outputs of 1 to 10 tokens, equally many."""


@pytest.mark.parametrize("level", [0.5, 0.9, 0.99, 0.999])
@pytest.mark.parametrize("task", [EVEN, TaskLengths.fixed(8, 100), TaskLengths.from_preset("exegpt-s")])
def test_of_a_quantile_it_is_the_quantiles(task, level):
    assert share_of(task, task.output_quantile(level), level) == level


def test_of_a_fixed_length_it_is_all_shorter_and_the_level_of_those_as_long():
    assert share_of(EVEN, 5, 0.99) == pytest.approx(0.4 + 0.099)
    assert share_of(EVEN, 10, 0.9) == pytest.approx(0.9 + 0.09)
    assert share_of(EVEN, 11, 0.9) == 0.9


def test_outputs_of_one_length_can_be_sure_of_their_bound():
    """The highest latency of all has no upper end, however many requests are played."""
    latencies = [1.0 + n / 1000 for n in range(1000)]
    assert within_bound(5.0, quantile(latencies, 1.0)) == (True, False)
    assert within_bound(5.0, quantile(latencies, share_of(TaskLengths.fixed(8, 100), 100, 0.99))) == (True, True)


def test_a_plans_file_states_its_level(tmp_path):
    path = tmp_path / "fixed.toml"
    path.write_text("""
[workload]
prompt = { kind = "fixed", tokens = 8 }
output = { kind = "fixed", tokens = 20 }
request_rate = 1
[deployment]
model = "opt-13b"
gpu = "A40"
[run]
model_draws = 0
[schedule]
bound_for = "p95"
strategies = ["rra"]
""")
    requested = config.load(path)
    made = schedule_plan.planned_run(requested)
    assert (made.share, made.bound.level) == (0.95, 0.95)
    reported = {
        "format": "lengthwise.schedule",
        "version": 1,
        "chosen": vars(made.row),
        "bound_s": None,
        "quantile_tokens": 20,
    }
    for level, share in ((0.95, 0.95), (None, 0.99)):
        (tmp_path / "plan.json").write_text(json.dumps(reported | ({"level": level} if level else {})))
        assert schedule_plan.planned_run(requested, tmp_path / "plan.json").share == share
    (tmp_path / "plan.json").write_text(json.dumps(reported | {"level": 2}))
    with pytest.raises(InputError, match="level is 2"):
        schedule_plan.planned_run(requested, tmp_path / "plan.json")
