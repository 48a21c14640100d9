"""Which engines stand behind a gateway, and where they are found."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from lengthwise.gateway._checks import known, whole

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
    def shown(self) -> str:
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
