"""Whether two runs are of one model on one deployment, by what they say of themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lengthwise import catalog
from lengthwise.schema.measured import Measured, shape_facts

_SETTINGS = ("tp", "pp", "replicas", "max_num_seqs", "max_num_batched_tokens")
_SETTLE = "`lengthwise bench URL SCENARIO.toml --records FILE` keeps the model's shape with the records, and settles it"


def doubts_of_origin(a: Measured, b: Measured) -> Iterator[str]:
    """Models are held against each other by shape, whatever they are called; the rest by what both tell."""
    yield from _models(a, b)
    ours, theirs = _gpu(a), _gpu(b)
    if ours and theirs and ours != theirs:
        yield f"They are of different GPUs: {ours} and {theirs}."
    engines = [str(run.facts.get("engine") or "") for run in (a, b)]
    if all(engines) and engines[0] != engines[1]:
        yield f"They are of different engines: {engines[0]} and {engines[1]}."
    apart = [
        f"{name} {_behind(a)[name]} and {_behind(b)[name]}"
        for name in _SETTINGS
        if name in _behind(a) and name in _behind(b) and _behind(a)[name] != _behind(b)[name]
    ]
    if apart:
        yield f"Their deployments differ: {', '.join(apart)}."


def _models(a: Measured, b: Measured) -> Iterator[str]:
    names, shapes = [_model(run) for run in (a, b)], [_shape(run) for run in (a, b)]
    if shapes[0] is not None and shapes[1] is not None:
        apart = [
            f"{key} {shapes[0][key]} and {shapes[1][key]}"
            for key in shapes[0]
            if key in shapes[1] and shapes[0][key] != shapes[1][key]
        ]
        if apart:
            yield f"They are of different models: {names[0]} and {names[1]} ({', '.join(apart)})."
    elif all(names) and names[0] != names[1]:
        unknown = " and ".join(
            f"{letter} tells only the name {name}"
            for letter, name, shape in zip("AB", names, shapes, strict=True)
            if shape is None
        )
        yield (
            f"They may be of different models, {names[0]} and {names[1]}: {unknown}, under which it was served. "
            f"{_SETTLE}."
        )


def _behind(run: Measured) -> Mapping[str, Any]:
    told = run.facts.get("deployment")
    return told if isinstance(told, Mapping) else {}


def _model(run: Measured) -> str:
    return str(_behind(run).get("model") or run.facts.get("model") or "")


def _shape(run: Measured) -> Mapping[str, Any] | None:
    """As the records keep it; else of the model that the catalog knows by that name."""
    told = _behind(run).get("model_shape")
    if isinstance(told, Mapping):
        return told
    known = catalog.served_model(_model(run)) if _model(run) else None
    return None if known is None else shape_facts(known)


def _gpu(run: Measured) -> str:
    """By the catalog's name, where it has one."""
    name = str(_behind(run).get("gpu") or run.facts.get("gpu") or "")
    known = catalog.told_gpu(name) if name else None
    return name if known is None else known.name
