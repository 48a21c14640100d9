"""What a file of cost tables is of: seconds of one model on one GPU at one degree say nothing of others."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.schema.deployment import Deployment, EngineLimits, Parallelism
from lengthwise.schema.errors import ProfileError
from lengthwise.schema.files import write_whole
from lengthwise.schema.records import shape_facts
from lengthwise.schema.specs import GpuSpec, ModelSpec, NodeSpec, dtype_name


def read_npz(path: Path | str, only: Collection[str] | None = None) -> dict[str, Any]:
    """All arrays of an npz by name, or those of ``only`` that it has.

    Raises:
        ProfileError: There is no such file, or it is not an npz of plain arrays.
    """
    try:
        # Opened here, since np.load leaves the file open when it is damaged.
        with Path(path).open("rb") as file:
            _require_npz(file.read(8), path)
            file.seek(0)
            loaded = np.load(file, allow_pickle=False)
            return {name: loaded[name] for name in loaded.files if only is None or name in only}
    except FileNotFoundError as error:
        raise ProfileError(f"there is no file {path}") from error
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        # NumPy's advice on arrays of objects (allow_pickle) would run whatever the file holds.
        what = "one of its arrays holds objects" if "allow_pickle" in str(error) else error
        raise ProfileError(f"{path} must be a readable npz file: {what}") from error


def _require_npz(start: bytes, path: Path | str) -> None:
    """Nothing, if a file starts as a zip; else an error that says what it is instead."""
    if start.startswith(b"PK"):
        return
    if start.startswith(b"PAR1"):
        raise ProfileError(
            f"{path} must be a readable npz file; it is a Parquet file. A profile of operators is taken as "
            f"profile:{path}, or made an npz by `lengthwise profile fit {path} --out FILE.npz`"
        )
    known = {b"\x93NUMPY": "a single array (npy)", b"\x1f\x8b": "packed by gzip"}
    other = "of another kind" if start else "empty"
    is_what = next((what for magic, what in known.items() if start.startswith(magic)), other)
    raise ProfileError(f"{path} must be a readable npz file; it is {is_what}")


def write_npz(path: Path | str, arrays: Mapping[str, Any]) -> None:
    """An npz at ``path`` of these arrays, whole or not at all.

    Raises:
        OutputError: It cannot be written.
    """

    def write(complete: Path) -> None:
        with complete.open("wb") as file:
            np.savez(file, **arrays)

    write_whole(path, write)


KEY = "made_for"
FEW_TOKENS = 0.05
"""A vocabulary that differs by no more than this share is the same one, padded or with a fine-tune's own tokens."""
_WORDS = {
    "gpu": "the GPU",
    "node": "the node",
    "tp": "tp",
    "pp": "pp",
    "weight_dtype": "weights of",
    "kv_dtype": "a KV cache of",
}


@dataclass(frozen=True)
class MadeFor:
    """What the seconds of cost tables hang on.

    Limits are none of it: tables may be asked beyond those that they were made with, and their reach says so.

    Attributes:
        model: Its name, to be told; ``shape`` is what counts.
        shape: ``shape_facts`` of it, and its vocabulary, on which the head hangs.
        gpu: Its name.
        node: What joins the GPUs; empty where nothing has to.
        tp: Tensor-parallel degree.
        pp: Pipeline stages.
        weight_dtype: Of the layers.
        kv_dtype: Of the KV cache.
    """

    model: str
    shape: Mapping[str, int]
    gpu: str
    node: str
    tp: int
    pp: int
    weight_dtype: str
    kv_dtype: str

    @classmethod
    def of(cls, model: ModelSpec, gpu: GpuSpec, node: NodeSpec, parallel: Parallelism, limits: EngineLimits) -> MadeFor:
        """What tables for this deployment are of."""
        return cls(
            model=model.name,
            shape=_shape(model),
            gpu=gpu.name,
            node=node.name if parallel.tp * parallel.pp > 1 else "",
            tp=parallel.tp,
            pp=parallel.pp,
            weight_dtype=_dtype(limits.weight_dtype or model.dtype),
            kv_dtype=_dtype(limits.kv_dtype or model.dtype),
        )

    @classmethod
    def of_deployment(cls, deployment: Deployment) -> MadeFor:
        """The same of a deployment that is built."""
        d = deployment
        return cls.of(d.model, d.gpu, d.node, d.parallel, d.limits)

    def differences(self, requested: MadeFor) -> list[str]:
        """What is another in ``requested``, in words; none where the tables hold for it."""
        found = self._model_differences(requested.model, requested.shape)
        for name, words in _WORDS.items():
            own, other = getattr(self, name), getattr(requested, name)
            alone = name == "node" and not (own and other)  # one GPU has none, and tp or pp tell of it
            if own != other and not alone:
                found.append(f"{words} {own}, not {other}")
        return found

    def model_differences(self, model: ModelSpec) -> list[str]:
        """Where the model's shape is another; fine-tunes of one model have the same."""
        return self._model_differences(model.name, _shape(model))

    def _model_differences(self, name: str, shape: Mapping[str, int]) -> list[str]:
        other = [
            f"{key} {value} for {shape.get(key)}"
            for key, value in sorted(self.shape.items())
            if not _matching(key, value, shape.get(key))
        ]
        return [f"the model {self.model}, not {name} ({', '.join(other)})"] if other else []

    def to_text(self) -> str:
        """JSON, the same for the same facts."""
        return json.dumps(asdict(self), sort_keys=True)


def _dtype(name: str) -> str:
    """Its one spelling; both formats of 16 bits take the same seconds."""
    known = dtype_name(name)
    return "bfloat16" if known == "float16" else known


def _shape(model: ModelSpec) -> dict[str, int]:
    return shape_facts(model) | {"vocab": model.vocab}


def _matching(key: str, own: int, other: int | None) -> bool:
    if key == "vocab" and other is not None:
        return abs(own - other) <= FEW_TOKENS * max(own, other)
    return own == other


def made_for(path: Path | str) -> MadeFor | None:
    """What the tables in a file are of; None where it does not tell.

    Raises:
        ProfileError: The file cannot be read, or tells it in no way of ours.
    """
    return told_in(read_npz(path, only=(KEY,)), path)


def told_in(arrays: Mapping[str, Any], path: Path | str) -> MadeFor | None:
    """The same of an npz that was read."""
    if KEY not in arrays:
        return None
    try:
        told = MadeFor(**json.loads(str(arrays[KEY])))
        if not isinstance(told.shape, Mapping):
            raise TypeError("its shape is no table")  # noqa: TRY301 - told as the others are
    except (TypeError, ValueError) as error:
        raise ProfileError(
            f"{path} must tell what its tables are of as it was saved: {error}. Save the tables again"
        ) from error
    return told


def require_made_for(path: Path | str, requested: MadeFor) -> None:
    """Nothing, if the tables in a file are of what is asked, or do not tell what they are of.

    Raises:
        ProfileError: They are of something else.
    """
    told = made_for(path)
    if told is not None:
        refuse(path, told.differences(requested))


def refuse(path: Path | str, differences: list[str]) -> None:
    """Raises ProfileError where there are differences."""
    if differences:
        raise ProfileError(
            f"{path} must hold tables of the deployment that is asked for; they are of {'; '.join(differences)}. "
            "Calibrate or fit tables for this deployment (`lengthwise calibrate`, `lengthwise profile fit`), ask for "
            "the one that they are of, or take a source that knows others (roofline, profile:FILE)"
        )
