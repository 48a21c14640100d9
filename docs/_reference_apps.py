"""The keys of an application's file, and what applications are built of in Python: from the tables and classes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from lengthwise import apps
from lengthwise.apps.app import App, Call, Fan, From, Loop, Model, Report, Sampling
from lengthwise.apps.inputs import Rows
from lengthwise.apps.launch.local import EngineConfig, EngineTimeouts
from lengthwise.apps.run.job import Settings
from lengthwise.config import app_sections as sections

TABLES = {
    "inputs": (sections.InputsSection, ()),
    "models.NAME": (sections.ModelSection, (Model,)),
    "calls.NAME": (sections.CallSection, (Call, Sampling, Fan, Report)),
    "loops.NAME": (sections.LoopSection, (Loop,)),
    "cluster": (sections.ClusterSection, ()),
    "run": (sections.RunTable, (Settings, EngineTimeouts, EngineConfig)),
    "run.engines.NAME": (sections.EngineTable, (EngineConfig,)),
}
OTHERWISE = {
    "inputs.file": "Rows: .jsonl, .csv or .parquet.",
    "inputs.id": "The field that tells rows apart; left out, they are numbered.",
    "inputs.rows": "Only the first so many rows.",
    "inputs.openai_batch": "A batch file of OpenAI's in place of rows and calls.",
    "models.NAME.model": "Catalog name or `config.json`, for planning; left out, NAME.",
    "models.NAME.lengths": "Its output lengths: a distribution, a number, or `{ file, column, weights }`; left out, every "
    "output is as long as it may be.",
    "models.NAME.weight_dtype": "Of its weights; left out, as the model's configuration has it.",
    "models.NAME.kv_dtype": "Of its KV cache; left out, as the weights.",
    "models.NAME.engine": "The engine's knobs: keys of a scenario's `[engine]`.",
    "calls.NAME.model": "Who is asked; a list: each of them, and children see a mapping by name.",
    "calls.NAME.model_from": "The field of the row that names the model.",
    "calls.NAME.messages": "Instead of `prompt`: `[{ role, content }]`, a template each.",
    "calls.NAME.known_tokens": "The field of the row that tells the output's length, where it is known beforehand.",
    "calls.NAME.longest_tokens": "The field of the row that tells the longest output.",
    "calls.NAME.prompt_tokens": "The field of the row that tells the prompt's length, without what other calls put into it.",
    "cluster.nodes": 'GPUs: `"8xA100-80GB"`, with `@pairs` where fast links join pairs, `@NODE` in a node of the catalog or '
    "of a .toml file; or a node of the catalog.",
    "cluster.engine_start": "How long an engine takes to start, without reading its weights, where no profile tells it.",
    "run.launcher": "Who makes engines be there: processes here, Ray, addresses (`urls`), or nobody (virtual time).",
    "run.store": "The ledger: a file, or `postgresql://...` for several coordinators; left out, in the run's folder.",
    "run.engines": "What differs for one model, by its name.",
    "run.lease": "A lease that is not prolonged for so long is given to others.",
    "run.seed": "Of what is left to chance.",
    "run.engines.NAME.true_lengths": "Of simulated engines: answers are so many times as long as the lengths planned with.",
    "run.engines.NAME.urls": "Addresses of engines that run already, a replica each.",
}
_SECONDS = {"ready": "ready_s", "stall": "stall_s", "request": "request_s", "backoff": "backoff_s", "save": "save_s",
            "max_backoff": "max_backoff_s", "linger": "linger_s"}  # fmt: skip
_ATTRIBUTE = re.compile(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", re.MULTILINE | re.DOTALL)


def keys(type_of: Callable[[Any], str], default_of: Callable[[Any], str]) -> str:
    """A heading and a table of keys for each table of an application's file."""
    out = []
    for name, (table, told) in TABLES.items():
        out += [f"### `[{name}]` of an application", "", _message(table), ""]
        out += ["| key | takes | default | what it is |", "|---|---|---|---|"]
        meanings: dict[str, str] = {}
        for one in reversed(told):
            meanings |= _meanings(one)
        for key, field in table.model_fields.items():
            meaning = OTHERWISE.get(f"{name}.{key}") or meanings.get(_SECONDS.get(key, key), "")
            takes = type_of(field)
            usual = "" if takes == "table" else default_of(field).replace("``", "").replace("`[]`", "")
            out.append(f"| `{key}` | {takes} | {usual} | {meaning} |")
        out.append("")
    return "\n".join(out)


def python() -> str:
    """What ``lengthwise.apps`` opens on, with the fields of each."""
    out = ["| name | what it is |", "|---|---|"]
    for one in (App, Model, Call, Sampling, Fan, Loop, From, Report, Rows):
        fields = ", ".join(inspect.signature(one).parameters)
        out.append(f"| `{one.__name__}({fields})` | {_message(one).partition('. ')[0].rstrip('.')} |")
    for name in sorted(apps.__all__):
        made = getattr(apps, name)
        if not inspect.isclass(made):
            takes = ", ".join(inspect.signature(made).parameters)
            out.append(f"| `{name}({takes})` | {_message(made).partition('. ')[0].rstrip('.')} |")
    return "\n".join([*out, ""])


def _message(one: Any) -> str:
    said = (inspect.getdoc(one) or "").partition("\nAttributes:")[0]
    return " ".join(said.split()).replace("``", "`").replace("|", "/")


def _meanings(report: Any) -> dict[str, str]:
    text = (inspect.getdoc(report) or "").partition("Attributes:\n")[2]
    found = {name: " ".join(what.split()) for name, what in _ATTRIBUTE.findall(text + "\n")}
    return {name: what.replace("``", "`").replace("|", "/") for name, what in found.items()}
