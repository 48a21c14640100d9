"""The scheduler against an obvious one that sorts a list, under any events."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_worlds import request, scheduler, worker

from lengthwise.gateway.config import Admission, Dispatch, Order
from lengthwise.gateway.core.ranking import State
from lengthwise.gateway.request import LengthPrediction

MAX_WAIT_S = 5.0
NAMES = ("a", "b", "c")
SERVES = {"a": ("m",), "b": ("m", "other"), "c": ("other",)}
CAPS = {"a": 1, "b": 2, "c": 1}
PREDICTIONS = st.sampled_from([0.0, 1.0, 7.0, 7.0, 50.0, 400.0, 1e9, math.inf])


class Obvious(RuleBasedStateMachine):
    """Keeps its own lists; after every event it determines which requests must be sent, by sorting all that wait."""

    max_wait_s = MAX_WAIT_S

    @initialize(mode=st.sampled_from(["fcfs", "srtf"]), fairness=st.sampled_from(["none", "vtc"]))
    def start(self, mode, fairness):
        self.mode, self.fair = mode, fairness == "vtc"
        self.now_s, self.ids = 0.0, 0
        self.requests, self.enqueued_at_s, self.queued_for_s = {}, {}, {}
        self.running, self.lost, self.worker_of = {}, set(), {}
        self.up, self.epochs = dict.fromkeys(NAMES, True), dict.fromkeys(NAMES, 0)
        self.served, self.charged, self.level = {}, {}, 0.0
        self.scheduler = scheduler(
            mode,
            fairness=fairness,
            max_wait_s=MAX_WAIT_S,
            admission=Admission(no_engine_s=math.inf),
            workers=self.states(),
        )

    def states(self):
        return [
            worker(name, cap=CAPS[name], models=SERVES[name], up=self.up[name], epoch=self.epochs[name])
            for name in NAMES
        ]

    # -- the obvious scheduler ---------------------------------------------------------------

    def predicted(self, q):
        return min(max(q.length_prediction.total_tokens, 0.0), float(q.max_tokens))

    def overdue(self, one):
        return self.queued_for_s[one] + (self.now_s - self.enqueued_at_s[one]) >= self.max_wait_s - 1e-9

    def turn(self, one):
        q = self.requests[one]
        if self.overdue(one) and not self.fair:
            return (-math.inf, q.arrival_s, q.id)
        left = max(1.0, self.predicted(q) - q.generated_tokens)
        served = self.served.get(q.client.tenant, 0.0) if self.fair else 0.0
        key = left if self.mode == "srtf" else q.arrival_s
        priority, key = (self.best, -math.inf) if self.overdue(one) else (q.client.priority, key)
        return (priority, served, key, q.arrival_s, q.id)

    def sort(self):
        """Begins a sort: with fairness, who is overdue is of the best class of those who are not."""
        self.best = min(
            (self.requests[one].client.priority for one in self.enqueued_at_s if not self.overdue(one)), default=0
        )

    def available(self, one):
        q = self.requests[one]
        serving = [name for name in NAMES if self.up[name] and q.model in SERVES[name]]
        if self.overdue(one):
            return serving
        return [name for name in serving if name not in q.dispatch.avoid] or serving

    def check(self):
        """Sends the decided requests, provided that they match the sorted order."""
        decisions = self.scheduler.schedule(self.now_s)
        assert not decisions.preempt
        assert not decisions.expire
        room = {name: CAPS[name] - sum(at == name for at in self.running.values()) for name in NAMES}
        claimed, waiting = set(), set(self.enqueued_at_s)
        self.sort()
        first_waiting = set(waiting)
        assigned = dict(decisions.assign)
        while waiting:
            one = min(waiting, key=self.turn)
            waiting.remove(one)
            usable = self.available(one)
            free = [name for name in usable if room[name] > 0 and name not in claimed]
            if not free:
                assert one not in assigned
                claimed |= set(usable)
                continue
            assert assigned.pop(one, None) in free
            name = dict(decisions.assign)[one]
            room[name] -= 1
            self.sends(one, name)
        assert not assigned
        assert [one for one, _ in decisions.assign if one not in first_waiting] == []

    def sends(self, one, name):
        q = self.requests[one]
        self.queued_for_s[one] += self.now_s - self.enqueued_at_s.pop(one)
        prompt = q.prompt_tokens if one not in self.charged else 0
        self.pay(one, prompt, self.predicted(q))
        self.running[one] = name
        self.stops_waiting(q.client.tenant)

    def pay(self, one, prompt, output):
        q = self.requests[one]
        more = 2 * (output - self.charged.get(one, 0.0))
        self.served[q.client.tenant] = self.served.get(q.client.tenant, 0.0) + prompt + more
        self.charged[one] = output

    def waits(self, one):
        q = self.requests[one]
        present = {self.requests[other].client.tenant for other in self.enqueued_at_s}
        if q.client.tenant not in present:
            level = min((self.served.get(t, 0.0) for t in present), default=self.level)
            self.served[q.client.tenant] = max(self.served.get(q.client.tenant, 0.0), level)
        self.enqueued_at_s[one] = self.now_s

    def stops_waiting(self, tenant):
        if tenant not in {self.requests[other].client.tenant for other in self.enqueued_at_s}:
            self.level = self.served.get(tenant, 0.0)

    # -- events ------------------------------------------------------------------------------

    @rule(
        predicted=PREDICTIONS,
        priority=st.sampled_from([0, 0, 1]),
        tenant=st.sampled_from([0, 1, 2]),
        model=st.sampled_from(["m", "m", "other"]),
    )
    def arrives(self, predicted, priority, tenant, model):
        self.ids += 1
        q = request(
            self.ids, self.now_s, predicted=predicted, priority=priority, tenant=tenant, model=model, max_tokens=1000
        )
        self.requests[q.id], self.queued_for_s[q.id] = q, 0.0
        assert self.scheduler.offer(self.now_s, q) is None
        self.waits(q.id)
        self.check()

    @rule(seconds=st.sampled_from([0.25, 1.0, 4.0]))
    def passes(self, seconds):
        """Time, deciding whenever the scheduler asks for it."""
        end_s = self.now_s + seconds
        while self.scheduler.next_s(self.now_s) <= end_s:
            self.now_s = max(self.now_s, self.scheduler.next_s(self.now_s))
            self.check()
        self.now_s = end_s
        self.check()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.sampled_from([0, 3, 120]))
    def comes_back(self, data, tokens):
        one = data.draw(st.sampled_from(sorted(self.running)))
        name = self.running.pop(one)
        q = self.requests[one]
        generated = q.generated_tokens + tokens
        self.scheduler.requeue(self.now_s, one, generated, avoid=name if tokens == 3 else "")
        self.pay(one, 0, float(generated))
        self.waits(one)
        self.check()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.sampled_from([1, 60]))
    def makes_tokens(self, data, tokens):
        one = data.draw(st.sampled_from(sorted(self.running)))
        self.scheduler.on_progress(self.now_s, one, self.requests[one].generated_tokens + tokens)
        self.check()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), predicted=PREDICTIONS)
    def is_predicted_anew(self, data, predicted):
        one = data.draw(st.sampled_from(sorted(self.requests)))
        self.scheduler.repredict(self.now_s, one, LengthPrediction(predicted))
        self.requests[one].length_prediction = LengthPrediction(predicted)
        self.check()

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), retry=st.booleans())
    def leaves(self, data, retry):
        one = data.draw(st.sampled_from(sorted(self.requests)))
        for _ in range(1 + retry):
            self.scheduler.remove(self.now_s, one)
        q = self.requests[one]
        waited = self.enqueued_at_s.pop(one, None) is not None
        if waited:
            self.stops_waiting(q.client.tenant)
        else:
            self.pay(one, 0, float(q.generated_tokens))
        self.running.pop(one, None)
        self.lost.discard(one)
        del self.requests[one]
        self.check()

    @rule(name=st.sampled_from(NAMES), epoch=st.booleans())
    def worker_changes(self, name, epoch):
        """The worker goes down or comes up; or it restarts and loses its requests."""
        if epoch:
            self.epochs[name] += 1
        else:
            self.up[name] = not self.up[name]
        lost = self.scheduler.update_workers(self.now_s, self.states())
        assert set(lost) == {one for one, at in self.running.items() if at == name and epoch}
        for one in lost:
            del self.running[one]
            self.lost.add(one)
        self.check()

    @rule(max_wait_s=st.sampled_from([1.0, MAX_WAIT_S, 20.0, math.inf]), fair=st.booleans())
    def is_told_another_order(self, max_wait_s, fair):
        self.max_wait_s, self.fair = max_wait_s, fair
        order = Order(mode=self.mode, max_wait_s=max_wait_s, fairness="vtc" if fair else "none")
        self.scheduler.configure(self.now_s, order, Admission(no_engine_s=math.inf), Dispatch())
        self.check()

    @precondition(lambda self: self.lost)
    @rule()
    def lost_ones_come_back(self):
        for one in sorted(self.lost):
            self.scheduler.requeue(self.now_s, one, self.requests[one].generated_tokens)
            self.pay(one, 0, float(self.requests[one].generated_tokens))
            self.waits(one)
        self.lost.clear()
        self.check()

    # -- what always holds -------------------------------------------------------------------

    @invariant()
    def every_request_is_in_exactly_one_state(self):
        states = {one: entry.state for one, entry in self.scheduler.entries.items()}
        assert {one for one, at in states.items() if at is State.WAITING} == set(self.enqueued_at_s)
        assert {one for one, at in states.items() if at is State.RUNNING} == set(self.running)
        assert {one for one, at in states.items() if at is State.LOST} == self.lost
        assert set(states) == set(self.requests)

    @invariant()
    def numbers_add_up(self):
        reported = self.scheduler.statistics(self.now_s)
        assert reported.waiting == len(self.enqueued_at_s)
        assert reported.running == len(self.running)
        assert {w.name: w.in_flight for w in reported.workers} == {
            name: sum(at == name for at in self.running.values()) for name in NAMES
        }
        left = [
            max(1.0, self.predicted(q) - q.generated_tokens) for one, q in self.requests.items() if one not in self.lost
        ]
        assert abs(reported.backlog_tokens - sum(left)) <= 1e-6 * (1 + sum(left))

    @invariant()
    def places_are_those_of_sorting(self):
        self.scheduler.queue.promote(self.now_s)
        self.sort()
        in_turn = sorted(self.enqueued_at_s, key=self.turn)
        assert [entry.request.id for entry in self.scheduler.queue.in_order()] == in_turn
        assert all(self.scheduler.position(one) is None for one in self.running)
        if not self.fair or len({self.served.get(t, 0.0) for t in (0, 1, 2)}) == 3:
            assert [self.scheduler.position(one) for one in in_turn] == list(range(len(in_turn)))


TestObvious = pytest.mark.slow(Obvious.TestCase)
TestObvious.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
