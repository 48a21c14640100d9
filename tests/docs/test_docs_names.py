"""Links resolve, and what the documents name is there."""

from __future__ import annotations

import dataclasses
import re

import pytest
from documents import DOCUMENTS, ROOT, anchors, links, name

import lengthwise
from lengthwise.metrics import request_columns
from lengthwise.policy import known, named
from lengthwise.schema.records import StepRecords

FOLDERS = ("src", "tests", "docs", "examples", "benchmarks", "changelog.d", "deploy", ".ci")
WRITTEN_LATER = {"docs/laws.md"}
REFERENCE = (ROOT / "docs/reference.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_resolve(document):
    for link in links(document):
        path, _, anchor = link.partition("#")
        if path.startswith(("https://", "http://")):
            continue
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        assert target.is_relative_to(ROOT), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_files_that_are_named_exist(document):
    text = document.read_text(encoding="utf-8")
    found = re.findall(rf"`((?:{'|'.join(map(re.escape, FOLDERS))})/[\w./+-]+)`", text)
    for path in {*found} - WRITTEN_LATER:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_files_of_rooms_that_are_named_exist(document):
    rooms = "|".join(p.parent.name for p in (ROOT / "src/lengthwise").glob("*/__init__.py"))
    for path in re.findall(rf"`((?:{rooms})/[\w./-]+)`", document.read_text(encoding="utf-8")):
        assert (ROOT / "src/lengthwise" / path).exists(), path


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_dotted_names_exist(document):
    for dotted in re.findall(r"`(?:lengthwise\.)((?:\w+\.)*\w+)`", document.read_text(encoding="utf-8")):
        assert _resolves(dotted.split(".")), dotted


def _resolves(parts):
    value, module = lengthwise, "lengthwise"
    for part in parts:
        module = f"{module}.{part}"
        try:
            value = getattr(value, part)
        except AttributeError:
            try:
                value = __import__(module, fromlist=["_"])
            except ImportError:
                return False
    return True


def test_reference_names_every_column():
    steps = [field.name for field in dataclasses.fields(StepRecords)]
    for column in (*_request_columns(), *steps):
        assert f"`{column}`" in REFERENCE, column


def _request_columns():
    arriving = lengthwise.Workload([0.0], [1], [1])
    return request_columns(lengthwise.simulate(arriving, lengthwise.deploy("opt-125m", "L4")))


def test_reference_names_every_cost_source():
    from lengthwise.engine import COST_SOURCES

    for source in COST_SOURCES:
        assert f"| `{source}` |" in REFERENCE, source


def test_front_door_is_in_the_reference():
    python = REFERENCE.partition("## Python")[2].partition("## Records")[0]
    for function in ("deploy", "simulate", "summarize", "combine", "frame", "read", "write", "preset"):
        assert function in lengthwise.__all__
        assert f"{function}(" in python, function


def test_policies_that_are_named_exist():
    names = {*named(), *(n for axis in ("rank", "batching", "memory", "router") for n in known(axis))}
    rows = re.findall(r"^\| (?:rank|batching|memory|router|scheduler) \| `(\w+)` \|", REFERENCE, re.MULTILINE)
    assert set(rows) == names
