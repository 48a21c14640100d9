"""Evidence of steps: measured seconds, and the seconds that cost tables predict for each part of the steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lengthwise.measure.calibration import iteration_log
from lengthwise.measure.calibration.busy_periods import BusyPeriods, busy_periods_of, counters_of
from lengthwise.measure.calibration.iteration_log import MIN_STEPS, Iterations
from lengthwise.measure.calibration.measured_runs import BLOCKS, Run
from lengthwise.measure.calibration.parameters import linear_host_cost
from lengthwise.measure.calibration.result import METRICS
from lengthwise.schema.cost_tables import MERGED, CostTables, grid_axis
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.records import Floats, Ints


def step_parts(log: Iterations, deployment: Deployment) -> dict[str, Floats]:
    """Return predicted seconds of [m] steps by part of the tables, and their numbers of sequences and masked pairs."""
    # "pairs" are of a query and a key of two sequences, over all layers. A chunk is taken as the mean of its step's,
    # without cached context; decodes read the cache less the prompts' own tokens.
    cost = deployment.cost
    layers = float(cost.stage_layers.sum())
    tokens, seqs = log.prefill_tokens + log.decode_seqs, log.prefill_seqs + log.decode_seqs
    capacity = deployment.kv.kv_tokens(deployment.max_model_len)
    kv_tokens = np.maximum(log.decode_seqs, np.nan_to_num(log.kv_share) * capacity - log.prefill_tokens)
    prompts, no_context = np.maximum(1, log.prefill_seqs), np.zeros(len(log))
    if cost.rule.kind == MERGED:
        # Vidur's rule: equal chunks count as one of the root of their sum of squares.
        factor = np.where(log.prefill_seqs > 1, cost.rule.merge_factor, 1.0)
        one = factor * _nearest(cost.prefill_s, log.prefill_tokens / np.sqrt(prompts), no_context)
        prefill = np.where(log.prefill_seqs > 0, one, 0.0)
        factor = np.where(log.decode_seqs > 1, cost.rule.merge_factor, 1.0)
        rows = np.ceil(kv_tokens / np.maximum(1, log.decode_seqs) / cost.rule.step_tokens)
        decode = factor * _nearest(cost.decode_s, log.decode_seqs, rows)
    else:
        prefill = log.prefill_seqs * _bilinear(cost.prefill_s, log.prefill_tokens / prompts, no_context)
        decode = _bilinear(cost.decode_s, log.decode_seqs, kv_tokens)
        if cost.beside_prompts is not None:
            factor = _bilinear(cost.beside_prompts, log.decode_seqs, kv_tokens)
            decode = decode * np.where(log.prefill_seqs > 0, factor, 1.0)
    cached = np.where(log.decode_seqs > 0, kv_tokens, 0.0)
    own_pairs = cached + log.prefill_tokens**2 / prompts
    send = _row(cost.send_s, tokens) * (len(cost.stage_layers) - 1)
    return {
        "work": layers * _row(cost.layer_s, tokens) + _row(cost.embedding_s, tokens) + _row(cost.head_s, seqs),
        "comm": layers * _row(cost.comm_s, tokens) + send,
        "prefill": layers * prefill,
        "decode": layers * np.where(log.decode_seqs > 0, decode, 0.0),
        "sequences": seqs,
        "pairs": layers * (tokens * (cached + log.prefill_tokens) - own_pairs),
    }


def step_seconds(parts: Mapping[str, Floats], values: Mapping[str, float]) -> Floats:
    """Return the predicted seconds of logged steps ([m]) with these parameter values."""
    return np.asarray(kernel_seconds(parts, values) + values["log_step"] + values["host_sequence"] * parts["sequences"])


def kernel_seconds(parts: Mapping[str, Floats], values: Mapping[str, float]) -> Floats:
    """Return the predicted seconds of all kernels, without the host ([m])."""
    names = ("work", "comm", "prefill", "context", "decode")
    kernels = sum(parts[name] * values.get(name, 1.0) for name in names if name in parts)
    return np.asarray(kernels + values.get("masked", 0.0) * parts["pairs"])


def prompt_attention(cost: CostTables, prompt_tokens: Ints, max_tokens: int) -> tuple[Floats, Floats]:
    """Return the seconds of one layer's attention for prompts ([n]) that run alone in chunks of ``max_tokens``.

    The first array has the seconds of the chunks without context, the second what their context adds.
    """
    seconds, context_s, done = (np.zeros(len(prompt_tokens)) for _ in range(3))
    merged = cost.rule.kind == MERGED  # as in ``step_parts``, read without the context before a chunk
    while (left := prompt_tokens - done).max(initial=0.0) > 0:
        chunk = np.minimum(left, max_tokens)
        own = (_nearest if merged else _bilinear)(cost.prefill_s, chunk, 0 * done)
        seconds += np.where(left > 0, own, 0.0)
        context_s += 0.0 if merged else np.where(left > 0, _bilinear(cost.prefill_s, chunk, done) - own, 0.0)
        done = done + chunk
    return seconds, context_s


def _row(table: Floats, at: Floats) -> Floats:
    return np.interp(at, np.arange(len(table)), table)


def _nearest(table: Floats, i: Floats, j: Floats) -> Floats:
    rows = np.minimum(np.round(i).astype(np.int64), table.shape[0] - 1)
    return np.asarray(table[rows, np.minimum(j.astype(np.int64), table.shape[1] - 1)])


def _bilinear(table: Floats, x: Floats, y: Floats) -> Floats:
    def cell(values: Floats, points: int) -> tuple[Ints, Floats]:
        axis = grid_axis(2**30)[:points].astype(np.float64)
        index = np.clip(np.searchsorted(axis, values, side="right") - 1, 0, points - 2)
        return index, (values - axis[index]) / (axis[index + 1] - axis[index])

    (i, u), (j, v) = cell(x, table.shape[0]), cell(y, table.shape[1])
    low = table[i, j] + v * (table[i, j + 1] - table[i, j])
    high = table[i + 1, j] + v * (table[i + 1, j + 1] - table[i + 1, j])
    return np.asarray(low + u * (high - low))


def busy_period_parts(found: BusyPeriods, prompt_tokens: Ints, deployment: Deployment) -> dict[str, Floats]:
    """Return the sums of ``step_parts`` over the steps of every busy period ([m]).

    "prefill" and the key "context" are estimates from the run's prompts, "steps" the number of steps, and "rest" the
    host's seconds beyond the linear cost.
    """
    period, steps, kinds = step_kinds(found, deployment)
    each = step_parts(kinds, deployment)
    parts = {name: _sum_by_period(period, steps * seconds, len(found)) for name, seconds in each.items()}
    step_s, sequence_s = linear_host_cost(deployment.cost.host_s)
    seqs = kinds.prefill_seqs + kinds.decode_seqs
    rest_s = _row(deployment.cost.host_s, seqs) - step_s - sequence_s * seqs
    parts["rest"] = _sum_by_period(period, steps * rest_s, len(found))
    parts["steps"] = _sum_by_period(period, steps, len(found))
    attention_s = prompt_attention(deployment.cost, prompt_tokens, deployment.limits.max_num_batched_tokens)
    tokens = float(deployment.cost.stage_layers.sum()) * found.prompt_tokens / max(1, prompt_tokens.sum())
    return parts | {name: each.sum() * tokens for name, each in zip(("prefill", "context"), attention_s, strict=True)}


def busy_period_seconds(parts: Mapping[str, Floats], values: Mapping[str, float]) -> Floats:
    """Return the predicted seconds of busy periods with these parameter values ([m])."""
    host_s = values["host_step"] * parts["steps"] + values["host_sequence"] * parts["sequences"]
    return np.asarray(kernel_seconds(parts, values) + host_s + parts["rest"])


def step_kinds(found: BusyPeriods, deployment: Deployment) -> tuple[Ints, Floats, Iterations]:
    """Estimate which kinds of steps busy periods consist of, because counters only state totals.

    Return the index of the period, the number of steps and one example step for each of [k] kinds. All steps of a
    period decode for equally many sequences. The tokens of all kinds add up to the counted tokens.
    """
    capacity = deployment.kv.kv_tokens(deployment.max_model_len)
    rows = [_period_kinds(found, i, deployment.limits.max_num_batched_tokens) for i in range(len(found))]
    period = np.repeat(np.arange(len(found)), [len(steps) for steps, _ in rows])
    steps = np.concatenate([steps for steps, _ in rows])
    tokens = np.concatenate([tokens for _, tokens in rows])
    kinds = Iterations(
        prefill_seqs=tokens * (found.prompts / np.maximum(1.0, found.prompt_tokens))[period],
        prefill_tokens=tokens,
        decode_seqs=(found.decodes / _sum_by_period(period, steps, len(found)))[period],
        kv_share=(found.kv_tokens[period] + tokens) / capacity,
        seconds=np.full(len(steps), np.nan),
        steps=np.ones(len(steps), dtype=np.int64),
    )
    return period, steps, kinds


def _period_kinds(found: BusyPeriods, i: int, max_tokens: int) -> tuple[Floats, Floats]:
    bucket = np.flatnonzero(found.counts[i])
    steps = found.counts[i][bucket]
    generated = float((found.decodes[i] + found.prompts[i]) / found.steps[i])  # mean a step
    # Mean tokens of the steps in each bucket: ``generated`` where the bucket contains it; the buckets above share the
    # remaining tokens, with all means equally far between their bounds.
    low = np.concatenate([[0.0], found.edges])[bucket]
    high = np.append(found.edges, 2 * found.edges[-1])[bucket]
    inside = np.clip(generated, low, high)
    above = low >= generated
    rest = found.prompt_tokens[i] + generated * found.steps[i] - (steps * inside)[~above].sum()
    width = (steps * (high - low))[above].sum()
    share = np.clip((rest - (steps * low)[above].sum()) / width, 0.0, 1.0) if width > 0 else 0.0
    more = np.maximum(0.0, np.where(above, low + share * (high - low), inside) - generated)
    if more.sum() == 0:
        more = np.ones(len(bucket))
    tokens = more * (found.prompt_tokens[i] / (steps * more).sum())
    # vLLM counts a prompt's tokens in the step that computes its last chunk: tokens beyond a step's limit were computed
    # in earlier steps, which were counted as steps of decodes alone.
    parts = np.ceil(tokens / max(1.0, max_tokens - generated))
    earlier = (np.maximum(0.0, parts - 1) * steps).sum()
    alone = tokens == 0
    left = steps * (1 - alone * min(1.0, earlier / max(1.0, (steps * alone).sum())))
    split = np.maximum(1.0, parts)
    return np.where(parts > 1, steps * split, left), tokens / split


def _sum_by_period(period: Ints, each: Floats, m: int) -> Floats:
    return np.asarray(np.bincount(period, weights=each, minlength=m), dtype=np.float64)


Parts = Mapping[str, Floats]
MAX_CELL_STEPS = 10
MAX_OBSERVATIONS = len(METRICS) * BLOCKS  # largest weight of all evidence of steps: as much as a run's requests have
SEEN = "seen by the log"


@dataclass(frozen=True)
class Evidence:
    """Measured seconds of [m] steps or sums of steps, with the parts from which tables predict these seconds."""

    seconds: Floats
    parts: Parts  # [m] seconds of the tables by part, which ``predict`` sums with the parameters' values
    predict: Callable[[Parts, Mapping[str, float]], Floats]
    block: Ints
    weight: Floats

    def residuals(self, values: Mapping[str, float]) -> Floats:
        """Return log(predicted / measured) as an array of shape [m]."""
        return np.asarray(np.log(self.predict(self.parts, values) / self.seconds))


@dataclass(frozen=True)
class StepEvidence:
    """Evidence from a log of steps (``is_log``) or from a server's counters, or None, and notes on it."""

    evidence: Evidence | None
    notes: list[str]
    is_log: bool = False
    seen: bool = False  # whether the steps may include those of held-out requests


def step_evidence_of(
    runs: Sequence[Run], deployment: Deployment, iterations: Iterations | None, *, counters: bool
) -> StepEvidence:
    """Return evidence from the log if it is usable. Otherwise use the runs' counters, if ``counters`` is true."""
    found = StepEvidence(None, []) if iterations is None else _log_evidence(iterations, runs, deployment)
    if found.evidence is not None or not counters:
        return found
    evidence, notes = counter_evidence([run for run in runs if run.fit.any()], deployment)
    return StepEvidence(evidence, [*found.notes, *notes])


def _log_evidence(log: Iterations, runs: Sequence[Run], deployment: Deployment) -> StepEvidence:
    fitted = sum(bool(run.fit.any()) for run in runs)
    is_fitted = iteration_log.fitted_steps(log, runs)
    if reason := iteration_log.implausible_seconds(log if is_fitted is None else log.select(is_fitted), runs):
        return StepEvidence(None, [f"the log of steps was not fitted: {reason}"])
    if is_fitted is None:
        note = (
            f"neither tokens nor times show which of the {len(log):,} steps of the log are of held-out requests; "
            f"all were fitted, so that scores are of requests {SEEN}, unless the log is of the fitted runs alone. A "
            "log with the times that vLLM writes, and records of `lengthwise bench`, would show it"
        )
        return StepEvidence(log_evidence(log, deployment, fitted), [note], is_log=True, seen=True)
    note = f"of the {len(log):,} steps of the log, {int(is_fitted.sum()):,} certainly belong to fitted requests"
    if is_fitted.sum() < MIN_STEPS:
        hint = "hold out a separate run, or give the log of the engine that served the runs"
        return StepEvidence(None, [f"the log of steps was not fitted: {note}, of which {MIN_STEPS} are needed; {hint}"])
    note += ", and only these were fitted"
    return StepEvidence(log_evidence(log.select(is_fitted), deployment, fitted), [note], is_log=True)


def log_evidence(iterations: Iterations, deployment: Deployment, runs: int) -> Evidence:
    """Return the evidence in a log of steps. Its blocks of time are numbered after the blocks of ``runs`` runs."""
    log = iteration_log.merge_similar(iterations)
    m, steps = len(log), np.minimum(log.steps, MAX_CELL_STEPS)
    weight = np.sqrt(steps * min(1.0, MAX_OBSERVATIONS / steps.sum()))
    block = runs * BLOCKS + np.arange(m) * BLOCKS // m
    return Evidence(log.seconds, step_parts(log, deployment), step_seconds, block, weight)


def counter_evidence(runs: Sequence[Run], deployment: Deployment) -> tuple[Evidence | None, list[str]]:
    """Return evidence from the counters that runs recorded, or None if there is none, and notes on it."""
    scraped = [(r, run) for r, run in enumerate(runs) if isinstance(run.measured.metadata.get("metrics"), Mapping)]
    if scraped and deployment.parallel.replicas > 1:
        reason = f"they are sums over {deployment.parallel.replicas} replicas, whose steps overlap"
        return None, [f"the server's counters were not fitted: {reason}"]
    if scraped and deployment.parallel.pp > 1:
        return None, ["the server's counters were not fitted: steps of pipeline stages overlap"]
    notes, found = [], []
    for r, run in scraped:
        if run.workload.prefixes is not None:
            reason = "they do not say which tokens were cached"
            notes.append(f"the server's counters of {run.name} were not fitted: {reason}")
            continue
        counters = counters_of(run.measured.metadata["metrics"])
        periods = counters if isinstance(counters, str) else busy_periods_of(run, counters, deployment.limits)
        if isinstance(periods, str):
            notes.append(f"the server's counters of {run.name} were not fitted: {periods}")
        else:
            found.append((r, run, periods))
    if not found:
        return None, notes
    parts = [busy_period_parts(periods, run.workload.prompt_tokens, deployment) for _, run, periods in found]
    m = sum(len(periods) for _, _, periods in found)
    steps = int(sum(periods.steps.sum() for _, _, periods in found))
    periods = f"{m:,} busy periods of {len(found)} run{'s' if len(found) > 1 else ''}"
    note = f"the server's own counters were fitted as well: {steps:,} steps in {periods} (--scrape no leaves them out)"
    blocks = [r * BLOCKS + np.arange(len(periods)) * BLOCKS // len(periods) for r, _, periods in found]
    evidence = Evidence(
        seconds=np.concatenate([periods.seconds for _, _, periods in found]),
        parts={name: np.concatenate([each[name] for each in parts]) for name in parts[0]},
        predict=busy_period_seconds,
        block=np.concatenate(blocks),
        weight=np.full(m, np.sqrt(min(1.0, MAX_OBSERVATIONS / m))),
    )
    return evidence, [note, *notes]
