"""What calls take of a row, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lengthwise.apps._graph import references, until_calls
from lengthwise.apps.app import App, Call, From
from lengthwise.apps.templates import expression
from lengthwise.schema.errors import InputError, UnknownNameError

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
        raise InputError(
            f"{source} of call {call.name!r} must be a list; in row {which} it is {type(found).__name__}"
        )
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
        told = {call.told.prompt_tokens, call.told.output_tokens, call.told.max_tokens} - {""}
        if isinstance(call.model, From):
            told.add(call.model.field)
        for name in sorted((references(app, call).fields | told) - known):
            raise UnknownNameError(f"call or field of the inputs for call {call.name!r}", name, known | calls)
    for loop in app.loops:
        for name in sorted(expression(loop.until).names.plain - known - calls if loop.until else ()):
            raise UnknownNameError(
                f"call or field of the inputs for until of loop {loop.name!r}", name, known | calls
            )


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
