"""Callers that other services identify: JSON web tokens of an OIDC issuer, and an authorization service."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import json
import logging
import re
from pathlib import Path
from typing import Any, Self

from lengthwise.gateway.background import background
from lengthwise.gateway.config import ExternalAuth, Key, Oidc
from lengthwise.gateway.edge.client_request import Headers
from lengthwise.gateway.edge.errors import Fault
from lengthwise.gateway.protocols import Clock
from lengthwise.schema.errors import InputError, MissingExtraError

_log = logging.getLogger("lengthwise.gateway.edge")
_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LEEWAY_S = 30.0  # allowed difference of the clocks
_FETCH_S, _FETCH_BYTES = 5.0, 1 << 20
_MIN_FETCH_S = 5.0  # least time between two fetches for tokens with an unknown kid
_MAX_PRIORITY = 1000


def _identified(tenant: Any, priority: Any, source: str) -> Key:
    """Return a tenant as a key. Raises ValueError if tenant or priority are invalid; its message names the source."""
    if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
        raise ValueError(f"{source} must name a tenant of 1 to 64 letters, digits and ._-; it has {tenant!r:.80}")
    if priority is not None and not re.fullmatch(r"-?[0-9]{1,4}", str(priority)):
        raise ValueError(f"{source} must have a whole number as priority; it is {priority!r:.80}")
    number = max(-_MAX_PRIORITY, min(_MAX_PRIORITY, int(priority or 0)))
    return Key(tenant, hashlib.sha256(f"identity of {tenant}".encode()).hexdigest(), priority=number)


class TokenVerifier:
    """Verifies JSON web tokens by the public keys of their issuer, which it reads again as an async context manager.

    A token with an unknown ``kid`` reads the keys at once, so that the issuer can rotate them at any time.
    """

    def __init__(self, config: Oidc, clock: Clock) -> None:
        try:
            self._jwt: Any = importlib.import_module("jwt")
        except ImportError as error:
            raise MissingExtraError("[oidc] of a gateway", "oidc") from error
        self._config, self._clock = config, clock
        self._keys: dict[str, Any] = {}
        self._read_s = float("-inf")
        self._lock, self._stack = asyncio.Lock(), contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._read()
        except InputError as error:
            if "://" not in self._config.jwks:
                raise
            _log.warning("%s; tokens get 503 until it answers", error)
        await self._stack.enter_async_context(background(self._refresh()))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def key(self, headers: Headers, scope: dict[str, Any]) -> Key | None:  # noqa: ARG002
        """Return the tenant of a request as a key, or None if it has no token. Raises Fault (401, 503)."""
        config = self._config
        if (claims := await self.claims(headers.get(b"authorization", b""))) is None:
            return None
        try:
            priority = claims.get(config.priority_claim) if config.priority_claim else None
            return _identified(
                claims.get(config.tenant_claim), priority, f"The claim {config.tenant_claim} of the token"
            )
        except ValueError as error:
            raise _refused(f"The token is not valid: {error}.") from None

    async def claims(self, authorization: bytes) -> dict[str, Any] | None:
        """Return the claims of the token in an Authorization header, or None without one. Raises Fault (401, 503)."""
        scheme, _, given = authorization.partition(b" ")
        token, errors = given.strip(), self._jwt.exceptions
        if scheme.lower() != b"bearer" or token.count(b".") != 2:
            return None
        try:
            kid = str(self._jwt.get_unverified_header(token).get("kid", ""))
        except errors.PyJWTError:
            return None
        if kid not in self._keys:
            with contextlib.suppress(InputError):
                await self._read(_MIN_FETCH_S)
        if not self._keys:
            message = "The gateway has no public keys of the issuer of tokens."
            raise Fault(503, "auth", message, code="issuer_unavailable")
        if (public := self._keys.get(kid)) is None:
            raise _refused(f"The issuer has no key with the kid {kid!r:.80} of this token.")
        config = self._config
        try:
            claims: dict[str, Any] = self._jwt.decode(
                token, public, algorithms=_ALGORITHMS, audience=config.audience, issuer=config.issuer,
                leeway=_LEEWAY_S, options={"require": ["exp", "iss", "aud"]},
            )  # fmt: skip
        except (errors.PyJWTError, ValueError) as error:
            raise _refused(f"The token is not valid: {error}.") from None
        return claims

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(self._config.refresh_s)
            try:
                await self._read()
            except InputError as error:
                _log.warning("%s; its last keys stay in use", error)

    async def _read(self, min_age_s: float = 0.0) -> None:
        called_s = self._clock()
        async with self._lock:
            if called_s - self._read_s < min_age_s:  # also if another request has read them meanwhile
                return
            self._read_s = self._clock()
            place = self._config.jwks
            try:
                if "://" in place:
                    text = await _fetched(place)
                else:
                    text = await asyncio.get_running_loop().run_in_executor(None, Path(place).read_bytes)
                found = self._jwt.PyJWKSet.from_dict(json.loads(text)).keys
            except (OSError, ValueError, AttributeError, RecursionError, self._jwt.exceptions.PyJWTError) as error:
                raise InputError(
                    f"oidc.jwks must have the public keys of the issuer; {place}: {error!r:.200}"
                ) from error
            # Services that only decrypt may have the private key of a key with ``use: enc``.
            signing = [one for one in found if one.public_key_use in (None, "sig")]
            self._keys = {str(one.key_id or ""): one for one in signing if one.algorithm_name in _ALGORITHMS}


async def _fetched(url: str) -> bytes:
    import aiohttp

    try:
        async with (
            asyncio.timeout(_FETCH_S),
            aiohttp.ClientSession() as session,
            session.get(url, allow_redirects=False) as reply,
        ):
            if reply.status != 200:
                raise ValueError(f"status {reply.status}")
            body = b""
            async for chunk in reply.content.iter_any():
                body += chunk
                if len(body) > _FETCH_BYTES:
                    raise ValueError(f"more than {_FETCH_BYTES} bytes")
            return body
    except aiohttp.ClientError as error:
        raise OSError(str(error)) from error


def _refused(message: str) -> Fault:
    challenge = [(b"www-authenticate", b'Bearer error="invalid_token"')]
    return Fault(401, "auth", message, code="invalid_token", headers=challenge)


class AuthService:
    """Asks an authorization service about each request: status 2xx allows it, and a header names the tenant.

    A service that does not answer allows nothing.
    """

    def __init__(self, config: ExternalAuth) -> None:
        self._config = config

    async def __aenter__(self) -> Self:
        import aiohttp

        self._session = aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def key(self, headers: Headers, scope: dict[str, Any]) -> Key:
        """Return the tenant of a request as a key. Raises Fault (401 if it is not allowed, or 503)."""
        import aiohttp

        path = (scope.get("raw_path") or scope["path"].encode()).decode("ascii", "replace")
        sent = {"X-Original-Method": scope["method"], "X-Original-URI": path}
        sent["X-Forwarded-For"] = (scope.get("client") or ("",))[0]
        if (authorization := headers.get(b"authorization")) is not None:
            sent["Authorization"] = authorization.decode("latin-1")
        try:
            async with (
                asyncio.timeout(self._config.timeout_s),
                self._session.get(self._config.url, headers=sent, allow_redirects=False) as reply,
            ):
                status, fields = reply.status, reply.headers
            if 200 <= status < 300:
                source = "The answer of the authorization service"
                return _identified(fields.get("X-Lengthwise-Tenant"), fields.get("X-Lengthwise-Priority"), source)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            _log.warning("the authorization service failed: %r", error)
            status = 503
        if status in (401, 403):
            raise _refused(f"The authorization service refused this request with status {status}.")
        raise Fault(503, "auth", "The authorization service gave no usable answer.", code="auth_unavailable")
