"""Files of records that commands leave behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lengthwise import measure
from lengthwise.cli._outputs import STDOUT, beside
from lengthwise.report.json_file import deployment_facts, plain
from lengthwise.scenario import Outcome
from lengthwise.schema.errors import OutputError
from lengthwise.schema.measured import SIMULATED, Measured, shape_facts

_GZIP = b"\x1f\x8b"


def places(path: Path | None, names: Sequence[str]) -> dict[str, Path]:
    """Where the records of each variant go: a lone one's to ``path``, else each with its name before the suffix."""
    if path is None:
        return {}
    if len(names) == 1 or path == STDOUT:  # which is then refused
        return {names[0]: path}
    return {name: beside(path, name) for name in names}


def write_simulated(outcomes: Sequence[Outcome], files: dict[str, Path]) -> list[Path]:
    """Writes the first seed's run of each variant that has a file; returns the files."""
    written = []
    for outcome in outcomes:
        if (path := files.get(outcome.variant.name)) is not None:
            measure.write_records(simulated(outcome), path)
            written.append(path)
    return written


def simulated(outcome: Outcome) -> Measured:
    """The first seed's run with its requests and the scenario that it came from."""
    variant = outcome.variant
    facts = {
        "scenario": variant.scenario.to_toml(),
        "deployment": {
            **plain(deployment_facts(variant.deployment)),
            "model_shape": shape_facts(variant.deployment.model),
        },
        "warmup_s": variant.scenario.run.warmup_s,
    }
    return Measured(outcome.records, variant.workload(outcome.records.seed), SIMULATED, facts)


def read_named(paths: Sequence[Path]) -> list[Measured]:
    """Runs that are called by their files: by name, or by path where two files have one name.

    Text (JSON, or lines of it, packed or not) is the result of another program, and read as such.

    Raises:
        InputError: One cannot be read.
    """
    names = [path.name for path in paths]
    if len(set(names)) < len(set(paths)):
        names = [str(path) for path in paths]
    runs = [_read(path) for path in paths]
    return [
        replace(run, records=replace(run.records, name=name)) for run, name in zip(runs, names, strict=True)
    ]


def _read(path: Path) -> Measured:
    return measure.read_foreign(path) if _is_text(path) else measure.read_records(path)


def _is_text(path: Path) -> bool:
    """Whether a file begins as JSON or gzip do; what cannot be read is for ``read_records`` to tell."""
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError:
        return False
    return start[:2] == _GZIP or start.lstrip()[:1] in (b"{", b"[")


def require_new(path: Path | None, *, force: bool) -> None:
    """Nothing, unless a measurement, which nobody can repeat, would be lost; a device or a pipe is none.

    Raises:
        OutputError: The file is there, and nobody insists.
    """
    if path is not None and path.is_file() and not force:
        raise OutputError(
            f"{path} is there already, and a measurement cannot be repeated: name another file, or give --force to "
            "replace it"
        )
