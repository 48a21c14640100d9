"""A real PostgreSQL server in a temporary folder, from Debian's package."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

LIMIT_S = 60
PORT = 5432  # of the socket's name alone: the server listens on no address


def programs() -> Path:
    """The folder of initdb and pg_ctl; without them the test is skipped, in CI it fails."""
    found = shutil.which("pg_ctl")
    folders = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    usable = [folder for folder in folders if (folder / "initdb").exists()]
    if usable:
        return usable[-1]
    message = "PostgreSQL is not installed (Debian: postgresql)"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


class Server:
    """Started when made; it may crash and start again."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        # A socket's path may have about 100 letters, which pytest's folders exceed; other users cannot enter those.
        self._folder = Path(tempfile.mkdtemp(prefix="lwpg"))
        self._binaries, self._log = binaries, self._folder / "log"
        if os.geteuid() == 0:
            shutil.chown(self._folder, _system_user())
        self._run("initdb", "-D", self._data, "-U", "lengthwise", "--auth=trust", "-E", "UTF8", "--no-sync")
        self.start()

    @property
    def _data(self) -> str:
        return str(self._folder / "data")

    def place(self, schema: str) -> str:
        """The URL of a ledger in a schema."""
        return f"postgresql:///postgres?host={self._folder}&port={PORT}&user=lengthwise&schema={schema}"

    def start(self) -> None:
        options = f"-p {PORT} -k {self._folder} -c listen_addresses= -c max_connections=50 -c fsync=off"
        self._run("pg_ctl", "-D", self._data, "-o", options, "-l", str(self._log), "-w", "start")

    def crash(self) -> None:
        """Ends at once, nothing written that was not yet."""
        self._run("pg_ctl", "-D", self._data, "-m", "immediate", "-w", "stop")

    @contextlib.contextmanager
    def hanging(self) -> Iterator[None]:
        """Stop the server's processes for the time of the block."""
        first = (Path(self._data) / "postmaster.pid").read_text().split()[0]
        pids = [int(pid) for pid in [*Path(f"/proc/{first}/task/{first}/children").read_text().split(), first]]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def stop(self) -> None:
        self._run("pg_ctl", "-D", self._data, "-m", "immediate", "-w", "stop")
        shutil.rmtree(self._folder)

    def _run(self, program: str, *words: str) -> None:
        command = [str(self._binaries / program), *words]
        if os.geteuid() == 0:  # PostgreSQL refuses root
            command = ["setpriv", f"--reuid={_system_user()}", "--regid=nogroup", "--clear-groups", *command]
        reported = self._folder / "report"
        with reported.open("a") as out:  # no pipe: the server would keep it open
            done = subprocess.run(
                command, check=False, cwd="/", timeout=LIMIT_S, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        logs = [file.read_text()[-1000:] for file in (reported, self._log) if file.exists()]
        assert done.returncode == 0, f"{program}: {logs}"


def _system_user() -> str:
    """The user that Debian's package creates, else the user nobody."""
    users = Path("/etc/passwd").read_text().splitlines()
    return next((name for line in users if (name := line.split(":")[0]) == "postgres"), "nobody")
