from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lengthwise.gateway.fleet.health import MIN_CONFIRMED, MIN_REQUESTS, OutlierDetector


def fed(outliers, name, *, failed=0, succeeded=0, rejected=0, proven=0, first_token_s=(), model="m", session=""):
    for _ in range(failed):
        outliers.failed(name)
    for _ in range(rejected):
        outliers.rejected(name, model, session)
    for _ in range(proven):
        outliers.record_rejection_check(name, model, wrong=True)
    for _ in range(succeeded):
        outliers.succeeded(name, model)
    for seconds in first_token_s:
        outliers.first_token(name, seconds)


def test_an_engine_that_fails_far_more_than_its_peers_is_ejected_and_returns():
    outliers = OutlierDetector(2.0)
    fed(outliers, "bad", failed=8, succeeded=8)
    fed(outliers, "good", succeeded=50)
    assert outliers.update(0.0, ["bad", "good"]) == ("bad",)
    assert outliers.is_ejected("bad", 1.9)
    assert outliers.next_s(0.0) == 2.0
    assert not outliers.is_ejected("bad", 2.0)


def test_an_engine_that_fails_again_is_ejected_for_longer():
    outliers, now_s, lengths = OutlierDetector(1.0), 0.0, []
    for _ in range(6):
        fed(outliers, "bad", failed=MIN_REQUESTS)
        fed(outliers, "good", succeeded=MIN_REQUESTS)
        assert outliers.update(now_s, ["bad", "good"])
        lengths.append(outliers.next_s(now_s) - now_s)
        now_s = outliers.next_s(now_s)
    assert lengths == [1, 2, 4, 8, 16, 16]


def test_an_engine_that_is_far_slower_to_start_is_ejected():
    outliers = OutlierDetector(2.0)
    fed(outliers, "slow", first_token_s=[9.0] * MIN_REQUESTS)
    for name in ("a", "b"):
        fed(outliers, name, first_token_s=[0.5] * MIN_REQUESTS)
    assert outliers.update(0.0, ["slow", "a", "b"]) == ("slow",)


def test_all_alike_bad_or_slow_are_no_outliers():
    outliers = OutlierDetector(2.0)
    for name in "abcd":
        fed(outliers, name, failed=20, succeeded=20, first_token_s=[9.0] * MIN_REQUESTS)
    assert outliers.update(0.0, list("abcd")) == ()


def test_a_few_requests_prove_nothing_and_a_single_engine_has_no_peers():
    outliers = OutlierDetector(2.0)
    fed(outliers, "new", failed=MIN_REQUESTS - 1)
    fed(outliers, "old", succeeded=100)
    assert outliers.update(0.0, ["new", "old"]) == ()
    fed(outliers, "new", failed=100)
    assert outliers.update(0.0, ["new"]) == ()


def test_an_engine_that_rejects_requests_its_peers_serve_is_ejected():
    outliers = OutlierDetector(2.0)
    fed(outliers, "odd", rejected=8, succeeded=8, proven=MIN_CONFIRMED - 1)
    for name in ("a", "b"):
        fed(outliers, name, rejected=1, succeeded=30)
    assert outliers.is_suspect("odd", "m")
    outliers.record_rejection_check("odd", "m", wrong=True)
    assert outliers.update(0.0, ["odd", "a", "b"]) == ("odd",)


def test_too_few_confirmations_eject_no_engine():
    outliers = OutlierDetector(2.0)
    fed(outliers, "odd", rejected=8, succeeded=8, proven=MIN_CONFIRMED - 1)
    fed(outliers, "a", succeeded=30)
    assert outliers.update(0.0, ["odd", "a"]) == ()


def test_bad_requests_that_only_one_engine_received_eject_none():
    """Requests go to an engine with room, and that may be the same one again and again."""
    outliers = OutlierDetector(2.0)
    fed(outliers, "unlucky", rejected=500, succeeded=20)
    fed(outliers, "other", succeeded=50)
    assert outliers.is_suspect("unlucky", "m")
    outliers.record_rejection_check("unlucky", "m", wrong=False)
    assert not outliers.is_suspect("unlucky", "m")
    fed(outliers, "unlucky", rejected=500)
    assert outliers.update(0.0, ["unlucky", "other"]) == ()


def test_bad_requests_that_reach_all_engines_equally_eject_none():
    outliers = OutlierDetector(2.0)
    for name in "abc":
        fed(outliers, name, rejected=40, succeeded=10)
    assert outliers.update(0.0, list("abc")) == ()


def test_each_model_is_compared_with_its_own_peers():
    outliers = OutlierDetector(2.0)
    fed(outliers, "a", rejected=50, model="odd")
    for name in "ab":
        fed(outliers, name, succeeded=50)
    assert not outliers.is_suspect("a", "m")
    fed(outliers, "b", succeeded=20, model="odd")
    assert outliers.is_suspect("a", "odd")
    fed(outliers, "b", rejected=20, model="odd")
    assert not outliers.is_suspect("a", "odd")


def test_one_session_of_wrong_requests_does_not_put_its_engine_out():
    outliers = OutlierDetector(2.0)
    fed(outliers, "a", rejected=500, session="one client")
    for name in "ab":
        fed(outliers, name, succeeded=20)
    assert not outliers.is_suspect("a", "m")
    assert outliers.update(0.0, ["a", "b"]) == ()


NUMBERS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 40), st.floats(0, 99)), min_size=1, max_size=9
)


@given(st.lists(NUMBERS, min_size=1, max_size=8))
def test_never_more_than_half_are_left_out(rounds):
    outliers = OutlierDetector(3.0)
    for now_s, numbers in enumerate(rounds):
        names = [str(k) for k in range(len(numbers))]
        for name, (failed, answered, rejected, seconds) in zip(names, numbers, strict=True):
            fed(
                outliers,
                name,
                failed=failed,
                succeeded=answered,
                rejected=rejected,
                proven=rejected // 2,
                first_token_s=[seconds] * MIN_REQUESTS,
            )
        outliers.update(float(now_s), names)
        assert sum(outliers.is_ejected(name, now_s) for name in names) <= len(names) // 2
