"""A GPU's campaign: profile a Llama of 8 billion random weights, serve it, calibrate, simulate, compare.

    python benchmarks/gpu_campaign.py [--out FOLDER] [--budget 470]   seconds in total, unattended
    python benchmarks/gpu_campaign.py --device cpu --tiny              the same code without a GPU, two minutes

It needs numpy, scipy, polars, numba, platformdirs, torch and transformers in one environment (or the engine's two
in another: --engine-python), lengthwise installed or this checkout, and no network. A GPU image that lacks polars and
platformdirs gets wheels that were fetched elsewhere for its Python:

    pip download --only-binary=:all: --dest wheels polars platformdirs
    pip install --no-index --find-links wheels polars platformdirs          (or --target FOLDER, on PYTHONPATH)

The engine is transformers' continuous batching. Every file is written as soon as possible; repeats that the budget has
no time for are left out. A GPU with less memory gets a Llama of one billion.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import threading
from pathlib import Path

from _gpu import RESULTS, Clock, Plan, UnfitError, as_installed, chosen

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
    return campaign(args.out.resolve(), args.device, plan, args.engine_python, clock)


def campaign(out: Path, device: str, plan: Plan, python: str, clock: Clock) -> int:
    """Run the campaign; return the exit status."""
    from _circle import Lengths, Setting  # imports what ``chosen`` looks for
    from _live import Circle
    from _live import Plan as Sizes

    from lengthwise.schema.errors import LengthwiseError

    setting, lengths = Setting("fifo", plan.seqs, plan.step_tokens), Lengths(plan.prompt, plan.output)
    names = ("dtype", "max_model_len", "blocks", "profile_s", "static_s", "seconds", "repeats")
    same = {name: getattr(plan, name) for name in names}
    sizes = Sizes(plan.name, (), setting, lengths=lengths, least=16, left_s=clock.to_measure_s, **same)
    try:
        circle = Circle(out, out, sizes, plan.config, device=device, python=python)
        rows = circle.transformers(f"fidelity.gpu.{plan.name}")
    except LengthwiseError as error:
        print(f"ended: {error}", file=sys.stderr)
        return 1
    if rows:
        circle.write(rows)
    return 0 if rows else 1


def end_at(seconds: float) -> None:
    """End this process after some seconds in any state; its engine ends soon after it."""
    timer = threading.Timer(seconds, lambda: os._exit(4))
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main())
