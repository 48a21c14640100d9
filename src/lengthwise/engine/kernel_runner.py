"""The compiled kernel, from the disk cache or made once."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lengthwise import _jit
from lengthwise._jit import DISABLED
from lengthwise.cost._lookup import PackedCost, pack
from lengthwise.engine import kernel, kernel_layout
from lengthwise.engine.outcome import Outcome, ending_s
from lengthwise.engine.setup import Setup, blocked, policy_raised
from lengthwise.policy.compile import signatures
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.errors import InternalError, PolicyError
from lengthwise.schema.records import Status

Array = npt.NDArray[Any]


class State(NamedTuple):
    """Everything a run touches. Shapes: n requests, R replicas, P stages, G = R (P + 1) groups.

    ``other`` is read where ``stage_other`` [P] is 1.

    The bins of all queues lie one after the other in ``bin_slot``, a row a bin.
    """

    par: Array
    ctr: Array
    work: Array
    cost: PackedCost
    other: PackedCost
    stage_other: Array
    slots: Array
    free_slots: Array
    replicas: Array
    groups: Array
    heaps: Array
    phases: Array
    cohort_s: Array
    cohort_n: Array
    stage_free: Array
    flights: Array
    prompt_slot: Array
    prompt_chunk: Array
    partials: Array
    queues: Array
    pool_key: Array
    pool_index: Array
    pool_slot: Array
    event_s: Array
    event_replica: Array
    touched: Array
    waiting: Array
    running: Array
    tokens: Array
    arrival_s: Array
    follow_start: Array
    follow: Array
    follow_left: Array
    sent: Array
    prompt: Array
    output: Array
    predicted: Array
    predicted_start: Array
    predicted_total: Array
    predicted_index: Array
    priority: Array
    tenant: Array
    service: Array
    backlog: Array
    bin_slot: Array
    bin_count: Array
    draws: Array
    results: Array
    series: Array
    histogram: Array
    step_log: Array
    gap_log: Array
    scratch_key: Array
    scratch_tie: Array
    scratch_slot: Array
    scratch_order: Array
    scratch_waiting: Array
    scratch_waiting_key: Array


def new_state(setup: Setup, log_rows: int) -> State:
    """State before the first event; ``log_rows`` bounds the step and the gap log (0: keep none)."""
    n, r, p = len(setup.arrival_s), setup.all_replicas, _stride(setup)
    there, cost = setup.remote, setup.deployment.cost
    seqs, groups = max(setup.max_num_seqs, there.max_num_seqs if there else 0), r * (p + 1)
    queues = 1 if setup.central else r
    pool = n if queues == 1 else 4 * n * (1 + (there.replicas if there else 0)) + 128 * r
    bins = queues * setup.bins
    events = r + (there.replicas * there.max_num_seqs if there else 0)
    return State(
        par=_view(
            np.concatenate([_row(kernel_layout.param_t, _params(setup, side)) for side in (setup, there) if side])
        ),
        ctr=_record(kernel_layout.counter_t, _counters(setup, n if queues == 1 else 0)),
        work=_records(kernel_layout.work_t, 1),
        cost=pack(cost),
        other=pack(cost.other or cost),
        stage_other=_marks(cost),
        slots=_empty(kernel_layout.slot_t, n),
        free_slots=np.empty(n, np.int64),
        replicas=_replicas(setup),
        groups=_records(kernel_layout.group_t, groups),
        heaps=np.empty((groups, seqs), np.int64),
        phases=np.zeros((groups, setup.block_size), np.int64),
        cohort_s=np.empty((groups, seqs), np.float64),
        cohort_n=np.empty((groups, seqs), np.int64),
        stage_free=np.zeros((r, p)),
        flights=_flights(r, p),
        prompt_slot=np.empty((r * p, seqs), np.int64),
        prompt_chunk=np.empty((r * p, seqs), np.int64),
        partials=np.empty((r, seqs), np.int64),
        queues=_queues(queues, n),
        pool_key=np.empty(pool, np.float64),
        pool_index=np.empty(pool, np.int64),
        pool_slot=np.empty(pool, np.int64),
        event_s=np.empty(events, np.float64),
        event_replica=np.empty(events, np.int64),
        touched=np.zeros(r, np.int64),
        waiting=np.zeros(r, np.int64),
        running=np.zeros(r, np.int64),
        tokens=np.zeros(r, np.int64),
        arrival_s=setup.arrival_s.copy(),
        **_followers(setup),
        prompt=setup.prompt,
        output=setup.output,
        predicted=setup.predicted,
        predicted_start=setup.rows.start,
        predicted_total=setup.rows.total,
        predicted_index=setup.rows.index,
        priority=setup.priority,
        tenant=setup.tenant,
        service=np.zeros(setup.tenants),
        backlog=np.zeros(setup.tenants, np.int64),
        bin_slot=np.empty((max(bins, 1), seqs if bins else 1), np.int64),
        bin_count=np.zeros(max(bins, 1), np.int64),
        draws=setup.draws,
        results=_view(setup.results.copy()),
        series=np.zeros((r, setup.series_bins, len(kernel_layout.SERIES_COLUMNS))),
        histogram=setup.histogram.copy(),
        step_log=_empty(kernel_layout.step_t, log_rows),
        gap_log=_empty(kernel_layout.gap_t, 2 * log_rows),
        scratch_key=np.empty(max(seqs, r), np.float64),
        scratch_tie=np.empty(max(seqs, r), np.int64),
        scratch_slot=np.empty(max(seqs, r), np.int64),
        scratch_order=np.empty(r, np.int64),
        scratch_waiting=np.empty(seqs, np.int64),
        scratch_waiting_key=np.empty(seqs, np.float64),
    )


class DecodeState(NamedTuple):
    """What a run touches only where decoding is apart: costs, draws, and the slot of each request on its way.

    And what routers see of either side: views of the counts of all replicas.
    """

    cost: PackedCost
    other: PackedCost
    stage_other: Array
    draws: Array
    slot_of: Array
    waiting_here: Array
    running_here: Array
    tokens_here: Array
    waiting_there: Array
    running_there: Array
    tokens_there: Array


def decode_state(setup: Setup, state: State) -> DecodeState:
    """Beside ``new_state``; nothing is read of it where every replica does both."""
    there, first = setup.remote, setup.replicas
    counts = (state.waiting, state.running, state.tokens)
    seen = (*(one[:first] for one in counts), *(one[first:] for one in counts))
    if there is None:
        nobody = np.zeros(1, np.int64)
        return DecodeState(state.cost, state.other, state.stage_other, state.draws, nobody, *seen)
    cost, n = there.deployment.cost, len(setup.arrival_s)
    own = pack(cost)
    other = own if cost.other is None else pack(cost.other)
    return DecodeState(own, other, _marks(cost), there.draws, np.zeros(n, np.int64), *seen)


def _followers(setup: Setup) -> dict[str, Array]:
    """Who comes after whom, and room for a heap of those that are sent; next to nothing where nobody does."""
    found = setup.followers
    if found is None:
        nobody = np.zeros(1, np.int64)
        return {"follow_start": nobody, "follow": nobody, "follow_left": nobody, "sent": nobody}
    sent = np.empty(len(found.left), np.int64)
    return {"follow_start": found.start, "follow": found.child, "follow_left": found.left.copy(), "sent": sent}


def _released(setup: Setup) -> int:
    n = len(setup.arrival_s)
    return min(setup.concurrency, n) if setup.closed else n


def _counters(setup: Setup, pool_top: int) -> dict[str, Any]:
    before = setup.deployment.cost.front
    front = {"entry_s": float(setup.arrival_s[0]) + before.queue_s + before.request_s}
    return {"released": _released(setup), "pool_top": pool_top, "bin_due_s": np.inf} | front


def _params(setup: Setup, side: Setup) -> dict[str, Any]:
    own = {name: getattr(side, name) for name in kernel_layout.param_t.names or () if hasattr(side, name)}
    plan = {"empty_tokens": side.empty_plan[1], "empty_flags": side.empty_plan[2]}
    before, kv_transfer = setup.deployment.cost.front, side.kv_transfer
    front = {"front_queue_s": before.queue_s, "front_request_s": before.request_s}
    parameters = enumerate(side.policies.batching.all_parameters)
    rest = {"predicted_window": setup.rows.window, "two_degrees": side.deployment.cost.other is not None}
    sides = {"decodes": setup.remote.replicas if setup.remote else 0, "stride": _stride(setup)}
    way = {"handover_fixed_s": kv_transfer.fixed_s, "handover_token_s": kv_transfer.token_s}
    way["one_at_a_time"] = kv_transfer.one_at_a_time
    return own | plan | front | rest | sides | way | {f"parameter_{i}": value for i, value in parameters}


def _replicas(setup: Setup) -> Array:
    sides = [side for side in (setup, setup.remote) if side]
    rows = np.concatenate([side.replica_rows for side in sides])
    rows["free_blocks"] = np.concatenate([np.full(side.replicas, side.total_blocks) for side in sides])
    rows["side"] = np.arange(len(rows)) >= setup.replicas
    rows["idle"] = np.arange(len(rows)) * (_stride(setup) + 1)
    rows["queue"] = 0 if setup.central else np.arange(len(rows))
    rows["deadline_s"] = np.inf
    return _view(rows)


def _stride(setup: Setup) -> int:
    """Places for steps in flight, and for stages, that every replica has."""
    sides = [side for side in (setup, setup.remote) if side]
    return max(max(side.flights, side.pp) for side in sides)


def _flights(replicas: int, stride: int) -> Array:
    rows = np.zeros(replicas * stride, kernel_layout.flight_t)
    rows["group"] = (np.arange(replicas)[:, None] * (stride + 1) + 1 + np.arange(stride)).ravel()
    return _view(rows)


def _marks(cost: CostTables) -> Array:
    if cost.other is None:
        return np.zeros(len(cost.stage_layers), np.int64)
    return np.array(cost.stage_other, np.int64)


def _queues(count: int, n: int) -> Array:
    rows = np.zeros(count, kernel_layout.queue_t)
    rows["deadline_s"] = rows["overdue_s"] = np.inf
    if count == 1:
        rows["room"] = n
    return _view(rows)


def _record(dtype: np.dtype[Any], values: dict[str, Any]) -> Array:
    return _view(_row(dtype, values))


def _row(dtype: np.dtype[Any], values: dict[str, Any]) -> Array:
    row = np.zeros(1, dtype)
    for name, value in values.items():
        row[name] = value
    return row


def _records(dtype: np.dtype[Any], count: int) -> Array:
    return _view(np.zeros(count, dtype))


def _empty(dtype: np.dtype[Any], count: int) -> Array:
    return _view(np.empty(count, dtype))


def _view(rows: Array) -> Array:
    """Without the compiler, records need attribute access of their own."""
    return rows.view(np.recarray) if DISABLED else rows


def ready() -> bool:
    """Whether the kernel needs no compiling: it is in this process or in the disk cache."""
    return _jit.DISABLED or _compiled.cache_info().currsize > 0 or _jit.is_cached("run")


Kind = tuple[Any, ...]


@lru_cache(maxsize=1)
def _compiled(state_type: Any, decode_type: Any) -> Any:
    s = {axis: _jit.function_type(signature) for axis, signature in signatures().items()}
    axes = ("rank", "rank", "batching", "memory", "router", "takeover", "binning", "batching", "memory", "router")
    signature = _jit.i8(state_type, decode_type, *(s[axis] for axis in axes))
    return _jit.compile_now(kernel.run, signature, cached=True)


_KERNELS: dict[Kind, Any] = {}
"""By what a state is made of: to ask its compiled type anew takes longer than a short run."""


def arguments_of(setup: Setup, log_rows: int) -> tuple[Any, ...]:
    """What the kernel is called with; the state comes first."""
    state = new_state(setup, log_rows)
    side = setup.remote or setup
    return state, decode_state(setup, state), *setup.functions, side.batching, side.memory, side.router


def kernel_of(arguments: tuple[Any, ...]) -> Any:
    """The kernel, compiled unless the compiler is off."""
    if _jit.DISABLED:
        return kernel.run
    kind = _kind(arguments[:2])
    if kind not in _KERNELS:
        _KERNELS[kind] = _compiled(*map(_jit.type_of, arguments[:2]))
    return _KERNELS[kind]


def _kind(value: Any) -> Kind:
    """What a compiled type follows from."""
    if isinstance(value, tuple):
        return type(value), *map(_kind, value)
    if isinstance(value, np.ndarray):
        return value.dtype, value.ndim, value.flags.c_contiguous, value.flags.writeable, value.flags.aligned
    return (type(value),)


def run_kernel(setup: Setup, log_rows: int) -> Outcome:
    """The outcome of a run, by the kernel.

    Raises:
        PolicyError: A policy raised, returned NaN, chose no replica, or took too many blocks.
    """
    arguments = arguments_of(setup, log_rows)
    state: State = arguments[0]
    try:
        code = kernel_of(arguments)(*arguments)
    except Exception as error:  # the kernel raises nothing itself
        raise policy_raised(setup, error) from error
    _raise_for(code, setup, state)
    return _outcome(state)


def _raise_for(code: int, setup: Setup, state: State) -> None:
    request = int(state.ctr[0]["problem_request"])
    if code == kernel_layout.BAD_RANK:
        raise setup.bad_rank(request)
    if code == kernel_layout.BAD_MEMORY:
        raise setup.bad_memory(request)
    if code == kernel_layout.BAD_ROUTE:
        raise setup.bad_route(request)
    if code == kernel_layout.BAD_DECODE_MEMORY and setup.remote:
        raise setup.remote.bad_memory(request)
    if code == kernel_layout.BAD_DECODE_ROUTE and setup.remote:
        raise setup.remote.bad_route(request)
    if code == kernel_layout.BAD_BIN:
        raise setup.bad_bin(request)
    if code == kernel_layout.BAD_TAKEOVER:
        raise setup.bad_takeover(request)
    if code == kernel_layout.BLOCKED:
        raise PolicyError(blocked(setup, request))
    if code != kernel_layout.OK:
        raise InternalError(f"the kernel came back with {code}")


def _outcome(state: State) -> Outcome:
    ctr = state.ctr[0]
    _count_unfinished(state)
    if state.par[0]["follows"]:
        never = (state.follow_left > 0) & (state.results["status"] == Status.UNFINISHED)
        state.arrival_s[never] = np.nan
    kept = int(ctr["step_rows"]) <= len(state.step_log) and int(ctr["gap_rows"]) <= len(state.gap_log)
    return Outcome(
        arrival_s=state.arrival_s,
        results=state.results,
        replicas=state.replicas,
        series=state.series,
        histogram=state.histogram,
        steps=state.step_log[: int(ctr["step_rows"])] if kept else None,
        gaps=state.gap_log[: int(ctr["gap_rows"])] if kept else None,
        end_s=ending_s(float(ctr["last_s"]), float(state.par[0]["limit_s"]), state.results, state.replicas),
    )


def _count_unfinished(state: State) -> None:
    """Tokens so far of what the time limit cut off."""
    slots = state.slots[: int(state.ctr[0]["slots"])]
    index = slots["index"]
    tokens = slots["generated"] + slots["prompt"] - state.prompt[index]
    for g, group in enumerate(state.groups):
        members = state.heaps[g, : int(group["members"])] & 0xFFFFFFFF
        tokens[members] += group["steps"] - slots["join_step"][members]
    cut = state.results["status"][index] == Status.UNFINISHED
    state.results["output_tokens"][index[cut]] = np.maximum(tokens[cut], 0)
    state.results["queued_for_s"][index[cut]] = slots["queued_for_s"][cut]
