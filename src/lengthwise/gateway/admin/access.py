"""Users of the admin port: tokens, roles, and sessions of browsers."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lengthwise.gateway.audit import Actor, AuditLog
from lengthwise.gateway.config import ROLES, AdminUser
from lengthwise.gateway.edge.auth import AuthThrottle, token_digest
from lengthwise.gateway.edge.errors import Fault
from lengthwise.gateway.protocols import Clock

if TYPE_CHECKING:
    from lengthwise.gateway.edge.identity import TokenVerifier

SESSION_S = 8 * 3600.0
MAX_SESSIONS = 1000
_COOKIE = "lengthwise_session"
_ONCE = (b"authorization", b"cookie", b"origin", b"x-csrf-token")
_ANONYMOUS = Actor("", ROLES[0])  # a client without a token, where reading needs none


@dataclass
class _Session:
    digest: str  # of the user's token
    csrf: str  # value that only pages of this port can read and send
    ends_s: float


class Access:
    """Finds the user of each request by a token or by the cookie of a session, and the user's role.

    If ``is_open``, clients without a token have the role viewer. ``verifier`` verifies tokens of an issuer, whose claim
    ``role_claim`` is the role.
    """

    def __init__(self, users: Iterable[AdminUser], is_open: bool, clock: Clock, audit: AuditLog) -> None:
        self._clock, self.audit, self._throttle = clock, audit, AuthThrottle(clock)
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self.verifier: TokenVerifier | None = None
        self.role_claim = ""
        self.configure(users, is_open)

    def configure(self, users: Iterable[AdminUser], is_open: bool) -> None:
        """Replace the users. Sessions of users that are not among them end. ``is_open``: reading needs no token."""
        self._users = {user.sha256.lower(): user for user in users}
        self.is_open = is_open

    @property
    def has_users(self) -> bool:
        """Whether the port accepts tokens."""
        return bool(self._users or self.role_claim)

    async def user(self, scope: dict[str, Any]) -> tuple[Actor, str]:
        """Return the user of a request, and the CSRF value of its session ("" without a session).

        Raises Fault: 401 without a valid token or session, 403 for a request of another origin's page, 429 after many
        wrong tokens, 400 for a header that occurs twice, because a proxy may read the other one.
        """
        headers = dict(scope["headers"])
        for name in _ONCE:
            if [one for one, _ in scope["headers"]].count(name) > 1:
                raise Fault(400, "invalid", f"The header {name.decode()} must occur once.", code="duplicate_header")
        if (authorization := headers.get(b"authorization")) is not None:
            return await self._user_of(authorization, address(scope)), ""
        found = self._session(headers.get(b"cookie", b""), scope)
        if found is None:
            if self.is_open:
                return replace(_ANONYMOUS, address=address(scope)), ""
            raise _unknown("This port needs a token: send it as Authorization: Bearer TOKEN, or log in at /login.")
        session, user = found
        if scope["method"] not in ("GET", "HEAD"):
            given = headers.get(b"x-csrf-token", b"")
            if is_foreign(headers) or not hmac.compare_digest(given, session.csrf.encode()):
                message = "A change by a session needs the header X-CSRF-Token with the value of /session."
                raise Fault(403, "csrf", message, code="csrf")
        return Actor(user.name, user.role, address(scope)), session.csrf

    def require(self, actor: Actor, role: str, action: str, target: str = "") -> None:
        """Raise Fault (401, 403) unless an actor has this role or a higher one."""
        if not actor.name:
            raise _unknown("This request needs a token: send it as Authorization: Bearer TOKEN.")
        if ROLES.index(actor.role) < ROLES.index(role):
            self.audit.record(actor, action, target, "denied")
            message = f"This request needs the role {role}; {actor.name} has the role {actor.role}."
            raise Fault(403, "role", message, code="role_too_low")

    def log_in(self, scope: dict[str, Any], token: str) -> tuple[bytes, bytes]:
        """Return the header that sets the cookie of a new session. Raises Fault (401, 403, 429)."""
        _refuse_foreign(scope)
        digest = token_digest(b"Bearer " + token.encode())
        actor = self._checked(b"Bearer " + token.encode(), address(scope), "login")
        self.audit.record(actor, "login")
        secret = secrets.token_urlsafe(32)
        self._sessions[_hashed(secret)] = _Session(digest, secrets.token_urlsafe(32), self._clock() + SESSION_S)
        if len(self._sessions) > MAX_SESSIONS:
            self._sessions.popitem(last=False)
        return _cookie(scope, secret, SESSION_S)

    def log_out(self, scope: dict[str, Any]) -> tuple[bytes, bytes]:
        """End the session of a request. Return the header that deletes its cookie. Raises Fault (403)."""
        _refuse_foreign(scope)
        cookie = dict(scope["headers"]).get(b"cookie", b"")
        if (found := self._session(cookie, scope)) is not None:
            del self._sessions[_hashed(_secret_of(cookie, scope))]
            self.audit.record(Actor(found[1].name, found[1].role, address(scope)), "logout")
        return _cookie(scope, "", 0.0)

    def _session(self, cookie: bytes, scope: dict[str, Any]) -> tuple[_Session, AdminUser] | None:
        if not (secret := _secret_of(cookie, scope)) or (session := self._sessions.get(_hashed(secret))) is None:
            return None
        user = self._users.get(session.digest)
        return None if user is None or self._clock() >= session.ends_s else (session, user)

    async def _user_of(self, authorization: bytes, client: str) -> Actor:
        if self.verifier is not None and self.role_claim and authorization.count(b".") == 2:
            self._throttle.check(client, token_digest(authorization))
            try:
                claims = await self.verifier.claims(authorization)
            except Fault as fault:
                if fault.status == 401:
                    self._failed(client, "authenticate")
                raise
            if claims is not None:
                role, name = claims.get(self.role_claim), str(claims.get("sub", "token"))[:64]
                if role not in ROLES:
                    self._failed(client, "authenticate")
                    raise _unknown(f"The claim {self.role_claim} of the token must be one of {', '.join(ROLES)}.")
                self._throttle.succeeded(client, token_digest(authorization))
                return Actor(name, role, client)
        return self._checked(authorization, client, "authenticate")

    def _checked(self, authorization: bytes, client: str, action: str) -> Actor:
        scheme, given = authorization.partition(b" ")[0], token_digest(authorization)
        # All users are compared, so that the time does not depend on which token is right.
        found = [user for digest, user in self._users.items() if hmac.compare_digest(digest, given)]
        is_right = bool(found) and scheme.lower() == b"bearer"
        self._throttle.check(client, given if is_right else None)
        if not is_right:
            self._failed(client, action)
            raise _unknown("The token must be that of a user of this port; it is not.")
        self._throttle.succeeded(client, given)
        return Actor(found[-1].name, found[-1].role, client)

    def _failed(self, client: str, action: str) -> None:
        self._throttle.failed(client)
        self.audit.record(Actor("", "", client), action, outcome="denied")


def address(scope: dict[str, Any]) -> str:
    """Return the address of the client of a request."""
    return str((scope.get("client") or ("",))[0])


def is_foreign(headers: dict[bytes, bytes]) -> bool:
    """Return whether a page of another origin made a request."""
    origin = headers.get(b"origin")
    if headers.get(b"sec-fetch-site", b"same-origin") not in (b"same-origin", b"none"):
        return True
    return origin is not None and origin.partition(b"//")[2] != headers.get(b"host")


def _refuse_foreign(scope: dict[str, Any]) -> None:
    if is_foreign(dict(scope["headers"])):
        raise Fault(403, "csrf", "Only the page of this port may log in and out.", code="csrf")


def _unknown(message: str) -> Fault:
    return Fault(401, "auth", message, code="invalid_admin_key", headers=[(b"www-authenticate", b"Bearer")])


def _hashed(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _name(scope: dict[str, Any]) -> str:
    return f"__Host-{_COOKIE}" if scope.get("scheme") == "https" else _COOKIE


def _secret_of(cookie: bytes, scope: dict[str, Any]) -> str:
    pairs = [pair.strip().partition("=") for pair in cookie.decode("latin-1").split(";")]
    found = [value for name, _, value in pairs if name == _name(scope)]
    return found[0] if len(found) == 1 else ""


def _cookie(scope: dict[str, Any], secret: str, max_age_s: float) -> tuple[bytes, bytes]:
    secure = "; Secure" if scope.get("scheme") == "https" else ""
    value = f"{_name(scope)}={secret}; Path=/; Max-Age={max_age_s:.0f}; HttpOnly; SameSite=Strict{secure}"
    return b"set-cookie", value.encode()
