"""Continuous batching in virtual time: a replica's sequences, moved from one change to the next."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lengthwise.engine.step_time import StepTime


@dataclass(frozen=True)
class Limits:
    """What a batch may hold.

    Attributes:
        seqs: Sequences at once.
        step_tokens: Tokens of a step.
        kv_tokens: In memory.
        block_tokens: Of a block of it; half a block a sequence is lost on average.
        spare: Share of the memory that is left free when a sequence is let in.
    """

    seqs: int
    step_tokens: int
    kv_tokens: int
    block_tokens: int = 1
    spare: float = 0.0


@dataclass(eq=False, slots=True)
class Sequence:
    """One answer.

    Attributes:
        prompt: Tokens that are read first, those of an answer that goes on included.
        need: Tokens that are still to be written.
        done: Called at the end.
        joined: The step in which it was read; -1 while it waits.
        left: Whether it was called off.
        had: Tokens that were written before it had to make room; it reads them again.
    """

    prompt: int
    need: int
    done: Callable[[], None]
    joined: int = -1
    left: bool = False
    had: int = 0


class Batch:
    """Steps of prompts and decodes, as an engine forms them that does all prompts of a step whole.

    A sequence is let in where its prompt has room. When memory is full, who was let in last makes room and is the next
    to be let in. Decode steps between two changes are taken together, at the mean of their costs.

    Args:
        limits: Of the batch.
        cost: Seconds of a step.
    """

    def __init__(self, limits: Limits, cost: StepTime) -> None:
        self._limits, self._cost = limits, cost
        self._waiting: deque[Sequence] = deque()
        self._ends: list[tuple[int, int, Sequence]] = []
        self._steps = self._kv = self._running = self._order = 0
        self._from_s = self._until_s = 0.0
        self._jump = 0
        self._joining: list[Sequence] = []

    @property
    def next_s(self) -> float:
        """When something changes; infinity: nothing is to be done."""
        return self._until_s if self._jump else math.inf

    @property
    def idle(self) -> bool:
        """Whether no step is under way."""
        return not self._jump

    def written(self, one: Sequence, now_s: float) -> int:
        """Tokens that a sequence has by now."""
        if one.joined < 0:
            return one.had
        return min(one.need, one.had + self._steps + self._passed(now_s) - one.joined)

    def add(self, one: Sequence, now_s: float) -> None:
        """Lets a sequence wait; a jump ends at the next step, so that it may join."""
        self._waiting.append(one)
        if self._jump > 1:
            self._cut(now_s)

    def remove(self, one: Sequence, now_s: float) -> None:
        """Takes out a sequence that was called off; it leaves with the step that is under way."""
        one.left = True
        if one.joined < 0 and one in self._waiting:
            self._waiting.remove(one)
        elif self._jump > 1:
            self._cut(now_s)

    def turn(self, now_s: float) -> list[Sequence]:
        """Ends what is due, forms the next step or jump; sequences that are done."""
        if self._jump and now_s < self._until_s:
            return []
        over = self._arrive() if self._jump else []
        self._clear()
        self._depart(now_s)
        return over

    def _passed(self, now_s: float) -> int:
        """Whole steps of the jump that is under way."""
        if not self._jump or self._until_s <= self._from_s:
            return 0
        share = (now_s - self._from_s) / (self._until_s - self._from_s)
        return min(self._jump, max(0, math.floor(share * self._jump + 1e-9)))

    def _cut(self, now_s: float) -> None:
        """Ends a jump with the step that is under way."""
        steps = min(self._jump, self._passed(now_s) + 1)
        self._until_s = self._from_s + (self._until_s - self._from_s) * steps / self._jump
        self._jump = steps

    def _arrive(self) -> list[Sequence]:
        decoding = self._running - len(self._joining)
        self._steps += self._jump
        self._kv += decoding * self._jump
        for one in self._joining:
            one.joined = self._steps - 1
            self._kv += one.prompt + one.had + 1
            self._order += 1
            heapq.heappush(self._ends, (one.joined + one.need - one.had, self._order, one))
        self._joining, self._jump = [], 0
        over = []
        while self._ends and self._ends[0][0] <= self._steps:
            one = heapq.heappop(self._ends)[2]
            self._leave(one)
            if not one.left:
                over.append(one)
        return over

    def _leave(self, one: Sequence) -> None:
        self._running -= 1
        self._kv -= one.prompt + self._now(one)

    def _now(self, one: Sequence) -> int:
        """Tokens that it has, prompt left aside."""
        return min(one.need, one.had + self._steps - one.joined)

    def _clear(self) -> None:
        """Those that were called off go."""
        gone = [entry for entry in self._ends if entry[2].left]
        if gone:
            self._ends = [entry for entry in self._ends if not entry[2].left]
            heapq.heapify(self._ends)
            for _, _, one in gone:
                self._leave(one)

    def _depart(self, now_s: float) -> None:
        made_room = self._made_room()
        self._joining = [] if made_room else self._admitted()
        decoding, kv = self._running - len(self._joining), self._kv
        if not self._joining and not decoding:
            return
        self._jump = 1
        if not self._joining and not made_room:
            self._jump = max(1, min(self._ends[0][0] - self._steps, self._room() // decoding))
        prompts = [(one.prompt + one.had, 0) for one in self._joining]
        if self._jump == 1:
            seconds = self._cost(decoding, kv, prompts)
        else:
            seconds = self._jump * self._cost(decoding, kv + decoding * (self._jump - 1) // 2, ())
        self._from_s, self._until_s = now_s, now_s + seconds

    def _room(self) -> int:
        """Tokens that memory has room for."""
        return self._limits.kv_tokens - self._kv - self._running * (self._limits.block_tokens // 2)

    def _made_room(self) -> bool:
        """Whether somebody had to go, so that all others can go on by a step."""
        gone = False
        while self._running > 1 and self._room() < self._running:
            last = max(self._ends, key=lambda entry: entry[1])
            self._ends.remove(last)
            one = last[2]
            self._leave(one)
            one.had, one.joined = self._now(one), -1
            self._waiting.appendleft(one)
            gone = True
        if gone:
            heapq.heapify(self._ends)
        return gone

    def _admitted(self) -> list[Sequence]:
        found: list[Sequence] = []
        limits, tokens = self._limits, self._running
        room = self._room() - self._running - int(limits.spare * limits.kv_tokens)
        while self._waiting and self._running < limits.seqs:
            one = self._waiting[0]
            read = one.prompt + one.had
            room -= read + 1 + limits.block_tokens // 2
            if (room < 0 and self._running) or (found and tokens + read > limits.step_tokens):
                break
            self._waiting.popleft()
            self._running += 1
            tokens += read
            found.append(one)
        return found
