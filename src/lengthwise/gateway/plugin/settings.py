"""Parse the vLLM plug-in's settings (``--additional-config '{"lengthwise": {...}}'``) and the hints of requests."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from lengthwise.policy.contracts import Policy
from lengthwise.policy.families import rra
from lengthwise.policy.named_schedulers import resolve
from lengthwise.schema.errors import InputError, UnknownNameError

_UNAVAILABLE = ("gittins_rank", "service_tokens", "batch")  # arguments of ranks that are unknown inside an engine


@dataclass(frozen=True)
class Settings:
    """Settings of order and preemption. The defaults equal the defaults of the gateway's mode ``isrtf``.

    The scheduler looks for a preemption every ``window_tokens`` steps and when the queue changes. ``max_preemptions``
    limits the preemptions of one request, ``preemptions_per_s`` those of all. With ``preemption`` "never", only a lack
    of memory preempts. ``prior_tokens`` is the length of a request without a hint. With ``reserve``, a request is
    admitted only while the predicted peak of KV tokens fits, with a margin that adapts until recomputation takes the
    share ``max_recompute_share`` of the decoding time of idle memory, and until preemptions for lack of memory stay
    within ``max_preemptions_per_request``. ``trust_version`` allows untested versions of vLLM.
    """

    rank: str = "srtf"
    preemption: str = "worth(factor=100)"
    window_tokens: int = 50
    max_wait_s: float = 60.0
    max_preemptions: int = 3
    preemptions_per_s: float = 10.0
    prior_tokens: float = 256.0
    reserve: bool = False
    max_recompute_share: float = 0.2
    max_preemptions_per_request: float = math.inf
    trust_version: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            name, kind, value = field.name, str(field.type), getattr(self, field.name)
            expected = {"str": str, "bool": bool, "int": int}.get(kind, int | float)
            if not isinstance(value, expected) or (isinstance(value, bool) and kind != "bool"):
                raise InputError(f"lengthwise: {name} must be of type {kind}; it is {value!r}")
            minimum = 1 if name == "window_tokens" else 0
            if isinstance(value, int | float) and not value >= minimum:
                raise InputError(f"lengthwise: {name} must be at least {minimum}; it is {value!r}")
        self.rank_policy()
        resolve("preemption", self.preemption)

    def rank_policy(self) -> Policy:
        """Return the rank. Raises InputError if it is unknown or needs a quantity that is unknown inside an engine."""
        policy = resolve("rank", self.rank)
        if needed := [name for name in _UNAVAILABLE if policy.uses(name)]:
            rule = f"the rank {self.rank!r} needs {', '.join(needed)}, unknown inside an engine"
            raise InputError(f"lengthwise: {rule}. Use it in the gateway")
        return policy


def settings_of(additional_config: Any) -> Settings:
    """Return the settings in vLLM's ``additional_config``. Raises InputError if they are invalid."""
    settings = Settings(**(table := _table_of(additional_config, Settings)))
    for name in ("max_recompute_share", "max_preemptions_per_request"):
        if name in table and not settings.reserve:
            raise InputError(f"lengthwise: {name} needs reserve = true; set it, or leave {name} out")
    return settings


def _table_of(additional_config: Any, settings: type) -> dict[str, Any]:
    """Return the table "lengthwise" of vLLM's settings. Raises InputError if it is no table or has unknown keys."""
    table = additional_config.get("lengthwise", {}) if isinstance(additional_config, Mapping) else {}
    if not isinstance(table, Mapping):
        raise InputError(f'additional_config: "lengthwise" must be a table; it is {table!r}')
    known = [field.name for field in fields(settings)]
    for name in table:
        if name not in known:
            raise UnknownNameError("setting of lengthwise", str(name), known)
    return dict(table)


@dataclass(frozen=True)
class RraSettings:
    """An RRA schedule (ExeGPT): ``prefill_batch`` is B_E, ``decode_steps`` N_D, ``decode_batch`` the mean B_D.

    Prefills are resized if their prompt tokens or the decode batch deviate from the mean by more than the share
    ``threshold``. If it is None, they are never resized. ``prompt_tokens`` is the mean of a complete prefill batch.
    The file ``record`` gets a line for each phase.
    """

    prefill_batch: int
    decode_steps: int
    threshold: float | None = None
    prompt_tokens: int = 0
    decode_batch: int = 0
    record: str = ""
    trust_version: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (not isinstance(value, int) or isinstance(value, bool)):
                raise InputError(f"lengthwise: {field.name} must be an integer; it is {value!r}")
        if not isinstance(self.record, str) or not isinstance(self.trust_version, bool):
            rule = "record must be a file's name and trust_version true or false"
            raise InputError(f"lengthwise: {rule}; they are {self.record!r} and {self.trust_version!r}")
        self.policy()

    def policy(self) -> Policy:
        """Return the schedule as a batching policy of the simulator. Raises InputError for numbers out of range."""
        means = {"prompt_tokens": self.prompt_tokens, "decode_batch": self.decode_batch}
        return rra(self.prefill_batch, self.decode_steps, threshold=self.threshold, **means)


def rra_settings_of(additional_config: Any) -> RraSettings:
    """Return the schedule in vLLM's ``additional_config``. Raises InputError if it is missing or invalid."""
    table = _table_of(additional_config, RraSettings)
    if missing := [name for name in ("prefill_batch", "decode_steps") if name not in table]:
        example = '--additional-config \'{"lengthwise": {"prefill_batch": 8, "decode_steps": 16}}\''
        raise InputError(f"lengthwise: a schedule must have {' and '.join(missing)}; give it with {example}")
    return RraSettings(**table)


PREDICTED, CLASS, LATER = "lengthwise_predicted", "lengthwise_class", "lengthwise_later"
MAX_CLASS = 2047
_MAX_LATER = 64


@dataclass(frozen=True, slots=True)
class Hint:
    """A request's predicted length and priority class."""

    total_tokens: float  # predicted before the first token
    later: tuple[tuple[float, float], ...] = ()  # (generated tokens, length predicted from then on), increasing
    priority: int = 0
    error: str = ""  # cause if a part of the hint is missing or invalid; "" none

    def predicted_tokens(self, generated_tokens: int) -> float:
        """Return the predicted length of a request that has generated ``generated_tokens`` tokens."""
        reached = [prediction for tokens, prediction in self.later if tokens <= generated_tokens]
        return reached[-1] if reached else self.total_tokens


def hint_of(extra_args: Any, max_tokens: int, prior_tokens: float) -> Hint:
    """Return the hint in a request's ``extra_args``. ``prior_tokens`` replaces a missing or invalid length."""
    values = extra_args if isinstance(extra_args, Mapping) else {}
    limit = float(max(1, max_tokens))
    predicted = _length(values.get(PREDICTED))
    error = ""
    if PREDICTED not in values:
        error = f"no {PREDICTED}"
    elif predicted is None:
        error = f"{PREDICTED} must be a number of at least 0; it is {str(values[PREDICTED])[:40]!r}"
    priority = values.get(CLASS, 0)
    if not isinstance(priority, int) or isinstance(priority, bool):
        priority, error = 0, error or f"{CLASS} must be an integer; it is {str(priority)[:40]!r}"
    total = prior_tokens if predicted is None else predicted
    later = _parse_updates(values.get(LATER), limit) if predicted is not None else ()
    if later is None:
        later, error = (), error or f"{LATER} must be pairs of numbers, increasing"
    return Hint(min(total, limit), later, max(-MAX_CLASS, min(MAX_CLASS, priority)), error)


def _length(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= sys.float_info.max else None


def _parse_updates(value: Any, limit: float) -> tuple[tuple[float, float], ...] | None:
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or len(value) % 2 or len(value) > 2 * _MAX_LATER:
        return None
    numbers = [number for number in map(_length, value) if number is not None]
    pairs = [(at, min(total, limit)) for at, total in zip(numbers[::2], numbers[1::2], strict=False)]
    if len(numbers) != len(value) or any(a[0] >= b[0] for a, b in pairwise(pairs)):
        return None
    return tuple(pairs)
