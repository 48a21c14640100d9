"""Subclass vLLM's scheduler with a mixin (``--scheduler-cls``), unless its version differs from the tested ones."""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

TESTED = ("0.32.0",)  # versions of vLLM on which tests/live/test_live_plugin*.py and test_live_rra.py were run
METHODS = {
    "schedule": (), "add_request": ("request",), "finish_requests": ("request_ids", "finished_status"),
    "get_kv_cache_usage": (), "_preempt_request": ("request", "timestamp"),
    "_request_blocks_can_be_freed": ("request",), "update_from_output": ("scheduler_output", "model_runner_output"),
}  # fmt: skip
"""Required methods of the scheduler, with the parameters that are passed."""
ATTRIBUTES = {
    "running": list, "requests": dict, "max_num_active_reqs": int, "num_waiting_for_streaming_input": int,
    "kv_holding_waiting": object, "pause_state": int, "connector": object, "ec_connector": object, "block_size": int,
    "cache_config": object, "kv_cache_config": object,
}  # fmt: skip
QUEUE_METHODS = ("clear", "extend", "remove_request", "prepend_request")
REQUEST = frozenset(
    {"request_id", "sampling_params", "num_prompt_tokens", "max_tokens", "status", "num_computed_tokens"}
    | {"is_prefill_chunk"}
)
"""Attributes that a request's constructor must set."""


def version_warnings(version: str, *, trusted: bool) -> Iterator[str]:
    """Yield a warning if the plug-in was never tested with this version."""
    if version.split("+", 1)[0] not in TESTED and not trusted:
        yield (
            f"this is vLLM {version}, tested versions are {', '.join(TESTED)}; to use the plug-in nevertheless: "
            '--additional-config \'{"lengthwise": {"trust_version": true}}\''
        )


def class_warnings(
    scheduler: type, request: type, methods: Mapping[str, tuple[str, ...]] = METHODS, names: frozenset[str] = REQUEST
) -> Iterator[str]:
    """Yield a warning for each method of the scheduler class, or attribute of requests, that is missing or changed."""
    for name, parameters in methods.items():
        method = getattr(scheduler, name, None)
        if not callable(method):
            yield f"its scheduler has no method {name}"
        elif tuple(inspect.signature(method).parameters)[1 : 1 + len(parameters)] != parameters:
            yield f"its {name} takes {inspect.signature(method)}"
    code = getattr(inspect.getattr_static(request, "__init__"), "__code__", None)
    if missing := names - set(code.co_names if code else ()):
        yield f"its requests have no {', '.join(sorted(missing))}"
    if not isinstance(inspect.getattr_static(request, "num_output_tokens", None), property):
        yield "its requests have no property num_output_tokens"


def scheduler_warnings(scheduler: Any) -> Iterator[str]:
    """Yield the reasons for which the queue of a scheduler cannot be reordered."""
    yield from attribute_warnings(scheduler, ATTRIBUTES)
    waiting = getattr(scheduler, "waiting", None)
    if not isinstance(waiting, deque):
        yield "its queue is not that of --scheduling-policy fcfs; start it with that"
    elif not all(callable(getattr(waiting, name, None)) for name in QUEUE_METHODS):
        yield "its queue cannot be reordered"


def attribute_warnings(scheduler: Any, attributes: Mapping[str, type]) -> Iterator[str]:
    """Yield a warning for each attribute that a scheduler lacks, or that has another type."""
    for name, kind in attributes.items():
        if not hasattr(scheduler, name):
            yield f"its scheduler has no {name}"
        elif not isinstance(getattr(scheduler, name), kind):
            yield f"its scheduler's {name} is {type(getattr(scheduler, name)).__name__}"


log = logging.getLogger("vllm.lengthwise")  # a child of vLLM's logger: vLLM's handlers show its records


class GuardedScheduler:
    """Mixin for vLLM's scheduler that calls hooks, its attribute ``lengthwise``. Their first error disables them."""

    lengthwise: Any = None
    _failure_message = "ordering failed; from now on this engine keeps its own order"

    def _guarded(self, call: Callable[[Any], Any]) -> Any:
        """Call a function with the hooks and return its result, or None if hooks are disabled or the call fails."""
        if self.lengthwise is None:
            return None
        try:
            return call(self.lengthwise)
        except Exception:
            self.lengthwise = None
            log.exception("lengthwise: %s", self._failure_message)
            return None


@dataclass(frozen=True)
class SchedulerPlugin:
    """A modification of vLLM's scheduler by a base class, ``mixin``, and the hooks that it calls.

    If there is any warning, the scheduler is not modified, and the log says that the engine keeps its own ``subject``.
    """

    mixin: type
    settings: Callable[[Any], Any]  # parses vLLM's ``additional_config``
    class_warnings: Callable[[type, Any], Iterator[str]]  # checks vLLM's scheduler class and configuration
    object_warnings: Callable[[Any], Iterator[str]]  # checks the created scheduler
    hooks: Callable[[Any], Any]  # makes the hooks from the settings
    description: Callable[[Any], str]  # describes the settings in the log
    subject: str  # what the plug-in would replace, such as "order"

    def create(self, name: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Return the scheduler that vLLM would create, modified unless there is a warning."""
        config = keywords.get("vllm_config", args[0] if args else None)
        base = scheduler_class(config)
        warnings: list[str] = []
        refusal = f"lengthwise: this engine keeps its own {self.subject}: %s"
        try:
            settings = self.settings(getattr(config, "additional_config", None))
            if base.__name__ not in ("AsyncScheduler", "Scheduler"):
                warnings.append(f"{base.__name__} has rules of its own")
            trusted = bool(getattr(settings, "trust_version", False))
            warnings += version_warnings(str(import_module("vllm").__version__), trusted=trusted)
            warnings += self.class_warnings(base, config)
        except Exception as error:  # noqa: BLE001 - the engine must start in any case
            warnings.append(str(error) or type(error).__name__)
        if warnings:
            log.warning(refusal, "; ".join(warnings))
            return base(*args, **keywords)
        scheduler = type(name, (self.mixin, base), {"__module__": __name__})(*args, **keywords)
        try:
            warnings = list(self.object_warnings(scheduler))
            hooks = None if warnings else self.hooks(settings)
        except Exception as error:  # noqa: BLE001
            warnings = [str(error) or type(error).__name__]
        if warnings:
            log.warning(refusal, "; ".join(warnings))
        else:
            scheduler.lengthwise = hooks
            log.info("lengthwise %s", self.description(settings))
        return scheduler


def scheduler_class(config: Any) -> Any:
    """Return the class of the scheduler that vLLM itself would create for a configuration."""
    is_async = bool(config.scheduler_config.async_scheduling)
    if getattr(config, "diffusion_config", None) is not None:
        name = "diffusion_scheduler", "DiffusionAsyncScheduler" if is_async else "DiffusionScheduler"
    else:
        name = ("async_scheduler", "AsyncScheduler") if is_async else ("scheduler", "Scheduler")
    return getattr(import_module(f"vllm.v1.core.sched.{name[0]}"), name[1])
