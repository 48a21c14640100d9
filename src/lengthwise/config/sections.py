"""The tables of a scenario file, one class for each table."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from lengthwise import cost as costs
from lengthwise import policy, predict
from lengthwise.config.values import (
    Arrivals,
    Count,
    DelayTable,
    DelayTime,
    FixedLength,
    Length,
    MaxTokens,
    NotNan,
    Seconds,
    Section,
    Share,
    Text,
    Wait,
    input_error_as_value_error,
    seconds,
)
from lengthwise.engine import COST_SOURCES
from lengthwise.schema.deployment import KVOffloading, KVStorage, SglangSettings, TrtllmSettings
from lengthwise.schema.errors import UnknownNameError
from lengthwise.schema.specs import GpuSpec
from lengthwise.schema.speculation import MAX_SPECULATIVE_TOKENS

Rate = Annotated[NotNan, Field(gt=0)]
MAX_RATE_RPS = 1e6
RequestRate = Annotated[NotNan, Field(ge=1e-6)]  # one in 12 days; at lower rates, times are too large to resolve steps
HostSeconds = Annotated[NotNan, BeforeValidator(seconds), Field(ge=0, le=60)]
Seqs = Annotated[int, Field(ge=1, le=2**17)]
Rate01 = Annotated[NotNan, Field(ge=0, le=1)]
UpTo1024 = Annotated[int, Field(ge=1, le=1024)]
All2All = Literal["allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency"]
Replicas = Annotated[int, Field(ge=1, le=100_000)]
PreemptionMode = Literal["recompute", "swap"]
MIN_DRAWS = 10
_SOURCES = "give one of: preset, trace, or both prompt (isl) and output (osl)"
_LOADS = ("request_rate", "session_rate", "concurrency", "arrivals")


def _checked_cost(cost: str) -> str:
    shapes = {(known.partition(":")[0], ":" in known) for known in COST_SOURCES}
    source, colon, place = cost.partition(":")
    if (source, bool(place)) not in shapes or (colon and not place):
        raise ValueError(f"must be one of {', '.join(COST_SOURCES)}")
    return cost


CostSource = Annotated[Text, AfterValidator(_checked_cost)]


class DecodeSection(Section):
    """The decode side of a disaggregated deployment.

    ``max_num_seqs``, ``max_num_batched_tokens``, ``gpu_memory_utilization`` and engine settings without a key in this
    table default to those of the prefill side. The decode side has no prefix cache.
    """

    gpu: Text | None = None  # name of the catalog, or a .toml file; None: that of the prefill side
    node: Text | None = None  # None: that of the prefill side, or with another GPU a common machine for it
    cost: CostSource | None = None  # source of step times; None: that of the prefill side
    tp: UpTo1024 | None = None  # tensor-parallel degree; None: that of the prefill side
    pp: UpTo1024 | None = None  # number of pipeline stages; None: that of the prefill side
    dp: UpTo1024 | None = None  # data-parallel ranks of a replica; None: as many as on the prefill side
    # GPUs that divide the experts; None: tp x dp if this holds on the prefill side, else as there, at most tp x dp
    ep: UpTo1024 | None = None
    redundant_experts: Annotated[int, Field(ge=0, le=4096)] | None = None  # None: those of the prefill side
    all2all_backend: All2All | None = None  # None: that of the prefill side
    replicas: Replicas = 1  # number of replicas that only decode
    num_blocks: Count | None = None  # usable KV blocks of a replica, instead of the planned number
    max_num_seqs: Seqs | None = None
    # largest number of tokens in a step, for which DeepEP's low-latency exchange has buffers
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=2**22)] | None = None
    max_step_seqs: Seqs | None = None
    max_in_flight: UpTo1024 | None = None
    gpu_memory_utilization: Share | None = None
    link: Literal["node", "host"] = "node"  # link between the sides; "host": through host memory
    kv_transfer: Wait = 0.0  # additional seconds of each request's KV transfer
    # What simultaneous transfers of a replica do: one at a time, share its bandwidth, or each have all of it.
    link_sharing: Literal["fcfs", "fair", "none"] = "fcfs"
    # Of all KV transfers together, which share it max-min fair (link_sharing = "fair"); inf: no limit
    switch_gb_per_s: Annotated[NotNan, Field(gt=0)] = float("inf")
    layerwise: bool = False  # transfer each layer's KV cache as soon as the last chunk's step has computed it
    kv_transfer_timeout: Wait = float("inf")  # from the prefill until its transfer must have started
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"  # of a request whose transfer has timed out
    max_local_prefill_length: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0  # up to it, decode replicas prefill prompts
    # Decode replicas prefill all prompts while so many requests wait on the prefill side; None: never.
    max_prefill_queue_size: Count | None = None
    batching: Text = "unified"
    memory: Text = "paged"
    preemption_mode: PreemptionMode = "recompute"
    router: Text = "round_robin"

    @property
    def limits(self) -> dict[str, Any]:
        """Return the engine limits that replace those of the prefill side."""
        keys = {"max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization"}
        given = self.model_dump(include=keys, exclude_none=True)
        return given | {"max_step_seqs": self.max_step_seqs, "max_in_flight": self.max_in_flight}


class SessionsTable(Section):
    """Sessions of several turns. The lengths of [workload] are a turn's new prompt tokens and its output."""

    turns: Annotated[NotNan, Field(ge=1, le=1e6)] = 1.0  # mean of a geometric distribution
    max_turns: Count | None = None  # None: no limit
    think_time: DelayTime = DelayTable(median=0.0)  # from the end of an answer to the next turn
    # A session ends before the request whose prompt and output would exceed this limit; None: no limit.
    max_context_tokens: Annotated[int, Field(ge=2, le=2**31 - 1)] | None = None


class GroupsTable(Section):
    """Groups of sessions, or of single requests. A group shares a system prompt, with which its prompts begin."""

    count: Annotated[int, Field(ge=1, le=1_000_000)]  # number of groups
    system_prompt: Length  # a length is drawn for each group
    zipf: Annotated[NotNan, Field(ge=0, le=10)] = 1.0  # the k-th group has k**-zipf times the first one's sessions


class ToolsTable(Section):
    """Calls of tools after each turn: the result is appended to the context, and the model is called again."""

    calls: Annotated[NotNan, Field(gt=0, le=1e6)]  # mean number after a turn, geometric from 0
    max_calls: Count | None = None  # after a turn; None: no limit
    time: DelayTime = DelayTable(median=1.0)  # from the end of a request until the result is sent
    tokens: Length = FixedLength(tokens=200)  # of a result
    fan_out: Annotated[int, Field(ge=1, le=1000)] = 1  # number of parallel requests that may replace a tool
    fan_out_share: Annotated[NotNan, Field(ge=0, le=1)] = 0.0  # share of the calls that they replace


class WorkloadSection(Section):
    """The requests: their lengths (from a preset, a trace or distributions) and their arrivals.

    With ``sessions`` or ``tools``, sessions arrive instead of requests, at ``session_rate``.
    """

    preset: Text | None = None  # name of a preset, such as "chat-1m"
    trace: Text | None = None  # path of a trace file
    format: Text | None = None  # format of the trace; None: detected from its content
    columns: dict[Text, Text] | None = None  # columns of a CSV trace: { prompt_tokens = "input_len", ... }
    prompt: Length | None = None  # prompt lengths
    output: Length | None = None  # output lengths
    correlation: Annotated[float, Field(ge=-1, le=1)] = 0.0  # Spearman's rank correlation of prompt and output lengths
    num_requests: Annotated[int, Field(ge=1, le=100_000_000)] | None = None  # None: 1,000, or all of a replayed trace
    # A trace without a rate, concurrency and arrivals is replayed; with one of them, only its lengths are used.
    # They also replace a preset's arrivals.
    request_rate: RequestRate | None = None  # requests per second, at least 1e-6; inf: all requests at once
    session_rate: Rate | None = None  # sessions per second, instead of requests
    concurrency: Count | None = None  # number of requests in the system of a closed loop
    arrivals: Arrivals | None = None  # process of the arrivals; default: Poisson, or those of the preset
    sessions: SessionsTable | None = None  # chats of several turns
    groups: GroupsTable | None = None  # shared system prompts
    tools: ToolsTable | None = None  # agents
    time_scale: Rate = 1.0  # factor on the times of a replayed trace
    sort: bool = False  # put the rows of a trace in order of arrival
    predicted: Literal["none", "oracle", "mean"] = "none"  # predicted lengths: none, the true ones, or their mean
    # The number of tenants with equal shares, or the weights of their shares; a replayed trace keeps its own tenants.
    tenants: Annotated[int, Field(ge=1, le=10_000)] | Annotated[list[Rate], Field(min_length=1)] | None = None
    max_prompt_tokens: Count | None = None  # limit of a prompt
    max_output_tokens: Count | None = None  # limit of an output
    max_total_tokens: Annotated[int, Field(ge=2, le=2**31 - 1)] | None = None  # limit of prompt and output together
    # Limit of the output that clients set: a distribution, a number of tokens, a multiple of the output, or "none".
    # Default: the limits in the trace, if it has any.
    max_tokens: MaxTokens | None = None
    ignore_eos: bool = False  # every output is as long as its max_tokens
    cut: Literal["output", "prompt", "proportional", "redraw"] = "output"  # how requests above the limits are shortened

    @property
    def is_replay(self) -> bool:
        """Return whether a trace is replayed with its own arrivals; otherwise a trace gives only the lengths."""
        return self.trace is not None and not self._loads()

    @property
    def rate_rps(self) -> float | None:
        """Return the rate of requests or, with ``session_rate``, of sessions; None without a rate."""
        return self.request_rate if self.session_rate is None else self.session_rate

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
        if self.arrivals is not None and self.arrivals.needs_rate != (self.rate_rps is not None):
            verb = "needs" if self.arrivals.needs_rate else "excludes"
            rate = "session_rate" if self.sessions or self.tools else "request_rate"
            raise ValueError(f"arrivals of kind {self.arrivals.kind} {verb} {rate}")
        if self.time_scale != 1.0 and not self.is_replay:
            raise ValueError("time_scale stretches the arrivals of a replayed trace; this workload replays none")
        if self.format == "sharegpt_turns" and not self.is_replay:
            raise ValueError(f"sharegpt_turns replays sessions at their own times; leave out {loads[0]}")
        if MAX_RATE_RPS < (self.request_rate or 0) < math.inf:
            raise ValueError(f"request_rate must be at most {MAX_RATE_RPS:,.0f} a second, or inf: all requests at once")
        if (self.session_rate or 0) > MAX_RATE_RPS:
            raise ValueError(f"session_rate must be at most {MAX_RATE_RPS:,.0f} a second")
        if self.request_rate is not None and math.isinf(self.request_rate) and self.arrivals is not None:
            raise ValueError("request_rate = inf sends all requests at once and takes no arrivals")
        return self

    @model_validator(mode="after")
    def _check_reading(self) -> Self:
        if self.trace is None and (self.format is not None or self.sort or self.columns):
            raise ValueError("format, columns and sort say how to read a trace, and there is no trace")
        if self.columns and self.format is not None:
            raise ValueError("columns name those of a CSV file of no known format; leave out format, or columns")
        return self

    @model_validator(mode="after")
    def _check_sessions(self) -> Self:
        tables = [name for name in ("sessions", "groups", "tools") if getattr(self, name) is not None]
        if not tables:
            if self.session_rate is not None:
                raise ValueError(
                    "session_rate is the rate of [workload.sessions] or [workload.tools]; give one of them"
                )
            return self
        if self.is_replay:
            raise ValueError(f"{tables[0]} describes drawn requests, and a replayed trace has its own; give a load too")
        if tables == ["groups"]:
            if self.session_rate is not None:
                raise ValueError("session_rate is the rate of sessions, and groups alone have none: give request_rate")
            return self
        if self.request_rate is not None or self.concurrency is not None:
            given = "request_rate" if self.request_rate is not None else "concurrency"
            raise ValueError(f"sessions start at session_rate (sessions per second), so leave out {given}")
        if self.session_rate is None and self.arrivals is None:
            raise ValueError("say how sessions start: session_rate (sessions per second), or arrivals")
        return self


class HostTable(Section):
    """Seconds that an engine's host adds to a step, for each sequence of a step, and to each request."""

    step_s: HostSeconds = Field(default_factory=lambda: costs.HostOverhead().step_s)
    sequence_s: HostSeconds = Field(default_factory=lambda: costs.HostOverhead().sequence_s)
    request_s: HostSeconds = 0.0  # delay of a request in front of the engine, which blocks no other request
    serial_s: HostSeconds = 0.0  # service time of the front end, which takes one request at a time
    launch_s: HostSeconds = 0.0  # to launch a kernel, in a step of more than max_num_seqs tokens


class SpeculationTable(Section):
    """Speculative decoding: a drafter proposes tokens, and a step of the model verifies them.

    ``acceptance`` are the rates at which the proposed tokens are accepted, by position, each given that those before it
    were (vLLM logs them: "Per-position acceptance rate" divided by that of the position before); a single rate applies
    to all positions. Without it, method mtp has DeepSeek-R1's of chats at every position, 0.69; others need it.
    ``draft_rate`` is the share of a sequence's steps for which the drafter proposes tokens at all.
    """

    method: Literal["ngram", "eagle", "eagle3", "mtp", "draft_model"]
    # Tokens proposed for each step, at most as many as there are rates of acceptance; 0: no speculation.
    num_speculative_tokens: Annotated[int, Field(ge=0, le=MAX_SPECULATIVE_TOKENS)]
    acceptance: Rate01 | Annotated[list[Rate01], Field(min_length=1)] | None = None
    draft_rate: Rate01 = 1.0  # below 1 for n-gram, which finds nothing to propose where the text does not repeat
    request_effect: Annotated[NotNan, Field(ge=0, le=0.99)] = 0.0  # intraclass correlation of acceptance by request
    length_correlation: Annotated[NotNan, Field(ge=-1, le=1)] = 0.0  # of a request's acceptance and its output
    burstiness: Rate01 = 0.0  # correlation of acceptance in consecutive steps of a request
    # (first, last number of sequences of a step, tokens proposed after it), as in vLLM; None: always the same number
    num_speculative_tokens_per_batch_size: list[Annotated[list[int], Field(min_length=3, max_length=3)]] | None = None
    draft_model: Text | None = None  # of method draft_model: name of the catalog, or a Hugging Face config.json
    pass_s: HostSeconds = 0.0  # seconds of each pass of the drafter besides its work on the GPU, such as its launch


class GroupSection(Section):
    """One of several groups of equal replicas behind one router, such as those of one GPU type.

    A key that a group lacks has the value of [deployment] or [engine]. A group with a GPU of its own has the default
    node of that GPU, unless it names another.
    """

    replicas: Replicas = 1  # of this group
    model: Text | None = None  # all groups have the model of [deployment]
    gpu: Text | None = None
    node: Text | None = None
    tp: UpTo1024 | None = None
    pp: UpTo1024 | None = None
    cost: CostSource | None = None
    host: Text | HostTable | None = None
    memory_planner: Text | None = None
    weight_dtype: Text | None = None
    kv_dtype: Text | None = None
    num_blocks: Count | None = None
    max_num_seqs: Seqs | None = None
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=2**22)] | None = None
    max_step_seqs: Seqs | None = None
    max_in_flight: UpTo1024 | None = None
    gpu_memory_utilization: Share | None = None
    watermark: Annotated[NotNan, Field(ge=0, lt=1)] | None = None

    @field_validator("model")
    @classmethod
    def _check_model(cls, model: str | None) -> str | None:
        if model is not None:
            raise ValueError(
                "all groups behind one router serve the model of [deployment]; leave it out, and deploy another model "
                "by a scenario of its own"
            )
        return model

    @property
    def overrides(self) -> dict[str, Any]:
        """Return the settings of a scenario with this group alone, by section; None removes one."""
        given = self.model_dump(exclude_unset=True, exclude_none=True) | {"replicas": self.replicas}
        limits = {key: given.pop(key) for key in list(given) if key in EngineSection.model_fields}
        own = {"node": None} if "gpu" in given and "node" not in given else {}
        return {"deployment": own | given | {"groups": None}, "engine": limits}


class DeploymentSection(Section):
    """The model, its GPUs and replicas, and the source of step times.

    ``host`` is the time that the engine's host adds to a step, and the delay of a request in front of the engine:
    "default" takes both from ``cost``; "vllm", "sglang" and "trtllm" are fitted to measured deployments of these
    engines; ``{ step_s = "300us", sequence_s = "9us", request_s = "20ms", serial_s = "2ms" }`` gives other times.
    """

    model: Text  # name of the catalog, or a Hugging Face config.json
    gpu: Text  # name of the catalog, or a .toml file
    node: Text | None = None  # name of the catalog, or a .toml file
    tp: UpTo1024 = 1  # tensor-parallel degree
    pp: UpTo1024 = 1  # number of pipeline stages
    replicas: Replicas = 1  # number of independent copies
    dp: UpTo1024 = 1  # data-parallel ranks of a replica, which share its experts; each has tp GPUs
    ep: UpTo1024 = 1  # GPUs that divide the experts; it divides tp x dp
    # with EPLB: copies of a layer's experts beyond the first of each; None: no EPLB
    redundant_experts: Annotated[int, Field(ge=0, le=4096)] | None = None
    # how data-parallel ranks exchange tokens, as in vLLM
    all2all_backend: All2All = "allgather_reducescatter"
    cost: CostSource = (
        "roofline"  # a source of ``engine.deploy``, such as "profile:FILE.parquet#ESTIMATOR" or "vidur:DIR"
    )
    host: Text | HostTable = "default"
    memory_planner: Text = "lengthwise"  # or "vidur"
    weight_dtype: Text | None = None  # None: the model's own
    kv_dtype: Text | None = None
    # Usable KV blocks of a replica, instead of the planned number: vLLM's number less 1 (its null block).
    num_blocks: Count | None = None
    decode: DecodeSection | None = None  # with a decode side, the replicas of this table only prefill
    groups: list[GroupSection] = Field(default_factory=list)  # unlike replicas behind one router; they have the counts
    speculation: SpeculationTable | None = None  # speculative decoding
    # Whether there is a decode side: false leaves ``decode`` out, true has one without the table, too. None: if there
    # is the table.
    disaggregate: bool | None = None

    @property
    def decode_side(self) -> DecodeSection | None:
        """Return the decode side, whose missing values are those of the prefill side, or None without a decode side."""
        if not (self.decode is not None if self.disaggregate is None else self.disaggregate):
            return None
        side = self.decode or DecodeSection()
        own = {key: getattr(side, key) or getattr(self, key) for key in ("gpu", "cost", "tp", "pp", "dp")}
        node = side.node or (self.node if own["gpu"] == self.gpu else None)
        return side.model_copy(update={**own, "node": node})

    @property
    def files(self) -> list[str | None]:
        """Return the names that may be files: model, GPUs, nodes and sources of step times, of all sides and groups."""
        parts: list[DeploymentSection | DecodeSection | GroupSection] = [self, self.decode_side or self, *self.groups]
        places = ((one.cost or "").partition(":")[2].partition("#")[0] for one in parts)
        return [self.model, *(name for one in parts for name in (one.gpu, one.node)), *places]

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of all replicas, without a decode side."""
        if self.groups:
            return sum((one.tp or self.tp) * (one.pp or self.pp) * one.replicas for one in self.groups)
        return self.tp * self.pp * self.dp * self.replicas

    @property
    def host_overhead(self) -> str | costs.HostOverhead:
        """Return the overhead of the engine's host: one of ``cost.HOST_NAMES``, or a record of seconds."""
        return self.host if isinstance(self.host, str) else costs.HostOverhead(**self.host.model_dump())

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        if self.groups and self.replicas != 1:
            raise ValueError(f"with groups, each has its own replicas; leave replicas out (it is {self.replicas})")
        if self.groups and self.decode_side is not None:
            raise ValueError("groups are not modelled with a decode side yet; leave groups or decode out")
        return self

    @field_validator("host")
    @classmethod
    def _check_host(cls, host: str | HostTable) -> str | HostTable:
        if isinstance(host, str) and host not in costs.HOST_NAMES:
            raise ValueError(f"must be one of {', '.join(costs.HOST_NAMES)}, or a table of step_s and sequence_s")
        return host


class KVStorageTable(Section):
    """Storage behind the CPU memory: a disk, a file system, or memory of another machine."""

    size_gb: Annotated[NotNan, Field(ge=0)] = KVStorage.size_gb  # of one replica, or of all if shared; inf: no limit
    read_gb_per_s: Annotated[NotNan, Field(gt=0)] = KVStorage.read_gb_per_s  # of one replica's link to it
    write_gb_per_s: Annotated[NotNan, Field(gt=0)] = KVStorage.write_gb_per_s
    latency: Wait = 0.0  # of each read and of each write
    shared: bool = False  # whether replicas find blocks that other replicas have written
    usd_per_gb_hour: Annotated[NotNan, Field(ge=0)] = 0.0  # needs a finite size_gb; 0: the GPUs' price includes it


class KVOffloadingTable(Section):
    """CPU memory behind the prefix cache of each replica, as vLLM's offloading connector uses it."""

    # Of one replica, all of its GPUs together; 0: none. The scenario or one of its variants must give it.
    size_gb: Annotated[NotNan, Field(ge=0, le=1e6)] = 0.0
    gb_per_s: Annotated[NotNan, Field(gt=0)] = KVOffloading.gb_per_s  # between a GPU and CPU memory, in each direction
    latency: Wait = 0.0  # of each load and of each store
    load: Literal["always", "if_faster"] = "always"  # if_faster: only where computing the tokens takes longer
    outputs: bool = False  # whether the blocks of an output are stored, too, when the request ends
    storage: KVStorageTable | None = None  # behind the CPU memory
    usd_per_gb_hour: Annotated[NotNan, Field(ge=0)] = 0.0  # 0: the price of the GPUs includes it


class EngineSection(Section):
    """The engine's limits, named as in vLLM.

    ``name`` (short: ``engine = "sglang"``) names an engine, whose defaults apply to the scheduler, the host and the
    limits that the scenario does not set.
    """

    name: Literal["vllm", "sglang", "trtllm"] | None = None
    max_num_seqs: Seqs = 256  # largest number of sequences that run at once on a replica
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=2**22)] = 2048  # largest number of tokens in a step
    block_size: Annotated[int, Field(ge=1, le=2**16)] = 16  # tokens of a KV block
    gpu_memory_utilization: Share = 0.9  # share of GPU memory that the engine may use
    max_model_len: Annotated[int, Field(ge=2, le=2**24)] | None = None
    max_step_seqs: Seqs | Literal["per_stage"] | None = None  # "per_stage": max_num_seqs / pipeline stages, as in Vidur
    # Share of the KV blocks that admission keeps free; None: 0.01 for paged and paged_strict (vLLM v0, Vidur), else 0.
    watermark: Annotated[NotNan, Field(ge=0, lt=1)] | None = None
    timeout_s: Seconds = math.inf  # time from the arrival after which a client gives up
    enable_prefix_caching: bool = False  # whether prompts reuse blocks of earlier ones
    prefix_cache: Literal["vllm", "sglang"] = "vllm"  # the rules of vLLM's blocks, or of SGLang's radix tree
    radix_eviction_policy: Literal["lru", "lfu", "slru", "priority", "fifo", "mru", "filo"] = "lru"
    kv_offloading: KVOffloadingTable | None = None  # CPU memory behind the prefix cache
    max_in_flight: UpTo1024 | None = None  # steps in a replica's pipeline at a time; None: one for each stage


class EngineDefaults(NamedTuple):
    """Default settings of an engine, some of which depend on the GPU's memory."""

    version: str
    policy: str
    block_size: int
    prefix_cache: str
    # (smallest GPU memory in GiB, (max_num_batched_tokens, max_num_seqs)), by rising memory.
    limits_by_gib: tuple[tuple[float, tuple[int, int]], ...]
    smallest_on: str = "no GPU"  # GPUs with this text in their names have the smallest limits, whatever their memory
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9
    async_scheduling: bool = True  # where the simulator models it, unless the scenario sets it

    def of(self, host: str, gpu: GpuSpec) -> dict[str, dict[str, Any]]:
        """Return the default settings by section, for a GPU and the host ``host``."""
        gib = 0 if self.smallest_on in gpu.name.lower() else gpu.memory_bytes / 2**30
        tokens, seqs = next(limits for least, limits in reversed(self.limits_by_gib) if gib >= least)
        limits = {"max_num_batched_tokens": tokens, "max_num_seqs": seqs, "block_size": self.block_size}
        return {
            "scheduler": {"policy": self.policy},
            "deployment": {"host": host},
            "engine": {
                **limits,
                "prefix_cache": self.prefix_cache,
                "enable_prefix_caching": self.enable_prefix_caching,
                "gpu_memory_utilization": self.gpu_memory_utilization,
            },
        }


ENGINES = {
    "vllm": EngineDefaults(
        "vLLM 0.32", "vllm_v1", 16, "vllm",
        ((0, (2048, 256)), (70, (8192, 1024)), (160, (16384, 1024))), smallest_on="a100",
        gpu_memory_utilization=0.92,
    ),
    "sglang": EngineDefaults(
        "SGLang 0.5.23", "sglang", 1, "sglang",
        ((0, (2048, 2048)), (20, (4096, 2048)), (60, (8192, 2048)), (160, (16384, 2048))),
    ),
    "trtllm": EngineDefaults(
        "TensorRT-LLM 1.3.0rc22", "trtllm", 32, "vllm", ((0, (8192, 2048)),),
        enable_prefix_caching=False, async_scheduling=False,
    ),
}  # fmt: skip
"""Defaults of servers, from vLLM's ``EngineArgs``, SGLang's ``memory_hook`` and smallest ``max_running_requests``, and
TensorRT-LLM's ``BuildConfig``. TensorRT-LLM's prefix cache and overlap of steps are not modelled. SGLang and
TensorRT-LLM divide the GPU's memory by rules of their own, and here use the simulator's share of 0.9."""


class SglangTable(Section):
    """SGLang's own settings of its scheduler, named as its flags; its chunk size is engine.max_num_batched_tokens."""

    schedule_conservativeness: Annotated[NotNan, Field(ge=0, le=1e6)] = SglangSettings.schedule_conservativeness
    # prompt tokens of a step from which on the step admits no further request
    max_prefill_tokens: Count = SglangSettings.max_prefill_tokens
    chunked_prefill: bool = SglangSettings.chunked_prefill  # false: prompts are computed in one piece
    enable_mixed_chunk: bool = SglangSettings.enable_mixed_chunk  # running requests decode beside chunks of prompts
    # order of the queue: by arrival, longest cached prefix, subtrees with many requests, longest max_tokens, random
    schedule_policy: Literal["fcfs", "lpm", "dfs-weight", "lof", "random"] = "fcfs"


class TrtllmTable(Section):
    """TensorRT-LLM's own settings of its scheduler; its max_num_tokens is engine.max_num_batched_tokens."""

    # GUARANTEED_NO_EVICT reserves memory for every max_tokens; MAX_UTILIZATION for one step, and pauses requests
    capacity_scheduler_policy: Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"] = "GUARANTEED_NO_EVICT"
    enable_chunked_prefill: bool = TrtllmSettings.enable_chunked_prefill  # false: prompts are computed in one piece
    # which prompts are computed in chunks when not all fit in a step
    context_chunking_policy: Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"] = "FIRST_COME_FIRST_SERVED"


class SchedulerSection(Section):
    """A named scheduler, policies of single axes that replace its own, or a user's own policies.

    A value with a colon, "policies.py:shortest" or "package.module:shortest", names a Python object. A value with
    brackets, "aged(weight=20)" or "bins(boundaries=[100, 300])", gives a policy its parameters. ``binning`` gathers
    arrivals of similar predicted length into batches ("none" turns it off). "equal_mass(k=8)", "uniform_optimal(k=8)",
    "exponential(k=8)" and "learned(k=8)" take the boundaries from other requests of the workload, or from the trace.
    """

    policy: Text = "vllm_v1"  # named scheduler
    rank: Text | None = None  # order of waiting requests
    victim: Text | None = None  # order in which running requests are preempted when memory runs out
    batching: Text | None = None  # how a step is formed
    memory: Text | None = None  # when a request is admitted
    preemption_mode: PreemptionMode | None = None  # how a preempted request gets its KV cache back
    router: Text | None = None  # which replica a request goes to
    preemption: Text | None = None  # whether a waiting request may preempt a running one
    binning: Text | None = None
    max_wait_s: Wait | None = None  # requests with a longer total wait precede all others, in order of arrival
    batch_wait_s: Wait | None = None  # longest wait of a bin's first request for a full bin
    preemption_interval_steps: Count | None = None  # steps after which preemption is considered again
    # true: a step is formed while the step before it runs (vLLM, SGLang); unset: as ``engine`` does, if it has a name
    async_scheduling: bool | None = None
    hide_host: bool | None = None  # true: the host prepares a step while the GPU runs the step before it
    # maximum prompt tokens of one request in a step, unless it is the only request of the replica; 0: no limit (vLLM)
    long_prefill_token_threshold: Annotated[int, Field(ge=0, le=2**24)] | None = None
    hybrid_kv_cache: bool | None = None  # false: layers with windows or chunks cache all tokens
    sglang: SglangTable | None = None  # settings of policy "sglang"
    trtllm: TrtllmTable | None = None  # settings of policy "trtllm"
    # true: a request is admitted only while the predicted peak of KV tokens fits, with a margin that preemptions raise
    reserve: bool | None = None
    # with reserve: time of recomputation over idle time (decoding time x share of memory free while requests wait)
    max_recompute_share: Annotated[NotNan, Field(ge=0)] | None = None
    # with reserve: a budget of preemptions for lack of memory per request; each one raises the margin; inf: no budget
    max_preemptions_per_request: Annotated[NotNan, Field(ge=0)] | None = None


class SloSection(Section):
    """Latency limits that a good request meets: seconds, or texts such as "200ms"."""

    ttft: Seconds | None = None  # time to first token
    tpot: Seconds | None = None  # (finish - first token) / (output tokens - 1)
    jct: Seconds | None = None  # or e2e: arrival to last token


class RunSection(Section):
    """The runs of a simulation, one for each of the seeds ``seed`` .. ``seed + seeds - 1``.

    Requests that arrive before ``warmup_s`` count only in the times between tokens, in rates and in hardware metrics.
    """

    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0  # first seed
    seeds: Annotated[int, Field(ge=1, le=10_000)] = 1  # number of runs
    warmup_s: Wait = 0.0
    time_limit_s: Seconds = math.inf
    strict: bool = False  # whether a request that could never fit is an error
    # Runs with cost tables that are perturbed by their errors; None: 16 in runs of up to 50,000 requests, else 0.
    model_draws: Annotated[int, Field(ge=0, le=10_000)] | None = None

    @field_validator("model_draws")
    @classmethod
    def _check_draws(cls, draws: int | None) -> int | None:
        if 0 < (draws or 0) < MIN_DRAWS:
            raise ValueError(f"must be 0 (no model intervals) or at least {MIN_DRAWS}, to see both tails")
        return draws


class SearchSection(Section):
    """The search for a deployment: its objective, its limits and its configurations."""

    objective: Literal["requests_per_dollar", "cost_at_rate", "fewest_gpus", "goodput", "makespan", "energy"] = (
        "requests_per_dollar"
    )
    rate: Annotated[RequestRate, Field(le=MAX_RATE_RPS)] | None = None  # None: the workload's; for energy, the capacity
    max_gpus: Count | None = None  # of all replicas together; None: no limit
    max_usd_per_hour: Rate | None = None  # price of all replicas together; None: no limit
    mixtures: bool = False  # also try two GPU types of the axis gpu behind one router, in all numbers within the budget
    limits: dict[str, Any] = Field(
        default_factory=dict
    )  # ttft.p90 = "2s"; without a bound on waiting, a default applies
    # ``deployment.replicas`` may be "fill": as many as max_gpus allows, or "auto": the fewest that meet limits at rate.
    # With a decode side, "fill" tries each split of max_gpus, and "auto" all numbers up to it (``usecases.search``).
    space: dict[str, Any] = Field(default_factory=dict)  # a list of values for each axis: ``tp = [1, 2, 4]``
    any_of: list[dict[str, Any]] = Field(default_factory=list)  # alternatives of further axes; a configuration has one
    strategy: Literal["pruned", "exhaustive", "bayesian"] = "pruned"
    trials: Count = 100  # only for the strategy "bayesian"
    top: Count = 10  # number of configurations that are at least evaluated exactly
    precision: Annotated[NotNan, Field(gt=0, lt=1)] = 0.025
    seeds: Annotated[int, Field(ge=1, le=1000)] = 5
    sensitivity: bool = True

    @model_validator(mode="after")
    def _check_mixtures(self) -> Self:
        if not self.mixtures:
            return self
        if self.objective not in ("cost_at_rate", "fewest_gpus"):
            raise ValueError(
                "mixtures need a rate to serve: the requests per dollar of two kinds of replicas lie between those of "
                "each kind alone, so that a mixture pays where whole replicas do not fit the rate; set objective = "
                f'"cost_at_rate" or "fewest_gpus" (it is "{self.objective}")'
            )
        if self.strategy == "bayesian":
            raise ValueError('mixtures are enumerated; set strategy = "pruned"')
        if self.max_gpus is None and self.max_usd_per_hour is None:
            raise ValueError("mixtures need a budget: set max_usd_per_hour or max_gpus")
        return self


class VariantSection(Section):
    """One of several scenarios to compare: its name and the settings that differ from the rest of the file."""

    name: Text
    workload: dict[str, Any] = Field(default_factory=dict)
    deployment: dict[str, Any] = Field(default_factory=dict)
    engine: dict[str, Any] = Field(default_factory=dict)
    scheduler: dict[str, Any] = Field(default_factory=dict)
    predictor: dict[str, Any] = Field(default_factory=dict)
    search: dict[str, Any] = Field(default_factory=dict)

    @property
    def overrides(self) -> dict[str, dict[str, Any]]:
        """Return the settings in which the variant differs, by table."""
        return self.model_dump(exclude={"name"}, exclude_defaults=True)


Kind = Literal[
    "none", "oracle", "constant", "ecdf", "bucket_ecdf", "lognormal_error", "bin_neighbour", "confusion",
    "quantised", "same", "reversed", "model", "default",
]  # fmt: skip
# By kind: the class in ``predict``, the required keys and the optional keys.
_PREDICTORS: dict[str, tuple[str | None, tuple[str, ...], tuple[str, ...]]] = {
    "none": (None, (), ()),
    "oracle": ("Oracle", (), ()),
    "constant": ("Constant", (), ("tokens", "conditional")),
    "ecdf": ("Ecdf", (), ("conditional",)),
    "bucket_ecdf": ("BucketEcdf", (), ("buckets", "conditional")),
    "lognormal_error": ("LogNormalError", ("sigma",), ("bias", "half_life_tokens", "exact_lengths")),
    "bin_neighbour": ("BinNeighbour", ("boundaries", "p"), ("split", "half_life_tokens")),
    "confusion": ("Confusion", ("boundaries", "matrix"), ()),
    "quantised": ("Quantised", ("boundaries",), ()),
    "same": ("Same", (), ("tokens",)),
    "reversed": ("Reversed", (), ("pivot",)),
    "model": (None, ("file",), ("conditional",)),
    "default": (None, (), ("conditional",)),
}
PARAMETERS = {kind: (*needed, *optional) for kind, (_, needed, optional) in _PREDICTORS.items()}
_COMMON = ("name", "kind", "window_tokens", "statistic", "update_predictions")
LAST_CLASS_RATIO = 2.0
"""If a file gives only inner boundaries of classes, the last class ends at the last boundary times this ratio."""
_Positive = Annotated[NotNan, Field(gt=0, le=1e9)]


class PredictorSection(Section):
    """The predictor of output lengths, which predicts at arrival and again after every ``window_tokens`` of output.

    "oracle" returns the true lengths. Four kinds add an error to them: "lognormal_error" (``sigma`` and ``bias`` of the
    log), "bin_neighbour" (a neighbouring class, with probability ``p`` on each side), "confusion" (``matrix`` of true
    by predicted classes) and "quantised" (only the class is known). "same" predicts ``tokens`` for every request,
    "reversed" predicts ``pivot``**2 / true length. "constant", "ecdf" and "bucket_ecdf" (by prompt length) learn
    from other requests of the same [workload], drawn with another seed. "model" is a trained predictor (``file``),
    "default" the predictor that comes with lengthwise.
    """

    kind: Kind = "none"
    file: Text | None = None
    tokens: Annotated[NotNan, Field(ge=1, le=1e9)] | None = None
    buckets: UpTo1024 = 8
    sigma: Annotated[NotNan, Field(ge=0, le=10)] | None = None
    bias: Annotated[NotNan, Field(ge=-10, le=10)] = 0.0
    half_life_tokens: _Positive | None = None  # tokens after which an error halves
    exact_lengths: bool = False
    # Boundaries of the classes of lengths: all of them in increasing order, only the inner ones, or the number of
    # classes, which then hold equally many requests of the same workload.
    boundaries: list[float] | Annotated[int, Field(ge=1, le=4096)] | None = None
    p: Annotated[NotNan, Field(ge=0, le=0.5)] | None = None
    split: Annotated[NotNan, Field(ge=0, le=1)] = 0.5
    matrix: list[list[float]] | None = None
    pivot: Annotated[NotNan, Field(ge=1, le=1e5)] = 256.0
    conditional: bool = False  # whether a later prediction is the first one conditioned on the tokens so far
    window_tokens: Count = 50
    statistic: Text = "mean"  # "mean", "median", a quantile ("q0.9"), or "tail_inflated"
    update_predictions: bool = True  # whether it predicts again after every window_tokens

    @property
    def is_random(self) -> bool:
        """Return whether the predictions of the same requests depend on the seed."""
        return self.kind in ("lognormal_error", "bin_neighbour", "confusion")

    @property
    def requires_training(self) -> bool:
        """Return whether the predictor must first learn from other requests."""
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
        """Return the untrained predictor. The kinds "none", "model" and "default" have no such predictor."""
        own = {key: getattr(self, key) for key in PARAMETERS[self.kind] if key not in ("conditional", "buckets")}
        if self.kind == "same" and self.tokens is None:
            own = {}
        elif self.kind == "bucket_ecdf":
            own = {"by": ("model", "prompt_tokens"), "buckets": self.buckets}
        if isinstance(edges := own.get("boundaries"), list):
            # If only inner boundaries are given, add the smallest and the largest length.
            inner = len(edges) == 1 or (self.matrix is not None and len(edges) == len(self.matrix) - 1)
            own["boundaries"] = [0.0, *edges, LAST_CLASS_RATIO * edges[-1]] if inner and min(edges) > 0 else edges
        return getattr(predict, str(_PREDICTORS[self.kind][0]))(**own)


_QUANTILE = re.compile(r"p([0-9]{1,2}(?:\.[0-9]+)?)")
_FIXED = re.compile(r"([1-9][0-9]{0,6}) tokens?")


def _strategies() -> list[str]:
    from lengthwise.schedule.controls import Strategy

    return [one.value for one in Strategy]


class ScheduleSection(Section):
    """The search for a schedule: its latency bound, its GPUs and its strategies.

    ``latency_bound`` limits the time from the start of a request's prefill to its last token, for outputs of the length
    ``bound_for``: "p99" is the length that one output in a hundred exceeds; "80 tokens" is a fixed length, which some
    output must have. With ``worst_case`` this latency is computed for heavy batches (with p99, one batch in a hundred
    is heavier), otherwise for batches of expected weight. ``strategies``: "rra" (every GPU prefills and decodes, in
    phases), "waa-c" and "waa-m" (some GPUs prefill, the others decode; computation or memory decides the split).
    ``threshold`` (ExeGPT's dynamic adjustment): prefill and decode batches are resized so that they deviate from their
    means by at most this share; None: every prefill batch has B_E requests.
    """

    latency_bound: Seconds = math.inf
    bound_for: Text = "p99"
    gpus: Count | None = None  # None: tp x pp x replicas of [deployment]
    strategies: list[Text] = Field(default_factory=_strategies, min_length=1)
    worst_case: bool = True
    threshold: Annotated[NotNan, Field(gt=0, lt=1)] | None = None
    # Systems to compare with, or "all"; each is simulated in all its configurations (seconds to a minute).
    baselines: list[Text] = Field(default_factory=list)
    dram_gb_s: Annotated[NotNan, Field(gt=0, lt=1e6)] | None = None  # rate of reloads from host memory; None: 4.9
    ssd_gb_s: Annotated[NotNan, Field(gt=0, lt=1e6)] | None = None  # rate of reloads from a node's drives; None: 7.3

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
        return _all_known("strategy", names, _strategies())

    @field_validator("baselines")
    @classmethod
    def _check_baselines(cls, names: list[str]) -> list[str]:
        from lengthwise.schedule.baselines import SYSTEMS

        return _all_known("system", names, ["all", *SYSTEMS])

    @property
    def systems(self) -> tuple[str, ...]:
        """Return the systems to compare with, without duplicates."""
        from lengthwise.schedule.baselines import SYSTEMS

        return SYSTEMS if "all" in self.baselines else tuple(dict.fromkeys(self.baselines))

    @property
    def level(self) -> float:
        """Return the quantile as a share. With a fixed length, 0.99 applies, but only to the weight of batches."""
        return 0.99 if self.output_tokens else float(self.bound_for[1:]) / 100

    @property
    def output_tokens(self) -> int | None:
        """Return the fixed output length of the bound; None for a quantile."""
        found = _FIXED.fullmatch(self.bound_for)
        return int(found[1]) if found else None


def _all_known(kind: str, names: list[str], known: list[str]) -> list[str]:
    for name in names:
        if name not in known:
            raise ValueError(str(UnknownNameError(kind, name, known)))
    return names


Load = Annotated[NotNan, Field(gt=0, le=1e6)]


class LabPolicy(SchedulerSection):
    """A scheduler to try: the keys of [scheduler], and a name."""

    name: Text | None = None
    # Sets max_wait_s to this multiple of the 99th percentile of JCT under FCFS at the same load and batch size.
    max_wait_factor: Annotated[NotNan, Field(gt=0, le=1e6)] | None = None

    @property
    def title(self) -> str:
        """Return the name, or without one the keys that the file sets, such as "aged(weight=20) max_wait_s=60"."""
        return self.name or _title(self, "policy", "rank")


class LabPredictor(PredictorSection):
    """A predictor to try: the keys of [predictor], and a name."""

    name: Text | None = None

    @property
    def title(self) -> str:
        """Return the name, or without one the keys that the file sets, such as "lognormal_error sigma=0.5"."""
        return self.name or _title(self, "kind", "file")


class LabSection(Section):
    """The experiments of ``lengthwise lab``: every policy with every predictor, at every load and batch size.

    A policy is the name of a scheduler ("srtf"), a rank ("aged(weight=20)"), or a table with keys of [scheduler]; a
    table without ``policy`` changes the scenario's own scheduler. A predictor is a kind ("oracle") or a table with keys
    of [predictor]. FCFS and shortest-first with known lengths always run, because their difference is the gap.
    """

    policies: list[LabPolicy] = Field(
        default_factory=lambda: [LabPolicy(policy=name) for name in ("sjf", "isrtf")], min_length=1
    )
    predictors: list[LabPredictor] = Field(default_factory=lambda: [LabPredictor(kind="oracle")])
    loads: Annotated[list[Load], Field(min_length=1)] | None = None
    # The unit of loads: the capacity of FCFS, or the batch size divided by the mean time of a request that runs alone.
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
    settings = section.model_dump(exclude_unset=True, exclude_none=True, exclude={"name"})
    first = [str(settings.pop(key)) for key in bare if key in settings]

    def text(value: Any) -> str:
        plain = str(value).lower() if isinstance(value, bool) else str(value)
        return f"{value:g}" if isinstance(value, float) else plain

    return " ".join([*first, *(f"{key}={text(value)}" for key, value in settings.items())]) or "as the scenario"


def _require_distinct(kind: str, names: Sequence[str]) -> None:
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two {kind} are called {repeated[0]!r}; give each a name of its own")
