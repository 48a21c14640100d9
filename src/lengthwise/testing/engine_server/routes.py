# ruff: noqa: ARG002 - formatters have the same methods with the same parameters
"""Emulates further routes: /v1/responses, Anthropic's /v1/messages, embeddings, rerank and transcriptions."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from email.parser import BytesParser
from typing import Any

from lengthwise.testing.engine_server.completions import (
    Chunk,
    CompletionRequest,
    OutputStream,
    RefusedError,
    ResponseFormatter,
    Sampling,
    chat_ids,
    encode,
    event,
    parse_body,
    parse_request,
)
from lengthwise.testing.engine_server.engine import EngineSpec

Json = dict[str, Any]


def named_event(body: Json) -> bytes:
    """Return a server-sent event that has the type of its body as its name."""
    return f"event: {body['type']}\n".encode() + event(body)


def chat_of_responses(body: Json) -> Json:
    """Return the body of a chat that means what a body of /v1/responses means."""
    given = body.get("input")
    if not isinstance(given, str | list):
        raise RefusedError(400, "input: Field required")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    system = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    return {**body, "messages": system + items, "max_tokens": body.get("max_output_tokens")}


def chat_of_messages(body: Json) -> Json:
    """Return the body of a chat that means what a body of /v1/messages means."""
    if "max_tokens" not in body:
        raise RefusedError(400, "max_tokens: Field required")
    return count_of_messages(body) | {"max_tokens": body["max_tokens"], "stop": body.get("stop_sequences")}


def count_of_messages(body: Json) -> Json:
    """Return the body of a chat with the prompt of /v1/messages."""
    system = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    return {**body, "messages": system + (body.get("messages") or [])}


def _generating(
    chat_of: Callable[[Json], Json] = lambda body: body, *, chat: bool = True
) -> Callable[..., tuple[Json, CompletionRequest]]:
    """Parse a request that means what the body ``chat_of`` returns means as one of a chat, or of a completion."""

    def parse(raw: bytes, headers: Mapping[str, str], spec: EngineSpec) -> tuple[Json, CompletionRequest]:
        body = parse_body(raw)
        return body, parse_request(chat_of(body), headers, spec, chat=chat)

    return parse


def _pooling(texts_of: Callable[[Json], list[Any]]) -> Callable[..., tuple[Json, CompletionRequest]]:
    """Parse a request that is one pass over its prompts, as of a request for one token."""

    def parse(raw: bytes, headers: Mapping[str, str], spec: EngineSpec) -> tuple[Json, CompletionRequest]:
        body = parse_body(raw)
        _check_model(body, spec)
        ids = [token for text in texts_of(body) for token in (encode(text) if isinstance(text, str) else text)]
        if not ids:
            raise RefusedError(400, "the input must not be empty")
        request_id = headers.get("x-request-id", "")
        return body, CompletionRequest(False, spec.model, tuple(ids), Sampling(1), request_id=request_id)

    return parse


def _check_model(body: Json, spec: EngineSpec) -> None:
    if body.get("model", spec.model) != spec.model:
        raise RefusedError(404, f"The model `{body['model']}` does not exist.", "NotFoundError")


def _inputs(body: Json) -> list[Any]:
    given = body.get("input") or []
    return [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given


def _transcription(raw: bytes, headers: Mapping[str, str], spec: EngineSpec) -> tuple[Json, CompletionRequest]:
    """Parse a form. The sound's bytes are the prompt."""
    message: Any = BytesParser().parsebytes(b"Content-Type: " + headers["content-type"].encode() + b"\r\n\r\n" + raw)
    parts: list[Any] = message.get_payload() if message.is_multipart() else []
    fields = {part.get_param("name", header="content-disposition"): part.get_payload(decode=True) for part in parts}
    body = {str(name): value.decode("utf-8", "replace") for name, value in fields.items()}
    if "file" not in fields:
        raise RefusedError(400, "file: Field required")
    _check_model(body, spec)
    chat = {"messages": [{"role": "user", "content": fields["file"].hex()}], "stream": body.get("stream") == "true"}
    return body, parse_request(chat | {"max_tokens": 8}, headers, spec, chat=True)


_PLACE = {"item_id": "msg_1", "output_index": 0, "content_index": 0}


class ResponsesFormatter(ResponseFormatter):
    """Formats responses of /v1/responses."""

    def __init__(self, request: CompletionRequest, response_id: str, created_s: int, body: Json) -> None:
        super().__init__(request, response_id, created_s, body)
        self._text, self._number, self._reason = "", 0, ""

    def first_events(self) -> list[bytes]:
        """Return the events before the first token."""
        item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "in_progress", "content": []}
        return [
            self._next("response.created", response=self._response("in_progress", [], 0)),
            self._next("response.in_progress", response=self._response("in_progress", [], 0)),
            self._next("response.output_item.added", output_index=0, item=item),
            self._next("response.content_part.added", **_PLACE, part=self._part("")),
        ]

    def chunk(self, index: int, chunk: Chunk, num_output: int, padding: int = 0) -> bytes:
        """Return the event of a chunk; nothing if it has no text."""
        text = chunk.text + " " * padding
        self._text, self._reason = self._text + text, chunk.finish_reason or self._reason
        return self._next("response.output_text.delta", **_PLACE, delta=text, logprobs=[]) if text else b""

    def last_events(self, num_output: int, *, done: bool = True, double_usage: bool = False) -> list[bytes]:
        """Return the events after the last token."""
        output = [self._item(self._text)]
        last = self._next(f"response.{self._status}", response=self._response(self._status, output, num_output))
        return [
            self._next("response.output_text.done", **_PLACE, text=self._text, logprobs=[]),
            self._next("response.content_part.done", **_PLACE, part=self._part(self._text)),
            self._next("response.output_item.done", output_index=0, item=output[0]),
            *[last] * done,
        ]

    def complete(self, streams: Sequence[OutputStream], padding: int = 0) -> bytes:
        """Return the body of a response that is not streamed."""
        chunk = streams[0].take()
        self._reason = chunk.finish_reason or ""
        output = [self._item(chunk.text + " " * padding)]
        return _dumped(self._response(self._status, output, len(streams[0].ids)))

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _next(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return named_event({"type": kind, "sequence_number": self._number - 1, **fields})

    @staticmethod
    def _part(text: str) -> Json:
        return {"type": "output_text", "text": text, "annotations": []}

    def _item(self, text: str) -> Json:
        content = [self._part(text)]
        return {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content}

    def _response(self, status: str, output: list[Json], num_output: int) -> Json:
        prompt = len(self._request.prompt_ids)
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + num_output,
        }
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._head["id"], "object": "response", "created_at": self._head["created"], "status": status,
            "incomplete_details": details, "instructions": self._body.get("instructions"),
            "metadata": self._body.get("metadata"), "model": self._request.model, "output": output,
            "parallel_tool_calls": True, "temperature": 1.0, "tool_choice": "auto", "tools": [], "top_p": 1.0,
            "usage": usage if output else None,
        }  # fmt: skip


class MessagesFormatter(ResponseFormatter):
    """Formats responses of /v1/messages."""

    _reason: tuple[str, str | None] = ("end_turn", None)
    _has_block = False

    def first_events(self) -> list[bytes]:
        """Return the events before the first token."""
        return [named_event({"type": "message_start", "message": self._message([], None, None, 0)})]

    def chunk(self, index: int, chunk: Chunk, num_output: int, padding: int = 0) -> bytes:
        """Return the event of a chunk, after the start of its block if it is the first one."""
        self._end(chunk)
        text, out = chunk.text + " " * padding, b""
        if text and not self._has_block:
            self._has_block, block = True, {"type": "text", "text": ""}
            out = named_event({"type": "content_block_start", "index": 0, "content_block": block})
        delta = {"type": "text_delta", "text": text}
        return out + (named_event({"type": "content_block_delta", "index": 0, "delta": delta}) if text else b"")

    def last_events(self, num_output: int, *, done: bool = True, double_usage: bool = False) -> list[bytes]:
        """Return the events after the last token."""
        reason, stop = self._reason
        last = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": stop},
            "usage": {"input_tokens": len(self._request.prompt_ids), "output_tokens": num_output},
        }
        return [
            *[named_event({"type": "content_block_stop", "index": 0})] * self._has_block,
            *[named_event(last)] * (2 if double_usage else 1),
            *[named_event({"type": "message_stop"})] * done,
        ]

    def complete(self, streams: Sequence[OutputStream], padding: int = 0) -> bytes:
        """Return the body of a response that is not streamed."""
        self._end(chunk := streams[0].take())
        content = [{"type": "text", "text": chunk.text + " " * padding}]
        return _dumped(self._message(content, *self._reason, len(streams[0].ids)))

    def error(self, message: str) -> bytes:
        """Return an event that reports an error."""
        return named_event({"type": "error", "error": {"type": "internal_error", "message": message}})

    def _end(self, chunk: Chunk) -> None:
        if isinstance(chunk.stop_reason, str):
            self._reason = "stop_sequence", chunk.stop_reason
        elif chunk.finish_reason == "length":
            self._reason = "max_tokens", None

    def _message(self, content: list[Json], reason: str | None, stop: str | None, num_output: int) -> Json:
        return {
            "id": self._head["id"], "type": "message", "role": "assistant", "content": content,
            "model": self._request.model, "stop_reason": reason, "stop_sequence": stop,
            "usage": {"input_tokens": len(self._request.prompt_ids), "output_tokens": num_output},
        }  # fmt: skip


_SIZE = 8  # numbers of an embedding


def _embedding(text: Any) -> list[float]:
    ids = encode(text) if isinstance(text, str) else text
    return [((sum(ids) * (place + 1)) % 97) / 97 for place in range(_SIZE)]


class EmbeddingFormatter(ResponseFormatter):
    """Formats responses of /v1/embeddings."""

    def complete(self, streams: Sequence[OutputStream], padding: int = 0) -> bytes:
        """Return the embeddings."""
        rows: list[Any] = [_embedding(one) for one in _inputs(self._body)]
        if self._body.get("encoding_format") == "base64":
            rows = [base64.b64encode(struct.pack(f"<{_SIZE}f", *row)).decode() for row in rows]
        data = [{"index": index, "object": "embedding", "embedding": row} for index, row in enumerate(rows)]
        tokens = len(self._request.prompt_ids)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0}
        return _dumped({**self._head, "object": "list", "data": data, "usage": usage})


class RerankFormatter(ResponseFormatter):
    """Formats responses of /v1/rerank: documents that share more words with the query come first."""

    def complete(self, streams: Sequence[OutputStream], padding: int = 0) -> bytes:
        """Return the documents with their scores."""
        words = set(str(self._body["query"]).split())
        results: list[Json] = [
            {"index": index, "document": {"text": text}, "relevance_score": len(words & set(str(text).split())) / 8}
            for index, text in enumerate(self._body["documents"])
        ]
        results.sort(key=lambda result: -result["relevance_score"])
        tokens = {"prompt_tokens": len(self._request.prompt_ids), "total_tokens": len(self._request.prompt_ids)}
        return _dumped({"id": self._head["id"], "model": self._request.model, "usage": tokens, "results": results})


class TranscriptionFormatter(ResponseFormatter):
    """Formats responses of /v1/audio/transcriptions."""

    def complete(self, streams: Sequence[OutputStream], padding: int = 0) -> bytes:
        """Return the text of the sound."""
        return _dumped({"text": streams[0].take().text, "usage": {"type": "duration", "seconds": 1}})


def _dumped(body: Json) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


ROUTES: dict[str, tuple[Callable[..., tuple[Json, CompletionRequest]], type[ResponseFormatter], str]] = {
    "/v1/completions": (_generating(chat=False), ResponseFormatter, "cmpl"),
    "/v1/chat/completions": (_generating(), ResponseFormatter, "chatcmpl"),
    "/v1/responses": (_generating(chat_of_responses), ResponsesFormatter, "resp"),
    "/v1/messages": (_generating(chat_of_messages), MessagesFormatter, "chatcmpl"),
    "/v1/embeddings": (_pooling(_inputs), EmbeddingFormatter, "embd"),
    **dict.fromkeys(
        ("/v1/rerank", "/v2/rerank", "/rerank"),
        (_pooling(lambda body: [body.get("query") or "", *body.get("documents", ())]), RerankFormatter, "rerank"),
    ),
    **dict.fromkeys(
        ("/v1/audio/transcriptions", "/v1/audio/translations"), (_transcription, TranscriptionFormatter, "trsc")
    ),
}
"""By path of a route that the batch serves: its parser, its formatter, and the prefix of its ids."""


def count_tokens(body: Json) -> Json:
    """Return the answer of /v1/messages/count_tokens."""
    return {"input_tokens": len(chat_ids(count_of_messages(body)))}
