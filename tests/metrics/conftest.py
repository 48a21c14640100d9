"""The toy server as a fixture."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def toy() -> ModuleType:
    """The toy server's module: ``records(...)``, ``deployment(...)``."""
    path = Path(__file__).with_name("toy.py")
    spec = importlib.util.spec_from_file_location("lengthwise_toy_server", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
