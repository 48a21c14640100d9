"""Whether a server at a local port answers that it is ready."""

from __future__ import annotations

import http.client
import socket

HEALTH = ("/health", "/v1/models")
PROBE_S = 5.0


def is_taken(host: str, port: int) -> bool:
    """Whether something listens at the port already."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind((host, port))
        except OSError:
            return True
    return False


def is_ready(host: str, port: int) -> bool:
    """Whether one of the addresses that tell of health answers with 200."""
    return any(_status(host, port, path) == http.HTTPStatus.OK for path in HEALTH)


def _status(host: str, port: int, path: str) -> int:
    """The HTTP status of a GET; 0 where nobody answers."""
    door = http.client.HTTPConnection(host, port, timeout=PROBE_S)
    try:
        door.request("GET", path)
        return door.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        door.close()
