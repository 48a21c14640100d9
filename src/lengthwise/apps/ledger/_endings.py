"""What endings do to the tables: checked, and sorted by what has to be written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lengthwise.apps.ledger._texts import packed
from lengthwise.apps.ledger.contracts import Ending, State
from lengthwise.schema.errors import InputError

_POSSIBLE = (State.DONE, State.SKIPPED, State.DEAD, State.READY)


@dataclass
class Writes:
    """What one batch of endings writes.

    Attributes:
        accepted: For each ending, whether it ended the task's last lease.
        answers: Key to a row of ``results``.
        moved: Rows (state, whether it counts as an attempt, key, error, not before, task).
        passed: Tasks whose children need not wait for them any more.
        dead: Tasks behind which all is blocked.
    """

    accepted: list[bool] = field(default_factory=list)
    answers: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    moved: list[tuple[Any, ...]] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    dead: list[int] = field(default_factory=list)


def check(endings: Sequence[Ending]) -> None:
    """Raises InputError unless every ending says what its state needs."""
    for ending in endings:
        if ending.state not in _POSSIBLE:
            raise InputError(
                f"a lease ends DONE, SKIPPED, DEAD or READY; task {ending.task} came with "
                f"{State(ending.state).name}: it is the ledger that makes tasks so"
            )
        answered = bool(ending.key) and ending.output is not None
        if answered != (ending.state == State.DONE):
            raise InputError(
                f"a DONE task has a key and an output, and no other has an output; task {ending.task} came as "
                f"{State(ending.state).name} with key {ending.key!r} and {'an' if ending.output else 'no'} output"
            )


def writes(endings: Sequence[Ending], held: Mapping[int, int]) -> Writes:
    """What the endings change.

    Args:
        endings: Checked.
        held: Fences of those of their tasks that are leased.
    """
    found, open_leases = Writes(), dict(held)
    for ending in endings:
        if ending.key and ending.output is not None:
            found.answers.setdefault(ending.key, _answer(ending))
        fits = open_leases.get(ending.task) == ending.fence
        found.accepted.append(fits)
        if fits:
            del open_leases[ending.task]
            _move(found, ending)
    return found


def _move(found: Writes, ending: Ending) -> None:
    counts = ending.state in {State.DONE, State.DEAD} or (ending.state == State.READY and ending.counts)
    error = None if ending.error is None else packed(ending.error)
    found.moved.append(
        (int(ending.state), int(counts), ending.key, error, float(ending.not_before_s), ending.task)
    )
    if ending.state in {State.DONE, State.SKIPPED}:
        found.passed.append(ending.task)
    elif ending.state == State.DEAD:
        found.dead.append(ending.task)


def _answer(ending: Ending) -> tuple[Any, ...]:
    output = ending.output
    assert output is not None
    return (
        ending.key,
        packed(output.text),
        output.finish_reason,
        output.prompt_tokens,
        output.output_tokens,
    )
