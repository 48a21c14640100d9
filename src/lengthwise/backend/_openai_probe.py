"""What a server is and can do, found by asking it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lengthwise.backend._openai_pieces import told
from lengthwise.backend._openai_server import CHAT, COMPLETIONS, Abilities, Piece, RequestError
from lengthwise.backend._openai_tokens import tokenizer_of
from lengthwise.schema.errors import InputError

if TYPE_CHECKING:
    from lengthwise.backend.openai import Client

_HELLO = "one two three four"
_IDS = (301, 302, 303, 304, 305, 306, 307)
_FEW = 3
_METRICS = {"vllm:": "vllm", "sglang:": "sglang", "llamacpp:": "llama.cpp", "tgi_": "tgi"}
_OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}
_WRONG = "neither"
"""A value that a server which knows the field must refuse."""


async def probe(client: Client) -> Abilities:
    """See ``Client.probe``."""
    able = await identify(client)
    able = replace(able, api=await _api(client, able.model))
    client.abilities = able
    usage = await _tells(client, {"stream_options": {"include_usage": True}})
    each = {"include_usage": True, "continuous_usage_stats": True}
    usage_each = await _tells_each(client, {"stream_options": each}) if usage else False
    completes = able.api == COMPLETIONS
    return replace(
        able,
        usage=usage,
        usage_each=usage_each,
        ids_each=completes and await _tells_each(client, {"return_token_ids": True}),
        token_ids=completes and await _takes_ids(client, able),
        ignore_eos=await _knows(client, {"ignore_eos": True}, {"ignore_eos": _WRONG}),
        min_tokens=await _knows(client, {"min_tokens": _FEW}, {"min_tokens": _WRONG}),
        tokenizer=await tokenizer_of(client, able.model),
    )


async def identify(client: Client) -> Abilities:
    """See ``Client.identify``."""
    listed, came = await _models(client)
    names = tuple(str(row["id"]) for row in listed if isinstance(row, dict) and "id" in row)
    model = client.server.model or (names[0] if names else "")
    if not model:
        raise InputError(
            f"{client.server.shown} lists no models ({came}); check that it is an OpenAI-compatible server, "
            "or name the model to ask for"
        )
    if names and model not in names:
        names_there = ", ".join(names[:8])
        raise InputError(f"{client.server.shown} has no model {model!r}; it lists {names_there}")
    mine = next((row for row in listed if isinstance(row, dict) and row.get("id") == model), {})
    longest = mine.get("max_model_len")
    metrics = await _get(client, "/metrics")
    engine, version = await _engine(client, mine, metrics)
    return Abilities(
        engine=engine,
        version=version,
        models=names,
        model=model,
        max_model_len=longest if isinstance(longest, int) else None,
        metrics=isinstance(metrics, str) and "# TYPE" in metrics,
    )


async def _models(client: Client) -> tuple[list[Any], str]:
    """What it lists, and what came in a few words."""
    shown = client.server.shown
    try:
        status, kind, body = await client.answer("GET", f"{client.server.root}/v1/models")
    except RequestError as error:
        if error.reason == "refused":
            raise InputError(f"nobody listens at {shown}; is the server up?") from error
        raise InputError(f"no server answers at {shown}: {error}; start it, or check the address") from error
    if status in {401, 403}:
        raise InputError(f"{shown} refuses the API key (http {status}); give the right one")
    rows = body.get("data") if status == 200 and isinstance(body, dict) else None
    return rows if isinstance(rows, list) else [], f"/v1/models: http {status}, {told(body, kind)}"


async def _engine(client: Client, model: dict[str, Any], metrics: Any) -> tuple[str, str]:
    """Kind and version, from what each kind tells of itself."""
    kind = _OWNERS.get(str(model.get("owned_by", "")).lower(), "")
    if not kind and isinstance(metrics, str):
        kind = next((name for prefix, name in _METRICS.items() if f"\n{prefix}" in f"\n{metrics}"), "")
    tells = await _get(client, "/version")
    version = str(tells["version"]) if isinstance(tells, dict) and "version" in tells else ""
    if version and not kind:
        kind = "vllm"
    for path, name, key in (
        ("/server_info", "sglang", "version"),
        ("/get_server_info", "sglang", "version"),
        ("/props", "llama.cpp", "build_info"),
        ("/info", "tgi", "version"),
    ):
        if version or kind not in {"", name}:
            continue
        facts = await _get(client, path)
        if isinstance(facts, dict) and isinstance(facts.get(key), str):
            kind, version = name, facts[key]
    return kind, version


async def _get(client: Client, path: str) -> Any:
    try:
        status, body = await client.fetch("GET", f"{client.server.root}{path}")
    except RequestError:
        return None
    return body if status == 200 else None


async def _api(client: Client, model: str) -> str:
    """Which of the two ways to ask works."""
    reasons = []
    for api in (COMPLETIONS, CHAT):
        client.abilities = Abilities(model=model, api=api)
        try:
            await _stream(client, {})
        except RequestError as error:
            reasons.append(f"{api}: {error}")
        else:
            return api
    raise InputError(f"{client.server.shown} completes no prompt of {model!r}: {'; '.join(reasons)}")


async def _stream(client: Client, fields: dict[str, Any]) -> list[Piece]:
    """The pieces of a few tokens, asked for with further fields."""
    from lengthwise.backend.openai import prompted

    able = client.abilities
    body = {"model": able.model, "max_tokens": _FEW, "stream": True, **prompted(_HELLO, able.api)}
    sent = body | dict(client.server.body) | fields
    return [piece async for piece in client.stream(sent, usage_each="stream_options" in fields)]


async def _tells(client: Client, fields: dict[str, Any]) -> bool:
    """Whether a stream ends in numbers of tokens."""
    try:
        pieces = await _stream(client, fields)
    except RequestError:
        return False
    last = next((p.usage for p in reversed(pieces) if p.usage is not None), None)
    return last is not None and 0 < last.output_tokens <= _FEW and last.prompt_tokens > 0


async def _tells_each(client: Client, fields: dict[str, Any]) -> bool:
    """Whether every piece of output tells how many tokens it has."""
    try:
        pieces = await _stream(client, fields)
    except RequestError:
        return False
    counts = [piece.tokens for piece in pieces if piece.is_output or piece.text]
    return bool(counts) and all(tokens > 0 for tokens in counts) and sum(counts) <= _FEW


async def _takes_ids(client: Client, able: Abilities) -> bool:
    fields = {"model": able.model, "max_tokens": 1, "prompt": list(_IDS)}
    try:
        _, usage = await client.ask(fields)
    except RequestError:
        return False
    return usage is not None and usage.prompt_tokens == len(_IDS)


async def _knows(client: Client, right: dict[str, Any], wrong: dict[str, Any]) -> bool | None:
    """Whether a field is known: the right value is taken, a wrong one refused. None: both are taken."""
    if not await _taken(client, right):
        return False
    return None if await _taken(client, wrong) else True


async def _taken(client: Client, fields: dict[str, Any]) -> bool:
    try:
        await _stream(client, fields)
    except RequestError as error:
        if error.reason.startswith("http 4") or error.reason == "malformed":
            return False
        raise InputError(
            f"{client.server.shown} failed while it was asked what it can do: {error}"
        ) from error
    return True
