"""What settings must hold, told in one sentence."""

from __future__ import annotations

from lengthwise.schema.errors import InputError, UnknownNameError


def known(kind: str, name: str, names: tuple[str, ...]) -> None:
    """Raises UnknownNameError unless it is one of the names."""
    if name not in names:
        raise UnknownNameError(kind, name, names)


def whole(name: str, value: object, least: int) -> None:
    """Raises InputError unless it is a whole number, not below the least."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}; it is {value!r}")


def from_zero(name: str, value: float) -> None:
    """Raises InputError unless it is 0 or more."""
    if not value >= 0:
        raise InputError(f"{name} must be at least 0; it is {value!r}")
