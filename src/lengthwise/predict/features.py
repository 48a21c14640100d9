"""What a prompt's words say about the length of its answer: numbers that cost microseconds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

import numpy as np
import numpy.typing as npt

from lengthwise.predict._lexicon import CATEGORIES, CATEGORY, NUMBERS, TOKENS_EACH
from lengthwise.predict._prior import OPENINGS, PHRASES, WORDS

Floats = npt.NDArray[np.float64]

HEAD, TAIL = 1200, 500
"""Characters that are read at either end of a prompt; what is pasted between them only counts by length."""
TERM_WORDS = 60
"""Words that have learnt weights are looked for among so many at the beginning."""

_WORD = re.compile(r"[^\W_]+")
_MARKS = ("?", "!", ",", ".", ":", ";", '"', "(", "\n", "```", "{", "=", "\\", "|", "#", "*")
_KNOWN = {word: (CATEGORY.get(word, -1), WORDS.get(word, 0.0)) for word in (*CATEGORY, *WORDS)}
_SAYS = tuple(PHRASES)
_SAYS_WEIGHT = np.array(list(PHRASES.values()))

NAMES: tuple[str, ...] = (
    "log_chars", "log_words", "log_lines", "word_chars", "digit_share", "upper_share", "foreign_share",
    "cjk_share", "log_head_chars", "log_rest_chars", "asked_log_tokens", "asked", "largest_number",
    "first_category", "second_category", "last_is_question", "guess_words", "guess_opening", "guess_most",
    "guess_least",
    *(f"count {mark!r}" for mark in _MARKS),
    *(f"words of {name}" for name in CATEGORIES),
    *(f"says {phrase!r}" for phrase in _SAYS),
    "guess_phrases", "guess",
)  # fmt: skip
"""The columns of ``prompt_features``; "guess" is what a reader would think before any data."""
_GUESS = {name: NAMES.index(name) for name in ("guess_words", "guess_opening", "guess_most", "guess_least")}


def prompt_features(texts: Sequence[str]) -> tuple[Floats, list[list[str]]]:
    """[n, len(NAMES)] float64, what each prompt's words and marks say; and the words that were read."""
    rows, words = [], []
    for text in texts:
        row, read = _row(text)
        rows.append(row)
        words.append(read)
    seen = np.array(rows, float).reshape(len(rows), len(NAMES) - 2)
    phrases = np.einsum("ij,j->i", seen[:, -len(_SAYS) :], _SAYS_WEIGHT)  # no threads, unlike BLAS
    opening, most, least = (seen[:, _GUESS[f"guess_{n}"]] for n in ("opening", "most", "least"))
    return np.column_stack([seen, phrases, opening + most + least + phrases]), words


def _row(text: str) -> tuple[list[float], list[str]]:
    seen = text if len(text) <= HEAD + TAIL else f"{text[:HEAD]} {text[-TAIL:]}"
    lower = seen.lower()
    words = _WORD.findall(lower)
    stripped = text.strip()
    head = stripped.find("\n") if "\n" in stripped else len(stripped)
    kinds, guess, most, least = _vocabulary(words)
    first = [float(_KNOWN.get(word, (-1, 0.0))[0]) for word in words[:2]] + [-2.0, -2.0]
    row = [
        math.log1p(len(text)),
        math.log1p(len(words) * max(1.0, len(text) / max(1, len(seen)))),
        math.log1p(text.count("\n")),
        len(lower) / (len(words) + 1.0),
        *_shares(seen),
        math.log1p(head),
        math.log1p(len(stripped) - head),
        *_asked(words),
        *first[:2],
        float(stripped.endswith("?")),
        guess,
        OPENINGS.get(words[0], 0.0) if words else 0.0,
        most,
        least,
        *[min(seen.count(mark), 30) for mark in _MARKS],
        *kinds,
        *[phrase in lower for phrase in _SAYS],
    ]
    return row, words


def _vocabulary(words: list[str]) -> tuple[list[int], float, float, float]:
    """Different words of each category; and the sum, most and least of what they were guessed to weigh."""
    kinds = [0] * len(CATEGORIES)
    guess = most = least = 0.0
    for word in dict.fromkeys(words):
        if word in _KNOWN:
            category, weight = _KNOWN[word]
            if category >= 0:
                kinds[category] += 1
            guess += weight
            most, least = max(most, weight), min(least, weight)
    return kinds, guess / math.sqrt(1 + min(len(words), 60)), most, least


def _shares(text: str) -> tuple[float, float, float, float]:
    """Shares of digits, capitals, letters beyond ASCII, and ideographs."""
    n, foreign, cjk = max(1, len(text)), 0.0, 0.0
    if not text.isascii():
        foreign = sum(c > "\x7f" for c in text) / n
        cjk = sum("\u2e80" <= c <= "\u9fff" or "\uac00" <= c <= "\ud7af" for c in text) / n
    data = text.encode("latin-1", "replace")
    digits = len(data) - len(data.translate(None, b"0123456789"))
    capitals = len(data) - len(data.translate(None, b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    return digits / n, capitals / n, foreign, cjk


def _asked(words: list[str]) -> tuple[float, float, float]:
    """Log tokens that counts such as "three short paragraphs" ask for (0: none), how many, largest number."""
    tokens, found, largest = 0.0, 0, 0
    places = [i for i, word in enumerate(words) if word[0] <= "9" or word in NUMBERS]
    for place in places:
        word = words[place]
        count = NUMBERS.get(word) or (int(word) if word.isdigit() and len(word) < 6 else 0)
        if count:
            largest = max(largest, count if word not in NUMBERS else 0)
            for what in words[place + 1 : place + 4]:
                each = TOKENS_EACH.get(what) or TOKENS_EACH.get(what[:-1])
                if each and 0 < count * each < 20_000:
                    tokens, found = max(tokens, count * each), found + 1
                    break
    return math.log1p(tokens), float(found), math.log1p(min(largest, 5000))


def asked_items(words: list[str]) -> int:
    """The first small number that a prompt names ("ten reasons"), 0 where there is none."""
    for word in words[:TERM_WORDS]:
        count = int(word) if word.isascii() and word.isdigit() and len(word) < 3 else NUMBERS.get(word, 0)
        if count > 2:
            return count
    return 0


def terms(words: list[str]) -> Iterator[str]:
    """Different words, pairs of words and the opening of a prompt, for learnt weights."""
    read = words[:TERM_WORDS]
    yield from dict.fromkeys(read)
    yield from dict.fromkeys(f"{a} {b}" for a, b in pairwise(read))
    yield from (f"^{word}" for word in islice(read, 1))


def score(words: list[str], weights: dict[str, float]) -> float:
    """The sum of the learnt weights of a prompt's terms."""
    read = words[:TERM_WORDS]
    known = weights.get
    total = sum([known(word, 0.0) for word in dict.fromkeys(read)])
    total += sum([known(pair, 0.0) for pair in dict.fromkeys([f"{a} {b}" for a, b in pairwise(read)])])
    return total + (known(f"^{read[0]}", 0.0) if read else 0.0)
