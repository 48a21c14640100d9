"""What a plan and a run come to, a sentence each."""

from __future__ import annotations

from collections.abc import Iterator

from lengthwise.report._numbers import percent
from lengthwise.report.apps._facts import AppFacts
from lengthwise.report.apps._words import WHY, difference, idle_shares, supposed, took, took_about
from lengthwise.schema.app import AppMethod, AppPlan

WORTH_SHARE = 0.005
"""Shares of GPU time below it are not named."""


def sentences(plan: AppPlan, about: AppFacts) -> list[str]:
    """The answer: how long, how sure, what GPUs do, what others would take, what would help."""
    return [*_makespan(plan, about), *_idle(plan, about), *_others(plan), *_helps(plan)]


def _makespan(plan: AppPlan, about: AppFacts) -> Iterator[str]:
    stages = f"{len(plan.stages)} stage{'s' if len(plan.stages) != 1 else ''}"
    on = f" on {len(about.gpus)} GPU{'s' if len(about.gpus) != 1 else ''}" if about.gpus else ""
    told = f"All is done in {took_about(plan.makespan)}{on}, in {stages}"
    draws = len(plan.makespans_s)
    if draws > 1 and plan.makespan.has_interval:
        told += f": the mean over {draws} draws of lengths that were not planned with, and its 95 % interval"
    yield f"{told}."
    low, high = plan.quantiles_s.get(0.05), plan.quantiles_s.get(0.95)
    if low is not None and high is not None:
        yield f"Nine draws of ten lie within {took(low)} to {took(high)}."


def _idle(plan: AppPlan, about: AppFacts) -> Iterator[str]:
    shares = idle_shares(plan, len(about.gpus))
    if not shares:
        return
    works = max(0.0, 1.0 - sum(share for _, share in shares))
    told = [f"{percent(share)} {WHY.get(why, why)}" for why, share in shares if share >= WORTH_SHARE]
    rest = f"; the rest: {', '.join(told)}" if told else ""
    yield f"Models run in {percent(works)} of all GPU time{rest}."


def _others(plan: AppPlan) -> Iterator[str]:
    others = sorted((one for one in plan.methods if one.name != plan.method), key=lambda one: one.gain)
    if not others:
        return
    told = ", ".join(f"{one.name.replace('_', ' ')} {one.gain:.2f}" for one in others)
    yield f"Planned otherwise it takes, search and all, so many times as long: {told}."
    mine = next((one for one in plan.methods if one.name == plan.method), None)
    if mine is not None:
        yield from _search(mine, others)


def _search(mine: AppMethod, others: list[AppMethod]) -> Iterator[str]:
    best = min(others, key=lambda one: one.makespan.value)
    saved_s = best.makespan.value - mine.makespan.value
    more_s = mine.search_s - best.search_s
    if saved_s > 0 and more_s > 0:
        yield (
            f"Of the others' plans, that of {best.name.replace('_', ' ')} ends first; looking for a better one took "
            f"{took(more_s)} and brought {took(saved_s)}."
        )


def _helps(plan: AppPlan) -> Iterator[str]:
    for one in plan.what_ifs:
        change = difference(one.difference, plan.makespan.value)
        thing = supposed(one)
        if change == "none":
            yield f"With {thing} it would take as long."
        else:
            yield f"With {thing} it would take {took_about(one.makespan)} ({change})."
