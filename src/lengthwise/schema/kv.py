"""Results of ``lengthwise kv``: what a prefix cache finds at each size, and what its memory is worth."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lengthwise.schema.estimate import UNKNOWN, Estimate


@dataclass(frozen=True)
class CacheSize:
    """What a cache of this size finds. Sizes and rates are of one replica; a GB is 1e9 bytes."""

    name: str  # "GPU pool", a size, or "all blocks"
    blocks: int
    tokens: int
    gb: float  # NaN without a model
    block_share: Estimate  # of all references to blocks of prompts, partly filled ones included
    token_share: Estimate  # of all prompt tokens
    saved_share: Estimate = UNKNOWN  # of the time that prefilling each prompt alone takes
    saved_s_per_hour: Estimate = UNKNOWN  # the same in seconds, for each hour of traffic
    # Of memory of this size behind the GPU pool and of the storage behind both, by what they add to the pool:
    usd_per_saved_s: Estimate = UNKNOWN  # price of memory and storage over the seconds saved
    usd_per_million_tokens: Estimate = UNKNOWN  # price of memory and storage over the tokens found
    net_usd_per_hour: Estimate = UNKNOWN  # price of the seconds of the replica's GPUs saved, less that of both
    # Of all prompt tokens, what the GPU pool and CPU memory of this size behind it find, with engine.kv_offloading's
    # storage behind both. Known if that is another share than the larger of the two finds:
    hierarchy_share: Estimate = UNKNOWN
    is_given: bool = False  # the GPU pool or a size of the user, which the figure marks


@dataclass(frozen=True)
class Loading:
    """Loading a prefix against computing it again, for a request with ``new_tokens`` more tokens."""

    source: str
    gb_per_s: float  # of one GPU
    break_even_tokens: Estimate  # shortest prefix that is loaded faster, in complete blocks; inf: none that fits
    load_s: tuple[float, ...]  # at each of KvStudy.prefix_tokens


@dataclass(frozen=True)
class Found:
    """Shares of prompt tokens."""

    unlimited: Estimate = UNKNOWN  # that an unlimited cache finds, outputs included
    simulated: Estimate = UNKNOWN  # that the simulated engine found in its GPU pool


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
    sizes: tuple[CacheSize, ...]  # those of the table; the GPU pool's always with blocks of outputs
    found: Found = Found()
    tiers: tuple[TierShare, ...] = ()  # the GPU pool first; empty without ``engine.kv_offloading``
    new_tokens: int = 0  # of the mean request that finds all that an unlimited cache has
    prefix_tokens: tuple[int, ...] = ()
    compute_s: tuple[float, ...] = ()  # seconds that not computing each of prefix_tokens saves
    loadings: tuple[Loading, ...] = ()
    usd_per_gb_hour: float = math.nan  # of the memory
    gpu_usd_per_s: float = math.nan  # of a replica's GPUs
    notes: tuple[str, ...] = field(default=())

    @property
    def storage_usd_per_hour(self) -> float:
        """Return the price of a replica's storage for an hour."""
        return sum(tier.usd_per_hour for tier in self.tiers)
