"""Restrict vLLM's own scheduler to the phases of an RRA schedule (ExeGPT, section 4.1)."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from lengthwise.gateway.plugin import vllm_adapter
from lengthwise.gateway.plugin.settings import RraSettings, rra_settings_of
from lengthwise.policy.contracts import NEW_PHASE, ONE_BY_ONE, Policy

_MAX_PHASES = 256
_BLOCKED_STEPS = 2


@dataclass(frozen=True, slots=True)
class EngineState:
    """State of an engine before a step, in numbers of requests."""

    decodes: int  # decoding
    partial: int  # running, with a partly computed prompt
    waiting: int
    free_seqs: int  # further requests that may run


@dataclass(slots=True)
class Phase:
    """A prefill phase and the decode iterations after it. ``started_s`` is on the engine's monotonic clock.

    ``prompt_tokens`` excludes tokens in the prefix cache. ``prefill_s`` lasts until the first decode iteration, which
    has ``decode_batch`` sequences. ``decode_seqs`` is the sum of sequences over all decode iterations.
    """

    number: int
    started_s: float
    admitted: int = 0
    prompt_tokens: int = 0
    prefill_steps: int = 0
    prefill_s: float = 0.0
    decode_steps: int = 0
    decode_batch: int = 0
    decode_seqs: int = 0
    decode_s: float = 0.0
    requests: list[str] = field(default_factory=list)


class PhaseTracker:
    """Decides by the simulator's RRA policy whether an engine's next step prefills or decodes.

    Call ``admits`` before each step, and ``prefilled`` or ``decoded`` after it.
    """

    def __init__(
        self, policy: Policy, clock: Callable[[], float], on_phase: Callable[[Phase], None] = lambda _: None
    ) -> None:
        self._policy, self._clock, self._on_phase = policy, clock, on_phase
        self._parameters = {f"parameter_{k}": value for k, value in enumerate(policy.all_parameters)}
        self.phases: deque[Phase] = deque(maxlen=_MAX_PHASES)
        self.current: Phase | None = None
        self._is_prefilling, self._remaining, self._empty_steps, self._number = False, 0, 0, 0

    @property
    def blocked(self) -> bool:
        """Whether the last two steps computed nothing, so that the next one must not be restricted."""
        return self._empty_steps >= _BLOCKED_STEPS

    def admits(self, state: EngineState, tokens: Iterable[int] = ()) -> int | None:
        """Return how many waiting requests the next step may admit as a prefill, or None if it decodes.

        ``tokens`` are the numbers of tokens of the waiting requests, in their order.
        """
        if self.blocked:  # continue as if no request ran, otherwise the phase would never end
            self._is_prefilling, state = False, replace(state, decodes=0, partial=0)
        if self._is_prefilling:
            self._remaining = min(self._remaining, state.waiting)
            if state.partial or min(self._remaining, state.free_seqs) > 0:
                return self._remaining
            self._is_prefilling = False
        starts, count = self._new_phase(state, tokens)
        if starts and (count or state.decodes):
            self._start()
        if count == 0 and (state.decodes or not state.partial):
            phase = self.current or self._start()
            if phase.decode_steps == 0:  # the first decode step ends the prefill phase
                phase.prefill_s = self._clock() - phase.started_s
            return None
        self._is_prefilling, self._remaining = True, count
        return count

    def prefilled(self, requests: list[str], tokens: int) -> None:
        """Record a prefill step: ids of the admitted requests, and computed tokens (0 if none can be admitted)."""
        phase = self.current or self._start()
        self._empty_steps = 0 if tokens else self._empty_steps + 1
        self._is_prefilling = tokens > 0
        self._remaining = max(0, self._remaining - len(requests))
        phase.requests += requests
        phase.admitted += len(requests)
        phase.prompt_tokens += tokens
        phase.prefill_steps += tokens > 0

    def decoded(self, sequences: int) -> None:
        """Record a decode step of ``sequences`` sequences."""
        phase = self.current or self._start()
        self._empty_steps = 0 if sequences else self._empty_steps + 1
        if sequences:
            phase.decode_batch = phase.decode_batch or sequences
            phase.decode_steps += 1
            phase.decode_seqs += sequences

    def end(self) -> None:
        """End the current phase, and report it unless it is empty."""
        phase, self.current = self.current, None
        if phase is not None and not (phase.admitted or phase.prefill_steps or phase.decode_steps):
            self._number -= 1
        elif phase is not None:
            phase.decode_s = self._clock() - phase.started_s - phase.prefill_s
            self.phases.append(phase)
            self._on_phase(phase)

    def _start(self) -> Phase:
        self.end()
        self._number += 1
        self.current = Phase(self._number, self._clock())
        return self.current

    def _new_phase(self, state: EngineState, tokens: Iterable[int]) -> tuple[bool, int]:
        """Return whether the policy starts a phase, and how many requests it admits."""
        steps = 1 + self.current.decode_steps if self.current else 0
        limit, flags = self._call_policy(state, steps, 0, 0, 0)
        if limit <= 0 or not flags & NEW_PHASE:
            return False, 0
        limit = min(limit, state.waiting, state.free_seqs)
        if not flags & ONE_BY_ONE:
            return True, limit
        count = sum_tokens = 0
        for next_tokens in tokens:
            left = replace(state, waiting=state.waiting - count)
            if count >= limit or self._call_policy(left, 0, count, sum_tokens, next_tokens)[0] <= 0:
                break
            count, sum_tokens = count + 1, sum_tokens + next_tokens
        return True, count

    def _call_policy(
        self, state: EngineState, steps: int, prompts: int, tokens: int, next_tokens: int
    ) -> tuple[int, int]:
        """Return the policy's (admissions, flags) for one pipeline stage with no step in flight."""
        running = state.decodes + state.partial + prompts
        engine = {"decodes": state.decodes, "prefills": state.partial}
        engine |= {"num_running": running, "num_waiting": state.waiting}
        phase = {"phase_steps": steps, "phase_rounds": max(0, steps - 1), "in_flight": 0, "stages": 1}
        step = {"step_prompts": prompts, "step_tokens": tokens, "next_tokens": next_tokens}
        given = self._parameters | engine | phase | step
        admit, _, flags = self._policy.function(*(given[name] for name in self._policy.arguments))
        return int(admit), int(flags)


NEVER = 1 << 62  # a step number that no engine reaches


class StepRestriction:
    """Restricts one step of vLLM's scheduler: the step admits at most ``admit`` requests, and skips ``paused`` ones."""

    def __init__(self, scheduler: Any, *, is_prefill: bool, admit: int, paused: list[Any]) -> None:
        self.is_prefill = is_prefill
        self._max_num_seqs = scheduler.max_num_active_reqs
        self._eligible_steps = [(request, request.next_decode_eligible_step) for request in paused]
        taken = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
        try:
            for request in paused:
                request.next_decode_eligible_step = NEVER
            scheduler.max_num_active_reqs = min(self._max_num_seqs, taken + admit)
        except BaseException:
            self.release(scheduler)  # the caller has no object to release; paused requests would stay paused
            raise

    def release(self, scheduler: Any) -> None:
        """Remove the restrictions, so that later steps are not affected."""
        scheduler.max_num_active_reqs = self._max_num_seqs
        for request, step in self._eligible_steps:
            request.next_decode_eligible_step = step


class PhaseHooks:
    """Hooks that restrict each step of a scheduler to its phase. The scheduler handles their errors."""

    def __init__(self, settings: RraSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._file: TextIO | None = None
        if settings.record:
            self._file = Path(settings.record).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self.tracker = PhaseTracker(settings.policy(), clock, self._write)

    def before(self, scheduler: Any) -> StepRestriction | None:
        """Restrict the step, and return the restriction, or None while the engine is paused and runs unrestricted."""
        if scheduler.pause_state:
            return None
        running = scheduler.running
        partial = [request for request in running if request.is_prefill_chunk]
        decodes = [request for request in running if not request.is_prefill_chunk and not _is_last_token(request)]
        queues = scheduler.kv_holding_waiting, scheduler.waiting
        available = scheduler.max_num_active_reqs - len(running) - scheduler.num_waiting_for_streaming_input
        state = EngineState(len(decodes), len(partial), sum(map(len, queues)), max(0, available))
        admit = self.tracker.admits(state, (request.num_tokens for request in itertools.chain(*queues)))
        paused = [] if self.tracker.blocked else partial if admit is None else decodes
        return StepRestriction(scheduler, is_prefill=admit is not None, admit=admit or 0, paused=paused)

    def after(self, restriction: StepRestriction, output: Any) -> None:
        """Record the step."""
        if restriction.is_prefill:
            admitted = [new.req_id for new in output.scheduled_new_reqs]
            admitted += sorted(output.scheduled_cached_reqs.resumed_req_ids)
            self.tracker.prefilled(admitted, output.total_num_scheduled_tokens)
        else:
            self.tracker.decoded(len(output.num_scheduled_tokens))

    def on_output(self, scheduler: Any) -> None:
        """End the phase if no request is left."""
        if not (scheduler.running or scheduler.waiting or scheduler.kv_holding_waiting):
            self.tracker.end()

    def close(self) -> None:
        """Write the last phase and close the file."""
        self.tracker.end()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, phase: Phase) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(asdict(phase)) + "\n")
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
            vllm_adapter.log.warning("lengthwise: phases are no longer recorded: %s", error)


def _is_last_token(request: Any) -> bool:
    """Return whether the request's last token is already being computed (asynchronous scheduling)."""
    ahead: int = request.num_output_placeholders
    return ahead > 0 and request.num_computed_tokens + 2 - ahead >= request.num_prompt_tokens + request.max_tokens


class PhasedScheduler(vllm_adapter.GuardedScheduler):
    """Mixin that separates the prefill and decode phases of vLLM's scheduler."""

    lengthwise: PhaseHooks | None = None
    _failure_message = "restricting it to phases failed; from now on this engine keeps its own schedule"

    def schedule(self, *args: Any, **keywords: Any) -> Any:
        """Run a step that either prefills or decodes."""
        restriction: StepRestriction | None = self._guarded(lambda hooks: hooks.before(self))
        if restriction is None:
            return super().schedule(*args, **keywords)  # type: ignore[misc]
        try:
            output = super().schedule(*args, **keywords)  # type: ignore[misc]
        finally:
            restriction.release(self)
        self._guarded(lambda hooks: hooks.after(restriction, output))
        return output

    def update_from_output(self, *args: Any, **keywords: Any) -> Any:
        """Process a step's output. If no request is left, the phase ends."""
        outputs = super().update_from_output(*args, **keywords)  # type: ignore[misc]
        self._guarded(lambda hooks: hooks.on_output(self))
        return outputs

    def shutdown(self, *args: Any, **keywords: Any) -> None:
        """Shut down, and complete the record of phases."""
        super().shutdown(*args, **keywords)  # type: ignore[misc]
        self._guarded(lambda hooks: hooks.close())


METHODS: dict[str, tuple[str, ...]] = {"schedule": (), "update_from_output": (), "shutdown": ()}
ATTRIBUTES = {
    "running": list, "max_num_active_reqs": int, "num_waiting_for_streaming_input": int, "waiting": object,
    "kv_holding_waiting": object, "current_step": int, "pause_state": int,
}  # fmt: skip
REQUEST = frozenset(
    {"num_prompt_tokens", "max_tokens", "num_computed_tokens", "num_output_placeholders"}
    | {"is_prefill_chunk", "next_decode_eligible_step"}
)


class RraScheduler:
    """Creates a scheduler of vLLM that separates prefill phases from decode phases.

    If vLLM's version is untested, or its scheduler is not as expected, its own schedule stays, with a warning.
    """

    def __new__(cls, *args: Any, **keywords: Any) -> Any:
        """Return the scheduler."""
        return _PLUGIN.create(cls.__name__, args, keywords)


def _class_warnings(base: type, config: Any) -> Iterator[str]:
    """Yield the reasons for which an engine's steps cannot be separated into prefill phases and decode phases."""
    yield from vllm_adapter.class_warnings(base, import_module("vllm.v1.request").Request, METHODS, REQUEST)
    code = getattr(getattr(base, "schedule", None), "__code__", None)
    if code is None or not {"next_decode_eligible_step", "max_num_active_reqs"} <= set(code.co_names):
        yield "its schedule() does not check when a decode is due and how many requests may run"
    parallel, model = config.parallel_config, config.model_config
    obstacles = {
        "pipeline stages run several batches at once; a phase has one": parallel.pipeline_parallel_size > 1,
        "data-parallel ranks wait for each other; run one engine each": parallel.data_parallel_size > 1,
        "speculation generates several tokens per step": config.speculative_config is not None,
        "a KV connector admits requests by itself": config.kv_transfer_config is not None,
        "it does not decode": model.runner_type != "generate",
        "an encoder-decoder computes prompts differently": model.is_encoder_decoder,
    }
    yield from (warning for warning, applies in obstacles.items() if applies)


_PLUGIN = vllm_adapter.SchedulerPlugin(
    PhasedScheduler,
    rra_settings_of,
    _class_warnings,
    lambda scheduler: vllm_adapter.attribute_warnings(scheduler, ATTRIBUTES),
    PhaseHooks,
    lambda settings: f"restricts this engine to {settings.policy().name}",
    "schedule",
)
