# ruff: noqa: D102 - overridden methods are documented in ResponseReader
"""Readers of responses: unchanged streams, buffered responses, and streams that another engine can continue."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import msgspec

from lengthwise.backend.openai_protocol import CHAT
from lengthwise.gateway.apis import CHUNKS, MESSAGE_STOP, NAMED, NamedAnswer, read_answer, read_event
from lengthwise.gateway.relay import sse
from lengthwise.gateway.relay.failures import IN_STREAM_ERROR, MALFORMED, UpstreamError, response_too_long
from lengthwise.gateway.relay.sse import EventSplitter, EventTemplate, ResponseOptions

MAX_PREAMBLE_BYTES = 1 << 16
PREEMPTION_WAIT_CHUNKS = 16  # chunks for which a preemption waits at most until the text of all tokens is sent
MAX_COUNT_DIGITS = 15  # digits of a number of tokens
_EXCERPT = 300


class ResponseReader:
    """Reads a response, over one or several attempts, and returns the bytes for the client.

    ``output_complete`` is True once all output has arrived, ``finished`` once the bytes for the client are complete.
    """

    trackable = False  # whether the ids of all its tokens are known; it never changes from False to True

    def __init__(self) -> None:
        self.count = 0  # output tokens so far
        self.cached_tokens = math.nan  # prompt tokens that were cached; NaN unless the engine reports them
        self.prompt_tokens = 0  # of the prompt, as the engine reports it; 0 if it does not
        self.finish_reason = ""
        self.output_complete = self.finished = False
        self.error: UpstreamError | None = None  # error that the engine reported in the stream, or that broke it
        self._preamble: list[bytes] = []  # events before the first output
        self._preamble_bytes, self._released = 0, False

    @property
    def sent(self) -> bool:
        """Whether the client has received bytes, so that the response cannot start again."""
        return self._released

    @property
    def can_resume(self) -> bool:
        """Whether another attempt can continue after the flushed tokens, instead of starting again."""
        return False

    @property
    def unrecoverable(self) -> bool:
        """Whether the client has received a part of the response that no other engine can continue."""
        return self.sent and not self.can_resume

    def feed(self, data: bytes) -> bytes:
        """Read bytes from the engine, and return the bytes for the client."""
        raise NotImplementedError

    def end(self) -> bytes:
        """Return the remaining bytes at the end of the response. Set ``error`` if the output is incomplete."""
        raise NotImplementedError

    def missing_end(self) -> bytes | None:
        """Return the rest of a response whose output is complete, such as [DONE], or None if output is missing."""
        return None

    def _read_prompt(self, usage: bytes) -> None:
        # The first number counts: the prompt of a resumed attempt includes the output so far.
        if not self.prompt_tokens and (prompt := sse.PROMPT_TOKENS.search(usage)) is not None:
            self.prompt_tokens = int(prompt[1])
        if (cached := sse.CACHED.search(usage)) is not None:
            self.cached_tokens = float(cached[1])

    def _read_named(self, answer: NamedAnswer) -> None:
        """Read the tokens and the end of an answer, or of an event, that has names for its parts."""
        if (usage := answer.usage) is not None:
            # An event before the output states 0 tokens or none.
            self.count = usage.output_tokens or self.count
            self.prompt_tokens = self.prompt_tokens or usage.prompt_tokens
            if usage.cached_tokens is not None:
                self.cached_tokens = float(usage.cached_tokens)
        if answer.finish_reason:
            self.output_complete, self.finish_reason = True, answer.finish_reason

    def _pass(self, events: bytes, *, has_output: bool) -> bytes:
        """Return the events that may go to the client now. Events before the first output (a role) wait for it."""
        is_comment = not (self._released or has_output or self._preamble or sse.DATA_LINE.search(events))
        if self._released or is_comment:
            return events
        if not has_output and self._preamble_bytes + len(events) <= MAX_PREAMBLE_BYTES:
            self._preamble.append(events)
            self._preamble_bytes += len(events)
            return b""
        return self._release() + events

    def _release(self) -> bytes:
        preamble, self._preamble, self._released = self._preamble, [], True
        return b"".join(preamble)


class UntrackedStream(ResponseReader):
    """A stream of ``choices`` outputs that passes unchanged, except for its usage.

    Tokens are counted by the usage that the engine reports, or by events if it reports none. ``hide_usage`` removes the
    chunk with the total usage, and ``hide_usage_each`` the usage in all other chunks, if the client did not request
    them. ``event_tokens`` is the maximum number of tokens of an event. A malformed event does not go to the client, and
    ends the attempt unless the output is complete. An event that is too long is skipped up to its end.
    """

    def __init__(
        self, choices: int = 1, *, hide_usage: bool = False, hide_usage_each: bool = False, event_tokens: int = 1
    ) -> None:
        super().__init__()
        self.error_forwarded = False
        self.template = EventTemplate()
        self._splitter = EventSplitter()
        self._in_long_event = self._unscanned = self._has_usage = False
        self._last_bytes = b""  # of a long event so far
        self._choices = self._choices_left = choices
        self._hide_usage, self._hide_usage_each, self.event_tokens = hide_usage, hide_usage_each, event_tokens
        self._counts: dict[bytes, int] = {}  # output tokens of each of several choices, by index

    @property
    def estimated_count(self) -> int:
        """Number of output tokens, estimated from events if the engine does not report it."""
        return self.count if self._has_usage else self.count * self.event_tokens

    def feed(self, data: bytes) -> bytes:
        num_events = 1 if self.template.matches(data) else self.template.count_matches(data)
        if num_events and not self._splitter.pending:
            self.count += num_events
            return data
        if self._in_long_event:
            return self._feed_long_event(data)
        try:
            events = self._splitter.feed(data)
        except sse.EventTooLongError:
            *complete, start = sse.split_events(self._splitter.flush())
            before = b"".join(complete)
            out = self._scan(before, before) if complete else b""
            if self.error is not None or self.finished:
                return out
            if sse.DATA_LINE.match(start) is None:
                self.error = UpstreamError(MALFORMED, start[:_EXCERPT].decode("utf-8", "replace"))
                return out
            self.count += sse.TEXT.search(start) is not None
            self._unscanned = self._in_long_event = True
            self.template.discard()
            return out + self._release() + self._feed_long_event(start)
        return self._scan(events, events) if events else b""

    def _feed_long_event(self, data: bytes) -> bytes:
        before, self._last_bytes = self._last_bytes, (self._last_bytes + data)[-3:]
        end = sse.BLANK_LINE.search(before + data)
        if end is None:
            return data
        self._in_long_event, self._last_bytes = False, b""
        at = end.end() - len(before)
        return data[:at] + (self.feed(data[at:]) if data[at:] else b"")

    def end(self) -> bytes:
        rest = self._splitter.flush()
        out = self._scan(rest, rest + b"\n\n") if rest else rest
        if self._unscanned and self.error is None:  # only the end of the connection shows that the response is complete
            self.output_complete = self.finished = True
        if not self.output_complete:
            self.error = self.error or UpstreamError("closed early", "the stream ended without its end")
            return out if self.error_forwarded else b""
        return out if self._released else self._release() + out

    def missing_end(self) -> bytes | None:
        return sse.DONE if self.output_complete and self.error is None else None

    def _scan(self, events: bytes, terminated: bytes) -> bytes:  # noqa: C901
        if self.finished:  # nothing belongs to a stream after its end
            return b""
        valid, failure = sse.before_failure(terminated)
        if failure:
            events = terminated = valid
        if sse.is_done(terminated):
            self.finished = True
            if not terminated.endswith(sse.DONE) or terminated.count(sse.DONE) > 1:
                terminated = sse.through_done(terminated)
                events = events[: len(terminated)]
        num_texts = len(sse.TEXT.findall(terminated))
        self.count += num_texts
        has_usage = b'"completion_tokens"' in terminated
        if has_usage and not self._read_usage(terminated):
            self.error = UpstreamError(MALFORMED, "a number of tokens is too large")
            return b""
        causes = sse.FINISH.findall(terminated)
        if causes:
            self._choices_left -= len(causes)
            self.finish_reason = causes[-1].decode()
        self.output_complete = self.finished or self._choices_left <= 0
        if self._hide_usage or self._hide_usage_each:
            events = sse.without_usage(events, total=self._hide_usage, each=self._hide_usage_each)
        out = self._pass(events, has_output=bool(num_texts) or self.output_complete)
        if failure and not self.finished:
            if sse.ERROR.search(failure) or not self.output_complete:
                return self._fail(out, failure)
            self.finished = True  # no output is missing
            return out + sse.DONE
        if num_texts == 1 and not (has_usage or causes or self.finished or self.error):
            self.template.learn(events, sse.TEXT)
        return out

    def _fail(self, out: bytes, failure: bytes) -> bytes:
        """Set the error that an event reports, or that a malformed event is. Return ``out`` and what follows it."""
        is_error = sse.ERROR.search(failure) is not None
        detail = failure[:_EXCERPT].decode("utf-8", "replace")
        self.error = UpstreamError(IN_STREAM_ERROR if is_error else MALFORMED, detail)
        self.error_forwarded = is_error and self.sent
        return out + failure * self.error_forwarded

    def _read_usage(self, events: bytes) -> bool:
        """Read the tokens of prompt and output. Return False if a number is too large."""
        for event in sse.split_events(events) if self._choices > 1 else (events,):
            if not (counts := sse.USAGE.findall(event)):
                continue
            if len(counts[-1]) > MAX_COUNT_DIGITS:
                return False
            self._has_usage, count = True, int(counts[-1])
            if self._choices == 1 or sse.NO_CHOICES.search(event):
                self.count = count
                self._read_prompt(event)
            elif (index := sse.INDEX.search(event)) is not None:  # vLLM reports the tokens of this choice
                self._counts[index[1]] = count
                self.count = sum(self._counts.values())
        return True


class NamedEventStream(UntrackedStream):
    """A stream of named events that passes unchanged up to the end of the connection.

    Without ``has_end``, only the end of the connection shows that the response is complete, and no tokens are counted.
    """

    def __init__(self, *, has_end: bool = True) -> None:
        super().__init__()
        self._has_end, self._unscanned, self._has_last = has_end, not has_end, not has_end

    def missing_end(self) -> bytes | None:
        if not self.output_complete or self.error is not None:
            return None
        return b"" if self._has_last else MESSAGE_STOP

    def _scan(self, events: bytes, terminated: bytes) -> bytes:
        valid, failure = sse.before_failure(terminated)
        if failure:
            events = terminated = valid
        read = [read_event(sse.event_data(event)) for event in sse.split_events(terminated)]
        num_texts = sum([bool(event.text) for event in read])
        self.count += num_texts * self._has_end
        for event in read:
            self._read_named(event.answer)
            self._has_usage |= self.output_complete
            self._has_last |= event.is_last
        out = self._pass(events, has_output=bool(num_texts) or self.output_complete)
        if failure and (sse.ERROR.search(failure) or not self.output_complete):
            return self._fail(out, failure)
        if num_texts == len(read) == 1 and not self.output_complete:
            self.template.learn(events, sse.NAMED_TEXT)
        return out


class BufferedResponse(ResponseReader):
    """A response that is sent at its end. ``engine_fault``: the engine is at fault if it exceeds ``max_bytes``.

    ``events`` is the form of the route's answers: with CHUNKS and NAMED it is a JSON object with the output tokens.
    """

    def __init__(self, max_bytes: int, *, engine_fault: bool = True, events: str = CHUNKS) -> None:
        super().__init__()
        self._events = events
        self._parts: list[bytes] = []
        self._size, self._max_bytes, self._engine_fault = 0, max_bytes, engine_fault

    def feed(self, data: bytes) -> bytes:
        self._parts.append(data)
        self._size += len(data)
        if self._size > self._max_bytes:
            self._parts.clear()
            self.error = response_too_long(self._max_bytes, engine_fault=self._engine_fault)
        return b""

    def end(self) -> bytes:
        body = b"".join(self._parts)
        if self._events not in (CHUNKS, NAMED):
            self._read_prompt(body[body.rfind(b'"usage"') :])
            self.output_complete = self.finished = True
            return body
        if not sse.is_object(body):
            detail = f"a response must be a JSON object; this one of {len(body)} bytes is none"
            self.error = UpstreamError("no JSON", detail, status=200)
            return b""
        if self._events == NAMED:
            self.count = 1
            self._read_named(read_answer(body))
            self.output_complete = self.finished = True
            return body
        usage = sse.find_from(sse.USAGE, b'"usage"', body)
        if usage and len(usage[1]) > MAX_COUNT_DIGITS:
            self.error = UpstreamError(MALFORMED, "a number of tokens is too large", status=200)
            return b""
        self.count = int(usage[1]) if usage else 1
        if usage:
            self._read_prompt(body[usage.start() :])
        cause = sse.find_from(sse.FINISH, b'"finish_reason"', body)
        self.finish_reason = cause[1].decode() if cause else ""
        self.output_complete = self.finished = True
        return body


ID_BYTES = 12  # maximum number of bytes of a token id in an event; a prompt has at most as many tokens as bytes


class TrackedStream(ResponseReader):
    """A stream with known token ids, over one or several attempts.

    In the first attempt only token ids change: they are removed, or delayed until their text arrives. A later attempt
    continues from token ids by ``/v1/completions``, and its chunks are rewritten to look like those of the first
    attempt. ``prompt_ids`` is a JSON list without brackets.

    An engine may send a token before its text, because it delays incomplete characters. ``flushed_tokens`` are the
    tokens up to the last chunk with text, after which a later attempt starts. If that chunk has several tokens, the
    text of its last ones may be missing; ``uncertain_tokens`` is then the number of its tokens, and otherwise 0. Token
    ids go to the client with the text that they complete.
    """

    def __init__(self, options: ResponseOptions, prompt_bytes: int = 0) -> None:
        super().__init__()
        self.trackable, self.prompt_ids = True, b""
        self.flushed_tokens = self.uncertain_tokens = 0
        self.template, self._options = EventTemplate(), options
        self._max_event_bytes = sse.MAX_EVENT_BYTES + ID_BYTES * prompt_bytes
        self._splitter = EventSplitter(self._max_event_bytes)
        self._ids, self._unsent_ids = list[bytes](), list[bytes]()
        self._is_first_attempt, self._usage_sent, self._first_event = True, False, b""
        self._chunk_fields: dict[str, Any] | None = None  # of the chunks of later attempts

    @property
    def can_resume(self) -> bool:
        return self.trackable and bool(self.prompt_ids) and (self.sent or self.flushed_tokens > 0)

    @property
    def all_flushed(self) -> bool:
        """Whether the text of all tokens has certainly been sent, so that a preemption loses no tokens."""
        return self.flushed_tokens == self.count and not self.uncertain_tokens

    @property
    def partial_ids_sent(self) -> bool:
        """Whether the client may have token ids without their text. A preemption would send these ids twice."""
        return self._options.ids and self.uncertain_tokens > 0

    @property
    def memory_bytes(self) -> int:
        """Approximate bytes of the prompt that are retained to continue the output."""
        return len(self.prompt_ids) + len(self._first_event)

    def should_preempt(self, num_chunks: int) -> bool | None:
        """Return True to preempt the request now, False to wait for the next chunk, or None never to preempt it.

        A preemption waits until the text of all tokens has been sent. After PREEMPTION_WAIT_CHUNKS chunks it happens
        without that text, or not at all if ids of these tokens have been sent. ``num_chunks`` is the number of chunks
        since the scheduler requested the preemption.
        """
        if self.all_flushed or num_chunks <= PREEMPTION_WAIT_CHUNKS:
            return self.all_flushed
        return None if self.partial_ids_sent else True

    def last_ids(self, tokens: int) -> list[int]:
        """Return the ids of the last ``tokens`` flushed tokens."""
        return self._all_ids()[max(0, self.flushed_tokens - tokens) : self.flushed_tokens]

    def start_attempt(self, num_tokens: int) -> bytes:
        """Prepare to continue after ``num_tokens`` tokens, and return their ids as a JSON list without brackets."""
        text = sse.join_ids(self._all_ids()[:num_tokens])
        self._ids, self._unsent_ids, self.error, self._usage_sent = [text] if text else [], [], None, False
        self.count = self.flushed_tokens = num_tokens
        self.uncertain_tokens = 0
        self._splitter = EventSplitter(self._max_event_bytes + ID_BYTES * num_tokens)
        self.template.discard()
        self._is_first_attempt = False
        return text

    def feed(self, data: bytes) -> bytes:
        if self.template.matches(data) and not self._splitter.pending:
            return self._read_matching(data)
        try:
            events = self._splitter.feed(data)
        except sse.EventTooLongError:
            self.error = UpstreamError(MALFORMED, "an event is too long")
            return b""
        return self._read(events) if events else b""

    def end(self) -> bytes:
        rest = self._splitter.flush()
        out = self._read(rest + b"\n\n") if rest else b""
        if self.output_complete:
            self.error = None  # the output is complete, so an incomplete event after it does not matter
            return out + self._close()
        if self.error is None or self.error.reason == MALFORMED:  # half an event
            self.error = UpstreamError("closed early", "the stream ended without its end")
        return out

    def missing_end(self) -> bytes | None:
        return self._close() if self.output_complete else None

    def end_at_limit(self) -> bytes:
        """Return the end of an output that has reached its limit, if no engine has reported the end."""
        self.output_complete, self.finish_reason = True, "length"
        chunk = self._with_client_ids(self._chunk("", "length", None, []), [], flushed=True)
        return self._pass(chunk, has_output=True) + self._close()

    def _close(self) -> bytes:
        if self.finished:
            return b""
        self.finished, usage = True, b""
        if self._options.usage and self.prompt_ids and not self._usage_sent:
            usage = sse.encode_event({**self._get_chunk_fields(), "choices": [], "usage": self._usage()})
        return self._pass(usage + sse.DONE, has_output=True)

    def _get_chunk_fields(self) -> dict[str, Any]:
        if self._chunk_fields is None:
            first: dict[str, Any] = {}
            with contextlib.suppress(ValueError):
                first = sse.parse_object(sse.event_data(self._first_event))
            self._chunk_fields = {key: first[key] for key in ("id", "object", "created", "model") if key in first}
        return self._chunk_fields

    def _chunk(self, text: str, finish: str | None, stop: Any, ids: list[int]) -> bytes:
        choice: dict[str, Any] = {"index": 0}
        choice |= {"delta": {"content": text}} if self._options.api == CHAT else {"text": text}
        choice |= {"logprobs": None, "finish_reason": finish}
        if stop is not None or self._options.api != CHAT:
            choice["stop_reason"] = stop
        choice["token_ids"] = ids if self._options.ids else None
        fields = {**self._get_chunk_fields(), "choices": [choice]}
        return sse.encode_event({**fields, "usage": self._usage()} if self._options.usage_each else fields)

    def _usage(self) -> dict[str, int]:
        prompt = sse.count_ids(self.prompt_ids)
        return {"prompt_tokens": prompt, "total_tokens": prompt + self.count, "completion_tokens": self.count}

    def _read_matching(self, event: bytes) -> bytes:
        ids = self.template.ids
        tokens = ids.count(b",") + 1
        self._ids.append(ids)
        self.count = self.flushed_tokens = self.count + tokens
        self.uncertain_tokens = tokens if tokens > 1 else 0
        if self._options.ids:
            return self._with_client_ids(event, [ids], flushed=True)
        return self.template.without_ids(event)

    def _with_client_ids(self, event: bytes, ids: list[bytes], *, flushed: bool) -> bytes:
        """Return the event with the ids of flushed tokens only. Other ids wait for the text that they complete."""
        if not self._options.ids or (flushed and not self._unsent_ids):
            return event
        if flushed:
            before, self._unsent_ids = self._unsent_ids, []
            return sse.IDS_FIELD.sub(lambda m: b"%b[%b]" % (m[1], b",".join(filter(None, (*before, m[2])))), event, 1)
        self._unsent_ids += ids
        return sse.IDS_FIELD.sub(rb"\1[]", event) if ids else event

    def _read(self, events: bytes) -> bytes:
        read = self._read_first_attempt if self._is_first_attempt else self._read_later_attempt
        out = []
        for event in sse.split_events(events):
            out.append(self._read_matching(event) if self.template.matches(event) else read(event))
            if self.error is not None:
                break
        return b"".join(out)

    def _read_first_attempt(self, event: bytes) -> bytes:  # noqa: C901, PLR0912
        ids, cause = sse.TOKEN_IDS.search(event), sse.FINISH.search(event)
        tokens = sse.count_ids(ids[1]) if ids is not None else 0
        has_text = sse.CONTENT.search(event) is not None
        by_parser = sse.BY_PARSER.search(event) is not None
        is_one_object = tokens > 0 and event.endswith(sse.OBJECT_ENDS) and event.rfind(b'data: {"') <= 0
        shown = event if self._options.ids else sse.without_ids(event)
        if b"error" in event and sse.ERROR.search(event):
            self.error = UpstreamError(IN_STREAM_ERROR, event[:_EXCERPT].decode("utf-8", "replace"))
        elif not (sse.is_utf8(event) if is_one_object or self.finished else sse.is_event(event)):
            self.error = UpstreamError(MALFORMED, shown[:200].decode("utf-8", "replace"))
        elif not is_one_object and not self.finished:
            # The patterns may overlook tokens of other events, which would be missing after a resume, and a client may
            # fail on invalid JSON. So parse all events but single objects with token ids, and those after the end.
            try:
                has_text |= sse.adds_output(shown) and not tokens
            except ValueError as error:
                self.error = UpstreamError(MALFORMED, f"{error}: {shown[:200].decode('utf-8', 'replace')}")
        if cause is not None and self.error is None:
            self._set_finish_reason(cause[1].decode())
        if self.error is not None:
            return b""
        self._count(ids[1] if ids is not None else b"", tokens, has_text=has_text)
        if not self._first_event and shown.startswith(b"data:"):
            self._first_event = sse.without_ids(shown)
        if not self.prompt_ids and (prompt := sse.PROMPT_IDS.search(event)) is not None:
            self.prompt_ids = prompt[1]
            self.prompt_tokens = sse.count_ids(prompt[1])
        if by_parser or (has_text and not self.prompt_ids):
            self.trackable = False
        has_text |= by_parser
        if ids is None:
            # If each chunk has usage, the total is in the chunk without choices.
            is_total = self.output_complete and (
                not self._options.usage_each or sse.NO_CHOICES.search(event) is not None
            )
            if b'"completion_tokens"' in event and is_total:
                self._usage_sent = True
                self._read_prompt(event)
            if sse.is_done(event):
                return self._close()
        shown = self._with_client_ids(shown, [ids[1]] if ids and tokens else [], flushed=has_text or cause is not None)
        out = self._pass(shown, has_output=has_text or self.output_complete)
        if has_text and ids is not None and cause is None and not by_parser and self.prompt_ids:
            self.template.learn(event, sse.CONTENT, ids=True)
        return out

    def _read_later_attempt(self, event: bytes) -> bytes:
        data = sse.event_data(event)
        if not data:
            return event
        if data.strip() == "[DONE]":
            return self._close() if self.output_complete else b""
        try:
            chunk = sse.parse_object(data)
            if "error" in chunk:
                self.error = UpstreamError(IN_STREAM_ERROR, data[:_EXCERPT])
            elif choices := chunk.get("choices"):
                return self._rewrite(choices[0])
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            self.error = UpstreamError(MALFORMED, f"{error}: {data[:200]}")
        return b""

    def _rewrite(self, choice: dict[str, Any]) -> bytes:
        text, cause = choice.get("text") or "", choice.get("finish_reason")
        ids = choice.get("token_ids") or []
        if cause is not None:
            self._set_finish_reason(str(cause))
        if self.error is not None:
            return b""
        id_texts = [sse.join_ids(ids)] if ids else []
        self._count(sse.join_ids(ids), len(ids), has_text=bool(text))
        event = self._chunk(text, cause, choice.get("stop_reason"), ids)
        event = self._with_client_ids(event, id_texts, flushed=bool(text) or cause is not None)
        return self._pass(event, has_output=bool(text) or self.output_complete)

    def _count(self, ids: bytes, tokens: int, *, has_text: bool) -> None:
        if tokens:
            self._ids.append(ids)
            self.count += tokens
            if has_text:
                self.flushed_tokens, self.uncertain_tokens = self.count, tokens if tokens > 1 else 0
        elif has_text:
            self.count, self.trackable = self.count + 1, False

    def _set_finish_reason(self, cause: str) -> None:
        if cause == "abort":
            self.error = UpstreamError("aborted", "the engine gave the request up")
        else:
            self.output_complete, self.finish_reason = True, cause

    def _all_ids(self) -> list[int]:
        return [int(token_id) for ids in self._ids for token_id in ids.split(b",")]


# Fields that are null in a complete response of vLLM if there is nothing to report.
_NULL_MESSAGE_FIELDS: dict[str, Any] = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
_NULL_FIELDS: dict[str, Any] = dict.fromkeys(("service_tier", "system_fingerprint"))
_BYTES_PER_ITEM = 50  # memory of a token id, or of a text without its characters


class AssembledResponse(TrackedStream):
    """A tracked stream for a client that does not stream. The client gets one JSON object at the end."""

    def __init__(self, options: ResponseOptions, max_bytes: int, prompt_bytes: int = 0) -> None:
        streamed = ResponseOptions(options.api, stream=True, usage=True, usage_each=False, ids=options.ids)
        super().__init__(streamed, prompt_bytes)
        self._output_splitter = EventSplitter(self._max_event_bytes)
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._fields: dict[str, Any] = {}
        self._choice: dict[str, Any] = {"finish_reason": None, "stop_reason": None}
        self._reasoning: dict[str, list[str]] = {}
        self._size, self._max_bytes = 0, max_bytes

    @property
    def sent(self) -> bool:
        return False

    @property
    def partial_ids_sent(self) -> bool:
        return False

    def start_attempt(self, num_tokens: int) -> bytes:
        text = super().start_attempt(num_tokens)
        self._token_ids = self._all_ids()
        return text

    def feed(self, data: bytes) -> bytes:
        return self._collect(super().feed(data))

    def end(self) -> bytes:
        return self._collect(super().end())

    def end_at_limit(self) -> bytes:
        return self._collect(super().end_at_limit())

    def missing_end(self) -> bytes | None:
        events = super().missing_end()
        return None if events is None else self._collect(events)

    def _collect(self, events: bytes) -> bytes:
        for event in sse.split_events(self._output_splitter.feed(events)) if events else ():
            data = sse.event_data(event)
            if data.strip() == "[DONE]":
                return self._encode()
            if data:
                try:
                    self._add_chunk(sse.parse_object(data))
                except (ValueError, TypeError, AttributeError) as error:
                    self.error = UpstreamError(MALFORMED, f"{error}: {data[:200]}")
                    return b""
        return b""

    def _add_chunk(self, chunk: dict[str, Any]) -> None:  # noqa: C901
        if not self._fields:
            self._fields = {key: chunk[key] for key in ("id", "created", "model") if chunk.get(key) is not None}
        for key in ("usage", "system_fingerprint"):  # the last chunk's value counts
            if chunk.get(key):
                self._fields[key] = chunk[key]
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            self._add_text(self._texts, choice.get("text") or delta.get("content") or "")
            for key in ("reasoning", "reasoning_content"):
                if delta.get(key):
                    self._add_text(self._reasoning.setdefault(key, []), delta[key])
            if delta.get("tool_calls") or delta.get("function_call"):
                self.error = UpstreamError(MALFORMED, "tool calls that were not requested", engine_fault=False)
            self._token_ids += choice.get("token_ids") or ()
            for key in ("finish_reason", "stop_reason"):
                if choice.get(key) is not None:
                    self._choice[key] = choice[key]
        if self._size + _BYTES_PER_ITEM * self.count > self._max_bytes:
            self.error = response_too_long(self._max_bytes, engine_fault=True)

    def _add_text(self, texts: list[str], text: str) -> None:
        texts.append(text)
        self._size += len(text) + _BYTES_PER_ITEM

    def _encode(self) -> bytes:
        text = "".join(self._texts)
        kind, content = "text_completion", dict[str, Any](text=text)
        if self._options.api == CHAT:
            reasoning = {key: "".join(texts) for key, texts in self._reasoning.items()}
            message = {"role": "assistant", "content": text, **_NULL_MESSAGE_FIELDS, **reasoning}
            kind, content = "chat.completion", {"message": message}
        ids = self._token_ids if self._options.ids else None
        choice = {"index": 0, **content, "logprobs": None, **self._choice, "token_ids": ids}
        return msgspec.json.encode({**_NULL_FIELDS, **self._fields, "object": kind, "choices": [choice]})
