"""List and watch a resource of the Kubernetes API from within a pod, by GET requests only."""

from __future__ import annotations

import contextlib
import json
import os
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Self

import aiohttp

from lengthwise.gateway.relay import read_bounded
from lengthwise.schema.errors import InputError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
REQUEST_TIMEOUT_S = 30.0
MAX_LIST_BYTES, MAX_EVENT_BYTES = 32 << 20, 4 << 20  # of all pages of a list; of an event (etcd: at most 1.5 MiB)
_PAGE_SIZE = 100  # slices in a page: each may have 1,000 endpoints, and the event loop parses a page at once
EXPIRED = 410  # status of a watch whose version is too old, so that a new list is necessary


class KubernetesError(Exception):
    """The API's answer is not the expected one. ``status`` is its HTTP status, EXPIRED for a watch, or 0."""

    def __init__(self, detail: str, status: int = 0) -> None:
        super().__init__(detail)
        self.status = status


class KubernetesClient:
    """A client of the Kubernetes API, as an async context manager.

    It reads its token for every request, and its CA when that file changes. Without ``url`` it uses the API of the pod
    in which it runs, and raises InputError if it does not run in a pod.
    """

    def __init__(self, url: str | None, *, account: Path = ACCOUNT) -> None:
        if not url:
            host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
            if not host:
                example = "http://127.0.0.1:8001 of kubectl proxy"
                raise InputError(f"discovery by EndpointSlices needs a pod, or api_url (such as {example})")
            url = f"https://{f'[{host}]' if ':' in host else host}:{port}"
        self.url = url.rstrip("/")
        self._account = account
        self._session: Any = None
        self._tls: ssl.SSLContext | None = None
        self._ca_file_state = (0, 0)

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def list(self, path: str, selector: str) -> tuple[list[Any], str]:
        """Return all items, and the version from which a watch can continue. Raises KubernetesError."""
        items: list[Any] = []
        params = {"labelSelector": selector, "limit": str(_PAGE_SIZE)}
        bytes_left = MAX_LIST_BYTES
        while True:
            async with self._get(path, params, REQUEST_TIMEOUT_S) as response:
                _require_success(response.status)
                body = await read_bounded(response, bytes_left + 1)
            bytes_left -= len(body)
            if bytes_left < 0:
                raise KubernetesError(f"a list of more than {MAX_LIST_BYTES} bytes")
            page = _parse_object(body, "a list")
            items += page.get("items") or []
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return items, str(metadata.get("resourceVersion", ""))
            params["continue"] = str(metadata["continue"])

    async def watch(
        self, path: str, selector: str, version: str, *, duration_s: float, timeout_s: float
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield events until the API ends the watch. Raises KubernetesError, or TimeoutError if none comes in time."""
        params = {"labelSelector": selector, "watch": "1", "allowWatchBookmarks": "true",
                  "resourceVersion": version, "timeoutSeconds": str(int(duration_s))}  # fmt: skip
        async with self._get(path, params, timeout_s) as response:
            _require_success(response.status)
            rest = b""
            while data := await response.content.readany():
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > MAX_EVENT_BYTES:
                    raise KubernetesError("an event without an end")
                for line in lines:
                    if line.strip():
                        yield _parse_event(line)

    def _get(self, path: str, params: dict[str, str], timeout_s: float) -> Any:
        headers = {"Accept": "application/json"}
        try:
            token = (self._account / "token").read_text(encoding="ascii", errors="ignore").strip()
        except OSError:
            token = ""
        if token:
            headers["Authorization"] = f"Bearer {token}"
        return self._session.get(
            self.url + path,
            params=params,
            headers=headers,
            ssl=self._tls_context(),
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=timeout_s),
        )

    def _tls_context(self) -> ssl.SSLContext | bool:
        """Return a context with the account's CA or, if that is unreadable, the last one or True (the system's CAs)."""
        path = self._account / "ca.crt"
        try:
            stat = path.stat()
            if self._tls is None or self._ca_file_state != (stat.st_mtime_ns, stat.st_ino):
                self._tls = ssl.create_default_context(cafile=str(path))
                self._ca_file_state = (stat.st_mtime_ns, stat.st_ino)
        except (OSError, ssl.SSLError):
            return self._tls or True
        return self._tls


def _require_success(status: int) -> None:
    if status != 200:
        details = {EXPIRED: "", 403: "not allowed: the role needs get, list and watch of endpointslices"}
        raise KubernetesError(details.get(status, f"http {status}"), status)


def _parse_object(body: bytes, kind: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        parsed = json.loads(body)
        if isinstance(parsed, dict):
            return parsed
    raise KubernetesError(f"{kind} that is no JSON object")


def _parse_event(line: bytes) -> dict[str, Any]:
    event = _parse_object(line, "an event")
    if not isinstance(event.get("object"), dict):
        raise KubernetesError("an event without an object")
    if event.get("type") == "ERROR":
        if event["object"].get("code") == EXPIRED:
            raise KubernetesError("", EXPIRED)
        raise KubernetesError(str(event["object"].get("message", "an error"))[:200])
    return event
