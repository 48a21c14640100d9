"""A whole answer made of a stream: for who did not ask for events, but may be cut or moved.

It has the keys of OpenAI's API, null where a stream tells nothing of them, and of vLLM's own ``stop_reason``,
``token_ids`` and ``reasoning``. Others that vLLM adds to an answer that it makes whole are not there:
``prompt_logprobs``, ``prompt_token_ids``, ``prompt_text``, ``routed_experts``, ``kv_transfer_params``,
``ec_transfer_params``, ``metrics``. Nor is ``tool_calls``: vLLM's has it only where tools are called, and who may call
tools is never cut.
"""

from __future__ import annotations

from typing import Any

from lengthwise.backend.openai import CHAT
from lengthwise.gateway.relay._decoded import decoded
from lengthwise.gateway.relay._dress import Wants
from lengthwise.gateway.relay._split import Splitter, data_of, split
from lengthwise.gateway.relay._tracked import Tracked
from lengthwise.gateway.relay._trouble import MALFORMED, Trouble, too_long

_MESSAGE: dict[str, Any] = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
_WHOLE: dict[str, Any] = dict.fromkeys(("service_tier", "system_fingerprint"))
"""Of a message, and of the answer: what a whole answer of vLLM has as null where there is nothing to say."""
_EACH_BYTES = 50
"""What a token id costs, or a text besides its letters."""


class Assembled(Tracked):
    """A tracked stream that comes out at its end, as one object. Nothing is sent before.

    Args:
        wants: What the client asked to see.
        most_bytes: Of text and token ids that are held.
        prompt_bytes: As Tracked.
    """

    def __init__(self, wants: Wants, most_bytes: int, prompt_bytes: int = 0) -> None:
        super().__init__(
            Wants(wants.api, stream=True, usage=True, usage_each=False, ids=wants.ids), prompt_bytes
        )
        self._asked = wants
        self._own = Splitter(self._event_bytes)
        self._texts: list[str] = []
        self._all_ids: list[int] = []
        self._whole: dict[str, Any] = {}
        self._choice: dict[str, Any] = {"finish_reason": None, "stop_reason": None}
        self._delta: dict[str, list[str]] = {}
        self._size, self._most_bytes = 0, most_bytes

    @property
    def sent(self) -> bool:
        """Nothing, until all is there."""
        return False

    @property
    def ids_ahead(self) -> bool:
        """None are told before the end."""
        return False

    def next_leg(self, kept: int) -> bytes:
        """As Tracked; ids that are not kept come again."""
        text = super().next_leg(kept)
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
        if not self._whole:
            keys = ("id", "created", "model")
            self._whole = {key: chunk[key] for key in keys if chunk.get(key) is not None}
        for key in ("usage", "system_fingerprint"):  # told last
            if chunk.get(key):
                self._whole[key] = chunk[key]
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
        if self._asked.api == CHAT:
            more = {key: "".join(texts) for key, texts in self._delta.items()}
            choice["message"] = {"role": "assistant", "content": text, **_MESSAGE, **more}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, **self._choice}
        choice["token_ids"] = self._all_ids if self._asked.ids else None
        kind = "chat.completion" if self._asked.api == CHAT else "text_completion"
        whole = {**_WHOLE, **self._whole, "object": kind, "choices": [choice]}
        return msgspec.json.encode(whole)
