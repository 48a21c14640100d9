"""An application unrolled over its rows: everything that it may ask, as columns."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    ordered,
    references,
    until_calls,
)
from lengthwise.apps.launch.engine import CHAT as CHAT_API
from lengthwise.apps.launch.engine import COMPLETIONS, Ask
from lengthwise.apps.ledger.contracts import Output
from lengthwise.apps.run.job import Outputs, RequestSpec
from lengthwise.apps.templates import PREVIOUS, expression, template
from lengthwise.schema.app import Flags, Floats, Ints, Tasks
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.workload import estimated_tokens


@dataclass(frozen=True, eq=False)
class Block:
    """Tasks of one call in one round, row by row.

    Attributes:
        call: Number of the call.
        round: Round of its loop.
        first: Number of the first task.
        start: [rows+1] where each row's tasks begin, from ``first``.
        model: [tasks] who is asked.
        index: [tasks] place within the row.
        prompt_tokens: [tasks] without what other calls put in.
        known_tokens: [tasks] of the output, 0 where not known.
        random_draw: [tasks] or -1.
        is_chain: Whether each task of a row waits for the one before it.
    """

    call: int
    round: int
    first: int
    start: Ints
    model: Ints
    index: Ints
    prompt_tokens: Ints
    known_tokens: Ints
    random_draw: Ints
    is_chain: bool

    def __len__(self) -> int:
        return len(self.model)

    @property
    def rows(self) -> Ints:
        """[tasks] the row of each."""
        return np.repeat(np.arange(len(self.start) - 1), np.diff(self.start))

    def of_row(self, row: int) -> range:
        """Numbers of a row's tasks."""
        return range(self.first + int(self.start[row]), self.first + int(self.start[row + 1]))

    def last_of_row(self, row: int) -> range:
        """The number of a row's last task; none where there is none."""
        return self.of_row(row)[-1:]


Edges = tuple[Ints, Ints]
"""(child, parent), by number."""


def to_all(child: Block, parent: Block) -> Edges:
    """From each task to all of its row in another block."""
    lengths = np.diff(parent.start)[child.rows]
    begins = parent.first + parent.start[child.rows]
    return _children(child, lengths), _ranges(begins, lengths)


def to_last(child: Block, parent: Block) -> Edges:
    """From each task to the last of its row in another block."""
    rows = child.rows
    there = np.flatnonzero(np.diff(parent.start)[rows] > 0)
    return child.first + there, parent.first + parent.start[rows[there] + 1] - 1


def along(block: Block) -> Edges:
    """From each task of a chain to the one before it."""
    later = np.flatnonzero(block.index > 0)
    return block.first + later, block.first + later - 1


def _children(child: Block, lengths: Ints) -> Ints:
    return np.repeat(child.first + np.arange(len(child)), lengths)


def _ranges(begins: Ints, lengths: Ints) -> Ints:
    """begins[0], begins[0]+1, ..., one run of so many for each."""
    total = int(lengths.sum())
    offset = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.repeat(begins, lengths) + np.arange(total) - offset


Row = Mapping[str, Any]
Rows = Sequence[Row]


def blank(call: Call) -> Any:
    """What another call's output is where only the rest of a prompt is counted."""
    if isinstance(call.model, tuple):
        return dict.fromkeys(call.model, "")
    return [""] * max(1, call.fan.times) if call.fan.is_list else ""


def items_of(source: str, row: Row, which: str, call: Call, most: int | None) -> list[Any]:
    try:
        found = expression(source).render(row)
    except InputError as error:
        raise InputError(f"call {call.name!r}, row {which}: {error}") from error
    if isinstance(found, str | bytes | Mapping) or not hasattr(found, "__iter__"):
        raise InputError(f"{source} of call {call.name!r} must be a list; in row {which} it is {type(found).__name__}")
    items = list(found)
    if most is not None and len(items) > most:
        raise InputError(
            f"{source} of call {call.name!r} may have {most} elements (most); row {which} has {len(items)}"
        )
    return items


def require_fields(app: App, rows: Rows) -> None:
    """Nothing, if every name is either a call or a field of some row; raises InputError."""
    known: set[str] = set()
    for row in rows:
        known.update(row)
    calls = {call.name for call in app.calls}
    _require_one_meaning(app, known & calls)
    for call in app.calls:
        told = {call.report.prompt_tokens, call.report.output_tokens, call.report.max_tokens} - {""}
        if isinstance(call.model, From):
            told.add(call.model.field)
        for name in sorted((references(app, call).fields | told) - known):
            raise UnknownNameError(f"call or field of the inputs for call {call.name!r}", name, known | calls)
    for loop in app.loops:
        for name in sorted(expression(loop.until).names.plain - known - calls if loop.until else ()):
            raise UnknownNameError(f"call or field of the inputs for until of loop {loop.name!r}", name, known | calls)


def _require_one_meaning(app: App, both: set[str]) -> None:
    """Nothing, if no text names what is a call and a field; raises InputError."""
    texts = [(f"call {call.name!r}", references(app, call).calls) for call in app.calls]
    texts += [(f"until of loop {loop.name!r}", until_calls(app, loop)) for loop in app.loops]
    for where, named in texts:
        for name in sorted(named & both):
            raise InputError(
                f"{where} names {name!r}, which is the call {name!r} and a field {name!r} of the inputs; one name must "
                "mean one thing. Give the call or the field another name"
            )


MOST_SEED = 2**31


def said(call: Call, context: Mapping[str, Any]) -> list[dict[str, str]]:
    """Its messages; raises InputError where a name is missing."""
    return [{"role": role, "content": template(text).render(context)} for role, text in call.messages]


def asked(call: Call, model: Model, task: int, which: str, messages: list[dict[str, str]]) -> RequestSpec:
    """The request of a task and the key of its answer.

    Args:
        call: Whose task it is.
        model: Who is asked.
        task: Its number.
        which: Tells the task from others; what is left to chance follows from it.
        messages: What is said.
    """
    sampling = call.sampling
    body: dict[str, Any] = sampling.fields()
    if not sampling.is_greedy:
        body["seed"] = _seed(sampling.seed, which)
    elif sampling.seed is not None:
        body["seed"] = sampling.seed
    api = _api(call)
    body |= {"messages": messages} if api == CHAT_API else {"prompt": messages[-1]["content"]}
    return RequestSpec(key_of(model, api, body), Ask(task, api, body))


def passed(call: Call, model: Model, task: int, which: str, body: Any) -> RequestSpec:
    """The request of a task that is sent as it was given, and the key of its answer.

    Only a seed is added, where it has none and leaves something to chance: the task is then answered the same again.

    Raises:
        InputError: The body is no table of fields.
    """
    if not isinstance(body, Mapping):
        raise InputError(f"body must be a mapping of a request's fields; it is {type(body).__name__}")
    fields = {name: value for name, value in body.items() if name != "model"}
    if fields.get("temperature") != 0 and fields.get("seed") is None:
        fields["seed"] = _seed(None, which)
    api = _api(call)
    return RequestSpec(key_of(model, api, fields), Ask(task, api, fields))


def _api(call: Call) -> str:
    return CHAT_API if call.api == CHAT else COMPLETIONS


def key_of(model: Model, api: str, body: Mapping[str, Any]) -> str:
    """SHA-256 of all that an answer follows from, in hex."""
    whole = json.dumps([model.identity(), api, body], sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()


def _seed(given: int | None, which: str) -> int:
    digest = hashlib.sha256(f"{given}/{which}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % MOST_SEED


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
            random_draw = np.full(len(self.rows), -1)
            for k in range(loop.most if loop else 1):
                if loop and k > 0 and loop.until:
                    random_draw = self._toss(np.full(len(self.rows), 1.0 - loop.until_share), random_draw)
                for name in unit:
                    self._add(calls[name], k, random_draw, loop)
        return Unrolled(self.app, self.rows, self.ids, self._tasks(), self.blocks)

    def _toss(self, chance: Floats, after: Ints) -> Ints:
        """Numbers of new coins."""
        self.chances.append(chance)
        self.hangs.append(after)
        self.coins += len(chance)
        return np.arange(self.coins - len(chance), self.coins)

    def _add(self, call: Call, k: int, random_draw: Ints, loop: Loop | None) -> None:
        names = references(self.app, call)
        random_draw = self._own_coin(call, names, k, random_draw)
        never = self._nothing_before(call, names, k)
        if never.any():
            random_draw = np.where(never, self._toss(np.zeros(len(random_draw)), random_draw), random_draw)
        lengths, items = self._sizes(call, k)
        start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        row = np.repeat(np.arange(len(self.rows)), lengths)
        index = np.arange(len(row)) - start[row]
        of = random_draw[row]
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
            known_tokens=self._report(call.report.output_tokens, row, least=1, otherwise=0),
            random_draw=of,
            is_chain=bool(call.fan.over),
        )
        self.blocks[call.name, k] = block
        self.tasks += len(block)
        self._join(call, names, block, loop)

    def _own_coin(self, call: Call, names: References, k: int, random_draw: Ints) -> Ints:
        """[rows] the coin of its tasks: that of its round, or of the one call that it hangs on, and its own."""
        if len(names.calls) == 1 and (random_draw < 0).all():
            parent = self._seen(call, min(names.calls), k)[-1]
            there = np.diff(parent.start) > 0
            random_draw = np.where(
                there, parent.random_draw[np.where(there, parent.start[:-1], 0)] if len(parent) else -1, -1
            )
        return (
            self._toss(np.full(len(random_draw), call.when_share), random_draw)
            if call.when and call.when_share < 1
            else random_draw
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

    def _report(self, name: str, row: Ints, *, least: int, otherwise: int) -> Ints:
        """[tasks] a field of whole numbers, by row."""
        if not name:
            return np.full(len(row), otherwise)
        values = [one.get(name) for one in self.rows]
        for r, value in enumerate(values):
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
                raise InputError(f"{name} must be whole tokens of at least {least}; row {self.ids[r]} has {value!r}")
        return np.array(values, np.int64)[row]

    def _most(self, call: Call, row: Ints) -> Ints:
        return self._report(call.report.max_tokens, row, least=1, otherwise=call.sampling.max_tokens)

    def _prompt_tokens(self, call: Call, names: References, row: Ints, index: Ints, items: list[Any] | None) -> Ints:
        if call.report.prompt_tokens:
            return self._report(call.report.prompt_tokens, row, least=1, otherwise=1)
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
            for at, parent in enumerate(self._seen(call, name, block.round)):  # of a loop any round may be its last
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
            random_draw=_column(blocks, lambda b: b.random_draw),
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


@dataclass(frozen=True, eq=False)
class Rendered:
    """Decides for the tasks of an unrolled application (``run.contracts.Decider``)."""

    expanded: Unrolled

    def decide(self, task: int, outputs: Outputs) -> RequestSpec | None:
        """The request of a task; None: it is skipped.

        Raises:
            InputError: A field is missing in its row, a list is too long, or a template fails; with call and row.
        """
        of, tasks = self.expanded, self.expanded.tasks
        call = of.app.calls[int(tasks.call[task])]
        row, place = int(tasks.row[task]), int(tasks.round[task])
        k = 0 if call.fan.over else place
        which = f"{of.ids[row]}/{call.name}/{place}/{int(tasks.index[task])}"
        try:
            view = _View(of, row, k, outputs)
            if view.is_over(call) or (context := view.context(call, task, place, int(tasks.index[task]))) is None:
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
        return any(self._finished(loop, j) for j in range(self.round))

    def _finished(self, loop: Loop, j: int) -> bool:
        then = _View(self.of, self.row, j, self.outputs)
        names = {name: then.value(name, loop) for name in until_calls(self.app, loop)}
        return bool(expression(loop.until).render({**self.of.rows[self.row], **names}))

    def context(self, call: Call, task: int, place: int, index: int) -> Mapping[str, Any] | None:
        """All that its templates may name; None: it is skipped."""
        loop, names = self.app.loop_of(call.name), references(self.app, call)
        values = {name: self.value(name, loop) for name in names.calls}
        if values and all(_is_empty(value) for value in values.values()):
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
        return next((one for one in rounds if not _is_empty(one)), None)

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


def _is_empty(value: Any) -> bool:
    return value is None or value in ([], {})


def _items(source: str, context: Mapping[str, Any], most: int | None) -> list[Any]:
    found = expression(source).render(context)
    if isinstance(found, str | bytes | Mapping) or not hasattr(found, "__iter__"):
        raise InputError(f"{source} must be a list; it is {type(found).__name__}")
    items = list(found)
    if most is not None and len(items) > most:
        raise InputError(f"{source} may have {most} elements (most); it has {len(items)}. Raise most")
    return items
