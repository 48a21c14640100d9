"""What was measured takes the place of what is assumed: lengths, cost tables and switch times of an application."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lengthwise.apps.app import App, Model
from lengthwise.apps.launch import Loaded
from lengthwise.apps.plan import Space, SwitchTimes
from lengthwise.apps.plan.switching import HOWS
from lengthwise.scenario._app_profile_asked import identity, shapes
from lengthwise.scenario._app_profile_book import (
    BOOK,
    Book,
    Costed,
    Shape,
    Switched,
    cost_path,
    lengths_path,
    read_book,
)
from lengthwise.scenario._app_profile_lengths import read_lengths
from lengthwise.schema.errors import InputError

Key = tuple[str, str, int, int, str]
"""(model, GPU, tp, pp, how)."""


@dataclass
class Over:
    """Lays a profile over an application.

    Attributes:
        folder: Of the profile.
        app: The application.
        space: Where its models have room, with what is assumed.
        fixed: Models whose command is one for all plans: what one replica takes, all take.
        notes: What was there and what was not, a sentence each.
    """

    folder: Path
    app: App
    space: Space
    fixed: frozenset[str] = frozenset()
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not (self.folder / BOOK).exists():
            raise InputError(
                f"{self.folder} must hold the profile of an application; there is no {BOOK} in it. "
                "Measure one: lengthwise app profile APP.toml --out FOLDER"
            )
        self.book: Book = read_book(self.folder)

    def models(self) -> tuple[Model, ...]:
        """The application's models with what was measured of them."""
        of = identity(self.app)
        changed = [one.model for one in self.book.lengths if one.of.split("-")[0] != of]
        if any(model.name in changed for model in self.app.models):
            self.notes.append(
                "the application was changed since its lengths were measured; measure them again"
            )
        return tuple(self._costed(number, self._long(model)) for number, model in enumerate(self.app.models))

    def times(self) -> SwitchTimes:
        """Switch times: the measured ones first."""
        assumed = self.space.times
        measured = dict(self.book.switch_times().measured)
        for number, model in enumerate(self.app.models):
            if model.name in self.fixed:
                self._spread(number, model.name, measured)
            self.notes.extend(self._switch_notes(number, model.name, measured))
        return replace(assumed, measured={**assumed.measured, **measured})

    def _spread(self, number: int, name: str, measured: dict[Key, float]) -> None:
        """What was measured of a shape holds for all of the same GPUs."""
        for plan in shapes(self.space, number, "all"):
            mine = (one for one in self.book.switches if (one.model, one.gpu) == (name, plan.gpu))
            if (found := next(mine, None)) is not None:
                for how in HOWS:
                    if (seconds := measured.get((name, *shape_of(found), how))) is not None:
                        measured.setdefault((name, *plan.shape, how), seconds)

    def _long(self, model: Model) -> Model:
        row, path = self.book.length(model.name), lengths_path(self.folder, model.name)
        if row is None or not row.outputs or not path.exists():
            self.notes.append(f"lengths of {model.name} were not measured: they are as the application says")
            return model
        cut = f"; {row.cut} of them ended at their limit" if row.cut else ""
        off = "" if row.half_width is None else f" ± {row.half_width:.2g}"
        self.notes.append(
            f"lengths of {model.name} are measured: {row.outputs} outputs, {row.mean_tokens:.4g}{off} tokens{cut}"
        )
        return replace(model, lengths=read_lengths(path))

    def _costed(self, number: int, model: Model) -> Model:
        row, path = self.book.cost(model.name), cost_path(self.folder, model.name)
        if row is None or not path.exists():
            self.notes.append(f"costs of {model.name} were not calibrated: they are of {model.cost}")
            return model
        each = [plan.shape for plan in shapes(self.space, number, "all")]
        if model.name not in self.fixed and set(each) != {shape_of(row)}:
            self.notes.append(
                f"calibrated costs of {model.name} are of one replica (tp={row.tp}, pp={row.pp} on {row.gpu}) and "
                f"plans may have others, with which they could not be compared: costs stay of {model.cost}"
            )
            return model
        self.notes.append(
            f"costs of {model.name} are calibrated: single requests are off by {row.after:.0%}, before by "
            f"{row.before:.0%}"
        )
        return replace(model, cost=f"tables:{path}", host="default")

    def _switch_notes(self, number: int, name: str, measured: dict[Key, float]) -> Iterator[str]:
        each = shapes(self.space, number, "all")
        lacking = [plan for plan in each if (name, *plan.shape, "start") not in measured]
        if len(lacking) == len(each):
            yield f"switch times of {name} were not measured: they are assumed"
        elif lacking:
            words = ", ".join(f"tp={plan.tp}, pp={plan.pp} on {plan.gpu}" for plan in lacking)
            yield f"switch times of {name} are measured but for {words}, which are assumed"
        else:
            yield f"switch times of {name} are measured"


def shape_of(row: Switched | Costed) -> Shape:
    """Of the replica that was measured."""
    return row.gpu, row.tp, row.pp


def fixed_commands(loaded: Sequence[Loaded]) -> frozenset[str]:
    """Models whose own command has no place for the degrees of a plan."""
    return frozenset(
        one.name for one in loaded if one.command and not any(f"{{{p}}}" in one.command for p in ("tp", "pp"))
    )
