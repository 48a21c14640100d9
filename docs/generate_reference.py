"""Writes the generated parts of docs/reference.md: python docs/generate_reference.py [--check].

What stands between ``<!-- generated: NAME -->`` and ``<!-- end -->`` comes from the code: the keys of
scenario files from the sections that check them, policies from their contracts, the command line from its
own help. Everything else on the page is written by hand and left alone.
"""

from __future__ import annotations

import inspect
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from _reference_apps import keys as _app_keys
from _reference_apps import python as _app_python
from _reference_gateway import keys as _gateway_keys
from pydantic.fields import FieldInfo
from typer.testing import CliRunner

from lengthwise import policy
from lengthwise.cli import program
from lengthwise.config import scenario as _canonical
from lengthwise.config import sections, values
from lengthwise.config import sections as _decode
from lengthwise.config import sections as _lab
from lengthwise.config import sections as _predictor
from lengthwise.config import sections as _schedule
from lengthwise.config import values as _lengths
from lengthwise.policy import contracts
from lengthwise.usecases import variants

PAGE = Path(__file__).parent / "reference.md"
COMMANDS: tuple[tuple[str, ...], ...] = (
    (),
    ("simulate",),
    ("capacity",),
    ("search",),
    ("lab",),
    ("schedule",),
    ("schedule", "run"),
    ("schedule", "monitor"),
    ("app",),
    ("app", "plan"),
    ("app", "profile"),
    ("app", "run"),
    ("app", "status"),
    ("app", "cancel"),
    ("serve",),
    ("explain",),
    ("catalog",),
    ("predict", "train"),
    ("predict", "eval"),
    ("predict", "show"),
    ("predict", "collect"),
    ("workload", "show"),
    ("bench",),
    ("calibrate",),
    ("compare",),
    ("profile", "run"),
    ("profile", "import", "aiconfigurator"),
    ("profile", "import", "llmservingsim"),
    ("profile", "import", "vidur"),
    ("profile", "show"),
    ("profile", "fit"),
    ("profile", "check"),
)
TABLES = {
    "workload": sections.WorkloadSection,
    "deployment": sections.DeploymentSection,
    "deployment.decode": _decode.DecodeSection,
    "engine": sections.EngineSection,
    "scheduler": sections.SchedulerSection,
    "predictor": _predictor.PredictorSection,
    "slo": sections.SloSection,
    "run": sections.RunSection,
    "search": sections.SearchSection,
    "lab": _lab.LabSection,
    "schedule": _schedule.ScheduleSection,
}
_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): ""}
_BLOCK = re.compile(r"(<!-- generated: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def scenario_keys() -> str:
    """A heading, the section's own words and a table of keys for each table of a scenario file."""
    return "\n".join(_section(name, table) for name, table in TABLES.items())


def gateway_keys() -> str:
    """The tables of a gateway's file."""
    return _gateway_keys(_type, _default)


def app_keys() -> str:
    """The tables of an application's file."""
    return _app_keys(_type, _default)


def app_python() -> str:
    """What applications are built of in Python."""
    return _app_python()


def kinds() -> str:
    """The kinds of length distributions and arrival processes, with their keys."""
    out = []
    for title, known in (("length (prompt, output)", _lengths.LENGTHS), ("arrivals", values.ARRIVALS)):
        out += [f"| kind of {title} | keys | what it is |", "|---|---|---|"]
        for name, table in known.items():
            keys = ", ".join(f"`{key}`" for key in table.model_fields if key != "kind")
            out.append(f"| `{name}` | {keys} | {_first_line(table)} |")
        out.append("")
    return "\n".join(out)


def policy_arguments() -> str:
    """What a policy of each axis may take and must return."""
    makers = {
        "rank": policy.rank,
        "batching": policy.batching,
        "memory": policy.memory,
        "router": policy.router,
        "takeover": policy.takeover,
        "binning": policy.binning,
    }
    out = []
    for axis, maker in makers.items():
        takes = ", ".join(f"`{name}`" for name in contracts.ARGUMENTS[axis])
        said = " ".join((inspect.getdoc(maker) or "").removeprefix("Decorator: ").split())
        out.append(f"**{axis}** ({'also leave; ' if axis == 'rank' else ''}takes {takes}): {said}\n")
    return "\n".join(out).replace("``", "`")


def policies() -> str:
    """Every built-in policy and named scheduler."""
    ways = [("binning", f"{name}(k)", text) for name, text in variants.BINNING_RULES.items()]
    rows = [f"| {axis} | `{name}` | {text.replace('``', '`')} |" for axis, name, text in policy.catalog() + ways]
    return "\n".join(["| axis | name | what it does |", "|---|---|---|", *rows, ""])


def command_line() -> str:
    """The help of every command."""
    out = []
    for command in COMMANDS:
        shown = CliRunner().invoke(
            program.app, [*command, "--help"], prog_name="lengthwise", env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
        )
        text = "\n".join(line.rstrip() for line in shown.output.strip().splitlines())
        out.append(f"```text\n{text}\n```\n")
    return "\n".join(out)


PARTS: dict[str, Callable[[], str]] = {
    "scenario-keys": scenario_keys,
    "gateway-keys": gateway_keys,
    "app-keys": app_keys,
    "app-python": app_python,
    "kinds": kinds,
    "policy-arguments": policy_arguments,
    "policies": policies,
    "command-line": command_line,
}


def generated(text: str) -> str:
    """The page with its generated parts as the code has them now."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n{found[3]}", text)


def _section(name: str, table: Any) -> str:
    said = (inspect.getdoc(table) or "").replace("``", "`")
    rows = [f"| `{key}` | {_type(field)} | {_default(field)} | {_spellings(name, key)} |"
            for key, field in table.model_fields.items()]  # fmt: skip
    return "\n".join([f"### `[{name}]`", "", said, "", "| key | takes | default | also |", "|---|---|---|---|",
                      *rows, ""])  # fmt: skip


def _first_line(table: Any) -> str:
    return (inspect.getdoc(table) or "").split("\n")[0].replace("``", "`")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        made = [one if isinstance(one, str) else getattr(one, "title", str(one)) for one in field.default_factory()]  # type: ignore[call-arg]
        return f"`{', '.join(made)}`" if made else ""
    return "" if field.default is None else f"`{str(field.default).lower()}`"


def _spellings(section: str, key: str) -> str:
    return ", ".join(f"`{other}`" for other, name in _canonical.ALIASES.get(section, {}).items() if name == key)


def _type(field: FieldInfo) -> str:
    is_duration = "function seconds" in repr((field.annotation, field.metadata))
    return "duration" if is_duration else _words(field.annotation)


def _words(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner = get_args(annotation)[0]
        several = get_origin(inner) in {Union, types.UnionType}
        return "a distribution or a number" if several and "Length" in repr(inner) else (
            "a kind, or a table" if several else _words(inner))  # fmt: skip
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if origin in {Union, types.UnionType}:
        return " or ".join(filter(None, (_words(one) for one in get_args(annotation))))
    return _WORDS.get(annotation, "table")


def main(arguments: list[str]) -> int:
    """Writes the page, or with --check says whether it is as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    made = generated(text)
    if arguments == ["--check"]:
        return int(made != text)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
