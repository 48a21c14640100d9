"""A trained predictor on the disk: a zip of JSON and plain arrays, never a pickle."""

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
from lengthwise.schema.files import write_whole

Arrays = dict[str, npt.NDArray[Any]]
State = tuple[dict[str, Any], Arrays]


def fitted(predictor: object, attribute: str) -> Any:
    """What the predictor learnt under this name; InputError where it has learnt nothing yet."""
    value = getattr(predictor, attribute, None)
    if value is None:
        raise InputError(f"a {type(predictor).__name__} must learn before it predicts; call fit(samples) first")
    return value


def array(arrays: Mapping[str, npt.NDArray[Any]], name: str, ndim: int) -> npt.NDArray[np.float64]:
    """A saved array of finite numbers with so many dimensions."""
    found = arrays.get(name)
    if found is None:
        raise InputError(f"there must be an array {name}; there are {', '.join(sorted(arrays)) or 'none'}")
    if found.ndim != ndim or found.dtype.kind not in "iuf" or not np.isfinite(found).all():
        raise InputError(f"{name} must be finite numbers of {ndim} dimensions; it is {found.dtype} {found.shape}")
    return found.astype(np.float64)


def quantile_table(arrays: Mapping[str, npt.NDArray[Any]], name: str, levels: int) -> npt.NDArray[np.float64]:
    """A saved table of quantiles, [rows, levels]."""
    table = array(arrays, name, 2)
    if table.shape[1] != levels or not len(table) or (table < 1).any() or (np.diff(table, axis=1) < 0).any():
        raise InputError(f"{name} must hold {levels} quantiles a row that are at least 1 and do not decrease")
    return table


def prefixed(prefix: str, arrays: Arrays) -> Arrays:
    """Arrays of an inner predictor under names of their own."""
    return {f"{prefix}/{name}": values for name, values in arrays.items()}


def within(prefix: str, arrays: Mapping[str, npt.NDArray[Any]]) -> Arrays:
    """The arrays that were put under the prefix, by their own names."""
    start = f"{prefix}/"
    return {name.removeprefix(start): values for name, values in arrays.items() if name.startswith(start)}


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
    "lexical": "lengthwise.predict.lexical:Lexical",
}
"""Where the class of each kind lives; it is imported when a file asks for it."""

_MAX_BYTES = 1 << 30
_DAMAGED = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    EOFError,
    RuntimeError,  # an encrypted part; a recursion, a method or a version that is not known
    MemoryError,
    OverflowError,
    zipfile.BadZipFile,
    zlib.error,
)


def save(predictor: Any, path: Path | str, metadata: Mapping[str, Any] | None = None) -> None:
    """A file at ``path`` from which ``load`` makes an equal predictor; equal predictors give equal bytes.

    Args:
        predictor: One with a ``kind`` and a ``state()``, trained.
        path: Where; the usual ending is ``.lwp``.
        metadata: Training facts for those who read the file, beside the predictor's own ``facts_``.

    Raises:
        InputError: It cannot be saved, or has not learnt yet.
        OutputError: The file cannot be written.
    """
    meta, arrays = packed(predictor)
    own = getattr(predictor, "facts_", None) or {}
    whole = {"format": FORMAT, "made_by": _version(), "facts": {**own, **(metadata or {})}, **meta}
    numbers = io.BytesIO()
    np.savez_compressed(numbers, allow_pickle=False, **arrays)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        _put(file, "meta.json", json.dumps(whole, indent=1, sort_keys=True).encode())
        _put(file, "arrays.npz", numbers.getvalue())
    write_whole(path, out.getvalue())


def load(path: Path | str) -> Any:
    """The predictor that was saved; its ``facts_`` are the training facts of the file.

    Raises:
        InputError: There is no such file, it is truncated or damaged, of another version, or of a
            kind that is not known here.
    """
    try:
        meta, arrays = _read(Path(path))
    except FileNotFoundError:
        raise InputError(f"there is no predictor file {path}") from None
    except _DAMAGED as error:
        raise InputError(f"{path} must be a whole file of `save`; it is damaged or something else: {error}") from error
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
    predictor.facts_ = dict(meta.get("facts") or {})
    return predictor


def packed(predictor: Any) -> tuple[dict[str, Any], Arrays]:
    """Kind and state of a predictor, as a part of another's state."""
    kind = getattr(predictor, "kind", None)
    if kind not in KINDS or not hasattr(predictor, "state"):
        raise InputError(
            f"a predictor that is saved must have a kind ({', '.join(KINDS)}) and a state(); "
            f"{type(predictor).__name__} has not"
        )
    meta, arrays = predictor.state()
    return {"kind": kind, "state": meta}, arrays


def unpacked(meta: Any, arrays: Mapping[str, npt.NDArray[Any]]) -> Any:
    """The predictor of ``packed``; InputError where parts are missing or wrong."""
    kind = meta.get("kind") if isinstance(meta, dict) else None
    if kind not in KINDS:
        raise UnknownNameError("kind of predictor", str(kind), KINDS)
    module, _, name = KINDS[kind].partition(":")
    try:
        made = getattr(import_module(module), name)
    except ImportError as error:
        raise InputError(f"a predictor of kind {kind!r} cannot be used here: {error}") from error
    try:
        return made.from_state(meta["state"], arrays)
    except LengthwiseError:
        raise
    except (*_DAMAGED, AttributeError, IndexError, StopIteration) as error:
        raise InputError(f"the saved state of a {kind!r} must be as it was written; it is not: {error!r}") from error


def _read(path: Path) -> tuple[dict[str, Any], Arrays]:
    with path.open("rb") as raw, zipfile.ZipFile(raw) as file:
        _refuse_huge(file)
        meta = json.loads(file.read("meta.json"))
        with zipfile.ZipFile(io.BytesIO(file.read("arrays.npz"))) as inner:
            _refuse_huge(inner)
            arrays = {name.removesuffix(".npy"): _array(inner.read(name), name) for name in inner.namelist()}
    if not isinstance(meta, dict):
        raise ValueError("meta.json is not a table")  # noqa: TRY004 - told with the other damages
    return meta, arrays


def _array(data: bytes, name: str) -> npt.NDArray[Any]:
    """A plain array whose header claims the bytes that are there."""
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in headers:
        raise ValueError(f"{name} is an array of version {version}")
    shape, _, dtype = headers[version](stream)
    claimed, there = math.prod(shape) * dtype.itemsize, len(data) - stream.tell()
    if dtype.hasobject or claimed != there:
        raise ValueError(f"{name} claims {claimed} bytes of {dtype}; there are {there}")
    stream.seek(0)
    return np.asarray(np.lib.format.read_array(stream, allow_pickle=False))


def _refuse_huge(file: zipfile.ZipFile) -> None:
    size = sum(part.file_size for part in file.infolist())
    if size > _MAX_BYTES:
        raise ValueError(f"it would unpack to {size} bytes")


def _put(file: zipfile.ZipFile, name: str, data: bytes) -> None:
    file.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data, compress_type=zipfile.ZIP_DEFLATED)


def _version() -> str:
    return version("lengthwise")


NAME = "default"


@cache
def default() -> Any:
    """The small lexical predictor that is shipped; its ``facts_`` are its card.

    It was trained on data whose licences allow it: docs/default-predictor-card.md says which, how well it
    does, and where it does not.
    """
    with as_file(files("lengthwise.predict") / "data" / "default.lwp") as path:
        return load(path)


def opened(source: Path | str) -> Any:
    """The predictor of a file, or the shipped one, by the name "default".

    Raises:
        InputError: There is no such file, or it is no predictor.
    """
    return default() if str(source) == NAME and not Path(source).exists() else load(source)
