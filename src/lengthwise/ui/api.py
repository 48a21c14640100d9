"""The tools of ``lengthwise mcp`` as a JSON API: calls, an OpenAPI description, and a page that a person can read."""

from __future__ import annotations

import html
import inspect
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lengthwise.schema.errors import InputError
from lengthwise.ui.page import Page, framed

Tool = Callable[..., dict[str, Any]]
_CHECKED_BY_TOOLS = ("application", "rows")  # whose prompts may look like names of files


def call(tool: Tool, values: dict[str, Any]) -> dict[str, Any]:
    """Return a tool's answer for arguments from JSON.

    Raises InputError for wrong arguments, and for names of files and Python objects, which a browser must not choose.
    """
    from pydantic import ValidationError, validate_call

    try:
        texts = list(_texts({name: value for name, value in values.items() if name not in _CHECKED_BY_TOOLS}))
    except RecursionError:
        raise InputError("the arguments are nested too deeply") from None
    for text in texts:
        if place := _place(text):
            raise InputError(
                f"the JSON API reads no files and no Python objects; {place!r} is one. Use lengthwise mcp, or a command"
            )
    try:
        return validate_call(config={"strict": True})(tool)(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "missing_argument":
            raise InputError(f"{name} is missing; /api lists the arguments of {tool.__name__}") from None
        raise InputError(f"{name}: {first['msg']}; it is {first['input']!r}") from None


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of arguments, and those in texts that are TOML: a scenario, or the value of a setting."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)
    elif isinstance(value, str):
        yield value
        for text in (value, f"value = {value}"):
            try:
                found = tomllib.loads(text)
            except tomllib.TOMLDecodeError:  # the tool gives the reason
                continue
            yield from (inner for inner in _texts(list(found.values())) if inner != value)


def _place(text: str) -> str:
    """Return the part of a text that names a file, a folder or a Python object, or ""."""
    if re.match(r"[\w./~\\-]+:[\w./~\\-]", text):
        return text
    for part in re.split(r"[,;#()]", text):
        try:
            is_file = part.startswith(("/", "~", ".", "\\")) or (bool(part.strip()) and Path(part).exists())
        except (OSError, ValueError):  # too long for a name
            is_file = False
        if is_file:
            return part
    return ""


def description(tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the API as an OpenAPI 3.1 document, made from the signatures and docstrings of the tools."""
    from pydantic import TypeAdapter

    paths = {}
    for tool in tools:
        summary, _, rest = inspect.cleandoc(tool.__doc__ or "").partition("\n")
        about, _, arguments = rest.partition("Args:")
        signature: Any = tool
        schema = TypeAdapter(signature).json_schema()
        for name, text in re.findall(r"(?m)^    (\w+): (.*)$", arguments):
            schema["properties"][name]["description"] = text
        fail = {"description": "The input is wrong.", "content": {"application/json": {"schema": _ERROR}}}
        paths[f"/api/{tool.__name__}"] = {
            "post": {
                "operationId": tool.__name__,
                "summary": summary,
                "description": about.strip(),
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": {
                    "200": {
                        "description": "The JSON of the command with this name.",
                        "content": {"application/json": {"schema": {"type": "object"}}},
                    },
                    "400": fail,
                },
            }
        }
    about = (
        "Every estimate has a value and the half-width of its 95 % sampling interval, and the 90 % interval of the "
        "cost model's error (model_low, model_high) if it is known. Units are in the names."
    )
    info = {"title": "lengthwise", "version": version("lengthwise"), "description": about}
    return {"openapi": "3.1.0", "info": info, "paths": paths}


_ERROR = {"type": "object", "properties": {"error": {"type": "string"}}}


def page(tools: Sequence[Tool], pages: Sequence[Page], address: str) -> tuple[str, str]:
    """Return the description as a page of HTML, for a planner at this address, and its content security policy."""
    found = description(tools)
    parts = []
    for path, methods in found["paths"].items():
        one = methods["post"]
        schema = one["requestBody"]["content"]["application/json"]["schema"]
        rows = "".join(
            f"<tr><th scope=row><code>{name}</code></th><td>{html.escape(_kind(of))}"
            f"{' (required)' * (name in schema.get('required', ()))}</td>"
            f"<td>{html.escape(of.get('description', ''))}</td></tr>"
            for name, of in schema["properties"].items()
        )
        parts.append(
            f"<section id={one['operationId']}><h2>POST {path}</h2><p>{html.escape(one['summary'])}</p>"
            f"<p>{html.escape(one['description'])}</p><div class=scroll tabindex=0 role=region "
            f'aria-label="Arguments of {path}"><table class=texts><thead><tr><th scope=col>argument</th>'
            "<th scope=col>type</th><th scope=col>meaning</th></tr></thead><tbody>"
            f"{rows}</tbody></table></div></section>"
        )
    main = (
        "<header><h1>JSON API</h1><p>The functions of <code>lengthwise mcp</code>. A request is a JSON object of "
        'arguments with the type application/json; <a href="api/openapi.json">openapi.json</a> describes all.</p>'
        f"<p>{html.escape(found['info']['description'])}</p><pre tabindex=0>curl -s {html.escape(address)}api/simulate "
        '-H \'content-type: application/json\' \\\n  -d \'{"model": "llama-3.1-8b", "gpu": "H100", "rate": 20}\''
        f"</pre></header><div id=answer tabindex=-1>{''.join(parts)}</div>"
    )
    return framed("api", "API", pages, main)


def _kind(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(kind for one in schema["anyOf"] if (kind := _kind(one)) != "null")
    return str(schema.get("type", "value"))
