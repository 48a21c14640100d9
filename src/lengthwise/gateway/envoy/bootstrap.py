"""A bootstrap configuration of Envoy with the picker's filter and a cluster of the gateway's engines."""

from __future__ import annotations

import ipaddress
from typing import Any
from urllib.parse import urlsplit

import msgspec

from lengthwise.gateway.config import GatewayConfig, Tls
from lengthwise.gateway.envoy.picker import (
    CODE_DETAILS,
    ENDPOINT,
    ENDPOINT_NAMESPACE,
    MAX_FALLBACKS,
    MAX_WAIT_S,
    SERVED,
    SUBSET_NAMESPACE,
)
from lengthwise.schema.errors import InputError

_EXTENSIONS = "type.googleapis.com/envoy.extensions"
_PICKER, _ENGINES = "lengthwise_picker", "engines"
_KEEPALIVE = {"interval": "10s", "timeout": "5s"}  # of connections to the picker, whose machine may vanish
# The scheduler limits requests at engines, and all requests that wait have a stream to the picker.
_NO_LIMITS = dict.fromkeys(("max_connections", "max_pending_requests", "max_requests", "max_retries"), (1 << 32) - 1)
_MAX_STREAMS = 100  # requests at once on an HTTP/2 connection; RFC 9113 recommends no fewer
_HEADROOM_BYTES = 1 << 16  # of Envoy's buffer beyond the largest body
_NO_PICKER = {"error": {
    "message": "The endpoint picker is not available; send the request again.", "type": "server_error", "param": None,
    "code": "picker_unavailable",
}}  # fmt: skip


def bootstrap(config: GatewayConfig) -> dict[str, Any]:
    """Return Envoy's configuration for these engines and this picker.

    Envoy ignores a failed picker for requests that it has forwarded already (``failure_mode_allow``). Whether a request
    that got no engine is refused or goes to any engine is decided by its route.

    Raises:
        InputError: There is no port of the picker, or Envoy cannot reach an engine as the gateway does.
    """
    envoy, limits = config.envoy, config.limits
    if not envoy.ext_proc_port:
        raise InputError(
            "Envoy needs the port of the picker, a fixed one: --ext-proc-port 9002, or envoy.ext_proc_port"
        )
    manager = {
        "@type": f"{_EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "lengthwise",
        "use_remote_address": True,  # the picker reads the client's address from X-Forwarded-For
        "generate_request_id": False,  # the picker sets X-Request-Id
        "preserve_external_request_id": True,
        "stream_idle_timeout": "0s",  # a request may wait for an engine longer than Envoy's default of 5 minutes
        "request_headers_timeout": f"{limits.body_s:g}s",
        "codec_type": "AUTO",  # HTTP/1.1 or HTTP/2: by ALPN with TLS, otherwise by the first bytes
        "http2_protocol_options": {"max_concurrent_streams": _MAX_STREAMS},
        "max_request_headers_kb": max(1, -(-limits.header_bytes // 1024)),
        # A client must not choose an engine: the header is removed before Envoy chooses a route.
        "early_header_mutation_extensions": [_named(
            "envoy.http.early_header_mutation.header_mutation",
            "http.early_header_mutation.header_mutation.v3.HeaderMutation",
            mutations=[{"remove": ENDPOINT}],
        )],
        "http_filters": [_ext_proc(config), _named("envoy.filters.http.router", "filters.http.router.v3.Router")],
        "route_config": {"virtual_hosts": [{"name": "clients", "domains": ["*"], "routes": _routes(config)}]},
    }  # fmt: skip
    chain: dict[str, Any] = {"filters": [{"name": "http", "typed_config": manager}]}
    if envoy.client_tls is not None:
        chain["transport_socket"] = _server_tls(envoy.client_tls)
    listener = {
        "name": "clients",
        "address": _address(envoy.host, envoy.port),
        "per_connection_buffer_limit_bytes": limits.body_bytes + _HEADROOM_BYTES,
        "filter_chains": [chain],
    }
    picker = _cluster(_PICKER, [(envoy.picker_host, envoy.ext_proc_port)], "1s")
    picker["typed_extension_protocol_options"] = {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": f"{_EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {"connection_keepalive": _KEEPALIVE}},
    }}  # fmt: skip
    if envoy.tls is not None:
        picker["transport_socket"] = _tls(Tls(ca=envoy.tls.ca))
    return {"static_resources": {"listeners": [listener], "clusters": [picker, _engine_cluster(config)]}}


def _named(name: str, kind: str, **settings: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": f"{_EXTENSIONS}.{kind}", **settings}}


def _ext_proc(config: GatewayConfig) -> dict[str, Any]:
    return _named(
        "envoy.filters.http.ext_proc",
        "filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": _PICKER}},
        failure_mode_allow=True,
        processing_mode={
            "request_header_mode": "SEND", "request_body_mode": "BUFFERED", "request_trailer_mode": "SKIP",
            "response_header_mode": "SEND", "response_body_mode": "STREAMED", "response_trailer_mode": "SEND",
        },
        message_timeout=f"{config.envoy.picker_timeout_s:g}s",
        max_message_timeout=f"{MAX_WAIT_S}s",  # the picker lets requests that it has queued wait so long
        response_attributes=[CODE_DETAILS],
        metadata_options={
            "forwarding_namespaces": {"untyped": [ENDPOINT_NAMESPACE, SUBSET_NAMESPACE]},
            "receiving_namespaces": {"untyped": [ENDPOINT_NAMESPACE]},
        },
    )  # fmt: skip


def _routes(config: GatewayConfig) -> list[dict[str, Any]]:
    retry = {"retry_on": "reset,refused-stream", "num_retries": MAX_FALLBACKS}
    to_engine = {"cluster": _ENGINES, "timeout": "0s", "retry_policy": retry}
    # The idle timeout starts at the pick: a hung engine, or a client that no longer reads, must not have its slot for
    # ever, while a waiting request has no limit.
    silence_s = max(config.resilience.first_byte_s, config.resilience.stall_s)
    picked = {
        "match": {"prefix": "/", "headers": [{"name": ENDPOINT, "present_match": True}]},
        "route": {**to_engine, "idle_timeout": f"{silence_s:g}s"},
    }
    other: dict[str, Any] = {"match": {"prefix": "/"}}
    if config.envoy.failure == "open":
        other["route"] = to_engine
    else:
        other["direct_response"] = {"status": 503, "body": {"inline_string": msgspec.json.encode(_NO_PICKER).decode()}}
        headers = {"content-type": "application/json", "retry-after": "1"}
        other["response_headers_to_add"] = [
            {"header": {"key": name, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
            for name, value in headers.items()
        ]
    return [picked, other]


def _engine_cluster(config: GatewayConfig) -> dict[str, Any]:
    """Return the cluster of all engines, whose load balancing policy sends a request to the picked one."""
    addresses, tls = [], set[tuple[str, Tls | None]]()
    for engine in config.engines:
        parts = urlsplit(engine.url)
        if parts.path.rstrip("/").removesuffix("/v1").strip("/"):
            raise InputError(
                f"Envoy sends requests to /v1 of an engine; {engine.display_url} has another path, which the gateway's "
                "own port can use"
            )
        addresses.append((parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)))
        tls.add((parts.scheme, engine.tls))
    if config.discovery.endpoint_slices:
        raise InputError(
            "Envoy finds no engines of discovery.endpoint_slices by itself: leave it out and set discovery.dns, or let "
            "a Gateway of Kubernetes configure Envoy from an InferencePool"
        )
    if config.discovery.dns:
        host, _, port = config.discovery.dns.rpartition(":")
        addresses.append((host, int(port)))
        tls.add(("http", config.discovery.engine.tls))
    if len(tls) > 1:
        raise InputError(
            "all engines behind Envoy must use http, or all https with the same certificates: put the others behind a "
            "gateway of their own"
        )
    cluster = _cluster(_ENGINES, addresses, f"{config.resilience.connect_s:g}s")
    key = {"key": ENDPOINT_NAMESPACE, "path": [{"key": SERVED}]}
    fallback = _named(
        "envoy.load_balancing_policies.least_request", "load_balancing_policies.least_request.v3.LeastRequest"
    )
    override = _named(
        "envoy.load_balancing_policies.override_host",
        "load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[{"header": ENDPOINT}],
        selected_host_key=key,
        fallback_policy={"policies": [{"typed_extension_config": fallback}]},
    )
    cluster["load_balancing_policy"] = {"policies": [{"typed_extension_config": override}]}
    ((scheme, certificates),) = tls
    if scheme == "https":
        cluster["transport_socket"] = _tls(certificates or Tls())
    return cluster


def _tls(tls: Tls) -> dict[str, Any]:
    context: dict[str, Any] = {}
    if tls.ca:
        context["validation_context"] = {"trusted_ca": {"filename": tls.ca}}
    else:
        context["validation_context"] = {"system_root_certs": {}}
    if tls.cert:
        certificate = {"certificate_chain": {"filename": tls.cert}, "private_key": {"filename": tls.key}}
        context["tls_certificates"] = [certificate]
    return _named(
        "envoy.transport_sockets.tls",
        "transport_sockets.tls.v3.UpstreamTlsContext",
        common_tls_context=context,
        **({"sni": tls.server_name} if tls.server_name else {"auto_host_sni": True}),
        auto_sni_san_validation=True,
    )


def _server_tls(tls: Tls) -> dict[str, Any]:
    certificate = {"certificate_chain": {"filename": tls.cert}, "private_key": {"filename": tls.key}}
    context: dict[str, Any] = {"tls_certificates": [certificate], "alpn_protocols": ["h2", "http/1.1"]}
    if tls.ca:
        context["validation_context"] = {"trusted_ca": {"filename": tls.ca}}
    return _named(
        "envoy.transport_sockets.tls",
        "transport_sockets.tls.v3.DownstreamTlsContext",
        common_tls_context=context,
        require_client_certificate=tls.ca is not None,
    )


def _cluster(name: str, addresses: list[tuple[str, int]], connect_timeout: str) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _address(host, port)}} for host, port in addresses]
    is_static = all(_is_address(host) for host, _ in addresses)
    kind = {"type": "STATIC"} if is_static else {"type": "STRICT_DNS", "dns_lookup_family": "V4_PREFERRED"}
    assignment = {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}
    return {
        "name": name, "connect_timeout": connect_timeout, **kind, "load_assignment": assignment,
        "circuit_breakers": {"thresholds": [_NO_LIMITS]},
    }  # fmt: skip


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
