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
    *,
    dram_bytes_per_s: float = DRAM_BYTES_PER_S,
    ssd_bytes_per_s: float = SSD_BYTES_PER_S,
) -> Redeployment:
    """Seconds to load all weights, every GPU and every node at a time.

    The paper's own where it measured the model on so many such GPUs. Under WAA a decoder-only model is there twice.

    Args:
        model: What is loaded.
        cluster: Where to.
        strategy: Whose layout.
        dram_bytes_per_s: From host memory to each GPU.
        ssd_bytes_per_s: From the drives of each node.
    """
    copies = 2 if strategy is not Strategy.RRA and not model.encoder_layers else 1
    own_rates = (dram_bytes_per_s, ssd_bytes_per_s) == (DRAM_BYTES_PER_S, SSD_BYTES_PER_S)
    measured = (
        _MEASURED.get((model.name, cluster.gpu.name, cluster.gpus)) if own_rates and copies == 1 else None
    )
    if measured:
        return Redeployment(*measured, f"{SOURCE}, measured")
    loaded = copies * weight_bytes(model)
    nodes = -(-cluster.gpus // cluster.node.gpus)
    return Redeployment(
        loaded / cluster.gpus / dram_bytes_per_s,
        loaded / nodes / ssd_bytes_per_s,
        f"{SOURCE}: its rates" if own_rates else "rates as given",
    )


__all__ = ["DRAM_BYTES_PER_S", "SSD_BYTES_PER_S", "redeployment"]
