"""Measured runs and a deployment become cost tables that agree with them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from lengthwise.measure.calibrate import _parameters as parameters
from lengthwise.measure.calibrate._checks import check_enough, origin_notes
from lengthwise.measure.calibrate._evidence import SEEN, seen, told_of
from lengthwise.measure.calibrate._host_share import host_share
from lengthwise.measure.calibrate._loads import Told, loads_of
from lengthwise.measure.calibrate._masks import not_looked_for, notes_of, with_masks, without_masks
from lengthwise.measure.calibrate._part_errors import part_errors
from lengthwise.measure.calibrate._problem import Problem
from lengthwise.measure.calibrate._reach import reach_of
from lengthwise.measure.calibrate._runs import seconds_of
from lengthwise.measure.calibrate._scores import changes, curves, log_sd, scores
from lengthwise.measure.calibrate._solve import Solution, solve
from lengthwise.measure.calibrate._split import Split, split_of
from lengthwise.measure.calibrate.answer import Calibration, Parameter
from lengthwise.measure.calibrate.iterations import Iterations
from lengthwise.schema.cost_tables import CostTables, PartError, Reach
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.measured import Measured

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
        raise InputError(
            "dense masks are either fitted (fit) or never looked for (masks 'no'): give one of the two"
        )
    split = split_of(runs, deployment, holdout, allow)
    check_enough(split.runs)
    told = told_of(split.runs, deployment, iterations, counters=scrape == "auto")
    if told.seen:
        split = _seen(split)
    knobs = parameters.knobs(deployment, logged=told.is_log, masked=parameters.MASKED in (fit or ()))
    problem = Problem(split.fitted, deployment, knobs, told.evidence, seed)
    problem.check_simulated()
    solution = solve(problem, _free(fit, knobs), seed)
    doubts: list[str] = []
    plain = without_masks([run.measured for run in split.fitted])
    if fit is None and masks == "auto" and plain:
        doubts = [not_looked_for(plain)]
    elif fit is None and masks == "auto":
        problem, solution, doubts = with_masks(problem, solution, deployment, seed)
    if not solution.told.any():
        raise InputError(
            "the runs must tell at least one parameter; whatever moves, they stay within "
            "1 % of where they are. Measure longer requests at a higher load"
        )
    found = _answer(problem, solution, split, deployment, seed, fit)
    origin = origin_notes(found, split.runs, deployment, allow)
    masked = notes_of(problem.values(solution.z), deployment)
    return replace(found, notes=(*origin, *found.notes, *told.notes, *doubts, *masked), origin=origin)


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
    problem: Problem,
    solution: Solution,
    split: Split,
    deployment: Deployment,
    seed: int,
    fit: Sequence[str] | None,
) -> Calibration:
    values = problem.values(solution.z)
    found = _parameters(problem, solution)
    new = {id(run): problem.simulate(run, values, keep_steps=KEEP_STEPS) for run in split.runs}
    old = {id(run): problem.simulate(run, {}) for run in split.held}
    after = [seconds_of(new[id(run)].requests) for run in split.held]
    before = [seconds_of(old[id(run)].requests) for run in split.held]
    each = zip(split.held, before, after, strict=True)
    told = [score for run, first, mine in each for score in scores(run, first, mine, seed)]
    spread, ttft = log_sd(split.held, after), log_sd(split.held, after, ("ttft",))
    shares = {knob.name: float(x) for knob, x in zip(problem.knobs, solution.share, strict=True)}
    reach = reach_of(split.fitted, [new[id(run)] for run in split.fitted], deployment)
    errors = part_errors(deployment.cost, found, shares, spread, ttft)
    tables = _tables(deployment.cost, values, errors, reach, split)
    return Calibration(
        tables=tables,
        parameters=found,
        scores=tuple(told),
        client_s=tables.front.request_s,
        log_sd=spread,
        split=split.words,
        fitted=sum(int((run.fit & np.isfinite(run.seconds["jct"])).sum()) for run in split.runs),
        held_out=sum(int((run.held & np.isfinite(run.seconds["jct"])).sum()) for run in split.runs),
        simulations=problem.simulations,
        changes=changes(split.held, before, after, seed),
        loads=tuple(
            load
            for run in split.held
            for load in loads_of(
                run, Told(old[id(run)], deployment.cost.front), Told(new[id(run)], tables.front)
            )
        ),
        curves=curves(split.held, before, after),
        host_share=host_share([new[id(run)] for run in split.fitted], tables),
        notes=(*split.notes, *_notes(found, fit)),
    )


def _parameters(problem: Problem, solution: Solution) -> tuple[Parameter, ...]:
    return tuple(_parameter(knob, solution, k) for k, knob in enumerate(problem.knobs))


def _parameter(knob: parameters.Knob, solution: Solution, k: int) -> Parameter:
    """One that was told but not moved has an interval about where it would have moved to, and neutral in it."""
    z, best, sd = (float(column[k]) for column in (solution.z, solution.best, solution.sd))
    about, value = (best if z == 0.0 else z), knob.value(z)
    low, high = (knob.centre * math.exp(knob.log_sd * (about + side * sd)) for side in (-1.96, 1.96))
    return Parameter(
        name=knob.name,
        label=parameters.LABELS[knob.name],
        unit=knob.unit,
        value=value,
        low=min(low, value),
        high=max(high, value),
        prior=knob.neutral,
        told=bool(solution.told[k]),
        effect=float(solution.effect[k]),
        bare=(low, high),
    )


def _tables(
    cost: CostTables, values: Mapping[str, float], errors: tuple[PartError, ...], reach: Reach, split: Split
) -> CostTables:
    """The tables with what is now known of their errors."""
    source = f"{cost.source or 'tables'}, calibrated to {len(split.fitted)} measured run"
    source += "s" if len(split.fitted) > 1 else ""
    return replace(parameters.apply(cost, values), source=source, errors=errors, reach=reach)


def _notes(found: Sequence[Parameter], fit: Sequence[str] | None) -> list[str]:
    notes = []
    if not any(p.value != p.prior for p in found):
        notes.append("nothing was moved: no single part of a step stands out from the noise of these runs")
    asked = [p for p in found if not p.told and (fit is None or p.name in fit)]
    if asked:
        notes.append(f"these runs cannot tell, and so left as they were: {'; '.join(p.label for p in asked)}")
    return notes
