"""Fixtures of all rooms."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import settings

os.environ.setdefault("LENGTHWISE_COMPILE", "wait")  # no test leaves a compilation in the background

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffle the tests by the seed in LENGTHWISE_ORDER, where it is set (make test-robust)."""
    if seed := os.environ.get("LENGTHWISE_ORDER"):
        random.Random(seed).shuffle(items)


T = TypeVar("T")


class Stalls:
    """What a busy machine takes from this process: how late the ends of short sleeps are, in a thread of its own."""

    interval_s, free_s = 0.005, 0.015

    def __init__(self) -> None:
        self._lost_s, self._slept_s, self._over = 0.0, time.perf_counter(), threading.Event()

    @property
    def lost_s(self) -> float:
        """Seconds that the process has lost so far, by which a bound on real time is to be relaxed."""
        return self._lost_s + max(0.0, time.perf_counter() - self._slept_s - self.free_s)

    def without(self, attempt: Callable[[], T], *, at_most_s: float = 0.05, tries: int = 30) -> T:
        """The result of the first attempt in which the machine did not stall, or of the last."""
        for _ in range(tries):
            before_s = self.lost_s
            result = attempt()
            if self.lost_s - before_s <= at_most_s:
                break
        return result

    def run(self) -> None:
        while not self._over.wait(self.interval_s):
            now_s = time.perf_counter()
            late_s = now_s - self._slept_s - self.free_s
            self._slept_s, self._lost_s = now_s, self._lost_s + max(0.0, late_s)

    def stop(self) -> None:
        self._over.set()


@pytest.fixture
def stalls() -> Iterator[Stalls]:
    """Measures stalls of the machine during a test of real time."""
    watched = Stalls()
    thread = threading.Thread(target=watched.run, name="stalls", daemon=True)
    thread.start()
    yield watched
    watched.stop()
    thread.join()


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
