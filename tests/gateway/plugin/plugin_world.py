"""An engine's scheduler as far as the plug-in touches it: slots, a deque, a batch; no memory, no model."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any


class Request:
    """With the attributes of vLLM's."""

    def __init__(
        self, request_id: str, prompt: int = 8, max_tokens: int = 4096, report: dict[str, Any] | None = None
    ) -> None:
        self.request_id, self.num_prompt_tokens, self.max_tokens = request_id, prompt, max_tokens
        self.sampling_params = SimpleNamespace(extra_args=report)
        self.status = SimpleNamespace(name="WAITING")
        self.num_computed_tokens = self.num_preemptions = 0
        self.is_prefill_chunk = False
        self.length = 0
        self.output: list[int] = []

    @property
    def num_output_tokens(self) -> int:
        return len(self.output)

    def __repr__(self) -> str:
        return self.request_id


def request(name: str, predicted: Any = None, length: int = 10, **more: Any) -> Request:
    reported = {key: more.pop(key) for key in list(more) if key.startswith("lengthwise_")}
    if predicted is not None:
        reported["lengthwise_predicted"] = predicted
    made = Request(name, report=reported or None, **more)
    made.length = length
    return made


class Queue(deque):
    """As vLLM's own of --scheduling-policy fcfs."""

    def remove_request(self, one: Request) -> None:
        self.remove(one)

    def prepend_request(self, one: Request) -> None:
        self.appendleft(one)


class Scheduler:
    """Admits from the front while there are slots; each step gives every running request a token."""

    def __init__(self, max_num_seqs: int = 1, vllm_config: Any = None) -> None:
        self.vllm_config = vllm_config
        self.waiting, self.running, self.requests = Queue(), [], {}
        self.max_num_active_reqs, self.num_waiting_for_streaming_input = max_num_seqs, 0
        self.kv_holding_waiting, self.pause_state = Queue(), 0
        self.connector = self.ec_connector = None
        self.block_size, self.cache_config = 16, SimpleNamespace(num_gpu_blocks=1 << 20)
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[None])
        self.kv_used, self.blocks = 0.0, 1 << 20
        self.finished: list[str] = []
        self.readmitted_at_once = 0
        self._left: set[str] = set()

    def add_request(self, request: Request) -> None:
        self.waiting.append(request)
        self.requests[request.request_id] = request

    def schedule(self, throttle_prefills: bool = False) -> list[str]:
        while self.waiting and len(self.running) < min(self.max_num_active_reqs, self.blocks):
            one = self.waiting.popleft()
            self.readmitted_at_once += one.request_id in self._left
            one.status.name, one.num_computed_tokens = "RUNNING", one.num_prompt_tokens
            self.running.append(one)
        self._left.clear()
        return [one.request_id for one in self.running]

    def tokens(self) -> None:
        for one in list(self.running):
            one.output.append(7)
            if len(one.output) >= one.length:
                self.running.remove(one)
                self.finished.append(one.request_id)
                del self.requests[one.request_id]

    def finish_requests(self, request_ids: str, finished_status: Any) -> None:
        one = self.requests.pop(request_ids)
        (self.running if one in self.running else self.waiting).remove(one)

    def get_kv_cache_usage(self) -> float:
        return self.kv_used

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        request.status.name, request.num_computed_tokens = "PREEMPTED", 0
        request.num_preemptions += 1
        self._left.add(request.request_id)
        self.waiting.appendleft(request)

    def _request_blocks_can_be_freed(self, request: Request) -> bool:
        return True

    def run(self, steps: int = 10_000) -> list[str]:
        """Until all are over; who ended in which order."""
        for _ in range(steps):
            if not self.requests:
                break
            self.update_from_output(self.schedule(), None)
        return self.finished

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> None:
        self.tokens()


class Output(list):
    """The requests of a step, with vLLM's record of their tokens."""

    def __init__(self, names: Any) -> None:
        super().__init__(names)
        self.num_scheduled_tokens: dict[str, int] = {}


class PagedScheduler(Scheduler):
    """With blocks, as vLLM's: a prompt is admitted if it fits; where blocks run out, the last one is preempted.

    A step computes ``prompt_budget`` tokens of prompts, so that long ones decode later than they are admitted.
    """

    def __init__(
        self, max_num_seqs: int = 1, num_blocks: int = 9, block_size: int = 4, prompt_budget: int = 1 << 20
    ) -> None:
        super().__init__(max_num_seqs)
        self.block_size, self.cache_config.num_gpu_blocks = block_size, num_blocks
        self.prompt_budget = prompt_budget
        self.admissions = self.preemptions = 0

    def blocks_of(self, one: Request) -> int:
        return -(-(one.num_prompt_tokens + one.num_output_tokens) // self.block_size)

    @property
    def free_blocks(self) -> int:
        return self.cache_config.num_gpu_blocks - 1 - sum(map(self.blocks_of, self.running))

    def schedule(self, throttle_prefills: bool = False) -> list[str]:
        before = len(self.running)
        while self.free_blocks < 0:
            victim = self.running.pop()
            self.preemptions += 1
            self._preempt_request(victim, 0.0)
        if len(self.running) == before:  # no admission after a preemption
            while self.waiting and len(self.running) < self.max_num_active_reqs:
                one = self.waiting[0]
                if self.blocks_of(one) > self.free_blocks:
                    break
                self.waiting.popleft()
                self.admissions += 1
                one.status.name = "RUNNING"
                self.running.append(one)
        output, left = Output(one.request_id for one in self.running), self.prompt_budget
        for one in self.running:
            need = one.num_prompt_tokens + one.num_output_tokens - one.num_computed_tokens
            is_decode = need == 1 and one.num_output_tokens > 0
            chunk = 1 if is_decode else min(left, need)
            left -= 0 if is_decode else chunk
            one.num_computed_tokens += chunk
            output.num_scheduled_tokens[one.request_id] = chunk
        return output

    def tokens(self) -> None:
        decoding = [one for one in self.running if one.num_computed_tokens == self.context(one)]
        prompts = [one for one in self.running if one not in decoding]
        self.running = decoding
        super().tokens()
        self.running += prompts

    def context(self, one: Request) -> int:
        return one.num_prompt_tokens + one.num_output_tokens


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s
