from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scipy.stats import t

from lengthwise.metrics import Slo, combine, difference, summarize
from lengthwise.schema.errors import InputError

SEEDS = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def roomy(toy):
    return [summarize(toy.records(150, seed=s), toy.deployment(), slo=Slo(ttft_s=0.05)) for s in SEEDS]


@pytest.fixture(scope="module")
def narrow(toy):
    return [summarize(toy.records(150, seed=s, max_seqs=6), toy.deployment(), slo=Slo(ttft_s=0.05)) for s in SEEDS]


def test_seeds_give_means_and_t_intervals_everywhere(roomy) -> None:
    made = combine(roomy)
    for get in (
        lambda s: s.ttft_s.p99,
        lambda s: s.tbt_s.p50,
        lambda s: s.rates.output_tokens_per_s,
        lambda s: s.goodput.share,
        lambda s: s.goodput.met["ttft_s"],
        lambda s: s.hardware.mfu,
        lambda s: s.hardware.replica_busy_share[0],
        lambda s: s.hardware.time_shares["idle"],
        lambda s: s.hardware.cost.usd_per_million_tokens,
    ):
        values = np.array([get(s).value for s in roomy])
        assert get(made).value == pytest.approx(values.mean())
        assert get(made).half_width == pytest.approx(t.ppf(0.975, 3) * values.std(ddof=1) / 2)
    assert made.seeds == SEEDS
    assert made.intervals.source == "seeds"
    assert made.counts.arrivals == sum(s.counts.arrivals for s in roomy)


def test_equal_shares_of_all_seeds_are_not_exact(toy) -> None:
    """Four seeds of n requests together that all miss the SLO: up to 3.84 / (n + 3.84) may meet it (Wilson)."""
    made = combine([summarize(toy.records(150, seed=s), toy.deployment(), slo=Slo(ttft_s=1e-9)) for s in SEEDS])
    n = made.counts.arrivals
    for share in (made.goodput.share, made.goodput.met["ttft_s"]):
        assert share.value == 0
        assert share.half_width == pytest.approx(3.8415 / (n + 3.8415), rel=1e-4)


def test_one_seed_keeps_its_own_intervals(roomy) -> None:
    assert combine(roomy[:1]) is roomy[0]


def test_common_seeds_distinguish_variants_that_overlap(roomy, narrow) -> None:
    paired = difference(narrow, roomy).jct_s.p50
    separate = combine(narrow).jct_s.p50.value - combine(roomy).jct_s.p50.value
    assert paired.value == pytest.approx(separate)
    unpaired = np.hypot(combine(narrow).jct_s.p50.half_width, combine(roomy).jct_s.p50.half_width)
    assert paired.half_width < unpaired


def test_relative_difference(roomy, narrow) -> None:
    made = difference(narrow, roomy, relative=True)
    ratios = [x.ttft_s.mean.value / y.ttft_s.mean.value - 1 for x, y in zip(narrow, roomy, strict=True)]
    assert made.ttft_s.mean.value == pytest.approx(np.mean(ratios))
    assert made.intervals.source == "difference"


def test_a_difference_with_itself_is_nothing_whatever_the_order(roomy) -> None:
    made = difference(roomy, roomy[::-1])
    assert (made.ttft_s.p90.value, made.ttft_s.p90.half_width) == (0, 0)
    assert made.counts.arrivals == made.ttft_s.count == 0


def test_variants_may_differ_in_replicas(roomy) -> None:
    wide = [
        dataclasses.replace(
            s, hardware=dataclasses.replace(s.hardware, replica_busy_share=(s.hardware.busy_share,) * 2)
        )
        for s in roomy
    ]
    assert difference(wide, roomy).hardware.replica_busy_share == ()


def test_runs_that_cannot_be_combined_are_reported(toy, roomy) -> None:
    with pytest.raises(InputError, match="empty"):
        combine([])
    with pytest.raises(InputError, match=r"repeated: \[1\]"):
        combine([roomy[0], roomy[0]])
    with pytest.raises(InputError, match="single seeds"):
        combine([combine(roomy), roomy[0]])
    with pytest.raises(InputError, match="same seeds"):
        difference(roomy[:2], roomy[1:3])
    bare = summarize(toy.records(150, seed=9))
    for pair in ([roomy[0], bare], [bare, roomy[0]]):
        with pytest.raises(InputError, match="must have the same SLO"):
            combine(pair)
