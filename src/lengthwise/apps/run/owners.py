"""Who runs: coordinators by name, so that those known to be dead give their leases back at once."""

from __future__ import annotations

import os
import socket
import uuid
from pathlib import Path

from lengthwise.apps.ledger.contracts import Ledger
from lengthwise.apps.run.contracts import Job

OWNER = "owner:"
"""Facts of coordinators that have begun and not ended: the name behind it, nothing else in the value."""
ENGINES = "engines:"
"""Facts of the engines that a coordinator has; its name stands behind it."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def new_owner() -> str:
    """A name of a coordinator of this process: host, boot, process and its start, and which of the process'."""
    return "/".join(
        (socket.gethostname(), _boot(), str(os.getpid()), _started(os.getpid()), uuid.uuid4().hex[:8])
    )


def is_dead(owner: str) -> bool:
    """Whether a coordinator is known to be gone: it ran on this host, and its process does not run any more."""
    parts = owner.split("/")
    if len(parts) != 5 or parts[0] != socket.gethostname() or not parts[2].isdigit():
        return False
    if parts[1] != _boot():
        return True
    return _started(int(parts[2])) != parts[3]


def enter(ledger: Ledger, job: Job, now_s: float) -> bool:
    """Opens the ledger for a run and takes what dead coordinators held; whether the run was there before."""
    resumed = ledger.open(job.identity, job.layout.tasks)
    known = [name.removeprefix(OWNER) for name in ledger.facts() if name.startswith(OWNER)]
    gone = [owner for owner in known if is_dead(owner)]
    for owner in gone:
        ledger.beat(owner, now_s=now_s, lease_s=0.0)
    ledger.note(
        {OWNER + job.owner: "runs", **dict.fromkeys((OWNER + owner for owner in gone), ""), "cancel": ""}
        | dict.fromkeys((ENGINES + owner for owner in gone), "")
    )
    ledger.expire(now_s=now_s)
    return resumed


def leave(ledger: Ledger, owner: str) -> None:
    """It runs no more."""
    ledger.note({OWNER + owner: "", ENGINES + owner: ""})


def alive(ledger: Ledger) -> list[str]:
    """Coordinators that have begun, have not ended, and are not known to be dead."""
    owners = [name.removeprefix(OWNER) for name in ledger.facts() if name.startswith(OWNER)]
    return [owner for owner in owners if not is_dead(owner)]


def _boot() -> str:
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def _started(pid: int) -> str:
    """When a process began, in the kernel's ticks; "" of one that does not run."""
    try:
        words = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
        )
    except (OSError, IndexError):
        return ""
    return "" if words[0] in "ZX" else words[19]
