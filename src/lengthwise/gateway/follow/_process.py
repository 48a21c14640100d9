"""A follower in a process of its own: planning takes seconds, in which the event loop must not stand still."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from lengthwise.gateway._children import close, reaped, spawned
from lengthwise.gateway.follow._child import LENGTH, framed
from lengthwise.gateway.follow.told import Lengths, Make, News
from lengthwise.schema.errors import LengthwiseError

_END_S = 5.0


class Process:
    """A follower that is asked; entered it has begun, left it has ended.

    Args:
        make: Makes the follower there.
        start_s: It must have begun within this.
        plan_s: An answer must be there within this.

    Attributes:
        false_alarms: As the follower says.
    """

    def __init__(self, make: Make, start_s: float, plan_s: float) -> None:
        self._load = pickle.dumps(make)
        self._start_s, self._plan_s = start_s, plan_s
        self._process: asyncio.subprocess.Process | None = None
        self.false_alarms = float("nan")

    async def __aenter__(self) -> Self:
        """Begins; raises LengthwiseError where the follower cannot be had."""
        try:
            self._process = await spawned(__package__)
            hello = await self._told(LENGTH.pack(len(self._load)) + self._load, self._start_s)
            self.false_alarms = _greeted(hello)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends it, whatever it does."""
        await self._end()

    async def observe(self, lengths: Sequence[Lengths]) -> tuple[list[News], float]:
        """News that these made due, and the evidence after them.

        Raises:
            LengthwiseError: It has ended, or takes too long.
        """
        told = await self._told(framed(list(lengths)), self._plan_s)
        return told["news"], told["evidence"]

    async def _told(self, message: bytes, within_s: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(within_s):
                process.stdin.write(message)
                await process.stdin.drain()
                size = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))[0]
                told: dict[str, Any] = pickle.loads(await process.stdout.readexactly(size))  # noqa: S301
        except TimeoutError:
            raise LengthwiseError(f"it did not answer within {within_s:g} s") from None
        except (OSError, asyncio.IncompleteReadError) as error:
            raise LengthwiseError(await _fate(process, min(_END_S, within_s))) from error
        return told

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        close(process)
        await reaped(process, _END_S)


async def _fate(process: asyncio.subprocess.Process, within_s: float) -> str:
    """What became of a process that closed its end, in words."""
    try:
        async with asyncio.timeout(within_s):
            return f"its process ended with {await process.wait()}"
    except TimeoutError:
        return "its process answers no more, although it lives"


def _greeted(hello: dict[str, Any]) -> float:
    """The false-alarm rate of a follower that is there."""
    if hello["refused"]:
        raise LengthwiseError(hello["refused"])
    return float(hello["false_alarms"])
