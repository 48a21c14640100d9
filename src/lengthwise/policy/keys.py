"""Keys of many requests at once: the kernel's own compiled rank, asked of every row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.policy.compile import compiled, interpreted, signatures
from lengthwise.policy.contracts import RANK_ARGUMENTS, Policy
from lengthwise.schema.errors import PolicyError

Floats = npt.NDArray[np.float64]

WHOLE = ("prompt_tokens", "generated_tokens", "priority", "admission", "eviction", "batch")
"""Columns of whole numbers (int64); the others are float64."""
COLUMNS = RANK_ARGUMENTS[1:]
"""What a row holds: all that a rank may be told but the time."""


def keys(policy: Policy, columns: Mapping[str, npt.ArrayLike], now_s: float) -> Floats:
    """[n] float64: the rank's key of every row, by one compiled loop.

    The rank is handed over as a value of a function type, as the simulator's kernel takes it, so that
    the loop is compiled once for all ranks.

    Args:
        policy: A rank.
        columns: [n] arrays by the names in COLUMNS; those that the rank does not take may be left out.
        now_s: The time it is told.

    Raises:
        PolicyError: The policy is no rank, or a column it takes is not there or of another length.
    """
    given = _laid_out(policy, columns)
    out = np.empty(len(given[0]))
    _loop()(_function(policy), float(now_s), *given, out)
    return out


def key_of(policy: Policy) -> Callable[..., float]:
    """The same rank for a single request: a plain function of all of RANK_ARGUMENTS, in their order."""
    one: Callable[..., float] = interpreted(policy)
    return one


def _laid_out(policy: Policy, columns: Mapping[str, npt.ArrayLike]) -> list[Any]:
    if policy.axis != "rank":
        raise PolicyError(f"keys are a rank's; {policy.name!r} is a policy of axis {policy.axis!r}")
    missing = [name for name in policy.arguments if name != "now_s" and name not in columns]
    if missing:
        raise PolicyError(f"rank {policy.name!r} takes {', '.join(missing)}; no such column was given")
    kinds = [(name, np.int64 if name in WHOLE else np.float64) for name in COLUMNS]
    there = {name: np.ascontiguousarray(columns[name], kind) for name, kind in kinds if name in columns}
    sizes = {column.shape for column in there.values()}
    if len(sizes) > 1:
        raise PolicyError(f"columns must have one value a request; their shapes are {sorted(sizes)}")
    shape = sizes.pop() if sizes else (0,)
    return [there[name] if name in there else np.zeros(shape, kind) for name, kind in kinds]


def _function(policy: Policy) -> Any:
    from lengthwise import _jit

    return interpreted(policy) if _jit.DISABLED else compiled(policy)


@cache
def _loop() -> Any:
    from lengthwise import _jit as j

    if j.DISABLED:
        return _key_every_row
    rows = [j.i8_1d if name in WHOLE else j.f8_1d for name in COLUMNS]
    signature = j.none(j.function_type(signatures()["rank"]), j.f8, *rows, j.f8_1d)
    return j.compile_now(_key_every_row, signature, cached=True)


def _key_every_row(
    rank: Any,
    now_s: Any,
    arrival_s: Any,
    prompt_tokens: Any,
    generated_tokens: Any,
    predicted_tokens: Any,
    remaining_tokens: Any,
    index_tokens: Any,
    waited_s: Any,
    priority: Any,
    admission: Any,
    eviction: Any,
    service_tokens: Any,
    batch: Any,
    out: Any,
) -> None:
    for i in range(len(out)):
        out[i] = rank(
            now_s,
            arrival_s[i],
            prompt_tokens[i],
            generated_tokens[i],
            predicted_tokens[i],
            remaining_tokens[i],
            index_tokens[i],
            waited_s[i],
            priority[i],
            admission[i],
            eviction[i],
            service_tokens[i],
            batch[i],
        )
