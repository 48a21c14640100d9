"""What is said where memory holds no schedule: how much the weights need and how much there is, or why else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from lengthwise.schedule._prepared import Setting
from lengthwise.schedule.controls import Strategy
from lengthwise.schedule.estimates import Reason
from lengthwise.schedule.layout import Layout, rra_layout, splits, waa_layout
from lengthwise.schedule.memory import stage_bytes
from lengthwise.schedule.sides import WHY_NOT, Side
from lengthwise.schema.errors import InputError

_GB = 1e9


def why_nothing_fits(setting: Setting, sides: Sequence[Side]) -> str:
    """The reason, in words: once for all where it is the weights, else by reason."""
    cluster = setting.cluster
    on = f"{cluster.gpus} {'GPU' if cluster.gpus == 1 else 'GPUs'}"
    reasons = [side.why_not for side in sides]
    if WHY_NOT[Reason.WEIGHTS] in reasons and WHY_NOT[Reason.CACHE] not in reasons:
        told = (
            f"the weights of {setting.model.name} need {_least_bytes(setting, sides) / _GB:.3g} GB on the fullest GPU, "
            f"and {setting.usable_bytes / _GB:.3g} GB are there for them ({cluster.gpu.name})"
        )
    else:
        named = {why: [_named(side) for side in sides if side.why_not == why] for why in reasons}
        told = "; ".join(f"{why} ({', '.join(names)})" for why, names in named.items())
    return f"no schedule fits {on}: {told}. {_advice(setting, reasons)}"


def _advice(setting: Setting, reasons: Sequence[str]) -> str:
    """What to do: about memory where it is short anywhere, for more of it may do there; else about the layout."""
    if WHY_NOT[Reason.WEIGHTS] in reasons or WHY_NOT[Reason.CACHE] in reasons:
        return "Use more GPUs, or GPUs with more memory"
    if WHY_NOT[Reason.LAYERS] in reasons:
        layers = setting.model.layers
        return (
            f"Use fewer GPUs, or more of them a stage (a higher tensor-parallel degree): a pipeline of "
            f"{setting.model.name} has at most {layers:,} {'stage' if layers == 1 else 'stages'}, one a layer"
        )
    if WHY_NOT[Reason.GROUPS] in reasons:
        return "Use a lower tensor-parallel degree, RRA, or more GPUs"
    return "Give cost tables of TP 1 too, or use as many GPUs as the degree divides"


def _least_bytes(setting: Setting, sides: Sequence[Side]) -> float:
    """Weights on the fullest GPU, where that is least."""
    none = np.zeros(1)
    least = np.inf
    for layout in _layouts(setting, sides):
        sizes = setting.sizes(layout.stages)
        parts = {layout.encode, layout.decode}
        heaviest = max(stage_bytes(sizes, stages, none, None, none, none)[1] for stages in parts)
        least = min(least, heaviest)
    return float(least)


def _layouts(setting: Setting, sides: Sequence[Side]) -> Iterator[Layout]:
    """All layouts of those whose weights do not fit."""
    layers, gpus = setting.model.layers, setting.cluster.gpus
    for side in (side for side in sides if side.why_not == WHY_NOT[Reason.WEIGHTS]):
        for groups in range(1, gpus // side.tp + 1) if side.tp > 1 else (0,):
            encoding = [gpus] if side.strategy is Strategy.RRA else splits(gpus, side.tp, groups).tolist()
            for encode in encoding:
                try:
                    if side.strategy is Strategy.RRA:
                        yield rra_layout(layers, gpus, side.tp, groups)
                    else:
                        yield waa_layout(layers, gpus, encode, side.tp, groups)
                except InputError:
                    continue  # more stages than layers


def _named(side: Side) -> str:
    return f"{side.strategy.value.upper()} at TP {side.tp}"


__all__ = ["why_nothing_fits"]
