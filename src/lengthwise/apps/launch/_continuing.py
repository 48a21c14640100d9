"""The fields of a request, from its beginning or from where its answer was cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lengthwise.apps.launch.contracts import CHAT, COMPLETIONS, Ask, Draft
from lengthwise.backend.openai import Abilities

_OF_THE_NEXT_TOKEN = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "ignore_eos", "stop_token_ids", "skip_special_tokens",
        "spaces_between_special_tokens", "logit_bias", "allowed_token_ids", "vllm_xargs", "priority", "user",
    }
)  # fmt: skip
"""What holds of the next token alone, whatever was prompt and what output."""
_TOLD_ANEW = frozenset({"model", "prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens"})
_OF_THE_PROMPT = frozenset(
    {
        "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs",
        "add_special_tokens", "documents",
    }
)  # fmt: skip
"""What is in the prompt's tokens already."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "repetition_penalty": (1, None),
    "n": (1, None),
    "stop": (None, "", []),
    "logprobs": (None, False),
}


def can_go_on(body: Mapping[str, Any]) -> bool:
    """Whether an answer that was cut may go on from its tokens without being another one.

    Penalties count what was output, a stop string may begin before the cut, a grammar's state is lost, and a seeded
    generator would begin anew: such answers start again.
    """
    for name, value in body.items():
        if name == "seed":
            if value is not None and body.get("temperature") != 0:
                return False
        elif name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                return False
        elif name not in _OF_THE_NEXT_TOKEN | _TOLD_ANEW | _OF_THE_PROMPT:
            return False
    return True


def most_tokens(body: Mapping[str, Any]) -> int | None:
    """The longest output that is asked for."""
    told = body.get("max_completion_tokens") or body.get("max_tokens")
    return None if told is None else int(told)


def goes_on(ask: Ask, draft: Draft, able: Abilities) -> bool:
    """Whether this engine can be asked to go on from what the draft holds."""
    most = most_tokens(ask.body)
    known = bool(draft.prompt_ids) and able.token_ids and most is not None
    return known and 0 < len(draft.output_ids) < (most or 0) and can_go_on(ask.body)


def whole_fields(ask: Ask, able: Abilities) -> tuple[dict[str, Any], str]:
    """What is sent for an answer from its beginning, and by which door."""
    return {**ask.body, **_told(able)}, ask.api


def further_fields(ask: Ask, draft: Draft, able: Abilities) -> tuple[dict[str, Any], str]:
    """What is sent for the rest of an answer: the tokens so far are the prompt."""
    body = {name: value for name, value in ask.body.items() if name in _OF_THE_NEXT_TOKEN | {"seed"}}
    had = len(draft.output_ids)
    body["prompt"] = [*draft.prompt_ids, *draft.output_ids]
    body["max_tokens"] = (most_tokens(ask.body) or 0) - had
    if least := int(ask.body.get("min_tokens") or 0):
        body["min_tokens"] = max(0, least - had)
    return {**body, **_told(able)}, COMPLETIONS


def _told(able: Abilities) -> dict[str, Any]:
    told: dict[str, Any] = {"model": able.model, "stream": True}
    if able.usage:
        told["stream_options"] = {"include_usage": True}
    if able.ids_each:
        told["return_token_ids"] = True
    return told


__all__ = ["CHAT", "can_go_on", "further_fields", "goes_on", "whole_fields"]
