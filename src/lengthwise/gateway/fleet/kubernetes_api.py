"""The Kubernetes API as a pod reaches it: lists and watches of one resource, by GET alone."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Self

from lengthwise.schema.errors import InputError, MissingExtraError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
ASK_S = 30.0
MAX_BYTES, MOST_LINE_BYTES = 32 << 20, 4 << 20
"""Of all pages of a list, and of an event; etcd holds no object above 1.5 MiB."""
_PAGE = 100
"""Slices of a page: each may have 1,000 endpoints, and is read on the event loop."""


class ExpiredError(Exception):
    """The version from which a watch should go on is too old: list again."""


class NoAnswerError(Exception):
    """The API did not answer as it should.

    Attributes:
        status: Its HTTP status, 0 where none came.
    """

    def __init__(self, detail: str, status: int = 0) -> None:
        super().__init__(detail)
        self.status = status


class Kube:
    """A client of the API; an async context manager.

    Token and authority are files that are read again when they have changed.

    Args:
        url: Of the API; None: as a pod finds it.
        account: The folder with ``token`` and ``ca.crt``.

    Raises:
        InputError: No url, and this is no pod.
    """

    def __init__(self, url: str | None, *, account: Path = ACCOUNT) -> None:
        self.url = (url or _in_cluster()).rstrip("/")
        self._account = account
        self._session: Any = None
        self._context: ssl.SSLContext | None = None
        self._ca_seen: tuple[int, int] | None = None

    async def __aenter__(self) -> Self:
        """Opens the session."""
        try:
            import aiohttp
        except ImportError as error:
            raise MissingExtraError("lengthwise serve", "gateway") from error
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0))
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes all connections."""
        await self._session.close()

    async def list(self, path: str, selector: str) -> tuple[list[Any], str]:
        """All items, and the version from which a watch goes on.

        Raises:
            NoAnswerError: The API did not answer, or with a list that is too long.
            ExpiredError: The list changed under a page of it.
        """
        items: list[Any] = []
        more: dict[str, str] = {}
        left = MAX_BYTES
        while True:
            params = {"labelSelector": selector, "limit": str(_PAGE), **more}
            body = await self._page(path, params, left)
            left -= len(body)
            page = _object(body)
            items += page.get("items") or []
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return items, str(metadata.get("resourceVersion", ""))
            more = {"continue": str(metadata["continue"])}

    async def monitor(
        self, path: str, selector: str, version: str, *, lasts_s: float, silent_s: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Events until the API ends the watch; a line that is cut off is no event.

        Raises:
            NoAnswerError: It broke, was silent for ``silent_s``, or sent what is no event.
            ExpiredError: The version is too old.
        """
        params = {"labelSelector": selector, "watch": "1", "allowWatchBookmarks": "true",
                  "resourceVersion": version, "timeoutSeconds": str(int(lasts_s))}  # fmt: skip
        async with self._get(path, params, silent_s) as answer:
            _require(answer.status)
            rest = b""
            while data := await answer.content.readany():
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > MOST_LINE_BYTES:
                    raise NoAnswerError("an event without an end")
                for line in lines:
                    if line.strip():
                        yield _event(line)

    async def _page(self, path: str, params: dict[str, str], max_bytes: int) -> bytes:
        async with self._get(path, params, ASK_S) as answer:
            _require(answer.status)
            parts, size = [], 0
            while part := await answer.content.readany():
                parts.append(part)
                size += len(part)
                if size > max_bytes:
                    raise NoAnswerError(f"a list of more than {MAX_BYTES} bytes")
            return b"".join(parts)

    def _get(self, path: str, params: dict[str, str], silent_s: float) -> Any:
        import aiohttp

        headers = {"Accept": "application/json"}
        if token := _text(self._account / "token"):
            headers["Authorization"] = f"Bearer {token}"
        return self._session.get(
            self.url + path,
            params=params,
            headers=headers,
            ssl=self._authority(),
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=silent_s),
        )

    def _authority(self) -> ssl.SSLContext | bool:
        """Who is believed, read again when the file has changed."""
        path = self._account / "ca.crt"
        try:
            stat = path.stat()
            if self._context is None or self._ca_seen != (stat.st_mtime_ns, stat.st_ino):
                self._context = ssl.create_default_context(cafile=str(path))
                self._ca_seen = (stat.st_mtime_ns, stat.st_ino)
        except (OSError, ssl.SSLError):
            return self._context or True
        return self._context


def _in_cluster() -> str:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise InputError(
            "discovery by EndpointSlices needs a Kubernetes API: run in a pod, or give api_url "
            "(such as http://127.0.0.1:8001 of kubectl proxy)"
        )
    return f"https://{f'[{host}]' if ':' in host else host}:{port}"


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="ignore").strip()
    except OSError:
        return ""


def _require(status: int) -> None:
    if status == 410:
        raise ExpiredError
    if status == 403:
        raise NoAnswerError("not allowed: the role needs get, list and watch of endpointslices", status)
    if status != 200:
        raise NoAnswerError(f"http {status}", status)


def _object(body: bytes) -> dict[str, Any]:
    try:
        page = json.loads(body)
    except (ValueError, RecursionError):
        raise NoAnswerError("a list that is no JSON") from None
    if not isinstance(page, dict):
        raise NoAnswerError("a list that is none")
    return page


def _event(line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        raise NoAnswerError("an event that is no JSON") from None
    if not isinstance(event, dict) or not isinstance(event.get("object"), dict):
        raise NoAnswerError("an event that is none")
    if event.get("type") == "ERROR":
        code = event["object"].get("code")
        if code == 410:
            raise ExpiredError
        raise NoAnswerError(str(event["object"].get("message", "an error"))[:200])
    return event
