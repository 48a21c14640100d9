"""Choices as plain JSON and back, for the store."""

from __future__ import annotations

import dataclasses
from typing import Any

from lengthwise.schema.estimate import Estimate
from lengthwise.schema.plan import Choice, Point, Standing


def to_dict(choice: Choice) -> dict[str, Any]:
    """What JSON can hold of a choice: everything."""
    return dataclasses.asdict(choice) | {"standing": str(choice.standing)}


def from_dict(told: dict[str, Any]) -> Choice:
    """The choice that ``to_dict`` told of."""
    return Choice(
        **told
        | {
            "standing": Standing(told["standing"]),
            "objective": Estimate(**told["objective"]),
            "capacity_rps": Estimate(**told["capacity_rps"]),
            "at": None if told["at"] is None else _point(told["at"]),
            "points": tuple(_point(point) for point in told["points"]),
        }
    )


def _point(told: dict[str, Any]) -> Point:
    values = {name: Estimate(**estimate) for name, estimate in told["values"].items()}
    return Point(told["rate_rps"], values, told["held"])
