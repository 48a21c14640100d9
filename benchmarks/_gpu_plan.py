"""What a GPU's campaign is made of: models and sizes, the time it may take, what the machine must have."""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

BLOCK = 32
NEEDED = ("numpy", "scipy", "polars", "numba", "platformdirs", "torch")
"""What the campaign imports; the engine needs transformers besides. Neither typer nor rich, pydantic or aiohttp."""
LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
"""Shapes of Meta's Llama 3 8B, as its config.json states them; no weight of it is used."""
LLAMA_32_1B = LLAMA_3_8B | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
"""Shapes of Meta's Llama 3.2 1B, likewise."""
TINY = LLAMA_3_8B | {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Plan:
    """Sizes of a campaign; seconds are the most that a part may take."""

    config: Mapping[str, Any]
    name: str
    dtype: str
    prompt: tuple[float, float, int, int]
    output: tuple[float, float, int, int]
    seqs: int
    step_tokens: int
    blocks: int
    max_model_len: int
    profile_s: float
    static_s: float
    seconds: float
    repeats: int

    @property
    def needs_bytes(self) -> float:
        """Of the GPU: weights, cache, and for both processes what libraries, activations and flushing take."""
        c, itemsize = self.config, 4 if self.dtype == "float32" else 2
        wide = (c["num_attention_heads"] + c["num_key_value_heads"]) * c["head_dim"]
        layer = 2 * c["hidden_size"] * wide + 3 * c["hidden_size"] * c["intermediate_size"]
        tables = c["vocab_size"] * c["hidden_size"] * (1 if c["tie_word_embeddings"] else 2)
        kept = 2 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"]
        weights = c["num_hidden_layers"] * layer + tables
        return float(itemsize) * (weights + kept * self.blocks * BLOCK) * 1.05 + 4e9


BIG = Plan(
    LLAMA_3_8B, "llama-3-8b-shaped", "bfloat16", (256, 0.7, 16, 1500), (96, 0.6, 8, 400),
    seqs=32, step_tokens=512, blocks=2048, max_model_len=2048,
    profile_s=120.0, static_s=20.0, seconds=25.0, repeats=2,
)  # fmt: skip
MIDDLE = replace(BIG, config=LLAMA_32_1B, name="llama-3.2-1b-shaped")
SMALL = Plan(
    TINY, "tiny-llama", "float32", (64, 0.7, 8, 500), (24, 0.6, 4, 120),
    seqs=16, step_tokens=512, blocks=512, max_model_len=1024,
    profile_s=20.0, static_s=5.0, seconds=6.0, repeats=1,
)  # fmt: skip


class Clock:
    """Seconds of a budget for all; the last part of it is for calibrating and simulating."""

    def __init__(self, budget_s: float) -> None:
        self.budget_s, self.start = budget_s, time.monotonic()
        self.end_s = min(60.0, 0.2 * budget_s)

    @property
    def elapsed_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self.start

    def left_s(self) -> float:
        """Until the budget is used up; never below 0."""
        return max(0.0, self.budget_s - self.elapsed_s)

    def to_measure_s(self) -> float:
        """Until it is time to calibrate and to simulate."""
        return max(0.0, self.left_s() - self.end_s)


def lacking(names: Sequence[str]) -> list[str]:
    """Those of the modules that this interpreter does not find."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def fitting(plans: Sequence[Plan], free_bytes: float) -> Plan | None:
    """The first plan that the free memory suffices for."""
    return next((plan for plan in plans if plan.needs_bytes <= free_bytes), None)


def as_installed(checkout: Path) -> str:
    """A folder for sys.path that tells the version of a checkout, as an installation would."""
    about = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    folder = Path(tempfile.mkdtemp(prefix="lengthwise-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    told = folder / f"{about['name']}-{about['version']}.dist-info" / "METADATA"
    told.parent.mkdir()
    told.write_text(f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n")
    return str(folder)


class UnfitError(Exception):
    """This machine lacks something for the campaign."""


def cuda() -> Any:
    """torch, which sees a GPU here; UnfitError says that it does not, or that there is no torch."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: its libraries are not here
        raise UnfitError(f"the campaign needs torch, which does not import in {sys.executable}: {error}") from error
    if not torch.cuda.is_available():
        raise UnfitError(
            "no CUDA GPU: the campaign needs one that torch can use, and torch sees none here. Run it on a machine "
            "with one, or try the script with --device cpu --tiny"
        )
    return torch


def chosen(given: argparse.Namespace) -> Plan:
    """The largest plan that this machine can do; UnfitError says what it lacks, a GPU before anything else."""
    torch = cuda() if given.device != "cpu" else None
    own = given.engine_python == sys.executable
    if lacks := lacking((*NEEDED, *(("transformers",) if own else ()))):
        raise UnfitError(
            f"the campaign needs {', '.join(lacks)} in {sys.executable}: pip install {' '.join(lacks)}"
            + (", or name an environment with torch and transformers: --engine-python" if own else "")
        )
    if torch is None:
        return SMALL if given.tiny else BIG
    return _fitting_here(torch, tiny=given.tiny)


def _fitting_here(torch: Any, *, tiny: bool) -> Plan:
    """The largest plan that the GPU's free memory suffices for."""
    try:
        free = float(torch.cuda.mem_get_info()[0])
    except RuntimeError as error:
        raise UnfitError(f"the GPU lets nobody in: {str(error).splitlines()[0]}; look at nvidia-smi") from error
    plans = [replace(SMALL, dtype="bfloat16")] if tiny else [BIG, MIDDLE]
    plan = fitting(plans, free)
    if plan is None:
        raise UnfitError(
            f"{free / 1e9:.1f} GB of the GPU are free, {plans[-1].name} needs {plans[-1].needs_bytes / 1e9:.0f}: "
            "end what else runs there (nvidia-smi), or try --tiny"
        )
    if plan is not plans[0]:
        print(f"{free / 1e9:.1f} GB are free, too few for {plans[0].name}: {plan.name}", file=sys.stderr)
    return plan
