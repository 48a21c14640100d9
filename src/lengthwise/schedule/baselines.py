"""Other systems under the same latency bound, on the same GPUs with the same costs and memory.

The engine simulates each system with a full queue, for every division of the cluster into equal replicas, with batches
from one request to the largest that fits in memory. If a division is near the best at its latency, the search also
tries other token budgets and finer batch sizes. The systems differ only in how they form steps and in how much memory
they reserve. All have the host overhead of the cost tables, so that older engines do not pay for slower Python code.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lengthwise import policy
from lengthwise.engine import disaggregate
from lengthwise.policy.contracts import DECODES_WAIT, NEW_PHASE
from lengthwise.schedule.estimation import Estimator
from lengthwise.schedule.lengths import TaskLengths
from lengthwise.schedule.simulation import (
    BLOCK_TOKENS,
    UNLIMITED_BLOCKS,
    Replica,
    Simulated,
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
from lengthwise.schema.schedule import FrontPoint, ScheduleRow

MAX_BATCH = 4096
_MIN_RISE, _PATIENCE = 1.005, 2


@dataclass(frozen=True)
class System:
    """A baseline system, and the settings to try for it."""

    # The scheduler's name in ``lengthwise.policy``. If empty, a batch runs until all its requests are complete.
    scheduler: str = ""
    budgets: tuple[int, ...] = (0,)  # token budgets of a step to try, the usual one first. 0 means no budget
    parts: tuple[int, ...] = (1,)  # without a scheduler, numbers of prompt micro-batches per decode micro-batch to try
    # Whether a prompt may be split over several steps. If not, the budget must hold the longest prompt.
    is_chunked: bool = False
    is_disaggregated: bool = False  # whether some replicas only prefill and the others only decode

    @property
    def is_static(self) -> bool:
        """Return whether a batch runs until its longest output is complete, so that no request leaves early."""
        return not self.scheduler

    @property
    def reserves_max_length(self) -> bool:
        """Return whether each request reserves memory for the longest possible request."""
        return self.scheduler == "orca"


@dataclass(frozen=True)
class Sweep:
    """Configurations of a system that differ only in batch size.

    ``replica`` is the division of the cluster, ``budget`` the token budget of a step and ``parts`` the number of prompt
    micro-batches. ``prefill`` is the layout of the replicas that only prefill, or None if all replicas do both.
    """

    replica: Replica
    budget: int
    parts: int
    prefill: Replica | None = None


@dataclass(frozen=True)
class Configuration:
    """One configuration of a system: a sweep, the sequences per replica, and how many replicas only prefill."""

    sweep: Sweep
    batch: int
    prefill_replicas: int = 0


@dataclass(frozen=True)
class Outcome:
    """Results of a configuration over all replicas. ``simulated`` is None if memory or budget do not suffice."""

    simulated: Simulated | None
    memory_share: float = math.nan


class SystemSimulator(ABC):
    """Simulates one kind of system.

    A division is a way to divide the cluster into equal replicas. The search tries the first ``first_sweeps`` sweeps of
    each division, and the others only if the division is near the best.
    """

    first_sweeps = 1

    def __init__(self, setting: Setting, system: System, spec: SimulationSpec) -> None:
        self.setting, self.spec, self.system = setting, spec, system

    @abstractmethod
    def sweeps(self) -> list[list[Sweep]]:
        """Return a list of sweeps for each division of the cluster, in the order in which to try them."""

    @abstractmethod
    def max_batch(self, sweep: Sweep) -> int:
        """Return the largest batch that is worth trying, or 0 if none fits in memory."""

    def configurations(self, sweep: Sweep, batch: int) -> list[Configuration]:
        """Return the configurations of one batch size, at least one."""
        return [Configuration(sweep, batch)]

    @abstractmethod
    def simulate(self, configuration: Configuration) -> Outcome:
        """Simulate a configuration and return its results."""


class ConfigurationSearch:
    """Simulates the configurations of a system, each only once, and calls ``report`` after each simulation."""

    def __init__(self, system: SystemSimulator, report: Callable[[], None] = lambda: None) -> None:
        self.system, self._report = system, report
        self._divisions = system.sweeps()
        self.outcomes: dict[Configuration, Outcome] = {}

    def sweeps(self, *, first: bool) -> list[Sweep]:
        """Return all sweeps or, if ``first``, only the sweeps that are tried first."""
        most = self.system.first_sweeps if first else None
        return [sweep for division in self._divisions for sweep in division[:most]]

    def other_sweeps(self, sweep: Sweep) -> list[Sweep]:
        """Return the other sweeps of a sweep's division of the cluster."""
        return [other for division in self._divisions if sweep in division for other in division if other != sweep]

    def run(self, sweep: Sweep, batches: Sequence[int], *, complete: bool = False) -> None:
        """Simulate batches in ascending order until the throughput stops rising or, if ``complete``, all of them."""
        best_rps, since_rise = 0.0, 0
        for batch in batches or [1]:
            rps = max(self._throughput_rps(one) for one in self.system.configurations(sweep, batch))
            since_rise = 0 if rps > best_rps * _MIN_RISE else since_rise + 1
            best_rps = max(best_rps, rps)
            if since_rise >= _PATIENCE and not complete:
                return

    def near_best(self, share: float) -> list[Configuration]:
        """Return the configurations with at least 1 - ``share`` of the best throughput at their latency or less."""
        feasible = [(one, outcome.simulated) for one, outcome in self.outcomes.items() if outcome.simulated]
        feasible.sort(key=lambda pair: pair[1].latency_high_s)
        found, best_rps = [], 0.0
        for configuration, simulated in feasible:
            best_rps = max(best_rps, simulated.throughput_rps)
            if simulated.throughput_rps >= best_rps * (1 - share):
                found.append(configuration)
        return found

    def _throughput_rps(self, configuration: Configuration) -> float:
        if configuration not in self.outcomes:
            self.outcomes[configuration] = self.system.simulate(configuration)
            self._report()
        simulated = self.outcomes[configuration].simulated
        return simulated.throughput_rps if simulated else 0.0


@dataclass(frozen=True, eq=False)
class Curve:
    """Results of a system's configurations.

    Configurations that do not fit in memory have a throughput of 0 and infinite latency. ``latency_s`` of a row is the
    mean time from a request's first step to its last token, for outputs of ``Setting.bound_tokens`` tokens, and
    ``latency_high_s`` the quantile ``Assumptions.level`` of this time. For batches that run to completion,
    ``latency_high_s`` is the quantile if all outputs have maximum length. ``prefill_s`` is the mean time from the first
    step to the first token, ``decode_s`` the mean time between tokens, and ``decode_batch`` the mean number of running
    sequences of a replica. ``memory_share`` counts the mean KV cache in use or, for batches that run to completion, the
    reserved KV cache.
    """

    rows: tuple[ScheduleRow, ...]  # one row per configuration
    intervals_rps: tuple[tuple[float, float], ...]  # the 95 % interval of each row's throughput

    def best(self, bound_s: float, *, worst_case: bool = True) -> ScheduleRow | None:
        """Return the configuration with the highest throughput that meets a bound, or None if none meets it.

        It limits ``latency_high_s`` if ``worst_case``, else ``latency_s``. Raises InputError if it is not above 0.
        """
        at = self.best_at(bound_s, worst_case=worst_case)
        return None if at is None else self.rows[at]

    def best_at(self, bound_s: float, *, worst_case: bool = True) -> int | None:
        """Return the index of the configuration that ``best`` returns, or None if no configuration meets the bound."""
        if not bound_s > 0:
            raise InputError(f"a latency bound must be above 0 seconds; it is {bound_s}")
        latency_s = self._latency_s(worst_case=worst_case)
        good = [at for at, seconds in enumerate(latency_s) if math.isfinite(seconds) and seconds <= bound_s]
        return max(good, key=lambda at: self.rows[at].throughput_rps, default=None)

    def front(self, *, worst_case: bool = True) -> tuple[FrontPoint, ...]:
        """Return the configurations with more throughput than all of lower latency, ordered by latency."""
        found, best_rps = [], 0.0
        pairs = zip(self._latency_s(worst_case=worst_case), self.rows, strict=True)
        for seconds, row in sorted(pairs, key=lambda pair: (pair[0], -pair[1].throughput_rps)):
            if row.throughput_rps > best_rps:
                best_rps = row.throughput_rps
                found.append(FrontPoint(seconds, row))
        return tuple(found)

    def _latency_s(self, *, worst_case: bool) -> list[float]:
        return [row.latency_high_s if worst_case else row.latency_s for row in self.rows]


_INFEASIBLE = Simulated(0.0, 0.0, 0.0, math.inf, math.inf, math.nan, math.nan, 0.0, 0.0)


def curve_of(system: str, outcomes: dict[Configuration, Outcome]) -> Curve:
    """Return the results of configurations as a curve."""
    rows, intervals_rps = [], []
    for one, outcome in outcomes.items():
        got, of, prefill = outcome.simulated or _INFEASIBLE, one.sweep.replica, one.sweep.prefill
        cut = (prefill.tp, prefill.pp, one.prefill_replicas) if prefill else None
        replicas = of.replicas - one.prefill_replicas
        row = ScheduleRow(
            strategy=system,
            prefill_batch=one.batch,
            decode_steps=0,
            micro_batches=one.sweep.parts,
            tp=of.tp,
            tp_groups=of.pp if of.tp > 1 else 0,
            prefill_gpus=math.prod(cut) if cut else of.tp * of.pp * replicas,
            throughput_rps=got.throughput_rps,
            latency_s=got.latency_s,
            latency_high_s=got.latency_high_s,
            cycle_s=math.nan,
            prefill_s=got.prefill_s,
            decode_s=got.token_s,
            decode_batch=got.residents,
            memory_share=outcome.memory_share,
            stages=of.pp,
            replicas=replicas,
            chunk_tokens=one.sweep.budget,
            prefill_cut=cut,
        )
        rows.append(row)
        intervals_rps.append((got.low_rps, got.high_rps))
    return Curve(tuple(rows), tuple(intervals_rps))


_UNLIMITED_TOKENS = 1 << 60
SYSTEMS_BY_NAME: dict[str, System] = {
    "fastertransformer": System(),
    "deepspeed-inference": System(parts=(2, 4)),
    "orca": System("orca"),
    "vllm": System("vllm_v0", (2048, 512, 8192)),
    "sarathi": System("sarathi", (512, 2048, 256, 1024), is_chunked=True),
    "vllm-v1": System("vllm_v1", (512, 2048, 256, 1024, 8192), is_chunked=True),
    "vllm-v1-disaggregated": System("vllm_v1", (2048, 8192, 512), is_chunked=True, is_disaggregated=True),
}
SYSTEMS: tuple[str, ...] = tuple(SYSTEMS_BY_NAME)
MIN_REQUESTS = 100
NEAR, FINE = 0.1, 0.05
"""Relative gaps to the best throughput at no more latency, within which other budgets and finer batches are tried."""
_PER_OCTAVE = 4


def run_to_completion(
    num_waiting: int, num_running: int, phase_steps: int, max_num_seqs: int, parameter_0: int
) -> tuple[int, int, int]:
    """Admit a batch once the previous one is complete, and compute its prompts in ``parameter_0`` equal parts."""
    parts = min(parameter_0, max_num_seqs)
    place = 0 if num_running == 0 else phase_steps
    if num_waiting == 0 or place >= parts:
        return 0, 0, DECODES_WAIT
    share = max_num_seqs * (place + 1) // parts - max_num_seqs * place // parts
    flags = DECODES_WAIT
    if num_running == 0:
        flags += NEW_PHASE
    return share, _UNLIMITED_TOKENS, flags


def scheduler_of(system: System, prompt_parts: int) -> Scheduler:
    """Return the scheduler with which the engine simulates a system."""
    if not system.is_static:
        return policy.scheduler(system.scheduler)
    batches = policy.batching(run_to_completion)
    named = replace(batches, parameters=(prompt_parts,), name=f"run_to_completion(parts={prompt_parts})")
    return Scheduler(batching=named, memory="paged")


class _StaticSystem(SystemSimulator):
    def sweeps(self) -> list[list[Sweep]]:
        found = []
        for own in replicas_of(self.setting):
            parts = dict.fromkeys(own.pp * part if own.pp > 1 else 1 for part in self.system.parts)
            found.append([Sweep(own, 0, number) for number in parts])
        return found

    def max_batch(self, sweep: Sweep) -> int:
        low, high = 0, MAX_BATCH
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._share(sweep, middle) <= 1 else (low, middle - 1)
        return low

    def simulate(self, configuration: Configuration) -> Outcome:
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


class _ContinuousSystem(SystemSimulator):
    def __init__(self, setting: Setting, system: System, spec: SimulationSpec) -> None:
        super().__init__(setting, system, spec)
        self.first_sweeps = 2 if system.is_chunked else 1

    def sweeps(self) -> list[list[Sweep]]:
        budgets = self.system.budgets
        if not self.system.is_chunked and budgets != (0,):
            budgets = tuple(max(budget, self.setting.task.max_prompt_tokens) for budget in budgets)
        return [[Sweep(own, budget, own.pp) for budget in dict.fromkeys(budgets)] for own in replicas_of(self.setting)]

    def max_batch(self, sweep: Sweep) -> int:
        blocks, longest = self._blocks(sweep, 1), max_request_blocks(self.setting)
        if blocks < longest:
            return 0
        return min(MAX_BATCH, blocks // longest if self.system.reserves_max_length else blocks)

    def simulate(self, configuration: Configuration) -> Outcome:
        sweep, batch, replica = configuration.sweep, configuration.batch, configuration.sweep.replica
        blocks = self._blocks(sweep, batch)
        needed = max_request_blocks(self.setting) * (batch if self.system.reserves_max_length else 1)
        if blocks < needed or (sweep.budget and step_seqs(replica, batch) > sweep.budget):
            return Outcome(None)
        scheduler = scheduler_of(self.system, sweep.parts)
        deployment = replica_deployment(self.setting, replica, batch, sweep.budget, scheduler, blocks)
        simulated = simulate_replica(deployment, self.spec)
        cached = simulated.used_blocks * BLOCK_TOKENS
        share = memory_share(self.setting, replica.layout, cached, *self._step(sweep, batch))
        return Outcome(simulated.times(replica.replicas), share)

    def _blocks(self, sweep: Sweep, batch: int) -> int:
        return cache_tokens(self.setting, sweep.replica.layout, *self._step(sweep, batch)) // BLOCK_TOKENS

    def _step(self, sweep: Sweep, batch: int) -> tuple[float, float]:
        """Return the tokens and the sequences of the step for whose activations memory is reserved."""
        seqs = step_seqs(sweep.replica, batch)
        if sweep.budget:
            return float(max(sweep.budget, seqs)), float(seqs)
        new = seqs / self.setting.task.mean_output_tokens
        new = min(max(new + self.setting.z * math.sqrt(new), 1.0), seqs)
        return seqs + _prompt_tokens_high(self.setting, new), float(seqs)


class DisaggregatedSystem(SystemSimulator):
    """Simulates prefill and decode on different replicas. All replicas have the same number of GPUs."""

    def __init__(self, setting: Setting, system: System, spec: SimulationSpec) -> None:
        super().__init__(setting, system, spec)
        self._rates: dict[tuple[Replica, int], float] = {}

    def sweeps(self) -> list[list[Sweep]]:
        """Return the sweeps of each division into several replicas.

        The prefill replicas have the fastest layout for prompts, or the layout of the decode replicas.
        """
        divisions, usual, found = replicas_of(self.setting), self.system.budgets[0], []
        for own in divisions:
            if own.replicas > 1:
                equal = [one for one in divisions if one.tp * one.pp == own.tp * own.pp]
                fastest = max(equal, key=lambda one: self.prefill_rps(one, usual))
                prefills = dict.fromkeys([fastest, own] if self.prefill_rps(fastest, usual) else [own])
                found.append([Sweep(own, budget, own.pp, one) for budget in self.system.budgets for one in prefills])
        return found

    def max_batch(self, sweep: Sweep) -> int:
        """Return the largest batch of a decode replica that fits in memory with one block per request, or 0."""
        blocks = self._decode_blocks(sweep, 1)
        return min(MAX_BATCH, blocks) if self._fits(sweep, blocks) else 0

    def configurations(self, sweep: Sweep, batch: int) -> list[Configuration]:
        """Return one or two configurations with about as many prefill replicas as balance the rates of both sides."""
        prefill_rps = self.prefill_rps(sweep.prefill or sweep.replica, sweep.budget)
        if not prefill_rps:
            return [Configuration(sweep, batch, 1)]
        total, decode_rps = sweep.replica.replicas, self._decode_rps(sweep.replica, batch)
        even = total * decode_rps / (prefill_rps + decode_rps)
        numbers = {min(max(number, 1), total - 1) for number in (math.floor(even), math.ceil(even))}
        return [Configuration(sweep, batch, number) for number in sorted(numbers)]

    def simulate(self, configuration: Configuration) -> Outcome:
        """Return the results of a configuration. If its replicas form equal groups, the engine simulates one group."""
        sweep, batch, replica = configuration.sweep, configuration.batch, configuration.sweep.replica
        if not self._fits(sweep, self._decode_blocks(sweep, batch)):
            return Outcome(None)
        decodes = replica.replicas - configuration.prefill_replicas
        repeats = math.gcd(configuration.prefill_replicas, decodes)
        deployment = self.deployment(configuration, configuration.prefill_replicas // repeats, decodes // repeats)
        simulated = simulate_replica(deployment, self.spec, decodes // repeats * batch)
        seqs, cached = float(step_seqs(replica, batch)), simulated.used_blocks * BLOCK_TOKENS
        return Outcome(simulated.times(repeats), memory_share(self.setting, replica.layout, cached, seqs, seqs))

    def deployment(self, configuration: Configuration, prefills: int, decodes: int) -> Deployment:
        """Return a deployment in which ``prefills`` replicas prefill and ``decodes`` replicas decode."""
        sweep, batch, replica = configuration.sweep, configuration.batch, configuration.sweep.replica
        blocks, seqs = self._decode_blocks(sweep, batch), step_seqs(replica, batch)
        decode = replica_deployment(self.setting, replica, batch, seqs, self._scheduler(sweep.parts), blocks)
        prefill = self._prefill_deployment(sweep.prefill or replica, sweep.budget)
        return disaggregate(_replicated(prefill, prefills), _replicated(decode, decodes))

    def prefill_rps(self, replica: Replica, budget: int) -> float:
        """Return the prompts per second of one prefill replica, or 0 if it does not fit in memory."""
        if (key := (replica, budget)) in self._rates:
            return self._rates[key]
        self._rates[key] = 0.0
        if self._prefill_blocks(replica, budget) >= max_request_blocks(self.setting):
            task = TaskLengths(self.setting.task.prompt_pmf, np.array([0.0, 1.0]))
            spec = replace(self.spec, task=task, output_tokens=1)
            concurrency = 2 * replica.pp * self._prefill_seqs(budget)
            deployment = self._prefill_deployment(replica, budget)
            self._rates[key] = simulate_replica(deployment, spec, concurrency).throughput_rps
        return self._rates[key]

    def _decode_rps(self, replica: Replica, batch: int) -> float:
        task, parts = self.setting.task, min(replica.pp, batch)
        seqs = batch / parts
        kv_tokens = seqs * (task.mean_prompt_tokens + task.mean_output_tokens / 2)
        visits = self.setting.stage_visits_s(replica.layout.stages, seqs, kv_tokens, prefill=False)
        round_s = max(float(np.sum(visits)), parts * float(np.max(visits)))
        return batch / (max(task.mean_output_tokens - 1, 1.0) * round_s)

    def _prefill_deployment(self, replica: Replica, budget: int) -> Deployment:
        scheduler, blocks = self._scheduler(replica.pp), self._prefill_blocks(replica, budget)
        return replica_deployment(self.setting, replica, replica.pp * budget, budget, scheduler, blocks)

    def _scheduler(self, parts: int) -> Scheduler:
        return replace(scheduler_of(self.system, parts), router="least_outstanding")

    def _fits(self, sweep: Sweep, decode_blocks: int) -> bool:
        prefill_blocks = self._prefill_blocks(sweep.prefill or sweep.replica, sweep.budget)
        return min(decode_blocks, prefill_blocks) >= max_request_blocks(self.setting)

    def _prefill_seqs(self, budget: int) -> int:
        return math.ceil(budget / self.setting.task.mean_prompt_tokens) + 1

    def _prefill_blocks(self, replica: Replica, budget: int) -> int:
        seqs = float(self._prefill_seqs(budget))
        return cache_tokens(self.setting, replica.layout, float(budget), seqs) // BLOCK_TOKENS

    def _decode_blocks(self, sweep: Sweep, batch: int) -> int:
        seqs = float(step_seqs(sweep.replica, batch))
        return cache_tokens(self.setting, sweep.replica.layout, seqs, seqs) // BLOCK_TOKENS


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
    """Return the results of a system for all configurations that are worth simulating.

    Args:
        requests: Requests that each simulation measures. If few run at a time it measures fewer: down to an eighth, but
            at least twice the batch (``SimulationSpec``).
        seed: Seed of the lengths.
        batch_sizes: Sequences per replica. If None, powers of two up to what fits in memory, and finer steps near the
            best.
        report: Called after each simulation.

    Raises:
        UnknownNameError: No system has this name.
        InputError: ``requests`` is below ``MIN_REQUESTS``, or ``batch_sizes`` is empty or has a size below 1.
    """
    if system not in SYSTEMS_BY_NAME:
        raise UnknownNameError("system", system, SYSTEMS)
    if requests < MIN_REQUESTS:
        raise InputError(f"requests must be at least {MIN_REQUESTS}; it is {requests}")
    if batch_sizes is not None and (not len(batch_sizes) or min(batch_sizes) < 1):
        raise InputError(f"batch_sizes must be whole numbers of at least 1; they are {list(batch_sizes)}")
    setting, chosen = estimator.setting, SYSTEMS_BY_NAME[system]
    spec = SimulationSpec(setting.task, setting.bound_tokens, setting.assumptions.level, requests, seed)
    kind = _StaticSystem if chosen.is_static else DisaggregatedSystem if chosen.is_disaggregated else _ContinuousSystem
    search = ConfigurationSearch(kind(setting, chosen, spec), report)
    max_batch = search.system.max_batch
    if batch_sizes is not None:
        for sweep in search.sweeps(first=False):
            search.run(sweep, sorted(set(map(int, batch_sizes))), complete=True)
        return curve_of(system, search.outcomes)
    for sweep in search.sweeps(first=True):
        search.run(sweep, _octaves(max_batch(sweep)))
    for near in search.near_best(NEAR):
        for sweep in search.other_sweeps(near.sweep):
            search.run(sweep, _octaves(max_batch(sweep)))
    for near in search.near_best(FINE):
        factors = (2 ** (step / _PER_OCTAVE) for step in range(1 - _PER_OCTAVE, _PER_OCTAVE))
        sizes = {round(near.batch * factor) for factor in factors}
        most = max_batch(near.sweep)
        search.run(near.sweep, sorted(size for size in sizes if 1 <= size <= most), complete=True)
    return curve_of(system, search.outcomes)


def _octaves(most: int) -> list[int]:
    return sorted({2**i for i in range(most.bit_length()) if 2**i <= most} | ({most} if most > 0 else set()))
