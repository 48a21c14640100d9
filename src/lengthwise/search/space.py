"""Defines the space of configurations that a search chooses from, and their names."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lengthwise.schema.errors import InputError

Settings = dict[str, Any]
Axes = dict[str, tuple[Any, ...]]

MAX_CANDIDATES = 1_000_000


@dataclass(frozen=True)
class Space:
    """Axes, which map the key of a setting ("deployment.tp") to its values, and alternatives with further axes.

    A configuration takes one value of each axis in ``axes`` and, if there are alternatives, chooses one entry of
    ``any_of`` and takes one value of each of its axes. For example, schedulers with different parameters are
    alternatives. ``len`` counts configurations that are in several alternatives several times.
    """

    axes: Axes
    any_of: tuple[Axes, ...] = ()

    def alternatives(self) -> list[Axes]:
        """Return the common axes together with those of each alternative; without alternatives, the common axes."""
        return [self.axes | own for own in self.any_of] or [dict(self.axes)]

    def __len__(self) -> int:
        return sum(math.prod(len(values) for values in axes.values()) for axes in self.alternatives())

    def candidates(self) -> Iterator[Settings]:
        """Yield every configuration once, in a fixed order."""
        seen: set[str] = set()
        for axes in self.alternatives():
            for values in itertools.product(*axes.values()):
                settings = dict(zip(axes, values, strict=True))
                if (key := settings_key(settings)) not in seen:
                    seen.add(key)
                    yield settings

    def values(self) -> Axes:
        """Return all axes, each with the values that it has in any alternative."""
        found: dict[str, dict[str, Any]] = {}
        for axes in self.alternatives():
            for key, values in axes.items():
                found.setdefault(key, {}).update({json.dumps(v, default=str): v for v in values})
        return {key: tuple(values.values()) for key, values in found.items()}


def checked(space: Space) -> Space:
    """Return the space if it can be searched.

    Raises InputError if an axis has no value, or there are too many configurations to enumerate.
    """
    for axes in space.alternatives():
        for key, values in axes.items():
            if not values:
                raise InputError(f"the axis {key} of the search space must have at least one value; it has none")
    if len(space) > MAX_CANDIDATES:
        raise InputError(
            f"a space must have at most {MAX_CANDIDATES:,} configurations; this one has {len(space):,}. Remove values, "
            'or set search.strategy = "bayesian" with search.trials'
        )
    return space


def settings_key(settings: Mapping[str, Any]) -> str:
    """Return a text that is the same for equal settings in any order."""
    return json.dumps(dict(settings), sort_keys=True, default=str)


_NAMES = {
    "deployment.gpu": "{}", "deployment.decode.gpu": "decode {}", "deployment.model": "{}",
    "deployment.tp": "tp{}", "deployment.pp": "pp{}", "deployment.decode.ep": "decode ep{}",
    "deployment.dp": "dp{}", "deployment.ep": "ep{}", "deployment.redundant_experts": "{} redundant",
    "deployment.replicas": "x{}", "deployment.decode.replicas": "{}", "deployment.decode.tp": "decode tp{}",
    "deployment.decode.pp": "decode pp{}", "deployment.weight_dtype": "{}", "deployment.kv_dtype": "kv {}",
    "engine.name": "{}", "scheduler.policy": "{}", "scheduler.batching": "{}", "scheduler.rank": "{}",
    "scheduler.router": "{}", "scheduler.memory": "{}", "engine.max_num_seqs": "b{}",
    "engine.max_num_batched_tokens": "t{}", "engine.gpu_memory_utilization": "mem{}",
    "engine.enable_prefix_caching": "cache {}", "engine.prefix_cache": "{} cache",
    "engine.kv_offloading.size_gb": "cpu {}GB",
}  # fmt: skip
_REPLICAS, _DECODERS, _DISAGGREGATE = "deployment.replicas", "deployment.decode.replicas", "deployment.disaggregate"
_SWITCH = {True: "on", False: "off"}


def short_key(key: str) -> str:
    """Return the last part of a key, with the table ``decode`` before it: "tp" and "decode.tp"."""
    table, _, leaf = key.rpartition(".")
    return f"decode.{leaf}" if table == "deployment.decode" else leaf


def names_of(many: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a unique name for each configuration, from the settings that differ: "tp4 x2", else "key=value" pairs."""
    order = list(_NAMES)
    keys = dict.fromkeys(key for settings in many for key in settings)
    varied = [
        key
        for key in sorted(keys, key=lambda key: order.index(key) if key in order else len(order))
        if len({settings_key({key: s.get(key)}) for s in many}) > 1
    ]
    names = []
    for s in many:
        shown = {k: _SWITCH[s[k]] if s[k] is True or s[k] is False else s[k] for k in varied if k in s}
        if _DECODERS in s:  # "3P5D": three replicas prefill and five decode
            pair = f"{s.get(_REPLICAS, 1)}P{s[_DECODERS]}D"
            shown = {key: value for key, value in shown.items() if key not in (_REPLICAS, _DISAGGREGATE)}
            shown |= {_DECODERS: pair} if _DECODERS in varied else {}
        else:
            shown.pop(_DISAGGREGATE, None)
        words = (_NAMES.get(k, f"{short_key(k)}={{}}").format(value) for k, value in shown.items())
        names.append(" ".join(words) or ("equal replicas" if len(many) > 1 else "the configuration"))
    if len(set(names)) == len(names):
        return names
    return [" ".join(f"{key}={json.dumps(s[key], default=str)}" for key in varied if key in s) for s in many]
