"""Systems whose replicas prefill and decode: batches that nobody leaves, and requests that come and go one by one."""

from __future__ import annotations

import math

import numpy as np

from lengthwise.schedule._configurations import LARGEST_BATCH, Configuration, Line, Row, times
from lengthwise.schedule._prepared import Setting
from lengthwise.schedule._replica import (
    BLOCK_TOKENS,
    ENDLESS_BLOCKS,
    Replica,
    cache_tokens,
    deployed,
    longest_blocks,
    memory_share,
    replicas_of,
    step_seqs,
)
from lengthwise.schedule._saturated import Question, play, play_whole
from lengthwise.schedule._systems import System, scheduler_of


class Whole:
    """Batches that nobody leaves; memory is counted as ``static_batches`` counts it."""

    first = 1

    def __init__(self, setting: Setting, system: System, question: Question) -> None:
        self._setting, self._system, self._question = setting, system, question

    def cuts(self) -> list[list[Line]]:
        """A line for each number of micro-batches of prompts; without a pipeline there is one."""
        return [self._lines(of) for of in replicas_of(self._setting)]

    def most(self, line: Line) -> int:
        """The largest batch that memory holds; its share grows with the batch."""
        low, high = 0, LARGEST_BATCH
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._share(line, middle) <= 1 else (low, middle - 1)
        return low

    def each(self, line: Line, batch: int) -> list[Configuration]:
        """The one."""
        return [Configuration(line, batch)]

    def play(self, at: Configuration) -> Row:
        """What it yields."""
        of, share = at.line.replica, self._share(at.line, at.batch)
        if share > 1:
            return Row(None, share)
        scheduler = scheduler_of(self._system, at.line.parts)
        made = deployed(self._setting, of, at.batch, at.line.budget, scheduler, ENDLESS_BLOCKS)
        return Row(times(play_whole(made, self._question), of.replicas), share)

    def _lines(self, of: Replica) -> list[Line]:
        parts = dict.fromkeys(of.pp * part if of.pp > 1 else 1 for part in self._system.parts)
        return [Line(of, 0, part) for part in parts]

    def _share(self, line: Line, batch: int) -> float:
        """As ``static_batches`` has it: room is kept for every output to be the longest."""
        held = prompt_tokens(self._setting, batch) + batch * self._setting.task.max_output_tokens
        tokens = prompt_tokens(self._setting, batch / min(line.parts, batch))
        seqs = batch / min(line.replica.pp, batch)
        return memory_share(self._setting, line.replica.layout, held, tokens, seqs)


class Streaming:
    """Requests that come and go one by one."""

    def __init__(self, setting: Setting, system: System, question: Question) -> None:
        self._setting, self._system, self._question = setting, system, question
        self.first = 2 if system.cuts else 1

    def cuts(self) -> list[list[Line]]:
        """A line for each budget."""
        return [self._lines(of) for of in replicas_of(self._setting)]

    def most(self, line: Line) -> int:
        """The largest batch that memory holds, or would hold if all had but a block; 0: not one of the longest."""
        blocks, longest = self._blocks(line, 1), longest_blocks(self._setting)
        if blocks < longest:
            return 0
        return min(LARGEST_BATCH, blocks // longest if self._system.reserves else blocks)

    def each(self, line: Line, batch: int) -> list[Configuration]:
        """The one."""
        return [Configuration(line, batch)]

    def play(self, at: Configuration) -> Row:
        """What it yields."""
        line, of, blocks = at.line, at.line.replica, self._blocks(at.line, at.batch)
        needed = longest_blocks(self._setting) * (at.batch if self._system.reserves else 1)
        if blocks < needed or (line.budget and step_seqs(of, at.batch) > line.budget):
            return Row(None)
        scheduler = scheduler_of(self._system, line.parts)
        played = play(deployed(self._setting, of, at.batch, line.budget, scheduler, blocks), self._question)
        held, step = played.held_blocks * BLOCK_TOKENS, self._step(line, at.batch)
        return Row(times(played, of.replicas), memory_share(self._setting, of.layout, held, *step))

    def _lines(self, of: Replica) -> list[Line]:
        budgets = self._system.budgets
        if not self._system.cuts and budgets != (0,):
            budgets = tuple(max(budget, self._setting.task.max_prompt_tokens) for budget in budgets)
        return [Line(of, budget, of.pp) for budget in dict.fromkeys(budgets)]

    def _blocks(self, line: Line, batch: int) -> int:
        return cache_tokens(self._setting, line.replica.layout, *self._step(line, batch)) // BLOCK_TOKENS

    def _step(self, line: Line, batch: int) -> tuple[float, float]:
        """(tokens, sequences) that activations are kept for.

        Without a budget: all decodes and as many prompts as take the place of who finishes, at the level; the burst
        with which a full queue begins is not counted.
        """
        seqs = step_seqs(line.replica, batch)
        if line.budget:
            return float(max(line.budget, seqs)), float(seqs)
        new = seqs / self._setting.task.mean_output_tokens
        new = min(max(new + self._setting.z * math.sqrt(new), 1.0), seqs)
        return seqs + prompt_tokens(self._setting, new), float(seqs)


def prompt_tokens(setting: Setting, seqs: float) -> float:
    """Prompt tokens of so many requests at the level."""
    return float(setting.prompt_tokens_high(np.array([float(seqs)]))[0])


__all__ = ["Streaming", "Whole", "prompt_tokens"]
