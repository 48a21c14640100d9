"""What vLLM makes of ``--scheduler-cls``: its own scheduler under our rules, or untouched where that is in doubt."""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar

TESTED = ("0.32.0",)
"""Versions of vLLM on which tests/live/test_live_plugin*.py and test_live_rra.py were run."""
METHODS = {
    "schedule": (),
    "add_request": ("request",),
    "finish_requests": ("request_ids", "finished_status"),
    "get_kv_cache_usage": (),
    "_preempt_request": ("request", "timestamp"),
    "_request_blocks_can_be_freed": ("request",),
}
"""Of the scheduler, with the parameters that are given."""
ATTRIBUTES = {
    "running": list,
    "requests": dict,
    "max_num_active_reqs": int,
    "num_waiting_for_streaming_input": int,
    "kv_holding_waiting": object,
    "pause_state": int,
    "connector": object,
    "ec_connector": object,
}
QUEUE = ("clear", "extend", "remove_request", "prepend_request")
REQUEST = frozenset(
    {"request_id", "sampling_params", "num_prompt_tokens", "max_tokens", "status", "num_computed_tokens"}
    | {"is_prefill_chunk"}
)
"""What a request is given when it is made."""


def doubts_of_version(version: str, *, trusted: bool) -> Iterator[str]:
    """Why this version had better keep its own order."""
    if version.split("+", 1)[0] not in TESTED and not trusted:
        yield (
            f"this is vLLM {version}, it was run on {', '.join(TESTED)}; to have it ordered nevertheless: "
            '--additional-config \'{"lengthwise": {"trust_version": true}}\''
        )


def doubts_of_classes(
    scheduler: type, request: type, methods: Mapping[str, tuple[str, ...]] = METHODS, report: frozenset[str] = REQUEST
) -> Iterator[str]:
    """What the engine's classes lack of these methods, and of what requests tell."""
    for name, wanted in methods.items():
        method = getattr(scheduler, name, None)
        if not callable(method):
            yield f"its scheduler has no method {name}"
        elif tuple(inspect.signature(method).parameters)[1 : 1 + len(wanted)] != wanted:
            yield f"its {name} takes {inspect.signature(method)}"
    code = getattr(inspect.getattr_static(request, "__init__"), "__code__", None)
    missing = report - set(code.co_names if code else ())
    if missing:
        yield f"its requests have no {', '.join(sorted(missing))}"
    if not isinstance(inspect.getattr_static(request, "num_output_tokens", None), property):
        yield "its requests do not tell num_output_tokens"


def doubts_of_scheduler(scheduler: Any) -> Iterator[str]:
    """Why this scheduler, as it was made, cannot be ordered."""
    yield from doubts_of_attributes(scheduler, ATTRIBUTES)
    waiting = getattr(scheduler, "waiting", None)
    if not isinstance(waiting, deque):
        yield "its queue is not that of --scheduling-policy fcfs; start it with that"
    elif not all(callable(getattr(waiting, name, None)) for name in QUEUE):
        yield "its queue cannot be reordered"


def doubts_of_attributes(scheduler: Any, attributes: Mapping[str, type]) -> Iterator[str]:
    """What a scheduler lacks, or has of another type."""
    for name, kind in attributes.items():
        if not hasattr(scheduler, name):
            yield f"its scheduler has no {name}"
        elif not isinstance(getattr(scheduler, name), kind):
            yield f"its scheduler's {name} is {type(getattr(scheduler, name)).__name__}"


log = logging.getLogger("vllm.lengthwise")
"""vLLM's own logger shows what its children say."""


class Guarded:
    """Goes before vLLM's own scheduler class."""

    lengthwise: Any = None
    """Our rules; None: the engine's own."""
    _given_up = "ordering failed; from now on this engine keeps its own order"

    def _lengthwise(self, work: Callable[[Any], Any]) -> Any:
        rules = self.lengthwise
        if rules is None:
            return None
        try:
            return work(rules)
        except Exception:
            self.lengthwise = None
            log.exception("lengthwise: %s", self._given_up)
            return None


_SCHED = "vllm.v1.core.sched"
S = TypeVar("S")


@dataclass(frozen=True)
class Rules(Generic[S]):
    """One way in which an engine may be run.

    Attributes:
        mixin: Goes before vLLM's class; its ``lengthwise`` is what ``started`` makes.
        settings: From vLLM's ``additional_config``.
        warnings: Why an engine had better keep its own way: of (its class, its configuration).
        doubts_made: The same of a scheduler that was made.
        started: What runs the engine, of the settings.
        says: What is logged then.
        is_retained: What is logged where it stays as it is.
    """

    mixin: type
    settings: Callable[[Any], S]
    warnings: Callable[[type, Any], Iterator[str]]
    doubts_made: Callable[[Any], Iterator[str]]
    started: Callable[[S], Any]
    says: Callable[[S], str]
    is_retained: str

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
        warnings: list[str] = []
        try:
            settings = self.settings(getattr(config, "additional_config", None))
            warnings += self._warnings(stock, config, trusted=bool(getattr(settings, "trust_version", False)))
        except Exception as error:  # noqa: BLE001 - whatever is wrong, the engine starts
            warnings.append(str(error) or type(error).__name__)
        if warnings:
            self._say(warnings)
            return None
        return settings

    def _warnings(self, stock: type, config: Any, *, trusted: bool) -> Iterator[str]:
        if stock.__name__ not in ("AsyncScheduler", "Scheduler"):
            yield f"{stock.__name__} has rules of its own"
        yield from doubts_of_version(str(import_module("vllm").__version__), trusted=trusted)
        yield from self.warnings(stock, config)

    def _begin(self, scheduler: Any, settings: S) -> None:
        """Has the scheduler run so from now on, if nothing speaks against it."""
        try:
            warnings = list(self.doubts_made(scheduler))
            rules = None if warnings else self.started(settings)
        except Exception as error:  # noqa: BLE001
            warnings, rules = [str(error) or type(error).__name__], None
        if warnings:
            self._say(warnings)
            return
        scheduler.lengthwise = rules
        log.info("lengthwise %s", self.says(settings))

    def _say(self, warnings: list[str]) -> None:
        log.warning("lengthwise: this engine keeps its own %s: %s", self.is_retained, "; ".join(warnings))


def stock_class(config: Any) -> Any:
    """The scheduler class that vLLM would take for this configuration."""
    asynchronous = bool(config.scheduler_config.async_scheduling)
    if getattr(config, "diffusion_config", None) is not None:
        home = import_module(f"{_SCHED}.diffusion_scheduler")
        return home.DiffusionAsyncScheduler if asynchronous else home.DiffusionScheduler
    if asynchronous:
        return import_module(f"{_SCHED}.async_scheduler").AsyncScheduler
    return import_module(f"{_SCHED}.scheduler").Scheduler
