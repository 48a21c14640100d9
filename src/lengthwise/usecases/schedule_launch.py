"""What to run for a chosen schedule: engines, a gateway, the plan, and how to check it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from lengthwise import backend, engine, schedule
from lengthwise.config.scenario import Scenario
from lengthwise.config.variants import hardware
from lengthwise.gateway.config import Phases
from lengthwise.gateway.plugin.vllm_adapter import TESTED
from lengthwise.report import percent, rounded
from lengthwise.report.schedule import write_schedule_json
from lengthwise.report.schedule_text import tokens_said
from lengthwise.schema.deployment import Deployment, EngineLimits
from lengthwise.schema.errors import InputError
from lengthwise.schema.schedule import SchedulePlan, Spread
from lengthwise.usecases import model_error
from lengthwise.usecases.schedule import Question, question_of
from lengthwise.usecases.schedule_plan import phases_of
from lengthwise.usecases.schedule_run import requests_to_count, split_in_flight

SPLIT_CANNOT = (
    "The batch that encodes: vLLM takes at most B_E prompts and begins with what is there, B_E or not.",
    "Stages of two tensor-parallel degrees, and several stages on the decoding side. Each side is one stage here.",
    "Micro-batches (B_m): its decoding engine has one batch.",
    "The cache's way through host memory at the planned pace: it goes from GPU to GPU, which is no slower.",
    "One decode iteration for each encoding: the sides do not wait for each other.",
)
NOT_RESIZED = (
    "Batches kept within the threshold of their mean: its encodings are as heavy as they come, so that the worst case "
    "above, which counts on the threshold, may be passed."
)


INSIDE_NEEDS = (
    f"vLLM {' or '.join(TESTED)}, as the class was run on no other (`trust_version` in its settings takes any);",
    "one stage and one data-parallel rank, no speculation, no KV connector, so that a step is one batch, a token each;",
    "lengthwise in vLLM's own environment: without it that vLLM does not start.",
)


def readme(plan: SchedulePlan, report: schedule.Runnable, in_flight: int, outside: str, warning: Spread | None) -> str:
    """The text of README.md.

    Args:
        plan: The choice.
        report: What is run.
        in_flight: Requests under way at a time.
        outside: Why vLLM's own scheduler cannot keep the phases; "" it can.
        warning: What is run, if costs are off; None: they do not say how far they may be.
    """
    parts = [
        f"# {plan.name or report.row.words}",
        _chosen(plan, report),
        "## Expected",
        _expected(plan, report, warning),
        "## Run it",
        _split_steps() if report.decode else _phase_steps(outside),
        "## Check it",
        _split_check(in_flight, report.pipelines) if report.decode else _phase_check(report),
        "## When lengths move",
        _moving(split=report.decode is not None),
        "## What vLLM does otherwise" if report.decode else "",
        backend.entries(_cannot(plan)) if report.decode else "",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def said(plan: SchedulePlan, report: schedule.Runnable) -> str:
    """What is run, in a sentence or two."""
    if report.exact:
        return f"Engines can be told {report.row.words} as it is."
    times = f"{report.pipelines} times " if report.pipelines > 1 else ""
    share = report.throughput_rps / plan.chosen.throughput_rps
    return (
        f"{plan.chosen.words} cannot be told to engines: {report.cause}. {times}{report.row.words} is the best of those that "
        f"can: {_three(report.throughput_rps)} requests/s, {share:.2f} of the choice, latency "
        f"{_three(report.row.latency_s)} s, {_three(report.row.latency_high_s)} s in the worst case."
    )


def _cannot(plan: SchedulePlan) -> tuple[str, ...]:
    """What of a split vLLM does not do; without batches that are kept even its latencies range further."""
    return SPLIT_CANNOT if plan.threshold is None else (*SPLIT_CANNOT, NOT_RESIZED)


def _chosen(plan: SchedulePlan, report: schedule.Runnable) -> str:
    metadata = "; ".join(plan.metadata.values())
    if report.exact:
        return f"{metadata}.\n\nChosen and run: **{report.row.words}**."
    return f"{metadata}.\n\nChosen: {plan.chosen.words}.\n\n{said(plan, report)}"


def _expected(plan: SchedulePlan, report: schedule.Runnable, warning: Spread | None) -> str:
    row = report.row
    rows = [
        ("requests a second", _three(report.throughput_rps)),
        (f"latency of an output of {tokens_said(plan.quantile_tokens)}", f"{_three(row.latency_s)} s"),
        ("the same when batches are heavy", f"{_three(row.latency_high_s)} s"),
        ("latency bound", f"{plan.bound_s:g} s" if math.isfinite(plan.bound_s) else "none"),
        ("requests that are decoded at a time", _three(row.decode_batch)),
        ("an encoding", f"{_three(row.encode_s)} s"),
        ("a decode iteration", f"{_three(1e3 * row.decode_s)} ms"),
    ]
    lines = ["| | planned |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    note = (
        "Estimated, not measured, with the cost tables of scenario.toml. Latency counts from when a request's encoding "
        "begins; the wait for that is not in it."
    )
    return "\n".join(lines) + f"\n\n{note} {_with_warnings(plan, report, warning)}"


def _with_warnings(plan: SchedulePlan, report: schedule.Runnable, warning: Spread | None) -> str:
    """How far off that may be, and how often the bound would then hold."""
    if warning is None:
        return "How far the tables may be off is not known."
    held_s = warning.latency_high_s if plan.worst_case else warning.latency_s
    rate, latency = (
        " to ".join(map(_three, ends)) for ends in ([report.pipelines * end for end in warning.throughput_rps], held_s)
    )
    what = "the bound" if math.isfinite(plan.bound_s) else "memory"
    verb = "is_satisfied" if math.isfinite(plan.bound_s) else "holds it"
    return (
        f"If the tables are off as far as they may be: {rate} requests/s, {latency} s"
        f"{' when batches are heavy' if plan.worst_case else ''} ({percent(warning.level)} of {warning.draws} draws), and "
        f"**{what} {verb} in {percent(warning.held_share)} of the draws**."
    )


def outside(report: schedule.Runnable) -> str:
    """Why vLLM's own scheduler cannot keep the phases; "" it can."""
    if report.encode.stages > 1:
        return (
            f"this schedule has {report.encode.stages} pipeline stages, with as many batches under way at a time, and "
            "its class holds an engine of one stage"
        )
    return ""


def _phase_steps(outside: str) -> str:
    engine = (
        "`sh vllm.sh` starts the engine (`MODEL=... sh vllm.sh` loads another checkpoint). Any OpenAI-compatible "
        "engine with as many seats does."
    )
    text = _numbered([engine, "`lengthwise serve gateway.toml` keeps the schedule before it, at port 8080."])
    if outside:
        return text + (
            f"\n\nvLLM's own scheduler does not keep these phases: {outside}. The gateway keeps them from outside, by "
            "the tokens that it sees: vLLM may encode and decode in one step, and takes up new requests an iteration "
            "or two after they are sent, which counts as part of N_D."
        )
    return text + (
        "\n\nOr `sh vllm-phases.sh` instead of both: vLLM's own scheduler keeps the phases, to the step. Do not put "
        "that gateway before it: phases would be kept twice. It takes\n\n"
        f"{backend.entries(INSIDE_NEEDS)}\n\n"
        "Where vLLM is another one, or after an error of the class, it keeps vLLM's own order, and its log says "
        '"keeps its own schedule" and why. Then no phases are kept: use the gateway, which counts iterations by the '
        "tokens that it sees and needs nothing of the engine."
    )


def _moving(*, split: bool) -> str:
    watch = (
        "`lengthwise schedule watch scenario.toml --records RUN` replays what `lengthwise bench` recorded and says "
        "when the lengths had moved, what would then be best, and what changing to it costs."
    )
    if split:
        return watch
    return watch + (
        " `lengthwise schedule run` (above) with `--adapt` does so while it serves: it changes batches and phases, "
        "and tells what another layout would bring and take."
    )


def _split_steps() -> str:
    sides = "`sh prefill.sh` and `sh decode.sh` start the two sides, `sh router.sh` the router before them."
    door = "`lengthwise serve gateway.toml` lets in as many requests as the schedule has under way, at port 8080."
    return _numbered([sides, door])


def _phase_check(report: schedule.Runnable) -> str:
    number = requests_to_count(report.row)
    return (
        f"With vllm.sh running and no gateway: `lengthwise schedule run scenario.toml --engine "
        f"http://127.0.0.1:{backend.PORT} --schedule {backend.PLAN} --requests {number} --out run` keeps the "
        f"schedule, plays {number:,} requests of these lengths, which fill enough phases to count, and prints batches, "
        "iterations, throughput and latency beside the plan, and whether the bound held."
    )


def _split_check(in_flight: int, pairs: int) -> str:
    more = (
        f" The plan is of one of {pairs} pairs: give each a router of its own, and name them all (--engine)."
        if pairs > 1
        else ""
    )
    return (
        f"With both sides and the router running and no gateway: `lengthwise schedule run scenario.toml --engine "
        f"http://127.0.0.1:{backend.PORT} --schedule {backend.PLAN} --out run` plays requests of these lengths, at "
        f"most {in_flight // pairs:,} at a time, and prints throughput and latency beside the plan, and whether the "
        f"bound held.{more}"
    )


def _numbered(lines: list[str]) -> str:
    return "\n".join(f"{i}. {line}" for i, line in enumerate(lines, 1))


def _three(value: float) -> str:
    return rounded(value, math.nan)[0]


LEAST_STEP_TOKENS, MOST_STEP_TOKENS = 2**13, 2**15
_RESIZED = "threshold = {:g}          # encodings are resized: prompts and decode batch stay so near their means"
PORT = 8080
"""Where the gateway listens; engines, or the router before them, have the one that a backend gives them."""


@dataclass(frozen=True)
class ScheduleLaunch:
    """What was written.

    Attributes:
        files: Their paths.
        report: The schedule that engines are told.
        message: That in a sentence or two, beside the choice.
    """

    files: list[Path]
    report: schedule.Runnable
    message: str


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
    doubt = _warning(plan, told, asked)
    texts = {
        "README.md": readme(plan, told, in_flight, why_outside, doubt),
        **backend.scheduled_scripts(engines),
        "gateway.toml": gateway,
        "scenario.toml": scenario.to_toml(),
    }
    files = backend.write_texts(folder, texts)
    write_schedule_json(folder / backend.PLAN, _planned(plan, told, doubt), None if told.exact else [said(plan, told)])
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


def _warning(plan: SchedulePlan, report: schedule.Runnable, requested: Question) -> Spread | None:
    """What is run, if costs are off as far as they may be; None: they do not say how far."""
    if report.exact:
        return next((spread for spread in plan.spreads if spread.source == "costs"), None)
    if not requested.off:
        return None
    setting = requested.planner.estimator.setting
    cluster = replace(setting.cluster, gpus=setting.cluster.gpus // report.pipelines)
    part = schedule.Estimator(setting.task, cluster, setting.model, setting.tables, setting.assumptions)
    return schedule.over_costs(
        part, report.row, requested.off, plan.bound_s, worst_case=plan.worst_case, level=model_error.LEVEL
    )


def _planned(plan: SchedulePlan, report: schedule.Runnable, warning: Spread | None) -> SchedulePlan:
    """The plan of what is run; of another schedule than the chosen one only what is known of it."""
    if report.exact:
        return plan
    kept = {"sides": plan.sides, "front": plan.front, "breakpoints": plan.breakpoints, "redeploy": plan.redeploy}
    return SchedulePlan(
        name=plan.name,
        metadata=plan.metadata | {"instead of": f"{plan.chosen.words}: {report.cause}"},
        bound_s=plan.bound_s,
        level=plan.level,
        quantile_tokens=plan.quantile_tokens,
        worst_case=plan.worst_case,
        chosen=report.row,
        gap=math.inf,
        evaluated=plan.evaluated,
        points=plan.points,
        seconds=plan.seconds,
        static=plan.static,
        threshold=plan.threshold,
        spreads=() if warning is None else (warning,),
        **kept,  # type: ignore[arg-type]
    )


def _engines(
    scenario: Scenario, requested: Question, report: schedule.Runnable, *, inside: bool
) -> tuple[backend.ScheduledEngines, str, int]:
    """The engines, the gateway's settings, and how many requests they have under way."""
    row, task = report.row, requested.task
    longest = task.max_prompt_tokens + task.max_output_tokens
    step_tokens = _step_tokens(row.encode_batch * task.mean_prompt_tokens)
    if report.decode is None:
        phases = phases_of(row, task, requested.section.threshold)
        most = phases.high or row.encode_batch
        whole = _deployed(scenario, report.encode, most, step_tokens, longest)
        kept = _inside(phases, task) if inside else {}
        engines = backend.ScheduledEngines(row.words, whole, phases=kept)
        return engines, _gateway_of_phases(phases), most
    max_num_seqs = math.ceil(row.decode_batch) + row.encode_batch
    encode = _deployed(scenario, report.encode, row.encode_batch, step_tokens, longest)
    decode = _deployed(scenario, report.decode, max_num_seqs, LEAST_STEP_TOKENS, longest)
    engines = backend.ScheduledEngines(row.words, encode, decode, report.pipelines)
    in_flight = report.pipelines * split_in_flight(row)
    return engines, _gateway_of_pairs(in_flight), in_flight


def _step_tokens(tokens: float) -> int:
    return min(MOST_STEP_TOKENS, max(LEAST_STEP_TOKENS, 1024 * math.ceil(tokens / 1024)))


def _deployed(scenario: Scenario, cut: schedule.EngineShape, seqs: int, step_tokens: int, longest_tokens: int) -> Deployment:
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
most_in_flight = {phases.max_in_flight}
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
