"""The specification of the engine in plain Python: one object per request, one obvious step after another.

The compiled kernel must agree with this file to the last bit (tests/laws). At one instant: requests that enter,
steps that end (by replica), transfers that end (by request), then the schedulers of the pending replicas by number,
decode replicas first. If requests wait in a central queue, all replicas are scheduled, the least loaded first.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter

import numpy as np

from lengthwise.engine import kernel_layout
from lengthwise.engine._reference_state import Admission, LastPreemption, Queue, Replica, Request, Step, Transfer, Wait
from lengthwise.engine.outcome import EngineOutput, run_end_s
from lengthwise.engine.setup import Function, Setup, error_of
from lengthwise.policy import contracts
from lengthwise.schema.records import Rejection, Status


class Reference:
    """One run over a setup."""

    def __init__(self, setup: Setup) -> None:
        self.s = setup
        n, columns, params, remote = len(setup.columns.prompt), setup.columns, setup.params, setup.remote
        self.results = setup.blank_results()
        self.arrival_s = columns.arrival_s.copy()
        self.histogram = np.zeros(kernel_layout.GAP_BINS, np.int64)
        self.queues = [Queue([], [[] for _ in range(params.bins)]) for _ in range(params.replicas)]
        if params.central_queue:
            self.queues = self.queues[:1] * params.replicas
        self.local = [Replica(setup, r, queue, self.histogram) for r, queue in enumerate(self.queues)]
        self.remote: list[Replica] = []
        if remote:
            numbers = range(remote.first_replica, remote.first_replica + remote.params.replicas)
            self.remote = [Replica(remote, number, Queue([], []), self.histogram) for number in numbers]
        self.replicas = [*self.local, *self.remote]
        if params.central_queue:
            self.queues = self.queues[:1]
        self.load_replica: dict[int, Replica] = {}
        """The replica whose load for routers includes the request."""
        self.service = [0.0] * setup.tenants
        self.backlog = [0] * setup.tenants
        self.last_service = 0.0
        self.next_root = self.admissions = self.preemptions = self.returns = self.batches = 0
        self.released = setup.released
        self.parents_left = setup.dependents.num_parents.tolist() if setup.dependents else [0] * n
        self.roots = [i for i, parents in enumerate(self.parents_left) if parents == 0]
        self.sent_children: list[tuple[float, int]] = []
        self.now_s = self.front_free_s = 0.0
        self.entry_s = math.inf
        self._update_entry_time()

    def run(self) -> EngineOutput:
        """Handle all events in order.

        Raises:
            PolicyError: A policy returned an invalid value, or requests wait forever.
        """
        while True:
            now = self._next_event()
            if now == math.inf:
                if self._complete_oldest_bin():
                    self._schedule_all(self.now_s)
                    continue
                if left := [q.index for rep in self.replicas for q in (*rep.queue.waiting, *rep.running)]:
                    raise error_of(kernel_layout.BLOCKED, self.s, min(left))
                break
            if now > self.s.params.limit_s:
                break
            self.now_s = now
            self._handle_entries(now)
            self._complete_expired_bins(now)
            while any(self._end_step(rep, now) for rep in self.replicas):
                self._handle_entries(now)
            ends = [(q.index, q, rep) for rep in self.remote for q, end_s in rep.incoming.items() if end_s == now]
            for _, q, rep in sorted(ends, key=lambda end: end[0]):
                self._receive(rep, q)
                rep.pending = True
            self._schedule_all(now)
        return self._outcome()

    def _outcome(self) -> EngineOutput:
        for rep in self.replicas:
            for q in (*rep.running, *rep.queue.waiting):
                self.results[q.index]["output_tokens"] = self._output_tokens(q)
                self.results[q.index]["queued_for_s"] = q.wait.before_s
        for i, row in enumerate(self.results):
            if self.parents_left[i] > 0 and row["status"] == Status.UNFINISHED:
                self.arrival_s[i] = math.nan
        replicas = np.array([rep.totals for rep in self.replicas], dtype=kernel_layout.replica_t)
        return EngineOutput(
            arrival_s=self.arrival_s,
            results=self.results,
            replicas=replicas,
            series=np.stack([rep.series for rep in self.replicas]),
            histogram=self.histogram,
            steps=np.array([row for rep in self.replicas for row in rep.steps], dtype=kernel_layout.step_t),
            gaps=np.array([row for rep in self.replicas for row in rep.gaps], dtype=kernel_layout.gap_t),
            end_s=run_end_s(self.now_s, self.s.params.limit_s, self.results, replicas),
        )

    def _output_tokens(self, q: Request) -> int:
        """Return the output tokens, without prompt tokens that a restart counts as output (RESTART_AS_DECODE)."""
        return max(0, q.generated + q.prompt - int(self.s.columns.prompt[q.index]))

    # -- arrivals -------------------------------------------------------------------------

    def _next_event(self) -> float:
        ends = [rep.flights[0].end_s for rep in self.replicas if rep.flights]
        bins = [self._bin_deadline_s(b) for queue in self.queues for b in queue.bins]
        transfers = [end_s for rep in self.remote for end_s in rep.incoming.values()]
        return float(min([self.entry_s, *ends, *bins, *transfers]))

    def _next_sent(self) -> int | None:
        """Return the request that the front end serves next: the earliest sent, at equal times the lowest number."""
        roots = [
            (float(self.arrival_s[i]), i) for i in self.roots[self.next_root : self.next_root + 1] if i < self.released
        ]
        sent = [*roots, *self.sent_children[:1]]
        return min(sent)[1] if sent else None

    def _front_free_s(self, i: int) -> float:
        """Return when the front end is free again after a request."""
        return max(float(self.arrival_s[i]), self.front_free_s) + self.s.deployment.cost.front.serial_s

    def _update_entry_time(self) -> None:
        """Set ``entry_s`` to the time at which the next sent request leaves the front end."""
        i = self._next_sent()
        front = self.s.deployment.cost.front
        self.entry_s = math.inf if i is None else self._front_free_s(i) + front.request_s

    def _handle_entries(self, now: float) -> None:
        columns, params = self.s.columns, self.s.params
        while self.entry_s == now:
            i = self._next_sent()
            assert i is not None
            if self.sent_children and self.sent_children[0][1] == i:
                heapq.heappop(self.sent_children)
            else:
                self.next_root += 1
            self.front_free_s = self._front_free_s(i)
            self._update_entry_time()
            arrival_s = float(self.arrival_s[i])
            q = Request(i, arrival_s, int(columns.prompt[i]), int(columns.output[i]), Wait(arrival_s))
            rejection = self._rejection(q)
            if rejection != Rejection.NONE:
                self.results[i]["status"] = Status.REJECTED
                self.results[i]["rejection"] = rejection
                self._send_next(i, Status.REJECTED, now)
                continue
            rep = self.local[0]
            if not params.central_queue:
                rep = self._route(self.s, self.local, q)
                self._move_load(rep, q)
            if params.tracks_service:
                self._join_backlog(self.s.tenant(i))
            self._add_to_bin_or_queue(rep.queue, q, now)

    def _rejection(self, q: Request) -> Rejection:
        """Return why not even an idle replica could serve the request."""
        if q.prompt >= self.s.params.max_model_len:
            return Rejection.PROMPT_REACHES_MAX_MODEL_LEN
        chunk = self._chunk(Step(0.0), q, self.s.idle_plan[1], self.s.idle_plan[2])
        if chunk <= 0:
            return Rejection.PROMPT_ABOVE_TOKEN_BUDGET
        blocks = self._blocks_when_idle(self.s, q, q.prompt, chunk, 0)
        if blocks >= 0 and self.s.remote:
            blocks = self._blocks_when_idle(self.s.remote, q, q.prompt + 1, q.prompt + 1, 1)
        return Rejection.PROMPT_ABOVE_KV_MEMORY if blocks < 0 else Rejection.NONE

    def _blocks_when_idle(self, side: Setup, q: Request, context: int, chunk: int, generated: int) -> int:
        """Return the blocks that an idle replica of a side gives a request after some tokens; -1: none."""
        peak = context + side.remaining_integer(q, generated) if side.params.needs_peak else 0
        predicted, _ = side.predicted_at(q.index, generated)
        return side.memory_blocks(context, chunk, predicted, side.params.total_blocks, 0, peak)

    def _route(self, side: Setup, replicas: list[Replica], q: Request) -> Replica:
        """Return the replica of one side that its router chooses."""
        waiting = np.array([rep.queue.length for rep in replicas])
        running = np.array([len(rep.running) for rep in replicas])
        tokens = np.array([rep.outstanding_tokens for rep in replicas])
        a, b = side.columns.draws[q.index]
        choice = side.functions.router(q.index, float(a), float(b), waiting, running, tokens)
        if not 0 <= choice < len(replicas):
            raise error_of(kernel_layout.BAD_ROUTE, side, choice)
        return replicas[choice]

    def _move_load(self, rep: Replica, q: Request) -> None:
        """Count the request as load of a replica, which has to be scheduled."""
        tokens = self.s.outstanding(q.index)
        if q.index in self.load_replica:
            self.load_replica[q.index].outstanding_tokens -= tokens
        rep.outstanding_tokens += tokens
        self.load_replica[q.index] = rep
        rep.pending = True

    # -- bins -----------------------------------------------------------------------------

    def _add_to_bin_or_queue(self, queue: Queue, q: Request, now: float) -> None:
        """Add the request to the queue, or to a bin that becomes a batch when it is full."""
        if self.s.params.bins == 0:
            self._enqueue(queue, q, now)
            return
        columns = self.s.columns
        number = self.s.functions.binning(float(columns.predicted[q.index]), int(columns.prompt[q.index]))
        if not 0 <= number < self.s.params.bins:
            raise error_of(kernel_layout.BAD_BIN, self.s, number)
        queue.bins[number].append(q)
        if len(queue.bins[number]) == self.s.params.max_num_seqs:
            self._complete_bin(queue, number, now)

    def _complete_bin(self, queue: Queue, number: int, now: float) -> None:
        """Make a batch of a bin and add it to the queue."""
        self.batches += 1
        batch, queue.bins[number] = queue.bins[number], []
        for q in batch:
            q.wait.batch = self.batches
            self._enqueue(queue, q, now)
        for rep in self.replicas:
            rep.pending = rep.pending or (rep.queue is queue and not self.s.params.central_queue)

    def _bin_deadline_s(self, waiting: list[Request]) -> float:
        return waiting[0].arrival_s + self.s.params.bin_wait_s if waiting else math.inf

    def _complete_expired_bins(self, now: float) -> None:
        for queue in self.queues:
            for number, waiting in enumerate(queue.bins):
                if self._bin_deadline_s(waiting) <= now:
                    self._complete_bin(queue, number, now)

    def _complete_oldest_bin(self) -> bool:
        """Complete the bin of the earliest request when there are no further events; False: all bins are empty."""
        bins = [(b[0].index, number, queue) for queue in self.queues for number, b in enumerate(queue.bins) if b]
        if not bins:
            return False
        _, number, queue = min(bins, key=lambda found: found[0])
        self._complete_bin(queue, number, self.now_s)
        return True

    # -- ends of steps and requests ---------------------------------------------------------

    def _end_step(self, rep: Replica, now: float) -> bool:
        """End the replica's oldest step if it ends now."""
        if not rep.flights or rep.flights[0].end_s != now:
            return False
        step = rep.flights.pop(0)
        rep.pending = True
        rep.steps_since_admit += 1
        rep.steps_since_check += 1
        for q in sorted(step.paused, key=lambda q: q.return_number):
            self._to_idle(rep, q)
        for last in sorted(times := Counter(q.last_token_s for q in step.decodes)):  # type: ignore[type-var]
            rep.count_gap(now - last, times[last])  # type: ignore[operator]
        for q in sorted(step.decodes, key=lambda q: q.return_number):
            self._emit(rep, q, now)
        for q, chunk in step.prompts:
            q.prefilled += chunk
            if q.prefilled < q.context:
                self._to_idle(rep, q)
                continue
            if q.last_token_s is not None:
                rep.count_gap(now - q.last_token_s, 1)
            self._emit(rep, q, now)
        return True

    def _emit(self, rep: Replica, q: Request, now: float) -> None:
        """Give a request its next token."""
        if q.last_token_s is None:
            self.results[q.index]["first_token_s"] = now
        q.decoding = True
        q.generated += 1
        q.last_token_s = now
        if q.generated == q.output:
            self.results[q.index]["finished_s"] = now
            self._end_request(rep, q, Status.FINISHED, now)
        elif self.s.remote and rep in self.local:  # Its cache remains here until it has been fetched.
            q.transfer, q.blocks = Transfer(rep, q.blocks), 0
            to = self._route(self.s.remote, self.remote, q)
            self._move_load(to, q)
            self._enqueue(to.queue, q, now)
        else:
            self._to_idle(rep, q)

    def _to_idle(self, rep: Replica, q: Request) -> None:
        """Put a request back among those between steps, as the last one."""
        self.returns += 1
        q.return_number = self.returns
        rep.idle.append(q)

    def _end_request(self, rep: Replica, q: Request, status: Status, now: float) -> None:
        rep.free += q.blocks
        rep.freed_blocks += q.blocks
        if q.transfer:
            q.transfer.release()
        self.results[q.index]["status"] = status
        self.results[q.index]["output_tokens"] = self._output_tokens(q)
        self.results[q.index]["queued_for_s"] = q.wait.total_s(now)
        rep.ended_since_admit += 1
        if not self.s.params.central_queue:
            self.load_replica.pop(q.index).outstanding_tokens -= self.s.outstanding(q.index)
        if self.s.params.tracks_service:
            tenant = self.s.tenant(q.index)
            if q.admission.number >= 0:  # Charge the actual output instead of the predicted one.
                more = self._output_tokens(q) - float(self.s.columns.predicted[q.index])
                self.service[tenant] += contracts.SERVICE_OUTPUT_WEIGHT * more
            else:
                self._leave_backlog(tenant)
        self._send_next(q.index, status, now)

    def _join_backlog(self, tenant: int) -> None:
        if self.backlog[tenant] == 0:  # Absence earns no credit (VTC).
            others = [v for v, count in zip(self.service, self.backlog, strict=True) if count > 0]
            self.service[tenant] = max(self.service[tenant], min(others) if others else self.last_service)
        self.backlog[tenant] += 1

    def _leave_backlog(self, tenant: int) -> None:
        self.backlog[tenant] -= 1
        if self.backlog[tenant] == 0:
            self.last_service = self.service[tenant]

    def _send_next(self, i: int, status: Status, now: float) -> None:
        """Act on the end of request ``i``: send the next of a closed loop, and send or reject its dependents."""
        if self.s.params.closed_loop and self.released < len(self.arrival_s):
            self.arrival_s[self.released] = now
            self.released += 1
            self._update_entry_time()
        if status == Status.FINISHED:
            for child in self._children(i):
                self.parents_left[child] -= 1
                if self.parents_left[child] == 0:
                    self.arrival_s[child] = max(float(self.arrival_s[child]), now)
                    heapq.heappush(self.sent_children, (float(self.arrival_s[child]), child))
                    self._update_entry_time()
            return
        unfinished = [i]
        while unfinished:
            for child in self._children(unfinished.pop()):
                if self.results[child]["status"] != Status.REJECTED:
                    self.results[child]["status"] = Status.REJECTED
                    self.results[child]["rejection"] = Rejection.PARENT_NOT_FINISHED
                    self.arrival_s[child] = now
                    unfinished.append(child)

    def _children(self, i: int) -> list[int]:
        found = self.s.dependents
        return found.child[found.start[i] : found.start[i + 1]].tolist() if found else []

    def _expire(self, rep: Replica, now: float) -> None:
        for requests in (rep.idle, rep.queue.waiting):
            for q in [q for q in requests if q.arrival_s + self.s.params.timeout_s <= now]:
                requests.remove(q)
                self._end_request(rep, q, Status.TIMED_OUT, now)

    # -- forming steps ----------------------------------------------------------------------

    def _schedule_all(self, now: float) -> None:
        """Schedule the pending replicas by number; with requests in a central queue all, the least loaded first.

        Requests that were preempted into a central queue are offered to all replicas once more. Decode replicas are
        scheduled first: prefill replicas then see the blocks that these fetched and freed.
        """
        if self.remote:
            for rep in [*self.remote, *self.local]:
                if rep.pending:
                    rep.pending = False
                    self._schedule(rep, now)
            return
        for _ in range(2):
            before = self.preemptions
            order = [rep for rep in self.replicas if rep.pending]
            if self.s.params.central_queue and self.replicas[0].queue.waiting:
                order = sorted(self.replicas, key=lambda rep: (len(rep.running), rep.number))
            for rep in order:
                rep.pending = False
                self._schedule(rep, now)
            if not self.s.params.central_queue or self.preemptions == before:
                return

    def _schedule(self, rep: Replica, now: float) -> None:
        if rep in self.remote:
            self._start_transfers(rep, now)
        while len(rep.flights) < rep.s.params.max_in_flight:
            step = self._form(rep, now)
            if not step.seqs and step.short_of_blocks and not step.flags & contracts.FORM_ONCE:
                swap_s = step.swap_s
                step = self._form(rep, now)
                step.swap_s += swap_s
            if not step.seqs:
                return
            self._launch(rep, step)

    def _form(self, rep: Replica, now: float) -> Step:
        step = Step(now)
        self._expire(rep, now)
        if not rep.idle and not rep.queue.waiting:
            return step
        admit, tokens, flags = self._plan(rep, step)
        step.flags = flags
        if flags & contracts.NEW_PHASE:
            rep.phase_steps = rep.phase_rounds = 0
        if admit > 0:
            rep.steps_since_admit = rep.ended_since_admit = 0
            self._preempt_for_waiting(rep, step)
        if not flags & contracts.DECODES_WAIT:
            self._take_decodes(rep, step, flags)
        prompt_budget = max(0, tokens - len(step.decodes))
        self._continue_prompts(rep, step, prompt_budget)
        if not step.short_of_blocks or flags & contracts.ADMIT_AFTER_PREEMPTION:
            self._admit(rep, step, admit, prompt_budget, flags)
        if not step.seqs:
            self._take_decodes(rep, step, flags)
        if step.prompts and not step.decodes and flags & contracts.DECODES_REST:
            step.paused = [q for q in rep.idle if q.decoding]
            rep.idle = [q for q in rep.idle if not q.decoding]
        return step

    def _plan(self, rep: Replica, step: Step, next_tokens: int = 0) -> tuple[int, int, int]:
        """Return (admissions, tokens, flags) of the batching policy."""
        decodes, params = sum(q.decoding for q in rep.idle), rep.s.params
        admit, tokens, flags = rep.s.functions.batching(
            decodes, len(rep.idle) - decodes, len(rep.queue.waiting), len(rep.running) + step.seqs, len(rep.flights),
            params.token_budget, params.max_num_seqs, rep.steps_since_admit, rep.ended_since_admit, rep.phase_steps,
            rep.phase_rounds, len(step.prompts), step.prompt_tokens, next_tokens, params.pp,
            *rep.s.policies.batching.all_parameters,
        )  # fmt: skip
        return int(admit), int(tokens), int(flags)

    def _preempt_for_waiting(self, rep: Replica, step: Step) -> None:
        """Preempt running requests for waiting ones that lack a slot or memory, where the preemption policy permits it.

        Residents without a token since their admission are exempt: every admission yields at least one token, or two
        requests could preempt each other forever.
        """
        params = rep.s.params
        may_free_seqs = params.preempts or step.flags & contracts.ADMIT_AFTER_PREEMPTION
        if may_free_seqs or len(rep.running) < params.max_num_seqs:  # Else no slot becomes free.
            self._update_ranks(rep.queue)
        check = rep.check_preemption or rep.steps_since_check >= params.preemption_interval_steps
        if not (params.preempts and check and rep.queue.waiting):
            return
        candidates = [q for q in rep.idle if q.generated > q.admission.generated]
        running = sorted((self._rank_key(q), q.return_number, q) for q in candidates)
        free_seqs, free, left = params.max_num_seqs - len(rep.running), rep.free, len(running)
        for w in sorted(rep.queue.waiting, key=Request.queue_order)[: params.max_num_seqs]:
            k, room, slots = left, free, free_seqs
            while not (slots > 0 and (blocks := self._blocks_if_free(w, room, slots)) >= 0):
                if k == 0 or not self._may_preempt(rep, w, running[k - 1][0], running[k - 1][2]):
                    break
                k -= 1
                room += running[k][2].blocks
                slots += 1
            else:
                left, free, free_seqs = k, room - blocks, slots - 1
                continue
            break
        for _, _, q in reversed(running[left:]):
            self._preempt(rep, step, q)
        step.short_of_blocks = rep.check_preemption = False
        rep.steps_since_check = 0

    def _blocks_if_free(self, q: Request, free: int, free_seqs: int) -> int:
        predicted, _ = self.s.predicted_at(q.index, q.generated)
        num_running = self.s.params.max_num_seqs - free_seqs
        return self.s.memory_blocks(q.context, q.context, predicted, free, num_running, 0)

    def _may_preempt(self, rep: Replica, w: Request, key: float, q: Request) -> bool:
        """Return whether waiting ``w`` may preempt running ``q``, whose key is given."""
        if not w.wait.key < key:
            return False
        decodes = [d for d in rep.idle if d.decoding]
        kv_tokens = sum(d.context for d in decodes)
        tokens = q.context if q.decoding else q.prefilled
        swaps = rep.s.params.swap and q.decoding
        swap_s = 2 * q.blocks * rep.s.params.swap_s_per_block if swaps else None
        gain: float = self.s.functions.preemption(
            w.wait.key, key, self.s.remaining(w), self.s.remaining(q), q.generated,
            rep.cost.recompute_steps(tokens, swap_s, len(decodes), kv_tokens), len(rep.running),
            len(rep.queue.waiting), w.wait.total_s(self.now_s), int(self.results[q.index]["preemptions"]),
        )  # fmt: skip
        if math.isnan(gain):
            raise error_of(kernel_layout.BAD_PREEMPTION, self.s, w.index)
        return gain > 0

    def _rank_key(self, q: Request) -> float:
        """Return the key in the queue: requests that have waited ``max_wait_s`` precede all others."""
        late = q.wait.overdue_at_s(self.s.params.max_wait_s) <= self.now_s
        return -math.inf if late else self._key(self.s.functions.rank, q)

    def _key(self, function: Function, q: Request) -> float:
        return self.s.key(function, self.now_s, q, self.service[self.s.tenant(q.index)])

    def _update_ranks(self, queue: Queue) -> None:
        """Rank the requests of a queue again where time has changed their keys."""
        late = queue.overdue_at_s <= self.now_s
        if queue.waiting and (self.s.params.rank_every_step or late):
            queue.overdue_at_s = math.inf
            for q in queue.waiting:
                self._set_key(queue, q)
            if late:
                self._request_preemption_check(queue)

    def _set_key(self, queue: Queue, q: Request) -> None:
        q.wait.key = self._rank_key(q)
        if (overdue_at_s := q.wait.overdue_at_s(self.s.params.max_wait_s)) > self.now_s:
            queue.overdue_at_s = min(queue.overdue_at_s, overdue_at_s)

    def _request_preemption_check(self, queue: Queue) -> None:
        for rep in self.replicas:
            rep.check_preemption = rep.check_preemption or rep.queue is queue

    def _enqueue(self, queue: Queue, q: Request, now: float) -> None:
        """Add a request by its rank; a new one has waited since it was sent, one from a replica waits from now on."""
        if q.wait.since_s is None:
            q.wait.since_s = now
        self._set_key(queue, q)
        queue.waiting.append(q)
        if q is queue.first:
            self._request_preemption_check(queue)

    def _take_decodes(self, rep: Replica, step: Step, flags: int) -> None:
        reserve = 1 if flags & contracts.RESERVE_BLOCK else 0
        reserve_when_alone, limit = bool(flags & contracts.FORM_ONCE), rep.s.params.max_step_seqs
        if flags & contracts.UNIFORM_SHARES:
            residents = len(rep.running) - len(rep.incoming) + step.seqs
            limit = min(limit, step.seqs + -(-residents // rep.s.params.max_in_flight))
        for q in sorted((q for q in rep.idle if q.decoding), key=self._victim_order):
            if step.seqs == limit:
                return
            if q in rep.idle:
                need = max(0, rep.s.blocks_for(q.context) - q.blocks)
                if self._claim_blocks(rep, step, q, need, reserve, reserve_when_alone=reserve_when_alone):
                    rep.idle.remove(q)
                    step.decodes.append(q)

    def _continue_prompts(self, rep: Replica, step: Step, prompt_budget: int) -> None:
        for q in sorted((q for q in rep.idle if not q.decoding), key=lambda q: q.admission.number):
            chunk = min(q.context - q.prefilled, prompt_budget - step.prompt_tokens)
            if step.seqs == rep.s.params.max_step_seqs or chunk <= 0:
                return
            if q in rep.idle:
                need = max(0, rep.s.blocks_for(q.prefilled + chunk) - q.blocks)
                if self._claim_blocks(rep, step, q, need):
                    rep.idle.remove(q)
                    step.prompts.append((q, chunk))

    def _claim_blocks(
        self, rep: Replica, step: Step, q: Request, need: int, reserve: int = 0, *, reserve_when_alone: bool = False
    ) -> bool:
        """Give the request its blocks, and preempt idle residents for them; return False if it was preempted itself.

        The only request of a replica needs no reserve, or it could never run; under FORM_ONCE it needs it, too.
        """
        while rep.free < need or (rep.free < reserve and (reserve_when_alone or len(rep.running) + step.seqs > 1)):
            victim = max(rep.idle, key=self._victim_order)
            self._preempt(rep, step, victim)
            if victim is q:
                return False
        rep.free -= need
        q.blocks += need
        return True

    def _victim_order(self, q: Request) -> tuple[float, int]:
        return self._key(self.s.functions.victim, q), q.return_number

    def _preempt(self, rep: Replica, step: Step, q: Request) -> None:
        params = rep.s.params
        rep.idle.remove(q)
        self.preemptions += 1
        q.last_preemption = LastPreemption(self.preemptions)
        if params.prefix_caching:
            cached = (q.context - 1 if q.decoding else q.prefilled) // params.block_size
            q.last_preemption = LastPreemption(
                self.preemptions, cached, rep.freed_blocks + q.blocks - cached, rep.number
            )
        rep.free += q.blocks
        rep.freed_blocks += q.blocks
        step.short_of_blocks = True
        if params.swap and q.decoding:
            q.swapped = True
            step.swap_s += q.blocks * params.swap_s_per_block
        else:
            if not q.decoding and step.flags & contracts.RESTART_AS_DECODE:
                total = q.prompt + q.output
                q.prompt = q.prefilled - q.generated
                q.output = total - q.prompt
            q.decoding, q.prefilled = False, 0
        q.blocks = 0
        self.results[q.index]["preemptions"] += 1
        to = rep
        if q.transfer and not q.swapped:  # Its prompt is recomputed on a replica that prefills.
            to = q.transfer.source
            self._move_load(to, q)
        self._enqueue(to.queue, q, self.now_s)

    def _admit(self, rep: Replica, step: Step, admit: int, prompt_budget: int, flags: int) -> None:
        admitted, batch, params = 0, 0, rep.s.params
        while (
            rep.queue.waiting
            and admitted < admit
            and len(rep.running) + step.seqs < params.max_num_seqs
            and step.seqs < params.max_step_seqs
        ):
            q = rep.queue.first
            # A request whose blocks wait on another replica enters by a transfer, not with a step.
            if (q.transfer and q.transfer.blocks) or (
                admitted > 0 and q.wait.batch != batch and flags & contracts.ONE_BATCH
            ):
                return
            cached = self._cached_tokens(rep, q, flags)
            chunk = 1 if q.swapped else self._chunk(step, q, prompt_budget, flags, cached)
            if chunk <= 0:
                return
            if flags & contracts.ONE_BY_ONE and self._plan(rep, step, chunk)[0] <= 0:
                return
            blocks = self._blocks_to_admit(rep, step, q, cached + chunk)
            if blocks < 0:
                return
            is_first = q.admission.number < 0
            self._leave_queue(rep, q, blocks)
            rep.freed_blocks -= cached // params.block_size
            q.prefilled = cached or q.prefilled
            if is_first and params.tracks_service:
                tenant = self.s.tenant(q.index)
                self.service[tenant] += q.prompt + contracts.SERVICE_OUTPUT_WEIGHT * float(
                    self.s.columns.predicted[q.index]
                )
                self._leave_backlog(tenant)
                self._update_ranks(rep.queue)
            admitted, batch = admitted + 1, q.wait.batch
            self._place(rep, step, q, chunk)

    def _leave_queue(self, rep: Replica, q: Request, blocks: int) -> None:
        """Let a waiting request enter a replica, which gives it blocks."""
        rep.queue.waiting.remove(q)
        rep.free -= blocks
        q.blocks = blocks
        self.admissions += 1
        q.admission = Admission(self.admissions, q.generated)
        q.wait.end(self.now_s)

    def _place(self, rep: Replica, step: Step, q: Request, chunk: int) -> None:
        """Add an admitted request to the step, or to the idle residents if it is swapped in."""
        row = self.results[q.index]
        if math.isnan(row["scheduled_s"]):
            row["scheduled_s"] = self.now_s
        row["replica"] = rep.number
        if q.swapped:
            q.swapped = False
            step.swap_s += q.blocks * rep.s.params.swap_s_per_block
            self._to_idle(rep, q)
        else:
            step.prompts.append((q, chunk))

    def _cached_tokens(self, rep: Replica, q: Request, flags: int) -> int:
        """Return the tokens of a preempted request whose blocks are still in the prefix cache.

        Blocks are reused in the order in which they were freed, those of a request's end before those of its start.
        """
        left = q.last_preemption
        if left.replica != rep.number or not left.cached_blocks or q.swapped or not flags & contracts.CHUNKED:
            return 0
        reused = max(0, rep.freed_blocks - rep.free - left.freed_before_cached)
        return max(0, left.cached_blocks - reused) * rep.s.params.block_size

    def _chunk(self, step: Step, q: Request, prompt_budget: int, flags: int, cached: int = 0) -> int:
        """Return the tokens of the prompt, beyond the cached ones, that fit in the step; 0: it must wait."""
        left = prompt_budget - step.prompt_tokens
        if flags & contracts.CHUNKED:
            return min(q.context - cached, left)
        if not step.prompts and q.last_preemption.number > 0:
            return q.context
        if flags & contracts.PADDED:
            longest = max([q.context, *(chunk for _, chunk in step.prompts)])
            return q.context if (len(step.prompts) + 1) * longest <= prompt_budget else 0
        return q.context if q.context <= left else 0

    def _blocks_to_admit(self, rep: Replica, step: Step, q: Request, chunk: int) -> int:
        residents = [*rep.running, *step.decodes, *(p for p, _ in step.prompts)]
        peak = self._peak_tokens([*residents, q]) if rep.s.params.needs_peak else 0
        predicted, _ = rep.s.predicted_at(q.index, q.generated)
        blocks = rep.s.memory_blocks(q.context, chunk, predicted, rep.free, len(residents), peak)
        if blocks >= 0:
            blocks = max(blocks, rep.s.blocks_for(q.context if q.swapped else chunk))
            if blocks > rep.free:
                raise error_of(kernel_layout.BAD_MEMORY, rep.s, blocks)
        return blocks

    def _peak_tokens(self, requests: list[Request]) -> int:
        """Return the maximum of KV tokens in use if all predicted lengths are exact (Past-Future, ASPLOS '25)."""
        in_use, peak = 0, 0
        remaining = {q.index: self.s.remaining_integer(q) for q in requests}
        for position, q in enumerate(sorted(requests, key=lambda q: -remaining[q.index]), start=1):
            in_use += q.context
            peak = max(peak, in_use + remaining[q.index] * position)
        return peak

    def _launch(self, rep: Replica, step: Step) -> None:
        kv_tokens = sum(q.context for q in step.decodes)
        prompts = [(chunk, q.prefilled) for q, chunk in step.prompts]
        rep.run_step(step, rep.cost.step(len(step.decodes), kv_tokens, prompts, step.swap_s), kv_tokens)
        # Count rounds: ``round_steps[0]`` is the marked step, at first the one that prefilled. Once it has left the
        # pipeline, a round ends and the step launched now is marked.
        rep.phase_steps += 1
        rep.round_steps.append(step)
        if rep.phase_steps == 1 or step.prompts:
            rep.phase_rounds, rep.round_steps = 0, [step]
        else:
            marked, after = rep.round_steps[:2]
            if marked not in rep.flights and after is not step and after not in rep.flights:
                # The marked micro-batch has no requests left: mark that of the previous step instead.
                rep.phase_rounds += 1
                rep.round_steps = rep.round_steps[-2:]
            if rep.round_steps[0] not in rep.flights:
                rep.phase_rounds += 1
                rep.round_steps = [step]
        rep.flights.append(step)

    # -- transfers from prefill to decode replicas ------------------------------------------------

    def _start_transfers(self, rep: Replica, now: float) -> None:
        """Start transfers in the order of the queue while there are slots and memory for complete requests."""
        self._expire(rep, now)
        max_num_seqs = rep.s.params.max_num_seqs
        if len(rep.running) < max_num_seqs:
            self._update_ranks(rep.queue)
        while rep.queue.waiting and len(rep.running) < max_num_seqs:
            q = rep.queue.first
            if not (q.transfer and q.transfer.blocks):  # Swapped out: it returns with a step.
                return
            blocks = self._blocks_to_admit(rep, Step(now), q, q.context)
            if blocks < 0:
                return
            self._leave_queue(rep, q, blocks)
            self.results[q.index]["replica"] = rep.number
            link, source = rep.s.kv_transfer, q.transfer.source
            duration_s = link.fixed_s + (q.context - 1) * link.token_s
            end_s = now + duration_s
            if link.one_at_a_time:
                end_s = max(now, source.sends_until_s, rep.receives_until_s) + duration_s
                source.sends_until_s = rep.receives_until_s = end_s
            rep.incoming[q] = end_s
            if end_s <= now:
                self._receive(rep, q)

    def _receive(self, rep: Replica, q: Request) -> None:
        del rep.incoming[q]
        if q.transfer:
            q.transfer.release()
        self._to_idle(rep, q)
