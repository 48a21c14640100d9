"""Which rows of a profile speak of a deployment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise import catalog
from lengthwise.cost.estimators._backends import of_attention, of_backend
from lengthwise.cost.estimators._target import Target
from lengthwise.schema.errors import InputError, ProfileError
from lengthwise.schema.hardware import GpuSpec
from lengthwise.schema.model import ModelSpec
from lengthwise.schema.profile import OPERATOR_PARTS, Profile
from lengthwise.schema.units import dtype_name


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
    same_gpu, same = (
        gpu.name == target.gpu.name,
        gpu.name == target.gpu.name and model.name == target.model.name,
    )
    if not same_gpu:
        notes.append(f"measured on {gpu.name}, carried to {target.gpu.name} by their data sheets")
    if len(shard) and model.name != target.model.name:
        notes.append(
            f"measured for {model.name}, carried to {target.model.name} by the sizes of its operators"
        )
    measured = Target(model, gpu, target.node, target.parallel, target.limits, target.max_model_len)
    return Source(shard, kernels, measured, same, same_gpu, tuple(notes))


def _measured_gpu(profile: Profile, target: Target) -> GpuSpec:
    named = profile.facts.gpu
    own = {target.gpu.name, *target.gpu.aliases}
    if not named or _plain(named) in {_plain(name) for name in own}:
        return target.gpu
    try:
        return catalog.gpu(named)
    except InputError as error:
        raise ProfileError(
            f"the profile {profile.facts.name} is of {named}, which is not {target.gpu.name} and in no catalog; "
            f"use a profile of this GPU; if it is the same device, say so in its TOML file (of --gpu): aliases = "
            f'["{named}"], or ["{named}"] as its heading'
        ) from error


def _measured_model(profile: Profile, target: Target) -> ModelSpec:
    named = profile.facts.model
    if not named or named == target.model.name or named in target.model.facts.aliases:
        return target.model
    try:
        return catalog.model(named)
    except InputError as error:
        raise ProfileError(
            f"the profile {profile.facts.name} is of the model {named}, which is not {target.model.name} and in "
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
            f"{target.model.name} has {layers} weights, and the profile {profile.facts.name} was measured with "
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
