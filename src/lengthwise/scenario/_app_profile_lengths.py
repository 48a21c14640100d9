"""How long outputs are: the application run on a sample of its rows, and what each model said."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.apps.app import App
from lengthwise.apps.deciding import Rendered
from lengthwise.apps.draws import draw
from lengthwise.apps.expand import expand
from lengthwise.apps.launch import Launcher, StaticLauncher
from lengthwise.apps.ledger import Ledger
from lengthwise.apps.plan import Space
from lengthwise.apps.run import (
    ClusterRooms,
    Ended,
    GivenRooms,
    Guide,
    Job,
    Layout,
    Planned,
    Progress,
    RunFolder,
    Work,
    expected_tokens,
    given_guide,
    job_of,
    run_here,
)
from lengthwise.schema.app import ModelPlan
from lengthwise.schema.app_tasks import Tasks
from lengthwise.schema.errors import InputError
from lengthwise.schema.files import write_whole
from lengthwise.workload import Empirical

Ints = npt.NDArray[np.int64]
SAMPLE = "sample"
"""Folder of the sample's run, in the profile's."""
COLUMNS = ("call", "row", "prompt_tokens", "output_tokens", "finish_reason")
_DRAWS = 4
_PAGE = 5_000


@dataclass(frozen=True)
class Said:
    """One output."""

    call: str
    row: int
    prompt_tokens: int
    output_tokens: int
    finish_reason: str


def sampled_rows(count: int, most: int, seed: int) -> Ints:
    """[at most ``most``] numbers of rows, drawn without putting back, in order."""
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).choice(count, most, replace=False)).astype(np.int64)


def run_sample(
    app: App,
    rows: Sequence[Mapping[str, Any]],
    space: Space,
    launcher: Launcher,
    folder: Path,
    watch: Callable[[Progress], None] | None = None,
) -> tuple[Ended, dict[str, list[Said]]]:
    """How the application ended on these rows, and what its models said by their names.

    Goes on with what is in the folder: what was answered is not asked again.

    Args:
        app: What is asked.
        rows: Of the sample.
        space: Where the models have room.
        launcher: Of engines.
        folder: Of the run.
        watch: Shown how far it is.
    """
    job = _job(app, rows, space, launcher)
    with RunFolder(folder).taken(resume=True) as ledger:
        ended = run_here(job, ledger, launcher, watch=watch)
        return ended, _said(ledger, job.layout)


def _job(app: App, rows: Sequence[Mapping[str, Any]], space: Space, launcher: Launcher) -> Job:
    unrolled = expand(app, rows)
    stages = packed(space, unrolled.tasks)
    spare = tuple(plan for stage in stages for plan in stage)
    longest = [space.deployment(plan).max_model_len for plan in sorted(spare)]
    lengths = [model.lengths for model in app.models]
    draws = [draw(unrolled.tasks, lengths, longest, seed) for seed in range(_DRAWS)]
    words = repr((app.calls, app.loops, [model.identity() for model in app.models], list(rows)))
    work = Work(unrolled.tasks, Rendered(unrolled), expected_tokens(draws), words)
    if isinstance(launcher, StaticLauncher):
        return job_of(work, Planned(given_guide(launcher.plans()), GivenRooms()))
    return job_of(work, Planned(Guide(stages, spare), ClusterRooms(space.cluster, space.seconds)))


def packed(space: Space, tasks: Tasks) -> tuple[tuple[ModelPlan, ...], ...]:
    """Stages with as many models as have room, each on as few GPUs as it can, in the order in which they are asked."""
    order = list(dict.fromkeys(tasks.model.tolist()))
    stages: list[tuple[ModelPlan, ...]] = []
    for model in (*order, *(one for one in range(len(tasks.models)) if one not in order)):
        plan = space.plans(model)[0]
        if stages and space.fits((*stages[-1], plan)):
            stages[-1] = (*stages[-1], plan)
        else:
            stages.append((plan,))
    return tuple(stages)


def _said(ledger: Ledger, layout: Layout) -> dict[str, list[Said]]:
    """Outputs by model, in the application's order."""
    tasks, found = layout.tasks, {}
    for first in range(0, len(tasks), _PAGE):
        for row in ledger.rows(first, _PAGE):
            if row.output is not None:
                found[int(layout.task_of[row.task])] = row
    said: dict[str, list[Said]] = {name: [] for name in tasks.models}
    for task in sorted(found):
        place, output = int(layout.place_of[task]), found[task].output
        call, model = layout.pairs[int(tasks.call[place])]
        if output is not None:
            name, number = tasks.calls[call], int(tasks.row[place])
            said[tasks.models[model]].append(
                Said(name, number, output.prompt_tokens, output.output_tokens, output.finish_reason)
            )
    return said


def write_lengths(path: Path, said: Sequence[Said]) -> None:
    """Writes outputs as CSV, a line each."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(astuple(one) for one in said)
    write_whole(path, text.getvalue().encode())


def read_lengths(path: Path) -> Empirical:
    """The distribution of a file's outputs without a limit, as far as those that ended at theirs tell.

    An output that was cut is at least so long: the product-limit estimate (Kaplan and Meier, 1958), what lies behind
    the longest counting as that one. Where all have one limit it is the plain empirical distribution.

    Raises:
        InputError: The file cannot be read, or holds no output.
    """
    said = read_said(path)
    cut = np.array([one.finish_reason == "length" for one in said], bool)
    return without_limits(np.array([one.output_tokens for one in said], np.int64), cut)


def read_said(path: Path) -> list[Said]:
    """Outputs as they were written.

    Raises:
        InputError: The file cannot be read, or holds no output.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            said = [_one(row) for row in csv.DictReader(file)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} must be a CSV with the columns {', '.join(COLUMNS)} ({error!r})") from error
    if not said:
        raise InputError(f"{path} must hold at least one output; it holds none")
    return said


def _one(row: Mapping[str, str]) -> Said:
    prompt, output = int(row["prompt_tokens"]), int(row["output_tokens"])
    return Said(row["call"], int(row["row"]), prompt, output, row["finish_reason"])


def without_limits(tokens: Ints, cut: npt.NDArray[np.bool_]) -> Empirical:
    """Lengths with the weights of the product-limit estimate; ``cut`` ones are at least so long."""
    seen = np.unique(tokens)
    ended = np.array([np.count_nonzero((tokens == one) & ~cut) for one in seen], float)
    at_risk = np.array([np.count_nonzero(tokens >= one) for one in seen], float)
    left = np.cumprod(1.0 - ended / at_risk)
    weights = -np.diff(left, prepend=1.0)
    weights[-1] += left[-1]
    return Empirical(seen.astype(float), np.maximum(weights, 0.0))
