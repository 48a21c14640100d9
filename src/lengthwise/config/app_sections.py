"""The tables of an application's file, one class each, and the nodes of its cluster."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from lengthwise import catalog
from lengthwise.apps.app import DEFAULT_TOKENS
from lengthwise.apps.plan import SwitchRates
from lengthwise.apps.run.job import Settings
from lengthwise.config.files import resolved
from lengthwise.config.sections import EngineSection
from lengthwise.config.values import Count, Length, NotNan, Seconds, Section, Text, Wait
from lengthwise.schema.app import Cluster, Machine
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.specs import GpuSpec, NodeSpec

LAUNCHERS = ("local", "ray", "static", "simulated")
_Chance = Annotated[NotNan, Field(ge=0, le=1)]
_DEFAULTS = Settings()


class InputsSection(Section):
    """The rows: a ``file`` whose field ``id`` identifies them, or an ``openai_batch``.

    ``rows``: the number of rows to take from the start of the file.
    """

    file: Text | None = None
    id: Text | None = None
    rows: Count | None = None
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
    """Observed lengths: a column of a file, ``weights`` the column with the frequency of each."""

    file: Text
    column: Text
    weights: Text | None = None


class LengthSection(Section):
    """A distribution, under a key that makes problems name its kind."""

    output: Length


class MessageSection(Section):
    """One of several messages."""

    role: Text
    content: str


class CallSection(Section):
    """A prompt for a model, for several, or for the one named by a field of the row."""

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
    most: Count | None = None
    expected: Annotated[NotNan, Field(gt=0)] | None = None
    when: str = ""
    when_share: _Chance = 1.0
    prompt_tokens: str = ""
    known_tokens: str = ""
    longest_tokens: str = ""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.model is None) is (self.model_from is None):
            raise ValueError("give one of: model, model_from")
        if (self.prompt is None) is (self.messages is None):
            raise ValueError("give one of: prompt, messages")
        return self


class LoopSection(Section):
    """Calls that are repeated."""

    calls: list[str]
    most: Count
    until: str = ""
    until_share: _Chance = 0.0


class ClusterSection(Section):
    """The GPUs: nodes as ``parse_node`` reads them.

    ``engine_start``: how long an engine takes to start, without reading its weights, where no profile has measured it.
    """

    nodes: Annotated[list[Text], Field(min_length=1)]
    engine_start: Seconds = SwitchRates().engine_start_s


class EngineTable(Section):
    """How engines of a model are started and called; other settings are those of [run].

    ``true_lengths``: for simulated engines, the ratio of the length of answers to the planned ``lengths``.
    """

    command: str | None = None
    environment: dict[str, str] | None = None
    served: str = ""
    max_num_seqs: Count | None = None
    sleeps: bool | None = None
    urls: list[Text] = Field(default_factory=list)
    body: dict[str, Any] = Field(default_factory=dict)
    true_lengths: Annotated[NotNan, Field(gt=0)] | None = None


class RunTable(Section):
    """How the application runs. ``command``, ``environment``, ``max_num_seqs`` and ``sleeps`` apply to all models.

    [run.engines.NAME] replaces them for one model, and gives the addresses of engines that are running already
    (``urls``). ``store``: the place of the ledger, if it is not in the folder of the run: a file, or
    ``postgresql://...`` for several coordinators (extra ``postgres``).
    ``replans``: how often at most the rest is planned again when lengths or times differ from the plan; 0: never.
    """

    launcher: Literal["local", "ray", "static", "simulated"] = "local"
    store: Text | None = None
    command: str = ""
    environment: dict[str, str] = Field(default_factory=dict)
    max_num_seqs: Count = 256
    sleeps: bool = False
    engines: dict[str, Any] = Field(default_factory=dict)
    max_attempts: Count = _DEFAULTS.max_attempts
    lease: Seconds = _DEFAULTS.lease_s
    backoff: Seconds = _DEFAULTS.backoff_s
    max_backoff: Seconds = _DEFAULTS.max_backoff_s
    save: Seconds = _DEFAULTS.save_s
    linger: Wait = _DEFAULTS.linger_s
    engine_failures: Count = _DEFAULTS.engine_failures
    max_engine_failures: Count = _DEFAULTS.max_engine_failures
    seed: Annotated[int, Field(ge=0)] = 0
    replans: Annotated[int, Field(ge=0)] = _DEFAULTS.replans
    ready: Seconds = 600.0
    stall: Seconds = 120.0
    request: Seconds = 3600.0


class AppTables(Section):
    """The complete file; models, calls, loops and engines are validated one by one, under their names."""

    name: str = ""
    inputs: InputsSection
    models: dict[str, Any] = Field(default_factory=dict)
    calls: dict[str, Any] = Field(default_factory=dict)
    loops: dict[str, Any] = Field(default_factory=dict)
    cluster: ClusterSection | None = None
    run: RunTable = Field(default_factory=RunTable)


PAIRS = "pairs"
_COUNTED = re.compile(r"(\d+)\s*[xX]\s*([^@]+?)\s*(?:@\s*(.+))?\Z")


def parse_node(text: str, folder: Path | str = ".") -> Machine:
    """Return the machine that a text describes.

    Args:
        text: GPUs by number and name, after "@" their links: "pairs", a node of the catalog or its file; without,
            the usual node of these GPUs. Or a node of the catalog that has GPUs of one kind.
        folder: Where paths of files start.

    Raises:
        InputError: A name is unknown, or the node has fewer GPUs.
    """

    def file_or_name(name: str) -> str:
        return str(resolved(name, Path(folder))) if name.endswith(".toml") else name

    if not (found := _COUNTED.match(text.strip())):
        try:
            node = catalog.node(file_or_name(text.strip()))
        except UnknownNameError as error:
            raise UnknownNameError("node", text, error.known) from error
        kinds = [gpu for gpu in catalog.gpus().values() if catalog.default_node(gpu, node.gpus).name == node.name]
        if len(kinds) != 1:
            ways = " or ".join(f"{node.gpus}x{gpu.name}@{node.name}" for gpu in kinds)
            raise InputError(f"{text} does not say which GPUs it has; write {ways or f'{node.gpus}xGPU@{node.name}'}")
        return Machine(kinds[0], node, node.gpus)
    gpus, name, links = int(found[1]), found[2], found[3]
    _require_one_memory_size(name, found[1], text)
    gpu = catalog.gpu(file_or_name(name))
    if gpus < 1:
        raise InputError(
            'a node must have at least 1 GPU; write a number of GPUs ("8xA100-80GB", with "@pairs" where fast links '
            'join pairs, "@NODE" in a node of the catalog or of a .toml file), or a node of the catalog'
        )
    if links == PAIRS:
        node = _node_of_pairs(gpu, gpus)
    else:
        node = catalog.default_node(gpu, gpus) if links is None else catalog.node(file_or_name(links))
    if gpus > node.gpus:
        raise InputError(
            f"a node {node.name} has at most {node.gpus} GPUs, not {gpus}; list several nodes, or name another after @"
        )
    return Machine(gpu, node, gpus)


def parse_cluster(nodes: Sequence[str], folder: Path | str = ".") -> Cluster:
    """Return all GPUs of these nodes; raise as ``parse_node`` does."""
    return Cluster(tuple(parse_node(text, folder) for text in nodes))


def _require_one_memory_size(name: str, count: str, text: str) -> None:
    """Raise InputError if a GPU comes with several memory sizes and the name has none: the size decides what fits."""
    known = catalog.gpus()
    sizes = [one for one in known if one.lower().startswith(f"{name.lower()}-")]
    if name.lower() not in map(str.lower, known) and len({known[one].memory_bytes for one in sizes}) > 1:
        shown = ", ".join(f"{count}x{one}" for one in sizes)
        raise InputError(f"{text} must say which {name} it means, since they differ in memory: {shown}")


def _node_of_pairs(gpu: GpuSpec, gpus: int) -> NodeSpec:
    """Return the GPU's node whose fast links join pairs, with at least this many GPUs."""
    family = gpu.name.split("-")[0].lower()
    paired = [node for node in catalog.nodes().values() if node.link_group == 2]
    own = sorted((one for one in paired if one.name.split("-")[0] == family), key=lambda one: one.gpus)
    if not own:
        raise InputError(
            f"no node of the catalog joins {gpu.name} in pairs; {', '.join(one.name for one in paired)} do so with "
            "theirs. Name one of these after @, or a .toml file"
        )
    usual = next((one for one in own if one.gpus >= gpus), own[-1])
    return replace(usual, gpus=max(gpus, usual.gpus))
