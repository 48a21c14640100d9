"""What a user builds: models, calls and the loops between them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from lengthwise.apps.templates import PREVIOUS, Names, Text, expression, template
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.workload import Marginal

_REFUSED = {
    "tools": "answers are kept as texts, and calls of tools are none",
    "functions": "answers are kept as texts, and calls of functions are none",
    "logprobs": "answers are kept as texts, without probabilities",
    "echo": "answers are kept without their prompts",
    "stream": "answers are kept whole",
}


def require_one_answer(fields: Mapping[str, Any], where: str) -> None:
    """Raises InputError where a request with these fields would be answered by more, or by other, than one text.

    Args:
        fields: Of a request.
        where: What holds them, for the message.
    """
    for name, why in _REFUSED.items():
        if fields.get(name):
            raise InputError(f"{where}.{name} cannot be asked for: {why}. Take it out")
    for name in ("n", "best_of"):
        if fields.get(name) not in (1, None):
            raise InputError(f"{where}.{name} must be 1, since a request has one answer; it is {fields[name]!r}")


CHAT, COMPLETION = "chat", "completion"
DEFAULT_TOKENS = 1024


@dataclass(frozen=True)
class Sampling:
    """How an output is drawn.

    Attributes:
        max_tokens: Longest output.
        temperature: 0 decodes greedily.
        top_p: As OpenAI's API has it; None: the engine's default.
        stop: Texts that end the output.
        seed: None: of what the task is, where decoding is not greedy.
        extra: Further fields of the request, passed on as they are; the answer must stay one text.
    """

    max_tokens: int = DEFAULT_TOKENS
    temperature: float = 0.0
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InputError(f"max_tokens must be at least 1; it is {self.max_tokens}")
        if not self.temperature >= 0:
            raise InputError(f"temperature must be at least 0; it is {self.temperature}")
        require_one_answer(self.extra, "extra")

    @property
    def is_greedy(self) -> bool:
        """Whether the same request has the same answer."""
        return self.temperature == 0

    def fields(self) -> dict[str, Any]:
        """Those of a request's body but for the seed, which may be the task's."""
        said: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        if self.top_p is not None:
            said["top_p"] = self.top_p
        if self.stop:
            said["stop"] = list(self.stop)
        return said | dict(self.extra)


@dataclass(frozen=True)
class Model:
    """A model that an application uses.

    Attributes:
        name: As calls name it.
        model: Catalog name or ``config.json``, for planning; "": the name.
        weights: What an engine loads; None: what the catalog knows.
        revision: Of the weights; it is part of every result's key.
        lengths: Distribution of its output lengths without a limit; None: every output is as long as it may be.
        max_model_len: Longest prompt and output; None: the model's own.
        limits: The engine's knobs.
        cost: Where seconds come from, as ``engine.deploy`` takes it.
        host: The engine's host, as ``engine.deploy`` takes it.
        asked_with: What its engines are asked for and told besides, in words; part of every result's key.
    """

    name: str
    model: str = ""
    weights: str | None = None
    revision: str = ""
    lengths: Marginal | None = None
    max_model_len: int | None = None
    limits: EngineLimits = EngineLimits()
    cost: str = "roofline"
    host: str = "default"
    asked_with: str = ""

    @property
    def spec(self) -> str:
        """What the catalog is asked for."""
        return self.model or self.name

    def identity(self) -> str:
        """What its answers follow from."""
        return f"{self.weights or self.spec}@{self.revision}" + (self.asked_with and f" {self.asked_with}")


@dataclass(frozen=True)
class Fan:
    """How a call becomes several tasks a row; at most one of ``each``, ``times`` and ``over``.

    Attributes:
        each: Expression for a list: a task for each element (``item``, ``index``).
        times: So many independent tasks (``index``).
        over: Expression for a list of the row: a chain, each round sees ``item``, ``index`` and ``previous``, the
            output of the round before; the call's output is the last one's.
        most: Longest list, where it hangs on outputs.
        expected: Its mean length, for planning; None: ``most``.
    """

    each: str = ""
    times: int = 1
    over: str = ""
    most: int | None = None
    expected: float | None = None

    def __post_init__(self) -> None:
        if self.times < 1:
            raise InputError(f"times must be at least 1; it is {self.times}")
        ways = [name for name, is_so in self._ways().items() if is_so]
        if len(ways) > 1:
            raise InputError(f"a call fans out in one way; {' and '.join(ways)} are given. Keep one of them")
        if self.most is not None and self.most < 1:
            raise InputError(f"most must be at least 1; it is {self.most}")

    def _ways(self) -> dict[str, bool]:
        return {"each": bool(self.each), "times": self.times > 1, "over": bool(self.over)}

    @property
    def is_list(self) -> bool:
        """Whether children see a list."""
        return bool(self.each) or self.times > 1


def each(expression: str, *, most: int | None = None, expected: float | None = None) -> Fan:
    """A task for each element of a list."""
    return Fan(each=expression, most=most, expected=expected)


def times(count: int) -> Fan:
    """So many independent tasks."""
    return Fan(times=count)


def over(expression: str) -> Fan:
    """A chain over a list of the row."""
    return Fan(over=expression)


@dataclass(frozen=True)
class From:
    """The model that a field of the row names."""

    field: str


@dataclass(frozen=True)
class Report:
    """Fields of the row that tell lengths, in tokens; "": none does.

    Attributes:
        prompt_tokens: Of the prompt without what other calls put into it.
        output_tokens: Of the output, where it is known beforehand.
        max_tokens: Longest output, where rows differ in it; for planning, the request says it itself.
    """

    prompt_tokens: str = ""
    output_tokens: str = ""
    max_tokens: str = ""


Messages = tuple[tuple[str, str], ...]
"""(role, template) of each message."""


@dataclass(frozen=True)
class Call:
    """A prompt for a model.

    Attributes:
        name: As other calls' templates name its output.
        model: A model's name; several: each of them is asked, and children see a mapping; From: the row says.
        prompt: A Jinja2 template: one user message, or messages.
        system: Template of a system message before it; "": none.
        sampling: How outputs are drawn.
        api: "chat", or "completion": the bare prompt.
        fan: Several tasks a row.
        when: Expression; false: skipped. "": always.
        when_share: How often it is true, for planning.
        report: Lengths that the row tells.
        body: Expression for the whole body of the request, which is sent as it is; prompt and sampling are not looked
            at. "": they make it.
    """

    name: str
    model: str | tuple[str, ...] | From
    prompt: str | Messages
    system: str = ""
    sampling: Sampling = Sampling()
    api: str = CHAT
    fan: Fan = Fan()
    when: str = ""
    when_share: float = 1.0
    report: Report = Report()
    body: str = ""

    @property
    def messages(self) -> Messages:
        """(role, template) of all messages."""
        said = (("user", self.prompt),) if isinstance(self.prompt, str) else self.prompt
        return ((("system", self.system),) if self.system else ()) + said

    @property
    def is_mapping(self) -> bool:
        """Whether children see a mapping by model."""
        return isinstance(self.model, tuple)


@dataclass(frozen=True)
class Loop:
    """Calls that go round and round, in this order.

    Attributes:
        name: For messages.
        calls: Names; each sees those before it as of this round, and ``previous.NAME`` of the round before.
        most: Rounds at most.
        until: Expression that ends it when a round is over; "": all rounds are run.
        until_share: How often it ends after a round, for planning.
    """

    name: str
    calls: tuple[str, ...]
    most: int
    until: str = ""
    until_share: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", tuple(self.calls))  # a list will do, as it does in App
        if self.most < 1:
            raise InputError(f"most of loop {self.name!r} must be at least 1; it is {self.most}")


@dataclass(frozen=True)
class App:
    """An application; it is checked whole when it is made.

    Attributes:
        models: By name.
        calls: Their order is that of outputs in exports.
        loops: Over some of the calls.
        name: For reports.

    Raises:
        InputError: A name is unknown, a template cannot be read, or calls wait for one another in a cycle.
    """

    models: Sequence[Model]
    calls: Sequence[Call]
    loops: Sequence[Loop] = ()
    name: str = ""

    def __post_init__(self) -> None:

        for column in ("models", "calls", "loops"):
            object.__setattr__(self, column, tuple(getattr(self, column)))
        check(self)

    def model_index(self, name: str) -> int:
        """The number of a model."""
        return [model.name for model in self.models].index(name)

    def loop_of(self, call: str) -> Loop | None:
        """The loop that a call is in."""
        return next((loop for loop in self.loops if call in loop.calls), None)


ITEM, INDEX = "item", "index"
BUILT_IN = frozenset({"range", "dict", "lipsum", "cycler", "joiner", "namespace"})
"""Names that Jinja2 gives every template."""


@dataclass(frozen=True)
class References:
    """What a call names.

    Attributes:
        shown: Calls that stand in its prompt.
        requested: Other calls, that only its ``when`` or its list names.
        previous: Calls of its loop as of the round before.
        shown_before: Those of them that stand in its prompt.
        fields: Fields of the row.
    """

    shown: frozenset[str]
    requested: frozenset[str]
    previous: frozenset[str]
    shown_before: frozenset[str]
    fields: frozenset[str]

    @property
    def calls(self) -> frozenset[str]:
        """All that it waits for in its own round, or outside of its loop."""
        return self.shown | self.requested


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
    return Names(frozenset().union(*(one.plain for one in found)), frozenset().union(*(one.previous for one in found)))


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
        requested=(asks.plain & known) - shown,
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
    asked = () if isinstance(call.model, From) else (call.model,) if isinstance(call.model, str) else call.model
    if not asked and not isinstance(call.model, From):
        raise InputError(f"call {call.name!r} must ask a model; it names none. Known are: {', '.join(known)}")
    for name in asked:
        if name not in known:
            raise UnknownNameError(f"model for call {call.name!r}", name, known)
    if call.api not in (CHAT, COMPLETION):
        raise UnknownNameError(f"api for call {call.name!r}", call.api, (CHAT, COMPLETION))
    if call.api == COMPLETION and (call.system or not isinstance(call.prompt, str)):
        raise InputError(f"call {call.name!r} of api {COMPLETION!r} takes one prompt; system and messages are chat's")
    if not 0 <= call.when_share <= 1:
        raise InputError(f"when_share of call {call.name!r} must be from 0 to 1; it is {call.when_share}")
    if call.is_mapping and (call.fan.is_list or call.fan.over):
        raise InputError(f"call {call.name!r} asks several models; it cannot fan out as well. Make it two calls")
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
            raise InputError(f"call {name!r} is a chain (over) and in loop {loop.name!r}; it can be one of them")
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
