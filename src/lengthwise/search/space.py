"""Configurations to choose from."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lengthwise.schema.errors import InputError

Settings = dict[str, Any]
Axes = dict[str, tuple[Any, ...]]

MOST_CANDIDATES = 1_000_000


@dataclass(frozen=True)
class Space:
    """Axes (a setting's key and its values) and alternatives, each with axes of its own.

    Every configuration takes one value of each axis and, where there are alternatives, one of them:
    schedulers with different knobs are alternatives.
    """

    axes: Axes
    any_of: tuple[Axes, ...] = ()

    def alternatives(self) -> list[Axes]:
        """All axes of each alternative."""
        return [self.axes | own for own in self.any_of] or [dict(self.axes)]

    def __len__(self) -> int:
        sizes = (_product(len(values) for values in axes.values()) for axes in self.alternatives())
        return sum(sizes)

    def candidates(self) -> Iterator[Settings]:
        """Every configuration once, in a fixed order."""
        seen: set[str] = set()
        for axes in self.alternatives():
            for values in itertools.product(*axes.values()):
                settings = dict(zip(axes, values, strict=True))
                if (key := settings_key(settings)) not in seen:
                    seen.add(key)
                    yield settings

    def values(self) -> Axes:
        """Every key that varies, with all its values in order."""
        found: dict[str, dict[str, Any]] = {}
        for axes in self.alternatives():
            for key, values in axes.items():
                found.setdefault(key, {}).update({json.dumps(v, default=str): v for v in values})
        return {key: tuple(values.values()) for key, values in found.items()}


def checked(space: Space) -> Space:
    """The space, if it can be searched.

    Raises:
        InputError: An axis has no value, or there are too many configurations to write down.
    """
    for axes in space.alternatives():
        for key, values in axes.items():
            if not values:
                raise InputError(f"the axis {key} of the search space must have at least one value; it has none")
    if len(space) > MOST_CANDIDATES:
        raise InputError(
            f"a space must have at most {MOST_CANDIDATES:,} configurations; this one has {len(space):,}. Take values "
            'out, or set search.strategy = "bayesian" with search.trials'
        )
    return space


def settings_key(settings: Mapping[str, Any]) -> str:
    """One text for equal settings, whatever their order."""
    return json.dumps(dict(settings), sort_keys=True, default=str)


def names_of(many: Sequence[Mapping[str, Any]]) -> list[str]:
    """A short name for each of many settings: what differs among them."""
    varied = [key for key in _keys(many) if len({settings_key({key: s.get(key)}) for s in many}) > 1]
    names = [" ".join(_word(key, s[key]) for key in varied if key in s) or "the only one" for s in many]
    if len(set(names)) == len(names):
        return names
    return [" ".join(f"{key}={json.dumps(s[key], default=str)}" for key in varied if key in s) for s in many]


_WORDS = {
    "deployment.gpu": "{}",
    "deployment.model": "{}",
    "deployment.tp": "tp{}",
    "deployment.pp": "pp{}",
    "deployment.replicas": "x{}",
    "deployment.weight_dtype": "{}",
    "deployment.kv_dtype": "kv {}",
    "scheduler.policy": "{}",
    "scheduler.batching": "{}",
    "scheduler.rank": "{}",
    "scheduler.router": "{}",
    "scheduler.memory": "{}",
    "engine.max_num_seqs": "b{}",
    "engine.max_num_batched_tokens": "t{}",
    "engine.gpu_memory_utilization": "mem{}",
}


def _word(key: str, value: Any) -> str:
    return _WORDS.get(key, key.rpartition(".")[2] + "={}").format(value)


def _keys(many: Sequence[Mapping[str, Any]]) -> list[str]:
    order = list(_WORDS)
    keys = dict.fromkeys(key for settings in many for key in settings)
    return sorted(keys, key=lambda key: order.index(key) if key in order else len(order))


def _product(sizes: Iterator[int]) -> int:
    whole = 1
    for size in sizes:
        whole *= size
    return whole
