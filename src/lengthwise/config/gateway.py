"""A gateway's file: TOML or YAML with ``--set`` and secrets by reference, to what a gateway is told."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, ValidationError, field_validator

from lengthwise.config.files import Table, assignment, merged, parse, read, resolved, toml
from lengthwise.config.validation import Problem, findings, raise_if_any
from lengthwise.config.values import NotNan, Seconds, Section, Share, Text, Wait, seconds
from lengthwise.gateway import config as told
from lengthwise.gateway.config import GatewayConfig, Key, check_ports, refuse_split
from lengthwise.schema.errors import InputError

PositiveInt = Annotated[int, Field(ge=1)]
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
_FORECASTING, _LIMITS, _CARE, _DISCOVERY = told.Forecasting(), told.Limits(), told.ResilienceConfig(), told.Discovery()
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
    in_flight: PositiveInt | None = None
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
    window_tokens: PositiveInt = _ORDER.window_tokens
    max_wait_s: Wait = _ORDER.max_wait_s
    max_preemptions: Annotated[int, Field(ge=0)] = _ORDER.max_preemptions
    cuts_per_s: Rate = _ORDER.cuts_per_s
    fairness: Literal["none", "vtc"] = "none"
    bins: Annotated[int, Field(ge=1, le=1024)] = _ORDER.bins
    batch_wait_s: Wait = _ORDER.batch_wait_s


class AdmissionSection(Section):
    """What may wait."""

    max_queued: PositiveInt = _ADMISSION.max_queued
    max_queued_bytes: PositiveInt = _ADMISSION.max_queued_bytes
    max_predicted_wait_s: Wait = _ADMISSION.max_predicted_wait_s
    no_engine_s: Wait = _ADMISSION.no_engine_s


class PhasesSection(Section):
    """The schedule of phases that every engine keeps in mode rra, as `lengthwise schedule` tells it."""

    encode_batch: PositiveInt
    decode_steps: PositiveInt
    decode_batch: _Mean | None = None
    mean_prompt_tokens: _Mean | None = None
    threshold: Annotated[NotNan, Field(ge=0, lt=1)] | None = None
    max_in_flight: PositiveInt | None = None


class DispatchSection(Section):
    """How many requests an engine is given, and which engine gets one."""

    start: PositiveInt = _DISPATCH.start
    least: PositiveInt = _DISPATCH.least
    most: PositiveInt = _DISPATCH.most
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
    learn_every: PositiveInt = _FORECASTING.learn_every


class KeySection(Section):
    """A client's key by its digest, or all keys of a file of lines ``tenant:sha256``; neither is a key itself."""

    tenant: Text | None = None
    sha256: Text | None = None
    sha256_env: Text | None = None
    key_file: Text | None = None
    models: list[Text] = Field(default_factory=list)
    priority: int = _KEY.priority
    rate_rps: Rate = _KEY.rate_rps
    burst: PositiveInt = _KEY.burst
    concurrency: PositiveInt | None = None


class LimitsSection(Section):
    """What the edge takes in."""

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


class CareSection(Section):
    """How engines are watched, and what is done when one fails."""

    health_every_s: Seconds = _CARE.health_every_s
    connect_s: Seconds = _CARE.connect_s
    first_byte_s: Seconds = _CARE.first_byte_s
    stall_s: Seconds = _CARE.stall_s
    failures: PositiveInt = _CARE.failures
    open_s: Seconds = _CARE.open_s
    retry_share: Annotated[NotNan, Field(ge=0, le=1)] = _CARE.retry_share
    drain_s: Wait = _CARE.drain_s
    answer_bytes: PositiveInt = _CARE.answer_bytes
    leave_s: Wait = _CARE.leave_s


class GatewayFile(Section):
    """A gateway's file."""

    listen: ListenSection = ListenSection()
    engines: list[EngineSection] = Field(default_factory=list)
    discovery: DiscoverySection = DiscoverySection()
    order: OrderSection = OrderSection()
    admission: AdmissionSection = AdmissionSection()
    dispatch: DispatchSection = DispatchSection()
    prediction: ForecastingSection = ForecastingSection()
    keys: list[KeySection] = Field(default_factory=list)
    limits: LimitsSection = LimitsSection()
    resilience: CareSection = CareSection()

    @property
    def plain(self) -> dict[str, Any]:
        """All settings, those that were not given too, as plain tables; what is None is left out."""
        return self.model_dump(exclude_none=True)


_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_A_DIGEST = "must be the 64 hex digits of a SHA-256 digest (lengthwise serve --hash-key prints it)"
_A_LINE = "must be tenant:sha256, such as batch-team:9f86d0..."


class WrongKeyError(Exception):
    """A key that cannot be had: which setting says so, and what must hold."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name, self.text = name, text


def engine_key(section: FoundSection, folder: Path) -> str | None:
    """What the gateway shows an engine; raises WrongKeyError."""
    if section.api_key_env is not None and section.api_key_file is not None:
        raise WrongKeyError("api_key_env", "means the same as api_key_file; keep one of them")
    if section.api_key_env is not None:
        return _header(_variable("api_key_env", section.api_key_env), "api_key_env")
    if section.api_key_file is not None:
        return _header(_text("api_key_file", section.api_key_file, folder).strip(), "api_key_file")
    return None


def client_keys(section: KeySection, folder: Path) -> tuple[Key, ...]:
    """The keys that one table gives; raises WrongKeyError."""
    ways = ("sha256", "sha256_env", "key_file")
    given = [name for name in ways if getattr(section, name) is not None]
    if len(given) != 1:
        raise WrongKeyError(given[-1] if given else "", f"needs exactly one of {', '.join(ways)}")
    if (section.tenant is None) is (section.key_file is None):
        text = "is told by the lines of key_file; leave it out" if section.key_file else "is missing"
        raise WrongKeyError("tenant", text)
    return tuple(
        Key(
            tenant,
            digest.lower(),
            tuple(section.models),
            section.priority,
            section.rate_rps,
            section.burst,
            section.concurrency,
        )
        for tenant, digest in _digests(section, folder)
    )


def _digests(section: KeySection, folder: Path) -> Iterator[tuple[str, str]]:
    if section.key_file is not None:
        yield from _lines(_text("key_file", section.key_file, folder), section.key_file)
        return
    name = "sha256" if section.sha256 is not None else "sha256_env"
    digest = section.sha256 or _variable(name, section.sha256_env or "")
    if not _DIGEST.fullmatch(digest):
        raise WrongKeyError(name, _A_DIGEST)
    yield section.tenant or "", digest


def _lines(text: str, name: str) -> Iterator[tuple[str, str]]:
    """Tenant and digest of each line; empty ones and those from # on say nothing."""
    said = [(number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1)]
    found = 0
    for number, line in said:
        tenant, colon, digest = line.rpartition(":")
        tenant, digest, found = tenant.strip(), digest.strip(), found + bool(line)
        if line and not (colon and tenant):
            raise WrongKeyError("key_file", f"line {number} of {name} {_A_LINE}")
        if line and not _DIGEST.fullmatch(digest):
            raise WrongKeyError("key_file", f"what stands behind the colon in line {number} of {name} {_A_DIGEST}")
        if line:
            yield tenant, digest
    if not found:
        raise WrongKeyError("key_file", f"{name} holds no key; a gateway without keys is open to everybody")


def _variable(name: str, variable: str) -> str:
    value = os.environ.get(variable, "").strip()
    if not value:
        raise WrongKeyError(name, f"the environment variable {variable} must hold the key; it is not set")
    return value


def _header(key: str, name: str) -> str:
    if not key or not key.isascii() or not key.isprintable():
        raise WrongKeyError(name, "the key must be one line of printable ASCII, as a header can carry it")
    return key


def _text(name: str, file: str, folder: Path) -> str:
    path = resolved(file, folder)
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise WrongKeyError(name, f"cannot read {path}: {why}") from None


_BARE = re.compile(r"[\x21-\x7e]+")
_A_PROXY = 'must be addresses with commas, such as "10.0.0.7, 10.1.0.0/16", or "*" alone for any'


def check_address(text: str, of: str) -> None:
    """Raises InputError where that is no address of the web; no password is repeated."""
    shown = re.sub(r"//[^/]*@", "//...@", text)
    fault = f"{of} must begin with http:// or https:// and name a host, with a port of 1 to 65535; it is {shown!r}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise InputError(fault) from None
    if not (_BARE.fullmatch(text) and parts.scheme in ("http", "https") and parts.hostname) or port == 0:
        raise InputError(fault)


def check_collector(text: str) -> None:
    """Raises InputError where traces cannot be sent there."""
    check_address(text, "the address of a collector (OTLP over HTTP)")
    parts = urlsplit(text)
    if parts.username is not None or parts.query or parts.fragment:
        raise InputError(
            "the address of a collector must be host, port and path alone, such as http://collector:4318; a key for it "
            "goes into the environment variable OTEL_EXPORTER_OTLP_HEADERS"
        )


def check_proxies(text: str) -> None:
    """Raises InputError where a part is neither an address nor a network: it would match nobody, in silence."""
    if text.strip() == "*":
        return
    for one in (part.strip() for part in text.split(",")):
        try:
            ipaddress.ip_network(one) if "/" in one else ipaddress.ip_address(one)
        except ValueError:
            why = f"{one!r} is none"
            if "/" in one and (network := _network_of(one)) is not None:
                why = f"{one!r} has bits beyond its network: did you mean {network}?"
            raise InputError(f"{_A_PROXY}; {why}") from None


def check_journal(path: Path) -> None:
    """Raises InputError where no journal can be written there."""
    folder, there = path.parent, path.exists()
    if path.is_dir():
        fault = f"{path} is a folder: name a file in it"
    elif not there and not folder.is_dir():
        fault = f"there is no folder {folder}: make it, or name another file"
    elif not os.access(path if there else folder, os.W_OK):
        fault = f"{path if there else folder} cannot be written by this user"
    else:
        return
    raise InputError(f"must be a file that can be written; {fault}")


def _network_of(text: str) -> str | None:
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError:
        return None


_SHIPPED = ("default", "none")
_ANY = told.Discovery().engine.url
"""Of an engine that is not listed; it is not used."""


class _Maker:
    """Makes the parts, and notes what is wrong with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[Problem] = []

    @contextmanager
    def at(self, *path: str) -> Iterator[None]:
        """Whatever cannot be made within is a problem of that table."""
        try:
            yield
        except WrongKeyError as wrong:
            self.problems.append(Problem((*path, wrong.name) if wrong.name else path, wrong.text))
        except InputError as error:
            self.problems.append(Problem(path, str(error)))

    def file(self, text: str, *path: str) -> str:
        """A file that must be there."""
        found = resolved(text, self.folder)
        if not found.is_file():
            self.problems.append(Problem(path, f"there is no file {found}"))
        return str(found)

    def tls(self, section: TlsSection | None, *path: str) -> told.Tls | None:
        """Certificates whose files are there."""
        if section is None:
            return None
        if (section.cert is None) is not (section.key is None):
            self.problems.append(Problem((*path, "tls"), "cert and key belong together; give both or none"))
        files = section.model_dump(exclude_none=True)
        return told.Tls(**{name: self.file(text, *path, "tls", name) for name, text in files.items()})

    def engine(self, section: FoundSection, *path: str) -> told.Engine:
        """An engine, its key read."""
        with self.at(*path):
            return told.Engine(
                url=_address(section) if isinstance(section, EngineSection) else _ANY,
                name=section.name if isinstance(section, EngineSection) else "",
                kind=section.kind,
                api_key=engine_key(section, self.folder),
                in_flight=section.in_flight,
                tls=self.tls(section.tls, *path),
                probe=section.probe,
                generation_defaults=section.generation_defaults,
            )
        return told.Engine(_ANY, name=".".join(path))  # its problem is told; its name is nobody else's

    def discovery(self, section: DiscoverySection) -> told.Discovery:
        """Where engines are found."""
        with self.at("discovery", "api_url"):
            if section.api_url is not None:
                check_address(section.api_url, "the address of the Kubernetes API")
        return told.Discovery(
            dns=section.dns,
            endpoint_slices=section.endpoint_slices,
            every_s=section.every_s,
            api_url=section.api_url,
            engine=self.engine(section.engine, "discovery", "engine"),
        )

    def order(self, section: OrderSection) -> told.Order:
        """The order, its policies known."""
        from lengthwise.policy import resolve

        for axis in ("rank", "takeover"):
            name = getattr(section, axis)
            with self.at("order", axis):
                if name is not None:
                    resolve(axis, name)
        return told.Order(**section.model_dump())

    def dispatch(self, section: DispatchSection) -> told.Dispatch:
        """How engines are given requests, with the phases that they keep."""
        phases, plain = None, section.model_dump(exclude={"phases"})
        if section.phases is not None:
            with self.at("dispatch", "phases"):
                phases = told.Phases(**section.phases.model_dump())
        with self.at("dispatch"):
            return told.Dispatch(**plain, phases=phases)
        return told.Dispatch()

    def listen(self, section: ListenSection) -> told.Listen:
        """The ports; the journal starts at the file's folder as all files do."""
        plain = section.model_dump(exclude={"tls", "admin_port", "journal"})
        tls = self.tls(section.tls, "listen")
        if tls is not None and tls.cert is None:
            self.problems.append(Problem(("listen", "tls"), "a server needs cert and key"))
        if section.admin_port == section.port and section.port and section.admin_host == section.host:
            self.problems.append(Problem(("listen", "admin_port"), "must differ from port"))
        journal = None if section.journal is None else self.folder / Path(section.journal).expanduser()
        with self.at("listen", "journal"):
            if journal is not None:
                check_journal(journal)
        with self.at("listen", "proxies"):
            if section.proxies is not None:
                check_proxies(section.proxies)
        with self.at("listen", "trace"):
            if section.trace is not None:
                check_collector(section.trace)
        return told.Listen(
            **plain,
            admin_port=None if section.admin_port == "none" else section.admin_port,
            tls=tls,
            journal=None if journal is None else str(journal),
        )

    def prediction(self, file: GatewayFile) -> told.Forecasting:
        """The predictor, its file there."""
        plain = file.prediction.model_dump()
        if plain["predictor"] not in _SHIPPED:
            plain["predictor"] = self.file(plain["predictor"], "prediction", "predictor")
        return told.Forecasting(**plain)

    def keys(self, file: GatewayFile) -> tuple[told.Key, ...]:
        """All clients' keys; no key has two holders."""
        made: dict[str, told.Key] = {}
        for number, section in enumerate(file.keys):
            with self.at("keys", str(number)):
                for key in client_keys(section, self.folder):
                    if key.sha256 in made:
                        both = f"{made[key.sha256].tenant} and {key.tenant}"
                        raise InputError(f"one key is given twice, to {both}; give each its own")
                    made[key.sha256] = key
        return tuple(made.values())


def _names(engines: tuple[told.Engine, ...]) -> Iterator[Problem]:
    """Engines that share a name, given or of their address."""
    seen: set[str] = set()
    for number, engine in enumerate(engines):
        name = engine.name or urlsplit(engine.url).netloc.rpartition("@")[2]
        if name in seen:
            text = f"every engine must have a name of its own; {name!r} is there twice: set its name"
            yield Problem(("engines", str(number)), text)
        seen.add(name)


def config_of(file: GatewayFile, folder: Path) -> tuple[told.GatewayConfig | None, list[Problem]]:
    """What a gateway is told, or what is wrong with it.

    Args:
        file: Its tables, each value in its bounds.
        folder: Where relative paths start.
    """
    maker = _Maker(folder)
    parts: dict[str, Any] = {
        "engines": tuple(maker.engine(one, "engines", str(at)) for at, one in enumerate(file.engines)),
        "discovery": maker.discovery(file.discovery),
        "order": maker.order(file.order),
        "prediction": maker.prediction(file),
        "keys": maker.keys(file),
        "listen": maker.listen(file.listen),
    }
    parts["dispatch"] = maker.dispatch(file.dispatch)
    for name, kind in (("admission", told.Admission), ("limits", told.Limits), ("resilience", told.ResilienceConfig)):
        with maker.at(name):
            parts[name] = kind(**getattr(file, name).model_dump())
    maker.problems += _names(parts["engines"])
    if maker.problems:
        return None, maker.problems
    config = None
    with maker.at():
        config = told.GatewayConfig(**parts)
    if config is not None:
        with maker.at("engines"):
            check_ports(config)
    return config, maker.problems


def _address(section: EngineSection) -> str:
    check_address(section.url, "the address of a server")
    return section.url


_WHAT = "gateway"
_SHORT = {"order": "mode", "prediction": "predictor"}
_NO_SECRETS = {
    "api_key": "a key must not stand in the file; name the variable (api_key_env) or file (api_key_file) that has it",
    "key": "a key must not stand in the file; give its sha256 (lengthwise serve --hash-key prints it), or a key_file",
}


@dataclass(frozen=True)
class GatewaySettings:
    """What a gateway is told, and how it was said.

    Attributes:
        config: For ``gateway.serve``.
        toml: All settings with their defaults, as a file that says the same; no secrets, only where they are.
        source: The file, or "the command line".
    """

    config: GatewayConfig
    toml: str
    source: str


def load_gateway(
    path: Path | str | None = None,
    overrides: Sequence[str] = (),
    engines: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
) -> GatewaySettings:
    """The settings of a file, every key and value checked.

    Args:
        path: A TOML or YAML file; relative paths inside it start at its folder. None: there is none.
        overrides: Assignments such as ``"order.mode=fcfs"``, later ones winning.
        engines: Addresses of engines besides those of the file.
        options: Settings of which the first override stems from an option of the command, and the option, so that
            messages can name it.

    Raises:
        ScenarioError: A key or a value cannot be used; the message lists all of them.
    """
    if path is None:
        return _checked({}, "the command line", Path(), overrides, engines, options)
    path = Path(path)
    return _checked(read(path, _WHAT), str(path), path.parent, overrides, engines, options)


def loads_gateway(
    text: str, *, suffix: str = ".toml", folder: Path | str = ".", overrides: Sequence[str] = ()
) -> GatewaySettings:
    """The settings of a text; raises as ``load_gateway`` does."""
    return _checked(parse(text, suffix, _WHAT, _WHAT), _WHAT, Path(folder), overrides, ())


def gateway_reader(
    path: Path | str, overrides: Sequence[str] = (), engines: Sequence[str] = ()
) -> Callable[[], GatewayConfig]:
    """What reads the same file again, files of keys too."""
    return lambda: load_gateway(path, overrides, engines).config


def _checked(
    raw: Table,
    source: str,
    folder: Path,
    overrides: Sequence[str],
    engines: Sequence[str],
    options: Mapping[str, str] | None = None,
) -> GatewaySettings:
    settings, paths = _spelled(raw), []
    for text in overrides:
        keys, value = assignment(text, "order.mode=fcfs")
        for key in reversed(keys):
            value = {key: value}
        over = _spelled(value)
        paths.append(tuple(key.replace("-", "_") for key in keys))
        settings = merged(settings, over)
    stem = {tuple(key.split(".")): option for key, option in (options or {}).items()}
    stem = {path: option for path, option in stem.items() if paths.count(path) == 1}  # else --set had the last word
    settings, problems = _without_secrets(_with_engines(settings, engines))
    file, found = _validated(settings)
    problems += found
    raise_if_any(problems, source, paths, stem)
    assert file is not None  # no problems, so it was built
    config, problems = config_of(file, folder)
    raise_if_any(problems, source, paths, stem)
    assert config is not None  # likewise
    return GatewaySettings(config, toml(file.plain), source)


def _validated(settings: Table) -> tuple[GatewayFile | None, list[Problem]]:
    try:
        return GatewayFile.model_validate(settings), []
    except ValidationError as error:
        return None, findings(error, GatewayFile)


def _spelled(value: Any) -> Any:
    """Keys with underscores, short forms spelled out: ``order = "srtf"``, an engine by its address alone."""
    if not isinstance(value, dict):
        return value
    table = {str(key).replace("-", "_"): _spelled(inner) for key, inner in value.items()}
    for section, key in _SHORT.items():
        if isinstance(table.get(section), str):
            table[section] = {key: table[section]}
    for name in ("engines", "keys"):
        if isinstance(table.get(name), list):
            table[name] = [_one(name, inner) for inner in table[name]]
    return table


def _one(name: str, value: Any) -> Any:
    return {"url": value} if name == "engines" and isinstance(value, str) else _spelled(value)


def _with_engines(settings: Table, engines: Sequence[str]) -> Table:
    entries = settings.get("engines", [])
    if not engines or not isinstance(entries, list):
        return settings
    return settings | {"engines": [*entries, *({"url": url} for url in engines)]}


def _without_secrets(settings: Table) -> tuple[Table, list[Problem]]:
    """The settings without keys in clear text, which no message may repeat, and that they stood there."""
    problems = []
    out = dict(settings)
    for name in ("engines", "keys"):
        if isinstance(out.get(name), list):
            told = [_stripped(inner, (name, str(at))) for at, inner in enumerate(out[name])]
            out[name] = [inner for inner, _ in told]
            problems += [problem for _, found in told for problem in found]
    found_engine = out.get("discovery", {})
    if isinstance(found_engine, dict) and "engine" in found_engine:
        inner, found = _stripped(found_engine["engine"], ("discovery", "engine"))
        out["discovery"] = found_engine | {"engine": inner}
        problems += found
    return out, problems


def _stripped(value: Any, local: tuple[str, ...]) -> tuple[Any, list[Problem]]:
    if not isinstance(value, dict):
        return value, []
    there = [key for key in _NO_SECRETS if key in value]
    kept = {key: inner for key, inner in value.items() if key not in there}
    return kept, [Problem((*local, key), _NO_SECRETS[key]) for key in there]
