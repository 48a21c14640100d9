"""An application unrolled over its rows: everything that it may ask, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lengthwise.apps._blocks import Block, Edges, along, to_all, to_last
from lengthwise.apps._graph import INDEX, ITEM, References, ordered, references, until_calls
from lengthwise.apps._row_fields import Rows, blank, items_of, require_fields
from lengthwise.apps.app import App, Call, From, Loop
from lengthwise.apps.rendering import said
from lengthwise.apps.templates import PREVIOUS, expression
from lengthwise.schema.app_tasks import Flags, Floats, Ints, Tasks
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.tokens import estimated_tokens


@dataclass(frozen=True, eq=False)
class Unrolled:
    """An application on its rows.

    Attributes:
        app: The application.
        rows: A mapping each.
        ids: What tells the rows apart.
        tasks: All that it may ask.
        blocks: By call's name and round.
    """

    app: App
    rows: Rows
    ids: Sequence[str]
    tasks: Tasks
    blocks: dict[tuple[str, int], Block]


def expand(app: App, rows: Rows, ids: Sequence[str] | None = None) -> Unrolled:
    """Everything that an application may ask for its rows.

    Args:
        app: The application.
        rows: A mapping of fields each.
        ids: What tells them apart; None: their numbers.

    Raises:
        InputError: There are no rows, or they lack a field that the application names, or hold one that is no good.
    """
    if not len(rows):
        raise InputError("an application needs rows to work on; there are none")
    return _Expansion(app, rows, ids or [str(i) for i in range(len(rows))]).all()


@dataclass
class _Expansion:
    app: App
    rows: Rows
    ids: Sequence[str]
    blocks: dict[tuple[str, int], Block] = field(default_factory=dict)
    edges: list[tuple[Edges, int]] = field(default_factory=list)
    chances: list[Floats] = field(default_factory=list)
    hangs: list[Ints] = field(default_factory=list)
    coins: int = 0
    tasks: int = 0

    def all(self) -> Unrolled:
        calls = {one.name: one for one in self.app.calls}
        require_fields(self.app, self.rows)
        for unit in ordered(self.app):
            loop = self.app.loop_of(unit[0])
            coin = np.full(len(self.rows), -1)
            for k in range(loop.most if loop else 1):
                if loop and k > 0 and loop.until:
                    coin = self._toss(np.full(len(self.rows), 1.0 - loop.until_share), coin)
                for name in unit:
                    self._add(calls[name], k, coin, loop)
        return Unrolled(self.app, self.rows, self.ids, self._tasks(), self.blocks)

    def _toss(self, chance: Floats, after: Ints) -> Ints:
        """Numbers of new coins."""
        self.chances.append(chance)
        self.hangs.append(after)
        self.coins += len(chance)
        return np.arange(self.coins - len(chance), self.coins)

    def _add(self, call: Call, k: int, coin: Ints, loop: Loop | None) -> None:
        names = references(self.app, call)
        coin = self._own_coin(call, names, k, coin)
        never = self._nothing_before(call, names, k)
        if never.any():
            coin = np.where(never, self._toss(np.zeros(len(coin)), coin), coin)
        lengths, items = self._sizes(call, k)
        start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        row = np.repeat(np.arange(len(self.rows)), lengths)
        index = np.arange(len(row)) - start[row]
        of = coin[row]
        if call.fan.each and items is None and call.fan.expected is not None:
            share = min(1.0, call.fan.expected / max(1, call.fan.most or 1))
            of = self._toss(np.full(len(row), share), of)
        block = Block(
            call=[one.name for one in self.app.calls].index(call.name),
            round=k,
            first=self.tasks,
            start=start,
            model=self._models(call, row, index),
            index=index,
            prompt_tokens=self._prompt_tokens(call, names, row, index, items),
            known_tokens=self._told(call.told.output_tokens, row, least=1, otherwise=0),
            coin=of,
            is_chain=bool(call.fan.over),
        )
        self.blocks[call.name, k] = block
        self.tasks += len(block)
        self._join(call, names, block, loop)

    def _own_coin(self, call: Call, names: References, k: int, coin: Ints) -> Ints:
        """[rows] the coin of its tasks: that of its round, or of the one call that it hangs on, and its own."""
        if len(names.calls) == 1 and (coin < 0).all():
            parent = self._seen(call, min(names.calls), k)[-1]
            there = np.diff(parent.start) > 0
            coin = np.where(
                there, parent.coin[np.where(there, parent.start[:-1], 0)] if len(parent) else -1, -1
            )
        return (
            self._toss(np.full(len(coin), call.when_share), coin)
            if call.when and call.when_share < 1
            else coin
        )

    def _nothing_before(self, call: Call, names: References, k: int) -> Flags:
        """[rows] where all calls that it names ask nothing (their lists are empty), so that it is skipped."""
        seen = [block for name in names.calls for block in self._seen(call, name, k)]
        asks = [np.diff(block.start) > 0 for block in seen]
        return ~np.logical_or.reduce(asks) if asks else np.zeros(len(self.rows), bool)

    def _sizes(self, call: Call, k: int) -> tuple[Ints, list[Any] | None]:
        """[rows] tasks of each row, and their items where these are the row's."""
        n, fan = len(self.rows), call.fan
        if fan.each or fan.over:
            source = fan.each or fan.over
            if expression(source).names.plain & {one.name for one in self.app.calls} or (
                k and expression(source).names.previous
            ):
                return np.full(n, fan.most or 0), None
            lists = [items_of(source, row, self.ids[r], call, fan.most) for r, row in enumerate(self.rows)]
            return np.array([len(one) for one in lists], np.int64), [item for one in lists for item in one]
        return np.full(n, len(call.model) if isinstance(call.model, tuple) else fan.times), None

    def _models(self, call: Call, row: Ints, index: Ints) -> Ints:
        names = [model.name for model in self.app.models]
        if isinstance(call.model, From):
            return np.array([self._named(call, r, names) for r in range(len(self.rows))], np.int64)[row]
        asked = (call.model,) if isinstance(call.model, str) else call.model
        numbers = np.array([names.index(name) for name in asked], np.int64)
        return numbers[index] if call.is_mapping else np.full(len(row), numbers[0])

    def _named(self, call: Call, r: int, names: list[str]) -> int:
        assert isinstance(call.model, From)
        name = self.rows[r].get(call.model.field)
        if name not in names:
            raise UnknownNameError(
                f"model in {call.model.field!r} of row {self.ids[r]} for call {call.name!r}", str(name), names
            )
        return names.index(name)

    def _told(self, name: str, row: Ints, *, least: int, otherwise: int) -> Ints:
        """[tasks] a field of whole numbers, by row."""
        if not name:
            return np.full(len(row), otherwise)
        values = [one.get(name) for one in self.rows]
        for r, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
                raise InputError(
                    f"{name} must be whole tokens of at least {least}; row {self.ids[r]} has {value!r}"
                )
        return np.array(values, np.int64)[row]

    def _most(self, call: Call, row: Ints) -> Ints:
        return self._told(call.told.max_tokens, row, least=1, otherwise=call.sampling.max_tokens)

    def _prompt_tokens(
        self, call: Call, names: References, row: Ints, index: Ints, items: list[Any] | None
    ) -> Ints:
        if call.told.prompt_tokens:
            return self._told(call.told.prompt_tokens, row, least=1, otherwise=1)
        out = np.empty(len(row), np.int64)
        blanks: dict[str, Any] = {one.name: blank(one) for one in self.app.calls if one.name in names.calls}
        blanks[PREVIOUS] = dict.fromkeys(names.previous, "") if self.app.loop_of(call.name) else ""
        for t, (r, i) in enumerate(zip(row.tolist(), index.tolist(), strict=True)):
            context = {**self.rows[r], **blanks, ITEM: "" if items is None else items[t], INDEX: i}
            out[t] = self._count(call, context, self.ids[r])
        return out

    def _count(self, call: Call, context: dict[str, Any], which: str) -> int:
        try:
            return sum(estimated_tokens(one["content"]) for one in said(call, context))
        except InputError as error:
            raise InputError(f"call {call.name!r}, row {which}: {error}") from error

    def _join(self, call: Call, names: References, block: Block, loop: Loop | None) -> None:
        """Edges to all that its tasks wait for."""
        if block.is_chain:
            self._edge(along(block), shown=True)
        for name in sorted(names.calls):
            for at, parent in enumerate(
                self._seen(call, name, block.round)
            ):  # of a loop any round may be its last
                self._edge(_to(block, parent), shown=name in names.shown and at == 0)
        if loop and block.round:
            for name in sorted(names.previous):
                self._edge(_to(block, self.blocks[name, block.round - 1]), shown=name in names.shown_before)
            for name in sorted(until_calls(self.app, loop)):
                for parent in self._ends(name, loop, block.round):
                    self._edge(_to(block, parent), shown=False)

    def _ends(self, name: str, loop: Loop, k: int) -> list[Block]:
        """Blocks that tell whether the loop ended before a round."""
        if name in loop.calls:
            return [self.blocks[name, j] for j in range(k)]
        return self._of(name)

    def _seen(self, call: Call, name: str, k: int) -> list[Block]:
        """Blocks in which a call finds what it names: of its own round, or all rounds of another loop."""
        loop = self.app.loop_of(call.name)
        return [self.blocks[name, k]] if loop and name in loop.calls else self._of(name)

    def _of(self, name: str) -> list[Block]:
        return [block for (one, _), block in self.blocks.items() if one == name]

    def _edge(self, edges: Edges, *, shown: bool) -> None:
        self.edges.append((edges, int(shown)))

    def _tasks(self) -> Tasks:
        blocks = list(self.blocks.values())
        start, parent, shown = _rows_of(self.edges, self.tasks)
        calls = self.app.calls
        return Tasks(
            calls=tuple(one.name for one in calls),
            models=tuple(model.name for model in self.app.models),
            call=_column(blocks, lambda b: np.full(len(b), b.call)),
            model=_column(blocks, lambda b: b.model),
            row=_column(blocks, lambda b: b.rows),
            round=_column(blocks, lambda b: b.index if b.is_chain else np.full(len(b), b.round)),
            index=_column(blocks, lambda b: np.zeros(len(b), np.int64) if b.is_chain else b.index),
            prompt_tokens=_column(blocks, lambda b: b.prompt_tokens),
            max_tokens=_column(blocks, lambda b: self._most(calls[b.call], b.rows)),
            known_tokens=_column(blocks, lambda b: b.known_tokens),
            parent_start=start,
            parent=parent,
            shown=shown,
            coin=_column(blocks, lambda b: b.coin),
            coin_chance=np.concatenate([np.zeros(0), *self.chances]),
            coin_after=np.concatenate([np.zeros(0, np.int64), *self.hangs]).astype(np.int64),
        )


def _to(child: Block, parent: Block) -> Edges:
    return to_last(child, parent) if parent.is_chain else to_all(child, parent)


def _column(blocks: list[Block], of: Any) -> Ints:
    return np.concatenate([of(block) for block in blocks]).astype(np.int64)


def _rows_of(edges: list[tuple[Edges, int]], n: int) -> tuple[Ints, Ints, Ints]:
    """(start, parent, shown) of all edges; two between the same tasks are one."""
    child = np.concatenate([np.zeros(0, np.int64), *(pair[0] for pair, _ in edges)])
    parent = np.concatenate([np.zeros(0, np.int64), *(pair[1] for pair, _ in edges)])
    shown = np.concatenate([np.zeros(0, np.int64), *(np.full(len(pair[0]), s) for pair, s in edges)])
    order = np.lexsort((parent, child))
    child, parent, shown = child[order], parent[order], shown[order]
    new = np.ones(len(child), bool)
    new[1:] = (np.diff(child) != 0) | (np.diff(parent) != 0)
    which = np.flatnonzero(new)
    counts = np.add.reduceat(shown, which) if len(which) else shown
    start = np.searchsorted(child[which], np.arange(n + 1))
    return start.astype(np.int64), parent[which].astype(np.int64), counts.astype(np.int64)
