"""KV transfers that share links and a switch: processor sharing, a fluid model of each transfer, conservation."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from observers import EXAMPLES

from lengthwise.engine._reference_state import Fabric, Request, Wait

SENDERS, RECEIVERS = 3, 3
SWITCH = SENDERS + RECEIVERS
SWITCHES = st.sampled_from([0.5, 1.0, 1.5, 2.75, 100.0])  # bandwidth of the switch, in links
SIZES = st.sampled_from([0.25, 0.5, 1.0, 1.5, 7.0]) | st.floats(0.01, 20.0)
transfers = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 1.0, 2.5]) | st.floats(0.0, 10.0),
        st.integers(0, SENDERS - 1),
        st.integers(SENDERS, SENDERS + RECEIVERS - 1),
        SIZES,
    ),
    min_size=1,
    max_size=12,
)


def played(load, switch, watch=lambda _: None):
    """Return when each transfer (start, sender, receiver, seconds alone) ends. ``watch`` is called at each change."""
    fabric, end_s = Fabric(SENDERS + RECEIVERS, switch), {}
    left = sorted(range(len(load)), key=lambda i: (load[i][0], i))
    while len(end_s) < len(load):
        if left and load[left[0]][0] < fabric.end_s:
            start_s, sender, receiver, link_s = load[i := left.pop(0)]
            fabric.start(Request(i, start_s, 1, 2, Wait(None)), (sender, receiver), link_s, start_s)
        else:
            now_s = fabric.end_s
            end_s |= {q.index: now_s for q, _ in fabric.end(now_s)}
        watch(fabric)
    return [end_s[i] for i in range(len(load))]


def fair_rates(ends, switch):
    """Return exact max-min fair rates: all rise together, and a transfer's rate stays once a link of it is full."""
    rates, rising = dict.fromkeys(ends, Fraction(0)), set(ends)
    ends = {i: (*pair, SWITCH) for i, pair in ends.items()}
    links = {link: 1 for one in ends.values() for link in one} | {SWITCH: switch}

    def on(link, some):
        return [i for i in some if link in ends[i]]

    while rising:
        step = min(
            (bandwidth - sum(rates[i] for i in on(link, ends))) / len(on(link, rising))
            for link, bandwidth in links.items()
            if on(link, rising)
        )
        for i in rising:
            rates[i] += step
        full = {link for link, bandwidth in links.items() if sum(rates[i] for i in on(link, ends)) == bandwidth}
        rising = {i for i in rising if not full & set(ends[i])}
    return rates


def fluid(load, switch):
    """Return when each transfer ends, from the bytes that each has left, in exact arithmetic."""
    load = [(Fraction(start_s), sender, receiver, Fraction(size)) for start_s, sender, receiver, size in load]
    to_come, left, end_s, now_s = dict(enumerate(load)), {}, {}, Fraction(0)
    while to_come or left:
        rates = fair_rates({i: load[i][1:3] for i in left}, Fraction(switch))
        at_s = min([now_s + left[i] / rates[i] for i in left] + [row[0] for row in to_come.values()])
        left = {i: size - rates[i] * (at_s - now_s) for i, size in left.items()}
        end_s |= {i: at_s for i, size in left.items() if size == 0}
        left = {i: size for i, size in left.items() if size > 0}
        left |= {i: row[3] for i, row in to_come.items() if row[0] == at_s}
        to_come = {i: row for i, row in to_come.items() if row[0] > at_s}
        now_s = at_s
    return [float(end_s[i]) for i in range(len(load))]


@settings(max_examples=EXAMPLES, deadline=None)
@given(transfers, SWITCHES)
def test_transfers_end_as_in_a_fluid_model_of_each(load, switch):
    assert played(load, switch) == pytest.approx(fluid(load, switch), rel=1e-9)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=8), st.integers(0, 3))
def test_one_link_is_a_processor_sharing_queue(sizes, shape):
    """Sorted by size s_1 <= s_2 ..., transfer k of n that begin together ends at s_1 + ... + s_k + (n - k) s_k."""
    sender = [lambda _: 0, lambda i: i % SENDERS, lambda _: 1, lambda i: i % SENDERS][shape]
    receiver = [lambda _: SENDERS, lambda _: SENDERS + 1, *[lambda i: SENDERS + i % RECEIVERS] * 2][shape]
    switch = math.inf if shape < 3 else 1 / SENDERS  # It alone binds, as no sender is faster than the switch.
    found = played([(0.0, sender(i), receiver(i), size) for i, size in enumerate(sizes)], switch)
    for size, end_s in zip(sizes, found, strict=True):
        assert end_s * min(1.0, switch) == pytest.approx(sum(min(size, other) for other in sizes))


@settings(max_examples=EXAMPLES, deadline=None)
@given(transfers, SWITCHES)
def test_no_link_is_above_its_bandwidth_and_none_idles_that_could_send(load, switch):
    """Each path has a full link on which none is faster, which defines max-min fairness."""

    def check(fabric):
        rates = {ends: path.rate for ends, path in fabric.paths.items()}
        used = dict.fromkeys(range(SWITCH + 1), 0.0)  # shares of bandwidth
        for ends, path in fabric.paths.items():
            for link in (*ends, SWITCH):
                used[link] += path.rate * len(path.targets) / (switch if link == SWITCH else 1.0)
        assert all(share <= 1 + 1e-12 for share in used.values())
        for ends, rate in rates.items():
            fastest = {
                link: max(r for other, r in rates.items() if link in (*other, SWITCH)) for link in (*ends, SWITCH)
            }
            assert any(used[link] >= 1 - 1e-12 and rate >= top * (1 - 1e-12) for link, top in fastest.items())

    played(load, switch, check)


@settings(max_examples=EXAMPLES, deadline=None)
@given(transfers, SWITCHES)
def test_a_link_carries_no_more_than_its_time_and_each_transfer_its_own_bytes(load, switch):
    """By any end a link has carried at most the time since its first start. Alone, a transfer takes its size."""
    found, alone = played(load, switch), max(1.0, 1 / switch)
    for (start_s, _, _, size), end_s in zip(load, found, strict=True):
        assert end_s >= (start_s + alone * size) * (1 - 1e-12)
    for link in range(SWITCH + 1):
        bandwidth = switch if link == SWITCH else 1.0
        own = [(row[0], row[3], end_s) for row, end_s in zip(load, found, strict=True) if link in (*row[1:3], SWITCH)]
        for last_s in (end_s for *_, end_s in own):
            done = [(start_s, size) for start_s, size, end_s in own if end_s <= last_s]
            first_s = min(start_s for start_s, _ in done)
            assert sum(size for _, size in done) <= bandwidth * (last_s - first_s) * (1 + 1e-9) + 1e-9
    for i, row in enumerate(load):
        assert played([row], switch)[0] == pytest.approx(row[0] + alone * row[3]), i
