"""The one tree of errors. A message says what must hold, what came, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LengthwiseError(Exception):
    """Any error that lengthwise raises on purpose."""


class InputError(LengthwiseError):
    """You: something that was given cannot be used. The CLI exits with 2."""


class InternalError(LengthwiseError):
    """Us: a law of the engine was broken. Please report it. The CLI exits with 1."""


class UnknownNameError(InputError):
    """A name that is not in a catalog; the message lists the nearest known ones.

    Args:
        kind: What the name should be, in the singular ("model", "GPU", "rank policy").
        name: What was given.
        known: The names that would have worked.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(known)
        lowered = {k.lower(): k for k in known}
        near = difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.5)
        shown = ", ".join(lowered[k] for k in near) if near else ", ".join(known)
        hint = f"Did you mean: {shown}?" if near else f"Known are: {shown}."
        super().__init__(f"there is no {kind} named {name!r}. {hint}")
        self.kind, self.name, self.known = kind, name, known


class ScenarioError(InputError):
    """A scenario file or a ``--set`` holds a key or a value that cannot be used."""


class TraceError(InputError):
    """A row of a trace cannot be used; the message names file and line."""


class ProfileError(InputError):
    """A profile lacks an operator, a TP degree or a range that the deployment needs."""


class DoesNotFitError(InputError):
    """The model does not fit the GPUs; the message says by how much and what would fit."""


class ScheduleError(InputError):
    """No schedule meets the latency bound; the message says the least latency there is and what limits it."""


class PolicyError(InputError):
    """A policy raised, returned NaN, has a wrong signature, or never admits a request."""


class OutputError(InputError):
    """A file that was asked for cannot be written."""


class EngineError(InputError):
    """A real engine did not start, ended, or was not ready in time; the message holds what it said last."""


class MissingExtraError(InputError):
    """A feature needs an optional dependency; the message names the extra to install."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(f"{feature} needs an optional dependency: pip install 'lengthwise[{extra}]'")
        self.extra = extra
