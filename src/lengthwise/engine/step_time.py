"""The seconds of one step of a deployment, for whoever lets time pass outside of a simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lengthwise.engine._cost_reading import CostReader
from lengthwise.schema.cost_tables import CostTables

StepTime = Callable[[int, int, Sequence[tuple[int, int]]], float]
"""Seconds of a step of (decodes, KV tokens that they read, prompts as (chunk, context before it))."""


def step_time(cost: CostTables) -> StepTime:
    """What a step takes through all pipeline stages, as the engine reads the tables."""
    reader = CostReader(cost)

    def seconds(decodes: int, kv_tokens: int, prompts: Sequence[tuple[int, int]]) -> float:
        return sum(reader.step(decodes, kv_tokens, list(prompts)).stages_s)

    return seconds


__all__ = ["StepTime", "step_time"]
