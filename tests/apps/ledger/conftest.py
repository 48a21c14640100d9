"""A place for a ledger in every store, by name; the same name is the same store."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from postgres_world import Server, programs

STORES = ("sqlite", "postgres")


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A real PostgreSQL server of this session."""
    started = Server(programs(), tmp_path_factory.mktemp("postgres"))
    yield started
    started.stop()


@pytest.fixture(params=STORES)
def place(request, tmp_path):
    """From a name to a place of its own in this test."""
    if request.param == "sqlite":
        return lambda name="run": str(tmp_path / f"{name}.sqlite")
    started, own = request.getfixturevalue("server"), uuid.uuid4().hex[:12]
    return lambda name="run": started.place(f"t{own}_{name}")
