"""vLLM's own scheduler, its queue in order of predicted length."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from lengthwise.gateway.plugin.check import doubts_of_classes, doubts_of_scheduler
from lengthwise.gateway.plugin.making import Rules
from lengthwise.gateway.plugin.ordering import Order, Ordering
from lengthwise.gateway.plugin.settings import Settings, settings_of


class LengthScheduler:
    """Makes the scheduler that vLLM would make itself, with its queue in order of predicted length.

    Where anything is in doubt it is vLLM's own and nothing else, and the log says why.
    """

    def __new__(cls, *args: Any, **named: Any) -> Any:
        """A scheduler."""
        return _ORDERED.made(cls.__name__, args, named)


def _doubts(stock: type, _: Any) -> Iterator[str]:
    yield from doubts_of_classes(stock, import_module("vllm.v1.request").Request)


def _says(settings: Settings) -> str:
    return (
        f"orders this engine: rank {settings.rank}, takeover {settings.takeover}, nobody waits over "
        f"{settings.max_wait_s:g} s behind later ones"
    )


_ORDERED = Rules(Ordering, settings_of, _doubts, doubts_of_scheduler, Order, _says, "order")
