"""Hit rates of a prefix cache by size, and the net saving of its memory: ``lengthwise kv``.

The rules are those of vLLM's prefix cache for requests that a replica serves one after the other, in the order of their
first steps. A request finds the longest run of cached full blocks from its prompt's start, without the block of the
last token, which is always computed. Then all full blocks of the request count as used, the last block first, so that
the end of a prefix is evicted before its start. One pass gives the hits at every size. KV cache groups of layers need a
simulation of the engine with each size (``PoolsInGroups``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from lengthwise import catalog, engine, theory
from lengthwise.cost import model_error, prompt_seconds
from lengthwise.cost.memory import HOST_LINK_BYTES_PER_S, group_layers
from lengthwise.engine.prefix_nodes import PrefixNodes, prefix_nodes
from lengthwise.metrics.distribution import BATCHES, MIN_VALUES
from lengthwise.report.binding import LONG_WAIT_SHARE, mean_queued_for_s
from lengthwise.report.formatting import counted, seconds
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import UNKNOWN, Estimate
from lengthwise.schema.kv import CacheSize, Found, KvStudy, Loading, TierShare
from lengthwise.schema.records import Records, RequestRecords
from lengthwise.schema.specs import GB, ModelSpec
from lengthwise.schema.workload import Workload
from lengthwise.statistics import batch_half_width, drawn_estimate, mean_estimate
from lengthwise.usecases.simulate import Progress
from lengthwise.usecases.variants import Variant, deployment

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

CURVE_POINTS = 60
SIMULATED_POINTS = 12  # of the curve where each point is a simulation
SIMULATIONS = 36  # about as many of each seed
LEVEL = 0.95
CPU_MEMORY = ("CPU memory", HOST_LINK_BYTES_PER_S / GB)
"""The default source of loads: the measured bandwidth of a GPU's PCIe 4 x16 link (see cost/memory.py)."""
MIN_STARTS = 20  # sessions from which on the rate at which they start is known
ERROR_REQUESTS = 64  # requests whose saved seconds are computed again with each draw of the cost model's error


@dataclass(frozen=True)
class Reuse:
    """Cache hits of requests at every cache size.

    ``request``, ``distance`` and ``found`` are columns with a row for each run of blocks: a cache of ``blocks`` finds
    ``blocks - distance`` of a run's blocks, at least 0 and at most ``found``.
    """

    block_tokens: int
    prompt_tokens: Ints  # [n] of the served requests in order of arrival
    request: Ints
    distance: Ints
    found: Ints
    largest: int  # distinct blocks on the replica with the most
    least: int = 1

    def hits(self, blocks: int) -> Ints:
        """Return [n] the number of blocks of each request that a cache of this size finds."""
        found = np.clip(blocks - self.distance, 0, self.found)
        return np.bincount(self.request, found, len(self.prompt_tokens)).astype(np.int64)

    @cached_property
    def references(self) -> Ints:
        """Return [n] the blocks of each prompt, a partly filled one included."""
        return -(-self.prompt_tokens // self.block_tokens)


class PoolsInGroups:
    """Cache hits of requests with a GPU pool of each size whose layers form KV cache groups, by simulation.

    Stack distances do not have these hits. Windows give contents only to the blocks before the places where a request
    ends or leaves another's prefix, and these places depend on what earlier requests have found, so that a small pool
    may have contents that a large one lacks.
    """

    def __init__(
        self, workload: Workload, deployment: Deployment, requests: RequestRecords,
        simulate: Callable[[Deployment], Records],
    ) -> None:  # fmt: skip
        groups = deployment.kv.groups
        assert groups is not None
        self._served, self._simulate, self._hits = requests.replica >= 0, simulate, dict[int, Ints]()
        self._deployment = self._short = deployment
        self.block_tokens, self.prompt_tokens = groups.block_size, workload.prompt_tokens[self._served]
        tokens = workload.prompt_tokens + workload.output_tokens
        if workload.max_tokens is None:  # A pool may be smaller than a request that does not occur.
            self._short = replace(deployment, max_model_len=min(deployment.max_model_len, int(tokens.max())))
        self.least = groups.longest(self._short.max_model_len)
        self._blocks = (groups.full + groups.local) * -(-tokens // groups.block_size)
        self._add(deployment.kv.num_blocks, requests)

    def _add(self, blocks: int, requests: RequestRecords) -> None:
        assert requests.cached_tokens is not None
        found = np.where(requests.replica >= 0, requests.cached_tokens, 0)
        self._hits[blocks] = found[self._served] // self.block_tokens

    def _run(self, blocks: int) -> RequestRecords:
        kv = replace(self._deployment.kv, num_blocks=blocks)
        is_long = blocks >= kv.longest_blocks(self._deployment.max_model_len)
        requests = self._simulate(replace(self._deployment if is_long else self._short, kv=kv)).requests
        self._add(blocks, requests)
        return requests

    def hits(self, blocks: int) -> Ints:
        """Return [n] the number of blocks of each request's prompt that are found with a pool of ``blocks`` blocks."""
        if blocks not in self._hits:
            self._run(blocks)
        return self._hits[blocks]

    @cached_property
    def largest(self) -> int:
        """Return a pool that finds what an unlimited one finds, at most 3 % larger than the smallest such pool."""
        low = high = self.least
        needed = max(high + 1, int(self._blocks.sum()) // self._deployment.parallel.ranks)
        while high < needed:  # Until the requests of a replica could have blocks of their own, so that none is evicted.
            high = needed
            replica = self._run(high).replica
            needed = int(np.bincount(replica[replica >= 0], self._blocks[replica >= 0]).max())
        unlimited = self.hits(high)
        while high > 1.03 * low + 1:
            middle = round(math.sqrt(low * high))
            low, high = (low, middle) if np.array_equal(self.hits(middle), unlimited) else (middle, high)
        return high

    @cached_property
    def references(self) -> Ints:
        """Return [n] the blocks of each prompt, a partly filled one included."""
        return -(-self.prompt_tokens // self.block_tokens)


Hits = Reuse | PoolsInGroups


def require_prefixes(workload: Workload) -> None:
    """Raise InputError if no two prompts of the workload can share a prefix."""
    shared = workload.prefixes
    if shared is None or (not len(shared.block_ids) and (shared.turns < 0).all()):
        raise InputError(
            "lengthwise kv needs requests whose prompts share prefixes; this workload has none, so that a prefix cache "
            "finds nothing. Give [workload.groups], [workload.sessions] or [workload.tools], or replay a trace that "
            "records prefixes or turns (Mooncake, sharegpt_turns, LMSYS, OpenTelemetry)"
        )


def reuse(
    workload: Workload, block_tokens: int, records: RequestRecords | None = None, *, prompts_only: bool = False
) -> Reuse:
    """Return the cache hits of each request at every cache size, from one pass over the accesses.

    Args:
        records: The simulated requests, which give order and replica. None: one replica, and no request takes time.
        prompts_only: Cache only full blocks of prompts, as offloading does by default, and not those of outputs.

    Raises:
        InputError: ``block_tokens`` neither divides the blocks of the prefixes nor is a multiple of them.
    """
    prompt, output = workload.prompt_tokens, workload.output_tokens
    nodes = prefix_nodes(prompt, output, workload.prefixes, block_tokens)
    replica = np.zeros(len(prompt), np.int64)
    sent_s = workload.earliest_s()
    if records is not None:
        replica, sent_s = records.replica.astype(np.int64), records.scheduled_s
    served = np.flatnonzero(replica >= 0)
    order = served[np.lexsort((served, sent_s[served], replica[served]))]
    # The last token of a request is never computed, so that its block is not cached.
    used = (prompt if prompts_only else prompt + output - 1) // block_tokens
    first, size, request, depth = _runs(nodes, order, used)
    cuts = np.unique(np.concatenate([first, first + size]))
    low = np.searchsorted(cuts, first)
    count = np.searchsorted(cuts, first + size) - low
    item = np.repeat(low - (np.cumsum(count) - count), count) + np.arange(count.sum())
    request, depth = np.repeat(request, count), np.repeat(depth - first, count) + cuts[item]
    size = np.append(np.diff(cuts), 0)[item]
    start = np.concatenate([[0], np.cumsum(np.bincount(request, minlength=len(order)))])
    own = item + replica[order[request]] * len(cuts)  # replicas share nothing
    distance = theory.stack_distances(start, own, size)
    found = np.where(distance >= 0, np.clip((prompt[order[request]] - 1) // block_tokens - depth, 0, size), 0)
    new = np.bincount(replica[order[request]], np.where(distance < 0, size, 0), minlength=1)
    number = np.cumsum(replica >= 0) - 1
    again = found > 0
    return Reuse(
        block_tokens,
        prompt[served],
        number[order[request[again]]],
        distance[again],
        found[again],
        int(new.max(initial=0)),
    )


def _runs(nodes: PrefixNodes, order: Ints, used: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Return columns of the runs of blocks that requests use: first node, blocks, index in ``order``, blocks before."""
    runs = np.diff(nodes.start)[order]
    request = np.repeat(np.arange(len(order)), runs)
    row = np.repeat(nodes.start[order] - (np.cumsum(runs) - runs), runs) + np.arange(len(request))
    first, length = nodes.first[row], nodes.length[row]
    before = np.cumsum(length) - length
    depth = before - np.repeat(before[np.cumsum(runs) - runs], runs)
    size = np.clip(used[order][request] - depth, 0, length)
    some = size > 0
    return first[some], size[some], request[some], depth[some]


def shared_share(workload: Workload) -> float:
    """Return the share of prompt tokens that a cache without limit finds if no request takes time.

    The workload must have prefixes, whose blocks the cache uses.
    """
    assert workload.prefixes is not None
    found = reuse(workload, workload.prefixes.block_tokens)
    return float(found.hits(found.largest).sum() * found.block_tokens / found.prompt_tokens.sum())


def _require_positive(memory_gb: Sequence[float], sources: Sequence[tuple[str, float]] = ()) -> None:
    names = [name for name, _ in sources]
    if again := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"--load must give each source once; {again!r} occurs {names.count(again)} times. Rename one")
    given = [("--memory", "GB", gb) for gb in memory_gb]
    for what, unit, value in given + [(f"--load {name}", "GB/s", rate) for name, rate in sources]:
        if not 0 < value < math.inf:
            raise InputError(f"{what} must be a finite number of {unit} above 0; it is {value:g}")


def study_trace(
    workload: Workload, block_tokens: int | None, model: ModelSpec | None, memory_gb: Sequence[float] = (), *,
    prompts_only: bool = False,
) -> KvStudy:  # fmt: skip
    """Return the hit rates of one replica that serves the requests of a trace, without a deployment.

    Raises InputError if the workload has no prefixes.
    """
    require_prefixes(workload)
    _require_positive(memory_gb)
    assert workload.prefixes is not None
    found = reuse(workload, block_tokens or workload.prefixes.block_tokens, prompts_only=prompts_only)
    bytes_per_token = catalog.kv_bytes_per_token(model) if model else math.nan
    sizes = _Sizes([found], bytes_per_token * found.block_tokens)
    notes = ["Order of arrival on one replica; give a scenario to simulate the order, the replicas and the GPU pool."]
    if workload.after is not None:
        notes = ["Requests take no time here: only think and tool times separate turns. Give a scenario to simulate."]
    if model and model.attention.windowed_layers and not model.attention.is_mla:
        notes.append(
            f"{model.attention.windowed_layers} of the {model.layers} layers of {model.name} have windows, whose KV "
            "cache is counted here as if it kept all tokens. Give a scenario to simulate KV cache groups."
        )
    return KvStudy(
        name=workload.name or "requests",
        metadata=(*_metadata([found], prompts_only=prompts_only), *([model.name] if model else [])),
        block_tokens=found.block_tokens,
        bytes_per_token=bytes_per_token,
        curve=sizes.curve(),
        sizes=tuple(sizes.rows(memory_gb)),
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class Prices:
    """The price of memory, and the sources of loads as pairs (name, GB/s of one GPU).

    Without ``usd_per_gb_hour`` the memory has the price of ``engine.kv_offloading``, if there is one. Storage has the
    price of ``engine.kv_offloading.storage``.
    """

    usd_per_gb_hour: float | None = None
    sources: tuple[tuple[str, float], ...] = (CPU_MEMORY,)


def study(
    variant: Variant, memory_gb: Sequence[float] = (), prices: Prices = Prices(), *,
    prompts_only: bool = False, progress: Progress = lambda *_: None,
) -> KvStudy:  # fmt: skip
    """Simulate a variant with each seed, and return hit rates, break-even lengths and the savings of the memory.

    Raises InputError if the workload has no prefixes, a size or rate is not above 0, or no request is served.
    """
    variant.deployment.require_one_side("kv")
    (deployed, notes), run = _with_cache(variant), variant.scenario.run
    in_groups = deployed.kv.groups is not None
    if in_groups and prompts_only:
        raise _needs_memory("--prompts-only", deployed)
    usd_per_gb_hour, storage_usd = _memory_prices(deployed, prices)
    _require_positive(memory_gb, prices.sources)
    require_prefixes(variant.workload(run.seed))
    seeds = range(run.seed, run.seed + (run.seeds if variant.is_random else 1))
    total, done = len(seeds) * (SIMULATIONS if in_groups else 1), itertools.count()
    by = engine.warm_up(lambda: total * engine.reference_s(variant.workload(run.seed), deployed))

    def simulated(workload: Workload, seed: int, made: Deployment) -> Records:
        progress(min(next(done), total - 1), total)
        return engine.simulate(workload, made, seed=seed, time_limit_s=run.time_limit_s, max_log_steps=0, engine=by)

    hierarchies, hours, cached, waits_s, jcts_s = [], [], [], [], []
    pools: list[Hits] = []
    for seed in seeds:
        workload = variant.workload(seed)
        records = simulated(workload, seed, deployed)
        served = records.requests.replica >= 0
        if not served.any():
            raise InputError(
                f"the deployment must serve some requests; with seed {seed} it served none of {len(workload)}. "
                "`lengthwise simulate` shows the outcomes"
            )
        assert records.requests.cached_tokens is not None
        if in_groups:
            pools.append(PoolsInGroups(workload, deployed, records.requests, partial(simulated, workload, seed)))
        else:
            pools.append(reuse(workload, deployed.kv.block_size, records.requests))
        hierarchies.append(_Hierarchy(deployed, workload, records.requests, pools[-1], prompts_only=prompts_only))
        waits_s.append(mean_queued_for_s(records) - deployed.cost.front.request_s)
        jcts_s.append(records.requests.finished_s - records.requests.arrival_s)
        hours.append(_traffic_s(workload, records.end_s) / 3600)
        prompt_tokens = records.requests.prompt_tokens[served].sum()
        cached.append(records.requests.cached_tokens[served].sum() / prompt_tokens)
    part = _layers_of_a_group(deployed.model) / deployed.model.caching_layers if in_groups else 1.0
    block_bytes = part * deployed.kv.block_size * catalog.kv_bytes_per_token(deployed.model, deployed.limits.kv_dtype)
    reuses = [each.prompts for each in hierarchies] if prompts_only else pools
    sizes = _Sizes(reuses, block_bytes, hierarchies if prompts_only or deployed.offload_blocks else (), deployed)
    of_pools = _Sizes(pools, block_bytes, (), deployed)
    savings = _Savings(deployed, reuses, pools, hours)
    pool = replace(of_pools.at(deployed.kv.num_blocks, POOL), is_given=True)
    rows = [savings.of(pool if row.name == POOL else row) for row in sizes.rows(memory_gb, pool.blocks)]
    if not math.isnan(usd_per_gb_hour):
        rows = [savings.priced(row, row.gb * usd_per_gb_hour + storage_usd, hierarchies) for row in rows]
    notes += [*_load_notes(waits_s, jcts_s), *model_error.deployment_notes(deployed)]
    if prompts_only:
        notes.append("The GPU pool's row has blocks of outputs, too: a GPU's prefix cache keeps them.")
    one_group = replace(deployed.kv, groups=None, kv_bytes_per_block=deployed.kv.kv_bytes_per_block / part)
    loading = _LoadOrCompute(replace(deployed, kv=one_group), savings.new_tokens)
    curve = sizes.curve([row.blocks for row in rows] if in_groups else [])
    progress(total, total)
    return KvStudy(
        name=variant.name,
        metadata=(
            *_metadata(reuses, prompts_only=prompts_only),
            f"{deployed.model.name} on {deployed.parallel.gpus} x {deployed.gpu.name}",
            f"{counted(deployed.parallel.ranks, 'replica')}, {savings.requests_per_s:.2g} requests/s each",
        ),
        block_tokens=deployed.kv.block_size,
        bytes_per_token=GB * pool.gb / pool.tokens,
        curve=curve,
        sizes=tuple(rows),
        found=Found(
            unlimited=of_pools.at(of_pools.largest).token_share,
            simulated=mean_estimate(cached) if deployed.limits.enable_prefix_caching and not in_groups else UNKNOWN,
            all_simulated=in_groups,
        ),
        tiers=_tier_shares(hierarchies),
        new_tokens=savings.new_tokens,
        prefix_tokens=tuple(loading.prefix_tokens.tolist()),
        compute_s=tuple(loading.saved_s(deployed, loading.blocks).tolist()),
        loadings=tuple(loading.compared(*source) for source in prices.sources),
        usd_per_gb_hour=usd_per_gb_hour,
        gpu_usd_per_s=savings.gpu_usd_per_s,
        notes=tuple(notes),
    )


def _needs_memory(option: str, deployed: Deployment) -> InputError:
    return InputError(
        f"{option} needs memory behind the GPU pool, with which the layers of {deployed.model.name} form one group; "
        "here they form several KV cache groups. Set engine.kv_offloading.size_gb (GB of CPU memory), or leave "
        f"{option} out"
    )


def _memory_prices(deployed: Deployment, prices: Prices) -> tuple[float, float]:
    """Return the price of a GB of CPU memory for an hour, or NaN without one, and that of a replica's storage."""
    usd, offloading = prices.usd_per_gb_hour, deployed.limits.kv_offloading
    storage_usd = _storage_usd_per_hour(deployed)
    if usd is not None and not 0 < usd < math.inf:
        raise InputError(f"--memory-price must be above 0 and finite; it is {usd:g}")
    if deployed.kv.groups is not None:
        if usd is not None:
            raise _needs_memory("--memory-price", deployed)
        return math.nan, storage_usd
    if usd is None:
        usd = 0.0 if offloading is None else offloading.usd_per_gb_hour
        usd = usd if usd or storage_usd else math.nan
    return usd, storage_usd


def _with_cache(variant: Variant) -> tuple[Deployment, list[str]]:
    """Return the deployment, with the prefix cache on where layers form KV cache groups, and notes on them."""
    deployed, scenario = variant.deployment, variant.scenario
    notes = []
    if deployed.kv.groups is not None and not deployed.limits.enable_prefix_caching:
        section = scenario.engine.model_copy(update={"enable_prefix_caching": True})
        deployed = deployment(scenario.model_copy(update={"engine": section}))
        notes.append(
            f"engine.enable_prefix_caching is false here, and simulated as true: how {deployed.model.name} uses its KV "
            "memory depends on it."
        )
    if deployed.kv.groups is not None:
        notes.append(
            f"The layers of {deployed.model.name} form KV cache groups: each size is of a GPU pool, simulated with "
            "requests that run together. CPU memory behind the pool (engine.kv_offloading) makes them one group, whose "
            "bytes a load takes."
        )
    return deployed, notes


def _layers_of_a_group(model: ModelSpec) -> int:
    local = model.attention.windowed_layers
    return group_layers(model.caching_layers - local, local, model.layers - model.caching_layers)[0]


def _traffic_s(workload: Workload, end_s: float) -> float:
    """Return the seconds of traffic in the workload: the span in which its sessions start, or else the run.

    The rate at which sessions start, unlike the run's end, depends neither on the longest session nor on the speed of
    the deployment. A closed loop has no rate of its own.
    """
    starts_s = workload.session_starts_s
    span_s = float(np.ptp(starts_s))
    if workload.concurrency or len(starts_s) < MIN_STARTS or not span_s > 0:
        return end_s
    return span_s * len(starts_s) / (len(starts_s) - 1)


def _load_notes(waits_s: Sequence[float], jcts_s: Sequence[Floats]) -> list[str]:
    """Return a warning where the simulated deployment does not keep up with its load."""
    finished_s = np.concatenate(jcts_s)
    finished_s = finished_s[np.isfinite(finished_s)]
    wait_s, jct_s = float(np.mean(waits_s)), float(finished_s.mean()) if len(finished_s) else math.nan
    if not wait_s > LONG_WAIT_SHARE * jct_s:
        return []
    wait = f"requests wait for {seconds(wait_s)} of their {seconds(jct_s)}"
    order = "Hit rates follow the order of an overloaded run, in which an hour of traffic takes longer than an hour"
    return [f"The deployment does not keep up with its load: {wait}. {order}. Lower the load, or add replicas."]


def _metadata(reuses: Sequence[Hits], *, prompts_only: bool) -> list[str]:
    requests = sum(len(one.prompt_tokens) for one in reuses)
    seeds = f" with {len(reuses)} seeds" if len(reuses) > 1 else ""
    cached = "blocks of prompts" if prompts_only else "blocks of prompts and outputs"
    return [f"{requests:,} requests{seeds}", f"{cached}, {reuses[0].block_tokens} tokens each"]


POOL, ALL = "GPU pool", "all blocks"


class _Hierarchy:
    """GPU pool, CPU memory and storage of one simulated run as an inclusive LRU hierarchy.

    A request finds in each tier the blocks that continue those of the tier before, and all tiers count them as used.
    """

    def __init__(
        self, deployment: Deployment, workload: Workload, requests: RequestRecords, pool: Hits, *, prompts_only: bool
    ) -> None:
        self.deployment, self.requests, self.pool, self.prompts = deployment, requests, pool, pool
        offloading = deployment.limits.kv_offloading
        prompts_only = prompts_only if offloading is None else not offloading.outputs
        block_size = pool.block_tokens
        if prompts_only:
            self.prompts = reuse(workload, block_size, requests, prompts_only=True)
        self.memory = self.storage = self.prompts
        if offloading is not None and offloading.storage is not None and offloading.storage.shared:
            together = replace(requests, replica=np.minimum(requests.replica, 0))
            self.storage = reuse(workload, block_size, together, prompts_only=prompts_only)

    def tokens(self, memory_blocks: int) -> list[Ints]:
        """Return [tiers][n] prompt tokens that are found in the GPU pool, or CPU memory of this size, or storage."""
        found = [self.pool.hits(self.deployment.kv.num_blocks)]
        found.append(np.maximum(found[-1], self.memory.hits(memory_blocks)))
        if stored := self.deployment.storage_blocks:
            found.append(np.maximum(found[-1], self.storage.hits(int(min(stored, self.storage.largest)))))
        return [each * self.pool.block_tokens for each in found]

    def simulated(self) -> list[float]:
        """Return the shares of prompt tokens that the simulation found in each tier."""
        r = self.requests
        assert r.cached_tokens is not None
        assert r.loaded_tokens is not None
        assert r.storage_tokens is not None
        each = (r.cached_tokens, r.loaded_tokens - r.storage_tokens, r.storage_tokens)
        return [float(tokens[r.replica >= 0].sum() / self.pool.prompt_tokens.sum()) for tokens in each]


def _tier_shares(runs: Sequence[_Hierarchy]) -> tuple[TierShare, ...]:
    deployment = runs[0].deployment
    offloading, blocks = deployment.limits.kv_offloading, deployment.offload_blocks
    if offloading is None or not blocks:
        return ()
    pool_gb = deployment.kv.num_blocks * deployment.offloaded_block_bytes / GB
    names = [(POOL, pool_gb, 0.0), ("CPU memory", offloading.size_gb, 0.0)]
    if offloading.storage is not None and deployment.storage_blocks:
        names.append(("storage", offloading.storage.size_gb, _storage_usd_per_hour(deployment)))
    found = [np.diff(run.tokens(blocks), axis=0, prepend=0) for run in runs]
    totals, simulated = [run.pool.prompt_tokens for run in runs], [run.simulated() for run in runs]
    shares = [_share([each[k] for each in found], totals) for k in range(len(names))]
    return tuple(
        TierShare(name, gb, shares[k], mean_estimate([each[k] for each in simulated]), usd)
        for k, (name, gb, usd) in enumerate(names)
    )


@dataclass(frozen=True)
class _Sizes:
    """Hit rates of cache sizes over all seeds."""

    reuses: Sequence[Hits]
    block_bytes: float
    hierarchies: Sequence[_Hierarchy] = ()
    deployment: Deployment | None = None

    @cached_property
    def largest(self) -> int:
        return max(1, *(one.largest for one in self.reuses))

    @cached_property
    def least(self) -> int:
        return max(one.least for one in self.reuses)

    def tokens(self, blocks: int) -> int:
        """Return the tokens of a cache of this size: with KV cache groups, those of the longest requests."""
        if self.deployment is None:
            return blocks * self.reuses[0].block_tokens
        return replace(self.deployment.kv, num_blocks=blocks).kv_tokens(self.deployment.max_model_len)

    def at(self, blocks: int, name: str = "") -> CacheSize:
        block_tokens, tokens = self.reuses[0].block_tokens, self.tokens(blocks)
        hits = [one.hits(blocks) for one in self.reuses]
        by_block = _share(hits, [one.references for one in self.reuses])
        by_token = _share([found * block_tokens for found in hits], [one.prompt_tokens for one in self.reuses])
        size = CacheSize(name, blocks, tokens, blocks * self.block_bytes / GB, by_block, by_token)
        if not self.hierarchies:
            return size
        found = [each.tokens(blocks)[-1] for each in self.hierarchies]
        return replace(size, hierarchy_share=_share(found, [one.prompt_tokens for one in self.reuses]))

    def curve(self, also: Sequence[int] = ()) -> tuple[CacheSize, ...]:
        """Return sizes from the least to the largest, and those of ``also`` blocks."""
        points = CURVE_POINTS if self.least == 1 else SIMULATED_POINTS
        spaced = np.geomspace(self.least, self.largest, points)
        sizes = np.unique(np.rint(np.append(spaced, also)).astype(np.int64))
        return tuple(self.at(int(blocks)) for blocks in sizes)

    def rows(self, memory_gb: Sequence[float], pool_blocks: int = 0) -> list[CacheSize]:
        """Return round sizes in the last two decades, all blocks, the pool and the given sizes, ascending."""
        unit = GB / self.block_bytes  # blocks in a GB
        named = {POOL: pool_blocks} if pool_blocks else {}
        for gb in memory_gb:
            if math.isnan(unit):
                raise InputError("sizes in GB need a model: give --model, or a scenario")
            named[f"{gb:,g} GB"] = max(1, round(gb * unit))
            if named[f"{gb:,g} GB"] < self.least:
                raise InputError(
                    f"--memory must hold the longest request; it is {gb:g} GB. Give at least "
                    f"{1.01 * self.least / unit:.3g} GB"
                )
        given = set(named)
        in_gb = not math.isnan(unit)
        unit = unit if in_gb else 1.0
        top = math.floor(math.log10(self.largest / unit))
        for value in (step * 10.0**power for power in range(top - 1, top + 1) for step in (1, 2, 5)):
            if self.least <= round(value * unit) < self.largest:
                named.setdefault(f"{value:,g} GB" if in_gb else counted(round(value), "block"), round(value * unit))
        named[ALL] = self.largest
        by_size = sorted(named.items(), key=lambda one: one[1])
        return [replace(self.at(blocks, name), is_given=name in given) for name, blocks in by_size]


def _share(parts: Sequence[Floats | Ints], totals: Sequence[Floats | Ints]) -> Estimate:
    """Return the share, with an interval over seeds or, with one seed, over batches of consecutive requests."""
    if len(parts) > 1:
        return mean_estimate([part.sum() / total.sum() for part, total in zip(parts, totals, strict=True)])
    (part,), (total,) = parts, totals
    share = float(part.sum() / total.sum())
    if len(part) < MIN_VALUES:
        return Estimate(share)
    batches = [a.sum() / b.sum() for a, b in zip(*(np.array_split(one, BATCHES) for one in (part, total)), strict=True)]
    return Estimate(share, float(batch_half_width(np.array(batches)[:, None], share, LEVEL)[0]))


def _saved_s(deployment: Deployment, prompt_tokens: Ints, cached_tokens: Ints) -> Floats:
    """Return the seconds [n] that cached tokens save, if each prompt is computed alone on an idle replica."""
    budget = deployment.limits.max_num_batched_tokens
    full_s = prompt_seconds(deployment.cost, prompt_tokens, np.zeros_like(prompt_tokens), budget)
    return full_s - prompt_seconds(deployment.cost, prompt_tokens, cached_tokens, budget)


class _Savings:
    """Seconds of prefill that found blocks save, where each prompt is computed alone, and their worth in dollars."""

    def __init__(
        self, deployment: Deployment, reuses: Sequence[Hits], pools: Sequence[Hits], hours: Sequence[float]
    ) -> None:
        self.reuses, self.deployment = reuses, deployment
        parallel = deployment.parallel
        self.gpu_usd_per_s = parallel.gpus // parallel.ranks * deployment.gpu.price_per_hour_usd / 3600
        self.hours = [each * parallel.ranks for each in hours]
        self._deployed = [deployment, *model_error.perturbed_deployments(deployment)]
        missing = [one.prompt_tokens - one.hits(one.largest) * one.block_tokens for one in reuses]
        self.new_tokens = max(1, round(float(np.concatenate(missing).mean())))
        self._at_pool = [one.hits(deployment.kv.num_blocks) * one.block_tokens for one in pools]
        self._no_tokens = [np.zeros_like(one.prompt_tokens) for one in reuses]
        self._alone_s = self._saved([one.prompt_tokens for one in reuses])

    @property
    def requests_per_s(self) -> float:
        """Return the requests per second of traffic at one replica."""
        return sum(len(one.prompt_tokens) for one in self.reuses) / sum(self.hours) / 3600

    def of(self, size: CacheSize) -> CacheSize:
        """Return the size with the seconds that it saves."""
        cached = self._at_pool
        if size.name != POOL:
            cached = [one.hits(size.blocks) * one.block_tokens for one in self.reuses]
        saved_s = self._saved(cached)
        per_hour = self._with_error(self._per_hour(saved_s), cached[0], self._no_tokens[0])
        return replace(size, saved_share=_share(saved_s, self._alone_s), saved_s_per_hour=per_hour)

    def priced(self, size: CacheSize, usd: float, hierarchies: Sequence[_Hierarchy]) -> CacheSize:
        """Return the size with its net saving beyond the GPU pool, storage included, at a price of ``usd`` an hour."""
        before = self._at_pool
        cached = [each.tokens(size.blocks)[-1] for each in hierarchies]
        more = [after - pool for after, pool in zip(cached, before, strict=True)]
        if size.name == POOL or not sum(int(each.sum()) for each in more):
            return size
        pairs = zip(self._saved(cached), self._saved(before), strict=True)
        more_s = self._with_error(self._per_hour([after - pool for after, pool in pairs]), cached[0], before[0])
        worth = more_s.scaled(self.gpu_usd_per_s)
        return replace(
            size,
            usd_per_saved_s=_usd_per_unit(usd, more_s),
            usd_per_million_tokens=_usd_per_unit(usd * 1e6, self._per_hour(more)),
            net_usd_per_hour=Estimate(
                worth.value - usd, worth.half_width, worth.model_low - usd, worth.model_high - usd
            ),
        )

    def _saved(self, cached: Sequence[Ints]) -> list[Floats]:
        pairs = zip(self.reuses, cached, strict=True)
        return [_saved_s(self.deployment, one.prompt_tokens, each) for one, each in pairs]

    def _per_hour(self, parts: Sequence[Floats | Ints]) -> Estimate:
        hours = [np.full(len(part), each / len(part)) for part, each in zip(parts, self.hours, strict=True)]
        return _share(parts, hours)

    def _with_error(self, estimate: Estimate, cached: Ints, before: Ints) -> Estimate:
        """Add the cost model's interval, from some requests that the draws compute again."""
        prompt = self.reuses[0].prompt_tokens
        rows = np.flatnonzero(cached > before)
        rows = rows[:: max(1, len(rows) // ERROR_REQUESTS)]
        if not len(rows):
            return estimate
        prompt, cached, before = prompt[rows], cached[rows], before[rows]
        sums = [float((_saved_s(one, prompt, cached) - _saved_s(one, prompt, before)).sum()) for one in self._deployed]
        return drawn_estimate(estimate, sums)


def _storage_usd_per_hour(deployment: Deployment) -> float:
    """Return the price of the storage for an hour and one replica."""
    offloading = deployment.limits.kv_offloading
    if offloading is None or (storage := offloading.storage) is None or not storage.usd_per_gb_hour:
        return 0.0
    return storage.size_gb * storage.usd_per_gb_hour / (deployment.parallel.replicas if storage.shared else 1)


def _usd_per_unit(usd: float, units: Estimate) -> Estimate:
    """Return a price per unit; the sampling interval is that of ``units`` to first order.

    Unknown where the interval of ``units`` includes 0: the price has no upper bound then.
    """
    if not units.value > 0 or units.low <= 0:
        return UNKNOWN
    each = usd / units.value
    ends = (usd / end if end > 0 else math.inf for end in (units.model_high, units.model_low))
    return Estimate(each, each * units.half_width / units.value, *(ends if units.has_model_interval else ()))


class _LoadOrCompute:
    """Compares loading a prefix with computing it, for a request with ``new_tokens`` after the prefix."""

    def __init__(self, deployment: Deployment, new_tokens: int) -> None:
        block = deployment.kv.block_size
        most = max(1, (deployment.max_model_len - new_tokens - 1) // block)
        self.blocks = np.unique(np.rint(np.geomspace(1, most, CURVE_POINTS)).astype(np.int64))
        self._deployed = [deployment, *model_error.perturbed_deployments(deployment)]
        self._new_tokens, self._kv = new_tokens, deployment.kv

    @property
    def prefix_tokens(self) -> Ints:
        """Return the prefixes that are compared, in tokens."""
        return self.blocks * self._kv.block_size

    def saved_s(self, deployment: Deployment, blocks: Ints) -> Floats:
        """Return the seconds that a request saves if it need not compute a prefix of ``blocks`` blocks."""
        prefix = blocks * self._kv.block_size
        return _saved_s(deployment, prefix + self._new_tokens, prefix)

    def compared(self, source: str, gb_per_s: float) -> Loading:
        """Return the break-even with loads at this bandwidth of each GPU."""
        block_s = self._kv.kv_bytes_per_block / (gb_per_s * GB)  # each GPU loads its own part
        ends = [self._break_even(one, block_s) for one in self._deployed]
        load_s = tuple((self.blocks * block_s).tolist())
        return Loading(source, gb_per_s, drawn_estimate(Estimate(ends[0]), ends), load_s)

    def _break_even(self, deployment: Deployment, block_s: float) -> float:
        def loads_faster(blocks: Ints) -> npt.NDArray[np.bool_]:
            return blocks * block_s < self.saved_s(deployment, blocks)

        slower = np.flatnonzero(~loads_faster(self.blocks))
        first = int(slower[-1]) + 1 if len(slower) else 0  # of the sizes from which on loading is always faster
        if first == len(self.blocks):
            return math.inf
        between = np.arange(self.blocks[first - 1] + 1 if first else 1, self.blocks[first] + 1)
        slower = np.flatnonzero(~loads_faster(between))
        return float(between[slower[-1] + 1 if len(slower) else 0] * self._kv.block_size)
