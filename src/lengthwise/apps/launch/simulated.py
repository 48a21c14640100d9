"""Engines in virtual time: the coordinator's own code over simulated replicas."""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import json
import math
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from lengthwise.apps.launch.engine import Ask, Draft, Engine, FailedError, Fault
from lengthwise.apps.launch.local import Deployed
from lengthwise.apps.ledger.contracts import Output
from lengthwise.engine.step_time import StepTime, step_time
from lengthwise.schema.app import ModelPlan, Replica, TaskDraw, Tasks
from lengthwise.schema.errors import EngineError, InternalError


@dataclass(frozen=True)
class Limits:
    """What a batch may hold.

    Attributes:
        seqs: Sequences at once.
        step_tokens: Tokens of a step.
        kv_tokens: In memory.
        block_tokens: Of a block of it; half a block a sequence is lost on average.
        reserve: Share of the memory that is left free when a sequence is let in.
    """

    seqs: int
    step_tokens: int
    kv_tokens: int
    block_tokens: int = 1
    reserve: float = 0.0


@dataclass(eq=False, slots=True)
class SimulatedSequence:
    """One answer.

    Attributes:
        prompt: Tokens that are read first, those of an answer that goes on included.
        need: Tokens that are still to be written.
        done: Called at the end.
        joined: The step in which it was read; -1 while it waits.
        left: Whether it was called off.
        had: Tokens that were written before it had to make room; it reads them again.
    """

    prompt: int
    need: int
    done: Callable[[], None]
    joined: int = -1
    left: bool = False
    had: int = 0


class Batch:
    """Steps of prompts and decodes, as an engine forms them that does all prompts of a step whole.

    A sequence is let in where its prompt has room. When memory is full, who was let in last makes room and is the next
    to be let in. Decode steps between two changes are taken together, at the mean of their costs.

    Args:
        limits: Of the batch.
        cost: Seconds of a step.
    """

    def __init__(self, limits: Limits, cost: StepTime) -> None:
        self._limits, self._cost = limits, cost
        self._waiting: deque[SimulatedSequence] = deque()
        self._ends: list[tuple[int, int, SimulatedSequence]] = []
        self._steps = self._kv = self._running = self._order = 0
        self._from_s = self._until_s = 0.0
        self._jump = 0
        self._joining: list[SimulatedSequence] = []

    @property
    def next_s(self) -> float:
        """When something changes; infinity: nothing is to be done."""
        return self._until_s if self._jump else math.inf

    @property
    def idle(self) -> bool:
        """Whether no step is under way."""
        return not self._jump

    def written(self, one: SimulatedSequence, now_s: float) -> int:
        """Tokens that a sequence has by now."""
        if one.joined < 0:
            return one.had
        return min(one.need, one.had + self._steps + self._passed(now_s) - one.joined)

    def add(self, one: SimulatedSequence, now_s: float) -> None:
        """Lets a sequence wait; a jump ends at the next step, so that it may join."""
        self._waiting.append(one)
        if self._jump > 1:
            self._cut(now_s)

    def remove(self, one: SimulatedSequence, now_s: float) -> None:
        """Takes out a sequence that was called off; it leaves with the step that is under way."""
        one.left = True
        if one.joined < 0 and one in self._waiting:
            self._waiting.remove(one)
        elif self._jump > 1:
            self._cut(now_s)

    def turn(self, now_s: float) -> list[SimulatedSequence]:
        """Ends what is due, forms the next step or jump; sequences that are done."""
        if self._jump and now_s < self._until_s:
            return []
        over = self._arrive() if self._jump else []
        self._clear()
        self._depart(now_s)
        return over

    def _passed(self, now_s: float) -> int:
        """Whole steps of the jump that is under way."""
        if not self._jump or self._until_s <= self._from_s:
            return 0
        share = (now_s - self._from_s) / (self._until_s - self._from_s)
        return min(self._jump, max(0, math.floor(share * self._jump + 1e-9)))

    def _cut(self, now_s: float) -> None:
        """Ends a jump with the step that is under way."""
        steps = min(self._jump, self._passed(now_s) + 1)
        self._until_s = self._from_s + (self._until_s - self._from_s) * steps / self._jump
        self._jump = steps

    def _arrive(self) -> list[SimulatedSequence]:
        decoding = self._running - len(self._joining)
        self._steps += self._jump
        self._kv += decoding * self._jump
        for one in self._joining:
            one.joined = self._steps - 1
            self._kv += one.prompt + one.had + 1
            self._order += 1
            heapq.heappush(self._ends, (one.joined + one.need - one.had, self._order, one))
        self._joining, self._jump = [], 0
        over = []
        while self._ends and self._ends[0][0] <= self._steps:
            one = heapq.heappop(self._ends)[2]
            self._leave(one)
            if not one.left:
                over.append(one)
        return over

    def _leave(self, one: SimulatedSequence) -> None:
        self._running -= 1
        self._kv -= one.prompt + self._now(one)

    def _now(self, one: SimulatedSequence) -> int:
        """Tokens that it has, prompt left aside."""
        return min(one.need, one.had + self._steps - one.joined)

    def _clear(self) -> None:
        """Those that were called off go."""
        gone = [entry for entry in self._ends if entry[2].left]
        if gone:
            self._ends = [entry for entry in self._ends if not entry[2].left]
            heapq.heapify(self._ends)
            for _, _, one in gone:
                self._leave(one)

    def _depart(self, now_s: float) -> None:
        made_room = self._made_room()
        self._joining = [] if made_room else self._admitted()
        decoding, kv = self._running - len(self._joining), self._kv
        if not self._joining and not decoding:
            return
        self._jump = 1
        if not self._joining and not made_room:
            self._jump = max(1, min(self._ends[0][0] - self._steps, self._room() // decoding))
        prompts = [(one.prompt + one.had, 0) for one in self._joining]
        if self._jump == 1:
            seconds = self._cost(decoding, kv, prompts)
        else:
            seconds = self._jump * self._cost(decoding, kv + decoding * (self._jump - 1) // 2, ())
        self._from_s, self._until_s = now_s, now_s + seconds

    def _room(self) -> int:
        """Tokens that memory has room for."""
        return self._limits.kv_tokens - self._kv - self._running * (self._limits.block_tokens // 2)

    def _made_room(self) -> bool:
        """Whether somebody had to go, so that all others can go on by a step."""
        gone = False
        while self._running > 1 and self._room() < self._running:
            last = max(self._ends, key=lambda entry: entry[1])
            self._ends.remove(last)
            one = last[2]
            self._leave(one)
            one.had, one.joined = self._now(one), -1
            self._waiting.appendleft(one)
            gone = True
        if gone:
            heapq.heapify(self._ends)
        return gone

    def _admitted(self) -> list[SimulatedSequence]:
        found: list[SimulatedSequence] = []
        limits, tokens = self._limits, self._running
        room = self._room() - self._running - int(limits.reserve * limits.kv_tokens)
        while self._waiting and self._running < limits.seqs:
            one = self._waiting[0]
            read = one.prompt + one.had
            room -= read + 1 + limits.block_tokens // 2
            if (room < 0 and self._running) or (found and tokens + read > limits.step_tokens):
                break
            self._waiting.popleft()
            self._running += 1
            tokens += read
            found.append(one)
        return found


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
        max_num_seqs: Requests that it works on at once.
        description: The plan's model and shape.
    """

    def __init__(self, description: str, limits: Limits, cost: StepTime, lengths: Lengths) -> None:
        self.description, self.max_num_seqs = description, limits.seqs
        self._batch, self._lengths = Batch(limits, cost), lengths
        self._limit_tokens = limits.kv_tokens
        self._timer: asyncio.TimerHandle | None = None
        self._alive = True
        self._open: set[asyncio.Future[None]] = set()

    @property
    def is_alive(self) -> bool:
        """Until it is stopped."""
        return self._alive

    async def stopped(self, within_s: float) -> bool:  # noqa: ARG002 - it shows at once
        """Whether it was stopped."""
        return not self._alive

    async def generate(self, request: Ask, draft: Draft) -> Output:
        """An answer of as many tokens as drawn; it says its length, and what tells it from other requests' answers."""
        prompt = int(self._lengths.prompt_tokens[request.task])
        tokens = int(self._lengths.output_tokens[request.task])
        if prompt + tokens > self._limit_tokens:
            raise FailedError(Fault.REQUEST, f"{prompt + tokens} tokens do not fit the {self._limit_tokens} there are")
        if len(draft.output_ids) >= tokens:
            draft.begin_anew()
        await self._written(prompt, tokens, draft)
        draft.finish_reason = "length" if tokens >= int(self._lengths.max_tokens[request.task]) else "stop"
        return Output(f"{tokens} tokens ({_digest(request)})", draft.finish_reason, prompt, tokens)

    async def _written(self, prompt: int, tokens: int, draft: Draft) -> None:
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        had = len(draft.output_ids)
        one = SimulatedSequence(prompt + had, tokens - had, lambda: None if over.done() else over.set_result(None))
        self._open.add(over)
        self._batch.add(one, loop.time())
        self._arm()
        draft.stats = lambda: had + self._batch.written(one, loop.time())
        try:
            await over
        except asyncio.CancelledError:
            draft.output_ids.extend([0] * self._batch.written(one, loop.time()))
            self._batch.remove(one, loop.time())
            if self._alive:
                self._arm()
            raise
        finally:
            draft.stats = None
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
                over.set_exception(FailedError(Fault.ENGINE, f"{self.description} ended"))


def _digest(request: Ask) -> str:
    """Of the request: were all answers of a length alike, what is asked about them would be one request, asked once."""
    said = json.dumps(request.body, sort_keys=True, default=str)
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
    _costs: dict[ModelPlan, tuple[Limits, StepTime]] = field(default_factory=dict, init=False)

    async def start(self, plan: ModelPlan, gpus: Replica) -> Engine:
        """A replica after its seconds."""
        await asyncio.sleep(self.seconds(plan, "start"))
        self.starts += 1
        about = f"{self.names[plan.model]} on {','.join(map(str, gpus))}"
        engine = SimulatedEngine(about, *self._cost(plan), self.lengths)
        self._plans[id(engine)] = plan
        return engine

    def _cost(self, plan: ModelPlan) -> tuple[Limits, StepTime]:
        if plan not in self._costs:
            deployment = self.deployed(plan)
            limits, kv = deployment.limits, deployment.kv
            held = Limits(
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
            raise EngineError(f"{engine.description} was ended")
        await asyncio.sleep(self.seconds(plan, "wake"))

    def hurry(self) -> None:
        """They end at once."""
        self._hurries = True

    async def close(self) -> None:
        """Nothing is left."""
        self._plans.clear()


Result = TypeVar("Result")
_RESOLUTION_S = 1e-9


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs what an ordinary loop runs, but waits for no clock; same input, same order.

    Whatever blocks must do so in the loop itself: of threads it does not know when they end.
    """

    def __init__(self) -> None:
        self._virtual_s = 0.0
        super().__init__(_Jumping(self))
        self._clock_resolution = _RESOLUTION_S

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual_s

    def jump(self, seconds: float) -> None:
        """Lets time pass."""
        self._virtual_s += seconds


class _Jumping(selectors.BaseSelector):
    """Never waits: a wait becomes a jump."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._real, self._loop = selectors.DefaultSelector(), loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise InternalError("nothing can go on, and no time is waited for")
        self._loop.jump(max(timeout, 0.0))
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


def run_virtually(work: Coroutine[Any, Any, Result]) -> Result:
    """What the work returns, run in virtual time from 0."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
