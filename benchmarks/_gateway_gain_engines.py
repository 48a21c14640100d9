"""Two engines behind the gateway: CPU vLLMs on one thread each, or emulated ones."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import _vllm
from _gateway_gain_load import MODEL
from _gateway_procs import running, told

from lengthwise.backend.process import free_port, local_engine
from lengthwise.gateway.demo import engine_side

COUNT = 2
STEP_S, SEQ_S, PROMPT_S = 0.010, 0.001, 0.0001
"""Of emulated engines: about what a tiny model takes on a core of its own."""
MAX_MODEL_LEN = 1536
ONE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Model and scheduler in one process: as two they wait for each other in busy loops, which two cores cannot bear."""


@contextmanager
def real(batch: int) -> Iterator[list[str]]:
    """URLs of two vLLMs that are told lengths by ``vllm_xargs``; they start side by side.

    Raises:
        FileNotFoundError: No engine is installed.
    """
    from concurrent.futures import ThreadPoolExecutor

    python = _vllm.require()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        place = Path(folder)
        model = _vllm.make_model(place / MODEL, "tiny")

        def up(number: int) -> contextlib.AbstractContextManager[object]:
            one = _vllm_of(python, model, place / f"engine-{number}", batch)
            url = one.__enter__().url
            stack.push(one)
            return url

        with ThreadPoolExecutor(COUNT) as pool:
            urls = list(pool.map(up, range(COUNT)))
        yield urls


def _vllm_of(python: str, model: Path, place: Path, batch: int) -> contextlib.AbstractContextManager:
    place.mkdir()
    port = free_port()
    flags = {
        "model": str(model),
        "served-model-name": MODEL,
        "host": "127.0.0.1",
        "port": str(port),
        "dtype": "float32",
        "max-model-len": str(MAX_MODEL_LEN),
        "max-num-seqs": str(batch),
        "max-num-batched-tokens": "2048",
        "generation-config": "vllm",
        "middleware": "forced_length.ForcedLength",
        "distributed-executor-backend": ONE_PROCESS,
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", *words]
    command += ["--enforce-eager", "--disable-uvicorn-access-log"]
    paths = [str(Path(engine_side.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = _vllm.QUIET | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(place / "cache"),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    return local_engine(command, port=port, env=env, log_path=place / "log", ready_s=600.0)


@contextmanager
def emulated(batch: int) -> Iterator[list[str]]:
    """URLs of two emulated engines in a process of their own."""
    steps = {"fixed-s": STEP_S, "decode-s": SEQ_S, "prompt-token-s": PROMPT_S, "max-num-seqs": batch}
    words = [word for name, value in steps.items() for word in (f"--{name}", f"{value:g}")]
    argv = [sys.executable, "-m", "lengthwise.testing.engine_server", "--count", str(COUNT), "--model", MODEL]
    with running([*argv, *words], os.sched_getaffinity(0)) as (process, log):
        yield told(process, log)["urls"]
