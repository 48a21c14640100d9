"""Searches over configurations: bounds for all, scouting runs for promising ones, exact results for the best.

Configurations are evaluated in batches, and the search continues when all results of a batch are complete. The next
batch depends on these results and not on timing, so that one worker and a hundred workers give the same plan.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Any

import numpy as np

from lengthwise.cost.model_error import LEVEL
from lengthwise.schema.estimate import UNKNOWN, Estimate
from lengthwise.schema.metric_names import split
from lengthwise.schema.plan import (
    Choice,
    ExcludedGroup,
    Exclusion,
    Limit,
    Plan,
    Point,
    SearchEffort,
    Shift,
    Status,
    Study,
    Swap,
    Trade,
)
from lengthwise.search.limits import AT_RATE, LIMITED, Question
from lengthwise.search.objectives import NOT_BUILT, Bench, Task, better
from lengthwise.search.space import Axes, Settings, names_of, settings_key, short_key
from lengthwise.search.store import Store, content_key, from_dict, to_dict
from lengthwise.search.strategy import Strategy
from lengthwise.search.workers import Workers

Choices = dict[str, Choice]
Progress = Callable[[str, int, int], None]

SUSTAINED_SHARE = 0.97
"""A point that serves a smaller share of its rate has a growing queue, whose latencies depend on the run's length."""
FRONTIER_METRICS = ("ttft.p90", "tbt.p99", "jct.p90")

BOUND_FACTORS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)
LEADERS = 6
MAX_SHARED_VALUES = 4

FIRST_BATCH, LARGEST_BATCH = 16, 256
PRUNING_SHARE = 0.85
"""A configuration is pruned if its bound is below this share of the ``top``-th best scouted objective. If the exact
results are lower than the scouted ones, pruned configurations are scouted after all."""
SCOUTING_SHARE = 0.7
"""A configuration that breaks a limit at this share of the ``top``-th best scouted objective is pruned by that one run:
even a short run, which tolerates overload, shows that it is much worse."""
MAX_RANKED_FACTOR = 2
"""At most this many times ``top`` configurations are ranked; if more are tied, the others stay scouted."""
SMALLEST_LOSS = 0.005  # a smaller relative difference is not worth a number, even if it is significant
SCOUTING_ERROR = 0.05
"""Least assumed relative error of objectives of one seed, such as scouted ones.
It is larger if ranked configurations had larger errors."""
MODEL_ERROR = 0.5
"""The best configuration of another GPU or model is ranked if a scouted objective better by this share would win."""
HARDWARE = (
    "deployment.gpu", "deployment.groups", "deployment.node", "deployment.model", "deployment.cost",
    "deployment.decode.gpu", "deployment.decode.node", "deployment.decode.cost",
)  # fmt: skip


@dataclass
class Run:
    """A running search, which saves evaluations in ``store``, if there is one, and reuses saved ones.

    ``identity`` is a text that distinguishes the question from others in the same store. ``progress`` is called with
    the name of a step ("bound", "scout", "rank", "shift") and its numbers of finished and of expected evaluations.
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
        self.restart()

    def restart(self) -> None:
        """Restart the clock of the search."""
        self.started_s = self.clock()

    def seconds(self) -> float:
        """Return the seconds since the search started."""
        return self.clock() - self.started_s

    def evaluated(self, step: str, choices: Sequence[Choice], extra: tuple[Any, ...] = ()) -> list[Choice]:
        """Return the choices after one step of evaluation, in their order. ``extra`` is as in ``Task``."""
        tasks = [Task(step, choice, extra) for choice in choices]
        keys, found = [""] * len(tasks), dict[int, Choice]()
        if self.store is not None:
            keys = [content_key(self.identity, t.step, t.choice.settings, t.extra) for t in tasks]
            stored = {at: value for at, key in enumerate(keys) if (value := self.store.get(key)) is not None}
            found = {at: from_dict(value) for at, value in stored.items()}
        self.reused += len(found)
        missing = [at for at in range(len(tasks)) if at not in found]
        self._report(step, len(found))
        for place, choice in self.workers.run([tasks[at] for at in missing], self.bench):
            at = missing[place]
            found[at] = choice
            if self.store is not None:
                self.store.put(keys[at], to_dict(choice))
            self._report(step, 1)
        results = [found[at] for at in range(len(tasks))]
        for before, after in zip(choices, results, strict=True):
            self.simulations += after.simulations - before.simulations
            self.requests += after.requests - before.requests
        return results

    def _report(self, step: str, more: int) -> None:
        self.done[step] = self.done.get(step, 0) + more
        self.progress(step, self.done[step], max(self.expected.get(step, 0), self.done[step]))


@dataclass(frozen=True)
class Options:
    """The thoroughness of a search.

    ``top`` configurations are ranked (evaluated exactly), and more if they could be the best. With ``exhaustive``,
    every configuration that can run is scouted (simulated briefly) and none is pruned. With ``sensitivity``, the search
    also tries other bounds of each limit. A ``strategy`` proposes configurations of a space that is too large to
    enumerate; without it, every configuration is evaluated.
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
    """Return the plan that answers a question: all configurations, the best ones first.

    ``settings`` are the configurations, unless the options have a strategy, which proposes them. ``axes`` are the
    settings that vary, for reports. ``metadata`` describes the question, for headings.
    """
    question = run.bench.question
    evaluated = _explored(run, options.strategy) if options.strategy else _scouted(settings, run, options)
    ordered = in_order(_ranked(evaluated, run, options), question)
    names = names_of([c.settings for c in ordered])
    ordered = [replace(choice, name=name) for choice, name in zip(ordered, names, strict=True)]
    ranked = [c for c in ordered if c.status is Status.RANKED]
    shifts = _shifts(run, ranked, question) if options.sensitivity and ranked else ()
    count, limits = Counter(c.status for c in ordered), question.slo_limits.limits
    metrics = dict.fromkeys([one.metric for one in limits if split(one.metric)[0] in LIMITED] + [*FRONTIER_METRICS])
    return Plan(
        name=name,
        metadata=metadata or {},
        objective=question.objective,
        limits=limits,
        axes=axes,
        choices=tuple(ordered),
        tied=sum(not separated(ranked[0], c, question) for c in ranked),
        reasons=advantages(ordered, axes, question),
        frontiers={metric: frontier(ordered, metric, limits) for metric in metrics},
        shifts=shifts,
        excluded_groups=_excluded_groups(ordered),
        effort=SearchEffort(
            candidates=len(ordered),
            simulated=sum(c.simulations > 0 for c in ordered),
            pruned=count[Status.PRUNED],
            rejected=count[Status.REJECTED],
            reused=run.reused,
            simulations=run.simulations,
            requests=run.requests,
            seconds=run.seconds(),
        ),
        level=question.level,
    )


def _scouted(settings: Sequence[Settings], run: Run, options: Options) -> list[Choice]:
    question = run.bench.question
    run.expected["bound"] = len(settings)
    bounded = run.evaluated("bound", _unevaluated(settings))
    done = [c for c in bounded if c.status is not Status.PRUNED]
    pending = [c for c in bounded if c.status is Status.PRUNED]
    waiting = sorted(pending, key=lambda c: _sort_value(c.bounds.objective, question))
    pruned: list[Choice] = []
    at, size = 0, FIRST_BATCH
    run.expected["scout"] = len(waiting)
    while at < len(waiting):
        scouted = [c.objective.value for c in done if c.status is Status.SCOUTED]
        limit, threshold, worse_than = math.nan, tuple[float, ...](), ""
        if len(scouted) >= options.top and not options.exhaustive:
            last = sorted(scouted, key=lambda value: _sort_value(value, question))[options.top - 1]
            worse_than = f"even if no request waited; {options.top} others have {last:.4g} or better"
            if question.objective.higher_is_better:
                limit, threshold = last * PRUNING_SHARE, (last * SCOUTING_SHARE,)
            else:
                limit = last / PRUNING_SHARE
        promising: list[Choice] = []
        tried = {_hardware(c) for c in done if c.status is Status.SCOUTED}
        for choice in waiting[at : at + size]:
            is_worse = not math.isnan(choice.bounds.objective) and better(limit, choice.bounds.objective, question)
            is_worse = is_worse and _hardware(choice) in {*tried, *map(_hardware, promising)}
            if is_worse:
                side = "at most" if question.objective.higher_is_better else "at least"
                reason = f"{side} {choice.bounds.objective:.4g} {question.objective.unit} {worse_than}"
                pruned.append(replace(choice, exclusion=Exclusion(reason, "cannot be among the best")))
            else:
                promising.append(choice)
        done += run.evaluated("scout", promising, threshold)
        run.expected["scout"] = len(waiting) - len(pruned)
        at, size = at + size, min(2 * size, LARGEST_BATCH)
    return done + pruned


def _unevaluated(settings: Sequence[Settings]) -> list[Choice]:
    return [Choice(settings_key(s), "", s, 0, 0.0, Status.PRUNED) for s in settings]


def _explored(run: Run, strategy: Strategy[Settings]) -> list[Choice]:
    question, done = run.bench.question, list[Choice]()
    while batch := strategy.suggest():
        bounded = run.evaluated("bound", _unevaluated(batch))
        scouted = iter(run.evaluated("scout", [c for c in bounded if c.status is Status.PRUNED]))
        results = [next(scouted) if c.status is Status.PRUNED else c for c in bounded]
        scores = {c.key: -_sort_value(c.objective.value, question) for c in results if c.status is Status.SCOUTED}
        strategy.report([(c.settings, scores.get(c.key)) for c in results])
        done += results
    return done


def _ranked(evaluated: list[Choice], run: Run, options: Options) -> list[Choice]:
    """Return the choices after those that could be among the best are evaluated exactly, which makes them RANKED."""
    question = run.bench.question
    by_key = {c.key: c for c in evaluated}
    rough = {c.key: c.objective.value for c in evaluated if c.status is Status.SCOUTED}
    exact: Choices = {}

    def best_first() -> list[Choice]:
        ranked = (c for c in exact.values() if c.status is Status.RANKED)
        return sorted(ranked, key=lambda c: _sort_value(c.objective.value, question))

    while batch := _next_to_rank(by_key, exact, rough, best_first(), question, options):
        run.expected["rank"] = len(exact) + len(batch)
        threshold: tuple[float, ...] = ()
        ranked = best_first()
        if len(ranked) >= options.top and batch != _other_hardware(by_key, exact, ranked, question):
            # Below the lower end of the best one's interval, a rough result suffices.
            best = ranked[0].objective
            half = best.half_width if best.has_interval else 0.0
            threshold = (best.value - half if question.objective.higher_is_better else best.value + half,)
        for choice in run.evaluated("rank", batch, threshold):
            exact[choice.key] = by_key[choice.key] = choice
        pruned = [c for c in by_key.values() if c.status is Status.PRUNED and not c.simulations]
        if len(ranked := best_first()) < options.top:
            pruned = pruned[:LARGEST_BATCH]
        else:  # exact results may be lower than scouted ones
            last = ranked[options.top - 1].objective.value
            pruned = [c for c in pruned if better(c.bounds.objective, last, question)]
        for choice in run.evaluated("scout", [replace(c, exclusion=Exclusion()) for c in pruned]):
            by_key[choice.key] = choice
            rough[choice.key] = choice.objective.value
    return list(by_key.values())


def _next_to_rank(
    by_key: Choices, exact: Choices, rough: dict[str, float], ranked: list[Choice], question: Question, options: Options
) -> list[Choice]:
    """Return the scouted configurations of ``by_key`` to simulate exactly next; none ends the search.

    Until ``options.top`` are ranked, these are the best scouted ones. After that, they are those that can beat the best
    of ``ranked``, if scouting errs by ``SCOUTING_ERROR`` or by the largest error seen so far: ``exact`` are the
    configurations simulated exactly, and ``rough`` their scouted objectives by key.
    """
    waiting = [c for c in by_key.values() if c.status is Status.SCOUTED and c.key not in exact]
    waiting.sort(key=lambda c: _sort_value(c.objective.value, question))
    if len(ranked) < options.top:
        return waiting[: options.top - len(ranked)]
    sign = 1 if question.objective.higher_is_better else -1
    errors = [sign * (c.objective.value / rough[c.key] - 1) for c in ranked if rough[c.key]]
    factor, best = 1 + sign * max(SCOUTING_ERROR, *errors), ranked[0].objective.value
    near = [c for c in waiting if better(c.objective.value * factor, best, question)]
    near = near[: max(0, min(FIRST_BATCH, options.top * MAX_RANKED_FACTOR - len(exact)))]
    return near or _other_hardware(by_key, exact, ranked, question)


def _hardware(choice: Choice) -> tuple[str, ...]:
    """Return the settings that determine the cost model's error, so that choices with equal ones share it."""
    return tuple(str(choice.settings.get(key)) for key in HARDWARE)


def _other_hardware(by_key: Choices, exact: Choices, ranked: list[Choice], question: Question) -> list[Choice]:
    """Return the best choice on each unranked GPU and model that may win, given the cost model's error."""
    tried, best = {_hardware(c) for c in exact.values()}, ranked[0].objective.value if ranked else math.nan
    firsts: dict[tuple[str, ...], Choice] = {}
    for choice in sorted(by_key.values(), key=lambda c: _sort_value(c.objective.value, question)):
        if question.model_draws and choice.status is Status.SCOUTED and _hardware(choice) not in tried:
            firsts.setdefault(_hardware(choice), choice)
    factor = 1 + MODEL_ERROR if question.objective.higher_is_better else 1 / (1 + MODEL_ERROR)
    return [c for c in firsts.values() if not better(best, c.objective.value * factor, question)]


def in_order(choices: Sequence[Choice], question: Question) -> list[Choice]:
    """Return the choices in order: tied with the best, other ranked ones, scouted, pruned, rejected."""
    statuses = list(Status)

    def key(c: Choice) -> tuple[Any, ...]:
        value = c.bounds.objective if c.status is Status.PRUNED else c.objective.value
        # Of choices with equal objectives, the one with the smallest usage of its limits comes first; of those with as
        # few GPUs, the cheapest.
        used, is_gpus = math.inf, question.objective.name == "fewest_gpus"
        usd = c.price_per_hour_usd if is_gpus and not math.isnan(c.price_per_hour_usd) else math.inf
        if c.at is not None:
            limits = [limit for limit in question.slo_limits.limits if not limit.at_least]
            used = max((c.at.value(limit.metric) / limit.bound for limit in limits), default=0.0)
        return statuses.index(c.status), _sort_value(value, question), usd, used, -c.bounds.rate_rps, c.key

    ordered = sorted(choices, key=key)
    ranked = [c for c in ordered if c.status is Status.RANKED]
    worse = [c for c in ranked if separated(ranked[0], c, question)]
    return [*(c for c in ranked if c not in worse), *worse, *ordered[len(ranked) :]]


def _sort_value(value: float, question: Question) -> float:
    if math.isnan(value):
        return math.inf
    return -value if question.objective.higher_is_better else value


def _half_width(choice: Choice) -> float:
    """Return the half-width of the objective; of one without interval (a single seed), an assumed one."""
    objective = choice.objective
    return objective.half_width if objective.has_interval else SCOUTING_ERROR * abs(objective.value)


def separated(best: Choice, other: Choice, question: Question) -> bool:
    """Return whether ``other`` is worse than ``best`` by more than sampling and model errors explain."""
    return not losses(best, other, question)[0] <= 0


def losses(best: Choice, other: Choice, question: Question) -> tuple[float, float]:
    """Return how much worse the objective of ``other`` is than that of ``best``, at least and at most.

    The range covers sampling errors and the cost model's error. Errors that both share cancel: choices with the same
    GPU and model are compared draw by draw, others over all pairs of draws.
    """
    a, b = (np.array(getattr(c.objective, "draws", ()) or (c.objective.value,)) for c in (best, other))
    is_paired = len(a) == len(b) and _hardware(best) == _hardware(other)
    with np.errstate(invalid="ignore"):
        gains = a - b if is_paired else np.subtract.outer(a, b).ravel()
    sign, half = 1 if question.objective.higher_is_better else -1, _half_width(best) + _half_width(other)
    levels = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    # Numbers of replicas are whole, so that no value lies between those of two draws.
    method: Any = "inverted_cdf" if question.objective.name in AT_RATE else "hazen"
    low, high = np.quantile(sign * np.nan_to_num(gains), levels, method=method).tolist()
    loss = sign * (best.objective.value - other.objective.value)
    return min(loss, low) - half, max(loss, high) + half


def frontier(choices: Sequence[Choice], metric: str, limits: Sequence[Limit]) -> tuple[Trade, ...]:
    """Return the Pareto front of cost and the latency ``metric``, from the cheapest to the fastest."""
    others = [limit for limit in limits if limit.metric != metric]

    def is_eligible(point: Point) -> bool:
        # NaN: all requests arrive at once, and there is no rate to sustain.
        is_sustained = not point.value("requests_per_s") < SUSTAINED_SHARE * point.rate_rps
        is_satisfied = all(limit.is_satisfied(point.value(limit.metric)) for limit in others)
        return math.isfinite(point.value(metric)) and is_sustained and is_satisfied

    trades: list[Trade] = []
    front: list[Trade] = []
    for c in choices:
        for p in filter(is_eligible, c.points if c.status in (Status.RANKED, Status.SCOUTED) else ()):
            cost_usd = usd_per_thousand(c, p.rate_rps)
            trades.append(Trade(c.name, p.rate_rps, cost_usd, p.value(metric), p.values[metric]))
    for trade in sorted(trades, key=lambda t: (t.cost_usd, t.latency_s)):
        if not front or trade.latency_s < front[-1].latency_s:
            front.append(trade)
    return tuple(front)


def usd_per_thousand(choice: Choice, rate_rps: float) -> float:
    """Return the cost of a thousand requests at a rate, in dollars."""
    return choice.price_per_hour_usd / 3600 / rate_rps * 1000


def _shifts(run: Run, ranked: Sequence[Choice], question: Question) -> tuple[Shift, ...]:
    """Return the most requests per dollar if one latency limit had another bound, for each limit and factor.

    Only ranked configurations are considered. The objective of one under another bound is its exact one times a ratio:
    a rough result with the other bound, divided by a rough one with the requested bound for the same requests.
    """
    if question.objective.name != "requests_per_dollar":
        return ()  # at a given rate, another bound changes the number of replicas or nothing
    found, known = [], Choices()
    for limit in question.slo_limits.limits:
        if split(limit.metric)[0] not in LIMITED:
            continue
        fastest = {trade.choice for trade in frontier(ranked, limit.metric, question.slo_limits.limits)[-LEADERS:]}
        choices = [c for at, c in enumerate(ranked) if at < LEADERS or c.name in fastest]
        rough, own = _rough(run, choices, limit.metric, known), dict[float, Shift]()
        for factor in BOUND_FACTORS:
            best, name, by = math.nan, "", UNKNOWN
            for choice, other, requested in zip(choices, rough[factor], rough[1.0], strict=True):
                base = requested.objective.value
                value = choice.objective.value * other.objective.value / base if base else math.nan
                if better(value, best, question):
                    best, name, by = value, choice.name, choice.objective
            low, high = (best / (by.value or math.nan) * end for end in (by.model_low, by.model_high))
            own[factor] = Shift(limit.metric, limit.bound * factor, name, best, low, high)
        first = ranked[0].objective
        low, high = first.model_low, first.model_high
        own[1.0] = replace(own[1.0], choice=ranked[0].name, objective=first.value, model_low=low, model_high=high)
        found += monotone(own, question)
    return tuple(found)


def monotone(shifts: dict[float, Shift], question: Question) -> list[Shift]:
    """Return the shifts by rising bound, none worse than one of a tighter bound: rough results differ by chance.

    From the requested bound (factor 1) on, a bound whose result contradicts its neighbour's gets the neighbour's.
    """
    rising = sorted(shifts)
    at = rising.index(1.0)
    for near, far in (*pairwise(rising[at:]), *pairwise(rising[at::-1])):
        tighter, looser = sorted((near, far))
        if better(shifts[tighter].objective, shifts[looser].objective, question):
            shifts[far] = replace(shifts[near], bound=shifts[far].bound)
    return [shifts[factor] for factor in rising]


def _rough(run: Run, choices: Sequence[Choice], metric: str, known: Choices) -> dict[float, list[Choice]]:
    """Return the choices with rough objectives for each factor of the metric's bound.

    ``known`` holds those for the requested bounds, which are the same for each metric, by key. Each search starts at
    the rate found for the nearest factor on the side of the requested bound.
    """
    new = [choice for choice in choices if choice.key not in known]
    run.expected["shift"] = run.done.get("shift", 0) + len(new) + len(choices) * (len(BOUND_FACTORS) - 1)
    known |= {choice.key: choice for choice in run.evaluated("shift", new, (metric, 1.0))}
    found = {1.0: [known[choice.key] for choice in choices]}
    for factors in (
        sorted(f for f in BOUND_FACTORS if f > 1),
        sorted((f for f in BOUND_FACTORS if f < 1), reverse=True),
    ):
        near = list(choices)
        for factor in factors:
            found[factor] = run.evaluated("shift", near, (metric, factor))
            rates_rps = [one.objective.value * one.price_per_hour_usd / 3600 for one in found[factor]]
            near = [
                replace(choice, capacity_rps=Estimate(rate_rps)) if rate_rps > 0 else choice
                for choice, rate_rps in zip(choices, rates_rps, strict=True)
            ]
    return found


def advantages(choices: Sequence[Choice], axes: Axes, question: Question) -> tuple[str, ...]:
    """Return a sentence for each axis: the winner against the best choice with another value, on the same hardware."""
    if not choices or choices[0].status is not Status.RANKED:
        return ()
    best, sentences = choices[0], []
    known = [c for c in choices if c.status in (Status.RANKED, Status.SCOUTED)]
    alike = [c for c in known if _hardware(c) == _hardware(best)]
    for key in axes:
        # A setting other than the hardware is compared on the same hardware, whose difference it would be blamed for.
        is_hardware = key in HARDWARE
        fair = known if is_hardware else alike
        keyed = (c for c in fair if key in c.settings and key in best.settings)
        others = (c for c in keyed if c.settings[key] != best.settings[key])
        # The best by value, not by rank: a tied choice ranks high but says nothing about this setting. Other hardware
        # has errors of its own: a tied choice of it comes first, or the sentence would contradict the ranking.
        other = min(
            others,
            key=lambda c: (
                not (is_hardware and c.status is Status.RANKED and not separated(best, c, question)),
                _sort_value(c.objective.value, question),
            ),
            default=None,
        )
        if other is None:
            continue
        own = best.settings[key]
        own = str(own).lower() if isinstance(own, bool) else own
        setting = f"{'engine' if key == 'engine.name' else short_key(key)} = {own}"
        same = ", ".join(filter(None, map(best.settings.get, HARDWARE))) if len(fair) < len(known) else ""
        on = f" on {same}" if same else ""
        head = f"{setting}: the best configuration with another value{on}, {other.name}, "
        rough = " (scouted)" if other.status is Status.SCOUTED else ""
        low, high = losses(best, other, question)
        value, more = best.objective.value, "fewer" if question.objective.higher_is_better else "more"
        loss = abs(other.objective.value - value)
        if low <= 0 or math.isnan(loss):
            sentences.append(f"{head}does not differ significantly{rough}.")
        elif loss < SMALLEST_LOSS * value:
            sentences.append(f"{head}differs by less than {SMALLEST_LOSS:.1%}{rough}.")
        elif question.objective.name == "fewest_gpus":
            span = "" if low == high else f" ({low:.0f} to {high:.0f})"
            sentences.append(f"{head}takes {loss:.0f}{span} more GPU{'s' * (high != 1)}{rough}.")
        else:
            is_known = best.objective.has_interval and (other.objective.has_interval or rough)
            high = min(high, value) if more == "fewer" else high  # nothing has less than none
            span = f" ({low / value:.0%} to {high / value:.0%})" if is_known else ""
            sentences.append(f"{head}has {loss / value:.0%}{span} {more} {question.objective.label}{rough}.")
    return tuple(sentences)


def _excluded_groups(choices: Sequence[Choice]) -> tuple[ExcludedGroup, ...]:
    by_name: dict[tuple[str, str], list[Choice]] = {}
    for choice in choices:
        if name := choice.exclusion.group:
            # What cannot be built has many causes: one example for all of them would hide the others.
            cause = re.sub(r"\d[\d.,]*", "#", choice.exclusion.reason) if name == NOT_BUILT else ""
            by_name.setdefault((name, cause), []).append(choice)
    groups = []
    for (name, _), group in sorted(by_name.items(), key=lambda item: (-len(item[1]), item[0])):
        shared: dict[str, tuple[Any, ...]] = {}  # settings with few values, and fewer than among all choices
        for key in dict.fromkeys(k for c in group for k in c.settings):
            own = tuple(dict.fromkeys(c.settings[key] for c in group if key in c.settings))
            everywhere = {c.settings[key] for c in choices if key in c.settings}
            if len(own) <= MAX_SHARED_VALUES and len(own) < len(everywhere):
                shared[key] = own
        groups.append(ExcludedGroup(name, len(group), group[0].exclusion.reason, shared))
    return tuple(groups)


def study(name: str, plans: Sequence[Plan], runs: Sequence[Run]) -> Study:
    """Return the plans, and how each plan's winner does for the questions of the others (Vidur's Figure 1b).

    Only questions with the same objective are compared. ``runs`` are the searches that returned the plans.
    """
    answered = [(plan, run) for plan, run in zip(plans, runs, strict=True) if plan.best is not None and len(plans) > 1]
    pairs = ((one, other, run) for (one, _), (other, run) in product(answered, answered))
    return Study(name, tuple(plans), tuple(_swap(*pair) for pair in pairs if pair[0].objective == pair[1].objective))


def _swap(one: Plan, other: Plan, run: Run) -> Swap:
    assert one.best is not None  # checked by the caller
    assert other.best is not None
    choice = next((c for c in other.choices if c.key == one.best.key), None)
    if choice is None:
        return Swap(one.name, other.name, UNKNOWN, math.nan)
    if choice.status in (Status.SCOUTED, Status.PRUNED):
        run.expected["rank"] = run.done.get("rank", 0) + 1
        choice = run.evaluated("rank", [replace(choice, exclusion=Exclusion())])[0]
    value: Estimate = choice.objective if choice.status is Status.RANKED else UNKNOWN
    own, best = value.value, other.best.objective.value
    above, below = (best, own) if other.objective.higher_is_better else (own, best)
    return Swap(one.name, other.name, value, above / below if below else math.nan)
