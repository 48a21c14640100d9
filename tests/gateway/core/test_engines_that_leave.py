"""A renamed worker keeps what is remembered of it; a new worker at its address shares its slots."""

from __future__ import annotations

import pytest
from scheduler_worlds import request, scheduler, sent, worker

OLD, LEAVING = "e", "e (leaving 0)"


def placed(made, now_s, one):
    """Where it goes."""
    made.offer(now_s, one)
    return dict(made.schedule(now_s).assign).get(one.id)


def passed_on(made, now_s, *, address, cap=9, others=()):
    """The name passes on to another worker at a place; the old one was at "p"."""
    leaving = worker(LEAVING, cap=cap, up=False, renamed_from=OLD, address="p")
    made.update_workers(now_s, [leaving, *others])
    made.update_workers(now_s, [worker(OLD, cap=cap, epoch=1, address=address), leaving, *others])


def test_a_request_that_failed_at_an_engine_does_not_avoid_its_successor():
    made = scheduler("fcfs", workers=[worker(OLD, cap=9, address="p"), worker("other", cap=1)])
    assert placed(made, 0.0, request(0, prompt_tokens=5000)) == OLD
    assert placed(made, 0.0, request(1)) == "other"
    made.requeue(1.0, 0, 0, avoid=OLD)
    passed_on(made, 1.0, address="q", others=[worker("other", cap=1)])
    assert dict(made.schedule(1.0).assign) == {0: OLD}, "it waits for no seat of the other one"


@pytest.mark.parametrize(("address", "to"), [("q", "other"), ("p", OLD)])
def test_a_session_does_not_follow_the_name_but_the_engine(address, to):
    others = [worker("other", cap=9)]
    made = scheduler("fcfs", workers=[worker(OLD, cap=9, address="p"), *others])
    assert placed(made, 0.0, request(0, session="s", prompt_tokens=3000)) == OLD
    made.remove(1.0, 0)
    passed_on(made, 1.0, address=address, others=others)
    assert placed(made, 1.0, request(1, predicted=50)) == OLD  # a little more to do than the other
    assert placed(made, 1.0, request(2, session="s", prompt_tokens=3000)) == to


def learned():
    made = scheduler("isrtf", workers=[worker(OLD, cap=2, address="p")])
    for number in range(30):
        now_s = 10.0 * number
        made.offer(now_s, request(number, now_s, prompt_tokens=10 + number))
        made.schedule(now_s)
        for token in range(1, 11):
            made.on_progress(now_s + 2.0 + 0.01 * token, number, token)
        made.remove(now_s + 3.0, number)
    return made


@pytest.mark.parametrize("address", ["p", "q"])
def test_what_was_learned_of_an_engine_survives_a_new_key_but_not_a_new_engine(address):
    made = learned()
    before = next(one for one in made.worker_pool if one.name == OLD)
    price, speed = before.cost.recompute_steps(100, 1), before.throughput.tokens_per_s
    passed_on(made, 400.0, address=address, cap=2)
    now = next(one for one in made.worker_pool if one.name == OLD)
    retained = (now.cost.recompute_steps(100, 1), now.throughput.tokens_per_s) == (price, speed)
    assert now is not before
    assert retained is (address == "p")


def test_a_leaving_and_a_new_worker_at_one_address_share_its_slots():
    made = learned()
    made.offer(400.0, request(100, 400.0))
    made.schedule(400.0)
    passed_on(made, 400.0, address="p", cap=2)
    for number in (101, 102):
        made.offer(401.0, request(number, 401.0))
    assert len(sent(made.schedule(401.0))) == 1
    made.remove(402.0, 100)
    assert len(sent(made.schedule(402.0))) == 1


def test_they_have_its_cache_together():
    cache = {"kv_tokens": 250, "address": "p"}
    made = scheduler("fcfs", workers=[worker(OLD, cap=9, **cache)])
    assert placed(made, 0.0, request(0)) == OLD  # 110 tokens
    leaving = worker(LEAVING, cap=9, up=False, renamed_from=OLD, **cache)
    made.update_workers(1.0, [worker(OLD, cap=9, epoch=1, **cache), leaving])
    assert placed(made, 1.0, request(1)) == OLD
    assert placed(made, 1.0, request(2)) is None
    made.remove(2.0, 0)
    assert dict(made.schedule(2.0).assign) == {2: OLD}
