"""From the table [predictor] to predictions of a workload."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise import predict
from lengthwise import workload as w
from lengthwise.scenario._places import resolved
from lengthwise.scenario._predictor import PredictorSection
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import Workload

LEARNT_FROM, LEARNING_SEED = 10_000, 2**64 + 1
"""Requests that a predictor without a file learns from, and their seed: no run has it."""


@dataclass(frozen=True)
class Forecast:
    """Attaches a section's predictions to workloads.

    Attributes:
        section: What the file says.
        predictor: Ready to predict.
        model: The model that is deployed, told where a workload does not name its models.
    """

    section: PredictorSection
    predictor: Any
    model: str

    def __call__(self, workload: Workload, seed: int) -> Workload:
        """The workload with predictions; an oracle's errors are those of the seed.

        Raises:
            InputError: The predictor reads prompts, and the workload has none; nor models, which it may know.
        """
        asked = self.section
        if not {"prompt", "model"} & set(workload.extra) and _reads_text(self.predictor):
            raise InputError(
                "this predictor reads prompts and the workload has none, so it would say the same of every request; "
                "replay a trace that has prompts, or take a kind that needs none, such as bucket_ecdf"
            )
        return predict.attach(
            workload,
            self.predictor,
            window_tokens=asked.window_tokens,
            statistic=asked.statistic,
            repredict=asked.repredict,
            seed=seed,
            model=self.model,
        )


def forecast(
    section: PredictorSection, folder: Path, model: str, others: Callable[[], w.Lengths | None]
) -> Forecast | None:
    """What attaches the predictions that a section asks for; None where it asks for none.

    Args:
        section: The table [predictor].
        folder: Where its paths start.
        model: The deployed model's name.
        others: The distribution that the workload is drawn from, of which other requests can be
            drawn to learn from; None where it is a replayed trace.

    Raises:
        InputError: A file cannot be read, or there is nothing to learn from.
    """
    if section.kind == "none":
        return None
    return Forecast(section, _ready(section, folder, model, others), model)


def _ready(
    section: PredictorSection, folder: Path, model: str, others: Callable[[], w.Lengths | None]
) -> Any:
    if section.kind in ("model", "default"):
        found = _loaded(section, folder)
    else:
        found = section.made()
        lengths = others() if section.learns or section.kind in _FITTABLE else None
        if lengths is not None:
            found.fit(_drawn(lengths, model))
        elif section.learns:
            raise InputError(
                f"a predictor of kind {section.kind} learns from other requests of the workload, and a replayed "
                'trace has none; train one on another trace and name it: kind = "model", file = "x.lwp"'
            )
    return predict.Conditional(found) if section.conditional else found


_FITTABLE = ("bin_neighbour", "confusion", "quantised")


def _loaded(section: PredictorSection, folder: Path) -> Any:
    if section.kind == "model":
        return _read(resolved(section.file or "", folder).resolve())
    shipped = getattr(predict, "default", None)
    if shipped is None:
        raise InputError(
            'this build of lengthwise comes with no default predictor; use kind = "model" and a file'
        )
    return shipped()


def _reads_text(predictor: Any) -> bool:
    """Whether it, or all that it is made of, has prompts alone to go by."""
    if hasattr(predictor, "members"):
        return all(map(_reads_text, predictor.members))
    inner = getattr(predictor, "inner", None)
    return bool(getattr(predictor, "reads_text", False)) or (inner is not None and _reads_text(inner))


@lru_cache(maxsize=8)
def _read(path: Path) -> Any:
    return predict.load(path)


def _drawn(lengths: w.Lengths, model: str) -> predict.Samples:
    """Other requests of the same distribution."""
    prompt, output = lengths.sample(LEARNT_FROM, np.random.default_rng(np.random.SeedSequence(LEARNING_SEED)))
    prompts = predict.Prompts(LEARNT_FROM, prompt_tokens=prompt, model=[model] * LEARNT_FROM)
    return predict.Samples(prompts, output, np.zeros(LEARNT_FROM, bool))
