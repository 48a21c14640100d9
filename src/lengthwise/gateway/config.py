"""What a gateway is told: frozen, composed, with defaults that work."""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from lengthwise.schema.errors import InputError, UnknownNameError


def known(kind: str, name: str, names: tuple[str, ...]) -> None:
    """Raises UnknownNameError unless it is one of the names."""
    if name not in names:
        raise UnknownNameError(kind, name, names)


def whole(name: str, value: object, least: int) -> None:
    """Raises InputError unless it is a whole number, not below the least."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}; it is {value!r}")


def from_zero(name: str, value: float) -> None:
    """Raises InputError unless it is 0 or more."""
    if not value >= 0:
        raise InputError(f"{name} must be at least 0; it is {value!r}")


KINDS = ("auto", "vllm", "sglang", "llama.cpp", "tgi", "transformers", "openai")

GENERATION_DEFAULTS = ("unknown", "none")


@dataclass(frozen=True)
class Tls:
    """Certificates: of a server (``cert``, ``key``), of a client to it, and who is believed (``ca``)."""

    cert: str | None = None
    key: str | None = None
    ca: str | None = None


@dataclass(frozen=True)
class Engine:
    """One engine behind the gateway.

    Attributes:
        url: Its address, with or without ``/v1``.
        name: How metrics and the admin page call it; "" takes host and port.
        kind: One of KINDS; "auto" asks it.
        api_key: What the gateway shows it (never a client's own key).
        in_flight: A fixed cap on requests sent to it, in every mode; None lets the gateway find it (none where the
            engine orders).
        tls: For https with an own authority or a client certificate.
        probe: Whether it is sent one tiny prompt to see whether it tells token ids (without them no resuming).
        generation_defaults: "none": it fills in no penalties and no longest output that a request leaves out (vLLM
            with ``--generation-config vllm``); "unknown": only requests that leave none open are cut there.
    """

    url: str
    name: str = ""
    kind: str = "auto"
    api_key: str | None = field(default=None, repr=False)
    in_flight: int | None = None
    tls: Tls | None = None
    probe: bool = True
    generation_defaults: str = "unknown"

    def __post_init__(self) -> None:
        known("kind of engine", self.kind, KINDS)
        known("generation_defaults", self.generation_defaults, GENERATION_DEFAULTS)
        if self.in_flight is not None:
            whole("in_flight", self.in_flight, 1)

    @property
    def display_url(self) -> str:
        """Its address as errors and logs tell it: without a name and password."""
        place = urlsplit(self.url)
        return place._replace(netloc=place.netloc.rpartition("@")[2]).geturl()


@dataclass(frozen=True)
class Discovery:
    """Where engines come from besides the listed ones.

    Attributes:
        dns: ``host:port``: every address of the name (a headless Service) is an engine.
        endpoint_slices: ``namespace/service:port``: ready addresses of a Service's EndpointSlices.
        every_s: Between two look-ups of DNS.
        api_url: Address of the Kubernetes API; None: as a pod finds it.
        engine: What holds of every engine that is found (its url is not used).
    """

    dns: str | None = None
    endpoint_slices: str | None = None
    every_s: float = 5.0
    api_url: str | None = None
    engine: Engine = Engine("http://found")


SPLIT = ("waa", "waa-c", "waa-m")
"""Schedules that admission alone cannot keep: some engines only encode, the others only decode."""


@dataclass(frozen=True)
class Phases:
    """A schedule of phases (ExeGPT's RRA), as ``lengthwise schedule`` chooses it; every engine keeps its own.

    Attributes:
        encode_batch: New requests of one encoding, B_E.
        decode_steps: Decode iterations from one encoding to the next, N_D.
        decode_batch: Requests at an engine after an encoding in the mean, B_D; None: unknown.
        mean_prompt_tokens: Of a prompt; None: unknown.
        threshold: Encodings have more or fewer requests, so that their prompts' tokens stay within this share of their
            mean, and the decode batch within it of its own; None: they are never resized.
        max_in_flight: Requests at an engine at most; None: with a threshold what that lets the decode batch be and an
            encoding more (of whose seats some are about to be left), else the engine's own seats.
    """

    encode_batch: int
    decode_steps: int
    decode_batch: float | None = None
    mean_prompt_tokens: float | None = None
    threshold: float | None = None
    max_in_flight: int | None = None

    def __post_init__(self) -> None:
        whole("encode_batch", self.encode_batch, 1)
        whole("decode_steps", self.decode_steps, 1)
        for name in ("decode_batch", "mean_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and not 1 <= value < math.inf:
                raise InputError(f"{name} must be at least 1; it is {value!r}")
        if self.threshold is not None:
            self._check_threshold(self.threshold)
        if self.max_in_flight is not None:
            whole("max_in_flight", self.max_in_flight, self.encode_batch)

    def _check_threshold(self, threshold: float) -> None:
        if not 0 <= threshold < 1:
            raise InputError(f"threshold must be from 0 to below 1; it is {threshold!r}")
        if self.decode_batch is None or self.mean_prompt_tokens is None:
            raise InputError(
                "threshold must have decode_batch and mean_prompt_tokens beside it: batches are kept near these means"
            )

    @property
    def high(self) -> int | None:
        """The most requests that an engine may have at once by the schedule; None: it sets no bound."""
        if self.max_in_flight is not None or self.threshold is None or self.decode_batch is None:
            return self.max_in_flight
        return math.floor(self.decode_batch * (1 + self.threshold) + 1e-9) + self.encode_batch


def refuse_split(mode: str) -> None:
    """Nothing, unless a mode is one of those that need engines of two kinds.

    Raises:
        InputError: It is; the message says what does it.
    """
    if mode.lower() in SPLIT:
        raise InputError(
            f"mode {mode!r} must run on engines that split prefill and decode, which admission before them cannot do: "
            "`lengthwise schedule SCENARIO --deploy DIR` writes their commands. Mode 'rra' keeps phases on any engine"
        )


MODES = ("observe", "fcfs", "srtf", "isrtf", "windowed", "bins", "rra", "engine-priority", "engine-plugin")
"""How requests are ordered; ``observe`` orders nothing and tells what order would have gained."""
FAIRNESS = ("none", "vtc")
PREFIXES = ("tenant", "shared", "none")
STATISTICS = ("mean", "median", "p80", "p90")


@dataclass(frozen=True)
class Order:
    """Who goes first, and who makes room.

    Attributes:
        mode: One of MODES.
        rank: Name of a rank policy; None takes the mode's own (srtf, isrtf, windowed: "srtf"; others "fcfs").
        takeover: Name of a takeover policy: when a waiting request takes a running one's place (isrtf).
        window_tokens: Predictions are made again, and places looked at, every so many tokens (ELIS: 50).
        max_wait_s: Who has waited so long in all goes before everybody who has not, in order of arrival.
        max_preemptions: A request is cut at most so often.
        cuts_per_s: All requests together are cut at most so often: no storm.
        fairness: "vtc": within a priority class the tenant that was served least goes first.
        bins: Number of bins (mode bins), of equal mass of predicted lengths.
        batch_wait_s: How long the first of a bin waits at most for the bin to fill.
    """

    mode: str = "isrtf"
    rank: str | None = None
    takeover: str = "worth(factor=100)"
    window_tokens: int = 50
    max_wait_s: float = 60.0
    max_preemptions: int = 3
    cuts_per_s: float = 10.0
    fairness: str = "none"
    bins: int = 8
    batch_wait_s: float = 2.0

    def __post_init__(self) -> None:
        refuse_split(self.mode)
        known("mode", self.mode, MODES)
        known("fairness", self.fairness, FAIRNESS)
        whole("window_tokens", self.window_tokens, 1)
        whole("max_preemptions", self.max_preemptions, 0)
        whole("bins", self.bins, 1)
        for name in ("max_wait_s", "cuts_per_s", "batch_wait_s"):
            from_zero(name, getattr(self, name))


@dataclass(frozen=True)
class Admission:
    """What may wait.

    Attributes:
        max_queued: Requests.
        max_queued_bytes: Their bodies as they came; a third of ``Limits.body_budget_bytes``, or that is met before.
        max_predicted_wait_s: Beyond it a request is refused with 429 and Retry-After; inf admits all.
        no_engine_s: How long requests wait while no engine is there; after it 503.
    """

    max_queued: int = 20_000
    max_queued_bytes: int = 128 << 20
    max_predicted_wait_s: float = math.inf
    no_engine_s: float = 30.0

    def __post_init__(self) -> None:
        whole("max_queued", self.max_queued, 1)
        whole("max_queued_bytes", self.max_queued_bytes, 1)
        for name in ("max_predicted_wait_s", "no_engine_s"):
            from_zero(name, getattr(self, name))


@dataclass(frozen=True)
class Dispatch:
    """How many requests an engine is given, and which engine gets one.

    Attributes:
        start: In-flight cap of an engine nobody has measured; with the next two, of an adapting cap.
        least: The cap never falls below.
        most: Nor rises above, also where an engine would run more at once.
        kv_high: Above this share of the KV cache in use the cap shrinks.
        adapt_every_s: Between two looks at an engine's signals.
        affinity: Share of a session's prompt, or of a known beginning, that its engine has cached still; 0: never mind.
        prefixes: Whose prompts are compared by their beginnings (keyed hashes): one "tenant"'s, "shared" all, "none".
        phases: The schedule that every engine keeps in mode rra.
    """

    start: int = 8
    least: int = 1
    most: int = 512
    kv_high: float = 0.9
    adapt_every_s: float = 1.0
    affinity: float = 0.5
    prefixes: str = "tenant"
    phases: Phases | None = None

    def __post_init__(self) -> None:
        known("prefixes", self.prefixes, PREFIXES)
        for name in ("start", "least", "most"):
            whole(name, getattr(self, name), 1)
        if not self.least <= self.start <= self.most:
            raise InputError(
                f"dispatch: least <= start <= most must hold; they are {self.least}, {self.start}, {self.most}"
            )


@dataclass(frozen=True)
class Forecasting:
    """Who predicts lengths, and how it is kept from doing harm.

    Attributes:
        predictor: "default" (the shipped one), a file, or "none": all lengths alike.
        statistic: One of STATISTICS of the predicted distribution, which orders.
        deadline_s: An answer that takes longer is not waited for; the prior stands in.
        inline_below_s: A predictor faster than this a prompt (shipped: 0.1 ms) runs in the loop, others in a process.
        learn: Whether it is set right by the lengths that finish here (scale by model, conformal).
        learn_every: Finished requests between two corrections.
    """

    predictor: str = "default"
    statistic: str = "mean"
    deadline_s: float = 0.010
    inline_below_s: float = 0.0002
    learn: bool = True
    learn_every: int = 64

    def __post_init__(self) -> None:
        known("statistic", self.statistic, STATISTICS)
        whole("learn_every", self.learn_every, 1)


@dataclass(frozen=True)
class Key:
    """A client's key: only its hash is kept.

    Attributes:
        tenant: Who it is, for metrics and fairness.
        sha256: Hex digest of the key.
        models: What it may ask for; () all.
        priority: Its class: smaller goes first.
        rate_rps: Requests a second in the long run; inf no limit.
        burst: Requests at once.
        concurrency: Requests that may be in at the same time, waiting and answered ones; None no limit.
    """

    tenant: str
    sha256: str
    models: tuple[str, ...] = ()
    priority: int = 0
    rate_rps: float = math.inf
    burst: int = 100
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if self.concurrency is not None:
            whole("concurrency", self.concurrency, 1)


@dataclass(frozen=True)
class Limits:
    """What the edge takes in.

    Attributes:
        body_budget_bytes: What all bodies that are being read, and all requests until their answer has ended (a
            streamed one: begun), hold in memory: 2 to 10 times their bodies as they came. One key, or address where
            there are none, has a quarter.
        values: Members of the lists and fields of the objects of a body, such as token ids of its prompt.
        idle_s: How long an idle connection is kept: longer than clients and proxies do (60 s), so that they close it.
    """

    body_bytes: int = 8 << 20
    depth: int = 32
    n: int = 8
    max_tokens: int = 131_072
    header_bytes: int = 32 << 10
    headers: int = 100
    connections: int = 10_000
    body_s: float = 30.0
    messages: int = 4096
    idle_s: float = 75.0
    body_budget_bytes: int = 512 << 20
    values: int = 1 << 20

    def __post_init__(self) -> None:
        for name in ("body_budget_bytes", "values"):
            whole(name, getattr(self, name), 1)
        if self.body_budget_bytes < self.body_bytes:
            raise InputError(
                f"body_budget_bytes must be at least body_bytes; they are {self.body_budget_bytes}, {self.body_bytes}"
            )


@dataclass(frozen=True)
class ResilienceConfig:
    """How engines are watched, and what is done when one fails.

    Attributes:
        health_every_s: Between two health checks.
        connect_s: Longest time to be connected.
        first_byte_s: Longest time until an answer begins.
        stall_s: Longest silence within an answer.
        failures: So many in a row open the circuit of an engine.
        open_s: It is then tried again after this (doubling up to 16 times as long).
        retry_share: Retries are at most this share of requests (10 at once, 5 of one tenant or address); the first of
            what an engine that died had under way is free.
        drain_s: After SIGTERM admitted requests have so long to finish.
        answer_bytes: Longest answer that is held as a whole, since it is not streamed.
        leave_s: An engine that was replaced, or is no longer found, has so long to end the answers that it has begun.
    """

    health_every_s: float = 2.0
    connect_s: float = 5.0
    first_byte_s: float = 600.0
    stall_s: float = 60.0
    failures: int = 5
    open_s: float = 2.0
    retry_share: float = 0.2
    drain_s: float = 30.0
    answer_bytes: int = 64 << 20
    leave_s: float = 3600.0


@dataclass(frozen=True)
class Listen:
    """Where the gateway listens.

    Attributes:
        host: Of the clients' port.
        port: For clients: /v1/*, /health, /ready.
        admin_host: Of the admin port; not the world by default.
        admin_port: /metrics, the admin page and its data; 0 picks a free one, None none.
        tls: With ``ca`` clients must show a certificate.
        proxies: Addresses of proxies before the gateway, with commas, whose X-Forwarded-For is believed; "*": all.
        journal: File to which every finished request is written (no prompts); None keeps none.
        trace: OpenTelemetry collector's OTLP/HTTP address; None traces nothing.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    admin_host: str = "127.0.0.1"
    admin_port: int | None = 8001
    tls: Tls | None = None
    proxies: str | None = None
    journal: str | None = None
    trace: str | None = None


@dataclass(frozen=True)
class GatewayConfig:
    """All of it. Without keys everybody may ask (and is one tenant, "anonymous")."""

    engines: tuple[Engine, ...] = ()
    discovery: Discovery = field(default_factory=Discovery)
    order: Order = Order()
    admission: Admission = Admission()
    dispatch: Dispatch = Dispatch()
    prediction: Forecasting = Forecasting()
    keys: tuple[Key, ...] = ()
    limits: Limits = Limits()
    resilience: ResilienceConfig = ResilienceConfig()
    listen: Listen = Listen()

    def __post_init__(self) -> None:
        if not (self.engines or self.discovery.dns or self.discovery.endpoint_slices):
            raise InputError("a gateway needs an engine: give --engine URL, [[engines]] or [discovery]")
        if self.order.mode == "rra" and self.dispatch.phases is None:
            raise InputError(
                "mode rra must have [dispatch.phases], encode_batch and decode_steps, as `lengthwise schedule` tells"
            )


_HERE = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::")  # noqa: S104 - compared, not bound
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - likewise
_USUAL = {"https": 443}


def check_ports(config: GatewayConfig) -> None:
    """Raises InputError where the gateway would ask itself, or would take an engine's port."""
    for engine in config.engines:
        address = urlsplit(engine.url)
        port = address.port or _USUAL.get(address.scheme, 80)
        for name, host, mine in _doors(config.listen):
            if port == mine and _same(address.hostname or "", host):
                raise InputError(
                    f"the gateway's {name} must be another than its engines'; {engine.display_url} is where it "
                    f"would listen itself. Give the gateway another one: --{name.replace(' ', '-')} {_other(config)}"
                )


def listening(host: str, port: int, name: str) -> socket.socket:
    """A socket that has the port; raises InputError where another one has it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    door = socket.socket(family)
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind((host, port))
        door.listen(2048)
    except OSError as error:
        door.close()
        raise InputError(f"the {name} must be free; {host}:{port}: {error.strerror}. Choose another one") from error
    door.setblocking(False)
    return door


def _doors(listen: Listen) -> list[tuple[str, str, int]]:
    """Name, host and number of the ports; not those that the system picks."""
    doors = [("port", listen.host, listen.port), ("admin port", listen.admin_host, listen.admin_port or 0)]
    return [door for door in doors if door[2]]


def _same(engine: str, host: str) -> bool:
    """Whether an engine's host is the one that the gateway listens at."""
    if engine == host or (engine in _HERE and host in _HERE):
        return True
    return host in _EVERYWHERE and engine == socket.gethostname()


def _other(config: GatewayConfig) -> int:
    """A port that nobody in the configuration has."""
    taken = {urlsplit(engine.url).port for engine in config.engines}
    taken |= {config.listen.port, config.listen.admin_port}
    return next(port for port in range(8080, 65_536) if port not in taken)
