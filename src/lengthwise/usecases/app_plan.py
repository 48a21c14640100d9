"""An application planned: unrolled over its rows, drawn, and laid out in stages on its GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import numpy as np

from lengthwise import catalog
from lengthwise.apps.app import App, Model
from lengthwise.apps.expand import Unrolled, expand
from lengthwise.apps.inputs import UNLIMITED_TOKENS, Rows
from lengthwise.apps.plan import DEFAULT, METHODS, RequestSpec, Space, plan, what_if
from lengthwise.apps.plan.draws import draw
from lengthwise.schema.app import AppPlan, TaskDraw
from lengthwise.schema.errors import InputError, UnknownNameError

SeekFunction = Callable[[Callable[[AppPlan], None]], AppPlan]
"""Finds a plan, and tells before that with which to begin."""


class Seeking:
    """Looks at once; a process that ends does not wait for it."""

    def __init__(self, poll: SeekFunction) -> None:
        self._poll = poll
        self._first: Future[AppPlan] = Future()
        self._complete: Future[AppPlan] = Future()
        threading.Thread(target=self._run, name="plan", daemon=True).start()

    def _run(self) -> None:
        try:
            made = self._poll(self._first.set_result)
        except BaseException as error:  # noqa: BLE001 - whoever asks for the plan is told
            self._complete.set_exception(error)
            if not self._first.done():
                self._first.set_exception(error)
        else:
            self._complete.set_result(made)
            if not self._first.done():
                self._first.set_result(made)

    def first(self) -> AppPlan:
        """The plan to begin with, once it is there."""
        return self._first.result()

    def complete(self) -> AppPlan:
        """The plan, once it is found."""
        return self._complete.result()


_WITH, _TRUE = 0, 1
"""Draws that are planned with, and those that tell the makespan."""


@dataclass(frozen=True)
class Planning:
    """How to plan.

    Attributes:
        method: "lengthwise", or a name of ``apps.plan.METHODS``.
        quantile: Plan against this quantile of the makespan; None: the mean.
    """

    method: str = DEFAULT
    additional: bool = True
    draws: int = 3
    true_draws: int = 12
    quantile: float | None = None
    seed: int = 0
    what_ifs: bool = True

    def __post_init__(self) -> None:
        if self.draws < 1 or self.true_draws < 2:
            raise InputError(
                f"a plan needs at least 1 draw to plan with and 2 to tell its makespan; they are {self.draws} and "
                f"{self.true_draws}"
            )
        if self.method != DEFAULT and self.method not in METHODS:
            raise UnknownNameError("planning method", self.method, (DEFAULT, *METHODS))

    @property
    def requested(self) -> RequestSpec:
        """As the planner takes it."""
        return RequestSpec(self.method, tuple(METHODS) if self.additional else (), self.quantile)


@dataclass(frozen=True, eq=False)
class PlannedApp:
    """A plan with all that it was made from.

    Attributes:
        space: Plans and deployments of its models; None: engines are given.
        plan: What runs when; None: all engines are there at once.
        sought: Waits for the plan that is still looked for while engines of this one start; None: it is this one.
    """

    expanded: Unrolled
    draws: tuple[TaskDraw, ...]
    space: Space | None = None
    plan: AppPlan | None = None
    sought: Callable[[], AppPlan] | None = None


def planned_app(
    app: App,
    rows: Rows,
    space: Space,
    how: Planning | None = None,
    *,
    given: AppPlan | None = None,
    begins: bool = False,
) -> PlannedApp:
    """An application's plan on its rows.

    Args:
        begins: Whether to come back with a plan at first sight, whose engines can start while a better one is sought.
    """
    how = how or Planning()
    whole = drawn_app(app, rows, how)
    if given is not None:
        return replace(whole, space=space, plan=_of_this(given, app))
    whole = replace(whole, space=space)
    if not begins:
        return replace(whole, plan=_plan_of(whole, space, how))
    seeking = Seeking(lambda begin: _plan_of(whole, space, how, begin))
    return replace(whole, plan=seeking.first(), sought=seeking.complete)


def _plan_of(
    complete: PlannedApp, space: Space, how: Planning, begin: Callable[[AppPlan], None] | None = None
) -> AppPlan:
    true_draws = draws_of(complete.expanded, [(how.seed, _TRUE, k) for k in range(how.true_draws)])
    tasks, models, times = complete.expanded.tasks, space.models, space.times
    notes = _notes(complete.expanded)

    def noted(made: AppPlan) -> AppPlan:
        return replace(made, notes=(*notes, *made.notes))

    made = plan(
        tasks, complete.draws, models, space.cluster, true_draws=true_draws, times=times, requested=how.requested,
        begin=None if begin is None else lambda one: begin(noted(one)),
    )  # fmt: skip
    if how.what_ifs:
        others = what_if(
            tasks,
            complete.draws,
            models,
            space.cluster,
            made,
            true_draws=true_draws,
            times=times,
            requested=how.requested,
        )
        made = replace(made, what_ifs=others)
    return noted(made)


def drawn_app(app: App, rows: Rows, how: Planning | None = None) -> PlannedApp:
    """An application on its rows, and lengths to expect, without a plan: its engines are given."""
    how = how or Planning()
    expanded = expand(app, rows.rows, rows.ids)
    if not len(expanded.tasks):
        raise InputError("the application asks nothing on these rows: every list that it goes over is empty")
    return PlannedApp(expanded, draws_of(expanded, [(how.seed, _WITH, k) for k in range(how.draws)]))


def _of_this(plan: AppPlan, app: App) -> AppPlan:
    names = tuple(model.name for model in app.models)
    if plan.models != names:
        raise InputError(
            f"the plan is of the models {', '.join(plan.models)}, the application's are {', '.join(names)}; plan it "
            "anew (lengthwise app plan --json)"
        )
    return plan


def longest_of(models: Sequence[Model]) -> list[int]:
    """Tokens of prompt and output that each model takes."""
    return [one.max_model_len or catalog.model(one.spec).max_model_len for one in models]


def draws_of(expanded: Unrolled, seeds: Sequence[tuple[int, ...]]) -> tuple[TaskDraw, ...]:
    """Ways in which an application may turn out."""
    models = expanded.app.models
    lengths, longest = [one.lengths for one in models], longest_of(models)
    return tuple(draw(expanded.tasks, lengths, longest, seed) for seed in seeds)


def _notes(expanded: Unrolled) -> list[str]:
    """What is assumed for want of anything better, and what engines will refuse."""
    app = expanded.app
    unknown = [one.name for one in app.models if one.lengths is None]
    notes = []
    if unknown:
        notes.append(
            f"outputs of {', '.join(unknown)} are taken to be as long as they may be; give lengths, or measure them "
            "(lengthwise app profile)"
        )
    return notes + _too_long(expanded)


def _too_long(expanded: Unrolled) -> list[str]:
    """By call and model: requests that ask, with their own prompts alone, for more than the model's context."""
    tasks, models, notes = expanded.tasks, expanded.app.models, []
    longest = np.array(longest_of(models))
    asked = tasks.prompt_tokens + tasks.max_tokens
    # What has no limit is not sent with one.
    over = (asked > longest[tasks.model]) & (tasks.max_tokens < UNLIMITED_TOKENS)
    for call, model in sorted(set(zip(tasks.call[over].tolist(), tasks.model[over].tolist(), strict=True))):
        mine = over & (tasks.call == call) & (tasks.model == model)
        notes.append(
            f"{int(mine.sum()):,} requests of {tasks.calls[call]} ask for up to {int(asked[mine].max()):,} tokens, "
            f"prompt and output, and {tasks.models[model]} takes {longest[model]:,}: engines refuse such requests, and "
            "their tasks are dead then. Lower max_tokens, or shorten the prompt"
        )
    return notes
