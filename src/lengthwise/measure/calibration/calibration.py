"""Measured runs and a deployment become cost tables that agree with them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.engine.step_time import step_time
from lengthwise.measure.calibration import parameters
from lengthwise.measure.calibration.iteration_log import Iterations
from lengthwise.measure.calibration.measured_runs import Run, Split, check_enough, origin_notes, seconds_of, split_of
from lengthwise.measure.calibration.parameters import MASKED, knobs, part_errors
from lengthwise.measure.calibration.result import METRICS, Calibration, Change, Curve, Load, Parameter, Score
from lengthwise.measure.calibration.solver import (
    COST_TOLD,
    WIDE,
    Mask,
    Problem,
    Solution,
    deviations,
    downhill,
    loss,
    narrow,
    scale_at,
    solve,
    weights,
)
from lengthwise.measure.calibration.step_evidence import SEEN, seen, told_of
from lengthwise.schema.cost_tables import CostTables, Front, PartError, Reach
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.records import Measured, Records, StepRecords


def host_share(simulations: Sequence[Records], tables: CostTables) -> float:
    """The host's seconds over those of all steps that were simulated with ``tables``; 0 where none were kept."""
    host_s = steps_s = 0.0
    for records in simulations:
        if (steps := records.steps) is None:
            continue
        seqs = np.minimum(steps.decode_seqs + steps.prefill_seqs, len(tables.host_s) - 1)
        host_s += float(tables.host_s[seqs].sum())
        steps_s += float((steps.end_s - steps.start_s).sum())
    return min(1.0, host_s / steps_s) if steps_s > 0 else 0.0


def reach_of(runs: Sequence[Run], simulations: Sequence[Records], deployment: Deployment) -> Reach:
    """The largest step, sequence count, chunk, context and cache content of the runs fitted to."""
    each = [_of_run(run, records, deployment) for run, records in zip(runs, simulations, strict=True)]
    names = ("tokens", "seqs", "chunk", "context", "kv_tokens")
    return Reach(**{name: max(r[name] for r in each) for name in names})


def _of_run(run: Run, records: Records, deployment: Deployment) -> dict[str, int]:
    fitted = run.fit & np.isfinite(run.seconds["jct"])
    total = (run.workload.prompt_tokens + run.workload.output_tokens)[fitted]
    context = int(total.max(initial=1))
    steps = records.steps
    if steps is None:  # too many to be kept: what the limits allow is no more than what was there
        return {"tokens": context, "seqs": 1, "chunk": context, "context": context, "kv_tokens": context}
    seqs = steps.decode_seqs + steps.prefill_seqs
    return {
        "tokens": int((steps.prefill_tokens + steps.decode_seqs).max(initial=1)),
        "seqs": int(seqs.max(initial=1)),
        "chunk": _largest_chunk(steps),
        "context": context,
        "kv_tokens": int(steps.kv_blocks.max(initial=1)) * deployment.kv.block_size,
    }


def _largest_chunk(steps: StepRecords) -> int:
    """A step of several prompts has one of their mean or more."""
    some = steps.prefill_seqs > 0
    return int(np.ceil(steps.prefill_tokens[some] / steps.prefill_seqs[some]).max(initial=1))


UNMASKED = ("llama.cpp", "sglang", "tgi", "vllm")
"""Engines that attend by request: what would pass for masks in their runs is something else."""

MOST_PAIRS = 2.0
"""A masked pair is computed like a prompt's own: beyond so many times its seconds it is something else."""


def with_masks(
    problem: Problem, solution: Solution, deployment: Deployment, seed: int
) -> tuple[Problem, Solution, list[str]]:
    """The problem with dense masks beside its parameters, and its solution, if they stand out; else what came.

    The third are notes: at what masks were taken, or why they were refused although they stand out.
    """
    names = [knob.name for knob in problem.knobs]
    if MASKED in names:
        return problem, solution, []
    more = problem.with_knobs(knobs(deployment, logged="log_step" in names, masked=True))
    names = [knob.name for knob in more.knobs]
    at, notes = names.index(MASKED), []
    told = np.insert(solution.report, at, True)
    place = _far_from_peers(more, np.insert(solution.best, at, 0.0), told, at, seed)
    if place is not None:
        found = solve(more, names, seed, place)
        if found.z[at] != 0.0:
            pairs = own_pairs(more.values(found.z), deployment)
            if pairs <= MOST_PAIRS:
                return more, found, []
            notes = [_refused(pairs)]
    problem.simulations = more.simulations
    return problem, solution, notes


def without_masks(runs: Sequence[Measured]) -> tuple[str, ...]:
    """The names of the runs' engines, if all are known to attend by request; nothing where one may do otherwise."""
    names = {str(run.metadata.get("engine") or "").lower() for run in runs}
    return tuple(sorted(names)) if names and names <= set(UNMASKED) else ()


def not_looked_for(engines: Sequence[str]) -> str:
    """That masks were not looked for, and why."""
    return (
        f"dense masks were not looked for: {', '.join(engines)} attends by request (--fit with masked among the names "
        "looks all the same)"
    )


def notes_of(values: dict[str, float], deployment: Deployment) -> list[str]:
    """What a reader must know of the masks in these values: nothing where there are none."""
    masked_s = values.get(MASKED, 0.0)
    if masked_s == 0.0:
        return []
    pairs = own_pairs(values, deployment)
    told = (
        f"dense masks are taken: each query and cached token of another request costs {_times(pairs)} what a "
        "prompt's own pair does; an engine that does not mask the whole batch has none (--masks no)"
    )
    return [told if pairs <= MOST_PAIRS else f"{told}. More than {MOST_PAIRS:g} times is doubtful"]


def own_pairs(values: dict[str, float], deployment: Deployment) -> float:
    """How many of a prompt's own pairs a masked pair costs; infinite where the tables have no seconds of them."""
    own_s = values.get("prefill", 1.0) * own_pair_s(deployment)
    return values[MASKED] / own_s if own_s > 0 else np.inf


def own_pair_s(deployment: Deployment) -> float:
    """A layer's seconds for one more of a prompt's own pairs, in the largest chunk of a step.

    A mask over the batch is computed for a whole step at once, so that no smaller chunk's price is its own.
    """
    chunk = max(1, min(deployment.limits.max_num_batched_tokens, deployment.max_model_len // 2))
    seconds = step_time(deployment.cost)
    more_s = seconds(0, 0, [(chunk, chunk)]) - seconds(0, 0, [(chunk, 0)])
    return more_s / float(deployment.cost.stage_layers.sum()) / chunk**2


def _refused(pairs: float) -> str:
    return (
        f"dense masks would explain these runs, but only at {_times(pairs)} what a prompt's own pair costs, which no "
        "mask does, and were not taken: the costs of large steps are doubtful, their tables may be wrong in how "
        "they grow with tokens (profile the operators, or give --iterations)"
    )


def _times(pairs: float) -> str:
    return f"{pairs:.2g} times" if np.isfinite(pairs) else "more than any times"


def _far_from_peers(problem: Problem, z: Floats, free: Mask, at: int, seed: int) -> Floats | None:
    """Where parameter ``at``, nothing at ``z``, improves the agreement by more than noise would; None: nowhere.

    Where masks cost much, the others stand far off to make up for them, and the way down is long.
    """
    scale = scale_at(problem, z)
    weight = weights(problem, scale)
    place = np.array(downhill(problem, z, free, WIDE, weight, seed)[1])
    place, _, around = narrow(problem, place, free, scale, seed)
    before, after = (loss(problem.residuals(one) * weight, one) for one in (z, place))
    if after > before - COST_TOLD:
        return None
    noise = deviations(problem, place, around, scale)[1]
    return place if after <= before - COST_TOLD * float(noise[at]) else None


Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
LEVELS = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
LEAST = {"p99": 100, "p95": 20}
DRAWS = 200
LEAST_LOG_SD = 0.005
CURVE = np.round(np.linspace(0, 1, 101), 2)


def scores(run: Run, before: Mapping[str, Floats], after: Mapping[str, Floats], seed: int) -> list[Score]:
    """A run's scores on its held-out requests; intervals by drawing blocks of consecutive ones again."""
    rng = np.random.default_rng(seed)
    told: list[Score] = []
    for metric in METRICS:
        rows = np.flatnonzero(run.validation & (run.seconds[metric] > 0))
        if len(rows):
            columns = run.seconds[metric][rows], before[metric][rows], after[metric][rows]
            told += _of_metric(run.name, metric, columns, _draws(len(rows), rng))
    return told


def curves(
    runs: Sequence[Run], before: Sequence[Mapping[str, Floats]], after: Sequence[Mapping[str, Floats]]
) -> tuple[Curve, ...]:
    """How each metric is distributed over each run's held-out requests; requests that all three have."""
    told = []
    for run, old, new in zip(runs, before, after, strict=True):
        for metric in METRICS:
            sides = np.stack([side[metric][run.validation] for side in (run.seconds, old, new)])
            sides = sides[:, np.isfinite(sides).all(axis=0)]
            if sides.shape[1]:
                at = np.quantile(sides, CURVE, axis=1, method="inverted_cdf").T.tolist()
                told.append(Curve(run.name, metric, tuple(CURVE.tolist()), *(tuple(line) for line in at)))
    return tuple(told)


def _of_metric(run: str, metric: str, columns: tuple[Floats, ...], draws: Ints) -> list[Score]:
    theirs, old, new = columns
    found = []
    for name in ("mean", *LEVELS, "each"):
        if len(theirs) < LEAST.get(name, 0):
            continue
        drawn = _errors(name, theirs[draws], new[draws])
        low, high = np.quantile(drawn, (0.025, 0.975))
        found.append(
            Score(
                run=run,
                metric=metric,
                statistic=name,
                measured=float("nan") if name == "each" else float(_statistic(name, theirs[None])[0]),
                before=float(_errors(name, theirs[None], old[None])[0]),
                after=float(_errors(name, theirs[None], new[None])[0]),
                low=float(low),
                high=float(high),
            )
        )
    return found


def _errors(name: str, other: Floats, own: Floats) -> Floats:
    """[draws] relative errors of a statistic over the last axis."""
    if name == "each":
        return np.asarray(np.abs(own / other - 1).mean(axis=-1))
    return np.asarray(_statistic(name, own) / _statistic(name, other) - 1)


def _statistic(name: str, seconds: Floats) -> Floats:
    if name == "mean":
        return np.asarray(seconds.mean(axis=-1))
    return np.asarray(np.quantile(seconds, LEVELS[name], axis=-1))


def _draws(n: int, rng: np.random.Generator) -> Ints:
    """[draws, n] rows in blocks of consecutive requests, which a queue makes alike."""
    length = max(1, round(n**0.5))
    starts = rng.integers(0, n, size=(DRAWS, -(-n // length)))
    rows = (starts[:, :, None] + np.arange(length)) % n
    return np.asarray(rows.reshape(DRAWS, -1)[:, :n])


def changes(
    runs: Sequence[Run], before: Sequence[Mapping[str, Floats]], after: Sequence[Mapping[str, Floats]], seed: int
) -> tuple[Change, ...]:
    """By metric, what the calibration changed of single held-out requests' errors, drawn in pairs by blocks."""
    rng = np.random.default_rng(seed)
    told = []
    for metric in METRICS:
        old, new, drawn = [], [], []
        for run, a, b in zip(runs, before, after, strict=True):
            rows = np.flatnonzero(run.validation & (run.seconds[metric] > 0))
            if len(rows):
                own = [np.abs(x[metric][rows] / run.seconds[metric][rows] - 1) for x in (a, b)]
                old.append(own[0])
                new.append(own[1])
                drawn.append((own[1] - own[0])[_draws(len(rows), rng)])
        if drawn:
            low, high = np.quantile(np.concatenate(drawn, axis=1).mean(axis=1), (0.025, 0.975))
            first, last = (float(np.concatenate(each).mean()) for each in (old, new))
            told.append(Change(metric, first, last, float(low), float(high)))
    return tuple(told)


def log_sd(
    runs: Sequence[Run], after: Sequence[Mapping[str, Floats]], metrics: Sequence[str] = ("tpot", "jct")
) -> float:
    """Spread of log(measured / simulated) of held-out seconds about zero, outliers cut.

    Of times between tokens; of whole latencies where too few requests have tokens enough.
    """
    for metric in metrics:
        logs = [
            np.log(run.seconds[metric][rows] / told[metric][rows])
            for run, told in zip(runs, after, strict=True)
            for rows in (np.flatnonzero(run.validation & (run.seconds[metric] > 0)),)
        ]
        pooled = np.concatenate(logs)
        if len(pooled) >= 10:
            break
    most = 3 * max(LEAST_LOG_SD, 1.4826 * float(np.median(np.abs(pooled))))
    return max(LEAST_LOG_SD, float(np.sqrt(np.mean(np.clip(pooled, -most, most) ** 2))))


COUNTERS = {"running": "num_requests_running", "waiting": "num_requests_waiting"}
CLOCKS = ("at_s", "time_s", "t_s")
BINS = 20


@dataclass(frozen=True)
class Report:
    """A simulation, and the front of its tables: an engine counts who is past it."""

    records: Records
    front: Front


def loads_of(run: Run, before: Report, after: Report) -> list[Load]:
    """The counters that the run's facts hold under "metrics", a column a metric over time; else nothing."""
    metrics = run.measured.metadata.get("metrics")
    if not isinstance(metrics, Mapping):
        return []
    clock = next((metrics[name] for name in CLOCKS if name in metrics), None)
    if clock is None or len(clock) < 2:
        return []
    at_s = np.asarray(clock, dtype=np.float64)
    found = ((name, _column(metrics, counter)) for name, counter in COUNTERS.items())
    return [_load(run, name, at_s, told, before, after) for name, told in found if told is not None]


def _column(metrics: Mapping[str, Any], counter: str) -> Floats | None:
    """The counter's values, summed over engines and models that are told apart by labels."""
    columns = [values for name, values in metrics.items() if counter in name and "by_reason" not in name]
    return None if not columns else np.sum([np.asarray(c, dtype=np.float64) for c in columns], axis=0)


def _load(run: Run, name: str, at_s: Floats, report: Floats, before: Report, after: Report) -> Load:
    start_s = float(np.nanmin(run.measured.records.requests.arrival_s))
    seen = np.isfinite(report) & (at_s >= start_s) & (at_s - start_s <= max(before.records.end_s, after.records.end_s))
    at_s, report = at_s[seen] - start_s, report[seen]
    ours, old = (_count(name, simulated, at_s) for simulated in (after, before))
    parts = np.array_split(np.arange(len(at_s)), min(BINS, len(at_s)))
    mean = max(1e-9, float(report.mean())) if len(report) else 1.0
    return Load(
        run=run.name,
        name=name,
        at_s=tuple(float(at_s[p].mean()) for p in parts),
        measured=tuple(float(report[p].mean()) for p in parts),
        simulated=tuple(float(ours[p].mean()) for p in parts),
        before=float(np.abs(old - report).mean() / mean) if len(report) else 0.0,
        after=float(np.abs(ours - report).mean() / mean) if len(report) else 0.0,
    )


def _count(name: str, simulated: Report, at_s: Floats) -> Floats:
    """How many wait (from their entry to the first step) or run (from there to the end) at some times."""
    r = simulated.records.requests
    entry_s = simulated.front.entries_s(r.arrival_s)
    first, last = (r.scheduled_s, r.finished_s) if name == "running" else (entry_s, r.scheduled_s)
    started = np.searchsorted(np.sort(first), at_s, side="right")
    ended = np.searchsorted(np.sort(last), at_s, side="right")
    return np.asarray(started - ended, dtype=np.float64)


KEEP_STEPS = 5_000_000
MASKS = SCRAPE = ("auto", "no")


def calibrate(
    runs: Sequence[Measured],
    deployment: Deployment,
    *,
    fit: Sequence[str] | None = None,
    holdout: float | Sequence[Measured] = 0.3,
    iterations: Iterations | None = None,
    allow: Collection[str] = (),
    seed: int = 0,
    masks: str = "auto",
    scrape: str = "auto",
) -> Calibration:
    """Cost tables with which simulations of measured runs agree with them, and errors on what was held out.

    The same requests are simulated with candidate tables until TTFT, TPOT and JCT (in log, by request and by
    quantile, Huber's loss) lie as close as they can; a factor on each kind of kernel, the host's seconds and those
    that a request waits before the engine move, each held back by what the tables say of their own errors. What the
    runs cannot tell stays as it was, and is named.

    Args:
        runs: Of one engine with one setting, at one load or several.
        deployment: What ran, with the tables to start from.
        fit: The parameters that may move (names of ``Parameter``); None: all that the deployment has.
        holdout: A share, or runs of their own. Of three runs or more a share of whole runs is held out, and
            of their loads neither the least nor the most; else the last requests of each run, which are
            simulated with the others but not looked at.
        iterations: The engine's log of steps, for the same parameters. Of one that holds other runs as well those of
            the requests that are fitted to are taken, as their tokens or the times tell; where neither does a note says
            so, and scores are told as of what the log has seen.
        allow: "doubts": also runs that are told to be doubtful, and runs of untold origin that tables fit badly
            however far they are moved; "simulated": also runs of no engine.
        seed: Of the search's draws, the routers and the intervals; equal inputs give equal answers.
        masks: "auto": dense masks are looked for unless ``fit`` names what may move or the runs are of engines that are
            known to have none; "no": they never are.
        scrape: "auto": where there is no log of such steps, a vLLM's counters that runs keep (``bench(scrape=True)``)
            are fitted as well, over stretches in which it was busy throughout; "no": they never are.

    Raises:
        InputError: The runs do not belong to the deployment or, by what was found, hardly can; they are too few, tell
            nothing, or are not to be trusted.
    """
    if masks not in MASKS:
        raise InputError(f"masks must be one of {', '.join(MASKS)}; it is {masks!r}")
    if scrape not in SCRAPE:
        raise InputError(f"scrape must be one of {', '.join(SCRAPE)}; it is {scrape!r}")
    if masks == "no" and parameters.MASKED in (fit or ()):
        raise InputError("dense masks are either fitted (fit) or never looked for (masks 'no'): give one of the two")
    split = split_of(runs, deployment, holdout, allow)
    check_enough(split.runs)
    told = told_of(split.runs, deployment, iterations, counters=scrape == "auto")
    if told.seen:
        split = _seen(split)
    knobs = parameters.knobs(deployment, logged=told.is_log, masked=parameters.MASKED in (fit or ()))
    problem = Problem(split.fit_result, deployment, knobs, told.evidence, seed)
    problem.check_simulated()
    solution = solve(problem, _free(fit, knobs), seed)
    warnings: list[str] = []
    plain = without_masks([run.measured for run in split.fit_result])
    if fit is None and masks == "auto" and plain:
        warnings = [not_looked_for(plain)]
    elif fit is None and masks == "auto":
        problem, solution, warnings = with_masks(problem, solution, deployment, seed)
    if not solution.report.any():
        raise InputError(
            "the runs must tell at least one parameter; whatever moves, they stay within "
            "1 % of where they are. Measure longer requests at a higher load"
        )
    found = _answer(problem, solution, split, deployment, seed, fit)
    origin = origin_notes(found, split.runs, deployment, allow)
    masked = notes_of(problem.values(solution.z), deployment)
    return replace(found, notes=(*origin, *found.notes, *told.notes, *warnings, *masked), origin=origin)


def _seen(split: Split) -> Split:
    """The same runs, those that are held out under names that say what else was fitted to."""
    words = f'{split.words}; the log of steps may tell of these as well: they are "{SEEN}"'
    return replace(split, runs=tuple(seen(run) for run in split.runs), words=words)


def _free(fit: Sequence[str] | None, knobs: Sequence[parameters.Knob]) -> list[str]:
    names = [knob.name for knob in knobs]
    if fit is None:
        return names
    for name in fit:
        if name not in parameters.NAMES:
            raise UnknownNameError("parameter", name, parameters.NAMES)
        if name not in names:
            raise InputError(f"this deployment has no parameter {name!r}; it has {', '.join(names)}")
    return [*fit, *(["log_step"] if "log_step" in names else [])]


def _answer(
    problem: Problem, solution: Solution, split: Split, deployment: Deployment, seed: int, fit: Sequence[str] | None
) -> Calibration:
    values = problem.values(solution.z)
    found = _parameters(problem, solution)
    new = {id(run): problem.simulate(run, values, keep_steps=KEEP_STEPS) for run in split.runs}
    old = {id(run): problem.simulate(run, {}) for run in split.validation}
    after = [seconds_of(new[id(run)].requests) for run in split.validation]
    before = [seconds_of(old[id(run)].requests) for run in split.validation]
    each = zip(split.validation, before, after, strict=True)
    told = [score for run, first, mine in each for score in scores(run, first, mine, seed)]
    spread, ttft = log_sd(split.validation, after), log_sd(split.validation, after, ("ttft",))
    shares = {knob.name: float(x) for knob, x in zip(problem.knobs, solution.share, strict=True)}
    reach = reach_of(split.fit_result, [new[id(run)] for run in split.fit_result], deployment)
    errors = part_errors(deployment.cost, found, shares, spread, ttft)
    tables = _tables(deployment.cost, values, errors, reach, split)
    return Calibration(
        tables=tables,
        parameters=found,
        scores=tuple(told),
        client_s=tables.front.request_s,
        log_sd=spread,
        split=split.words,
        fit_result=sum(int((run.fit & np.isfinite(run.seconds["jct"])).sum()) for run in split.runs),
        held_out=sum(int((run.validation & np.isfinite(run.seconds["jct"])).sum()) for run in split.runs),
        simulations=problem.simulations,
        changes=changes(split.validation, before, after, seed),
        loads=tuple(
            load
            for run in split.validation
            for load in loads_of(run, Report(old[id(run)], deployment.cost.front), Report(new[id(run)], tables.front))
        ),
        curves=curves(split.validation, before, after),
        host_share=host_share([new[id(run)] for run in split.fit_result], tables),
        notes=(*split.notes, *_notes(found, fit)),
    )


def _parameters(problem: Problem, solution: Solution) -> tuple[Parameter, ...]:
    return tuple(_parameter(knob, solution, k) for k, knob in enumerate(problem.knobs))


def _parameter(knob: parameters.Knob, solution: Solution, k: int) -> Parameter:
    """One that was told but not moved has an interval about where it would have moved to, and neutral in it."""
    z, best, sd = (float(column[k]) for column in (solution.z, solution.best, solution.sd))
    about, value = (best if z == 0.0 else z), knob.value(z)
    low, high = (knob.center * math.exp(knob.log_sd * (about + side * sd)) for side in (-1.96, 1.96))
    return Parameter(
        name=knob.name,
        label=parameters.LABELS[knob.name],
        unit=knob.unit,
        value=value,
        low=min(low, value),
        high=max(high, value),
        prior=knob.neutral,
        report=bool(solution.report[k]),
        effect=float(solution.effect[k]),
        bare=(low, high),
    )


def _tables(
    cost: CostTables, values: Mapping[str, float], errors: tuple[PartError, ...], reach: Reach, split: Split
) -> CostTables:
    """The tables with what is now known of their errors."""
    source = f"{cost.source or 'tables'}, calibrated to {len(split.fit_result)} measured run"
    source += "s" if len(split.fit_result) > 1 else ""
    return replace(parameters.apply(cost, values), source=source, errors=errors, reach=reach)


def _notes(found: Sequence[Parameter], fit: Sequence[str] | None) -> list[str]:
    notes = []
    if not any(p.value != p.prior for p in found):
        notes.append("nothing was moved: no single part of a step stands out from the noise of these runs")
    asked = [p for p in found if not p.report and (fit is None or p.name in fit)]
    if asked:
        notes.append(f"these runs cannot tell, and so left as they were: {'; '.join(p.label for p in asked)}")
    return notes
