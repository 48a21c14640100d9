"""From the section [workload] to requests, one workload a seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lengthwise import workload as w
from lengthwise.scenario._places import resolved
from lengthwise.scenario._predictions import forecast
from lengthwise.scenario._predictor import PredictorSection
from lengthwise.scenario.sections import WorkloadSection
from lengthwise.scenario.traces import read_trace
from lengthwise.schema.errors import TraceError
from lengthwise.schema.workload import Workload

Ints = npt.NDArray[np.int64]
PerSeed = Callable[[int], Workload]

DEFAULT_REQUESTS = 1000
NO_PREDICTOR = PredictorSection()


def per_seed(
    section: WorkloadSection,
    folder: Path,
    predictor: PredictorSection = NO_PREDICTOR,
    model: str = "",
) -> PerSeed:
    """The workload of each seed; a trace is read now, so that a bad one is known before anything runs.

    Equal seeds give equal requests whatever is deployed: variants are compared on common random
    numbers. The last workload is kept, since variants ask for the same seed one after the other.

    Args:
        section: The table [workload].
        folder: Where its paths start.
        predictor: The table [predictor].
        model: The deployed model's name, for predictors that look at it.

    Raises:
        InputError: No preset of that name, or a trace or predictor that cannot be read.
    """
    source = source_of(section, folder)
    predicted = forecast(predictor, folder, model, lambda: source.others)
    if source.whole is not None:
        replayed = source.whole
        if predicted is None:
            return lambda seed: replayed  # noqa: ARG005 - a trace has no chance in it
        return lru_cache(maxsize=2)(lambda seed: predicted(replayed, seed))

    @lru_cache(maxsize=2)
    def generated(seed: int) -> Workload:
        drawn = w.generate(
            section.num_requests or DEFAULT_REQUESTS,
            source.lengths,
            source.arrivals,
            seed,
            predicted=section.predicted,
            tenants=section.tenants,
            name=source.name,
        )
        return drawn if predicted is None else predicted(drawn, seed)

    return generated


@dataclass(frozen=True)
class Source:
    """What requests are drawn from; ``whole`` are those of a replayed trace, where nothing is drawn."""

    lengths: w.Lengths
    arrivals: w.Arrivals
    name: str
    whole: Workload | None = None

    @property
    def others(self) -> w.Lengths | None:
        """What other requests of the same distribution can be drawn from; None for a replay."""
        return self.lengths if self.whole is None else None


def source_of(section: WorkloadSection, folder: Path) -> Source:
    """The models of lengths and arrivals that a section names; raises as ``per_seed`` does."""
    trace = _trace(section, folder)
    if section.is_replay and trace is not None:
        return Source(w.Samples.of(trace), w.Replay(trace.arrival_s), trace.name, _replayed(section, trace))
    name = section.preset or (trace.name if trace else "")
    return Source(_capped(section, _lengths(section, trace)), _arrivals(section), name)


def _trace(section: WorkloadSection, folder: Path) -> Workload | None:
    if section.trace is None:
        return None
    path = resolved(section.trace, folder)
    try:
        return read_trace(
            path,
            section.format,
            time_scale=section.time_scale,
            sort=section.sort or not section.is_replay,
            replayed=section.is_replay,
        )
    except TraceError as error:  # the reader speaks of its own argument
        raise TraceError(str(error).replace("pass sort=True", "set workload.sort = true")) from None


def _lengths(section: WorkloadSection, trace: Workload | None) -> w.Lengths:
    if section.preset is not None:
        return w.preset(section.preset).lengths
    if trace is not None:
        return w.Samples.of(trace)
    assert section.prompt is not None  # the section has checked it
    assert section.output is not None
    return w.Joint(section.prompt.build(), section.output.build(), section.correlation)


def _arrivals(section: WorkloadSection) -> w.Arrivals:
    rate = section.request_rate
    if section.concurrency is not None:
        return w.ClosedLoop(section.concurrency)
    if rate is not None and math.isinf(rate):
        return w.AllAtOnce()
    if section.arrivals is not None:
        return section.arrivals.build(rate or 1.0)
    if rate is not None:
        return w.Poisson(rate)
    assert section.preset is not None  # the section has checked it
    return w.preset(section.preset).arrivals


def _capped(section: WorkloadSection, lengths: w.Lengths) -> w.Lengths:
    limits = (section.max_total_tokens, section.max_prompt_tokens, section.max_output_tokens)
    return lengths if limits == (None, None, None) else w.Capped(lengths, *limits, cut=section.cut)


@dataclass(frozen=True, eq=False)
class _AsRead:
    """Lengths of a trace in its own order."""

    trace: Workload

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Ints, Ints]:
        drawn = self.draw(n, rng)
        return drawn.prompt, drawn.output

    def draw(self, n: int, rng: np.random.Generator) -> w.Drawn:  # noqa: ARG002 - the contract
        texts = w.Samples.of(self.trace).texts
        rows = {name: np.array(column[:n], object) for name, column in texts.items()}
        return w.Drawn(self.trace.prompt_tokens[:n].copy(), self.trace.output_tokens[:n].copy(), rows)


def _replayed(section: WorkloadSection, trace: Workload) -> Workload:
    n = min(section.num_requests or len(trace), len(trace))
    lengths = _capped(section, _AsRead(trace))
    drawn = w.generate(
        n,
        lengths,
        w.Replay(trace.arrival_s),
        predicted=section.predicted,
        tenants=section.tenants,
        name=trace.name,
    )
    own = None if trace.predicted_tokens is None else trace.predicted_tokens[:n]
    return replace(
        drawn,
        predicted_tokens=own if section.predicted == "none" else drawn.predicted_tokens,
        priority=None if trace.priority is None else trace.priority[:n],
        tenant=drawn.tenant if trace.tenant is None else trace.tenant[:n],
        extra={key: column[:n] for key, column in trace.extra.items()} | drawn.extra,
        concurrency=trace.concurrency,
    )
