"""When a phase of encoding begins and how many it takes, when decoding goes on: no vLLM in here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

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
        seats: How many of them the engine's own limits let in.
    """

    decodes: int
    partial: int
    waiting: int
    seats: int


@dataclass(slots=True)
class Phase:
    """One encoding and the decode iterations after it.

    Attributes:
        number: From 1.
        began_s: On the engine's monotonic clock.
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
    began_s: float
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
        told: Called with each phase that is over.

    Attributes:
        phases: The last of those that are over.
        now: The phase that is under way.
        stuck: Two steps in a row had nothing to do.
    """

    def __init__(
        self, policy: Policy, clock: Callable[[], float], told: Callable[[Phase], None] = lambda _: None
    ) -> None:
        self._policy, self._clock, self._told = policy, clock, told
        self._own = {f"parameter_{k}": value for k, value in enumerate(policy.all_parameters)}
        self.phases: deque[Phase] = deque(maxlen=_KEPT)
        self.now: Phase | None = None
        self._encoding, self._left, self._empty, self._number = False, 0, 0, 0

    @property
    def stuck(self) -> bool:
        """Whether it had better not hold anybody back in the next step."""
        return self._empty >= _STUCK_STEPS

    def admits(self, seen: Seen, tokens: Iterable[int] = ()) -> int | None:
        """How many more may be admitted by a step that encodes; None: the step decodes.

        Args:
            seen: What there is.
            tokens: Of each who waits, in order; looked at only where batches are resized by work.
        """
        if self.stuck:  # as if nobody were there: whatever was waited for, it does not come
            self._encoding, seen = False, Seen(0, 0, seen.waiting, seen.seats)
        if self._encoding:
            self._left = min(self._left, seen.waiting)
            if seen.partial or min(self._left, seen.seats) > 0:
                return self._left
            self._encoding = False
        begins, count = self._asked(seen, tokens)
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
            phase.encode_s = self._clock() - phase.began_s

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
            phase.decode_s = self._clock() - phase.began_s - phase.encode_s
            self.phases.append(phase)
            self._told(phase)

    def _begin(self) -> Phase:
        self.end()
        self._number += 1
        self.now = Phase(self._number, self._clock())
        return self.now

    def _asked(self, seen: Seen, tokens: Iterable[int]) -> tuple[bool, int]:
        """(whether a phase begins, how many may be admitted)."""
        steps = 1 + self.now.decode_steps if self.now else 0
        most, flags = self._ask(seen, steps, 0, 0, 0)
        begins = most > 0 and flags & NEW_PHASE != 0
        if not begins:
            return False, 0
        most = min(most, seen.waiting, seen.seats)
        return True, most if flags & ONE_BY_ONE == 0 else self._one_by_one(seen, most, tokens)

    def _one_by_one(self, seen: Seen, most: int, tokens: Iterable[int]) -> int:
        """How many of those who wait the policy takes, told what each would add."""
        count = sum_tokens = 0
        for more in tokens:
            here = Seen(seen.decodes, seen.partial, seen.waiting - count, seen.seats)
            if count >= most or self._ask(here, 0, count, sum_tokens, more)[0] <= 0:
                break
            count, sum_tokens = count + 1, sum_tokens + more
        return count

    def _ask(self, seen: Seen, steps: int, prompts: int, tokens: int, more: int) -> tuple[int, int]:
        """(admissions, flags) of the policy: one stage, nothing in flight."""
        given = {
            "decodes": seen.decodes,
            "prefills": seen.partial,
            "waiting": seen.waiting,
            "resident": seen.decodes + seen.partial + prompts,
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
