"""Pieces out of the events of a streamed answer."""

from __future__ import annotations

import json
from typing import Any

from lengthwise.backend._openai_server import Piece, RequestError, Usage
from lengthwise.backend.sse import Event

_SHOWN, _PAGE = 200, 80


class PieceReader:
    """Reads one answer: completions or chat, whatever is told of tokens.

    Args:
        usage_each: Whether every piece comes with the numbers so far; otherwise only the last does, and what
            it adds is no part of the last piece.

    Attributes:
        done: Whether the stream said that it is over.
    """

    def __init__(self, *, usage_each: bool) -> None:
        self.done = False
        self._usage_each = usage_each
        self._told = 0

    def read(self, event: Event, at_s: float) -> Piece | None:
        """What an event says; None where it only ends the stream.

        Raises:
            RequestError: It is not what a stream of completions holds, or it tells of an error.
        """
        if event.data == "[DONE]":
            self.done = True
            return None
        try:
            body = json.loads(event.data)
        except ValueError:
            raise RequestError("malformed", f"not JSON: {event.data[:_SHOWN]!r}") from None
        if not isinstance(body, dict):
            raise RequestError("malformed", f"not an object: {event.data[:_SHOWN]!r}")
        if event.event == "error" or body.get("error"):
            raise RequestError("server error", told(body))
        try:
            return self._piece(body, at_s)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise RequestError("malformed", f"{error!r} in {event.data[:_SHOWN]!r}") from None

    def _piece(self, body: dict[str, Any], at_s: float) -> Piece:
        usage = usage_of(body)
        choices = body.get("choices") or ()
        if not choices:
            return Piece(at_s, "", 0, is_output=False, usage=usage)
        choice = choices[0]
        text, shows = _text(choice)
        tokens = self._tokens(choice, usage)
        end = choice.get("finish_reason")
        is_output = bool(text) or tokens > 0 or (shows and end is None and usage is None)
        prompt = _ids(body.get("prompt_token_ids") or choice.get("prompt_token_ids"))
        return Piece(at_s, text, tokens, is_output, usage, end, _ids(choice.get("token_ids")), prompt)

    def _tokens(self, choice: dict[str, Any], usage: Usage | None) -> int:
        ids = choice.get("token_ids")
        if isinstance(ids, list):
            self._told += len(ids)
            return len(ids)
        if usage is None or not self._usage_each:
            return 0
        new = usage.output_tokens - self._told
        self._told = usage.output_tokens
        return max(0, new)


def _ids(told: Any) -> tuple[int, ...]:
    """Token ids where there are any."""
    return tuple(told) if isinstance(told, list) and all(type(one) is int for one in told) else ()


def _text(choice: dict[str, Any]) -> tuple[str, bool]:
    """The text of a choice, and whether even an empty one stands for a token (a chat begins with a role)."""
    if "delta" in choice:
        delta = choice["delta"] or {}
        parts = (delta.get(name) for name in ("reasoning_content", "reasoning", "content"))
        return "".join(part for part in parts if isinstance(part, str)), False
    text = choice["text"] or ""
    if not isinstance(text, str):
        raise TypeError("a text that is none")
    return text, True


def usage_of(body: dict[str, Any]) -> Usage | None:
    """The numbers of tokens in an answer or a chunk; None where there are none.

    Raises:
        RequestError: They are no whole numbers from 0.
    """
    usage = body.get("usage")
    if not usage:
        return None
    prompt, output = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    prompt, output = prompt or 0, output or 0
    if not all(isinstance(n, int) and n >= 0 for n in (prompt, output)):
        raise RequestError("malformed", f"usage must be whole numbers from 0; it is {usage!r}"[:_SHOWN])
    return Usage(prompt, output)


def told(body: Any, kind: str = "") -> str:
    """What an error's body says, in one short line; what is no JSON by its kind and its beginning (less of a page)."""
    if isinstance(body, str) and body:
        most = _PAGE if body.lstrip().startswith("<") else _SHOWN
        return f"{kind or 'text'} {' '.join(body.split())[:most]!r}"
    error = body.get("error", body) if isinstance(body, dict) else body
    text = error.get("message", error) if isinstance(error, dict) else error
    return " ".join(str(text).split())[:_SHOWN]
