"""One row of a file of outputs, however its columns are called."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lengthwise.predict.tokens import estimated_tokens

NAMES: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt", "instruction", "question", "query", "input_text", "messages", "conversations", "input"),
    "output": ("output", "response", "completion", "generated_text", "answer", "output_text", "text"),
    "output_tokens": (
        "output_tokens", "completion_tokens", "num_output_tokens", "output_length", "output_len", "generatedtokens",
        "generated_tokens", "response_tokens", "num_decode_tokens", "output_toks", "token_len", "n_output_tokens",
    ),
    "prompt_tokens": (
        "prompt_tokens", "input_tokens", "input_length", "prompt_len", "contexttokens", "prompt_length", "input_toks",
        "num_prefill_tokens", "request_tokens",
    ),
    "model": ("model", "generator", "model_name", "model_id", "engine"),
    "finish_reason": ("finish_reason", "stop_reason", "finished_reason"),
}  # fmt: skip
"""Other names of a column, the first that is there counts; case and spaces do not matter."""
CUT = frozenset({"length", "max_tokens", "max_output_tokens", "model_length"})
"""Reasons to end that mean: the output was cut."""
FAILED = frozenset({"error", "abort", "aborted", "cancelled", "canceled", "content_filter"})
"""Reasons to end that say nothing about the length."""

MOST_TOKENS = 10**9
"""No request has more."""


@dataclass(frozen=True)
class Row:
    """What one request tells; None where it does not."""

    prompt: str | None
    output: str | None
    output_tokens: int | None
    prompt_tokens: int | None
    model: str | None
    finish: str | None
    """In lower case."""

    @property
    def tokens(self) -> int | None:
        """Output tokens, counted or estimated from the text; None where neither is there."""
        if self.output_tokens is not None:
            return self.output_tokens
        return None if self.output is None else (estimated_tokens(self.output) if self.output else 0)


def row_of(raw: Mapping[str, Any]) -> Row:
    """A row in our words, from a flat row, a chat completion, or a line of an OpenAI batch.

    Raises:
        ValueError: A count is not a whole number, or a message is no table.
    """
    found = _unfolded(raw)
    prompt, output = _text(_first(found, "prompt")), _text(_first(found, "output"))
    talk = _first(found, "prompt")
    if isinstance(talk, list):
        prompt, said = _talk(talk)
        output = output if output is not None else said
    elif "instruction" in found and isinstance(found.get("input"), str) and found["input"].strip():
        prompt = f"{str(prompt).strip()}\n\n{found['input'].strip()}"
    return Row(
        prompt,
        output,
        _count(_first(found, "output_tokens"), "output_tokens"),
        _count(_first(found, "prompt_tokens"), "prompt_tokens"),
        _text(_first(found, "model")),
        (_text(_first(found, "finish_reason")) or "").strip().lower() or None,
    )


def _unfolded(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A flat row: what an OpenAI request and response hold inside comes to the top."""
    flat = {str(key).strip().lower().replace(" ", "_"): value for key, value in raw.items()}
    for outer in ("request", "body", "response"):
        inner = _table(flat.get(outer))
        if inner is not None:
            del flat[outer]
            flat |= _unfolded(inner)
    usage = _table(flat.get("usage"))
    if usage is not None:
        flat |= {
            key: usage[key] for key in ("completion_tokens", "prompt_tokens") if usage.get(key) is not None
        }
    choices = flat.pop("choices", None)
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        choice = choices[0]
        message = choice.get("message") or {}
        if not isinstance(message, Mapping):
            raise ValueError(
                f"the message of a choice must be a table with its content; it is {message!r:.60}"
            )
        flat["output"] = message.get("content") if message else choice.get("text")
        flat["finish_reason"] = choice.get("finish_reason")
    return flat


def _table(value: Any) -> Mapping[str, Any] | None:
    """A JSON object, also one that is written in a text."""
    if isinstance(value, str) and value.startswith("{") and ('"choices"' in value or '"messages"' in value):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, Mapping) else None


def _first(found: Mapping[str, Any], column: str) -> Any:
    for name in NAMES[column]:
        value = found.get(name)
        if value is not None and not (isinstance(value, float) and math.isnan(value)):
            return value
    return None


def _talk(turns: Sequence[Any]) -> tuple[str, str | None]:
    """All up to the last answer as the prompt, and that answer, of a list of messages."""
    told = [_turn(turn) for turn in turns]
    last = next((i for i in range(len(told) - 1, -1, -1) if told[i][0]), None)
    if last is None:
        return "\n\n".join(text for _, text in told), None
    return "\n\n".join(text for _, text in told[:last]), told[last][1]


def _turn(turn: Any) -> tuple[bool, str]:
    if not isinstance(turn, Mapping):
        return False, str(turn)
    who = str(turn.get("role", turn.get("from", "")))
    return who in ("assistant", "gpt", "bot", "model"), _text(turn.get("content", turn.get("value"))) or ""


def _text(value: Any) -> str | None:
    if isinstance(value, list):
        parts = [part.get("text", "") if isinstance(part, Mapping) else str(part) for part in value]
        return "".join(parts)
    return value if value is None or isinstance(value, str) else str(value)


def _count(value: Any, column: str) -> int | None:
    if value is None or value == "":
        return None
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and number == int(number)) or not 0 <= number <= MOST_TOKENS:
        raise ValueError(f"{column} must be a whole number from 0 to {MOST_TOKENS:,}; it is {value!r:.60}")
    return int(number)
