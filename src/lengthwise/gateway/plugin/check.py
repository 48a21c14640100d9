"""Whether an engine is one that can be ordered: what is relied on of vLLM, looked up before it is used."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

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
    scheduler: type,
    request: type,
    methods: Mapping[str, tuple[str, ...]] = METHODS,
    told: frozenset[str] = REQUEST,
) -> Iterator[str]:
    """What the engine's classes lack of these methods, and of what requests tell."""
    for name, wanted in methods.items():
        method = getattr(scheduler, name, None)
        if not callable(method):
            yield f"its scheduler has no method {name}"
        elif tuple(inspect.signature(method).parameters)[1 : 1 + len(wanted)] != wanted:
            yield f"its {name} takes {inspect.signature(method)}"
    code = getattr(inspect.getattr_static(request, "__init__"), "__code__", None)
    missing = told - set(code.co_names if code else ())
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
