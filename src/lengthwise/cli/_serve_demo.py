"""``lengthwise serve --demo``."""

from __future__ import annotations

from collections.abc import Iterable

import typer


def show(
    engine_python: str | None, port: int | None, admin_port: str | None, *, others: Iterable[object]
) -> None:
    """Runs the demo; ``others`` are options that it does not take."""
    if any(other is not None for other in others):
        raise typer.BadParameter("takes only --engine-python, --port and --admin-port", param_hint="--demo")
    admin = "8001" if admin_port is None else admin_port
    if not admin.isdigit() or int(admin) > 65535:
        raise typer.BadParameter(
            "the demo shows its admin pages: give a port, 0 for a free one", param_hint="--admin-port"
        )
    from lengthwise.gateway import demo

    demo.run(engine_python, port=8000 if port is None else port, admin_port=int(admin))
