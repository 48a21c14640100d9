"""Keys: who may ask for what, how often, and what becomes of guessing."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from edge_serving import SECRET, a_key, config, sha

from lengthwise.gateway.edge import Tenants
from lengthwise.gateway.edge.auth import MAX_FAILURES, Charge, Keys
from lengthwise.gateway.edge.errors import Fault
from lengthwise.gateway.request import LengthPrediction, Request
from lengthwise.schema.errors import InputError

RIGHT = f"Bearer {SECRET}".encode()
OTHER = a_key(tenant="beta", sha256=sha("sk-other"))


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def status(keys, authorization, address="10.0.0.1"):
    try:
        keys.caller(authorization, address)
    except Fault as fault:
        return fault.status
    return 200


def test_a_key_is_known_by_its_hash(clock):
    tenants = Tenants()
    keys = Keys(config(a_key(), OTHER), clock, tenants=tenants)
    assert keys.caller(RIGHT, "").key == a_key()
    assert keys.caller(b"bearer  sk-other ", "").tenant == 2
    assert list(tenants) == ["anonymous", "acme", "beta"]
    wrong = (
        None,
        b"",
        b"Bearer",
        b"Bearer ",
        b"Basic " + SECRET.encode(),
        b"Bearer " + sha(SECRET).encode(),
        b"Bearer x\xff",
    )
    assert {status(keys, given) for given in wrong} == {401}


def test_all_keys_are_compared_whichever_is_right(clock, monkeypatch):
    import hmac

    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(a) or real(a, b))
    Keys(config(a_key(), OTHER), clock).caller(RIGHT, "")
    assert len(compared) == 2


def test_without_keys_every_client_is_accepted(clock):
    caller = Keys(config(), clock).caller(None, "")
    assert (caller.key, caller.tenant, caller.can_access("any"), caller.take_request(0.0)) == (None, 0, True, [])


def test_guessing_is_stopped_and_forgiven_after_a_minute(clock):
    keys = Keys(config(a_key(), OTHER), clock)
    assert status(keys, RIGHT) == 200
    assert [status(keys, b"Bearer guess%d" % i) for i in range(MAX_FAILURES)] == [401] * MAX_FAILURES
    assert status(keys, b"Bearer guess") == 429
    assert status(keys, b"Bearer sk-other") == 429, "a right guess must look like a wrong one"
    assert status(keys, RIGHT) == 200, "who had shown it before goes on"
    assert status(keys, b"Bearer sk-other", "10.0.0.2") == 200
    clock.now_s += 60
    assert status(keys, b"Bearer sk-other") == 200


def test_an_address_of_ipv6_is_its_network(clock):
    keys = Keys(config(a_key()), clock)
    for i in range(MAX_FAILURES):
        status(keys, b"Bearer guess", f"2001:db8::{i:x}")
    assert status(keys, RIGHT, "2001:db8::ffff:1") == 429
    assert status(keys, RIGHT, "2001:db8:0:1::1") == 200


def test_addresses_that_are_remembered_are_limited(clock, monkeypatch):
    from lengthwise.gateway.edge import auth

    monkeypatch.setattr(auth, "MAX_ADDRESSES", 5)
    keys = Keys(config(a_key()), clock)

    def guesses(address, times=MAX_FAILURES):
        return [status(keys, b"Bearer guess", address) for _ in range(times)]

    guesses("10.0.1.0")
    assert status(keys, RIGHT, "10.0.1.0") == 429
    for i in range(1, 6):
        assert status(keys, RIGHT, "10.0.1.0") == 429, "it is one of the last five"
        guesses(f"10.0.1.{i}", 1)
    assert status(keys, RIGHT, "10.0.1.0") == 200, "five others came after it"
    for forgotten in (False, True):
        assert status(keys, RIGHT, "10.0.2.0") == 200
        for i in range(1, 5 + forgotten):
            assert status(keys, RIGHT, f"10.0.2.{i}") == 200
        guesses("10.0.2.0")
        assert status(keys, RIGHT, "10.0.2.0") == (429 if forgotten else 200)
        clock.now_s += 60


def test_a_bucket_empties_and_fills(clock):
    caller = Keys(config(a_key(rate_rps=2.0, burst=3)), clock).caller(RIGHT, "")
    left = [dict(caller.take_request(clock()))[b"x-ratelimit-remaining-requests"] for _ in range(3)]
    assert left == [b"2", b"1", b"0"]
    with pytest.raises(Fault) as caught:
        caller.take_request(clock())
    assert (caught.value.status, caught.value.retry_after_s) == (429, 0.5)
    assert dict(caught.value.all_headers())[b"retry-after"] == b"1"
    clock.now_s += 0.5
    caller.take_request(clock())
    clock.now_s -= 10
    with pytest.raises(Fault):
        caller.take_request(clock())


def quoted(caller, clock, *, prompt=10, predicted=90.0, n=1):
    """A request that is admitted, and what it adds to the headers."""
    headers = []
    charge = Charge(caller, clock, headers)
    request = Request(1, 0.0, "m", prompt, 1000, choices=n, length_prediction=LengthPrediction(predicted))
    charge.__enter__()
    asyncio.run(charge(request))
    return charge, request, dict(headers)


def ends(charge, request, tokens):
    request.dispatch.dispatched_s, request.generated_tokens = 1.0, tokens
    charge.__exit__()


def refused_s(caller, clock, **request):
    with pytest.raises(Fault) as caught:
        quoted(caller, clock, **request)
    assert (caught.value.status, caught.value.reason) == (429, "quota")
    return caught.value.retry_after_s


def test_a_quota_of_tokens_is_charged_by_prediction_and_settled_by_the_output(clock):
    caller = Keys(config(a_key(tokens_per_minute=240)), clock).caller(RIGHT, "")
    first = quoted(caller, clock)
    assert first[2][b"x-ratelimit-remaining-tokens"] == b"140"
    second = quoted(caller, clock)
    assert refused_s(caller, clock) == 15.0, "60 of 100 are missing, and 4 a second come"
    ends(*first[:2], tokens=30)
    assert quoted(caller, clock)[2][b"x-ratelimit-remaining-tokens"] == b"0", "60 came back"
    ends(*second[:2], tokens=390)
    assert refused_s(caller, clock) == (300 + 100) / 4, "what was not predicted is owed"
    clock.now_s += 100
    never_sent, *_ = quoted(caller, clock)
    assert refused_s(caller, clock) > 0
    never_sent.__exit__()
    assert quoted(caller, clock)[2][b"x-ratelimit-remaining-tokens"] == b"0", "and what was not served costs nothing"


def test_a_client_that_leaves_before_its_tokens_are_counted_pays_the_estimated_ones(clock):
    caller = Keys(config(a_key(tokens_per_minute=240)), clock).caller(RIGHT, "")
    charge, request, _ = quoted(caller, clock)
    request.dispatch.unseen_tokens = 70.0
    ends(charge, request, tokens=0)
    assert quoted(caller, clock)[2][b"x-ratelimit-remaining-tokens"] == b"60", "80 and 100 are charged"


def test_a_prompt_is_settled_by_what_the_engine_reports(clock):
    caller = Keys(config(a_key(tokens_per_minute=240)), clock).caller(RIGHT, "")
    charge, request, _ = quoted(caller, clock)
    request.dispatch.reported_prompt_tokens = 60
    ends(charge, request, tokens=30)
    assert quoted(caller, clock)[2][b"x-ratelimit-remaining-tokens"] == b"50", "90 and 100 are charged"


def test_a_request_above_the_total_quota_is_served_when_the_quota_is_unused(clock):
    caller = Keys(config(a_key(tokens_per_minute=60)), clock).caller(RIGHT, "")
    quoted(caller, clock, predicted=50, n=2)
    assert refused_s(caller, clock, predicted=1) == 50 + 11, "110 of 60 were taken"
    clock.now_s += 110
    quoted(caller, clock, predicted=500)


def test_quotas_a_day_count_tokens_and_cost(clock):
    prices = {"input_cost_per_token": 0.001, "output_cost_per_token": 0.01}
    for limits, most in (({"tokens_per_day": 200}, 2), ({"cost_per_day": 2.8, **prices}, 3)):
        keys = Keys(config(a_key(**limits)), clock)
        for _ in range(most):
            assert quoted(keys.caller(RIGHT, ""), clock)[2] == {}
        keys = Keys(config(a_key(**limits)), clock, keys)
        assert refused_s(keys.caller(RIGHT, ""), clock) > 3600, "also behind a reload"
    with pytest.raises(InputError, match="cost_per_token above 0"):
        a_key(cost_per_day=1.0)
    with pytest.raises(InputError, match="must be finite"):
        a_key(cost_per_day=1.0, output_cost_per_token=float("inf"))


def test_new_keys_take_over_the_buckets_of_those_that_stay(clock):
    slow = a_key(rate_rps=0.0, burst=1)
    before = Keys(config(slow), clock)
    before.caller(RIGHT, "").take_request(0.0)
    after = Keys(config(OTHER, slow), clock, before)
    with pytest.raises(Fault):
        after.caller(RIGHT, "").take_request(1.0)
    assert status(Keys(config(OTHER), clock, after), RIGHT) == 401


def test_a_key_with_a_changed_field_retains_its_count_and_its_bucket(clock):
    before = Keys(config(a_key(rate_rps=0.0, burst=2, concurrency=2)), clock)
    caller = before.caller(RIGHT, "")
    caller.take_request(0.0)
    with caller:
        after = Keys(config(a_key(rate_rps=0.0, burst=9, concurrency=1)), clock, before)
        with pytest.raises(Fault, match="in progress"), after.caller(RIGHT, ""):
            pass
    with after.caller(RIGHT, ""):
        after.caller(RIGHT, "").take_request(1.0)
        with pytest.raises(Fault, match="Rate limit"):
            after.caller(RIGHT, "").take_request(1.0)


def test_the_number_of_a_tenant_is_never_anothers(clock):
    tenants = Tenants()
    first = Keys(config(a_key(), OTHER), clock, tenants=tenants)  # acme, beta
    third = replace(OTHER, tenant="gamma", sha256=sha("sk-third"))
    after = Keys(config(OTHER, third), clock, first, tenants=tenants)
    assert after.caller(b"Bearer sk-other", "").tenant == first.caller(b"Bearer sk-other", "").tenant == 2
    assert after.caller(b"Bearer sk-third", "").tenant == 3
    assert list(tenants) == ["anonymous", "acme", "beta", "gamma"]


def test_keys_that_worked_before_are_recognized_by_digest_not_by_their_holder(clock):
    keys = Keys(config(a_key(), OTHER), clock)
    assert status(keys, RIGHT) == 200
    for _ in range(MAX_FAILURES):
        status(keys, b"Bearer guess")
    without = Keys(config(OTHER), clock, keys)
    again = Keys(config(a_key(), OTHER), clock, without)
    assert again.caller(RIGHT, "10.0.0.2") is not keys.caller(RIGHT, "10.0.0.2")
    assert status(again, RIGHT) == 200
    assert status(again, b"Bearer sk-other") == 429
