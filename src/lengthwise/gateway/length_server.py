"""Serve predicted output lengths over HTTP, beside a router of another project, and the hints that routers read."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import signal
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from lengthwise.backend.openai_protocol import CHAT, COMPLETIONS
from lengthwise.gateway.apis import APIS
from lengthwise.gateway.config import Limits, PredictionConfig, bind_socket
from lengthwise.gateway.edge import Fault, asgi, client_request, server
from lengthwise.gateway.edge.auth import Caller
from lengthwise.gateway.edge.client_request import Headers, RequestParser
from lengthwise.gateway.edge.errors import invalid, quoted
from lengthwise.gateway.length_prediction import LengthPredictor, fixed_tokens
from lengthwise.gateway.length_prediction.prediction import condition
from lengthwise.gateway.protocols import Clock, monotonic
from lengthwise.gateway.request import InvalidBodyError, Outcome, Request
from lengthwise.predict import LEVELS, Prompts, opened
from lengthwise.schema.errors import InputError
from lengthwise.statistics import Floats

_log = logging.getLogger("lengthwise.gateway.length_server")
_JSON = [(b"content-type", b"application/json")]
_LONG_BYTES = 1 << 18  # longer bodies are parsed in a thread: msgspec holds the GIL for some ms per MiB
MAX_UNOBSERVED = 1 << 14  # predictions that are stored until the length of their output is reported
MAX_REQUESTED = 100  # quantiles, and thresholds, of one answer


class CappedLength:
    """The total output length of a running request: at most ``cap`` tokens, and above the ``generated`` tokens.

    ``row`` [25] are the quantiles at LEVELS before the first token. Generated tokens change the distribution only as
    survival does: P(X > t | X > g) = P(X > t) / P(X > g). Beyond all quantiles of ``row``, a Pareto tail follows.
    """

    def __init__(self, row: Floats, generated: int, cap: int) -> None:
        self.generated, self.cap = generated, cap
        is_beyond = generated > 0 and generated >= row[-1]
        self._row = condition(row, generated) if is_beyond else row
        self._passed = 0.0 if is_beyond or not generated else self._cdf(generated)

    def quantile(self, level: float) -> float:
        """Return a quantile in tokens."""
        tokens = float(np.interp(self._passed + (1 - self._passed) * level, LEVELS, self._row))
        return min(max(tokens, self.generated + 1.0), float(self.cap))

    def exceeds(self, tokens: float) -> float:
        """Return the probability that the length is above ``tokens``."""
        if tokens >= self.cap:
            return 0.0
        return 1.0 if tokens < self.generated + 1 else (1 - self._cdf(tokens)) / (1 - self._passed)

    def mean(self) -> float:
        """Return the mean in tokens, the integral of ``exceeds``, which is linear between two quantiles."""
        low, high, row = float(self.generated), float(self.cap), self._row
        at = np.minimum(np.maximum(row, low), high)
        alive = np.where(row < low, 1 - self._cdf(low), np.where(row > high, 1 - self._cdf(high), 1 - LEVELS))
        area: float = at.item(0) - low + float((at[1:] - at[:-1]) @ (alive[1:] + alive[:-1])) / 2 / (1 - self._passed)
        return min(max(low + area, low + 1), high)

    def _cdf(self, tokens: float) -> float:
        row = self._row
        right = int(row.searchsorted(tokens, "right"))
        if right in (0, len(row)):
            return float(right > 0)
        share = (tokens - row.item(right - 1)) / (row.item(right) - row.item(right - 1))
        return LEVELS.item(right - 1) + share * (LEVELS.item(right) - LEVELS.item(right - 1))


@dataclass(frozen=True)
class Bins:
    """The bins of llm-d's plug-in ``outlen-bucket``, by probability: SHORT, LONG, or UNKNOWN if neither is likely."""

    short_below: int = 500
    long_from: int = 2000
    confidence: float = 0.8  # probability of a bin, from which a request is in it

    def __post_init__(self) -> None:
        if not 1 <= self.short_below <= self.long_from:
            raise InputError(
                f"the bins must have 1 <= short_below <= long_from; they are {self.short_below} and {self.long_from}"
            )
        if not 0.5 < self.confidence <= 1:
            raise InputError(f"the confidence of a bin must be above 0.5 and at most 1; it is {self.confidence}")

    def of(self, length: CappedLength, *, is_informed: bool) -> str:
        """Return the bin. Without information beyond the base rate it is UNKNOWN, unless the cap allows only SHORT."""
        if length.cap < self.short_below:
            return "SHORT"
        if is_informed and length.exceeds(self.long_from - 1) >= self.confidence:
            return "LONG"
        is_short = is_informed and 1 - length.exceeds(self.short_below - 1) >= self.confidence
        return "SHORT" if is_short else "UNKNOWN"


_Hint = tuple[dict[str, str], msgspec.Raw | None]
"""Headers to set, and the complete body to send instead of the received one (None: that one)."""


def _objective(_body: bytes, _tokens: int, bin_name: str) -> _Hint:
    return {"x-llm-d-inference-objective": f"lengthwise-{bin_name.lower()}"}, None


def _dynamo(body: bytes, tokens: int, _bin: str) -> _Hint:
    """Set ``nvext.agent_hints.osl``, unless the client has; all other values keep their bytes."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    fields.pop("lengths", None)  # the options of this server
    try:
        extension = msgspec.json.decode(fields.get("nvext", b"null"), type=dict[str, msgspec.Raw] | None) or {}
        hints = msgspec.json.decode(extension.get("agent_hints", b"null"), type=dict[str, msgspec.Raw] | None) or {}
    except msgspec.ValidationError:
        raise invalid("nvext", "nvext and nvext.agent_hints must be objects.", "invalid_type") from None
    if bytes(hints.get("osl", b"null")) == b"null":
        hints["osl"] = msgspec.Raw(b"%d" % tokens)
    extension["agent_hints"] = msgspec.Raw(msgspec.json.encode(hints))
    fields["nvext"] = msgspec.Raw(msgspec.json.encode(extension))
    return {}, msgspec.Raw(msgspec.json.encode(fields))


HINTS: dict[str, Callable[[bytes, int, str], _Hint]] = {
    "dynamo": _dynamo,
    "kserve": _objective,  # the scheduler of an LLMInferenceService is llm-d's
    "llm-d": _objective,
    "production-stack": lambda _body, tokens, _bin: ({"x-request-priority": str(tokens)}, None),
    "smg": lambda _body, tokens, _bin: ({"x-smg-output-token-estimate": str(tokens)}, None),
}
"""The hint of a request (body, predicted tokens, bin) by router."""


_ABSENT = msgspec.Raw(b"null")


class _Options(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    quantiles: list[float] = msgspec.field(default_factory=lambda: [0.1, 0.5, 0.9, 0.95, 0.99])
    thresholds: list[int] = msgspec.field(default_factory=list)
    generated_tokens: int = 0


class _Envelope(msgspec.Struct, frozen=True):
    messages: msgspec.Raw = _ABSENT
    prompt: msgspec.Raw = _ABSENT
    lengths: _Options = _Options()


class _Observed(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    id: str
    output_tokens: int
    finish_reason: str = "stop"


_ENVELOPES, _OBSERVED = msgspec.json.Decoder(_Envelope), msgspec.json.Decoder(_Observed)
_HINTS_PATH = "/v1/hints/"
_METHODS = {
    **dict.fromkeys(("/health", "/ready", "/metrics", "/v1/predictor"), ("GET", "HEAD")),
    **dict.fromkeys(("/v1/lengths", "/v1/lengths/observed", _HINTS_PATH), ("POST",)),
}


def _split(path: str) -> tuple[str, str, str]:
    """Return a known path ("": none), the router of a hint, and the URL that a proxy has put behind it."""
    if path.startswith(_HINTS_PATH):
        return _HINTS_PATH, *path.removeprefix(_HINTS_PATH).partition("/")[::2]
    return path if path in _METHODS else "", "", ""


def _check(options: _Options) -> None:
    for name, low, high in (("quantiles", 0, 1), ("thresholds", 0, 1 << 40)):
        values = getattr(options, name)
        if len(values) > MAX_REQUESTED or any(not low <= value <= high for value in values):
            message = f"{name} must be at most {MAX_REQUESTED} numbers from {low} to {high}."
            raise invalid(f"lengths.{name}", message)


def _identity(path: Path, predictor: Any) -> dict[str, Any]:
    """Return the id of the predictor in a file, its kind, and its errors of calibration by the data of their tests."""
    included = files("lengthwise.predict").joinpath("data/default.lwp")
    digest = hashlib.sha256(path.read_bytes() if path.exists() else included.read_bytes()).hexdigest()
    card, errors = getattr(predictor, "metadata_", None) or {}, []
    for key in ("held_out", "other_prompts_and_models"):
        if scores := (card.get(key) or {}).get("coverage90"):
            error = {"coverage": scores[0], "half_width": scores[1], "error": round(scores[0] - 0.9, 4)}
            errors.append({"data": key, "interval": [0.05, 0.95]} | error)
    trained = {"sources": card.get("sources", []), "samples": card.get("samples")}
    return {"id": f"{path.stem}-{digest[:12]}", "kind": predictor.kind, **trained, "calibration": errors}


@dataclass(frozen=True)
class LengthServerConfig:
    """Settings of a length server; the defaults work."""

    prediction: PredictionConfig = field(default_factory=PredictionConfig)
    bins: Bins = Bins()
    limits: Limits = field(default_factory=Limits)


class LengthServer:
    """An ASGI app and async context manager that predicts lengths, and learns from the lengths reported to it."""

    def __init__(self, config: LengthServerConfig, clock: Clock = monotonic) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

        self.config, self._clock = config, clock
        predictor = opened(config.prediction.predictor)
        self.predictor = LengthPredictor(config.prediction, clock, predictor=predictor)
        self.identity = _identity(Path(config.prediction.predictor), predictor)
        with contextlib.suppress(Exception):  # a predictor that needs a prompt has no base rate
            self._base = predictor.predict(Prompts(1)).at(LEVELS).tokens[0]
        self._parser = RequestParser(config.limits)
        self._budget = asgi.BodyBudget(config.limits.body_budget_bytes)
        self._caller, self._numbers = Caller(None, 0), itertools.count(1)
        self._unobserved: OrderedDict[str, Request] = OrderedDict()
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        registry: dict[str, Any] = {"namespace": "lengthwise_length_server", "registry": self._registry}
        edges = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.2, 1)
        took, share = "Time from a request's head to its answer", "Share of observed lengths up to a level's quantile"
        self._seconds = Histogram("request_seconds", took, ("path", "status"), buckets=edges, **registry)
        self._bins = Counter("bins", "Predicted requests by bin", ("bin",), **registry)
        self._coverage = Gauge("coverage", share, ("model", "level"), **registry)

    _base: Floats | None = None  # quantiles [25] of a request of which nothing is known

    async def __aenter__(self) -> Self:
        await self.predictor.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.predictor.__aexit__(*error)

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """Serve an HTTP request."""
        if scope["type"] != "http":
            return
        exchange, start_s, status = asgi.AsgiExchange(scope, receive, send), self._clock(), 500
        path, router, proxied = _split(scope["path"])
        try:
            headers, body = await self._answer(scope, exchange, path, router, proxied)
            await exchange.send(200, headers, body)
            status = 200
        except asgi.ClientGoneError:
            status = 499
        except (Fault, InvalidBodyError) as error:
            fault = error if isinstance(error, Fault) else invalid(None, str(error), "invalid_json")
            status = fault.status
            await exchange.send_fault(fault)
        except Exception:  # noqa: BLE001 - the client gets an answer, and the server continues, in any case
            _log.exception("a request failed in the length server")
            if not exchange.has_started:
                await exchange.send_fault(Fault(500, "internal", "The length server failed.", code="internal_error"))
        finally:
            exchange.close()
            self._seconds.labels(path or "unknown", str(status)).observe(self._clock() - start_s)

    async def _answer(
        self, scope: asgi.Scope, exchange: asgi.AsgiExchange, path: str, router: str, proxied: str
    ) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Return the headers and the body of an answer. Raises Fault."""
        method, limits = scope["method"], self.config.limits
        if not path:
            raise Fault(404, "route", f"Unknown request URL: {quoted(scope['path'])}.", code="unknown_url")
        if path == _HINTS_PATH and router not in HINTS:
            message = f"Unknown router {quoted(router)}; known are {', '.join(HINTS)}."
            raise Fault(404, "route", message, code="unknown_url")
        if proxied and (method != "POST" or not proxied.endswith("completions")):
            return _JSON, b"{}"  # a proxy asks about each request, also about those that generate nothing
        allowed = _METHODS[path]
        if method not in allowed:
            message, allow = f"This URL takes {', '.join(allowed)}.", [(b"allow", ", ".join(allowed).encode())]
            raise Fault(405, "method", message, code="method_not_allowed", headers=allow)
        if "GET" in allowed:
            return self._state(path)
        address = (scope.get("client") or ("",))[0]
        try:
            with asgi.BodyReservation(self._budget, address) as reservation:
                headers = client_request.parse_headers(scope["headers"], limits)
                client_request.check_media_type(APIS[CHAT], headers)
                body = await exchange.body(limits.body_bytes, headers.get(b"content-length"), reservation)
                if router:
                    return await self._hint(router, body, headers)
                answer = await self._lengths(body, headers) if path == "/v1/lengths" else self._observe(body)
                return _JSON, msgspec.json.encode(answer)
        except (Fault, InvalidBodyError):
            if not proxied:
                raise
            return _JSON, b"{}"  # the engine answers an invalid request, as it would without hints

    def _state(self, path: str) -> tuple[list[tuple[bytes, bytes]], bytes]:
        if path == "/metrics":
            from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

            for model, learned in self.predictor.learner.state()["models"].items():
                for level, share in learned["coverage"].items():
                    self._coverage.labels(model, level).set(share)
            return [(b"content-type", CONTENT_TYPE_LATEST.encode())], generate_latest(self._registry)
        if path == "/v1/predictor":
            return _JSON, msgspec.json.encode({**self.identity, **self.predictor.state()})
        if path == "/ready" and not self.predictor.state()["process"].get("up", True):
            raise Fault(503, "not_ready", "The predictor's process is not up.", code="not_ready")
        return _JSON, b'{"status":"ready"}' if path == "/ready" else b'{"status":"ok"}'

    async def _predict(self, body: bytes, headers: Headers) -> tuple[str, Request, _Options, bool]:
        """Return a request's id, the predicted request, its options, and whether the prediction is no base rate."""
        envelope = client_request.decode(_ENVELOPES, body)
        is_chat, is_completion = (bytes(raw) != b"null" for raw in (envelope.messages, envelope.prompt))
        if is_chat == is_completion:
            raise invalid("messages", "The body must have either messages (a chat) or a prompt (a completion).")
        _check(envelope.lengths)
        request_id = client_request.resolve_request_id(headers)
        api = CHAT if is_chat else COMPLETIONS
        arguments = (api, body, self._caller, headers, request_id, self._clock())
        if len(body) <= _LONG_BYTES:
            client = self._parser.parse(*arguments)
        else:
            client = await asyncio.to_thread(self._parser.parse, *arguments)
        request = Request(
            id=next(self._numbers), arrival_s=client.arrival_s, model=client.model, prompt_tokens=client.prompt_tokens,
            max_tokens=client.max_tokens or self.config.limits.max_tokens, client=client.client,
            fixed_tokens=fixed_tokens(body, client.fields, client.max_tokens), choices=client.choices,
        )  # fmt: skip
        prediction = request.length_prediction = await self.predictor.predict(request, client.text)
        if self.config.prediction.learn:
            self._unobserved[request_id] = request
            if len(self._unobserved) > MAX_UNOBSERVED:
                self._unobserved.popitem(last=False)
        raw = getattr(prediction, "raw", None)
        is_base = raw is not None and self._base is not None and bool(np.allclose(raw, self._base, rtol=1e-9, atol=0.0))
        return request_id, request, envelope.lengths, prediction.source != "prior" and not is_base

    async def _lengths(self, body: bytes, headers: Headers) -> dict[str, Any]:
        request_id, request, options, is_informed = await self._predict(body, headers)
        generated, cap = options.generated_tokens, request.max_tokens
        if not 0 <= generated < cap:
            message = f"generated_tokens must be from 0 to below max_tokens ({cap}); it is {generated}."
            raise invalid("lengths.generated_tokens", message)
        length = self._length(request, generated)
        bin_name = self._bin(length, is_informed=is_informed or generated > 0)
        bins = self.config.bins
        return {
            "id": request_id,
            "model": request.model,
            "source": request.length_prediction.source,
            "generated_tokens": generated,
            "max_tokens": cap,
            "mean": length.mean(),
            "quantiles": {f"{level:g}": length.quantile(level) for level in options.quantiles},
            "exceeds": {str(tokens): length.exceeds(tokens) for tokens in options.thresholds},
            "bin": bin_name,
            "bins": {"short_below": bins.short_below, "long_from": bins.long_from, "confidence": bins.confidence},
            "predictor": {**self.identity, "observed_outputs": self.predictor.learner.finished},
        }

    async def _hint(self, router: str, body: bytes, headers: Headers) -> tuple[list[tuple[bytes, bytes]], bytes]:
        request_id, request, _, is_informed = await self._predict(body, headers)
        bin_name = self._bin(self._length(request, 0), is_informed=is_informed)
        tokens = max(1, round(request.length_prediction.total_tokens))
        hint_headers, hint_body = HINTS[router](body, tokens, bin_name)
        answer = {"id": request_id, "headers": hint_headers, "body": hint_body}
        headers_to_copy = [(name.encode(), value.encode()) for name, value in hint_headers.items()]
        return [*_JSON, *headers_to_copy], msgspec.json.encode(answer)

    def _length(self, request: Request, generated: int) -> CappedLength:
        prediction = request.length_prediction
        unbounded = getattr(prediction, "unbounded", None)
        row = prediction.quantiles if unbounded is None else unbounded
        assert row is not None, "a length server has a predictor"
        return CappedLength(row, generated, request.max_tokens)

    def _bin(self, length: CappedLength, *, is_informed: bool) -> str:
        found = self.config.bins.of(length, is_informed=is_informed)
        self._bins.labels(found).inc()
        return found

    def _observe(self, body: bytes) -> dict[str, Any]:
        observed = client_request.decode(_OBSERVED, body)
        if not 1 <= observed.output_tokens <= self.config.limits.max_tokens:
            message = (
                f"output_tokens must be from 1 to {self.config.limits.max_tokens}; it is {observed.output_tokens}."
            )
            raise invalid("output_tokens", message)
        if not self.config.prediction.learn:
            raise Fault(409, "learning", "The server does not learn; start it without --no-learn.", code="no_learning")
        request = self._unobserved.pop(observed.id, None)
        if request is None:
            message = (
                f"No length of request {quoted(observed.id)} is expected: it is unknown, too old, or was reported."
            )
            raise Fault(404, "observed", message, param="id", code="unknown_request")
        request.generated_tokens = observed.output_tokens
        before = self.predictor.learner.finished
        self.predictor.on_end(request, Outcome.FINISHED, self._clock(), observed.finish_reason)
        finished = self.predictor.learner.finished
        return {"id": observed.id, "learned": finished > before, "observed_outputs": finished}


@contextlib.asynccontextmanager
async def running(config: LengthServerConfig, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[tuple[Any, int]]:
    """Run a length server during the block; yield its uvicorn server and its port. Raises InputError."""
    with bind_socket(host, port, "port") as listener:
        async with LengthServer(config) as app:
            serving = server(app, config.limits, host=host, port=port, drain_s=1)
            setattr(serving, "capture_signals", contextlib.nullcontext)  # noqa: B010 - signals are the command's
            task = asyncio.ensure_future(serving.serve(sockets=[listener]))
            try:
                while not serving.started and not task.done():  # noqa: ASYNC110 - uvicorn has no event for it
                    await asyncio.sleep(0.01)
                yield serving, listener.getsockname()[1]
            finally:
                serving.should_exit = True
                await task


def serve(config: LengthServerConfig, host: str, port: int, ready: Callable[[int], None]) -> None:
    """Run a length server until SIGTERM or SIGINT; ``ready`` is called with its port. Raises InputError."""

    async def until_signal() -> None:
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        async with running(config, host, port) as (_, used):
            ready(used)
            await stopped.wait()

    asyncio.run(until_signal())
