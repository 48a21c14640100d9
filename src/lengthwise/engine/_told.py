"""What is said when a policy goes wrong: which of them, and what to look at."""

from __future__ import annotations

from lengthwise.engine._setup import Setup
from lengthwise.schema.errors import PolicyError


def policy_raised(setup: Setup, error: Exception) -> PolicyError:
    """The error of a run in which a policy raised; users' own are named before ours."""
    each = setup.policies.each() + (setup.there.policies.each() if setup.there else ())
    own = [p for p in each if not p.builtin] or each
    names = ", ".join(f"{p.axis} policy {p.name!r}" for p in own)
    return PolicyError(f"{names} raised {type(error).__name__}: {error}")


def stuck(setup: Setup, request: int) -> str:
    """What a run says in which somebody waits and nothing will happen any more."""
    p = setup.policies
    return (
        f"request {request} waits for ever: nothing runs, nothing will arrive, and batching policy "
        f"{p.batching.name!r} with memory policy {p.memory.name!r} does not let it go on "
        f"({int(setup.prompt[request])} prompt tokens, {setup.total_blocks} blocks of {setup.block_size})"
    )
