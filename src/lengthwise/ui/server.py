"""The planner's web server: one page, its answers as JSON, on this machine's own address unless a token guards it."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from functools import cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from lengthwise.schema.errors import InputError, MissingExtraError
from lengthwise.ui import plan

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

MAX_BODY_BYTES = 64 * 1024
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def serve(host: str, port: int, token: str | None) -> None:
    """Serve the planner until the process is interrupted. Raises MissingExtraError and InputError (a taken port)."""
    import socket

    from lengthwise import engine

    engine.compile_in_background()  # until it is done, the reference answers
    application = app(token, host)
    import uvicorn

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(128)  # a browser that opens at once waits, instead of being refused
        except OSError as error:
            raise InputError(
                f"port {port} of {host} cannot be used ({error.strerror}); choose another with --port"
            ) from None
        settings = uvicorn.Config(application, log_level="warning", server_header=False)
        at = f"[{host}]" if ":" in host else host
        query = "" if token is None else f"?token={token}"
        print(f"the planner is at http://{at}:{listener.getsockname()[1]}/{query} (Ctrl-C ends it)", flush=True)  # noqa: T201
        uvicorn.Server(settings).run(sockets=[listener])


def new_token() -> str:
    """Return a random token that opens the page from other machines."""
    return secrets.token_urlsafe(24)


def app(token: str | None = None, host: str = "127.0.0.1") -> Starlette:
    """Return the web application. With a token, every request needs it, in the query once or in a cookie.

    Raises MissingExtraError without the extra ``ui``.
    """
    try:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.routing import Route
    except ImportError as error:
        raise MissingExtraError("the planner in the browser", "ui") from error
    routes = [
        Route("/", partial(_guarded, token=token, handler=_page)),
        Route("/api/plan", partial(_guarded, token=token, handler=_answer), methods=["POST"]),
        Route("/api/choices", partial(_guarded, token=token, handler=_choices)),
        Route("/healthz", _healthy),
    ]
    # A page of another site could resolve its name to this address (DNS rebinding).
    hosts = [*LOOPBACK, "[::1]"] if host in LOOPBACK else ["*"]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)])


async def _guarded(request: Request, *, token: str | None, handler: Any) -> Response:
    from starlette.responses import JSONResponse

    given = request.query_params.get("token")
    if token is not None and not hmac.compare_digest(
        (given or request.cookies.get("token", "")).encode(), token.encode()
    ):
        return JSONResponse({"error": "open the address with the token that lengthwise ui printed"}, 401, HEADERS)
    response: Response = await handler(request)
    if token is not None and given is not None:
        response.set_cookie("token", token, httponly=True, samesite="strict")
    return response


async def _healthy(_request: Request) -> Response:
    from starlette.responses import PlainTextResponse

    return PlainTextResponse("ok", headers=HEADERS)


async def _page(_request: Request) -> Response:
    from starlette.responses import HTMLResponse

    text, security_policy = page()
    return HTMLResponse(text, headers=HEADERS | {"content-security-policy": security_policy})


async def _choices(_request: Request) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse(plan.choices(), headers=HEADERS)


async def _answer(request: Request) -> Response:
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import JSONResponse

    def refused(message: str, status: int = 400) -> Response:
        return JSONResponse({"error": message}, status, HEADERS)

    # Forms of other sites cannot send this type.
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        return refused("the body must be application/json", 415)
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            return refused(f"the body must have at most {MAX_BODY_BYTES:,} bytes", 413)
    try:
        values = json.loads(body)
    except ValueError:
        return refused("the body must be JSON")
    if not isinstance(values, dict):
        return refused("the body must be an object with the fields of the page")
    complete = values.pop("complete", False) is True
    try:
        found = await run_in_threadpool(plan.answer, values, complete=complete)
    except InputError as error:
        return refused(str(error))
    return JSONResponse(found, headers=HEADERS)


@cache
def page() -> tuple[str, str]:
    """Return the page as HTML, and a content security policy that allows only its own style and script."""

    def asset(package: str, name: str) -> str:
        return files(package).joinpath("_assets", name).read_text(encoding="utf-8")

    def digest(text: str) -> str:
        return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    style = asset("lengthwise.report", "page.css") + asset("lengthwise.ui", "plan.css")
    script = asset("lengthwise.ui", "plan.js")
    text = asset("lengthwise.ui", "plan.html").replace("/*style*/", style).replace("/*script*/", script)
    security_policy = (
        f"default-src 'none'; style-src '{digest(style)}'; script-src '{digest(script)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, security_policy
