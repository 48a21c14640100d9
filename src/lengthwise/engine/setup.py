"""Inputs of a run for kernel and reference, resolved and checked once: parameters, request columns, policies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lengthwise.engine import kernel_layout
from lengthwise.policy import CHUNKED, PREDICTED, PREEMPTION_MODES, Policy, interpreted, known, resolve
from lengthwise.policy.compile import compiled as compile_policy
from lengthwise.schema.deployment import Deployment, KVTransfer
from lengthwise.schema.errors import InputError, InternalError, LengthwiseError, PolicyError, UnknownNameError
from lengthwise.schema.records import Status
from lengthwise.schema.workload import After, Workload

Array = npt.NDArray[Any]
Function = Callable[..., Any]

_SERIES_BINS = 2048
_FIRST_SERIES_BIN_S = 2.0**-6


class Policies(NamedTuple):
    """Policies of a run, in the order in which the kernel takes their functions."""

    rank: Policy
    victim: Policy
    batching: Policy
    memory: Policy
    router: Policy
    preemption: Policy
    binning: Policy


class Functions(NamedTuple):
    """Functions of the policies, each with its axis' full argument list."""

    rank: Function
    victim: Function
    batching: Function
    memory: Function
    router: Function
    preemption: Function
    binning: Function


class PredictionRows(NamedTuple):
    """Row ``start[i] + w`` predicts request i after ``w * window`` tokens (``Predictions``); ``window`` 0: one each."""

    window: int
    start: Array
    total_tokens: Array
    gittins_rank: Array


class Dependents(NamedTuple):
    """Children of each request, ``child[start[i] : start[i + 1]]``, and its number of parents [n]."""

    start: Array
    child: Array
    num_parents: Array


@dataclass(frozen=True)
class Columns:
    """Columns [n] of the requests; ``draws`` [n, 2] are uniform numbers for routers."""

    arrival_s: Array
    prompt: Array
    output: Array
    predicted: Array
    prediction_rows: PredictionRows
    priority: Array
    tenant: Array
    draws: Array


class Params:
    """Parameters of one side (prefill or decode if disaggregated, else all), named as in ``kernel_layout.param_t``.

    Attributes:
        max_in_flight: Steps of a replica that may be in its pipeline at a time.
        bins: Bins per queue; 0: arrivals join the queue at once.
        bin_wait_s: Maximum wait of the first request of a bin: the least of batch_wait_s, max_wait_s and timeout_s.
        preemption_interval_steps: Steps after which a replica considers preemptions again.
        series_bins: Bins of a replica's time series: a power of two, fewer where there are many replicas.
        tracks_service: Whether the service of tenants is counted.
    """

    def __init__(
        self, deployment: Deployment, policies: Policies, workload: Workload, limit_s: float, all_replicas: int
    ) -> None:
        limits, scheduler, kv = deployment.limits, deployment.scheduler, deployment.kv
        self.replicas = deployment.parallel.replicas
        self.pp = len(deployment.cost.stage_layers)
        self.max_in_flight = limits.max_in_flight or self.pp
        self.total_blocks = kv.num_blocks
        self.block_size = kv.block_size
        self.watermark_blocks = int(deployment.watermark * kv.num_blocks)
        self.max_num_seqs = limits.max_num_seqs
        self.max_step_seqs = limits.max_step_seqs or limits.max_num_seqs
        self.token_budget = limits.max_num_batched_tokens
        self.max_model_len = deployment.max_model_len
        self.closed_loop = bool(workload.concurrency)
        self.has_dependents = workload.after is not None and len(workload.after.parent) > 0
        self.central_queue = policies.router == known("router")["central"]
        self.swap = scheduler.preemption_mode == "swap"
        self.swap_s_per_block = kv.swap_s_per_block
        self.prefix_caching = limits.enable_prefix_caching
        self.rank_every_step = policies.rank.every_step
        self.needs_peak = policies.memory.uses("peak_tokens")
        self.preempts = policies.preemption != known("preemption")["never"]
        self.preemption_interval_steps = scheduler.preemption_interval_steps
        self.tracks_service = any(policy.uses("service_tokens") for policy in (policies.rank, policies.victim))
        self.counts_steps = policies.batching.uses(
            "steps_since_admit", "ended_since_admit", "phase_steps", "phase_rounds"
        )
        self.timeout_s = limits.timeout_s
        self.limit_s = limit_s
        self.max_wait_s = scheduler.max_wait_s
        self.bins = 0 if scheduler.binning is None else policies.binning.bins
        self.bin_wait_s = min(scheduler.batch_wait_s, scheduler.max_wait_s, limits.timeout_s)
        self.series_bins = max(64, _SERIES_BINS >> max(0, math.ceil(math.log2(all_replicas)) - 3))


@dataclass(frozen=True)
class Setup:
    """One run before it starts.

    Attributes:
        deployment: The deployment; for the decode side, that side as a deployment of its own.
        policies: Policies of the run.
        functions: Their functions, compiled or interpreted.
        params: Parameters of the side.
        columns: Columns of the requests.
        idle_plan: (admissions, tokens, flags) of the batching policy for one request on an idle replica.
        concurrency: Requests in the system in a closed loop; 0: arrivals are given.
        dependents: Requests that are sent when others have finished.
        first_replica: Number of the side's first replica.
        remote: Decode side under disaggregation: a setup of the same requests.
        kv_transfer: Transfer of requests to this side.
    """

    deployment: Deployment
    policies: Policies
    functions: Functions
    params: Params
    columns: Columns
    idle_plan: tuple[int, int, int]
    concurrency: int
    dependents: Dependents | None
    first_replica: int = 0
    remote: Setup | None = None
    kv_transfer: KVTransfer = KVTransfer()

    @property
    def sides(self) -> list[Setup]:
        """Return this side, and the decode side if there is one."""
        return [self, self.remote] if self.remote else [self]

    @property
    def all_replicas(self) -> int:
        """Return the number of replicas of both sides."""
        return sum(side.params.replicas for side in self.sides)

    @property
    def tenants(self) -> int:
        """Return the number of tenants whose service is counted."""
        return int(self.columns.tenant.max()) + 1 if self.params.tracks_service else 1

    @property
    def released(self) -> int:
        """Return the number of requests that may be sent at the start."""
        n = len(self.columns.prompt)
        return min(self.concurrency, n) if self.params.closed_loop else n

    def tenant(self, i: int) -> int:
        """Return the tenant whose service request ``i`` adds to; 0 where none is counted."""
        return int(self.columns.tenant[i]) if self.params.tracks_service else 0

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that ``tokens`` need."""
        return -(-tokens // self.params.block_size)

    def predicted_at(self, i: int, generated: int) -> tuple[float, float]:
        """Return the predicted total tokens and the Gittins rank of request ``i`` when it had ``generated`` tokens."""
        rows = self.columns.prediction_rows
        if rows.window == 0:
            predicted = float(self.columns.predicted[i])
            return predicted, max(1.0, predicted - generated)
        row = min(int(rows.start[i]) + generated // rows.window, int(rows.start[i + 1]) - 1)
        return float(rows.total_tokens[row]), float(rows.gittins_rank[row])

    def remaining(self, q: Any) -> float:
        """Return the predicted remaining tokens of a request, at least 1."""
        return max(1.0, self.predicted_at(q.index, q.generated)[0] - int(q.generated))

    def remaining_integer(self, q: Any, more: int = 0) -> int:
        """Return the predicted remaining tokens, rounded up, once ``more`` tokens have been produced; at least 1."""
        generated = int(q.generated) + more
        return max(1, math.ceil(self.predicted_at(q.index, generated)[0]) - generated)

    def key(self, function: Function, now_s: float, q: Any, service: float) -> float:
        """Return a rank or victim key.

        Raises:
            PolicyError: It is NaN.
        """
        predicted, gittins_rank = self.predicted_at(q.index, q.generated)
        key: float = function(
            now_s, q.arrival_s, q.prompt, q.generated, predicted, max(1.0, predicted - q.generated), gittins_rank,
            q.wait.total_s(now_s), int(self.columns.priority[q.index]), q.admission.number, q.last_preemption.number,
            service, q.wait.batch,
        )  # fmt: skip
        if math.isnan(key):
            raise error_of(kernel_layout.BAD_RANK, self, q.index)
        return key

    def memory_blocks(self, context: int, chunk: int, predicted: float, free: int, num_running: int, peak: int) -> int:
        """Return the blocks that the memory policy gives a request; -1: it must wait."""
        p = self.params
        blocks: int = self.functions.memory(
            context, chunk, predicted, p.max_model_len, p.block_size, free, p.total_blocks, p.watermark_blocks,
            num_running, peak,
        )  # fmt: skip
        return blocks

    def outstanding(self, i: int) -> int:
        """Return the tokens that a router counts for request ``i``: its prompt and its predicted output."""
        return int(self.columns.prompt[i]) + math.ceil(float(self.columns.predicted[i]))

    def blank_results(self) -> Array:
        """Return [n] results of requests that have not run."""
        results = np.zeros(len(self.columns.prompt), dtype=kernel_layout.result_t)
        for field in ("scheduled_s", "first_token_s", "finished_s"):
            results[field] = np.nan
        results["status"] = Status.UNFINISHED
        results["replica"] = -1
        return results

    def blank_replicas(self) -> Array:
        """Return [replicas of both sides] totals of replicas that have not run."""
        rows = np.zeros(self.all_replicas, dtype=kernel_layout.replica_t)
        rows["series_bin_s"] = _FIRST_SERIES_BIN_S
        return rows


def prepare(workload: Workload, deployment: Deployment, *, seed: int, limit_s: float, compiled: bool) -> Setup:
    """Return a checked setup.

    Raises:
        InputError: The workload and the deployment do not fit together.
        PolicyError: A policy lacks predictions or admits nothing.
    """
    decode = deployment.decode
    if decode is None:
        return _side(workload, deployment, seed, limit_s, deployment.parallel.replicas, compiled=compiled)
    all_replicas = deployment.parallel.replicas + decode.parallel.replicas
    _check_sides(deployment)
    remote = _side(
        workload, deployment.decoding(), (seed, 1), limit_s, all_replicas, compiled=compiled,
        first_replica=deployment.parallel.replicas, kv_transfer=decode.kv_transfer,
    )  # fmt: skip
    return _side(workload, deployment, seed, limit_s, all_replicas, compiled=compiled, remote=remote)


def _side(
    workload: Workload,
    deployment: Deployment,
    seed: int | tuple[int, int],
    limit_s: float,
    all_replicas: int,
    *,
    compiled: bool,
    **side_fields: Any,
) -> Setup:
    policies = _policies(deployment)
    _check(workload, deployment, policies)
    n = len(workload)
    made = workload.predictions
    rows = PredictionRows(0, np.zeros(1, np.int64), np.zeros(1), np.zeros(1))
    if made is not None:
        rows = PredictionRows(made.window_tokens, *map(_column, (made.start, made.total_tokens, made.gittins_rank)))
    arrival_s = np.array(workload.arrival_s)
    if workload.concurrency:  # In a closed loop a request arrives when another one ends.
        arrival_s[workload.concurrency :] = np.nan
    draws = policies.router.uses("draw_a", "draw_b")
    columns = Columns(
        arrival_s=arrival_s,
        prompt=_column(workload.prompt_tokens),
        output=np.minimum(workload.output_tokens, np.maximum(deployment.max_model_len - workload.prompt_tokens, 1)),
        predicted=_column(workload.predicted_tokens, np.zeros(n)),
        prediction_rows=rows,
        priority=_column(workload.priority, np.zeros(n, np.int64)),
        tenant=_column(workload.tenant, np.zeros(n, np.int64)),
        draws=np.random.default_rng(seed).random((n, 2)) if draws else np.zeros((n, 2)),
    )
    return Setup(
        deployment,
        policies,
        Functions(*map(compile_policy if compiled else interpreted, policies)),
        Params(deployment, policies, workload, limit_s, all_replicas),
        columns,
        idle_plan=_idle_plan(policies.batching, deployment),
        concurrency=workload.concurrency or 0,
        dependents=_dependents(workload.after),
        **side_fields,
    )


def _policies(deployment: Deployment) -> Policies:
    scheduler = deployment.scheduler
    if scheduler.preemption_mode not in PREEMPTION_MODES:
        raise UnknownNameError("preemption mode", scheduler.preemption_mode, PREEMPTION_MODES)
    binning = "one" if scheduler.binning is None else scheduler.binning
    axes = ("rank", "victim", "batching", "memory", "router", "preemption")
    found = {axis: resolve(axis, getattr(scheduler, axis)) for axis in axes}
    return Policies(**found, binning=resolve("binning", binning))


def _dependents(after: After | None) -> Dependents | None:
    """Return the children of each request, by number."""
    if after is None or len(after.parent) == 0:
        return None
    left = np.diff(after.start)
    child = np.repeat(np.arange(len(after)), left)
    order = np.argsort(after.parent, kind="stable")
    start = np.searchsorted(after.parent[order], np.arange(len(after) + 1))
    return Dependents(start.astype(np.int64), child[order], left)


def _column(values: Array | None, default: Array | None = None) -> Array:
    return np.require(default if values is None else values, requirements=["C", "A", "W"])


def _check(workload: Workload, deployment: Deployment, policies: Policies) -> None:
    for policy in policies:
        if policy.uses(*PREDICTED) and workload.predicted_tokens is None:
            raise PolicyError(
                f"{policy.axis} policy {policy.name!r} needs predicted output lengths, and this workload has none; "
                'give predicted_tokens ([predictor] kind = "oracle" in a scenario predicts the true lengths)'
            )
    kv, memory = deployment.kv, policies.memory
    if kv.num_blocks * kv.block_size < deployment.max_model_len:
        raise InputError(
            f"the KV cache must hold one sequence of max_model_len {deployment.max_model_len} tokens; it holds "
            f"{kv.num_blocks * kv.block_size}. Lower max_model_len, or give more memory or GPUs"
        )
    watermark = int(deployment.watermark * kv.num_blocks)
    sizes = (deployment.max_model_len, kv.block_size, kv.num_blocks, kv.num_blocks, watermark)
    try:
        blocks = interpreted(memory)(1, 1, 1.0, *sizes, 0, 2)
    except Exception as error:
        raise PolicyError(
            f"memory policy {memory.name!r} must return a whole number of blocks; for one token on an idle replica "
            f"it raised {type(error).__name__}: {error}"
        ) from error
    if blocks < 0:
        raise PolicyError(
            f"memory policy {memory.name!r} refuses a request of one token on an idle replica; no request would "
            "ever run"
        )


def _check_sides(deployment: Deployment) -> None:
    remote = deployment.decode
    assert remote is not None
    for section, router in (("scheduler", deployment.scheduler.router), ("decode", remote.router)):
        if resolve("router", router) == resolve("router", "central"):
            raise InputError(
                f'{section}.router must choose a replica under disaggregation; "central" is one queue for all. '
                'Use "round_robin" or "least_outstanding"'
            )
    if deployment.kv.block_size != remote.kv.block_size:
        raise InputError(
            f"block_size must be the same on the prefill and the decode side; it is {deployment.kv.block_size} and "
            f"{remote.kv.block_size}"
        )


def _idle_plan(batching: Policy, deployment: Deployment) -> tuple[int, int, int]:
    """Return the plan of the batching policy for one request on an idle replica, which it must admit."""
    limits, own = deployment.limits, (len(deployment.cost.stage_layers), *batching.all_parameters)
    budget, seqs = limits.max_num_batched_tokens, limits.max_num_seqs
    try:
        plan = interpreted(batching)(0, 0, 1, 0, 0, budget, seqs, 0, 0, 0, 0, 0, 0, 0, *own)
        admit, tokens, flags = (int(x) for x in plan)
    except Exception as error:
        raise PolicyError(
            f"batching policy {batching.name!r} must return three whole numbers (admit, tokens, flags); "
            f"on an idle replica with one request waiting it failed: {error}"
        ) from error
    if admit < 1 or (flags & CHUNKED and tokens < 1):
        raise PolicyError(
            f"batching policy {batching.name!r} admits nothing on an idle replica with one request waiting "
            f"(admit {admit}, tokens {tokens}); no request would ever run"
        )
    return admit, tokens, flags


def error_of(code: int, setup: Setup, number: int) -> LengthwiseError:
    """Return the error of a status code; ``number`` is the request, replica, bin or number of blocks at fault."""
    policies, params = setup.policies, setup.params
    match code:
        case kernel_layout.BAD_RANK:
            message = (
                f"rank policy {policies.rank.name!r} or victim policy {policies.victim.name!r} returned NaN for "
                f"request {number}; a key must be a number"
            )
        case kernel_layout.BAD_MEMORY:
            message = (
                f"memory policy {policies.memory.name!r} admitted a request that needs {number} blocks when fewer "
                "are free; return -1 to make it wait"
            )
        case kernel_layout.BAD_ROUTE:
            message = f"router {policies.router.name!r} chose replica {number}; there are {params.replicas}, from 0"
        case kernel_layout.BAD_BIN:
            message = f"binning {policies.binning.name!r} chose bin {number}; there are {params.bins}, from 0"
        case kernel_layout.BAD_PREEMPTION:
            message = (
                f"preemption policy {policies.preemption.name!r} returned NaN for waiting request {number}; "
                "it must return a number"
            )
        case kernel_layout.BLOCKED:
            message = (
                f"request {number} waits forever: nothing runs, nothing will arrive, and batching policy "
                f"{policies.batching.name!r} with memory policy {policies.memory.name!r} does not let it continue "
                f"({int(setup.columns.prompt[number])} prompt tokens, {params.total_blocks} blocks of "
                f"{params.block_size})"
            )
        case kernel_layout.BAD_DECODE_MEMORY if setup.remote:
            return error_of(kernel_layout.BAD_MEMORY, setup.remote, number)
        case kernel_layout.BAD_DECODE_ROUTE if setup.remote:
            return error_of(kernel_layout.BAD_ROUTE, setup.remote, number)
        case _:
            return InternalError(f"the kernel returned the unknown status code {code}")
    return PolicyError(message)


def policy_raised(setup: Setup, error: Exception) -> PolicyError:
    """Return the error of a run in which a policy raised; it names the user's own policies if there are any."""
    policies = [policy for side in setup.sides for policy in side.policies]
    own = [policy for policy in policies if not policy.builtin] or policies
    names = ", ".join(f"{policy.axis} policy {policy.name!r}" for policy in own)
    return PolicyError(f"{names} raised {type(error).__name__}: {error}")
