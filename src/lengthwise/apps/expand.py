"""Expands an application over its rows into all tasks that can occur, and builds the tasks' requests at run time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lengthwise.apps.app import (
    CHAT,
    INDEX,
    ITEM,
    App,
    Call,
    From,
    Loop,
    Model,
    References,
    ordered_units,
    references,
    until_calls,
)
from lengthwise.apps.templates import PREVIOUS, expression, template
from lengthwise.schema.app import Coins, Floats, Ints, Tasks
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.workload import estimated_tokens

if TYPE_CHECKING:
    from lengthwise.apps.ledger.contracts import Output
    from lengthwise.apps.run.job import Outputs, RequestSpec

Row = Mapping[str, Any]
Rows = Sequence[Row]
Edges = tuple[Ints, Ints]  # (child, parent) task numbers


@dataclass(frozen=True, eq=False)
class Block:
    """The tasks of one call, or of one round of a call in a loop, ordered by row."""

    call: int  # number of the call in ``App.calls``
    round: int  # round of the loop, from 0
    first: int  # number of the first task
    start: Ints  # [rows+1] offset from ``first`` at which the tasks of each row start
    model: Ints  # [tasks] number of each task's model
    index: Ints  # [tasks] position of the task within its row
    prompt_tokens: Ints  # [tasks] prompt length without the outputs of other calls
    known_tokens: Ints  # [tasks] output length, or 0 if it is unknown
    random_draw: Ints  # [tasks] number in ``Tasks.coins`` of the coin that decides if the task is present; -1: it is
    is_chain: bool  # whether each task waits for the one before it in its row (``Fan.over``)

    def __len__(self) -> int:
        return len(self.model)

    @property
    def rows(self) -> Ints:
        """Return the row of each task, [tasks]."""
        return np.repeat(np.arange(len(self.start) - 1), np.diff(self.start))


def _edges(child: Block, parent: Block) -> Edges:
    """Return edges from tasks to the parent tasks of their row, of which a chain has only its last one."""
    rows = child.rows
    counts = np.diff(parent.start)[rows]
    if parent.is_chain:
        present = np.flatnonzero(counts > 0)
        return child.first + present, parent.first + parent.start[rows[present] + 1] - 1
    offset = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    children = np.repeat(child.first + np.arange(len(child)), counts)
    return children, np.repeat(parent.first + parent.start[rows], counts) + offset


def _items(source: str, context: Mapping[str, Any], max_items: int | None) -> list[Any]:
    value = expression(source).render(context)
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        raise InputError(f"{source} must be a list; it is {type(value).__name__}")
    items = list(value)
    if max_items is not None and len(items) > max_items:
        raise InputError(f"{source} may have {max_items} elements; it has {len(items)}. Raise max_items")
    return items


@contextmanager
def _error_prefix(call: Call, row_id: str) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"call {call.name!r}, row {row_id}: {error}") from error


def _messages(call: Call, context: Mapping[str, Any]) -> list[dict[str, str]]:
    return [{"role": role, "content": template(text).render(context)} for role, text in call.messages]


def _check_fields(app: App, rows: Rows) -> None:
    """Raise InputError unless every name that the application uses is either a call or a field of some row."""
    fields: set[str] = set()
    for row in rows:
        fields.update(row)
    calls = {call.name for call in app.calls}
    named = [(f"call {call.name!r}", references(app, call).calls) for call in app.calls]
    named += [(f"until of loop {loop.name!r}", until_calls(app, loop)) for loop in app.loops]
    for where, names in named:
        for name in sorted(names & calls & fields):
            raise InputError(
                f"{where} names {name!r}, which is the call {name!r} and a field {name!r} of the inputs; one name must "
                "mean one thing. Give the call or the field another name"
            )
    required = []
    for call in app.calls:
        lengths = {call.report.prompt_tokens, call.report.output_tokens, call.report.max_tokens} - {""}
        models = {call.model.field} if isinstance(call.model, From) else set()
        required.append((f"call {call.name!r}", references(app, call).fields | lengths | models))
    for loop in app.loops:
        names = expression(loop.until).names.plain - calls if loop.until else frozenset()
        required.append((f"until of loop {loop.name!r}", names))
    for where, names in required:
        for name in sorted(names - fields):
            raise UnknownNameError(f"call or field of the inputs for {where}", name, fields | calls)


@dataclass(frozen=True, eq=False)
class ExpandedApp:
    """All tasks that an application can have on its rows, and their blocks by (call name, round)."""

    app: App
    rows: Rows
    ids: Sequence[str]
    tasks: Tasks
    blocks: dict[tuple[str, int], Block]


def expand(app: App, rows: Rows, ids: Sequence[str] | None = None) -> ExpandedApp:
    """Return all tasks that an application can have on its rows, including tasks that may be skipped.

    ``ids`` has a text for each row that identifies it in errors and seeds. None numbers the rows from 0. Raises
    InputError if there are no rows, or a field that the application uses is missing or has a wrong value.
    """
    if not len(rows):
        raise InputError("an application needs rows to work on; there are none")
    _check_fields(app, rows)
    expansion = _Expansion(app, rows, ids or [str(i) for i in range(len(rows))])
    calls = {one.name: one for one in app.calls}
    for unit in ordered_units(app):
        loop = app.loop_of(unit[0])
        random_draw = np.full(len(rows), -1)
        for k in range(loop.max_rounds if loop else 1):
            if loop and k > 0 and loop.until:
                random_draw = expansion.add_coins(np.full(len(rows), 1.0 - loop.until_share), random_draw)
            for name in unit:
                expansion.add_tasks(calls[name], k, random_draw, loop)
    return ExpandedApp(app, rows, expansion.ids, expansion.columns(), expansion.blocks)


@dataclass
class _Expansion:
    """The blocks, edges and coins so far. An edge's flag states if the child's prompt contains the parent's output."""

    app: App
    rows: Rows
    ids: Sequence[str]
    blocks: dict[tuple[str, int], Block] = field(default_factory=dict)
    edges: list[tuple[Edges, bool]] = field(default_factory=list)
    chances: list[Floats] = field(default_factory=list)
    after: list[Ints] = field(default_factory=list)
    coins: int = 0
    tasks: int = 0

    def add_coins(self, chance: Floats, after: Ints) -> Ints:
        self.chances.append(chance)
        self.after.append(after)
        self.coins += len(chance)
        return np.arange(self.coins - len(chance), self.coins)

    def add_tasks(self, call: Call, k: int, random_draw: Ints, loop: Loop | None) -> None:
        """Add the tasks of a call in round k. ``random_draw`` [rows] has the coins that decide if the round runs."""
        names = references(self.app, call)
        random_draw = self._row_coins(call, names, k, random_draw)
        counts, items = self._counts(call, k)
        start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        row = np.repeat(np.arange(len(self.rows)), counts)
        index = np.arange(len(row)) - start[row]
        coins = random_draw[row]
        if call.fan.each and items is None and call.fan.expected is not None:
            share = min(1.0, call.fan.expected / max(1, call.fan.max_items or 1))
            coins = self.add_coins(np.full(len(row), share), coins)
        block = Block(
            call=[one.name for one in self.app.calls].index(call.name),
            round=k,
            first=self.tasks,
            start=start,
            model=self._models(call, row, index),
            index=index,
            prompt_tokens=self._prompt_tokens(call, names, row, index, items),
            known_tokens=self._lengths(call.report.output_tokens, row, default=0),
            random_draw=coins,
            is_chain=bool(call.fan.over),
        )
        self.blocks[call.name, k] = block
        self.tasks += len(block)
        self._add_edges(names, block, loop)

    def _row_coins(self, call: Call, names: References, k: int, random_draw: Ints) -> Ints:
        """Return the coin that decides whether a row's tasks are present, [rows].

        It is the coin of the round (``random_draw``) or of the only parent call, in the first round of its loop. If the
        call has a condition, or all parents of a row have empty lists, it is a new coin that depends on that coin.
        """
        seen = {name: self._visible(call.name, name, k) for name in names.calls}
        if len(seen) == 1 and (random_draw < 0).all():
            parent = next(iter(seen.values()))[0]
            present = np.diff(parent.start) > 0
            first = np.where(present, parent.start[:-1], 0)
            random_draw = np.where(present, parent.random_draw[first] if len(parent) else -1, -1)
        if call.when and call.when_share < 1:
            random_draw = self.add_coins(np.full(len(random_draw), call.when_share), random_draw)
        if seen:
            # A call is skipped if all calls that it names have no tasks, because their lists are empty.
            never = ~np.logical_or.reduce([np.diff(b.start) > 0 for blocks in seen.values() for b in blocks])
            if never.any():
                random_draw = np.where(never, self.add_coins(np.zeros(len(random_draw)), random_draw), random_draw)
        return random_draw

    def _counts(self, call: Call, k: int) -> tuple[Ints, list[Any] | None]:
        """Return the number of tasks in each row, and the items of all rows' lists, or None if they are unknown yet."""
        fan, calls = call.fan, {one.name for one in self.app.calls}
        source = fan.each or fan.over
        if not source:
            return np.full(len(self.rows), len(call.model) if isinstance(call.model, tuple) else fan.times), None
        names = expression(source).names
        if names.plain & calls or (k and names.previous):
            return np.full(len(self.rows), fan.max_items or 0), None
        lists = []
        for row_id, row in zip(self.ids, self.rows, strict=True):
            with _error_prefix(call, row_id):
                lists.append(_items(source, row, fan.max_items))
        return np.array([len(one) for one in lists], np.int64), [item for one in lists for item in one]

    def _models(self, call: Call, row: Ints, index: Ints) -> Ints:
        numbers = {model.name: n for n, model in enumerate(self.app.models)}
        if isinstance(call.model, From):
            found = []
            for row_id, one in zip(self.ids, self.rows, strict=True):
                name = one.get(call.model.field)
                if not isinstance(name, str) or name not in numbers:
                    kind = f"model in {call.model.field!r} of row {row_id} for call {call.name!r}"
                    raise UnknownNameError(kind, str(name), numbers)
                found.append(numbers[name])
            return np.array(found, np.int64)[row]
        if isinstance(call.model, str):
            return np.full(len(row), numbers[call.model])
        return np.array([numbers[name] for name in call.model], np.int64)[index]

    def _lengths(self, name: str, row: Ints, *, default: int) -> Ints:
        """Return the value of the row field ``name`` for each task ([tasks]), or ``default`` if ``name`` is empty."""
        if not name:
            return np.full(len(row), default)
        values = [one.get(name) for one in self.rows]
        for row_id, value in zip(self.ids, values, strict=True):
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise InputError(f"{name} must be a whole number of tokens, at least 1; row {row_id} has {value!r}")
        return np.array(values, np.int64)[row]

    def _prompt_tokens(self, call: Call, names: References, row: Ints, index: Ints, items: list[Any] | None) -> Ints:
        """Return the estimated prompt tokens of each task, without the outputs of other calls."""
        if call.report.prompt_tokens:
            return self._lengths(call.report.prompt_tokens, row, default=1)
        blanks: dict[str, Any] = {PREVIOUS: dict.fromkeys(names.previous, "") if self.app.loop_of(call.name) else ""}
        for one in self.app.calls:
            if one.name in names.calls:
                blanks[one.name] = [""] * max(1, one.fan.times) if one.fan.is_list else ""
                if isinstance(one.model, tuple):
                    blanks[one.name] = dict.fromkeys(one.model, "")
        tokens = np.empty(len(row), np.int64)
        for t, (r, i) in enumerate(zip(row.tolist(), index.tolist(), strict=True)):
            context = {**self.rows[r], **blanks, ITEM: "" if items is None else items[t], INDEX: i}
            with _error_prefix(call, self.ids[r]):
                tokens[t] = sum(estimated_tokens(one["content"]) for one in _messages(call, context))
        return tokens

    def _add_edges(self, names: References, block: Block, loop: Loop | None) -> None:
        if block.is_chain:
            later = np.flatnonzero(block.index > 0)
            self.edges.append(((block.first + later, block.first + later - 1), True))
        call = self.app.calls[block.call].name
        for name in sorted(names.calls):
            # Any round of another loop may be its last; the prompt contains the output of only one of these rounds.
            for n, parent in enumerate(self._visible(call, name, block.round)):
                self.edges.append((_edges(block, parent), name in names.shown and n == 0))
        if loop and block.round:
            for name in sorted(names.previous):
                edges = _edges(block, self.blocks[name, block.round - 1])
                self.edges.append((edges, name in names.shown_previous))
            for name in sorted(until_calls(self.app, loop)):
                rounds = range(block.round)
                parents = [self.blocks[name, j] for j in rounds] if name in loop.calls else self._all_rounds(name)
                self.edges += [(_edges(block, parent), False) for parent in parents]

    def _visible(self, call: str, name: str, k: int) -> list[Block]:
        """Return the blocks of ``name`` that ``call`` can use: round k's if both are in one loop, otherwise all."""
        loop = self.app.loop_of(call)
        return [self.blocks[name, k]] if loop and name in loop.calls else self._all_rounds(name)

    def _all_rounds(self, name: str) -> list[Block]:
        return [block for (one, _), block in self.blocks.items() if one == name]

    def columns(self) -> Tasks:
        calls, blocks = self.app.calls, self.blocks.values()

        def column(values: Callable[[Block], Ints]) -> Ints:
            return np.concatenate([values(block) for block in blocks]).astype(np.int64)

        def max_tokens(block: Block) -> Ints:
            call = calls[block.call]
            return self._lengths(call.report.max_tokens, block.rows, default=call.sampling.max_tokens)

        start, parent, shown = _parents(self.edges, self.tasks)
        return Tasks(
            calls=tuple(one.name for one in calls),
            models=tuple(model.name for model in self.app.models),
            call=column(lambda b: np.full(len(b), b.call)),
            model=column(lambda b: b.model),
            row=column(lambda b: b.rows),
            round=column(lambda b: b.index if b.is_chain else np.full(len(b), b.round)),
            index=column(lambda b: np.zeros(len(b), np.int64) if b.is_chain else b.index),
            prompt_tokens=column(lambda b: b.prompt_tokens),
            max_tokens=column(max_tokens),
            known_tokens=column(lambda b: b.known_tokens),
            parent_start=start,
            parent=parent,
            shown=shown,
            random_draw=column(lambda b: b.random_draw),
            coins=Coins(
                np.concatenate([np.zeros(0), *self.chances]),
                np.concatenate([np.zeros(0, np.int64), *self.after]).astype(np.int64),
            ),
        )


def _parents(edges: list[tuple[Edges, bool]], n: int) -> tuple[Ints, Ints, Ints]:
    """Return the columns parent_start, parent and shown of ``Tasks`` for n tasks. Repeated edges are merged."""
    empty = np.zeros(0, np.int64)
    child = np.concatenate([empty, *(pair[0] for pair, _ in edges)])
    parent = np.concatenate([empty, *(pair[1] for pair, _ in edges)])
    shown = np.concatenate([empty, *(np.full(len(pair[0]), int(is_shown)) for pair, is_shown in edges)])
    order = np.lexsort((parent, child))
    child, parent, shown = child[order], parent[order], shown[order]
    is_new = np.ones(len(child), bool)
    is_new[1:] = (np.diff(child) != 0) | (np.diff(parent) != 0)
    first = np.flatnonzero(is_new)
    counts = np.add.reduceat(shown, first) if len(first) else shown
    start = np.searchsorted(child[first], np.arange(n + 1))
    return start.astype(np.int64), parent[first].astype(np.int64), counts.astype(np.int64)


@dataclass(frozen=True, eq=False)
class TemplateDecider:
    """A ``run.job.Decider`` that builds the requests of tasks from the application's templates."""

    expanded: ExpandedApp

    def decide(self, task: int, outputs: Outputs) -> RequestSpec | None:
        """Return the request of a task, or None if the task is skipped.

        Raises:
            InputError: A list is too long, or a template or an expression fails. The message has call and row.
        """
        expanded, tasks = self.expanded, self.expanded.tasks
        call = expanded.app.calls[int(tasks.call[task])]
        row, k, index = int(tasks.row[task]), int(tasks.round[task]), int(tasks.index[task])
        with _error_prefix(call, expanded.ids[row]):
            context = _RowView(expanded, row, outputs).context(call, task, k, index)
            if context is None:
                return None
            task_name = f"{expanded.ids[row]}/{call.name}/{k}/{index}"
            return _request(call, expanded.app.models[int(tasks.model[task])], task, task_name, context)


def _request(call: Call, model: Model, task: int, task_name: str, context: Mapping[str, Any]) -> RequestSpec:
    """Return a task's request with the key of its output. ``task_name`` determines the seed that the request gets."""
    from lengthwise.apps.launch.engine import CHAT as CHAT_API
    from lengthwise.apps.launch.engine import COMPLETIONS, TaskRequest
    from lengthwise.apps.run.job import RequestSpec

    def seed(given: int | None) -> int:
        digest = hashlib.sha256(f"{given}/{task_name}".encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(digest[:8], "big") % 2**31

    body: dict[str, Any]
    if call.body:
        given = expression(call.body).render(context)
        if not isinstance(given, Mapping):
            raise InputError(f"body must be a mapping of a request's fields; it is {type(given).__name__}")
        body = {name: value for name, value in given.items() if name != "model"}
        # With a seed, a repeated attempt returns the same answer.
        if body.get("temperature") != 0 and body.get("seed") is None:
            body["seed"] = seed(None)
    else:
        sampling = call.sampling
        body = sampling.fields()
        if sampling.temperature != 0:
            body["seed"] = seed(sampling.seed)
        elif sampling.seed is not None:
            body["seed"] = sampling.seed
        messages = _messages(call, context)
        body |= {"messages": messages} if call.api == CHAT else {"prompt": messages[-1]["content"]}
    api = CHAT_API if call.api == CHAT else COMPLETIONS
    text = json.dumps([model.identity(), api, body], sort_keys=True, ensure_ascii=False, default=str)
    key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return RequestSpec(key, TaskRequest(task, api, body))


@dataclass(frozen=True)
class _RowView:
    expanded: ExpandedApp
    row: int
    outputs: Outputs

    def context(self, call: Call, task: int, k: int, index: int) -> Mapping[str, Any] | None:
        """Return the variables of a task's templates in round (or chain position) k, or None if the task is skipped."""
        app, fields, fan = self.expanded.app, self.expanded.rows[self.row], call.fan
        loop = app.loop_of(call.name)
        if loop and loop.until:
            names = until_calls(app, loop)
            for j in range(k):
                if expression(loop.until).render({**fields, **{name: self._value(name, loop, j) for name in names}}):
                    return None
        values = {name: self._value(name, loop, k) for name in references(app, call).calls}
        if values and all(_is_empty(value) for value in values.values()):
            return None
        context: dict[str, Any] = {**fields, **values}
        if fan.over:
            context[PREVIOUS] = None if k == 0 else _text(self.outputs(task - 1))
        elif loop:
            blocks = self.expanded.blocks
            context[PREVIOUS] = {n: self._output(blocks[n, k - 1]) if k else None for n in loop.calls}
        number = k if fan.over else index
        if fan.times > 1 or fan.each or fan.over:
            context[INDEX] = number
        if source := fan.each or fan.over:
            items = _items(source, context, fan.max_items)
            if number >= len(items):
                return None
            context[ITEM] = items[number]
        return context if not call.when or expression(call.when).render(context) else None

    def _value(self, name: str, loop: Loop | None, k: int) -> Any:
        """Return the output of a call: of round k if it is in ``loop``, otherwise of the last round that has one."""
        other, blocks = self.expanded.app.loop_of(name), self.expanded.blocks
        if other is None:
            return self._output(blocks[name, 0])
        if other is loop:
            return self._output(blocks[name, k])
        rounds = (self._output(blocks[name, j]) for j in reversed(range(other.max_rounds)))
        return next((value for value in rounds if not _is_empty(value)), None)

    def _output(self, block: Block) -> Any:
        """Return the row's output in a block: a text, a list, a mapping by model, or None if the call was skipped."""
        call, (first, last) = self.expanded.app.calls[block.call], block.start[self.row : self.row + 2]
        tasks = range(block.first + int(first), block.first + int(last))
        if call.fan.over:
            return _text(self.outputs(tasks[-1])) if tasks else None
        texts = [_text(self.outputs(task)) for task in tasks]
        if isinstance(call.model, tuple):
            return {name: text for name, text in zip(call.model, texts, strict=True) if text is not None}
        return [text for text in texts if text is not None] if call.fan.is_list else texts[0]


def _text(output: Output | None) -> str | None:
    return None if output is None else output.text


def _is_empty(value: Any) -> bool:
    return value is None or value in ([], {})
