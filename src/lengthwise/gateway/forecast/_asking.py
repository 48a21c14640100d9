"""Questions put to a predictor that is not trusted, many at once; where it fails, nobody else does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from traceback import extract_tb
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.gateway.request import MOST_TOKENS, Floats
from lengthwise.predict.constant import Constant
from lengthwise.predict.contract import Prompts
from lengthwise.predict.distribution import LEVELS, LengthDistribution
from lengthwise.predict.guard import Guarded

MOST_CHARS = 1 << 19
"""Of a longer text both ends are shown: a prompt must not hold up others while it is read."""
_STANDS_IN = Constant(2 * MOST_TOKENS)
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
class Said:
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


def ask(predictor: Any, questions: Sequence[Question]) -> Said:
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
        return Said(answer.tokens, np.ones(n, bool))
    return _judged(_Heard(answer, problem), prompts, so_far)


def nothing(n: int, error: BaseException) -> Said:
    """What is left to say of n questions when even judging the answer failed."""
    rows = np.ones((n, len(LEVELS)))
    return Said(rows, np.zeros(n, bool), {"raised": n}, _place(error))


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
        and bool((answer.tokens[:, -1] <= MOST_TOKENS).all())
    )


def _judged(heard: _Heard, prompts: Prompts, so_far: Any) -> Said:
    """What ``Guarded`` makes of the answer; rows in which the stand-in speaks are not good."""
    guard = Guarded(heard, _STANDS_IN, MOST_TOKENS)
    rows = guard.predict(prompts, so_far).tokens
    good = rows[:, 0] <= MOST_TOKENS
    faults = {kind: count for kind, count in guard.faults_.items() if count}
    problem = heard.problem
    return Said(rows, good, faults, guard.last_error_ and (_place(problem) if problem else "no numbers"))


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
