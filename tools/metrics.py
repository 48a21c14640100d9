"""Measure how readable the code base is and compare it with the limits of docs/house.md.

usage: python tools/metrics.py [--json] [--words N]

Vocabulary: every name that the code binds (functions, classes, arguments, variables, attributes, modules) is split
into words. A word is foreign if neither it nor its singular is in tools/vocabulary/field_words.txt (words of at least
3 of 48 known Python projects) or domain_words.txt (terms of LLM serving and queueing). Banned names and phrases are
in banned.txt as "pattern => preferred"; entries after "prose:" apply to docstrings, comments, messages and Markdown.
The seconds of the last run of .ci/run and of its lanes are printed after it; they hold for two quiet cores, so they
do not change the exit status.
Exit status 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import ast
import collections
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORDS = ROOT / "tools" / "vocabulary"
PAGES = ("CONTRIBUTING.md", "README.md", "deploy", "docs", "examples", "src")
ENDINGS = {".html", ".js", ".json", ".md", ".toml", ".yaml"}
SCRIPTS = ("benchmarks", "deploy", "docs", "examples")
LIMITS = {
    "foreign_word_share": 0.07,
    "banned_identifiers": 0,
    "banned_phrases": 30,
    "src_lines": 116_013,
    "modules": 500,
    "benchmark_lines": 8_000,
    "docs_generator_lines": 1_500,
    "import_cycles": 0,
    "functions_over_8_parameters": 9,
    "records_over_15_fields": 3,
}
LANES = ROOT / ".lane-seconds"
SECONDS = {"run": 2_700, "test": 360}
OPTIONS_OR_COLUMNS = re.compile(r"/cli/|/policy/|/engine/_?kernel|kernel\.py$")
"""Modules whose functions may have more than 8 parameters: one for each option of a command, or compiled columns."""
KEYS_OR_COLUMNS = re.compile(r"/config[/.]|/engine/kernel_runner")
"""Modules whose records may have more than 15 fields: one for each key of a file's table, or compiled columns."""


def entries(name: str) -> list[str]:
    """Return the lines of a word list without comments."""
    lines = (WORDS / name).read_text("utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def known_words() -> set[str]:
    """Return the words that identifiers may use."""
    return {*entries("field_words.txt"), *entries("domain_words.txt")}


def banned() -> tuple[list[re.Pattern[str]], list[re.Pattern[str]]]:
    """Return the patterns of banned identifiers and of banned phrases."""
    names: list[re.Pattern[str]] = []
    prose: list[re.Pattern[str]] = []
    for line in entries("banned.txt"):
        pattern = line.removeprefix("prose:").partition("=>")[0].strip()
        (prose if line.startswith("prose:") else names).append(re.compile(pattern, re.IGNORECASE))
    return names, prose


def words(identifier: str) -> list[str]:
    """Split an identifier into lower-case words of at least three letters."""
    parts = (re.findall(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+", part) for part in identifier.split("_"))
    return [word.lower() for part in parts for word in part if len(word) > 2]


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each name that a module binds, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def vocabulary(
    paths: list[Path], pages: list[Path], scripts: Sequence[Path] = ()
) -> dict[str, collections.Counter[str]]:
    """Count words and foreign words of modules, and banned identifiers and phrases of modules, scripts and pages."""
    known, (names, prose) = known_words(), banned()
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for path in [*paths, *scripts]:
        text = path.read_text("utf-8")
        for name, line in [(path.stem, 1), *bound_names(ast.parse(text))]:
            for word in words(name) if path not in scripts else ():
                found["words"][word] += 1
                if word not in known and word.removesuffix("s") not in known:
                    found["foreign"][word] += 1
            if any(pattern.fullmatch(name.strip("_")) for pattern in names):
                found["identifiers"][f"{path.relative_to(ROOT)}:{line} {name}"] += 1
        for number, line_text in enumerate(text.splitlines(), 1):
            is_prose = '"' in line_text or "#" in line_text or line_text.lstrip()[:1].isupper()
            if is_prose and any(pattern.search(line_text) for pattern in prose):
                found["phrases"][f"{path.relative_to(ROOT)}:{number}"] += 1
    for path in pages:
        for number, line_text in enumerate(path.read_text("utf-8").splitlines(), 1):
            if any(pattern.search(line_text) for pattern in prose):
                found["phrases"][f"{path.relative_to(ROOT)}:{number}"] += 1
    return found


def imports(paths: list[Path], src: Path) -> dict[str, set[str]]:
    """Return the modules of this package that each module imports, in functions and for types as well."""
    modules = {".".join(p.relative_to(src).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        tree = ast.parse(path.read_text("utf-8"))
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    target = f"{node.module}.{alias.name}"
                    found.add(target if target in modules else node.module)
        graph[name] = found & modules.keys() - {name}
    return graph


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph[node]):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component: list[str] = []
            while not component or component[-1] != node:
                component.append(stack.pop())
            if len(component) > 1:
                found.append(sorted(component))

    sys.setrecursionlimit(10_000)
    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def functions(paths: list[Path]) -> dict[str, float]:
    """Count functions and records: long ones, with many parameters or fields, private ones that are used once."""
    total = long = many = private = once = wide = 0
    for path in paths:
        text = path.read_text("utf-8")
        tree = ast.parse(text)
        names = collections.Counter(re.findall(r"\b_\w+", text))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                fields = sum(isinstance(line, ast.AnnAssign) for line in node.body)
                wide += fields > 15 and not KEYS_OR_COLUMNS.search(path.as_posix())
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                total += 1
                long += (node.end_lineno or node.lineno) - node.lineno + 1 > 30
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                own = [argument for argument in arguments if argument.arg not in {"self", "cls"}]
                many += len(own) > 8 and not OPTIONS_OR_COLUMNS.search(path.as_posix())
                if node.name.startswith("_") and not node.name.startswith("__"):
                    private += 1
                    once += names[node.name] == 2
    return {
        "functions": total,
        "functions_over_30_lines": long / total,
        "functions_over_8_parameters": many,
        "records_over_15_fields": wide,
        "private_functions_used_once": once / max(1, private),
    }


def loaded_modules(name: str) -> int:
    """Return how many modules of this package an import loads in a fresh process."""
    code = f"import sys, {name}; print(sum(m.split('.')[0] == 'lengthwise' for m in sys.modules))"
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def line_count(paths: list[Path]) -> int:
    """Return the number of lines of some files."""
    return sum(len(path.read_text("utf-8").splitlines()) for path in paths)


def measure() -> tuple[dict[str, float], dict[str, collections.Counter[str]]]:
    """Return every metric, and what the vocabulary check found."""
    src = ROOT / "src"
    paths = sorted(src.rglob("*.py"))
    files = (path for name in PAGES for path in (ROOT / name, *sorted((ROOT / name).rglob("*"))))
    pages = [path for path in files if path.suffix in ENDINGS and not path.name.endswith(".min.js")]
    scripts = [path for name in SCRIPTS for path in sorted((ROOT / name).rglob("*.py"))]
    found = vocabulary(paths, pages, scripts)
    found["identifiers"].update(vocabulary([], [], sorted((ROOT / "tests").rglob("*.py")))["identifiers"])
    graph = imports(paths, src)
    importers = collections.Counter(target for targets in graph.values() for target in targets)
    comments = sum(line.lstrip().startswith("#") for p in paths for line in p.read_text("utf-8").splitlines())
    lines = line_count(paths)
    return {
        "foreign_word_share": sum(found["foreign"].values()) / sum(found["words"].values()),
        "banned_identifiers": sum(found["identifiers"].values()),
        "banned_phrases": sum(found["phrases"].values()),
        "src_lines": lines,
        "stub_lines": line_count(sorted(src.rglob("*.pyi"))),
        "modules": len(paths),
        "modules_with_one_importer": sum(importers[name] == 1 for name in graph),
        **functions(paths),
        "comment_lines": comments / lines,
        "modules_loaded_by_config": loaded_modules("lengthwise.config"),
        "docs_generator_lines": line_count(sorted((ROOT / "docs").rglob("*.py"))),
        "benchmark_lines": line_count(sorted((ROOT / "benchmarks").rglob("*.py"))),
        "import_cycles": len(cycles(graph)),
    }, found


def main() -> int:
    """Print the metrics; return 1 if one exceeds its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--words", type=int, default=0, help="also list this many foreign words and all banned uses")
    arguments = parser.parse_args()
    metrics, found = measure()
    if arguments.json:
        print(json.dumps(metrics, indent=2))
    else:
        for name, value in metrics.items():
            shown = f"{value:,}" if isinstance(value, int) else f"{value:.3f}"
            print(f"{name:30} {shown:>10}" + (f"  at most {LIMITS[name]:g}" if name in LIMITS else ""))
        lanes = LANES.read_text("utf-8").splitlines() if LANES.exists() else []
        for lane, seconds in map(str.split, lanes):
            limit = f"  at most {SECONDS[lane]}" if lane in SECONDS else ""
            print(f"{f'ci_{lane}_s':30} {int(seconds):>10,}{limit}")
    if arguments.words:
        for word, count in found["foreign"].most_common(arguments.words):
            print(f"{count:5d} {word}")
        for place in [*found["identifiers"], *found["phrases"]]:
            print(f"banned {place}")
    return int(any(metrics[name] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
