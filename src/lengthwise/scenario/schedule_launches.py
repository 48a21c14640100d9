"""What to run for a chosen schedule: engines, a gateway, the plan, and how to check it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from lengthwise import backend, engine, schedule
from lengthwise.gateway.phasing import Phases
from lengthwise.gateway.plugin.check import TESTED
from lengthwise.report.schedule import write_schedule_json
from lengthwise.scenario import model_error
from lengthwise.scenario._schedule_readme import outside, readme, said
from lengthwise.scenario.scenario import Scenario
from lengthwise.scenario.schedule_plans import phases_of
from lengthwise.scenario.schedule_splits import split_in_flight
from lengthwise.scenario.schedules import Question, question_of
from lengthwise.scenario.variants import hardware
from lengthwise.schema.deployment import Deployment, EngineLimits
from lengthwise.schema.errors import InputError
from lengthwise.schema.schedule import SchedulePlan, Spread

LEAST_STEP_TOKENS, MOST_STEP_TOKENS = 2**13, 2**15
_RESIZED = (
    "threshold = {:g}          # encodings are resized: prompts and decode batch stay so near their means"
)
PORT = 8080
"""Where the gateway listens; engines, or the router before them, have the one that a backend gives them."""


@dataclass(frozen=True)
class ScheduleLaunch:
    """What was written.

    Attributes:
        files: Their paths.
        told: The schedule that engines are told.
        said: That in a sentence or two, beside the choice.
    """

    files: list[Path]
    told: schedule.Runnable
    said: str


def write_schedule_launch(scenario: Scenario, plan: SchedulePlan, folder: Path) -> ScheduleLaunch:
    """The files that run a chosen schedule, or the nearest one that engines can be told.

    Raises:
        InputError: vLLM does not serve the model, no schedule that engines can be told meets the bound, or an engine
            would not fit.
        OutputError: A file cannot be written.
    """
    require_served(scenario)
    asked = question_of(scenario)
    told = schedule.runnable(asked.planner, plan.chosen, plan.bound_s)
    why_outside = outside(told)
    engines, gateway, in_flight = _engines(scenario, asked, told, inside=not why_outside)
    doubt = _doubt(plan, told, asked)
    texts = {
        "README.md": readme(plan, told, in_flight, why_outside, doubt),
        **backend.scheduled_scripts(engines),
        "gateway.toml": gateway,
        "scenario.toml": scenario.to_toml(),
    }
    files = backend.write_texts(folder, texts)
    write_schedule_json(
        folder / backend.PLAN, _planned(plan, told, doubt), None if told.exact else [said(plan, told)]
    )
    return ScheduleLaunch([*files, folder / backend.PLAN], told, said(plan, told))


def require_served(scenario: Scenario) -> None:
    """Nothing, if vLLM serves a scenario's kind of model, so that what runs it can be written.

    Raises:
        InputError: It has an encoder.
    """
    model, _ = hardware(scenario)
    if model.encoder_layers:
        raise InputError(
            f"what runs a schedule is written for vLLM, and the model must be one that it serves; {model.name} has an "
            f"encoder and a decoder, and vLLM {' or '.join(TESTED)} has no such models of text. Leave --deploy away: "
            "the plan itself does not need it"
        )


def _doubt(plan: SchedulePlan, told: schedule.Runnable, asked: Question) -> Spread | None:
    """What is run, if costs are off as far as they may be; None: they do not say how far."""
    if told.exact:
        return next((spread for spread in plan.spreads if spread.source == "costs"), None)
    if not asked.off:
        return None
    setting = asked.planner.estimator.setting
    cluster = replace(setting.cluster, gpus=setting.cluster.gpus // told.pipelines)
    part = schedule.Estimator(setting.task, cluster, setting.model, setting.tables, setting.assumptions)
    return schedule.over_costs(
        part, told.row, asked.off, plan.bound_s, worst_case=plan.worst_case, level=model_error.LEVEL
    )


def _planned(plan: SchedulePlan, told: schedule.Runnable, doubt: Spread | None) -> SchedulePlan:
    """The plan of what is run; of another schedule than the chosen one only what is known of it."""
    if told.exact:
        return plan
    kept = {"sides": plan.sides, "front": plan.front, "kinks": plan.kinks, "redeploy": plan.redeploy}
    return SchedulePlan(
        name=plan.name,
        facts=plan.facts | {"instead of": f"{plan.chosen.words}: {told.why}"},
        bound_s=plan.bound_s,
        level=plan.level,
        quantile_tokens=plan.quantile_tokens,
        worst_case=plan.worst_case,
        chosen=told.row,
        gap=math.inf,
        evaluated=plan.evaluated,
        points=plan.points,
        seconds=plan.seconds,
        static=plan.static,
        threshold=plan.threshold,
        spreads=() if doubt is None else (doubt,),
        **kept,  # type: ignore[arg-type]
    )


def _engines(
    scenario: Scenario, asked: Question, told: schedule.Runnable, *, inside: bool
) -> tuple[backend.ScheduledEngines, str, int]:
    """The engines, the gateway's settings, and how many requests they have under way."""
    row, task = told.row, asked.task
    longest = task.max_prompt_tokens + task.max_output_tokens
    step_tokens = _step_tokens(row.encode_batch * task.mean_prompt_tokens)
    if told.decode is None:
        phases = phases_of(row, task, asked.section.threshold)
        most = phases.high or row.encode_batch
        whole = _deployed(scenario, told.encode, most, step_tokens, longest)
        kept = _inside(phases, task) if inside else {}
        engines = backend.ScheduledEngines(row.words, whole, phases=kept)
        return engines, _gateway_of_phases(phases), most
    seats = math.ceil(row.decode_batch) + row.encode_batch
    encode = _deployed(scenario, told.encode, row.encode_batch, step_tokens, longest)
    decode = _deployed(scenario, told.decode, seats, LEAST_STEP_TOKENS, longest)
    engines = backend.ScheduledEngines(row.words, encode, decode, told.pipelines)
    in_flight = told.pipelines * split_in_flight(row)
    return engines, _gateway_of_pairs(in_flight), in_flight


def _step_tokens(tokens: float) -> int:
    return min(MOST_STEP_TOKENS, max(LEAST_STEP_TOKENS, 1024 * math.ceil(tokens / 1024)))


def _deployed(
    scenario: Scenario, cut: schedule.Cut, seqs: int, step_tokens: int, longest_tokens: int
) -> Deployment:
    model, gpu = hardware(scenario)
    setting = scenario.engine
    limits = EngineLimits(
        max_num_seqs=seqs,
        max_num_batched_tokens=step_tokens,
        gpu_memory_utilization=setting.gpu_memory_utilization,
        max_model_len=setting.max_model_len or min(model.max_model_len, longest_tokens),
    )
    node = scenario.deployment.node
    return engine.deploy(model, gpu, node=node, tp=cut.tp, pp=cut.stages, limits=limits)


def _inside(phases: Phases, task: schedule.TaskLengths) -> dict[str, object]:
    """The phases as vLLM's scheduler is told them."""
    told: dict[str, object] = {"encode_batch": phases.encode_batch, "decode_steps": phases.decode_steps}
    if phases.threshold is not None:
        told["threshold"] = phases.threshold
        told["prompt_tokens"] = max(1, round(phases.encode_batch * task.mean_prompt_tokens))
        told["decode_batch"] = max(1, round(phases.decode_batch or phases.encode_batch))
    return told | {"record": "phases.jsonl"}


def _gateway_of_phases(phases: Phases) -> str:
    resized = "" if phases.threshold is None else f"{_RESIZED.format(phases.threshold)}\n"
    return f"""# lengthwise serve gateway.toml: keeps the schedule before the engine, by what its streams tell.
engines = ["http://127.0.0.1:{backend.PORT}"]

[order]
mode = "rra"
max_wait_s = inf          # a bound on waiting goes above phases: below what the queue takes, it would undo them

[dispatch.phases]
encode_batch = {phases.encode_batch}          # B_E: new requests of a phase
decode_steps = {phases.decode_steps}          # N_D: decode iterations before the next ones are let in
decode_batch = {phases.decode_batch:.6g}
mean_prompt_tokens = {phases.mean_prompt_tokens:.6g}
most_in_flight = {phases.most_in_flight}
{resized}
[listen]
port = {PORT}
"""


def _gateway_of_pairs(in_flight: int) -> str:
    return f"""# lengthwise serve gateway.toml: lets in as many requests as the schedule has under way.
[[engines]]
url = "http://127.0.0.1:{backend.PORT}"      # the router, which sends each to a side that encodes and one that decodes
kind = "openai"
in_flight = {in_flight}
probe = false

[order]
mode = "fcfs"

[listen]
port = {PORT}
"""


__all__ = ["ScheduleLaunch", "require_served", "write_schedule_launch"]
