"""One request's predicted length as a row of quantiles, and what follows from it in microseconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from traceback import extract_tb
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lengthwise.gateway.request import MAX_TOKENS, Floats, LengthPrediction
from lengthwise.predict.contract import Prompts
from lengthwise.predict.distribution import LEVELS, LengthDistribution, pareto_tail
from lengthwise.predict.empirical import Constant
from lengthwise.predict.wrappers import Guarded

_MEDIAN, _P80, _P90 = (int(np.searchsorted(LEVELS, p)) for p in (0.5, 0.8, 0.9))
_TAIL = pareto_tail([1.0], LEVELS)[0]

Statistic = Callable[[Floats], float]


def _weights() -> Floats:
    """[q] what each quantile counts in the mean."""
    widths = np.diff(LEVELS, prepend=0.0, append=1.0)
    return np.asarray((widths[1:] + widths[:-1]) / 2)


_WEIGHTS = _weights()
STATISTICS: dict[str, Statistic] = {
    "mean": lambda row: float((row * _WEIGHTS).sum()),
    "median": lambda row: float(row[_MEDIAN]),
    "p80": lambda row: float(row[_P80]),
    "p90": lambda row: float(row[_P90]),
}


@dataclass(frozen=True, slots=True)
class Belief(LengthPrediction):
    """A forecast with what it was made from, so that it can be made again and learnt from.

    Attributes:
        raw: [25] the predictor's own quantiles before the first token; None where it had none to give.
        complete: [25] the same as they were corrected and believed, no limit applied; None where nothing is known.
        first_tokens: The statistic before the first token.
    """

    raw: Floats | None = None
    complete: Floats | None = None
    first_tokens: float = 0.0


def given(row: Floats, tokens_so_far: int) -> Floats:
    """[25] quantiles of the lengths above ``tokens_so_far``, as ``LengthDistribution.given`` for one row."""
    if tokens_so_far <= 0:
        return row
    if tokens_so_far >= row[-1]:
        return np.asarray(np.maximum(tokens_so_far * _TAIL, tokens_so_far + 1))
    reached = float(np.interp(tokens_so_far, row, LEVELS))
    left = np.interp(reached + (1 - reached) * LEVELS, LEVELS, row)
    return np.maximum(left, tokens_so_far + 1)


def sound(row: Floats) -> bool:
    """Whether a row is a distribution: finite, at least 1, not decreasing, not absurd."""
    return bool(row[0] >= 1 and row[-1] <= MAX_TOKENS and (row[1:] >= row[:-1]).all())


def within(row: Floats, least: float, most: float) -> Floats:
    """[25] the row, no value below ``least`` (at least 1) nor above ``most``."""
    return np.minimum(np.maximum(row, max(1.0, least)), max(1.0, most))


MOST_CHARS = 1 << 19
"""Of a longer text both ends are shown: a prompt must not hold up others while it is read."""
_STANDS_IN = Constant(2 * MAX_TOKENS)
_SAMPLE = (
    "Write a detailed guide about how to plan a three day trip to Rome with a small budget. Include ten tips, a list "
    "of museums, what to eat and where to stay, and explain why each of them is worth the time. "
) * 4
_WARM, _TIMES = 3, 15


@dataclass(frozen=True, slots=True)
class Question:
    """What a predictor is told of one request.

    Attributes:
        text: Its prompt.
        prompt_tokens: Its length.
        model: Who will answer.
        so_far: Tokens that have come.
        output: Their text; "" where nobody kept it.
    """

    text: str
    prompt_tokens: int
    model: str
    so_far: int = 0
    output: str = ""


@dataclass(frozen=True)
class Message:
    """Answers to n questions.

    Attributes:
        rows: [n, 25] float64 quantiles at LEVELS.
        good: [n] bool, which rows can be used.
        faults: Rows that cannot, by kind (``Guarded``).
        error: What was raised last; None nothing.
    """

    rows: Floats
    good: npt.NDArray[np.bool_]
    faults: dict[str, int] = field(default_factory=dict)
    error: str | None = None


def shown(text: str | None) -> str:
    """The text as a predictor is shown it; "" where there is none."""
    if text is None or len(text) <= MOST_CHARS:
        return text or ""
    return f"{text[: MOST_CHARS // 2]} {text[-MOST_CHARS // 2 :]}"


def ask(predictor: Any, questions: Sequence[Question]) -> Message:
    """What a predictor says, each row judged; never raises what it raises."""
    n, output = len(questions), [q.output for q in questions]
    text, models = [q.text for q in questions], [q.model for q in questions]
    prompt_tokens = np.array([q.prompt_tokens for q in questions], np.int64)
    prompts = Prompts(n, text, prompt_tokens, models, output if "".join(output) else None)
    ages = [q.so_far for q in questions]
    so_far: Any = np.array(ages, np.int64) if max(ages, default=0) else 0
    answer: Any = None
    problem: Exception | None = None
    try:
        answer = predictor.predict(prompts, so_far)
    except Exception as error:  # noqa: BLE001 - whatever it raises is what is guarded against
        problem = error
    if isinstance(so_far, int) and _is_sound(answer, n):
        return Message(answer.tokens, np.ones(n, bool))
    return _evaluated(_Heard(answer, problem), prompts, so_far)


def nothing(n: int, error: BaseException) -> Message:
    """What is left to say of n questions when even judging the answer failed."""
    rows = np.ones((n, len(LEVELS)))
    return Message(rows, np.zeros(n, bool), {"raised": n}, _place(error))


def measured_s(predictor: Any, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds that a warm predictor takes for one prompt of about 700 bytes; inf where it fails."""
    question = Question(_SAMPLE, 180, "unknown")
    least = float("inf")
    for turn in range(_WARM + _TIMES):
        begun = clock()
        if not ask(predictor, [question]).good.all():
            return float("inf")
        if turn >= _WARM:
            least = min(least, clock() - begun)
    return least


def _is_sound(answer: Any, n: int) -> bool:
    """Whether it is a checked distribution of ours for all n, none absurd: it needs no second look."""
    return (
        isinstance(answer, LengthDistribution)
        and answer.levels is LEVELS
        and answer.tokens.shape == (n, len(LEVELS))
        and bool((answer.tokens[:, -1] <= MAX_TOKENS).all())
    )


def _evaluated(received: _Heard, prompts: Prompts, so_far: Any) -> Message:
    """What ``Guarded`` makes of the answer; rows in which the stand-in speaks are not good."""
    guard = Guarded(received, _STANDS_IN, MAX_TOKENS)
    rows = guard.predict(prompts, so_far).tokens
    good = rows[:, 0] <= MAX_TOKENS
    faults = {kind: count for kind, count in guard.faults_.items() if count}
    problem = received.problem
    return Message(rows, good, faults, guard.last_error_ and (_place(problem) if problem else "no numbers"))


def _place(error: BaseException) -> str:
    """What was raised and where; its own words may hold a prompt, which is shown to nobody."""
    last = extract_tb(error.__traceback__)[-1:]
    at = f" at {Path(last[0].filename).name}:{last[0].lineno}" if last else ""
    return f"{type(error).__name__}{at}"


class _Heard:
    """A predictor that has answered already."""

    def __init__(self, answer: Any, problem: Exception | None) -> None:
        self.answer, self.problem = answer, problem

    def fit(self, samples: Any) -> Any:
        raise NotImplementedError

    def predict(self, prompts: Any, tokens_so_far: Any = 0) -> Any:
        del prompts, tokens_so_far
        if self.problem is not None:
            raise self.problem
        return self.answer


Answer = asyncio.Future[Floats | None]
"""[25] quantiles, or None: nothing that can be used."""


class Source(Protocol):
    """A predictor somewhere.

    Attributes:
        waits: Whether an answer may take so long that a deadline is needed.
    """

    waits: bool

    async def start(self) -> None:
        """Ready to be asked, or as ready as it gets."""
        ...

    async def stop(self) -> None:
        """Over; every answer that was promised has come."""
        ...

    def submit(self, question: Question) -> Answer:
        """An answer that will come, whatever happens; it is never an exception."""
        ...

    def state(self) -> dict[str, Any]:
        """For people."""
        ...


class Tally:
    """Faults by kind, and the last that was said of them."""

    def __init__(self) -> None:
        self.faults: dict[str, int] = {}
        self.last_error: str | None = None

    def add(self, faults: Mapping[str, int], error: str | None = None) -> None:
        """Counts some more."""
        for kind, count in faults.items():
            self.faults[kind] = self.faults.get(kind, 0) + count
        if error is not None:
            self.last_error = error[:500]


_AT_ONCE = 16
"""Questions of one batch; more wait for the loop's next turn, so that others have theirs."""
_QUIET_TURNS = 2
"""Turns of the loop without a question, after which those that are there are answered."""


class InLine:
    """Asks a predictor on the event loop.

    Args:
        predictor: Quick, and of ours: nothing can stop one that hangs here.
        tally: Where faults are counted.
    """

    waits = False

    def __init__(self, predictor: Any, tally: Tally) -> None:
        self.predictor, self.tally = predictor, tally
        self._waiting: list[tuple[Question, Answer]] = []
        self._quiet = 0

    async def start(self) -> None:
        """Nothing to be done."""

    async def stop(self) -> None:
        """Who still waits is told that there is no answer."""
        waiting, self._waiting = self._waiting, []
        for _, answer in waiting:
            if not answer.done():
                answer.set_result(None)

    def submit(self, question: Question) -> Answer:
        """An answer in this turn of the loop or a soon following one."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._gather)
        self._quiet = 0
        answer: Answer = loop.create_future()
        self._waiting.append((question, answer))
        return answer

    def state(self) -> dict[str, Any]:
        """Nothing of its own."""
        return {}

    def _gather(self) -> None:
        """Answers when no more come, or enough are there."""
        if self._quiet < _QUIET_TURNS and len(self._waiting) < _AT_ONCE:
            self._quiet += 1
            asyncio.get_running_loop().call_soon(self._gather)
        else:
            self._answer()

    def _answer(self) -> None:
        batch, self._waiting = self._waiting[:_AT_ONCE], self._waiting[_AT_ONCE:]
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._answer)
        batch = [pair for pair in batch if not pair[1].done()]
        if not batch:
            return
        try:
            said = ask(self.predictor, [question for question, _ in batch])
        except Exception as error:  # noqa: BLE001 - an answer too strange to be judged is none
            said = nothing(len(batch), error)
        self.tally.add(said.faults, said.error)
        for place, (_, answer) in enumerate(batch):
            answer.set_result(said.rows[place] if said.good[place] else None)
