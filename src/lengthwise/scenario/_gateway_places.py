"""What a gateway's file names outside of itself, besides files of keys: addresses, proxies, where the journal goes."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from lengthwise.schema.errors import InputError

_BARE = re.compile(r"[\x21-\x7e]+")
_A_PROXY = 'must be addresses with commas, such as "10.0.0.7, 10.1.0.0/16", or "*" alone for any'


def check_address(text: str, of: str) -> None:
    """Raises InputError where that is no address of the web; no password is repeated."""
    shown = re.sub(r"//[^/]*@", "//...@", text)
    fault = f"{of} must begin with http:// or https:// and name a host, with a port of 1 to 65535; it is {shown!r}"
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise InputError(fault) from None
    if not (_BARE.fullmatch(text) and parts.scheme in ("http", "https") and parts.hostname) or port == 0:
        raise InputError(fault)


def check_collector(text: str) -> None:
    """Raises InputError where traces cannot be sent there."""
    check_address(text, "the address of a collector (OTLP over HTTP)")
    parts = urlsplit(text)
    if parts.username is not None or parts.query or parts.fragment:
        raise InputError(
            "the address of a collector must be host, port and path alone, such as http://collector:4318; a key for it "
            "goes into the environment variable OTEL_EXPORTER_OTLP_HEADERS"
        )


def check_proxies(text: str) -> None:
    """Raises InputError where a part is neither an address nor a network: it would match nobody, in silence."""
    if text.strip() == "*":
        return
    for one in (part.strip() for part in text.split(",")):
        try:
            ipaddress.ip_network(one) if "/" in one else ipaddress.ip_address(one)
        except ValueError:
            why = f"{one!r} is none"
            if "/" in one and (network := _network_of(one)) is not None:
                why = f"{one!r} has bits beyond its network: did you mean {network}?"
            raise InputError(f"{_A_PROXY}; {why}") from None


def check_journal(path: Path) -> None:
    """Raises InputError where no journal can be written there."""
    folder, there = path.parent, path.exists()
    if path.is_dir():
        fault = f"{path} is a folder: name a file in it"
    elif not there and not folder.is_dir():
        fault = f"there is no folder {folder}: make it, or name another file"
    elif not os.access(path if there else folder, os.W_OK):
        fault = f"{path if there else folder} cannot be written by this user"
    else:
        return
    raise InputError(f"must be a file that can be written; {fault}")


def _network_of(text: str) -> str | None:
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError:
        return None
