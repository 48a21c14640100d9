"""Conformance kit for policies: call ``check_policy(my_policy)`` in a test."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lengthwise import policy as policies
from lengthwise.engine import simulate
from lengthwise.policy import Policy
from lengthwise.policy.contracts import ARGUMENTS, PREFIX_ARGUMENTS, ROUTER_ARRAYS
from lengthwise.schema.cost_tables import CostTables, grid_axis
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism, Scheduler
from lengthwise.schema.errors import LengthwiseError
from lengthwise.schema.records import Records, Status
from lengthwise.schema.specs import AttentionSpec, FfnSpec, GpuSpec, LinkSpec, ModelSpec, NodeSpec
from lengthwise.schema.workload import Predictions, SharedPrefixes, Workload
from lengthwise.statistics import Floats, Ints
from lengthwise.testing.checks import require, run_checks

_CALLS = 60
_NON_NEGATIVE = {"now_s", "arrival_s", "queued_for_s", "service_tokens", "predicted_tokens", "gittins_rank",
                 "recompute_steps"}  # fmt: skip
_REMAINING = {"remaining_tokens", "waiting_remaining_tokens", "running_remaining_tokens"}
_STEP = ("step_prompts", "step_tokens", "next_tokens")
_POSITIVE = {"prompt_tokens", "context_tokens", "chunk_tokens", "token_budget", "max_num_seqs", "max_model_len",
             "block_size", "total_blocks", "stages"}  # fmt: skip


def calls(policy: Policy, seed: int = 0) -> list[tuple[Any, ...]]:
    """Return the arguments of many random calls of a policy. Equal seeds give equal arguments."""
    rng = np.random.default_rng(seed)
    parameters = policy.all_parameters if policy.axis == "batching" else ()
    samples = [_arguments(policy.axis, rng, number) for number in range(_CALLS)]
    return [arguments[: len(arguments) - len(parameters)] + parameters for arguments in samples]


def _arguments(axis: str, rng: np.random.Generator, number: int) -> tuple[Any, ...]:
    replicas = int(rng.integers(1, 5))
    top = (1, 10, 1000, 10**9)[number % 4]
    given = {name: _argument(axis, name, rng, top, replicas) for name in ARGUMENTS[axis]}
    if axis == "batching" and number % 3 == 0:
        given |= dict.fromkeys(("decodes", "prefills", "num_running", "in_flight", *_STEP), 0)
    elif axis == "batching":
        given["num_running"] = max(given["num_running"], given["decodes"] + given["prefills"] + given["step_prompts"])
    if axis == "memory":
        given["free_blocks"] = min(given["free_blocks"], given["total_blocks"])
    return tuple(given.values())


def _argument(axis: str, name: str, rng: np.random.Generator, top: int, replicas: int) -> Any:  # noqa: PLR0911 - by name
    if name == "service_rate":
        return rng.uniform(0.01, top, replicas)
    if axis == "router" and name in ROUTER_ARRAYS:
        return rng.integers(0, top + 1, replicas)
    if name == "previous_replica":
        return int(rng.integers(-1, replicas))
    if name in {"waiting_key", "running_key"}:
        return float(rng.uniform(-top, top))
    if name in _REMAINING:
        return float(1 + rng.uniform(0, top) * (rng.random() < 0.8))
    if name in _NON_NEGATIVE:
        return float(rng.uniform(0, top) * (rng.random() < 0.8))
    if name in {"draw_a", "draw_b"}:
        return float(rng.random())
    return int(rng.integers(1 if name in _POSITIVE else 0, top + 1))


def violation(policy: Policy, result: Any, given: dict[str, Any]) -> str:  # noqa: PLR0911 - one return per axis
    """Return the rule of the policy's axis that a result violates ("must return ..."), or "" if there is none."""
    match policy.axis:
        case "rank":
            return "" if math.isfinite(result) else "must return a finite key"
        case "batching" if not 0 <= result[2] < 2 * policies.UNIFORM_SHARES:
            return "must return a sum of flags of lengthwise.policy"
        case "batching":
            must_admit = given["num_running"] == 0 and given["num_waiting"] > 0
            is_stuck = must_admit and (result[0] < 1 or result[1] < 1)
            return "must admit a request on an idle replica" if is_stuck else ""
        case "memory":
            return "" if -1 <= result <= given["free_blocks"] else "must return -1 or blocks that are free"
        case "router":
            is_valid = policy == policies.known("router")["central"] or 0 <= result < len(given["waiting"])
            return "" if is_valid else "must return an existing replica"
        case "preemption":
            return "must return a number" if math.isnan(result) else ""
        case _:
            return "" if 0 <= result < policy.bins else f"must return a bin from 0 to {policy.bins - 1}"


_MODEL = ModelSpec("toy", 4, 64, 1000, AttentionSpec(4, 4, 16), FfnSpec(128), 4096)
_LINK = LinkSpec("toy", 1e9, 1e-6, "a toy")
_GPU = GpuSpec("toy", {"bfloat16": 1e12}, 1e9, 1e11, 100.0, 10.0, 1.0, "a toy", "a toy")
_NODE = NodeSpec("toy", 8, _LINK, 8, _LINK, _LINK, "a toy")
_MAX_LEN = 200
_PREDICTIONS = ("right", "random", "reversed", "constant", "zero", "huge")
_RANKS = ("fcfs", "srtf", "hrrn", "mlfq(quantum=8, levels=3)")
_BATCHINGS = ("unified", "static", "prefill_first", "windowed")


@dataclass(frozen=True)
class PolicyCase:
    """A random workload, and a deployment that uses the policy."""

    workload: Workload
    deployment: Deployment

    def __str__(self) -> str:
        s, seed = self.deployment.scheduler, self.workload.extra["seed"][0]
        return f"{self.workload.name} under {s.batching}, preemption {s.preemption}, seed {seed}"


def policy_cases(policy: Policy, count: int, seed: int) -> list[PolicyCase]:
    """Return ``count`` random cases for a policy. Equal seeds give equal cases."""
    return [_policy_case(policy, np.random.default_rng([seed, i]), i) for i in range(count)]


def _policy_case(policy: Policy, rng: np.random.Generator, number: int) -> PolicyCase:
    blocks = _MAX_LEN // 4 + int(rng.choice([4, 20, 200]))
    limits = EngineLimits(max_num_seqs=int(rng.integers(1, 8)), max_num_batched_tokens=256, block_size=4)
    parallelism = Parallelism(1, 1, int(rng.integers(1, 4)))
    scheduler = Scheduler(
        rank=str(rng.choice(_RANKS)),
        batching=str(rng.choice(_BATCHINGS)),
        preemption=str(rng.choice(["never", "by_rank", "is_improvement"])),
        preemption_mode=str(rng.choice(["recompute", "swap"])),
        router=str(rng.choice(["round_robin", "central", "least_tokens"])),
    )
    if policy.axis == "binning":
        scheduler = replace(scheduler, rank="completed_batches", batching="static_bins", batch_wait_s=0.2)
    axis: dict[str, Any] = {policy.axis: policy}
    scheduler, kv = replace(scheduler, **axis), KvPlan(blocks, 4, 0.0, 0.0, 0.0, 0.0, swap_s_per_block=1e-5)
    deployment = Deployment(_MODEL, _GPU, _NODE, parallelism, limits, scheduler, _costs(), kv, max_model_len=_MAX_LEN)
    workload = _workload(rng, _PREDICTIONS[number % len(_PREDICTIONS)], number)
    if policy.uses(*PREFIX_ARGUMENTS):
        deployment = replace(deployment, limits=replace(limits, enable_prefix_caching=True))
        blocks_shared = rng.integers(0, 1 + workload.prompt_tokens // limits.block_size)
        start = np.concatenate([[0], np.cumsum(blocks_shared)])
        ids = rng.integers(0, 3, start[-1])
        workload = replace(workload, prefixes=SharedPrefixes(limits.block_size, start, ids))
    return PolicyCase(workload, deployment)


def _workload(rng: np.random.Generator, kind: str, number: int) -> Workload:
    n = int(rng.integers(15, 30))
    output, window = rng.integers(1, 40, n), int(rng.choice([0, 5, 20]))
    total = _predict(rng, kind, output) if window == 0 else None
    predictions = None
    if window:
        rows = -(-output // window)
        repeated = _predict(rng, kind, np.repeat(output, rows))
        remaining = rng.uniform(1, 50, len(repeated))
        predictions = Predictions(window, np.concatenate([[0], np.cumsum(rows)]), repeated, remaining)
    return Workload(
        np.sort(rng.uniform(0, rng.choice([0.01, 0.5]), n)),
        rng.integers(1, 60, n),
        output,
        predicted_tokens=total,
        predictions=predictions,
        priority=rng.integers(0, 3, n),
        tenant=rng.integers(0, 3, n),
        extra={"seed": np.full(n, number)},
        name=f"{kind} predictions",
    )


def _predict(rng: np.random.Generator, kind: str, output: Ints) -> Floats:
    predictions: dict[str, Floats] = {
        "right": output.astype(float),
        "random": rng.lognormal(2, 1.5, len(output)),
        "reversed": (41 - output).astype(float),
        "constant": np.full(len(output), 17.0),
        "zero": np.zeros(len(output)),
        "huge": rng.uniform(1e9, 1e11, len(output)),
    }
    return predictions[kind]


def _costs() -> CostTables:
    """Return cost tables with sine waves, so that a different order of summation changes the result."""
    t, b = np.arange(129) / 128, np.arange(33) / 32
    chunk, context = grid_axis(512), grid_axis(1024)
    return CostTables(
        layer_s=1e-3 + 2e-3 * t + 1e-5 * np.sin(np.arange(129)),
        comm_s=1e-4 + 1e-4 * t,
        embedding_s=1e-5 * t,
        send_s=1e-5 + 1e-5 * t,
        head_s=1e-4 + 1e-4 * b,
        host_s=2e-4 + 1e-4 * b,
        prefill_s=1e-8 * chunk[:, None] * (chunk[:, None] / 2 + context[None, :]),
        decode_s=1e-6 * grid_axis(32)[:, None] + 3e-9 * grid_axis(4096)[None, :],
        stage_layers=np.array([4]),
    )


Check = Callable[[Policy, Sequence[PolicyCase]], None]

_COMPILED = ("compiles", "compiled_as_interpreted", "kernel_as_reference")
_MAX_WAITS_S = (0.0, 0.05, 0.3)


def check_policy(
    policy: Policy, *, compiled: bool = True, count: int = 6, seed: int = 0, skip: Sequence[str] = ()
) -> list[str]:
    """Run the checks of ``POLICY_CHECKS``, with or without a test runner. Return the names of the passed checks.

    A decorator of ``lengthwise.policy`` makes the policy, which may be of any axis. If the policy need not be
    ``compiled``, only the reference engine runs it. ``count`` is the number of small simulated cases. An
    AssertionError states the requirement that the policy violates, and the actual value.
    """
    require(isinstance(policy, Policy), f"a policy must be made by a decorator of lengthwise.policy; got {policy!r}")
    samples = policy_cases(policy, count, seed)
    return run_checks(POLICY_CHECKS, {*skip, *(() if compiled else _COMPILED)}, lambda: (policy, samples))


def answers_in_range(policy: Policy, _: Sequence[PolicyCase]) -> None:
    """Check that every result is valid on its axis: not NaN, and an existing bin, replica or block."""
    function = policies.interpreted(policy)
    for arguments in calls(policy):
        result = _call(policy, function, arguments)
        wrong = violation(policy, result, dict(zip(ARGUMENTS[policy.axis], arguments, strict=True)))
        require(not wrong, f"{_label(policy)} {wrong}; it returned {result!r} for {_format(policy, arguments)}")


def deterministic(policy: Policy, _: Sequence[PolicyCase]) -> None:
    """Check that equal arguments give equal results: no randomness, no clock, no state."""
    function = policies.interpreted(policy)
    first, second = ([_call(policy, function, arguments) for arguments in calls(policy)] for _ in range(2))
    require(first == second, f"{_label(policy)} must return the same for the same arguments; two calls differ")


def compiles(policy: Policy, _: Sequence[PolicyCase]) -> None:
    """Check that the policy compiles, so that the compiled kernel can use it."""
    try:
        policies.compiled(policy)
    except LengthwiseError as error:
        raise AssertionError(f"{_label(policy)} must compile: {error}") from error


def compiled_as_interpreted(policy: Policy, _: Sequence[PolicyCase]) -> None:
    """Check that the compiled and the interpreted policy return bit-identical results."""
    compiled, interpreted = policies.compiled(policy), policies.interpreted(policy)
    for arguments in calls(policy):
        one, other = compiled(*arguments), interpreted(*arguments)
        rule = f"{_label(policy)} must return the same compiled and interpreted"
        require(one == other, f"{rule}; it returned {one!r} and {other!r} for {_format(policy, arguments)}")


def all_requests_finish(policy: Policy, samples: Sequence[PolicyCase]) -> None:
    """Check that every request finishes, or is rejected because it can never fit."""
    for case in samples:
        unfinished = ~np.isin(_run(policy, case).requests.status, (Status.FINISHED, Status.REJECTED))
        message = f"{_label(policy)} must let every request finish; {unfinished.sum()} did not in {case}"
        require(not unfinished.any(), message)


def waiting_is_bounded(policy: Policy, samples: Sequence[PolicyCase]) -> None:
    """Check that no later arrival overtakes a request that has waited ``max_wait_s``, and that it is then admitted.

    It may wait for earlier requests, and for those that were admitted before it had waited so long.
    """
    for case, max_wait_s in itertools.product(samples, _MAX_WAITS_S):
        scheduler = replace(case.deployment.scheduler, max_wait_s=max_wait_s)
        _check_bound(policy, PolicyCase(case.workload, replace(case.deployment, scheduler=scheduler)))


def _check_bound(policy: Policy, case: PolicyCase) -> None:
    r, s = _run(policy, case).requests, case.deployment.scheduler
    overdue_s = r.arrival_s + s.max_wait_s
    is_central = policies.resolve("router", s.router) == policies.known("router")["central"]
    for i in np.flatnonzero(r.scheduled_s > overdue_s):
        same_queue = (r.replica >= 0) if is_central else (r.replica == r.replica[i])
        is_earlier = np.arange(len(r.arrival_s)) < i
        overtakes = same_queue & ~is_earlier & (r.scheduled_s > overdue_s[i]) & (r.scheduled_s < r.scheduled_s[i])
        rule = f"{_label(policy)}: after max_wait_s no later arrival may overtake a request"
        require(not overtakes.any(), f"{rule}; request {i} was overtaken by {np.argmax(overtakes)}, in {case}")
        blocking = same_queue & (is_earlier | (r.scheduled_s <= overdue_s[i])) & (r.finished_s > overdue_s[i])
        last_s = r.finished_s[blocking].max(initial=overdue_s[i])
        rule = f"{_label(policy)}: after max_wait_s a request must be admitted when the earlier ones have finished"
        actual = f"request {i} was at {r.scheduled_s[i]:g} s, they at {last_s:g} s, in {case}"
        require(r.scheduled_s[i] <= last_s, f"{rule}; {actual}")


def reads_no_true_length(policy: Policy, samples: Sequence[PolicyCase]) -> None:
    """Check that no decision depends on the lengths of outputs that are unfinished at that time."""
    for case in samples:
        limit_s = 0.6 * _run(policy, case).end_s
        before = _run(policy, case, time_limit_s=limit_s)
        is_unfinished = before.requests.status == Status.UNFINISHED
        other = before.requests.output_tokens + 1 + np.arange(len(is_unfinished)) % 7
        lengths = np.where(is_unfinished, other, case.workload.output_tokens)
        changed = PolicyCase(replace(case.workload, output_tokens=lengths), case.deployment)
        column = _first_difference(before, _run(policy, changed, time_limit_s=limit_s))
        rule = f"{_label(policy)} must not depend on the lengths of unfinished outputs"
        require(not column, f"{rule}; {column} did, before {limit_s:g} s in {case}")


def runs_are_repeatable(policy: Policy, samples: Sequence[PolicyCase]) -> None:
    """Check that repeated simulations of a case give the same records."""
    for case in samples:
        column = _first_difference(_run(policy, case), _run(policy, case))
        require(not column, f"{_label(policy)} must be repeatable; {column} differs in two runs of {case}")


def kernel_as_reference(policy: Policy, samples: Sequence[PolicyCase]) -> None:
    """Check that the compiled kernel and the reference engine give bit-identical records."""
    for case in samples:
        column = _first_difference(_run(policy, case, engine="kernel"), _run(policy, case))
        require(not column, f"{_label(policy)}: kernel and reference must agree; {column} differs in {case}")


POLICY_CHECKS: dict[str, Check] = {check.__name__: check for check in (
    answers_in_range, deterministic, compiles, compiled_as_interpreted, all_requests_finish, waiting_is_bounded,
    reads_no_true_length, runs_are_repeatable, kernel_as_reference,
)}  # fmt: skip
"""Checks by name, in the order in which they run."""


def _run(policy: Policy, case: PolicyCase, *, engine: str = "reference", time_limit_s: float = math.inf) -> Records:
    try:
        return simulate(case.workload, case.deployment, engine=engine, time_limit_s=time_limit_s)
    except LengthwiseError as error:
        raise AssertionError(f"{_label(policy)} must run without an error in {case}: {error}") from error


def _first_difference(a: Records, b: Records) -> str:
    for table in ("requests", "steps"):
        one, other = getattr(a, table), getattr(b, table)
        for field in dataclasses.fields(one):
            x, y = getattr(one, field.name), getattr(other, field.name)
            if not np.array_equal(x, y, equal_nan=x.dtype.kind == "f"):
                return f"{table}.{field.name}"
    return ""


def _call(policy: Policy, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        rule, raised = f"{_label(policy)} must accept all arguments of its axis", f"{type(error).__name__}: {error}"
        raise AssertionError(f"{rule}; it raised {raised} for {_format(policy, arguments)}") from error


def _label(policy: Policy) -> str:
    return f"{policy.axis} policy {policy.name!r}"


def _format(policy: Policy, arguments: tuple[Any, ...]) -> str:
    given = dict(zip(ARGUMENTS[policy.axis], arguments, strict=True))
    return ", ".join(f"{name}={given[name]}" for name in policy.arguments) or "no argument"
