"""Fixtures of all rooms."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples every time, so that a failure is of the change; LENGTHWISE_EXPLORE=1 draws new ones.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile("explore" if os.environ.get("LENGTHWISE_EXPLORE") else "same")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job, which ignores Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what tests import out of the garbage collector, which would take 0.4 s for it wherever a test calls it."""
    gc.disable()
    collected = yield
    gc.enable()
    gc.collect()
    gc.freeze()
    return collected


@pytest.fixture(scope="session")
def shared() -> Callable[[str], Path]:
    """A path of the recorded data that is not part of the repository; skips where it is absent.

    ``LENGTHWISE_SHARED`` names the folder; by default it stands beside the checkout.
    """
    root = Path(os.environ.get("LENGTHWISE_SHARED", Path(__file__).parents[2] / "shared"))

    def find(relative: str) -> Path:
        path = root / relative
        if not path.exists():
            pytest.skip(f"recorded data {relative} is not here (set LENGTHWISE_SHARED to its folder)")
        return path

    return find
