"""Whether speculative decoding helps at the loads of a scenario: with and without it, on the same requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from lengthwise import engine, search
from lengthwise.config.scenario import Scenario
from lengthwise.config.sections import SearchSection
from lengthwise.cost import model_error
from lengthwise.metrics import request_column
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError, error_note
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.plan import limit_text
from lengthwise.schema.records import Status
from lengthwise.schema.speculation import DraftLength, SpeculationStudy
from lengthwise.search import Load
from lengthwise.statistics import drawn_estimate, mean_estimate
from lengthwise.usecases.capacity import VariantCapacity, capacity_of
from lengthwise.usecases.requests import search_load
from lengthwise.usecases.variants import unchecked_tables_note

Progress = Callable[[int, int], None]
LOADS = (0.05, 0.25, 0.5, 0.75, 0.9)
REQUESTS = 2000
WARMUP_SHARE = 0.1  # of the requests, which are not counted


@dataclass(frozen=True)
class _Run:
    """Means over the requests of a run."""

    tpot_s: float
    jct_s: float
    tokens_per_step: float
    batch_seqs: float


_Runs = tuple[list[_Run], list[_Run]]


def study(
    scenario: Scenario,
    *,
    tokens: Sequence[int] | None = None,
    loads: Sequence[float] = LOADS,
    requests: int = REQUESTS,
    jobs: int | None = None,
    progress: Progress = lambda *_: None,
) -> SpeculationStudy:
    """Simulate a scenario with and without speculation at several loads, and find both capacities.

    Args:
        scenario: Scenario with [deployment.speculation] and without variants.
        tokens: Numbers of proposed tokens. None: 1, 2, ... up to num_speculative_tokens, at most five of them.
        loads: Shares of the capacity without speculation.
        requests: Requests of a run. The first tenth is not counted.
        jobs: Number of simulations at a time, by default one for each CPU.

    Raises:
        InputError: The scenario has no speculation or has variants, or a number of tokens or a load is invalid.
    """
    with error_note(f"in {scenario.source}"):
        chosen = _checked_tokens(scenario, tokens)
        if not loads or not all(0 < share < math.inf for share in loads):
            raise InputError(f"loads must be above 0 and finite, at least one; they are {list(loads)}")
        load = search_load(scenario)
        if requests < 100 or requests > load.max_requests:
            raise InputError(f"requests must be from 100 to {load.max_requests:,} here; they are {requests}")
        engine.warm_up()
        section, done = scenario.search or SearchSection(), 0
        seeds = load.seeds_up_to(section.seeds)
        draws = model_error.DRAWS if scenario.run.model_draws is None else scenario.run.model_draws
        with ThreadPoolExecutor(jobs or search.available_cpus()) as pool:
            total = len(chosen) + len(chosen) * len(loads)
            progress(done, total)
            capacities = []
            for number in chosen:
                capacities.append(capacity_of(_with_tokens(scenario, number), pool))
                progress(done := done + 1, total)
            base_rps = capacities[0].capacity.rate_rps.value
            if not base_rps > 0:
                raise InputError(
                    "without speculation the deployment sustains no load within its limits "
                    f"({capacities[0].capacity.binds}); loosen [search.limits], or give it more GPUs"
                )
            rates = [share * base_rps for share in loads]
            runs: list[list[_Runs]] = []
            for found in capacities:
                runs.append([])
                for rate in rates:
                    runs[-1].append(_runs(found.deployment, load, seeds, requests, rate, draws, pool))
                    progress(done := done + 1, total)
    lengths = [
        _draft_length(number, found, each, runs[0])
        for number, found, each in zip(chosen, capacities, runs, strict=True)
    ]
    deployed, table = scenario.deployment, scenario.deployment.speculation
    assert table is not None
    gpus = f"{deployed.gpus} x {deployed.gpu}" if deployed.gpus > 1 else deployed.gpu
    notes = [note for found in capacities for note in found.notes]
    return SpeculationStudy(
        name=scenario.name,
        metadata=(deployed.model, gpus, load.name),
        method=table.method,
        base_rps=base_rps,
        loads=tuple(loads),
        rates_rps=tuple(rates),
        lengths=tuple(lengths),
        requests=requests,
        seeds=len(seeds),
        limits=tuple(limit_text(limit) for limit in capacities[0].limits),
        notes=tuple(dict.fromkeys(note for note in (*notes, unchecked_tables_note(scenario)) if note)),
    )


def _checked_tokens(scenario: Scenario, tokens: Sequence[int] | None) -> list[int]:
    """Return the numbers of proposed tokens to compare, 0 (no speculation) first."""
    table = scenario.deployment.speculation
    if table is None:
        raise InputError(
            'this study needs a table [deployment.speculation], such as: method = "eagle3", num_speculative_tokens = '
            "3, acceptance = [0.7, 0.6, 0.6]"
        )
    if scenario.variants:
        raise InputError("this study compares with and without speculation; remove the [[variants]], or name --variant")
    rates = len(table.acceptance) if isinstance(table.acceptance, list) else None
    most, reason = (64, "") if rates is None else (rates, ", the number of rates in acceptance")
    if tokens is None and table.num_speculative_tokens == 0:
        raise InputError("deployment.speculation.num_speculative_tokens is 0; set it, or give --tokens")
    if tokens is None:
        last = max(1, table.num_speculative_tokens)
        tokens = sorted({max(1, round(last * k / min(last, 5))) for k in range(1, min(last, 5) + 1)})
    if not tokens or not all(1 <= number <= most for number in tokens):
        raise InputError(
            f"numbers of proposed tokens must be from 1 to {most}{reason} (0 is added); they are {list(tokens)}"
        )
    return [0, *dict.fromkeys(tokens)]


def _with_tokens(scenario: Scenario, tokens: int) -> Scenario:
    deployed = scenario.deployment
    assert deployed.speculation is not None
    table = deployed.speculation.model_copy(update={"num_speculative_tokens": tokens}) if tokens else None
    return scenario.model_copy(update={"deployment": deployed.model_copy(update={"speculation": table})})


def _runs(
    deployment: Deployment,
    load: Load,
    seeds: range,
    requests: int,
    rate_rps: float,
    draws: int,
    pool: ThreadPoolExecutor,
) -> tuple[list[_Run], list[_Run]]:
    """Return the runs of all seeds, and those of the first seed with and without draws of the cost model's error."""
    copies = model_error.comparable_deployments(deployment, draws)[1:]
    tasks = [(deployment, seed) for seed in seeds] + [(copy, seeds[0]) for copy in copies]
    found = list(pool.map(lambda task: _run(task[0], load, task[1], requests, rate_rps), tasks))
    return found[: len(seeds)], [found[0], *found[len(seeds) :]]


def _run(deployment: Deployment, load: Load, seed: int, requests: int, rate_rps: float) -> _Run:
    records = engine.simulate(load.at(seed, requests, rate_rps), deployment, seed=seed, max_log_steps=0)
    counted = records.requests.status == Status.FINISHED
    counted[: int(WARMUP_SHARE * requests)] = False
    tpot_s, jct_s = (_mean(request_column(records.requests, name)[counted]) for name in ("tpot_s", "jct_s"))
    tokens_per_step = 1.0 if records.speculation is None else records.speculation.tokens_per_step
    step_s, seqs_s = float(records.series.step_s.sum()), float(records.series.seqs_s.sum())
    return _Run(tpot_s, jct_s, tokens_per_step, seqs_s / step_s if step_s > 0 else math.nan)


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def _draft_length(tokens: int, found: VariantCapacity, runs: list[_Runs], base: list[_Runs]) -> DraftLength:
    def means(name: str) -> tuple[Estimate, ...]:
        return tuple(_estimate([getattr(run, name) for run in seeds], [getattr(run, name) for run in drawn])
                     for seeds, drawn in runs)  # fmt: skip

    def speedups(name: str) -> tuple[Estimate, ...]:
        made = []
        for (seeds, drawn), (own, own_drawn) in zip(runs, base, strict=True):
            ratios, drawn_ratios = (
                [getattr(without, name) / getattr(run, name) for run, without in zip(*pair, strict=True)]
                for pair in ((seeds, own), (drawn, own_drawn))
            )
            made.append(_estimate(ratios, drawn_ratios))
        return tuple(made)

    return DraftLength(
        tokens=tokens,
        capacity_rps=found.capacity.rate_rps,
        binds=found.capacity.binds,
        tpot_s=means("tpot_s"),
        jct_s=means("jct_s"),
        tpot_speedup=speedups("tpot_s"),
        jct_speedup=speedups("jct_s"),
        tokens_per_step=tuple(mean_estimate([run.tokens_per_step for run in seeds]) for seeds, _ in runs),
        batch_seqs=tuple(mean_estimate([run.batch_seqs for run in seeds]) for seeds, _ in runs),
    )


def _estimate(values: list[float], drawn: list[float]) -> Estimate:
    mean = mean_estimate(values)
    if len(drawn) < 2:
        return mean
    found = drawn_estimate(mean, drawn)
    return replace(mean, model_low=found.model_low, model_high=found.model_high)
