"""Measurement of an application on this machine: switching times, then output lengths, then costs."""

from __future__ import annotations

import asyncio
import csv
import io
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise import measure
from lengthwise.apps import run as runs
from lengthwise.apps.app import App
from lengthwise.apps.expand import TemplateDecider, expand
from lengthwise.apps.launch import EngineConfig, EngineTimeouts, Launcher, LocalLauncher, StaticLauncher
from lengthwise.apps.launch.engine import HttpEngine
from lengthwise.apps.launch.local import DEFAULT, HOST
from lengthwise.apps.ledger import Ledger
from lengthwise.apps.placement import place
from lengthwise.apps.plan import Space
from lengthwise.apps.plan.draws import draw
from lengthwise.backend.openai_protocol import Server
from lengthwise.measure.calibration import Calibration, client_was_disturbed
from lengthwise.schema.app import ModelPlan, Replica, Tasks
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError, InternalError, OutputError, UnknownNameError
from lengthwise.schema.estimate import UNKNOWN, Estimate
from lengthwise.schema.files import write_atomic
from lengthwise.schema.records import RunResult, shape_facts
from lengthwise.schema.workload import Workload
from lengthwise.statistics import kaplan_meier, t_half_width
from lengthwise.usecases.app_profile_folder import (
    CostRow,
    LengthRow,
    SwitchRow,
    cost_path,
    digest,
    lengths_path,
    read_profile,
    write_profile,
)
from lengthwise.workload import Empirical

Ints = npt.NDArray[np.int64]
_MIN_REQUESTS = (24, 32, 48)
"""For each concurrency, lowest first, so that at least 50 requests are fitted to and at least 10 are held out."""
_REQUESTS_PER_SEQUENCE = (1, 3, 3)
_REPEATS = 4  # a load is repeated up to this often if other work on the client's machine disturbs it


def calibrate_replica(
    launcher: Launcher,
    plan: ModelPlan,
    gpus: Replica,
    deployment: Deployment,
    lengths: tuple[Ints, Ints],
    *,
    seed: int = 0,
) -> tuple[Calibration, int]:
    """Put one replica under load, and return cost tables fitted to it and the number of requests sent.

    There are three loads: one request at a time, as many as the replica runs at once, and the geometric mean of both.
    One load is held out of the fit. Requests are drawn from ``lengths``, the prompt and output tokens of a sample.
    Raises EngineError if the engine of the replica cannot start.
    """
    with _running_engine(launcher, plan, gpus) as (server, max_num_seqs):
        max_concurrency = min(max_num_seqs, deployment.limits.max_num_seqs)
        loads = list(calibration_loads(max_concurrency, lengths, deployment.max_model_len, seed))
        runs = [bench_without_disturbance(server, load, deployment, seed) for load in loads]
    return measure.calibrate(runs, deployment, seed=seed), sum(map(len, loads))


@contextmanager
def _running_engine(launcher: Launcher, plan: ModelPlan, gpus: Replica) -> Iterator[tuple[Server, int]]:
    """Start an engine and yield its address and concurrency limit. The event loop pauses while the caller measures."""
    with asyncio.Runner() as runner:
        engine = runner.run(launcher.start(plan, gpus))
        try:
            if not isinstance(engine, HttpEngine):
                raise InternalError(f"only engines at an address can be measured; {engine.description} has none")
            yield engine.server, engine.max_num_seqs
        finally:
            runner.run(launcher.stop(engine))


def concurrencies(max_num_seqs: int) -> tuple[int, ...]:
    """Return the numbers of concurrent requests to measure with: one, the geometric mean, and the maximum."""
    return tuple(sorted({1, max(1, round(max_num_seqs**0.5)), max_num_seqs}))


def calibration_loads(
    max_num_seqs: int, lengths: tuple[Ints, Ints], max_model_len: int, seed: int
) -> Iterator[Workload]:
    """Yield a closed-loop workload for each of ``concurrencies(max_num_seqs)``, of lengths drawn from the sample.

    ``lengths`` are the prompt and output tokens of the sample. A request has at least two output tokens and fits in
    ``max_model_len``.
    """
    rng = np.random.default_rng(seed)
    levels = concurrencies(max_num_seqs)
    min_requests = _MIN_REQUESTS if len(levels) == 3 else (sum(_MIN_REQUESTS),) * len(levels)
    for level, fewest, factor in zip(levels, min_requests, _REQUESTS_PER_SEQUENCE, strict=False):
        count = max(fewest, factor * level)
        rows = rng.integers(0, len(lengths[0]), count)
        output = np.clip(lengths[1][rows], 2, max(2, max_model_len // 2))
        prompt = np.clip(lengths[0][rows], 1, max_model_len - output)
        yield Workload(np.zeros(count), prompt, output, concurrency=level, name=f"{level} at a time")


def bench_without_disturbance(server: Server, load: Workload, deployment: Deployment, seed: int) -> RunResult:
    """Send a workload, again while the client is disturbed, at most _REPEATS times. Return the last run."""
    parallel, limits = deployment.parallel, deployment.limits
    model, gpu = deployment.model, deployment.gpu
    metadata = {"model": model.name, "model_shape": shape_facts(model), "gpu": gpu.name, "gpus": parallel.gpus}
    metadata |= {name: getattr(parallel, name) for name in ("tp", "pp", "replicas")}
    metadata |= {name: getattr(limits, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
    settings = measure.LoadSettings(seed=seed, warmup_requests=2)
    for _ in range(_REPEATS):
        measured = measure.bench(server, load, settings, deployment=metadata)
        if any(f"ended by {measure.INTERRUPTED}" in warning for warning in measured.warnings):
            raise KeyboardInterrupt
        if not client_was_disturbed(measured):
            break
    return measured


def require_improvement(found: Calibration) -> None:
    """Raise InputError if calibration only increased errors, or changed nothing although runs and tables disagree."""
    if not found.is_improvement:
        raise InputError(f"the calibrated tables are only worse than the given ones: {'; '.join(found.warnings)}")
    if not found.has_changed and found.disagreement:
        hidden = "the noise of the runs hides which part of a step is off"
        raise InputError(f"runs and tables disagree ({found.disagreement}), and {hidden}")


def jct_errors(found: Calibration) -> tuple[float, float]:
    """Return the mean absolute relative errors of the JCT of held-out requests (before, after) the calibration."""
    change = next(change for change in found.changes if change.metric == "jct")
    return change.before, change.after


SAMPLE, LOGS = "sample", "logs"  # folders in the profile's folder: of the sample's run, and of the engines' logs
SHAPES = ("smallest", "all")
_DRAWS = 4
_PAGE_ROWS = 5_000
_STATIC_NOTE = (
    "the engines already run, so only their output lengths were measured: they cannot be restarted for switching "
    "times, and costs are calibrated by lengthwise bench and calibrate"
)


@dataclass(frozen=True)
class SampleOutput:
    """One output of a model in the run of the sampled rows."""

    call: str
    row: int
    prompt_tokens: int
    output_tokens: int
    finish_reason: str


COLUMNS = tuple(one.name for one in fields(SampleOutput))


def sampled_rows(count: int, max_rows: int, seed: int) -> Ints:
    """Return at most ``max_rows`` random row numbers, ascending and without repetition."""
    if count <= max_rows:
        return np.arange(count)
    return np.sort(np.random.default_rng(seed).choice(count, max_rows, replace=False)).astype(np.int64)


def run_sample(
    app: App, rows: Sequence[Mapping[str, Any]], space: Space, launcher: Launcher, folder: Path
) -> tuple[runs.RunResult, dict[str, list[SampleOutput]]]:
    """Run the application on these rows, or resume such a run. Return the result, and the outputs of each model."""
    job = _job(app, rows, space, launcher)
    with runs.RunFolder(folder).locked(resume=True) as ledger:
        completed = runs.run_on_engines(job, ledger, launcher)
        return completed, _outputs(ledger, job.layout)


def _job(app: App, rows: Sequence[Mapping[str, Any]], space: Space, launcher: Launcher) -> runs.Job:
    expanded = expand(app, rows)
    stages = packed_stages(space, expanded.tasks)
    plans = tuple(plan for stage in stages for plan in stage)
    contexts = [space.deployment(plan).max_model_len for plan in sorted(plans)]
    lengths = [model.lengths for model in app.models]
    draws = [draw(expanded.tasks, lengths, contexts, seed) for seed in range(_DRAWS)]
    words = repr((app.calls, app.loops, [model.identity() for model in app.models], list(rows)))
    work = runs.RunTasks(expanded.tasks, TemplateDecider(expanded), runs.expected_tokens(draws), words)
    if isinstance(launcher, StaticLauncher):
        return runs.job_of(work, runs.Planned(runs.RunPlan((launcher.plans(),)), runs.StaticPlacer()))
    placer = runs.ClusterPlacer(space.cluster, space.seconds)
    return runs.job_of(work, runs.Planned(runs.RunPlan(stages, plans), placer))


def packed_stages(space: Space, tasks: Tasks) -> tuple[tuple[ModelPlan, ...], ...]:
    """Group the models, ordered by first request, into stages of consecutive models that fit on the GPUs together.

    Each model runs on as few GPUs as possible.
    """
    order = list(dict.fromkeys(tasks.model.tolist()))
    stages: list[tuple[ModelPlan, ...]] = []
    for model in (*order, *(one for one in range(len(tasks.models)) if one not in order)):
        plan = space.plans(model)[0]
        if stages and space.fits((*stages[-1], plan)):
            stages[-1] = (*stages[-1], plan)
        else:
            stages.append((plan,))
    return tuple(stages)


def _outputs(ledger: Ledger, layout: runs.Layout) -> dict[str, list[SampleOutput]]:
    tasks, by_task = layout.tasks, {}
    for first in range(0, len(tasks), _PAGE_ROWS):
        for row in ledger.rows(first, _PAGE_ROWS):
            if row.output is not None:
                by_task[int(layout.task_of[row.task])] = row.output
    outputs: dict[str, list[SampleOutput]] = {name: [] for name in tasks.models}
    for task in sorted(by_task):
        place, output = int(layout.place_of[task]), by_task[task]
        call, model = layout.pairs[int(tasks.call[place])]
        counts = output.prompt_tokens, output.output_tokens
        made = SampleOutput(tasks.calls[call], int(tasks.row[place]), *counts, output.finish_reason)
        outputs[tasks.models[model]].append(made)
    return outputs


def write_outputs(path: Path, outputs: Sequence[SampleOutput]) -> None:
    """Write outputs to a CSV file, one per line."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *map(astuple, outputs)])
    write_atomic(path, text.getvalue().encode())


def read_outputs(path: Path) -> list[SampleOutput]:
    """Return the outputs in a CSV file. Raises InputError if the file has no outputs or other columns."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [tuple(row[name] for name in COLUMNS) for row in csv.DictReader(file)]
        outputs = [SampleOutput(row[0], int(row[1]), int(row[2]), int(row[3]), row[4]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} must be a CSV with the columns {', '.join(COLUMNS)} ({error!r})") from error
    if not outputs:
        raise InputError(f"{path} must hold at least one output; it holds none")
    return outputs


def read_lengths(path: Path) -> Empirical:
    """Return the distribution that a file's output lengths would have without a limit.

    An output that reached its limit is censored. The Kaplan-Meier estimate (1958) is used. It places the probability
    beyond the longest output on that output. If all outputs have the same limit, this is the empirical distribution.
    """
    outputs = read_outputs(path)
    is_cut = np.array([output.finish_reason == "length" for output in outputs], bool)
    return uncensored(np.array([output.output_tokens for output in outputs], np.int64), is_cut)


def uncensored(tokens: Ints, is_cut: npt.NDArray[np.bool_]) -> Empirical:
    """Return the Kaplan-Meier estimate of lengths. A length that ``is_cut`` marks is a lower bound."""
    lengths, cdf = kaplan_meier(tokens, is_cut & (tokens < tokens.max()))
    return Empirical(lengths, np.diff(cdf, prepend=0.0))


def mean_over_rows(outputs: Sequence[SampleOutput]) -> Estimate:
    """Return the mean output tokens, with a 95 % interval over rows, because outputs of a row depend on each other.

    The mean is a ratio estimator with linearized residuals (Cochran, Sampling Techniques, 6.3).
    """
    if not outputs:
        return UNKNOWN
    row = np.unique([output.row for output in outputs], return_inverse=True)[1]
    tokens = np.bincount(row, [output.output_tokens for output in outputs])
    counts = np.bincount(row)
    mean = float(tokens.sum() / counts.sum())
    residuals = (tokens - mean * counts) / counts.mean()
    return Estimate(mean, float(t_half_width(residuals, 0.95)))


@dataclass(frozen=True)
class ProfileTarget:
    """The application to measure, with the engines and GPUs that run it."""

    app: App
    rows: Sequence[Mapping[str, Any]]
    loaded: Sequence[EngineConfig]
    space: Space
    timeouts: EngineTimeouts = DEFAULT
    # By model number: addresses of running engines, which are not started or stopped; None: start engines.
    urls: Mapping[int, Sequence[str]] | None = None


@dataclass(frozen=True)
class ProfileOptions:
    """Options that decide how much is measured."""

    models: tuple[str, ...] = ()  # only these; (): all
    rows: int = 32  # maximum rows of the sample; 0: do not measure lengths
    times: int = 3  # starts of each engine
    # "smallest": replicas on the fewest GPUs of each kind; "all": every replica that a plan may use.
    shapes: str = "smallest"
    calibrate: bool = False
    repeat: bool = False  # measure again what the folder has
    seed: int = 0

    def __post_init__(self) -> None:
        if self.shapes not in SHAPES:
            raise UnknownNameError("choice of shapes", self.shapes, SHAPES)
        if self.rows < 0 or self.times < 1:
            raise InputError(f"rows must be at least 0 and times at least 1; got {self.rows} and {self.times}")


def shapes(space: Space, model: int, choice: str) -> list[ModelPlan]:
    """Return a model's plans with one replica, fewest GPUs first. "smallest" selects one for each kind of GPU."""
    plans = [plan for plan in space.plans(model) if plan.dp == 1]
    if choice == "all":
        return plans
    smallest: dict[str, ModelPlan] = {}
    for plan in plans:
        smallest.setdefault(plan.gpu, plan)
    return list(smallest.values())


def identity(app: App) -> str:
    """Return a digest of the application's calls, loops and models."""
    return digest(app.calls, app.loops, [model.identity() for model in app.models])


def shape_text(plan: ModelPlan) -> str:
    """Return the shape of a replica as text ("A100-80GB, tp=2")."""
    return f"{plan.gpu}, tp={plan.tp}" + (f", pp={plan.pp}" if plan.pp > 1 else "")


def switch_seconds(
    launcher: Launcher,
    plan: ModelPlan,
    gpus: Replica,
    *,
    times: int,
    now_s: Callable[[], float],
    report: Callable[[int], None] = lambda _: None,
) -> dict[str, tuple[float, ...]]:
    """Start, suspend, wake and stop a replica ``times`` times, and return the seconds that every action took.

    The keys are "start_s", "stop_s", "sleep_s" and "wake_s". The last two are empty if the engine cannot sleep. The
    first start counts although weights and caches may be cold. Raises EngineError if the engine fails to start.
    """

    async def once() -> dict[str, float]:
        seconds, begin_s = {}, now_s()
        engine = await launcher.start(plan, gpus)
        seconds["start_s"] = now_s() - begin_s
        try:
            begin_s = now_s()
            if await launcher.sleep(engine):
                asleep_s = now_s()
                await launcher.wake(engine)
                seconds |= {"sleep_s": asleep_s - begin_s, "wake_s": now_s() - asleep_s}
        finally:
            begin_s = now_s()
            await launcher.stop(engine)
        return seconds | {"stop_s": now_s() - begin_s}

    rounds = []
    with asyncio.Runner() as runner:
        for done in range(times):
            rounds.append(runner.run(once()))
            report(done + 1)
    names = ("start_s", "stop_s", "sleep_s", "wake_s")
    return {name: tuple(seconds[name] for seconds in rounds if name in seconds) for name in names}


@dataclass
class ProfileRun:
    """Measures an application into a folder, and writes profile.json after each measurement."""

    target: ProfileTarget
    options: ProfileOptions
    folder: Path
    report: Callable[[str], None] = lambda _: None  # called with a sentence about each measurement
    now_s: Callable[[], float] = time.perf_counter  # a monotonic clock
    notes: list[str] = field(default_factory=list)  # measurements that failed, and why

    def __post_init__(self) -> None:
        known = [model.name for model in self.target.app.models]
        for name in self.options.models:
            if name not in known:
                raise UnknownNameError("model of the application", name, known)
        self.models = [n for n, name in enumerate(known) if not self.options.models or name in self.options.models]
        self.plans = {n: shapes(self.target.space, n, self.options.shapes) for n in self.models}
        self.sources = {plan: self._source(plan) for plans in self.plans.values() for plan in plans}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot measure into {self.folder}: {error.strerror or error}") from error
        self.profile = read_profile(self.folder)

    def complete(self) -> None:
        """Measure everything that the options select and that is not in the folder yet."""
        if self.target.urls:
            self.notes.append(_STATIC_NOTE)
        else:
            for plan in self.sources:
                self._measure_switches(plan)
        if self.options.rows:
            self._measure_lengths()
        if self.options.calibrate and not self.target.urls:
            for number in self.models:
                self._calibrate(self.plans[number][0])

    def _source(self, plan: ModelPlan) -> str:
        """Return a digest of the command that starts the plan's engine. Raises InputError if there is no command."""
        config = self.target.loaded[plan.model]
        if self.target.urls:
            return digest(config)
        launch = config.launch(plan, tuple(range(plan.gpus)), HOST, 0, self.target.space.deployment)
        return digest(launch.command, sorted(launch.environment.items()), config.sleeps)

    def _is_current(self, row: SwitchRow | LengthRow | CostRow | None, source: str) -> bool:
        return not self.options.repeat and row is not None and row.source == source

    def _save(self, row: SwitchRow | LengthRow | CostRow) -> None:
        self.profile = self.profile.with_row(row)
        write_profile(self.folder, self.profile)

    @contextmanager
    def _launcher(self) -> Iterator[LocalLauncher | StaticLauncher]:
        target = self.target
        launcher = (
            StaticLauncher(target.loaded, target.urls, target.timeouts)
            if target.urls
            else LocalLauncher(target.loaded, self.folder / LOGS, target.space.deployment, target.timeouts)
        )
        try:
            yield launcher
        finally:
            asyncio.run(launcher.close())

    def _gpus(self, plan: ModelPlan) -> Replica:
        space = self.target.space
        placed = place([plan], {}, space.cluster, space.seconds)
        if placed is None:
            raise InternalError(f"a valid plan must have a place; {plan} has none")
        return placed[plan.model][0]

    def _measure_switches(self, plan: ModelPlan) -> None:
        name, source, times = self.target.app.models[plan.model].name, self.sources[plan], self.options.times
        if self._is_current(self.profile.switch(name, plan.shape), source):
            self.report(f"{name}: switching times on {shape_text(plan)} are already measured")
            return

        def report(done: int) -> None:
            self.report(f"{name}: started and stopped {done} of {times} times on {shape_text(plan)}")

        with self._launcher() as launcher:
            gpus = self._gpus(plan)
            seconds = switch_seconds(launcher, plan, gpus, times=times, now_s=self.now_s, report=report)
        self._save(SwitchRow(name, plan.gpu, plan.tp, plan.pp, source, **seconds))

    def _measure_lengths(self) -> None:
        target, names = self.target, [self.target.app.models[n].name for n in self.models]
        numbers = sampled_rows(len(target.rows), self.options.rows, self.options.seed)
        rows = [target.rows[int(n)] for n in numbers]
        source = f"{identity(target.app)}-{digest(numbers.tolist(), rows)}"
        if all(self._has_lengths(name, source) for name in names):
            self.report(f"lengths of {len(rows)} rows are already measured")
            return
        self.report(f"running {len(rows)} of {len(target.rows)} rows for their output lengths")
        folder = self.folder / SAMPLE
        space = replace(target.space, times=self.profile.switch_times())
        with self._launcher() as launcher:
            completed, outputs = run_sample(target.app, rows, space, launcher, folder)
        if completed.how != "done":
            raise KeyboardInterrupt
        if completed.exit_code:
            self.notes.append(f"some of the sample's tasks failed; their errors are in the ledger in {folder}")
        for name in names:
            self._save_lengths(name, source, len(rows), outputs[name])

    def _has_lengths(self, name: str, source: str) -> bool:
        row = self.profile.length(name)
        has_file = row is not None and (not row.outputs or lengths_path(self.folder, name).exists())
        return has_file and self._is_current(row, source)

    def _save_lengths(self, name: str, source: str, rows: int, outputs: Sequence[SampleOutput]) -> None:
        mean = mean_over_rows(outputs)
        cut = sum(output.finish_reason == "length" for output in outputs)
        if outputs:
            write_outputs(lengths_path(self.folder, name), outputs)
        else:
            self.notes.append(f"{name} had no requests in the sample: its lengths are unknown")
        known = [None if math.isnan(value) else value for value in (mean.value, mean.half_width)]
        self._save(LengthRow(name, source, rows, len(outputs), cut, *known))

    def _calibrate(self, plan: ModelPlan) -> None:
        from lengthwise import cost

        name, source = self.target.app.models[plan.model].name, self.sources[plan]
        path, deployment = cost_path(self.folder, name), self.target.space.deployment(plan)
        if self._is_current(self.profile.cost(name), source) and path.exists():
            self.report(f"{name}: cost tables are already calibrated")
            return
        self.report(f"{name}: measuring under load on {shape_text(plan)}")
        try:
            lengths = self._sampled_lengths(name)
            with self._launcher() as launcher:
                gpus, seed = self._gpus(plan), self.options.seed
                found, requests = calibrate_replica(launcher, plan, gpus, deployment, lengths, seed=seed)
            require_improvement(found)
        except InputError as error:
            self.notes.append(f"{name} was not calibrated: {error}")
            return
        cost.save(found.tables, path, cost.MadeFor.of_deployment(deployment))
        self._save(CostRow(name, plan.gpu, plan.tp, plan.pp, source, requests, *jct_errors(found)))

    def _sampled_lengths(self, name: str) -> tuple[Ints, Ints]:
        """Return the [n] prompt tokens and [n] output tokens of a model's requests in the sample."""
        path = lengths_path(self.folder, name)
        if not path.exists():
            raise InputError("its lengths must be measured before (rows above 0)")
        outputs = read_outputs(path)
        prompt = np.array([output.prompt_tokens for output in outputs], np.int64)
        return prompt, np.array([output.output_tokens for output in outputs], np.int64)
