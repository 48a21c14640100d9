"""GPUs, the links between them, and nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GpuSpec:
    """One accelerator (or a CPU socket) from its data sheet.

    ``peak_flops`` maps a dtype's one spelling (units.dtype_name) to dense FLOP/s, without
    sparsity; ``memory_bytes`` is what the driver offers; ``bandwidth_bytes_per_s`` is the
    memory's; ``price_per_hour_usd`` is one on-demand price with ``price_source``.
    """

    name: str
    peak_flops: dict[str, float]
    memory_bytes: float
    bandwidth_bytes_per_s: float
    tdp_w: float
    idle_w: float
    price_per_hour_usd: float
    price_source: str
    source: str
    aliases: tuple[str, ...] = ()

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s for weights of this dtype; formats without units of their own run as bf16."""
        for name in (dtype, "bfloat16", "float16", "float32"):
            if name in self.peak_flops:
                return self.peak_flops[name]
        raise KeyError(dtype)


@dataclass(frozen=True)
class LinkSpec:
    """A link: bytes a second in one direction for one GPU, and the latency of one message."""

    name: str
    bandwidth_bytes_per_s: float
    latency_s: float
    source: str


@dataclass(frozen=True)
class NodeSpec:
    """A machine: how many GPUs, and what joins them.

    ``link`` joins GPUs of one ``link_group`` (2 for pairwise NVLink, all of them for
    NVSwitch); ``fallback_link`` joins the groups inside the node; ``network`` joins nodes.
    """

    name: str
    gpus: int
    link: LinkSpec
    link_group: int
    fallback_link: LinkSpec
    network: LinkSpec
    source: str
    aliases: tuple[str, ...] = ()

    def link_for(self, gpus: int) -> LinkSpec:
        """The slowest link inside a group of so many neighbouring GPUs."""
        if gpus <= self.link_group:
            return self.link
        return self.fallback_link if gpus <= self.gpus else self.network
