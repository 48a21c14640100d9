"""An engine that is not ready before a file is there: python gated.py FILE WORDS..."""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path

print(f"waits {os.getpid()}", flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.02)
sys.argv = sys.argv[1:]
runpy.run_module("lengthwise.testing.engine_server", run_name="__main__")
