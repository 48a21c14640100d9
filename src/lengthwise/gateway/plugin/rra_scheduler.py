"""vLLM's own scheduler, held to the phases of an RRA schedule (ExeGPT, section 4.1)."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from lengthwise.gateway.plugin.settings import RraSettings, rra_settings_of
from lengthwise.gateway.plugin.vllm_adapter import Guarded, Rules, doubts_of_attributes, doubts_of_classes, log
from lengthwise.policy.contracts import NEW_PHASE, ONE_BY_ONE, Policy

_KEPT = 256
_STUCK_STEPS = 2


@dataclass(frozen=True, slots=True)
class Seen:
    """What there is before a step.

    Attributes:
        decodes: Sequences that decode on.
        partial: Prompts of which a part was computed.
        waiting: Requests in the queue.
        max_num_seqs: How many of them the engine's own limits let in.
    """

    decodes: int
    partial: int
    waiting: int
    max_num_seqs: int


@dataclass(slots=True)
class Phase:
    """One encoding and the decode iterations after it.

    Attributes:
        number: From 1.
        started_s: On the engine's monotonic clock.
        admitted: Requests that were encoded.
        prompt_tokens: Computed in the encoding; what a prefix cache held is not in it.
        encode_steps: The encoding took so many steps of the engine.
        encode_s: From its beginning to the first decode iteration.
        decode_steps: Iterations.
        decode_batch: Sequences in the first of them.
        decode_seqs: Sequences summed over them.
        decode_s: From the first of them to the next phase's beginning.
        requests: The engine's names of who was encoded.
    """

    number: int
    started_s: float
    admitted: int = 0
    prompt_tokens: int = 0
    encode_steps: int = 0
    encode_s: float = 0.0
    decode_steps: int = 0
    decode_batch: int = 0
    decode_seqs: int = 0
    decode_s: float = 0.0
    requests: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """As a JSON-able mapping."""
        return asdict(self)


class Rounds:
    """The phases of one engine, by the batching policy that the simulator runs.

    Ask ``admits`` before a step, tell ``encoded`` or ``decoded`` after it.

    Args:
        policy: An RRA batching.
        clock: Seconds.
        report: Called with each phase that is over.

    Attributes:
        phases: The last of those that are over.
        now: The phase that is under way.
        blocked: Two steps in a row had nothing to do.
    """

    def __init__(
        self, policy: Policy, clock: Callable[[], float], report: Callable[[Phase], None] = lambda _: None
    ) -> None:
        self._policy, self._clock, self._report = policy, clock, report
        self._own = {f"parameter_{k}": value for k, value in enumerate(policy.all_parameters)}
        self.phases: deque[Phase] = deque(maxlen=_KEPT)
        self.now: Phase | None = None
        self._encoding, self._left, self._empty, self._number = False, 0, 0, 0

    @property
    def blocked(self) -> bool:
        """Whether it had better not hold anybody back in the next step."""
        return self._empty >= _STUCK_STEPS

    def admits(self, seen: Seen, tokens: Iterable[int] = ()) -> int | None:
        """How many more may be admitted by a step that encodes; None: the step decodes.

        Args:
            seen: What there is.
            tokens: Of each who waits, in order; looked at only where batches are resized by work.
        """
        if self.blocked:  # as if nobody were there: whatever was waited for, it does not come
            self._encoding, seen = False, Seen(0, 0, seen.waiting, seen.max_num_seqs)
        if self._encoding:
            self._left = min(self._left, seen.waiting)
            if seen.partial or min(self._left, seen.max_num_seqs) > 0:
                return self._left
            self._encoding = False
        begins, count = self._client_request(seen, tokens)
        if begins and (count or seen.decodes):
            self._begin()
        if count > 0 or (seen.partial and not seen.decodes):
            self._encoding, self._left = True, count
            return count
        return None

    def encoded(self, requests: list[str], tokens: int) -> None:
        """Notes a step that encoded: who was admitted, how many tokens were computed (none: nobody can be let in)."""
        phase = self.now or self._begin()
        self._empty = 0 if tokens else self._empty + 1
        self._encoding = tokens > 0
        self._left = max(0, self._left - len(requests))
        phase.requests += requests
        phase.admitted += len(requests)
        phase.prompt_tokens += tokens
        phase.encode_steps += tokens > 0

    def decodes(self) -> None:
        """Notes, before it, that a step decodes: the first one ends the encoding."""
        phase = self.now or self._begin()
        if phase.decode_steps == 0:
            phase.encode_s = self._clock() - phase.started_s

    def decoded(self, sequences: int) -> None:
        """Notes a step that decoded."""
        phase = self.now or self._begin()
        self._empty = 0 if sequences else self._empty + 1
        if sequences:
            phase.decode_batch = phase.decode_batch or sequences
            phase.decode_steps += 1
            phase.decode_seqs += sequences

    def end(self) -> None:
        """The phase that is under way is over; one in which nothing was done is forgotten."""
        phase, self.now = self.now, None
        if phase is not None and not (phase.admitted or phase.encode_steps or phase.decode_steps):
            self._number -= 1
        elif phase is not None:
            phase.decode_s = self._clock() - phase.started_s - phase.encode_s
            self.phases.append(phase)
            self._report(phase)

    def _begin(self) -> Phase:
        self.end()
        self._number += 1
        self.now = Phase(self._number, self._clock())
        return self.now

    def _client_request(self, seen: Seen, tokens: Iterable[int]) -> tuple[bool, int]:
        """(whether a phase begins, how many may be admitted)."""
        steps = 1 + self.now.decode_steps if self.now else 0
        most, flags = self._submit(seen, steps, 0, 0, 0)
        begins = most > 0 and flags & NEW_PHASE != 0
        if not begins:
            return False, 0
        most = min(most, seen.waiting, seen.max_num_seqs)
        return True, most if flags & ONE_BY_ONE == 0 else self._one_by_one(seen, most, tokens)

    def _one_by_one(self, seen: Seen, most: int, tokens: Iterable[int]) -> int:
        """How many of those who wait the policy takes, told what each would add."""
        count = sum_tokens = 0
        for more in tokens:
            here = Seen(seen.decodes, seen.partial, seen.waiting - count, seen.max_num_seqs)
            if count >= most or self._submit(here, 0, count, sum_tokens, more)[0] <= 0:
                break
            count, sum_tokens = count + 1, sum_tokens + more
        return count

    def _submit(self, seen: Seen, steps: int, prompts: int, tokens: int, more: int) -> tuple[int, int]:
        """(admissions, flags) of the policy: one stage, nothing in flight."""
        given = {
            "decodes": seen.decodes,
            "prefills": seen.partial,
            "waiting": seen.waiting,
            "num_running": seen.decodes + seen.partial + prompts,
            "in_flight": 0,
            "stages": 1,
            "phase_steps": steps,
            "phase_rounds": max(0, steps - 1),
            "step_prompts": prompts,
            "step_tokens": tokens,
            "next_tokens": more,
        } | self._own
        admit, _, flags = self._policy.function(*(given[name] for name in self._policy.arguments))
        return int(admit), int(flags)


NEVER = 1 << 62
"""No step has this number."""


class Reserved:
    """One step's restrictions; ``release`` takes them back.

    Who rests is passed over by vLLM's own rule for decodes that are not due yet (``next_decode_eligible_step``): it
    stays in the batch, keeps its seat and its blocks, and the workers know unscheduled requests anyway.

    Args:
        scheduler: vLLM's.
        encodes: The step encodes; else it decodes.
        admit: How many may be admitted.
        paused: Who is passed over.
    """

    def __init__(self, scheduler: Any, *, encodes: bool, admit: int, paused: list[Any]) -> None:
        self.encodes = encodes
        self._max_num_seqs = scheduler.max_num_active_reqs
        self._deadline = [(request, request.next_decode_eligible_step) for request in paused]
        taken = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
        try:
            for request in paused:
                request.next_decode_eligible_step = NEVER
            scheduler.max_num_active_reqs = min(self._max_num_seqs, taken + admit)
        except BaseException:
            self.release(scheduler)  # nobody else could: whoever rests would rest for ever
            raise

    def release(self, scheduler: Any) -> None:
        """All is as it was."""
        scheduler.max_num_active_reqs = self._max_num_seqs
        for request, step in self._deadline:
            request.next_decode_eligible_step = step


class Rra:
    """What is done to one scheduler before and after a step. Any error of it is the caller's to meet.

    Args:
        settings: The schedule.
        clock: The time.

    Attributes:
        rounds: Its phases.
    """

    def __init__(self, settings: RraSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._file: TextIO | None = None
        if settings.record:
            self._file = Path(settings.record).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self.rounds = Rounds(settings.policy(), clock, self._write)

    def before(self, scheduler: Any) -> Reserved | None:
        """The step's restrictions; None: the engine is paused, and goes by its own rules."""
        if scheduler.pause_state:
            return None
        running = scheduler.running
        partial = [request for request in running if request.is_prefill_chunk]
        decodes = [request for request in running if not request.is_prefill_chunk and not _ends(request)]
        queues = scheduler.kv_holding_waiting, scheduler.waiting
        taken = len(running) + scheduler.num_waiting_for_streaming_input
        seen = Seen(len(decodes), len(partial), sum(map(len, queues)), max(0, scheduler.max_num_active_reqs - taken))
        admit = self.rounds.admits(seen, (request.num_tokens for request in itertools.chain(*queues)))
        if admit is None:
            self.rounds.decodes()
        resting = partial if admit is None else decodes
        return Reserved(
            scheduler, encodes=admit is not None, admit=admit or 0, paused=[] if self.rounds.blocked else resting
        )

    def after(self, reserved: Reserved, report: Any) -> None:
        """Notes what the step did."""
        if reserved.encodes:
            admitted = [new.req_id for new in report.scheduled_new_reqs]
            admitted += sorted(report.scheduled_cached_reqs.resumed_req_ids)
            self.rounds.encoded(admitted, report.total_num_scheduled_tokens)
        else:
            self.rounds.decoded(len(report.num_scheduled_tokens))

    def rested(self, scheduler: Any) -> None:
        """Ends the phase if nobody is left."""
        if not (scheduler.running or scheduler.waiting or scheduler.kv_holding_waiting):
            self.rounds.end()

    def close(self) -> None:
        """Writes the last phase."""
        self.rounds.end()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, phase: Phase) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(phase.row()) + "\n")
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
            log.warning("lengthwise: phases are not recorded any more: %s", error)


def _ends(request: Any) -> bool:
    """Whether its last token is being computed already (asynchronous scheduling): it is not scheduled again."""
    ahead: int = request.num_output_placeholders
    return ahead > 0 and request.num_computed_tokens + 2 - ahead >= request.num_prompt_tokens + request.max_tokens


class Phased(Guarded):
    """Goes before vLLM's own scheduler class. At the first error it gives up for good: stock steps from then on."""

    lengthwise: Rra | None = None
    _given_up = "holding to phases failed; from now on this engine keeps its own schedule"

    def schedule(self, *args: Any, **named: Any) -> Any:
        """A step that encodes, or one that decodes."""
        held: Reserved | None = self._lengthwise(lambda rra: rra.before(self))
        if held is None:
            return super().schedule(*args, **named)  # type: ignore[misc]
        try:
            told = super().schedule(*args, **named)  # type: ignore[misc]
        finally:
            held.release(self)
        self._lengthwise(lambda rra: rra.after(held, told))
        return told

    def update_from_output(self, *args: Any, **named: Any) -> Any:
        """What a step yields; when nobody is left, the phase is over."""
        outputs = super().update_from_output(*args, **named)  # type: ignore[misc]
        self._lengthwise(lambda rra: rra.rested(self))
        return outputs

    def shutdown(self, *args: Any, **named: Any) -> None:
        """Ends, and what was recorded is whole."""
        super().shutdown(*args, **named)  # type: ignore[misc]
        self._lengthwise(lambda rra: rra.close())


METHODS: dict[str, tuple[str, ...]] = {"schedule": (), "update_from_output": (), "shutdown": ()}
ATTRIBUTES = {
    "running": list,
    "max_num_active_reqs": int,
    "num_waiting_for_streaming_input": int,
    "waiting": object,
    "kv_holding_waiting": object,
    "current_step": int,
    "pause_state": int,
}
REQUEST = frozenset(
    {"num_prompt_tokens", "max_tokens", "num_computed_tokens", "num_output_placeholders"}
    | {"is_prefill_chunk", "next_decode_eligible_step"}
)
_DUE = "next_decode_eligible_step"


class RraScheduler:
    """Makes the scheduler that vLLM would make itself, held to phases.

    A phase encodes ``encode_batch`` requests (whole prompts, over as many steps as the step's tokens make it, while
    decodes rest), then decodes ``decode_steps`` times and lets nobody in. When nobody decodes the next phase begins at
    once. Where anything is in doubt it is vLLM's own scheduler and nothing else, and the log says why.
    """

    def __new__(cls, *args: Any, **named: Any) -> Any:
        """A scheduler."""
        return _PHASED.made(cls.__name__, args, named)


def _warnings(stock: type, config: Any) -> Iterator[str]:
    """Of engines whose steps are no phases, or of which vLLM does not pass decodes over."""
    yield from doubts_of_classes(stock, import_module("vllm.v1.request").Request, METHODS, REQUEST)
    schedule = getattr(getattr(stock, "schedule", None), "__code__", None)
    if schedule is None or not {_DUE, "max_num_active_reqs"} <= set(schedule.co_names):
        yield "its schedule() does not look at when a decode is due and how many may run"
    parallel = config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        yield "pipeline stages have several batches under way; phases are of one"
    if parallel.data_parallel_size > 1:
        yield "data-parallel ranks wait for each other; run an engine each"
    for name, what in (
        ("speculative_config", "speculation makes several tokens a step"),
        ("kv_transfer_config", "a KV connector admits on its own"),
    ):
        if getattr(config, name) is not None:
            yield what
    if config.model_config.runner_type != "generate":
        yield "it does not decode"
    if config.model_config.is_encoder_decoder:
        yield "an encoder-decoder's prompts are computed otherwise"


def _doubts_made(scheduler: Any) -> Iterator[str]:
    yield from doubts_of_attributes(scheduler, ATTRIBUTES)


def _says(settings: RraSettings) -> str:
    return f"holds this engine to {settings.policy().name}"


_PHASED = Rules(Phased, rra_settings_of, _warnings, _doubts_made, Rra, _says, "schedule")
