"""What the text so far says about how much is still to come."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_ITEM = re.compile(r"^\s*(?:[*-]|(\d{1,3})[.):])\s", re.MULTILINE)
_WORD = re.compile(r"\w+")
_CLOSINGS = (
    "in conclusion", "overall", "in summary", "to summarize", "i hope", "let me know", "finally", "lastly", "remember",
    "sincerely", "regards", "the end", "answer is", "therefore", "feel free", '"answer"', "in the end", "ultimately",
    "good luck", "enjoy", "output:", "note that", "conclusion",
)  # fmt: skip
_OPENINGS = (
    "sorry",
    "as an ai",
    "here are",
    "here is",
    "here's",
    "sure",
    "certainly",
    "step",
    "title",
    "dear",
    "i ",
)
_CLOSING_CHARS, _OPENING_CHARS = 250, 120
_LATEST_WORDS = 60

PROGRESS: tuple[str, ...] = (
    "log_so_far", "has_text", "chars_a_token", "log_lines", "paragraphs", "items", "last_number", "items_to_come",
    "in_code", "code_blocks", "ends_sentence", "ends_line", "chars_since_break", "fresh_words", "closings",
    "log_first_line", "mean_line_chars", "braces", "bold",
    *(f"opens {word!r}" for word in _OPENINGS),
    *(f"closes {word!r}" for word in _CLOSINGS),
)  # fmt: skip
"""The columns of ``progress_features``."""


def progress_features(tokens_so_far: Ints, texts: Sequence[str] | None, asked: Sequence[int]) -> Floats:
    """[n, len(PROGRESS)] float64; where there is no text all but the first column are 0.

    Args:
        tokens_so_far: [n] tokens that have come, at least 1.
        texts: [n] their text; "" where nobody kept it.
        asked: [n] items that the prompt asked for, 0 where it named no number.
    """
    made = np.zeros((len(tokens_so_far), len(PROGRESS)))
    made[:, 0] = np.log(np.maximum(tokens_so_far, 1))
    for row, text in enumerate(texts or ()):
        if text:
            made[row, 1:] = _row(text, int(tokens_so_far[row]), asked[row])
    return made


def text_so_far(output: str, output_tokens: int, tokens_so_far: int) -> str:
    """The text of the first tokens of an output whose tokens are taken to be of one length."""
    if tokens_so_far >= output_tokens:
        return output
    return output[: math.ceil(len(output) * tokens_so_far / output_tokens)]


def _row(text: str, so_far: int, asked: int) -> list[float]:
    numbers = _ITEM.findall(text)
    last = next((int(n) for n in reversed(numbers) if n), 0)
    words = _WORD.findall(text[-12 * _LATEST_WORDS :])[-_LATEST_WORDS:]
    opening = text[:_OPENING_CHARS].lower()
    closing = text[-_CLOSING_CHARS:].lower()
    closed = [word in closing for word in _CLOSINGS]
    end = text.rstrip()
    fences, lines = text.count("```"), text.count("\n")
    return [
        1.0,
        min(len(text) / so_far, 20.0),
        math.log1p(lines),
        min(text.count("\n\n"), 40),
        min(len(numbers), 60),
        min(last, 60),
        min(max(asked - max(last, len(numbers)), -1), 40) if asked and numbers else -2.0,
        fences % 2,
        min(fences // 2, 10),
        bool(end) and end[-1] in ".!?\u3002}\"'`)",
        text.endswith("\n"),
        min(len(text) - text.rfind("\n"), 1500),
        len(set(words)) / max(1, len(words)),
        sum(closed),
        math.log1p(text.find("\n") if lines else len(text)),
        len(text) / (lines + 1),
        text.count("{") - text.count("}"),
        min(text.count("**") // 2, 30),
        *[word in opening for word in _OPENINGS],
        *closed,
    ]
