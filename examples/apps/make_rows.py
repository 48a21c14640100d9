"""Write the rows of the example applications, with equal bytes each time: python make_rows.py [KIND [COUNT [FILE]]].

Kinds: questions (1000), routed (6856), documents (100), mixed (500). Without a kind: all files of this folder.
All texts are built from the words below, which were written for this; towns, people and events are invented.

    python examples/apps/make_rows.py questions 10000 questions-10k.jsonl
    python examples/apps/make_rows.py documents 300 documents-300.jsonl
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
from pathlib import Path
from statistics import NormalDist

FOLDER = Path(__file__).parent
FORMS = (
    "Define {topic}.",
    "How does {topic} work?",
    "Explain {topic} to {reader}.",
    "List {count} common mistakes with {topic}.",
    "What should {reader} know about {topic}?",
    "Write {count} questions for a quiz about {topic}.",
    "Give {count} reasons for and {count} against {topic}.",
    "Compare {topic} with {other} for {reader}; end with a recommendation.",
    "Write a short story in which {topic} saves the day. {reader} is the hero.",
    "Summarise in {count} sentences how {topic} came about and what it is for.",
    "Suggest {count} headlines for an article about {topic} that {reader} would want to read.",
    "Draft an e-mail to {reader} that asks for money to improve {topic}. Be polite, give {count} arguments.",
    "Plan a lesson on {topic}: aims, material, {count} steps with minutes, homework. The pupil is {reader}.",
    (
        "You are an expert in {topic}. {reader} is not convinced that it beats {other}. Answer the {count} strongest "
        "objections that you can think of, fairly, and admit where they are right."
    ),
)
TOPICS = (
    *("tides", "compost", "a heat pump", "double-entry bookkeeping", "sourdough", "the printing press", "tea"),
    *("a suspension bridge", "vaccines", "map projections", "a bicycle gear", "public libraries", "chess openings"),
    *("solar panels", "beekeeping", "a canal lock", "photosynthesis", "insurance", "a transistor", "lighthouses"),
    *("crop rotation", "the water cycle", "a violin", "barcodes", "sign language", "dry stone walls", "elevators"),
    *("a sundial", "volunteer fire brigades", "plate tectonics", "a microscope", "night trains", "hedgerows"),
    *("traffic lights", "glass blowing", "weather forecasts", "a pendulum clock", "school gardens", "glaciers"),
    *("fermentation", "a windmill", "electric ferries", "paper recycling", "the metric system", "kites", "radar"),
    *("choirs", "a steam engine", "open-source software", "river deltas", "bread ovens", "bird migration"),
    *("a telescope", "town twinning", "knitting", "concrete", "street markets", "a thermostat", "coral reefs"),
    *("tax returns", "origami", "a drawbridge", "wetlands", "walking meetings", "dictionaries", "allotments"),
)
READERS = (
    *("a child of eight", "a new colleague", "the mayor", "my grandmother", "a sceptical engineer", "a tourist"),
    *("a busy nurse", "a first-year student", "the owner of a small shop", "a retired pilot", "a journalist"),
    *("a farmer", "the school board", "a visiting musician", "a night watchman", "my neighbour", "a translator"),
    *("the harbour master", "a beginner", "a committee of parents"),
)
ROUTED = {"llama-2-70b-chat": 408, "mixtral-8x7b": 1267, "wizardlm-13b": 2068, "codellama-34b": 456, "mistral-7b": 2657}
"""Requests by model: Table 1 of SamuLLM (arXiv:2503.16893)."""
LEVELS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
TOKENS = (3, 20, 60, 131, 235, 430, 900, 1585)
"""Lengths of answers at these levels, as routing.toml has them: mean and ends are RouterBench's, the rest assumed."""
TOWNS = ("Arlemouth", "Brackwater", "Cold Harbour", "Dunmere", "Eastling", "Fennside", "Gullhaven", "Hexbridge")
PEOPLE = ("Ms Adair", "Mr Bohm", "Dr Castell", "the harbour master", "Ms Ekwall", "the surveyor", "Mr Farrow")
THINGS = ("the swing bridge", "the old mill", "the ferry slip", "the fish market", "the north wall", "the library roof")
ASPECTS = (
    "coherence: does one sentence follow from the other?",
    "consistency: are its facts at one?",
    "fluency: is it good English?",
    "relevance: is all of it worth telling?",
)
EVENTS = (
    "{person} reported that {thing} would cost {money} crowns to repair, {share} per cent more than in spring.",
    "After a storm on day {day}, {thing} was closed for {days} days and {person} was asked to find another way.",
    "The council of {town} voted {yes} to {no} to keep {thing} open at night.",
    "{person} offered to pay half of the {money} crowns if {thing} were named after the town.",
    "A letter from {town} complained about the noise at {thing}; {person} promised an answer within {days} days.",
    "{person} counted {people} visitors at {thing}, most of them from {town}.",
    "It was found that the plans of {thing} had been lost, and {person} set {money} crowns aside to draw them anew.",
    "{town} lent {people} workers for {days} days, so that {thing} was ready before day {day}.",
)


def questions() -> list[str]:
    """Return all questions, each once, in an order that mixes short and long ones."""
    count = len(FORMS) * len(TOPICS) * len(READERS)
    return list(dict.fromkeys(_question(number * 7919 % count) for number in range(count)))


def _question(number: int) -> str:
    rest, form = divmod(number, len(FORMS))
    reader, topic = divmod(rest, len(TOPICS))
    words = {
        "topic": TOPICS[topic],
        "other": TOPICS[(topic + 1 + reader) % len(TOPICS)],
        "reader": READERS[reader],
        "count": 2 + (topic + reader) % 7,
    }
    return _sentences(FORMS[form].format(**words))


def routed(counts: dict[str, int]) -> list[tuple[str, str, int]]:
    """Return (model, question, tokens of its answer) of ``counts`` requests by model, the models mixed.

    The tokens are evenly spaced levels of one distribution, mixed: no model has answered these questions.
    """
    total = sum(counts.values())
    chosen = _some(questions(), total)
    places = sorted(((k + 0.5) / n, model) for model, n in counts.items() for k in range(n))
    return [(model, chosen[k], _tokens((k * 4099 % total + 0.5) / total)) for k, (_, model) in enumerate(places)]


def _tokens(level: float) -> int:
    at = next(k for k in range(1, len(LEVELS)) if level <= LEVELS[k])
    share = (level - LEVELS[at - 1]) / (LEVELS[at] - LEVELS[at - 1])
    return round(TOKENS[at - 1] + share * (TOKENS[at] - TOKENS[at - 1]))


def lengths(documents: int) -> list[int]:
    """Return the chunks of each document: the median is 3; the longest has 60, or 201 from 300 documents on.

    These are SamuLLM's values (section 5.3); between them, lengths are lognormal here.
    """
    longest = 60 if documents < 300 else 201
    levels = [NormalDist().inv_cdf((k + 0.5) / documents) for k in range(documents)]
    sizes = [min(max(round(3 * math.exp(1.1 * z)), 1), longest) for z in levels]
    sizes[-1] = longest
    return [sizes[k * 37 % documents] for k in range(documents)] if documents % 37 else sizes


def documents(sizes: list[int], sentences: int) -> list[dict[str, object]]:
    """Return chronicles of ``sizes`` chunks with ``sentences`` sentences each."""
    made, at = [], 0
    for number, size in enumerate(sizes):
        chunks = [" ".join(_description(at + sentences * k + i) for i in range(sentences)) for k in range(size)]
        at += sentences * size
        made.append({"id": f"chronicle-{number:03}", "chunks": chunks})
    return made


def _description(number: int) -> str:
    mixed = number * 2654435761 % 2**32  # neighbours differ in every word
    words = {
        "town": TOWNS[mixed // 7 % len(TOWNS)],
        "person": PEOPLE[mixed // 61 % len(PEOPLE)],
        "thing": THINGS[mixed // 433 % len(THINGS)],
        "money": 100 * (3 + mixed // 3001 % 97),
        "share": 2 + mixed // 21001 % 38,
        "day": 1 + number // 12,
        "days": 2 + mixed // 147001 % 26,
        "yes": 7 + mixed // 1029001 % 6,
        "no": 1 + mixed // 7203001 % 5,
        "people": 12 + mixed // 50421001 % 73,
    }
    return _sentences(EVENTS[(mixed >> 9) % len(EVENTS)].format(**words))


def _sentences(text: str) -> str:
    return re.sub(r"(?:^|\. )[a-z]", lambda found: found[0].upper(), text)


def _some(available: list[str], count: int) -> list[str]:
    if count > len(available):
        raise SystemExit(f"there are {len(available)} questions; {count} were requested")
    return available[:count]


def mixed(count: int, sizes: list[int], sentences: int) -> list[dict[str, object]]:
    """Return rows with a question each; evenly spread rows also have a chronicle and the aspects to judge it by."""
    chronicles = iter(documents(sizes, sentences))
    every, rows = count // len(sizes), []
    for number, text in enumerate(_some(questions(), count)):
        one = next(chronicles, None) if number % every == 0 else None
        row: dict[str, object] = {"id": f"m{number:04}", "question": text, "chunks": [], "aspects": []}
        rows.append(row if one is None else row | {"chunks": one["chunks"], "aspects": ASPECTS})
    return rows


def question_rows(count: int) -> str:
    """Return questions as JSONL."""
    chosen = _some(questions(), count)
    return _jsonl([{"id": f"q{k:05}", "question": text} for k, text in enumerate(chosen)])


def routed_rows(counts: dict[str, int]) -> str:
    """Return requests as CSV, with the model of each."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("model", "question", "tokens"))
    table.writerows(routed(counts))
    return text.getvalue()


def _jsonl(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def shares(count: int) -> dict[str, int]:
    """Return the same mixture with another number of requests."""
    total = sum(ROUTED.values())
    made = {model: max(1, n * count // total) for model, n in ROUTED.items()}
    made["mistral-7b"] += count - sum(made.values())
    return made


def files() -> dict[str, str]:
    """Return the text of every file of this folder, by name."""
    tiny = {"alder": 8, "birch": 6, "cedar": 2}
    return {
        "questions.jsonl": question_rows(1000),
        "questions-tiny.jsonl": question_rows(16),
        "routed.csv": routed_rows(ROUTED),
        "routed-tiny.csv": routed_rows(tiny),
        "documents.jsonl": _jsonl(documents(lengths(100), 9)),
        "documents-tiny.jsonl": _jsonl(documents([2, 1, 5, 1, 3, 2], 2)),
        "mixed.jsonl": _jsonl(mixed(500, lengths(50), 6)),
        "mixed-tiny.jsonl": _jsonl(mixed(6, [1, 4, 2], 2)),
    }


def main(words: list[str]) -> None:
    """Write one file, or all."""
    if not words:
        for name, text in files().items():
            (FOLDER / name).write_text(text, encoding="utf-8")
        return
    kind, count = words[0], int(words[1]) if len(words) > 1 else 0
    makes = {
        "questions": lambda: question_rows(count or 1000),
        "routed": lambda: routed_rows(shares(count) if count else ROUTED),
        "documents": lambda: _jsonl(documents(lengths(count or 100), 9)),
        "mixed": lambda: _jsonl(mixed(count or 500, lengths(max(1, (count or 500) // 10)), 6)),
    }
    if kind not in makes:
        raise SystemExit(f"KIND must be one of {', '.join(makes)}; it is {kind}")
    place = Path(words[2]) if len(words) > 2 else Path("/dev/stdout")
    place.write_text(makes[kind](), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
