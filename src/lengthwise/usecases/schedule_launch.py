"""Files that run a chosen schedule: engine scripts, gateway settings, the plan, and a README on how to check it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from lengthwise import backend, engine, schedule
from lengthwise.config.scenario import Scenario
from lengthwise.cost import model_error
from lengthwise.gateway.config import Phases
from lengthwise.gateway.plugin.vllm_adapter import TESTED
from lengthwise.report import percent, rounded
from lengthwise.report.schedule import write_schedule_json
from lengthwise.report.schedule_text import tokens_text
from lengthwise.schema.deployment import Deployment, EngineLimits
from lengthwise.schema.errors import InputError
from lengthwise.schema.schedule import LatencyBound, SchedulePlan, Spread, Timeline, Uncertainty
from lengthwise.usecases.schedule import Question, question_of
from lengthwise.usecases.schedule_plan import phases_of
from lengthwise.usecases.schedule_run import requests_to_count, split_in_flight
from lengthwise.usecases.variants import hardware

MIN_STEP_TOKENS, MAX_STEP_TOKENS = 2**13, 2**15
PORT = 8080  # where the gateway listens; engines, or the router in front of them, have the port of the backend
_VLLM = f"vLLM {' or '.join(TESTED)}"
_SPLIT_STEPS = (
    "1. `sh prefill.sh` and `sh decode.sh` start the two sides, `sh router.sh` the router in front of them.\n"
    "2. `lengthwise serve gateway.toml` admits as many requests as the schedule has in flight, at port 8080."
)
_SPLIT_LIMITS = (
    "The batch of a prefill: vLLM takes at most B_E prompts and starts with the waiting ones, B_E or not.",
    "Stages of two tensor-parallel degrees, and several stages on the decode side. Each side is one stage.",
    "Micro-batches (B_m): its decode engine has one batch.",
    "The KV transfer through host memory at the planned pace: it goes from GPU to GPU, which is no slower.",
    "One decode iteration for each prefill: the sides do not wait for each other.",
)
_NOT_RESIZED = (
    "Batches within the threshold of their mean: vLLM does not resize prefills, so the latency may exceed the worst "
    "case above, which assumes the threshold."
)
_PLUGIN_REQUIREMENTS = (
    f"{_VLLM}, as the class was run on no other (`trust_version` in its settings takes any);",
    "one stage and one data-parallel rank, no speculation, no KV connector, so that a step is one batch, a token each;",
    "lengthwise in vLLM's own environment: without it that vLLM does not start.",
)


@dataclass(frozen=True)
class ScheduleLaunch:
    """The written files, and the schedule that they run."""

    files: list[Path]
    report: schedule.Runnable
    message: str  # how it relates to the chosen one, in a sentence or two


def write_schedule_launch(scenario: Scenario, plan: SchedulePlan, folder: Path) -> ScheduleLaunch:
    """Write the files that run the chosen schedule, or the best schedule that engines support if they cannot run it."""
    require_served(scenario)
    requested = question_of(scenario)
    report = schedule.runnable(requested.planner, plan.chosen, plan.bound.limit_s)
    engines, gateway, in_flight = _engines(scenario, requested, report)
    spread, message = _cost_spread(plan, report, requested), runnable_text(plan, report)
    texts = {
        "README.md": readme(plan, report, in_flight, spread, message),
        **backend.scheduled_scripts(engines),
        "gateway.toml": gateway,
        "scenario.toml": scenario.to_toml(),
    }
    files = [*backend.write_texts(folder, texts), folder / backend.PLAN]
    run_plan = plan
    if not report.exact:
        # What follows is known of the choice alone.
        run_plan = replace(
            plan,
            metadata=plan.metadata | {"instead of": f"{plan.chosen.words}: {report.cause}"},
            chosen=report.row,
            search=replace(plan.search, gap=math.inf),
            static=replace(plan.static, front=()),
            drift=(),
            timeline=Timeline(),
            uncertainty=Uncertainty(() if spread is None else (spread,)),
            others=(),
            parts=None,
        )
    write_schedule_json(folder / backend.PLAN, run_plan, None if report.exact else [message])
    return ScheduleLaunch(files, report, message)


def require_served(scenario: Scenario) -> None:
    """Raise InputError if vLLM does not serve this kind of model, so that no files can be written."""
    model, _ = hardware(scenario)
    if model.encoder_layers:
        raise InputError(
            f"what runs a schedule is written for vLLM, and the model must be one that it serves; {model.name} has an "
            f"encoder and a decoder, and {_VLLM} has no such models of text. Leave --deploy away: the plan itself does "
            "not need it"
        )


def _cost_spread(plan: SchedulePlan, report: schedule.Runnable, requested: Question) -> Spread | None:
    if report.exact:
        return next((spread for spread in plan.uncertainty.spreads if spread.source == "costs"), None)
    if not requested.perturbed:
        return None
    setting = requested.planner.estimator.setting
    cluster = replace(setting.cluster, gpus=setting.cluster.gpus // report.pipelines)
    part = schedule.Estimator(setting.task, cluster, setting.model, setting.tables, setting.assumptions)
    bound, perturbed = plan.bound, requested.perturbed
    return schedule.spread_over_costs(
        part, report.row, perturbed, bound.limit_s, worst_case=bound.worst_case, level=model_error.LEVEL
    )


def _engines(
    scenario: Scenario, requested: Question, report: schedule.Runnable
) -> tuple[backend.ScheduledEngines, str, int]:
    """Return (the engines, the text of gateway.toml, the number of requests in flight)."""
    row, task = report.row, requested.task
    step_tokens = 1024 * math.ceil(row.prefill_batch * task.mean_prompt_tokens / 1024)
    step_tokens = min(MAX_STEP_TOKENS, max(MIN_STEP_TOKENS, step_tokens))
    model, gpu = hardware(scenario)

    def deployed(cut: schedule.EngineShape, max_num_seqs: int, max_num_batched_tokens: int) -> Deployment:
        longest = min(model.max_model_len, task.max_prompt_tokens + task.max_output_tokens)
        limits = EngineLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=scenario.engine.gpu_memory_utilization,
            max_model_len=scenario.engine.max_model_len or longest,
        )
        return engine.deploy(model, gpu, node=scenario.deployment.node, tp=cut.tp, pp=cut.stages, limits=limits)

    if report.decode is not None:
        prefill = deployed(report.prefill, row.prefill_batch, step_tokens)
        decode = deployed(report.decode, math.ceil(row.decode_batch) + row.prefill_batch, MIN_STEP_TOKENS)
        in_flight = report.pipelines * split_in_flight(row)
        engines = backend.ScheduledEngines(row.words, prefill, decode, report.pipelines)
        return engines, _split_gateway_toml(in_flight), in_flight
    phases = phases_of(row, task, requested.section.threshold)
    in_flight = phases.request_limit or row.prefill_batch
    plugin: dict[str, object] = {}
    if not plugin_limitation(report):
        plugin = {"prefill_batch": phases.prefill_batch, "decode_steps": phases.decode_steps}
        if phases.threshold is not None:
            plugin["threshold"] = phases.threshold
            plugin["prompt_tokens"] = max(1, round(phases.prefill_batch * task.mean_prompt_tokens))
            plugin["decode_batch"] = max(1, round(phases.decode_batch or phases.prefill_batch))
        plugin["record"] = "phases.jsonl"
    single = deployed(report.prefill, in_flight, step_tokens)
    return backend.ScheduledEngines(row.words, single, phases=plugin), _phases_gateway_toml(phases), in_flight


def _phases_gateway_toml(phases: Phases) -> str:
    threshold = ""
    if phases.threshold is not None:
        threshold = (
            f"threshold = {phases.threshold:g}          # prefills are resized: prompts and decode batch stay within "
            "this share of their means\n"
        )
    return f"""# lengthwise serve gateway.toml: keeps the schedule in front of the engine, by the tokens of its streams.
engines = ["http://127.0.0.1:{backend.PORT}"]

[order]
mode = "rra"
max_wait_s = inf          # a bound on waiting has priority over phases: below what the queue takes, it would undo them

[dispatch.phases]
prefill_batch = {phases.prefill_batch}          # B_E: new requests of a phase
decode_steps = {phases.decode_steps}          # N_D: decode iterations before the next ones are admitted
decode_batch = {phases.decode_batch:.6g}
mean_prompt_tokens = {phases.mean_prompt_tokens:.6g}
max_requests = {phases.max_requests}
{threshold}
[listen]
port = {PORT}
"""


def _split_gateway_toml(in_flight: int) -> str:
    return f"""# lengthwise serve gateway.toml: admits as many requests as the schedule has in flight.
[[engines]]
url = "http://127.0.0.1:{backend.PORT}"      # the router, which sends each to a side that prefills and one that decodes
kind = "openai"
concurrency = {in_flight}
probe = false

[order]
mode = "fcfs"

[listen]
port = {PORT}
"""


def runnable_text(plan: SchedulePlan, report: schedule.Runnable) -> str:
    """Return one or two sentences on which schedule runs and how it compares with the chosen schedule."""
    if report.exact:
        return f"Engines run {report.row.words} as it is."
    times = f"{report.pipelines} times " if report.pipelines > 1 else ""
    share = report.throughput_rps / plan.chosen.throughput_rps
    return (
        f"Engines cannot run {plan.chosen.words}: {report.cause}. {times}{report.row.words} is the best of those that "
        f"they can: {_three(report.throughput_rps)} requests/s, {share:.2f} of the choice, latency "
        f"{_three(report.row.latency_s)} s, {_three(report.row.latency_high_s)} s in the worst case."
    )


def plugin_limitation(report: schedule.Runnable) -> str:
    """Return why a scheduler inside vLLM cannot keep to the phases, or "" if it can."""
    if report.prefill.stages > 1:
        return (
            f"this schedule has {report.prefill.stages} pipeline stages, with as many batches in flight, and the class "
            "of lengthwise runs in an engine of one stage"
        )
    return ""


def readme(plan: SchedulePlan, report: schedule.Runnable, in_flight: int, spread: Spread | None, message: str) -> str:
    """Return the text of the launch folder's README.md. ``spread`` is None if the error of the costs is unknown."""
    is_split = report.decode is not None
    chosen = "; ".join(plan.metadata.values())
    if report.exact:
        chosen += f".\n\nChosen and run: **{report.row.words}**."
    else:
        chosen += f".\n\nChosen: {plan.chosen.words}.\n\n{message}"
    moving = (
        "`lengthwise schedule watch scenario.toml --records RUN` replays what `lengthwise bench` recorded and reports "
        "when the lengths changed, what would then be best, and what changing to it costs."
    )
    if not is_split:
        moving += (
            " `lengthwise schedule run` (above) with `--adapt` does so while it serves: it changes batches and phases, "
            "and reports what another layout would gain and cost."
        )
    parts = [
        f"# {plan.name or report.row.words}",
        chosen,
        "## Expected",
        _expected(plan.bound, report, spread),
        "## Run it",
        _SPLIT_STEPS if is_split else phase_steps(plugin_limitation(report)),
        "## Check it",
        _check(report, in_flight),
        "## When lengths move",
        moving,
    ]
    if is_split:
        limits = _SPLIT_LIMITS if plan.threshold is None else (*_SPLIT_LIMITS, _NOT_RESIZED)
        parts += ["## Differences in vLLM", backend.entries(limits)]
    return "\n\n".join(parts) + "\n"


def _expected(bound: LatencyBound, report: schedule.Runnable, spread: Spread | None) -> str:
    row, bounded = report.row, math.isfinite(bound.limit_s)
    rows = [
        ("requests a second", _three(report.throughput_rps)),
        (f"latency of an output of {tokens_text(bound.tokens)}", f"{_three(row.latency_s)} s"),
        ("the same when batches are heavy", f"{_three(row.latency_high_s)} s"),
        ("latency bound", f"{bound.limit_s:g} s" if bounded else "none"),
        ("requests that are decoded at a time", _three(row.decode_batch)),
        ("a prefill", f"{_three(row.prefill_s)} s"),
        ("a decode iteration", f"{_three(1e3 * row.decode_s)} ms"),
    ]
    table = "\n".join(["| | planned |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
    uncertainty = "The error of the tables is not known."
    if spread is not None:
        ends = ([report.pipelines * end for end in spread.throughput_rps],
                spread.latency_high_s if bound.worst_case else spread.latency_s)  # fmt: skip
        rate, latency = (" to ".join(map(_three, pair)) for pair in ends)
        uncertainty = (
            f"Within the error of the tables: {rate} requests/s, {latency} s"
            f"{' when batches are heavy' if bound.worst_case else ''} ({percent(spread.level)} of {spread.draws} "
            f"draws), and **{'the bound holds' if bounded else 'memory suffices'} in {percent(spread.met_share)} "
            "of the draws**."
        )
    return (
        f"{table}\n\nEstimated, not measured, with the cost tables of scenario.toml. Latency counts from the start of "
        f"a request's prefill, without the wait for it. {uncertainty}"
    )


def phase_steps(limitation: str) -> str:
    """Return how to start the engine and the gateway for a schedule of phases."""
    steps = (
        "1. `sh vllm.sh` starts the engine (`MODEL=... sh vllm.sh` loads another checkpoint). Any OpenAI-compatible "
        "engine that runs as many requests at once will do.\n"
        "2. `lengthwise serve gateway.toml` keeps the schedule in front of it, at port 8080."
    )
    if limitation:
        return steps + (
            f"\n\nA scheduler inside vLLM does not keep these phases: {limitation}. The gateway keeps them from "
            "outside, by the tokens that it sees: vLLM may prefill and decode in one step, and takes up new requests "
            "an iteration or two after they are sent, which counts as part of N_D."
        )
    return steps + (
        "\n\nOr `sh vllm-phases.sh` instead of both: a scheduler inside vLLM keeps the phases, to the step. Do not put "
        "that gateway in front of it: phases would be kept twice. It takes\n\n"
        f"{backend.entries(_PLUGIN_REQUIREMENTS)}\n\n"
        "In another vLLM, or after an error of the class, vLLM keeps its own order, and its log contains "
        '"keeps its own schedule" and the reason. Then no phases are kept: use the gateway, which counts iterations by '
        "the tokens that it sees and needs nothing of the engine."
    )


def _check(report: schedule.Runnable, in_flight: int) -> str:
    command = (
        f"`lengthwise schedule run scenario.toml --engine http://127.0.0.1:{backend.PORT} --schedule {backend.PLAN}"
    )
    if report.decode is None:
        number = requests_to_count(report.row)
        return (
            f"With vllm.sh running and no gateway: {command} --requests {number} --out run` keeps the schedule, plays "
            f"{number:,} requests of these lengths, which fill enough phases to count, and prints batches, iterations, "
            "throughput and latency next to the plan, and whether the bound held."
        )
    text = (
        f"With both sides and the router running and no gateway: {command} --out run` plays requests of these lengths, "
        f"at most {in_flight // report.pipelines:,} at a time, and prints throughput and latency next to the plan, and "
        "whether the bound held."
    )
    if report.pipelines > 1:
        text += (
            f" The plan is of one of {report.pipelines} pairs: give each its own router, and name them all (--engine)."
        )
    return text


def _three(value: float) -> str:
    return rounded(value, math.nan)[0]
