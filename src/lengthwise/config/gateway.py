"""Reads a gateway's file (TOML or YAML, with ``--set`` and references to secrets) into the gateway's settings."""

from __future__ import annotations

import ipaddress
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from lengthwise.config.files import Table, assignment, merged, parse, read, resolved, to_toml
from lengthwise.config.validation import Problem, Problems, WrongKeyError, raise_if_any, validated
from lengthwise.config.values import NotNan, Seconds, Section, Share, Text, Wait, input_error_as_value_error, seconds
from lengthwise.gateway import config as gateway_config
from lengthwise.gateway.config import GatewayConfig, Key
from lengthwise.gateway.request import SloClass
from lengthwise.schema.errors import InputError

PositiveInt = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65_535)]
Rate = Annotated[NotNan, Field(ge=0)]
Kind = Literal["auto", "vllm", "sglang", "llama.cpp", "tgi", "transformers", "openai"]
GenerationDefaults = Literal["unknown", "none"]
Mode = Literal["observe", "fcfs", "srtf", "isrtf", "windowed", "bins", "rra", "engine-priority", "engine-plugin"]
_Above = Annotated[NotNan, BeforeValidator(seconds), Field(gt=0)]
_Mean = Annotated[NotNan, Field(ge=1, allow_inf_nan=False)]

_PLACES = {
    "dns": (re.compile(r"[^/\s]+:[^:/\s]+"), "host:port, such as engine-pods.default.svc:8000"),
    "endpoint_slices": (
        re.compile(r"[^/:\s]+/[^/:\s]+:[^/:\s]+"), "namespace/service:port, such as default/engine-pods:8000",
    ),
}  # fmt: skip
_DEFAULTS = gateway_config.GatewayConfig(engines=(gateway_config.Engine("http://any"),))
_LISTEN, _ORDER, _ADMISSION, _DISPATCH = _DEFAULTS.listen, _DEFAULTS.order, _DEFAULTS.admission, _DEFAULTS.dispatch
_PREDICTION, _LIMITS, _RESILIENCE = _DEFAULTS.prediction, _DEFAULTS.limits, _DEFAULTS.resilience
_DISCOVERY, _ENGINE, _KEY = _DEFAULTS.discovery, _DEFAULTS.engines[0], gateway_config.Key("any", "")
_ENVOY = _DEFAULTS.envoy


def _not_split(mode: Any) -> Any:
    with input_error_as_value_error():
        if isinstance(mode, str):
            gateway_config.reject_disaggregated_mode(mode)
    return mode


class TlsSection(Section):
    """Certificate files in PEM format."""

    cert: Text | None = None
    key: Text | None = None
    ca: Text | None = None


class EngineTlsSection(TlsSection):
    """Certificate files for engines. ``server_name`` is the name that their certificates must have."""

    server_name: Text | None = None


class AdminSection(Section):
    """A user of the admin port, with the SHA-256 digest of the token (never the token)."""

    name: Annotated[Text, Field(max_length=64)]
    role: Literal["viewer", "operator", "admin"] = "viewer"
    sha256: Text | None = None
    sha256_env: Text | None = None
    sha256_file: Text | None = None


class ListenSection(Section):
    """Where the gateway listens. With ``admin_port = "none"`` it serves no admin page and no metrics."""

    host: Text = _LISTEN.host
    port: Port = _LISTEN.port
    admin_host: Text = _LISTEN.admin_host
    admin_port: Port | Literal["none"] = 8001
    tls: TlsSection | None = None
    admin_tls: TlsSection | None = None
    admins: list[AdminSection] = Field(default_factory=list)
    proxies: Text | None = None
    journal: Text | None = None
    audit: Text | None = None
    trace: Text | None = None


class EngineTemplate(Section):
    """Settings of an engine without its address. The file names the variable or file of the API key, never the key."""

    kind: Kind = "auto"
    api_key_env: Text | None = None
    api_key_file: Text | None = None
    concurrency: PositiveInt | None = None
    tls: EngineTlsSection | None = None
    probe: bool = _ENGINE.probe
    generation_defaults: GenerationDefaults = "unknown"


class EngineSection(EngineTemplate):
    """One engine and its address."""

    url: Text
    name: str = _ENGINE.name


class DiscoverySection(Section):
    """Discovery of engines by DNS or by the EndpointSlices of a Kubernetes Service."""

    dns: Text | None = None
    endpoint_slices: Text | None = None
    every_s: Seconds = _DISCOVERY.every_s
    api_url: Text | None = None
    engine: EngineTemplate = EngineTemplate()

    @field_validator("dns", "endpoint_slices")
    @classmethod
    def _check_place(cls, place: str | None, info: ValidationInfo) -> str | None:
        pattern, form = _PLACES[str(info.field_name)]
        if place is not None and not pattern.fullmatch(place):
            raise ValueError(f"must be {form}")
        return place


class OrderSection(Section):
    """The order in which requests are served, and which requests preempt others."""

    mode: Annotated[Mode, BeforeValidator(_not_split)] = "isrtf"
    rank: Text | None = None
    preemption: Text = _ORDER.preemption
    window_tokens: PositiveInt = _ORDER.window_tokens
    max_wait_s: Wait = _ORDER.max_wait_s
    max_preemptions: Annotated[int, Field(ge=0)] = _ORDER.max_preemptions
    preemptions_per_s: Rate = _ORDER.preemptions_per_s
    fairness: Literal["none", "vtc"] = "none"
    bins: Annotated[int, Field(ge=1, le=1024)] = _ORDER.bins
    batch_wait_s: Wait = _ORDER.batch_wait_s


class AdmissionSection(Section):
    """Limits of the queue."""

    max_queued: PositiveInt = _ADMISSION.max_queued
    max_queued_per_tenant: PositiveInt | None = _ADMISSION.max_queued_per_tenant
    max_queued_bytes: PositiveInt = _ADMISSION.max_queued_bytes
    max_predicted_wait_s: Wait = _ADMISSION.max_predicted_wait_s
    no_engine_s: Wait = _ADMISSION.no_engine_s


class PhasesSection(Section):
    """The schedule of phases that every engine follows in mode rra, as `lengthwise schedule` plans it."""

    prefill_batch: PositiveInt
    decode_steps: PositiveInt
    decode_batch: _Mean | None = None
    mean_prompt_tokens: _Mean | None = None
    threshold: Annotated[NotNan, Field(ge=0, lt=1)] | None = None
    max_requests: PositiveInt | None = None


class DispatchSection(Section):
    """How many requests an engine runs at once, and how an engine is chosen for a request."""

    start: PositiveInt = _DISPATCH.start
    min_concurrency: PositiveInt = _DISPATCH.min_concurrency
    max_concurrency: PositiveInt = _DISPATCH.max_concurrency
    kv_high: Share = _DISPATCH.kv_high
    adapt_every_s: Seconds = _DISPATCH.adapt_every_s
    affinity: Annotated[NotNan, Field(ge=0, le=1)] = _DISPATCH.affinity
    prefixes: Literal["tenant", "shared", "none"] = "tenant"
    router: Text = _DISPATCH.router
    phases: PhasesSection | None = None


class PredictionSection(Section):
    """The predictor of output lengths: "default", "none" or the file of a trained predictor."""

    predictor: Text = _PREDICTION.predictor
    statistic: Literal["mean", "median", "p80", "p90"] = "mean"
    deadline_s: _Above = _PREDICTION.deadline_s
    inline_below_s: Wait = _PREDICTION.inline_below_s
    learn: bool = _PREDICTION.learn
    learn_every: PositiveInt = _PREDICTION.learn_every


class KeySection(Section):
    """Keys of clients and their limits: a SHA-256 digest (never the key), or a file with lines ``tenant:sha256``."""

    tenant: Text | None = None
    sha256: Text | None = None
    sha256_env: Text | None = None
    sha256_file: Text | None = None
    key_file: Text | None = None
    models: list[Text] = Field(default_factory=list)
    priority: int = _KEY.priority
    rate_rps: Rate = _KEY.rate_rps
    burst: PositiveInt = _KEY.burst
    concurrency: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    tokens_per_day: PositiveInt | None = None
    cost_per_day: Annotated[NotNan, Field(gt=0, allow_inf_nan=False)] | None = None
    input_cost_per_token: Rate = _KEY.input_cost_per_token
    output_cost_per_token: Rate = _KEY.output_cost_per_token
    slo_class: Text | None = None


class SloClassSection(Section):
    """Requests with limits of latency: those that are predicted to exceed one are refused at once."""

    name: Text
    ttft_s: Wait = math.inf
    jct_s: Wait = math.inf


class TenantsSection(Section):
    """The store of tenants, keys and usage. The file names the variable of a database's URL, never its password."""

    store: Text | None = None
    store_env: Text | None = None
    store_file: Text | None = None
    admin_sha256: Text | None = None
    admin_sha256_env: Text | None = None
    admin_sha256_file: Text | None = None
    progress: Text | None = None
    reserve: Literal["predicted", "max_tokens"] = "predicted"
    refresh_s: _Above = _DEFAULTS.tenants.refresh_s


class OidcSection(Section):
    """JSON web tokens of an issuer, instead of keys."""

    jwks: Text
    issuer: Text
    audience: Text
    tenant_claim: Text = "tenant"
    priority_claim: Text | None = None
    role_claim: Text | None = None
    refresh_s: _Above = 300.0


class ExternalAuthSection(Section):
    """A service that allows or refuses each request, instead of keys."""

    url: Text
    timeout_s: _Above = 1.0


class LimitsSection(Section):
    """Limits on what clients may send."""

    body_bytes: PositiveInt = _LIMITS.body_bytes
    depth: PositiveInt = _LIMITS.depth
    n: PositiveInt = _LIMITS.n
    max_tokens: PositiveInt = _LIMITS.max_tokens
    header_bytes: PositiveInt = _LIMITS.header_bytes
    headers: PositiveInt = _LIMITS.headers
    connections: PositiveInt = _LIMITS.connections
    body_s: Seconds = _LIMITS.body_s
    messages: PositiveInt = _LIMITS.messages
    idle_s: Seconds = _LIMITS.idle_s
    body_budget_bytes: PositiveInt = _LIMITS.body_budget_bytes
    values: PositiveInt = _LIMITS.values
    media_hosts: list[Text] = Field(default_factory=list)
    connections_per_address: PositiveInt | None = None
    rate_per_address: Annotated[NotNan, Field(gt=0)] = _LIMITS.rate_per_address


class ResilienceSection(Section):
    """Health checks of engines, and what happens when an engine fails."""

    health_every_s: Seconds = _RESILIENCE.health_every_s
    connect_s: Seconds = _RESILIENCE.connect_s
    first_byte_s: Seconds = _RESILIENCE.first_byte_s
    stall_s: Seconds = _RESILIENCE.stall_s
    failures: PositiveInt = _RESILIENCE.failures
    open_s: Seconds = _RESILIENCE.open_s
    retry_share: Annotated[NotNan, Field(ge=0, le=1)] = _RESILIENCE.retry_share
    linger_s: Wait = _RESILIENCE.linger_s
    drain_s: Wait = _RESILIENCE.drain_s
    answer_bytes: PositiveInt = _RESILIENCE.answer_bytes
    leave_s: Wait = _RESILIENCE.leave_s


class EnvoySection(Section):
    """The endpoint picker for Envoy, and the configuration that `lengthwise serve --envoy-config` writes."""

    ext_proc_port: Port | None = None
    picker_host: Text = _ENVOY.picker_host
    tls: TlsSection | None = None
    client_tls: TlsSection | None = None
    host: Text = _ENVOY.host
    port: Port = _ENVOY.port
    failure: Literal["closed", "open"] = "closed"
    picker_timeout_s: Annotated[_Above, Field(le=3600)] = _ENVOY.picker_timeout_s  # Envoy's limit


class SharedQueueSection(Section):
    """One queue over several gateways. The file names the variable of a database's URL, never its password."""

    url: Text | None = None
    url_env: Text | None = None
    name: Text = _DEFAULTS.shared_queue.name
    lease_s: Annotated[Seconds, Field(ge=0.1)] = _DEFAULTS.shared_queue.lease_s


class GatewayFile(Section):
    """The complete file of a gateway."""

    listen: ListenSection = ListenSection()
    engines: list[EngineSection] = Field(default_factory=list)
    engine_tls: EngineTlsSection | None = None
    discovery: DiscoverySection = DiscoverySection()
    order: OrderSection = OrderSection()
    admission: AdmissionSection = AdmissionSection()
    dispatch: DispatchSection = DispatchSection()
    prediction: PredictionSection = PredictionSection()
    keys: list[KeySection] = Field(default_factory=list)
    tenants: TenantsSection = TenantsSection()
    slo_classes: list[SloClassSection] = Field(default_factory=list)
    oidc: OidcSection | None = None
    external_auth: ExternalAuthSection | None = None
    limits: LimitsSection = LimitsSection()
    resilience: ResilienceSection = ResilienceSection()
    envoy: EnvoySection = EnvoySection()
    shared_queue: SharedQueueSection = SharedQueueSection()


@dataclass(frozen=True)
class GatewaySettings:
    """The settings of a gateway, after all checks."""

    config: GatewayConfig  # for ``gateway.serve``
    toml: str  # all settings, including defaults, as an equivalent file; no secrets, only references to them
    source: str  # the file, or "the command line"


_KIND = "gateway"
_SHORT = {"order": "mode", "prediction": "predictor"}
_NO_SECRETS = {
    "api_key": "a key must not stand in the file; name the variable (api_key_env) or file (api_key_file) that has it",
    "key": "a key must not stand in the file; give its sha256 (lengthwise serve --hash-key prints it), or a key_file",
}
_SHIPPED = ("default", "none")
_UNUSED_URL = gateway_config.Discovery().engine.url  # the address in ``Engine`` records that have none
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_A_DIGEST = "must be the 64 hex digits of a SHA-256 digest (lengthwise serve --hash-key prints it)"
_PASSWORD = re.compile(r"(?<=://)[^/@\s\"]*@")
_WEB_ADDRESS = re.compile(r"[\x21-\x7e]+")


def load_gateway(
    path: Path | str | None = None,
    overrides: Sequence[str] = (),
    engines: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
) -> GatewaySettings:
    """Read and check a gateway's file (TOML or YAML); None: only the overrides.

    Relative paths in the file start at its folder. ``overrides`` are assignments such as ``"order.mode=fcfs"``; the
    last one for a key wins. ``engines`` are addresses of further engines. ``options`` maps keys that ``overrides`` set
    to the command-line options behind them, which messages name. Raises ScenarioError, which lists all wrong keys and
    values.
    """
    if path is None:
        return _checked({}, "the command line", Path(), overrides, engines, options)
    path = Path(path)
    return _checked(read(path, _KIND), str(path), path.parent, overrides, engines, options)


def loads_gateway(
    text: str, *, suffix: str = ".toml", folder: Path | str = ".", overrides: Sequence[str] = ()
) -> GatewaySettings:
    """Parse and check the text of a gateway's file. Raises ScenarioError, as ``load_gateway`` does."""
    return _checked(parse(text, suffix, _KIND, _KIND), _KIND, Path(folder), overrides, ())


def gateway_reader(
    path: Path | str, overrides: Sequence[str] = (), engines: Sequence[str] = ()
) -> Callable[[], GatewayConfig]:
    """Return a function that reads the file again, and the files of keys that it names."""
    return lambda: load_gateway(path, overrides, engines).config


def _checked(
    raw: Table,
    source: str,
    folder: Path,
    overrides: Sequence[str],
    engines: Sequence[str],
    options: Mapping[str, str] | None = None,
) -> GatewaySettings:
    settings, paths = _expanded(raw), []
    for text in overrides:
        keys, over = assignment(text, "order.mode=fcfs")
        paths.append(tuple(key.replace("-", "_") for key in keys))
        settings = merged(settings, _expanded(over))
    from_option = {tuple(key.split(".")): option for key, option in (options or {}).items()}
    # If --set gives the setting as well, the value is that of --set.
    from_option = {path: option for path, option in from_option.items() if paths.count(path) == 1}
    listed = settings.get("engines", [])
    if engines and isinstance(listed, list):
        settings = settings | {"engines": [*listed, *({"url": url} for url in engines)]}
    settings, problems = _without_secrets(settings)
    file, found = validated(GatewayFile, settings)
    raise_if_any([*problems, *found], source, paths, from_option)
    assert file is not None  # None only with problems
    builder = _Builder(folder)
    config = builder.build(file)
    raise_if_any(builder.problems, source, paths, from_option)
    assert config is not None  # None only with problems
    toml = _PASSWORD.sub("...@", to_toml(file.model_dump(exclude_none=True)))
    return GatewaySettings(config, toml, source)


def _expanded(value: Any) -> Any:
    """Return the tables with underscores in keys, and with short forms such as ``order = "srtf"`` expanded."""
    if not isinstance(value, dict):
        return value
    table = {str(key).replace("-", "_"): _expanded(inner) for key, inner in value.items()}
    for section, key in _SHORT.items():
        if isinstance(table.get(section), str):
            table[section] = {key: table[section]}
    if isinstance(table.get("engines"), list):
        table["engines"] = [{"url": one} if isinstance(one, str) else _expanded(one) for one in table["engines"]]
    if isinstance(table.get("keys"), list):
        table["keys"] = list(map(_expanded, table["keys"]))
    return table


def _without_secrets(settings: Table) -> tuple[Table, list[Problem]]:
    """Return the settings without API keys in clear text, and a problem for each; no message repeats a key."""
    problems: list[Problem] = []

    def stripped(value: Any, path: tuple[str, ...]) -> Any:
        if not isinstance(value, dict):
            return value
        problems.extend(Problem((*path, key), text) for key, text in _NO_SECRETS.items() if key in value)
        return {key: inner for key, inner in value.items() if key not in _NO_SECRETS}

    out = dict(settings)
    for name in ("engines", "keys"):
        if isinstance(out.get(name), list):
            out[name] = [stripped(inner, (name, str(at))) for at, inner in enumerate(out[name])]
    discovery = out.get("discovery", {})
    if isinstance(discovery, dict) and "engine" in discovery:
        out["discovery"] = discovery | {"engine": stripped(discovery["engine"], ("discovery", "engine"))}
    return out, problems


class _Builder:
    def __init__(self, folder: Path) -> None:
        self.folder, self.problems = folder, Problems()

    def build(self, file: GatewayFile) -> GatewayConfig | None:
        self._engine_tls = self._tls(file.engine_tls, "engine_tls")
        parts: dict[str, Any] = {
            "engines": tuple(self._engine(one, "engines", str(at)) for at, one in enumerate(file.engines)),
            "discovery": self._discovery(file.discovery),
            "order": self._order(file.order),
            "prediction": self._prediction(file.prediction),
            "keys": self._keys(file.keys),
            "tenants": self._tenants(file.tenants),
            "slo_classes": self._slo_classes(file.slo_classes),
            "oidc": self._oidc(file.oidc),
            "external_auth": self._external_auth(file.external_auth),
            "listen": self._listen(file.listen),
            "dispatch": self._dispatch(file.dispatch),
            "envoy": self._envoy(file.envoy),
            "shared_queue": self._shared_queue(file.shared_queue),
        }
        defaults: dict[str, Any] = {"admission": _ADMISSION, "limits": _LIMITS, "resilience": _RESILIENCE}
        for name, default in defaults.items():
            with self.problems.at(name):
                given = getattr(file, name).model_dump().items()
                parts[name] = type(default)(**{key: tuple(one) if isinstance(one, list) else one for key, one in given})
        names: set[str] = set()
        for at, engine in enumerate(parts["engines"]):
            name = engine.name or urlsplit(engine.url).netloc.rpartition("@")[2]
            if name in names:
                text = f"every engine must have a unique name; {name!r} occurs twice. Set its name"
                self.problems.add(text, "engines", str(at))
            names.add(name)
        if self.problems:
            return None
        with self.problems.at():
            config = GatewayConfig(**parts)
            with self.problems.at("engines"):
                gateway_config.check_ports(config)
            return config
        return None

    def _file(self, text: str, *path: str) -> str:
        found = resolved(text, self.folder)
        if not found.is_file():
            self.problems.add(f"there is no file {found}", *path)
        return str(found)

    def _tls(self, section: TlsSection | None, *path: str) -> gateway_config.Tls | None:
        if section is None:
            return None
        if (section.cert is None) is not (section.key is None):
            self.problems.add("cert and key belong together; give both or none", *path)
        given = section.model_dump(exclude_none=True)
        name = given.pop("server_name", None)
        files = {key: self._file(text, *path, key) for key, text in given.items()}
        return gateway_config.Tls(**files, server_name=name)

    def _engine(self, section: EngineTemplate, *path: str) -> gateway_config.Engine:
        with self.problems.at(*path):
            url, name = _UNUSED_URL, ""
            if isinstance(section, EngineSection):
                check_address(section.url, "the address of a server")
                url, name = section.url, section.name
            settings = section.model_dump(include={"kind", "concurrency", "probe", "generation_defaults"})
            key, tls = _engine_key(section, self.folder), self._tls(section.tls, *path, "tls")
            if tls is None and (url.startswith("https:") or not isinstance(section, EngineSection)):
                tls = self._engine_tls
            return gateway_config.Engine(url, name=name, api_key=key, tls=tls, **settings)
        # The problem is recorded above. The unique name prevents a second one, about a duplicate name.
        return gateway_config.Engine(_UNUSED_URL, name=".".join(path))

    def _discovery(self, section: DiscoverySection) -> gateway_config.Discovery:
        with self.problems.at("discovery", "api_url"):
            if section.api_url is not None:
                check_address(section.api_url, "the address of the Kubernetes API")
        engine = self._engine(section.engine, "discovery", "engine")
        return gateway_config.Discovery(**section.model_dump(exclude={"engine"}), engine=engine)

    def _order(self, section: OrderSection) -> gateway_config.Order:
        from lengthwise.policy import resolve

        for axis in ("rank", "preemption"):
            name = getattr(section, axis)
            with self.problems.at("order", axis):
                if name is not None:
                    resolve(axis, name)
        return gateway_config.Order(**section.model_dump())

    def _dispatch(self, section: DispatchSection) -> gateway_config.Dispatch:
        phases = None
        with self.problems.at("dispatch", "phases"):
            phases = gateway_config.Phases(**section.phases.model_dump()) if section.phases else None
        dispatch = gateway_config.Dispatch()
        with self.problems.at("dispatch"):
            dispatch = gateway_config.Dispatch(**section.model_dump(exclude={"phases"}), phases=phases)
        with self.problems.at("dispatch", "router"):
            gateway_config.router_policy(dispatch)
        return dispatch

    def _server_tls(self, section: TlsSection | None, *path: str) -> gateway_config.Tls | None:
        tls = self._tls(section, *path)
        if tls is not None and tls.cert is None:
            self.problems.add("a server needs cert and key", *path)
        return tls

    def _envoy(self, section: EnvoySection) -> gateway_config.Envoy:
        tls: dict[str, Any]
        tls = {name: self._server_tls(getattr(section, name), "envoy", name) for name in ("tls", "client_tls")}
        return gateway_config.Envoy(**section.model_dump(exclude={"tls", "client_tls"}), **tls)

    def _listen(self, section: ListenSection) -> gateway_config.Listen:
        tls: dict[str, Any] = {
            name: self._server_tls(getattr(section, name), "listen", name) for name in ("tls", "admin_tls")
        }
        if section.admin_port == section.port and section.port and section.admin_host == section.host:
            self.problems.add("must differ from port", "listen", "admin_port")
        files: dict[str, Any] = {}
        for name in ("journal", "audit"):
            with self.problems.at("listen", name):
                if (text := getattr(section, name)) is not None:
                    check_journal(path := self.folder / Path(text).expanduser())
                    files[name] = str(path)
        with self.problems.at("listen", "proxies"):
            check_proxies(section.proxies or "*")
        with self.problems.at("listen", "trace"):
            if section.trace is not None:
                check_collector(section.trace)
        return gateway_config.Listen(
            **section.model_dump(include={"host", "port", "admin_host", "proxies", "trace"}),
            admin_port=None if section.admin_port == "none" else section.admin_port,
            admins=self._admins(section.admins),
            **tls,
            **files,
        )

    def _admins(self, sections: Sequence[AdminSection]) -> tuple[gateway_config.AdminUser, ...]:
        by_digest: dict[str, gateway_config.AdminUser] = {}
        for at, section in enumerate(sections):
            with self.problems.at("listen", "admins", str(at)):
                digest = _secret(section, "sha256", self.folder, "digest")
                if digest is None:
                    raise InputError("needs exactly one of sha256, sha256_env, sha256_file")
                if not _DIGEST.fullmatch(digest):
                    raise WrongKeyError("sha256", _A_DIGEST)
                if (other := by_digest.get(digest.lower())) is not None:
                    raise InputError(f"{other.name} and {section.name} have the same token; give each its own")
                by_digest[digest.lower()] = gateway_config.AdminUser(section.name, digest.lower(), section.role)
        return tuple(by_digest.values())

    def _prediction(self, section: PredictionSection) -> gateway_config.PredictionConfig:
        settings = section.model_dump()
        if section.predictor not in _SHIPPED:
            settings["predictor"] = self._file(section.predictor, "prediction", "predictor")
        return gateway_config.PredictionConfig(**settings)

    def _slo_classes(self, sections: Sequence[SloClassSection]) -> tuple[SloClass, ...]:
        found = []
        for at, section in enumerate(sections):
            with self.problems.at("slo_classes", str(at)):
                found.append(SloClass(**section.model_dump()))
        return tuple(found)

    def _oidc(self, section: OidcSection | None) -> gateway_config.Oidc | None:
        if section is None:
            return None
        jwks = section.jwks if "://" in section.jwks else self._file(section.jwks, "oidc", "jwks")
        with self.problems.at("oidc", "jwks"):
            if "://" in jwks:
                check_address(jwks, "the address of an issuer's keys")
        return gateway_config.Oidc(**section.model_dump() | {"jwks": jwks})

    def _external_auth(self, section: ExternalAuthSection | None) -> gateway_config.ExternalAuth | None:
        if section is None:
            return None
        with self.problems.at("external_auth", "url"):
            check_address(section.url, "the address of an authorization service")
        return gateway_config.ExternalAuth(**section.model_dump())

    def _tenants(self, section: TenantsSection) -> gateway_config.TenantsConfig:
        given: dict[str, str] = {}
        with self.problems.at("tenants"):
            for name, what in (("store", "URL"), ("admin_sha256", "digest")):
                if (value := _secret(section, name, self.folder, what)) is not None:
                    given[name] = value
            if section.store is not None and urlsplit(section.store).password is not None:
                text = "must have no password; name a variable or a file with the URL: store_env, store_file"
                raise WrongKeyError("store", text)
            if "admin_sha256" in given and not _DIGEST.fullmatch(given["admin_sha256"]):
                raise WrongKeyError("admin_sha256", _A_DIGEST)
            if "://" not in (store := given.get("store", "://")):
                given["store"] = str(resolved(store, self.folder))
            elif not store.startswith(("://", "postgresql://", "postgres://")):
                raise WrongKeyError("store", "must be an SQLite file, or the URL postgresql://HOST/DATABASE")
            if section.progress is not None:
                given["progress"] = str(resolved(section.progress, self.folder))
                if not Path(given["progress"]).is_dir():
                    raise WrongKeyError("progress", f"must be an existing folder; it is {given['progress']}")
            return gateway_config.TenantsConfig(**given, reserve=section.reserve, refresh_s=section.refresh_s)
        return gateway_config.TenantsConfig()

    def _shared_queue(self, section: SharedQueueSection) -> gateway_config.SharedQueueConfig:
        with self.problems.at("shared_queue"):
            url = _secret(section, "url", self.folder, "URL")
            if section.url is not None and urlsplit(section.url).password is not None:
                raise WrongKeyError("url", "must have no password; name a variable with the URL: url_env")
            if url is not None and not url.startswith(("postgresql://", "postgres://")):
                name = "url" if section.url_env is None else "url_env"
                raise WrongKeyError(name, "must be the URL of a PostgreSQL database: postgresql://HOST/DATABASE")
            return gateway_config.SharedQueueConfig(url, section.name, section.lease_s)
        return gateway_config.SharedQueueConfig()

    def _keys(self, sections: Sequence[KeySection]) -> tuple[Key, ...]:
        by_digest: dict[str, Key] = {}
        for at, section in enumerate(sections):
            with self.problems.at("keys", str(at)):
                for key in _client_keys(section, self.folder):
                    if key.sha256 in by_digest:
                        both = f"{by_digest[key.sha256].tenant} and {key.tenant}"
                        raise InputError(f"one key is given twice, to {both}; give each its own")
                    by_digest[key.sha256] = key
        return tuple(by_digest.values())


def _engine_key(section: EngineTemplate, folder: Path) -> str | None:
    key = _secret(section, "api_key", folder, "key")
    if key is not None and not (key.isascii() and key.isprintable()):
        name = "api_key_env" if section.api_key_env is not None else "api_key_file"
        raise WrongKeyError(name, "the key must be one line of printable ASCII, because a header carries it")
    return key


def _secret(section: Section, name: str, folder: Path, what: str) -> str | None:
    """Return the value of a key, or of the variable (``NAME_env``) or file (``NAME_file``) that has it, or None."""
    keys = [key for key in (name, f"{name}_env", f"{name}_file") if getattr(section, key, None) is not None]
    if len(keys) > 1:
        raise WrongKeyError(keys[1], f"means the same as {keys[0]}; keep one of them")
    if not keys:
        return None
    given = str(getattr(section, keys[0]))
    if keys[0].endswith("_env"):
        return _variable(keys[0], given, what)
    if keys[0].endswith("_file"):
        if not (text := _text(keys[0], given, folder).strip()):
            raise WrongKeyError(keys[0], f"the file {given} must hold the {what}; it is empty")
        return text
    return given


def _client_keys(section: KeySection, folder: Path) -> tuple[Key, ...]:
    ways = ("sha256", "sha256_env", "sha256_file", "key_file")
    given = [name for name in ways if getattr(section, name) is not None]
    if len(given) != 1:
        text = f"needs exactly one of {', '.join(ways)}"
        raise WrongKeyError(given[-1], text) if given else InputError(text)
    if (section.tenant is None) is (section.key_file is None):
        text = "is given by the lines of key_file; leave it out" if section.key_file else "is missing"
        raise WrongKeyError("tenant", text)
    if section.key_file is not None:
        digests = _digests_of_file(_text("key_file", section.key_file, folder), section.key_file)
    else:
        digest = _secret(section, "sha256", folder, "digest") or ""
        if not _DIGEST.fullmatch(digest):
            raise WrongKeyError(given[0], _A_DIGEST)
        digests = [(section.tenant or "", digest)]
    settings = section.model_dump(exclude={"tenant", "models", *ways})
    models = tuple(section.models)
    return tuple(Key(tenant, digest.lower(), models, **settings) for tenant, digest in digests)


def _digests_of_file(text: str, name: str) -> list[tuple[str, str]]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not (content := line.partition("#")[0].strip()):
            continue
        tenant, colon, digest = (part.strip() for part in content.rpartition(":"))
        if not (colon and tenant):
            text = f"line {number} of {name} must be tenant:sha256, such as batch-team:9f86d0..."
            raise WrongKeyError("key_file", text)
        if not _DIGEST.fullmatch(digest):
            raise WrongKeyError("key_file", f"the text behind the colon in line {number} of {name} {_A_DIGEST}")
        found.append((tenant, digest))
    if not found:
        raise WrongKeyError("key_file", f"{name} holds no key; a gateway without keys is open to all clients")
    return found


def _variable(name: str, variable: str, what: str = "key") -> str:
    value = os.environ.get(variable, "").strip()
    if not value:
        raise WrongKeyError(name, f"the environment variable {variable} must hold the {what}; it is not set")
    return value


def _text(name: str, file: str, folder: Path) -> str:
    path = resolved(file, folder)
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise WrongKeyError(name, f"cannot read {path}: {reason}") from None


def check_address(text: str, what: str) -> None:
    """Raise InputError if the text is not an HTTP(S) URL. The message calls it ``what``, and hides passwords."""
    shown = re.sub(r"//[^/]*@", "//...@", text)
    fault = f"{what} must begin with http:// or https:// and name a host, with a port of 1 to 65535; it is {shown!r}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise InputError(fault) from None
    if not (_WEB_ADDRESS.fullmatch(text) and parts.scheme in ("http", "https") and parts.hostname) or port == 0:
        raise InputError(fault)


def check_collector(text: str) -> None:
    """Raise InputError if the text is not the URL of a trace collector."""
    check_address(text, "the address of a collector (OTLP over HTTP)")
    parts = urlsplit(text)
    if parts.username is not None or parts.query or parts.fragment:
        raise InputError(
            "the address of a collector must be host, port and path alone, such as http://collector:4318; a key for it "
            "goes into the environment variable OTEL_EXPORTER_OTLP_HEADERS"
        )


def check_proxies(text: str) -> None:
    """Raise InputError unless the text is "*" or lists IP addresses and networks, separated by commas."""
    if text.strip() == "*":
        return
    for one in (part.strip() for part in text.split(",")):
        try:
            ipaddress.ip_network(one) if "/" in one else ipaddress.ip_address(one)
        except ValueError:
            reason = f"{one!r} is none"
            with suppress(ValueError):
                if "/" in one:
                    network = ipaddress.ip_network(one, strict=False)
                    reason = f"{one!r} has bits beyond its network: did you mean {network}?"
            raise InputError(
                'must be addresses with commas, such as "10.0.0.7, 10.1.0.0/16", or "*" alone for any; ' + reason
            ) from None


def check_journal(path: Path) -> None:
    """Raise InputError if a journal cannot be written at this path."""
    folder, exists = path.parent, path.exists()
    if path.is_dir():
        fault = f"{path} is a folder: name a file in it"
    elif not exists and not folder.is_dir():
        fault = f"there is no folder {folder}: make it, or name another file"
    elif not os.access(path if exists else folder, os.W_OK):
        fault = f"{path if exists else folder} cannot be written by this user"
    else:
        return
    raise InputError(f"must be a file that can be written; {fault}")
