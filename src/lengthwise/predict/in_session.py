"""Predictions from the earlier outputs of a request's session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from lengthwise.predict.contract import Ints, Predictor, Prompts, Samples
from lengthwise.predict.distribution import LEVELS, Floats, LengthDistribution
from lengthwise.predict.serialization import State, fitted, packed, unpacked
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import Workload

EARLIER_TURNS = 8  # number of earlier requests of its session of which a request has the output length
_MIN_PAIRS = 30


def earlier_tokens(workload: Workload, turns: int = EARLIER_TURNS) -> Floats | None:
    """Return [n, turns] the output lengths of the earlier requests of each request's session, the latest one last.

    Of the ``turns`` requests before a request, in the order of the columns "session" and "turn" of ``extra``, those of
    an earlier turn count: requests of one turn run at the same time. The other places, at the start of a row, are NaN.
    Without these two columns, the result is None.
    """
    if not {"session", "turn"} <= set(workload.extra):
        return None
    session = np.unique(workload.extra["session"], return_inverse=True)[1].reshape(-1)
    turn = np.asarray(workload.extra["turn"])
    order = np.lexsort((turn, session))
    found = np.full((len(workload), turns), np.nan)
    for back in range(1, min(turns, len(workload) - 1) + 1):
        request, before = order[back:], order[:-back]
        knows = (session[request] == session[before]) & (turn[request] > turn[before])
        found[request[knows], -back] = workload.output_tokens[before[knows]]
    at_end = np.argsort(np.isfinite(found), axis=1, kind="stable")
    return np.asarray(np.take_along_axis(found, at_end, axis=1))


def samples_of(workload: Workload, model: str | None = None) -> Samples:
    """Return a workload's requests, all of one ``model``, as samples without texts, grouped by session."""
    n = len(workload)
    models = None if model is None else [model] * n
    prompts = Prompts(n, None, workload.prompt_tokens, models, earlier_tokens=earlier_tokens(workload))
    group = np.unique(workload.extra["session"], return_inverse=True)[1] if "session" in workload.extra else None
    return Samples(prompts, workload.output_tokens, np.zeros(n, bool), group=group)


class InSession:
    """Shifts the predictions of ``inner`` by the lengths of the earlier outputs of the session.

    The model is log(length / median that ``inner`` predicts) = effect of the session + error, both normal with constant
    variances (a one-way model with random effects). ``fit`` learns their intraclass correlation rho, from pairs of
    consecutive requests. Let m be the mean of log(length / median) over the k earlier requests. In logarithms, the
    quantiles move by w m, with w = k rho / (1 + (k - 1) rho), and their distances to the median shrink by the factor
    sqrt(1 - rho w): the best linear prediction (Searle, Casella and McCulloch 1992, chapter 7). A request without
    earlier requests keeps the prediction of ``inner``.
    """

    kind: ClassVar[str] = "in_session"
    reads_sessions: ClassVar[bool] = True
    predicts_once: ClassVar[bool] = True

    def __init__(self, inner: Predictor) -> None:
        self.inner = inner
        self.correlation_: float | None = None

    def fit(self, samples: Samples) -> Self:
        """Fit the inner predictor, and learn the correlation rho of the output lengths in a session.

        Raises InputError if fewer than 30 samples have an earlier turn.
        """
        self.inner.fit(samples)
        earlier = samples.prompts.earlier_tokens
        rows = np.flatnonzero(np.isfinite(earlier[:, -1])) if earlier is not None else np.zeros(0, int)
        if earlier is None or len(rows) < _MIN_PAIRS:
            raise InputError(
                f"at least {_MIN_PAIRS} samples must have an earlier turn in their session; {len(rows)} have one; "
                "give a trace of sessions"
            )
        median = np.log(self.inner.predict(samples.prompts, 0).median)
        own = (np.log(samples.output_tokens) - median)[rows]
        before = np.log(earlier[rows, -1]) - median[rows]
        own, before = own - own.mean(), before - before.mean()
        scale = float(np.sqrt(np.mean(own**2) * np.mean(before**2)))
        self.correlation_ = float(np.clip(np.mean(own * before) / scale, 0.0, 1.0)) if scale else 0.0
        return self

    def predict(self, prompts: Prompts, tokens_so_far: int | Ints = 0) -> LengthDistribution:
        """Return the inner distributions, shifted by the earlier outputs and conditioned on ``tokens_so_far``."""
        rho, predicted = fitted(self, "correlation_"), self.inner.predict(prompts, 0).at(LEVELS)
        if prompts.earlier_tokens is None or not len(prompts):
            return predicted.given(tokens_so_far)
        known = np.isfinite(prompts.earlier_tokens)
        count = known.sum(axis=1)
        center = np.log(predicted.median)
        total = np.log(np.where(known, prompts.earlier_tokens, 1.0)).sum(axis=1)
        weight = count * rho / (1 + np.maximum(count - 1, 0) * rho)
        shift = weight * (total / np.maximum(count, 1) - center * (count > 0))
        spread = np.sqrt(1 - rho * weight)[:, None]
        tokens = np.exp(center[:, None] + shift[:, None] + spread * (np.log(predicted.tokens) - center[:, None]))
        tokens[count == 0] = predicted.tokens[count == 0]
        return LengthDistribution.of(tokens).given(tokens_so_far)

    def state(self) -> State:
        """Return the JSON values and the arrays from which ``from_state`` restores the predictor."""
        meta, arrays = packed(self.inner, "inner/")
        return {"inner": meta, "correlation": fitted(self, "correlation_")}, arrays

    @classmethod
    def from_state(cls, meta: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Self:
        """Return the predictor from the JSON values and the arrays that ``state`` returned."""
        loaded = cls(unpacked(meta["inner"], arrays, "inner/"))
        rho = meta["correlation"]
        if type(rho) not in (int, float) or not 0 <= rho <= 1:
            raise InputError(f"correlation must be from 0 to 1; it is {rho!r}")
        loaded.correlation_ = float(rho)
        return loaded
