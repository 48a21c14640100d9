"""Calibration: fits the cost tables of a deployment to measured runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lengthwise.engine.step_time import step_time
from lengthwise.measure.calibration import measured_runs, parameters, solver
from lengthwise.measure.calibration.iteration_log import Iterations
from lengthwise.measure.calibration.measured_runs import Mask, Run, Split, seconds_of
from lengthwise.measure.calibration.parameters import CONTEXT, MASKED, Prior, part_errors, priors
from lengthwise.measure.calibration.result import METRICS, Calibration, Change, Curve, Load, Parameter, Score
from lengthwise.measure.calibration.solver import Problem, Solution, solve
from lengthwise.measure.calibration.step_evidence import SEEN, step_evidence_of
from lengthwise.measure.prefix_cache import MAX_CACHED_SHARE, cached_tokens
from lengthwise.schema.cost_tables import CostTables, Front, Reach
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.records import Floats, Ints, Records, RequestRecords, RunResult


def host_share(simulations: Sequence[Records], tables: CostTables) -> float:
    """Return the host's share of the time of all simulated steps. The share is 0 if no steps were recorded."""
    host_s = steps_s = 0.0
    for records in simulations:
        if (steps := records.steps) is not None:
            seqs = np.minimum(steps.decode_seqs + steps.prefill_seqs, len(tables.host_s) - 1)
            host_s += float(tables.host_s[seqs].sum())
            steps_s += float((steps.end_s - steps.start_s).sum())
    return min(1.0, host_s / steps_s) if steps_s > 0 else 0.0


def reach_of(runs: Sequence[Run], simulations: Sequence[Records], deployment: Deployment) -> Reach:
    """Return the largest sizes in the fitted runs: a step's tokens and sequences, a chunk, contexts, KV tokens."""
    each = list[tuple[int, ...]]()
    for run, records in zip(runs, simulations, strict=True):
        fitted = run.fit & np.isfinite(run.seconds["jct"])
        context = int((run.workload.prompt_tokens + run.workload.output_tokens)[fitted].max(initial=1))
        prefix = int(context_tokens(run, records.requests, deployment)[run.fit].max(initial=0))
        steps = records.steps
        if steps is None:  # too many to record: take the sizes of single requests
            each.append((context, 1, context, context, context, prefix))
            continue
        prompts = steps.prefill_seqs > 0
        # A step of several prompts has a chunk of their mean or more.
        chunks = np.ceil(steps.prefill_tokens[prompts] / steps.prefill_seqs[prompts])
        tokens, seqs = steps.prefill_tokens + steps.decode_seqs, steps.decode_seqs + steps.prefill_seqs
        kv_tokens = np.append(steps.kv_blocks, 1) * deployment.kv.tokens_per_block
        columns = (tokens, seqs, chunks, np.array([context]), kv_tokens)
        each.append((*(int(column.max(initial=1)) for column in columns), prefix))
    return Reach(*(max(column) for column in zip(*each, strict=True)))


def check_cached(runs: Sequence[Run], problem: Problem, deployment: Deployment, allow: Collection[str]) -> list[str]:
    """Compare the tokens that the server found in its prefix cache with those that the simulation finds.

    Return a note on each run whose prompts share prefixes. Raises InputError if a run's numbers differ by more than
    MAX_CACHED_SHARE of its prompt tokens, unless ``allow`` has "warnings".
    """
    notes = []
    for run in runs:
        if run.workload.prefixes is None:
            continue
        if not deployment.limits.enable_prefix_caching:
            raise InputError(
                f"{run.name} has prompts that share prefixes, so that the deployment must have a prefix cache; it has "
                "none. Set engine.enable_prefix_caching, or leave the run out"
            )
        cached = problem.simulate(run, {}).requests.cached_tokens
        simulated = 0 if cached is None else int(cached.sum())
        counted, of = cached_tokens(run.measured.metadata), int(run.workload.prompt_tokens.sum())
        if counted is None:
            notes.append(f"{run.name}: the server does not count cached tokens; {simulated:,} of {of:,} are simulated")
            continue
        found = counted["found_tokens"]
        words = f"the server found {found:,.0f} of {of:,} prompt tokens of {run.name} in its prefix cache"
        if abs(found - simulated) > MAX_CACHED_SHARE * of and "warnings" not in allow:
            raise InputError(
                f"runs must be of the deployment's prefix cache; {words}, and its simulation finds {simulated:,}. Give "
                "the engine's own num_blocks and block_size, send each run with another salt, or allow it "
                "(--allow-warnings)"
            )
        notes.append(f"{words}, its simulation {simulated:,}")
    return notes


def context_tokens(run: Run, requests: RequestRecords, deployment: Deployment) -> Ints:
    """Return the tokens before the last chunk of each simulated prompt ([n]): cached ones and earlier chunks."""
    budget = deployment.limits.max_num_batched_tokens
    prompt = run.workload.prompt_tokens
    cached = 0 * prompt if requests.cached_tokens is None else requests.cached_tokens
    return np.asarray(cached + (prompt - cached - 1) // budget * budget)


UNMASKED = ("llama.cpp", "sglang", "tgi", "vllm")  # engines that attend by request
MAX_PAIR_RATIO = 2.0  # if a masked pair costs more than this many pairs within a prompt, masks are not the cause


def with_masks(
    problem: Problem, solution: Solution, deployment: Deployment, seed: int, fit: Sequence[str]
) -> tuple[Problem, Solution, list[str]]:
    """Fit the cost of dense masks beside the parameters ``fit``. Keep it if the fit improves significantly.

    An engine with dense masks computes attention over all pairs of tokens in a step, then masks the pairs of different
    requests. Return the problem and the solution, with this parameter if it is kept and as given otherwise, and notes.
    """
    # Expensive masks move the other parameters far, so that the search starts with WIDE models.
    names = [prior.name for prior in problem.priors]
    if MASKED in names:
        return problem, solution, []
    masked = problem.with_priors(priors(deployment, logged="log_step" in names, masked=True))
    names = [prior.name for prior in masked.priors]
    at, notes = names.index(MASKED), []
    free: Mask = np.insert(solution.determined, at, True)
    z = np.insert(solution.best, at, 0.0)
    scale = solver.scale_at(masked, z)
    weight = masked.weights(scale)
    place = np.array(solver.descend(masked, z, free, solver.WIDE, weight, seed)[1])
    place, _, model = solver.refine(masked, place, free, scale, seed)
    before, after = (solver.loss(masked.residuals(one) * weight, one) for one in (z, place))
    if after <= before - solver.SIGNIFICANT_LOSS:
        noise = float(solver.deviations(masked, place, model, scale)[1][at])
        if after <= before - solver.SIGNIFICANT_LOSS * noise:
            found = solve(masked, [*fit, MASKED], seed, place)
            if found.z[at] != 0.0:
                ratio = masked_pair_ratio(masked.values(found.z), deployment)
                if ratio <= MAX_PAIR_RATIO:
                    return masked, found, []
                notes.append(
                    f"dense masks would explain these runs only if a masked pair cost {_times(ratio)} what a "
                    "prompt's own pair costs, which no mask does, so that they were not fitted: the tables may be "
                    "wrong about large steps (profile the operators, or give --iterations)"
                )
    problem.simulations = masked.simulations
    return problem, solution, notes


def unmasked_engines(runs: Sequence[RunResult]) -> tuple[str, ...]:
    """Return the names of the runs' engines, or () unless all compute attention per request, without masks."""
    names = {str(run.metadata.get("engine") or "").lower() for run in runs}
    return tuple(sorted(names)) if names and names <= set(UNMASKED) else ()


def mask_notes(values: dict[str, float], deployment: Deployment) -> list[str]:
    """Return a list with a note on the fitted cost of dense masks. The list is empty if this cost is 0."""
    if values.get(MASKED, 0.0) == 0.0:
        return []
    ratio = masked_pair_ratio(values, deployment)
    note = (
        f"dense masks are fitted: each query and cached token of another request costs {_times(ratio)} what a "
        "prompt's own pair costs; an engine that does not mask the complete batch has none (--masks no)"
    )
    return [note if ratio <= MAX_PAIR_RATIO else f"{note}. More than {MAX_PAIR_RATIO:g} times is doubtful"]


def masked_pair_ratio(values: dict[str, float], deployment: Deployment) -> float:
    """Return the cost of a masked query-key pair as a multiple of the cost of a pair within one prompt."""
    own_s = values.get("prefill", 1.0) * own_pair_s(deployment)
    return values[MASKED] / own_s if own_s > 0 else np.inf


def own_pair_s(deployment: Deployment) -> float:
    """Return the seconds of one layer for one query-key pair of the same prompt, in the largest chunk of a step."""
    # A mask is computed over the batch of a complete step, so that the price of a smaller chunk does not apply.
    chunk = max(1, min(deployment.limits.max_num_batched_tokens, deployment.max_model_len // 2))
    seconds = step_time(deployment.cost)
    more_s = seconds(0, 0, [(chunk, chunk)]) - seconds(0, 0, [(chunk, 0)])
    return more_s / float(deployment.cost.stage_layers.sum()) / chunk**2


def _times(ratio: float) -> str:
    return f"{ratio:.2g} times" if np.isfinite(ratio) else "more than any times"


LEVELS = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
MIN_ROWS = {"p99": 100, "p95": 20}
DRAWS = 200
MIN_LOG_SD = 0.005
CURVE = np.round(np.linspace(0, 1, 101), 2)
Seconds = Mapping[str, Floats]


def scores(run: Run, before: Seconds, after: Seconds, seed: int) -> list[Score]:
    """Return a run's errors on held-out requests by metric and statistic, with block-bootstrap intervals."""
    rng = np.random.default_rng(seed)
    found: list[Score] = []
    for metric in METRICS:
        rows = np.flatnonzero(run.validation & (run.seconds[metric] > 0))
        if not len(rows):
            continue
        measured, old, new = run.seconds[metric][rows], before[metric][rows], after[metric][rows]
        draws = _bootstrap_rows(len(rows), rng)
        for name in ("mean", *LEVELS, "each"):
            if len(rows) >= MIN_ROWS.get(name, 0):
                own_s = np.nan if name == "each" else float(_statistic(name, measured[None])[0])
                errors = (float(_errors(name, measured[None], side[None])[0]) for side in (old, new))
                interval = np.quantile(_errors(name, measured[draws], new[draws]), (0.025, 0.975)).tolist()
                found.append(Score(run.name, metric, name, own_s, *errors, *interval))
    return found


def curves(runs: Sequence[Run], before: Sequence[Seconds], after: Sequence[Seconds]) -> tuple[Curve, ...]:
    """Return measured and simulated quantiles of each metric over the held-out requests of each run."""
    found = []
    for run, old, new in zip(runs, before, after, strict=True):
        for metric in METRICS:
            sides = np.stack([side[metric][run.validation] for side in (run.seconds, old, new)])
            sides = sides[:, np.isfinite(sides).all(axis=0)]
            if sides.shape[1]:
                at = np.quantile(sides, CURVE, axis=1, method="inverted_cdf").T.tolist()
                found.append(Curve(run.name, metric, tuple(CURVE.tolist()), *(tuple(line) for line in at)))
    return tuple(found)


def _errors(name: str, measured: Floats, simulated: Floats) -> Floats:
    if name == "each":
        return np.asarray(np.abs(simulated / measured - 1).mean(axis=-1))
    return np.asarray(_statistic(name, simulated) / _statistic(name, measured) - 1)


def _statistic(name: str, seconds: Floats) -> Floats:
    return np.asarray(seconds.mean(axis=-1) if name == "mean" else np.quantile(seconds, LEVELS[name], axis=-1))


def _bootstrap_rows(n: int, rng: np.random.Generator) -> Ints:
    """Return row indices [draws, n] for a bootstrap of blocks. Requests that share a queue are correlated."""
    length = max(1, round(n**0.5))
    starts = rng.integers(0, n, size=(DRAWS, -(-n // length)))
    rows = (starts[:, :, None] + np.arange(length)) % n
    return np.asarray(rows.reshape(DRAWS, -1)[:, :n])


def changes(runs: Sequence[Run], before: Sequence[Seconds], after: Sequence[Seconds], seed: int) -> tuple[Change, ...]:
    """Return for each metric how errors of held-out requests changed, with an interval of a paired block bootstrap."""
    rng = np.random.default_rng(seed)
    found = []
    for metric in METRICS:
        errors, drawn = [], []
        for run, a, b in zip(runs, before, after, strict=True):
            rows = np.flatnonzero(run.validation & (run.seconds[metric] > 0))
            if len(rows):
                own = np.array([np.abs(x[metric][rows] / run.seconds[metric][rows] - 1) for x in (a, b)])
                errors.append(own)
                drawn.append((own[1] - own[0])[_bootstrap_rows(len(rows), rng)])
        if drawn:
            interval = np.quantile(np.concatenate(drawn, axis=1).mean(axis=1), (0.025, 0.975)).tolist()
            found.append(Change(metric, *np.concatenate(errors, axis=1).mean(axis=1).tolist(), *interval))
    return tuple(found)


def log_sd(runs: Sequence[Run], after: Sequence[Seconds], metrics: Sequence[str] = ("tpot", "jct")) -> float:
    """Return the typical size of log(measured / simulated) over held-out requests: its RMS with outliers clipped.

    The metric is the first of ``metrics`` with values for 10 or more of these requests, or the last if there is none.
    """
    for metric in metrics:
        logs = []
        for run, simulated in zip(runs, after, strict=True):
            rows = np.flatnonzero(run.validation & (run.seconds[metric] > 0))
            logs.append(np.log(run.seconds[metric][rows] / simulated[metric][rows]))
        pooled = np.concatenate(logs)
        if len(pooled) >= 10:
            break
    limit = 3 * max(MIN_LOG_SD, 1.4826 * float(np.median(np.abs(pooled))))
    return max(MIN_LOG_SD, float(np.sqrt(np.mean(np.clip(pooled, -limit, limit) ** 2))))


COUNTERS = {"running": "num_requests_running", "waiting": "num_requests_waiting"}
CLOCKS = ("at_s", "time_s", "t_s")
BINS = 20


@dataclass(frozen=True)
class Simulation:
    """Records of a simulation, and the front end of the cost tables that it used."""

    records: Records
    front: Front

    def count(self, counter: str, at_s: Floats) -> Floats:
        """Return how many requests are "running" or "waiting" (``counter``) at each time, as an engine counts them."""
        r = self.records.requests
        waiting = (self.front.entries_s(r.arrival_s), r.scheduled_s)
        interval_s = waiting if counter == "waiting" else (r.scheduled_s, r.finished_s)
        started, finished = (np.searchsorted(np.sort(times), at_s, side="right") for times in interval_s)
        return np.asarray(started - finished, dtype=np.float64)


def loads_of(run: Run, before: Simulation, after: Simulation) -> list[Load]:
    """Return measured and simulated numbers of running and waiting requests, or [] if the run has no metrics."""
    metrics = run.measured.metadata.get("metrics")
    if not isinstance(metrics, Mapping):
        return []
    clock = next((metrics[name] for name in CLOCKS if name in metrics), None)
    if clock is None or len(clock) < 2:
        return []
    start_s = float(np.nanmin(run.measured.records.requests.arrival_s))
    end_s = max(before.records.end_s, after.records.end_s)
    found = []
    for name, counter in COUNTERS.items():
        # Labels separate engines and models; their counts add up.
        columns = [values for key, values in metrics.items() if counter in key and "by_reason" not in key]
        if not columns:
            continue
        measured = np.sum([np.asarray(column, dtype=np.float64) for column in columns], axis=0)
        at_s = np.asarray(clock, dtype=np.float64)
        inside = np.isfinite(measured) & (at_s >= start_s) & (at_s - start_s <= end_s)
        at_s, measured = at_s[inside] - start_s, measured[inside]
        new, old = after.count(name, at_s), before.count(name, at_s)
        parts = np.array_split(np.arange(len(at_s)), min(BINS, len(at_s)))
        mean = max(1e-9, float(measured.mean())) if len(measured) else 1.0
        at, own, simulated = (tuple(float(column[p].mean()) for p in parts) for column in (at_s, measured, new))
        off = (float(np.abs(side - measured).mean() / mean) if len(measured) else 0.0 for side in (old, new))
        found.append(Load(run.name, name, at, own, simulated, *off))
    return found


MAX_LOG_STEPS = 5_000_000


def calibrate(
    runs: Sequence[RunResult],
    deployment: Deployment,
    *,
    fit: Sequence[str] | None = None,
    holdout: float | Sequence[RunResult] = 0.3,
    iterations: Iterations | None = None,
    allow: Collection[str] = (),
    seed: int = 0,
    masks: str = "auto",
    scrape: str = "auto",
) -> Calibration:
    """Fit cost tables so that simulations agree with measured runs, and report errors on held-out requests.

    The fit simulates the runs' requests with candidate tables. It minimizes Huber's loss of log errors of TTFT, TPOT
    and JCT, over groups of requests and over quantiles. It scales kinds of kernels and changes the host's seconds; the
    tables' stated errors are the priors. A parameter that the runs do not determine keeps its value.

    Args:
        runs: Runs of one engine with the same settings, at one load or several.
        deployment: The engine's deployment, with the cost tables to start from.
        fit: Names of the parameters to fit (see ``Parameter``). If None, all parameters of the deployment are fitted.
        holdout: The share of requests to hold out, or separate runs to hold out. With three or more loads, a share
            holds out complete loads, but not the lowest or the highest. With fewer, it holds out a run's last requests,
            which are simulated but not fitted.
        iterations: The engine's log of steps. Its steps are fitted too, except those of other runs and of held-out
            requests. If neither tokens nor times identify these, a note states this and scores are named "seen".
        allow: "warnings" also accepts runs with warnings, and runs of unknown origin that no tables fit well;
            "simulated" also accepts simulated runs.
        masks: "auto" looks for dense masks unless ``fit`` is given or the engines have none; "no" never does.
        scrape: "auto" fits the vLLM counters that runs recorded if there is no usable log; "no" never does.

    Raises:
        InputError: The runs are not of this deployment, are too few, determine no parameter, or have warnings.
    """
    for name, value in (("masks", masks), ("scrape", scrape)):
        if value not in {"auto", "no"}:
            raise InputError(f"{name} must be one of auto, no; it is {value!r}")
    if deployment.parallel.dp > 1:
        raise InputError(
            f"a calibration is not modelled with data-parallel ranks yet; dp is {deployment.parallel.dp}. Set dp = 1"
        )
    if masks == "no" and MASKED in (fit or ()):
        raise InputError("dense masks are either fitted (fit) or never looked for (masks 'no'): give one of the two")
    split = measured_runs.split_of(runs, deployment, holdout, allow)
    measured_runs.check_enough(split.runs)
    steps = step_evidence_of(split.runs, deployment, iterations, counters=scrape == "auto")
    if steps.seen:
        split = mark_seen(split)
    prior = priors(deployment, logged=steps.is_log, masked=MASKED in (fit or ()))
    problem = Problem(split.fitted, deployment, prior, steps.evidence, seed)
    contexts = zip(split.fitted, problem.simulate_given(), strict=True)
    has_context = any(context_tokens(run, given, deployment)[run.fit].any() for run, given in contexts)
    notes = check_cached(split.runs, problem, deployment, allow)
    free = [name for name in _free(fit, prior) if has_context or name != CONTEXT]
    solution = solve(problem, free, seed)
    unmasked = unmasked_engines([run.measured for run in split.fitted])
    if fit is None and masks == "auto" and unmasked:
        reason = f"{', '.join(unmasked)} attends by request (to fit them anyway, name masked in --fit)"
        notes.append(f"dense masks were not looked for: {reason}")
    elif fit is None and masks == "auto":
        problem, solution, of_masks = with_masks(problem, solution, deployment, seed, free)
        notes += of_masks
    if not solution.determined.any():
        found = "no parameter changes their predictions by more than 1 %. Measure longer requests at a higher load"
        raise InputError(f"the runs must determine at least one parameter; {found}")
    result = _result(problem, solution, split, deployment, seed, fit)
    origin = measured_runs.origin_notes(result, split.runs, deployment, allow)
    masked = mask_notes(problem.values(solution.z), deployment)
    return replace(result, notes=(*origin, *result.notes, *steps.notes, *notes, *masked), origin=origin)


def mark_seen(split: Split) -> Split:
    """Return the split with "seen" in the names of held-out runs, because the fitted log may include their steps."""
    words = f'{split.words}; the log of steps may include these as well: they are "{SEEN}"'
    runs = (replace(run, name=f"{run.name} ({SEEN})") if run.validation.any() else run for run in split.runs)
    return replace(split, runs=tuple(runs), words=words)


def _free(fit: Sequence[str] | None, known: Sequence[Prior]) -> list[str]:
    names = [prior.name for prior in known]
    if fit is None:
        return names
    for name in fit:
        if name not in parameters.NAMES:
            raise UnknownNameError("parameter", name, parameters.NAMES)
        if name not in names:
            raise InputError(f"this deployment has no parameter {name!r}; it has {', '.join(names)}")
    return [*fit, *(["log_step"] if "log_step" in names else [])]


def _result(
    problem: Problem, solution: Solution, split: Split, deployment: Deployment, seed: int, fit: Sequence[str] | None
) -> Calibration:
    cost, values = deployment.cost, problem.values(solution.z)
    found = []
    for k, prior in enumerate(problem.priors):
        z, best, sd = (float(column[k]) for column in (solution.z, solution.best, solution.sd))
        # A determined parameter that did not move has an interval about its best value, widened to contain neutral.
        about, value = (best if z == 0.0 else z), prior.value(z)
        low, high = (prior.center * math.exp(prior.log_sd * (about + side * sd)) for side in (-1.96, 1.96))
        found.append(
            Parameter(
                prior.name, parameters.LABELS[prior.name], prior.unit, value, min(low, value), max(high, value),
                prior.neutral, bool(solution.determined[k]), float(solution.effect[k]), (low, high),
            )
        )  # fmt: skip
    new = {id(run): problem.simulate(run, values, max_log_steps=MAX_LOG_STEPS) for run in split.runs}
    old = {id(run): problem.simulate(run, {}) for run in split.validation}
    before, after = ([seconds_of(side[id(run)].requests) for run in split.validation] for side in (old, new))
    spread, ttft_spread = log_sd(split.validation, after), log_sd(split.validation, after, ("ttft",))
    shares = {prior.name: float(x) for prior, x in zip(problem.priors, solution.share, strict=True)}
    fitted = [new[id(run)] for run in split.fitted]
    source = cost.evidence.source or "tables"
    evidence = replace(
        cost.evidence,
        source=f"{source}, calibrated to {len(fitted)} measured run{'s' if len(fitted) > 1 else ''}",
        errors=part_errors(cost, found, shares, spread, ttft_spread),
        reach=reach_of(split.fitted, fitted, deployment),
    )
    tables = replace(parameters.apply(cost, values), evidence=evidence)
    fitted_count, held_out_count = measured_runs.finished_counts(split.runs)
    sides = [
        (run, Simulation(old[id(run)], cost.front), Simulation(new[id(run)], tables.front)) for run in split.validation
    ]
    notes = list(split.notes)
    if not any(p.value != p.prior for p in found):
        notes.append("no parameter was changed: no change improves the agreement by more than the noise of these runs")
    by_name = {p.name: p for p in found}
    if not by_name[CONTEXT].determined and (fit is None or CONTEXT in fit):
        (sd,) = (error.log_sd for error in evidence.errors if error.part == CONTEXT)
        notes.append(
            "these runs do not show what prefill attention to cached tokens costs: its times are those of the tables "
            f"given, and 95 % of them are taken to be within a factor of {math.exp(1.96 * sd):.2g}. For traffic with "
            "shared prompts, add a run with `lengthwise bench --shared-prefix`"
        )
    requested = [p for p in found if p.name != CONTEXT and (fit is None or p.name in fit)]
    if undetermined := [p.label for p in requested if not p.determined]:
        notes.append(f"these runs do not determine, so that the tables' values remain: {'; '.join(undetermined)}")
    each = zip(split.validation, before, after, strict=True)
    return Calibration(
        tables=tables,
        parameters=tuple(found),
        scores=tuple(score for run, b, a in each for score in scores(run, b, a, seed)),
        client_s=tables.front.request_s,
        log_sd=spread,
        split=split.words,
        fitted=fitted_count,
        held_out=held_out_count,
        simulations=problem.simulations,
        changes=changes(split.validation, before, after, seed),
        loads=tuple(load for run, old_side, new_side in sides for load in loads_of(run, old_side, new_side)),
        curves=curves(split.validation, before, after),
        host_share=host_share(fitted, tables),
        notes=tuple(notes),
    )
