"""The addresses that are served: these, letter by letter, and no others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from lengthwise.gateway.edge.asked import CHAT, COMPLETIONS
from lengthwise.gateway.edge.faults import Fault, shown

_MODELS = b"/v1/models/"


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request goes.

    Attributes:
        name: Of what is served.
        methods: That it takes.
        api: CHAT or COMPLETIONS, or "".
        is_open: Whether it takes no key.
        model: The one that is asked after.
    """

    name: str
    methods: tuple[str, ...] = ("GET", "HEAD")
    api: str = ""
    is_open: bool = False
    model: str = ""


_ROUTES = {
    b"/v1/chat/completions": Route("chat", ("POST",), CHAT),
    b"/v1/completions": Route("completions", ("POST",), COMPLETIONS),
    b"/v1/models": Route("models"),
    b"/health": Route("health", is_open=True),
    b"/ready": Route("ready", is_open=True),
    b"/openapi.json": Route("openapi", is_open=True),
}


def route(scope: dict[str, Any]) -> Route:
    """The route of a request.

    Raises:
        Fault: 404, there is none; 405, not by this method.
    """
    raw = scope.get("raw_path") or scope["path"].encode("utf-8", "replace")
    found = _ROUTES.get(raw) or _of_model(raw)
    if found is None:
        path = raw.decode("ascii", "replace")
        raise Fault(404, "route", f"Unknown request URL: {shown(path)}.", code="unknown_url")
    if scope["method"] not in found.methods:
        allowed = ", ".join(found.methods)
        raise Fault(
            405, "method", f"This URL takes {allowed}.", code="method_not_allowed",
            headers=[(b"allow", allowed.encode())],
        )  # fmt: skip
    return found


def _of_model(raw: bytes) -> Route | None:
    """The route to one model; its name may hold slashes, coded or not. It is looked up, never sent on."""
    if not raw.startswith(_MODELS) or len(raw) == len(_MODELS):
        return None
    return Route("model", model=unquote(raw[len(_MODELS) :].decode("ascii", "replace"), errors="replace"))
