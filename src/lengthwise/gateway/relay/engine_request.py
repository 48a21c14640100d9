"""What a worker is sent of a request, and what kind of answer is read from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from lengthwise.backend.openai_protocol import CHAT
from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.plugin.settings import CLASS, LATER, MAX_CLASS, PREDICTED
from lengthwise.gateway.protocols import ClientRequest, Fleet, Worker
from lengthwise.gateway.relay.failures import TOLD_INSIDE, Full, Trouble
from lengthwise.gateway.relay.responses import Assembled, BufferedResponse, Plain, Tracked
from lengthwise.gateway.relay.sse import DONE, Wants
from lengthwise.gateway.relay.upstream import Call, full
from lengthwise.gateway.request import Floats, Request
from lengthwise.gateway.scheduler_driver import GONE
from lengthwise.predict.distribution import LEVELS

Fields = Mapping[str, Any]

FORWARDED_FIELDS = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "ignore_eos", "stop_token_ids", "skip_special_tokens",
        "spaces_between_special_tokens", "logit_bias", "allowed_token_ids", "priority", "cache_salt", "user",
        "vllm_xargs", "seed", "stop", "logprobs", "n", "best_of", "stream_interval",
    }
)  # fmt: skip
"""What goes on as it is: it holds of the next token alone (or was found to say nothing)."""
READ = frozenset(
    {
        "model", "prompt", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens",
        "min_tokens", "return_token_ids",
    }
)  # fmt: skip
"""What is told anew."""
OF_THE_PROMPT = frozenset(
    {
        "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs",
        "add_special_tokens", "documents", "metadata", "store", "service_tier", "safety_identifier",
        "prompt_cache_key", "request_id", "parallel_tool_calls", "include_reasoning",
    }
)  # fmt: skip
"""What is in the prompt's token ids already, or is nothing to the engine."""


def _penalty(neutral: float) -> Callable[[Any], bool]:
    return lambda value: value is None or value == neutral


def _empty(value: Any) -> bool:
    return not value


def _no_logprobs(value: Any) -> bool:
    return value is None or value is False


def _one(value: Any) -> bool:
    return value is None or value == 1


def _plain_format(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping) and value.get("type") == "text")


RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "presence_penalty": (_penalty(0), "it counts the tokens that are output, not prompt"),
    "frequency_penalty": (_penalty(0), "it counts the tokens that are output, not prompt"),
    "repetition_penalty": (_penalty(1), "engines differ in whether it counts the prompt"),
    "length_penalty": (_one, "it belongs to beam search"),
    "use_beam_search": (_empty, "beams end with the run"),
    "n": (_one, "several outputs share a run"),
    "best_of": (_one, "several outputs share a run"),
    "stop": (_empty, "a stop string may begin before the cut and end behind it"),
    "include_stop_str_in_output": (_empty, "a stop string may begin before the cut and end behind it"),
    "bad_words": (_empty, "a word may begin before the cut and end behind it"),
    "logprobs": (_no_logprobs, "offsets begin anew"),
    "top_logprobs": (_empty, "offsets begin anew"),
    "prompt_logprobs": (_no_logprobs, "the prompt is not the same"),
    "echo": (_empty, "the prompt is not the same"),
    "suffix": (_empty, "the model sees what comes behind"),
    "response_format": (_plain_format, "the state of a grammar is lost"),
    "structured_outputs": (_empty, "the state of a grammar is lost"),
    "guided_json": (_empty, "the state of a grammar is lost"),
    "guided_regex": (_empty, "the state of a grammar is lost"),
    "guided_choice": (_empty, "the state of a grammar is lost"),
    "guided_grammar": (_empty, "the state of a grammar is lost"),
    "tools": (_empty, "the parser of tool calls reads one run"),
    "tool_choice": (lambda value: value in (None, "none"), "the parser of tool calls reads one run"),
    "functions": (_empty, "the parser of tool calls reads one run"),
    "function_call": (_empty, "the parser of tool calls reads one run"),
    "modalities": (lambda value: value in (None, ["text"]), "only text is continued"),
    "audio": (_empty, "only text is continued"),
    "mm_processor_kwargs": (_empty, "only text is continued"),
    "prompt_embeds": (_empty, "only tokens are continued"),
    "truncate_prompt_tokens": (_empty, "it would cut the tokens so far"),
    "return_tokens_as_token_ids": (_empty, "it comes with logprobs"),
    "detokenize": (lambda value: value in (None, True), "without text nobody knows what was sent"),
}


def obstacle(fields: Fields) -> str | None:
    """Why a cut could change the answer to these fields; None where it cannot."""
    for name, value in fields.items():
        rule = RULES.get(name)
        if rule is not None:
            if not rule[0](value):
                return f"{name}: {rule[1]}"
        elif name not in FORWARDED_FIELDS and name not in READ and name not in OF_THE_PROMPT and value is not None:
            return f"{name}: nobody knows what a cut does to it"
    if fields.get("seed") is not None and fields.get("temperature") != 0:
        return "seed: the engine's random numbers begin anew"
    return _of_prompt(fields)


OPEN = ("presence_penalty", "frequency_penalty", "repetition_penalty")
SAME_IN_VLLM = frozenset({"repetition_penalty"})
"""It counts prompt and output there: where one ends and the other begins makes no difference."""


def left_open(fields: Fields) -> frozenset[str]:
    """What an engine might fill in that a cut would change: the request does not say it."""
    found = {name for name in OPEN if fields.get(name) is None}
    if fields.get("max_tokens") is None and fields.get("max_completion_tokens") is None:
        found.add("max_tokens")
    return frozenset(found)


def _of_prompt(fields: Fields) -> str | None:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and (not prompt or not all(type(one) is int for one in prompt)):
        return "prompt: several prompts share a request"
    messages = fields.get("messages") or ()
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list) and not all(_is_text(part) for part in content):
            return "messages: only text is continued"
    return None


def _is_text(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, Mapping) and part.get("type") == "text")


COMPLETIONS_MAX_TOKENS = 16
"""OpenAI's default of /v1/completions; chat has none."""
_CONTINUED = ("model", "min_tokens")


@dataclass(frozen=True, slots=True)
class Plan:
    """A request, read as far as resuming needs it.

    Attributes:
        wants: What the client asked to see.
        fields: Of the body; {} where nobody has to know them.
        obstacle: Why a cut could change the answer; None: it cannot.
        max_tokens: The longest output asked for; None: as the engine likes.
        open: What an engine might fill in that a cut would change.
    """

    wants: Wants
    fields: dict[str, Any] = field(default_factory=dict)
    obstacle: str | None = "nobody has to know"
    max_tokens: int | None = None
    open: frozenset[str] = frozenset(OPEN)

    def goes_on_at(self, worker: Worker) -> bool:
        """Whether this engine takes and tells token ids, so that what was begun can go on there and elsewhere."""
        able = worker.capabilities
        return self.obstacle is None and able.ids_each and able.token_ids

    def cut_at(self, worker: Worker) -> bool:
        """Whether a cut at this engine leaves the answer as it is, its own defaults included."""
        if worker.capabilities.own_defaults is False or not self.open:
            return self.goes_on_at(worker)
        return worker.kind == "vllm" and self.open <= SAME_IN_VLLM and self.goes_on_at(worker)

    def tracked_at(self, worker: Worker) -> bool:
        """Whether its token ids are read there: it may be cut, or is a stream that may have to fail over."""
        return self.goes_on_at(worker) if self.wants.stream else self.cut_at(worker)

    def going_on(self) -> Plan:
        """What is left of it once nothing is sent but continuations: all fields but these are the prompt's."""
        kept = {name: self.fields[name] for name in self.fields if name in FORWARDED_FIELDS or name in _CONTINUED}
        return replace(self, fields=kept)

    def longest(self, worker: Worker, prompt_tokens: int) -> int | None:
        """How long the output may become there; None: nobody knows."""
        if self.max_tokens is not None:
            return self.max_tokens
        length = worker.capabilities.max_model_len
        return None if length is None else length - prompt_tokens


def plan(client_request: ClientRequest, *, resumes: bool, window_tokens: int, cuts: bool) -> Plan:
    """What can be done with a request.

    Args:
        client_request: By the client.
        resumes: Whether any engine tells token ids.
        window_tokens: An output that is not streamed and not longer is simply done again.
        cuts: Whether requests are cut at all: who is not streamed is else passed on untouched.
    """
    if not resumes or not (client_request.stream or cuts):
        return Plan(Wants(client_request.api, client_request.stream, usage=False, usage_each=False, ids=False))
    longest = client_request.max_tokens
    if longest is None and client_request.api != CHAT:
        longest = COMPLETIONS_MAX_TOKENS
    fields = client_request.fields()
    against = obstacle(fields)
    if not client_request.stream and longest is not None and longest <= window_tokens:
        against = "short: it is done again instead"
    return Plan(
        Wants.of(client_request.api, client_request.stream, fields), fields, against, longest, left_open(fields)
    )


STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def spliced(body: bytes, fields: Mapping[str, Any]) -> bytes:
    """The body of an object with further fields before its own, which must not be there yet."""
    import msgspec

    if not fields:
        return body
    start = body.index(b"{") + 1
    added = msgspec.json.encode(fields)[1:-1]
    comma = b"" if body[start:].lstrip().startswith(b"}") else b","
    return body[:start] + added + comma + body[start:]


def replaced(fields: Mapping[str, Any], new: Mapping[str, Any]) -> bytes:
    """The body of the fields with some replaced."""
    import msgspec

    return msgspec.json.encode({**fields, **new})


def continuation(fields: Mapping[str, Any], prompt_ids: bytes, ids: bytes, generated: int, remaining: int) -> bytes:
    """What asks ``/v1/completions`` to go on.

    Args:
        fields: Of the request as it came.
        prompt_ids: Token ids of its prompt, as they stand in JSON, without brackets.
        ids: Those of the output so far, likewise.
        generated: How many these are.
        remaining: How many more there may be.
    """
    import msgspec

    told = {name: value for name, value in fields.items() if name in FORWARDED_FIELDS and value not in (None, [], "")}
    told.pop("logprobs", None)
    least = int(fields.get("min_tokens") or 0) - generated
    if least > 0:
        told["min_tokens"] = least
    told |= {"model": fields["model"], "max_tokens": remaining, "return_token_ids": True, **STREAM}
    prompt = prompt_ids + b"," + ids if ids else prompt_ids
    return b'{"prompt":[' + prompt + b"]," + msgspec.json.encode(told)[1:]


State = Plain | BufferedResponse | Tracked
_OF_ENGINES = (401, 403, 407)
"""It is the gateway's key that an engine refuses: no client is at fault, and another engine may take the request."""
_LOGPROBS = b'logprobs"'
"""Who asks for these, or for several outputs, makes answers long; no engine is at fault then."""
CUT_PATIENCE = 16
"""Pieces for which a cut waits until no token is ahead of its text."""


class Rejected(Exception):  # noqa: N818 - the engine's answer, passed on
    """The engine says that the request is wrong."""

    def __init__(self, status: int, body: bytes, kind: str) -> None:
        super().__init__(f"http {status}")
        self.status, self.body, self.kind = status, body, kind


def first_body(client_request: ClientRequest, plan: Plan, worker: Worker) -> bytes:
    """The body as it came; where the answer is to be tracked, with token ids (and a stream) asked for."""
    if not plan.tracked_at(worker):
        return client_request.body
    ids = {} if plan.wants.ids else {"return_token_ids": True}
    if not client_request.stream:
        return replaced(plan.fields, {**ids, **STREAM})
    if "return_token_ids" in plan.fields:
        return replaced(plan.fields, ids)
    return spliced(client_request.body, ids)


def first_path(client_request: ClientRequest) -> str:
    """Where a request goes."""
    return "/v1/chat/completions" if client_request.api == CHAT else "/v1/completions"


def next_body(plan: Plan, state: Tracked, worker: Worker, retained: int) -> bytes | None:
    """What goes on behind ``retained`` tokens; None: it has all the tokens that it may have.

    Raises:
        Trouble: This worker cannot, or nobody can.
    """
    if retained < state.retained and state.ids_ahead:
        words = "the client was told token ids of half a character"
        raise Trouble("cannot go on", words, engine=False, code="ids_ahead")
    longest = plan.longest(worker, state.prompt_ids.count(b",") + 1)
    if longest is None or not plan.goes_on_at(worker):
        raise Trouble("cannot go on", "this engine tells no token ids", engine=False)
    ids = state.next_leg(retained)
    if longest <= retained:
        return None
    return continuation(plan.fields, state.prompt_ids, ids, retained, longest - retained)


def leg_headers(client_request: ClientRequest, leg: int) -> list[tuple[str, str]]:
    """What goes with a request when it is sent for the ``leg``-th time: no engine meets one id twice."""
    if leg < 2:
        return client_request.headers
    return [(name, f"{value}-{leg}" if name == "X-Request-Id" else value) for name, value in client_request.headers]


def new_state(client_request: ClientRequest, plan: Plan, worker: Worker, kind: str, max_bytes: int) -> State:
    """How the answer is read; ``max_bytes`` are held of one that does not come in events, or does not go on so."""
    if not kind.startswith("text/event-stream"):
        return BufferedResponse(max_bytes, short=client_request.n == 1 and _LOGPROBS not in client_request.body)
    if plan.tracked_at(worker):
        size = len(client_request.body)
        return Tracked(plan.wants, size) if client_request.stream else Assembled(plan.wants, max_bytes, size)
    return Plain(client_request.n)


def _denies(entries: str, body: bytes) -> bool:
    """Whether a 404 is about the model that it lists (and not about the path, say)."""
    return bool(entries) and entries.encode() in body and b"model" in body.lower()


def worker_of(fleet: Fleet, name: str) -> Worker:
    """The engine of this name; raises Trouble where it is gone."""
    try:
        return fleet.worker(name)
    except KeyError:
        raise Trouble(GONE, engine=False) from None


def rest(state: State | Assembled | None) -> bytes | None:
    """What the client still has to be told of an output that has ended; None: it has not."""
    if isinstance(state, Tracked) and state.complete:
        return state.closed()
    if isinstance(state, Plain) and state.complete and state.trouble is None:
        return DONE
    return None


def can_go_on(state: State | None) -> bool:
    """Whether another engine can go on behind what is out."""
    if not isinstance(state, Tracked) or not state.resumable or not state.prompt_ids:
        return False
    return state.sent or state.retained > 0


def blocked(state: State | None) -> bool:
    """Whether the client has a part of an answer that nobody else can go on with."""
    return state is not None and state.sent and not can_go_on(state)


def movable(state: State | None) -> Tracked | None:
    """The state, where a cut now loses nothing that is out; else None."""
    return state if isinstance(state, Tracked) and state.resumable and not blocked(state) else None


def leaves(state: Tracked, num_waiting: int) -> bool | None:
    """Whether a cut that has waited for so many pieces is made now; None: it is to be dropped."""
    if state.level or num_waiting <= CUT_PATIENCE:
        return state.level
    return None if state.ids_ahead else True


_FULL = re.compile(r'"code":\s?"?(?:503|429)\b')


async def require_200(call: Call, *, going_on: bool, entries: str = "") -> None:
    """Returns if the engine answers.

    Args:
        call: Its request has been sent.
        going_on: Whether the request is one that goes on.
        entries: The model, where the engine lists it: that it does not know it is then no fault of the client's.

    Raises:
        Full: It takes no more now.
        Rejected: The request is wrong (of one that goes on, it was right before).
        Trouble: It failed.
    """
    status = call.status
    if status == 200:
        return
    body = await call.rest()
    if status in (503, 429):
        raise full(call.headers)
    its_own = status >= 500 or status in _OF_ENGINES or (status == 404 and _denies(entries, body))
    if 400 <= status < 500 and not going_on and not its_own:
        raise Rejected(status, body, call.headers.get("content-type", "application/json"))
    raise Trouble(f"http {status}", body[:300].decode("utf-8", "replace"), status=status, engine=its_own)


def ended(state: State | Assembled) -> bytes:
    """What is left when the engine has closed; a state that is not at its end then is in trouble, never in between."""
    rest = state.end()
    if not state.complete and state.trouble is None:
        state.trouble = Trouble("closed early", "the stream ended without its end")
    return rest


def told_inside(trouble: Trouble, *, started: bool) -> Trouble | Full:
    """What an error within a stream comes to: vLLM says 200 and then that its queue is full, which is no failure."""
    is_full = trouble.reason == TOLD_INSIDE and _FULL.search(str(trouble)) is not None
    return Full() if is_full and not started else trouble


PRIORITY, XARGS = "priority", "vllm_xargs"
MOST_PRIORITY = (1 << 31) - 1
_POINTS = np.arange(0.5, 64) / 64
_LOOKS = 8
"""Lengths are told for 1, 2, 4, ... windows of tokens, so many at most."""
_QUANTILES = {"median": 0.5, "p80": 0.8, "p90": 0.9}


class HintedWorker(Protocol):
    """An engine (``fleet.Worker``)."""

    @property
    def kind(self) -> str:
        """Whose engine it is."""
        ...

    @property
    def priority_sign(self) -> int:
        """1: smaller priorities go first there, -1: larger, 0: it takes none."""
        ...


Hinted = Callable[[Request, Any, bytes], bytes]


class Hints:
    """Fields beside a request's own.

    Args:
        config: Its mode says what is told; modes in which the gateway orders tell nothing.
        engine_priority: Class and predicted length as one number, smaller = earlier.
    """

    def __init__(self, config: GatewayConfig, engine_priority: Callable[[Request], int]) -> None:
        self._mode, self._statistic = config.order.mode, config.prediction.statistic
        self._window, self._priority = config.order.window_tokens, engine_priority

    def fields(self, request: Request, worker: HintedWorker) -> dict[str, Any]:
        """What this engine is told of the request; {} nothing."""
        if self._mode == "engine-priority" and worker.priority_sign:
            value = worker.priority_sign * self._priority(request)
            return {PRIORITY: max(-MOST_PRIORITY, min(MOST_PRIORITY, value))}
        if self._mode == "engine-plugin" and worker.kind == "vllm":
            return {XARGS: self._lengths(request)}
        return {}

    def hinted(self, request: Request, worker: HintedWorker, body: bytes) -> bytes:
        """The body with these fields; in no mode does a client's own stand against them."""
        fields = self.fields(request, worker)
        return with_fields(body, fields) if fields else body

    def _lengths(self, request: Request) -> dict[str, Any]:
        """Of the output that is still to come: what has been generated is a part of the engine's prompt."""
        so_far = request.generated_tokens
        told: dict[str, Any] = {
            PREDICTED: round(min(request.length_prediction.remaining_tokens(so_far), float(request.max_tokens)), 1),
            CLASS: max(-MAX_CLASS, min(MAX_CLASS, request.priority)),
        }
        row = request.length_prediction.quantiles
        later = [] if row is None else self._later(row, so_far, request.max_tokens)
        return told | {LATER: later} if later else told

    def _later(self, row: Floats, so_far: int, max_tokens: int) -> list[float]:
        """[2 k] after so many tokens of this run, the length that is then predicted, in turns."""
        lengths = np.interp(_POINTS, LEVELS, row)
        found: list[float] = []
        for look in range(_LOOKS):
            at = self._window << look
            left = lengths[lengths > so_far + at]
            if not len(left) or so_far + at >= max_tokens:
                break
            found += [at, round(self._one(left) - so_far, 1)]
        return found

    def _one(self, lengths: Floats) -> float:
        level = _QUANTILES.get(self._statistic)
        return float(lengths.mean() if level is None else lengths[int(level * len(lengths))])


def hinted_for(config: GatewayConfig, engine_priority: Callable[[Request], int]) -> Hinted | None:
    """What the relay adds to bodies; None: nothing, in modes in which the gateway orders."""
    if config.order.mode not in ("engine-priority", "engine-plugin"):
        return None
    return Hints(config, engine_priority).hinted


def with_fields(body: bytes, fields: dict[str, Any]) -> bytes:
    """The body of an object with these fields; tables of the same name are merged, other values replaced.

    Only where one of the names may be there already is more than the first byte looked at: it stands there as
    it is, or spelt with escapes.
    """
    import msgspec

    if b"\\u" in body or any(b'"%b"' % name.encode() in body for name in fields):
        told = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        if not told.keys().isdisjoint(fields):
            return msgspec.json.encode({**told, **{name: _merged(told.get(name), of) for name, of in fields.items()}})
    start = body.index(b"{") + 1
    comma = b"" if body[start:].lstrip(b" \t\r\n").startswith(b"}") else b","
    return body[:start] + msgspec.json.encode(fields)[1:-1] + comma + body[start:]


def _merged(other: Any, own: Any) -> Any:
    import msgspec

    if other is None or not isinstance(own, dict):
        return own
    told = msgspec.json.decode(other)
    return {**told, **own} if isinstance(told, dict) else own
