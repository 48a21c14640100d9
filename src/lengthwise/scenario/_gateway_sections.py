"""The tables of a gateway's file, one class each; what they mean stands at ``gateway.config``."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from lengthwise.gateway import config as told
from lengthwise.gateway.phasing import refuse_split
from lengthwise.scenario._values import NotNan, Seconds, Section, Share, Text, Wait, seconds
from lengthwise.schema.errors import InputError

Whole = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65_535)]
Rate = Annotated[NotNan, Field(ge=0)]
Kind = Literal["auto", "vllm", "sglang", "llama.cpp", "tgi", "transformers", "openai"]
GenerationDefaults = Literal["unknown", "none"]
Mode = Literal[
    "observe", "fcfs", "srtf", "isrtf", "windowed", "bins", "rra", "engine-priority", "engine-plugin"
]  # fmt: skip
_Above = Annotated[NotNan, BeforeValidator(seconds), Field(gt=0)]
_Mean = Annotated[NotNan, Field(ge=1, allow_inf_nan=False)]

_HOST, _SERVICE = re.compile(r"[^/\s]+:[^:/\s]+"), re.compile(r"[^/:\s]+/[^/:\s]+:[^/:\s]+")
_LISTEN, _ORDER, _ADMISSION, _DISPATCH = told.Listen(), told.Order(), told.Admission(), told.Dispatch()
_FORECASTING, _LIMITS, _CARE, _DISCOVERY = told.Forecasting(), told.Limits(), told.Care(), told.Discovery()
_ENGINE, _KEY = told.Engine("http://any"), told.Key("any", "")


def _no_split(mode: Any) -> Any:
    if isinstance(mode, str):
        try:
            refuse_split(mode)
        except InputError as error:
            raise ValueError(str(error)) from None
    return mode


class TlsSection(Section):
    """Files of certificates, in PEM."""

    cert: Text | None = None
    key: Text | None = None
    ca: Text | None = None


class ListenSection(Section):
    """Where the gateway listens. ``admin_port = "none"`` has no admin page and no metrics."""

    host: Text = _LISTEN.host
    port: Port = _LISTEN.port
    admin_host: Text = _LISTEN.admin_host
    admin_port: Port | Literal["none"] = 8001
    tls: TlsSection | None = None
    proxies: Text | None = None
    journal: Text | None = None
    trace: Text | None = None


class FoundSection(Section):
    """What holds of an engine, wherever it is. Its key is named, never written down."""

    kind: Kind = "auto"
    api_key_env: Text | None = None
    api_key_file: Text | None = None
    in_flight: Whole | None = None
    tls: TlsSection | None = None
    probe: bool = _ENGINE.probe
    generation_defaults: GenerationDefaults = "unknown"


class EngineSection(FoundSection):
    """One engine, by its address."""

    url: Text
    name: str = _ENGINE.name


class DiscoverySection(Section):
    """Engines that are found: by DNS, by a Kubernetes Service's EndpointSlices."""

    dns: Text | None = None
    endpoint_slices: Text | None = None
    every_s: Seconds = _DISCOVERY.every_s
    api_url: Text | None = None
    engine: FoundSection = FoundSection()

    @field_validator("dns")
    @classmethod
    def _a_host(cls, place: str | None) -> str | None:
        if place is not None and not _HOST.fullmatch(place):
            raise ValueError("must be host:port, such as engine-pods.default.svc:8000")
        return place

    @field_validator("endpoint_slices")
    @classmethod
    def _a_service(cls, place: str | None) -> str | None:
        if place is not None and not _SERVICE.fullmatch(place):
            raise ValueError("must be namespace/service:port, such as default/engine-pods:8000")
        return place


class OrderSection(Section):
    """Who goes first, and who makes room."""

    mode: Annotated[Mode, BeforeValidator(_no_split)] = "isrtf"
    rank: Text | None = None
    takeover: Text = _ORDER.takeover
    window_tokens: Whole = _ORDER.window_tokens
    max_wait_s: Wait = _ORDER.max_wait_s
    max_preemptions: Annotated[int, Field(ge=0)] = _ORDER.max_preemptions
    cuts_per_s: Rate = _ORDER.cuts_per_s
    fairness: Literal["none", "vtc"] = "none"
    bins: Annotated[int, Field(ge=1, le=1024)] = _ORDER.bins
    batch_wait_s: Wait = _ORDER.batch_wait_s


class AdmissionSection(Section):
    """What may wait."""

    max_queued: Whole = _ADMISSION.max_queued
    max_queued_bytes: Whole = _ADMISSION.max_queued_bytes
    max_predicted_wait_s: Wait = _ADMISSION.max_predicted_wait_s
    no_engine_s: Wait = _ADMISSION.no_engine_s


class PhasesSection(Section):
    """The schedule of phases that every engine keeps in mode rra, as `lengthwise schedule` tells it."""

    encode_batch: Whole
    decode_steps: Whole
    decode_batch: _Mean | None = None
    mean_prompt_tokens: _Mean | None = None
    threshold: Annotated[NotNan, Field(ge=0, lt=1)] | None = None
    most_in_flight: Whole | None = None


class DispatchSection(Section):
    """How many requests an engine is given, and which engine gets one."""

    start: Whole = _DISPATCH.start
    least: Whole = _DISPATCH.least
    most: Whole = _DISPATCH.most
    kv_high: Share = _DISPATCH.kv_high
    adapt_every_s: Seconds = _DISPATCH.adapt_every_s
    affinity: Annotated[NotNan, Field(ge=0, le=1)] = _DISPATCH.affinity
    prefixes: Literal["tenant", "shared", "none"] = "tenant"
    phases: PhasesSection | None = None


class ForecastingSection(Section):
    """Who predicts lengths: "default", "none" or the file of a trained predictor."""

    predictor: Text = _FORECASTING.predictor
    statistic: Literal["mean", "median", "p80", "p90"] = "mean"
    deadline_s: _Above = _FORECASTING.deadline_s
    inline_below_s: Wait = _FORECASTING.inline_below_s
    learn: bool = _FORECASTING.learn
    learn_every: Whole = _FORECASTING.learn_every


class KeySection(Section):
    """A client's key by its digest, or all keys of a file of lines ``tenant:sha256``; neither is a key itself."""

    tenant: Text | None = None
    sha256: Text | None = None
    sha256_env: Text | None = None
    key_file: Text | None = None
    models: list[Text] = Field(default_factory=list)
    priority: int = _KEY.priority
    rate_rps: Rate = _KEY.rate_rps
    burst: Whole = _KEY.burst
    concurrency: Whole | None = None


class LimitsSection(Section):
    """What the edge takes in."""

    body_bytes: Whole = _LIMITS.body_bytes
    depth: Whole = _LIMITS.depth
    n: Whole = _LIMITS.n
    max_tokens: Whole = _LIMITS.max_tokens
    header_bytes: Whole = _LIMITS.header_bytes
    headers: Whole = _LIMITS.headers
    connections: Whole = _LIMITS.connections
    body_s: Seconds = _LIMITS.body_s
    messages: Whole = _LIMITS.messages
    idle_s: Seconds = _LIMITS.idle_s
    body_budget_bytes: Whole = _LIMITS.body_budget_bytes
    values: Whole = _LIMITS.values


class CareSection(Section):
    """How engines are watched, and what is done when one fails."""

    health_every_s: Seconds = _CARE.health_every_s
    connect_s: Seconds = _CARE.connect_s
    first_byte_s: Seconds = _CARE.first_byte_s
    stall_s: Seconds = _CARE.stall_s
    failures: Whole = _CARE.failures
    open_s: Seconds = _CARE.open_s
    retry_share: Annotated[NotNan, Field(ge=0, le=1)] = _CARE.retry_share
    drain_s: Wait = _CARE.drain_s
    answer_bytes: Whole = _CARE.answer_bytes
    leave_s: Wait = _CARE.leave_s


class GatewayFile(Section):
    """A gateway's file."""

    listen: ListenSection = ListenSection()
    engines: list[EngineSection] = Field(default_factory=list)
    discovery: DiscoverySection = DiscoverySection()
    order: OrderSection = OrderSection()
    admission: AdmissionSection = AdmissionSection()
    dispatch: DispatchSection = DispatchSection()
    forecasting: ForecastingSection = ForecastingSection()
    keys: list[KeySection] = Field(default_factory=list)
    limits: LimitsSection = LimitsSection()
    care: CareSection = CareSection()

    @property
    def plain(self) -> dict[str, Any]:
        """All settings, those that were not given too, as plain tables; what is None is left out."""
        return self.model_dump(exclude_none=True)
