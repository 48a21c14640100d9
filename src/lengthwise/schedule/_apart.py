"""Replicas that only prefill beside others that only decode (disaggregation), requests handed over from these to those.

As many requests are in the system as its decoding replicas have seats, and one comes when one ends: whoever is
prefilled finds a seat. With a queue that never runs dry, prompts would be computed as fast as memory holds them, and
wait; so would whoever is let in beyond the seats. Each goes to the replica with the fewest requests. How many replicas
prefill follows from what either kind does alone: the two whole numbers beside an even balance.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from lengthwise.engine import disaggregate
from lengthwise.schedule._configurations import LARGEST_BATCH, Configuration, Line, Row, times
from lengthwise.schedule._prepared import Setting
from lengthwise.schedule._replica import (
    BLOCK_TOKENS,
    Replica,
    cache_tokens,
    deployed,
    longest_blocks,
    memory_share,
    replicas_of,
    step_seqs,
)
from lengthwise.schedule._saturated import Question, play
from lengthwise.schedule._systems import System, scheduler_of
from lengthwise.schedule.lengths import TaskLengths
from lengthwise.schedule.stage_seconds import visits_s
from lengthwise.schema.deployment import Deployment, Parallelism, Scheduler


class Apart:
    """A cut of the cluster whose replicas are of two kinds, of equally many GPUs each."""

    first = 1

    def __init__(self, setting: Setting, system: System, question: Question) -> None:
        self._setting, self._system, self._question = setting, system, question
        self._rates: dict[tuple[Replica, int], float] = {}

    def cuts(self) -> list[list[Line]]:
        """Where there are two replicas or more: prompts on the cut that computes most of them, or on the same one."""
        every = replicas_of(self._setting)
        return [self._lines(of, every) for of in every if of.replicas > 1]

    def most(self, line: Line) -> int:
        """The largest batch of a decoding replica that memory would hold if all had but a block; 0: none."""
        blocks = self._decode_blocks(line, 1)
        return min(LARGEST_BATCH, blocks) if self._holds(line, blocks) else 0

    def each(self, line: Line, batch: int) -> list[Configuration]:
        """The numbers of prefilling replicas on both sides of an even balance."""
        prefill_rps, total = (
            self._prefill_rps(line.prefill or line.replica, line.budget),
            line.replica.replicas,
        )
        if not prefill_rps:
            return [Configuration(line, batch, 1)]
        decode_rps = self._decode_rps(line.replica, batch)
        even = total * decode_rps / (prefill_rps + decode_rps)
        beside = {min(max(number, 1), total - 1) for number in (math.floor(even), math.ceil(even))}
        return [Configuration(line, batch, number) for number in sorted(beside)]

    def play(self, at: Configuration) -> Row:
        """What it yields; of replicas that repeat a pattern one repetition is played."""
        line, blocks = at.line, self._decode_blocks(at.line, at.batch)
        decodes = line.replica.replicas - at.prefills
        if not self._holds(line, blocks):
            return Row(None)
        repeats = math.gcd(at.prefills, decodes)
        made = self._deployed(at, at.prefills // repeats, decodes // repeats, blocks)
        played = play(made, self._question, decodes // repeats * at.batch)
        seqs = float(step_seqs(line.replica, at.batch))
        held = played.held_blocks * BLOCK_TOKENS
        return Row(times(played, repeats), memory_share(self._setting, line.replica.layout, held, seqs, seqs))

    def _lines(self, of: Replica, every: tuple[Replica, ...]) -> list[Line]:
        alike = [one for one in every if one.tp * one.pp == of.tp * of.pp]
        usual = self._system.budgets[0]
        fastest = max(alike, key=lambda one: self._prefill_rps(one, usual))
        cuts = dict.fromkeys([fastest, of] if self._prefill_rps(fastest, usual) else [of])
        return [Line(of, budget, of.pp, cut) for budget in self._system.budgets for cut in cuts]

    def _deployed(self, at: Configuration, prefills: int, decodes: int, blocks: int) -> Deployment:
        line, seqs = at.line, step_seqs(at.line.replica, at.batch)
        scheduler = self._scheduler(line.parts)
        there = deployed(self._setting, line.replica, at.batch, seqs, scheduler, blocks)
        return disaggregate(
            self._prefilling(line.prefill or line.replica, line.budget, prefills), _times(there, decodes)
        )

    def _prefilling(self, of: Replica, budget: int, replicas: int) -> Deployment:
        scheduler, blocks = self._scheduler(of.pp), self._prefill_blocks(of, budget)
        return _times(deployed(self._setting, of, of.pp * budget, budget, scheduler, blocks), replicas)

    def _scheduler(self, parts: int) -> Scheduler:
        return replace(scheduler_of(self._system, parts), router="least_outstanding")

    def _holds(self, line: Line, decode_blocks: int) -> bool:
        prefill_blocks = self._prefill_blocks(line.prefill or line.replica, line.budget)
        return min(decode_blocks, prefill_blocks) >= longest_blocks(self._setting)

    def _prefill_blocks(self, of: Replica, budget: int) -> int:
        seqs = math.ceil(budget / self._setting.task.mean_prompt_tokens) + 1
        return cache_tokens(self._setting, of.layout, float(budget), float(seqs)) // BLOCK_TOKENS

    def _decode_blocks(self, line: Line, batch: int) -> int:
        seqs = float(step_seqs(line.replica, batch))
        return cache_tokens(self._setting, line.replica.layout, seqs, seqs) // BLOCK_TOKENS

    def _prefill_rps(self, of: Replica, budget: int) -> float:
        """Prompts a second of a replica that does nothing else; 0: it does not fit."""
        key = of, budget
        if key not in self._rates:
            self._rates[key] = 0.0
            if self._prefill_blocks(of, budget) >= longest_blocks(self._setting):
                task = TaskLengths(self._setting.task.prompt_pmf, np.array([0.0, 1.0]))
                asked = replace(self._question, task=task, output_tokens=1)
                at_work = 2 * of.pp * (math.ceil(budget / self._setting.task.mean_prompt_tokens) + 1)
                played = play(self._prefilling(of, budget, 1), asked, at_work)
                self._rates[key] = played.throughput_rps
        return self._rates[key]

    def _decode_rps(self, of: Replica, batch: int) -> float:
        """Requests a second that a full decoding replica gets through, as estimated."""
        task, seqs = self._setting.task, batch / min(of.pp, batch)
        kv_tokens = seqs * (task.mean_prompt_tokens + task.mean_output_tokens / 2)
        last = len(of.layout.stages) - 1
        visits = [
            visits_s(
                self._setting.packed(stage.tp),
                seqs,
                kv_tokens,
                stage.layers,
                place == 0,
                place == last,
                encode=False,
            )
            for place, stage in enumerate(of.layout.stages)
        ]
        round_s = max(float(np.sum(visits)), min(of.pp, batch) * float(np.max(visits)))
        return batch / (max(task.mean_output_tokens - 1, 1.0) * round_s)


def _times(deployment: Deployment, replicas: int) -> Deployment:
    of = deployment.parallel
    return replace(deployment, parallel=Parallelism(of.tp, of.pp, replicas))


__all__ = ["Apart"]
