"""What a profile tells of itself: what it is of, what it lacks, and what two runs of one must share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from lengthwise.measure.operators import _host, machine
from lengthwise.measure.operators.device import Device, emulates_bfloat16
from lengthwise.measure.operators.points import Reach, unmeasured
from lengthwise.schema.model import ModelSpec
from lengthwise.schema.profile import ProfileFacts

_BUSY = 0.5
_DECODE_NOTE = (
    "decode attention reads dense keys and values, each sequence's in one piece and in place, heads that share keys "
    "as queries of one head; engines read blocks of a paged cache through a table, for which torch has no kernel, so "
    "that theirs may take longer. A skew is one long context beside equal short ones"
)


def said(where: Device, tp: Sequence[int], groups: Sequence[int], model: ModelSpec) -> tuple[str, ...]:
    """What every such measurement must tell; ``groups``: over how many devices collectives were measured."""
    told = [
        *unmeasured(model),
        _host.NOTE,
        _DECODE_NOTE,
    ]
    if max(tp) == 1:
        told.append("all-reduce and send were not measured: no TP degree above 1 was asked for")
    elif where.kind == "cpu":
        told.append("all-reduce and send are between two processes of this machine, by gloo")
    elif missing := ", ".join(str(n) for n in sorted(set(tp)) if n > 1 and n not in groups):
        told.append(f"all-reduce and send over {missing} GPUs were not measured: this machine has fewer")
    if max(tp) > 1:
        told.append("logits gather was not measured")
    if where.kind == "cpu" and where.dtype == "bfloat16" and emulates_bfloat16():
        told.append("this processor has no bfloat16: torch converts, which takes far longer")
    if machine.load() > _BUSY and where.kind == "cpu":
        told.append(
            f"other processes wanted the cores: {machine.load():.1f} a core in the last minute, ours included"
        )
    return tuple(told)


def identity(
    torch: Any, model: ModelSpec, where: Device, tp: Sequence[int], reach: Reach, seed: int
) -> dict[str, Any]:
    """What points of two runs must share to belong together."""
    return {
        "model": model.name,
        "shapes": hashlib.sha256(repr(model).encode()).hexdigest()[:12],
        "device": machine.device_name(torch, where),
        "dtype": where.dtype,
        "threads": where.threads,
        "tp": sorted(set(tp)),
        "reach": asdict(reach),
        "seed": seed,
        "torch": str(torch.__version__),
    }


def facts(torch: Any, model: ModelSpec, where: Device, notes: tuple[str, ...]) -> ProfileFacts:
    """Where a profile comes from."""
    name = machine.device_name(torch, where)
    return ProfileFacts(
        name=f"{model.name} on {name}, {where.dtype}",
        source="lengthwise",
        gpu=name,
        model=model.name,
        engine=f"torch {torch.__version__}",
        measured=datetime.now(UTC).date().isoformat(),
        machine=machine.facts(torch, where),
        notes=notes,
    )
