"""A server's own tokenizer, where it has a door to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lengthwise.backend._openai_server import RequestError

if TYPE_CHECKING:
    from lengthwise.backend.openai import Client

_SAMPLE = "one two three"


async def tokenizer_of(client: Client, model: str) -> str:
    """Whose form of ``/tokenize`` the server has: "vllm", "llama.cpp", "tgi"; "" where it has none."""
    for form in ("vllm", "llama.cpp", "tgi"):
        if await _ids(client, form, model, _SAMPLE):
            return form
    return ""


async def tokenize(client: Client, text: str) -> list[int] | None:
    """Token ids of a text, without those that begin a prompt; None where the server does not tell."""
    able = client.abilities
    return await _ids(client, able.tokenizer, able.model, text) if able.tokenizer else None


async def _ids(client: Client, form: str, model: str, text: str) -> list[int] | None:
    fields = {
        "vllm": {"model": model, "prompt": text, "add_special_tokens": False},
        "llama.cpp": {"content": text, "add_special": False},
        "tgi": {"inputs": text, "add_special_tokens": False},
    }[form]
    try:
        status, body = await client.fetch("POST", f"{client.server.root}/tokenize", fields)
    except RequestError:
        return None
    return _read(body) if status == 200 else None


def _read(body: Any) -> list[int] | None:
    rows = body.get("tokens") if isinstance(body, dict) else body
    if not isinstance(rows, list):
        return None
    ids = [row.get("id") if isinstance(row, dict) else row for row in rows]
    known = [i for i in ids if isinstance(i, int)]
    return known if known and len(known) == len(ids) else None
