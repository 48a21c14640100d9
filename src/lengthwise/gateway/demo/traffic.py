"""The demo's requests: plain questions, and output lengths drawn wide around what such questions call for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

MOST_TOKENS = 1024
LOAD = 3.0
"""Bursts at so many times what the engines can serve, as in ELIS."""
_GAMMA_SHAPE = 0.73
_SPREAD = 0.5
"""Standard deviation of the logarithm of a length around its kind's: no prompt tells its length exactly."""
KINDS = (  # a question, and the tokens that answers to such questions have in the median
    ("What is the capital of {}? Answer in one word.", 6),
    ("Translate into French: I would like to visit {} next spring.", 18),
    ("Summarize in one sentence why people visit {}.", 32),
    ("Explain to a child in a short paragraph where {} is and who lives there.", 100),
    ("Give me five tips for a weekend in {}.", 180),
    ("List twenty places to see in {}, each with a sentence on why it is worth the way.", 500),
    (
        "Write a detailed essay of several pages about the history of {}, with an introduction and a conclusion.",
        750,
    ),
    ("Write a Python program with comments and tests that plans a tour of {}, and explain every step.", 600),
)
PLACES = (
    "Peru", "Norway", "Kenya", "Japan", "Portugal", "Vietnam", "Chile", "Iceland", "Morocco", "Canada", "Greece",
    "Nepal",
)  # fmt: skip


@dataclass(frozen=True)
class Question:
    """One request.

    Attributes:
        due_s: When it is sent, after the burst began.
        prompt: Its text.
        tokens: How long its answer will be: the engine is told, the gateway is not.
    """

    due_s: float
    prompt: str
    tokens: int


def burst(seed: int, number: int, count: int, *, tokens_per_s: float, shrink: float) -> list[Question]:
    """Requests of one burst, the same for the same seed and number.

    Args:
        seed: Of kinds, places, lengths and gaps.
        number: Of the burst.
        count: How many.
        tokens_per_s: That the engines can make.
        shrink: Lengths are divided by it, for slow engines.
    """
    rng = np.random.default_rng([seed, number])
    kinds = rng.integers(len(KINDS), size=count)
    medians = np.array([KINDS[kind][1] for kind in kinds], float)
    lengths = np.clip(medians * np.exp(_SPREAD * rng.standard_normal(count)) / shrink, 1, MOST_TOKENS)
    gap_s = lengths.mean() / tokens_per_s / LOAD
    due_s = np.cumsum(rng.gamma(_GAMMA_SHAPE, gap_s / _GAMMA_SHAPE, count))
    places = rng.integers(len(PLACES), size=count)
    return [
        Question(float(due), KINDS[kind][0].format(PLACES[place]), round(float(length)))
        for due, kind, place, length in zip(due_s, kinds, places, lengths, strict=True)
    ]


def body(model: str, question: Question) -> dict[str, Any]:
    """What is posted: the length stands where the engine looks and the gateway does not."""
    return {
        "model": model,
        "prompt": question.prompt,
        "max_tokens": MOST_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "vllm_xargs": {"output_tokens": question.tokens, "most_tokens": MOST_TOKENS},
    }
