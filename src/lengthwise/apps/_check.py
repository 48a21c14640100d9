"""An application that cannot be run is told so before anything starts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from lengthwise.apps._graph import expressions, ordered, prompts, references, until_calls
from lengthwise.apps.app import CHAT, COMPLETION, App, Call, From, Loop
from lengthwise.apps.templates import PREVIOUS, expression
from lengthwise.schema.errors import InputError, UnknownNameError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
RESERVED = frozenset({"item", "index", "previous", "true", "false", "none", "loop", "self"})


def check(app: App) -> None:
    """Nothing, where an application can be run on rows that have its fields; raises InputError."""
    for kind, some in (("model", app.models), ("call", app.calls)):
        if not some:
            raise InputError(f"an application needs at least one {kind}; it has none")
        _unique(kind, [one.name for one in some])
    _unique("loop", [loop.name for loop in app.loops])
    for call in app.calls:
        _call(app, call)
    for loop in app.loops:
        _loop(app, loop)
    for call in app.calls:
        _previous(app, call)
    ordered(app)


def _unique(kind: str, names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"every {kind} needs a name of its own; {', '.join(twice)} stands there twice")


def _call(app: App, call: Call) -> None:
    if not _NAME.match(call.name) or call.name.lower() in RESERVED:
        raise InputError(
            f"a call's name must be one that templates can use: letters, digits and _, none of "
            f"{', '.join(sorted(RESERVED))}; it is {call.name!r}"
        )
    known = [model.name for model in app.models]
    asked = (
        () if isinstance(call.model, From) else (call.model,) if isinstance(call.model, str) else call.model
    )
    if not asked and not isinstance(call.model, From):
        raise InputError(f"call {call.name!r} must ask a model; it names none. Known are: {', '.join(known)}")
    for name in asked:
        if name not in known:
            raise UnknownNameError(f"model for call {call.name!r}", name, known)
    if call.api not in (CHAT, COMPLETION):
        raise UnknownNameError(f"api for call {call.name!r}", call.api, (CHAT, COMPLETION))
    if call.api == COMPLETION and (call.system or not isinstance(call.prompt, str)):
        raise InputError(
            f"call {call.name!r} of api {COMPLETION!r} takes one prompt; system and messages are chat's"
        )
    if not 0 <= call.when_share <= 1:
        raise InputError(f"when_share of call {call.name!r} must be from 0 to 1; it is {call.when_share}")
    if call.is_mapping and (call.fan.is_list or call.fan.over):
        raise InputError(
            f"call {call.name!r} asks several models; it cannot fan out as well. Make it two calls"
        )
    _texts(app, call)


def _texts(app: App, call: Call) -> None:
    try:
        prompts(call)
        expressions(call)
    except InputError as error:
        raise InputError(f"call {call.name!r}: {error}") from error
    calls = {one.name for one in app.calls}
    if call.fan.over and (hung := expression(call.fan.over).names.plain & calls):
        raise InputError(
            f"over of call {call.name!r} must be a list that the row has; it names the call {_some(hung)}. "
            "Use each, with most"
        )
    if call.fan.each and call.fan.most is None and (hung := expression(call.fan.each).names.plain & calls):
        raise InputError(
            f"each of call {call.name!r} hangs on what {_some(hung)} will say, so it needs most, its longest list"
        )


def _loop(app: App, loop: Loop) -> None:
    calls = [one.name for one in app.calls]
    if not loop.calls:
        raise InputError(f"loop {loop.name!r} must have calls; it has none. Known are: {', '.join(calls)}")
    _unique(f"call of loop {loop.name!r}", loop.calls)
    for name in loop.calls:
        if name not in calls:
            raise UnknownNameError(f"call for loop {loop.name!r}", name, calls)
        inside = [other.name for other in app.loops if name in other.calls]
        if len(inside) > 1:
            raise InputError(f"a call may be in one loop; {name!r} is in {_some(inside)}")
        if app.calls[calls.index(name)].fan.over:
            raise InputError(
                f"call {name!r} is a chain (over) and in loop {loop.name!r}; it can be one of them"
            )
    if not 0 <= loop.until_share <= 1:
        raise InputError(f"until_share of loop {loop.name!r} must be from 0 to 1; it is {loop.until_share}")
    if loop.until:
        try:
            until_calls(app, loop)
        except InputError as error:
            raise InputError(f"until of loop {loop.name!r}: {error}") from error


def _previous(app: App, call: Call) -> None:
    loop, names = app.loop_of(call.name), references(app, call)
    texts = [*prompts(call), *expressions(call)]
    if loop is None:
        if not call.fan.over and any(PREVIOUS in text.names.plain for text in texts):
            raise InputError(
                f"call {call.name!r} names previous, which is there in a chain (over) and in loops; it is in neither"
            )
        return
    if foreign := names.previous - set(loop.calls):
        raise UnknownNameError(f"call of loop {loop.name!r} for previous", min(foreign), loop.calls)
    later = names.calls & set(loop.calls[loop.calls.index(call.name) :])
    if later:
        raise InputError(
            f"call {call.name!r} comes before {_some(later)} in loop {loop.name!r}, so in its own round there is "
            f"none yet; write previous.{min(later)} for that of the round before"
        )


def _some(names: Iterable[str]) -> str:
    return " and ".join(sorted(names))
