"""``lengthwise serve --demo``."""

from __future__ import annotations

import typer


def show(engine_python: str | None, port: int | None, admin_port: str | None) -> None:
    """Runs the demo."""
    admin = "8001" if admin_port is None else admin_port
    if not admin.isdigit() or int(admin) > 65535:
        raise typer.BadParameter(
            "the demo shows its admin pages: give a port, 0 for a free one", param_hint="--admin-port"
        )
    from lengthwise.gateway import demo

    demo.run(engine_python, port=8000 if port is None else port, admin_port=int(admin))
