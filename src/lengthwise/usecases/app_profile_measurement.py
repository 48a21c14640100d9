"""An application measured on this machine, one thing after another; what a folder holds already is kept."""

from __future__ import annotations

import asyncio
import csv
import io
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.apps.app import App
from lengthwise.apps.expand import Rendered, expand
from lengthwise.apps.launch import EngineConfig, EngineTimeouts, Launcher, LocalLauncher, StaticLauncher
from lengthwise.apps.launch.engine import Engine
from lengthwise.apps.launch.local import DEFAULT, HOST
from lengthwise.apps.ledger import Ledger
from lengthwise.apps.placement import place
from lengthwise.apps.plan import Space
from lengthwise.apps.plan.draws import draw
from lengthwise.apps.run import (
    ClusterPlacer,
    Job,
    Layout,
    Planned,
    Progress,
    RunFolder,
    RunPlan,
    RunResult,
    RunTasks,
    StaticPlacer,
    expected_tokens,
    job_of,
    run_on_engines,
    static_run_plan,
)
from lengthwise.schema.app import ModelPlan, Replica, Tasks
from lengthwise.schema.errors import InputError, InternalError, OutputError, UnknownNameError
from lengthwise.schema.estimate import UNKNOWN, Estimate
from lengthwise.schema.files import write_whole
from lengthwise.statistics import kaplan_meier, t_half_width
from lengthwise.usecases.app_profile_folder import (
    Costed,
    Lengths,
    ProfileStore,
    Switched,
    cost_path,
    digest,
    lengths_path,
    read_book,
    write_book,
)
from lengthwise.workload import Empirical

Ints = npt.NDArray[np.int64]
SAMPLE = "sample"
"""Folder of the sample's run, in the profile's."""
COLUMNS = ("call", "row", "prompt_tokens", "output_tokens", "finish_reason")
_DRAWS = 4
_PAGE = 5_000


@dataclass(frozen=True)
class Message:
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
    monitor: Callable[[Progress], None] | None = None,
) -> tuple[RunResult, dict[str, list[Message]]]:
    """How the application ended on these rows, and what its models said by their names.

    Goes on with what is in the folder: what was answered is not asked again.
    """
    job = _job(app, rows, space, launcher)
    with RunFolder(folder).taken(resume=True) as ledger:
        ended = run_on_engines(job, ledger, launcher, monitor=monitor)
        return ended, _message(ledger, job.layout)


def _job(app: App, rows: Sequence[Mapping[str, Any]], space: Space, launcher: Launcher) -> Job:
    expanded = expand(app, rows)
    stages = packed(space, expanded.tasks)
    spare = tuple(plan for stage in stages for plan in stage)
    longest = [space.deployment(plan).max_model_len for plan in sorted(spare)]
    lengths = [model.lengths for model in app.models]
    draws = [draw(expanded.tasks, lengths, longest, seed) for seed in range(_DRAWS)]
    words = repr((app.calls, app.loops, [model.identity() for model in app.models], list(rows)))
    work = RunTasks(expanded.tasks, Rendered(expanded), expected_tokens(draws), words)
    if isinstance(launcher, StaticLauncher):
        return job_of(work, Planned(static_run_plan(launcher.plans()), StaticPlacer()))
    return job_of(work, Planned(RunPlan(stages, spare), ClusterPlacer(space.cluster, space.seconds)))


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


def _message(ledger: Ledger, layout: Layout) -> dict[str, list[Message]]:
    """Outputs by model, in the application's order."""
    tasks, found = layout.tasks, {}
    for first in range(0, len(tasks), _PAGE):
        for row in ledger.rows(first, _PAGE):
            if row.output is not None:
                found[int(layout.task_of[row.task])] = row
    said: dict[str, list[Message]] = {name: [] for name in tasks.models}
    for task in sorted(found):
        place, output = int(layout.place_of[task]), found[task].output
        call, model = layout.pairs[int(tasks.call[place])]
        if output is not None:
            name, number = tasks.calls[call], int(tasks.row[place])
            said[tasks.models[model]].append(
                Message(name, number, output.prompt_tokens, output.output_tokens, output.finish_reason)
            )
    return said


def write_lengths(path: Path, message: Sequence[Message]) -> None:
    """Writes outputs as CSV, a line each."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(astuple(one) for one in message)
    write_whole(path, text.getvalue().encode())


def read_lengths(path: Path) -> Empirical:
    """The distribution of a file's outputs without a limit, as far as those that ended at theirs tell.

    An output that was cut is at least so long: the product-limit estimate (Kaplan and Meier, 1958), what lies behind
    the longest counting as that one. Where all have one limit it is the plain empirical distribution.
    """
    said = read_said(path)
    cut = np.array([one.finish_reason == "length" for one in said], bool)
    return without_limits(np.array([one.output_tokens for one in said], np.int64), cut)


def read_said(path: Path) -> list[Message]:
    """Outputs as they were written."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            said = [_one(row) for row in csv.DictReader(file)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} must be a CSV with the columns {', '.join(COLUMNS)} ({error!r})") from error
    if not said:
        raise InputError(f"{path} must hold at least one output; it holds none")
    return said


def _one(row: Mapping[str, str]) -> Message:
    prompt, output = int(row["prompt_tokens"]), int(row["output_tokens"])
    return Message(row["call"], int(row["row"]), prompt, output, row["finish_reason"])


def without_limits(tokens: Ints, cut: npt.NDArray[np.bool_]) -> Empirical:
    """Lengths with the weights of the product-limit estimate; ``cut`` ones are at least so long."""
    lengths, cdf = kaplan_meier(tokens, cut & (tokens < tokens.max()))
    return Empirical(lengths, np.diff(cdf, prepend=0.0))


SHAPES = ("smallest", "all")


@dataclass(frozen=True)
class Profiling:
    """What is measured, and where.

    Attributes:
        urls: Of engines that others run, by the models' numbers: they are asked, neither started nor stopped.
    """

    app: App
    rows: Sequence[Mapping[str, Any]]
    loaded: Sequence[EngineConfig]
    space: Space
    timeouts: EngineTimeouts = DEFAULT
    urls: Mapping[int, Sequence[str]] | None = None


@dataclass(frozen=True)
class Wanted:
    """How much is measured.

    Attributes:
        rows: Of the sample, at most; 0: no lengths.
        shapes: "smallest": on as few GPUs of each kind as will do; "all": every replica that a plan may have.
    """

    models: tuple[str, ...] = ()
    rows: int = 32
    times: int = 3
    shapes: str = "smallest"
    calibrate: bool = False
    repeat: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shapes not in SHAPES:
            raise UnknownNameError("choice of shapes", self.shapes, SHAPES)
        if self.rows < 0 or self.times < 1:
            raise InputError(f"rows must be at least 0 and times at least 1; they are {self.rows} and {self.times}")


def shapes(space: Space, model: int, choice: str) -> list[ModelPlan]:
    """One replica of each shape that a model may have, from the fewest GPUs; or of the smallest of each kind."""
    each = [plan for plan in space.plans(model) if plan.dp == 1]
    if choice == "all":
        return each
    first: dict[str, ModelPlan] = {}
    for plan in each:
        first.setdefault(plan.gpu, plan)
    return list(first.values())


def identity(app: App) -> str:
    """Tells what an application asks of its models from what others ask."""
    return digest(app.calls, app.loops, [model.identity() for model in app.models])


def mean_over_rows(message: Sequence[Message]) -> Estimate:
    """Mean output tokens; the interval is that of rows, whose outputs have much in common.

    A ratio of sums: by the linearised residuals of rows (Cochran, Sampling Techniques, 6.3).
    """
    if not message:
        return UNKNOWN
    row = np.unique([one.row for one in message], return_inverse=True)[1]
    tokens = np.bincount(row, [one.output_tokens for one in message])
    counts = np.bincount(row)
    mean = float(tokens.sum() / counts.sum())
    residuals = (tokens - mean * counts) / counts.mean()
    return Estimate(mean, float(t_half_width(residuals, 0.95)))


def where(plan: ModelPlan) -> str:
    """A replica's shape in words."""
    extra = f", pp={plan.pp}" if plan.pp > 1 else ""
    return f"{plan.gpu}, tp={plan.tp}{extra}"


Clock = Callable[[], float]
Seconds = dict[str, tuple[float, ...]]
"""By "start_s", "sleep_s", "wake_s" and "stop_s": each time's."""


def switch_seconds(
    launcher: Launcher,
    plan: ModelPlan,
    gpus: Replica,
    *,
    times: int,
    now_s: Clock,
    report: Callable[[int], None] = lambda _: None,
) -> Seconds:
    """Seconds of a replica's start, sleep, wake and stop, each as often as it was started.

    The first start finds weights and caches cold where they are; all count alike.

    Raises:
        EngineError: It did not start, or did not wake.
    """

    async def all_times() -> list[Mapping[str, float]]:
        rounds = []
        for done in range(times):
            rounds.append(await _once(launcher, plan, gpus, now_s))
            report(done + 1)
        return rounds

    rounds = asyncio.run(all_times())
    names = ("start_s", "stop_s", "sleep_s", "wake_s")
    return {name: tuple(one[name] for one in rounds if name in one) for name in names}


async def _once(launcher: Launcher, plan: ModelPlan, gpus: Replica, now_s: Clock) -> Mapping[str, float]:
    found, at_s = {}, now_s()
    engine = await launcher.start(plan, gpus)
    found["start_s"] = now_s() - at_s
    try:
        found |= await _sleep(launcher, engine, now_s)
    finally:
        at_s = now_s()
        await launcher.stop(engine)
    return {**found, "stop_s": now_s() - at_s}


async def _sleep(launcher: Launcher, engine: Engine, now_s: Clock) -> Mapping[str, float]:
    """Seconds to sleep and to wake; nothing of an engine that cannot."""
    at_s = now_s()
    if not await launcher.sleep(engine):
        return {}
    asleep_s = now_s()
    await launcher.wake(engine)
    return {"sleep_s": asleep_s - at_s, "wake_s": now_s() - asleep_s}


LOGS = "logs"
_GIVEN = (
    "engines are run by others: they were asked for their outputs, but neither started nor stopped, so switches and "
    "costs are not measured (of costs: lengthwise bench and calibrate)"
)


@dataclass
class Run:
    """Measures into a folder; the book is written after each thing.

    Attributes:
        what: Is measured.
        desired: How much of it.
        folder: Where it is kept.
        report: Hears what is being done, in words.
        now_s: A clock that never goes back.
        notes: What could not be measured, and why.
    """

    what: Profiling
    desired: Wanted
    folder: Path
    report: Callable[[str], None] = lambda _: None
    now_s: Callable[[], float] = time.perf_counter
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        known = [model.name for model in self.what.app.models]
        for name in self.desired.models:
            if name not in known:
                raise UnknownNameError("model of the application", name, known)
        self.models = [n for n, name in enumerate(known) if not self.desired.models or name in self.desired.models]
        self.plans = {n: shapes(self.what.space, n, self.desired.shapes) for n in self.models}
        self.of = {plan: self._command(plan) for plans in self.plans.values() for plan in plans}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot measure into {self.folder}: {error.strerror or error}") from error
        self.profile_store = read_book(self.folder)

    def complete(self) -> ProfileStore:
        """Everything that is wanted, measured now or before."""
        if self.what.urls:
            self.notes.append(_GIVEN)
        else:
            for plan in self.of:
                self._switches(plan)
        if self.desired.rows:
            self._lengths()
        if self.desired.calibrate and not self.what.urls:
            for number in self.models:
                self._cost(self.plans[number][0])
        return self.profile_store

    def _command(self, plan: ModelPlan) -> str:
        """Tells what is started from others; fails where nothing could be."""
        loaded = self.what.loaded[plan.model]
        if self.what.urls:
            return digest(loaded)
        launch = loaded.launch(plan, tuple(range(plan.gpus)), HOST, 0, self.what.space.deployment)
        return digest(launch.command, sorted(launch.environment.items()), loaded.sleeps)

    def _name(self, plan: ModelPlan) -> str:
        return self.what.app.models[plan.model].name

    def _keep(self, profile_store: ProfileStore) -> None:
        self.profile_store = profile_store
        write_book(self.folder, profile_store)

    @contextmanager
    def _launcher(self) -> Iterator[LocalLauncher | StaticLauncher]:
        what = self.what
        made = (
            StaticLauncher(what.loaded, what.urls, what.timeouts)
            if what.urls
            else LocalLauncher(what.loaded, self.folder / LOGS, what.space.deployment, what.timeouts)
        )
        try:
            yield made
        finally:
            asyncio.run(made.close())

    def _gpus(self, plan: ModelPlan) -> Replica:
        space = self.what.space
        found = place([plan], {}, space.cluster, space.seconds)
        if found is None:
            raise InternalError(f"a valid plan must have a place; {plan} has none")
        return found[plan.model][0]

    def _switches(self, plan: ModelPlan) -> None:
        name, of = self._name(plan), self.of[plan]
        before = self.profile_store.switched(name, plan.shape)
        if not self.desired.repeat and before is not None and before.of == of:
            self.report(f"{name}: switches on {where(plan)} are there already")
            return
        times = self.desired.times
        with self._launcher() as launcher:
            seconds = switch_seconds(
                launcher,
                plan,
                self._gpus(plan),
                times=times,
                now_s=self.now_s,
                report=lambda n: self.report(f"{name}: started and stopped {n} of {times} times on {where(plan)}"),
            )
        self._keep(self.profile_store.with_switched(Switched(name, plan.gpu, plan.tp, plan.pp, of, **seconds)))

    def _lengths(self) -> None:
        names = [self.what.app.models[n].name for n in self.models]
        numbers = sampled_rows(len(self.what.rows), self.desired.rows, self.desired.seed)
        rows = [self.what.rows[int(n)] for n in numbers]
        of = f"{identity(self.what.app)}-{digest(numbers.tolist(), rows)}"
        if not self.desired.repeat and all(self._has_lengths(name, of) for name in names):
            self.report(f"lengths of {len(rows)} rows are there already")
            return
        self.report(f"{len(rows)} of {len(self.what.rows)} rows are run for their lengths")
        place = self.folder / SAMPLE
        space = replace(self.what.space, times=self.profile_store.switch_times())
        with self._launcher() as launcher:
            ended, said = run_sample(self.what.app, rows, space, launcher, place)
        if ended.how != "done":
            raise KeyboardInterrupt
        if ended.exit_code:
            self.notes.append(f"some of the sample's tasks failed; their errors are in the ledger in {place}")
        for name in names:
            self._keep_lengths(name, of, len(rows), said[name])

    def _has_lengths(self, name: str, of: str) -> bool:
        row = self.profile_store.length(name)
        return row is not None and row.of == of and (not row.outputs or lengths_path(self.folder, name).exists())

    def _keep_lengths(self, name: str, of: str, rows: int, message: Sequence[Message]) -> None:
        mean = mean_over_rows(message)
        cut = sum(one.finish_reason == "length" for one in message)
        if message:
            write_lengths(lengths_path(self.folder, name), message)
        else:
            self.notes.append(f"{name} was asked nothing in the sample: its lengths are not known")
        self._keep(
            self.profile_store.with_lengths(
                Lengths(name, of, rows, len(message), cut, _known(mean.value), _known(mean.half_width))
            )
        )

    def _cost(self, plan: ModelPlan) -> None:
        from lengthwise import cost
        from lengthwise.usecases import app_profile_cost as costs

        name, of = self._name(plan), self.of[plan]
        path, before = cost_path(self.folder, name), self.profile_store.cost(name)
        if not self.desired.repeat and before is not None and before.of == of and path.exists():
            self.report(f"{name}: cost tables are there already")
            return
        self.report(f"{name}: measured under load on {where(plan)}")
        try:
            with self._launcher() as launcher:
                found, requests = costs.calibrated(
                    launcher, plan, self._gpus(plan), self.what.space.deployment(plan), self._sampled(name),
                    seed=self.desired.seed,
                )  # fmt: skip
            costs.require_help(found)
        except InputError as error:
            self.notes.append(f"{name} was not calibrated: {error}")
            return
        cost.save(found.tables, path, cost.MadeFor.of_deployment(self.what.space.deployment(plan)))
        row = Costed(name, plan.gpu, plan.tp, plan.pp, of, requests, *costs.off(found))
        self._keep(self.profile_store.with_cost(row))

    def _sampled(self, name: str) -> tuple[Any, Any]:
        """(prompt, output) tokens of what the model was asked in the sample."""
        path = lengths_path(self.folder, name)
        if not path.exists():
            raise InputError("it must have lengths first; measure them (rows above 0)")
        said = read_said(path)
        return tuple(np.array([getattr(one, n) for one in said], np.int64) for n in ("prompt_tokens", "output_tokens"))  # type: ignore[return-value]


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
