"""The wheel and the source distribution install in an empty environment and work there without a checkout.

A job of .github/workflows/ci.yml runs this file on three systems, with nothing installed but uv, pytest and hypothesis.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_WHEEL_BYTES = 10e6
SMALL = ("--set", "workload.num_requests=100", "--seeds", "2")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]


def variables(**more: str) -> dict[str, str]:
    """The environment without the traces of a checkout."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")} | more


def run(*words: object, cwd: Path, **more: str) -> str:
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=variables(**more), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the wheel, which is built from the source distribution, and an environment with it alone."""
    folder = tmp_path_factory.mktemp("wheel")
    uv = [sys.executable, "-m", "uv"]
    run(*uv, "build", "--quiet", "--out-dir", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    run(*uv, "venv", "--quiet", "--python", sys.executable, folder / "env", cwd=folder)
    run(*uv, "pip", "install", "--quiet", "--python", folder / "env", f"{wheel}[report,ui]", cwd=folder)
    return folder


@pytest.fixture(scope="module")
def program(built):
    return next((built / "env").glob("*/lengthwise*"))


def test_the_version_is_the_same_everywhere():
    image = f"lengthwise-gateway:{VERSION}"
    assert f"version: {VERSION}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"newTag: {VERSION}\n" in (ROOT / "deploy/overlays/production/kustomization.yaml").read_text("utf-8")
    assert image in (ROOT / "deploy/Containerfile").read_text("utf-8")
    assert image in (ROOT / "src/lengthwise/backend/kubernetes.py").read_text("utf-8")


@pytest.mark.slow
def test_the_distributions_are_small_and_complete(built):
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "src/lengthwise/cli/program.py", "examples/chat-70b.toml"} <= names


@pytest.mark.slow
def test_the_installed_program_runs_its_examples(built, program, tmp_path):
    assert run(program, "--version", cwd=tmp_path).strip() == f"lengthwise {VERSION}"
    assert "no problem found" in run(program, "doctor", cwd=tmp_path)
    run(program, "examples", "--copy", "examples", cwd=tmp_path)
    printed = run(program, "simulate", "examples/chat-70b.toml", *SMALL, "--report", "report.html", cwd=tmp_path)
    assert "TTFT" in printed
    assert (tmp_path / "report.html").stat().st_size < 1.5e6
    assert "Orca" in (tmp_path / "report.html").read_text("utf-8")


@pytest.mark.slow
def test_the_installed_planner_answers(program, tmp_path):
    command = [program, "ui", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, env=variables(), stdout=subprocess.PIPE, text=True) as server:
        try:
            url = re.search(r"http://\S+", server.stdout.readline())[0]
            with urllib.request.urlopen(url, timeout=60) as page:
                assert "lengthwise" in page.read().decode()
        finally:
            server.terminate()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None or os.name == "nt", reason="a completion of bash, where there is one")
def test_a_shell_completes_commands_and_names(program, tmp_path):
    """As bash does it: the script of --show-completion, then its function for the words on the line."""

    def completed(*words: str) -> list[str]:
        line = " ".join(words)
        script = f"""source <({program} --show-completion bash)
        COMP_WORDS=(lengthwise {line}); COMP_CWORD={len(words)}; _lengthwise_completion lengthwise
        printf '%s\\n' "${{COMPREPLY[@]}}" """
        path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
        return run("bash", "-c", script, cwd=tmp_path, PATH=path).split()

    assert completed("simu") == ["simulate"]
    assert completed("simulate", "--model", "llama-3.3-7") == ["llama-3.3-70b"]
    assert completed("search", "--gpu", "H100,L40") == ["H100,L40S"]


def test_the_container_file_is_one_that_builders_read():
    """Without a container engine: known instructions, stages that exist, commands in the form of a list."""
    text = re.sub(r"\\\n", " ", (ROOT / "deploy/Containerfile").read_text("utf-8"))
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    known = {"ARG", "FROM", "ENV", "WORKDIR", "COPY", "RUN", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in lines} <= known
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", text, re.MULTILINE))
    assert set(re.findall(r"--from=(\w+)", text)) <= stages
    commands = [
        json.loads(words[words.index("[") :]) for name, words in lines if name in ("ENTRYPOINT", "CMD", "HEALTHCHECK")
    ]
    assert ["lengthwise", "serve"] in commands
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["build"]["targets"]["wheel"]
    copied = {word for name, words in lines if name == "COPY" for word in words.split()[:-1]}
    assert {*hatch["force-include"]} <= copied  # what the wheel is built of
    assert all(isinstance(word, str) for command in commands for word in command)
