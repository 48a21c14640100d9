"""Policies with parameters, written as ``name(key=value)`` where a name may stand."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from lengthwise.policy.contracts import Policy, make
from lengthwise.schema.errors import PolicyError

MOST_BINS = 1024


@lru_cache(maxsize=256)
def aged(weight: float = 10.0) -> Policy:
    """Shortest remaining predicted output first; a second of age makes a request ``weight`` tokens shorter.

    All age alike, so the order needs no clock: remaining + weight x arrival.
    """
    _require(math.isfinite(weight) and weight > 0, "weight must be above 0 (tokens a second)", weight)

    def key(remaining_tokens, arrival_s):
        return remaining_tokens + weight * arrival_s

    bound = "passed only by requests that came at most (longest predicted length / weight) seconds later"
    return _named("rank", f"aged(weight={weight:g})", key, starvation=bound)


@lru_cache(maxsize=256)
def aged_gittins(weight: float = 10.0) -> Policy:
    """As aged, by the Gittins index of the predicted distribution."""
    _require(math.isfinite(weight) and weight > 0, "weight must be above 0 (tokens a second)", weight)

    def key(index_tokens, arrival_s):
        return index_tokens + weight * arrival_s

    bound = "passed only by requests that came at most (largest index / weight) seconds later"
    return _named("rank", f"aged_gittins(weight={weight:g})", key, starvation=bound)


@lru_cache(maxsize=256)
def mlfq(quantum: int = 64, levels: int = 6, prompt_weight: float = 0.05) -> Policy:
    """Multi-level feedback queue, skip-join (FastServe): first the levels that have had least.

    Level l ends after ``quantum`` x (2^(l+1) - 1) tokens; a request joins at the level whose quantum holds
    ``prompt_weight`` x its prompt. It needs no prediction. Within a level: first come, first served.
    """
    _require(quantum >= 1, "quantum must be at least 1 token", quantum)
    _require(1 <= levels <= 32, "levels must be from 1 to 32", levels)
    _require(prompt_weight >= 0, "prompt_weight must be at least 0", prompt_weight)

    def key(arrival_s, prompt_tokens, generated_tokens):
        level, room, joined, size = 0, quantum, 0, quantum
        while level < levels - 1 and generated_tokens >= room:
            level += 1
            room += quantum << level
        while joined < levels - 1 and prompt_weight * prompt_tokens > size:
            joined += 1
            size = quantum << joined
        return max(level, joined) * 1e9 + arrival_s

    return _named("rank", f"mlfq(quantum={quantum}, levels={levels}, prompt_weight={prompt_weight:g})", key)


@lru_cache(maxsize=256)
def worth(factor: float = 1.0, most: int = 1_000_000) -> Policy:
    """As worth_it, the cost counted ``factor`` times, nobody made to leave more than ``most`` times."""
    _require(factor >= 0, "factor must be at least 0", factor)
    _require(most >= 0, "most must be at least 0", most)

    def gain(
        waiting_key,
        running_key,
        waiting_remaining_tokens,
        running_remaining_tokens,
        recompute_steps,
        resident,
        preemptions,
    ):
        saved = running_remaining_tokens - waiting_remaining_tokens
        if waiting_key < running_key and preemptions < most:
            return saved - factor * recompute_steps * resident
        return 0.0

    return _named("takeover", f"worth(factor={factor:g}, most={most})", gain)


def bins(boundaries: Sequence[float]) -> Policy:
    """Multi-Bin: bin i holds the predicted lengths from boundary i-1 to below boundary i; k - 1 boundaries."""
    return _bins(tuple(float(b) for b in boundaries))


@lru_cache(maxsize=256)
def _bins(inner: tuple[float, ...]) -> Policy:
    count = len(inner)
    _require(count < MOST_BINS, f"there must be fewer than {MOST_BINS} boundaries", count)
    rising = all(a < b for a, b in pairwise(inner)) and all(map(math.isfinite, inner))
    _require(rising, "boundaries must be finite and increase", inner)
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
    "takeover": {"worth": worth},
    "binning": {"bins": bins},
}


def from_text(axis: str, text: str) -> Policy | None:
    """The policy that ``name(key=value, ...)`` means; None where the text is no such call.

    Raises:
        PolicyError: The name is no family of the axis, or its parameters are wrong.
    """
    if "(" not in text:
        return None
    name, parameters = _parsed(axis, text)
    families = FAMILIES.get(axis, {})
    if name not in families:
        raise PolicyError(
            f"no {axis} policy takes parameters under the name {name!r}; known: {', '.join(families)}"
        )
    try:
        return families[name](**parameters)
    except TypeError as error:
        raise PolicyError(f"{axis} policy {text!r} cannot be made: {error}") from error


def _parsed(axis: str, text: str) -> tuple[str, dict[str, Any]]:
    wrong = f"a {axis} policy with parameters is written like name(key=1, other=2); got {text!r}"
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise PolicyError(wrong) from error
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise PolicyError(wrong)
    try:
        return call.func.id, {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except ValueError as error:
        raise PolicyError(wrong) from error


def _named(axis: str, name: str, function: Callable[..., Any], **facts: Any) -> Policy:
    function.__name__ = function.__qualname__ = name.partition("(")[0]
    made = make(axis, function, builtin=False, **facts)
    return Policy(**{f: getattr(made, f) for f in made.__dataclass_fields__} | {"name": name})


def _require(good: bool, must: str, got: Any) -> None:
    if not good:
        raise PolicyError(f"{must}; got {got!r}")
