"""A request that kills engines soon runs alone; an answered request is no longer a suspect."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lengthwise.apps.run.task_state import Suspects


def deaths_until_found(max_num_seqs, poison, requests):
    """Engines that die until the poison is alone on one, and who was on them last."""
    suspects, left, deaths = Suspects(), list(range(requests)), 0
    while True:
        waiting = sorted(left, key=lambda one: one not in suspects)
        group = []
        for one in waiting:
            if len(group) < max_num_seqs and (not suspects or suspects.may_join(one, group, max_num_seqs)):
                group.append(one)
            else:
                break
        if poison not in group:
            for one in group:
                suspects.pop(one, None)
                left.remove(one)
            continue
        deaths += 1
        suspects.update(group)
        if group == [poison]:
            return deaths


@given(st.integers(1, 256), st.integers(1, 400), st.data())
def test_poison_is_alone_after_a_few_deaths(max_num_seqs, requests, data):
    poison = data.draw(st.integers(0, requests - 1))
    assert deaths_until_found(max_num_seqs, poison, requests) <= 1 + (max_num_seqs.bit_length() + 1) // 2


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 64))
def test_groups_are_no_larger_than_any_member_may_be_in(places, max_num_seqs):
    suspects = Suspects()
    for place in places:
        suspects.update([place])
    group = []
    for place in range(10):
        if suspects.may_join(place, group, max_num_seqs):
            group.append(place)
    assert group
    assert all(len(group) <= suspects.group_size(place, max_num_seqs) for place in group)


def test_answered_it_is_no_suspect():
    suspects = Suspects()
    suspects.update([1, 2])
    assert 1 in suspects
    assert suspects.group_size(1, 16) == 4
    suspects.pop(1)
    assert 1 not in suspects
    assert suspects.group_size(1, 16) == 16
    suspects.pop(2)
    assert not suspects
