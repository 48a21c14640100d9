"""The meaning of the engine: plain Python, one object a request, one obvious step after another.

The compiled kernel must agree with this file to the last bit (tests/laws). The order of one
instant: arrivals, then steps that end, then the schedulers of all replicas, by number.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from lengthwise.engine._cost_reading import CostReader
from lengthwise.engine._meter import Meter, outcome_of
from lengthwise.engine._objects import Replica, Request, Step
from lengthwise.engine._outcome import Outcome
from lengthwise.engine._setup import Setup
from lengthwise.policy import (
    ADMIT_AFTER_EVICTION,
    CHUNKED,
    DECODES_WAIT,
    FORM_ONCE,
    PADDED,
    RESTART_AS_DECODE,
    SPARE_BLOCK,
)
from lengthwise.schema.errors import PolicyError
from lengthwise.schema.records import Refusal, Status


class Reference:
    """One run over a setup."""

    def __init__(self, setup: Setup) -> None:
        self.s = setup
        self.cost = CostReader(setup.deployment.cost)
        self.results = setup.results.copy()
        self.arrival_s = setup.arrival_s.copy()
        self.histogram = setup.histogram.copy()
        central: list[Request] = []
        self.replicas = [
            Replica(r, setup.total_blocks, central if setup.central else [], Meter(setup, self.histogram))
            for r in range(setup.replicas)
        ]
        self.home: dict[int, Replica] = {}
        self.next = self.admissions = self.evictions = self.seats = 0
        self.released = min(setup.concurrency, len(self.arrival_s)) if setup.closed else len(self.arrival_s)
        self.now_s = 0.0

    def run(self) -> Outcome:
        """All events in order; raises PolicyError when a policy misbehaves."""
        while (now := self._next_event()) <= self.s.limit_s:
            if now == math.inf:
                self._check_nobody_waits()
                break
            self.now_s = now
            self._arrivals(now)
            while any(self._ends(rep, now) for rep in self.replicas):
                self._arrivals(now)
            self._schedule_all(now)
        self._close()
        meters = [rep.meter for rep in self.replicas]
        return outcome_of(meters, self.arrival_s, self.results, self.histogram, self.now_s, self.s.limit_s)

    # -- events ---------------------------------------------------------------------------

    def _next_event(self) -> float:
        ends = [rep.flights[0].end_s for rep in self.replicas if rep.flights]
        arrival = self.arrival_s[self.next] if self.next < self.released else math.inf
        return float(min([arrival, *ends]))

    def _arrivals(self, now: float) -> None:
        while self.next < self.released and self.arrival_s[self.next] == now:
            i = self.next
            self.next += 1
            request = self.s.request(Request, i, float(self.arrival_s[i]))
            refusal = self._refusal(request)
            if refusal != Refusal.NONE:
                self.results[i]["status"] = Status.REJECTED
                self.results[i]["refusal"] = refusal
                self._release(now)
                continue
            self._route(request, now)

    def _route(self, q: Request, now: float) -> None:
        rep = self.replicas[0]
        if not self.s.central:
            waiting, running = (
                np.array([len(r.queue) for r in self.replicas]),
                np.array([len(r.resident) for r in self.replicas]),
            )
            tokens = np.array([r.tokens for r in self.replicas])
            a, b = self.s.draws[q.index]
            choice = self.s.router(q.index, float(a), float(b), waiting, running, tokens)
            if not 0 <= choice < len(self.replicas):
                raise self.s.bad_route(choice)
            rep = self.replicas[choice]
            rep.tokens += self.s.outstanding(q.index)
            self.home[q.index] = rep
            rep.touched = True
        self._enqueue(rep.queue, q, now)

    def _ends(self, rep: Replica, now: float) -> bool:
        """Ends one step of the replica if it ends now."""
        if not rep.flights or rep.flights[0].end_s != now:
            return False
        step = rep.flights.pop(0)
        rep.touched = True
        for last in sorted(times := Counter(q.last_token_s for q in step.decodes)):  # type: ignore[type-var]
            rep.meter.gap(now - last, times[last])  # type: ignore[operator]
        for q in sorted(step.decodes, key=lambda q: q.seat):
            self._emit(rep, q, now)
        for q, chunk in step.prompts:
            q.prefilled += chunk
            if q.prefilled < q.context:
                self._sit(rep, q)
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
        if q.generated < q.output:
            self._sit(rep, q)
            return
        self.results[q.index]["finished_s"] = now
        self._leave(rep, q, Status.FINISHED, now)

    def _sit(self, rep: Replica, q: Request) -> None:
        """Back among the idle, behind those who came before."""
        self.seats += 1
        q.seat = self.seats
        rep.idle.append(q)

    def _leave(self, rep: Replica, q: Request, status: Status, now: float) -> None:
        rep.free += q.blocks
        self.results[q.index]["status"] = status
        self.results[q.index]["output_tokens"] = self._produced(q)
        if not self.s.central:
            self.home[q.index].tokens -= self.s.outstanding(q.index)
        self._release(now)

    def _release(self, now: float) -> None:
        if self.s.closed and self.released < len(self.arrival_s):
            self.arrival_s[self.released] = now
            self.released += 1

    # -- forming steps ----------------------------------------------------------------------

    def _schedule_all(self, now: float) -> None:
        """The touched replicas by number; over a central queue all of them, the emptiest first.

        Who was evicted into a central queue is offered to all replicas once more.
        """
        for _ in range(2):
            before = self.evictions
            order = [rep for rep in self.replicas if rep.touched]
            if self.s.central and self.replicas[0].queue:
                order = sorted(self.replicas, key=lambda rep: (len(rep.resident), rep.number))
            for rep in order:
                rep.touched = False
                self._schedule(rep, now)
            if not self.s.central or self.evictions == before:
                return

    def _schedule(self, rep: Replica, now: float) -> None:
        while len(rep.flights) < self.s.pp:
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
        decodes = sum(q.decoding for q in rep.idle)
        plan = self.s.batching(
            decodes,
            len(rep.idle) - decodes,
            len(rep.queue),
            len(rep.resident),
            len(rep.flights),
            self.s.token_budget,
            self.s.max_num_seqs,
        )
        admit, tokens, flags = (int(x) for x in plan)
        step.flags = flags
        if not flags & DECODES_WAIT:
            self._take_decodes(rep, step, flags)
        prompt_tokens = max(0, tokens - len(step.decodes))
        self._continue_prompts(rep, step, prompt_tokens)
        if not step.evicted or flags & ADMIT_AFTER_EVICTION:
            self._admit(rep, step, admit, prompt_tokens, flags)
        if not step.seqs:
            self._take_decodes(rep, step, flags)
        return step

    def _expire(self, rep: Replica, now: float) -> None:
        for q in [q for q in rep.idle if q.arrival_s + self.s.timeout_s <= now]:
            rep.idle.remove(q)
            self._leave(rep, q, Status.TIMED_OUT, now)
        for q in [q for q in rep.queue if q.arrival_s + self.s.timeout_s <= now]:
            rep.queue.remove(q)
            self._leave(rep, q, Status.TIMED_OUT, now)

    def _take_decodes(self, rep: Replica, step: Step, flags: int) -> None:
        spare = 1 if flags & SPARE_BLOCK else 0
        strict = bool(flags & FORM_ONCE)
        for q in sorted((q for q in rep.idle if q.decoding), key=self._leave_order):
            if step.seqs == self.s.max_step_seqs:
                return
            if q in rep.idle:
                need = max(0, self.s.blocks_for(q.context) - q.blocks)
                if self._make_room(rep, step, q, need, spare, strict=strict):
                    rep.idle.remove(q)
                    step.decodes.append(q)

    def _continue_prompts(self, rep: Replica, step: Step, prompt_tokens: int) -> None:
        for q in sorted((q for q in rep.idle if not q.decoding), key=lambda q: q.admission):
            chunk = min(q.context - q.prefilled, prompt_tokens - step.prompt_tokens)
            if step.seqs == self.s.max_step_seqs or chunk <= 0:
                return
            if q in rep.idle:
                need = max(0, self.s.blocks_for(q.prefilled + chunk) - q.blocks)
                if self._make_room(rep, step, q, need):
                    rep.idle.remove(q)
                    step.prompts.append((q, chunk))

    def _make_room(
        self, rep: Replica, step: Step, q: Request, need: int, spare: int = 0, *, strict: bool = False
    ) -> bool:
        """Gives the request its blocks, evicting the worst idle ones; False if that was itself.

        A spare block is not asked of the last one on a replica (but by Vidur's strict rule): it
        could never run.
        """
        while rep.free < need or (rep.free < spare and (strict or len(rep.resident) + step.seqs > 1)):
            victim = max(rep.idle, key=self._leave_order)
            self._evict(rep, step, victim)
            if victim is q:
                return False
        rep.free -= need
        q.blocks += need
        return True

    def _leave_order(self, q: Request) -> tuple[float, int]:
        return self.s.key(self.s.leave, self.now_s, q), q.seat

    def _evict(self, rep: Replica, step: Step, q: Request) -> None:
        rep.idle.remove(q)
        rep.free += q.blocks
        step.evicted = True
        if self.s.swap and q.decoding:
            q.swapped = True
            step.swap_s += q.blocks * self.s.swap_s_per_block
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
        self._enqueue(rep.queue, q, self.now_s)

    def _enqueue(self, queue: list[Request], q: Request, now: float) -> None:
        q.key = self.s.key(self.s.rank, now, q)
        queue.append(q)

    def _admit(self, rep: Replica, step: Step, admit: int, prompt_tokens: int, flags: int) -> None:
        if self.s.rekey:
            for q in rep.queue:
                q.key = self.s.key(self.s.rank, self.now_s, q)
        admitted = 0
        while (
            rep.queue
            and admitted < admit
            and len(rep.resident) + step.seqs < self.s.max_num_seqs
            and step.seqs < self.s.max_step_seqs
        ):
            q = min(rep.queue, key=lambda q: (q.key, q.index))
            chunk = 1 if q.swapped else self._chunk(step, q, prompt_tokens, flags)
            if chunk <= 0:
                return
            blocks = self._ask_memory(rep, step, q, chunk)
            if blocks < 0:
                return
            rep.queue.remove(q)
            rep.free -= blocks
            q.blocks = blocks
            self.admissions += 1
            admitted += 1
            q.admission = self.admissions
            self._place(rep, step, q, chunk)

    def _place(self, rep: Replica, step: Step, q: Request, chunk: int) -> None:
        row = self.results[q.index]
        if math.isnan(row["scheduled_s"]):
            row["scheduled_s"] = self.now_s
        row["replica"] = rep.number
        if q.swapped:
            q.swapped = False
            step.swap_s += q.blocks * self.s.swap_s_per_block
            self._sit(rep, q)
        else:
            step.prompts.append((q, chunk))

    def _chunk(self, step: Step, q: Request, prompt_tokens: int, flags: int) -> int:
        """How much of the prompt the step may take; 0: it must wait."""
        left = prompt_tokens - step.prompt_tokens
        if flags & CHUNKED:
            return min(q.context, left)
        if not step.prompts and q.eviction > 0:
            return q.context
        if flags & PADDED:
            longest = max([q.context, *(chunk for _, chunk in step.prompts)])
            return q.context if (len(step.prompts) + 1) * longest <= prompt_tokens else 0
        return q.context if q.context <= left else 0

    def _ask_memory(self, rep: Replica, step: Step, q: Request, chunk: int) -> int:
        held = [*rep.resident, *step.decodes, *(p for p, _ in step.prompts)]
        peak = _peak_tokens([*held, q]) if self.s.needs_peak else 0
        blocks = self.s.ask_memory(q.context, chunk, q.predicted, rep.free, len(held), peak)
        if blocks >= 0:
            blocks = max(blocks, self.s.blocks_for(q.context if q.swapped else chunk))
            if blocks > rep.free:
                raise self.s.bad_memory(blocks)
        return blocks

    def _refusal(self, q: Request) -> Refusal:
        """Why not even an idle replica could take the request, if so."""
        if q.prompt >= self.s.max_model_len:
            return Refusal.PROMPT_REACHES_MAX_MODEL_LEN
        chunk = self._chunk(Step(0.0), q, self.s.empty_plan[1], self.s.empty_plan[2])
        if chunk <= 0:
            return Refusal.PROMPT_ABOVE_TOKEN_BUDGET
        peak = q.prompt + q.remaining if self.s.needs_peak else 0
        blocks = self.s.ask_memory(q.prompt, chunk, q.predicted, self.s.total_blocks, 0, peak)
        return Refusal.PROMPT_ABOVE_KV_MEMORY if blocks < 0 else Refusal.NONE

    def _launch(self, rep: Replica, step: Step) -> None:
        kv_tokens = sum(q.context for q in step.decodes)
        prompts = [(chunk, q.prefilled) for q, chunk in step.prompts]
        cost = self.cost.step(len(step.decodes), kv_tokens, prompts, step.swap_s)
        step.end_s = rep.meter.launch(rep.number, step, cost, kv_tokens, prompts, rep.free, len(rep.queue))
        rep.flights.append(step)

    # -- the end ------------------------------------------------------------------------------

    def _check_nobody_waits(self) -> None:
        for rep in self.replicas:
            if waiting := [*rep.queue, *rep.resident]:
                raise PolicyError(self.s.stuck(min(q.index for q in waiting)))

    def _close(self) -> None:
        for rep in self.replicas:
            for q in (*rep.resident, *rep.queue):
                self.results[q.index]["output_tokens"] = self._produced(q)

    def _produced(self, q: Request) -> int:
        """Output tokens; those that a restart counts as decoded prompt (RESTART_AS_DECODE) left out."""
        return max(0, q.generated + q.prompt - int(self.s.prompt[q.index]))


def _peak_tokens(requests: list[Request]) -> int:
    """The most KV tokens held at once if every predicted length held (Past-Future, ASPLOS '25)."""
    held, peak = 0, 0
    for position, q in enumerate(sorted(requests, key=lambda q: -q.remaining), start=1):
        held += q.context
        peak = max(peak, held + q.remaining * position)
    return peak


def simulate_reference(setup: Setup) -> Outcome:
    """The outcome of a run, computed the obvious way."""
    return Reference(setup).run()


__all__ = ["simulate_reference"]
