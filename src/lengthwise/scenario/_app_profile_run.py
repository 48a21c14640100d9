"""An application measured on this machine, one thing after another; what a folder holds already is kept."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.apps.launch import LocalLauncher, StaticLauncher
from lengthwise.apps.launch.commands import launch_of
from lengthwise.apps.launch.local import HOST
from lengthwise.apps.placement import place
from lengthwise.scenario._app_profile_asked import Profiling, Wanted, identity, mean_over_rows, shapes, where
from lengthwise.scenario._app_profile_book import (
    Book,
    Costed,
    Lengths,
    Switched,
    cost_path,
    digest,
    lengths_path,
    read_book,
    write_book,
)
from lengthwise.scenario._app_profile_lengths import (
    SAMPLE,
    Said,
    read_said,
    run_sample,
    sampled_rows,
    write_lengths,
)
from lengthwise.scenario._app_profile_switches import switch_seconds
from lengthwise.schema.app import ModelPlan, Replica
from lengthwise.schema.errors import InputError, InternalError, OutputError, UnknownNameError

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
        wanted: How much of it.
        folder: Where it is kept.
        told: Hears what is being done, in words.
        now_s: A clock that never goes back.
        notes: What could not be measured, and why.
    """

    what: Profiling
    wanted: Wanted
    folder: Path
    told: Callable[[str], None] = lambda _: None
    now_s: Callable[[], float] = time.perf_counter
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        known = [model.name for model in self.what.app.models]
        for name in self.wanted.models:
            if name not in known:
                raise UnknownNameError("model of the application", name, known)
        self.models = [
            n for n, name in enumerate(known) if not self.wanted.models or name in self.wanted.models
        ]
        self.plans = {n: shapes(self.what.space, n, self.wanted.shapes) for n in self.models}
        self.of = {plan: self._command(plan) for plans in self.plans.values() for plan in plans}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot measure into {self.folder}: {error.strerror or error}") from error
        self.book = read_book(self.folder)

    def whole(self) -> Book:
        """Everything that is wanted, measured now or before."""
        if self.what.urls:
            self.notes.append(_GIVEN)
        else:
            for plan in self.of:
                self._switches(plan)
        if self.wanted.rows:
            self._lengths()
        if self.wanted.calibrate and not self.what.urls:
            for number in self.models:
                self._cost(self.plans[number][0])
        return self.book

    def _command(self, plan: ModelPlan) -> str:
        """Tells what is started from others; fails where nothing could be."""
        loaded = self.what.loaded[plan.model]
        if self.what.urls:
            return digest(loaded)
        launch = launch_of(loaded, plan, tuple(range(plan.gpus)), HOST, 0, self.what.space.deployment)
        return digest(launch.command, sorted(launch.environment.items()), loaded.sleeps)

    def _name(self, plan: ModelPlan) -> str:
        return self.what.app.models[plan.model].name

    def _keep(self, book: Book) -> None:
        self.book = book
        write_book(self.folder, book)

    @contextmanager
    def _launcher(self) -> Iterator[LocalLauncher | StaticLauncher]:
        what = self.what
        made = (
            StaticLauncher(what.loaded, what.urls, what.patience)
            if what.urls
            else LocalLauncher(what.loaded, self.folder / LOGS, what.space.deployment, what.patience)
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
        before = self.book.switched(name, plan.shape)
        if not self.wanted.again and before is not None and before.of == of:
            self.told(f"{name}: switches on {where(plan)} are there already")
            return
        times = self.wanted.times
        with self._launcher() as launcher:
            seconds = switch_seconds(
                launcher,
                plan,
                self._gpus(plan),
                times=times,
                now_s=self.now_s,
                told=lambda n: self.told(
                    f"{name}: started and stopped {n} of {times} times on {where(plan)}"
                ),
            )
        self._keep(self.book.with_switched(Switched(name, plan.gpu, plan.tp, plan.pp, of, **seconds)))

    def _lengths(self) -> None:
        names = [self.what.app.models[n].name for n in self.models]
        numbers = sampled_rows(len(self.what.rows), self.wanted.rows, self.wanted.seed)
        rows = [self.what.rows[int(n)] for n in numbers]
        of = f"{identity(self.what.app)}-{digest(numbers.tolist(), rows)}"
        if not self.wanted.again and all(self._has_lengths(name, of) for name in names):
            self.told(f"lengths of {len(rows)} rows are there already")
            return
        self.told(f"{len(rows)} of {len(self.what.rows)} rows are run for their lengths")
        place = self.folder / SAMPLE
        space = replace(self.what.space, times=self.book.switch_times())
        with self._launcher() as launcher:
            ended, said = run_sample(self.what.app, rows, space, launcher, place)
        if ended.how != "done":
            raise KeyboardInterrupt
        if ended.exit_code:
            self.notes.append(f"some of the sample's tasks failed; their errors are in the ledger in {place}")
        for name in names:
            self._keep_lengths(name, of, len(rows), said[name])

    def _has_lengths(self, name: str, of: str) -> bool:
        row = self.book.length(name)
        return (
            row is not None and row.of == of and (not row.outputs or lengths_path(self.folder, name).exists())
        )

    def _keep_lengths(self, name: str, of: str, rows: int, said: Sequence[Said]) -> None:
        mean = mean_over_rows(said)
        cut = sum(one.finish_reason == "length" for one in said)
        if said:
            write_lengths(lengths_path(self.folder, name), said)
        else:
            self.notes.append(f"{name} was asked nothing in the sample: its lengths are not known")
        self._keep(
            self.book.with_lengths(
                Lengths(name, of, rows, len(said), cut, _known(mean.value), _known(mean.half_width))
            )
        )

    def _cost(self, plan: ModelPlan) -> None:
        from lengthwise import cost
        from lengthwise.scenario import _app_profile_costs as costs

        name, of = self._name(plan), self.of[plan]
        path, before = cost_path(self.folder, name), self.book.cost(name)
        if not self.wanted.again and before is not None and before.of == of and path.exists():
            self.told(f"{name}: cost tables are there already")
            return
        self.told(f"{name}: measured under load on {where(plan)}")
        try:
            with self._launcher() as launcher:
                found, requests = costs.calibrated(
                    launcher, plan, self._gpus(plan), self.what.space.deployment(plan), self._sampled(name),
                    seed=self.wanted.seed,
                )  # fmt: skip
            costs.require_help(found)
        except InputError as error:
            self.notes.append(f"{name} was not calibrated: {error}")
            return
        cost.save(found.tables, path, cost.MadeFor.of_deployment(self.what.space.deployment(plan)))
        row = Costed(name, plan.gpu, plan.tp, plan.pp, of, requests, *costs.off(found))
        self._keep(self.book.with_cost(row))

    def _sampled(self, name: str) -> tuple[Any, Any]:
        """(prompt, output) tokens of what the model was asked in the sample."""
        path = lengths_path(self.folder, name)
        if not path.exists():
            raise InputError("it must have lengths first; measure them (rows above 0)")
        said = read_said(path)
        return tuple(
            np.array([getattr(one, n) for one in said], np.int64) for n in ("prompt_tokens", "output_tokens")
        )  # type: ignore[return-value]


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
