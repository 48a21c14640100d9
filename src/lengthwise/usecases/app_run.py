"""Run of an application: on engines of this machine or a Ray cluster, at given addresses, or in virtual time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lengthwise.apps import run as runs
from lengthwise.apps.expand import TemplateDecider
from lengthwise.apps.inputs import Rows, is_batch, write_batch
from lengthwise.apps.launch import Launcher, SimulatedLauncher, StaticLauncher
from lengthwise.apps.run.replanning import Replanner
from lengthwise.apps.run.results import DEAD, OUTPUTS, Exported, sha256
from lengthwise.schema.app import AppPlan
from lengthwise.schema.errors import EngineError
from lengthwise.usecases.app_plan import PlannedApp, context_lengths
from lengthwise.usecases.app_setup import Engines, launcher_of

FORMS = ("jsonl", "parquet")
BATCH_ANSWERS, BATCH_ERRORS = "batch-output.jsonl", "batch-errors.jsonl"
"""Additional outputs of an OpenAI batch file, in the format of such batches."""


@dataclass(frozen=True)
class AppRun:
    """The result of a run that is complete or was interrupted."""

    completed: runs.RunResult
    exported: Exported
    metadata: dict[str, Any]
    folder: Path
    # The plan followed, including one found while engines started; None: the engines were given.
    plan: AppPlan | None = None


@dataclass(frozen=True)
class RunMonitor:
    """Functions that a run calls to report its progress."""

    progress: Callable[[runs.Progress], None] | None = None
    every_s: float = 0.5  # interval of ``progress`` on the run's clock
    stopping: Callable[[int], None] | None = None
    # Called before the first engine starts with the answers of an interrupted run that are reused, if there are any.
    started: Callable[[runs.Reused], None] | None = None


def run_app(
    planned: PlannedApp,
    rows: Rows,
    engines: Engines,
    folder: Path,
    *,
    settings: runs.Settings | None = None,
    store: str | None = None,
    resume: bool = False,
    forms: Sequence[str] = FORMS,
    monitor: RunMonitor | None = None,
) -> AppRun:
    """Run an application by its plan, or resume an earlier run, and write the outputs.

    Args:
        store: Location of the ledger, which records tasks and answers. If None, the ledger is in the folder.

    Raises:
        OutputError: The outputs cannot be written.
        EngineError: Engines of a model cannot start, or crash repeatedly. The recorded answers are written first.
    """
    monitor = monitor or RunMonitor()
    planned = _with_request_options(planned, engines)
    launcher = launcher_of(planned, engines, folder)
    # The list's only entry is the current plan; a search in the background replaces it.
    current = [planned.plan]
    job = _job(planned, rows, launcher, settings or runs.Settings(seed=0), current)
    failed: runs.EnginesFailedError | None = None
    with runs.RunFolder(folder, store).locked(resume=resume) as ledger:
        callbacks: dict[str, Any] = {
            "monitor": monitor.progress,
            "watch_s": monitor.every_s,
            "started": monitor.started,
        }
        try:
            if isinstance(launcher, SimulatedLauncher):
                completed = runs.run_simulated(job, ledger, launcher, **callbacks)
            else:
                completed = runs.run_on_engines(job, ledger, launcher, stopping=monitor.stopping, **callbacks)
        except runs.EnginesFailedError as error:
            completed, failed = error.completed, error
        exported = runs.export(ledger, job.layout, folder, ids=lambda row: str(rows.ids[row]), forms=forms)
    if "jsonl" in forms and is_batch(planned.expanded.app):
        write_batch(folder / OUTPUTS, folder / DEAD, folder / BATCH_ANSWERS, folder / BATCH_ERRORS)
        digests = {name: sha256(folder / name) for name in (BATCH_ANSWERS, BATCH_ERRORS)}
        exported = replace(exported, files={**exported.files, **digests})
    (plan,) = current
    metadata = runs.manifest(
        job if plan is None else replace(job, run_plan=runs.run_plan_of(plan)),
        completed,
        exported,
        app=identity(planned),
        inputs=rows.sha256,
        models={model.name: model.identity() for model in planned.expanded.app.models},
    )
    runs.write_manifest(folder, metadata)
    if failed is not None:
        raise EngineError(f"{failed}. Answers recorded before are in {folder}") from failed
    return AppRun(completed, exported, metadata, folder, plan)


def _with_request_options(planned: PlannedApp, engines: Engines) -> PlannedApp:
    """Add the engines' request options to their models, so that results under other options are not reused."""
    options = [
        json.dumps([one.served, dict(one.body)], sort_keys=True, default=str) if one.served or one.body else ""
        for one in engines.loaded
    ]
    if engines.launcher == "simulated" or not any(options):
        return planned
    app = planned.expanded.app
    models = [replace(model, request_options=text) for model, text in zip(app.models, options, strict=True)]
    return replace(planned, expanded=replace(planned.expanded, app=replace(app, models=models)))


def identity(planned: PlannedApp) -> str:
    """Return the SHA-256 of the application's calls and models as hexadecimal text."""
    app = planned.expanded.app
    text = repr((app.calls, app.loops, [model.identity() for model in app.models]))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _job(
    planned: PlannedApp, rows: Rows, launcher: Launcher, settings: runs.Settings, current: list[AppPlan | None]
) -> runs.Job:
    expanded, space, hashes = planned.expanded, planned.space, f"{identity(planned)} {rows.sha256}"
    work = runs.RunTasks(expanded.tasks, TemplateDecider(expanded), runs.expected_tokens(planned.draws), hashes)
    if isinstance(launcher, StaticLauncher):
        return runs.job_of(work, runs.Planned(runs.RunPlan((launcher.plans(),)), runs.StaticPlacer()), settings)
    assert space is not None
    assert planned.plan is not None
    run_plan, placer = runs.run_plan_of(planned.plan), runs.ClusterPlacer(space.cluster, space.seconds)
    job, wait = runs.job_of(work, runs.Planned(run_plan, placer), settings), planned.final_plan
    lengths, contexts = [model.lengths for model in expanded.app.models], context_lengths(expanded.app.models)
    stages, reserve = job.run_plan.stages, job.run_plan.reserve
    replanner = Replanner(job.layout.tasks, lengths, contexts, space, stages, reserve)

    def final_run_plan() -> runs.RunPlan:
        assert wait is not None
        found = wait()
        current[0], made = found, runs.run_plan_of(found)
        replanner.stages, replanner.reserve = made.stages, made.reserve
        return made

    pending_plan = None if wait is None else final_run_plan
    return replace(job, replan=replanner if settings.replans else None, pending_plan=pending_plan)
