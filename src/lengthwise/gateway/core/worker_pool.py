"""All workers: who is there, which models they serve, and since when a model has none."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from lengthwise.gateway.config import Dispatch
from lengthwise.gateway.core.queue import Bins, Queue
from lengthwise.gateway.core.ranking import Entry, State
from lengthwise.gateway.core.worker import MOST_BLOCKS, Worker
from lengthwise.gateway.scheduling import Phase, WorkerState


def tokens_by_model(queue: Queue, bins: Bins) -> dict[str, float]:
    """Predicted output tokens still to come of those who wait or gather; a model of which nobody does is not there."""
    models = sorted(queue.tokens.keys() | bins.tokens_of.keys())
    return {model: queue.tokens.get(model, 0.0) + bins.tokens_of.get(model, 0.0) for model in models}


def drained_s(tokens: Mapping[str, float], serving: Mapping[str, Sequence[int]], rates: Sequence[float]) -> list[float]:
    """For each worker, the seconds until all that waits for it is done, were everybody who waits served.

    A model's tokens are poured where they are done soonest. Models that fewest workers serve come first: the
    others can go around them. So a model whose engines are its own is not held up by another one's queue.

    Args:
        tokens: That wait, by model.
        serving: Numbers of the workers that serve a model, for each of these models.
        rates: Tokens a second, by worker.
    """
    levels_s = [0.0] * len(rates)
    for model in sorted(tokens, key=lambda one: (len(serving[one]), one)):
        _pour(levels_s, rates, serving[model], tokens[model])
    return levels_s


def _pour(levels_s: list[float], rates: Sequence[float], into: Iterable[int], tokens: float) -> None:
    """Fills the lowest of the workers up to one level."""
    lowest = sorted(into, key=levels_s.__getitem__)
    rate, done = 0.0, tokens
    for at, worker in enumerate(lowest):
        if rate and done / rate <= levels_s[worker]:
            lowest = lowest[:at]
            break
        rate += rates[worker]
        done += rates[worker] * levels_s[worker]
    for worker in lowest:
        levels_s[worker] = done / rate


_RUNNING, _CUT = State.RUNNING, State.CUT
"""Asked for with every token: a name of the module is found faster than a member of an enumeration."""


class Crew:
    """The workers by name.

    Attributes:
        up: Those that may be given requests, in the order in which they were told.
    """

    def __init__(self, dispatch: Dispatch, *, unheld: bool, phased: bool = False) -> None:
        self._dispatch, self._unheld, self._phased = dispatch, unheld, phased
        self._phases: list[Phase] = []
        self._renamed: list[tuple[str, str]] = []
        self._workers: dict[str, Worker] = {}
        self._known: set[str] = set()
        self._served: set[str] = set()
        self._gone_s: dict[str, float] = {}
        self._undisclosed = True
        self._held_until_s = -math.inf
        self.up: list[Worker] = []

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def configure(self, dispatch: Dispatch) -> None:
        """Other bounds of all caps."""
        self._dispatch = dispatch
        for worker in self:
            worker.configure(dispatch)

    def of(self, entry: Entry) -> Worker | None:
        """The worker that has it; None where it is at none."""
        if entry.state is not _RUNNING and entry.state is not _CUT:
            return None
        return self._workers[entry.worker]

    def named(self, name: str) -> Worker | None:
        """The worker of this name."""
        return self._workers.get(name)

    def seen(self, now_s: float, states: Sequence[WorkerState]) -> list[Entry]:
        """Takes the whole set as it is now; returns who lost its worker."""
        lost: list[Entry] = []
        new: list[Worker] = []
        before, self._workers = self._workers, {}
        for state in states:
            if _rename(before, state):
                self._renamed.append((state.renamed_from, state.name))
        for state in states:
            worker = before.pop(state.name, None)
            if worker is None:
                told = self._phases.append if self._phased else None
                worker = Worker(state, self._dispatch, unheld=self._unheld, report=told)
                new.append(worker)
            lost += worker.seen(now_s, state)
            self._workers[state.name] = worker
        for worker in before.values():
            lost += worker.lose()
        self._share(new)
        for worker in self:
            worker.cached.most = MOST_BLOCKS // len(self._workers)
        self._note_models(now_s)
        return lost

    def renamed(self) -> tuple[tuple[str, str], ...]:
        """(before, now) of names since it was asked last: of workers, and of engines under another key."""
        renamed = tuple(self._renamed)
        self._renamed.clear()
        return renamed

    def may_serve(self, model: str) -> bool:
        """Whether a worker for the model is there, was there, or may turn out to be there."""
        return model in self._known or self._undisclosed

    def serves(self, model: str) -> bool:
        """Whether a worker that is up serves the model."""
        return model in self._served

    def gone_s(self, model: str) -> float:
        """Since when no worker that is up serves the model; -inf it never was."""
        return self._gone_s.get(model, -math.inf)

    def refused(self, now_s: float, name: str, hold_s: float) -> None:
        """The worker's own queue was full; it wants nothing for so long."""
        worker = self._workers.get(name)
        if worker is not None:
            worker.refused(now_s, hold_s)
            held_s = worker.held_until_s(now_s)
            self._held_until_s = max(self._held_until_s, held_s if held_s < math.inf else 0.0)

    def usual_speed(self) -> float:
        """The mean of the output tokens a second of those that have shown it; 0 nobody has."""
        known = [worker.speed.tokens_per_s for worker in self.up if worker.speed.tokens_per_s]
        return sum(known) / len(known) if known else 0.0

    def batch_size(self, model: str) -> int:
        """The most requests that one worker takes at once."""
        caps = [worker.cap for worker in self.up if model in worker.state.models]
        return max(caps, default=self._dispatch.start)

    def wait_s(self, now_s: float, model: str, tokens: Mapping[str, float]) -> float:
        """What one that arrives now would wait: the backlog before it over the rate at which tokens come.

        Args:
            now_s: Now.
            model: That it asks for; "" any.
            tokens: Predicted output tokens of those who wait, by model: of those that its workers serve, too, some
                go before it.
        """
        serving = [worker for worker in self.up if not model or model in worker.state.models]
        usual = self.usual_speed()
        if not serving or not usual or _is_free(now_s, model, serving, tokens):
            return 0.0
        rate = sum(worker.speed.tokens_per_s or usual for worker in serving)
        running = sum(len(worker.active) for worker in serving)
        first_s = sum(worker.tokens for worker in serving) / max(1, running) / rate
        if not model:
            return sum(tokens.values()) / rate + first_s
        return self._before_s(model, tokens, usual) + first_s

    def held_until_s(self, now_s: float) -> float:
        """When the first of those that are left alone for a moment may be given requests; inf none is."""
        if now_s >= self._held_until_s:
            return math.inf
        return min((worker.held_until_s(now_s) for worker in self.up), default=math.inf)

    def phases_over(self) -> tuple[Phase, ...]:
        """Phases that are over since it was asked last."""
        over = tuple(self._phases)
        self._phases.clear()
        return over

    def _before_s(self, model: str, tokens: Mapping[str, float], usual: float) -> float:
        """Seconds until a worker of the model has done what waits for it."""
        serving = {
            one: [at for at, worker in enumerate(self.up) if one in worker.state.models] for one in (*tokens, model)
        }
        served = {one: tokens[one] for one in tokens if serving[one]}
        levels_s = drained_s(served, serving, [worker.speed.tokens_per_s or usual for worker in self.up])
        return min(levels_s[at] for at in serving[model])

    def _share(self, new: Sequence[Worker]) -> None:
        """Who leaves shares seats with who is at its place; a new one there knows what was learned."""
        leaving = [one for one in self if one.state.renamed_from and one.state.address]
        for worker in self:
            worker.additional = tuple(one for one in leaving if one is not worker and _is_heir(worker, one))
        for worker in new:
            if worker.additional:
                last = max(worker.additional, key=lambda one: one.state.epoch)
                worker.inherit(last)
                self._renamed.append((last.name, worker.name))

    def _note_models(self, now_s: float) -> None:
        self.up = [worker for worker in self if worker.state.up]
        served = {model for worker in self.up for model in worker.state.models}
        for model in self._served - served:
            self._gone_s[model] = now_s
        for model in served:
            self._gone_s.pop(model, None)
        self._served = served
        self._known |= {model for worker in self for model in worker.state.models}
        self._undisclosed = not self._workers or any(not worker.state.models for worker in self)


def _is_free(now_s: float, model: str, serving: Sequence[Worker], tokens: Mapping[str, float]) -> bool:
    """Whether one of the workers has room, and nobody waits who could take it."""
    if not model and tokens:
        return False
    return any(worker.room(now_s) > 0 and not any(one in tokens for one in worker.state.models) for worker in serving)


def _is_heir(worker: Worker, stopping: Worker) -> bool:
    """Whether it is the engine that another one, which leaves, was."""
    return not worker.state.renamed_from and worker.state.address == stopping.state.address


def _rename(workers: dict[str, Worker], state: WorkerState) -> bool:
    """Files a worker that is called otherwise now under its new name, with all who are there; whether there is one."""
    worker = workers.get(state.renamed_from)
    if worker is None or state.name in workers or worker.state.epoch != state.epoch:
        return False
    del workers[state.renamed_from]
    workers[state.name] = worker
    worker.rename(state.name)
    return True
