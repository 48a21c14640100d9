"""A real vLLM on this machine's CPU: its environment, its start, the processor time it takes."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from lengthwise import Deployment
from lengthwise.backend import vllm_launch
from lengthwise.backend.process import LocalEngine, free_port, local_engine

HERE = Path(__file__).parent
PYTHON = HERE.parent / ".engines" / "vllm" / "bin" / "python"
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    # One thread that sleeps when it waits: two on a shared machine cost ten times the time.
    "OMP_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def require() -> str:
    """The interpreter of the engine's environment; raises FileNotFoundError that says how to make it."""
    if not PYTHON.exists():
        raise FileNotFoundError(f"no real engine in {PYTHON.parents[1]}: make engine")
    return str(PYTHON)


def make_model(folder: Path, size: str) -> Path:
    """A folder with a model of random weights and its tokenizer."""
    words = [require(), str(HERE / "engines" / "make_model.py"), str(folder), size]
    subprocess.run(words, check=True, capture_output=True, timeout=300)
    return folder


@contextlib.contextmanager
def served(deployment: Deployment, model: Path, log_path: Path) -> Iterator[LocalEngine]:
    """The deployment served by a vLLM on one thread, its iterations logged."""
    port = free_port()
    launch = vllm_launch(deployment, model=str(model), served_name=model.name, port=port, device="cpu")
    module = (require(), "-m", "vllm.entrypoints.openai.api_server", "--model")  # no console script there
    command = [*module, *launch.command[2:], "--enable-logging-iteration-details"]
    env = QUIET | launch.environment | {"VLLM_CACHE_ROOT": str(log_path.parent / "cache")}
    with local_engine(command, port=port, env=env, log_path=log_path) as engine:
        yield engine


def cpu_seconds(group: int) -> float:
    """Processor time that the living processes of a group have had; 0 where there is no /proc."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = stat.read_text().rsplit(")", 1)[1].split()
            if int(words[2]) == group:
                ticks += int(words[11]) + int(words[12])
    return ticks / 100
