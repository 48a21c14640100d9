"""The API of tenants and keys on the admin port. Every request needs the admin key."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import parse_qs

import msgspec

from lengthwise.gateway.config import require_known
from lengthwise.gateway.edge import asgi
from lengthwise.gateway.edge.auth import AuthThrottle
from lengthwise.gateway.edge.errors import Fault, invalid, quoted
from lengthwise.gateway.protocols import Clock
from lengthwise.gateway.request import SloClass
from lengthwise.gateway.tenants.accounts import Accounts
from lengthwise.gateway.tenants.records import PERIODS, KeySettings, ManagedKey, Name, TenantSettings
from lengthwise.schema.errors import InputError, LengthwiseError

ROOT = "/admin/"
_log = logging.getLogger("lengthwise.gateway.tenants")
_BODY_BYTES = 1 << 16


class Rotation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a rotation."""

    grace_s: Annotated[float, msgspec.Meta(ge=0, le=31 * 86_400)] = 86_400.0  # how long the old secret stays valid


class TenantsApi:
    """Serves ``/admin/keys``, ``/admin/tenants`` and ``/admin/usage``."""

    def __init__(
        self, accounts: Accounts, admin_sha256: str, clock: Clock, slo_classes: Callable[[], Iterable[SloClass]] = tuple
    ) -> None:
        self._slo_classes = slo_classes
        self._accounts, self._digest, self._throttle = accounts, admin_sha256.lower(), AuthThrottle(clock)
        self._budget = asgi.BodyBudget(64 * _BODY_BYTES)
        self._routes: dict[str, dict[str, Callable[[str, bytes, bytes], Awaitable[tuple[int, Any]]]]] = {
            "keys": {"GET": self._list_keys, "POST": self._add_key},
            "keys/*": {"DELETE": self._revoke_key},
            "keys/*/rotate": {"POST": self._rotate_key},
            "tenants": {"GET": self._list_tenants},
            "tenants/*": {"PUT": self._put_tenant},
            "usage": {"GET": self._usage},
        }

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """Answer a request."""
        exchange = asgi.AsgiExchange(scope, receive, send)
        exchange.headers += [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]
        try:
            headers = dict(scope["headers"])
            self._authenticate(headers.get(b"authorization", b""), (scope.get("client") or ("",))[0])
            with asgi.BodyReservation(self._budget) as reservation:
                body = await exchange.body(_BODY_BYTES, headers.get(b"content-length"), reservation)
            status, content = await self._serve(scope, body)
            text = b"" if status == 204 else msgspec.json.encode(content)
            await exchange.send(status, [(b"content-type", b"application/json")], text)
        except asgi.ClientGoneError:
            pass
        except Fault as fault:
            await exchange.send_fault(fault)
        except (LengthwiseError, msgspec.ValidationError, msgspec.DecodeError) as error:
            await exchange.send_fault(invalid(None, str(error), "invalid_request"))
        except KeyError as error:
            await exchange.send_fault(Fault(404, "route", f"There is no key {error.args[0]}.", code="key_not_found"))
        finally:
            exchange.close()

    def _authenticate(self, authorization: bytes, address: str) -> None:
        scheme, _, secret = authorization.partition(b" ")
        given = hashlib.sha256(secret.strip()).hexdigest()
        is_right = hmac.compare_digest(given, self._digest) and scheme.lower() == b"bearer"
        if after_s := self._throttle.refused_s(address, given if is_right else None):
            message = "Too many wrong admin keys came from your address."
            raise Fault(429, "guessing", message, code="too_many_failures", retry_after_s=after_s)
        if not is_right:
            self._throttle.failed(address)
            message = "This API needs the admin key; send it as Authorization: Bearer ADMIN_KEY."
            headers = [(b"www-authenticate", b"Bearer")]
            raise Fault(401, "auth", message, code="invalid_admin_key", headers=headers)
        self._throttle.succeeded(address, given)

    async def _serve(self, scope: asgi.Scope, body: bytes) -> tuple[int, Any]:
        name, *rest = scope["path"].removeprefix(ROOT).split("/")
        methods = self._routes.get("/".join([name, *("*" for _ in rest[:1]), *rest[1:]]))
        if methods is None:
            raise Fault(404, "route", f"Unknown request URL: {quoted(scope['path'])}.", code="unknown_url")
        if (serve := methods.get(scope["method"])) is None:
            allowed = ", ".join(methods)
            headers = [(b"allow", allowed.encode())]
            raise Fault(405, "method", f"This URL takes {allowed}.", code="method_not_allowed", headers=headers)
        return await serve(rest[0] if rest else "", body or b"{}", scope.get("query_string", b""))

    async def _list_keys(self, *_: Any) -> tuple[int, Any]:
        return 200, {"keys": [_shown(key) for key in self._accounts.keys]}

    async def _add_key(self, _: str, body: bytes, __: bytes) -> tuple[int, Any]:
        settings = msgspec.json.decode(body, type=KeySettings)
        if settings.slo_class is not None:
            require_known("class in slo_classes", settings.slo_class, tuple(one.name for one in self._slo_classes()))
        key, secret = await self._accounts.add_key(settings)
        _log.info("added key %s of tenant %s", key.id, key.settings.tenant)
        return 201, _shown(key) | {"secret": secret}

    async def _rotate_key(self, key_id: str, body: bytes, _: bytes) -> tuple[int, Any]:
        grace_s = msgspec.json.decode(body, type=Rotation).grace_s
        key, secret = await self._accounts.rotate_key(key_id, grace_s)
        _log.info("rotated key %s", key_id)
        return 200, _shown(key) | {"secret": secret}

    async def _revoke_key(self, key_id: str, _: bytes, __: bytes) -> tuple[int, Any]:
        await self._accounts.revoke_key(key_id)
        _log.info("revoked key %s", key_id)
        return 204, None

    async def _list_tenants(self, *_: Any) -> tuple[int, Any]:
        tenants = self._accounts.tenants.items()
        return 200, {"tenants": [{"name": name} | msgspec.to_builtins(settings) for name, settings in tenants]}

    async def _put_tenant(self, name: str, body: bytes, _: bytes) -> tuple[int, Any]:
        settings = msgspec.json.decode(body, type=TenantSettings)
        await self._accounts.put_tenant(msgspec.convert(name, Name), settings)
        _log.info("changed tenant %s", name)
        return 200, {"name": name} | msgspec.to_builtins(settings)

    async def _usage(self, _: str, __: bytes, query: bytes) -> tuple[int, Any]:
        given = {name: values[-1] for name, values in parse_qs(query.decode("latin-1")).items()}
        for name in given:
            require_known("parameter", name, ("period", "tenant", "key"))
        period = given.get("period", "day")
        require_known("period", period, PERIODS)
        if "tenant" in given and "key" in given:
            raise InputError("usage must be that of a tenant or of a key; both are given: leave one out")
        subject = next((f"{name}:{given[name]}" for name in ("key", "tenant") if name in given), "")
        return 200, {"usage": await self._accounts.usage(period, subject)}


def _shown(key: ManagedKey) -> dict[str, Any]:
    """Return the settings of a key without its secret and its hash."""
    previous = [until_s for _, until_s in key.digests[1:]]
    until = datetime.fromtimestamp(previous[0], UTC).isoformat() if previous else None
    created = datetime.fromtimestamp(key.created_s, UTC).isoformat()
    settings: dict[str, Any] = msgspec.to_builtins(key.settings)
    return {"id": key.id, "created": created, "previous_secret_until": until} | settings
