"""A key's digest, for a gateway's file."""

from __future__ import annotations

import hashlib
import sys

import typer

from lengthwise.schema.errors import InputError


def print_digest() -> None:
    """Prints the SHA-256 of the key on standard input; on a terminal it is asked for and not shown."""
    if sys.stdin.isatty():
        key = str(typer.prompt("Key", hide_input=True, err=True))
    else:
        key = sys.stdin.readline()
        if sys.stdin.readline():
            raise InputError("--hash-key takes one key on one line; more lines came")
    key = key.strip()
    if not key or not key.isascii() or not key.isprintable():
        raise InputError(
            "a key must be one line of printable ASCII, as a header can carry it: printf %s KEY | lengthwise "
            "serve --hash-key"
        )
    typer.echo(hashlib.sha256(key.encode()).hexdigest())
