"""What a run needs, resolved once for both engines: numbers, columns, policy functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.engine.kernel_layout import GAP_BINS, replica_t, result_t
from lengthwise.policy import CHUNKED, PREDICTED, PREEMPTIONS, Policy, interpreted, known, resolve
from lengthwise.schema.deployment import Deployment, Handover
from lengthwise.schema.errors import InputError, PolicyError, UnknownNameError
from lengthwise.schema.records import Status
from lengthwise.schema.workload import After, Predictions, Workload

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Rows:
    """Predictions by request and window, as in ``Predictions``; ``window`` 0: none are made again."""

    window: int
    start: Array
    total: Array
    index: Array


@dataclass(frozen=True)
class Followers:
    """Who comes after each request: ``child[start[i]:start[i + 1]]``; ``left`` [n]: how many each one waits for."""

    start: Array
    child: Array
    left: Array


@dataclass(frozen=True)
class Policies:
    """The policies of a run."""

    rank: Policy
    leave: Policy
    batching: Policy
    memory: Policy
    router: Policy
    takeover: Policy
    binning: Policy

    def each(self) -> tuple[Policy, ...]:
        """In the order in which the kernel takes them."""
        return self.rank, self.leave, self.batching, self.memory, self.router, self.takeover, self.binning


def policies_of(deployment: Deployment) -> Policies:
    """The policies of a deployment's scheduler, from their names or objects."""
    s = deployment.scheduler
    if s.preempt not in PREEMPTIONS:
        raise UnknownNameError("preemption", s.preempt, PREEMPTIONS)
    axes = ("rank", "leave", "batching", "memory", "router", "takeover")
    binning = "one" if s.binning is None else s.binning
    found = {axis: resolve(axis, getattr(s, axis)) for axis in axes}
    return Policies(**found, binning=resolve("binning", binning))


def check(workload: Workload, deployment: Deployment, policies: Policies) -> None:
    """Nothing, if the workload and the deployment can be simulated together.

    Raises:
        InputError: The cache or a limit is too small.
        PolicyError: A policy needs predictions that are not there, or refuses everybody.
    """
    for policy in policies.each():
        if policy.uses(*PREDICTED) and workload.predicted_tokens is None:
            raise PolicyError(
                f"{policy.axis} policy {policy.name!r} looks at predicted output lengths, and this workload has "
                'none; give predicted_tokens ([predictor] kind = "oracle" in a scenario predicts the truth)'
            )
    kv = deployment.kv
    if kv.num_blocks * kv.block_size < deployment.max_model_len:
        raise InputError(
            f"the KV cache must hold one sequence of max_model_len {deployment.max_model_len} tokens; it holds "
            f"{kv.num_blocks * kv.block_size}. Lower max_model_len, or give more memory or GPUs"
        )
    _check_memory(policies.memory, deployment)


def check_sides(deployment: Deployment) -> None:
    """Nothing, if the sides of a deployment that decodes apart can work together.

    Raises:
        InputError: One queue for all replicas, or blocks of two sizes.
    """
    here, there = deployment, deployment.decode
    if there is None:
        return
    for who, router in (("scheduler", here.scheduler.router), ("decode", there.router)):
        if resolve("router", router) == resolve("router", "central"):
            raise InputError(
                f'{who}.router must pick a replica where a decode side is apart; "central" keeps one queue for all. '
                'Take "round_robin" or "least_outstanding"'
            )
    if here.kv.block_size != there.kv.block_size:
        raise InputError(
            f"block_size must be the same where prompts are prefilled and where they decode; it is "
            f"{here.kv.block_size} and {there.kv.block_size}"
        )


def empty_plan(batching: Policy, deployment: Deployment) -> tuple[int, int, int]:
    """What the batching policy says to one request before an idle replica: it must let it in."""
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


def _check_memory(memory: Policy, deployment: Deployment) -> None:
    """The memory policy must let a request of one token onto an idle replica."""
    kv, watermark = deployment.kv, int(deployment.limits.watermark * deployment.kv.num_blocks)
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


Function = Callable[..., Any]
_SERIES_BINS = 2048


@dataclass(frozen=True)
class Setup:
    """One run before it starts. The policy functions take their axis' full argument list.

    ``remote`` is the side that decodes, where one is apart: a setup of its own over the same requests, whose replicas
    are numbered from ``first`` on and whose requests come by ``kv_transfer``. ``all_replicas`` are those of both sides.
    """

    deployment: Deployment
    policies: Policies
    rank: Function
    leave: Function
    batching: Function
    memory: Function
    router: Function
    takeover: Function
    binning: Function
    arrival_s: Array
    prompt: Array
    output: Array
    predicted: Array
    rows: Rows
    priority: Array
    tenant: Array
    draws: Array
    results: Array
    replica_rows: Array
    histogram: Array
    empty_plan: tuple[int, int, int]
    limit_s: float
    concurrency: int
    followers: Followers | None = None
    first: int = 0
    all_replicas: int = 1
    remote: Setup | None = None
    kv_transfer: Handover = Handover()

    @property
    def functions(self) -> tuple[Function, ...]:
        """The policies in the order in which the kernel takes them."""
        return tuple(getattr(self, field.name) for field in fields(self.policies))

    @property
    def replicas(self) -> int:
        return self.deployment.parallel.replicas

    @property
    def pp(self) -> int:
        return len(self.deployment.cost.stage_layers)

    @property
    def flights(self) -> int:
        """Steps of a replica that may be in its pipeline at a time."""
        return self.deployment.limits.max_in_flight or self.pp

    @property
    def total_blocks(self) -> int:
        return self.deployment.kv.num_blocks

    @property
    def block_size(self) -> int:
        return self.deployment.kv.block_size

    @property
    def watermark_blocks(self) -> int:
        return int(self.deployment.limits.watermark * self.total_blocks)

    @property
    def max_num_seqs(self) -> int:
        return self.deployment.limits.max_num_seqs

    @property
    def max_step_seqs(self) -> int:
        return self.deployment.limits.max_step_seqs or self.max_num_seqs

    @property
    def token_budget(self) -> int:
        return self.deployment.limits.max_num_batched_tokens

    @property
    def max_model_len(self) -> int:
        return self.deployment.max_model_len

    @property
    def timeout_s(self) -> float:
        return self.deployment.limits.timeout_s

    @property
    def swap(self) -> bool:
        return self.deployment.scheduler.preempt == "swap"

    @property
    def finds_again(self) -> bool:
        return self.deployment.limits.enable_prefix_caching

    @property
    def swap_s_per_block(self) -> float:
        return self.deployment.kv.swap_s_per_block

    @property
    def closed(self) -> bool:
        return self.concurrency > 0

    @property
    def follows(self) -> bool:
        """Whether requests come after others."""
        return self.followers is not None

    @property
    def central(self) -> bool:
        return self.policies.router == known("router")["central"]

    @property
    def rekey(self) -> bool:
        return self.policies.rank.every_step

    @property
    def takes_over(self) -> bool:
        return self.policies.takeover != known("takeover")["never"]

    @property
    def bins(self) -> int:
        """Bins a queue; 0: arrivals join it at once."""
        return 0 if self.deployment.scheduler.binning is None else self.policies.binning.bins

    @property
    def window(self) -> int:
        """Steps after which a replica looks for takeovers again."""
        return self.deployment.scheduler.window_tokens

    @property
    def max_wait_s(self) -> float:
        return self.deployment.scheduler.max_wait_s

    @property
    def bin_wait_s(self) -> float:
        """How long the first of a bin waits there: no bin outlasts a bound on waiting."""
        return min(self.deployment.scheduler.batch_wait_s, self.max_wait_s, self.timeout_s)

    @property
    def charges(self) -> bool:
        """Whether tenants' service is counted."""
        return self.policies.rank.uses("service_tokens") or self.policies.leave.uses("service_tokens")

    @property
    def counts_steps(self) -> bool:
        return self.policies.batching.uses("steps_since_admit", "ended_since_admit", "phase_steps", "phase_rounds")

    @property
    def tenants(self) -> int:
        return int(self.tenant.max()) + 1 if self.charges else 1

    @property
    def needs_peak(self) -> bool:
        return self.policies.memory.uses("peak_tokens")

    @property
    def series_bins(self) -> int:
        """Bins of the time series a replica: a power of two, fewer where replicas are many."""
        return max(64, _SERIES_BINS >> max(0, math.ceil(math.log2(self.all_replicas)) - 3))

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def request(self, kind: Callable[..., Any], i: int, arrival_s: float) -> Any:
        """Request ``i`` as an object of the reference."""
        return kind(
            i,
            arrival_s,
            int(self.prompt[i]),
            int(self.output[i]),
            int(self.priority[i]),
            int(self.tenant[i]) if self.charges else 0,
        )

    def predicted_at(self, i: int, generated: int) -> tuple[float, float]:
        """(total, index) tokens predicted of request ``i`` once it had produced so many."""
        rows = self.rows
        if rows.window == 0:
            predicted = float(self.predicted[i])
            return predicted, max(1.0, predicted - generated)
        row = min(int(rows.start[i]) + generated // rows.window, int(rows.start[i + 1]) - 1)
        return float(rows.total[row]), float(rows.index[row])

    def remaining(self, q: Any) -> float:
        """Predicted tokens still to come, at least 1."""
        return max(1.0, self.predicted_at(q.index, q.generated)[0] - int(q.generated))

    def whole_remaining(self, q: Any, more: int = 0) -> int:
        """As ``remaining``, the prediction rounded up to whole tokens; after ``more`` than were produced."""
        generated = int(q.generated) + more
        return max(1, math.ceil(self.predicted_at(q.index, generated)[0]) - generated)

    def key(self, function: Function, now_s: float, q: Any, service: float) -> float:
        """A rank or leave key; raises PolicyError when it is NaN."""
        predicted, index = self.predicted_at(q.index, q.generated)
        key: float = function(
            now_s,
            q.arrival_s,
            q.prompt,
            q.generated,
            predicted,
            max(1.0, predicted - q.generated),
            index,
            q.queued_for_s + (now_s - q.queued_s if q.waiting else 0.0),
            q.priority,
            q.admission,
            q.eviction,
            service,
            q.batch,
        )
        if math.isnan(key):
            raise self.bad_rank(q.index)
        return key

    def ask_memory(self, context: int, chunk: int, predicted: float, free: int, num_running: int, peak: int) -> int:
        """What the memory policy says to a request."""
        blocks: int = self.memory(
            context,
            chunk,
            predicted,
            self.max_model_len,
            self.block_size,
            free,
            self.total_blocks,
            self.watermark_blocks,
            num_running,
            peak,
        )
        return blocks

    def bin_of(self, i: int) -> int:
        """The bin of request ``i``; raises PolicyError when there is none of this number."""
        number: int = self.binning(float(self.predicted[i]), int(self.prompt[i]))
        if not 0 <= number < self.bins:
            raise self.bad_bin(number)
        return number

    def outstanding(self, i: int) -> int:
        """Tokens that a router counts for request ``i``: its prompt and its predicted output."""
        return int(self.prompt[i]) + math.ceil(float(self.predicted[i]))

    def bad_rank(self, request: int) -> PolicyError:
        p = self.policies
        return PolicyError(
            f"rank policy {p.rank.name!r} or leave policy {p.leave.name!r} returned NaN for request {request}; "
            "a key must be a number"
        )

    def bad_memory(self, blocks: int) -> PolicyError:
        return PolicyError(
            f"memory policy {self.policies.memory.name!r} let a request in that needs {blocks} blocks when fewer "
            "are free; return -1 to make it wait"
        )

    def bad_route(self, replica: int) -> PolicyError:
        return PolicyError(
            f"router {self.policies.router.name!r} chose replica {replica}; there are {self.replicas}, from 0"
        )

    def bad_bin(self, number: int) -> PolicyError:
        return PolicyError(f"binning {self.policies.binning.name!r} chose bin {number}; there are {self.bins}, from 0")

    def bad_takeover(self, request: int) -> PolicyError:
        return PolicyError(
            f"takeover policy {self.policies.takeover.name!r} returned NaN for waiting request {request}; "
            "it must return a number"
        )


def prepare(workload: Workload, deployment: Deployment, *, seed: int, limit_s: float, compiled: bool) -> Setup:
    """Everything resolved and checked; raises InputError or PolicyError before any time passes."""
    here = _side(workload, deployment, seed=seed, limit_s=limit_s, compiled=compiled)
    if deployment.decode is None:
        return here
    check_sides(deployment)
    there = _side(workload, deployment.decoding(), seed=(seed, 1), limit_s=limit_s, compiled=compiled)
    replicas = here.replicas + there.replicas
    kv_transfer = deployment.decode.kv_transfer
    there = replace(there, first=here.replicas, all_replicas=replicas, kv_transfer=kv_transfer)
    return replace(here, all_replicas=replicas, remote=there)


def _side(
    workload: Workload, deployment: Deployment, *, seed: int | tuple[int, int], limit_s: float, compiled: bool
) -> Setup:
    from lengthwise import policy as room

    policies = policies_of(deployment)
    check(workload, deployment, policies)
    make = room.compiled if compiled else room.interpreted
    functions: dict[str, Any] = {f.name: make(getattr(policies, f.name)) for f in fields(policies)}
    n, replicas = len(workload), deployment.parallel.replicas
    limit = deployment.max_model_len - workload.prompt_tokens
    draws = np.zeros((n, 2))
    if policies.router.uses("draw_a") or policies.router.uses("draw_b"):
        draws = np.random.default_rng(seed).random((n, 2))
    rows = np.zeros(replicas, dtype=replica_t)
    rows["bin_s"] = 2.0**-6
    return Setup(
        deployment,
        policies,
        **functions,
        arrival_s=_arrivals(workload),
        prompt=_column(workload.prompt_tokens),
        output=np.minimum(workload.output_tokens, np.maximum(limit, 1)),
        predicted=_or_zeros(workload.predicted_tokens, n, np.float64),
        rows=_rows(workload.predictions),
        priority=_or_zeros(workload.priority, n, np.int64),
        tenant=_or_zeros(workload.tenant, n, np.int64),
        draws=draws,
        results=_blank_results(n),
        replica_rows=rows,
        histogram=np.zeros(GAP_BINS, dtype=np.int64),
        empty_plan=empty_plan(policies.batching, deployment),
        limit_s=limit_s,
        concurrency=workload.concurrency or 0,
        followers=_followers(workload.after),
        all_replicas=replicas,
    )


def _rows(made: Predictions | None) -> Rows:
    if made is None:
        return Rows(0, np.zeros(1, np.int64), np.zeros(1), np.zeros(1))
    return Rows(made.window_tokens, _column(made.start), _column(made.total_tokens), _column(made.index_tokens))


def _followers(after: After | None) -> Followers | None:
    """The other way round: for each request those that come after it, by number."""
    if after is None or len(after.parent) == 0:
        return None
    left = np.diff(after.start)
    child = np.repeat(np.arange(len(after)), left)
    order = np.argsort(after.parent, kind="stable")
    start = np.searchsorted(after.parent[order], np.arange(len(after) + 1))
    return Followers(start.astype(np.int64), child[order], left)


def _arrivals(workload: Workload) -> Array:
    """Arrivals; in a closed loop those after the first are set when they are let in."""
    arrival_s = np.array(workload.arrival_s)
    if workload.concurrency:
        arrival_s[workload.concurrency :] = np.nan
    return arrival_s


def _column(values: Array) -> Array:
    return np.require(values, requirements=["C", "A", "W"])


def _or_zeros(values: Array | None, n: int, dtype: type) -> Array:
    return np.zeros(n, dtype) if values is None else _column(values)


def _blank_results(n: int) -> Array:
    results = np.zeros(n, dtype=result_t)
    for field in ("scheduled_s", "first_token_s", "finished_s"):
        results[field] = np.nan
    results["status"] = Status.UNFINISHED
    results["replica"] = -1
    return results


def policy_raised(setup: Setup, error: Exception) -> PolicyError:
    """The error of a run in which a policy raised; users' own are named before ours."""
    each = setup.policies.each() + (setup.remote.policies.each() if setup.remote else ())
    own = [p for p in each if not p.builtin] or each
    names = ", ".join(f"{p.axis} policy {p.name!r}" for p in own)
    return PolicyError(f"{names} raised {type(error).__name__}: {error}")


def blocked(setup: Setup, request: int) -> str:
    """What a run says in which somebody waits and nothing will happen any more."""
    p = setup.policies
    return (
        f"request {request} waits for ever: nothing runs, nothing will arrive, and batching policy "
        f"{p.batching.name!r} with memory policy {p.memory.name!r} does not let it go on "
        f"({int(setup.prompt[request])} prompt tokens, {setup.total_blocks} blocks of {setup.block_size})"
    )
