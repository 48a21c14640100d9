"""What a task asks, once all that it waits for has ended: its branch, its item, its prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lengthwise.apps._blocks import Block
from lengthwise.apps._graph import INDEX, ITEM, references, until_calls
from lengthwise.apps.app import App, Call, Loop
from lengthwise.apps.expand import Unrolled
from lengthwise.apps.ledger.contracts import Output
from lengthwise.apps.rendering import asked, passed, said
from lengthwise.apps.run.contracts import Asked, Outputs
from lengthwise.apps.templates import PREVIOUS, expression
from lengthwise.schema.errors import InputError


@dataclass(frozen=True, eq=False)
class Rendered:
    """Decides for the tasks of an unrolled application (``run.contracts.Decider``)."""

    unrolled: Unrolled

    def decide(self, task: int, outputs: Outputs) -> Asked | None:
        """The request of a task; None: it is skipped.

        Raises:
            InputError: A field is missing in its row, a list is too long, or a template fails; with call and row.
        """
        of, tasks = self.unrolled, self.unrolled.tasks
        call = of.app.calls[int(tasks.call[task])]
        row, place = int(tasks.row[task]), int(tasks.round[task])
        k = 0 if call.fan.over else place
        which = f"{of.ids[row]}/{call.name}/{place}/{int(tasks.index[task])}"
        try:
            view = _View(of, row, k, outputs)
            if (
                view.is_over(call)
                or (context := view.context(call, task, place, int(tasks.index[task]))) is None
            ):
                return None
            model = of.app.models[int(tasks.model[task])]
            if call.body:
                return passed(call, model, task, which, expression(call.body).render(context))
            return asked(call, model, task, which, said(call, context))
        except InputError as error:
            raise InputError(f"call {call.name!r}, row {of.ids[row]}: {error}") from error


@dataclass(frozen=True)
class _View:
    """What a row looks like from a round."""

    of: Unrolled
    row: int
    round: int
    outputs: Outputs

    @property
    def app(self) -> App:
        return self.of.app

    def is_over(self, call: Call) -> bool:
        """Whether the loop of a call ended before its round."""
        loop = self.app.loop_of(call.name)
        if loop is None or not loop.until or self.round == 0:
            return False
        return any(self._ended(loop, j) for j in range(self.round))

    def _ended(self, loop: Loop, j: int) -> bool:
        then = _View(self.of, self.row, j, self.outputs)
        names = {name: then.value(name, loop) for name in until_calls(self.app, loop)}
        return bool(expression(loop.until).render({**self.of.rows[self.row], **names}))

    def context(self, call: Call, task: int, place: int, index: int) -> Mapping[str, Any] | None:
        """All that its templates may name; None: it is skipped."""
        loop, names = self.app.loop_of(call.name), references(self.app, call)
        values = {name: self.value(name, loop) for name in names.calls}
        if values and all(_is_nothing(value) for value in values.values()):
            return None
        context: dict[str, Any] = {**self.of.rows[self.row], **values}
        if call.fan.over:
            context[PREVIOUS] = None if place == 0 else _text(self.outputs(task - 1))
        elif loop:
            context[PREVIOUS] = self._before(loop)
        if not self._fans(call, context, place if call.fan.over else index):
            return None
        return context if not call.when or expression(call.when).render(context) else None

    def _fans(self, call: Call, context: dict[str, Any], index: int) -> bool:
        """Puts in what its fan gives; False: there is no such item."""
        fan = call.fan
        if fan.times > 1 or fan.each or fan.over:
            context[INDEX] = index
        if fan.each or fan.over:
            items = _items(fan.each or fan.over, context, fan.most)
            if index >= len(items):
                return False
            context[ITEM] = items[index]
        return True

    def _before(self, loop: Loop) -> dict[str, Any]:
        if self.round == 0:
            return dict.fromkeys(loop.calls)
        return {name: self._of_block(self.of.blocks[name, self.round - 1]) for name in loop.calls}

    def value(self, name: str, loop: Loop | None) -> Any:
        """What a call's name stands for: its output, a list of them, a mapping by model; None: skipped."""
        other = self.app.loop_of(name)
        if other is None:
            return self._of_block(self.of.blocks[name, 0])
        if other is loop:
            return self._of_block(self.of.blocks[name, self.round])
        rounds = (self._of_block(self.of.blocks[name, j]) for j in reversed(range(other.most)))
        return next((one for one in rounds if not _is_nothing(one)), None)

    def _of_block(self, block: Block) -> Any:
        call = self.app.calls[block.call]
        if call.fan.over:
            last = block.last_of_row(self.row)
            return _text(self.outputs(last[0])) if last else None
        texts = [_text(self.outputs(task)) for task in block.of_row(self.row)]
        if isinstance(call.model, tuple):
            return {name: text for name, text in zip(call.model, texts, strict=True) if text is not None}
        return [text for text in texts if text is not None] if call.fan.is_list else texts[0]


def _text(output: Output | None) -> str | None:
    return None if output is None else output.text


def _is_nothing(value: Any) -> bool:
    return value is None or value in ([], {})


def _items(source: str, context: Mapping[str, Any], most: int | None) -> list[Any]:
    found = expression(source).render(context)
    if isinstance(found, str | bytes | Mapping) or not hasattr(found, "__iter__"):
        raise InputError(f"{source} must be a list; it is {type(found).__name__}")
    items = list(found)
    if most is not None and len(items) > most:
        raise InputError(f"{source} may have {most} elements (most); it has {len(items)}. Raise most")
    return items


__all__ = ["Rendered"]
