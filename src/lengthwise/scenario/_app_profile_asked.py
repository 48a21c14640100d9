"""What of an application is measured, how much of it, and what tells one such measurement from another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lengthwise.apps.app import App
from lengthwise.apps.launch import Loaded, Patience
from lengthwise.apps.launch.local import USUAL
from lengthwise.apps.plan import Space
from lengthwise.scenario._app_profile_book import digest, mean_of
from lengthwise.scenario._app_profile_lengths import Said
from lengthwise.schema.app import ModelPlan
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.estimate import Estimate

SHAPES = ("smallest", "all")


@dataclass(frozen=True)
class Profiling:
    """What is measured, and where.

    Attributes:
        app: The application.
        rows: All of its inputs.
        loaded: How engines of its models are started, in their order.
        space: Where they have room on this machine.
        patience: How long engines may take.
        urls: Of engines that others run, by the models' numbers: they are asked, neither started nor stopped.
    """

    app: App
    rows: Sequence[Mapping[str, Any]]
    loaded: Sequence[Loaded]
    space: Space
    patience: Patience = USUAL
    urls: Mapping[int, Sequence[str]] | None = None


@dataclass(frozen=True)
class Wanted:
    """How much is measured.

    Attributes:
        models: Names; () all.
        rows: Of the sample, at most; 0: no lengths.
        times: How often each engine is started.
        shapes: "smallest": on as few GPUs of each kind as will do; "all": every replica that a plan may have.
        calibrate: Whether cost tables are calibrated.
        again: Whether what is there is measured again.
        seed: Of the sample, and of what is sent.
    """

    models: tuple[str, ...] = ()
    rows: int = 32
    times: int = 3
    shapes: str = "smallest"
    calibrate: bool = False
    again: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shapes not in SHAPES:
            raise UnknownNameError("choice of shapes", self.shapes, SHAPES)
        if self.rows < 0 or self.times < 1:
            raise InputError(
                f"rows must be at least 0 and times at least 1; they are {self.rows} and {self.times}"
            )


def shapes(space: Space, model: int, choice: str) -> list[ModelPlan]:
    """One replica of each shape that a model may have, from the fewest GPUs; or of the smallest of each kind."""
    each = [plan for plan in space.plans(model) if plan.dp == 1]
    if choice == "all":
        return each
    first: dict[str, ModelPlan] = {}
    for plan in each:
        first.setdefault(plan.gpu, plan)
    return list(first.values())


def identity(app: App) -> str:
    """Tells what an application asks of its models from what others ask."""
    return digest(app.calls, app.loops, [model.identity() for model in app.models])


def mean_over_rows(said: Sequence[Said]) -> Estimate:
    """Mean output tokens; the interval is that of rows, whose outputs have much in common.

    A ratio of sums: by the linearised residuals of rows (Cochran, Sampling Techniques, 6.3).
    """
    if not said:
        return mean_of([])
    row = np.unique([one.row for one in said], return_inverse=True)[1]
    tokens = np.bincount(row, [one.output_tokens for one in said])
    counts = np.bincount(row)
    mean = float(tokens.sum() / counts.sum())
    residuals = (tokens - mean * counts) / counts.mean()
    return Estimate(mean, mean_of(residuals.tolist()).half_width)


def where(plan: ModelPlan) -> str:
    """A replica's shape in words."""
    extra = f", pp={plan.pp}" if plan.pp > 1 else ""
    return f"{plan.gpu}, tp={plan.tp}{extra}"
