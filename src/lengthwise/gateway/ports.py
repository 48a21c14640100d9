"""The gateway's own ports: had before anything else is started, and no engine's address."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from lengthwise.gateway.config import GatewayConfig, Listen
from lengthwise.schema.errors import InputError

_HERE = ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::")  # noqa: S104 - compared, not bound
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - likewise
_USUAL = {"https": 443}


def check_ports(config: GatewayConfig) -> None:
    """Raises InputError where the gateway would ask itself, or would take an engine's port."""
    for engine in config.engines:
        address = urlsplit(engine.url)
        port = address.port or _USUAL.get(address.scheme, 80)
        for name, host, mine in _doors(config.listen):
            if port == mine and _same(address.hostname or "", host):
                raise InputError(
                    f"the gateway's {name} must be another than its engines'; {engine.shown} is where it "
                    f"would listen itself. Give the gateway another one: --{name.replace(' ', '-')} {_other(config)}"
                )


def listening(host: str, port: int, name: str) -> socket.socket:
    """A socket that has the port; raises InputError where another one has it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    door = socket.socket(family)
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind((host, port))
        door.listen(2048)
    except OSError as error:
        door.close()
        raise InputError(
            f"the {name} must be free; {host}:{port}: {error.strerror}. Choose another one"
        ) from error
    door.setblocking(False)
    return door


def _doors(listen: Listen) -> list[tuple[str, str, int]]:
    """Name, host and number of the ports; not those that the system picks."""
    doors = [("port", listen.host, listen.port), ("admin port", listen.admin_host, listen.admin_port or 0)]
    return [door for door in doors if door[2]]


def _same(engine: str, host: str) -> bool:
    """Whether an engine's host is the one that the gateway listens at."""
    if engine == host or (engine in _HERE and host in _HERE):
        return True
    return host in _EVERYWHERE and engine == socket.gethostname()


def _other(config: GatewayConfig) -> int:
    """A port that nobody in the configuration has."""
    taken = {urlsplit(engine.url).port for engine in config.engines}
    taken |= {config.listen.port, config.listen.admin_port}
    return next(port for port in range(8080, 65_536) if port not in taken)
