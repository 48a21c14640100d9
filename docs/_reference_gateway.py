"""The keys of a gateway's file: names and types from the tables that check them, meanings from what they become."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from lengthwise.config import gateway as sections
from lengthwise.gateway import config

TABLES = {
    "listen": (sections.ListenSection, config.Listen),
    "[engines]": (sections.EngineSection, config.Engine),
    "discovery": (sections.DiscoverySection, config.Discovery),
    "order": (sections.OrderSection, config.Order),
    "admission": (sections.AdmissionSection, config.Admission),
    "dispatch": (sections.DispatchSection, config.Dispatch),
    "dispatch.phases": (sections.PhasesSection, config.Phases),
    "prediction": (sections.ForecastingSection, config.Forecasting),
    "[keys]": (sections.KeySection, config.Key),
    "limits": (sections.LimitsSection, config.Limits),
    "resilience": (sections.CareSection, config.ResilienceConfig),
}
OTHERWISE = {
    "admin_port": "For `/metrics` and the admin page; 0 picks a free one.",
    "proxies": "Addresses of proxies before the gateway, with commas, whose X-Forwarded-For is believed: whom "
    'wrong keys are counted against. "*" all.',
    "journal": "File to which a line is written for every request that is over; no prompts.",
    "trace": "OTLP/HTTP address of an OpenTelemetry collector.",
    "kind": "Whose engine it is; `auto` asks it.",
    "in_flight": "A fixed cap on requests sent to it, in every mode; left out, the gateway finds it (none where the engine "
    "orders).",
    "api_url": "Address of the Kubernetes API; left out, as a pod finds it.",
    "mode": "How requests are ordered; `observe` orders nothing.",
    "rank": "A rank policy; left out, the mode's own: `srtf` for srtf, isrtf and windowed, else `fcfs`.",
    "max_queued": "Most requests that wait; 429 beyond it.",
    "max_queued_bytes": "Most bytes of their bodies as they came; 429 beyond it.",
    "least": "Below it no adapting cap falls.",
    "most": "Above it none rises: an engine that runs more at once needs a larger one, or `in_flight`.",
    "statistic": "Which number of the predicted distribution orders.",
    "models": "What it may ask for; left out, all.",
    "api_key_env": "The variable that holds what the gateway shows the engine.",
    "api_key_file": "The file that holds it.",
    "sha256_env": "The variable that holds the digest.",
    "key_file": "A file of lines `tenant:sha256`; instead of `tenant` and `sha256`.",
    "body_bytes": "Longest body.",
    "depth": "Deepest nesting of its JSON.",
    "n": "Most outputs of a request; 400 beyond it.",
    "max_tokens": "Longest output that may be asked for.",
    "header_bytes": "Longest head.",
    "headers": "Most header fields.",
    "connections": "Most connections of clients; 503 beyond it.",
    "body_s": "Longest time for a request to come, and in which nothing of an answer is taken.",
    "idle_s": "How long a connection is kept that asks nothing; longer than clients and proxies before it keep theirs.",
    "messages": "Most messages of a chat, and prompts of a request.",
    "concurrency": "Most requests of it that are in at the same time, waiting or answered; 429 beyond it. Left out, any "
    "number.",
    "body_budget_bytes": "What all bodies that are being read, and requests until a streamed answer has begun, another has "
    "ended, hold in memory, 2 to 10 times their bodies; 503 beyond it. One key, or address where there are none, has a quarter; 429 beyond that.",
    "values": "Most values in a body's JSON, such as token ids of its prompt; 400 beyond it.",
}
"""What stands at no attribute."""
_ATTRIBUTE = re.compile(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", re.MULTILINE | re.DOTALL)


def keys(type_of: Callable[[Any], str], default_of: Callable[[Any], str]) -> str:
    """A heading and a table of keys for each table of a gateway's file."""
    out = []
    for name, (table, told) in TABLES.items():
        meanings = _meanings(told)
        out += [f"### `[{name}]` of a gateway", "", _message(table), ""]
        out += ["| key | takes | default | what it is |", "|---|---|---|---|"]
        for key, field in table.model_fields.items():
            meaning = OTHERWISE.get(key) or meanings.get(key) or ""
            takes = "list of texts" if key == "models" else type_of(field)
            usual = "" if takes == "table" else default_of(field).replace("``", "")
            out.append(f"| `{key}` | {takes} | {usual} | {meaning} |")
        out.append("")
    return "\n".join(out)


def _message(table: Any) -> str:
    return " ".join((inspect.getdoc(table) or "").split()).replace("``", "`")


def _meanings(report: Any) -> dict[str, str]:
    text = (inspect.getdoc(report) or "").partition("Attributes:\n")[2]
    found = {name: " ".join(what.split()) for name, what in _ATTRIBUTE.findall(text + "\n")}
    return {name: what.replace("``", "`").replace("|", "/") for name, what in found.items()}
