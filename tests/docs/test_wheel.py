"""The wheel and the source distribution install in an empty environment and work there without a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
MAX_WHEEL_BYTES = 10e6


def run(*words: object, cwd: Path) -> str:
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the wheel, which is built from the source distribution, and an environment with it alone."""
    folder = tmp_path_factory.mktemp("wheel")
    run(UV, "build", "--quiet", "--out-dir", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    run(UV, "venv", "--quiet", "--python", sys.executable, folder / "env", cwd=folder)
    run(UV, "pip", "install", "--quiet", "--python", folder / "env", f"{wheel}[report]", cwd=folder)
    return folder


@pytest.mark.slow
def test_the_distributions_are_small_and_complete(built):
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "src/lengthwise/cli/program.py", "examples/chat-70b.toml"} <= names


@pytest.mark.slow
def test_the_installed_program_runs_its_examples(built, tmp_path):
    program = built / "env" / "bin" / "lengthwise"
    assert "no problem found" in run(program, "doctor", cwd=tmp_path)
    run(program, "examples", "--copy", "examples", cwd=tmp_path)
    small = ("--set", "workload.num_requests=100", "--seeds", "2")
    printed = run(program, "simulate", "examples/chat-70b.toml", *small, "--report", "report.html", cwd=tmp_path)
    assert "TTFT" in printed
    assert (tmp_path / "report.html").stat().st_size < 1.5e6
    assert "Orca" in (tmp_path / "report.html").read_text()
