"""What the catalog knows of names that engines and files of records tell."""

from __future__ import annotations

from pathlib import PurePosixPath

from lengthwise.catalog import _store
from lengthwise.schema.errors import UnknownNameError
from lengthwise.schema.hardware import GpuSpec
from lengthwise.schema.model import ModelSpec


def served_model(name: str) -> ModelSpec | None:
    """The model that a server calls so: by name, alias, or the last part of a path; None where nobody knows."""
    for wanted in (name, PurePosixPath(name).name):
        try:
            return _store.find("model", wanted, _store.load_models())
        except UnknownNameError:
            continue
    return None


def told_gpu(name: str) -> GpuSpec | None:
    """The GPU of that name or alias; None where nobody knows it, as one of a user's own file."""
    try:
        return _store.find("GPU", name, _store.load_gpus())
    except UnknownNameError:
        return None
