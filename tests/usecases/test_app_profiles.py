"""Profiles of applications: measured once, gone on with, and laid over what was assumed."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from app_profile_world import GPU, QUICK, ROWS, app, launcher, space, switch_times

from lengthwise import cost
from lengthwise.apps.app import Sampling
from lengthwise.apps.launch import EngineConfig
from lengthwise.apps.plan import SwitchTimes
from lengthwise.apps.plan.space import HOWS
from lengthwise.schema.errors import EngineError, InputError, UnknownNameError
from lengthwise.usecases.app_profile import profile_app, profiled
from lengthwise.usecases.app_profile_folder import CostRow, read_profile, write_profile
from lengthwise.usecases.app_profile_measurement import ProfileOptions, ProfileTarget, SampleOutput, mean_over_rows

FEW = ProfileOptions(rows=4, times=2)


def what(tmp_path, **changes):
    loaded = launcher(tmp_path, **changes).models
    return ProfileTarget(app(), ROWS, loaded, space(gpus=1), QUICK)


def measured(one, folder, options=FEW):
    """(profile, the messages meanwhile); a tick a look at the clock."""
    reported = []
    found = profile_app(one, folder, options, report=reported.append, now_s=itertools.count().__next__)
    return found, reported


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """(folder, profile, messages) of a profile that was measured whole."""
    folder = tmp_path_factory.mktemp("profile")
    return folder, *measured(what(folder), folder / "out")


@pytest.mark.slow
def test_a_profile_holds_switches_and_lengths_of_every_model(first):
    folder, found, reported = first
    assert found.notes == []
    for name in ("writer", "judge"):
        row = found.profile.switch(name, (GPU, 1, 1))
        assert (len(row.start_s), len(row.stop_s), len(row.sleep_s), len(row.wake_s)) == (2, 2, 2, 2)
        length = found.profile.length(name)
        assert (length.rows, length.outputs) == (4, 4)
        lines = (folder / "out" / f"lengths-{name}.csv").read_text().splitlines()
        assert len(lines) == 5
        assert length.mean_tokens == np.mean([int(line.split(",")[3]) for line in lines[1:]])
    assert read_profile(folder / "out") == found.profile
    assert set(switch_times(folder / "out")) == {(name, GPU, 1, 1, how) for name in ("writer", "judge") for how in HOWS}
    assert "writer: started and stopped 2 of 2 times on A100-80GB, tp=1" in reported
    assert "running 4 of 6 rows for their output lengths" in reported


@pytest.mark.slow
def test_existing_measurements_are_not_repeated_unless_something_changed(first, tmp_path):
    folder, found, _ = first
    again, reported = measured(what(folder), folder / "out")
    assert (again.profile, again.notes) == (found.profile, found.notes)
    assert len(reported) == 3
    assert all(line.endswith("already measured") for line in reported)


@pytest.mark.slow
def test_a_profile_that_was_killed_goes_on_where_it_was(tmp_path):
    class Killed(BaseException):
        """No part of the profile may hold it up."""

    def dies(words):
        if words.startswith("judge: started and stopped 1"):
            raise Killed

    with pytest.raises(Killed):
        profile_app(what(tmp_path), tmp_path / "out", FEW, report=dies)
    assert [one.model for one in read_profile(tmp_path / "out").switches] == ["writer"]
    found, reported = measured(what(tmp_path), tmp_path / "out", replace(FEW, rows=0))
    assert reported[0] == "writer: switching times on A100-80GB, tp=1 are already measured"
    assert [one.model for one in found.profile.switches] == ["writer", "judge"]


@pytest.mark.slow
def test_another_command_is_measured_again_and_so_is_everything_on_repeat(tmp_path):
    few = replace(FEW, rows=0, times=1, models=("judge",))
    before, _ = measured(what(tmp_path), tmp_path / "out", few)
    other, reported = measured(what(tmp_path, more="--fixed-s 0.003"), tmp_path / "out", few)
    assert reported == ["judge: started and stopped 1 of 1 times on A100-80GB, tp=1"]
    assert other.profile.switches[0].source != before.profile.switches[0].source
    _, reported = measured(what(tmp_path, more="--fixed-s 0.003"), tmp_path / "out", replace(few, repeat=True))
    assert reported == ["judge: started and stopped 1 of 1 times on A100-80GB, tp=1"]


def test_all_shapes_are_measured_where_requested(tmp_path):
    both = replace(what(tmp_path), space=space(gpus=2))
    found, _ = measured(both, tmp_path / "out", ProfileOptions(("writer",), rows=0, times=1, shapes="all"))
    assert [(one.gpu, one.tp, one.pp) for one in found.profile.switches] == [(GPU, 1, 1), (GPU, 2, 1)]
    _, _, notes = profiled(app(), space(gpus=2), tmp_path / "out")
    assert "switching times of writer are measured" in notes
    assert "switching times of judge were not measured; they are assumed" in notes


def test_invalid_options_are_reported_before_anything_starts(tmp_path):
    with pytest.raises(UnknownNameError, match="Did you mean: writer"):
        measured(what(tmp_path), tmp_path / "out", ProfileOptions(("writter",)))
    with pytest.raises(UnknownNameError, match="choice of shapes"):
        ProfileOptions(shapes="some")
    with pytest.raises(InputError, match="rows must be at least 0 and times at least 1; got 3 and 0"):
        ProfileOptions(rows=3, times=0)
    assert not (tmp_path / "out").exists()


def test_a_model_whose_engine_does_not_start_is_reported_and_measurements_stay(tmp_path):
    good = what(tmp_path)
    broken = EngineConfig("judge", command="python3 -c 'import sys; sys.exit(\"no such weights\")' {port}")
    with pytest.raises(EngineError, match="no such weights"):
        measured(replace(good, loaded=[good.loaded[0], broken]), tmp_path / "out")
    assert [one.model for one in read_profile(tmp_path / "out").switches] == ["writer"]


def test_measurements_replace_assumptions_and_missing_ones_are_reported(first):
    folder, found, _ = first
    assumed = space(gpus=2)
    after, over, notes = profiled(app(), assumed, folder / "out")
    for model in after.models:
        row = found.profile.length(model.name)
        middle = (np.arange(1000) + 0.5) / 1000
        assert model.lengths.quantile(middle).mean() == pytest.approx(row.mean_tokens, rel=0.01)
        assert model.cost == "roofline"
    plan = over.plans(0)[0]
    assert over.seconds(plan, "start") == found.profile.switch_times().measured["writer", GPU, 1, 1, "start"]
    wide = next(one for one in over.plans(0) if one.tp == 2)
    assert over.seconds(wide, "start") == assumed.seconds(wide, "start")
    assert over.times.can_wake("writer", plan)
    assert not over.times.can_wake("writer", wide)
    reported = "\n".join(notes)
    assert "lengths of writer are measured: 4 outputs" in reported
    assert "costs of writer were not calibrated; roofline is used" in reported
    assert (
        "switching times of writer are measured except for tp=2, pp=1 on A100-80GB, where they are assumed" in reported
    )
    given = SwitchTimes({("other", GPU, 1, 1, "start"): 3.0})
    _, retained, _ = profiled(app(), replace(assumed, times=given), folder / "out")
    assert retained.times.measured["other", GPU, 1, 1, "start"] == 3.0


def test_lengths_of_a_changed_application_are_warned_about(first):
    folder, _, _ = first
    changed = app()
    changed = replace(changed, calls=[replace(one, sampling=Sampling(max_tokens=9)) for one in changed.calls])
    _, _, notes = profiled(changed, space(), folder / "out")
    assert notes[0].startswith("the application has changed since its lengths were measured")


def test_calibrated_costs_are_taken_only_where_plans_have_no_other_shape(first, tmp_path):
    _, found, _ = first
    costs = space(gpus=1).deployment(space(gpus=1).plans(0)[0]).cost
    cost.save(costs, tmp_path / "cost-writer.npz")
    write_profile(tmp_path, found.profile.with_row(CostRow("writer", GPU, 1, 1, "x", 104, 0.4, 0.03)))
    after, over, notes = profiled(app(), space(gpus=1), tmp_path)
    assert after.models[0].cost == over.models[0].cost == f"tables:{tmp_path / 'cost-writer.npz'}"
    assert over.deployment(over.plans(0)[0]).cost.layer_s.tolist() == costs.layer_s.tolist()
    assert "costs of writer are calibrated: the error on single requests is 3%, before 40%" in notes
    after, _, notes = profiled(app(), space(gpus=2), tmp_path)
    assert after.models[0].cost == "roofline"
    assert any("costs of writer are calibrated for tp=1, pp=1 on A100-80GB only" in one for one in notes)


def test_what_one_command_starts_for_every_plan_takes_as_long_under_each(first, tmp_path):
    folder, found, _ = first
    costs = space(gpus=1).deployment(space(gpus=1).plans(0)[0]).cost
    cost.save(costs, tmp_path / "cost-writer.npz")
    write_profile(tmp_path, found.profile.with_row(CostRow("writer", GPU, 1, 1, "x", 104, 0.4, 0.03)))
    for model in ("writer", "judge"):
        (tmp_path / f"lengths-{model}.csv").write_bytes((folder / "out" / f"lengths-{model}.csv").read_bytes())
    loaded = launcher(folder).models
    after, over, notes = profiled(app(), space(gpus=2), tmp_path, loaded)
    assert after.models[0].cost.startswith("tables:")
    wide = next(one for one in over.plans(0) if one.tp == 2)
    for how in ("start", "wake"):
        assert over.seconds(wide, how) == over.seconds(over.plans(0)[0], how)
    assert "switching times of writer are measured" in notes
    degrees = [replace(one, command=f"{one.command} --max-num-seqs {{tp}}") for one in loaded]
    after, _, notes = profiled(app(), space(gpus=2), tmp_path, degrees)
    assert after.models[0].cost == "roofline"
    assert any("except for tp=2" in one for one in notes)


def test_a_folder_without_a_profile_is_named(tmp_path):
    with pytest.raises(InputError, match=r"it has no profile\.json\. Measure one: lengthwise app profile"):
        profiled(app(), space(), tmp_path)


def test_a_mean_over_rows_has_the_interval_of_rows():
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(400):
        level = rng.uniform(10, 100, 30)
        message = [
            SampleOutput("c", row, 1, int(rng.poisson(level[row])), "stop")
            for row in range(30)
            for _ in range(1 + row % 3)
        ]
        found = mean_over_rows(message)
        truth = 55.0
        inside += found.low <= truth <= found.high
    assert 0.90 <= inside / 400 <= 0.98
    assert not mean_over_rows([SampleOutput("c", 0, 1, 5, "stop")]).has_interval


@pytest.mark.slow
def test_calibrated_tables_are_written_and_a_calibration_that_fails_is_a_note(tmp_path):
    wanted = ProfileOptions(("writer",), rows=6, times=1, calibrate=True)
    found, _ = measured(what(tmp_path, more="--fixed-s 0.01"), tmp_path / "out", wanted)
    assert found.notes == []
    row = found.profile.cost("writer")
    assert row.after < row.before / 3
    after, _, _ = profiled(app(), space(gpus=1), tmp_path / "out")
    assert after.models[0].cost.endswith("cost-writer.npz")
    again, reported = measured(what(tmp_path, more="--fixed-s 0.01"), tmp_path / "out", wanted)
    assert again.profile == found.profile
    assert "writer: cost tables are already calibrated" in reported
    unknown, _ = measured(what(tmp_path), tmp_path / "other", replace(wanted, rows=0))
    assert unknown.notes == ["writer was not calibrated: its lengths must be measured before (rows above 0)"]
    assert unknown.profile.cost("writer") is None
