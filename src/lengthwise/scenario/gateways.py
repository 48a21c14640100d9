"""A gateway's file: TOML or YAML with ``--set`` and secrets by reference, to what a gateway is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lengthwise.gateway.config import GatewayConfig
from lengthwise.scenario._findings import findings
from lengthwise.scenario._gateway_config import config_of
from lengthwise.scenario._gateway_sections import GatewayFile
from lengthwise.scenario._merge import merged
from lengthwise.scenario._problems import Problem, raise_if_any
from lengthwise.scenario._text import Table, assignment, parse, read
from lengthwise.scenario._toml import toml

_WHAT = "gateway"
_SHORT = {"order": "mode", "forecasting": "predictor"}
_NO_SECRETS = {
    "api_key": "a key must not stand in the file; name the variable (api_key_env) or file (api_key_file) that has it",
    "key": "a key must not stand in the file; give its sha256 (lengthwise serve --hash-key prints it), or a key_file",
}


@dataclass(frozen=True)
class GatewaySettings:
    """What a gateway is told, and how it was said.

    Attributes:
        config: For ``gateway.serve``.
        toml: All settings with their defaults, as a file that says the same; no secrets, only where they are.
        source: The file, or "the command line".
    """

    config: GatewayConfig
    toml: str
    source: str


def load_gateway(
    path: Path | str | None = None,
    overrides: Sequence[str] = (),
    engines: Sequence[str] = (),
    options: Mapping[str, str] | None = None,
) -> GatewaySettings:
    """The settings of a file, every key and value checked.

    Args:
        path: A TOML or YAML file; relative paths inside it start at its folder. None: there is none.
        overrides: Assignments such as ``"order.mode=fcfs"``, later ones winning.
        engines: Addresses of engines besides those of the file.
        options: Settings of which the first override stems from an option of the command, and the option, so that
            messages can name it.

    Raises:
        ScenarioError: A key or a value cannot be used; the message lists all of them.
    """
    if path is None:
        return _checked({}, "the command line", Path(), overrides, engines, options)
    path = Path(path)
    return _checked(read(path, _WHAT), str(path), path.parent, overrides, engines, options)


def loads_gateway(
    text: str, *, suffix: str = ".toml", folder: Path | str = ".", overrides: Sequence[str] = ()
) -> GatewaySettings:
    """The settings of a text; raises as ``load_gateway`` does."""
    return _checked(parse(text, suffix, _WHAT, _WHAT), _WHAT, Path(folder), overrides, ())


def gateway_reader(
    path: Path | str, overrides: Sequence[str] = (), engines: Sequence[str] = ()
) -> Callable[[], GatewayConfig]:
    """What reads the same file again, files of keys too."""
    return lambda: load_gateway(path, overrides, engines).config


def _checked(
    raw: Table,
    source: str,
    folder: Path,
    overrides: Sequence[str],
    engines: Sequence[str],
    options: Mapping[str, str] | None = None,
) -> GatewaySettings:
    settings, paths = _spelled(raw), []
    for text in overrides:
        keys, value = assignment(text, "order.mode=fcfs")
        for key in reversed(keys):
            value = {key: value}
        over = _spelled(value)
        paths.append(tuple(key.replace("-", "_") for key in keys))
        settings = merged(settings, over)
    stem = {tuple(key.split(".")): option for key, option in (options or {}).items()}
    stem = {
        path: option for path, option in stem.items() if paths.count(path) == 1
    }  # else --set had the last word
    settings, problems = _without_secrets(_with_engines(settings, engines))
    file, found = _validated(settings)
    problems += found
    raise_if_any(problems, source, paths, stem)
    assert file is not None  # no problems, so it was built
    config, problems = config_of(file, folder)
    raise_if_any(problems, source, paths, stem)
    assert config is not None  # likewise
    return GatewaySettings(config, toml(file.plain), source)


def _validated(settings: Table) -> tuple[GatewayFile | None, list[Problem]]:
    try:
        return GatewayFile.model_validate(settings), []
    except ValidationError as error:
        return None, findings(error, GatewayFile)


def _spelled(value: Any) -> Any:
    """Keys with underscores, short forms spelled out: ``order = "srtf"``, an engine by its address alone."""
    if not isinstance(value, dict):
        return value
    table = {str(key).replace("-", "_"): _spelled(inner) for key, inner in value.items()}
    for section, key in _SHORT.items():
        if isinstance(table.get(section), str):
            table[section] = {key: table[section]}
    for name in ("engines", "keys"):
        if isinstance(table.get(name), list):
            table[name] = [_one(name, inner) for inner in table[name]]
    return table


def _one(name: str, value: Any) -> Any:
    return {"url": value} if name == "engines" and isinstance(value, str) else _spelled(value)


def _with_engines(settings: Table, engines: Sequence[str]) -> Table:
    listed = settings.get("engines", [])
    if not engines or not isinstance(listed, list):
        return settings
    return settings | {"engines": [*listed, *({"url": url} for url in engines)]}


def _without_secrets(settings: Table) -> tuple[Table, list[Problem]]:
    """The settings without keys in clear text, which no message may repeat, and that they stood there."""
    problems = []
    out = dict(settings)
    for name in ("engines", "keys"):
        if isinstance(out.get(name), list):
            told = [_stripped(inner, (name, str(at))) for at, inner in enumerate(out[name])]
            out[name] = [inner for inner, _ in told]
            problems += [problem for _, found in told for problem in found]
    found_engine = out.get("discovery", {})
    if isinstance(found_engine, dict) and "engine" in found_engine:
        inner, found = _stripped(found_engine["engine"], ("discovery", "engine"))
        out["discovery"] = found_engine | {"engine": inner}
        problems += found
    return out, problems


def _stripped(value: Any, here: tuple[str, ...]) -> tuple[Any, list[Problem]]:
    if not isinstance(value, dict):
        return value, []
    there = [key for key in _NO_SECRETS if key in value]
    kept = {key: inner for key, inner in value.items() if key not in there}
    return kept, [Problem((*here, key), _NO_SECRETS[key]) for key in there]
