"""Files of trained predictors: a zip archive of JSON and plain arrays, never a pickle."""

from __future__ import annotations

import io
import json
import math
import zipfile
import zlib
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError, LengthwiseError, UnknownNameError
from lengthwise.schema.files import write_atomic

Arrays = dict[str, npt.NDArray[Any]]
State = tuple[dict[str, Any], Arrays]

NAME = "default"
FORMAT = 1
KINDS: dict[str, str] = {
    "bucket_ecdf": "lengthwise.predict.empirical:BucketEcdf",
    "conditional": "lengthwise.predict.wrappers:Conditional",
    "conformal": "lengthwise.predict.wrappers:Conformal",
    "constant": "lengthwise.predict.empirical:Constant",
    "ecdf": "lengthwise.predict.empirical:Ecdf",
    "encoder": "lengthwise.predict.encoder:Encoder",
    "ensemble": "lengthwise.predict.wrappers:Ensemble",
    "guarded": "lengthwise.predict.wrappers:Guarded",
    "in_session": "lengthwise.predict.in_session:InSession",
    "lexical": "lengthwise.predict.lexical:Lexical",
}
"""Module and class of each kind of predictor; a module is imported when a file needs it."""

_MAX_BYTES = 1 << 30
_READ_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    EOFError,
    RuntimeError,  # an encrypted part; an unknown compression method or version; a recursion
    MemoryError,
    OverflowError,
    zipfile.BadZipFile,
    zlib.error,
)


def fitted(predictor: object, attribute: str) -> Any:
    """Return a learned attribute of a predictor; raises InputError if ``fit`` has not set it."""
    value = getattr(predictor, attribute, None)
    if value is None:
        raise InputError(f"a {type(predictor).__name__} must learn before it predicts; call fit(samples) first")
    return value


def array(arrays: Mapping[str, npt.NDArray[Any]], name: str, ndim: int) -> npt.NDArray[np.float64]:
    """Return a saved array as float64; raises InputError unless it has finite numbers and ``ndim`` dimensions."""
    found = arrays.get(name)
    if found is None:
        raise InputError(f"there must be an array {name}; there are {', '.join(sorted(arrays)) or 'none'}")
    if found.ndim != ndim or found.dtype.kind not in "iuf" or not np.isfinite(found).all():
        raise InputError(f"{name} must be finite numbers of {ndim} dimensions; it is {found.dtype} {found.shape}")
    return found.astype(np.float64)


def quantile_table(arrays: Mapping[str, npt.NDArray[Any]], name: str, levels: int) -> npt.NDArray[np.float64]:
    """Return a saved table of quantiles, [rows, levels]; raises InputError if it is invalid."""
    table = array(arrays, name, 2)
    if table.shape[1] != levels or not len(table) or (table < 1).any() or (np.diff(table, axis=1) < 0).any():
        raise InputError(f"{name} must hold {levels} quantiles a row that are at least 1 and do not decrease")
    return table


def save(predictor: Any, path: Path | str, metadata: Mapping[str, Any] | None = None) -> None:
    """Write a predictor to a file, usually ``*.lwp``; equal predictors give equal bytes.

    ``metadata`` describes the training for readers of the file, in addition to the predictor's ``metadata_``. Raises
    InputError if the predictor cannot be saved or is not fitted, and OutputError if the file cannot be written.
    """
    meta, arrays = packed(predictor)
    merged = {**(getattr(predictor, "metadata_", None) or {}), **(metadata or {})}
    header = {"format": FORMAT, "made_by": version("lengthwise"), "metadata": merged, **meta}
    numbers = io.BytesIO()
    np.savez_compressed(numbers, allow_pickle=False, **arrays)
    out = io.BytesIO()
    parts = {"meta.json": json.dumps(header, indent=1, sort_keys=True).encode(), "arrays.npz": numbers.getvalue()}
    with zipfile.ZipFile(out, "w") as file:
        for name, data in parts.items():  # without the time of writing
            file.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data, compress_type=zipfile.ZIP_DEFLATED)
    write_atomic(path, out.getvalue())


def load(path: Path | str) -> Any:
    """Return the predictor in a file; its ``metadata_`` is the description of the training in the file.

    Raises InputError if the file is missing, truncated or damaged, or has an unknown version or kind.
    """
    try:
        meta, arrays = _read(Path(path))
    except FileNotFoundError:
        raise InputError(f"there is no predictor file {path}") from None
    except _READ_ERRORS as error:
        message = f"{path} must be a complete file written by `save`; it is damaged, or another kind of file: {error}"
        raise InputError(message) from error
    if meta.get("format") != FORMAT:
        raise InputError(
            f"{path} must be of format {FORMAT}; it is of {meta.get('format')!r}, "
            f"written by lengthwise {meta.get('made_by', 'unknown')}; train it again with this version"
        )
    try:
        predictor = unpacked(meta, arrays)
    except LengthwiseError as error:
        error.add_note(f"in {path}")
        raise
    predictor.metadata_ = dict(meta.get("metadata") or {})
    return predictor


def packed(predictor: Any, prefix: str = "") -> State:
    """Return a predictor's kind and state, for a file. ``prefix`` is put before the names of its arrays."""
    kind = getattr(predictor, "kind", None)
    if kind not in KINDS or not hasattr(predictor, "state"):
        raise InputError(
            f"a predictor that is saved must have a kind ({', '.join(KINDS)}) and a state(); "
            f"{type(predictor).__name__} has not"
        )
    meta, arrays = predictor.state()
    return {"kind": kind, "state": meta}, {prefix + name: values for name, values in arrays.items()}


def unpacked(meta: Any, arrays: Mapping[str, npt.NDArray[Any]], prefix: str = "") -> Any:
    """Return the predictor from the kind, state and arrays of ``packed``; raises InputError if a part is invalid."""
    own = {name.removeprefix(prefix): values for name, values in arrays.items() if name.startswith(prefix)}
    kind = meta.get("kind") if isinstance(meta, dict) else None
    if kind not in KINDS:
        raise UnknownNameError("kind of predictor", str(kind), KINDS)
    module, _, name = KINDS[kind].partition(":")
    try:
        made = getattr(import_module(module), name)
    except ImportError as error:
        raise InputError(f"a predictor of kind {kind!r} cannot be used here: {error}") from error
    try:
        return made.from_state(meta["state"], own)
    except LengthwiseError:
        raise
    except (*_READ_ERRORS, AttributeError, IndexError, StopIteration) as error:
        raise InputError(f"the saved state of a {kind!r} must be as it was written; it is not: {error!r}") from error


def _read(path: Path) -> tuple[dict[str, Any], Arrays]:
    with path.open("rb") as raw, zipfile.ZipFile(raw) as file:
        _check_size(file)
        meta = json.loads(file.read("meta.json"))
        with zipfile.ZipFile(io.BytesIO(file.read("arrays.npz"))) as inner:
            _check_size(inner)
            arrays = {name.removesuffix(".npy"): _parsed_array(inner.read(name), name) for name in inner.namelist()}
    if not isinstance(meta, dict):
        raise ValueError("meta.json is not a table")  # noqa: TRY004 - reported with the other damages
    return meta, arrays


def _check_size(file: zipfile.ZipFile) -> None:
    size = sum(part.file_size for part in file.infolist())
    if size > _MAX_BYTES:
        raise ValueError(f"it would unpack to {size} bytes")


def _parsed_array(data: bytes, name: str) -> npt.NDArray[Any]:
    """Return the array in a .npy file; raises ValueError if its header, by which numpy allocates, is wrong."""
    stream = io.BytesIO(data)
    array_version = np.lib.format.read_magic(stream)
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if array_version not in headers:
        raise ValueError(f"{name} is an array of version {array_version}")
    shape, _, dtype = headers[array_version](stream)
    claimed, actual = math.prod(shape) * dtype.itemsize, len(data) - stream.tell()
    if dtype.hasobject or claimed != actual:
        raise ValueError(f"{name} claims {claimed} bytes of {dtype}; it has {actual}")
    stream.seek(0)
    return np.asarray(np.lib.format.read_array(stream, allow_pickle=False))


@cache
def default() -> Any:
    """Return the trained lexical predictor that comes with lengthwise. Its ``metadata_`` is its model card."""
    with as_file(files("lengthwise.predict") / "data" / "default.lwp") as path:
        return load(path)


def opened(source: Path | str) -> Any:
    """Return the predictor in the file ``source``; "default" is the included predictor, unless a file has this name."""
    return default() if str(source) == NAME and not Path(source).exists() else load(source)
