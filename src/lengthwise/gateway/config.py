"""Configuration of a gateway as frozen dataclasses; the defaults work."""

from __future__ import annotations

import math
import re
import socket
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from lengthwise.gateway.request import SloClass
from lengthwise.gateway.scheduling import PASSTHROUGH_MODES
from lengthwise.schema.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from lengthwise.policy import Policy


def require_known(kind: str, name: str, names: tuple[str, ...]) -> None:
    """Raise UnknownNameError unless ``name`` is one of ``names``. The message calls it a ``kind``, such as "mode"."""
    if name not in names:
        raise UnknownNameError(kind, name, names)


def _require_integers(config: object, minimum: int, *names: str) -> None:
    """Raise InputError unless these attributes are integers of at least ``minimum``, or None where None is default."""
    for name in names:
        value = getattr(config, name)
        if value is None and getattr(type(config), name, 0) is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise InputError(f"{name} must be a whole number of at least {minimum}; it is {value!r}")


def _require_at_least(config: object, minimum: float, *names: str) -> None:
    """Raise InputError unless these attributes are numbers of at least ``minimum``."""
    for name in names:
        if not getattr(config, name) >= minimum:
            raise InputError(f"{name} must be at least {minimum:g}; it is {getattr(config, name)!r}")


KINDS = ("auto", "vllm", "sglang", "llama.cpp", "tgi", "transformers", "openai")

GENERATION_DEFAULTS = ("unknown", "none")


@dataclass(frozen=True)
class Tls:
    """PEM files for TLS: the gateway's certificate and its key, and the authority (``ca``) that signs the peer's."""

    cert: str | None = None  # own certificate, then those of intermediate authorities
    key: str | None = None  # private key of the certificate
    ca: str | None = None  # authorities that sign the peer's certificate; None: those of the system
    server_name: str | None = None  # name that an engine's certificate must have; None: the host of its URL


@dataclass(frozen=True)
class Engine:
    """An engine to which the gateway sends requests, and how the gateway treats it."""

    url: str = field(repr=False)  # address with or without ``/v1``; it may contain a password
    name: str = ""  # name in metrics and on the admin page; "" host and port
    kind: str = "auto"
    api_key: str | None = field(default=None, repr=False)  # key that the gateway sends, never a client's own
    # limit of requests at the engine; None: adapted to its load, in PASSTHROUGH_MODES no limit, in rra the schedule's
    concurrency: int | None = None
    tls: Tls | None = None  # for https with a private authority or a client certificate
    probe: bool = True  # whether a tiny prompt tests if the engine returns token ids, which resuming needs
    # "none": the engine has no defaults for penalties and maximum length (vLLM with ``--generation-config vllm``);
    # "unknown": only requests that state penalties and maximum length are preempted
    generation_defaults: str = "unknown"

    def __post_init__(self) -> None:
        require_known("kind of engine", self.kind, KINDS)
        require_known("generation_defaults", self.generation_defaults, GENERATION_DEFAULTS)
        _require_integers(self, 1, "concurrency")

    @property
    def display_url(self) -> str:
        """Return the address without user name and password, for errors and logs."""
        parts = urlsplit(self.url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


@dataclass(frozen=True)
class Discovery:
    """Sources of further engines: the addresses of a DNS name or of a Kubernetes Service."""

    dns: str | None = None  # ``host:port``: every address of the name (a headless Service) is an engine
    endpoint_slices: str | None = None  # ``namespace/service:port``: ready addresses of a Service's EndpointSlices
    every_s: float = 5.0  # interval of DNS lookups
    api_url: str | None = None  # address of the Kubernetes API; None: the API of the pod in which the gateway runs
    engine: Engine = Engine("http://found")  # settings of every discovered engine (its url is not used)


DISAGGREGATED_MODES = ("waa", "waa-c", "waa-m")  # some engines only prefill, the others only decode


@dataclass(frozen=True)
class Phases:
    """The schedule of mode rra (ExeGPT): each engine alternates between a prefill and ``decode_steps`` decode steps."""

    prefill_batch: int  # new requests of one prefill, B_E
    decode_steps: int  # decode iterations from one prefill to the next, N_D
    decode_batch: float | None = None  # mean requests at an engine after a prefill, B_D; None: unknown
    mean_prompt_tokens: float | None = None  # mean prompt length; None: unknown
    # share by which a prefill's prompt tokens and the decode batch may deviate from their means: prefills are resized
    # to keep both within it; None: prefills are never resized
    threshold: float | None = None
    # limit of requests at an engine; None: the largest decode batch within ``threshold`` plus a prefill batch, or
    # dispatch.max_concurrency without a threshold
    max_requests: int | None = None

    def __post_init__(self) -> None:
        _require_integers(self, 1, "prefill_batch", "decode_steps")
        _require_integers(self, self.prefill_batch, "max_requests")
        for name in ("decode_batch", "mean_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < math.inf:
                raise InputError(f"{name} must be at least 1; it is {value!r}")
        if self.threshold is not None:
            if not 0 <= self.threshold < 1:
                raise InputError(f"threshold must be from 0 to below 1; it is {self.threshold!r}")
            if self.decode_batch is None or self.mean_prompt_tokens is None:
                reason = "batches are kept near these means"
                raise InputError(f"threshold must have decode_batch and mean_prompt_tokens: {reason}")

    @property
    def request_limit(self) -> int | None:
        """Return the maximum number of requests at an engine under this schedule, or None if it sets no limit."""
        if self.max_requests is not None or self.threshold is None or self.decode_batch is None:
            return self.max_requests
        return math.floor(self.decode_batch * (1 + self.threshold) + 1e-9) + self.prefill_batch


def reject_disaggregated_mode(mode: str) -> None:
    """Raise InputError if ``mode`` needs disaggregated prefill and decode. The message names the command that helps."""
    if mode.lower() in DISAGGREGATED_MODES:
        raise InputError(
            f"mode {mode!r} needs engines with separate prefill and decode, which a gateway in front of them cannot "
            "provide: `lengthwise schedule SCENARIO --deploy DIR` writes their commands. Mode 'rra' keeps phases on "
            "any engine"
        )


MODES = ("observe", "fcfs", "srtf", "isrtf", "windowed", "bins", "rra", "engine-priority", "engine-plugin")
"""How requests are ordered; ``observe`` orders nothing, and estimates the gain of ordering."""
FAIRNESS = ("none", "vtc")
PREFIXES = ("tenant", "shared", "none")
STATISTICS = ("mean", "median", "p80", "p90")


@dataclass(frozen=True)
class Order:
    """How waiting requests are ordered, and when they preempt running requests."""

    mode: str = "isrtf"
    # rank policy; None: the mode's default (srtf, isrtf, windowed: "srtf"; bins: "completed_batches"; others: "fcfs")
    rank: str | None = None
    preemption: str = "worth(factor=100)"  # policy by which a waiting request preempts a running one (mode isrtf)
    window_tokens: int = 50  # generated tokens between two predictions of a request (ELIS: 50)
    max_wait_s: float = 60.0  # a request that has waited this long precedes all others (with "vtc": of its tenant)
    max_preemptions: int = 3  # limit of preemptions of a request (mode isrtf)
    preemptions_per_s: float = 10.0  # limit of preemptions of all requests a second (mode isrtf)
    fairness: str = "none"  # "vtc": within a priority class the tenant with the least service comes first
    bins: int = 8  # number of bins (mode bins), of equal mass of predicted lengths
    batch_wait_s: float = 2.0  # longest time for which the first request of a bin waits until the bin is full

    def __post_init__(self) -> None:
        reject_disaggregated_mode(self.mode)
        require_known("mode", self.mode, MODES)
        require_known("fairness", self.fairness, FAIRNESS)
        _require_integers(self, 1, "window_tokens", "bins")
        _require_integers(self, 0, "max_preemptions")
        _require_at_least(self, 0, "max_wait_s", "preemptions_per_s", "batch_wait_s")


@dataclass(frozen=True)
class Admission:
    """Limits of the queue of waiting requests."""

    max_queued: int = 20_000
    max_queued_per_tenant: int | None = None  # limit for a tenant with keys; None: a quarter
    max_queued_bytes: int = 128 << 20  # of queued bodies; no effect above half of ``Limits.body_budget_bytes``
    max_predicted_wait_s: float = math.inf  # a request with a longer predicted wait gets 429; inf: no limit
    no_engine_s: float = 30.0  # longest wait of a request while no engine serves its model; then it gets 503

    def __post_init__(self) -> None:
        _require_integers(self, 1, "max_queued", "max_queued_per_tenant", "max_queued_bytes")
        _require_at_least(self, 0, "max_predicted_wait_s", "no_engine_s")


@dataclass(frozen=True)
class Dispatch:
    """How many requests an engine gets at once, and which engine gets a request."""

    start: int = 8  # initial limit of requests at an engine, which then adapts to its load
    min_concurrency: int = 1
    max_concurrency: int = 512
    kv_high: float = 0.9  # share of the KV cache in use above which the limit shrinks
    adapt_every_s: float = 1.0  # least time between two adaptations
    # assumed cached share of a prompt at the last engine of its session, and of a prefix that an engine has received
    affinity: float = 0.5
    prefixes: str = "tenant"  # prompts compared for shared prefixes: of one "tenant", all ("shared"), or "none"
    # router that chooses among engines with a free slot: "earliest_finish" (least predicted backlog less the prefill
    # time that the cache saves), or a router of the simulator
    router: str = "earliest_finish"
    phases: Phases | None = None  # the schedule of every engine in mode rra

    def __post_init__(self) -> None:
        require_known("prefixes", self.prefixes, PREFIXES)
        _require_integers(self, 1, "start", "min_concurrency", "max_concurrency")
        if not self.min_concurrency <= self.start <= self.max_concurrency:
            raise InputError(
                "dispatch: min_concurrency <= start <= max_concurrency must hold; they are "
                f"{self.min_concurrency}, {self.start}, {self.max_concurrency}"
            )


OWN_ROUTER = Dispatch.router
_REFUSED_ROUTERS = {
    **dict.fromkeys(
        ("shortest_expected_delay", "least_work_left"),
        "needs the speeds of engines before they serve, which the gateway learns only from what they do. Leave router "
        "out: earliest_finish predicts each engine's backlog in seconds",
    ),
    "central": "chooses no engine: the gateway has one queue for all engines anyway. Leave router out",
    "prefix_precise": "must know the contents of the engines' caches, and the gateway only knows which prompts it sent "
    "there. Use prefix_approximate, which scores in the same way by these prompts",
}


def router_policy(dispatch: Dispatch) -> Policy | None:
    """Return the simulator's router that ``dispatch.router`` names, or None for OWN_ROUTER, the gateway's own.

    Raises InputError if no router has this name, or if the gateway does not know what the router needs.
    """
    if dispatch.router == OWN_ROUTER:
        return None
    if reason := _REFUSED_ROUTERS.get(dispatch.router):
        raise InputError(f"router {dispatch.router!r} {reason}")
    from lengthwise.policy import known

    routers = known("router")
    require_known("router", dispatch.router, (OWN_ROUTER, *(one for one in routers if one not in _REFUSED_ROUTERS)))
    if routers[dispatch.router].prefix and dispatch.prefixes == "none":
        raise InputError(
            f'router {dispatch.router!r} chooses by prefixes that prompts share, and prefixes = "none" compares no '
            'prompts. Set prefixes = "tenant" or "shared", or choose another router'
        )
    return routers[dispatch.router]


@dataclass(frozen=True)
class PredictionConfig:
    """The predictor of output lengths, its time limit, and whether finished requests correct its predictions."""

    predictor: str = "default"  # "default" (the shipped one), a file, or "none" (256 tokens, at most ``max_tokens``)
    statistic: str = "mean"  # statistic of the predicted distribution by which requests are ordered
    deadline_s: float = 0.010  # time limit of a prediction, after which the request continues with the prior
    # a predictor of lengthwise that takes less time per prompt runs on the event loop, any other one in a process
    inline_below_s: float = 0.0002
    learn: bool = True  # whether finished lengths correct later predictions (scale by model, conformal)
    learn_every: int = 64  # finished requests between two corrections; fewer at first

    def __post_init__(self) -> None:
        require_known("statistic", self.statistic, STATISTICS)
        _require_integers(self, 1, "learn_every")


@dataclass(frozen=True)
class Key:
    """The hash of a client's API key, and the client's rights, priority and quotas."""

    tenant: str  # name for metrics and fairness
    sha256: str  # hex digest of the key
    models: tuple[str, ...] = ()  # models that the key gives access to; () all
    priority: int = 0  # priority class; a smaller one is served earlier
    rate_rps: float = math.inf  # requests per second in the long run; inf: no limit
    burst: int = 100  # requests that may arrive at once before ``rate_rps`` limits them
    concurrency: int | None = None  # limit of requests at once, waiting or running; None: no limit
    tokens_per_minute: int | None = None  # prompt and output tokens per minute, first as predicted, then as generated
    tokens_per_day: int | None = None  # prompt and output tokens per day, first as predicted, then as generated
    cost_per_day: float | None = None  # cost of these tokens per day, in the currency of the prices
    input_cost_per_token: float = 0.0  # price of a prompt token
    output_cost_per_token: float = 0.0  # price of an output token
    slo_class: str | None = None  # name in ``GatewayConfig.slo_classes``, unless the header X-SLO-Class names another

    def __post_init__(self) -> None:
        _require_integers(self, 1, "concurrency", "tokens_per_minute", "tokens_per_day")
        _require_at_least(self, 0, "input_cost_per_token", "output_cost_per_token")
        prices = self.input_cost_per_token + self.output_cost_per_token
        if not math.isfinite(prices):
            raise InputError(f"input_cost_per_token and output_cost_per_token must be finite; their sum is {prices!r}")
        if self.cost_per_day is not None and not (self.cost_per_day > 0 and prices > 0):
            raise InputError("cost_per_day must be above 0, with input_cost_per_token or output_cost_per_token above 0")


RESERVATIONS = ("predicted", "max_tokens")


@dataclass(frozen=True)
class TenantsConfig:
    """The store of tenants, keys and usage, and the API that changes them."""

    # an SQLite file, or the URL of a PostgreSQL database; None: no store and no API
    store: str | None = field(default=None, repr=False)
    admin_sha256: str | None = None  # hex digest of the key of the API
    progress: str | None = None  # folder of the file of tokens in flight; None: the folder of the SQLite file
    reserve: str = "predicted"  # output for which a request reserves quota: "predicted", or all of "max_tokens"
    refresh_s: float = 2.0  # interval at which the keys that other gateways changed are read

    def __post_init__(self) -> None:
        require_known("reserve", self.reserve, RESERVATIONS)
        if self.store is None:
            return
        if "://" in self.store and self.progress is None:
            raise InputError(
                "a store in PostgreSQL must have tenants.progress, a folder that a restart does not delete"
            )


@dataclass(frozen=True)
class Oidc:
    """The issuer of JSON web tokens that clients may send instead of keys."""

    jwks: str  # public keys of the issuer (JWKS): a file or a URL
    issuer: str  # required ``iss`` of a token
    audience: str  # required ``aud`` of a token
    tenant_claim: str = "tenant"  # claim with the name of the tenant
    priority_claim: str | None = None  # claim with the priority class; None: class 0
    role_claim: str | None = None  # claim with a role at the admin port; None: tokens open only the clients' port
    refresh_s: float = 300.0  # interval at which the keys are read again; an unknown ``kid`` reads them at once


@dataclass(frozen=True)
class ExternalAuth:
    """A service that allows or refuses each request, and names its tenant."""

    url: str  # it gets a GET with the Authorization header, X-Original-Method and X-Original-URI of the request
    timeout_s: float = 1.0  # without an answer until then, the request gets 503


_MEDIA_HOST = re.compile(
    r"\*|(?:(?:\*\.)?[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?"
)


@dataclass(frozen=True)
class Limits:
    """Limits on the requests of clients: sizes, numbers and times."""

    body_bytes: int = 8 << 20  # size of a body
    depth: int = 32  # nesting depth of a body
    n: int = 8  # outputs for each prompt (``n`` and ``best_of``)
    max_tokens: int = 131_072  # output tokens; also the maximum of a request that states none
    header_bytes: int = 32 << 10  # size of all headers of a request
    headers: int = 100  # headers of a request
    connections: int = 10_000  # open connections
    body_s: float = 30.0  # maximum time to receive a request, and in which a client reads nothing of a response
    messages: int = 4096  # messages of a chat, or prompts of a completion
    idle_s: float = 75.0  # keep-alive of an idle connection: above that of clients and proxies (60 s)
    # memory of all arriving bodies, and of all requests until their response ends (a stream: begins). A request takes
    # at least twice the size of its body, and 7 to 9 times that of token ids. A key (or address) gets a quarter
    body_budget_bytes: int = 512 << 20
    values: int = 1 << 20  # list members and object fields of a body, such as token ids of its prompt
    # hosts from which engines may fetch images, sounds, videos and files that bodies name by URL: "images.example.com",
    # "*.example.com", an address, each with ":port" unless it is the default one, or "*" for all public hosts
    media_hosts: tuple[str, ...] = ()
    connections_per_address: int | None = None  # open connections of an address that is no trusted proxy
    # requests per second of a client's address in the long run, of which those of 10 s may come at once; inf: no limit
    rate_per_address: float = math.inf

    def __post_init__(self) -> None:
        _require_integers(self, 1, "body_budget_bytes", "values", "connections_per_address")
        if not self.rate_per_address > 0:
            raise InputError(f"rate_per_address must be above 0; it is {self.rate_per_address!r}")
        for host in self.media_hosts:
            if not _MEDIA_HOST.fullmatch(host):
                raise InputError(
                    'media_hosts must be names such as "images.example.com" or "*.example.com", addresses, or "*", '
                    f"without a scheme; one is {host!r}"
                )
        if self.body_budget_bytes < self.body_bytes:
            both = f"{self.body_budget_bytes}, {self.body_bytes}"
            raise InputError(f"body_budget_bytes must be at least body_bytes; they are {both}")


@dataclass(frozen=True)
class ResilienceConfig:
    """Health checks, timeouts and retries of engines."""

    health_every_s: float = 2.0  # interval of health checks
    connect_s: float = 5.0  # timeout of a connection, and of a health check
    first_byte_s: float = 600.0  # timeout of the first byte of a response's body
    stall_s: float = 60.0  # longest silence within a response's body
    failures: int = 5  # failures in a row that open an engine's circuit
    # time for which a circuit stays open, and an outlier ejected; doubled each time, up to 16 times this
    open_s: float = 2.0
    # limit of retries as a share of requests (at most 10 in a row, 5 of one tenant or address); the first retry of a
    # request is free if its engine broke the connection, or stalled after the first output
    retry_share: float = 0.2
    # time after SIGTERM in which new requests are still served, and each answer closes its connection, so that load
    # balancers and clients turn to another gateway
    linger_s: float = 0.0
    drain_s: float = 30.0  # time for admitted requests to finish after SIGTERM and linger_s
    answer_bytes: int = 64 << 20  # size of the longest buffered (not streamed) response
    leave_s: float = 3600.0  # time for a replaced or vanished engine to finish its responses


ROLES = ("viewer", "operator", "admin")  # each may do what those before it may


@dataclass(frozen=True)
class AdminUser:
    """A user of the admin port: "viewer" reads, "operator" drains and reloads, "admin" changes keys and tenants."""

    name: str  # in the audit log
    sha256: str  # hex digest of the user's token
    role: str = ROLES[0]  # what the user may do

    def __post_init__(self) -> None:
        require_known("role", self.role, ROLES)


@dataclass(frozen=True)
class Listen:
    """Addresses at which the gateway listens, and files that it writes."""

    host: str = "127.0.0.1"  # address of the clients' port
    port: int = 8000  # for clients: /v1/*, /health, /ready
    admin_host: str = "127.0.0.1"  # address of the admin port; local by default
    admin_port: int | None = 8001  # metrics and admin page; None: no admin port
    tls: Tls | None = None  # with ``ca`` clients must present a certificate
    admin_tls: Tls | None = None  # of the admin port; with ``ca`` its clients must present a certificate
    admins: tuple[AdminUser, ...] = ()  # users of the admin port; none: reading it needs no token
    proxies: str | None = None  # addresses whose X-Forwarded-For is trusted
    journal: str | None = None  # file of the journal
    audit: str | None = None  # file of the audit log
    trace: str | None = None  # address of an OpenTelemetry collector


@dataclass(frozen=True)
class SharedQueueConfig:
    """The store through which several gateways share one queue."""

    url: str | None = field(default=None, repr=False)  # URL of a PostgreSQL database; None: this gateway's own queue
    name: str = "default"  # gateways that name the same queue in the same database share it
    # time after which a silent gateway counts as lost: its slots return, and another gateway leads
    lease_s: float = 2.0

    def __post_init__(self) -> None:
        _require_at_least(self, 0.1, "lease_s")


FAILURES = ("closed", "open")


@dataclass(frozen=True)
class Envoy:
    """The endpoint picker, and the settings of Envoy that ``lengthwise serve --envoy-config`` writes."""

    ext_proc_port: int | None = None  # port of the endpoint picker (gRPC) at ``listen.host``; None: no picker
    picker_host: str = "127.0.0.1"  # address of the picker, as Envoy reaches it
    tls: Tls | None = None  # certificate of the picker, and the authority by which Envoy verifies it
    client_tls: Tls | None = None  # certificate that Envoy presents to clients; with ``ca`` clients must present one
    host: str = "127.0.0.1"  # address at which Envoy listens for clients
    port: int = 10_000  # port at which Envoy listens for clients
    # what happens to requests while there is no picker: Envoy answers 503 ("closed"), or sends them to any engine,
    # where no keys and quotas apply ("open")
    failure: str = "closed"
    picker_timeout_s: float = 30.0  # time for each answer of the picker, except for requests that it has queued

    def __post_init__(self) -> None:
        require_known("failure", self.failure, FAILURES)


@dataclass(frozen=True)
class GatewayConfig:
    """The complete configuration. Without keys, every client may send requests, as the tenant "anonymous"."""

    engines: tuple[Engine, ...] = ()
    discovery: Discovery = field(default_factory=Discovery)
    order: Order = Order()
    admission: Admission = Admission()
    dispatch: Dispatch = Dispatch()
    prediction: PredictionConfig = PredictionConfig()
    keys: tuple[Key, ...] = ()
    tenants: TenantsConfig = TenantsConfig()
    slo_classes: tuple[SloClass, ...] = ()
    oidc: Oidc | None = None
    external_auth: ExternalAuth | None = None
    limits: Limits = Limits()
    resilience: ResilienceConfig = ResilienceConfig()
    listen: Listen = Listen()
    envoy: Envoy = Envoy()
    shared_queue: SharedQueueConfig = SharedQueueConfig()

    def __post_init__(self) -> None:
        if not (self.engines or self.discovery.dns or self.discovery.endpoint_slices):
            raise InputError("a gateway needs an engine: give --engine URL, [[engines]] or [discovery], or use --demo")
        if self.order.mode == "rra" and self.dispatch.phases is None:
            raise InputError(
                "mode rra must have [dispatch.phases] with prefill_batch and decode_steps: `lengthwise schedule` "
                "chooses them"
            )
        if self.shared_queue.url is not None and self.order.mode in (*PASSTHROUGH_MODES, "rra"):
            raise InputError(
                f"shared_queue must have a mode whose requests wait in the gateway; it is {self.order.mode}. Use "
                "fcfs, srtf, isrtf, windowed or bins, or leave [shared_queue] out"
            )
        if self.external_auth is not None and (self.keys or self.oidc):
            raise InputError("external_auth decides about all requests: leave out [[keys]] and [oidc]")
        is_admin = self.tenants.admin_sha256 or any(one.role == "admin" for one in self.listen.admins)
        if self.tenants.store is not None and not is_admin and (self.oidc is None or self.oidc.role_claim is None):
            raise InputError(
                "tenants.store must have a user of its API: add tenants.admin_sha256_env, the variable with the digest "
                'of a key, or [[listen.admins]] with role = "admin"'
            )
        names = tuple(one.name for one in self.slo_classes)
        if len(set(names)) < len(names):
            raise InputError(f"the names in slo_classes must differ; they are {', '.join(names)}")
        for key in self.keys:
            if key.slo_class is not None and not names:
                raise InputError(f"slo_class of a key must name one of [[slo_classes]]; it is {key.slo_class}: add it")
            if key.slo_class is not None:
                require_known("class in slo_classes", key.slo_class, names)

    @property
    def needs_key(self) -> bool:
        """Whether a client must authenticate."""
        return bool(self.keys or self.tenants.store or self.oidc or self.external_auth)

    @property
    def is_admin_open(self) -> bool:
        """Whether reading the admin port needs no user."""
        return not self.listen.admins and (self.oidc is None or self.oidc.role_claim is None)


_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::")  # noqa: S104 - compared, not bound
_ALL_INTERFACES = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound


def check_ports(config: GatewayConfig) -> None:
    """Raise InputError if a port of the gateway is the port of an engine on this machine."""
    listen = config.listen
    engines = [urlsplit(engine.url) for engine in config.engines]
    ports = [("port", listen.host, listen.port), ("admin port", listen.admin_host, listen.admin_port or 0)]
    ports.append(("ext-proc port", listen.host, config.envoy.ext_proc_port or 0))
    for (engine, address), (name, host, port) in product(zip(config.engines, engines, strict=True), ports):
        engine_host, engine_port = address.hostname or "", address.port or (443 if address.scheme == "https" else 80)
        is_same = engine_host == host or (engine_host in _LOCAL_HOSTS and host in _LOCAL_HOSTS)
        is_same = is_same or (host in _ALL_INTERFACES and engine_host == socket.gethostname())
        if port == engine_port and is_same:
            taken = {one.port for one in engines} | {listen.port, listen.admin_port}
            free = next(port for port in range(8080, 65_536) if port not in taken)
            raise InputError(
                f"the gateway's {name} must differ from its engines' ports; it would listen at "
                f"{engine.display_url} itself. Choose another one: --{name.replace(' ', '-')} {free}"
            )


def bind_socket(host: str, port: int, name: str) -> socket.socket:
    """Return a non-blocking listening socket. Raises InputError if the port is taken; its message names it ``name``."""
    # With the protocol named, asyncio's own loop sets TCP_NODELAY on accepted connections, as uvloop always does.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise InputError(f"the {name} must be free; {host}:{port}: {error.strerror}. Choose another one") from error
    listener.setblocking(False)
    return listener
