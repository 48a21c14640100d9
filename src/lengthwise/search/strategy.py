"""How a search chooses what to evaluate next: a wave is asked for, its results are told."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import numpy as np

from lengthwise.schema.errors import InputError, MissingExtraError

C = TypeVar("C")


class Strategy(Protocol[C]):
    """What to evaluate next, for candidates of one kind.

    A strategy draws nothing from outside and does not know who evaluates: the same results bring the same
    waves, whatever the number of workers and the order in which they came.
    """

    def suggest(self) -> list[C]:
        """The candidates to evaluate now, none of them twice; empty: the search is at its end."""
        ...

    def tell(self, results: Sequence[tuple[C, float | None]]) -> None:
        """What came of candidates that were asked for: a score, the more the better, or None: infeasible."""
        ...


Settings = dict[str, Any]
Axes = dict[str, tuple[Any, ...]]

_RETRY_STATUSES = 4  # draws before what was proposed already gives way to something unseen
_ALTERNATIVE = "alternative"


class Bayesian:
    """A strategy over settings, each an alternative with one value an axis.

    Axes of numbers are taken as ordered, all others as names. An axis with the same values in several
    alternatives is one axis to the estimator, so that what is learned with one scheduler helps the others.

    Args:
        axes: The alternatives, each complete: axis -> values. Schedulers with other knobs are alternatives.
        trials: How many settings are proposed in all.
        seed: Of the draws; the same seed and the same results bring the same settings.
        wave: How many are proposed at a time, to be evaluated side by side.

    Raises:
        MissingExtraError: Optuna is not installed.
        InputError: There are no alternatives, an axis has no values, or a number is less than 1.
    """

    def __init__(self, axes: Sequence[Axes], trials: int, seed: int, batch_size: int = 8) -> None:
        _check(axes, trials, batch_size)
        self._optuna = _imported()
        self._space = _Space(axes)
        self._left, self._batch_size = trials, batch_size
        self._chance = np.random.default_rng(seed)
        self._open: dict[str, Any] = {}
        self._seen: set[str] = set()
        with _quiet(self._optuna):
            self._study = self._optuna.create_study(direction="maximize", sampler=_sampler(self._optuna, seed))

    def suggest(self) -> list[Settings]:
        """The next wave; empty: all trials are made, or no settings are left."""
        wave: list[Settings] = []
        with _quiet(self._optuna):
            while len(wave) < min(self._batch_size, self._left):
                if (settings := self._proposed() or self._unseen()) is None:
                    break
                wave.append(settings)
        self._left = self._left - len(wave) if wave else 0
        return wave

    def tell(self, results: Sequence[tuple[Settings, float | None]]) -> None:
        """The scores to be maximised; None or NaN: infeasible, and worse than any score.

        Raises:
            InputError: Settings were not asked for, or were told before.
        """
        for settings, score in results:
            if (trial := self._open.pop(_name(settings), None)) is None:
                raise InputError(f"only settings that were asked for can be told, and once: not {settings}")
            with _quiet(self._optuna):
                if score is None or math.isnan(score):
                    self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
                else:
                    self._study.tell(trial, score)

    def _proposed(self) -> Settings | None:
        """What the estimator would try, unless it keeps to what was tried."""
        for _ in range(_RETRY_STATUSES):
            trial = self._study.suggest()
            settings = self._space.suggested(trial)
            if self._taken(settings, trial):
                return settings
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        return None

    def _unseen(self) -> Settings | None:
        """Any settings that were not proposed, searched from a random place; None: there are none."""
        start = int(self._chance.integers(self._space.size))
        for step in range(self._space.size):
            parameters = self._space.parameters((start + step) % self._space.size)
            if _name(self._space.settings(parameters)) in self._seen:
                continue
            self._study.enqueue_trial(parameters)
            trial = self._study.suggest()
            settings = self._space.suggested(trial)
            self._taken(settings, trial)
            return settings
        return None

    def _taken(self, settings: Settings, trial: Any) -> bool:
        if (name := _name(settings)) in self._seen:
            return False
        self._seen.add(name)
        self._open[name] = trial
        return True


class _Space:
    """The alternatives as Optuna's parameters, which are places in tuples of values."""

    def __init__(self, axes: Sequence[Axes]) -> None:
        self._alternatives = [dict(alternative) for alternative in axes]
        self._sizes = [math.prod(len(values) for values in alternative.values()) for alternative in axes]
        self.size = sum(self._sizes)
        kinds: dict[str, list[tuple[Any, ...]]] = {}
        self._names: list[dict[str, str]] = [
            {axis: _parameter(kinds.setdefault(axis, []), axis, tuple(values)) for axis, values in side.items()}
            for side in axes
        ]

    def suggested(self, trial: Any) -> Settings:
        """The settings of a trial, which draws its parameters here: each depends on the alternative."""
        at = trial.suggest_categorical(_ALTERNATIVE, range(len(self._alternatives)))
        drawn = {_ALTERNATIVE: at}
        for axis, values in self._alternatives[at].items():
            name = self._names[at][axis]
            if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
                drawn[name] = trial.suggest_int(name, 0, len(values) - 1)
            else:
                drawn[name] = trial.suggest_categorical(name, range(len(values)))
        return self.settings(drawn)

    def settings(self, parameters: dict[str, int]) -> Settings:
        at = parameters[_ALTERNATIVE]
        sides = self._alternatives[at].items()
        return {axis: values[parameters[self._names[at][axis]]] for axis, values in sides}

    def parameters(self, place: int) -> dict[str, int]:
        """Those of one of ``size`` points, counted through."""
        at = 0
        while place >= self._sizes[at]:
            place, at = place - self._sizes[at], at + 1
        found = {_ALTERNATIVE: at}
        for axis, values in self._alternatives[at].items():
            place, found[self._names[at][axis]] = divmod(place, len(values))
        return found


def _parameter(known: list[tuple[Any, ...]], axis: str, values: tuple[Any, ...]) -> str:
    """One name for an axis with the same values, wherever it stands."""
    if values not in known:
        known.append(values)
    return f"{axis}/{known.index(values)}"


def _name(settings: Settings) -> str:
    return repr(sorted(settings.items()))


def _check(axes: Sequence[Axes], trials: int, batch_size: int) -> None:
    if not axes:
        raise InputError("there must be 1 alternative or more to choose from")
    for alternative in axes:
        if empty := [axis for axis, values in alternative.items() if not values]:
            raise InputError(f"every axis must have a value: {empty[0]!r} has none")
    if trials < 1 or batch_size < 1:
        raise InputError(f"trials and wave must be 1 or more, not {trials} and {batch_size}")


def _imported() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise MissingExtraError("Bayesian search", "search") from error
    return optuna


def _sampler(optuna: Any, seed: int) -> Any:
    """How it draws.

    All axes of an alternative together, as their effects hang together (multivariate, group); trials under
    way count as bad ones, so that a wave spreads out (constant liar).
    """
    return optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)


@contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    """No line a trial, no warning that an option is young; the caller's own settings come back."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
