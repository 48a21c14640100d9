"""The bill of materials lists the locked packages of lengthwise and its extras, in valid CycloneDX."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

SCHEMAS = ("bom-1.5", "spdx", "jsf-0.82")
ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def test_the_bill_of_materials_is_valid_and_complete(tmp_path):
    from jsonschema import Draft7Validator
    from referencing import Registry, Resource

    path = tmp_path / "sbom.json"
    rule = (ROOT / "Makefile").read_text().partition("\nsbom:")[2].partition("\n\n")[0]
    command = rule.partition("$(BIN)/uv ")[2].split()[:-1]
    uv = Path(sys.prefix) / "bin" / "uv"
    if not uv.exists():
        pytest.skip("needs uv, which make setup installs")
    subprocess.run([str(uv), *command, str(path)], check=True, cwd=ROOT)
    bill = json.loads(path.read_text("utf-8"))
    folder = files("cyclonedx.schema") / "_res"
    schemas = [json.loads((folder / f"{name}.SNAPSHOT.schema.json").read_text("utf-8")) for name in SCHEMAS]
    registry = Registry().with_resources([(one["$id"], Resource.from_contents(one)) for one in schemas])
    validator = Draft7Validator(schemas[0], registry=registry)
    for one in bill["components"]:  # alone and with few files: comparing all pairs of them takes minutes
        few = one | {"externalReferences": one["externalReferences"][:2]}
        validator.validate(bill | {"components": [few], "dependencies": []})
    validator.validate(bill | {"components": []})
    assert len({one["bom-ref"] for one in bill["components"]}) == len(bill["components"])
    listed = {(one["name"], one["version"], one["purl"].partition("?")[0]) for one in bill["components"]}
    locked = tomllib.loads((ROOT / "uv.lock").read_text("utf-8"))["package"]
    by_name: dict[str, list[dict]] = {}
    for one in locked:
        by_name.setdefault(one["name"], []).append(one)
    (own,) = by_name["lengthwise"]
    needed, queue = set(), [*own["dependencies"], *(d for ds in own["optional-dependencies"].values() for d in ds)]
    while queue:
        one = queue.pop()
        for package in by_name[one["name"]]:
            key = one["name"], package.get("version"), tuple(one.get("extra", ()))
            if key not in needed and one.get("version", package.get("version")) == package.get("version"):
                needed.add(key)
                extras = package.get("optional-dependencies", {})
                queue += [*package.get("dependencies", ()), *(d for name in key[2] for d in extras.get(name, ()))]
    assert {(name, version) for name, version, _ in needed if name != "lengthwise"} == {row[:2] for row in listed}
    assert all(purl == f"pkg:pypi/{name}@{version}" for name, version, purl in listed)
