"""Where an OpenAI-compatible server is, what it can do, and what it answers: plain records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from lengthwise.schema.errors import InputError, LengthwiseError

COMPLETIONS, CHAT = "completions", "chat"


class RequestError(LengthwiseError):
    """A request that failed.

    Attributes:
        reason: Of what, in a few words that repeat: "refused", "reset", "closed early", "no connection",
            "timed out", "stalled", "http 503", "server error" (told inside the stream), "malformed".
        detail: What the server or the system said.
        retry_after_s: When the server wants to be asked again, from now on; None: it did not say.
    """

    def __init__(self, reason: str, detail: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail, self.retry_after_s = reason, detail, retry_after_s


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible server and how it is asked.

    Attributes:
        url: Its address, with or without ``/v1`` at the end.
        model: The model's name there; None: the first that it lists.
        api_key: Sent as a bearer token; never shown.
        connect_s: Longest time to be connected.
        stall_s: Longest time without a byte of an answer, the wait for the first included.
        timeout_s: Longest time of a whole request.
        body: Fields that every request has besides its own, such as ``{"temperature": 0}``.
    """

    url: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    connect_s: float = 10.0
    stall_s: float = 120.0
    timeout_s: float = 900.0
    body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in {"http", "https"} or not parts.netloc:
            raise InputError(
                f"the address of a server must begin with http:// or https:// and name a host; it is {self.url!r}"
            )
        for name in ("connect_s", "stall_s", "timeout_s"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} must be above 0 seconds; it is {getattr(self, name)}")

    @property
    def root(self) -> str:
        """The address without ``/v1``: where ``/metrics`` and ``/tokenize`` are."""
        return self.url.rstrip("/").removesuffix("/v1").rstrip("/")

    @property
    def shown(self) -> str:
        """The address without a password, for reports."""
        parts = urlsplit(self.url)
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment=""))


@dataclass(frozen=True)
class Abilities:
    """What a server was found to do by asking it.

    Attributes:
        engine: "vllm", "sglang", "llama.cpp", "tgi", "transformers"; "" where it did not tell.
        version: Of the engine, "" where it did not tell.
        models: What it lists.
        model: The one that is asked for.
        max_model_len: Longest prompt and output together, where it tells.
        api: "completions", or "chat" where only that works.
        token_ids: Whether a prompt may be token ids, and is then as long as they are many.
        usage: Whether a stream ends in the numbers of tokens.
        usage_each: Whether every piece of a stream tells them.
        ids_each: Whether every piece tells its token ids.
        ignore_eos: Whether the end of text can be ignored; None: the field is taken, nobody knows how.
        min_tokens: Likewise for the shortest output.
        tokenizer: Whose form of ``/tokenize`` it has: "vllm", "llama.cpp", "tgi" or "".
        metrics: Whether it has ``/metrics``.
        own_defaults: Whether it may fill in penalties or a longest output that a request leaves out; None: nobody
            knows.
    """

    engine: str = ""
    version: str = ""
    models: tuple[str, ...] = ()
    model: str = ""
    max_model_len: int | None = None
    api: str = COMPLETIONS
    token_ids: bool = False
    usage: bool = False
    usage_each: bool = False
    ids_each: bool = False
    ignore_eos: bool | None = False
    min_tokens: bool | None = False
    tokenizer: str = ""
    metrics: bool = False
    own_defaults: bool | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens a server says that there were."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer.

    Attributes:
        at_s: When its bytes had been read, on the clock of ``time.perf_counter``.
        text: What it adds; may be empty where a token shows only with the next.
        tokens: How many tokens it adds; 0 where nobody tells: a piece can hold many.
        is_output: Whether it is a part of the output, not only a role, a usage or an end.
        usage: The numbers so far; the last one is the answer's.
        finish_reason: "stop", "length", ..., with the last piece.
        token_ids: The tokens that it adds, where the server tells them.
        prompt_ids: The prompt's tokens, where the server tells them (with the first piece).
    """

    at_s: float
    text: str
    tokens: int
    is_output: bool
    usage: Usage | None = None
    finish_reason: str | None = None
    token_ids: tuple[int, ...] = ()
    prompt_ids: tuple[int, ...] = ()
