"""Interfaces of engines and launchers, and the HTTP client that continues interrupted outputs."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Protocol

from lengthwise.apps.ledger.contracts import Output, Partial
from lengthwise.backend.openai import Client
from lengthwise.backend.openai_protocol import Capabilities, Chunk, RequestError, Server, Usage
from lengthwise.schema.app import ModelPlan, Replica
from lengthwise.schema.errors import EngineError, InputError, LengthwiseError

CHAT, COMPLETIONS = "chat", "completions"
_POLL_INTERVAL_S = 0.05
_VALID_FINISH_REASONS = {"stop", "length", "tool_calls", "content_filter"}


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """The request of a task: the task's number, the API ("chat" or "completions"), and the fields of the body."""

    task: int
    api: str
    body: Mapping[str, Any]


class Fault(Enum):
    """Cause of a failed request, which decides whether and where the request is retried."""

    REQUEST = "request"  # the engine refuses the request, so that a retry would fail, too: the task is dead
    BUSY = "busy"  # the engine is full: retry later; only every ``BUSY_PER_ATTEMPT``-th refusal counts as an attempt
    ANSWER = "answer"  # a bad answer, which counts as an attempt: retry, on another engine if there is one
    ENGINE = "engine"  # unreachable: counts as an attempt only if the engine is alive, or ran no other task


class FailedError(LengthwiseError):
    """A request got no valid answer. ``retry_after_s`` is the wait that the engine requests (Retry-After), or 0."""

    def __init__(self, fault: Fault, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.fault, self.retry_after_s = fault, retry_after_s


@dataclass
class Draft:
    """The output of a request so far, which a later attempt may continue."""

    # Texts of the chunks. After an interruption, the first one is the saved text.
    text: list[str] = field(default_factory=list)
    prompt_ids: tuple[int, ...] = ()  # token ids of the prompt, or () if the engine does not report them
    # token ids of the output, or [] if the engine does not report them
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    retained: int = 0  # number of tokens from before the interruption
    # whether ``output_ids`` give exactly this text, so that the output can be continued from them
    is_exact: bool = True
    # function that returns the number of tokens so far, for an engine that adds ``output_ids`` only when it is
    # interrupted
    token_count: Callable[[], int] | None = None
    # Numbers of leading chunks and of leading tokens that are known to have the same text. None means that all chunks
    # have the text of all tokens.
    fixed_prefix: tuple[int, int] | None = None

    @property
    def tokens(self) -> int:
        """Return the number of tokens so far, or the number of chunks if the engine does not report tokens."""
        known = max(len(self.output_ids), len(self.text))
        return known if self.token_count is None else max(known, self.token_count())

    @classmethod
    def of(cls, partial: Partial | None) -> Draft:
        """Return a draft that continues a saved output, or an empty draft if the saved tokens are unknown."""
        if partial is None or not partial.output_ids:
            return cls()
        ids = list(partial.output_ids)
        return cls([partial.text], partial.prompt_ids, ids, retained=len(ids))

    def reset(self) -> None:
        """Drop the part from before the interruption, because this engine cannot continue it."""
        self.text, self.prompt_ids, self.output_ids, self.retained, self.fixed_prefix = [], (), [], 0, None

    def append(self, chunk: Chunk) -> None:
        """Append a chunk, and advance ``fixed_prefix`` if the chunk has text and a single token.

        Tokens can be ahead of the text: an engine withholds an incomplete character, and a continuation that starts
        within that character would never send it. The text up to a chunk with a single token is complete. Of a chunk
        with several tokens, this is unknown.
        """
        if chunk.prompt_ids and not self.prompt_ids:
            self.prompt_ids = chunk.prompt_ids
        if chunk.text and not chunk.token_ids:
            self.is_exact = False
        self.text.append(chunk.text)
        self.output_ids.extend(chunk.token_ids)
        if chunk.text and len(chunk.token_ids) == 1:
            self.fixed_prefix = (len(self.text), len(self.output_ids))
        self.finish_reason = chunk.finish_reason or self.finish_reason

    def partial(self) -> Partial | None:
        """Return the part of the output to save, or None if the output is finished or cannot be continued."""
        chunks, tokens = self.fixed_prefix or (len(self.text), len(self.output_ids))
        if not tokens or not self.is_exact or self.finish_reason is not None:
            return None
        return Partial("".join(self.text[:chunks]), self.prompt_ids, tuple(self.output_ids[:tokens]))


class Engine(Protocol):
    """A running replica. ``description`` names the engine in messages (if it is simulated, by model and GPUs)."""

    max_num_seqs: int
    description: str

    @property
    def is_alive(self) -> bool:
        """Return whether the engine runs, as far as this is known without a request."""

    async def generate(self, request: TaskRequest, draft: Draft) -> Output:
        """Return the output of a request.

        An interrupted output in ``draft`` is continued, and new chunks are appended to ``draft`` as they arrive.
        Cancelling the call stops the engine's work on the request. Raises FailedError if there is no valid answer.
        """

    async def has_died(self, within_s: float) -> bool:
        """Return whether the engine has died. Wait up to ``within_s`` seconds for its process to end."""


class Launcher(ABC):
    """Starts and stops engines. A cancelled start leaves no engine. With ``is_placed``, engines need free GPUs."""

    is_placed = True

    @abstractmethod
    async def start(self, plan: ModelPlan, gpus: Replica) -> Engine:
        """Start a replica on these GPUs, wait until the replica is ready, and return its engine.

        Raises:
            EngineError: The replica does not become ready. The message has the end of the log.
        """

    @abstractmethod
    async def stop(self, engine: Engine) -> None:
        """End an engine, alive or dead, with all processes, and wait until the GPUs are free."""

    async def sleep(self, engine: Engine) -> bool:  # noqa: ARG002 - of launchers whose engines sleep
        """Put an engine to sleep, which frees the GPUs. If the engine cannot sleep, change nothing and return False."""
        return False

    async def wake(self, engine: Engine) -> None:
        """Make a sleeping engine ready again. Raises EngineError if this fails."""
        raise EngineError(f"{engine.description} was never put to sleep")

    def force_stop(self) -> None:  # noqa: B027 - there may be nothing to kill
        """Kill all engines, also those that start or end now or later, instead of waiting for their end."""

    @abstractmethod
    async def close(self) -> None:
        """End all engines."""


_REASON_FAULTS = {
    **dict.fromkeys(("http 400", "http 413", "http 422"), Fault.REQUEST),
    **dict.fromkeys(("http 429", "http 503"), Fault.BUSY),
    **dict.fromkeys(("refused", "reset", "no connection"), Fault.ENGINE),
}
"""Faults by reason of a ``RequestError``. All other reasons (5xx, a broken stream, a stall) are ``Fault.ANSWER``."""

_ALLOWED_TO_CONTINUE = {
    "temperature", "top_p", "top_k", "min_p", "ignore_eos", "stop_token_ids", "skip_special_tokens",
    "spaces_between_special_tokens", "logit_bias", "allowed_token_ids", "vllm_xargs", "priority", "user",
}  # fmt: skip
"""Fields whose effect on the next token does not depend on which part of the context is prompt or output."""
_REPLACED = {
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens", "add_generation_prompt",
    "continue_final_message", "chat_template", "chat_template_kwargs", "add_special_tokens", "documents",
}  # fmt: skip
"""Fields that a continuation sets itself, or whose effect is in the prompt's tokens already."""
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "repetition_penalty": (1, None),
    "n": (1, None),
    "stop": (None, "", []),
    "logprobs": (None, False),
}


def is_resumable(body: Mapping[str, Any]) -> bool:
    """Return whether an interrupted output can be continued from its tokens with an unchanged distribution.

    It cannot with penalties, which count output tokens; with a stop string, which may begin before the interruption;
    with a grammar, whose state is lost; and with a seed at a temperature above 0, whose generator would start again.
    """
    for name, value in body.items():
        if name == "seed":
            if value is not None and body.get("temperature") != 0:
                return False
        elif name in _NEUTRAL_VALUES:
            if value not in _NEUTRAL_VALUES[name]:
                return False
        elif name not in _ALLOWED_TO_CONTINUE | _REPLACED:
            return False
    return True


class HttpEngine:
    """An engine at a URL. ``alive`` returns whether its process runs; None if the run did not start the engine."""

    def __init__(self, server: Server, max_num_seqs: int, alive: Callable[[], bool] | None = None) -> None:
        self.server, self.max_num_seqs, self.description = server, max_num_seqs, server.shown
        self.capabilities = Capabilities(model=server.model or "")
        self._alive = alive
        self._client = Client(server)

    async def open(self) -> None:
        """Connect and detect the engine's capabilities. Raises EngineError if the engine cannot be used."""
        client = self._client
        await client.__aenter__()
        try:
            found = await client.identify()
            if found.engine == "vllm":  # whose capabilities need no probing
                client.capabilities = replace(found, usage=True, token_ids_each=True, token_id_prompts=True)
                self.capabilities = client.capabilities
            else:
                self.capabilities = await client.probe()
        except (InputError, RequestError) as error:
            await self.close()
            raise EngineError(f"the engine at {self.server.shown} cannot be used: {error}") from error
        except BaseException:
            await self.close()
            raise
        kind = f"{self.capabilities.engine or 'unknown engine'} {self.capabilities.version}".strip()
        self.description = f"{kind} at {self.server.shown}"

    async def close(self) -> None:
        """Close the connections, which fails the running requests."""
        await self._client.__aexit__(None, None, None)

    @property
    def is_alive(self) -> bool:
        """Return whether the engine's process runs. The result is True if the run did not start the engine."""
        return self._alive is None or self._alive()

    async def has_died(self, within_s: float) -> bool:
        """Return whether the process ends in time. Without a process, return whether the engine does not answer."""
        if self._alive is None:
            try:
                await self._client.request("GET", f"{self.server.root}/v1/models")
            except RequestError:
                return True
            return False
        for _ in range(max(1, round(within_s / _POLL_INTERVAL_S))):
            if not self._alive():
                return True
            await asyncio.sleep(_POLL_INTERVAL_S)
        return not self._alive()

    async def post(self, path: str, within_s: float) -> bool:
        """Return whether a POST without a body succeeds within ``within_s`` seconds."""
        try:
            async with asyncio.timeout(within_s):
                status, *_ = await self._client.request("POST", f"{self.server.root}{path}")
        except (RequestError, TimeoutError):
            return False
        return status == 200

    async def generate(self, request: TaskRequest, draft: Draft) -> Output:
        """Return the output, continued from the draft's tokens if possible. Raises FailedError."""
        body = {**self.server.body, **request.body}
        draft.is_exact = is_resumable(body)
        fields, api = self._fields(request.api, body, draft)
        draft.fixed_prefix = (len(draft.text), len(draft.output_ids))
        usage: Usage | None = None
        try:
            # aclosing: a cancelled request must end at the engine too.
            async with aclosing(self._client.stream(fields, usage_each=False, api=api)) as chunks:
                async for chunk in chunks:
                    draft.append(chunk)
                    usage = chunk.usage or usage
        except RequestError as error:
            fault = _REASON_FAULTS.get(error.reason, Fault.ANSWER)
            raise FailedError(fault, str(error), error.retry_after_s or 0.0) from error
        if draft.finish_reason not in _VALID_FINISH_REASONS:
            how = "without a finish reason" if draft.finish_reason is None else f"as {draft.finish_reason!r}"
            raise FailedError(Fault.ANSWER, f"closed early: the answer ended {how}")
        prompt_tokens = usage.prompt_tokens - draft.retained if usage else len(draft.prompt_ids)
        output_tokens = usage.output_tokens + draft.retained if usage else len(draft.output_ids)
        return Output("".join(draft.text), draft.finish_reason, prompt_tokens, output_tokens)

    def _fields(self, api: str, body: Mapping[str, Any], draft: Draft) -> tuple[dict[str, Any], str]:
        """Return the fields and API of a request that continues the draft. If this is impossible, reset the draft."""
        capabilities, had = self.capabilities, len(draft.output_ids)
        limit = int(body.get("max_completion_tokens") or body.get("max_tokens") or 0)  # 0: the request sets none
        has_ids = draft.is_exact and draft.prompt_ids and capabilities.token_id_prompts
        if has_ids and 0 < had < limit:
            fields = {name: value for name, value in body.items() if name in _ALLOWED_TO_CONTINUE | {"seed"}}
            fields |= {"prompt": [*draft.prompt_ids, *draft.output_ids], "max_tokens": limit - had}
            if min_tokens := int(body.get("min_tokens") or 0):
                fields["min_tokens"] = max(0, min_tokens - had)
            api = COMPLETIONS
        else:
            draft.reset()
            fields = dict(body)
        fields |= {"model": capabilities.model, "stream": True}
        if capabilities.usage:
            fields["stream_options"] = {"include_usage": True}
        if capabilities.token_ids_each:
            fields["return_token_ids"] = True
        return fields, api
