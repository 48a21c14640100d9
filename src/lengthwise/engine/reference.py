"""The specification of the engine in plain Python: one object for each request, and no optimization.

The compiled kernel must agree with this file to the last bit (tests/laws). ``kernel.py`` states the order of
events at one instant.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from functools import partial
from typing import Any

import numpy as np

from lengthwise.engine import kernel_layout
from lengthwise.engine._reference_sglang import SglangLimits, SglangReplica, shuffle_key
from lengthwise.engine._reference_state import (
    Admission,
    Chunk,
    ChunkPool,
    Fabric,
    Offload,
    PrefixIndex,
    Queue,
    Receiver,
    Replica,
    Request,
    RulesState,
    Step,
    Transfer,
    Wait,
)
from lengthwise.engine._reference_trtllm import TrtllmLimits, TrtllmReplica
from lengthwise.engine.outcome import EngineOutput, run_end_s
from lengthwise.engine.setup import INDEX_TOKENS, Function, Setup, error_of
from lengthwise.engine.step_time import NO_COST, CostReader, Drafts
from lengthwise.policy import contracts
from lengthwise.schema.deployment import SCHEDULE_POLICIES, aligned_chunk
from lengthwise.schema.records import Rejection, Status
from lengthwise.schema.speculation import accepted, uniform

MAX_READS = kernel_layout.MAX_READS


class Reference:
    """One simulation run of the reference engine."""

    def __init__(self, setup: Setup) -> None:
        self.s = setup
        n, columns, params, decode_side = len(setup.columns.prompt), setup.columns, setup.params, setup.decode_side
        self.results = setup.blank_results()
        self.arrival_s = columns.arrival_s.copy()
        self.histogram = np.zeros(kernel_layout.GAP_BINS, np.int64)
        num_queues = 1 if params.central_queue else params.replicas
        num_storages = 1 if params.storage_shared else params.replicas
        self.queues = [Queue([], [[] for _ in range(params.bins)]) for _ in range(num_queues)]
        queues = self.queues * (params.replicas // num_queues)
        storages = [ChunkPool(params.storage_blocks) for _ in range(num_storages)] * (params.replicas // num_storages)
        # Without a decode side, the prefill replicas decode, too.
        self.prefill_replicas = [
            Replica(setup.rows[row], r, queue, self.histogram, storage)
            for r, (row, queue, storage) in enumerate(zip(setup.row_of_replica, queues, storages, strict=False))
        ]
        self.decode_replicas: list[Replica] = []
        if decode_side:
            numbers = range(decode_side.first_replica, decode_side.first_replica + decode_side.params.replicas)
            self.decode_replicas = [
                Replica(decode_side, number, Queue([], []), self.histogram, ChunkPool(0)) for number in numbers
            ]
        self.replicas = [*self.prefill_replicas, *self.decode_replicas]
        for side in (self.prefill_replicas, self.decode_replicas):
            for rep in side:
                first = side.index(rep) // rep.s.params.dp * rep.s.params.dp
                rep.ranks = side[first : first + rep.s.params.dp]
        self.fabric = Fabric(len(self.replicas), (decode_side or setup).kv_transfer.links_at_once)
        self.earliest_end_s = [0.0] * n
        """By request, when its KV transfer can arrive."""
        self.receivers: dict[int, Receiver] = {}
        """By request whose layers are sent during its prefill."""
        for rep in self.replicas:
            if params.sglang:
                rep.sglang = self._sglang_replica(rep)
            elif params.trtllm:
                rep.trtllm = self._trtllm_replica(rep)
        self.indexes = [PrefixIndex(INDEX_TOKENS // params.block_size) for _ in self.prefill_replicas]
        self.offloads = [Offload() for _ in range(n)]
        self.wakes_s: dict[int, float] = {}
        """By deferred request, when its chunks can be loaded: its replica then forms a step, even if it was idle."""
        self.load_replica: dict[int, Replica] = {}
        """By request, the replica whose ``outstanding_tokens`` include it."""
        self.service = [0.0] * setup.tenants
        self.backlog = [0] * setup.tenants
        self.last_service = 0.0
        self.next_root = self.admissions = self.preemptions = self.returns = self.batches = 0
        self.released = setup.released
        self.parents_left = setup.dependents.num_parents.tolist() if setup.dependents else [0] * n
        self.roots = [i for i, parents in enumerate(self.parents_left) if parents == 0]
        self.sent_children: list[tuple[float, int]] = []
        self.routed = [dict[int, int]() for _ in setup.sides]
        self.now_s = self.front_free_s = 0.0
        self.entry_s = math.inf
        self._update_entry_time()

    def _sglang_replica(self, rep: Replica) -> SglangReplica:
        params = self.s.params
        limits = SglangLimits(
            params.block_size,
            params.max_num_seqs,
            params.max_prefill_tokens,
            params.chunked_prefill_size or None,
            params.enable_mixed_chunk,
            params.schedule_conservativeness,
            params.clip_tokens,
            SCHEDULE_POLICIES[params.schedule_policy],
            params.refreshes_prefixes,
        )
        made = SglangReplica(
            limits,
            *self._rule_inputs(rep),
            nodes_of=self._prefix_nodes if params.prefix_caching else None,
            shuffle_key=lambda number, q: shuffle_key(params.shuffle_seed, rep.number, number, q.index),
        )
        if rep.overlaps:
            made.cache_chunk = lambda q: self._cache_blocks(rep, q, q.prefilled, "computed")
        return made

    def _trtllm_replica(self, rep: Replica) -> TrtllmReplica:
        params, settings = self.s.params, self.s.deployment.scheduler.trtllm
        assert settings is not None
        limits = TrtllmLimits(
            params.block_size,
            params.max_num_seqs,
            params.token_budget,
            settings.capacity_scheduler_policy,
            settings.context_chunking_policy if settings.enable_chunked_prefill else None,
        )
        return TrtllmReplica(limits, *self._rule_inputs(rep))

    def _rule_inputs(self, rep: Replica) -> tuple[Any, ...]:
        """Return the arguments of ``SglangReplica`` and ``TrtllmReplica`` after the limits."""

        def preempt(step: Step, q: Request) -> None:
            self._preempt(rep, step, q)

        admissible = rep.admissible if rep.gate else None
        return rep.pool, rep.queue.waiting, lambda: self._update_ranks(rep.queue), preempt, admissible

    def run(self) -> EngineOutput:
        """Process all events; return the output. Raises PolicyError if a policy's value is bad or requests starve."""
        while True:
            now = self._next_event()
            if now == math.inf:
                if self._complete_oldest_bin():
                    self._schedule_all(self.now_s)
                    continue
                if left := [q.index for rep in self.replicas for q in (*rep.queue.waiting, *rep.loading, *rep.running)]:
                    raise error_of(kernel_layout.STUCK, self.s, min(left))
                break
            if now > self.s.params.limit_s:
                break
            self.now_s = now
            self._handle_entries(now)
            self._complete_expired_bins(now)
            while any(self._end_step(rep, now) for rep in self.replicas):
                self._handle_entries(now)
            self._end_transfers(now)
            self._wake(now)
            self._schedule_all(now)
        return self._outcome()

    def _end_transfers(self, now: float) -> None:
        """End the KV transfers and the loads from CPU memory that end now, by request."""
        if self.fabric.end_s <= now:
            for q, to in self.fabric.end(now):
                arrives_s = now + self.replicas[to].s.kv_transfer.fixed_s
                self.replicas[to].incoming[q] = max(arrives_s, self.earliest_end_s[q.index])
        ends = [(q, rep) for rep in self.decode_replicas for q, end_s in rep.incoming.items() if end_s == now]
        ends += [(q, rep) for rep in self.replicas for q, offload in rep.loading.items() if offload.end_s == now]
        for q, rep in sorted(ends, key=lambda end: end[0].index):
            if q in rep.incoming:
                self._receive(rep, q)
            else:
                self._end_load(rep, q)
            rep.pending = True

    def _wake(self, now: float) -> None:
        for rep in [rep for rep in self.replicas if rep.wake_s == now]:
            rep.wake_s, rep.pending = math.inf, True
        for i in [i for i, wake_s in self.wakes_s.items() if wake_s == now]:
            del self.wakes_s[i]
            self.replicas[self.offloads[i].replica].pending = True

    def _outcome(self) -> EngineOutput:
        for rep in self.replicas:
            finishing = [q for step in rep.flights for q in step.finishing]
            for q in (*rep.running, *rep.loading, *rep.queue.waiting, *finishing):
                self.results[q.index]["output_tokens"] = self._output_tokens(q)
                self.results[q.index]["queued_for_s"] = q.wait.before_s
            for q in [q for step in rep.flights for q in step.emitting if not rep.overlaps]:
                self.results[q.index]["output_tokens"] -= 1  # counted at the start of a step that has not ended
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
        """Return the generated tokens, without the prompt tokens that became output by RESTART_AS_DECODE."""
        return max(0, min(q.generated, q.output) + q.prompt - int(self.s.columns.prompt[q.index]))

    def _next_event(self) -> float:
        ends = [rep.flights[0].end_s for rep in self.replicas if rep.flights]
        bins = [self._bin_deadline_s(b) for queue in self.queues for b in queue.bins]
        transfers = [end_s for rep in self.decode_replicas for end_s in rep.incoming.values()]
        loads = [offload.end_s for rep in self.prefill_replicas for offload in rep.loading.values()]
        wakes = [*self.wakes_s.values(), *(rep.wake_s for rep in self.replicas)]
        return float(min([self.entry_s, self.fabric.end_s, *ends, *bins, *transfers, *loads, *wakes]))

    def _next_request(self) -> int | None:
        roots = [
            (float(self.arrival_s[i]), i) for i in self.roots[self.next_root : self.next_root + 1] if i < self.released
        ]
        sent = [*roots, *self.sent_children[:1]]
        return min(sent)[1] if sent else None

    def _front_free_s(self, i: int) -> float:
        return max(float(self.arrival_s[i]), self.front_free_s) + self.s.deployment.cost.front.serial_s

    def _update_entry_time(self) -> None:
        i = self._next_request()
        front = self.s.deployment.cost.front
        self.entry_s = math.inf if i is None else self._front_free_s(i) + front.request_s

    def _handle_entries(self, now: float) -> None:
        columns, params = self.s.columns, self.s.params
        while self.entry_s == now:
            i = self._next_request()
            assert i is not None
            if self.sent_children and self.sent_children[0][1] == i:
                heapq.heappop(self.sent_children)
            else:
                self.next_root += 1
            self.front_free_s = self._front_free_s(i)
            self._update_entry_time()
            arrival_s = float(self.arrival_s[i])
            q = Request(i, arrival_s, int(columns.prompt[i]), int(columns.output[i]), Wait(arrival_s))
            if params.sglang or params.trtllm:
                q.rules = RulesState(int(columns.max_tokens[i]), bool(columns.ignore_eos[i]))
            is_local = self._is_local(q)
            rejection = self._rejection(q, is_local=is_local)
            if rejection != Rejection.NONE:
                self.results[i]["status"] = Status.REJECTED
                self.results[i]["rejection"] = rejection
                self._send_next(i, Status.REJECTED, now)
                continue
            rep = self.prefill_replicas[0]
            if not params.central_queue:
                side, replicas = (self.s, self.prefill_replicas)
                if is_local and self.s.decode_side:
                    side, replicas = self.s.decode_side, self.decode_replicas
                rep = self._route(side, replicas, q)
                self._move_load(rep, q)
            if params.tracks_service:
                self._join_backlog(self.s.tenant(i))
            self._add_to_bin_or_queue(rep.queue, q, now)

    def _is_local(self, q: Request) -> bool:
        """Return whether a decode replica prefills the request (conditional disaggregation)."""
        if (decode := self.s.deployment.decode) is None:
            return False
        waiting = sum(rep.queue.length + len(rep.loading) for rep in self.prefill_replicas)
        is_full = decode.max_prefill_queue_size is not None and waiting >= decode.max_prefill_queue_size
        return is_full or q.prompt <= decode.max_local_prefill_length

    def _rejection(self, q: Request, *, is_local: bool) -> Rejection:
        """Return the reason for which even an empty replica cannot serve the request, or ``NONE`` if it can."""
        if q.prompt >= self.s.params.max_model_len:
            return Rejection.PROMPT_REACHES_MAX_MODEL_LEN
        if self.s.params.sglang or self.s.params.trtllm:
            if q.prompt > self.s.params.longest_prompt:
                return Rejection.PROMPT_ABOVE_TOKEN_BUDGET
            return Rejection.REFUSED_BY_MEMORY_POLICY if q.rules.max_tokens < 1 else Rejection.NONE
        side = self.s.decode_side if is_local and self.s.decode_side else self.s
        chunk_tokens = self._chunk(Step(0.0), q, side.empty_replica_plan[1], side.empty_replica_plan[2])
        if chunk_tokens <= 0:
            return Rejection.PROMPT_ABOVE_TOKEN_BUDGET
        blocks = self._blocks_when_empty(side, q, q.prompt, chunk_tokens, 0)
        for group in self.s.groups:
            chunk_tokens = self._chunk(Step(0.0), q, group.empty_replica_plan[1], group.empty_replica_plan[2])
            if chunk_tokens <= 0:
                return Rejection.PROMPT_ABOVE_TOKEN_BUDGET
            blocks = min(blocks, self._blocks_when_empty(group, q, q.prompt, chunk_tokens, 0))
        if blocks >= 0 and self.s.decode_side and not is_local:
            blocks = self._blocks_when_empty(self.s.decode_side, q, q.prompt + 1, q.prompt + 1, 1)
        return Rejection.REFUSED_BY_MEMORY_POLICY if blocks < 0 else Rejection.NONE

    def _blocks_when_empty(self, side: Setup, q: Request, context: int, chunk_tokens: int, generated: int) -> int:
        peak = context + side.remaining_integer(q, generated) if side.params.needs_peak else 0
        predicted, _ = side.predicted_at(q.index, generated)
        return side.memory_blocks(context, chunk_tokens, predicted, side.params.total_blocks, 0, peak)

    def _route(self, side: Setup, replicas: list[Replica], q: Request) -> Replica:
        a, b = side.columns.draws[q.index]
        prefix, block_size = side.params.router_prefix, side.params.block_size
        nodes = self._prefix_nodes(q)[: q.prompt // block_size] if prefix else []
        found, indexed = [0] * len(replicas), [0] * len(replicas)
        if prefix == 1:
            found = [rep.pool.count(nodes) for rep in replicas]
        elif prefix == 2:
            found = [index.find(nodes) for index in self.indexes]
            indexed = [len(index.nodes) for index in self.indexes]
        per_replica = (
            [rep.queue.length + len(rep.loading) for rep in replicas],
            [len(rep.running) for rep in replicas],
            [rep.outstanding_tokens for rep in replicas],
            [rep.pool.free for rep in replicas],
            [blocks * block_size for blocks in found],
            [blocks * block_size for blocks in indexed],
        )
        choice = side.functions.router(
            q.index, float(a), float(b), int(side.columns.prompt[q.index]), self._previous_replica(side, q),
            side.params.total_blocks, *map(np.array, per_replica), side.service_rate,
        )  # fmt: skip
        if not 0 <= choice < len(replicas):
            raise error_of(kernel_layout.BAD_ROUTE, side, choice)
        if prefix == 2:
            self.indexes[choice].add(nodes)
        self.routed[side is not self.s][q.index] = choice
        return replicas[choice]

    def _previous_replica(self, side: Setup, q: Request) -> int:
        routed, previous = self.routed[side is not self.s], side.columns.previous_turn
        before = int(previous[q.index]) if len(previous) else -1
        while before >= 0 and before not in routed:
            before = int(previous[before])
        return routed.get(before, -1)

    def _move_load(self, rep: Replica, q: Request) -> None:
        tokens = self.s.outstanding(q.index)
        if q.index in self.load_replica:
            self.load_replica[q.index].outstanding_tokens -= tokens
        rep.outstanding_tokens += tokens
        self.load_replica[q.index] = rep
        rep.pending = True

    def _add_to_bin_or_queue(self, queue: Queue, q: Request, now: float) -> None:
        if not queue.bins:
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
        self.batches += 1
        batch, queue.bins[number] = queue.bins[number], []
        for q in batch:
            q.wait.bin_batch = self.batches
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
        bins = [(b[0].index, number, queue) for queue in self.queues for number, b in enumerate(queue.bins) if b]
        if not bins:
            return False
        _, number, queue = min(bins, key=lambda found: found[0])
        self._complete_bin(queue, number, self.now_s)
        return True

    def _end_step(self, rep: Replica, now: float) -> bool:
        """If the replica's oldest step ends now, process its end and return True. Otherwise return False.

        All data-parallel ranks of a replica end a step before the first of them ends the next one.
        """
        if not rep.flights or rep.flights[0].end_s != now:
            return False
        if any(len(one.flights) > len(rep.flights) for one in rep.ranks):
            return False
        step = rep.flights.pop(0)
        rep.pending = True
        if rep.overlaps:
            self._end_overlapped_step(rep, step, now)
        elif not step.seqs:  # a rank's dummy step
            rep.is_blocked = False
        elif rep.s.params.async_scheduling:
            self._end_async_step(rep, step, now)
        else:
            self._end_sync_step(rep, step, now)
        return True

    def _end_sync_step(self, rep: Replica, step: Step, now: float) -> None:  # noqa: C901  one straight sequence
        """End a step and count its tokens (without asynchronous scheduling)."""
        if rep.sglang is not None:
            rep.sglang.end(step)
        rep.steps_since_admit += 1
        rep.steps_since_check += 1
        for q in sorted(step.paused, key=lambda q: q.last.return_number):
            self._to_idle(rep, q)
        for last in sorted(times := Counter(q.last.token_s for q in step.decodes)):  # type: ignore[type-var]
            rep.count_gap(now - last, times[last])  # type: ignore[operator]
        finishing = [q for q in step.decodes if q.generated + q.last.emits == q.output]
        if rep.sglang is None:
            finishing.sort(key=lambda q: q.admission.number)
        elif rep.s.params.prefix_caching:
            self._cache_as_sglang(rep, step, finishing)
        others = sorted(set(step.decodes) - set(finishing), key=lambda q: q.last.return_number)
        for q in (*finishing, *others):
            q.last.hit = q.last.next_hit
            self._emit(rep, q, now, q.last.emits)
        for q, chunk_tokens in step.prompts:
            q.prefilled += chunk_tokens
            if rep.sglang is None:
                self._cache_blocks(rep, q, q.prefilled, "computed")
            if q.prefilled < q.context:
                self._to_idle(rep, q)
                continue
            if q.last.token_s is not None:
                rep.count_gap(now - q.last.token_s, 1)
            self._emit(rep, q, now)

    def _cache_as_sglang(self, rep: Replica, step: Step, finishing: list[Request]) -> None:
        """Insert what a step has computed into the tree as SGLang does: prompts, outputs, then an unfinished prompt.

        Requests that end free their pages at once.
        """
        done = [q for q, tokens in step.prompts if q.prefilled + tokens == q.context]
        for q in (*done, *finishing):
            self._cache_blocks(rep, q, q.context, "ended")
            if q.generated + 1 == q.output:
                rep.pool.release(q.cached, q.blocks - len(q.cached))
                q.blocks, q.cached, q.rules.kv_tokens = 0, (), 0
        for q, tokens in step.prompts:
            if q not in done:
                self._cache_blocks(rep, q, q.prefilled + tokens, "computed")

    def _start_overlapped(self, rep: Replica, step: Step) -> None:
        """Note what a step in flight computes. Its tokens count when it ends, after the next step has been formed."""
        rep.idle += [*step.decodes, *(q for q, _ in step.prompts)]
        for q, chunk_tokens in step.prompts:
            q.prefilled += chunk_tokens
        step.emitting = [q for q, _ in step.prompts if q.prefilled == q.context]

    def _end_overlapped_step(self, rep: Replica, step: Step, now: float) -> None:
        """End a step under SGLang's rules with overlap. A request that has left since it was formed gets no token.

        Prompts enter the tree, and ended requests free their pages, in the order of the step, prompts first.
        """
        rep.is_blocked = False
        rep.sglang.end(step)
        prompts, decodes = ([q for q in part if q.rules.kv_tokens] for part in (step.emitting, step.decodes))
        for last in sorted(times := Counter(q.last.token_s for q in decodes)):  # type: ignore[type-var]
            rep.count_gap(now - last, times[last])  # type: ignore[operator]
        column = kernel_layout.SERIES_COLUMNS.index("output_tokens")
        rep.series[int(now / rep.totals["series_bin_s"]), column] += len(prompts) + len(decodes)
        for q in (*prompts, *decodes):
            ends = q.generated + 1 == q.output
            if ends or q in prompts:
                self._cache_blocks(rep, q, q.rules.kv_tokens if ends else q.context, "ended")
            if ends:
                rep.pool.release(q.cached, q.blocks - len(q.cached))
                q.blocks, q.cached, q.rules.kv_tokens = 0, (), 0
            if q in prompts and q.last.token_s is not None:
                rep.count_gap(now - q.last.token_s, 1)
            rep.idle.remove(q)
            self._emit(rep, q, now)

    def _count_at_start(self, rep: Replica, step: Step) -> None:
        """Count a step's tokens at its start, because the next step is formed before it ends (asynchronous scheduling).

        A request that ends by EOS also decodes in the step after its last token, and that result is lost.
        """
        step.emitting = [q for q in step.decodes if q.generated < q.output]
        for q in step.decodes:
            q.generated += 1
            rep.idle.append(q)
        for q, chunk_tokens in step.prompts:
            q.prefilled += chunk_tokens
            if q.prefilled == q.context:
                q.decoding = True
                q.generated += 1
                step.emitting.append(q)
            self._to_idle(rep, q)
        step.finishing = [q for q in step.emitting if q.generated == q.output]

    def _end_async_step(self, rep: Replica, step: Step, now: float) -> None:
        """End a step whose tokens ``_count_at_start`` counted. Requests preempted meanwhile get their tokens, too."""
        rep.is_blocked = False
        decodes = [q for q in step.emitting if q in step.decodes]
        for last in sorted(times := Counter(q.last.token_s for q in decodes)):  # type: ignore[type-var]
            rep.count_gap(now - last, times[last])  # type: ignore[operator]
        for q in step.emitting:
            if q.last.token_s is None:
                self.results[q.index]["first_token_s"] = now
            elif q not in decodes:
                rep.count_gap(now - q.last.token_s, 1)
            q.last.token_s = now
        for q in sorted(step.finishing, key=lambda q: q.admission.number):
            q.generated = q.output
            self.results[q.index]["finished_s"] = now
            if q in rep.idle:
                rep.idle.remove(q)
            self._end_request(rep, q, Status.FINISHED, now)

    def _emit(self, rep: Replica, q: Request, now: float, tokens: int = 1) -> None:
        if q.last.token_s is None:
            self.results[q.index]["first_token_s"] = now
        q.decoding = True
        q.generated += tokens
        q.last.token_s, q.last.unhashed, q.last.is_received = now, tokens - 1, False
        if q.generated == q.output:
            self.results[q.index]["finished_s"] = now
            if receiver := self.receivers.get(q.index):  # Its layers are in transfer, which goes on to its end.
                receiver.left = Transfer(rep, q.blocks, q.cached)
                q.blocks, q.cached = 0, ()
            self._end_request(rep, q, Status.FINISHED, now)
        elif self.s.decode_side and rep in self.prefill_replicas:  # ``rep`` has the blocks until they are fetched.
            self._end_offloading(q)
            q.transfer = Transfer(rep, q.blocks, q.cached)
            q.blocks, q.cached = 0, ()
            if receiver := self.receivers.pop(q.index, None):
                to, q.blocks = receiver.replica, receiver.blocks
                self._move_load(to, q)
                self._note_admission(to, q)
                self.results[q.index]["replica"] = to.number
                return
            to = self._route(self.s.decode_side, self.decode_replicas, q)
            self._move_load(to, q)
            self._enqueue(to.queue, q, now)
        else:
            self._to_idle(rep, q)

    def _to_idle(self, rep: Replica, q: Request) -> None:
        self.returns += 1
        q.last.return_number = self.returns
        rep.idle.append(q)

    def _end_request(self, rep: Replica, q: Request, status: Status, now: float) -> None:
        if rep in self.prefill_replicas:
            self._end_offloading(q)
        self._free_blocks(rep, q, "ended")
        if q.transfer:
            q.transfer.release()
        self.results[q.index]["status"] = status
        self.results[q.index]["output_tokens"] = self._output_tokens(q)
        self.results[q.index]["queued_for_s"] = q.wait.total_s(now)
        rep.ended_since_admit += 1
        rep.finished += 1
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

    def _cache_blocks(self, rep: Replica, q: Request, tokens: int, event: str) -> None:
        """Let other requests find the full blocks of a request's first ``tokens`` tokens, if the pool caches them now.

        ``event`` is "scheduled" or "computed" (these tokens), or "preempted" or "ended" (the request).
        """
        if rep.s.params.prefix_caching and event in rep.pool.caches_when:
            size, prompt = rep.s.params.block_size, int(self.s.columns.prompt[q.index])
            if full := tokens // size:
                nodes, priority = self._prefix_nodes(q)[:full], -int(self.s.columns.priority[q.index])
                q.cached = rep.pool.cache(q.cached, nodes, prompt // size, priority)

    def _prefix_nodes(self, q: Request) -> list[int]:
        return [int(node) for node in self.s.nodes.of(q.index)]

    def _free_blocks(self, rep: Replica, q: Request, event: str) -> None:
        if q.blocks:
            # The token of a decode in flight is not known yet (asynchronous scheduling).
            unknown = sum(q in step.decodes for step in rep.flights) if event == "preempted" else 0
            unknown += q.last.unhashed if q.decoding else 0
            self._cache_blocks(rep, q, q.computed - unknown, event)
            rep.pool.release(q.cached, q.blocks - len(q.cached))
        q.blocks, q.cached, q.rules.kv_tokens, q.rules.skipped = 0, (), 0, 0

    def _needed_blocks(self, rep: Replica, q: Request, tokens: int) -> int:
        """Free a resident's blocks before its window. Return how many it needs for ``tokens`` tokens.

        Steps in flight (asynchronous scheduling) still read the blocks before the windows of their tokens.
        """
        in_flight = sum(step.tokens_of(q) for step in rep.flights) if rep.s.params.async_scheduling else 0
        params, end, first = rep.s.params, rep.s.skipped_blocks(q.computed - in_flight), q.rules.skipped
        if end > first:
            if params.chunked_local:  # Its decodes have filled blocks that get their contents at the latest now.
                self._cache_blocks(rep, q, end * params.block_size, "scheduled")
            rep.pool.skip(q.cached, first, end)
            q.blocks -= (1 if params.aligned else end - first) * params.local_groups
            q.rules.skipped = end
        return max(0, rep.s.blocks_for(tokens, q.rules.skipped) - q.blocks)

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
        if self.s.params.closed_loop and self.released < len(self.arrival_s):
            self.arrival_s[self.released] = now
            self.released += 1
            self._update_entry_time()
        if status == Status.FINISHED:
            for child in self._children(i):
                self.parents_left[child] -= 1
                if self.parents_left[child] == 0:
                    delay_s = float(self.s.dependents.delay_s[child]) if self.s.dependents else 0.0
                    self.arrival_s[child] = max(float(self.arrival_s[child]), now + delay_s)
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
        self._abort_transfers(rep, now)
        for q in [q for q in rep.loaded if q.arrival_s + self.s.params.timeout_s <= now]:
            del rep.loading[q]
            self._end_request(rep, q, Status.TIMED_OUT, now)

    def _abort_transfers(self, rep: Replica, now: float) -> None:
        """Free the blocks on prefill replicas whose transfer to this replica has not started in time."""
        link = rep.s.kv_transfer
        for q in list(rep.queue.waiting):
            prefilled_s = q.last.token_s or 0.0
            if q.transfer and q.transfer.blocks and prefilled_s + link.timeout_s <= now:
                q.transfer.release()
                q.transfer, q.decoding, q.prefilled = None, False, 0
                if link.kv_load_failure_policy == "fail":
                    rep.queue.waiting.remove(q)
                    self._end_request(rep, q, Status.TIMED_OUT, now)

    def _schedule_all(self, now: float) -> None:
        """Schedule pending replicas by number, or all replicas, least loaded first, if a central queue has requests.

        If one data-parallel rank of a replica is pending, all of them form a step. Before that, transfers to all ranks
        of the pending decode replicas start.

        Requests that were preempted into a central queue are offered to all replicas once more. Decode replicas are
        scheduled before prefill replicas, which then see the blocks that their transfers have freed.
        """
        if self.decode_replicas or self.s.params.dp > 1:
            for side in (self.decode_replicas, self.prefill_replicas):
                self._schedule_side([rep for rep in side if any(one.pending for one in rep.ranks)], now)
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

    def _schedule_side(self, pending: list[Replica], now: float) -> None:
        for rep in pending:
            rep.pending = False
            if len(rep.ranks) > 1 and rep in self.decode_replicas:
                self._start_transfers(rep, now)
        for rep in pending:
            if len(rep.ranks) == 1:
                self._schedule(rep, now)
            elif rep is rep.ranks[0]:
                self._schedule_together(rep.ranks, now)

    def _schedule(self, rep: Replica, now: float) -> None:
        if rep in self.decode_replicas:
            self._start_transfers(rep, now)
        while len(rep.flights) < rep.s.params.max_in_flight:
            if not self._may_form([rep], now):
                return
            step = self._form_or_retry(rep, now)
            if not step.seqs:
                self._complete_offloading(rep)
                return
            self._launch(rep, step)

    def _schedule_together(self, ranks: list[Replica], now: float) -> None:
        """Fill the pipeline of a replica with steps of all its ranks."""
        while len(ranks[0].flights) < ranks[0].s.params.max_in_flight and self._may_form(ranks, now):
            steps = [self._form_or_retry(rep, now) for rep in ranks]
            if not any(step.seqs for step in steps):
                return
            self._launch_together(ranks, steps)

    def _form_or_retry(self, rep: Replica, now: float) -> Step:
        """Form a step. If preemptions for blocks leave it empty, form it once more."""
        step = self._form(rep, now)
        rep.is_blocked = rep.s.params.async_scheduling and not step.seqs and len(rep.flights) > 0
        retries = step.preempted_for_blocks and not rep.is_blocked
        if not step.seqs and retries and not step.flags & contracts.FORM_ONCE:
            swap_s = step.swap_s
            step = self._form(rep, now)
            step.swap_s += swap_s
        return step

    def _may_form(self, ranks: list[Replica], now: float) -> bool:
        """Return whether a replica may form a step now. Under asynchronous scheduling it may have to wait.

        It waits for the hosts of its ranks or, after an empty step, for the end of the oldest step in flight.
        """
        host_free_s = max(rep.host_free_s for rep in ranks)
        if host_free_s > now:
            ranks[0].wake_s = host_free_s
            return False
        return not all(rep.is_blocked for rep in ranks)

    def _form(self, rep: Replica, now: float) -> Step:  # noqa: C901  one straight sequence
        step = Step(now)
        self._expire(rep, now)
        if rep.s.params.aligned:
            rep.pool.fresh.clear()
        if rep.sglang is not None or rep.trtllm is not None:
            return self._form_by_rules(rep, step)
        if not rep.idle and not rep.queue.waiting and not rep.loaded:
            return step
        if len(rep.running) + len(rep.queue.waiting) + len(rep.loading) > 1:  # vLLM leaves a lone request the budget.
            step.max_chunk = rep.s.params.long_prefill_token_threshold or math.inf
        admit, tokens, flags = self._plan(rep, step)
        step.flags = flags
        if flags & contracts.NEW_PHASE:
            rep.phase_steps = rep.phase_rounds = 0
        if admit > 0:
            rep.steps_since_admit = rep.ended_since_admit = 0  # Even if no request is admitted.
            self._preempt_for_waiting(rep, step)
        if not flags & contracts.DECODES_WAIT:
            self._take_decodes(rep, step, flags, tokens)
        prompt_budget = max(0, tokens - step.decode_tokens)
        self._continue_prompts(rep, step, prompt_budget)
        if not step.preempted_for_blocks or flags & contracts.ADMIT_AFTER_PREEMPTION:
            self._admit(rep, step, admit, prompt_budget, flags)
            for q in step.deferred:
                rep.queue.waiting.append(q)
                self._note_overdue_time(rep.queue, q)
        if not step.seqs:
            self._take_decodes(rep, step, flags, tokens)
        if step.prompts and not step.decodes and flags & contracts.PAUSE_DECODES:
            step.paused = [q for q in rep.idle if q.decoding]
            rep.idle = [q for q in rep.idle if not q.decoding]
        return step

    def _form_by_rules(self, rep: Replica, step: Step) -> Step:
        """Form a step by the rules of SGLang or TensorRT-LLM."""
        if rep.sglang is not None:
            rep.sglang.form(step)
        else:
            rep.trtllm.form(step, rep.idle)
        taken, step.prompts = step.prompts, []
        for q, chunk in taken:
            if q in rep.idle:
                rep.idle.remove(q)
                step.prompts.append((q, chunk))
            else:
                if q.admission.number < 0:
                    self.results[q.index]["cached_tokens"] = q.prefilled
                self._note_admission(rep, q)
                self._place(rep, step, q, chunk)
        rep.idle = [q for q in rep.idle if q not in step.decodes]
        return step

    def _plan(self, rep: Replica, step: Step, next_tokens: int = 0) -> tuple[int, int, int]:
        decodes, params = sum(q.decoding for q in rep.idle), rep.s.params
        admit, tokens, flags = rep.s.functions.batching(
            decodes, len(rep.idle) - decodes, len(rep.queue.waiting) + len(rep.loaded), len(rep.running) + step.seqs,
            len(rep.flights), params.token_budget, params.max_num_seqs, rep.steps_since_admit, rep.ended_since_admit,
            rep.phase_steps, rep.phase_rounds, len(step.prompts), step.prompt_tokens, next_tokens, params.pp,
            *rep.s.policies.batching.all_parameters,
        )  # fmt: skip
        return int(admit), int(tokens), int(flags)

    def _preempt_for_waiting(self, rep: Replica, step: Step) -> None:
        """Rank the queue. Preempt residents with a token since their admission for waiting requests of smaller keys."""
        params = rep.s.params
        may_free_seqs = params.preempts_by_policy or step.flags & contracts.ADMIT_AFTER_PREEMPTION
        if may_free_seqs or len(rep.running) < params.max_num_seqs:  # Otherwise no request can be admitted.
            self._update_ranks(rep.queue)
        check = rep.check_preemption or rep.steps_since_check >= params.preemption_interval_steps
        if not (params.preempts_by_policy and check and rep.queue.waiting):
            return
        may_leave = [q for q in rep.idle if q.generated > q.admission.generated]
        candidates = sorted((self._rank_key(q), q.last.return_number, q) for q in may_leave)
        free_blocks, free_seqs, left = rep.pool.free, params.max_num_seqs - len(rep.running), len(candidates)
        for w in sorted(rep.queue.waiting, key=Request.queue_order)[: params.max_num_seqs]:
            k, trial_blocks, trial_seqs = left, free_blocks, free_seqs
            while not (trial_seqs > 0 and (blocks := self._blocks_if_free(w, trial_blocks, trial_seqs)) >= 0):
                if k == 0 or not self._may_preempt(rep, w, candidates[k - 1][0], candidates[k - 1][2]):
                    break
                k -= 1
                q = candidates[k][2]
                trial_blocks += q.blocks - rep.pool.in_use(q.cached, 2)
                trial_seqs += 1
            else:  # ``w`` fits after the preemption of ``candidates[k:]``.
                left, free_blocks, free_seqs = k, trial_blocks - blocks, trial_seqs - 1
                continue
            break  # ``w`` does not fit, and no request after it may overtake it.
        # ``_preempt`` counts preemptions for lack of blocks, but these are by rank.
        preempted_tokens, preemptions = rep.preempted_tokens, rep.gate.preemptions if rep.gate else 0
        for _, _, q in reversed(candidates[left:]):
            self._preempt(rep, step, q)
        rep.preempted_tokens = preempted_tokens
        if rep.gate is not None:
            rep.gate.preemptions = preemptions
        step.preempted_for_blocks = rep.check_preemption = False
        rep.steps_since_check = 0

    def _blocks_if_free(self, q: Request, free_blocks: int, free_seqs: int) -> int:
        predicted, _ = self.s.predicted_at(q.index, q.generated)
        num_running = self.s.params.max_num_seqs - free_seqs
        return self.s.memory_blocks(q.context, q.context, predicted, free_blocks, num_running, 0)

    def _may_preempt(self, rep: Replica, w: Request, key: float, q: Request) -> bool:
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
        late = q.wait.overdue_at_s(self.s.params.max_wait_s) <= self.now_s
        if not late and self.s.params.trtllm and q.admission.number >= 0:
            return q.wait.key  # A paused request returns to its position.
        return -math.inf if late else self._key(self.s.functions.rank, q)

    def _key(self, function: Function, q: Request) -> float:
        return self.s.key(function, self.now_s, q, self.service[self.s.tenant(q.index)])

    def _update_ranks(self, queue: Queue) -> None:
        late = queue.overdue_at_s <= self.now_s
        if queue.waiting and (self.s.params.rank_every_step or late):
            queue.overdue_at_s = math.inf
            for q in queue.waiting:
                self._set_key(queue, q)
            if late:
                self._flag_preemption_check(queue)

    def _set_key(self, queue: Queue, q: Request) -> None:
        q.wait.key = self._rank_key(q)
        self._note_overdue_time(queue, q)

    def _note_overdue_time(self, queue: Queue, q: Request) -> None:
        if (overdue_at_s := q.wait.overdue_at_s(self.s.params.max_wait_s)) > self.now_s:
            queue.overdue_at_s = min(queue.overdue_at_s, overdue_at_s)

    def _flag_preemption_check(self, queue: Queue) -> None:
        for rep in self.replicas:
            rep.check_preemption = rep.check_preemption or rep.queue is queue

    def _enqueue(self, queue: Queue, q: Request, now: float) -> None:
        if q.wait.since_s is None:
            q.wait.since_s = now
        self._set_key(queue, q)
        queue.waiting.append(q)
        if q is queue.first:
            self._flag_preemption_check(queue)

    def _serve_in_order(self, rep: Replica, step: Step, tokens: int) -> None:
        """Put residents into the step in the order of admission, and preempt while blocks are short, as vLLM does.

        The victim may be in the step already. If a request is its own victim, no further resident joins the step.
        """
        pool, params = rep.pool, rep.s.params
        in_order = params.aligned or params.long_prefill_token_threshold > 0
        order = partial(Request.admission_order, prompts_last=not in_order)  # One swapped in may follow a prompt.
        for q in sorted(rep.idle, key=order):
            if q not in rep.idle or self._ends_in_flight(q):
                continue
            left = tokens - len(step.decodes) - step.prompt_tokens
            chunk = int(min(q.context - q.prefilled, left, step.max_chunk))
            if left <= 0 and (not q.decoding or in_order):
                return
            if rep.s.params.aligned and not q.decoding:
                chunk = self._aligned(rep, q, q.prefilled, chunk, q.cached)
                if chunk == 0:
                    continue
            need = self._needed_blocks(rep, q, q.context if q.decoding else q.prefilled + chunk)
            while pool.free < need:
                residents = [*rep.idle, *step.decodes, *(p for p, _ in step.prompts)]
                residents.sort(key=order)
                victim = max(residents, key=lambda q: (self._key(self.s.functions.victim, q), q.arrival_s))
                if victim not in rep.idle:
                    step.decodes = [d for d in step.decodes if d is not victim]
                    step.prompts = [(p, computed) for p, computed in step.prompts if p is not victim]
                    rep.idle.append(victim)
                self._preempt(rep, step, victim)
                step.is_served = True
                if victim is q:
                    return
            pool.take(need)
            q.blocks += need
            rep.idle.remove(q)
            if q.decoding:
                step.decodes.append(q)
            else:
                self._cache_blocks(rep, q, q.prefilled + chunk, "scheduled")
                step.prompts.append((q, chunk))

    def _take_decodes(self, rep: Replica, step: Step, flags: int, tokens: int) -> None:
        if rep.s.params.vllm_priority or rep.s.params.long_prefill_token_threshold or rep.s.params.aligned:
            if not step.is_served:
                self._serve_in_order(rep, step, tokens)
            return
        reserve = 1 if flags & contracts.RESERVE_BLOCK else 0
        reserve_when_alone, limit = bool(flags & contracts.FORM_ONCE), rep.s.params.max_step_seqs
        if flags & contracts.UNIFORM_SHARES:
            residents = len(rep.running) - len(rep.incoming) + step.seqs
            limit = min(limit, step.seqs + -(-residents // rep.s.params.max_in_flight))
        decodes = [q for q in rep.idle if q.decoding and not self._ends_in_flight(q)]
        for q in sorted(decodes, key=self._victim_order):
            if step.seqs == limit:
                return
            if q in rep.idle:
                self._draw(rep, q)
                need = self._needed_blocks(rep, q, self._slots_end(q.context + q.last.drafts))
                if self._claim_blocks(rep, step, q, need, reserve, reserve_when_alone=reserve_when_alone):
                    rep.idle.remove(q)
                    step.decodes.append(q)

    def _draw(self, rep: Replica, q: Request) -> None:
        """Set how many proposed tokens a decode verifies in its next step, and how many tokens the step gives it."""
        params, chosen = self.s.params, self.s.deployment.speculation
        if chosen is None:
            return
        hit_probability = float(self.s.columns.hit_rate[q.index])
        hit_probability += params.burstiness * (q.last.hit - hit_probability) if q.last.hit is not None else 0.0
        drawn = uniform(int(self.s.columns.draw_key[q.index]), q.generated)
        drafts = 0 if q.last.is_received else rep.drafts
        q.last.drafts = max(0, min(drafts, params.max_model_len - q.context - 1))
        has_proposal = q.last.drafts > 0
        if drawn >= hit_probability + (1.0 - hit_probability) * params.missed_draft_rate:
            q.last.drafts = 0
        tokens = accepted(drawn, hit_probability, chosen.survival, q.last.drafts)
        q.last.next_hit = tokens > 0 if has_proposal else q.last.hit
        q.last.emits = min(1 + tokens, q.output - q.generated)

    def _slots_end(self, tokens: int) -> int:
        """Return the number of a request's tokens that need KV memory in a step that computes up to ``tokens``."""
        params = self.s.params
        return min(tokens + params.lookahead_tokens, params.max_model_len) if params.speculates else tokens

    def _ends_in_flight(self, q: Request) -> bool:
        """Return whether a request's last token is in flight and ends it at a limit (asynchronous scheduling)."""
        return q.generated >= q.output and bool(self.s.columns.ends_at_limit[q.index])

    def _continue_prompts(self, rep: Replica, step: Step, prompt_budget: int) -> None:
        if step.is_served or rep.s.params.aligned:
            return
        for q in sorted((q for q in rep.idle if not q.decoding), key=lambda q: q.admission.number):
            chunk_tokens = min(q.context - q.prefilled, prompt_budget - step.prompt_tokens)
            if step.seqs == rep.s.params.max_step_seqs or chunk_tokens <= 0:
                return
            if q in rep.idle:
                need = self._needed_blocks(rep, q, self._slots_end(q.prefilled + chunk_tokens))
                if self._claim_blocks(rep, step, q, need):
                    rep.idle.remove(q)
                    self._cache_blocks(rep, q, q.prefilled + chunk_tokens, "scheduled")
                    step.prompts.append((q, chunk_tokens))

    def _claim_blocks(
        self, rep: Replica, step: Step, q: Request, need: int, reserve: int = 0, *, reserve_when_alone: bool = False
    ) -> bool:
        """Give a request ``need`` blocks, preempting idle residents for them. Return False if it was preempted itself.

        At least ``reserve`` blocks must be free before. A replica's only request is exempt, as it might never run,
        except with ``reserve_when_alone`` (Vidur's FORM_ONCE).
        """
        pool = rep.pool
        while pool.free < need or (pool.free < reserve and (reserve_when_alone or len(rep.running) + step.seqs > 1)):
            victim = max(rep.idle, key=self._victim_order)
            self._preempt(rep, step, victim)
            if victim is q:
                return False
        pool.take(need)
        q.blocks += need
        return True

    def _victim_order(self, q: Request) -> tuple[float, int]:
        return self._key(self.s.functions.victim, q), q.last.return_number

    def _preempt(self, rep: Replica, step: Step, q: Request) -> None:
        params = rep.s.params
        rep.idle.remove(q)
        self.preemptions += 1
        q.wait.last_preemption = self.preemptions
        blocks = q.blocks
        self._free_blocks(rep, q, "preempted")
        step.preempted_for_blocks = True
        if rep.gate is not None:
            rep.gate.preemptions += 1
        if params.swap and q.decoding:
            q.swapped = True
            step.swap_s += blocks * params.swap_s_per_block
        else:
            rep.preempted_tokens += q.context if q.decoding else q.prefilled
            if not q.decoding and step.flags & contracts.RESTART_AS_DECODE:
                total = q.prompt + q.output
                q.prompt = q.prefilled - q.generated
                q.output = total - q.prompt
            q.decoding, q.prefilled = False, 0
        self.results[q.index]["preemptions"] += 1
        if any(q in flight.finishing for flight in rep.flights):  # Its last token is in flight.
            return
        to = rep
        if q.transfer and not q.swapped:  # Its prompt is recomputed on a replica that prefills.
            to = q.transfer.source
            self._move_load(to, q)
        self._enqueue(to.queue, q, self.now_s)

    def _admit(  # noqa: C901, PLR0912  one straight sequence
        self, rep: Replica, step: Step, admit: int, prompt_budget: int, flags: int
    ) -> None:
        admitted, batch, params = self._admit_loaded(rep, step, admit, prompt_budget, flags), 0, rep.s.params
        pads = params.padding_tokens > 0 and not step.prompts
        if admitted < 0:
            return
        while (
            rep.queue.waiting
            and admitted < admit
            and len(rep.running) + step.seqs < params.max_num_seqs
            and step.seqs < params.max_step_seqs
        ):
            q = rep.queue.first
            # A request whose blocks wait on another replica enters by a transfer, not with a step.
            if (q.transfer and q.transfer.blocks) or (
                admitted > 0 and q.wait.bin_batch != batch and flags & contracts.ONE_BATCH
            ):
                return
            found = self._find_cached(rep, q, flags)
            cached = self._length(rep, found) * params.block_size
            chunk_tokens = 1 if q.swapped else self._chunk(step, q, prompt_budget, flags, cached)
            if params.aligned:
                chunk_tokens = self._aligned(rep, q, cached, chunk_tokens, found)
            if pads:
                chunk_tokens = self._padded(step, q, prompt_budget, chunk_tokens, cached)
            if chunk_tokens <= 0:
                return
            if flags & contracts.ONE_BY_ONE and self._plan(rep, step, chunk_tokens)[0] <= 0:
                return
            if params.offload_blocks and not q.swapped and flags & contracts.CHUNKED:
                loadable, deferred = self._loadable(rep, q, len(found))
                if deferred:
                    rep.queue.waiting.remove(q)
                    step.deferred.append(q)
                    continue
                if loadable:
                    if not self._load(rep, step, q, found, loadable):
                        return
                    continue
            blocks = self._blocks_to_admit(rep, step, q, cached + chunk_tokens, found)
            if blocks < 0:
                return
            self._take_blocks(rep, q, blocks, found)
            if params.hybrid:
                q.rules.skipped = self._skipped(rep, found, cached + chunk_tokens)
            if q.admission.number < 0:
                self.results[q.index]["cached_tokens"] = cached
            if not q.swapped:
                self._cache_blocks(rep, q, min(cached + chunk_tokens, q.context), "scheduled")
            self._note_admission(rep, q)
            admitted, batch = admitted + 1, q.wait.bin_batch
            self._place(rep, step, q, chunk_tokens)

    def _take_blocks(self, rep: Replica, q: Request, blocks: int, found: Any) -> None:
        rep.queue.waiting.remove(q)
        rep.pool.hold(found)
        rep.pool.take(blocks - len(found))
        q.blocks, q.cached = blocks, found
        if length := self._length(rep, found):
            q.prefilled = length * rep.s.params.block_size

    def _skipped(self, rep: Replica, found: Any, tokens: int) -> int:
        """Return how many first blocks local groups lack once ``tokens`` tokens of a new request are computed."""
        params = rep.s.params
        if params.aligned and not found.length:
            return (tokens - 1) // params.block_size
        return int(found.skipped(params.local_groups))

    def _padded(self, step: Step, q: Request, prompt_budget: int, chunk_tokens: int, cached: int) -> int:
        """Return the tokens of a prompt's first chunk. vLLM pads a last token to the size of a verification.

        The result is 0 if that exceeds the budget, so that the request must wait.
        """
        tokens = 1 + self.s.params.padding_tokens
        if cached != q.context - 1 or not (step.decodes or cached) or cached + tokens >= self.s.params.max_model_len:
            return chunk_tokens
        return tokens if tokens <= prompt_budget - step.prompt_tokens else 0

    def _aligned(self, rep: Replica, q: Request, start: int, tokens: int, found: Any) -> int:
        """Return how many of a prompt's next ``tokens`` tokens a step computes, so that states can be cached."""
        params, prompt = rep.s.params, int(self.s.columns.prompt[q.index])
        junction = found.boundaries[-1] * params.block_size if len(found.boundaries) > 1 else 0
        return aligned_chunk(start, tokens, prompt, q.context, junction, params.block_size, params.token_budget)

    def _length(self, rep: Replica, found: Any) -> int:
        return found.length if rep.s.params.hybrid else len(found)

    def _note_admission(self, rep: Replica, q: Request) -> None:
        is_first = q.admission.number < 0
        self.admissions += 1
        q.admission = Admission(self.admissions, q.generated)
        q.wait.end(self.now_s)
        if is_first and rep.s.params.tracks_service:
            tenant = self.s.tenant(q.index)
            predicted = float(self.s.columns.predicted[q.index])
            self.service[tenant] += q.prompt + contracts.SERVICE_OUTPUT_WEIGHT * predicted
            self._leave_backlog(tenant)
            self._update_ranks(rep.queue)

    def _admit_loaded(self, rep: Replica, step: Step, admit: int, prompt_budget: int, flags: int) -> int:
        """Admit the requests whose load has ended, and return their number, or -1 if no other may be admitted."""
        admitted, params = 0, rep.s.params
        for q in rep.loaded:
            left = prompt_budget - step.prompt_tokens
            if not (
                admitted < admit
                and len(rep.running) + step.seqs < params.max_num_seqs
                and step.seqs < params.max_step_seqs
                and left > 0
            ):
                return -1
            offload = rep.loading[q]
            assert offload.load_range is not None
            if not offload.is_cached:
                offload.is_cached = True
                self._cache_blocks(rep, q, offload.load_range[1] * params.block_size, "scheduled")
                q.prefilled = min(offload.load_range[1] * params.block_size, q.context - 1)
            chunk_tokens = int(min(q.context - q.prefilled, left, step.max_chunk))
            if flags & contracts.ONE_BY_ONE and self._plan(rep, step, chunk_tokens)[0] <= 0:
                return -1
            blocks = self._blocks_to_admit(rep, step, q, q.prefilled + chunk_tokens)
            if blocks < 0:
                return -1
            del rep.loading[q]
            rep.pool.take(blocks - q.blocks)
            q.blocks, offload.load_range = blocks, None
            self._cache_blocks(rep, q, q.prefilled + chunk_tokens, "scheduled")
            self._note_admission(rep, q)
            admitted += 1
            self._place(rep, step, q, chunk_tokens)
        return admitted

    def _loadable(self, rep: Replica, q: Request, found: int) -> tuple[list[Chunk], bool]:
        """Return the chunks of CPU memory that continue the ``found`` blocks, and whether the request is deferred.

        A request is deferred while a chunk is being stored, read from storage, or loaded by another request. With
        ``load_if_faster``, the result has no chunks if computing them is faster, unless another request loads one.
        """
        params, tier, offload = rep.s.params, rep.tier, self.offloads[q.index]
        nodes = self._prefix_nodes(q)[found : q.context // params.block_size]
        reads, begin = params.storage_blocks > 0 and offload.num_reads < MAX_READS, found * params.block_size
        # Try to load from CPU memory and storage, then from CPU memory alone.
        while params.load_if_faster and (count := tier.count(nodes, self.now_s, reads=reads)):
            tokens = min(begin + count * params.block_size, q.context - 1) - begin
            if any(chunk.loads for chunk in tier.find(nodes)) or (
                tier.load_end_s(nodes[:count], self.now_s) - self.now_s < rep.cost.prefill_s(tokens, begin)
            ):
                break
            if not reads:
                return [], False
            reads = False
        read = tier.read(nodes, self.now_s) if reads else []
        if read:
            offload.move_to(rep.number)
            offload.num_reads += 1
            offload.used.update(found + k for k in read)
            offload.read.update(found + k for k in read)
        chunks = tier.find(nodes)
        ready_s = max([self.now_s, *(chunk.ready_s for chunk in chunks)])
        if read or ready_s > self.now_s:
            offload.move_to(rep.number)
            self.wakes_s.setdefault(q.index, ready_s)
        return chunks, bool(read) or ready_s > self.now_s or any(chunk.loads for chunk in chunks)

    def _load(self, rep: Replica, step: Step, q: Request, found: Any, chunks: list[Chunk]) -> bool:
        """Start a load of chunks that continue the ``found`` blocks. Return False if blocks are short.

        A load cannot be preempted. Therefore it must leave free the blocks that prompts in progress and other loads
        still need.
        """
        params, first, end = rep.s.params, len(found), len(found) + len(chunks)
        blocks = self._blocks_to_admit(rep, step, q, end * params.block_size, found)
        if blocks < 0:
            return False
        prompts = [p for flight in rep.flights for p, _ in flight.prompts] + [p for p, _ in step.prompts]
        prompts += [p for p in rep.idle if not p.decoding]
        reserved = sum(max(0, rep.s.blocks_for(p.context) - p.blocks) for p in (*prompts, *rep.loading))
        need = blocks - sum(block.holders > 0 for block in found)
        if reserved > 0:
            need += reserved + params.watermark_blocks
        if need > rep.pool.free:
            return False
        self._take_blocks(rep, q, blocks, found)
        end_s = rep.tier.loads.move(len(chunks), self.now_s)
        for chunk in chunks:
            chunk.loads += 1
        offload = self.offloads[q.index]
        offload.move_to(rep.number)
        offload.load_range, offload.end_s, offload.is_loaded, offload.is_cached = (first, end), end_s, False, False
        offload.used.update(range(first, end))
        offload.stored = end
        q.wait.end(self.now_s)
        q.wait.since_s = end_s
        rep.loading[q] = offload
        row = self.results[q.index]
        row["load_s"] += end_s - self.now_s
        if q.admission.number < 0:
            row["cached_tokens"] = q.prefilled
            row["loaded_tokens"] = min(end * params.block_size, q.context - 1) - q.prefilled
            read = sum(first <= k < end for k in offload.read)
            row["storage_tokens"] = min(read * params.block_size, row["loaded_tokens"])
        return True

    def _end_load(self, rep: Replica, q: Request) -> None:
        offload = rep.loading[q]
        offload.is_loaded, offload.end_s = True, math.inf
        assert offload.load_range is not None
        first, end = offload.load_range
        for chunk in rep.tier.find(self._prefix_nodes(q)[first:end]):
            chunk.loads -= 1

    def _store(self, rep: Replica, q: Request, tokens: int, computed_s: float) -> None:
        """Store the not yet stored full blocks of a request's first ``tokens`` tokens, if CPU memory has room."""
        params, offload = rep.s.params, self.offloads[q.index]
        offload.move_to(rep.number)
        end = tokens // params.block_size
        if end <= offload.stored:
            return
        nodes = self._prefix_nodes(q)[offload.stored : end]
        for k, node in enumerate(nodes, start=offload.stored):
            if node not in rep.tier.pool.chunks or rep.tier.pool.chunks[node].ready_s <= self.now_s:
                offload.used.add(k)
        if rep.tier.store(nodes, self.now_s, computed_s):
            offload.stored = end

    def _end_offloading(self, q: Request) -> None:
        """Add a request that ends or moves to a decode replica to its replica's ``pending_stores``."""
        offload = self.offloads[q.index]
        if offload.replica >= 0:
            offload.tokens = self._storable_tokens(q, q.computed)
            self.replicas[offload.replica].pending_stores.append(q)

    def _storable_tokens(self, q: Request, tokens: int) -> int:
        return tokens if self.s.params.offload_outputs else min(tokens, int(self.s.columns.prompt[q.index]))

    def _complete_offloading(self, rep: Replica) -> None:
        """Store the last blocks of the replica's ``pending_stores``, and mark all their used chunks as used now."""
        pending_stores, rep.pending_stores = sorted(rep.pending_stores, key=lambda q: q.index), []
        for q in pending_stores:
            self._store(rep, q, self.offloads[q.index].tokens, self.now_s)
        for q in pending_stores:
            nodes = self._prefix_nodes(q)
            rep.tier.pool.touch([nodes[k] for k in sorted(self.offloads[q.index].used)])

    def _place(self, rep: Replica, step: Step, q: Request, chunk_tokens: int) -> None:
        row = self.results[q.index]
        if math.isnan(row["scheduled_s"]):
            row["scheduled_s"] = self.now_s
        row["replica"] = rep.number
        if q.swapped:
            q.swapped = False
            step.swap_s += q.blocks * rep.s.params.swap_s_per_block
            self._to_idle(rep, q)
        else:
            step.prompts.append((q, chunk_tokens))

    def _find_cached(self, rep: Replica, q: Request, flags: int) -> Any:
        """Return the cached blocks with which a waiting request begins. Its last token is never among them."""
        if not rep.s.params.prefix_caching or q.swapped or not flags & contracts.CHUNKED:
            return rep.pool.find([])
        size = rep.s.params.block_size
        found = rep.pool.find(self._prefix_nodes(q)[: (q.context - 1) // size])
        if rep.s.params.drops_block:
            found = found[:-1]
        if rep.s.params.hybrid:
            found.boundaries = ((int(self.s.columns.prompt[q.index]) - 1) // size, *found.boundaries)
        return found

    def _chunk(self, step: Step, q: Request, prompt_budget: int, flags: int, cached: int = 0) -> int:
        """Return how many tokens after the ``cached`` ones the step computes of a prompt, or 0 if it must wait."""
        left = prompt_budget - step.prompt_tokens
        if flags & contracts.CHUNKED:
            return int(min(q.context - cached, left, step.max_chunk))
        if not step.prompts and q.wait.last_preemption > 0:
            return q.context
        if flags & contracts.PADDED:
            longest = max([q.context, *(chunk_tokens for _, chunk_tokens in step.prompts)])
            return q.context if (len(step.prompts) + 1) * longest <= prompt_budget else 0
        return q.context if q.context <= left else 0

    def _blocks_to_admit(self, rep: Replica, step: Step, q: Request, chunk_tokens: int, found: Any = None) -> int:
        """Return the blocks that a request gets, ``found`` included, or -1 if it must wait.

        The memory policy counts two kinds of blocks as free, because the request takes no new ones for them: found
        blocks that other requests use, and the blocks that a loaded request has.
        """
        free = rep.pool.free + (rep.pool.in_use(found) if found else 0) + q.blocks
        residents = [*rep.running, *step.decodes, *(p for p, _ in step.prompts)]
        if rep.gate and not rep.admissible([q], residents):
            return -1
        loading = [p for p in rep.loading if p is not q]
        peak = self._peak_tokens([*residents, *loading, q]) if rep.s.params.needs_peak else 0
        predicted, _ = rep.s.predicted_at(q.index, q.generated)
        if not (q.transfer and q.transfer.blocks):  # No step computes yet what a KV transfer brings.
            chunk_tokens = self._slots_end(chunk_tokens)
        context = max(q.context, chunk_tokens)
        of_groups = (0, 0)
        if rep.s.params.hybrid:
            if rep.s.params.aligned and rep.pool.must_wait(found, self._prefix_nodes(q)):
                return -1
            of_groups = found.length, self._skipped(rep, found, chunk_tokens)
        blocks = rep.s.memory_blocks(context, chunk_tokens, predicted, free, len(residents), peak, *of_groups)
        if blocks >= 0:
            least = rep.s.blocks_for(q.context if q.swapped else chunk_tokens, of_groups[1])
            blocks = max(blocks, least, q.blocks)
            if blocks > free:
                raise error_of(kernel_layout.BAD_MEMORY, rep.s, blocks)
        return blocks

    def _peak_tokens(self, requests: list[Request]) -> int:
        """Return the peak of KV tokens in use if all predictions are exact (Past-Future, ASPLOS '25)."""
        in_use, peak = 0, 0
        remaining = {q.index: self.s.remaining_integer(q) for q in requests}
        for position, q in enumerate(sorted(requests, key=lambda q: -remaining[q.index]), start=1):
            in_use += q.context
            peak = max(peak, in_use + remaining[q.index] * position)
        return peak

    def _launch(self, rep: Replica, step: Step) -> None:
        cost = rep.step_cost(step, self._count_drafts(rep, step))
        end_s = rep.prepare(step, cost)
        for p, stage_s in enumerate(cost.stages_s):
            end_s = rep.stage_free_s[p] = max(end_s, rep.stage_free_s[p]) + stage_s
        rep.record_step(step, cost, end_s)
        self._put_in_flight(rep, step)

    def _launch_together(self, ranks: list[Replica], steps: list[Step]) -> None:
        """Start the steps of a replica's ranks, which end together. A rank without sequences runs a dummy step.

        Each stage takes the seconds of its slowest rank, and then those that all ranks compute together.
        """
        steps = [step if step.seqs else Step(step.start_s) for step in steps]
        costs = [
            rep.step_cost(step, self._count_drafts(rep, step)) if step.seqs else NO_COST
            for rep, step in zip(ranks, steps, strict=True)
        ]
        working = [(rep, step, cost) for rep, step, cost in zip(ranks, steps, costs, strict=True) if step.seqs]
        shared_s = ranks[0].cost.shared_s(sum(step.decode_tokens + step.prompt_tokens for step in steps))
        drafter_s = self._shared_drafter_s(ranks[0], [(rep.drafts, step) for rep, step, _ in working])
        ends_s, layer_s, free_s = [rep.prepare(step, cost) for rep, step, cost in working], 0.0, ranks[0].stage_free_s
        for p, stage_s in enumerate(shared_s):
            slowest_s = max(
                max(end_s, free_s[p]) + cost.stages_s[p] for end_s, (_, _, cost) in zip(ends_s, working, strict=True)
            )
            free_s[p] = slowest_s + stage_s + (drafter_s if p == len(shared_s) - 1 else 0.0)
            ends_s = [free_s[p]] * len(working)
            layer_s += stage_s
        for rep, step, cost in zip(ranks, steps, costs, strict=True):
            rep.record_step(step, cost, ends_s[0])
            rep.totals["layer_s"] += layer_s
            rep.totals["draft_s"] += drafter_s
            if step.seqs:
                self._put_in_flight(rep, step)
            else:
                rep.flights.append(step)

    def _shared_drafter_s(self, first: Replica, proposals: list[tuple[int, Step]]) -> float:
        """Return the seconds of the drafter's layers that all ranks compute together (the experts of an MTP module).

        Each of ``proposals`` is a rank's step and the number of tokens that the rank proposes after it for each
        sequence, with one pass for each. The first pass has all tokens of the step, the others one of each sequence.
        """
        chosen, reader, seconds = first.s.deployment.speculation, first.cost, 0.0
        if chosen is None or chosen.drafter.tables is not None:
            return 0.0
        for number in range(max(drafts for drafts, _ in proposals)):
            steps = [step for drafts, step in proposals if drafts > number]
            tokens = sum(step.seqs if number else step.decode_tokens + step.prompt_tokens for step in steps)
            seconds += chosen.drafter.layers * reader.shared_layer_s(tokens)
        return seconds

    def _put_in_flight(self, rep: Replica, step: Step) -> None:
        if rep.s.params.offload_blocks:
            for q, chunk_tokens in step.prompts:
                self._store(rep, q, self._storable_tokens(q, q.prefilled + chunk_tokens), step.end_s)
        self._complete_offloading(rep)
        # Count rounds: ``round_steps[0]`` is the marked step, at first the step that prefilled. Once it has left the
        # pipeline, a round ends, and the step launched now is marked.
        rep.phase_steps += 1
        rep.round_steps.append(step)
        if rep.phase_steps == 1 or step.prompts:
            rep.phase_rounds, rep.round_steps = 0, [step]
        else:
            marked, after = rep.round_steps[:2]
            if marked not in rep.flights and after is not step and after not in rep.flights:
                # The marked step's micro-batch has no requests left: mark the step before this one instead.
                rep.phase_rounds += 1
                rep.round_steps = rep.round_steps[-2:]
            if rep.round_steps[0] not in rep.flights:
                rep.phase_rounds += 1
                rep.round_steps = [step]
        rep.flights.append(step)
        self._send_layers(rep, step)
        if rep.gate:
            rep.adapt_gate(step)
        if rep.overlaps:
            self._start_overlapped(rep, step)
        elif rep.s.params.async_scheduling:
            self._count_at_start(rep, step)

    def _count_drafts(self, rep: Replica, step: Step) -> Drafts | None:
        """Count the proposed tokens that a step verifies, and those that the drafter proposes after it."""
        chosen, decodes, totals = rep.s.deployment.speculation, len(step.decodes), rep.totals
        if chosen is None:
            return None
        tokens, kv_tokens = step.decode_tokens - decodes, step.kv_tokens
        prompts = [(chunk, q.prefilled) for q, chunk in step.prompts]
        totals["decodes"] += decodes
        totals["draft_tokens"] += tokens
        totals["accepted_tokens"] += sum(q.last.emits - 1 for q in step.decodes)
        rep.drafts = int(chosen.drafts_by_seqs(rep.s.params.max_num_seqs)[step.seqs])
        tables = CostReader(chosen.drafter.tables or rep.s.deployment.cost)
        drafter_s = tables.drafter_s(chosen, rep.drafts, tokens, decodes, kv_tokens, prompts)
        totals["draft_s"] += drafter_s
        pairs = sum(q.last.drafts * q.context for q in step.decodes)
        return Drafts(tokens, pairs, rep.s.params.verify_pair_s, drafter_s)

    def _start_transfers(self, rep: Replica, now: float) -> None:
        self._expire(rep, now)
        max_num_seqs = rep.s.params.max_num_seqs
        if len(rep.running) < max_num_seqs:
            self._update_ranks(rep.queue)
        while rep.queue.waiting and len(rep.running) < max_num_seqs:
            q = rep.queue.first
            if not (q.transfer and q.transfer.blocks):  # A swapped request returns with a step, not by a transfer.
                return
            blocks = self._blocks_to_admit(rep, Step(now), q, q.context, [])
            if blocks < 0:
                return
            self._take_blocks(rep, q, blocks, [])
            self._note_admission(rep, q)
            self.results[q.index]["replica"] = rep.number
            self._start_transfer(q.transfer.source, rep, q, q.context - 1, 0.0)
            if rep.incoming[q] <= now:
                self._receive(rep, q)

    def _start_transfer(self, source: Replica, to: Replica, q: Request, tokens: int, earliest_end_s: float) -> None:
        """Start the transfer of ``tokens`` cached tokens, which arrives at ``earliest_end_s`` at the earliest."""
        link, start_s = to.s.kv_transfer, self.now_s
        link_s = tokens * link.token_s
        self.earliest_end_s[q.index] = earliest_end_s
        if link.sharing == "fair" and link_s > 0:
            self.fabric.start(q, (source.number, to.number), link_s, self.now_s)
            to.incoming[q] = math.inf
            return
        if link.sharing == "fcfs":
            start_s = max(start_s, source.sends_until_s, to.receives_until_s)
        to.incoming[q] = end_s = max(start_s + (link.fixed_s + link_s), earliest_end_s)
        if link.sharing == "fcfs":
            source.sends_until_s = to.receives_until_s = end_s

    def _send_layers(self, rep: Replica, step: Step) -> None:
        """Start the transfers of the prompts that a step of a prefill replica completes, layer by layer.

        A request that gets no slot and memory of its decode replica now, or would overtake another one there, is
        transferred after its prefill.
        """
        side = self.s.decode_side
        if side is None or side.kv_transfer.layers == 0 or rep in self.decode_replicas:
            return
        link = side.kv_transfer
        for q in [q for q, chunk in step.prompts if q.prefilled + chunk >= q.context]:
            to = self._route(side, self.decode_replicas, q)
            if to.queue.waiting or len(to.running) >= to.s.params.max_num_seqs:
                continue
            own, tokens, before = q.blocks, q.context, q.transfer
            q.transfer, q.blocks, q.generated = Transfer(rep, own, ()), 0, q.generated + 1  # as after its prefill
            blocks = self._blocks_to_admit(to, Step(self.now_s), q, q.context, [])
            q.transfer, q.blocks, q.generated = before, own, q.generated - 1
            if blocks < 0:
                continue
            to.pool.take(blocks)
            self.receivers[q.index] = Receiver(to, blocks)
            layer_s = tokens * link.token_s / link.layers
            self._start_transfer(rep, to, q, tokens, step.end_s + (link.fixed_s + layer_s))

    def _receive(self, rep: Replica, q: Request) -> None:
        del rep.incoming[q]
        if (receiver := self.receivers.pop(q.index, None)) and receiver.left:  # It ended with its first token.
            receiver.left.release()
            rep.pool.release((), receiver.blocks)
            return
        if q.transfer:
            q.transfer.release()
        q.last.is_received = True
        self._to_idle(rep, q)
