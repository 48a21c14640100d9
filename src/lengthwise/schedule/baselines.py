"""Other systems under the same bound, on the same GPUs with the same costs and memory.

Each is simulated by the engine with a saturated queue, for every division of the cluster into equal replicas, with
batches from one request to what fits in memory. Where a division is near the best, the token budget of a step is varied
and batches are tried in finer steps; configurations far below the best at their latency are not refined.

Systems differ only in how they form steps and in what they reserve memory for. The host overhead is that of the tables
for all of them, so that an engine of 2022 is not charged for its Python; roofline's is what vLLM v1 leaves visible.
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
    MAX_BATCH,
    Configuration,
    ConfigurationSearch,
    Curve,
    Outcome,
    Sweep,
    SystemSimulator,
    curve_of,
)
from lengthwise.schedule.estimation import Estimator
from lengthwise.schedule.lengths import TaskLengths
from lengthwise.schedule.simulation import (
    BLOCK_TOKENS,
    UNLIMITED_BLOCKS,
    Replica,
    SimulationSpec,
    cache_tokens,
    max_request_blocks,
    memory_share,
    replica_deployment,
    replicas_of,
    simulate_replica,
    simulate_to_completion,
    step_seqs,
)
from lengthwise.schedule.stage_costs import Setting
from lengthwise.schema.deployment import Deployment, Parallelism, Scheduler
from lengthwise.schema.errors import InputError, UnknownNameError

_UNLIMITED_TOKENS = 1 << 60


@dataclass(frozen=True)
class System:
    """A baseline system.

    Attributes:
        scheduler: Name of the scheduler in ``lengthwise.policy``; "": batches that run to completion.
        budgets: Tokens per step to try, the usual one first; 0: no budget.
        parts: Micro-batches of prompts per one of decodes to try, for batches that run to completion.
        chunks: Whether prompts may be split to fit a budget; else the budget must hold the longest.
        disaggregated: Whether some replicas only prefill and the others only decode.

    """

    scheduler: str = ""
    budgets: tuple[int, ...] = (0,)
    parts: tuple[int, ...] = (1,)
    chunks: bool = False
    disaggregated: bool = False

    @property
    def static(self) -> bool:
        """Return whether a batch runs until its longest output is done, and no request leaves before."""
        return not self.scheduler

    @property
    def reserves(self) -> bool:
        """Return whether memory is reserved for requests of maximum length."""
        return self.scheduler == "orca"


SYSTEMS_BY_NAME: dict[str, System] = {
    "fastertransformer": System(),
    "deepspeed-inference": System(parts=(2, 4)),
    "orca": System("orca"),
    "vllm": System("vllm_v0", (2048, 512, 8192)),
    "sarathi": System("sarathi", (512, 2048, 256, 1024), chunks=True),
    "vllm-v1": System("vllm_v1", (512, 2048, 256, 1024, 8192), chunks=True),
    "vllm-v1-disaggregated": System("vllm_v1", (2048, 8192, 512), chunks=True, disaggregated=True),
}
SYSTEMS: tuple[str, ...] = tuple(SYSTEMS_BY_NAME)
"""Names of the systems, by age."""
MIN_REQUESTS = 100
NEAR, FINE = 0.1, 0.05
"""Shortfalls in throughput from the best at its latency within which other budgets and finer batches are tried."""
_PER_OCTAVE = 4


def run_to_completion(
    waiting: int, num_running: int, phase_steps: int, max_num_seqs: int, parameter_0: int
) -> tuple[int, int, int]:
    """Admit a batch when the previous one is done: prompts in ``parameter_0`` equal parts, then its decodes."""
    parts = min(parameter_0, max_num_seqs)
    place = 0 if num_running == 0 else phase_steps
    if waiting == 0 or place >= parts:
        return 0, 0, DECODES_WAIT
    share = max_num_seqs * (place + 1) // parts - max_num_seqs * place // parts
    flags = DECODES_WAIT
    if num_running == 0:
        flags += NEW_PHASE
    return share, _UNLIMITED_TOKENS, flags


def scheduler_of(system: System, prompt_parts: int) -> Scheduler:
    """Return a system as a scheduler of the engine."""
    if not system.static:
        return policy.scheduler(system.scheduler)
    batches = policy.batching(run_to_completion)
    named = replace(batches, parameters=(prompt_parts,), name=f"run_to_completion(parts={prompt_parts})")
    return Scheduler(batching=named, memory="paged")


@dataclass
class StaticSystem(SystemSimulator):
    """Batches that run to completion; memory is counted as in ``static_batches``."""

    setting: Setting
    system: System
    spec: SimulationSpec

    def sweeps(self) -> list[list[Sweep]]:
        """Return a sweep for each number of micro-batches of prompts; without a pipeline a single one."""
        return [
            [
                Sweep(of, 0, parts)
                for parts in dict.fromkeys(of.pp * part if of.pp > 1 else 1 for part in self.system.parts)
            ]
            for of in replicas_of(self.setting)
        ]

    def max_batch(self, sweep: Sweep) -> int:
        """Return the largest batch that fits in memory, by bisection: the memory share grows with the batch."""
        low, high = 0, MAX_BATCH
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._share(sweep, middle) <= 1 else (low, middle - 1)
        return low

    def simulate(self, configuration: Configuration) -> Outcome:
        """Return the results of a configuration."""
        sweep, replica = configuration.sweep, configuration.sweep.replica
        share = self._share(sweep, configuration.batch)
        if share > 1:
            return Outcome(None, share)
        scheduler = scheduler_of(self.system, sweep.parts)
        deployment = replica_deployment(
            self.setting, replica, configuration.batch, sweep.budget, scheduler, UNLIMITED_BLOCKS
        )
        return Outcome(simulate_to_completion(deployment, self.spec).times(replica.replicas), share)

    def _share(self, sweep: Sweep, batch: int) -> float:
        cached = _prompt_tokens_high(self.setting, batch) + batch * self.setting.task.max_output_tokens
        tokens = _prompt_tokens_high(self.setting, batch / min(sweep.parts, batch))
        return memory_share(self.setting, sweep.replica.layout, cached, tokens, batch / min(sweep.replica.pp, batch))


class ContinuousSystem(SystemSimulator):
    """Continuous batching: requests enter and leave one by one."""

    def __init__(self, setting: Setting, system: System, spec: SimulationSpec) -> None:
        self._setting, self._system, self._spec = setting, system, spec
        self.first_sweeps = 2 if system.chunks else 1

    def sweeps(self) -> list[list[Sweep]]:
        """Return a sweep for each budget."""
        budgets = self._system.budgets
        if not self._system.chunks and budgets != (0,):
            budgets = tuple(max(budget, self._setting.task.max_prompt_tokens) for budget in budgets)
        return [[Sweep(of, budget, of.pp) for budget in dict.fromkeys(budgets)] for of in replicas_of(self._setting)]

    def max_batch(self, sweep: Sweep) -> int:
        """Return the largest batch that fits with a block per request (or as reserved); 0: no longest request fits."""
        blocks, longest = self._blocks(sweep, 1), max_request_blocks(self._setting)
        if blocks < longest:
            return 0
        return min(MAX_BATCH, blocks // longest if self._system.reserves else blocks)

    def simulate(self, configuration: Configuration) -> Outcome:
        """Return the results of a configuration."""
        sweep, batch, replica = configuration.sweep, configuration.batch, configuration.sweep.replica
        blocks = self._blocks(sweep, batch)
        needed = max_request_blocks(self._setting) * (batch if self._system.reserves else 1)
        if blocks < needed or (sweep.budget and step_seqs(replica, batch) > sweep.budget):
            return Outcome(None)
        scheduler = scheduler_of(self._system, sweep.parts)
        deployment = replica_deployment(self._setting, replica, batch, sweep.budget, scheduler, blocks)
        simulated = simulate_replica(deployment, self._spec)
        cached = simulated.used_blocks * BLOCK_TOKENS
        share = memory_share(self._setting, replica.layout, cached, *self._step(sweep, batch))
        return Outcome(simulated.times(replica.replicas), share)

    def _blocks(self, sweep: Sweep, batch: int) -> int:
        return cache_tokens(self._setting, sweep.replica.layout, *self._step(sweep, batch)) // BLOCK_TOKENS

    def _step(self, sweep: Sweep, batch: int) -> tuple[float, float]:
        """Return (tokens, sequences) that activations are reserved for.

        Without a budget: all decodes, and prompts in place of the finished requests, at the level; the burst with
        which a full queue starts is not counted.
        """
        seqs = step_seqs(sweep.replica, batch)
        if sweep.budget:
            return float(max(sweep.budget, seqs)), float(seqs)
        new = seqs / self._setting.task.mean_output_tokens
        new = min(max(new + self._setting.z * math.sqrt(new), 1.0), seqs)
        return seqs + _prompt_tokens_high(self._setting, new), float(seqs)


class DisaggregatedSystem(SystemSimulator):
    """Prefill and decode on different replicas, of equally many GPUs each."""

    def __init__(self, setting: Setting, system: System, spec: SimulationSpec) -> None:
        self._setting, self._system, self._spec = setting, system, spec
        self._rates: dict[tuple[Replica, int], float] = {}

    def sweeps(self) -> list[list[Sweep]]:
        """Return sweeps of divisions with two replicas or more; prompts on the fastest division or on the same one."""
        divisions, usual, found = replicas_of(self._setting), self._system.budgets[0], []
        for of in divisions:
            if of.replicas > 1:
                equal = [one for one in divisions if one.tp * one.pp == of.tp * of.pp]
                fastest = max(equal, key=lambda one: self.prefill_rps(one, usual))
                prefills = dict.fromkeys([fastest, of] if self.prefill_rps(fastest, usual) else [of])
                found.append([Sweep(of, budget, of.pp, one) for budget in self._system.budgets for one in prefills])
        return found

    def max_batch(self, sweep: Sweep) -> int:
        """Return the largest batch of a decoding replica that fits with a block per request; 0: none."""
        blocks = self._decode_blocks(sweep, 1)
        return min(MAX_BATCH, blocks) if self._fits(sweep, blocks) else 0

    def configurations(self, sweep: Sweep, batch: int) -> list[Configuration]:
        """Return the numbers of prefilling replicas on either side of an even balance."""
        prefill_rps = self.prefill_rps(sweep.prefill or sweep.replica, sweep.budget)
        if not prefill_rps:
            return [Configuration(sweep, batch, 1)]
        total, decode_rps = sweep.replica.replicas, self._decode_rps(sweep.replica, batch)
        even = total * decode_rps / (prefill_rps + decode_rps)
        numbers = {min(max(number, 1), total - 1) for number in (math.floor(even), math.ceil(even))}
        return [Configuration(sweep, batch, number) for number in sorted(numbers)]

    def simulate(self, configuration: Configuration) -> Outcome:
        """Return the results of a configuration; of a repeated pattern of replicas one repetition is simulated."""
        sweep, batch, replica = configuration.sweep, configuration.batch, configuration.sweep.replica
        if not self._fits(sweep, self._decode_blocks(sweep, batch)):
            return Outcome(None)
        decodes = replica.replicas - configuration.prefills
        repeats = math.gcd(configuration.prefills, decodes)
        deployment = self.deployment(configuration, configuration.prefills // repeats, decodes // repeats)
        simulated = simulate_replica(deployment, self._spec, decodes // repeats * batch)
        seqs, cached = float(step_seqs(replica, batch)), simulated.used_blocks * BLOCK_TOKENS
        return Outcome(simulated.times(repeats), memory_share(self._setting, replica.layout, cached, seqs, seqs))

    def deployment(self, configuration: Configuration, prefills: int, decodes: int) -> Deployment:
        """Return a deployment of some of a configuration's replicas."""
        sweep, batch, replica = configuration.sweep, configuration.batch, configuration.sweep.replica
        blocks, seqs = self._decode_blocks(sweep, batch), step_seqs(replica, batch)
        decode = replica_deployment(self._setting, replica, batch, seqs, self._scheduler(sweep.parts), blocks)
        prefill = self._prefill_deployment(sweep.prefill or replica, sweep.budget)
        return disaggregate(_replicated(prefill, prefills), _replicated(decode, decodes))

    def prefill_rps(self, replica: Replica, budget: int) -> float:
        """Return the prompts per second of a replica that only prefills; 0: it does not fit in memory."""
        key = replica, budget
        if key not in self._rates:
            self._rates[key] = 0.0
            if self._prefill_blocks(replica, budget) >= max_request_blocks(self._setting):
                task = TaskLengths(self._setting.task.prompt_pmf, np.array([0.0, 1.0]))
                spec = replace(self._spec, task=task, output_tokens=1)
                concurrency = 2 * replica.pp * self._prefill_seqs(budget)
                deployment = self._prefill_deployment(replica, budget)
                self._rates[key] = simulate_replica(deployment, spec, concurrency).throughput_rps
        return self._rates[key]

    def _decode_rps(self, replica: Replica, batch: int) -> float:
        """Return the estimated requests per second of a full decoding replica."""
        task, parts = self._setting.task, min(replica.pp, batch)
        seqs = batch / parts
        kv_tokens = seqs * (task.mean_prompt_tokens + task.mean_output_tokens / 2)
        visits = self._setting.stage_visits_s(replica.layout.stages, seqs, kv_tokens, encode=False)
        round_s = max(float(np.sum(visits)), parts * float(np.max(visits)))
        return batch / (max(task.mean_output_tokens - 1, 1.0) * round_s)

    def _prefill_deployment(self, replica: Replica, budget: int) -> Deployment:
        scheduler, blocks = self._scheduler(replica.pp), self._prefill_blocks(replica, budget)
        return replica_deployment(self._setting, replica, replica.pp * budget, budget, scheduler, blocks)

    def _scheduler(self, parts: int) -> Scheduler:
        return replace(scheduler_of(self._system, parts), router="least_outstanding")

    def _fits(self, sweep: Sweep, decode_blocks: int) -> bool:
        prefill_blocks = self._prefill_blocks(sweep.prefill or sweep.replica, sweep.budget)
        return min(decode_blocks, prefill_blocks) >= max_request_blocks(self._setting)

    def _prefill_seqs(self, budget: int) -> int:
        return math.ceil(budget / self._setting.task.mean_prompt_tokens) + 1

    def _prefill_blocks(self, replica: Replica, budget: int) -> int:
        seqs = float(self._prefill_seqs(budget))
        return cache_tokens(self._setting, replica.layout, float(budget), seqs) // BLOCK_TOKENS

    def _decode_blocks(self, sweep: Sweep, batch: int) -> int:
        seqs = float(step_seqs(sweep.replica, batch))
        return cache_tokens(self._setting, sweep.replica.layout, seqs, seqs) // BLOCK_TOKENS


def _replicated(deployment: Deployment, replicas: int) -> Deployment:
    parallel = deployment.parallel
    return replace(deployment, parallel=Parallelism(parallel.tp, parallel.pp, replicas))


def _prompt_tokens_high(setting: Setting, seqs: float) -> float:
    return float(setting.prompt_tokens_high(np.array([float(seqs)]))[0])


def curve(
    estimator: Estimator,
    system: str,
    *,
    requests: int = 2000,
    seed: int = 0,
    batch_sizes: Sequence[int] | None = None,
    report: Callable[[], None] = lambda: None,
) -> Curve:
    """Return the results of a system in each configuration worth simulating.

    Each measures ``requests``, down to an eighth where few run at a time, and at least twice the batch; ``seed`` is
    that of their lengths. ``batch_sizes`` are sequences per replica; None: by octaves up to what fits in memory, finer
    near the best. ``report`` is called after each simulated configuration.

    Raises:
        UnknownNameError: No system has this name.
        InputError: Too few requests, or a batch below 1.

    """
    if system not in SYSTEMS_BY_NAME:
        raise UnknownNameError("system", system, SYSTEMS)
    if requests < MIN_REQUESTS:
        raise InputError(f"requests must be at least {MIN_REQUESTS}; they are {requests}")
    if batch_sizes is not None and (not len(batch_sizes) or min(batch_sizes) < 1):
        raise InputError(f"batch_sizes must be whole numbers of at least 1; they are {list(batch_sizes)}")
    setting, chosen = estimator.setting, SYSTEMS_BY_NAME[system]
    spec = SimulationSpec(setting.task, setting.bound_tokens, setting.assumptions.level, requests, seed)
    kind = StaticSystem if chosen.static else DisaggregatedSystem if chosen.disaggregated else ContinuousSystem
    search = ConfigurationSearch(kind(setting, chosen, spec), report)
    max_batch = search.system.max_batch
    if batch_sizes is not None:
        for sweep in search.sweeps(first=False):
            search.run(sweep, sorted(set(map(int, batch_sizes))), complete=True)
        return curve_of(system, search.outcomes)
    for sweep in search.sweeps(first=True):
        search.run(sweep, _octaves(max_batch(sweep)))
    for near in search.near_best(NEAR):
        for sweep in search.siblings(near.sweep):
            search.run(sweep, _octaves(max_batch(sweep)))
    for near in search.near_best(FINE):
        factors = (2 ** (step / _PER_OCTAVE) for step in range(1 - _PER_OCTAVE, _PER_OCTAVE))
        sizes = {round(near.batch * factor) for factor in factors}
        most = max_batch(near.sweep)
        search.run(near.sweep, sorted(size for size in sizes if 1 <= size <= most), complete=True)
    return curve_of(system, search.outcomes)


def _octaves(most: int) -> list[int]:
    return sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | ({most} if most > 0 else set()))
