"""Answers as JSON, whole or in pieces, in OpenAI's form with vLLM's additions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lengthwise.testing.engine_server.asked import Asked
from lengthwise.testing.engine_server.toy_model import spelled
from lengthwise.testing.engine_server.writing import Piece, Writing


class Rendering:
    """Makes the events and the body of one answer.

    Args:
        asked: What was asked for.
        name: The answer's id.
        created_s: Told in every object.
    """

    def __init__(self, asked: Asked, name: str, created_s: int) -> None:
        self._asked = asked
        kind = "chat.completion" if asked.chat else "text_completion"
        self._head = {"id": name, "object": kind, "created": created_s, "model": asked.model}
        self._first = [True] * asked.n

    def opening(self) -> list[bytes]:
        """Events before the first token: a chat begins with a role."""
        if not self._asked.chat:
            return []
        delta = {"role": "assistant", "content": ""}
        choices = [
            {"index": i, "delta": delta, "logprobs": None, "finish_reason": None}
            for i in range(self._asked.n)
        ]
        extra: dict[str, Any] = {"prompt_token_ids": list(self._asked.prompt_ids)} if self._asked.ids else {}
        return [self._chunk(choices, 0, **extra)]

    def piece(self, index: int, piece: Piece, written: int, pad: int = 0) -> bytes:
        """The event of a piece; ``written`` counts the tokens of all choices."""
        asked, text = self._asked, piece.text + " " * pad
        choice: dict[str, Any] = {"index": index}
        choice |= {"delta": {"content": text}} if asked.chat else {"text": text}
        choice["logprobs"] = self._logprobs(piece.ids)
        choice |= {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
        if asked.ids:
            choice["token_ids"] = piece.ids
            if self._first[index] and not asked.chat:
                choice["prompt_token_ids"] = list(asked.prompt_ids)
        self._first[index] = False
        return self._chunk([choice], written)

    def usage(self, written: int) -> bytes:
        """The event at the end that tells the numbers."""
        return event(self._head_of_chunk() | {"choices": [], "usage": self._usage(written)})

    def whole(self, writings: Sequence[Writing], pad: int = 0) -> bytes:
        """The answer in one, each text longer by so many blanks."""
        choices = [self._whole_choice(i, writing.take(), pad) for i, writing in enumerate(writings)]
        usage = self._usage(sum(len(writing.ids) for writing in writings))
        return json.dumps(self._head | {"choices": choices, "usage": usage}, ensure_ascii=False).encode()

    def _whole_choice(self, index: int, piece: Piece, pad: int) -> dict[str, Any]:
        asked, text = self._asked, piece.text + " " * pad
        choice: dict[str, Any] = {"index": index}
        message = {"role": "assistant", "content": text}
        choice |= {"message": message} if asked.chat else {"text": text}
        choice["logprobs"] = self._logprobs(piece.ids)
        choice |= {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
        if asked.ids:
            choice |= {"token_ids": piece.ids, "prompt_token_ids": list(asked.prompt_ids)}
        return choice

    def _chunk(self, choices: list[dict[str, Any]], written: int, **extra: Any) -> bytes:
        body = self._head_of_chunk() | {"choices": choices} | extra
        if self._asked.usage_each:
            body["usage"] = self._usage(written)
        return event(body)

    def _head_of_chunk(self) -> dict[str, Any]:
        return self._head | ({"object": "chat.completion.chunk"} if self._asked.chat else {})

    def _usage(self, written: int) -> dict[str, int]:
        prompt = len(self._asked.prompt_ids)
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    def _logprobs(self, ids: list[int]) -> dict[str, Any] | None:
        """The model is sure: every token has probability 1 and no alternative."""
        if self._asked.logprobs is None:
            return None
        tokens = [spelled(i).decode("utf-8", "replace") for i in ids]
        if self._asked.chat:
            rows = zip(tokens, ids, strict=True)
            return {
                "content": [
                    {"token": t, "logprob": 0.0, "bytes": list(spelled(i)), "top_logprobs": []}
                    for t, i in rows
                ]
            }
        return {"tokens": tokens, "token_logprobs": [0.0] * len(ids), "top_logprobs": None, "text_offset": []}


def event(body: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def error_body(message: str, kind: str, status: int) -> dict[str, Any]:
    """An error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
