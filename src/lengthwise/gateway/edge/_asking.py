"""From a body and headers to what is asked for."""

from __future__ import annotations

from lengthwise.gateway.config import Limits
from lengthwise.gateway.edge import _headers
from lengthwise.gateway.edge._bodies import CHATS, PROMPTS, Chat, Completion, decoded
from lengthwise.gateway.edge._bounds import check_chat, check_completion
from lengthwise.gateway.edge._depth import Shape, beyond
from lengthwise.gateway.edge._held import held_bytes
from lengthwise.gateway.edge._prompts import chat_text, leading_of, prompt_of, tokens_of
from lengthwise.gateway.edge._twice import check_once
from lengthwise.gateway.edge.asked import CHAT, Asked
from lengthwise.gateway.edge.faults import bad
from lengthwise.gateway.edge.keys import Caller
from lengthwise.gateway.leading import NOTHING, Prints


def asked(
    api: str,
    body: bytes,
    limits: Limits,
    caller: Caller,
    headers: dict[bytes, bytes],
    request_id: str,
    now_s: float,
    prints: Prints | None = None,
    of_tenant: bool = True,
) -> Asked:
    """What is asked for; raises a Fault where the body cannot be used or asks for too much.

    Args:
        api: CHAT or COMPLETIONS.
        body: As it came.
        limits: What may be asked for.
        caller: Who asks.
        headers: As they came, by name in lower case.
        request_id: What the request is called.
        now_s: When the body had come.
        prints: Of beginnings of prompts; None: they are not compared.
        of_tenant: Whether only with those of the same tenant.
    """
    _check_shape(body, limits)
    read: Chat | Completion
    if api == CHAT:
        read = talk = decoded(CHATS, body)
        longest, n = check_chat(talk, limits)
        text = chat_text(talk)
        tokens = tokens_of(text)
    else:
        read = prompt = decoded(PROMPTS, body)
        longest, n = check_completion(prompt, limits)
        text, tokens = prompt_of(prompt)
    check_once(body)
    leading = NOTHING
    if prints is not None:
        leading = leading_of(prints, read, text, tokens, caller.tenant if of_tenant else 0)
    return Asked(
        api=api,
        body=body,
        model=read.model,
        stream=bool(read.stream),
        text=text,
        prompt_tokens=tokens,
        max_tokens=longest,
        n=n,
        key=caller.key,
        tenant=caller.tenant,
        priority=caller.key.priority if caller.key else 0,
        session=_headers.session(headers) or (read.prompt_cache_key or read.user or "")[:128],
        arrival_s=now_s,
        deadline_s=now_s + _headers.patience_s(headers),
        request_id=request_id,
        headers=_headers.passed(headers, request_id),
        held_bytes=held_bytes(body, text),
        leading=leading,
    )


def _check_shape(body: bytes, limits: Limits) -> None:
    most = Shape.of(limits)
    what = beyond(body, most)
    if what == "levels":
        raise bad(None, f"The body may be nested {limits.depth} levels deep.", "too_deep")
    if what:
        named = "lists and objects" if what == "objects" else what
        raise bad(None, f"The body may hold {getattr(most, what)} {named}.", "too_many_values")
