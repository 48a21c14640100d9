"""Reads and writes npz files, and checks for which deployment a file of cost tables was made."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.schema.deployment import ALL2ALL_BACKENDS, Deployment, EngineLimits, Parallelism
from lengthwise.schema.errors import ProfileError
from lengthwise.schema.files import write_atomic
from lengthwise.schema.records import shape_facts
from lengthwise.schema.specs import GpuSpec, ModelSpec, NodeSpec, dtype_name


def read_npz(path: Path | str, only: Collection[str] | None = None) -> dict[str, Any]:
    """Read all arrays of an npz file by name, or ``only`` some. Raises ProfileError if the file is unreadable."""
    try:
        # Opened here, since np.load leaves the file open when it is damaged.
        with Path(path).open("rb") as file:
            start = file.read(8)
            if not start.startswith(b"PK"):
                raise ProfileError(f"{path} must be a readable npz file; it is {_file_kind(start, path)}")
            file.seek(0)
            loaded = np.load(file, allow_pickle=False)
            return {name: loaded[name] for name in loaded.files if only is None or name in only}
    except FileNotFoundError as error:
        raise ProfileError(f"there is no file {path}") from error
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        # NumPy's message advises allow_pickle, which would run code from the file.
        reason = "one of its arrays holds objects" if "allow_pickle" in str(error) else error
        raise ProfileError(f"{path} must be a readable npz file: {reason}") from error


def _file_kind(start: bytes, path: Path | str) -> str:
    if start.startswith(b"PAR1"):
        detail = f"or converted to an npz by `lengthwise profile fit {path} --out FILE.npz`"
        return f"a Parquet file. A profile of operators is taken as profile:{path}, {detail}"
    known = {b"\x93NUMPY": "a single array (npy)", b"\x1f\x8b": "packed by gzip", b"": "of another kind"}
    return next(kind for magic, kind in known.items() if start.startswith(magic)) if start else "empty"


def write_npz(path: Path | str, arrays: Mapping[str, Any]) -> None:
    """Write arrays to an npz file atomically. Raises OutputError if the file cannot be written."""

    def write(place: Path) -> None:
        with place.open("wb") as file:
            np.savez(file, **arrays)

    write_atomic(path, write)


KEY = "made_for"
EXPERT_KEYS = ("dp", "ep", "redundant_experts", "all2all_backend")
VOCAB_TOLERANCE = 0.05  # sizes of vocabularies that differ by less count as equal: padding, or tokens of a fine-tune


@dataclass(frozen=True)
class MadeFor:
    """The deployment for which cost tables were made, without its limits (beyond them, tables extrapolate)."""

    model: str  # name, for messages; ``shape`` is compared
    shape: Mapping[str, int]  # ``shape_facts`` of the model, and its vocabulary, on which the head depends
    gpu: str
    node: str  # empty for a single GPU
    tp: int
    pp: int
    weight_dtype: str
    kv_dtype: str
    dp: int = 1
    ep: int = 1
    redundant_experts: int | None = None
    all2all_backend: str = ALL2ALL_BACKENDS[0]

    @classmethod
    def of(cls, model: ModelSpec, gpu: GpuSpec, node: NodeSpec, parallel: Parallelism, limits: EngineLimits) -> MadeFor:
        """Return the description of a deployment by which its tables are recognised."""
        return cls(
            model=model.name,
            shape=provenance_shape(model),
            gpu=gpu.name,
            node=node.name if parallel.gpus_per_replica > 1 else "",
            tp=parallel.tp,
            pp=parallel.pp,
            weight_dtype=speed_class(limits.weight_dtype or model.dtype),
            kv_dtype=speed_class(limits.kv_dtype or model.dtype),
            **{name: getattr(parallel, name) for name in EXPERT_KEYS},
        )

    @classmethod
    def of_deployment(cls, deployment: Deployment) -> MadeFor:
        """Return the description of a resolved deployment by which its tables are recognised."""
        return cls.of(deployment.model, deployment.gpu, deployment.node, deployment.parallel, deployment.limits)

    def differences(self, requested: MadeFor) -> list[str]:
        """Return texts on the properties in which ``requested`` differs. The list is empty if the tables apply."""
        found = self.model_differences(requested.model, requested.shape)
        labels = {"gpu": "the GPU", "node": "the node"} | {name: name for name in ("tp", "pp", *EXPERT_KEYS)}
        for name, label in (labels | {"weight_dtype": "weights of", "kv_dtype": "a KV cache of"}).items():
            own, other = getattr(self, name), getattr(requested, name)
            is_single_gpu = name == "node" and not (own and other)  # one GPU has no node; tp or pp differ already
            if own != other and not is_single_gpu:
                found.append(f"{label} {own}, not {other}")
        return found

    def model_differences(self, name: str, shape: Mapping[str, int]) -> list[str]:
        """Return one text if the model's shape differs, otherwise an empty list. Fine-tunes share a model's shape."""
        different = []
        for key, own in sorted(self.shape.items()):
            other = shape.get(key)
            is_padded = key == "vocab" and other is not None and abs(own - other) <= VOCAB_TOLERANCE * max(own, other)
            if own != other and not is_padded:
                different.append(f"{key} {own} for {other}")
        return [f"the model {self.model}, not {name} ({', '.join(different)})"] if different else []


def speed_class(dtype: str) -> str:
    """Return the canonical name of a dtype. Both 16-bit formats count as bfloat16, since they are equally fast."""
    name = dtype_name(dtype)
    return "bfloat16" if name == "float16" else name


def provenance_shape(model: ModelSpec) -> dict[str, int]:
    """Return the sizes that identify a model in ``MadeFor.shape``, vocabulary included."""
    return shape_facts(model) | {"vocab": model.vocab}


def made_for(path: Path | str) -> MadeFor | None:
    """Return the deployment that a file of tables names, or None. Raises ProfileError if the file is damaged."""
    return parse_made_for(read_npz(path, only=(KEY,)), path)


def parse_made_for(arrays: Mapping[str, Any], path: Path | str) -> MadeFor | None:
    """Return the deployment that the arrays of an npz file name, or None if they name none."""
    if KEY not in arrays:
        return None
    try:
        parsed = MadeFor(**json.loads(str(arrays[KEY])))
        if not isinstance(parsed.shape, Mapping):
            raise TypeError("its shape is no table")  # noqa: TRY301 - reported like the other defects
    except (TypeError, ValueError) as error:
        problem = f"as it was saved: {error}. Save the tables again"
        raise ProfileError(f"{path} must name the deployment of its tables {problem}") from error
    return parsed


def require_made_for(path: Path | str, requested: MadeFor) -> None:
    """Raise ProfileError if the file names a deployment, and the tables do not apply to ``requested``."""
    if (found := made_for(path)) is not None:
        require_no_differences(path, found.differences(requested))


def require_no_differences(path: Path | str, differences: list[str]) -> None:
    """Raise ProfileError with these differences, if there are any."""
    if differences:
        raise ProfileError(
            f"{path} must hold tables of the requested deployment; they are of {'; '.join(differences)}. "
            "Calibrate or fit tables for this deployment (`lengthwise calibrate`, `lengthwise profile fit`), request "
            "the one that they are of, or take a source that covers others (roofline, profile:FILE)"
        )
