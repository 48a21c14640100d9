"""Results of ``lengthwise kv``: what a prefix cache finds at each size, and what its memory is worth."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lengthwise.schema.estimate import UNKNOWN, Estimate


@dataclass(frozen=True)
class CacheSize:
    """Hits of a prefix cache of one size. Sizes and rates are of one replica; a GB is 1e9 bytes."""

    name: str  # "GPU pool", a size, or "all blocks"
    blocks: int
    tokens: int
    gb: float  # NaN without a model
    block_share: Estimate  # of all references to blocks of prompts, partly filled ones included
    token_share: Estimate  # of all prompt tokens
    saved_share: Estimate = UNKNOWN  # of the prefill time, where each prompt is computed alone
    saved_s_per_hour: Estimate = UNKNOWN  # saved prefill seconds for each hour of traffic
    # Costs of CPU memory of this size behind the GPU pool, and of storage behind both. Seconds and tokens are those
    # that the GPU pool alone does not save.
    usd_per_saved_s: Estimate = UNKNOWN  # price of memory and storage over the seconds saved
    usd_per_million_tokens: Estimate = UNKNOWN  # price of memory and storage over the tokens found
    net_usd_per_hour: Estimate = UNKNOWN  # price of the saved seconds of the replica's GPUs, less memory and storage
    # Share of all prompt tokens that three tiers find together: the GPU pool, CPU memory of this size, and the storage
    # of engine.kv_offloading. UNKNOWN where the larger of pool and memory alone finds the same share.
    hierarchy_share: Estimate = UNKNOWN
    is_given: bool = False  # whether it is the GPU pool or a size that the user gives; the figure marks these


@dataclass(frozen=True)
class Loading:
    """The time to load a prefix from one source, to compare with the time to compute it again (``KvStudy.compute_s``).

    The request has ``KvStudy.new_tokens`` more tokens than the prefix.
    """

    source: str
    gb_per_s: float  # of one GPU
    break_even_tokens: Estimate  # prefix, in complete blocks, from which on loading is faster; inf: none fits
    load_s: tuple[float, ...]  # at each of KvStudy.prefix_tokens


@dataclass(frozen=True)
class Found:
    """Shares of the prompt tokens that two prefix caches find."""

    unlimited: Estimate = UNKNOWN  # an unlimited cache that also stores outputs
    simulated: Estimate = UNKNOWN  # the GPU pool of the simulated engine
    all_simulated: bool = False  # whether all sizes are simulated pools: those of KV cache groups


@dataclass(frozen=True)
class TierShare:
    """Share of prompt tokens that a tier of ``engine.kv_offloading`` finds beyond the tiers before it."""

    name: str  # "GPU pool", "CPU memory" or "storage"
    gb: float  # of all GPUs of a replica, or of all replicas that share it; infinite: no limit
    token_share: Estimate  # of an inclusive LRU hierarchy
    simulated: Estimate
    usd_per_hour: float = 0.0  # price of a replica's storage, or of its part of a shared one


@dataclass(frozen=True)
class KvStudy:
    """The answer of ``lengthwise kv``."""

    name: str
    metadata: tuple[str, ...]
    block_tokens: int
    bytes_per_token: float  # of one copy of the KV cache; NaN without a model
    curve: tuple[CacheSize, ...]  # from one block to all
    sizes: tuple[CacheSize, ...]  # rows of the table; the row of the GPU pool always counts blocks of outputs
    found: Found = Found()
    tiers: tuple[TierShare, ...] = ()  # the GPU pool first; empty without ``engine.kv_offloading``
    new_tokens: int = 0  # prompt tokens that the mean request computes although the cache is unlimited
    prefix_tokens: tuple[int, ...] = ()  # lengths of prefixes, for compute_s and Loading.load_s
    compute_s: tuple[float, ...] = ()  # for each of prefix_tokens: seconds of prefill that the prefix saves a request
    loadings: tuple[Loading, ...] = ()
    usd_per_gb_hour: float = math.nan  # price of CPU memory
    gpu_usd_per_s: float = math.nan  # of a replica's GPUs
    notes: tuple[str, ...] = ()

    @property
    def storage_usd_per_hour(self) -> float:
        """Return the price of a replica's storage for an hour."""
        return sum(tier.usd_per_hour for tier in self.tiers)
