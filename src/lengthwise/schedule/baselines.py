"""Other systems under the same bound: what they would yield on the same GPUs with the same costs and memory.

Each is played out by the engine with a queue that never runs dry, in every way to cut the cluster into equal replicas,
with batches from one request to what memory holds. The step's budget of tokens is varied where a way of cutting is
near the best, and batches are taken more finely there: what is far behind at some latency is not looked at closer.

Systems differ in how they form steps and in what they keep memory for, and in nothing else. The host's seconds are
those of the tables for all of them, so that an engine of 2022 is not charged for its Python; roofline's
are what vLLM v1 leaves visible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lengthwise import policy
from lengthwise.engine import disaggregate
from lengthwise.policy.contracts import DECODES_WAIT, NEW_PHASE
from lengthwise.schedule.configurations import (
    LARGEST_BATCH,
    Configuration,
    Configurations,
    Curve,
    Line,
    Player,
    Row,
    curve_of,
    times,
)
from lengthwise.schedule.estimation import Estimator
from lengthwise.schedule.lengths import TaskLengths
from lengthwise.schedule.simulation import (
    BLOCK_TOKENS,
    ENDLESS_BLOCKS,
    Question,
    Replica,
    cache_tokens,
    deployed,
    longest_blocks,
    memory_share,
    play,
    play_whole,
    replicas_of,
    step_seqs,
)
from lengthwise.schedule.stage_costs import Setting, visits_s
from lengthwise.schema.deployment import Deployment, Parallelism, Scheduler
from lengthwise.schema.errors import InputError, UnknownNameError

_UNBOUNDED = 1 << 60


@dataclass(frozen=True)
class System:
    """A system under its own name.

    Attributes:
        scheduler: Under which name ``lengthwise.policy`` has it; "": batches that nobody leaves (``whole_batches``).
        budgets: Tokens of a step that are tried, the usual one first; 0: without a budget.
        parts: Micro-batches of prompts for each of decodes that are tried; of whole batches alone.
        disaggregated: Some replicas only prefill, the others only decode.
        cuts: Prompts may be cut to what is left of a budget; else the budget must hold the longest.
    """

    scheduler: str = ""
    budgets: tuple[int, ...] = (0,)
    parts: tuple[int, ...] = (1,)
    cuts: bool = False
    disaggregated: bool = False

    @property
    def complete(self) -> bool:
        """Whether a batch runs until its longest output is done, nobody leaving before."""
        return not self.scheduler

    @property
    def reserves(self) -> bool:
        """Whether memory is kept for the longest request."""
        return self.scheduler == "orca"


KNOWN: dict[str, System] = {
    "fastertransformer": System(),
    "deepspeed-inference": System(parts=(2, 4)),
    "orca": System("orca"),
    "vllm": System("vllm_v0", (2048, 512, 8192)),
    "sarathi": System("sarathi", (512, 2048, 256, 1024), cuts=True),
    "vllm-v1": System("vllm_v1", (512, 2048, 256, 1024, 8192), cuts=True),
    "vllm-v1-disaggregated": System("vllm_v1", (2048, 8192, 512), cuts=True, disaggregated=True),
}


def whole_batches(
    waiting: int, num_running: int, phase_steps: int, max_num_seqs: int, parameter_0: int
) -> tuple[int, int, int]:
    """A batch is let in when the one before is through: prompts in ``parameter_0`` even parts, then its decodes."""
    parts = min(parameter_0, max_num_seqs)
    place = 0 if num_running == 0 else phase_steps
    if waiting == 0 or place >= parts:
        return 0, 0, DECODES_WAIT
    share = max_num_seqs * (place + 1) // parts - max_num_seqs * place // parts
    flags = DECODES_WAIT
    if num_running == 0:
        flags += NEW_PHASE
    return share, _UNBOUNDED, flags


def scheduler_of(system: System, prompt_parts: int) -> Scheduler:
    """A system as a point on the axes of the engine's schedulers."""
    if not system.complete:
        return policy.scheduler(system.scheduler)
    batches = policy.batching(whole_batches)
    named = replace(batches, parameters=(prompt_parts,), name=f"whole_batches(parts={prompt_parts})")
    return Scheduler(batching=named, memory="paged")


class Disaggregated:
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
        prefill_rps, total = (self._prefill_rps(line.prefill or line.replica, line.budget), line.replica.replicas)
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
                self._setting.packed(stage.tp), seqs, kv_tokens, stage.layers, place == 0, place == last, encode=False
            )
            for place, stage in enumerate(of.layout.stages)
        ]
        round_s = max(float(np.sum(visits)), min(of.pp, batch) * float(np.max(visits)))
        return batch / (max(task.mean_output_tokens - 1, 1.0) * round_s)


def _times(deployment: Deployment, replicas: int) -> Deployment:
    of = deployment.parallel
    return replace(deployment, parallel=Parallelism(of.tp, of.pp, replicas))


class Complete:
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


SYSTEMS: tuple[str, ...] = tuple(KNOWN)
"""Names of the systems, by age."""
MIN_REQUESTS = 100
NEAR, FINE = 0.1, 0.05
"""How much less throughput than the best at its latency a configuration may have to be looked at closer."""
_PER_OCTAVE = 4


def curve(
    estimator: Estimator,
    system: str,
    *,
    requests: int = 2000,
    seed: int = 0,
    batch_sizes: Sequence[int] | None = None,
    report: Callable[[], None] = lambda: None,
) -> Curve:
    """What a system yields in each configuration worth a look.

    Args:
        estimator: Of the task on the cluster: lengths, tables, memory, and the quantile that bounds are for.
        system: One of ``SYSTEMS``.
        requests: How many are counted in each configuration; down to an eighth where few are served at a time,
            and twice the batch at least.
        seed: Of the lengths; all configurations see lengths of one seed.
        batch_sizes: Sequences on a replica; None: by octaves up to what memory holds, finer near the best.
        report: Called when a configuration was played out.

    Raises:
        UnknownNameError: There is no such system.
        InputError: Too few requests, or a batch below 1.
    """
    if system not in KNOWN:
        raise UnknownNameError("system", system, SYSTEMS)
    if requests < MIN_REQUESTS:
        raise InputError(f"requests must be at least {MIN_REQUESTS}; they are {requests}")
    if batch_sizes is not None and (not len(batch_sizes) or min(batch_sizes) < 1):
        raise InputError(f"batch_sizes must be whole numbers of at least 1; they are {list(batch_sizes)}")
    tried = Configurations(_player(estimator.setting, KNOWN[system], requests, seed), report)
    if batch_sizes is None:
        _poll(tried)
    else:
        for line in tried.lines(every=True):
            tried.go(line, sorted(set(map(int, batch_sizes))), complete=True)
    return curve_of(system, tried.rows)


def _player(setting: Setting, system: System, requests: int, seed: int) -> Player:
    question = Question(setting.task, setting.bound_tokens, setting.assumptions.level, requests, seed)
    kind = Complete if system.complete else Disaggregated if system.disaggregated else Streaming
    return kind(setting, system, question)


def _poll(attempts: Configurations) -> None:
    """Octaves of every cut, other budgets of those near the best, and finer batches beside the points near the best."""
    for line in attempts.lines(every=False):
        attempts.go(line, octaves(attempts.most(line)))
    for at in attempts.near(NEAR):
        for line in attempts.siblings(at.line):
            attempts.go(line, octaves(attempts.most(line)))
    for at in attempts.near(FINE):
        attempts.go(at.line, _additional(at.batch, attempts.most(at.line)), complete=True)


def octaves(most: int) -> list[int]:
    """Powers of two up to ``most``, and it."""
    return sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | ({most} if most > 0 else set()))


def _additional(batch: int, most: int) -> list[int]:
    steps = range(1 - _PER_OCTAVE, _PER_OCTAVE)
    sizes = {round(batch * 2 ** (step / _PER_OCTAVE)) for step in steps}
    return sorted(size for size in sizes if 1 <= size <= most)
