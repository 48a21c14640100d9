"""The conformance kit of policies: ``check_policy(my_policy)`` in a test of one's own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lengthwise import policy as room
from lengthwise.engine import simulate
from lengthwise.policy import Policy
from lengthwise.policy.contracts import ARGUMENTS
from lengthwise.schema.errors import LengthwiseError
from lengthwise.schema.records import Records, Status
from lengthwise.testing._arguments import calls, fault
from lengthwise.testing._worlds import World, worlds

Check = Callable[[Policy, Sequence[World]], None]

_COMPILED = ("compiles", "compiled_as_interpreted", "kernel_as_reference")
_MAX_WAITS_S = (0.0, 0.05, 0.3)


def check_policy(
    policy: Policy, *, compiled: bool = True, count: int = 6, seed: int = 0, skip: Sequence[str] = ()
) -> list[str]:
    """The names of the checks that a policy passed: all that there are for its axis.

    Works in any test runner, or without one.

    Args:
        policy: Of any axis, made by a decorator of ``lengthwise.policy``.
        compiled: Whether it must compile; without, it is looked at in the reference engine alone.
        count: Small worlds in which it is tried.
        seed: Of the worlds.
        skip: Names of checks to leave out (see ``POLICY_CHECKS``).

    Raises:
        AssertionError: A check failed; one sentence says what must hold and what came.
    """
    _require(
        isinstance(policy, Policy), f"a policy is made by a decorator of lengthwise.policy; got {policy!r}"
    )
    tried = worlds(policy, count, seed)
    left_out = {*skip, *(() if compiled else _COMPILED)}
    passed = [name for name in POLICY_CHECKS if name not in left_out]
    for name in passed:
        POLICY_CHECKS[name](policy, tried)
    return passed


def answers_in_range(policy: Policy, _: Sequence[World]) -> None:
    """Every answer is a number that its axis can use: no NaN, no bin, replica or block that is not there."""
    function = room.interpreted(policy)
    for arguments in calls(policy):
        got = _called(policy, function, arguments)
        given = dict(zip(ARGUMENTS[policy.axis], arguments, strict=True))
        wrong = fault(policy, got, given)
        _require(not wrong, f"{_who(policy)} {wrong}; it returned {got!r} for {_shown(policy, given)}")


def same_answer_again(policy: Policy, _: Sequence[World]) -> None:
    """The same arguments get the same answer: no randomness, no clock, no memory of earlier calls."""
    function = room.interpreted(policy)
    first, second = ([_called(policy, function, a) for a in calls(policy)] for _ in range(2))
    _require(first == second, f"{_who(policy)} must answer the same arguments alike; it changed its mind")


def compiles(policy: Policy, _: Sequence[World]) -> None:
    """The kernel can take it."""
    try:
        room.compiled(policy)
    except LengthwiseError as error:
        raise AssertionError(f"{_who(policy)} must compile: {error}") from error


def compiled_as_interpreted(policy: Policy, _: Sequence[World]) -> None:
    """Compiled and interpreted it says the same, to the last bit."""
    fast, slow = room.compiled(policy), room.interpreted(policy)
    for arguments in calls(policy):
        one, other = fast(*arguments), slow(*arguments)
        given = dict(zip(ARGUMENTS[policy.axis], arguments, strict=True))
        _require(
            one == other,
            f"{_who(policy)} must say the same compiled and interpreted; it said {one!r} and {other!r} for "
            f"{_shown(policy, given)}",
        )


def nobody_is_lost(policy: Policy, tried: Sequence[World]) -> None:
    """Every request ends, or could never fit."""
    for world in tried:
        ended = _run(policy, world).requests.status
        left = ~np.isin(ended, (Status.FINISHED, Status.REJECTED))
        _require(
            not left.any(), f"{_who(policy)} must let every request end; {left.sum()} did not in {world}"
        )


def waiting_is_bounded(policy: Policy, tried: Sequence[World]) -> None:
    """With ``max_wait_s`` nobody who came later passes who has waited so long; the wait ends with those before it."""
    for world in tried:
        for max_wait_s in _MAX_WAITS_S:
            _bounded(policy, world.bounded(max_wait_s))


def _bounded(policy: Policy, world: World) -> None:
    r, s = _run(policy, world).requests, world.deployment.scheduler
    overdue_s = r.arrival_s + s.max_wait_s
    central = room.resolve("router", s.router) == room.known("router")["central"]
    for i in np.flatnonzero(r.scheduled_s > overdue_s):
        line = (r.replica >= 0) if central else (r.replica == r.replica[i])
        earlier = np.arange(len(r.arrival_s)) < i
        passed_by = line & ~earlier & (r.scheduled_s > overdue_s[i]) & (r.scheduled_s < r.scheduled_s[i])
        _require(
            not passed_by.any(),
            f"{_who(policy)}: after max_wait_s nobody may be passed by who came later; request {i} was, by request "
            f"{np.argmax(passed_by)}, in {world}",
        )
        before = line & (earlier | (r.scheduled_s <= overdue_s[i])) & (r.finished_s > overdue_s[i])
        last_s = r.finished_s[before].max(initial=overdue_s[i])
        _require(
            r.scheduled_s[i] <= last_s,
            f"{_who(policy)}: who has waited max_wait_s must be admitted when those before it have ended "
            f"({last_s:g} s); request {i} was at {r.scheduled_s[i]:g} s, in {world}",
        )


def reads_no_true_length(policy: Policy, tried: Sequence[World]) -> None:
    """Until a time, outputs that are still to come then change no decision."""
    for world in tried:
        limit_s = 0.6 * _run(policy, world).end_s
        before = _run(policy, world, time_limit_s=limit_s)
        running = before.requests.status == Status.UNFINISHED
        other = before.requests.output_tokens + 1 + np.arange(len(running)) % 7
        secret = np.where(running, other, world.workload.output_tokens)
        changed = dataclasses.replace(world.workload, output_tokens=secret)
        after = _run(policy, World(changed, world.deployment), time_limit_s=limit_s)
        differs = _difference(before, after)
        _require(
            not differs,
            f"{_who(policy)} must not depend on outputs still to come; {differs} did, before {limit_s:g} s in {world}",
        )


def same_run_again(policy: Policy, tried: Sequence[World]) -> None:
    """The same world gives the same records."""
    for world in tried:
        differs = _difference(_run(policy, world), _run(policy, world))
        _require(not differs, f"{_who(policy)} must repeat itself; {differs} differ in two runs of {world}")


def kernel_as_reference(policy: Policy, tried: Sequence[World]) -> None:
    """The compiled kernel and the plain reference agree to the last bit."""
    for world in tried:
        differs = _difference(_run(policy, world, engine="kernel"), _run(policy, world))
        _require(not differs, f"{_who(policy)}: kernel and reference must agree; {differs} differ in {world}")


POLICY_CHECKS: dict[str, Check] = {
    "answers_in_range": answers_in_range,
    "same_answer_again": same_answer_again,
    "compiles": compiles,
    "compiled_as_interpreted": compiled_as_interpreted,
    "nobody_is_lost": nobody_is_lost,
    "waiting_is_bounded": waiting_is_bounded,
    "reads_no_true_length": reads_no_true_length,
    "same_run_again": same_run_again,
    "kernel_as_reference": kernel_as_reference,
}
"""What a policy must keep, in the order in which it is looked at."""


def _run(
    policy: Policy, world: World, *, engine: str = "reference", time_limit_s: float = math.inf
) -> Records:
    try:
        return simulate(world.workload, world.deployment, engine=engine, time_limit_s=time_limit_s)
    except LengthwiseError as error:
        raise AssertionError(f"{_who(policy)} must run without an error in {world}: {error}") from error


def _difference(a: Records, b: Records) -> str:
    """The first column of the requests or steps that differs, by name; "" where none does."""
    for part in ("requests", "steps"):
        one, other = getattr(a, part), getattr(b, part)
        for field in dataclasses.fields(one):
            mine, theirs = getattr(one, field.name), getattr(other, field.name)
            if not np.array_equal(mine, theirs, equal_nan=mine.dtype.kind == "f"):
                return f"{part}.{field.name}"
    return ""


def _called(policy: Policy, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        given = dict(zip(ARGUMENTS[policy.axis], arguments, strict=True))
        raise AssertionError(
            f"{_who(policy)} must take all that its axis can ask; it raised {type(error).__name__}: {error} for "
            f"{_shown(policy, given)}"
        ) from error


def _who(policy: Policy) -> str:
    return f"{policy.axis} policy {policy.name!r}"


def _shown(policy: Policy, given: dict[str, Any]) -> str:
    return ", ".join(f"{name}={given[name]}" for name in policy.arguments) or "no argument"


def _require(good: bool, message: str) -> None:
    if not good:
        raise AssertionError(message)
