"""Defines strategies, which propose configurations in batches and learn from their results."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import numpy as np

from lengthwise.schema.errors import InputError, MissingExtraError
from lengthwise.search.space import Axes, Settings, settings_key

C = TypeVar("C")


class Strategy(Protocol[C]):
    """Proposes candidates of type C.

    A strategy is deterministic: equal results lead to equal batches, for any number of workers.
    """

    def suggest(self) -> list[C]:
        """Return the candidates to evaluate next; none is suggested twice, and an empty list ends the search."""

    def report(self, results: Sequence[tuple[C, float | None]]) -> None:
        """Learn from the scores of suggested candidates; higher is better, None means infeasible."""


_ALTERNATIVE = "alternative"
_MAX_DRAWS = 4  # proposals that repeat earlier ones, before an unseen candidate replaces them


class Bayesian:
    """Bayesian optimization over settings, by Optuna's tree-structured Parzen estimator.

    Axes whose values are numbers are ordered, and other axes are categorical. An axis with the same values in several
    alternatives (say, for two schedulers) is one parameter, so that results of one inform about the other. The
    strategy proposes ``trials`` settings in total, ``batch_size`` at a time; the same seed and results lead to the same
    settings. Raises MissingExtraError if Optuna is not installed, and InputError if there are no alternatives, an axis
    has no values, or a number is less than 1.
    """

    def __init__(self, axes: Sequence[Axes], trials: int, seed: int, batch_size: int = 8) -> None:
        if not axes:
            raise InputError("a Bayesian search needs 1 alternative or more")
        for alternative in axes:
            if empty := [axis for axis, values in alternative.items() if not values]:
                raise InputError(f"every axis must have a value: {empty[0]!r} has none")
        if trials < 1 or batch_size < 1:
            raise InputError(f"trials and batch_size must be 1 or more, not {trials} and {batch_size}")
        try:
            import optuna
        except ImportError as error:
            raise MissingExtraError("Bayesian search", "search") from error
        self._optuna: Any = optuna
        self._space = _Space(axes)
        self._remaining, self._batch_size = trials, batch_size
        self._rng = np.random.default_rng(seed)
        self._open: dict[str, Any] = {}
        self._seen: set[str] = set()
        with _quiet(optuna):
            # The effects of axes depend on each other (multivariate, group). Unfinished trials count as bad ones, so
            # that the proposals of a batch differ (constant_liar).
            sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True, constant_liar=True)
            self._study: Any = optuna.create_study(direction="maximize", sampler=sampler)

    def suggest(self) -> list[Settings]:
        """Return the next batch; it is empty after ``trials`` proposals, or if no settings are left."""
        batch: list[Settings] = []
        with _quiet(self._optuna):
            while len(batch) < min(self._batch_size, self._remaining):
                if (settings := self._proposed() or self._unseen()) is None:
                    break
                batch.append(settings)
        self._remaining = self._remaining - len(batch) if batch else 0
        return batch

    def report(self, results: Sequence[tuple[Settings, float | None]]) -> None:
        """Learn from the scores, which are maximized; None or NaN means infeasible, which is worse than any score.

        Raises InputError if settings were not suggested, or were reported before.
        """
        for settings, score in results:
            if (trial := self._open.pop(settings_key(settings), None)) is None:
                raise InputError(f"only suggested settings can be reported, and only once: not {settings}")
            with _quiet(self._optuna):
                if score is None or math.isnan(score):
                    self._study.tell(trial, state=self._optuna.trial.TrialState.PRUNED)
                else:
                    self._study.tell(trial, score)

    def _proposed(self) -> Settings | None:
        for _ in range(_MAX_DRAWS):
            trial = self._study.ask()
            settings = self._space.suggested(trial)
            if self._register(settings, trial):
                return settings
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        return None

    def _unseen(self) -> Settings | None:
        """Return the next settings after a random start that were not proposed before; None if all were."""
        start = int(self._rng.integers(self._space.size))
        for step in range(self._space.size):
            parameters = self._space.parameters((start + step) % self._space.size)
            if settings_key(self._space.settings(parameters)) in self._seen:
                continue
            self._study.enqueue_trial(parameters)
            trial = self._study.ask()
            settings = self._space.suggested(trial)
            self._register(settings, trial)
            return settings
        return None

    def _register(self, settings: Settings, trial: Any) -> bool:
        if (key := settings_key(settings)) in self._seen:
            return False
        self._seen.add(key)
        self._open[key] = trial
        return True


class _Space:
    def __init__(self, axes: Sequence[Axes]) -> None:
        self._alternatives = [dict(alternative) for alternative in axes]
        self._sizes = [math.prod(len(values) for values in alternative.values()) for alternative in axes]
        self.size = sum(self._sizes)
        values_of: dict[str, list[tuple[Any, ...]]] = {}  # distinct tuples of values by axis: one parameter each
        self._names: list[dict[str, str]] = []
        for alternative in axes:
            names = {}
            for axis, values in alternative.items():
                known = values_of.setdefault(axis, [])
                if tuple(values) not in known:
                    known.append(tuple(values))
                names[axis] = f"{axis}/{known.index(tuple(values))}"
            self._names.append(names)

    def suggested(self, trial: Any) -> Settings:
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
        axes = self._alternatives[at].items()
        return {axis: values[parameters[self._names[at][axis]]] for axis, values in axes}

    def parameters(self, index: int) -> dict[str, int]:
        at = 0
        while index >= self._sizes[at]:
            index, at = index - self._sizes[at], at + 1
        found = {_ALTERNATIVE: at}
        for axis, values in self._alternatives[at].items():
            index, found[self._names[at][axis]] = divmod(index, len(values))
        return found


@contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)
