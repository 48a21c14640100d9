"""Which names the admin page answers to: a page of somebody else must not reach it through a name of its own."""

from __future__ import annotations

import ipaddress

_NOT_PUBLIC = (".localhost", ".local", ".internal", ".svc", ".cluster.local")
"""Nobody can have such a name point anywhere he likes."""


def allowed(host: str, own: str = "") -> bool:
    """Whether a Host header is an address, a name that is not public, or the one that was configured."""
    name = _without_port(host).lower().rstrip(".")
    if not name:
        return False
    if name in ("localhost", own.lower()) or name.endswith(_NOT_PUBLIC):
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return "." not in name and name.replace("-", "").isalnum()
    return True


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
