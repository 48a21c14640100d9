"""Predict output lengths without ever failing or delaying a request."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np

from lengthwise.gateway.config import PredictionConfig
from lengthwise.gateway.length_prediction.learning import Learner
from lengthwise.gateway.length_prediction.prediction import (
    STATISTICS,
    CorrectedPrediction,
    FaultCounter,
    InlineRunner,
    PendingRow,
    Query,
    condition,
    measure_latency_s,
    truncate_text,
)
from lengthwise.gateway.length_prediction.predictor_process import ProcessLimits, ProcessRunner
from lengthwise.gateway.protocols import Clock, Listener, monotonic
from lengthwise.gateway.request import Floats, LengthPrediction, Outcome, Request
from lengthwise.predict.distribution import LEVELS
from lengthwise.schema.errors import InputError

Late = Callable[[int, LengthPrediction], None]
_DEFAULT_TOKENS = 256.0
NONE, DEFAULT = "none", "default"


class LengthPredictor(Listener):
    """Predict lengths and learn from finished requests; an async context manager.

    A predictor of this package that takes less than ``inline_below_s`` per prompt runs on the event loop; any other one
    runs in a process, which may hang or crash (``place``: "inline", "process" or "auto"). Without a result in time, the
    prediction is the distribution of the last finished outputs; ``late`` is called with the later one. ``predictor``
    replaces the configured one, and must be picklable for a process. With ``use_requested`` a length that the client
    fixes counts as known.
    """

    def __init__(
        self,
        config: PredictionConfig,
        clock: Clock = monotonic,
        late: Late | None = None,
        *,
        predictor: Any = None,
        place: str = "auto",
        limits: ProcessLimits | None = None,
        use_requested: bool = True,
    ) -> None:
        self.config, self.clock, self.late, self.use_requested = config, clock, late, use_requested
        self.learner = Learner(config.learn_every)
        self.faults = FaultCounter()
        self.sources: dict[str, int] = dict.fromkeys(("predictor", "prior", "requested", "oracle"), 0)
        self.late_answers = self.drifts = 0
        self.drifted_s: float | None = None
        self.seconds = float("nan")
        self.reads_output: tuple[int, int] | None = None  # tokens so far at which the predictor reads generated text
        self._statistic = STATISTICS[config.statistic]
        self._predictor, self._place, self._limits = predictor, place, limits
        self._runner: InlineRunner | ProcessRunner | None = None

    async def __aenter__(self) -> Self:
        """Load the predictor, or raise InputError."""
        name, predictor, inline_below_s = self.config.predictor, self._predictor, self.config.inline_below_s
        if predictor is None and name == NONE:
            return self
        if predictor is None and name == DEFAULT and self._place != "process":
            from lengthwise.predict import default

            predictor = default()
        elif predictor is None and name != DEFAULT and not Path(name).exists():  # noqa: ASYNC240 - once at the start
            raise InputError(f'the predictor must be "default", "none" or a file; there is no file {name}')
        if self._place == "inline" or (self._place == "auto" and _is_own(predictor)):
            self.seconds = measure_latency_s(predictor)
            if self._place == "inline" or self.seconds < inline_below_s:
                self._run_inline(predictor)
                return self
        process = ProcessRunner(name, self._predictor, self.faults, self._limits)
        await process.start()
        self._runner, self.reads_output, self.seconds = process, process.reads_output, process.seconds
        if self._place == "auto" and self._predictor is None and process.seconds < inline_below_s:
            from lengthwise.predict import opened

            await process.stop()
            self._run_inline(opened(name))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop the process."""
        if self._runner is not None:
            await self._runner.stop()
            self._runner = None

    async def first(self, request: Request, text: str | None) -> LengthPrediction:
        """Return the prediction before the first token, within ``deadline_s``."""
        if self.use_requested and request.requested_tokens > 0:
            prediction = _fixed(request, float(request.requested_tokens), "requested")
        elif self._runner is None:  # equal predictions keep the order of arrival
            prediction = LengthPrediction(min(_DEFAULT_TOKENS, max(1.0, float(request.max_tokens))), "prior")
        else:
            query = Query(truncate_text(text), request.prompt_tokens, request.model)
            row = await self._wait(self._runner.submit(query), functools.partial(self._resolve_late, request))
            prediction = self._believe(request, row)
        self.sources[prediction.source] += 1
        return prediction

    async def repredict(self, request: Request, text: str | None, generated_text: str | None) -> LengthPrediction:
        """Return the prediction after some tokens; the predictor runs again only where it reads the generated text."""
        before, so_far = request.length_prediction, request.generated_tokens
        low, high = self.reads_output or (1, 0)
        if generated_text and low <= so_far <= high and self._runner is not None and before.source == "predictor":
            texts = truncate_text(text), truncate_text(generated_text)
            query = Query(texts[0], request.prompt_tokens, request.model, so_far, texts[1])
            if (row := await self._wait(self._runner.submit(query), None)) is not None:
                if self.config.learn:  # the remaining tokens are corrected as the total is before the first token
                    row = so_far + self.learner.corrected(request.model, np.maximum(row - so_far, 1.0))
                return self._update(request, row, before, so_far)
        return self.known(request)

    def known(self, request: Request) -> LengthPrediction:
        """Return the current prediction given the tokens so far, without a predictor."""
        before, so_far = request.length_prediction, request.generated_tokens
        complete = before.complete if isinstance(before, CorrectedPrediction) else before.quantiles
        if complete is not None:
            return self._update(request, condition(complete, so_far), before, so_far)
        total = max(before.total_tokens, so_far + 1.0)
        return LengthPrediction(min(total, max(1.0, float(request.max_tokens))), before.source, None, so_far)

    def finished(self, request: Request, outcome: Outcome, now_s: float, detail: str = "") -> None:
        """Learn from a finished request unless its length was fixed; ``detail`` "length" marks a censored output."""
        prediction, tokens = request.length_prediction, request.generated_tokens
        if outcome is not Outcome.FINISHED or not isinstance(prediction, CorrectedPrediction) or not self.config.learn:
            return
        if tokens < 1 or request.choices != 1 or (self.use_requested and request.requested_tokens > 0):
            return
        censored = detail == "length" or tokens >= request.max_tokens
        if self.learner.observe(request.model, prediction, tokens, censored=censored):
            self.drifts, self.drifted_s = self.drifts + 1, now_s

    def state(self) -> dict[str, Any]:
        """Return the state for the admin page: predictor, sources, faults, and what was learnt."""
        runner = self._runner
        return {
            "predictor": self.config.predictor if self._predictor is None else type(self._predictor).__name__,
            "where": "none" if runner is None else "process" if runner.waits else "inline",
            "seconds_a_prompt": self.seconds,
            "statistic": self.config.statistic,
            "sources": dict(self.sources),
            "late": self.late_answers,
            "faults": dict(self.faults.faults),
            "last_error": self.faults.last_error,
            "process": runner.state() if isinstance(runner, ProcessRunner) else {},
            "drifts": self.drifts,
            "drifted_s": self.drifted_s,
            **self.learner.state(),
        }

    def _run_inline(self, predictor: Any) -> None:
        self._runner = InlineRunner(predictor, self.faults)
        self.reads_output = getattr(predictor, "reads_output", None)

    async def _wait(self, row: PendingRow, late: Callable[[PendingRow], None] | None) -> Floats | None:
        """Return the row, or None after the deadline."""
        if row.done() or self._runner is None or not self._runner.waits:
            return await row
        await asyncio.wait([row], timeout=self.config.deadline_s)
        if row.done():
            return row.result()
        self.faults.add({"late": 1})
        if late is not None:
            row.add_done_callback(late)
        return None

    def _resolve_late(self, request: Request, pending: PendingRow) -> None:
        row = None if pending.cancelled() else pending.result()
        if row is None or self.late is None:
            return
        self.late_answers += 1
        prediction, so_far = self._believe(request, row), request.generated_tokens
        if so_far and prediction.complete is not None:
            prediction = self._update(request, condition(prediction.complete, so_far), prediction, so_far)
        self.late(request.id, prediction)

    def _believe(self, request: Request, raw: Floats | None) -> CorrectedPrediction:
        """Return the prediction of a predictor's corrected row, or of the prior without one."""
        if raw is None:
            source, complete = "prior", self.learner.prior(request.model)
        else:
            source, complete = "predictor", self.learner.corrected(request.model, raw) if self.config.learn else raw
        total, bounded = self._bound(request, complete, 0)
        return CorrectedPrediction(total, source, bounded, 0, raw, complete, total)

    def _bound(self, request: Request, row: Floats, so_far: int) -> tuple[float, Floats]:
        """Return the statistic and the quantiles, both between the tokens so far and the limit of the request."""
        minimum = so_far + 1.0 if so_far else 1.0
        bounded = np.minimum(np.maximum(row, minimum), max(1.0, float(request.max_tokens)))
        # The sum of the mean is rounded, and could leave the bounds.
        return min(max(self._statistic(bounded), bounded.item(0)), bounded.item(-1)), bounded

    def _update(self, request: Request, row: Floats, before: LengthPrediction, so_far: int) -> CorrectedPrediction:
        """Return the prediction of a row after ``so_far`` tokens."""
        total, bounded = self._bound(request, row, so_far)
        origin = (
            before if isinstance(before, CorrectedPrediction) else CorrectedPrediction(0.0, complete=before.quantiles)
        )
        first_tokens = origin.first_tokens or total
        return CorrectedPrediction(total, before.source, bounded, so_far, origin.raw, origin.complete, first_tokens)


def _fixed(request: Request, tokens: float, source: str) -> LengthPrediction:
    """Return the prediction of a known length."""
    total = min(max(1.0, tokens), max(1.0, float(request.max_tokens)))
    return LengthPrediction(total, source, np.full(len(LEVELS), total))


def _is_own(predictor: Any) -> bool:
    """Return whether the predictor, and all that it wraps, are classes of this package."""
    if predictor is None or not type(predictor).__module__.startswith("lengthwise.predict"):
        return False
    return all(_is_own(part) for name in ("inner", "prior") if (part := getattr(predictor, name, None)) is not None)


class Oracle(LengthPredictor):
    """Predict the true length of each request; if ``length`` returns None, make an ordinary prediction."""

    def __init__(
        self,
        config: PredictionConfig,
        clock: Clock = monotonic,
        late: Late | None = None,
        *,
        length: Callable[[Request, str | None], float | None],
        **options: Any,
    ) -> None:
        super().__init__(config, clock, late, **options)
        self._length = length

    async def first(self, request: Request, text: str | None) -> LengthPrediction:
        """Return the true length."""
        tokens = self._length(request, text)
        if tokens is None:
            return await super().first(request, text)
        self.sources["oracle"] += 1
        return _fixed(request, float(tokens), "oracle")

    async def repredict(self, request: Request, text: str | None, generated_text: str | None) -> LengthPrediction:
        """Return the true length again."""
        if request.length_prediction.source == "oracle":
            return request.length_prediction
        return await super().repredict(request, text, generated_text)


def requested_tokens(body: bytes, fields: Callable[[], Mapping[str, Any]], max_tokens: int | None) -> int:
    """Return the output length that a request fixes; 0 if the model decides it.

    The length is fixed if only one token is allowed, or ``ignore_eos`` holds, ``min_tokens`` = ``max_tokens``, and no
    stop string or token may end the output. ``fields`` parses the JSON body, only if it may contain ``ignore_eos``.
    """
    if max_tokens is None or max_tokens == 1 or b'"ignore_eos"' not in body:
        return 1 if max_tokens == 1 else 0
    parsed = fields()
    is_fixed = parsed.get("ignore_eos") is True and parsed.get("min_tokens") == max_tokens
    return max_tokens if is_fixed and not (parsed.get("stop") or parsed.get("stop_token_ids")) else 0
