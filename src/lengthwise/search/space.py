"""Defines the space of configurations that a search chooses from, and their names."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lengthwise.schema.errors import InputError
from lengthwise.search.limits import Question

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
    "deployment.groups": "{}", "deployment.gpu": "{}", "deployment.decode.gpu": "decode {}", "deployment.model": "{}",
    "deployment.tp": "tp{}", "deployment.pp": "pp{}", "deployment.decode.dp": "decode dp{}",
    "deployment.decode.ep": "decode ep{}", "deployment.decode.redundant_experts": "decode {} redundant",
    "deployment.dp": "dp{}", "deployment.ep": "ep{}", "deployment.redundant_experts": "{} redundant",
    "deployment.replicas": "x{}", "deployment.decode.replicas": "{}", "deployment.decode.tp": "decode tp{}",
    "deployment.decode.pp": "decode pp{}", "deployment.weight_dtype": "{}", "deployment.kv_dtype": "kv {}",
    "engine.name": "{}", "scheduler.policy": "{}", "scheduler.batching": "{}", "scheduler.rank": "{}",
    "scheduler.router": "{}", "scheduler.memory": "{}", "engine.max_num_seqs": "b{}",
    "engine.max_num_batched_tokens": "t{}", "engine.gpu_memory_utilization": "mem{}",
    "engine.enable_prefix_caching": "cache {}", "engine.prefix_cache": "{} cache",
    "engine.kv_offloading.size_gb": "cpu {}GB", "deployment.speculation.num_speculative_tokens": "{} proposed",
}  # fmt: skip
GROUPS = "deployment.groups"
"""Key of a mixture: the tables of its groups of replicas as JSON text, which is hashable like any other setting."""
_REPLICAS, _DECODERS, _DISAGGREGATE = "deployment.replicas", "deployment.decode.replicas", "deployment.disaggregate"
_SWITCH = {True: "on", False: "off"}


@dataclass(frozen=True)
class Kind:
    """A kind of replica that a mixture may have: its settings without a number, and the GPUs and price of one."""

    settings: Settings
    gpus: int
    usd_per_hour: float


def mixtures(kinds: Sequence[Kind], is_of_group: Callable[[str], bool], question: Question) -> Iterator[Settings]:
    """Yield the configurations of two kinds of replicas, of two GPU types, in all numbers within the budget.

    ``is_of_group`` says which settings a group of replicas may have of its own; the others must be the same in both.
    """
    for one, other in itertools.combinations(kinds, 2):
        shared = [{k: v for k, v in kind.settings.items() if not is_of_group(k)} for kind in (one, other)]
        if shared[0] != shared[1] or one.settings["deployment.gpu"] == other.settings["deployment.gpu"]:
            continue
        for count in range(1, _room(one, question, 0, 0.0) + 1):
            for more in range(1, _room(other, question, count * one.gpus, count * one.usd_per_hour) + 1):
                groups = [
                    {key.rpartition(".")[2]: value for key, value in kind.settings.items() if is_of_group(key)}
                    | {"replicas": number}
                    for kind, number in ((one, count), (other, more))
                ]
                yield shared[0] | {GROUPS: json.dumps(groups)}


def _room(kind: Kind, question: Question, gpus: int, usd: float) -> int:
    """Return how many replicas of a kind the budget has room for besides some GPUs and their price."""
    by_price = (question.max_usd_per_hour - usd) / kind.usd_per_hour
    return max(0, math.floor(min((question.max_gpus - gpus) / kind.gpus, by_price + 1e-9)))


def mixture_name(groups: str) -> str:
    """Return the name of a mixture: "2xH100 tp2 + 1xL40S"."""
    names = []
    for group in json.loads(groups):
        more = "".join(f" {_NAMES.get(f'deployment.{k}', _NAMES.get(f'engine.{k}', k + '={}')).format(v)}"
                       for k, v in group.items() if k not in ("gpu", "replicas"))  # fmt: skip
        names.append(f"{group['replicas']}x{_without_folder(group.get('gpu', ''))}{more}")
    return " + ".join(names)


def _without_folder(value: Any) -> Any:
    """Return the name of a TOML file without its folder and ending, and any other value as it is."""
    return Path(value).stem if isinstance(value, str) and value.endswith(".toml") else value


def short_key(key: str) -> str:
    """Return the last part of a key, with the table ``decode`` before it: "tp" and "decode.tp"."""
    table, _, leaf = key.rpartition(".")
    return f"decode.{leaf}" if table == "deployment.decode" else leaf


def names_of(many: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a unique name for each configuration, from the settings that differ: "tp4 x2".

    Where names are equal, "key=value" pairs of the settings that differ between these configurations follow.
    """
    order = list(_NAMES)
    keys = dict.fromkeys(key for settings in many for key in settings)
    varied = [
        key
        for key in sorted(keys, key=lambda key: order.index(key) if key in order else len(order))
        if len({settings_key({key: s.get(key)}) for s in many}) > 1
    ]
    shorts = Counter(short_key(key) for key in varied)
    labels = {key: short_key(key) if shorts[short_key(key)] == 1 else key for key in varied}
    names = []
    for s in many:
        if GROUPS in s:
            s = {**s, GROUPS: mixture_name(s[GROUPS])}  # noqa: PLW2901 - the same settings, as a person reads them
        shown = {k: _SWITCH[s[k]] if s[k] is True or s[k] is False else _without_folder(s[k]) for k in varied if k in s}
        if _DECODERS in s:  # "3P5D": three replicas prefill and five decode
            pair = f"{s.get(_REPLICAS, 1)}P{s[_DECODERS]}D"
            shown = {key: value for key, value in shown.items() if key not in (_REPLICAS, _DISAGGREGATE)}
            shown |= {_DECODERS: pair} if _DECODERS in varied else {}
        else:
            shown.pop(_DISAGGREGATE, None)
        words = (_NAMES.get(k, f"{labels.get(k, k)}={{}}").format(value) for k, value in shown.items())
        names.append(" ".join(words) or ("equal replicas" if len(many) > 1 else "the configuration"))
    for name in [name for name, count in Counter(names).items() if count > 1]:
        alike = [at for at, other in enumerate(names) if other == name]
        own = [key for key in varied if len({settings_key({key: many[at].get(key)}) for at in alike}) > 1]
        rest = [word for word in name.split(" ") if word.partition("=")[0] not in {labels[key] for key in own}]
        for at in alike:
            pairs = (f"{labels[key]}={json.dumps(many[at][key], default=str)}" for key in own if key in many[at])
            names[at] = " ".join([*rest, *pairs])
    return names
