"""ShareGPT conversations: requests with their texts, lengths counted or estimated."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from lengthwise.workload._source import Source
from lengthwise.workload._trace import Trace

_USERS = {"human", "user"}
_MODELS = {"gpt", "assistant", "chatgpt", "bard", "bing", "model"}


def estimate_tokens(text: str) -> int:
    """About how many tokens a text has: a quarter of its UTF-8 bytes, rounded up.

    The rule of thumb for English and byte-pair vocabularies of 32k to 128k; on chat it is mostly within
    25 % for a text and 15 % for a sum, and worse for code and other languages. Pass a tokenizer's
    counter where that matters.
    """
    return -(-len(text.encode()) // 4)


def read_sharegpt(source: Source, count_tokens: Callable[[str], int] | None) -> Trace:
    """A request for each answer; its prompt is everything said before it in the conversation.

    All requests come at 0: ShareGPT has no times. ``extra`` holds "session", the number of the
    conversation, and "prompt", the user's last message.

    Raises:
        TraceError: The file is not JSON, or holds no answered message.
    """
    count = count_tokens or estimate_tokens
    rows = [
        (session, prompt, output, text)
        for session, turns in enumerate(_conversations(source))
        for prompt, output, text in _requests(turns, count)
    ]
    if not rows:
        raise source.fault(None, "no conversation in it has an answered message")
    session, prompt, output, texts = zip(*rows, strict=True)
    extra = {"session": np.array(session), "prompt": np.array(texts, object)}
    name = source.name if count_tokens else f"{source.name} (tokens estimated)"
    return Trace(np.zeros(len(rows)), np.array(prompt), np.array(output), extra, name)


def _conversations(source: Source) -> Iterator[list[Any]]:
    for line, entry in _entries(source):
        turns = entry.get("conversations", entry.get("conversation", entry.get("messages")))
        if not isinstance(turns, list):
            raise source.fault(line, "each entry must hold a list named conversations")
        yield turns


def _entries(source: Source) -> Iterable[tuple[int | None, dict[str, Any]]]:
    if source.data.lstrip()[:1] == b"{":
        yield from source.json_rows()
        return
    try:
        entries = json.loads(source.data)
    except json.JSONDecodeError as error:
        raise source.fault(error.lineno, f"not JSON, or cut off: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise source.fault(None, f"not UTF-8 text: {error}") from error
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            raise source.fault(None, f"entry {number} must be an object; it is {json.dumps(entry)[:60]}")
        yield None, entry


def _requests(turns: list[Any], count: Callable[[str], int]) -> Iterator[tuple[int, int, str]]:
    """Prompt tokens, output tokens and the user's last message, for each answer to a user."""
    history, asked = 0, ""
    for turn in turns:
        if not isinstance(turn, dict):
            continue
        speaker = str(turn.get("from", turn.get("role", ""))).lower()
        text = str(turn.get("value", turn.get("content")) or "")
        tokens = count(text)
        if speaker in _MODELS and asked and tokens > 0:
            yield history, tokens, asked
        asked = text if speaker in _USERS else ""
        history += tokens
