"""URLs in request bodies that engines would fetch: of images, sounds, videos, files and tool servers.

An engine fetches them from its own network, so that a URL with a private address would give a client access to
services behind the gateway. The gateway accepts only ``data:`` URLs and URLs of listed hosts.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from lengthwise.gateway.edge.errors import invalid, quoted

_LOCATOR = re.compile(r"(?:^|_)(?:ur[il]|image|audio|video|file|path|src)s?\Z")
"""Names of fields whose text an engine may use as a URL or as the path of a file on its machine."""
_SCHEME = re.compile(r"[\x00-\x20]*[A-Za-z][A-Za-z0-9+.\-]*://")
_TEXTS = frozenset({
    "text", "content", "title", "context", "thinking", "reasoning", "reasoning_content", "refusal", "output", "quote",
    "query", "transcript",
})  # fmt: skip
"""Fields whose text becomes a part of the prompt, even if it looks like a URL."""
_NOT_FETCHED = frozenset({
    "arguments", "input", "parameters", "input_schema", "annotations", "citations", "action", "summary", "tool_calls",
})  # fmt: skip
"""Fields of messages and their parts with the input of a tool or the citations of an answer."""
_DEFAULT_PORTS = {"http": "80", "https": "443"}
_NOT_SCALAR = frozenset({str, list, dict})
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9](?:[A-Za-z0-9._\-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])"
    r"(?::(?P<port>[0-9]{1,5}))?(?:/[\x21-\x5b\x5d-\x7e]*)?\Z"
)
"""URLs that all parsers read alike: no user, backslash, blank, or query without a path."""
_NUMBER = re.compile(r"(?:0[xX][0-9A-Fa-f]*|[0-9]+)\Z")
_WITH_IPV4 = tuple(map(ipaddress.ip_network, ("::/80", "64:ff9b::/32", "2001::/32", "2002::/16")))
_LOCAL_NAMES = ("localhost", ".localhost", ".local", ".internal", ".intranet", ".lan", ".home.arpa", ".svc")


def is_public(host: str) -> bool:
    """Return whether a host of a URL is a public address or a name with a dot that is not reserved for private use.

    An IPv4 address must have four decimal numbers: other forms, such as 2130706433 and 0x7f.1, are not public, nor are
    IPv6 addresses that contain an IPv4 address.
    """
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        is_number = _NUMBER.match(host.rpartition(".")[2]) is not None
        return not is_number and "." in host and not host.lower().endswith(_LOCAL_NAMES)
    has_ipv4 = any(address in network for network in _WITH_IPV4)
    return address.is_global and not address.is_multicast and not has_ipv4


class MediaUrls:
    """Checks the URLs of bodies against ``hosts``: names, ``*.name``, addresses, each with an optional port, or "*"."""

    def __init__(self, hosts: Iterable[str]) -> None:
        listed = [host.lower() for host in hosts]
        self._any = "*" in listed
        self._exact = frozenset(listed)
        self._suffixes = tuple(host[1:] for host in listed if host.startswith("*."))

    def check(self, body: bytes, content: Any) -> None:
        """Raise Fault (400) for a URL in a body that is not allowed. ``content`` is the decoded body."""
        found = False
        for path, url in _located(content):
            found = True
            self.check_url(url, path)
        if found:  # of two equal fields, the engine's parser may use the other one
            json.loads(body.decode(), object_pairs_hook=_refuse_repeated)

    def check_form_field(self, name: str, value: bytes) -> None:
        """Raise Fault (400) for a field of a form, other than an uploaded file, whose URL is not allowed."""
        text = value.decode("utf-8", "replace")
        if _LOCATOR.search(name.casefold()) or _SCHEME.match(text):
            self.check_url(text, name)

    def check_url(self, url: str, path: str) -> None:
        """Raise Fault (400) unless the URL of the field at ``path`` is allowed."""
        if url.startswith("data:") or not url:
            return
        parts = _URL.match(url)
        if parts is None:
            rule = "must be a data: URL, or http(s)://, a host without user name, and a path"
            raise invalid(path, f"{path} {rule}; it is {quoted(url)}.", "url_not_allowed")
        host, port = parts["host"].lower(), parts["port"]
        default = port is None or port == _DEFAULT_PORTS[parts["scheme"]]
        if not self._allows(host, f"{host}:{port or _DEFAULT_PORTS[parts['scheme']]}", is_default_port=default):
            source = quoted(parts["host"] + ("" if default else f":{port}"))
            message = f"The gateway lets engines fetch nothing from {source}; send a data: URL in {path}."
            raise invalid(path, message, "url_not_allowed")

    def _allows(self, host: str, with_port: str, *, is_default_port: bool) -> bool:
        names = (host, with_port) if is_default_port else (with_port,)
        if not self._exact.isdisjoint(names):
            return True
        is_listed = (self._any and is_default_port) or any(name.endswith(self._suffixes) for name in names)
        return is_listed and is_public(host)


def _located(content: Any) -> Iterator[tuple[str, str]]:
    """Yield (path, URL) of all fields of a decoded body with something that an engine may fetch."""
    if not isinstance(content, dict):
        return
    for root in ("messages", "input", "system", "query", "mcp_servers", "ref_audio", "image", "image_url"):
        value = content.get(root)
        for at, one in enumerate(value if type(value) is list else ()):
            # Most messages have only text, which needs no walk.
            if type(one) is dict and not (type(one.get("content")) is str and "role" in one):
                yield from _walk(one, root, f"{root}.{at}")
            elif type(one) is str and root in ("image", "image_url"):
                yield f"{root}.{at}", one
        if type(value) is dict or (type(value) is str and root not in ("input", "query", "system")):
            yield from _walk(value, root, root)
    if "query" in content:  # of a rerank; the documents of a chat are texts
        yield from _walk(content.get("documents"), "content", "documents")
    tools = content.get("tools")
    for at, tool in enumerate(tools if type(tools) is list else ()):
        if type(tool) is dict and type(url := tool.get("server_url")) is str:
            yield f"tools.{at}.server_url", url


def _walk(value: Any, name: str, path: str) -> Iterator[tuple[str, str]]:
    if type(value) is str:
        if name not in _TEXTS and (_LOCATOR.search(name) or _SCHEME.match(value)):
            yield path, value
    elif type(value) is list:
        for at, one in enumerate(value):
            if type(one) in _NOT_SCALAR:  # a body may have a million numbers
                yield from _walk(one, name, f"{path}.{at}")
    elif type(value) is dict:
        for key, one in value.items():
            if type(one) in _NOT_SCALAR and (folded := key.casefold()) not in _NOT_FETCHED:
                yield from _walk(one, folded, f"{path}.{key[:64]}")


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> None:
    if len(dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        name = next(name for name in names if names.count(name) > 1)
        raise invalid(None, f"The field {quoted(name)} must occur once in its object, not twice.", "duplicate_field")
