"""Predict output lengths. A faulty predictor fails no request and, in a process, delays none beyond ``deadline_s``."""

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
from lengthwise.gateway.request import Client, LengthPrediction, Outcome, Request
from lengthwise.predict.distribution import LEVELS
from lengthwise.predict.in_session import EARLIER_TURNS
from lengthwise.schema.errors import InputError
from lengthwise.statistics import Floats

Late = Callable[[int, LengthPrediction], None]
_DEFAULT_TOKENS = 256.0
NONE, DEFAULT = "none", "default"
MAX_SESSIONS = 1 << 16


class EarlierOutputs:
    """Lengths of the last outputs of each session, for the MAX_SESSIONS sessions whose outputs ended last."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[int, str], tuple[int, ...]] = {}  # in order of the last end

    def __len__(self) -> int:
        return len(self._tokens)

    def of(self, client: Client) -> tuple[int, ...]:
        """Return the lengths of up to EARLIER_TURNS outputs of the client's session, the latest one last."""
        return self._tokens.get((client.tenant, client.session), ())

    def add(self, client: Client, tokens: int) -> None:
        """Add the length of an output that has ended, if its request names a session."""
        if not client.session:
            return
        key = (client.tenant, client.session)
        self._tokens[key] = (*self._tokens.pop(key, ()), tokens)[-EARLIER_TURNS:]
        if len(self._tokens) > MAX_SESSIONS:
            del self._tokens[next(iter(self._tokens))]


class LengthPredictor(Listener):
    """An async context manager that predicts output lengths, and learns from finished requests.

    A predictor of ``lengthwise.predict`` that takes less than ``inline_below_s`` per prompt runs on the event loop. Any
    other one runs in a process, where it may hang or crash. If its prediction is late, the request starts with the
    prior: the distribution of the last finished outputs.

    Args:
        on_late: Called with the id of a request and its prediction when a late prediction comes.
        predictor: Replaces the configured predictor. To run in a process, it must be picklable.
        place: "inline" (on the event loop), "process", or "auto" (by the seconds per prompt).
        use_requested: Whether a length that the client fixes is the prediction.
    """

    def __init__(
        self,
        config: PredictionConfig,
        clock: Clock = monotonic,
        on_late: Late | None = None,
        *,
        predictor: Any = None,
        place: str = "auto",
        limits: ProcessLimits | None = None,
        use_requested: bool = True,
    ) -> None:
        self.config, self.clock, self.on_late, self.use_requested = config, clock, on_late, use_requested
        self.learner = Learner(config.learn_every)
        self.faults = FaultCounter()
        self.sources: dict[str, int] = dict.fromkeys(("predictor", "prior", "requested", "oracle"), 0)
        self.late_answers = self.drifts = 0
        self.drifted_s: float | None = None
        self.seconds = float("nan")
        self.reads_output: tuple[int, int] | None = None  # (low, high) tokens so far between which it reads the output
        self._statistic = STATISTICS[config.statistic]
        self._earlier = EarlierOutputs()
        self._predictor, self._place, self._limits = predictor, place, limits
        self._runner: InlineRunner | ProcessRunner | None = None

    async def __aenter__(self) -> Self:
        """Load the predictor. Raises InputError if that fails."""
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
        if self._runner is not None:
            await self._runner.stop()
            self._runner = None

    async def predict(self, request: Request, text: str | None) -> LengthPrediction:
        """Predict the length before the first token. A predictor in a process gets at most ``deadline_s``."""
        if self.use_requested and request.fixed_tokens > 0:
            prediction = _fixed(request, float(request.fixed_tokens), "requested")
        elif self._runner is None:  # nearly always the same, so that requests stay in order of arrival
            prediction = LengthPrediction(min(_DEFAULT_TOKENS, max(1.0, float(request.max_tokens))), "prior")
        else:
            earlier = self._earlier.of(request.client)
            query = Query(truncate_text(text), request.prompt_tokens, request.model, earlier_tokens=earlier)
            row = await self._wait(self._runner.submit(query), functools.partial(self._resolve_late, request))
            prediction = self._from_row(request, row)
        self.sources[prediction.source] += 1
        return prediction

    async def repredict(self, request: Request, text: str | None, generated_text: str | None) -> LengthPrediction:
        """Predict the length again. The predictor runs only if it reads outputs of this length and there is a text."""
        before, so_far = request.length_prediction, request.generated_tokens
        low, high = self.reads_output or (1, 0)
        if generated_text and low <= so_far <= high and self._runner is not None and before.source == "predictor":
            texts = truncate_text(text), truncate_text(generated_text)
            earlier = self._earlier.of(request.client)
            query = Query(texts[0], request.prompt_tokens, request.model, so_far, texts[1], earlier)
            if (row := await self._wait(self._runner.submit(query), None)) is not None:
                if self.config.learn:  # remaining tokens are corrected in the same way as totals at the start
                    row = so_far + self.learner.corrected(request.model, np.maximum(row - so_far, 1.0))
                return self._update(request, row, before, so_far)
        return self.condition_on_progress(request)

    def condition_on_progress(self, request: Request) -> LengthPrediction:
        """Return the current prediction, given the tokens so far, without running the predictor."""
        before, so_far = request.length_prediction, request.generated_tokens
        unbounded = before.unbounded if isinstance(before, CorrectedPrediction) else before.quantiles
        if unbounded is not None:
            return self._update(request, condition(unbounded, so_far), before, so_far)
        total = max(before.total_tokens, so_far + 1.0)
        return LengthPrediction(min(total, max(1.0, float(request.max_tokens))), before.source, None, so_far)

    def on_end(self, request: Request, outcome: Outcome, now_s: float, detail: str = "") -> None:
        """Learn from a finished request with one choice. ``detail`` "length" marks a truncated output.

        A length that the client fixed counts as an earlier output of its session; nothing else learns from it.
        """
        prediction, tokens = request.length_prediction, request.generated_tokens
        if outcome is Outcome.FINISHED and tokens >= 1 and request.choices == 1:
            self._earlier.add(request.client, tokens)
        if outcome is not Outcome.FINISHED or not isinstance(prediction, CorrectedPrediction) or not self.config.learn:
            return
        if tokens < 1 or request.choices != 1 or (self.use_requested and request.fixed_tokens > 0):
            return
        censored = detail == "length" or tokens >= request.max_tokens
        if self.learner.observe(request.model, prediction, tokens, censored=censored):
            self.drifts, self.drifted_s = self.drifts + 1, now_s

    def state(self) -> dict[str, Any]:
        """Return the state for the admin page: predictor, sources, faults, and what was learned."""
        runner = self._runner
        return {
            "predictor": self.config.predictor if self._predictor is None else type(self._predictor).__name__,
            "where": "none" if runner is None else "process" if runner.needs_deadline else "inline",
            "seconds_a_prompt": self.seconds,
            "statistic": self.config.statistic,
            "sources": dict(self.sources),
            "late": self.late_answers,
            "faults": dict(self.faults.faults),
            "last_error": self.faults.last_error,
            "process": runner.state() if isinstance(runner, ProcessRunner) else {},
            "drifts": self.drifts,
            "drifted_s": self.drifted_s,
            "sessions": len(self._earlier),
            **self.learner.state(),
        }

    def _run_inline(self, predictor: Any) -> None:
        self._runner = InlineRunner(predictor, self.faults)
        self.reads_output = getattr(predictor, "reads_output", None)

    async def _wait(self, row: PendingRow, late: Callable[[PendingRow], None] | None) -> Floats | None:
        """Return the row, or None if it misses the deadline. In that case ``late`` is called when the row is done."""
        if row.done() or self._runner is None or not self._runner.needs_deadline:
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
        if row is None or self.on_late is None:
            return
        self.late_answers += 1
        prediction, so_far = self._from_row(request, row), request.generated_tokens
        if so_far and prediction.unbounded is not None:
            prediction = self._update(request, condition(prediction.unbounded, so_far), prediction, so_far)
        self.on_late(request.id, prediction)

    def _from_row(self, request: Request, raw: Floats | None) -> CorrectedPrediction:
        if raw is None:
            source, unbounded = "prior", self.learner.prior(request.model)
        else:
            source, unbounded = "predictor", self.learner.corrected(request.model, raw) if self.config.learn else raw
        total, bounded = self._bound(request, unbounded, 0)
        return CorrectedPrediction(total, source, bounded, 0, raw, unbounded, total)

    def _bound(self, request: Request, row: Floats, so_far: int) -> tuple[float, Floats]:
        minimum = so_far + 1.0 if so_far else 1.0
        bounded = np.minimum(np.maximum(row, minimum), max(1.0, float(request.max_tokens)))
        # The mean is a rounded sum, which could leave the bounds.
        return min(max(self._statistic(bounded), bounded.item(0)), bounded.item(-1)), bounded

    def _update(self, request: Request, row: Floats, before: LengthPrediction, so_far: int) -> CorrectedPrediction:
        total, bounded = self._bound(request, row, so_far)
        origin = before if isinstance(before, CorrectedPrediction) else None
        origin = origin or CorrectedPrediction(0.0, unbounded=before.quantiles)
        initial = origin.initial_total_tokens or total
        return CorrectedPrediction(total, before.source, bounded, so_far, origin.raw, origin.unbounded, initial)


def _fixed(request: Request, tokens: float, source: str) -> LengthPrediction:
    total = min(max(1.0, tokens), max(1.0, float(request.max_tokens)))
    return LengthPrediction(total, source, np.full(len(LEVELS), total))


def _is_own(predictor: Any) -> bool:
    """Return whether the predictor, and all predictors that it wraps, are classes of ``lengthwise.predict``."""
    if predictor is None or not type(predictor).__module__.startswith("lengthwise.predict"):
        return False
    return all(_is_own(part) for name in ("inner", "prior") if (part := getattr(predictor, name, None)) is not None)


class Oracle(LengthPredictor):
    """Predicts the length that ``length`` returns, or predicts like ``LengthPredictor`` if ``length`` returns None."""

    def __init__(
        self,
        config: PredictionConfig,
        clock: Clock = monotonic,
        on_late: Late | None = None,
        *,
        length: Callable[[Request, str | None], float | None],
        **options: Any,
    ) -> None:
        super().__init__(config, clock, on_late, **options)
        self._length = length

    async def predict(self, request: Request, text: str | None) -> LengthPrediction:
        """Return the true length as a prediction."""
        tokens = self._length(request, text)
        if tokens is None:
            return await super().predict(request, text)
        self.sources["oracle"] += 1
        return _fixed(request, float(tokens), "oracle")

    async def repredict(self, request: Request, text: str | None, generated_text: str | None) -> LengthPrediction:
        """Return the true length again."""
        if request.length_prediction.source == "oracle":
            return request.length_prediction
        return await super().repredict(request, text, generated_text)


def fixed_tokens(body: bytes, fields: Callable[[], Mapping[str, Any]], max_tokens: int | None) -> int:
    """Return the output length that a request fixes, or 0 if it fixes none.

    A request fixes the length if it allows only one token, or if ``ignore_eos`` is set, ``min_tokens`` equals
    ``max_tokens``, and it has no stop string or stop token. ``fields`` parses the JSON body, and is called only if the
    body may contain ``ignore_eos``.
    """
    if max_tokens is None or max_tokens == 1 or b'"ignore_eos"' not in body:
        return 1 if max_tokens == 1 else 0
    parsed = fields()
    is_fixed = parsed.get("ignore_eos") is True and parsed.get("min_tokens") == max_tokens
    return max_tokens if is_fixed and not (parsed.get("stop") or parsed.get("stop_token_ids")) else 0
