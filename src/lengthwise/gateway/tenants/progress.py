"""Tokens of requests in flight in a memory-mapped file. A killed process loses none of them."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path

_SLOT = struct.Struct("=qqq")  # number of the request (0: free), prompt tokens, output tokens
_SLOTS = 1024


class ProgressFile:
    """A slot for each request in flight. The operating system has the file's pages, also after a kill of the process.

    The file is locked as long as its process lives, so that ``abandoned`` finds the files of others that do not.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._path, temporary = folder / name, folder / f".{name}"
        self._file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        os.posix_fallocate(self._file, 0, _SLOTS * _SLOT.size)  # on a full disk, writing a page would kill the process
        temporary.rename(self._path)  # only now, so that no other process finds it unlocked
        self._map = mmap.mmap(self._file, _SLOTS * _SLOT.size)
        self._free = list(range(0, _SLOTS * _SLOT.size, _SLOT.size))[::-1]

    def add(self, number: int) -> int:
        """Return the slot of a new request, without tokens, or -1 on a full disk: then a kill loses the tokens."""
        if not self._free:
            size = len(self._map)
            try:
                os.posix_fallocate(self._file, size, size)
            except OSError:
                return -1
            self._map.resize(2 * size)
            self._free = list(range(size, 2 * size, _SLOT.size))[::-1]
        slot = self._free.pop()
        _SLOT.pack_into(self._map, slot, number, 0, 0)
        return slot

    def set(self, slot: int, number: int, prompt_tokens: int, output_tokens: int) -> None:
        """Store the tokens of a request."""
        if slot >= 0:
            _SLOT.pack_into(self._map, slot, number, prompt_tokens, output_tokens)

    def remove(self, slot: int) -> None:
        """Free the slot of a request whose tokens are in the store."""
        if slot >= 0:
            _SLOT.pack_into(self._map, slot, 0, 0, 0)
            self._free.append(slot)

    def close(self, *, remove: bool) -> None:
        """Close the file. With ``remove`` no request is left, and the file is deleted."""
        self._map.close()
        if remove:
            self._path.unlink(missing_ok=True)
        os.close(self._file)


@contextlib.contextmanager
def abandoned(folder: Path, prefix: str) -> Iterator[dict[str, dict[int, tuple[int, int]]]]:
    """Yield prompt and output tokens by file name and request, of processes that were killed. Then delete the files."""
    with contextlib.ExitStack() as stack:
        found = {}
        for path in sorted(folder.glob(f"{glob.escape(prefix)}*")):
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                file = stack.enter_context(path.open("rb"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                rows = _SLOT.iter_unpack(file.read())
                found[path.name] = {number: (prompt, output) for number, prompt, output in rows if number}
        yield found
        for name in found:
            (folder / name).unlink(missing_ok=True)
