"""Processes that are measured: started on one core, their CPU and memory read, ended by their id."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


_THERE = sorted(os.sched_getaffinity(0))  # before anybody here is bound to one of them


def cores() -> tuple[set[int], set[int]]:
    """(of what is measured, of all else); the same one where there is only one."""
    return {_THERE[0]}, {_THERE[-1]}


@dataclass(frozen=True)
class Process:
    """One that runs, with all its children."""

    pid: int
    url: str = ""
    key: str = ""

    def cpu_s(self) -> float:
        """User and system seconds so far, of the whole tree."""
        return sum(_stat_s(pid) for pid in _tree(self.pid))

    def rss_mib(self) -> float:
        """Resident memory of the whole tree."""
        pages = 0
        for pid in _tree(self.pid):
            try:
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except OSError:
                continue
        return pages * PAGE_BYTES / (1 << 20)


def _stat_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _tree(root: int) -> list[int]:
    found = [root]
    for pid in found:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                found += [int(child) for child in children.read_text().split()]
            except OSError:
                continue
    return found


@contextmanager
def running(argv: Sequence[str], on: set[int], **environment: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process on some cores, its output in a file; SIGTERM, then SIGKILL, to its own group at the end."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        mine = os.sched_getaffinity(0)
        with log.open("w") as out:
            os.sched_setaffinity(0, on)  # what a child has from its parent
            process = subprocess.Popen(
                argv,
                stdout=out,
                stderr=subprocess.STDOUT,
                text=True,
                process_group=0,
                cwd=scratch,
                env=os.environ | environment,
            )
            os.sched_setaffinity(0, mine)
        try:
            yield process, log
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=10)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
        else:
            return


def told(process: subprocess.Popen[str], log: Path, within_s: float = 60.0) -> dict[str, Any]:
    """The first line of JSON that a process prints."""
    until = time.monotonic() + within_s
    while time.monotonic() < until and process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("{") and line.endswith("}"):
                return dict(json.loads(line))
        time.sleep(0.05)
    raise RuntimeError(f"it did not get ready: {log.read_text()[-2000:]}")


def answers(process: subprocess.Popen[str], log: Path, url: str, data: bytes, key: str, within_s: float) -> None:
    """Waits until a chat is answered with 200; raises RuntimeError with what the process said."""
    until, last = time.monotonic() + within_s, ""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    while time.monotonic() < until and process.poll() is None:
        try:
            asked = urllib.request.Request(f"{url}/v1/chat/completions", data, headers)
            with urllib.request.urlopen(asked, timeout=20) as answer:
                if answer.status == 200:
                    return
        except urllib.error.HTTPError as error:
            last = f"{error.code} {error.read()[:300]!r}"
        except OSError as error:
            last = str(error)
        time.sleep(0.2)
    raise RuntimeError(f"it answers no chat ({last}): {log.read_text()[-1500:]}")


def free_port() -> int:
    """A port that is free now."""
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def found(program: str) -> str | None:
    """A program beside this Python, on PATH, or in the folders of LENGTHWISE_PEERS."""
    places = [Path(sys.executable).parent, *map(Path, os.environ.get("LENGTHWISE_PEERS", "").split(":"))]
    for place in places:
        if (place / program).is_file():
            return str(place / program)
    return shutil.which(program)
