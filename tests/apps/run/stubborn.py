"""An engine that does not go when it is asked to, or (never) one that is never ready: python stubborn.py WORDS..."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
if sys.argv[1] != "never":
    subprocess.run([sys.executable, "-m", "lengthwise.testing.engine_server", *sys.argv[1:]], check=False)
time.sleep(3600)
