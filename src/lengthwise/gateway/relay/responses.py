"""An answer whose token ids are known: it can go on elsewhere without a gap or a repeat."""

from __future__ import annotations

from typing import Any

from lengthwise.backend.openai_protocol import CHAT
from lengthwise.gateway.relay import sse
from lengthwise.gateway.relay.failures import MALFORMED, TOLD_INSIDE, Trouble, too_long
from lengthwise.gateway.relay.sse import (
    DONE,
    MAX_BYTES,
    Alike,
    Dress,
    Splitter,
    TooLong,
    Wants,
    adds_output,
    data_of,
    decoded,
    looks_whole,
    split,
    usage_of,
)

HELD_BYTES = 1 << 16


class Reserved:
    """Keeps back what says nothing yet (a role), so that an engine that fails before it speaks costs nothing.

    Comments, which keep a connection alive, pass.
    """

    __slots__ = ("_parts", "_size", "open")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self.open = False

    def pass_on(self, events: bytes, *, speaks: bool) -> bytes:
        """What may go to the client now."""
        if self.open:
            return events
        if not speaks and self._size + len(events) <= HELD_BYTES:
            if not self._parts and not sse.EVENT.search(events):
                return events
            self._parts.append(events)
            self._size += len(events)
            return b""
        self.open = True
        return b"".join([*self._parts, events])

    def rest(self) -> bytes:
        """What was kept back."""
        rest, self._parts, self.open = b"".join(self._parts), [], True
        return rest


class Plain:
    """A stream of which not a byte is changed; its tokens are counted by usage where told, else by events.

    Attributes:
        count: Tokens so far.
        cause: The finish reason.
        complete: Whether all choices have ended.
        finished: Whether the stream said that it is at its end.
        trouble: What the engine told inside the stream.
        told: Whether the client has been told by the engine itself.

    Args:
        choices: How many there are.
    """

    resumable = False

    def __init__(self, choices: int = 1) -> None:
        self.count = 0
        self.cause = ""
        self.complete = self.finished = self.report = False
        self.trouble: Trouble | None = None
        self._splitter, self._reserved, self._matching = Splitter(), Reserved(), Alike()
        self._raw = False
        self._running = choices

    @property
    def sent(self) -> bool:
        """Whether the client has got something that cannot be taken back."""
        return self._reserved.open

    def feed(self, data: bytes) -> bytes:
        """What goes to the client."""
        words = 1 if self._matching.fits(data) else self._matching.fitting(data)
        if words and not self._splitter.retained:
            self.count += words
            return data
        if self._raw:
            return data
        try:
            whole = self._splitter.feed(data)
        except TooLong:
            self._raw = True
            self._matching.discard()
            return self._reserved.rest() + self._splitter.rest()
        return self._report(whole, whole) if whole else b""

    def end(self) -> bytes:
        """What is left when the engine has closed; sets ``trouble`` where it was not at its end."""
        rest = self._splitter.rest()
        if self._raw:  # nobody looked for its end; the connection's is all there is
            self.complete = self.finished = True
            return rest
        out = self._report(rest, rest + b"\n\n") if rest else rest
        if not self.complete:
            self.trouble = self.trouble or Trouble("closed early", "the stream ended without its end")
            return b""
        return self._reserved.rest() + out if not self._reserved.open else out

    def _report(self, events: bytes, scanned: bytes) -> bytes:
        words = len(sse.TEXT.findall(scanned))
        self.count += words
        counted = b'"completion_tokens"' in scanned
        if counted and (told := sse.USAGE.findall(scanned)):
            self.count = int(told[-1])
        ends = sse.FINISH.findall(scanned)
        if ends:
            self._running -= len(ends)
            self.cause = ends[-1].decode()
        self.finished = self.finished or sse.at_end(scanned)
        self.complete = self.finished or self._running <= 0
        if b"error" in scanned and sse.ERROR.search(scanned):
            self.trouble = Trouble(TOLD_INSIDE, scanned[:300].decode("utf-8", "replace"))
            if not self.sent:
                return b""
            self.report = True
        out = self._reserved.pass_on(events, speaks=bool(words) or self.complete)
        if words == 1 and not (counted or ends or self.finished or self.trouble):
            self._matching.learn(events, sse.TEXT)
        return out


class BufferedResponse:
    """An answer that comes at once, unchanged.

    Args:
        max_bytes: Longest one that is held.
        short: Whether a longer one can only be the engine's fault.
    """

    resumable = sent = False

    def __init__(self, max_bytes: int, *, short: bool = True) -> None:
        self.count = 0
        self.cause = ""
        self.complete = self.finished = False
        self.trouble: Trouble | None = None
        self._parts: list[bytes] = []
        self._size, self._most_bytes, self._short = 0, max_bytes, short

    def feed(self, data: bytes) -> bytes:
        """Nothing yet; sets ``trouble`` where it is too long."""
        self._parts.append(data)
        self._size += len(data)
        if self._size > self._most_bytes:
            self._parts.clear()
            self.trouble = too_long(self._most_bytes, engine=self._short)
        return b""

    def end(self) -> bytes:
        """All of it."""
        body = b"".join(self._parts)
        told = sse.found(sse.USAGE, b'"usage"', body)
        self.count = int(told[1]) if told else 1
        end = sse.found(sse.FINISH, b'"finish_reason"', body)
        self.cause = end[1].decode() if end else ""
        self.complete = self.finished = True
        return body


ID_BYTES = 12
"""What an id may take in an event; a prompt has no more tokens than bytes."""


class Tracked:
    """A stream over one or several runs ("legs").

    In the first leg bytes pass, less the token ids if the client did not ask for them. In further legs the
    engine continues by ``/v1/completions`` from token ids, and its chunks are dressed as the first leg's.

    Tokens can be ahead of text (half a character is held back by the engine), and an engine that goes on from
    there would not send the half, so that a leg always begins behind the last token whose text is out. The ids of
    such tokens are told with the text that they complete: who was told them before would get them twice, or others.

    Args:
        wants: What the client asked to see.
        prompt_bytes: Of the prompt, whose ids each leg is told in one event.

    Attributes:
        count: Tokens so far.
        cause: The finish reason.
        complete: Whether the output has ended.
        finished: Whether the client was told so.
        resumable: Whether it can still go on elsewhere.
        trouble: What the engine told inside the stream.
        unsure: Tokens of the chunk that spoke last, where it had several: the last of them may be ahead of it.
    """

    def __init__(self, wants: Wants, prompt_bytes: int = 0) -> None:
        self.count = self.unsure = 0
        self.cause = ""
        self.complete = self.finished = False
        self.resumable = True
        self.trouble: Trouble | None = None
        self._wants = wants
        self._event_bytes = MAX_BYTES + ID_BYTES * prompt_bytes
        self._splitter, self._reserved, self._matching = Splitter(self._event_bytes), Reserved(), Alike()
        self._ids: list[bytes] = []
        self._untold: list[bytes] = []
        self.prompt_ids = b""
        self._first = b""
        self._dress: Dress | None = None
        self._out_at, self._told_usage = 0, False

    @property
    def sent(self) -> bool:
        """Whether the client has got something that cannot be taken back."""
        return self._reserved.open

    @property
    def level(self) -> bool:
        """Whether the text of all tokens is out, for certain: the best moment for a cut."""
        return self._out_at == self.count and not self.unsure

    @property
    def retained(self) -> int:
        """Tokens whose text is out: where a further leg begins."""
        return self._out_at

    @property
    def ids_ahead(self) -> bool:
        """Whether the client may have been told ids whose text is not out: they would come again behind a cut."""
        return self._wants.ids and self.unsure > 0

    @property
    def memory_bytes(self) -> int:
        """About what is kept of its prompt, so that it can go on elsewhere."""
        return len(self.prompt_ids) + len(self._first)

    def tail(self, tokens: int) -> list[int]:
        """The last token ids of those that are kept."""
        return self._list()[max(0, self._out_at - tokens) : self._out_at]

    def next_leg(self, retained: int) -> bytes:
        """Begins a further leg behind so many tokens; returns their ids as they stand in JSON."""
        ids = self._list()[:retained]
        text = sse.entries(ids)
        self._ids, self.count, self._out_at, self.unsure = [text] if ids else [], retained, retained, 0
        self.trouble = None
        self._splitter, self._untold = Splitter(self._event_bytes + ID_BYTES * retained), []
        self._matching.discard()
        self._told_usage = False
        if self._dress is None:
            self._dress = self._new_dress()
        return text

    def feed(self, data: bytes) -> bytes:
        """What goes to the client."""
        if self._matching.fits(data) and not self._splitter.retained:
            return self._as_usual(data)
        try:
            whole = self._splitter.feed(data)
        except TooLong:
            self.trouble = Trouble(MALFORMED, "an event is too long")
            return b""
        return self._events(whole) if whole else b""

    def end(self) -> bytes:
        """What is left when the engine has closed; sets ``trouble`` where it was not at its end."""
        rest = self._splitter.rest()
        out = self._events(rest + b"\n\n") if rest else b""
        if self.complete:
            self.trouble = None  # nothing is missing, whatever the engine began to say behind the end
            return out + self.closing()
        if self.trouble is None or self.trouble.reason == MALFORMED:  # half an event
            self.trouble = Trouble("closed early", "the stream ended without its end")
        return out

    def closing(self) -> bytes:
        """What the client still has to be told once the output has ended, however its last leg did."""
        if self.finished:
            return b""
        self.finished = True
        out = b""
        if self._wants.usage and self.prompt_ids and not self._told_usage:
            self._dress = self._dress or self._new_dress()
            out = self._dress.usage(usage_of(self.prompt_ids, self.count))
        return self._reserved.pass_on(out + DONE, speaks=True)

    def closed(self) -> bytes:
        """The same, for who reads it from outside."""
        return self.closing()

    def at_limit(self) -> bytes:
        """The end of an output that has all the tokens it may have, where nobody told that it ended."""
        self.complete, self.cause = True, "length"
        dress = self._dress = self._dress or self._new_dress()
        usage = usage_of(self.prompt_ids, self.count)
        chunk = self._report(dress.chunk("", "length", None, [], usage), [], complete=True)
        return self._reserved.pass_on(chunk, speaks=True) + self.closing()

    def _as_usual(self, event: bytes) -> bytes:
        """What goes to the client of an event that has text and ids, and nothing else."""
        ids = self._matching.ids
        tokens = ids.count(b",") + 1
        self._ids.append(ids)
        self.count = self._out_at = self.count + tokens
        self.unsure = tokens if tokens > 1 else 0
        return self._report(event, [ids], complete=True) if self._wants.ids else self._matching.without_ids(event)

    def _report(self, event: bytes, ids: list[bytes], *, complete: bool) -> bytes:
        """What the client is told of ids: all that are behind text that is out, none that are ahead of it."""
        if not self._wants.ids or (complete and not self._untold):
            return event
        if complete:
            before, self._untold = b",".join(self._untold), []
            return sse.with_ids(event, before)
        self._untold += ids
        return sse.TOLD_IDS.sub(rb"\1[]", event) if ids else event

    def _events(self, complete: bytes) -> bytes:
        read = self._read_first if self._dress is None else self._read_later
        out = []
        for event in split(complete):
            if self._matching.fits(event):
                out.append(self._as_usual(event))
                continue
            out.append(read(event))
            if self.trouble is not None:
                break
        return b"".join(out)

    def _read_first(self, event: bytes) -> bytes:
        found, end = sse.IDS.search(event), sse.FINISH.search(event)
        tokens = sse.many(found[1]) if found is not None else 0
        speaks = sse.CONTENT.search(event) is not None
        other = sse.OTHER.search(event) is not None
        shown = event if self._wants.ids else sse.without_ids(event)
        if b"error" in event and sse.ERROR.search(event):
            self.trouble = Trouble(TOLD_INSIDE, event[:300].decode("utf-8", "replace"))
        elif not (tokens and looks_whole(event)):
            speaks = (self._adds(shown) and not tokens) or speaks
        if end is not None and self.trouble is None:
            self._finished(end[1].decode())
        if self.trouble is not None:
            return b""
        if found is not None and tokens:
            self._count(found[1], tokens, speaks=speaks)
        elif speaks:
            self.count += 1
            self.resumable = False
        if not (self._first and self.prompt_ids):
            self._look_at_first(event, shown, speaks=speaks)
        if other:
            self.resumable, speaks = False, True
        if found is None and self._is_end(event):
            return self.closing()
        shown = self._report(shown, [found[1]] if found and tokens else [], complete=speaks or end is not None)
        out = self._reserved.pass_on(shown, speaks=speaks or self.complete)
        self._learn(event, usual=speaks and found is not None and end is None and not other)
        return out

    def _adds(self, event: bytes) -> bool:
        """Whether an event adds to the output although the scan saw no tokens; trouble where it is no JSON.

        A token may have been in it, and whoever goes on would leave it out. Where nobody can go on, or the end
        was told, it passes as it is.
        """
        if not self.resumable or self.finished:
            return False
        try:
            return adds_output(event)
        except ValueError as error:
            self.trouble = Trouble(MALFORMED, f"{error}: {event[:200].decode('utf-8', 'replace')}")
            return False

    def _learn(self, event: bytes, *, usual: bool) -> None:
        if usual and self.prompt_ids:
            self._matching.learn(event, sse.CONTENT, ids=True)

    def _look_at_first(self, event: bytes, shown: bytes, *, speaks: bool) -> None:
        if not self._first and shown.startswith(b"data:"):
            self._first = sse.without_ids(shown)
        if self.prompt_ids:
            return
        told = sse.PROMPT_IDS.search(event)
        if told is not None:
            self.prompt_ids = told[1]
        elif speaks:
            self.resumable = False

    def _is_end(self, event: bytes) -> bool:
        if b'"completion_tokens"' in event and self._sums_up(event):
            self._told_usage = True
        return sse.at_end(event)

    def _sums_up(self, event: bytes) -> bool:
        """Whether an event's usage is that of the whole answer; where each chunk tells it, that has no choices."""
        return self.complete and (not self._wants.usage_each or sse.NO_CHOICES.search(event) is not None)

    def _read_later(self, event: bytes) -> bytes:
        data = data_of(event)
        if not data:
            return event
        if data.strip() == "[DONE]":
            return self.closing() if self.complete else b""
        try:
            chunk = decoded(data)
            choices = chunk.get("choices") or []
            if "error" in chunk:
                self.trouble = Trouble(TOLD_INSIDE, data[:300])
                return b""
            return self._dressed(choices[0]) if choices else b""
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            self.trouble = Trouble(MALFORMED, f"{error}: {data[:200]}")
            return b""

    def _dressed(self, choice: dict[str, Any]) -> bytes:
        text, finish = choice.get("text") or "", choice.get("finish_reason")
        ids = choice.get("token_ids") or []
        if finish is not None:
            self._finished(str(finish))
        if self.trouble is not None or self._dress is None:
            return b""
        told = [sse.entries(ids)] if ids else []
        if ids:
            self._count(told[0], len(ids), speaks=bool(text))
        elif text:
            self.count += 1
            self.resumable = False
        usage = usage_of(self.prompt_ids, self.count) if self._wants.usage_each else {}
        event = self._dress.chunk(text, finish, choice.get("stop_reason"), ids, usage)
        event = self._report(event, told, complete=bool(text) or finish is not None)
        return self._reserved.pass_on(event, speaks=bool(text) or self.complete)

    def _count(self, ids: bytes, tokens: int, *, speaks: bool) -> None:
        self._ids.append(ids)
        self.count += tokens
        if speaks:
            self._out_at, self.unsure = self.count, tokens if tokens > 1 else 0

    def _finished(self, cause: str) -> None:
        if cause == "abort":
            self.trouble = Trouble("aborted", "the engine gave the request up")
        else:
            self.complete, self.cause = True, cause

    def _new_dress(self) -> Dress:
        try:
            return Dress(self._wants, decoded(data_of(self._first)))
        except ValueError:
            return Dress(self._wants, {})

    def _list(self) -> list[int]:
        return [int(one) for ids in self._ids for one in ids.split(b",")]


_MESSAGE: dict[str, Any] = dict.fromkeys(("rejection", "annotations", "audio", "function_call", "reasoning"))
_INTEGERS: dict[str, Any] = dict.fromkeys(("service_tier", "system_fingerprint"))
"""Of a message, and of the answer: what a whole answer of vLLM has as null where there is nothing to say."""
_EACH_BYTES = 50
"""What a token id costs, or a text besides its letters."""


class Assembled(Tracked):
    """A tracked stream that comes out at its end, as one object. Nothing is sent before.

    Args:
        wants: What the client asked to see.
        max_bytes: Of text and token ids that are held.
        prompt_bytes: As Tracked.
    """

    def __init__(self, wants: Wants, max_bytes: int, prompt_bytes: int = 0) -> None:
        super().__init__(Wants(wants.api, stream=True, usage=True, usage_each=False, ids=wants.ids), prompt_bytes)
        self._client_request = wants
        self._own = Splitter(self._event_bytes)
        self._texts: list[str] = []
        self._all_ids: list[int] = []
        self._complete: dict[str, Any] = {}
        self._choice: dict[str, Any] = {"finish_reason": None, "stop_reason": None}
        self._delta: dict[str, list[str]] = {}
        self._size, self._most_bytes = 0, max_bytes

    @property
    def sent(self) -> bool:
        """Nothing, until all is there."""
        return False

    @property
    def ids_ahead(self) -> bool:
        """None are told before the end."""
        return False

    def next_leg(self, retained: int) -> bytes:
        """As Tracked; ids that are not kept come again."""
        text = super().next_leg(retained)
        self._all_ids = self._list()
        return text

    def feed(self, data: bytes) -> bytes:
        """Nothing, until the stream has ended."""
        return self._taken(super().feed(data))

    def end(self) -> bytes:
        """What is left when the engine has closed."""
        return self._taken(super().end())

    def at_limit(self) -> bytes:
        """As Tracked."""
        return self._taken(super().at_limit())

    def closed(self) -> bytes:
        """The answer, of an output that has ended although its stream did not."""
        return self._taken(super().closed())

    def _taken(self, events: bytes) -> bytes:
        for event in split(self._own.feed(events)) if events else ():
            data = data_of(event)
            if data.strip() == "[DONE]":
                return self._answer()
            if data:
                try:
                    self._take(decoded(data))
                except (ValueError, TypeError, AttributeError) as error:
                    self.trouble = Trouble(MALFORMED, f"{error}: {data[:200]}")
                    return b""
        return b""

    def _take(self, chunk: dict[str, Any]) -> None:
        if not self._complete:
            keys = ("id", "created", "model")
            self._complete = {key: chunk[key] for key in keys if chunk.get(key) is not None}
        for key in ("usage", "system_fingerprint"):  # told last
            if chunk.get(key):
                self._complete[key] = chunk[key]
        for choice in chunk.get("choices") or ():
            self._take_choice(choice)
        if self._size + _EACH_BYTES * self.count > self._most_bytes:
            self.trouble = too_long(self._most_bytes, engine=True)

    def _take_choice(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or {}
        self._add(self._texts, choice.get("text") or delta.get("content") or "")
        for key in ("reasoning", "reasoning_content"):
            if delta.get(key):
                self._add(self._delta.setdefault(key, []), delta[key])
        if delta.get("tool_calls") or delta.get("function_call"):
            self.trouble = Trouble(MALFORMED, "tool calls that nobody asked for", engine=False)
        self._all_ids += choice.get("token_ids") or ()
        for key in ("finish_reason", "stop_reason"):
            if choice.get(key) is not None:
                self._choice[key] = choice[key]

    def _add(self, texts: list[str], text: str) -> None:
        texts.append(text)
        self._size += len(text) + _EACH_BYTES

    def _answer(self) -> bytes:
        import msgspec

        text = "".join(self._texts)
        choice: dict[str, Any] = {"index": 0}
        if self._client_request.api == CHAT:
            more = {key: "".join(texts) for key, texts in self._delta.items()}
            choice["message"] = {"role": "assistant", "content": text, **_MESSAGE, **more}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, **self._choice}
        choice["token_ids"] = self._all_ids if self._client_request.ids else None
        kind = "chat.completion" if self._client_request.api == CHAT else "text_completion"
        whole = {**_INTEGERS, **self._complete, "object": kind, "choices": [choice]}
        return msgspec.json.encode(whole)
