"""The tables of a scenario file, one class each."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from lengthwise.cost import HOST_NAMES, HostOverhead
from lengthwise.engine import COST_SOURCES
from lengthwise.scenario._arrivals import Arrivals
from lengthwise.scenario._decode import DecodeSection
from lengthwise.scenario._lengths import Length
from lengthwise.scenario._values import Count, NotNan, Seconds, Section, Share, Text, Wait, seconds

Rate = Annotated[NotNan, Field(gt=0)]
HostSeconds = Annotated[NotNan, BeforeValidator(seconds), Field(ge=0, le=60)]
FEWEST_DRAWS = 10
_SOURCES = "give one of: preset, trace, or both prompt (isl) and output (osl)"
_LOADS = 'say how requests arrive: request_rate, concurrency, or arrivals = "all_at_once"'


class WorkloadSection(Section):
    """Where requests come from: lengths of a preset, a trace or distributions, and arrivals.

    A trace alone is replayed with its own arrivals (times ``time_scale``); with ``request_rate``,
    ``concurrency`` or ``arrivals`` its lengths are drawn instead. A preset has arrivals of its own,
    too, which these replace. ``request_rate = inf`` sends all requests at once. The limits cut as
    ``cut`` says. ``num_requests`` None: 1,000, or all of a replayed trace, which cannot give more than it
    has. ``sort`` puts a trace's rows in order of arrival. ``tenants`` is how many tenants send the requests,
    or a list of the weights of their numbers of requests; a replayed trace keeps its own.
    """

    preset: Text | None = None
    trace: Text | None = None
    format: Text | None = None
    prompt: Length | None = None
    output: Length | None = None
    correlation: Annotated[float, Field(ge=-1, le=1)] = 0.0
    num_requests: Annotated[int, Field(ge=1, le=100_000_000)] | None = None
    request_rate: Rate | None = None
    concurrency: Count | None = None
    arrivals: Arrivals | None = None
    time_scale: Rate = 1.0
    sort: bool = False
    predicted: Literal["none", "oracle", "mean"] = "none"
    tenants: Annotated[int, Field(ge=1, le=10_000)] | Annotated[list[Rate], Field(min_length=1)] | None = None
    max_prompt_tokens: Count | None = None
    max_output_tokens: Count | None = None
    max_total_tokens: Annotated[int, Field(ge=2, le=2**31 - 1)] | None = None
    cut: Literal["output", "prompt", "proportional", "redraw"] = "output"

    @property
    def is_replay(self) -> bool:
        """Whether a trace's own arrivals are used."""
        return self.trace is not None and not self._loads()

    def _loads(self) -> list[str]:
        return [
            name for name in ("request_rate", "concurrency", "arrivals") if getattr(self, name) is not None
        ]

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sides = (self.prompt is not None) + (self.output is not None)
        sources = (self.preset is not None) + (self.trace is not None) + (sides > 0)
        if sources != 1 or sides == 1:
            raise ValueError(self._rival_sources() if sources > 1 else _SOURCES)
        return self

    def _rival_sources(self) -> str:
        """Which sources are there together, and how one of them is dropped."""
        there = [name for name in ("preset", "trace", "prompt", "output") if getattr(self, name) is not None]
        least = next(name for name in ("trace", "preset") if name in there)
        return (
            f"{', '.join(there[:-1])} and {there[-1]} cannot all say what requests look like; keep one of: preset, "
            f"trace, or both prompt (isl) and output (osl). --set workload.{least}=null drops the {least}"
        )

    @model_validator(mode="after")
    def _one_load(self) -> Self:
        loads = self._loads()
        if not loads and self.prompt is not None:
            raise ValueError(_LOADS)
        if "concurrency" in loads and len(loads) > 1:
            raise ValueError(f"concurrency (a closed loop) excludes {loads[0]} (an open one); keep one")
        if self.arrivals is not None and self.arrivals.needs_rate != (self.request_rate is not None):
            verb = "needs" if self.arrivals.needs_rate else "excludes"
            raise ValueError(f"arrivals of kind {self.arrivals.kind} {verb} request_rate")
        return self

    @model_validator(mode="after")
    def _replay_keys(self) -> Self:
        if self.time_scale != 1.0 and not self.is_replay:
            raise ValueError(
                "time_scale stretches the arrivals of a replayed trace; here nothing is replayed"
            )
        if self.trace is None and (self.format is not None or self.sort):
            raise ValueError("format and sort say how to read a trace, and there is no trace")
        if self.request_rate is not None and math.isinf(self.request_rate) and self.arrivals is not None:
            raise ValueError("request_rate = inf sends all requests at once and takes no arrivals")
        return self


class HostTable(Section):
    """Seconds that an engine's host adds to a step, and for each sequence in it; and that requests wait before it.

    ``request_s`` is of a request's own way in, ``queue_s`` of a front that takes one request at a time.
    """

    step_s: HostSeconds = HostOverhead().step_s
    sequence_s: HostSeconds = HostOverhead().sequence_s
    request_s: HostSeconds = 0.0
    queue_s: HostSeconds = 0.0


class DeploymentSection(Section):
    """What runs. ``model`` is a catalog name or a Hugging Face config.json.

    ``cost`` is a source of ``engine.deploy``, such as "roofline", "profile:FILE.parquet" (after which "#physics"
    names an estimator) or "vidur:DIR"; ``num_blocks`` overrides what the memory planner finds for the KV cache
    of a replica. ``host`` is what the engine's host adds to a step, and what a request waits before the engine:
    "default" keeps what ``cost`` says, "vllm", "sglang" and "trtllm" were fitted to measured deployments of these
    engines, and ``{ step_s = "300us", sequence_s = "9us", request_s = "20ms", queue_s = "2ms" }`` gives it yourself.
    ``[deployment.decode]`` are replicas apart that decode: those of this table then only prefill.
    """

    model: Text
    gpu: Text
    node: Text | None = None
    tp: Annotated[int, Field(ge=1, le=1024)] = 1
    pp: Annotated[int, Field(ge=1, le=1024)] = 1
    replicas: Annotated[int, Field(ge=1, le=100_000)] = 1
    cost: Text = "roofline"
    host: Text | HostTable = "default"
    memory_planner: Text = "lengthwise"
    weight_dtype: Text | None = None
    kv_dtype: Text | None = None
    num_blocks: Count | None = None
    decode: DecodeSection | None = None

    @field_validator("cost")
    @classmethod
    def _known_cost(cls, cost: str) -> str:
        shapes = {(known.partition(":")[0], ":" in known) for known in COST_SOURCES}
        source, colon, place = cost.partition(":")
        if (source, bool(place)) not in shapes or (colon and not place):
            raise ValueError(f"must be one of {', '.join(COST_SOURCES)}")
        return cost

    @field_validator("host")
    @classmethod
    def _known_host(cls, host: str | HostTable) -> str | HostTable:
        if isinstance(host, str) and host not in HOST_NAMES:
            raise ValueError(f"must be one of {', '.join(HOST_NAMES)}, or a table of step_s and sequence_s")
        return host


class EngineSection(Section):
    """The engine's limits under their vLLM names; ``timeout_s`` is when a client gives up.

    ``max_step_seqs = "per_stage"`` divides ``max_num_seqs`` by the pipeline stages, as Vidur does. ``max_in_flight``
    bounds the steps that are in a replica's pipeline at a time (none: as many as stages).

    The upper bounds are far above any engine's and keep a slip from asking for terabytes of tables.
    """

    max_num_seqs: Annotated[int, Field(ge=1, le=2**17)] = 256
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=2**22)] = 2048
    block_size: Annotated[int, Field(ge=1, le=2**16)] = 16
    gpu_memory_utilization: Share = 0.9
    max_model_len: Annotated[int, Field(ge=2, le=2**24)] | None = None
    max_step_seqs: Annotated[int, Field(ge=1, le=2**17)] | Literal["per_stage"] | None = None
    watermark: Annotated[NotNan, Field(ge=0, lt=1)] = 0.01
    timeout_s: Seconds = math.inf
    enable_prefix_caching: bool = False
    max_in_flight: Annotated[int, Field(ge=1, le=1024)] | None = None


class SchedulerSection(Section):
    """A named scheduler, single axes that differ from it, or a user's own policies.

    A value with a colon, "policies.py:shortest" or "package.module:shortest", names a Python object. One with
    brackets, "aged(weight=20)" or "bins(boundaries=[100, 300])", gives a policy its parameters. ``takeover``
    says whether a waiting request may take a running one's place. ``binning`` gathers arrivals of like
    predicted length into batches ("none" turns it off); "equal_mass(k=8)", "uniform_optimal(k=8)",
    "exponential(k=8)" and "learned(k=8)" take their boundaries from other requests of the same workload.
    ``max_wait_s`` bounds starvation: who has waited so long in all goes before all who have not, in order of
    arrival. ``batch_wait_s`` is how long the first of a bin waits for it to fill. ``window_tokens``: takeovers
    are looked for when somebody arrives who goes before all who wait, and again after so many steps.
    """

    policy: Text = "vllm_v1"
    rank: Text | None = None
    leave: Text | None = None
    batching: Text | None = None
    memory: Text | None = None
    preempt: Literal["recompute", "swap"] | None = None
    router: Text | None = None
    takeover: Text | None = None
    binning: Text | None = None
    max_wait_s: Wait | None = None
    batch_wait_s: Wait | None = None
    window_tokens: Count | None = None


class SloSection(Section):
    """What a request must meet to count as good: seconds, or texts such as "200ms".

    ``ttft``: time to first token. ``tpot`` (or itl): mean time between the request's tokens.
    ``jct`` (or e2e): arrival to last token.
    """

    ttft: Seconds | None = None
    tpot: Seconds | None = None
    jct: Seconds | None = None


class RunSection(Section):
    """How it is simulated: ``seeds`` runs from ``seed`` on; ``warmup_s`` is left out of the numbers.

    ``model_draws``: so many more runs, under cost tables that are off by as much as their errors say, tell how
    far the cost model moves each number. None: 16 for up to 50,000 requests; 0: none.
    """

    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    seeds: Annotated[int, Field(ge=1, le=10_000)] = 1
    warmup_s: Wait = 0.0
    time_limit_s: Seconds = math.inf
    strict: bool = False
    model_draws: Annotated[int, Field(ge=0, le=10_000)] | None = None

    @field_validator("model_draws")
    @classmethod
    def _enough_draws(cls, draws: int | None) -> int | None:
        if draws is not None and 0 < draws < FEWEST_DRAWS:
            raise ValueError(f"must be 0 (no model intervals) or at least {FEWEST_DRAWS}, to see both tails")
        return draws


class SearchSection(Section):
    """Which deployment to choose: what is optimised, what must hold, and among which configurations.

    ``limits`` maps metrics to bounds: ``ttft.p90 = "2s"``, ``goodput = 0.95``; with none that speaks of
    waiting, ``queueing_delay.p99 = "5s"`` is added. ``space`` maps settings to lists of values
    (``tp = [1, 2, 4]``); each entry of ``either`` has further settings, and every configuration takes one
    of the entries. ``deployment.replicas`` may be "fill": as many as ``max_gpus`` allows, or "auto": as few
    as hold the ``rate``. ``trials`` are of the strategy "bayesian".
    """

    objective: Literal[
        "requests_per_dollar", "cost_at_rate", "fewest_gpus", "goodput", "makespan", "energy"
    ] = "requests_per_dollar"
    rate: Rate | None = None
    max_gpus: Count | None = None
    limits: dict[str, Any] = Field(default_factory=dict)
    space: dict[str, Any] = Field(default_factory=dict)
    either: list[dict[str, Any]] = Field(default_factory=list)
    strategy: Literal["pruned", "exhaustive", "bayesian"] = "pruned"
    trials: Count = 100
    top: Count = 10
    precision: Annotated[NotNan, Field(gt=0, lt=1)] = 0.025
    seeds: Annotated[int, Field(ge=1, le=1000)] = 5
    sensitivity: bool = True


class VariantSection(Section):
    """One of several settings compared side by side: what differs from the rest of the file."""

    name: Text
    workload: dict[str, Any] = Field(default_factory=dict)
    deployment: dict[str, Any] = Field(default_factory=dict)
    engine: dict[str, Any] = Field(default_factory=dict)
    scheduler: dict[str, Any] = Field(default_factory=dict)
    predictor: dict[str, Any] = Field(default_factory=dict)
    search: dict[str, Any] = Field(default_factory=dict)

    @property
    def overrides(self) -> dict[str, dict[str, Any]]:
        """The tables that differ."""
        return self.model_dump(exclude={"name"}, exclude_defaults=True)
