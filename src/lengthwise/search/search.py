"""The search: bounds first, a quick look at what they leave, and exact answers for the best.

What is evaluated next depends on answers, never on who was fastest: configurations go out in waves, and the
answers of a wave are looked at when all are there. So one worker and a hundred give the same plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lengthwise.schema.plan import Choice, Plan, Spent, Standing
from lengthwise.search._run import Run
from lengthwise.search.bench import better
from lengthwise.search.frontiers import frontiers
from lengthwise.search.objectives import Question
from lengthwise.search.shifts import shifts
from lengthwise.search.space import Axes, Settings, names_of, settings_key
from lengthwise.search.strategy import Strategy
from lengthwise.search.why import advantages, regions

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
    facts: dict[str, str] | None = None,
) -> Plan:
    """The plan of a question over configurations.

    Args:
        name: Of the question.
        settings: The configurations; with a strategy it proposes them instead.
        axes: What varies, for reports.
        run: What evaluates, where and what is kept.
        options: How far to go.
        facts: What was asked, for headings.
    """
    question = run.bench.question
    looked = _explored(run, options) if options.strategy else _scouted(list(settings), run, options)
    ranked = _ranked(looked, run, options)
    ordered = named(_ordered(ranked, question))
    first = [c for c in ordered if c.standing is Standing.RANKED]
    moved = shifts(run, ordered, question) if options.sensitivity and first else ()
    return Plan(
        name=name,
        facts=facts or {},
        objective=question.objective,
        limits=question.promises.limits,
        axes=axes,
        choices=tuple(ordered),
        tied=_tied(first, question),
        why=advantages(ordered, axes, question),
        frontiers=frontiers(ordered, question.promises.limits),
        shifts=moved,
        regions=regions(ordered),
        spent=_spent(ordered, run),
        level=question.level,
    )


def named(choices: Sequence[Choice]) -> list[Choice]:
    """The choices with short names that tell them apart."""
    names = names_of([c.settings for c in choices])
    return [replace(choice, name=name) for choice, name in zip(choices, names, strict=True)]


def _scouted(settings: list[Settings], run: Run, options: Options) -> list[Choice]:
    """Every configuration: scouted, rejected, or pruned by its bound."""
    blank = [Choice(settings_key(s), "", s, 0, 0.0, Standing.PRUNED) for s in settings]
    run.expect("bound", len(blank))
    bounded = run.each("bound", blank)
    alive = [c for c in bounded if c.standing is Standing.PRUNED]
    done = [c for c in bounded if c.standing is not Standing.PRUNED]
    waiting = sorted(alive, key=lambda c: _order(c.bound, run.bench.question))
    run.expect("scout", len(waiting))
    pruned: list[Choice] = []
    for wave in _waves(waiting):
        hopeful = [c for c in wave if options.exhaustive or not _hopeless(c, done, run, options)]
        pruned += [c for c in wave if c not in hopeful]
        done += run.each("scout", hopeful, _least(done, run, options))
        run.expect("scout", len(waiting) - len(pruned))
    return done + [_pruned(c) for c in pruned]


def _explored(run: Run, options: Options) -> list[Choice]:
    """What a strategy proposes, wave by wave."""
    question, strategy = run.bench.question, options.strategy
    assert strategy is not None  # the caller has seen to it
    done: list[Choice] = []
    while wave := strategy.ask():
        blank = [Choice(settings_key(s), "", s, 0, 0.0, Standing.PRUNED) for s in wave]
        bounded = run.each("bound", blank)
        scouted = iter(run.each("scout", [c for c in bounded if c.standing is Standing.PRUNED]))
        whole = [next(scouted) if c.standing is Standing.PRUNED else c for c in bounded]
        strategy.tell([(c.settings, _score(c, question)) for c in whole])
        done += whole
    return done


def _ranked(looked: list[Choice], run: Run, options: Options) -> list[Choice]:
    """The same choices, the best of them exact: all that could be among the best."""
    question = run.bench.question
    by_key = {c.key: c for c in looked}
    roughly = {c.key: c.objective.value for c in looked if c.standing is Standing.SCOUTED}
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
    by_key: dict[str, Choice],
    exact: dict[str, Choice],
    roughly: dict[str, float],
    question: Question,
    options: Options,
) -> list[Choice]:
    """What is to be ranked next: the first ``top``, then whoever may still beat the best."""
    left = [c for c in by_key.values() if c.standing is Standing.SCOUTED and c.key not in exact]
    left.sort(key=lambda c: _order(c.objective.value, question))
    held = [c for c in exact.values() if c.standing is Standing.RANKED]
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
    held = [c for c in exact.values() if c.standing is Standing.RANKED]
    if len(held) < options.top:
        return ()
    best = _best_of(held, question).objective
    half = 0.0 if math.isnan(best.half_width) else best.half_width
    return (best.value - half if question.objective.higher_is_better else best.value + half,)


def _best_of(held: Sequence[Choice], question: Question) -> Choice:
    return min(held, key=lambda c: _order(c.objective.value, question))


def _pruned_too_early(
    by_key: dict[str, Choice], exact: dict[str, Choice], question: Question, options: Options
) -> list[Choice]:
    """Those pruned by a hope that did not come true."""
    held = [c for c in exact.values() if c.standing is Standing.RANKED]
    held.sort(key=lambda c: _order(c.objective.value, question))
    pruned = [c for c in by_key.values() if c.standing is Standing.PRUNED and not c.simulations]
    if len(held) < options.top:
        return [replace(c, reason="", region="") for c in pruned[:LARGEST_WAVE]]
    last = held[options.top - 1].objective.value
    return [replace(c, reason="", region="") for c in pruned if better(c.bound, last, question)]


def _hopeless(choice: Choice, done: Sequence[Choice], run: Run, options: Options) -> bool:
    """Whether its bound is worse than what the last of the best surely reaches."""
    question = run.bench.question
    found = sorted(
        (c.objective.value for c in done if c.standing is Standing.SCOUTED), key=lambda v: _order(v, question)
    )
    if len(found) < options.top or math.isnan(choice.bound):
        return False
    last = found[options.top - 1]
    prudent = last * PRUDENCE if question.objective.higher_is_better else last / PRUDENCE
    return better(prudent, choice.bound, question)


def _least(done: Sequence[Choice], run: Run, options: Options) -> tuple[float, ...]:
    """The objective that a configuration must reach to be scouted whole; nothing while few are known."""
    found = sorted(
        _order(c.objective.value, run.bench.question) for c in done if c.standing is Standing.SCOUTED
    )
    if options.exhaustive or len(found) < options.top or not run.bench.question.objective.higher_is_better:
        return ()
    return (-found[options.top - 1] * FAR,)


def _pruned(choice: Choice) -> Choice:
    return replace(
        choice, reason="even without any queueing it would be worse", region="cannot be among the best"
    )


def _ordered(choices: Sequence[Choice], question: Question) -> list[Choice]:
    """Ranked first, best first; then scouted, pruned and rejected ones."""
    standings = list(Standing)

    def key(c: Choice) -> tuple[float, ...]:
        known = c.bound if c.standing is Standing.PRUNED else c.objective.value
        return (standings.index(c.standing), _order(known, question), _use(c, question), -c.bound_rps)

    return sorted(choices, key=lambda c: (*key(c), c.key))


def _use(choice: Choice, question: Question) -> float:
    """How much of the limits a choice uses at its operating point: what parts equal objectives."""
    if choice.at is None:
        return math.inf
    used = [
        choice.at.value(limit.metric) / limit.bound
        for limit in question.promises.limits
        if not limit.at_least
    ]
    return max(used, default=0.0)


def _order(value: float, question: Question) -> float:
    if math.isnan(value):
        return math.inf
    return -value if question.objective.higher_is_better else value


def _score(choice: Choice, question: Question) -> float | None:
    if choice.standing is not Standing.SCOUTED:
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
    count = {standing: sum(c.standing is standing for c in choices) for standing in Standing}
    return Spent(
        candidates=len(choices),
        simulated=sum(c.simulations > 0 for c in choices),
        pruned=count[Standing.PRUNED],
        rejected=count[Standing.REJECTED],
        reused=run.reused,
        simulations=run.simulations,
        requests=run.requests,
        seconds=run.seconds(),
    )
