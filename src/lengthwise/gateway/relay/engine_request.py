"""Build the request for an engine, decide where it can be resumed, and choose the reader of its response."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import not_
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from lengthwise.backend.openai_protocol import CHAT
from lengthwise.gateway.apis import APIS, CHUNKS, NAMED
from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.plugin.settings import CLASS, LATER, MAX_CLASS, PREDICTED
from lengthwise.gateway.relay import responses
from lengthwise.gateway.relay.failures import QueueFullError, UpstreamError
from lengthwise.gateway.relay.sse import ResponseOptions
from lengthwise.gateway.relay.upstream import Attempt, UpstreamConnection, read_up_to
from lengthwise.gateway.request import ClientRequest, Request
from lengthwise.predict.distribution import LEVELS

if TYPE_CHECKING:
    from lengthwise.gateway.fleet import EngineWorker

Fields = Mapping[str, Any]

FORWARDED_FIELDS = frozenset({
    "temperature", "top_p", "top_k", "min_p", "ignore_eos", "stop_token_ids", "skip_special_tokens",
    "spaces_between_special_tokens", "logit_bias", "allowed_token_ids", "priority", "cache_salt", "user",
    "vllm_xargs", "seed", "stop", "logprobs", "n", "best_of", "stream_interval",
})  # fmt: skip
"""Fields that a continuation may copy: ``RULES`` exclude values whose effect depends on where the output is split."""
REWRITTEN_FIELDS = frozenset({
    "model", "prompt", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens", "min_tokens",
    "return_token_ids",
})  # fmt: skip
"""Fields that a continuation sets itself."""
PROMPT_FIELDS = frozenset({
    "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "add_special_tokens",
    "documents", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "request_id",
    "parallel_tool_calls", "include_reasoning",
})  # fmt: skip
"""Fields that a continuation leaves out: the prompt's token ids contain their effect, or they have none."""
_KNOWN_FIELDS = FORWARDED_FIELDS | REWRITTEN_FIELDS | PROMPT_FIELDS
DEFAULTED_PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
SPLIT_INVARIANT_IN_VLLM = frozenset({"repetition_penalty"})  # vLLM counts prompt and output together


def _neutral(value: Any) -> Callable[[Any], bool]:
    return lambda given: given is None or given == value


def _no_logprobs(given: Any) -> bool:
    return given is None or given is False  # 0 requests the log-probability of the chosen token


_CHECKS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "counts output tokens but not prompt tokens": {"presence_penalty": _neutral(0), "frequency_penalty": _neutral(0)},
    "engines differ in whether the prompt counts": {"repetition_penalty": _neutral(1)},
    "beam search cannot resume": {"length_penalty": _neutral(1), "use_beam_search": not_},
    "several outputs share a request": {"n": _neutral(1), "best_of": _neutral(1)},
    "a match may start before a preemption and end after it": dict.fromkeys(
        ("stop", "include_stop_str_in_output", "bad_words"), not_
    ),
    "text offsets would restart": {"logprobs": _no_logprobs, "top_logprobs": not_},
    "the prompt changes": {"prompt_logprobs": _no_logprobs, "echo": not_},
    "the model reads text after the output": {"suffix": not_},
    "the state of the grammar would be lost": {
        "response_format": lambda given: given is None or (isinstance(given, Mapping) and given.get("type") == "text"),
        **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), not_),
    },
    "the parser of tool calls reads one response": {
        "tool_choice": _neutral("none"),
        **dict.fromkeys(("tools", "functions", "function_call"), not_),
    },
    "only text can be continued": {
        "modalities": _neutral(["text"]),
        **dict.fromkeys(("audio", "mm_processor_kwargs", "prompt_embeds"), not_),
    },
    "would truncate the tokens so far": {"truncate_prompt_tokens": not_},
    "belongs to logprobs": {"return_tokens_as_token_ids": not_},
    "without text the gateway does not know which tokens are flushed": {"detokenize": _neutral(True)},
}
RULES = {name: (is_neutral, reason) for reason, checks in _CHECKS.items() for name, is_neutral in checks.items()}
"""Fields that may prevent a resume, each with a test for harmless values and the reason against other values."""


def resume_conflict(fields: Fields) -> str | None:
    """Return the reason for which a resume could change the response to a request with these fields, or None."""
    for name, value in fields.items():
        if name in RULES:
            is_neutral, reason = RULES[name]
            if not is_neutral(value):
                return f"{name}: {reason}"
        elif value is not None and name not in _KNOWN_FIELDS:
            return f"{name}: the effect of a resume on this field is unknown"
    if fields.get("seed") is not None and fields.get("temperature") != 0:
        return "seed: the engine's random numbers would restart"
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and (not prompt or not all(type(token_id) is int for token_id in prompt)):
        return "prompt: several prompts share a request"
    given = fields.get("messages")  # a field without meaning in /v1/completions, so of any type
    messages = [message for message in given if isinstance(message, Mapping)] if isinstance(given, list) else []
    parts = [part for one in messages if isinstance(one.get("content"), list) for part in one["content"]]
    if all(isinstance(part, str) or (isinstance(part, Mapping) and part.get("type") == "text") for part in parts):
        return None
    return "messages: only text can be continued"


def fields_left_to_defaults(fields: Fields) -> frozenset[str]:
    """Return the names of fields that affect a resume and that the request leaves to the engine's defaults."""
    unset = {name for name in DEFAULTED_PENALTIES if fields.get(name) is None}
    if fields.get("max_tokens") is None and fields.get("max_completion_tokens") is None:
        unset.add("max_tokens")
    return frozenset(unset)


COMPLETIONS_MAX_TOKENS = 16  # OpenAI's default of ``max_tokens`` in /v1/completions; chat has none


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """Whether and how a request can be resumed after a preemption or a failure."""

    options: ResponseOptions
    fields: dict[str, Any] = field(default_factory=dict)  # fields of the body; {} if the request is never resumed
    # Reason for which a resume could change the response; None if a resume leaves it unchanged.
    conflict: str | None = "not planned: no engine can resume, or nothing would preempt it"
    max_tokens: int | None = None  # requested maximum; None if the engine's default applies
    # Fields that affect a resume and that the request leaves to the engine's defaults.
    unset: frozenset[str] = frozenset(DEFAULTED_PENALTIES)
    metered: bool = False  # whether a quota or fairness depends on the number of its tokens

    def can_resume_at(self, worker: EngineWorker) -> bool:
        """Return whether the request allows a resume, and this engine returns and accepts token ids."""
        return self.conflict is None and worker.capabilities.token_ids_each and worker.capabilities.token_id_prompts

    def can_preempt_at(self, worker: EngineWorker) -> bool:
        """Return whether a preemption at this engine cannot change the response, given the engine's defaults."""
        unaffected = worker.capabilities.own_defaults is False or not self.unset
        unaffected = unaffected or (worker.kind == "vllm" and self.unset <= SPLIT_INVARIANT_IN_VLLM)
        return unaffected and self.can_resume_at(worker)

    def is_tracked_at(self, worker: EngineWorker) -> bool:
        """Return whether the gateway reads token ids from this engine, so that another one can continue."""
        return self.can_resume_at(worker) if self.options.stream else self.can_preempt_at(worker)

    def for_continuation(self) -> ResumePlan:
        """Return the plan with only those fields that a continuation needs."""
        needed = FORWARDED_FIELDS | {"model", "min_tokens"}
        return replace(self, fields={name: value for name, value in self.fields.items() if name in needed})


def resume_plan(client_request: ClientRequest, can_resume: bool, *, window_tokens: int, preempts: bool) -> ResumePlan:
    """Return whether and how the request can be resumed after a preemption or a failure.

    ``can_resume`` states whether any engine returns and accepts token ids; if not, every request passes unchanged, as
    do all requests of routes whose output no other request can continue.
    ``preempts`` states whether the scheduler preempts requests; if not, requests without streaming pass unchanged.
    A request without streaming whose output is limited to ``window_tokens`` tokens restarts instead of resuming.
    """
    api, stream, max_tokens = client_request.api, client_request.stream, client_request.max_tokens
    if not (can_resume and APIS[api].continues and (stream or preempts)):
        return ResumePlan(ResponseOptions(api, stream, usage=False, usage_each=False, ids=False))
    if max_tokens is None and api != CHAT:
        max_tokens = COMPLETIONS_MAX_TOKENS
    fields = client_request.fields()
    conflict = resume_conflict(fields)
    if not stream and max_tokens is not None and max_tokens <= window_tokens:
        conflict = "max_tokens: so short an output is restarted"
    wanted = given if isinstance(given := fields.get("stream_options"), dict) else {}
    usage, usage_each = bool(wanted.get("include_usage")), bool(wanted.get("continuous_usage_stats"))
    options = ResponseOptions(api, stream, usage, usage_each, ids=bool(fields.get("return_token_ids")))
    return ResumePlan(options, fields, conflict, max_tokens, fields_left_to_defaults(fields))


_STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def insert_fields(body: bytes, fields: Fields) -> bytes:
    """Insert new fields at the start of a JSON object, without parsing it."""
    if not fields:
        return body
    start = body.index(b"{") + 1
    comma = b"" if body[start:].lstrip().startswith(b"}") else b","
    return body[:start] + msgspec.json.encode(fields)[1:-1] + comma + body[start:]


def merge_fields(body: bytes, fields: Fields) -> bytes:
    """Set fields of a JSON object, and merge nested objects. The body is parsed only if it may contain such a field."""
    if b"\\u" in body or any(b'"%b"' % name.encode() in body for name in fields):
        own = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        if not own.keys().isdisjoint(fields):
            merged: dict[str, Any] = {**own, **fields}
            for name, value in fields.items():
                if isinstance(value, dict) and name in own and isinstance(old := msgspec.json.decode(own[name]), dict):
                    merged[name] = {**old, **value}
            return msgspec.json.encode(merged)
    return insert_fields(body, fields)


def given_field(client_request: ClientRequest, name: str) -> Any:
    """Return a field of the body, or None. The body is parsed only if it may contain the field."""
    body = client_request.body
    return client_request.fields().get(name) if name.encode() in body or b"\\u" in body else None


def stream_options(client_request: ClientRequest) -> dict[str, Any] | None:
    """Return the options of a stream that the client states, or None if it states something invalid.

    Also return None for routes that have no such options.
    """
    if APIS[client_request.api].events != CHUNKS:
        return None
    given = given_field(client_request, "stream_options")
    return {} if given is None else given if isinstance(given, dict) else None


def start_body(client_request: ClientRequest, plan: ResumePlan, worker: EngineWorker) -> bytes:
    """Return the body of an attempt that starts the output.

    If the response will be tracked, the body requests token ids and a stream. Otherwise, if the request is metered, it
    requests the usage, because events of a stream do not show their number of tokens.
    """
    if not plan.is_tracked_at(worker):
        if plan.metered and client_request.stream and stream_options(client_request) is not None:
            each = {"continuous_usage_stats": True} if worker.kind == "vllm" else {}
            return merge_fields(client_request.body, {"stream_options": {"include_usage": True, **each}})
        return client_request.body
    ids = {} if plan.options.ids else {"return_token_ids": True}
    if client_request.stream and "return_token_ids" not in plan.fields:
        return insert_fields(client_request.body, ids)
    return msgspec.json.encode({**plan.fields, **ids, **({} if client_request.stream else _STREAM)})


def continuation_body(
    plan: ResumePlan, response: responses.TrackedStream, worker: EngineWorker, num_tokens: int
) -> bytes | None:
    """Return the body of a request that continues the output after ``num_tokens``, or None at the output's limit.

    Raises UpstreamError if this engine cannot continue the output.
    """
    if num_tokens < response.flushed_tokens and response.partial_ids_sent:
        detail = "the client has received token ids of half a character"
        raise UpstreamError("cannot go on", detail, engine_fault=False, code="ids_ahead")
    max_tokens, max_model_len = plan.max_tokens, worker.capabilities.max_model_len
    if max_tokens is None and max_model_len is not None:
        max_tokens = max_model_len - (response.prompt_ids.count(b",") + 1)
    if max_tokens is None or not plan.can_resume_at(worker):
        raise UpstreamError("cannot go on", "this engine returns no token ids", engine_fault=False)
    ids = response.start_attempt(num_tokens)
    if max_tokens <= num_tokens:
        return None
    return continuation(plan.fields, response.prompt_ids, ids, num_tokens, max_tokens - num_tokens)


def continuation(fields: Fields, prompt_ids: bytes, ids: bytes, generated: int, remaining: int) -> bytes:
    """Return a body that continues an output by ``/v1/completions``. The ids are JSON lists without brackets."""
    own = {name: value for name, value in fields.items() if name in FORWARDED_FIELDS and value not in (None, [], "")}
    own.pop("logprobs", None)
    min_tokens = int(fields.get("min_tokens") or 0) - generated
    if min_tokens > 0:
        own["min_tokens"] = min_tokens
    own |= {"model": fields["model"], "max_tokens": remaining, "return_token_ids": True, **_STREAM}
    prompt = prompt_ids + b"," + ids if ids else prompt_ids
    return b'{"prompt":[' + prompt + b"]," + msgspec.json.encode(own)[1:]


def new_response(
    client_request: ClientRequest, plan: ResumePlan, worker: EngineWorker, content_type: str, max_bytes: int
) -> responses.ResponseReader:
    """Return a reader for the response. ``max_bytes`` limits the size of a buffered or assembled response."""
    events = APIS[client_request.api].events
    if not content_type.startswith("text/event-stream"):
        # Log-probabilities and several outputs may make a response too long, which is no fault of the engine.
        engine_fault = client_request.choices == 1 and b'logprobs"' not in client_request.body
        return responses.BufferedResponse(max_bytes, engine_fault=engine_fault, events=events)
    if events != CHUNKS:
        return responses.NamedEventStream(has_end=events == NAMED)
    if not plan.is_tracked_at(worker):
        wanted = stream_options(client_request) if plan.metered and client_request.stream else None
        if wanted is None:
            return responses.UntrackedStream(client_request.choices)
        usage, interval = bool(wanted.get("include_usage")), given_field(client_request, "stream_interval")
        return responses.UntrackedStream(
            client_request.choices,
            hide_usage=not usage,
            hide_usage_each=not (usage and wanted.get("continuous_usage_stats")),
            event_tokens=max(1, interval) if type(interval) is int else 1,
        )
    prompt_bytes = len(client_request.body)
    if client_request.stream:
        return responses.TrackedStream(plan.options, prompt_bytes)
    return responses.AssembledResponse(plan.options, max_bytes, prompt_bytes)


_MAX_ERROR_BYTES = 1 << 16


class EngineRejectedError(Exception):
    """The engine rejects the request with a 4xx, or its model lacks the route (501). Clients get its response."""

    def __init__(self, status: int, body: bytes, content_type: str) -> None:
        super().__init__(f"http {status}")
        self.status, self.body, self.content_type = status, body, content_type


ABOUT_KEY = (401, 403, 407)  # statuses about the gateway's own key, which are no fault of a client


def is_engine_fault(status: int) -> bool:
    """Return whether a status is the engine's fault. 501 is not: the model lacks the route."""
    return status in ABOUT_KEY or (status >= 500 and status != 501)


async def require_success(
    attempt: Attempt, connection: UpstreamConnection, *, resumed: bool, listed_model: str
) -> None:
    """Raise QueueFullError, EngineRejectedError or UpstreamError unless the engine answers with 200.

    ``resumed`` states whether this attempt continues the output of an earlier one. ``listed_model`` is the request's
    model if the engine lists it, otherwise "". A 404 that names a listed model is the engine's fault.
    """
    status = connection.status
    if status == 200:
        return
    body = await read_up_to(_MAX_ERROR_BYTES, attempt.read)
    detail = body[:300].decode("utf-8", "replace")
    if status in (503, 429):
        retry_after_s = 0.0
        with contextlib.suppress(ValueError):
            retry_after_s = min(60.0, max(0.0, float(connection.headers.get("retry-after", ""))))
        raise QueueFullError(status, detail, retry_after_s)
    if status in ABOUT_KEY:  # not for the eyes of a client
        detail = "the engine refuses the gateway's key"
    engine_fault = is_engine_fault(status)
    if status == 404 and listed_model:
        engine_fault = listed_model.encode() in body and b"model" in body.lower()
    if (400 <= status < 500 or status == 501) and not resumed and not engine_fault:
        raise EngineRejectedError(status, body, connection.headers.get("content-type", "application/json"))
    raise UpstreamError(f"http {status}", detail, status=status, engine_fault=engine_fault)


MAX_PRIORITY = (1 << 31) - 1
_LEVELS = np.arange(0.5, 64) / 64
_MAX_HINTED_LENGTHS = 8  # hinted lengths of outputs that do not end within 1, 2, 4, ..., 128 further windows of tokens
_QUANTILES = {"median": 0.5, "p80": 0.8, "p90": 0.9}


class SchedulingHints:
    """Adds fields by which an engine orders requests, in modes engine-priority and engine-plugin."""

    def __init__(self, config: GatewayConfig, engine_priority: Callable[[Request], int]) -> None:
        self._mode, self._window = config.order.mode, config.order.window_tokens
        self._level = _QUANTILES.get(config.prediction.statistic)
        self._priority = engine_priority

    def add_to(self, request: Request, worker: Any, body: bytes, api: str, headers: list[tuple[str, str]]) -> bytes:
        """Return the body with the hints for this worker, which replace the client's fields of the same name.

        With Anthropic's route, whose bodies have no priority, vLLM reads it from a header, which joins ``headers``.
        """
        fields = self.fields(request, worker) if APIS[api].generates else {}
        if APIS[api].is_anthropic and "priority" in fields:
            headers.append(("X-Vllm-Priority", str(fields.pop("priority"))))
        return merge_fields(body, fields) if fields else body

    def fields(self, request: Request, worker: Any) -> dict[str, Any]:
        """Return the hints for this worker, or {} if there are none."""
        if self._mode == "engine-priority" and worker.priority_sign:
            value = worker.priority_sign * self._priority(request)
            return {"priority": max(-MAX_PRIORITY, min(MAX_PRIORITY, value))}
        if self._mode != "engine-plugin" or worker.kind != "vllm":
            return {}
        # For the engine, tokens generated so far are a part of the prompt, so lengths do not include them.
        so_far, prediction = request.generated_tokens, request.length_prediction
        hints: dict[str, Any] = {
            PREDICTED: round(min(prediction.remaining_tokens(so_far), float(request.max_tokens)), 1),
            CLASS: max(-MAX_CLASS, min(MAX_CLASS, request.client.priority)),
        }
        later: list[float] = []
        lengths = np.empty(0) if prediction.quantiles is None else np.interp(_LEVELS, LEVELS, prediction.quantiles)
        for doubling in range(_MAX_HINTED_LENGTHS):
            at = self._window << doubling
            longer = lengths[lengths > so_far + at]
            if not len(longer) or so_far + at >= request.max_tokens:
                break
            length = longer.mean() if self._level is None else longer[int(self._level * len(longer))]
            later += [at, round(float(length) - so_far, 1)]
        return {"vllm_xargs": hints | ({LATER: later} if later else {})}
