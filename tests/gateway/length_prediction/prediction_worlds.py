"""Requests, and outputs that finish."""

from __future__ import annotations

from itertools import count
from typing import Any

from lengthwise.gateway.length_prediction import LengthPredictor
from lengthwise.gateway.request import Outcome, Request

_IDS = count(1)


def request(**given: Any) -> Request:
    return Request(**{
        "id": next(_IDS), "arrival_s": 0.0, "model": "vicuna-13b", "prompt_tokens": 20, "max_tokens": 4096, **given
    })  # fmt: skip


async def predicted(length_predictor: LengthPredictor, text: str = "Write a story", **given: Any) -> Request:
    made = request(**given)
    made.length_prediction = await length_predictor.predict(made, text)
    return made


async def finished(
    length_predictor: LengthPredictor, tokens: int, text: str = "Write a story", **given: Any
) -> Request:
    """A request that was predicted and then put out so many tokens, or as many as it might."""
    made = await predicted(length_predictor, text, **given)
    made.generated_tokens = min(tokens, made.max_tokens)
    length_predictor.on_end(made, Outcome.FINISHED, 0.0)
    return made
