"""A GPU's campaign: profile a Llama of 8 billion random weights, serve it, calibrate, simulate, compare.

    python benchmarks/gpu_campaign.py [--out FOLDER] [--budget 470]   seconds in total, unattended
    python benchmarks/gpu_campaign.py --device cpu --tiny              the same code without a GPU, two minutes

It needs numpy, scipy, polars, numba, platformdirs, torch and transformers in one environment (or the engine's two
in another: --engine-python), lengthwise installed or this checkout, no network and no downloads. An image for GPUs may
lack polars, which writes profile and records, and platformdirs, which locates the cache of compiled code. On a machine
without network install wheels of both that were fetched elsewhere, for the image's Python:

    pip download --only-binary=:all: --dest wheels polars platformdirs      (polars brings polars-runtime-32)
    pip install --no-index --find-links wheels polars platformdirs          (or --target FOLDER, on PYTHONPATH)

The engine is transformers' continuous batching. Measurements are written as they come: points of the profile, the
profile (Parquet), each run's records, progress.json, and at last rows.json. Repeats that the budget has no time for
are left out. A GPU with less memory gets a Llama of one billion.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import threading
from pathlib import Path

from _gpu import RESULTS, Clock, UnfitError, as_installed, chosen

HERE = Path(__file__).resolve().parent
GRACE_S = 5.0
if importlib.util.find_spec("lengthwise") is None:
    sys.path[:0] = [str(HERE.parent / "src"), as_installed(HERE.parent)]


def main() -> int:
    """Run the campaign of the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for profile, records and rows")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a small model: to try the script")
    parser.add_argument("--budget", type=float, default=470.0, metavar="SECONDS", help="for all of it")
    parser.add_argument("--engine-python", default=sys.executable, help="has torch and transformers")
    args = parser.parse_args()
    if args.budget <= 0:
        parser.error(f"--budget must be above 0 s; got {args.budget:g}")
    clock = Clock(args.budget)
    end_at(args.budget + GRACE_S)
    try:
        plan = chosen(args)
    except UnfitError as error:
        print(error, file=sys.stderr)
        return 2
    from _circle_gpu import Campaign  # imports what ``chosen`` looks for

    return Campaign(args.out.resolve(), args.device, plan, args.engine_python, clock).run()


def end_at(seconds: float) -> None:
    """End this process after some seconds in any state; its engine ends soon after it."""
    timer = threading.Timer(seconds, lambda: os._exit(4))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main())
