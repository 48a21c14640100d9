"""What a scenario's lengths must be within to be planned for."""

from __future__ import annotations

from dataclasses import replace

from lengthwise.scenario._schedule import ScheduleSection
from lengthwise.scenario.scenario import Scenario
from lengthwise.scenario.variants import hardware
from lengthwise.schedule import TaskLengths
from lengthwise.schema.errors import InputError
from lengthwise.schema.model import ModelSpec


def model_within(scenario: Scenario, task: TaskLengths) -> ModelSpec:
    """The model with no more tokens a request than engines are told to take, so that lengths that move stay within it.

    Raises:
        InputError: The longest prompt and output are beyond the model, or beyond what engines are told.
    """
    model, limit = hardware(scenario)[0], scenario.engine.max_model_len
    task.require_within(model)
    if limit is None or limit >= model.max_model_len:
        return model
    if task.max_prompt_tokens + task.max_output_tokens > limit:
        raise InputError(
            f"the longest prompt and output ({task.max_prompt_tokens} + {task.max_output_tokens} tokens) must be "
            f"within engine.max_model_len, {limit} tokens; raise it, or give the lengths a lower maximum"
        )
    return replace(model, max_model_len=limit)


def require_reached(section: ScheduleSection, task: TaskLengths) -> None:
    """Nothing, if some output is as long as the fixed length that a bound is for.

    Raises:
        InputError: None is.
    """
    tokens = section.output_tokens
    if tokens is not None and tokens > task.max_output_tokens:
        raise InputError(
            f"schedule.bound_for must be a length that outputs have; it is {tokens} tokens, and the longest output has "
            f"{task.max_output_tokens}. Give one of at most that, or a quantile such as p99"
        )
