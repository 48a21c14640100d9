"""TLS contexts that read their certificates again when the files change, while connections stay open."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from lengthwise.gateway.config import Tls
from lengthwise.schema.errors import InputError

_log = logging.getLogger("lengthwise.gateway")
CHECK_EVERY_S = 5.0  # interval at which a gateway looks for new files


class RenewableContext(ssl.SSLContext):
    """A context that uses, for each new connection, the last certificates that it could read.

    If ``is_server``, it requires certificates of clients if ``tls.ca`` is given. Otherwise it verifies the server, by
    ``tls.server_name`` if given. Raises InputError if the files cannot be used.
    """

    def __new__(cls, tls: Tls, *, is_server: bool, purpose: str) -> Self:  # noqa: ARG004, D102
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)

    def __init__(self, tls: Tls, *, is_server: bool, purpose: str) -> None:
        self._tls, self._is_server, self._purpose = tls, is_server, purpose
        self._read = self._failed = self._signature()  # of the files in use, and of the last ones that cannot be used
        self._alpn: list[str] = []
        self._current = self._loaded()

    def set_alpn_protocols(self, alpn_protocols: Iterable[str]) -> None:  # noqa: D102
        self._alpn = list(alpn_protocols)
        self._current.set_alpn_protocols(self._alpn)

    def wrap_bio(  # noqa: D102 - asyncio and uvloop start each connection by it
        self, incoming: Any, outgoing: Any, server_side: bool = False, server_hostname: Any = None, session: Any = None
    ) -> ssl.SSLObject:
        name = self._tls.server_name or server_hostname
        return self._current.wrap_bio(incoming, outgoing, server_side, name, session)

    def check(self) -> None:
        """Raise InputError if the files cannot be used now."""
        self._loaded()

    def renew(self, *, force: bool = False) -> bool | None:
        """Read the files if they have changed or with ``force``. Return whether they can be used.

        Files that cannot be used leave the last ones in use. The result is None if nothing was read, and if the same
        files have already failed.
        """
        signature = self._signature()
        if signature == self._read and not force:
            return None
        try:
            self._current = self._loaded()
        except InputError as error:
            if signature == self._failed:
                return None
            self._failed = signature
            _log.warning("%s; the last certificates stay in use", error)
            return False
        self._read = signature
        _log.info("the certificates of %s were read again", self._purpose)
        return True

    def _signature(self) -> list[tuple[int, int, int] | None]:
        """Return values that change when a file is written or replaced, also by the symbolic links of Kubernetes."""
        found: list[tuple[int, int, int] | None] = []
        for name in (self._tls.cert, self._tls.key, self._tls.ca):
            try:
                status = None if name is None else Path(name).stat()
            except OSError:
                status = None
            found.append(None if status is None else (status.st_mtime_ns, status.st_size, status.st_ino))
        return found

    def _loaded(self) -> ssl.SSLContext:
        tls, purpose = self._tls, ssl.Purpose.CLIENT_AUTH if self._is_server else ssl.Purpose.SERVER_AUTH
        try:
            context = ssl.create_default_context(purpose, cafile=tls.ca)
            if tls.cert is not None:
                context.load_cert_chain(tls.cert, tls.key)
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(name for name in (tls.cert, tls.key, tls.ca) if name is not None)
            message = f"the certificates of {self._purpose} must be readable and belong together ({files}): {error}"
            raise InputError(message) from error
        if self._is_server and tls.ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        if self._alpn:
            context.set_alpn_protocols(self._alpn)
        return context
