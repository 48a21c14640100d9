"""Which layers lie where."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.schedule.controls import compute_split, memory_split, rra_layout, splits, waa_layout
from lengthwise.schema.errors import InputError


@given(st.integers(1, 48), st.integers(1, 8), st.data())
def test_all_layers_and_gpus_are_used_and_shares_are_even(gpus, tp, data):
    groups = data.draw(st.integers(0, gpus // tp))
    layers = data.draw(st.integers(gpus, 150))
    stages = rra_layout(layers, gpus, tp, groups).stages
    assert sum(s.layers for s in stages) == layers
    assert sum(s.tp for s in stages) == gpus
    assert [s.tp for s in stages[:groups]] == [tp] * groups
    assert all(abs(s.layers - layers * s.tp / gpus) < 1 for s in stages)


def test_a_stage_of_two_gpus_has_twice_the_layers():
    stages = rra_layout(40, 4, 2, 1).stages
    assert [(s.tp, s.layers, s.role) for s in stages] == [(2, 20, "both"), (1, 10, "both"), (1, 10, "both")]


def test_waa_gives_groups_to_the_decoders_first():
    layout = waa_layout(40, 6, 2, tp=2, tp_groups=3)
    assert [(s.tp, s.layers) for s in layout.prefill] == [(2, 40)]
    assert [(s.tp, s.layers) for s in layout.decode] == [(2, 20), (2, 20)]
    one = waa_layout(40, 6, 3, tp=2, tp_groups=1)
    assert [s.tp for s in one.decode] == [2, 1]
    assert [s.tp for s in one.prefill] == [1, 1, 1]


def test_splits_hold_the_groups():
    assert splits(4, 2, 2).tolist() == [2]
    assert splits(4, 2, 1).tolist() == [1, 2, 3]
    assert splits(4, 4, 1).tolist() == []


def test_the_compute_split_is_the_nearest_to_the_share():
    allowed = splits(8, 1, 0)
    chosen = compute_split(np.array([1.0, 3.0, 1e-9, 1e9]), np.array([1.0, 1.0, 1.0, 1.0]), 8, allowed)
    assert chosen.tolist() == [4, 6, 1, 7]


def test_the_memory_split_leaves_the_fullest_gpu_emptiest():
    allowed = splits(4, 1, 0)
    prefill, decode = 30.0 / allowed[:, None], 60.0 / (4 - allowed)[:, None]
    assert memory_split(prefill, decode, allowed).tolist() == [1]


@pytest.mark.parametrize(("prefill", "tp", "groups"), [(0, 1, 0), (4, 1, 0), (1, 4, 1)])
def test_splits_that_cannot_be_are_refused(prefill, tp, groups):
    with pytest.raises(InputError):
        waa_layout(40, 4, prefill, tp, groups)


def test_a_stage_without_layers_is_refused():
    with pytest.raises(InputError, match="must reach 5 stages"):
        rra_layout(4, 5)
