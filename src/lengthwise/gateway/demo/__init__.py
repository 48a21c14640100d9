"""The demo: two engines of this machine, a load, FCFS against ISRTF side by side, a verdict after a minute."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

from lengthwise.gateway.demo import engines as _engines
from lengthwise.gateway.demo.comparison import Gain, decision, gain, race, shown, waiting
from lengthwise.schema.errors import InputError

__all__ = ["Gain", "run"]

_HERE = Path(".engines/vllm/bin/python")
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
    """Runs the demo, prints it, and returns what it showed: ``lengthwise serve --demo [--engine-python PYTHON]``.

    Two vLLMs run on the CPU where an interpreter with vLLM is given (or named by LENGTHWISE_ENGINE_PYTHON, or
    found in .engines/vllm); else two emulated engines, and it says so. The same bursts of requests go through two
    gateways in turns, FCFS at ``port`` and ISRTF at ``port`` + 2, each with its admin page at ``admin_port`` and + 2; 0
    picks free ports. Requests and lengths are made up (wide around what such questions call for); the predictor is
    the shipped one and sees the prompts alone.

    Args:
        engine_python: The interpreter of an environment with vLLM for CPUs; "emulated" uses none even if there is.
        port: Of the first gateway's clients.
        admin_port: Of the first gateway's page.
        seconds: How long rounds begin; starting vLLM comes on top of it (about a minute).
        seed: Of the requests.
        requests: Of a burst.

    Raises:
        InputError: The interpreter is not there, or a port is taken.
        EngineError: The engines do not start.
        MissingExtraError: The extra ``gateway`` is not installed.
    """
    from lengthwise.gateway.serve import require_extra

    require_extra()
    python = _python(engine_python)
    if python is None:
        _say("Two emulated engines, no vLLM (real time, toy text); --engine-python PYTHON takes real ones.")
    else:
        _say(f"Two vLLMs on this CPU, by {python}. Loading takes one to three minutes; Ctrl-C ends everything.")
    with contextlib.ExitStack() as stack:
        with waiting("loading both engines"):
            up = stack.enter_context(_engines.emulated() if python is None else _engines.on_cpu(python))
        _say(
            f"The same bursts of {requests} made-up requests go through two gateways in turns, about {seconds:.0f} s "
            "long: one serves first come, first served (FCFS), the other shortest predicted first (ISRTF). JCT is the "
            "time from asking to the whole answer."
        )
        ports = [(port, admin_port), (port and port + 2, admin_port and admin_port + 2)]
        with shown(up.what) as look:
            sides = asyncio.run(race(up, ports, seconds=seconds, seed=seed, requests=requests, poll=look))
    found = gain(sides)
    _say(decision(up.what, found))
    return found


def _python(given: str | None) -> str | None:
    """The interpreter to use; None: emulated engines."""
    if given == "emulated":
        return None
    named = given or os.environ.get(_VARIABLE)
    if named is not None:
        if not Path(named).exists():
            raise InputError(
                f"the engine's interpreter must be there: {named}. Give --engine-python PYTHON, or leave it out"
            )
        return str(Path(named).absolute())
    return str(_HERE.absolute()) if _HERE.exists() else None


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
