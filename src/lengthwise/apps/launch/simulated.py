"""Simulated engines in virtual time, behind the same interface as real engines."""

from __future__ import annotations

import asyncio
import hashlib
import json
import selectors
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from lengthwise.apps.launch.engine import Draft, Engine, FailedError, Fault, Launcher, TaskRequest
from lengthwise.apps.launch.local import Deployed
from lengthwise.apps.ledger.contracts import Output
from lengthwise.engine.continuous_batching import ClockedBatch, Limits
from lengthwise.engine.step_time import StepTime, step_time
from lengthwise.schema.app import Ints, ModelPlan, Replica, TaskDraw, Tasks
from lengthwise.schema.errors import EngineError, InternalError

Seconds = Callable[[ModelPlan, str], float]


@dataclass(frozen=True)
class Lengths:
    """Prompt tokens, output tokens and maximum output tokens of each task, as [tasks] arrays."""

    prompt_tokens: Ints
    output_tokens: Ints
    max_tokens: Ints

    @classmethod
    def of(cls, tasks: Tasks, draw: TaskDraw) -> Lengths:
        """Return the lengths of a draw. A task that is absent from the draw has one output token, in case it runs."""
        return cls(draw.prompt_tokens, np.maximum(draw.output_tokens, 1), tasks.max_tokens)


class SimulatedEngine:
    """A replica without computation. Outputs have the drawn lengths and finish when the cost model predicts."""

    def __init__(self, description: str, limits: Limits, cost: StepTime, lengths: Lengths) -> None:
        self.description, self.max_num_seqs = description, limits.max_num_seqs
        self._clocked = ClockedBatch(limits, cost, asyncio.get_running_loop())
        self._lengths = lengths
        self._kv_tokens = limits.num_blocks * limits.block_size
        self._alive = True
        self._open: set[asyncio.Future[None]] = set()

    @property
    def is_alive(self) -> bool:
        """Return whether ``end`` has not been called yet."""
        return self._alive

    async def has_died(self, within_s: float) -> bool:  # noqa: ARG002 - the answer is known at once
        """Return whether ``end`` has been called."""
        return not self._alive

    async def generate(self, request: TaskRequest, draft: Draft) -> Output:
        """Return an output of the drawn length, whose text states this length and a digest of the request.

        Without the digest, outputs of equal length would be equal, and so would requests that contain them.
        """
        prompt_tokens = int(self._lengths.prompt_tokens[request.task])
        output_tokens = int(self._lengths.output_tokens[request.task])
        if prompt_tokens + output_tokens > self._kv_tokens:
            raise FailedError(
                Fault.REQUEST,
                f"{prompt_tokens + output_tokens} tokens do not fit a KV cache of {self._kv_tokens} tokens",
            )
        if len(draft.output_ids) >= output_tokens:
            draft.reset()
        await self._serve(prompt_tokens, output_tokens, draft)
        draft.finish_reason = "length" if output_tokens >= int(self._lengths.max_tokens[request.task]) else "stop"
        body = json.dumps(request.body, sort_keys=True, default=str)
        digest = hashlib.sha256(body.encode("utf-8", "surrogatepass")).hexdigest()[:12]
        return Output(f"{output_tokens} tokens ({digest})", draft.finish_reason, prompt_tokens, output_tokens)

    async def _serve(self, prompt_tokens: int, output_tokens: int, draft: Draft) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        resumed = len(draft.output_ids)
        sequence = self._clocked.enter(
            prompt_tokens + resumed,
            output_tokens=output_tokens - resumed,
            on_finish=lambda: None if done.done() else done.set_result(None),
        )
        self._open.add(done)
        draft.token_count = lambda: resumed + self._clocked.generated(sequence)
        try:
            await done
        except asyncio.CancelledError:
            self._clocked.abort(sequence)
            draft.output_ids.extend([0] * sequence.generated)
            raise
        finally:
            draft.token_count = None
            self._open.discard(done)

    def end(self) -> None:
        """Stop the replica, which fails all its requests."""
        self._alive = False
        self._clocked.stop()
        for done in self._open:
            if not done.done():
                done.set_exception(FailedError(Fault.ENGINE, f"{self.description} ended"))


@dataclass
class SimulatedLauncher(Launcher):
    """Starts simulated replicas. A start takes as long in virtual time as the planner assumes for a real one."""

    names: Sequence[str]  # name of each model, by model number
    deployed: Deployed  # returns the deployment of a plan: cost tables, memory, limits
    lengths: Lengths
    seconds: Seconds  # returns the seconds that the planner assumes for "start", "stop", "sleep" or "wake" of a replica
    sleeps: Callable[[ModelPlan], bool] = lambda _: False  # returns whether engines of a plan sleep instead of stopping
    starts: int = field(default=0, init=False)
    _is_forced: bool = field(default=False, init=False)
    _plans: dict[int, ModelPlan] = field(default_factory=dict, init=False)
    _costs: dict[ModelPlan, tuple[Limits, StepTime]] = field(default_factory=dict, init=False)

    async def start(self, plan: ModelPlan, gpus: Replica) -> Engine:
        """Return a replica after the seconds of its start."""
        await asyncio.sleep(self.seconds(plan, "start"))
        self.starts += 1
        if plan not in self._costs:
            deployment = self.deployed(plan)
            self._costs[plan] = Limits.of(deployment), step_time(deployment.cost)
        description = f"{self.names[plan.model]} on {','.join(map(str, gpus))}"
        engine = SimulatedEngine(description, *self._costs[plan], self.lengths)
        self._plans[id(engine)] = plan
        return engine

    async def stop(self, engine: Engine) -> None:
        """Fail a replica's requests at once, and wait until its GPUs are free."""
        assert isinstance(engine, SimulatedEngine)
        plan = self._plans.pop(id(engine), None)
        engine.end()
        if plan is not None and not self._is_forced:
            await asyncio.sleep(self.seconds(plan, "stop"))

    async def sleep(self, engine: Engine) -> bool:
        """Put a replica to sleep. Return False if its engine does not support this."""
        plan = self._plans.get(id(engine))
        if plan is None or not self.sleeps(plan):
            return False
        await asyncio.sleep(self.seconds(plan, "sleep"))
        return True

    async def wake(self, engine: Engine) -> None:
        """Wake a sleeping replica."""
        plan = self._plans.get(id(engine))
        if plan is None:
            raise EngineError(f"{engine.description} was ended")
        await asyncio.sleep(self.seconds(plan, "wake"))

    def force_stop(self) -> None:
        """Let later stops take no time, as if engines were killed."""
        self._is_forced = True

    async def close(self) -> None:
        """Forget all replicas."""
        self._plans.clear()


Result = TypeVar("Result")


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time, which jumps to the next timer. Equal inputs give equal orders of events.

    Virtual time stands still while code runs, and while a call runs in an executor. It does not wait for other threads
    or processes. Connections through loopback within the loop work, as their bytes arrive at once.
    """

    def __init__(self) -> None:
        self._virtual_s = 0.0
        self.num_executing = 0
        super().__init__(_JumpingSelector(self))
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Return the virtual seconds since the loop was created."""
        return self._virtual_s

    def run_in_executor(self, executor: Any, func: Callable[..., Result], *args: Any) -> asyncio.Future[Result]:  # type: ignore[override]
        """Run a call in another thread, for which virtual time waits."""
        self.num_executing += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._executed)
        return future

    def _executed(self, _: asyncio.Future[Any]) -> None:
        self.num_executing -= 1

    def jump(self, seconds: float) -> None:
        """Advance the virtual time."""
        self._virtual_s += seconds


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(None if self._loop.num_executing and timeout != 0 else 0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise InternalError("virtual time cannot advance: every task waits, and no task waits for a timer")
        self._loop.jump(max(timeout, 0.0))
        return []


def run_virtually(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in virtual time from 0 and return its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
