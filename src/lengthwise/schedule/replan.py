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
from dataclasses import dataclass, replace

from lengthwise.schedule._in_place import InPlace
from lengthwise.schedule._margins import Chosen, margin_after
from lengthwise.schedule._seen_lengths import facts_of
from lengthwise.schedule.choose import Planner
from lengthwise.schedule.controls import Strategy
from lengthwise.schedule.drift import left_alone, moves_weights
from lengthwise.schedule.estimate import Estimator
from lengthwise.schedule.lengths import TaskLengths
from lengthwise.schedule.redeploy import redeployment
from lengthwise.schedule.searched import least_seen_s, rounded_up
from lengthwise.schema.adaptation import Change, Elsewhere
from lengthwise.schema.errors import InputError, ScheduleError
from lengthwise.schema.schedule_row import ScheduleRow


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
        seats: Neither encodings nor decode batches of what needs no loading may be larger; infinite: any.
    """

    storage: str = "dram"
    horizon_s: float = 3600.0
    margin: float | None = None
    least_gain: float = 0.02
    most_cost: float = 0.2
    may_load: bool = True
    seats: float = math.inf

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
        if not self.seats >= 1:
            raise InputError(f"seats must be at least 1; they are {self.seats}")


@dataclass(frozen=True)
class _Option:
    """A schedule, and the seconds without service until it runs."""

    row: ScheduleRow
    load_s: float

    def served(self, horizon_s: float) -> float:
        return self.row.throughput_rps * max(horizon_s - self.load_s, 0.0)


def replan(
    planner: Planner,
    deployed: ScheduleRow,
    before: TaskLengths,
    bound_s: float = math.inf,
    terms: Terms = Terms(),
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
    in_place = InPlace(planner, deployed, seats=terms.seats)
    near = in_place.best
    free = _chosen(planner, near, terms)(bound_s)
    margin, options = _within(planner, near, deployed, before, bound_s, terms)
    best = max(options, key=lambda one: one.served(terms.horizon_s), default=None)
    made, repaid_s, why = _verdict(kept, held_s, best, bound_s, terms)
    if best is None:
        why = _nothing(least_seen_s(planner.sides) if terms.may_load else in_place.least_s, terms)
    runs = best.row if made and best else kept
    level, fixed = setting.assumptions.level, setting.assumptions.output_tokens
    return Change(
        before=facts_of(before, level, fixed),
        after=facts_of(setting.task, level, fixed),
        bound_s=bound_s,
        margin=margin,
        free_rps=free.throughput_rps if free else 0.0,
        kept=kept,
        kept_held_s=held_s,
        late_share=late_share(planner.estimator, deployed, bound_s, worst_case=worst_case),
        new=best.row if best else None,
        new_held_s=_held(best.row, worst_case=worst_case) if best else math.inf,
        load_s=best.load_s if best else 0.0,
        made=made,
        repaid_s=repaid_s,
        why=why,
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


def _within(
    planner: Planner,
    near: Chosen,
    deployed: ScheduleRow,
    before: TaskLengths,
    bound_s: float,
    terms: Terms,
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


def _options(
    planner: Planner, near: Chosen, deployed: ScheduleRow, bound_s: float, terms: Terms
) -> list[_Option]:
    """What could run instead: the best of the same layout, and the best of all where it may be loaded."""
    same = near(bound_s)
    found = [] if same is None else [_Option(same, 0.0)]
    row = _best(planner, bound_s) if terms.may_load else None
    return found if row is None else [*found, _Option(row, _load_s(planner, deployed, row, terms))]


def _elsewhere(
    planner: Planner,
    deployed: ScheduleRow,
    runs: ScheduleRow | None,
    bound_s: float,
    margin: float,
    terms: Terms,
) -> Elsewhere | None:
    """The best of all, where it would have to be loaded and that would be worth it."""
    row = _best(planner, bound_s * (1 - margin)) or _best(planner, bound_s)
    if row is None or not moves_weights(deployed, row):
        return None
    option, worst_case = _Option(row, _load_s(planner, deployed, row, terms)), planner.worst_case
    held_s = _held(runs, worst_case=worst_case) if runs else math.inf
    worth, repaid_s, why = _verdict(runs, held_s, option, bound_s, terms)
    if not worth:
        return None
    return Elsewhere(row, _held(row, worst_case=worst_case), option.load_s, terms.storage, repaid_s, why)


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
    return max(row.encode_batch, row.decode_batch) <= terms.seats


def _verdict(
    kept: ScheduleRow | None, held_s: float, best: _Option | None, bound_s: float, terms: Terms
) -> tuple[bool, float, str]:
    """(whether to change, seconds until that has repaid, why)."""
    if best is None:
        return False, math.nan, ""
    if kept is None or held_s > bound_s:
        broken = f"what runs would take {held_s:.3g} s"
        if kept is None:
            broken = f"{'memory' if math.isinf(held_s) else 'seats'} would not hold what runs"
        if best.load_s >= terms.horizon_s:
            return False, math.nan, f"{broken}, but loading takes longer than the horizon"
        return True, math.nan, broken
    served, would = kept.throughput_rps * terms.horizon_s, best.served(terms.horizon_s)
    more = would / served - 1 if served else math.inf
    pays = more > terms.least_gain
    said = f"by the horizon {100 * abs(more):.1f} % {'more' if more >= 0 else 'fewer'} requests are served"
    return pays, _repaid_s(kept, best), said


def _nothing(least_s: float, terms: Terms) -> str:
    """That no schedule meets the bound: of all, or of those that need no loading."""
    of = "nothing" if terms.may_load else "nothing that needs no loading"
    if math.isinf(least_s):
        return f"{of} fits the GPUs with these lengths"
    return f"{of} meets the bound with these lengths: the least latency is {rounded_up(least_s)} s"


def _repaid_s(kept: ScheduleRow, best: _Option) -> float:
    gain_rps = best.row.throughput_rps - kept.throughput_rps
    return best.load_s * best.row.throughput_rps / gain_rps if gain_rps > 0 else math.inf


def _best(planner: Planner, bound_s: float) -> ScheduleRow | None:
    """The best of all; None: nothing meets the bound."""
    try:
        return planner.best(bound_s).row
    except ScheduleError:
        return None


def _held(row: ScheduleRow, *, worst_case: bool) -> float:
    return row.latency_high_s if worst_case else row.latency_s


__all__ = ["Terms", "late_share", "replan"]
