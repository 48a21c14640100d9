"""Options of ``lengthwise serve`` that end the command, and what else each of them takes."""

from __future__ import annotations

from collections.abc import Sequence

import typer

_TAKES: dict[str, tuple[str, ...]] = {
    "hash_key": (),
    "demo": ("engine_python", "port", "admin_port"),
    "report": ("config", "set_", "json", "quiet"),
}


def refuse_others(context: typer.Context) -> None:
    """Refuses what was given beside one of these and would be ignored there."""
    called = {one.name: _called(one.opts) for one in context.command.params if one.name}
    given = [name for name in called if _is_given(context, name)]
    for alone, takes in _TAKES.items():
        if alone not in given:
            continue
        others = [name for name in given if name != alone and name not in takes]
        if others:
            only = f"only {', '.join(called[name] for name in takes)}" if takes else "nothing else"
            raise typer.BadParameter(
                f"does not go with {called[alone]}, which takes {only}", param_hint=called[others[0]]
            )


def _called(options: Sequence[str]) -> str:
    """As people call it: by its long form; an argument in capitals."""
    longest = max(options, key=len)
    return longest if longest.startswith("-") else longest.upper()


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"
