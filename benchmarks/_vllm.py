"""A real vLLM on this machine's CPU: its environment, its start, and runs with its log and processor time."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _circle import iterations_of
from _harness import group_use

from lengthwise import Deployment, Workload
from lengthwise.backend import vllm_launch
from lengthwise.backend.openai_protocol import Server
from lengthwise.backend.process import LocalEngine, local_engine, reserved_port
from lengthwise.gateway.demo.engines import MAKE_MODEL
from lengthwise.measure.load import LoadSettings, bench
from lengthwise.schema.records import RunResult

FOLDER = Path(__file__).parent
PYTHON = FOLDER.parent / ".engines" / "vllm" / "bin" / "python"
QUIET = dict.fromkeys(("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK"), "1")
QUIET |= {"OMP_NUM_THREADS": "1", "KMP_BLOCKTIME": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""One thread that sleeps when it waits: two on a shared machine cost ten times the time."""


def require() -> str:
    if not PYTHON.exists():
        raise FileNotFoundError(f"no real engine in {PYTHON.parents[1]}: make engine")
    return str(PYTHON)


def make_model(folder: Path, size: str) -> Path:
    subprocess.run([require(), str(MAKE_MODEL), str(folder), size], check=True, capture_output=True, timeout=300)
    return folder


@contextlib.contextmanager
def served(deployment: Deployment, model: Path, log_path: Path, *words: str) -> Iterator[LocalEngine]:
    """Serve the deployment by vLLM on one CPU thread that logs its iterations and imports this package's source."""
    with reserved_port() as port:
        launch = vllm_launch(deployment, model=str(model), served_name=model.name, port=port, device="cpu")
        module = (require(), "-m", "vllm.entrypoints.openai.api_server", "--model")  # no console script there
        command = [*module, *launch.command[2:], "--enable-logging-iteration-details", *words]
        env = QUIET | launch.environment | {"VLLM_CACHE_ROOT": str(model.parent / "cache")}
        env["PYTHONPATH"] = str(FOLDER.parent / "src")
        with local_engine(command, port=port, env=env, log_path=log_path) as engine:
            yield engine


@dataclass
class Watched:
    """A served engine under load, with its processor time in the records of each run, and its log's iterations.

    ``out`` receives the log that a calibration reads; ``group`` is the engine's process group. With ``scrape`` records
    contain the server's counters, which count steps where the log's seconds do not.
    """

    url: str
    model: str
    log: Path
    group: int
    out: Path
    scrape: bool = False
    deployment: Mapping[str, Any] | None = None
    message: bytes = b""

    def bench(self, workload: Workload) -> RunResult:
        """Run ``bench``; remember the engine's log of the run."""
        at, cpu_s, load = self.log.stat().st_size, group_use(self.group)[0], os.getloadavg()[0]
        server = Server(self.url, self.model, body={"temperature": 0})
        measured = bench(server, workload, LoadSettings(scrape=self.scrape), deployment=self.deployment)
        known = {"engine_cpu_s": round(group_use(self.group)[0] - cpu_s, 2), "load_1m": load}
        time.sleep(0.5)  # its log is behind
        with self.log.open("rb") as file:
            file.seek(at)
            self.message = file.read()
        return replace(measured, metadata={**measured.metadata, **known})

    def named(self, name: str) -> None:
        if name.endswith("-half-0"):
            lines = (line for line in self.message.splitlines() if b"Iteration(" in line)
            iterations_of(self.out, name).write_bytes(b"\n".join(lines))
