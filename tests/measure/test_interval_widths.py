"""How wide intervals are is scored, and ones that are just as wide as they need be score best."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
try:
    _widths = importlib.import_module("_widths")
finally:
    sys.path.remove(BENCHMARKS)


def test_the_score_is_the_width_and_what_lies_outside_many_times_over():
    assert _widths.interval_score(1.0, 0.5, 2.0, 0.95) == pytest.approx(1.5)
    assert _widths.interval_score(2.1, 0.5, 2.0, 0.95) == pytest.approx(1.5 + 40 * 0.1)
    assert _widths.interval_score(0.3, 0.5, 2.0, 0.9) == pytest.approx(1.5 + 20 * 0.2)


@pytest.mark.parametrize("level", [0.9, 0.95])
def test_normal_errors_in_intervals_of_their_own_spread_score_as_sharp_ones_do_and_others_worse(level):
    errors, at = np.random.default_rng(1).standard_normal(20_000), {0.9: 1.645, 0.95: 1.96}[level]
    scores = [np.mean([_widths.interval_score(x, -k * at, k * at, level) for x in errors]) for k in (0.7, 1.0, 1.5)]
    assert scores[1] / np.mean(np.abs(errors)) == pytest.approx(_widths.sharp(level), rel=0.02)
    assert min(scores) == scores[1]


def test_the_widest_is_named_with_where_it_reaches():
    each = {"high": {"ttft_p50": [0.45, 0.37, 0.17, 2.64], "tpot_p50": [0.1, 0.1, 0.08, 0.12]}}
    told = _widths.of_each(each, 0.95)
    assert told["widest"] == "ttft_p50 of high"
    assert told["widest_times"] == pytest.approx(2.64 / 0.17, abs=0.01)
    assert (told["widest_from"], told["widest_to"]) == pytest.approx((0.17 / 0.45, 2.64 / 0.45), abs=1e-3)
    score = (math.log(2.64 / 0.17) + math.log(1.5)) / 2
    assert told["interval_score"] == pytest.approx(score, abs=1e-4)
    assert told["score_over_error"] == pytest.approx(score / (math.log(0.45 / 0.37) / 2), abs=0.01)


def test_numbers_that_are_told_exactly_have_no_score_over_their_error():
    assert _widths.of_each({"high": {"tpot_p50": [0.1, 0.1, 0.08, 0.12]}}, 0.95)["score_over_error"] is None
