"""Compare FCFS and ISRTF on two engines of this machine, with a result after about a minute."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

from lengthwise.gateway.demo import engines as _engines
from lengthwise.gateway.demo.comparison import Gain, decision, gain, live_table, progress, race
from lengthwise.schema.errors import InputError

__all__ = ["Gain", "run"]

_DEFAULT_PYTHON = Path(".engines/vllm/bin/python")
_VARIABLE = "LENGTHWISE_ENGINE_PYTHON"


def run(
    engine_python: str | None = None,
    *,
    port: int = 8000,
    admin_port: int = 8001,
    seconds: float = 60.0,
    seed: int = 0,
    requests: int = 48,
) -> Gain:
    """Run and print the demo (``lengthwise serve --demo [--engine-python PYTHON]``), and return the gain.

    The engines are two vLLMs on the CPU if there is an interpreter with vLLM: ``engine_python``, the value of the
    environment variable LENGTHWISE_ENGINE_PYTHON, or .engines/vllm. Otherwise, and for "emulated", they are two
    emulated engines. The same bursts of ``requests`` synthetic requests go through two gateways in turns, FCFS at
    ``port`` and ISRTF at ``port`` + 2, with admin pages at ``admin_port`` and ``admin_port`` + 2; 0 picks free ports.
    After two rounds, no round starts after ``seconds``. Raises InputError if the interpreter does not exist or a port
    is taken, EngineError if the engines do not start, and MissingExtraError.
    """
    from lengthwise.gateway.serve import require_extra

    require_extra()
    python = find_interpreter(engine_python)
    if python is None:
        _print("Two emulated engines, no vLLM (real time, toy text); --engine-python PYTHON uses real ones.")
    else:
        _print(f"Two vLLMs on this CPU, by {python}. Loading takes one to three minutes; Ctrl-C stops everything.")
    with contextlib.ExitStack() as stack:
        with progress("loading both engines"):
            engines = stack.enter_context(_engines.emulated() if python is None else _engines.on_cpu(python))
        _print(
            f"The same bursts of {requests} synthetic requests go through two gateways in turns, for about "
            f"{seconds:.0f} s: one serves first come, first served (FCFS), the other shortest predicted first (ISRTF). "
            "JCT is the time from the request to the complete response."
        )
        ports = [(port, admin_port), (port and port + 2, admin_port and admin_port + 2)]
        with live_table(engines.description) as show:
            sides = asyncio.run(race(engines, ports, seconds=seconds, seed=seed, requests=requests, show=show))
    found = gain(sides)
    _print(decision(engines.description, found))
    return found


def find_interpreter(given: str | None) -> str | None:
    """Return the path of the interpreter with vLLM, or None for emulated engines."""
    if given == "emulated":
        return None
    path = given or os.environ.get(_VARIABLE)
    if path is None:
        return str(_DEFAULT_PYTHON.absolute()) if _DEFAULT_PYTHON.exists() else None
    if not Path(path).exists():
        advice = "Give --engine-python PYTHON, or leave it out"
        raise InputError(f"the engine's interpreter must exist; {path} does not. {advice}")
    return str(Path(path).absolute())


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
