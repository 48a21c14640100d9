"""What the relay asks of its neighbours."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Protocol

from lengthwise.backend.openai import Abilities
from lengthwise.gateway.decisions import WorkerState
from lengthwise.gateway.leading import Leading
from lengthwise.gateway.request import Forecast, Request


class Asked(Protocol):
    """A request as the edge hands it on (``edge.Asked``)."""

    api: str
    body: bytes
    model: str
    stream: bool
    text: str
    prompt_tokens: int
    max_tokens: int | None
    n: int
    tenant: int
    priority: int
    session: str
    leading: Leading
    arrival_s: float
    deadline_s: float
    request_id: str
    headers: list[tuple[str, str]]
    address: str

    def let_go(self, *, text: bool, others_bytes: int) -> None:
        """Forgets its body."""
        ...

    def fields(self) -> dict[str, Any]:
        """The whole body."""
        ...


class Worker(Protocol):
    """An engine (``fleet.Worker``)."""

    @property
    def name(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def abilities(self) -> Abilities: ...
    @property
    def session(self) -> Any: ...


class Fleet(Protocol):
    """The engines (``fleet.Fleet``)."""

    def worker(self, name: str) -> Worker: ...
    def failed(self, name: str, why: str) -> None: ...
    def erred(self, name: str, caller: Hashable | None) -> None: ...
    def began(self, name: str) -> None: ...
    def answered(self, name: str, model: str) -> None: ...
    def rejected(self, name: str, model: str, session: str) -> None: ...
    def suspects(self, name: str, model: str) -> bool: ...
    def judged(self, name: str, model: str, *, wrong: bool) -> None: ...
    def states(self) -> Sequence[WorkerState]: ...


class Forecaster(Protocol):
    """Who predicts lengths (``forecast.Forecaster``).

    ``again`` is told the prompt as long as it is kept: throughout only where ``reads_text`` says so.
    """

    async def first(self, request: Request, text: str | None) -> Forecast: ...
    async def again(self, request: Request, text: str | None, generated_text: str | None) -> Forecast: ...
