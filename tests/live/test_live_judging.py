"""The live circle's bounds fail on a wrong prediction, and not on noise."""

from __future__ import annotations

import numpy as np
import pytest
from judging import METRICS, OVER_LOADS, drift, judged, out_of_order

from lengthwise.measure.calibration import Iterations

CASES = len(METRICS) + len(OVER_LOADS)
LOADS = ("wide-high", "narrow-static", "narrow-half")


def same(value: float) -> dict[str, dict[str, float]]:
    return {load: dict.fromkeys(METRICS, value) for load in LOADS}


def test_a_near_prediction_passes_and_noise_widens_the_bound() -> None:
    assert judged(same(-0.3), same(0.0), "narrow-static") == ([], [])
    assert len(judged(same(0.5), same(0.1), "narrow-static")[0]) == CASES
    assert judged(same(0.5), same(0.2), "narrow-static") == ([], [])


def test_no_noise_excuses_an_error_beyond_the_end() -> None:
    wrong, noisy = judged(same(-0.65), same(0.45), "narrow-static")
    assert len(wrong) == CASES
    assert noisy == []


def test_repeats_that_disagree_are_reported_and_not_judged() -> None:
    wrong, noisy = judged(same(2.0), same(0.55), "narrow-static")
    assert wrong == []
    assert len(noisy) == CASES
    assert "jct_p50 of narrow-static: 200% off, repeats 55% apart" in noisy


@pytest.mark.parametrize("metric", METRICS)
def test_each_metric_of_the_load_that_is_judged_alone_counts(metric) -> None:
    off = same(0.0)
    off["narrow-static"][metric] = 0.7
    assert judged(off, same(0.1), "narrow-static")[0] == [f"{metric} of narrow-static: 70% off, repeats 10% apart"]


def steps(slower: float, prompts: int = 0) -> Iterations:
    decodes = np.repeat([1, 2, 3], 6)
    seconds = slower * np.tile([1.0, 1.1, 1.2, 1.0, 1.1, 9.0], 3) * decodes
    zeros, ones = np.zeros(18), np.ones(18, np.int64)
    return Iterations(
        prefill_seqs=zeros,
        prefill_tokens=np.full(18, float(prompts)),
        decode_seqs=decodes.astype(float),
        kv_share=zeros,
        seconds=seconds,
        steps=ones,
    )


def test_a_slowed_machine_is_recognized_by_equal_steps() -> None:
    assert drift(steps(1.0), steps(1.0), 4) == 0.0
    assert drift(steps(1.3), steps(1.0), 4) == pytest.approx(0.3)
    assert drift(steps(1.0, prompts=5), steps(2.0), 4) == 0.0


def test_loads_in_the_wrong_order_are_named_with_their_source() -> None:
    right = {"wide-static": 2.0, "wide-half": 0.1, "wide-high": 1.0, "narrow-static": 3.0}
    assert out_of_order({"measured": right, "simulated": right}) == []
    (reported,) = out_of_order({"measured": right, "simulated": right | {"wide-half": 2.5}})
    assert reported == "simulated, wide: TTFT of all at once 2 s, at half of capacity 2.5 s"
    assert out_of_order({"simulated": right | {"wide-static": float("nan")}})
