"""Runs of several settings in turns: a machine that changes its speed changes it for all of them alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from _circle import LOADS, Lengths, Run, Setting, capacity_tokens_s

from lengthwise import Workload
from lengthwise.schema.records import Measured

WARM_UP = 32
GENERATIONS = 8
"""Requests of the capacity run per seat: in simulation 3 give a fifth more than a long run has, 8 a twentieth."""


@dataclass
class Turn:
    """One setting's engine and the requests of each load, the same at every repeat.

    Attributes:
        bench: Sends requests to the engine.
        named: Receives the name of the run that has just ended.
        static_s: Approximate duration of the load of all requests at once.
        seconds: Duration of arrivals under the other loads.
    """

    setting: Setting
    bench: Callable[[Workload], Measured]
    named: Callable[[str], None]
    lengths: Lengths
    static_s: float
    seconds: float
    workloads: dict[str, Workload] = field(default_factory=dict)
    capacity_tokens_s: float = 0.0

    def warm(self) -> None:
        """Warm up, size the static load by a second short run, and measure the capacity."""
        for _ in range(2):  # the first is the engine's own warm-up
            first = self.bench(self.lengths.workload(WARM_UP, 0, None, "warm-up"))
        rate_rps = WARM_UP / float(np.nanmax(first.records.requests.finished_s))
        n = min(500, max(60, round(rate_rps * self.static_s)))
        self.workloads["static"] = self.lengths.workload(n, 1, None, "static")
        full = self.bench(self.lengths.workload(GENERATIONS * self.setting.seqs, 2, None, "capacity"))
        self.capacity_tokens_s = capacity_tokens_s(full)

    def run(self, load: str, repeat: int) -> Run:
        """Measure the load once; Poisson loads are shares of the capacity."""
        if load not in self.workloads:
            share, seed = LOADS[load], 10 + list(LOADS).index(load)
            assert share is not None, "the static load was made when the engine was warm"
            self.workloads[load] = self.lengths.arriving(share * self.capacity_tokens_s, self.seconds, seed, load)
        measured = self.bench(self.workloads[load])
        known = {**measured.metadata, "capacity_tokens_s": round(self.capacity_tokens_s, 1)}
        run = Run(self.setting.name, load, repeat, replace(measured, metadata=known))
        self.named(run.name)
        return run


def in_turns(turns: Sequence[Turn], repeats: int) -> Iterator[Run]:
    """Measure every load of every setting ``repeats`` times: repeats outermost, settings innermost."""
    for turn in turns:
        turn.warm()
    for repeat in range(repeats):
        for load in LOADS:
            for turn in turns:
                yield turn.run(load, repeat)
