"""From the section [workload] to the load of a search: the same requests at any rate."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise import workload as w
from lengthwise.scenario._predictions import Forecast, forecast
from lengthwise.scenario._predictor import PredictorSection
from lengthwise.scenario._workloads import NO_PREDICTOR, Source, source_of
from lengthwise.scenario.sections import WorkloadSection
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import Workload
from lengthwise.search import Load

SECTIONS, LEAST_OF_SECTION = 8, 400
"""A replayed trace has no seeds: consecutive parts of it stand in for them, each of at least so many requests."""


def load_of(
    section: WorkloadSection,
    folder: Path,
    first_seed: int,
    predictor: PredictorSection = NO_PREDICTOR,
    model: str = "",
) -> Load:
    """The load that a section describes; its own rate does not matter.

    Raises:
        InputError: The requests come in a closed loop, or a trace cannot be read.
    """
    if section.concurrency is not None:
        raise InputError(
            "a closed loop (workload.concurrency) has no rate that could be searched; give workload.request_rate"
        )
    name = section.preset or (Path(section.trace).name if section.trace else "lengths of the scenario")
    if not section.is_replay:
        return Load(_Drawn(section, folder, first_seed, predictor, model), name)
    trace = source_of(section, folder).whole
    assert trace is not None  # a replay has one
    parts = max(1, min(SECTIONS, len(trace) // LEAST_OF_SECTION))
    predicted = forecast(predictor, folder, model, lambda: None)
    if predicted is not None:
        trace = predicted(trace, first_seed)
    return Load(_Parts(trace, parts), name, seeds=parts, most=len(trace) // parts)


@dataclass
class _Drawn:
    """Draws requests; reads what it needs when it is first asked, in every process anew."""

    section: WorkloadSection
    folder: Path
    first_seed: int
    predictor: PredictorSection = NO_PREDICTOR
    model: str = ""
    _source: Source | None = field(default=None, repr=False)
    _forecast: Forecast | None = field(default=None, repr=False)

    def __call__(self, seed: int, requests: int) -> Workload:
        if self._source is None:
            self._source = source_of(self.section, self.folder)
            lengths = self._source.lengths
            self._forecast = forecast(self.predictor, self.folder, self.model, lambda: lengths)
        source = self._source
        drawn = w.generate(
            requests,
            source.lengths,
            source.arrivals,
            self.first_seed + seed,
            predicted=self.section.predicted,
            tenants=self.section.tenants,
            name=source.name,
        )
        return drawn if self._forecast is None else self._forecast(drawn, self.first_seed + seed)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_source": None, "_forecast": None}


@dataclass(frozen=True)
class _Parts:
    """Consecutive parts of a trace."""

    trace: Workload
    parts: int

    def __call__(self, seed: int, requests: int) -> Workload:
        size = len(self.trace) // self.parts
        rows = slice(seed * size, seed * size + min(size, requests))
        at = np.arange(len(self.trace))[rows]
        return Workload(
            arrival_s=self.trace.arrival_s[rows],
            prompt_tokens=self.trace.prompt_tokens[rows],
            output_tokens=self.trace.output_tokens[rows],
            predicted_tokens=_cut(self.trace.predicted_tokens, rows),
            predictions=None if self.trace.predictions is None else self.trace.predictions.take(at),
            priority=_cut(self.trace.priority, rows),
            tenant=_cut(self.trace.tenant, rows),
            extra={key: column[rows] for key, column in self.trace.extra.items()},
            name=self.trace.name,
        )


def _cut(column: Any, rows: slice) -> Any:
    return None if column is None else column[rows]
