"""Replanning of a deployed schedule after lengths have changed (ExeGPT, section 7.6).

The schedule may stay, change its batches and phases (which takes no time), or load another layout (which takes the
seconds of ``redeployment``). The best option meets the bound and serves the most requests until a horizon. While the
deployed schedule meets the bound, the best option replaces it only if it serves more requests by more than a minimum
gain. Once the deployed schedule misses the bound, the best option replaces it if its weights load before the horizon.

Replanning tightens the bound by a margin: the smallest margin with which the new schedule would meet the real bound
after one more change of the same size. If no margin suffices, or it costs too much throughput, the planner assumes a
change of half that size, then of a quarter, and then no margin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from lengthwise.catalog import weight_bytes
from lengthwise.schedule.controls import Assumptions, Cluster, Strategy
from lengthwise.schedule.drift_monitor import SIDES, Alarm, Monitor, Watcher
from lengthwise.schedule.estimation import Estimator
from lengthwise.schedule.length_drift import as_pmf, evaluate_deployed, min_margin, moments, needs_loading, shift_moment
from lengthwise.schedule.lengths import TaskLengths
from lengthwise.schedule.planner import Planner, min_evaluated_s, refine, rounded_up
from lengthwise.schedule.search_space import SearchSpace
from lengthwise.schema.errors import InputError
from lengthwise.schema.schedule import Adaptation, Change, Elsewhere, LengthFacts, Redeployment, ScheduleRow
from lengthwise.schema.specs import ModelSpec
from lengthwise.schema.workload import Floats, Ints

BestRow = Callable[[float], ScheduleRow | None]
"""Function from a latency bound to the best schedule under it, or to None if no schedule meets it."""

DRAM_BYTES_PER_S = 4.9e9
"""From host memory to one GPU. ExeGPT's Table 4 gives 4.1e9 to 5.4e9, with 2 bytes per parameter."""
SSD_BYTES_PER_S = 7.3e9
"""From the drives of one node of 8 GPUs. Table 4 gives 7.1e9 to 7.5e9 for its three larger models, 18.6e9 for 39B."""
SOURCE = "ExeGPT (Oh et al., ASPLOS 2024), Table 4"
MIN_COUNTED_REQUESTS = 1000
"""From this many requests on, their lengths replace the planned shape: about ten exceed the 99 % quantile."""

_MEASURED_S = {
    ("gpt-3-39b", "A40", 16): (0.9, 2.1),
    ("gpt-3-101b", "A40", 32): (1.3, 7.1),
    ("gpt-3-175b", "A40", 32): (2.1, 11.9),
    ("gpt-3-341b", "A40", 48): (3.5, 15.1),
}
"""Seconds to load from host memory and from drives. The table does not name the GPUs; the paper has 32 or more
GPUs only of type A40 (and 16 A100s)."""
_REPEATED_CHANGES = (1.0, 0.5, 0.25)


class InPlace:
    """Finds the best schedules to which a deployed one can change without loading weights.

    They have the deployed schedule's strategy, tensor-parallel groups and split of GPUs. Batches have at most
    ``max_num_seqs`` sequences. Estimates are stored, so that later bounds reuse them.
    """

    def __init__(self, planner: Planner, deployed: ScheduleRow, *, max_num_seqs: float = math.inf) -> None:
        self._planner = planner
        self.space = SearchSpace(
            planner.estimator,
            Strategy(deployed.strategy),
            deployed.tp,
            worst_case=planner.worst_case,
            groups=(deployed.tp_groups,),
            prefill_gpus=deployed.prefill_gpus,
            max_num_seqs=max_num_seqs,
        )

    def best(self, bound_s: float = math.inf) -> ScheduleRow | None:
        """Return the schedule with the highest throughput that meets a bound, or None if no schedule meets it."""
        for one in refine(self._planner.search(bound_s, [self.space]), bound_s):
            if one.result.best:
                return self.space.row(one.best.point)
        return None


def repeat_change(before: TaskLengths, task: TaskLengths, share: float, max_model_len: int) -> TaskLengths:
    """Return the lengths if ``share`` of the change from ``before`` happens again, to longer, more varied requests."""

    def more(before: Floats, after: Floats, max_tokens: int) -> Floats:
        (mean, sd, _), (mean_after, sd_after, _) = moments(before), moments(after)
        spread = shift_moment(after, "sd", share * abs(sd_after / sd - 1) if sd else 0.0, max_tokens)
        pmf = shift_moment(spread, "mean", share * abs(mean_after / mean - 1), max_tokens)
        return pmf[: int(pmf.nonzero()[0][-1]) + 1]

    prompt = more(before.prompt_pmf, task.prompt_pmf, max_model_len - task.max_output_tokens)
    return TaskLengths(prompt, more(before.output_pmf, task.output_pmf, max_model_len - (len(prompt) - 1)))


def redeployment(model: ModelSpec, cluster: Cluster, strategy: Strategy = Strategy.RRA) -> Redeployment:
    """Return the seconds to load all weights, on every GPU and every node in parallel.

    The seconds follow from the cluster's rates. If a rate is missing, they are the paper's measurement for this model
    on this number of such GPUs or, without a measurement, follow from the paper's rate. Under WAA a decoder-only model
    has two copies.
    """
    copies = 2 if strategy is not Strategy.RRA and not model.encoder_layers else 1
    rates = cluster.dram_bytes_per_s, cluster.ssd_bytes_per_s
    measured_s = _MEASURED_S.get((model.name, cluster.gpu.name, cluster.gpus)) if copies == 1 else None
    total = copies * weight_bytes(model)
    per_gpu, per_node = total / cluster.gpus, total / -(-cluster.gpus // cluster.node.gpus)
    dram_s, ssd_s = measured_s or (per_gpu / DRAM_BYTES_PER_S, per_node / SSD_BYTES_PER_S)
    source = f"{SOURCE}, measured" if measured_s else f"{SOURCE}: its rates"
    given = [name for name, rate in zip(("host memory", "drives"), rates, strict=True) if rate is not None]
    if given:
        source = "rates as given" if len(given) == 2 else f"{given[0]}: rate as given; else {source}"
    return Redeployment(
        dram_s if rates[0] is None else per_gpu / rates[0], ssd_s if rates[1] is None else per_node / rates[1], source
    )


def lengths_since(task: TaskLengths, alarm: Alarm, max_model_len: int) -> TaskLengths:
    """Estimate the lengths after an alarm, for a model that accepts ``max_model_len`` tokens per request.

    The alarm's requests determine the lengths of each watched side (prompts, outputs). ``MIN_COUNTED_REQUESTS`` or more
    give their empirical distribution. Fewer give the planned shape at their mean and standard deviation, if the alarm
    names the side or its test has evidence (``Alarm.evidence``) of at least 1. Otherwise the side stays as planned.
    """

    def since(side: str, pmf: Floats, tokens: Ints) -> Floats:
        if side not in alarm.watched:
            return pmf
        if len(tokens) >= MIN_COUNTED_REQUESTS:
            return np.asarray(np.bincount(tokens) / len(tokens))
        if side not in alarm.sides and alarm.evidence.get(side, 0.0) < 1:
            return pmf
        mean, sd, _ = moments(pmf)
        factor = float(tokens.std(ddof=1)) / sd if sd > 0 and len(tokens) > 1 else 1.0
        scaled = float(tokens.mean()) + (np.arange(len(pmf), dtype=np.float64) - mean) * factor
        return as_pmf(scaled, pmf, int(np.ceil(max(scaled.max(), tokens.max(), 1.0))))

    def truncated(pmf: Floats, max_tokens: int) -> Floats:
        if len(pmf) - 1 <= max_tokens:
            return pmf
        cut = pmf[: max_tokens + 1].copy()
        cut[-1] += pmf[max_tokens + 1 :].sum()
        return cut

    prompt = since(SIDES[0], task.prompt_pmf, alarm.prompt_tokens)
    output = since(SIDES[1], task.output_pmf, alarm.output_tokens)
    output = truncated(output, max(max_model_len // 2, max_model_len - (len(prompt) - 1)))
    return TaskLengths(truncated(prompt, max_model_len - (len(output) - 1)), output, task.name)


def length_facts(task: TaskLengths, assumptions: Assumptions) -> LengthFacts:
    """Return moments of a task's lengths, and the output length of the requests whose latency the bound limits."""
    fixed = assumptions.output_tokens
    quantile_tokens = task.output_quantile(assumptions.level) if fixed is None else fixed
    return LengthFacts(*moments(task.prompt_pmf)[:2], *moments(task.output_pmf), quantile_tokens=quantile_tokens)


@dataclass(frozen=True)
class ReplanOptions:
    """Options that decide when a change of schedule is worth it."""

    storage: str = "dram"  # where weights are loaded from: "dram" (host memory) or "ssd"
    # Time for which the new lengths are expected to last. Served requests are compared over this time.
    horizon_s: float = 3600.0
    # Share by which planning tightens the latency bound. If None, it follows from the last change of lengths.
    margin: float | None = None
    min_gain: float = 0.02  # relative gain in served requests above which a schedule that meets the bound is replaced
    # largest share of the throughput that a margin from the last change of lengths may cost
    max_margin_cost: float = 0.2
    # Whether weights may be loaded. If not, ``Change.elsewhere`` reports a schedule worth a reload.
    allow_reload: bool = True
    # largest batch, of prefill or decode, to which a schedule may change without loading weights
    max_num_seqs: float = math.inf

    def __post_init__(self) -> None:
        checks = (
            ("storage", self.storage in ("dram", "ssd"), '"dram" or "ssd"'),
            ("horizon_s", 0 < self.horizon_s < math.inf, "above 0 and finite"),
            ("margin", self.margin is None or 0 <= self.margin < 1, "at least 0 and below 1"),
            ("min_gain", self.min_gain >= 0, "at least 0"),
            ("max_margin_cost", 0 <= self.max_margin_cost <= 1, "from 0 to 1"),
            ("max_num_seqs", self.max_num_seqs >= 1, "at least 1"),
        )
        for name, is_valid, requirement in checks:
            if not is_valid:
                raise InputError(f"{name} must be {requirement}; it is {getattr(self, name)!r}")


@dataclass(frozen=True)
class _Candidate:
    """A possible next schedule. ``load_s`` is the time without service until it runs."""

    row: ScheduleRow
    latency_s: float
    load_s: float

    def served(self, horizon_s: float) -> float:
        return self.row.throughput_rps * max(horizon_s - self.load_s, 0.0)


_Decision = tuple[bool, float, str]
"""Whether to change, the seconds until the change has paid off, and the cause in words."""


def replan(
    planner: Planner,
    deployed: ScheduleRow,
    before: TaskLengths,
    bound_s: float = math.inf,
    options: ReplanOptions = ReplanOptions(),
) -> Change:
    """Return whether and how to change a deployed schedule that was planned for the lengths ``before``.

    ``planner`` has the current lengths. Raises InputError if the bound is not above 0.
    """
    if not bound_s > 0:
        raise InputError(f"the latency bound must be above 0; it is {bound_s}")
    return _Replanner(planner, deployed, bound_s, options).change(before)


class _Replanner:
    def __init__(self, planner: Planner, deployed: ScheduleRow, bound_s: float, options: ReplanOptions) -> None:
        self.planner, self.deployed, self.bound_s, self.options = planner, deployed, bound_s, options
        self.in_place = InPlace(planner, deployed, max_num_seqs=options.max_num_seqs)
        self.best: BestRow = planner.best_row if options.allow_reload else self.in_place.best

    def change(self, before: TaskLengths) -> Change:
        planner, options, setting = self.planner, self.options, self.planner.estimator.setting
        row, latency_s = evaluate_deployed(planner.estimator, self.deployed, worst_case=planner.worst_case)
        has_room = max(row.prefill_batch, row.decode_batch) <= options.max_num_seqs
        retained = row if math.isfinite(latency_s) and has_room else None
        free = self.best(self.bound_s)
        margin = self._drift_margin(before) if options.margin is None else options.margin
        candidates = self._candidates(self.bound_s * (1 - margin))
        if not candidates and margin:
            margin, candidates = 0.0, self._candidates(self.bound_s)
        best = max(candidates, key=lambda one: one.served(options.horizon_s), default=None)
        made, repaid_s, cause = self._nothing() if best is None else self._decide(retained, latency_s, best)
        running = best.row if best and made else retained
        return Change(
            before=length_facts(before, setting.assumptions),
            after=length_facts(setting.task, setting.assumptions),
            bound_s=self.bound_s,
            margin=margin,
            free_rps=free.throughput_rps if free else 0.0,
            retained=retained,
            retained_latency_s=latency_s,
            late_share=late_share(planner.estimator, self.deployed, self.bound_s, worst_case=planner.worst_case),
            new=best.row if best else None,
            new_latency_s=best.latency_s if best else math.inf,
            load_s=best.load_s if best else 0.0,
            made=made,
            repaid_s=repaid_s,
            cause=cause,
            elsewhere=None if options.allow_reload else self._elsewhere(running, margin),
        )

    def _latency_s(self, row: ScheduleRow) -> float:
        return row.latency_high_s if self.planner.worst_case else row.latency_s

    def _candidate(self, row: ScheduleRow) -> _Candidate:
        load_s = 0.0
        if needs_loading(self.deployed, row):
            setting = self.planner.estimator.setting
            loading = redeployment(setting.model, setting.cluster, Strategy(row.strategy))
            load_s = loading.dram_s if self.options.storage == "dram" else loading.ssd_s
        return _Candidate(row, self._latency_s(row), load_s)

    def _candidates(self, bound_s: float) -> list[_Candidate]:
        rows = [self.in_place.best(bound_s), self.planner.best_row(bound_s) if self.options.allow_reload else None]
        return [self._candidate(row) for row in rows if row is not None]

    def _drift_margin(self, before: TaskLengths) -> float:
        planner, bound_s = self.planner, self.bound_s
        free = None if math.isinf(bound_s) else self.best(bound_s)
        if free is None:
            return 0.0
        setting = planner.estimator.setting
        tightened = lru_cache(maxsize=None)(lambda margin: self.best(bound_s * (1 - margin)))
        for share in _REPEATED_CHANGES:
            changed = repeat_change(before, setting.task, share, setting.model.max_model_len)
            estimator = planner.estimator.replace(task=changed)
            if evaluate_deployed(estimator, free, worst_case=planner.worst_case)[1] <= bound_s:
                return 0.0
            margin = min_margin(planner, estimator, bound_s, tightened)
            row = tightened(margin) if math.isfinite(margin) else None
            if row and row.throughput_rps >= (1 - self.options.max_margin_cost) * free.throughput_rps:
                return margin
        return 0.0

    def _decide(self, retained: ScheduleRow | None, latency_s: float, best: _Candidate) -> _Decision:
        horizon_s = self.options.horizon_s
        if retained is None or latency_s > self.bound_s:
            cause = f"the deployed schedule would take {latency_s:.3g} s"
            if retained is None:
                cause = f"the deployed schedule would exceed {'memory' if math.isinf(latency_s) else 'max_num_seqs'}"
            if best.load_s >= horizon_s:
                return False, math.nan, f"{cause}, but loading exceeds the horizon"
            return True, math.nan, cause
        served = retained.throughput_rps * horizon_s
        more = best.served(horizon_s) / served - 1 if served else math.inf
        gain_rps = best.row.throughput_rps - retained.throughput_rps
        repaid_s = best.load_s * best.row.throughput_rps / gain_rps if gain_rps > 0 else math.inf
        cause = f"by the horizon {100 * abs(more):.1f} % {'more' if more >= 0 else 'fewer'} requests are served"
        return more > self.options.min_gain, repaid_s, cause

    def _nothing(self) -> _Decision:
        reload = self.options.allow_reload
        min_s = min_evaluated_s(self.planner.spaces if reload else [self.in_place.space])
        subject = "no schedule" if reload else "no schedule without loading weights"
        cause = f"{subject} fits the GPUs with these lengths"
        if math.isfinite(min_s):
            cause = f"{subject} meets the bound with these lengths: the least latency is {rounded_up(min_s)} s"
        return False, math.nan, cause

    def _elsewhere(self, running: ScheduleRow | None, margin: float) -> Elsewhere | None:
        row = self.planner.best_row(self.bound_s * (1 - margin)) or self.planner.best_row(self.bound_s)
        if row is None or not needs_loading(self.deployed, row):
            return None
        best = self._candidate(row)
        latency_s = self._latency_s(running) if running else math.inf
        made, repaid_s, cause = self._decide(running, latency_s, best)
        return Elsewhere(row, best.latency_s, best.load_s, self.options.storage, repaid_s, cause) if made else None


def late_share(estimator: Estimator, deployed: ScheduleRow, bound_s: float, *, worst_case: bool) -> float:
    """Return the share of requests above a latency bound: 0 if it is infinite, else 1 if the schedule cannot run."""
    if math.isinf(bound_s):
        return 0.0
    assumptions, task = estimator.setting.assumptions, estimator.setting.task
    low, high = 0, task.max_output_tokens
    while low < high:
        tokens = (low + high + 1) // 2
        fixed = estimator.replace(assumptions=replace(assumptions, output_tokens=tokens))
        on_time = evaluate_deployed(fixed, deployed, worst_case=worst_case)[1] <= bound_s
        low, high = (tokens, high) if on_time else (low, tokens - 1)
    return float(task.output_pmf[low + 1 :].sum())


class Adapter:
    """Follows live lengths and decides which schedule should run.

    The caller passes each request to ``observe`` in the order of arrival. ``deployed`` is the schedule that should run;
    when a decision changes it, the caller deploys it. ``task`` has the lengths of the latest planning, at first the
    planner's. ``requests`` is the number of requests from which the planner's lengths were counted, or None if the
    distributions are exact. Equal requests and seeds give equal decisions.
    """

    def __init__(
        self,
        planner: Planner,
        deployed: ScheduleRow,
        bound_s: float = math.inf,
        *,
        requests: int | None = None,
        monitor: Monitor | None = None,
        options: ReplanOptions | None = None,
    ) -> None:
        self._planner, self.bound_s, self._options = planner, bound_s, options or ReplanOptions()
        self.deployed, self._first = deployed, deployed
        self.task = self._before = planner.estimator.setting.task
        self.watcher = Watcher(self.task, requests, monitor or Monitor())
        self._last: Alarm | None = None
        self._since: list[tuple[int, int]] = []

    @property
    def planned_lengths(self) -> LengthFacts:
        """Return the lengths for which the first schedule was planned."""
        setting = self._planner.estimator.setting
        return length_facts(setting.task, setting.assumptions)

    def observe(self, prompt_tokens: int, output_tokens: int, at_s: float) -> Adaptation | None:
        """Observe one more request as ``Watcher.observe`` does, and return a decision if one is due.

        If an alarm has fewer than ``MIN_COUNTED_REQUESTS`` requests, a second decision follows once there are as many.
        """
        alarm = self.watcher.observe(prompt_tokens, output_tokens, at_s)
        if alarm is not None:
            self._before = self.task
            return self._adapt(alarm, first=True)
        if self._last is None:
            return None
        self._since.append((prompt_tokens, output_tokens))
        if len(self._since) < MIN_COUNTED_REQUESTS:
            return None
        prompts, outputs = np.array(self._since, dtype=np.int64).T
        request = self.watcher.observed
        alarm = replace(self._last, request=request, at_s=at_s, prompt_tokens=prompts, output_tokens=outputs)
        return self._adapt(alarm, first=False)

    def _adapt(self, alarm: Alarm, *, first: bool) -> Adaptation:
        few = len(alarm.output_tokens) < MIN_COUNTED_REQUESTS
        pairs = zip(alarm.prompt_tokens.tolist(), alarm.output_tokens.tolist(), strict=True)
        self._last, self._since = (alarm, list(pairs)) if few else (None, [])
        model = self._planner.estimator.setting.model
        self.task = lengths_since(self._before, alarm, model.max_model_len)
        estimator = self._planner.estimator.replace(task=self.task)
        planner = self._planner.with_estimator(estimator)
        change = replan(planner, self.deployed, self._before, self.bound_s, self._options)
        if change.made and change.new is not None:
            self.deployed = change.new
        worst_case = planner.worst_case
        same = ("request", "at_s", "started", "started_s", "sides", "evidence")
        return Adaptation(
            **{name: getattr(alarm, name) for name in same},
            requests=len(alarm.output_tokens),
            first=first,
            change=change,
            first_latency_s=evaluate_deployed(estimator, self._first, worst_case=worst_case)[1],
            first_late_share=late_share(estimator, self._first, self.bound_s, worst_case=worst_case),
        )
