"""Sensitivity: what another bound of a limit would give."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lengthwise.schema.plan import Choice, Limit, Shift, Standing
from lengthwise.search._run import Run
from lengthwise.search.bench import better
from lengthwise.search.frontiers import frontier
from lengthwise.search.limits import LATENCIES
from lengthwise.search.objectives import Question

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
        asked = _asked(choices, limit, question)
        run.expect("shift", run.done.get("shift", 0) + len(asked) * len(FACTORS))
        rough = {factor: run.each("shift", asked, (limit.metric, factor)) for factor in FACTORS}
        told += [_best(limit, factor, asked, rough, question) for factor in FACTORS]
    return tuple(told)


def _asked(choices: Sequence[Choice], limit: Limit, question: Question) -> list[Choice]:
    """The leaders, and those who are fast in this metric."""
    known = [c for c in choices if c.standing is Standing.RANKED]
    fast = {trade.choice for trade in frontier(known, limit.metric, question.promises.limits)[-LEADERS:]}
    return [c for at, c in enumerate(known) if at < LEADERS or c.name in fast]


def _best(
    limit: Limit, factor: float, asked: Sequence[Choice], rough: dict[float, list[Choice]], question: Question
) -> Shift:
    best, name = math.nan, ""
    for at, choice in enumerate(asked):
        then, now = rough[factor][at].objective.value, rough[1.0][at].objective.value
        value = choice.objective.value * then / now if now else math.nan
        if better(value, best, question):
            best, name = value, choice.name
    return Shift(limit.metric, limit.bound * factor, name, best)
