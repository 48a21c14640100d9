"""Schedules as deployments that the event engine plays: what is estimated can be held against what comes of it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from lengthwise.cost.memory import HOST_LINK_BYTES_PER_S
from lengthwise.engine import disaggregate
from lengthwise.schedule._prepared import Setting
from lengthwise.schedule._replica import BLOCK_TOKENS, ENDLESS_BLOCKS, longest_blocks, longest_tokens
from lengthwise.schedule.controls import Controls, Strategy
from lengthwise.schedule.estimate import Estimator
from lengthwise.schedule.estimates import Estimates, Reason
from lengthwise.schedule.layout import Stage, rra_layout
from lengthwise.schedule.memory import layer_cache_bytes
from lengthwise.schedule.waa import batches_held, layout_of
from lengthwise.schema.deployment import Deployment, EngineLimits, Handover, KvPlan, Parallelism, Scheduler
from lengthwise.schema.errors import InputError

MOST_SEQS = 2**14
"""Sequences on a side whose number nothing else bounds."""


def deployment_of(estimator: Estimator, controls: Controls, *, threshold: float | None = None) -> Deployment:
    """The schedule on the estimator's cluster, as it is estimated: for a queue that never runs dry.

    RRA is one replica in phases; its memory was counted, and none is ever short. WAA is two: one that encodes, with
    room for as many batches as are counted on (``waa.batches_held``), and one with seats for the decode batch.

    Args:
        estimator: Of the task on its cluster.
        controls: The schedule.
        threshold: Of dynamic adjustment; None: none.

    Raises:
        InputError: The schedule cannot be, or is WAA of an encoder-decoder, whose decoding GPUs the engine gives no
            prompts to project.
    """
    expected = estimator.estimate([controls])
    if not expected.feasible[0]:
        reason = Reason(int(expected.reason[0])).name.lower()
        raise InputError(f"a schedule must fit its cluster to be played; this one does not: {reason}")
    of = _phases if controls.strategy is Strategy.RRA else _sides
    return of(estimator.setting, controls, expected, threshold)


def in_system(estimator: Estimator, controls: Controls) -> int | None:
    """Requests that are let in at a time, one when one ends; None: any number, phases admit by themselves (RRA).

    WAA's encoding would run ahead of its decoding as far as memory goes, and whoever was encoded would wait for a
    seat. So as many are let in as have seats or are on their way through encoding and handover, and two batches more.
    """
    if controls.strategy is Strategy.RRA:
        return None
    expected, setting = estimator.estimate([controls]), estimator.setting
    entry_s = float(expected.latency_s[0] - setting.iterations * expected.decode_s[0])
    under_way = math.ceil(controls.encode_batch * entry_s / float(expected.cycle_s[0]))
    return _seats(setting, controls) + under_way + 2 * controls.encode_batch


def _phases(setting: Setting, controls: Controls, expected: Estimates, threshold: float | None) -> Deployment:
    given: dict[str, float] = {
        "encode_batch": controls.encode_batch,
        "decode_steps": controls.decode_steps,
        "micro_batches": controls.micro_batches or 0,
    }
    if threshold is not None:
        given |= _adjusted(setting, controls, threshold)
        given["decode_batch"] = round(float(expected.decode_batch[0]))
    layout = rra_layout(setting.model.layers, setting.cluster.gpus, controls.tp, controls.tp_groups)
    return _side(
        setting, layout.stages, EngineLimits(max_num_seqs=MOST_SEQS, watermark=0.0), _told("rra", given)
    )


def _sides(setting: Setting, controls: Controls, expected: Estimates, threshold: float | None) -> Deployment:
    if setting.model.encoder_layers:
        raise InputError(
            "WAA of an encoder-decoder cannot be played: its decoding GPUs project prompts, which the engine's do not; "
            f"{setting.model.name} is one"
        )
    layout = layout_of(setting, int(expected.encode_gpus[0]), controls.tp, controls.tp_groups)
    given: dict[str, float] = {"encode_batch": controls.encode_batch}
    given |= {} if threshold is None else _adjusted(setting, controls, threshold)
    held = batches_held(setting.model, len(layout.encode))
    limits = EngineLimits(max_num_seqs=MOST_SEQS, watermark=0.0, max_in_flight=held - 1)
    here = _side(
        setting, layout.encode, limits, _told("encode", given), _room_blocks(setting, controls, held)
    )
    seats = _seats(setting, controls)
    parts = int(expected.micro_batches[0])
    there = _side(
        setting, layout.decode, EngineLimits(max_num_seqs=seats, watermark=0.0, max_in_flight=parts), "even"
    )
    sizes = setting.sizes(layout.stages)
    both_ways = sum(layer_cache_bytes(sizes, stages) for stages in (layout.encode, layout.decode))
    return disaggregate(here, there, Handover(0.0, both_ways, HOST_LINK_BYTES_PER_S))


def _seats(setting: Setting, controls: Controls) -> int:
    return max(round(controls.encode_batch * (setting.task.mean_output_tokens - 1)), 1)


def _side(
    setting: Setting,
    stages: tuple[Stage, ...],
    limits: EngineLimits,
    batching: str,
    blocks: int = ENDLESS_BLOCKS,
) -> Deployment:
    """A replica of groups and single GPUs, a stage each, on the tables of the estimate."""
    cluster, degree = setting.cluster, max(stage.tp for stage in stages)
    single = np.array([int(stage.tp != degree) for stage in stages])
    cost = replace(setting.tables[degree], stage_layers=np.array([stage.layers for stage in stages]))
    if single.any():
        cost = replace(cost, other=setting.tables[1], stage_other=single)
    return Deployment(
        setting.model,
        cluster.gpu,
        cluster.node,
        Parallelism(degree, len(stages), single_stages=int(single.sum())),
        limits,
        Scheduler(batching=batching),
        cost,
        KvPlan(blocks, BLOCK_TOKENS, 0.0, 0.0, 0.0, 0.0),
        longest_tokens(setting),
    )


def _room_blocks(setting: Setting, controls: Controls, batches: int) -> int:
    """Blocks of so many encoded batches at the level, half of a request's last one empty; of the longest at least."""
    seqs = float(batches * controls.encode_batch)
    tokens = float(setting.prompt_tokens_high(np.array([seqs]))[0]) + seqs * BLOCK_TOKENS / 2
    return max(math.ceil(tokens / BLOCK_TOKENS), longest_blocks(setting))


def _adjusted(setting: Setting, controls: Controls, threshold: float) -> dict[str, float]:
    mean = controls.encode_batch * setting.task.mean_prompt_tokens
    return {"threshold": threshold, "prompt_tokens": round(mean)}


def _told(name: str, given: dict[str, float]) -> str:
    return f"{name}({', '.join(f'{key}={value}' for key, value in given.items())})"


__all__ = ["MOST_SEQS", "deployment_of", "in_system"]
