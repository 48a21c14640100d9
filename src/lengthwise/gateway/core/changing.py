"""What of an order may change while requests wait and run."""

from __future__ import annotations

from lengthwise.gateway.config import Order
from lengthwise.policy.named import resolve
from lengthwise.schema.errors import InputError


def check_change(before: Order, after: Order) -> None:
    """Raises InputError where a running scheduler cannot take the order.

    Mode and rank decide what is kept of every request and what engines were told of it. Engines with the plug-in
    were told how many tokens their windows have.
    """
    fixed = ["mode", "rank"] + (["window_tokens"] if after.mode == "engine-plugin" else [])
    for name in fixed:
        if getattr(before, name) != getattr(after, name):
            raise InputError(
                f"order.{name} cannot change while the gateway runs; start it anew with the new file"
            )
    resolve("takeover", after.takeover)
