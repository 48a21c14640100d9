"""What the tables say of logged steps, part by part, so that a change of scales is a sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lengthwise.measure.calibration.busy_periods import Stretches, counters_of, stretches_of
from lengthwise.measure.calibration.iteration_log import LEAST_STEPS, Iterations, fitted_steps, in_cells, not_of_steps
from lengthwise.measure.calibration.measured_runs import BLOCKS, Run
from lengthwise.measure.calibration.parameters import host_line
from lengthwise.measure.calibration.result import METRICS
from lengthwise.schema.cost_tables import MERGED, CostTables, grid_axis
from lengthwise.schema.deployment import Deployment

Floats = npt.NDArray[np.float64]


def step_parts(log: Iterations, deployment: Deployment) -> dict[str, Floats]:
    """[m] seconds of each step by part: work, prefill, decode, comm; and counts: sequences, pairs of others.

    The latter are pairs of a query and a key of two sequences, over all layers.

    A prompt's chunk is the mean of its step, without context before it; the KV tokens of decodes are what the
    cache held, less the prompts' own.
    """
    cost = deployment.cost
    layers = float(cost.stage_layers.sum())
    tokens, seqs = log.prefill_tokens + log.decode_seqs, log.prefill_seqs + log.decode_seqs
    capacity = deployment.kv.num_blocks * deployment.kv.block_size
    held = np.nan_to_num(log.kv_share) * capacity - log.prefill_tokens
    kv_tokens = np.maximum(log.decode_seqs, held)
    send = _row(cost.send_s, tokens) * (len(cost.stage_layers) - 1)
    return {
        "work": layers * _row(cost.layer_s, tokens) + _row(cost.first_s, tokens) + _row(cost.head_s, seqs),
        "comm": layers * _row(cost.comm_s, tokens) + send,
        "prefill": layers * _prefill(cost, log),
        "decode": layers * _decode(cost, log.decode_seqs, kv_tokens, log.prefill_seqs > 0),
        "sequences": seqs,
        "pairs": layers * _pairs_of_others(log, kv_tokens),
    }


def step_seconds(parts: Mapping[str, Floats], values: Mapping[str, float]) -> Floats:
    """[m] seconds of the steps with these scales and this host."""
    return np.asarray(kernels_of(parts, values) + values["log_step"] + values["host_sequence"] * parts["sequences"])


def kernels_of(parts: Mapping[str, Floats], values: Mapping[str, float]) -> Floats:
    """[m] seconds without the host's."""
    kernels = sum(parts[name] * values.get(name, 1.0) for name in ("work", "comm", "prefill", "decode"))
    return np.asarray(kernels + values.get("masked", 0.0) * parts["pairs"])


def prompt_attention(cost: CostTables, prompt_tokens: npt.NDArray[np.int64], most: int) -> Floats:
    """[n] seconds of a layer's attention over whole prompts, computed alone and at most so many tokens a step.

    As everywhere here, merged tables (Vidur's) are read without the context before a chunk.
    """
    seconds, done = np.zeros(len(prompt_tokens)), np.zeros(len(prompt_tokens))
    while (left := prompt_tokens - done).max(initial=0.0) > 0:
        chunk = np.minimum(left, most)
        merged = cost.rule.kind == MERGED
        own = _step_lookup(cost.prefill_s, chunk, 0 * done) if merged else _bilinear(cost.prefill_s, chunk, done)
        seconds += np.where(left > 0, own, 0.0)
        done = done + chunk
    return seconds


def _pairs_of_others(log: Iterations, kv_tokens: Floats) -> Floats:
    """[m] pairs of a query and a key that are of two sequences; prompts are of equal chunks."""
    cached = np.where(log.decode_seqs > 0, kv_tokens, 0.0)
    own = cached + log.prefill_tokens**2 / np.maximum(1, log.prefill_seqs)
    return np.asarray((log.prefill_tokens + log.decode_seqs) * (cached + log.prefill_tokens) - own)


def _prefill(cost: CostTables, log: Iterations) -> Floats:
    prompts = np.maximum(1, log.prefill_seqs)
    if cost.rule.kind == MERGED:  # sqrt of the sum of squares of equal chunks
        factor = np.where(log.prefill_seqs > 1, cost.rule.merge_factor, 1.0)
        one = factor * _step_lookup(cost.prefill_s, log.prefill_tokens / np.sqrt(prompts), np.zeros(len(log)))
        return np.where(log.prefill_seqs > 0, one, 0.0)
    return log.prefill_seqs * _bilinear(cost.prefill_s, log.prefill_tokens / prompts, np.zeros(len(log)))


def _decode(cost: CostTables, seqs: Floats, kv_tokens: Floats, additional: npt.NDArray[np.bool_]) -> Floats:
    """Seconds of a layer's decode attention; longer in the steps ``additional`` prompts, where the tables say so."""
    if cost.rule.kind == MERGED:
        factor = np.where(seqs > 1, cost.rule.merge_factor, 1.0)
        steps = np.ceil(kv_tokens / np.maximum(1, seqs) / cost.rule.step_tokens)
        return np.where(seqs > 0, factor * _step_lookup(cost.decode_s, seqs, steps), 0.0)
    seconds = _bilinear(cost.decode_s, seqs, kv_tokens)
    if cost.beside_prompts is not None:
        seconds = seconds * np.where(additional, _bilinear(cost.beside_prompts, seqs, kv_tokens), 1.0)
    return np.where(seqs > 0, seconds, 0.0)


def _row(table: Floats, at: Floats) -> Floats:
    return np.interp(at, np.arange(len(table)), table)


def _step_lookup(table: Floats, i: Floats, j: Floats) -> Floats:
    rows = np.minimum(np.round(i).astype(np.int64), table.shape[0] - 1)
    return np.asarray(table[rows, np.minimum(j.astype(np.int64), table.shape[1] - 1)])


def _bilinear(table: Floats, x: Floats, y: Floats) -> Floats:
    (i, u), (j, v) = _cell(x, table.shape[0]), _cell(y, table.shape[1])
    low = table[i, j] + v * (table[i, j + 1] - table[i, j])
    high = table[i + 1, j] + v * (table[i + 1, j + 1] - table[i + 1, j])
    return np.asarray(low + u * (high - low))


def _cell(values: Floats, points: int) -> tuple[npt.NDArray[np.int64], Floats]:
    axis = grid_axis(2**30)[:points].astype(np.float64)
    index = np.clip(np.searchsorted(axis, values, side="right") - 1, 0, points - 2)
    return index, (values - axis[index]) / (axis[index + 1] - axis[index])


Ints = npt.NDArray[np.int64]


def stretch_parts(found: Stretches, prompt_tokens: Ints, deployment: Deployment) -> dict[str, Floats]:
    """[m] as ``step_parts``, summed over the steps of each stretch; "steps" and the host's "rest" beside them.

    Args:
        found: The stretches.
        prompt_tokens: Of the run's prompts, whose mixture each stretch's prompts are taken to be.
        deployment: With the tables.
    """
    stretch, steps, kinds = kinds_of(found, deployment)
    each = step_parts(kinds, deployment)
    parts = {name: _sum_by_period(stretch, steps * seconds, len(found)) for name, seconds in each.items()}
    step_s, sequence_s = host_line(deployment.cost.host_s)
    seqs = kinds.prefill_seqs + kinds.decode_seqs
    host_s = np.interp(seqs, np.arange(len(deployment.cost.host_s)), deployment.cost.host_s)
    parts["rest"] = _sum_by_period(stretch, steps * (host_s - step_s - sequence_s * seqs), len(found))
    parts["steps"] = _sum_by_period(stretch, steps, len(found))
    most = deployment.limits.max_num_batched_tokens
    token_s = prompt_attention(deployment.cost, prompt_tokens, most).sum() / max(1, prompt_tokens.sum())
    return parts | {"prefill": float(deployment.cost.stage_layers.sum()) * token_s * found.prompt_tokens}


def busy_period_seconds(parts: Mapping[str, Floats], values: Mapping[str, float]) -> Floats:
    """[m] seconds of the stretches with these scales and this host."""
    host_s = values["host_step"] * parts["steps"] + values["host_sequence"] * parts["sequences"]
    return np.asarray(kernels_of(parts, values) + host_s + parts["rest"])


def kinds_of(found: Stretches, deployment: Deployment) -> tuple[Ints, Floats, Iterations]:
    """[k] kinds of steps: the stretch that each is of, how many steps it stands for, and what one of them is.

    Every step decodes for as many sequences; prompts' tokens are in the kinds that have more tokens than that, and in
    all of them the prompts' tokens and the decodes are those that were counted.
    """
    capacity = deployment.kv.num_blocks * deployment.kv.block_size
    rows = [_kinds(found, i, deployment.limits.max_num_batched_tokens) for i in range(len(found))]
    stretch = np.repeat(np.arange(len(found)), [len(steps) for steps, _ in rows])
    steps = np.concatenate([steps for steps, _ in rows])
    tokens = np.concatenate([tokens for _, tokens in rows])
    prompts = tokens * (found.prompts / np.maximum(1.0, found.prompt_tokens))[stretch]
    kinds = Iterations(
        prefill_seqs=prompts,
        prefill_tokens=tokens,
        decode_seqs=(found.decodes / _sum_by_period(stretch, steps, len(found)))[stretch],
        kv_share=(found.kv_tokens[stretch] + tokens) / capacity,
        seconds=np.full(len(steps), np.nan),
        steps=np.ones(len(steps), dtype=np.int64),
    )
    return stretch, steps, kinds


def _kinds(found: Stretches, i: int, max_tokens: int) -> tuple[Floats, Floats]:
    """Steps and their prompts' tokens, by kind, of one stretch.

    vLLM counts a prompt's tokens in the step in which it is through: what is more than a step may take was computed
    in steps before, which were counted with those that decode alone.
    """
    some = np.flatnonzero(found.counts[i])
    steps, own = found.counts[i][some], _own_tokens(found, i)
    more = np.maximum(0.0, _tokens(found, i, some) - own)
    if more.sum() == 0:
        more = np.ones(len(some))
    tokens = more * (found.prompt_tokens[i] / (steps * more).sum())
    parts = np.ceil(tokens / max(1.0, max_tokens - own))
    chunks = np.maximum(0.0, parts - 1) * steps
    alone = tokens == 0
    left = steps * (1 - alone * min(1.0, chunks.sum() / max(1.0, (steps * alone).sum())))
    split = np.maximum(1.0, parts)
    return np.where(parts > 1, steps * split, left), tokens / split


def _own_tokens(found: Stretches, i: int) -> float:
    """Mean tokens of a step that were made in it."""
    return float((found.decodes[i] + found.prompts[i]) / found.steps[i])


def _tokens(found: Stretches, i: int, some: Ints) -> Floats:
    """Mean tokens of the steps in some buckets: what one makes where that is in it, above it as all of them add up.

    Of the buckets above, all means are equally far between their bounds.
    """
    low = np.concatenate([[0.0], found.edges])[some]
    high = np.append(found.edges, 2 * found.edges[-1])[some]
    steps, own = found.counts[i][some], _own_tokens(found, i)
    told = np.clip(own, low, high)
    above = low >= own
    rest = found.prompt_tokens[i] + own * found.steps[i] - (steps * told)[~above].sum()
    spread = (steps * (high - low))[above].sum()
    share = np.clip((rest - (steps * low)[above].sum()) / spread, 0.0, 1.0) if spread > 0 else 0.0
    return np.asarray(np.where(above, low + share * (high - low), told))


def _sum_by_period(stretch: Ints, each: Floats, m: int) -> Floats:
    return np.asarray(np.bincount(stretch, weights=each, minlength=m), dtype=np.float64)


Parts = Mapping[str, Floats]
STEPS_SAME = 10
IMPROVEMENT = len(METRICS) * BLOCKS
"""So many observations is all that is told of steps worth: as many as a run's requests."""
OFF = "--scrape no leaves them out"
SEEN = "seen by the log"


@dataclass(frozen=True)
class Evidence:
    """[m] seconds of steps, alone or summed, that the tables must come to.

    Attributes:
        seconds: What the engine took.
        parts: What the tables say, by part.
        priced: The tables' seconds with the parameters' values.
        block: Which block of time each is of.
        weight: How much each counts.
    """

    seconds: Floats
    parts: Parts
    priced: Callable[[Parts, Mapping[str, float]], Floats]
    block: Ints
    weight: Floats

    def residuals(self, values: Mapping[str, float]) -> Floats:
        """[m] log(tables / engine)."""
        return np.asarray(np.log(self.priced(self.parts, values) / self.seconds))


@dataclass(frozen=True)
class StepsTold:
    """What of it is fitted to.

    Attributes:
        evidence: None: nothing.
        notes: What a reader must know of it.
        is_log: Whether steps are of a log, whose clock sees a part of the host.
        seen: Whether held-out requests may be in it.
    """

    evidence: Evidence | None
    notes: list[str]
    is_log: bool = False
    seen: bool = False


def told_of(runs: Sequence[Run], deployment: Deployment, iterations: Iterations | None, *, counters: bool) -> StepsTold:
    """Of all runs: the log where there is one that tells of those that are fitted to, else their counters if asked."""
    told = StepsTold(None, []) if iterations is None else _of_log(iterations, runs, deployment)
    if told.evidence is not None or not counters:
        return told
    evidence, notes = counted([run for run in runs if run.fit.any()], deployment)
    return StepsTold(evidence, [*told.notes, *notes])


def seen(run: Run) -> Run:
    """The run under a name that says so, if any of its requests is held out."""
    return replace(run, name=f"{run.name} ({SEEN})") if run.validation.any() else run


def _of_log(log: Iterations, runs: Sequence[Run], deployment: Deployment) -> StepsTold:
    fitted = sum(bool(run.fit.any()) for run in runs)
    taken = fitted_steps(log, runs)
    if why := not_of_steps(log if taken is None else log.taken(taken), runs):
        return StepsTold(None, [f"the log of steps was not fitted: {why}"])
    if taken is None:
        return StepsTold(logged(log, deployment, fitted), [_not_told(log)], is_log=True, seen=True)
    of = f"of the {len(log):,} steps of the log {int(taken.sum()):,} are surely of requests that are fitted to"
    if taken.sum() < LEAST_STEPS:
        why = "hold out a run of its own, or give the log of the engine that served the runs"
        return StepsTold(None, [f"the log of steps was not fitted: {of}, {LEAST_STEPS} is the least; {why}"])
    note = f"{of}, and only these were fitted"
    return StepsTold(logged(log.taken(taken), deployment, fitted), [note], is_log=True)


def _not_told(log: Iterations) -> str:
    """That held-out requests may be in the log."""
    return (
        f"which of the {len(log):,} steps of the log are of held-out requests cannot be told, by no run's tokens nor "
        f"by times, so all were fitted: scores are of requests {SEEN}, unless it is of the fitted runs alone. A log "
        "with the times that vLLM writes, and records of `lengthwise bench`, tell"
    )


def logged(iterations: Iterations, deployment: Deployment, runs: int) -> Evidence:
    """Of a log of steps, which stands beside so many runs as one more."""
    log = in_cells(iterations)
    m, steps = len(log), np.minimum(log.steps, STEPS_SAME)
    return Evidence(
        seconds=log.seconds,
        parts=step_parts(log, deployment),
        priced=step_seconds,
        block=runs * BLOCKS + np.arange(m) * BLOCKS // m,
        weight=np.sqrt(steps * min(1.0, IMPROVEMENT / steps.sum())),
    )


def counted(runs: Sequence[Run], deployment: Deployment) -> tuple[Evidence | None, list[str]]:
    """Of the counters that runs keep (``bench(scrape=True)``), if any does; and what a reader must know of them.

    All stretches together count as much as a log of steps does; they are in the blocks of time of their run's requests.
    """
    kept = [(r, run) for r, run in enumerate(runs) if isinstance(run.measured.metadata.get("metrics"), Mapping)]
    if kept and (why := _barred(deployment)):
        return None, [f"the server's counters were not fitted: {why}"]
    told = [(r, run, _stretches(run, deployment)) for r, run in kept]
    notes = [_not_fitted(run, found) for _, run, found in told if isinstance(found, str)]
    good = [(r, run, found) for r, run, found in told if isinstance(found, Stretches)]
    if not good:
        return None, notes
    return _busy_period_evidence(good, deployment), [_fit_result([found for _, _, found in good]), *notes]


def _busy_period_evidence(report: Sequence[tuple[int, Run, Stretches]], deployment: Deployment) -> Evidence:
    """Of the stretches of runs, each with its number among those that are fitted to."""
    parts = [stretch_parts(found, run.workload.prompt_tokens, deployment) for _, run, found in report]
    sizes = [(r, len(found)) for r, _, found in report]
    m = sum(size for _, size in sizes)
    return Evidence(
        seconds=np.concatenate([found.seconds for _, _, found in report]),
        parts={name: np.concatenate([each[name] for each in parts]) for name in parts[0]},
        priced=busy_period_seconds,
        block=np.concatenate([r * BLOCKS + np.arange(size) * BLOCKS // size for r, size in sizes]),
        weight=np.full(m, np.sqrt(min(1.0, IMPROVEMENT / m))),
    )


def _stretches(run: Run, deployment: Deployment) -> Stretches | str:
    counters = counters_of(run.measured.metadata["metrics"])
    return counters if isinstance(counters, str) else stretches_of(run, counters, deployment.limits)


def _barred(deployment: Deployment) -> str:
    """Why sums of a server's steps are not sums of their seconds; empty where they are."""
    if deployment.parallel.replicas > 1:
        return f"they are sums over {deployment.parallel.replicas} replicas, whose steps overlap"
    return "steps of pipeline stages overlap" if deployment.parallel.pp > 1 else ""


def _fit_result(found: Sequence[Stretches]) -> str:
    steps = int(sum(each.steps.sum() for each in found))
    of = f"{len(found)} run{'s' if len(found) > 1 else ''}"
    return (
        f"the server's own counters were fitted as well: {steps:,} steps in {sum(map(len, found)):,} stretches of {of} "
        f"in which it was busy throughout ({OFF})"
    )


def _not_fitted(run: Run, cause: str) -> str:
    return f"the server's counters of {run.name} were not fitted: {cause}"
