"""Run the demo's two engines: vLLMs on this machine's CPU, or emulated ones."""

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
NUM_ENGINES, MAX_NUM_SEQS = 2, 4
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"  # two processes would busy-wait for each other
_ENGINE_SIDE = Path(__file__).parent / "engine_side"
MAKE_MODEL = _ENGINE_SIDE / "make_model.py"  # run by an engine's interpreter: FOLDER [SIZE]
_STEP_S, _DECODE_S, _PROMPT_S = 0.012, 0.001, 0.0001
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1",
    "KMP_BLOCKTIME": "0",  # waiting threads sleep
    "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Engines:
    """Two running engines."""

    urls: tuple[str, ...]
    description: str
    tokens_per_s: float  # output rate of both together with full batches
    shrink: float  # divisor of the demo's output lengths


@contextmanager
def emulated() -> Iterator[Engines]:
    """Run two emulated engines in one process. Raises EngineError if they do not start."""
    steps = {"fixed-s": _STEP_S, "decode-s": _DECODE_S, "prompt-token-s": _PROMPT_S, "max-num-seqs": MAX_NUM_SEQS}
    options = [word for name, value in steps.items() for word in (f"--{name}", f"{value:g}")]
    module = [sys.executable, "-m", "lengthwise.testing.engine_server", "--model", MODEL]
    # stderr goes to a file: the messages about disconnected clients would fill a pipe.
    with tempfile.TemporaryFile("w+") as errors:
        command = [*module, "--count", str(NUM_ENGINES), *options]
        process = subprocess.Popen(  # noqa: S603 - a module of this package
            command, stdout=subprocess.PIPE, stderr=errors, text=True, process_group=0
        )
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                status = process.wait()
                errors.seek(0)
                raise EngineError(f"the emulated engines exited with status {status}:\n{errors.read()[-1500:]}")
            rate = NUM_ENGINES * MAX_NUM_SEQS / (_STEP_S + MAX_NUM_SEQS * _DECODE_S)
            description = f"{NUM_ENGINES} emulated engines (toy text, real time)"
            yield Engines(tuple(json.loads(line)["urls"]), description, rate, 8.0)
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()


@contextmanager
def on_cpu(python: str) -> Iterator[Engines]:
    """Run two vLLMs with a model of random weights, one thread each. Raises EngineError if they do not start."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = Path(folder) / MODEL
        result = subprocess.run(  # noqa: S603 - the user's interpreter, this package's script
            [python, str(MAKE_MODEL), str(model)], capture_output=True, text=True, check=False
        )
        if result.returncode:
            errors = result.stderr[-1500:]
            raise EngineError(f"{python} cannot make a model; it needs torch and transformers:\n{errors}")
        urls = asyncio.run(_start_all(stack, python, model, Path(folder)))
        yield Engines(urls, f"{NUM_ENGINES} vLLMs on this CPU (random weights, one thread each)", 350.0, 10.0)


async def _start_all(stack: ExitStack, python: str, model: Path, folder: Path) -> tuple[str, ...]:
    aborted = threading.Event()

    def start(number: int) -> str:
        place = folder / f"engine-{number}"
        place.mkdir()
        return _start(stack, python, model, place, aborted)

    try:
        return tuple(await asyncio.gather(*(asyncio.to_thread(start, number) for number in range(NUM_ENGINES))))
    except BaseException:
        aborted.set()
        raise


def abortable_sleep(aborted: threading.Event) -> Callable[[float], None]:
    """Return a sleep function whose first call after ``aborted`` is set raises EngineError.

    Later calls sleep as usual: they wait for the engine to stop.
    """
    has_raised = False

    def sleep(seconds: float) -> None:
        nonlocal has_raised
        if has_raised:
            time.sleep(seconds)
        elif aborted.wait(seconds):
            has_raised = True
            raise EngineError("the start was aborted")

    return sleep


def _start(stack: ExitStack, python: str, model: Path, place: Path, aborted: threading.Event) -> str:
    from lengthwise.backend.process import local_engine, reserved_port

    flags = {
        "model": str(model), "served-model-name": MODEL, "host": "127.0.0.1", "dtype": "float32",
        "max-model-len": "2048", "max-num-seqs": str(MAX_NUM_SEQS), "generation-config": "vllm",
        "middleware": "forced_length.ForcedLength", "distributed-executor-backend": ONE_PROCESS,
    }  # fmt: skip
    options = [word for name, value in flags.items() for word in (f"--{name}", value)]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", *options, "--enforce-eager", "--port"]
    paths = os.pathsep.join([str(_ENGINE_SIDE), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = _ENVIRONMENT | {"VLLM_CACHE_ROOT": str(place / "cache"), "PYTHONPATH": paths}
    sleep = abortable_sleep(aborted)
    # Threads must not enter a context on the shared stack concurrently.
    with reserved_port() as port, contextlib.ExitStack() as own:
        engine = local_engine(
            [*command, str(port)], port=port, env=env, log_path=place / "log", ready_s=600.0, pause=sleep
        )
        url = own.enter_context(engine).url
        stack.push(own.pop_all())
    return url
