"""Features of prompts and of partial outputs that predict output lengths; a text takes microseconds."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import compress, islice, pairwise, repeat

import numpy as np

from lengthwise.schema.workload import Floats, Ints

_WORDS = {
    "compose": "write compose draft create generate produce author pen craft make",
    "long_form": "essay story article blog post speech letter report chapter novel script screenplay dialogue "
    "conversation review paper proposal plot monologue narrative biography email lyrics song scene "
    "tutorial guide lesson curriculum memo newsletter manual letters stories documentation",
    "short_form": "tweet haiku headline title slogan tagline caption name joke pun sentence phrase word limerick "
    "definition synonym antonym acronym subject emoji quote riddle",
    "explain": "explain describe discuss elaborate analyze analyse compare contrast evaluate illustrate outline "
    "interpret critique teach difference differences relationship explore examine overview introduce argue debate",
    "list": "list ideas tips ways examples suggestions steps reasons benefits advantages disadvantages pros cons "
    "recommend recommendations suggest brainstorm questions methods strategies features types options things "
    "activities books movies places causes symptoms uses items key",
    "plan": "plan recipe itinerary schedule routine design develop build prepare instructions program workout strategy "
    "cook budget roadmap implement menu syllabus recipes",
    "transform": "rewrite paraphrase rephrase correct fix edit translate convert improve transform reword simplify "
    "shorten modify change replace remove add reformat restate proofread combine fill complete turn reverse",
    "decide": "classify identify determine categorize choose select extract detect find label predict rate decide "
    "guess match check verify true false yes no sentiment spam category positive negative correctly option",
    "summarise": "summarize summarise summary tldr condense abstract gist recap highlights main",
    "compute": "calculate compute solve count sum average total probability equation percent percentage how_many "
    "evaluate integral derivative root multiply divide convert",
    "code": "code python javascript java function sql html css script program algorithm class regex bash api query "
    "json csv database c react rust sort array string excel formula docker linux pandas latex method golang php",
    "brief": "brief briefly short concise concisely shortly single only just quick quickly simple simply exactly "
    "without succinct maximum max limit less fewer shortest tiny",
    "detail": "detailed detail details comprehensive thorough thoroughly depth long longer extensive complete full "
    "elaborate specific step steps every thousand extended complex whole entire",
    "ask_open": "how why",
    "ask_what": "what whats which",
    "ask_fact": "who whom when where whose",
    "ask_yes": "is are was were does do did will would should has have am can could may might",
    "please": "please thanks thank kindly help want need",
    "you": "you your yourself i me my we our",
    "persona": "act imagine pretend role character roleplay assume suppose persona scenario interviewer",
    "greeting": "hi hello hey yo bye morning thanks lol",
}
CATEGORIES: tuple[str, ...] = tuple(_WORDS)
CATEGORY: dict[str, int] = {
    word: index for index, (_, words) in reversed(list(enumerate(_WORDS.items()))) for word in words.split()
}
"""Maps a word to the index of its category; a word in several categories has the first one."""

NUMBERS = {
    "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10,
    "twelve": 12, "fifteen": 15, "twenty": 20, "fifty": 50, "hundred": 100, "a": 1, "an": 1, "single": 1,
    "couple": 2, "few": 3, "several": 4,
}  # fmt: skip

TOKENS_EACH = {
    "word": 1.35, "character": 0.25, "letter": 0.3, "token": 1.0, "sentence": 24.0, "line": 12.0, "paragraph": 95.0,
    "page": 500.0, "verse": 40.0, "stanza": 40.0, "essay": 600.0, "bullet": 25.0, "step": 30.0, "tip": 40.0,
    "way": 40.0, "idea": 35.0, "example": 30.0, "reason": 40.0, "question": 18.0, "item": 15.0, "point": 30.0,
    "name": 8.0, "title": 10.0, "fact": 30.0, "thing": 30.0, "day": 60.0, "book": 25.0, "movie": 20.0, "song": 15.0,
}  # fmt: skip
"""Approximate tokens of one requested item."""


WORDS: dict[str, float] = {  # prior weights of words; positive ones stand for long outputs
    word: weight
    for weight, words in {
        1.3: "essay story article blog screenplay script chapter tutorial curriculum itinerary roadmap documentation "
        "thesis dissertation whitepaper",
        0.9: "plan guide report speech dialogue conversation letter proposal lesson analysis analyze analyse compare "
        "contrast comprehensive detailed thorough extensive implement design strategy strategies recipe cook bake "
        "elaborate business website game app application monologue review",
        0.6: "write explain describe discuss steps ways tips ideas develop build outline poem song lyrics email "
        "prepare pros cons advantages disadvantages benefits evaluate program code python javascript java html "
        "create compose depth workout routine schedule examples long why causes history overview research paper "
        "process differences difference suggestions improve instructions activities explore impact effects",
        0.3: "how list give suggest recommend generate make function script sql help best things important factors "
        "types features questions reasons compare characters scenario work common should could different each "
        "describe affect develop learn teach role better good",
        -0.3: "who when where which correct grammar rewrite paraphrase edit rephrase summarize summary convert "
        "sentence title name find calculate many much old called",
        -0.6: "translate classify identify choose extract headline category sentiment synonym antonym acronym pun "
        "joke capital tweet label fix spelling slogan solve missing brief short concise simple shorten did was year "
        "born won detect determine true false emoji rhymes rate",
        -1.0: "yes no only word single quick briefly exactly just answer option tiny",
    }.items()
    for word in words.split()
}
OPENINGS: dict[str, float] = {  # prior weights of a prompt's first word
    word: weight
    for weight, words in {
        0.5: "write explain describe create develop how design compose tell discuss outline plan imagine build make",
        0.2: "give list provide why suggest generate can could act help show compare",
        -0.3: "what which convert rewrite summarize is are do does will find edit paraphrase i",
        -0.7: "who when where did was were translate classify identify choose extract calculate hi hello determine",
    }.items()
    for word in words.split()
}
PHRASES: dict[str, float] = {
    "step by step": 0.5, "in detail": 0.6, "pros and cons": 0.5, "one word": -2.0, "sentence": -0.6,
    "in one line": -1.2, "true or false": -1.2, "yes or no": -1.5, "how many": -0.8, "how much": -0.5, "how to": 0.3,
    "how do i": 0.4, "how can": 0.5, "how does": 0.4, "what are some": 0.6, "what are": 0.4, "difference": 0.5,
    "what is": -0.1, "who is": -0.3, "what would happen": 0.4, "tell me about": 0.4, "act as": 0.2,
    "following": -0.2, "given": -0.2, "list of": 0.3, "short story": -0.1, "in the world": -0.3,
    "from scratch": 0.4, "no more than": -0.3, "explain": 0.3, "n't explain": -1.0, "output:": -0.3,
    "step-by-step": 0.5,
}  # fmt: skip
"""Prior weights of phrases, which are searched anywhere in the lower-case text."""


HEAD, TAIL = 1200, 500
"""Characters that are read at the start and at the end of a prompt; between them, only length and line breaks count."""
TERM_WORDS = 60  # number of first words that are looked up among the terms with learned weights

_PROMPT_WORD = re.compile(r"[^\W_]+")
_SPACED = bytes(byte if chr(byte).isalnum() and byte < 128 else 32 for byte in range(256))
MARKS = ("?", "!", ",", ".", ":", ";", '"', "(", "\n", "```", "{", "=", "\\", "|", "#", "*")
_SINGLE_MARKS = tuple(mark for mark in MARKS if len(mark) == 1)
_NO_MARKS = bytes(byte for byte in range(256) if chr(byte) not in _SINGLE_MARKS)
_NO_WORD = (-1, 0.0)
_KNOWN = {word: (CATEGORY.get(word, -1), WORDS.get(word, 0.0)) for word in (*CATEGORY, *WORDS)}
_PHRASES = tuple(PHRASES)
_PHRASE_WEIGHTS = np.array(list(PHRASES.values()))

NAMES: tuple[str, ...] = (
    "log_chars", "log_words", "log_lines", "word_chars", "digit_share", "upper_share", "foreign_share",
    "cjk_share", "log_head_chars", "log_rest_chars", "requested_log_tokens", "requested", "largest_number",
    "first_category", "second_category", "last_is_question", "guess_words", "guess_opening", "guess_max",
    "guess_min",
    *(f"count {mark!r}" for mark in MARKS),
    *(f"words of {name}" for name in CATEGORIES),
    *(f"has {phrase!r}" for phrase in _PHRASES),
    "guess_phrases", "guess",
)  # fmt: skip
"""Columns of ``prompt_features``; "guess" is a prior estimate from the weights above."""
_GUESSES = tuple(NAMES.index(name) for name in ("guess_opening", "guess_max", "guess_min"))


def prompt_features(texts: Sequence[str]) -> tuple[Floats, list[list[str]]]:
    """Return the features of prompts, [n, len(NAMES)] float64, and the words of each prompt."""
    rows, words = [], []
    for text in texts:
        row, read = _prompt_row(text)
        rows.append(row)
        words.append(read)
    known = np.array(rows, float) if rows else np.empty((0, len(NAMES) - 2))
    phrases = np.einsum("ij,j->i", known[:, -len(_PHRASES) :], _PHRASE_WEIGHTS)  # no threads, unlike BLAS
    opening, largest, smallest = (known[:, column] for column in _GUESSES)
    table = np.empty((len(rows), len(NAMES)))
    table[:, :-2] = known
    table[:, -2] = phrases
    table[:, -1] = opening + largest + smallest + phrases
    return table, words


def _prompt_row(text: str) -> tuple[list[float], list[str]]:
    seen = text if len(text) <= HEAD + TAIL else f"{text[:HEAD]} {text[-TAIL:]}"
    lower = seen.lower()
    words = prompt_words(lower)
    distinct = dict.fromkeys(words)
    stripped = text.strip()
    head = stripped.find("\n") if "\n" in stripped else len(stripped)
    categories, guess, largest, smallest = _word_counts(distinct, len(words))
    first = [float(_KNOWN.get(word, _NO_WORD)[0]) for word in words[:2]] + [-2.0, -2.0]
    row = [
        math.log1p(len(text)),
        math.log1p(len(words) * max(1.0, len(text) / max(1, len(seen)))),
        math.log1p(text.count("\n")),
        len(lower) / (len(words) + 1.0),
        *_character_shares(seen),
        math.log1p(head),
        math.log1p(len(stripped) - head),
        *requested_counts(words, distinct),
        *first[:2],
        float(stripped.endswith("?")),
        guess,
        OPENINGS.get(words[0], 0.0) if words else 0.0,
        largest,
        smallest,
        *mark_counts(seen),
        *categories,
        *[phrase in lower for phrase in _PHRASES],
    ]
    return row, words


def prompt_words(lower: str) -> list[str]:
    """Return the words of a lower-case text. A translation table makes ASCII texts five times as fast."""
    if lower.isascii():
        return lower.encode("ascii").translate(_SPACED).decode("ascii").split()
    return _PROMPT_WORD.findall(lower)


def mark_counts(text: str) -> list[int]:
    """Return the count of each mark in MARKS, at most 30."""
    if not text.isascii():
        return [min(text.count(mark), 30) for mark in MARKS]
    marks = text.encode("ascii").translate(None, _NO_MARKS).decode("ascii")
    return [min((marks if len(mark) == 1 else text).count(mark), 30) for mark in MARKS]


def _word_counts(distinct: Iterable[str], words: int) -> tuple[list[int], float, float, float]:
    categories = [0] * len(CATEGORIES)
    guess = largest = smallest = 0.0
    for category, weight in [_KNOWN[word] for word in distinct if word in _KNOWN]:
        if category >= 0:
            categories[category] += 1
        guess += weight
        if weight > largest:
            largest = weight
        elif weight < smallest:
            smallest = weight
    return categories, guess / math.sqrt(1 + min(words, 60)), largest, smallest


def _character_shares(text: str) -> tuple[float, float, float, float]:
    n, foreign, cjk = max(1, len(text)), 0.0, 0.0
    if not text.isascii():
        foreign = sum(c > "\x7f" for c in text) / n
        cjk = sum("\u2e80" <= c <= "\u9fff" or "\uac00" <= c <= "\ud7af" for c in text) / n
    data = text.encode("latin-1", "replace")
    digits = len(data) - len(data.translate(None, b"0123456789"))
    capitals = len(data) - len(data.translate(None, b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
    return digits / n, capitals / n, foreign, cjk


def requested_counts(words: list[str], distinct: Iterable[str]) -> tuple[float, float, float]:
    """Return features of the text that phrases such as "two pages" request.

    They are the log of the tokens that the largest of these phrases stands for, the number of phrases, and the log of
    the largest number in digits in the prompt.
    """
    tokens, found, largest = 0.0, 0, 0
    counts: dict[str, int] = {}
    for word in [w for w in distinct if w in NUMBERS or w[0] <= "9"]:
        count = NUMBERS.get(word) or (int(word) if word.isdecimal() and len(word) < 6 else 0)
        if count:
            counts[word] = count
    for place in compress(range(len(words)), map(counts.__contains__, words)) if counts else ():
        count = counts[words[place]]
        for item in words[place + 1 : place + 4]:
            each = _item_tokens(item)
            if each and 0 < count * each < 20_000:
                tokens, found = max(tokens, count * each), found + 1
                break
    for word, count in counts.items():
        if word not in NUMBERS:
            largest = max(largest, count)
    return math.log1p(tokens), float(found), math.log1p(min(largest, 5000))


@lru_cache(4096)
def _item_tokens(item: str) -> float | None:
    return TOKENS_EACH.get(item) or TOKENS_EACH.get(item[:-1])


def requested_items(words: list[str]) -> int:
    """Return the first number above 2 (in digits: 3 to 99) in the first 60 words, as in "ten reasons"; 0 if none."""
    for word in words[:TERM_WORDS]:
        count = int(word) if word.isascii() and word.isdigit() and len(word) < 3 else NUMBERS.get(word, 0)
        if count > 2:
            return count
    return 0


_FORMULA = re.compile(r"\\(?:frac|sqrt|cdot|sum|int|text|left|angle|\[|\()|\$[^$\n]{1,80}\$")
_SUM = re.compile(
    r"\bhow (?:many|much|long|far|old|fast|tall)\b|\b(?:find|calculate|compute|determine|solve|what percent)\b|"
    r"\bwhat (?:is|was|are) the (?:\w+ ){0,3}(?:sum|product|area|value|number|total|average|probability|percentage|"
    r"cost|price|difference|ratio|perimeter|volume)\b"
)
_AMOUNT = re.compile(r"\d+|\b(?:two|three|four|five|six|seven|eight|nine|ten|half|twice|dozen|double|third)\b")
_PROGRAM = re.compile(r"\b(?:def|python|javascript|sql|function|algorithm|program|code)\b")


def is_mathematics(text: str) -> bool:
    """Return whether a prompt asks for mathematics.

    Its start has a formula, or it asks for a quantity, gives at least two, and is not about a program. The length of
    the answer follows from the steps of the solution, which no words of the prompt show.
    """
    lower = text[:HEAD].lower()
    if _FORMULA.search(lower):
        return True
    return bool(_SUM.search(lower)) and len(_AMOUNT.findall(lower)) > 1 and not _PROGRAM.search(lower)


def terms(words: list[str]) -> Iterator[str]:
    """Yield the distinct words and pairs of consecutive words of the first 60, and the first word with a "^" before."""
    read = words[:TERM_WORDS]
    yield from dict.fromkeys(read)
    yield from dict.fromkeys(f"{a} {b}" for a, b in pairwise(read))
    yield from (f"^{word}" for word in islice(read, 1))


def score(words: list[str], weights: dict[str, float]) -> float:
    """Return the sum of the learned weights of the prompt's terms."""
    read = words[:TERM_WORDS]
    known = weights.get
    total = sum(map(known, dict.fromkeys(read), repeat(0.0)))
    total += sum(map(known, dict.fromkeys(map(" ".join, pairwise(read))), repeat(0.0)))
    return total + (known(f"^{read[0]}", 0.0) if read else 0.0)


_ITEM = re.compile(r"^\s*(?:[*-]|(\d{1,3})[.):])\s", re.MULTILINE)
_PROGRESS_WORD = re.compile(r"\w+")
_CLOSINGS = (
    "in conclusion", "overall", "in summary", "to summarize", "i hope", "let me know", "finally", "lastly", "remember",
    "sincerely", "regards", "the end", "answer is", "therefore", "feel free", '"answer"', "in the end", "ultimately",
    "good luck", "enjoy", "output:", "note that", "conclusion",
)  # fmt: skip
_OPENINGS = (
    "sorry", "as an ai", "here are", "here is", "here's", "sure", "certainly", "step", "title", "dear", "i ",
)  # fmt: skip
_CLOSING_CHARS, _OPENING_CHARS = 250, 120
_LATEST_WORDS = 60

PROGRESS: tuple[str, ...] = (
    "log_so_far", "has_text", "chars_a_token", "log_lines", "paragraphs", "items", "last_number", "items_to_come",
    "in_code", "code_blocks", "ends_sentence", "ends_line", "chars_since_break", "fresh_words", "closings",
    "log_first_line", "mean_line_chars", "braces", "bold",
    *(f"opens {word!r}" for word in _OPENINGS),
    *(f"closes {word!r}" for word in _CLOSINGS),
)  # fmt: skip
"""Columns of ``progress_features``."""


def progress_features(tokens_so_far: Ints, texts: Sequence[str] | None, requested: Sequence[int]) -> Floats:
    """Return features of the outputs so far, [n, len(PROGRESS)].

    ``tokens_so_far`` [n] is at least 1. ``requested`` [n] is the number of items that each prompt requests, 0 if
    unknown. Without the ``texts`` of the outputs so far, all columns but the first are 0.
    """
    made = np.zeros((len(tokens_so_far), len(PROGRESS)))
    made[:, 0] = np.log(np.maximum(tokens_so_far, 1))
    for row, text in enumerate(texts or ()):
        if text:
            made[row, 1:] = _progress_row(text, int(tokens_so_far[row]), requested[row])
    return made


def text_so_far(output: str, output_tokens: int, tokens_so_far: int) -> str:
    """Return the text of an output's first tokens, as if all its tokens had the same length."""
    if tokens_so_far >= output_tokens:
        return output
    return output[: math.ceil(len(output) * tokens_so_far / output_tokens)]


def _progress_row(text: str, so_far: int, requested: int) -> list[float]:
    numbers = _ITEM.findall(text)
    last = next((int(n) for n in reversed(numbers) if n), 0)
    words = _PROGRESS_WORD.findall(text[-12 * _LATEST_WORDS :])[-_LATEST_WORDS:]
    opening = text[:_OPENING_CHARS].lower()
    closing = text[-_CLOSING_CHARS:].lower()
    closings = [word in closing for word in _CLOSINGS]
    end = text.rstrip()
    fences, lines = text.count("```"), text.count("\n")
    return [
        1.0,
        min(len(text) / so_far, 20.0),
        math.log1p(lines),
        min(text.count("\n\n"), 40),
        min(len(numbers), 60),
        min(last, 60),
        min(max(requested - max(last, len(numbers)), -1), 40) if requested and numbers else -2.0,
        fences % 2,
        min(fences // 2, 10),
        bool(end) and end[-1] in ".!?\u3002}\"'`)",
        text.endswith("\n"),
        min(len(text) - text.rfind("\n"), 1500),
        len(set(words)) / max(1, len(words)),
        sum(closings),
        math.log1p(text.find("\n") if lines else len(text)),
        len(text) / (lines + 1),
        text.count("{") - text.count("}"),
        min(text.count("**") // 2, 30),
        *[word in opening for word in _OPENINGS],
        *closings,
    ]
