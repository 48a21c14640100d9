"""Scenarios from a file and short options, or from the options alone: model, GPU, rate, workload, tp, limits."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lengthwise.config.scenario import Override, Scenario, load, loads
from lengthwise.schema.errors import InputError

DEFAULT_WORKLOAD, DEFAULT_SEEDS = "chat-1m", 5


def scenario_of(file: Path | str | None, settings: Sequence[Override], **short: str | float | None) -> Scenario:
    """Read and check a scenario, or make one of the short options alone.

    Args:
        file: The path of the scenario file, its text in TOML, or None.
        settings: Settings of other options. They are applied after the short ones.
        short: Values of the command's short options by name (model, gpu or gpus, tp, rate, workload); None: not given.
            They replace those of the file.

    Raises InputError without a file if the model, the GPU or the rate is missing, and ScenarioError for wrong values.
    """
    given = {
        name: f"{value:.15g}" if isinstance(value, float) else str(value)
        for name, value in short.items()
        if value is not None
    }
    workload = given.get("workload", DEFAULT_WORKLOAD)
    if Path(workload).suffix[1:].isalpha() and not Path(workload).exists():
        raise InputError(f"--workload must be a file, a preset, or PROMPT/OUTPUT tokens; there is no file {workload}")
    settings = [*(pair for name, text in given.items() for pair in _set_by(name, text)), *settings]
    if file is not None:
        return load(file, settings) if isinstance(file, Path) else loads(file, overrides=settings)
    is_given = {"--model": "model" in given, "--gpu": "gpu" in given or "gpus" in given}
    is_given["--rate"] = "rate" in given or "rate" not in short or Path(workload).is_file()
    if missing := [option for option, found in is_given.items() if not found]:
        raise InputError(
            f"give a scenario file, or {' and '.join(missing)}: --model llama-3.1-8b --gpu H100 --rate 20. The names "
            "are listed by lengthwise catalog models and lengthwise catalog gpus"
        )
    name = f"{given['model']} on {given.get('gpu') or given['gpus']}"
    about = f"{workload} at {given['rate']} requests/s" if "rate" in given else workload
    lines = [
        f"name = {json.dumps(name)}",
        f"run.seeds = {DEFAULT_SEEDS}",
        "" if Path(workload).is_file() else "workload.request_rate = 1.0",  # a trace has its own times
        "" if "workload" in given else f"workload.preset = {json.dumps(workload)}",
        SEARCH if "gpus" in given else "",
    ]

    def made(tp: str) -> Scenario:
        text = "\n".join([f"description = {json.dumps(about)}", *lines])
        return loads(f"{text}\n{tp}", source="the options", overrides=settings)

    if "gpus" in given or "tp" in given:
        return made("")
    from lengthwise.usecases.variants import smallest_tp

    if (tp := smallest_tp(made(""))) > 1:
        about += f"; tp {tp} is the smallest that fits"
    return made(f"deployment.tp = {tp}")


SEARCH = """[search]
objective = "cost_at_rate"
limits = { "ttft.p90" = "2s", "tbt.p99" = "200ms" }
space = { tp = [1, 2, 4, 8], replicas = "auto" }
"""
"""The search without a file."""


def _set_by(name: str, text: str) -> list[tuple[str, str]]:
    """Return the settings of a short option, each as (option, KEY=VALUE). Paths are absolute, to hold in any folder."""
    is_file = Path(text).is_file()
    value = json.dumps(str(Path(text).absolute())) if is_file else toml_value(text)
    if name == "workload" and (lengths := re.fullmatch(r"(\d+)/(\d+)", text)):
        pairs = [("workload.prompt", lengths[1]), ("workload.output", lengths[2])]
    elif name == "gpus":
        pairs = [("search.space.gpu", json.dumps(text.split(",")))]
    else:
        key = {"rate": "workload.request_rate", "workload": "workload.trace" if is_file else "workload.preset"}
        pairs = [(key.get(name, f"deployment.{name}"), value)]
    return [(f"--{name.removesuffix('s')}", f"{key}={setting}") for key, setting in pairs]


def limits(given: list[str] | None) -> list[Override]:
    """Return the setting of ``--limit``, [] without it. Raises InputError for a text that is not METRIC=BOUND."""
    pairs = []
    for text in given or ():
        metric, equals, bound = (part.strip() for part in text.partition("="))
        if not (metric and equals):
            raise InputError(f"--limit takes METRIC=BOUND, such as ttft.p90=2s; it is {text!r}")
        pairs.append(f"{json.dumps(metric)} = {toml_value(bound)}")
    return [("--limit", f"search.limits={{ {', '.join(pairs)} }}")] if given else []


def assignments(settings: Mapping[str, Any] | None) -> list[str]:
    """Return settings by key as for ``--set``; a text is a value of TOML or a bare word, as there.

    Raises InputError for a key that is no path of keys: ``key=value`` would be read as another setting.
    """
    for key in settings or {}:
        if not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
            raise InputError(f"settings need keys such as deployment.replicas; {key!r} is none")
    return [f"{key}={value if isinstance(value, str) else _toml(value)}" for key, value in (settings or {}).items()]


def _toml(value: Any) -> str:
    """Return a value of JSON as TOML in one line."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{json.dumps(key)} = {_toml(one)}' for key, one in value.items())} }}"
    return f"[{', '.join(map(_toml, value))}]" if isinstance(value, list | tuple) else json.dumps(value)


def columns_by_name(given: list[str] | None) -> dict[str, str]:
    """Return the columns of ``--column`` by our names. Raises InputError for a text that is not NAME=COLUMN."""
    pairs = {}
    for text in given or ():
        name, equals, column = (part.strip() for part in text.partition("="))
        if not (name and equals and column):
            raise InputError(f"--column takes NAME=COLUMN, such as prompt_tokens=input_len; it is {text!r}")
        pairs[name] = column
    return pairs


def columns(given: list[str] | None) -> list[Override]:
    """Return the setting of ``--column``, [] without it. Raises InputError for a text that is not NAME=COLUMN."""
    return [("--column", f"workload.columns={_toml(columns_by_name(given))}")] if given else []


def toml_value(text: str) -> str:
    """Return the text unchanged if it is a number, and otherwise as a TOML string."""
    try:
        float(text)
    except ValueError:
        return json.dumps(text)
    return text
