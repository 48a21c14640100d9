"""What a scenario names outside of itself: files and Python objects."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from lengthwise.schema.errors import PolicyError


def resolved(text: str, folder: Path) -> Path:
    """The path that ``text`` means: from the scenario's folder, or else from the working one."""
    path = Path(text).expanduser()
    beside = folder / path
    return path if path.exists() and not beside.exists() else beside


def python_object(text: str, folder: Path) -> Any:
    """The object that "file.py:name" or "package.module:name" names.

    Raises:
        PolicyError: The file or module is missing or raises, or has no such object.
    """
    place, _, name = text.rpartition(":")
    module = _file(resolved(place, folder).resolve()) if place.endswith(".py") else _module(place, folder)
    if not hasattr(module, name):
        known = sorted(key for key in vars(module) if not key.startswith("_"))
        raise PolicyError(f"{place} has no object named {name!r}; it has {', '.join(known) or 'none'}")
    return getattr(module, name)


@lru_cache(maxsize=64)
def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise PolicyError(f"there is no policy file {path}")
    name = f"_lengthwise_policy_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PolicyError(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise PolicyError(f"policy file {path} raised {type(error).__name__}: {error}") from error
    return module


def _module(name: str, folder: Path) -> ModuleType:
    before = list(sys.path)
    sys.path[:0] = [str(folder.resolve()), str(Path.cwd())]
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise PolicyError(f"policy module {name!r} cannot be imported: {error}") from error
    finally:
        sys.path[:] = before
