"""Compile at image build the code that a gateway would otherwise compile while its first requests wait.

The machine code is for a generic CPU (NUMBA_CPU_NAME=generic), so that it runs on every node of the same
architecture; it is stored in LENGTHWISE_CACHE_DIR.
"""

from __future__ import annotations

import sys

from lengthwise import engine
from lengthwise.gateway.config import MODES, Admission, Dispatch, Order
from lengthwise.gateway.core import Scheduler
from lengthwise.policy import known
from lengthwise.predict import default


def main() -> None:
    """Compile all ranks and modes; a second run loads them from the cache."""
    engine.warm_up()  # for --mode observe and the admin page
    default()
    for mode in MODES:
        Scheduler(Order(mode=mode), Admission(), Dispatch())
    for rank in known("rank"):
        Scheduler(Order(mode="isrtf", rank=rank), Admission(), Dispatch())
    sys.stdout.write("compiled\n")


if __name__ == "__main__":
    main()
