"""TensorRT-LLM's scheduler on one replica: which requests fit in memory, then which of them fit in the step.

The rules are those of the Python scheduler of its PyTorch backend (July 2026): ``GuaranteedNoEvictPolicy``,
``MaxUtilizationPolicy`` and ``PyMicroBatchScheduler``, without reuse of blocks and without overlap of steps. A test
compares every step with TensorRT-LLM's own classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lengthwise.engine._reference_state import BlockPool, Request, Step


@dataclass(frozen=True)
class TrtllmLimits:
    """Limits of a replica, named as in TensorRT-LLM; ``context_chunking_policy`` None computes complete prompts."""

    tokens_per_block: int
    max_batch_size: int
    max_num_tokens: int
    capacity_scheduler_policy: str = "GUARANTEED_NO_EVICT"
    context_chunking_policy: str | None = None

    def blocks_for(self, tokens: int) -> int:
        """Return the number of KV blocks for ``tokens`` tokens."""
        return -(-tokens // self.tokens_per_block)


class TrtllmReplica:
    """A replica that forms steps as TensorRT-LLM does.

    It considers its residents and the first waiting requests, up to ``max_batch_size`` together, in order of their
    keys. A request retains the key with which it first started, so that a paused request returns to its position.
    """

    def __init__(
        self,
        limits: TrtllmLimits,
        pool: BlockPool,
        waiting: list[Request],
        update_keys: Callable[[], None],
        preempt: Callable[[Step, Request], None],
        admissible: Callable[[list[Request], list[Request]], int] | None = None,
    ) -> None:
        """``update_keys`` renews the keys of ``waiting``. ``preempt`` frees a request's blocks and queues it again.

        ``admissible`` returns how many of the first waiting requests may join the residents, if memory is reserved by
        predicted length.
        """
        self.limits, self.pool, self.waiting = limits, pool, waiting
        self._update_keys, self._preempt, self._admissible = update_keys, preempt, admissible

    def form(self, step: Step, residents: list[Request]) -> None:
        """Fill the next step; it stays empty if no request can run."""
        self._update_keys()
        room = self.limits.max_batch_size - len(residents)
        waiting = sorted(self.waiting, key=Request.queue_order)[:room]
        if self._admissible:
            waiting = waiting[: self._admissible(waiting, residents)]
        active = sorted([*residents, *waiting], key=Request.queue_order)
        if self.limits.capacity_scheduler_policy == "MAX_UTILIZATION":
            fitting = self._pause_until_fit(step, active)
        else:
            fitting = self._fit_until_completion(active)
        step.decodes = [q for q in fitting if q.decoding]
        prompts = [q for q in fitting if not q.decoding]
        sizes = self._prompt_tokens(prompts, self.limits.max_num_tokens - len(step.decodes))
        step.prompts = [(q, tokens) for q, tokens in zip(prompts, sizes, strict=False) if tokens > 0]
        for q in (*step.decodes, *(q for q, _ in step.prompts)):
            blocks = self.limits.blocks_for(q.context)  # A prompt in chunks gets all blocks with its first chunk.
            self.pool.take(blocks - q.blocks)
            q.blocks = blocks
            if q in self.waiting:
                self.waiting.remove(q)

    def _fit_until_completion(self, active: list[Request]) -> list[Request]:
        """Return the decoding requests, and the prompts up to the first whose ``max_tokens`` do not fit.

        GUARANTEED_NO_EVICT: blocks are reserved for the ``max_tokens`` of each request, so that none is paused.
        """
        fitting, left = [q for q in active if q.decoding], self.pool.free
        left -= sum(map(self._blocks_until_completion, fitting))
        # Started prompts first: by ranks other than FCFS, one might wait behind a new prompt that does not fit.
        for q in sorted(active, key=lambda q: q.blocks == 0):
            if not q.decoding:
                left -= self._blocks_until_completion(q)
                if left < 0:
                    break
                fitting.append(q)
        return fitting

    def _blocks_until_completion(self, q: Request) -> int:
        return self.limits.blocks_for(q.prompt + q.rules.max_tokens) - q.blocks

    def _pause_until_fit(self, step: Step, active: list[Request]) -> list[Request]:
        """Return the requests that fit for one step, up to the first that does not.

        MAX_UTILIZATION: for a request that does not fit, started requests are paused, the last in order first.
        """
        fitting: list[Request] = []
        left = self.pool.free
        while len(fitting) < len(active):
            q = active[len(fitting)]
            need = self.limits.blocks_for(q.context) - q.blocks
            if need <= left:
                left -= need
                fitting.append(q)
                continue
            started = [p for p in active[len(fitting) :] if p.blocks]
            if not started:
                break
            left += started[-1].blocks
            active = active[: active.index(started[-1])]
            self._preempt(step, started[-1])
        return fitting

    def _prompt_tokens(self, prompts: list[Request], budget: int) -> Iterator[int]:
        """Return how many tokens of each prompt are in the step. Prompts after the last of these numbers wait."""
        left = [q.context - q.prefilled for q in prompts]
        if self.limits.context_chunking_policy is None:
            return self._complete(left, budget)
        if sum(left) <= budget:
            return iter(left)
        if self.limits.context_chunking_policy == "EQUAL_PROGRESS":
            return self._equal_progress(left, budget)
        return self._first_come_first_served(left, budget)

    def _complete(self, left: list[int], budget: int) -> Iterator[int]:
        """Take complete prompts up to the first one above the budget.

        If a paused request has become longer than a step, it runs as the only prompt (TensorRT-LLM stops with an
        error).
        """
        for i, tokens in enumerate(left):
            if tokens > budget and (i > 0 or tokens <= self.limits.max_num_tokens):
                return
            budget -= tokens
            yield tokens

    def _first_come_first_served(self, left: list[int], budget: int) -> Iterator[int]:
        """Give each prompt the tokens that it needs or, if fewer are left in the budget, complete blocks of those."""
        unit = self.limits.tokens_per_block
        for tokens in left:
            size = tokens if tokens <= budget else budget // unit * unit
            budget -= size
            yield size

    def _equal_progress(self, left: list[int], budget: int) -> Iterator[int]:
        """Give each prompt a block in turn, until no block fits in the budget."""
        sizes, more = [0] * len(left), [1]
        while budget > 0 and any(more):
            more = []
            for i, tokens in enumerate(left):
                block = min(self.limits.tokens_per_block, tokens - sizes[i])
                if block <= budget:
                    sizes[i] += block
                    budget -= block
                    more.append(block)
        return iter(sizes)
