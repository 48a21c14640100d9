"""A GPU's campaign: profile a Llama of 8 billion random weights, serve it, calibrate, simulate, compare.

    python benchmarks/gpu_campaign.py [--out FOLDER] [--budget 470]   seconds in total, unattended
    python benchmarks/gpu_campaign.py --device cpu --tiny              the same code without a GPU, two minutes

It needs NEEDED and transformers (or the engine's two in another environment: --engine-python), lengthwise installed or
this checkout, and no network. The engine is transformers' continuous batching. Every file is written as soon as
possible; repeats beyond the budget are omitted. A GPU with less memory gets a Llama of one billion.
"""

import argparse
import atexit
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from _harness import RECORDED, json_lines

FOLDER = Path(__file__).resolve().parent
CAMPAIGN, RESULTS, GRACE_S = Path(__file__), FOLDER / "results" / "gpu", 5.0
NEEDED = ("numpy", "scipy", "polars", "numba", "platformdirs", "torch")
"""Imports of the campaign; the engine needs transformers as well. Neither typer nor rich, pydantic or aiohttp."""
LLAMA_3_8B, LLAMA_32_1B, TINY = (RECORDED["shapes"][name] for name in ("llama-3-8b", "llama-3.2-1b", "tiny"))
"""Shapes of Meta's Llama 3 8B and 3.2 1B, as their config.json state them, and of a tiny one; no weights are used."""


@dataclass(frozen=True)
class Plan:
    """Sizes of a campaign: lengths of prompts and outputs, sequences and tokens of a step, fields of ``_live.Plan``."""

    config: Mapping[str, Any]
    name: str
    dtype: str
    lengths: tuple[tuple[float, float, int, int], tuple[float, float, int, int]]
    steps: tuple[int, int]
    sizes: Mapping[str, Any]

    @property
    def needs_bytes(self) -> float:
        """Return the GPU's memory for weights and cache, and for libraries and activations of both processes."""
        from _circle import BLOCK

        from lengthwise import catalog

        c, itemsize = self.config, 4 if self.dtype == "float32" else 2
        per_token = 2 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"] * itemsize
        weights = catalog.weight_bytes(catalog.model_from_config(dict(c), self.name), self.dtype)
        return float((weights + per_token * self.sizes["blocks"] * BLOCK) * 1.05 + 4e9)


_SIZES = {"blocks": 2048, "max_model_len": 2048, "profile_s": 120.0, "static_s": 20.0, "seconds": 25.0, "repeats": 2}
_FEW = {"blocks": 512, "max_model_len": 1024, "profile_s": 20.0, "static_s": 5.0, "seconds": 6.0, "repeats": 1}
BIG = Plan(LLAMA_3_8B, "llama-3-8b-shaped", "bfloat16", ((256, 0.7, 16, 1500), (96, 0.6, 8, 400)), (32, 512), _SIZES)
MIDDLE = replace(BIG, config=LLAMA_32_1B, name="llama-3.2-1b-shaped")
SMALL = Plan(TINY, "tiny-llama", "float32", ((64, 0.7, 8, 500), (24, 0.6, 4, 120)), (16, 512), _FEW)


@dataclass(frozen=True)
class Clock:
    """A budget of seconds; the last part of it is for calibration and simulation."""

    budget_s: float
    start_s: float = field(default_factory=time.monotonic)

    def left_s(self) -> float:
        return max(0.0, self.budget_s - (time.monotonic() - self.start_s))

    def to_measure_s(self) -> float:
        return max(0.0, self.left_s() - min(60.0, 0.2 * self.budget_s))


def fitting(plans: Sequence[Plan], free_bytes: float) -> Plan | None:
    return next((plan for plan in plans if plan.needs_bytes <= free_bytes), None)


def as_installed(checkout: Path) -> str:
    """Return a folder for sys.path with the version of a checkout, as an installation would have it."""
    about = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    folder = Path(tempfile.mkdtemp(prefix="lengthwise-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    metadata = folder / f"{about['name']}-{about['version']}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n")
    return str(folder)


class UnfitError(Exception):
    """The machine does not meet a requirement of the campaign."""


def cuda() -> Any:
    """Return torch, which finds a GPU; raise UnfitError without a torch or a GPU."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: its libraries are not here
        raise UnfitError(f"the campaign needs torch, which does not import in {sys.executable}: {error}") from error
    if not torch.cuda.is_available():
        raise UnfitError("no CUDA GPU that torch finds; without one: --device cpu --tiny")
    return torch


def chosen(args: argparse.Namespace) -> Plan:
    """Return the largest plan that this machine can do; raise UnfitError for what it lacks, first of all a GPU."""
    torch = cuda() if args.device != "cpu" else None
    own = ["transformers"] if args.engine_python == sys.executable else []
    lacks = [name for name in (*NEEDED, *own) if importlib.util.find_spec(name) is None]
    if lacks:
        other = "; or an environment with torch and transformers: --engine-python" if own else ""
        words = f"needs {', '.join(lacks)} in {sys.executable}: pip install {' '.join(lacks)}"
        raise UnfitError(f"the campaign {words}{other}")
    if torch is None:
        return SMALL if args.tiny else BIG
    try:
        free_bytes = float(torch.cuda.mem_get_info()[0])
    except RuntimeError as error:
        raise UnfitError(f"the GPU does not respond: {str(error).splitlines()[0]}; look at nvidia-smi") from error
    plans = [replace(SMALL, dtype="bfloat16")] if args.tiny else [BIG, MIDDLE]
    free = f"{free_bytes / 1e9:.1f} GB of the GPU are free"
    if (plan := fitting(plans, free_bytes)) is None:
        needs = f"{plans[-1].name} needs {plans[-1].needs_bytes / 1e9:.0f}"
        raise UnfitError(f"{free}, {needs}: end other processes on it (nvidia-smi), or try --tiny")
    if plan is not plans[0]:
        print(f"{free}, too few for {plans[0].name}: {plan.name}", file=sys.stderr)
    return plan


def figures(_shared: Path, quick: bool) -> dict[str, Any]:
    """Run the campaign; return rows by name. Profile and records go to results/gpu; quick: a small model, not saved."""
    try:
        cuda()
    except UnfitError as error:
        raise FileNotFoundError(str(error)) from error
    with tempfile.TemporaryDirectory() as scratch:
        folder = scratch if quick else str(RESULTS)
        command = [sys.executable, str(CAMPAIGN), "--out", folder, *(["--tiny"] if quick else [])]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        print(done.stderr, end="", file=sys.stderr)
        file = Path(folder) / "rows.json"
        if not file.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise FileNotFoundError(f"the campaign ended without rows ({done.returncode}): {last}")
        return {row.pop("name"): {k: v for k, v in row.items() if v is not None} for row in json_lines(file)}


if importlib.util.find_spec("lengthwise") is None:
    sys.path[:0] = [str(FOLDER.parent / "src"), as_installed(FOLDER.parent)]


def main() -> int:
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
    from _circle import Lengths, Setting  # imports what ``chosen`` looks for
    from _live import Circle
    from _live import Plan as Sizes

    from lengthwise.schema.errors import LengthwiseError

    same = {"dtype": plan.dtype, "lengths": Lengths(*plan.lengths), "left_s": clock.to_measure_s, **plan.sizes}
    sizes = Sizes(plan.name, (), Setting("fifo", *plan.steps), least=16, **same)
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
