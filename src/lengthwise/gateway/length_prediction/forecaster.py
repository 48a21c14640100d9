"""Predicts how long answers become; whatever goes wrong with that, no request fails or waits for it."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from lengthwise.gateway.config import Forecasting
from lengthwise.gateway.length_prediction.learning import Learner
from lengthwise.gateway.length_prediction.prediction import (
    STATISTICS,
    Answer,
    Belief,
    InLine,
    Question,
    Source,
    Tally,
    given,
    measured_s,
    shown,
    within,
)
from lengthwise.gateway.length_prediction.predictor_process import Care, InProcess
from lengthwise.gateway.protocols import Clock, Listener, monotonic
from lengthwise.gateway.request import Floats, LengthPrediction, Outcome, Request
from lengthwise.predict.distribution import LEVELS
from lengthwise.schema.errors import InputError

Late = Callable[[int, LengthPrediction], None]
_ALIKE = 256.0
NONE, DEFAULT = "none", "default"


class Forecaster(Listener):
    """Predicts lengths and learns from those that finish.

    A predictor that takes less than ``inline_below_s`` for a prompt, and is one of ours, is asked on the event
    loop; every other one in a process of its own, which may hang, die, or answer rubbish. Where no answer comes
    in time, lengths of lately finished outputs stand in.

    Args:
        config: Who predicts, and how it is kept from doing harm.
        clock: The gateway's.
        late: Told of an answer that came after its deadline.
        predictor: One in place of the configured; it must bear pickling unless it is asked in line.
        place: "inline", "process", or "auto".
        resilience: How a process is treated.
        believes_told: Whether a length that the client fixed itself is taken for known.
    """

    def __init__(
        self,
        config: Forecasting,
        clock: Clock = monotonic,
        late: Late | None = None,
        *,
        predictor: Any = None,
        place: str = "auto",
        resilience: Care | None = None,
        believes_told: bool = True,
    ) -> None:
        self.config, self.clock, self.late, self.believes_told = config, clock, late, believes_told
        self.learner = Learner(config.learn_every)
        self.tally = Tally()
        self.sources: dict[str, int] = dict.fromkeys(("predictor", "prior", "report", "oracle"), 0)
        self.late_answers = self.drifts = 0
        self.drifted_s: float | None = None
        self.seconds = float("nan")
        self._statistic = STATISTICS[config.statistic]
        self._predictor, self._place, self._care = predictor, place, resilience
        self._source: Source | None = None
        self._reads_text = False

    async def __aenter__(self) -> Self:
        """Ready to predict.

        Raises:
            InputError: The predictor cannot be had.
        """
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the process, if there is one."""
        if self._source is not None:
            await self._source.stop()
            self._source = None

    @property
    def reads_text(self) -> bool:
        """Whether its predictor reads the text that has been generated."""
        return self._reads_text

    async def first(self, request: Request, text: str | None) -> LengthPrediction:
        """What is predicted before the first token, in ``deadline_s`` at the latest."""
        if self.believes_told and request.requested_tokens > 0:
            return self._counted(self._fixed(request, float(request.requested_tokens), "report"))
        if self._source is None:
            return self._counted(self._unpredicted(request))
        question = Question(shown(text), request.prompt_tokens, request.model)
        row = await self._on_response(self._source.submit(question), functools.partial(self._came_late, request))
        return self._counted(self._believed(request, row))

    async def retry(self, request: Request, text: str | None, generated_text: str | None) -> LengthPrediction:
        """What is predicted now that some tokens have come: the lengths above them.

        The predictor is asked anew only where it reads the text so far and there is one.
        """
        before, so_far = request.length_prediction, request.generated_tokens
        if generated_text and self._reads_text and self._source is not None and before.source == "predictor":
            question = Question(shown(text), request.prompt_tokens, request.model, so_far, shown(generated_text))
            row = await self._on_response(self._source.submit(question), None)
            if row is not None:
                return self._of_row(request, row, before, so_far)
        return self.known(request)

    def known(self, request: Request) -> LengthPrediction:
        """The same forecast, given the tokens so far: no predictor is asked."""
        before, so_far = request.length_prediction, request.generated_tokens
        whole = before.complete if isinstance(before, Belief) else before.quantiles
        if whole is not None:
            return self._of_row(request, given(whole, so_far), before, so_far)
        total = max(before.total_tokens, so_far + 1.0)
        return LengthPrediction(min(total, max(1.0, float(request.max_tokens))), before.source, None, so_far)

    def finished(self, request: Request, outcome: Outcome, now_s: float, detail: str = "") -> None:
        """Learns from what has finished: not from what was given up, failed, or had its length fixed.

        An output as long as was allowed, or whose ``detail`` is "length", counts as cut.
        """
        posterior, tokens = request.length_prediction, request.generated_tokens
        if outcome is not Outcome.FINISHED or not isinstance(posterior, Belief) or not self.config.learn:
            return
        if tokens < 1 or request.choices != 1 or (self.believes_told and request.requested_tokens > 0):
            return
        cut = detail == "length" or tokens >= request.max_tokens
        if self.learner.finished_with(request.model, posterior, tokens, cut=cut):
            self.drifts, self.drifted_s = self.drifts + 1, now_s

    def state(self) -> dict[str, Any]:
        """For the admin page: who predicts and where, sources, faults, what was learnt."""
        source = self._source
        where = "none" if source is None else "process" if source.waits else "inline"
        return {
            "predictor": self.config.predictor if self._predictor is None else type(self._predictor).__name__,
            "where": where,
            "seconds_a_prompt": self.seconds,
            "statistic": self.config.statistic,
            "sources": dict(self.sources),
            "late": self.late_answers,
            "faults": dict(self.tally.faults),
            "last_error": self.tally.last_error,
            "process": {} if source is None else source.state(),
            "drifts": self.drifts,
            "drifted_s": self.drifted_s,
            **self.learner.state(),
        }

    async def _open(self) -> None:
        name, given_one = self.config.predictor, self._predictor
        if given_one is None and name == NONE:
            return
        if given_one is None and name != DEFAULT:
            _require_file(name)
        if given_one is None and name == DEFAULT and self._place != "process":
            from lengthwise.predict import default

            given_one = default()
        if self._place == "inline" or (self._place == "auto" and _is_ours(given_one)):
            self.seconds = measured_s(given_one)
            if self._place == "inline" or self.seconds < self.config.inline_below_s:
                self._in_line(given_one)
                return
        await self._in_process(name)

    async def _in_process(self, name: str) -> None:
        process = InProcess(name, self._predictor, self.tally, self._care)
        await process.start()
        self._source, self._reads_text, self.seconds = process, process.reads_text, process.seconds
        if self._place == "auto" and self._predictor is None and process.seconds < self.config.inline_below_s:
            from lengthwise.predict import opened

            await process.stop()
            self._in_line(opened(name))

    def _in_line(self, predictor: Any) -> None:
        self._source = InLine(predictor, self.tally)
        self._reads_text = bool(inspect.getattr_static(predictor, "reads_text", False))

    async def _on_response(self, answer: Answer, late: Callable[[Answer], None] | None) -> Floats | None:
        """The answer, or None once the deadline is over."""
        source = self._source
        if answer.done() or source is None or not source.waits:
            return await answer
        await asyncio.wait([answer], timeout=self.config.deadline_s)
        if answer.done():
            return answer.result()
        self.tally.add({"late": 1})
        if late is not None:
            answer.add_done_callback(late)
        return None

    def _came_late(self, request: Request, answer: Answer) -> None:
        row = None if answer.cancelled() else answer.result()
        if row is None or self.late is None:
            return
        self.late_answers += 1
        posterior = self._believed(request, row)
        if request.generated_tokens and posterior.complete is not None:
            so_far = request.generated_tokens
            posterior = self._of_row(request, given(posterior.complete, so_far), posterior, so_far)
        self.late(request.id, posterior)

    def _believed(self, request: Request, raw: Floats | None) -> Belief:
        """The forecast of a predictor's row, corrected; of what stands in where there is none."""
        if raw is None:
            whole = self.learner.prior(request.model)
        else:
            whole = self.learner.corrected(request.model, raw) if self.config.learn else raw
        total, bounded = self._bounded(request, whole, 0)
        return Belief(total, "prior" if raw is None else "predictor", bounded, 0, raw, whole, total)

    def _bounded(self, request: Request, row: Floats, so_far: int) -> tuple[float, Floats]:
        """The statistic, and the quantiles within what has come and what was asked for."""
        bounded = within(row, so_far + 1.0 if so_far else 1.0, float(request.max_tokens))
        return min(max(self._statistic(bounded), bounded.item(0)), bounded.item(-1)), bounded  # a sum is rounded

    def _of_row(self, request: Request, row: Floats, before: LengthPrediction, so_far: int) -> Belief:
        """The forecast after so many tokens, by its quantiles."""
        total, bounded = self._bounded(request, row, so_far)
        known = before if isinstance(before, Belief) else Belief(0.0, complete=before.quantiles)
        first = known.first_tokens or total
        return Belief(total, before.source, bounded, so_far, known.raw, known.complete, first)

    def _fixed(self, request: Request, tokens: float, source: str) -> LengthPrediction:
        """The forecast of a length that is known."""
        sure = min(max(1.0, tokens), max(1.0, float(request.max_tokens)))
        return LengthPrediction(sure, source, np.full(len(LEVELS), sure))

    def _unpredicted(self, request: Request) -> LengthPrediction:
        """All alike: whoever came first goes first."""
        return LengthPrediction(min(_ALIKE, max(1.0, float(request.max_tokens))), "prior")

    def _counted(self, length_prediction: LengthPrediction) -> LengthPrediction:
        self.sources[length_prediction.source] += 1
        return length_prediction


def _require_file(name: str) -> None:
    if not Path(name).exists():
        raise InputError(f'the predictor must be "default", "none" or a file; there is no file {name}')


def _is_ours(predictor: Any) -> bool:
    """Whether it is of a class of this package, and what it wraps is too."""
    if predictor is None or not type(predictor).__module__.startswith("lengthwise.predict"):
        return False
    parts = [getattr(predictor, name, None) for name in ("inner", "prior")]
    return all(part is None or _is_ours(part) for part in parts)


class Oracle(Forecaster):
    """Says of each request the length that it will have.

    Args:
        config: Its statistic does not matter.
        clock: The gateway's.
        late: Told of an answer that came after its deadline.
        length: Of a request and its prompt; None where it is not known (what stands in is then said).
    """

    def __init__(
        self,
        config: Forecasting,
        clock: Clock = monotonic,
        late: Late | None = None,
        *,
        length: Callable[[Request, str | None], float | None],
        **rest: Any,
    ) -> None:
        super().__init__(config, clock, late, **rest)
        self._length = length

    async def first(self, request: Request, text: str | None) -> LengthPrediction:
        """The truth."""
        tokens = self._length(request, text)
        if tokens is None:
            return await super().first(request, text)
        return self._counted(self._fixed(request, float(tokens), "oracle"))

    async def retry(self, request: Request, text: str | None, generated_text: str | None) -> LengthPrediction:
        """Still the truth."""
        if request.length_prediction.source == "oracle":
            return request.length_prediction
        return await super().retry(request, text, generated_text)


def requested_tokens(body: bytes, fields: Callable[[], Mapping[str, Any]], max_tokens: int | None) -> int:
    """How long the output must become, by what was asked for; 0: that is for the model to say.

    It is fixed where only one token may come, and where the end of a text does not end it (``ignore_eos``)
    before ``min_tokens`` = ``max_tokens``, and no stop string may either.

    Args:
        body: The request as it came.
        fields: Its fields; asked for only where the body may hold what matters.
        max_tokens: The most that was asked for; None: nothing was.
    """
    if max_tokens is None:
        return 0
    if max_tokens == 1:
        return 1
    if b'"ignore_eos"' not in body:
        return 0
    found = fields()
    fixed = found.get("ignore_eos") is True and found.get("min_tokens") == max_tokens
    ends = found.get("stop") or found.get("stop_token_ids")
    return max_tokens if fixed and not ends else 0
