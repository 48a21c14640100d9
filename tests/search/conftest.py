"""Work that processes can import."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def chores(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of that name, importable here and in every process that is started here."""
    folder = str(Path(__file__).parent)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    )
    return importlib.import_module("chores")
