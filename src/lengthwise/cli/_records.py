"""Files of records that commands leave behind."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from lengthwise import measure
from lengthwise.report.json_file import deployment_facts, plain
from lengthwise.scenario import Outcome
from lengthwise.schema.measured import SIMULATED, Measured


def places(path: Path | None, names: Sequence[str]) -> dict[str, Path]:
    """Where the records of each variant go: a lone one's to ``path``, else each with its name before the suffix."""
    if path is None:
        return {}
    if len(names) == 1:
        return {names[0]: path}
    return {name: path.with_name(f"{path.stem}-{_slug(name)}{path.suffix}") for name in names}


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
        "deployment": plain(deployment_facts(variant.deployment)),
        "warmup_s": variant.scenario.run.warmup_s,
    }
    return Measured(outcome.records, variant.workload(outcome.records.seed), SIMULATED, facts)


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-") or "variant"
