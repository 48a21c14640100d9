"""Server-sent events cut at their ends, their bytes unchanged."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lengthwise.backend.openai_protocol import CHAT, SseReader

MAX_BYTES = 1 << 20
"""Of an event that is not at its end yet."""
_ONE = re.compile(rb".*?(?:\n\n|\n\r\n?|\r\r\n?)", re.DOTALL)
_ENDS = (b"\n\n", b"\n\r", b"\r\r")


class TooLong(Exception):  # noqa: N818
    """An event that does not end within ``MOST_BYTES``."""


class Splitter:
    """Holds back what is not a whole event yet, so that an answer never stops in the middle of one.

    Lines may end in LF, CR LF or CR. All that goes in comes out, in order and unchanged.

    Attributes:
        retained: What is held back now.
    """

    __slots__ = ("_most", "retained")

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.retained, self._most = b"", max_bytes

    def feed(self, chunk: bytes) -> bytes:
        """The whole events that are there now.

        Raises:
            TooLong: An event is too long; ``rest`` holds what came of it.
        """
        if not self.retained and chunk.endswith(b"\n\n"):
            return chunk
        data = self.retained + chunk
        end = _last_end(data, max(0, len(self.retained) - 2))
        self.retained = data[end:]
        if len(self.retained) > self._most:
            self.retained = data
            raise TooLong
        return data[:end]

    def rest(self) -> bytes:
        """What came and is no whole event; it is forgotten here."""
        rest, self.retained = self.retained, b""
        return rest


def split(complete: bytes) -> list[bytes]:
    """Whole events one by one; joined they are the same bytes."""
    if b"\r" in complete:
        events: list[bytes] = _ONE.findall(complete)
        done = sum(map(len, events))
        return events if done == len(complete) else [*events, complete[done:]]
    parts = complete.split(b"\n\n")
    last = parts.pop()
    events = [part + b"\n\n" for part in parts]
    return [*events, last] if last else events


def data_of(event: bytes) -> str:
    """The data of one whole event: "" where it has none (a comment, a keep-alive)."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return event[6:-2].decode("utf-8", "replace")
    found = SseReader(1 << 30).feed(event)
    return found[0].data if found else ""


def _last_end(data: bytes, start: int) -> int:
    """The place behind the last blank line, 0 where there is none; none ends before ``start`` + 2."""
    end = 0
    for mark in _ENDS:
        at = data.rfind(mark, start) + 2
        if at >= 2:
            end = max(end, at)
    return end + 1 if end and data[end - 1 : end + 1] == b"\r\n" else end


TEXT = re.compile(rb'"(?:content|text|reasoning|reasoning_content|arguments)":\s?"(?!")')
"""Of an event that adds text."""
CONTENT = re.compile(rb'"(?:content|text)":\s?"(?!")')
OTHER = re.compile(rb'"(?:reasoning|reasoning_content)":\s?"(?!")|"(?:tool_calls|function_call)":\s?[\[{](?!\])')
"""What only the engine's own parser makes of tokens."""
IDS = re.compile(rb'"token_ids":\s?\[([\d,\s]*)\]')
PROMPT_IDS = re.compile(rb'"prompt_token_ids":\s?\[([\d,\s]+)\]')
ADDED = re.compile(rb'("(?:prompt_)?token_ids":\s?)\[[\d,\s]*\]')
TOLD_IDS = re.compile(rb'("token_ids":\s?)(?:\[([\d,\s]*)\]|null)')
DONE_PATTERN = re.compile(rb"(?:^|[\r\n])data: ?\[DONE\][ \t]*(?=[\r\n])")
FINISH = re.compile(rb'"finish_reason":\s?"(\w*)')
USAGE = re.compile(rb'"usage":\s?\{[^{}]*?"completion_tokens":\s?(\d+)')
NO_CHOICES = re.compile(rb'"choices":\s?\[\s?\]')
ERROR = re.compile(rb'(?:^|[\r\n])data: ?\{\s?"error":|(?:^|[\r\n])event: ?error[\r\n]')
EVENT = re.compile(rb"(?:^|[\r\n])data:")


def found(form: re.Pattern[bytes], start: bytes, body: bytes) -> re.Match[bytes] | None:
    """The first match of a pattern that starts so; a long body is looked through faster than by ``search``."""
    at = body.find(start)
    return form.search(body, at) if at >= 0 else None


def at_end(events: bytes) -> bool:
    """Whether the stream says that it is over; the plain search before the pattern saves 2.7 us an event."""
    return b"[DONE]" in events and DONE_PATTERN.search(events) is not None


def many(ids: bytes) -> int:
    """How many ids a list holds."""
    return ids.count(b",") + 1 if ids.strip() else 0


def entries(ids: Iterable[int]) -> bytes:
    """Ids as they stand in a list."""
    return b",".join(b"%d" % one for one in ids)


def with_ids(event: bytes, before: bytes) -> bytes:
    """The event with token ids that come before its own; one that has no place for ids stays as it is."""
    return TOLD_IDS.sub(lambda m: m[1] + b"[" + b",".join(filter(None, (before, m[2]))) + b"]", event, count=1)


def without_ids(event: bytes) -> bytes:
    """The event with no token ids, as the engine sends it to who did not ask for them."""
    return ADDED.sub(rb"\1null", event) if b"token_ids" in event else event


_JSON_ENDS = (b"}\n\n", b"}\r\n\r\n", b"}\r\r")
_BEGINS = b'data: {"'
_OUTPUT = ("text", "content", "token_ids", "reasoning", "reasoning_content", "rejection", "audio", "tool_calls",
           "function_call")  # fmt: skip
"""What of a choice, or of its delta, is output."""


def decoded(data: str) -> dict[str, Any]:
    """The object that an event's data is; ValueError where it is none."""
    import msgspec

    try:
        chunk = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None
    if not isinstance(chunk, dict):
        raise ValueError("not an object")  # noqa: TRY004 - the engine's data, not our types
    return chunk


def looks_whole(event: bytes) -> bool:
    """Whether an event ends as an object does, and no second one runs into it; nothing is decoded."""
    return event.endswith(_JSON_ENDS) and event.rfind(_BEGINS) <= 0


def adds_output(event: bytes) -> bool:
    """Whether an event adds to the output, however it is written.

    Raises:
        ValueError: It is not what an engine tells.
    """
    data = data_of(event)
    if not data or data.strip() == "[DONE]":
        return False
    try:
        return any(map(_adds, decoded(data).get("choices") or ()))
    except (TypeError, AttributeError) as error:
        raise ValueError(str(error)) from None


def _adds(choice: dict[str, Any]) -> bool:
    told = {**choice, **(choice.get("delta") or {})}
    return any(told.get(name) for name in _OUTPUT)


_TEXT = re.compile(rb'[^"\\\r\n]+')
_ESCAPED = re.compile(rb'(?:[^"\\\r\n]+|\\[^\r\n])+')
"""Of a JSON string, to its end; no line ends in it, so that nothing of the stream's own can stand there."""
_NUMBERS = re.compile(rb"\d[\d, ]*")
_MAX_ATTEMPTS, _THRESHOLD = 8, 4
"""So many layouts are learned in vain; one that has fitted so often was not."""


class Alike:
    """The layout of events that add text and say nothing else: what a scan finds in one, it finds in all of them.

    To compare an event with it takes an eighth of the instructions of a scan.

    Attributes:
        ids: Token ids of the event that ``fits`` has seen last, as they stand in JSON.
    """

    __slots__ = ("_after", "_before", "_between", "_fit_result", "_ids_at", "_left", "ids")

    def __init__(self) -> None:
        self._before = self._between = self._after = self.ids = b""
        self._fit_result, self._ids_at, self._left = 0, 0, _MAX_ATTEMPTS

    def learn(self, event: bytes, text: re.Pattern[bytes], *, ids: bool = False) -> None:
        """Takes the layout of an event.

        Args:
            event: One whose scan found one text, no end, no usage and no error.
            text: What finds the beginning of its text.
            ids: Whether only one with token ids is worth it.
        """
        if self._fit_result >= _THRESHOLD:
            self._left = _MAX_ATTEMPTS
        self._before, self._fit_result = b"", 0
        if not self._left:
            return
        self._left -= 1
        begins = text.search(event)
        ends = _ESCAPED.match(event, begins.end()) if begins else None
        added = list(ADDED.finditer(event))
        if begins is None or ends is None or len(added) > 1 or (added and added[0].start() < ends.end()):
            return
        numbers = _NUMBERS.match(event, added[0].end(1) + 1) if added else None
        if numbers is None and (added or ids):
            return
        self._between = event[ends.end() : numbers.start()] if numbers else b""
        self._before, self._after = event[: begins.end()], event[(numbers or ends).end() :]

    def discard(self) -> None:
        """Nothing fits from now on."""
        self._before, self._fit_result, self._left = b"", 0, 0

    def fits(self, event: bytes) -> bool:
        """Whether nothing but its text, and its token ids, differs from what was learned."""
        before, between = self._before, self._between
        if not before or not event.startswith(before):
            return False
        at = len(before)
        found = _TEXT.match(event, at)
        if found is None or event.startswith(b"\\", found.end()):
            found = _ESCAPED.match(event, at)
            if found is None:
                return False
        at = found.end()
        if between:
            if not event.startswith(between, at):
                return False
            at = self._ids_at = at + len(between)
            self.ids = ids = event[at : event.find(b"]", at)]
            if not ids.isdigit() and not _NUMBERS.fullmatch(ids):
                return False
            at += len(ids)
        if event[at:] != self._after:
            return False
        self._fit_result += 1
        return True

    def fitting(self, events: bytes) -> int:
        """How many events these are, where there are several and all of them fit; else 0."""
        before = self._before
        if not before or not events.startswith(before) or events.find(before, 1) < 0:
            return 0
        parts = split(events)
        return len(parts) if all(map(self.fits, parts)) else 0

    def without_ids(self, event: bytes) -> bytes:
        """The event that ``fits`` has seen last with no token ids, as ``scan.without_ids``."""
        at = self._ids_at
        return event[: at - 1] + b"null" + event[at + len(self.ids) + 1 :]


DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Wants:
    """What the client asked to see.

    Attributes:
        api: CHAT or COMPLETIONS.
        stream: Whether in events.
        usage: Whether at the end.
        usage_each: In each chunk.
        ids: Whether token ids.
    """

    api: str
    stream: bool
    usage: bool
    usage_each: bool
    ids: bool

    @staticmethod
    def of(api: str, stream: bool, fields: dict[str, Any]) -> Wants:
        """By the fields of a request."""
        options = fields.get("stream_options")
        options = options if isinstance(options, dict) else {}
        return Wants(
            api,
            stream,
            bool(options.get("include_usage")),
            bool(options.get("continuous_usage_stats")),
            bool(fields.get("return_token_ids")),
        )


class Dress:
    """How the first chunk looked: its id, time and model are those of the whole answer."""

    def __init__(self, wants: Wants, first: dict[str, Any]) -> None:
        self._wants = wants
        keys = ("id", "object", "created", "model")
        self._frame = {key: first[key] for key in keys if key in first}

    def chunk(self, text: str, finish: str | None, stop: Any, ids: list[int] | None, usage: dict[str, int]) -> bytes:
        """An event."""
        choice: dict[str, Any] = {"index": 0}
        choice |= {"delta": {"content": text}} if self._wants.api == CHAT else {"text": text}
        choice |= {"logprobs": None, "finish_reason": finish}
        if stop is not None or self._wants.api != CHAT:
            choice["stop_reason"] = stop
        choice["token_ids"] = ids if self._wants.ids else None
        fields = {**self._frame, "choices": [choice]}
        return _event({**fields, "usage": usage} if self._wants.usage_each else fields)

    def usage(self, usage: dict[str, int]) -> bytes:
        """The event that tells all tokens, where it is wanted."""
        return _event({**self._frame, "choices": [], "usage": usage}) if self._wants.usage else b""


def usage_of(prompt_ids: bytes, generated: int) -> dict[str, int]:
    """The numbers of a whole answer, however many runs it took."""
    prompt = many(prompt_ids)
    return {"prompt_tokens": prompt, "total_tokens": prompt + generated, "completion_tokens": generated}


def _event(fields: dict[str, Any]) -> bytes:
    import msgspec

    return b"data: " + msgspec.json.encode(fields) + b"\n\n"
