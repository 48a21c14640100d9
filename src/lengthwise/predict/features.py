"""What a prompt's words say about the length of its answer: numbers that cost microseconds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import compress, islice, pairwise, repeat

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
_SPACED = bytes(byte if chr(byte).isalnum() and byte < 128 else 32 for byte in range(256))
_MARKS = ("?", "!", ",", ".", ":", ";", '"', "(", "\n", "```", "{", "=", "\\", "|", "#", "*")
_LONE_MARKS = tuple(mark for mark in _MARKS if len(mark) == 1)
_UNMARKED = bytes(byte for byte in range(256) if chr(byte) not in _LONE_MARKS)
_NO_WORD = (-1, 0.0)
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
_GUESS = tuple(NAMES.index(name) for name in ("guess_opening", "guess_most", "guess_least"))


def prompt_features(texts: Sequence[str]) -> tuple[Floats, list[list[str]]]:
    """[n, len(NAMES)] float64, what each prompt's words and marks say; and the words that were read."""
    rows, words = [], []
    for text in texts:
        row, read = _row(text)
        rows.append(row)
        words.append(read)
    seen = np.array(rows, float) if rows else np.empty((0, len(NAMES) - 2))
    phrases = np.einsum("ij,j->i", seen[:, -len(_SAYS) :], _SAYS_WEIGHT)  # no threads, unlike BLAS
    opening, most, least = (seen[:, column] for column in _GUESS)
    table = np.empty((len(rows), len(NAMES)))
    table[:, :-2] = seen
    table[:, -2] = phrases
    table[:, -1] = opening + most + least + phrases
    return table, words


def _row(text: str) -> tuple[list[float], list[str]]:
    seen = text if len(text) <= HEAD + TAIL else f"{text[:HEAD]} {text[-TAIL:]}"
    lower = seen.lower()
    words = _words(lower)
    distinct = dict.fromkeys(words)
    stripped = text.strip()
    head = stripped.find("\n") if "\n" in stripped else len(stripped)
    kinds, guess, most, least = _vocabulary(distinct, len(words))
    first = [float(_KNOWN.get(word, _NO_WORD)[0]) for word in words[:2]] + [-2.0, -2.0]
    row = [
        math.log1p(len(text)),
        math.log1p(len(words) * max(1.0, len(text) / max(1, len(seen)))),
        math.log1p(text.count("\n")),
        len(lower) / (len(words) + 1.0),
        *_shares(seen),
        math.log1p(head),
        math.log1p(len(stripped) - head),
        *_asked(words, distinct),
        *first[:2],
        float(stripped.endswith("?")),
        guess,
        OPENINGS.get(words[0], 0.0) if words else 0.0,
        most,
        least,
        *_marks(seen),
        *kinds,
        *[phrase in lower for phrase in _SAYS],
    ]
    return row, words


def _words(lower: str) -> list[str]:
    """The words of a lower-case text; of ASCII by a table, which takes a fifth of the time."""
    if lower.isascii():
        return lower.encode("ascii").translate(_SPACED).decode("ascii").split()
    return _WORD.findall(lower)


def _marks(seen: str) -> list[int]:
    """How often each mark stands there, at most 30."""
    if not seen.isascii():
        return [min(seen.count(mark), 30) for mark in _MARKS]
    kept = seen.encode("ascii").translate(None, _UNMARKED).decode("ascii")
    return [min((kept if len(mark) == 1 else seen).count(mark), 30) for mark in _MARKS]


def _vocabulary(distinct: Iterable[str], words: int) -> tuple[list[int], float, float, float]:
    """Different words of each category; and the sum, most and least of what they were guessed to weigh."""
    kinds = [0] * len(CATEGORIES)
    guess = most = least = 0.0
    for category, weight in [_KNOWN[word] for word in distinct if word in _KNOWN]:
        if category >= 0:
            kinds[category] += 1
        guess += weight
        if weight > most:
            most = weight
        elif weight < least:
            least = weight
    return kinds, guess / math.sqrt(1 + min(words, 60)), most, least


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


def _asked(words: list[str], distinct: Iterable[str]) -> tuple[float, float, float]:
    """Log tokens that counts such as "three short paragraphs" ask for (0: none), how many, largest number."""
    tokens, found, largest = 0.0, 0, 0
    counts = _counts(distinct)
    for place in compress(range(len(words)), map(counts.__contains__, words)) if counts else ():
        count = counts[words[place]]
        for what in words[place + 1 : place + 4]:
            each = _each(what)
            if each and 0 < count * each < 20_000:
                tokens, found = max(tokens, count * each), found + 1
                break
    for word, count in counts.items():
        if word not in NUMBERS:
            largest = max(largest, count)
    return math.log1p(tokens), float(found), math.log1p(min(largest, 5000))


def _counts(distinct: Iterable[str]) -> dict[str, int]:
    """Of words that are numbers, above 0, the number."""
    found = {}
    for word in [w for w in distinct if w in NUMBERS or w[0] <= "9"]:
        count = NUMBERS.get(word) or (int(word) if word.isdecimal() and len(word) < 6 else 0)
        if count:
            found[word] = count
    return found


@lru_cache(4096)
def _each(what: str) -> float | None:
    return TOKENS_EACH.get(what) or TOKENS_EACH.get(what[:-1])


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
    total = sum(map(known, dict.fromkeys(read), repeat(0.0)))
    total += sum(map(known, dict.fromkeys(map(" ".join, pairwise(read))), repeat(0.0)))
    return total + (known(f"^{read[0]}", 0.0) if read else 0.0)
