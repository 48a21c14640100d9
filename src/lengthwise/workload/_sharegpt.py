"""ShareGPT conversations: requests with their texts, lengths counted or estimated."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from lengthwise.schema.tokens import estimated_tokens
from lengthwise.workload._source import Source
from lengthwise.workload._trace import Trace

_USERS = {"human", "user"}
_MODELS = {"gpt", "assistant", "chatgpt", "bard", "bing", "model"}


def read_sharegpt(source: Source, count_tokens: Callable[[str], int] | None) -> Trace:
    """A request for each answer; its prompt is everything said before it in the conversation.

    All requests come at 0: ShareGPT has no times. ``extra`` holds "session", the number of the
    conversation, "prompt", all that was said before, "output", the answer, and where entries name it "model".

    Raises:
        TraceError: The file is not JSON, or holds no answered message.
    """
    count = count_tokens or _estimated
    rows = [
        (session, model, *request)
        for session, (model, turns) in enumerate(_conversations(source))
        for request in _requests(turns, count)
    ]
    if not rows:
        raise source.fault(None, "no conversation in it has an answered message")
    session, model, prompt, output, asked, answered = zip(*rows, strict=True)
    texts = {"prompt": asked, "output": answered} | ({"model": model} if any(model) else {})
    extra = {"session": np.array(session)} | {k: np.array(v, object) for k, v in texts.items()}
    name = source.name if count_tokens else f"{source.name} (tokens estimated)"
    return Trace(np.zeros(len(rows)), np.array(prompt), np.array(output), extra, name)


def _estimated(text: str) -> int:
    return estimated_tokens(text) if text else 0


def _conversations(source: Source) -> Iterator[tuple[str, list[Any]]]:
    """The model that answers, where it is named, and the turns."""
    for line, entry in _entries(source):
        turns = entry.get("conversations", entry.get("conversation", entry.get("messages")))
        if not isinstance(turns, list):
            raise source.fault(line, "each entry must hold a list named conversations")
        yield str(entry.get("model") or ""), turns


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


def _requests(turns: list[Any], count: Callable[[str], int]) -> Iterator[tuple[int, int, str, str]]:
    """Prompt tokens, output tokens, all that was said before, and the answer, for each answer to a user."""
    history, said, asked = 0, "", False
    for turn in turns:
        if not isinstance(turn, dict):
            continue
        speaker = str(turn.get("from", turn.get("role", ""))).lower()
        text = str(turn.get("value", turn.get("content")) or "")
        tokens = count(text)
        if speaker in _MODELS and asked and tokens > 0:
            yield history, tokens, said, text
        asked = speaker in _USERS and bool(text)
        history += tokens
        said = f"{said}\n\n{text}" if said else text
