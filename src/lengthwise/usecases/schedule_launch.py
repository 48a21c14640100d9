"""Files that run a chosen schedule: engine scripts, gateway settings, the plan, and a README on how to check it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from lengthwise import backend, engine, policy, schedule
from lengthwise.config.scenario import Scenario
from lengthwise.cost import model_error
from lengthwise.gateway.config import Phases
from lengthwise.gateway.plugin.vllm_adapter import TESTED
from lengthwise.report import percent, rounded
from lengthwise.report.formatting import counted
from lengthwise.report.schedule import write_schedule_json
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
    "Prefill batches: vLLM admits at most B_E prompts, and does not wait until there are B_E.",
    "Stages: each side is one stage of one tensor-parallel degree.",
    "Micro-batches (B_m): the decode engine has one batch.",
    "KV transfers: vLLM sends the KV cache from GPU to GPU, which is no slower than through host memory as planned.",
    "Pace: the sides do not wait for each other, so that a prefill may take more or less than one decode iteration.",
)
_NOT_RESIZED = (
    "Batches within the threshold of their mean: vLLM does not resize prefills, so the latency may exceed the worst "
    "case above, which assumes the threshold."
)
_PLUGIN_REQUIREMENTS = (
    f"{_VLLM}: the class is tested on no other (`trust_version` in its settings accepts any);",
    "one stage and one data-parallel rank, no speculation, no KV connector: a step is one batch, one token a sequence;",
    "lengthwise in vLLM's own environment: without it vLLM does not start.",
)


@dataclass(frozen=True)
class ScheduleLaunch:
    """The written files, and the schedule that they run."""

    files: list[Path]
    runnable: schedule.Runnable
    message: str  # compares this schedule with the chosen one, in one or two sentences


def write_schedule_launch(scenario: Scenario, plan: SchedulePlan, folder: Path) -> ScheduleLaunch:
    """Write the files that run the chosen schedule, or the best schedule that engines support if they cannot run it."""
    require_served(scenario)
    requested = question_of(scenario)
    runnable = schedule.runnable(requested.planner, plan.chosen, plan.bound.limit_s)
    engines, gateway, in_flight = _engines(scenario, requested, runnable)
    spread, message = _cost_spread(plan, runnable, requested), runnable_text(plan, runnable)
    texts = {
        "README.md": readme(plan, runnable, in_flight, spread, message),
        **backend.scheduled_scripts(engines),
        "gateway.toml": gateway,
        "scenario.toml": scenario.with_absolute_paths().to_toml(),
    }
    files = [*backend.write_texts(folder, texts), folder / backend.PLAN]
    run_plan = plan
    if not runnable.exact:
        # The search and its alternatives describe the chosen schedule, not this one.
        run_plan = replace(
            plan,
            metadata=plan.metadata | {"instead of": f"{plan.chosen.words}: {runnable.cause}"},
            chosen=runnable.row,
            search=replace(plan.search, gap=math.inf),
            static=replace(plan.static, front=()),
            drift=(),
            timeline=Timeline(),
            uncertainty=Uncertainty(() if spread is None else (spread,)),
            others=(),
            parts=None,
        )
    write_schedule_json(folder / backend.PLAN, run_plan, None if runnable.exact else [message])
    return ScheduleLaunch(files, runnable, message)


def require_served(scenario: Scenario) -> None:
    """Raise InputError if vLLM does not serve this kind of model, so that no files can be written."""
    model, _ = hardware(scenario)
    if model.encoder_layers:
        raise InputError(
            f"the files are for vLLM, which must serve the model; {model.name} has an encoder and a decoder, and "
            f"{_VLLM} has no such text models. Leave out --deploy: the plan itself does not need it"
        )


def _cost_spread(plan: SchedulePlan, runnable: schedule.Runnable, requested: Question) -> Spread | None:
    if runnable.exact:
        return next((spread for spread in plan.uncertainty.spreads if spread.source == "costs"), None)
    if not requested.perturbed:
        return None
    setting = requested.planner.estimator.setting
    cluster = replace(setting.cluster, gpus=setting.cluster.gpus // runnable.pipelines)
    part = schedule.Estimator(setting.task, cluster, setting.model, setting.tables, setting.assumptions)
    bound, perturbed = plan.bound, requested.perturbed
    return schedule.spread_over_costs(
        part, runnable.row, perturbed, bound.limit_s, worst_case=bound.worst_case, level=model_error.LEVEL
    )


def _engines(
    scenario: Scenario, requested: Question, runnable: schedule.Runnable
) -> tuple[backend.ScheduledEngines, str, int]:
    """Return (the engines, the text of gateway.toml, the number of requests in flight)."""
    row, task = runnable.row, requested.task
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
        counts_all = replace(policy.scheduler("vllm_v1"), hybrid_kv_cache=False)  # memory, as plans do
        node = scenario.deployment.node
        made = engine.deploy(model, gpu, node=node, tp=cut.tp, pp=cut.stages, limits=limits, scheduler=counts_all)
        return replace(made, scheduler=policy.scheduler("vllm_v1"))

    if runnable.decode is not None:
        prefill = deployed(runnable.prefill, row.prefill_batch, step_tokens)
        decode = deployed(runnable.decode, math.ceil(row.decode_batch) + row.prefill_batch, MIN_STEP_TOKENS)
        in_flight = runnable.pipelines * split_in_flight(row)
        engines = backend.ScheduledEngines(row.words, prefill, decode, runnable.pipelines)
        return engines, _split_gateway_toml(in_flight), in_flight
    phases = phases_of(row, task, requested.section.threshold)
    in_flight = phases.request_limit or row.prefill_batch
    plugin: dict[str, object] = {}
    if not plugin_limitation(runnable):
        plugin = {"prefill_batch": phases.prefill_batch, "decode_steps": phases.decode_steps}
        if phases.threshold is not None:
            plugin["threshold"] = phases.threshold
            plugin["prompt_tokens"] = max(1, round(phases.prefill_batch * task.mean_prompt_tokens))
            plugin["decode_batch"] = max(1, round(phases.decode_batch or phases.prefill_batch))
        plugin["record"] = "phases.jsonl"
    single = deployed(runnable.prefill, in_flight, step_tokens)
    return backend.ScheduledEngines(row.words, single, phases=plugin), _phases_gateway_toml(phases), in_flight


def _phases_gateway_toml(phases: Phases) -> str:
    threshold = ""
    if phases.threshold is not None:
        threshold = (
            f"threshold = {phases.threshold:g}          # prefills are resized: prompts and decode batch stay within "
            "this share of their means\n"
        )
    return f"""# lengthwise serve gateway.toml: runs the schedule in front of the engine, by the tokens of its streams.
engines = ["http://127.0.0.1:{backend.PORT}"]

[order]
mode = "rra"
max_wait_s = inf          # a shorter bound than the waits in the queue would let requests precede the phases

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
url = "http://127.0.0.1:{backend.PORT}"      # the router, which sends each request to a prefill and a decode engine
kind = "openai"
concurrency = {in_flight}
probe = false

[order]
mode = "fcfs"

[listen]
port = {PORT}
"""


def runnable_text(plan: SchedulePlan, runnable: schedule.Runnable) -> str:
    """Return one or two sentences on which schedule runs and how it compares with the chosen schedule."""
    if runnable.exact:
        return f"Engines run {runnable.row.words} unchanged."
    times = f"{runnable.pipelines} times " if runnable.pipelines > 1 else ""
    share = runnable.throughput_rps / plan.chosen.throughput_rps
    return (
        f"Engines cannot run {plan.chosen.words}: {runnable.cause}. {times}{runnable.row.words} is the best that they "
        f"can run: {_three(runnable.throughput_rps)} requests/s, {share:.2f} of the choice, latency "
        f"{_three(runnable.row.latency_s)} s, {_three(runnable.row.latency_high_s)} s in the worst case."
    )


def plugin_limitation(runnable: schedule.Runnable) -> str:
    """Return the reason why a scheduler inside vLLM cannot run the phases, or "" if it can."""
    if runnable.prefill.stages > 1:
        return (
            f"this schedule has {runnable.prefill.stages} pipeline stages, with as many batches in flight, and "
            "lengthwise's scheduler class needs an engine with one stage"
        )
    return ""


def readme(plan: SchedulePlan, runnable: schedule.Runnable, in_flight: int, spread: Spread | None, message: str) -> str:
    """Return the text of the launch folder's README.md. ``spread`` is None if the error of the costs is unknown."""
    is_split = runnable.decode is not None
    chosen = "; ".join(plan.metadata.values())
    if runnable.exact:
        chosen += f".\n\nChosen and run: **{runnable.row.words}**."
    else:
        chosen += f".\n\nChosen: {plan.chosen.words}.\n\n{message}"
    moving = (
        "`lengthwise schedule watch scenario.toml --records RUN` replays requests that `lengthwise bench` recorded. It "
        "reports when the lengths changed, which schedule is then the best, and the cost of the change."
    )
    if not is_split:
        moving += (
            " `lengthwise schedule run` (above) with `--adapt` does so while it serves: it changes batches and phases, "
            "and reports the gain and the cost of another layout."
        )
    parts = [
        f"# {plan.name or runnable.row.words}",
        chosen,
        "## Expected",
        _expected(plan.bound, runnable, spread),
        "## Run it",
        _SPLIT_STEPS if is_split else phase_steps(plugin_limitation(runnable)),
        "## Check it",
        _check(runnable, in_flight),
        "## When lengths change",
        moving,
    ]
    if is_split:
        limits = _SPLIT_LIMITS if plan.threshold is None else (*_SPLIT_LIMITS, _NOT_RESIZED)
        parts += ["## Differences in vLLM", backend.entries(limits)]
    return "\n\n".join(parts) + "\n"


def _expected(bound: LatencyBound, runnable: schedule.Runnable, spread: Spread | None) -> str:
    row, bounded = runnable.row, math.isfinite(bound.limit_s)
    rows = [
        ("requests a second", _three(runnable.throughput_rps)),
        (f"latency of an output of {counted(bound.tokens, 'token')}", f"{_three(row.latency_s)} s"),
        ("the same in the worst case (heavy batches)", f"{_three(row.latency_high_s)} s"),
        ("latency bound", f"{bound.limit_s:g} s" if bounded else "none"),
        ("requests that decode at a time", _three(row.decode_batch)),
        ("a prefill", f"{_three(row.prefill_s)} s"),
        ("a decode iteration", f"{_three(1e3 * row.decode_s)} ms"),
    ]
    table = "\n".join(["| | planned |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])
    uncertainty = "The error of the cost tables is not known."
    if spread is not None:
        ends = ([runnable.pipelines * end for end in spread.throughput_rps],
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
    """Return the steps that start the engine and the gateway for a schedule of phases."""
    steps = (
        "1. `sh vllm.sh` starts the engine (`MODEL=... sh vllm.sh` loads another checkpoint). Any OpenAI-compatible "
        "engine that runs as many requests at once will do.\n"
        "2. `lengthwise serve gateway.toml` runs the schedule in front of it, at port 8080."
    )
    if limitation:
        return steps + (
            f"\n\nA scheduler inside vLLM cannot run these phases: {limitation}. The gateway runs them from outside, "
            "by the tokens that it sees: vLLM may prefill and decode in one step, and admits new requests one or two "
            "iterations after the gateway sends them, which count as part of N_D."
        )
    return steps + (
        "\n\nOr `sh vllm-phases.sh` instead of both: a scheduler inside vLLM runs the phases exactly, step by step. Do "
        "not put that gateway in front of it, because both would form phases. It needs\n\n"
        f"{backend.entries(_PLUGIN_REQUIREMENTS)}\n\n"
        "In another version, or after an error of the class, vLLM schedules in its own order, and its log contains "
        '"keeps its own schedule" and the reason. Then nothing runs the phases: use the gateway, which counts '
        "iterations by the tokens that it sees and works with any engine."
    )


def _check(runnable: schedule.Runnable, in_flight: int) -> str:
    command = (
        f"`lengthwise schedule run scenario.toml --engine http://127.0.0.1:{backend.PORT} --schedule {backend.PLAN}"
    )
    if runnable.decode is None:
        number = requests_to_count(runnable.row)
        return (
            f"With vllm.sh running and no gateway: {command} --requests {number} --out run` runs the schedule with "
            f"{number:,} requests of these lengths, enough to measure its phases. It prints batches, iterations, "
            "throughput and latency next to the plan, and whether the bound held."
        )
    text = (
        f"With both sides and the router running and no gateway: {command} --out run` sends requests of these lengths, "
        f"at most {in_flight // runnable.pipelines:,} at a time, and prints throughput and latency next to the plan, "
        "and whether the bound held."
    )
    if runnable.pipelines > 1:
        text += (
            f" The plan is for one of {runnable.pipelines} pairs: give each its own router, and name all (--engine)."
        )
    return text


def _three(value: float) -> str:
    return rounded(value, math.nan)[0]
