"""vLLM's scheduler held to phases: some steps only encode, the others only decode."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from lengthwise.gateway.plugin.guard import Guarded, log
from lengthwise.gateway.plugin.rounds import Phase, Rounds, Seen
from lengthwise.gateway.plugin.rra_settings import RraSettings

NEVER = 1 << 62
"""No step has this number."""


class Held:
    """One step's restrictions; ``release`` takes them back.

    Who rests is passed over by vLLM's own rule for decodes that are not due yet (``next_decode_eligible_step``): it
    stays in the batch, keeps its seat and its blocks, and the workers know unscheduled requests anyway.

    Args:
        scheduler: vLLM's.
        encodes: The step encodes; else it decodes.
        admit: How many may be admitted.
        resting: Who is passed over.
    """

    def __init__(self, scheduler: Any, *, encodes: bool, admit: int, resting: list[Any]) -> None:
        self.encodes = encodes
        self._seats = scheduler.max_num_active_reqs
        self._due = [(request, request.next_decode_eligible_step) for request in resting]
        taken = len(scheduler.running) + scheduler.num_waiting_for_streaming_input
        try:
            for request in resting:
                request.next_decode_eligible_step = NEVER
            scheduler.max_num_active_reqs = min(self._seats, taken + admit)
        except BaseException:
            self.release(scheduler)  # nobody else could: whoever rests would rest for ever
            raise

    def release(self, scheduler: Any) -> None:
        """All is as it was."""
        scheduler.max_num_active_reqs = self._seats
        for request, step in self._due:
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

    def before(self, scheduler: Any) -> Held | None:
        """The step's restrictions; None: the engine is paused, and goes by its own rules."""
        if scheduler.pause_state:
            return None
        running = scheduler.running
        partial = [request for request in running if request.is_prefill_chunk]
        decodes = [request for request in running if not request.is_prefill_chunk and not _ends(request)]
        queues = scheduler.kv_holding_waiting, scheduler.waiting
        taken = len(running) + scheduler.num_waiting_for_streaming_input
        seen = Seen(
            len(decodes), len(partial), sum(map(len, queues)), max(0, scheduler.max_num_active_reqs - taken)
        )
        admit = self.rounds.admits(seen, (request.num_tokens for request in itertools.chain(*queues)))
        if admit is None:
            self.rounds.decodes()
        resting = partial if admit is None else decodes
        return Held(
            scheduler,
            encodes=admit is not None,
            admit=admit or 0,
            resting=[] if self.rounds.stuck else resting,
        )

    def after(self, held: Held, told: Any) -> None:
        """Notes what the step did."""
        if held.encodes:
            admitted = [new.req_id for new in told.scheduled_new_reqs]
            admitted += sorted(told.scheduled_cached_reqs.resumed_req_ids)
            self.rounds.encoded(admitted, told.total_num_scheduled_tokens)
        else:
            self.rounds.decoded(len(told.num_scheduled_tokens))

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
    return (
        ahead > 0
        and request.num_computed_tokens + 2 - ahead >= request.num_prompt_tokens + request.max_tokens
    )


class Phased(Guarded):
    """Goes before vLLM's own scheduler class. At the first error it gives up for good: stock steps from then on."""

    lengthwise: Rra | None = None
    _given_up = "holding to phases failed; from now on this engine keeps its own schedule"

    def schedule(self, *args: Any, **named: Any) -> Any:
        """A step that encodes, or one that decodes."""
        held: Held | None = self._lengthwise(lambda rra: rra.before(self))
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
