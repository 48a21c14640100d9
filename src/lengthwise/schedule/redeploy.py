"""What it takes to load a model anew: seconds by its size, the cluster and where the weights come from."""

from __future__ import annotations

from lengthwise.catalog import weight_bytes
from lengthwise.schedule.controls import Cluster, Strategy
from lengthwise.schema.model import ModelSpec
from lengthwise.schema.schedule import Redeployment

DRAM_BYTES_PER_S = 4.9e9
"""From host memory to one GPU. ExeGPT's Table 4 has 4.1e9 to 5.4e9: 2 bytes a parameter over the GPUs and seconds."""
SSD_BYTES_PER_S = 7.3e9
"""From the drives of one node of 8 GPUs. Table 4 has 7.1e9 to 7.5e9 for its three larger models, 18.6e9 for 39B."""
SOURCE = "ExeGPT (Oh et al., ASPLOS 2024), Table 4"

_MEASURED = {
    ("gpt-3-39b", "A40", 16): (0.9, 2.1),
    ("gpt-3-101b", "A40", 32): (1.3, 7.1),
    ("gpt-3-175b", "A40", 32): (2.1, 11.9),
    ("gpt-3-341b", "A40", 48): (3.5, 15.1),
}
"""The table does not name the GPUs; only the A40s of the paper are 32 and more (its A100s are 16)."""


def redeployment(
    model: ModelSpec,
    cluster: Cluster,
    strategy: Strategy = Strategy.RRA,
) -> Redeployment:
    """Seconds to load all weights, every GPU and every node at a time.

    At the cluster's rates; of one that it does not say, the paper's own seconds where it measured the model on so many
    such GPUs, else the paper's rate. Under WAA a decoder-only model is there twice.

    Args:
        model: What is loaded.
        cluster: Where to, and how fast.
        strategy: Whose layout.
    """
    copies = 2 if strategy is not Strategy.RRA and not model.encoder_layers else 1
    rates = cluster.dram_bytes_per_s, cluster.ssd_bytes_per_s
    measured = _MEASURED.get((model.name, cluster.gpu.name, cluster.gpus)) if copies == 1 else None
    loaded = copies * weight_bytes(model)
    nodes = -(-cluster.gpus // cluster.node.gpus)
    dram_s, ssd_s = measured or (loaded / cluster.gpus / DRAM_BYTES_PER_S, loaded / nodes / SSD_BYTES_PER_S)
    return Redeployment(
        dram_s if rates[0] is None else loaded / cluster.gpus / rates[0],
        ssd_s if rates[1] is None else loaded / nodes / rates[1],
        _source(rates, measured=measured is not None),
    )


def _source(rates: tuple[float | None, float | None], *, measured: bool) -> str:
    paper = f"{SOURCE}, measured" if measured else f"{SOURCE}: its rates"
    if None not in rates:
        return "rates as given"
    given = [place for place, rate in zip(("host memory", "drives"), rates, strict=True) if rate is not None]
    return f"{given[0]}: rate as given; else {paper}" if given else paper


__all__ = ["DRAM_BYTES_PER_S", "SSD_BYTES_PER_S", "redeployment"]
