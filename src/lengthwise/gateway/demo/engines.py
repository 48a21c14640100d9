"""The demo's two engines: vLLM on this machine's CPU where there is one, else emulated ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from lengthwise.schema.errors import EngineError

MODEL = "tiny"
COUNT, SEATS = 2, 4
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Model and scheduler in one process: as two they wait for each other in busy loops."""
_SIDE = Path(__file__).parent / "engine_side"
MAKE_MODEL = _SIDE / "make_model.py"
"""Run by an engine's interpreter: FOLDER [SIZE]."""
_STEP_S, _DECODE_S, _PROMPT_S = 0.012, 0.001, 0.0001
_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "0",  # a thread that waits sleeps
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


@dataclass(frozen=True)
class Engines:
    """Two that run.

    Attributes:
        urls: Where.
        what: In words.
        tokens_per_s: About what they make together with full batches.
        shrink: Lengths are divided by it.
    """

    urls: tuple[str, ...]
    what: str
    tokens_per_s: float
    shrink: float


@contextmanager
def emulated() -> Iterator[Engines]:
    """Two emulated engines in a process of their own.

    Raises:
        EngineError: They did not start.
    """
    steps = {"fixed-s": _STEP_S, "decode-s": _DECODE_S, "prompt-token-s": _PROMPT_S, "max-num-seqs": SEATS}
    words = [word for name, value in steps.items() for word in (f"--{name}", f"{value:g}")]
    module = [sys.executable, "-m", "lengthwise.testing.engine_server", "--model", MODEL]
    command = [*module, "--count", str(COUNT), *words]
    said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed below; of clients that are cut it says much
    process = subprocess.Popen(  # noqa: S603 - our own
        command, stdout=subprocess.PIPE, stderr=said, text=True, process_group=0
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            status = process.wait()
            said.seek(0)
            raise EngineError(f"the emulated engines ended with status {status}:\n{said.read()[-1500:]}")
        rate = COUNT * SEATS / (_STEP_S + SEATS * _DECODE_S)
        yield Engines(tuple(json.loads(line)["urls"]), f"{COUNT} emulated engines (toy text, real time)", rate, 8.0)
    finally:
        process.terminate()
        process.wait()
        said.close()
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def on_cpu(python: str) -> Iterator[Engines]:
    """Two vLLMs with a model of random weights, one thread each.

    Args:
        python: The interpreter of an environment with vLLM for CPUs.

    Raises:
        EngineError: They did not start; with the last lines of their log.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = Path(folder) / MODEL
        made = subprocess.run(  # noqa: S603 - the user's interpreter, our script
            [python, str(MAKE_MODEL), str(model)], capture_output=True, text=True, check=False
        )
        if made.returncode:
            raise EngineError(f"{python} cannot make a model; it needs torch and transformers:\n{made.stderr[-1500:]}")
        urls = asyncio.run(_both(stack, python, model, Path(folder)))
        yield Engines(urls, f"{COUNT} vLLMs on this CPU (random weights, one thread each)", 350.0, 10.0)


async def _both(stack: ExitStack, python: str, model: Path, folder: Path) -> tuple[str, ...]:
    """URLs of both, which start side by side; the stack ends them. Once one fails nobody waits for the other."""
    given_up = threading.Event()

    def up(number: int) -> str:
        place = folder / f"engine-{number}"
        place.mkdir()
        return _started(stack, python, model, place, given_up)

    try:
        return tuple(await asyncio.gather(*(asyncio.to_thread(up, number) for number in range(COUNT))))
    except BaseException:
        given_up.set()
        raise


def _timeout(given_up: threading.Event) -> Callable[[float], None]:
    """Waits so many seconds; raises EngineError once, when it is given up: an engine is still to be stopped then."""
    told = False

    def pause(seconds: float) -> None:
        nonlocal told
        if told:
            time.sleep(seconds)
        elif given_up.wait(seconds):
            told = True
            raise EngineError("the start was given up")

    return pause


def _started(stack: ExitStack, python: str, model: Path, place: Path, given_up: threading.Event) -> str:
    from lengthwise.backend.process import free_port, local_engine

    port = free_port()
    flags = {
        "model": str(model),
        "served-model-name": MODEL,
        "host": "127.0.0.1",
        "port": str(port),
        "dtype": "float32",
        "max-model-len": "2048",
        "max-num-seqs": str(SEATS),
        "generation-config": "vllm",
        "middleware": "forced_length.ForcedLength",
        "distributed-executor-backend": ONE_PROCESS,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", *words, "--enforce-eager"]
    paths = os.pathsep.join([str(_SIDE), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = _QUIET | {"VLLM_CACHE_ROOT": str(place / "cache"), "PYTHONPATH": paths}
    one = local_engine(command, port=port, env=env, log_path=place / "log", ready_s=600.0, pause=_timeout(given_up))
    with contextlib.ExitStack() as mine:
        url = mine.enter_context(one).url
        stack.push(mine.pop_all())
    return url
