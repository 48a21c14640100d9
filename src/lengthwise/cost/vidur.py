"""Cost tables from Vidur: its prediction tables and its profiles."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lengthwise.cost._npz import read_npz
from lengthwise.cost._vidur_rule import compose
from lengthwise.schema.cost_tables import CostTables, Ints
from lengthwise.schema.errors import ProfileError
from lengthwise.schema.model import ModelSpec


def vidur_tables(npz_path: Path | str, model: ModelSpec, pp: int = 1) -> CostTables:
    """Cost tables from Vidur's complete prediction tables (milliseconds a layer, one array an operator).

    Args:
        npz_path: An npz of ``attn_pre_proj``, ``mlp_up_proj`` ... [T+1], ``attn_prefill``
            [context / 64, chunk], ``attn_decode`` [sequences, context / 64], and ``all_reduce``
            when they were made for more than one GPU.
        model: Gives the layers and whether attention is grouped.
        pp: Pipeline stages; every stage gets as many layers.

    Raises:
        ProfileError: The file cannot be read, lacks an operator, or ``pp`` does not divide the layers.
    """
    ops = {name: array.astype(np.float64) for name, array in read_npz(npz_path).items()}
    return compose(ops, model, equal_stages(model, pp), f"vidur tables {Path(npz_path).name}")


def equal_stages(model: ModelSpec, pp: int) -> Ints:
    """[pp] the same number of layers a stage, as Vidur demands."""
    if pp < 1 or model.layers % pp:
        raise ProfileError(
            f"pp must divide the {model.layers} layers of {model.name} for Vidur's rule; it is {pp}"
        )
    return np.full(pp, model.layers // pp, dtype=np.int64)
