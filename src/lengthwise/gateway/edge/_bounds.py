"""Whether what a body asks for is within the limits."""

from __future__ import annotations

from lengthwise.gateway.config import Limits
from lengthwise.gateway.edge._bodies import INNER, Chat, Completion, Number
from lengthwise.gateway.edge.faults import bad

MOST_STOPS = 64
MOST_LOGPROBS = 20
MOST_NAME = 256
MOST_CHOICES = 128
"""Outputs of one request: choices times prompts. Each takes a seat of an engine."""
HINTS = "lengthwise_"
"""What vllm_xargs hold for the scheduler plug-in begins so."""
_NUMBERS = (int, float)
"""False is no number here."""


def check_chat(body: Chat, limits: Limits) -> tuple[int | None, int]:
    """The longest output and the choices asked for; raises a Fault where a limit is not kept."""
    _check_both(body)
    if not 1 <= len(body.messages) <= limits.messages:
        raise bad(
            "messages", f"There must be 1 to {limits.messages} messages; there are {len(body.messages)}."
        )
    _whole("top_logprobs", body.top_logprobs, 0, MOST_LOGPROBS)
    longest = _whole("max_tokens", body.max_tokens, 1, limits.max_tokens)
    newer = _whole("max_completion_tokens", body.max_completion_tokens, 1, limits.max_tokens)
    return newer if newer is not None else longest, _whole("n", body.n, 1, limits.n) or 1


def check_completion(body: Completion, limits: Limits) -> tuple[int | None, int]:
    """The longest output and the choices asked for, over all prompts; raises a Fault where a limit is not kept."""
    _check_both(body)
    _whole("logprobs", body.logprobs, 0, MOST_LOGPROBS)
    longest = _whole("max_tokens", body.max_tokens, 1, limits.max_tokens)
    n, of = _whole("n", body.n, 1, limits.n) or 1, _whole("best_of", body.best_of, 1, limits.n) or 1
    choices = max(n, of) * _prompts(body.prompt, limits)
    if choices > MOST_CHOICES:
        raise bad(
            "prompt", f"There may be {MOST_CHOICES} outputs, choices times prompts; there are {choices}."
        )
    return longest, choices


def _check_both(body: Chat | Completion) -> None:
    if not 1 <= len(body.model) <= MOST_NAME:
        raise bad("model", f"The model's name must have 1 to {MOST_NAME} letters; it has {len(body.model)}.")
    if isinstance(body.stop, list) and len(body.stop) > MOST_STOPS:
        raise bad("stop", f"There may be {MOST_STOPS} stop strings; there are {len(body.stop)}.")
    _whole("prompt_logprobs", body.prompt_logprobs, 0, MOST_LOGPROBS)
    for name in INNER:
        value = getattr(body, name)
        if value is not None and not (name == "priority" and type(value) in _NUMBERS and value == 0):
            raise bad(name, f"The field {name!r} is not for clients; leave it out.", "field_not_allowed")
    hint = next((key for key in body.vllm_xargs if key.startswith(HINTS)), None) if body.vllm_xargs else None
    if hint is not None:
        place = f"vllm_xargs.{hint}"[:MOST_NAME]
        raise bad(
            place, f"{HINTS}... is for the gateway to tell an engine; leave it out.", "field_not_allowed"
        )


def _prompts(prompt: str | list[str | int | list[int]], limits: Limits) -> int:
    """How many prompts there are."""
    if isinstance(prompt, str):
        return 1
    kinds = set(map(type, prompt))
    if len(kinds) != 1 or (kinds == {list} and [] in prompt):
        raise bad(
            "prompt",
            "The prompt must be a text, texts, token ids, or lists of token ids; not mixed, not empty.",
        )
    if kinds == {int}:
        return 1
    if len(prompt) > limits.messages:
        raise bad("prompt", f"There may be {limits.messages} prompts; there are {len(prompt)}.")
    return len(prompt)


def _whole(name: str, value: Number, least: int, most: int) -> int | None:
    if value is None:
        return None
    if not (least <= value <= most and value == int(value)):
        raise bad(name, f"{name} must be a whole number from {least} to {most}; it is {str(value)[:40]}.")
    return int(value)
