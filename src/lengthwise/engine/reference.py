"""The meaning of the engine: plain Python, one object a request, one obvious step after another.

The compiled kernel must agree with this file to the last bit (tests/laws). The order of one
instant: requests that enter, then steps that end, then the schedulers of all replicas, by number.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter

import numpy as np

from lengthwise.engine._reference_state import Meter, Queue, Replica, Request, Step, outcome_of
from lengthwise.engine.outcome import Outcome
from lengthwise.engine.setup import Setup, blocked
from lengthwise.engine.step_time import CostReader
from lengthwise.policy import (
    ADMIT_AFTER_EVICTION,
    CHUNKED,
    DECODES_REST,
    DECODES_WAIT,
    FORM_ONCE,
    NEW_PHASE,
    ONE_BATCH,
    ONE_BY_ONE,
    PADDED,
    RESERVE_BLOCK,
    RESTART_AS_DECODE,
    SERVICE_OUTPUT_WEIGHT,
    UNIFORM_SHARES,
)
from lengthwise.schema.errors import PolicyError
from lengthwise.schema.records import Rejection, Status


class Reference:
    """One run over a setup."""

    def __init__(self, setup: Setup) -> None:
        self.s = setup
        self.results = setup.results.copy()
        self.arrival_s = setup.arrival_s.copy()
        self.histogram = setup.histogram.copy()
        lines = [Queue([], [[] for _ in range(setup.bins)]) for _ in range(setup.replicas)]
        self.lines = lines[:1] if setup.central else lines
        self.local = [self._replica(setup, r, lines[0 if setup.central else r]) for r in range(setup.replicas)]
        there = setup.remote
        self.decoding = [self._replica(there, r, Queue([], [])) for r in range(there.replicas)] if there else []
        self.replicas = [*self.local, *self.decoding]
        self.load: dict[int, Replica] = {}
        self.service = [0.0] * setup.tenants
        self.backlog = [0] * setup.tenants
        self.last_service = 0.0
        self.next = self.admissions = self.evictions = self.free_slots = self.batches = 0
        self.released = min(setup.concurrency, len(self.arrival_s)) if setup.closed else len(self.arrival_s)
        self.left = setup.followers.left.tolist() if setup.followers else [0] * len(self.arrival_s)
        self.own = [i for i, parents in enumerate(self.left) if parents == 0]
        self.sent: list[tuple[float, int]] = []
        self.now_s = self.front_free_s = 0.0
        self.entry_s = math.inf
        self._to_front()

    def _replica(self, side: Setup, number: int, line: Queue) -> Replica:
        cost = CostReader(side.deployment.cost, by_stage=side.first > 0)
        meter = Meter(side, self.histogram)
        return Replica(side, side.first + number, side.total_blocks, line, meter, cost)

    def run(self) -> Outcome:
        """All events in order; raises PolicyError when a policy misbehaves."""
        while True:
            now = self._next_event()
            if now == math.inf:
                if self._complete_oldest():
                    self._schedule_all(self.now_s)
                    continue
                self._check_nobody_waits()
                break
            if now > self.s.limit_s:
                break
            self.now_s = now
            self._arrivals(now)
            self._complete_due(now)
            while any(self._ends(rep, now) for rep in self.replicas):
                self._arrivals(now)
            self._transfers_end(now)
            self._schedule_all(now)
        self._close()
        for i, row in enumerate(self.results):
            if self.left[i] > 0 and row["status"] == Status.UNFINISHED:
                self.arrival_s[i] = math.nan
        meters = [rep.meter for rep in self.replicas]
        return outcome_of(meters, self.arrival_s, self.results, self.histogram, self.now_s, self.s.limit_s)

    # -- events ---------------------------------------------------------------------------

    def _next_event(self) -> float:
        ends = [rep.flights[0].end_s for rep in self.replicas if rep.flights]
        bins = [self._deadline_s(b) for line in self.lines for b in line.bins]
        transfers = [q.arrives_s for rep in self.decoding for q in rep.incoming]
        return float(min([self.entry_s, *ends, *bins, *transfers]))

    def _first_sent(self) -> int | None:
        """Who goes to the front next: of those that are sent, who was first, of the same instant the lowest number."""
        others = [(float(self.arrival_s[i]), i) for i in self.own[self.next : self.next + 1] if i < self.released]
        return min([*others, *self.sent[:1]])[1] if others or self.sent else None

    def _passed_s(self, i: int) -> float:
        """When the front is free again behind a request."""
        return max(float(self.arrival_s[i]), self.front_free_s) + self.s.deployment.cost.front.queue_s

    def _to_front(self) -> None:
        """Who is sent first goes to the front as soon as it is there, and enters when it has passed it."""
        i = self._first_sent()
        front = self.s.deployment.cost.front
        self.entry_s = math.inf if i is None else self._passed_s(i) + front.request_s

    def _enters(self) -> int:
        """The request that enters now: it has passed the front, and the next one goes there."""
        i = self._first_sent()
        assert i is not None
        if self.sent and self.sent[0][1] == i:
            heapq.heappop(self.sent)
        else:
            self.next += 1
        self.front_free_s = self._passed_s(i)
        self._to_front()
        return i

    def _arrivals(self, now: float) -> None:
        while self.entry_s == now:
            i = self._enters()
            request = self.s.request(Request, i, float(self.arrival_s[i]))
            rejection = self._rejection(request)
            if rejection != Rejection.NONE:
                self.results[i]["status"] = Status.REJECTED
                self.results[i]["rejection"] = rejection
                self._release(i, Status.REJECTED, now)
                continue
            self._route(request, now)

    def _route(self, q: Request, now: float) -> None:
        rep = self.local[0]
        if not self.s.central:
            rep = self._picked(self.s, self.local, q)
            self._load(rep, q)
        if self.s.charges:
            self._lift(q.tenant)
        self._gather(rep.line, q, now)

    def _picked(self, side: Setup, num_candidates: list[Replica], q: Request) -> Replica:
        """The replica of one side that its router says."""
        waiting, running = (
            np.array([r.line.length for r in num_candidates]),
            np.array([len(r.num_running) for r in num_candidates]),
        )
        tokens = np.array([r.tokens for r in num_candidates])
        a, b = side.draws[q.index]
        choice = side.router(q.index, float(a), float(b), waiting, running, tokens)
        if not 0 <= choice < len(num_candidates):
            raise side.bad_route(choice)
        return num_candidates[choice]

    def _load(self, rep: Replica, q: Request) -> None:
        """The request is this replica's from now on, for routers; the replica has something to look at."""
        tokens = self.s.outstanding(q.index)
        if q.index in self.load:
            self.load[q.index].tokens -= tokens
        rep.tokens += tokens
        self.load[q.index] = rep
        rep.touched = True

    def _lift(self, tenant: int) -> None:
        """A tenant that comes to wait starts level with those who do: no credit from absence (VTC)."""
        if self.backlog[tenant] == 0:
            there = [v for v, count in zip(self.service, self.backlog, strict=True) if count > 0]
            self.service[tenant] = max(self.service[tenant], min(there) if there else self.last_service)
        self.backlog[tenant] += 1

    # -- bins -----------------------------------------------------------------------------

    def _gather(self, line: Queue, q: Request, now: float) -> None:
        """Into the queue, or into a bin that becomes a batch when it is full."""
        q.queued_s = q.arrival_s
        if self.s.bins == 0:
            self._enqueue(line, q, now, entered=True)
            return
        number = self.s.bin_of(q.index)
        line.bins[number].append(q)
        if len(line.bins[number]) == self.s.max_num_seqs:
            self._complete(line, number, now)

    def _complete(self, line: Queue, number: int, now: float) -> None:
        """A bin becomes a batch and joins the queue."""
        self.batches += 1
        batch, line.bins[number] = line.bins[number], []
        for q in batch:
            q.batch = self.batches
            self._enqueue(line, q, now, entered=True)
        for rep in self.replicas:
            rep.touched = rep.touched or (rep.line is line and not self.s.central)

    def _deadline_s(self, waiting: list[Request]) -> float:
        return waiting[0].arrival_s + self.s.bin_wait_s if waiting else math.inf

    def _complete_due(self, now: float) -> None:
        for line in self.lines:
            for number, waiting in enumerate(line.bins):
                if self._deadline_s(waiting) <= now:
                    self._complete(line, number, now)

    def _complete_oldest(self) -> bool:
        """When nothing else will happen, the bin whose first has waited longest; False: all are empty."""
        bins = [(b[0].index, n, line) for line in self.lines for n, b in enumerate(line.bins) if b]
        if not bins:
            return False
        _, number, line = min(bins, key=lambda found: found[0])
        self._complete(line, number, self.now_s)
        return True

    def _ends(self, rep: Replica, now: float) -> bool:
        """Ends one step of the replica if it ends now."""
        if not rep.flights or rep.flights[0].end_s != now:
            return False
        step = rep.flights.pop(0)
        rep.touched = True
        rep.steps_since += 1
        rep.undecided += 1
        for q in sorted(step.paused, key=lambda q: q.slot_index):
            self._assign_slot(rep, q)
        for last in sorted(times := Counter(q.last_token_s for q in step.decodes)):  # type: ignore[type-var]
            rep.meter.gap(now - last, times[last])  # type: ignore[operator]
        for q in sorted(step.decodes, key=lambda q: q.slot_index):
            self._emit(rep, q, now)
        for q, chunk in step.prompts:
            q.prefilled += chunk
            if q.prefilled < q.context:
                self._assign_slot(rep, q)
                continue
            if q.last_token_s is not None:
                rep.meter.gap(now - q.last_token_s, 1)
            self._emit(rep, q, now)
        return True

    def _emit(self, rep: Replica, q: Request, now: float) -> None:
        if q.last_token_s is None:
            self.results[q.index]["first_token_s"] = now
        q.decoding = True
        q.generated += 1
        q.last_token_s = now
        if q.generated < q.output and self.decoding and rep in self.local:
            self._hand_over(rep, q, now)
            return
        if q.generated < q.output:
            self._assign_slot(rep, q)
            return
        self.results[q.index]["finished_s"] = now
        self._leave(rep, q, Status.FINISHED, now)

    def _assign_slot(self, rep: Replica, q: Request) -> None:
        """Back among the idle, behind those who came before."""
        self.free_slots += 1
        q.slot_index = self.free_slots
        rep.idle.append(q)

    def _leave(self, rep: Replica, q: Request, status: Status, now: float) -> None:
        rep.free += q.blocks
        rep.total_released += q.blocks
        if q.reserved:
            self._release_all(q)
        self.results[q.index]["status"] = status
        self.results[q.index]["output_tokens"] = self._produced(q)
        self.results[q.index]["queued_for_s"] = q.queued_for_s + (now - q.queued_s if q.waiting else 0.0)
        rep.ended_since += 1
        if not self.s.central:
            self.load.pop(q.index).tokens -= self.s.outstanding(q.index)
        if self.s.charges:
            self._settle_service(q)
        self._release(q.index, status, now)

    def _settle_service(self, q: Request) -> None:
        """The tenant is charged for what came instead of what was predicted."""
        if q.admission >= 0:
            self.service[q.tenant] += SERVICE_OUTPUT_WEIGHT * (self._produced(q) - q.charged)
        else:
            self._stops_waiting(q.tenant)

    def _stops_waiting(self, tenant: int) -> None:
        """One fewer of a tenant's requests has yet to be admitted; who is the last to wait sets the level."""
        self.backlog[tenant] -= 1
        if self.backlog[tenant] == 0:
            self.last_service = self.service[tenant]

    def _release(self, i: int, status: Status, now: float) -> None:
        """A request has ended: in a closed loop the next one is sent, else those that come after it."""
        if self.s.closed and self.released < len(self.arrival_s):
            self.arrival_s[self.released] = now
            self.released += 1
            self._to_front()
        if status == Status.FINISHED:
            for child in self._waiting_after(i):
                self._one_less(child, now)
        else:
            self._refuse_behind(i, now)

    def _refuse_behind(self, i: int, now: float) -> None:
        """All that would have come after a request that did not finish are refused."""
        refused = [i]
        while refused:
            for child in self._waiting_after(refused.pop()):
                if self.results[child]["status"] != Status.REJECTED:
                    self.results[child]["status"] = Status.REJECTED
                    self.results[child]["rejection"] = Rejection.PARENT_NOT_FINISHED
                    self.arrival_s[child] = now
                    refused.append(child)

    def _waiting_after(self, i: int) -> list[int]:
        found = self.s.followers
        return found.child[found.start[i] : found.start[i + 1]].tolist() if found else []

    def _one_less(self, i: int, now: float) -> None:
        """One fewer to wait for; who waits for nobody any more is sent, if its own time has come."""
        self.left[i] -= 1
        if self.left[i] == 0:
            self.arrival_s[i] = max(float(self.arrival_s[i]), now)
            heapq.heappush(self.sent, (float(self.arrival_s[i]), i))
            self._to_front()

    # -- forming steps ----------------------------------------------------------------------

    def _schedule_all(self, now: float) -> None:
        """The touched replicas by number; over a central queue all of them, the emptiest first.

        Who was evicted into a central queue is offered to all replicas once more. Where decoding is apart, its
        replicas go first: what they take, and give back, is then known to those that prefill.
        """
        if self.decoding:
            for rep in [*self.decoding, *self.local]:
                if rep.touched:
                    rep.touched = False
                    self._schedule(rep, now)
            return
        for _ in range(2):
            before = self.evictions
            order = [rep for rep in self.replicas if rep.touched]
            if self.s.central and self.replicas[0].queue:
                order = sorted(self.replicas, key=lambda rep: (len(rep.num_running), rep.number))
            for rep in order:
                rep.touched = False
                self._schedule(rep, now)
            if not self.s.central or self.evictions == before:
                return

    def _schedule(self, rep: Replica, now: float) -> None:
        if rep in self.decoding:
            self._fetch(rep, now)
        while len(rep.flights) < rep.s.flights:
            step = self._form(rep, now)
            if not step.seqs and step.evicted and not step.flags & FORM_ONCE:
                swap_s = step.swap_s
                step = self._form(rep, now)
                step.swap_s += swap_s
            if not step.seqs:
                return
            self._launch(rep, step)

    def _form(self, rep: Replica, now: float) -> Step:
        step = Step(now)
        self._expire(rep, now)
        if not rep.idle and not rep.queue:
            return step
        admit, tokens, flags = self._plan(rep, step)
        step.flags = flags
        if flags & NEW_PHASE:
            rep.phase_steps = rep.phase_rounds = 0
        if admit > 0:
            rep.steps_since = rep.ended_since = 0
            self._preemption(rep, step)
        if not flags & DECODES_WAIT:
            self._take_decodes(rep, step, flags)
        prompt_tokens = max(0, tokens - len(step.decodes))
        self._continue_prompts(rep, step, prompt_tokens)
        if not step.evicted or flags & ADMIT_AFTER_EVICTION:
            self._admit(rep, step, admit, prompt_tokens, flags)
        if not step.seqs:
            self._take_decodes(rep, step, flags)
        if step.prompts and flags & DECODES_REST:
            self._let_rest(rep, step)
        return step

    def _plan(self, rep: Replica, step: Step, next_tokens: int = 0) -> tuple[int, int, int]:
        """What the batching policy says now."""
        decodes = sum(q.decoding for q in rep.idle)
        admit, tokens, flags = rep.s.batching(
            decodes,
            len(rep.idle) - decodes,
            len(rep.queue),
            len(rep.num_running) + step.seqs,
            len(rep.flights),
            rep.s.token_budget,
            rep.s.max_num_seqs,
            rep.steps_since,
            rep.ended_since,
            rep.phase_steps,
            rep.phase_rounds,
            len(step.prompts),
            step.prompt_tokens,
            next_tokens,
            rep.s.pp,
            *rep.s.policies.batching.all_parameters,
        )
        return int(admit), int(tokens), int(flags)

    def _let_rest(self, rep: Replica, step: Step) -> None:
        """Free decodes go along with the step's prompts; they are not computed."""
        if not step.decodes:
            step.paused = [q for q in rep.idle if q.decoding]
            rep.idle = [q for q in rep.idle if not q.decoding]

    def _expire(self, rep: Replica, now: float) -> None:
        for q in [q for q in rep.idle if q.arrival_s + self.s.timeout_s <= now]:
            rep.idle.remove(q)
            self._leave(rep, q, Status.TIMED_OUT, now)
        for q in [q for q in rep.queue if q.arrival_s + self.s.timeout_s <= now]:
            rep.queue.remove(q)
            self._leave(rep, q, Status.TIMED_OUT, now)

    def _preemption(self, rep: Replica, step: Step) -> None:
        """Waiting requests without a seat or memory take those of worse running ones, where the policy lets them.

        Whoever has produced nothing since it was admitted is left alone: every admission is worth a
        token at least, or two requests could take turns for ever.
        """
        stays = not rep.s.takes_over and not step.flags & ADMIT_AFTER_EVICTION
        if not (stays and len(rep.num_running) >= rep.s.max_num_seqs):  # else nobody could get in
            self._rank_again(rep.line)
        due = rep.decide or rep.undecided >= rep.s.window
        if not (rep.s.takes_over and due and rep.queue):
            return
        running = sorted((self._rank_of(q), q.slot_index, q) for q in rep.idle if q.generated > q.entered)
        free_slots, free, left = rep.s.max_num_seqs - len(rep.num_running), rep.free, len(running)
        for w in sorted(rep.queue, key=lambda q: (q.key, q.index))[: rep.s.max_num_seqs]:
            k, room, slot_index = left, free, free_slots
            while not (slot_index > 0 and (blocks := self._blocks_to_enter(w, room, slot_index)) >= 0):
                if k == 0 or not self._takes_place(rep, w, *running[k - 1]):
                    break
                k -= 1
                room += running[k][2].blocks
                slot_index += 1
            else:
                left, free, free_slots = k, room - blocks, slot_index - 1
                continue
            break
        for _, _, q in reversed(running[left:]):
            self._evict(rep, step, q)
        step.evicted = rep.decide = False
        rep.undecided = 0

    def _blocks_to_enter(self, q: Request, free: int, free_slots: int) -> int:
        predicted, _ = self.s.predicted_at(q.index, q.generated)
        return self.s.ask_memory(q.context, q.context, predicted, free, self.s.max_num_seqs - free_slots, 0)

    def _takes_place(self, rep: Replica, w: Request, key: float, _: int, q: Request) -> bool:
        """Whether waiting ``w`` may take the seat of running ``q``, whose key this is."""
        if not w.key < key:
            return False
        decodes = [d for d in rep.idle if d.decoding]
        kv_tokens = sum(d.context for d in decodes)
        tokens = q.context if q.decoding else q.prefilled
        swapped = rep.s.swap and q.decoding
        swapped_s = 2 * q.blocks * rep.s.swap_s_per_block if swapped else None
        gain: float = self.s.takeover(
            w.key,
            key,
            self.s.remaining(w),
            self.s.remaining(q),
            q.generated,
            rep.cost.return_steps(tokens, swapped_s, len(decodes), kv_tokens),
            len(rep.num_running),
            len(rep.queue),
            w.queued_for_s + (self.now_s - w.queued_s),
            int(self.results[q.index]["preemptions"]),
        )
        if math.isnan(gain):
            raise self.s.bad_takeover(w.index)
        return gain > 0

    def _rank_of(self, q: Request) -> float:
        """The key in the queue: whoever has waited too long goes before all others."""
        overdue = self._overdue_s(q) <= self.now_s if q.waiting else q.queued_for_s >= self.s.max_wait_s
        return -math.inf if overdue else self.s.key(self.s.rank, self.now_s, q, self.service[q.tenant])

    def _overdue_s(self, q: Request) -> float:
        return q.queued_s + (self.s.max_wait_s - q.queued_for_s)

    def _rank_again(self, line: Queue) -> None:
        """Keys that time has changed."""
        if line.waiting and (self.s.rekey or line.overdue_s <= self.now_s):
            overdue = line.overdue_s <= self.now_s
            line.overdue_s = math.inf
            for q in line.waiting:
                self._key(line, q)
            if overdue:
                self._decide(line)

    def _key(self, line: Queue, q: Request) -> None:
        q.key = self._rank_of(q)
        if (overdue_s := self._overdue_s(q)) > self.now_s:
            line.overdue_s = min(line.overdue_s, overdue_s)

    def _decide(self, line: Queue) -> None:
        for rep in self.replicas:
            rep.decide = rep.decide or rep.line is line

    def _take_decodes(self, rep: Replica, step: Step, flags: int) -> None:
        spare = 1 if flags & RESERVE_BLOCK else 0
        strict, most = bool(flags & FORM_ONCE), rep.s.max_step_seqs
        if flags & UNIFORM_SHARES:
            here = len(rep.num_running) - len(rep.incoming) + step.seqs
            most = min(most, step.seqs + -(-here // rep.s.flights))
        for q in sorted((q for q in rep.idle if q.decoding), key=self._leave_order):
            if step.seqs == most:
                return
            if q in rep.idle:
                need = max(0, rep.s.blocks_for(q.context) - q.blocks)
                if self._make_room(rep, step, q, need, spare, strict=strict):
                    rep.idle.remove(q)
                    step.decodes.append(q)

    def _continue_prompts(self, rep: Replica, step: Step, prompt_tokens: int) -> None:
        for q in sorted((q for q in rep.idle if not q.decoding), key=lambda q: q.admission):
            chunk = min(q.context - q.prefilled, prompt_tokens - step.prompt_tokens)
            if step.seqs == rep.s.max_step_seqs or chunk <= 0:
                return
            if q in rep.idle:
                need = max(0, rep.s.blocks_for(q.prefilled + chunk) - q.blocks)
                if self._make_room(rep, step, q, need):
                    rep.idle.remove(q)
                    step.prompts.append((q, chunk))

    def _make_room(
        self, rep: Replica, step: Step, q: Request, need: int, reserve: int = 0, *, strict: bool = False
    ) -> bool:
        """Gives the request its blocks, evicting the worst idle ones; False if that was itself.

        A spare block is not asked of the last one on a replica (but by Vidur's strict rule): it
        could never run.
        """
        while rep.free < need or (rep.free < reserve and (strict or len(rep.num_running) + step.seqs > 1)):
            victim = max(rep.idle, key=self._leave_order)
            self._evict(rep, step, victim)
            if victim is q:
                return False
        rep.free -= need
        q.blocks += need
        return True

    def _leave_order(self, q: Request) -> tuple[float, int]:
        return self.s.key(self.s.leave, self.now_s, q, self.service[q.tenant]), q.slot_index

    def _evict(self, rep: Replica, step: Step, q: Request) -> None:
        rep.idle.remove(q)
        if rep.s.finds_again:
            q.retained = (q.context - 1 if q.decoding else q.prefilled) // rep.s.block_size
            q.kept_mark, q.kept_on = rep.total_released + q.blocks - q.retained, rep.number
        rep.free += q.blocks
        rep.total_released += q.blocks
        step.evicted = True
        if rep.s.swap and q.decoding:
            q.swapped = True
            step.swap_s += q.blocks * rep.s.swap_s_per_block
        else:
            if not q.decoding and step.flags & RESTART_AS_DECODE:
                total = q.prompt + q.output
                q.prompt = q.prefilled - q.generated
                q.output = total - q.prompt
            q.decoding, q.prefilled = False, 0
        q.blocks = 0
        self.evictions += 1
        q.eviction = self.evictions
        self.results[q.index]["preemptions"] += 1
        if q.home is not None and not q.swapped:  # to be prefilled again, where that is done
            self._load(q.home, q)
            self._enqueue(q.home.line, q, self.now_s)
            return
        self._enqueue(rep.line, q, self.now_s)

    def _enqueue(self, line: Queue, q: Request, now: float, *, entered: bool = False) -> None:
        """Under its rank; one that enters has waited since its client sent it, an evicted one waits from now."""
        q.waiting = True
        if not entered:
            q.queued_s = now
        self._key(line, q)
        line.waiting.append(q)
        if q is min(line.waiting, key=lambda q: (q.key, q.index)):
            self._decide(line)

    def _admit(self, rep: Replica, step: Step, admit: int, prompt_tokens: int, flags: int) -> None:
        admitted, batch = 0, 0
        while (
            rep.queue
            and admitted < admit
            and len(rep.num_running) + step.seqs < rep.s.max_num_seqs
            and step.seqs < rep.s.max_step_seqs
        ):
            q = min(rep.queue, key=lambda q: (q.key, q.index))
            if q.reserved:  # it comes by a transfer, not with a step
                return
            if admitted > 0 and q.batch != batch and flags & ONE_BATCH:
                return
            found = self._found_again(rep, q, flags)
            chunk = 1 if q.swapped else self._chunk(step, q, prompt_tokens, flags, found)
            if chunk <= 0:
                return
            if flags & ONE_BY_ONE and self._plan(rep, step, chunk)[0] <= 0:
                return
            blocks = self._ask_memory(rep, step, q, found + chunk)
            if blocks < 0:
                return
            rep.queue.remove(q)
            rep.free -= blocks
            rep.total_released -= found // rep.s.block_size
            q.retained, q.prefilled = 0, found or q.prefilled
            q.blocks = blocks
            if q.admission < 0 and self.s.charges:
                self._charge(q)
                self._rank_again(rep.line)
            self.admissions += 1
            admitted += 1
            q.admission, batch = self.admissions, q.batch
            q.entered = q.generated
            q.waiting, q.queued_for_s = False, q.queued_for_s + (self.now_s - q.queued_s)
            self._place(rep, step, q, chunk)

    def _charge(self, q: Request) -> None:
        """The tenant pays for the prompt and the predicted output when the request is first admitted."""
        q.charged = float(self.s.predicted[q.index])
        self.service[q.tenant] += q.prompt + SERVICE_OUTPUT_WEIGHT * q.charged
        self._stops_waiting(q.tenant)

    def _place(self, rep: Replica, step: Step, q: Request, chunk: int) -> None:
        row = self.results[q.index]
        if math.isnan(row["scheduled_s"]):
            row["scheduled_s"] = self.now_s
        row["replica"] = rep.number
        if q.swapped:
            q.swapped = False
            step.swap_s += q.blocks * rep.s.swap_s_per_block
            self._assign_slot(rep, q)
        else:
            step.prompts.append((q, chunk))

    def _found_again(self, rep: Replica, q: Request, flags: int) -> int:
        """Tokens of an evicted request whose blocks nobody has taken since.

        Blocks are taken in the order in which they were freed, those of its end before those of its beginning.
        """
        here = rep.s.finds_again and q.kept_on == rep.number
        if not here or not q.retained or q.swapped or not flags & CHUNKED:
            return 0
        taken_since = max(0, rep.total_released - rep.free - q.kept_mark)
        return max(0, q.retained - taken_since) * rep.s.block_size

    def _chunk(self, step: Step, q: Request, prompt_tokens: int, flags: int, found: int = 0) -> int:
        """How much of the prompt the step may take beyond what was found again; 0: it must wait."""
        left = prompt_tokens - step.prompt_tokens
        if flags & CHUNKED:
            return min(q.context - found, left)
        if not step.prompts and q.eviction > 0:
            return q.context
        if flags & PADDED:
            longest = max([q.context, *(chunk for _, chunk in step.prompts)])
            return q.context if (len(step.prompts) + 1) * longest <= prompt_tokens else 0
        return q.context if q.context <= left else 0

    def _ask_memory(self, rep: Replica, step: Step, q: Request, chunk: int) -> int:
        held = [*rep.num_running, *step.decodes, *(p for p, _ in step.prompts)]
        peak = self._peak_tokens([*held, q]) if rep.s.needs_peak else 0
        predicted, _ = rep.s.predicted_at(q.index, q.generated)
        blocks = rep.s.ask_memory(q.context, chunk, predicted, rep.free, len(held), peak)
        if blocks >= 0:
            blocks = max(blocks, rep.s.blocks_for(q.context if q.swapped else chunk))
            if blocks > rep.free:
                raise rep.s.bad_memory(blocks)
        return blocks

    def _peak_tokens(self, requests: list[Request]) -> int:
        """The most KV tokens held at once if every predicted length held (Past-Future, ASPLOS '25)."""
        held, peak = 0, 0
        remaining = {q.index: self.s.whole_remaining(q) for q in requests}
        for position, q in enumerate(sorted(requests, key=lambda q: -remaining[q.index]), start=1):
            held += q.context
            peak = max(peak, held + remaining[q.index] * position)
        return peak

    def _rejection(self, q: Request) -> Rejection:
        """Why not even an idle replica could take the request, if so."""
        if q.prompt >= self.s.max_model_len:
            return Rejection.PROMPT_REACHES_MAX_MODEL_LEN
        chunk = self._chunk(Step(0.0), q, self.s.empty_plan[1], self.s.empty_plan[2])
        if chunk <= 0:
            return Rejection.PROMPT_ABOVE_TOKEN_BUDGET
        peak = q.prompt + self.s.whole_remaining(q) if self.s.needs_peak else 0
        predicted, _ = self.s.predicted_at(q.index, 0)
        blocks = self.s.ask_memory(q.prompt, chunk, predicted, self.s.total_blocks, 0, peak)
        if blocks >= 0 and self.s.remote:
            blocks = self._blocks_to_decode(self.s.remote, q)
        return Rejection.PROMPT_ABOVE_KV_MEMORY if blocks < 0 else Rejection.NONE

    def _blocks_to_decode(self, remote: Setup, q: Request) -> int:
        """Blocks that an idle replica of the decode side would give the request after its first token; -1: none."""
        context = q.prompt + 1
        peak = context + remote.whole_remaining(q, 1) if remote.needs_peak else 0
        predicted, _ = remote.predicted_at(q.index, 1)
        return remote.ask_memory(context, context, predicted, remote.total_blocks, 0, peak)

    def _launch(self, rep: Replica, step: Step) -> None:
        kv_tokens = sum(q.context for q in step.decodes)
        prompts = [(chunk, q.prefilled) for q, chunk in step.prompts]
        cost = rep.cost.step(len(step.decodes), kv_tokens, prompts, step.swap_s)
        step.end_s = rep.meter.launch(rep.number, step, cost, kv_tokens, prompts, rep.free, len(rep.queue))
        self._count_rounds(rep, step)
        rep.flights.append(step)

    def _count_rounds(self, rep: Replica, step: Step) -> None:
        """Counts the step that begins: a round is over when the micro-batch that encoded last has its next turn."""
        rep.phase_steps += 1
        rep.since.append(step)
        if rep.phase_steps == 1 or step.prompts:
            rep.phase_rounds, rep.since = 0, [step]
            return
        marked, after = rep.since[:2]
        if marked not in rep.flights and after is not step and after not in rep.flights:
            rep.phase_rounds += 1  # that micro-batch had nobody left, the one before it stands in
            rep.since = rep.since[-2:]
        if rep.since[0] not in rep.flights:
            rep.phase_rounds += 1
            rep.since = [step]

    # -- from those that prefill to those that decode -------------------------------------------

    def _hand_over(self, rep: Replica, q: Request, now: float) -> None:
        """A prompt is through, its first token out: its cache stays where it is until it has been fetched."""
        q.home, q.reserved, q.blocks = rep, q.blocks, 0
        if self.s.remote is None:
            raise PolicyError("nobody decodes")
        to = self._picked(self.s.remote, self.decoding, q)
        self._load(to, q)
        self._enqueue(to.line, q, now)

    def _fetch(self, rep: Replica, now: float) -> None:
        """Starts transfers, in the order of the queue, for as long as there are seats and memory for whole requests."""
        self._expire(rep, now)
        if len(rep.num_running) < rep.s.max_num_seqs:
            self._rank_again(rep.line)
        while rep.queue and len(rep.num_running) < rep.s.max_num_seqs:
            q = min(rep.queue, key=lambda q: (q.key, q.index))
            if not q.reserved:  # swapped out: it comes back with a step
                return
            blocks = self._ask_memory(rep, Step(now), q, q.context)
            if blocks < 0:
                return
            rep.queue.remove(q)
            rep.free -= blocks
            q.blocks = blocks
            self.admissions += 1
            q.admission, q.entered = self.admissions, q.generated
            q.waiting, q.queued_for_s = False, q.queued_for_s + (now - q.queued_s)
            self.results[q.index]["replica"] = rep.number
            q.arrives_s = self._arrives_s(rep, q, now)
            rep.incoming.append(q)
            if q.arrives_s <= now:
                self._arrive(rep, q)

    def _arrives_s(self, rep: Replica, q: Request, now: float) -> float:
        """When a transfer that is let in now ends."""
        kv_transfer = rep.s.kv_transfer
        taken_s = kv_transfer.fixed_s + (q.context - 1) * kv_transfer.token_s
        if not kv_transfer.one_at_a_time:
            return now + taken_s
        home = q.home_replica
        home.sends_until_s = rep.receives_until_s = max(now, home.sends_until_s, rep.receives_until_s) + taken_s
        return home.sends_until_s

    def _transfers_end(self, now: float) -> None:
        """Those that end now, in the order of the workload."""
        ends = [(q.index, q, rep) for rep in self.decoding for q in rep.incoming if q.arrives_s == now]
        for _, q, rep in sorted(ends, key=lambda end: end[0]):
            self._arrive(rep, q)
            rep.touched = True

    def _arrive(self, rep: Replica, q: Request) -> None:
        rep.incoming.remove(q)
        self._release_all(q)
        self._assign_slot(rep, q)

    def _release_all(self, q: Request) -> None:
        """The blocks where the request was prefilled are free."""
        home = q.home_replica
        home.free += q.reserved
        home.total_released += q.reserved
        home.touched = True
        q.reserved = 0

    # -- the end ------------------------------------------------------------------------------

    def _check_nobody_waits(self) -> None:
        if waiting := [q.index for rep in self.replicas for q in (*rep.queue, *rep.num_running)]:
            raise PolicyError(blocked(self.s, min(waiting)))

    def _close(self) -> None:
        for rep in self.replicas:
            for q in (*rep.num_running, *rep.queue):
                self.results[q.index]["output_tokens"] = self._produced(q)
                self.results[q.index]["queued_for_s"] = q.queued_for_s

    def _produced(self, q: Request) -> int:
        """Output tokens; those that a restart counts as decoded prompt (RESTART_AS_DECODE) left out."""
        return max(0, q.generated + q.prompt - int(self.s.prompt[q.index]))


def simulate_reference(setup: Setup) -> Outcome:
    """The outcome of a run, computed the obvious way."""
    return Reference(setup).run()
