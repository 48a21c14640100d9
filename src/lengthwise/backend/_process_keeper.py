"""Ends a process group when whoever started it is gone: python _process_keeper.py GROUP GRACE_S < pipe.

The starter holds the other end of the pipe and writes nothing. However it ends, killed included, the pipe
then closes. A script of its own: it imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time


def end(group: int, grace_s: float) -> None:
    """Asks the group to end, and ends it after the grace."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGTERM)
        for _ in range(int(grace_s * 10)):
            os.killpg(group, 0)  # raises when nobody is left
            time.sleep(0.1)
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end(int(sys.argv[1]), float(sys.argv[2]))
