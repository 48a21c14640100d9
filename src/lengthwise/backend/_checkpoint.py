"""Which checkpoint a deployment loads, and in which format."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lengthwise.backend.launch import PLACEHOLDER
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.model import ModelSpec
from lengthwise.schema.units import dtype_name

_INSTRUCTED = re.compile(r"[-_](instruct|chat|it)([-_]|$)", re.IGNORECASE)
PLAIN = ("float32", "float16", "bfloat16")
_CHECKPOINTS = {
    "fp8": "an FP8 checkpoint",
    "int8": "a W8A8 INT8 checkpoint",
    "int4": "an AWQ or GPTQ checkpoint of 4 bits",
    "fp4": "an NVFP4 or MXFP4 checkpoint",
}


@dataclass(frozen=True)
class Checkpoint:
    """What is loaded.

    Attributes:
        model: A Hugging Face id, a folder, or PLACEHOLDER.
        dtype: For ``--dtype``; None leaves it to the checkpoint.
        quantization: For ``--quantization``; None leaves it to the checkpoint.
        notes: What must be known of it.
    """

    model: str
    dtype: str | None
    quantization: str | None
    notes: tuple[str, ...]


def checkpoint(deployment: Deployment, given: str | None, online: dict[str, str]) -> Checkpoint:
    """The checkpoint that was simulated, or the one that was given.

    Args:
        deployment: What was simulated.
        given: A checkpoint to load instead; what it is quantised to is then its own affair.
        online: What the engine quantises to while it loads 16-bit weights, by dtype.
    """
    wanted = dtype_name(deployment.limits.weight_dtype or deployment.model.dtype)
    published = dtype_name(deployment.model.dtype)
    known, notes = (given, ()) if given else published_checkpoint(deployment.model)
    if wanted in PLAIN:
        if published not in PLAIN:
            notes += (f"The published weights are {published}; {wanted} needs a checkpoint of its own.",)
        return Checkpoint(known, wanted, None, notes)
    if given or wanted == published:
        return Checkpoint(known, None, None, (*notes, _simulated(wanted)))
    if wanted in online:
        return Checkpoint(known, None, online[wanted], (*notes, _online(wanted, online[wanted])))
    need = (
        f"Weights of {wanted} were simulated: set MODEL to {_CHECKPOINTS[wanted]} of {deployment.model.name}."
    )
    return Checkpoint(PLACEHOLDER, None, None, (need,))


def published_checkpoint(model: ModelSpec) -> tuple[str, tuple[str, ...]]:
    """Where a model's weights are, as far as the catalog knows, and what must be known of them.

    Of checkpoints of the same shapes one that follows instructions goes first: engines refuse chats with a base model,
    which has no chat template.
    """
    if ids := [alias for alias in model.facts.aliases if alias.count("/") == 1]:
        ids.sort(key=lambda one: not _INSTRUCTED.search(one))  # stable: else as the catalog has them
        others = f" Its siblings have the same shapes: {', '.join(ids[1:])}." if ids[1:] else ""
        return ids[0], (f"{ids[0]} is loaded; another checkpoint of these shapes runs as fast.{others}",)
    if model.facts.source.endswith("config.json") and "://" not in model.facts.source:
        folder = Path(model.facts.source).expanduser().absolute().parent
        return str(folder), ("The folder of config.json must also hold weights and a tokenizer.",)
    source = f" (shapes from {model.facts.source})" if model.facts.source else ""
    return PLACEHOLDER, (f"No published weights of {model.name} are known{source}: set MODEL.",)


def _simulated(wanted: str) -> str:
    return f"Weights of {wanted} were simulated: the checkpoint must be {_CHECKPOINTS[wanted]}."


def _online(wanted: str, method: str) -> str:
    return (
        f"Weights of {wanted} were simulated: the engine quantises 16-bit weights while it loads them "
        f"(--quantization {method}). For {_CHECKPOINTS[wanted]} set MODEL to it and drop the flag."
    )
