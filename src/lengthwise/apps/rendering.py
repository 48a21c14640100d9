"""Messages of a call in a context, and the request that they make."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from lengthwise.apps.app import CHAT, Call, Model
from lengthwise.apps.launch.contracts import CHAT as CHAT_API
from lengthwise.apps.launch.contracts import COMPLETIONS, Ask
from lengthwise.apps.run.contracts import Asked
from lengthwise.apps.templates import template

MOST_SEED = 2**31


def said(call: Call, context: Mapping[str, Any]) -> list[dict[str, str]]:
    """Its messages; raises InputError where a name is missing."""
    return [{"role": role, "content": template(text).render(context)} for role, text in call.messages]


def asked(call: Call, model: Model, task: int, which: str, messages: list[dict[str, str]]) -> Asked:
    """The request of a task and the key of its answer.

    Args:
        call: Whose task it is.
        model: Who is asked.
        task: Its number.
        which: Tells the task from others; what is left to chance follows from it.
        messages: What is said.
    """
    sampling = call.sampling
    body: dict[str, Any] = sampling.fields()
    if not sampling.is_greedy:
        body["seed"] = _seed(sampling.seed, which)
    elif sampling.seed is not None:
        body["seed"] = sampling.seed
    api = CHAT_API if call.api == CHAT else COMPLETIONS
    body |= {"messages": messages} if api == CHAT_API else {"prompt": messages[-1]["content"]}
    return Asked(key_of(model, api, body), Ask(task, api, body))


def key_of(model: Model, api: str, body: Mapping[str, Any]) -> str:
    """SHA-256 of all that an answer follows from, in hex."""
    whole = json.dumps([model.identity(), api, body], sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()


def _seed(given: int | None, which: str) -> int:
    digest = hashlib.sha256(f"{given}/{which}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % MOST_SEED
