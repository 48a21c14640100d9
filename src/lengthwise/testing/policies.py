"""The conformance kit of policies: ``check_policy(my_policy)`` in a test of one's own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise import policy as room
from lengthwise.engine import simulate
from lengthwise.policy import Policy
from lengthwise.policy.contracts import ARGUMENTS
from lengthwise.schema.cost_tables import CostTables, grid_axis
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism, Scheduler
from lengthwise.schema.errors import LengthwiseError
from lengthwise.schema.records import Records, Status
from lengthwise.schema.specs import AttentionSpec, FfnSpec, GpuSpec, LinkSpec, ModelSpec, NodeSpec
from lengthwise.schema.workload import Predictions, Workload

_CALLS = 60
_REAL = {"now_s", "arrival_s", "queued_for_s", "service_tokens", "predicted_tokens", "index_tokens", "recompute_steps"}
_KEYS = {"waiting_key", "running_key"}
_REMAINING = {"remaining_tokens", "waiting_remaining_tokens", "running_remaining_tokens"}
_SHARES = {"draw_a", "draw_b"}
_LOADS = {"waiting", "running", "tokens"}
_STEP = ("step_prompts", "step_tokens", "next_tokens")
_FROM_ONE = {"prompt_tokens", "context_tokens", "chunk_tokens", "token_budget", "max_num_seqs", "max_model_len",
             "block_size", "total_blocks", "stages"}  # fmt: skip


def calls(policy: Policy, seed: int = 0) -> list[tuple[Any, ...]]:
    """Full argument lists of the policy's axis, the same for the same seed."""
    rng = np.random.default_rng(seed)
    made = [_call(policy.axis, rng, number) for number in range(_CALLS)]
    own = policy.all_parameters if policy.axis == "batching" else ()
    return [one[: len(one) - len(own)] + own for one in made]


def _call(axis: str, rng: np.random.Generator, number: int) -> tuple[Any, ...]:
    replicas = int(rng.integers(1, 5))
    top = (1, 10, 1000, 10**9)[number % 4]
    given = {name: _kind(axis, name)(rng, top, replicas) for name in ARGUMENTS[axis]}
    if axis == "batching" and number % 3 == 0:
        given |= dict.fromkeys(("decodes", "prefills", "num_running", "in_flight", *_STEP), 0)
    elif axis == "batching":
        given["num_running"] = max(given["num_running"], given["decodes"] + given["prefills"] + given["step_prompts"])
    if axis == "memory":
        given["free_blocks"] = min(given["free_blocks"], given["total_blocks"])
    return tuple(given.values())


def _kind(axis: str, name: str) -> Callable[[np.random.Generator, int, int], Any]:
    if axis == "router" and name in _LOADS:
        return lambda rng, top, replicas: rng.integers(0, top + 1, replicas)
    if name in _SHARES:
        return lambda rng, *_: float(rng.random())
    if name in _KEYS:
        return lambda rng, top, _: float(rng.uniform(-top, top))
    if name in _REMAINING:
        return lambda rng, top, _: float(1 + rng.uniform(0, top) * (rng.random() < 0.8))
    if name in _REAL:
        return lambda rng, top, _: float(rng.uniform(0, top) * (rng.random() < 0.8))
    least = 1 if name in _FROM_ONE else 0
    return lambda rng, top, _: int(rng.integers(least, top + 1))


def fault(policy: Policy, got: Any, given: dict[str, Any]) -> str:
    """What is wrong with an answer; "" where its axis can use it."""
    return _RANGES[policy.axis](got, given, policy)


def _rank(got: float, _: dict[str, Any], __: Policy) -> str:
    return "" if math.isfinite(got) else "must return a finite key"


def _batching(got: tuple[int, int, int], given: dict[str, Any], _: Policy) -> str:
    if got[2] < 0 or got[2] >= 2 * room.UNIFORM_SHARES:
        return "must return flags of lengthwise.policy added up"
    idle = given["num_running"] == 0 and given["waiting"] > 0
    return "must admit somebody on an idle replica" if idle and (got[0] < 1 or got[1] < 1) else ""


def _memory(got: int, given: dict[str, Any], _: Policy) -> str:
    return "" if -1 <= got <= given["free_blocks"] else "must return -1 or blocks that are free"


def _router(got: int, given: dict[str, Any], policy: Policy) -> str:
    if policy == room.known("router")["central"]:
        return ""
    return "" if 0 <= got < len(given["waiting"]) else "must return a replica that is there"


def _takeover(got: float, _: dict[str, Any], __: Policy) -> str:
    return "must return a number" if math.isnan(got) else ""


def _binning(got: int, _: dict[str, Any], policy: Policy) -> str:
    return "" if 0 <= got < policy.bins else f"must return a bin from 0 to {policy.bins - 1}"


_RANGES: dict[str, Callable[[Any, dict[str, Any], Policy], str]] = {
    "rank": _rank,
    "batching": _batching,
    "memory": _memory,
    "router": _router,
    "takeover": _takeover,
    "binning": _binning,
}


Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_MODEL = ModelSpec("toy", 4, 64, 1000, AttentionSpec(4, 4, 16), FfnSpec(128), 4096)
_LINK = LinkSpec("toy", 1e9, 1e-6, "a toy")
_GPU = GpuSpec("toy", {"bfloat16": 1e12}, 1e9, 1e11, 100.0, 10.0, 1.0, "a toy", "a toy")
_NODE = NodeSpec("toy", 8, _LINK, 8, _LINK, _LINK, "a toy")
_MAX_LEN = 200
_WRONG = ("right", "random", "reversed", "constant", "zero", "huge")
_RANKS = ("fcfs", "srtf", "hrrn", "mlfq(quantum=8, levels=3)")
_BATCHINGS = ("unified", "static", "prefill_first", "windowed")


@dataclass(frozen=True)
class World:
    """A workload and a deployment with the policy in its place."""

    workload: Workload
    deployment: Deployment

    def bounded(self, max_wait_s: float) -> World:
        """The same world, waiting bounded."""
        scheduler = replace(self.deployment.scheduler, max_wait_s=max_wait_s)
        return World(self.workload, replace(self.deployment, scheduler=scheduler))

    def __str__(self) -> str:
        s = self.deployment.scheduler
        return f"{self.workload.name} under {s.batching}, takeover {s.takeover}, seed {self.workload.extra['seed'][0]}"


def worlds(policy: Policy, count: int, seed: int) -> list[World]:
    """``count`` worlds for a policy; the same seed gives the same worlds."""
    return [_world(policy, np.random.default_rng([seed, i]), i) for i in range(count)]


def _world(policy: Policy, rng: np.random.Generator, number: int) -> World:
    blocks = _MAX_LEN // 4 + int(rng.choice([4, 20, 200]))
    limits = EngineLimits(max_num_seqs=int(rng.integers(1, 8)), max_num_batched_tokens=256, block_size=4)
    deployed = Deployment(
        _MODEL,
        _GPU,
        _NODE,
        Parallelism(1, 1, int(rng.integers(1, 4))),
        limits,
        _scheduler(policy, rng),
        _costs(),
        KvPlan(blocks, 4, 0.0, 0.0, 0.0, 0.0, swap_s_per_block=1e-5),
        max_model_len=_MAX_LEN,
    )
    return World(_workload(rng, _WRONG[number % len(_WRONG)], number), deployed)


def _scheduler(policy: Policy, rng: np.random.Generator) -> Scheduler:
    made = Scheduler(
        rank=str(rng.choice(_RANKS)),
        batching=str(rng.choice(_BATCHINGS)),
        takeover=str(rng.choice(["never", "by_rank", "is_improvement"])),
        preempt=str(rng.choice(["recompute", "swap"])),
        router=str(rng.choice(["round_robin", "central", "least_tokens"])),
    )
    if policy.axis == "binning":
        made = replace(made, rank="completed_batches", batching="static_bins", batch_wait_s=0.2)
    axis: dict[str, Any] = {policy.axis: policy}
    return replace(made, **axis)


def _workload(rng: np.random.Generator, wrong: str, number: int) -> Workload:
    n = int(rng.integers(15, 30))
    output = rng.integers(1, 40, n)
    window = int(rng.choice([0, 5, 20]))
    totals, again = _predicted(rng, wrong, output, window)
    return Workload(
        np.sort(rng.uniform(0, rng.choice([0.01, 0.5]), n)),
        rng.integers(1, 60, n),
        output,
        predicted_tokens=totals,
        predictions=again,
        priority=rng.integers(0, 3, n),
        tenant=rng.integers(0, 3, n),
        extra={"seed": np.full(n, number)},
        name=f"{wrong} predictions",
    )


def _predicted(
    rng: np.random.Generator, wrong: str, output: Ints, window: int
) -> tuple[Floats | None, Predictions | None]:
    if window == 0:
        return _guess(rng, wrong, output), None
    rows = -(-output // window)
    start = np.concatenate([[0], np.cumsum(rows)])
    total = _guess(rng, wrong, np.repeat(output, rows))
    return None, Predictions(window, start, total, rng.uniform(1, 50, len(total)))


def _guess(rng: np.random.Generator, wrong: str, output: Ints) -> Floats:
    guesses: dict[str, Floats] = {
        "right": output.astype(float),
        "random": rng.lognormal(2, 1.5, len(output)),
        "reversed": (41 - output).astype(float),
        "constant": np.full(len(output), 17.0),
        "zero": np.zeros(len(output)),
        "huge": rng.uniform(1e9, 1e11, len(output)),
    }
    return guesses[wrong]


def _costs() -> CostTables:
    """A floor, a slope and an uneven bump, so that sums in another order show."""
    t, b = np.arange(129) / 128, np.arange(33) / 32
    chunk, context = grid_axis(512), grid_axis(1024)
    return CostTables(
        layer_s=1e-3 + 2e-3 * t + 1e-5 * np.sin(np.arange(129)),
        comm_s=1e-4 + 1e-4 * t,
        first_s=1e-5 * t,
        send_s=1e-5 + 1e-5 * t,
        head_s=1e-4 + 1e-4 * b,
        host_s=2e-4 + 1e-4 * b,
        prefill_s=1e-8 * chunk[:, None] * (chunk[:, None] / 2 + context[None, :]),
        decode_s=1e-6 * grid_axis(32)[:, None] + 3e-9 * grid_axis(4096)[None, :],
        stage_layers=np.array([4]),
    )


Check = Callable[[Policy, Sequence[World]], None]

_COMPILED = ("compiles", "compiled_as_interpreted", "kernel_as_reference")
_MAX_WAITS_S = (0.0, 0.05, 0.3)


def check_policy(
    policy: Policy, *, compiled: bool = True, count: int = 6, seed: int = 0, skip: Sequence[str] = ()
) -> list[str]:
    """The names of the checks that a policy passed: all that there are for its axis.

    Works in any test runner, or without one.

    Args:
        policy: Of any axis, made by a decorator of ``lengthwise.policy``.
        compiled: Whether it must compile; without, it is looked at in the reference engine alone.
        count: Small worlds in which it is tried.
        seed: Of the worlds.
        skip: Names of checks to leave out (see ``POLICY_CHECKS``).

    Raises:
        AssertionError: A check failed; one sentence says what must hold and what came.
    """
    _require(isinstance(policy, Policy), f"a policy is made by a decorator of lengthwise.policy; got {policy!r}")
    tried = worlds(policy, count, seed)
    left_out = {*skip, *(() if compiled else _COMPILED)}
    passed = [name for name in POLICY_CHECKS if name not in left_out]
    for name in passed:
        POLICY_CHECKS[name](policy, tried)
    return passed


def answers_in_range(policy: Policy, _: Sequence[World]) -> None:
    """Every answer is a number that its axis can use: no NaN, no bin, replica or block that is not there."""
    function = room.interpreted(policy)
    for arguments in calls(policy):
        got = _called(policy, function, arguments)
        given = dict(zip(ARGUMENTS[policy.axis], arguments, strict=True))
        wrong = fault(policy, got, given)
        _require(not wrong, f"{_owner(policy)} {wrong}; it returned {got!r} for {_shown(policy, given)}")


def same_answer_again(policy: Policy, _: Sequence[World]) -> None:
    """The same arguments get the same answer: no randomness, no clock, no memory of earlier calls."""
    function = room.interpreted(policy)
    first, second = ([_called(policy, function, a) for a in calls(policy)] for _ in range(2))
    _require(first == second, f"{_owner(policy)} must answer the same arguments alike; it changed its mind")


def compiles(policy: Policy, _: Sequence[World]) -> None:
    """The kernel can take it."""
    try:
        room.compiled(policy)
    except LengthwiseError as error:
        raise AssertionError(f"{_owner(policy)} must compile: {error}") from error


def compiled_as_interpreted(policy: Policy, _: Sequence[World]) -> None:
    """Compiled and interpreted it says the same, to the last bit."""
    fast, slow = room.compiled(policy), room.interpreted(policy)
    for arguments in calls(policy):
        one, other = fast(*arguments), slow(*arguments)
        given = dict(zip(ARGUMENTS[policy.axis], arguments, strict=True))
        _require(
            one == other,
            f"{_owner(policy)} must say the same compiled and interpreted; it said {one!r} and {other!r} for "
            f"{_shown(policy, given)}",
        )


def nobody_is_lost(policy: Policy, attempts: Sequence[World]) -> None:
    """Every request ends, or could never fit."""
    for world in attempts:
        ended = _run(policy, world).requests.status
        left = ~np.isin(ended, (Status.FINISHED, Status.REJECTED))
        _require(not left.any(), f"{_owner(policy)} must let every request end; {left.sum()} did not in {world}")


def waiting_is_bounded(policy: Policy, attempts: Sequence[World]) -> None:
    """With ``max_wait_s`` nobody who came later passes who has waited so long; the wait ends with those before it."""
    for world in attempts:
        for max_wait_s in _MAX_WAITS_S:
            _bounded(policy, world.bounded(max_wait_s))


def _bounded(policy: Policy, world: World) -> None:
    r, s = _run(policy, world).requests, world.deployment.scheduler
    overdue_s = r.arrival_s + s.max_wait_s
    central = room.resolve("router", s.router) == room.known("router")["central"]
    for i in np.flatnonzero(r.scheduled_s > overdue_s):
        line = (r.replica >= 0) if central else (r.replica == r.replica[i])
        earlier = np.arange(len(r.arrival_s)) < i
        passed_by = line & ~earlier & (r.scheduled_s > overdue_s[i]) & (r.scheduled_s < r.scheduled_s[i])
        _require(
            not passed_by.any(),
            f"{_owner(policy)}: after max_wait_s nobody may be passed by who came later; request {i} was, by request "
            f"{np.argmax(passed_by)}, in {world}",
        )
        before = line & (earlier | (r.scheduled_s <= overdue_s[i])) & (r.finished_s > overdue_s[i])
        last_s = r.finished_s[before].max(initial=overdue_s[i])
        _require(
            r.scheduled_s[i] <= last_s,
            f"{_owner(policy)}: who has waited max_wait_s must be admitted when those before it have ended "
            f"({last_s:g} s); request {i} was at {r.scheduled_s[i]:g} s, in {world}",
        )


def reads_no_true_length(policy: Policy, attempts: Sequence[World]) -> None:
    """Until a time, outputs that are still to come then change no decision."""
    for world in attempts:
        limit_s = 0.6 * _run(policy, world).end_s
        before = _run(policy, world, time_limit_s=limit_s)
        running = before.requests.status == Status.UNFINISHED
        other = before.requests.output_tokens + 1 + np.arange(len(running)) % 7
        secret = np.where(running, other, world.workload.output_tokens)
        changed = dataclasses.replace(world.workload, output_tokens=secret)
        after = _run(policy, World(changed, world.deployment), time_limit_s=limit_s)
        differs = _difference(before, after)
        _require(
            not differs,
            f"{_owner(policy)} must not depend on outputs still to come; {differs} did, before {limit_s:g} s in {world}",
        )


def same_run_again(policy: Policy, attempts: Sequence[World]) -> None:
    """The same world gives the same records."""
    for world in attempts:
        differs = _difference(_run(policy, world), _run(policy, world))
        _require(not differs, f"{_owner(policy)} must repeat itself; {differs} differ in two runs of {world}")


def kernel_as_reference(policy: Policy, attempts: Sequence[World]) -> None:
    """The compiled kernel and the plain reference agree to the last bit."""
    for world in attempts:
        differs = _difference(_run(policy, world, engine="kernel"), _run(policy, world))
        _require(not differs, f"{_owner(policy)}: kernel and reference must agree; {differs} differ in {world}")


POLICY_CHECKS: dict[str, Check] = {
    "answers_in_range": answers_in_range,
    "same_answer_again": same_answer_again,
    "compiles": compiles,
    "compiled_as_interpreted": compiled_as_interpreted,
    "nobody_is_lost": nobody_is_lost,
    "waiting_is_bounded": waiting_is_bounded,
    "reads_no_true_length": reads_no_true_length,
    "same_run_again": same_run_again,
    "kernel_as_reference": kernel_as_reference,
}
"""What a policy must keep, in the order in which it is looked at."""


def _run(policy: Policy, world: World, *, engine: str = "reference", time_limit_s: float = math.inf) -> Records:
    try:
        return simulate(world.workload, world.deployment, engine=engine, time_limit_s=time_limit_s)
    except LengthwiseError as error:
        raise AssertionError(f"{_owner(policy)} must run without an error in {world}: {error}") from error


def _difference(a: Records, b: Records) -> str:
    """The first column of the requests or steps that differs, by name; "" where none does."""
    for part in ("requests", "steps"):
        one, other = getattr(a, part), getattr(b, part)
        for field in dataclasses.fields(one):
            mine, theirs = getattr(one, field.name), getattr(other, field.name)
            if not np.array_equal(mine, theirs, equal_nan=mine.dtype.kind == "f"):
                return f"{part}.{field.name}"
    return ""


def _called(policy: Policy, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        given = dict(zip(ARGUMENTS[policy.axis], arguments, strict=True))
        raise AssertionError(
            f"{_owner(policy)} must take all that its axis can ask; it raised {type(error).__name__}: {error} for "
            f"{_shown(policy, given)}"
        ) from error


def _owner(policy: Policy) -> str:
    return f"{policy.axis} policy {policy.name!r}"


def _shown(policy: Policy, given: dict[str, Any]) -> str:
    return ", ".join(f"{name}={given[name]}" for name in policy.arguments) or "no argument"


def _require(good: bool, message: str) -> None:
    if not good:
        raise AssertionError(message)
