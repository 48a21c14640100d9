"""What the coordinator asks of launchers and engines; it is the same over all of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from lengthwise.apps.ledger import Output, Partial
from lengthwise.apps.request import Request
from lengthwise.schema.app import ModelPlan, Replica
from lengthwise.schema.errors import LengthwiseError


class AskError(LengthwiseError):
    """A request that failed.

    Args:
        why: What is told.
        blame: "request" (asking again would fail the same way), "engine" (it is broken, or gone), or
            "moment" (worth another try, here or elsewhere).
    """

    def __init__(self, why: str, blame: str) -> None:
        super().__init__(why)
        self.blame = blame


@dataclass(frozen=True)
class Heard:
    """A piece of an answer: what there is in all so far, and the whole answer in the last one."""

    partial: Partial
    output: Output | None = None


class Engine(Protocol):
    """One replica that is ready.

    Attributes:
        model: Index of its model.
        replica: The GPUs that it is on.
        seats: Requests that it runs at once.
        resumes: Whether it goes on from a partial answer's tokens.
    """

    model: int
    replica: Replica
    seats: int
    resumes: bool

    def generate(self, request: Request, so_far: Partial | None) -> AsyncIterator[Heard]:
        """The answer as it comes, continued from what there is; closing the iterator aborts it at the engine.

        Raises:
            AskError: It failed.
        """
        ...

    @property
    def alive(self) -> bool:
        """Whether it is still there."""
        ...


class Launcher(Protocol):
    """Makes engines be there. All methods may be cancelled, and leave nothing behind then.

    Attributes:
        name: "local", "ray", "static" or "simulated".
        fixed: Whether engines are given, and can be neither started nor stopped: no plan is followed then.
    """

    name: str
    fixed: bool

    async def start(self, plan: ModelPlan, replica: Replica) -> Engine:
        """A replica of a model on these GPUs, ready.

        Raises:
            EngineError: It did not start; with its last lines.
        """
        ...

    async def stop(self, engine: Engine) -> None:
        """Ends it; nothing of it is left on its GPUs."""
        ...

    async def sleep(self, engine: Engine) -> bool:
        """Frees its GPUs, weights kept in the host's memory; False: it cannot, and goes on as it is."""
        ...

    async def wake(self, engine: Engine) -> None:
        """Takes its GPUs again."""
        ...

    async def close(self) -> None:
        """Ends all engines that were started."""
        ...
