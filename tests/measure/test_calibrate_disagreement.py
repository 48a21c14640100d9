"""Runs that surely disagree with tables of which nothing was moved are no calibration."""

from __future__ import annotations

import pytest

from lengthwise import deploy
from lengthwise.cli._calibrate_page import require_help
from lengthwise.measure.calibrate import Calibration, Parameter, Score
from lengthwise.schema.errors import InputError


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
