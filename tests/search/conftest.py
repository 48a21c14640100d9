"""Work that processes can import, and the textbook servers of the oracles by their own name."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent
for folder in (FOLDER, FOLDER.parent / "oracle", FOLDER.parent / "laws"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture
def chores(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of that name, importable here and in every process that is started here."""
    reachable(monkeypatch)
    return importlib.import_module("chores")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the modules of this folder define can be sent to processes that are started here."""
    reachable(monkeypatch)


def reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(FOLDER)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
