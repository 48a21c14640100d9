"""The laws of the house that a reader of the sources can check."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lengthwise
from lengthwise.policy import known
from lengthwise.policy.contracts import ARGUMENTS

ROOT = Path(__file__).parents[2]
PACKAGE = Path(lengthwise.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
FORBIDDEN_NAMES = {"utils", "util", "common", "base", "manager", "helpers", "misc", "v2"}
PRIVATE_NAMES_IN_TESTS = {
    "_jit": "it compiles code for all packages",
    "_reference_state": "the live lane compares these parts of the specification with the code of engines",
    "_reference_sglang": "likewise",
    "_preempt_request": "vLLM's own name",
    "_run": "asyncio's own name",
}
TRUTH = re.compile(r"^(true_|actual_|real_)|^output|^total_(output_)?tokens$|_output_tokens$")
"""What a true length would be called; ``remaining_tokens`` is what is left of the predicted one."""


def relative(path):
    return path.relative_to(PACKAGE).as_posix()


def test_import_contracts_hold():
    """Imports follow the order of docs/house.md (import-linter)."""
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_import_contracts_name_every_package():
    """Import-linter ignores a package that no contract names."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["type"] == "layers")
    placed = {name.strip() for layer in layers for name in layer.split("|")}
    packages = {f"lengthwise.{p.parent.name}" for p in PACKAGE.glob("*/__init__.py")}
    assert packages <= placed, packages - placed


def test_file_names_state_their_subject():
    named = {relative(path): set(re.split(r"[_./]", relative(path))) for path in SOURCES}
    assert [name for name, words in named.items() if words & FORBIDDEN_NAMES] == []


def test_only_one_file_imports_the_compiler():
    mention = [path for path in SOURCES if re.search(r"\b(njit|numba)\b", path.read_text("utf-8"))]
    knows = [relative(path) for path in mention if names_in(tree(path)) & {"njit", "numba"}]
    assert knows == ["_compiler.py"]


def test_no_package_imports_private_files_of_another():
    """`_x.py` is private to its package; the compiled kernel may read the compiled lookup of costs."""
    assert [f"{relative(p)}: {'.'.join(parts)}" for p in SOURCES for parts in imports(p) if intrudes(p, parts)] == []


def imports_private(text):
    """Return whether a file may import a private name or module of lengthwise."""
    return any(re.search(r"\b_[a-z]", one) for one in re.findall(r"from lengthwise.*import (?:\([^)]*\)|.*)", text))


@functools.cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def names_in(module):
    """Return every name that a module imports, reads or calls."""
    found = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.name.split(".")[0] for alias in node.names}
            found.add((getattr(node, "module", None) or "").split(".")[0])
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found


def imports(path):
    """Yield the parts of each dotted name that a file imports from lengthwise, if a private one may be among them."""
    if not imports_private(path.read_text("utf-8")):
        return
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lengthwise":
            for alias in node.names:
                yield [*node.module.split(".")[1:], alias.name]


def intrudes(path, parts):
    """Return whether a file imports a private name of another package. All may use ``_jit``, which has two parts."""
    home = relative(path).split("/")[0]
    private = [part for part in parts if part.startswith("_")]
    known = {"_native", "_compiler"} if home in {"_jit.py", "_compiler.py"} else {home, "_jit"}
    return bool(private) and parts[0] not in known and parts[:2] != ["cost", "_lookup"]


def test_tests_import_and_patch_no_private_names():
    """A test goes through a public name, so that it fails for a changed law and not for a moved function.

    Ruff (SLF001) finds private attributes.
    """
    tests = sorted((ROOT / "tests").rglob("*.py"))
    found = {(path.name, name) for path in tests for name in private_names(path)}
    assert {one for one in found if one[1] not in PRIVATE_NAMES_IN_TESTS} == set()
    assert {name for _, name in found} == PRIVATE_NAMES_IN_TESTS.keys()


def private_names(path):
    """Yield the private names that a test imports from lengthwise, or patches."""
    text = path.read_text("utf-8")
    if not (imports_private(text) or re.search(r"(?:set|del)attr\([^)]*\b_[a-z]", text)):
        return  # parsing a thousand files takes seconds
    for parts in imports(path):
        yield from (part for part in parts if re.match("_[^_]", part))
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in {"setattr", "delattr"}:
            texts = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            yield from (part for text in texts for part in text.split(".") if re.match("_[^_]", part))


def test_no_policy_receives_the_true_output_length():
    for axis, arguments in ARGUMENTS.items():
        true = [name for name in arguments if TRUTH.search(name)]
        assert not true, f"{axis}: {true}"


def test_the_truth_would_be_recognised():
    for name in ("output_tokens", "true_output", "output", "total_tokens", "remaining_output_tokens"):
        assert TRUTH.search(name), name


@pytest.mark.parametrize("axis", ["rank", "batching", "memory", "router", "preemption", "binning"])
def test_policies_take_what_their_axis_offers(axis):
    for policy in known(axis).values():
        assert set(policy.arguments) <= set(ARGUMENTS[axis]), policy.name
        assert policy.doc, policy.name


def test_every_file_has_a_docstring():
    begins = re.compile(r'(#.*\n|\s)*"""\s*\S')
    assert [relative(path) for path in SOURCES if not begins.match(path.read_text("utf-8"))] == []


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").exists()
