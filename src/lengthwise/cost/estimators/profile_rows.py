"""Which rows of a profile speak of a deployment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise import catalog
from lengthwise.cost.estimators.points import Target
from lengthwise.schema.cost_tables import Reach
from lengthwise.schema.errors import InputError, ProfileError
from lengthwise.schema.profile import OPERATOR_PARTS, Profile
from lengthwise.schema.specs import GpuSpec, ModelSpec, dtype_name


def of_backend(rows: Profile, requested: str, notes: list[str]) -> Profile:
    """Rows of one backend an operator: of the one asked for, else of graphs, else of the one that has most.

    Args:
        rows: Of any backends.
        requested: A backend's name or a part of it, in any case; "" leaves the choice.
        notes: Gets which was taken of several, and which others there are.

    Raises:
        ProfileError: No operator has rows of the backend asked for; lists those that there are.
    """
    keep = np.ones(len(rows), dtype=bool)
    found = False
    for operator in rows.operators:
        own = rows["operator"] == operator
        names, counts = np.unique(rows["backend"][own], return_counts=True)
        wanted = _matching(names, requested)
        found = found or bool(requested and wanted.any())
        if len(names) > 1:
            best = _best(names, counts, wanted)
            keep &= ~own | (rows["backend"] == best)
            notes.append(_report(operator, best, names.tolist(), requested if wanted.any() else ""))
    if requested and not found:
        there = ", ".join(sorted(set(rows["backend"].tolist()) - {""})) or "none with a name"
        raise ProfileError(
            f"the profile {rows.metadata.name} has no rows of the backend {requested}; its backends are: {there}"
        )
    return rows.where(keep)


def of_attention(rows: Profile, requested: str, uses: Callable[[str], bool], notes: list[str]) -> None:
    """Nothing; the notes get whose attention was measured.

    Args:
        rows: Of one backend an operator.
        requested: The deployment's backend, as of ``of_backend``; "" where it does not say.
        uses: Whether the deployment has an operator.
        notes: Gets the names, where they are known.

    Raises:
        ProfileError: Some attention was measured with the backend asked for, and some of the deployment's was not.
    """
    named = {name: _names(rows, name) for name in rows.operators if _is_attention(name) and uses(name)}
    named = {name: names for name, names in named.items() if names}
    others = {name: names for name, names in named.items() if not _matching(np.array(names), requested).any()}
    if not others:
        return
    told = "; ".join(f"{name} with {', '.join(names)}" for name, names in others.items())
    if len(others) < len(named):
        raise ProfileError(
            f"the profile {rows.metadata.name} must be of the attention backend {requested}; it has {told} alone. Use a "
            f"profile of {requested}, or name no backend"
        )
    but = f", not with {requested}" if requested else ": right if the deployment's is the same"
    notes.append(f"measured {told}{but}")


def _is_attention(operator: str) -> bool:
    return OPERATOR_PARTS[operator] in ("prefill", "decode")


def _names(rows: Profile, operator: str) -> list[str]:
    return sorted(set(rows.of(operator)["backend"].tolist()) - {""})


def _matching(names: npt.NDArray[np.str_], requested: str) -> npt.NDArray[np.bool_]:
    return np.array([bool(requested) and requested.lower() in str(name).lower() for name in names], dtype=bool)


def _best(names: npt.NDArray[np.str_], counts: npt.NDArray[np.int64], desired: npt.NDArray[np.bool_]) -> str:
    """The one asked for; else what engines run in steps of decodes (graphs); else the one with most rows."""
    graphs = np.array(["graph" in str(name) for name in names])
    return str(names[np.lexsort((counts, graphs, desired))[-1]])


def _report(operator: str, best: str, names: list[str], requested: str) -> str:
    others = ", ".join(name or "an unnamed backend" for name in names if name != best)
    why = "as asked" if requested else "the most rows, or graphs"
    taken = f"{best or 'an unnamed backend'} taken ({why})"
    return f"{operator}: rows of {taken}, those of {others} left out; #@NAME chooses"


@dataclass(frozen=True)
class Source:
    """A profile's rows of the right dtype, and of what they were measured.

    Attributes:
        shard: Rows of a model's shard.
        kernels: Rows of kernels of no model.
        target: The model and GPU that were measured, to tell the roofline of each row.
        same: The rows are of the deployment's own model and GPU.
        notes: What was left out or bridged, in words.
    """

    shard: Profile
    kernels: Profile
    target: Target
    same: bool
    same_gpu: bool
    notes: tuple[str, ...]


def rows_for(profile: Profile, target: Target, backend: str = "") -> Source:
    """The rows that may speak of a deployment; of the backend given, where an operator has rows of it.

    Raises:
        ProfileError: Nothing in the profile has the deployment's dtype or the backend, some attention is of another
            backend, or the profile's model or GPU is another one that no catalog knows, so that not even the physics
            can tell the way from it.
    """
    notes: list[str] = []
    rows = _of_dtype(profile, target, notes)
    rows = of_backend(rows, backend, notes)
    of_attention(rows, backend, lambda operator: target.share(operator) > 0, notes)
    gpu = _measured_gpu(profile, target)
    shard, kernels = rows.where(rows["tp"] > 0), rows.where(rows["tp"] == 0)
    model = _measured_model(profile, target) if len(shard) else target.model
    same_gpu, same = (gpu.name == target.gpu.name, gpu.name == target.gpu.name and model.name == target.model.name)
    if not same_gpu:
        notes.append(f"measured on {gpu.name}, carried to {target.gpu.name} by their data sheets")
    if len(shard) and model.name != target.model.name:
        notes.append(f"measured for {model.name}, carried to {target.model.name} by the sizes of its operators")
    measured = Target(model, gpu, target.node, target.parallel, target.limits, target.max_model_len)
    return Source(shard, kernels, measured, same, same_gpu, tuple(notes))


def _measured_gpu(profile: Profile, target: Target) -> GpuSpec:
    named = profile.metadata.gpu
    own = {target.gpu.name, *target.gpu.aliases}
    if not named or _plain(named) in {_plain(name) for name in own}:
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
        return catalog.model(named)
    except InputError as error:
        raise ProfileError(
            f"the profile {profile.metadata.name} is of the model {named}, which is not {target.model.name} and in "
            "no catalog; use a profile of this model, or of kernels of no model"
        ) from error


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _of_dtype(profile: Profile, target: Target, notes: list[str]) -> Profile:
    """Rows of the layers' dtype; the head, norms and attention may be of the activations' 16 bits."""
    layers, cache = _named(target.weight_dtype), _named(target.limits.kv_dtype or "")
    names, kv_names = (_spelt(profile[column]) for column in ("dtype", "kv_dtype"))
    part = np.array([OPERATOR_PARTS[str(name)] for name in profile["operator"]])
    matrices = np.isin(part, ("layer", "gemm"))
    fits = (names == "") | (names == layers) | (~matrices & _wide(names)) | ((part == "gemm") & _wide(names))
    attention = np.isin(part, ("prefill", "decode", "mixed"))
    fits &= ~attention | (kv_names == "") | (kv_names == (cache or layers)) | (not cache) & _wide(kv_names)
    kept = profile.where(fits)
    if not (fits & matrices).any() and matrices.any():
        raise ProfileError(
            f"{target.model.name} has {layers} weights, and the profile {profile.metadata.name} was measured with "
            f"{', '.join(sorted(set(names[matrices].tolist())))}; use a profile of {layers}"
        )
    if len(kept) < len(profile):
        notes.append(f"{len(profile) - len(kept):,} rows of other dtypes left out")
    return kept


def _named(dtype: str) -> str:
    """Its one spelling; both kinds of 16 bits are as fast."""
    name = dtype_name(dtype) if dtype else ""
    return "bfloat16" if name == "float16" else name


def _spelt(column: npt.NDArray[np.str_]) -> npt.NDArray[np.str_]:
    """The dtypes in their one spelling; what is not known stays as it is."""
    known, which = np.unique(column, return_inverse=True)
    names = []
    for name in known.tolist():
        try:
            names.append(_named(name))
        except InputError:
            names.append(name)
    return np.array(names, dtype=np.str_)[which] if names else column


def _wide(names: npt.NDArray[np.str_]) -> npt.NDArray[np.bool_]:
    return np.asarray(names == "bfloat16")


def reach_of(source: Source, target: Target) -> Reach:
    """The largest step that was measured: the smallest of the operators' own largest.

    Rows of the model's shard of the deployment's TP degree count, of all where that one was not measured;
    kernels of no model where there are none of a shard. None: nothing of the kind was measured.

    A request is as long as the longest sequence of either phase: of prompts what is cached before a chunk counts,
    of decodes the mean over the batch. Decodes of a window are cut to it, and measured at any length for that.
    """
    shard = source.shard
    own = shard.where(shard["tp"] == target.parallel.tp)
    rows = own if len(own) else shard

    def largest(part: str, value: str | Callable[[Profile], npt.NDArray[Any]]) -> int | None:
        told = _least_largest(rows, part, value)
        return _least_largest(source.kernels, part, value) if told is None else told

    tokens = _least_largest(rows, "layer", "tokens")
    lengths = (largest("prefill", _prompt_tokens), largest("decode", _sequence_tokens))
    return Reach(
        tokens=_least_largest(source.kernels, "gemm", "tokens") if tokens is None else tokens,
        seqs=largest("decode", "seqs"),
        chunk=largest("prefill", "chunk"),
        context=max((length for length in lengths if length is not None), default=None),
        kv_tokens=largest("decode", "kv_tokens"),
        prefix=largest("prefill", "context"),
    )


def _sequence_tokens(rows: Profile) -> npt.NDArray[Any]:
    """[n] Mean tokens of the sequences of decodes."""
    return np.asarray(rows["kv_tokens"] // np.maximum(rows["seqs"], 1))


def _prompt_tokens(rows: Profile) -> npt.NDArray[Any]:
    """[n] Tokens of the prompts up to the end of their chunks."""
    return np.asarray(rows["chunk"] + rows["context"])


def _least_largest(rows: Profile, part: str, value: str | Callable[[Profile], npt.NDArray[Any]]) -> int | None:
    of = [rows.of(operator) for operator in rows.operators if OPERATOR_PARTS[operator] == part]
    return min((int((own[value] if isinstance(value, str) else value(own)).max()) for own in of), default=None)
