"""The order inside an engine is that of the policies; no request waits for ever, none is lost."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugin_world import Clock, Queue, Scheduler, request

from lengthwise.gateway.plugin.length_scheduler import OrderedScheduler, QueueOrder, Registry
from lengthwise.gateway.plugin.settings import Settings, settings_of
from lengthwise.policy import ranks
from lengthwise.schema.errors import InputError


class Ordered(OrderedScheduler, Scheduler):
    """The mixin in front of vLLM's class in the order of bases."""


def ordered(settings: Settings, clock=None, **scheduler) -> Ordered:
    made = Ordered(**scheduler)
    made.lengthwise = QueueOrder(settings, clock or Clock())
    return made


SRTF = Settings(preemption="never")

QUEUES = st.lists(st.tuples(st.integers(0, 500), st.integers(-2, 2), st.integers(0, 200)), min_size=1, max_size=40)


@given(QUEUES)
def test_the_order_is_that_of_the_policy_within_classes_and_equal_keys_stay_in_order_of_arrival(queue):
    book, requests = Registry(SRTF, Clock()), []
    for k, (predicted, priority, generated) in enumerate(queue):
        one = request(f"r{k}", predicted, lengthwise_class=priority)
        one.output = [1] * generated
        requests.append(one)
        book.add(one)

    def place(k):
        predicted, priority, generated = queue[k]
        return priority, ranks.srtf.function(max(1.0, predicted - generated)), k

    assert book.in_order(requests) == [requests[k] for k in sorted(range(len(queue)), key=place)]


@given(QUEUES, st.sampled_from(["srtf", "sjf", "shortest_prompt", "hrrn", "aged(weight=3)", "fcfs"]))
def test_every_rank_gives_the_order_that_the_gateways_own_queue_has(queue, rank):
    from lengthwise.gateway.config import Admission, Dispatch, Order
    from lengthwise.gateway.core import Scheduler as Core
    from lengthwise.gateway.request import Client, LengthPrediction
    from lengthwise.gateway.request import Request as Live
    from lengthwise.gateway.scheduling import WorkerState

    clock = Clock()
    book, requests = Registry(Settings(rank=rank, preemption="never"), clock), []
    core = Core(Order(mode="srtf", rank=rank), Admission(), Dispatch())
    core.update_workers(clock.now_s, [WorkerState("w", ("m",), up=False)])
    for k, (predicted, priority, prompt) in enumerate(queue):
        clock.now_s += 0.1 * (k % 3)
        one = request(f"r{k}", predicted, prompt=1 + prompt, lengthwise_class=priority)
        requests.append(one)
        book.add(one)
        live = Live(
            k,
            clock.now_s,
            "m",
            1 + prompt,
            4096,
            Client(priority=priority),
            length_prediction=LengthPrediction(float(predicted)),
        )
        assert core.offer(clock.now_s, live) is None
    clock.now_s += 5.0
    core.update_workers(clock.now_s, [WorkerState("w", ("m",), concurrency=len(queue))])
    sent = [k for k, _ in core.schedule(clock.now_s).assign]
    assert [int(one.request_id[1:]) for one in book.in_order(requests)] == sent


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 2), st.sampled_from("+++o-c")), min_size=20, max_size=120),
    st.sampled_from(["srtf", "hrrn"]),
)
def test_putting_the_moved_in_their_places_gives_the_order_that_sorting_gives(events, rank):
    clock = Clock()
    book = Registry(Settings(rank=rank, max_wait_s=2.0), clock)
    waiting, running = Queue(), []
    for k, (predicted, priority, event) in enumerate(events):
        clock.now_s += 0.05
        waiting.append(request(f"r{k}", predicted, lengthwise_class=priority))
        book.add(waiting[-1])
        if event == "o" and running:
            one = running.pop()
            one.output.extend([1] * predicted)
            book.on_preempted(one)
            waiting.appendleft(one)
        if event == "-":
            running.append(waiting.popleft())
            book.on_admitted(running)
        if event == "c":
            del waiting[len(waiting) // 2]
        if k % 3 and book.needs_sort():
            ordered = book.in_order(waiting)
            now_s = clock.now_s
            assert ordered == sorted(waiting, key=lambda one: book.key(now_s, book.entry(one)))
            waiting = Queue(ordered)


def test_short_ones_end_first_and_the_stock_order_comes_back_without_the_plug_in():
    plain, made = Scheduler(max_num_seqs=1), ordered(SRTF, max_num_seqs=1)
    for scheduler in (plain, made):
        for k, length in enumerate((90, 50, 10, 70, 5)):
            scheduler.add_request(request(f"r{k}", length, length=length))
    assert plain.run() == ["r0", "r1", "r2", "r3", "r4"]
    assert made.run() == ["r4", "r2", "r1", "r3", "r0"]


def test_overdue_requests_precede_all_others_in_order_of_arrival():
    clock = Clock()
    made = ordered(Settings(preemption="never", max_wait_s=5.0), clock, max_num_seqs=1)
    for name in ("old-a", "old-b"):
        made.add_request(request(name, 400, length=4, lengthwise_class=3))
    ended_at = {}
    for step in range(400):
        if step < 200:
            made.add_request(request(f"new{step}", 2, length=2))
        made.schedule()
        made.tokens()
        clock.now_s += 0.1
        for name in made.finished:
            ended_at.setdefault(name, clock.now_s - 100.0)
    # Overdue at 5 s, then one after the other, each of 4 steps, behind the one that ran.
    assert ended_at["old-a"] <= 5.0 + 0.7
    assert ended_at["old-a"] < ended_at["old-b"] <= 5.0 + 1.1


def test_a_rank_gets_the_number_of_a_preemption_among_those_of_all_requests():
    book, requests = Registry(Settings(rank="fcfs_preempted_first"), Clock()), [request("a"), request("b")]
    for one in requests:
        book.add(one)
    assert book.on_admitted(requests)
    for one in requests:
        book.on_preempted(one)
    assert book.in_order(requests) == requests[::-1], "the last one preempted is first"


def test_time_in_the_batch_does_not_count_as_waiting():
    clock = Clock()
    book = Registry(Settings(max_wait_s=10.0), clock)
    one, two = request("one", 100), request("two", 50)
    book.add(one)
    clock.now_s += 6
    book.on_admitted([one])
    clock.now_s += 60
    one.num_preemptions += 1
    book.on_preempted(one)
    book.add(two)
    assert book.needs_sort()
    assert book.in_order([one, two]) == [two, one]
    clock.now_s += 3.9
    assert not book.needs_sort()
    clock.now_s += 0.2
    assert book.needs_sort()
    assert book.in_order([two, one]) == [one, two]


def test_a_longer_one_gives_way_and_is_not_taken_back_in_the_same_step():
    made = ordered(Settings(preemption="worth(factor=0)", window_tokens=10, preemptions_per_s=1e9), max_num_seqs=1)
    made.add_request(request("long", 500, length=500))
    for _ in range(30):
        made.schedule()
        made.tokens()
    made.add_request(request("short", 5, length=5))
    assert made.schedule() == ["short"]
    assert [one.request_id for one in made.waiting] == ["long"]
    assert made.run() == ["short", "long"]
    assert made.readmitted_at_once == 0


def test_a_request_without_memory_takes_it_from_a_longer_one():
    made = ordered(Settings(preemption="worth(factor=0)", window_tokens=10, preemptions_per_s=1e9), max_num_seqs=2)
    made.add_request(request("long", 500, length=500))
    for _ in range(30):
        made.schedule()
        made.tokens()
    made.blocks = 1  # a second one does not fit
    made.add_request(request("short", 5, length=5))
    assert made.schedule() == ["long"]
    made.kv_used = 0.5
    assert made.schedule() == ["long"]  # something else is in its way
    made.kv_used = 1.0
    assert made.schedule() == ["short"]
    assert made.run() == ["short", "long"]


def test_only_a_strictly_better_request_takes_a_slot_and_never_one_of_a_better_class():
    for reported in ({"predicted": 500 - 30}, {"predicted": 5, "lengthwise_class": 1}):
        made = ordered(Settings(preemption="worth(factor=0)", window_tokens=10, preemptions_per_s=1e9), max_num_seqs=1)
        made.add_request(request("long", 500, length=500))
        for _ in range(30):
            made.schedule()
            made.tokens()
        made.add_request(request("other", **reported))
        assert made.schedule() == ["long"]


def test_a_stream_of_short_ones_cuts_a_long_one_so_often_and_no_more():
    clock = Clock()
    settings = Settings(preemption="worth(factor=0)", window_tokens=5, max_preemptions=2, preemptions_per_s=1e9)
    made = ordered(settings, clock, max_num_seqs=1)
    long = request("long", 400, length=400)
    made.add_request(long)
    for step in range(1500):
        if step % 10 == 3:
            made.add_request(request(f"s{step}", 3, length=3))
        made.schedule()
        made.tokens()
        clock.now_s += 0.01
    assert long.num_preemptions == 2
    assert "long" in made.finished


def test_preemptions_respect_the_rate_limit():
    clock, cuts = Clock(), []
    made = ordered(
        Settings(preemption="worth(factor=0)", window_tokens=1, max_preemptions=99, preemptions_per_s=2.0),
        clock,
        max_num_seqs=1,
    )
    long = request("long", 4000, length=4000)
    made.add_request(long)
    for step in range(1000):
        if step % 10 == 3:
            made.add_request(request(f"s{step}", 1, length=1))
        before = long.num_preemptions
        made.schedule()
        made.tokens()
        cuts += [clock.now_s] * (long.num_preemptions - before)
        clock.now_s += 0.01
    assert len(cuts) > 2
    assert np.diff(cuts).min() >= 0.5


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60), st.integers(0, 3)), min_size=1, max_size=30))
def test_no_request_is_lost_or_duplicated_whatever_is_predicted_preempted_or_aborted(requests):
    clock = Clock()
    settings = Settings(preemption="worth(factor=0)", window_tokens=4, preemptions_per_s=1e9, max_wait_s=1.0)
    made = ordered(settings, clock, max_num_seqs=3)
    aborted = set()
    for k, (length, predicted, every) in enumerate(requests):
        made.add_request(request(f"r{k}", predicted, length=length, max_tokens=length))
        made.kv_used = 0.9 if k % 2 else 0.1
        made.schedule()
        made.tokens()
        clock.now_s += 0.05
        if every == 3 and f"r{k}" in made.requests:
            made.finish_requests(f"r{k}", None)
            aborted.add(f"r{k}")
        present = [one.request_id for one in (*made.waiting, *made.running)]
        assert sorted(present) == sorted(made.requests)
    made.run()
    assert made.lengthwise is not None
    assert sorted([*made.finished, *aborted]) == sorted(f"r{k}" for k in range(len(requests)))


def test_when_memory_is_tight_the_longest_remaining_is_last_except_for_prefilling_requests():
    made = ordered(SRTF, max_num_seqs=4)
    for name, predicted in (("long", 300), ("short", 20), ("middle", 90)):
        made.add_request(request(name, predicted, length=1000))
    made.schedule()
    made.tokens()
    made.running.reverse()
    made.schedule()
    assert [str(one) for one in made.running] == ["long", "middle", "short"]  # enough memory: as it was
    reads = request("reads", 1, length=1000)
    made.add_request(reads)
    made.schedule()
    reads.is_prefill_chunk = True
    made.kv_used = 0.9
    made.schedule()
    assert [str(one) for one in made.running] == ["short", "middle", "long", "reads"]


def test_what_is_over_is_forgotten():
    made = ordered(SRTF, max_num_seqs=4)
    for k in range(2000):
        made.add_request(request(f"r{k}", 1, length=1))
        made.schedule()
        made.tokens()
    assert len(made.lengthwise.registry) <= 260


def test_predictions_are_read_again_every_window():
    book = Registry(Settings(window_tokens=50), Clock())
    one = request("one", 60, lengthwise_later=[50, 120, 100, 400])
    entry = book.add(one)
    for generated, predicted in ((0, 60), (49, 60), (50, 120), (99, 120), (100, 400), (399, 400)):
        one.output = [1] * generated
        assert book.lengths(entry)[1] == max(1, predicted - generated)


def test_unusable_settings_are_reported():
    assert settings_of({}) == settings_of(None) == Settings()
    assert settings_of({"lengthwise": {"max_wait_s": 3}}).max_wait_s == 3
    for reported, states in (
        ({"rnak": "srtf"}, "rank"),
        ({"rank": "gittins"}, "gittins_rank"),
        ({"rank": "nobody"}, "nobody"),
        ({"preemption": "worth(factor=-1)"}, "factor"),
        ({"max_wait_s": "soon"}, "max_wait_s"),
        ({"max_wait_s": math.nan}, "max_wait_s"),
        ({"window_tokens": 0}, "window_tokens"),
        ({"trust_version": 1}, "trust_version"),
        ({"max_preemptions_per_request": 0.5}, "max_preemptions_per_request needs reserve = true"),
    ):
        with pytest.raises(InputError, match=states):
            settings_of({"lengthwise": reported})
