"""An application run: on engines of this machine, of a Ray cluster, at given addresses, or in virtual time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lengthwise.apps.expand import Rendered
from lengthwise.apps.inputs import Rows, is_batch, write_batch
from lengthwise.apps.launch import Launcher, SimulatedLauncher, StaticLauncher
from lengthwise.apps.ledger import Ledger
from lengthwise.apps.run import (
    ClusterPlacer,
    EnginesFailedError,
    Job,
    Planned,
    Progress,
    Reused,
    RunPlan,
    RunResult,
    RunTasks,
    Settings,
    StaticPlacer,
    expected_tokens,
    export,
    job_of,
    manifest,
    run_on_engines,
    run_plan_of,
    run_simulated,
    static_run_plan,
    write_manifest,
)
from lengthwise.apps.run.replanning import Replanner
from lengthwise.apps.run.results import DEAD, OUTPUTS, Exported, RunFolder, sha256
from lengthwise.schema.app import AppPlan
from lengthwise.schema.errors import EngineError
from lengthwise.usecases.app_plan import PlannedApp, longest_of
from lengthwise.usecases.app_setup import Engines, launcher_of

FORMS = ("jsonl", "parquet")
BATCH_ANSWERS, BATCH_ERRORS = "batch-output.jsonl", "batch-errors.jsonl"
"""What a run of an OpenAI batch file writes beside its outputs, in the form that such batches are answered in."""


@dataclass(frozen=True)
class RanApp:
    """A run that is over, for now.

    Attributes:
        plan: That it began with, or that was found while its engines started; None: engines were given.
    """

    completed: RunResult
    exported: Exported
    metadata: dict[str, Any]
    folder: Path
    plan: AppPlan | None = None


@dataclass(frozen=True)
class Watching:
    """Who is told how far it is.

    Attributes:
        progress: Shown how far it is; None: nobody.
        every_s: How often, in seconds of the run's clock.
        started: Told what is kept of a run before, before engines start; of a first run nothing.
    """

    progress: Callable[[Progress], None] | None = None
    every_s: float = 0.5
    stopping: Callable[[int], None] | None = None
    started: Callable[[Reused], None] | None = None


def run_app(
    planned: PlannedApp,
    rows: Rows,
    engines: Engines,
    folder: Path,
    *,
    settings: Settings | None = None,
    store: str | None = None,
    resume: bool = False,
    forms: Sequence[str] = FORMS,
    watching: Watching | None = None,
) -> RanApp:
    """Runs an application by its plan, or goes on with it, and writes what was answered.

    Args:
        store: Where the ledger is; None: in the folder.

    Raises:
        OutputError: What was answered cannot be written.
        EngineError: A model's engines do not start, or end again and again; what was answered is written all the same.
    """
    watching = watching or Watching()
    planned = _asked_with(planned, engines)
    launcher = launcher_of(planned, engines, folder)
    found = _Found(planned.plan)
    job = _job(planned, rows, launcher, settings or Settings(seed=0), found)
    failed: EnginesFailedError | None = None
    with RunFolder(folder, store).taken(resume=resume) as ledger:
        try:
            ended = _finished(job, ledger, launcher, watching)
        except EnginesFailedError as error:
            ended, failed = error.completed, error
        exported = export(ledger, job.layout, folder, ids=lambda row: str(rows.ids[row]), forms=forms)
    if "jsonl" in forms and is_batch(planned.expanded.app):
        exported = _as_batch(exported, folder)
    metadata = manifest(
        replace(job, run_plan=run_plan_of(found.plan)) if found.plan is not None else job,
        ended,
        exported,
        app=identity(planned),
        inputs=rows.sha256,
        models={one.name: one.identity() for one in planned.expanded.app.models},
    )
    write_manifest(folder, metadata)
    if failed is not None:
        raise EngineError(f"{failed}. What was answered until then is in {folder}") from failed
    return RanApp(ended, exported, metadata, folder, found.plan)


@dataclass
class _Found:
    """The plan, as far as it is known."""

    plan: AppPlan | None


def _finished(job: Job, ledger: Ledger, launcher: Launcher, watching: Watching) -> RunResult:
    watch, every_s, begun = watching.progress, watching.every_s, watching.started
    if isinstance(launcher, SimulatedLauncher):
        return run_simulated(job, ledger, launcher, monitor=watch, watch_s=every_s, started=begun)
    return run_on_engines(
        job, ledger, launcher, monitor=watch, watch_s=every_s, stopping=watching.stopping, started=begun
    )


def _asked_with(planned: PlannedApp, engines: Engines) -> PlannedApp:
    """Its models know what their engines put into every request: answers to another request are not theirs."""
    told = [
        json.dumps([loaded.served, dict(loaded.body)], sort_keys=True, default=str)
        if loaded.served or loaded.body
        else ""
        for loaded in engines.loaded
    ]
    if engines.launcher == "simulated" or not any(told):
        return planned
    app = planned.expanded.app
    models = [replace(model, asked_with=words) for model, words in zip(app.models, told, strict=True)]
    return replace(planned, expanded=replace(planned.expanded, app=replace(app, models=models)))


def _as_batch(exported: Exported, folder: Path) -> Exported:
    """What was exported, and the same as OpenAI's batch files."""
    write_batch(folder / OUTPUTS, folder / DEAD, folder / BATCH_ANSWERS, folder / BATCH_ERRORS)
    digests = {name: sha256(folder / name) for name in (BATCH_ANSWERS, BATCH_ERRORS)}
    return replace(exported, files={**exported.files, **digests})


def identity(planned: PlannedApp) -> str:
    """SHA-256 of what the application asks and of whom, in hex."""
    app = planned.expanded.app
    whole = repr((app.calls, app.loops, [model.identity() for model in app.models]))
    return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()


def _job(planned: PlannedApp, rows: Rows, launcher: Launcher, settings: Settings, found: _Found) -> Job:
    expanded = planned.expanded
    words = f"{identity(planned)} {rows.sha256}"
    work = RunTasks(expanded.tasks, Rendered(expanded), expected_tokens(planned.draws), words)
    if isinstance(launcher, StaticLauncher):
        return job_of(work, Planned(static_run_plan(launcher.plans()), StaticPlacer()), settings)
    assert planned.space is not None
    assert planned.plan is not None
    placer = ClusterPlacer(planned.space.cluster, planned.space.seconds)
    job = job_of(work, Planned(run_plan_of(planned.plan), placer), settings)
    replanner = _replanner(planned, job)

    def seek(sought: Callable[[], AppPlan]) -> RunPlan:
        found.plan = sought()
        run_plan = run_plan_of(found.plan)
        replanner.stages, replanner.reserve = run_plan.stages, run_plan.reserve
        return run_plan

    return replace(
        job,
        replan=replanner if settings.replans else None,
        seek=None if planned.sought is None else partial(seek, planned.sought),
    )


def _replanner(planned: PlannedApp, job: Job) -> Replanner:
    """Plans what is left anew, should lengths or the clock leave what was planned with."""
    assert planned.space is not None
    models = planned.expanded.app.models
    lengths, longest = [one.lengths for one in models], longest_of(models)
    run_plan = job.run_plan
    return Replanner(job.layout.tasks, lengths, longest, planned.space, run_plan.stages, run_plan.reserve)
