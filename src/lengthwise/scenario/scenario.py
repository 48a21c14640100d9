"""A scenario: one whole question, checked, as the file asks it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, PrivateAttr, model_validator

from lengthwise.scenario._lab import LabSection
from lengthwise.scenario._merge import merged
from lengthwise.scenario._places import resolved
from lengthwise.scenario._predictor import PredictorSection
from lengthwise.scenario._schedule import ScheduleSection
from lengthwise.scenario._toml import toml
from lengthwise.scenario._values import Section
from lengthwise.scenario.sections import (
    DeploymentSection,
    EngineSection,
    RunSection,
    SchedulerSection,
    SearchSection,
    SloSection,
    VariantSection,
    WorkloadSection,
)
from lengthwise.schema.errors import InputError


class Scenario(Section):
    """A workload, a deployment and how to look at them; with variants, several side by side."""

    name: str = ""
    description: str = ""
    workload: WorkloadSection
    deployment: DeploymentSection
    engine: EngineSection = EngineSection()
    scheduler: SchedulerSection = SchedulerSection()
    predictor: PredictorSection = PredictorSection()
    slo: SloSection = SloSection()
    run: RunSection = RunSection()
    search: SearchSection | None = None
    lab: LabSection | None = None
    schedule: ScheduleSection | None = None
    variants: list[VariantSection] = Field(default_factory=list)
    _source: str = PrivateAttr("scenario")
    _folder: Path = PrivateAttr(Path())
    _notes: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="after")
    def _one_prediction(self) -> Self:
        if self.predictor.kind != "none" and self.workload.predicted != "none":
            raise ValueError(
                f"workload.predicted = {self.workload.predicted!r} and predictor.kind = {self.predictor.kind!r} "
                "both predict; keep one of them"
            )
        return self

    @property
    def source(self) -> str:
        """The file it came from, for messages."""
        return self._source

    @property
    def folder(self) -> Path:
        """Where its relative paths start."""
        return self._folder

    @property
    def notes(self) -> tuple[str, ...]:
        """What was dropped for an override, a sentence each."""
        return self._notes

    @property
    def files(self) -> list[Path]:
        """The files that the scenario is read from, with its variants: its own, traces, models, specs, tables."""
        named = {Path(self.source)}
        for whole in self.effective():
            on = whole.deployment
            texts = (
                whole.workload.trace,
                whole.predictor.file,
                on.model,
                on.gpu,
                on.node,
                on.cost.partition(":")[2].partition("#")[0],
                *(one.file for one in (whole.lab.predictors if whole.lab else ())),
            )
            named.update(resolved(text, self.folder) for text in texts if text)
        return sorted(path for path in named if path.is_file())

    def from_file(self, source: str, folder: Path, notes: Sequence[str] = ()) -> Self:
        """The same scenario, told where it came from; a nameless one takes the file's name."""
        named = self.model_copy(update={} if self.name else {"name": Path(source).stem})
        named._source, named._folder, named._notes = source, folder, tuple(notes)  # noqa: SLF001 - its own
        return named

    def effective(self) -> list[Self]:
        """One scenario without variants for each variant, named as it; just this one without any."""
        if not self.variants:
            return [self]
        base = self.model_dump(exclude={"variants"}, exclude_unset=True, exclude_none=True)
        return [self._with(base, variant) for variant in self.variants]

    def only(self, variant: str) -> Self:
        """The scenario of the one variant of this name.

        Raises:
            InputError: It has none of that name.
        """
        sides = {whole.name: whole for whole in self.effective()} if self.variants else {}
        if variant not in sides:
            known = f"it has {', '.join(sides)}" if sides else "it has none"
            raise InputError(f"{self.source} has no variant {variant!r}; {known}")
        return sides[variant]

    def _with(self, base: dict[str, Any], variant: VariantSection) -> Self:
        whole = type(self).model_validate(merged(base, variant.overrides | {"name": variant.name}))
        return whole.from_file(self.source, self.folder, self.notes)

    def with_run(self, **changes: Any) -> Self:
        """The same scenario with other settings of ``[run]``, such as ``seeds=5``; they are checked."""
        return self.model_copy(update={"run": RunSection.model_validate(self.run.model_dump() | changes)})

    def to_toml(self) -> str:
        """The effective settings, defaults included, as a TOML file that loads to an equal scenario."""
        return toml(self.model_dump(exclude_none=True))
