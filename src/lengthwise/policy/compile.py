"""From a policy to the function that the kernel or the reference calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.policy.contracts import ARGUMENTS, RANK_ARGUMENTS, Policy
from lengthwise.schema.errors import PolicyError

Function = Callable[..., Any]

_RESULT = {
    "rank": "float({call})",
    "batching": "integers({call})",
    "memory": "integer({call})",
    "router": "integer({call})",
    "takeover": "float({call})",
    "binning": "integer({call})",
}


def _complete(value: Any) -> int:
    """A whole number; NaN is an error rather than whatever the processor makes of it."""
    if value != value:  # noqa: PLR0124
        raise ValueError("it returned NaN where a whole number must stand")
    return int(value)


def _whole_three_with(complete: Function) -> Function:
    def whole_three(values: Any) -> tuple[int, int, int]:
        a, b, c = values
        return complete(a), complete(b), complete(c)

    return whole_three


def _adapter(policy: Policy, function: Function, complete: Function, whole_three: Function) -> Function:
    """A function of all arguments of the axis that calls the policy with those it takes."""
    call = f"function({', '.join(policy.arguments)})"
    source = f"lambda {', '.join(ARGUMENTS[policy.axis])}: {_RESULT[policy.axis].format(call=call)}"
    names = {"function": function, "integer": complete, "integers": whole_three}
    adapter: Function = eval(source, names)  # noqa: S307  built from fixed names alone
    adapter.__name__ = adapter.__qualname__ = f"{policy.axis}_{policy.name}"
    adapter.__module__ = policy.function.__module__
    return adapter


def signatures() -> dict[str, Any]:
    """The compiled signature of each axis' full argument list."""
    from lengthwise import _jit as j

    return {
        "rank": j.f8(j.f8, j.f8, j.i8, j.i8, j.f8, j.f8, j.f8, j.f8, j.i8, j.i8, j.i8, j.f8, j.i8),
        "batching": j.triple_of_ints(*[j.i8] * len(ARGUMENTS["batching"])),
        "memory": j.i8(j.i8, j.i8, j.f8, *[j.i8] * 7),
        "router": j.i8(j.i8, j.f8, j.f8, j.i8_1d, j.i8_1d, j.i8_1d),
        "takeover": j.f8(j.f8, j.f8, j.f8, j.f8, j.i8, j.f8, j.i8, j.i8, j.f8, j.i8),
        "binning": j.i8(j.f8, j.i8),
    }


def interpreted(policy: Policy) -> Function:
    """The policy as plain Python, under the full argument list of its axis."""
    return _adapter(policy, policy.function, _complete, _whole_three_with(_complete))


def compiled(policy: Policy) -> Any:
    """The policy compiled for the kernel; built-in ones come from the disk cache.

    Raises:
        PolicyError: It cannot be compiled; the message says where.
    """
    if policy.parameters:  # data: whatever they are, it is the same code
        policy = replace(policy, name=policy.function.__name__, parameters=(1,) * len(policy.parameters))
    return _compiled(policy)


@lru_cache(maxsize=256)
def _compiled(policy: Policy) -> Any:
    from lengthwise import _jit

    whole = _jit.jit(_complete)
    adapter = _adapter(policy, _jit.jit(policy.function), whole, _jit.jit(_whole_three_with(whole)))
    try:
        return _jit.compile_now(adapter, signatures()[policy.axis], cached=policy.builtin)
    except Exception as error:
        _check_a_sample(policy)
        raise PolicyError(
            f"{policy.axis} policy {policy.name!r} cannot be compiled: {_reason(error)}; use numbers and plain "
            "arithmetic, or run it interpreted with simulate(..., engine='reference')"
        ) from error


def _check_a_sample(policy: Policy) -> None:
    """Raises PolicyError if the function fails or gives no number where it is plainly called."""
    import numpy as np

    none = np.zeros(2, np.int64)
    samples: dict[str, tuple[Any, ...]] = {
        "rank": (0.0, 0.0, 1, 0, 1.0, 1.0, 1.0, 0.0, 0, 0, 0, 0.0, 0),
        "batching": (0, 0, 1, 0, 0, 64, 8, 0, 0, 0, 0, 0, 0, 0, 1, *policy.all_parameters),
        "memory": (1, 1, 1.0, 64, 16, 8, 8, 0, 0, 2),
        "router": (0, 0.5, 0.5, none, none, none),
        "takeover": (0.0, 1.0, 1.0, 2.0, 1, 1.0, 1, 1, 0.0, 0),
        "binning": (1.0, 1),
    }
    given = dict(zip(ARGUMENTS[policy.axis], samples[policy.axis], strict=True))
    who = f"{policy.axis} policy {policy.name!r}"
    try:
        value = policy.function(*(given[name] for name in policy.arguments))
    except Exception as error:
        raise PolicyError(f"{who} raised {type(error).__name__}: {error}") from error
    wanted = "three whole numbers" if policy.axis == "batching" else "a number"
    numbers = value if policy.axis == "batching" and isinstance(value, tuple) else (value,)
    if not all(isinstance(one, int | float | np.number) for one in numbers):
        raise PolicyError(f"{who} must return {wanted}; it returned {value!r}")


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3])[:300]


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
    queued_for_s: Any,
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
            queued_for_s[i],
            priority[i],
            admission[i],
            eviction[i],
            service_tokens[i],
            batch[i],
        )
