"""What a user builds: models, calls and the loops between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lengthwise.apps._fields import require_one_answer
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.errors import InputError
from lengthwise.workload import Marginal

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
class Told:
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
        told: Lengths that the row tells.
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
    told: Told = Told()
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
        from lengthwise.apps._check import check

        for column in ("models", "calls", "loops"):
            object.__setattr__(self, column, tuple(getattr(self, column)))
        check(self)

    def model_index(self, name: str) -> int:
        """The number of a model."""
        return [model.name for model in self.models].index(name)

    def loop_of(self, call: str) -> Loop | None:
        """The loop that a call is in."""
        return next((loop for loop in self.loops if call in loop.calls), None)
