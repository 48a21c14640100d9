"""Worlds whose predictions may be anything, and a reference that tells who was admitted past whom."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from hypothesis import reject
from hypothesis import strategies as st
from observers import may_get_stuck
from worlds import deployments, workloads

from lengthwise.engine.reference import Reference
from lengthwise.engine.setup import prepare
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import PolicyError
from lengthwise.schema.workload import Predictions, Workload

RANKS = (
    "fcfs", "sjf", "srtf", "ljf", "gittins", "hrrn", "vtc", "shortest_prompt", "priority", "completed_batches",
    "aged(weight=30)", "aged_gittins(weight=5)", "mlfq(quantum=4, levels=3)",
)  # fmt: skip
PREEMPTION_MODES = ("never", "by_rank", "is_improvement", "worth(factor=0.1, max_preemptions=2)")
WRONG = ("random", "reversed", "constant", "huge", "zero", "true")


def wrongly(kind: str, output: Any, rng: np.random.Generator) -> Any:
    """Predicted totals of one kind."""
    return {
        "random": rng.lognormal(2, 2, len(output)),
        "reversed": (output.max() + output.min() - output).astype(float),
        "constant": np.full(len(output), 17.0),
        "huge": rng.uniform(1e10, 9e11, len(output)),
        "zero": np.zeros(len(output)),
        "true": output.astype(float),
    }[kind]


@st.composite
def misled(draw: st.DrawFn, kinds: tuple[str, ...] = WRONG) -> Workload:
    """A workload whose predictions may be anything, once or again at every window."""
    workload = draw(workloads()).without_dependencies()  # who came before has the smaller number
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(kinds))
    if draw(st.booleans()):
        plain = wrongly(kind, workload.output_tokens, rng)
        return dataclasses.replace(workload, predicted_tokens=plain, predictions=None)
    window = draw(st.sampled_from([1, 5, 50]))
    rows = -(-workload.output_tokens // window)
    start = np.concatenate([[0], np.cumsum(rows)])
    outputs = np.repeat(workload.output_tokens, rows)
    made = [wrongly(kind, outputs, rng) for _ in range(2)]
    again = Predictions(window, start, made[0], made[1])
    return dataclasses.replace(workload, predicted_tokens=None, predictions=again)


@st.composite
def served(draw: st.DrawFn, **axes: Any) -> Deployment:
    """A deployment that locks out no request, with these fields of its scheduler (lists are drawn from)."""
    deployment = draw(deployments())
    own = {name: draw(st.sampled_from(v)) if isinstance(v, list | tuple) else v for name, v in axes.items()}
    scheduler = dataclasses.replace(deployment.scheduler, **own)
    if scheduler.batching in ("vidur_vllm", "vidur_sarathi"):
        scheduler = dataclasses.replace(scheduler, batching="unified")
    if scheduler.memory == "paged_strict":
        scheduler = dataclasses.replace(scheduler, memory="paged")
    return dataclasses.replace(deployment, scheduler=scheduler)


@dataclasses.dataclass(frozen=True)
class Admitted:
    """One admission: who, when, from which queue.

    ``since_s`` is when it had waited too long in all, ``passed_by`` who was admitted from then on.
    """

    now_s: float
    index: int
    queue: Any
    since_s: float
    passed_by: list[Admitted]


class Doorkeeper(Reference):
    """The reference, asked at every admission who was passed; subclasses say what must hold."""

    def __init__(self, setup: Any) -> None:
        super().__init__(setup)
        self.admitted: list[Admitted] = []
        self.preempted: list[tuple[float, int]] = []
        self.joined: dict[int, tuple[int, float]] = {}
        self.giving = False

    def passes(self, q: Any, w: Any) -> None:
        """``q`` is admitted while ``w`` waits in the same queue."""

    def _place(self, rep: Any, step: Any, q: Any, chunk: int) -> None:
        for w in rep.queue.waiting:
            self.passes(q, w)
        joined, since_s = self.joined[q.index]
        passed = [other for other in self.admitted[joined:] if other.queue is rep.queue and other.now_s >= since_s]
        self.admitted.append(Admitted(self.now_s, q.index, rep.queue, since_s, passed))
        super()._place(rep, step, q, chunk)

    def _enqueue(self, queue: Any, q: Any, now: float) -> None:
        super()._enqueue(queue, q, now)
        self.joined[q.index] = (len(self.admitted), q.wait.overdue_at_s(self.s.params.max_wait_s))

    def _preempt_for_waiting(self, rep: Any, step: Any) -> None:
        self.giving = True
        super()._preempt_for_waiting(rep, step)
        self.giving = False

    def _preempt(self, rep: Any, step: Any, q: Any) -> None:
        if self.giving:
            assert q.wait.before_s < self.s.params.max_wait_s, "an overdue request leaves for no other"
            assert q.generated > q.admission.generated, "an admission is worth a token at least"
        self.preempted.append((self.now_s, q.index))
        super()._preempt(rep, step, q)

    def remaining(self, q: Any) -> float:
        return self.s.remaining(q)

    def index_of(self, q: Any) -> float:
        return self.s.predicted_at(q.index, q.generated)[1]


def observe(kind: type[Doorkeeper], workload: Workload, deployment: Deployment) -> Doorkeeper:
    """A doorkeeper that ran to the end."""
    keeper = kind(prepare(workload, deployment, seed=0, limit_s=math.inf, compiled=False))
    try:
        keeper.run()
    except PolicyError:
        if not may_get_stuck(deployment):
            raise
        reject()
    return keeper
