"""The tables of a scenario file, one class each."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from lengthwise import policy, predict
from lengthwise.config.values import (
    Arrivals,
    Count,
    Length,
    NotNan,
    Seconds,
    Section,
    Share,
    Text,
    Wait,
    input_error_as_value_error,
    seconds,
)
from lengthwise.cost import HOST_NAMES, HostOverhead
from lengthwise.engine import COST_SOURCES
from lengthwise.schedule.controls import Strategy
from lengthwise.schema.errors import UnknownNameError

Rate = Annotated[NotNan, Field(gt=0)]
MAX_RATE_RPS = 1e6
HostSeconds = Annotated[NotNan, BeforeValidator(seconds), Field(ge=0, le=60)]
Seqs = Annotated[int, Field(ge=1, le=2**17)]
UpTo1024 = Annotated[int, Field(ge=1, le=1024)]
Replicas = Annotated[int, Field(ge=1, le=100_000)]
PreemptionMode = Literal["recompute", "swap"]
MIN_DRAWS = 10
_SOURCES = "give one of: preset, trace, or both prompt (isl) and output (osl)"
_LOADS = ("request_rate", "concurrency", "arrivals")


class DecodeSection(Section):
    """The decode side of a disaggregated deployment.

    ``max_num_seqs``, ``gpu_memory_utilization`` and engine settings without a key here are those of the prefill side.
    """

    tp: UpTo1024 = 1
    pp: UpTo1024 = 1
    replicas: Replicas = 1
    num_blocks: Count | None = None
    max_num_seqs: Seqs | None = None
    max_step_seqs: Seqs | None = None
    max_in_flight: UpTo1024 | None = None
    gpu_memory_utilization: Share | None = None
    link: Literal["node", "host"] = "node"  # between replicas of both sides; "host": through its memory
    kv_transfer: Wait = 0.0  # seconds that each request's KV transfer takes in addition
    one_at_a_time: bool = True  # False: transfers do not wait for one another
    batching: Text = "unified"
    memory: Text = "paged"
    preemption_mode: PreemptionMode = "recompute"
    router: Text = "round_robin"

    @property
    def limits(self) -> dict[str, Any]:
        """Return the engine limits that replace those of the prefill side."""
        given = self.model_dump(include={"max_num_seqs", "gpu_memory_utilization"}, exclude_none=True)
        return given | {"max_step_seqs": self.max_step_seqs, "max_in_flight": self.max_in_flight}


class WorkloadSection(Section):
    """Where requests come from: lengths of a preset, a trace or distributions, and arrivals."""

    preset: Text | None = None
    trace: Text | None = None
    format: Text | None = None
    prompt: Length | None = None
    output: Length | None = None
    correlation: Annotated[float, Field(ge=-1, le=1)] = 0.0
    num_requests: Annotated[int, Field(ge=1, le=100_000_000)] | None = None  # None: 1,000, or all of a replayed trace
    # A trace without request_rate, concurrency and arrivals is replayed; with one of them only its lengths are used.
    # They also replace a preset's arrivals.
    request_rate: Rate | None = None  # inf: all requests at once
    concurrency: Count | None = None
    arrivals: Arrivals | None = None
    time_scale: Rate = 1.0  # factor on the times of a replayed trace
    sort: bool = False  # put the rows of a trace in order of arrival
    predicted: Literal["none", "oracle", "mean"] = "none"
    # The number of tenants, or weights of their numbers of requests; a replayed trace keeps its own.
    tenants: Annotated[int, Field(ge=1, le=10_000)] | Annotated[list[Rate], Field(min_length=1)] | None = None
    max_prompt_tokens: Count | None = None
    max_output_tokens: Count | None = None
    max_total_tokens: Annotated[int, Field(ge=2, le=2**31 - 1)] | None = None
    cut: Literal["output", "prompt", "proportional", "redraw"] = "output"  # how requests above the limits are shortened

    @property
    def is_replay(self) -> bool:
        """Return whether a trace is replayed with its own arrivals."""
        return self.trace is not None and not self._loads()

    def _loads(self) -> list[str]:
        return [name for name in _LOADS if getattr(self, name) is not None]

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        given = [name for name in ("preset", "trace", "prompt", "output") if getattr(self, name) is not None]
        match given:
            case [] | ["prompt"] | ["output"]:
                raise ValueError(_SOURCES)
            case ["preset"] | ["trace"] | ["prompt", "output"]:
                return self
        removable = "trace" if "trace" in given else "preset"
        raise ValueError(
            f"{', '.join(given[:-1])} and {given[-1]} cannot all say what requests look like; keep one of: preset, "
            f"trace, or both prompt (isl) and output (osl). --set workload.{removable}=null drops the {removable}"
        )

    @model_validator(mode="after")
    def _check_arrivals(self) -> Self:
        loads = self._loads()
        if not loads and self.prompt is not None:
            raise ValueError('say how requests arrive: request_rate, concurrency, or arrivals = "all_at_once"')
        if "concurrency" in loads and len(loads) > 1:
            raise ValueError(f"concurrency (a closed loop) excludes {loads[0]} (an open one); keep one")
        if self.arrivals is not None and self.arrivals.needs_rate != (self.request_rate is not None):
            verb = "needs" if self.arrivals.needs_rate else "excludes"
            raise ValueError(f"arrivals of kind {self.arrivals.kind} {verb} request_rate")
        if self.time_scale != 1.0 and not self.is_replay:
            raise ValueError("time_scale stretches the arrivals of a replayed trace; this workload replays none")
        if self.trace is None and (self.format is not None or self.sort):
            raise ValueError("format and sort say how to read a trace, and there is no trace")
        if MAX_RATE_RPS < (self.request_rate or 0) < math.inf:
            raise ValueError(f"request_rate must be at most {MAX_RATE_RPS:,.0f} a second, or inf: all requests at once")
        if self.request_rate is not None and math.isinf(self.request_rate) and self.arrivals is not None:
            raise ValueError("request_rate = inf sends all requests at once and takes no arrivals")
        return self


class HostTable(Section):
    """Seconds that an engine's host adds to each step, to each sequence in it, and to each request before it enters."""

    step_s: HostSeconds = HostOverhead().step_s
    sequence_s: HostSeconds = HostOverhead().sequence_s
    request_s: HostSeconds = 0.0  # delays each request on its own
    serial_s: HostSeconds = 0.0  # service time of a front end that takes one request at a time


class DeploymentSection(Section):
    """What runs.

    ``host`` is what the engine's host adds to a step, and how long a request waits in front of the engine: "default"
    takes what ``cost`` says; "vllm", "sglang" and "trtllm" are fitted to measured deployments of these engines; ``{
    step_s = "300us", sequence_s = "9us", request_s = "20ms", serial_s = "2ms" }`` sets it.
    """

    model: Text  # name of the catalog, or a Hugging Face config.json
    gpu: Text
    node: Text | None = None
    tp: UpTo1024 = 1
    pp: UpTo1024 = 1
    replicas: Replicas = 1
    cost: Text = "roofline"  # a source of ``engine.deploy``, such as "profile:FILE.parquet#ESTIMATOR" or "vidur:DIR"
    host: Text | HostTable = "default"
    memory_planner: Text = "lengthwise"
    weight_dtype: Text | None = None
    kv_dtype: Text | None = None
    # usable KV blocks of a replica instead of the planned number; vLLM's number less 1 (its null block)
    num_blocks: Count | None = None
    decode: DecodeSection | None = None  # replicas that decode; those of this table then only prefill

    @property
    def gpus(self) -> int:
        """Return the GPUs of all replicas, without those of a decode side."""
        return self.tp * self.pp * self.replicas

    @property
    def host_overhead(self) -> str | HostOverhead:
        """Return the overhead of the engine's host: a name of ``cost.HOST_NAMES``, or its seconds."""
        return self.host if isinstance(self.host, str) else HostOverhead(**self.host.model_dump())

    @field_validator("cost")
    @classmethod
    def _check_cost(cls, cost: str) -> str:
        shapes = {(known.partition(":")[0], ":" in known) for known in COST_SOURCES}
        source, colon, place = cost.partition(":")
        if (source, bool(place)) not in shapes or (colon and not place):
            raise ValueError(f"must be one of {', '.join(COST_SOURCES)}")
        return cost

    @field_validator("host")
    @classmethod
    def _check_host(cls, host: str | HostTable) -> str | HostTable:
        if isinstance(host, str) and host not in HOST_NAMES:
            raise ValueError(f"must be one of {', '.join(HOST_NAMES)}, or a table of step_s and sequence_s")
        return host


class EngineSection(Section):
    """The engine's limits under their vLLM names; bounds keep a typo from allocating terabytes."""

    max_num_seqs: Seqs = 256
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=2**22)] = 2048
    block_size: Annotated[int, Field(ge=1, le=2**16)] = 16
    gpu_memory_utilization: Share = 0.9
    max_model_len: Annotated[int, Field(ge=2, le=2**24)] | None = None
    max_step_seqs: Seqs | Literal["per_stage"] | None = None  # "per_stage": max_num_seqs / pipeline stages, as in Vidur
    # Share of the KV blocks that admission keeps free; None: 0.01 for paged and paged_strict (vLLM v0, Vidur), else 0.
    watermark: Annotated[NotNan, Field(ge=0, lt=1)] | None = None
    timeout_s: Seconds = math.inf  # when a client gives up
    enable_prefix_caching: bool = False
    max_in_flight: UpTo1024 | None = None  # steps in a replica's pipeline at a time; None: as many as stages


class SchedulerSection(Section):
    """A named scheduler, single axes that differ from it, or a user's own policies.

    A value with a colon, "policies.py:shortest" or "package.module:shortest", names a Python object. One with brackets,
    "aged(weight=20)" or "bins(boundaries=[100, 300])", gives a policy its parameters. ``binning`` gathers arrivals of
    similar predicted length into batches ("none" turns it off); "equal_mass(k=8)", "uniform_optimal(k=8)",
    "exponential(k=8)" and "learned(k=8)" take their boundaries from other requests of the same workload.
    """

    policy: Text = "vllm_v1"
    rank: Text | None = None
    victim: Text | None = None
    batching: Text | None = None
    memory: Text | None = None
    preemption_mode: PreemptionMode | None = None
    router: Text | None = None
    preemption: Text | None = None  # whether a waiting request may preempt a running one
    binning: Text | None = None
    max_wait_s: Wait | None = None  # requests that have waited longer in total precede all others, in order of arrival
    batch_wait_s: Wait | None = None  # how long the first request of a bin waits for the bin to fill
    preemption_interval_steps: Count | None = None  # steps after which preemption is considered again


class SloSection(Section):
    """What a request must meet to count as good: seconds, or texts such as "200ms"."""

    ttft: Seconds | None = None  # time to first token
    tpot: Seconds | None = None  # (finish - first token) / (output tokens - 1)
    jct: Seconds | None = None  # or e2e: arrival to last token


class RunSection(Section):
    """``seeds`` runs from ``seed`` on; requests before ``warmup_s`` count only in TBT, rates and hardware."""

    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    seeds: Annotated[int, Field(ge=1, le=10_000)] = 1
    warmup_s: Wait = 0.0
    time_limit_s: Seconds = math.inf
    strict: bool = False
    # Runs under cost tables perturbed by their errors; None: 16 for up to 50,000 requests.
    model_draws: Annotated[int, Field(ge=0, le=10_000)] | None = None

    @field_validator("model_draws")
    @classmethod
    def _check_draws(cls, draws: int | None) -> int | None:
        if 0 < (draws or 0) < MIN_DRAWS:
            raise ValueError(f"must be 0 (no model intervals) or at least {MIN_DRAWS}, to see both tails")
        return draws


class SearchSection(Section):
    """Which deployment to choose: what is optimised, what must hold, and among which configurations."""

    objective: Literal["requests_per_dollar", "cost_at_rate", "fewest_gpus", "goodput", "makespan", "energy"] = (
        "requests_per_dollar"
    )
    rate: Annotated[Rate, Field(le=MAX_RATE_RPS)] | None = None  # None: the workload's, or (for energy) the capacity
    max_gpus: Count | None = None
    limits: dict[str, Any] = Field(default_factory=dict)  # ttft.p90 = "2s"; waiting is limited by default
    # ``deployment.replicas`` may be "fill": as many as max_gpus allows, or "auto": the fewest for the limits at rate.
    space: dict[str, Any] = Field(default_factory=dict)  # lists of values by setting: ``tp = [1, 2, 4]``
    any_of: list[dict[str, Any]] = Field(default_factory=list)  # further settings; a configuration takes one entry
    strategy: Literal["pruned", "exhaustive", "bayesian"] = "pruned"
    trials: Count = 100  # of the strategy "bayesian"
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
        """Return the tables that differ."""
        return self.model_dump(exclude={"name"}, exclude_defaults=True)


Kind = Literal[
    "none", "oracle", "constant", "ecdf", "bucket_ecdf", "lognormal_error", "bin_neighbour", "confusion",
    "quantised", "same", "reversed", "model", "default",
]  # fmt: skip
# By kind: the class, the keys that it needs, and those that it may have.
_PREDICTORS: dict[str, tuple[Any, tuple[str, ...], tuple[str, ...]]] = {
    "none": (None, (), ()),
    "oracle": (predict.Oracle, (), ()),
    "constant": (predict.Constant, (), ("tokens", "conditional")),
    "ecdf": (predict.Ecdf, (), ("conditional",)),
    "bucket_ecdf": (predict.BucketEcdf, (), ("buckets", "conditional")),
    "lognormal_error": (predict.LogNormalError, ("sigma",), ("bias", "half_life_tokens", "exact_lengths")),
    "bin_neighbour": (predict.BinNeighbour, ("boundaries", "p"), ("split", "half_life_tokens")),
    "confusion": (predict.Confusion, ("boundaries", "matrix"), ()),
    "quantised": (predict.Quantised, ("boundaries",), ()),
    "same": (predict.Same, (), ("tokens",)),
    "reversed": (predict.Reversed, (), ("pivot",)),
    "model": (None, ("file",), ("conditional",)),
    "default": (None, (), ("conditional",)),
}
PARAMETERS = {kind: (*needed, *optional) for kind, (_, needed, optional) in _PREDICTORS.items()}
_COMMON = ("name", "kind", "window_tokens", "statistic", "update_predictions")
LAST_CLASS_RATIO = 2.0
"""Where only the lengths between classes are given, the last class ends at the last of them times this ratio."""
_Positive = Annotated[NotNan, Field(gt=0, le=1e9)]


class PredictorSection(Section):
    """The predictor of output lengths, which runs at first and again after every ``window_tokens`` of output.

    "oracle" knows the lengths; "lognormal_error", "bin_neighbour", "confusion" and "quantised" know them with an error
    (``sigma`` and ``bias`` of the logarithm; ``p`` on each side, ``split``; a ``matrix`` of true by predicted classes;
    the class alone). "same" predicts ``tokens`` for every request, and "reversed" ``pivot`` squared over the length.
    "constant", "ecdf" and "bucket_ecdf" (by prompt length) learn from other requests of the same [workload], drawn with
    another seed. "model" is a trained predictor's ``file``, "default" the one that comes with lengthwise.
    """

    kind: Kind = "none"
    file: Text | None = None
    tokens: Annotated[NotNan, Field(ge=1, le=1e9)] | None = None
    buckets: UpTo1024 = 8
    sigma: Annotated[NotNan, Field(ge=0, le=10)] | None = None
    bias: Annotated[NotNan, Field(ge=-10, le=10)] = 0.0
    half_life_tokens: _Positive | None = None  # tokens after which an error halves
    exact_lengths: bool = False
    # The boundaries of the classes of lengths: all of them in increasing order, the inner ones alone, or the number of
    # classes, which then hold equally many requests of the same workload.
    boundaries: list[float] | Annotated[int, Field(ge=1, le=4096)] | None = None
    p: Annotated[NotNan, Field(ge=0, le=0.5)] | None = None
    split: Annotated[NotNan, Field(ge=0, le=1)] = 0.5
    matrix: list[list[float]] | None = None
    pivot: Annotated[NotNan, Field(ge=1, le=1e5)] = 256.0
    conditional: bool = False  # predicts once, then conditions on the tokens so far
    window_tokens: Count = 50
    statistic: Text = "mean"  # "mean", "median", a quantile ("q0.9"), or "tail_inflated"
    update_predictions: bool = True

    @property
    def is_random(self) -> bool:
        """Return whether another seed gives other predictions of the same requests."""
        return self.kind in ("lognormal_error", "bin_neighbour", "confusion")

    @property
    def requires_training(self) -> bool:
        """Return whether the predictor must learn from other requests first."""
        learns = self.kind in ("ecdf", "bucket_ecdf") or (self.kind == "constant" and self.tokens is None)
        return learns or isinstance(self.boundaries, int)

    @field_validator("statistic")
    @classmethod
    def _check_statistic(cls, statistic: str) -> str:
        with input_error_as_value_error():
            predict.statistic_of(statistic)
        return statistic

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        known = (*_COMMON, *PARAMETERS[self.kind])
        for key in self.model_fields_set:
            if key not in known and getattr(self, key) != type(self).model_fields[key].default:
                takes = ", ".join(PARAMETERS[self.kind]) or "none of its own"
                raise ValueError(f"{key} is not of kind {self.kind}, which takes {takes}")
        for key in _PREDICTORS[self.kind][1]:
            if getattr(self, key) is None:
                raise ValueError(f"{self.kind} needs {key}")
        if _PREDICTORS[self.kind][0] is not None:
            with input_error_as_value_error():
                self.build()
        return self

    def build(self) -> Any:
        """Return the predictor, untrained; not for the kinds "none", "model" and "default"."""
        own = {key: getattr(self, key) for key in PARAMETERS[self.kind] if key not in ("conditional", "buckets")}
        if self.kind == "same" and self.tokens is None:
            own = {}
        elif self.kind == "bucket_ecdf":
            own = {"by": ("model", "prompt_tokens"), "buckets": self.buckets}
        if isinstance(edges := own.get("boundaries"), list):
            # Boundaries go from the smallest length to the largest; add these two where only inner ones are given.
            inner = len(edges) == 1 or (self.matrix is not None and len(edges) == len(self.matrix) - 1)
            own["boundaries"] = [0.0, *edges, LAST_CLASS_RATIO * edges[-1]] if inner and min(edges) > 0 else edges
        return _PREDICTORS[self.kind][0](**own)


_QUANTILE = re.compile(r"p([0-9]{1,2}(?:\.[0-9]+)?)")
_FIXED = re.compile(r"([1-9][0-9]{0,6}) tokens?")


class ScheduleSection(Section):
    """Which schedule to choose: under what latency bound, on how many GPUs, among which strategies.

    ``latency_bound`` applies to outputs of the length ``bound_for`` ("p99": all but one in a hundred are no longer; "80
    tokens": that length, which some output must have), from the start of their prefill to the last token. With
    ``worst_case`` the latency is that of batches so heavy that only one in a hundred (p99) is heavier, else the
    expected one. ``strategies``: "rra" (every GPU prefills and decodes, in phases), "waa-c" and "waa-m" (some GPUs
    prefill, the others decode, split by computation or by memory). ``threshold``: prefill batches are resized so that
    the tokens of their prompts stay within this share of their mean, and the decode batch within it of its own
    (ExeGPT's dynamic adjustment); None: prefill batches have B_E requests.
    """

    latency_bound: Seconds = math.inf
    bound_for: Text = "p99"
    gpus: Count | None = None  # None: tp x pp x replicas of [deployment]
    strategies: list[Text] = Field(default_factory=lambda: [one.value for one in Strategy], min_length=1)
    worst_case: bool = True
    threshold: Annotated[NotNan, Field(gt=0, lt=1)] | None = None
    # Other systems, or "all", to compare with; each is simulated in all its configurations (seconds to a minute).
    baselines: list[Text] = Field(default_factory=list)
    dram_gb_s: Annotated[NotNan, Field(gt=0, lt=1e6)] | None = None  # reloads weights; None: 4.9, or ExeGPT's
    ssd_gb_s: Annotated[NotNan, Field(gt=0, lt=1e6)] | None = None  # from the drives of a node; None: 7.3

    @field_validator("bound_for")
    @classmethod
    def _check_bound_for(cls, text: str) -> str:
        found = _QUANTILE.fullmatch(text)
        if not _FIXED.fullmatch(text) and (not found or not 50 <= float(found[1]) < 100):
            quantile = 'a quantile of the outputs from p50 to below p100, such as "p99" or "p99.9"'
            raise ValueError(f'must be {quantile}, or a fixed length such as "80 tokens"')
        return text

    @field_validator("strategies")
    @classmethod
    def _check_strategies(cls, names: list[str]) -> list[str]:
        return _all_known("strategy", names, [one.value for one in Strategy])

    @field_validator("baselines")
    @classmethod
    def _check_baselines(cls, names: list[str]) -> list[str]:
        from lengthwise.schedule.baselines import SYSTEMS

        return _all_known("system", names, ["all", *SYSTEMS])

    @property
    def systems(self) -> tuple[str, ...]:
        """Return the systems to compare with, each once."""
        from lengthwise.schedule.baselines import SYSTEMS

        return SYSTEMS if "all" in self.baselines else tuple(dict.fromkeys(self.baselines))

    @property
    def level(self) -> float:
        """Return the quantile as a share; for a bound of a fixed length, that of batches alone."""
        return 0.99 if self.output_tokens else float(self.bound_for[1:]) / 100

    @property
    def output_tokens(self) -> int | None:
        """Return the fixed length that the bound is for; None for a quantile."""
        found = _FIXED.fullmatch(self.bound_for)
        return int(found[1]) if found else None


def _all_known(kind: str, names: list[str], known: list[str]) -> list[str]:
    for name in names:
        if name not in known:
            raise ValueError(str(UnknownNameError(kind, name, known)))
    return names


Load = Annotated[NotNan, Field(gt=0, le=1e6)]


class LabPolicy(SchedulerSection):
    """A scheduler to try: keys of [scheduler], and a name."""

    name: Text | None = None
    # Sets max_wait_s to this multiple of the 99th percentile of JCT under FCFS at the same load and batch size.
    max_wait_factor: Annotated[NotNan, Field(gt=0, le=1e6)] | None = None

    @property
    def title(self) -> str:
        """Return the name, or the settings of the file as a text."""
        return self.name or _title(self, "policy", "rank")


class LabPredictor(PredictorSection):
    """A predictor to try: keys of [predictor], and a name."""

    name: Text | None = None

    @property
    def title(self) -> str:
        """Return the name, or the settings of the file as a text."""
        return self.name or _title(self, "kind", "file")


class LabSection(Section):
    """What ``lengthwise lab`` tries: every policy with every predictor, at every load and batch size.

    A policy is the name of a scheduler ("srtf"), a rank ("aged(weight=20)"), or a table of keys of [scheduler], on top
    of the scenario's own where ``policy`` is not among them. A predictor is a kind ("oracle") or a table of keys of
    [predictor]. FCFS and shortest-first with known lengths always run: they are the ends of the gap.
    """

    policies: list[LabPolicy] = Field(
        default_factory=lambda: [LabPolicy(policy=name) for name in ("sjf", "isrtf")], min_length=1
    )
    predictors: list[LabPredictor] = Field(default_factory=lambda: [LabPredictor(kind="oracle")])
    loads: Annotated[list[Load], Field(min_length=1)] | None = None
    # of loads; 1: FCFS's capacity, or batch size divided by a request's mean time alone
    unit: Literal["capacity", "isolated"] = "capacity"
    rates: Annotated[list[Load], Field(min_length=1)] | None = None  # requests/s
    batch_sizes: Annotated[list[Count], Field(min_length=1)] | None = None
    seeds: Annotated[int, Field(ge=1, le=1000)] = 5

    @field_validator("policies", mode="before")
    @classmethod
    def _expand_policies(cls, given: Any) -> Any:
        if not isinstance(given, list):
            return given
        named = policy.named()
        return [{"policy" if one in named else "rank": one} if isinstance(one, str) else one for one in given]

    @field_validator("predictors", mode="before")
    @classmethod
    def _expand_predictors(cls, given: Any) -> Any:
        return [{"kind": one} if isinstance(one, str) else one for one in given] if isinstance(given, list) else given

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.loads is not None and self.rates is not None:
            raise ValueError("loads (shares of capacity) and rates (requests/s) exclude each other; keep one")
        _require_distinct("policies", [one.title for one in self.policies])
        _require_distinct("predictors", [one.title for one in self.predictors])
        for one in self.predictors:
            if one.kind == "none":
                raise ValueError('a predictor of kind "none" predicts nothing; policies that need none run once anyway')
            if one.title == "oracle" and one.kind != "oracle":
                raise ValueError('the name "oracle" is for the predictor that knows the lengths; give another')
        return self


def _title(section: Section, *bare: str) -> str:
    """Return what was set: the values of the keys ``bare`` first, the other keys as key=value."""
    settings = section.model_dump(exclude_unset=True, exclude_none=True, exclude={"name"})
    first = [str(settings.pop(key)) for key in bare if key in settings]

    def text(value: Any) -> str:
        plain = str(value).lower() if isinstance(value, bool) else str(value)
        return f"{value:g}" if isinstance(value, float) else plain

    return " ".join([*first, *(f"{key}={text(value)}" for key, value in settings.items())]) or "as the scenario"


def _require_distinct(kind: str, names: Sequence[str]) -> None:
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two {kind} are called {repeated[0]!r}; give each a name of its own")
