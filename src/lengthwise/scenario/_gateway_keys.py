"""Keys by reference: read where a gateway's file says that they are; none ever stands in a message."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from lengthwise.gateway.config import Key
from lengthwise.scenario._gateway_sections import FoundSection, KeySection
from lengthwise.scenario._places import resolved

_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_A_DIGEST = "must be the 64 hex digits of a SHA-256 digest (lengthwise serve --hash-key prints it)"
_A_LINE = "must be tenant:sha256, such as batch-team:9f86d0..."


class WrongKeyError(Exception):
    """A key that cannot be had: which setting says so, and what must hold."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name, self.text = name, text


def engine_key(section: FoundSection, folder: Path) -> str | None:
    """What the gateway shows an engine; raises WrongKeyError."""
    if section.api_key_env is not None and section.api_key_file is not None:
        raise WrongKeyError("api_key_env", "means the same as api_key_file; keep one of them")
    if section.api_key_env is not None:
        return _header(_variable("api_key_env", section.api_key_env), "api_key_env")
    if section.api_key_file is not None:
        return _header(_text("api_key_file", section.api_key_file, folder).strip(), "api_key_file")
    return None


def client_keys(section: KeySection, folder: Path) -> tuple[Key, ...]:
    """The keys that one table gives; raises WrongKeyError."""
    ways = ("sha256", "sha256_env", "key_file")
    given = [name for name in ways if getattr(section, name) is not None]
    if len(given) != 1:
        raise WrongKeyError(given[-1] if given else "", f"needs exactly one of {', '.join(ways)}")
    if (section.tenant is None) is (section.key_file is None):
        text = "is told by the lines of key_file; leave it out" if section.key_file else "is missing"
        raise WrongKeyError("tenant", text)
    return tuple(
        Key(
            tenant,
            digest.lower(),
            tuple(section.models),
            section.priority,
            section.rate_rps,
            section.burst,
            section.concurrency,
        )
        for tenant, digest in _digests(section, folder)
    )


def _digests(section: KeySection, folder: Path) -> Iterator[tuple[str, str]]:
    if section.key_file is not None:
        yield from _lines(_text("key_file", section.key_file, folder), section.key_file)
        return
    name = "sha256" if section.sha256 is not None else "sha256_env"
    digest = section.sha256 or _variable(name, section.sha256_env or "")
    if not _DIGEST.fullmatch(digest):
        raise WrongKeyError(name, _A_DIGEST)
    yield section.tenant or "", digest


def _lines(text: str, name: str) -> Iterator[tuple[str, str]]:
    """Tenant and digest of each line; empty ones and those from # on say nothing."""
    said = [(number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1)]
    found = 0
    for number, line in said:
        tenant, colon, digest = line.rpartition(":")
        tenant, digest, found = tenant.strip(), digest.strip(), found + bool(line)
        if line and not (colon and tenant):
            raise WrongKeyError("key_file", f"line {number} of {name} {_A_LINE}")
        if line and not _DIGEST.fullmatch(digest):
            raise WrongKeyError(
                "key_file", f"what stands behind the colon in line {number} of {name} {_A_DIGEST}"
            )
        if line:
            yield tenant, digest
    if not found:
        raise WrongKeyError("key_file", f"{name} holds no key; a gateway without keys is open to everybody")


def _variable(name: str, variable: str) -> str:
    value = os.environ.get(variable, "").strip()
    if not value:
        raise WrongKeyError(name, f"the environment variable {variable} must hold the key; it is not set")
    return value


def _header(key: str, name: str) -> str:
    if not key or not key.isascii() or not key.isprintable():
        raise WrongKeyError(name, "the key must be one line of printable ASCII, as a header can carry it")
    return key


def _text(name: str, file: str, folder: Path) -> str:
    path = resolved(file, folder)
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise WrongKeyError(name, f"cannot read {path}: {why}") from None
