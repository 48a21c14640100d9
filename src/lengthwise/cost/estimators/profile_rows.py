"""Selection of a profile's rows that apply to a deployment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise import catalog
from lengthwise.cost.estimators.points import Target
from lengthwise.cost.operator_work import layer_share
from lengthwise.schema.cost_tables import Reach
from lengthwise.schema.errors import InputError, ProfileError
from lengthwise.schema.profile import OPERATOR_PARTS, Profile
from lengthwise.schema.specs import GpuSpec, ModelFacts, ModelSpec, dtype_name


@dataclass(frozen=True)
class Source:
    """Rows of a profile in the deployment's dtype, and what they were measured on."""

    shard: Profile
    kernels: Profile
    target: Target
    same: bool
    same_gpu: bool
    notes: tuple[str, ...]


def rows_for(profile: Profile, target: Target, backend: str = "") -> Source:
    """Return the rows that apply to a deployment; of the backend given, if an operator has rows of it."""
    notes: list[str] = []
    rows = _of_dtype(profile, target, notes)
    rows = _of_backend(rows, backend, notes)
    _require_attention_backend(rows, backend, target.model, notes)
    gpu = _measured_gpu(profile, target)
    shard, kernels = rows.where(rows["tp"] > 0), rows.where(rows["tp"] == 0)
    if "fused moe" in shard.operators:
        raise ProfileError(
            f"fused moe of the profile {profile.metadata.name} must be of a kernel (tp 0), which all its experts "
            "describe; it is of a shard, imported by an earlier release that took the activated experts for all. "
            "Import the profile again"
        )
    model = _measured_model(profile, target) if len(shard) else target.model
    same_gpu = gpu.name == target.gpu.name
    if not same_gpu:
        notes.append(f"measured on {gpu.name}, carried to {target.gpu.name} by their data sheets")
    if len(shard) and model.name != target.model.name:
        notes.append(f"measured for {model.name}, carried to {target.model.name} by the sizes of its operators")
    measured = Target(model, gpu, target.node, target.parallel, target.limits, target.max_model_len)
    return Source(shard, kernels, measured, same_gpu and model.name == target.model.name, same_gpu, tuple(notes))


def _of_dtype(profile: Profile, target: Target, notes: list[str]) -> Profile:
    """Return rows of the layers' dtype; head, norms and attention may be of the activations' 16 bits."""
    layers, cache = _speed_class(target.weight_dtype), _speed_class(target.limits.kv_dtype or "")
    names, kv_names = (_speed_classes(profile[column]) for column in ("dtype", "kv_dtype"))
    wide, wide_kv = names == "bfloat16", kv_names == "bfloat16"
    part = np.array([OPERATOR_PARTS[str(name)] for name in profile["operator"]])
    matrices = np.isin(part, ("layer", "gemm"))
    fits = (names == "") | (names == layers) | (~matrices & wide) | ((part == "gemm") & wide)
    attention = np.isin(part, ("prefill", "decode", "mixed"))
    fits &= ~attention | (kv_names == "") | (kv_names == (cache or layers)) | (not cache) & wide_kv
    if not (fits & matrices).any() and matrices.any():
        measured = f"{profile.metadata.name} was measured with {', '.join(sorted(set(names[matrices].tolist())))}"
        need = f"{target.model.name} has {layers} weights"
        raise ProfileError(f"{need}, and the profile {measured}; use a profile of {layers}")
    rows = profile.where(fits)
    if len(rows) < len(profile):
        notes.append(f"{len(profile) - len(rows):,} rows of other dtypes left out")
    return rows


def _speed_class(dtype: str) -> str:
    """Return the canonical name of a dtype, where both 16-bit formats count as bfloat16."""
    name = dtype_name(dtype) if dtype else ""
    return "bfloat16" if name == "float16" else name


def _speed_classes(column: npt.NDArray[np.str_]) -> npt.NDArray[np.str_]:
    known, index = np.unique(column, return_inverse=True)
    names = []
    for name in known.tolist():
        try:
            names.append(_speed_class(name))
        except InputError:
            names.append(name)
    return np.array(names, dtype=np.str_)[index] if names else column


def _of_backend(rows: Profile, requested: str, notes: list[str]) -> Profile:
    """Return rows of one backend per operator: the requested one, else CUDA graphs, else the one with most rows."""
    mask, found = np.ones(len(rows), dtype=bool), False
    for operator in rows.operators:
        own = rows["operator"] == operator
        names, counts = np.unique(rows["backend"][own], return_counts=True)
        matching = np.array([_matches(name, requested) for name in names.tolist()])
        found = found or bool(matching.any())
        if len(names) > 1:
            # Engines run steps of decodes as CUDA graphs.
            graphs = np.array(["graph" in str(name) for name in names])
            best = str(names[np.lexsort((counts, graphs, matching))[-1]])
            mask &= ~own | (rows["backend"] == best)
            others = ", ".join(name or "an unnamed backend" for name in names.tolist() if name != best)
            reason = "as requested" if matching.any() else "the most rows, or graphs"
            taken = f"rows of {best or 'an unnamed backend'} taken ({reason})"
            notes.append(f"{operator}: {taken}, those of {others} left out; #@NAME chooses")
    if requested and not found:
        known = ", ".join(sorted(set(rows["backend"].tolist()) - {""})) or "none with a name"
        lacking = f"has no rows of the backend {requested}; its backends are: {known}"
        raise ProfileError(f"the profile {rows.metadata.name} {lacking}")
    return rows.where(mask)


def _matches(name: str, requested: str) -> bool:
    return bool(requested) and requested.lower() in name.lower()


def _require_attention_backend(rows: Profile, requested: str, model: ModelSpec, notes: list[str]) -> None:
    """Note the backends of the attention rows, and refuse rows of which only some are of the requested backend."""
    backends: dict[str, list[str]] = {}
    for operator in rows.operators:
        names = sorted(set(rows.of(operator)["backend"].tolist()) - {""})
        if names and OPERATOR_PARTS[operator] in ("prefill", "decode") and layer_share(model, operator) > 0:
            backends[operator] = names
    others = {op: names for op, names in backends.items() if not any(_matches(name, requested) for name in names)}
    if not others:
        return
    listed = "; ".join(f"{operator} with {', '.join(names)}" for operator, names in others.items())
    if len(others) < len(backends):
        found = f"it has {listed} alone. Use a profile of {requested}, or name no backend"
        raise ProfileError(f"the profile {rows.metadata.name} must be of the attention backend {requested}; {found}")
    contrast = f", not with {requested}" if requested else ": right if the deployment's is the same"
    notes.append(f"measured {listed}{contrast}")


def _measured_gpu(profile: Profile, target: Target) -> GpuSpec:
    def plain(name: str) -> str:
        return "".join(letter for letter in name.lower() if letter.isalnum())

    named = profile.metadata.gpu
    if not named or plain(named) in {plain(name) for name in (target.gpu.name, *target.gpu.aliases)}:
        return target.gpu
    try:
        return catalog.gpu(named)
    except InputError as error:
        raise ProfileError(
            f"the profile {profile.metadata.name} is of {named}, which is not {target.gpu.name} and in no catalog; "
            f"use a profile of this GPU; if it is the same device, say so in its TOML file (of --gpu): aliases = "
            f'["{named}"], or ["{named}"] as its heading'
        ) from error


def _measured_model(profile: Profile, target: Target) -> ModelSpec:
    named = profile.metadata.model
    if not named or named == target.model.name or named in target.model.metadata.aliases:
        return target.model
    try:
        model = catalog.model(named)
    except InputError as error:
        raise ProfileError(
            f"the profile {profile.metadata.name} is of the model {named}, which is not {target.model.name} and in "
            "no catalog; use a profile of this model, or of model-independent kernels"
        ) from error
    own, other = (replace(one, name="", max_model_len=0, metadata=ModelFacts()) for one in (model, target.model))
    return target.model if own == other else model  # fine-tunes and quantisations of one model share its shapes


def reach_of(source: Source, target: Target) -> Reach:
    """Return the largest step that was measured: the smallest of the operators' own maxima; None: not measured."""
    # Rows of the shard at the deployment's TP degree count; at all degrees if that one was not measured; kernels if no
    # row is of a shard. A request is as long as the longest sequence of either phase, for decodes in the mean.
    shard = source.shard
    own = shard.where(shard["tp"] == target.parallel.tp)
    rows = own if len(own) else shard

    def maximum(profile: Profile, part: str, value: Callable[[Profile], npt.NDArray[Any]]) -> int | None:
        operators = [profile.of(operator) for operator in profile.operators if OPERATOR_PARTS[operator] == part]
        return min((int(value(own).max()) for own in operators), default=None)

    def largest(part: str, value: Callable[[Profile], npt.NDArray[Any]]) -> int | None:
        found = maximum(rows, part, value)
        return maximum(source.kernels, part, value) if found is None else found

    tokens = maximum(rows, "layer", lambda p: p["tokens"])
    lengths = (
        largest("prefill", lambda p: np.asarray(p["chunk"] + p["context"])),
        largest("decode", lambda p: np.asarray(p["kv_tokens"] // np.maximum(p["seqs"], 1))),
    )
    return Reach(
        tokens=maximum(source.kernels, "gemm", lambda p: p["tokens"]) if tokens is None else tokens,
        seqs=largest("decode", lambda p: p["seqs"]),
        chunk=largest("prefill", lambda p: p["chunk"]),
        context=max((length for length in lengths if length is not None), default=None),
        kv_tokens=largest("decode", lambda p: p["kv_tokens"]),
        prefix=largest("prefill", lambda p: p["context"]),
    )
