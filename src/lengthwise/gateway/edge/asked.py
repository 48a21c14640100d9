"""What a client asks for, checked, and what is answered."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

from lengthwise.gateway.config import Key
from lengthwise.gateway.leading import NOTHING, Leading

CHAT, COMPLETIONS = "chat", "completions"


class Asked(msgspec.Struct, kw_only=True, gc=False):
    """One request for a completion. Its body is as it came; what is read of it was checked.

    Attributes:
        api: CHAT or COMPLETIONS.
        body: JSON, untouched: an object, UTF-8, no field that is acted on stands twice.
        model: The name that was asked for.
        stream: Whether the answer is to come in events.
        text: The prompt as length predictors were trained on it: messages joined by blank lines.
        prompt_tokens: Estimated from the text, or the number of token ids.
        max_tokens: The longest output, where the client set one.
        n: Choices in all: ``n`` (or ``best_of``) for every prompt.
        key: Who asks; None where no keys are configured.
        tenant: Its number in ``keys.Tenants``; 0 is anonymous.
        priority: Class of the key; smaller goes first.
        session: What ties requests together, or "".
        leading: How its prompt begins, where that is compared.
        arrival_s: When the body had come, on the gateway's clock.
        deadline_s: When the client gives up, on the gateway's clock; inf unknown.
        request_id: What the client called it, or a new name.
        headers: What may go on to an engine.
        held_bytes: About what it holds in memory: body, text and fields; less once it has let go of them.
        address: Where it came from (of IPv6 the /64); "" nobody knows.
    """

    api: str
    body: bytes
    model: str
    stream: bool
    text: str
    prompt_tokens: int
    max_tokens: int | None
    n: int
    key: Key | None
    tenant: int
    priority: int
    session: str
    arrival_s: float
    deadline_s: float
    request_id: str
    headers: list[tuple[str, str]]
    held_bytes: int = 0
    leading: Leading = NOTHING
    parsed: dict[str, Any] | None = None
    address: str = ""

    def fields(self) -> dict[str, Any]:
        """The whole body as a dict, parsed when it is first asked for."""
        if self.parsed is None:
            self.parsed = msgspec.json.decode(self.body, type=dict[str, Any])
        return self.parsed

    def let_go(self, *, text: bool, others_bytes: int) -> None:
        """Forgets its body and fields: it is not sent anew.

        Args:
            text: Whether the text goes as well.
            others_bytes: What others hold for it from now on.
        """
        self.body, self.parsed = b"", None
        if text:
            self.text = ""
        self.held_bytes = others_bytes + sys.getsizeof(self.text)


class Outlet(Protocol):
    """Where pieces can go at once: a client's connection."""

    def takes(self) -> bool:
        """Whether a further piece of the answer under way can be written now."""
        ...

    def pass_on(self, piece: bytes) -> None:
        """Writes it; asked only where ``takes`` said so in the same moment."""
        ...


class Answer(Protocol):
    """An answer under way. ``aclose`` is called in any case, once it has ended or the client has gone."""

    @property
    def status(self) -> int:
        """The HTTP status."""
        ...

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]:
        """At least content-type; content-length where it is known."""
        ...

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    def pass_to(self, outlet: Outlet) -> None:
        """Further pieces may go there as they come, past who iterates; what it does not take is iterated over."""
        ...

    async def aclose(self) -> None:
        """Ends it, whatever is still to come."""
        ...


Exchange = Callable[[Asked], Awaitable[Answer]]
"""Has a request answered. It is cancelled when the client goes while it waits; it may raise Fault, or any error
with a ``refusal``."""
