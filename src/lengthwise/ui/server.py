"""The planner's web server: pages, answers and jobs, on this machine's own address unless a token guards it."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lengthwise.schema.errors import InputError, MissingExtraError
from lengthwise.ui import api, plan, schedulers, search
from lengthwise.ui.page import Outcome, Page, framed, html
from lengthwise.ui.work import COMPLETE, FIRST, JOB, MAX_FILE_BYTES, CancelledTaskError, Pool, Session, Task

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

PAGES: tuple[Page, ...] = (plan.PAGE, search.PAGE, schedulers.PAGE)
"""The pages that need nothing of the command line, in the order of the navigation; the first is at /."""
MAX_BODY_BYTES, MAX_ANSWER_BYTES = 64 * 1024, 16 * 1024 * 1024
LOOPBACK = ("127.0.0.1", "localhost", "::1")
HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


def serve(
    host: str, port: int, token: str | None, tools: Sequence[api.Tool] = (), pages: Sequence[Page] = PAGES
) -> None:
    """Serve ``pages`` until the process is interrupted, and ``tools`` as the JSON API.

    Raises MissingExtraError and InputError (a taken port).
    """
    import socket
    import threading

    from lengthwise import engine

    engine.compile_in_background()  # until it is done, the reference answers small runs, and others wait
    application = app(token, host, tools, pages)
    import uvicorn

    # The first answer loads the modules and the compiled kernel.
    threading.Thread(target=lambda: plan.answer({}, complete=False), daemon=True).start()

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


def app(
    token: str | None = None, host: str = "127.0.0.1", tools: Sequence[api.Tool] = (), pages: Sequence[Page] = PAGES
) -> Starlette:
    """Return the web application. With a token, every request needs it, in the query once or in a cookie.

    Raises MissingExtraError without the extra ``ui``.
    """
    try:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.routing import Route
    except ImportError as error:
        raise MissingExtraError("the planner in the browser", "ui") from error
    site = _Site(tools, pages)

    def route(path: str, handler: Any, method: str = "GET") -> Route:
        return Route(path, partial(_guarded, token=token, handler=handler), methods=[method])

    async def unroutable(request: Request, error: Exception) -> Response:
        return await _guarded(request, token=token, handler=partial(site.unroutable, error=error))

    routes = [
        *(route("/" if at == 0 else f"/{page.name}", partial(site.page, page=page)) for at, page in enumerate(pages)),
        *(route(f"/choices/{page.name}", partial(site.choices, page=page)) for page in pages),
        *(
            route(f"/answers/{page.name}/{name}", partial(site.answer, name=name, function=function), "POST")
            for page in pages
            for name, function in page.answers.items()
        ),
        *(
            route(f"/jobs/{page.name}/{name}", partial(site.start, page=page, function=function), "POST")
            for page in pages
            for name, function in page.jobs.items()
        ),
        route("/jobs/{id}", site.progress),
        route("/jobs/{id}", site.cancel, "DELETE"),
        route("/jobs/{id}/{page}/{download}", site.download, "POST"),
        route("/files", site.upload, "POST"),
        route("/api", site.api_page),
        route("/api/openapi.json", site.api_description),
        *(route(f"/api/{tool.__name__}", partial(site.tool, tool=tool), "POST") for tool in tools),
        Route("/healthz", _healthy),
        Route("/favicon.ico", _icon),
    ]
    # A page of another site could resolve its name to this address (DNS rebinding).
    hosts = [*LOOPBACK, "[::1]"] if host in LOOPBACK else ["*"]
    return Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
        exception_handlers={HTTPException: unroutable},
    )


async def _guarded(request: Request, *, token: str | None, handler: Any) -> Response:
    """Answer a request that has the token. An InputError is the text of the answer; of other errors it has the name."""
    from starlette.responses import JSONResponse

    given, cookie = request.query_params.get("token"), _cookie(request, "token")
    if token is not None and not hmac.compare_digest(
        (given or request.cookies.get(cookie, "")).encode(), token.encode()
    ):
        return JSONResponse({"error": "open the address with the token that lengthwise ui printed"}, 401, HEADERS)
    try:
        response: Response = await handler(request)
    except _RefusedError as error:
        response = JSONResponse({"error": str(error)}, error.status, HEADERS)
    except InputError as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        response = JSONResponse({"error": f"{error}{notes}"}, 400, HEADERS)
    except CancelledTaskError:
        response = JSONResponse({"error": "cancelled, or a newer request of the same tab replaced it"}, 409, HEADERS)
    except Exception as error:  # noqa: BLE001 - the page shows it
        traceback.print_exception(error)
        message = f"the server failed ({type(error).__name__}); its terminal has the traceback"
        response = JSONResponse({"error": message}, 500, HEADERS)
    if token is not None and given is not None:
        response.set_cookie(cookie, token, httponly=True, samesite="strict")
    return response


def _cookie(request: Request, name: str) -> str:
    """Return the name of a cookie for this port, because browsers share cookies between the ports of a host."""
    return f"{name}-{request.url.port or 80}"


class _RefusedError(Exception):
    """A request that HTTP has its own status for."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


async def _icon(_request: Request) -> Response:
    from starlette.responses import Response

    return Response(status_code=204, headers=HEADERS)


async def _healthy(_request: Request) -> Response:
    from starlette.responses import PlainTextResponse

    return PlainTextResponse("ok", headers=HEADERS)


async def _body(request: Request, media_type: str, most: int) -> bytes:
    if request.headers.get("content-type", "").partition(";")[0] != media_type:  # forms of other sites cannot send it
        raise _RefusedError(f"the body must be {media_type}", 415)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise _RefusedError(f"the body must have at most {most:,} bytes", 413)
    return bytes(body)


async def _values(request: Request) -> dict[str, Any]:
    try:
        values = json.loads(await _body(request, "application/json", MAX_BODY_BYTES))
    except (ValueError, RecursionError):
        raise InputError("the body must be JSON") from None
    if not isinstance(values, dict):
        raise InputError("the body must be an object with the fields of the page")
    return values


class _Site:
    """The handlers of requests, with the pool that runs their tasks."""

    def __init__(self, tools: Sequence[api.Tool], pages: Sequence[Page]) -> None:
        self.pool, self.tools, self.pages = Pool(), tools, pages

    def _session(self, request: Request, *, is_page: bool = False) -> Session:
        return self.pool.session(request.cookies.get(_cookie(request, "session")), is_page=is_page)

    def _task(self, request: Request, kind: int, function: Callable[[Task], Any], tab: str = "") -> Task:
        tab = tab or request.headers.get("x-tab", "")[:64] or secrets.token_hex(8)
        return self.pool.add(Task(self._session(request), tab, kind, function))

    async def page(self, request: Request, *, page: Page) -> Response:
        from starlette.responses import HTMLResponse

        text, security_policy = html(page, self.pages)
        response = HTMLResponse(text, headers=HEADERS | {"content-security-policy": security_policy})
        key = self._session(request, is_page=True).key
        response.set_cookie(_cookie(request, "session"), key, httponly=True, samesite="strict")
        return response

    async def choices(self, _request: Request, *, page: Page) -> Response:
        from starlette.responses import JSONResponse

        return JSONResponse(page.choices(), headers=HEADERS)

    async def answer(self, request: Request, *, name: str, function: Callable[..., dict[str, Any]]) -> Response:
        values, tab = await _values(request), request.headers.get("x-tab", "")[:64]
        kind = COMPLETE if values.get("complete") is True else FIRST
        own = f"{tab} {name}" if tab else ""  # it replaces no answers of other kinds
        task = self._task(request, kind, lambda task: _json(function(values, task)), own)
        return await _answered(request, self.pool, task)

    async def start(self, request: Request, *, page: Page, function: Callable[..., Outcome]) -> Response:
        from starlette.responses import JSONResponse

        values = await _values(request)

        def run(task: Task) -> tuple[Page, Outcome, bytes]:
            outcome = function(values, task)
            return page, outcome, _json(outcome.answer)

        return JSONResponse({"job": self._task(request, JOB, run).id}, 202, HEADERS)

    async def progress(self, request: Request) -> Response:
        """Return the progress of a job, or its result. Raises what the job raised."""
        from starlette.responses import JSONResponse, Response

        task = self._session(request).job(request.path_params["id"])
        if task.future.done():
            return Response(task.future.result()[2], 200, HEADERS, "application/json")
        step, done, of = task.progress
        return JSONResponse({"step": step, "done": done, "of": of}, 202, HEADERS)

    async def cancel(self, request: Request) -> Response:
        from starlette.responses import Response

        task = self._session(request).job(request.path_params["id"])
        self.pool.cancel(task)
        return Response(status_code=204, headers=HEADERS)

    async def download(self, request: Request) -> Response:
        """Return a file of a job that has ended."""
        from starlette.responses import Response

        values = await _values(request)
        job = self._session(request).job(request.path_params["id"])
        if not job.future.done():
            raise InputError("the job must end before its files can be made")
        page, outcome, _ = job.future.result()
        make = page.downloads.get(request.path_params["download"])
        if make is None or page.name != request.path_params["page"]:
            raise _RefusedError("the page has no such file", 404)
        task = self._task(request, COMPLETE, lambda _: make(outcome, values), tab=secrets.token_hex(8))
        found = await asyncio.wrap_future(task.future)
        headers = HEADERS | {"content-disposition": f'attachment; filename="{found.name}"'}
        return Response(found.content, 200, headers, found.media_type)

    async def upload(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        content = await _body(request, "application/octet-stream", MAX_FILE_BYTES)
        session = self._session(request)
        name = request.query_params.get("name", "file")
        return JSONResponse({"file": session.store(name, content), "name": name, "bytes": len(content)}, 201, HEADERS)

    async def tool(self, request: Request, *, tool: api.Tool) -> Response:
        values = await _values(request)
        task = self._task(
            request, JOB if tool.__name__ in ("search", "plan") else COMPLETE, lambda _: _json(api.call(tool, values))
        )
        return await _answered(request, self.pool, task)

    async def api_description(self, _request: Request) -> Response:
        from starlette.responses import JSONResponse

        return JSONResponse(api.description(self.tools), headers=HEADERS)

    async def api_page(self, request: Request) -> Response:
        from starlette.responses import HTMLResponse

        text, security_policy = api.page(self.tools, self.pages, str(request.base_url))
        return HTMLResponse(text, headers=HEADERS | {"content-security-policy": security_policy})

    async def unroutable(self, request: Request, *, error: Any) -> Response:
        """Answer a request for an address, or with a method, that the planner does not have."""
        from starlette.responses import HTMLResponse, JSONResponse

        if error.status_code != 404 or "text/html" not in request.headers.get("accept", ""):
            return JSONResponse({"error": error.detail}, error.status_code, HEADERS | dict(error.headers or {}))
        main = "<h1>No such page</h1><p id=answer tabindex=-1>The links above lead to the pages of the planner.</p>"
        up = "../" * (request.url.path.count("/") - 1)
        text, security_policy = framed("", "No such page", self.pages, main, up=up)
        return HTMLResponse(text, 404, headers=HEADERS | {"content-security-policy": security_policy})


def _json(found: Any) -> bytes:
    text = json.dumps(found, allow_nan=False, separators=(",", ":")).encode()
    if len(text) > MAX_ANSWER_BYTES:
        raise InputError(f"the answer has {len(text):,} bytes, more than {MAX_ANSWER_BYTES:,}; request less")
    return text


async def _answered(request: Request, pool: Pool, task: Task) -> Response:
    """Return the answer of a task, which ends when its client leaves."""
    from starlette.responses import Response

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    result, leaves = asyncio.wrap_future(task.future), asyncio.ensure_future(left())
    result.add_done_callback(lambda found: found.exception())  # else asyncio prints it if the client left
    await asyncio.wait({result, leaves}, return_when=asyncio.FIRST_COMPLETED)
    if not result.done():
        pool.cancel(task)
        raise CancelledTaskError
    leaves.cancel()
    return Response(result.result(), 200, HEADERS, "application/json")
