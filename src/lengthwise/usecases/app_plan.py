"""Plan an application: expand it over the input rows, sample output lengths, and place models in stages on the GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lengthwise import catalog
from lengthwise.apps.app import App, Model
from lengthwise.apps.expand import ExpandedApp, expand
from lengthwise.apps.inputs import UNLIMITED_TOKENS, Rows
from lengthwise.apps.plan import DEFAULT, METHODS, PlanOptions, Space, plan, what_if
from lengthwise.apps.plan.draws import draw
from lengthwise.cost.model_error import DRAWS, MAX_REPEATED_REQUESTS
from lengthwise.schema.app import AppPlan, TaskDraw
from lengthwise.schema.errors import InputError, UnknownNameError

PlanSearch = Callable[[Callable[[AppPlan], None]], AppPlan]
"""A function that returns the final plan. Before that it passes a first plan to the function that is its argument."""
_PLANNING, _EVALUATION = 0, 1
"""Second entry of a length sample's seed: samples to plan with differ from samples that evaluate the makespan."""


def _in_background(search: PlanSearch) -> tuple[Future[AppPlan], Future[AppPlan]]:
    """Run a search in a daemon thread. Return futures of the first plan, to start engines, and of the final plan."""
    first, final = Future[AppPlan](), Future[AppPlan]()

    def run() -> None:
        try:
            found = search(first.set_result)
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits for the plan
            for future in (final, first):
                if not future.done():
                    future.set_exception(error)
        else:
            for future in (final, first):
                if not future.done():
                    future.set_result(found)

    threading.Thread(target=run, name="plan", daemon=True).start()
    return first, final


@dataclass(frozen=True)
class PlanSettings:
    """Options for planning an application."""

    method: str = DEFAULT  # "lengthwise", or a name of ``apps.plan.METHODS``
    compare: bool = True  # evaluate the other methods too
    draws: int = 3  # length samples on which all plans are compared
    finalist_draws: int = 24  # further samples on which plans that are nearly as good as the best are compared
    true_draws: int = 12  # length samples that evaluate the makespan
    quantile: float | None = None  # minimize this quantile of the makespan; None: its mean
    seed: int = 0
    what_ifs: bool = True
    model_draws: int = DRAWS  # of the cost model's error; 0: makespans have no interval for it

    def __post_init__(self) -> None:
        if self.draws < 1 or self.true_draws < 2:
            raise InputError(
                "a plan needs at least 1 length sample to plan with and 2 to evaluate its makespan; got "
                f"{self.draws} and {self.true_draws}"
            )
        if self.method != DEFAULT and self.method not in METHODS:
            raise UnknownNameError("planning method", self.method, (DEFAULT, *METHODS))


@dataclass(frozen=True, eq=False)
class PlannedApp:
    """An application expanded over its input rows, with samples of output lengths and a plan."""

    expanded: ExpandedApp
    draws: tuple[TaskDraw, ...]
    space: Space | None = None  # plans and deployments of the models; None: the engines are given
    plan: AppPlan | None = None  # None: the engines are given
    # Waits for the plan that a background search still refines; None: ``plan`` is final.
    final_plan: Callable[[], AppPlan] | None = None


def planned_app(
    app: App,
    rows: Rows,
    space: Space,
    settings: PlanSettings | None = None,
    *,
    given: AppPlan | None = None,
    early: bool = False,
) -> PlannedApp:
    """Expand an application over its input rows, and plan how to run the models on the GPUs.

    Args:
        space: The plans that are possible on the GPUs.
        given: Use this plan instead of a search.
        early: Return as soon as there is a first plan. A search in the background improves it while engines start.
    """
    settings = settings or PlanSettings()
    sampled = replace(sampled_app(app, rows, settings), space=space)
    if given is not None:
        names = tuple(model.name for model in app.models)
        if given.models != names:
            raise InputError(
                f"the plan must have the application's models {', '.join(names)}; it has {', '.join(given.models)}. "
                "Plan again: lengthwise app plan --json"
            )
        return replace(sampled, plan=given)
    if not early:
        return replace(sampled, plan=_find_plan(sampled, space, settings))
    first, final = _in_background(lambda begin: _find_plan(sampled, space, settings, begin))
    return replace(sampled, plan=first.result(), final_plan=final.result)


def sampled_app(app: App, rows: Rows, settings: PlanSettings | None = None) -> PlannedApp:
    """Return an application with samples of output lengths but without a plan, for engines that already run."""
    settings = settings or PlanSettings()
    expanded = expand(app, rows.rows, rows.ids)
    if not len(expanded.tasks):
        raise InputError("the application has no requests on these rows: every list that it iterates over is empty")
    seeds = [(settings.seed, _PLANNING, k) for k in range(settings.draws)]
    return PlannedApp(expanded, length_samples(expanded, seeds))


def _find_plan(
    sampled: PlannedApp, space: Space, settings: PlanSettings, begin: Callable[[AppPlan], None] | None = None
) -> AppPlan:
    seeds = [(settings.seed, _EVALUATION, k) for k in range(settings.true_draws)]
    true_draws = length_samples(sampled.expanded, seeds)
    methods = tuple(METHODS) if settings.compare else ()
    options = PlanOptions(
        settings.method,
        methods,
        settings.quantile,
        compared=settings.draws,
        model_draws=settings.model_draws if len(sampled.expanded.tasks) <= MAX_REPEATED_REQUESTS else 0,
    )
    seeds = [(settings.seed, _PLANNING, settings.draws + k) for k in range(settings.finalist_draws)]
    draws = (*sampled.draws, *length_samples(sampled.expanded, seeds))
    problem = sampled.expanded.tasks, draws, space.models, space.cluster
    shared: dict[str, Any] = {"true_draws": true_draws, "times": space.times, "options": options}
    notes = _notes(sampled.expanded)

    def with_notes(made: AppPlan) -> AppPlan:
        return replace(made, notes=(*notes, *made.notes))

    made = plan(*problem, **shared, begin=None if begin is None else lambda first: begin(with_notes(first)))
    if settings.what_ifs:
        made = replace(made, what_ifs=what_if(*problem, made, **shared))
    return with_notes(made)


def context_lengths(models: Sequence[Model]) -> list[int]:
    """Return for each model the largest number of tokens of a prompt and its output together."""
    return [model.max_model_len or catalog.model(model.spec).max_model_len for model in models]


def length_samples(expanded: ExpandedApp, seeds: Sequence[tuple[int, ...]]) -> tuple[TaskDraw, ...]:
    """Return for each seed one sample of the output lengths of all tasks."""
    models = expanded.app.models
    lengths, contexts = [model.lengths for model in models], context_lengths(models)
    return tuple(draw(expanded.tasks, lengths, contexts, seed) for seed in seeds)


def _notes(expanded: ExpandedApp) -> list[str]:
    tasks, models, notes = expanded.tasks, expanded.app.models, list[str]()
    if len(tasks) > MAX_REPEATED_REQUESTS:
        notes.append(
            f"makespans have no interval of the cost model's error: of more than {MAX_REPEATED_REQUESTS:,} requests, "
            "none is simulated again with perturbed costs"
        )
    if unknown := [model.name for model in models if model.lengths is None]:
        notes.append(
            f"lengths of {', '.join(unknown)} are unknown, so their outputs count as long as max_tokens allows; give "
            "lengths, or measure them (lengthwise app profile)"
        )
    contexts = np.array(context_lengths(models))
    requested = tasks.prompt_tokens + tasks.max_tokens
    # A request without max_tokens is sent without a limit, so engines do not refuse it.
    over = (requested > contexts[tasks.model]) & (tasks.max_tokens < UNLIMITED_TOKENS)
    for call, model in sorted(set(zip(tasks.call[over].tolist(), tasks.model[over].tolist(), strict=True))):
        rows = over & (tasks.call == call) & (tasks.model == model)
        notes.append(
            f"{int(rows.sum()):,} requests of {tasks.calls[call]} need up to {int(requested[rows].max()):,} tokens for "
            f"prompt and output, and {tasks.models[model]} has a context of {contexts[model]:,}: engines refuse them, "
            "and their tasks are dead. Lower max_tokens, or shorten the prompt"
        )
    return notes
