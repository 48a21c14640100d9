"""Choices as JSON, names of configurations, frontiers and ties."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from market import TTFT, question

from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.plan import Bottleneck, Bounds, Choice, Exclusion, Limit, Point, Status
from lengthwise.search.configuration_search import frontier, separated, usd_per_thousand
from lengthwise.search.space import Space, checked, names_of, settings_key
from lengthwise.search.store import from_dict, to_dict

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
ESTIMATES = st.builds(Estimate, NUMBERS, NUMBERS)
VALUES = st.dictionaries(st.sampled_from(["ttft.p90", "tbt.p99", "within_slo", "kv_utilization"]), ESTIMATES)
POINTS = st.builds(Point, NUMBERS, VALUES, st.booleans(), st.dictionaries(st.text(), NUMBERS))
SETTINGS = st.dictionaries(
    st.sampled_from(["deployment.tp", "engine.max_num_seqs", "scheduler.policy", "x"]),
    st.integers() | st.text(max_size=5) | st.booleans() | st.none() | st.floats(allow_nan=False),
)
CHOICES = st.builds(
    Choice,
    key=st.text(max_size=8),
    name=st.text(max_size=8),
    settings=SETTINGS,
    gpus=st.integers(0, 99),
    price_per_hour_usd=NUMBERS,
    status=st.sampled_from(Status),
    exclusion=st.builds(Exclusion, st.text(max_size=8), st.text(max_size=8)),
    objective=ESTIMATES,
    capacity_rps=ESTIMATES,
    bounds=st.builds(Bounds, NUMBERS, NUMBERS),
    at=st.none() | POINTS,
    points=st.lists(POINTS, max_size=3).map(tuple),
    bottleneck=st.builds(Bottleneck, st.text(max_size=8), st.text(max_size=8)),
    simulations=st.integers(0, 9),
)


@settings(max_examples=100)
@given(CHOICES)
def test_a_choice_survives_json(choice):
    again = from_dict(json.loads(json.dumps(to_dict(choice))))
    assert repr(again) == repr(choice)  # NaN is no equal of itself
    assert isinstance(again.status, Status)
    assert isinstance(again.points, tuple)
    assert type(again.at) is type(choice.at)


AXES = st.dictionaries(
    st.sampled_from(["deployment.gpu", "deployment.tp", "deployment.pp", "scheduler.policy", "engine.x", "slo.x"]),
    st.lists(st.integers(1, 9) | st.sampled_from(["H100", "orca", "auto"]), min_size=1, max_size=3, unique=True),
    max_size=4,
)  # fmt: skip


def fixed(axes):
    return {key: tuple(values) for key, values in axes.items()}


@settings(max_examples=150)
@given(AXES, st.lists(AXES, max_size=3))
def test_a_space_gives_each_configuration_once_with_distinct_names(axes, any_of):
    space = Space(fixed(axes), tuple(fixed(own) for own in any_of))
    many = list(space.candidates())
    assert len({settings_key(s) for s in many}) == len(many) <= len(space)
    assert len(set(names_of(many))) == len(many)
    for settings_ in many:
        assert any(
            settings_.keys() == side.keys() and all(settings_[k] in side[k] for k in side)
            for side in space.alternatives()
        )
    values = space.values()
    assert all(settings_[key] in values[key] for settings_ in many for key in settings_)


def test_names_distinguish_what_short_words_do_not():
    assert names_of([{"deployment.tp": 1, "x": 5}, {"deployment.tp": 2, "x": 5}]) == ["tp1", "tp2"]
    assert names_of([{"engine.x": 1}, {"slo.x": 1}]) == ["engine.x=1", "slo.x=1"]
    assert names_of([{"x": 1}, {"x": "1"}]) == ["x=1", 'x="1"']
    assert names_of([{"deployment.tp": 1}]) == ["the configuration"]
    tiers = [
        {"engine.enable_prefix_caching": on, "engine.kv_offloading.size_gb": gb} for on, gb in ((False, 0), (True, 16))
    ]
    assert names_of(tiers) == ["cache off cpu 0GB", "cache on cpu 16GB"]


def test_spaces_that_cannot_be_searched_are_refused():
    with pytest.raises(InputError, match="at least one value"):
        checked(Space({"deployment.tp": ()}))
    with pytest.raises(InputError, match="at most 1,000,000"):
        checked(Space({str(i): tuple(range(10)) for i in range(7)}))


def choice(i, price, points, status=Status.SCOUTED):
    return Choice(str(i), f"c{i}", {}, 1, price, status, points=tuple(points))


@st.composite
def markets(draw):
    """Choices with load curves of few different numbers, so that ties are frequent."""
    few = st.sampled_from([0.5, 1.0, 2.0, 3.0])
    return [
        choice(
            i,
            draw(few),
            [
                Point(
                    draw(few),
                    {"ttft.p90": Estimate(draw(few | st.just(math.inf))), "tbt.p99": Estimate(draw(few))},
                    True,
                )
                for _ in range(draw(st.integers(0, 3)))
            ],
            draw(st.sampled_from(Status)),
        )
        for i in range(draw(st.integers(0, 6)))
    ]


@settings(max_examples=300)
@given(markets(), st.sampled_from([1.0, 2.5, 9.0]))
def test_a_frontier_is_complete_and_no_point_on_it_is_dominated(choices, bound):
    limits = [TTFT, Limit("tbt.p99", bound)]
    seen = {
        (usd_per_thousand(c, p.rate_rps), p.value("ttft.p90"))
        for c in choices
        if c.status in (Status.RANKED, Status.SCOUTED)
        for p in c.points
        if math.isfinite(p.value("ttft.p90")) and p.value("tbt.p99") <= bound
    }
    best = {
        (x, y) for x, y in seen if not any(a <= x and b <= y and (a, b) != (x, y) for a, b in seen)
    }  # the naive rule
    reported = frontier(choices, "ttft.p90", limits)
    assert {(t.cost_usd, t.latency_s) for t in reported} == best
    assert len(reported) == len(best)
    assert [t.cost_usd for t in reported] == sorted(t.cost_usd for t in reported)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0.0, 1.0, 2.0, math.nan])), max_size=6), st.booleans())
def test_without_model_error_choices_with_overlapping_intervals_are_tied(found, higher):
    requested = question("requests_per_dollar" if higher else "energy")
    found.sort(key=lambda pair: -pair[0] if higher else pair[0])
    ranked = [replace(choice(i, 1.0, ()), objective=Estimate(v, h)) for i, (v, h) in enumerate(found)]

    def overlap(a, b):
        halves = [0.0 if math.isnan(x) else x for x in (a.half_width, b.half_width)]
        return abs(a.value - b.value) <= sum(halves)

    for other in ranked:
        assert separated(ranked[0], other, requested) != overlap(ranked[0].objective, other.objective)
