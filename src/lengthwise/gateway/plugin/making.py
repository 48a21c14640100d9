"""What vLLM makes of ``--scheduler-cls``: its own scheduler under our rules, or untouched where that is in doubt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar

from lengthwise.gateway.plugin.check import doubts_of_version
from lengthwise.gateway.plugin.guard import log

_SCHED = "vllm.v1.core.sched"
S = TypeVar("S")


@dataclass(frozen=True)
class Rules(Generic[S]):
    """One way in which an engine may be run.

    Attributes:
        mixin: Goes before vLLM's class; its ``lengthwise`` is what ``begun`` makes.
        settings: From vLLM's ``additional_config``.
        doubts: Why an engine had better keep its own way: of (its class, its configuration).
        doubts_made: The same of a scheduler that was made.
        begun: What runs the engine, of the settings.
        says: What is logged then.
        keeps: What is logged where it stays as it is.
    """

    mixin: type
    settings: Callable[[Any], S]
    doubts: Callable[[type, Any], Iterator[str]]
    doubts_made: Callable[[Any], Iterator[str]]
    begun: Callable[[S], Any]
    says: Callable[[S], str]
    keeps: str

    def made(self, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """A scheduler: the one that vLLM would make of these arguments, under the rules if nothing speaks against it.

        vLLM's class is the one that fits the engine (asynchronous scheduling or not).
        """
        config = named.get("vllm_config", args[0] if args else None)
        stock = stock_class(config)
        settings = self._settings(config, stock)
        if settings is None:
            return stock(*args, **named)
        scheduler = type(name, (self.mixin, stock), {"__module__": __name__})(*args, **named)
        self._begin(scheduler, settings)
        return scheduler

    def _settings(self, config: Any, stock: type) -> S | None:
        """How to run it; None: as it is."""
        doubts: list[str] = []
        try:
            settings = self.settings(getattr(config, "additional_config", None))
            doubts += self._doubts(stock, config, trusted=bool(getattr(settings, "trust_version", False)))
        except Exception as error:  # noqa: BLE001 - whatever is wrong, the engine starts
            doubts.append(str(error) or type(error).__name__)
        if doubts:
            self._say(doubts)
            return None
        return settings

    def _doubts(self, stock: type, config: Any, *, trusted: bool) -> Iterator[str]:
        if stock.__name__ not in ("AsyncScheduler", "Scheduler"):
            yield f"{stock.__name__} has rules of its own"
        yield from doubts_of_version(str(import_module("vllm").__version__), trusted=trusted)
        yield from self.doubts(stock, config)

    def _begin(self, scheduler: Any, settings: S) -> None:
        """Has the scheduler run so from now on, if nothing speaks against it."""
        try:
            doubts = list(self.doubts_made(scheduler))
            rules = None if doubts else self.begun(settings)
        except Exception as error:  # noqa: BLE001
            doubts, rules = [str(error) or type(error).__name__], None
        if doubts:
            self._say(doubts)
            return
        scheduler.lengthwise = rules
        log.info("lengthwise %s", self.says(settings))

    def _say(self, doubts: list[str]) -> None:
        log.warning("lengthwise: this engine keeps its own %s: %s", self.keeps, "; ".join(doubts))


def stock_class(config: Any) -> Any:
    """The scheduler class that vLLM would take for this configuration."""
    asynchronous = bool(config.scheduler_config.async_scheduling)
    if getattr(config, "diffusion_config", None) is not None:
        home = import_module(f"{_SCHED}.diffusion_scheduler")
        return home.DiffusionAsyncScheduler if asynchronous else home.DiffusionScheduler
    if asynchronous:
        return import_module(f"{_SCHED}.async_scheduler").AsyncScheduler
    return import_module(f"{_SCHED}.scheduler").Scheduler
