"""``lengthwise doctor``."""

from __future__ import annotations

import json as json_module
import os
import platform
import re
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from lengthwise.cli.tables import print_properties

EXAMPLES = """\b
Examples:
  lengthwise doctor
  lengthwise doctor --json
"""
ENGINES = {"vllm": "vllm", "sglang": "sglang", "tensorrt-llm": "trtllm-serve", "llama.cpp": "llama-server"}
"""Engines that run on this machine: the distribution of each, or its name, and its program."""


def run(json: Annotated[bool, Option("--json", help="Print JSON instead of tables.")] = False) -> None:
    """Check this installation: versions, compiled code, processors, optional parts, engines and GPUs.

    Exits with 1 if a required package is missing, or the cache of compiled code cannot be written.
    """
    found = checked()
    if json:
        typer.echo(json_module.dumps(found, indent=2))
    else:
        for title, properties in found.items():
            if isinstance(properties, dict):
                print_properties(title, [(name, str(value)) for name, value in properties.items()])
        for problem in found["problems"]:
            typer.echo(f"problem: {problem}", err=True)
        if not found["problems"]:
            typer.echo("no problem found")
    if found["problems"]:
        raise typer.Exit(1)


def checked() -> dict[str, Any]:
    """Return what is installed and found on this machine, by title, and ``problems``, a list of sentences."""
    from lengthwise import _jit, engine
    from lengthwise.search.workers import available_cpus

    required, extras = _packages()
    missing = [name for name, version in required.items() if version is None]
    problems = [f"{name} is not installed; run pip install lengthwise again" for name in missing]
    cache = _jit.cache_folder()
    if obstacle := _unwritable(cache):
        problems.append(f"compiled code cannot be cached in {cache} ({obstacle}); set LENGTHWISE_CACHE_DIR to a folder")
    compiled = (
        "yes"
        if engine.ready()
        else "no: the first run compiles it, about half a minute on one core; small runs do not wait"
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return {
        "lengthwise": {
            "version": metadata.version("lengthwise"),
            "Python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
            "processors": available_cpus(),
            "memory": f"{memory / 2**30:.1f} GiB" if memory else "unknown",
            "cache": str(cache),
            "simulator compiled": compiled,
        }
        | {name: version or "missing" for name, version in required.items()},
        "optional parts": {
            extra: "yes" if not lacking else f"no: pip install 'lengthwise[{extra}]' (lacks {', '.join(lacking)})"
            for extra, lacking in extras.items()
        },
        "engines": {name: _engine(name, program) for name, program in ENGINES.items()},
        "GPUs": {f"GPU {number}": text for number, text in enumerate(_gpus())} or {"GPUs": "none found by nvidia-smi"},
        "problems": problems,
    }


def _packages() -> tuple[dict[str, str | None], dict[str, list[str]]]:
    """Return the version of each required package (None: missing), and for each extra the packages that it lacks."""
    required: dict[str, str | None] = {}
    names = metadata.metadata("lengthwise").get_all("Provides-Extra") or ()
    extras: dict[str, list[str]] = {name: [] for name in names}
    for requirement in metadata.requires("lengthwise") or ():
        name, _, marker = requirement.partition(";")
        name = re.split(r"[\[<>=!~ (]", name.strip(), maxsplit=1)[0]
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = None
        if extra := re.search(r"extra == ['\"]([^'\"]+)['\"]", marker):
            if version is None and ("Windows" not in marker or platform.system() != "Windows"):
                extras[extra[1]].append(name)
        else:
            required[name] = version
    return required, extras


def _unwritable(folder: Path) -> str:
    """Return why no file can be written in a folder, or "" if one can. The folder is created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _engine(name: str, program: str) -> str:
    try:
        return f"{metadata.version(name)}, in this environment"
    except metadata.PackageNotFoundError:
        path = shutil.which(program)
        return path or "not found"


def _gpus() -> list[str]:
    if (program := shutil.which("nvidia-smi")) is None:
        return []
    command = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)  # noqa: S603 - found on PATH
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
