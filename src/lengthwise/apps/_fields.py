"""Fields of a request that an answer could not hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lengthwise.schema.errors import InputError

_REFUSED = {
    "tools": "answers are kept as texts, and calls of tools are none",
    "functions": "answers are kept as texts, and calls of functions are none",
    "logprobs": "answers are kept as texts, without probabilities",
    "echo": "answers are kept without their prompts",
    "stream": "answers are kept whole",
}


def require_one_answer(fields: Mapping[str, Any], where: str) -> None:
    """Raises InputError where a request with these fields would be answered by more, or by other, than one text.

    Args:
        fields: Of a request.
        where: What holds them, for the message.
    """
    for name, why in _REFUSED.items():
        if fields.get(name):
            raise InputError(f"{where}.{name} cannot be asked for: {why}. Take it out")
    for name in ("n", "best_of"):
        if fields.get(name) not in (1, None):
            raise InputError(
                f"{where}.{name} must be 1, since a request has one answer; it is {fields[name]!r}"
            )
