"""What a worker is sent of a request, and what kind of answer is read from it."""

from __future__ import annotations

import re

from lengthwise.backend.openai import CHAT
from lengthwise.gateway.hub import GONE
from lengthwise.gateway.relay import _body
from lengthwise.gateway.relay._assembled import Assembled
from lengthwise.gateway.relay._dress import DONE
from lengthwise.gateway.relay._plain import Plain, Whole
from lengthwise.gateway.relay._plan import Plan
from lengthwise.gateway.relay._seams import Asked, Fleet, Worker
from lengthwise.gateway.relay._tracked import Tracked
from lengthwise.gateway.relay._trouble import TOLD_INSIDE, Full, Trouble
from lengthwise.gateway.relay._upstream import Call, full

State = Plain | Whole | Tracked
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


def first_body(asked: Asked, plan: Plan, worker: Worker) -> bytes:
    """The body as it came; where the answer is to be tracked, with token ids (and a stream) asked for."""
    if not plan.tracked_at(worker):
        return asked.body
    ids = {} if plan.wants.ids else {"return_token_ids": True}
    if not asked.stream:
        return _body.replaced(plan.fields, {**ids, **_body.STREAM})
    if "return_token_ids" in plan.fields:
        return _body.replaced(plan.fields, ids)
    return _body.spliced(asked.body, ids)


def first_path(asked: Asked) -> str:
    """Where a request goes."""
    return "/v1/chat/completions" if asked.api == CHAT else "/v1/completions"


def next_body(plan: Plan, state: Tracked, worker: Worker, kept: int) -> bytes | None:
    """What goes on behind ``kept`` tokens; None: it has all the tokens that it may have.

    Raises:
        Trouble: This worker cannot, or nobody can.
    """
    if kept < state.kept and state.ids_ahead:
        words = "the client was told token ids of half a character"
        raise Trouble("cannot go on", words, engine=False, code="ids_ahead")
    longest = plan.longest(worker, state.prompt_ids.count(b",") + 1)
    if longest is None or not plan.goes_on_at(worker):
        raise Trouble("cannot go on", "this engine tells no token ids", engine=False)
    ids = state.next_leg(kept)
    if longest <= kept:
        return None
    return _body.continuation(plan.fields, state.prompt_ids, ids, kept, longest - kept)


def leg_headers(asked: Asked, leg: int) -> list[tuple[str, str]]:
    """What goes with a request when it is sent for the ``leg``-th time: no engine meets one id twice."""
    if leg < 2:
        return asked.headers
    return [(name, f"{value}-{leg}" if name == "X-Request-Id" else value) for name, value in asked.headers]


def new_state(asked: Asked, plan: Plan, worker: Worker, kind: str, most_bytes: int) -> State:
    """How the answer is read; ``most_bytes`` are held of one that does not come in events, or does not go on so."""
    if not kind.startswith("text/event-stream"):
        return Whole(most_bytes, short=asked.n == 1 and _LOGPROBS not in asked.body)
    if plan.tracked_at(worker):
        size = len(asked.body)
        return Tracked(plan.wants, size) if asked.stream else Assembled(plan.wants, most_bytes, size)
    return Plain(asked.n)


def _denies(listed: str, body: bytes) -> bool:
    """Whether a 404 is about the model that it lists (and not about the path, say)."""
    return bool(listed) and listed.encode() in body and b"model" in body.lower()


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
    return state.sent or state.kept > 0


def stuck(state: State | None) -> bool:
    """Whether the client has a part of an answer that nobody else can go on with."""
    return state is not None and state.sent and not can_go_on(state)


def movable(state: State | None) -> Tracked | None:
    """The state, where a cut now loses nothing that is out; else None."""
    return state if isinstance(state, Tracked) and state.resumable and not stuck(state) else None


def leaves(state: Tracked, waited: int) -> bool | None:
    """Whether a cut that has waited for so many pieces is made now; None: it is to be dropped."""
    if state.level or waited <= CUT_PATIENCE:
        return state.level
    return None if state.ids_ahead else True


_FULL = re.compile(r'"code":\s?"?(?:503|429)\b')


async def require_200(call: Call, *, going_on: bool, listed: str = "") -> None:
    """Returns if the engine answers.

    Args:
        call: Its request has been sent.
        going_on: Whether the request is one that goes on.
        listed: The model, where the engine lists it: that it does not know it is then no fault of the client's.

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
    its_own = status >= 500 or status in _OF_ENGINES or (status == 404 and _denies(listed, body))
    if 400 <= status < 500 and not going_on and not its_own:
        raise Rejected(status, body, call.headers.get("content-type", "application/json"))
    raise Trouble(f"http {status}", body[:300].decode("utf-8", "replace"), status=status, engine=its_own)


def ended(state: State | Assembled) -> bytes:
    """What is left when the engine has closed; a state that is not at its end then is in trouble, never in between."""
    rest = state.end()
    if not state.complete and state.trouble is None:
        state.trouble = Trouble("closed early", "the stream ended without its end")
    return rest


def told_inside(trouble: Trouble, *, begun: bool) -> Trouble | Full:
    """What an error within a stream comes to: vLLM says 200 and then that its queue is full, which is no failure."""
    is_full = trouble.reason == TOLD_INSIDE and _FULL.search(str(trouble)) is not None
    return Full() if is_full and not begun else trouble
