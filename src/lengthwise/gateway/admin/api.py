"""The API of the admin port: workers, the configuration, and the routes of tenants if there is a store."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from lengthwise.gateway.admin.access import Access
from lengthwise.gateway.audit import Actor
from lengthwise.gateway.edge import asgi
from lengthwise.gateway.edge.errors import Fault, invalid, quoted
from lengthwise.schema.errors import InputError, LengthwiseError

ROOT = "/admin/"
_log = logging.getLogger("lengthwise.gateway")
_BODY_BYTES = 1 << 16
Handler = Callable[[str, bytes, bytes, Actor], Awaitable[tuple[int, Any]]]
Methods = dict[str, Handler]


class Change(msgspec.Struct, frozen=True):
    """Name of a change in the audit log, and the least role that may make it."""

    action: str
    role: str = "admin"


class AdminApi:
    """Serves paths below ``/admin/`` for a ``Gateway``. GET needs the role viewer.

    ``routes`` has the handlers by path and method, ``changes`` each change by "METHOD PATH"; "*" stands for a name. A
    handler gets this name, the body, the query and the user.
    """

    def __init__(self, access: Access, gateway: Any) -> None:
        self._access, self._gateway = access, gateway
        self._budget = asgi.BodyBudget(64 * _BODY_BYTES)
        self.routes: dict[str, Methods] = {
            "workers": {"GET": self._list_workers},
            "workers/*/drain": {"POST": self._drain_worker},
            "workers/*/resume": {"POST": self._resume_worker},
            "reload": {"POST": self._reload},
            "drain": {"POST": self._drain},
            "resume": {"POST": self._resume},
        }
        self.changes = {
            "POST workers/*/drain": Change("worker_drained", "operator"),
            "POST workers/*/resume": Change("worker_resumed", "operator"),
            "POST reload": Change("reload", "operator"),
            "POST drain": Change("drain", "operator"),
            "POST resume": Change("resume", "operator"),
        }

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """Answer a request."""
        exchange = asgi.AsgiExchange(scope, receive, send)
        exchange.headers += [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
        try:
            status, content = await self._serve(scope, exchange)
            text = b"" if status == 204 else msgspec.json.encode(content)
            await exchange.send(status, [(b"content-type", b"application/json")], text)
        except asgi.ClientGoneError:
            pass
        except Fault as fault:
            await exchange.send_fault(fault)
        finally:
            exchange.close()

    async def _serve(self, scope: asgi.Scope, exchange: asgi.AsgiExchange) -> tuple[int, Any]:  # noqa: C901 - in order
        actor, _ = await self._access.user(scope)
        self._access.require(actor, "viewer", "read")
        name, *rest = scope["path"].removeprefix(ROOT).split("/")
        path, target = "/".join([name, *("*" for _ in rest[:1]), *rest[1:]]), rest[0] if rest else ""
        if (methods := self.routes.get(path)) is None:
            needs_store = name in ("keys", "tenants", "usage") and "keys" not in self.routes
            more = " It needs a store of tenants: set [tenants] store." if needs_store else ""
            raise Fault(404, "route", f"Unknown request URL: {quoted(scope['path'])}.{more}", code="unknown_url")
        if (serve := methods.get(scope["method"])) is None:
            allowed = ", ".join(methods)
            headers = [(b"allow", allowed.encode())]
            raise Fault(405, "method", f"This URL takes {allowed}.", code="method_not_allowed", headers=headers)
        change = self.changes.get(f"{scope['method']} {path}")
        if change is not None:
            self._access.require(actor, change.role, change.action, target)
        with asgi.BodyReservation(self._budget) as reservation:
            length = dict(scope["headers"]).get(b"content-length")
            body = await exchange.body(_BODY_BYTES, length, reservation)
        try:
            settings = {} if change is None else _settings(body)  # before the change, as its line must not fail
            status, content = await serve(target, body or b"{}", scope.get("query_string", b""), actor)
        except (LengthwiseError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            fault = invalid(None, str(error), "invalid_request")
        except KeyError as error:
            fault = Fault(
                404, "route", f"There is no {name.removesuffix('s')} {error.args[0]}.", code=f"{name}_not_found"
            )
        except Fault as error:
            fault = error
        except Exception:  # noqa: BLE001 - the client must get an answer
            _log.exception("a request to the admin port failed")
            fault = Fault(500, "internal", "The gateway failed to serve this request.", code="internal_error")
        else:
            if change is not None:
                made = content if isinstance(content, dict) else {}
                self._access.audit.record(actor, change.action, target or str(made.get("id", "")), **settings)
            return status, content
        if change is not None:
            self._access.audit.record(actor, change.action, target, "failed", reason=fault.message)
        raise fault

    async def _list_workers(self, *_: Any) -> tuple[int, Any]:
        gateway, rows = self._gateway, []
        numbers = {one.name: one.in_flight for one in gateway.driver.statistics().workers}
        for state in gateway.fleet.states():
            worker = gateway.fleet.worker(state.name)
            rows.append({
                "name": state.name, "url": worker.engine.display_url, "up": state.up, "drained": worker.drained,
                "in_flight": numbers.get(state.name, 0),
            })  # fmt: skip
        return 200, {"workers": rows}

    async def _drain_worker(self, name: str, *_: Any) -> tuple[int, Any]:
        self._gateway.fleet.set_drained(name, True)
        return 200, {"name": name, "drained": True}

    async def _resume_worker(self, name: str, *_: Any) -> tuple[int, Any]:
        self._gateway.fleet.set_drained(name, False)
        return 200, {"name": name, "drained": False}

    async def _reload(self, _: str, __: bytes, ___: bytes, actor: Actor) -> tuple[int, Any]:
        if (read := self._gateway.read_config) is None:
            raise InputError("there must be a configuration file to reload; this gateway was started without one")
        await self._gateway.configure(read(), actor)
        return 200, {"reloaded": True}

    async def _drain(self, *_: Any) -> tuple[int, Any]:
        self._gateway.app.draining = True
        return 200, {"draining": True}

    async def _resume(self, *_: Any) -> tuple[int, Any]:
        self._gateway.app.draining = False
        return 200, {"draining": False}


def _settings(body: bytes) -> dict[str, Any]:
    """Return the settings in the body of a change, for the audit log; bodies contain no secrets."""
    return {"settings": msgspec.json.decode(body)} if body.strip() not in (b"", b"{}") else {}
