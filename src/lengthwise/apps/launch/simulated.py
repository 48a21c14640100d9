"""Engines in virtual time: the coordinator's own code over simulated replicas."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from lengthwise.apps.launch import _batch
from lengthwise.apps.launch.commands import Deployed
from lengthwise.apps.launch.contracts import Ask, Draft, Engine, FailedError, Fault
from lengthwise.apps.ledger.contracts import Output
from lengthwise.engine.step_time import StepTime, step_time
from lengthwise.schema.app import ModelPlan, Replica
from lengthwise.schema.app_tasks import TaskDraw, Tasks
from lengthwise.schema.errors import EngineError

Ints = npt.NDArray[np.int64]
Seconds = Callable[[ModelPlan, str], float]


@dataclass(frozen=True)
class Lengths:
    """How long prompts and answers are, by the tasks' numbers."""

    prompt_tokens: Ints
    output_tokens: Ints
    max_tokens: Ints

    @classmethod
    def of(cls, tasks: Tasks, draw: TaskDraw) -> Lengths:
        """As drawn; a task that does not come to be in the draw has one token should it be asked all the same."""
        return cls(draw.prompt_tokens, np.maximum(draw.output_tokens, 1), tasks.max_tokens)


class SimulatedEngine:
    """A replica that computes nothing: its answers are as long as drawn, and come when they would.

    Attributes:
        seats: Requests that it works on at once.
        about: The plan's model and shape.
    """

    def __init__(self, about: str, limits: _batch.Limits, cost: StepTime, lengths: Lengths) -> None:
        self.about, self.seats = about, limits.seqs
        self._batch, self._lengths = _batch.Batch(limits, cost), lengths
        self._limit_tokens = limits.kv_tokens
        self._timer: asyncio.TimerHandle | None = None
        self._alive = True
        self._open: set[asyncio.Future[None]] = set()

    @property
    def is_alive(self) -> bool:
        """Until it is stopped."""
        return self._alive

    async def gone(self, within_s: float) -> bool:  # noqa: ARG002 - it shows at once
        """Whether it was stopped."""
        return not self._alive

    async def generate(self, ask: Ask, draft: Draft) -> Output:
        """An answer of as many tokens as drawn; it says its length, and what tells it from other requests' answers."""
        prompt = int(self._lengths.prompt_tokens[ask.task])
        tokens = int(self._lengths.output_tokens[ask.task])
        if prompt + tokens > self._limit_tokens:
            raise FailedError(
                Fault.REQUEST, f"{prompt + tokens} tokens do not fit the {self._limit_tokens} there are"
            )
        if len(draft.output_ids) >= tokens:
            draft.begin_anew()
        await self._written(prompt, tokens, draft)
        draft.finish_reason = "length" if tokens >= int(self._lengths.max_tokens[ask.task]) else "stop"
        return Output(f"{tokens} tokens ({_digest(ask)})", draft.finish_reason, prompt, tokens)

    async def _written(self, prompt: int, tokens: int, draft: Draft) -> None:
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        had = len(draft.output_ids)
        one = _batch.Sequence(
            prompt + had, tokens - had, lambda: None if over.done() else over.set_result(None)
        )
        self._open.add(over)
        self._batch.add(one, loop.time())
        self._arm()
        draft.telling = lambda: had + self._batch.written(one, loop.time())
        try:
            await over
        except asyncio.CancelledError:
            draft.output_ids.extend([0] * self._batch.written(one, loop.time()))
            self._batch.remove(one, loop.time())
            if self._alive:
                self._arm()
            raise
        finally:
            draft.telling = None
            self._open.discard(over)

    def _arm(self) -> None:
        """Wakes up at the next change; what comes at one instant is let in together."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
        at_s = loop.time() if self._batch.idle else self._batch.next_s
        self._timer = loop.call_at(at_s, self._turn)

    def _turn(self) -> None:
        self._timer = None
        for one in self._batch.turn(asyncio.get_running_loop().time()):
            one.done()
        if not math.isinf(self._batch.next_s):
            self._arm()

    def end(self) -> None:
        """It is gone, and all that it worked on fails."""
        self._alive = False
        if self._timer is not None:
            self._timer.cancel()
        for over in self._open:
            if not over.done():
                over.set_exception(FailedError(Fault.ENGINE, f"{self.about} ended"))


def _digest(ask: Ask) -> str:
    """Of the request: were all answers of a length alike, what is asked about them would be one request, asked once."""
    said = json.dumps(ask.body, sort_keys=True, default=str)
    return hashlib.sha256(said.encode("utf-8", "surrogatepass")).hexdigest()[:12]


@dataclass
class SimulatedLauncher:
    """Engines that are there after the seconds that it takes, and answer by cost tables in virtual time.

    Attributes:
        names: Of the models, by number.
        deployed: What each plan is to the engine: its cost tables, its memory, its limits.
        lengths: Of all tasks.
        seconds: Until a replica is ready, or has left its GPUs, by plan and how; as the planner has it.
        sleeps: Whether engines of a plan sleep rather than end.
    """

    names: Sequence[str]
    deployed: Deployed
    lengths: Lengths
    seconds: Seconds
    sleeps: Callable[[ModelPlan], bool] = lambda _: False
    is_placed: bool = True
    starts: int = field(default=0, init=False)
    _hurries: bool = field(default=False, init=False)
    _plans: dict[int, ModelPlan] = field(default_factory=dict, init=False)
    _costs: dict[ModelPlan, tuple[_batch.Limits, StepTime]] = field(default_factory=dict, init=False)

    async def start(self, plan: ModelPlan, gpus: Replica) -> Engine:
        """A replica after its seconds."""
        await asyncio.sleep(self.seconds(plan, "start"))
        self.starts += 1
        about = f"{self.names[plan.model]} on {','.join(map(str, gpus))}"
        engine = SimulatedEngine(about, *self._cost(plan), self.lengths)
        self._plans[id(engine)] = plan
        return engine

    def _cost(self, plan: ModelPlan) -> tuple[_batch.Limits, StepTime]:
        if plan not in self._costs:
            deployment = self.deployed(plan)
            limits, kv = deployment.limits, deployment.kv
            held = _batch.Limits(
                limits.max_num_seqs,
                limits.max_num_batched_tokens,
                kv.num_blocks * kv.block_size,
                kv.block_size,
                limits.watermark,
            )
            self._costs[plan] = held, step_time(deployment.cost)
        return self._costs[plan]

    async def stop(self, engine: Engine) -> None:
        """It answers nobody any more, and is gone after its seconds."""
        assert isinstance(engine, SimulatedEngine)
        plan = self._plans.pop(id(engine), None)
        engine.end()
        if plan is not None and not self._hurries:
            await asyncio.sleep(self.seconds(plan, "stop"))

    async def sleep(self, engine: Engine) -> bool:
        """Whether its plan's engines can; asleep after its seconds."""
        plan = self._plans.get(id(engine))
        if plan is None or not self.sleeps(plan):
            return False
        await asyncio.sleep(self.seconds(plan, "sleep"))
        return True

    async def wake(self, engine: Engine) -> None:
        """Ready again after its seconds."""
        plan = self._plans.get(id(engine))
        if plan is None:
            raise EngineError(f"{engine.about} was ended")
        await asyncio.sleep(self.seconds(plan, "wake"))

    def hurry(self) -> None:
        """They end at once."""
        self._hurries = True

    async def close(self) -> None:
        """Nothing is left."""
        self._plans.clear()
