"""The image and its manifests speak of the same user, cache and port; what it installs is known by hash."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rendered_manifests import DEPLOY, ROOT, container, gateway

from lengthwise.gateway.edge.app import route

TEXT = (DEPLOY / "Containerfile").read_text()
REPLICAS = runpy.run_path(str(DEPLOY / "replicas.py"))


def test_user_and_cache_are_those_of_the_deployment():
    one = gateway("base")
    assert f"USER {one['securityContext']['runAsUser']}:{one['securityContext']['runAsGroup']}" in TEXT
    assert TEXT.rindex("USER ") < TEXT.index("RUN python /opt/lengthwise/warm.py")  # it owns what it compiles
    (before,) = one["initContainers"]
    assert f"LENGTHWISE_CACHE_DIR={before['command'][-2].removesuffix('/.')} " in TEXT
    assert before["image"] == container(one)["image"]
    assert "NUMBA_CPU_NAME=generic" in TEXT  # else its code is good on the builder's CPU alone


def test_the_health_check_uses_an_open_route():
    path = re.search(r"127\.0\.0\.1:8000(/\w+)", TEXT)[1]
    assert route({"path": path, "method": "GET"}).is_open


def test_copied_files_exist():
    for sources in re.findall(r"^COPY (?!--from)(.+)$", TEXT, re.MULTILINE):
        *files, _ = sources.split()
        assert all((ROOT / file).exists() for file in files)


def test_extras_exist_and_the_builder_is_the_projects_own():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert set(re.findall(r"--extra (\w+)", TEXT)) <= set(project["project"]["optional-dependencies"])
    build = (DEPLOY / "build.txt").read_text()
    version = re.search(r"^UV_VERSION := (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert f"uv=={version} " in build
    assert "hatchling==" in build
    assert_hashed(build)


def test_all_that_is_installed_has_a_hash():
    uv = Path(sys.executable).parent / "uv"
    if not uv.exists():
        pytest.skip("uv is not here (make setup puts it into .venv)")
    options = ["--quiet", "--frozen", "--no-dev", "--no-emit-project", "--extra", "gateway", "--extra", "envoy"]
    options += ["--extra", "tracing"]
    done = subprocess.run([uv, "export", *options], cwd=ROOT, check=True, capture_output=True, text=True)
    assert_hashed(done.stdout)
    assert re.search(r"^uvicorn==", done.stdout, re.MULTILINE)


def assert_hashed(requirements: str) -> None:
    """Every requirement is of one version, by hash."""
    complete = re.sub(r"\\\n", " ", requirements)
    lines = [line for line in complete.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert lines
    assert [line for line in lines if "==" not in line or "--hash=sha256:" not in line] == []


def test_more_queues_never_order_better():
    """Small worlds, in which every gateway's loss is large."""
    mean = {
        (gateways, split): REPLICAS["mean_and_p99_s"](gateways, 0.97, 30_000, split=split)[0]
        for gateways in (1, 4)
        for split in (False, True)
    }
    fcfs, _ = REPLICAS["mean_and_p99_s"](1, 0.97, 30_000, shortest=False)
    assert mean[1, False] == pytest.approx(mean[1, True])
    assert mean[1, False] < mean[4, False] < mean[4, True]
    assert mean[1, False] < fcfs


@pytest.mark.slow
def test_the_table_of_replicas_is_what_is_simulated():
    text = (DEPLOY / "README.md").read_text()
    for row in REPLICAS["rows"](400_000):
        assert row in text


@pytest.mark.slow
def test_what_is_compiled_for_the_image_is_compiled(tmp_path):
    """All of it, once: a second time nothing is."""
    command = [sys.executable, str(DEPLOY / "warm.py")]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    from lengthwise._jit import cache_folder

    before = {path: path.stat().st_mtime_ns for path in cache_folder().rglob("*.code")}
    assert before
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    assert {path: path.stat().st_mtime_ns for path in cache_folder().rglob("*.code")} == before
