"""What to do about a deployed schedule once lengths have moved (ExeGPT, section 7.6).

Three things can be done: leave it, change its batches and phases, which takes nothing, or load another layout, which
takes the seconds of ``redeploy`` (whoever cannot load while it serves is told what that would bring). What meets the
bound and serves most requests until a horizon is best. A schedule that still meets the bound is only left for one that
serves noticeably more by then; one that no longer meets it is left for anything that does and is loaded in time.

The new bound is tighter by a margin: the first with which the new schedule would hold the real bound if lengths
moved on by as much as they just did; where none is enough, or it costs too much throughput, by half as much, or a
quarter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lengthwise.catalog import weight_bytes
from lengthwise.schedule.choose import Planner, improved, least_seen_s, rounded_up
from lengthwise.schedule.controls import Cluster, ControlColumns, Strategy
from lengthwise.schedule.drift_monitor import SIDES, Alarm, Monitor, Watcher
from lengthwise.schedule.estimation import Estimates, Estimator
from lengthwise.schedule.length_drift import first_margin, left_alone, moments, moved, moves_weights, placed
from lengthwise.schedule.lengths import TaskLengths
from lengthwise.schedule.sides import Side
from lengthwise.schema.errors import InputError, ScheduleError
from lengthwise.schema.schedule import Adaptation, Change, Elsewhere, LengthFacts, Redeployment, ScheduleRow
from lengthwise.schema.specs import ModelSpec

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class InPlace:
    """The best that a deployed schedule can become while it runs; what one bound took to answer is known for the next.

    It has the deployed one's strategy, groups and split of GPUs, and is found as a planner finds a choice, by the same
    steps and as surely.

    Args:
        planner: Of the lengths; it says what latency a bound is held against.
        deployed: What runs.
        max_num_seqs: Neither its encodings nor its decode batch are larger; infinite: any.
    """

    def __init__(self, planner: Planner, deployed: ScheduleRow, *, max_num_seqs: float = math.inf) -> None:
        self._planner = planner
        self._side = _DeployedSide(planner, deployed, max_num_seqs)

    def best(self, bound_s: float = math.inf) -> ScheduleRow | None:
        """The one of the highest throughput found that meets a bound; None: none does."""
        for one in improved(self._planner.search(bound_s, [self._side]), bound_s):
            if one.found.best:
                return self._side.row(one.best.point)
        return None

    @property
    def min_s(self) -> float:
        """The least latency that was seen, as it is once no bound could be met; infinite: nothing can run."""
        return least_seen_s([self._side])


class _DeployedSide(Side):
    """The schedules of the deployed layout that have seats."""

    def __init__(self, planner: Planner, deployed: ScheduleRow, max_num_seqs: float) -> None:
        self._deployed, self._max_num_seqs = deployed, max_num_seqs
        strategy = Strategy(deployed.strategy)
        super().__init__(planner.estimator, strategy, deployed.tp, worst_case=planner.worst_case)

    def estimates(self, points: Ints) -> Estimates:
        return self._split_as_deployed(self.columns(points))

    def constrained_latency_s(self, estimates: Estimates) -> Floats:
        return np.where(estimates.decode_batch <= self._max_num_seqs, super().constrained_latency_s(estimates), np.inf)

    def _groups(self) -> tuple[int, ...]:
        return (self._deployed.tp_groups,)

    def _largest_batch(self, groups: tuple[int, ...]) -> int:
        return int(min(super()._largest_batch(groups), self._max_num_seqs))

    def _all_runs(self, groups: tuple[int, ...], most: int) -> Ints:
        """All batches of as many micro-batches are one run: no GPU changes sides."""
        return np.array([(1, most, micro, group) for group in groups for micro in self._micro_batches()])

    def _reasons(self, columns: ControlColumns) -> Ints:
        return self._split_as_deployed(columns).reason

    def _split_as_deployed(self, columns: ControlColumns) -> Estimates:
        split = np.full(len(columns), self._deployed.encode_gpus, dtype=np.int64)
        return self._estimator.estimate(columns, split)


_SHARES = (1.0, 0.5, 0.25)
Chosen = Callable[[float], ScheduleRow | None]
"""The best schedule under a bound; None: nothing meets it."""


def margin_after(planner: Planner, chosen: Chosen, before: TaskLengths, bound_s: float, most_cost: float) -> float:
    """The first margin that holds the bound if lengths move on by as much as they moved, or by a part of it."""
    free = None if math.isinf(bound_s) else chosen(bound_s)
    if free is None:
        return 0.0
    setting = planner.estimator.setting
    tighter = lru_cache(maxsize=None)(lambda margin: chosen(bound_s * (1 - margin)))
    for share in _SHARES:
        moved_on = further(before, setting.task, share, setting.model.max_model_len)
        estimator = Estimator(moved_on, setting.cluster, setting.model, setting.tables, setting.assumptions)
        if left_alone(estimator, free, worst_case=planner.worst_case)[1] <= bound_s:
            return 0.0
        margin = first_margin(planner, estimator, bound_s, tighter)
        row = tighter(margin) if math.isfinite(margin) else None
        if row and row.throughput_rps >= (1 - most_cost) * free.throughput_rps:
            return margin
    return 0.0


def further(before: TaskLengths, task: TaskLengths, share: float, longest_tokens: int) -> TaskLengths:
    """Lengths that moved on: longer and more varied by a share of what mean and deviation just moved."""
    prompt = _more(before.prompt_pmf, task.prompt_pmf, share, longest_tokens - task.max_output_tokens)
    output = _more(before.output_pmf, task.output_pmf, share, longest_tokens - (len(prompt) - 1))
    return TaskLengths(prompt, output)


def _more(before: Floats, after: Floats, share: float, max_tokens: int) -> Floats:
    (mean, sd, _), (mean_after, sd_after, _) = moments(before), moments(after)
    spread = moved(after, "sd", share * abs(sd_after / sd - 1) if sd else 0.0, max_tokens)
    made = moved(spread, "mean", share * abs(mean_after / mean - 1), max_tokens)
    return made[: int(made.nonzero()[0][-1]) + 1]


DRAM_BYTES_PER_S = 4.9e9
"""From host memory to one GPU. ExeGPT's Table 4 has 4.1e9 to 5.4e9: 2 bytes a parameter over the GPUs and seconds."""
SSD_BYTES_PER_S = 7.3e9
"""From the drives of one node of 8 GPUs. Table 4 has 7.1e9 to 7.5e9 for its three larger models, 18.6e9 for 39B."""
SOURCE = "ExeGPT (Oh et al., ASPLOS 2024), Table 4"

_MEASURED = {
    ("gpt-3-39b", "A40", 16): (0.9, 2.1),
    ("gpt-3-101b", "A40", 32): (1.3, 7.1),
    ("gpt-3-175b", "A40", 32): (2.1, 11.9),
    ("gpt-3-341b", "A40", 48): (3.5, 15.1),
}
"""The table does not name the GPUs; only the A40s of the paper are 32 and more (its A100s are 16)."""


def redeployment(model: ModelSpec, cluster: Cluster, strategy: Strategy = Strategy.RRA) -> Redeployment:
    """Seconds to load all weights, every GPU and every node at a time.

    At the cluster's rates; of one that it does not say, the paper's own seconds where it measured the model on so many
    such GPUs, else the paper's rate. Under WAA a decoder-only model is there twice.

    Args:
        model: What is loaded.
        cluster: Where to, and how fast.
        strategy: Whose layout.
    """
    copies = 2 if strategy is not Strategy.RRA and not model.encoder_layers else 1
    rates = cluster.dram_bytes_per_s, cluster.ssd_bytes_per_s
    measured = _MEASURED.get((model.name, cluster.gpu.name, cluster.gpus)) if copies == 1 else None
    loaded = copies * weight_bytes(model)
    nodes = -(-cluster.gpus // cluster.node.gpus)
    dram_s, ssd_s = measured or (loaded / cluster.gpus / DRAM_BYTES_PER_S, loaded / nodes / SSD_BYTES_PER_S)
    return Redeployment(
        dram_s if rates[0] is None else loaded / cluster.gpus / rates[0],
        ssd_s if rates[1] is None else loaded / nodes / rates[1],
        _source(rates, measured=measured is not None),
    )


def _source(rates: tuple[float | None, float | None], *, measured: bool) -> str:
    paper = f"{SOURCE}, measured" if measured else f"{SOURCE}: its rates"
    if None not in rates:
        return "rates as given"
    given = [place for place, rate in zip(("host memory", "drives"), rates, strict=True) if rate is not None]
    return f"{given[0]}: rate as given; else {paper}" if given else paper


ENOUGH = 1000
"""Requests from which on lengths are counted: ten of them are then beyond the 99 % quantile."""


def lengths_since(task: TaskLengths, alarm: Alarm, longest_tokens: int) -> TaskLengths:
    """The lengths after an alarm.

    From ``ENOUGH`` requests on they are counted. Of fewer, the sides that moved, or of which there is more evidence
    for that than against it, keep the shape of the planned ones, at the mean and standard deviation that were seen;
    the others stay, and so does a side that was not watched.

    Args:
        task: As planned.
        alarm: With the requests since the change.
        longest_tokens: The longest prompt with its output that the model takes.
    """
    sides = zip(SIDES, (task.prompt_pmf, task.output_pmf), strict=True)
    seen = {"prompts": alarm.prompt_tokens, "outputs": alarm.output_tokens}
    moved = {side for side in SIDES if side in alarm.sides or alarm.evidence.get(side, 0.0) >= 1}
    prompt, output = (
        _side(pmf, seen[side], changed=side in moved) if side in alarm.watched else pmf for side, pmf in sides
    )
    most_output = max(longest_tokens // 2, longest_tokens - (len(prompt) - 1))
    output = _truncated(output, most_output)
    return TaskLengths(_truncated(prompt, longest_tokens - (len(output) - 1)), output, task.name)


def facts_of(task: TaskLengths, level: float, output_tokens: int | None = None) -> LengthFacts:
    """A task's lengths in numbers; the bound is for a quantile of the outputs, or for so many tokens."""
    prompt_mean, prompt_sd, _ = moments(task.prompt_pmf)
    return LengthFacts(
        prompt_mean,
        prompt_sd,
        *moments(task.output_pmf),
        quantile_tokens=task.output_quantile(level) if output_tokens is None else output_tokens,
    )


def _side(pmf: Floats, tokens: Ints, *, changed: bool) -> Floats:
    if len(tokens) >= ENOUGH:
        return np.asarray(np.bincount(tokens) / len(tokens))
    if not changed:
        return pmf
    mean, sd, _ = moments(pmf)
    times = float(tokens.std(ddof=1)) / sd if sd > 0 and len(tokens) > 1 else 1.0
    at = np.arange(len(pmf), dtype=np.float64)
    to = float(tokens.mean()) + (at - mean) * times
    return placed(to, pmf, int(np.ceil(max(to.max(), tokens.max(), 1.0))))


def _truncated(pmf: Floats, max_tokens: int) -> Floats:
    """Lengths cut at a limit, as an engine cuts them."""
    if len(pmf) - 1 <= max_tokens:
        return pmf
    cut = pmf[: max_tokens + 1].copy()
    cut[-1] += pmf[max_tokens + 1 :].sum()
    return cut


@dataclass(frozen=True)
class Terms:
    """When a change is worth it.

    Attributes:
        storage: Where weights are loaded from: "dram" (host memory) or "ssd".
        horizon_s: How long the new lengths are taken to last.
        margin: Share by which the bound is tightened; None: after the drift that was seen.
        least_gain: A schedule that meets the bound is left for this share of requests more, at least.
        most_cost: Share of throughput that a margin after the drift may cost at most.
        may_load: Whether weights may be loaded anew; else what that would bring is only told (``Change.elsewhere``).
        max_num_seqs: Neither encodings nor decode batches of what needs no loading may be larger; infinite: any.
    """

    storage: str = "dram"
    horizon_s: float = 3600.0
    margin: float | None = None
    least_gain: float = 0.02
    most_cost: float = 0.2
    may_load: bool = True
    max_num_seqs: float = math.inf

    def __post_init__(self) -> None:
        if self.storage not in ("dram", "ssd"):
            raise InputError(f'storage must be "dram" or "ssd"; it is {self.storage!r}')
        if not 0 < self.horizon_s < math.inf:
            raise InputError(f"horizon_s must be above 0 and finite; it is {self.horizon_s}")
        if self.margin is not None and not 0 <= self.margin < 1:
            raise InputError(f"margin must be at least 0 and below 1; it is {self.margin}")
        if not self.least_gain >= 0:
            raise InputError(f"least_gain must be at least 0; it is {self.least_gain}")
        if not 0 <= self.most_cost <= 1:
            raise InputError(f"most_cost must be from 0 to 1; it is {self.most_cost}")
        if not self.max_num_seqs >= 1:
            raise InputError(f"seats must be at least 1; they are {self.max_num_seqs}")


@dataclass(frozen=True)
class _Option:
    """A schedule, and the seconds without service until it runs."""

    row: ScheduleRow
    load_s: float

    def served(self, horizon_s: float) -> float:
        return self.row.throughput_rps * max(horizon_s - self.load_s, 0.0)


def replan(
    planner: Planner, deployed: ScheduleRow, before: TaskLengths, bound_s: float = math.inf, terms: Terms = Terms()
) -> Change:
    """What to do about a deployed schedule.

    Args:
        planner: Of the lengths as they are now.
        deployed: What runs.
        before: Lengths that it was planned for.
        bound_s: Latency that must be held; infinite: any.
        terms: When a change is worth it.

    Raises:
        InputError: The bound is not above 0.
    """
    if not bound_s > 0:
        raise InputError(f"the latency bound must be above 0; it is {bound_s}")
    setting, worst_case = planner.estimator.setting, planner.worst_case
    left, held_s = left_alone(planner.estimator, deployed, worst_case=worst_case)
    kept = left if math.isfinite(held_s) and _seated(left, terms) else None
    in_place = InPlace(planner, deployed, max_num_seqs=terms.max_num_seqs)
    near = in_place.best
    free = _chosen(planner, near, terms)(bound_s)
    margin, options = _options_within_bound(planner, near, deployed, before, bound_s, terms)
    best = max(options, key=lambda one: one.served(terms.horizon_s), default=None)
    made, repaid_s, why = _decision(kept, held_s, best, bound_s, terms)
    if best is None:
        why = _empty(least_seen_s(planner.sides) if terms.may_load else in_place.min_s, terms)
    runs = best.row if made and best else kept
    level, fixed = setting.assumptions.level, setting.assumptions.output_tokens
    return Change(
        before=facts_of(before, level, fixed),
        after=facts_of(setting.task, level, fixed),
        bound_s=bound_s,
        margin=margin,
        free_rps=free.throughput_rps if free else 0.0,
        retained=kept,
        kept_held_s=held_s,
        late_share=late_share(planner.estimator, deployed, bound_s, worst_case=worst_case),
        new=best.row if best else None,
        new_held_s=_reserved(best.row, worst_case=worst_case) if best else math.inf,
        load_s=best.load_s if best else 0.0,
        made=made,
        repaid_s=repaid_s,
        cause=why,
        elsewhere=None if terms.may_load else _elsewhere(planner, deployed, runs, bound_s, margin, terms),
    )


def late_share(estimator: Estimator, deployed: ScheduleRow, bound_s: float, *, worst_case: bool) -> float:
    """The share of requests that take longer than a bound under a deployed schedule; 1 where it cannot run."""
    if math.isinf(bound_s):
        return 0.0
    setting, task = estimator.setting, estimator.setting.task
    low, high = 0, task.max_output_tokens
    while low < high:
        tokens = (low + high + 1) // 2
        fixed = replace(setting.assumptions, output_tokens=tokens)
        other = Estimator(task, setting.cluster, setting.model, setting.tables, fixed)
        on_time = left_alone(other, deployed, worst_case=worst_case)[1] <= bound_s
        low, high = (tokens, high) if on_time else (low, tokens - 1)
    return float(task.output_pmf[low + 1 :].sum())


def _options_within_bound(
    planner: Planner, near: Chosen, deployed: ScheduleRow, before: TaskLengths, bound_s: float, terms: Terms
) -> tuple[float, list[_Option]]:
    """The margin, and what meets the bound so tightened; without a margin where nothing does."""
    chosen = _chosen(planner, near, terms)
    margin = terms.margin
    if margin is None:
        margin = margin_after(planner, chosen, before, bound_s, terms.most_cost)
    options = _options(planner, near, deployed, bound_s * (1 - margin), terms)
    if options or not margin:
        return margin, options
    return 0.0, _options(planner, near, deployed, bound_s, terms)


def _options(planner: Planner, near: Chosen, deployed: ScheduleRow, bound_s: float, terms: Terms) -> list[_Option]:
    """What could run instead: the best of the same layout, and the best of all where it may be loaded."""
    same = near(bound_s)
    found = [] if same is None else [_Option(same, 0.0)]
    row = _best(planner, bound_s) if terms.may_load else None
    return found if row is None else [*found, _Option(row, _load_s(planner, deployed, row, terms))]


def _elsewhere(
    planner: Planner, deployed: ScheduleRow, runs: ScheduleRow | None, bound_s: float, margin: float, terms: Terms
) -> Elsewhere | None:
    """The best of all, where it would have to be loaded and that would be worth it."""
    row = _best(planner, bound_s * (1 - margin)) or _best(planner, bound_s)
    if row is None or not moves_weights(deployed, row):
        return None
    option, worst_case = _Option(row, _load_s(planner, deployed, row, terms)), planner.worst_case
    held_s = _reserved(runs, worst_case=worst_case) if runs else math.inf
    worth, repaid_s, why = _decision(runs, held_s, option, bound_s, terms)
    if not worth:
        return None
    return Elsewhere(row, _reserved(row, worst_case=worst_case), option.load_s, terms.storage, repaid_s, why)


def _load_s(planner: Planner, deployed: ScheduleRow, row: ScheduleRow, terms: Terms) -> float:
    """Seconds without service until it runs; 0: no weights move."""
    if not moves_weights(deployed, row):
        return 0.0
    setting = planner.estimator.setting
    loading = redeployment(setting.model, setting.cluster, Strategy(row.strategy))
    return loading.dram_s if terms.storage == "dram" else loading.ssd_s


def _chosen(planner: Planner, near: Chosen, terms: Terms) -> Chosen:
    """How the best is found: among all, or where nothing is loaded among those of the same layout."""
    return (lambda bound_s: _best(planner, bound_s)) if terms.may_load else near


def _seated(row: ScheduleRow, terms: Terms) -> bool:
    """Whether what runs has the seats for it."""
    return max(row.encode_batch, row.decode_batch) <= terms.max_num_seqs


def _decision(
    retained: ScheduleRow | None, constrained_latency_s: float, best: _Option | None, bound_s: float, terms: Terms
) -> tuple[bool, float, str]:
    """(whether to change, seconds until that has repaid, why)."""
    if best is None:
        return False, math.nan, ""
    if retained is None or constrained_latency_s > bound_s:
        broken = f"what runs would take {constrained_latency_s:.3g} s"
        if retained is None:
            broken = f"{'memory' if math.isinf(constrained_latency_s) else 'max_num_seqs'} would not hold what runs"
        if best.load_s >= terms.horizon_s:
            return False, math.nan, f"{broken}, but loading takes longer than the horizon"
        return True, math.nan, broken
    served, would = retained.throughput_rps * terms.horizon_s, best.served(terms.horizon_s)
    more = would / served - 1 if served else math.inf
    pays = more > terms.least_gain
    said = f"by the horizon {100 * abs(more):.1f} % {'more' if more >= 0 else 'fewer'} requests are served"
    return pays, _repaid_s(retained, best), said


def _empty(min_s: float, terms: Terms) -> str:
    """That no schedule meets the bound: of all, or of those that need no loading."""
    of = "nothing" if terms.may_load else "nothing that needs no loading"
    if math.isinf(min_s):
        return f"{of} fits the GPUs with these lengths"
    return f"{of} meets the bound with these lengths: the least latency is {rounded_up(min_s)} s"


def _repaid_s(retained: ScheduleRow, best: _Option) -> float:
    gain_rps = best.row.throughput_rps - retained.throughput_rps
    return best.load_s * best.row.throughput_rps / gain_rps if gain_rps > 0 else math.inf


def _best(planner: Planner, bound_s: float) -> ScheduleRow | None:
    """The best of all; None: nothing meets the bound."""
    try:
        return planner.best(bound_s).row
    except ScheduleError:
        return None


def _reserved(row: ScheduleRow, *, worst_case: bool) -> float:
    return row.latency_high_s if worst_case else row.latency_s


class Adapter:
    """What runs, and what is to run as lengths move. Equal requests and seeds give equal answers.

    Whoever serves tells it each request in the order of arrival, and takes over ``deployed`` where an answer says so.

    Args:
        planner: Of the lengths that were planned for.
        deployed: What runs.
        bound_s: Latency that must be held; infinite: any.
        requests: How many requests the planned lengths were counted over; None: they are known.
        monitor: How lengths are watched; None: as usual.
        terms: When a change is worth it; None: as usual.

    Attributes:
        deployed: What is to run now.
        task: The lengths that it was last planned for.
        bound_s: As given.
    """

    def __init__(
        self,
        planner: Planner,
        deployed: ScheduleRow,
        bound_s: float = math.inf,
        *,
        requests: int | None = None,
        monitor: Monitor | None = None,
        terms: Terms | None = None,
    ) -> None:
        self._planner, self.bound_s, self._terms = planner, bound_s, terms or Terms()
        self.deployed, self.task = deployed, planner.estimator.setting.task
        self._first = deployed
        self.watcher = Watcher(self.task, requests, monitor or Monitor())
        self._before = self.task
        self._last: Alarm | None = None
        self._since: list[tuple[int, int]] = []

    def observe(self, prompt_tokens: int, output_tokens: int, at_s: float) -> Adaptation | None:
        """One more request, as ``Watcher.observe`` takes it; an answer if it makes one due.

        Raises:
            InputError: As there.
        """
        alarm = self.watcher.observe(prompt_tokens, output_tokens, at_s)
        if alarm is not None:
            self._before = self.task
            return self._adapted(alarm, first=True)
        return self._known_better(prompt_tokens, output_tokens, at_s)

    @property
    def planned_lengths(self) -> LengthFacts:
        """The lengths that the first schedule was planned for."""
        setting = self._planner.estimator.setting
        return facts_of(setting.task, setting.assumptions.level, setting.assumptions.output_tokens)

    def _known_better(self, prompt_tokens: int, output_tokens: int, at_s: float) -> Adaptation | None:
        """Planned once more when enough requests have come since an alarm to count their lengths."""
        if self._last is None:
            return None
        self._since.append((prompt_tokens, output_tokens))
        if len(self._since) < ENOUGH:
            return None
        prompts, outputs = np.array(self._since, dtype=np.int64).T
        known = replace(
            self._last, request=self.watcher.observed, at_s=at_s, prompt_tokens=prompts, output_tokens=outputs
        )
        return self._adapted(known, first=False)

    def _adapted(self, alarm: Alarm, *, first: bool) -> Adaptation:
        few = len(alarm.output_tokens) < ENOUGH
        pairs = zip(alarm.prompt_tokens.tolist(), alarm.output_tokens.tolist(), strict=True)
        self._last, self._since = (alarm, list(pairs)) if few else (None, [])
        setting = self._planner.estimator.setting
        task = lengths_since(self._before, alarm, setting.model.max_model_len)
        estimator = Estimator(task, setting.cluster, setting.model, setting.tables, setting.assumptions)
        planner = self._planner.anew(estimator)
        as_ever = {"worst_case": planner.worst_case}
        change = replan(planner, self.deployed, self._before, self.bound_s, self._terms)
        self.task = task
        if change.made and change.new is not None:
            self.deployed = change.new
        return Adaptation(
            request=alarm.request,
            at_s=alarm.at_s,
            started=alarm.started,
            started_s=alarm.started_s,
            requests=len(alarm.output_tokens),
            sides=alarm.sides,
            evidence=alarm.evidence,
            first=first,
            change=change,
            first_held_s=left_alone(estimator, self._first, **as_ever)[1],
            first_late_share=late_share(estimator, self._first, self.bound_s, **as_ever),
        )
