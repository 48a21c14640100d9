"""Engines that are found: static ones, by DNS, by the EndpointSlices of a Service."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lengthwise.gateway.config import Engine
from lengthwise.schema.errors import InputError


@dataclass(frozen=True, slots=True)
class Found:
    """An engine that is there.

    Attributes:
        name: Unique.
        engine: How it is reached; its name is ``name``.
        up: Whether it may be given new requests; one that is not is only kept to its end.
    """

    name: str
    engine: Engine
    up: bool = True


Tell = Callable[[Sequence[Found]], None]
"""Takes all that a source knows now."""


def at(address: str, port: int, like: Engine, *, name: str = "", up: bool = True) -> Found:
    """An engine at an address that was found, in all else like another."""
    secure = like.tls is not None or like.url.startswith("https:")
    place = f"{_host(address)}:{port}"
    url = f"{'https' if secure else 'http'}://{place}"
    return Found(name or place, replace(like, url=url, name=name or place), up)


def split_port(text: str, what: str) -> tuple[str, str]:
    """What stands before and behind the last colon.

    Raises:
        InputError: There is none.
    """
    before, colon, port = text.rpartition(":")
    if not (before and colon and port):
        raise InputError(f"{what}; it is {text!r}")
    return before, port


def _host(address: str) -> str:
    try:
        return f"[{address}]" if ipaddress.ip_address(address).version == 6 else address
    except ValueError:
        return address
