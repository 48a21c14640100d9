"""The tables of a scenario file, one class each."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from lengthwise import policy, predict
from lengthwise.config.values import Arrivals, Count, Length, NotNan, Seconds, Section, Share, Text, Wait, seconds
from lengthwise.cost import HOST_NAMES, HostOverhead
from lengthwise.engine import COST_SOURCES
from lengthwise.schedule.controls import Strategy
from lengthwise.schema.errors import InputError, UnknownNameError


class DecodeSection(Section):
    """How what decodes apart is cut and limited, and how requests get there; the rest is as in the file.

    ``link``: "node" is what joins a replica of each side (inside a node where they fit into one, else its network),
    "host" the host's memory, written and read; ``kv_transfer`` are seconds that each request's transfer takes on top.
    ``one_at_a_time = false``: transfers do not wait for one another.
    """

    tp: Annotated[int, Field(ge=1, le=1024)] = 1
    pp: Annotated[int, Field(ge=1, le=1024)] = 1
    replicas: Annotated[int, Field(ge=1, le=100_000)] = 1
    num_blocks: Count | None = None
    max_num_seqs: Annotated[int, Field(ge=1, le=2**17)] | None = None
    max_step_seqs: Annotated[int, Field(ge=1, le=2**17)] | None = None
    max_in_flight: Annotated[int, Field(ge=1, le=1024)] | None = None
    gpu_memory_utilization: Share | None = None
    link: Literal["node", "host"] = "node"
    kv_transfer: Wait = 0.0
    one_at_a_time: bool = True
    batching: Text = "unified"
    memory: Text = "paged"
    preempt: Literal["recompute", "swap"] = "recompute"
    router: Text = "round_robin"

    @property
    def limits(self) -> dict[str, Any]:
        """The engine's limits that are its own."""
        names = ("max_num_seqs", "max_step_seqs", "max_in_flight", "gpu_memory_utilization")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {"max_step_seqs": None, "max_in_flight": None} | given


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
        return [name for name in ("request_rate", "concurrency", "arrivals") if getattr(self, name) is not None]

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
            raise ValueError("time_scale stretches the arrivals of a replayed trace; here nothing is replayed")
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
    (``tp = [1, 2, 4]``); each entry of ``any_of`` has further settings, and every configuration takes one
    of the entries. ``deployment.replicas`` may be "fill": as many as ``max_gpus`` allows, or "auto": as few
    as hold the ``rate``. ``trials`` are of the strategy "bayesian".
    """

    objective: Literal["requests_per_dollar", "cost_at_rate", "fewest_gpus", "goodput", "makespan", "energy"] = (
        "requests_per_dollar"
    )
    rate: Rate | None = None
    max_gpus: Count | None = None
    limits: dict[str, Any] = Field(default_factory=dict)
    space: dict[str, Any] = Field(default_factory=dict)
    any_of: list[dict[str, Any]] = Field(default_factory=list)
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


Kind = Literal[
    "none", "oracle", "constant", "ecdf", "bucket_ecdf", "lognormal_error", "bin_neighbour", "confusion",
    "quantised", "same", "reversed", "model", "default",
]  # fmt: skip
PARAMETERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "oracle": (),
    "constant": ("tokens", "conditional"),
    "ecdf": ("conditional",),
    "bucket_ecdf": ("buckets", "conditional"),
    "lognormal_error": ("sigma", "bias", "half_life_tokens", "exact_lengths"),
    "bin_neighbour": ("boundaries", "p", "split", "half_life_tokens"),
    "confusion": ("boundaries", "matrix"),
    "quantised": ("boundaries",),
    "same": ("tokens",),
    "reversed": ("pivot",),
    "model": ("file", "conditional"),
    "default": ("conditional",),
}
_OF_ALL = ("name", "kind", "window_tokens", "statistic", "update_predictions")
_NEEDED = {
    "lognormal_error": ("sigma",),
    "bin_neighbour": ("boundaries", "p"),
    "confusion": ("boundaries", "matrix"),
    "quantised": ("boundaries",),
    "model": ("file",),
}
OUTERMOST = 2.0
"""Where only the lengths between classes are given, the last class is believed to end at so many times the last."""
_LEARNING = ("ecdf", "bucket_ecdf")
_Positive = Annotated[NotNan, Field(gt=0, le=1e9)]


class PredictorSection(Section):
    """Who predicts output lengths, at first and again after every ``window_tokens`` of output.

    Of what: "oracle" knows them; "lognormal_error", "bin_neighbour", "confusion" and "quantised" know them
    with an error (``sigma`` and ``bias`` of the logarithm; ``p`` on each side, ``split``; a ``matrix`` of
    true by said classes; the class alone), "same" says ``tokens`` of every request and "reversed"
    ``pivot`` squared over the length. "constant", "ecdf" and "bucket_ecdf" (by prompt length) learn from other
    requests of the same [workload], drawn with another seed, never from the requests themselves.
    "model" is a trained predictor's ``file``, "default" the one that comes with lengthwise.
    ``boundaries`` are growing lengths, or into how many equally full classes lengths fall;
    those between the classes do as well where there is one, or one fewer than the ``matrix`` has rows. An error halves
    every ``half_life_tokens``. ``conditional`` asks once and then lets survival alone tell what is left.
    ``statistic`` is what policies are told of the distribution: "mean", "median", a quantile ("q0.9"), or
    "tail_inflated".
    """

    kind: Kind = "none"
    file: Text | None = None
    tokens: Annotated[NotNan, Field(ge=1, le=1e9)] | None = None
    buckets: Annotated[int, Field(ge=1, le=1024)] = 8
    sigma: Annotated[NotNan, Field(ge=0, le=10)] | None = None
    bias: Annotated[NotNan, Field(ge=-10, le=10)] = 0.0
    half_life_tokens: _Positive | None = None
    exact_lengths: bool = False
    boundaries: list[float] | Annotated[int, Field(ge=1, le=4096)] | None = None
    p: Annotated[NotNan, Field(ge=0, le=0.5)] | None = None
    split: Annotated[NotNan, Field(ge=0, le=1)] = 0.5
    matrix: list[list[float]] | None = None
    pivot: Annotated[NotNan, Field(ge=1, le=1e5)] = 256.0
    conditional: bool = False
    window_tokens: Count = 50
    statistic: Text = "mean"
    update_predictions: bool = True

    @property
    def has_chance(self) -> bool:
        """Whether another seed gives other predictions of the same requests."""
        return self.kind in ("lognormal_error", "bin_neighbour", "confusion")

    @property
    def requires_training(self) -> bool:
        """Whether it must see other requests first."""
        counted = isinstance(self.boundaries, int)
        return self.kind in _LEARNING or counted or (self.kind == "constant" and self.tokens is None)

    @field_validator("statistic")
    @classmethod
    def _known_statistic(cls, statistic: str) -> str:
        try:
            predict.statistic_of(statistic)
        except InputError as error:
            raise ValueError(str(error)) from error
        return statistic

    @model_validator(mode="after")
    def _keys_of_its_kind(self) -> Self:
        known = (*_OF_ALL, *PARAMETERS[self.kind])
        defaults = type(self).model_fields
        for key in self.model_fields_set:
            if key not in known and getattr(self, key) != defaults[key].default:
                takes = ", ".join(PARAMETERS[self.kind]) or "none of its own"
                raise ValueError(f"{key} is not of kind {self.kind}, which takes {takes}")
        for key in _NEEDED.get(self.kind, ()):
            if getattr(self, key) is None:
                raise ValueError(f"{self.kind} needs {key}")
        return self

    @model_validator(mode="after")
    def _buildable(self) -> Self:
        try:
            if self.kind not in ("none", "model", "default"):
                self.made()
        except InputError as error:
            raise ValueError(str(error)) from error
        return self

    def made(self) -> Any:
        """The predictor as its kind says, before it has learnt; not of "none", "model" and "default"."""
        own = {key: getattr(self, key) for key in PARAMETERS[self.kind] if key not in ("conditional", "buckets")}
        if isinstance(self.boundaries, list) and "boundaries" in own:
            own["boundaries"] = self._edges(self.boundaries)
        if self.kind == "same" and self.tokens is None:
            own = {}
        if self.kind == "bucket_ecdf":
            own = {"by": ("model", "prompt_tokens"), "buckets": self.buckets}
        return _CLASSES[self.kind](**own)

    def _edges(self, given: list[float]) -> list[float]:
        """Boundaries from the least length to the greatest; those between classes alone get outer ones."""
        inner = len(given) == 1 or (self.matrix is not None and len(given) == len(self.matrix) - 1)
        return [0.0, *given, OUTERMOST * given[-1]] if inner and min(given) > 0 else given


_CLASSES: dict[str, Any] = {
    "oracle": predict.Oracle,
    "constant": predict.Constant,
    "ecdf": predict.Ecdf,
    "bucket_ecdf": predict.BucketEcdf,
    "lognormal_error": predict.LogNormalError,
    "bin_neighbour": predict.BinNeighbour,
    "confusion": predict.Confusion,
    "quantised": predict.Quantised,
    "same": predict.Same,
    "reversed": predict.Reversed,
}


_QUANTILE = re.compile(r"p([0-9]{1,2}(?:\.[0-9]+)?)")
_FIXED = re.compile(r"([1-9][0-9]{0,6}) tokens?")


class ScheduleSection(Section):
    """Which schedule to choose: under what latency bound, on how many GPUs, among which strategies.

    ``latency_bound`` is held for outputs as long as ``bound_for`` says ("p99": all but one in a hundred are no
    longer; "80 tokens": that long, however lengths move; some output must be), from the start of their encoding to the
    last token; inf: none. With ``worst_case`` it holds when batches are as heavy as the same share of them are at most,
    else for the expected latency. ``gpus`` None: as many as [deployment] has (tp x pp x replicas). ``strategies``:
    "rra" (every GPU encodes and decodes, in phases), "waa-c" and "waa-m" (some GPUs encode, the others decode, split by
    computation or by memory).
    ``threshold``: encodings are resized so that the tokens of their prompts stay within this share of their mean, and
    the decode batch within it of its own (ExeGPT's dynamic adjustment). The plan counts on that of encodings, as near
    as whole prompts come, and what runs it does both. None: encodings have B_E requests.
    ``baselines``: other systems that the choice is held against, or "all" of them: "fastertransformer",
    "deepspeed-inference", "orca", "vllm" (v0), "sarathi", "vllm-v1", "vllm-v1-disaggregated" (some replicas prefill,
    the others decode); each is simulated in all its configurations, which takes seconds to a minute.
    ``dram_gb_s``, ``ssd_gb_s``: how fast weights are loaded anew, in 1e9 bytes a second: from host memory to each GPU,
    and from the drives of each node. None: what ExeGPT measured (its seconds for its own models, else 4.9 and 7.3).
    """

    latency_bound: Seconds = math.inf
    bound_for: Text = "p99"
    gpus: Count | None = None
    strategies: list[Text] = Field(default_factory=lambda: [one.value for one in Strategy], min_length=1)
    worst_case: bool = True
    threshold: Annotated[NotNan, Field(gt=0, lt=1)] | None = None
    baselines: list[Text] = Field(default_factory=list)
    dram_gb_s: Annotated[NotNan, Field(gt=0, lt=1e6)] | None = None
    ssd_gb_s: Annotated[NotNan, Field(gt=0, lt=1e6)] | None = None

    @field_validator("bound_for")
    @classmethod
    def _quantile(cls, text: str) -> str:
        found = _QUANTILE.fullmatch(text)
        if not _FIXED.fullmatch(text) and (not found or not 50 <= float(found[1]) < 100):
            raise ValueError(
                'must be a quantile of the outputs from p50 to below p100, such as "p99" or "p99.9", '
                'or a fixed length such as "80 tokens"'
            )
        return text

    @field_validator("strategies")
    @classmethod
    def _known(cls, names: list[str]) -> list[str]:
        known = [one.value for one in Strategy]
        for name in names:
            if name not in known:
                raise ValueError(str(UnknownNameError("strategy", name, known)))
        return names

    @field_validator("baselines")
    @classmethod
    def _systems(cls, names: list[str]) -> list[str]:
        from lengthwise.schedule.baselines import SYSTEMS

        for name in names:
            if name not in ("all", *SYSTEMS):
                raise ValueError(str(UnknownNameError("system", name, ["all", *SYSTEMS])))
        return names

    @property
    def systems(self) -> tuple[str, ...]:
        """The systems that are meant, each once."""
        from lengthwise.schedule.baselines import SYSTEMS

        return SYSTEMS if "all" in self.baselines else tuple(dict.fromkeys(self.baselines))

    @property
    def level(self) -> float:
        """The quantile as a share; of batches alone where the bound is for a fixed length."""
        return 0.99 if self.output_tokens else float(self.bound_for[1:]) / 100

    @property
    def output_tokens(self) -> int | None:
        """The fixed length that the bound is for; None: it is for a quantile."""
        found = _FIXED.fullmatch(self.bound_for)
        return int(found[1]) if found else None


Load = Annotated[NotNan, Field(gt=0, le=1e6)]


class LabPolicy(SchedulerSection):
    """A scheduler that is tried: keys of [scheduler], and a name.

    ``longest_wait`` sets ``max_wait_s`` to so many times the 99th percentile of JCT under FCFS at the same load.
    """

    name: Text | None = None
    longest_wait: Annotated[NotNan, Field(gt=0, le=1e6)] | None = None

    @property
    def title(self) -> str:
        """The name, or what the file says of it."""
        return self.name or _title(self, "policy", "rank")


class LabPredictor(PredictorSection):
    """A predictor that is tried: keys of [predictor], and a name."""

    name: Text | None = None

    @property
    def title(self) -> str:
        """The name, or what the file says of it."""
        return self.name or _title(self, "kind", "file")


class LabSection(Section):
    """What ``lengthwise lab`` tries: every policy with every predictor, at every load and batch size.

    A policy is the name of a scheduler ("srtf"), a rank ("aged(weight=20)"), or a table of keys of
    [scheduler], on top of the scenario's own where ``policy`` is not among them; with ``longest_wait``
    nobody waits longer than so many times FCFS' 99th percentile. A predictor is a kind ("oracle") or a
    table of keys of [predictor]. ``loads`` are shares of what FCFS sustains (``unit`` "capacity"), or
    multiples of batch size / mean time of a request alone ("alone", ELIS); ``rates`` are requests a
    second. FCFS and the shortest first with lengths known run in any case: the ends of the gap.
    """

    policies: Annotated[list[LabPolicy], Field(min_length=1)] = Field(
        default_factory=lambda: [LabPolicy(policy="sjf"), LabPolicy(policy="isrtf")]
    )
    predictors: list[LabPredictor] = Field(default_factory=lambda: [LabPredictor(kind="oracle")])
    loads: Annotated[list[Load], Field(min_length=1)] | None = None
    unit: Literal["capacity", "isolated"] = "capacity"
    rates: Annotated[list[Load], Field(min_length=1)] | None = None
    batch_sizes: Annotated[list[Count], Field(min_length=1)] | None = None
    seeds: Annotated[int, Field(ge=1, le=1000)] = 5

    @field_validator("policies", mode="before")
    @classmethod
    def _policies(cls, given: Any) -> Any:
        return [_policy(one) for one in given] if isinstance(given, list) else given

    @field_validator("predictors", mode="before")
    @classmethod
    def _predictors(cls, given: Any) -> Any:
        return [{"kind": one} if isinstance(one, str) else one for one in given] if isinstance(given, list) else given

    @model_validator(mode="after")
    def _one_kind_of_load(self) -> Self:
        if self.loads is not None and self.rates is not None:
            raise ValueError("loads (shares of capacity) and rates (requests/s) exclude each other; keep one")
        return self

    @model_validator(mode="after")
    def _names(self) -> Self:
        _require_each_once("policies", [one.title for one in self.policies])
        _require_each_once("predictors", [one.title for one in self.predictors])
        for one in self.predictors:
            if one.kind == "none":
                raise ValueError('a predictor of kind "none" predicts nothing; policies that need none run once anyway')
            if one.title == "oracle" and one.kind != "oracle":
                raise ValueError('the name "oracle" is for the predictor that knows the lengths; give another')
        return self


def _policy(given: Any) -> Any:
    """A text is a scheduler's name where there is one, else a rank."""
    if not isinstance(given, str):
        return given
    return {"policy" if given in policy.named() else "rank": given}


def _title(section: Section, *first: str) -> str:
    """What was set: the first keys bare, the others as key=value."""
    told = section.model_dump(exclude_unset=True, exclude_none=True, exclude={"name"})
    bare = [str(told.pop(key)) for key in first if key in told]
    rest = [f"{key}={_text(value)}" for key, value in told.items()]
    return " ".join([*bare, *rest]) or "as the scenario"


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def _require_each_once(what: str, names: Sequence[str]) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two {what} are called {twice[0]!r}; give each a name of its own")
