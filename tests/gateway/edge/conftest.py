"""What serves the edge in its tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="module")
def served():
    """The edge with one key, which may ask a hundred times a second and more."""
    from edge_serving import Served, a_key, config

    with Served(config(a_key(), body_bytes=200_000, body_s=5.0, header_bytes=8192, headers=40)) as edge:
        yield edge


@pytest.fixture(scope="module")
def impatient():
    """An edge that waits only briefly for the body of a request."""
    from edge_serving import Served, a_key, config

    with Served(config(a_key(), body_s=0.3)) as edge:
        yield edge
