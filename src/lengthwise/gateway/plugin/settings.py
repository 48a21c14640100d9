"""How the engine is to be ordered: ``--additional-config '{"lengthwise": {...}}'``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lengthwise.policy.contracts import Policy
from lengthwise.policy.named import resolve
from lengthwise.schema.errors import InputError, UnknownNameError

_UNKNOWN_HERE = ("index_tokens", "service_tokens", "batch")
"""What a rank may be told elsewhere, and nobody knows inside an engine."""


@dataclass(frozen=True)
class Settings:
    """Who goes first, and who makes room; the defaults are those of the gateway's mode ``isrtf``.

    The takeover alone decides who gives way: the price of a cut that the gateway learns of engines is not known here.

    Attributes:
        rank: Name of a rank policy.
        takeover: Name of a takeover policy: when a waiting request takes a running one's place. "never": who
            runs leaves only for want of memory (SRTF).
        window_tokens: Predictions are read again, and places looked at, every so many tokens.
        max_wait_s: Who has waited so long in all goes before everybody who has not, in order of arrival.
        max_preemptions: A request gives way at most so often.
        cuts_per_s: All together give way at most so often.
        prior_tokens: Length of requests of which nothing is told.
        trust_version: Order engines of versions, too, on which this was never run.
    """

    rank: str = "srtf"
    takeover: str = "worth(factor=100)"
    window_tokens: int = 50
    max_wait_s: float = 60.0
    max_preemptions: int = 3
    cuts_per_s: float = 10.0
    prior_tokens: float = 256.0
    trust_version: bool = False

    def __post_init__(self) -> None:
        for one in fields(self):
            _check(one.name, str(one.type), getattr(self, one.name))
        self.rank_policy()
        resolve("takeover", self.takeover)

    def rank_policy(self) -> Policy:
        """The rank.

        Raises:
            InputError: There is none of this name, or it needs to be told what an engine does not know.
        """
        policy = resolve("rank", self.rank)
        if policy.uses(*_UNKNOWN_HERE):
            raise InputError(
                f"lengthwise: inside an engine a rank is told all but {', '.join(_UNKNOWN_HERE)}; "
                f"{self.rank!r} needs them. Let the gateway order by it"
            )
        return policy

    @property
    def takes_over(self) -> bool:
        """Whether anybody who runs may be made to give way to somebody who waits."""
        return self.takeover != "never" and self.max_preemptions > 0 and self.cuts_per_s > 0

    @property
    def between_cuts_s(self) -> float:
        """The shortest time between two who give way."""
        return 1 / self.cuts_per_s if self.cuts_per_s > 0 else math.inf


def _check(name: str, kind: str, value: Any) -> None:
    """Raises InputError for a value of another type, or one below the least."""
    wanted = {"str": str, "bool": bool, "int": int}.get(kind, int | float)
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind != "bool"):
        raise InputError(f"lengthwise: {name} must be of type {kind}; it is {value!r}")
    least = 1 if name == "window_tokens" else 0
    if isinstance(value, int | float) and not value >= least:
        raise InputError(f"lengthwise: {name} must be at least {least}; it is {value!r}")


def settings_of(additional_config: Any) -> Settings:
    """The settings in vLLM's ``additional_config``.

    Raises:
        InputError: They cannot be used.
    """
    return Settings(**table_of(additional_config, Settings))


def table_of(additional_config: Any, settings: type) -> dict[str, Any]:
    """What is told under "lengthwise", all of it fields of the settings.

    Raises:
        InputError: It is no table, or names something else.
    """
    told = additional_config.get("lengthwise", {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(told, Mapping):
        raise InputError(f'additional_config: "lengthwise" must be a table; it is {told!r}')
    known = [one.name for one in fields(settings)]
    for name in told:
        if name not in known:
            raise UnknownNameError("setting of lengthwise", str(name), known)
    return dict(told)
