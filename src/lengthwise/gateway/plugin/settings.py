"""How the engine is to be ordered: ``--additional-config '{"lengthwise": {...}}'``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from lengthwise.policy.contracts import Policy
from lengthwise.policy.families import rra
from lengthwise.policy.named_schedulers import resolve
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


@dataclass(frozen=True)
class RraSettings:
    """An RRA schedule (ExeGPT).

    Attributes:
        encode_batch: New requests of one encoding, B_E.
        decode_steps: Decode iterations between two encodings, N_D.
        threshold: Share by which an encoding's prompt tokens, and the decode batch, may leave their means:
            encodings are then resized. None: they are not.
        prompt_tokens: Mean prompt tokens of one encoding, all of its requests together; for ``threshold``.
        decode_batch: Mean decode batch, B_D; for ``threshold``.
        record: File to which a JSON line a phase is added; "": none.
        trust_version: Hold engines of versions, too, on which this was never run.
    """

    encode_batch: int
    decode_steps: int
    threshold: float | None = None
    prompt_tokens: int = 0
    decode_batch: int = 0
    record: str = ""
    trust_version: bool = False

    def __post_init__(self) -> None:
        for one in fields(self):
            value, whole = getattr(self, one.name), one.type == "int"
            if whole and (not isinstance(value, int) or isinstance(value, bool)):
                raise InputError(f"lengthwise: {one.name} must be a whole number; it is {value!r}")
        if not isinstance(self.record, str) or not isinstance(self.trust_version, bool):
            raise InputError(
                "lengthwise: record must be a file's name and trust_version true or false; they are "
                f"{self.record!r} and {self.trust_version!r}"
            )
        self.policy()

    def policy(self) -> Policy:
        """The batching of the simulator that this is.

        Raises:
            InputError: A number is out of its range.
        """
        return rra(
            self.encode_batch,
            self.decode_steps,
            threshold=self.threshold,
            prompt_tokens=self.prompt_tokens,
            decode_batch=self.decode_batch,
        )


def rra_settings_of(additional_config: Any) -> RraSettings:
    """The schedule in vLLM's ``additional_config``.

    Raises:
        InputError: There is none, or it cannot be used.
    """
    told = table_of(additional_config, RraSettings)
    missing = [name for name in ("encode_batch", "decode_steps") if name not in told]
    if missing:
        raise InputError(
            f"lengthwise: a schedule must have {' and '.join(missing)}; give it with "
            '--additional-config \'{"lengthwise": {"encode_batch": 8, "decode_steps": 16}}\''
        )
    return RraSettings(**told)


PREDICTED, CLASS, LATER = "lengthwise_predicted", "lengthwise_class", "lengthwise_later"
MOST_CLASS = 2047
_MOST_LATER = 64


@dataclass(frozen=True, slots=True)
class Hint:
    """Of one request.

    Attributes:
        total_tokens: Predicted length of this run's output.
        after: (generated tokens, length predicted once there are so many), increasing.
        priority: Class; smaller goes first.
        trouble: What was wrong with what was told; "" nothing. What is wrong counts as not told.
    """

    total_tokens: float
    after: tuple[tuple[float, float], ...] = ()
    priority: int = 0
    trouble: str = ""

    def predicted_tokens(self, generated_tokens: int) -> float:
        """The length predicted once there are so many tokens."""
        total = self.total_tokens
        for at, then in self.after:
            if at > generated_tokens:
                break
            total = then
        return total


def hint_of(report: Any, max_tokens: int, prior_tokens: float) -> Hint:
    """What is told of a request; the prior stands in for a length that is absent or cannot be used.

    Args:
        report: The request's ``extra_args``.
        max_tokens: The longest output asked for: no prediction is longer, so none does more harm than that.
        prior_tokens: Length of who is told nothing of.
    """
    report = report if isinstance(report, Mapping) else {}
    most = float(max(1, max_tokens))
    predicted = _length(report.get(PREDICTED))
    trouble = "" if predicted is not None else _trouble(report)
    priority = report.get(CLASS, 0)
    if not isinstance(priority, int) or isinstance(priority, bool):
        priority, trouble = 0, trouble or f"{CLASS} must be a whole number; it is {str(priority)[:40]!r}"
    total = prior_tokens if predicted is None else predicted
    later = _later(report.get(LATER), most) if predicted is not None else ()
    if later is None:
        later, trouble = (), trouble or f"{LATER} must be pairs of numbers, increasing"
    return Hint(min(total, most), later, max(-MOST_CLASS, min(MOST_CLASS, priority)), trouble)


def _trouble(report: Mapping[str, Any]) -> str:
    if PREDICTED not in report:
        return f"no {PREDICTED}"
    return f"{PREDICTED} must be a number from 0 on; it is {str(report[PREDICTED])[:40]!r}"


def _length(value: Any) -> float | None:
    """A length that can be used, or None."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _later(value: Any, most: float) -> tuple[tuple[float, float], ...] | None:
    """Pairs; None: they cannot be used."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or len(value) % 2 or len(value) > 2 * _MOST_LATER:
        return None
    numbers = [number for number in map(_length, value) if number is not None]
    pairs = [(at, min(then, most)) for at, then in zip(numbers[::2], numbers[1::2], strict=False)]
    if len(numbers) != len(value) or any(a[0] >= b[0] for a, b in pairwise(pairs)):
        return None
    return tuple(pairs)
