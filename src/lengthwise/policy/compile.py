"""Policies as compiled or interpreted functions of all arguments of their axis, and rank keys of many requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.policy.contracts import ARGUMENTS, RANK_ARGUMENTS, ROUTER_ARRAYS, Policy
from lengthwise.schema.errors import PolicyError

Function = Callable[..., Any]
Floats = npt.NDArray[np.float64]

INTEGER_COLUMNS = ("prompt_tokens", "generated_tokens", "priority", "admission", "last_preemption", "batch")
COLUMNS = RANK_ARGUMENTS[1:]  # columns of ``keys``: all arguments of a rank except the time

_CONVERSIONS = {"rank": "float", "batching": "integers", "memory": "integer", "router": "integer",
                "preemption": "float", "binning": "integer"}  # fmt: skip


def _integer(value: Any) -> int:
    """Return a number as an integer. NaN raises an error, because its conversion depends on the processor."""
    if value != value:  # noqa: PLR0124
        raise ValueError("it must return whole numbers; it returned NaN")
    return int(value)


def _three_integers(integer: Function) -> Function:
    def integers(values: Any) -> tuple[int, int, int]:
        a, b, c = values
        return integer(a), integer(b), integer(c)

    return integers


def _adapter(policy: Policy, function: Function, integer: Function, integers: Function) -> Function:
    call = f"{_CONVERSIONS[policy.axis]}(function({', '.join(policy.arguments)}))"
    source = f"lambda {', '.join(ARGUMENTS[policy.axis])}: {call}"
    names = {"function": function, "integer": integer, "integers": integers}
    adapter: Function = eval(source, names)  # noqa: S307  built from fixed names alone
    adapter.__name__ = adapter.__qualname__ = f"{policy.axis}_{policy.name}"
    adapter.__module__ = policy.function.__module__
    return adapter


def signatures() -> dict[str, Any]:
    """Return by axis (rank, router, ...) Numba's signature of a policy that takes all arguments of the axis."""
    from lengthwise import _jit as j

    return {
        "rank": j.f8(j.f8, j.f8, j.i8, j.i8, j.f8, j.f8, j.f8, j.f8, j.i8, j.i8, j.i8, j.f8, j.i8),
        "batching": j.triple_of_ints(*[j.i8] * len(ARGUMENTS["batching"])),
        "memory": j.i8(j.i8, j.i8, j.f8, *[j.i8] * 7),
        "router": j.i8(j.i8, j.f8, j.f8, j.i8, j.i8, j.i8, *[j.i8_1d] * (len(ROUTER_ARRAYS) - 1), j.f8_1d),
        "preemption": j.f8(j.f8, j.f8, j.f8, j.f8, j.i8, j.f8, j.i8, j.i8, j.f8, j.i8),
        "binning": j.i8(j.f8, j.i8),
    }


@lru_cache(maxsize=256)
def interpreted(policy: Policy) -> Function:
    """Return the policy as a plain Python function of all arguments of its axis (``contracts.ARGUMENTS``), in order.

    The result is converted as in the compiled policy, so that both engines decide alike.
    """
    return _adapter(policy, policy.function, _integer, _three_integers(_integer))


def compiled(policy: Policy) -> Any:
    """Return the policy compiled for the kernel. Built-in policies come from the disk cache.

    Raises:
        PolicyError: The policy cannot be compiled. The message has the reason.
    """
    if policy.parameters:  # The code does not depend on their values: compile it once.
        policy = replace(policy, name=policy.function.__name__, parameters=(1,) * len(policy.parameters))
    return _compiled(policy)


@lru_cache(maxsize=256)
def _compiled(policy: Policy) -> Any:
    from lengthwise import _jit

    integer = _jit.jit(_integer)
    adapter = _adapter(policy, _jit.jit(policy.function), integer, _jit.jit(_three_integers(integer)))
    try:
        return _jit.compile_now(adapter, signatures()[policy.axis], cached=policy.builtin)
    except Exception as error:
        _require_number(policy)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines[:3])[:300]
        raise PolicyError(
            f"{policy.axis} policy {policy.name!r} cannot be compiled: {reason}; use numbers and plain "
            "arithmetic, or run it interpreted with simulate(..., engine='reference')"
        ) from error


def _require_number(policy: Policy) -> None:
    none = np.zeros(2, np.int64)
    samples: dict[str, tuple[Any, ...]] = {
        "rank": (0.0, 0.0, 1, 0, 1.0, 1.0, 1.0, 0.0, 0, 0, 0, 0.0, 0),
        "batching": (0, 0, 1, 0, 0, 64, 8, 0, 0, 0, 0, 0, 0, 0, 1, *policy.all_parameters),
        "memory": (1, 1, 1.0, 64, 16, 8, 8, 0, 0, 2),
        "router": (0, 0.5, 0.5, 1, -1, 8, *[none] * (len(ROUTER_ARRAYS) - 1), np.ones(2)),
        "preemption": (0.0, 1.0, 1.0, 2.0, 1, 1.0, 1, 1, 0.0, 0),
        "binning": (1.0, 1),
    }
    sample = dict(zip(ARGUMENTS[policy.axis], samples[policy.axis], strict=True))
    try:
        value = policy.function(*(sample[name] for name in policy.arguments))
    except Exception as error:
        raise PolicyError(f"{policy.axis} policy {policy.name!r} raised {type(error).__name__}: {error}") from error
    batching = policy.axis == "batching"
    numbers = value if batching and isinstance(value, tuple) else (value,)
    if not all(isinstance(one, int | float | np.number) for one in numbers):
        expected = "three whole numbers" if batching else "a number"
        raise PolicyError(f"{policy.axis} policy {policy.name!r} must return {expected}; it returned {value!r}")


def keys(policy: Policy, columns: Mapping[str, npt.ArrayLike], now_s: float) -> Floats:
    """Return [n] the key of each row by a rank, with one compiled loop.

    The rank is passed to the loop as a function, as in the simulator's kernel, so that one loop serves all ranks.

    Args:
        policy: Rank.
        columns: Arrays [n] with the names in COLUMNS; columns that the rank does not take may be absent.
        now_s: Current time.

    Raises:
        PolicyError: The policy is no rank, or a column that it takes is absent or of another length.
    """
    from lengthwise import _jit

    if policy.axis != "rank":
        raise PolicyError(f"keys need a policy of axis 'rank'; {policy.name!r} is of axis {policy.axis!r}")
    missing = [name for name in policy.arguments if name != "now_s" and name not in columns]
    if missing:
        raise PolicyError(f"rank {policy.name!r} takes {', '.join(missing)}; no such column was given")
    types = {name: np.int64 if name in INTEGER_COLUMNS else np.float64 for name in COLUMNS}
    arrays: dict[str, Any] = {
        name: np.ascontiguousarray(columns[name], kind) for name, kind in types.items() if name in columns
    }
    shapes = {column.shape for column in arrays.values()}
    if len(shapes) > 1:
        raise PolicyError(f"columns must have one value a request; their shapes are {sorted(shapes)}")
    shape = shapes.pop() if shapes else (0,)
    out = np.empty(shape[0])
    rows = [arrays[name] if name in arrays else np.zeros(shape, kind) for name, kind in types.items()]
    _loop()(interpreted(policy) if _jit.DISABLED else compiled(policy), float(now_s), *rows, out)
    return out


@cache
def _loop() -> Any:
    from lengthwise import _jit as j

    if j.DISABLED:
        return _key_every_row
    rows = [j.i8_1d if name in INTEGER_COLUMNS else j.f8_1d for name in COLUMNS]
    signature = j.none(j.function_type(signatures()["rank"]), j.f8, *rows, j.f8_1d)
    return j.compile_now(_key_every_row, signature, cached=True)


def _key_every_row(
    rank: Any, now_s: Any, arrival_s: Any, prompt_tokens: Any, generated_tokens: Any, predicted_tokens: Any,
    remaining_tokens: Any, gittins_rank: Any, queued_for_s: Any, priority: Any, admission: Any, last_preemption: Any,
    service_tokens: Any, batch: Any, out: Any,
) -> None:  # fmt: skip
    for i in range(len(out)):
        out[i] = rank(
            now_s, arrival_s[i], prompt_tokens[i], generated_tokens[i], predicted_tokens[i], remaining_tokens[i],
            gittins_rank[i], queued_for_s[i], priority[i], admission[i], last_preemption[i], service_tokens[i],
            batch[i],
        )  # fmt: skip
