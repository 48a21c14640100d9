"""The hub: decisions once a tick, every waiting request is answered, none is left behind."""

# ruff: noqa: A002 - the names of the scheduler's own arguments

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest
from relay_world import Ledger, pause, run, until

from lengthwise.gateway.request import DEFAULT_PREDICTION, Outcome, Refusal, Request
from lengthwise.gateway.scheduler_driver import (
    PREEMPTED,
    WORKER_GONE,
    NotServedError,
    RequestEndedError,
    SchedulerDriver,
)
from lengthwise.gateway.scheduling import Decisions, Statistics, WorkerState


class Fcfs:
    """First come first served at one place; what a scheduler must do, and no more."""

    def __init__(self, places: int = 1, *, most: int = 100) -> None:
        self.places, self.most = places, most
        self.queue: list[int] = []
        self.running: dict[int, str] = {}
        self.requests: dict[int, Request] = {}
        self.decided = 0
        self.cut: list[int] = []
        self.retained: list[int] = []
        self.gone: list[int] = []
        self.expire: list[int] = []
        self.alarm_s = math.inf

    def offer(self, now_s: float, request: Request) -> Refusal | None:
        if len(self.queue) >= self.most:
            return Refusal(429, "full", "too many", 1.0)
        self.requests[request.id] = request
        self.queue.append(request.id)
        return None

    def repredict(self, now_s, id, length_prediction) -> None:
        self.requests[id].length_prediction = length_prediction

    def on_progress(self, now_s, id, generated_tokens) -> None:
        self.requests[id].generated_tokens = generated_tokens

    def requeue(self, now_s, id, generated_tokens, *, avoid="") -> None:
        self.running.pop(id, None)
        self.queue.insert(0, id)

    def mark_nonpreemptible(self, now_s, id) -> None:
        self.retained.append(id)

    def on_queue_full(self, now_s, worker, id, hold_s=0.0) -> None:
        self.on_queue_full(now_s, id, 0)

    def remove(self, now_s, id, *, client_gone=False) -> None:
        self.gone += [id] if client_gone else []
        self.running.pop(id, None)
        if id in self.queue:
            self.queue.remove(id)

    def update_workers(self, now_s: float, states: Sequence[WorkerState]) -> tuple[int, ...]:
        return tuple(self.running) if not states else ()

    def schedule(self, now_s: float) -> Decisions:
        self.decided += 1
        if now_s >= self.alarm_s:
            self.expire, self.alarm_s = list(self.queue), math.inf
        expire, cut, self.expire, self.cut = self.expire, self.cut, [], []
        self.queue = [one for one in self.queue if one not in expire]
        assign = []
        while self.queue and len(self.running) < self.places:
            self.running[self.queue[0]] = "w"
            assign.append((self.queue.pop(0), "w"))
        refusal = Refusal(503, "no_engine", "none", 1.0)
        return Decisions(tuple((one, refusal) for one in expire), tuple(cut), tuple(assign))

    def next_s(self, now_s: float) -> float:
        return self.alarm_s

    def statistics(self, now_s: float) -> Statistics:
        return Statistics(len(self.queue), 0, len(self.running), 0.0, 0.0, 0.0, 0.0, False, 0)

    def position(self, id: int) -> int | None:
        return self.queue.index(id) if id in self.queue else None


def request(k: int) -> Request:
    return Request(k, 0.0, "m", 1, 100)


def hub_of(**named) -> tuple[SchedulerDriver, Fcfs, Ledger]:
    scheduler, ledger = Fcfs(**named), Ledger()
    return SchedulerDriver(scheduler, listeners=[ledger]), scheduler, ledger


def test_turns_come_in_the_schedulers_order_and_decisions_once_a_tick():
    async def work() -> None:
        driver, scheduler, ledger = hub_of()
        tasks = [asyncio.ensure_future(driver.enter(request(k))) for k in range(20)]
        await pause(0.01)
        assert scheduler.decided == 1
        order = []
        for k in range(20):
            ticket = await tasks[k]
            order.append(ticket.request.id)
            ticket.end(Outcome.FINISHED)
            ticket.end(Outcome.FAILED)
        assert order == list(range(20))
        assert ledger.outcomes == {Outcome.FINISHED: 20}
        assert driver.num_requests == 0

    run(work)


def test_a_refused_request_never_arrives():
    async def work() -> None:
        driver, _, ledger = hub_of(most=0)
        with pytest.raises(NotServedError) as no:
            await driver.enter(request(1))
        assert no.value.refusal.status == 429
        assert ledger.events == []
        assert driver.num_requests == 0

    run(work)


def test_a_request_that_waits_in_vain_expires_when_the_scheduler_decides():
    async def work() -> None:
        driver, scheduler, ledger = hub_of(places=0)
        scheduler.alarm_s = driver.clock() + 0.3
        with pytest.raises(NotServedError):
            await asyncio.wait_for(driver.enter(request(1)), 1)
        assert ledger.outcomes == {Outcome.EXPIRED: 1}
        assert driver.num_requests == 0

    run(work)


@pytest.mark.parametrize("when", ["waiting", "assigned", "retry"])
def test_a_client_that_goes_leaves_nothing(when: str):
    async def work() -> None:
        driver, scheduler, ledger = hub_of(places=0 if when == "waiting" else 1)
        task = asyncio.ensure_future(driver.enter(request(1)))
        await asyncio.sleep(0)
        if when == "assigned":
            driver.schedule()  # the future has its result, the task has not seen it yet
        if when == "retry":
            ticket = await task
            scheduler.places = 0
            task = asyncio.ensure_future(ticket.requeue("preemption"))
            await pause(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert driver.num_requests == 0
        assert scheduler.queue == []
        assert scheduler.running == {}
        assert ledger.outcomes == {Outcome.CLIENT_GONE: 1}

    run(work)


def test_a_count_above_what_the_request_allows_is_limited_to_it():
    async def work() -> None:
        driver, _scheduler, _ledger = hub_of()
        ticket, _received = await driver.enter(request(1)), []
        for count in (1_000_000, 10**30):
            ticket.on_progress(count)
            assert ticket.request.generated_tokens <= ticket.request.choices * ticket.request.max_tokens
        driver.close()

    run(work)


def test_a_preemption_is_reported_and_the_request_runs_again():
    async def work() -> None:
        driver, scheduler, ledger = hub_of()
        ticket, received = await driver.enter(request(1)), []
        ticket.on_interrupt = received.append
        ticket.on_progress(7)
        ticket.on_progress(7)
        scheduler.cut = [1]
        driver.wake()
        await pause(0.01)
        assert received == [PREEMPTED]
        assert ticket.is_interrupted
        assert await ticket.requeue("preemption") is ticket
        assert (ticket.worker, ticket.is_interrupted) == ("w", False)
        assert ledger.tokens_of == {1: 7}
        assert ledger.cause == ["preemption"]
        ticket.end(Outcome.FINISHED)
        with pytest.raises(RequestEndedError):
            await ticket.requeue("preemption")

    run(work)


def test_a_request_at_a_lost_worker_is_notified():
    async def work() -> None:
        driver, _, _ = hub_of()
        ticket, received = await driver.enter(request(1)), []
        ticket.on_interrupt = received.append
        driver.fleet_changed([])
        assert received == [WORKER_GONE]
        ticket.end(Outcome.FAILED)

    run(work)


@pytest.mark.parametrize("outcome", [Outcome.CLIENT_GONE, Outcome.FAILED])
def test_the_scheduler_is_notified_of_a_client_that_leaves(outcome):
    async def work() -> None:
        driver, scheduler, _ = hub_of()
        ticket = await driver.enter(request(1))
        ticket.end(outcome)
        assert scheduler.gone == [1] * (outcome is Outcome.CLIENT_GONE)

    run(work)


def test_a_request_can_be_cancelled_while_it_waits_again():
    async def work() -> None:
        driver, scheduler, ledger = hub_of()
        ticket = await driver.enter(request(1))
        scheduler.places = 0
        task = asyncio.ensure_future(ticket.requeue("preemption"))
        await pause(0.01)
        ticket.end(Outcome.CLIENT_GONE)
        with pytest.raises(RequestEndedError):
            await task
        assert ledger.outcomes == {Outcome.CLIENT_GONE: 1}
        driver.repredict(ticket.request.id, DEFAULT_PREDICTION)  # too late, and no harm

    run(work)


def test_closing_notifies_all_active_requests():
    async def work() -> None:
        driver, _, ledger = hub_of()
        tasks = [asyncio.ensure_future(driver.enter(request(k))) for k in range(3)]
        await pause(0.01)
        emptied = asyncio.ensure_future(driver.wait_empty())
        driver.close()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        reported = [one.refusal for one in done[1:] if isinstance(one, NotServedError)]
        assert [(one.status, one.reason, one.retry_after_s) for one in reported] == [(503, "draining", 1.0)] * 2
        with pytest.raises(NotServedError):
            await driver.enter(request(3))
        await emptied
        assert ledger.outcomes == {Outcome.FAILED: 3}

    run(work)


def test_a_nonpreemptible_request_reports_it_once_and_may_be_preempted_elsewhere():
    async def work() -> None:
        driver, scheduler, _ = hub_of()
        one = request(1)
        one.preemptible = True
        ticket = await driver.enter(one)
        ticket.is_interrupted = True
        ticket.mark_nonpreemptible()
        ticket.mark_nonpreemptible()
        assert (scheduler.retained, ticket.is_interrupted) == ([1], False)
        await ticket.requeue("failed_over")
        ticket.mark_nonpreemptible()
        assert scheduler.retained == [1, 1]
        ticket.end(Outcome.FINISHED)
        ticket.mark_nonpreemptible()
        other = await driver.enter(request(2))
        other.mark_nonpreemptible()  # it is never preempted anyway
        assert scheduler.retained == [1, 1]
        other.end(Outcome.FINISHED)

    run(work)


def test_all_tasks_that_wait_for_an_empty_hub_are_notified():
    async def work() -> None:
        driver, _, _ = hub_of()
        ticket = await driver.enter(request(1))
        waiting = [asyncio.ensure_future(driver.wait_empty()) for _ in range(3)]
        await asyncio.sleep(0)
        ticket.end(Outcome.FINISHED)
        async with asyncio.timeout(60):
            await asyncio.gather(*waiting)
            await driver.wait_empty()

    run(work)


def test_a_decision_that_became_due_earlier_is_not_slept_over():
    """Tokens may bring forward what the hub sleeps until; it is woken then, and not by each of them."""

    async def work() -> None:
        driver, scheduler, _ = hub_of()
        ticket = await driver.enter(request(1))
        await pause(0.01)
        decided = scheduler.decided
        scheduler.alarm_s = driver.clock() + 0.3
        for total in range(1, 20):
            ticket.on_progress(total)
        await asyncio.sleep(0)
        assert scheduler.decided == decided
        await until(lambda: scheduler.decided > decided)
        await pause(0.05)
        assert scheduler.decided == decided + 1
        ticket.end(Outcome.FINISHED)

    run(work)
