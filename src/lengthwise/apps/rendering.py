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
from lengthwise.schema.errors import InputError

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
    api = _api(call)
    body |= {"messages": messages} if api == CHAT_API else {"prompt": messages[-1]["content"]}
    return Asked(key_of(model, api, body), Ask(task, api, body))


def passed(call: Call, model: Model, task: int, which: str, body: Any) -> Asked:
    """The request of a task that is sent as it was given, and the key of its answer.

    Only a seed is added, where it has none and leaves something to chance: the task is then answered the same again.

    Raises:
        InputError: The body is no table of fields.
    """
    if not isinstance(body, Mapping):
        raise InputError(f"body must be a mapping of a request's fields; it is {type(body).__name__}")
    fields = {name: value for name, value in body.items() if name != "model"}
    if fields.get("temperature") != 0 and fields.get("seed") is None:
        fields["seed"] = _seed(None, which)
    api = _api(call)
    return Asked(key_of(model, api, fields), Ask(task, api, fields))


def _api(call: Call) -> str:
    return CHAT_API if call.api == CHAT else COMPLETIONS


def key_of(model: Model, api: str, body: Mapping[str, Any]) -> str:
    """SHA-256 of all that an answer follows from, in hex."""
    whole = json.dumps([model.identity(), api, body], sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()


def _seed(given: int | None, which: str) -> int:
    digest = hashlib.sha256(f"{given}/{which}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % MOST_SEED
