"""What the coordinator knows of engines: how one comes to be, is asked, and fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from lengthwise.apps.ledger.contracts import Output, Partial
from lengthwise.schema.app import ModelPlan, Replica
from lengthwise.schema.errors import LengthwiseError

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
        kept: How many tokens came from before.
        is_exact: Whether the text is that of the tokens, so that it may go on from them.
        telling: Says how many tokens there are, of an engine that writes them down only when it is cut.
        sure: (pieces of text, tokens) up to which the text is known to be that of the tokens; None: as far as they go.
    """

    text: list[str] = field(default_factory=list)
    prompt_ids: tuple[int, ...] = ()
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    kept: int = 0
    is_exact: bool = True
    telling: Callable[[], int] | None = None
    sure: tuple[int, int] | None = None

    @property
    def tokens(self) -> int:
        """Tokens so far, as far as they can be told: pieces of text where the engine does not name tokens."""
        known = max(len(self.output_ids), len(self.text))
        return known if self.telling is None else max(known, self.telling())

    @classmethod
    def of(cls, partial: Partial | None) -> Draft:
        """Goes on from what was saved; begins anew where the tokens are not known."""
        if partial is None or not partial.output_ids:
            return cls()
        ids = list(partial.output_ids)
        return cls([partial.text], partial.prompt_ids, ids, kept=len(ids))

    def begin_anew(self) -> None:
        """Forgets what came before: this engine cannot go on from it."""
        self.text, self.prompt_ids, self.output_ids, self.kept, self.sure = [], (), [], 0, None

    def partial(self) -> Partial | None:
        """What to keep of it; None where nothing could, or must, go on from it: behind its end there is nothing."""
        pieces, tokens = self.sure or (len(self.text), len(self.output_ids))
        if not tokens or not self.is_exact or self.finish_reason is not None:
            return None
        return Partial("".join(self.text[:pieces]), self.prompt_ids, tuple(self.output_ids[:tokens]))


class Engine(Protocol):
    """One replica that runs.

    Attributes:
        seats: Requests that it works on at once.
        about: What it is, in a few words: engine and version, address.
    """

    seats: int
    about: str

    @property
    def is_alive(self) -> bool:
        """Whether it still runs, as far as is known without asking it."""
        ...

    async def generate(self, ask: Ask, draft: Draft) -> Output:
        """The answer; ``draft`` grows on the way, and goes on from what it holds. Cancelled: the engine stops.

        Raises:
            FailedError: There is none.
        """
        ...

    async def gone(self, within_s: float) -> bool:
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
