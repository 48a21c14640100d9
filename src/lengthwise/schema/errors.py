"""Defines the tree of errors. A message states the requirement, the given value, and a remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class LengthwiseError(Exception):
    """Base of all errors that lengthwise raises on purpose. A search raises it if a worker process dies."""


class InputError(LengthwiseError):
    """The user must correct an input, or an engine that the run needs. The CLI exits with 2."""


class InternalError(LengthwiseError):
    """An invariant of lengthwise is violated. Please report the error. The CLI exits with 1."""


class UnknownNameError(InputError):
    """No ``kind`` ("model") has this ``name``. The message has similar or all ``known`` ones, and ``alternative``."""

    def __init__(self, kind: str, name: str, known: Iterable[str], alternative: str = "") -> None:
        known = sorted(known)
        lowered = {k.lower(): k for k in known}
        near = difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.5)
        shown = ", ".join(lowered[k] for k in near) if near else ", ".join(known) or "none"
        hint = f"Did you mean: {shown}?" if near else f"Known are: {shown}."
        more = f" Or give {alternative}." if alternative else ""
        super().__init__(f"there is no {kind} named {name!r}. {hint}{more}")
        self.kind, self.name, self.known = kind, name, known


class ScenarioError(InputError):
    """A scenario file or ``--set`` has an invalid key or value."""


class TraceError(InputError):
    """A trace file or a row of it cannot be used. The message names the file and, for a row, the line."""


class ProfileError(InputError):
    """A profile lacks an operator, a TP degree or a range that the deployment needs."""


class DoesNotFitError(InputError):
    """The model does not fit the GPUs. The message gives the shortfall and a configuration that fits."""

    smallest_tp: int | None = None  # the smallest tp that fits, if one does and the other settings stay


class ScheduleError(InputError):
    """No schedule meets the latency bound, or the engines support none that does. The message gives the cause."""


class PolicyError(InputError):
    """A policy raised, returned NaN, has a wrong signature, or never admits a request."""


class OutputError(InputError):
    """A requested file cannot be written."""


class EngineError(InputError):
    """A real engine did not start, exited, or was not ready in time. The message holds its last output."""


class MissingExtraError(InputError):
    """A feature needs an optional dependency. The message names the extra to install."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs an optional dependency: pip install 'lengthwise[{extra}]'")
        self.extra = extra


@contextmanager
def error_note(note: str) -> Iterator[None]:
    """Add a note to an InputError that the block raises."""
    try:
        yield
    except InputError as error:
        error.add_note(note)
        raise
