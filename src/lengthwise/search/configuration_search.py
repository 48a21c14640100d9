"""The search: bounds first, a quick look at what they leave, and exact answers for the best.

What is evaluated next depends on answers, never on who was fastest: configurations go out in waves, and the
answers of a wave are looked at when all are there. So one worker and a hundred give the same plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lengthwise.schema.estimate import UNKNOWN, Estimate
from lengthwise.schema.plan import Choice, Limit, Plan, Point, Region, Shift, Spent, Status, Study, Swap, Trade
from lengthwise.search.bench import Bench, Task, better
from lengthwise.search.limits import LATENCIES, Question
from lengthwise.search.space import Axes, Settings, names_of, settings_key
from lengthwise.search.store import Store, content_key, from_dict, to_dict
from lengthwise.search.strategy import Strategy
from lengthwise.search.workers import Workers

Progress = Callable[[str, int, int], None]


@dataclass
class Run:
    """A search under way.

    Attributes:
        bench: What evaluates.
        workers: Who does it.
        identity: Text that tells this question from others in the same store.
        store: Where evaluations are kept; None keeps none.
        progress: Called with the step's name, evaluations done and evaluations to do.
    """

    bench: Bench
    workers: Workers
    identity: str = ""
    store: Store | None = None
    progress: Progress = lambda *_: None
    clock: Callable[[], float] = time.monotonic
    reused: int = 0
    simulations: int = 0
    requests: int = 0
    done: dict[str, int] = field(default_factory=dict)
    expected: dict[str, int] = field(default_factory=dict)
    started_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_s = self.clock()

    def restart(self) -> None:
        """The search begins now."""
        self.started_s = self.clock()

    def seconds(self) -> float:
        """Since the search began."""
        return self.clock() - self.started_s

    def expect(self, step: str, count: int) -> None:
        """Says how many evaluations of a step there will be, as far as is known."""
        self.expected[step] = count

    def each(self, step: str, choices: Sequence[Choice], extra: tuple[Any, ...] = ()) -> list[Choice]:
        """The choices after a step, in their order."""
        tasks = [Task(step, choice, extra) for choice in choices]
        keys = [self._key(task) for task in tasks]
        found: dict[int, Choice] = {}
        for at, key in enumerate(keys):
            told = self.store.get(key) if self.store is not None else None
            if told is not None:
                found[at] = from_dict(told)
        self.reused += len(found)
        left = [at for at in range(len(tasks)) if at not in found]
        self._tell(step, len(found))
        for place, choice in self.workers.run([tasks[at] for at in left], self.bench):
            at = left[place]
            found[at] = choice
            if self.store is not None:
                self.store.put(keys[at], to_dict(choice))
            self._tell(step, 1)
        for at, task in enumerate(tasks):
            self.simulations += found[at].simulations - task.choice.simulations
            self.requests += found[at].requests - task.choice.requests
        return [found[at] for at in range(len(tasks))]

    def _key(self, task: Task) -> str:
        if self.store is None:
            return ""
        return content_key(self.identity, task.step, task.choice.settings, task.extra)

    def _tell(self, step: str, more: int) -> None:
        self.done[step] = self.done.get(step, 0) + more
        self.progress(step, self.done[step], max(self.expected.get(step, 0), self.done[step]))


KEEPS_UP = 0.97
"""Of the offered rate: what serves less has a queue that grows, and latencies that depend on the run."""

DEFAULT = ("ttft.p90", "tbt.p99", "jct.p90")


def frontiers(choices: Sequence[Choice], limits: Sequence[Limit]) -> dict[str, tuple[Trade, ...]]:
    """By latency metric, the trades of cost against it, over all points that keep the other limits."""
    limited = [limit.metric for limit in limits if limit.metric.partition(".")[0] in LATENCIES]
    metrics = dict.fromkeys([*limited, *DEFAULT])
    return {metric: frontier(choices, metric, limits) for metric in metrics}


def frontier(choices: Sequence[Choice], metric: str, limits: Sequence[Limit]) -> tuple[Trade, ...]:
    """Trades from the cheapest to the fastest."""
    others = [limit for limit in limits if limit.metric != metric]
    trades = [
        Trade(c.name, p.rate_rps, usd_per_thousand(c, p.rate_rps), p.value(metric))
        for c in choices
        if c.status in (Status.RANKED, Status.SCOUTED)
        for p in c.points
        if math.isfinite(p.value(metric))
        and _keeps_up(p)
        and all(limit.is_satisfied(p.value(limit.metric)) for limit in others)
    ]
    kept: list[Trade] = []
    for trade in sorted(trades, key=lambda t: (t.cost_usd, t.latency_s)):
        if not kept or trade.latency_s < kept[-1].latency_s:
            kept.append(trade)
    return tuple(kept)


def _keeps_up(point: Point) -> bool:
    """Whether as much is served as comes; NaN: all at once, where nothing has to keep up."""
    served = point.value("requests_per_s")
    return not served < KEEPS_UP * point.rate_rps


def usd_per_thousand(choice: Choice, rate_rps: float) -> float:
    """What a thousand requests cost at a rate."""
    return choice.price_per_hour_usd / 3600 / rate_rps * 1000


FACTORS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)
LEADERS = 6


def shifts(run: Run, choices: Sequence[Choice], question: Question) -> tuple[Shift, ...]:
    """The best requests per dollar by bound of each latency limit, over ranked configurations.

    A configuration's objective under another bound is its ranked one times the ratio of two rough
    answers to the same requests, with the other bound and with the asked one.
    """
    if question.objective.name != "requests_per_dollar":
        return ()  # at a given rate another bound moves whole replicas, or nothing
    limits = [limit for limit in question.promises.limits if limit.metric.partition(".")[0] in LATENCIES]
    told: list[Shift] = []
    for limit in limits:
        asked = _requested(choices, limit, question)
        run.expect("shift", run.done.get("shift", 0) + len(asked) * len(FACTORS))
        rough = {factor: run.each("shift", asked, (limit.metric, factor)) for factor in FACTORS}
        told += [_best(limit, factor, asked, rough, question) for factor in FACTORS]
    return tuple(told)


def _requested(choices: Sequence[Choice], limit: Limit, question: Question) -> list[Choice]:
    """The leaders, and those who are fast in this metric."""
    known = [c for c in choices if c.status is Status.RANKED]
    fast = {trade.choice for trade in frontier(known, limit.metric, question.promises.limits)[-LEADERS:]}
    return [c for at, c in enumerate(known) if at < LEADERS or c.name in fast]


def _best(
    limit: Limit, factor: float, requested: Sequence[Choice], rough: dict[float, list[Choice]], question: Question
) -> Shift:
    best, name = math.nan, ""
    for at, choice in enumerate(requested):
        then, now = rough[factor][at].objective.value, rough[1.0][at].objective.value
        value = choice.objective.value * then / now if now else math.nan
        if better(value, best, question):
            best, name = value, choice.name
    return Shift(limit.metric, limit.bound * factor, name, best)


MIN_COUNT = 4


def advantages(choices: Sequence[Choice], axes: Axes, question: Question) -> tuple[str, ...]:
    """For each axis, the best configuration that has another value there: what the winner's value is worth."""
    best = choices[0] if choices and choices[0].status is Status.RANKED else None
    if best is None:
        return ()
    told = []
    for key in axes:
        others = [c for c in choices if _known(c) and c.settings.get(key) != best.settings.get(key)]
        others = [c for c in others if key in c.settings and key in best.settings]
        if others:
            told.append(_description(key, best, others[0], question))
    return tuple(told)


def regions(choices: Sequence[Choice]) -> tuple[Region, ...]:
    """Rejected and pruned choices that failed alike, the largest first."""
    groups: dict[str, list[Choice]] = {}
    for choice in choices:
        if choice.region:
            groups.setdefault(choice.region, []).append(choice)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return tuple(Region(name, len(group), group[0].reason, _shared(group, choices)) for name, group in ordered)


def _known(choice: Choice) -> bool:
    return choice.status in (Status.RANKED, Status.SCOUTED)


def _description(key: str, best: Choice, other: Choice, question: Question) -> str:
    short = key.rpartition(".")[2]
    head = f"{short} = {best.settings[key]}: the best with another, {other.name}, "
    rough = " (scouted)" if other.status is Status.SCOUTED else ""
    sign = 1 if question.objective.higher_is_better else -1
    off = sign * (best.objective.value - other.objective.value)
    if off <= _half(best) + _half(other):
        return f"{head}cannot be told apart{rough}."
    ratio = other.objective.value / best.objective.value
    more = "less" if ratio < 1 else "more"
    return f"{head}has {abs(ratio - 1):.0%} {more} {question.objective.label}{rough}."


def _half(choice: Choice) -> float:
    half = choice.objective.half_width
    return half if half == half else 0.0  # noqa: PLR0124 - NaN: it is not known


def _shared(group: Sequence[Choice], choices: Sequence[Choice]) -> dict[str, tuple[Any, ...]]:
    """Settings whose values in the group are few, and fewer than among all."""
    shared: dict[str, tuple[Any, ...]] = {}
    for key in dict.fromkeys(k for c in group for k in c.settings):
        own = list(dict.fromkeys(c.settings[key] for c in group if key in c.settings))
        whole = {c.settings[key] for c in choices if key in c.settings}
        if len(own) < len(whole) and len(own) <= MIN_COUNT:
            shared[key] = tuple(own)
    return shared


FIRST_WAVE, LARGEST_WAVE = 16, 256

PRUDENCE = 0.85
"""A configuration is pruned if its bound is below this share of what scouting found for the last of the best;
should the exact answer turn out lower still, those pruned by it are scouted after all."""

FAR = 0.7
"""A configuration that breaks a limit at this share of what the last of the best reaches is not looked at
further: even a scouting run, which forgives, says that it is far off."""

PATIENCE = 2
"""So many times ``top`` configurations are ranked at most: of many that tie, some stay scouted."""

DOUBT = 0.05
"""Scouted objectives may be so far too low, at least; more where ranked ones have shown more."""


@dataclass(frozen=True)
class Options:
    """How far to go.

    Attributes:
        top: So many configurations are ranked, and more if they could be among the best.
        exhaustive: Scout every configuration that can run, prune none.
        sensitivity: Ask again with other bounds of each limit.
        strategy: Chooses what to look at in spaces too large to enumerate; None: everything.
    """

    top: int = 10
    exhaustive: bool = False
    sensitivity: bool = True
    strategy: Strategy[Settings] | None = None


def search(
    name: str,
    settings: Sequence[Settings],
    axes: Axes,
    run: Run,
    options: Options = Options(),
    metadata: dict[str, str] | None = None,
) -> Plan:
    """The plan of a question over configurations.

    Args:
        name: Of the question.
        settings: The configurations; with a strategy it proposes them instead.
        axes: What varies, for reports.
        run: What evaluates, where and what is kept.
        options: How far to go.
        metadata: What was asked, for headings.
    """
    question = run.bench.question
    looked = _explored(run, options) if options.strategy else _scouted(list(settings), run, options)
    ranked = _ranked(looked, run, options)
    ordered = named(_ordered(ranked, question))
    first = [c for c in ordered if c.status is Status.RANKED]
    moved = shifts(run, ordered, question) if options.sensitivity and first else ()
    return Plan(
        name=name,
        metadata=metadata or {},
        objective=question.objective,
        limits=question.promises.limits,
        axes=axes,
        choices=tuple(ordered),
        tied=_tied(first, question),
        cause=advantages(ordered, axes, question),
        frontiers=frontiers(ordered, question.promises.limits),
        shifts=moved,
        regions=regions(ordered),
        effort=_spent(ordered, run),
        level=question.level,
    )


def named(choices: Sequence[Choice]) -> list[Choice]:
    """The choices with short names that tell them apart."""
    names = names_of([c.settings for c in choices])
    return [replace(choice, name=name) for choice, name in zip(choices, names, strict=True)]


def _scouted(settings: list[Settings], run: Run, options: Options) -> list[Choice]:
    """Every configuration: scouted, rejected, or pruned by its bound."""
    blank = [Choice(settings_key(s), "", s, 0, 0.0, Status.PRUNED) for s in settings]
    run.expect("bound", len(blank))
    bounded = run.each("bound", blank)
    alive = [c for c in bounded if c.status is Status.PRUNED]
    done = [c for c in bounded if c.status is not Status.PRUNED]
    waiting = sorted(alive, key=lambda c: _order(c.bound, run.bench.question))
    run.expect("scout", len(waiting))
    pruned: list[Choice] = []
    for wave in _waves(waiting):
        hopeful = [c for c in wave if options.exhaustive or not _infeasible(c, done, run, options)]
        pruned += [c for c in wave if c not in hopeful]
        done += run.each("scout", hopeful, _least(done, run, options))
        run.expect("scout", len(waiting) - len(pruned))
    return done + [_pruned(c) for c in pruned]


def _explored(run: Run, options: Options) -> list[Choice]:
    """What a strategy proposes, wave by wave."""
    question, strategy = run.bench.question, options.strategy
    assert strategy is not None  # the caller has seen to it
    done: list[Choice] = []
    while wave := strategy.suggest():
        blank = [Choice(settings_key(s), "", s, 0, 0.0, Status.PRUNED) for s in wave]
        bounded = run.each("bound", blank)
        scouted = iter(run.each("scout", [c for c in bounded if c.status is Status.PRUNED]))
        whole = [next(scouted) if c.status is Status.PRUNED else c for c in bounded]
        strategy.tell([(c.settings, _score(c, question)) for c in whole])
        done += whole
    return done


def _ranked(evaluated: list[Choice], run: Run, options: Options) -> list[Choice]:
    """The same choices, the best of them exact: all that could be among the best."""
    question = run.bench.question
    by_key = {c.key: c for c in evaluated}
    roughly = {c.key: c.objective.value for c in evaluated if c.status is Status.SCOUTED}
    exact: dict[str, Choice] = {}
    while wave := _contenders(by_key, exact, roughly, question, options):
        run.expect("rank", len(exact) + len(wave))
        for choice in run.each("rank", wave, _surely(exact, question, options)):
            exact[choice.key] = by_key[choice.key] = choice
        again = _pruned_too_early(by_key, exact, question, options)
        for choice in run.each("scout", again):
            by_key[choice.key] = choice
            roughly[choice.key] = choice.objective.value
    return list(by_key.values())


def _contenders(
    by_key: dict[str, Choice], exact: dict[str, Choice], roughly: dict[str, float], question: Question, options: Options
) -> list[Choice]:
    """What is to be ranked next: the first ``top``, then whoever may still beat the best."""
    left = [c for c in by_key.values() if c.status is Status.SCOUTED and c.key not in exact]
    left.sort(key=lambda c: _order(c.objective.value, question))
    held = [c for c in exact.values() if c.status is Status.RANKED]
    if len(held) < options.top:
        return left[: options.top - len(held)]
    best = _best_of(held, question)
    sign = 1 if question.objective.higher_is_better else -1
    seen = [sign * (c.objective.value / roughly[c.key] - 1) for c in held if roughly[c.key]]
    doubt = sign * max(DOUBT, *seen)
    near = [c for c in left if better(c.objective.value * (1 + doubt), best.objective.value, question)]
    return near[: min(FIRST_WAVE, options.top * PATIENCE - len(exact))]


def _surely(exact: dict[str, Choice], question: Question, options: Options) -> tuple[float, ...]:
    """What the best reaches at least, once so many are ranked as were asked for: below it, roughly will do."""
    held = [c for c in exact.values() if c.status is Status.RANKED]
    if len(held) < options.top:
        return ()
    best = _best_of(held, question).objective
    half = 0.0 if math.isnan(best.half_width) else best.half_width
    return (best.value - half if question.objective.higher_is_better else best.value + half,)


def _best_of(satisfied: Sequence[Choice], question: Question) -> Choice:
    return min(satisfied, key=lambda c: _order(c.objective.value, question))


def _pruned_too_early(
    by_key: dict[str, Choice], exact: dict[str, Choice], question: Question, options: Options
) -> list[Choice]:
    """Those pruned by a hope that did not come true."""
    held = [c for c in exact.values() if c.status is Status.RANKED]
    held.sort(key=lambda c: _order(c.objective.value, question))
    pruned = [c for c in by_key.values() if c.status is Status.PRUNED and not c.simulations]
    if len(held) < options.top:
        return [replace(c, reason="", region="") for c in pruned[:LARGEST_WAVE]]
    last = held[options.top - 1].objective.value
    return [replace(c, reason="", region="") for c in pruned if better(c.bound, last, question)]


def _infeasible(choice: Choice, done: Sequence[Choice], run: Run, options: Options) -> bool:
    """Whether its bound is worse than what the last of the best surely reaches."""
    question = run.bench.question
    found = sorted((c.objective.value for c in done if c.status is Status.SCOUTED), key=lambda v: _order(v, question))
    if len(found) < options.top or math.isnan(choice.bound):
        return False
    last = found[options.top - 1]
    prudent = last * PRUDENCE if question.objective.higher_is_better else last / PRUDENCE
    return better(prudent, choice.bound, question)


def _least(done: Sequence[Choice], run: Run, options: Options) -> tuple[float, ...]:
    """The objective that a configuration must reach to be scouted whole; nothing while few are known."""
    found = sorted(_order(c.objective.value, run.bench.question) for c in done if c.status is Status.SCOUTED)
    if options.exhaustive or len(found) < options.top or not run.bench.question.objective.higher_is_better:
        return ()
    return (-found[options.top - 1] * FAR,)


def _pruned(choice: Choice) -> Choice:
    return replace(choice, reason="even without any queueing it would be worse", region="cannot be among the best")


def _ordered(choices: Sequence[Choice], question: Question) -> list[Choice]:
    """Ranked first, best first; then scouted, pruned and rejected ones."""
    standings = list(Status)

    def key(c: Choice) -> tuple[float, ...]:
        known = c.bound if c.status is Status.PRUNED else c.objective.value
        return (standings.index(c.status), _order(known, question), _use(c, question), -c.bound_rps)

    return sorted(choices, key=lambda c: (*key(c), c.key))


def _use(choice: Choice, question: Question) -> float:
    """How much of the limits a choice uses at its operating point: what parts equal objectives."""
    if choice.at is None:
        return math.inf
    used = [choice.at.value(limit.metric) / limit.bound for limit in question.promises.limits if not limit.at_least]
    return max(used, default=0.0)


def _order(value: float, question: Question) -> float:
    if math.isnan(value):
        return math.inf
    return -value if question.objective.higher_is_better else value


def _score(choice: Choice, question: Question) -> float | None:
    if choice.status is not Status.SCOUTED:
        return None
    return -_order(choice.objective.value, question)


def _tied(first: Sequence[Choice], question: Question) -> int:
    """How many of the first cannot be told from the best."""
    if not first:
        return 0
    sign = 1 if question.objective.higher_is_better else -1

    def half(c: Choice) -> float:
        return 0.0 if math.isnan(c.objective.half_width) else c.objective.half_width

    best = first[0]
    near = [sign * (best.objective.value - c.objective.value) <= half(best) + half(c) for c in first]
    return next((at for at, close in enumerate(near) if not close), len(near))


def _waves(waiting: Sequence[Choice]) -> Iterator[list[Choice]]:
    at, size = 0, FIRST_WAVE
    while at < len(waiting):
        yield list(waiting[at : at + size])
        at, size = at + size, min(2 * size, LARGEST_WAVE)


def _spent(choices: Sequence[Choice], run: Run) -> Spent:
    count = {standing: sum(c.status is standing for c in choices) for standing in Status}
    return Spent(
        candidates=len(choices),
        simulated=sum(c.simulations > 0 for c in choices),
        pruned=count[Status.PRUNED],
        rejected=count[Status.REJECTED],
        reused=run.reused,
        simulations=run.simulations,
        requests=run.requests,
        seconds=run.seconds(),
    )


def study(name: str, plans: Sequence[Plan], runs: Sequence[Run]) -> Study:
    """The plans, and each one's winner used for the questions of the others (Vidur's Figure 1b).

    Only questions with the same objective are compared. ``runs`` are the searches that made the plans.
    """
    swaps = [
        _swap(one, plan, run)
        for one in plans
        for plan, run in zip(plans, runs, strict=True)
        if one.objective == plan.objective and one.best is not None and plan.best is not None and len(plans) > 1
    ]
    return Study(name, tuple(plans), tuple(swaps))


def _swap(one: Plan, other: Plan, run: Run) -> Swap:
    """The best of one plan, ranked for the question of another."""
    assert one.best is not None  # the caller has seen to it
    assert other.best is not None
    there = next((c for c in other.choices if c.key == one.best.key), None)
    if there is None:
        return Swap(one.name, other.name, UNKNOWN, math.nan)
    if there.status in (Status.SCOUTED, Status.PRUNED):
        run.expect("rank", run.done.get("rank", 0) + 1)
        there = run.each("rank", [_with_size(there)])[0]
    value = there.objective if there.status is Status.RANKED else UNKNOWN
    return Swap(one.name, other.name, value, _ratio(value, other))


def _with_size(choice: Choice) -> Choice:
    """As it was before it was pruned."""
    return replace(choice, reason="", region="")


def _ratio(value: Estimate, plan: Plan) -> float:
    assert plan.best is not None
    best = plan.best.objective.value
    if plan.objective.higher_is_better:
        return best / value.value if value.value else math.nan
    return value.value / best if best else math.nan
