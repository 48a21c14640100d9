"""End a process group when its starter has died: python _process_keeper.py GROUP GRACE_S < pipe.

The starter holds the other end of the pipe and writes nothing; the pipe closes when the starter dies, even by SIGKILL.
This script is separate and imports nothing from the package.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time


def end(group: int, grace_s: float) -> None:
    """End a process group by SIGTERM, and after the grace period by SIGKILL."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGTERM)
        for _ in range(int(grace_s * 10)):
            os.killpg(group, 0)  # raises once the group is empty
            time.sleep(0.1)
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end(int(sys.argv[1]), float(sys.argv[2]))
