"""Requests of classes with limits of latency: refused at once where they would be late, and never at idle engines."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_worlds import request, scheduler, sent

from lengthwise.gateway.config import Engine, GatewayConfig, Key, Limits
from lengthwise.gateway.edge.auth import Caller
from lengthwise.gateway.edge.client_request import RequestParser
from lengthwise.gateway.edge.errors import Fault
from lengthwise.gateway.request import SloClass
from lengthwise.gateway.scheduling import WorkerState
from lengthwise.schema.errors import InputError, UnknownNameError

limits = st.one_of(st.just(math.inf), st.floats(0.001, 100.0))


@given(
    limits,
    st.floats(0.001, 100.0),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3000)), max_size=12),
)
def test_a_request_is_refused_only_behind_others_and_by_the_predicted_wait(ttft_s, jct_s, slots, others):
    """Requests of a later priority class do not count; an engine with a free slot that no one waits for takes all."""
    slo = SloClass("c", ttft_s, jct_s)
    made = scheduler("fcfs", workers=[WorkerState("w", ("m",), concurrency=slots, tokens_per_s=50.0)])
    for number, (priority, tokens) in enumerate(others):
        assert made.offer(0.0, request(number, predicted=tokens, priority=priority)) is None
        made.schedule(0.0)
    refusal = made.offer(0.0, request(99, predicted=100, priority=1, slo=slo))
    if len(others) < slots:
        assert refusal is None
        assert sent(made.schedule(0.0)) == [99]
        return
    running, waiting = others[:slots], [tokens for priority, tokens in others[slots:] if priority <= 1]
    wait_s = (sum(tokens for _, tokens in running) / slots + sum(waiting)) / 50.0
    late = wait_s - ttft_s, wait_s + 100 * slots / 50.0 - jct_s
    if max(late) < -1e-6:
        assert refusal is None
    elif max(late) > 1e-6:
        assert (refusal.status, refusal.reason) == (429, "slo")
        assert float(re.search(r"a wait of ([\d.]+) s", refusal.message)[1]) == pytest.approx(wait_s, abs=0.051)
        assert refusal.retry_after_s >= 1.0


def test_a_request_that_still_waits_at_its_limit_expires():
    made = scheduler("fcfs", workers=[WorkerState("w", ("m",), concurrency=1)])  # of unknown speed
    made.offer(0.0, request(1))
    made.schedule(0.0)
    assert made.offer(0.0, request(2, slo=SloClass("c", 3.0), deadline_s=3.0)) is None
    assert made.next_s(0.0) <= 3.0 or made.schedule(0.0).expire == ()
    assert [one for one, _ in made.schedule(3.0).expire] == [2]


def parsed(header=None, key=None, *, stream=True):
    parser = RequestParser(Limits(), slo_classes=(SloClass("fast", 2.0, 30.0), SloClass("slow", 60.0)))
    body = b'{"model": "m", "prompt": "p", "stream": %b}' % (b"true" if stream else b"false")
    headers = {} if header is None else {b"x-slo-class": header}
    return parser.parse("completions", body, Caller(key, 0), headers, "r", 5.0).client


def test_a_class_is_that_of_the_header_or_else_of_the_key():
    key = Key("t", "0" * 64, slo_class="slow")
    assert (parsed().slo, parsed().deadline_s) == (None, math.inf)
    assert (parsed(key=key).slo.name, parsed(key=key).deadline_s) == ("slow", 65.0)
    assert (parsed(b"fast", key).slo.name, parsed(b"fast", key).deadline_s) == ("fast", 7.0)
    assert parsed(b"fast", stream=False).deadline_s == 35.0, "no first token is seen before the last"
    with pytest.raises(Fault, match=r"\(fast, slow\); it is 'fats'") as caught:
        parsed(b"fats")
    assert caught.value.status == 400


def test_wrong_classes_are_refused():
    engines = (Engine("http://e:1"),)
    with pytest.raises(InputError, match="ttft_s or jct_s above 0"):
        SloClass("c")
    with pytest.raises(InputError, match="must differ"):
        GatewayConfig(engines, slo_classes=(SloClass("c", 1.0), SloClass("c", 2.0)))
    with pytest.raises(UnknownNameError, match="fast"):
        GatewayConfig(engines, keys=(Key("t", "0" * 64, slo_class="fats"),), slo_classes=(SloClass("fast", 1.0),))
