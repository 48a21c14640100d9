"""An engine that is asked over HTTP, whoever started it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from lengthwise.apps.launch._continuing import can_go_on, further_fields, goes_on, whole_fields
from lengthwise.apps.launch._faults import classified
from lengthwise.apps.launch.contracts import Ask, Draft, FailedError, Fault
from lengthwise.apps.ledger.contracts import Output
from lengthwise.backend.openai import Abilities, Client, Piece, RequestError, Server, Usage
from lengthwise.schema.errors import EngineError, InputError

_LOOK_S = 0.05
_ENDS_WELL = {"stop", "length", "tool_calls", "content_filter"}


class HttpEngine:
    """A replica at an address.

    Attributes:
        seats: Requests that it works on at once.
        about: Engine, version and address.
        abilities: What it was found to do.
    """

    def __init__(self, server: Server, seats: int, alive: Callable[[], bool] | None = None) -> None:
        self.server, self.seats, self.about = server, seats, server.shown
        self.abilities = Abilities(model=server.model or "")
        self._alive = alive
        self._client = Client(server)

    async def open(self) -> None:
        """Connects, and finds out what it is and can do; raises EngineError."""
        await self._client.__aenter__()
        try:
            self.abilities = await _able(self._client)
        except (InputError, RequestError) as error:
            await self.close()
            raise EngineError(f"the engine at {self.server.shown} cannot be used: {error}") from error
        except BaseException:
            await self.close()
            raise
        kind = f"{self.abilities.engine or 'unknown engine'} {self.abilities.version}".strip()
        self.about = f"{kind} at {self.server.shown}"

    async def close(self) -> None:
        """Closes its connections; requests under way fail."""
        await self._client.__aexit__(None, None, None)

    @property
    def is_alive(self) -> bool:
        """Whether its process runs; of one that others started nobody knows."""
        return self._alive is None or self._alive()

    async def gone(self, within_s: float) -> bool:
        """Whether its process ends within a while; of one that others started: whether nobody answers."""
        if self._alive is None:
            return not await self._answers()
        for _ in range(max(1, round(within_s / _LOOK_S))):
            if not self._alive():
                return True
            await asyncio.sleep(_LOOK_S)
        return not self._alive()

    async def _answers(self) -> bool:
        try:
            await self._client.fetch("GET", f"{self.server.root}/v1/models")
        except RequestError:
            return False
        return True

    async def post(self, path: str, within_s: float) -> bool:
        """Whether it did what was asked for at a path without a body."""
        try:
            async with asyncio.timeout(within_s):
                status, _ = await self._client.fetch("POST", f"{self.server.root}{path}")
        except (RequestError, TimeoutError):
            return False
        return status == 200

    async def generate(self, ask: Ask, draft: Draft) -> Output:
        """The answer; goes on from the draft's tokens where it can, else begins anew."""
        ask = replace(ask, body={**self.server.body, **ask.body})
        draft.is_exact = can_go_on(ask.body)
        if goes_on(ask, draft, self.abilities):
            fields, api = further_fields(ask, draft, self.abilities)
        else:
            draft.begin_anew()
            fields, api = whole_fields(ask, self.abilities)
        draft.sure = (len(draft.text), len(draft.output_ids))
        try:
            usage = await self._stream(fields, api, draft)
        except RequestError as error:
            raise classified(error) from error
        return _output(draft, usage)

    async def _stream(self, fields: dict[str, Any], api: str, draft: Draft) -> Usage | None:
        usage = None
        # Closed on the way out, a cancelled request is ended at the engine too.
        async with aclosing(self._client.stream(fields, usage_each=False, api=api)) as pieces:
            async for piece in pieces:
                _take(draft, piece)
                usage = piece.usage or usage
        return usage


def _take(draft: Draft, piece: Piece) -> None:
    """Adds a piece.

    Tokens can be ahead of text: an engine holds half a character back, and one that went on from there would never send
    the half. One token that came with text has completed all before it; of several with one text nobody knows.
    """
    if piece.prompt_ids and not draft.prompt_ids:
        draft.prompt_ids = piece.prompt_ids
    if piece.text and not piece.token_ids:
        draft.is_exact = False
    draft.text.append(piece.text)
    draft.output_ids.extend(piece.token_ids)
    if piece.text and len(piece.token_ids) == 1:
        draft.sure = (len(draft.text), len(draft.output_ids))
    draft.finish_reason = piece.finish_reason or draft.finish_reason


def _output(draft: Draft, usage: Usage | None) -> Output:
    """The whole answer; raises FailedError where it did not end as answers do."""
    if draft.finish_reason not in _ENDS_WELL:
        told = "without a finish reason" if draft.finish_reason is None else f"as {draft.finish_reason!r}"
        raise FailedError(Fault.ANSWER, f"closed early: the answer ended {told}")
    prompt_tokens = usage.prompt_tokens - draft.kept if usage else len(draft.prompt_ids)
    output_tokens = usage.output_tokens + draft.kept if usage else len(draft.output_ids)
    return Output("".join(draft.text), draft.finish_reason, prompt_tokens, output_tokens)


async def _able(client: Client) -> Abilities:
    """What the server can do: of vLLM it is known once it tells who it is, all others are tried."""
    told = await client.identify()
    if told.engine == "vllm":
        client.abilities = replace(told, usage=True, ids_each=True, token_ids=True)
        return client.abilities
    return await client.probe()
