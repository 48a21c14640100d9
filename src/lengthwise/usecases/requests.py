"""The requests of a scenario with their predictions, for each seed and for a search of rates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lengthwise import engine, policy, predict, search
from lengthwise import workload as w
from lengthwise.config.files import resolved
from lengthwise.config.scenario import Scenario
from lengthwise.config.sections import PredictorSection
from lengthwise.config.workload import Source, source_of
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import Workload

if TYPE_CHECKING:
    from lengthwise.search import Load

DEFAULT_REQUESTS = 1000
TRAINING_REQUESTS, TRAINING_SEED = 10_000, 2**64 + 1
"""Number of requests from which a predictor without a file learns, and their seed, which no run can have."""
MAX_PARTS, MIN_PART_REQUESTS = 8, 400
"""For a search, a replayed trace has up to MAX_PARTS consecutive parts of at least MIN_PART_REQUESTS, or one."""


@dataclass(frozen=True)
class WorkloadPredictor:
    """Adds predicted output lengths to workloads, as a scenario's [predictor] or [lab] describes."""

    section: PredictorSection
    predictor: Any  # trained or loaded
    model: str

    def __call__(self, workload: Workload, seed: int) -> Workload:
        """Return the workload with predictions. ``seed`` is the seed of an oracle's random errors."""
        if _has("reads_sessions", self.predictor):
            workload = w.find_sessions(workload)
            if not {"session", "turn"} <= set(workload.extra):
                raise InputError(
                    "this predictor reads the earlier outputs of a session and the workload has no sessions, so it "
                    "would predict the same for every request; give [workload.sessions], or replay a trace with "
                    "sessions or shared prefixes"
                )
        if not {"prompt", "model"} & set(workload.extra) and _has("reads_text", self.predictor):
            raise InputError(
                "this predictor reads prompts and the workload has none, so it would predict the same for every "
                "request; replay a trace that has prompts, or take a kind that needs none, such as bucket_ecdf"
            )
        settings = self.section.model_dump(include={"window_tokens", "statistic", "update_predictions"})
        return predict.attach(workload, self.predictor, **settings, seed=seed, model=self.model)


def _has(attribute: str, predictor: Any) -> bool:
    """Return whether a predictor, or one that it wraps, has a true attribute. In an ensemble, all members must."""
    if hasattr(predictor, "members"):
        return all(_has(attribute, member) for member in predictor.members)
    inner = getattr(predictor, "inner", None)
    return bool(getattr(predictor, attribute, False)) or (inner is not None and _has(attribute, inner))


_load_predictor = lru_cache(maxsize=8)(predict.load)


def workload_predictor(
    section: PredictorSection, scenario: Scenario, lengths: w.Lengths | None
) -> WorkloadPredictor | None:
    """Return the predictor that a section [predictor] or [lab] describes, or None for the kind "none".

    A predictor without a file learns from other requests with these ``lengths``. The argument is None for a replayed
    trace, which has no other requests.
    """
    model = scenario.deployment.model
    match section.kind:
        case "none":
            return None
        case "model":
            predictor = _load_predictor(resolved(section.file or "", scenario.folder).resolve())
        case "default":
            predictor = predict.default()
        case kind:
            predictor = section.build()
            if section.requires_training or kind in ("bin_neighbour", "confusion", "quantised"):
                if lengths is not None:
                    rng = np.random.default_rng(np.random.SeedSequence(TRAINING_SEED))
                    prompt, output = lengths.sample(TRAINING_REQUESTS, rng)
                    prompts = predict.Prompts(
                        TRAINING_REQUESTS, prompt_tokens=prompt, model=[model] * TRAINING_REQUESTS
                    )
                    predictor.fit(predict.Samples(prompts, output, np.zeros(TRAINING_REQUESTS, bool)))
                elif section.requires_training:
                    raise InputError(
                        f"a predictor of kind {kind} learns from other requests of the workload, and a replayed trace "
                        'has none; train one on another trace and name it: kind = "model", file = "x.lwp"'
                    )
    return WorkloadPredictor(section, predict.Conditional(predictor) if section.conditional else predictor, model)


@dataclass(frozen=True)
class _InSessions:
    """Lengths of the requests of sessions, whose prompts include the earlier turns."""

    lengths: w.Lengths
    sessions: w.Sessions

    def sample(self, n: int, rng: np.random.Generator) -> tuple[Any, Any]:
        """Return prompts and outputs [n]."""
        drawn = w.generate_sessions(n, self.sessions, self.lengths, w.AllAtOnce(), int(rng.integers(2**62)))
        return drawn.prompt_tokens, drawn.output_tokens


@dataclass(frozen=True)
class Sharing:
    """Whether requests of a workload can share prefixes or sessions, even if one draw happens to have none."""

    has_prefixes: bool  # prompts that begin alike
    has_sessions: bool  # requests that come after others of their session

    def require_for(self, router: policy.Policy) -> None:
        """Raise PolicyError if the router needs prefixes or sessions, and there are none."""
        engine.check_router(router, has_prefixes=self.has_prefixes, has_sessions=self.has_sessions)


def sharing_of(scenario: Scenario) -> Sharing:
    """Return whether requests of a scenario may share prefixes or sessions. Reads a replayed trace."""
    source = source_of(scenario.workload, scenario.folder)
    if (replayed := source.replayed) is not None:
        return Sharing(replayed.prefixes is not None, bool((replayed.previous_turn >= 0).any()))
    has_turns = source.sessions is not None and source.sessions.has_turns
    return Sharing(has_turns or (source.sessions is not None and source.sessions.groups is not None), has_turns)


class _Draws:
    """Draws requests of a scenario. Files are read at first use, so that the object can be sent to another process."""

    def __init__(self, scenario: Scenario, first_seed: int = 0) -> None:
        self.scenario, self.first_seed = scenario, first_seed

    @cached_property
    def source(self) -> Source:
        return source_of(self.scenario.workload, self.scenario.folder)

    @cached_property
    def _sessions(self) -> w.Sessions:
        """Return the sessions, with the engine's size of blocks if it and their own size do not divide each other."""
        sessions, engine_block = self.source.sessions, self.scenario.engine.block_size
        assert sessions is not None
        divides = max(sessions.block_tokens, engine_block) % min(sessions.block_tokens, engine_block) == 0
        return sessions if divides else replace(sessions, block_tokens=engine_block)

    @cached_property
    def prediction(self) -> WorkloadPredictor | None:
        lengths = self.source.lengths if self.source.replayed is None else None
        if lengths is not None and self.source.sessions is not None:
            lengths = _InSessions(lengths, self._sessions)
        return workload_predictor(self.scenario.predictor, self.scenario, lengths)

    def __call__(self, seed: int, requests: int) -> Workload:
        section, source, seed = self.scenario.workload, self.source, self.first_seed + seed
        settings: dict[str, Any] = section.model_dump(include={"predicted", "tenants"})
        if source.sessions is None:
            drawn = w.generate(requests, source.lengths, source.arrivals, seed, name=source.name, **settings)
        else:
            drawn = w.generate_sessions(
                requests, self._sessions, source.lengths, source.arrivals, seed, name=source.name, **settings
            )
        return drawn if self.prediction is None else self.prediction(drawn, seed)

    def __getstate__(self) -> dict[str, Any]:
        return {"scenario": self.scenario, "first_seed": self.first_seed}


def workload_by_seed(scenario: Scenario) -> Callable[[int], Workload]:
    """Return a function from a seed to the workload. Files are read now, so that errors appear before any run.

    Equal seeds give equal requests for every deployment, so that variants are compared on common random numbers. The
    last workloads are cached, because variants request the same seed one after the other.
    """
    draws = _Draws(scenario)
    replayed, prediction = draws.source.replayed, draws.prediction
    if replayed is None:
        requests = scenario.workload.num_requests or DEFAULT_REQUESTS
        return lru_cache(maxsize=2)(lambda seed: draws(seed, requests))
    if prediction is None:
        return lambda seed: replayed  # noqa: ARG005 - a trace has no randomness
    return lru_cache(maxsize=2)(lambda seed: prediction(replayed, seed))


def own_rate(scenario: Scenario) -> float | None:
    """Return the mean request rate of a scenario or of the trace that it replays, or None if there is no rate."""
    section = scenario.workload
    if section.session_rate is not None:
        return section.session_rate * search_load(scenario).requests_per_session
    trace = source_of(section, scenario.folder).replayed if section.is_replay else None
    if trace is None or not len(trace):
        return section.request_rate
    span_s = float(trace.arrival_s[-1] - trace.arrival_s[0])
    return (len(trace) - 1) / span_s if span_s > 0 else None


def search_load(scenario: Scenario, max_parts: int = MAX_PARTS) -> Load:
    """Return a scenario's requests as a load whose rate a search varies. The scenario's own rate is not used.

    A replayed trace is divided into at most ``max_parts`` parts, one for each seed.
    """
    section, first_seed = scenario.workload, scenario.run.seed
    if section.concurrency is not None:
        raise InputError(
            "a closed loop (workload.concurrency) has no rate that could be searched; give workload.request_rate"
        )
    name = section.preset or (Path(section.trace).name if section.trace else "lengths of the scenario")
    draws = _Draws(scenario.model_copy(update={"search": None, "lab": None, "variants": []}), first_seed)
    if not section.is_replay:
        return search.Load(draws, name)
    trace = draws.source.replayed
    assert trace is not None  # a replay has one
    parts = max(1, min(max_parts, len(trace) // MIN_PART_REQUESTS)) if trace.after is None else 1
    if draws.prediction is not None:
        trace = draws.prediction(trace, first_seed)
    return search.Load(_Parts(trace, parts), name, seeds=parts, max_requests=len(trace) // parts)


@dataclass(frozen=True)
class _Parts:
    """Consecutive parts of a trace, one for each seed."""

    trace: Workload
    parts: int

    def __call__(self, seed: int, requests: int) -> Workload:
        trace, size = self.trace, len(self.trace) // self.parts
        return trace.take(np.arange(seed * size, seed * size + min(size, requests)))
