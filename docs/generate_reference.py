"""Write the generated parts of docs/reference.md: python docs/generate_reference.py [--check].

The text between ``<!-- generated: NAME -->`` and ``<!-- end -->`` comes from the code: the keys of files from the
sections that validate them, policies from their contracts, the command line from its help. The rest is handwritten.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from typer.testing import CliRunner

from lengthwise import apps, policy
from lengthwise.apps.app import App, Call, Fan, From, LengthFields, Loop, Model, Sampling
from lengthwise.apps.inputs import Rows
from lengthwise.apps.launch.local import EngineConfig, EngineTimeouts
from lengthwise.apps.run.job import Settings
from lengthwise.cli import program
from lengthwise.config import app_sections, sections, values
from lengthwise.config import gateway as gateway_sections
from lengthwise.config import scenario as _canonical
from lengthwise.cost.roofline_tables import ENGINE_HOSTS
from lengthwise.gateway import config as gateway_config
from lengthwise.policy import contracts
from lengthwise.usecases import variants

PAGE = Path(__file__).parent / "reference.md"
EXAMPLE = Path(__file__).parents[1] / "examples" / "reference.toml"
COMMANDS = """
simulate; capacity; search; speculation; kv; lab; schedule; schedule run; schedule watch; app; app plan; app profile;
app run; app status; app cancel; serve; explain; catalog; predict train; predict eval; predict show; predict serve;
predict collect; workload show; bench; calibrate; compare; profile run; profile import aiconfigurator; profile check;
profile import llmservingsim; profile import vidur; profile show; profile fit
"""
"""Commands with their help on the page, after that of lengthwise itself."""
SCENARIO_TABLES = {
    "workload": sections.WorkloadSection,
    "workload.sessions": sections.SessionsTable,
    "workload.groups": sections.GroupsTable,
    "workload.tools": sections.ToolsTable,
    "deployment": sections.DeploymentSection,
    "deployment.decode": sections.DecodeSection,
    "deployment.speculation": sections.SpeculationTable,
    "engine": sections.EngineSection,
    "engine.kv_offloading": sections.KVOffloadingTable,
    "engine.kv_offloading.storage": sections.KVStorageTable,
    "scheduler": sections.SchedulerSection,
    "scheduler.sglang": sections.SglangTable,
    "scheduler.trtllm": sections.TrtllmTable,
    "predictor": sections.PredictorSection,
    "slo": sections.SloSection,
    "run": sections.RunSection,
    "search": sections.SearchSection,
    "lab": sections.LabSection,
    "schedule": sections.ScheduleSection,
}
APP_TABLES = {
    "inputs": (app_sections.InputsSection, ()),
    "models.NAME": (app_sections.ModelSection, (Model,)),
    "calls.NAME": (app_sections.CallSection, (Call, Sampling, Fan, LengthFields)),
    "loops.NAME": (app_sections.LoopSection, (Loop,)),
    "cluster": (app_sections.ClusterSection, ()),
    "run": (app_sections.RunTable, (Settings, EngineTimeouts, EngineConfig)),
    "run.engines.NAME": (app_sections.EngineTable, (EngineConfig,)),
}
GATEWAY_TABLES = {
    "listen": (gateway_sections.ListenSection, (gateway_config.Listen,)),
    "[listen.admins]": (gateway_sections.AdminSection, (gateway_config.AdminUser,)),
    "[engines]": (gateway_sections.EngineSection, (gateway_config.Engine,)),
    "engine_tls": (gateway_sections.EngineTlsSection, (gateway_config.Tls,)),
    "discovery": (gateway_sections.DiscoverySection, (gateway_config.Discovery,)),
    "order": (gateway_sections.OrderSection, (gateway_config.Order,)),
    "admission": (gateway_sections.AdmissionSection, (gateway_config.Admission,)),
    "dispatch": (gateway_sections.DispatchSection, (gateway_config.Dispatch,)),
    "dispatch.phases": (gateway_sections.PhasesSection, (gateway_config.Phases,)),
    "prediction": (gateway_sections.PredictionSection, (gateway_config.PredictionConfig,)),
    "[keys]": (gateway_sections.KeySection, (gateway_config.Key,)),
    "tenants": (gateway_sections.TenantsSection, (gateway_config.TenantsConfig,)),
    "shared_queue": (gateway_sections.SharedQueueSection, (gateway_config.SharedQueueConfig,)),
    "oidc": (gateway_sections.OidcSection, (gateway_config.Oidc,)),
    "external_auth": (gateway_sections.ExternalAuthSection, (gateway_config.ExternalAuth,)),
    "[slo_classes]": (gateway_sections.SloClassSection, (gateway_config.SloClass,)),
    "limits": (gateway_sections.LimitsSection, (gateway_config.Limits,)),
    "resilience": (gateway_sections.ResilienceSection, (gateway_config.ResilienceConfig,)),
    "envoy": (gateway_sections.EnvoySection, (gateway_config.Envoy,)),
}
APP_MEANINGS = {
    "inputs.file": "Input rows: .jsonl, .csv or .parquet.",
    "inputs.id": "Field that identifies a row; without it, rows are numbered.",
    "inputs.rows": "Use only the first rows.",
    "inputs.openai_batch": "OpenAI batch file instead of rows and calls.",
    "models.NAME.model": "Catalog name or `config.json` for planning; default NAME.",
    "models.NAME.lengths": "Output lengths: a distribution, a number, or `{ file, column, weights }`; default: the maximum length.",
    "models.NAME.weight_dtype": "Data type of the weights; default: the model's configuration.",
    "models.NAME.kv_dtype": "Data type of the KV cache; default: that of the weights.",
    "models.NAME.engine": "Engine settings: keys of `[engine]` in a scenario.",
    "calls.NAME.model": "Model of the call; a list calls each model, and dependent calls see a mapping by name.",
    "calls.NAME.model_from": "Field of the row that names the model.",
    "calls.NAME.messages": "Instead of `prompt`: `[{ role, content }]`, each a template.",
    "calls.NAME.known_tokens": "Field of the row with the output length, if it is known in advance.",
    "calls.NAME.max_tokens_field": "Field of the row with the maximum output length.",
    "calls.NAME.prompt_tokens": "Field of the row with the prompt length, without text from other calls.",
    "cluster.nodes": 'GPUs: `"8xA100-80GB"`, with `@pairs` if NVLink joins pairs, `@NODE` for a node of the catalog or of a .toml file; '
    "or a node of the catalog.",
    "cluster.engine_start": "Time to start an engine without loading its weights, if no profile has it.",
    "run.launcher": "What starts engines: local processes, Ray, existing addresses (`urls`), or the simulator (virtual time).",
    "run.store": "Ledger: a file, or `postgresql://...` for several coordinators; default: a file in the run folder.",
    "run.engines": "Settings for one model, by its name.",
    "run.lease": "A lease that is not renewed for this long goes to another coordinator.",
    "run.seed": "Random seed.",
    "run.engines.NAME.length_factor": "Simulated engines: factor between true and planned output lengths.",
    "run.engines.NAME.urls": "Addresses of running engines, one per replica.",
}
GATEWAY_MEANINGS = {
    "admin_port": "Port of `/metrics` and the admin page; 0 picks a free port.",
    "proxies": 'Trusted proxies (comma-separated addresses) whose X-Forwarded-For counts; "*" trusts all.',
    "journal": "File that gets one line per request that has ended, without prompts.",
    "trace": "OTLP/HTTP address of an OpenTelemetry collector.",
    "kind": "Engine kind; `auto` detects it.",
    "concurrency": "Maximum concurrent requests. Of an engine: by default the gateway finds it (no limit if the engine orders requests). "
    "Of a key: waiting or running, 429 above it; by default unlimited.",
    "api_url": "Address of the Kubernetes API; default: that of the pod's cluster.",
    "mode": "Ordering mode; `observe` changes no order.",
    "rank": "Rank policy; default: `srtf` for srtf, isrtf and windowed, `completed_batches` for bins, else `fcfs`.",
    "max_queued": "Maximum waiting requests; 429 above it.",
    "max_queued_bytes": "Maximum bytes of waiting request bodies; 429 above it.",
    "min_concurrency": "Lower bound of adaptive concurrency limits.",
    "max_concurrency": "Upper bound of adaptive concurrency limits; an engine that runs more needs a larger value, or `concurrency`.",
    "statistic": "Statistic of the predicted distribution that orders requests.",
    "models": "Models that the key may use; default: all.",
    "api_key_env": "Environment variable with the key that the gateway sends to the engine.",
    "api_key_file": "File with that key.",
    "sha256_env": "Environment variable with the digest.",
    "sha256_file": "File with the digest.",
    "store_env": "Environment variable with the store, such as a URL with a password.",
    "url_env": "Environment variable with the URL, which may have a password.",
    "store_file": "File with the store, such as a URL with a password.",
    "admin_sha256_env": "Environment variable with that digest.",
    "admin_sha256_file": "File with that digest.",
    "key_file": "File with lines `tenant:sha256`, instead of `tenant` and `sha256`.",
    "body_bytes": "Maximum body size.",
    "depth": "Maximum nesting of the JSON.",
    "n": "Maximum outputs for each prompt (`n` or `best_of`); 400 above it.",
    "max_tokens": "Maximum output length of a request.",
    "header_bytes": "Maximum size of the request head.",
    "headers": "Maximum number of header fields.",
    "connections": "Maximum client connections; 503 above it.",
    "body_s": "Maximum time to receive a request, and maximum time in which a client reads nothing of a response.",
    "idle_s": "Keep-alive time of an idle connection; it should exceed that of clients and proxies.",
    "messages": "Maximum messages of a chat and prompts of a request.",
    "body_budget_bytes": "Memory budget of all request bodies, which take 2 to 10 times their size; 503 above it. One key (or address) may use a "
    "quarter; 429 above that.",
    "values": "Maximum values in the JSON of a body, for example token ids of a prompt; 400 above it.",
}
_SECONDS = {key: f"{key}_s" for key in ("ready", "stall", "request", "backoff", "max_backoff", "save", "linger")}
_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "",
          values.DelayTable: "duration, or `median` and `sigma`", **dict.fromkeys(values.LENGTHS.values(), "a distribution or a number")}  # fmt: skip
_BLOCK = re.compile(r"(<!-- generated: ([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _keys(tables: Mapping[str, tuple[Any, tuple[Any, ...]]], meanings: Mapping[str, str], owner: str) -> str:
    """Return a table of keys for each table of a gateway's or an application's file."""
    out = []
    for name, (table, described_by) in tables.items():
        head = ["| key | type | default | meaning |", "|---|---|---|---|"]
        out += [f"### `[{name}]` of {owner}", "", _summary(table), "", *head]
        attributes: dict[str, str] = {}
        for described in reversed(described_by):
            attributes |= _attributes(described)
        for key, field in table.model_fields.items():
            meaning = meanings.get(f"{name}.{key}") or (meanings.get(key) if owner == "a gateway" else None)
            kind = "list of texts" if owner == "a gateway" and key in ("models", "media_hosts") else _type(field)
            default = "" if kind == "table" else _default(field).replace("``", "").replace("`[]`", "")
            out.append(f"| `{key}` | {kind} | {default} | {meaning or attributes.get(_SECONDS.get(key, key), '')} |")
        out.append("")
    return "\n".join(out)


def app_python() -> str:
    """Return a table of the names in ``lengthwise.apps`` with their fields or parameters."""
    out = ["| name | meaning |", "|---|---|"]
    functions = [made for name in sorted(apps.__all__) if not inspect.isclass(made := getattr(apps, name))]
    for made in (App, Model, Call, Sampling, Fan, Loop, From, LengthFields, Rows, *functions):
        parameters = ", ".join(inspect.signature(made).parameters)
        out.append(f"| `{made.__name__}({parameters})` | {_summary(made).partition('. ')[0].rstrip('.')} |")
    return "\n".join([*out, ""])


def _summary(described: Any) -> str:
    return " ".join((inspect.getdoc(described) or "").split()).replace("``", "`").replace("|", "/")


def _attributes(described: Any) -> dict[str, str]:
    """Return the meanings of fields, from the comments beside them."""
    comments = {name: text for name, text in _comments(described).items() if text}
    return {name: f"{text[0].upper()}{text[1:].rstrip('.')}." for name, text in comments.items()}


def kinds() -> str:
    """Return the kinds of length distributions and arrival processes, with their keys."""
    out = []
    for title, known in (("length (prompt, output)", values.LENGTHS), ("arrivals", values.ARRIVALS)):
        out += [f"| kind of {title} | keys | meaning |", "|---|---|---|"]
        for name, table in known.items():
            keys = ", ".join(f"`{key}`" for key in table.model_fields if key != "kind")
            out.append(f"| `{name}` | {keys} | {(inspect.getdoc(table) or '').split(chr(10))[0].replace('``', '`')} |")
        out.append("")
    return "\n".join(out)


def policy_arguments() -> str:
    """Return the arguments and the result of a policy, by axis."""
    out = []
    for axis, arguments in contracts.ARGUMENTS.items():
        takes = ", ".join(f"`{name}`" for name in arguments)
        text = " ".join((inspect.getdoc(getattr(policy, axis)) or "").removeprefix("Decorator: ").split())
        out.append(f"**{axis}** ({'also preemption; ' if axis == 'rank' else ''}takes {takes}): {text}\n")
    return "\n".join(out).replace("``", "`")


def hosts() -> str:
    """Return what the host of each named engine adds to a step."""
    rows = [f"| `{name}` | {1e6 * one.step_s:.0f} | {1e6 * one.sequence_s:.1f} | {1e6 * one.launch_s:.0f} |"
            for name, one in ENGINE_HOSTS.items()]  # fmt: skip
    head = ["| `host =` | us per step | us per sequence | us per kernel without a CUDA graph |", "|---|---|---|---|"]
    return "\n".join([*head, *rows, ""])


def policies() -> str:
    """Return every built-in policy and named scheduler."""
    ways = [("binning", f"{name}(k)", text) for name, text in variants.BINNING_RULES.items()]
    rows = [f"| {axis} | `{name}` | {text.replace('``', '`')} |" for axis, name, text in policy.catalog() + ways]
    return "\n".join(["| axis | name | effect |", "|---|---|---|", *rows, ""])


def command_line() -> str:
    """Return the help of every command."""
    out = []
    for command in ["", *(command.strip() for command in COMMANDS.split(";"))]:
        runner = CliRunner(env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
        shown = runner.invoke(program.app, [*command.split(), "--help"], prog_name="lengthwise")
        text = "\n".join(line.rstrip() for line in shown.output.strip().splitlines())
        out.append(f"```text\n{text}\n```\n")
    return "\n".join(out)


PARTS: dict[str, Callable[[], str]] = {
    "scenario-keys": lambda: "\n".join(_section(name, table) for name, table in SCENARIO_TABLES.items()),
    "gateway-keys": partial(_keys, GATEWAY_TABLES, GATEWAY_MEANINGS, "a gateway"),
    "app-keys": partial(_keys, APP_TABLES, APP_MEANINGS, "an application"),
    "app-python": app_python,
    "kinds": kinds,
    "policy-arguments": policy_arguments,
    "policies": policies,
    "hosts": hosts,
    "command-line": command_line,
}


def generated(text: str) -> str:
    """Return the page with regenerated parts."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{PARTS[found[2]]()}\n{found[3]}", text)


def _section(name: str, table: Any) -> str:
    """Return a heading, the description and a table of keys of a table of a scenario file."""
    text = (inspect.getdoc(table) or "").replace("``", "`")
    meanings = _example_comments(name) | {key: text for key, text in _comments(table).items() if text}
    rows = [f"| `{key}` | {_type(field)} | {_default(field)} | {meanings.get(key, '')} | {_spellings(name, key)} |"
            for key, field in table.model_fields.items()]  # fmt: skip
    return "\n".join([f"### `[{name}]`", "", text, "", "| key | type | default | meaning | also |",
                      "|---|---|---|---|---|", *rows, ""])  # fmt: skip


def _example_comments(section: str) -> dict[str, str]:
    """Return the comment of each key of a table in the example of all keys, without the other spellings."""
    text = re.split(rf"^\[{section}\]", EXAMPLE.read_text("utf-8"), flags=re.MULTILINE)[-1].split("\n[")[0]
    pattern = r"^(?:#: )?(\w+) = .*?  # (?:also [\w, ]+(?:[:;] |$))?(.*)$"
    return dict(reversed(re.findall(pattern, text, flags=re.MULTILINE)))


def _comments(table: Any) -> dict[str, str]:
    """Return the comment of each field: at its end, or in the lines directly above it."""
    lines = textwrap.dedent(inspect.getsource(table)).splitlines()
    found = {}
    for field in ast.parse("\n".join(lines)).body[0].body:  # type: ignore[attr-defined]
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        assert field.end_lineno is not None
        _, _, text = lines[field.end_lineno - 1][field.end_col_offset :].partition("# ")
        above = field.lineno - 2
        while not text and above >= 0 and lines[above].strip().startswith("# "):
            above -= 1
        comment = text or " ".join(line.strip().removeprefix("# ") for line in lines[above + 1 : field.lineno - 1])
        found[field.target.id] = comment.replace("``", "`").replace("|", "/").removesuffix("fmt: skip").strip()
    return found


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        made = [one if isinstance(one, str) else getattr(one, "title", str(one)) for one in field.default_factory()]  # type: ignore[call-arg]
        return f"`{', '.join(made)}`" if made else ""
    text = str(field.default)
    return "" if field.default is None else f"`{text.lower() if isinstance(field.default, bool) else text}`"


def _spellings(section: str, key: str) -> str:
    return ", ".join(f"`{other}`" for other, name in _canonical.ALIASES.get(section, {}).items() if name == key)


def _type(field: FieldInfo) -> str:
    is_duration = "function seconds" in repr((field.annotation, field.metadata))
    return "duration" if is_duration else _words(field.annotation)


def _words(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner = get_args(annotation)[0]
        several = get_origin(inner) in {Union, types.UnionType}
        return "a distribution or a number" if several and "Length" in repr(inner) else (
            "a kind, or a table" if several else _words(inner))  # fmt: skip
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if origin in {Union, types.UnionType}:
        return " or ".join(dict.fromkeys(filter(None, (_words(one) for one in get_args(annotation)))))
    return _WORDS.get(annotation, "table")


def main(arguments: list[str]) -> int:
    """Write the page; with --check return 1 if it differs from the code."""
    text = PAGE.read_text(encoding="utf-8")
    if arguments == ["--check"]:
        return int(generated(text) != text)
    PAGE.write_text(generated(text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
