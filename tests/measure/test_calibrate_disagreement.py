"""Runs that surely disagree with tables, moved or not, are no calibration; nor is who they are of taken for told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lengthwise import deploy
from lengthwise.cli._calibrate_page import require_help
from lengthwise.measure import read_records
from lengthwise.measure.calibrate import Calibration, Parameter, Score, calibrate
from lengthwise.measure.calibrate._checks import origin_notes
from lengthwise.measure.calibrate._runs import run_of
from lengthwise.schema.errors import InputError

KEPT = Path(__file__).parents[2] / "benchmarks" / "results" / "live" / "vllm"


def found(*, value: float, low: float, high: float) -> Calibration:
    """One parameter that was 1 before, and one mean of held-out requests with its interval."""
    work = Parameter("work", "token work", "x", value, 0.1, 2.0, 1.0, told=True, effect=0.5)
    return Calibration(
        tables=deploy("opt-125m", "H100").cost,
        parameters=(work,),
        scores=(Score("half", "tpot", "mean", 0.01, 1.7, (low + high) / 2, low, high),),
        client_s=0.0,
        log_sd=0.1,
        split="on half",
        fitted=100,
        held_out=50,
        simulations=10,
    )


def test_a_sure_disagreement_with_nothing_moved_is_an_error_unless_one_insists():
    lost = found(value=1.0, low=1.2, high=2.2)
    with pytest.raises(InputError, match=r"TPOT by \+170% on half.*--iterations"):
        require_help(lost, force=False, shown=False)
    require_help(lost, force=True, shown=False)


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [(1.0, -0.3, 0.6), (1.0, 0.02, 0.05), (0.5, 1.2, 2.2)],
    ids=["unsure", "small", "moved"],
)
def test_what_noise_explains_and_what_was_moved_is_written(value, low, high):
    require_help(found(value=value, low=low, high=high), force=False, shown=False)


@pytest.mark.parametrize(
    ("value", "low", "high", "doubted"),
    [
        (4.0, 0.3, 0.5, True),
        (0.25, -0.6, -0.3, True),
        (2.5, 0.3, 0.5, False),
        (4.0, 0.12, 0.3, False),
        (4.0, -0.1, 0.9, False),
    ],
    ids=["slower", "faster", "moved little", "near enough", "unsure"],
)
def test_tables_that_were_moved_far_and_are_far_off_are_doubted(value, low, high, doubted):
    doubt = found(value=value, low=low, high=high).doubt
    assert bool(doubt) is doubted
    assert not doubted or f"token work to {value:g} times" in doubt


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({}, False),
        ({"model": "tiny"}, False),
        ({"model": "tiny", "deployment": {"gpu": "H100"}}, False),
        ({"model": "meta-llama/Llama-3.1-8B-Instruct"}, True),
        ({"deployment": {"model": "tiny", "model_shape": {"layers": 32}}}, True),
    ],
)
def test_runs_that_do_not_tell_their_model_are_noted_and_refused_where_they_fit_badly(
    facts, told, run, deployment
):
    far = found(value=4.0, low=0.3, high=0.5)
    runs = [run_of(replace(run, facts=facts), "half", 0.3)]
    noted = "where these runs come from is not told: half"
    allowed = " ".join(origin_notes(far, runs, deployment, ["doubts"]))
    assert "token work to 4 times" in allowed
    assert (noted in allowed) is not told
    near = origin_notes(found(value=1.2, low=-0.05, high=0.05), runs, deployment, ())
    assert [note.startswith(noted) for note in near] == [True] * (not told)
    if told:
        assert origin_notes(far, runs, deployment, ()) == origin_notes(far, runs, deployment, ["doubts"])
        return
    with pytest.raises(InputError, match=r"token work to 4 times.*TPOT by \+40% on half.*--allow-doubts"):
        origin_notes(far, runs, deployment, ())


def test_a_run_of_another_model_and_device_is_refused_unless_one_allows_it():
    """A tiny model on a CPU, of which the records tell neither, for a large one on a GPU."""
    other = read_records(KEPT / "wide-half-0.measured.parquet")
    deployment = deploy("llama-3.1-8b", "RTX-PRO-6000")
    with pytest.raises(InputError, match=r"these hardly are: the calibration moved .* is not told"):
        calibrate([other], deployment, fit=["work"])
    taken = calibrate([other], deployment, fit=["work"], allow=["doubts"])
    assert any("is not told" in note for note in taken.notes)
    assert any(taken.doubt in note for note in taken.notes)
