"""Defines the tables of an application's file, one class for each table."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from lengthwise.apps.app import DEFAULT_TOKENS
from lengthwise.apps.plan import SwitchRates
from lengthwise.apps.run.job import Settings
from lengthwise.config.sections import EngineSection
from lengthwise.config.values import Count, Length, NotNan, Seconds, Section, Text, Wait

LAUNCHERS = ("local", "ray", "static", "simulated")
_Chance = Annotated[NotNan, Field(ge=0, le=1)]
_DEFAULTS = Settings()


class InputsSection(Section):
    """The input rows: the rows of a ``file``, identified by the field ``id``, or those of an ``openai_batch``."""

    file: Text | None = None
    id: Text | None = None
    rows: Count | None = None  # number of rows to take from the start of the file
    openai_batch: Text | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.file is None) is (self.openai_batch is None):
            raise ValueError("give one of: file, openai_batch")
        if self.openai_batch is not None and self.id is not None:
            raise ValueError("the requests of a batch are identified by their custom_id; take id out")
        if self.openai_batch is not None and self.rows is not None:
            raise ValueError("a batch is always answered completely; take rows out")
        return self


class ModelSection(Section):
    """A model. ``lengths`` is a distribution, a number, or ``{ file, column, weights }`` of observed lengths."""

    model: str = ""
    weights: Text | None = None
    revision: str = ""
    lengths: int | float | dict[str, Any] | None = None
    max_model_len: Annotated[int, Field(ge=2, le=2**24)] | None = None
    cost: Text = "roofline"
    host: Text = "default"
    weight_dtype: Text | None = None
    kv_dtype: Text | None = None
    engine: EngineSection = Field(default_factory=EngineSection)


class ObservedSection(Section):
    """Observed lengths: the ``column`` of a file; the column ``weights`` has the frequency of each length."""

    file: Text
    column: Text
    weights: Text | None = None


class LengthSection(Section):
    """Wraps one distribution, because ``validation`` finds the kinds of a distribution by the key ``output``."""

    output: Length


class MessageSection(Section):
    """One message of a chat prompt."""

    role: Text
    content: str


class CallSection(Section):
    """A prompt for one model or several. ``model_from`` is instead the field of a row that names the model."""

    model: str | list[str] | None = None
    model_from: Text | None = None
    prompt: str | None = None
    messages: list[MessageSection] | None = None
    system: str = ""
    api: str = "chat"
    max_tokens: Count = DEFAULT_TOKENS
    temperature: Annotated[NotNan, Field(ge=0)] = 0.0
    top_p: Annotated[NotNan, Field(gt=0, le=1)] | None = None
    stop: list[str] = Field(default_factory=list)
    seed: int | None = None
    extra: dict[str, Any] = Field(default_factory=dict)
    each: Text | None = None
    times: Count = 1
    over: Text | None = None
    max_items: Count | None = None
    expected: Annotated[NotNan, Field(gt=0)] | None = None
    when: str = ""
    when_share: _Chance = 1.0
    prompt_tokens: str = ""
    known_tokens: str = ""
    max_tokens_field: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.model is None) is (self.model_from is None):
            raise ValueError("give one of: model, model_from")
        if (self.prompt is None) is (self.messages is None):
            raise ValueError("give one of: prompt, messages")
        return self


class LoopSection(Section):
    """Calls that are repeated in rounds."""

    calls: list[str]
    max_rounds: Count
    until: str = ""
    until_share: _Chance = 0.0


class ClusterSection(Section):
    """The GPUs of the application. A node is a text such as "8xA100-80GB" or the name of a node."""

    nodes: Annotated[list[Text], Field(min_length=1)]
    engine_start: Seconds = (
        SwitchRates().engine_start_s
    )  # start without the weights' load time; measured times replace it


class EngineTable(Section):
    """How the engines of one model are started and called; [run] has the settings that are missing here."""

    command: str | None = None
    environment: dict[str, str] | None = None
    served: str = ""
    max_num_seqs: Count | None = None
    sleeps: bool | None = None
    urls: list[Text] = Field(default_factory=list)
    body: dict[str, Any] = Field(default_factory=dict)
    # For simulated engines: actual over planned lengths of outputs.
    length_factor: Annotated[NotNan, Field(gt=0)] | None = None


class RunTable(Section):
    """How the application runs. ``command``, ``environment``, ``max_num_seqs`` and ``sleeps`` apply to all models."""

    launcher: Literal["local", "ray", "static", "simulated"] = "local"
    store: Text | None = None  # the ledger: a file, or ``postgresql://...`` for several coordinators
    command: str = ""
    environment: dict[str, str] = Field(default_factory=dict)
    max_num_seqs: Count = 256
    sleeps: bool = False
    engines: dict[str, Any] = Field(default_factory=dict)  # an ``EngineTable`` by name of the model
    max_attempts: Count = _DEFAULTS.max_attempts
    lease: Seconds = _DEFAULTS.lease_s
    backoff: Seconds = _DEFAULTS.backoff_s
    max_backoff: Seconds = _DEFAULTS.max_backoff_s
    save: Seconds = _DEFAULTS.save_s
    linger: Wait = _DEFAULTS.linger_s
    engine_failures: Count = _DEFAULTS.engine_failures
    max_engine_failures: Count = _DEFAULTS.max_engine_failures
    seed: Annotated[int, Field(ge=0)] = 0
    replans: Annotated[int, Field(ge=0)] = _DEFAULTS.replans  # largest number of times that the rest is planned again
    ready: Seconds = 600.0
    stall: Seconds = 120.0
    request: Seconds = 3600.0


class AppTables(Section):
    """All tables of the file. Each model, call, loop and engine is validated later, on its own."""

    name: str = ""
    inputs: InputsSection
    models: dict[str, Any] = Field(default_factory=dict)
    calls: dict[str, Any] = Field(default_factory=dict)
    loops: dict[str, Any] = Field(default_factory=dict)
    cluster: ClusterSection | None = None
    run: RunTable = Field(default_factory=RunTable)
