"""Run the named checks of a conformance kit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any


def require(condition: bool, message: str) -> None:
    """Raise AssertionError with the message unless the condition holds."""
    if not condition:
        raise AssertionError(message)


def run_checks(
    checks: Mapping[str, Callable[..., None]], skip: Collection[str], arguments: Callable[[], tuple[Any, ...]]
) -> list[str]:
    """Run all checks but ``skip``, each with new arguments. Return the names of the checks that passed."""
    passed = [name for name in checks if name not in skip]
    for name in passed:
        checks[name](*arguments())
    return passed
