"""Several gateways in virtual time: their schedulers, the store of the lease, and links that may lose messages."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from dataclasses import dataclass

from scheduler_worlds import request, worker

from lengthwise.gateway.config import Admission, Dispatch, Order
from lengthwise.gateway.core import Scheduler
from lengthwise.gateway.edge import Tenants
from lengthwise.gateway.shared_queue import SharedScheduler

LEASE_S, TOKEN_S, WINDOW = 2.0, 0.01, 50


@dataclass
class Job:
    """A request that arrives at a gateway (a number), and what became of it."""

    gateway: int
    arrival_s: float
    tokens: int
    tenant: int = 0
    priority: int = 0
    worker: str = ""
    generated: int = 0
    visit: int = 0
    finished: int = 0


class World:
    """Runs jobs at ``count`` gateways, or with 0 at one ordinary scheduler, before engines with ``caps`` slots.

    ``faults`` maps the number of a message to what happens at it: "kill sender", "kill receiver", "lose",
    "outage" (the store is down for two leases) or "partition" (all messages from and to its sender come two leases
    late). ``dispatched`` are the decisions: time, job and worker; ``over_limit`` counts a
    leader's decisions beyond the slots of an engine.
    """

    def __init__(self, count, jobs, caps, *, faults=None, delay_s=0.0, mode="srtf", **order):
        self.jobs, self.caps, self.faults, self.delay_s = jobs, caps, dict(faults or {}), delay_s
        self.now_s, self.events, self.number, self.timers = 0.0, [], itertools.count(), set()
        self.dispatched, self.sent, self.over_limit = [], 0, 0
        self.leader, self.epoch, self.until_s, self.members, self.down_until_s = "", 0, -1.0, {}, -1.0
        self.late_until_s: dict[str, float] = {}
        self.order = Order(mode=mode, **order)
        self.gateways: dict[str, Scheduler] = {}
        self.tenants: dict[str, Tenants] = {}
        settings = self.order, Admission(), Dispatch()
        self.is_shared = count > 0
        if not count:
            self.gateways["0"] = Scheduler(*settings)
        for number in range(count):
            tenants = self.tenants[str(number)] = Tenants()
            for tenant in range(1, 5):  # each gateway meets tenants in an order of its own
                tenants.number(f"tenant {(tenant + number) % 4 + 1}")
            self.gateways[str(number)] = SharedScheduler(
                *settings, gateway=str(number), lease_s=LEASE_S, tenants=tenants
            )
            self.at(number * 0.001, self.heartbeat, str(number))
        for scheduler in self.gateways.values():
            scheduler.update_workers(0.0, [worker(name, cap=cap) for name, cap in caps.items()])
        for number, job in enumerate(jobs):
            self.at(job.arrival_s, self.arrive, number)

    def at(self, time_s, what, *arguments):
        heapq.heappush(self.events, (time_s, next(self.number), what, arguments))

    def run(self, until_s=1e9):
        while self.events and self.events[0][0] <= until_s and not all(job.finished for job in self.alive()):
            self.now_s, _, what, arguments = heapq.heappop(self.events)
            what(*arguments)
            self.settle()
        return self

    def alive(self):
        return [job for job in self.jobs if self.gateway(job) is not None]

    def gateway(self, job):
        return self.gateways.get(str(job.gateway))

    # -- events -------------------------------------------------------------------------------

    def arrive(self, number):
        job = self.jobs[number]
        if (scheduler := self.gateway(job)) is None:
            return
        tenant = job.tenant
        if tenant and self.is_shared:
            tenant = self.tenants[str(job.gateway)].number(f"tenant {tenant}")
        q = request(number, self.now_s, predicted=job.tokens, tenant=tenant, priority=job.priority)
        assert scheduler.offer(self.now_s, q) is None

    def window(self, number, visit):
        job = self.jobs[number]
        scheduler = self.gateway(job)
        if scheduler is None or job.visit != visit or not job.worker:
            return
        job.generated = min(job.generated + WINDOW, job.tokens)
        scheduler.on_progress(self.now_s, number, job.generated)
        if job.generated == job.tokens:
            job.finished, job.worker = job.finished + 1, ""
            scheduler.remove(self.now_s, number)
        else:
            self.plan(number)

    def plan(self, number):
        job = self.jobs[number]
        self.at(self.now_s + TOKEN_S * min(WINDOW, job.tokens - job.generated), self.window, number, job.visit)

    def heartbeat(self, name):
        scheduler = self.gateways.get(name)
        if scheduler is None:
            return
        self.at(self.now_s + LEASE_S / 4, self.heartbeat, name)
        if self.now_s < self.late_until_s.get(name, -1.0):
            return
        if self.now_s < self.down_until_s:
            scheduler.leave(self.now_s, "the store is lost")
            return
        self.members[name] = self.now_s + LEASE_S
        self.members = {one: until_s for one, until_s in self.members.items() if until_s > self.now_s}
        if self.leader != name and self.until_s <= self.now_s:
            self.leader, self.epoch = name, self.epoch + 1
        if self.leader == name:
            self.epoch += self.until_s <= self.now_s and self.until_s > 0
            self.until_s = self.now_s + LEASE_S
        scheduler.heartbeat(self.now_s, self.now_s, self.leader, self.epoch, list(self.members))

    def deliver(self, name, message):
        if name in self.gateways and self.now_s >= self.down_until_s:
            self.gateways[name].receive(self.now_s, message)

    # -- what happens at once -------------------------------------------------------------------

    def settle(self):
        """Carries out decisions, and sends messages, until nothing is due now."""
        moved = True
        while moved:
            moved = False
            for name, scheduler in list(self.gateways.items()):
                if name not in self.gateways:
                    continue
                if scheduler.next_s(self.now_s) <= self.now_s:
                    self.carry_out(scheduler, scheduler.schedule(self.now_s))
                    moved = True
                if self.is_shared:
                    moved |= self.send(name, scheduler)
        for scheduler in self.gateways.values():
            next_s = max(scheduler.next_s(self.now_s), self.now_s + 1e-6)
            if next_s < 1e9 and next_s not in self.timers:
                self.timers.add(next_s)
                self.at(next_s, self.timers.discard, next_s)

    def carry_out(self, scheduler, decisions):
        assert not decisions.expire
        for number in decisions.preempt:
            job = self.jobs[number]
            assert job.worker
            job.worker, job.visit = "", job.visit + 1
            scheduler.requeue(self.now_s, number, job.generated)
        for number, name in decisions.assign:
            job = self.jobs[number]
            assert not job.worker, "a request runs at one worker at a time"
            assert not job.finished, "a request that has ended never runs again"
            job.worker, job.visit = name, job.visit + 1
            self.dispatched.append((round(self.now_s, 9), number, name))
            self.plan(number)
        running = Counter(job.worker for job in self.jobs if job.worker)
        for name in {name for _, name in decisions.assign}:
            # Without a leader, gateways know only their own requests.
            self.over_limit += running[name] > self.caps[name] and getattr(scheduler, "shared", True)

    def send(self, name, scheduler):
        outgoing = scheduler.outgoing()
        for to, message in outgoing:
            fault = self.faults.pop(self.sent, "")
            self.sent += 1
            if fault == "outage":
                self.down_until_s = self.now_s + 2 * LEASE_S
            if fault == "partition":
                self.late_until_s[name] = self.now_s + 2 * LEASE_S
            if fault == "kill sender":
                self.kill(name)
            if fault == "kill receiver":
                self.kill(to)
            if name not in self.gateways:
                return True
            if fault not in ("", "partition") or self.now_s < self.down_until_s:
                continue
            late_s = max(self.late_until_s.get(one, 0.0) - self.now_s for one in (name, to))
            if self.delay_s or late_s > 0:
                self.at(self.now_s + max(self.delay_s, late_s), self.deliver, to, message)
            else:
                self.deliver(to, message)
        return bool(outgoing)

    def kill(self, name):
        """Ends a gateway: its connections break, so that engines abort its requests."""
        if name in self.gateways and len(self.gateways) > 1:
            del self.gateways[name]
            for job in self.jobs:
                if str(job.gateway) == name:
                    job.worker, job.visit = "", job.visit + 1
