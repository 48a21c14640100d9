"""What is wrong with a scenario, in one message that names each key and the way out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lengthwise.schema.errors import ScenarioError

MOST_SHOWN = 10


@dataclass(frozen=True)
class Problem:
    """A wrong key or value: its path, and what must hold."""

    path: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}: {self.text}" if self.path else self.text


def raise_if_any(
    problems: Iterable[Problem],
    source: str,
    overridden: Iterable[tuple[str, ...]] = (),
    options: Mapping[tuple[str, ...], str] | None = None,
) -> None:
    """Raises one ScenarioError that lists all problems, if there are any.

    Args:
        problems: What was found.
        source: The file, for the message.
        overridden: Paths that ``--set`` gave; problems at or below them name it.
        options: Paths that an option of its own gave, and the option, which stands for the path.
    """
    from_set = tuple(overridden)
    lines = list(dict.fromkeys(_line(problem, from_set, options or {}) for problem in problems))
    if not lines:
        return
    if len(lines) == 1:
        raise ScenarioError(f"{source}: {lines[0]}")
    shown = lines if len(lines) <= MOST_SHOWN else lines[: MOST_SHOWN - 1]
    rest = [f"... and {len(lines) - len(shown)} more"] if len(lines) > len(shown) else []
    raise ScenarioError("\n  ".join([f"{source}: {len(lines)} problems", *shown, *rest]))


def _line(
    problem: Problem, from_set: tuple[tuple[str, ...], ...], options: Mapping[tuple[str, ...], str]
) -> str:
    if problem.path in options:
        return f"{options[problem.path]}: {problem.text}"
    given = any(problem.path[: len(path)] == path for path in from_set)
    return f"--set {problem}" if given else str(problem)
