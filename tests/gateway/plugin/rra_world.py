"""An engine's scheduler as far as phases touch it: chunked prompts, a budget of tokens, a cache of so many tokens.

It goes by vLLM's rules of --scheduling-policy fcfs, and the model's token is its position, so that a token lost or
done twice shows.
"""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any


class Request:
    """With the attributes of vLLM's that are read or set."""

    def __init__(self, request_id: str, prompt: int = 8, max_tokens: int = 10) -> None:
        self.request_id, self.num_prompt_tokens, self.max_tokens = request_id, prompt, max_tokens
        self.num_computed_tokens = self.num_output_placeholders = self.next_decode_eligible_step = 0
        self.num_preemptions, self.is_prefill_chunk = 0, False
        self.output: list[int] = []

    @property
    def num_output_tokens(self) -> int:
        return len(self.output)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output)

    def __repr__(self) -> str:
        return self.request_id


class Engine:
    """Without a connector, without pipelines.

    Attributes:
        log: [(prompts worked on, decodes)] of the steps that did anything.
    """

    def __init__(
        self, max_num_seqs: int = 64, budget: int = 1 << 20, cache_tokens: int = 1 << 20, vllm_config: Any = None
    ) -> None:
        self.vllm_config, self.budget, self.cache_tokens = vllm_config, budget, cache_tokens
        self.waiting, self.kv_holding_waiting = deque(), deque()
        self.running, self.requests = [], {}
        self.max_num_active_reqs, self.num_waiting_for_streaming_input = max_num_seqs, 0
        self.pause_state = self.current_step = 0
        self.closed = False
        self.finished: list[str] = []
        self.log: list[tuple[int, int]] = []

    @property
    def used(self) -> int:
        return sum(one.num_computed_tokens for one in self.running)

    def add_request(self, request: Request) -> None:
        self.waiting.append(request)
        self.requests[request.request_id] = request

    def schedule(self, throttle_prefills: bool = False) -> SimpleNamespace:
        self.current_step += 1
        budget, reported, new, resumed, gone = self.budget, {}, [], set(), False
        for one in list(self.running):
            if one not in self.running or self.current_step < one.next_decode_eligible_step or budget <= 0:
                continue
            tokens = min(one.num_tokens - one.num_computed_tokens, budget)
            while one in self.running and self.used + sum(reported.values()) + tokens > self.cache_tokens:
                gone = True
                self.preempt(self.running.pop())
            if one in self.running:
                reported[one.request_id] = tokens
                budget -= tokens
        while self.waiting and not gone and budget > 0 and len(self.running) < self.max_num_active_reqs:
            one = self.waiting[0]
            if self.used + sum(reported.values()) + one.num_tokens > self.cache_tokens:
                break
            self.running.append(self.waiting.popleft())
            reported[one.request_id] = min(one.num_tokens, budget)
            budget -= reported[one.request_id]
            if one.num_preemptions:
                resumed.add(one.request_id)
            else:
                new.append(SimpleNamespace(req_id=one.request_id))
        reads = sum(self.requests[name].num_computed_tokens < self._prefill(name) for name in reported)
        if reported:
            self.log.append((reads, len(reported) - reads))
        for name, tokens in reported.items():
            one = self.requests[name]
            one.num_computed_tokens += tokens
            one.is_prefill_chunk = one.num_computed_tokens < one.num_tokens
        return SimpleNamespace(
            num_scheduled_tokens=reported,
            total_num_scheduled_tokens=sum(reported.values()),
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=resumed),
        )

    def _prefill(self, name: str) -> int:
        """Computed tokens below which it still reads: its prompt, or all it had when it was preempted."""
        one = self.requests[name]
        return max(one.num_prompt_tokens, one.num_tokens - 1)

    def preempt(self, one: Request) -> None:
        one.num_computed_tokens = 0
        one.is_prefill_chunk = False
        one.num_preemptions += 1
        self.waiting.appendleft(one)

    def update_from_output(self, report: SimpleNamespace, output: Any = None) -> None:
        for name in report.num_scheduled_tokens:
            one = self.requests.get(name)
            if one is None or one.is_prefill_chunk or one not in self.running:
                continue
            one.output.append(len(one.output))
            if len(one.output) >= one.max_tokens:
                self.running.remove(one)
                self.finished.append(name)
                del self.requests[name]

    def finish_requests(self, name: str) -> None:
        one = self.requests.pop(name)
        (self.running if one in self.running else self.waiting).remove(one)

    def shutdown(self) -> None:
        self.closed = True

    def step(self) -> None:
        self.update_from_output(self.schedule())

    def run(self, steps: int = 20_000) -> list[str]:
        """Until all are over; who ended in which order."""
        for _ in range(steps):
            if not self.requests:
                break
            self.step()
        return self.finished


class Clock:
    """Each look takes a second."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s
