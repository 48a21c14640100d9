"""What the coordinator knows of engines: how one comes to be, is asked, and fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol

from lengthwise.apps.ledger.contracts import Output, Partial
from lengthwise.backend.openai import Client
from lengthwise.backend.openai_protocol import Abilities, Piece, RequestError, Server, Usage
from lengthwise.schema.app import ModelPlan, Replica
from lengthwise.schema.errors import EngineError, InputError, LengthwiseError

CHAT, COMPLETIONS = "chat", "completions"


@dataclass(frozen=True, slots=True)
class Ask:
    """What an engine is asked.

    Attributes:
        task: Whose it is, by the application's number.
        api: "chat" or "completions".
        body: Fields of the request, as OpenAI's API has them.
    """

    task: int
    api: str
    body: Mapping[str, Any]


class Fault(Enum):
    """Whose fault a failure was, which decides what comes next."""

    REQUEST = "request"
    """Asked again it would fail again: the task is dead."""
    BUSY = "busy"
    """The engine has no room just now: asked again later, and no attempt."""
    ANSWER = "answer"
    """An answer that is no good: an attempt, tried elsewhere where there is an elsewhere."""
    ENGINE = "engine"
    """The engine is not there: no attempt of the task."""


class FailedError(LengthwiseError):
    """A request that an engine did not answer.

    Attributes:
        fault: Whose it was.
        retry_after_s: When the engine wants to be asked again, from now on; 0: it did not say.
    """

    def __init__(self, fault: Fault, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.fault, self.retry_after_s = fault, retry_after_s


@dataclass
class Draft:
    """An answer while it grows; what it held before it was cut stands at its beginning.

    Attributes:
        text: So far, in pieces.
        prompt_ids: The prompt as the engine's tokens; none where it does not tell.
        output_ids: The answer's tokens so far; none where the engine does not tell.
        finish_reason: Where it is over.
        retained: How many tokens came from before.
        is_exact: Whether the text is that of the tokens, so that it may go on from them.
        stats: Says how many tokens there are, of an engine that writes them down only when it is cut.
        fixed_prefix: (pieces of text, tokens) up to which the text is known to be that of the tokens; None: as far as they go.
    """

    text: list[str] = field(default_factory=list)
    prompt_ids: tuple[int, ...] = ()
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    retained: int = 0
    is_exact: bool = True
    stats: Callable[[], int] | None = None
    fixed_prefix: tuple[int, int] | None = None

    @property
    def tokens(self) -> int:
        """Tokens so far, as far as they can be told: pieces of text where the engine does not name tokens."""
        known = max(len(self.output_ids), len(self.text))
        return known if self.stats is None else max(known, self.stats())

    @classmethod
    def of(cls, partial: Partial | None) -> Draft:
        """Goes on from what was saved; begins anew where the tokens are not known."""
        if partial is None or not partial.output_ids:
            return cls()
        ids = list(partial.output_ids)
        return cls([partial.text], partial.prompt_ids, ids, retained=len(ids))

    def begin_anew(self) -> None:
        """Forgets what came before: this engine cannot go on from it."""
        self.text, self.prompt_ids, self.output_ids, self.retained, self.fixed_prefix = [], (), [], 0, None

    def partial(self) -> Partial | None:
        """What to keep of it; None where nothing could, or must, go on from it: behind its end there is nothing."""
        pieces, tokens = self.fixed_prefix or (len(self.text), len(self.output_ids))
        if not tokens or not self.is_exact or self.finish_reason is not None:
            return None
        return Partial("".join(self.text[:pieces]), self.prompt_ids, tuple(self.output_ids[:tokens]))


class Engine(Protocol):
    """One replica that runs.

    Attributes:
        max_num_seqs: Requests that it works on at once.
        description: What it is, in a few words: engine and version, address.
    """

    max_num_seqs: int
    description: str

    @property
    def is_alive(self) -> bool:
        """Whether it still runs, as far as is known without asking it."""
        ...

    async def generate(self, request: Ask, draft: Draft) -> Output:
        """The answer; ``draft`` grows on the way, and goes on from what it holds. Cancelled: the engine stops.

        Raises:
            FailedError: There is none.
        """
        ...

    async def stopped(self, within_s: float) -> bool:
        """Whether it has died, waiting so long for that to show."""
        ...


class Launcher(Protocol):
    """Makes engines be there. Starts may be cancelled; what they began is then undone.

    Attributes:
        is_placed: Whether engines take up GPUs of the cluster.
    """

    is_placed: bool

    async def start(self, plan: ModelPlan, gpus: Replica) -> Engine:
        """A replica of a plan on these GPUs, ready to be asked.

        Raises:
            EngineError: It did not start; the message holds what it said last.
        """
        ...

    async def stop(self, engine: Engine) -> None:
        """Ends it, alive or dead, with all that it started."""
        ...

    async def sleep(self, engine: Engine) -> bool:
        """Takes it off its GPUs, to be woken; False: it cannot, and was left as it is."""
        ...

    async def wake(self, engine: Engine) -> None:
        """Makes one that sleeps ready again.

        Raises:
            EngineError: It did not wake.
        """
        ...

    def hurry(self) -> None:
        """From now on engines are ended at once rather than asked to."""
        ...

    async def close(self) -> None:
        """Ends all that is left."""
        ...


_REFUSED = {"http 400", "http 413", "http 422"}
_BUSY = {"http 429", "http 503"}
_UNREACHED = {"refused", "reset", "no connection"}


def classified(error: RequestError) -> FailedError:
    """The failure with whose fault it was.

    A prompt that is too long, or a field that the engine does not take, is the request's. An engine that is full says
    so by 429 or 503. What cannot be reached, or resets the connection, may be dead. All else (5xx, an error in the
    stream, garbage, a stream that ends early or stands still) may go well the next time.
    """
    if error.reason in _REFUSED:
        fault = Fault.REQUEST
    elif error.reason in _BUSY:
        fault = Fault.BUSY
    else:
        fault = Fault.ENGINE if error.reason in _UNREACHED else Fault.ANSWER
    return FailedError(fault, str(error), error.retry_after_s or 0.0)


_OF_THE_NEXT_TOKEN = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "ignore_eos", "stop_token_ids", "skip_special_tokens",
        "spaces_between_special_tokens", "logit_bias", "allowed_token_ids", "vllm_xargs", "priority", "user",
    }
)  # fmt: skip
"""What holds of the next token alone, whatever was prompt and what output."""
_TOLD_ANEW = frozenset({"model", "prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens"})
_OF_THE_PROMPT = frozenset(
    {
        "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs",
        "add_special_tokens", "documents",
    }
)  # fmt: skip
"""What is in the prompt's tokens already."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "repetition_penalty": (1, None),
    "n": (1, None),
    "stop": (None, "", []),
    "logprobs": (None, False),
}


def can_go_on(body: Mapping[str, Any]) -> bool:
    """Whether an answer that was cut may go on from its tokens without being another one.

    Penalties count what was output, a stop string may begin before the cut, a grammar's state is lost, and a seeded
    generator would begin anew: such answers start again.
    """
    for name, value in body.items():
        if name == "seed":
            if value is not None and body.get("temperature") != 0:
                return False
        elif name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                return False
        elif name not in _OF_THE_NEXT_TOKEN | _TOLD_ANEW | _OF_THE_PROMPT:
            return False
    return True


def max_tokens(body: Mapping[str, Any]) -> int | None:
    """The longest output that is asked for."""
    told = body.get("max_completion_tokens") or body.get("max_tokens")
    return None if told is None else int(told)


def goes_on(request: Ask, draft: Draft, capabilities: Abilities) -> bool:
    """Whether this engine can be asked to go on from what the draft holds."""
    most = max_tokens(request.body)
    known = bool(draft.prompt_ids) and capabilities.token_ids and most is not None
    return known and 0 < len(draft.output_ids) < (most or 0) and can_go_on(request.body)


def whole_fields(request: Ask, capabilities: Abilities) -> tuple[dict[str, Any], str]:
    """What is sent for an answer from its beginning, and by which door."""
    return {**request.body, **_report(capabilities)}, request.api


def further_fields(request: Ask, draft: Draft, capabilities: Abilities) -> tuple[dict[str, Any], str]:
    """What is sent for the rest of an answer: the tokens so far are the prompt."""
    body = {name: value for name, value in request.body.items() if name in _OF_THE_NEXT_TOKEN | {"seed"}}
    had = len(draft.output_ids)
    body["prompt"] = [*draft.prompt_ids, *draft.output_ids]
    body["max_tokens"] = (max_tokens(request.body) or 0) - had
    if least := int(request.body.get("min_tokens") or 0):
        body["min_tokens"] = max(0, least - had)
    return {**body, **_report(capabilities)}, COMPLETIONS


def _report(capabilities: Abilities) -> dict[str, Any]:
    told: dict[str, Any] = {"model": capabilities.model, "stream": True}
    if capabilities.usage:
        told["stream_options"] = {"include_usage": True}
    if capabilities.ids_each:
        told["return_token_ids"] = True
    return told


_POLL_INTERVAL_S = 0.05
_ENDS_WELL = {"stop", "length", "tool_calls", "content_filter"}


class HttpEngine:
    """A replica at an address.

    Attributes:
        max_num_seqs: Requests that it works on at once.
        description: Engine, version and address.
        capabilities: What it was found to do.
    """

    def __init__(self, server: Server, max_num_seqs: int, alive: Callable[[], bool] | None = None) -> None:
        self.server, self.max_num_seqs, self.description = server, max_num_seqs, server.shown
        self.capabilities = Abilities(model=server.model or "")
        self._alive = alive
        self._client = Client(server)

    async def open(self) -> None:
        """Connects, and finds out what it is and can do; raises EngineError."""
        await self._client.__aenter__()
        try:
            self.capabilities = await _able(self._client)
        except (InputError, RequestError) as error:
            await self.close()
            raise EngineError(f"the engine at {self.server.shown} cannot be used: {error}") from error
        except BaseException:
            await self.close()
            raise
        kind = f"{self.capabilities.engine or 'unknown engine'} {self.capabilities.version}".strip()
        self.description = f"{kind} at {self.server.shown}"

    async def close(self) -> None:
        """Closes its connections; requests under way fail."""
        await self._client.__aexit__(None, None, None)

    @property
    def is_alive(self) -> bool:
        """Whether its process runs; of one that others started nobody knows."""
        return self._alive is None or self._alive()

    async def stopped(self, within_s: float) -> bool:
        """Whether its process ends within a while; of one that others started: whether nobody answers."""
        if self._alive is None:
            return not await self._answers()
        for _ in range(max(1, round(within_s / _POLL_INTERVAL_S))):
            if not self._alive():
                return True
            await asyncio.sleep(_POLL_INTERVAL_S)
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

    async def generate(self, request: Ask, draft: Draft) -> Output:
        """The answer; goes on from the draft's tokens where it can, else begins anew."""
        request = replace(request, body={**self.server.body, **request.body})
        draft.is_exact = can_go_on(request.body)
        if goes_on(request, draft, self.capabilities):
            fields, api = further_fields(request, draft, self.capabilities)
        else:
            draft.begin_anew()
            fields, api = whole_fields(request, self.capabilities)
        draft.fixed_prefix = (len(draft.text), len(draft.output_ids))
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
        draft.fixed_prefix = (len(draft.text), len(draft.output_ids))
    draft.finish_reason = piece.finish_reason or draft.finish_reason


def _output(draft: Draft, usage: Usage | None) -> Output:
    """The whole answer; raises FailedError where it did not end as answers do."""
    if draft.finish_reason not in _ENDS_WELL:
        told = "without a finish reason" if draft.finish_reason is None else f"as {draft.finish_reason!r}"
        raise FailedError(Fault.ANSWER, f"closed early: the answer ended {told}")
    prompt_tokens = usage.prompt_tokens - draft.retained if usage else len(draft.prompt_ids)
    output_tokens = usage.output_tokens + draft.retained if usage else len(draft.output_ids)
    return Output("".join(draft.text), draft.finish_reason, prompt_tokens, output_tokens)


async def _able(client: Client) -> Abilities:
    """What the server can do: of vLLM it is known once it tells who it is, all others are tried."""
    told = await client.identify()
    if told.engine == "vllm":
        client.capabilities = replace(told, usage=True, ids_each=True, token_ids=True)
        return client.capabilities
    return await client.probe()
