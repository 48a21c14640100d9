"""Who names whom: the edges between calls, and an order in which they can be made."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lengthwise.apps.app import App, Call, Loop
from lengthwise.apps.templates import PREVIOUS, Names, Text, expression, template
from lengthwise.schema.errors import InputError

ITEM, INDEX = "item", "index"
BUILT_IN = frozenset({"range", "dict", "lipsum", "cycler", "joiner", "namespace"})
"""Names that Jinja2 gives every template."""


@dataclass(frozen=True)
class References:
    """What a call names.

    Attributes:
        shown: Calls that stand in its prompt.
        asked: Other calls, that only its ``when`` or its list names.
        previous: Calls of its loop as of the round before.
        shown_before: Those of them that stand in its prompt.
        fields: Fields of the row.
    """

    shown: frozenset[str]
    asked: frozenset[str]
    previous: frozenset[str]
    shown_before: frozenset[str]
    fields: frozenset[str]

    @property
    def calls(self) -> frozenset[str]:
        """All that it waits for in its own round, or outside of its loop."""
        return self.shown | self.asked


def prompts(call: Call) -> tuple[Text, ...]:
    """The templates of its messages."""
    return tuple(template(text) for _, text in call.messages)


def expressions(call: Call) -> tuple[Text, ...]:
    """Its ``when``, its list and its body, where it has them."""
    return tuple(expression(text) for text in _asks(call))


def _asks(call: Call) -> tuple[str, ...]:
    return tuple(text for text in (call.when, call.fan.each, call.fan.over, call.body) if text)


@lru_cache(maxsize=1024)
def _names(call_texts: tuple[str, ...], kind: str) -> Names:
    read = template if kind == "template" else expression
    found = [read(text).names for text in call_texts]
    return Names(
        frozenset().union(*(one.plain for one in found)), frozenset().union(*(one.previous for one in found))
    )


def references(app: App, call: Call) -> References:
    """What a call names; a call before what its fan or its loop gives, a field of the row last."""
    known = {one.name for one in app.calls}
    said = _names(tuple(text for _, text in call.messages), "template")
    asks = _names(_asks(call), "expression")
    given = _given(app, call) | BUILT_IN
    plain = said.plain | asks.plain
    shown = said.plain & known
    is_looped = app.loop_of(call.name) is not None
    before = said.previous | asks.previous if is_looped else frozenset()
    return References(
        shown=shown,
        asked=(asks.plain & known) - shown,
        previous=before,
        shown_before=said.previous if is_looped else frozenset(),
        fields=plain - known - given,
    )


def _given(app: App, call: Call) -> frozenset[str]:
    """Names that its fan and its loop give."""
    fan, given = call.fan, set()
    if fan.each or fan.over:
        given |= {ITEM, INDEX}
    if fan.times > 1:
        given.add(INDEX)
    if fan.over or app.loop_of(call.name):
        given.add(PREVIOUS)
    return frozenset(given)


def until_calls(app: App, loop: Loop) -> frozenset[str]:
    """Calls that the end of a loop is told by."""
    if not loop.until:
        return frozenset()
    return expression(loop.until).names.plain & {one.name for one in app.calls}


Unit = tuple[str, ...]
"""Calls that are made together: one, or those of a loop in their order."""


def ordered(app: App) -> list[Unit]:
    """Units, parents before children, in the order in which the application names them where it does not matter.

    Raises:
        InputError: Calls wait for one another outside of a loop; the message tells the way round.
    """
    unit_of = {one.name: app.loop_of(one.name) for one in app.calls}
    units: dict[str, Unit] = {}
    for one in app.calls:
        loop = unit_of[one.name]
        units[one.name] = loop.calls if loop else (one.name,)
    waits: dict[Unit, set[Unit]] = {unit: set() for unit in units.values()}
    for one in app.calls:
        own = units[one.name]
        waits[own] |= {units[name] for name in references(app, one).calls} - (
            {own} if len(own) > 1 or _own(app, own) else set()
        )
    for loop in app.loops:
        waits[loop.calls] |= {units[name] for name in until_calls(app, loop)} - {loop.calls}
    out: list[Unit] = []
    while waits:
        ready = next((unit for unit, some in waits.items() if not some - set(out)), None)
        if ready is None:
            raise InputError(_cycle(waits, out))
        out.append(ready)
        del waits[ready]
    return out


def _own(app: App, unit: Unit) -> bool:
    """Whether it is a loop of one call."""
    return app.loop_of(unit[0]) is not None


def _cycle(waits: dict[Unit, set[Unit]], done: list[Unit]) -> str:
    at = next(iter(waits))
    way = [at]
    while True:
        at = min(waits[at] - set(done))
        if at in way:
            names = [" and ".join(unit) for unit in [*way[way.index(at) :], at]]
            if len(names) == 2:
                return _of_itself(names[0])
            shown = " -> ".join(reversed(names))
            return (
                f"calls must not wait for one another outside of a loop; here {shown}. Put them into [loops], or take "
                "one name out"
            )
        way.append(at)


def _of_itself(name: str) -> str:
    """A call that waits for itself is most often one that has the name of a field."""
    return (
        f"call {name!r} names {name!r}, which is itself. If a field {name!r} of the inputs is meant, give the call or "
        "the field another name; if its own output of the round before is, put it into [loops] and write "
        f"previous.{name}"
    )
