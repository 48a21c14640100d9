"""From the section [workload] to requests, one workload a seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise import predict
from lengthwise import workload as w
from lengthwise.config.files import resolved
from lengthwise.config.sections import PredictorSection, WorkloadSection
from lengthwise.predict.sample_files import Served, served
from lengthwise.schema.errors import InputError, TraceError, UnknownNameError
from lengthwise.schema.workload import Workload
from lengthwise.search import Load

LEARNT_FROM, LEARNING_SEED = 10_000, 2**64 + 1
"""Requests that a predictor without a file learns from, and their seed: no run has it."""


@dataclass(frozen=True)
class LengthPrediction:
    """Attaches a section's predictions to workloads.

    Attributes:
        section: What the file says.
        predictor: Ready to predict.
        model: The model that is deployed, told where a workload does not name its models.
    """

    section: PredictorSection
    predictor: Any
    model: str

    def __call__(self, workload: Workload, seed: int) -> Workload:
        """The workload with predictions; an oracle's errors are those of the seed.

        Raises:
            InputError: The predictor reads prompts, and the workload has none; nor models, which it may know.
        """
        asked = self.section
        if not {"prompt", "model"} & set(workload.extra) and _reads_text(self.predictor):
            raise InputError(
                "this predictor reads prompts and the workload has none, so it would say the same of every request; "
                "replay a trace that has prompts, or take a kind that needs none, such as bucket_ecdf"
            )
        return predict.attach(
            workload,
            self.predictor,
            window_tokens=asked.window_tokens,
            statistic=asked.statistic,
            update_predictions=asked.update_predictions,
            seed=seed,
            model=self.model,
        )


def length_prediction(
    section: PredictorSection, folder: Path, model: str, others: Callable[[], w.Lengths | None]
) -> LengthPrediction | None:
    """What attaches the predictions that a section asks for; None where it asks for none.

    Args:
        section: The table [predictor].
        folder: Where its paths start.
        model: The deployed model's name.
        others: The distribution that the workload is drawn from, of which other requests can be
            drawn to learn from; None where it is a replayed trace.

    Raises:
        InputError: A file cannot be read, or there is nothing to learn from.
    """
    if section.kind == "none":
        return None
    return LengthPrediction(section, _ready(section, folder, model, others), model)


def _ready(section: PredictorSection, folder: Path, model: str, others: Callable[[], w.Lengths | None]) -> Any:
    if section.kind in ("model", "default"):
        found = _loaded(section, folder)
    else:
        found = section.made()
        lengths = others() if section.requires_training or section.kind in _FITTABLE else None
        if lengths is not None:
            found.fit(_drawn(lengths, model))
        elif section.requires_training:
            raise InputError(
                f"a predictor of kind {section.kind} learns from other requests of the workload, and a replayed "
                'trace has none; train one on another trace and name it: kind = "model", file = "x.lwp"'
            )
    return predict.Conditional(found) if section.conditional else found


_FITTABLE = ("bin_neighbour", "confusion", "quantised")


def _loaded(section: PredictorSection, folder: Path) -> Any:
    if section.kind == "model":
        return _read(resolved(section.file or "", folder).resolve())
    shipped = getattr(predict, "default", None)
    if shipped is None:
        raise InputError('this build of lengthwise comes with no default predictor; use kind = "model" and a file')
    return shipped()


def _reads_text(predictor: Any) -> bool:
    """Whether it, or all that it is made of, has prompts alone to go by."""
    if hasattr(predictor, "members"):
        return all(map(_reads_text, predictor.members))
    inner = getattr(predictor, "inner", None)
    return bool(getattr(predictor, "reads_text", False)) or (inner is not None and _reads_text(inner))


@lru_cache(maxsize=8)
def _read(path: Path) -> Any:
    return predict.load(path)


def _drawn(lengths: w.Lengths, model: str) -> predict.Samples:
    """Other requests of the same distribution."""
    prompt, output = lengths.sample(LEARNT_FROM, np.random.default_rng(np.random.SeedSequence(LEARNING_SEED)))
    prompts = predict.Prompts(LEARNT_FROM, prompt_tokens=prompt, model=[model] * LEARNT_FROM)
    return predict.Samples(prompts, output, np.zeros(LEARNT_FROM, bool))


LOG = "log"
"""The format of what ``lengthwise predict train`` reads: rows with a prompt, an output or its tokens, a model."""


def read_trace(
    path: Path | str,
    format: str | None = None,  # noqa: A002 - the word users look for
    *,
    time_scale: float = 1.0,
    sort: bool = False,
    replayed: bool = False,
) -> Workload:
    """The requests of a trace of any format, with the texts that it has in ``extra``.

    Args:
        path: The file.
        format: One of ``workload.READABLE``, or "log"; None finds it out.
        time_scale: Factor on the times.
        sort: Put the requests in order of arrival.
        replayed: Whether the arrivals matter: a log may have none.

    Raises:
        InputError: The file cannot be read, or has no arrivals and is to be replayed.
    """
    if format is not None and format not in (*w.READABLE, LOG):
        raise UnknownNameError("trace format", format, (*w.READABLE, LOG))
    found = format or w.detect(path)
    if found not in (None, LOG):
        return w.read(path, format, time_scale=time_scale, sort=sort)
    log = _served(path, significant=found == LOG)
    if replayed and log.arrival_s is None:
        raise TraceError(
            f"{path}: a log without times of arrival cannot be replayed; give workload.request_rate, "
            "workload.concurrency or workload.arrivals, or a column arrival_s"
        )
    return _workload(Path(path), log, time_scale, sort=sort or not replayed)


def _served(path: Path | str, *, significant: bool) -> Served:
    try:
        return served(path)
    except InputError as error:
        if significant or (", row 1 " not in str(error) and ", row 1:" not in str(error)):
            raise
        try:
            w.read(path)
        except TraceError as unknown:
            raise TraceError(f"{unknown}; and not a log of texts either: {error}") from None
        raise


def _workload(path: Path, log: Served, time_scale: float, *, sort: bool) -> Workload:
    at = np.zeros(len(log.output_tokens)) if log.arrival_s is None else log.arrival_s
    if not sort and (np.diff(at) < 0).any():
        row = int(np.flatnonzero(np.diff(at) < 0)[0]) + 2
        raise TraceError(f"{path}, request {row}: arrives before the one above it; pass sort=True")
    order = np.argsort(at, kind="stable")
    try:
        return Workload(
            arrival_s=(at[order] - at[order[0]]) * time_scale,
            prompt_tokens=log.prompt_tokens[order],
            output_tokens=log.output_tokens[order],
            extra={name: column[order] for name, column in log.texts.items()},
            name=_name(path, log),
        )
    except InputError as error:
        raise TraceError(f"{path}: {error}") from error


def _name(path: Path, log: Served) -> str:
    notes = [
        *([f"{log.estimated:,} with tokens estimated"] if log.estimated else []),
        *([f"without {log.left_out:,} failed or empty"] if log.left_out else []),
    ]
    return path.name.partition(".")[0] + (f" ({', '.join(notes)})" if notes else "")


Ints = npt.NDArray[np.int64]
PerSeed = Callable[[int], Workload]

DEFAULT_REQUESTS = 1000
NO_PREDICTOR = PredictorSection()


def per_seed(
    section: WorkloadSection, folder: Path, predictor: PredictorSection = NO_PREDICTOR, model: str = ""
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
    predicted = length_prediction(predictor, folder, model, lambda: source.others)
    if source.complete is not None:
        replayed = source.complete
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
    """What requests are drawn from; ``complete`` are those of a replayed trace, where nothing is drawn."""

    lengths: w.Lengths
    arrivals: w.Arrivals
    name: str
    complete: Workload | None = None

    @property
    def others(self) -> w.Lengths | None:
        """What other requests of the same distribution can be drawn from; None for a replay."""
        return self.lengths if self.complete is None else None


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
        n, lengths, w.Replay(trace.arrival_s), predicted=section.predicted, tenants=section.tenants, name=trace.name
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


SECTIONS, LEAST_OF_SECTION = 8, 400
"""A replayed trace has no seeds: consecutive parts of it stand in for them, each of at least so many requests."""


def load_of(
    section: WorkloadSection, folder: Path, first_seed: int, predictor: PredictorSection = NO_PREDICTOR, model: str = ""
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
    trace = source_of(section, folder).complete
    assert trace is not None  # a replay has one
    parts = max(1, min(SECTIONS, len(trace) // LEAST_OF_SECTION))
    predicted = length_prediction(predictor, folder, model, lambda: None)
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
    _forecast: LengthPrediction | None = field(default=None, repr=False)

    def __call__(self, seed: int, requests: int) -> Workload:
        if self._source is None:
            self._source = source_of(self.section, self.folder)
            lengths = self._source.lengths
            self._forecast = length_prediction(self.predictor, self.folder, self.model, lambda: lengths)
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
