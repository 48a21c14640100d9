"""Policies with parameters, written as ``name(key=value)``; a bare name takes the defaults."""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from lengthwise.policy import phases
from lengthwise.policy.contracts import Policy, make
from lengthwise.schema.errors import PolicyError, UnknownNameError

MAX_BINS = 1024
_PARAMETER_LIMIT = 1 << 24


@lru_cache(maxsize=256)
def aged(weight: float = 10.0) -> Policy:
    """Shortest remaining predicted output first. Each second of age counts as ``weight`` tokens less.

    All requests age at the same rate, so the order needs no clock: remaining + weight x arrival.
    """
    _require(0 < _number(weight) < math.inf, "weight must be above 0 and finite (tokens a second)", weight)

    def key(remaining_tokens, arrival_s):
        return remaining_tokens + weight * arrival_s

    bound = (
        "passed only by requests that arrived at most (its predicted remaining tokens / weight) seconds after it, and "
        "by no later one that is predicted longer"
    )
    return _named("rank", f"aged(weight={weight:g})", key, starvation=bound)


@lru_cache(maxsize=256)
def aged_gittins(weight: float = 10.0) -> Policy:
    """As aged, with the Gittins rank of the predicted distribution instead of the remaining output."""
    _require(0 < _number(weight) < math.inf, "weight must be above 0 and finite (tokens a second)", weight)

    def key(gittins_rank, arrival_s):
        return gittins_rank + weight * arrival_s

    bound = (
        "passed only by requests that arrived at most (its Gittins rank / weight) seconds after it, and by no later "
        "one of a larger Gittins rank"
    )
    return _named("rank", f"aged_gittins(weight={weight:g})", key, starvation=bound)


@lru_cache(maxsize=256)
def mlfq(quantum: int = 64, levels: int = 6, prompt_weight: float = 0.05) -> Policy:
    """Multi-level feedback queue, skip-join (FastServe): the levels with the least service run first.

    Level l ends after ``quantum`` x (2^(l+1) - 1) tokens. A request joins at the level whose quantum covers
    ``prompt_weight`` x its prompt. It needs no prediction. Within a level requests run first come, first served.
    """
    _require(1 <= _integer(quantum) < 1 << 24, "quantum must be a whole number of tokens, at least 1", quantum)
    _require(1 <= _integer(levels) <= 32, "levels must be a whole number from 1 to 32", levels)
    _require(0 <= _number(prompt_weight) < math.inf, "prompt_weight must be at least 0 and finite", prompt_weight)

    def key(arrival_s, prompt_tokens, generated_tokens):
        level, room, joined, size = 0, quantum, 0, quantum
        while level < levels - 1 and generated_tokens >= room:
            level += 1
            room += quantum << level
        while joined < levels - 1 and prompt_weight * prompt_tokens > size:
            joined += 1
            size = quantum << joined
        return max(level, joined) * 1e9 + arrival_s

    bound = (
        "passed only by requests at a level with less service, within its level by no later request; new requests join "
        "above those with much service, so only scheduler.max_wait_s limits a wait among them"
    )
    name = f"mlfq(quantum={quantum}, levels={levels}, prompt_weight={prompt_weight:g})"
    return _named("rank", name, key, starvation=bound)


@lru_cache(maxsize=256)
def worth(factor: float = 1.0, max_preemptions: int = 1_000_000) -> Policy:
    """As is_improvement, with ``factor`` times the cost and at most ``max_preemptions`` preemptions of each request."""
    _require(0 <= _number(factor) < math.inf, "factor must be at least 0 and finite", factor)
    _require(_integer(max_preemptions) >= 0, "max_preemptions must be a whole number of at least 0", max_preemptions)

    def gain(
        waiting_key, running_key, waiting_remaining_tokens, running_remaining_tokens, recompute_steps, num_running,
        num_waiting, preemptions,
    ):  # fmt: skip
        saved = running_remaining_tokens - waiting_remaining_tokens
        if waiting_key < running_key and preemptions < max_preemptions:
            return saved - factor * recompute_steps * (num_running + num_waiting)
        return 0.0

    return _named("preemption", f"worth(factor={factor:g}, max_preemptions={max_preemptions})", gain)


def rra(
    prefill_batch: int,
    decode_steps: int,
    micro_batches: int = 0,
    threshold: float | None = None,
    prompt_tokens: int = 0,
    decode_batch: int = 0,
) -> Policy:
    """ExeGPT's RRA: prefill of ``prefill_batch`` new requests, ``decode_steps`` decode iterations, and again.

    The requests circulate in a pipeline as ``micro_batches`` (0: as many as it has stages, which is also the maximum).
    Each micro-batch gets its part of the new requests. Finished requests leave at once; others join in the next phase.

    With a ``threshold``, a share, each micro-batch gets as many new requests as make the work uniform (section 5.2).
    The prompt tokens of a phase then differ from their mean, ``prompt_tokens``, by at most that share, and where they
    leave a choice, the decode batch differs from its mean, ``decode_batch``, by at most that share, too.
    """
    sizes = {"prefill_batch": prefill_batch, "decode_steps": decode_steps, "micro_batches": micro_batches}
    if threshold is None:
        return _phases("rra", phases.rra, sizes)
    means = {"prompt_tokens": prompt_tokens, "decode_batch": decode_batch}
    return _phases("rra", phases.rra_steady, sizes, threshold, means)


def prefill(prefill_batch: int, threshold: float | None = None, prompt_tokens: int = 0) -> Policy:
    """The prefill side of ExeGPT's WAA: batches of at most ``prefill_batch`` complete prompts.

    With a ``threshold``, a share, the batches are adjusted (section 5.2): their prompt tokens differ from their mean,
    ``prompt_tokens``, by at most that share.
    """
    if threshold is None:
        return _phases("prefill", phases.prefill, {"prefill_batch": prefill_batch})
    means = {"prompt_tokens": prompt_tokens}
    return _phases("prefill", phases.prefill_steady, {"prefill_batch": prefill_batch}, threshold, means)


def _phases(
    name: str,
    function: Callable[..., Any],
    sizes: dict[str, int],
    threshold: float | None = None,
    means: dict[str, int] | None = None,
) -> Policy:
    if threshold is not None:
        _require(0 <= _number(threshold) < 1, "threshold must be from 0 to below 1", threshold)
    for key, value in (sizes | (means or {})).items():
        minimum = 0 if key == "micro_batches" else 1
        _require(
            minimum <= _integer(value) < _PARAMETER_LIMIT, f"{key} must be a whole number of at least {minimum}", value
        )
    shown: dict[str, Any] = sizes | (means or {})
    parameters = list(sizes.values())
    if threshold is not None:
        parameters += [round(1000 * threshold), *(means or {}).values()]
        shown["threshold"] = f"{threshold:g}"
    text = ", ".join(f"{key}={value}" for key, value in shown.items())
    return replace(make("batching", function, parameters=tuple(map(int, parameters))), name=f"{name}({text})")


def bins(boundaries: Sequence[float]) -> Policy:
    """Multi-Bin: k - 1 boundaries make k bins. Bin i has predicted lengths from boundary i - 1 to below boundary i."""
    return _bins(tuple(map(_number, boundaries)))


@lru_cache(maxsize=256)
def _bins(inner: tuple[float, ...]) -> Policy:
    count = len(inner)
    _require(count < MAX_BINS, f"there must be fewer than {MAX_BINS} boundaries", count)
    rising = all(a < b for a, b in pairwise(inner)) and all(map(math.isfinite, inner))
    _require(rising, "boundaries must be finite and increase", list(inner))
    edges = inner or (math.inf,)

    def bin_of(predicted_tokens):
        number = 0
        for edge in edges:
            if predicted_tokens >= edge:
                number += 1
        return number

    return _named("binning", f"bins(boundaries={list(inner)})", bin_of, bins=count + 1)


FAMILIES: dict[str, dict[str, Callable[..., Policy]]] = {
    "rank": {"aged": aged, "aged_gittins": aged_gittins, "mlfq": mlfq},
    "preemption": {"worth": worth},
    "binning": {"bins": bins},
    "batching": {"prefill": prefill, "rra": rra},
}


def from_text(axis: str, text: str) -> Policy | None:
    """Return the policy for ``name(key=value, ...)`` or a family's bare name, or None for any other name.

    Raises:
        UnknownNameError: The axis has no family of this name.
        PolicyError: The text has a parenthesis but is no such call, or its parameters are wrong.
    """
    families = FAMILIES.get(axis, {})
    if "(" not in text and text not in families:
        return None
    name, parameters = parse_call(axis, text) if "(" in text else (text, {})
    if name not in families:
        raise UnknownNameError(f"{axis} policy", name, [f"{one}(...)" for one in families])
    try:
        return families[name](**parameters)
    except TypeError as error:
        raise PolicyError(
            f"{axis} policy {text!r} has wrong parameters: {error}; it takes {parameters_of(families[name])}"
        ) from error


def parameters_of(make: Callable[..., Policy]) -> str:
    """Return a family's parameters with their defaults, such as "quantum=64, levels=6"."""
    parameters = inspect.signature(make).parameters.values()
    return ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters)


def parse_call(axis: str, text: str) -> tuple[str, dict[str, Any]]:
    """Return (name, parameters) of a text such as ``name(key=value, ...)``, with literals as values.

    Raises:
        PolicyError: The text is not such a call.
    """
    wrong = PolicyError(f"a {axis} policy with parameters is written like name(key=1, other=2); got {text!r}")
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise wrong
        if any(k.arg is None for k in call.keywords):
            raise wrong
        return call.func.id, {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise wrong from error


def _named(axis: str, name: str, function: Callable[..., Any], **metadata: Any) -> Policy:
    function.__name__ = function.__qualname__ = name.partition("(")[0]
    return make(axis, function, name=name, builtin=False, **metadata)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise TypeError(f"{value!r} must be a number")
    return float(value)


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{value!r} must be a whole number")
    return int(value)


def _require(good: bool, must: str, got: Any) -> None:
    if not good:
        raise PolicyError(f"{must}; got {got!r}")
