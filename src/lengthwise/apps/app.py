"""Definition of an application: its models, calls and loops, which are checked on construction."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from lengthwise.apps.templates import PREVIOUS, Names, Text, expression, template
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.workload import Marginal

_UNSUPPORTED_FIELDS = {
    "tools": "outputs are stored as text, without tool calls",
    "functions": "outputs are stored as text, without function calls",
    "logprobs": "outputs are stored as text, without probabilities",
    "echo": "outputs are stored without their prompts",
    "stream": "outputs are stored when they are complete",
}


def require_one_text(fields: Mapping[str, Any], where: str) -> None:
    """Raise InputError if a request with these fields does not get one text. ``where`` names the fields in errors."""
    for name, reason in _UNSUPPORTED_FIELDS.items():
        if fields.get(name):
            raise InputError(f"{where}.{name} is not supported: {reason}. Remove it")
    for name in ("n", "best_of"):
        if fields.get(name) not in (1, None):
            raise InputError(f"{where}.{name} must be 1, since a request has one answer; it is {fields[name]!r}")


CHAT, COMPLETION = "chat", "completion"
DEFAULT_TOKENS = 1024


@dataclass(frozen=True)
class Sampling:
    """How an engine samples an output."""

    max_tokens: int = DEFAULT_TOKENS  # maximum number of output tokens
    temperature: float = 0.0  # sampling temperature; 0 decodes greedily
    top_p: float | None = None  # share of the probability from which tokens are sampled; None uses the engine's default
    stop: tuple[str, ...] = ()  # texts that end the output
    # At a temperature above 0, each request has a seed derived from this number and the task's name, or from the name
    # alone if this is None. At temperature 0, the request has this number as its seed, or no seed.
    seed: int | None = None
    # Further fields of the request, which override those above. They must not request several texts.
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InputError(f"max_tokens must be at least 1; it is {self.max_tokens}")
        if not self.temperature >= 0:
            raise InputError(f"temperature must be at least 0; it is {self.temperature}")
        require_one_text(self.extra, "extra")

    def fields(self) -> dict[str, Any]:
        """Return the fields of a request's body, except for the seed and the prompt, which differ between tasks."""
        body: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        if self.top_p is not None:
            body["top_p"] = self.top_p
        if self.stop:
            body["stop"] = list(self.stop)
        return body | dict(self.extra)


@dataclass(frozen=True)
class Model:
    """A model that an application uses."""

    name: str  # name by which calls refer to the model
    model: str = ""  # catalog name or path of a ``config.json``, for planning; "" means ``name``
    weights: str | None = None  # weights that an engine loads; None means the catalog's
    revision: str = ""  # revision of the weights; outputs of another revision are not reused
    # Distribution of output lengths before any limit, for planning. None assumes ``max_tokens`` tokens.
    lengths: Marginal | None = None
    max_model_len: int | None = None  # maximum tokens of prompt and output together; None means the model's own limit
    limits: EngineLimits = EngineLimits()  # limits of the engine, for planning and for vLLM's command
    cost: str = "roofline"  # source of step times, as in ``engine.deploy``
    host: str = "default"  # host overhead of a step, as in ``engine.deploy``
    # Text that describes what engines add to requests. Outputs under another text are not reused.
    request_options: str = ""

    @property
    def spec(self) -> str:
        """Return the name or path by which the catalog finds the model."""
        return self.model or self.name

    def identity(self) -> str:
        """Return a text with weights, revision and ``request_options``, which is part of the key of each output."""
        return f"{self.weights or self.spec}@{self.revision}" + (self.request_options and f" {self.request_options}")


@dataclass(frozen=True)
class Fan:
    """A fan-out: how a call becomes several tasks per row. At most one of ``each``, ``times`` and ``over`` is set."""

    each: str = ""  # expression for a list; each element becomes a task, whose templates can use ``item`` and ``index``
    times: int = 1  # number of independent tasks, whose templates can use ``index``
    # Expression for a list in the row. Each element becomes a task, which waits for the task of the element before.
    # Templates can use ``item``, ``index`` and ``previous``, the output of that earlier task. The output of the call is
    # the last task's output.
    over: str = ""
    max_items: int | None = None  # maximum length of the list; required if the list depends on outputs
    expected: float | None = None  # mean length of the list, for planning; None means ``max_items``

    def __post_init__(self) -> None:
        if self.times < 1:
            raise InputError(f"times must be at least 1; it is {self.times}")
        given = {"each": bool(self.each), "times": self.times > 1, "over": bool(self.over)}
        if sum(given.values()) > 1:
            names = " and ".join(name for name, is_given in given.items() if is_given)
            raise InputError(f"a call fans out in one way; {names} are given. Keep one of them")
        if self.max_items is not None and self.max_items < 1:
            raise InputError(f"max_items must be at least 1; it is {self.max_items}")

    @property
    def is_list(self) -> bool:
        """Return whether the output of the call is a list."""
        return bool(self.each) or self.times > 1


def each(expression: str, *, max_items: int | None = None, expected: float | None = None) -> Fan:
    """Return a fan-out with one task for each element of a list."""
    return Fan(each=expression, max_items=max_items, expected=expected)


def times(count: int) -> Fan:
    """Return a fan-out into ``count`` independent tasks."""
    return Fan(times=count)


def over(expression: str) -> Fan:
    """Return a fan-out that processes the elements of a list in the row one after another, as a chain."""
    return Fan(over=expression)


@dataclass(frozen=True)
class From:
    """States that each row names the model of a call, in its field ``field``. For ``Call.model``."""

    field: str


@dataclass(frozen=True)
class LengthFields:
    """Names of the row fields with lengths in tokens, for planning. A name is "" if there is no such field."""

    prompt_tokens: str = ""  # field with the length of the prompt without the outputs of other calls
    output_tokens: str = ""  # field with the length of the output, if it is known beforehand
    # Field with the maximum length of the output, if it differs between rows. Requests do not have it.
    max_tokens: str = ""


Messages = tuple[tuple[str, str], ...]  # (role, template) of each message


@dataclass(frozen=True)
class Call:
    """A prompt template that a model answers for each row."""

    name: str  # name by which templates of other calls refer to the output
    # Name of the model. With several names, each model answers, and the output is a mapping. With From, each row names
    # its model.
    model: str | tuple[str, ...] | From
    prompt: str | Messages  # jinja2 template of one user message, or the role and template of several messages
    system: str = ""  # template of a system message in front of the prompt; "" means none
    sampling: Sampling = Sampling()  # how outputs are sampled
    api: str = CHAT  # "chat", or "completion", which sends the bare prompt
    fan: Fan = Fan()  # how the call becomes several tasks per row
    when: str = ""  # expression; a task is skipped if the expression is false for it. "" is always true
    when_share: float = 1.0  # probability that ``when`` is true, for planning
    report: LengthFields = LengthFields()  # row fields that contain lengths
    # expression for the body of the request, without the model; "" builds the body from prompt and sampling
    body: str = ""

    @property
    def messages(self) -> Messages:
        """Return the role and the template of each message."""
        messages = (("user", self.prompt),) if isinstance(self.prompt, str) else self.prompt
        return ((("system", self.system),) if self.system else ()) + messages

    @property
    def expressions(self) -> tuple[str, ...]:
        """Return the expressions of the call that are not empty."""
        return tuple(text for text in (self.when, self.fan.each, self.fan.over, self.body) if text)


@dataclass(frozen=True)
class Loop:
    """Calls that are repeated in rounds, in this order."""

    name: str  # name of the loop in messages
    # Names of the calls. Each can use earlier calls of its round, and ``previous.NAME`` of the round before.
    calls: tuple[str, ...]
    max_rounds: int  # maximum number of rounds
    until: str = ""  # expression that is evaluated after each round and ends the loop if it is true; "" runs all rounds
    until_share: float = 0.0  # probability that the loop ends after a round, for planning

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", tuple(self.calls))
        if self.max_rounds < 1:
            raise InputError(f"max_rounds of loop {self.name!r} must be at least 1; it is {self.max_rounds}")


@dataclass(frozen=True)
class App:
    """An application: calls to models, made for each row of the inputs. The constructor checks names and templates.

    Files of outputs list a row's calls in the order of ``ordered_units``, and the calls of a loop round by round.
    Raises InputError if a name is unknown, a template has an error, or calls wait for one another in a cycle.
    """

    models: Sequence[Model]
    calls: Sequence[Call]
    loops: Sequence[Loop] = ()
    name: str = ""

    def __post_init__(self) -> None:
        for column in ("models", "calls", "loops"):
            object.__setattr__(self, column, tuple(getattr(self, column)))
        _check(self)

    def loop_of(self, call: str) -> Loop | None:
        """Return the loop that contains a call, or None."""
        return next((loop for loop in self.loops if call in loop.calls), None)


ITEM, INDEX = "item", "index"
_JINJA_GLOBALS = frozenset({"range", "dict", "lipsum", "cycler", "joiner", "namespace"})  # defined in every template


@dataclass(frozen=True)
class References:
    """Names that a call's templates and expressions use."""

    calls: frozenset[str]  # calls whose outputs are used, except for outputs of the round before in a loop
    shown: frozenset[str]  # the ``calls`` whose outputs are part of the prompt
    previous: frozenset[str]  # calls of the same loop whose outputs of the round before are used
    shown_previous: frozenset[str]  # the ``previous`` calls whose outputs are part of the prompt
    fields: frozenset[str]  # fields of the row


@lru_cache(maxsize=1024)
def _names(sources: tuple[str, ...], parse: Callable[[str], Text]) -> Names:
    found = [parse(source).names for source in sources]
    return Names(frozenset().union(*(one.plain for one in found)), frozenset().union(*(one.previous for one in found)))


def references(app: App, call: Call) -> References:
    """Return the calls and the row fields that a call's templates and expressions use.

    A name is a row field if it is neither a call nor a variable of the call's fan-out or loop, such as ``item``.
    """
    fan, is_looped = call.fan, app.loop_of(call.name) is not None
    variables = set(_JINJA_GLOBALS)
    if fan.each or fan.over:
        variables |= {ITEM, INDEX}
    if fan.times > 1:
        variables.add(INDEX)
    if fan.over or is_looped:
        variables.add(PREVIOUS)
    calls = {one.name for one in app.calls}
    prompt = _names(tuple(text for _, text in call.messages), template)
    expressions = _names(call.expressions, expression)
    plain = prompt.plain | expressions.plain
    return References(
        calls=plain & calls,
        shown=prompt.plain & calls,
        previous=prompt.previous | expressions.previous if is_looped else frozenset(),
        shown_previous=prompt.previous if is_looped else frozenset(),
        fields=plain - calls - variables,
    )


def until_calls(app: App, loop: Loop) -> frozenset[str]:
    """Return the names of the calls whose outputs a loop's end condition (``until``) uses."""
    plain = expression(loop.until).names.plain if loop.until else frozenset()
    return plain & {one.name for one in app.calls}


Unit = tuple[str, ...]  # a single call, or the calls of a loop in their order


def ordered_units(app: App) -> list[Unit]:
    """Return the application's units, each after the units whose outputs it uses.

    A unit is a single call, or all calls of a loop. Of several units that could be next, the first in ``calls`` is.
    Raises InputError if calls wait for one another outside of a loop. The message names the cycle.
    """
    unit_of: dict[str, Unit] = {}
    for call in app.calls:
        loop = app.loop_of(call.name)
        unit_of[call.name] = loop.calls if loop else (call.name,)
    waits: dict[Unit, set[Unit]] = {unit: set() for unit in unit_of.values()}
    for call in app.calls:
        waits[unit_of[call.name]] |= {unit_of[name] for name in references(app, call).calls}
    for loop in app.loops:
        waits[loop.calls] |= {unit_of[name] for name in until_calls(app, loop)}
        waits[loop.calls].discard(loop.calls)
    done: list[Unit] = []
    while waits:
        ready = next((unit for unit, parents in waits.items() if not parents - set(done)), None)
        if ready is None:
            raise _cycle_error(waits, done)
        done.append(ready)
        del waits[ready]
    return done


def _cycle_error(waits: dict[Unit, set[Unit]], done: list[Unit]) -> InputError:
    path = [next(iter(waits))]
    while (unit := min(waits[path[-1]] - set(done))) not in path:
        path.append(unit)
    names = [" and ".join(one) for one in [*path[path.index(unit) :], unit]]
    if len(names) > 2:
        cycle = " -> ".join(reversed(names))
        return InputError(
            f"calls must not wait for one another outside of a loop; this is a cycle: {cycle}. Put them into [loops], "
            "or remove one of the references"
        )
    # Usually the call has the same name as a field of the inputs.
    name = names[0]
    return InputError(
        f"call {name!r} names {name!r}, which is itself. To use a field {name!r} of the inputs, give the call or the "
        f"field another name. To use its own output of the round before, put it into [loops] and write previous.{name}"
    )


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_RESERVED = frozenset({"item", "index", "previous", "true", "false", "none", "loop", "self"})


def _check(app: App) -> None:
    for kind, named in (("model", app.models), ("call", app.calls), ("loop", app.loops)):
        if not named and kind != "loop":
            raise InputError(f"an application needs at least one {kind}, a table [{kind}s.NAME]; it has none")
        _require_unique(kind, [one.name for one in named])
    for call in app.calls:
        _check_call(app, call)
    for loop in app.loops:
        _check_loop(app, loop)
    for call in app.calls:
        _check_previous(app, call)
    ordered_units(app)


def _require_unique(kind: str, names: Sequence[str]) -> None:
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"every {kind} needs a name of its own; duplicates: {', '.join(duplicates)}")


def _check_call(app: App, call: Call) -> None:  # noqa: C901 - one check after another
    if not _NAME.match(call.name) or call.name.lower() in _RESERVED:
        raise InputError(
            f"a call's name must be usable in templates: letters, digits and _, and none of "
            f"{', '.join(sorted(_RESERVED))}; it is {call.name!r}"
        )
    known = [model.name for model in app.models]
    if not isinstance(call.model, From):
        names = (call.model,) if isinstance(call.model, str) else call.model
        if not names:
            raise InputError(f"call {call.name!r} must name a model. Known are: {', '.join(known)}")
        for name in names:
            if name not in known:
                raise UnknownNameError(f"model for call {call.name!r}", name, known, f'a table [models."{name}"]')
    if call.api not in (CHAT, COMPLETION):
        raise UnknownNameError(f"api for call {call.name!r}", call.api, (CHAT, COMPLETION))
    if call.api == COMPLETION and (call.system or not isinstance(call.prompt, str)):
        raise InputError(f"call {call.name!r} of api {COMPLETION!r} must have one prompt and no system message")
    if not 0 <= call.when_share <= 1:
        raise InputError(f"when_share of call {call.name!r} must be from 0 to 1; it is {call.when_share}")
    if isinstance(call.model, tuple) and (call.fan.is_list or call.fan.over):
        raise InputError(f"call {call.name!r} names several models; it cannot fan out as well. Make it two calls")
    try:
        _parsed(call)
    except InputError as error:
        raise InputError(f"call {call.name!r}: {error}") from error
    calls = {one.name for one in app.calls}
    if call.fan.over and (parents := expression(call.fan.over).names.plain & calls):
        raise InputError(
            f"over of call {call.name!r} must be a list in the row; it names the call {_joined(parents)}. "
            "Use each, with max_items"
        )
    if call.fan.each and call.fan.max_items is None and (parents := expression(call.fan.each).names.plain & calls):
        raise InputError(
            f"each of call {call.name!r} depends on the output of {_joined(parents)}, so it needs max_items, the "
            "maximum length of its list"
        )


def _parsed(call: Call) -> list[Text]:
    return [*(template(text) for _, text in call.messages), *map(expression, call.expressions)]


def _check_loop(app: App, loop: Loop) -> None:
    calls = {one.name: one for one in app.calls}
    if not loop.calls:
        raise InputError(f"loop {loop.name!r} must have calls; it has none. Known are: {', '.join(calls)}")
    _require_unique(f"call of loop {loop.name!r}", loop.calls)
    for name in loop.calls:
        if name not in calls:
            raise UnknownNameError(f"call for loop {loop.name!r}", name, calls)
        loops = [other.name for other in app.loops if name in other.calls]
        if len(loops) > 1:
            raise InputError(f"a call may be in one loop; {name!r} is in {_joined(loops)}")
        if calls[name].fan.over:
            raise InputError(f"call {name!r} is a chain (over) and in loop {loop.name!r}; it can be one of them")
    if not 0 <= loop.until_share <= 1:
        raise InputError(f"until_share of loop {loop.name!r} must be from 0 to 1; it is {loop.until_share}")
    try:
        until_calls(app, loop)
    except InputError as error:
        raise InputError(f"until of loop {loop.name!r}: {error}") from error


def _check_previous(app: App, call: Call) -> None:
    loop, names = app.loop_of(call.name), references(app, call)
    if loop is None:
        if not call.fan.over and any(PREVIOUS in text.names.plain for text in _parsed(call)):
            raise InputError(
                f"call {call.name!r} names previous, which exists in a chain (over) and in loops; it is in neither"
            )
        return
    if foreign := names.previous - set(loop.calls):
        raise UnknownNameError(f"call of loop {loop.name!r} for previous", min(foreign), loop.calls)
    if later := names.calls & set(loop.calls[loop.calls.index(call.name) :]):
        raise InputError(
            f"call {call.name!r} comes before {_joined(later)} in loop {loop.name!r}, so its own round has no output "
            f"of {min(later)} yet; write previous.{min(later)} to use the output of the round before"
        )


def _joined(names: Iterable[str]) -> str:
    return " and ".join(sorted(names))
