"""Builds the kernel's state, compiles the kernel or loads it from the disk cache, and runs it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lengthwise import _jit
from lengthwise.cost._lookup import PackedCost, end_slope, pack
from lengthwise.engine import kernel, kernel_layout
from lengthwise.engine._kernel_reserve import admit_by_reserve
from lengthwise.engine._kernel_sglang import form_as_sglang, no_rules
from lengthwise.engine._kernel_trtllm import form_as_trtllm
from lengthwise.engine._reference_sglang import NewTokenRatio
from lengthwise.engine.outcome import EngineOutput, run_end_s
from lengthwise.engine.setup import Setup, error_of, policy_error
from lengthwise.policy.compile import signatures
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.deployment import LINK_SHARINGS
from lengthwise.schema.records import Status

Array = npt.NDArray[Any]


class GroupCosts(NamedTuple):
    """The costs of further groups of replicas, as in ``PackedCost`` but with one more dimension in front: the group.

    The tables of a group fill the first rows and columns; ``State.group_sizes`` has their numbers. ``scalars`` are
    ``merge_factor`` and ``masked_s``.
    """

    by_tokens: Array
    tokens_slope: Array
    by_seqs: Array
    seqs_slope: Array
    prefill: Array
    decode: Array
    stage_layers: Array
    beside_prompts: Array
    scalars: Array


class State(NamedTuple):
    """The state of a run. ``new_state`` gives the shapes, and ``kernel_layout`` describes the records.

    Costs: ``cost``, ``other`` for the pipeline stages whose ``stage_other`` is 1, and ``shared`` [T+1, 1] for what
    data-parallel ranks compute together in a layer; beyond its last row it grows by ``shared_slope`` [1] a token.
    ``group_costs`` and ``group_sizes`` [groups, 12] (sizes of the tables, and the whole numbers of ``PackedCost``) are
    the costs of further groups of replicas.

    Pipelines: a stage is free from ``stage_free`` [2 x replicas, stages] on. The data-parallel ranks of a replica have
    one row, ``replicas`` + the number of the first rank. ``stage_s`` [replicas, stages] are the seconds of the step
    formed last, without what ranks compute together.

    Queues: ``queued_*`` are the heaps of all queues, and the bins of all queues are the rows of ``bin_slot``. Routers
    see for each replica the counts ``waiting``, ``running``, ``outstanding_tokens``, ``router_free_blocks``,
    ``prefix_tokens`` and ``index_tokens`` (on a decode side the last two are the zeros ``no_tokens``).
    ``previous_turn`` [n] is the session's previous request, and ``routed`` [n] the replica that the router chose; both
    are empty if the router does not see sessions.

    Prefix caches: ``cached`` has each replica's blocks with contents, and ``cache_table`` finds them by node; in a
    radix tree these are ``segments``, and ``leaves`` is the heap of the evictable ones. Block k of request i is
    ``request_blocks[request_blocks_start[i] + k]``; with G KV cache groups, block b of group g has k = b G + g.
    ``tiers`` [replicas] and ``offloads`` [n] are the state of the CPU memory behind the prefix caches
    (``_kernel_tiers``): a chunk can be read from ``chunk_ready_s`` on, a transfer uses it until ``chunk_busy_until_s``.
    When a request ends, its chunks with a nonzero ``is_used`` become the most recently used. ``storages`` and
    ``stored``, by node, are the storage behind the CPU memory. ``loading`` has slots of requests with a load, and
    ``deferred`` slots of those that are out of the queue while a step is formed.

    ``max_tokens`` and ``ignore_eos`` [n] are empty unless SGLang or TensorRT-LLM schedules or memory is reserved, and
    ``ends_at_limit`` [n] without asynchronous scheduling. ``hit_rate`` and ``draw_key`` [n], ``survival`` by position,
    ``drafts_by_seqs`` and ``draft_cost`` are those of speculation. ``ending`` [replicas, 2 x sequences] has slots of
    requests whose last token is in flight. ``batch_order`` [replicas, sequences] has each replica's residents (SGLang:
    those that decode) in the order of the engine's batch. ``tmp_*`` are work arrays.
    """

    params: Array
    counters: Array
    work: Array
    cost: PackedCost
    other: PackedCost
    stage_other: Array
    group_costs: GroupCosts
    group_sizes: Array
    shared: Array
    shared_slope: Array
    slots: Array
    free_slots: Array
    replicas: Array
    groups: Array
    heaps: Array
    block_needs: Array
    block_frees: Array
    cohort_s: Array
    cohort_n: Array
    stage_free: Array
    stage_s: Array
    flights: Array
    prompt_slot: Array
    prompt_chunk: Array
    partials: Array
    fresh: Array
    queues: Array
    queued_key: Array
    queued_index: Array
    queued_slot: Array
    event_s: Array
    event_number: Array
    pending: Array
    waiting: Array
    running: Array
    outstanding_tokens: Array
    arrival_s: Array
    child_start: Array
    child: Array
    parents_left: Array
    delay_s: Array
    sent_children: Array
    prompt: Array
    output: Array
    predicted: Array
    max_tokens: Array
    ignore_eos: Array
    ends_at_limit: Array
    hit_rate: Array
    draw_key: Array
    survival: Array
    drafts_by_seqs: Array
    draft_cost: PackedCost
    ending: Array
    batch_order: Array
    predicted_start: Array
    predicted_total: Array
    gittins_rank: Array
    priority: Array
    tenant: Array
    service: Array
    backlog: Array
    pools: Array
    cached: Array
    segments: Array
    leaves: Array
    cache_table: Array
    request_blocks_start: Array
    request_blocks: Array
    node_start: Array
    node_first: Array
    node_length: Array
    tiers: Array
    offloads: Array
    chunk_ready_s: Array
    chunk_busy_until_s: Array
    storages: Array
    stored: Array
    is_used: Array
    loading: Array
    deferred: Array
    deferred_key: Array
    previous_turn: Array
    routed: Array
    router_free_blocks: Array
    prefix_tokens: Array
    index_tokens: Array
    no_tokens: Array
    service_rate: Array
    bin_slot: Array
    bin_count: Array
    draws: Array
    results: Array
    series: Array
    histogram: Array
    step_log: Array
    gap_log: Array
    tmp_key: Array
    tmp_tie: Array
    tmp_slot: Array
    tmp_order: Array
    tmp_waiting: Array
    tmp_waiting_key: Array


class DecodeState(NamedTuple):
    """State of the decode side, with costs as in ``State``. ``slot_of`` [n] is the slot of each request in transfer.

    Transfers that share links: ``paths`` [prefill x decode replicas], ``links`` [replicas], and ``target_s`` [n], the
    service of its path at which each transfer ends (infinity: it is in no path). It arrives at ``earliest_end_s`` [n]
    or later.
    ``prefill_*`` [prefill replicas] and ``decode_*`` [decode replicas] are the parts of the counts that routers see.
    """

    cost: PackedCost
    other: PackedCost
    stage_other: Array
    draft_cost: PackedCost
    shared: Array
    shared_slope: Array
    draws: Array
    previous_turn: Array
    routed: Array
    slot_of: Array
    paths: Array
    active_paths: Array
    links: Array
    fabric: Array
    target_s: Array
    earliest_end_s: Array
    service_rate: Array
    prefill_waiting: Array
    prefill_running: Array
    prefill_outstanding: Array
    decode_waiting: Array
    decode_running: Array
    decode_outstanding: Array
    decode_free_blocks: Array


def new_state(setup: Setup, log_rows: int) -> State:
    """Return the state before the first event. The step log has ``log_rows`` rows, the gap log twice as many."""
    columns, params, decode_side = setup.columns, setup.params, setup.decode_side
    n, replicas, stride = len(columns.prompt), setup.all_replicas, _stride(setup)
    cost, chosen = setup.deployment.cost, setup.deployment.speculation
    seqs = max(side.params.max_num_seqs for side in setup.rows)
    loads = n if params.offload_blocks else 0  # maximum number of requests with a load at a time, and of deferred ones
    groups, tmp = replicas * (stride + 1), max(seqs + loads, replicas, kernel_layout.MAX_MATCHED)
    queues = 1 if params.central_queue else replicas
    # A queue that moves to a larger range of the pool leaves its old one unused.
    pool = n if queues == 1 else 4 * n * (1 + (decode_side.params.replicas if decode_side else 0)) + 128 * replicas
    bins = queues * params.bins
    events = replicas + (decode_side.params.replicas * decode_side.params.max_num_seqs if decode_side else 0)
    events += 2 * loads + replicas * params.async_scheduling
    counters = _rows(kernel_layout.counter_t, 1)
    counters["released"], counters["queued_top"] = setup.released, pool * (queues == 1)
    counters["bin_deadline_s"] = counters["transfer_end_s"] = np.inf
    counters["entry_s"] = float(columns.arrival_s[0]) + cost.front.serial_s + cost.front.request_s
    flights = _rows(kernel_layout.flight_t, replicas * stride)
    flights["group"] = (np.arange(replicas)[:, None] * (stride + 1) + 1 + np.arange(stride)).ravel()
    queue_rows = _rows(kernel_layout.queue_t, queues)
    queue_rows["deadline_s"] = queue_rows["overdue_at_s"] = np.inf
    queue_rows["room"] = n if queues == 1 else 0
    none, dependents = np.zeros(1, np.int64), setup.dependents
    other, stage_other = _other_degree(cost)
    shared, shared_slope = _shared(cost)
    group_costs, group_sizes = _group_costs([group.deployment.cost for group in setup.groups])
    return State(
        params=_param_rows(setup),
        counters=counters,
        work=_rows(kernel_layout.work_t, 1),
        cost=pack(cost),
        other=other,
        stage_other=stage_other,
        group_costs=group_costs,
        group_sizes=group_sizes,
        shared=shared,
        shared_slope=shared_slope,
        slots=_rows(kernel_layout.slot_t, n),
        free_slots=np.empty(n, np.int64),
        replicas=_replica_rows(setup),
        groups=_rows(kernel_layout.group_t, groups),
        heaps=np.empty((groups, seqs), np.int64),
        block_needs=np.zeros((groups, params.block_size), np.int64),
        block_frees=np.zeros((groups, params.block_size) if params.hybrid else (1, 1), np.int64),
        cohort_s=np.empty((groups, seqs), np.float64),
        cohort_n=np.empty((groups, seqs), np.int64),
        stage_free=np.zeros((2 * replicas, stride)),
        stage_s=np.zeros((replicas, stride)),
        flights=flights,
        prompt_slot=np.empty((replicas * stride, seqs), np.int64),
        prompt_chunk=np.empty((replicas * stride, seqs), np.int64),
        partials=np.empty((replicas, seqs), np.int64),
        fresh=np.empty((replicas, 4 * seqs if params.aligned else 1), np.int64),
        queues=queue_rows,
        queued_key=np.empty(pool, np.float64),
        queued_index=np.empty(pool, np.int64),
        queued_slot=np.empty(pool, np.int64),
        event_s=np.empty(events, np.float64),
        event_number=np.empty(events, np.int64),
        pending=np.zeros(replicas, np.int64),
        waiting=np.zeros(replicas, np.int64),
        running=np.zeros(replicas, np.int64),
        outstanding_tokens=np.zeros(replicas, np.int64),
        arrival_s=columns.arrival_s.copy(),
        child_start=dependents.start if dependents else none,
        child=dependents.child if dependents else none,
        parents_left=dependents.num_parents.copy() if dependents else none,
        delay_s=dependents.delay_s if dependents else np.zeros(1),
        sent_children=np.empty(len(dependents.num_parents), np.int64) if dependents else none,
        prompt=columns.prompt,
        output=columns.output,
        predicted=columns.predicted,
        max_tokens=columns.max_tokens,
        ignore_eos=columns.ignore_eos,
        ends_at_limit=columns.ends_at_limit,
        hit_rate=columns.hit_rate,
        draw_key=columns.draw_key,
        survival=np.ones(1) if chosen is None else chosen.survival,
        drafts_by_seqs=none if chosen is None else chosen.drafts_by_seqs(seqs),
        draft_cost=_draft_cost(setup),
        ending=np.empty((replicas, 2 * seqs), np.int64),
        batch_order=np.empty((replicas, seqs), np.int64),
        predicted_start=columns.prediction_rows.start,
        predicted_total=columns.prediction_rows.total_tokens,
        gittins_rank=columns.prediction_rows.gittins_rank,
        priority=columns.priority,
        tenant=columns.tenant,
        service=np.zeros(setup.tenants),
        backlog=np.zeros(setup.tenants, np.int64),
        **_prefix_cache(setup),
        bin_slot=np.empty((max(bins, 1), seqs if bins else 1), np.int64),
        bin_count=np.zeros(max(bins, 1), np.int64),
        draws=columns.draws,
        results=_view(setup.blank_results()),
        series=np.zeros((replicas, params.series_bins, len(kernel_layout.SERIES_COLUMNS))),
        histogram=np.zeros(kernel_layout.GAP_BINS, np.int64),
        step_log=_view(np.empty(log_rows, kernel_layout.step_t)),
        gap_log=_view(np.empty(2 * log_rows, kernel_layout.gap_t)),
        tmp_key=np.empty(tmp, np.float64),
        tmp_tie=np.empty(tmp, np.int64),
        tmp_slot=np.empty(tmp, np.int64),
        tmp_order=np.empty(replicas, np.int64),
        tmp_waiting=np.empty(seqs, np.int64),
        tmp_waiting_key=np.empty(seqs, np.float64),
    )


def _prefix_cache(setup: Setup) -> dict[str, Array]:
    nodes, params = setup.nodes, setup.params
    blocks = max(row.params.total_blocks for row in setup.rows) if params.prefix_caching else 1
    rows = params.replicas
    if params.router_prefix == 2:  # The router's indexes. One may grow by a prompt before it is cut to its size.
        blocks, rows = max(blocks, params.index_blocks + params.max_model_len // params.block_size), 2 * rows
    n, chunks, tier_rows = 1, 1, 1
    distinct = int((nodes.first + nodes.length).max(initial=0)) if params.offload_blocks else 0
    if params.offload_blocks:
        n, tier_rows = len(setup.columns.prompt), params.replicas
        chunks = max(1, min(params.offload_blocks, distinct))
        blocks, rows = max(blocks, chunks), rows + params.replicas
    requests = np.zeros(n, kernel_layout.offload_t)
    requests["replica"] = -1
    tiers = np.zeros(setup.all_replicas, kernel_layout.tier_t)
    tiers["first_pending_store"] = -1
    storages = np.full(1 if params.storage_shared else tier_rows, -1, kernel_layout.storage_t)
    storages["chunks"] = 0
    places = 1 << (2 * blocks - 1).bit_length()
    pools = np.full(rows, -1, kernel_layout.pool_t)
    pools["evictable"] = pools["records"] = pools["leaves"] = pools["clock"] = 0
    segments, tables = blocks if params.prefix_caching == 2 else 1, max(1, params.attention_groups)
    return {
        "pools": _view(pools),
        "cached": _view(np.empty((rows, blocks), kernel_layout.cached_t)),
        "segments": _view(np.empty((rows, segments), kernel_layout.segment_t)),
        "leaves": np.empty((rows, segments), np.int32),
        "cache_table": np.full((rows, places), -1, np.int32),
        "request_blocks_start": (np.cumsum(nodes.blocks) - nodes.blocks) * tables,
        "request_blocks": np.empty(int(nodes.blocks.sum()) * tables if params.prefix_caching == 1 else 1, np.int32),
        "node_start": nodes.start,
        "node_first": nodes.first,
        "node_length": nodes.length,
        "tiers": _view(tiers),
        "offloads": _view(requests),
        "chunk_ready_s": np.empty((tier_rows, chunks)),
        "chunk_busy_until_s": np.empty((tier_rows, chunks)),
        "storages": _view(storages),
        "stored": _rows(kernel_layout.stored_t, (len(storages), max(1, distinct if params.storage_blocks else 0))),
        "is_used": np.zeros(int(nodes.blocks.sum()) if params.offload_blocks else 1, np.int8),
        "loading": np.empty((tier_rows, min(n, params.total_blocks)), np.int64),
        "deferred": np.empty(n, np.int64),
        "deferred_key": np.empty(n),
        "previous_turn": setup.columns.previous_turn,
        "routed": np.full_like(setup.columns.previous_turn, -1),
        **{
            name: np.zeros(params.replicas, np.int64)
            for name in ("router_free_blocks", "prefix_tokens", "index_tokens")
        },
        "no_tokens": np.zeros(setup.all_replicas, np.int64),
        "service_rate": setup.service_rate,
    }


def new_decode_state(setup: Setup, state: State) -> DecodeState:
    """Return the state of the decode side, or a placeholder of the same type if there is no decode side."""
    decode_side, first = setup.decode_side, setup.params.replicas
    counts = (state.waiting, state.running, state.outstanding_tokens)
    views = (*(one[:first] for one in counts), *(one[first:] for one in counts), state.no_tokens[first:].copy())
    if decode_side is None:
        none = np.zeros(1, np.int64)
        costs = (state.cost, state.other, state.stage_other, state.draft_cost, state.shared, state.shared_slope)
        return DecodeState(*costs, state.draws, none[:0], none[:0], none, *_paths(0, 0, 0), state.service_rate, *views)
    cost, drafter = decode_side.deployment.cost, _draft_cost(decode_side)
    slot_of = np.zeros(len(setup.columns.prompt), np.int64)
    turns = decode_side.columns.previous_turn
    return DecodeState(
        pack(cost), *_other_degree(cost), drafter, *_shared(cost), decode_side.columns.draws, turns,
        np.full_like(turns, -1), slot_of, *_paths(first, decode_side.params.replicas, len(slot_of)),
        decode_side.service_rate, *views,
    )  # fmt: skip


def _draft_cost(setup: Setup) -> PackedCost:
    chosen = setup.deployment.speculation
    return pack((chosen and chosen.drafter.tables) or setup.deployment.cost)


def _paths(senders: int, receivers: int, requests: int) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Return the state of KV transfers that share links, from ``paths`` to ``earliest_end_s``."""
    paths = _rows(kernel_layout.path_t, senders * receivers)
    links = _rows(kernel_layout.link_t, senders + receivers + 1)  # The last one is the switch.
    numbers, fabric = np.zeros(len(paths), np.int64), _rows(kernel_layout.fabric_t, 1)
    return paths, numbers, links, fabric, np.full(requests, np.inf), np.zeros(requests)


def _param_rows(setup: Setup) -> Array:
    rows = _rows(kernel_layout.param_t, len(setup.rows))
    front, decode = setup.deployment.cost.front, setup.deployment.decode
    for row, side in zip(rows, setup.rows, strict=True):
        parameters = {f"parameter_{i}": value for i, value in enumerate(side.policies.batching.all_parameters)}
        ratio = NewTokenRatio(side.params.schedule_conservativeness)
        values = vars(side.params) | parameters | {
            "decode_replicas": setup.decode_side.params.replicas if setup.decode_side else 0,
            "stride": _stride(setup),
            "predicted_window": setup.columns.prediction_rows.window,
            "has_other_degree": side.deployment.cost.other is not None,
            "empty_replica_tokens": side.empty_replica_plan[1],
            "empty_replica_flags": side.empty_replica_plan[2],
            "front_serial_s": front.serial_s,
            "front_request_s": front.request_s,
            "transfer_fixed_s": side.kv_transfer.fixed_s,
            "transfer_token_s": side.kv_transfer.token_s,
            "transfer_timeout_s": side.kv_transfer.timeout_s,
            "recomputes": side.kv_transfer.kv_load_failure_policy == "recompute",
            "link_sharing": LINK_SHARINGS.index(side.kv_transfer.sharing),
            "links_at_once": side.kv_transfer.links_at_once,
            "transfer_layers": side.kv_transfer.layers,
            "max_local_prefill_length": decode.max_local_prefill_length if decode else 0,
            "max_prefill_queue_size": (decode and decode.max_prefill_queue_size) or kernel_layout.ALL,
            "tier_row": side.params.replicas * (2 if side.params.router_prefix == 2 else 1),
            "initial_token_ratio": ratio.initial,
            "least_token_ratio": ratio.least,
            "token_ratio_decay": ratio.decay,
        }  # fmt: skip
        for name in kernel_layout.param_t.names or ():
            row[name] = values[name]
    return rows


def _replica_rows(setup: Setup) -> Array:
    rows = setup.blank_replicas()
    number = np.arange(len(rows))
    rows["free_blocks"] = [setup.rows[row].params.total_blocks for row in setup.row_of_replica]
    rows["side"] = setup.row_of_replica
    rows["idle_group"] = number * (_stride(setup) + 1)
    rows["queue"] = 0 if setup.params.central_queue else number
    rows["deadline_s"] = np.inf
    rows["spare_blocks"] = kernel_layout.ALL
    rows["new_token_ratio"] = NewTokenRatio(setup.params.schedule_conservativeness).initial
    return _view(rows)


def _stride(setup: Setup) -> int:
    """Return how many entries each replica has in the arrays of steps in flight and of stages."""
    return max(max(side.params.max_in_flight, side.params.pp) for side in setup.rows)


def _other_degree(cost: CostTables) -> tuple[PackedCost, Array]:
    """Return the costs of the other tensor-parallel degree, and for each stage ([stages]) 1 if it has that degree."""
    if cost.other is None:
        return pack(cost), np.zeros(len(cost.stage_layers), np.int64)
    return pack(cost.other.tables), np.array(cost.other.stages, np.int64)


def _group_costs(costs: list[CostTables]) -> tuple[GroupCosts, Array]:
    """Return the costs of groups of replicas in common arrays, and [groups, 12] the sizes of each group's tables."""
    if not costs:
        return GroupCosts(*(np.zeros((1,) * ndim) for ndim in (3, 2, 3, 2, 3, 3, 2, 3, 2))), np.zeros((1, 12), np.int64)
    packed = [pack(cost) for cost in costs]

    def stacked(name: str) -> Array:
        tables = [getattr(one, name) for one in packed]
        shape = np.max([table.shape for table in tables], axis=0)
        found = np.zeros((len(tables), *shape))
        for at, table in enumerate(tables):
            own: Any = (at, *map(slice, table.shape))
            found[own] = table
        return found

    sizes = []
    for one in packed:
        tables = (one.by_tokens[:, 0], one.by_seqs[:, 0], one.prefill, one.decode, one.stage_layers, one.beside_prompts)
        shapes = [size for table in tables for size in table.shape]
        sizes.append([*shapes, one.merged, one.context_unit_tokens, one.has_beside_prompts])
    scalars = np.array([[one.merge_factor, one.masked_s] for one in packed])
    return GroupCosts(*[*map(stacked, GroupCosts._fields[:-1]), scalars]), np.array(sizes, np.int64)


def _shared(cost: CostTables) -> tuple[Array, Array]:
    """Return the table of what data-parallel ranks compute together ([T+1, 1]), and its slope beyond the end ([1])."""
    shared = np.zeros((1, 1)) if cost.shared_s is None else np.array(cost.shared_s, np.float64).reshape(-1, 1)
    return shared, end_slope(shared)


def _rows(dtype: np.dtype[Any], shape: int | tuple[int, int]) -> Array:
    return _view(np.zeros(shape, dtype))


def _view(rows: Array) -> Array:
    """Return records with attribute access. If the compiler is disabled, only ``np.recarray`` has such access."""
    return rows.view(np.recarray) if _jit.DISABLED else rows


# Compiled functions, "run" and those of engines with their own rules. The columns of all runs have the same types.
_COMPILED: dict[str, Any] = {}


def ready() -> bool:
    """Return whether a run needs no compilation: the kernel is in memory or cached, or the compiler is off."""
    return _jit.DISABLED or "run" in _COMPILED or _jit.is_cached("lengthwise.engine.kernel.run")


def _rules_signature(state_type: Any) -> Any:
    rank = _jit.function_type(signatures()["rank"])
    return _jit.i8(_jit.pointer_to(state_type), _jit.i8, _jit.f8, rank)


def _rules(state: State, engine: str) -> Any:
    """Return the rules of ``engine`` ("sglang", "trtllm" or ""), or for "reserve" the test of admissions.

    They are compiled unless the compiler is disabled.
    """
    known = {"sglang": form_as_sglang, "trtllm": form_as_trtllm, "reserve": admit_by_reserve, "": no_rules}
    function = known[engine]
    if _jit.DISABLED:
        return function
    if engine not in _COMPILED:
        _COMPILED[engine] = _jit.compile_now(function, _rules_signature(_jit.type_of(state)), cached=True)
    return _COMPILED[engine]


def arguments_of(setup: Setup, log_rows: int) -> tuple[Any, ...]:
    """Return the arguments of the kernel, the ``State`` first."""
    state = new_state(setup, log_rows)
    decode, scheduler = (setup.decode_side or setup).functions, setup.deployment.scheduler
    return (
        state, new_decode_state(setup, state), *setup.functions, decode.batching, decode.memory, decode.router,
        _rules(state, scheduler.engine_rules or ("reserve" if scheduler.reserve else "")),
    )  # fmt: skip


def kernel_of(arguments: tuple[Any, ...]) -> Any:
    """Return the kernel, compiled unless the compiler is disabled."""
    if _jit.DISABLED:
        return kernel.run
    if "run" not in _COMPILED:
        state_type, decode_type = map(_jit.type_of, arguments[:2])
        types = {axis: _jit.function_type(signature) for axis, signature in signatures().items()}
        axes = ("rank", "rank", "batching", "memory", "router", "preemption", "binning", "batching", "memory", "router")
        rules = _jit.function_type(_rules_signature(state_type))
        signature = _jit.i8(state_type, decode_type, *(types[axis] for axis in axes), rules)
        _COMPILED["run"] = _jit.compile_now(kernel.run, signature, cached=True)
    return _COMPILED["run"]


def run_kernel(setup: Setup, log_rows: int) -> EngineOutput:
    """Run the kernel and return its output. Raises PolicyError if a policy fails or requests wait forever."""
    arguments = arguments_of(setup, log_rows)
    state: State = arguments[0]
    try:
        code = kernel_of(arguments)(*arguments)
    except Exception as error:  # The kernel itself raises nothing.
        raise policy_error(setup, error) from error
    counters = state.counters[0]
    if code != kernel_layout.OK:
        raise error_of(code, setup, int(counters["problem_value"]))
    _record_unfinished(state)
    if state.params[0]["has_dependents"]:
        never_sent = (state.parents_left > 0) & (state.results["status"] == Status.UNFINISHED)
        state.arrival_s[never_sent] = np.nan
    steps, gaps = int(counters["step_rows"]), int(counters["gap_rows"])
    logged = steps <= len(state.step_log) and gaps <= len(state.gap_log)
    return EngineOutput(
        arrival_s=state.arrival_s,
        results=state.results,
        replicas=state.replicas,
        series=state.series,
        histogram=state.histogram,
        steps=state.step_log[:steps] if logged else None,
        gaps=state.gap_log[:gaps] if logged else None,
        end_s=run_end_s(float(counters["last_s"]), setup.params.limit_s, state.results, state.replicas),
    )


def _record_unfinished(state: State) -> None:
    """Write the output tokens and waits of requests that had not ended when the run stopped."""
    slots = state.slots[: int(state.counters[0]["slots"])]
    index = slots["index"]
    tokens = slots["generated"] + slots["prompt"] - state.prompt[index]
    for g, group in enumerate(state.groups):
        members = _members(state, g)
        tokens[members] += group["steps"] - slots["join_step"][members]
    if state.params[0]["async_scheduling"] and not state.params[0]["sglang"]:
        tokens -= _tokens_in_flight(state, tokens)
    unfinished = state.results["status"][index] == Status.UNFINISHED  # A slot may be that of a request that has ended.
    state.results["output_tokens"][index[unfinished]] = np.maximum(tokens[unfinished], 0)
    state.results["queued_for_s"][index[unfinished]] = slots["queued_for_s"][unfinished]


def _members(state: State, g: int) -> Array:
    """Return the slots of a decode group's members, which are the lower halves of its heap's entries."""
    return np.asarray(state.heaps[g, : int(state.groups[g]["members"])] & 0xFFFFFFFF)


def _tokens_in_flight(state: State, tokens: Array) -> Array:
    """Return how many of each slot's counted tokens [slots] belong to steps that have not ended.

    A step in flight lists its prompts. A request decodes in every step after the one with its prompt's last chunk.
    """
    slots, stride = state.slots[: len(tokens)], int(state.params[0]["stride"])
    found = np.zeros(len(tokens), np.int64)
    decodes = state.prompt[slots["index"]] + tokens - slots["context"] - 1
    for r, replica in enumerate(state.replicas):
        places = [r * stride + (replica["first_flight"] + k) % stride for k in range(replica["in_flight"])]
        if state.params[0]["dp"] > 1:  # without dummy steps
            places = [f for f in places if state.flights[f]["decodes"] + state.flights[f]["prompts"] > 0]
        for f in places:
            prompts = state.prompt_slot[f, : state.flights[f]["prompts"]]
            np.add.at(found, prompts, state.prompt_chunk[f, : len(prompts)])
        members = _members(state, int(replica["idle_group"]))
        found[members] += np.minimum(decodes[members], len(places))
        for slot in state.ending[r, : replica["ending"]]:
            found[slot] += min(decodes[slot], 1 + places.index(slots["last_flight"][slot]))
    # A request that was preempted while it decodes in a step in flight gets the token at ``last_token_s``.
    preempted = (slots["waiting"] == 1) & (slots["last_token_s"] > state.counters[0]["last_s"])
    total: Array = found + preempted
    return total
