"""What each mode does with those who wait."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from scheduler_worlds import World, request, scheduler, sent, worker

from lengthwise.gateway.config import Dispatch
from lengthwise.gateway.core import Scheduler
from lengthwise.gateway.request import LengthPrediction
from lengthwise.gateway.scheduling import Signals, WorkerState


@pytest.mark.parametrize("mode", ["observe", "engine-priority", "engine-plugin"])
def test_no_request_is_held_back_where_the_engine_orders(mode):
    made = scheduler(
        mode, workers=[WorkerState("w", ("m",), slots=2, kv_tokens=50)], dispatch=Dispatch(max_concurrency=100)
    )
    for i in range(1000):
        made.offer(0.0, request(i))
    assert sent(made.schedule(0.0)) == list(range(1000))
    assert made.statistics(0.0).workers[0].limit is None


@pytest.mark.parametrize("mode", ["observe", "engine-priority", "engine-plugin"])
def test_what_an_engine_is_to_be_sent_at_most_holds_in_every_mode(mode):
    made = scheduler(mode, workers=[worker(cap=4)])
    for i in range(20):
        made.offer(0.0, request(i, predicted=20 - i))
    assert sent(made.schedule(0.0)) == [0, 1, 2, 3]
    made.remove(1.0, 2)
    assert sent(made.schedule(1.0)) == [4], "the others in order of arrival"
    assert made.statistics(1.0).workers[0].limit == 4


def test_priorities_for_engines_go_by_class_then_by_predicted_length():
    made = scheduler("engine-priority")
    requested = [
        request(i, priority=priority, predicted=predicted)
        for i, (priority, predicted) in enumerate(itertools.product([-5000, -1, 0, 3, 5000], [0, 9, 1e5, 1e99]))
    ]
    values = [made.engine_priority(one) for one in requested]
    assert values == sorted(values)
    assert len(set(values)) == len(values)
    assert all(isinstance(one, int) and -(2**31) <= one < 2**31 for one in values)


def test_a_full_bin_leaves_as_a_batch_to_one_worker():
    made = scheduler("bins", bins=1, workers=[worker("a", cap=4), worker("b", cap=4)])
    for i in range(3):
        made.offer(0.0, request(i, predicted=100))
    assert not made.schedule(0.0), "a bin that is not full gathers"
    assert made.position(2) == 2
    made.offer(0.5, request(3, 0.5, predicted=100))
    assert made.schedule(0.5).assign == tuple((i, "a") for i in range(4))
    for i in range(4, 8):
        made.offer(1.0, request(i, 1.0, predicted=100))
    assert made.schedule(1.0).assign == tuple((i, "b") for i in range(4, 8))


def test_a_batch_waits_for_one_worker_with_room_for_all():
    made = scheduler("bins", bins=1, workers=[worker("a", cap=3), worker("b", cap=3)])
    for i in range(6):
        made.offer(0.0, request(i, predicted=100))
    made.schedule(0.0)
    for i in range(6, 9):
        made.offer(0.1, request(i, 0.1, predicted=100))
    for i, left in enumerate([0, 1, 3, 4]):
        made.remove(0.2 + i / 10, left)
        assert not made.schedule(0.2 + i / 10)
    made.remove(0.7, 2)
    assert made.schedule(0.7).assign == ((6, "a"), (7, "a"), (8, "a"))


def test_a_bin_that_does_not_fill_leaves_in_time():
    made = scheduler("bins", bins=1, batch_wait_s=2.0, workers=[worker(cap=8)])
    made.offer(0.0, request(1))
    made.offer(1.5, request(2, 1.5))
    assert not made.schedule(1.5)
    assert made.next_s(1.5) == 2.0
    assert sent(made.schedule(2.0)) == [1, 2]


def test_bins_hold_requests_of_like_length():
    draws = random.Random(3)
    made = scheduler("bins", bins=4, workers=[worker(cap=5)], batch_wait_s=math.inf, max_wait_s=math.inf)
    for i in range(600):
        made.offer(0.01 * i, request(i, 0.01 * i, predicted=draws.uniform(1, 400)))
    made.schedule(6.0)
    batches = {}
    for entry in made.queue:
        if entry.batch > 40:
            batches.setdefault(entry.batch, []).append(entry.predicted_tokens)
    assert len(batches) > 40
    assert all(len(batch) == 5 for batch in batches.values())
    widths = [max(batch) - min(batch) for batch in batches.values()]
    assert sum(widths) / len(widths) < 100, "four bins over 400 tokens: a quarter each"


def test_members_that_leave_do_not_hold_their_batch_up():
    made = scheduler("bins", bins=1, workers=[worker(cap=3)], batch_wait_s=1.0)
    for i in range(5):
        made.offer(0.0, request(i))
    made.schedule(0.0)
    made.remove(0.1, 3)
    assert sent(made.schedule(1.0)) == []
    for i in range(3):
        made.remove(1.1, i)
    assert sent(made.schedule(1.1)) == [4]


@pytest.mark.parametrize(("long", "first"), [(100, 2), (1000, 3)])
def test_ranks_that_change_with_time_are_recomputed(long, first):
    """Highest response ratio: a long one that waited long enough goes before a short newcomer, not else."""
    made = scheduler("srtf", rank="hrrn", max_wait_s=math.inf)
    made.offer(0.0, request(1, predicted=1))
    made.schedule(0.0)
    made.offer(0.0, request(2, predicted=long))
    made.offer(50.0, request(3, 50.0, predicted=10))
    made.remove(51.0, 1)
    assert sent(made.schedule(51.0)) == [first]


def test_equal_ranks_keep_the_order_of_arrival_after_reranking():
    draws = random.Random(2)
    made = scheduler("srtf", rank="hrrn", workers=[])
    requested = [request(i, draws.choice([1.0, 2.0, 3.0]), predicted=draws.choice([5, 9])) for i in range(300)]
    for one in requested:
        made.offer(3.0, one)
    made.queue.rerank(4.0)
    in_turn = sorted(requested, key=lambda q: (q.length_prediction.total_tokens, q.arrival_s, q.id))
    assert [made.position(q.id) for q in in_turn] == list(range(300))


def test_tenants_take_turns_within_one_decision():
    made = scheduler("fcfs", fairness="vtc", workers=[worker(cap=4)])
    for i in range(8):
        made.offer(0.0, request(i, 0.01 * i, tenant=i // 4))
    assert sent(made.schedule(0.1)) == [0, 4, 1, 5]


def test_what_a_tenant_gets_for_one_model_counts_for_its_others():
    made = scheduler("fcfs", fairness="vtc", workers=[worker(cap=2, models=("m", "x"))])
    made.offer(0.0, request(0, 0.0, tenant=0))
    made.offer(0.0, request(1, 0.1, tenant=0, model="x"))
    made.offer(0.0, request(2, 0.2, tenant=1))
    assert sent(made.schedule(0.3)) == [0, 2]


def test_a_run_that_begins_again_has_all_its_tokens_before_it():
    made = scheduler("srtf")
    made.offer(0.0, q := request(1, predicted=100))
    made.schedule(0.0)
    made.on_progress(1.0, 1, 60)
    assert made.statistics(1.0).backlog_tokens == 40
    made.requeue(1.0, 1, 0)
    assert made.statistics(1.0).backlog_tokens == 100
    made.schedule(1.0)
    made.on_progress(2.0, 1, 10)
    assert q.generated_tokens == 10


def test_a_new_prediction_changes_the_place():
    made = scheduler("srtf")
    for i, predicted in enumerate([1, 50, 60]):
        made.offer(0.0, request(i, predicted=predicted))
    made.schedule(0.0)
    made.repredict(0.1, 1, LengthPrediction(900.0))
    assert [made.position(i) for i in (1, 2)] == [1, 0]


@pytest.mark.parametrize("mode", ["fcfs", "srtf", "isrtf", "windowed", "bins"])
def test_the_same_events_give_the_same_decisions(mode):
    def log():
        draws = random.Random(5)
        jobs = [
            (
                request(i, 0.05 * i, predicted=draws.choice([10, 10, 300, 900]), session=str(i % 3)),
                draws.choice([5, 400]),
            )
            for i in range(80)
        ]
        made = scheduler(mode, preemption="by_rank", fairness="vtc")
        return World(made, jobs, [worker("a", cap=2), worker("b", cap=3)]).run().log

    assert log() == log()


@pytest.mark.parametrize("mode", ["srtf", "isrtf", "windowed", "bins"])
def test_decisions_look_at_predicted_lengths_alone(mode):
    """Up to the first end of a request the true lengths change nothing."""

    def log(scale):
        jobs = [(request(i, 0.01 * i, predicted=400 / (i + 1)), (3000 + i) * scale) for i in range(30)]
        made = scheduler(mode, preemption="by_rank", batch_wait_s=0.2)
        world = World(made, jobs, [worker(cap=4)])
        world.run()
        first_s = min(job.finished_s for job in world.jobs.values())
        return [one for one in world.log if one[0] < min(first_s, 5.0)]

    assert log(1) == log(3) != []


def test_a_restarted_worker_is_served_again():
    made = scheduler("fcfs", workers=[worker(cap=2)])
    for i in range(3):
        made.offer(0.0, request(i))
    made.schedule(0.0)
    assert made.update_workers(1.0, [worker(cap=2, epoch=1)]) == (0, 1)
    assert made.statistics(1.0).running == 0
    made.requeue(1.0, 0, 30)
    made.remove(1.0, 1)
    assert sent(made.schedule(1.0)) == [0, 2], "it keeps its arrival"
    assert made.update_workers(2.0, []) == (0, 2)


def test_signals_and_statistics_are_reported():
    reported = WorkerState("w", ("m",), concurrency=1, tokens_per_s=50.0, signals=Signals(waiting=2.0, at_s=1.0))
    made = scheduler("fcfs", workers=[reported])
    for i in range(3):
        made.offer(0.0, request(i, predicted=100, prompt_tokens=0, body_bytes=7))
    made.schedule(0.0)
    now = made.statistics(4.0)
    assert (now.waiting, now.running, now.waiting_bytes, now.ordering) == (2, 1, 14, True)
    assert (now.oldest_wait_s, now.backlog_tokens, now.backlog_s) == (4.0, 300.0, 6.0)
    assert now.predicted_wait_s == pytest.approx((200 + 100) / 50)
    assert now.workers[0].backlog_s == pytest.approx(2.0)
    assert now.workers[0].signals.waiting == 2.0


def test_throughput_is_measured_from_the_tokens_that_come():
    made = scheduler("fcfs", workers=[worker(cap=1)])
    for i in range(2):
        made.offer(0.0, request(i, predicted=500, prompt_tokens=0))
    made.schedule(0.0)
    for step in range(1, 40):
        made.on_progress(0.1 * step, 0, 4 * step)
    assert made.statistics(4.0).predicted_wait_s == pytest.approx((500 + 500 - 156) / 40, rel=0.05)


def test_unknown_names_are_reported_at_the_start():
    from lengthwise.gateway.config import Admission, Order
    from lengthwise.schema.errors import UnknownNameError

    with pytest.raises(UnknownNameError, match="rank"):
        Scheduler(Order(rank="nonsense"), Admission(), Dispatch())
