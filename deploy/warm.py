"""Compiles at image build what a gateway would else compile while its first requests wait.

The machine code is of a generic CPU (NUMBA_CPU_NAME=generic), so that it is good on every node of the same
architecture; it goes to LENGTHWISE_CACHE_DIR.
"""

from __future__ import annotations

import sys

from lengthwise import engine
from lengthwise.gateway.config import MODES, Admission, Dispatch, Order
from lengthwise.gateway.core import Scheduler
from lengthwise.policy import known
from lengthwise.predict import default


def main() -> None:
    """Compiles; a second time it finds all of it and is done at once."""
    engine.warm_up()  # of looks back (--mode observe, the admin page)
    default()
    for mode in MODES:
        Scheduler(Order(mode=mode), Admission(), Dispatch())
    for rank in known("rank"):
        Scheduler(Order(mode="isrtf", rank=rank), Admission(), Dispatch())
    sys.stdout.write("compiled\n")


if __name__ == "__main__":
    main()
